//! The reference numbers of `testdata/golden/int8`: rounded weights and vectors, and what smoothing the keys does for
//! attention. Made by numpy and torch; its `int8.json` says what each case is for.

use std::path::Path;

use super::{Numbers, conformance::layout};
use crate::backend::{AttentionShape, Backend, ComputeType, Element, KvRows, Mask};
use crate::kv::{KvElement, KvLayout, smoothing_factors};
use crate::weights::int8::{round_activations, round_row, split};
use crate::weights::{Checkpoint, Weight, WeightData, WeightPart};

/// Holds the rounding rules and the backends that `make` makes to the numbers in `folder`.
pub fn golden_int8<B: Backend>(make: &dyn Fn(ComputeType) -> B, folder: &Path) {
    let golden = Golden {
        tensors: Checkpoint::open_file(folder.join("int8.safetensors")).unwrap(),
        report: serde_json::from_slice(&std::fs::read(folder.join("int8.json")).unwrap()).unwrap(),
    };
    for case in golden.report["weights"].as_array().unwrap() {
        golden.weight(make, case["name"].as_str().unwrap());
    }
    for case in golden.report["kv"].as_array().unwrap() {
        golden.vectors(case["name"].as_str().unwrap());
    }
    for case in golden.report["smoothing"].as_array().unwrap() {
        golden.smoothing(make, case);
    }
}

/// A linear with an int8 weight on rows that are hard for 8 bits: within the bound that the 16 bits of its activations
/// give, of the product with unrounded activations.
pub fn int8_activations<B: Backend>(make: &dyn Fn(ComputeType) -> B) {
    for v in -32258..=32258 {
        let (hi, lo) = split(v);
        assert_eq!(254 * i32::from(hi) + i32::from(lo), i32::from(v));
        assert!((-127..=127).contains(&hi) && (-127..=127).contains(&lo));
    }
    let mut numbers = Numbers::new(17);
    for (k, outlier) in [
        (64, 1.0),
        (576, 1000.0),
        (1536, 1000.0),
        (8192, 1000.0),
        (33, 1e6),
    ] {
        let n = 40;
        let mut x = numbers.normals(k, 1.0, ComputeType::Bf16);
        x[k / 3] = ComputeType::Bf16.round(outlier);
        let host = weight_of(&numbers.normals(n * k, 0.05, ComputeType::F32), n, k).to_int8();
        let backend = make(ComputeType::F32);
        let y = linear(&backend, &host, &x, 1);
        // What a row of one byte a value would lose: everything but the outlier.
        let top = x.iter().fold(0.0_f64, |top, x| top.max(f64::from(x.abs())));
        let mut row = vec![0.0; k];
        let (mut error, mut coarse, mut size) = (0.0_f64, 0.0_f64, 0.0_f64);
        for (i, &y) in y.iter().enumerate() {
            host.row_f32(i, &mut row);
            let products = |x: &[f32]| -> f64 {
                let pairs = row.iter().zip(x);
                pairs.map(|(&w, &x)| f64::from(w) * f64::from(x)).sum()
            };
            let exact = products(&x);
            let weights: f64 = row.iter().map(|&w| f64::from(w.abs())).sum();
            let bound = weights * (top / 64516.0 + top * 3e-7) + exact.abs() * 1e-6;
            assert!(
                (f64::from(y) - exact).abs() <= bound,
                "{k} columns, outlier {outlier}: output {i} is {y}, exactly {exact}, bound {bound}"
            );
            error += (f64::from(y) - exact).powi(2);
            let step = top as f32 / 127.0;
            let one_byte: Vec<f32> = x.iter().map(|x| (x / step).round() * step).collect();
            coarse += (products(&one_byte) - exact).powi(2);
            size += exact.powi(2);
        }
        // An outlier of a thousand leaves one byte a value nothing but itself; two keep the rest to a hundredth.
        let better = error.sqrt() * 50.0 <= coarse.sqrt() && error.sqrt() <= 1e-3 * size.sqrt();
        assert!(
            better || outlier > 1000.0,
            "{k} columns, outlier {outlier}: {error} against {coarse} of {size}"
        );
    }
    // Rows of zeros, of the smallest numbers, and of numbers that are none.
    let mut v = [1; 3];
    assert_eq!(
        (round_activations(&[0.0, -0.0, 0.0], &mut v), v),
        (1.0, [0; 3])
    );
    assert_eq!(
        (round_activations(&[1e-40, 0.0, 0.0], &mut v), v),
        (1.0, [0; 3])
    );
    assert!(round_activations(&[1.0, f32::NAN, 0.0], &mut v).is_nan());
    assert!(round_activations(&[1.0, f32::NEG_INFINITY, 0.0], &mut v).is_nan());
    assert_eq!(round_activations(&[-2.0, 1.0, 2.0], &mut v), 2.0 / 32258.0);
    assert_eq!(v, [-32258, 16129, 32258]);
    let mut q = [1; 2];
    assert!(round_row(&[1.0, f32::INFINITY], &mut q).is_nan() && q == [0; 2]);
    assert_eq!(
        (round_row(&[], &mut []), round_row(&[0.0; 2], &mut q), q),
        (1.0, 1.0, [0; 2])
    );
}

