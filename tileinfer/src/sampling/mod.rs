//! From a row of logits to the next token. It knows nothing of models, batches or speculation: a draw is
//! a pure function of (parameters, what the sequence says, logits, seed, position).
//!
//! Plain decoding, verification of drafts and the distributions of speculative sampling all go through
//! [`sample`] and [`distribution`], which are two readings of one computation:
//! 1. z = logit, −∞ where a [`TokenMask`] forbids the token or the tokenizer has no such id;
//! 2. z += bias; then the penalties: z · (1 / r) if z > 0, else z · r, for tokens of prompt or output;
//!    z −= (frequency · times + presence) for tokens of the output;
//! 3. temperature 0: the largest z, lowest id among equals. Else y = (z − max z) · (1 / temperature);
//! 4. top-k on z, top-p and min-p on weights exp(y), as the `filters` module defines them: transformers'
//!    order, all ties at top-k's boundary stay, at top-p's the lower ids do;
//! 5. the probability of a token that is left is exp(y) / sum of those left;
//! 6. the token is the one with the largest y + g, lowest id among equals, g being its Gumbel noise
//!    ([`rng`]); that is a draw from step 5's distribution (Gumbel 1954; "Gumbel-max").
//!
//! Everything is f32 with the operations in the order written, no fused multiply-adds, and sums in the
//! fixed tree of [`math`], so a device that follows the text gets the same token from the same logits.

mod accept;
mod constraints;
mod defaults;
mod filters;
mod logprobs;
pub mod math;
mod params;
pub mod rng;
mod row;

pub use accept::{Verdict, accept_chain, accept_draft, accept_token, draw, residual, verify};
pub use constraints::{TokenCounts, TokenMask};
pub use defaults::{GenerationDefaults, generation_defaults};
pub use logprobs::{Logprobs, TokenLogprob};
pub use params::SamplingParams;
pub use rng::{Stream, random_seed};
pub use row::{Draw, RowSampler, Sampled, sample_rows};

use self::filters::{Maxima, Survivors};
use crate::{Error, Result};

/// All that decides a token besides its logits.
#[derive(Debug, Clone, Copy)]
pub struct SampleRow<'a> {
    /// What the request asks for; [valid](SamplingParams::validate).
    pub params: &'a SamplingParams,
    /// The tokens of prompt and output so far; needed if the parameters have penalties, else unused.
    pub counts: Option<&'a TokenCounts>,
    /// Drafts before this row, counted by the penalties as if they had been output.
    pub drafts: &'a [u32],
    /// The tokens that may come next; `None` is all of them.
    pub mask: Option<&'a TokenMask>,
    /// The request's seed.
    pub seed: u64,
    /// Position of the token to be drawn, counted from the start of the sequence.
    pub position: u64,
    /// What the draw is for.
    pub stream: Stream,
    /// Ids from here on are padding of the output head, never drawn.
    pub vocab_limit: usize,
}

impl<'a> SampleRow<'a> {
    /// A row without counts, drafts, mask or padding, for the token of the text.
    pub fn new(params: &'a SamplingParams, seed: u64, position: u64) -> Self {
        SampleRow {
            params,
            counts: None,
            drafts: &[],
            mask: None,
            seed,
            position,
            stream: Stream::Target,
            vocab_limit: usize::MAX,
        }
    }
}

/// Tokens and their probabilities, best first, lower ids first among equal logits. All others have 0.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Distribution {
    /// The tokens that are left.
    pub ids: Vec<u32>,
    /// Their probabilities, summing to 1 up to rounding.
    pub probs: Vec<f32>,
}

impl Distribution {
    /// All mass on one token: what a greedy or an n-gram draft was drawn from.
    pub fn one_hot(id: u32) -> Self {
        Distribution {
            ids: vec![id],
            probs: vec![1.0],
        }
    }

    /// The probability of a token. Looks through the tokens one by one.
    pub fn prob(&self, id: u32) -> f32 {
        let index = self.ids.iter().position(|&other| other == id);
        index.map_or(0.0, |index| self.probs[index])
    }
}

/// Buffers that [`sample`] and [`distribution`] reuse from row to row; holds nothing that decides a token.
#[derive(Debug, Default)]
pub struct Scratch {
    adjusted: Vec<f32>,
    maxima: Maxima,
    buffer: Vec<f32>,
    survivors: Survivors,
}

/// The next token.
///
/// # Errors
/// - [`Error::BadModel`] naming the token if a logit is NaN or +∞;
/// - [`Error::Bug`] if the parameters have penalties and the row has no counts, or are not valid;
/// - [`Error::Usage`] if no token may come next, or the bias names a token that does not exist.
pub fn sample(row: &SampleRow, logits: &[f32], scratch: &mut Scratch) -> Result<u32> {
    let weighted = row.params.top_p < 1.0 || row.params.min_p > 0.0;
    filter(row, logits, weighted, scratch)?;
    Ok(pick(row, &scratch.survivors))
}

/// The distribution that [`sample`] draws from; one token with temperature 0.
///
/// # Errors
/// Those of [`sample`].
pub fn distribution(
    row: &SampleRow,
    logits: &[f32],
    scratch: &mut Scratch,
) -> Result<Distribution> {
    filter(row, logits, true, scratch)?;
    let (ids, probs) = scratch.survivors.probabilities();
    Ok(Distribution { ids, probs })
}

