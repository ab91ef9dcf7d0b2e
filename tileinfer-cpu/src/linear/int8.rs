//! `y = x Wᵀ + b` with int8 weights, one scale a row, for one row and for many.
//!
//! What is computed is written down in [`tileinfer::weights::int8`]: a row of activations becomes 16-bit integers under
//! one scale, the sum of products is an exact integer, and the rounding is the same wherever it happens. So no order of
//! sums needs keeping. The shape of the loops is that of bf16 weights, one module up.

use std::ops::Range;

use tileinfer::weights::int8::nearest;

use super::{AHEAD, Finish, MANY, REUSE_BYTES, STREAM_BYTES, WEIGHT_ROWS};
use crate::memory::{Aligned, LINE};
use crate::pool::Pool;
use crate::simd::{ByteDot, ByteKernel, Level};
use crate::{Rounding, SharedMut};

/// An int8 weight of `rows` output features by `cols` inputs, row-major, at any alignment, and a scale for each row.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Int8Matrix<'a> {
    values: &'a [i8],
    scales: &'a [f32],
    cols: usize,
}

impl<'a> Int8Matrix<'a> {
    /// A view of `values`; `None` if there are not `cols` of them for each scale.
    pub(crate) fn new(values: &'a [i8], scales: &'a [f32], cols: usize) -> Option<Self> {
        (scales.len().checked_mul(cols)? == values.len()).then_some(Int8Matrix {
            values,
            scales,
            cols,
        })
    }
}

/// Activations as integers in the order in which the kernels read them; kept between calls to reuse its memory.
#[derive(Debug)]
pub(crate) struct PackedInt8 {
    data: Aligned<u8>,
    /// Of each row: what one unit is worth, and the sum of its integers.
    units: Vec<(f32, f64)>,
    rows: usize,
    cols: usize,
    level: Option<Level>,
}

impl Default for PackedInt8 {
    fn default() -> Self {
        PackedInt8 {
            data: Aligned::new(0, 0),
            units: Vec::new(),
            rows: 0,
            cols: 0,
            level: None,
        }
    }
}

impl PackedInt8 {
    /// Rounds `x` (`[rows, cols]`) and lays it out for `level`.
    ///
    /// # Panics
    /// If `x` has not `rows * cols` elements.
    pub(crate) fn pack(&mut self, level: Level, pool: &Pool, x: &[f32], rows: usize, cols: usize) {
        assert_eq!(x.len(), rows * cols, "activations of a linear");
        (self.rows, self.cols, self.level) = (rows, cols, Some(level));
        // Two bytes a column, filled up to the longest step.
        let bytes = rows * 2 * cols.next_multiple_of(64);
        if self.data.len() < bytes {
            self.data = Aligned::new(bytes, 0);
        }
        self.units.resize(rows, (1.0, 0.0));
        let (out, units) = (
            SharedMut::new(&mut self.data),
            SharedMut::new(&mut self.units),
        );
        pool.run_chunks(rows, (16384 / cols.max(1)).max(1), |range| {
            level.dispatch_bytes(Pack {
                range,
                out,
                units,
                x,
                rows,
                cols,
            });
        });
    }
}

/// `y[r][n] = round(f32(Σ_k v[r][k] q[n][k]) (t[r] s[n]) + bias[n])` where the rows of `parts`, one after the other, are
/// `q` with scales `s`, and `v` with `t` is `packed`; `y` is `[rows, n]`; `bias`, if any, has `n` elements.
///
/// # Panics
/// If the sizes do not fit each other, or `packed` is of another level.
pub(crate) fn linear_int8(
    level: Level,
    pool: &Pool,
    y: &mut [f32],
    packed: &PackedInt8,
    parts: &[Int8Matrix<'_>],
    bias: Option<&[f32]>,
    rounding: Rounding,
) {
    let (rows, cols) = (packed.rows, packed.cols);
    let n: usize = parts.iter().map(|part| part.scales.len()).sum();
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
    let most = if rows < MANY {
        STREAM_BYTES
    } else {
        REUSE_BYTES
    };
    // At least a dozen chunks where there is so much, so that no thread waits long for the last one.
    let bytes = most.min(n * cols / 12);
    let chunk = (bytes / cols.max(1))
        .next_multiple_of(WEIGHT_ROWS)
        .max(WEIGHT_ROWS);
    let mut chunks = Vec::new();
    let mut first = 0;
    for part in parts {
        let n = part.scales.len();
        let ranges = (0..n).step_by(chunk).map(|at| at..n.min(at + chunk));
        chunks.extend(ranges.map(|range| (part, range, first)));
        first += n;
    }
    let out = SharedMut::new(y);
    pool.run(chunks.len(), |i| {
        let (part, range, first) = &chunks[i];
        let columns = first + range.start..first + range.end;
        level.dispatch_bytes(Chunk {
            range: range.clone(),
            out,
            stride: n,
            first: *first,
            packed,
            weight: **part,
        });
        for row in 0..rows {
            // SAFETY: this chunk alone writes these columns.
            let y = unsafe { out.range(row * n + columns.start, columns.len()) };
            level.dispatch(Finish {
                y,
                bias: bias.map(|bias| &bias[columns.clone()]),
                rounding,
            });
        }
    });
}

/// Rows of a register tile: all tiles about the same, none larger than the instruction set allows.
#[inline(always)]
fn tile_size<D: ByteDot>(rows: usize) -> usize {
    rows.div_ceil(rows.div_ceil(D::TILE_ROWS).max(1)).max(1)
}

struct Pack<'a> {
    range: Range<usize>,
    out: SharedMut<'a, u8>,
    units: SharedMut<'a, (f32, f64)>,
    x: &'a [f32],
    rows: usize,
    cols: usize,
}

