//! The arithmetic of `tileinfer::sampling::math` and `tileinfer::sampling::rng` on tiles, bit for bit: each
//! product and each sum is an operation with a rounding of its own, which the compiler does not contract.
//! Constants are given by their bits.

#[cutile::module]
#[allow(missing_docs)]
pub mod exact {
    use cutile::core::*;

    /// The number with these bits, everywhere.
    pub fn number<const R: i32, const C: i32>(bits: i32) -> Tile<f32, { [R, C] }> {
        let bits: Tile<i32, { [R, C] }> = broadcast_scalar(bits, shape![R, C]);
        let number: Tile<f32, { [R, C] }> = bitcast(bits);
        number
    }

    /// `a + b`.
    pub fn plus<const R: i32, const C: i32>(
        a: Tile<f32, { [R, C] }>,
        b: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        addf(a, b, rounding::NearestEven, ftz::Disabled)
    }

    /// `a - b`.
    pub fn minus<const R: i32, const C: i32>(
        a: Tile<f32, { [R, C] }>,
        b: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        subf(a, b, rounding::NearestEven, ftz::Disabled)
    }

    /// `a * b`.
    pub fn times<const R: i32, const C: i32>(
        a: Tile<f32, { [R, C] }>,
        b: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        mulf(a, b, rounding::NearestEven, ftz::Disabled)
    }

    /// `a / b`.
    pub fn over<const R: i32, const C: i32>(
        a: Tile<f32, { [R, C] }>,
        b: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        divf(a, b, rounding::NearestEven, ftz::Disabled)
    }

    /// A step of Horner's rule, `sum * x + c`, rounded twice.
    pub fn horner<const R: i32, const C: i32>(
        sum: Tile<f32, { [R, C] }>,
        x: Tile<f32, { [R, C] }>,
        c: i32,
    ) -> Tile<f32, { [R, C] }> {
        plus::<R, C>(times::<R, C>(sum, x), number::<R, C>(c))
    }

    /// `math::exp`.
    pub fn exponential<const R: i32, const C: i32>(
        x: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let log2_e: Tile<f32, { [R, C] }> = number::<R, C>(1069066811i32);
        let shifted: Tile<f32, { [R, C] }> = horner::<R, C>(x, log2_e, 0x4b40_0000i32);
        let n: Tile<f32, { [R, C] }> = minus::<R, C>(shifted, number::<R, C>(0x4b40_0000i32));
        let high: Tile<f32, { [R, C] }> = times::<R, C>(n, number::<R, C>(1060208640i32));
        let low: Tile<f32, { [R, C] }> = times::<R, C>(n, number::<R, C>(-1184989053i32));
        let r: Tile<f32, { [R, C] }> = minus::<R, C>(minus::<R, C>(x, high), low);
        let p: Tile<f32, { [R, C] }> = number::<R, C>(985041344i32);
        let p: Tile<f32, { [R, C] }> = horner::<R, C>(p, r, 1007224562i32);
        let p: Tile<f32, { [R, C] }> = horner::<R, C>(p, r, 1026206348i32);
        let p: Tile<f32, { [R, C] }> = horner::<R, C>(p, r, 1042983533i32);
        let p: Tile<f32, { [R, C] }> = horner::<R, C>(p, r, 1056964608i32);
        let p: Tile<f32, { [R, C] }> = times::<R, C>(times::<R, C>(p, r), r);
        let one: Tile<f32, { [R, C] }> = number::<R, C>(0x3f80_0000i32);
        let p: Tile<f32, { [R, C] }> = plus::<R, C>(plus::<R, C>(p, r), one);
        let exponent: Tile<i32, { [R, C] }> = bitcast(shifted);
        // 127 less the bits of 1.5 * 2^23.
        let bias: Tile<i32, { [R, C] }> = constant(-1262485377i32, shape![R, C]);
        let places: Tile<i32, { [R, C] }> = constant(23i32, shape![R, C]);
        let power: Tile<i32, { [R, C] }> = (exponent + bias) << places;
        let power: Tile<f32, { [R, C] }> = bitcast(power);
        let nothing: Tile<f32, { [R, C] }> = number::<R, C>(0i32);
        let tiny: Tile<bool, { [R, C] }> = lt_tile(x, number::<R, C>(-1028784128i32));
        select(tiny, nothing, times::<R, C>(p, power))
    }

