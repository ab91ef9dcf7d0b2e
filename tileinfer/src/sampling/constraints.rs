//! What a sequence says about its next token besides the logits: how often each token occurred, and which
//! tokens a grammar allows.

use std::collections::HashMap;

use super::SamplingParams;

/// Where a token has occurred.
#[derive(Debug, Clone, Copy, Default)]
struct Seen {
    in_prompt: bool,
    times_in_output: u32,
}

/// How often each token occurred in prompt and output: what the penalties need. Kept only for requests
/// that [have penalties](SamplingParams::has_penalties).
#[derive(Debug, Clone, Default)]
pub struct TokenCounts {
    seen: HashMap<u32, Seen>,
}

impl TokenCounts {
    /// The counts after a prompt, before any output.
    pub fn new(prompt: &[u32]) -> Self {
        let mut counts = TokenCounts::default();
        for &id in prompt {
            counts.seen.entry(id).or_default().in_prompt = true;
        }
        counts
    }

    /// Counts one more token of the output.
    pub fn push_output(&mut self, id: u32) {
        self.seen.entry(id).or_default().times_in_output += 1;
    }

    /// Calls `f` once with each token that the penalties are for and how often it stands in the output, as if
    /// `drafts` had been output too; in no order.
    pub fn each_with(&self, drafts: &[u32], mut f: impl FnMut(u32, u32)) {
        let times_in_drafts = |id| drafts.iter().filter(|&&draft| draft == id).count() as u32;
        for (&id, seen) in &self.seen {
            f(id, seen.times_in_output + times_in_drafts(id));
        }
        for (i, &id) in drafts.iter().enumerate() {
            if !self.seen.contains_key(&id) && !drafts[..i].contains(&id) {
                f(id, times_in_drafts(id));
            }
        }
    }

    /// Applies the penalties to `logits` in place, as if `drafts` had been output too. Each
    /// logit is its own sum, so the order of the tokens does not matter.
    pub(super) fn penalize(&self, params: &SamplingParams, drafts: &[u32], logits: &mut [f32]) {
        let reciprocal = 1.0 / params.repetition_penalty;
        self.each_with(drafts, |id, times| {
            // A prompt may hold ids that the head has no row for, such as image placeholders.
            let Some(logit) = logits.get_mut(id as usize) else {
                return;
            };
            *logit *= if *logit > 0.0 {
                reciprocal
            } else {
                params.repetition_penalty
            };
            if times > 0 {
                *logit -= params.frequency_penalty * times as f32 + params.presence_penalty;
            }
        });
    }
}

/// The tokens that may come next, one bit each: bit `id % 32` of word `id / 32`.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct TokenMask {
    words: Vec<u32>,
}

impl TokenMask {
    /// A mask over ids below `len` that allows none of them.
    pub fn none(len: usize) -> Self {
        TokenMask {
            words: vec![0; len.div_ceil(32)],
        }
    }

    /// A mask from its words; ids beyond them are not allowed.
    pub fn from_words(words: Vec<u32>) -> Self {
        TokenMask { words }
    }

    /// Allows one more token, growing the mask if need be.
    pub fn allow(&mut self, id: u32) {
        let word = id as usize / 32;
        if word >= self.words.len() {
            self.words.resize(word + 1, 0);
        }
        self.words[word] |= 1 << (id % 32);
    }

    /// Takes a token's permission back.
    pub fn forbid(&mut self, id: u32) {
        if let Some(word) = self.words.get_mut(id as usize / 32) {
            *word &= !(1 << (id % 32));
        }
    }

    /// Whether a token may come next.
    pub fn is_allowed(&self, id: u32) -> bool {
        self.words
            .get(id as usize / 32)
            .is_some_and(|word| word >> (id % 32) & 1 == 1)
    }

    /// The bits, 32 tokens a word.
    pub fn words(&self) -> &[u32] {
        &self.words
    }

    /// Sets the logits of forbidden tokens to −∞. NaN and +∞ stay, as they mean a broken model whatever
    /// the mask says.
    pub(super) fn apply(&self, logits: &mut [f32]) {
        for (i, logits) in logits.chunks_mut(32).enumerate() {
            let word = self.words.get(i).copied().unwrap_or(0);
            if word == u32::MAX {
                continue;
            }
            for (bit, logit) in logits.iter_mut().enumerate() {
                if word >> bit & 1 == 0 && *logit < f32::INFINITY {
                    *logit = f32::NEG_INFINITY;
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mask_allows_forbids_and_ends() {
        let mut mask = TokenMask::none(40);
        assert!((0..100).all(|id| !mask.is_allowed(id)));
        mask.allow(0);
        mask.allow(31);
        mask.allow(39);
        mask.allow(70);
        let allowed: Vec<u32> = (0..200).filter(|&id| mask.is_allowed(id)).collect();
        assert_eq!(allowed, [0, 31, 39, 70]);
        mask.forbid(31);
        mask.forbid(1000);
        assert_eq!(mask.words(), [1, 1 << 7, 1 << 6]);
        assert_eq!(TokenMask::from_words(mask.words().to_vec()), mask);
        let mut logits = vec![1.0; 150];
        logits[5] = f32::INFINITY;
        mask.apply(&mut logits);
        for (id, &logit) in logits.iter().enumerate() {
            let expected = match id {
                5 => f32::INFINITY,
                _ if mask.is_allowed(id as u32) => 1.0,
                _ => f32::NEG_INFINITY,
            };
            assert_eq!(logit, expected, "{id}");
        }
    }

    #[test]
    fn drafts_count_as_output() {
        let params = SamplingParams {
            repetition_penalty: 1.5,
            presence_penalty: 0.25,
            frequency_penalty: 0.5,
            ..SamplingParams::default()
        };
        let logits = [2.0, -2.0, 0.5, 0.0, 1.0, 3.0];
        let mut counts = TokenCounts::new(&[0, 1, 99]);
        counts.push_output(1);
        let mut ahead = logits;
        counts.penalize(&params, &[4, 1, 4], &mut ahead);
        for id in [4, 1, 4] {
            counts.push_output(id);
        }
        let mut pushed = logits;
        counts.penalize(&params, &[], &mut pushed);
        assert_eq!(ahead, pushed);
        let third = 1.0 / 1.5;
        assert_eq!(
            pushed,
            [2.0 * third, -3.0 - 1.25, 0.5, 0.0, third - 1.25, 3.0]
        );
    }
}
