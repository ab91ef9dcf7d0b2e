//! Matrices of weights on the host: lists of row parts, mapped or owned, and the conversions between element types.
//!
//! A part stays as it lies in its file wherever that can be: backends widen bf16 and f16 to f32 as they read, which is
//! exact. It decided not to know which matrix is which.

use super::checkpoint::{MappedBytes, TensorView};
use super::safetensors::{Dtype, shown};
use crate::{Error, Result};
use half::{bf16, f16};
use serde::Serialize;
use std::mem::MaybeUninit;
use std::sync::{Arc, Mutex};

/// Element type that a model computes in: of its weights after loading, its activations and its KV cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ComputeType {
    /// bf16 storage, f32 accumulation.
    #[default]
    Bf16,
    /// f32 throughout.
    F32,
}

impl ComputeType {
    /// Bytes of one element.
    pub fn size(self) -> usize {
        match self {
            ComputeType::Bf16 => 2,
            ComputeType::F32 => 4,
        }
    }

    /// `value` as this type can hold it, rounded to nearest, ties to even.
    pub fn round(self, value: f32) -> f32 {
        match self {
            ComputeType::Bf16 => bf16::from_f32(value).to_f32(),
            ComputeType::F32 => value,
        }
    }
}

/// The elements of a part, row after row. Mapped ones are little-endian bytes without any alignment.
#[derive(Debug, Clone)]
pub enum WeightData {
    /// bf16 in a file.
    Bf16(MappedBytes),
    /// f16 in a file.
    F16(MappedBytes),
    /// f32 in a file.
    F32(MappedBytes),
    /// The bits of bf16 in memory.
    OwnedBf16(Arc<[u16]>),
    /// f32 in memory.
    OwnedF32(Arc<[f32]>),
    /// int8 in a file, and one f32 scale a row: element `i` of a row is worth `scale * value`.
    Int8 {
        /// The integers.
        values: MappedBytes,
        /// One a row.
        scales: Arc<[f32]>,
    },
    /// The same in memory.
    OwnedInt8 {
        /// The integers.
        values: Arc<[i8]>,
        /// One a row.
        scales: Arc<[f32]>,
    },
}

impl WeightData {
    fn elements(&self) -> usize {
        match self {
            WeightData::Bf16(bytes) | WeightData::F16(bytes) => bytes.len() / 2,
            WeightData::F32(bytes) => bytes.len() / 4,
            WeightData::OwnedBf16(values) => values.len(),
            WeightData::OwnedF32(values) => values.len(),
            WeightData::Int8 { values, .. } => values.len(),
            WeightData::OwnedInt8 { values, .. } => values.len(),
        }
    }

    fn bytes(&self) -> usize {
        match self {
            WeightData::Bf16(bytes) | WeightData::F16(bytes) | WeightData::F32(bytes) => {
                bytes.len()
            }
            WeightData::OwnedBf16(values) => size_of_val::<[u16]>(values),
            WeightData::OwnedF32(values) => size_of_val::<[f32]>(values),
            WeightData::Int8 { values, scales } => values.len() + size_of_val::<[f32]>(scales),
            WeightData::OwnedInt8 { values, scales } => values.len() + size_of_val::<[f32]>(scales),
        }
    }

    /// Writes the elements from `start` on as f32, which is exact for every type; int8 without its scales.
    fn widen(&self, start: usize, out: &mut [f32]) {
        let range = start..start + out.len();
        let bytes = |size: usize| range.start * size..range.end * size;
        match self {
            WeightData::Bf16(data) => {
                let data = data[bytes(2)].as_chunks().0;
                for (out, &two) in out.iter_mut().zip(data) {
                    *out = bf16::from_le_bytes(two).to_f32();
                }
            }
            WeightData::F16(data) => {
                let data = data[bytes(2)].as_chunks().0;
                for (out, &two) in out.iter_mut().zip(data) {
                    *out = f16::from_le_bytes(two).to_f32();
                }
            }
            WeightData::F32(data) => {
                let data = data[bytes(4)].as_chunks().0;
                for (out, &four) in out.iter_mut().zip(data) {
                    *out = f32::from_le_bytes(four);
                }
            }
            WeightData::OwnedBf16(data) => {
                for (out, &bits) in out.iter_mut().zip(&data[range]) {
                    *out = bf16::from_bits(bits).to_f32();
                }
            }
            WeightData::OwnedF32(data) => out.copy_from_slice(&data[range]),
            WeightData::Int8 { values, .. } => {
                for (out, &byte) in out.iter_mut().zip(&values[range]) {
                    *out = f32::from(byte as i8);
                }
            }
            WeightData::OwnedInt8 { values, .. } => {
                for (out, &q) in out.iter_mut().zip(&values[range]) {
                    *out = f32::from(q);
                }
            }
        }
    }

