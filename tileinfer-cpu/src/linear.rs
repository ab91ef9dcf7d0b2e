//! `y = x Wᵀ + b` with weights as they lie in the file, for one row and for many.
//!
//! The order of a sum, which is the same for every output element of a weight whatever the number of rows,
//! the tile or the thread: K runs in steps of `2 * LANES`; in each step lane `i` of one f32 accumulator takes
//! element `2i` and then element `2i + 1` (bf16, which widens in that order with a shift and a mask), or both at once
//! (bf16 by activations that are bf16 too, on levels that have an instruction for it: twice the rate), or
//! `i` and then `i + LANES` (f32, f16); the last step is filled up with zeros; at the end the lanes are folded
//! in halves (see `simd`), the bias is added and the sum is rounded once.
//!
//! Activations are first copied into that order ("packed"), tile after tile, so that the inner loop reads
//! them in one aligned stream. Register tiles are 4 weight rows by `TILE_ROWS` or `DOT_ROWS` activation rows; a
//! weight vector is read, and widened, once per tile. What this module decided not to know: what the product is for.

use std::ops::Range;

use crate::memory::{Aligned, LINE};
use crate::pool::Pool;
use crate::simd::{Isa, Kernel, Level};
use crate::vector::parts;
use crate::{Rounding, SharedMut};

/// Element type of a weight in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Element {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
}

impl Element {
    /// Bytes of one element.
    pub(crate) fn bytes(self) -> usize {
        match self {
            Element::Bf16 | Element::F16 => 2,
            Element::F32 => 4,
        }
    }
}

/// A weight of `rows` output features by `cols` inputs, row-major, little-endian, at any alignment.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Matrix<'a> {
    bytes: &'a [u8],
    element: Element,
    rows: usize,
    cols: usize,
}

impl<'a> Matrix<'a> {
    /// A view of `bytes`; `None` if their number is not `rows * cols` elements.
    pub(crate) fn new(bytes: &'a [u8], element: Element, rows: usize, cols: usize) -> Option<Self> {
        let wanted = rows.checked_mul(cols)?.checked_mul(element.bytes())?;
        (bytes.len() == wanted).then_some(Matrix {
            bytes,
            element,
            rows,
            cols,
        })
    }

    /// Output features.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }
}

/// Activations in the order in which the kernels read them; kept between calls to reuse its memory.
///
/// There are three orders, see the module's first lines; two are made when the weights of a call need both.
#[derive(Debug, Default)]
pub(crate) struct Packed {
    /// For bf16 weights, pairs of bf16.
    pairs: Order,
    /// For bf16 weights.
    interleaved: Order,
    /// For f16 and f32 weights.
    halves: Order,
    rows: usize,
    cols: usize,
    level: Option<Level>,
}

#[derive(Debug)]
struct Order {
    data: Aligned<f32>,
    valid: bool,
}

impl Default for Order {
    fn default() -> Self {
        Order {
            data: Aligned::new(0, 0.0),
            valid: false,
        }
    }
}

/// Weight rows of one register tile.
const WEIGHT_ROWS: usize = 4;
/// Activation rows from which on a thread's weights are used so often that how they come does not matter.
const MANY: usize = 32;
/// Bytes by which prefetching into the second level cache is ahead where weights come from memory. Of 8, 12, 16, 24
/// and 32 KiB, 12 and 16 were best on EPYC Zen 4; into the first level cache any distance took half as long again.
const AHEAD: usize = 16 << 10;
/// Weight bytes that a thread takes at a time when each is used once: a few microseconds of streaming.
const STREAM_BYTES: usize = 48 << 10;
/// Weight bytes that a thread takes at a time when they are used for many rows: they stay in its L2 cache.
const REUSE_BYTES: usize = 192 << 10;

