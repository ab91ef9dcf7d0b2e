//! Eight bits a number: how weights, activations and cached vectors become integers, to the last bit.
//!
//! Every backend repeats this arithmetic, so it is written down here once and the reference backend calls it. It decided
//! not to know which matrices are rounded (`model` does) and how a kernel lays the integers out.
//!
//! # Weights and cached vectors ([`round_row`])
//! A row `x` of a weight `[out, in]`, or one cached key or value of one head, in f32:
//!
//! ```text
//! scale = max|x| / 127               1 if all of x is zero
//! q[i]  = x[i] / scale               f32 division, rounded to the nearest integer, ties to even, within -127 ..= 127
//! ```
//!
//! and the row is worth `scale * q`. A row that holds a NaN or an infinity gets `scale = NaN` and `q = 0`: what is made
//! of it is NaN, and seen. (A file may bring `q = -128`, which no rounding here gives; kernels take it.)
//!
//! # A linear with an int8 weight ([`round_activations`])
//! A row `x` of activations keeps 16 bits: it becomes integers `v` of at most `32258 = 127 * 254` under one scale,
//!
//! ```text
//! top  = max|x|
//! v[k] = x[k] * (32258 / top)        f32 division once, f32 product, rounded to nearest, ties to even
//! t    = top / 32258
//! ```
//!
//! so `|x[k] - t v[k]| <= top / 64516` and a little (f32 rounding of the two quotients: 2e-7 of `x[k]`). Where `top` is
//! below 2^-100 the row counts as zero (`v = 0`, `t = 1`); where it is no finite number, `v = 0` and `t = NaN`. Kernels
//! that multiply bytes split `v = 254 hi + lo` with `hi = floor((v + 127) / 254)`, so `hi` is in -127 ..= 127 and `lo` in
//! -127 ..= 126 ([`split`]); the sum does not depend on the split. With the weight row `q`, `s`:
//!
//! ```text
//! T = Σ_k q[k] v[k]                  an integer, exact: 254 Σ q hi + Σ q lo. Each of these two fits i32 up to
//!                                    132104 columns; T itself needs more than 32 bits
//! y = f32(T) * (t * s)               T rounded to f32 once, two f32 products; then the bias is added, in f32,
//!                                    and the result is rounded once where the output is of the compute type
//! ```
//!
//! `T` being exact, the order of the sum does not matter, and rows, tiles, threads and splits of K change no bit. A
//! kernel may form `f32(T)` as `fma(f32(H), 254, f32(L))` of its i32 sums `H` and `L`: that differs by at most
//! `2^-23 (254 |H| + |L|)`, and the conformance suite allows it. It must form it the same way for every number of rows.
//!
//! # Keys and values in pages
//! What an int8 cache stores of a key `k` of a head, as [`Backend::store_kv`] gets it (rotated, of the compute type), and
//! of a value `v`, likewise:
//!
//! ```text
//! key:    round_row(k / factor)      factor: f32 [head_dim] of the kv head, one f32 division each; none: k itself
//! value:  round_row(v)
//! ```
//!
//! with one f32 scale for each vector. Attention then computes what it computes on a cache of `factor * (scale * q)` and
//! `scale * q`: `score = scale_k (Σ_d (factor[d] query[d]) q[d]) * shape.scale`, softmax, `Σ p (scale_v q)`. Queries are
//! multiplied by the factors in f32 and not rounded again by the plain form; a kernel whose products take bf16 may round
//! them to that. Prefill too reads the rounded keys and values, those of its own chunk included.
//!
//! [`Backend::store_kv`]: crate::backend::Backend::store_kv

use crate::memory::wish_for_large_pages;

use super::tensor::{Weight, WeightData, WeightPart, for_each_chunk};
use std::sync::Arc;

/// The largest magnitude of a rounded weight.
pub const LEVELS: f32 = 127.0;
/// The largest magnitude of a rounded activation: 127 * 254.
pub const ACTIVATION_LEVELS: f32 = 32258.0;
/// Activations whose largest is smaller count as zero.
pub const TINY: f32 = f32::from_bits((127 - 100) << 23);

/// Rounds a row to `q` and gives its scale. See the module's first lines.
///
/// # Panics
/// If the two are not equally long.
pub fn round_row(x: &[f32], q: &mut [i8]) -> f32 {
    assert_eq!(x.len(), q.len(), "a row and its rounded form");
    let top = largest(x);
    if !top.is_finite() {
        q.fill(0);
        return f32::NAN;
    }
    let scale = if top > 0.0 { top / LEVELS } else { 1.0 };
    for (q, &x) in q.iter_mut().zip(x) {
        // The division of a top that is near the smallest number there is can give more than 127.
        *q = nearest((x / scale).clamp(-LEVELS, LEVELS)) as i8;
    }
    scale
}

