//! `exp`, `ln` and sums over the vocabulary whose every bit is fixed: plain f32 additions and
//! multiplications in a written order, never contracted into fused multiply-adds, so that a device which
//! follows the same steps gets the same bits. It knows nothing of tokens.
//!
//! The polynomials interpolate at Chebyshev nodes and are rounded to f32; the tests hold `exp` to 2 and
//! `ln` to 2 units in the last place against f64.

/// Arguments below this give an exponential of exactly 0, so that no result is subnormal (a device may
/// flush those).
pub const EXP_CUTOFF: f32 = -87.0;

/// Adding and subtracting 1.5 · 2^23 rounds to the nearest integer, ties to even, for |x| < 2^22.
const ROUND: f32 = 12_582_912.0;
/// ln 2 in two parts; the first has 10 bits, so its product with an exponent is exact.
const LN2_HIGH: f32 = 355.0 / 512.0;
const LN2_LOW: f32 = -2.121_944_4e-4;
/// (e^r − 1 − r) / r² on |r| <= ln(2) / 2, lowest power first.
const EXP: [f32; 5] = [
    0.5,
    0.166_665_75,
    0.041_666_552,
    0.008_363_472,
    0.001_392_655_1,
];
/// (ln(1 + f) − f + f² / 2) / f³ on √½ <= 1 + f < √2, lowest power first.
const LN: [f32; 9] = [
    0.333_333_3,
    -0.249_999_97,
    0.200_007_16,
    -0.166_678_03,
    0.142_490_58,
    -0.124_256_87,
    0.116_854_2,
    -0.114_797_34,
    0.069_716_12,
];
/// The bits of √½.
const SQRT_HALF: i32 = 0x3f35_04f3;

/// `c[0] + c[1] x + …` by Horner's rule, from the highest power down: one product and one sum a step.
#[inline(always)]
fn horner<const N: usize>(x: f32, c: &[f32; N]) -> f32 {
    let mut sum = c[N - 1];
    for &c in c[..N - 1].iter().rev() {
        sum = sum * x + c;
    }
    sum
}

/// e^x for x <= 0, and 0 below [`EXP_CUTOFF`].
///
/// n = x · log2(e) rounded to an integer; r = (x − n · `LN2_HIGH`) − n · `LN2_LOW`;
/// ((P(r) · r · r) + r) + 1, times 2^n, which is exact.
#[inline(always)]
pub fn exp(x: f32) -> f32 {
    let shifted = x * std::f32::consts::LOG2_E + ROUND;
    let n = shifted - ROUND;
    let r = (x - n * LN2_HIGH) - n * LN2_LOW;
    let p = horner(r, &EXP) * r * r + r + 1.0;
    let exponent = shifted
        .to_bits()
        .wrapping_sub(ROUND.to_bits())
        .wrapping_add(127);
    let power = f32::from_bits(exponent << 23);
    if x < EXP_CUTOFF { 0.0 } else { p * power }
}

/// The natural logarithm of a positive, finite, normal number.
#[inline(always)]
pub fn ln(x: f32) -> f32 {
    let (k, f) = ln_split(x);
    ln_join(k, f)
}

/// x = 2^k (1 + f) with √½ <= 1 + f < √2.
#[inline(always)]
pub(super) fn ln_split(x: f32) -> (f32, f32) {
    let bits = (x.to_bits() as i32).wrapping_sub(SQRT_HALF);
    let mantissa = f32::from_bits(((bits & 0x007f_ffff) + SQRT_HALF) as u32);
    ((bits >> 23) as f32, mantissa - 1.0)
}

/// ln(2^k (1 + f)): with s = f · f, ((((f · P(f)) · s + k · `LN2_LOW`) − s / 2) + f) + k · `LN2_HIGH`.
#[inline(always)]
pub(super) fn ln_join(k: f32, f: f32) -> f32 {
    let s = f * f;
    let tail = f * horner(f, &LN) * s + k * LN2_LOW - 0.5 * s;
    tail + f + k * LN2_HIGH
}

/// Positions of the vocabulary that are summed as one block, apart from all others.
pub const SUM_BLOCK: usize = 4096;
/// Running sums within a block.
pub const SUM_LANES: usize = 256;

/// One block's running sums.
pub(super) type Lanes = [f32; SUM_LANES];

/// Folds the upper half of the lanes onto the lower half until one is left.
fn fold(lanes: &mut Lanes) -> f32 {
    let mut half = SUM_LANES / 2;
    while half > 0 {
        let (low, high) = lanes.split_at_mut(half);
        for (low, high) in low.iter_mut().zip(high) {
            *low += *high;
        }
        half /= 2;
    }
    lanes[0]
}

/// The sum of `len` terms in a fixed tree. Term i belongs to block i / 4096 and there to lane i % 256;
/// a lane adds its (up to 16) terms in ascending order, starting from 0; the lanes of a block are folded
/// (lane l += lane l + 128, then + 64, … + 1); the blocks' sums are added in ascending order, from 0.
///
/// A missing term is a 0, so leaving one out and adding zeros are the same bits, and with terms that are
/// not negative the sum never falls when a term grows: rounding is monotone, and so is each addition.
///
/// `add_row(first, lanes)` adds the terms `first..first + 256`, as far as there are, to the lanes.
pub(super) fn sum_rows(len: usize, mut add_row: impl FnMut(usize, &mut Lanes)) -> f32 {
    let mut total = 0.0;
    for block in (0..len).step_by(SUM_BLOCK) {
        let mut lanes = [0.0; SUM_LANES];
        for first in (block..len.min(block + SUM_BLOCK)).step_by(SUM_LANES) {
            add_row(first, &mut lanes);
        }
        total += fold(&mut lanes);
    }
    total
}

