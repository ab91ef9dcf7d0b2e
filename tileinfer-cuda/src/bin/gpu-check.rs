//! Holds every kernel against plain f64 loops on the GPU at hand, and against itself: the same row must
//! come out the same, bit for bit, whatever stands beside it. Prints a line a check and a table of times.
//!
//! `gpu-check [--sweep | --times | --draws | --suites] [--toolkit DIR] PACK_FOLDER [GOLDEN_FOLDER [SMOLLM2_FOLDER]]`;
//! with `--sweep`, candidates for tiles instead, which takes a pack made with `tileinfer-kernels --sweep`; with `--times`,
//! the times alone, with `--draws`, what is about sampling, with `--suites`, the conformance suite and small models, as a
//! memory checker is patient enough for; with a toolkit, kernels that the pack lacks are compiled, and named at the end.

#[path = "gpu-check/sampling.rs"]
mod sampling;

use std::collections::BTreeSet;
use std::panic::AssertUnwindSafe;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use half::bf16;
use tileinfer::Result;
use tileinfer::testing::{
    SAME_TEXT_MODELS, conformance, golden_models, golden_smollm2, same_text_model,
};
use tileinfer::weights::int8::{round_activations, split};
use tileinfer_cuda::CudaBackend;
use tileinfer_cuda::driver::{Address, Memory};
use tileinfer_cuda::kernels::Type;
use tileinfer_cuda::ops::{
    AttentionPlan, Groups, HeadGroup, HeadInputs, LinearShape, Ops, PAGE, Pools, Rows, StepArrays,
    Sums, Then, attention_tiles, splits, sweep_plans, sweep_shapes, sweep_tiles,
};
use tileinfer_cuda::store::KernelOptions;

/// The library's own suites on this device: every op against the reference backend, then small models
/// against transformers and against themselves if their fixtures are at hand.
fn suites(ops: &Arc<Ops>, golden: &Path, smollm2: Option<&Path>) -> usize {
    let make = |compute| CudaBackend::with_ops(compute, ops.clone());
    let mut failed = 0;
    let mut suite = |name: &str, body: &dyn Fn()| {
        println!("== {name}");
        // The suites say what is wrong by panicking, and the message is printed as they do.
        match std::panic::catch_unwind(AssertUnwindSafe(body)) {
            Ok(()) => println!("ok {name}"),
            Err(_) => {
                println!("FAILED {name}");
                failed += 1;
            }
        }
    };
    suite("conformance", &|| conformance(&make));
    if golden.is_dir() {
        suite("golden models", &|| golden_models(&make, golden, 2e-3));
        // One pass over a text is launched op by op, single tokens are recorded: they give the same bits.
        for name in SAME_TEXT_MODELS {
            suite(&format!("same text, {name}"), &|| {
                same_text_model(&make, golden, name);
            });
        }
    }
    if let Some(folder) = smollm2 {
        suite("SmolLM2's answers", &|| {
            golden_smollm2(&make, golden, folder)
        });
    }
    failed
}

fn main() {
    let mut options = KernelOptions::default();
    let mut arguments = std::env::args().skip(1).peekable();
    let sweep = arguments
        .next_if(|argument| argument == "--sweep")
        .is_some();
    let times = arguments
        .next_if(|argument| argument == "--times")
        .is_some();
    let draws = arguments
        .next_if(|argument| argument == "--draws")
        .is_some();
    let only_suites = arguments
        .next_if(|argument| argument == "--suites")
        .is_some();
    if arguments
        .next_if(|argument| argument == "--toolkit")
        .is_some()
    {
        options.toolkit = arguments.next().map(PathBuf::from);
    }
    options
        .pack_folders
        .extend(arguments.next().map(PathBuf::from));
    let golden = arguments
        .next()
        .map_or_else(|| PathBuf::from("testdata/golden"), PathBuf::from);
    let smollm2 = arguments.next().map(PathBuf::from);
    let failed = Ops::open(0, &options).and_then(|ops| {
        let ops = Arc::new(ops);
        let mut checker = Checker {
            ops: ops.clone(),
            random: 1,
            failed: 0,
        };
        if sweep {
            return checker.sweep();
        }
        if times {
            return checker.times().map(|()| 0);
        }
        if draws {
            return checker.sampling().map(|()| checker.failed);
        }
        let mut failed = suites(&ops, &golden, smollm2.as_deref());
        if !only_suites {
            failed += checker.run()?;
        }
        for name in ops.kernels().compiled() {
            println!("not in the pack: {name}");
        }
        Ok(failed)
    });
    match failed {
        Ok(0) => {}
        Ok(count) => {
            println!("{count} checks failed");
            std::process::exit(1);
        }
        Err(error) => {
            println!("error: {error}");
            std::process::exit(1);
        }
    }
}

type Check = fn(&mut Checker) -> Result<()>;

struct Checker {
    ops: Arc<Ops>,
    random: u64,
    failed: usize,
}

/// An array on the device.
struct Array {
    memory: Memory,
    kind: Type,
    len: usize,
}

impl Array {
    fn at(&self) -> Address {
        self.memory.address()
    }
}

impl Checker {
    fn run(mut self) -> Result<usize> {
        println!("{:?}", self.ops.device().info());
        let steps: [(&str, Check); 10] = [
            ("linear", Self::linear),
            ("int8", Self::int8),
            ("rows do not see their neighbours", Self::linear_bits),
            ("norms", Self::norms),
            ("norms add up splits alike", Self::norm_bits),
            ("activations", Self::activations),
            ("heads", Self::heads),
            ("attention", Self::attention),
            ("argmax and gathers", Self::choices),
            ("sampling", Self::sampling),
        ];
        for (name, step) in steps {
            println!("== {name}");
            if let Err(error) = step(&mut self) {
                println!("FAILED {name}: {error}");
                self.failed += 1;
                // After a fault on the device nothing else can run.
                self.ops.device().synchronize()?;
            }
        }
        if self.failed == 0 {
            println!("== times");
            self.times()?;
        }
        Ok(self.failed)
    }

    fn sweep(mut self) -> Result<usize> {
        self.attention_case(Type::Bf16, [8, 2, 128], true, 1 << 30, true)?;
        self.linear_sweep()?;
        self.attention_times(true)?;
        Ok(self.failed)
    }

