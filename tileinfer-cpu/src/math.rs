//! exp, expm1 and what is made of them, on vectors.
//!
//! exp(x) = 2^n exp(r) with n = round(x / ln 2) and |r| <= ln 2 / 2, where the Taylor series to the seventh
//! power leaves 6e-9. ln 2 is subtracted in two parts (the first has few bits, so n times it is exact).

use crate::simd::Isa;

const LOG2_E: f32 = std::f32::consts::LOG2_E;
/// 355/512: nine bits of ln 2.
const LN_2_HIGH: f32 = 0.693_359_4;
/// ln 2 - 355/512.
const LN_2_LOW: f32 = -2.121_944_4e-4;
/// Adding it rounds to an integer, which then stands in the low bits: 1.5 * 2^23.
const ROUNDER: f32 = 12_582_912.0;
/// Below it exp is 0 here: the smallest normal result is exp(-87.3).
const LOWEST: f32 = -87.0;
/// Above it exp would overflow.
const HIGHEST: f32 = 88.0;

/// (exp(r) - 1, k) with exp(x) = exp(r) * 2^n and n in the low bits of k; x within LOWEST ..= HIGHEST.
#[inline(always)]
fn reduced<I: Isa>(isa: I, x: I::V) -> (I::V, I::V) {
    let k = isa.add(isa.mul(x, isa.splat(LOG2_E)), isa.splat(ROUNDER));
    let n = isa.sub(k, isa.splat(ROUNDER));
    let r = isa.mul_add(n, isa.splat(-LN_2_HIGH), x);
    let r = isa.mul_add(n, isa.splat(-LN_2_LOW), r);
    let mut series = isa.splat(1.0 / 5040.0);
    for factorial in [720.0, 120.0, 24.0, 6.0, 2.0_f32] {
        series = isa.mul_add(series, r, isa.splat(1.0 / factorial));
    }
    (isa.mul_add(isa.mul(series, r), r, r), k)
}

/// exp(x): 0 below -87, exp(88) above 88, exactly 1 at 0; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp<I: Isa>(isa: I, x: I::V) -> I::V {
    // The order of the operands lets NaN through.
    let clamped = isa.max(isa.splat(LOWEST), isa.min(isa.splat(HIGHEST), x));
    let (less_one, k) = reduced(isa, clamped);
    let e = isa.add_exponent(isa.add(less_one, isa.splat(1.0)), k);
    isa.select_positive(isa.sub(isa.splat(LOWEST), x), isa.splat(0.0), e)
}

/// exp(x) - 1 without cancellation near 0; -1 below -87; NaN stays NaN.
#[inline(always)]
pub(crate) fn exp_m1<I: Isa>(isa: I, x: I::V) -> I::V {
    let clamped = isa.max(isa.splat(LOWEST), isa.min(isa.splat(HIGHEST), x));
    let (less_one, k) = reduced(isa, clamped);
    let scale = isa.add_exponent(isa.splat(1.0), k);
    isa.mul_add(scale, less_one, isa.sub(scale, isa.splat(1.0)))
}

/// x / (1 + exp(-x)).
#[inline(always)]
pub(crate) fn silu<I: Isa>(isa: I, x: I::V) -> I::V {
    let e = exp(isa, isa.sub(isa.splat(0.0), x));
    isa.div(x, isa.add(isa.splat(1.0), e))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::simd::{Kernel, Level};
    use crate::vector::parts;

    struct Apply<'a>(&'a mut [f32], fn(f64) -> f64, &'static str);

    impl Kernel for Apply<'_> {
        type Output = ();
        #[inline(always)]
        fn run<I: Isa>(self, isa: I) {
            let Apply(x, exact, name) = self;
            for (at, part) in parts(isa, x.len()) {
                let v = part.load(isa, &x[at..]);
                let y = match name {
                    "exp" => exp(isa, v),
                    "exp_m1" => exp_m1(isa, v),
                    _ => silu(isa, v),
                };
                let before = x[at..].to_vec();
                part.store(isa, &mut x[at..], y);
                for (y, x) in x[at..].iter().zip(before).take(I::LANES) {
                    let want = exact(f64::from(x));
                    let error = (f64::from(*y) - want).abs();
                    assert!(
                        error <= want.abs() * 4e-7 + 2e-38,
                        "{name}({x}) = {y}, not {want}"
                    );
                }
            }
        }
    }

    #[test]
    fn functions_are_right_to_a_few_units_in_the_last_place() {
        let grid: Vec<f32> = (-8700..8800).map(|i| i as f32 * 0.01).collect();
        let small: Vec<f32> = (-60..10)
            .flat_map(|e| [1.3, -1.7].map(|m| m * 2_f32.powi(e / 2)))
            .collect();
        let small: Vec<f32> = small.into_iter().filter(|x| x.abs() < 80.0).collect();
        for level in Level::all() {
            for input in [&grid, &small] {
                level.dispatch(Apply(&mut input.clone(), f64::exp, "exp"));
                level.dispatch(Apply(&mut input.clone(), f64::exp_m1, "exp_m1"));
                level.dispatch(Apply(
                    &mut input.clone(),
                    |x| x / (1.0 + (-x).exp()),
                    "silu",
                ));
            }
        }
    }

    #[test]
    fn ends_of_the_range() {
        struct Ends;
        impl Kernel for Ends {
            type Output = Vec<f32>;
            #[inline(always)]
            fn run<I: Isa>(self, isa: I) -> Vec<f32> {
                let mut x = [
                    f32::NEG_INFINITY,
                    -1e30,
                    -87.1,
                    0.0,
                    -0.0,
                    f32::INFINITY,
                    f32::NAN,
                ];
                for (at, part) in parts(isa, x.len()) {
                    let y = exp(isa, part.load(isa, &x[at..]));
                    part.store(isa, &mut x[at..], y);
                }
                x.to_vec()
            }
        }
        for level in Level::all() {
            let got = level.dispatch(Ends);
            assert_eq!(got[..5], [0.0, 0.0, 0.0, 1.0, 1.0]);
            assert!(got[5] > 1e38 && got[6].is_nan());
        }
    }
}
