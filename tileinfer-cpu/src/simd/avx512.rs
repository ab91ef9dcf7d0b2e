//! AVX-512 (F, BW, DQ, VL): 16 lanes, 32 registers; and the same with the dot products of bf16 pairs.

use std::arch::x86_64::*;

use super::{Isa, Kernel};

/// Exists only on machines with AVX-512 F, BW, DQ and VL, and BF16 if it is `DOT`.
#[derive(Debug, Clone, Copy)]
pub(super) struct Avx512<const DOT: bool>(());

impl<const DOT: bool> Avx512<DOT> {
    pub(super) fn detect() -> Option<Self> {
        ((!DOT || is_x86_feature_detected!("avx512bf16"))
            && is_x86_feature_detected!("avx512f")
            && is_x86_feature_detected!("avx512bw")
            && is_x86_feature_detected!("avx512dq")
            && is_x86_feature_detected!("avx512vl")
            && is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("fma"))
        .then_some(Avx512(()))
    }
}

/// # Safety
/// [`Avx512::detect`] must have succeeded on this machine.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
pub(super) unsafe fn run<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<false>(()))
}

/// # Safety
/// As for [`run`], with `DOT`.
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512bf16,avx2,fma")]
pub(super) unsafe fn run_dot<K: Kernel>(kernel: K) -> K::Output {
    kernel.run(Avx512::<true>(()))
}

/// An expression of intrinsics of this level.
macro_rules! avx512 {
    ($e:expr) => {{
        // SAFETY: `self` exists, so the machine has the features; pointers are the caller's promise.
        unsafe { $e }
    }};
}

impl<const DOT: bool> Isa for Avx512<DOT> {
    type V = __m512;
    const LANES: usize = 16;
    const TILE_ROWS: usize = 5;
    const DOT_ROWS: usize = if DOT { 6 } else { 0 };
    const TILE_QUERIES: usize = 8;

