//! A step is a batch of spans: one prompt, one decode token, a chunk of prefill, drafts to verify and many
//! sequences at once are all the same call.

use std::ops::Range;

use crate::backend::StepLayout;
use crate::kv::BlockTable;
use crate::sampling::{RowSampler, Sampled};
use crate::{Error, Result};

use super::RunnerLimits;

/// What one step runs.
#[derive(Debug, Clone, Default)]
pub struct Batch {
    /// Spans, each of another sequence or of other positions of one.
    pub spans: Vec<Span>,
    /// Whole pages to copy before anything is written, `(from, to)`.
    pub copies: Vec<(u32, u32)>,
}

/// A run of consecutive new tokens of one sequence.
#[derive(Debug, Clone)]
pub struct Span {
    /// The tokens.
    pub input: Input,
    /// Position of the first one; everything before it is cached.
    pub start: usize,
    /// Pages up to the last position of the span.
    pub table: BlockTable,
    /// What to give back.
    pub want: Want,
}

/// The rows a span starts from.
#[derive(Debug, Clone)]
pub enum Input {
    /// Token ids.
    Ids(Vec<u32>),
    /// One token: the one with this index among all that the step before samples, which may not have been
    /// read yet.
    Previous(u32),
    /// The newest token of a text, and behind it drafts that have not been read: those with these indexes among
    /// all that [`Runner::draft`](super::Runner::draft) made last. Their ids come with the output.
    Drafts {
        /// The token.
        newest: u32,
        /// The drafts.
        drafts: Range<u32>,
    },
    /// Ready-made rows in the place of embeddings, `[rows, hidden]`.
    Embeddings(Vec<f32>),
}

/// Of which rows of a span something is wanted.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Rows {
    /// None: a chunk of prefill that only fills the cache.
    #[default]
    None,
    /// The last.
    Last,
    /// All.
    All,
}

/// What is wanted of a span.
#[derive(Debug, Clone, Default)]
pub struct Want {
    /// Of which rows.
    pub rows: Rows,
    /// Their logits.
    pub logits: bool,
    /// Their hidden state after the final norm.
    pub hidden: bool,
    /// The tapped residual streams of all rows of the span.
    pub taps: bool,
    /// How to sample each wanted row, in order; empty: nothing is sampled.
    pub sample: Vec<RowSampler>,
}

/// A block that a drafter beside the model fills in: the newest token of a text and some tokens to come.
#[derive(Debug, Clone)]
pub struct Block {
    /// The newest token of the text, which has not run.
    pub anchor: u32,
    /// Its position; everything before it is cached.
    pub start: usize,
    /// Pages up to the last position of the block.
    pub table: BlockTable,
    /// How to draw each token to come.
    pub sample: Vec<RowSampler>,
}

/// What a step gives back: one entry a span.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepOutput {
    /// In the order of the batch.
    pub spans: Vec<SpanOutput>,
}

/// What was wanted of a span.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct SpanOutput {
    /// The ids of [`Input::Drafts`].
    pub drafts: Vec<u32>,
    /// One token for each row that was sampled.
    pub sampled: Vec<Sampled>,
    /// f32 `[wanted rows, head rows]`.
    pub logits: Vec<f32>,
    /// `[wanted rows, hidden]`.
    pub hidden: Vec<f32>,
    /// `[rows, taps * hidden]`.
    pub taps: Vec<f32>,
}

impl Input {
    /// Rows, where a hidden state has `hidden` values.
    pub fn rows(&self, hidden: usize) -> usize {
        match self {
            Input::Ids(ids) => ids.len(),
            Input::Previous(_) => 1,
            Input::Drafts { drafts, .. } => 1 + drafts.len(),
            Input::Embeddings(values) => values.len() / hidden.max(1),
        }
    }
}

impl Rows {
    /// How many of `rows` rows.
    pub fn count(self, rows: usize) -> usize {
        match self {
            Rows::None => 0,
            Rows::Last => rows.min(1),
            Rows::All => rows,
        }
    }
}

impl Batch {
    /// Checks the batch against `limits` and flattens it.
    pub fn layout(&self, limits: &RunnerLimits) -> Result<StepLayout> {
        let page_size = limits.kv.page_size;
        let width = self
            .spans
            .iter()
            .map(|span| span.table.pages.len())
            .max()
            .unwrap_or(0);
        let mut layout = StepLayout {
            span_rows: vec![0],
            table_width: width,
            ..StepLayout::default()
        };
        for span in &self.spans {
            let rows = span.input.rows(limits.hidden);
            let first_row = layout.rows();
            let end = span.start + rows;
            if rows == 0 {
                return Err(Error::usage(
                    "there are no tokens to run: the prompt is empty",
                ));
            }
            if end > limits.max_length {
                return Err(Error::ContextFull {
                    needed: end,
                    limit: limits.max_length,
                });
            }
            let BlockTable { first_page, pages } = &span.table;
            if end > (first_page + pages.len()) * page_size || span.start < first_page * page_size {
                return Err(Error::Bug(format!(
                    "the pages of a span do not cover positions {}..{end}",
                    span.start
                )));
            }
            let known = match &span.input {
                Input::Ids(ids) => ids,
                Input::Drafts { newest, .. } => std::slice::from_ref(newest),
                Input::Previous(_) | Input::Embeddings(_) => &[],
            };
            if let Some(id) = known.iter().find(|&&id| id as usize >= limits.vocabulary) {
                return Err(Error::usage(format!(
                    "there is no token {id} in a vocabulary of {}",
                    limits.vocabulary
                )));
            }
            match &span.input {
                Input::Ids(ids) => layout.ids.extend_from_slice(ids),
                Input::Drafts { newest, drafts } => {
                    layout.ids.push(*newest);
                    layout.ids.extend(drafts.clone().map(|_| 0));
                    let rows = first_row as u32 + 1..;
                    layout.drafts.extend(rows.zip(drafts.clone()));
                }
                Input::Previous(index) => {
                    layout.previous.push((first_row as u32, *index));
                    layout.ids.push(0);
                }
                Input::Embeddings(_) => layout.ids.extend(std::iter::repeat_n(0, rows)),
            }
            for position in span.start..end {
                layout.positions.push(position as u32);
                let page = pages[position / page_size - first_page];
                layout
                    .slots
                    .push(page * page_size as u32 + (position % page_size) as u32);
            }
            layout.first_pages.push(*first_page as u32);
            layout.tables.extend_from_slice(pages);
            layout
                .tables
                .extend(std::iter::repeat_n(0, width - pages.len()));
            let wanted = span.want.rows.count(rows);
            layout
                .wanted
                .extend((first_row + rows - wanted..first_row + rows).map(|row| row as u32));
            layout.span_rows.push((first_row + rows) as u32);
            if !span.want.sample.is_empty() && span.want.sample.len() != wanted {
                return Err(Error::Bug(format!(
                    "{} samplers for {wanted} rows",
                    span.want.sample.len()
                )));
            }
        }
        if layout.rows() > limits.max_rows || self.spans.len() > limits.max_spans {
            let (rows, spans) = (layout.rows(), self.spans.len());
            let (max_rows, max_spans) = (limits.max_rows, limits.max_spans);
            return Err(Error::Bug(format!(
                "{rows} rows in {spans} spans where {max_rows} in {max_spans} fit"
            )));
        }
        Ok(layout)
    }
}
