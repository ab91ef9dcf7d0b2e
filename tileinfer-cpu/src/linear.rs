//! `y = x Wᵀ + b` with weights as they lie in the file, for one row and for many.
//!
//! The order of a sum, which is the same for every output element of a weight whatever the number of rows,
//! the tile or the thread: K runs in steps of `2 * LANES`; in each step lane `i` of one f32 accumulator takes
//! element `2i` and then element `2i + 1` (bf16, which widens in that order with a shift and a mask) or
//! `i` and then `i + LANES` (f32, f16); the last step is filled up with zeros; at the end the lanes are folded
//! in halves (see `simd`), the bias is added and the sum is rounded once.
//!
//! Activations are first copied into that order ("packed"), tile after tile, so that the inner loop reads
//! them in one aligned stream. Register tiles are 4 weight rows by `TILE_ROWS` activation rows; a weight
//! vector is widened once per tile. What this module decided not to know: what the product is for.

use crate::pool::Pool;
use crate::simd::{Isa, Kernel, Level};
use crate::{Rounding, SharedMut};

/// Element type of a weight in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Element {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
}

impl Element {
    /// Bytes of one element.
    pub fn bytes(self) -> usize {
        match self {
            Element::Bf16 | Element::F16 => 2,
            Element::F32 => 4,
        }
    }
}

/// A weight of `rows` output features by `cols` inputs, row-major, little-endian, at any alignment.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    bytes: &'a [u8],
    element: Element,
    rows: usize,
    cols: usize,
}

impl<'a> Matrix<'a> {
    /// A view of `bytes`; `None` if their number is not `rows * cols` elements.
    pub fn new(bytes: &'a [u8], element: Element, rows: usize, cols: usize) -> Option<Self> {
        let wanted = rows.checked_mul(cols)?.checked_mul(element.bytes())?;
        (bytes.len() == wanted).then_some(Matrix { bytes, element, rows, cols })
    }

    /// Output features.
    pub fn rows(&self) -> usize {
        self.rows
    }

    /// Input features.
    pub fn cols(&self) -> usize {
        self.cols
    }

    /// The element type.
    pub fn element(&self) -> Element {
        self.element
    }

    /// The bytes, `rows * cols * element.bytes()` of them.
    pub fn bytes(&self) -> &'a [u8] {
        self.bytes
    }
}

/// Activations in the order in which the kernel reads them; kept between calls to reuse its memory.
#[derive(Debug, Default)]
pub struct Packed {
    data: Vec<f32>,
    /// Elements from the start of `data` to the first aligned one.
    start: usize,
    rows: usize,
    cols: usize,
    order: Option<(Level, bool)>,
}

/// Weight rows of one register tile.
const WEIGHT_ROWS: usize = 4;
/// Weight bytes that a thread takes at a time when each is used once: a few microseconds of streaming.
const STREAM_BYTES: usize = 48 << 10;
/// Weight bytes that a thread takes at a time when they are used for many rows: they stay in its L2 cache.
const REUSE_BYTES: usize = 192 << 10;

/// `y[r][n] = round(Σ_k x[r][k] w[n][k] + bias[n])`.
///
/// `x` is `[rows, cols]`; `y` has `rows` rows at a distance of `y_stride`, of which `weight.rows()` elements
/// from the first on are written. `bias`, if any, has `weight.rows()` elements. `packed` is scratch.
///
/// # Panics
/// If the sizes do not fit each other.
pub fn linear(
    level: Level,
    pool: &Pool,
    y: &mut [f32],
    y_stride: usize,
    x: &[f32],
    weight: Matrix<'_>,
    bias: Option<&[f32]>,
    rounding: Rounding,
    packed: &mut Packed,
) {
    let rows = if weight.cols == 0 { y.len().div_ceil(y_stride.max(1)) } else { x.len() / weight.cols };
    packed.pack(level, pool, x, rows, weight.cols, weight.element);
    linear_packed(level, pool, y, y_stride, packed, weight, bias, rounding);
}

