//! [`CpuBackend`]: the ops of [`Backend`] over the kernels of this crate.
//!
//! It checks shapes, chooses how rows are dealt out to threads, and nothing else.

use std::sync::{Arc, Mutex};

use tileinfer::backend::{
    Activation, AttentionShape, Backend, ComputeType, Element, HeadScratch, KvRows, QkNorms,
    RopeTable, StepLayout,
};
use tileinfer::kv::KvLayout;
use tileinfer::sampling::{RowSampler, Sampled, sample_rows};
use tileinfer::weights::{Weight, WeightData, WeightPart};
use tileinfer::{Error, Result};

use crate::attention::attention;
use crate::cache::{Kept, Pages, round_vector};
use crate::elementwise::{Activate, Add, Heads, RmsNorm, Round, RowsOf, for_rows};
use crate::linear::int8::{Int8Matrix, PackedInt8, linear_int8};
use crate::linear::{self, Matrix, Packed, linear_packed};
use crate::memory::Aligned;
use crate::pool::Pool;
use crate::simd::Level;
use crate::{Rounding, SharedMut};

/// The CPU as a device.
#[derive(Debug)]
pub struct CpuBackend {
    compute: ComputeType,
    level: Level,
    pool: Arc<Pool>,
    packed: Mutex<(Packed, PackedInt8)>,
}

/// An array `[rows, width]` in f32 words.
#[derive(Debug)]
pub struct CpuTensor {
    element: Element,
    rows: usize,
    width: usize,
    capacity: usize,
    values: Aligned<f32>,
}

/// A weight where the host has it: mapped from its file, usually.
#[derive(Debug, Clone)]
pub struct CpuWeight(Arc<Weight>);

/// A step's layout, its ids resolved, and what was sampled in it.
#[derive(Debug, Default)]
pub struct CpuStep {
    layout: StepLayout,
    sampled: Vec<Sampled>,
}

impl CpuBackend {
    /// A backend with the fastest instruction set of this machine, on `threads` threads.
    pub fn new(compute: ComputeType, threads: usize) -> Self {
        Self::with_pool(compute, Level::best(), Arc::new(Pool::new(threads)))
    }

    /// A backend with a given instruction set, on a pool that others may share.
    pub fn with_pool(compute: ComputeType, level: Level, pool: Arc<Pool>) -> Self {
        CpuBackend {
            compute,
            level,
            pool,
            packed: Mutex::default(),
        }
    }

    /// The instruction set.
    pub fn level(&self) -> Level {
        self.level
    }

    /// The threads.
    pub fn pool(&self) -> &Arc<Pool> {
        &self.pool
    }

    fn rounding(&self, element: Element) -> Rounding {
        match (element, self.compute) {
            (Element::Model, ComputeType::Bf16) => Rounding::Bf16,
            _ => Rounding::None,
        }
    }

    /// Runs the activation over rows of `x` (gate and up, or the one input, beside each other).
    fn activate(&self, out: &mut CpuTensor, x: &CpuTensor, activation: &Activation) -> Result<()> {
        let width = activation.output_width(x.width);
        out.expect(x.rows, width)?;
        let rounding = self.rounding(out.element);
        let shared = SharedMut::new(&mut out.values);
        // Pieces of rows, so that one long row is shared as well.
        const PIECE: usize = 4096;
        let pieces = width.div_ceil(PIECE).max(1);
        for_rows(&self.pool, x.rows * pieces, width.min(PIECE), |items| {
            for item in items {
                let (row, first) = (item / pieces, item % pieces * PIECE);
                let n = PIECE.min(width - first);
                let x = &x.values[row * x.width..(row + 1) * x.width];
                // SAFETY: each piece of each row is one item.
                let out = unsafe { shared.range(row * width + first, n) };
                let up = if x.len() == width {
                    x
                } else {
                    &x[width + first..]
                };
                self.level.dispatch(Activate {
                    out,
                    x: &x[first..],
                    up,
                    activation,
                    rounding,
                });
            }
        });
        Ok(())
    }
}

impl CpuTensor {
    fn expect(&self, rows: usize, width: usize) -> Result<()> {
        if (self.rows, self.width) == (rows, width) {
            return Ok(());
        }
        Err(Error::Bug(format!(
            "an array is {} x {} and should be {rows} x {width}",
            self.rows, self.width
        )))
    }