fn weight_of(values: &[f32], rows: usize, cols: usize) -> Weight {
    let part = WeightPart::new(rows, cols, WeightData::OwnedF32(values.into())).unwrap();
    Weight::new(vec![part]).unwrap()
}

/// `weight x` without rounding, `[rows, weight rows]`.
fn linear<B: Backend>(backend: &B, weight: &Weight, x: &[f32], rows: usize) -> Vec<f32> {
    let mut input = backend.alloc(Element::Model, rows, weight.cols()).unwrap();
    backend.set_rows(&mut input, rows).unwrap();
    backend.upload(&mut input, 0, x).unwrap();
    let mut out = backend.alloc(Element::F32, rows, weight.rows()).unwrap();
    backend.set_rows(&mut out, rows).unwrap();
    let weight = backend.load_weight(weight).unwrap();
    backend.linear(&mut out, &weight, None, &input).unwrap();
    backend.download(&out).unwrap()
}

struct Golden {
    tensors: Checkpoint,
    report: serde_json::Value,
}

impl Golden {
    fn f32s(&self, name: &str) -> Vec<f32> {
        let tensor = self.tensors.tensor(name).unwrap();
        let bytes = &tensor.data[..];
        match tensor.dtype.size() {
            2 => (bytes.as_chunks::<2>().0.iter())
                .map(|&b| half::bf16::from_le_bytes(b).to_f32())
                .collect(),
            _ => (bytes.as_chunks::<4>().0.iter())
                .map(|&b| f32::from_le_bytes(b))
                .collect(),
        }
    }

    fn i8s(&self, name: &str) -> Vec<i8> {
        let bytes = self.tensors.tensor(name).unwrap().data;
        bytes.iter().map(|&byte| byte as i8).collect()
    }

    fn width(&self, name: &str) -> usize {
        *self.tensors.tensor(name).unwrap().shape.last().unwrap()
    }

    fn weight<B: Backend>(&self, make: &dyn Fn(ComputeType) -> B, name: &str) {
        let at = format!("weight.{name}");
        let (values, cols) = (self.f32s(&at), self.width(&at));
        let host = weight_of(&values, values.len() / cols, cols).to_int8();
        let (q, scales) = host.parts()[0].data().int8().unwrap();
        assert_eq!(q, self.i8s(&format!("{at}.q")), "{name}");
        assert_eq!(scales, self.f32s(&format!("{at}.scale")), "{name}");
        if self.tensors.tensor(&format!("{at}.x")).is_some() {
            let (x, expected) = (self.f32s(&format!("{at}.x")), self.f32s(&format!("{at}.y")));
            let y = linear(&make(ComputeType::F32), &host, &x, 3);
            // Sums in f32 are within 1e-5 of the largest; the 16 bits of the activations come on top.
            let largest = expected.iter().fold(0.0_f32, |m, y| m.max(y.abs()));
            let mut row = vec![0.0; cols];
            for (i, (&y, &expected)) in y.iter().zip(&expected).enumerate() {
                host.row_f32(i % host.rows(), &mut row);
                let x = &x[i / host.rows() * cols..][..cols];
                let top = x.iter().fold(0.0_f32, |top, x| top.max(x.abs()));
                let weights: f32 = row.iter().map(|w| w.abs()).sum();
                let bound = 1e-5 * largest + weights * top / 64516.0;
                assert!((y - expected).abs() <= bound, "{name} {i}: {y}, {expected}");
            }
        }
    }