/// [`linear`] on activations that [`Packed::pack`] has prepared for this level and element type: for several
/// weights that share them.
///
/// # Panics
/// If the sizes do not fit each other, or `packed` was made for another level or element order.
pub fn linear_packed(
    level: Level,
    pool: &Pool,
    y: &mut [f32],
    y_stride: usize,
    packed: &Packed,
    weight: Matrix<'_>,
    bias: Option<&[f32]>,
    rounding: Rounding,
) {
    let rows = packed.rows;
    assert_eq!(packed.order, Some((level, weight.element == Element::Bf16)), "packing order");
    assert_eq!(packed.cols, weight.cols, "columns of activations and weight");
    assert!(bias.is_none_or(|bias| bias.len() == weight.rows), "length of the bias");
    if rows == 0 || weight.rows == 0 {
        return;
    }
    assert!(weight.rows <= y_stride, "an output row does not fit its stride");
    assert!(y.len() >= (rows - 1) * y_stride + weight.rows, "output too short");

    let row_bytes = (weight.cols * weight.element.bytes()).max(1);
    let chunk_bytes = if rows < 16 { STREAM_BYTES } else { REUSE_BYTES };
    // At least a dozen chunks where there is so much, so that no thread waits long for the last one.
    let chunk = (chunk_bytes / row_bytes).min(weight.rows / 12).next_multiple_of(WEIGHT_ROWS).max(WEIGHT_ROWS);
    let out = SharedMut::new(y);
    pool.run_chunks(weight.rows, chunk, |range| {
        level.dispatch(Chunk { range, out, y_stride, packed, weight, bias, rounding });
    });
}

impl Packed {
    /// Copies `x` (`[rows, cols]`) into the order in which `level` multiplies it with weights of `element`.
    ///
    /// # Panics
    /// If `x` has not `rows * cols` elements.
    pub fn pack(&mut self, level: Level, pool: &Pool, x: &[f32], rows: usize, cols: usize, element: Element) {
        assert_eq!(x.len(), rows * cols, "activations of a linear");
        const ALIGN: usize = 16;
        let interleaved = element == Element::Bf16;
        let step = 2 * level.lanes();
        let padded = cols.next_multiple_of(step);
        let wanted = rows * padded + ALIGN;
        if self.data.len() < wanted {
            self.data = vec![0.0; wanted];
        }
        // Vec<f32> promises 4 bytes; cache lines have 64.
        self.start = (self.data.as_ptr().addr().wrapping_neg() % 64) / 4;
        (self.rows, self.cols, self.order) = (rows, cols, Some((level, interleaved)));
        let out = SharedMut::new(&mut self.data[self.start..self.start + rows * padded]);
        // Whole tiles, some ten thousand elements at a time.
        let chunk = (16384 / padded.max(1)).next_multiple_of(60).max(60);
        pool.run_chunks(rows, chunk, |range| {
            level.dispatch(Pack { range, out, x, rows, cols, interleaved });
        });
    }
}

struct Pack<'a> {
    range: std::ops::Range<usize>,
    out: SharedMut<'a, f32>,
    x: &'a [f32],
    rows: usize,
    cols: usize,
    interleaved: bool,
}

impl Kernel for Pack<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let step = 2 * I::LANES;
        let steps = self.cols.div_ceil(step);
        let mut tail = [0.0; 64];
        for row in self.range {
            let tile = row / I::TILE_ROWS * I::TILE_ROWS;
            let tile_rows = I::TILE_ROWS.min(self.rows - tile);
            // SAFETY: tiles of `tile_rows * steps * step` elements follow each other in `out`, and each
            // chunk of rows writes its own rows only.
            let out = unsafe { self.out.range(tile * steps * step, tile_rows * steps * step) };
            let x = &self.x[row * self.cols..(row + 1) * self.cols];
            for s in 0..steps {
                let mut from = &x[s * step..];
                if from.len() < step {
                    tail[..step].fill(0.0);
                    tail[..from.len()].copy_from_slice(from);
                    from = &tail[..step];
                }
                let to = &mut out[(s * tile_rows + row - tile) * step..][..step];
                // SAFETY: both slices hold 2 * LANES elements.
                unsafe {
                    if self.interleaved {
                        let (even, odd) = isa.load_deinterleaved(from.as_ptr());
                        isa.store(to.as_mut_ptr(), even);
                        isa.store(to.as_mut_ptr().add(I::LANES), odd);
                    } else {
                        isa.store(to.as_mut_ptr(), isa.load(from.as_ptr()));
                        let second = isa.load(from.as_ptr().add(I::LANES));
                        isa.store(to.as_mut_ptr().add(I::LANES), second);
                    }
                }
            }
        }
    }
}