    fn all(&self) -> &[f32] {
        &self.values[..self.rows * self.width]
    }

    fn all_mut(&mut self) -> &mut [f32] {
        let len = self.rows * self.width;
        &mut self.values[..len]
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.width..(row + 1) * self.width]
    }
}

/// The parts of a weight as a kernel takes them.
enum Matrices<'a> {
    Plain(Vec<Matrix<'a>>),
    Int8(Vec<Int8Matrix<'a>>),
}

impl CpuWeight {
    fn matrices(&self) -> Result<Matrices<'_>> {
        let parts = self.0.parts().iter();
        if self.0.has_int8() {
            Ok(Matrices::Int8(
                parts.map(int8_matrix).collect::<Result<_>>()?,
            ))
        } else {
            Ok(Matrices::Plain(parts.map(matrix).collect::<Result<_>>()?))
        }
    }
}

fn int8_matrix(part: &WeightPart) -> Result<Int8Matrix<'_>> {
    part.data()
        .int8()
        .and_then(|(values, scales)| Int8Matrix::new(values, scales, part.cols()))
        .ok_or_else(|| {
            let (rows, cols) = (part.rows(), part.cols());
            Error::Bug(format!(
                "a part of {rows} x {cols} is not in int8, others of its weight are"
            ))
        })
}

fn matrix(part: &WeightPart) -> Result<Matrix<'_>> {
    let (bytes, element): (&[u8], _) = match part.data() {
        WeightData::Bf16(bytes) => (bytes, linear::Element::Bf16),
        WeightData::F16(bytes) => (bytes, linear::Element::F16),
        WeightData::F32(bytes) => (bytes, linear::Element::F32),
        WeightData::OwnedBf16(values) => (bytes_of(values), linear::Element::Bf16),
        WeightData::OwnedF32(values) => (bytes_of(values), linear::Element::F32),
        WeightData::Int8 { .. } | WeightData::OwnedInt8 { .. } => {
            return Err(Error::Bug("an int8 part among others".to_owned()));
        }
    };
    Matrix::new(bytes, element, part.rows(), part.cols()).ok_or_else(|| {
        Error::Bug(format!(
            "{} bytes for {} x {} {element:?}",
            bytes.len(),
            part.rows(),
            part.cols()
        ))
    })
}

/// Numbers as they lie in memory.
fn bytes_of<T: Copy>(values: &[T]) -> &[u8] {
    // SAFETY: the same memory; used with u16 and f32, which have no padding, and bytes have no alignment.
    unsafe { std::slice::from_raw_parts(values.as_ptr().cast(), size_of_val(values)) }
}

impl Backend for CpuBackend {
    type Tensor = CpuTensor;
    type Weight = CpuWeight;
    type Pages = Pages;
    type Rope = RopeTable;
    type Step = CpuStep;
    type Graph = ();

    fn name(&self) -> String {
        format!(
            "CPU ({}, {} threads)",
            self.level.name(),
            self.pool.threads()
        )
    }

    fn compute_type(&self) -> ComputeType {
        self.compute
    }

    fn alloc(&self, element: Element, capacity: usize, width: usize) -> Result<CpuTensor> {
        let values = Aligned::new(capacity * width, 0.0);
        Ok(CpuTensor {
            element,
            rows: 0,
            width,
            capacity,
            values,
        })
    }

    fn set_rows(&self, tensor: &mut CpuTensor, rows: usize) -> Result<()> {
        if rows > tensor.capacity {
            return Err(Error::Bug(format!(
                "{rows} rows in an array for {}",
                tensor.capacity
            )));
        }
        tensor.rows = rows;
        Ok(())
    }

    fn shape(&self, tensor: &CpuTensor) -> (usize, usize) {
        (tensor.rows, tensor.width)
    }

    fn upload(&self, tensor: &mut CpuTensor, first_row: usize, values: &[f32]) -> Result<()> {
        let (start, rounding) = (first_row * tensor.width, self.rounding(tensor.element));
        let Some(target) = tensor.all_mut().get_mut(start..start + values.len()) else {
            return Err(Error::Bug(format!(
                "{} values from row {first_row} on do not fit",
                values.len()
            )));
        };
        target.copy_from_slice(values);
        self.level.dispatch(Round(target, rounding));
        Ok(())
    }

