//! RMSNorm (arXiv:1910.07467), alone and after a residual update. A row, or a few narrow ones, a block;
//! the tile is as wide as the row, so one sum in one order serves every number of rows.

#[cutile::module]
#[allow(missing_docs)]
pub mod norm {
    use super::super::bytes::bytes::*;
    use super::super::views::views::*;
    use cutile::core::*;

    /// `out = rms_norm(x) * weight`; with `DELTA` = 1, `x += delta` (written back) before. With `BYTES` = 1
    /// what is written to `out` also goes to `bytes` and `scales`, as int8 weights take it.
    /// Grid: (rows / R).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn rms_norm<
        X: ElementType,
        E: ElementType,
        const R: i32,
        const W: i32,
        const DELTA: i32,
        const BYTES: i32,
    >(
        out: *mut E,
        bytes: *mut i8,
        scales: *mut f32,
        x: *mut X,
        delta: *mut X,
        weight: *mut E,
        rows: i32,
        width: i32,
        eps: f32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start_early();
        let x_view: Tensor<X, { [-1, -1] }> = matrix(x, rows, width, width, free);
        let x_part: Partition<X, { [R, W] }> = x_view.partition(shape![R, W]);
        let value: Tile<X, { [R, W] }> = x_part.load([pid.0, 0i32]);
        let mut value: Tile<f32, { [R, W] }> = convert_tile(value);
        if DELTA == 1 {
            let d_view: Tensor<X, { [-1, -1] }> = matrix(delta, rows, width, width, free);
            let d_part: Partition<X, { [R, W] }> = d_view.partition(shape![R, W]);
            let change: Tile<X, { [R, W] }> = d_part.load([pid.0, 0i32]);
            let change: Tile<f32, { [R, W] }> = convert_tile(change);
            let sum: Tile<X, { [R, W] }> = convert_tile(value + change);
            let mut s_part: PartitionMut<X, { [R, W] }> = x_view.partition_full_mut(shape![R, W]);
            s_part.store_unchecked(sum, [pid.0, 0i32]);
            value = convert_tile(sum);
        }
        let squares: Tile<f32, { [R] }> = reduce_sum(value * value, 1);
        let mean: Tile<f32, { [R] }> = true_div(
            squares,
            broadcast_scalar(convert_scalar::<f32>(width), shape![R]),
        );
        let scale: Tile<f32, { [R] }> =
            rsqrt(mean + broadcast_scalar(eps, shape![R]), ftz::Disabled);
        let scale: Tile<f32, { [R, 1] }> = scale.reshape(shape![R, 1]);
        let w_view: Tensor<E, { [-1, -1] }> = matrix(weight, 1, width, width, free);
        let w_part: Partition<E, { [1, W] }> = w_view.partition(shape![1, W]);
        let w: Tile<E, { [1, W] }> = w_part.load([0i32, 0i32]);
        let w: Tile<f32, { [1, W] }> = convert_tile(w);
        let normed: Tile<f32, { [R, W] }> =
            value * scale.broadcast(shape![R, W]) * w.broadcast(shape![R, W]);
        let normed: Tile<E, { [R, W] }> = convert_tile(normed);
        let out_view: Tensor<E, { [-1, -1] }> = matrix(out, rows, width, width, free);
        let mut out_part: PartitionMut<E, { [R, W] }> = out_view.partition_full_mut(shape![R, W]);
        out_part.store_unchecked(normed, [pid.0, 0i32]);
        if BYTES == 1 {
            let rounded: Tile<f32, { [R, W] }> = convert_tile(normed);
            store_rounded::<R, W>(bytes, scales, rounded, pid.0, rows, width, free);
        }
    }
}
