//! Where the time of a step goes: a backend around another that times every op and counts the bytes that it
//! cannot avoid moving. How long an op took is the inner backend's to say ([`Backend::time`]).

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use super::{
    Activation, AttentionShape, Backend, ComputeType, Element, HeadScratch, KvRows, QkNorms,
    RopeTable, StepLayout,
};
use crate::Result;
use crate::kv::KvLayout;
use crate::sampling::{RowSampler, Sampled};
use crate::weights::Weight;

/// What was counted, by op and shape. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Profile(Arc<Counts>);

#[derive(Debug, Default)]
struct Counts {
    paused: AtomicBool,
    counts: Mutex<BTreeMap<String, Count>>,
}

/// The calls of one op on one shape.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Count {
    /// How many.
    pub calls: u64,
    /// What they took together.
    pub time: Duration,
    /// What they read and wrote together: weights as stored, cached keys and values as stored, activations
    /// as [`ComputeType`] values.
    pub bytes: u64,
    /// Multiplications and additions.
    pub flop: u64,
}

impl Profile {
    /// What was counted since the last time, the most time first.
    pub fn take(&self) -> Vec<(String, Count)> {
        let mut counts = self.0.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let counts = std::mem::take(&mut *counts);
        let mut counts: Vec<_> = counts.into_iter().collect();
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(count.time));
        counts
    }

    /// Counts nothing until [`Profile::resume`]: ops then run as they would without a profile, and steps are recorded
    /// and replayed where the device can. To be called between steps.
    pub fn pause(&self) {
        self.0.paused.store(true, Ordering::Relaxed);
    }

    /// Counts again.
    pub fn resume(&self) {
        self.0.paused.store(false, Ordering::Relaxed);
    }

    fn is_paused(&self) -> bool {
        self.0.paused.load(Ordering::Relaxed)
    }

    fn add(&self, what: String, time: Duration, bytes: u64, flop: u64) {
        let mut counts = self.0.counts.lock().unwrap_or_else(PoisonError::into_inner);
        let count = counts.entry(what).or_default();
        *count = Count {
            calls: count.calls + 1,
            time: count.time + time,
            bytes: count.bytes + bytes,
            flop: count.flop + flop,
        };
    }
}

/// See the module's first lines.
pub struct Profiled<B> {
    inner: B,
    profile: Profile,
}

/// A weight and its shape.
#[derive(Clone)]
pub struct ProfiledWeight<W> {
    inner: W,
    rows: usize,
    columns: usize,
    bytes: u64,
}

/// A step and its layout.
pub struct ProfiledStep<S> {
    inner: S,
    layout: StepLayout,
}

/// One layer's pages and their geometry.
pub struct ProfiledPages<P> {
    inner: P,
    layout: KvLayout,
}

impl<B: Backend> Profiled<B> {
    /// Counts what `inner` does into `profile`.
    pub fn new(inner: B, profile: &Profile) -> Self {
        Profiled {
            inner,
            profile: profile.clone(),
        }
    }

    /// Runs an op that moves so many bytes and does so many operations, and counts it.
    fn timed(
        &self,
        what: impl Into<String>,
        (bytes, flop): (u64, u64),
        op: &mut dyn FnMut() -> Result<()>,
    ) -> Result<()> {
        if self.profile.is_paused() {
            return op();
        }
        let time = self.inner.time(op)?;
        self.profile.add(what.into(), time, bytes, flop);
        Ok(())
    }

    /// Bytes of tensors, as values of the compute type.
    fn bytes(&self, tensors: &[&B::Tensor]) -> u64 {
        let values: usize = tensors
            .iter()
            .map(|tensor| self.inner.shape(tensor))
            .map(|(rows, width)| rows * width)
            .sum();
        (values * self.inner.compute_type().size()) as u64
    }

    fn rows(&self, tensor: &B::Tensor) -> usize {
        self.inner.shape(tensor).0
    }

    fn linear_counts(
        &self,
        weight: &ProfiledWeight<B::Weight>,
        x: &B::Tensor,
        out: &B::Tensor,
    ) -> (u64, u64) {
        let flop = 2 * weight.rows * weight.columns * self.rows(x);
        (weight.bytes + self.bytes(&[x, out]), flop as u64)
    }
}

