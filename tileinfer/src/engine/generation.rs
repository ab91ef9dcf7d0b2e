//! One request on its way: what is known of it, what of that is cached, and when it is over.

use std::sync::Arc;

use crate::kv::{PageCopy, Sequence};
use crate::sampling::{Draw, RowSampler, SamplingParams, TokenCounts, TokenMask};
use crate::spec::{Pace, SpecStats};
use crate::{Error, Result};

/// Why an answer ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FinishReason {
    /// The model chose an end token, or the text reached a stop string.
    Stop,
    /// The tokens asked for are there, or the context is full.
    Length,
}

impl FinishReason {
    /// The word that OpenAI's API uses.
    pub fn as_str(self) -> &'static str {
        match self {
            FinishReason::Stop => "stop",
            FinishReason::Length => "length",
        }
    }
}

/// How to continue a prompt.
#[derive(Debug, Clone)]
pub struct GenerationOptions {
    /// From logits to the distribution that tokens are drawn from.
    pub sampling: Arc<SamplingParams>,
    /// Key of the noise; with the position it decides every draw.
    pub seed: u64,
    /// Tokens at most; without a number, to the end of the context.
    pub max_tokens: Option<usize>,
    /// Tokens that end the answer (and belong to it).
    pub stop_ids: Arc<[u32]>,
    /// Ids from here on are never chosen: rows of the head that no token has.
    pub vocabulary: usize,
    /// How many of the likeliest tokens to report with each chosen one; none: not even its own log
    /// probability.
    pub top_logprobs: Option<usize>,
}

/// See the module's first line.
#[derive(Debug)]
pub struct Generation {
    pub(super) sequence: Sequence,
    /// The prompt, then what was generated.
    pub(super) tokens: Vec<u32>,
    pub(super) prompt_tokens: usize,
    pub(super) cached_tokens: usize,
    /// Positions that launched steps cover; those of a step in flight are not in `sequence` yet.
    pub(super) launched: usize,
    /// Whether a step in flight will bring a token.
    pub(super) awaits: bool,
    /// Copies that the next step has to make first.
    pub(super) copies: Vec<PageCopy>,
    /// How often it was preempted: what a step launched before brings is of no use after.
    pub(super) epoch: u32,
    pub(super) counts: Option<Arc<TokenCounts>>,
    /// What a grammar allows as the next token; it depends on the token before.
    mask: Option<Arc<TokenMask>>,
    pub(super) finish: Option<FinishReason>,
    pub(super) options: GenerationOptions,
    /// What drafts bring it, where the loop speculates.
    pub(super) pace: Option<Pace>,
    limit: usize,
}

impl Generation {
    /// Continues `prompt` after what `sequence` has cached of it; whatever else it holds is dropped. At least
    /// the last token of the prompt is run. `max_length` is the longest sequence the model can process.
    pub fn new(
        mut sequence: Sequence,
        prompt: &[u32],
        options: GenerationOptions,
        max_length: usize,
    ) -> Result<Self> {
        Self::check(prompt, &options, max_length)?;
        let prefix = sequence.common_prefix(prompt).min(prompt.len() - 1);
        let cached_tokens = sequence.truncate(prefix);
        let limit = options.max_tokens.map_or(max_length, |most| {
            max_length.min(prompt.len().saturating_add(most))
        });
        let counts = options
            .sampling
            .has_penalties()
            .then(|| Arc::new(TokenCounts::new(prompt)));
        Ok(Generation {
            sequence,
            tokens: prompt.to_vec(),
            prompt_tokens: prompt.len(),
            cached_tokens,
            launched: cached_tokens,
            awaits: false,
            copies: Vec::new(),
            epoch: 0,
            counts,
            mask: None,
            finish: if limit == prompt.len() {
                Some(FinishReason::Length)
            } else {
                None
            },
            options,
            pace: None,
            limit,
        })
    }

    /// Refuses what [`Generation::new`] would refuse: an empty prompt, one that fills `max_length`, and sampling
    /// parameters out of range.
    pub fn check(prompt: &[u32], options: &GenerationOptions, max_length: usize) -> Result<()> {
        if prompt.is_empty() {
            return Err(Error::usage(
                "the prompt is empty: there is nothing to continue",
            ));
        }
        if prompt.len() >= max_length {
            return Err(Error::ContextFull {
                needed: prompt.len() + 1,
                limit: max_length,
            });
        }
        options.sampling.validate()
    }

    /// The generated tokens, an end token included.
    pub fn generated(&self) -> &[u32] {
        &self.tokens[self.prompt_tokens..]
    }

    /// Tokens of the prompt.
    pub fn prompt_tokens(&self) -> usize {
        self.prompt_tokens
    }

    /// Tokens of the prompt that were cached at the start.
    pub fn cached_tokens(&self) -> usize {
        self.cached_tokens
    }

    /// Tokens whose keys and values are cached.
    pub fn cached_now(&self) -> usize {
        self.sequence.len()
    }

    /// Why it ended, if it has.
    pub fn finish(&self) -> Option<FinishReason> {
        self.finish
    }

