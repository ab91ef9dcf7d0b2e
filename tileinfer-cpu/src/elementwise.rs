//! Norms, RoPE, activations and the other ops whose rows have nothing to do with each other.
//!
//! Every kernel takes a range of rows; which ranges, on how many threads, changes no bit. A sum of squares runs
//! over the width lane by lane and folds once. What this module decided not to know: pages, weights.

use std::ops::Range;
use tileinfer::backend::{Activation, RopeTable};

use crate::math::{exp_m1, silu};
use crate::pool::Pool;
use crate::simd::{Isa, Kernel, Level};
use crate::vector::parts;
use crate::{Rounding, SharedMut};

/// Elements below which a second thread costs more than it saves.
const WORTH_A_THREAD: usize = 16 << 10;

/// Calls `f` with ranges of rows, on several threads if there are many elements.
pub(crate) fn for_rows(pool: &Pool, rows: usize, width: usize, f: impl Fn(Range<usize>) + Sync) {
    pool.run_chunks(rows, (WORTH_A_THREAD / width.max(1)).max(1), f);
}

/// `out[r] = round(norm(x[r]) * weight)`; with `delta`, `x[r] = round(x[r] + delta[r])` before.
pub(crate) struct RmsNorm<'a> {
    pub(crate) out: SharedMut<'a, f32>,
    pub(crate) x: RowsOf<'a>,
    pub(crate) weight: &'a [f32],
    pub(crate) eps: f32,
    pub(crate) rounding: Rounding,
}

/// What a norm reads.
#[derive(Clone, Copy)]
pub(crate) enum RowsOf<'a> {
    /// Rows as they are.
    Input(&'a [f32]),
    /// Rows to which others are added, in place, first.
    Sum(SharedMut<'a, f32>, &'a [f32], Rounding),
}

impl RmsNorm<'_> {
    pub(crate) fn run(&self, level: Level, pool: &Pool, rows: usize) {
        let width = self.weight.len();
        for_rows(pool, rows, width, |rows| {
            level.dispatch(RmsNormRows(self, rows))
        });
    }
}

struct RmsNormRows<'a>(&'a RmsNorm<'a>, Range<usize>);

impl Kernel for RmsNormRows<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let RmsNormRows(op, rows) = self;
        let width = op.weight.len();
        for row in rows {
            let x = match op.x {
                RowsOf::Input(x) => &x[row * width..(row + 1) * width],
                RowsOf::Sum(x, delta, rounding) => {
                    // SAFETY: each row is in one range.
                    let x = unsafe { x.range(row * width, width) };
                    add(isa, x, &delta[row * width..(row + 1) * width], rounding);
                    &*x
                }
            };
            // SAFETY: each row is in one range.
            let out = unsafe { op.out.range(row * width, width) };
            let scale = norm_scale(isa, x, op.eps);
            for (at, part) in parts(isa, width) {
                let y = isa.mul(
                    isa.mul(part.load(isa, &x[at..]), scale),
                    part.load(isa, &op.weight[at..]),
                );
                part.store(isa, &mut out[at..], op.rounding.apply(isa, y));
            }
        }
    }
}

/// `1 / sqrt(mean(x²) + eps)`.
#[inline(always)]
fn norm_scale<I: Isa>(isa: I, x: &[f32], eps: f32) -> I::V {
    let mut squares = isa.splat(0.0);
    for (at, part) in parts(isa, x.len()) {
        let v = part.load(isa, &x[at..]);
        squares = isa.mul_add(v, v, squares);
    }
    isa.splat(1.0 / (isa.reduce_add(squares) / x.len() as f32 + eps).sqrt())
}

/// `x = round(x + delta)`.
#[inline(always)]
fn add<I: Isa>(isa: I, x: &mut [f32], delta: &[f32], rounding: Rounding) {
    for (at, part) in parts(isa, x.len()) {
        let sum = isa.add(part.load(isa, &x[at..]), part.load(isa, &delta[at..]));
        part.store(isa, &mut x[at..], rounding.apply(isa, sum));
    }
}

/// `x[i] = round(x[i] + delta[i])`.
pub(crate) struct Add<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) delta: &'a [f32],
    pub(crate) rounding: Rounding,
}

impl Kernel for Add<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        add(isa, self.x, self.delta, self.rounding);
    }
}

