//! RMSNorm (arXiv:1910.07467), alone and after a residual update. A row, or a few narrow ones, a block;
//! the tile is as wide as the row, so one sum in one order serves every number of rows.

#[cutile::module]
#[allow(missing_docs)]
pub mod norm {
    use super::super::bytes::bytes::*;
    use super::super::views::views::*;
    use cutile::core::*;

    /// The sum of planes from the first to the last, starting from zero, as the layer itself adds its splits. (Planes
    /// that are not there are zeros.)
    fn summed<T: ElementType, const PLANES: i32, const R: i32, const W: i32>(
        planes: Tile<T, { [PLANES, R, W] }>,
    ) -> Tile<T, { [R, W] }> {
        let mut sum: Tile<T, { [R, W] }> = constant(T::ZERO, shape![R, W]);
        sum = sum + plane::<T, PLANES, R, W>(planes, 0i32);
        if PLANES > 1 {
            sum = sum + plane::<T, PLANES, R, W>(planes, 1i32);
        }
        if PLANES > 2 {
            sum = sum + plane::<T, PLANES, R, W>(planes, 2i32);
            sum = sum + plane::<T, PLANES, R, W>(planes, 3i32);
        }
        if PLANES > 4 {
            sum = sum + plane::<T, PLANES, R, W>(planes, 4i32);
            sum = sum + plane::<T, PLANES, R, W>(planes, 5i32);
            sum = sum + plane::<T, PLANES, R, W>(planes, 6i32);
            sum = sum + plane::<T, PLANES, R, W>(planes, 7i32);
        }
        sum
    }

    /// One of the planes.
    fn plane<T: ElementType, const PLANES: i32, const R: i32, const W: i32>(
        planes: Tile<T, { [PLANES, R, W] }>,
        which: i32,
    ) -> Tile<T, { [R, W] }> {
        let zero: Tile<i32, { [] }> = scalar_to_tile(0i32);
        let which: Tile<i32, { [] }> = scalar_to_tile(which);
        let plane: Tile<T, { [1, R, W] }> = extract(planes, [which, zero, zero]);
        plane.reshape(shape![R, W])
    }

    /// The sum of `splits` planes `[rows, width]`, for the rows of a block.
    ///
    /// # Safety
    /// As for [`matrix`](views).
    unsafe fn planes_at<T: ElementType, const PLANES: i32, const R: i32, const W: i32>(
        planes: *mut T,
        splits: i32,
        rows: i32,
        width: i32,
        block: i32,
        free: Token,
    ) -> Tile<T, { [R, W] }> {
        let view: Tensor<T, { [-1, -1, -1] }> = page_pool(planes, splits, rows, width, free);
        let part: Partition<T, { [PLANES, R, W] }> = view.partition(shape![PLANES, R, W]);
        let planes: Tile<T, { [PLANES, R, W] }> = part.load([0i32, block, 0i32]);
        summed::<T, PLANES, R, W>(planes)
    }

    /// `out = rms_norm(x) * weight`; with `PLANES` > 0, `x += delta` (written back) before. A delta is the sum of up to
    /// `PLANES` planes, the splits of a layer that left them apart, and of its bias; with `SUMS` = 1 planes of integers,
    /// `high` and `low` as `few_int8` leaves them, of activations and weights with these scales. With `BYTES` = 1
    /// what is written to `out` also goes to `bytes` and `scales`, as int8 weights take it.
    /// Grid: (rows / R).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn rms_norm<
        X: ElementType,
        E: ElementType,
        const R: i32,
        const W: i32,
        const PLANES: i32,
        const SUMS: i32,
        const BYTES: i32,
    >(
        out: *mut E,
        bytes: *mut i8,
        scales: *mut f32,
        x: *mut X,
        delta: *mut X,
        high: *mut i32,
        low: *mut i32,
        y_scales: *mut f32,
        w_scales: *mut f32,
        splits: i32,
        bias: *mut E,
        has_bias: i32,
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
        if PLANES > 0 {
            let mut change: Tile<f32, { [R, W] }> = constant(0.0f32, shape![R, W]);
            if SUMS == 1 {
                let h: Tile<i32, { [R, W] }> =
                    planes_at::<i32, PLANES, R, W>(high, splits, rows, width, pid.0, free);
                let l: Tile<i32, { [R, W] }> =
                    planes_at::<i32, PLANES, R, W>(low, splits, rows, width, pid.0, free);
                let t_view: Tensor<f32, { [-1, -1] }> = matrix(y_scales, rows, 1i32, 1i32, free);
                let t_part: Partition<f32, { [R, 1] }> = t_view.partition(shape![R, 1]);
                let t: Tile<f32, { [R, 1] }> = t_part.load([pid.0, 0i32]);
                let s: Tile<f32, { [1, W] }> =
                    row_vector::<f32, W, 1, W>(w_scales, width, 0i32, free);
                let scale: Tile<f32, { [R, W] }> =
                    t.broadcast(shape![R, W]) * s.broadcast(shape![R, W]);
                change = joined::<R, W>(h, l) * scale;
            } else {
                let sum: Tile<X, { [R, W] }> =
                    planes_at::<X, PLANES, R, W>(delta, splits, rows, width, pid.0, free);
                change = convert_tile(sum);
            }
            if has_bias == 1 {
                let b: Tile<f32, { [1, W] }> = row_vector::<E, W, 1, W>(bias, width, 0i32, free);
                change = change + b.broadcast(shape![R, W]);
            }
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
        let w: Tile<f32, { [1, W] }> = row_vector::<E, W, 1, W>(weight, width, 0i32, free);
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
