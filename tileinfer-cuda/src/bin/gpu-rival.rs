//! This crate's linear layers beside those of NVIDIA's cuBLASLt: the same values within what rounding to bf16 allows,
//! and both times. The library is opened at run time (`libcublasLt.so.13`, which `LD_LIBRARY_PATH` may name); where
//! it is not found that is said and nothing is compared.
//!
//! `gpu-rival PACK_FOLDER` ends with 1 if values differ.

use std::ffi::c_void;
use std::path::PathBuf;
use std::ptr;
use std::sync::Arc;

use cudarc::cublaslt::{result as lt, sys};
use half::bf16;
use tileinfer::{Error, Result};
use tileinfer_cuda::ceiling;
use tileinfer_cuda::driver::{Address, Device, Memory};
use tileinfer_cuda::kernels::Type;
use tileinfer_cuda::ops::{LinearShape, Ops};
use tileinfer_cuda::store::KernelOptions;

/// Weights that are rotated through, so that none is found in a cache.
const POOL: usize = 4 << 30;

/// Values that everything repeats, and bytes of them.
const RANDOM: usize = 1 << 22;

/// Weight rows and columns of a model's linears: Qwen3-8B's.
const LINEARS: [[usize; 2]; 5] = [
    [6144, 4096],
    [4096, 4096],
    [24_576, 4096],
    [4096, 12_288],
    [151_936, 4096],
];

/// Rows of a step.
const ROWS: [usize; 5] = [1, 16, 64, 512, 4096];

/// Side of the product that a ceiling is taken from.
const SIDE: usize = 8192;

/// Bytes that cuBLASLt may use beside its operands: what NVIDIA advises for this generation.
const WORKSPACE: usize = 32 << 20;

fn main() {
    let Some(folder) = std::env::args().nth(1) else {
        eprintln!("usage: gpu-rival PACK_FOLDER");
        std::process::exit(2);
    };
    // SAFETY: opening a shared library runs its initialisers; cuBLASLt's have no conditions.
    if !unsafe { sys::is_culib_present() } {
        println!(
            "cuBLASLt is not here (libcublasLt.so.13; LD_LIBRARY_PATH may name its folder): nothing to compare with"
        );
        return;
    }
    match run(PathBuf::from(folder)) {
        Ok(0) => {}
        Ok(wrong) => {
            println!("FAILED: {wrong} shapes differ");
            std::process::exit(1);
        }
        Err(error) => {
            println!("error: {error}");
            std::process::exit(1);
        }
    }
}

fn run(folder: PathBuf) -> Result<usize> {
    let options = KernelOptions {
        pack_folders: vec![folder],
        ..KernelOptions::default()
    };
    let mut bench = Bench::new(Ops::open(0, &options)?)?;
    println!("{}", bench.device.info().name);
    let mut wrong = 0;
    for [rows, n, k] in [
        [1, 4096, 4096],
        [16, 6144, 4096],
        [64, 4096, 12_288],
        [300, 24_576, 4096],
        [4096, 4096, 4096],
    ] {
        wrong += usize::from(!bench.compare([rows, n, k])?);
    }
    let (ours, theirs) = bench.sustained()?;
    println!(
        "product {SIDE} cubed for two seconds: {ours:.0} TFLOP/s, cuBLASLt {theirs:.0}, ratio {:.3}",
        ours / theirs
    );
    println!(
        "      N x K      rows    ours us  cuBLASLt us  theirs/ours    GB/s of weights  TFLOP/s"
    );
    for [n, k] in LINEARS {
        for rows in ROWS {
            let (ours, theirs) = bench.times([rows, n, k])?;
            println!(
                "{n:7} x {k:5}  {rows:6}  {ours:9.1}  {theirs:11.1}  {:11.3}  {:17.0}  {:7.0}",
                theirs / ours,
                2e-3 * (n * k) as f64 / ours,
                2e-6 * (rows * n * k) as f64 / ours
            );
        }
    }
    for name in bench.ops.kernels().compiled() {
        println!("not in the pack: {name}");
    }
    Ok(wrong)
}

struct Bench {
    ops: Ops,
    device: Arc<Device>,
    handle: Handle,
    workspace: Memory,
    /// Weights.
    pool: Memory,
    /// Activations.
    x: Memory,
    /// Output.
    y: Memory,
}

