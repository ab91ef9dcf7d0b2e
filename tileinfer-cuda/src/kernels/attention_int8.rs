//! Attention in bfloat16 over an int8 cache, in the order of `attention`: blocks of 256 keys, page by page, folded left
//! to right. Scores are products of bytes, so keys are multiplied as they lie and the sums are exact: a query times the
//! factors of its kv head becomes two rows of bytes (`bytes`). Values are widened to bfloat16, exactly; where heads are
//! wide, as pairs of bytes, so that a tile of 16-bit values is fetched and its even and odd columns are two products.
//!
//! Weights of the softmax are summed apart for each of the 64 places of a page, and those sums once a block, as integers:
//! no order changes them. So every arithmetic step of a query is the same in both kernels. The size of a head is called
//! `head_bytes` here, since what an aligned variant promises is that it fills vectors of 16 bytes.

#[cutile::module]
#[allow(missing_docs)]
pub mod attention_int8 {
    use super::super::attention::attention::*;
    use super::super::bytes::bytes::*;
    use super::super::views::views::*;
    use cutile::core::*;

    /// Which `(page, kv_head)` block of a pool holds positions `64 p` and those after it, with pages of 64.
    ///
    /// # Safety
    /// As for the entry points below.
    unsafe fn page_block<const PAGE: i32>(
        table: *mut i32,
        table_start: i32,
        p: i32,
        kv_heads: i32,
        kv_head: i32,
        free: Token,
    ) -> i32 {
        let mut block: i32 = 0;
        if PAGE == 64 {
            let page: i32 = scalar_at(free, table, table_start + p);
            block = page * kv_heads + kv_head;
        }
        block
    }

    /// The vectors of 64 positions from `first` on: those of a page's `block`, or each fetched by itself.
    ///
    /// # Safety
    /// As for the entry points below.
    unsafe fn load_bytes<const D: i32, const PAGE: i32, const LATENCY: i32>(
        pool: *mut i8,
        table: *mut i32,
        table_start: i32,
        block: i32,
        first: i32,
        low: i32,
        high: i32,
        page_size: i32,
        pages: i32,
        kv_heads: i32,
        kv_head: i32,
        head_dim: i32,
        free: Token,
    ) -> Tile<i8, { [64, D] }> {
        let mut result: Tile<i8, { [64, D] }> = constant(0i8, shape![64, D]);
        if PAGE == 64 {
            let view: Tensor<i8, { [-1, -1, -1] }> =
                page_pool(pool, pages * kv_heads, 64i32, head_dim, free);
            let part: Partition<i8, { [1, 64, D] }> = view.partition(shape![1, 64, D]);
            let vectors: Tile<i8, { [1, 64, D] }> =
                part.load_pipelined::<LATENCY>([block, 0i32, 0i32]);
            result = vectors.reshape(shape![64, D]);
        } else {
            result = load_page_bytes::<D, PAGE, LATENCY>(
                pool,
                table,
                table_start,
                first,
                low,
                high,
                page_size,
                pages,
                kv_heads,
                kv_head,
                head_dim,
                free,
            );
        }
        result
    }

    /// The same, two bytes a value: `head_dim` is half of what it is.
    ///
    /// # Safety
    /// As for the entry points below.
    unsafe fn load_pairs<E: ElementType, const H: i32, const PAGE: i32, const LATENCY: i32>(
        pool: *mut E,
        table: *mut i32,
        table_start: i32,
        block: i32,
        first: i32,
        low: i32,
        high: i32,
        page_size: i32,
        pages: i32,
        kv_heads: i32,
        kv_head: i32,
        head_dim: i32,
        free: Token,
    ) -> Tile<E, { [64, H] }> {
        let mut result: Tile<E, { [64, H] }> = constant(E::ZERO, shape![64, H]);
        if PAGE == 64 {
            let view: Tensor<E, { [-1, -1, -1] }> =
                page_pool(pool, pages * kv_heads, 64i32, head_dim, free);
            let part: Partition<E, { [1, 64, H] }> = view.partition(shape![1, 64, H]);
            let vectors: Tile<E, { [1, 64, H] }> =
                part.load_pipelined::<LATENCY>([block, 0i32, 0i32]);
            result = vectors.reshape(shape![64, H]);
        } else {
            result = load_page::<E, H, PAGE, LATENCY>(
                pool,
                table,
                table_start,
                first,
                low,
                high,
                page_size,
                pages,
                kv_heads,
                kv_head,
                head_dim,
                free,
            );
        }
        result
    }

