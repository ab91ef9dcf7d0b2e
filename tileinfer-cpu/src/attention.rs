//! Grouped-query attention over paged keys and values.
//!
//! Keys are folded in blocks of 256 by absolute position. Of each block and query three things are computed,
//! by the block alone: the maximum `m` of its scores, the sum `l` of `exp(score - m)`, and the sum `o` of
//! `exp(score - m) value`; blocks are then merged from left to right (online softmax, arXiv:1805.02867).
//! Who computes the block, in what company, and where the partial results wait in between changes no bit:
//! - a score sums over the dimensions in order, its lane alone;
//! - `l` takes the block's keys lane by lane from the block's start on, hidden ones as zeros, and folds once;
//! - `o` sums over the keys in order, its lane alone.
//!
//! A tile is a few rows of one span: their queries of all heads of a group share what is read of a kv head.
//! Few tiles and many blocks (decode) are dealt out block by block, many tiles (prefill) tile by tile.
//! What this module decided not to know: how keys got into the pages.

use std::cell::RefCell;
use std::ops::Range;

use tileinfer::backend::{AttentionShape, KEY_BLOCK, Mask, StepLayout};

use crate::cache::{Geometry, Kept, PART, Pages, UNIT};
use crate::math::exp;
use crate::pool::Pool;
use crate::simd::{Isa, Kernel, Level};
use crate::vector::parts;
use crate::{Rounding, SharedMut};

/// Queries that a tile should have: enough to use what is read of a block many times, few enough that their
/// scores stay in the L1 cache.
const TILE: usize = 24;
/// The most floats that partial results of blocks may take; above it, tiles are not split.
const MOST_PARTIAL: usize = 16 << 20;

/// `out[r] = Σ softmax(scale q[r]·k) v` for every row and head of the step, `[rows, heads * head_dim]`.
///
/// # Panics
/// If the sizes do not fit each other, or a block table lacks a page that a row sees.
pub(crate) fn attention(
    level: Level,
    pool: &Pool,
    out: &mut [f32],
    queries: &[f32],
    pages: &Pages,
    step: &StepLayout,
    shape: &AttentionShape,
    rounding: Rounding,
) {
    let geometry = pages.geometry;
    let (rows, width) = (step.rows(), shape.heads * shape.head_dim);
    assert_eq!(
        (shape.kv_heads, shape.head_dim),
        (geometry.kv_heads, geometry.head_dim),
        "shape of the cache"
    );
    assert_eq!(
        (queries.len(), out.len()),
        (rows * width, rows * width),
        "queries and output"
    );
    if out.is_empty() {
        return;
    }
    let group = shape.heads / shape.kv_heads;
    assert_eq!(
        shape.heads,
        group * shape.kv_heads,
        "heads divide into groups"
    );
    let tiles = tiles(step, shape.mask, (TILE / group).max(1), group);
    let call = Call {
        out: SharedMut::new(out),
        queries,
        pages,
        step,
        shape,
        group,
        rounding,
    };

    let items = tiles.len() * shape.kv_heads;
    let blocks: usize = tiles.iter().map(|tile| tile.blocks.len()).sum();
    let partial: usize = tiles
        .iter()
        .map(|tile| tile.blocks.len() * call.partial_len(tile))
        .sum();
    if items >= 4 * pool.threads()
        || blocks == tiles.len()
        || partial * shape.kv_heads > MOST_PARTIAL
    {
        pool.run(items, |item| {
            let (call, tile, head) = (&call, &tiles[item / shape.kv_heads], item % shape.kv_heads);
            with_scratch(
                call,
                tile,
                2 * call.partial_len(tile),
                |scratch, partials| {
                    level.dispatch(WholeTile {
                        call,
                        tile,
                        head,
                        scratch,
                        partials,
                    });
                },
            );
        });
        return;
    }

    // (tile, head, block) of each item, and where its partial result begins.
    let mut parts = Vec::with_capacity(blocks * shape.kv_heads);
    let mut len = 0;
    for (t, tile) in tiles.iter().enumerate() {
        for head in 0..shape.kv_heads {
            for block in tile.blocks.clone() {
                parts.push((t, head, block, len));
                len += call.partial_len(tile);
            }
        }
    }
    PARTIAL.with_borrow_mut(|partial| {
        if partial.len() < len {
            partial.resize(len, 0.0);
        }
        let shared = SharedMut::new(&mut partial[..]);
        pool.run(parts.len(), |item| {
            let (tile, head, block, at) = parts[item];
            let tile = &tiles[tile];
            // SAFETY: each item has its own partial result.
            let partial = unsafe { shared.range(at, call.partial_len(tile)) };
            with_scratch(&call, tile, 0, |scratch, _| {
                level.dispatch(OneBlock {
                    call: &call,
                    tile,
                    head,
                    block,
                    scratch,
                    partial,
                });
            });
        });
        // Where the partial results of each (tile, head) begin.
        let mut merges = Vec::with_capacity(items);
        let mut at = 0;
        for tile in &tiles {
            let len = tile.blocks.len() * call.partial_len(tile);
            for head in 0..shape.kv_heads {
                merges.push((tile, head, at..at + len));
                at += len;
            }
        }
        let partial = &partial[..];
        pool.run(merges.len(), |item| {
            let (tile, head, ref place) = merges[item];
            let partials = &partial[place.clone()];
            with_scratch(&call, tile, call.partial_len(tile), |_, state| {
                level.dispatch(Merge {
                    call: &call,
                    tile,
                    head,
                    partials,
                    state,
                });
            });
        });
    });
}

