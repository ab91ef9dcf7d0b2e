//! Against a plain f64 loop, at the sizes that bite, on every level; and the same bits whatever the rows, the
//! parts and the threads.

use half::{bf16, f16};
use tileinfer::backend::ComputeType;
use tileinfer::testing::Numbers;

use super::{Element, Matrix, Packed, linear_packed};
use crate::Rounding;
use crate::pool::Pool;
use crate::simd::Level;

const ELEMENTS: [Element; 3] = [Element::Bf16, Element::F16, Element::F32];
/// Of the activations: what is multiplied in pairs on some levels, and what never is.
const COMPUTE: [ComputeType; 2] = [ComputeType::F32, ComputeType::Bf16];

/// Weights as bytes, one byte into their buffer so that nothing is aligned, and what they are worth.
struct Weights {
    buffer: Vec<u8>,
    element: Element,
    values: Vec<f32>,
    rows: usize,
    cols: usize,
}

impl Weights {
    fn new(numbers: &mut Numbers, element: Element, rows: usize, cols: usize) -> Self {
        let mut buffer = vec![0];
        let mut values = Vec::new();
        for x in numbers.normals(rows * cols, 1.0, ComputeType::F32) {
            match element {
                Element::Bf16 => {
                    buffer.extend(bf16::from_f32(x).to_le_bytes());
                    values.push(bf16::from_f32(x).to_f32());
                }
                Element::F16 => {
                    buffer.extend(f16::from_f32(x).to_le_bytes());
                    values.push(f16::from_f32(x).to_f32());
                }
                Element::F32 => {
                    buffer.extend(x.to_le_bytes());
                    values.push(x);
                }
            }
        }
        Weights {
            buffer,
            element,
            values,
            rows,
            cols,
        }
    }

    fn matrix(&self) -> Matrix<'_> {
        Matrix::new(&self.buffer[1..], self.element, self.rows, self.cols)
            .expect("as many bytes as elements")
    }
}

