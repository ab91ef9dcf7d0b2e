//! A runner without a model, for tests of everything above. Its pages hold token ids, and its logits are a
//! hash of the ids that a row can see through its block table: a wrong table, a stale page or a leak changes
//! the text.

use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

use super::{Batch, Block, Input, Runner, RunnerLimits, SpanOutput, StepOutput, Ticket};
use crate::backend::ComputeType;
use crate::kv::{BlockTable, KvElement, KvLayout};
use crate::sampling::Sampled;
use crate::{Error, Result};

/// What a [`FakeRunner`] pretends to be.
#[derive(Debug, Clone)]
pub struct FakeOptions {
    /// Token ids, read and written alike.
    pub vocabulary: usize,
    /// The longest sequence.
    pub max_length: usize,
    /// Positions a page.
    pub page_size: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Rows of one step.
    pub max_rows: usize,
    /// Spans of one step.
    pub max_spans: usize,
    /// Only so many ids back, itself included, are visible.
    pub window: Option<usize>,
    /// Steps in flight.
    pub depth: usize,
    /// How long a step takes.
    pub latency: Duration,
    /// Another model the more it is above 0, where it has the same logits, up to 1, where it has nothing in
    /// common: a draft model.
    pub blur: f32,
    /// Tokens of a block of the drafter beside the model; 0: there is none.
    pub block_size: usize,
    /// What [`FakeOptions::blur`] is to a draft model, to that drafter.
    pub drafter_blur: f32,
}

impl Default for FakeOptions {
    fn default() -> Self {
        FakeOptions {
            vocabulary: 64,
            max_length: 4096,
            page_size: 4,
            pages: 2048,
            max_rows: 32,
            max_spans: 16,
            window: None,
            depth: 1,
            latency: Duration::ZERO,
            blur: 0.0,
            block_size: 0,
            drafter_blur: 0.2,
        }
    }
}

/// See the module's first lines.
#[derive(Debug)]
pub struct FakeRunner {
    limits: RunnerLimits,
    latency: Duration,
    blur: f32,
    block_size: usize,
    drafter_blur: f32,
    /// What the drafter drew for each block, until a step takes it.
    drafts: Option<Vec<Vec<Sampled>>>,
    slots: Vec<Option<u32>>,
    flight: VecDeque<(u64, StepOutput)>,
    launched: u64,
    previous: Vec<Sampled>,
}

impl FakeRunner {
    /// A runner with empty pages.
    pub fn new(options: &FakeOptions) -> Self {
        let element = KvElement::Compute(ComputeType::F32);
        FakeRunner {
            limits: RunnerLimits {
                max_length: options.max_length,
                max_rows: options.max_rows,
                max_spans: options.max_spans,
                vocabulary: options.vocabulary,
                head_rows: options.vocabulary,
                hidden: 1,
                pages: options.pages,
                kv: KvLayout {
                    page_size: options.page_size,
                    kv_heads: 1,
                    head_dim: 1,
                    element,
                },
                layers: 1,
                window: options.window,
                depth: options.depth,
            },
            latency: options.latency,
            blur: options.blur,
            block_size: options.block_size,
            drafter_blur: options.drafter_blur,
            drafts: None,
            slots: vec![None; options.pages * options.page_size],
            flight: VecDeque::new(),
            launched: 0,
            previous: Vec::new(),
        }
    }

    /// The ids cached at `positions` of the sequence in `table`.
    fn cached(&self, table: &BlockTable, positions: Range<usize>) -> Result<Vec<u32>> {
        let page_size = self.limits.kv.page_size;
        let id = |position: usize| {
            let page = table.pages[position / page_size - table.first_page] as usize;
            let id = self.slots[page * page_size + position % page_size];
            id.ok_or_else(|| Error::Bug(format!("position {position} was never written")))
        };
        positions.map(id).collect()
    }

    /// The first position that one at `position` sees.
    fn sees_from(&self, position: usize) -> usize {
        let window = self.limits.window;
        window.map_or(0, |window| (position + 1).saturating_sub(window))
    }

