//! What a device must be able to do for a model to run on it: some twenty ops over row-major arrays.
//!
//! An op writes into its first arguments and reads the rest. It knows shapes and numbers, never model
//! names. Every backend passes one conformance suite ([`crate::testing`]) that holds it against
//! [`ReferenceBackend`], and obeys one rule about sums: **the reduction tree of an output element depends
//! only on the shape and type of the weight (for attention: on the absolute positions of the keys), never
//! on how many rows there are, who the neighbours are or how many threads work.** That rule is why a text
//! does not depend on batching, chunking, caching or speculation.
//!
//! # Element types and rounding
//! A [`ComputeType`] is chosen when a backend is made. With [`ComputeType::Bf16`] the values of
//! [`Element::Model`] tensors are bfloat16 numbers (a CPU may keep them in f32 words): each op rounds what it
//! writes there once, to nearest even, and nothing in between. So values are rounded after each norm of the stream,
//! after RoPE, attention and the activation. The residual stream, what is added to it, what is projected to heads or to
//! the MLP and the logits are [`Element::F32`] tensors and are never rounded. Sums, softmax and norms are f32 inside.
//! Keys and values are stored as rounded. With [`ComputeType::F32`] nothing is rounded, the cache included.
//! Weights and the cache may be int8 with either; how numbers become integers there is written down in
//! [`crate::weights::int8`].
//!
//! # The plain and the fused forms
//! [`Backend::qk_norm_rope_store`], [`Backend::linear_qk_norm_rope_store`], [`Backend::add_rms_norm`],
//! [`Backend::linear_add_rms_norm`] and [`Backend::linear_activation`] come with generic bodies that chain the primitive
//! ops: the plain form. A backend overrides them to save launches; the result has to be the same up to the order of sums
//! within a row.

mod profile;
mod reference;

use std::time::{Duration, Instant};

use crate::kv::KvLayout;
use crate::sampling::{RowSampler, Sampled};
use crate::weights::Weight;
use crate::{Error, Result};

pub use crate::weights::{ComputeType, Xielu};
pub use profile::{Count, Profile, Profiled};
pub use reference::{ReferenceBackend, ReferenceTensor};

/// What the values of a tensor are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Element {
    /// The backend's [`ComputeType`]: activations.
    Model,
    /// f32 always: the residual stream, sums of linears, logits.
    F32,
}

/// Which cached positions a query may see, beyond the rule that nothing after the end of its span exists.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mask {
    /// Itself and everything before it.
    Causal,
    /// Itself and the `window - 1` positions before it (transformers' `sliding_window`).
    Window(u32),
    /// Everything up to the end of its span, later rows of the span included (a DFlash drafter's block).
    BlockVisible,
    /// As [`Mask::BlockVisible`], but only positions nearer than `window` on either side.
    BlockWindow(u32),
}

impl Mask {
    /// The positions that a query at `position` sees, in a span whose last position is `end - 1`.
    pub fn visible(self, position: usize, end: usize) -> std::ops::Range<usize> {
        let from = |window: u32| (position + 1).saturating_sub(window as usize);
        match self {
            Mask::Causal => 0..position + 1,
            Mask::Window(window) => from(window)..position + 1,
            Mask::BlockVisible => 0..end,
            Mask::BlockWindow(window) => from(window)..end.min(position + window as usize),
        }
    }
}

/// The geometry of one attention layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct AttentionShape {
    /// Query heads; query head `h` reads key-value head `h / (heads / kv_heads)`.
    pub heads: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Values a head.
    pub head_dim: usize,
    /// What a score is multiplied by before the softmax.
    pub scale: f32,
    /// Who sees whom.
    pub mask: Mask,
}

/// The activation between the two linears of an MLP.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// `silu(gate) * up` of rows that hold gate values, then up values.
    SiluGated,
    /// The xIELU of arXiv:2411.13010, computed in f32 and rounded once.
    Xielu(Xielu),
}

impl Activation {
    /// Width of the result for an input of `width`.
    pub fn output_width(&self, width: usize) -> usize {
        match self {
            Activation::SiluGated => width / 2,
            Activation::Xielu(_) => width,
        }
    }
}

