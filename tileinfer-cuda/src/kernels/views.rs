//! Device helpers shared by every kernel: views over raw pointers. They know nothing about what the
//! memory holds.

#[cutile::module]
#[allow(missing_docs)]
pub mod views {
    use cutile::core::*;

    /// A row-major `(rows, cols)` view whose rows lie `stride` elements apart.
    ///
    /// # Safety
    /// The memory holds the view, and accesses through it are ordered after `token`.
    pub unsafe fn matrix<E: ElementType>(
        base: *mut E,
        rows: i32,
        cols: i32,
        stride: i32,
        token: Token,
    ) -> Tensor<E, { [-1, -1] }> {
        let shape: Shape<{ [-1, -1] }> = Shape::<{ [-1, -1] }> {
            dims: &[rows, cols],
        };
        let strides: Array<{ [-1, 1] }> = Array::<{ [-1, 1] }> { dims: &[stride] };
        let base: PointerTile<*mut E, { [] }> = pointer_to_tile(base);
        make_tensor_view(base, shape, strides, token)
    }

    /// A pool of `(page, kv_head)` blocks of `(slots, head_dim)` vectors as a view of three axes.
    ///
    /// # Safety
    /// As for [`matrix`].
    pub unsafe fn page_pool<E: ElementType>(
        base: *mut E,
        blocks: i32,
        slots: i32,
        head_dim: i32,
        token: Token,
    ) -> Tensor<E, { [-1, -1, -1] }> {
        let shape: Shape<{ [-1, -1, -1] }> = Shape::<{ [-1, -1, -1] }> {
            dims: &[blocks, slots, head_dim],
        };
        let block: i32 = slots * head_dim;
        let strides: Array<{ [-1, -1, 1] }> = Array::<{ [-1, -1, 1] }> {
            dims: &[block, head_dim],
        };
        let base: PointerTile<*mut E, { [] }> = pointer_to_tile(base);
        make_tensor_view(base, shape, strides, token)
    }

    /// The numbers that go with the weight rows of a block, one a column: `HALVES` runs of `WIDTH`, `width` apart.
    ///
    /// # Safety
    /// As for [`matrix`].
    pub unsafe fn row_vector<E: ElementType, const BN: i32, const HALVES: i32, const WIDTH: i32>(
        base: *mut E,
        width: i32,
        block: i32,
        free: Token,
    ) -> Tile<f32, { [1, BN] }> {
        let view: Tensor<E, { [-1, -1] }> = matrix(base, HALVES, width, width, free);
        let part: Partition<E, { [HALVES, WIDTH] }> = view.partition(shape![HALVES, WIDTH]);
        let values: Tile<E, { [HALVES, WIDTH] }> = part.load([0i32, block]);
        let values: Tile<f32, { [HALVES, WIDTH] }> = convert_tile(values);
        values.reshape(shape![1, BN])
    }

    /// Waits for the kernels before this one and what they wrote, then lets the next kernel begin to start: every
    /// access to memory that kernels write is ordered after the token. Kernels of one step follow each other closely,
    /// so that the start of one, and what it fetches before it waits, hides behind the end of the one before it.
    ///
    /// # Safety
    /// Every kernel has this or [`start_early`](views), in at least one of its blocks: what comes after a kernel relies
    /// on all before it being done. Above it in the text stand only loads of what no kernel of a step writes: weights,
    /// and the arrays that describe a step.
    pub unsafe fn start() -> Token {
        let ready: Token = gdc_wait_tko(None);
        let signalled: Token = gdc_launch_dependents_tko(Some(ready));
        signalled
    }

    /// The same in a kernel of few blocks, which leave the next one room: it may begin to start while this one still
    /// waits. Where several such kernels follow each other, the product after them fetches weights meanwhile.
    ///
    /// # Safety
    /// As for [`start`](views).
    pub unsafe fn start_early() -> Token {
        let signalled: Token = gdc_launch_dependents_tko(None);
        let ready: Token = gdc_wait_tko(Some(signalled));
        ready
    }

    /// The number at `base[index]`.
    ///
    /// # Safety
    /// `base[index]` can be read and nothing writes it during the launch.
    pub unsafe fn scalar_at(free: Token, base: *mut i32, index: i32) -> i32 {
        let pointer: PointerTile<*mut i32, { [] }> = pointer_to_tile(base);
        let pointer: PointerTile<*mut i32, { [] }> = pointer.offset(index);
        let (value, _token): (Tile<i32, { [] }>, Token) = load_ptr_tko(
            pointer,
            ordering::Weak,
            None::<scope::Device>,
            None,
            None,
            Some(free),
            Latency::<0>,
        );
        tile_to_scalar(value)
    }

    /// The addresses `base[offsets]`.
    pub fn addresses<E: ElementType, const R: i32, const C: i32>(
        base: *mut E,
        offsets: Tile<i32, { [R, C] }>,
    ) -> PointerTile<*mut E, { [R, C] }> {
        let pointer: PointerTile<*mut E, { [] }> = pointer_to_tile(base);
        let pointer: PointerTile<*mut E, { [1, 1] }> = pointer.reshape(shape![1, 1]);
        let pointer: PointerTile<*mut E, { [R, C] }> = pointer.broadcast(shape![R, C]);
        addptr_tile(pointer, offsets)
    }

    /// The numbers 0, 1, ... down a column, the same in each of `C` columns.
    pub fn row_numbers<const R: i32, const C: i32>() -> Tile<i32, { [R, C] }> {
        let numbers: Tile<i32, { [R] }> = iota(shape![R]);
        numbers.reshape(shape![R, 1]).broadcast(shape![R, C])
    }