    /// Rounded to nearest, ties to even; int8 stays int8.
    fn to_bf16(&self) -> WeightData {
        let round = |value: f32| [bf16::from_f32(value).to_bits()];
        let n = self.elements();
        WeightData::OwnedBf16(match self {
            WeightData::F16(data) => {
                let data = data.as_chunks().0;
                generate(n, |i| round(f16::from_le_bytes(data[i]).to_f32()))
            }
            WeightData::F32(data) => {
                let data = data.as_chunks().0;
                generate(n, |i| round(f32::from_le_bytes(data[i])))
            }
            WeightData::OwnedF32(data) => generate(n, |i| round(data[i])),
            WeightData::Bf16(_)
            | WeightData::OwnedBf16(_)
            | WeightData::Int8 { .. }
            | WeightData::OwnedInt8 { .. } => return self.clone(),
        })
    }
}

/// Some rows of a [`Weight`].
#[derive(Debug, Clone)]
pub struct WeightPart {
    rows: usize,
    cols: usize,
    data: WeightData,
}

impl WeightPart {
    /// `rows` × `cols` elements.
    ///
    /// # Errors
    /// `Bug` if `data` has another number of elements, or of scales.
    pub fn new(rows: usize, cols: usize, data: WeightData) -> Result<Self> {
        let elements = data.elements();
        if let Some(scales) = data.scales().filter(|scales| scales.len() != rows) {
            let scales = scales.len();
            return Err(Error::Bug(format!(
                "a part of {rows} rows was given {scales} scales"
            )));
        }
        if rows.checked_mul(cols) != Some(elements) {
            return Err(Error::Bug(format!(
                "a part of {rows} × {cols} was given {elements} elements"
            )));
        }
        Ok(WeightPart { rows, cols, data })
    }

    /// A matrix of a checkpoint, or a vector as one column. `Err` says what is wrong with it.
    pub(super) fn from_tensor(tensor: TensorView<'_>) -> Result<Self, String> {
        let (rows, cols) = match *tensor.shape {
            [] => (1, 1),
            [rows] => (rows, 1),
            [rows, cols] => (rows, cols),
            _ => {
                return Err(format!(
                    "{} has {} dimensions",
                    shown(tensor.name),
                    tensor.shape.len()
                ));
            }
        };
        let data = match tensor.dtype {
            Dtype::Bf16 => WeightData::Bf16(tensor.data),
            Dtype::F16 => WeightData::F16(tensor.data),
            Dtype::F32 => WeightData::F32(tensor.data),
            dtype => {
                return Err(format!(
                    "{} is {dtype}; BF16, F16 and F32 are supported",
                    shown(tensor.name)
                ));
            }
        };
        Ok(WeightPart { rows, cols, data })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The elements.
    pub fn data(&self) -> &WeightData {
        &self.data
    }

    /// Writes row `row` as f32 into `out`, which holds `cols` elements.
    pub fn row_f32(&self, row: usize, out: &mut [f32]) {
        assert!(
            row < self.rows && out.len() == self.cols,
            "row {row} of {} × {} into {} elements",
            self.rows,
            self.cols,
            out.len()
        );
        self.data.widen(row * self.cols, out);
        if let Some(scales) = self.data.scales() {
            out.iter_mut().for_each(|out| *out *= scales[row]);
        }
    }

    /// All elements as f32, row after row.
    pub(super) fn to_f32(&self) -> Vec<f32> {
        let mut out = vec![0.0; self.rows * self.cols];
        for (row, out) in out.chunks_exact_mut(self.cols.max(1)).enumerate() {
            self.row_f32(row, out);
        }
        out
    }
}

/// A matrix of weights `[rows, cols]`, row after row: the embedding, or a linear layer `y = W x` with `rows` outputs
/// and `cols` inputs. Its parts follow one another, so q, k and v, or gate and up, are one matrix without a copy.
#[derive(Debug, Clone)]
pub struct Weight {
    parts: Vec<WeightPart>,
    rows: usize,
    cols: usize,
}

impl Weight {
    /// Puts parts below one another.
    ///
    /// # Errors
    /// `Bug` if there is none or their widths differ.
    pub fn new(parts: Vec<WeightPart>) -> Result<Self> {
        let cols = parts.first().map_or(0, WeightPart::cols);
        if parts.is_empty() || parts.iter().any(|part| part.cols != cols) {
            let widths: Vec<_> = parts.iter().map(WeightPart::cols).collect();
            return Err(Error::Bug(format!(
                "parts of widths {widths:?} do not make a matrix"
            )));
        }
        Ok(Weight {
            rows: parts.iter().map(WeightPart::rows).sum(),
            cols,
            parts,
        })
    }

    /// The parts, from the first row to the last.
    pub fn parts(&self) -> &[WeightPart] {
        &self.parts
    }

