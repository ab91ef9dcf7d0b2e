//! Rotary position embedding: which frequencies the two halves of a head are rotated with.
//!
//! How a pair is rotated is the backend's business: element `j` and element `j + head_dim / 2` share frequency `j`.

use serde::Serialize;
use std::f64::consts::PI;

/// Rotary position embedding of a model. All of `head_dim` is rotated.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rope {
    /// Base of the geometric series of wavelengths.
    pub theta: f64,
    /// How the plain frequencies are changed to reach longer contexts.
    pub kind: RopeKind,
    /// Position-dependent factor on the queries, if the model has one.
    pub query_scale: Option<QueryScale>,
}

/// How the plain frequencies `theta^(-2j/d)` are changed.
#[derive(Debug, Clone, PartialEq, Serialize)]
#[serde(tag = "rope_type", rename_all = "lowercase")]
pub enum RopeKind {
    /// Not at all.
    Default,
    /// Divided by `factor`.
    Linear {
        /// Ratio of the new context to the old.
        factor: f64,
    },
    /// Low frequencies divided by `factor`, high ones kept, those between interpolated (Llama 3.1).
    Llama3 {
        /// Ratio of the new context to the old.
        factor: f64,
        /// Wavelengths above `original_max / low_freq_factor` are stretched in full.
        low_freq_factor: f64,
        /// Wavelengths below `original_max / high_freq_factor` are kept.
        high_freq_factor: f64,
        /// Context before stretching, in positions.
        original_max: usize,
    },
    /// YaRN (arXiv 2309.00071): a ramp over the frequency's index, and a factor on cosine and sine.
    Yarn {
        /// Ratio of the new context to the old.
        factor: f64,
        /// Context before stretching, in positions.
        original_max: usize,
        /// Rotations over the original context above which a frequency is kept.
        beta_fast: f64,
        /// Rotations over the original context below which a frequency is stretched in full.
        beta_slow: f64,
        /// Whether the ramp's ends are rounded to whole indices.
        truncate: bool,
        /// What cosine and sine are multiplied by, already resolved.
        attention_factor: f64,
    },
}

/// Queries at position `p` are multiplied by `1 + beta * ln(1 + floor(p / original_max))` after RoPE (Ministral 3).
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct QueryScale {
    /// `llama_4_scaling_beta`.
    pub beta: f64,
    /// Positions below this one are not scaled.
    pub original_max: usize,
}

impl QueryScale {
    /// The factor at `position`.
    pub fn at(&self, position: usize) -> f32 {
        (1.0 + self.beta * ((1 + position / self.original_max) as f64).ln()) as f32
    }
}

impl Rope {
    /// Radians per position of the `head_dim / 2` pairs.
    ///
    /// Every step is rounded to f32, as transformers computes it in f32: angles at positions far out are the product
    /// of these and a large number, so their last bit shows.
    pub fn inv_freq(&self, head_dim: usize) -> Vec<f32> {
        let powers: Vec<f32> = (0..head_dim / 2)
            .map(|j| {
                let exponent = (2 * j) as f32 / head_dim as f32;
                self.theta.powf(f64::from(exponent)) as f32
            })
            .collect();
        match self.kind {
            RopeKind::Default => powers.iter().map(|power| 1.0 / power).collect(),
            RopeKind::Linear { factor } => powers
                .iter()
                .map(|power| 1.0 / power / factor as f32)
                .collect(),
            RopeKind::Llama3 {
                factor,
                low_freq_factor,
                high_freq_factor,
                original_max,
            } => {
                let [factor, low, high] =
                    [factor, low_freq_factor, high_freq_factor].map(|value| value as f32);
                let original = original_max as f32;
                let stretch = |power: &f32| {
                    let frequency = 1.0 / power;
                    let wavelength = (2.0 * PI) as f32 / frequency;
                    if wavelength > original / low {
                        return frequency / factor;
                    }
                    if wavelength < original / high {
                        return frequency;
                    }
                    let keep = (original / wavelength - low) / (high - low);
                    (1.0 - keep) * frequency / factor + keep * frequency
                };
                powers.iter().map(stretch).collect()
            }
            RopeKind::Yarn {
                factor,
                original_max,
                beta_fast,
                beta_slow,
                truncate,
                ..
            } => {
                let (low, high) = yarn_ramp(
                    head_dim,
                    self.theta,
                    original_max,
                    [beta_fast, beta_slow],
                    truncate,
                );
                let (low, width) = (low as f32, (high - low) as f32);
                let stretch = |(j, power): (usize, &f32)| {
                    let keep = 1.0 - ((j as f32 - low) / width).clamp(0.0, 1.0);
                    1.0 / (factor as f32 * power) * (1.0 - keep) + 1.0 / power * keep
                };
                powers.iter().enumerate().map(stretch).collect()
            }
        }
    }

    /// What cosine and sine are multiplied by.
    pub fn attention_factor(&self) -> f32 {
        match self.kind {
            RopeKind::Yarn {
                attention_factor, ..
            } => attention_factor as f32,
            _ => 1.0,
        }
    }
}

/// The indices between which YaRN goes from keeping a frequency to stretching it.
fn yarn_ramp(
    head_dim: usize,
    theta: f64,
    original_max: usize,
    betas: [f64; 2],
    truncate: bool,
) -> (f64, f64) {
    // The index whose frequency turns `rotations` times over the original context.
    let index = |rotations: f64| {
        head_dim as f64 * (original_max as f64 / (rotations * 2.0 * PI)).ln() / (2.0 * theta.ln())
    };
    let [mut low, mut high] = betas.map(index);
    if truncate {
        (low, high) = (low.floor(), high.ceil());
    }
    low = low.max(0.0);
    high = high.min((head_dim - 1) as f64);
    if low == high {
        high += 0.001;
    }
    (low, high)
}

/// YaRN's factor on cosine and sine for a stretch of `factor`.
pub(super) fn yarn_mscale(factor: f64, mscale: f64) -> f64 {
    if factor <= 1.0 {
        1.0
    } else {
        0.1 * mscale * factor.ln() + 1.0
    }
}