    /// The scales of 64 positions from `first` on, in a row or a column; 0 of those outside `low .. high`.
    ///
    /// # Safety
    /// As for the entry points below.
    unsafe fn load_page_scales<const R: i32, const C: i32, const PAGE: i32, const LATENCY: i32>(
        scales: *mut f32,
        table: *mut i32,
        table_start: i32,
        block: i32,
        first: i32,
        low: i32,
        high: i32,
        page_size: i32,
        pages: i32,
        kv_heads: i32,
        kv_head: i32,
        free: Token,
    ) -> Tile<f32, { [R, C] }> {
        let key: Tile<i32, { [64] }> = iota(shape![64]);
        let key: Tile<i32, { [R, C] }> =
            key.reshape(shape![R, C]) + broadcast_scalar(first, shape![R, C]);
        let mut result: Tile<f32, { [R, C] }> = constant(0.0f32, shape![R, C]);
        if PAGE == 64 {
            let view: Tensor<f32, { [-1, -1] }> =
                matrix(scales, pages * kv_heads, 64i32, 64i32, free);
            let part: Partition<f32, { [1, 64] }> = view.partition(shape![1, 64]);
            let loaded: Tile<f32, { [1, 64] }> = part.load_pipelined::<LATENCY>([block, 0i32]);
            let seen: Tile<bool, { [R, C] }> = ge_tile(key, broadcast_scalar(low, shape![R, C]))
                & lt_tile(key, broadcast_scalar(high, shape![R, C]));
            result = select(seen, loaded.reshape(shape![R, C]), result);
        } else {
            result = load_scales::<R, C>(
                scales,
                table,
                table_start,
                key,
                low,
                high,
                page_size,
                kv_heads,
                kv_head,
                free,
            );
        }
        result
    }

    /// Rows of queries with these largest magnitudes as bytes: `hi` of each, then `lo` of each.
    fn two_bytes<const BQ: i32, const BQ2: i32, const D: i32>(
        q: Tile<f32, { [BQ, D] }>,
        largest: Tile<f32, { [BQ, 1] }>,
    ) -> Tile<i8, { [BQ2, D] }> {
        let v: Tile<i32, { [BQ, D] }> = integers::<BQ, D>(q, largest);
        let high: Tile<i32, { [BQ, D] }> = high_part::<BQ, D>(v);
        let by: Tile<i32, { [BQ, D] }> = constant(254i32, shape![BQ, D]);
        let low: Tile<i32, { [BQ, D] }> = v - high * by;
        let high: Tile<i8, { [BQ, D] }> = trunci(high, overflow::NoSignedWrap);
        let low: Tile<i8, { [BQ, D] }> = trunci(low, overflow::NoSignedWrap);
        let both: Tile<i8, { [BQ2, D] }> = cat(high, low, 0);
        both
    }

    /// Scores of 64 keys, but for all scales.
    fn key_scores<const BQ: i32, const BQ2: i32, const D: i32>(
        k: Tile<i8, { [64, D] }>,
        q: Tile<i8, { [D, BQ2] }>,
    ) -> Tile<f32, { [64, BQ] }> {
        let zero: Tile<i32, { [] }> = scalar_to_tile(0i32);
        let next: Tile<i32, { [] }> = scalar_to_tile(1i32);
        let empty: Tile<i32, { [64, BQ2] }> = constant(0i32, shape![64, BQ2]);
        let both: Tile<i32, { [64, BQ2] }> = mma(k, q, empty);
        let both: Tile<i32, { [64, 2, BQ] }> = both.reshape(shape![64, 2, BQ]);
        let high: Tile<i32, { [64, 1, BQ] }> = extract(both, [zero, zero, zero]);
        let low: Tile<i32, { [64, 1, BQ] }> = extract(both, [zero, next, zero]);
        joined_small::<64, BQ>(high.reshape(shape![64, BQ]), low.reshape(shape![64, BQ]))
    }

