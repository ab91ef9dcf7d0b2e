//! Activations as 16-bit integers in two bytes, and back: the arithmetic of `tileinfer::weights::int8`.

#[cutile::module]
#[allow(missing_docs)]
pub mod bytes {
    use cutile::core::*;

    /// The largest magnitude of each row, infinite or NaN if the row is.
    pub fn largest<const R: i32, const C: i32>(x: Tile<f32, { [R, C] }>) -> Tile<f32, { [R, 1] }> {
        // As bits without a sign numbers are in order, infinity after all of them and NaN after that.
        let bits: Tile<i32, { [R, C] }> = bitcast(x);
        let bits: Tile<i32, { [R, C] }> = bits & constant(0x7fff_ffffi32, shape![R, C]);
        let top: Tile<i32, { [R] }> = reduce_max(bits, 1);
        let top: Tile<i32, { [R, 1] }> = top.reshape(shape![R, 1]);
        let top: Tile<f32, { [R, 1] }> = bitcast(top);
        top
    }

    /// Whether a row with this largest magnitude is rounded; else all of it counts as zero.
    pub fn is_usual<const R: i32>(top: Tile<f32, { [R, 1] }>) -> Tile<bool, { [R, 1] }> {
        let bits: Tile<i32, { [R, 1] }> = bitcast(top);
        let infinite: Tile<i32, { [R, 1] }> = constant(0x7f80_0000i32, shape![R, 1]);
        // 2^-100.
        let tiny: Tile<i32, { [R, 1] }> = constant(0x0d80_0000i32, shape![R, 1]);
        let usual: Tile<bool, { [R, 1] }> = lt_tile(bits, infinite) & ge_tile(bits, tiny);
        usual
    }

    /// What a rounded activation of 1 is worth in a row with this largest magnitude.
    pub fn activation_scales<const R: i32>(top: Tile<f32, { [R, 1] }>) -> Tile<f32, { [R, 1] }> {
        let bits: Tile<i32, { [R, 1] }> = bitcast(top);
        let infinite: Tile<i32, { [R, 1] }> = constant(0x7f80_0000i32, shape![R, 1]);
        let one: Tile<f32, { [R, 1] }> = constant(1.0f32, shape![R, 1]);
        let most: Tile<f32, { [R, 1] }> = constant(32258.0f32, shape![R, 1]);
        let nan: Tile<i32, { [R, 1] }> = constant(0x7fc0_0000i32, shape![R, 1]);
        let nan: Tile<f32, { [R, 1] }> = bitcast(nan);
        let other: Tile<f32, { [R, 1] }> = select(lt_tile(bits, infinite), one, nan);
        let scale: Tile<f32, { [R, 1] }> = divf(top, most, rounding::NearestEven, ftz::Disabled);
        select(is_usual::<R>(top), scale, other)
    }

    /// Rows as 16-bit integers, in i32.
    pub fn integers<const R: i32, const C: i32>(
        x: Tile<f32, { [R, C] }>,
        top: Tile<f32, { [R, 1] }>,
    ) -> Tile<i32, { [R, C] }> {
        let usual: Tile<bool, { [R, 1] }> = is_usual::<R>(top);
        let one: Tile<f32, { [R, 1] }> = constant(1.0f32, shape![R, 1]);
        let most: Tile<f32, { [R, 1] }> = constant(32258.0f32, shape![R, 1]);
        let levels: Tile<f32, { [R, 1] }> = divf(
            most,
            select(usual, top, one),
            rounding::NearestEven,
            ftz::Disabled,
        );
        // Added to 1.5 * 2^23 a number is rounded to the nearest integer, ties to even, which stands in the low
        // bits of the sum: quicker than a conversion.
        let magic: Tile<f32, { [R, C] }> = constant(12582912.0f32, shape![R, C]);
        let shifted: Tile<f32, { [R, C] }> = x * levels.broadcast(shape![R, C]) + magic;
        let shifted: Tile<f32, { [R, C] }> = select(usual.broadcast(shape![R, C]), shifted, magic);
        let bits: Tile<i32, { [R, C] }> = bitcast(shifted);
        let v: Tile<i32, { [R, C] }> = bits - constant(0x4b40_0000i32, shape![R, C]);
        v
    }

