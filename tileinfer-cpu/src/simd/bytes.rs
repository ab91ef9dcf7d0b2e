//! Dot products of int8 weights with 16-bit activations, as each instruction set does them best. All are exact, so the
//! results are the same on every level; see [`tileinfer::weights::int8`] for what is computed.
//!
//! A [`ByteKernel`] is to [`ByteDot`] what a [`Kernel`](super::Kernel) is to an [`Isa`](super::Isa).

#[cfg(target_arch = "x86_64")]
use tileinfer::weights::int8::nearest;

/// The dot products of one instruction set.
pub(crate) trait ByteDot: Copy + Send + Sync + 'static {
    /// Weights of one step, prepared.
    type Weights: Copy;
    /// Partial sums of one weight row with one activation row.
    type Sums: Copy;
    /// Columns a step.
    const STEP: usize;
    /// Columns after which partial sums have to be taken out lest they overflow; a multiple of `STEP`.
    const BLOCK: usize;
    /// Activation rows of the largest register tile (4 weight rows times these).
    const TILE_ROWS: usize;
    /// What the weights are raised by: a row's total is too large by as many times the sum of its activations.
    const RAISED: i32;

    fn zero(self) -> Self::Sums;
    /// # Safety
    /// `STEP` bytes must be readable at `p`.
    unsafe fn weights(self, p: *const i8) -> Self::Weights;
    /// Adds the products of one step.
    ///
    /// # Safety
    /// `x` must be `2 * STEP` readable bytes that [`ByteDot::pack`] wrote.
    unsafe fn dot(self, sums: Self::Sums, weights: Self::Weights, x: *const u8) -> Self::Sums;
    /// The sums of four weight rows, exact.
    fn totals(self, sums: [Self::Sums; 4]) -> [f64; 4];
    /// Lays `STEP` activations out for [`ByteDot::dot`].
    fn pack(self, v: &[i32], out: &mut [u8]);
    /// Asks for the cache line at `p`, into the second level cache; any address is fine.
    fn prefetch(self, p: *const i8);
}

/// A computation written once for all instruction sets. `run` must be `#[inline(always)]`.
pub(crate) trait ByteKernel {
    fn run<D: ByteDot>(self, dot: D);
}

/// Integers `v = 254 hi + lo` as two rows of bytes. Any split serves, as long as both fit.
#[cfg(target_arch = "x86_64")]
#[inline(always)]
fn split(v: &[i32], hi: &mut [u8], lo: &mut [u8]) {
    for ((&v, hi), lo) in v.iter().zip(hi).zip(lo) {
        let high = nearest(v as f32 * (1.0 / 254.0));
        *hi = high as u8;
        *lo = (v - 254 * high) as u8;
    }
}

/// Plain Rust: 8 sums side by side, which compilers vectorise.
#[derive(Debug, Clone, Copy)]
pub(super) struct Plain;

impl ByteDot for Plain {
    type Weights = [i8; 16];
    type Sums = [i32; 8];
    const STEP: usize = 16;
    // Two products a step and lane, each up to 128 * 32258: 256 steps stay below 2^31.
    const BLOCK: usize = 4096;
    const TILE_ROWS: usize = 1;
    const RAISED: i32 = 0;

    #[inline(always)]
    fn zero(self) -> [i32; 8] {
        [0; 8]
    }
    #[inline(always)]
    unsafe fn weights(self, p: *const i8) -> [i8; 16] {
        // SAFETY: the caller promises 16 readable bytes.
        unsafe { p.cast::<[i8; 16]>().read_unaligned() }
    }
    #[inline(always)]
    unsafe fn dot(self, mut sums: [i32; 8], weights: [i8; 16], x: *const u8) -> [i32; 8] {
        // SAFETY: the caller promises 32 readable bytes.
        let x = unsafe { x.cast::<[i16; 16]>().read_unaligned() };
        for i in 0..8 {
            sums[i] += i32::from(weights[i]) * i32::from(x[i]);
            sums[i] += i32::from(weights[i + 8]) * i32::from(x[i + 8]);
        }
        sums
    }
    #[inline(always)]
    fn totals(self, sums: [[i32; 8]; 4]) -> [f64; 4] {
        let mut totals = [0.0; 4];
        for (total, sums) in totals.iter_mut().zip(sums) {
            for sum in sums {
                *total += f64::from(sum);
            }
        }
        totals
    }
    #[inline(always)]
    fn pack(self, v: &[i32], out: &mut [u8]) {
        for (v, out) in v.iter().zip(out.as_chunks_mut().0) {
            *out = (*v as i16).to_ne_bytes();
        }
    }
    #[inline(always)]
    fn prefetch(self, _: *const i8) {}
}