/// Rounds a row of activations to `v` and gives their scale `t`. See the module's first lines.
///
/// # Panics
/// If the two are not equally long.
pub fn round_activations(x: &[f32], v: &mut [i16]) -> f32 {
    assert_eq!(x.len(), v.len(), "a row and its rounded form");
    let top = largest(x);
    if !top.is_finite() || top < TINY {
        v.fill(0);
        return if top.is_finite() { 1.0 } else { f32::NAN };
    }
    let levels = ACTIVATION_LEVELS / top;
    for (v, &x) in v.iter_mut().zip(x) {
        *v = nearest(x * levels) as i16;
    }
    top / ACTIVATION_LEVELS
}

/// The nearest integer, ties to even, of a number within 2^22: adding 1.5 * 2^23 rounds it into the low bits, in two
/// instructions that compilers vectorise, where the function of the library is called for each number.
#[inline(always)]
pub fn nearest(x: f32) -> i32 {
    const MAGIC: f32 = 12_582_912.0;
    (x + MAGIC).to_bits().wrapping_sub(MAGIC.to_bits()) as i32
}

/// The two bytes of a rounded activation: `(hi, lo)` with `v = 254 hi + lo`.
pub fn split(v: i16) -> (i8, i8) {
    let hi = (i32::from(v) + 127).div_euclid(254);
    (hi as i8, (i32::from(v) - 254 * hi) as i8)
}

/// The largest magnitude; NaN if there is one.
fn largest(x: &[f32]) -> f32 {
    // As bits without a sign numbers are in order, infinity after all of them and NaN after that.
    let bits = x.iter().map(|x| x.to_bits() & 0x7fff_ffff);
    f32::from_bits(bits.max().unwrap_or(0))
}

impl WeightPart {
    /// The part in int8, one scale a row, made by all cores; as it is if it is in int8 already. Rows are read where they
    /// lie and only the result takes memory.
    #[must_use]
    pub fn to_int8(&self) -> WeightPart {
        if self.data().scales().is_some() {
            return self.clone();
        }
        let (rows, cols) = (self.rows(), self.cols());
        let mut scales: Arc<[f32]> = std::iter::repeat_n(1.0, rows).collect();
        // SAFETY: zero bytes are an i8 each. Nobody has touched them, so they can still become large pages.
        let mut values = unsafe { Arc::<[i8]>::new_zeroed_slice(rows * cols).assume_init() };
        wish_for_large_pages(&values);
        let mine = "nobody else has it yet";
        // Some hundred thousand elements at a time.
        let chunk = ((1 << 18) / cols.max(1)).max(1);
        let chunks = Arc::get_mut(&mut values)
            .expect(mine)
            .chunks_mut((chunk * cols).max(1))
            .zip(Arc::get_mut(&mut scales).expect(mine).chunks_mut(chunk));
        for_each_chunk(
            chunks.enumerate(),
            rows.div_ceil(chunk),
            |(i, (q, scales))| {
                let mut row = vec![0.0; cols];
                for (j, (q, scale)) in q.chunks_exact_mut(cols.max(1)).zip(scales).enumerate() {
                    self.row_f32(i * chunk + j, &mut row);
                    *scale = round_row(&row, q);
                }
            },
        );
        let data = WeightData::OwnedInt8 { values, scales };
        WeightPart::new(rows, cols, data).expect("as many values as there were")
    }
}

impl Weight {
    /// The weight in int8, one f32 scale a row: see [`crate::weights::int8`]. Parts that are in int8 already stay as they
    /// are.
    #[must_use]
    pub fn to_int8(&self) -> Weight {
        let parts = self.parts().iter().map(WeightPart::to_int8).collect();
        Weight::new(parts).expect("the parts are as wide as they were")
    }

    /// Whether any part is in int8.
    pub fn has_int8(&self) -> bool {
        self.parts()
            .iter()
            .any(|part| part.data().scales().is_some())
    }
}

impl WeightData {
    /// The integers, row after row, and one scale a row, of a part in int8.
    pub fn int8(&self) -> Option<(&[i8], &[f32])> {
        match self {
            WeightData::Int8 { values, scales } => {
                let bytes: &[u8] = values;
                // SAFETY: the same memory; every byte is an i8, and both have the size and alignment 1.
                let values =
                    unsafe { std::slice::from_raw_parts(bytes.as_ptr().cast::<i8>(), bytes.len()) };
                Some((values, scales))
            }
            WeightData::OwnedInt8 { values, scales } => Some((values, scales)),
            _ => None,
        }
    }

    /// The scales of the rows of a part in int8.
    pub fn scales(&self) -> Option<&Arc<[f32]>> {
        match self {
            WeightData::Int8 { scales, .. } | WeightData::OwnedInt8 { scales, .. } => Some(scales),
            _ => None,
        }
    }
}