/// RoPE as a table: what position `p` multiplies pair `j` of a head by.
#[derive(Debug, Clone, PartialEq)]
pub struct RopeTable {
    /// Pairs of a head: `head_dim / 2`; element `j` turns with element `j + pairs`.
    pub pairs: usize,
    /// `cos[p * pairs + j]`, attention factor included, rounded to the compute type as transformers does.
    pub cos: Vec<f32>,
    /// `sin[p * pairs + j]`, likewise.
    pub sin: Vec<f32>,
    /// What queries (not keys) at a position are multiplied by after rotation (Ministral 3), rounded.
    pub query_scale: Option<Vec<f32>>,
}

impl RopeTable {
    /// Positions the table covers.
    pub fn positions(&self) -> usize {
        self.cos.len() / self.pairs.max(1)
    }
}

/// Where the rows of a step come from and go to: the batch of spans flattened to arrays.
///
/// A span is a run of consecutive new tokens of one sequence. Row `r` of span `s` has
/// `span_rows[s] <= r < span_rows[s + 1]`.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct StepLayout {
    /// First row of each span and, last, the number of rows: spans + 1 entries.
    pub span_rows: Vec<u32>,
    /// Token id of each row (0 where `previous`, `drafts` or ready-made rows fill it).
    pub ids: Vec<u32>,
    /// Rows whose id is a token sampled by the step before, still on the device: (row, index among its
    /// sampled tokens).
    pub previous: Vec<(u32, u32)>,
    /// Rows whose id is a draft that is still on the device, likewise: (row, index among the drafts).
    pub drafts: Vec<(u32, u32)>,
    /// Position of each row in its sequence.
    pub positions: Vec<u32>,
    /// Where each row's key and value go: `page * page_size + offset`.
    pub slots: Vec<u32>,
    /// Block tables, `table_width` entries a span, padded with 0: the page of positions
    /// `(first_page + i) * page_size ..`.
    pub tables: Vec<u32>,
    /// Entries of each block table.
    pub table_width: usize,
    /// Of each span, the logical page that its table starts with (windows let early pages go).
    pub first_pages: Vec<u32>,
    /// Rows whose final hidden state, and logits or sample, are wanted.
    pub wanted: Vec<u32>,
}

impl StepLayout {
    /// Rows of the step.
    pub fn rows(&self) -> usize {
        self.positions.len()
    }

    /// Spans of the step.
    pub fn spans(&self) -> usize {
        self.span_rows.len().saturating_sub(1)
    }

    /// The rows of span `span`.
    pub fn span(&self, span: usize) -> std::ops::Range<usize> {
        self.span_rows[span] as usize..self.span_rows[span + 1] as usize
    }

    /// The block table of span `span`.
    pub fn table(&self, span: usize) -> &[u32] {
        &self.tables[span * self.table_width..(span + 1) * self.table_width]
    }

    /// Gives the rows of `previous` the ids of what the step before sampled.
    ///
    /// # Errors
    /// [`Error::Bug`] if it did not sample as much.
    pub fn take_previous(&mut self, sampled: &[Sampled]) -> Result<()> {
        fill(&mut self.ids, &self.previous, sampled, "token")
    }

    /// Gives the rows of `drafts` the ids of what a drafter sampled.
    ///
    /// # Errors
    /// [`Error::Bug`] if it did not sample as much.
    pub fn take_drafts(&mut self, sampled: &[Sampled]) -> Result<()> {
        fill(&mut self.ids, &self.drafts, sampled, "draft")
    }

    /// The page and the offset in it where span `span` keeps `position`.
    pub fn place(&self, span: usize, position: usize, page_size: usize) -> (usize, usize) {
        let page = position / page_size - self.first_pages[span] as usize;
        (self.table(span)[page] as usize, position % page_size)
    }
}

/// Gives rows the ids that they await, as (row, index).
fn fill(ids: &mut [u32], awaited: &[(u32, u32)], sampled: &[Sampled], what: &str) -> Result<()> {
    for &(row, index) in awaited {
        let there = sampled.len();
        let token = sampled.get(index as usize).ok_or_else(|| {
            Error::Bug(format!(
                "row {row} awaits {what} {index} where there are {there}"
            ))
        })?;
        ids[row as usize] = token.token;
    }
    Ok(())
}

