//! The way down to a device: a decoder, its pages and its buffers behind the [`Runner`] trait.

use std::collections::VecDeque;
use std::ops::Range;

use super::graphs::{Graphs, Plan};
use super::{
    Batch, Block, Input, Runner, RunnerLimits, Span, SpanOutput, StepOutput, Ticket, Want,
};
use crate::backend::{Backend, Mask, StepLayout};
use crate::kv::{KeySmoothing, KvElement, KvLayout, PAGE_SIZE};
use crate::model::{DFlashBlock, DFlashDrafter, DecoderLM, Taken, Workspace, forward};
use crate::sampling::{RowSampler, Sampled};
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
    /// Recordings of the drafter's steps.
    block_graphs: Graphs<B::Graph>,
    /// A drafter that reads the model's hidden states.
    dflash: Option<DFlashBlock<B>>,
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
    /// Drafts that it verifies without their having been read.
    taken: Option<Taken>,
    /// Of each span, which of them.
    drafts: Vec<Range<usize>>,
}

impl<B: Backend> ModelRunner<B> {
    /// Allocates pages and buffers for `model`.
    pub fn new(backend: B, model: DecoderLM<B>, options: &RunnerOptions) -> Result<Self> {
        Self::drafting(backend, model, None, options)
    }

    /// Allocates pages and buffers for `model` and a drafter for it, which is on the same backend. The streams that
    /// the drafter reads are the taps, in its order.
    ///
    /// # Errors
    /// [`Error::Usage`] if `options` asks for taps too.
    pub fn with_dflash(
        backend: B,
        model: DecoderLM<B>,
        drafter: DFlashDrafter<B>,
        options: &RunnerOptions,
    ) -> Result<Self> {
        if !options.taps.is_empty() {
            return Err(Error::usage(
                "the taps of a runner with a DFlash drafter are the drafter's",
            ));
        }
        let options = RunnerOptions {
            taps: drafter.taps(),
            ..options.clone()
        };
        Self::drafting(backend, model, Some(drafter), &options)
    }