thread_local! {
    // Buffers only: what they hold before a call is never read.
    static SCRATCH: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
    static PARTIAL: RefCell<Vec<f32>> = const { RefCell::new(Vec::new()) };
}

/// Some rows of one span.
struct Tile {
    span: usize,
    rows: Range<usize>,
    /// The positions each row sees.
    visible: Vec<Range<usize>>,
    /// The positions any row sees.
    keys: Range<usize>,
    /// The blocks they are in.
    blocks: Range<usize>,
    /// Queries of a group: rows times heads a group.
    queries: usize,
}

fn tiles(step: &StepLayout, mask: Mask, rows: usize, group: usize) -> Vec<Tile> {
    let mut tiles = Vec::new();
    for span in 0..step.spans() {
        let all = step.span(span);
        let end = all
            .clone()
            .last()
            .map_or(0, |row| step.positions[row] as usize + 1);
        for first in all.clone().step_by(rows) {
            let rows = first..all.end.min(first + rows);
            let visible: Vec<_> = rows
                .clone()
                .map(|row| mask.visible(step.positions[row] as usize, end))
                .collect();
            let start = visible.iter().map(|keys| keys.start).min().unwrap_or(0);
            let end = visible.iter().map(|keys| keys.end).max().unwrap_or(0);
            let blocks = start / KEY_BLOCK..end.div_ceil(KEY_BLOCK);
            let queries = rows.len() * group;
            tiles.push(Tile {
                span,
                rows,
                visible,
                keys: start..end,
                blocks,
                queries,
            });
        }
    }
    tiles
}

/// What all items of a call share.
struct Call<'a> {
    out: SharedMut<'a, f32>,
    queries: &'a [f32],
    pages: &'a Pages,
    step: &'a StepLayout,
    shape: &'a AttentionShape,
    /// Query heads a kv head.
    group: usize,
    rounding: Rounding,
}

impl Call<'_> {
    /// Floats of the dimensions of a head, filled up to whole parts.
    fn padded_dim(&self) -> usize {
        self.shape.head_dim.next_multiple_of(PART)
    }

    /// Floats of a partial result: `m` and `l` of every query, then `o`.
    fn partial_len(&self, tile: &Tile) -> usize {
        tile.queries * (2 + self.padded_dim())
    }
}

/// A tile and a kv head, all blocks.
struct WholeTile<'a, 'b> {
    call: &'a Call<'a>,
    tile: &'a Tile,
    head: usize,
    scratch: &'a mut Scratch<'b>,
    /// Room for two partial results.
    partials: &'a mut [f32],
}

impl Kernel for WholeTile<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let WholeTile {
            call,
            tile,
            head,
            scratch,
            partials,
        } = self;
        let (state, partial) = partials.split_at_mut(call.partial_len(tile));
        state.fill(0.0);
        scratch.pack_queries::<I>(call, tile, head);
        for block in tile.blocks.clone() {
            fold_block(isa, call, tile, head, block, scratch, partial);
            merge(isa, tile.queries, state, partial);
        }
        finish(isa, call, tile, head, state);
    }
}

/// A tile, a kv head and a block.
struct OneBlock<'a, 'b> {
    call: &'a Call<'a>,
    tile: &'a Tile,
    head: usize,
    block: usize,
    scratch: &'a mut Scratch<'b>,
    partial: &'a mut [f32],
}

