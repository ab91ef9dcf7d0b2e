//! The judge: every op as the plainest loop that is right, sums in f64, one thread, no fused forms.

use super::{
    Activation, AttentionShape, Backend, ComputeType, Element, KEY_BLOCK, KvRows, RopeTable,
    StepLayout,
};
use crate::kv::{KvElement, KvLayout};
use crate::sampling::{RowSampler, Sampled, sample_rows};
use crate::weights::{Weight, int8};
use crate::{Error, Result};

/// See the module's first line.
#[derive(Debug, Clone)]
pub struct ReferenceBackend {
    compute: ComputeType,
}

/// An array `[rows, width]` in f32 words.
#[derive(Debug, Clone)]
pub struct ReferenceTensor {
    element: Element,
    rows: usize,
    width: usize,
    capacity: usize,
    values: Vec<f32>,
}

/// A weight `[rows, columns]`, widened, or in int8 as it is.
#[derive(Debug, Clone)]
pub struct ReferenceWeight {
    columns: usize,
    rows: std::sync::Arc<Vec<ReferenceRow>>,
}

/// A row of a weight.
#[derive(Debug)]
enum ReferenceRow {
    Plain(Vec<f32>),
    Int8(Vec<i8>, f32),
}

/// One layer's pages, keys and values as `(page, kv_head, slot, head_dim)`: of an int8 cache what its vectors
/// are worth, keys still divided by their factors.
#[derive(Debug)]
pub struct ReferencePages {
    layout: KvLayout,
    /// `[kv_heads, head_dim]`; ones where nothing is smoothed.
    factors: Vec<f32>,
    keys: Vec<f32>,
    values: Vec<f32>,
}

/// A step's layout, its ids resolved, and what was sampled in it.
#[derive(Debug, Default)]
pub struct ReferenceStep {
    layout: StepLayout,
    sampled: Vec<Sampled>,
}

impl ReferenceBackend {
    /// A backend whose activations are of type `compute`.
    pub fn new(compute: ComputeType) -> Self {
        ReferenceBackend { compute }
    }

    fn round(&self, element: Element, value: f64) -> f32 {
        match element {
            Element::Model => self.compute.round(value as f32),
            Element::F32 => value as f32,
        }
    }
}

impl ReferenceTensor {
    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..(row + 1) * self.width]
    }

    fn row_mut(&mut self, row: usize) -> &mut [f32] {
        &mut self.values[row * self.width..(row + 1) * self.width]
    }

    fn like(&mut self, rows: usize, width: usize) -> Result<()> {
        if (self.rows, self.width) == (rows, width) {
            return Ok(());
        }
        Err(Error::Bug(format!(
            "an output is {} x {} and should be {rows} x {width}",
            self.rows, self.width
        )))
    }
}

impl ReferencePages {
    fn vector(&self, page: usize, head: usize, offset: usize) -> std::ops::Range<usize> {
        let KvLayout {
            page_size,
            kv_heads,
            head_dim,
            ..
        } = self.layout;
        let start = ((page * kv_heads + head) * page_size + offset) * head_dim;
        start..start + head_dim
    }

    fn factors(&self, head: usize) -> &[f32] {
        let head_dim = self.layout.head_dim;
        &self.factors[head * head_dim..(head + 1) * head_dim]
    }

    /// `vector` as the cache keeps it.
    fn kept(&self, vector: &[f32]) -> Vec<f32> {
        match self.layout.element {
            KvElement::Compute(kind) => vector.iter().map(|&x| kind.round(x)).collect(),
            KvElement::Int8 => {
                let mut q = vec![0; vector.len()];
                let scale = int8::round_row(vector, &mut q);
                q.into_iter().map(|q| scale * f32::from(q)).collect()
            }
        }
    }
}

impl Backend for ReferenceBackend {
    type Tensor = ReferenceTensor;
    type Weight = ReferenceWeight;
    type Pages = ReferencePages;
    type Rope = RopeTable;
    type Step = ReferenceStep;
    type Graph = ();

