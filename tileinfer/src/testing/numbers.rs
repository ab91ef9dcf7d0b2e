//! Random numbers that are the same everywhere, and how near two lists of numbers are.

use crate::weights::{ComputeType, Weight, WeightData, WeightPart};

/// A small generator (splitmix64): the same numbers on every machine.
#[derive(Debug, Clone)]
pub struct Numbers(u64);

impl Numbers {
    /// The numbers of `seed`.
    pub fn new(seed: u64) -> Self {
        Numbers(seed)
    }

    /// The next 64 random bits.
    pub fn bits(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let value = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        value ^ (value >> 31)
    }

    /// A number below `end`.
    pub fn below(&mut self, end: usize) -> usize {
        (self.bits() % end.max(1) as u64) as usize
    }

    /// A number about as a normal one with standard deviation `deviation`.
    pub fn normal(&mut self, deviation: f32) -> f32 {
        let sum: f32 = (0..4)
            .map(|_| (self.bits() >> 40) as f32 / (1u64 << 24) as f32 - 0.5)
            .sum();
        sum * deviation * 3f32.sqrt()
    }

    /// `count` of them, as `kind` can hold them.
    pub fn normals(&mut self, count: usize, deviation: f32, kind: ComputeType) -> Vec<f32> {
        (0..count)
            .map(|_| kind.round(self.normal(deviation)))
            .collect()
    }
}

/// Panics, saying where, unless each of `found` is within `tolerance` of `expected` in units of the largest
/// of the latter (at least 1).
pub fn assert_close(what: &str, found: &[f32], expected: &[f32], tolerance: f32) {
    assert_eq!(
        found.len(),
        expected.len(),
        "{what}: another number of values"
    );
    let scale = expected
        .iter()
        .fold(1.0f32, |scale, value| scale.max(value.abs()));
    for (i, (&found, &expected)) in found.iter().zip(expected).enumerate() {
        let near = (found - expected).abs() <= tolerance * scale;
        assert!(
            near,
            "{what}: value {i} is {found} and should be {expected} (largest {scale})"
        );
    }
}

/// A weight of one part that holds `values`, rounded to `kind`.
pub fn weight(rows: usize, cols: usize, values: &[f32], kind: ComputeType) -> Weight {
    let data = match kind {
        ComputeType::Bf16 => {
            let bits = values
                .iter()
                .map(|&value| (kind.round(value).to_bits() >> 16) as u16);
            WeightData::OwnedBf16(bits.collect())
        }
        ComputeType::F32 => WeightData::OwnedF32(values.into()),
    };
    let part = WeightPart::new(rows, cols, data).and_then(|part| Weight::new(vec![part]));
    part.expect("the values fill the weight")
}
