//! Loops over vectors whose length is no multiple of the lanes: the tail goes through a small buffer, so that
//! every element, wherever it stands, is computed by the same instructions.

use crate::simd::Isa;

/// The lanes of one step of [`for_lanes`]: all, or the first few.
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

/// Calls `f(isa, first, part)` for consecutive groups of at most `LANES` of `n` elements.
#[inline(always)]
pub(crate) fn for_lanes<I: Isa>(isa: I, n: usize, mut f: impl FnMut(I, usize, Part)) {
    let mut at = 0;
    while at + I::LANES <= n {
        f(isa, at, Part(I::LANES));
        at += I::LANES;
    }
    if at < n {
        f(isa, at, Part(n - at));
    }
}
