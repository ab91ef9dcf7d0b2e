//! RMSNorm (arXiv:1910.07467), alone and after a residual update. A row, or a few narrow ones, a block;
//! the tile is as wide as the row, so one sum in one order serves every number of rows.

#[cutile::module]
#[allow(missing_docs)]
pub mod norm {
    use super::super::bytes::bytes::*;
    use super::super::views::views::*;
    use cutile::core::*;

    /// Planes of rows as a view of four axes: planes, rows, and a row in stretches of `C`, or whole (`S` = 1). A tile
    /// of stretches is one copy of TMA's, where one as wide as the row is a copy for every 128 bytes or 256 numbers.
    ///
    /// # Safety
    /// As for [`matrix`](views).
    unsafe fn in_stretches<T: ElementType, const S: i32, const C: i32>(
        base: *mut T,
        planes: i32,
        rows: i32,
        width: i32,
        free: Token,
    ) -> Tensor<T, { [-1, -1, -1, -1] }> {
        let plane: i32 = rows * width;
        let mut stretches: i32 = 1;
        let mut length: i32 = width;
        if S > 1 {
            stretches = width / C;
            length = C;
        }
        let shape: Shape<{ [-1, -1, -1, -1] }> = Shape::<{ [-1, -1, -1, -1] }> {
            dims: &[planes, rows, stretches, length],
        };
        let strides: Array<{ [-1, -1, -1, 1] }> = Array::<{ [-1, -1, -1, 1] }> {
            dims: &[plane, width, length],
        };
        let base: PointerTile<*mut T, { [] }> = pointer_to_tile(base);
        make_tensor_view(base, shape, strides, free)
    }

    /// The rows of a block, of one plane.
    fn rows_of<T: ElementType, const R: i32, const W: i32, const S: i32, const C: i32>(
        view: &Tensor<T, { [-1, -1, -1, -1] }>,
        plane: i32,
        block: i32,
    ) -> Tile<T, { [R, W] }> {
        let part: Partition<T, { [1, R, S, C] }> = view.partition(shape![1, R, S, C]);
        let rows: Tile<T, { [1, R, S, C] }> = part.load([plane, block, 0i32, 0i32]);
        rows.reshape(shape![R, W])
    }

    /// Writes the rows of a block.
    ///
    /// # Safety
    /// As for [`matrix`](views).
    unsafe fn store_rows<T: ElementType, const R: i32, const W: i32, const S: i32, const C: i32>(
        view: &Tensor<T, { [-1, -1, -1, -1] }>,
        rows: Tile<T, { [R, W] }>,
        block: i32,
    ) {
        let mut part: PartitionMut<T, { [1, R, S, C] }> =
            view.partition_full_mut(shape![1, R, S, C]);
        part.store_unchecked(rows.reshape(shape![1, R, S, C]), [0i32, block, 0i32, 0i32]);
    }

    /// The sum of up to `PLANES` planes `[rows, width]`, `splits` of them, for the rows of a block: from the first to the
    /// last, starting from zero, as the layer itself adds its splits. (What is loaded past them is zeros.)
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
        planes: *mut T,
        splits: i32,
        rows: i32,
        width: i32,
        block: i32,
        free: Token,
    ) -> Tile<T, { [R, W] }> {
        let view: Tensor<T, { [-1, -1, -1, -1] }> =
            in_stretches::<T, S, C>(planes, splits, rows, width, free);
        let mut sum: Tile<T, { [R, W] }> = constant(T::ZERO, shape![R, W]);
        sum = sum + rows_of::<T, R, W, S, C>(&view, 0i32, block);
        if PLANES > 1 {
            sum = sum + rows_of::<T, R, W, S, C>(&view, 1i32, block);
        }
        if PLANES > 2 {
            sum = sum + rows_of::<T, R, W, S, C>(&view, 2i32, block);
            sum = sum + rows_of::<T, R, W, S, C>(&view, 3i32, block);
        }
        if PLANES > 4 {
            sum = sum + rows_of::<T, R, W, S, C>(&view, 4i32, block);
            sum = sum + rows_of::<T, R, W, S, C>(&view, 5i32, block);
            sum = sum + rows_of::<T, R, W, S, C>(&view, 6i32, block);
            sum = sum + rows_of::<T, R, W, S, C>(&view, 7i32, block);
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
    /// `PLANES` planes, the splits of a layer that left them apart, and of its bias. With `BYTES` = 1 what is written to
    /// `out` also goes to `bytes` and `scales`, as int8 weights take it. A row is `W` numbers in `S` stretches of `C`.
    /// Grid: (rows / R).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn rms_norm<
        X: ElementType,
        E: ElementType,
        const R: i32,
        const W: i32,
        const PLANES: i32,
        const BYTES: i32,
        const S: i32,
        const C: i32,
    >(
        out: *mut E,
        bytes: *mut i8,
        scales: *mut f32,
        x: *mut X,
        delta: *mut X,
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
        let x_view: Tensor<X, { [-1, -1, -1, -1] }> =
            in_stretches::<X, S, C>(x, 1i32, rows, width, free);
        let value: Tile<X, { [R, W] }> = rows_of::<X, R, W, S, C>(&x_view, 0i32, pid.0);
        let mut value: Tile<f32, { [R, W] }> = convert_tile(value);
        if PLANES > 0 {
            let sum: Tile<X, { [R, W] }> =
                summed::<X, PLANES, R, W, S, C>(delta, splits, rows, width, pid.0, free);
            let mut change: Tile<f32, { [R, W] }> = convert_tile(sum);
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
        if BYTES == 1 {
            let rounded: Tile<f32, { [R, W] }> = convert_tile(normed);
            store_rounded::<R, W>(bytes, scales, rounded, pid.0, rows, width, free);
        }
    }
}
