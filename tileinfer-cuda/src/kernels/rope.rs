//! Between the q/k/v projection and attention: norms of heads, rotation (arXiv:2104.09864, rotate-half
//! form), page write.

#[cutile::module]
#[allow(missing_docs)]
pub mod rope {
    use super::super::bytes::bytes::*;
    use super::super::views::views::*;
    use cutile::core::*;

    /// One part (queries, keys or values) of one row, `HB` heads a block; `P` is the half head padded to a
    /// power of two. `part` 0 writes queries to `queries`, 1 and 2 write to their row's slot. For an int8 cache
    /// (`INT8` = 1) vectors go to `bytes` and `pool_scales` instead of `out`, divided by `factors` if `smoothed`.
    /// What comes in is the sum of up to `PLANES` planes of `size` numbers, the splits of a layer that left them apart,
    /// and of its bias. All is computed in f32 and rounded once.
    /// No kernel writes weights, cosines and factors: they are asked for before the wait, which is here. The caller has signalled.
    ///
    /// # Safety
    /// As for the entry points below.
    unsafe fn heads_of_part<
        X: ElementType,
        E: ElementType,
        const HB: i32,
        const P: i32,
        const INT8: i32,
        const PLANES: i32,
    >(
        out: *mut E,
        bytes: *mut i8,
        pool_scales: *mut f32,
        factors: *mut f32,
        smoothed: i32,
        out_vector: Tile<i32, { [HB, P] }>,
        x: *mut X,
        x_first: i32,
        planes: i32,
        size: i32,
        bias: *mut E,
        bias_first: i32,
        has_bias: i32,
        weight: *mut E,
        normed: i32,
        cos: *mut f32,
        sin: *mut f32,
        turned: i32,
        scale: f32,
        first_head: i32,
        heads: i32,
        head_dim: i32,
        position: i32,
        eps: f32,
    ) {
        let half: i32 = head_dim / 2;
        let lane: Tile<i32, { [HB, P] }> = column_numbers::<HB, P>();
        let head: Tile<i32, { [HB, P] }> =
            row_numbers::<HB, P>() + broadcast_scalar(first_head, shape![HB, P]);
        let inside: Tile<bool, { [HB, P] }> = lt_tile(lane, broadcast_scalar(half, shape![HB, P]));
        let there: Tile<bool, { [HB, P] }> = lt_tile(head, broadcast_scalar(heads, shape![HB, P]));
        let live: Tile<bool, { [HB, P] }> = inside & there;
        let dims: Tile<i32, { [HB, P] }> = broadcast_scalar(head_dim, shape![HB, P]);
        let halves: Tile<i32, { [HB, P] }> = broadcast_scalar(half, shape![HB, P]);
        let given: Token = new_token_unordered();
        let one: Tile<i32, { [HB, P] }> = constant(1i32, shape![HB, P]);
        let with_norm: Tile<bool, { [HB, P] }> =
            inside & eq_tile(broadcast_scalar(normed, shape![HB, P]), one);
        let with_turn: Tile<bool, { [HB, P] }> =
            inside & eq_tile(broadcast_scalar(turned, shape![HB, P]), one);
        let at: Tile<i32, { [HB, P] }> = broadcast_scalar(position * half, shape![HB, P]) + lane;
        let (wa, given): (Tile<E, { [HB, P] }>, Token) =
            load_live::<E, HB, P>(weight, lane, with_norm, given);
        let (wb, given): (Tile<E, { [HB, P] }>, Token) =
            load_live::<E, HB, P>(weight, lane + halves, with_norm, given);
        let (c, given): (Tile<f32, { [HB, P] }>, Token) =
            load_live::<f32, HB, P>(cos, at, with_turn, given);
        let (s, given): (Tile<f32, { [HB, P] }>, Token) =
            load_live::<f32, HB, P>(sin, at, with_turn, given);
        let inner: Tile<i32, { [HB, P] }> = head * dims + lane;
        let with_bias: Tile<bool, { [HB, P] }> =
            live & eq_tile(broadcast_scalar(has_bias, shape![HB, P]), one);
        let at: Tile<i32, { [HB, P] }> = broadcast_scalar(bias_first, shape![HB, P]) + inner;
        let (ba, given): (Tile<E, { [HB, P] }>, Token) =
            load_live::<E, HB, P>(bias, at, with_bias, given);
        let (bb, given): (Tile<E, { [HB, P] }>, Token) =
            load_live::<E, HB, P>(bias, at + halves, with_bias, given);
        let mut asked: Token = given;
        let mut fa: Tile<f32, { [HB, P] }> = constant(1.0f32, shape![HB, P]);
        let mut fb: Tile<f32, { [HB, P] }> = constant(1.0f32, shape![HB, P]);
        if INT8 == 1 {
            let divided: Tile<bool, { [HB, P] }> =
                live & eq_tile(broadcast_scalar(smoothed, shape![HB, P]), one);
            let (a, first): (Tile<f32, { [HB, P] }>, Token) =
                load_live::<f32, HB, P>(factors, inner, divided, asked);
            let (b, second): (Tile<f32, { [HB, P] }>, Token) =
                load_live::<f32, HB, P>(factors, inner + halves, divided, first);
            asked = second;
            fa = select(divided, a, fa);
            fb = select(divided, b, fb);
        }
        let free: Token = wait_after(asked);
        let from: Tile<i32, { [HB, P] }> = broadcast_scalar(x_first, shape![HB, P]) + inner;
        let a: Tile<X, { [HB, P] }> =
            summed::<X, PLANES, HB, P>(x, 0i32, 1i32, planes, size, from, live, free);
        let b: Tile<X, { [HB, P] }> =
            summed::<X, PLANES, HB, P>(x, 0i32, 1i32, planes, size, from + halves, live, free);
        let mut a: Tile<f32, { [HB, P] }> = convert_tile(a);
        let mut b: Tile<f32, { [HB, P] }> = convert_tile(b);
        if has_bias == 1 {
            let ba: Tile<f32, { [HB, P] }> = convert_tile(ba);
            let bb: Tile<f32, { [HB, P] }> = convert_tile(bb);
            a = a + ba;
            b = b + bb;
        }
        if normed == 1 {
            let squares: Tile<f32, { [HB] }> = reduce_sum(a * a + b * b, 1);
            let count: Tile<f32, { [HB] }> =
                broadcast_scalar(convert_scalar::<f32>(head_dim), shape![HB]);
            let mean: Tile<f32, { [HB] }> = true_div(squares, count);
            let factor: Tile<f32, { [HB] }> =
                rsqrt(mean + broadcast_scalar(eps, shape![HB]), ftz::Disabled);
            let factor: Tile<f32, { [HB, 1] }> = factor.reshape(shape![HB, 1]);
            let factor: Tile<f32, { [HB, P] }> = factor.broadcast(shape![HB, P]);
            let wa: Tile<f32, { [HB, P] }> = convert_tile(wa);
            let wb: Tile<f32, { [HB, P] }> = convert_tile(wb);
            a = a * factor * wa;
            b = b * factor * wb;
        }
        if turned == 1 {
            let zero: Tile<f32, { [HB, P] }> = constant(0.0f32, shape![HB, P]);
            let minus: Tile<f32, { [HB, P] }> = zero - b * s;
            let plus: Tile<f32, { [HB, P] }> = a * s;
            let ra: Tile<f32, { [HB, P] }> = fma(a, c, minus, rounding::NearestEven, ftz::Disabled);
            let rb: Tile<f32, { [HB, P] }> = fma(b, c, plus, rounding::NearestEven, ftz::Disabled);
            let scales: Tile<f32, { [HB, P] }> = broadcast_scalar(scale, shape![HB, P]);
            a = ra * scales;
            b = rb * scales;
        }
        let to: Tile<i32, { [HB, P] }> = out_vector * dims + lane;
        if INT8 == 1 {
            if smoothed == 1 {
                a = divf(a, fa, rounding::NearestEven, ftz::Disabled);
                b = divf(b, fb, rounding::NearestEven, ftz::Disabled);
            }
            let scale: Tile<f32, { [HB, 1] }> = vector_scales::<HB, P>(a, b);
            let a: Tile<i8, { [HB, P] }> = rounded::<HB, P>(a, scale);
            let b: Tile<i8, { [HB, P] }> = rounded::<HB, P>(b, scale);
            store_live::<i8, HB, P>(bytes, to, live, a, free);
            store_live::<i8, HB, P>(bytes, to + halves, live, b, free);
            let first: Tile<i32, { [HB, P] }> = constant(0i32, shape![HB, P]);
            store_live::<f32, HB, P>(
                pool_scales,
                out_vector,
                there & eq_tile(lane, first),
                scale.broadcast(shape![HB, P]),
                free,
            );
        } else {
            let a: Tile<E, { [HB, P] }> = convert_tile(a);
            let b: Tile<E, { [HB, P] }> = convert_tile(b);
            store_live::<E, HB, P>(out, to, live, a, free);
            store_live::<E, HB, P>(out, to + halves, live, b, free);
        }
    }

