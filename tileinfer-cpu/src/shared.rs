//! A slice that several threads write, each its own elements.

use std::marker::PhantomData;

/// A mutable slice handed to all items of a job; who writes what is the promise of [`SharedMut::range`].
pub(crate) struct SharedMut<'a, T> {
    start: *mut T,
    len: usize,
    borrow: PhantomData<&'a mut [T]>,
}

impl<T> Clone for SharedMut<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for SharedMut<'_, T> {}

// SAFETY: it is a `&mut [T]` whose parts are given to threads; `range` demands that they do not overlap.
unsafe impl<T: Send> Send for SharedMut<'_, T> {}
// SAFETY: as above.
unsafe impl<T: Send> Sync for SharedMut<'_, T> {}

impl<'a, T> SharedMut<'a, T> {
    pub(crate) fn new(slice: &'a mut [T]) -> Self {
        SharedMut {
            start: slice.as_mut_ptr(),
            len: slice.len(),
            borrow: PhantomData,
        }
    }

    /// Elements `first .. first + len`.
    ///
    /// # Safety
    /// No other thread may touch these elements while the result lives, nor may another part of this thread.
    ///
    /// # Panics
    /// If they are not within the slice.
    #[inline(always)]
    pub(crate) unsafe fn range(&self, first: usize, len: usize) -> &'a mut [T] {
        assert!(
            first <= self.len && len <= self.len - first,
            "a part outside of its slice"
        );
        // SAFETY: within the slice, and not aliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(first), len) }
    }
}
