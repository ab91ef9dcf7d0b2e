//! The instruction sets, and the one small vocabulary in which every kernel is written.
//!
//! A kernel is a struct that implements [`Kernel`]: its `run` is generic over an [`Isa`], whose value is a
//! token that exists only on a machine that can execute it. [`Level`] is the same promise as a plain value:
//! it is obtained from detection, never built from thin air, and [`Level::dispatch`] compiles `run` once per
//! instruction set. What this module decided not to know: what the kernels compute.
//!
//! Sums: results may differ between instruction sets (the number of lanes is part of the order of a sum),
//! never within one. [`Isa::reduce_add4`] and [`Isa::reduce_add`] fold lanes `i` and `i + LANES/2`, then
//! `i` and `i + LANES/4`, and so on, whatever the number of vectors folded together.

#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
mod bytes;
#[cfg(target_arch = "aarch64")]
mod neon;
mod portable;

pub(crate) use bytes::{ByteDot, ByteKernel};

/// Vector operations of one instruction set.
///
/// Every method is `#[inline(always)]`: a kernel is compiled as a whole, with the features of its level.
pub(crate) trait Isa: Copy + Send + Sync + 'static {
    /// A vector of `LANES` f32.
    type V: Copy;
    /// Lanes of a vector.
    const LANES: usize;
    /// Activation rows of the largest register tile of the linear kernel (4 weight rows times these).
    const TILE_ROWS: usize;
    /// The same where two bf16 are multiplied with two others at a time; 0 without such an instruction.
    const DOT_ROWS: usize = 0;
    /// Queries of the largest register tile of attention (times two vectors of keys or values).
    const TILE_QUERIES: usize;

    /// All lanes `x`.
    fn splat(self, x: f32) -> Self::V;
    /// Lanes from memory, unaligned.
    ///
    /// # Safety
    /// `LANES` f32 must be readable at `p`.
    unsafe fn load(self, p: *const f32) -> Self::V;
    /// Lanes to memory, unaligned.
    ///
    /// # Safety
    /// `LANES` f32 must be writable at `p`.
    unsafe fn store(self, p: *mut f32, v: Self::V);
    fn add(self, a: Self::V, b: Self::V) -> Self::V;
    fn sub(self, a: Self::V, b: Self::V) -> Self::V;
    fn mul(self, a: Self::V, b: Self::V) -> Self::V;
    fn div(self, a: Self::V, b: Self::V) -> Self::V;
    /// `a * b + c`, fused where the instruction set has it.
    fn mul_add(self, a: Self::V, b: Self::V, c: Self::V) -> Self::V;
    /// The larger of two, `b` where either is NaN.
    fn max(self, a: Self::V, b: Self::V) -> Self::V;
    /// The smaller of two, `b` where either is NaN.
    fn min(self, a: Self::V, b: Self::V) -> Self::V;
    /// `yes` where `x > 0`, else `no`.
    fn select_positive(self, x: Self::V, yes: Self::V, no: Self::V) -> Self::V;
    /// The bits of `k` shifted left by 23 and added, as integers, to the bits of `x`: multiplies `x` by
    /// two to the integer that was rounded into the low bits of `k`.
    fn add_exponent(self, x: Self::V, k: Self::V) -> Self::V;
    /// Rounds to the nearest bf16 value, ties to even; NaN stays NaN.
    fn round_bf16(self, v: Self::V) -> Self::V;

    /// `2 * LANES` bf16 from memory, widened: those of even index and those of odd index.
    ///
    /// # Safety
    /// `2 * LANES` bf16 (any alignment) must be readable at `p`.
    unsafe fn load_bf16_pair(self, p: *const u8) -> (Self::V, Self::V);
    /// `2 * LANES` bf16 from memory, as they are, for [`Isa::dot_bf16`].
    ///
    /// # Safety
    /// `2 * LANES` bf16 (any alignment) must be readable at `p`.
    #[inline(always)]
    unsafe fn load_bf16_raw(self, _p: *const u8) -> Self::V {
        unreachable!("no dot product of bf16")
    }
    /// Pairs of bf16 from two vectors of f32 that are such values, for [`Isa::dot_bf16`].
    #[inline(always)]
    fn pair_bf16(self, _even: Self::V, _odd: Self::V) -> Self::V {
        unreachable!("no dot product of bf16")
    }
    /// `a.even * b.even + a.odd * b.odd + c` of pairs of bf16, as the instruction rounds it; subnormals count as zero.
    #[inline(always)]
    fn dot_bf16(self, _a: Self::V, _b: Self::V, _c: Self::V) -> Self::V {
        unreachable!("no dot product of bf16")
    }
    /// `2 * LANES` IEEE half floats from memory, widened: the first `LANES` and the others.
    ///
    /// # Safety
    /// `2 * LANES` f16 (any alignment) must be readable at `p`.
    unsafe fn load_f16_pair(self, p: *const u8) -> (Self::V, Self::V);
    /// `LANES` signed bytes from memory, as f32.
    ///
    /// # Safety
    /// `LANES` bytes must be readable at `p`.
    unsafe fn load_i8(self, p: *const u8) -> Self::V;
    /// `2 * LANES` f32: those of even index and those of odd index.
    ///
    /// # Safety
    /// `2 * LANES` f32 must be readable at `p`.
    unsafe fn load_deinterleaved(self, p: *const f32) -> (Self::V, Self::V);
    /// The inverse of [`Isa::load_deinterleaved`].
    ///
    /// # Safety
    /// `2 * LANES` f32 must be writable at `p`.
    unsafe fn store_interleaved(self, p: *mut f32, even: Self::V, odd: Self::V);

    /// The four sums over lanes, in the fixed tree order.
    fn reduce_add4(self, v: [Self::V; 4]) -> [f32; 4];
    /// The sum over lanes, in the fixed tree order.
    #[inline(always)]
    fn reduce_add(self, v: Self::V) -> f32 {
        self.reduce_add4([v; 4])[0]
    }
    /// The largest lane.
    fn reduce_max(self, v: Self::V) -> f32;
    /// Asks for the cache line at `p`, into the second level cache; any address is fine.
    fn prefetch(self, p: *const u8);
}