impl Kernel for OneBlock<'_, '_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let OneBlock {
            call,
            tile,
            head,
            block,
            scratch,
            partial,
        } = self;
        scratch.pack_queries::<I>(call, tile, head);
        fold_block(isa, call, tile, head, block, scratch, partial);
    }
}

/// The partial results of a tile and kv head, block after block, to the output.
struct Merge<'a> {
    call: &'a Call<'a>,
    tile: &'a Tile,
    head: usize,
    partials: &'a [f32],
    /// Room for one partial result.
    state: &'a mut [f32],
}

impl Kernel for Merge<'_> {
    type Output = ();
    #[inline(always)]
    fn run<I: Isa>(self, isa: I) {
        let Merge {
            call,
            tile,
            head,
            partials,
            state,
        } = self;
        state.fill(0.0);
        for partial in partials.chunks_exact(call.partial_len(tile)) {
            merge(isa, tile.queries, state, partial);
        }
        finish(isa, call, tile, head, state);
    }
}

/// Buffers of a thread.
struct Scratch<'a> {
    /// Queries as [`subtiles`] takes them: `[head_dim][queries of the subtile]`, one subtile after another.
    queries: &'a mut [f32],
    /// Scores, then weights, `[queries][256]`.
    scores: &'a mut [f32],
    /// Room for the keys and the values of a unit, where pages are too small to be read in place.
    units: &'a mut [f32],
}

/// Calls `f` with this thread's buffers and `more` floats besides.
fn with_scratch(
    call: &Call<'_>,
    tile: &Tile,
    more: usize,
    f: impl FnOnce(&mut Scratch<'_>, &mut [f32]),
) {
    let head_dim = call.shape.head_dim;
    let (queries, scores) = (tile.queries * head_dim, tile.queries * KEY_BLOCK);
    // The keys and the values of a whole block, in the widest type.
    let units = if call.pages.geometry.unit == UNIT {
        0
    } else {
        2 * KEY_BLOCK * head_dim
    };
    SCRATCH.with_borrow_mut(|buffer| {
        let len = queries + scores + units + more;
        if buffer.len() < len {
            buffer.resize(len, 0.0);
        }
        let (scores, rest) = buffer[..len].split_at_mut(scores);
        let (queries, rest) = rest.split_at_mut(queries);
        let (units, more) = rest.split_at_mut(units);
        f(
            &mut Scratch {
                queries,
                scores,
                units,
            },
            more,
        );
    });
}

impl Scratch<'_> {
    #[inline(always)]
    fn pack_queries<I: Isa>(&mut self, call: &Call<'_>, tile: &Tile, head: usize) {
        let head_dim = call.shape.head_dim;
        let width = call.shape.heads * head_dim;
        let mut first = 0;
        while first < tile.queries {
            let n = subtile::<I>(tile.queries - first);
            let to = &mut self.queries[first * head_dim..(first + n) * head_dim];
            for i in 0..n {
                let (row, member) = ((first + i) / call.group, (first + i) % call.group);
                let at = (tile.rows.start + row) * width + (head * call.group + member) * head_dim;
                let query = &call.queries[at..at + head_dim];
                match call.pages.factors(head) {
                    None => {
                        for (d, &q) in query.iter().enumerate() {
                            to[d * n + i] = q;
                        }
                    }
                    Some(factors) => {
                        for (d, (q, factor)) in query.iter().zip(factors).enumerate() {
                            to[d * n + i] = q * factor;
                        }
                    }
                }
            }
            first += n;
        }
    }
}

/// Queries of the next register tile when `left` are left.
#[inline(always)]
fn subtile<I: Isa>(left: usize) -> usize {
    if left >= 8 && I::TILE_QUERIES >= 8 {
        8
    } else if left >= 4 && I::TILE_QUERIES >= 4 {
        4
    } else if left == 3 && I::TILE_QUERIES >= 4 {
        3
    } else {
        left.min(2)
    }
}

/// `m`, `l` and `o` of every query of the tile over one block.
#[inline(always)]
fn fold_block<I: Isa>(
    isa: I,
    call: &Call<'_>,
    tile: &Tile,
    head: usize,
    block: usize,
    scratch: &mut Scratch<'_>,
    partial: &mut [f32],
) {
    match call.pages.geometry.kind {
        Kept::Bf16 => fold_block_of::<I, Bf16>(isa, call, tile, head, block, scratch, partial),
        Kept::F32 => fold_block_of::<I, F32>(isa, call, tile, head, block, scratch, partial),
        Kept::Int8 => fold_block_of::<I, Int8>(isa, call, tile, head, block, scratch, partial),
    }
}