/// `y[r][n] = round(Σ_k x[r][k] w[n][k] + bias[n])` where the rows of `parts`, one after the other, are `w`.
///
/// `x` is `packed`; `y` is `[rows, n]`; `bias`, if any, has `n` elements.
///
/// # Panics
/// If the sizes do not fit each other, or `packed` lacks the order of a part (see [`Packed::pack`]).
pub(crate) fn linear_packed(
    level: Level,
    pool: &Pool,
    y: &mut [f32],
    packed: &Packed,
    parts: &[Matrix<'_>],
    bias: Option<&[f32]>,
    rounding: Rounding,
) {
    let (rows, cols) = (packed.rows, packed.cols);
    let n: usize = parts.iter().map(Matrix::rows).sum();
    assert_eq!(packed.level, Some(level), "level of the packed activations");
    assert!(
        parts.iter().all(|part| part.cols == cols),
        "columns of activations and weight"
    );
    assert!(
        bias.is_none_or(|bias| bias.len() == n),
        "length of the bias"
    );
    assert_eq!(y.len(), rows * n, "length of the output");
    if y.is_empty() {
        return;
    }
    let out = SharedMut::new(y);
    let chunks: Vec<_> = chunks(parts, rows).collect();
    pool.run(chunks.len(), |i| {
        let (part, range, first) = &chunks[i];
        let weight = parts[*part];
        let (kind, order) = packed.order(weight.element);
        let bias = bias.map(|bias| &bias[first + range.start..first + range.end]);
        let (rows, range) = (packed.rows, range.clone());
        level.dispatch(Chunk {
            range,
            out,
            stride: n,
            first: *first,
            x: &order.data,
            kind,
            rows,
            weight,
            bias,
            rounding,
        });
    });
}

/// Runs of rows that a thread takes at a time: the part, its rows, and the output column of the part's first.
fn chunks(parts: &[Matrix<'_>], rows: usize) -> impl Iterator<Item = (usize, Range<usize>, usize)> {
    let total: usize = parts.iter().map(|part| part.bytes.len()).sum();
    // At least two dozen chunks where there is so much, so that no thread waits long for the last one.
    let most = if rows < MANY {
        STREAM_BYTES
    } else {
        REUSE_BYTES
    };
    let bytes = most.min(total / 24);
    let mut first = 0;
    parts.iter().enumerate().flat_map(move |(i, part)| {
        let row_bytes = (part.cols * part.element.bytes()).max(1);
        let chunk = (bytes / row_bytes)
            .next_multiple_of(WEIGHT_ROWS)
            .max(WEIGHT_ROWS);
        let start = first;
        first += part.rows;
        let n = part.rows;
        (0..n)
            .step_by(chunk)
            .map(move |at| (i, at..n.min(at + chunk), start))
    })
}

impl Packed {
    /// Copies `x` (`[rows, cols]`, rounded as `rounding` says) into the orders in which `level` multiplies it with the
    /// `parts` of a weight.
    ///
    /// # Panics
    /// If `x` has not `rows * cols` elements.
    pub(crate) fn pack(
        &mut self,
        level: Level,
        pool: &Pool,
        x: &[f32],
        rows: usize,
        cols: usize,
        rounding: Rounding,
        parts: &[Matrix<'_>],
    ) {
        assert_eq!(x.len(), rows * cols, "activations of a linear");
        (self.rows, self.cols, self.level) = (rows, cols, Some(level));
        let padded = cols.next_multiple_of(2 * level.lanes());
        let of_bf16 = if rounding == Rounding::Bf16 && level.has_dot() {
            Kind::Pairs
        } else {
            Kind::Interleaved
        };
        let wanted = |kind| {
            parts.iter().any(|part| match part.element {
                Element::Bf16 => kind == of_bf16,
                Element::F16 | Element::F32 => kind == Kind::Halves,
            })
        };
        for (order, kind) in [
            (&mut self.pairs, Kind::Pairs),
            (&mut self.interleaved, Kind::Interleaved),
            (&mut self.halves, Kind::Halves),
        ] {
            order.valid = wanted(kind);
            if !order.valid {
                continue;
            }
            if order.data.len() < rows * padded {
                order.data = Aligned::new(rows * padded, 0.0);
            }
            let out = SharedMut::new(&mut order.data);
            // Some ten thousand elements at a time.
            pool.run_chunks(rows, (16384 / padded.max(1)).max(1), |range| {
                level.dispatch(Pack {
                    range,
                    out,
                    x,
                    rows,
                    cols,
                    kind,
                });
            });
        }
    }

    fn order(&self, element: Element) -> (Kind, &Order) {
        let (kind, order) = match element {
            Element::Bf16 if self.pairs.valid => (Kind::Pairs, &self.pairs),
            Element::Bf16 => (Kind::Interleaved, &self.interleaved),
            Element::F16 | Element::F32 => (Kind::Halves, &self.halves),
        };
        assert!(order.valid, "activations are not packed for {element:?}");
        (kind, order)
    }
}

/// An order of packed activations.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    /// A step is `LANES` pairs of bf16.
    Pairs,
    /// A step is `LANES` elements of even index and `LANES` of odd index.
    Interleaved,
    /// A step is `2 * LANES` elements as they come.
    Halves,
}

impl Kind {
    /// Vectors a step.
    fn vectors(self) -> usize {
        match self {
            Kind::Pairs => 1,
            Kind::Interleaved | Kind::Halves => 2,
        }
    }

    /// Rows of a register tile: all tiles about the same, none larger than the instruction set allows.
    #[inline(always)]
    fn tile_size<I: Isa>(self, rows: usize) -> usize {
        let most = match self {
            Kind::Pairs => I::DOT_ROWS,
            Kind::Interleaved | Kind::Halves => I::TILE_ROWS,
        };
        rows.div_ceil(rows.div_ceil(most.max(1)).max(1)).max(1)
    }
}

struct Pack<'a> {
    range: Range<usize>,
    out: SharedMut<'a, f32>,
    x: &'a [f32],
    rows: usize,
    cols: usize,
    kind: Kind,
}

impl Kernel for Pack<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let step = 2 * I::LANES;
        let packed = self.kind.vectors() * I::LANES;
        let steps = self.cols.div_ceil(step);
        let mut tail = [0.0; 64];
        for row in self.range {
            let size = self.kind.tile_size::<I>(self.rows);
            let tile = row / size * size;
            let tile_rows = size.min(self.rows - tile);
            // Tiles of `tile_rows * steps * packed` words follow each other.
            let tile_out = tile * steps * packed;
            let x = &self.x[row * self.cols..(row + 1) * self.cols];
            for s in 0..steps {
                let mut from = &x[s * step..];
                if from.len() < step {
                    tail[..step].fill(0.0);
                    tail[..from.len()].copy_from_slice(from);
                    from = &tail[..step];
                }
                // SAFETY: each row writes its own places, and is in one range; both slices hold 2 * LANES
                // elements.
                unsafe {
                    let to = self
                        .out
                        .range(tile_out + (s * tile_rows + row - tile) * packed, packed)
                        .as_mut_ptr();
                    match self.kind {
                        Kind::Pairs if I::DOT_ROWS > 0 => {
                            let (even, odd) = isa.load_deinterleaved(from.as_ptr());
                            isa.store(to, isa.pair_bf16(even, odd));
                        }
                        Kind::Pairs | Kind::Interleaved => {
                            let (even, odd) = isa.load_deinterleaved(from.as_ptr());
                            isa.store(to, even);
                            isa.store(to.add(I::LANES), odd);
                        }
                        Kind::Halves => {
                            isa.store(to, isa.load(from.as_ptr()));
                            let second = isa.load(from.as_ptr().add(I::LANES));
                            isa.store(to.add(I::LANES), second);
                        }
                    }
                }
            }
        }
    }
}

