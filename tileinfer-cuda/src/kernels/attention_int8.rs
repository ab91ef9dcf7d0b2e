//! Attention over an int8 cache with activations in bfloat16: both products are of bytes, exact in i32, so that no
//! byte is ever widened. A query times the smoothing factors is a row of 16-bit integers in two bytes, and so are
//! the weights of a page's values, scales included (`tileinfer::weights::int8`); everything else is f32, value by
//! value. So a query's result depends on nothing beside it, whatever the tile.
//!
//! Of a page of 64 keys: `s = (254 H + L) t_q k_scale scale`, `e = exp2(s - page's largest s)`,
//! `l = sum of round(32258 e) / 32258` (a sum of integers), `w = e v_scale` rounded like activations,
//! `o = (254 H + L) t_w`; pages are folded into blocks of 256 keys, and blocks as in `attention`.

#[cutile::module]
#[allow(missing_docs)]
pub mod attention_int8 {
    use super::super::attention::attention::*;
    use super::super::bytes::bytes::*;
    use super::super::views::views::*;
    use cutile::core::*;

    /// The products of two-byte rows with rows of bytes, as numbers: of `hi` and `lo` rows one below the other.
    fn joined_rows<const R: i32, const R2: i32, const C: i32>(
        sums: Tile<i32, { [R2, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let first: Tile<i32, { [] }> = scalar_to_tile(0i32);
        let second: Tile<i32, { [] }> = scalar_to_tile(1i32);
        let high: Tile<i32, { [R, C] }> = extract(sums, [first, first]);
        let low: Tile<i32, { [R, C] }> = extract(sums, [second, first]);
        let sum: Tile<f32, { [R, C] }> = joined::<R, C>(high, low);
        sum
    }

    /// Which of the keys from `first` on each query of a group sees: all of `low .. high` around its position.
    fn seen_keys<const BQ: i32>(
        first: i32,
        first_position: i32,
        group: i32,
        end: i32,
        window: i32,
        causal: i32,
    ) -> Tile<bool, { [BQ, 64] }> {
        let member: Tile<i32, { [BQ, 64] }> = row_numbers::<BQ, 64>();
        let position: Tile<i32, { [BQ, 64] }> = broadcast_scalar(first_position, shape![BQ, 64])
            + member / broadcast_scalar(group, shape![BQ, 64]);
        let one: Tile<i32, { [BQ, 64] }> = constant(1i32, shape![BQ, 64]);
        let width: Tile<i32, { [BQ, 64] }> = broadcast_scalar(window, shape![BQ, 64]);
        let lows: Tile<i32, { [BQ, 64] }> = position + one - width;
        let mut highs: Tile<i32, { [BQ, 64] }> = position + one;
        if causal == 0 {
            highs = min_tile(broadcast_scalar(end, shape![BQ, 64]), position + width);
        }
        let key: Tile<i32, { [BQ, 64] }> =
            broadcast_scalar(first, shape![BQ, 64]) + column_numbers::<BQ, 64>();
        let seen: Tile<bool, { [BQ, 64] }> = ge_tile(key, lows) & lt_tile(key, highs);
        seen
    }

    /// `attend_split` of an int8 cache; `fold` goes on. Grid: (workers over blocks, kv heads, groups).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attend_split_int8<
        E: ElementType,
        const BQ: i32,
        const D: i32,
        const PAGE: i32,
        const LATENCY: i32,
        const BQ2: i32,
    >(
        outputs: *mut f32,
        maxima: *mut f32,
        weights: *mut f32,
        queries: *mut E,
        key_bytes: *mut i8,
        key_scales: *mut f32,
        value_bytes: *mut i8,
        value_scales: *mut f32,
        factors: *mut f32,
        tables: *mut i32,
        groups: *mut i32,
        table_width: i32,
        page_size: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        pages: i32,
        scale: f32,
        causal: i32,
        window: i32,
        block_slots: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let grid: (i32, i32, i32) = get_num_tile_blocks();
        let free: Token = start();
        let meta: i32 = pid.2 * 8;
        let kv_head: i32 = pid.1;
        let first_row: i32 = scalar_at(free, groups, meta);
        let rows: i32 = scalar_at(free, groups, meta + 1);
        let span: i32 = scalar_at(free, groups, meta + 2);
        let first_position: i32 = scalar_at(free, groups, meta + 3);
        let end: i32 = scalar_at(free, groups, meta + 4);
        let first_page: i32 = scalar_at(free, groups, meta + 5);
        let group: i32 = heads / kv_heads;
        let table_start: i32 = span * table_width - first_page;

        // What any query of the group sees: from `low` up to, not including, `high`.
        let low: i32 = max(first_position + 1 - window, 0i32);
        let mut high: i32 = first_position + rows;
        if causal == 0 {
            high = min(end, first_position + rows - 1 + window);
        }
        if rows == 0 {
            high = 0;
        }

        let member: Tile<i32, { [BQ, D] }> = row_numbers::<BQ, D>();
        let lane: Tile<i32, { [BQ, D] }> = column_numbers::<BQ, D>();
        let vector: Tile<i32, { [BQ, D] }> =
            vector_numbers::<BQ, D>(first_row, heads, kv_head, group);
        let live: Tile<bool, { [BQ, D] }> =
            lt_tile(member, broadcast_scalar(rows * group, shape![BQ, D]))
                & lt_tile(lane, broadcast_scalar(head_dim, shape![BQ, D]));
        let offsets: Tile<i32, { [BQ, D] }> =
            vector * broadcast_scalar(head_dim, shape![BQ, D]) + lane;
        let q: Tile<E, { [BQ, D] }> = load_queries::<E, BQ, D>(free, queries, offsets, live);
        let q: Tile<f32, { [BQ, D] }> = unsmoothed::<E, BQ, D>(q, factors, kv_head, head_dim, free);
        let top: Tile<f32, { [BQ, 1] }> = largest::<BQ, D>(q);
        let q_scale: Tile<f32, { [BQ, 1] }> =
            activation_scales::<BQ>(top) * broadcast_scalar(scale, shape![BQ, 1]);
        let q: Tile<i8, { [BQ2, D] }> = two_bytes::<BQ, D, BQ2>(integers::<BQ, D>(q, top));
        let hidden: Tile<f32, { [BQ, 64] }> = constant(f32::NEG_INFINITY, shape![BQ, 64]);
        let ones: Tile<f32, { [BQ, 1] }> = constant(1.0f32, shape![BQ, 1]);
        let share: Tile<f32, { [BQ, 1] }> = constant(3.1000062e-5f32, shape![BQ, 1]);
        let member: Tile<i32, { [BQ, 1] }> = row_numbers::<BQ, 1>();
        let there: Tile<bool, { [BQ, 1] }> =
            lt_tile(member, broadcast_scalar(rows * group, shape![BQ, 1]));
        let number: Tile<i32, { [BQ, 1] }> =
            vector_numbers::<BQ, 1>(first_row, heads, kv_head, group);

        let turn: i32 = pid.0 + low / 256;
        let last_block: i32 = ceil_div(high, 256i32);
        let mut turns: i32 = 0;
        if turn < last_block {
            turns = ceil_div(last_block - turn, grid.0);
        }
        for j in 0i32..turns {
            let block: i32 = turn + j * grid.0;
            let first: i32 = max(block * 4, low / 64);
            let last: i32 = min(block * 4 + 4, ceil_div(high, 64i32));
            let mut m: Tile<f32, { [BQ, 1] }> = constant(-1.0e30f32, shape![BQ, 1]);
            let mut l: Tile<f32, { [BQ, 1] }> = constant(0.0f32, shape![BQ, 1]);
            let mut o: Tile<f32, { [BQ, D] }> = constant(0.0f32, shape![BQ, D]);
            for p in first..last {
                let k: Tile<i8, { [64, D] }> = load_key_bytes::<D, PAGE, LATENCY>(
                    key_bytes,
                    tables,
                    table_start,
                    p * 64,
                    low,
                    high,
                    page_size,
                    pages,
                    kv_heads,
                    kv_head,
                    head_dim,
                    free,
                );
                let v: Tile<i8, { [D, 64] }> = load_value_bytes::<D, PAGE, LATENCY>(
                    value_bytes,
                    tables,
                    table_start,
                    p * 64,
                    low,
                    high,
                    page_size,
                    pages,
                    kv_heads,
                    kv_head,
                    head_dim,
                    free,
                );
                let at: Tile<i32, { [1, 64] }> =
                    column_numbers::<1, 64>() + broadcast_scalar(p * 64, shape![1, 64]);
                let k_scale: Tile<f32, { [1, 64] }> = load_scales::<1, 64>(
                    key_scales,
                    tables,
                    table_start,
                    at,
                    low,
                    high,
                    page_size,
                    kv_heads,
                    kv_head,
                    free,
                );
                let v_scale: Tile<f32, { [1, 64] }> = load_scales::<1, 64>(
                    value_scales,
                    tables,
                    table_start,
                    at,
                    low,
                    high,
                    page_size,
                    kv_heads,
                    kv_head,
                    free,
                );
                let k: Tile<i8, { [D, 64] }> = k.transpose();
                let empty: Tile<i32, { [BQ2, 64] }> = constant(0i32, shape![BQ2, 64]);
                let sums: Tile<i32, { [BQ2, 64] }> = mma(q, k, empty);
                let s: Tile<f32, { [BQ, 64] }> = joined_rows::<BQ, BQ2, 64>(sums)
                    * (q_scale.broadcast(shape![BQ, 64]) * k_scale.broadcast(shape![BQ, 64]));
                let seen: Tile<bool, { [BQ, 64] }> =
                    seen_keys::<BQ>(p * 64, first_position, group, end, window, causal);
                let s: Tile<f32, { [BQ, 64] }> = select(seen, s, hidden);
                let top: Tile<f32, { [BQ] }> = reduce_max(s, 1);
                let least: Tile<f32, { [BQ, 1] }> = constant(-1.0e30f32, shape![BQ, 1]);
                let top: Tile<f32, { [BQ, 1] }> = max_tile(least, top.reshape(shape![BQ, 1]));
                let e: Tile<f32, { [BQ, 64] }> =
                    exp2(s - top.broadcast(shape![BQ, 64]), ftz::Disabled);
                let counts: Tile<i32, { [BQ] }> = reduce_sum(integers::<BQ, 64>(e, ones), 1);
                let counts: Tile<i32, { [BQ, 1] }> = counts.reshape(shape![BQ, 1]);
                let l_page: Tile<f32, { [BQ, 1] }> = convert_tile(counts);
                let w: Tile<f32, { [BQ, 64] }> = e * v_scale.broadcast(shape![BQ, 64]);
                let w_top: Tile<f32, { [BQ, 1] }> = largest::<BQ, 64>(w);
                let w_scale: Tile<f32, { [BQ, 1] }> = activation_scales::<BQ>(w_top);
                let w: Tile<i8, { [BQ2, 64] }> =
                    two_bytes::<BQ, 64, BQ2>(integers::<BQ, 64>(w, w_top));
                let v: Tile<i8, { [64, D] }> = v.transpose();
                let nothing: Tile<i32, { [BQ2, D] }> = constant(0i32, shape![BQ2, D]);
                let sums: Tile<i32, { [BQ2, D] }> = mma(w, v, nothing);
                let o_page: Tile<f32, { [BQ, D] }> = joined_rows::<BQ, BQ2, D>(sums);

                let most: Tile<f32, { [BQ, 1] }> = max_tile(m, top);
                let old: Tile<f32, { [BQ, 1] }> = exp2(m - most, ftz::Disabled);
                let new: Tile<f32, { [BQ, 1] }> = exp2(top - most, ftz::Disabled);
                l = fma(
                    l_page,
                    new * share,
                    l * old,
                    rounding::NearestEven,
                    ftz::Disabled,
                );
                let by: Tile<f32, { [BQ, 1] }> = new * w_scale;
                o = fma(
                    o_page,
                    by.broadcast(shape![BQ, D]),
                    o * old.broadcast(shape![BQ, D]),
                    rounding::NearestEven,
                    ftz::Disabled,
                );
                m = most;
            }

            let slot: i32 = block - first_page * page_size / 256;
            let place: Tile<i32, { [BQ, D] }> = vector
                * broadcast_scalar(block_slots, shape![BQ, D])
                + broadcast_scalar(slot, shape![BQ, D]);
            let to: Tile<i32, { [BQ, D] }> =
                place * broadcast_scalar(head_dim, shape![BQ, D]) + lane;
            let _stored: Token = store_ptr_tko(
                addresses(outputs, to),
                o,
                ordering::Weak,
                None::<scope::Device>,
                Some(live),
                Some(free),
                Latency::<0>,
            );
            let to: Tile<i32, { [BQ, 1] }> = number * broadcast_scalar(block_slots, shape![BQ, 1])
                + broadcast_scalar(slot, shape![BQ, 1]);
            let _stored: Token = store_ptr_tko(
                addresses(maxima, to),
                m,
                ordering::Weak,
                None::<scope::Device>,
                Some(there),
                Some(free),
                Latency::<0>,
            );
            let _stored: Token = store_ptr_tko(
                addresses(weights, to),
                l,
                ordering::Weak,
                None::<scope::Device>,
                Some(there),
                Some(free),
                Latency::<0>,
            );
        }
    }

    /// `attend_whole` of an int8 cache. Grid: (groups, kv heads).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attend_whole_int8<
        E: ElementType,
        const BQ: i32,
        const D: i32,
        const PAGE: i32,
        const LATENCY: i32,
        const BQ2: i32,
    >(
        out: *mut E,
        queries: *mut E,
        key_bytes: *mut i8,
        key_scales: *mut f32,
        value_bytes: *mut i8,
        value_scales: *mut f32,
        factors: *mut f32,
        tables: *mut i32,
        groups: *mut i32,
        table_width: i32,
        page_size: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        pages: i32,
        scale: f32,
        causal: i32,
        window: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let meta: i32 = pid.0 * 8;
        let kv_head: i32 = pid.1;
        let first_row: i32 = scalar_at(free, groups, meta);
        let rows: i32 = scalar_at(free, groups, meta + 1);
        let span: i32 = scalar_at(free, groups, meta + 2);
        let first_position: i32 = scalar_at(free, groups, meta + 3);
        let end: i32 = scalar_at(free, groups, meta + 4);
        let first_page: i32 = scalar_at(free, groups, meta + 5);
        let group: i32 = heads / kv_heads;
        let table_start: i32 = span * table_width - first_page;

        // What any query of the group sees: from `low` up to, not including, `high`.
        let low: i32 = max(first_position + 1 - window, 0i32);
        let mut high: i32 = first_position + rows;
        if causal == 0 {
            high = min(end, first_position + rows - 1 + window);
        }
        if rows == 0 {
            high = 0;
        }

        let member: Tile<i32, { [BQ, D] }> = row_numbers::<BQ, D>();
        let lane: Tile<i32, { [BQ, D] }> = column_numbers::<BQ, D>();
        let vector: Tile<i32, { [BQ, D] }> =
            vector_numbers::<BQ, D>(first_row, heads, kv_head, group);
        let live: Tile<bool, { [BQ, D] }> =
            lt_tile(member, broadcast_scalar(rows * group, shape![BQ, D]))
                & lt_tile(lane, broadcast_scalar(head_dim, shape![BQ, D]));
        let offsets: Tile<i32, { [BQ, D] }> =
            vector * broadcast_scalar(head_dim, shape![BQ, D]) + lane;
        let q: Tile<E, { [BQ, D] }> = load_queries::<E, BQ, D>(free, queries, offsets, live);
        let q: Tile<f32, { [BQ, D] }> = unsmoothed::<E, BQ, D>(q, factors, kv_head, head_dim, free);
        let top: Tile<f32, { [BQ, 1] }> = largest::<BQ, D>(q);
        let q_scale: Tile<f32, { [BQ, 1] }> =
            activation_scales::<BQ>(top) * broadcast_scalar(scale, shape![BQ, 1]);
        let q: Tile<i8, { [BQ2, D] }> = two_bytes::<BQ, D, BQ2>(integers::<BQ, D>(q, top));
        let hidden: Tile<f32, { [BQ, 64] }> = constant(f32::NEG_INFINITY, shape![BQ, 64]);
        let ones: Tile<f32, { [BQ, 1] }> = constant(1.0f32, shape![BQ, 1]);
        let share: Tile<f32, { [BQ, 1] }> = constant(3.1000062e-5f32, shape![BQ, 1]);

        let mut m_all: Tile<f32, { [BQ, 1] }> = constant(-1.0e30f32, shape![BQ, 1]);
        let mut l_all: Tile<f32, { [BQ, 1] }> = constant(0.0f32, shape![BQ, 1]);
        let mut o_all: Tile<f32, { [BQ, D] }> = constant(0.0f32, shape![BQ, D]);
        for block in (low / 256)..ceil_div(high, 256i32) {
            let first: i32 = max(block * 4, low / 64);
            let last: i32 = min(block * 4 + 4, ceil_div(high, 64i32));
            let mut m: Tile<f32, { [BQ, 1] }> = constant(-1.0e30f32, shape![BQ, 1]);
            let mut l: Tile<f32, { [BQ, 1] }> = constant(0.0f32, shape![BQ, 1]);
            let mut o: Tile<f32, { [BQ, D] }> = constant(0.0f32, shape![BQ, D]);
            for p in first..last {
                let k: Tile<i8, { [64, D] }> = load_key_bytes::<D, PAGE, LATENCY>(
                    key_bytes,
                    tables,
                    table_start,
                    p * 64,
                    low,
                    high,
                    page_size,
                    pages,
                    kv_heads,
                    kv_head,
                    head_dim,
                    free,
                );
                let v: Tile<i8, { [D, 64] }> = load_value_bytes::<D, PAGE, LATENCY>(
                    value_bytes,
                    tables,
                    table_start,
                    p * 64,
                    low,
                    high,
                    page_size,
                    pages,
                    kv_heads,
                    kv_head,
                    head_dim,
                    free,
                );
                let at: Tile<i32, { [1, 64] }> =
                    column_numbers::<1, 64>() + broadcast_scalar(p * 64, shape![1, 64]);
                let k_scale: Tile<f32, { [1, 64] }> = load_scales::<1, 64>(
                    key_scales,
                    tables,
                    table_start,
                    at,
                    low,
                    high,
                    page_size,
                    kv_heads,
                    kv_head,
                    free,
                );
                let v_scale: Tile<f32, { [1, 64] }> = load_scales::<1, 64>(
                    value_scales,
                    tables,
                    table_start,
                    at,
                    low,
                    high,
                    page_size,
                    kv_heads,
                    kv_head,
                    free,
                );
                let k: Tile<i8, { [D, 64] }> = k.transpose();
                let empty: Tile<i32, { [BQ2, 64] }> = constant(0i32, shape![BQ2, 64]);
                let sums: Tile<i32, { [BQ2, 64] }> = mma(q, k, empty);
                let s: Tile<f32, { [BQ, 64] }> = joined_rows::<BQ, BQ2, 64>(sums)
                    * (q_scale.broadcast(shape![BQ, 64]) * k_scale.broadcast(shape![BQ, 64]));
                let seen: Tile<bool, { [BQ, 64] }> =
                    seen_keys::<BQ>(p * 64, first_position, group, end, window, causal);
                let s: Tile<f32, { [BQ, 64] }> = select(seen, s, hidden);
                let top: Tile<f32, { [BQ] }> = reduce_max(s, 1);
                let least: Tile<f32, { [BQ, 1] }> = constant(-1.0e30f32, shape![BQ, 1]);
                let top: Tile<f32, { [BQ, 1] }> = max_tile(least, top.reshape(shape![BQ, 1]));
                let e: Tile<f32, { [BQ, 64] }> =
                    exp2(s - top.broadcast(shape![BQ, 64]), ftz::Disabled);
                let counts: Tile<i32, { [BQ] }> = reduce_sum(integers::<BQ, 64>(e, ones), 1);
                let counts: Tile<i32, { [BQ, 1] }> = counts.reshape(shape![BQ, 1]);
                let l_page: Tile<f32, { [BQ, 1] }> = convert_tile(counts);
                let w: Tile<f32, { [BQ, 64] }> = e * v_scale.broadcast(shape![BQ, 64]);
                let w_top: Tile<f32, { [BQ, 1] }> = largest::<BQ, 64>(w);
                let w_scale: Tile<f32, { [BQ, 1] }> = activation_scales::<BQ>(w_top);
                let w: Tile<i8, { [BQ2, 64] }> =
                    two_bytes::<BQ, 64, BQ2>(integers::<BQ, 64>(w, w_top));
                let v: Tile<i8, { [64, D] }> = v.transpose();
                let nothing: Tile<i32, { [BQ2, D] }> = constant(0i32, shape![BQ2, D]);
                let sums: Tile<i32, { [BQ2, D] }> = mma(w, v, nothing);
                let o_page: Tile<f32, { [BQ, D] }> = joined_rows::<BQ, BQ2, D>(sums);

                let most: Tile<f32, { [BQ, 1] }> = max_tile(m, top);
                let old: Tile<f32, { [BQ, 1] }> = exp2(m - most, ftz::Disabled);
                let new: Tile<f32, { [BQ, 1] }> = exp2(top - most, ftz::Disabled);
                l = fma(
                    l_page,
                    new * share,
                    l * old,
                    rounding::NearestEven,
                    ftz::Disabled,
                );
                let by: Tile<f32, { [BQ, 1] }> = new * w_scale;
                o = fma(
                    o_page,
                    by.broadcast(shape![BQ, D]),
                    o * old.broadcast(shape![BQ, D]),
                    rounding::NearestEven,
                    ftz::Disabled,
                );
                m = most;
            }

            let top: Tile<f32, { [BQ, 1] }> = max_tile(m_all, m);
            let old: Tile<f32, { [BQ, 1] }> = exp2(m_all - top, ftz::Disabled);
            let new: Tile<f32, { [BQ, 1] }> = exp2(m - top, ftz::Disabled);
            l_all = fma(l, new, l_all * old, rounding::NearestEven, ftz::Disabled);
            o_all = fma(
                o,
                new.broadcast(shape![BQ, D]),
                o_all * old.broadcast(shape![BQ, D]),
                rounding::NearestEven,
                ftz::Disabled,
            );
            m_all = top;
        }
        let result: Tile<E, { [BQ, D] }> =
            convert_tile(true_div(o_all, l_all.broadcast(shape![BQ, D])));
        let _stored: Token = store_ptr_tko(
            addresses(out, offsets),
            result,
            ordering::Weak,
            None::<scope::Device>,
            Some(live),
            Some(free),
            Latency::<0>,
        );
    }
}