    fn download(&self, tensor: &CpuTensor) -> Result<Vec<f32>> {
        Ok(tensor.all().to_vec())
    }

    fn load_weight(&self, weight: &Weight) -> Result<CpuWeight> {
        let weight = CpuWeight(Arc::new(weight.clone()));
        weight.matrices()?;
        Ok(weight)
    }

    fn load_rope(&self, table: &RopeTable) -> Result<RopeTable> {
        Ok(table.clone())
    }

    fn alloc_pages(
        &self,
        layout: &KvLayout,
        smoothing: Option<&[f32]>,
        pages: usize,
    ) -> Result<Pages> {
        Pages::new(layout, smoothing, pages)
    }

    fn copy_pages(&self, pages: &mut Pages, copies: &[(u32, u32)]) -> Result<()> {
        pages.copy(copies);
        Ok(())
    }

    fn read_slot(
        &self,
        pages: &Pages,
        page: usize,
        kv_head: usize,
        offset: usize,
    ) -> Result<(Vec<f32>, Vec<f32>)> {
        Ok(pages.read(page, kv_head, offset))
    }

    fn alloc_step(&self, _rows: usize, _spans: usize, _table_width: usize) -> Result<CpuStep> {
        Ok(CpuStep::default())
    }

    fn prepare(
        &self,
        step: &mut CpuStep,
        layout: &StepLayout,
        previous: Option<&CpuStep>,
    ) -> Result<()> {
        step.layout.clone_from(layout);
        let sampled = previous.map_or(&[][..], |step| &step.sampled);
        step.layout.take_previous(sampled)?;
        step.sampled.clear();
        Ok(())
    }

    fn take_drafts(&self, step: &mut CpuStep, from: &CpuStep) -> Result<()> {
        step.layout.take_drafts(&from.sampled)
    }

    fn embed(&self, out: &mut CpuTensor, table: &CpuWeight, step: &CpuStep) -> Result<()> {
        let (weight, ids) = (&*table.0, &step.layout.ids);
        out.expect(ids.len(), weight.cols())?;
        if let Some(&id) = ids.iter().find(|id| **id as usize >= weight.rows()) {
            return Err(Error::Bug(format!(
                "token {id} of a vocabulary of {}",
                weight.rows()
            )));
        }
        let (width, rounding) = (out.width, self.rounding(out.element));
        let shared = SharedMut::new(&mut out.values);
        for_rows(&self.pool, ids.len(), width, |rows| {
            for row in rows {
                // SAFETY: each row is in one range.
                let out = unsafe { shared.range(row * width, width) };
                weight.row_f32(ids[row] as usize, out);
                self.level.dispatch(Round(out, rounding));
            }
        });
        Ok(())
    }

    fn rms_norm(
        &self,
        out: &mut CpuTensor,
        x: &CpuTensor,
        weight: &CpuTensor,
        eps: f32,
    ) -> Result<()> {
        weight.expect(1, x.width)?;
        out.expect(x.rows, x.width)?;
        let rounding = self.rounding(out.element);
        let (out, rows, weight) = (SharedMut::new(&mut out.values), x.rows, weight.row(0));
        RmsNorm {
            out,
            x: RowsOf::Input(x.all()),
            weight,
            eps,
            rounding,
        }
        .run(self.level, &self.pool, rows);
        Ok(())
    }

    fn add(&self, x: &mut CpuTensor, delta: &CpuTensor) -> Result<()> {
        x.expect(delta.rows, delta.width)?;
        let (width, rounding) = (x.width, self.rounding(x.element));
        let shared = SharedMut::new(&mut x.values);
        for_rows(&self.pool, delta.rows, width, |rows| {
            let (first, len) = (rows.start * width, rows.len() * width);
            // SAFETY: each row is in one range.
            let x = unsafe { shared.range(first, len) };
            self.level.dispatch(Add {
                x,
                delta: &delta.values[first..first + len],
                rounding,
            });
        });
        Ok(())
    }

