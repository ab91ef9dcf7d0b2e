//! Paged grouped-query attention: blocks of 256 keys by absolute position, folded left to right.
//!
//! For few queries, keys stand on the left of both products, so that a page of 64 keys fills the tensor core
//! whatever the number of queries: `S^T = K Q^T`, `O^T = V^T P^T` (`attend_split`). For many, queries do:
//! `S = Q K^T`, `O = P V` (`attend_whole`); a sum's bits do not depend on the side. Within a block of 256
//! keys four pages are folded with a running maximum; blocks are then folded into the result
//! (arXiv:1805.02867). Every arithmetic step of a query is the same in all three kernels, whatever stands
//! beside it; the weights of the softmax are summed by the tensor core as well, since the order of a plain
//! reduction depends on the tile's layout.

#[cutile::module]
#[allow(missing_docs)]
pub mod attention {
    use super::super::bytes::bytes::*;
    use super::super::views::views::*;
    use cutile::core::*;

    /// Of each query vector of a group, row by row, which of all `[rows, heads]` vectors it is.
    pub fn vector_numbers<const BQ: i32, const C: i32>(
        first_row: i32,
        heads: i32,
        kv_head: i32,
        group: i32,
    ) -> Tile<i32, { [BQ, C] }> {
        let member: Tile<i32, { [BQ, C] }> = row_numbers::<BQ, C>();
        let per_row: Tile<i32, { [BQ, C] }> = broadcast_scalar(group, shape![BQ, C]);
        let row: Tile<i32, { [BQ, C] }> =
            broadcast_scalar(first_row, shape![BQ, C]) + member / per_row;
        let head: Tile<i32, { [BQ, C] }> =
            broadcast_scalar(kv_head * group, shape![BQ, C]) + member % per_row;
        row * broadcast_scalar(heads, shape![BQ, C]) + head
    }

    /// Keys or values of 64 positions from `first` on, `[64, D]`. With pages of 64 that is one page's block;
    /// with others (`PAGE` = 0) each vector is fetched by itself, and those outside `low .. high` are zero.
    ///
    /// # Safety
    /// As for the entry points below.
    pub unsafe fn load_page<E: ElementType, const D: i32, const PAGE: i32, const LATENCY: i32>(
        pool: *mut E,
        table: *mut i32,
        table_start: i32,
        first: i32,
        low: i32,
        high: i32,
        page_size: i32,
        pages: i32,
        kv_heads: i32,
        kv_head: i32,
        head_dim: i32,
        free: Token,
    ) -> Tile<E, { [64, D] }> {
        let mut result: Tile<E, { [64, D] }> = constant(E::ZERO, shape![64, D]);
        if PAGE == 64 {
            let page: i32 = scalar_at(free, table, table_start + first / 64);
            let view: Tensor<E, { [-1, -1, -1] }> =
                page_pool(pool, pages * kv_heads, 64i32, head_dim, free);
            let part: Partition<E, { [1, 64, D] }> = view.partition(shape![1, 64, D]);
            let block: Tile<E, { [1, 64, D] }> =
                part.load_pipelined::<LATENCY>([page * kv_heads + kv_head, 0i32, 0i32]);
            result = block.reshape(shape![64, D]);
        } else {
            let key: Tile<i32, { [64, D] }> =
                row_numbers::<64, D>() + broadcast_scalar(first, shape![64, D]);
            let lane: Tile<i32, { [64, D] }> = column_numbers::<64, D>();
            let seen: Tile<bool, { [64, D] }> = ge_tile(key, broadcast_scalar(low, shape![64, D]))
                & lt_tile(key, broadcast_scalar(high, shape![64, D]))
                & lt_tile(lane, broadcast_scalar(head_dim, shape![64, D]));
            let vector: Tile<i32, { [64, D] }> = vectors_of_keys::<64, D>(
                table,
                table_start,
                key,
                seen,
                page_size,
                kv_heads,
                kv_head,
                free,
            );
            let at: Tile<i32, { [64, D] }> =
                vector * broadcast_scalar(head_dim, shape![64, D]) + lane;
            let (vectors, _t): (Tile<E, { [64, D] }>, Token) = load_ptr_tko(
                addresses(pool, at),
                ordering::Weak,
                None::<scope::Device>,
                Some(seen),
                None,
                Some(free),
                Latency::<0>,
            );
            result = select(seen, vectors, result);
        }
        result
    }

