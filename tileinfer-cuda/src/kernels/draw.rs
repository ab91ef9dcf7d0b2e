//! Drawing a token from a row of logits as `tileinfer::sampling` does, to the bit.
//!
//! A row is cut into parts of 4096 logits, the blocks of `math::sum`, and every kernel but the last has a
//! block of threads for each part of each row. A row's numbers are 24 words of `table` (`sampling::Word`
//! names them), what the kernels find out of it is 8 words of `state`:
//! 0 lowest rank that a threshold may still have, 1 budget of the search, 2 sum above the threshold,
//! 3 rank that top-k cuts at, 4 rank that top-p cuts at. Ranks are those of `exact::rank`.
//!
//! Both filters keep what lies above the smallest rank x with A(x) < budget, where A(x) sums what lies above
//! x: ones for top-k, weights for top-p. `search` finds 4 bits of that rank from 16 sums a launch.
//!
//! A row that draws a draft or verifies one leaves its filtered weights in `weights`, 0 for tokens that are out.
//! Divided by their sum they are its distribution p. `list` collects that of a draft; `redraw` draws what comes
//! where a draft is rejected, and `choose` decides. What the draft was drawn from, q, is a row of `drafted`.

#[cutile::module]
#[allow(missing_docs)]
pub mod draw {
    use super::super::exact::exact::*;
    use super::super::views::views::*;
    use cutile::core::*;

    /// Writes one number.
    unsafe fn put<E: ElementType>(
        base: *mut E,
        index: i32,
        value: Tile<E, { [1, 1] }>,
        free: Token,
    ) {
        let to: Tile<i32, { [1, 1] }> = broadcast_scalar(index, shape![1, 1]);
        let _stored: Token = store_ptr_tko(
            addresses(base, to),
            value,
            ordering::Weak,
            None::<scope::Device>,
            None,
            Some(free),
            Latency::<0>,
        );
    }

    /// `base[first..first + count]`, then whatever `filler` is.
    unsafe fn run<E: ElementType, const C: i32>(
        base: *mut E,
        first: i32,
        count: i32,
        filler: Tile<E, { [1, C] }>,
        free: Token,
    ) -> Tile<E, { [1, C] }> {
        let number: Tile<i32, { [1, C] }> = column_numbers::<1, C>();
        let inside: Tile<bool, { [1, C] }> = lt_tile(number, broadcast_scalar(count, shape![1, C]));
        let from: Tile<i32, { [1, C] }> = number + broadcast_scalar(first, shape![1, C]);
        let (value, _t): (Tile<E, { [1, C] }>, Token) = load_ptr_tko(
            addresses(base, from),
            ordering::Weak,
            None::<scope::Device>,
            Some(inside),
            None,
            Some(free),
            Latency::<0>,
        );
        select(inside, value, filler)
    }

    /// The largest of a row of numbers.
    fn largest<E: ElementType, const C: i32>(value: Tile<E, { [1, C] }>) -> Tile<E, { [1, 1] }> {
        let value: Tile<E, { [1] }> = reduce_max(value, 1);
        value.reshape(shape![1, 1])
    }

    /// The smallest of a row of integers.
    fn smallest<const C: i32>(value: Tile<i32, { [1, C] }>) -> Tile<i32, { [1, 1] }> {
        let value: Tile<i32, { [1] }> = reduce_min(value, 1);
        value.reshape(shape![1, 1])
    }

    /// Which of those inside have the best score, and of these the highest rank.
    fn winners<const C: i32>(
        score: Tile<f32, { [1, C] }>,
        rank: Tile<i32, { [1, C] }>,
        inside: Tile<bool, { [1, C] }>,
    ) -> Tile<bool, { [1, C] }> {
        let best: Tile<f32, { [1, 1] }> = largest::<f32, C>(score);
        let here: Tile<bool, { [1, C] }> = eq_tile(score, best.broadcast(shape![1, C])) & inside;
        let least: Tile<i32, { [1, C] }> = constant(-2147483648i32, shape![1, C]);
        let high: Tile<i32, { [1, 1] }> = largest::<i32, C>(select(here, rank, least));
        eq_tile(rank, high.broadcast(shape![1, C])) & here
    }

    /// The sums of `count` rows of `R` numbers from the row `first` on, added one after the other.
    unsafe fn added<const R: i32>(
        base: *mut f32,
        first: i32,
        count: i32,
        free: Token,
    ) -> Tile<f32, { [R, 1] }> {
        let column: Tile<i32, { [R, 1] }> = row_numbers::<R, 1>();
        let mut total: Tile<f32, { [R, 1] }> = number::<R, 1>(0i32);
        for i in 0i32..count {
            let at: Tile<i32, { [R, 1] }> =
                broadcast_scalar((first + i) * R, shape![R, 1]) + column;
            let (value, _t): (Tile<f32, { [R, 1] }>, Token) = load_ptr_tko(
                addresses(base, at),
                ordering::Weak,
                None::<scope::Device>,
                None,
                None,
                Some(free),
                Latency::<0>,
            );
            total = plus::<R, 1>(total, value);
        }
        total
    }

    /// The largest logit of a row.
    unsafe fn row_top<const P: i32>(
        maxima: *mut f32,
        row: i32,
        parts: i32,
        free: Token,
    ) -> Tile<f32, { [1, 1] }> {
        let least: Tile<f32, { [1, P] }> = constant(f32::NEG_INFINITY, shape![1, P]);
        largest::<f32, P>(run::<f32, P>(maxima, row * parts, parts, least, free))
    }

    /// A part of a row of logits: -inf from the `limit` on.
    unsafe fn part_of<const W: i32>(
        logits: *mut f32,
        first: i32,
        number: i32,
        limit: i32,
        free: Token,
    ) -> Tile<f32, { [1, W] }> {
        let least: Tile<f32, { [1, W] }> = constant(f32::NEG_INFINITY, shape![1, W]);
        run::<f32, W>(logits, first + number, limit - number, least, free)
    }