/// A run of rows of a part against all activation rows.
struct Chunk<'a> {
    range: Range<usize>,
    out: SharedMut<'a, f32>,
    /// Elements of an output row.
    stride: usize,
    /// Output column of the part's first row.
    first: usize,
    x: &'a [f32],
    kind: Kind,
    rows: usize,
    weight: Matrix<'a>,
    /// Of the rows in `range`.
    bias: Option<&'a [f32]>,
    rounding: Rounding,
}

impl Kernel for Chunk<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        match self.weight.element {
            Element::Bf16 if self.kind == Kind::Pairs => {
                if I::DOT_ROWS > 0 {
                    self.multiply::<I, Bf16Pairs>(isa);
                }
            }
            Element::Bf16 => self.multiply::<I, Bf16>(isa),
            Element::F16 => self.multiply::<I, F16>(isa),
            Element::F32 => self.multiply::<I, F32>(isa),
        }
    }
}

impl Chunk<'_> {
    #[inline(always)]
    fn multiply<I: Isa, E: Weights>(self, isa: I) {
        let steps = self.weight.cols.div_ceil(2 * I::LANES);
        let packed = E::VECTORS * I::LANES;
        let size = self.kind.tile_size::<I>(self.rows);
        // Few rows: each register tile of weights meets all of them while it is in the L1 cache. Many: each
        // tile of activations meets all weights of the chunk.
        let group = if self.rows < MANY {
            WEIGHT_ROWS
        } else {
            self.range.len()
        };
        let mut n = self.range.start;
        let row_bytes = self.weight.cols * E::BYTES;
        // What comes before anything asks ahead: else a chunk begins with waiting.
        let first = &self.weight.bytes[n * row_bytes..self.range.end * row_bytes];
        for line in first[..AHEAD.min(first.len())].chunks(LINE) {
            isa.prefetch(line.as_ptr());
        }
        while n < self.range.end {
            let weights = n..self.range.end.min(n + group);
            let mut first = 0;
            while first < self.rows {
                let rows = size.min(self.rows - first);
                let x = &self.x[first * steps * packed..][..rows * steps * packed];
                let ahead = first == 0;
                match rows {
                    1 => self.tile::<I, E, 1>(isa, x, first, &weights, ahead),
                    2 => self.tile::<I, E, 2>(isa, x, first, &weights, ahead),
                    3 => self.tile::<I, E, 3>(isa, x, first, &weights, ahead),
                    4 => self.tile::<I, E, 4>(isa, x, first, &weights, ahead),
                    5 => self.tile::<I, E, 5>(isa, x, first, &weights, ahead),
                    _ => self.tile::<I, E, 6>(isa, x, first, &weights, ahead),
                }
                if weights.end == self.range.end {
                    // The sums of these rows are all there, and of many rows these are still near.
                    self.finish(isa, first..first + rows);
                }
                first += rows;
            }
            n = weights.end;
        }
    }

    /// Adds the bias to the raw sums of some activation rows, and rounds them.
    #[inline(always)]
    fn finish<I: Isa>(&self, isa: I, rows: Range<usize>) {
        for row in rows {
            let at = row * self.stride + self.first + self.range.start;
            // SAFETY: this chunk alone writes columns `self.range` of the output rows.
            let y = unsafe { self.out.range(at, self.range.len()) };
            Finish {
                y,
                bias: self.bias,
                rounding: self.rounding,
            }
            .run(isa);
        }
    }

    /// The raw sums of `ROWS` activation rows, from `first` on, with the weight rows `weights`; `ahead`: these
    /// come from memory, so the next ones are asked for.
    #[inline(always)]
    fn tile<I: Isa, E: Weights, const ROWS: usize>(
        &self,
        isa: I,
        x: &[f32],
        first: usize,
        weights: &Range<usize>,
        ahead: bool,
    ) {
        if ROWS > E::most_rows::<I>() {
            return;
        }
        let cols = self.weight.cols;
        let step = 2 * I::LANES;
        let packed = E::VECTORS * I::LANES;
        let (whole, rest) = (cols / step, cols % step);
        let row_bytes = cols * E::BYTES;
        let mut n = weights.start;
        while n < weights.end {
            // Rows past the end stand in for themselves by the last one; their sums are not stored.
            let count = WEIGHT_ROWS.min(weights.end - n);
            let tile = self.weight.bytes[n * row_bytes..(n + count) * row_bytes].as_ptr();
            let row = |i: usize| tile.wrapping_add(i.min(count - 1) * row_bytes);
            let w = [row(0), row(1), row(2), row(3)];
            let mut sums = [[isa.splat(0.0); WEIGHT_ROWS]; ROWS];
            let mut x = x.as_ptr();
            let mut done = 0;
            if ROWS == 1 && ahead {
                // Weight by weight, in the order of memory: one sum waits for itself, but the next row's begins
                // meanwhile, and this is faster than four streams.
                for i in 0..WEIGHT_ROWS {
                    let mut sum = [[isa.splat(0.0)]; ROWS];
                    for s in 0..whole {
                        // SAFETY: step `s` lies within the weight row and within the packed row.
                        unsafe {
                            let p = w[i].add(s * step * E::BYTES);
                            isa.prefetch(p.wrapping_add(AHEAD));
                            accumulate::<I, E, _, _>(
                                isa,
                                &mut sum,
                                [E::load(isa, p)],
                                x.add(s * packed),
                            );
                        }
                    }
                    sums[0][i] = sum[0][0];
                }
                done = whole;
                x = x.wrapping_add(whole * packed);
            }
            // As many bytes as this tile has are asked for while it is in use.
            let next = tile.wrapping_add(AHEAD);
            for s in done..whole {
                let at = s * step * E::BYTES;
                // SAFETY: step `s` lies within each weight row and within the packed tile.
                unsafe {
                    if ahead {
                        for i in 0..WEIGHT_ROWS {
                            isa.prefetch(
                                next.wrapping_add((s * WEIGHT_ROWS + i) * step * E::BYTES),
                            );
                        }
                    }
                    let weights = [
                        E::load(isa, w[0].add(at)),
                        E::load(isa, w[1].add(at)),
                        E::load(isa, w[2].add(at)),
                        E::load(isa, w[3].add(at)),
                    ];
                    accumulate::<I, E, _, _>(isa, &mut sums, weights, x);
                    x = x.add(ROWS * packed);
                }
            }
            if rest != 0 {
                let at = whole * step * E::BYTES;
                // SAFETY: `rest` elements are left of each weight row from `at` on; the packed tile has a
                // whole step, filled up with zeros.
                unsafe {
                    let weights = [
                        load_partial::<I, E>(isa, w[0].add(at), rest),
                        load_partial::<I, E>(isa, w[1].add(at), rest),
                        load_partial::<I, E>(isa, w[2].add(at), rest),
                        load_partial::<I, E>(isa, w[3].add(at), rest),
                    ];
                    accumulate::<I, E, _, _>(isa, &mut sums, weights, x);
                }
            }
            for r in 0..ROWS {
                let folded = isa.reduce_add4(sums[r]);
                // SAFETY: this chunk alone writes columns `self.range` of the output rows.
                let y = unsafe {
                    self.out
                        .range((first + r) * self.stride + self.first + n, count)
                };
                if count == WEIGHT_ROWS {
                    y.copy_from_slice(&folded);
                } else {
                    y.copy_from_slice(&folded[..count]);
                }
            }
            n += count;
        }
    }
}

