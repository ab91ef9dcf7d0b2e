//! A runner without a model, for tests of everything above. Its pages hold token ids, and its logits are a
//! hash of the ids that a row can see through its block table: a wrong table, a stale page or a leak changes
//! the text.

use std::collections::VecDeque;
use std::time::Duration;

use super::{Batch, Input, Runner, RunnerLimits, SpanOutput, StepOutput, Ticket};
use crate::backend::ComputeType;
use crate::kv::{KvElement, KvLayout};
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
        }
    }
}

/// See the module's first lines.
#[derive(Debug)]
pub struct FakeRunner {
    limits: RunnerLimits,
    latency: Duration,
    blur: f32,
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
            slots: vec![None; options.pages * options.page_size],
            flight: VecDeque::new(),
            launched: 0,
            previous: Vec::new(),
        }
    }

    /// The logits after the visible ids `seen`.
    fn logits(&self, seen: impl Iterator<Item = u32>) -> Vec<f32> {
        let hash = seen.fold(0x9e37_79b9_7f4a_7c15, |hash, id| {
            mix(hash ^ (u64::from(id) + 1))
        });
        let logit = |id: usize| (mix(hash ^ (id as u64) << 32) % 8192) as f32 / 1024.0;
        let other = |id: usize| (mix(!hash ^ (id as u64) << 32) % 8192) as f32 / 1024.0;
        (0..self.limits.head_rows)
            .map(|id| match self.blur {
                0.0 => logit(id),
                blur => (1.0 - blur) * logit(id) + blur * other(id),
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
        for &(row, index) in &layout.previous {
            layout.ids[row as usize] = self.previous[index as usize].token;
        }
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
            let wanted = span.want.rows.count(rows.len());
            for (nth, row) in (rows.end - wanted..rows.end).enumerate() {
                let position = layout.positions[row] as usize;
                let first = self
                    .limits
                    .window
                    .map_or(0, |window| (position + 1).saturating_sub(window));
                let mut seen = Vec::with_capacity(position + 1 - first);
                for key in first..=position {
                    let (page, offset) = layout.place(i, key, page_size);
                    let id = self.slots[page * page_size + offset];
                    seen.push(
                        id.ok_or_else(|| Error::Bug(format!("position {key} was never written")))?,
                    );
                }
                let logits = self.logits(seen.into_iter());
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

    fn read(&mut self, ticket: Ticket) -> Result<StepOutput> {
        std::thread::sleep(self.latency);
        match self.flight.pop_front() {
            Some((launched, output)) if launched == ticket.0 => Ok(output),
            _ => Err(Error::Bug("steps are read out of order".to_owned())),
        }
    }
}