impl Bench {
    fn new(ops: Ops) -> Result<Self> {
        let device = ops.device().clone();
        // All buffers repeat the same values; a prime number of them a turn, so that rows of weights differ.
        let values = ceiling::normal(RANDOM);
        let values = &values[..2 * 4_194_301];
        let filled = |what: &str, bytes: usize| {
            let memory = device.alloc(what, bytes)?;
            for start in (0..bytes).step_by(values.len()) {
                let part = &values[..values.len().min(bytes - start)];
                device.upload(memory.address() + start as Address, part)?;
            }
            Ok::<_, Error>(memory)
        };
        Ok(Bench {
            handle: Handle::new()?,
            workspace: device.alloc("cuBLASLt's workspace", WORKSPACE)?,
            pool: filled("weights", POOL)?,
            x: filled("activations", 2 * SIDE * 12_288)?,
            y: device.alloc("outputs", 2 * 4096 * 151_936)?,
            device,
            ops,
        })
    }

    fn ours(&self, shape: [usize; 3], weight: Address) -> Result<()> {
        let shape = LinearShape::new([Type::Bf16; 2], shape);
        let (y, x) = (self.y.address(), self.x.address());
        self.ops.linear(y, x.into(), weight.into(), None, &shape)
    }

    /// Whether both give the same values within rounding: to neighbouring numbers of bf16 at most, and where a sum
    /// nearly cancels, within what adding f32 in another order does to one of this many terms.
    fn compare(&mut self, shape: [usize; 3]) -> Result<bool> {
        let [rows, n, k] = shape;
        let mut results = [Vec::new(), Vec::new()];
        let product = Product::new(&self.handle, shape)?;
        for (theirs, result) in results.iter_mut().enumerate() {
            *result = vec![0; 2 * rows * n];
            self.device
                .queue_fill(self.y.address(), 0xff, 2 * rows * n)?;
            match theirs {
                0 => self.ours(shape, self.pool.address())?,
                _ => product.queue(self, self.pool.address())?,
            }
            self.device.download(self.y.address(), result)?;
        }
        let value = |bytes: &[u8; 2]| f64::from(bf16::from_le_bytes(*bytes).to_f32());
        let [ours, theirs] = results.each_ref().map(|bytes| bytes.as_chunks().0);
        let least = (k as f64).sqrt() / 4096.0;
        let beyond = |(ours, theirs): &(&[u8; 2], &[u8; 2])| {
            let (ours, theirs) = (value(ours), value(theirs));
            let apart = (ours - theirs).abs();
            apart.is_nan() || apart > theirs.abs() / 128.0 + least
        };
        let differ = ours.iter().zip(theirs).filter(beyond).count();
        let equal = ours.iter().zip(theirs).filter(|(a, b)| a == b).count();
        println!(
            "{rows} x [{n}, {k}] against cuBLASLt: {}, {:.2} % the same bits",
            match differ {
                0 => "equal within bf16".to_owned(),
                _ => format!("FAILED, {differ} of {} values differ", rows * n),
            },
            100.0 * equal as f64 / (rows * n) as f64
        );
        Ok(differ == 0)
    }

    /// Microseconds of a product, ours and theirs, weights cold.
    fn times(&mut self, shape: [usize; 3]) -> Result<(f64, f64)> {
        let [_, n, k] = shape;
        let bytes = 2 * n * k;
        let copies = (POOL / bytes).min(64);
        let product = Product::new(&self.handle, shape)?;
        let weight = |i: usize| self.pool.address() + (i % copies * bytes) as Address;
        let calls = copies.max(8);
        // In turns, so that a clock that falls falls for both.
        let mut best = [f64::INFINITY; 2];
        let recordings = [
            self.recorded(calls, &mut |i| self.ours(shape, weight(i)))?,
            self.recorded(calls, &mut |i| product.queue(self, weight(i)))?,
        ];
        for _ in 0..5 {
            for (recording, best) in recordings.iter().zip(&mut best) {
                *best = best.min(self.seconds(recording)? * 1e6 / calls as f64);
            }
        }
        Ok((best[0], best[1]))
    }

    /// TFLOP/s of a large product over two seconds, ours and theirs.
    fn sustained(&mut self) -> Result<(f64, f64)> {
        const AT_ONCE: usize = 50;
        let shape = [SIDE; 3];
        let product = Product::new(&self.handle, shape)?;
        let weight = self.pool.address();
        let rate = |recording: &tileinfer_cuda::driver::Recording| {
            // The first warms up.
            self.seconds(recording)?;
            let (mut seconds, mut products) = (0.0, 0);
            while seconds < 2.0 {
                seconds += self.seconds(recording)?;
                products += AT_ONCE;
            }
            Ok::<_, Error>(products as f64 * 2e-12 * (SIDE as f64).powi(3) / seconds)
        };
        let ours = rate(&self.recorded(AT_ONCE, &mut |_| self.ours(shape, weight))?)?;
        let theirs = rate(&self.recorded(AT_ONCE, &mut |_| product.queue(self, weight))?)?;
        Ok((ours, theirs))
    }