/// A computation written once for all instruction sets. `run` must be `#[inline(always)]`.
pub(crate) trait Kernel {
    type Output;
    fn run<I: Isa>(self, isa: I) -> Self::Output;
}

/// An instruction set that this machine can run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Level(Set);

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Set {
    #[cfg(target_arch = "x86_64")]
    Avx512Bf16,
    #[cfg(target_arch = "x86_64")]
    Avx512,
    #[cfg(target_arch = "x86_64")]
    Avx2,
    #[cfg(target_arch = "aarch64")]
    Neon,
    Portable,
}

impl Level {
    /// Every level this machine can run, the fastest first; the last is always `portable`.
    pub fn all() -> Vec<Level> {
        let mut levels = Vec::new();
        #[cfg(target_arch = "x86_64")]
        {
            if avx512::Avx512::<true>::detect().is_some() {
                levels.push(Level(Set::Avx512Bf16));
            }
            if avx512::Avx512::<false>::detect().is_some() {
                levels.push(Level(Set::Avx512));
            }
            if avx2::Avx2::detect().is_some() {
                levels.push(Level(Set::Avx2));
            }
        }
        #[cfg(target_arch = "aarch64")]
        if neon::Neon::detect().is_some() {
            levels.push(Level(Set::Neon));
        }
        levels.push(Level(Set::Portable));
        levels
    }

    /// The fastest level of this machine.
    pub fn best() -> Level {
        Level::all()[0]
    }

    /// The level of that name (see [`Level::name`]), if this machine can run it.
    pub fn named(name: &str) -> Option<Level> {
        Level::all().into_iter().find(|level| level.name() == name)
    }

    /// `avx512_bf16`, `avx512`, `avx2`, `neon` or `portable`.
    pub fn name(self) -> &'static str {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16 => "avx512_bf16",
            #[cfg(target_arch = "x86_64")]
            Set::Avx512 => "avx512",
            #[cfg(target_arch = "x86_64")]
            Set::Avx2 => "avx2",
            #[cfg(target_arch = "aarch64")]
            Set::Neon => "neon",
            Set::Portable => "portable",
        }
    }

    /// Lanes of f32 in a vector.
    pub fn lanes(self) -> usize {
        struct Lanes;
        impl Kernel for Lanes {
            type Output = usize;
            #[inline(always)]
            fn run<I: Isa>(self, _isa: I) -> usize {
                I::LANES
            }
        }
        self.dispatch(Lanes)
    }

    /// Whether this level multiplies pairs of bf16.
    pub(crate) fn has_dot(self) -> bool {
        struct HasDot;
        impl Kernel for HasDot {
            type Output = bool;
            #[inline(always)]
            fn run<I: Isa>(self, _isa: I) -> bool {
                I::DOT_ROWS > 0
            }
        }
        self.dispatch(HasDot)
    }

    /// Runs `kernel` compiled for this level.
    #[inline]
    pub(crate) fn dispatch<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            // SAFETY: a `Level` of this set is only built by `Level::all` after detection.
            Set::Avx512Bf16 => unsafe { avx512::run_dot(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Set::Avx512 => unsafe { avx512::run(kernel) },
            #[cfg(target_arch = "x86_64")]
            // SAFETY: as above.
            Set::Avx2 => unsafe { avx2::run(kernel) },
            #[cfg(target_arch = "aarch64")]
            // SAFETY: as above.
            Set::Neon => unsafe { neon::run(kernel) },
            Set::Portable => kernel.run(portable::Portable),
        }
    }

    /// Runs `kernel` compiled for the byte products of this level: of AVX-512 those of AVX-512 VNNI where there is
    /// that, else those of AVX2; of `neon` the plain ones, which compilers vectorise.
    #[inline]
    pub(crate) fn dispatch_bytes<K: ByteKernel>(self, kernel: K) {
        match self.0 {
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16 | Set::Avx512 if bytes::x86::Vnni::detect().is_some() => {
                // SAFETY: just detected.
                unsafe { bytes::x86::run_vnni(kernel) }
            }
            #[cfg(target_arch = "x86_64")]
            Set::Avx512Bf16 | Set::Avx512 if avx2::Avx2::detect().is_none() => {
                kernel.run(bytes::Plain)
            }
            #[cfg(target_arch = "x86_64")]
            // SAFETY: just detected, or a `Level` of this set, which is only built after detection.
            Set::Avx512Bf16 | Set::Avx512 | Set::Avx2 => unsafe { avx2::run_bytes(kernel) },
            #[cfg(target_arch = "aarch64")]
            Set::Neon => kernel.run(bytes::Plain),
            Set::Portable => kernel.run(bytes::Plain),
        }
    }
}

#[cfg(test)]
mod tests;
