//! Moving rows about: embedding and other gathers, the residual add, tokens of the step before.

#[cutile::module]
#[allow(missing_docs)]
pub mod rows {
    use super::super::views::views::*;
    use cutile::core::*;

    /// `out[r] = table[indices[r]]`. Grid: (width / W, rows of out).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn gather<E: ElementType, O: ElementType, const W: i32>(
        out: *mut O,
        table: *mut E,
        indices: *mut i32,
        rows: i32,
        table_rows: i32,
        width: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let index: i32 = scalar_at(free, indices, pid.1);
        let from_view: Tensor<E, { [-1, -1] }> = matrix(table, table_rows, width, width, free);
        let from: Partition<E, { [1, W] }> = from_view.partition(shape![1, W]);
        let row: Tile<E, { [1, W] }> = from.load([index, pid.0]);
        let row: Tile<O, { [1, W] }> = convert_tile(row);
        let out_view: Tensor<O, { [-1, -1] }> = matrix(out, rows, width, width, free);
        let mut out_part: PartitionMut<O, { [1, W] }> = out_view.partition_full_mut(shape![1, W]);
        out_part.store_unchecked(row, [pid.1, pid.0]);
    }

    /// `out[:, to..] = x[:, from..]` for `columns` columns of every row; the pointers are those of the first
    /// column, `out_width` and `x_width` the distances of rows. Grid: (columns / W, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn copy_columns<E: ElementType, O: ElementType, const W: i32>(
        out: *mut O,
        x: *mut E,
        rows: i32,
        columns: i32,
        out_width: i32,
        x_width: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let x_view: Tensor<E, { [-1, -1] }> = matrix(x, rows, columns, x_width, free);
        let x_part: Partition<E, { [1, W] }> = x_view.partition(shape![1, W]);
        let row: Tile<E, { [1, W] }> = x_part.load([pid.1, pid.0]);
        let row: Tile<O, { [1, W] }> = convert_tile(row);
        let out_view: Tensor<O, { [-1, -1] }> = matrix(out, rows, columns, out_width, free);
        let mut out_part: PartitionMut<O, { [1, W] }> = out_view.partition_full_mut(shape![1, W]);
        out_part.store_unchecked(row, [pid.1, pid.0]);
    }

    /// `x += delta`, rounded, for `count` values. Grid: (count / W).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn add<X: ElementType, D: ElementType, const W: i32>(
        x: *mut X,
        delta: *mut D,
        count: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let x_view: Tensor<X, { [-1, -1] }> = matrix(x, 1, count, count, free);
        let x_part: Partition<X, { [1, W] }> = x_view.partition(shape![1, W]);
        let d_view: Tensor<D, { [-1, -1] }> = matrix(delta, 1, count, count, free);
        let d_part: Partition<D, { [1, W] }> = d_view.partition(shape![1, W]);
        let a: Tile<X, { [1, W] }> = x_part.load([0i32, pid.0]);
        let b: Tile<D, { [1, W] }> = d_part.load([0i32, pid.0]);
        let a: Tile<f32, { [1, W] }> = convert_tile(a);
        let b: Tile<f32, { [1, W] }> = convert_tile(b);
        let sum: Tile<X, { [1, W] }> = convert_tile(a + b);
        let mut out_part: PartitionMut<X, { [1, W] }> = x_view.partition_full_mut(shape![1, W]);
        out_part.store_unchecked(sum, [0i32, pid.0]);
    }

    /// `ids[rows[i]] = sampled[indices[i]]` for `count` pairs, rows and indices one after the other in
    /// `pairs`. Grid: (count / 128).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn take_tokens(
        ids: *mut i32,
        sampled: *mut i32,
        rows: *mut i32,
        indices: *mut i32,
        count: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let i: Tile<i32, { [1, 128] }> =
            broadcast_scalar(pid.0 * 128, shape![1, 128]) + column_numbers::<1, 128>();
        let there: Tile<bool, { [1, 128] }> = lt_tile(i, broadcast_scalar(count, shape![1, 128]));
        let nothing: Tile<i32, { [1, 128] }> = constant(0i32, shape![1, 128]);
        let (row, _t): (Tile<i32, { [1, 128] }>, Token) = load_ptr_tko(
            addresses(rows, i),
            ordering::Weak,
            None::<scope::Device>,
            Some(there),
            None,
            Some(free),
            Latency::<0>,
        );
        let (index, _t): (Tile<i32, { [1, 128] }>, Token) = load_ptr_tko(
            addresses(indices, i),
            ordering::Weak,
            None::<scope::Device>,
            Some(there),
            None,
            Some(free),
            Latency::<0>,
        );
        let row: Tile<i32, { [1, 128] }> = select(there, row, nothing);
        let index: Tile<i32, { [1, 128] }> = select(there, index, nothing);
        let (token, _t): (Tile<i32, { [1, 128] }>, Token) = load_ptr_tko(
            addresses(sampled, index),
            ordering::Weak,
            None::<scope::Device>,
            Some(there),
            None,
            Some(free),
            Latency::<0>,
        );
        let _stored: Token = store_ptr_tko(
            addresses(ids, row),
            token,
            ordering::Weak,
            None::<scope::Device>,
            Some(there),
            Some(free),
            Latency::<0>,
        );
    }
}
