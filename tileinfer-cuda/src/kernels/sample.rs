//! Choosing a token from a row of logits.

#[cutile::module]
#[allow(missing_docs)]
pub mod sample {
    use super::super::views::views::*;
    use cutile::core::*;

    /// The largest value of a stretch of a row and where it first stands, for [`argmax`](sample).
    /// Grid: (vocab / W, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn argmax_parts<const W: i32>(
        best: *mut f32,
        place: *mut i32,
        logits: *mut f32,
        rows: i32,
        vocab: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let grid: (i32, i32, i32) = get_num_tile_blocks();
        let view: Tensor<f32, { [-1, -1] }> = matrix(logits, rows, vocab, vocab, free);
        let part: Partition<f32, { [1, W] }> = view.partition(shape![1, W]);
        let value: Tile<f32, { [1, W] }> = part.load([pid.1, pid.0]);
        let number: Tile<i32, { [1, W] }> =
            column_numbers::<1, W>() + broadcast_scalar(pid.0 * W, shape![1, W]);
        let inside: Tile<bool, { [1, W] }> = lt_tile(number, broadcast_scalar(vocab, shape![1, W]));
        let least: Tile<f32, { [1, W] }> = constant(f32::NEG_INFINITY, shape![1, W]);
        let value: Tile<f32, { [1, W] }> = select(inside, value, least);
        let top: Tile<f32, { [1] }> = reduce_max(value, 1);
        let top: Tile<f32, { [1, 1] }> = top.reshape(shape![1, 1]);
        let far: Tile<i32, { [1, W] }> = constant(2147483647i32, shape![1, W]);
        let here: Tile<bool, { [1, W] }> = eq_tile(value, top.broadcast(shape![1, W])) & inside;
        let first: Tile<i32, { [1] }> = reduce_min(select(here, number, far), 1);
        let first: Tile<i32, { [1, 1] }> = first.reshape(shape![1, 1]);
        let to: Tile<i32, { [1, 1] }> = broadcast_scalar(pid.1 * grid.0 + pid.0, shape![1, 1]);
        let _stored: Token = store_ptr_tko(
            addresses(best, to),
            top,
            ordering::Weak,
            None::<scope::Device>,
            None,
            Some(free),
            Latency::<0>,
        );
        let _stored: Token = store_ptr_tko(
            addresses(place, to),
            first,
            ordering::Weak,
            None::<scope::Device>,
            None,
            Some(free),
            Latency::<0>,
        );
    }

    /// The token of each row from the parts of [`argmax_parts`](sample), the first among equals.
    /// `P` is no less than the number of parts. Grid: (rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn argmax<const P: i32>(tokens: *mut i32, best: *mut f32, place: *mut i32, parts: i32) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let number: Tile<i32, { [1, P] }> = column_numbers::<1, P>();
        let inside: Tile<bool, { [1, P] }> = lt_tile(number, broadcast_scalar(parts, shape![1, P]));
        let from: Tile<i32, { [1, P] }> = number + broadcast_scalar(pid.0 * parts, shape![1, P]);
        let (value, _t): (Tile<f32, { [1, P] }>, Token) = load_ptr_tko(
            addresses(best, from),
            ordering::Weak,
            None::<scope::Device>,
            Some(inside),
            None,
            Some(free),
            Latency::<0>,
        );
        let (index, _t): (Tile<i32, { [1, P] }>, Token) = load_ptr_tko(
            addresses(place, from),
            ordering::Weak,
            None::<scope::Device>,
            Some(inside),
            None,
            Some(free),
            Latency::<0>,
        );
        let least: Tile<f32, { [1, P] }> = constant(f32::NEG_INFINITY, shape![1, P]);
        let value: Tile<f32, { [1, P] }> = select(inside, value, least);
        let top: Tile<f32, { [1] }> = reduce_max(value, 1);
        let top: Tile<f32, { [1, 1] }> = top.reshape(shape![1, 1]);
        let far: Tile<i32, { [1, P] }> = constant(2147483647i32, shape![1, P]);
        let here: Tile<bool, { [1, P] }> = eq_tile(value, top.broadcast(shape![1, P])) & inside;
        let first: Tile<i32, { [1] }> = reduce_min(select(here, index, far), 1);
        let to: Tile<i32, { [1, 1] }> = broadcast_scalar(pid.0, shape![1, 1]);
        let _stored: Token = store_ptr_tko(
            addresses(tokens, to),
            first.reshape(shape![1, 1]),
            ordering::Weak,
            None::<scope::Device>,
            None,
            Some(free),
            Latency::<0>,
        );
    }
}