    /// The power of `math::ln_split`.
    pub fn ln_power<const R: i32, const C: i32>(x: Tile<f32, { [R, C] }>) -> Tile<f32, { [R, C] }> {
        let bits: Tile<i32, { [R, C] }> = bitcast(x);
        let half: Tile<i32, { [R, C] }> = constant(0x3f35_04f3i32, shape![R, C]);
        let places: Tile<i32, { [R, C] }> = constant(23i32, shape![R, C]);
        let power: Tile<f32, { [R, C] }> = convert_tile((bits - half) >> places);
        power
    }

    /// The fraction of `math::ln_split`.
    pub fn ln_fraction<const R: i32, const C: i32>(
        x: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let bits: Tile<i32, { [R, C] }> = bitcast(x);
        let half: Tile<i32, { [R, C] }> = constant(0x3f35_04f3i32, shape![R, C]);
        let mantissa: Tile<i32, { [R, C] }> = constant(0x007f_ffffi32, shape![R, C]);
        let bits: Tile<i32, { [R, C] }> = ((bits - half) & mantissa) + half;
        let fraction: Tile<f32, { [R, C] }> = bitcast(bits);
        minus::<R, C>(fraction, number::<R, C>(0x3f80_0000i32))
    }

    /// `math::ln_join`.
    pub fn ln_join<const R: i32, const C: i32>(
        k: Tile<f32, { [R, C] }>,
        f: Tile<f32, { [R, C] }>,
    ) -> Tile<f32, { [R, C] }> {
        let s: Tile<f32, { [R, C] }> = times::<R, C>(f, f);
        let p: Tile<f32, { [R, C] }> = number::<R, C>(1032767315i32);
        let p: Tile<f32, { [R, C] }> = horner::<R, C>(p, f, -1108665634i32);
        let p: Tile<f32, { [R, C] }> = horner::<R, C>(p, f, 1039094081i32);
        let p: Tile<f32, { [R, C] }> = horner::<R, C>(p, f, -1107395997i32);
        let p: Tile<f32, { [R, C] }> = horner::<R, C>(p, f, 1041361165i32);
        let p: Tile<f32, { [R, C] }> = horner::<R, C>(p, f, -1104499291i32);
        let p: Tile<f32, { [R, C] }> = horner::<R, C>(p, f, 1045221037i32);
        let p: Tile<f32, { [R, C] }> = horner::<R, C>(p, f, -1098907650i32);
        let p: Tile<f32, { [R, C] }> = horner::<R, C>(p, f, 1051372202i32);
        let p: Tile<f32, { [R, C] }> = times::<R, C>(times::<R, C>(f, p), s);
        let low: Tile<f32, { [R, C] }> = times::<R, C>(k, number::<R, C>(-1184989053i32));
        let half: Tile<f32, { [R, C] }> = times::<R, C>(number::<R, C>(0x3f00_0000i32), s);
        let tail: Tile<f32, { [R, C] }> = minus::<R, C>(plus::<R, C>(p, low), half);
        let high: Tile<f32, { [R, C] }> = times::<R, C>(k, number::<R, C>(1060208640i32));
        plus::<R, C>(plus::<R, C>(tail, f), high)
    }