    fn next(&mut self) -> u64 {
        // SplitMix64.
        self.random = self.random.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.random;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Values with a standard deviation of about `scale`, rounded to `kind`.
    fn values(&mut self, kind: Type, len: usize, scale: f32) -> Vec<f32> {
        let mut value = || {
            let sum: f32 = (0..4)
                .map(|_| (self.next() >> 40) as f32 / (1u64 << 24) as f32 - 0.5)
                .sum();
            round(kind, sum * 1.732 * scale)
        };
        (0..len).map(|_| value()).collect()
    }

    fn array(&self, kind: Type, values: &[f32]) -> Result<Array> {
        let memory = self
            .ops
            .device()
            .alloc("an array", values.len() * kind.bytes())?;
        let bytes: Vec<u8> = match kind {
            Type::Bf16 => values
                .iter()
                .flat_map(|&v| bf16::from_f32(v).to_le_bytes())
                .collect(),
            Type::F32 => values.iter().flat_map(|v| v.to_le_bytes()).collect(),
        };
        self.ops.device().upload(memory.address(), &bytes)?;
        Ok(Array {
            memory,
            kind,
            len: values.len(),
        })
    }

    fn integers(&self, values: &[i32]) -> Result<Array> {
        let memory = self.ops.device().alloc("integers", values.len() * 4)?;
        let bytes: Vec<u8> = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        self.ops.device().upload(memory.address(), &bytes)?;
        Ok(Array {
            memory,
            kind: Type::F32,
            len: values.len(),
        })
    }

    /// An array of NaNs.
    fn poisoned(&self, kind: Type, len: usize) -> Result<Array> {
        let memory = self.ops.device().alloc("an output", len * kind.bytes())?;
        self.ops
            .device()
            .queue_fill(memory.address(), 0xff, len * kind.bytes())?;
        Ok(Array { memory, kind, len })
    }

    fn read(&self, array: &Array) -> Result<Vec<f32>> {
        let mut bytes = vec![0; array.len * array.kind.bytes()];
        self.ops.device().download(array.at(), &mut bytes)?;
        Ok(match array.kind {
            Type::Bf16 => bytes
                .chunks_exact(2)
                .map(|b| bf16::from_le_bytes([b[0], b[1]]).to_f32())
                .collect(),
            Type::F32 => bytes
                .chunks_exact(4)
                .map(|b| f32::from_le_bytes([b[0], b[1], b[2], b[3]]))
                .collect(),
        })
    }

    fn read_integers(&self, array: &Array) -> Result<Vec<i32>> {
        Ok(self
            .read(array)?
            .into_iter()
            .map(|v| v.to_bits().cast_signed())
            .collect())
    }

    /// Relative error in the 2-norm, against a bound.
    fn close(&mut self, what: &str, got: &[f32], want: &[f64], bound: f64) {
        let square = |v: f64| v * v;
        let error: f64 = got
            .iter()
            .zip(want)
            .map(|(&g, &w)| square(f64::from(g) - w))
            .sum();
        let size: f64 = want.iter().map(|&w| square(w)).sum();
        let relative = (error / size.max(1e-30)).sqrt();
        let good = got.len() == want.len() && relative <= bound;
        if !good {
            self.failed += 1;
            let wrong = got.iter().zip(want).position(|(&g, &w)| {
                let difference = (f64::from(g) - w).abs();
                difference.is_nan() || difference > 0.05 * w.abs().max(1e-3)
            });
            let at = wrong.map(|i| (i, got[i], want[i]));
            println!("FAILED {what}: relative error {relative:.2e} over {bound:.0e}, first {at:?}");
        } else {
            println!("ok {what}: {relative:.1e}");
        }
    }

    fn same(&mut self, what: &str, got: &[f32], want: &[f32]) {
        let differ = got
            .iter()
            .zip(want)
            .filter(|(g, w)| g.to_bits() != w.to_bits())
            .count();
        if differ > 0 || got.len() != want.len() || got.iter().any(|v| v.is_nan()) {
            self.failed += 1;
            println!("FAILED {what}: {differ} of {} values differ", want.len());
        } else {
            println!("ok {what}: bit for bit");
        }
    }

    fn linear(&mut self) -> Result<()> {
        let shapes: [(usize, usize); 6] = [
            (64, 64),
            (200, 1000),
            (72, 2048),
            (17, 33),
            (130, 513),
            (1, 8),
        ];
        for kind in [Type::Bf16, Type::F32] {
            for (n, k) in shapes {
                for rows in [1, 3, 16, 17, 40, 65, 130] {
                    for (out, biased) in [(kind, true), (Type::F32, false)] {
                        let w = self.values(kind, n * k, 0.05);
                        let x = self.values(kind, rows * k, 1.0);
                        let b = self.values(kind, n, 1.0);
                        let want: Vec<f64> = (0..rows * n)
                            .map(|i| {
                                let (r, c) = (i / n, i % n);
                                let products = x[r * k..][..k].iter().zip(&w[c * k..][..k]);
                                let sum: f64 =
                                    products.map(|(&x, &w)| f64::from(x) * f64::from(w)).sum();
                                sum + if biased { f64::from(b[c]) } else { 0.0 }
                            })
                            .collect();
                        let (w, x, b) = (
                            self.array(kind, &w)?,
                            self.array(kind, &x)?,
                            self.array(kind, &b)?,
                        );
                        let y = self.poisoned(out, rows * n)?;
                        let bias = biased.then_some(b.at());
                        let shape = LinearShape::new([kind, out], [rows, n, k]);
                        self.ops
                            .linear(y.at(), x.at().into(), w.at().into(), bias, &shape)?;
                        let bound = if out == Type::Bf16 { 4e-3 } else { 2e-6 };
                        let what = format!("linear {kind:?}->{out:?} {rows} x [{n}, {k}]");
                        let got = self.read(&y)?;
                        self.close(&what, &got, &want, bound);
                    }
                }
            }
        }
        Ok(())
    }

    /// Products with int8 weights: rounded activations to the bit, sums within the rounding of `joined`.
    fn int8(&mut self) -> Result<()> {
        for kind in [Type::Bf16, Type::F32] {
            for (n, k) in [(64, 64), (200, 1024), (130, 33), (96, 4096)] {
                for rows in [1, 3, 9, 17, 40, 130] {
                    let mut x = self.values(kind, rows * k, 1.0);
                    x[k / 2] = 1000.0;
                    if rows > 1 {
                        x[k..2 * k].fill(0.0);
                    }
                    let w: Vec<i8> = (0..n * k)
                        .map(|_| ((self.next() >> 40) % 255) as i16 as i8)
                        .collect();
                    let scales = self.values(Type::F32, n, 0.01);
                    let b = self.values(kind, n, 1.0);
                    let mut v = vec![0i16; rows * k];
                    let t: Vec<f32> = x
                        .chunks(k)
                        .zip(v.chunks_mut(k))
                        .map(|(x, v)| round_activations(x, v))
                        .collect();
                    let halves = v.iter().map(|&v| split(v).0);
                    let halves: Vec<i8> = halves.chain(v.iter().map(|&v| split(v).1)).collect();
                    let mut want = Vec::new();
                    for r in 0..rows {
                        for c in 0..n {
                            let products = v[r * k..][..k].iter().zip(&w[c * k..][..k]);
                            let sum: i64 =
                                products.map(|(&v, &w)| i64::from(v) * i64::from(w)).sum();
                            let scale = f64::from(t[r]) * f64::from(scales[c]);
                            want.push(sum as f64 * scale + f64::from(b[c]));
                        }
                    }
                    let x = self.array(kind, &x)?;
                    let w_bytes: Vec<u8> = w.iter().map(|&w| w.cast_unsigned()).collect();
                    let weight = self.ops.device().alloc("a weight", n * k)?;
                    self.ops.device().upload(weight.address(), &w_bytes)?;
                    let (scales, b) = (self.array(Type::F32, &scales)?, self.array(kind, &b)?);
                    let bytes = self.ops.device().alloc("bytes", 2 * rows * k)?;
                    let tops = self.poisoned(Type::F32, rows)?;
                    let rounded = Rows {
                        values: bytes.address(),
                        scales: tops.at(),
                    };
                    self.ops
                        .round_activations(rounded, x.at(), kind, [rows, k])?;
                    let mut got = vec![0; 2 * rows * k];
                    self.ops.device().download(bytes.address(), &mut got)?;
                    let got: Vec<i32> = got.iter().map(|&b| i32::from(b.cast_signed())).collect();
                    let halves: Vec<i32> = halves.iter().map(|&b| i32::from(b)).collect();
                    let what = format!("int8 {kind:?} {rows} x [{n}, {k}]");
                    let got_tops = self.read(&tops)?;
                    self.same(&format!("{what}: scales"), &got_tops, &t);
                    if got != halves {
                        let at = got.iter().zip(&halves).position(|(g, w)| g != w);
                        println!("FAILED {what}: bytes, first at {at:?}");
                        self.failed += 1;
                    }
                    let y = self.poisoned(Type::F32, rows * n)?;
                    let weight = Rows {
                        values: weight.address(),
                        scales: scales.at(),
                    };
                    let shape = LinearShape::new([kind, Type::F32], [rows, n, k]).int8(true);
                    self.ops
                        .linear(y.at(), rounded, weight, Some(b.at()), &shape)?;
                    let got = self.read(&y)?;
                    self.close(&what, &got, &want, 1e-6);
                }
            }
        }
        Ok(())
    }

    /// Rows computed 1, 16, 40, 100 and 300 at a time.
    fn linear_bits(&mut self) -> Result<()> {
        let shapes = [
            (Type::Bf16, 4096, 4096),
            (Type::Bf16, 6144, 4096),
            (Type::Bf16, 1024, 3072),
            (Type::Bf16, 24576, 1024),
            (Type::Bf16, 1000, 1500),
            (Type::F32, 512, 1024),
        ];
        for (kind, n, k) in shapes {
            let rows = 300;
            let w = self.values(kind, n * k, 0.05);
            let x = self.values(kind, rows * k, 1.0);
            let (w, x) = (self.array(kind, &w)?, self.array(kind, &x)?);
            let all = self.poisoned(Type::F32, rows * n)?;
            let types = [kind, Type::F32];
            let shape = LinearShape::new(types, [rows, n, k]);
            self.ops
                .linear(all.at(), x.at().into(), w.at().into(), None, &shape)?;
            let all = self.read(&all)?;
            for at_once in [1, 16, 30, 40, 100] {
                let first = 7;
                let some = self.poisoned(Type::F32, at_once * n)?;
                let from = x.at() + (first * k * kind.bytes()) as Address;
                // Rows that do not begin at a multiple of 16 bytes go to the front of another array.
                let copy = self.poisoned(kind, at_once * k)?;
                self.ops
                    .device()
                    .queue_copy(copy.at(), from, at_once * k * kind.bytes())?;
                let shape = LinearShape::new(types, [at_once, n, k]);
                self.ops
                    .linear(some.at(), copy.at().into(), w.at().into(), None, &shape)?;
                let got = self.read(&some)?;
                self.same(
                    &format!("{kind:?} [{n}, {k}]: {at_once} rows as among {rows}"),
                    &got,
                    &all[first * n..(first + at_once) * n],
                );
            }
        }
        Ok(())
    }

    fn norms(&mut self) -> Result<()> {
        for kind in [Type::Bf16, Type::F32] {
            for (rows, width) in [
                (1, 64),
                (5, 1024),
                (33, 128),
                (3, 4096),
                (2, 5120),
                (7, 72),
                (2, 8192),
                (3, 33),
            ] {
                for residual in [false, true] {
                    // The stream that is added to is f32; what a head norm reads is not.
                    let stream = if residual { Type::F32 } else { kind };
                    let x = self.values(stream, rows * width, 2.0);
                    let d = self.values(stream, rows * width, 1.0);
                    let w = self.values(kind, width, 1.0);
                    let moved: Vec<f32> = if residual {
                        x.iter().zip(&d).map(|(x, d)| x + d).collect()
                    } else {
                        x.clone()
                    };
                    let mut want = Vec::new();
                    for row in moved.chunks(width) {
                        let squares: f64 = row.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
                        let scale = 1.0 / (squares / width as f64 + 1e-6).sqrt();
                        want.extend(
                            row.iter()
                                .zip(&w)
                                .map(|(&v, &w)| f64::from(v) * scale * f64::from(w)),
                        );
                    }
                    let (x, d, w) = (
                        self.array(stream, &x)?,
                        self.array(stream, &d)?,
                        self.array(kind, &w)?,
                    );
                    let out = self.poisoned(kind, rows * width)?;
                    let delta = residual.then_some(d.at().into());
                    self.ops.rms_norm(
                        out.at(),
                        x.at(),
                        delta,
                        w.at(),
                        [stream, kind],
                        [rows, width],
                        1e-6,
                    )?;
                    let (got, left) = (self.read(&out)?, self.read(&x)?);
                    let what = format!("norm {kind:?} {rows} x {width}, residual {residual}");
                    self.close(
                        &what,
                        &got,
                        &want,
                        if kind == Type::Bf16 { 4e-3 } else { 1e-6 },
                    );
                    self.same(&format!("{what}: x"), &left, &moved);
                }
            }
        }
        Ok(())
    }

    /// However many planes a residual update comes in, and whether of an int8 weight, a row gets the same bits: the order
    /// in which the compiler adds a row's squares must not depend on it.
    fn norm_bits(&mut self) -> Result<()> {
        let rows = 3;
        for width in [64, 256, 576, 1000, 1024, 2048, 4096, 5120, 8192] {
            let cut = [256, 512, 1024, 4096].map(|k| splits(Type::Bf16, width, k).0);
            for planes in BTreeSet::from(cut).into_iter().filter(|&planes| planes > 1) {
                // Whole numbers, so that no sum is rounded.
                let mut numbers = |most: u64| -> Vec<i32> {
                    let count = planes * rows * width;
                    (0..count)
                        .map(|_| (self.next() % (2 * most + 1)) as i32 - most as i32)
                        .collect()
                };
                let (high, low) = (numbers(20), numbers(127));
                let floats: Vec<f32> = high
                    .iter()
                    .zip(&low)
                    .map(|(high, low)| (254 * high + low) as f32)
                    .collect();
                let mut whole = vec![0.0; rows * width];
                for plane in floats.chunks(rows * width) {
                    whole.iter_mut().zip(plane).for_each(|(a, b)| *a += b);
                }
                let pairs = high
                    .chunks(rows * width)
                    .zip(low.chunks(rows * width))
                    .flat_map(|(high, low)| [high, low]);
                let integers: Vec<f32> =
                    pairs.flatten().map(|&v| f32::from_bits(v as u32)).collect();
                let ones = self.array(Type::F32, &vec![1.0; width.max(rows)])?;
                let weight = self.values(Type::Bf16, width, 1.0);
                let weight = self.array(Type::Bf16, &weight)?;
                let start = self.values(Type::F32, rows * width, 1000.0);
                let mut normed = Vec::new();
                for (values, splits, scales) in [
                    (&whole, 1, None),
                    (&floats, planes, None),
                    (&integers, planes, Some([ones.at(); 2])),
                ] {
                    let x = self.array(Type::F32, &start)?;
                    let values = self.array(Type::F32, values)?;
                    let out = self.poisoned(Type::Bf16, rows * width)?;
                    let delta = Sums {
                        values: values.at(),
                        splits,
                        scales,
                        bias: None,
                    };
                    self.ops.rms_norm(
                        out.at(),
                        x.at(),
                        Some(delta),
                        weight.at(),
                        [Type::F32, Type::Bf16],
                        [rows, width],
                        1e-6,
                    )?;
                    normed.push([self.read(&x)?, self.read(&out)?].concat());
                }
                let what = format!("{planes} planes of {rows} x {width}");
                self.same(&what, &normed[1], &normed[0]);
                self.same(&format!("{what}, integers"), &normed[2], &normed[0]);
            }
        }
        Ok(())
    }

    fn activations(&mut self) -> Result<()> {
        for kind in [Type::Bf16, Type::F32] {
            let bound = if kind == Type::Bf16 { 4e-3 } else { 1e-6 };
            for (rows, width) in [(1, 64), (3, 3072), (5, 1000), (2, 33)] {
                let x = self.values(Type::F32, rows * 2 * width, 3.0);
                let want: Vec<f64> = (0..rows * width)
                    .map(|i| {
                        let row = &x[i / width * 2 * width..];
                        let (gate, up) =
                            (f64::from(row[i % width]), f64::from(row[width + i % width]));
                        gate / (1.0 + (-gate).exp()) * up
                    })
                    .collect();
                let x = self.array(Type::F32, &x)?;
                let out = self.poisoned(kind, rows * width)?;
                self.ops.silu_gated(out.at(), x.at(), kind, [rows, width])?;
                let got = self.read(&out)?;
                self.close(
                    &format!("silu {kind:?} {rows} x {width}"),
                    &got,
                    &want,
                    bound,
                );

                let count = rows * width;
                let mut x = self.values(Type::F32, count, 2.0);
                x[0] = -0.01;
                let (ap, an, beta, eps) = (0.8f32, 1.3f32, 0.5f32, -1e-6f32);
                let want: Vec<f64> = x
                    .iter()
                    .map(|&x| {
                        let x = f64::from(x);
                        let (ap, an, beta) = (f64::from(ap), f64::from(an), f64::from(beta));
                        if x > 0.0 {
                            ap * x * x + beta * x
                        } else {
                            (x.min(eps.into()).exp_m1() - x) * an + beta * x
                        }
                    })
                    .collect();
                let x = self.array(Type::F32, &x)?;
                let out = self.poisoned(kind, count)?;
                self.ops
                    .xielu(out.at(), x.at(), kind, count, [ap, an, beta, eps])?;
                let got = self.read(&out)?;
                self.close(&format!("xielu {kind:?} {count}"), &got, &want, bound);

                self.fused_activation(kind, rows, width)?;

                let a = self.values(kind, count, 1.0);
                let b = self.values(kind, count, 1.0);
                let want: Vec<f32> = a.iter().zip(&b).map(|(a, b)| round(kind, a + b)).collect();
                let (a, b) = (self.array(kind, &a)?, self.array(kind, &b)?);
                self.ops.add(a.at(), b.at(), [kind; 2], count)?;
                let got = self.read(&a)?;
                self.same(&format!("add {kind:?} {count}"), &got, &want);
            }
        }
        Ok(())
    }

    /// An activation in the product's kernel gives what the product and the activation give one by one, for
    /// few rows and for many, with a weight cut into splits or not.
    fn fused_activation(&mut self, kind: Type, rows: usize, width: usize) -> Result<()> {
        // A number of rows for each tile.
        for (rows, k) in [
            (rows, 512),
            (25, 64),
            (40, 512),
            (100, 64),
            (150, 64),
            (200, 512),
            (300, 1536),
        ] {
            let x = self.values(kind, rows * k, 1.0);
            let w = self.values(kind, 2 * width * k, 0.2);
            let b = self.values(kind, 2 * width, 1.0);
            let (x, w, b) = (
                self.array(kind, &x)?,
                self.array(kind, &w)?,
                self.array(kind, &b)?,
            );
            for (then, n) in [
                (Then::GatedSilu, 2 * width),
                (Then::Xielu([0.8, 1.3, 0.5, -1e-6]), width),
            ] {
                let wide = self.poisoned(Type::F32, rows * n)?;
                let plain = self.poisoned(kind, rows * width)?;
                let fused = self.poisoned(kind, rows * width)?;
                let shape = LinearShape::new([kind; 2], [rows, n, k]);
                let bias = Some(b.at());
                let sums = LinearShape::new([kind, Type::F32], [rows, n, k]);
                self.ops
                    .linear(wide.at(), x.at().into(), w.at().into(), bias, &sums)?;
                match then {
                    Then::Xielu(scalars) => {
                        let count = rows * width;
                        self.ops
                            .xielu(plain.at(), wide.at(), kind, count, scalars)?;
                    }
                    _ => self
                        .ops
                        .silu_gated(plain.at(), wide.at(), kind, [rows, width])?,
                }
                self.ops.linear(
                    fused.at(),
                    x.at().into(),
                    w.at().into(),
                    bias,
                    &shape.then(then),
                )?;
                let (plain, fused) = (self.read(&plain)?, self.read(&fused)?);
                let what = format!("{then:?} {kind:?} {rows} x {k} -> {width} in the product");
                self.same(&what, &fused, &plain);
            }
        }
        Ok(())
    }

    /// Split, norm, rotate, store, together and one by one.
    fn heads(&mut self) -> Result<()> {
        for kind in [Type::Bf16, Type::F32] {
            for (heads, kv_heads, head_dim, normed) in [
                (4, 2, 64, false),
                (32, 8, 128, true),
                (14, 2, 64, false),
                (3, 1, 16, true),
                (5, 5, 48, true),
                (0, 2, 64, true),
            ] {
                let (rows, pages) = (5, 3);
                let width = (heads + 2 * kv_heads) * head_dim;
                let qkv = self.values(Type::F32, rows * width, 1.0);
                let qw = self.values(kind, head_dim, 1.0);
                let kw = self.values(kind, head_dim, 1.0);
                let half = head_dim / 2;
                let cos = self.values(kind, 100 * half, 1.0);
                let sin = self.values(kind, 100 * half, 1.0);
                let scale = self.values(kind, 100, 1.0);
                let positions = [3, 99, 0, 17, 50];
                let slots = [0, 70, 190, 63, 64];
                let pool = pages * kv_heads * PAGE * head_dim;
                // Queries, keys and values in their pools; norms are rounded `between` them and the rotation.
                let judged = |qkv: &[f32], between: &dyn Fn(f32) -> f32| {
                    let mut keys = vec![0.0f32; pool];
                    let mut values = vec![0.0f32; pool];
                    let mut queries = Vec::new();
                    for row in 0..rows {
                        let position = positions[row] as usize;
                        for head in 0..heads + 2 * kv_heads {
                            let x = &qkv[row * width + head * head_dim..][..head_dim];
                            let is_query = head < heads;
                            let mut vector = x.to_vec();
                            if head < heads + kv_heads {
                                if normed {
                                    let squares: f64 =
                                        x.iter().map(|&v| f64::from(v) * f64::from(v)).sum();
                                    let factor = 1.0 / (squares / head_dim as f64 + 1e-6).sqrt();
                                    let w = if is_query { &qw } else { &kw };
                                    for (v, &w) in vector.iter_mut().zip(w) {
                                        *v =
                                            between((f64::from(*v) * factor * f64::from(w)) as f32);
                                    }
                                }
                                for j in 0..half {
                                    let (a, b) =
                                        (f64::from(vector[j]), f64::from(vector[j + half]));
                                    let at = position * half + j;
                                    let (c, s) = (f64::from(cos[at]), f64::from(sin[at]));
                                    let by = if is_query { scale[position] } else { 1.0 };
                                    vector[j] = (a * c - b * s) as f32 * by;
                                    vector[j + half] = (b * c + a * s) as f32 * by;
                                }
                            }
                            vector.iter_mut().for_each(|x| *x = round(kind, *x));
                            if is_query {
                                queries.extend(vector);
                            } else {
                                let (into, h) = if head < heads + kv_heads {
                                    (&mut keys, head - heads)
                                } else {
                                    (&mut values, head - heads - kv_heads)
                                };
                                let slot = slots[row] as usize;
                                let at =
                                    ((slot / PAGE * kv_heads + h) * PAGE + slot % PAGE) * head_dim;
                                into[at..at + head_dim].copy_from_slice(&vector);
                            }
                        }
                    }
                    [queries, keys, values]
                };
                let [queries, keys, values] = judged(&qkv, &|x| x);
                let rounded: Vec<f32> = qkv.iter().map(|&x| round(kind, x)).collect();
                let [plain_queries, plain_keys, _] = judged(&rounded, &|x| round(kind, x));
                let device_qkv = self.array(Type::F32, &qkv)?;
                let (qw, kw) = (self.array(kind, &qw)?, self.array(kind, &kw)?);
                let (cos, sin, scale) = (
                    self.array(Type::F32, &cos)?,
                    self.array(Type::F32, &sin)?,
                    self.array(Type::F32, &scale)?,
                );
                let (positions, slots) = (self.integers(&positions)?, self.integers(&slots)?);
                let step = step_arrays(rows, &positions, &slots, None, None, 0);
                let inputs = HeadInputs {
                    query_norm: if normed { qw.at() } else { 0 },
                    key_norm: if normed { kw.at() } else { 0 },
                    cos: cos.at(),
                    sin: sin.at(),
                    query_scale: scale.at(),
                    eps: 1e-6,
                };
                let q = self.poisoned(kind, rows * heads * head_dim)?;
                let k = self.array(kind, &vec![0.0; pool])?;
                let v = self.array(kind, &vec![0.0; pool])?;
                self.ops.split_norm_rope_store(
                    q.at(),
                    &pools(k.at(), v.at()),
                    device_qkv.at().into(),
                    &inputs,
                    &step,
                    kind,
                    [heads, kv_heads, head_dim, PAGE],
                )?;
                let bound = if kind == Type::Bf16 { 5e-3 } else { 2e-6 };
                let what = format!("heads {kind:?} {heads}/{kv_heads} x {head_dim}, norm {normed}");
                let wide =
                    |values: &[f32]| values.iter().map(|&v| f64::from(v)).collect::<Vec<_>>();
                let (gq, gk, gv) = (self.read(&q)?, self.read(&k)?, self.read(&v)?);
                self.close(&format!("{what}: queries"), &gq, &wide(&queries), bound);
                self.close(&format!("{what}: keys"), &gk, &wide(&keys), bound);
                self.same(&format!("{what}: values"), &gv, &values);

                // Splits that were left apart, and a bias: as their sum.
                for planes in [2, 3, 8] {
                    if kind == Type::F32 {
                        break;
                    }
                    let apart = self.values(Type::F32, planes * rows * width, 1.0);
                    let bias = self.values(kind, width, 1.0);
                    let mut sum = vec![0.0f32; rows * width];
                    for plane in apart.chunks(rows * width) {
                        sum.iter_mut().zip(plane).for_each(|(a, b)| *a += b);
                    }
                    for row in sum.chunks_mut(width) {
                        row.iter_mut().zip(&bias).for_each(|(a, b)| *a += b);
                    }
                    let [sum, apart] = [sum, apart].map(|x| self.array(Type::F32, &x));
                    let (sum, apart, bias) = (sum?, apart?, self.array(kind, &bias)?);
                    let apart = Sums {
                        splits: planes,
                        bias: Some(bias.at()),
                        ..Sums::from(apart.at())
                    };
                    let mut found = Vec::new();
                    for qkv in [apart, sum.at().into()] {
                        let q = self.poisoned(kind, rows * heads * head_dim)?;
                        let (k, v) = (self.array(kind, &keys)?, self.array(kind, &keys)?);
                        let pools = pools(k.at(), v.at());
                        let shape = [heads, kv_heads, head_dim, PAGE];
                        self.ops.split_norm_rope_store(
                            q.at(),
                            &pools,
                            qkv,
                            &inputs,
                            &step,
                            kind,
                            shape,
                        )?;
                        found.push([self.read(&q)?, self.read(&k)?, self.read(&v)?].concat());
                    }
                    self.same(&format!("{what}: {planes} planes"), &found[0], &found[1]);
                }

                // The plain form: columns, norm, rotation, store, each of which rounds.
                let plain_qkv = self.array(kind, &rounded)?;
                let size = kind.bytes();
                let (qn, kn) = (heads * head_dim, kv_heads * head_dim);
                let q2 = self.poisoned(kind, rows * qn)?;
                let k2 = self.poisoned(kind, rows * kn)?;
                let device = self.ops.device();
                device.queue_copy_rows(
                    q2.at(),
                    (qn * size).max(1),
                    plain_qkv.at(),
                    width * size,
                    qn * size,
                    rows,
                )?;
                let from = plain_qkv.at() + (qn * size) as Address;
                device.queue_copy_rows(k2.at(), kn * size, from, width * size, kn * size, rows)?;
                if normed {
                    self.ops.rms_norm(
                        q2.at(),
                        q2.at(),
                        None,
                        qw.at(),
                        [kind; 2],
                        [rows * heads, head_dim],
                        1e-6,
                    )?;
                    self.ops.rms_norm(
                        k2.at(),
                        k2.at(),
                        None,
                        kw.at(),
                        [kind; 2],
                        [rows * kv_heads, head_dim],
                        1e-6,
                    )?;
                }
                self.ops
                    .rotate(q2.at(), &inputs, &step, kind, [heads, head_dim])?;
                let keys_only = HeadInputs {
                    query_scale: 0,
                    ..inputs
                };
                self.ops
                    .rotate(k2.at(), &keys_only, &step, kind, [kv_heads, head_dim])?;
                let k3 = self.array(kind, &vec![0.0; pool])?;
                self.ops.store(
                    k3.at().into(),
                    None,
                    k2.at(),
                    &step,
                    kind,
                    [kv_heads, head_dim, PAGE],
                )?;
                let (gq, gk) = (self.read(&q2)?, self.read(&k3)?);
                self.close(
                    &format!("{what}: queries, plain form"),
                    &gq,
                    &wide(&plain_queries),
                    bound,
                );
                self.close(
                    &format!("{what}: keys, plain form"),
                    &gk,
                    &wide(&plain_keys),
                    bound,
                );
            }
        }
        Ok(())
    }

    /// Several sequences in one step, pages scattered, all masks; keys split over blocks or not.
    fn attention(&mut self) -> Result<()> {
        for kind in [Type::Bf16, Type::F32] {
            for (heads, kv_heads, head_dim) in [
                (8, 2, 128),
                (14, 2, 64),
                (4, 4, 16),
                (10, 2, 80),
                (4, 1, 256),
            ] {
                for (causal, window) in
                    [(true, 1 << 30), (true, 100), (false, 1 << 30), (false, 70)]
                {
                    self.attention_case(kind, [heads, kv_heads, head_dim], causal, window, false)?;
                }
            }
        }
        Ok(())
    }

    fn attention_case(
        &mut self,
        kind: Type,
        [heads, kv_heads, head_dim]: [usize; 3],
        causal: bool,
        window: usize,
        sweep: bool,
    ) -> Result<()> {
        // (positions already cached, new rows) of each span.
        let spans = [(0, 1), (700, 1), (255, 3), (0, 70), (1000, 20), (63, 1)];
        let (table_width, pages) = (20, 130);
        let rows: usize = spans.iter().map(|span| span.1).sum();
        let mut positions = Vec::new();
        let mut row_meta = Vec::new();
        let mut tables = vec![0i32; spans.len() * table_width];
        let mut free: Vec<i32> = (1..pages).collect();
        for (s, &(cached, new)) in spans.iter().enumerate() {
            for page in 0..(cached + new).div_ceil(PAGE) {
                let pick = self.next() as usize % free.len();
                tables[s * table_width + page] = free.swap_remove(pick);
            }
            for i in 0..new {
                positions.push((cached + i) as i32);
                row_meta.extend([(cached + i) as i32, (cached + new) as i32, 0, 0]);
            }
        }
        let pool = pages as usize * kv_heads * PAGE * head_dim;
        let keys = self.values(kind, pool, 1.0);
        let values = self.values(kind, pool, 1.0);
        let queries = self.values(kind, rows * heads * head_dim, 1.0);
        let scale = 1.0 / (head_dim as f32).sqrt();

        let mut want = Vec::new();
        let mut row = 0;
        for (s, &(cached, new)) in spans.iter().enumerate() {
            for i in 0..new {
                let position = cached + i;
                let low = (position + 1).saturating_sub(window);
                let high = if causal {
                    position + 1
                } else {
                    (cached + new).min(position + window)
                };
                for head in 0..heads {
                    let kv = head / (heads / kv_heads);
                    let q = &queries[(row * heads + head) * head_dim..][..head_dim];
                    let slot = |key: usize| {
                        let page = tables[s * table_width + key / PAGE] as usize;
                        ((page * kv_heads + kv) * PAGE + key % PAGE) * head_dim
                    };
                    let score = |key: usize| {
                        let k = &keys[slot(key)..][..head_dim];
                        let sum: f64 = q
                            .iter()
                            .zip(k)
                            .map(|(&q, &k)| f64::from(q) * f64::from(k))
                            .sum();
                        sum * f64::from(scale)
                    };
                    let scores: Vec<f64> = (low..high).map(score).collect();
                    let top = scores.iter().fold(f64::NEG_INFINITY, |a, &b| a.max(b));
                    let total: f64 = scores.iter().map(|s| (s - top).exp()).sum();
                    let mut out = vec![0.0; head_dim];
                    for (key, score) in (low..high).zip(&scores) {
                        let weight = (score - top).exp() / total;
                        for (out, &v) in out.iter_mut().zip(&values[slot(key)..]) {
                            *out += weight * f64::from(v);
                        }
                    }
                    want.extend(out);
                }
                row += 1;
            }
        }

        let group = heads / kv_heads;
        let [few, more, many] = attention_tiles(kind, of_compute_type(group, head_dim));
        let device_positions = self.integers(&positions)?;
        let device_meta = self.integers(&row_meta)?;
        let device_tables = self.integers(&tables)?;
        let (k, v, q) = (
            self.array(kind, &keys)?,
            self.array(kind, &values)?,
            self.array(kind, &queries)?,
        );
        let step = step_arrays(
            rows,
            &device_positions,
            &device_positions,
            Some(&device_meta),
            Some(&device_tables),
            table_width,
        );
        let plan = AttentionPlan {
            heads,
            kv_heads,
            head_dim,
            page_size: PAGE,
            scale,
            causal,
            window,
            pages: pages as usize,
            blocks: 5,
            block_slots: 6,
        };
        let what = format!(
            "attention {kind:?} {heads}/{kv_heads} x {head_dim}, causal {causal}, window {window}"
        );
        let mut results = Vec::new();
        let mut tries = vec![(more, false), (many, true)];
        if head_dim > 16 {
            // Of smaller heads the backend does not take this tile.
            tries.push((few, false));
        }
        if sweep {
            tries.extend(sweep_tiles().into_iter().map(|tile| (tile, true)));
        }
        for &(tile, whole) in &tries {
            let mut groups = Vec::new();
            let mut first = 0;
            for (s, &(cached, new)) in spans.iter().enumerate() {
                let size = tile.queries / group;
                for start in (0..new).step_by(size) {
                    let count = size.min(new - start);
                    let numbers = [
                        first + start,
                        count,
                        s,
                        cached + start,
                        cached + new,
                        0,
                        0,
                        0,
                    ];
                    groups.extend(numbers.map(|v| v as i32));
                }
                first += new;
            }
            // A group of no rows at the end: there are such in recordings.
            groups.extend([0; 8]);
            let count = groups.len() / 8;
            let address = self.integers(&groups)?;
            let groups = Groups {
                address: address.at(),
                count,
                tile,
            };
            let out = self.poisoned(kind, rows * heads * head_dim)?;
            self.ops.attention(
                out.at(),
                q.at(),
                &pools(k.at(), v.at()),
                &step,
                &groups,
                &plan,
                kind,
                whole,
            )?;
            results.push(self.read(&out)?);
        }
        for ((tile, whole), result) in tries.iter().zip(&results) {
            let what = format!("{what}: {tile:?} whole {whole}");
            self.close(
                &what,
                result,
                &want,
                if kind == Type::Bf16 { 6e-3 } else { 2e-6 },
            );
            self.same(&what, result, &results[0]);
        }
        Ok(())
    }

    fn choices(&mut self) -> Result<()> {
        for vocab in [7, 4096, 4097, 49152, 151_936] {
            let rows = 3;
            let mut logits = self.values(Type::F32, rows * vocab, 1.0);
            // The largest value twice: the first one counts.
            let (a, b) = (vocab / 3, vocab - 1);
            (logits[vocab + a], logits[vocab + b]) = (100.0, 100.0);
            logits[2 * vocab + b] = 100.0;
            let largest = |row: &[f32]| {
                let top = row.iter().fold(f32::NEG_INFINITY, |a, &b| a.max(b));
                row.iter().position(|&v| v == top).map_or(-1, |i| i as i32)
            };
            let want: Vec<i32> = logits.chunks(vocab).map(largest).collect();
            let logits = self.array(Type::F32, &logits)?;
            let tokens = self.integers(&vec![-1; rows])?;
            self.ops.argmax(tokens.at(), logits.at(), [rows, vocab])?;
            let got = self.read_integers(&tokens)?;
            self.count(&format!("argmax of {vocab}"), &got, &want);
        }
        for (width, kind) in [
            (64, Type::Bf16),
            (1000, Type::Bf16),
            (33, Type::Bf16),
            (1500, Type::F32),
        ] {
            let table = self.values(kind, 50 * width, 1.0);
            let picks = [49, 0, 7, 7];
            let want: Vec<f32> = picks
                .iter()
                .flat_map(|&i| table[i as usize * width..][..width].to_vec())
                .collect();
            let (table, indices) = (self.array(kind, &table)?, self.integers(&picks)?);
            let out = self.poisoned(kind, picks.len() * width)?;
            self.ops.gather(
                out.at(),
                table.at(),
                indices.at(),
                [kind; 2],
                [picks.len(), 50, width],
            )?;
            let got = self.read(&out)?;
            self.same(&format!("gather {kind:?} {width}"), &got, &want);
        }
        let ids = self.integers(&[1, 2, 3, 4])?;
        let sampled = self.integers(&[70, 80])?;
        let (to, from) = (self.integers(&[3, 1])?, self.integers(&[0, 1])?);
        self.ops
            .take_tokens(ids.at(), sampled.at(), to.at(), from.at(), 2)?;
        let got = self.read_integers(&ids)?;
        self.count("take tokens", &got, &[1, 80, 3, 70]);
        Ok(())
    }

    fn count(&mut self, what: &str, got: &[i32], want: &[i32]) {
        if got == want {
            println!("ok {what}");
        } else {
            self.failed += 1;
            println!("FAILED {what}: {got:?}, should be {want:?}");
        }
    }

    /// Microseconds a call of `body`, many in one recording, the best of five replays.
    fn time(&self, calls: usize, mut body: impl FnMut(usize) -> Result<()>) -> Result<f64> {
        body(0)?;
        let recording = self
            .ops
            .device()
            .record(&mut || (0..calls).try_for_each(&mut body))?;
        let (start, end) = (self.ops.device().event()?, self.ops.device().event()?);
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            start.record()?;
            self.ops.device().replay(&recording)?;
            end.record()?;
            end.wait()?;
            best = best.min(f64::from(start.milliseconds_to(&end)?));
        }
        Ok(best * 1e3 / calls as f64)
    }