    /// Ends it from outside after its first `generated` tokens: a stop string was reached, or nobody listens
    /// any more. Later ones, which came in the same step, are dropped, and so is what is cached of them.
    pub fn end_after(&mut self, generated: usize, reason: FinishReason) {
        let len = self.prompt_tokens + generated;
        if len < self.tokens.len() {
            self.tokens.truncate(len);
            self.sequence.truncate(len - usize::from(generated > 0));
        }
        self.finish = Some(reason);
    }

    /// Whether the whole prompt has been launched.
    pub fn is_decoding(&self) -> bool {
        self.launched >= self.prompt_tokens
    }

    /// Gives its pages back, to be run again later from the first token on. The text stays the same.
    pub fn preempt(&mut self) {
        self.sequence.release();
        self.copies.clear();
        self.launched = 0;
        self.awaits = false;
        self.epoch += 1;
    }

    /// Continues after what `sequence` has cached of it, where nothing of its own is cached or in flight: after
    /// [`Generation::preempt`].
    pub fn resume(&mut self, mut sequence: Sequence) -> Result<()> {
        if self.launched > 0 || !self.sequence.is_empty() {
            return Err(Error::Bug(
                "a generation that has its own pages cannot resume on others".to_owned(),
            ));
        }
        let prefix = sequence
            .common_prefix(&self.tokens)
            .min(self.tokens.len() - 1);
        self.launched = sequence.truncate(prefix);
        self.sequence = sequence;
        Ok(())
    }

    /// Allows only the tokens of `mask` as the next one. Such a row waits for the token before it.
    pub fn set_mask(&mut self, mask: Arc<TokenMask>) {
        self.mask = Some(mask);
    }

    /// Prompt and generated tokens.
    pub fn tokens(&self) -> &[u32] {
        &self.tokens
    }

    /// Its place in the cache.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Takes the sequence, which holds the prompt and every generated token but the last (if it has ended by
    /// itself or by [`Generation::end_after`]; else what has been committed).
    pub fn into_sequence(mut self) -> Sequence {
        // A page that was to be copied, and will not be, has nothing in it.
        if let Some(position) = self.copies.iter().map(PageCopy::first_position).min() {
            self.sequence.truncate(position);
        }
        self.sequence
    }

    /// Rows that can be launched now: what is known and has not run, or the one token that a step in flight
    /// will bring, where nothing about its successor depends on which token it is.
    pub fn ready_rows(&self) -> usize {
        if self.finish.is_some() {
            return 0;
        }
        let known = self.tokens.len() - self.launched.min(self.tokens.len());
        if known > 0 {
            return known;
        }
        let successor = self.launched + 1;
        let depends = self.counts.is_some() || self.mask.is_some() || self.waits_to_draft();
        usize::from(self.awaits && !depends && successor < self.limit)
    }

    /// Whether its next token is to be known before the one after it, so that drafts can follow it.
    fn waits_to_draft(&self) -> bool {
        let generated = self.tokens.len() - self.prompt_tokens;
        self.mask.is_none() && self.pace.as_ref().is_some_and(|pace| pace.waits(generated))
    }

    /// Whether drafts can be verified behind its next row: that is its last token, it is known, and no grammar
    /// has to be asked in between.
    pub fn takes_drafts(&self) -> bool {
        self.finish.is_none() && self.mask.is_none() && self.launched + 1 == self.tokens.len()
    }

    /// What speculation did for it, where the loop speculates.
    pub fn spec_stats(&self) -> Option<SpecStats> {
        self.pace.as_ref().map(|pace| pace.stats)
    }

    /// Those of `drafts` that can become part of the answer: the token after them is one more.
    pub(super) fn useful<'a>(&self, drafts: &'a [u32]) -> &'a [u32] {
        &drafts[..drafts.len().min(self.room_for_drafts())]
    }

    /// Drafts that can become part of the answer at most.
    pub(super) fn room_for_drafts(&self) -> usize {
        self.limit.saturating_sub(self.tokens.len() + 1)
    }

    /// Whether the next row is the token that a step in flight will bring.
    pub(super) fn runs_ahead(&self) -> bool {
        self.launched >= self.tokens.len()
    }

    /// The sampler of the token that follows `position`, after `drafts` that are not part of the text yet.
    pub(super) fn sampler(&self, position: usize, drafts: &[u32]) -> RowSampler {
        RowSampler {
            params: self.options.sampling.clone(),
            counts: self.counts.clone(),
            drafts: drafts.to_vec(),
            mask: self.mask.clone(),
            seed: self.options.seed,
            position: position as u64,
            vocabulary: self.options.vocabulary,
            top_logprobs: self.options.top_logprobs,
            draw: Draw::Token,
        }
    }

    /// Appends a token, and says whether it was the last.
    pub(super) fn accept(&mut self, token: u32) -> bool {
        self.tokens.push(token);
        if let Some(counts) = &mut self.counts {
            // A sampler in flight may still hold the counts; they are copied only then.
            Arc::make_mut(counts).push_output(token);
        }
        if self.options.stop_ids.contains(&token) {
            self.finish = Some(FinishReason::Stop);
        } else if self.tokens.len() >= self.limit {
            self.finish = Some(FinishReason::Length);
        }
        self.finish.is_some()
    }
}
