//! Drafts from a DFlash drafter, which is part of the target's runner, as it reads hidden states that never leave the
//! device: one pass fills in a block.

use std::sync::Arc;

use super::{Ask, Drafts, Proposer};
use crate::runner::{Block, Runner};
use crate::sampling::{Draw, RowSampler, SamplingParams};
use crate::{Error, Result};

/// Proposes what the drafter beside the target fills in after a text: the likeliest token of each position, or one
/// drawn there as the target draws its own. Positions do not see each other's drafts.
#[derive(Debug, Clone)]
pub struct DFlashProposer {
    k: usize,
    sample: bool,
}

impl DFlashProposer {
    /// Up to `k` drafts by the drafter of `runner`, without a number as many as it was trained for. With `sample`,
    /// drafts for a text that is sampled are drawn with the text's own parameters and verified by the p/q rule.
    ///
    /// # Errors
    /// [`Error::Usage`] if `runner` has no drafter, or one of shorter blocks.
    pub fn new(runner: &dyn Runner, k: Option<usize>, sample: bool) -> Result<Self> {
        let block = runner.block_size().ok_or_else(|| {
            Error::usage("there is no DFlash drafter beside the model: load one with it")
        })?;
        let most = block - 1;
        let k = k.unwrap_or(most);
        if k == 0 || k > most {
            return Err(Error::usage(format!(
                "{k} drafts a step; the DFlash drafter fills in 1 to {most}"
            )));
        }
        Ok(DFlashProposer { k, sample })
    }

    /// Whether the drafts of a text are drawn.
    fn draws(&self, ask: &Ask<'_>) -> bool {
        self.sample && !ask.sampler.params.is_greedy()
    }

    /// Whether the host has to know a text's drafts to verify them: what they were drawn from, or, with penalties,
    /// what they are.
    fn must_read(&self, ask: &Ask<'_>) -> bool {
        self.draws(ask) || ask.sampler.counts.is_some()
    }

    /// The samplers of a text's drafts.
    fn samplers(&self, ask: &Ask<'_>) -> Vec<RowSampler> {
        let drawn = self.draws(ask);
        let mut sampler = RowSampler {
            top_logprobs: None,
            ..ask.sampler.clone()
        };
        if drawn {
            sampler.draw = Draw::Draft;
        } else {
            // The likeliest by the drafter alone: a device finds it without the host.
            sampler.params = Arc::new(SamplingParams::default());
            sampler.counts = None;
        }
        let after = |i: usize| RowSampler {
            position: sampler.position + i as u64,
            ..sampler.clone()
        };
        (0..ask.most.min(self.k)).map(after).collect()
    }
}

impl Proposer for DFlashProposer {
    fn most(&self) -> usize {
        self.k
    }

    fn propose(&mut self, runner: &mut dyn Runner, asks: &[Ask<'_>]) -> Result<Vec<Drafts>> {
        let block = |ask: &Ask<'_>| Block {
            anchor: ask.tokens[ask.tokens.len() - 1],
            start: ask.tokens.len() - 1,
            table: ask.table.clone(),
            sample: self.samplers(ask),
        };
        let blocks: Vec<Block> = asks.iter().map(block).collect();
        runner.draft(&blocks)?;
        if !asks.iter().any(|ask| self.must_read(ask)) {
            // Nobody waits for them: they are read with what the target says of them.
            let mut end = 0;
            let drafts = blocks.iter().map(|block| {
                let start = end;
                end += block.sample.len() as u32;
                Drafts {
                    unread: start..end,
                    ..Drafts::default()
                }
            });
            return Ok(drafts.collect());
        }
        let drafts = runner.read_drafts()?.into_iter().map(|sampled| Drafts {
            tokens: sampled.iter().map(|sampled| sampled.token).collect(),
            drawn_from: sampled.into_iter().filter_map(|s| s.drawn_from).collect(),
            ..Drafts::default()
        });
        Ok(drafts.collect())
    }
}
