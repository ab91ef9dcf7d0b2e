//! What a request may ask of sampling, and which values make sense. It knows nothing of logits.

use serde::Serialize;

use crate::{Error, Result};

/// Below this a temperature is taken as zero: one rounding step of a logit near 10 would already decide.
const GREEDY_BELOW: f32 = 1e-6;

/// How the next token is chosen from the logits. The default is greedy decoding with everything off.
///
/// The operations run in the order of transformers' `generate`: bias, penalties, temperature, top-k,
/// top-p, min-p, each seeing only what the one before left.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct SamplingParams {
    /// Divides the logits; 0 (and anything below 1e-6) is greedy decoding. 0 or more.
    pub temperature: f32,
    /// Keeps the logits at least as large as the `top_k`-th largest, all ties included; 0 is off.
    pub top_k: u32,
    /// Keeps a token if the probabilities of all better ones sum to less than this; 1 is off. In (0, 1].
    pub top_p: f32,
    /// Keeps a token if it has at least this share of the best one's probability; 0 is off. In [0, 1].
    pub min_p: f32,
    /// Divides positive and multiplies other logits of tokens seen in prompt or output; 1 is off. In [0.01, 100].
    pub repetition_penalty: f32,
    /// Subtracted from the logits of tokens seen in the output; 0 is off. In [-2, 2].
    pub presence_penalty: f32,
    /// Subtracted once for each time a token occurs in the output; 0 is off. In [-2, 2].
    pub frequency_penalty: f32,
    /// Added to the logits of single tokens, before all else; each value in [-100, 100], each token once.
    pub logit_bias: Vec<(u32, f32)>,
}

impl Default for SamplingParams {
    fn default() -> Self {
        SamplingParams {
            temperature: 0.0,
            top_k: 0,
            top_p: 1.0,
            min_p: 0.0,
            repetition_penalty: 1.0,
            presence_penalty: 0.0,
            frequency_penalty: 0.0,
            logit_bias: Vec::new(),
        }
    }
}

impl SamplingParams {
    /// Whether the token is the largest logit (after bias and penalties), without noise.
    pub fn is_greedy(&self) -> bool {
        self.temperature < GREEDY_BELOW
    }

    /// Whether [`TokenCounts`](super::TokenCounts) are needed.
    pub fn has_penalties(&self) -> bool {
        self.repetition_penalty != 1.0
            || self.presence_penalty != 0.0
            || self.frequency_penalty != 0.0
    }

    /// Checks every parameter against its range.
    ///
    /// # Errors
    /// [`Error::Usage`] naming the parameter, its value and its range; NaN is outside of every range.
    pub fn validate(&self) -> Result<()> {
        let check = |name: &str, value: f32, fine: bool, range: &str| {
            if fine {
                return Ok(());
            }
            Err(Error::usage(format!(
                "{name} is {value}, it must be {range}"
            )))
        };
        let t = self.temperature;
        check(
            "temperature",
            t,
            t >= 0.0 && t.is_finite(),
            "a finite number, 0 or more",
        )?;
        let p = self.top_p;
        check(
            "top_p",
            p,
            p > 0.0 && p <= 1.0,
            "above 0 and at most 1 (1 is off)",
        )?;
        let m = self.min_p;
        check(
            "min_p",
            m,
            (0.0..=1.0).contains(&m),
            "between 0 (off) and 1",
        )?;
        let r = self.repetition_penalty;
        check(
            "repetition_penalty",
            r,
            (0.01..=100.0).contains(&r),
            "between 0.01 and 100 (1 is off)",
        )?;
        for (name, value) in [
            ("presence_penalty", self.presence_penalty),
            ("frequency_penalty", self.frequency_penalty),
        ] {
            check(
                name,
                value,
                (-2.0..=2.0).contains(&value),
                "between -2 and 2 (0 is off)",
            )?;
        }
        for &(id, bias) in &self.logit_bias {
            let fine = (-100.0..=100.0).contains(&bias);
            check(
                &format!("logit_bias of token {id}"),
                bias,
                fine,
                "between -100 and 100",
            )?;
        }
        let mut biased: Vec<u32> = self.logit_bias.iter().map(|&(id, _)| id).collect();
        biased.sort_unstable();
        if let Some(twice) = biased.windows(2).find(|pair| pair[0] == pair[1]) {
            return Err(Error::usage(format!(
                "logit_bias names token {} twice",
                twice[0]
            )));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn default_is_valid_and_greedy() {
        let params = SamplingParams::default();
        params.validate().unwrap();
        assert!(params.is_greedy() && !params.has_penalties());
    }

    #[test]
    fn each_range_is_checked_and_named() {
        let d = SamplingParams::default;
        let bad: Vec<(&str, SamplingParams)> = vec![
            (
                "temperature",
                SamplingParams {
                    temperature: -0.1,
                    ..d()
                },
            ),
            (
                "temperature",
                SamplingParams {
                    temperature: f32::NAN,
                    ..d()
                },
            ),
            (
                "temperature",
                SamplingParams {
                    temperature: f32::INFINITY,
                    ..d()
                },
            ),
            ("top_p", SamplingParams { top_p: 0.0, ..d() }),
            ("top_p", SamplingParams { top_p: 1.01, ..d() }),
            (
                "top_p",
                SamplingParams {
                    top_p: f32::NAN,
                    ..d()
                },
            ),
            (
                "min_p",
                SamplingParams {
                    min_p: -0.01,
                    ..d()
                },
            ),
            ("min_p", SamplingParams { min_p: 1.5, ..d() }),
            (
                "min_p",
                SamplingParams {
                    min_p: f32::NAN,
                    ..d()
                },
            ),
            (
                "repetition_penalty",
                SamplingParams {
                    repetition_penalty: 0.0,
                    ..d()
                },
            ),
            (
                "repetition_penalty",
                SamplingParams {
                    repetition_penalty: f32::NAN,
                    ..d()
                },
            ),
            (
                "presence_penalty",
                SamplingParams {
                    presence_penalty: 2.1,
                    ..d()
                },
            ),
            (
                "presence_penalty",
                SamplingParams {
                    presence_penalty: f32::NAN,
                    ..d()
                },
            ),
            (
                "frequency_penalty",
                SamplingParams {
                    frequency_penalty: -2.1,
                    ..d()
                },
            ),
            (
                "frequency_penalty",
                SamplingParams {
                    frequency_penalty: f32::NAN,
                    ..d()
                },
            ),
            (
                "logit_bias of token 7",
                SamplingParams {
                    logit_bias: vec![(7, 101.0)],
                    ..d()
                },
            ),
            (
                "logit_bias of token 7",
                SamplingParams {
                    logit_bias: vec![(7, f32::NAN)],
                    ..d()
                },
            ),
            (
                "token 7 twice",
                SamplingParams {
                    logit_bias: vec![(7, 1.0), (3, 1.0), (7, 1.0)],
                    ..d()
                },
            ),
        ];
        for (name, params) in bad {
            let error = params.validate().unwrap_err();
            assert!(matches!(error, Error::Usage(_)), "{error:?}");
            assert!(error.to_string().contains(name), "{name}: {error}");
        }
    }

    #[test]
    fn edges_of_the_ranges_are_accepted() {
        let params = SamplingParams {
            temperature: 100.0,
            top_k: u32::MAX,
            top_p: 1e-6,
            min_p: 1.0,
            repetition_penalty: 0.01,
            presence_penalty: -2.0,
            frequency_penalty: 2.0,
            logit_bias: vec![(0, -100.0), (1, 100.0)],
        };
        params.validate().unwrap();
        assert!(params.has_penalties() && !params.is_greedy());
    }
}