    fn name(&self) -> String {
        "reference".to_owned()
    }

    fn compute_type(&self) -> ComputeType {
        self.compute
    }

    fn alloc(&self, element: Element, capacity: usize, width: usize) -> Result<ReferenceTensor> {
        Ok(ReferenceTensor {
            element,
            rows: 0,
            width,
            capacity,
            values: vec![f32::NAN; capacity * width],
        })
    }

    fn set_rows(&self, tensor: &mut ReferenceTensor, rows: usize) -> Result<()> {
        if rows > tensor.capacity {
            return Err(Error::Bug(format!(
                "{rows} rows in a tensor for {}",
                tensor.capacity
            )));
        }
        tensor.rows = rows;
        Ok(())
    }

    fn shape(&self, tensor: &ReferenceTensor) -> (usize, usize) {
        (tensor.rows, tensor.width)
    }

    fn upload(&self, tensor: &mut ReferenceTensor, first_row: usize, values: &[f32]) -> Result<()> {
        let start = first_row * tensor.width;
        let Some(target) =
            tensor.values[..tensor.rows * tensor.width].get_mut(start..start + values.len())
        else {
            return Err(Error::Bug(format!(
                "{} values from row {first_row} on do not fit",
                values.len()
            )));
        };
        for (out, &value) in target.iter_mut().zip(values) {
            *out = self.round(tensor.element, value.into());
        }
        Ok(())
    }

    fn download(&self, tensor: &ReferenceTensor) -> Result<Vec<f32>> {
        Ok(tensor.values[..tensor.rows * tensor.width].to_vec())
    }

    fn load_weight(&self, weight: &Weight) -> Result<ReferenceWeight> {
        let columns = weight.cols();
        let mut rows = Vec::with_capacity(weight.rows());
        for part in weight.parts() {
            for row in 0..part.rows() {
                rows.push(match part.data().int8() {
                    Some((q, scales)) => {
                        let q = q[row * columns..(row + 1) * columns].to_vec();
                        ReferenceRow::Int8(q, scales[row])
                    }
                    None => {
                        let mut values = vec![0.0; columns];
                        part.row_f32(row, &mut values);
                        ReferenceRow::Plain(values)
                    }
                });
            }
        }
        Ok(ReferenceWeight {
            columns,
            rows: rows.into(),
        })
    }

    fn load_rope(&self, table: &RopeTable) -> Result<RopeTable> {
        Ok(table.clone())
    }

    fn alloc_pages(
        &self,
        layout: &KvLayout,
        smoothing: Option<&[f32]>,
        pages: usize,
    ) -> Result<ReferencePages> {
        let width = layout.kv_heads * layout.head_dim;
        let factors = smoothing.map_or_else(|| vec![1.0; width], <[f32]>::to_vec);
        if factors.len() != width {
            return Err(Error::Bug(format!(
                "{} smoothing factors for {width} channels",
                factors.len()
            )));
        }
        let values = pages * layout.page_size * width;
        Ok(ReferencePages {
            layout: *layout,
            factors,
            keys: vec![0.0; values],
            values: vec![0.0; values],
        })
    }

    fn copy_pages(&self, pages: &mut ReferencePages, copies: &[(u32, u32)]) -> Result<()> {
        let len = pages.layout.page_size * pages.layout.kv_heads * pages.layout.head_dim;
        for &(from, to) in copies {
            let (from, to) = (from as usize * len, to as usize * len);
            pages.keys.copy_within(from..from + len, to);
            pages.values.copy_within(from..from + len, to);
        }
        Ok(())
    }

    fn read_slot(
        &self,
        pages: &ReferencePages,
        page: usize,
        head: usize,
        offset: usize,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        let vector = pages.vector(page, head, offset);
        let key = pages.keys[vector.clone()].iter();
        Ok((
            key.zip(pages.factors(head))
                .map(|(key, factor)| factor * key)
                .collect(),
            pages.values[vector].to_vec(),
        ))
    }