    /// The number at `base[index]`, or 1 if there is no array.
    ///
    /// # Safety
    /// As for `scalar_at`, where `given` is 1.
    unsafe fn scale_at(free: Token, base: *mut f32, index: i32, given: i32) -> f32 {
        let mut value: Tile<f32, { [] }> = constant(1.0f32, shape![]);
        if given == 1 {
            let pointer: PointerTile<*mut f32, { [] }> = pointer_to_tile(base);
            let pointer: PointerTile<*mut f32, { [] }> = pointer.offset(index);
            let (loaded, _token): (Tile<f32, { [] }>, Token) = load_ptr_tko(
                pointer,
                ordering::Weak,
                None::<scope::Device>,
                None,
                None,
                Some(free),
                Latency::<0>,
            );
            value = loaded;
        }
        tile_to_scalar(value)
    }

    /// Splits a row of q, k and v heads, norms and rotates them, writes queries to `queries` and keys and
    /// values to the row's slot. `qkv` holds a plane for each split that was left apart. Grid: (blocks of query heads + 2 x blocks of kv heads, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn split_norm_rope_store<
        E: ElementType,
        const HB: i32,
        const P: i32,
        const INT8: i32,
        const PLANES: i32,
    >(
        queries: *mut E,
        keys: *mut E,
        values: *mut E,
        key_bytes: *mut i8,
        key_scales: *mut f32,
        value_bytes: *mut i8,
        value_scales: *mut f32,
        factors: *mut f32,
        qkv: *mut f32,
        splits: i32,
        bias: *mut E,
        has_bias: i32,
        q_weight: *mut E,
        k_weight: *mut E,
        cos: *mut f32,
        sin: *mut f32,
        query_scale: *mut f32,
        positions: *mut i32,
        slots: *mut i32,
        flags: i32,
        heads: i32,
        kv_heads: i32,
        head_dim: i32,
        page_size: i32,
        eps: f32,
    ) {
        signal_early();
        let pid: (i32, i32, i32) = get_tile_block_id();
        let grid: (i32, i32, i32) = get_num_tile_blocks();
        // No kernel writes the arrays that describe a step: they are read before the wait.
        let given: Token = new_token_unordered();
        let row: i32 = pid.1;
        let position: i32 = scalar_at(given, positions, row);
        let slot: i32 = scalar_at(given, slots, row);
        let width: i32 = (heads + 2 * kv_heads) * head_dim;
        let size: i32 = grid.1 * width;
        let q_blocks: i32 = ceil_div(heads, HB);
        let kv_blocks: i32 = ceil_div(kv_heads, HB);
        let q_norm: i32 = flags % 2;
        let k_norm: i32 = (flags / 2) % 2;
        let turned: i32 = (flags / 4) % 2;
        let scaled: i32 = (flags / 8) % 2;
        let local: Tile<i32, { [HB, P] }> = row_numbers::<HB, P>();
        if pid.0 < q_blocks {
            let first: i32 = pid.0 * HB;
            let scale: f32 = scale_at(given, query_scale, position, scaled);
            let vector: Tile<i32, { [HB, P] }> =
                local + broadcast_scalar(row * heads + first, shape![HB, P]);
            heads_of_part::<f32, E, HB, P, 0, PLANES>(
                queries,
                key_bytes,
                key_scales,
                factors,
                0i32,
                vector,
                qkv,
                row * width,
                splits,
                size,
                bias,
                0i32,
                has_bias,
                q_weight,
                q_norm,
                cos,
                sin,
                turned,
                scale,
                first,
                heads,
                head_dim,
                position,
                eps,
            );
        } else {
            let page: i32 = slot / page_size;
            let offset: i32 = slot % page_size;
            let mut turn: i32 = pid.0 - q_blocks;
            let is_value: i32 = turn / kv_blocks;
            turn = turn % kv_blocks;
            let first: i32 = turn * HB;
            let head: Tile<i32, { [HB, P] }> =
                local + broadcast_scalar(page * kv_heads + first, shape![HB, P]);
            let vector: Tile<i32, { [HB, P] }> = head * broadcast_scalar(page_size, shape![HB, P])
                + broadcast_scalar(offset, shape![HB, P]);
            if is_value == 0 {
                heads_of_part::<f32, E, HB, P, INT8, PLANES>(
                    keys,
                    key_bytes,
                    key_scales,
                    factors,
                    1i32,
                    vector,
                    qkv,
                    row * width + heads * head_dim,
                    splits,
                    size,
                    bias,
                    heads * head_dim,
                    has_bias,
                    k_weight,
                    k_norm,
                    cos,
                    sin,
                    turned,
                    1.0f32,
                    first,
                    kv_heads,
                    head_dim,
                    position,
                    eps,
                );
            } else {
                heads_of_part::<f32, E, HB, P, INT8, PLANES>(
                    values,
                    value_bytes,
                    value_scales,
                    factors,
                    0i32,
                    vector,
                    qkv,
                    row * width + (heads + kv_heads) * head_dim,
                    splits,
                    size,
                    bias,
                    (heads + kv_heads) * head_dim,
                    has_bias,
                    k_weight,
                    0i32,
                    cos,
                    sin,
                    0i32,
                    1.0f32,
                    first,
                    kv_heads,
                    head_dim,
                    position,
                    eps,
                );
            }
        }
    }