    /// `hi` of integers `v = 254 hi + lo`.
    pub fn high_part<const R: i32, const C: i32>(
        v: Tile<i32, { [R, C] }>,
    ) -> Tile<i32, { [R, C] }> {
        // The division rounds down, as what it divides is never negative.
        let half: Tile<i32, { [R, C] }> = constant(32639i32, shape![R, C]);
        let by: Tile<i32, { [R, C] }> = constant(254i32, shape![R, C]);
        let shift: Tile<i32, { [R, C] }> = constant(128i32, shape![R, C]);
        (v + half) / by - shift
    }

    /// What the sums over `hi` and `lo` are together, in f32 and in one rounding of each and one of their sum.
    pub fn joined<const R: i32, const C: i32>(
        high: Tile<i32, { [R, C] }>,
        low: Tile<i32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let high: Tile<f32, { [R, C] }> = convert_tile(high);
        let low: Tile<f32, { [R, C] }> = convert_tile(low);
        let by: Tile<f32, { [R, C] }> = constant(254.0f32, shape![R, C]);
        fma(high, by, low, rounding::NearestEven, ftz::Disabled)
    }

    /// An integer below 2^22 as a number: added to the bits of 1.5 * 2^23 it is added to the number, which is
    /// quicker than a conversion.
    pub fn small_number<const R: i32, const C: i32>(
        v: Tile<i32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let bits: Tile<i32, { [R, C] }> = v + constant(0x4b40_0000i32, shape![R, C]);
        let shifted: Tile<f32, { [R, C] }> = bitcast(bits);
        let magic: Tile<f32, { [R, C] }> = constant(12582912.0f32, shape![R, C]);
        shifted - magic
    }

    /// What the sums over `hi` and `lo` are together where both are below 2^22: quicker, the same bits.
    pub fn joined_small<const R: i32, const C: i32>(
        high: Tile<i32, { [R, C] }>,
        low: Tile<i32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let high: Tile<f32, { [R, C] }> = small_number::<R, C>(high);
        let low: Tile<f32, { [R, C] }> = small_number::<R, C>(low);
        let by: Tile<f32, { [R, C] }> = constant(254.0f32, shape![R, C]);
        fma(high, by, low, rounding::NearestEven, ftz::Disabled)
    }

    /// Bytes in the low bits of integers that are zero above as numbers, exactly.
    pub fn numbers<E: ElementType, const R: i32, const C: i32>(
        bits: Tile<i32, { [R, C] }>,
    ) -> Tile<E, { [R, C] }> {
        // A byte and 128 in the low bits of 2^23 are added to it, which is quicker than a conversion.
        let shifted: Tile<i32, { [R, C] }> = bits ^ constant(0x4b00_0080i32, shape![R, C]);
        let shifted: Tile<f32, { [R, C] }> = bitcast(shifted);
        let magic: Tile<f32, { [R, C] }> = constant(8388736.0f32, shape![R, C]);
        let values: Tile<E, { [R, C] }> = convert_tile(shifted - magic);
        values
    }

    /// The first bytes of pairs of bytes as numbers.
    pub fn first_bytes<E: ElementType, const R: i32, const C: i32>(
        pairs: Tile<E, { [R, C] }>,
    ) -> Tile<E, { [R, C] }> {
        let bits: Tile<u16, { [R, C] }> = bitcast(pairs);
        let bits: Tile<i32, { [R, C] }> = exti(bits);
        let mask: Tile<i32, { [R, C] }> = constant(0xffi32, shape![R, C]);
        numbers::<E, R, C>(bits & mask)
    }