    fn times(&mut self) -> Result<()> {
        let device = self.ops.device().clone();
        let kind = Type::Bf16;
        // Random bits everywhere: 4 GB of weights, rotated through, so that nothing stays in the cache.
        let pool = device.alloc("weights", 4 << 30)?;
        let noise = self.values(kind, 1 << 22, 0.05);
        let noise = self.array(kind, &noise)?;
        for part in 0..(4u64 << 30) / (8 << 20) {
            device.queue_copy(pool.address() + part * (8 << 20), noise.at(), 8 << 20)?;
        }
        let copy = self.time(1, |_| {
            device.queue_copy(pool.address(), pool.address() + (2 << 30), 2 << 30)
        })?;
        println!(
            "copy 2 GiB: {:.0} GB/s read and written",
            2.0 * 2.0 * 1.073741824e9 / copy / 1e3
        );
        let x = self.values(kind, 4096 * 12288, 1.0);
        let x = self.array(kind, &x)?;
        let y = self.poisoned(Type::F32, 4096 * 24576)?;
        for (n, k) in [
            (6144, 4096),
            (4096, 4096),
            (24576, 4096),
            (4096, 12288),
            (151_936, 4096),
            (4096, 1024),
            (1024, 2048),
        ] {
            let bytes = n * k * 2;
            let copies = ((4usize << 30) / bytes).min(64);
            let mut line = format!("linear {n} x {k}:");
            for rows in [1, 16, 32, 64, 128] {
                let ops = &self.ops;
                let time = self.time(copies, |i| {
                    let w = pool.address() + (i % copies * bytes) as Address;
                    let shape = LinearShape::new([kind; 2], [rows, n, k]);
                    ops.linear(y.at(), x.at().into(), w.into(), None, &shape)
                })?;
                line += &format!(
                    " {rows} rows {time:.1} us ({:.0} GB/s)",
                    bytes as f64 / time / 1e3
                );
            }
            println!("{line}");
        }
        for int8 in [false, true] {
            for (n, k, then) in [
                (6144, 4096, Then::Nothing),
                (4096, 4096, Then::Nothing),
                (24576, 4096, Then::GatedSilu),
                (4096, 12288, Then::Nothing),
                (151_936, 4096, Then::Nothing),
            ] {
                let bytes = n * k * if int8 { 1 } else { 2 };
                let copies = ((4usize << 30) / bytes).min(64);
                let mut line = format!("int8 {int8}, {then:?} {n} x {k}:");
                for rows in [1, 16, 64] {
                    let shape = LinearShape::new([kind; 2], [rows, n, k])
                        .int8(int8)
                        .then(then);
                    let ops = &self.ops;
                    let time = self.time(copies, |i| {
                        let w = pool.address() + (i % copies * bytes) as Address;
                        let rows = |values| Rows {
                            values,
                            scales: x.at(),
                        };
                        ops.linear(y.at(), rows(x.at()), rows(w), None, &shape)
                    })?;
                    let rate = bytes as f64 / time / 1e3;
                    line += &format!(" {rows} rows {time:.1} us ({rate:.0} GB/s)");
                }
                println!("{line}");
            }
        }
        for rows in [512, 4096] {
            for (n, k) in [(6144, 4096), (4096, 4096), (24576, 4096), (4096, 12288)] {
                let ops = &self.ops;
                let time = self.time(4, |i| {
                    let w = pool.address() + (i * n * k * 2) as Address;
                    let shape = LinearShape::new([kind; 2], [rows, n, k]);
                    ops.linear(y.at(), x.at().into(), w.into(), None, &shape)
                })?;
                println!(
                    "linear {rows} rows, {n} x {k}: {time:.1} us, {:.0} TFLOP/s",
                    2.0 * (rows * n * k) as f64 / time / 1e6
                );
            }
        }
        self.attention_times(false)?;
        let norm = self.time(64, |_| {
            self.ops.rms_norm(
                y.at(),
                x.at(),
                Some(pool.address().into()),
                noise.at(),
                [Type::F32, kind],
                [1, 4096],
                1e-6,
            )
        })?;
        let silu = self.time(64, |_| {
            self.ops.silu_gated(y.at(), x.at(), kind, [1, 12288])
        })?;
        let argmax = self.time(64, |_| {
            self.ops.argmax(y.at(), pool.address(), [1, 151_936])
        })?;
        println!("one row: add and norm {norm:.1} us, silu {silu:.1} us, argmax {argmax:.1} us");
        Ok(())
    }

