//! A row's sampler as a batch carries it: owned, cheap to clone, and free of borrowed history.

use std::cell::RefCell;
use std::sync::Arc;

use super::{
    Distribution, Logprobs, SampleRow, SamplingParams, Scratch, Stream, TokenCounts, TokenLogprob,
    TokenMask, accept_token, distribution, sample, sample_with_distribution,
};
use crate::Result;

/// What a row's draw is for.
#[derive(Debug, Clone, PartialEq, Default)]
pub enum Draw {
    /// The next token of the text.
    #[default]
    Token,
    /// A draft. What it was drawn from comes with it.
    Draft,
    /// The next token of the text, where a draft stands that was drawn from a distribution: the p/q rule
    /// ([`accept_token`]).
    Verify {
        /// The draft.
        draft: u32,
        /// What it was drawn from.
        from: Arc<Distribution>,
    },
}

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
    /// What it is for.
    pub draw: Draw,
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
    /// What it was drawn from, if it is a draft.
    pub drawn_from: Option<Arc<Distribution>>,
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
            drafts: &self.drafts,
            mask: self.mask.as_deref(),
            seed: self.seed,
            position: self.position,
            stream: match self.draw {
                Draw::Draft => Stream::Draft,
                Draw::Token | Draw::Verify { .. } => Stream::Target,
            },
            vocab_limit: self.vocabulary,
        }
    }

    /// Draws from `logits`, f32 `[head rows]`, on the host.
    pub fn sample(&self, logits: &[f32]) -> Result<Sampled> {
        thread_local! {
            // Buffers only: they hold nothing that decides a token.
            static SCRATCH: RefCell<Scratch> = RefCell::new(Scratch::default());
        }
        let (token, drawn_from) = SCRATCH.with_borrow_mut(|scratch| self.draw(logits, scratch))?;
        let mut sampled = Sampled {
            token,
            logprob: None,
            top: Vec::new(),
            drawn_from: drawn_from.map(Arc::new),
        };
        if let Some(count) = self.top_logprobs {
            let logprobs = Logprobs::new(logits, self.vocabulary)?;
            sampled.logprob = logprobs.get(token);
            sampled.top = logprobs.top(count);
        }
        Ok(sampled)
    }

    fn draw(&self, logits: &[f32], scratch: &mut Scratch) -> Result<(u32, Option<Distribution>)> {
        let row = self.row();
        match &self.draw {
            Draw::Token => Ok((sample(&row, logits, scratch)?, None)),
            Draw::Draft => {
                let (token, from) = sample_with_distribution(&row, logits, scratch)?;
                Ok((token, Some(from)))
            }
            Draw::Verify { draft, from } => {
                let p = distribution(&row, logits, scratch)?;
                let token = accept_token(&p, from, *draft, self.seed, self.position)?;
                Ok((token, None))
            }
        }
    }
}