    fn add_rms_norm(
        &self,
        x: &mut CpuTensor,
        out: &mut CpuTensor,
        delta: &CpuTensor,
        weight: &CpuTensor,
        eps: f32,
    ) -> Result<()> {
        weight.expect(1, x.width)?;
        out.expect(x.rows, x.width)?;
        x.expect(delta.rows, delta.width)?;
        let (rows, rounding) = (x.rows, self.rounding(out.element));
        let x = RowsOf::Sum(
            SharedMut::new(&mut x.values),
            delta.all(),
            self.rounding(x.element),
        );
        let (out, weight) = (SharedMut::new(&mut out.values), weight.row(0));
        RmsNorm {
            out,
            x,
            weight,
            eps,
            rounding,
        }
        .run(self.level, &self.pool, rows);
        Ok(())
    }

    fn linear(
        &self,
        out: &mut CpuTensor,
        weight: &CpuWeight,
        bias: Option<&CpuTensor>,
        x: &CpuTensor,
    ) -> Result<()> {
        let (n, k) = (weight.0.rows(), weight.0.cols());
        x.expect(x.rows, k)?;
        out.expect(x.rows, n)?;
        if let Some(bias) = bias {
            bias.expect(1, n)?;
        }
        let rounding = self.rounding(out.element);
        let bias = bias.map(|bias| bias.row(0));
        let (level, pool, rows) = (self.level, &self.pool, x.rows);
        let (plain, int8) = &mut *self.packed.lock().unwrap_or_else(|e| e.into_inner());
        match weight.matrices()? {
            Matrices::Plain(parts) => {
                plain.pack(
                    level,
                    pool,
                    x.all(),
                    rows,
                    k,
                    self.rounding(x.element),
                    &parts,
                );
                linear_packed(level, pool, out.all_mut(), plain, &parts, bias, rounding);
            }
            Matrices::Int8(parts) => {
                int8.pack(level, pool, x.all(), rows, k);
                linear_int8(level, pool, out.all_mut(), int8, &parts, bias, rounding);
            }
        }
        Ok(())
    }

    fn head_norm(&self, x: &mut CpuTensor, weight: &CpuTensor, eps: f32) -> Result<()> {
        let head_dim = weight.width;
        weight.expect(1, head_dim)?;
        let (rows, width, rounding) = (x.rows, x.width, self.rounding(x.element));
        let norm = Some((weight.row(0), eps));
        let shared = SharedMut::new(&mut x.values);
        for_rows(&self.pool, rows, width, |rows| {
            // SAFETY: each row is in one range.
            let x = unsafe { shared.range(rows.start * width, rows.len() * width) };
            self.level.dispatch(Heads {
                x,
                head_dim,
                norm,
                rope: None,
                rounding,
            });
        });
        Ok(())
    }

    fn rope(
        &self,
        x: &mut CpuTensor,
        rope: &RopeTable,
        step: &CpuStep,
        queries: bool,
    ) -> Result<()> {
        let (width, rounding) = (x.width, self.rounding(x.element));
        x.expect(step.layout.rows(), width)?;
        let positions = checked_positions(rope, step)?;
        let shared = SharedMut::new(&mut x.values);
        for_rows(&self.pool, positions.len(), width, |rows| {
            for row in rows {
                // SAFETY: each row is in one range.
                let x = unsafe { shared.range(row * width, width) };
                let rope = Some((rope, positions[row] as usize, queries));
                self.level.dispatch(Heads {
                    x,
                    head_dim: 2 * rope.map_or(0, |r| r.0.pairs),
                    norm: None,
                    rope,
                    rounding,
                });
            }
        });
        Ok(())
    }

    fn store_kv(&self, pages: &mut Pages, rows: &KvRows<CpuTensor>, step: &CpuStep) -> Result<()> {
        let width = pages.geometry.kv_heads * pages.geometry.head_dim;
        rows.keys.expect(step.layout.rows(), width)?;
        rows.values.expect(step.layout.rows(), width)?;
        let stores = Stores::new(self.level, pages, step)?;
        for_rows(&self.pool, step.layout.rows(), width, |range| {
            for row in range {
                // SAFETY: each row is in one range.
                unsafe { stores.row(row, rows.keys.row(row), rows.values.row(row)) };
            }
        });
        Ok(())
    }

