//! Drafts from a smaller model of the same vocabulary. It reads a text as any runner would, on pages of its own;
//! what the target made of earlier drafts it sees from the text: what is cached of another one is dropped.

use std::collections::HashMap;

use super::{Ask, Drafts, Proposer};
use crate::kv::{PagePool, PrefixCache, Sequence};
use crate::runner::{Batch, Input, Rows, Runner, Span, Want};
use crate::sampling::{Draw, RowSampler, Sampled, SamplingParams};
use crate::tokenizer::Tokenizer;
use crate::{Error, Result};

/// Refuses a draft model whose tokens are not those of the target: `target` and `draft` are compared token by
/// token. More rows than tokens in either model, and tokens that one of them has more at the end, do no harm.
///
/// # Errors
/// [`Error::Usage`] naming the first token that differs.
pub fn check_vocabulary(target: &Tokenizer, draft: &Tokenizer) -> Result<()> {
    let both = target.vocab_size().min(draft.vocab_size()) as u32;
    for id in 0..both {
        let (ours, theirs) = (target.token(id), draft.token(id));
        if ours != theirs {
            let name =
                |token: Option<String>| token.map_or("nothing".to_owned(), |t| format!("{t:?}"));
            return Err(Error::usage(format!(
                "the draft model has another vocabulary: token {id} is {} in the target and {} in the draft model; take a draft model of the same family",
                name(ours),
                name(theirs)
            )));
        }
    }
    Ok(())
}

/// Proposes what another model says next: its likeliest tokens, or tokens drawn as the target draws its own.
pub struct DraftProposer {
    runner: Box<dyn Runner>,
    k: usize,
    sample: bool,
    pool: PagePool,
    /// What is cached of each text that is asked about.
    texts: HashMap<u64, Sequence>,
    /// Beginnings of texts that were asked about before: the next turn of a chat is another text.
    cache: PrefixCache,
}

/// A text while it is drafted for.
struct Drafting {
    id: u64,
    sequence: Sequence,
    /// The text and its drafts.
    tokens: Vec<u32>,
    most: usize,
    sampler: RowSampler,
    drafts: Drafts,
}

impl DraftProposer {
    /// Drafts that are proposed unless it is said otherwise.
    pub const K: usize = 4;

    /// Up to `k` tokens that the model on `runner` says, all of whose pages are free. Its vocabulary is that of
    /// the target: see [`check_vocabulary`]. With `sample`, drafts for a text that is sampled are drawn with the
    /// text's own parameters and verified by the p/q rule; else they are the likeliest ones.
    ///
    /// # Errors
    /// [`Error::Usage`] if `k` is 0.
    pub fn new(runner: Box<dyn Runner>, k: usize, sample: bool) -> Result<Self> {
        if k == 0 {
            return Err(Error::usage(
                "a draft model with 0 drafts has nothing to say",
            ));
        }
        let limits = runner.limits();
        Ok(DraftProposer {
            pool: PagePool::new(limits.pages),
            cache: PrefixCache::new(limits.kv.page_size),
            runner,
            k,
            sample,
            texts: HashMap::new(),
        })
    }

    /// The pages that its own cache is in.
    pub fn pool(&self) -> &PagePool {
        &self.pool
    }

    /// What is to be read before drafting for `ask`: none if the model cannot read such a text.
    fn begin(&mut self, ask: &Ask<'_>) -> Option<Drafting> {
        let limits = self.runner.limits();
        let page_size = limits.kv.page_size;
        let text = ask.tokens.len();
        let most = ask
            .most
            .min(self.k)
            .min(limits.max_length.saturating_sub(text));
        // The target may have more ids than this model has rows for.
        let readable = ask
            .tokens
            .iter()
            .all(|&id| (id as usize) < limits.vocabulary);
        if most == 0 || !readable {
            return None;
        }
        let mut sequence = match self.texts.remove(&ask.id) {
            Some(sequence) => sequence,
            None => {
                let pages = self.cache.find(&ask.tokens[..text - 1]);
                let known = ask.tokens[..pages.len() * page_size].to_vec();
                Sequence::from_prefix(&self.pool, page_size, pages, known).ok()?
            }
        };
        let kept = sequence.common_prefix(ask.tokens).min(text - 1);
        sequence.truncate(kept);
        let mut drafting = Drafting {
            id: ask.id,
            tokens: ask.tokens.to_vec(),
            most,
            sampler: self.sampler(&ask.sampler),
            drafts: Drafts::default(),
            sequence,
        };
        drafting.drafts.read = text - drafting.sequence.len();
        Some(drafting)
    }

