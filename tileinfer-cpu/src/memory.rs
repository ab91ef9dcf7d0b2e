//! Zeroed memory that starts at a cache line.

use tileinfer::memory::wish_for_large_pages;

/// Bytes of a cache line.
pub(crate) const LINE: usize = 64;

/// `len` elements from the first cache line on of a vector that is a little longer.
///
/// The vector comes zeroed from the operating system, page by page as it is touched: a large cache costs
/// nothing until it is used, which an allocation with an alignment of its own would not give.
#[derive(Debug)]
pub(crate) struct Aligned<T> {
    data: Vec<T>,
    start: usize,
    len: usize,
}

impl<T: Copy> Aligned<T> {
    /// `len` elements, `zero` each.
    pub(crate) fn new(len: usize, zero: T) -> Self {
        let data = vec![zero; len + LINE / size_of::<T>()];
        wish_for_large_pages(&data);
        let start = (data.as_ptr().addr().wrapping_neg() % LINE) / size_of::<T>();
        Aligned { data, start, len }
    }
}

impl<T> std::ops::Deref for Aligned<T> {
    type Target = [T];
    fn deref(&self) -> &[T] {
        &self.data[self.start..self.start + self.len]
    }
}

impl<T> std::ops::DerefMut for Aligned<T> {
    fn deref_mut(&mut self) -> &mut [T] {
        &mut self.data[self.start..self.start + self.len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn starts_at_a_line_and_is_zero() {
        for len in [0, 1, 63, 1000] {
            let mut bytes = Aligned::new(len, 0_u8);
            assert_eq!(bytes.as_ptr().addr() % LINE, 0);
            assert!(bytes.len() == len && bytes.iter().all(|b| *b == 0));
            bytes.fill(1);
            let floats = Aligned::new(len, 0.0_f32);
            assert_eq!((floats.as_ptr().addr() % LINE, floats.len()), (0, len));
        }
    }
}
