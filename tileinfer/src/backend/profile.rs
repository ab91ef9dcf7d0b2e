//! Where the time of a step goes: a backend around another that times every op and counts the bytes that it
//! cannot avoid moving. For devices that finish an op before it returns.

use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::{
    Activation, AttentionShape, Backend, ComputeType, Element, KvRows, QkNorms, RopeTable,
    StepLayout,
};
use crate::Result;
use crate::kv::KvLayout;
use crate::sampling::{RowSampler, Sampled};
use crate::weights::Weight;

/// What was counted, by op and shape. Clones share it.
#[derive(Debug, Clone, Default)]
pub struct Profile(Arc<Mutex<BTreeMap<String, Count>>>);

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
        let counts = std::mem::take(&mut *self.0.lock().unwrap_or_else(PoisonError::into_inner));
        let mut counts: Vec<_> = counts.into_iter().collect();
        counts.sort_by_key(|(_, count)| std::cmp::Reverse(count.time));
        counts
    }

    fn add(&self, what: String, start: Instant, bytes: u64, flop: u64) {
        let time = start.elapsed();
        let mut counts = self.0.lock().unwrap_or_else(PoisonError::into_inner);
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
        let start = Instant::now();
        step.layout = layout.clone();
        self.inner
            .prepare(&mut step.inner, layout, previous.map(|step| &step.inner))?;
        self.profile.add("prepare".to_owned(), start, 0, 0);
        Ok(())
    }

    fn take_drafts(&self, step: &mut Self::Step, from: &Self::Step) -> Result<()> {
        self.inner.take_drafts(&mut step.inner, &from.inner)
    }

    fn embed(&self, out: &mut B::Tensor, table: &Self::Weight, step: &Self::Step) -> Result<()> {
        let start = Instant::now();
        self.inner.embed(out, &table.inner, &step.inner)?;
        self.profile
            .add("embed".to_owned(), start, 2 * self.bytes(&[out]), 0);
        Ok(())
    }

    fn rms_norm(
        &self,
        out: &mut B::Tensor,
        x: &B::Tensor,
        weight: &B::Tensor,
        eps: f32,
    ) -> Result<()> {
        let start = Instant::now();
        self.inner.rms_norm(out, x, weight, eps)?;
        self.profile
            .add("rms_norm".to_owned(), start, self.bytes(&[out, x]), 0);
        Ok(())
    }

    fn add(&self, x: &mut B::Tensor, delta: &B::Tensor) -> Result<()> {
        let start = Instant::now();
        self.inner.add(x, delta)?;
        self.profile
            .add("add".to_owned(), start, self.bytes(&[x, x, delta]), 0);
        Ok(())
    }

    fn linear(
        &self,
        out: &mut B::Tensor,
        weight: &Self::Weight,
        bias: Option<&B::Tensor>,
        x: &B::Tensor,
    ) -> Result<()> {
        let start = Instant::now();
        self.inner.linear(out, &weight.inner, bias, x)?;
        let (bytes, flop) = self.linear_counts(weight, x, out);
        self.profile.add(
            format!("linear {} -> {}", weight.columns, weight.rows),
            start,
            bytes,
            flop,
        );
        Ok(())
    }

    fn head_norm(&self, x: &mut B::Tensor, weight: &B::Tensor, eps: f32) -> Result<()> {
        let start = Instant::now();
        self.inner.head_norm(x, weight, eps)?;
        self.profile
            .add("head_norm".to_owned(), start, self.bytes(&[x, x]), 0);
        Ok(())
    }

    fn rope(
        &self,
        x: &mut B::Tensor,
        rope: &B::Rope,
        step: &Self::Step,
        queries: bool,
    ) -> Result<()> {
        let start = Instant::now();
        self.inner.rope(x, rope, &step.inner, queries)?;
        self.profile
            .add("rope".to_owned(), start, self.bytes(&[x, x]), 0);
        Ok(())
    }

    fn store_kv(
        &self,
        pages: &mut Self::Pages,
        rows: &KvRows<B::Tensor>,
        step: &Self::Step,
    ) -> Result<()> {
        let start = Instant::now();
        self.inner.store_kv(&mut pages.inner, rows, &step.inner)?;
        self.profile.add(
            "store_kv".to_owned(),
            start,
            2 * self.bytes(&[&rows.keys, &rows.values]),
            0,
        );
        Ok(())
    }

    fn attention(
        &self,
        out: &mut B::Tensor,
        queries: &B::Tensor,
        pages: &Self::Pages,
        step: &Self::Step,
        shape: &AttentionShape,
    ) -> Result<()> {
        let start = Instant::now();
        self.inner
            .attention(out, queries, &pages.inner, &step.inner, shape)?;
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
        self.profile.add("attention".to_owned(), start, bytes, flop);
        Ok(())
    }

    fn activation(
        &self,
        out: &mut B::Tensor,
        x: &B::Tensor,
        activation: &Activation,
    ) -> Result<()> {
        let start = Instant::now();
        self.inner.activation(out, x, activation)?;
        self.profile
            .add("activation".to_owned(), start, self.bytes(&[out, x]), 0);
        Ok(())
    }

    fn copy_columns(
        &self,
        out: &mut B::Tensor,
        to: usize,
        x: &B::Tensor,
        from: usize,
        columns: usize,
    ) -> Result<()> {
        let start = Instant::now();
        self.inner.copy_columns(out, to, x, from, columns)?;
        let bytes = 2 * self.rows(x) * columns * self.compute_type().size();
        self.profile
            .add("copy_columns".to_owned(), start, bytes as u64, 0);
        Ok(())
    }

    fn gather_wanted(&self, out: &mut B::Tensor, x: &B::Tensor, step: &Self::Step) -> Result<()> {
        let start = Instant::now();
        self.inner.gather_wanted(out, x, &step.inner)?;
        self.profile
            .add("gather_wanted".to_owned(), start, 2 * self.bytes(&[out]), 0);
        Ok(())
    }

    fn sample(
        &self,
        step: &mut Self::Step,
        logits: &B::Tensor,
        rows: &[Option<RowSampler>],
    ) -> Result<()> {
        let start = Instant::now();
        self.inner.sample(&mut step.inner, logits, rows)?;
        let (rows, width) = self.inner.shape(logits);
        self.profile
            .add("sample".to_owned(), start, (rows * width * 4) as u64, 0);
        Ok(())
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
        let start = Instant::now();
        self.inner.add_rms_norm(x, out, delta, weight, eps)?;
        self.profile.add(
            "add_rms_norm".to_owned(),
            start,
            self.bytes(&[x, x, out, delta]),
            0,
        );
        Ok(())
    }

    fn qk_norm_rope_store(
        &self,
        queries: &mut B::Tensor,
        pages: &mut Self::Pages,
        scratch: &mut KvRows<B::Tensor>,
        qkv: &B::Tensor,
        norms: QkNorms<'_, Self>,
        rope: Option<&B::Rope>,
        step: &Self::Step,
        shape: &AttentionShape,
    ) -> Result<()> {
        let start = Instant::now();
        let QkNorms { query, key, eps } = norms;
        let norms = QkNorms { query, key, eps };
        self.inner.qk_norm_rope_store(
            queries,
            &mut pages.inner,
            scratch,
            qkv,
            norms,
            rope,
            &step.inner,
            shape,
        )?;
        self.profile.add(
            "qk_norm_rope_store".to_owned(),
            start,
            2 * self.bytes(&[qkv]),
            0,
        );
        Ok(())
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
        let start = Instant::now();
        self.inner
            .linear_activation(out, wide, &weight.inner, bias, x, activation)?;
        let (bytes, flop) = self.linear_counts(weight, x, out);
        let what = format!("linear_activation {} -> {}", weight.columns, weight.rows);
        self.profile.add(what, start, bytes, flop);
        Ok(())
    }

    fn all_reduce(&self, x: &mut B::Tensor) -> Result<()> {
        self.inner.all_reduce(x)
    }
}
