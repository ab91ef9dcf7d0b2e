//! Linear layers with int8 weights, as `tileinfer::weights::int8` writes them down: a row of activations is two
//! rows of bytes, `v = 254 hi + lo`, so that products of bytes on the tensor core give the exact integer sums
//! `H` and `L` in i32, and `y = (254 H + L) * (t * s)` in f32. Integer sums have no order, so tiles and splits
//! are free; the rest is one formula, in one place.

#[cutile::module]
#[allow(missing_docs)]
pub mod linear_int8 {
    use super::super::activation::activation::*;
    use super::super::bytes::bytes::*;
    use super::super::exact::exact::*;
    use super::super::views::views::*;
    use cutile::core::*;

    /// Row `row` of activations from column `first` on, zeros past the end.
    ///
    /// # Safety
    /// `x` holds the row.
    unsafe fn columns_of_row<E: ElementType, const W: i32>(
        x: *mut E,
        row: i32,
        width: i32,
        first: i32,
        free: Token,
    ) -> Tile<f32, { [1, W] }> {
        let column: Tile<i32, { [1, W] }> =
            broadcast_scalar(first, shape![1, W]) + column_numbers::<1, W>();
        let inside: Tile<bool, { [1, W] }> = lt_tile(column, broadcast_scalar(width, shape![1, W]));
        let from: Tile<i32, { [1, W] }> = broadcast_scalar(row * width, shape![1, W]) + column;
        let (values, _token): (Tile<E, { [1, W] }>, Token) =
            load_live::<E, 1, W>(x, from, inside, free);
        convert_tile(values)
    }