/// Keys and values of a step.
#[derive(Debug)]
pub struct KvRows<T> {
    /// Keys of the step, `[rows, kv_heads * head_dim]`.
    pub keys: T,
    /// Values of the step, likewise.
    pub values: T,
}

/// Scratch, f32, that a backend without [`Backend::qk_norm_rope_store`] of its own needs.
pub struct HeadScratch<T> {
    /// Queries of the step, `[rows, heads * head_dim]`.
    pub queries: T,
    /// Keys and values.
    pub kv: KvRows<T>,
}

impl<T> HeadScratch<T> {
    /// Scratch for `capacity` rows.
    pub fn new<B: Backend<Tensor = T>>(
        backend: &B,
        shape: &AttentionShape,
        capacity: usize,
    ) -> Result<Self> {
        let alloc = |heads| backend.alloc(Element::F32, capacity, heads * shape.head_dim);
        Ok(HeadScratch {
            queries: alloc(shape.heads)?,
            kv: KvRows {
                keys: alloc(shape.kv_heads)?,
                values: alloc(shape.kv_heads)?,
            },
        })
    }

    /// Says that there are `rows` rows now.
    pub fn set_rows<B: Backend<Tensor = T>>(&mut self, backend: &B, rows: usize) -> Result<()> {
        let KvRows { keys, values } = &mut self.kv;
        for tensor in [&mut self.queries, keys, values] {
            backend.set_rows(tensor, rows)?;
        }
        Ok(())
    }
}