    /// Adds biases and takes off penalties. An entry is four words: the row of the table, the token, the bias
    /// and how often the token stands in the output, -1 for tokens without penalties. No two entries of a
    /// launch name the same logit. Grid: (count / 128).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn adjust(logits: *mut f32, entries: *mut i32, table: *mut i32, vocab: i32, count: i32) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let i: Tile<i32, { [1, 128] }> =
            broadcast_scalar(pid.0 * 128, shape![1, 128]) + column_numbers::<1, 128>();
        let there: Tile<bool, { [1, 128] }> = lt_tile(i, broadcast_scalar(count, shape![1, 128]));
        let nothing: Tile<i32, { [1, 128] }> = constant(0i32, shape![1, 128]);
        let four: Tile<i32, { [1, 128] }> = constant(4i32, shape![1, 128]);
        let at: Tile<i32, { [1, 128] }> = select(there, i * four, nothing);
        let row: Tile<i32, { [1, 128] }> = gathered(entries, at, 0i32, free);
        let id: Tile<i32, { [1, 128] }> = gathered(entries, at, 1i32, free);
        let bias: Tile<i32, { [1, 128] }> = gathered(entries, at, 2i32, free);
        let seen: Tile<i32, { [1, 128] }> = gathered(entries, at, 3i32, free);
        let width: Tile<i32, { [1, 128] }> = constant(24i32, shape![1, 128]);
        let words: Tile<i32, { [1, 128] }> = row * width;
        let source: Tile<i32, { [1, 128] }> = gathered(table, words, 8i32, free);
        let repetition: Tile<i32, { [1, 128] }> = gathered(table, words, 11i32, free);
        let reciprocal: Tile<i32, { [1, 128] }> = gathered(table, words, 12i32, free);
        let presence: Tile<i32, { [1, 128] }> = gathered(table, words, 13i32, free);
        let frequency: Tile<i32, { [1, 128] }> = gathered(table, words, 14i32, free);
        let bias: Tile<f32, { [1, 128] }> = bitcast(bias);
        let repetition: Tile<f32, { [1, 128] }> = bitcast(repetition);
        let reciprocal: Tile<f32, { [1, 128] }> = bitcast(reciprocal);
        let presence: Tile<f32, { [1, 128] }> = bitcast(presence);
        let frequency: Tile<f32, { [1, 128] }> = bitcast(frequency);

