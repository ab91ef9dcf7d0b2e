//! The way down to a device: a decoder, its pages and its buffers behind the [`Runner`] trait.

use std::collections::VecDeque;

use super::graphs::{Graphs, Plan};
use super::{Batch, Input, Runner, RunnerLimits, SpanOutput, StepOutput, Ticket, Want};
use crate::backend::{Backend, Mask, StepLayout};
use crate::kv::{KeySmoothing, KvElement, KvLayout, PAGE_SIZE};
use crate::model::{DecoderLM, Workspace, forward};
use crate::sampling::RowSampler;
use crate::{Error, Result};

/// How much a [`ModelRunner`] should have room for.
#[derive(Debug, Clone)]
pub struct RunnerOptions {
    /// Positions a page.
    pub page_size: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Rows of one step: the largest chunk of prefill.
    pub max_rows: usize,
    /// Spans of one step: sequences that can advance together.
    pub max_spans: usize,
    /// Residual streams to keep, by transformers' `hidden_states` index: 0 is the embedding, `k` the stream
    /// after layer `k` counted from 1.
    pub taps: Vec<usize>,
    /// An int8 cache, and what its keys are divided by; none: a cache of the compute type.
    pub int8_cache: Option<KeySmoothing>,
    /// Whether steps of few rows are recorded and replayed, where the backend can. The answers are the same.
    pub graphs: bool,
}

impl RunnerOptions {
    /// Room for one sequence of `length` positions.
    pub fn for_length(length: usize) -> Self {
        RunnerOptions {
            page_size: PAGE_SIZE,
            pages: length.div_ceil(PAGE_SIZE),
            max_rows: length.clamp(1, 512),
            max_spans: 1,
            taps: Vec::new(),
            int8_cache: None,
            graphs: true,
        }
    }
}

/// Steps of a model on a backend.
pub struct ModelRunner<B: Backend> {
    backend: B,
    model: DecoderLM<B>,
    pages: Vec<B::Pages>,
    workspace: Workspace<B>,
    /// The step before the one in the workspace: its samples may not have been read yet.
    earlier: B::Step,
    /// Whether the workspace's step is the second of the two.
    second: bool,
    graphs: Graphs<B::Graph>,
    flight: VecDeque<Flight>,
    limits: RunnerLimits,
    launched: u64,
}

/// A step that has been launched and not read.
struct Flight {
    ticket: u64,
    /// Everything but the samples.
    output: StepOutput,
    /// Samples of each span.
    samples: Vec<usize>,
}

impl<B: Backend> ModelRunner<B> {
    /// Allocates pages and buffers for `model`.
    pub fn new(backend: B, model: DecoderLM<B>, options: &RunnerOptions) -> Result<Self> {
        let shape = model.layers[0].attention;
        let element = match options.int8_cache {
            Some(_) => KvElement::Int8,
            None => KvElement::Compute(backend.compute_type()),
        };
        let kv = KvLayout {
            page_size: options.page_size,
            kv_heads: shape.kv_heads,
            head_dim: shape.head_dim,
            element,
        };
        if let Some(smoothing) = &options.int8_cache {
            smoothing.check(model.layers.len(), shape.kv_heads, shape.head_dim)?;
        }
        let factors = |layer| options.int8_cache.as_ref()?.layer(layer);
        let pages = (0..model.layers.len())
            .map(|layer| backend.alloc_pages(&kv, factors(layer), options.pages))
            .collect::<Result<_>>()?;
        let table_width = model.max_length().div_ceil(options.page_size);
        let (rows, spans) = (options.max_rows, options.max_spans);
        let workspace = Workspace::new(&backend, &model, rows, spans, table_width, &options.taps)?;
        let earlier = backend.alloc_step(rows, spans, table_width)?;
        let windows = model.layers.iter().map(|layer| match layer.attention.mask {
            Mask::Window(window) => Some(window as usize),
            _ => None,
        });
        let limits = RunnerLimits {
            max_length: model.max_length(),
            max_rows: options.max_rows,
            max_spans: options.max_spans,
            vocabulary: model.vocabulary,
            head_rows: model.head_rows,
            hidden: model.hidden,
            pages: options.pages,
            kv,
            layers: model.layers.len(),
            window: windows
                .collect::<Option<Vec<_>>>()
                .and_then(|windows| windows.into_iter().max()),
            depth: if backend.supports_graphs() { 2 } else { 1 },
        };
        Ok(ModelRunner {
            graphs: Graphs::new(options.graphs && backend.supports_graphs()),
            backend,
            model,
            pages,
            workspace,
            earlier,
            second: false,
            flight: VecDeque::new(),
            limits,
            launched: 0,
        })
    }

    /// Keeps `depth` steps in flight, 1 or 2, instead of as many as suit the backend. The answers are the same.
    pub fn with_depth(mut self, depth: usize) -> Self {
        self.limits.depth = depth.clamp(1, 2);
        self
    }

    /// The backend, for tests and benchmarks.
    pub fn backend(&self) -> &B {
        &self.backend
    }