/// The sum of all values, in the tree of the module's other sums: blocks of 4096, lanes of 256.
pub fn sum(values: &[f32]) -> f32 {
    sum_rows(values.len(), |first, lanes| {
        for (lane, value) in lanes.iter_mut().zip(&values[first..]) {
            *lane += value;
        }
    })
}

/// The same sum of terms given as (position, value) in ascending order of position, all others being 0.
pub fn sum_sparse(terms: impl Iterator<Item = (u32, f32)>) -> f32 {
    let mut total = 0.0;
    let mut lanes = [0.0; SUM_LANES];
    let mut block = 0;
    for (position, value) in terms {
        let position = position as usize;
        if position / SUM_BLOCK != block {
            total += fold(&mut lanes);
            lanes = [0.0; SUM_LANES];
            block = position / SUM_BLOCK;
        }
        lanes[position % SUM_LANES] += value;
    }
    total + fold(&mut lanes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The distance in units in the last place of the f32 nearest to `exact`.
    fn ulps(got: f32, exact: f64) -> f64 {
        let near = (exact as f32).abs().max(f32::MIN_POSITIVE);
        let ulp = f64::from(f32::from_bits(near.to_bits() + 1)) - f64::from(near);
        (f64::from(got) - exact).abs() / ulp
    }

    #[test]
    fn exp_is_within_two_ulps() {
        let mut worst = 0.0_f64;
        for i in 0..=2_000_000 {
            let x = EXP_CUTOFF * (i as f32 / 2_000_000.0);
            worst = worst.max(ulps(exp(x), f64::from(x).exp()));
        }
        assert!(worst <= 2.0, "{worst} ulps");
        assert_eq!(exp(0.0), 1.0);
        assert_eq!(exp(-0.0), 1.0);
        assert_eq!(exp(-87.001), 0.0);
        assert_eq!(exp(f32::MIN), 0.0);
        assert_eq!(exp(f32::NEG_INFINITY), 0.0);
        assert!(exp(EXP_CUTOFF) >= f32::MIN_POSITIVE);
    }

    #[test]
    fn exp_never_falls_as_its_argument_grows() {
        let mut last = 0.0;
        let mut x = -20.0_f32;
        while x < 0.0 {
            let y = exp(x);
            assert!(y >= last, "exp({x}) = {y} after {last}");
            last = y;
            x = f32::from_bits(x.to_bits() - 97);
        }
    }

    #[test]
    fn ln_is_within_two_ulps() {
        let mut worst = 0.0_f64;
        let mut bits = f32::MIN_POSITIVE.to_bits();
        while bits < f32::MAX.to_bits() {
            let x = f32::from_bits(bits);
            worst = worst.max(ulps(ln(x), f64::from(x).ln()));
            bits += 1013;
        }
        // Around 1, where the result is smallest against its terms.
        for bits in 1.0_f32.to_bits() - 200_000..1.0_f32.to_bits() + 200_000 {
            let x = f32::from_bits(bits);
            worst = worst.max(ulps(ln(x), f64::from(x).ln()));
        }
        assert!(worst <= 2.0, "{worst} ulps");
        assert_eq!(ln(1.0), 0.0);
    }

    /// The bits themselves, from a separate implementation of the text (doubles rounded to f32 after each
    /// operation), so that a change of the order of operations does not pass unseen.
    #[test]
    fn known_bits() {
        let exps = [-0.1, -1.0, -3.25, -50.0].map(|x| exp(x).to_bits());
        assert_eq!(
            exps,
            [1_063_756_653, 1_052_531_378, 1_025_429_940, 459_877_355]
        );
        let lns = [1e-30, 0.3, 0.9, 3.0].map(|x| ln(x).to_bits());
        assert_eq!(
            lns,
            [3_263_834_037, 3_214_547_912, 3_185_035_077, 1_066_180_436]
        );
    }

    /// The definition, term by term.
    fn plain_sum(values: &[f32]) -> f32 {
        let mut total = 0.0;
        for block in values.chunks(SUM_BLOCK) {
            let mut lanes = vec![0.0_f32; SUM_LANES];
            for (i, value) in block.iter().enumerate() {
                lanes[i % SUM_LANES] += value;
            }
            while lanes.len() > 1 {
                let high = lanes.split_off(lanes.len() / 2);
                for (low, high) in lanes.iter_mut().zip(high) {
                    *low += high;
                }
            }
            total += lanes[0];
        }
        total
    }

    #[test]
    fn dense_sparse_and_plain_sums_have_the_same_bits() {
        for len in [0, 1, 255, 256, 257, 4095, 4096, 4097, 9000, 49_152] {
            let values: Vec<f32> = (0..len)
                .map(|i| exp(-((i * 7919 % 1000) as f32) / 40.0))
                .collect();
            let expected = plain_sum(&values).to_bits();
            assert_eq!(sum(&values).to_bits(), expected, "{len}");
            let terms = values.iter().enumerate().map(|(i, &v)| (i as u32, v));
            assert_eq!(sum_sparse(terms.clone()).to_bits(), expected, "{len}");
            // Leaving terms out is adding zeros.
            let thinned: Vec<f32> = values
                .iter()
                .map(|&v| if v > 0.2 { v } else { 0.0 })
                .collect();
            assert_eq!(
                sum_sparse(terms.filter(|t| t.1 > 0.2)).to_bits(),
                sum(&thinned).to_bits(),
                "{len}"
            );
        }
    }
}