#[inline(always)]
fn fold_block_of<I: Isa, C: Cached>(
    isa: I,
    call: &Call<'_>,
    tile: &Tile,
    head: usize,
    block: usize,
    scratch: &mut Scratch<'_>,
    partial: &mut [f32],
) {
    let head_dim = call.shape.head_dim;
    let first_key = block * KEY_BLOCK;
    // Positions from here on are counted from the block's start.
    let keys = tile.keys.start.max(first_key) - first_key
        ..tile.keys.end.min(first_key + KEY_BLOCK) - first_key;
    let units = keys.start / UNIT..keys.end.div_ceil(UNIT);
    let touched = units.start * UNIT..units.end * UNIT;
    let mut places = [(std::ptr::null(), std::ptr::null()); KEY_BLOCK / UNIT];
    for u in units.clone() {
        places[u] = unit_place(call, tile, head, first_key, u, &keys, scratch);
    }
    let next_keys = next_keys(call, tile, head, block, &places);
    let scales = C::SCALED.then(|| Scales::of(call, tile, head, first_key, &keys));

    let mut first = 0;
    while first < tile.queries {
        let n = subtile::<I>(tile.queries - first);
        let q = &scratch.queries[first * head_dim..(first + n) * head_dim];
        let scores = &mut scratch.scores[first * KEY_BLOCK..(first + n) * KEY_BLOCK];
        for u in units.clone() {
            // While keys are read their values are asked for, and the next block's keys while values are read.
            let (keys, scores) = (places[u], &mut scores[u * UNIT..]);
            let scale = call.shape.scale;
            match n {
                1 => scores_of::<I, C, 1>(isa, keys, q, head_dim, scale, scores),
                2 => scores_of::<I, C, 2>(isa, keys, q, head_dim, scale, scores),
                3 => scores_of::<I, C, 3>(isa, keys, q, head_dim, scale, scores),
                4 => scores_of::<I, C, 4>(isa, keys, q, head_dim, scale, scores),
                _ => scores_of::<I, C, 8>(isa, keys, q, head_dim, scale, scores),
            }
            if let Some(scales) = &scales {
                let scales = &scales.keys[u * UNIT..(u + 1) * UNIT];
                for scores in scores.chunks_mut(KEY_BLOCK) {
                    times(isa, &mut scores[..UNIT], scales);
                }
            }
        }
        first += n;
    }

    let (max_sum, outputs) = partial.split_at_mut(2 * tile.queries);
    for (q, max_sum) in max_sum.chunks_exact_mut(2).enumerate() {
        let visible = &tile.visible[q / call.group];
        let from = visible.start.clamp(first_key, first_key + KEY_BLOCK) - first_key;
        let to = visible.end.clamp(first_key, first_key + KEY_BLOCK) - first_key;
        let scores = &mut scratch.scores[q * KEY_BLOCK..(q + 1) * KEY_BLOCK];
        let (max, sum) = weights_of(isa, scores, &touched, from..to.max(from));
        if let Some(scales) = &scales {
            // From here on what a weight multiplies are integers.
            times(isa, &mut scores[keys.clone()], &scales.values[keys.clone()]);
        }
        max_sum.copy_from_slice(&[max, sum]);
    }

    let padded = call.padded_dim();
    let mut first = 0;
    while first < tile.queries {
        let n = subtile::<I>(tile.queries - first);
        let weights = &scratch.scores[first * KEY_BLOCK..(first + n) * KEY_BLOCK];
        let out = &mut outputs[first * padded..(first + n) * padded];
        match n {
            1 => values_of::<I, C, 1>(isa, &places, &next_keys, &keys, head_dim, weights, out),
            2 => values_of::<I, C, 2>(isa, &places, &next_keys, &keys, head_dim, weights, out),
            3 => values_of::<I, C, 3>(isa, &places, &next_keys, &keys, head_dim, weights, out),
            4 => values_of::<I, C, 4>(isa, &places, &next_keys, &keys, head_dim, weights, out),
            _ => values_of::<I, C, 8>(isa, &places, &next_keys, &keys, head_dim, weights, out),
        }
        first += n;
    }
}

/// The scales of an int8 block's keys and values; 0 where no query of the tile sees them.
struct Scales {
    keys: [f32; KEY_BLOCK],
    values: [f32; KEY_BLOCK],
}