/// Adds the bias to raw sums of an output row, and rounds them.
struct Finish<'a> {
    y: &'a mut [f32],
    bias: Option<&'a [f32]>,
    rounding: Rounding,
}

impl Kernel for Finish<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        if self.bias.is_none() && self.rounding == Rounding::None {
            return;
        }
        for (at, part) in parts(isa, self.y.len()) {
            let mut v = part.load(isa, &self.y[at..]);
            if let Some(bias) = self.bias {
                v = isa.add(v, part.load(isa, &bias[at..]));
            }
            part.store(isa, &mut self.y[at..], self.rounding.apply(isa, v));
        }
    }
}

/// One step of K: the weights of `N` rows times every activation row.
///
/// # Safety
/// `ROWS * VECTORS * LANES` words must be readable at `x`.
#[inline(always)]
unsafe fn accumulate<I: Isa, E: Weights, const ROWS: usize, const N: usize>(
    isa: I,
    sums: &mut [[I::V; N]; ROWS],
    weights: [E::Step<I>; N],
    x: *const f32,
) {
    for vector in 0..E::VECTORS {
        for r in 0..ROWS {
            // SAFETY: row `r` of the step has so many vectors.
            let x = unsafe { isa.load(x.add((E::VECTORS * r + vector) * I::LANES)) };
            for i in 0..N {
                sums[r][i] = E::multiply_add(isa, weights[i], vector, x, sums[r][i]);
            }
        }
    }
}

