//! The activation between the two linears of an MLP, in f32 and rounded once.

#[cutile::module]
#[allow(missing_docs)]
pub mod activation {
    use super::super::views::views::*;
    use cutile::core::*;

    /// `silu(gate) * up`.
    pub fn gated_silu<const A: i32, const B: i32, const C: i32>(
        gate: Tile<f32, { [A, B, C] }>,
        up: Tile<f32, { [A, B, C] }>,
    ) -> Tile<f32, { [A, B, C] }> {
        let one: Tile<f32, { [A, B, C] }> = constant(1.0f32, shape![A, B, C]);
        let zero: Tile<f32, { [A, B, C] }> = constant(0.0f32, shape![A, B, C]);
        true_div(gate, one + exp(zero - gate)) * up
    }

    /// xIELU (arXiv:2411.13010). Near zero `expm1(x) - x` is a
    /// Taylor polynomial: the difference of two close numbers would lose its digits.
    pub fn curve<const A: i32, const B: i32, const C: i32>(
        value: Tile<f32, { [A, B, C] }>,
        alpha_p: f32,
        alpha_n: f32,
        beta: f32,
        eps: f32,
    ) -> Tile<f32, { [A, B, C] }> {
        let zero: Tile<f32, { [A, B, C] }> = constant(0.0f32, shape![A, B, C]);
        let one: Tile<f32, { [A, B, C] }> = constant(1.0f32, shape![A, B, C]);
        let slope: Tile<f32, { [A, B, C] }> = broadcast_scalar(beta, shape![A, B, C]);
        let positive: Tile<f32, { [A, B, C] }> =
            broadcast_scalar(alpha_p, shape![A, B, C]) * value * value;

        let low: Tile<f32, { [A, B, C] }> = min_tile(value, broadcast_scalar(eps, shape![A, B, C]));
        let far: Tile<f32, { [A, B, C] }> = exp(low) - one;
        let c3: Tile<f32, { [A, B, C] }> = constant(0.16666667f32, shape![A, B, C]);
        let c4: Tile<f32, { [A, B, C] }> = constant(0.041666668f32, shape![A, B, C]);
        let c5: Tile<f32, { [A, B, C] }> = constant(0.008333334f32, shape![A, B, C]);
        let c6: Tile<f32, { [A, B, C] }> = constant(0.0013888889f32, shape![A, B, C]);
        let half: Tile<f32, { [A, B, C] }> = constant(0.5f32, shape![A, B, C]);
        let near: Tile<f32, { [A, B, C] }> =
            low + low * low * (half + low * (c3 + low * (c4 + low * (c5 + low * c6))));
        let edge: Tile<f32, { [A, B, C] }> = constant(-0.5f32, shape![A, B, C]);
        let expm1: Tile<f32, { [A, B, C] }> = select(gt_tile(low, edge), near, far);
        let negative: Tile<f32, { [A, B, C] }> =
            (expm1 - value) * broadcast_scalar(alpha_n, shape![A, B, C]);
        select(gt_tile(value, zero), positive, negative) + slope * value
    }

    /// `out = silu(gate) * up` of rows that hold `width` gate values, then `width` up values.
    /// Grid: (width / W, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn silu_gated<E: ElementType, const W: i32>(
        out: *mut E,
        x: *mut f32,
        rows: i32,
        width: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start_early();
        // Gate and up halves as the even and the odd rows of one matrix.
        let x_view: Tensor<f32, { [-1, -1] }> = matrix(x, rows * 2, width, width, free);
        let x_part: Partition<f32, { [1, W] }> = x_view.partition(shape![1, W]);
        let gate: Tile<f32, { [1, W] }> = x_part.load([pid.1 * 2, pid.0]);
        let up: Tile<f32, { [1, W] }> = x_part.load([pid.1 * 2 + 1, pid.0]);
        let value: Tile<f32, { [1, 1, W] }> =
            gated_silu::<1, 1, W>(gate.reshape(shape![1, 1, W]), up.reshape(shape![1, 1, W]));
        let value: Tile<f32, { [1, W] }> = value.reshape(shape![1, W]);
        let value: Tile<E, { [1, W] }> = convert_tile(value);
        let out_view: Tensor<E, { [-1, -1] }> = matrix(out, rows, width, width, free);
        let mut out_part: PartitionMut<E, { [1, W] }> = out_view.partition_full_mut(shape![1, W]);
        out_part.store_unchecked(value, [pid.1, pid.0]);
    }

    /// xIELU of `count` values. Grid: (count / W).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn xielu<E: ElementType, const W: i32>(
        out: *mut E,
        x: *mut f32,
        count: i32,
        alpha_p: f32,
        alpha_n: f32,
        beta: f32,
        eps: f32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start_early();
        let x_view: Tensor<f32, { [-1, -1] }> = matrix(x, 1, count, count, free);
        let x_part: Partition<f32, { [1, W] }> = x_view.partition(shape![1, W]);
        let value: Tile<f32, { [1, W] }> = x_part.load([0i32, pid.0]);
        let value: Tile<f32, { [1, 1, W] }> =
            curve::<1, 1, W>(value.reshape(shape![1, 1, W]), alpha_p, alpha_n, beta, eps);
        let value: Tile<f32, { [1, W] }> = value.reshape(shape![1, W]);
        let result: Tile<E, { [1, W] }> = convert_tile(value);
        let out_view: Tensor<E, { [-1, -1] }> = matrix(out, 1, count, count, free);
        let mut out_part: PartitionMut<E, { [1, W] }> = out_view.partition_full_mut(shape![1, W]);
        out_part.store_unchecked(result, [0i32, pid.0]);
    }
}