    fn alloc_step(
        &self,
        _rows: usize,
        _spans: usize,
        _table_width: usize,
    ) -> Result<ReferenceStep> {
        Ok(ReferenceStep::default())
    }

    fn prepare(
        &self,
        step: &mut ReferenceStep,
        layout: &StepLayout,
        previous: Option<&ReferenceStep>,
    ) -> Result<()> {
        let mut layout = layout.clone();
        layout.take_previous(previous.map_or(&[], |step| &step.sampled))?;
        *step = ReferenceStep {
            layout,
            sampled: Vec::new(),
        };
        Ok(())
    }

    fn take_drafts(&self, step: &mut ReferenceStep, from: &ReferenceStep) -> Result<()> {
        step.layout.take_drafts(&from.sampled)
    }

    fn embed(
        &self,
        out: &mut ReferenceTensor,
        table: &ReferenceWeight,
        step: &ReferenceStep,
    ) -> Result<()> {
        out.like(step.layout.rows(), table.columns)?;
        for (row, &id) in step.layout.ids.iter().enumerate() {
            let id = id as usize;
            let values = match &table.rows[id] {
                ReferenceRow::Plain(values) => values.clone(),
                ReferenceRow::Int8(q, scale) => q.iter().map(|&q| scale * f32::from(q)).collect(),
            };
            for (out, value) in out.row_mut(row).iter_mut().zip(values) {
                *out = self.compute.round(value);
            }
        }
        Ok(())
    }

    fn rms_norm(
        &self,
        out: &mut ReferenceTensor,
        x: &ReferenceTensor,
        weight: &ReferenceTensor,
        eps: f32,
    ) -> Result<()> {
        out.like(x.rows, x.width)?;
        for row in 0..x.rows {
            out.row_mut(row).copy_from_slice(x.row(row));
            self.norm(out.element, out.row_mut(row), weight.row(0), eps);
        }
        Ok(())
    }

    fn add(&self, x: &mut ReferenceTensor, delta: &ReferenceTensor) -> Result<()> {
        x.like(delta.rows, delta.width)?;
        let element = x.element;
        for row in 0..x.rows {
            for (x, &delta) in x.row_mut(row).iter_mut().zip(delta.row(row)) {
                *x = self.round(element, f64::from(*x + delta));
            }
        }
        Ok(())
    }

    fn linear(
        &self,
        out: &mut ReferenceTensor,
        weight: &ReferenceWeight,
        bias: Option<&ReferenceTensor>,
        x: &ReferenceTensor,
    ) -> Result<()> {
        out.like(x.rows, weight.rows.len())?;
        let element = out.element;
        for row in 0..x.rows {
            let mut integers = vec![0; x.width];
            let unit = int8::round_activations(x.row(row), &mut integers);
            for (n, out) in out.row_mut(row).iter_mut().enumerate() {
                let sum: f64 = match &weight.rows[n] {
                    ReferenceRow::Plain(weights) => weights
                        .iter()
                        .zip(x.row(row))
                        .map(|(&w, &x)| f64::from(w) * f64::from(x))
                        .sum(),
                    ReferenceRow::Int8(q, scale) => {
                        let products = q.iter().zip(&integers);
                        let sum: i64 = products.map(|(&q, &v)| i64::from(q) * i64::from(v)).sum();
                        sum as f64 * f64::from(unit) * f64::from(*scale)
                    }
                };
                *out = self.round(
                    element,
                    sum + bias.map_or(0.0, |bias| f64::from(bias.values[n])),
                );
            }
        }
        Ok(())
    }

    fn head_norm(&self, x: &mut ReferenceTensor, weight: &ReferenceTensor, eps: f32) -> Result<()> {
        let element = x.element;
        for row in 0..x.rows {
            for head in x.row_mut(row).chunks_exact_mut(weight.width) {
                self.norm(element, head, weight.row(0), eps);
            }
        }
        Ok(())
    }