/// A device and the ops on it. Shapes are `[rows, width]`, row-major.
pub trait Backend: Send + Sized + 'static {
    /// An array `[rows, width]` of [`Element`]s with room for more rows.
    type Tensor: Send;
    /// A linear weight or an embedding table on the device; clones share the memory.
    type Weight: Send + Clone;
    /// One layer's pages of keys and values.
    type Pages: Send;
    /// A [`RopeTable`] on the device.
    type Rope: Send;
    /// A [`StepLayout`] on the device, and the tokens sampled in that step.
    type Step: Send;
    /// A recorded step.
    type Graph: Send;

    /// What a person calls this device.
    fn name(&self) -> String;

    /// The type of activations.
    fn compute_type(&self) -> ComputeType;

    // Memory.

    /// An array of zero rows with room for `capacity`.
    fn alloc(&self, element: Element, capacity: usize, width: usize) -> Result<Self::Tensor>;

    /// Says that `tensor` now has `rows` rows; what they hold is undefined. Beyond the capacity: an error.
    fn set_rows(&self, tensor: &mut Self::Tensor, rows: usize) -> Result<()>;

    /// Rows and width.
    fn shape(&self, tensor: &Self::Tensor) -> (usize, usize);

    /// Writes whole rows from `first_row` on, rounded to the tensor's element type.
    fn upload(&self, tensor: &mut Self::Tensor, first_row: usize, values: &[f32]) -> Result<()>;

    /// All rows, in order. Waits for what is still running.
    fn download(&self, tensor: &Self::Tensor) -> Result<Vec<f32>>;

    /// Brings a weight to the device; `weight` is already in a type that goes with the compute type, or all of
    /// it is in int8.
    fn load_weight(&self, weight: &Weight) -> Result<Self::Weight>;

    /// Rounds a weight to int8, one scale a row, on the way to the device: [`Weight::to_int8`] on the host's cores
    /// unless the device does it itself, to the same bits.
    fn load_int8(&self, weight: &Weight) -> Result<Self::Weight> {
        self.load_weight(&weight.to_int8())
    }

    /// Brings a norm weight or a bias to the device: one row.
    fn load_vector(&self, values: &[f32]) -> Result<Self::Tensor> {
        let mut tensor = self.alloc(Element::Model, 1, values.len())?;
        self.set_rows(&mut tensor, 1)?;
        self.upload(&mut tensor, 0, values)?;
        Ok(tensor)
    }

    /// Brings a RoPE table to the device.
    fn load_rope(&self, table: &RopeTable) -> Result<Self::Rope>;

    /// `pages` zeroed pages for one layer. `smoothing`, f32 `[kv_heads, head_dim]`, all positive, goes with
    /// [`KvElement::Int8`](crate::kv::KvElement::Int8): what keys are divided by before they are rounded, and queries multiplied by when they
    /// meet them (see [`crate::weights::int8`]). The factors are the pages' own and never change.
    fn alloc_pages(
        &self,
        layout: &KvLayout,
        smoothing: Option<&[f32]>,
        pages: usize,
    ) -> Result<Self::Pages>;

    /// Copies whole pages `(from, to)`.
    fn copy_pages(&self, pages: &mut Self::Pages, copies: &[(u32, u32)]) -> Result<()>;

    /// What the key and the value stored at `(page, kv_head, offset)` are worth, for tests and calibration: of an
    /// int8 cache `factor * (scale * q)` and `scale * q`.
    fn read_slot(
        &self,
        pages: &Self::Pages,
        page: usize,
        kv_head: usize,
        offset: usize,
    ) -> Result<(Vec<f32>, Vec<f32>)>;

    /// The keys in a page of such a layout, `[kv_heads, page_size, head_dim]`, as [`Backend::read_slot`] gives them.
    fn read_keys(&self, pages: &Self::Pages, layout: &KvLayout, page: usize) -> Result<Vec<f32>> {
        let mut keys = Vec::new();
        for head in 0..layout.kv_heads {
            for offset in 0..layout.page_size {
                keys.extend(self.read_slot(pages, page, head, offset)?.0);
            }
        }
        Ok(keys)
    }

    // Steps.

    /// Room for a step of up to `rows` rows, `spans` spans and block tables of `table_width`.
    fn alloc_step(&self, rows: usize, spans: usize, table_width: usize) -> Result<Self::Step>;

    /// Brings `layout` to the device, taking the ids named in `layout.previous` from the tokens that
    /// `previous` sampled.
    fn prepare(
        &self,
        step: &mut Self::Step,
        layout: &StepLayout,
        previous: Option<&Self::Step>,
    ) -> Result<()>;

    /// Takes the ids named in the layout's `drafts` from the tokens that `from` sampled: after
    /// [`Backend::prepare`], before anything reads ids.
    fn take_drafts(&self, step: &mut Self::Step, from: &Self::Step) -> Result<()>;

    // Primitive ops.

    /// `out[r] = table[ids[r]]`: `[rows, hidden]` from `[vocab, hidden]`.
    fn embed(&self, out: &mut Self::Tensor, table: &Self::Weight, step: &Self::Step) -> Result<()>;

    /// `out[r] = x[r] / sqrt(mean(x[r]²) + eps) * weight`, computed in f32 and rounded once (arXiv:1910.07467).
    fn rms_norm(
        &self,
        out: &mut Self::Tensor,
        x: &Self::Tensor,
        weight: &Self::Tensor,
        eps: f32,
    ) -> Result<()>;

    /// `x[r] += delta[r]`.
    fn add(&self, x: &mut Self::Tensor, delta: &Self::Tensor) -> Result<()>;

    /// `out[r] = weight x[r] + bias`: `[rows, weight rows]` from `[rows, weight columns]`. Into a tensor of
    /// [`Element::F32`] the sums are written as they are. With an int8 weight activations are rounded to 16-bit
    /// integers a row and the sum is exact, as [`crate::weights::int8`] writes it down.
    fn linear(
        &self,
        out: &mut Self::Tensor,
        weight: &Self::Weight,
        bias: Option<&Self::Tensor>,
        x: &Self::Tensor,
    ) -> Result<()>;

    /// [`Backend::rms_norm`] of each head of each row by itself, in place; `weight` is `[1, head_dim]`.
    fn head_norm(&self, x: &mut Self::Tensor, weight: &Self::Tensor, eps: f32) -> Result<()>;

    /// Rotates every head of every row in place: pair `(x[j], x[j + pairs])` becomes
    /// `(x[j] cos - x[j + pairs] sin, x[j + pairs] cos + x[j] sin)` at the row's position (arXiv:2104.09864,
    /// rotate-half form). With `queries`, the table's query scale is applied after.
    fn rope(
        &self,
        x: &mut Self::Tensor,
        rope: &Self::Rope,
        step: &Self::Step,
        queries: bool,
    ) -> Result<()>;

    /// Writes each row's key and value, `[rows, kv_heads * head_dim]`, to its slot.
    fn store_kv(
        &self,
        pages: &mut Self::Pages,
        rows: &KvRows<Self::Tensor>,
        step: &Self::Step,
    ) -> Result<()>;

    /// Grouped-query attention of each row over the cached positions of its span's sequence that the mask
    /// shows, `[rows, heads * head_dim]` from queries of that shape. Keys are folded in blocks of
    /// [`KEY_BLOCK`] by absolute position, left to right.
    fn attention(
        &self,
        out: &mut Self::Tensor,
        queries: &Self::Tensor,
        pages: &Self::Pages,
        step: &Self::Step,
        shape: &AttentionShape,
    ) -> Result<()>;

    /// `out = activation(x)`: `[rows, output_width(width)]` from f32 `[rows, width]`.
    fn activation(
        &self,
        out: &mut Self::Tensor,
        x: &Self::Tensor,
        activation: &Activation,
    ) -> Result<()>;

    /// `out[:, to .. to + n] = x[:, from .. from + n]` for every row, rounded to what `out` holds.
    fn copy_columns(
        &self,
        out: &mut Self::Tensor,
        to: usize,
        x: &Self::Tensor,
        from: usize,
        columns: usize,
    ) -> Result<()>;

    /// `out[i] = x[wanted[i]]`, the rows that the step's layout names, rounded to what `out` holds.
    fn gather_wanted(
        &self,
        out: &mut Self::Tensor,
        x: &Self::Tensor,
        step: &Self::Step,
    ) -> Result<()>;

    /// Samples row `i` of `logits` by `rows[i]` (none: the row is skipped) and keeps the tokens with the step.
    fn sample(
        &self,
        step: &mut Self::Step,
        logits: &Self::Tensor,
        rows: &[Option<RowSampler>],
    ) -> Result<()>;

    /// What [`Backend::sample`] chose, in order. Waits for it.
    fn read_samples(&self, step: &Self::Step) -> Result<Vec<Sampled>>;

    // Fused ops, in the plain form.

    /// The residual update `x += delta`, then `out = rms_norm(x)`.
    fn add_rms_norm(
        &self,
        x: &mut Self::Tensor,
        out: &mut Self::Tensor,
        delta: &Self::Tensor,
        weight: &Self::Tensor,
        eps: f32,
    ) -> Result<()> {
        self.add(x, delta)?;
        self.rms_norm(out, x, weight, eps)
    }

    /// The end of each half of a layer: `x += weight y + bias`, summed up over devices, then `out = rms_norm(x)`.
    /// `delta` is scratch of the shape of `x`.
    fn linear_add_rms_norm(
        &self,
        x: &mut Self::Tensor,
        out: &mut Self::Tensor,
        delta: &mut Self::Tensor,
        (weight, bias): (&Self::Weight, Option<&Self::Tensor>),
        y: &Self::Tensor,
        norm: &Self::Tensor,
        eps: f32,
    ) -> Result<()> {
        self.linear(delta, weight, bias, y)?;
        self.all_reduce(delta)?;
        self.add_rms_norm(x, out, delta, norm, eps)
    }

    /// Everything between the q/k/v projection and attention: splits `qkv`
    /// (f32 `[rows, (heads + 2 kv_heads) * head_dim]`), norms q and k per head where there are norms, rotates
    /// them where there is a table, in f32, writes keys and values to their slots and the queries to `queries`, rounded
    /// once.
    /// `heads` may be 0: then only keys and values are written.
    fn qk_norm_rope_store(
        &self,
        queries: &mut Self::Tensor,
        pages: &mut Self::Pages,
        scratch: &mut HeadScratch<Self::Tensor>,
        qkv: &Self::Tensor,
        norms: QkNorms<'_, Self>,
        rope: Option<&Self::Rope>,
        step: &Self::Step,
        shape: &AttentionShape,
    ) -> Result<()> {
        let (q, kv) = (
            shape.heads * shape.head_dim,
            shape.kv_heads * shape.head_dim,
        );
        let q_rows = &mut scratch.queries;
        let KvRows { keys, values } = &mut scratch.kv;
        self.copy_columns(q_rows, 0, qkv, 0, q)?;
        self.copy_columns(keys, 0, qkv, q, kv)?;
        self.copy_columns(values, 0, qkv, q + kv, kv)?;
        if let Some(weight) = norms.query {
            self.head_norm(q_rows, weight, norms.eps)?;
        }
        if let Some(weight) = norms.key {
            self.head_norm(keys, weight, norms.eps)?;
        }
        if let Some(rope) = rope {
            self.rope(q_rows, rope, step, true)?;
            self.rope(keys, rope, step, false)?;
        }
        self.copy_columns(queries, 0, q_rows, 0, q)?;
        self.store_kv(pages, &scratch.kv, step)
    }

    /// The projection `qkv = weight x + bias`, then [`Backend::qk_norm_rope_store`]. What `qkv` holds after is
    /// undefined.
    fn linear_qk_norm_rope_store(
        &self,
        queries: &mut Self::Tensor,
        pages: &mut Self::Pages,
        scratch: &mut HeadScratch<Self::Tensor>,
        qkv: &mut Self::Tensor,
        (weight, bias): (&Self::Weight, Option<&Self::Tensor>),
        x: &Self::Tensor,
        norms: QkNorms<'_, Self>,
        rope: Option<&Self::Rope>,
        step: &Self::Step,
        shape: &AttentionShape,
    ) -> Result<()> {
        self.linear(qkv, weight, bias, x)?;
        self.qk_norm_rope_store(queries, pages, scratch, qkv, norms, rope, step, shape)
    }

    /// `out = activation(linear(x))`; `wide` is f32 scratch of the weight's rows.
    fn linear_activation(
        &self,
        out: &mut Self::Tensor,
        wide: &mut Self::Tensor,
        weight: &Self::Weight,
        bias: Option<&Self::Tensor>,
        x: &Self::Tensor,
        activation: &Activation,
    ) -> Result<()> {
        self.linear(wide, weight, bias, x)?;
        self.activation(out, wide, activation)
    }

    /// Adds up `x` over the shards of a model that is split over devices. One device: nothing to do.
    fn all_reduce(&self, _x: &mut Self::Tensor) -> Result<()> {
        Ok(())
    }

    // Recording.

    /// Whether a step can be recorded once and replayed: its ops neither allocate nor wait for the host. It is asked
    /// before every step, as [`Profiled`] changes its answer.
    fn supports_graphs(&self) -> bool {
        false
    }

    /// Records what `body` launches, without running it.
    fn capture(&self, _body: &mut dyn FnMut() -> Result<()>) -> Result<Self::Graph> {
        Err(Error::Bug(format!("{} cannot record steps", self.name())))
    }

    /// Runs a recording.
    fn replay(&self, _graph: &Self::Graph) -> Result<()> {
        Err(Error::Bug(format!("{} cannot replay steps", self.name())))
    }

    // Timing.

    /// Runs `body`, which calls ops of this backend, and says how long the device took for them; they have ended when
    /// this returns. The plain form reads the host's clock, which is right where an op has ended when it returns: a
    /// device with a queue asks the device.
    fn time(&self, body: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        let start = Instant::now();
        body()?;
        Ok(start.elapsed())
    }
}

/// The optional norms of queries and keys (Qwen3, Apertus), one weight for all heads.
#[derive(Debug)]
pub struct QkNorms<'a, B: Backend> {
    /// Weight for queries, `[1, head_dim]`.
    pub query: Option<&'a B::Tensor>,
    /// Weight for keys, likewise.
    pub key: Option<&'a B::Tensor>,
    /// Added to the mean square.
    pub eps: f32,
}

impl<B: Backend> Clone for QkNorms<'_, B> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<B: Backend> Copy for QkNorms<'_, B> {}

/// Keys that attention folds at a time, by absolute position: block `i` is positions `256 i .. 256 (i + 1)`.
pub const KEY_BLOCK: usize = 256;