impl Scales {
    /// Of the positions `keys` of the block that begins at `first_key`.
    fn of(
        call: &Call<'_>,
        tile: &Tile,
        head: usize,
        first_key: usize,
        keys: &Range<usize>,
    ) -> Self {
        let geometry = call.pages.geometry;
        let mut scales = Scales {
            keys: [0.0; KEY_BLOCK],
            values: [0.0; KEY_BLOCK],
        };
        let mut key = keys.start;
        while key < keys.end {
            let position = first_key + key;
            let (page, offset) = call.step.place(tile.span, position, geometry.page_size);
            let n = (geometry.page_size - offset).min(keys.end - key);
            let at = geometry.scale(page, head, offset);
            scales.keys[key..key + n].copy_from_slice(&call.pages.key_scales[at..at + n]);
            scales.values[key..key + n].copy_from_slice(&call.pages.value_scales[at..at + n]);
            key += n;
        }
        scales
    }
}

/// `x[i] *= scales[i]`.
#[inline(always)]
fn times<I: Isa>(isa: I, x: &mut [f32], scales: &[f32]) {
    for (at, part) in parts(isa, x.len()) {
        let product = isa.mul(part.load(isa, &x[at..]), part.load(isa, &scales[at..]));
        part.store(isa, &mut x[at..], product);
    }
}

/// Where the keys of the next block begin, unit by unit, for prefetching; where there are none, the block's own.
fn next_keys(
    call: &Call<'_>,
    tile: &Tile,
    head: usize,
    block: usize,
    places: &[(*const u8, *const u8); KEY_BLOCK / UNIT],
) -> [*const u8; KEY_BLOCK / UNIT] {
    let geometry = call.pages.geometry;
    let mut next = places.map(|(keys, _)| keys);
    for (u, next) in next.iter_mut().enumerate() {
        let position = (block + 1) * KEY_BLOCK + u * UNIT;
        if position < tile.keys.end && geometry.unit == UNIT {
            let (page, offset) = call.step.place(tile.span, position, geometry.page_size);
            let start = geometry.unit_start(page, head, offset);
            *next = call.pages.keys[start..].as_ptr();
        }
    }
    next
}

/// Where the keys and the values of unit `u` of a block begin, each laid out as a unit of 64 slots.
fn unit_place(
    call: &Call<'_>,
    tile: &Tile,
    head: usize,
    first_key: usize,
    u: usize,
    keys: &Range<usize>,
    scratch: &mut Scratch<'_>,
) -> (*const u8, *const u8) {
    let pages = call.pages;
    let geometry = pages.geometry;
    let place = |position| call.step.place(tile.span, position, geometry.page_size);
    if geometry.unit == UNIT {
        let (page, offset) = place(first_key + u * UNIT);
        let start = geometry.unit_start(page, head, offset);
        let bytes = start..start + geometry.unit_bytes();
        return (
            pages.keys[bytes.clone()].as_ptr(),
            pages.values[bytes].as_ptr(),
        );
    }
    // Small pages, which only tests have: copy what is seen, one position after another.
    let large = Geometry {
        page_size: UNIT,
        kv_heads: 1,
        unit: UNIT,
        ..geometry
    };
    let len = UNIT * geometry.head_dim;
    let room = &mut scratch.units[2 * u * len..2 * (u + 1) * len];
    room.fill(0.0);
    let (key_room, value_room) = room.split_at_mut(len);
    let (key_room, value_room) = (bytes_of(key_room), bytes_of(value_room));
    let size = geometry.kind.size();
    for key in keys.start.max(u * UNIT)..keys.end.min((u + 1) * UNIT) {
        let (page, offset) = place(first_key + key);
        let (from, to) = (
            geometry.slot(page, head, offset),
            large.slot(0, 0, key % UNIT),
        );
        for d in 0..geometry.head_dim {
            let (from_key, from_value) = (from.key(geometry, d), from.value(geometry, d));
            let (to_key, to_value) = (to.key(large, d), to.value(large, d));
            key_room[to_key..to_key + size].copy_from_slice(&pages.keys[from_key..from_key + size]);
            value_room[to_value..to_value + size]
                .copy_from_slice(&pages.values[from_value..from_value + size]);
        }
    }
    (key_room.as_ptr(), value_room.as_ptr())
}

fn bytes_of(floats: &mut [f32]) -> &mut [u8] {
    // SAFETY: the same memory; bytes have no alignment and any bits are floats.
    unsafe { std::slice::from_raw_parts_mut(floats.as_mut_ptr().cast(), size_of_val(floats)) }
}