    fn linear_sweep(&mut self) -> Result<()> {
        let kind = Type::Bf16;
        let noise = self.values(kind, 1 << 22, 0.05);
        let noise = self.array(kind, &noise)?;
        let pool = self.poisoned(kind, 1 << 30)?;
        for part in 0..(2u64 << 30) / (8 << 20) {
            self.ops
                .device()
                .queue_copy(pool.at() + part * (8 << 20), noise.at(), 8 << 20)?;
        }
        let x = self.values(kind, 4096 * 4096, 1.0);
        let x = self.array(kind, &x)?;
        let y = self.poisoned(kind, 4096 * 24576)?;
        for shape in sweep_shapes() {
            let (rows, n, k) = (shape.rows, shape.n, shape.k);
            let bytes = n * k * if shape.int8 { 1 } else { 2 };
            let copies = ((2usize << 30) / bytes).min(if rows > 128 { 4 } else { 32 });
            for plan in sweep_plans(&shape) {
                let ops = &self.ops;
                let time = self.time(copies, |i| {
                    let rows = |values| Rows {
                        values,
                        scales: x.at(),
                    };
                    let w = pool.at() + (i % copies * bytes) as Address;
                    ops.linear_by(&plan, y.at(), rows(x.at()), rows(w), None, &shape)
                })?;
                let (rate, flops) = (
                    bytes as f64 / time / 1e3,
                    2.0 * (rows * n * k) as f64 / time / 1e6,
                );
                println!(
                    "{rows:4} rows {n} x {k}: {time:7.1} us, {rate:4.0} GB/s, {flops:3.0} TFLOP/s {} {:?}",
                    plan.variant, plan.grid
                );
            }
        }
        Ok(())
    }