    #[inline(always)]
    fn splat(self, x: f32) -> __m512 {
        avx512!(_mm512_set1_ps(x))
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> __m512 {
        avx512!(_mm512_loadu_ps(p))
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: __m512) {
        avx512!(_mm512_storeu_ps(p, v));
    }
    #[inline(always)]
    fn add(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_add_ps(a, b))
    }
    #[inline(always)]
    fn sub(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_sub_ps(a, b))
    }
    #[inline(always)]
    fn mul(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_mul_ps(a, b))
    }
    #[inline(always)]
    fn div(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_div_ps(a, b))
    }
    #[inline(always)]
    fn mul_add(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        avx512!(_mm512_fmadd_ps(a, b, c))
    }
    #[inline(always)]
    fn max(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_max_ps(a, b))
    }
    #[inline(always)]
    fn min(self, a: __m512, b: __m512) -> __m512 {
        avx512!(_mm512_min_ps(a, b))
    }
    #[inline(always)]
    fn select_positive(self, x: __m512, yes: __m512, no: __m512) -> __m512 {
        avx512!({
            let positive = _mm512_cmp_ps_mask::<_CMP_GT_OQ>(x, _mm512_setzero_ps());
            _mm512_mask_blend_ps(positive, no, yes)
        })
    }
    #[inline(always)]
    fn add_exponent(self, x: __m512, k: __m512) -> __m512 {
        avx512!(_mm512_castsi512_ps(_mm512_add_epi32(
            _mm512_castps_si512(x),
            _mm512_slli_epi32::<23>(_mm512_castps_si512(k)),
        )))
    }
    #[inline(always)]
    fn round_bf16(self, v: __m512) -> __m512 {
        // The instruction vcvtneps2bf16 would flush subnormals; integer arithmetic does not.
        avx512!({
            let bits = _mm512_castps_si512(v);
            let lsb = _mm512_and_si512(_mm512_srli_epi32::<16>(bits), _mm512_set1_epi32(1));
            let bias = _mm512_add_epi32(lsb, _mm512_set1_epi32(0x7fff));
            let rounded = _mm512_and_si512(
                _mm512_add_epi32(bits, bias),
                _mm512_set1_epi32(0xffff_0000_u32 as i32),
            );
            let nan = _mm512_cmp_ps_mask::<_CMP_UNORD_Q>(v, v);
            _mm512_mask_blend_ps(nan, _mm512_castsi512_ps(rounded), _mm512_set1_ps(f32::NAN))
        })
    }
    #[inline(always)]
    unsafe fn load_bf16_pair(self, p: *const u8) -> (__m512, __m512) {
        avx512!({
            let raw = _mm512_loadu_si512(p.cast());
            (
                _mm512_castsi512_ps(_mm512_slli_epi32::<16>(raw)),
                _mm512_castsi512_ps(_mm512_and_si512(
                    raw,
                    _mm512_set1_epi32(0xffff_0000_u32 as i32),
                )),
            )
        })
    }
    #[inline(always)]
    unsafe fn load_bf16_raw(self, p: *const u8) -> __m512 {
        avx512!(_mm512_loadu_ps(p.cast()))
    }
    #[inline(always)]
    fn pair_bf16(self, even: __m512, odd: __m512) -> __m512 {
        avx512!(_mm512_castsi512_ps(_mm512_or_si512(
            _mm512_srli_epi32::<16>(_mm512_castps_si512(even)),
            _mm512_castps_si512(odd),
        )))
    }
    #[inline(always)]
    fn dot_bf16(self, a: __m512, b: __m512, c: __m512) -> __m512 {
        avx512!({
            let pairs = |v: __m512| std::mem::transmute::<__m512, __m512bh>(v);
            _mm512_dpbf16_ps(c, pairs(a), pairs(b))
        })
    }
    #[inline(always)]
    unsafe fn load_f16_pair(self, p: *const u8) -> (__m512, __m512) {
        avx512!((
            _mm512_cvtph_ps(_mm256_loadu_si256(p.cast())),
            _mm512_cvtph_ps(_mm256_loadu_si256(p.add(32).cast())),
        ))
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> __m512 {
        avx512!(_mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(
            p.cast()
        ))))
    }
    #[inline(always)]
    unsafe fn load_deinterleaved(self, p: *const f32) -> (__m512, __m512) {
        avx512!({
            let (a, b) = (_mm512_loadu_ps(p), _mm512_loadu_ps(p.add(16)));
            let even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
            let odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
            (
                _mm512_permutex2var_ps(a, even, b),
                _mm512_permutex2var_ps(a, odd, b),
            )
        })
    }
    #[inline(always)]
    unsafe fn store_interleaved(self, p: *mut f32, even: __m512, odd: __m512) {
        avx512!({
            let low = _mm512_setr_epi32(0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
            let high =
                _mm512_setr_epi32(8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
            _mm512_storeu_ps(p, _mm512_permutex2var_ps(even, low, odd));
            _mm512_storeu_ps(p.add(16), _mm512_permutex2var_ps(even, high, odd));
        });
    }
    #[inline(always)]
    fn reduce_add4(self, [a, b, c, d]: [__m512; 4]) -> [f32; 4] {
        avx512!({
            // Halves of two vectors at a time, then quarters of four, then within the quarters.
            let ab = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0x44>(a, b),
                _mm512_shuffle_f32x4::<0xee>(a, b),
            );
            let cd = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0x44>(c, d),
                _mm512_shuffle_f32x4::<0xee>(c, d),
            );
            let abcd = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0x88>(ab, cd),
                _mm512_shuffle_f32x4::<0xdd>(ab, cd),
            );
            let two = _mm512_add_ps(abcd, _mm512_shuffle_ps::<0x4e>(abcd, abcd));
            let one = _mm512_add_ps(two, _mm512_shuffle_ps::<0xb1>(two, two));
            let first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            let mut sums = [0.0; 4];
            _mm_storeu_ps(
                sums.as_mut_ptr(),
                _mm512_castps512_ps128(_mm512_permutexvar_ps(first, one)),
            );
            sums
        })
    }
    #[inline(always)]
    fn reduce_max(self, v: __m512) -> f32 {
        avx512!(_mm512_reduce_max_ps(v))
    }
    #[inline(always)]
    fn prefetch(self, p: *const u8) {
        avx512!(_mm_prefetch::<_MM_HINT_T1>(p.cast()));
    }
}