/// Scores of `Q` queries with the 64 keys of a unit (`keys.0`; `keys.1` is prefetched); `q` is `[head_dim][Q]`,
/// rows of `scores` are 256 apart.
#[inline(always)]
fn scores_of<I: Isa, C: Cached, const Q: usize>(
    isa: I,
    keys: (*const u8, *const u8),
    q: &[f32],
    head_dim: usize,
    scale: f32,
    scores: &mut [f32],
) {
    // Few queries: more keys at a time, so that there is always enough to do while sums wait for each other.
    if Q * 2 <= I::TILE_QUERIES && 4 * I::LANES <= UNIT {
        scores_tile::<I, C, Q, 4>(isa, keys, q, head_dim, scale, scores);
    } else {
        scores_tile::<I, C, Q, 2>(isa, keys, q, head_dim, scale, scores);
    }
}

#[inline(always)]
fn scores_tile<I: Isa, C: Cached, const Q: usize, const N: usize>(
    isa: I,
    keys: (*const u8, *const u8),
    q: &[f32],
    head_dim: usize,
    scale: f32,
    scores: &mut [f32],
) {
    if Q > I::TILE_QUERIES {
        return;
    }
    assert!(q.len() == head_dim * Q && scores.len() >= (Q - 1) * KEY_BLOCK + UNIT);
    let scale = isa.splat(scale);
    for first in (0..UNIT).step_by(N * I::LANES) {
        let mut sums = [[isa.splat(0.0); N]; Q];
        let mut q = q.as_ptr();
        for pair in 0..head_dim / 2 {
            let mut even = [isa.splat(0.0); N];
            let mut odd = even;
            for i in 0..N {
                isa.prefetch(
                    keys.1
                        .wrapping_add((pair * UNIT + first + i * I::LANES) * 2 * C::BYTES),
                );
                // SAFETY: `keys.0` begins a unit of 64 slots; `first + N * LANES` is at most 64.
                (even[i], odd[i]) = unsafe { C::keys(isa, keys.0, pair, first + i * I::LANES) };
            }
            for j in 0..Q {
                // SAFETY: `q` holds `Q` values for each dimension (asserted).
                let x = isa.splat(unsafe { *q.add(j) });
                for i in 0..N {
                    sums[j][i] = isa.mul_add(even[i], x, sums[j][i]);
                }
            }
            for j in 0..Q {
                // SAFETY: as above, the next dimension.
                let x = isa.splat(unsafe { *q.add(Q + j) });
                for i in 0..N {
                    sums[j][i] = isa.mul_add(odd[i], x, sums[j][i]);
                }
            }
            q = q.wrapping_add(2 * Q);
        }
        for j in 0..Q {
            for i in 0..N {
                // SAFETY: within row `j` of the scores (asserted).
                unsafe {
                    let to = scores
                        .as_mut_ptr()
                        .add(j * KEY_BLOCK + first + i * I::LANES);
                    isa.store(to, isa.mul(sums[j][i], scale));
                }
            }
        }
    }
}

/// Turns the scores of a block into weights `exp(score - max)`, 0 outside of `seen`; the maximum and the sum.
/// Of the 256 only `touched` are defined, and left so. Nothing seen: all weights and the sum are 0.
#[inline(always)]
fn weights_of<I: Isa>(
    isa: I,
    scores: &mut [f32],
    touched: &Range<usize>,
    seen: Range<usize>,
) -> (f32, f32) {
    let scores = &mut scores[touched.clone()];
    if seen.is_empty() {
        scores.fill(0.0);
        return (f32::NEG_INFINITY, 0.0);
    }
    scores[..seen.start - touched.start].fill(f32::NEG_INFINITY);
    scores[seen.end - touched.start..].fill(f32::NEG_INFINITY);
    // Units are 64 keys: whole vectors on every level.
    let mut max = isa.splat(f32::NEG_INFINITY);
    for (at, part) in parts(isa, scores.len()) {
        max = isa.max(max, part.load(isa, &scores[at..]));
    }
    let max = isa.reduce_max(max);
    let mut sum = isa.splat(0.0);
    for (at, part) in parts(isa, scores.len()) {
        let weight = exp(isa, isa.sub(part.load(isa, &scores[at..]), isa.splat(max)));
        sum = isa.add(sum, weight);
        part.store(isa, &mut scores[at..], weight);
    }
    (max, isa.reduce_add(sum))
}