    fn vectors(&self, name: &str) {
        let at = format!("kv.{name}");
        let (values, width) = (self.f32s(&at), self.width(&at));
        let mut q = vec![0; values.len()];
        let rows = values.chunks(width).zip(q.chunks_mut(width));
        let scales: Vec<f32> = rows.map(|(x, q)| round_row(x, q)).collect();
        assert_eq!(q, self.i8s(&format!("{at}.q")), "{name}");
        assert_eq!(scales, self.f32s(&format!("{at}.scale")), "{name}");
    }

    fn smoothing<B: Backend>(&self, make: &dyn Fn(ComputeType) -> B, case: &serde_json::Value) {
        let name = case["name"].as_str().unwrap();
        let at = format!("smooth.{name}");
        let [keys, values, queries, exact] =
            ["k", "v", "query", "out"].map(|what| self.f32s(&format!("{at}.{what}")));
        let mut errors = Vec::new();
        for (way, power) in [("none", 0.0), ("full", 1.0), ("sqrt", 0.5)] {
            let factors = if power == 0.0 {
                vec![1.0; 64]
            } else {
                let stored = self.f32s(&format!("{at}.{way}.factor"));
                let ours = smoothing_factors(&keys, 64, power);
                for (ours, stored) in ours.iter().zip(&stored) {
                    assert!((ours - stored).abs() <= 1e-6 * stored, "{name} {way}");
                }
                stored
            };
            let mut q = vec![0; keys.len()];
            let rows = keys.chunks(64).zip(q.chunks_mut(64));
            let scales: Vec<f32> = rows
                .map(|(key, q)| {
                    let key: Vec<f32> = key.iter().zip(&factors).map(|(k, f)| k / f).collect();
                    round_row(&key, q)
                })
                .collect();
            assert_eq!(q, self.i8s(&format!("{at}.{way}.k_q")), "{name} {way}");
            assert_eq!(
                scales,
                self.f32s(&format!("{at}.{way}.k_scale")),
                "{name} {way}"
            );

            let smoothing = (power != 0.0).then_some(&factors[..]);
            let found = attend(&make(ComputeType::F32), &keys, &values, &queries, smoothing);
            let squares = found
                .iter()
                .zip(&exact)
                .map(|(a, b)| f64::from(a - b).powi(2));
            let error = (squares.sum::<f64>() / exact.len() as f64).sqrt();
            let expected = case[way]["out_rms_error_values_int8_too"].as_f64().unwrap();
            assert!(
                (error / expected - 1.0).abs() <= 0.2,
                "{name} {way}: the output's error is {error}, {expected} in the reference"
            );
            errors.push(error);
        }
        // Everywhere but on clean keys, smoothing halves the error at least.
        if name != "clean" {
            assert!(errors[1] * 2.0 <= errors[0], "{name}: {errors:?}");
        }
    }
}

/// Attention of 8 queries over 96 keys and values of one head in an int8 cache, no mask.
fn attend<B: Backend>(
    backend: &B,
    keys: &[f32],
    values: &[f32],
    queries: &[f32],
    smoothing: Option<&[f32]>,
) -> Vec<f32> {
    let kv = KvLayout {
        page_size: 64,
        kv_heads: 1,
        head_dim: 64,
        element: KvElement::Int8,
    };
    let mut pages = backend.alloc_pages(&kv, smoothing, 4).unwrap();
    let tensor = |x: &[f32]| {
        let rows = x.len() / 64;
        let mut tensor = backend.alloc(Element::Model, rows, 64).unwrap();
        backend.set_rows(&mut tensor, rows).unwrap();
        backend.upload(&mut tensor, 0, x).unwrap();
        tensor
    };
    let step = |spans: &[(usize, usize)]| {
        let layout = layout(spans, 64, 4);
        let mut step = backend
            .alloc_step(layout.rows(), 1, layout.table_width)
            .unwrap();
        backend.prepare(&mut step, &layout, None).unwrap();
        step
    };
    let rows = KvRows {
        keys: tensor(keys),
        values: tensor(values),
    };
    backend
        .store_kv(&mut pages, &rows, &step(&[(0, 96)]))
        .unwrap();
    let shape = AttentionShape {
        heads: 1,
        kv_heads: 1,
        head_dim: 64,
        scale: 0.125,
        mask: Mask::BlockVisible,
    };
    let mut out = tensor(queries);
    let queries = tensor(queries);
    backend
        .attention(&mut out, &queries, &pages, &step(&[(88, 8)]), &shape)
        .unwrap();
    backend.download(&out).unwrap()
}