impl<B: Backend> Backend for Profiled<B> {
    type Tensor = B::Tensor;
    type Weight = ProfiledWeight<B::Weight>;
    type Pages = ProfiledPages<B::Pages>;
    type Rope = B::Rope;
    type Step = ProfiledStep<B::Step>;
    type Graph = B::Graph;

    fn name(&self) -> String {
        self.inner.name()
    }

    fn compute_type(&self) -> ComputeType {
        self.inner.compute_type()
    }

    fn alloc(&self, element: Element, capacity: usize, width: usize) -> Result<B::Tensor> {
        self.inner.alloc(element, capacity, width)
    }

    fn set_rows(&self, tensor: &mut B::Tensor, rows: usize) -> Result<()> {
        self.inner.set_rows(tensor, rows)
    }

    fn shape(&self, tensor: &B::Tensor) -> (usize, usize) {
        self.inner.shape(tensor)
    }

    fn upload(&self, tensor: &mut B::Tensor, first_row: usize, values: &[f32]) -> Result<()> {
        self.inner.upload(tensor, first_row, values)
    }

    fn download(&self, tensor: &B::Tensor) -> Result<Vec<f32>> {
        self.inner.download(tensor)
    }

    fn load_weight(&self, weight: &Weight) -> Result<Self::Weight> {
        let (rows, columns, bytes) = (weight.rows(), weight.cols(), weight.bytes());
        Ok(ProfiledWeight {
            inner: self.inner.load_weight(weight)?,
            rows,
            columns,
            bytes,
        })
    }

    fn load_int8(&self, weight: &Weight) -> Result<Self::Weight> {
        let (rows, columns) = (weight.rows(), weight.cols());
        Ok(ProfiledWeight {
            inner: self.inner.load_int8(weight)?,
            rows,
            columns,
            bytes: (rows * (columns + size_of::<f32>())) as u64,
        })
    }

    fn load_vector(&self, values: &[f32]) -> Result<B::Tensor> {
        self.inner.load_vector(values)
    }

    fn load_rope(&self, table: &RopeTable) -> Result<B::Rope> {
        self.inner.load_rope(table)
    }

    fn alloc_pages(
        &self,
        layout: &KvLayout,
        smoothing: Option<&[f32]>,
        pages: usize,
    ) -> Result<Self::Pages> {
        Ok(ProfiledPages {
            inner: self.inner.alloc_pages(layout, smoothing, pages)?,
            layout: *layout,
        })
    }

    fn copy_pages(&self, pages: &mut Self::Pages, copies: &[(u32, u32)]) -> Result<()> {
        self.inner.copy_pages(&mut pages.inner, copies)
    }

    fn read_slot(
        &self,
        pages: &Self::Pages,
        page: usize,
        head: usize,
        offset: usize,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        self.inner.read_slot(&pages.inner, page, head, offset)
    }

    fn read_keys(&self, pages: &Self::Pages, layout: &KvLayout, page: usize) -> Result<Vec<f32>> {
        self.inner.read_keys(&pages.inner, layout, page)
    }

    fn alloc_step(&self, rows: usize, spans: usize, table_width: usize) -> Result<Self::Step> {
        Ok(ProfiledStep {
            inner: self.inner.alloc_step(rows, spans, table_width)?,
            layout: StepLayout::default(),
        })
    }

    fn prepare(
        &self,
        step: &mut Self::Step,
        layout: &StepLayout,
        previous: Option<&Self::Step>,
    ) -> Result<()> {
        step.layout = layout.clone();
        let previous = previous.map(|step| &step.inner);
        self.timed("prepare", (0, 0), &mut || {
            self.inner.prepare(&mut step.inner, layout, previous)
        })
    }

    fn take_drafts(&self, step: &mut Self::Step, from: &Self::Step) -> Result<()> {
        self.inner.take_drafts(&mut step.inner, &from.inner)
    }

    fn embed(&self, out: &mut B::Tensor, table: &Self::Weight, step: &Self::Step) -> Result<()> {
        self.timed("embed", (2 * self.bytes(&[out]), 0), &mut || {
            self.inner.embed(out, &table.inner, &step.inner)
        })
    }

    fn rms_norm(
        &self,
        out: &mut B::Tensor,
        x: &B::Tensor,
        weight: &B::Tensor,
        eps: f32,
    ) -> Result<()> {
        self.timed("rms_norm", (self.bytes(&[out, x]), 0), &mut || {
            self.inner.rms_norm(out, x, weight, eps)
        })
    }