    /// The logits after the visible ids `seen`, of a model as far off as `blur`.
    fn logits(&self, seen: &[u32], blur: f32) -> Vec<f32> {
        let hash = seen.iter().fold(0x9e37_79b9_7f4a_7c15, |hash, &id| {
            mix(hash ^ (u64::from(id) + 1))
        });
        let logit = |id: usize| (mix(hash ^ (id as u64) << 32) % 8192) as f32 / 1024.0;
        let other = |id: usize| (mix(!hash ^ (id as u64) << 32) % 8192) as f32 / 1024.0;
        (0..self.limits.head_rows)
            .map(|id| match blur {
                0.0 => logit(id),
                _ => (1.0 - blur) * logit(id) + blur * other(id),
            })
            .collect()
    }
}

/// The finaliser of splitmix64.
fn mix(value: u64) -> u64 {
    let value = (value ^ (value >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let value = (value ^ (value >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    value ^ (value >> 31)
}

impl Runner for FakeRunner {
    fn device(&self) -> String {
        "fake".to_owned()
    }

    fn limits(&self) -> &RunnerLimits {
        &self.limits
    }

    fn launch(&mut self, batch: &Batch) -> Result<Ticket> {
        if self.flight.len() >= self.limits.depth {
            return Err(Error::Bug(format!(
                "{} steps are in flight already",
                self.flight.len()
            )));
        }
        let page_size = self.limits.kv.page_size;
        let mut layout = batch.layout(&self.limits)?;
        layout.take_previous(&self.previous)?;
        let drafts = self.drafts.as_ref().map(|blocks| blocks.concat());
        layout.take_drafts(&drafts.unwrap_or_default())?;
        self.drafts = None;
        for &(from, to) in &batch.copies {
            let from = from as usize * page_size;
            self.slots
                .copy_within(from..from + page_size, to as usize * page_size);
        }
        for (&slot, &id) in layout.slots.iter().zip(&layout.ids) {
            self.slots[slot as usize] = Some(id);
        }
        let mut output = StepOutput::default();
        for (i, span) in batch.spans.iter().enumerate() {
            if matches!(span.input, Input::Embeddings(_)) {
                return Err(Error::usage("a fake runner has no embeddings"));
            }
            let rows = layout.span(i);
            let mut result = SpanOutput::default();
            if let Input::Drafts { .. } = span.input {
                result.drafts = layout.ids[rows.start + 1..rows.end].to_vec();
            }
            let wanted = span.want.rows.count(rows.len());
            for (nth, row) in (rows.end - wanted..rows.end).enumerate() {
                let position = layout.positions[row] as usize;
                let seen = self.cached(&span.table, self.sees_from(position)..position + 1)?;
                let logits = self.logits(&seen, self.blur);
                if let Some(sampler) = span.want.sample.get(nth) {
                    result.sampled.push(sampler.sample(&logits)?);
                }
                if span.want.logits {
                    result.logits.extend(&logits);
                }
            }
            output.spans.push(result);
        }
        self.previous = output
            .spans
            .iter()
            .flat_map(|span| span.sampled.iter().cloned())
            .collect();
        self.launched += 1;
        self.flight.push_back((self.launched, output));
        Ok(Ticket(self.launched))
    }

    fn block_size(&self) -> Option<usize> {
        (self.block_size > 0).then_some(self.block_size)
    }

    fn draft(&mut self, blocks: &[Block]) -> Result<()> {
        let draw = |block: &Block| {
            let mut text = self.cached(&block.table, self.sees_from(block.start)..block.start)?;
            text.push(block.anchor);
            let mut drafts = Vec::new();
            for (i, sampler) in block.sample.iter().enumerate() {
                let position = block.start + i;
                let seen = &text[text.len() - (position + 1 - self.sees_from(position))..];
                let draft = sampler.sample(&self.logits(seen, self.drafter_blur))?;
                text.push(draft.token);
                drafts.push(draft);
            }
            Ok(drafts)
        };
        self.drafts = Some(blocks.iter().map(draw).collect::<Result<_>>()?);
        Ok(())
    }

    fn read_drafts(&mut self) -> Result<Vec<Vec<Sampled>>> {
        let drafts = self.drafts.clone();
        drafts.ok_or_else(|| Error::Bug("there are no drafts to read".to_owned()))
    }

    fn read(&mut self, ticket: Ticket) -> Result<StepOutput> {
        std::thread::sleep(self.latency);
        match self.flight.pop_front() {
            Some((launched, output)) if launched == ticket.0 => Ok(output),
            _ => Err(Error::Bug("steps are read out of order".to_owned())),
        }
    }
}
