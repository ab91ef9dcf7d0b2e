//! AVX2 with FMA and F16C: 8 lanes, 16 registers.

use std::arch::x86_64::*;

use super::{Isa, Kernel};

/// Exists only on machines with AVX2, FMA and F16C.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx2(());

impl Avx2 {
    pub(super) fn detect() -> Option<Self> {
        (is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma")
            && is_x86_feature_detected!("f16c"))
        .then_some(Avx2(()))
    }
}

/// # Safety
/// [`Avx2::detect`] must have succeeded on this machine.
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx2(()))
}

/// # Safety
/// As for [`run`].
#[target_feature(enable = "avx2,fma,f16c")]
pub(super) unsafe fn run_bytes<K: super::ByteKernel>(kernel: K) {
    kernel.run(Avx2(()));
}

/// An expression of intrinsics of this level.
macro_rules! avx2 {
    ($e:expr) => {{
        // SAFETY: `self` exists, so the machine has the features; pointers are the caller's promise.
        unsafe { $e }
    }};
}

impl Isa for Avx2 {
    type V = __m256;
    const LANES: usize = 8;
    const TILE_ROWS: usize = 2;
    const TILE_QUERIES: usize = 4;

    #[inline(always)]
    fn splat(self, x: f32) -> __m256 {
        avx2!(_mm256_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m256 {
        avx2!(_mm256_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m256) {
        avx2!(_mm256_storeu_ps(p, v));
    }
    #[inline(always)]
    fn add(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_div_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: __m256, b: __m256, c: __m256) -> __m256 {
        avx2!(_mm256_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m256, b: __m256) -> __m256 {
        avx2!(_mm256_min_ps(a, b))
    }
    #[inline(always)]
    fn select_positive(self, x: __m256, yes: __m256, no: __m256) -> __m256 {
        avx2!(_mm256_blendv_ps(
            no,
            yes,
            _mm256_cmp_ps::<_CMP_GT_OQ>(x, _mm256_setzero_ps())
        ))
    }
    #[inline(always)]
    fn add_exponent(self, x: __m256, k: __m256) -> __m256 {
        avx2!(_mm256_castsi256_ps(_mm256_add_epi32(
            _mm256_castps_si256(x),
            _mm256_slli_epi32::<23>(_mm256_castps_si256(k)),
        )))
    }
    #[inline(always)]
    fn round_bf16(self, v: __m256) -> __m256 {
        avx2!({
            let bits = _mm256_castps_si256(v);
            let lsb = _mm256_and_si256(_mm256_srli_epi32::<16>(bits), _mm256_set1_epi32(1));
            let bias = _mm256_add_epi32(lsb, _mm256_set1_epi32(0x7fff));
            let rounded = _mm256_and_si256(
                _mm256_add_epi32(bits, bias),
                _mm256_set1_epi32(0xffff_0000_u32 as i32),
            );
            _mm256_blendv_ps(
                _mm256_castsi256_ps(rounded),
                _mm256_set1_ps(f32::NAN),
                _mm256_cmp_ps::<_CMP_UNORD_Q>(v, v),
            )
        })
    }
    #[inline(always)]
    unsafe fn load_bf16_pair(self, p: *const u8) -> (__m256, __m256) {
        avx2!({
            let raw = _mm256_loadu_si256(p.cast());
            (
                _mm256_castsi256_ps(_mm256_slli_epi32::<16>(raw)),
                _mm256_castsi256_ps(_mm256_and_si256(
                    raw,
                    _mm256_set1_epi32(0xffff_0000_u32 as i32),
                )),
            )
        })
    }
    #[inline(always)]
    unsafe fn load_f16_pair(self, p: *const u8) -> (__m256, __m256) {
        avx2!((
            _mm256_cvtph_ps(_mm_loadu_si128(p.cast())),
            _mm256_cvtph_ps(_mm_loadu_si128(p.add(16).cast())),
        ))
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> __m256 {
        avx2!(_mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(
            p.cast()
        ))))
    }
    #[inline(always)]
    unsafe fn load_deinterleaved(self, p: *const f32) -> (__m256, __m256) {
        avx2!({
            let (a, b) = (_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8)));
            let low = _mm256_permute2f128_ps::<0x20>(a, b);
            let high = _mm256_permute2f128_ps::<0x31>(a, b);
            // Within each half: four of `a` (or of `b`), the even ones of both quarters joined.
            (
                _mm256_shuffle_ps::<0x88>(low, high),
                _mm256_shuffle_ps::<0xdd>(low, high),
            )
        })
    }
    #[inline(always)]
    unsafe fn store_interleaved(self, p: *mut f32, even: __m256, odd: __m256) {
        avx2!({
            let low = _mm256_unpacklo_ps(even, odd);
            let high = _mm256_unpackhi_ps(even, odd);
            _mm256_storeu_ps(p, _mm256_permute2f128_ps::<0x20>(low, high));
            _mm256_storeu_ps(p.add(8), _mm256_permute2f128_ps::<0x31>(low, high));
        });
    }
    #[inline(always)]
    fn reduce_add4(self, [a, b, c, d]: [__m256; 4]) -> [f32; 4] {
        avx2!({
            let ab = _mm256_add_ps(
                _mm256_permute2f128_ps::<0x20>(a, b),
                _mm256_permute2f128_ps::<0x31>(a, b),
            );
            let cd = _mm256_add_ps(
                _mm256_permute2f128_ps::<0x20>(c, d),
                _mm256_permute2f128_ps::<0x31>(c, d),
            );
            // Quarters of a and c (low half), of b and d (high half): lanes 0+2 and 1+3.
            let two = _mm256_add_ps(
                _mm256_shuffle_ps::<0x44>(ab, cd),
                _mm256_shuffle_ps::<0xee>(ab, cd),
            );
            let one = _mm256_add_ps(two, _mm256_shuffle_ps::<0xb1>(two, two));
            let mut s = [0.0; 8];
            _mm256_storeu_ps(s.as_mut_ptr(), one);
            [s[0], s[4], s[2], s[6]]
        })
    }
    #[inline(always)]
    fn reduce_max(self, v: __m256) -> f32 {
        avx2!({
            let four = _mm_max_ps(_mm256_castps256_ps128(v), _mm256_extractf128_ps::<1>(v));
            let two = _mm_max_ps(four, _mm_movehl_ps(four, four));
            _mm_cvtss_f32(_mm_max_ss(two, _mm_movehdup_ps(two)))
        })
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        avx2!(_mm_prefetch::<_MM_HINT_T1>(p.cast()));
    }
}
