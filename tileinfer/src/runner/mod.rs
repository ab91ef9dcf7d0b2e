//! Running steps without knowing the device: the [`Runner`] trait, its batches and their outputs.
//!
//! Above this line nothing is generic over a backend; [`ModelRunner`] is the way down, and [`FakeRunner`]
//! stands in for it where a test is about what happens above.

mod batch;
mod fake;
mod graphs;
mod model;

use crate::kv::KvLayout;
use crate::sampling::Sampled;
use crate::{Error, Result};

pub use batch::{Batch, Block, Input, Rows, Span, SpanOutput, StepOutput, Want};
pub use fake::{FakeOptions, FakeRunner};
pub use model::{ModelRunner, RunnerOptions};

/// What a runner can hold and do.
#[derive(Debug, Clone, PartialEq)]
pub struct RunnerLimits {
    /// The longest sequence.
    pub max_length: usize,
    /// Rows of one step, all spans together.
    pub max_rows: usize,
    /// Spans of one step.
    pub max_spans: usize,
    /// Ids that can be read.
    pub vocabulary: usize,
    /// Ids that can be written: logits a row.
    pub head_rows: usize,
    /// Width of a hidden state.
    pub hidden: usize,
    /// Pages of the cache.
    pub pages: usize,
    /// Geometry of one layer's pages.
    pub kv: KvLayout,
    /// Layers.
    pub layers: usize,
    /// If every layer has a window, the widest: pages before it may go.
    pub window: Option<usize>,
    /// Steps that are worth having in flight: 2 where launching does not wait for the result.
    pub depth: usize,
}

/// Names a launched step.
#[derive(Debug, PartialEq, Eq)]
pub struct Ticket(pub(crate) u64);

/// A model, its pages and a device, taking one batch of spans at a time.
pub trait Runner: Send {
    /// What a person calls the device.
    fn device(&self) -> String;

    /// What it can hold and do.
    fn limits(&self) -> &RunnerLimits;

    /// Starts a step. At most [`RunnerLimits::depth`] steps may be launched and not read.
    fn launch(&mut self, batch: &Batch) -> Result<Ticket>;

    /// Waits for a step and takes what was wanted of it. Steps are read in the order of their launch.
    fn read(&mut self, ticket: Ticket) -> Result<StepOutput>;

    /// Tokens of a block of the drafter beside the model, the newest token of the text included; none if there is
    /// no such drafter.
    fn block_size(&self) -> Option<usize> {
        None
    }

    /// Starts the drafter beside the model on `blocks`, of [`Runner::block_size`] tokens at most. Its drafts stay on
    /// the device: the next step may verify them as [`Input::Drafts`], and until then [`Runner::read_drafts`] brings
    /// them. Steps that were launched have run before.
    fn draft(&mut self, blocks: &[Block]) -> Result<()> {
        Err(Error::Bug(format!(
            "{} blocks for a drafter that {} does not have",
            blocks.len(),
            self.device()
        )))
    }

    /// Waits for the drafts that no step has taken yet: those of each block, as their samplers drew them.
    fn read_drafts(&mut self) -> Result<Vec<Vec<Sampled>>> {
        Err(Error::Bug("there are no drafts to read".to_owned()))
    }

    /// [`Runner::draft`] and [`Runner::read_drafts`] at once.
    fn propose(&mut self, blocks: &[Block]) -> Result<Vec<Vec<Sampled>>> {
        self.draft(blocks)?;
        self.read_drafts()
    }

    /// [`Runner::launch`] and [`Runner::read`] at once.
    fn step(&mut self, batch: &Batch) -> Result<StepOutput> {
        let ticket = self.launch(batch)?;
        self.read(ticket)
    }
}