    /// How drafts are drawn where the target draws by `target`.
    fn sampler(&self, target: &RowSampler) -> RowSampler {
        let drawn = self.sample && !target.params.is_greedy();
        let vocabulary = target.vocabulary.min(self.runner.limits().head_rows);
        let mut params = SamplingParams::clone(&target.params);
        params
            .logit_bias
            .retain(|(id, _)| (*id as usize) < vocabulary);
        if !drawn {
            params.temperature = 0.0;
        }
        RowSampler {
            params: params.into(),
            vocabulary,
            top_logprobs: None,
            draw: if drawn { Draw::Draft } else { Draw::Token },
            ..target.clone()
        }
    }

    /// Runs what each text has not cached yet, as much of it as a step holds, and draws what follows those that
    /// are through. Texts that there are no pages for end here.
    fn step(&mut self, texts: &mut [Drafting]) -> Result<()> {
        let limits = self.runner.limits();
        let (max_rows, max_spans) = (limits.max_rows, limits.max_spans);
        let mut batch = Batch::default();
        let mut ran: Vec<(usize, usize)> = Vec::new();
        let mut left = max_rows;
        for (i, text) in texts.iter_mut().enumerate() {
            if left == 0 || ran.len() == max_spans {
                break;
            }
            let start = text.sequence.len();
            let rows = (text.tokens.len() - start).min(left);
            if rows == 0 || text.is_done() {
                continue;
            }
            let copies = match text.sequence.reserve(start, start + rows) {
                Err(Error::OutOfPages { needed, free }) => {
                    self.cache.evict(needed.saturating_sub(free));
                    text.sequence.reserve(start, start + rows)
                }
                result => result,
            };
            let copies = match copies {
                Ok(copies) => copies,
                Err(Error::OutOfPages { .. }) => {
                    text.most = text.drafts.tokens.len();
                    continue;
                }
                Err(error) => return Err(error),
            };
            batch.copies.extend(copies.iter().map(|copy| copy.pages()));
            let end = start + rows;
            let mut want = Want::default();
            if end == text.tokens.len() {
                want.rows = Rows::Last;
                want.sample = vec![text.next_sampler()];
            }
            batch.spans.push(Span {
                input: Input::Ids(text.tokens[start..end].to_vec()),
                start,
                table: text.sequence.table(),
                want,
            });
            ran.push((i, rows));
            left -= rows;
        }
        if batch.spans.is_empty() {
            return Ok(());
        }
        let output = self.runner.step(&batch)?;
        for ((i, rows), output) in ran.into_iter().zip(output.spans) {
            let text = &mut texts[i];
            let start = text.sequence.len();
            text.sequence.append(&text.tokens[start..start + rows])?;
            text.take(output.sampled);
        }
        Ok(())
    }
}

impl Drafting {
    fn is_done(&self) -> bool {
        self.drafts.tokens.len() >= self.most
    }

    /// The sampler of its next draft.
    fn next_sampler(&self) -> RowSampler {
        RowSampler {
            drafts: self.drafts.tokens.clone(),
            position: self.tokens.len() as u64,
            ..self.sampler.clone()
        }
    }

    /// Takes a new draft.
    fn take(&mut self, sampled: Vec<Sampled>) {
        for Sampled {
            token, drawn_from, ..
        } in sampled
        {
            self.tokens.push(token);
            self.drafts.tokens.push(token);
            self.drafts.drawn_from.extend(drawn_from);
        }
    }
}

impl Proposer for DraftProposer {
    fn most(&self) -> usize {
        self.k
    }

    fn propose(&mut self, _runner: &mut dyn Runner, asks: &[Ask<'_>]) -> Result<Vec<Drafts>> {
        let mut texts: Vec<Drafting> = asks.iter().filter_map(|ask| self.begin(ask)).collect();
        while texts.iter().any(|text| !text.is_done()) {
            self.step(&mut texts)?;
        }
        let mut found: HashMap<u64, Drafts> = HashMap::new();
        for text in texts {
            self.texts.insert(text.id, text.sequence);
            found.insert(text.id, text.drafts);
        }
        let drafts = asks.iter().map(|ask| found.remove(&ask.id));
        Ok(drafts.map(Option::unwrap_or_default).collect())
    }

    fn forget(&mut self, id: u64) {
        if let Some(sequence) = self.texts.remove(&id) {
            self.cache.insert(sequence.tokens(), sequence.pages());
        }
    }
}