    /// The same with queries on the left.
    fn query_scores<const BQ: i32, const BQ2: i32, const D: i32>(
        q: Tile<i8, { [BQ2, D] }>,
        k: Tile<i8, { [64, D] }>,
    ) -> Tile<f32, { [BQ, 64] }> {
        let zero: Tile<i32, { [] }> = scalar_to_tile(0i32);
        let next: Tile<i32, { [] }> = scalar_to_tile(1i32);
        let empty: Tile<i32, { [BQ2, 64] }> = constant(0i32, shape![BQ2, 64]);
        let both: Tile<i32, { [BQ2, 64] }> = mma(q, k.transpose(), empty);
        let both: Tile<i32, { [2, BQ, 64] }> = both.reshape(shape![2, BQ, 64]);
        let high: Tile<i32, { [1, BQ, 64] }> = extract(both, [zero, zero, zero]);
        let low: Tile<i32, { [1, BQ, 64] }> = extract(both, [next, zero, zero]);
        joined_small::<BQ, 64>(high.reshape(shape![BQ, 64]), low.reshape(shape![BQ, 64]))
    }

    /// Weights of at most 4 as integers, so that no order changes their sum. A weight that is no number leaves its mark
    /// on the outputs, not here.
    fn units<const R: i32, const C: i32>(l: Tile<f32, { [R, C] }>) -> Tile<i32, { [R, C] }> {
        // 2^22.
        let units: Tile<f32, { [R, C] }> = constant(4194304.0f32, shape![R, C]);
        let whole: Tile<i32, { [R, C] }> = convert_tile(l * units);
        whole
    }

    /// Sums of weights down each column.
    fn total_of_columns<const R: i32, const C: i32>(
        l: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [1, C] }> {
        let total: Tile<i32, { [C] }> = reduce_sum(units::<R, C>(l), 0);
        let total: Tile<f32, { [C] }> = convert_tile(total);
        let total: Tile<f32, { [1, C] }> = total.reshape(shape![1, C]);
        // 2^-22.
        let unit: Tile<f32, { [1, C] }> = constant(0.0000002384185791015625f32, shape![1, C]);
        total * unit
    }

