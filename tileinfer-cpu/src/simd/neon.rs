//! NEON (every aarch64 has it): 4 lanes, 32 registers.

use std::arch::aarch64::*;

use super::{Isa, Kernel};

/// Exists only on machines with NEON.
#[derive(Debug, Clone, Copy)]
pub(super) struct Neon(());

impl Neon {
    pub(super) fn detect() -> Option<Self> {
        std::arch::is_aarch64_feature_detected!("neon").then_some(Neon(()))
    }
}

/// # Safety
/// [`Neon::detect`] must have succeeded on this machine.
#[target_feature(enable = "neon")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Neon(()))
}

/// An expression of intrinsics of this level.
macro_rules! neon {
    ($e:expr) => {{
        // SAFETY: `self` exists, so the machine has the feature; pointers are the caller's promise.
        unsafe { $e }
    }};
}

impl Isa for Neon {
    type V = float32x4_t;
    const LANES: usize = 4;
    const TILE_ROWS: usize = 4;
    const TILE_QUERIES: usize = 8;

    #[inline(always)]
    fn splat(self, x: f32) -> float32x4_t {
        neon!(vdupq_n_f32(x))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> float32x4_t {
        neon!(vld1q_f32(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: float32x4_t) {
        neon!(vst1q_f32(p, v));
    }
    #[inline(always)]
    fn add(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        neon!(vaddq_f32(a, b))
    }
    #[inline(always)]
    fn sub(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        neon!(vsubq_f32(a, b))
    }
    #[inline(always)]
    fn mul(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        neon!(vmulq_f32(a, b))
    }
    #[inline(always)]
    fn div(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        neon!(vdivq_f32(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: float32x4_t, b: float32x4_t, c: float32x4_t) -> float32x4_t {
        neon!(vfmaq_f32(c, a, b))
    }
    #[inline(always)]
    fn max(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        neon!(vbslq_f32(vcgtq_f32(a, b), a, b))
    }
    #[inline(always)]
    fn min(self, a: float32x4_t, b: float32x4_t) -> float32x4_t {
        neon!(vbslq_f32(vcltq_f32(a, b), a, b))
    }
    #[inline(always)]
    fn select_positive(self, x: float32x4_t, yes: float32x4_t, no: float32x4_t) -> float32x4_t {
        neon!(vbslq_f32(vcgtq_f32(x, vdupq_n_f32(0.0)), yes, no))
    }
    #[inline(always)]
    fn add_exponent(self, x: float32x4_t, k: float32x4_t) -> float32x4_t {
        neon!(vreinterpretq_f32_u32(vaddq_u32(
            vreinterpretq_u32_f32(x),
            vshlq_n_u32::<23>(vreinterpretq_u32_f32(k)),
        )))
    }
    #[inline(always)]
    fn round_bf16(self, v: float32x4_t) -> float32x4_t {
        neon!({
            let bits = vreinterpretq_u32_f32(v);
            let lsb = vandq_u32(vshrq_n_u32::<16>(bits), vdupq_n_u32(1));
            let bias = vaddq_u32(lsb, vdupq_n_u32(0x7fff));
            let rounded = vandq_u32(vaddq_u32(bits, bias), vdupq_n_u32(0xffff_0000));
            vbslq_f32(
                vceqq_f32(v, v),
                vreinterpretq_f32_u32(rounded),
                vdupq_n_f32(f32::NAN),
            )
        })
    }
    #[inline(always)]
    unsafe fn load_bf16_pair(self, p: *const u8) -> (float32x4_t, float32x4_t) {
        neon!({
            let raw = vreinterpretq_u32_u8(vld1q_u8(p));
            (
                vreinterpretq_f32_u32(vshlq_n_u32::<16>(raw)),
                vreinterpretq_f32_u32(vandq_u32(raw, vdupq_n_u32(0xffff_0000))),
            )
        })
    }
    #[inline(always)]
    unsafe fn load_f16_pair(self, p: *const u8) -> (float32x4_t, float32x4_t) {
        // The vector conversion needs a type that stable Rust lacks; f16 weights are rare.
        // SAFETY: the caller promises 2 * LANES readable f16.
        let raw = unsafe { p.cast::<[u16; 8]>().read_unaligned() };
        let mut wide = [0.0; 8];
        for i in 0..8 {
            wide[i] = half::f16::from_bits(raw[i]).to_f32();
        }
        neon!((vld1q_f32(wide.as_ptr()), vld1q_f32(wide.as_ptr().add(4))))
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> float32x4_t {
        // SAFETY: the caller promises LANES readable bytes.
        let raw = unsafe { p.cast::<u32>().read_unaligned() };
        neon!(vcvtq_f32_s32(vmovl_s16(vget_low_s16(vmovl_s8(
            vcreate_s8(u64::from(raw))
        )))))
    }
    #[inline(always)]
    unsafe fn load_deinterleaved(self, p: *const f32) -> (float32x4_t, float32x4_t) {
        neon!({
            let pair = vld2q_f32(p);
            (pair.0, pair.1)
        })
    }
    #[inline(always)]
    unsafe fn store_interleaved(self, p: *mut f32, even: float32x4_t, odd: float32x4_t) {
        neon!(vst2q_f32(p, float32x4x2_t(even, odd)));
    }
    #[inline(always)]
    fn reduce_add4(self, [a, b, c, d]: [float32x4_t; 4]) -> [f32; 4] {
        neon!({
            // Lanes 0+2 and 1+3 of two vectors at a time, then the two that are left of each.
            let halves = |x, y| {
                vaddq_f32(
                    vcombine_f32(vget_low_f32(x), vget_low_f32(y)),
                    vcombine_f32(vget_high_f32(x), vget_high_f32(y)),
                )
            };
            let mut sums = [0.0; 4];
            vst1q_f32(sums.as_mut_ptr(), vpaddq_f32(halves(a, b), halves(c, d)));
            sums
        })
    }
    #[inline(always)]
    fn reduce_max(self, v: float32x4_t) -> f32 {
        neon!(vmaxvq_f32(v))
    }
    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
}
