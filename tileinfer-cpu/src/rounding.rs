//! To which values results are rounded when they are written.

use crate::simd::Isa;

/// The type whose values an operation writes; memory holds f32 either way.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Rounding {
    /// Every f32.
    None,
    /// Only those that bf16 has, ties to even.
    Bf16,
}

impl Rounding {
    #[inline(always)]
    pub(crate) fn apply<I: Isa>(self, isa: I, v: I::V) -> I::V {
        match self {
            Rounding::None => v,
            Rounding::Bf16 => isa.round_bf16(v),
        }
    }
}