    fn add(&self, x: &mut B::Tensor, delta: &B::Tensor) -> Result<()> {
        self.timed("add", (self.bytes(&[x, x, delta]), 0), &mut || {
            self.inner.add(x, delta)
        })
    }

    fn linear(
        &self,
        out: &mut B::Tensor,
        weight: &Self::Weight,
        bias: Option<&B::Tensor>,
        x: &B::Tensor,
    ) -> Result<()> {
        let what = format!("linear {} -> {}", weight.columns, weight.rows);
        self.timed(what, self.linear_counts(weight, x, out), &mut || {
            self.inner.linear(out, &weight.inner, bias, x)
        })
    }

    fn head_norm(&self, x: &mut B::Tensor, weight: &B::Tensor, eps: f32) -> Result<()> {
        self.timed("head_norm", (self.bytes(&[x, x]), 0), &mut || {
            self.inner.head_norm(x, weight, eps)
        })
    }

    fn rope(
        &self,
        x: &mut B::Tensor,
        rope: &B::Rope,
        step: &Self::Step,
        queries: bool,
    ) -> Result<()> {
        self.timed("rope", (self.bytes(&[x, x]), 0), &mut || {
            self.inner.rope(x, rope, &step.inner, queries)
        })
    }

    fn store_kv(
        &self,
        pages: &mut Self::Pages,
        rows: &KvRows<B::Tensor>,
        step: &Self::Step,
    ) -> Result<()> {
        let bytes = 2 * self.bytes(&[&rows.keys, &rows.values]);
        self.timed("store_kv", (bytes, 0), &mut || {
            self.inner.store_kv(&mut pages.inner, rows, &step.inner)
        })
    }

    fn attention(
        &self,
        out: &mut B::Tensor,
        queries: &B::Tensor,
        pages: &Self::Pages,
        step: &Self::Step,
        shape: &AttentionShape,
    ) -> Result<()> {
        let (mut keys, mut scores) = (0, 0);
        for span in 0..step.layout.spans() {
            let positions = &step.layout.positions[step.layout.span(span)];
            keys += positions.last().map_or(0, |&last| u64::from(last) + 1);
            scores += positions
                .iter()
                .map(|&position| u64::from(position) + 1)
                .sum::<u64>();
        }
        let bytes = keys * pages.layout.position_bytes() as u64 + self.bytes(&[out, queries]);
        let flop = 4 * scores * (shape.heads * shape.head_dim) as u64;
        self.timed("attention", (bytes, flop), &mut || {
            self.inner
                .attention(out, queries, &pages.inner, &step.inner, shape)
        })
    }

    fn activation(
        &self,
        out: &mut B::Tensor,
        x: &B::Tensor,
        activation: &Activation,
    ) -> Result<()> {
        self.timed("activation", (self.bytes(&[out, x]), 0), &mut || {
            self.inner.activation(out, x, activation)
        })
    }

    fn copy_columns(
        &self,
        out: &mut B::Tensor,
        to: usize,
        x: &B::Tensor,
        from: usize,
        columns: usize,
    ) -> Result<()> {
        let bytes = 2 * self.rows(x) * columns * self.compute_type().size();
        self.timed("copy_columns", (bytes as u64, 0), &mut || {
            self.inner.copy_columns(out, to, x, from, columns)
        })
    }

    fn gather_wanted(&self, out: &mut B::Tensor, x: &B::Tensor, step: &Self::Step) -> Result<()> {
        self.timed("gather_wanted", (2 * self.bytes(&[out]), 0), &mut || {
            self.inner.gather_wanted(out, x, &step.inner)
        })
    }

    fn sample(
        &self,
        step: &mut Self::Step,
        logits: &B::Tensor,
        rows: &[Option<RowSampler>],
    ) -> Result<()> {
        let (count, width) = self.inner.shape(logits);
        self.timed("sample", ((count * width * 4) as u64, 0), &mut || {
            self.inner.sample(&mut step.inner, logits, rows)
        })
    }

    fn read_samples(&self, step: &Self::Step) -> Result<Vec<Sampled>> {
        self.inner.read_samples(&step.inner)
    }