    /// The second bytes of pairs of bytes as numbers.
    pub fn second_bytes<E: ElementType, const R: i32, const C: i32>(
        pairs: Tile<E, { [R, C] }>,
    ) -> Tile<E, { [R, C] }> {
        let bits: Tile<u16, { [R, C] }> = bitcast(pairs);
        let bits: Tile<i32, { [R, C] }> = exti(bits);
        let eight: Tile<i32, { [R, C] }> = constant(8i32, shape![R, C]);
        numbers::<E, R, C>(bits >> eight)
    }

    /// Bytes as numbers, exactly.
    pub fn widened<E: ElementType, const R: i32, const C: i32>(
        bytes: Tile<i8, { [R, C] }>,
    ) -> Tile<E, { [R, C] }> {
        let wide: Tile<i32, { [R, C] }> = exti(bytes);
        let number: Tile<f32, { [R, C] }> = small_number::<R, C>(wide);
        let values: Tile<E, { [R, C] }> = convert_tile(number);
        values
    }

    /// The scales of vectors in two halves `a` and `b`, one vector a row.
    pub fn vector_scales<const R: i32, const C: i32>(
        a: Tile<f32, { [R, C] }>,
        b: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, 1] }> {
        let sign: Tile<i32, { [R, C] }> = constant(0x7fff_ffffi32, shape![R, C]);
        let a: Tile<i32, { [R, C] }> = bitcast(a);
        let b: Tile<i32, { [R, C] }> = bitcast(b);
        let top: Tile<i32, { [R] }> = reduce_max(max_tile(a & sign, b & sign), 1);
        let top: Tile<i32, { [R, 1] }> = top.reshape(shape![R, 1]);
        let infinite: Tile<i32, { [R, 1] }> = constant(0x7f80_0000i32, shape![R, 1]);
        let zero: Tile<i32, { [R, 1] }> = constant(0i32, shape![R, 1]);
        let one: Tile<f32, { [R, 1] }> = constant(1.0f32, shape![R, 1]);
        let levels: Tile<f32, { [R, 1] }> = constant(127.0f32, shape![R, 1]);
        let nan: Tile<i32, { [R, 1] }> = constant(0x7fc0_0000i32, shape![R, 1]);
        let nan: Tile<f32, { [R, 1] }> = bitcast(nan);
        let largest: Tile<f32, { [R, 1] }> = bitcast(top);
        let scale: Tile<f32, { [R, 1] }> = select(
            gt_tile(top, zero),
            divf(largest, levels, rounding::NearestEven, ftz::Disabled),
            one,
        );
        select(lt_tile(top, infinite), scale, nan)
    }

    /// Values of vectors as integers under their scales; 0 where the scale is no number.
    pub fn rounded<const R: i32, const C: i32>(
        x: Tile<f32, { [R, C] }>,
        scale: Tile<f32, { [R, 1] }>,
    ) -> Tile<i8, { [R, C] }> {
        let magic: Tile<f32, { [R, C] }> = constant(12582912.0f32, shape![R, C]);
        let most: Tile<f32, { [R, C] }> = constant(127.0f32, shape![R, C]);
        let least: Tile<f32, { [R, C] }> = constant(-127.0f32, shape![R, C]);
        let nothing: Tile<f32, { [R, C] }> = constant(0.0f32, shape![R, C]);
        let live: Tile<bool, { [R, 1] }> = eq_tile(scale, scale);
        let x: Tile<f32, { [R, C] }> = divf(
            x,
            scale.broadcast(shape![R, C]),
            rounding::NearestEven,
            ftz::Disabled,
        );
        let x: Tile<f32, { [R, C] }> = select(live.broadcast(shape![R, C]), x, nothing);
        let x: Tile<f32, { [R, C] }> = (max_tile(min_tile(x, most), least) + magic) - magic;
        let x: Tile<i32, { [R, C] }> = convert_tile(x);
        trunci(x, overflow::NoSignedWrap)
    }
}
