//! More than one token a step: a [`Proposer`] says what may follow, the decode loop verifies it in one step, and
//! the text is that of plain decoding. Kinds of speculation differ only in how they propose; the decode loop
//! knows none of them, and none of them knows the loop.
//!
//! Drafts that were not drawn (n-gram, a draft model's likeliest tokens) are verified by sampling every row as
//! plain decoding would and comparing: the tokens are those of plain decoding, at any temperature. Drafts that
//! were drawn from a distribution are verified by the p/q rule ([`Draw::Verify`](crate::sampling::Draw)): the
//! distribution of the text is that of plain decoding, its tokens are others.

mod dflash;
mod draft;
mod ngram;
mod pace;
mod stats;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use crate::Result;
use crate::kv::BlockTable;
use crate::runner::Runner;
use crate::sampling::{Distribution, RowSampler};

pub use dflash::DFlashProposer;
pub use draft::{DraftProposer, check_vocabulary};
pub use ngram::NgramProposer;
pub(crate) use pace::{Costs, Moment, Pace, Round};
pub use stats::SpecStats;

/// Says what may follow a text.
pub trait Proposer: Send {
    /// Drafts after one text at most.
    fn most(&self) -> usize;

    /// Up to [`Ask::most`] drafts for each text, in order; none where nothing comes to mind. `runner` is the
    /// target's, whose newest step of each text has been read.
    ///
    /// # Errors
    /// Those of a device that it uses. To have no room is no error: then there are no drafts.
    fn propose(&mut self, runner: &mut dyn Runner, asks: &[Ask<'_>]) -> Result<Vec<Drafts>>;

    /// The text of this name will not be asked about again.
    fn forget(&mut self, _id: u64) {}
}

/// A text that drafts are wanted for.
#[derive(Debug)]
pub struct Ask<'a> {
    /// Its name while it grows; another text has another one.
    pub id: u64,
    /// The text so far. All of it but the last token has run through the target.
    pub tokens: &'a [u32],
    /// Drafts that are wanted at most: 1 or more.
    pub most: usize,
    /// Its pages, up to the last draft's position.
    pub table: BlockTable,
    /// How the target will draw the token after the text.
    pub sampler: RowSampler,
}

/// What may follow a text.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Drafts {
    /// The tokens.
    pub tokens: Vec<u32>,
    /// What each of them was drawn from; empty if they were not drawn.
    pub drawn_from: Vec<Arc<Distribution>>,
    /// In place of tokens: drafts that the drafter beside the target made and nobody has read, by their indexes
    /// among all that it made last. They were not drawn, and nothing but the target's logits decides about them.
    pub unread: Range<u32>,
    /// Tokens of the text that had to be read for it first.
    pub read: usize,
}

impl Drafts {
    /// How many there are.
    pub fn len(&self) -> usize {
        self.tokens.len() + self.unread.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Keeps the first `most`.
    pub(crate) fn truncate(&mut self, most: usize) {
        self.tokens.truncate(most);
        self.unread.end = self.unread.end.min(self.unread.start + most as u32);
    }
}

/// Tells the time since some moment.
pub type Clock = Arc<dyn Fn() -> Duration + Send + Sync>;

/// A proposer and how much is asked of it.
pub struct Speculation {
    pub(crate) proposer: Box<dyn Proposer>,
    /// Whether the number of drafts follows what they bring.
    pub(crate) adapts: bool,
    pub(crate) costs: Costs,
    pub(crate) clock: Clock,
}

impl Speculation {
    /// Asks `proposer` for as many drafts as it can give, always.
    pub fn new(proposer: impl Proposer + 'static) -> Self {
        let start = Instant::now();
        Speculation {
            proposer: Box::new(proposer),
            adapts: false,
            costs: Costs::default(),
            clock: Arc::new(move || start.elapsed()),
        }
    }

    /// Measures what drafts bring and what they cost, and asks for as many as pay, down to none: whatever the
    /// text, what is lost stays below three percent of the time that plain decoding takes, once a few dozen
    /// tokens are there.
    pub fn adapting(mut self) -> Self {
        self.adapts = true;
        self
    }

    /// Takes the time from `clock`.
    pub fn with_clock(mut self, clock: Clock) -> Self {
        self.clock = clock;
        self
    }
}

impl fmt::Debug for Speculation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Speculation { adapts, costs, .. } = self;
        f.debug_struct("Speculation")
            .field("adapts", adapts)
            .field("costs", costs)
            .finish_non_exhaustive()
    }
}
