//! Linear layers, `y = W x + b`, for few rows (weights streamed once) and for many (tensor cores busy).
//!
//! One reduction tree per weight: K is cut into splits that depend on the weight's shape alone; within a
//! split one f32 accumulator runs through K in the tensor core, whatever the tile; the splits' sums are
//! added left to right, starting from zero. So a row's result does not depend on which kernel or tile
//! computed it.
//!
//! What follows a layer's sum is done where the sum is: bias, and the activation of an MLP (`ACT`: 1 gated
//! SiLU, 2 xIELU). For a gated one a block takes as many rows of the gate's half of the weight as of the
//! other half (`HALVES` = 2), so that both values of an output meet in one block.

#[cutile::module]
#[allow(missing_docs)]
pub mod linear {
    use super::super::activation::activation::*;
    use super::super::views::views::*;
    use cutile::core::*;

    /// Up to a few hundred rows: the weight stands on the left, so that its rows fill the tensor core's 64.
    /// Each block reduces one split, whose first `FIRST` columns are one tile; the last to finish a tile adds up its
    /// splits, which `partials` holds tile by tile, `tickets` a zero for every tile. With `apart` = 1 nobody does:
    /// `partials` gets a plane `[t, width]` for each split, and what comes next adds them up (the norm's `summed`),
    /// which saves a block the wait for the others.
    /// Grid: (rows / BT, outputs / WIDTH, splits).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn linear_few<
        E: ElementType,
        O: ElementType,
        const BN: i32,
        const BK: i32,
        const BT: i32,
        const LATENCY: i32,
        const ACT: i32,
        const HALVES: i32,
        const WIDTH: i32,
        const FIRST: i32,
    >(
        y: *mut O,
        x: *mut E,
        w: *mut E,
        bias: *mut E,
        has_bias: i32,
        partials: *mut f32,
        tickets: *mut i32,
        apart: i32,
        t: i32,
        width: i32,
        k: i32,
        k_split: i32,
        alpha_p: f32,
        alpha_n: f32,
        beta: f32,
        eps: f32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let grid: (i32, i32, i32) = get_num_tile_blocks();
        let splits: i32 = grid.2;

        // No kernel writes weights: the first of them are fetched before the wait for the kernels that write `x`.
        // (In the order of the text: the loads below `start` wait for it, whatever their tokens say.)
        let w_view: Tensor<E, { [-1, -1, -1] }> =
            page_pool(w, HALVES, width, k, new_token_unordered());
        let w_first: Partition<E, { [HALVES, WIDTH, FIRST] }> =
            w_view.partition(shape![HALVES, WIDTH, FIRST]);
        let a: Tile<E, { [HALVES, WIDTH, FIRST] }> =
            w_first.load([0i32, pid.1, pid.2 * (k_split / FIRST)]);
        let a: Tile<E, { [BN, FIRST] }> = a.reshape(shape![BN, FIRST]);

        let free: Token = start();
        let x_view: Tensor<E, { [-1, -1] }> = matrix(x, t, k, k, free);
        let x_first: Partition<E, { [BT, FIRST] }> = x_view.partition(shape![BT, FIRST]);
        let b: Tile<E, { [BT, FIRST] }> = x_first.load([pid.0, pid.2 * (k_split / FIRST)]);
        let b: Tile<E, { [FIRST, BT] }> = b.transpose();
        let nothing: Tile<f32, { [BN, BT] }> = constant(0.0f32, shape![BN, BT]);
        let mut acc: Tile<f32, { [BN, BT] }> = mma(a, b, nothing);

        let w_part: Partition<E, { [HALVES, WIDTH, BK] }> =
            w_view.partition(shape![HALVES, WIDTH, BK]);
        let x_part: Partition<E, { [BT, BK] }> = x_view.partition(shape![BT, BK]);
        let first: i32 = pid.2 * (k_split / BK);
        let last: i32 = min(first + k_split / BK, ceil_div(k, BK));
        for i in (first + FIRST / BK)..last {
            let a: Tile<E, { [HALVES, WIDTH, BK] }> =
                w_part.load_pipelined::<LATENCY>([0i32, pid.1, i]);
            let a: Tile<E, { [BN, BK] }> = a.reshape(shape![BN, BK]);
            let b: Tile<E, { [BT, BK] }> = x_part.load_pipelined::<LATENCY>([pid.0, i]);
            let b: Tile<E, { [BK, BT] }> = b.transpose();
            acc = mma(a, b, acc);
        }

        let mut mine: i32 = 1;
        if ACT == 0 {
            if apart == 1 {
                mine = 0;
                let p_view: Tensor<f32, { [-1, -1, -1] }> =
                    page_pool(partials, splits, t, width, free);
                let mut p_part: PartitionMut<f32, { [1, BT, BN] }> =
                    p_view.partition_full_mut(shape![1, BT, BN]);
                let plane: Tile<f32, { [BT, BN] }> = acc.transpose();
                let plane: Tile<f32, { [1, BT, BN] }> = plane.reshape(shape![1, BT, BN]);
                p_part.store_unchecked(plane, [pid.2, pid.0, pid.1]);
            }
        }
        if splits * mine > 1 {
            let tile: i32 = pid.1 * grid.0 + pid.0;
            let slots: i32 = grid.0 * grid.1 * splits;
            let p_view: Tensor<f32, { [-1, -1] }> = matrix(partials, slots * BN, BT, BT, free);
            let mut p_part: PartitionMut<f32, { [BN, BT] }> =
                p_view.partition_full_mut(shape![BN, BT]);
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
                let r_view: Tensor<f32, { [-1, -1] }> = matrix(partials, slots * BN, BT, BT, taken);
                let r_part: Partition<f32, { [BN, BT] }> = r_view.partition(shape![BN, BT]);
                let mut sum: Tile<f32, { [BN, BT] }> = constant(0.0f32, shape![BN, BT]);
                for s in 0i32..splits {
                    let part: Tile<f32, { [BN, BT] }> = load_view_tko(
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
            if has_bias == 1 {
                let b: Tile<f32, { [1, BN] }> =
                    row_vector::<E, BN, HALVES, WIDTH>(bias, width, pid.1, free);
                let b: Tile<f32, { [BN, 1] }> = b.reshape(shape![BN, 1]);
                acc = acc + b.broadcast(shape![BN, BT]);
            }
            let y_view: Tensor<O, { [-1, -1] }> = matrix(y, t, width, width, free);
            let mut y_part: PartitionMut<O, { [BT, WIDTH] }> =
                y_view.partition_full_mut(shape![BT, WIDTH]);
            let out: Tile<f32, { [HALVES, WIDTH, BT] }> = acc.reshape(shape![HALVES, WIDTH, BT]);
            let first: Tile<i32, { [] }> = scalar_to_tile(0i32);
            let mut value: Tile<f32, { [1, WIDTH, BT] }> = extract(out, [first, first, first]);
            if ACT == 1 {
                let second: Tile<i32, { [] }> = scalar_to_tile(1i32);
                let up: Tile<f32, { [1, WIDTH, BT] }> = extract(out, [second, first, first]);
                value = gated_silu::<1, WIDTH, BT>(value, up);
            }
            if ACT == 2 {
                value = curve::<1, WIDTH, BT>(value, alpha_p, alpha_n, beta, eps);
            }
            let out: Tile<O, { [1, WIDTH, BT] }> = convert_tile(value);
            let out: Tile<O, { [WIDTH, BT] }> = out.reshape(shape![WIDTH, BT]);
            let out: Tile<O, { [BT, WIDTH] }> = out.transpose();
            y_part.store_unchecked(out, [pid.0, pid.1]);
        }
    }

    /// Many rows: the activations stand on the left. `SPLIT` = 0: there are no splits, 1: each block reduces all of them
    /// one after the other, 2: each block reduces one and leaves its sums in a plane `[t, width]` of `y`, as `linear_few`
    /// does with `apart`.
    /// Grid: (rows / BT, outputs / WIDTH), and with `SPLIT` = 2 splits.
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn linear_many<
        E: ElementType,
        O: ElementType,
        const BN: i32,
        const BK: i32,
        const BT: i32,
        const LATENCY: i32,
        const ACT: i32,
        const HALVES: i32,
        const WIDTH: i32,
        const SPLIT: i32,
    >(
        y: *mut O,
        x: *mut E,
        w: *mut E,
        bias: *mut E,
        has_bias: i32,
        t: i32,
        width: i32,
        k: i32,
        k_split: i32,
        alpha_p: f32,
        alpha_n: f32,
        beta: f32,
        eps: f32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        // No kernel writes weights: their first loads need not wait.
        let w_view: Tensor<E, { [-1, -1, -1] }> =
            page_pool(w, HALVES, width, k, new_token_unordered());
        let x_view: Tensor<E, { [-1, -1] }> = matrix(x, t, k, k, free);
        let w_part: Partition<E, { [HALVES, WIDTH, BK] }> =
            w_view.partition(shape![HALVES, WIDTH, BK]);
        let x_part: Partition<E, { [BT, BK] }> = x_view.partition(shape![BT, BK]);
        let steps: i32 = ceil_div(k, BK);
        let mut sum: Tile<f32, { [BT, BN] }> = constant(0.0f32, shape![BT, BN]);
        if SPLIT != 1 {
            let mut first: i32 = 0;
            let mut last: i32 = steps;
            if SPLIT == 2 {
                first = pid.2 * (k_split / BK);
                last = min(first + k_split / BK, steps);
            }
            for i in first..last {
                let a: Tile<E, { [BT, BK] }> = x_part.load_pipelined::<LATENCY>([pid.0, i]);
                let b: Tile<E, { [HALVES, WIDTH, BK] }> =
                    w_part.load_pipelined::<LATENCY>([0i32, pid.1, i]);
                let b: Tile<E, { [BN, BK] }> = b.reshape(shape![BN, BK]);
                let b: Tile<E, { [BK, BN] }> = b.transpose();
                sum = mma(a, b, sum);
            }
        } else {
            let per_split: i32 = k_split / BK;
            for s in 0i32..ceil_div(steps, per_split) {
                let mut acc: Tile<f32, { [BT, BN] }> = constant(0.0f32, shape![BT, BN]);
                for i in (s * per_split)..min(s * per_split + per_split, steps) {
                    let a: Tile<E, { [BT, BK] }> = x_part.load_pipelined::<LATENCY>([pid.0, i]);
                    let b: Tile<E, { [HALVES, WIDTH, BK] }> =
                        w_part.load_pipelined::<LATENCY>([0i32, pid.1, i]);
                    let b: Tile<E, { [BN, BK] }> = b.reshape(shape![BN, BK]);
                    let b: Tile<E, { [BK, BN] }> = b.transpose();
                    acc = mma(a, b, acc);
                }
                sum = sum + acc;
            }
        }
        if SPLIT == 2 {
            let grid: (i32, i32, i32) = get_num_tile_blocks();
            let p_view: Tensor<O, { [-1, -1, -1] }> = page_pool(y, grid.2, t, width, free);
            let mut p_part: PartitionMut<O, { [1, BT, BN] }> =
                p_view.partition_full_mut(shape![1, BT, BN]);
            let plane: Tile<O, { [BT, BN] }> = convert_tile(sum);
            p_part.store_unchecked(plane.reshape(shape![1, BT, BN]), [pid.2, pid.0, pid.1]);
        } else {
            if has_bias == 1 {
                let b: Tile<f32, { [1, BN] }> =
                    row_vector::<E, BN, HALVES, WIDTH>(bias, width, pid.1, free);
                sum = sum + b.broadcast(shape![BT, BN]);
            }
            let y_view: Tensor<O, { [-1, -1] }> = matrix(y, t, width, width, free);
            let mut y_part: PartitionMut<O, { [BT, WIDTH] }> =
                y_view.partition_full_mut(shape![BT, WIDTH]);
            let out: Tile<f32, { [BT, HALVES, WIDTH] }> = sum.reshape(shape![BT, HALVES, WIDTH]);
            let first: Tile<i32, { [] }> = scalar_to_tile(0i32);
            let mut value: Tile<f32, { [BT, 1, WIDTH] }> = extract(out, [first, first, first]);
            if ACT == 1 {
                let second: Tile<i32, { [] }> = scalar_to_tile(1i32);
                let up: Tile<f32, { [BT, 1, WIDTH] }> = extract(out, [first, second, first]);
                value = gated_silu::<BT, 1, WIDTH>(value, up);
            }
            if ACT == 2 {
                value = curve::<BT, 1, WIDTH>(value, alpha_p, alpha_n, beta, eps);
            }
            let out: Tile<O, { [BT, 1, WIDTH] }> = convert_tile(value);
            y_part.store_unchecked(out.reshape(shape![BT, WIDTH]), [pid.0, pid.1]);
        }
    }
}