    fn attention(
        &self,
        out: &mut CpuTensor,
        queries: &CpuTensor,
        pages: &Pages,
        step: &CpuStep,
        shape: &AttentionShape,
    ) -> Result<()> {
        let width = shape.heads * shape.head_dim;
        queries.expect(step.layout.rows(), width)?;
        out.expect(step.layout.rows(), width)?;
        let rounding = self.rounding(out.element);
        let layout = &step.layout;
        attention(
            self.level,
            &self.pool,
            out.all_mut(),
            queries.all(),
            pages,
            layout,
            shape,
            rounding,
        );
        Ok(())
    }

    fn activation(
        &self,
        out: &mut CpuTensor,
        x: &CpuTensor,
        activation: &Activation,
    ) -> Result<()> {
        self.activate(out, x, activation)
    }

    fn copy_columns(
        &self,
        out: &mut CpuTensor,
        to: usize,
        x: &CpuTensor,
        from: usize,
        columns: usize,
    ) -> Result<()> {
        if out.rows != x.rows || to + columns > out.width || from + columns > x.width {
            return Err(Error::Bug(format!(
                "columns {from}.. of {} to {to}.. of {}",
                x.width, out.width
            )));
        }
        let (width, rounding) = (out.width, self.rounding(out.element));
        for row in 0..x.rows {
            let out = &mut out.values[row * width + to..][..columns];
            out.copy_from_slice(&x.row(row)[from..from + columns]);
            self.level.dispatch(Round(out, rounding));
        }
        Ok(())
    }

    fn gather_wanted(&self, out: &mut CpuTensor, x: &CpuTensor, step: &CpuStep) -> Result<()> {
        let (wanted, width) = (&step.layout.wanted, x.width);
        out.expect(wanted.len(), width)?;
        let rounding = self.rounding(out.element);
        for (i, &row) in wanted.iter().enumerate() {
            let out = &mut out.values[i * width..(i + 1) * width];
            out.copy_from_slice(x.row(row as usize));
            self.level.dispatch(Round(out, rounding));
        }
        Ok(())
    }

    fn sample(
        &self,
        step: &mut CpuStep,
        logits: &CpuTensor,
        rows: &[Option<RowSampler>],
    ) -> Result<()> {
        step.sampled = sample_rows(rows, (0..logits.rows).map(|row| logits.row(row)))?;
        Ok(())
    }

    fn read_samples(&self, step: &CpuStep) -> Result<Vec<Sampled>> {
        Ok(step.sampled.clone())
    }

    fn qk_norm_rope_store(
        &self,
        queries: &mut CpuTensor,
        pages: &mut Pages,
        _scratch: &mut HeadScratch<CpuTensor>,
        qkv: &CpuTensor,
        norms: QkNorms<'_, Self>,
        rope: Option<&RopeTable>,
        step: &CpuStep,
        shape: &AttentionShape,
    ) -> Result<()> {
        let &AttentionShape {
            heads,
            kv_heads,
            head_dim,
            ..
        } = shape;
        let (q_width, kv_width) = (heads * head_dim, kv_heads * head_dim);
        let rows = step.layout.rows();
        queries.expect(rows, q_width)?;
        qkv.expect(rows, q_width + 2 * kv_width)?;
        for weight in [norms.query, norms.key].into_iter().flatten() {
            weight.expect(1, head_dim)?;
        }
        if let Some(rope) = rope {
            checked_positions(rope, step)?;
        }
        let rounding = self.rounding(Element::Model);
        let stores = Stores::new(self.level, pages, step)?;
        let kept = stores.rounding();
        let out = SharedMut::new(&mut queries.values);
        for_rows(&self.pool, rows, qkv.width, |range| {
            let (mut keys, mut values) = (vec![0.0; kv_width], vec![0.0; kv_width]);
            for row in range {
                let position = step.layout.positions[row] as usize;
                let (q, kv) = qkv.row(row).split_at(q_width);
                let (k, v) = kv.split_at(kv_width);
                // SAFETY: each row is in one range.
                let x = unsafe { out.range(row * q_width, q_width) };
                x.copy_from_slice(q);
                let norm = norms.query.map(|weight| (weight.row(0), norms.eps));
                let turn = rope.map(|rope| (rope, position, true));
                self.level.dispatch(Heads {
                    x,
                    head_dim,
                    norm,
                    rope: turn,
                    rounding,
                });
                keys.copy_from_slice(k);
                let norm = norms.key.map(|weight| (weight.row(0), norms.eps));
                let turn = rope.map(|rope| (rope, position, false));
                self.level.dispatch(Heads {
                    x: &mut keys,
                    head_dim,
                    norm,
                    rope: turn,
                    rounding: kept,
                });
                values.copy_from_slice(v);
                self.level.dispatch(Round(&mut values, kept));
                // SAFETY: each row is in one range.
                unsafe { stores.row(row, &keys, &values) };
            }
        });
        Ok(())
    }
}