    fn rope(
        &self,
        x: &mut ReferenceTensor,
        rope: &RopeTable,
        step: &ReferenceStep,
        queries: bool,
    ) -> Result<()> {
        let (element, pairs) = (x.element, rope.pairs);
        for row in 0..x.rows {
            let position = step.layout.positions[row] as usize;
            let table = position * pairs..(position + 1) * pairs;
            let (cos, sin) = (&rope.cos[table.clone()], &rope.sin[table]);
            let scale = rope
                .query_scale
                .as_ref()
                .filter(|_| queries)
                .map_or(1.0, |scale| scale[position]);
            for head in x.row_mut(row).chunks_exact_mut(2 * pairs) {
                for j in 0..pairs {
                    let (a, b) = (head[j], head[j + pairs]);
                    head[j] = self.round(element, ((a * cos[j] - b * sin[j]) * scale).into());
                    head[j + pairs] =
                        self.round(element, ((b * cos[j] + a * sin[j]) * scale).into());
                }
            }
        }
        Ok(())
    }

    fn store_kv(
        &self,
        pages: &mut ReferencePages,
        rows: &KvRows<ReferenceTensor>,
        step: &ReferenceStep,
    ) -> Result<()> {
        let KvLayout {
            page_size,
            kv_heads,
            head_dim,
            ..
        } = pages.layout;
        for (row, &slot) in step.layout.slots.iter().enumerate() {
            for head in 0..kv_heads {
                let to = pages.vector(slot as usize / page_size, head, slot as usize % page_size);
                let from = head * head_dim..(head + 1) * head_dim;
                let key = rows.keys.row(row)[from.clone()].iter();
                let key: Vec<f32> = key.zip(pages.factors(head)).map(|(k, f)| k / f).collect();
                let (key, value) = (pages.kept(&key), pages.kept(&rows.values.row(row)[from]));
                pages.keys[to.clone()].copy_from_slice(&key);
                pages.values[to].copy_from_slice(&value);
            }
        }
        Ok(())
    }

    fn attention(
        &self,
        out: &mut ReferenceTensor,
        queries: &ReferenceTensor,
        pages: &ReferencePages,
        step: &ReferenceStep,
        shape: &AttentionShape,
    ) -> Result<()> {
        out.like(queries.rows, shape.heads * shape.head_dim)?;
        let head_dim = shape.head_dim;
        for span in 0..step.layout.spans() {
            let rows = step.layout.span(span);
            let end = rows
                .clone()
                .last()
                .map_or(0, |row| step.layout.positions[row] as usize + 1);
            for row in rows {
                let position = step.layout.positions[row] as usize;
                let visible = shape.mask.visible(position, end);
                for head in 0..shape.heads {
                    let kv_head = head / (shape.heads / shape.kv_heads);
                    let query = &queries.row(row)[head * head_dim..(head + 1) * head_dim];
                    let factors = pages.factors(kv_head);
                    let mut fold = Fold::new(head_dim);
                    for block in visible.start / KEY_BLOCK..visible.end.div_ceil(KEY_BLOCK) {
                        let keys = (block * KEY_BLOCK).max(visible.start)
                            ..((block + 1) * KEY_BLOCK).min(visible.end);
                        let slots = keys.map(|key| {
                            let (page, offset) =
                                step.layout.place(span, key, pages.layout.page_size);
                            pages.vector(page, kv_head, offset)
                        });
                        fold.block(slots.map(|slot| {
                            let key = &pages.keys[slot.clone()];
                            let score: f64 = query
                                .iter()
                                .zip(factors)
                                .zip(key)
                                .map(|((&q, &f), &k)| f64::from(q * f) * f64::from(k))
                                .sum();
                            (score * f64::from(shape.scale), &pages.values[slot])
                        }));
                    }
                    for (i, out) in out.row_mut(row)[head * head_dim..(head + 1) * head_dim]
                        .iter_mut()
                        .enumerate()
                    {
                        *out = self.round(Element::Model, fold.output[i] / fold.weight);
                    }
                }
            }
        }
        Ok(())
    }