/// A run of weight rows against all activation rows.
struct Chunk<'a> {
    range: std::ops::Range<usize>,
    out: SharedMut<'a, f32>,
    y_stride: usize,
    packed: &'a Packed,
    weight: Matrix<'a>,
    bias: Option<&'a [f32]>,
    rounding: Rounding,
}

impl Kernel for Chunk<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        match self.weight.element {
            Element::Bf16 => self.multiply::<I, Bf16>(isa),
            Element::F16 => self.multiply::<I, F16>(isa),
            Element::F32 => self.multiply::<I, F32>(isa),
        }
    }
}

impl Chunk<'_> {
    #[inline(always)]
    fn multiply<I: Isa, E: Pair>(self, isa: I) {
        let packed = self.packed;
        let step = 2 * I::LANES;
        let steps = packed.cols.div_ceil(step);
        let mut tile = 0;
        while tile < packed.rows {
            let tile_rows = I::TILE_ROWS.min(packed.rows - tile);
            let x = &packed.data[packed.start + tile * steps * step..][..tile_rows * steps * step];
            match tile_rows {
                1 => self.tile::<I, E, 1>(isa, x, tile),
                2 => self.tile::<I, E, 2>(isa, x, tile),
                3 => self.tile::<I, E, 3>(isa, x, tile),
                4 => self.tile::<I, E, 4>(isa, x, tile),
                _ => self.tile::<I, E, 5>(isa, x, tile),
            }
            for row in tile..tile + tile_rows {
                self.finish(isa, row);
            }
            tile += tile_rows;
        }
    }

    /// The raw sums of `ROWS` activation rows, from `first` on, with every weight row of the chunk.
    #[inline(always)]
    fn tile<I: Isa, E: Pair, const ROWS: usize>(&self, isa: I, x: &[f32], first: usize) {
        if ROWS > I::TILE_ROWS {
            return;
        }
        let cols = self.packed.cols;
        let step = 2 * I::LANES;
        let (whole, rest) = (cols / step, cols % step);
        let row_bytes = cols * E::BYTES;
        let stream_ahead = first == 0;
        let mut n = self.range.start;
        while n < self.range.end {
            // Rows past the end stand in for themselves by the last one; their sums are not stored.
            let count = WEIGHT_ROWS.min(self.range.end - n);
            let w: [*const u8; WEIGHT_ROWS] = [0, 1, 2, 3].map(|i| {
                self.weight.bytes[(n + i.min(count - 1)) * row_bytes..].as_ptr()
            });
            let mut sums = [[isa.splat(0.0); WEIGHT_ROWS]; ROWS];
            let mut x = x.as_ptr();
            for s in 0..whole {
                let at = s * step * E::BYTES;
                // SAFETY: step `s` lies within each weight row and within the packed tile, which holds
                // `2 * LANES` elements per row and step.
                unsafe {
                    if stream_ahead {
                        for i in 0..WEIGHT_ROWS {
                            isa.prefetch(w[i].wrapping_add(at + WEIGHT_ROWS * row_bytes));
                        }
                    }
                    let pairs = [
                        E::load(isa, w[0].add(at)),
                        E::load(isa, w[1].add(at)),
                        E::load(isa, w[2].add(at)),
                        E::load(isa, w[3].add(at)),
                    ];
                    accumulate(isa, &mut sums, pairs, x);
                    x = x.add(ROWS * step);
                }
            }
            if rest != 0 {
                let at = whole * step * E::BYTES;
                // SAFETY: `rest` elements are left of each weight row from `at` on; the packed tile has a
                // whole step, filled up with zeros.
                unsafe {
                    let pairs = [
                        load_partial::<I, E>(isa, w[0].add(at), rest),
                        load_partial::<I, E>(isa, w[1].add(at), rest),
                        load_partial::<I, E>(isa, w[2].add(at), rest),
                        load_partial::<I, E>(isa, w[3].add(at), rest),
                    ];
                    accumulate(isa, &mut sums, pairs, x);
                }
            }
            for r in 0..ROWS {
                let folded = isa.reduce_add4(sums[r]);
                // SAFETY: this chunk alone writes columns `self.range` of the output rows.
                let y = unsafe { self.out.range((first + r) * self.y_stride + n, count) };
                if count == WEIGHT_ROWS {
                    y.copy_from_slice(&folded);
                } else {
                    y.copy_from_slice(&folded[..count]);
                }
            }
            n += count;
        }
    }

    /// Adds the bias to the raw sums of an output row, and rounds them.
    #[inline(always)]
    fn finish<I: Isa>(&self, isa: I, row: usize) {
        if self.bias.is_none() && self.rounding == Rounding::None {
            return;
        }
        let n = self.range.len();
        // SAFETY: this chunk alone writes columns `self.range` of the output rows.
        let y = unsafe { self.out.range(row * self.y_stride + self.range.start, n) };
        let bias = self.bias.map(|bias| &bias[self.range.clone()]);
        crate::vector::for_lanes(isa, n, |isa, at, part| {
            let mut v = part.load(isa, &y[at..]);
            if let Some(bias) = bias {
                v = isa.add(v, part.load(isa, &bias[at..]));
            }
            part.store(isa, &mut y[at..], self.rounding.apply(isa, v));
        });
    }
}