    /// `rng::mix`, with shifts that bring in zeros.
    pub fn mix<const R: i32, const C: i32>(x: Tile<i32, { [R, C] }>) -> Tile<i32, { [R, C] }> {
        let sixteen: Tile<i32, { [R, C] }> = constant(16i32, shape![R, C]);
        let thirteen: Tile<i32, { [R, C] }> = constant(13i32, shape![R, C]);
        let low16: Tile<i32, { [R, C] }> = constant(0xffffi32, shape![R, C]);
        let low19: Tile<i32, { [R, C] }> = constant(0x0007_ffffi32, shape![R, C]);
        let a: Tile<i32, { [R, C] }> = constant(-2048144789i32, shape![R, C]);
        let b: Tile<i32, { [R, C] }> = constant(-1028477387i32, shape![R, C]);
        let x: Tile<i32, { [R, C] }> = (x ^ ((x >> sixteen) & low16)) * a;
        let x: Tile<i32, { [R, C] }> = (x ^ ((x >> thirteen) & low19)) * b;
        x ^ ((x >> sixteen) & low16)
    }

    /// `rng::Row::gumbel` of the row with the words `key_0` and `key_1`.
    pub fn gumbel<const R: i32, const C: i32>(
        id: Tile<i32, { [R, C] }>,
        key_0: i32,
        key_1: i32,
    ) -> Tile<f32, { [R, C] }> {
        let key_0: Tile<i32, { [R, C] }> = broadcast_scalar(key_0, shape![R, C]);
        let key_1: Tile<i32, { [R, C] }> = broadcast_scalar(key_1, shape![R, C]);
        let bits: Tile<i32, { [R, C] }> = mix::<R, C>(mix::<R, C>(id ^ key_0) + key_1);
        let nothing: Tile<i32, { [R, C] }> = constant(0i32, shape![R, C]);
        let low: Tile<bool, { [R, C] }> = ge_tile(bits, nothing);
        let places: Tile<i32, { [R, C] }> = constant(31i32, shape![R, C]);
        let h: Tile<i32, { [R, C] }> = bits ^ (bits >> places);
        let h: Tile<f32, { [R, C] }> = convert_tile(h);
        // (h + 1/2) * 2^-32.
        let s: Tile<f32, { [R, C] }> = times::<R, C>(
            plus::<R, C>(h, number::<R, C>(0x3f00_0000i32)),
            number::<R, C>(0x2f80_0000i32),
        );
        let near: Tile<bool, { [R, C] }> = lt_tile(s, number::<R, C>(1049918177i32));
        let zero: Tile<f32, { [R, C] }> = number::<R, C>(0i32);
        let one: Tile<f32, { [R, C] }> = number::<R, C>(0x3f80_0000i32);
        let two: Tile<f32, { [R, C] }> = number::<R, C>(0x4000_0000i32);
        let less: Tile<f32, { [R, C] }> = negf(one);
        let k: Tile<f32, { [R, C] }> = select(near, zero, less);
        let f: Tile<f32, { [R, C] }> =
            select(near, negf(s), minus::<R, C>(one, times::<R, C>(two, s)));
        let k: Tile<f32, { [R, C] }> = select(low, k, ln_power::<R, C>(s));
        let f: Tile<f32, { [R, C] }> = select(low, f, ln_fraction::<R, C>(s));
        let e: Tile<f32, { [R, C] }> = negf(ln_join::<R, C>(k, f));
        negf(ln_join::<R, C>(ln_power::<R, C>(e), ln_fraction::<R, C>(e)))
    }

    /// Integers in the order of the numbers, the same for 0 and -0: `filters::ascending` with its upper bit
    /// turned over, as tiles are compared with a sign.
    pub fn rank<const R: i32, const C: i32>(x: Tile<f32, { [R, C] }>) -> Tile<i32, { [R, C] }> {
        let bits: Tile<i32, { [R, C] }> = bitcast(x);
        let places: Tile<i32, { [R, C] }> = constant(31i32, shape![R, C]);
        let others: Tile<i32, { [R, C] }> = constant(0x7fff_ffffi32, shape![R, C]);
        let rank: Tile<i32, { [R, C] }> = bits ^ ((bits >> places) & others);
        let zero: Tile<bool, { [R, C] }> = eq_tile(x, number::<R, C>(0i32));
        let nothing: Tile<i32, { [R, C] }> = constant(0i32, shape![R, C]);
        select(zero, nothing, rank)
    }
}