    fn activation(
        &self,
        out: &mut ReferenceTensor,
        x: &ReferenceTensor,
        activation: &Activation,
    ) -> Result<()> {
        out.like(x.rows, activation.output_width(x.width))?;
        for row in 0..x.rows {
            let x = x.row(row);
            let width = out.width;
            for (i, out) in out.row_mut(row).iter_mut().enumerate() {
                let value = match activation {
                    Activation::SiluGated => {
                        let (gate, up) = (f64::from(x[i]), f64::from(x[width + i]));
                        gate / (1.0 + (-gate).exp()) * up
                    }
                    Activation::Xielu(xielu) => {
                        let (x, beta) = (f64::from(x[i]), f64::from(xielu.beta));
                        if x > 0.0 {
                            f64::from(xielu.alpha_p) * x * x + beta * x
                        } else {
                            (x.min(xielu.eps.into()).exp_m1() - x) * f64::from(xielu.alpha_n)
                                + beta * x
                        }
                    }
                };
                *out = self.compute.round(value as f32);
            }
        }
        Ok(())
    }

    fn copy_columns(
        &self,
        out: &mut ReferenceTensor,
        to: usize,
        x: &ReferenceTensor,
        from: usize,
        columns: usize,
    ) -> Result<()> {
        let element = out.element;
        for row in 0..x.rows {
            let (out, x) = (&mut out.row_mut(row)[to..], &x.row(row)[from..]);
            for (out, x) in out.iter_mut().zip(x).take(columns) {
                *out = self.round(element, f64::from(*x));
            }
        }
        Ok(())
    }

    fn gather_wanted(
        &self,
        out: &mut ReferenceTensor,
        x: &ReferenceTensor,
        step: &ReferenceStep,
    ) -> Result<()> {
        out.like(step.layout.wanted.len(), x.width)?;
        let element = out.element;
        for (i, &row) in step.layout.wanted.iter().enumerate() {
            for (out, x) in out.row_mut(i).iter_mut().zip(x.row(row as usize)) {
                *out = self.round(element, f64::from(*x));
            }
        }
        Ok(())
    }

    fn sample(
        &self,
        step: &mut ReferenceStep,
        logits: &ReferenceTensor,
        rows: &[Option<RowSampler>],
    ) -> Result<()> {
        step.sampled = sample_rows(rows, (0..logits.rows).map(|row| logits.row(row)))?;
        Ok(())
    }

    fn read_samples(&self, step: &ReferenceStep) -> Result<Vec<Sampled>> {
        Ok(step.sampled.clone())
    }
}

impl ReferenceBackend {
    fn norm(&self, element: Element, values: &mut [f32], weight: &[f32], eps: f32) {
        let squares: f64 = values.iter().map(|&x| f64::from(x) * f64::from(x)).sum();
        let scale = 1.0 / (squares / values.len() as f64 + f64::from(eps)).sqrt();
        for (value, &weight) in values.iter_mut().zip(weight) {
            *value = self.round(element, f64::from(*value) * scale * f64::from(weight));
        }
    }
}

/// Softmax-weighted sums folded block by block (arXiv:1805.02867), each block against its own maximum.
struct Fold {
    max: f64,
    weight: f64,
    output: Vec<f64>,
}

impl Fold {
    fn new(head_dim: usize) -> Self {
        Fold {
            max: f64::NEG_INFINITY,
            weight: 0.0,
            output: vec![0.0; head_dim],
        }
    }

    fn block<'a>(&mut self, keys: impl Iterator<Item = (f64, &'a [f32])>) {
        let keys: Vec<_> = keys.collect();
        let max = keys.iter().fold(self.max, |max, key| max.max(key.0));
        let old = if self.weight == 0.0 {
            0.0
        } else {
            (self.max - max).exp()
        };
        self.max = max;
        self.weight *= old;
        self.output.iter_mut().for_each(|output| *output *= old);
        for (score, value) in keys {
            let weight = (score - max).exp();
            self.weight += weight;
            for (output, &value) in self.output.iter_mut().zip(value) {
                *output += weight * f64::from(value);
            }
        }
    }
}
