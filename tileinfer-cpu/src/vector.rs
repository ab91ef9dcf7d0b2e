//! Loops over vectors whose length is no multiple of the lanes: the tail goes through a small buffer, so that
//! every element, wherever it stands, is computed by the same instructions.

use crate::simd::Isa;

/// The lanes of one step of [`parts`]: all, or the first few.
#[derive(Clone, Copy)]
pub(crate) struct Part(usize);

/// The most lanes of any level.
const MOST: usize = 16;

impl Part {
    /// The first elements of `from`; the lanes past the part's end are zero.
    #[inline(always)]
    pub(crate) fn load<I: Isa>(self, isa: I, from: &[f32]) -> I::V {
        self.load_or(isa, from, 0.0)
    }

    /// The first elements of `from`; the lanes past the part's end are `fill`.
    #[inline(always)]
    pub(crate) fn load_or<I: Isa>(self, isa: I, from: &[f32], fill: f32) -> I::V {
        let from = &from[..self.0];
        if self.0 == I::LANES {
            // SAFETY: LANES elements, just checked.
            return unsafe { isa.load(from.as_ptr()) };
        }
        let mut buffer = [fill; MOST];
        buffer[..self.0].copy_from_slice(from);
        // SAFETY: the buffer holds at least LANES elements.
        unsafe { isa.load(buffer.as_ptr()) }
    }

    /// Writes the part's lanes to the start of `to`.
    #[inline(always)]
    pub(crate) fn store<I: Isa>(self, isa: I, to: &mut [f32], v: I::V) {
        let to = &mut to[..self.0];
        if self.0 == I::LANES {
            // SAFETY: LANES elements, just checked.
            unsafe { isa.store(to.as_mut_ptr(), v) };
            return;
        }
        let mut buffer = [0.0; MOST];
        // SAFETY: the buffer holds at least LANES elements.
        unsafe { isa.store(buffer.as_mut_ptr(), v) };
        to.copy_from_slice(&buffer[..self.0]);
    }
}

/// Consecutive groups of at most `LANES` of `n` elements: where each begins, and how much of it there is.
///
/// An iterator and not a function that takes a closure: closures do not inherit the instruction set of the
/// function they stand in, and each vector operation in them would become a call.
#[inline(always)]
pub(crate) fn parts<I: Isa>(_isa: I, n: usize) -> Parts<I> {
    Parts {
        at: 0,
        n,
        isa: std::marker::PhantomData,
    }
}

/// See [`parts`].
pub(crate) struct Parts<I> {
    at: usize,
    n: usize,
    isa: std::marker::PhantomData<I>,
}

impl<I: Isa> Iterator for Parts<I> {
    type Item = (usize, Part);
    #[inline(always)]
    fn next(&mut self) -> Option<(usize, Part)> {
        let at = self.at;
        if at >= self.n {
            return None;
        }
        self.at += I::LANES;
        Some((at, Part(I::LANES.min(self.n - at))))
    }
}