    /// Rotates every head of every row in place. Grid: (heads / HB, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn rotate<E: ElementType, const HB: i32, const P: i32>(
        x: *mut E,
        cos: *mut f32,
        sin: *mut f32,
        query_scale: *mut f32,
        positions: *mut i32,
        scaled: i32,
        heads: i32,
        head_dim: i32,
    ) {
        signal_early();
        let pid: (i32, i32, i32) = get_tile_block_id();
        let given: Token = new_token_unordered();
        let position: i32 = scalar_at(given, positions, pid.1);
        let first: i32 = pid.0 * HB;
        let scale: f32 = scale_at(given, query_scale, position, scaled);
        let vector: Tile<i32, { [HB, P] }> =
            row_numbers::<HB, P>() + broadcast_scalar(pid.1 * heads + first, shape![HB, P]);
        let none: PointerTile<*mut f32, { [] }> = ptr_to_ptr(pointer_to_tile(x));
        let none: *mut f32 = tile_to_pointer(none);
        let no_bytes: PointerTile<*mut i8, { [] }> = ptr_to_ptr(pointer_to_tile(x));
        let no_bytes: *mut i8 = tile_to_pointer(no_bytes);
        heads_of_part::<E, E, HB, P, 0, 1>(
            x,
            no_bytes,
            none,
            none,
            0i32,
            vector,
            x,
            pid.1 * heads * head_dim,
            1i32,
            0i32,
            x,
            0i32,
            0i32,
            x,
            0i32,
            cos,
            sin,
            1i32,
            scale,
            first,
            heads,
            head_dim,
            position,
            0.0f32,
        );
    }

    /// Writes each row's keys (or values) to its slot. Grid: (kv heads / HB, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn store<E: ElementType, const HB: i32, const P: i32, const INT8: i32>(
        pool: *mut E,
        bytes: *mut i8,
        scales: *mut f32,
        factors: *mut f32,
        smoothed: i32,
        x: *mut E,
        slots: *mut i32,
        kv_heads: i32,
        head_dim: i32,
        page_size: i32,
    ) {
        signal_early();
        let pid: (i32, i32, i32) = get_tile_block_id();
        let given: Token = new_token_unordered();
        let slot: i32 = scalar_at(given, slots, pid.1);
        let page: i32 = slot / page_size;
        let offset: i32 = slot % page_size;
        let first: i32 = pid.0 * HB;
        let head: Tile<i32, { [HB, P] }> =
            row_numbers::<HB, P>() + broadcast_scalar(page * kv_heads + first, shape![HB, P]);
        let vector: Tile<i32, { [HB, P] }> = head * broadcast_scalar(page_size, shape![HB, P])
            + broadcast_scalar(offset, shape![HB, P]);
        let none: PointerTile<*mut f32, { [] }> = ptr_to_ptr(pointer_to_tile(x));
        let none: *mut f32 = tile_to_pointer(none);
        heads_of_part::<E, E, HB, P, INT8, 1>(
            pool,
            bytes,
            scales,
            factors,
            smoothed,
            vector,
            x,
            pid.1 * kv_heads * head_dim,
            1i32,
            0i32,
            x,
            0i32,
            0i32,
            x,
            0i32,
            none,
            none,
            0i32,
            1.0f32,
            first,
            kv_heads,
            head_dim,
            0i32,
            0.0f32,
        );
    }
}