    fn recorded(
        &self,
        calls: usize,
        body: &mut dyn FnMut(usize) -> Result<()>,
    ) -> Result<tileinfer_cuda::driver::Recording> {
        // Once without recording: kernels are loaded then.
        body(0)?;
        self.device
            .record(&mut || (0..calls).try_for_each(&mut *body))
    }

    fn seconds(&self, recording: &tileinfer_cuda::driver::Recording) -> Result<f64> {
        let (start, end) = (self.device.event()?, self.device.event()?);
        start.record()?;
        self.device.replay(recording)?;
        end.record()?;
        end.wait()?;
        Ok(f64::from(start.milliseconds_to(&end)?) / 1e3)
    }
}

fn failed(what: &str) -> impl Fn(lt::CublasError) -> Error {
    move |error| Error::Device(format!("cuBLASLt: {what}: {error}"))
}

struct Handle(sys::cublasLtHandle_t);

impl Handle {
    fn new() -> Result<Self> {
        lt::create_handle()
            .map(Handle)
            .map_err(failed("opening it"))
    }
}

impl Drop for Handle {
    fn drop(&mut self) {
        // SAFETY: made by `create_handle` and destroyed once. What fails at the end is of no consequence.
        let _ = unsafe { lt::destroy_handle(self.0) };
    }
}

/// `y = x w^T` of bf16 with sums in f32, as cuBLASLt is told of it. It counts columns first: what is `[rows, k]` here
/// is `k x rows` there.
struct Product {
    operation: sys::cublasLtMatmulDesc_t,
    weight: sys::cublasLtMatrixLayout_t,
    x: sys::cublasLtMatrixLayout_t,
    y: sys::cublasLtMatrixLayout_t,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Product {
    fn new(handle: &Handle, [rows, n, k]: [usize; 3]) -> Result<Self> {
        let what = failed("describing a product");
        let kind = sys::cudaDataType::CUDA_R_16BF;
        let layout = |rows: usize, columns: usize| {
            lt::create_matrix_layout(kind, rows as u64, columns as u64, rows as i64)
        };
        let operation = lt::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType::CUDA_R_32F,
        )
        .map_err(&what)?;
        let (weight, x, y) = (
            layout(k, n).map_err(&what)?,
            layout(k, rows).map_err(&what)?,
            layout(n, rows).map_err(&what)?,
        );
        // CUBLAS_OP_T, an i32 there.
        let transposed = 1_i32;
        let workspace = WORKSPACE;
        // SAFETY: descriptors made above; the attributes' values have the types that cuBLASLt documents for them and
        // are read before the calls return.
        let found = unsafe {
            lt::set_matmul_desc_attribute(
                operation,
                sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_TRANSA,
                ptr::from_ref(&transposed).cast(),
                size_of_val(&transposed),
            )
            .map_err(&what)?;
            let preference = lt::create_matmul_pref().map_err(&what)?;
            lt::set_matmul_pref_attribute(
                preference,
                sys::cublasLtMatmulPreferenceAttributes_t::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                ptr::from_ref(&workspace).cast(),
                size_of_val(&workspace),
            )
            .map_err(&what)?;
            let found =
                lt::get_matmul_algo_heuristic(handle.0, operation, weight, x, y, y, preference);
            lt::destroy_matmul_pref(preference).map_err(&what)?;
            found.map_err(failed("choosing an algorithm"))?
        };
        Ok(Product {
            operation,
            weight,
            x,
            y,
            algorithm: found.algo,
        })
    }

    fn queue(&self, bench: &Bench, weight: Address) -> Result<()> {
        let (one, zero) = (1.0_f32, 0.0_f32);
        let at = |address: Address| address as *mut c_void;
        let y = at(bench.y.address());
        // SAFETY: the descriptors live as long as `self`; the addresses are device memory of at least the sizes that
        // they describe (see `Bench::new`), which outlives the queue; both factors are read before the call returns.
        unsafe {
            lt::matmul(
                bench.handle.0,
                self.operation,
                ptr::from_ref(&one).cast(),
                ptr::from_ref(&zero).cast(),
                at(weight),
                self.weight,
                at(bench.x.address()),
                self.x,
                y,
                self.y,
                y,
                self.y,
                &self.algorithm,
                at(bench.workspace.address()),
                WORKSPACE,
                bench.device.stream().cast(),
            )
        }
        .map_err(failed("queueing a product"))
    }
}

impl Drop for Product {
    fn drop(&mut self) {
        // SAFETY: made in `new` and destroyed once. What fails at the end is of no consequence.
        unsafe {
            let _ = lt::destroy_matrix_layout(self.weight);
            let _ = lt::destroy_matrix_layout(self.x);
            let _ = lt::destroy_matrix_layout(self.y);
            let _ = lt::destroy_matmul_desc(self.operation);
        }
    }
}