impl ByteKernel for Pack<'_> {
    #[inline(always)]
    fn run<D: ByteDot>(self, dot: D) {
        let steps = self.cols.div_ceil(D::STEP);
        let size = tile_size::<D>(self.rows);
        for row in self.range {
            let x = &self.x[row * self.cols..(row + 1) * self.cols];
            let (levels, unit) = levels(x);
            let tile = row / size * size;
            let tile_rows = size.min(self.rows - tile);
            let tile_out = tile * steps * 2 * D::STEP;
            let mut sum = 0_i64;
            for s in 0..steps {
                let from = &x[s * D::STEP..self.cols.min((s + 1) * D::STEP)];
                let mut v = [0_i32; 64];
                round(from, levels, &mut v);
                sum += i64::from(v.iter().sum::<i32>());
                let at = tile_out + (s * tile_rows + row - tile) * 2 * D::STEP;
                // SAFETY: each row writes its own places, and is in one range.
                let out = unsafe { self.out.range(at, 2 * D::STEP) };
                dot.pack(&v[..D::STEP], out);
            }
            // SAFETY: as above.
            let place = unsafe { self.units.range(row, 1) };
            place[0] = (unit, sum as f64);
        }
    }
}

/// What a row is multiplied by to become integers, and what one of them is worth: the rule of
/// [`tileinfer::weights::int8::round_activations`].
#[inline(always)]
fn levels(x: &[f32]) -> (f32, f32) {
    use tileinfer::weights::int8::{ACTIVATION_LEVELS, TINY};
    let mut top = 0;
    for x in x {
        // Numbers without a sign are in order as bits; infinity comes after them, then NaN.
        top = std::cmp::max(top, x.to_bits() & 0x7fff_ffff);
    }
    let top = f32::from_bits(top);
    if !top.is_finite() {
        (0.0, f32::NAN)
    } else if top < TINY {
        (0.0, 1.0)
    } else {
        (ACTIVATION_LEVELS / top, top / ACTIVATION_LEVELS)
    }
}

/// `x * levels`, rounded to nearest, ties to even; of a row that is to be zero, zeros.
#[inline(always)]
fn round(x: &[f32], levels: f32, v: &mut [i32; 64]) {
    if levels == 0.0 {
        return;
    }
    for (v, &x) in v.iter_mut().zip(x) {
        *v = nearest(x * levels);
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
    packed: &'a PackedInt8,
    weight: Int8Matrix<'a>,
}

impl ByteKernel for Chunk<'_> {
    #[inline(always)]
    fn run<D: ByteDot>(self, dot: D) {
        let steps = self.weight.cols.div_ceil(D::STEP);
        let rows = self.packed.rows;
        let size = tile_size::<D>(rows);
        // Few rows: each register tile of weights meets all of them while it is in the L1 cache. Many: each tile of
        // activations meets all weights of the chunk.
        let (group, ahead) = if rows < MANY {
            (WEIGHT_ROWS, true)
        } else {
            (self.range.len(), false)
        };
        let mut n = self.range.start;
        let cols = self.weight.cols;
        let first = &self.weight.values[n * cols..self.range.end * cols];
        for line in first[..AHEAD.min(first.len())].chunks(LINE) {
            dot.prefetch(line.as_ptr());
        }
        while n < self.range.end {
            let weights = n..self.range.end.min(n + group);
            let mut first = 0;
            while first < rows {
                let count = size.min(rows - first);
                let x =
                    &self.packed.data[first * steps * 2 * D::STEP..][..count * steps * 2 * D::STEP];
                let ahead = ahead && first == 0;
                match count {
                    1 => self.tile::<D, 1>(dot, x, first, &weights, ahead),
                    2 => self.tile::<D, 2>(dot, x, first, &weights, ahead),
                    _ => self.tile::<D, 3>(dot, x, first, &weights, ahead),
                }
                first += count;
            }
            n = weights.end;
        }
    }
}