/// The token of [`sample`] and the distribution it was drawn from, for drafts.
///
/// # Errors
/// Those of [`sample`].
pub fn sample_with_distribution(
    row: &SampleRow,
    logits: &[f32],
    scratch: &mut Scratch,
) -> Result<(u32, Distribution)> {
    let distribution = distribution(row, logits, scratch)?;
    Ok((pick(row, &scratch.survivors), distribution))
}

/// What NaN or infinite logits, of which `found` names one, say about the model.
pub(crate) fn broken_logits(found: &str) -> Error {
    Error::bad_model(
        "model",
        format!(
            "{found}: the weights hold NaN or infinite values, or the activations overflow in bf16 (try --dtype f32)"
        ),
    )
}

/// The error of a row in which the logit of token `id` is NaN or infinite.
pub fn broken_logit(id: u32, logit: f32) -> Error {
    broken_logits(&format!("the logit of token {id} is {logit}"))
}

/// The error of a row whose `count` logits are all −∞.
pub fn no_token_allowed(count: usize) -> Error {
    Error::usage(format!(
        "none of the {count} tokens may come next: the mask and the model leave all logits at -inf"
    ))
}

/// Steps 1 to 4: leaves the survivors in `scratch`, with weights if `weighted`.
fn filter(row: &SampleRow, logits: &[f32], weighted: bool, scratch: &mut Scratch) -> Result<()> {
    let params = row.params;
    let logits = &logits[..logits.len().min(row.vocab_limit)];
    let Scratch {
        adjusted,
        maxima,
        buffer,
        survivors,
    } = scratch;
    let logits = if params.logit_bias.is_empty() && !params.has_penalties() && row.mask.is_none() {
        logits
    } else {
        adjusted.clear();
        adjusted.extend_from_slice(logits);
        adjust(row, adjusted)?;
        adjusted
    };
    maxima.scan(logits)?;
    if params.is_greedy() {
        survivors.only(maxima.argmax(logits));
        return Ok(());
    }
    let kth = maxima.kth_largest(params.top_k as usize, logits, buffer);
    // A token that the noise cannot lift to the top changes sums, but no draw.
    let cutoff = if weighted {
        math::EXP_CUTOFF
    } else {
        -rng::GUMBEL_RANGE
    };
    survivors.gather(logits, maxima, params.temperature, kth, cutoff);
    if survivors.ids.is_empty() {
        return Err(Error::Bug(format!(
            "no token is left after sampling with {params:?}"
        )));
    }
    if weighted {
        survivors.weigh();
        survivors.top_p(params.top_p);
        survivors.min_p(params.min_p);
    }
    Ok(())
}

/// Steps 1 and 2, in place.
fn adjust(row: &SampleRow, logits: &mut [f32]) -> Result<()> {
    let vocab = logits.len();
    for &(id, bias) in &row.params.logit_bias {
        let logit = logits.get_mut(id as usize).ok_or_else(|| {
            Error::usage(format!(
                "logit_bias names token {id}, the vocabulary ends before {vocab}"
            ))
        })?;
        *logit += bias;
    }
    if row.params.has_penalties() {
        let counts = row.counts.ok_or_else(|| {
            Error::Bug("a row with penalties came without the counts of its tokens".to_owned())
        })?;
        counts.penalize(row.params, row.drafts, logits);
    }
    if let Some(mask) = row.mask {
        mask.apply(logits);
    }
    Ok(())
}

/// Step 6.
fn pick(row: &SampleRow, survivors: &Survivors) -> u32 {
    if let [only] = survivors.ids[..] {
        return only;
    }
    let noise = rng::Row::new(row.seed, row.position, row.stream);
    gumbel_max(&noise, &survivors.ids, |index| survivors.scaled(index))
}

/// The id with the largest `scaled(index) + noise`, the first of `ids` among equals. Most tokens need no
/// logarithm, as a bound on their noise tells that they cannot win.
fn gumbel_max(noise: &rng::Row, ids: &[u32], scaled: impl Fn(usize) -> f32) -> u32 {
    let (mut best, mut best_id) = (f32::NEG_INFINITY, ids[0]);
    for (index, &id) in ids.iter().enumerate() {
        let scaled = scaled(index);
        let bits = noise.bits(id);
        if scaled + rng::gumbel_bound(bits) < best {
            continue;
        }
        let score = scaled + rng::gumbel(bits);
        if score > best {
            (best, best_id) = (score, id);
        }
    }
    best_id
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_bound_on_the_noise_changes_no_draw() {
        let ids: Vec<u32> = (0..500).map(|i| i * 3 + 1).collect();
        for position in 0..2000 {
            let noise = rng::Row::new(5, position, Stream::Target);
            let scaled = |index: usize| -((index * 37 % 101) as f32) * 0.05;
            let mut plain = (f32::NEG_INFINITY, 0);
            for (index, &id) in ids.iter().enumerate() {
                let score = scaled(index) + noise.gumbel(id);
                if score > plain.0 {
                    plain = (score, id);
                }
            }
            assert_eq!(gumbel_max(&noise, &ids, scaled), plain.1);
        }
    }
}