    /// The same of an int8 cache, without the scales.
    ///
    /// # Safety
    /// As for the entry points below.
    pub unsafe fn load_page_bytes<const D: i32, const PAGE: i32, const LATENCY: i32>(
        pool: *mut i8,
        table: *mut i32,
        table_start: i32,
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
            let page: i32 = scalar_at(free, table, table_start + first / 64);
            let view: Tensor<i8, { [-1, -1, -1] }> =
                page_pool(pool, pages * kv_heads, 64i32, head_dim, free);
            let part: Partition<i8, { [1, 64, D] }> = view.partition(shape![1, 64, D]);
            let block: Tile<i8, { [1, 64, D] }> =
                part.load_pipelined::<LATENCY>([page * kv_heads + kv_head, 0i32, 0i32]);
            result = block.reshape(shape![64, D]);
        } else {
            let key: Tile<i32, { [64, D] }> =
                row_numbers::<64, D>() + broadcast_scalar(first, shape![64, D]);
            let lane: Tile<i32, { [64, D] }> = column_numbers::<64, D>();
            let seen: Tile<bool, { [64, D] }> = ge_tile(key, broadcast_scalar(low, shape![64, D]))
                & lt_tile(key, broadcast_scalar(high, shape![64, D]))
                & lt_tile(lane, broadcast_scalar(head_dim, shape![64, D]));
            let vector: Tile<i32, { [64, D] }> = vectors_of_keys::<64, D>(
                table,
                table_start,
                key,
                seen,
                page_size,
                kv_heads,
                kv_head,
                free,
            );
            let at: Tile<i32, { [64, D] }> =
                vector * broadcast_scalar(head_dim, shape![64, D]) + lane;
            let (vectors, _t): (Tile<i8, { [64, D] }>, Token) = load_ptr_tko(
                addresses(pool, at),
                ordering::Weak,
                None::<scope::Device>,
                Some(seen),
                None,
                Some(free),
                Latency::<0>,
            );
            result = select(seen, vectors, result);
        }
        result
    }

    /// Of each key that is seen, which of all `[pages, kv_heads, page_size]` vectors it is; 0 of others.
    ///
    /// # Safety
    /// As for the entry points below.
    unsafe fn vectors_of_keys<const R: i32, const C: i32>(
        table: *mut i32,
        table_start: i32,
        key: Tile<i32, { [R, C] }>,
        seen: Tile<bool, { [R, C] }>,
        page_size: i32,
        kv_heads: i32,
        kv_head: i32,
        free: Token,
    ) -> Tile<i32, { [R, C] }> {
        let size: Tile<i32, { [R, C] }> = broadcast_scalar(page_size, shape![R, C]);
        let (page, _t): (Tile<i32, { [R, C] }>, Token) = load_ptr_tko(
            addresses(
                table,
                broadcast_scalar(table_start, shape![R, C]) + key / size,
            ),
            ordering::Weak,
            None::<scope::Device>,
            Some(seen),
            None,
            Some(free),
            Latency::<0>,
        );
        let block: Tile<i32, { [R, C] }> = page * broadcast_scalar(kv_heads, shape![R, C])
            + broadcast_scalar(kv_head, shape![R, C]);
        select(seen, block * size + key % size, constant_like::<R, C>())
    }

    /// The scales of int8 keys or values `key`; 0 of those outside `low .. high`.
    ///
    /// # Safety
    /// As for the entry points below.
    pub unsafe fn load_scales<const R: i32, const C: i32>(
        scales: *mut f32,
        table: *mut i32,
        table_start: i32,
        key: Tile<i32, { [R, C] }>,
        low: i32,
        high: i32,
        page_size: i32,
        kv_heads: i32,
        kv_head: i32,
        free: Token,
    ) -> Tile<f32, { [R, C] }> {
        let seen: Tile<bool, { [R, C] }> = ge_tile(key, broadcast_scalar(low, shape![R, C]))
            & lt_tile(key, broadcast_scalar(high, shape![R, C]));
        let vector: Tile<i32, { [R, C] }> = vectors_of_keys::<R, C>(
            table,
            table_start,
            key,
            seen,
            page_size,
            kv_heads,
            kv_head,
            free,
        );
        let (scale, _t): (Tile<f32, { [R, C] }>, Token) = load_ptr_tko(
            addresses(scales, vector),
            ordering::Weak,
            None::<scope::Device>,
            Some(seen),
            None,
            Some(free),
            Latency::<0>,
        );
        let nothing: Tile<f32, { [R, C] }> = constant(0.0f32, shape![R, C]);
        select(seen, scale, nothing)
    }

    /// What keys of a kv head were divided by: queries are multiplied by it.
    ///
    /// # Safety
    /// As for the entry points below.
    pub unsafe fn head_factors<const D: i32>(
        factors: *mut f32,
        kv_head: i32,
        head_dim: i32,
        free: Token,
    ) -> (Tile<f32, { [1, D] }>, Token) {
        let lane: Tile<i32, { [1, D] }> = column_numbers::<1, D>();
        let inside: Tile<bool, { [1, D] }> =
            lt_tile(lane, broadcast_scalar(head_dim, shape![1, D]));
        let at: Tile<i32, { [1, D] }> = lane + broadcast_scalar(kv_head * head_dim, shape![1, D]);
        load_live::<f32, 1, D>(factors, at, inside, free)
    }

    /// Queries times these factors.
    pub fn unsmoothed<E: ElementType, const BQ: i32, const D: i32>(
        q: Tile<E, { [BQ, D] }>,
        factors: Tile<f32, { [1, D] }>,
    ) -> Tile<f32, { [BQ, D] }> {
        let q: Tile<f32, { [BQ, D] }> = convert_tile(q);
        q * factors.broadcast(shape![BQ, D])
    }

    /// Zeros.
    fn constant_like<const R: i32, const C: i32>() -> Tile<i32, { [R, C] }> {
        let zeros: Tile<i32, { [R, C] }> = constant(0i32, shape![R, C]);
        zeros
    }

    /// One block of 256 keys, or a few, for the queries of one kv head of one group of rows.
    /// Grid: (workers over blocks, kv heads, groups).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attend_split<
        E: ElementType,
        const BQ: i32,
        const D: i32,
        const PAGE: i32,
        const LATENCY: i32,
        const INT8: i32,
    >(
        outputs: *mut f32,
        maxima: *mut f32,
        weights: *mut f32,
        queries: *mut E,
        keys: *mut E,
        values: *mut E,
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
        // The first page is looked up before the wait: its number, never below 0, is near when it is needed.
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
                    & lt_tile(lane, broadcast_scalar(head_dim, shape![BQ, D]));
            let offsets: Tile<i32, { [BQ, D] }> =
                vector * broadcast_scalar(head_dim, shape![BQ, D]) + lane;
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
            let scales: Tile<f32, { [64, BQ] }> = broadcast_scalar(scale, shape![64, BQ]);
            let ones_f32: Tile<f32, { [64, 64] }> = constant(1.0f32, shape![64, 64]);
            let ones: Tile<E, { [64, 64] }> = convert_tile(ones_f32);

            let member: Tile<i32, { [BQ, 1] }> = row_numbers::<BQ, 1>();
            let there: Tile<bool, { [BQ, 1] }> =
                lt_tile(member, broadcast_scalar(rows * group, shape![BQ, 1]));
            let number_of: Tile<i32, { [BQ, 1] }> =
                vector_numbers::<BQ, 1>(first_row, heads, kv_head, group);
            let first_slot: i32 = first_page * page_size / 256;

            // All that can be known before the wait is.
            let free: Token = start_early();
            let (q, _token): (Tile<E, { [BQ, D] }>, Token) =
                load_live::<E, BQ, D>(queries, offsets, live, free);
            let mut q: Tile<E, { [BQ, D] }> = q;
            if INT8 == 1 {
                let (factors, _token): (Tile<f32, { [1, D] }>, Token) =
                    head_factors::<D>(factors, kv_head, head_dim, free);
                q = convert_tile(unsmoothed::<E, BQ, D>(q, factors));
            }
            let q: Tile<E, { [D, BQ] }> = q.transpose();
            for j in 0i32..turns {
                let block: i32 = turn + j * grid.0;
                let first: i32 = max(block * 4, low / 64);
                let last: i32 = min(block * 4 + 4, ceil_div(high, 64i32));
                let mut m: Tile<f32, { [1, BQ] }> = constant(-1.0e30f32, shape![1, BQ]);
                let mut l: Tile<f32, { [64, BQ] }> = constant(0.0f32, shape![64, BQ]);
                let mut o: Tile<f32, { [D, BQ] }> = constant(0.0f32, shape![D, BQ]);
                for p in first..last {
                    let mut k: Tile<E, { [64, D] }> = constant(E::ZERO, shape![64, D]);
                    let mut v: Tile<E, { [D, 64] }> = constant(E::ZERO, shape![D, 64]);
                    if INT8 == 1 {
                        let bytes: Tile<i8, { [64, D] }> = load_page_bytes::<D, PAGE, LATENCY>(
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
                        k = widened::<E, 64, D>(bytes);
                        let bytes: Tile<i8, { [64, D] }> = load_page_bytes::<D, PAGE, LATENCY>(
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
                        let page: Tile<E, { [64, D] }> = widened::<E, 64, D>(bytes);
                        v = page.transpose();
                    } else {
                        k = load_page::<E, D, PAGE, LATENCY>(
                            keys,
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
                        let page: Tile<E, { [64, D] }> = load_page::<E, D, PAGE, LATENCY>(
                            values,
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
                        v = page.transpose();
                    }
                    let empty: Tile<f32, { [64, BQ] }> = constant(0.0f32, shape![64, BQ]);
                    let mut s: Tile<f32, { [64, BQ] }> = mma(k, q, empty);
                    let mut v_scale: Tile<f32, { [64, 1] }> = constant(1.0f32, shape![64, 1]);
                    if INT8 == 1 {
                        let at: Tile<i32, { [64, 1] }> =
                            row_numbers::<64, 1>() + broadcast_scalar(p * 64, shape![64, 1]);
                        let k_scale: Tile<f32, { [64, 1] }> = load_scales::<64, 1>(
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
                        v_scale = load_scales::<64, 1>(
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
                        s = s * k_scale.broadcast(shape![64, BQ]);
                    }
                    let key: Tile<i32, { [64, BQ] }> =
                        broadcast_scalar(p * 64, shape![64, BQ]) + number;
                    let seen: Tile<bool, { [64, BQ] }> = ge_tile(key, lows) & lt_tile(key, highs);
                    let s: Tile<f32, { [64, BQ] }> = select(seen, s * scales, hidden);
                    let top: Tile<f32, { [BQ] }> = reduce_max(s, 0);
                    let top: Tile<f32, { [1, BQ] }> = max_tile(m, top.reshape(shape![1, BQ]));
                    let old: Tile<f32, { [1, BQ] }> = exp2(m - top, ftz::Disabled);
                    let e: Tile<f32, { [64, BQ] }> =
                        exp2(s - top.broadcast(shape![64, BQ]), ftz::Disabled);
                    let weight: Tile<E, { [64, BQ] }> = convert_tile(e);
                    l = mma(ones, weight, l * old.broadcast(shape![64, BQ]));
                    let mut weight: Tile<E, { [64, BQ] }> = weight;
                    if INT8 == 1 {
                        weight = convert_tile(e * v_scale.broadcast(shape![64, BQ]));
                    }
                    o = mma(v, weight, o * old.broadcast(shape![D, BQ]));
                    m = top;
                }
                let total: Tile<f32, { [BQ] }> = reduce_max(l, 0);
                let total: Tile<f32, { [1, BQ] }> = total.reshape(shape![1, BQ]);

                let slot: i32 = block - first_slot;
                let place: Tile<i32, { [BQ, D] }> = vector
                    * broadcast_scalar(block_slots, shape![BQ, D])
                    + broadcast_scalar(slot, shape![BQ, D]);
                let to: Tile<i32, { [BQ, D] }> =
                    place * broadcast_scalar(head_dim, shape![BQ, D]) + lane;
                let _stored: Token = store_ptr_tko(
                    addresses(outputs, to),
                    o.transpose(),
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

    /// What the blocks so far give together with the one at `at`: largest score, sum of weights, output.
    ///
    /// # Safety
    /// As for the entry points.
    unsafe fn with_block<const D: i32>(
        m: Tile<f32, { [1, 1] }>,
        l: Tile<f32, { [1, 1] }>,
        o: Tile<f32, { [1, D] }>,
        outputs: *mut f32,
        maxima: *mut f32,
        weights: *mut f32,
        at: i32,
        head_dim: i32,
        free: Token,
    ) -> (
        Tile<f32, { [1, 1] }>,
        Tile<f32, { [1, 1] }>,
        Tile<f32, { [1, D] }>,
    ) {
        let lane: Tile<i32, { [1, D] }> = column_numbers::<1, D>();
        let inside: Tile<bool, { [1, D] }> =
            lt_tile(lane, broadcast_scalar(head_dim, shape![1, D]));
        let from: Tile<i32, { [1, D] }> = broadcast_scalar(at * head_dim, shape![1, D]) + lane;
        let at: Tile<i32, { [1, 1] }> = broadcast_scalar(at, shape![1, 1]);
        let (m_block, _t): (Tile<f32, { [1, 1] }>, Token) = load_ptr_tko(
            addresses(maxima, at),
            ordering::Weak,
            None::<scope::Device>,
            None,
            None,
            Some(free),
            Latency::<0>,
        );
        let (l_block, _t): (Tile<f32, { [1, 1] }>, Token) = load_ptr_tko(
            addresses(weights, at),
            ordering::Weak,
            None::<scope::Device>,
            None,
            None,
            Some(free),
            Latency::<0>,
        );
        let (o_block, _t): (Tile<f32, { [1, D] }>, Token) = load_ptr_tko(
            addresses(outputs, from),
            ordering::Weak,
            None::<scope::Device>,
            Some(inside),
            None,
            Some(free),
            Latency::<0>,
        );
        let top: Tile<f32, { [1, 1] }> = max_tile(m, m_block);
        let old: Tile<f32, { [1, 1] }> = exp2(m - top, ftz::Disabled);
        let new: Tile<f32, { [1, 1] }> = exp2(m_block - top, ftz::Disabled);
        let l: Tile<f32, { [1, 1] }> =
            fma(l_block, new, l * old, rounding::NearestEven, ftz::Disabled);
        let o: Tile<f32, { [1, D] }> = fma(
            o_block,
            new.broadcast(shape![1, D]),
            o * old.broadcast(shape![1, D]),
            rounding::NearestEven,
            ftz::Disabled,
        );
        (top, l, o)
    }

    /// Folds what `attend_split` left for one query vector, block by block. Grid: (heads, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn fold<E: ElementType, const D: i32, const AHEAD: i32>(
        out: *mut E,
        outputs: *mut f32,
        maxima: *mut f32,
        weights: *mut f32,
        row_meta: *mut i32,
        heads: i32,
        head_dim: i32,
        causal: i32,
        window: i32,
        page_size: i32,
        block_slots: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let given: Token = new_token_unordered();
        let meta: i32 = pid.1 * 4;
        let position: i32 = scalar_at(given, row_meta, meta);
        let end: i32 = scalar_at(given, row_meta, meta + 1);
        let first_page: i32 = scalar_at(given, row_meta, meta + 2);
        let low: i32 = max(position + 1 - window, 0i32);
        let mut high: i32 = position + 1;
        if causal == 0 {
            high = min(end, position + window);
        }
        let vector: i32 = pid.1 * heads + pid.0;
        let base: i32 = vector * block_slots - first_page * page_size / 256;

        let lane: Tile<i32, { [1, D] }> = column_numbers::<1, D>();
        let inside: Tile<bool, { [1, D] }> =
            lt_tile(lane, broadcast_scalar(head_dim, shape![1, D]));
        let mut m: Tile<f32, { [1, 1] }> = constant(-1.0e30f32, shape![1, 1]);
        let mut l: Tile<f32, { [1, 1] }> = constant(0.0f32, shape![1, 1]);
        let mut o: Tile<f32, { [1, D] }> = constant(0.0f32, shape![1, D]);
        // Many blocks are asked for at once, then a few, then one; they are folded one after the other.
        let mut at: i32 = base + low / 256;
        let last: i32 = base + ceil_div(high, 256i32);
        let many: i32 = (last - at) / AHEAD;
        // All that can be known before the wait is.
        let free: Token = start_early();
        for i in 0i32..many {
            for j in 0i32..AHEAD {
                let (m_next, l_next, o_next): (
                    Tile<f32, { [1, 1] }>,
                    Tile<f32, { [1, 1] }>,
                    Tile<f32, { [1, D] }>,
                ) = with_block::<D>(
                    m,
                    l,
                    o,
                    outputs,
                    maxima,
                    weights,
                    at + i * AHEAD + j,
                    head_dim,
                    free,
                );
                m = m_next;
                l = l_next;
                o = o_next;
            }
        }
        at = at + many * AHEAD;
        let some: i32 = (last - at) / 4;
        for i in 0i32..some {
            for j in 0i32..4 {
                let (m_next, l_next, o_next): (
                    Tile<f32, { [1, 1] }>,
                    Tile<f32, { [1, 1] }>,
                    Tile<f32, { [1, D] }>,
                ) = with_block::<D>(
                    m,
                    l,
                    o,
                    outputs,
                    maxima,
                    weights,
                    at + i * 4 + j,
                    head_dim,
                    free,
                );
                m = m_next;
                l = l_next;
                o = o_next;
            }
        }
        for at in (at + some * 4)..last {
            let (m_next, l_next, o_next): (
                Tile<f32, { [1, 1] }>,
                Tile<f32, { [1, 1] }>,
                Tile<f32, { [1, D] }>,
            ) = with_block::<D>(m, l, o, outputs, maxima, weights, at, head_dim, free);
            m = m_next;
            l = l_next;
            o = o_next;
        }
        let result: Tile<E, { [1, D] }> = convert_tile(true_div(o, l.broadcast(shape![1, D])));
        let to: Tile<i32, { [1, D] }> = broadcast_scalar(vector * head_dim, shape![1, D]) + lane;
        let _stored: Token = store_ptr_tko(
            addresses(out, to),
            result,
            ordering::Weak,
            None::<scope::Device>,
            Some(inside),
            Some(free),
            Latency::<0>,
        );
    }

    /// All blocks of the queries of one kv head of one group of rows, folded on the way.
    /// Grid: (groups, kv heads).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn attend_whole<
        E: ElementType,
        const BQ: i32,
        const D: i32,
        const PAGE: i32,
        const LATENCY: i32,
        const INT8: i32,
    >(
        out: *mut E,
        queries: *mut E,
        keys: *mut E,
        values: *mut E,
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
                & lt_tile(lane, broadcast_scalar(head_dim, shape![BQ, D]));
        let offsets: Tile<i32, { [BQ, D] }> =
            vector * broadcast_scalar(head_dim, shape![BQ, D]) + lane;
        let (q, _token): (Tile<E, { [BQ, D] }>, Token) =
            load_live::<E, BQ, D>(queries, offsets, live, free);
        let mut q: Tile<E, { [BQ, D] }> = q;
        if INT8 == 1 {
            let (factors, _token): (Tile<f32, { [1, D] }>, Token) =
                head_factors::<D>(factors, kv_head, head_dim, free);
            q = convert_tile(unsmoothed::<E, BQ, D>(q, factors));
        }

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
        let scales: Tile<f32, { [BQ, 64] }> = broadcast_scalar(scale, shape![BQ, 64]);
        let ones_f32: Tile<f32, { [64, 16] }> = constant(1.0f32, shape![64, 16]);
        let ones: Tile<E, { [64, 16] }> = convert_tile(ones_f32);

        let mut m_all: Tile<f32, { [BQ, 1] }> = constant(-1.0e30f32, shape![BQ, 1]);
        let mut l_all: Tile<f32, { [BQ, 1] }> = constant(0.0f32, shape![BQ, 1]);
        let mut o_all: Tile<f32, { [BQ, D] }> = constant(0.0f32, shape![BQ, D]);
        for block in (low / 256)..ceil_div(high, 256i32) {
            let first: i32 = max(block * 4, low / 64);
            let last: i32 = min(block * 4 + 4, ceil_div(high, 64i32));
            let mut m: Tile<f32, { [BQ, 1] }> = constant(-1.0e30f32, shape![BQ, 1]);
            let mut l: Tile<f32, { [BQ, 16] }> = constant(0.0f32, shape![BQ, 16]);
            let mut o: Tile<f32, { [BQ, D] }> = constant(0.0f32, shape![BQ, D]);
            for p in first..last {
                let mut k: Tile<E, { [64, D] }> = constant(E::ZERO, shape![64, D]);
                let mut v: Tile<E, { [64, D] }> = constant(E::ZERO, shape![64, D]);
                if INT8 == 1 {
                    let bytes: Tile<i8, { [64, D] }> = load_page_bytes::<D, PAGE, LATENCY>(
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
                    k = widened::<E, 64, D>(bytes);
                    let bytes: Tile<i8, { [64, D] }> = load_page_bytes::<D, PAGE, LATENCY>(
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
                    v = widened::<E, 64, D>(bytes);
                } else {
                    k = load_page::<E, D, PAGE, LATENCY>(
                        keys,
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
                    v = load_page::<E, D, PAGE, LATENCY>(
                        values,
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
                }
                let k: Tile<E, { [D, 64] }> = k.transpose();
                let empty: Tile<f32, { [BQ, 64] }> = constant(0.0f32, shape![BQ, 64]);
                let mut s: Tile<f32, { [BQ, 64] }> = mma(q, k, empty);
                let mut v_scale: Tile<f32, { [1, 64] }> = constant(1.0f32, shape![1, 64]);
                if INT8 == 1 {
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
                    v_scale = load_scales::<1, 64>(
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
                    s = s * k_scale.broadcast(shape![BQ, 64]);
                }
                let key: Tile<i32, { [BQ, 64] }> =
                    broadcast_scalar(p * 64, shape![BQ, 64]) + number;
                let seen: Tile<bool, { [BQ, 64] }> = ge_tile(key, lows) & lt_tile(key, highs);
                let s: Tile<f32, { [BQ, 64] }> = select(seen, s * scales, hidden);
                let top: Tile<f32, { [BQ] }> = reduce_max(s, 1);
                let top: Tile<f32, { [BQ, 1] }> = max_tile(m, top.reshape(shape![BQ, 1]));
                let old: Tile<f32, { [BQ, 1] }> = exp2(m - top, ftz::Disabled);
                let e: Tile<f32, { [BQ, 64] }> =
                    exp2(s - top.broadcast(shape![BQ, 64]), ftz::Disabled);
                let mut weight: Tile<E, { [BQ, 64] }> = convert_tile(e);
                l = mma(weight, ones, l * old.broadcast(shape![BQ, 16]));
                if INT8 == 1 {
                    weight = convert_tile(e * v_scale.broadcast(shape![BQ, 64]));
                }
                o = mma(weight, v, o * old.broadcast(shape![BQ, D]));
                m = top;
            }
            let total: Tile<f32, { [BQ] }> = reduce_max(l, 1);
            let total: Tile<f32, { [BQ, 1] }> = total.reshape(shape![BQ, 1]);

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