impl Chunk<'_> {
    /// The scaled sums of `ROWS` activation rows, from `first` on, with the weight rows `weights`; `ahead`: these come
    /// from memory, so the next ones are asked for.
    #[inline(always)]
    fn tile<D: ByteDot, const ROWS: usize>(
        &self,
        dot: D,
        x: &[u8],
        first: usize,
        weights: &Range<usize>,
        ahead: bool,
    ) {
        if ROWS > D::TILE_ROWS {
            return;
        }
        let cols = self.weight.cols;
        let mut n = weights.start;
        while n < weights.end {
            // Rows past the end stand in for themselves by the last one; their sums are not stored.
            let count = WEIGHT_ROWS.min(weights.end - n);
            let tile = self.weight.values[n * cols..(n + count) * cols].as_ptr();
            let row = |i: usize| tile.wrapping_add(i.min(count - 1) * cols);
            let w = [row(0), row(1), row(2), row(3)];
            let mut totals = [[0.0_f64; WEIGHT_ROWS]; ROWS];
            let mut block = 0;
            while block < cols {
                let columns = block..cols.min(block + D::BLOCK);
                let sums = self.block::<D, ROWS>(dot, x, &w, columns.clone(), ahead);
                for r in 0..ROWS {
                    let block = dot.totals(sums[r]);
                    for i in 0..WEIGHT_ROWS {
                        totals[r][i] += block[i];
                    }
                }
                block = columns.end;
            }
            for r in 0..ROWS {
                let (unit, sum) = self.packed.units[first + r];
                // SAFETY: this chunk alone writes columns `self.range` of the output rows.
                let y = unsafe {
                    self.out
                        .range((first + r) * self.stride + self.first + n, count)
                };
                let raised = f64::from(D::RAISED) * sum;
                for (i, y) in y.iter_mut().enumerate() {
                    *y = (totals[r][i] - raised) as f32 * (unit * self.weight.scales[n + i]);
                }
            }
            n += count;
        }
    }

    /// Partial sums over `columns`.
    #[inline(always)]
    fn block<D: ByteDot, const ROWS: usize>(
        &self,
        dot: D,
        x: &[u8],
        w: &[*const i8; WEIGHT_ROWS],
        columns: Range<usize>,
        ahead: bool,
    ) -> [[D::Sums; WEIGHT_ROWS]; ROWS] {
        let (whole, rest) = (columns.end / D::STEP, columns.end % D::STEP);
        let steps = columns.start / D::STEP..whole;
        let mut sums = [[dot.zero(); WEIGHT_ROWS]; ROWS];
        let x = x.as_ptr();
        let at = |s: usize, r: usize| x.wrapping_add((s * ROWS + r) * 2 * D::STEP);
        if ROWS == 1 && ahead {
            // Weight by weight, in the order of memory.
            for i in 0..WEIGHT_ROWS {
                let mut sum = sums[0][i];
                for s in steps.clone() {
                    // SAFETY: step `s` lies within the weight row and within the packed row.
                    unsafe {
                        let p = w[i].add(s * D::STEP);
                        dot.prefetch(p.wrapping_add(AHEAD));
                        sum = dot.dot(sum, dot.weights(p), at(s, 0));
                    }
                }
                sums[0][i] = sum;
            }
        } else {
            // As many bytes as this tile has are asked for while it is in use.
            let next = w[0].wrapping_add(AHEAD);
            for s in steps {
                // SAFETY: step `s` lies within each weight row and within the packed tile.
                unsafe {
                    if ahead {
                        for i in 0..WEIGHT_ROWS {
                            dot.prefetch(next.wrapping_add((s * WEIGHT_ROWS + i) * D::STEP));
                        }
                    }
                    let w = [
                        dot.weights(w[0].add(s * D::STEP)),
                        dot.weights(w[1].add(s * D::STEP)),
                        dot.weights(w[2].add(s * D::STEP)),
                        dot.weights(w[3].add(s * D::STEP)),
                    ];
                    for r in 0..ROWS {
                        for i in 0..WEIGHT_ROWS {
                            sums[r][i] = dot.dot(sums[r][i], w[i], at(s, r));
                        }
                    }
                }
            }
        }
        if rest > 0 {
            for i in 0..WEIGHT_ROWS {
                let mut buffer = [0_i8; 64];
                // SAFETY: `rest` weights are left in the row, fewer than a step, which is at most 64; the packed tile
                // has a whole last step, filled up with zeros.
                unsafe {
                    let p = w[i].add(whole * D::STEP);
                    std::ptr::copy_nonoverlapping(p, buffer.as_mut_ptr(), rest);
                    let w = dot.weights(buffer.as_ptr());
                    for r in 0..ROWS {
                        sums[r][i] = dot.dot(sums[r][i], w, at(whole, r));
                    }
                }
            }
        }
        sums
    }
}

#[cfg(test)]
mod tests;
