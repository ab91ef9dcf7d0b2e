//! Plain Rust with the structure of the vector levels: 8 lanes in an array, which compilers vectorise.

use super::Isa;

/// Runs anywhere.
#[derive(Debug, Clone, Copy)]
pub(super) struct Portable;

const LANES: usize = 8;

#[derive(Debug, Clone, Copy)]
#[repr(align(32))]
pub(super) struct Lanes([f32; LANES]);

#[inline(always)]
fn zip(a: Lanes, b: Lanes, f: impl Fn(f32, f32) -> f32) -> Lanes {
    let mut out = [0.0; LANES];
    for i in 0..LANES {
        out[i] = f(a.0[i], b.0[i]);
    }
    Lanes(out)
}

impl Isa for Portable {
    type V = Lanes;
    const LANES: usize = LANES;
    const TILE_ROWS: usize = 1;
    const TILE_QUERIES: usize = 2;

    #[inline(always)]
    fn splat(self, x: f32) -> Lanes {
        Lanes([x; LANES])
    }
    #[inline(always)]
    unsafe fn load(self, p: *const f32) -> Lanes {
        // SAFETY: the caller promises LANES readable f32.
        Lanes(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }
    #[inline(always)]
    unsafe fn store(self, p: *mut f32, v: Lanes) {
        // SAFETY: the caller promises LANES writable f32.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(v.0) };
    }
    #[inline(always)]
    fn add(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a + b)
    }
    #[inline(always)]
    fn sub(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a - b)
    }
    #[inline(always)]
    fn mul(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a * b)
    }
    #[inline(always)]
    fn div(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| a / b)
    }
    #[inline(always)]
    fn mul_add(self, a: Lanes, b: Lanes, c: Lanes) -> Lanes {
        // Not `f32::mul_add`: without the instruction that is a call per lane.
        self.add(self.mul(a, b), c)
    }
    #[inline(always)]
    fn max(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| if a > b { a } else { b })
    }
    #[inline(always)]
    fn min(self, a: Lanes, b: Lanes) -> Lanes {
        zip(a, b, |a, b| if a < b { a } else { b })
    }
    #[inline(always)]
    fn select_positive(self, x: Lanes, yes: Lanes, no: Lanes) -> Lanes {
        let mut out = no;
        for i in 0..LANES {
            if x.0[i] > 0.0 {
                out.0[i] = yes.0[i];
            }
        }
        out
    }
    #[inline(always)]
    fn add_exponent(self, x: Lanes, k: Lanes) -> Lanes {
        zip(x, k, |x, k| {
            f32::from_bits(x.to_bits().wrapping_add(k.to_bits() << 23))
        })
    }
    #[inline(always)]
    fn round_bf16(self, v: Lanes) -> Lanes {
        let mut out = [0.0; LANES];
        for i in 0..LANES {
            let bits = v.0[i].to_bits();
            let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
            let nan = (bits & 0x7fff_ffff) > 0x7f80_0000;
            out[i] = f32::from_bits(if nan { f32::NAN.to_bits() } else { rounded });
        }
        Lanes(out)
    }
    #[inline(always)]
    unsafe fn load_bf16_pair(self, p: *const u8) -> (Lanes, Lanes) {
        // SAFETY: the caller promises 2 * LANES readable bf16.
        let raw = unsafe { p.cast::<[u32; LANES]>().read_unaligned() };
        let (mut even, mut odd) = ([0.0; LANES], [0.0; LANES]);
        for i in 0..LANES {
            let pair = u32::from_le(raw[i]);
            even[i] = f32::from_bits(pair << 16);
            odd[i] = f32::from_bits(pair & 0xffff_0000);
        }
        (Lanes(even), Lanes(odd))
    }
    #[inline(always)]
    unsafe fn load_f16_pair(self, p: *const u8) -> (Lanes, Lanes) {
        // SAFETY: the caller promises 2 * LANES readable f16.
        let raw = unsafe { p.cast::<[u16; 2 * LANES]>().read_unaligned() };
        let (mut first, mut second) = ([0.0; LANES], [0.0; LANES]);
        for i in 0..LANES {
            first[i] = half::f16::from_bits(raw[i]).to_f32();
            second[i] = half::f16::from_bits(raw[i + LANES]).to_f32();
        }
        (Lanes(first), Lanes(second))
    }
    #[inline(always)]
    unsafe fn load_i8(self, p: *const u8) -> Lanes {
        // SAFETY: the caller promises LANES readable bytes.
        let raw = unsafe { p.cast::<[i8; LANES]>().read_unaligned() };
        let mut wide = [0.0; LANES];
        for i in 0..LANES {
            wide[i] = f32::from(raw[i]);
        }
        Lanes(wide)
    }
    #[inline(always)]
    unsafe fn load_deinterleaved(self, p: *const f32) -> (Lanes, Lanes) {
        // SAFETY: the caller promises 2 * LANES readable f32.
        let raw = unsafe { p.cast::<[f32; 2 * LANES]>().read_unaligned() };
        let (mut even, mut odd) = ([0.0; LANES], [0.0; LANES]);
        for i in 0..LANES {
            even[i] = raw[2 * i];
            odd[i] = raw[2 * i + 1];
        }
        (Lanes(even), Lanes(odd))
    }
    #[inline(always)]
    unsafe fn store_interleaved(self, p: *mut f32, even: Lanes, odd: Lanes) {
        let mut raw = [0.0; 2 * LANES];
        for i in 0..LANES {
            raw[2 * i] = even.0[i];
            raw[2 * i + 1] = odd.0[i];
        }
        // SAFETY: the caller promises 2 * LANES writable f32.
        unsafe { p.cast::<[f32; 2 * LANES]>().write_unaligned(raw) };
    }
    #[inline(always)]
    fn reduce_add4(self, v: [Lanes; 4]) -> [f32; 4] {
        let mut sums = [0.0; 4];
        for (sum, Lanes(x)) in sums.iter_mut().zip(v) {
            let four = [x[0] + x[4], x[1] + x[5], x[2] + x[6], x[3] + x[7]];
            *sum = (four[0] + four[2]) + (four[1] + four[3]);
        }
        sums
    }
    #[inline(always)]
    fn reduce_max(self, v: Lanes) -> f32 {
        v.0.iter().copied().fold(f32::NEG_INFINITY, f32::max)
    }
    #[inline(always)]
    fn prefetch(self, _p: *const u8) {}
}
