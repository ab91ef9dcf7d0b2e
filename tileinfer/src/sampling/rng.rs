//! Noise as a pure function of (seed, position, token id, stream): no state, so it cannot see batching,
//! preemption or speculation. It knows nothing of logits.
//!
//! All arithmetic is on 32-bit words, wrapping. `mix` is the finaliser of MurmurHash3 (Austin Appleby,
//! public domain), a bijection of 32 bits:
//! x ^= x >> 16, x *= 0x85ebca6b, x ^= x >> 13, x *= 0xc2b2ae35, x ^= x >> 16.
//! - A row's key is two words. Word j starts as `START[j] ^ stream` and absorbs the four words w of
//!   (seed low, seed high, position low, position high): k = mix(k ^ w) + 0x9e3779b9.
//! - A token's 32 bits are mix(mix(id ^ key\[0\]) + key\[1\]): within a row, no two tokens share theirs.
//! - The [`Row::uniform`] of a row is (mix(mix(key\[0\]) + key\[1\]) >> 8) · 2^-24.
//! - Gumbel noise is −ln(E), E = −ln(1 − v) with v = (bits + ½) · 2^-32. To keep all of v's digits at both
//!   ends, with h = min(bits, !bits) and s = (h + ½) · 2^-32 (h converted to f32, a sum, a product):
//!   E = −ln(1 − s) if bits < 2^31, where 1 − s = 1 + f with f = −s down to s = 0.29 and 2^-1 (1 + f) with
//!   f = 1 − 2 s above; else E = −ln(s). So E lies in [2^-33, 22.9] and the noise in [−3.2, 22.9].

use super::math::{ln, ln_join, ln_split};

/// What a draw is for. Draws of different streams are independent, which the accept test of speculative
/// sampling needs: its law holds only if target, draft and accept noise do not know of each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Stream {
    /// The token of the text, or the one drawn in place of a rejected draft.
    #[default]
    Target,
    /// A drafter's token.
    Draft,
    /// The uniform number that accepts or rejects a draft.
    Accept,
}

impl Stream {
    fn salt(self) -> u32 {
        match self {
            Stream::Target => 0,
            Stream::Draft => 0x6472_6166,
            Stream::Accept => 0x6163_6365,
        }
    }
}

/// The first 64 fractional bits of π.
const START: [u32; 2] = [0x243f_6a88, 0x85a3_08d3];

/// No Gumbel noise is further from another than this, so a token whose scaled logit is further below the
/// best one's can be left out of a draw without changing it.
pub(super) const GUMBEL_RANGE: f32 = 27.0;

#[inline(always)]
fn mix(mut x: u32) -> u32 {
    x = (x ^ (x >> 16)).wrapping_mul(0x85eb_ca6b);
    x = (x ^ (x >> 13)).wrapping_mul(0xc2b2_ae35);
    x ^ (x >> 16)
}

/// The noise of one (seed, position, stream).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row {
    key: [u32; 2],
}

impl Row {
    /// `position` is that of the token to be drawn, counted from the start of the sequence.
    pub fn new(seed: u64, position: u64, stream: Stream) -> Self {
        let words = [seed, seed >> 32, position, position >> 32].map(|word| word as u32);
        let key = START.map(|start| {
            words.iter().fold(start ^ stream.salt(), |key, word| {
                mix(key ^ word).wrapping_add(0x9e37_79b9)
            })
        });
        Row { key }
    }

    /// The two words a device needs to make the row's noise itself.
    pub fn key(&self) -> [u32; 2] {
        self.key
    }

    /// The 32 bits that a token's noise is made from.
    #[inline(always)]
    pub(super) fn bits(&self, id: u32) -> u32 {
        mix(mix(id ^ self.key[0]).wrapping_add(self.key[1]))
    }

    /// A uniform number in [0, 1), a multiple of 2^-24.
    pub fn uniform(&self) -> f32 {
        (self.bits(0) >> 8) as f32 * (1.0 / 16_777_216.0)
    }

    /// The Gumbel noise of a token.
    #[inline(always)]
    pub fn gumbel(&self, id: u32) -> f32 {
        gumbel(self.bits(id))
    }
}

/// No less than [`gumbel`] of the same bits. As E >= v >= 2^-(z + 1), z being the number of leading zeros,
/// the noise is at most (z + 1) ln 2; the bound is a little larger to cover all rounding.
#[inline(always)]
pub(super) fn gumbel_bound(bits: u32) -> f32 {
    (bits.leading_zeros() + 1) as f32 * 0.6932 + 0.001
}

/// The Gumbel noise of 32 bits.
#[inline(always)]
pub(super) fn gumbel(bits: u32) -> f32 {
    let low = (bits as i32) >= 0;
    let h = if low { bits } else { !bits };
    let s = ((h as i32) as f32 + 0.5) * (1.0 / 4_294_967_296.0);
    let near = s < 0.29;
    let below = (
        if near { 0.0 } else { -1.0 },
        if near { -s } else { 1.0 - 2.0 * s },
    );
    let above = ln_split(s);
    let k = if low { below.0 } else { above.0 };
    let f = if low { below.1 } else { above.1 };
    -ln(-ln_join(k, f))
}