    /// Rows of activations as bytes: `out` holds all rows of `hi`, then all rows of `lo`; `scales` one number a
    /// row. Each block looks at a whole row, of up to `W` numbers, and rounds `PART` of them.
    /// Grid: (width / PART, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn round_activations<E: ElementType, const W: i32, const PART: i32>(
        out: *mut i8,
        scales: *mut f32,
        x: *mut E,
        rows: i32,
        width: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start_early();
        let row: Tile<f32, { [1, W] }> = columns_of_row::<E, W>(x, pid.1, width, 0i32, free);
        let x: Tile<f32, { [1, PART] }> =
            columns_of_row::<E, PART>(x, pid.1, width, pid.0 * PART, free);
        let top: Tile<f32, { [1, 1] }> = largest::<1, W>(row);
        let v: Tile<i32, { [1, PART] }> = integers::<1, PART>(x, top);
        let by: Tile<i32, { [1, PART] }> = constant(254i32, shape![1, PART]);
        let high: Tile<i32, { [1, PART] }> = high_part::<1, PART>(v);
        let low: Tile<i32, { [1, PART] }> = v - high * by;
        let high: Tile<i8, { [1, PART] }> = trunci(high, overflow::NoSignedWrap);
        let low: Tile<i8, { [1, PART] }> = trunci(low, overflow::NoSignedWrap);
        let view: Tensor<i8, { [-1, -1, -1] }> = page_pool(out, 2i32, rows, width, free);
        let mut part: PartitionMut<i8, { [1, 1, PART] }> =
            view.partition_full_mut(shape![1, 1, PART]);
        part.store_unchecked(high.reshape(shape![1, 1, PART]), [0i32, pid.1, pid.0]);
        part.store_unchecked(low.reshape(shape![1, 1, PART]), [1i32, pid.1, pid.0]);
        let view: Tensor<f32, { [-1, -1] }> = matrix(scales, rows, 1i32, 1i32, free);
        let mut part: PartitionMut<f32, { [1, 1] }> = view.partition_full_mut(shape![1, 1]);
        part.store_unchecked(activation_scales::<1>(top), [pid.1, 0i32]);
    }

    /// Few rows: the weight stands on the left, as in `linear_few`.
    /// Grid: (rows / BT, outputs / WIDTH, splits). `partials` holds every tile of every split, `tickets` a zero
    /// for every tile. With `apart` = 1 it gets two planes `[t, width]` for each split, of the sums over `hi` and of those
    /// over `lo`, and the norm that comes next makes one of them.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn few_int8<
        E: ElementType,
        O: ElementType,
        const BN: i32,
        const BK: i32,
        const BT: i32,
        const LATENCY: i32,
        const ACT: i32,
        const HALVES: i32,
        const WIDTH: i32,
        const BT2: i32,
        const FIRST: i32,
    >(
        y: *mut O,
        x: *mut i8,
        x_scales: *mut f32,
        w: *mut i8,
        w_scales: *mut f32,
        bias: *mut E,
        has_bias: i32,
        partials: *mut i32,
        tickets: *mut i32,
        apart: i32,
        t: i32,
        width: i32,
        depth: i32,
        k_split: i32,
        alpha_p: f32,
        alpha_n: f32,
        beta: f32,
        eps: f32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let grid: (i32, i32, i32) = get_num_tile_blocks();
        let splits: i32 = grid.2;

        // No kernel writes weights: the first of them are fetched before the wait, as in `linear_few`.
        let w_view: Tensor<i8, { [-1, -1, -1] }> =
            page_pool(w, HALVES, width, depth, new_token_unordered());
        let w_first: Partition<i8, { [HALVES, WIDTH, FIRST] }> =
            w_view.partition(shape![HALVES, WIDTH, FIRST]);
        let a: Tile<i8, { [HALVES, WIDTH, FIRST] }> =
            w_first.load([0i32, pid.1, pid.2 * (k_split / FIRST)]);
        let a: Tile<i8, { [BN, FIRST] }> = a.reshape(shape![BN, FIRST]);

        let free: Token = start();
        let x_view: Tensor<i8, { [-1, -1, -1] }> = page_pool(x, 2i32, t, depth, free);
        let x_first: Partition<i8, { [2, BT, FIRST] }> = x_view.partition(shape![2, BT, FIRST]);
        let b: Tile<i8, { [2, BT, FIRST] }> =
            x_first.load([0i32, pid.0, pid.2 * (k_split / FIRST)]);
        let b: Tile<i8, { [BT2, FIRST] }> = b.reshape(shape![BT2, FIRST]);
        let b: Tile<i8, { [FIRST, BT2] }> = b.transpose();
        let nothing: Tile<i32, { [BN, BT2] }> = constant(0i32, shape![BN, BT2]);
        let mut acc: Tile<i32, { [BN, BT2] }> = mma(a, b, nothing);

        let w_part: Partition<i8, { [HALVES, WIDTH, BK] }> =
            w_view.partition(shape![HALVES, WIDTH, BK]);
        let x_part: Partition<i8, { [2, BT, BK] }> = x_view.partition(shape![2, BT, BK]);
        let first: i32 = pid.2 * (k_split / BK);
        let last: i32 = min(first + k_split / BK, ceil_div(depth, BK));
        for i in (first + FIRST / BK)..last {
            let a: Tile<i8, { [HALVES, WIDTH, BK] }> =
                w_part.load_pipelined::<LATENCY>([0i32, pid.1, i]);
            let a: Tile<i8, { [BN, BK] }> = a.reshape(shape![BN, BK]);
            let b: Tile<i8, { [2, BT, BK] }> = x_part.load_pipelined::<LATENCY>([0i32, pid.0, i]);
            let b: Tile<i8, { [BT2, BK] }> = b.reshape(shape![BT2, BK]);
            let b: Tile<i8, { [BK, BT2] }> = b.transpose();
            acc = mma(a, b, acc);
        }

        let mut mine: i32 = 1;
        if ACT == 0 {
            if apart == 1 {
                mine = 0;
                let p_view: Tensor<i32, { [-1, -1, -1] }> =
                    page_pool(partials, 2i32 * splits, t, width, free);
                let mut p_part: PartitionMut<i32, { [2, BT, BN] }> =
                    p_view.partition_full_mut(shape![2, BT, BN]);
                let planes: Tile<i32, { [BT2, BN] }> = acc.transpose();
                let planes: Tile<i32, { [2, BT, BN] }> = planes.reshape(shape![2, BT, BN]);
                p_part.store_unchecked(planes, [pid.2, pid.0, pid.1]);
            }
        }
        if splits * mine > 1 {
            let tile: i32 = pid.1 * grid.0 + pid.0;
            let slots: i32 = grid.0 * grid.1 * splits;
            let p_view: Tensor<i32, { [-1, -1] }> = matrix(partials, slots * BN, BT2, BT2, free);
            let mut p_part: PartitionMut<i32, { [BN, BT2] }> =
                p_view.partition_full_mut(shape![BN, BT2]);
            store_view_tko_mut(
                &mut p_part,
                acc,
                [tile * splits + pid.2, 0i32],
                ordering::Weak,
                scope::TileBlock,
                None,
                tma::Disabled,
            );
            let stored: Token = get_partition_token_mut(&p_part);
            let base: PointerTile<*mut i32, { [] }> = pointer_to_tile(tickets);
            let ticket: PointerTile<*mut i32, { [] }> = base.offset(tile);
            let one: Tile<i32, { [] }> = constant(1i32, shape![]);
            let (old, taken): (Tile<i32, { [] }>, Token) = atomic_rmw_tko(
                ticket,
                one,
                atomic::Add,
                ordering::AcqRel,
                scope::Device,
                None,
                Some(stored),
            );
            let old: i32 = tile_to_scalar(old);
            mine = 0;
            if old == splits - 1 {
                mine = 1;
                let zero: Tile<i32, { [] }> = constant(0i32, shape![]);
                let _reset: Token = store_ptr_tko(
                    ticket,
                    zero,
                    ordering::Weak,
                    None::<scope::Device>,
                    None,
                    Some(taken),
                    Latency::<0>,
                );
                let r_view: Tensor<i32, { [-1, -1] }> =
                    matrix(partials, slots * BN, BT2, BT2, taken);
                let r_part: Partition<i32, { [BN, BT2] }> = r_view.partition(shape![BN, BT2]);
                let mut sum: Tile<i32, { [BN, BT2] }> = constant(0i32, shape![BN, BT2]);
                for s in 0i32..splits {
                    let part: Tile<i32, { [BN, BT2] }> = load_view_tko(
                        &r_part,
                        [tile * splits + s, 0i32],
                        ordering::Weak,
                        scope::TileBlock,
                        None,
                        tma::Disabled,
                    );
                    sum = sum + part;
                }
                acc = sum;
            }
        }
        if mine == 1 {
            let zero: Tile<i32, { [] }> = scalar_to_tile(0i32);
            let next: Tile<i32, { [] }> = scalar_to_tile(1i32);
            let both: Tile<i32, { [BN, 2, BT] }> = acc.reshape(shape![BN, 2, BT]);
            let high: Tile<i32, { [BN, 1, BT] }> = extract(both, [zero, zero, zero]);
            let low: Tile<i32, { [BN, 1, BT] }> = extract(both, [zero, next, zero]);
            let sum: Tile<f32, { [BN, BT] }> =
                joined::<BN, BT>(high.reshape(shape![BN, BT]), low.reshape(shape![BN, BT]));
            let s: Tile<f32, { [1, BN] }> =
                row_vector::<f32, BN, HALVES, WIDTH>(w_scales, width, pid.1, free);
            let s: Tile<f32, { [BN, 1] }> = s.reshape(shape![BN, 1]);
            let t_view: Tensor<f32, { [-1, -1] }> = matrix(x_scales, 1, t, t, free);
            let t_part: Partition<f32, { [1, BT] }> = t_view.partition(shape![1, BT]);
            let scale: Tile<f32, { [1, BT] }> = t_part.load([0i32, pid.0]);
            let scale: Tile<f32, { [BN, BT] }> =
                scale.broadcast(shape![BN, BT]) * s.broadcast(shape![BN, BT]);
            let mut value: Tile<f32, { [BN, BT] }> = times::<BN, BT>(sum, scale);
            if has_bias == 1 {
                let b: Tile<f32, { [1, BN] }> =
                    row_vector::<E, BN, HALVES, WIDTH>(bias, width, pid.1, free);
                let b: Tile<f32, { [BN, 1] }> = b.reshape(shape![BN, 1]);
                value = value + b.broadcast(shape![BN, BT]);
            }
            let out: Tile<f32, { [HALVES, WIDTH, BT] }> = value.reshape(shape![HALVES, WIDTH, BT]);
            let mut value: Tile<f32, { [1, WIDTH, BT] }> = extract(out, [zero, zero, zero]);
            if ACT == 1 {
                let up: Tile<f32, { [1, WIDTH, BT] }> = extract(out, [next, zero, zero]);
                value = gated_silu::<1, WIDTH, BT>(value, up);
            }
            if ACT == 2 {
                value = curve::<1, WIDTH, BT>(value, alpha_p, alpha_n, beta, eps);
            }
            let out: Tile<O, { [1, WIDTH, BT] }> = convert_tile(value);
            let out: Tile<O, { [WIDTH, BT] }> = out.reshape(shape![WIDTH, BT]);
            let out: Tile<O, { [BT, WIDTH] }> = out.transpose();
            let y_view: Tensor<O, { [-1, -1] }> = matrix(y, t, width, width, free);
            let mut y_part: PartitionMut<O, { [BT, WIDTH] }> =
                y_view.partition_full_mut(shape![BT, WIDTH]);
            y_part.store_unchecked(out, [pid.0, pid.1]);
        }
    }

    /// Many rows: the activations stand on the left. Grid: (rows / BT, outputs / WIDTH).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn many_int8<
        E: ElementType,
        O: ElementType,
        const BN: i32,
        const BK: i32,
        const BT: i32,
        const LATENCY: i32,
        const ACT: i32,
        const HALVES: i32,
        const WIDTH: i32,
        const BT2: i32,
    >(
        y: *mut O,
        x: *mut i8,
        x_scales: *mut f32,
        w: *mut i8,
        w_scales: *mut f32,
        bias: *mut E,
        has_bias: i32,
        t: i32,
        width: i32,
        depth: i32,
        alpha_p: f32,
        alpha_n: f32,
        beta: f32,
        eps: f32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let w_view: Tensor<i8, { [-1, -1, -1] }> =
            page_pool(w, HALVES, width, depth, new_token_unordered());
        let x_view: Tensor<i8, { [-1, -1, -1] }> = page_pool(x, 2i32, t, depth, free);
        let w_part: Partition<i8, { [HALVES, WIDTH, BK] }> =
            w_view.partition(shape![HALVES, WIDTH, BK]);
        let x_part: Partition<i8, { [2, BT, BK] }> = x_view.partition(shape![2, BT, BK]);
        let mut acc: Tile<i32, { [BT2, BN] }> = constant(0i32, shape![BT2, BN]);
        for i in 0i32..ceil_div(depth, BK) {
            let a: Tile<i8, { [2, BT, BK] }> = x_part.load_pipelined::<LATENCY>([0i32, pid.0, i]);
            let a: Tile<i8, { [BT2, BK] }> = a.reshape(shape![BT2, BK]);
            let b: Tile<i8, { [HALVES, WIDTH, BK] }> =
                w_part.load_pipelined::<LATENCY>([0i32, pid.1, i]);
            let b: Tile<i8, { [BN, BK] }> = b.reshape(shape![BN, BK]);
            let b: Tile<i8, { [BK, BN] }> = b.transpose();
            acc = mma(a, b, acc);
        }
        let zero: Tile<i32, { [] }> = scalar_to_tile(0i32);
        let next: Tile<i32, { [] }> = scalar_to_tile(1i32);
        let both: Tile<i32, { [2, BT, BN] }> = acc.reshape(shape![2, BT, BN]);
        let high: Tile<i32, { [1, BT, BN] }> = extract(both, [zero, zero, zero]);
        let low: Tile<i32, { [1, BT, BN] }> = extract(both, [next, zero, zero]);
        let sum: Tile<f32, { [BT, BN] }> =
            joined::<BT, BN>(high.reshape(shape![BT, BN]), low.reshape(shape![BT, BN]));
        let s: Tile<f32, { [1, BN] }> =
            row_vector::<f32, BN, HALVES, WIDTH>(w_scales, width, pid.1, free);
        let t_view: Tensor<f32, { [-1, -1] }> = matrix(x_scales, 1, t, t, free);
        let t_part: Partition<f32, { [1, BT] }> = t_view.partition(shape![1, BT]);
        let scale: Tile<f32, { [1, BT] }> = t_part.load([0i32, pid.0]);
        let scale: Tile<f32, { [BT, 1] }> = scale.reshape(shape![BT, 1]);
        let scale: Tile<f32, { [BT, BN] }> =
            scale.broadcast(shape![BT, BN]) * s.broadcast(shape![BT, BN]);
        let mut value: Tile<f32, { [BT, BN] }> = times::<BT, BN>(sum, scale);
        if has_bias == 1 {
            let b: Tile<f32, { [1, BN] }> =
                row_vector::<E, BN, HALVES, WIDTH>(bias, width, pid.1, free);
            value = value + b.broadcast(shape![BT, BN]);
        }
        let out: Tile<f32, { [BT, HALVES, WIDTH] }> = value.reshape(shape![BT, HALVES, WIDTH]);
        let mut value: Tile<f32, { [BT, 1, WIDTH] }> = extract(out, [zero, zero, zero]);
        if ACT == 1 {
            let up: Tile<f32, { [BT, 1, WIDTH] }> = extract(out, [zero, next, zero]);
            value = gated_silu::<BT, 1, WIDTH>(value, up);
        }
        if ACT == 2 {
            value = curve::<BT, 1, WIDTH>(value, alpha_p, alpha_n, beta, eps);
        }
        let out: Tile<O, { [BT, 1, WIDTH] }> = convert_tile(value);
        let y_view: Tensor<O, { [-1, -1] }> = matrix(y, t, width, width, free);
        let mut y_part: PartitionMut<O, { [BT, WIDTH] }> =
            y_view.partition_full_mut(shape![BT, WIDTH]);
        y_part.store_unchecked(out.reshape(shape![BT, WIDTH]), [pid.0, pid.1]);
    }
}
