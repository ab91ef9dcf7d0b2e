//! Against the sum in 64-bit integers, to the bit, at the sizes and values that bite, on every level and in any company.

use tileinfer::backend::ComputeType;
use tileinfer::testing::Numbers;
use tileinfer::weights::int8::round_activations;

use super::{Int8Matrix, PackedInt8, linear_int8};
use crate::Rounding;
use crate::pool::Pool;
use crate::simd::Level;

struct Weights {
    /// One byte too many in front, so that nothing is aligned.
    values: Vec<i8>,
    scales: Vec<f32>,
    cols: usize,
}

impl Weights {
    fn new(numbers: &mut Numbers, rows: usize, cols: usize) -> Self {
        Weights {
            values: (0..=rows * cols).map(|_| numbers.bits() as i8).collect(),
            scales: (0..rows)
                .map(|_| numbers.normal(0.1).abs() + 1e-3)
                .collect(),
            cols,
        }
    }

    fn matrix(&self) -> Int8Matrix<'_> {
        Int8Matrix::new(&self.values[1..], &self.scales, self.cols).unwrap()
    }

    /// What the definition says.
    fn exact(&self, x: &[f32], bias: Option<&[f32]>) -> Vec<u32> {
        let mut v = vec![0; x.len()];
        let unit = round_activations(x, &mut v);
        let rows = self.scales.iter().enumerate();
        let ys = rows.map(|(n, scale)| {
            let q = &self.values[1 + n * self.cols..][..self.cols];
            let sum: i64 = q
                .iter()
                .zip(&v)
                .map(|(&q, &v)| i64::from(q) * i64::from(v))
                .sum();
            (sum as f32 * (unit * scale) + bias.map_or(0.0, |bias| bias[n])).to_bits()
        });
        ys.collect()
    }
}

fn linear(
    level: Level,
    pool: &Pool,
    x: &[f32],
    parts: &[Int8Matrix<'_>],
    bias: Option<&[f32]>,
) -> Vec<u32> {
    let cols = parts[0].cols;
    let rows = x.len() / cols;
    let n: usize = parts.iter().map(|part| part.scales.len()).sum();
    let mut y = vec![f32::NAN; rows * n];
    let mut packed = PackedInt8::default();
    packed.pack(level, pool, x, rows, cols);
    linear_int8(level, pool, &mut y, &packed, parts, bias, Rounding::None);
    y.iter().map(|y| y.to_bits()).collect()
}

#[test]
fn equals_the_integer_sum_on_every_level() {
    let pool = Pool::new(2);
    let mut numbers = Numbers::new(1);
    for (n, k) in [
        (1, 1),
        (3, 7),
        (4, 31),
        (5, 64),
        (9, 65),
        (66, 128),
        (17, 200),
        (9, 4160),
        (2, 66000),
    ] {
        let weights = Weights::new(&mut numbers, n, k);
        for rows in [1, 2, 3, 4, 7, 13] {
            let mut x = numbers.normals(rows * k, 1.0, ComputeType::Bf16);
            // An outlier, and a row of zeros.
            x[k / 2] = 1000.0;
            if rows > 3 {
                x[3 * k..4 * k].fill(0.0);
            }
            let bias = numbers.normals(n, 1.0, ComputeType::F32);
            for bias in [None, Some(&bias[..])] {
                let expected: Vec<u32> = x.chunks(k).flat_map(|x| weights.exact(x, bias)).collect();
                for level in Level::all() {
                    let found = linear(level, &pool, &x, &[weights.matrix()], bias);
                    assert_eq!(found, expected, "{} {rows} x {k} -> {n}", level.name());
                }
            }
        }
    }
}

#[test]
fn the_largest_sums_do_not_overflow() {
    let pool = Pool::new(1);
    for k in [4096, 4100, 8192, 65536, 65537] {
        for (q, x) in [(127, 1.0), (-128, 1.0), (-128, -1.0), (127, -1.0)] {
            let weights = Weights {
                values: vec![q; 1 + 5 * k],
                scales: vec![0.5; 5],
                cols: k,
            };
            let x = vec![x; 4 * k];
            let expected: Vec<u32> = x.chunks(k).flat_map(|x| weights.exact(x, None)).collect();
            for level in Level::all() {
                let found = linear(level, &pool, &x, &[weights.matrix()], None);
                assert_eq!(found, expected, "{} {k} columns of {q}", level.name());
            }
        }
    }
}

#[test]
fn company_threads_and_parts_change_no_bit() {
    let mut numbers = Numbers::new(2);
    let k = 300;
    let parts = [37, 1, 200, 6].map(|n| Weights::new(&mut numbers, n, k));
    let matrices = parts.each_ref().map(Weights::matrix);
    let x = numbers.normals(50 * k, 1.0, ComputeType::F32);
    for level in Level::all() {
        let all = linear(level, &Pool::new(1), &x, &matrices, None);
        for rows in (1..50).step_by(3) {
            let some = linear(level, &Pool::new(3), &x[..rows * k], &matrices, None);
            assert_eq!(some, all[..some.len()], "{} {rows} rows", level.name());
        }
        let last = linear(level, &Pool::new(2), &x[49 * k..], &matrices, None);
        assert_eq!(last, all[49 * 244..]);
        for row in [0, 31, 49] {
            let expected: Vec<u32> = parts
                .iter()
                .flat_map(|part| part.exact(&x[row * k..(row + 1) * k], None))
                .collect();
            assert_eq!(all[row * 244..(row + 1) * 244], expected);
        }
    }
}

#[test]
fn a_matrix_has_a_row_for_every_scale() {
    assert!(Int8Matrix::new(&[0; 6], &[1.0; 2], 3).is_some());
    assert!(Int8Matrix::new(&[0; 6], &[1.0; 3], 3).is_none());
}