fn linear(
    level: Level,
    pool: &Pool,
    x: &[f32],
    rows: usize,
    parts: &[Matrix<'_>],
    bias: Option<&[f32]>,
    rounding: Rounding,
) -> Vec<f32> {
    let n: usize = parts.iter().map(Matrix::rows).sum();
    let mut y = vec![f32::NAN; rows * n];
    let mut packed = Packed::default();
    let of_x = if x.iter().all(|x| bf16::from_f32(*x).to_f32() == *x) {
        Rounding::Bf16
    } else {
        Rounding::None
    };
    packed.pack(level, pool, x, rows, parts[0].cols, of_x, parts);
    linear_packed(level, pool, &mut y, &packed, parts, bias, rounding);
    y
}

fn bits(x: &[f32]) -> Vec<u32> {
    x.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn equals_the_plain_loop_on_every_level() {
    let pool = Pool::new(2);
    let mut numbers = Numbers::new(1);
    for (n, k) in [
        (0, 8),
        (1, 0),
        (1, 1),
        (3, 7),
        (4, 31),
        (5, 32),
        (9, 33),
        (66, 64),
        (17, 65),
        (130, 200),
    ] {
        for element in ELEMENTS {
            let weights = Weights::new(&mut numbers, element, n, k);
            for (rows, compute) in [0, 1, 2, 5, 6, 13, 40]
                .into_iter()
                .flat_map(|rows| COMPUTE.map(|compute| (rows, compute)))
            {
                let x = numbers.normals(rows * k, 1.0, compute);
                let bias = numbers.normals(n, 1.0, ComputeType::F32);
                for level in Level::all() {
                    let y = linear(
                        level,
                        &pool,
                        &x,
                        rows,
                        &[weights.matrix()],
                        Some(&bias),
                        Rounding::None,
                    );
                    let rounded = linear(
                        level,
                        &pool,
                        &x,
                        rows,
                        &[weights.matrix()],
                        Some(&bias),
                        Rounding::Bf16,
                    );
                    for r in 0..rows {
                        for i in 0..n {
                            let product = |j: usize| {
                                f64::from(weights.values[i * k + j]) * f64::from(x[r * k + j])
                            };
                            let exact: f64 = (0..k).map(product).sum::<f64>() + f64::from(bias[i]);
                            let size: f64 = (0..k).map(|j| product(j).abs()).sum::<f64>() + 1.0;
                            let got = y[r * n + i];
                            assert!(
                                (f64::from(got) - exact).abs() <= 1e-6 * size,
                                "{} {element:?} {rows} x {k} -> {n}: ({r}, {i}) is {got}, not {exact}",
                                level.name()
                            );
                            assert_eq!(rounded[r * n + i], bf16::from_f32(got).to_f32());
                        }
                    }
                }
            }
        }
    }
}

#[test]
fn a_row_has_the_same_bits_in_any_company() {
    let mut numbers = Numbers::new(2);
    for (n, k) in [(1, 1), (7, 40), (37, 576), (200, 129)] {
        for (element, compute) in ELEMENTS
            .into_iter()
            .flat_map(|element| COMPUTE.map(|compute| (element, compute)))
        {
            let weights = Weights::new(&mut numbers, element, n, k);
            let x = numbers.normals(23 * k, 1.0, compute);
            for level in Level::all() {
                let all = linear(
                    level,
                    &Pool::new(1),
                    &x,
                    23,
                    &[weights.matrix()],
                    None,
                    Rounding::None,
                );
                for rows in 1..=23 {
                    let some = linear(
                        level,
                        &Pool::new(1),
                        &x[..rows * k],
                        rows,
                        &[weights.matrix()],
                        None,
                        Rounding::None,
                    );
                    assert_eq!(
                        bits(&some),
                        bits(&all[..rows * n]),
                        "{} {rows} rows",
                        level.name()
                    );
                }
                let last = linear(
                    level,
                    &Pool::new(1),
                    &x[22 * k..],
                    1,
                    &[weights.matrix()],
                    None,
                    Rounding::None,
                );
                assert_eq!(bits(&last), bits(&all[22 * n..]));
            }
        }
    }
}

#[test]
fn threads_and_parts_change_no_bit() {
    let mut numbers = Numbers::new(3);
    let k = 300;
    let parts = [Element::Bf16, Element::F32, Element::Bf16, Element::F16].map(|element| {
        let rows = 1 + numbers.below(300);
        Weights::new(&mut numbers, element, rows, k)
    });
    let matrices = parts.each_ref().map(Weights::matrix);
    let n: usize = parts.iter().map(|part| part.rows).sum();
    let bias = numbers.normals(n, 1.0, ComputeType::F32);
    for level in Level::all() {
        for (rows, compute) in [1, 3, 40]
            .into_iter()
            .flat_map(|rows| COMPUTE.map(|compute| (rows, compute)))
        {
            let x = numbers.normals(rows * k, 1.0, compute);
            let all = linear(
                level,
                &Pool::new(1),
                &x,
                rows,
                &matrices,
                Some(&bias),
                Rounding::None,
            );
            for threads in [2, 3, 7] {
                let pool = Pool::new(threads);
                let y = linear(
                    level,
                    &pool,
                    &x,
                    rows,
                    &matrices,
                    Some(&bias),
                    Rounding::None,
                );
                assert_eq!(bits(&y), bits(&all), "{} {threads} threads", level.name());
            }
            let mut first = 0;
            for part in &parts {
                let bias = &bias[first..first + part.rows];
                let y = linear(
                    level,
                    &Pool::new(1),
                    &x,
                    rows,
                    &[part.matrix()],
                    Some(bias),
                    Rounding::None,
                );
                for r in 0..rows {
                    let among = &all[r * n + first..][..part.rows];
                    assert_eq!(bits(&y[r * part.rows..(r + 1) * part.rows]), bits(among));
                }
                first += part.rows;
            }
        }
    }
}

#[test]
fn a_matrix_has_as_many_bytes_as_elements() {
    assert!(Matrix::new(&[0; 12], Element::Bf16, 2, 3).is_some());
    assert!(Matrix::new(&[0; 12], Element::F32, 2, 3).is_none());
    assert!(Matrix::new(&[], Element::F32, usize::MAX, 3).is_none());
}