    /// Sums of weights along each row.
    fn total_of_rows<const R: i32, const C: i32>(
        l: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, 1] }> {
        let total: Tile<i32, { [R] }> = reduce_sum(units::<R, C>(l), 1);
        let total: Tile<f32, { [R] }> = convert_tile(total);
        let total: Tile<f32, { [R, 1] }> = total.reshape(shape![R, 1]);
        let unit: Tile<f32, { [R, 1] }> = constant(0.0000002384185791015625f32, shape![R, 1]);
        total * unit
    }

    /// Rows from their even and odd columns; where there are no halves, the first as they are.
    fn interleaved<const R: i32, const D: i32, const H: i32>(
        even: Tile<f32, { [R, H] }>,
        odd: Tile<f32, { [R, H] }>,
    ) -> Tile<f32, { [R, D] }> {
        let mut result: Tile<f32, { [R, D] }> = constant(0.0f32, shape![R, D]);
        if H < D {
            let even: Tile<f32, { [R, H, 1] }> = even.reshape(shape![R, H, 1]);
            let odd: Tile<f32, { [R, H, 1] }> = odd.reshape(shape![R, H, 1]);
            let both: Tile<f32, { [R, H, 2] }> = cat(even, odd, 2);
            result = both.reshape(shape![R, D]);
        } else {
            result = even.reshape(shape![R, D]);
        }
        result
    }

    /// One block of 256 keys, or a few, for the queries of one kv head of one group of rows.
    /// Grid: (workers over blocks, kv heads, groups).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attend_split_int8<
        E: ElementType,
        const BQ: i32,
        const D: i32,
        const PAGE: i32,
        const LATENCY: i32,
        const BQ2: i32,
        const H: i32,
    >(
        outputs: *mut f32,
        maxima: *mut f32,
        weights: *mut f32,
        queries: *mut E,
        pairs: *mut E,
        keys: *mut i8,
        key_scales: *mut f32,
        values: *mut i8,
        value_scales: *mut f32,
        factors: *mut f32,
        tables: *mut i32,
        groups: *mut i32,
        table_width: i32,
        page_size: i32,
        heads: i32,
        kv_heads: i32,
        head_bytes: i32,
        pages: i32,
        scale: f32,
        causal: i32,
        window: i32,
        block_slots: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let grid: (i32, i32, i32) = get_num_tile_blocks();
        // No kernel writes the arrays that describe a step: they are read before the wait.
        let given: Token = new_token_unordered();
        let meta: i32 = pid.2 * 8;
        let kv_head: i32 = pid.1;
        let first_row: i32 = scalar_at(given, groups, meta);
        let rows: i32 = scalar_at(given, groups, meta + 1);
        let span: i32 = scalar_at(given, groups, meta + 2);
        let first_position: i32 = scalar_at(given, groups, meta + 3);
        let end: i32 = scalar_at(given, groups, meta + 4);
        let first_page: i32 = scalar_at(given, groups, meta + 5);
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

        let turn: i32 = pid.0 + low / 256;
        let last_block: i32 = ceil_div(high, 256i32);
        let mut turns: i32 = 0;
        if turn < last_block {
            turns = ceil_div(last_block - turn, grid.0);
        }

        // No kernel writes factors. The first page is looked up before the wait: its number, never below 0, is near when it
        // is needed.
        let (factors, asked): (Tile<f32, { [1, D] }>, Token) =
            head_factors::<D>(factors, kv_head, head_bytes, given);
        let seen: i32 = min(max(turn * 256, low), max(high - 1, 0i32));
        turns = turns
            + min(
                scalar_at(given, tables, table_start + seen / page_size),
                0i32,
            );

        // Blocks without keys make room at once: some other block of this kernel waits.
        if turns > 0 {
            let member: Tile<i32, { [BQ, D] }> = row_numbers::<BQ, D>();
            let lane: Tile<i32, { [BQ, D] }> = column_numbers::<BQ, D>();
            let vector: Tile<i32, { [BQ, D] }> =
                vector_numbers::<BQ, D>(first_row, heads, kv_head, group);
            let live: Tile<bool, { [BQ, D] }> =
                lt_tile(member, broadcast_scalar(rows * group, shape![BQ, D]))
                    & lt_tile(lane, broadcast_scalar(head_bytes, shape![BQ, D]));
            let offsets: Tile<i32, { [BQ, D] }> =
                vector * broadcast_scalar(head_bytes, shape![BQ, D]) + lane;
            // What each query sees.
            let column: Tile<i32, { [64, BQ] }> = column_numbers::<64, BQ>();
            let position: Tile<i32, { [64, BQ] }> =
                broadcast_scalar(first_position, shape![64, BQ])
                    + column / broadcast_scalar(group, shape![64, BQ]);
            let one: Tile<i32, { [64, BQ] }> = constant(1i32, shape![64, BQ]);
            let width: Tile<i32, { [64, BQ] }> = broadcast_scalar(window, shape![64, BQ]);
            let lows: Tile<i32, { [64, BQ] }> = position + one - width;
            let mut highs: Tile<i32, { [64, BQ] }> = position + one;
            if causal == 0 {
                highs = min_tile(broadcast_scalar(end, shape![64, BQ]), position + width);
            }
            let number: Tile<i32, { [64, BQ] }> = row_numbers::<64, BQ>();
            let hidden: Tile<f32, { [64, BQ] }> = constant(f32::NEG_INFINITY, shape![64, BQ]);

            let member: Tile<i32, { [BQ, 1] }> = row_numbers::<BQ, 1>();
            let there: Tile<bool, { [BQ, 1] }> =
                lt_tile(member, broadcast_scalar(rows * group, shape![BQ, 1]));
            let number_of: Tile<i32, { [BQ, 1] }> =
                vector_numbers::<BQ, 1>(first_row, heads, kv_head, group);
            let first_slot: i32 = first_page * page_size / 256;

            // All that can be known before the wait is.
            signal_early();
            let free: Token = wait_after(asked);
            let (q, _token): (Tile<E, { [BQ, D] }>, Token) =
                load_live::<E, BQ, D>(queries, offsets, live, free);
            let q: Tile<f32, { [BQ, D] }> = unsmoothed::<E, BQ, D>(q, factors);
            let largest: Tile<f32, { [BQ, 1] }> = largest::<BQ, D>(q);
            let q_scale: Tile<f32, { [BQ, 1] }> =
                activation_scales::<BQ>(largest) * broadcast_scalar(scale, shape![BQ, 1]);
            let q: Tile<i8, { [BQ2, D] }> = two_bytes::<BQ, BQ2, D>(q, largest);
            let q: Tile<i8, { [D, BQ2] }> = q.transpose();
            let q_scale: Tile<f32, { [1, BQ] }> = q_scale.reshape(shape![1, BQ]);
            for j in 0i32..turns {
                let block: i32 = turn + j * grid.0;
                let first: i32 = max(block * 4, low / 64);
                let last: i32 = min(block * 4 + 4, ceil_div(high, 64i32));
                let mut m: Tile<f32, { [1, BQ] }> = constant(-1.0e30f32, shape![1, BQ]);
                let mut l: Tile<f32, { [64, BQ] }> = constant(0.0f32, shape![64, BQ]);
                let mut o_even: Tile<f32, { [H, BQ] }> = constant(0.0f32, shape![H, BQ]);
                let mut o_odd: Tile<f32, { [H, BQ] }> = constant(0.0f32, shape![H, BQ]);
                for p in first..last {
                    let page: i32 =
                        page_block::<PAGE>(tables, table_start, p, kv_heads, kv_head, free);
                    let k: Tile<i8, { [64, D] }> = load_bytes::<D, PAGE, LATENCY>(
                        keys,
                        tables,
                        table_start,
                        page,
                        p * 64,
                        low,
                        high,
                        page_size,
                        pages,
                        kv_heads,
                        kv_head,
                        head_bytes,
                        free,
                    );
                    let k_scale: Tile<f32, { [64, 1] }> = load_page_scales::<64, 1, PAGE, LATENCY>(
                        key_scales,
                        tables,
                        table_start,
                        page,
                        p * 64,
                        low,
                        high,
                        page_size,
                        pages,
                        kv_heads,
                        kv_head,
                        free,
                    );
                    let v_scale: Tile<f32, { [64, 1] }> = load_page_scales::<64, 1, PAGE, LATENCY>(
                        value_scales,
                        tables,
                        table_start,
                        page,
                        p * 64,
                        low,
                        high,
                        page_size,
                        pages,
                        kv_heads,
                        kv_head,
                        free,
                    );
                    let mut even: Tile<E, { [64, H] }> = constant(E::ZERO, shape![64, H]);
                    let mut odd: Tile<E, { [64, H] }> = constant(E::ZERO, shape![64, H]);
                    if H < D {
                        let v: Tile<E, { [64, H] }> = load_pairs::<E, H, PAGE, LATENCY>(
                            pairs,
                            tables,
                            table_start,
                            page,
                            p * 64,
                            low,
                            high,
                            page_size,
                            pages,
                            kv_heads,
                            kv_head,
                            head_bytes / 2,
                            free,
                        );
                        even = first_bytes::<E, 64, H>(v);
                        odd = second_bytes::<E, 64, H>(v);
                    } else {
                        let v: Tile<i8, { [64, H] }> = load_bytes::<H, PAGE, LATENCY>(
                            values,
                            tables,
                            table_start,
                            page,
                            p * 64,
                            low,
                            high,
                            page_size,
                            pages,
                            kv_heads,
                            kv_head,
                            head_bytes,
                            free,
                        );
                        even = widened::<E, 64, H>(v);
                    }
                    let s: Tile<f32, { [64, BQ] }> = key_scores::<BQ, BQ2, D>(k, q);
                    let key: Tile<i32, { [64, BQ] }> =
                        broadcast_scalar(p * 64, shape![64, BQ]) + number;
                    let seen: Tile<bool, { [64, BQ] }> = ge_tile(key, lows) & lt_tile(key, highs);
                    let s: Tile<f32, { [64, BQ] }> =
                        select(seen, s * k_scale.broadcast(shape![64, BQ]), hidden);
                    let top: Tile<f32, { [BQ] }> = reduce_max(s, 0);
                    let top: Tile<f32, { [1, BQ] }> =
                        max_tile(m, top.reshape(shape![1, BQ]) * q_scale);
                    let old: Tile<f32, { [1, BQ] }> = exp2(m - top, ftz::Enabled);
                    let below: Tile<f32, { [1, BQ] }> = negf(top);
                    let e: Tile<f32, { [64, BQ] }> = exp2(
                        fma(
                            s,
                            q_scale.broadcast(shape![64, BQ]),
                            below.broadcast(shape![64, BQ]),
                            rounding::NearestEven,
                            ftz::Disabled,
                        ),
                        ftz::Enabled,
                    );
                    l = fma(
                        l,
                        old.broadcast(shape![64, BQ]),
                        e,
                        rounding::NearestEven,
                        ftz::Disabled,
                    );
                    let weight: Tile<E, { [64, BQ] }> =
                        convert_tile(e * v_scale.broadcast(shape![64, BQ]));
                    let old: Tile<f32, { [H, BQ] }> = old.broadcast(shape![H, BQ]);
                    o_even = mma(even.transpose(), weight, o_even * old);
                    if H < D {
                        o_odd = mma(odd.transpose(), weight, o_odd * old);
                    }
                    m = top;
                }
                let total: Tile<f32, { [1, BQ] }> = total_of_columns::<64, BQ>(l);
                let o: Tile<f32, { [BQ, D] }> =
                    interleaved::<BQ, D, H>(o_even.transpose(), o_odd.transpose());

                let slot: i32 = block - first_slot;
                let place: Tile<i32, { [BQ, D] }> = vector
                    * broadcast_scalar(block_slots, shape![BQ, D])
                    + broadcast_scalar(slot, shape![BQ, D]);
                let to: Tile<i32, { [BQ, D] }> =
                    place * broadcast_scalar(head_bytes, shape![BQ, D]) + lane;
                let _stored: Token = store_ptr_tko(
                    addresses(outputs, to),
                    o,
                    ordering::Weak,
                    None::<scope::Device>,
                    Some(live),
                    Some(free),
                    Latency::<0>,
                );
                let to: Tile<i32, { [BQ, 1] }> = number_of
                    * broadcast_scalar(block_slots, shape![BQ, 1])
                    + broadcast_scalar(slot, shape![BQ, 1]);
                let _stored: Token = store_ptr_tko(
                    addresses(maxima, to),
                    m.reshape(shape![BQ, 1]),
                    ordering::Weak,
                    None::<scope::Device>,
                    Some(there),
                    Some(free),
                    Latency::<0>,
                );
                let _stored: Token = store_ptr_tko(
                    addresses(weights, to),
                    total.reshape(shape![BQ, 1]),
                    ordering::Weak,
                    None::<scope::Device>,
                    Some(there),
                    Some(free),
                    Latency::<0>,
                );
            }
        }
    }

    /// All blocks of the queries of one kv head of one group of rows, folded on the way.
    /// Grid: (groups, kv heads).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attend_whole_int8<
        E: ElementType,
        const BQ: i32,
        const D: i32,
        const PAGE: i32,
        const LATENCY: i32,
        const BQ2: i32,
        const H: i32,
    >(
        out: *mut E,
        queries: *mut E,
        pairs: *mut E,
        keys: *mut i8,
        key_scales: *mut f32,
        values: *mut i8,
        value_scales: *mut f32,
        factors: *mut f32,
        tables: *mut i32,
        groups: *mut i32,
        table_width: i32,
        page_size: i32,
        heads: i32,
        kv_heads: i32,
        head_bytes: i32,
        pages: i32,
        scale: f32,
        causal: i32,
        window: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start_early();
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
                & lt_tile(lane, broadcast_scalar(head_bytes, shape![BQ, D]));
        let offsets: Tile<i32, { [BQ, D] }> =
            vector * broadcast_scalar(head_bytes, shape![BQ, D]) + lane;
        let (q, _token): (Tile<E, { [BQ, D] }>, Token) =
            load_live::<E, BQ, D>(queries, offsets, live, free);
        let (factors, _token): (Tile<f32, { [1, D] }>, Token) =
            head_factors::<D>(factors, kv_head, head_bytes, free);
        let q: Tile<f32, { [BQ, D] }> = unsmoothed::<E, BQ, D>(q, factors);
        let largest: Tile<f32, { [BQ, 1] }> = largest::<BQ, D>(q);
        let q_scale: Tile<f32, { [BQ, 1] }> =
            activation_scales::<BQ>(largest) * broadcast_scalar(scale, shape![BQ, 1]);
        let q: Tile<i8, { [BQ2, D] }> = two_bytes::<BQ, BQ2, D>(q, largest);

        // What each query sees.
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
        let number: Tile<i32, { [BQ, 64] }> = column_numbers::<BQ, 64>();
        let hidden: Tile<f32, { [BQ, 64] }> = constant(f32::NEG_INFINITY, shape![BQ, 64]);

        let mut m_all: Tile<f32, { [BQ, 1] }> = constant(-1.0e30f32, shape![BQ, 1]);
        let mut l_all: Tile<f32, { [BQ, 1] }> = constant(0.0f32, shape![BQ, 1]);
        let mut all_even: Tile<f32, { [BQ, H] }> = constant(0.0f32, shape![BQ, H]);
        let mut all_odd: Tile<f32, { [BQ, H] }> = constant(0.0f32, shape![BQ, H]);
        for block in (low / 256)..ceil_div(high, 256i32) {
            let first: i32 = max(block * 4, low / 64);
            let last: i32 = min(block * 4 + 4, ceil_div(high, 64i32));
            let mut m: Tile<f32, { [BQ, 1] }> = constant(-1.0e30f32, shape![BQ, 1]);
            let mut l: Tile<f32, { [BQ, 64] }> = constant(0.0f32, shape![BQ, 64]);
            let mut o_even: Tile<f32, { [BQ, H] }> = constant(0.0f32, shape![BQ, H]);
            let mut o_odd: Tile<f32, { [BQ, H] }> = constant(0.0f32, shape![BQ, H]);
            for p in first..last {
                let page: i32 = page_block::<PAGE>(tables, table_start, p, kv_heads, kv_head, free);
                let k: Tile<i8, { [64, D] }> = load_bytes::<D, PAGE, LATENCY>(
                    keys,
                    tables,
                    table_start,
                    page,
                    p * 64,
                    low,
                    high,
                    page_size,
                    pages,
                    kv_heads,
                    kv_head,
                    head_bytes,
                    free,
                );
                let k_scale: Tile<f32, { [1, 64] }> = load_page_scales::<1, 64, PAGE, LATENCY>(
                    key_scales,
                    tables,
                    table_start,
                    page,
                    p * 64,
                    low,
                    high,
                    page_size,
                    pages,
                    kv_heads,
                    kv_head,
                    free,
                );
                let v_scale: Tile<f32, { [1, 64] }> = load_page_scales::<1, 64, PAGE, LATENCY>(
                    value_scales,
                    tables,
                    table_start,
                    page,
                    p * 64,
                    low,
                    high,
                    page_size,
                    pages,
                    kv_heads,
                    kv_head,
                    free,
                );
                let mut even: Tile<E, { [64, H] }> = constant(E::ZERO, shape![64, H]);
                let mut odd: Tile<E, { [64, H] }> = constant(E::ZERO, shape![64, H]);
                if H < D {
                    let v: Tile<E, { [64, H] }> = load_pairs::<E, H, PAGE, LATENCY>(
                        pairs,
                        tables,
                        table_start,
                        page,
                        p * 64,
                        low,
                        high,
                        page_size,
                        pages,
                        kv_heads,
                        kv_head,
                        head_bytes / 2,
                        free,
                    );
                    even = first_bytes::<E, 64, H>(v);
                    odd = second_bytes::<E, 64, H>(v);
                } else {
                    let v: Tile<i8, { [64, H] }> = load_bytes::<H, PAGE, LATENCY>(
                        values,
                        tables,
                        table_start,
                        page,
                        p * 64,
                        low,
                        high,
                        page_size,
                        pages,
                        kv_heads,
                        kv_head,
                        head_bytes,
                        free,
                    );
                    even = widened::<E, 64, H>(v);
                }
                let s: Tile<f32, { [BQ, 64] }> = query_scores::<BQ, BQ2, D>(q, k);
                let key: Tile<i32, { [BQ, 64] }> =
                    broadcast_scalar(p * 64, shape![BQ, 64]) + number;
                let seen: Tile<bool, { [BQ, 64] }> = ge_tile(key, lows) & lt_tile(key, highs);
                let s: Tile<f32, { [BQ, 64] }> =
                    select(seen, s * k_scale.broadcast(shape![BQ, 64]), hidden);
                let top: Tile<f32, { [BQ] }> = reduce_max(s, 1);
                let top: Tile<f32, { [BQ, 1] }> = max_tile(m, top.reshape(shape![BQ, 1]) * q_scale);
                let old: Tile<f32, { [BQ, 1] }> = exp2(m - top, ftz::Enabled);
                let below: Tile<f32, { [BQ, 1] }> = negf(top);
                let e: Tile<f32, { [BQ, 64] }> = exp2(
                    fma(
                        s,
                        q_scale.broadcast(shape![BQ, 64]),
                        below.broadcast(shape![BQ, 64]),
                        rounding::NearestEven,
                        ftz::Disabled,
                    ),
                    ftz::Enabled,
                );
                l = fma(
                    l,
                    old.broadcast(shape![BQ, 64]),
                    e,
                    rounding::NearestEven,
                    ftz::Disabled,
                );
                let weight: Tile<E, { [BQ, 64] }> =
                    convert_tile(e * v_scale.broadcast(shape![BQ, 64]));
                let old: Tile<f32, { [BQ, H] }> = old.broadcast(shape![BQ, H]);
                o_even = mma(weight, even, o_even * old);
                if H < D {
                    o_odd = mma(weight, odd, o_odd * old);
                }
                m = top;
            }
            let total: Tile<f32, { [BQ, 1] }> = total_of_rows::<BQ, 64>(l);

            let top: Tile<f32, { [BQ, 1] }> = max_tile(m_all, m);
            let old: Tile<f32, { [BQ, 1] }> = exp2(m_all - top, ftz::Disabled);
            let new: Tile<f32, { [BQ, 1] }> = exp2(m - top, ftz::Disabled);
            l_all = fma(
                total,
                new,
                l_all * old,
                rounding::NearestEven,
                ftz::Disabled,
            );
            let old: Tile<f32, { [BQ, H] }> = old.broadcast(shape![BQ, H]);
            let new: Tile<f32, { [BQ, H] }> = new.broadcast(shape![BQ, H]);
            all_even = fma(
                o_even,
                new,
                all_even * old,
                rounding::NearestEven,
                ftz::Disabled,
            );
            if H < D {
                all_odd = fma(
                    o_odd,
                    new,
                    all_odd * old,
                    rounding::NearestEven,
                    ftz::Disabled,
                );
            }
            m_all = top;
        }
        let o_all: Tile<f32, { [BQ, D] }> = interleaved::<BQ, D, H>(all_even, all_odd);
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
