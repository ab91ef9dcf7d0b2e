//! RMSNorm (arXiv:1910.07467), alone and after a residual update. A row, or a few narrow ones, a block;
//! the tile is as wide as the row, so one sum in one order serves every number of rows.

#[cutile::module]
#[allow(missing_docs)]
pub mod norm {
    use super::super::bytes::bytes::*;
    use super::super::exact::exact::*;
    use super::super::views::views::*;
    use cutile::core::*;

    /// The numbers of a vector as wide as a row, and the token of the load.
    ///
    /// # Safety
    /// `base` holds it.
    unsafe fn wide_vector<T: ElementType, const W: i32>(
        base: *mut T,
        width: i32,
        free: Token,
    ) -> (Tile<f32, { [1, W] }>, Token) {
        let column: Tile<i32, { [1, W] }> = column_numbers::<1, W>();
        let inside: Tile<bool, { [1, W] }> = lt_tile(column, broadcast_scalar(width, shape![1, W]));
        let (values, asked): (Tile<T, { [1, W] }>, Token) =
            load_live::<T, 1, W>(base, column, inside, free);
        let values: Tile<f32, { [1, W] }> = convert_tile(values);
        (values, asked)
    }

    /// `out = rms_norm(x) * weight`; with `PLANES` > 0, `x += delta` (written back) before. A delta is the sum of up to
    /// `PLANES` planes, the splits of a layer that left them apart, and of its bias. With `INTEGERS` = 1 the splits are
    /// those of an int8 weight, two planes each, in `sums`. Grid: (rows / R).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn rms_norm<
        X: ElementType,
        E: ElementType,
        const R: i32,
        const W: i32,
        const PLANES: i32,
        const INTEGERS: i32,
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
        signal_early();
        let pid: (i32, i32, i32) = get_tile_block_id();
        let row: Tile<i32, { [R, W] }> =
            row_numbers::<R, W>() + broadcast_scalar(pid.0 * R, shape![R, W]);
        let column: Tile<i32, { [R, W] }> = column_numbers::<R, W>();
        let live: Tile<bool, { [R, W] }> = lt_tile(row, broadcast_scalar(rows, shape![R, W]))
            & lt_tile(column, broadcast_scalar(width, shape![R, W]));
        let offsets: Tile<i32, { [R, W] }> = row * broadcast_scalar(width, shape![R, W]) + column;
        let size: i32 = rows * width;
        // No kernel writes weights: they are asked for before the wait.
        let given: Token = new_token_unordered();
        let (w, asked): (Tile<f32, { [1, W] }>, Token) = wide_vector::<E, W>(weight, width, given);
        let mut s: Tile<f32, { [1, W] }> = constant(0.0f32, shape![1, W]);
        let mut asked: Token = asked;
        if INTEGERS == 1 {
            let (scales, both): (Tile<f32, { [1, W] }>, Token) =
                wide_vector::<f32, W>(weight_scales, width, asked);
            s = scales;
            asked = both;
        }
        let free: Token = wait_after(asked);
        // One load after the other, so that all are under way before the first is used.
        let (value, free): (Tile<X, { [R, W] }>, Token) =
            load_live::<X, R, W>(x, offsets, live, free);
        let mut value: Tile<f32, { [R, W] }> = convert_tile(value);
        if PLANES > 0 {
            let mut change: Tile<f32, { [R, W] }> = constant(0.0f32, shape![R, W]);
            if INTEGERS == 1 {
                let planes: i32 = 2i32 * splits;
                let high: Tile<i32, { [R, W] }> = summed::<i32, PLANES, R, W>(
                    sums, 0i32, 2i32, planes, size, offsets, live, free,
                );
                let low: Tile<i32, { [R, W] }> = summed::<i32, PLANES, R, W>(
                    sums, 1i32, 2i32, planes, size, offsets, live, free,
                );
                let first: Tile<i32, { [R, 1] }> =
                    row_numbers::<R, 1>() + broadcast_scalar(pid.0 * R, shape![R, 1]);
                let there: Tile<bool, { [R, 1] }> =
                    lt_tile(first, broadcast_scalar(rows, shape![R, 1]));
                let (t, _token): (Tile<f32, { [R, 1] }>, Token) =
                    load_live::<f32, R, 1>(row_scales, first, there, free);
                let scale: Tile<f32, { [R, W] }> =
                    times::<R, W>(t.broadcast(shape![R, W]), s.broadcast(shape![R, W]));
                change = times::<R, W>(joined::<R, W>(high, low), scale);
            } else {
                let sum: Tile<X, { [R, W] }> =
                    summed::<X, PLANES, R, W>(delta, 0i32, 1i32, splits, size, offsets, live, free);
                change = convert_tile(sum);
            }
            if has_bias == 1 {
                let (b, _token): (Tile<f32, { [1, W] }>, Token) =
                    wide_vector::<E, W>(bias, width, free);
                change = change + b.broadcast(shape![R, W]);
            }
            let sum: Tile<X, { [R, W] }> = convert_tile(value + change);
            store_live::<X, R, W>(x, offsets, live, sum, free);
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
        let normed: Tile<f32, { [R, W] }> =
            value * scale.broadcast(shape![R, W]) * w.broadcast(shape![R, W]);
        let normed: Tile<E, { [R, W] }> = convert_tile(normed);
        store_live::<E, R, W>(out, offsets, live, normed, free);
    }
}