    pub(super) fn into_parts(self) -> Vec<WeightPart> {
        self.parts
    }

    /// Number of rows, all parts together.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// Bytes of all parts.
    pub fn bytes(&self) -> u64 {
        self.parts.iter().map(|part| part.data.bytes() as u64).sum()
    }

    /// Writes row `row` as f32 into `out`, which holds `cols` elements.
    pub fn row_f32(&self, mut row: usize, out: &mut [f32]) {
        for part in &self.parts {
            if row < part.rows {
                return part.row_f32(row, out);
            }
            row -= part.rows;
        }
        panic!("row {} of {} rows", row + self.rows, self.rows);
    }

    /// The weight as a model that computes in `compute` holds it. For bf16 that rounds f16 and f32 to nearest, ties to
    /// even, into memory of its own; bf16 and int8 stay where they are, and for f32 everything does.
    #[must_use]
    pub fn to_dtype(&self, compute: ComputeType) -> Self {
        let mut weight = self.clone();
        if compute == ComputeType::Bf16 {
            for part in &mut weight.parts {
                part.data = part.data.to_bf16();
            }
        }
        weight
    }

    /// A bf16 matrix of one part, about normally distributed with mean 0 and standard deviation `std`; the same for the
    /// same arguments on every machine. For benchmarks: made for speed, not for statistics.
    pub fn random(rows: usize, cols: usize, seed: u64, std: f32) -> Self {
        // The sum of four random bytes is near enough to a normal number, and has so few values that a table turns it
        // into bf16. The bytes are a hash of seed and index, so threads can start anywhere.
        // The variance of a uniform byte is (256² - 1) / 12.
        let step = std / (4.0f32 * 65535.0 / 12.0).sqrt();
        let table: [u16; 1021] =
            std::array::from_fn(|sum| bf16::from_f32((sum as f32 - 510.0) * step).to_bits());
        let two = |index: usize| {
            let hash = splitmix64(seed, index as u64);
            let pairs = (hash & 0x00ff_00ff_00ff_00ff) + (hash >> 8 & 0x00ff_00ff_00ff_00ff);
            let sums = (pairs + (pairs >> 16)) & 0x0000_ffff_0000_ffff;
            [sums as u32, (sums >> 32) as u32].map(|sum| table[sum as usize])
        };
        let data = WeightData::OwnedBf16(generate(rows * cols, two));
        Weight {
            parts: vec![WeightPart { rows, cols, data }],
            rows,
            cols,
        }
    }
}

/// `n` elements, of which `next(i)` gives the `N` from `i * N` on; what exceeds `n` is dropped. Made by all cores, and
/// memory is touched once, by the core that fills it: the weights of a model are many gigabytes.
fn generate<const N: usize>(n: usize, next: impl Fn(usize) -> [u16; N] + Sync) -> Arc<[u16]> {
    const CHUNK: usize = 1 << 20;
    let mut elements: Arc<[MaybeUninit<u16>]> = Arc::new_uninit_slice(n);
    let out = Arc::get_mut(&mut elements).expect("nobody else has it yet");
    let fill = |(chunk, out): (usize, &mut [MaybeUninit<u16>])| {
        let first = chunk * CHUNK;
        let (whole, rest) = out.as_chunks_mut::<N>();
        let last = first + whole.len();
        for (out, index) in whole.iter_mut().zip(first..) {
            *out = next(index).map(MaybeUninit::new);
        }
        if !rest.is_empty() {
            let values = next(last).map(MaybeUninit::new);
            rest.copy_from_slice(&values[..rest.len()]);
        }
    };
    for_each_chunk(
        out.chunks_mut(CHUNK * N).enumerate(),
        n.div_ceil(CHUNK * N),
        fill,
    );
    // SAFETY: every element is initialised. The chunks cover the slice, each was taken by a thread that has ended (the
    // scope waits for all and passes a panic on), and `fill` writes all pieces of its chunk and the rest after them.
    unsafe { elements.assume_init() }
}

/// Runs `work` on each of `count` chunks, on all cores.
pub(super) fn for_each_chunk<T: Send>(
    chunks: impl Iterator<Item = T> + Send,
    count: usize,
    work: impl Fn(T) + Sync,
) {
    let chunks = Mutex::new(chunks);
    let turn = || {
        loop {
            // Taken apart from the work, so that the lock is not held meanwhile.
            let taken = chunks.lock().expect("no thread panics holding it").next();
            match taken {
                Some(chunk) => work(chunk),
                None => break,
            }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 1..threads.min(count) {
            scope.spawn(turn);
        }
        turn();
    });
}

/// Output `index` of the splitmix64 generator (Steele, Lea, Flood 2014) that starts at `seed`.
fn splitmix64(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add((index + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^ (z >> 31)
}