/// How the weights of a step are read and multiplied.
trait Weights {
    /// Of one element.
    const BYTES: usize;
    /// Vectors of packed activations a step.
    const VECTORS: usize;
    /// Activation rows of the largest register tile.
    #[inline(always)]
    fn most_rows<I: Isa>() -> usize {
        I::TILE_ROWS
    }
    /// `2 * LANES` weights.
    type Step<I: Isa>: Copy;
    /// # Safety
    /// `2 * LANES` elements must be readable at `p`.
    unsafe fn load<I: Isa>(isa: I, p: *const u8) -> Self::Step<I>;
    /// Adds the products with vector `vector` of a step's activations to `sum`.
    fn multiply_add<I: Isa>(
        isa: I,
        weights: Self::Step<I>,
        vector: usize,
        x: I::V,
        sum: I::V,
    ) -> I::V;
}

/// A [`Weights`] whose step is two vectors of f32.
macro_rules! two_vectors {
    ($name:ident, $bytes:literal, $load:expr) => {
        struct $name;
        impl Weights for $name {
            const BYTES: usize = $bytes;
            const VECTORS: usize = 2;
            type Step<I: Isa> = (I::V, I::V);
            #[inline(always)]
            unsafe fn load<I: Isa>(isa: I, p: *const u8) -> (I::V, I::V) {
                // SAFETY: the caller's promise.
                unsafe { $load(isa, p) }
            }
            #[inline(always)]
            fn multiply_add<I: Isa>(
                isa: I,
                weights: (I::V, I::V),
                vector: usize,
                x: I::V,
                sum: I::V,
            ) -> I::V {
                let weights = if vector == 0 { weights.0 } else { weights.1 };
                isa.mul_add(weights, x, sum)
            }
        }
    };
}