#[cfg(target_arch = "x86_64")]
pub(super) mod x86 {
    //! AVX2 widens both to 16 bits; AVX-512 VNNI multiplies bytes, so activations are two rows of them.

    use std::arch::x86_64::*;

    use super::super::avx2::Avx2;
    use super::{ByteDot, ByteKernel, split};

    impl ByteDot for Avx2 {
        type Weights = (__m256i, __m256i);
        type Sums = __m256i;
        const STEP: usize = 32;
        // Four products a step and lane, each up to 128 * 32258: 128 steps stay below 2^31.
        const BLOCK: usize = 4096;
        const TILE_ROWS: usize = 2;
        const RAISED: i32 = 0;

        #[inline(always)]
        fn zero(self) -> __m256i {
            // SAFETY: `self` exists, so the machine has the features.
            unsafe { _mm256_setzero_si256() }
        }
        #[inline(always)]
        unsafe fn weights(self, p: *const i8) -> (__m256i, __m256i) {
            // SAFETY: as above; the caller promises 32 readable bytes.
            unsafe {
                (
                    _mm256_cvtepi8_epi16(_mm_loadu_si128(p.cast())),
                    _mm256_cvtepi8_epi16(_mm_loadu_si128(p.add(16).cast())),
                )
            }
        }
        #[inline(always)]
        unsafe fn dot(self, sums: __m256i, w: (__m256i, __m256i), x: *const u8) -> __m256i {
            // SAFETY: as above; the caller promises 64 readable bytes.
            unsafe {
                let first = _mm256_madd_epi16(w.0, _mm256_loadu_si256(x.cast()));
                let second = _mm256_madd_epi16(w.1, _mm256_loadu_si256(x.add(32).cast()));
                _mm256_add_epi32(sums, _mm256_add_epi32(first, second))
            }
        }
        #[inline(always)]
        fn totals(self, sums: [__m256i; 4]) -> [f64; 4] {
            // SAFETY: as above.
            unsafe {
                let wide = [0, 1, 2, 3].map(|i| sums[i]);
                let mut totals = [0.0; 4];
                for i in 0..4 {
                    let four = _mm256_add_pd(
                        _mm256_cvtepi32_pd(_mm256_castsi256_si128(wide[i])),
                        _mm256_cvtepi32_pd(_mm256_extracti128_si256::<1>(wide[i])),
                    );
                    let two = _mm_add_pd(
                        _mm256_castpd256_pd128(four),
                        _mm256_extractf128_pd::<1>(four),
                    );
                    totals[i] = _mm_cvtsd_f64(_mm_add_sd(two, _mm_unpackhi_pd(two, two)));
                }
                totals
            }
        }
        #[inline(always)]
        fn pack(self, v: &[i32], out: &mut [u8]) {
            for (v, out) in v.iter().zip(out.as_chunks_mut().0) {
                *out = (*v as i16).to_le_bytes();
            }
        }
        #[inline(always)]
        fn prefetch(self, p: *const i8) {
            // SAFETY: as above; a prefetch does not fault.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(p) }
        }
    }

    /// Exists only on machines with AVX-512 F, BW, DQ, VL and VNNI.
    #[derive(Debug, Clone, Copy)]
    pub(in super::super) struct Vnni(());

    impl Vnni {
        pub(in super::super) fn detect() -> Option<Self> {
            (is_x86_feature_detected!("avx512vnni")
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
                && is_x86_feature_detected!("avx2"))
            .then_some(Vnni(()))
        }
    }

