//! A row's sampler as a batch carries it: owned, cheap to clone, and free of borrowed history.

use std::cell::RefCell;
use std::sync::Arc;

use super::{
    Logprobs, SampleRow, SamplingParams, Scratch, Stream, TokenCounts, TokenLogprob, TokenMask,
    sample,
};
use crate::Result;

/// All that decides the token after one row, besides the row's logits.
#[derive(Debug, Clone)]
pub struct RowSampler {
    /// What the request asks for.
    pub params: Arc<SamplingParams>,
    /// Tokens of prompt and output so far, if the parameters have penalties.
    pub counts: Option<Arc<TokenCounts>>,
    /// Drafts before this row, which the penalties count as output.
    pub drafts: Vec<u32>,
    /// The tokens that may come next; none: all.
    pub mask: Option<Arc<TokenMask>>,
    /// Key of the noise.
    pub seed: u64,
    /// Position of the token to be drawn.
    pub position: u64,
    /// Ids from here on are padding of the head, never drawn.
    pub vocabulary: usize,
    /// How many of the likeliest tokens to report; none: not even the drawn token's log probability.
    pub top_logprobs: Option<usize>,
}

/// A drawn token.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampled {
    /// Its id.
    pub token: u32,
    /// Its log probability before any filter, if it was asked for.
    pub logprob: Option<TokenLogprob>,
    /// The likeliest tokens before any filter, best first, if they were asked for.
    pub top: Vec<TokenLogprob>,
}

/// Draws on the host from each row of `logits` that has a sampler, in order.
///
/// # Errors
/// That of the first row that cannot be sampled.
pub fn sample_rows<'a>(
    samplers: &[Option<RowSampler>],
    logits: impl Iterator<Item = &'a [f32]>,
) -> Result<Vec<Sampled>> {
    let rows = samplers.iter().zip(logits);
    rows.filter_map(|(sampler, row)| Some(sampler.as_ref()?.sample(row)))
        .collect()
}

impl RowSampler {
    /// The row as the functions of this module take it.
    pub fn row(&self) -> SampleRow<'_> {
        SampleRow {
            params: &self.params,
            counts: self.counts.as_deref(),
            extra: &self.drafts,
            mask: self.mask.as_deref(),
            seed: self.seed,
            position: self.position,
            stream: Stream::Target,
            vocab_limit: self.vocabulary,
        }
    }

    /// Draws from `logits`, f32 `[head rows]`, on the host.
    pub fn sample(&self, logits: &[f32]) -> Result<Sampled> {
        thread_local! {
            // Buffers only: they hold nothing that decides a token.
            static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
        }
        let token = SCRATCH.with_borrow_mut(|scratch| sample(&self.row(), logits, scratch))?;
        let Some(count) = self.top_logprobs else {
            return Ok(Sampled {
                token,
                logprob: None,
                top: Vec::new(),
            });
        };
        let logprobs = Logprobs::new(logits, self.vocabulary)?;
        Ok(Sampled {
            token,
            logprob: logprobs.get(token),
            top: logprobs.top(count),
        })
    }
}