    fn add_rms_norm(
        &self,
        x: &mut B::Tensor,
        out: &mut B::Tensor,
        delta: &B::Tensor,
        weight: &B::Tensor,
        eps: f32,
    ) -> Result<()> {
        let bytes = self.bytes(&[x, x, out, delta]);
        self.timed("add_rms_norm", (bytes, 0), &mut || {
            self.inner.add_rms_norm(x, out, delta, weight, eps)
        })
    }

    fn linear_add_rms_norm(
        &self,
        x: &mut B::Tensor,
        out: &mut B::Tensor,
        delta: &mut B::Tensor,
        (weight, bias): (&Self::Weight, Option<&B::Tensor>),
        y: &B::Tensor,
        norm: &B::Tensor,
        eps: f32,
    ) -> Result<()> {
        let what = format!("linear_add_rms_norm {} -> {}", weight.columns, weight.rows);
        let (bytes, flop) = self.linear_counts(weight, y, out);
        let bytes = bytes + self.bytes(&[x, x]);
        self.timed(what, (bytes, flop), &mut || {
            let layer = (&weight.inner, bias);
            self.inner
                .linear_add_rms_norm(x, out, delta, layer, y, norm, eps)
        })
    }

    fn qk_norm_rope_store(
        &self,
        queries: &mut B::Tensor,
        pages: &mut Self::Pages,
        scratch: &mut HeadScratch<B::Tensor>,
        qkv: &B::Tensor,
        norms: QkNorms<'_, Self>,
        rope: Option<&B::Rope>,
        step: &Self::Step,
        shape: &AttentionShape,
    ) -> Result<()> {
        let QkNorms { query, key, eps } = norms;
        let norms = QkNorms { query, key, eps };
        let bytes = 2 * self.bytes(&[qkv]);
        self.timed("qk_norm_rope_store", (bytes, 0), &mut || {
            self.inner.qk_norm_rope_store(
                queries,
                &mut pages.inner,
                scratch,
                qkv,
                norms,
                rope,
                &step.inner,
                shape,
            )
        })
    }

    fn linear_qk_norm_rope_store(
        &self,
        queries: &mut B::Tensor,
        pages: &mut Self::Pages,
        scratch: &mut HeadScratch<B::Tensor>,
        qkv: &mut B::Tensor,
        (weight, bias): (&Self::Weight, Option<&B::Tensor>),
        x: &B::Tensor,
        norms: QkNorms<'_, Self>,
        rope: Option<&B::Rope>,
        step: &Self::Step,
        shape: &AttentionShape,
    ) -> Result<()> {
        let QkNorms { query, key, eps } = norms;
        let norms = QkNorms { query, key, eps };
        let (columns, rows) = (weight.columns, weight.rows);
        let what = format!("linear_qk_norm_rope_store {columns} -> {rows}");
        let (bytes, flop) = self.linear_counts(weight, x, qkv);
        let counts = (bytes + self.bytes(&[qkv]), flop);
        self.timed(what, counts, &mut || {
            let (pages, step) = (&mut pages.inner, &step.inner);
            let layer = (&weight.inner, bias);
            self.inner.linear_qk_norm_rope_store(
                queries, pages, scratch, qkv, layer, x, norms, rope, step, shape,
            )
        })
    }

    fn linear_activation(
        &self,
        out: &mut B::Tensor,
        wide: &mut B::Tensor,
        weight: &Self::Weight,
        bias: Option<&B::Tensor>,
        x: &B::Tensor,
        activation: &Activation,
    ) -> Result<()> {
        let what = format!("linear_activation {} -> {}", weight.columns, weight.rows);
        self.timed(what, self.linear_counts(weight, x, out), &mut || {
            self.inner
                .linear_activation(out, wide, &weight.inner, bias, x, activation)
        })
    }

    fn all_reduce(&self, x: &mut B::Tensor) -> Result<()> {
        self.inner.all_reduce(x)
    }

    /// While ops are counted they run one by one: a recording would hide them.
    fn supports_graphs(&self) -> bool {
        self.profile.is_paused() && self.inner.supports_graphs()
    }

    fn capture(&self, body: &mut dyn FnMut() -> Result<()>) -> Result<B::Graph> {
        self.inner.capture(body)
    }

    fn replay(&self, graph: &B::Graph) -> Result<()> {
        self.inner.replay(graph)
    }

    fn time(&self, body: &mut dyn FnMut() -> Result<()>) -> Result<Duration> {
        self.inner.time(body)
    }
}