/// Rounds in place.
pub(crate) struct Round<'a>(pub(crate) &'a mut [f32], pub(crate) Rounding);

impl Kernel for Round<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Round(x, rounding) = self;
        for (at, part) in parts(isa, x.len()) {
            let v = rounding.apply(isa, part.load(isa, &x[at..]));
            part.store(isa, &mut x[at..], v);
        }
    }
}

/// What happens to each head of a row of queries or keys, in place: an optional norm, an optional rotation.
pub(crate) struct Heads<'a> {
    pub(crate) x: &'a mut [f32],
    pub(crate) head_dim: usize,
    /// Weight and epsilon.
    pub(crate) norm: Option<(&'a [f32], f32)>,
    /// The table, the position, and whether the rows are queries.
    pub(crate) rope: Option<(&'a RopeTable, usize, bool)>,
    /// What is left is rounded so.
    pub(crate) rounding: Rounding,
}

impl Kernel for Heads<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Heads {
            x,
            head_dim,
            norm,
            rope,
            rounding,
        } = self;
        for head in x.chunks_exact_mut(head_dim) {
            if let Some((weight, eps)) = norm {
                let scale = norm_scale(isa, head, eps);
                for (at, part) in parts(isa, head_dim) {
                    let y = isa.mul(
                        isa.mul(part.load(isa, &head[at..]), scale),
                        part.load(isa, &weight[at..]),
                    );
                    part.store(isa, &mut head[at..], y);
                }
            }
            if let Some((table, position, queries)) = rope {
                rotate(isa, head, table, position, queries);
            }
        }
        Round(x, rounding).run(isa);
    }
}

#[inline(always)]
fn rotate<I: Isa>(isa: I, head: &mut [f32], table: &RopeTable, position: usize, queries: bool) {
    let pairs = table.pairs;
    let (cos, sin) = (
        &table.cos[position * pairs..][..pairs],
        &table.sin[position * pairs..][..pairs],
    );
    let scale = table
        .query_scale
        .as_ref()
        .filter(|_| queries)
        .map(|scale| isa.splat(scale[position]));
    let (first, second) = head.split_at_mut(pairs);
    for (at, part) in parts(isa, pairs) {
        let (a, b) = (part.load(isa, &first[at..]), part.load(isa, &second[at..]));
        let (cos, sin) = (part.load(isa, &cos[at..]), part.load(isa, &sin[at..]));
        let mut x = isa.sub(isa.mul(a, cos), isa.mul(b, sin));
        let mut y = isa.mul_add(b, cos, isa.mul(a, sin));
        if let Some(scale) = scale {
            x = isa.mul(x, scale);
            y = isa.mul(y, scale);
        }
        part.store(isa, &mut first[at..], x);
        part.store(isa, &mut second[at..], y);
    }
}

/// `out = round(activation(x))` of one row, or of a piece of it where gate and up are given apart.
pub(crate) struct Activate<'a> {
    pub(crate) out: &'a mut [f32],
    /// The row, or its gate values.
    pub(crate) x: &'a [f32],
    /// The up values, of a gated activation.
    pub(crate) up: &'a [f32],
    pub(crate) activation: &'a Activation,
    pub(crate) rounding: Rounding,
}

impl Kernel for Activate<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Activate {
            out,
            x,
            up,
            activation,
            rounding,
        } = self;
        match activation {
            Activation::SiluGated => {
                for (at, part) in parts(isa, out.len()) {
                    let y = isa.mul(
                        silu(isa, part.load(isa, &x[at..])),
                        part.load(isa, &up[at..]),
                    );
                    part.store(isa, &mut out[at..], rounding.apply(isa, y));
                }
            }
            Activation::Xielu(xielu) => {
                for (at, part) in parts(isa, out.len()) {
                    let x = part.load(isa, &x[at..]);
                    let linear = isa.mul(isa.splat(xielu.beta), x);
                    let positive = isa.mul_add(isa.mul(isa.splat(xielu.alpha_p), x), x, linear);
                    let curve = isa.sub(exp_m1(isa, isa.min(isa.splat(xielu.eps), x)), x);
                    let negative = isa.mul_add(curve, isa.splat(xielu.alpha_n), linear);
                    let y = isa.select_positive(x, positive, negative);
                    part.store(isa, &mut out[at..], rounding.apply(isa, y));
                }
            }
        }
    }
}