    fn attention_times(&mut self, sweep: bool) -> Result<()> {
        let kind = Type::Bf16;
        let noise = self.values(kind, 1 << 22, 1.0);
        let noise = self.array(kind, &noise)?;
        let pool = self.poisoned(kind, 2 << 30)?;
        for part in 0..(4u64 << 30) / (8 << 20) {
            self.ops
                .device()
                .queue_copy(pool.at() + part * (8 << 20), noise.at(), 8 << 20)?;
        }
        let q = self.values(kind, 4096 * 4096, 1.0);
        let q = self.array(kind, &q)?;
        let (heads, kv_heads, head_dim) = (32, 8, 128);
        let group = heads / kv_heads;
        for (context, new, sequences) in [
            (128, 1, 1),
            (4096, 1, 1),
            (32768, 1, 1),
            (4096, 16, 1),
            (1024, 1, 64),
            (4096, 4096, 1),
        ] {
            let rows = new * sequences;
            let table_width = context / PAGE + 1;
            let pages = (table_width * sequences).min(2000);
            let layer = pages * kv_heads * PAGE * head_dim * 2;
            let layers = ((2usize << 30) / layer).clamp(1, 24);
            let [few, more, many] = attention_tiles(kind, of_compute_type(group, head_dim));
            let split = if new * group <= few.queries {
                few
            } else {
                more
            };
            let mut tries = Vec::new();
            if rows <= 512 {
                tries.push((split, false));
            }
            if sequences == 1 && rows > 512 {
                tries.push((many, true));
                if sweep {
                    tries.extend(sweep_tiles().into_iter().map(|tile| (tile, true)));
                }
            }
            for (tile, whole) in tries {
                let size = tile.queries / group;
                let mut groups = Vec::new();
                let mut meta = Vec::new();
                let mut tables = Vec::new();
                for s in 0..sequences {
                    for start in (0..new).step_by(size) {
                        let first = context - new + start;
                        let numbers = [
                            s * new + start,
                            size.min(new - start),
                            s,
                            first,
                            context,
                            0,
                            0,
                            0,
                        ];
                        groups.extend(numbers.map(|v| v as i32));
                    }
                    for i in 0..new {
                        meta.extend([(context - new + i) as i32, context as i32, 0, 0]);
                    }
                    tables.extend(
                        (0..table_width).map(|p| ((s * table_width + p) * 7919 % pages) as i32),
                    );
                }
                let (g, meta, tables) = (
                    self.integers(&groups)?,
                    self.integers(&meta)?,
                    self.integers(&tables)?,
                );
                let groups = Groups {
                    address: g.at(),
                    count: groups.len() / 8,
                    tile,
                };
                let step = step_arrays(rows, &meta, &meta, Some(&meta), Some(&tables), table_width);
                let plan = AttentionPlan {
                    heads,
                    kv_heads,
                    head_dim,
                    page_size: PAGE,
                    scale: 0.09,
                    causal: true,
                    window: 1 << 30,
                    pages,
                    blocks: context.div_ceil(256),
                    block_slots: context.div_ceil(256) + 1,
                };
                let out = self.poisoned(kind, rows * heads * head_dim)?;
                {
                    let ops = &self.ops;
                    let time = self.time(layers, |i| {
                        let keys = pool.at() + (i * layer) as Address;
                        let values = keys + (2u64 << 30);
                        ops.attention(
                            out.at(),
                            q.at(),
                            &pools(keys, values),
                            &step,
                            &groups,
                            &plan,
                            kind,
                            whole,
                        )
                    })?;
                    let bytes = (2 * context * sequences * kv_heads * head_dim * 2) as f64;
                    let flops = 4.0
                        * (rows * heads * head_dim) as f64
                        * (context as f64 - new as f64 / 2.0);
                    println!(
                        "attention {sequences} x {new} rows at {context}, {tile:?} whole {whole}: {time:.1} us, {:.0} GB/s, {:.0} TFLOP/s",
                        bytes / time / 1e3,
                        flops / time / 1e6
                    );
                }
            }
        }
        Ok(())
    }
}

/// Keys and values of the compute type.
fn pools(keys: Address, values: Address) -> Pools {
    Pools {
        keys: keys.into(),
        values: values.into(),
        factors: 0,
    }
}

fn round(kind: Type, value: f32) -> f32 {
    match kind {
        Type::Bf16 => bf16::from_f32(value).to_f32(),
        Type::F32 => value,
    }
}

/// Heads whose keys and values are of the compute type.
fn of_compute_type(queries: usize, head_dim: usize) -> HeadGroup {
    HeadGroup {
        queries,
        head_dim,
        int8: false,
    }
}

fn step_arrays(
    rows: usize,
    positions: &Array,
    slots: &Array,
    row_meta: Option<&Array>,
    tables: Option<&Array>,
    table_width: usize,
) -> StepArrays {
    StepArrays {
        rows,
        positions: positions.at(),
        slots: slots.at(),
        row_meta: row_meta.map_or(0, Array::at),
        tables: tables.map_or(0, Array::at),
        table_width,
    }
}