/// `out[q] = Σ weights[q][key] value[key]` over `keys`, in the order in which [`Cached::values`] reads.
#[inline(always)]
fn values_of<I: Isa, C: Cached, const Q: usize>(
    isa: I,
    places: &[(*const u8, *const u8); KEY_BLOCK / UNIT],
    next_keys: &[*const u8; KEY_BLOCK / UNIT],
    keys: &Range<usize>,
    head_dim: usize,
    weights: &[f32],
    out: &mut [f32],
) {
    if Q > I::TILE_QUERIES {
        return;
    }
    let padded = head_dim.next_multiple_of(PART);
    assert!(weights.len() == Q * KEY_BLOCK && out.len() == Q * padded && keys.end <= KEY_BLOCK);
    for first in (0..padded).step_by(2 * I::LANES) {
        let part = first / PART * PART;
        // Dimensions of this part, and how many of them two vectors take.
        let width = PART.min(head_dim - part);
        let take = (2 * I::LANES).min((head_dim - part).saturating_sub(first - part));
        let mut sums = [[isa.splat(0.0); 2]; Q];
        if take > 0 {
            let mut key = keys.start;
            while key < keys.end {
                let end = keys.end.min((key / UNIT + 1) * UNIT);
                let values = places[key / UNIT].1;
                let next = next_keys[key / UNIT];
                for key in key..end {
                    let at = part * UNIT + key % UNIT * width + first - part;
                    isa.prefetch(next.wrapping_add(at * C::BYTES));
                    // SAFETY: `places` has a whole unit for every key of `keys`; `take` dimensions are left
                    // in this slot of this part.
                    let (a, b) = unsafe {
                        if take == 2 * I::LANES {
                            C::values(isa, values.add(at * C::BYTES))
                        } else {
                            let mut buffer = [0_u8; 128];
                            std::ptr::copy_nonoverlapping(
                                values.add(at * C::BYTES),
                                buffer.as_mut_ptr(),
                                take * C::BYTES,
                            );
                            C::values(isa, buffer.as_ptr())
                        }
                    };
                    for j in 0..Q {
                        // SAFETY: within row `j` of the weights (asserted).
                        let w = isa.splat(unsafe { *weights.as_ptr().add(j * KEY_BLOCK + key) });
                        sums[j][0] = isa.mul_add(a, w, sums[j][0]);
                        sums[j][1] = isa.mul_add(b, w, sums[j][1]);
                    }
                }
                key = end;
            }
        }
        for j in 0..Q {
            // SAFETY: row `j` of the output has `padded` floats, a multiple of two vectors (asserted).
            unsafe {
                let to = out.as_mut_ptr().add(j * padded + first);
                isa.store(to, sums[j][0]);
                isa.store(to.add(I::LANES), sums[j][1]);
            }
        }
    }
}

/// Adds the next block to a state of the same form.
#[inline(always)]
fn merge<I: Isa>(isa: I, queries: usize, state: &mut [f32], block: &[f32]) {
    let (max_sum, outputs) = state.split_at_mut(2 * queries);
    let (block_max_sum, block_outputs) = block.split_at(2 * queries);
    let padded = outputs.len() / queries;
    for q in 0..queries {
        let (max, sum) = (block_max_sum[2 * q], block_max_sum[2 * q + 1]);
        let output = &mut outputs[q * padded..(q + 1) * padded];
        let block_output = &block_outputs[q * padded..(q + 1) * padded];
        // A block that is seen has a sum of at least 1.
        if sum == 0.0 {
            continue;
        }
        let state = &mut max_sum[2 * q..2 * q + 2];
        if state[1] == 0.0 {
            state.copy_from_slice(&[max, sum]);
            output.copy_from_slice(block_output);
            continue;
        }
        let both = if max > state[0] { max } else { state[0] };
        let old = exp(isa, isa.splat(state[0] - both));
        let new = exp(isa, isa.splat(max - both));
        for (at, part) in parts(isa, padded) {
            let scaled = isa.mul(part.load(isa, &output[at..]), old);
            let sum = isa.mul_add(part.load(isa, &block_output[at..]), new, scaled);
            part.store(isa, &mut output[at..], sum);
        }
        let total = isa.mul_add(isa.splat(sum), new, isa.mul(isa.splat(state[1]), old));
        state.copy_from_slice(&[both, isa.reduce_max(total)]);
    }
}