    /// # Safety
    /// [`Vnni::detect`] must have succeeded on this machine.
    #[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx512vnni,avx2,fma")]
    pub(in super::super) unsafe fn run_vnni<K: ByteKernel>(kernel: K) {
        kernel.run(Vnni(()));
    }

    impl ByteDot for Vnni {
        type Weights = __m512i;
        type Sums = (__m512i, __m512i);
        const STEP: usize = 64;
        // One instruction multiplies unsigned with signed bytes: weights are raised by 128 and so up to 255, times
        // 127; all of it, lanes together, stays below 2^31 up to 66302 columns.
        const BLOCK: usize = 65536;
        const TILE_ROWS: usize = 3;
        const RAISED: i32 = 128;

        #[inline(always)]
        fn zero(self) -> (__m512i, __m512i) {
            // SAFETY: `self` exists, so the machine has the features.
            unsafe { (_mm512_setzero_si512(), _mm512_setzero_si512()) }
        }
        #[inline(always)]
        unsafe fn weights(self, p: *const i8) -> __m512i {
            // SAFETY: as above; the caller promises 64 readable bytes.
            unsafe { _mm512_xor_si512(_mm512_loadu_si512(p.cast()), _mm512_set1_epi8(-128)) }
        }
        #[inline(always)]
        unsafe fn dot(self, sums: Self::Sums, w: __m512i, x: *const u8) -> Self::Sums {
            // SAFETY: as above; the caller promises 128 readable bytes.
            unsafe {
                (
                    _mm512_dpbusd_epi32(sums.0, w, _mm512_loadu_si512(x.cast())),
                    _mm512_dpbusd_epi32(sums.1, w, _mm512_loadu_si512(x.add(64).cast())),
                )
            }
        }
        #[inline(always)]
        fn totals(self, s: [Self::Sums; 4]) -> [f64; 4] {
            // SAFETY: as above.
            unsafe {
                let high = _mm256_cvtepi32_pd(fold4([s[0].0, s[1].0, s[2].0, s[3].0]));
                let low = _mm256_cvtepi32_pd(fold4([s[0].1, s[1].1, s[2].1, s[3].1]));
                let both = _mm256_add_pd(_mm256_mul_pd(high, _mm256_set1_pd(254.0)), low);
                let mut totals = [0.0; 4];
                _mm256_storeu_pd(totals.as_mut_ptr(), both);
                totals
            }
        }
        #[inline(always)]
        fn pack(self, v: &[i32], out: &mut [u8]) {
            let (hi, lo) = out.split_at_mut(Self::STEP);
            split(v, hi, lo);
        }
        #[inline(always)]
        fn prefetch(self, p: *const i8) {
            // SAFETY: as above; a prefetch does not fault.
            unsafe { _mm_prefetch::<_MM_HINT_T1>(p) }
        }
    }

    /// The sums over the lanes of four vectors.
    ///
    /// # Safety
    /// The machine must have AVX-512 F, DQ and VL.
    #[inline(always)]
    unsafe fn fold4([a, b, c, d]: [__m512i; 4]) -> __m128i {
        // SAFETY: the caller's promise.
        unsafe {
            let ab = _mm512_add_epi32(
                _mm512_shuffle_i32x4::<0x44>(a, b),
                _mm512_shuffle_i32x4::<0xee>(a, b),
            );
            let cd = _mm512_add_epi32(
                _mm512_shuffle_i32x4::<0x44>(c, d),
                _mm512_shuffle_i32x4::<0xee>(c, d),
            );
            // Quarter i holds four partial sums of vector i.
            let all = _mm512_add_epi32(
                _mm512_shuffle_i32x4::<0x88>(ab, cd),
                _mm512_shuffle_i32x4::<0xdd>(ab, cd),
            );
            let two = _mm512_add_epi32(all, _mm512_shuffle_epi32::<0x4e>(all));
            let one = _mm512_add_epi32(two, _mm512_shuffle_epi32::<0xb1>(two));
            let first = _mm512_setr_epi32(0, 4, 8, 12, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0);
            _mm512_castsi512_si128(_mm512_permutexvar_epi32(first, one))
        }
    }
}