/// The positions of a step, all of which the table covers.
fn checked_positions<'a>(rope: &RopeTable, step: &'a CpuStep) -> Result<&'a [u32]> {
    let positions = &step.layout.positions;
    match positions
        .iter()
        .find(|position| **position as usize >= rope.positions())
    {
        Some(position) => Err(Error::Bug(format!(
            "position {position} and RoPE for {}",
            rope.positions()
        ))),
        None => Ok(positions),
    }
}

/// The slots of a step's rows in a layer's pages.
struct Stores<'a> {
    level: Level,
    geometry: crate::cache::Geometry,
    keys: SharedMut<'a, u8>,
    values: SharedMut<'a, u8>,
    key_scales: SharedMut<'a, f32>,
    value_scales: SharedMut<'a, f32>,
    factors: &'a [f32],
    slots: &'a [u32],
}

impl<'a> Stores<'a> {
    fn new(level: Level, pages: &'a mut Pages, step: &'a CpuStep) -> Result<Self> {
        let slots = &step.layout.slots[..];
        if slots.len() != step.layout.rows() {
            return Err(Error::Bug(format!(
                "{} slots for {} rows",
                slots.len(),
                step.layout.rows()
            )));
        }
        Ok(Stores {
            level,
            geometry: pages.geometry,
            keys: SharedMut::new(&mut pages.keys),
            values: SharedMut::new(&mut pages.values),
            key_scales: SharedMut::new(&mut pages.key_scales),
            value_scales: SharedMut::new(&mut pages.value_scales),
            factors: &pages.factors,
            slots,
        })
    }

    /// How what is written has to be rounded before; integers are made on the way.
    fn rounding(&self) -> Rounding {
        match self.geometry.kind {
            Kept::Bf16 => Rounding::Bf16,
            Kept::F32 | Kept::Int8 => Rounding::None,
        }
    }

    /// Writes a row to its slot.
    ///
    /// # Safety
    /// Each row once, from one thread; slots of rows differ.
    #[inline(always)]
    unsafe fn row(&self, row: usize, key: &[f32], value: &[f32]) {
        let Stores {
            geometry,
            keys,
            values,
            slots,
            ..
        } = *self;
        let (page, offset) = (
            slots[row] as usize / geometry.page_size,
            slots[row] as usize % geometry.page_size,
        );
        let int8 = geometry.kind == Kept::Int8;
        let n = if int8 { geometry.head_dim } else { 0 };
        let (mut divided, mut rounded) = (vec![0.0; n], vec![0; 2 * n]);
        let (rounded_key, rounded_value) = rounded.split_at_mut(n);
        for head in 0..geometry.kv_heads {
            let dims = head * geometry.head_dim..(head + 1) * geometry.head_dim;
            let slot = geometry.slot(page, head, offset);
            let (key, value) = (&key[dims.clone()], &value[dims.clone()]);
            if !int8 {
                // SAFETY: the caller's promise.
                unsafe { geometry.write(keys, values, slot, key, value) };
                continue;
            }
            let factors = (!self.factors.is_empty()).then(|| &self.factors[dims]);
            let key_scale = round_vector(self.level, key, factors, &mut divided, rounded_key);
            let value_scale = round_vector(self.level, value, None, &mut divided, rounded_value);
            let at = geometry.scale(page, head, offset);
            // SAFETY: the caller's promise.
            unsafe {
                self.key_scales.range(at, 1)[0] = key_scale;
                self.value_scales.range(at, 1)[0] = value_scale;
                geometry.write_int8(keys, values, slot, rounded_key, rounded_value);
            }
        }
    }
}