/// Divides by the sums of weights and writes the rows of the output.
#[inline(always)]
fn finish<I: Isa>(isa: I, call: &Call<'_>, tile: &Tile, head: usize, state: &[f32]) {
    let (head_dim, padded) = (call.shape.head_dim, call.padded_dim());
    let width = call.shape.heads * head_dim;
    let (max_sum, outputs) = state.split_at(2 * tile.queries);
    let mut natural = [0.0; 2 * 16];
    for q in 0..tile.queries {
        let (row, member) = (q / call.group, q % call.group);
        let at = (tile.rows.start + row) * width + (head * call.group + member) * head_dim;
        // SAFETY: every query of every tile and head has its own place in the output.
        let out = unsafe { call.out.range(at, head_dim) };
        let sum = isa.splat(max_sum[2 * q + 1]);
        let output = &outputs[q * padded..(q + 1) * padded];
        for (out, output) in out
            .chunks_mut(2 * I::LANES)
            .zip(output.chunks_exact(2 * I::LANES))
        {
            // SAFETY: `output` holds two vectors, and so does `natural`.
            unsafe {
                let [a, b] = [0, I::LANES].map(|i| output.as_ptr().add(i));
                let a = call.rounding.apply(isa, isa.div(isa.load(a), sum));
                let b = call.rounding.apply(isa, isa.div(isa.load(b), sum));
                match call.pages.geometry.kind {
                    Kept::Bf16 => isa.store_interleaved(natural.as_mut_ptr(), a, b),
                    Kept::F32 | Kept::Int8 => {
                        isa.store(natural.as_mut_ptr(), a);
                        isa.store(natural.as_mut_ptr().add(I::LANES), b);
                    }
                }
            }
            out.copy_from_slice(&natural[..out.len()]);
        }
    }
}

/// How keys and values of a unit of 64 slots are read.
trait Cached {
    const BYTES: usize;
    /// Whether every key and every value has a scale besides.
    const SCALED: bool = false;
    /// Dimensions `2 * pair` and `2 * pair + 1` of the keys from `slot` on.
    ///
    /// # Safety
    /// `unit` must begin a unit of 64 slots with more than `2 * pair + 1` dimensions; `slot + LANES <= 64`.
    unsafe fn keys<I: Isa>(isa: I, unit: *const u8, pair: usize, slot: usize) -> (I::V, I::V);
    /// `2 * LANES` dimensions of a value: of even and of odd index in bf16, first and second half in f32.
    ///
    /// # Safety
    /// As many elements must be readable at `p`.
    unsafe fn values<I: Isa>(isa: I, p: *const u8) -> (I::V, I::V);
}

struct Bf16;
impl Cached for Bf16 {
    const BYTES: usize = 2;
    #[inline(always)]
    unsafe fn keys<I: Isa>(isa: I, unit: *const u8, pair: usize, slot: usize) -> (I::V, I::V) {
        // SAFETY: the caller's promise.
        unsafe { isa.load_bf16_pair(unit.add((pair * UNIT + slot) * 4)) }
    }
    #[inline(always)]
    unsafe fn values<I: Isa>(isa: I, p: *const u8) -> (I::V, I::V) {
        // SAFETY: the caller's promise.
        unsafe { isa.load_bf16_pair(p) }
    }
}

struct F32;
impl Cached for F32 {
    const BYTES: usize = 4;
    #[inline(always)]
    unsafe fn keys<I: Isa>(isa: I, unit: *const u8, pair: usize, slot: usize) -> (I::V, I::V) {
        // SAFETY: the caller's promise.
        unsafe {
            let p = unit.cast::<f32>().add(2 * pair * UNIT + slot);
            (isa.load(p), isa.load(p.add(UNIT)))
        }
    }
    #[inline(always)]
    unsafe fn values<I: Isa>(isa: I, p: *const u8) -> (I::V, I::V) {
        let p = p.cast::<f32>();
        // SAFETY: the caller's promise.
        unsafe { (isa.load(p), isa.load(p.add(I::LANES))) }
    }
}

struct Int8;
impl Cached for Int8 {
    const BYTES: usize = 1;
    const SCALED: bool = true;
    #[inline(always)]
    unsafe fn keys<I: Isa>(isa: I, unit: *const u8, pair: usize, slot: usize) -> (I::V, I::V) {
        // SAFETY: the caller's promise.
        unsafe {
            let p = unit.add(2 * pair * UNIT + slot);
            (isa.load_i8(p), isa.load_i8(p.add(UNIT)))
        }
    }
    #[inline(always)]
    unsafe fn values<I: Isa>(isa: I, p: *const u8) -> (I::V, I::V) {
        // SAFETY: the caller's promise.
        unsafe { (isa.load_i8(p), isa.load_i8(p.add(I::LANES))) }
    }
}