    fn drafting(
        backend: B,
        model: DecoderLM<B>,
        drafter: Option<DFlashDrafter<B>>,
        options: &RunnerOptions,
    ) -> Result<Self> {
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
        let dflash = drafter.map(|drafter| {
            let (size, pages) = (options.page_size, options.pages);
            DFlashBlock::new(&backend, drafter, size, pages, rows, spans, table_width)
        });
        let dflash = dflash.transpose()?;
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
            // A drafter may see what no layer of the model sees any more.
            window: windows
                .collect::<Option<Vec<_>>>()
                .and_then(|windows| windows.into_iter().max())
                .filter(|_| dflash.is_none()),
            depth: if backend.supports_graphs() { 2 } else { 1 },
        };
        Ok(ModelRunner {
            graphs: Graphs::new(options.graphs),
            block_graphs: Graphs::new(options.graphs),
            backend,
            model,
            pages,
            dflash,
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

    /// The logits of the drafts proposed last, f32 `[drafts, head rows]`, for tests.
    pub fn block_logits(&self) -> Result<Vec<f32>> {
        match &self.dflash {
            Some(dflash) => self.backend.download(&dflash.block.logits),
            None => Ok(Vec::new()),
        }
    }

    fn swap_steps(&mut self) {
        std::mem::swap(&mut self.workspace.step, &mut self.earlier);
        self.second = !self.second;
    }

    /// Everything between a batch's layout and its samples.
    fn run(&mut self, batch: &Batch, layout: &StepLayout) -> Result<()> {
        let ws = &mut self.workspace;
        let drafts = match &self.dflash {
            Some(dflash) => dflash.drafts(layout)?,
            None => None,
        };
        let previous = Some(&self.earlier);
        ws.begin_with_drafts(&self.backend, &self.model, layout, previous, drafts)?;
        for (span, rows) in batch.spans.iter().zip(&layout.span_rows) {
            if let Input::Embeddings(values) = &span.input {
                self.backend
                    .upload(&mut ws.stream, *rows as usize, values)?;
            }
        }
        let (backend, model, pages) = (&self.backend, &self.model, &mut self.pages);
        let mut dflash = self.dflash.as_mut();
        if let Some(dflash) = &mut dflash {
            dflash.begin_context(backend, layout.rows())?;
        }
        let buffers = (self.second, ws.moves());
        let launch = &mut || {
            forward(backend, model, pages, ws)?;
            match &mut dflash {
                Some(dflash) => dflash.write_context(backend, &ws.taps, &ws.step),
                None => Ok(()),
            }
        };
        launch_or_replay(backend, &mut self.graphs, layout, buffers, launch)?;

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
                drafts: Vec::new(),
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

/// Launches a step of `layout`, or replays what was recorded of one like it. It is in the second of two step buffers
/// or not, and shared buffers have moved so many times.
fn launch_or_replay<B: Backend>(
    backend: &B,
    graphs: &mut Graphs<B::Graph>,
    layout: &StepLayout,
    (second, moves): (bool, usize),
    launch: &mut dyn FnMut() -> Result<()>,
) -> Result<()> {
    if !backend.supports_graphs() {
        return launch();
    }
    match graphs.plan(layout, second, moves) {
        Plan::Launch => launch(),
        Plan::Replay(graph) => backend.replay(graph),
        Plan::Record => {
            let graph = backend.capture(launch)?;
            graphs
                .keep(graph)
                .map_or(Ok(()), |graph| backend.replay(graph))
        }
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
        if let Some(dflash) = &mut self.dflash {
            dflash.copy_pages(&self.backend, &batch.copies)?;
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
        let drafts = batch.spans.iter().map(|span| match &span.input {
            Input::Drafts { drafts, .. } => drafts.start as usize..drafts.end as usize,
            _ => 0..0,
        });
        let taken = self.dflash.as_mut().filter(|_| !layout.drafts.is_empty());
        self.flight.push_back(Flight {
            ticket: self.launched,
            output,
            samples,
            taken: taken.map(DFlashBlock::take),
            drafts: drafts.collect(),
        });
        Ok(Ticket(self.launched))
    }

    fn block_size(&self) -> Option<usize> {
        Some(self.dflash.as_ref()?.config().block_size)
    }

    fn draft(&mut self, blocks: &[Block]) -> Result<()> {
        let Some(dflash) = &mut self.dflash else {
            return Err(Error::Bug(
                "blocks for a drafter that is not there".to_owned(),
            ));
        };
        let (size, mask) = (dflash.config().block_size, dflash.config().mask_token);
        let mut batch = Batch::default();
        let mut samplers = Vec::new();
        for block in blocks {
            if block.sample.len() >= size {
                return Err(Error::Bug(format!(
                    "{} drafts in a block of {size}",
                    block.sample.len()
                )));
            }
            let mut ids = vec![mask; 1 + block.sample.len()];
            ids[0] = block.anchor;
            batch.spans.push(Span {
                input: Input::Ids(ids),
                start: block.start,
                table: block.table.clone(),
                want: Want::default(),
            });
            samplers.extend(block.sample.iter().cloned().map(Some));
        }
        let mut layout = batch.layout(&self.limits)?;
        // All rows but the first of each block, which is the newest token's own.
        let first = |row: &u32| layout.span_rows.contains(row);
        let rows = 0..layout.rows() as u32;
        layout.wanted = rows.filter(|row| !first(row)).collect();
        let drafts = blocks.iter().map(|block| block.sample.len()).collect();
        let backend = &self.backend;
        let buffers = dflash.begin(backend, &layout)?;
        let graphs = &mut self.block_graphs;
        launch_or_replay(backend, graphs, &layout, buffers, &mut || {
            dflash.forward(backend)
        })?;
        dflash.sample(backend, &samplers, drafts)
    }

    fn read_drafts(&mut self) -> Result<Vec<Vec<Sampled>>> {
        let dflash = self.dflash.as_ref();
        let dflash = dflash.ok_or_else(|| Error::Bug("there is no drafter".to_owned()))?;
        dflash.read(&self.backend)
    }

    fn read(&mut self, ticket: Ticket) -> Result<StepOutput> {
        let Flight {
            mut output,
            samples,
            taken,
            drafts,
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
        if let Some((taken, dflash)) = taken.zip(self.dflash.as_ref()) {
            let all = dflash.read_taken(&self.backend, &taken)?;
            for (span, range) in output.spans.iter_mut().zip(drafts) {
                span.drafts = all[range].to_vec();
            }
        }
        Ok(output)
    }
}