/// A seed from the operating system, for requests that give none.
///
/// # Errors
/// [`Error::Device`](crate::Error::Device) if the system has no random numbers.
pub fn random_seed() -> crate::Result<u64> {
    getrandom::u64().map_err(|error| {
        crate::Error::Device(format!(
            "the operating system gave no random seed ({error}); set a seed"
        ))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn gumbel_follows_its_formula() {
        let mut bits = 0_u32;
        let edges = [
            0,
            1,
            2,
            0x7fff_ffff,
            0x8000_0000,
            0x4a3d_70a3,
            0x4a3d_70a4,
            u32::MAX - 1,
            u32::MAX,
        ];
        let steps = std::iter::from_fn(|| {
            bits = bits.checked_add(40_009)?;
            Some(bits)
        });
        for bits in edges.into_iter().chain(steps) {
            let v = (f64::from(bits) + 0.5) / 4_294_967_296.0;
            let exact = -(-(-v).ln_1p()).ln();
            let got = f64::from(gumbel(bits));
            assert!(gumbel(bits) < gumbel_bound(bits));
            assert!(
                (got - exact).abs() <= 3e-7 * exact.abs().max(1.0),
                "{bits:#x}: {got} {exact}"
            );
        }
        assert!(gumbel(0) - gumbel(u32::MAX) < GUMBEL_RANGE);
    }

    /// From a separate implementation of the text (doubles rounded to f32 after each operation).
    #[test]
    fn known_bits() {
        let row = Row::new(0x0123_4567_89ab_cdef, 41, Stream::Target);
        assert_eq!(row.key(), [502_316_611, 3_122_578_398]);
        assert_eq!(row.uniform().to_bits(), 1_063_526_177);
        let draws = [0, 1, 151_935].map(|id| row.gumbel(id).to_bits());
        assert_eq!(draws, [3_209_419_376, 1_071_320_848, 1_070_264_594]);
    }

    #[test]
    fn random_seeds_differ() {
        assert_ne!(random_seed().unwrap(), random_seed().unwrap());
    }

    #[test]
    fn each_part_of_the_key_matters() {
        let base = Row::new(1, 2, Stream::Target);
        for other in [
            Row::new(2, 2, Stream::Target),
            Row::new(1 | 1 << 40, 2, Stream::Target),
            Row::new(1, 3, Stream::Target),
            Row::new(1, 2 | 1 << 40, Stream::Target),
            Row::new(2, 1, Stream::Target),
            Row::new(1, 2, Stream::Draft),
            Row::new(1, 2, Stream::Accept),
        ] {
            assert!(base.key[0] != other.key[0] && base.key[1] != other.key[1]);
            let alike = (0..1000)
                .filter(|&id| base.gumbel(id) == other.gumbel(id))
                .count();
            assert_eq!(alike, 0);
        }
    }

    /// Chi-square with 255 degrees of freedom: mean 255, deviation 22.6; 370 is beyond five deviations.
    fn chi_square_256(draws: impl Iterator<Item = u32>) -> f64 {
        let mut counts = [0_u32; 256];
        let mut n = 0.0;
        for bits in draws {
            counts[(bits >> 24) as usize] += 1;
            n += 1.0;
        }
        let mean = n / 256.0;
        counts
            .iter()
            .map(|&c| (f64::from(c) - mean).powi(2) / mean)
            .sum()
    }

    #[test]
    fn bits_are_uniform_along_each_coordinate() {
        let n = 1 << 17;
        let along_id = (0..n).map(|i| Row::new(7, 9, Stream::Target).bits(i));
        let along_position = (0..n).map(|i| Row::new(7, u64::from(i), Stream::Target).bits(9));
        let along_seed = (0..n).map(|i| Row::new(u64::from(i), 7, Stream::Draft).bits(9));
        let diagonal = (0..n).map(|i| Row::new(3, u64::from(i), Stream::Accept).bits(i));
        for chi in [
            chi_square_256(along_id),
            chi_square_256(along_position),
            chi_square_256(along_seed),
            chi_square_256(diagonal),
        ] {
            assert!((140.0..370.0).contains(&chi), "{chi}");
        }
    }

    /// The top four bits of two neighbouring draws, as 256 pairs.
    #[test]
    fn neighbours_are_independent() {
        let n = 1 << 17;
        let pair = |a: u32, b: u32| (a >> 28 << 28) | (b >> 28 << 24);
        let at =
            |position: u32, id: u32, stream| Row::new(11, u64::from(position), stream).bits(id);
        let t = Stream::Target;
        for chi in [
            chi_square_256((0..n).map(|i| pair(at(i, 5, t), at(i + 1, 5, t)))),
            chi_square_256((0..n).map(|i| pair(at(i, 5, t), at(i, 6, t)))),
            chi_square_256((0..n).map(|i| pair(at(i, i, t), at(i + 1, i + 1, t)))),
            chi_square_256((0..n).map(|i| pair(at(i, 5, t), at(i, 5, Stream::Draft)))),
            chi_square_256((0..n).map(|i| pair(at(i, 0, Stream::Accept), at(i, 5, Stream::Draft)))),
        ] {
            assert!((140.0..370.0).contains(&chi), "{chi}");
        }
    }
}