        let place: Tile<i32, { [1, 128] }> = source * broadcast_scalar(vocab, shape![1, 128]) + id;
        let (logit, _t): (Tile<f32, { [1, 128] }>, Token) = load_ptr_tko(
            addresses(logits, place),
            ordering::Weak,
            None::<scope::Device>,
            Some(there),
            None,
            Some(free),
            Latency::<0>,
        );
        let logit: Tile<f32, { [1, 128] }> = plus::<1, 128>(logit, bias);
        let zero: Tile<f32, { [1, 128] }> = number::<1, 128>(0i32);
        let factor: Tile<f32, { [1, 128] }> = select(gt_tile(logit, zero), reciprocal, repetition);
        let scaled: Tile<f32, { [1, 128] }> = times::<1, 128>(logit, factor);
        let count: Tile<f32, { [1, 128] }> = convert_tile(seen);
        let off: Tile<f32, { [1, 128] }> =
            plus::<1, 128>(times::<1, 128>(frequency, count), presence);
        let less: Tile<f32, { [1, 128] }> =
            select(gt_tile(seen, nothing), minus::<1, 128>(scaled, off), scaled);
        let logit: Tile<f32, { [1, 128] }> = select(ge_tile(seen, nothing), less, logit);
        let _stored: Token = store_ptr_tko(
            addresses(logits, place),
            logit,
            ordering::Weak,
            None::<scope::Device>,
            Some(there),
            Some(free),
            Latency::<0>,
        );
    }

    /// `base[at + offset]`.
    unsafe fn gathered<const C: i32>(
        base: *mut i32,
        at: Tile<i32, { [1, C] }>,
        offset: i32,
        free: Token,
    ) -> Tile<i32, { [1, C] }> {
        let from: Tile<i32, { [1, C] }> = at + broadcast_scalar(offset, shape![1, C]);
        let (value, _t): (Tile<i32, { [1, C] }>, Token) = load_ptr_tko(
            addresses(base, from),
            ordering::Weak,
            None::<scope::Device>,
            None,
            None,
            Some(free),
            Latency::<0>,
        );
        value
    }

    /// The largest logit of each part, and of its NaN and infinite ones the first: twice its id, and 1 if it
    /// is infinite. With `MASKED`, tokens that the row's mask does not name become -inf, in `logits` as well.
    /// Begins each row's state. Grid: (parts, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn survey<const W: i32, const MASKED: i32>(
        maxima: *mut f32,
        broken: *mut i32,
        state: *mut i32,
        logits: *mut f32,
        table: *mut i32,
        masks: *mut i32,
        vocab: i32,
        parts: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let words: i32 = pid.1 * 24;
        let limit: i32 = scalar_at(free, table, words + 7);
        let source: i32 = scalar_at(free, table, words + 8);
        let first: i32 = source * vocab;
        let mut value: Tile<f32, { [1, W] }> = part_of::<W>(logits, first, pid.0 * W, limit, free);
        let id: Tile<i32, { [1, W] }> =
            column_numbers::<1, W>() + broadcast_scalar(pid.0 * W, shape![1, W]);
        let bits: Tile<i32, { [1, W] }> = bitcast(value);
        let infinite: Tile<i32, { [1, W] }> = constant(0x7f80_0000i32, shape![1, W]);
        let others: Tile<i32, { [1, W] }> = constant(0x7fff_ffffi32, shape![1, W]);
        let plus_infinite: Tile<bool, { [1, W] }> = eq_tile(bits, infinite);
        let bad: Tile<bool, { [1, W] }> = gt_tile(bits & others, infinite) | plus_infinite;
        let least: Tile<f32, { [1, W] }> = constant(f32::NEG_INFINITY, shape![1, W]);
        if MASKED == 1 {
            let offset: i32 = scalar_at(free, table, words + 9);
            let count: i32 = scalar_at(free, table, words + 10);
            if offset >= 0 {
                let five: Tile<i32, { [1, W] }> = constant(5i32, shape![1, W]);
                let low: Tile<i32, { [1, W] }> = constant(31i32, shape![1, W]);
                let one: Tile<i32, { [1, W] }> = constant(1i32, shape![1, W]);
                let nothing: Tile<i32, { [1, W] }> = constant(0i32, shape![1, W]);
                let word: Tile<i32, { [1, W] }> = id >> five;
                let there: Tile<bool, { [1, W] }> =
                    lt_tile(word, broadcast_scalar(count, shape![1, W]));
                let from: Tile<i32, { [1, W] }> = word + broadcast_scalar(offset, shape![1, W]);
                let (word, _t): (Tile<i32, { [1, W] }>, Token) = load_ptr_tko(
                    addresses(masks, from),
                    ordering::Weak,
                    None::<scope::Device>,
                    Some(there),
                    None,
                    Some(free),
                    Latency::<0>,
                );
                let bit: Tile<i32, { [1, W] }> = (word >> (id & low)) & one;
                let allowed: Tile<bool, { [1, W] }> = gt_tile(bit, nothing) & there;
                value = select(allowed | bad, value, least);
                let to: Tile<i32, { [1, W] }> = id + broadcast_scalar(first, shape![1, W]);
                let inside: Tile<bool, { [1, W] }> =
                    lt_tile(id, broadcast_scalar(limit, shape![1, W]));
                let _stored: Token = store_ptr_tko(
                    addresses(logits, to),
                    value,
                    ordering::Weak,
                    None::<scope::Device>,
                    Some(inside),
                    Some(free),
                    Latency::<0>,
                );
            }
        }
        let top: Tile<f32, { [1, 1] }> = largest::<f32, W>(select(bad, least, value));
        let far: Tile<i32, { [1, W] }> = constant(2147483647i32, shape![1, W]);
        let one: Tile<i32, { [1, W] }> = constant(1i32, shape![1, W]);
        let nothing: Tile<i32, { [1, W] }> = constant(0i32, shape![1, W]);
        let code: Tile<i32, { [1, W] }> = id + id + select(plus_infinite, one, nothing);
        let code: Tile<i32, { [1, 1] }> = smallest::<W>(select(bad, code, far));
        let at: i32 = pid.1 * parts + pid.0;
        put::<f32>(maxima, at, top, free);
        put::<i32>(broken, at, code, free);
        if pid.0 == 0 {
            let least: Tile<i32, { [1, 1] }> = constant(-2147483648i32, shape![1, 1]);
            put::<i32>(state, pid.1 * 8, least, free);
            put::<i32>(state, pid.1 * 8 + 3, least, free);
            put::<i32>(state, pid.1 * 8 + 4, least, free);
        }
    }

    /// 4 bits of the rank that top-k (`WEIGHTED` = 0) or top-p (1) cuts at, those from `shift` on; the last
    /// part of a row to finish adds up the parts. Rows without the filter are left alone. `tickets` holds a
    /// zero a row. Grid: (parts, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn search<const P: i32, const WEIGHTED: i32>(
        state: *mut i32,
        partials: *mut f32,
        tickets: *mut i32,
        logits: *mut f32,
        maxima: *mut f32,
        table: *mut i32,
        vocab: i32,
        parts: i32,
        shift: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let words: i32 = pid.1 * 24;
        let wanted: i32 = scalar_at(free, table, words + 2 + WEIGHTED);
        if wanted != 0 {
            let found: i32 = pid.1 * 8;
            let limit: i32 = scalar_at(free, table, words + 7);
            let source: i32 = scalar_at(free, table, words + 8);
            let inverse: i32 = scalar_at(free, table, words + 1);
            let low: i32 = scalar_at(free, state, found);
            let floor: i32 = scalar_at(free, state, found + 3);
            let top: Tile<f32, { [1, 1] }> = row_top::<P>(maxima, pid.1, parts, free);
            let top: Tile<f32, { [1, 256] }> = top.broadcast(shape![1, 256]);
            let inverse: Tile<f32, { [1, 256] }> = number::<1, 256>(inverse);
            let floor: Tile<i32, { [1, 256] }> = broadcast_scalar(floor, shape![1, 256]);

            // Threshold j is the last rank of the j-th sixteenth. That of the last one is not asked for in the
            // first launch, where nothing lies above it: it stands for the sum of all.
            let turn: Tile<i32, { [16, 1] }> = row_numbers::<16, 1>();
            let one: Tile<i32, { [16, 1] }> = constant(1i32, shape![16, 1]);
            let by: Tile<i32, { [16, 1] }> = broadcast_scalar(shift, shape![16, 1]);
            let mut threshold: Tile<i32, { [16, 1] }> =
                broadcast_scalar(low, shape![16, 1]) + ((turn + one) << by) - one;
            if shift == 28 {
                let last: Tile<i32, { [16, 1] }> = constant(15i32, shape![16, 1]);
                let least: Tile<i32, { [16, 1] }> = constant(-2147483648i32, shape![16, 1]);
                threshold = select(eq_tile(turn, last), least, threshold);
            }
            let threshold: Tile<i32, { [16, 256] }> = threshold.broadcast(shape![16, 256]);

            // Lanes of `math::sum`, for each threshold.
            let mut lanes: Tile<f32, { [16, 256] }> = number::<16, 256>(0i32);
            for i in 0i32..4i32 {
                // Four at a time, so that their loads wait together.
                let first: i32 = pid.0 * 4096 + i * 1024;
                let row: i32 = source * vocab;
                let a: Tile<f32, { [1, 256] }> = part_of::<256>(logits, row, first, limit, free);
                let second: i32 = first + 256;
                let b: Tile<f32, { [1, 256] }> = part_of::<256>(logits, row, second, limit, free);
                let third: i32 = first + 512;
                let c: Tile<f32, { [1, 256] }> = part_of::<256>(logits, row, third, limit, free);
                let fourth: i32 = first + 768;
                let d: Tile<f32, { [1, 256] }> = part_of::<256>(logits, row, fourth, limit, free);
                let left: i32 = limit - first;
                lanes = with_terms::<WEIGHTED>(lanes, a, left, top, inverse, floor, threshold);
                let left: i32 = limit - second;
                lanes = with_terms::<WEIGHTED>(lanes, b, left, top, inverse, floor, threshold);
                let left: i32 = limit - third;
                lanes = with_terms::<WEIGHTED>(lanes, c, left, top, inverse, floor, threshold);
                let left: i32 = limit - fourth;
                lanes = with_terms::<WEIGHTED>(lanes, d, left, top, inverse, floor, threshold);
            }
            let sums: Tile<f32, { [16, 1] }> = folded::<16>(lanes);

            let at: Tile<i32, { [16, 1] }> =
                broadcast_scalar((pid.1 * parts + pid.0) * 16, shape![16, 1]) + turn;
            let stored: Token = store_ptr_tko(
                addresses(partials, at),
                sums,
                ordering::Weak,
                None::<scope::Device>,
                None,
                Some(free),
                Latency::<0>,
            );
            let base: PointerTile<*mut i32, { [] }> = pointer_to_tile(tickets);
            let ticket: PointerTile<*mut i32, { [] }> = base.offset(pid.1);
            let once: Tile<i32, { [] }> = constant(1i32, shape![]);
            let (old, taken): (Tile<i32, { [] }>, Token) = atomic_rmw_tko(
                ticket,
                once,
                atomic::Add,
                ordering::AcqRel,
                scope::Device,
                None,
                Some(stored),
            );
            let old: i32 = tile_to_scalar(old);
            if old == parts - 1 {
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
                let total: Tile<f32, { [16, 1] }> =
                    added::<16>(partials, pid.1 * parts, parts, taken);
                let last: Tile<bool, { [16, 1] }> =
                    eq_tile(turn, broadcast_scalar(15i32, shape![16, 1]));
                let mut budget: Tile<f32, { [1, 1] }> =
                    number::<1, 1>(scalar_at(free, state, found + 1));
                if shift == 28 {
                    budget = number::<1, 1>(wanted);
                    if WEIGHTED == 1 {
                        budget = times::<1, 1>(budget, only(last, total));
                    }
                }
                let fits: Tile<bool, { [16, 1] }> =
                    lt_tile(total, budget.broadcast(shape![16, 1])) | last;
                let far: Tile<i32, { [16, 1] }> = constant(16i32, shape![16, 1]);
                let first: Tile<i32, { [1] }> = reduce_min(select(fits, turn, far), 0);
                let first: Tile<i32, { [1, 1] }> = first.reshape(shape![1, 1]);
                let here: Tile<bool, { [16, 1] }> = eq_tile(turn, first.broadcast(shape![16, 1]));
                let above: Tile<f32, { [1, 1] }> = only(here, total);
                let by: Tile<i32, { [1, 1] }> = broadcast_scalar(shift, shape![1, 1]);
                let next: Tile<i32, { [1, 1] }> =
                    broadcast_scalar(low, shape![1, 1]) + (first << by);
                let mut begin: Tile<i32, { [1, 1] }> = next;
                if shift == 0 {
                    put::<i32>(state, found + 3 + WEIGHTED, next, taken);
                    // For the next search.
                    let least: Tile<i32, { [1, 1] }> = constant(-2147483648i32, shape![1, 1]);
                    begin = least;
                }
                put::<i32>(state, found, begin, taken);
                let budget: Tile<i32, { [1, 1] }> = bitcast(budget);
                let above: Tile<i32, { [1, 1] }> = bitcast(above);
                put::<i32>(state, found + 1, budget, taken);
                put::<i32>(state, found + 2, above, taken);
            }
        }
    }

    /// The lanes of sixteen sums with one more term each: that of a logit above the threshold. The first `left`
    /// logits are in the row.
    fn with_terms<const WEIGHTED: i32>(
        lanes: Tile<f32, { [16, 256] }>,
        logit: Tile<f32, { [1, 256] }>,
        left: i32,
        top: Tile<f32, { [1, 256] }>,
        inverse: Tile<f32, { [1, 256] }>,
        floor: Tile<i32, { [1, 256] }>,
        threshold: Tile<i32, { [16, 256] }>,
    ) -> Tile<f32, { [16, 256] }> {
        let place: Tile<i32, { [1, 256] }> = rank::<1, 256>(logit);
        let mut weight: Tile<f32, { [1, 256] }> = number::<1, 256>(0x3f80_0000i32);
        if WEIGHTED == 1 {
            let scaled: Tile<f32, { [1, 256] }> =
                times::<1, 256>(minus::<1, 256>(logit, top), inverse);
            weight = exponential::<1, 256>(scaled);
        }
        let inside: Tile<bool, { [1, 256] }> = lt_tile(
            column_numbers::<1, 256>(),
            broadcast_scalar(left, shape![1, 256]),
        );
        let counts: Tile<bool, { [1, 256] }> = inside & ge_tile(place, floor);
        let weight: Tile<f32, { [1, 256] }> = select(counts, weight, number::<1, 256>(0i32));
        let above: Tile<bool, { [16, 256] }> = gt_tile(place.broadcast(shape![16, 256]), threshold);
        let none: Tile<f32, { [16, 256] }> = number::<16, 256>(0i32);
        let term: Tile<f32, { [16, 256] }> = select(above, weight.broadcast(shape![16, 256]), none);
        plus::<16, 256>(lanes, term)
    }

    /// The one value that is chosen; values are not negative.
    fn only(
        chosen: Tile<bool, { [16, 1] }>,
        value: Tile<f32, { [16, 1] }>,
    ) -> Tile<f32, { [1, 1] }> {
        let nothing: Tile<f32, { [16, 1] }> = number::<16, 1>(0i32);
        let value: Tile<f32, { [1] }> = reduce_max(select(chosen, value, nothing), 0);
        value.reshape(shape![1, 1])
    }

    /// `math::fold` of `R` sums: each reduction adds two numbers.
    fn folded<const R: i32>(lanes: Tile<f32, { [R, 256] }>) -> Tile<f32, { [R, 1] }> {
        let halves: Tile<f32, { [R, 2, 128] }> = lanes.reshape(shape![R, 2, 128]);
        let lanes: Tile<f32, { [R, 128] }> = reduce_sum(halves, 1);
        let halves: Tile<f32, { [R, 2, 64] }> = lanes.reshape(shape![R, 2, 64]);
        let lanes: Tile<f32, { [R, 64] }> = reduce_sum(halves, 1);
        let halves: Tile<f32, { [R, 2, 32] }> = lanes.reshape(shape![R, 2, 32]);
        let lanes: Tile<f32, { [R, 32] }> = reduce_sum(halves, 1);
        let halves: Tile<f32, { [R, 2, 16] }> = lanes.reshape(shape![R, 2, 16]);
        let lanes: Tile<f32, { [R, 16] }> = reduce_sum(halves, 1);
        let halves: Tile<f32, { [R, 2, 8] }> = lanes.reshape(shape![R, 2, 8]);
        let lanes: Tile<f32, { [R, 8] }> = reduce_sum(halves, 1);
        let halves: Tile<f32, { [R, 2, 4] }> = lanes.reshape(shape![R, 2, 4]);
        let lanes: Tile<f32, { [R, 4] }> = reduce_sum(halves, 1);
        let halves: Tile<f32, { [R, 2, 2] }> = lanes.reshape(shape![R, 2, 2]);
        let lanes: Tile<f32, { [R, 2] }> = reduce_sum(halves, 1);
        let sums: Tile<f32, { [R] }> = reduce_sum(lanes, 1);
        sums.reshape(shape![R, 1])
    }

    /// How many logits of each part are the one that top-p cuts at. Grid: (parts, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn ties<const W: i32>(
        counts: *mut i32,
        state: *mut i32,
        logits: *mut f32,
        table: *mut i32,
        vocab: i32,
        parts: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let words: i32 = pid.1 * 24;
        let wanted: i32 = scalar_at(free, table, words + 3);
        if wanted != 0 {
            let limit: i32 = scalar_at(free, table, words + 7);
            let source: i32 = scalar_at(free, table, words + 8);
            let cut: i32 = scalar_at(free, state, pid.1 * 8 + 4);
            let value: Tile<f32, { [1, W] }> =
                part_of::<W>(logits, source * vocab, pid.0 * W, limit, free);
            // The cut is a number: what lies outside the row is none.
            let equal: Tile<bool, { [1, W] }> =
                eq_tile(rank::<1, W>(value), broadcast_scalar(cut, shape![1, W]));
            let one: Tile<i32, { [1, W] }> = constant(1i32, shape![1, W]);
            let nothing: Tile<i32, { [1, W] }> = constant(0i32, shape![1, W]);
            let count: Tile<i32, { [1] }> = reduce_sum(select(equal, one, nothing), 1);
            let at: i32 = pid.1 * parts + pid.0;
            put::<i32>(counts, at, count.reshape(shape![1, 1]), free);
        }
    }

    /// Before which column the ties of a part still fit what top-p lets in, where `before` of them stand in earlier
    /// parts: the one with r of lower ids fits if `above + r * weight < budget`, the very first always. Two bisections,
    /// as a running count by `scan_sum` comes out wrong.
    fn last_tie<const W: i32>(
        equal: Tile<bool, { [1, W] }>,
        weight: Tile<f32, { [1, W] }>,
        before: i32,
        above: i32,
        budget: i32,
    ) -> i32 {
        let one: Tile<i32, { [1, W] }> = constant(1i32, shape![1, W]);
        let nothing: Tile<i32, { [1, W] }> = constant(0i32, shape![1, W]);
        let none: Tile<f32, { [1, W] }> = constant(0.0f32, shape![1, W]);
        let weight: Tile<f32, { [1, 1] }> = largest::<f32, W>(select(equal, weight, none));
        let count: Tile<i32, { [1] }> = reduce_sum(select(equal, one, nothing), 1);
        let count: i32 = tile_to_scalar(count.reshape(shape![]));

        // So many fit, and no longer so many.
        let mut fit: i32 = 0;
        let mut over: i32 = count + 1;
        while over - fit > 1 {
            let middle: i32 = (fit + over) / 2;
            let lower: i32 = before + middle - 1;
            let lower_tile: Tile<i32, { [1, 1] }> = broadcast_scalar(lower, shape![1, 1]);
            let lower_tile: Tile<f32, { [1, 1] }> = convert_tile(lower_tile);
            let sum: Tile<f32, { [1, 1] }> =
                plus::<1, 1>(number::<1, 1>(above), times::<1, 1>(lower_tile, weight));
            let yes: Tile<i32, { [1, 1] }> = constant(1i32, shape![1, 1]);
            let no: Tile<i32, { [1, 1] }> = constant(0i32, shape![1, 1]);
            let fits: Tile<i32, { [1, 1] }> = select(lt_tile(sum, number::<1, 1>(budget)), yes, no);
            let mut fits: i32 = tile_to_scalar(fits.reshape(shape![]));
            if lower == 0 {
                fits = 1;
            }
            if fits == 1 {
                fit = middle;
            } else {
                over = middle;
            }
        }

        let mut last: i32 = W;
        if fit == 0 {
            last = 0;
        }
        if fit > 0 {
            if fit < count {
                // Fewer of them than `fit` stand before `short`, as many before `last`.
                let mut short: i32 = 0;
                while last - short > 1 {
                    let middle: i32 = (short + last) / 2;
                    let left: Tile<bool, { [1, W] }> = lt_tile(
                        column_numbers::<1, W>(),
                        broadcast_scalar(middle, shape![1, W]),
                    );
                    let left: Tile<i32, { [1] }> =
                        reduce_sum(select(equal & left, one, nothing), 1);
                    let left: i32 = tile_to_scalar(left.reshape(shape![]));
                    if left >= fit {
                        last = middle;
                    } else {
                        short = middle;
                    }
                }
            }
        }
        last
    }

    /// The best score of each part and where it first stands: the logit itself, or scaled and with its noise
    /// where the filters leave it. Grid: (parts, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn score<const W: i32, const P: i32>(
        best: *mut f32,
        ranks: *mut i32,
        place: *mut i32,
        weights: *mut f32,
        state: *mut i32,
        counts: *mut i32,
        logits: *mut f32,
        maxima: *mut f32,
        table: *mut i32,
        vocab: i32,
        parts: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let words: i32 = pid.1 * 24;
        let greedy: i32 = scalar_at(free, table, words);
        let limit: i32 = scalar_at(free, table, words + 7);
        let source: i32 = scalar_at(free, table, words + 8);
        let draw: i32 = scalar_at(free, table, words + 16);
        let mut value: Tile<f32, { [1, W] }> =
            part_of::<W>(logits, source * vocab, pid.0 * W, limit, free);
        let id: Tile<i32, { [1, W] }> =
            column_numbers::<1, W>() + broadcast_scalar(pid.0 * W, shape![1, W]);
        let least: Tile<f32, { [1, W] }> = constant(f32::NEG_INFINITY, shape![1, W]);
        let inside: Tile<bool, { [1, W] }> = lt_tile(id, broadcast_scalar(limit, shape![1, W]));
        if greedy == 0 {
            let found: i32 = pid.1 * 8;
            let inverse: i32 = scalar_at(free, table, words + 1);
            let top_p: i32 = scalar_at(free, table, words + 3);
            let min_p: i32 = scalar_at(free, table, words + 4);
            let key_0: i32 = scalar_at(free, table, words + 5);
            let key_1: i32 = scalar_at(free, table, words + 6);
            let floor: i32 = scalar_at(free, state, found + 3);
            let top: Tile<f32, { [1, 1] }> = row_top::<P>(maxima, pid.1, parts, free);
            let scaled: Tile<f32, { [1, W] }> = times::<1, W>(
                minus::<1, W>(value, top.broadcast(shape![1, W])),
                number::<1, W>(inverse),
            );
            let high: Tile<i32, { [1, W] }> = rank::<1, W>(value);
            let weight: Tile<f32, { [1, W] }> = exponential::<1, W>(scaled);
            // Nothing that weighs less than `math::EXP_CUTOFF` says is ever drawn.
            let mut stays: Tile<bool, { [1, W] }> = inside
                & ge_tile(high, broadcast_scalar(floor, shape![1, W]))
                & ge_tile(scaled, number::<1, W>(-1028784128i32))
                & ge_tile(weight, number::<1, W>(min_p));
            if top_p != 0 {
                let budget: i32 = scalar_at(free, state, found + 1);
                let above: i32 = scalar_at(free, state, found + 2);
                let cut: i32 = scalar_at(free, state, found + 4);
                let none: Tile<i32, { [1, P] }> = constant(0i32, shape![1, P]);
                let before: Tile<i32, { [1, P] }> =
                    run::<i32, P>(counts, pid.1 * parts, pid.0, none, free);
                let before: Tile<i32, { [1] }> = reduce_sum(before, 1);
                let cut: Tile<i32, { [1, W] }> = broadcast_scalar(cut, shape![1, W]);
                let equal: Tile<bool, { [1, W] }> = eq_tile(high, cut);
                let before: i32 = tile_to_scalar(before.reshape(shape![]));
                let last: i32 = last_tie::<W>(equal, weight, before, above, budget);
                let fits: Tile<bool, { [1, W] }> = lt_tile(
                    column_numbers::<1, W>(),
                    broadcast_scalar(last, shape![1, W]),
                );
                stays = stays & (gt_tile(high, cut) | (equal & fits));
            }
            let noisy: Tile<f32, { [1, W] }> =
                plus::<1, W>(scaled, gumbel::<1, W>(id, key_0, key_1));
            value = select(stays, noisy, least);
            if draw != 0 {
                let to: Tile<i32, { [1, W] }> = id + broadcast_scalar(pid.1 * vocab, shape![1, W]);
                let _stored: Token = store_ptr_tko(
                    addresses(weights, to),
                    select(stays, weight, number::<1, W>(0i32)),
                    ordering::Weak,
                    None::<scope::Device>,
                    Some(inside),
                    Some(free),
                    Latency::<0>,
                );
            }
        }
        let top: Tile<f32, { [1, 1] }> = largest::<f32, W>(value);
        let far: Tile<i32, { [1, W] }> = constant(2147483647i32, shape![1, W]);
        let here: Tile<bool, { [1, W] }> = eq_tile(value, top.broadcast(shape![1, W])) & inside;
        let first: Tile<i32, { [1, 1] }> = smallest::<W>(select(here, id, far));
        let at: i32 = pid.1 * parts + pid.0;
        put::<f32>(best, at, top, free);
        put::<i32>(place, at, first, free);
        // Equal scores are the lower id's, whatever their logits.
        let alike: Tile<i32, { [1, 1] }> = constant(0i32, shape![1, 1]);
        put::<i32>(ranks, at, alike, free);
    }

    /// Writes what drafts were drawn from into rows of zeros: pairs of token and probability. Grid:
    /// (pairs / 1024, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn spread(drafted: *mut f32, pairs: *mut i32, table: *mut i32, vocab: i32) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let words: i32 = pid.1 * 24;
        let first: i32 = scalar_at(free, table, words + 19);
        let count: i32 = scalar_at(free, table, words + 20);
        let i: Tile<i32, { [1, 1024] }> =
            broadcast_scalar(pid.0 * 1024, shape![1, 1024]) + column_numbers::<1, 1024>();
        let there: Tile<bool, { [1, 1024] }> = lt_tile(i, broadcast_scalar(count, shape![1, 1024]));
        let nothing: Tile<i32, { [1, 1024] }> = constant(0i32, shape![1, 1024]);
        let at: Tile<i32, { [1, 1024] }> = i + broadcast_scalar(first, shape![1, 1024]);
        let at: Tile<i32, { [1, 1024] }> = select(there, at + at, nothing);
        let id: Tile<i32, { [1, 1024] }> = gathered(pairs, at, 0i32, free);
        let prob: Tile<i32, { [1, 1024] }> = gathered(pairs, at, 1i32, free);
        let prob: Tile<f32, { [1, 1024] }> = bitcast(prob);
        let to: Tile<i32, { [1, 1024] }> = id + broadcast_scalar(pid.1 * vocab, shape![1, 1024]);
        let _stored: Token = store_ptr_tko(
            addresses(drafted, to),
            prob,
            ordering::Weak,
            None::<scope::Device>,
            Some(there),
            Some(free),
            Latency::<0>,
        );
    }

    /// max(p - q, 0), where p is a weight over their sum.
    fn excess<const C: i32>(
        weight: Tile<f32, { [1, C] }>,
        total: Tile<f32, { [1, 1] }>,
        drafted: Tile<f32, { [1, C] }>,
    ) -> Tile<f32, { [1, C] }> {
        let prob: Tile<f32, { [1, C] }> = over::<1, C>(weight, total.broadcast(shape![1, C]));
        let rest: Tile<f32, { [1, C] }> = minus::<1, C>(prob, drafted);
        let nothing: Tile<f32, { [1, C] }> = number::<1, C>(0i32);
        select(gt_tile(rest, nothing), rest, nothing)
    }

    /// The sum of each part, `math::sum`'s of its block: of the weights, for rows that keep them, or, with `EXCESS`,
    /// of what p has more than q, for those that verify a draft; `totals` holds the sums of the weights then.
    /// Grid: (parts, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn total<const EXCESS: i32>(
        sums: *mut f32,
        weights: *mut f32,
        drafted: *mut f32,
        totals: *mut f32,
        table: *mut i32,
        vocab: i32,
        parts: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let words: i32 = pid.1 * 24;
        let draw: i32 = scalar_at(free, table, words + 16);
        if draw > EXCESS {
            let limit: i32 = scalar_at(free, table, words + 7);
            let mut whole: Tile<f32, { [1, 1] }> = number::<1, 1>(0i32);
            if EXCESS == 1 {
                whole = added::<1>(totals, pid.1 * parts, parts, free);
            }
            let none: Tile<f32, { [1, 256] }> = number::<1, 256>(0i32);
            let mut lanes: Tile<f32, { [1, 256] }> = number::<1, 256>(0i32);
            for i in 0i32..16i32 {
                let first: i32 = pid.0 * 4096 + i * 256;
                let at: i32 = pid.1 * vocab + first;
                let mut term: Tile<f32, { [1, 256] }> =
                    run::<f32, 256>(weights, at, limit - first, none, free);
                if EXCESS == 1 {
                    let q: Tile<f32, { [1, 256] }> =
                        run::<f32, 256>(drafted, at, limit - first, none, free);
                    term = excess::<256>(term, whole, q);
                }
                lanes = plus::<1, 256>(lanes, term);
            }
            put::<f32>(sums, pid.1 * parts + pid.0, folded::<1>(lanes), free);
        }
    }

    /// What `score` leaves of a part, for the draw that follows a rejected draft: among max(p - q, 0) over its sum, or
    /// among p if that is nothing. Equal scores are the higher logit's. Grid: (parts, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn redraw<const W: i32>(
        best: *mut f32,
        ranks: *mut i32,
        place: *mut i32,
        weights: *mut f32,
        drafted: *mut f32,
        totals: *mut f32,
        rests: *mut f32,
        logits: *mut f32,
        table: *mut i32,
        vocab: i32,
        parts: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let words: i32 = pid.1 * 24;
        let draw: i32 = scalar_at(free, table, words + 16);
        if draw == 2 {
            let key_0: i32 = scalar_at(free, table, words + 5);
            let key_1: i32 = scalar_at(free, table, words + 6);
            let limit: i32 = scalar_at(free, table, words + 7);
            let source: i32 = scalar_at(free, table, words + 8);
            let first: i32 = pid.0 * W;
            let none: Tile<f32, { [1, W] }> = number::<1, W>(0i32);
            let at: i32 = pid.1 * vocab + first;
            let weight: Tile<f32, { [1, W] }> =
                run::<f32, W>(weights, at, limit - first, none, free);
            let q: Tile<f32, { [1, W] }> = run::<f32, W>(drafted, at, limit - first, none, free);
            let total: Tile<f32, { [1, 1] }> = added::<1>(totals, pid.1 * parts, parts, free);
            let rest: Tile<f32, { [1, 1] }> = added::<1>(rests, pid.1 * parts, parts, free);
            let rest: Tile<f32, { [1, W] }> = rest.broadcast(shape![1, W]);
            let left: Tile<f32, { [1, W] }> = over::<1, W>(excess::<W>(weight, total, q), rest);
            let prob: Tile<f32, { [1, W] }> = over::<1, W>(weight, total.broadcast(shape![1, W]));
            let prob: Tile<f32, { [1, W] }> = select(gt_tile(rest, none), left, prob);

            let id: Tile<i32, { [1, W] }> =
                column_numbers::<1, W>() + broadcast_scalar(first, shape![1, W]);
            // The smallest normal number.
            let stays: Tile<bool, { [1, W] }> = ge_tile(prob, number::<1, W>(0x0080_0000i32));
            let ln: Tile<f32, { [1, W] }> =
                ln_join::<1, W>(ln_power::<1, W>(prob), ln_fraction::<1, W>(prob));
            let noisy: Tile<f32, { [1, W] }> = plus::<1, W>(ln, gumbel::<1, W>(id, key_0, key_1));
            let least: Tile<f32, { [1, W] }> = constant(f32::NEG_INFINITY, shape![1, W]);
            let value: Tile<f32, { [1, W] }> = select(stays, noisy, least);
            let logit: Tile<f32, { [1, W] }> =
                part_of::<W>(logits, source * vocab, first, limit, free);
            let high: Tile<i32, { [1, W] }> = rank::<1, W>(logit);
            let won: Tile<bool, { [1, W] }> = winners::<W>(value, high, stays);
            let lowest: Tile<i32, { [1, W] }> = constant(-2147483648i32, shape![1, W]);
            let far: Tile<i32, { [1, W] }> = constant(2147483647i32, shape![1, W]);
            let to: i32 = pid.1 * parts + pid.0;
            put::<f32>(best, to, largest::<f32, W>(value), free);
            put::<i32>(
                ranks,
                to,
                largest::<i32, W>(select(won, high, lowest)),
                free,
            );
            put::<i32>(place, to, smallest::<W>(select(won, id, far)), free);
        }
    }

    /// Collects what drafts are drawn from, in no order: three words a token, its id, its probability and its rank.
    /// `listed` counts them, `lists` has room for a whole vocabulary a draft. Grid: (parts, rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn list<const W: i32>(
        listed: *mut i32,
        lists: *mut i32,
        weights: *mut f32,
        totals: *mut f32,
        logits: *mut f32,
        table: *mut i32,
        vocab: i32,
        parts: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let words: i32 = pid.1 * 24;
        let draw: i32 = scalar_at(free, table, words + 16);
        if draw == 1 {
            let limit: i32 = scalar_at(free, table, words + 7);
            let source: i32 = scalar_at(free, table, words + 8);
            let list: i32 = scalar_at(free, table, words + 21);
            let first: i32 = pid.0 * W;
            let none: Tile<f32, { [1, W] }> = number::<1, W>(0i32);
            let at: i32 = pid.1 * vocab + first;
            let weight: Tile<f32, { [1, W] }> =
                run::<f32, W>(weights, at, limit - first, none, free);
            let stays: Tile<bool, { [1, W] }> = gt_tile(weight, none);
            let total: Tile<f32, { [1, 1] }> = added::<1>(totals, pid.1 * parts, parts, free);
            let prob: Tile<f32, { [1, W] }> = over::<1, W>(weight, total.broadcast(shape![1, W]));
            let prob: Tile<i32, { [1, W] }> = bitcast(prob);
            let logit: Tile<f32, { [1, W] }> =
                part_of::<W>(logits, source * vocab, first, limit, free);
            let id: Tile<i32, { [1, W] }> =
                column_numbers::<1, W>() + broadcast_scalar(first, shape![1, W]);
            let one: Tile<i32, { [1, W] }> = constant(1i32, shape![1, W]);
            let counter: Tile<i32, { [1, W] }> = broadcast_scalar(list, shape![1, W]);
            let (turn, _t): (Tile<i32, { [1, W] }>, Token) = atomic_rmw_tko(
                addresses(listed, counter),
                one,
                atomic::Add,
                ordering::Relaxed,
                scope::Device,
                Some(stays),
                Some(free),
            );
            let to: Tile<i32, { [1, W] }> = turn + broadcast_scalar(list * vocab, shape![1, W]);
            let three: Tile<i32, { [1, W] }> = constant(3i32, shape![1, W]);
            let to: Tile<i32, { [1, W] }> = to * three;
            scatter::<W>(lists, to, id, stays, free);
            scatter::<W>(lists, to + one, prob, stays, free);
            scatter::<W>(lists, to + one + one, rank::<1, W>(logit), stays, free);
        }
    }

    /// Writes the numbers that are chosen.
    unsafe fn scatter<const C: i32>(
        base: *mut i32,
        to: Tile<i32, { [1, C] }>,
        value: Tile<i32, { [1, C] }>,
        chosen: Tile<bool, { [1, C] }>,
        free: Token,
    ) {
        let _stored: Token = store_ptr_tko(
            addresses(base, to),
            value,
            ordering::Weak,
            None::<scope::Device>,
            Some(chosen),
            Some(free),
            Latency::<0>,
        );
    }

    /// The token of each row: a draft that is likely enough, else that of the row's best score, the first among equals;
    /// -1 where no token may come; -2 - c where a logit is broken, c being what `survey` says of it. Grid: (rows).
    #[cutile::entry(unchecked_accesses = true)]
    unsafe fn choose<const P: i32>(
        tokens: *mut i32,
        best: *mut f32,
        ranks: *mut i32,
        place: *mut i32,
        maxima: *mut f32,
        broken: *mut i32,
        weights: *mut f32,
        totals: *mut f32,
        table: *mut i32,
        vocab: i32,
        parts: i32,
    ) {
        let pid: (i32, i32, i32) = get_tile_block_id();
        let free: Token = start();
        let words: i32 = pid.0 * 24;
        let to: i32 = scalar_at(free, table, words + 15);
        let draw: i32 = scalar_at(free, table, words + 16);
        let first: i32 = pid.0 * parts;
        let least: Tile<f32, { [1, P] }> = constant(f32::NEG_INFINITY, shape![1, P]);
        let far: Tile<i32, { [1, P] }> = constant(2147483647i32, shape![1, P]);
        let value: Tile<f32, { [1, P] }> = run::<f32, P>(best, first, parts, least, free);
        let high: Tile<i32, { [1, P] }> = run::<i32, P>(ranks, first, parts, far, free);
        let index: Tile<i32, { [1, P] }> = run::<i32, P>(place, first, parts, far, free);
        let code: Tile<i32, { [1, P] }> = run::<i32, P>(broken, first, parts, far, free);
        let inside: Tile<bool, { [1, P] }> = lt_tile(
            column_numbers::<1, P>(),
            broadcast_scalar(parts, shape![1, P]),
        );
        let won: Tile<bool, { [1, P] }> = winners::<P>(value, high, inside);
        let mut token: Tile<i32, { [1, 1] }> = smallest::<P>(select(won, index, far));
        if draw == 2 {
            let draft: i32 = scalar_at(free, table, words + 17);
            let least: i32 = scalar_at(free, table, words + 18);
            let none: Tile<f32, { [1, 1] }> = number::<1, 1>(0i32);
            let weight: Tile<f32, { [1, 1] }> =
                run::<f32, 1>(weights, pid.0 * vocab + draft, 1i32, none, free);
            let total: Tile<f32, { [1, 1] }> = added::<1>(totals, first, parts, free);
            let prob: Tile<f32, { [1, 1] }> = over::<1, 1>(weight, total);
            let draft: Tile<i32, { [1, 1] }> = broadcast_scalar(draft, shape![1, 1]);
            token = select(lt_tile(number::<1, 1>(least), prob), draft, token);
        }
        let code: Tile<i32, { [1, 1] }> = smallest::<P>(code);
        let top: Tile<f32, { [1, 1] }> = row_top::<P>(maxima, pid.0, parts, free);
        let none: Tile<f32, { [1, 1] }> = constant(f32::NEG_INFINITY, shape![1, 1]);
        let nothing: Tile<i32, { [1, 1] }> = constant(-1i32, shape![1, 1]);
        let two: Tile<i32, { [1, 1] }> = constant(-2i32, shape![1, 1]);
        let end: Tile<i32, { [1, 1] }> = constant(2147483647i32, shape![1, 1]);
        let token: Tile<i32, { [1, 1] }> = select(eq_tile(top, none), nothing, token);
        let token: Tile<i32, { [1, 1] }> = select(lt_tile(code, end), two - code, token);
        put::<i32>(tokens, to, token, free);
    }
}