two_vectors!(Bf16, 2, I::load_bf16_pair);
two_vectors!(F16, 2, I::load_f16_pair);
two_vectors!(F32, 4, load_f32_pair);

/// bf16 that meet activations of bf16, two at a time.
struct Bf16Pairs;
impl Weights for Bf16Pairs {
    const BYTES: usize = 2;
    const VECTORS: usize = 1;
    #[inline(always)]
    fn most_rows<I: Isa>() -> usize {
        I::DOT_ROWS
    }
    type Step<I: Isa> = I::V;
    #[inline(always)]
    unsafe fn load<I: Isa>(isa: I, p: *const u8) -> I::V {
        // SAFETY: the caller's promise.
        unsafe { isa.load_bf16_raw(p) }
    }
    #[inline(always)]
    fn multiply_add<I: Isa>(isa: I, weights: I::V, _: usize, x: I::V, sum: I::V) -> I::V {
        isa.dot_bf16(weights, x, sum)
    }
}

/// # Safety
/// `2 * LANES` f32 must be readable at `p`.
#[inline(always)]
unsafe fn load_f32_pair<I: Isa>(isa: I, p: *const u8) -> (I::V, I::V) {
    let p = p.cast::<f32>();
    // SAFETY: the caller's promise; `Isa::load` assumes no alignment.
    unsafe { (isa.load(p), isa.load(p.wrapping_add(I::LANES))) }
}

/// [`Weights::load`] of `n < 2 * LANES` elements, zeros after them.
///
/// # Safety
/// `n` elements must be readable at `p`.
#[inline(always)]
unsafe fn load_partial<I: Isa, E: Weights>(isa: I, p: *const u8, n: usize) -> E::Step<I> {
    let mut buffer = [0_u8; 128];
    // SAFETY: n elements are readable, and a whole step has at most 2 * 16 elements of 4 bytes.
    unsafe {
        std::ptr::copy_nonoverlapping(p, buffer.as_mut_ptr(), n * E::BYTES);
        E::load(isa, buffer.as_ptr())
    }
}

pub(crate) mod int8;

#[cfg(test)]
mod tests;
