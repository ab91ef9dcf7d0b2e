//! The buffers of a step, each with its shape beside it. Allocated once; a step uses the first rows.

use super::load::DecoderLM;
use crate::backend::{Backend, Element, HeadScratch, StepLayout};
use crate::{Error, Result};

/// Buffers for steps of up to `max_rows` rows.
pub struct Workspace<B: Backend> {
    /// Layout of the step, its ids and what is sampled in it.
    pub step: B::Step,
    /// The residual stream, f32 `[rows, hidden]`.
    pub stream: B::Tensor,
    /// The stream after the norm before a linear, `[rows, hidden]`.
    pub normed: B::Tensor,
    /// Projected queries, keys and values, f32 `[rows, (heads + 2 kv_heads) * head_dim]`.
    pub qkv: B::Tensor,
    /// Rotated queries, `[rows, heads * head_dim]`.
    pub queries: B::Tensor,
    /// Scratch for queries, keys and values.
    pub heads: HeadScratch<B::Tensor>,
    /// Attention's result, `[rows, heads * head_dim]`.
    pub attended: B::Tensor,
    /// What is added to the stream, f32 `[rows, hidden]`.
    pub delta: B::Tensor,
    /// The MLP before its activation, f32 `[rows, up rows]`.
    pub wide: B::Tensor,
    /// The MLP after its activation, `[rows, intermediate]`.
    pub active: B::Tensor,
    /// Tapped streams side by side, `[rows, taps * hidden]`.
    pub taps: B::Tensor,
    /// Wanted rows after the final norm, `[wanted, hidden]`.
    pub hidden: B::Tensor,
    /// Logits of the wanted rows, f32 `[wanted, head rows]`.
    pub logits: B::Tensor,
    tapped: Vec<usize>,
    max_wanted: usize,
    wanted: usize,
    moves: usize,
    hidden_width: usize,
    head_rows: usize,
}

/// Rows whose logits have room from the start; more are made room for when a step wants them.
const USUAL_WANTED: usize = 16;

impl<B: Backend> Workspace<B> {
    /// Buffers for steps of `model` of up to `max_rows` rows in up to `max_spans` spans with block tables of
    /// `table_width`. `tapped` names the residual streams to keep: 0 is the embedding, `k` the stream after
    /// layer `k` counted from 1 (transformers' `hidden_states` index).
    pub fn new(
        backend: &B,
        model: &DecoderLM<B>,
        max_rows: usize,
        max_spans: usize,
        table_width: usize,
        tapped: &[usize],
    ) -> Result<Self> {
        let layer = &model.layers[0];
        let (heads, kv_heads, head_dim) = (
            layer.attention.heads,
            layer.attention.kv_heads,
            layer.attention.head_dim,
        );
        let (hidden, q, kv) = (model.hidden, heads * head_dim, kv_heads * head_dim);
        let max_wanted = USUAL_WANTED.min(max_rows);
        if let Some(tap) = tapped.iter().find(|&&tap| tap > model.layers.len()) {
            return Err(Error::usage(format!(
                "there is no hidden state {tap} in {} layers",
                model.layers.len()
            )));
        }
        let alloc = |width| backend.alloc(Element::Model, max_rows, width);
        let alloc_f32 = |width| backend.alloc(Element::F32, max_rows, width);
        Ok(Workspace {
            step: backend.alloc_step(max_rows, max_spans, table_width)?,
            stream: alloc_f32(hidden)?,
            normed: alloc(hidden)?,
            qkv: alloc_f32(q + 2 * kv)?,
            queries: alloc(q)?,
            heads: HeadScratch::new(backend, &layer.attention, max_rows)?,
            attended: alloc(q)?,
            delta: alloc_f32(hidden)?,
            wide: alloc_f32(layer.wide)?,
            active: alloc(layer.activation.output_width(layer.wide))?,
            taps: alloc(tapped.len() * hidden)?,
            hidden: backend.alloc(Element::Model, max_wanted, hidden)?,
            logits: backend.alloc(Element::F32, max_wanted, model.head_rows)?,
            tapped: tapped.to_vec(),
            max_wanted,
            wanted: 0,
            moves: 0,
            hidden_width: hidden,
            head_rows: model.head_rows,
        })
    }

    /// Sizes the buffers for `layout`, brings it to the device (ids in `layout.previous` come from the tokens
    /// that `previous` sampled) and starts the stream with the embedding.
    pub fn begin(
        &mut self,
        backend: &B,
        model: &DecoderLM<B>,
        layout: &StepLayout,
        previous: Option<&B::Step>,
    ) -> Result<()> {
        self.begin_with_drafts(backend, model, layout, previous, None)
    }

    /// [`Workspace::begin`], where ids in `layout.drafts` come from the tokens that `drafts` sampled.
    pub fn begin_with_drafts(
        &mut self,
        backend: &B,
        model: &DecoderLM<B>,
        layout: &StepLayout,
        previous: Option<&B::Step>,
        drafts: Option<&B::Step>,
    ) -> Result<()> {
        let rows = layout.rows();
        let every = [
            &mut self.stream,
            &mut self.normed,
            &mut self.qkv,
            &mut self.queries,
        ];
        let more = [
            &mut self.attended,
            &mut self.delta,
            &mut self.wide,
            &mut self.active,
            &mut self.taps,
        ];
        for tensor in every.into_iter().chain(more) {
            backend.set_rows(tensor, rows)?;
        }
        self.heads.set_rows(backend, rows)?;
        self.wanted = layout.wanted.len();
        if self.wanted > self.max_wanted {
            // Counted before, as one of the two may be replaced and the other fail.
            self.moves += 1;
            self.hidden = backend.alloc(Element::Model, self.wanted, self.hidden_width)?;
            self.logits = backend.alloc(Element::F32, self.wanted, self.head_rows)?;
            self.max_wanted = self.wanted;
        }
        backend.set_rows(&mut self.hidden, self.wanted)?;
        backend.set_rows(&mut self.logits, self.wanted)?;
        backend.prepare(&mut self.step, layout, previous)?;
        match drafts {
            Some(drafts) => backend.take_drafts(&mut self.step, drafts)?,
            None if layout.drafts.is_empty() => {}
            None => return Err(Error::Bug("a row awaits a draft of nobody".to_owned())),
        }
        backend.embed(&mut self.stream, &model.embedding, &self.step)
    }

    /// Whether any row's logits are wanted.
    pub fn wants_rows(&self) -> bool {
        self.wanted > 0
    }

    /// How often a buffer was replaced by a larger one: recordings made before hold addresses of old ones.
    pub fn moves(&self) -> usize {
        self.moves
    }

    /// Residual streams that are kept.
    pub fn tapped(&self) -> &[usize] {
        &self.tapped
    }

    /// Keeps the stream if hidden state `state` is tapped.
    pub(super) fn tap(&mut self, backend: &B, state: usize) -> Result<()> {
        for (i, _) in self
            .tapped
            .iter()
            .enumerate()
            .filter(|&(_, &tapped)| tapped == state)
        {
            backend.copy_columns(
                &mut self.taps,
                i * self.hidden_width,
                &self.stream,
                0,
                self.hidden_width,
            )?;
        }
        Ok(())
    }
}