/// One step of K: every pair of weight vectors times every activation row.
///
/// # Safety
/// `ROWS * 2 * LANES` f32 must be readable at `x`.
#[inline(always)]
unsafe fn accumulate<I: Isa, const ROWS: usize>(
    isa: I,
    sums: &mut [[I::V; WEIGHT_ROWS]; ROWS],
    pairs: [(I::V, I::V); WEIGHT_ROWS],
    x: *const f32,
) {
    for r in 0..ROWS {
        // SAFETY: row `r` of the step, two vectors.
        let first = unsafe { isa.load(x.add(2 * r * I::LANES)) };
        for i in 0..WEIGHT_ROWS {
            sums[r][i] = isa.mul_add(pairs[i].0, first, sums[r][i]);
        }
    }
    for r in 0..ROWS {
        // SAFETY: as above.
        let second = unsafe { isa.load(x.add((2 * r + 1) * I::LANES)) };
        for i in 0..WEIGHT_ROWS {
            sums[r][i] = isa.mul_add(pairs[i].1, second, sums[r][i]);
        }
    }
}

/// How two vectors of weights are read.
trait Pair {
    const BYTES: usize;
    /// # Safety
    /// `2 * LANES` elements must be readable at `p`.
    unsafe fn load<I: Isa>(isa: I, p: *const u8) -> (I::V, I::V);
}

struct Bf16;
impl Pair for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, p: *const u8) -> (I::V, I::V) {
        // SAFETY: the caller's promise.
        unsafe { isa.load_bf16_pair(p) }
    }
}

struct F16;
impl Pair for F16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, p: *const u8) -> (I::V, I::V) {
        // SAFETY: the caller's promise.
        unsafe { isa.load_f16_pair(p) }
    }
}

struct F32;
impl Pair for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, p: *const u8) -> (I::V, I::V) {
        let p = p.cast::<f32>();
        // SAFETY: the caller's promise; `Isa::load` assumes no alignment.
        unsafe { (isa.load(p), isa.load(p.wrapping_add(I::LANES))) }
    }
}

/// [`Pair::load`] of `n < 2 * LANES` elements, zeros after them.
///
/// # Safety
/// `n` elements must be readable at `p`.
#[inline(always)]
unsafe fn load_partial<I: Isa, E: Pair>(isa: I, p: *const u8, n: usize) -> (I::V, I::V) {
    let mut buffer = [0_u8; 128];
    // SAFETY: n elements are readable, and a whole step has at most 2 * 16 elements of 4 bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(p, buffer.as_mut_ptr(), n * E::BYTES);
        E::load(isa, buffer.as_ptr())
    }
}