    /// The key and the value that `layer` has cached at `(page, kv_head, offset)`, for tests.
    pub fn read_slot(
        &self,
        layer: usize,
        page: usize,
        head: usize,
        offset: usize,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        self.backend
            .read_slot(&self.pages[layer], page, head, offset)
    }

    fn swap_steps(&mut self) {
        std::mem::swap(&mut self.workspace.step, &mut self.earlier);
        self.second = !self.second;
    }

    /// Everything between a batch's layout and its samples.
    fn run(&mut self, batch: &Batch, layout: &StepLayout) -> Result<()> {
        let ws = &mut self.workspace;
        ws.begin(&self.backend, &self.model, layout, Some(&self.earlier))?;
        for (span, rows) in batch.spans.iter().zip(&layout.span_rows) {
            if let Input::Embeddings(values) = &span.input {
                self.backend
                    .upload(&mut ws.stream, *rows as usize, values)?;
            }
        }
        let (backend, model, pages) = (&self.backend, &self.model, &mut self.pages);
        match self.graphs.plan(layout, self.second, ws.moves()) {
            Plan::Launch => forward(backend, model, pages, ws)?,
            Plan::Replay(graph) => backend.replay(graph)?,
            Plan::Record => {
                let graph = backend.capture(&mut || forward(backend, model, pages, ws))?;
                if let Some(graph) = self.graphs.keep(graph) {
                    backend.replay(graph)?;
                }
            }
        }

        let mut samplers: Vec<Option<RowSampler>> = Vec::with_capacity(layout.wanted.len());
        for span in &batch.spans {
            let wanted = span.want.rows.count(span.input.rows(self.limits.hidden));
            let mut given = span.want.sample.iter().cloned();
            samplers.extend((0..wanted).map(|_| given.next()));
        }
        if samplers.iter().any(Option::is_some) {
            self.backend.sample(&mut ws.step, &ws.logits, &samplers)?;
        }
        Ok(())
    }

    /// Copies what was wanted besides samples out of the workspace, before another step overwrites it.
    fn collect(&self, batch: &Batch) -> Result<StepOutput> {
        let wants = |f: fn(&Want) -> bool| batch.spans.iter().any(|span| f(&span.want));
        let ws = &self.workspace;
        let download = |wanted: bool, tensor| {
            if wanted {
                self.backend.download(tensor)
            } else {
                Ok(Vec::new())
            }
        };
        let logits = download(wants(|want| want.logits), &ws.logits)?;
        let hidden = download(wants(|want| want.hidden), &ws.hidden)?;
        let taps = download(wants(|want| want.taps), &ws.taps)?;
        let tap_width = ws.tapped().len() * self.limits.hidden;
        let (mut row, mut wanted) = (0, 0);
        let spans = batch.spans.iter().map(|span| {
            let rows = span.input.rows(self.limits.hidden);
            let count = span.want.rows.count(rows);
            let slice = |wanted: bool, values: &[f32], first: usize, count: usize, width: usize| {
                if wanted {
                    values[first * width..(first + count) * width].to_vec()
                } else {
                    Vec::new()
                }
            };
            let output = SpanOutput {
                sampled: Vec::new(),
                logits: slice(
                    span.want.logits,
                    &logits,
                    wanted,
                    count,
                    self.limits.head_rows,
                ),
                hidden: slice(span.want.hidden, &hidden, wanted, count, self.limits.hidden),
                taps: slice(span.want.taps, &taps, row, rows, tap_width),
            };
            (row, wanted) = (row + rows, wanted + count);
            output
        });
        Ok(StepOutput {
            spans: spans.collect(),
        })
    }
}

impl<B: Backend> Runner for ModelRunner<B> {
    fn device(&self) -> String {
        self.backend.name()
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
        let layout = batch.layout(&self.limits)?;
        for pages in &mut self.pages {
            self.backend.copy_pages(pages, &batch.copies)?;
        }
        self.swap_steps();
        let output = self.run(batch, &layout).and_then(|()| self.collect(batch));
        let output = output.inspect_err(|_| {
            // The samples of the step before, which may not have been read, stay where they are looked for.
            self.swap_steps();
        })?;
        self.launched += 1;
        let samples = batch
            .spans
            .iter()
            .map(|span| span.want.sample.len())
            .collect();
        self.flight.push_back(Flight {
            ticket: self.launched,
            output,
            samples,
        });
        Ok(Ticket(self.launched))
    }

    fn read(&mut self, ticket: Ticket) -> Result<StepOutput> {
        let Flight {
            mut output,
            samples,
            ..
        } = match self.flight.pop_front() {
            Some(flight) if flight.ticket == ticket.0 => flight,
            _ => return Err(Error::Bug("steps are read out of order".to_owned())),
        };
        if samples.iter().any(|&count| count > 0) {
            let step = if ticket.0 == self.launched {
                &self.workspace.step
            } else {
                &self.earlier
            };
            let mut all = self.backend.read_samples(step)?.into_iter();
            for (span, count) in output.spans.iter_mut().zip(samples) {
                span.sampled = all.by_ref().take(count).collect();
            }
        }
        Ok(output)
    }
}
