//! RMSNorm (arXiv:1910.07467), alone and after a residual update. A row, or a few narrow ones, a block;
//! the tile is as wide as the row, so one sum in one order serves every number of rows.

#[cutile::module]
#[allow(missing_docs)]
pub mod norm {
    use super::super::bytes::bytes::*;
    use super::super::exact::exact::*;
    use super::super::views::views::*;
    use cutile::core::*;

    /// The sum of up to `PLANES` planes `[rows, width]` for the rows of a block, every `step`th of `planes` in memory, from
    /// `first` on: one after the other, starting from zero, as the layer itself adds its splits. (What is loaded past
    /// them is zeros.)
    ///
    /// # Safety
    /// As for [`matrix`](views).
    unsafe fn summed<
        T: ElementType,
        const PLANES: i32,
        const R: i32,
        const W: i32,
        const S: i32,
        const C: i32,
    >(
        base: *mut T,
        first: i32,
        step: i32,
        planes: i32,
        rows: i32,
        width: i32,
        block: i32,
        free: Token,
    ) -> Tile<T, { [R, W] }> {
        let view: Tensor<T, { [-1, -1, -1, -1] }> =
            in_stretches::<T, S, C>(base, planes, rows, width, free);
        let mut sum: Tile<T, { [R, W] }> = constant(T::ZERO, shape![R, W]);
        sum = sum + rows_of::<T, R, W, S, C>(&view, first, block);
        if PLANES > 1 {
            sum = sum + rows_of::<T, R, W, S, C>(&view, first + step, block);
        }
        if PLANES > 2 {
            sum = sum + rows_of::<T, R, W, S, C>(&view, first + 2i32 * step, block);
            sum = sum + rows_of::<T, R, W, S, C>(&view, first + 3i32 * step, block);
        }
        if PLANES > 4 {
            sum = sum + rows_of::<T, R, W, S, C>(&view, first + 4i32 * step, block);
            sum = sum + rows_of::<T, R, W, S, C>(&view, first + 5i32 * step, block);
            sum = sum + rows_of::<T, R, W, S, C>(&view, first + 6i32 * step, block);
            sum = sum + rows_of::<T, R, W, S, C>(&view, first + 7i32 * step, block);
        }
        sum
    }

    /// The numbers of a vector as wide as a row.
    ///
    /// # Safety
    /// As for [`matrix`](views).
    unsafe fn wide_vector<T: ElementType, const W: i32, const S: i32, const C: i32>(
        base: *mut T,
        width: i32,
        free: Token,
    ) -> Tile<f32, { [1, W] }> {
        let view: Tensor<T, { [-1, -1, -1, -1] }> =
            in_stretches::<T, S, C>(base, 1i32, 1i32, width, free);
        let values: Tile<T, { [1, W] }> = rows_of::<T, 1, W, S, C>(&view, 0i32, 0i32);
        convert_tile(values)
    }

    /// `out = rms_norm(x) * weight`; with `PLANES` > 0, `x += delta` (written back) before. A delta is the sum of up to
    /// `PLANES` planes, the splits of a layer that left them apart, and of its bias. With `INTEGERS` = 1 the splits are
    /// those of an int8 weight, two planes each, in `sums`. A row is `W` numbers in `S` stretches of `C`.
    /// Grid: (rows / R).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn rms_norm<
        X: ElementType,
        E: ElementType,
        const R: i32,
        const W: i32,
        const PLANES: i32,
        const INTEGERS: i32,
        const S: i32,
        const C: i32,
    >(
        out: *mut E,
        x: *mut X,
        delta: *mut X,
        sums: *mut i32,
        row_scales: *mut f32,
        weight_scales: *mut f32,
        splits: i32,
        bias: *mut E,
        has_bias: i32,
        weight: *mut E,
        rows: i32,
        width: i32,
        eps: f32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        // No kernel writes weights: what belongs to them is loaded before the wait, without TMA, which lays out the sums
        // below as it is for bf16 weights.
        let given: Token = new_token_unordered();
        let mut s: Tile<f32, { [1, W] }> = constant(0.0f32, shape![1, W]);
        if INTEGERS == 1 {
            let view: Tensor<f32, { [-1, -1, -1, -1] }> =
                in_stretches::<f32, S, C>(weight_scales, 1i32, 1i32, width, given);
            let part: Partition<f32, { [1, 1, S, C] }> = view.partition(shape![1, 1, S, C]);
            let values: Tile<f32, { [1, 1, S, C] }> = load_view_tko(
                &part,
                [0i32, 0i32, 0i32, 0i32],
                ordering::Weak,
                scope::TileBlock,
                None,
                tma::Disabled,
            );
            s = values.reshape(shape![1, W]);
        }
        let free: Token = start_early();
        let x_view: Tensor<X, { [-1, -1, -1, -1] }> =
            in_stretches::<X, S, C>(x, 1i32, rows, width, free);
        let value: Tile<X, { [R, W] }> = rows_of::<X, R, W, S, C>(&x_view, 0i32, pid.0);
        let mut value: Tile<f32, { [R, W] }> = convert_tile(value);
        if PLANES > 0 {
            let mut change: Tile<f32, { [R, W] }> = constant(0.0f32, shape![R, W]);
            if INTEGERS == 1 {
                let planes: i32 = 2i32 * splits;
                let high: Tile<i32, { [R, W] }> = summed::<i32, PLANES, R, W, S, C>(
                    sums, 0i32, 2i32, planes, rows, width, pid.0, free,
                );
                let low: Tile<i32, { [R, W] }> = summed::<i32, PLANES, R, W, S, C>(
                    sums, 1i32, 2i32, planes, rows, width, pid.0, free,
                );
                let t_view: Tensor<f32, { [-1, -1] }> = matrix(row_scales, rows, 1i32, 1i32, free);
                let t_part: Partition<f32, { [R, 1] }> = t_view.partition(shape![R, 1]);
                let t: Tile<f32, { [R, 1] }> = t_part.load([pid.0, 0i32]);
                let scale: Tile<f32, { [R, W] }> =
                    times::<R, W>(t.broadcast(shape![R, W]), s.broadcast(shape![R, W]));
                change = times::<R, W>(joined::<R, W>(high, low), scale);
            } else {
                let sum: Tile<X, { [R, W] }> = summed::<X, PLANES, R, W, S, C>(
                    delta, 0i32, 1i32, splits, rows, width, pid.0, free,
                );
                change = convert_tile(sum);
            }
            if has_bias == 1 {
                let b: Tile<f32, { [1, W] }> = wide_vector::<E, W, S, C>(bias, width, free);
                change = change + b.broadcast(shape![R, W]);
            }
            let sum: Tile<X, { [R, W] }> = convert_tile(value + change);
            store_rows::<X, R, W, S, C>(&x_view, sum, pid.0);
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
        let w: Tile<f32, { [1, W] }> = wide_vector::<E, W, S, C>(weight, width, free);
        let normed: Tile<f32, { [R, W] }> =
            value * scale.broadcast(shape![R, W]) * w.broadcast(shape![R, W]);
        let normed: Tile<E, { [R, W] }> = convert_tile(normed);
        let out_view: Tensor<E, { [-1, -1, -1, -1] }> =
            in_stretches::<E, S, C>(out, 1i32, rows, width, free);
        store_rows::<E, R, W, S, C>(&out_view, normed, pid.0);
    }
}