    /// The numbers 0, 1, ... along a row, the same in each of `R` rows.
    pub fn column_numbers<const R: i32, const C: i32>() -> Tile<i32, { [R, C] }> {
        let numbers: Tile<i32, { [C] }> = iota(shape![C]);
        numbers.reshape(shape![1, C]).broadcast(shape![R, C])
    }

    /// The numbers at `base[offsets]` where `live`, zeros elsewhere, and the token of the load. For rows this is quicker
    /// than TMA, which takes a copy for every 128 bytes of one.
    ///
    /// # Safety
    /// Where `live`, `base[offsets]` can be read, and nothing writes it after `free`.
    pub unsafe fn load_live<E: ElementType, const R: i32, const C: i32>(
        base: *mut E,
        offsets: Tile<i32, { [R, C] }>,
        live: Tile<bool, { [R, C] }>,
        free: Token,
    ) -> (Tile<E, { [R, C] }>, Token) {
        let (values, loaded): (Tile<E, { [R, C] }>, Token) = load_ptr_tko(
            addresses(base, offsets),
            ordering::Weak,
            None::<scope::Device>,
            Some(live),
            None,
            Some(free),
            Latency::<0>,
        );
        let nothing: Tile<E, { [R, C] }> = constant(E::ZERO, shape![R, C]);
        (select(live, values, nothing), loaded)
    }

    /// The first half of [`start_early`], for kernels that ask for something before they wait: in front of that, since the
    /// next kernel has its own to ask for.
    ///
    /// # Safety
    /// [`wait_after`] follows.
    pub unsafe fn signal_early() {
        let _signalled: Token = gdc_launch_dependents_tko(None);
    }

    /// The second half; what `asked` is the token of is asked for before the wait. (Without that the compiler moves it to
    /// where it is used.)
    ///
    /// # Safety
    /// As for [`start`].
    pub unsafe fn wait_after(asked: Token) -> Token {
        let ready: Token = gdc_wait_tko(Some(asked));
        ready
    }

    /// Writes the numbers of `values` that are `live` to `base[offsets]`.
    ///
    /// # Safety
    /// Where `live`, `base[offsets]` can be written, and nothing else reads or writes it after `free`.
    pub unsafe fn store_live<E: ElementType, const R: i32, const C: i32>(
        base: *mut E,
        offsets: Tile<i32, { [R, C] }>,
        live: Tile<bool, { [R, C] }>,
        values: Tile<E, { [R, C] }>,
        free: Token,
    ) {
        let _stored: Token = store_ptr_tko(
            addresses(base, offsets),
            values,
            ordering::Weak,
            None::<scope::Device>,
            Some(live),
            Some(free),
            Latency::<0>,
        );
    }

    /// The numbers at `offsets` of one of `planes` planes of `size` numbers, zeros where there is no such plane.
    ///
    /// # Safety
    /// `base` holds the planes.
    unsafe fn plane_of<T: ElementType, const R: i32, const W: i32>(
        base: *mut T,
        plane: i32,
        planes: i32,
        size: i32,
        offsets: Tile<i32, { [R, W] }>,
        live: Tile<bool, { [R, W] }>,
        free: Token,
    ) -> Tile<T, { [R, W] }> {
        let start: Tile<i32, { [R, W] }> = broadcast_scalar(plane * size, shape![R, W]);
        let number: Tile<i32, { [R, W] }> = broadcast_scalar(plane, shape![R, W]);
        let there: Tile<bool, { [R, W] }> = lt_tile(number, broadcast_scalar(planes, shape![R, W]));
        let (values, _token): (Tile<T, { [R, W] }>, Token) =
            load_live::<T, R, W>(base, start + offsets, live & there, free);
        values
    }

    /// The sum of up to `PLANES` planes at `offsets`, every `step`th in memory from `first` on: one after the
    /// other, starting from zero, as the layer itself adds its splits.
    ///
    /// # Safety
    /// As for `plane_of`.
    pub unsafe fn summed<T: ElementType, const PLANES: i32, const R: i32, const W: i32>(
        base: *mut T,
        first: i32,
        step: i32,
        planes: i32,
        size: i32,
        offsets: Tile<i32, { [R, W] }>,
        live: Tile<bool, { [R, W] }>,
        free: Token,
    ) -> Tile<T, { [R, W] }> {
        let mut sum: Tile<T, { [R, W] }> = constant(T::ZERO, shape![R, W]);
        sum = sum + plane_of::<T, R, W>(base, first, planes, size, offsets, live, free);
        if PLANES > 1 {
            sum = sum + plane_of::<T, R, W>(base, first + step, planes, size, offsets, live, free);
        }
        if PLANES > 2 {
            sum = sum
                + plane_of::<T, R, W>(base, first + 2i32 * step, planes, size, offsets, live, free);
            sum = sum
                + plane_of::<T, R, W>(base, first + 3i32 * step, planes, size, offsets, live, free);
        }
        if PLANES > 4 {
            sum = sum
                + plane_of::<T, R, W>(base, first + 4i32 * step, planes, size, offsets, live, free);
            sum = sum
                + plane_of::<T, R, W>(base, first + 5i32 * step, planes, size, offsets, live, free);
            sum = sum
                + plane_of::<T, R, W>(base, first + 6i32 * step, planes, size, offsets, live, free);
            sum = sum
                + plane_of::<T, R, W>(base, first + 7i32 * step, planes, size, offsets, live, free);
        }
        sum
    }
}
