//! The suite that every backend passes: each op against the reference, at the sizes that bite, and the rule
//! about sums, that a row comes out the same to the bit whatever rows stand beside it.

use std::sync::Arc;

use super::{Numbers, assert_close, weight};
use crate::backend::{
    Activation, AttentionShape, Backend, ComputeType, Element, HeadScratch, KvRows, Mask, QkNorms,
    ReferenceBackend, RopeTable, StepLayout, Xielu,
};
use crate::kv::{KvElement, KvLayout};
use crate::sampling::{Distribution, Draw, RowSampler, SamplingParams, TokenCounts, TokenMask};
use crate::weights::Weight;

/// Rows that a step is tried with: one, around sizes of tiles, and a chunk.
const ROWS: [usize; 7] = [1, 2, 3, 7, 8, 17, 33];

/// Runs the suite with backends that `make` makes.
pub fn conformance<B: Backend>(make: &dyn Fn(ComputeType) -> B) {
    for kind in [ComputeType::F32, ComputeType::Bf16] {
        let suite = Suite {
            backend: make(kind),
            reference: ReferenceBackend::new(kind),
            kind,
        };
        suite.moves();
        suite.norms();
        suite.linears(false);
        suite.residual_layers(false);
        suite.linears(true);
        suite.residual_layers(true);
        suite.activations();
        suite.rotations();
        suite.attention();
        suite.attention_inputs();
        suite.pages();
        suite.samples();
    }
}

/// An op from one tensor to another.
type Op<'a, B> = dyn Fn(&B, &mut <B as Backend>::Tensor, &<B as Backend>::Tensor) + 'a;

struct Suite<B> {
    backend: B,
    reference: ReferenceBackend,
    kind: ComputeType,
}

/// Heads, kv heads and values a head that attention is checked with.
pub const ATTENTION_HEADS: [(usize, usize, usize); 6] = [
    (1, 1, 8),
    (3, 1, 24),
    (8, 2, 16),
    (4, 4, 64),
    (9, 3, 64),
    (4, 1, 128),
];

/// Widths that norms are checked with.
pub const NORM_WIDTHS: [usize; 8] = [1, 8, 24, 60, 64, 128, 576, 1000];

/// Rows and columns of the weights of layers that are checked together with the norm after them: a backend may cut the
/// columns into splits (the GPU's into 3, 8, 2, 3 and 8).
pub const RESIDUAL_LAYERS: [(usize, usize); 5] =
    [(576, 1536), (256, 2048), (64, 520), (40, 1030), (130, 2048)];

/// Rows of steps that they are checked with.
pub const RESIDUAL_ROWS: [usize; 6] = [1, 3, 16, 33, 130, 300];

/// A step layout whose spans have the given (start, rows), with pages scattered on purpose.
pub(crate) fn layout(spans: &[(usize, usize)], page_size: usize, pages: usize) -> StepLayout {
    let width = spans
        .iter()
        .map(|(start, rows)| (start + rows).div_ceil(page_size))
        .max()
        .unwrap_or(0);
    let mut layout = StepLayout {
        span_rows: vec![0],
        table_width: width,
        ..StepLayout::default()
    };
    let mut next = 0;
    for &(start, rows) in spans {
        let needed = (start + rows).div_ceil(page_size);
        // 7 is prime to the number of pages, so this is a permutation.
        let table: Vec<u32> = (next..next + needed)
            .map(|i| (i * 7 % pages) as u32)
            .collect();
        next += needed;
        assert!(next <= pages && !pages.is_multiple_of(7));
        for position in start..start + rows {
            layout.ids.push((position * 3 % 11) as u32);
            layout.positions.push(position as u32);
            let slot = table[position / page_size] as usize * page_size + position % page_size;
            layout.slots.push(slot as u32);
        }
        layout.tables.extend(&table);
        layout.tables.extend(std::iter::repeat_n(0, width - needed));
        layout.first_pages.push(0);
        layout.span_rows.push(layout.positions.len() as u32);
        layout.wanted.push(layout.positions.len() as u32 - 1);
    }
    layout
}

impl<B: Backend> Suite<B> {
    fn seed(&self, salt: u64) -> Numbers {
        Numbers::new(salt)
    }

    /// How far two correct results may be apart: a sum in another order, then one rounding.
    fn tolerance(&self) -> f32 {
        match self.kind {
            ComputeType::F32 => 2e-6,
            ComputeType::Bf16 => 1.0 / 128.0,
        }
    }

    fn tensor<C: Backend>(&self, on: &C, rows: usize, width: usize, values: &[f32]) -> C::Tensor {
        self.tensor_of(on, Element::Model, rows, width, values)
    }

    fn tensor_of<C: Backend>(
        &self,
        on: &C,
        element: Element,
        rows: usize,
        width: usize,
        values: &[f32],
    ) -> C::Tensor {
        let mut tensor = self.blank(on, element, rows, width);
        on.upload(&mut tensor, 0, values).unwrap();
        tensor
    }

    /// An output, poisoned: what an op leaves unwritten shows.
    fn blank<C: Backend>(&self, on: &C, element: Element, rows: usize, width: usize) -> C::Tensor {
        let mut tensor = on.alloc(element, rows, width).unwrap();
        on.set_rows(&mut tensor, rows).unwrap();
        on.upload(&mut tensor, 0, &vec![f32::NAN; rows * width])
            .unwrap();
        tensor
    }

    fn step<C: Backend>(&self, on: &C, layout: &StepLayout) -> C::Step {
        let mut step = on
            .alloc_step(layout.rows(), layout.spans(), layout.table_width)
            .unwrap();
        on.prepare(&mut step, layout, None).unwrap();
        step
    }

    /// Runs `op` with all of `x` on both, compares, and then each row alone: the same bits.
    fn rows(
        &self,
        what: &str,
        x: &[f32],
        width: usize,
        out_width: usize,
        [from, to]: [Element; 2],
        op: &Op<'_, B>,
        reference: &Op<'_, ReferenceBackend>,
    ) {
        let rows = x.len() / width;
        let run = |rows: usize, x: &[f32]| {
            let input = self.tensor_of(&self.backend, from, rows, width, x);
            let mut out = self.blank(&self.backend, to, rows, out_width);
            op(&self.backend, &mut out, &input);
            self.backend.download(&out).unwrap()
        };
        let found = run(rows, x);
        let input = self.tensor_of(&self.reference, from, rows, width, x);
        let mut out = self.blank(&self.reference, to, rows, out_width);
        reference(&self.reference, &mut out, &input);
        let expected = self.reference.download(&out).unwrap();
        assert_close(what, &found, &expected, self.tolerance());
        for row in 0..rows {
            let alone = run(1, &x[row * width..(row + 1) * width]);
            let among = &found[row * out_width..(row + 1) * out_width];
            assert_eq!(
                bits(&alone),
                bits(among),
                "{what}: row {row} of {rows} differs from the row alone"
            );
        }
    }

    fn moves(&self) {
        for (rows, width) in [(1, 1), (3, 24), (17, 60), (33, 128)] {
            let mut numbers = self.seed(1);
            let values = numbers.normals(rows * width, 1.0, self.kind);
            let tensor = self.tensor(&self.backend, rows, width, &values);
            assert_eq!(self.backend.shape(&tensor), (rows, width));
            assert_eq!(
                bits(&self.backend.download(&tensor).unwrap()),
                bits(&values)
            );

            let mut out = self.tensor(
                &self.backend,
                rows,
                width + 5,
                &vec![0.5; rows * (width + 5)],
            );
            self.backend
                .copy_columns(&mut out, 3, &tensor, 0, width)
                .unwrap();
            let out = self.backend.download(&out).unwrap();
            for row in 0..rows {
                let row_out = &out[row * (width + 5)..(row + 1) * (width + 5)];
                assert_eq!(
                    &row_out[3..3 + width],
                    &values[row * width..(row + 1) * width]
                );
                assert!(
                    row_out[..3]
                        .iter()
                        .chain(&row_out[3 + width..])
                        .all(|&v| v == 0.5)
                );
            }

            let layout = layout(&[(0, rows)], 4, 16);
            let step = self.step(&self.backend, &layout);
            let mut wanted = self.blank(&self.backend, Element::Model, 1, width);
            self.backend
                .gather_wanted(&mut wanted, &tensor, &step)
                .unwrap();
            assert_eq!(
                self.backend.download(&wanted).unwrap(),
                values[(rows - 1) * width..]
            );

            let table = numbers.normals(11 * width, 1.0, ComputeType::Bf16);
            let host = weight(11, width, &table, ComputeType::Bf16);
            let table_on = self.backend.load_weight(&host).unwrap();
            let mut out = self.blank(&self.backend, Element::Model, rows, width);
            self.backend.embed(&mut out, &table_on, &step).unwrap();
            let out = self.backend.download(&out).unwrap();
            for (row, &id) in layout.ids.iter().enumerate() {
                let id = id as usize;
                assert_eq!(
                    out[row * width..(row + 1) * width],
                    table[id * width..(id + 1) * width]
                );
            }
        }
    }

    fn norms(&self) {
        for width in NORM_WIDTHS {
            for rows in ROWS {
                let mut numbers = self.seed(width as u64);
                let x = numbers.normals(rows * width, 2.0, self.kind);
                let delta = numbers.normals(rows * width, 0.5, self.kind);
                let weight = numbers.normals(width, 1.0, self.kind);
                let (on, on_reference) = (
                    self.backend.load_vector(&weight).unwrap(),
                    self.reference.load_vector(&weight).unwrap(),
                );
                self.rows(
                    &format!("rms_norm {rows} x {width}"),
                    &x,
                    width,
                    width,
                    [Element::Model; 2],
                    &|b, out, x| b.rms_norm(out, x, &on, 1e-5).unwrap(),
                    &|b, out, x| b.rms_norm(out, x, &on_reference, 1e-5).unwrap(),
                );

                // The fused residual update gives what the two ops give, on an f32 stream.
                let f32s = |values: &[f32]| {
                    let mut tensor = self.blank(&self.backend, Element::F32, rows, width);
                    self.backend.upload(&mut tensor, 0, values).unwrap();
                    tensor
                };
                let x: Vec<f32> = x.iter().map(|x| x * 1.001).collect();
                let (mut stream, delta_on) = (f32s(&x), f32s(&delta));
                let mut fused = self.blank(&self.backend, Element::Model, rows, width);
                self.backend
                    .add_rms_norm(&mut stream, &mut fused, &delta_on, &on, 1e-5)
                    .unwrap();
                let sums: Vec<f32> = x.iter().zip(&delta).map(|(x, d)| x + d).collect();
                assert_eq!(bits(&self.backend.download(&stream).unwrap()), bits(&sums));
                let mut plain = self.blank(&self.backend, Element::Model, rows, width);
                self.backend
                    .rms_norm(&mut plain, &f32s(&sums), &on, 1e-5)
                    .unwrap();
                let (fused, plain) = (
                    self.backend.download(&fused).unwrap(),
                    self.backend.download(&plain).unwrap(),
                );
                assert_eq!(bits(&fused), bits(&plain), "add_rms_norm {rows} x {width}");
            }
        }
    }

    /// A layer, the residual update and the norm in one give what they give one after the other.
    fn residual_layers(&self, int8: bool) {
        for (n, k) in RESIDUAL_LAYERS {
            for rows in RESIDUAL_ROWS {
                let mut numbers = self.seed((n * 1000 + k) as u64);
                let input = numbers.normals(rows * k, 1.0, self.kind);
                let before = numbers.normals(rows * n, 2.0, self.kind);
                let weights = numbers.normals(n * k, 1.0 / (k as f32).sqrt(), self.kind);
                let vector = |values: &[f32]| self.backend.load_vector(values).unwrap();
                let bias = vector(&numbers.normals(n, 1.0, self.kind));
                let norm = vector(&numbers.normals(n, 1.0, self.kind));
                let host = weight(n, k, &weights, self.kind);
                let host = if int8 { host.to_int8() } else { host };
                for bias in [None, Some(&bias)] {
                    let b = &self.backend;
                    let layer = (&b.load_weight(&host).unwrap(), bias);
                    let y = self.tensor(b, rows, k, &input);
                    let run = |fused: bool| {
                        let mut x = self.blank(b, Element::F32, rows, n);
                        b.upload(&mut x, 0, &before).unwrap();
                        let mut delta = self.blank(b, Element::F32, rows, n);
                        let mut out = self.blank(b, Element::Model, rows, n);
                        if fused {
                            b.linear_add_rms_norm(
                                &mut x, &mut out, &mut delta, layer, &y, &norm, 1e-5,
                            )
                            .unwrap();
                        } else {
                            b.linear(&mut delta, layer.0, layer.1, &y).unwrap();
                            b.add(&mut x, &delta).unwrap();
                            b.rms_norm(&mut out, &x, &norm, 1e-5).unwrap();
                        }
                        [x, out].map(|tensor| bits(&b.download(&tensor).unwrap()))
                    };
                    assert!(
                        run(true) == run(false),
                        "a layer of {rows} x {k} -> {n}, bias {}, int8 {int8}, and what follows it",
                        bias.is_some()
                    );
                }
            }
        }
    }

    /// Of the compute type, or in int8.
    fn linears(&self, int8: bool) {
        let loaded = |n: usize, k: usize, weights: &[f32]| {
            let host = weight(n, k, weights, self.kind);
            if int8 { host.to_int8() } else { host }
        };
        let shapes = [
            (1, 1),
            (5, 3),
            (16, 16),
            (17, 60),
            (100, 60),
            (60, 100),
            (33, 129),
            (256, 576),
            (31, 1030),
        ];
        for (n, k) in shapes {
            for rows in ROWS {
                let mut numbers = self.seed((n * 1000 + k) as u64);
                let x = numbers.normals(rows * k, 1.0, self.kind);
                let weights = numbers.normals(n * k, 1.0 / (k as f32).sqrt(), self.kind);
                let host = loaded(n, k, &weights);
                let bias = numbers.normals(n, 1.0, self.kind);
                let on = (
                    self.backend.load_weight(&host).unwrap(),
                    self.backend.load_vector(&bias).unwrap(),
                );
                let judge = (
                    self.reference.load_weight(&host).unwrap(),
                    self.reference.load_vector(&bias).unwrap(),
                );
                for (element, biased) in [
                    (Element::Model, false),
                    (Element::Model, true),
                    (Element::F32, false),
                ] {
                    self.rows(
                        &format!(
                            "linear {rows} x {k} -> {n}, int8 {int8}, bias {biased}, {element:?}"
                        ),
                        &x,
                        k,
                        n,
                        [Element::Model, element],
                        &|b, out, x| b.linear(out, &on.0, biased.then_some(&on.1), x).unwrap(),
                        &|b, out, x| {
                            b.linear(out, &judge.0, biased.then_some(&judge.1), x)
                                .unwrap();
                        },
                    );
                }
                if n % 2 == 0 {
                    let run = |fused: bool| {
                        let input = self.tensor(&self.backend, rows, k, &x);
                        let mut wide = self.blank(&self.backend, Element::F32, rows, n);
                        let mut out = self.blank(&self.backend, Element::Model, rows, n / 2);
                        let activation = Activation::SiluGated;
                        if fused {
                            self.backend
                                .linear_activation(
                                    &mut out,
                                    &mut wide,
                                    &on.0,
                                    None,
                                    &input,
                                    &activation,
                                )
                                .unwrap();
                        } else {
                            self.backend.linear(&mut wide, &on.0, None, &input).unwrap();
                            self.backend
                                .activation(&mut out, &wide, &activation)
                                .unwrap();
                        }
                        self.backend.download(&out).unwrap()
                    };
                    assert_eq!(
                        bits(&run(true)),
                        bits(&run(false)),
                        "linear_activation {rows} x {k} -> {n}, int8 {int8}"
                    );
                }
            }
        }
        // A weight of several parts is their rows one after the other.
        let mut numbers = self.seed(5);
        let parts: Vec<Vec<f32>> = [3, 1, 16]
            .iter()
            .map(|n| numbers.normals(n * 24, 0.2, self.kind))
            .collect();
        let whole = loaded(20, 24, &parts.concat());
        let joined = Weight::new(
            parts
                .iter()
                .flat_map(|part| loaded(part.len() / 24, 24, part).parts().to_vec())
                .collect(),
        )
        .unwrap();
        let x = numbers.normals(2 * 24, 1.0, self.kind);
        let run = |weight: &Weight| {
            let weight = self.backend.load_weight(weight).unwrap();
            let mut out = self.blank(&self.backend, Element::Model, 2, 20);
            self.backend
                .linear(
                    &mut out,
                    &weight,
                    None,
                    &self.tensor(&self.backend, 2, 24, &x),
                )
                .unwrap();
            self.backend.download(&out).unwrap()
        };
        assert_eq!(bits(&run(&whole)), bits(&run(&joined)), "a weight in parts");

        if int8 {
            // What no scale can save: a number that is none shows, rows of zeros are zeros.
            let x: Vec<f32> = (0..4 * 24)
                .map(|i| match i {
                    30 => f32::NAN,
                    60 => f32::INFINITY,
                    72.. => 0.0,
                    _ => 1.0,
                })
                .collect();
            let on = self.backend.load_weight(&whole).unwrap();
            let mut out = self.blank(&self.backend, Element::F32, 4, 20);
            let x = self.tensor(&self.backend, 4, 24, &x);
            self.backend.linear(&mut out, &on, None, &x).unwrap();
            let out = self.backend.download(&out).unwrap();
            assert!(out[..20].iter().all(|y| y.is_finite()));
            assert!(out[20..60].iter().all(|y| y.is_nan()), "{out:?}");
            assert!(out[60..].iter().all(|&y| y == 0.0));
        }
    }

    fn activations(&self) {
        let xielu = Xielu {
            alpha_p: 0.8,
            alpha_n: 1.3,
            beta: 0.5,
            eps: -1e-6,
        };
        for width in [2, 30, 64, 200] {
            for activation in [Activation::SiluGated, Activation::Xielu(xielu)] {
                for rows in [1, 3, 17] {
                    let mut x =
                        self.seed(width as u64)
                            .normals(rows * width, 4.0, ComputeType::F32);
                    x[0] = 0.0;
                    x[1] = -90.0;
                    self.rows(
                        &format!("{activation:?} {rows} x {width}"),
                        &x,
                        width,
                        activation.output_width(width),
                        [Element::F32, Element::Model],
                        &|b, out, x| b.activation(out, x, &activation).unwrap(),
                        &|b, out, x| b.activation(out, x, &activation).unwrap(),
                    );
                }
            }
        }
    }

    fn rope(&self, head_dim: usize, positions: usize) -> RopeTable {
        let pairs = head_dim / 2;
        let angle = |i: usize| (i / pairs) as f32 * 0.7f32.powi((i % pairs) as i32 / 3);
        let scale = (0..positions)
            .map(|p| self.kind.round(1.0 + 0.1 * (p / 8) as f32))
            .collect();
        RopeTable {
            pairs,
            cos: (0..positions * pairs)
                .map(|i| self.kind.round(angle(i).cos()))
                .collect(),
            sin: (0..positions * pairs)
                .map(|i| self.kind.round(angle(i).sin()))
                .collect(),
            query_scale: Some(scale),
        }
    }

    fn rotations(&self) {
        for (heads, head_dim) in [(1, 2), (3, 8), (2, 24), (9, 64), (2, 128)] {
            let width = heads * head_dim;
            let table = self.rope(head_dim, 40);
            let layout = layout(&[(5, 3), (0, 17)], 4, 16);
            let x = self.seed(width as u64).normals(20 * width, 1.0, self.kind);
            let weight = self.seed(9).normals(head_dim, 1.0, self.kind);
            for queries in [false, true] {
                let found = {
                    let mut x = self.tensor(&self.backend, 20, width, &x);
                    let weight = self.backend.load_vector(&weight).unwrap();
                    self.backend.head_norm(&mut x, &weight, 1e-6).unwrap();
                    let step = self.step(&self.backend, &layout);
                    self.backend
                        .rope(
                            &mut x,
                            &self.backend.load_rope(&table).unwrap(),
                            &step,
                            queries,
                        )
                        .unwrap();
                    self.backend.download(&x).unwrap()
                };
                let expected = {
                    let mut x = self.tensor(&self.reference, 20, width, &x);
                    let weight = self.reference.load_vector(&weight).unwrap();
                    self.reference.head_norm(&mut x, &weight, 1e-6).unwrap();
                    let step = self.step(&self.reference, &layout);
                    self.reference.rope(&mut x, &table, &step, queries).unwrap();
                    self.reference.download(&x).unwrap()
                };
                assert_close(
                    &format!("rope {heads} x {head_dim}"),
                    &found,
                    &expected,
                    self.tolerance(),
                );
            }
        }
    }

    /// How a cache can be kept.
    fn elements(&self) -> [KvElement; 2] {
        [KvElement::Compute(self.kind), KvElement::Int8]
    }

    /// Zeroed pages of a layer, smoothed if they are int8 and have several heads.
    fn cache<C: Backend>(&self, on: &C, kv: &KvLayout, pages: usize) -> C::Pages {
        let smoothed = kv.element == KvElement::Int8 && kv.kv_heads > 1;
        let mut numbers = self.seed(31);
        let factors: Vec<f32> = (0..kv.kv_heads * kv.head_dim)
            .map(|_| numbers.normal(1.0).exp())
            .collect();
        on.alloc_pages(kv, smoothed.then_some(&factors), pages)
            .unwrap()
    }

    /// Pages that hold the keys and values of all positions of every span but the rows of the step.
    fn fill<C: Backend>(
        &self,
        on: &C,
        kv: &KvLayout,
        spans: &[(usize, usize)],
        pages: usize,
    ) -> C::Pages {
        let mut store = self.cache(on, kv, pages);
        let all: Vec<_> = spans
            .iter()
            .map(|&(start, rows)| (0, start + rows))
            .collect();
        let layout = layout(&all, kv.page_size, pages);
        let width = kv.kv_heads * kv.head_dim;
        let mut numbers = self.seed(77);
        let keys = numbers.normals(layout.rows() * width, 1.0, self.kind);
        let values = numbers.normals(layout.rows() * width, 1.0, self.kind);
        let rows = KvRows {
            keys: self.tensor(on, layout.rows(), width, &keys),
            values: self.tensor(on, layout.rows(), width, &values),
        };
        on.store_kv(&mut store, &rows, &self.step(on, &layout))
            .unwrap();
        let mut judge = self.cache(&self.reference, kv, pages);
        if kv.element == KvElement::Int8 {
            let rows = KvRows {
                keys: self.tensor(&self.reference, layout.rows(), width, &keys),
                values: self.tensor(&self.reference, layout.rows(), width, &values),
            };
            let step = self.step(&self.reference, &layout);
            self.reference.store_kv(&mut judge, &rows, &step).unwrap();
        }
        for (i, &slot) in layout.slots.iter().enumerate().step_by(5) {
            let (page, offset) = (slot as usize / kv.page_size, slot as usize % kv.page_size);
            let head = i % kv.kv_heads;
            let (key, value) = on.read_slot(&store, page, head, offset).unwrap();
            let at = i * width + head * kv.head_dim;
            let expected = match kv.element {
                KvElement::Compute(_) => (
                    keys[at..at + kv.head_dim].to_vec(),
                    values[at..at + kv.head_dim].to_vec(),
                ),
                KvElement::Int8 => self
                    .reference
                    .read_slot(&judge, page, head, offset)
                    .unwrap(),
            };
            assert_eq!((key, value), expected, "position {i} of {:?}", kv.element);
        }
        store
    }

    fn attention(&self) {
        for element in self.elements() {
            self.attention_on(element);
        }
    }

    fn attention_on(&self, element: KvElement) {
        let masks = [
            Mask::Causal,
            Mask::Window(10),
            Mask::Window(300),
            Mask::BlockVisible,
            Mask::BlockWindow(20),
        ];
        for (heads, kv_heads, head_dim) in ATTENTION_HEADS {
            for (page_size, spans) in [
                (4, vec![(0, 1)]),
                (4, vec![(7, 5), (0, 9), (30, 1)]),
                (64, vec![(0, 40), (255, 3), (256, 1), (600, 2)]),
            ] {
                let pages = 30;
                let kv = KvLayout {
                    page_size,
                    kv_heads,
                    head_dim,
                    element,
                };
                let store = self.fill(&self.backend, &kv, &spans, pages);
                let store_reference = self.fill(&self.reference, &kv, &spans, pages);
                let layout = layout(&spans, page_size, pages);
                let (rows, width) = (layout.rows(), heads * head_dim);
                let queries = self.seed(3).normals(rows * width, 1.0, self.kind);
                for mask in masks {
                    let shape = AttentionShape {
                        heads,
                        kv_heads,
                        head_dim,
                        scale: 1.0 / (head_dim as f32).sqrt(),
                        mask,
                    };
                    let what = format!(
                        "attention {heads}/{kv_heads} x {head_dim}, {element:?}, {mask:?}, {spans:?}"
                    );
                    let q = self.tensor(&self.backend, rows, width, &queries);
                    let mut out = self.blank(&self.backend, Element::Model, rows, width);
                    let step = self.step(&self.backend, &layout);
                    self.backend
                        .attention(&mut out, &q, &store, &step, &shape)
                        .unwrap();
                    let found = self.backend.download(&out).unwrap();

                    let q = self.tensor(&self.reference, rows, width, &queries);
                    let mut out = self.blank(&self.reference, Element::Model, rows, width);
                    let step = self.step(&self.reference, &layout);
                    self.reference
                        .attention(&mut out, &q, &store_reference, &step, &shape)
                        .unwrap();
                    assert_close(
                        &what,
                        &found,
                        &self.reference.download(&out).unwrap(),
                        self.tolerance(),
                    );

                    // Each row alone in a step: the same bits. What lies behind it is the future, unseen.
                    if matches!(mask, Mask::Causal | Mask::Window(_)) {
                        for span in 0..layout.spans() {
                            for row in layout.span(span).step_by(3) {
                                let mut alone = StepLayout {
                                    span_rows: vec![0, 1],
                                    ids: vec![0],
                                    positions: vec![layout.positions[row]],
                                    slots: vec![layout.slots[row]],
                                    tables: layout.table(span).to_vec(),
                                    table_width: layout.table_width,
                                    first_pages: vec![0],
                                    wanted: vec![0],
                                    previous: Vec::new(),
                                    drafts: Vec::new(),
                                };
                                // Pages that only a window does not reach may be gone.
                                if let Mask::Window(window) = mask {
                                    let first = (layout.positions[row] as usize + 1)
                                        .saturating_sub(window as usize);
                                    let gone = first / page_size;
                                    alone.tables.drain(..gone);
                                    alone.table_width -= gone;
                                    alone.first_pages = vec![gone as u32];
                                }
                                let q = &queries[row * width..(row + 1) * width];
                                let q = self.tensor(&self.backend, 1, width, q);
                                let mut out = self.blank(&self.backend, Element::Model, 1, width);
                                let step = self.step(&self.backend, &alone);
                                self.backend
                                    .attention(&mut out, &q, &store, &step, &shape)
                                    .unwrap();
                                let alone = self.backend.download(&out).unwrap();
                                let among = &found[row * width..(row + 1) * width];
                                assert_eq!(bits(&alone), bits(among), "{what}: row {row} alone");
                            }
                        }
                    }
                }
            }
        }
    }

    /// Copied pages hold what the originals hold, and nothing else changes.
    fn pages(&self) {
        for element in self.elements() {
            self.pages_of(element);
        }
    }

    fn pages_of(&self, element: KvElement) {
        let kv = KvLayout {
            page_size: 4,
            kv_heads: 2,
            head_dim: 8,
            element,
        };
        let mut store = self.fill(&self.backend, &kv, &[(0, 9)], 16);
        let page = |store: &B::Pages, page: usize| {
            let slots =
                (0..kv.kv_heads).flat_map(|head| (0..kv.page_size).map(move |at| (head, at)));
            let slots =
                slots.map(|(head, at)| self.backend.read_slot(store, page, head, at).unwrap());
            slots
                .flat_map(|(key, value)| [key, value].concat())
                .collect::<Vec<f32>>()
        };
        let before: Vec<_> = (0..16).map(|i| page(&store, i)).collect();
        assert!(before[7].iter().any(|&v| v != 0.0) && before[3].iter().all(|&v| v == 0.0));
        self.backend
            .copy_pages(&mut store, &[(7, 3), (0, 5)])
            .unwrap();
        for i in 0..16 {
            let from = [(3, 7), (5, 0)]
                .iter()
                .find(|(to, _)| *to == i)
                .map_or(i, |(_, from)| *from);
            assert_eq!(
                bits(&page(&store, i)),
                bits(&before[from]),
                "page {i} after copies"
            );
        }
    }

    /// Samples are the host's, row by row, and the next step finds them on the device.
    fn samples(&self) {
        let (rows, vocabulary) = (13, 300);
        let mut numbers = self.seed(21);
        let values = numbers.normals(rows * vocabulary, 3.0, ComputeType::F32);
        let mut logits = self.blank(&self.backend, Element::F32, rows, vocabulary);
        self.backend
            .upload(&mut logits, 0, &values[..vocabulary])
            .unwrap();
        self.backend
            .upload(&mut logits, 1, &values[vocabulary..])
            .unwrap();

        let greedy = SamplingParams::default();
        let drawn = SamplingParams {
            temperature: 0.9,
            top_k: 40,
            top_p: 0.9,
            ..greedy.clone()
        };
        let penalized = SamplingParams {
            repetition_penalty: 1.3,
            frequency_penalty: 0.5,
            ..drawn.clone()
        };
        let biased = SamplingParams {
            logit_bias: vec![(17, 9.0)],
            min_p: 0.02,
            top_k: 0,
            ..drawn.clone()
        };
        let sampler = |params: &SamplingParams, position: u64| RowSampler {
            params: Arc::new(params.clone()),
            counts: params
                .has_penalties()
                .then(|| Arc::new(TokenCounts::new(&[3, 5, 7, 7]))),
            drafts: vec![9],
            mask: None,
            seed: 11,
            position,
            vocabulary: 290,
            top_logprobs: None,
            draw: Draw::Token,
        };
        let mut mask = TokenMask::none(vocabulary);
        (100..110).for_each(|id| mask.allow(id));
        // Row `row` verifies the draft of rank `rank` of what is drawn from in row `other`.
        let verify = |row: usize, other: usize, rank: usize| {
            let sampler = sampler(&drawn, row as u64);
            let drafter = RowSampler {
                draw: Draw::Draft,
                ..sampler.clone()
            };
            let logits = &values[other * vocabulary..][..vocabulary];
            let from = drafter.sample(logits).unwrap().drawn_from.unwrap();
            let other = (0..).find(|id| !from.ids.contains(id)).unwrap();
            let draft = from.ids.get(rank).copied().unwrap_or(other);
            Some(RowSampler {
                draw: Draw::Verify { draft, from },
                ..sampler
            })
        };
        let samplers = [
            Some(sampler(&greedy, 5)),
            None,
            Some(sampler(&drawn, 6)),
            Some(sampler(&penalized, 7)),
            Some(sampler(&biased, 8)),
            Some(RowSampler {
                mask: Some(Arc::new(mask)),
                ..sampler(&drawn, 9)
            }),
            Some(RowSampler {
                top_logprobs: Some(4),
                ..sampler(&greedy, 10)
            }),
            Some(RowSampler {
                draw: Draw::Draft,
                ..sampler(&penalized, 11)
            }),
            Some(RowSampler {
                draw: Draw::Verify {
                    draft: 17,
                    from: Arc::new(Distribution::one_hot(17)),
                },
                ..sampler(&biased, 12)
            }),
            Some(RowSampler {
                draw: Draw::Draft,
                ..sampler(&greedy, 13)
            }),
            // A draft that cannot stay, one that does, and one that was drawn from something else.
            verify(10, 10, usize::MAX),
            verify(11, 11, 1),
            verify(12, 0, 0),
        ];
        let layout = layout(&[(0, rows)], 4, 16);
        let mut step = self.step(&self.backend, &layout);
        self.backend.sample(&mut step, &logits, &samplers).unwrap();
        let found = self.backend.read_samples(&step).unwrap();
        let expected = samplers.iter().zip(values.chunks_exact(vocabulary));
        let expected: Vec<_> = expected
            .filter_map(|(s, row)| Some(s.as_ref()?.sample(row).unwrap()))
            .collect();
        assert_eq!(found, expected);

        // Rows of the next step that are named as samples 2 and 0 of this one, and drafts that are its samples 3
        // and 1.
        let table = numbers.normals(vocabulary * 8, 1.0, ComputeType::Bf16);
        let table_on = self
            .backend
            .load_weight(&weight(vocabulary, 8, &table, ComputeType::Bf16))
            .unwrap();
        let mut next = super::conformance::layout(&[(4, 5)], 4, 16);
        next.previous = vec![(0, 2), (2, 0)];
        next.drafts = vec![(4, 3), (3, 1)];
        let [first, second, third, fourth] = [0, 1, 2, 3].map(|i: usize| expected[i].token);
        let ids = [third, next.ids[1], first, second, fourth];
        let mut after = self.backend.alloc_step(5, 1, next.table_width).unwrap();
        self.backend
            .prepare(&mut after, &next, Some(&step))
            .unwrap();
        self.backend.take_drafts(&mut after, &step).unwrap();
        let mut out = self.blank(&self.backend, Element::F32, 5, 8);
        self.backend.embed(&mut out, &table_on, &after).unwrap();
        let rows: Vec<f32> = ids
            .iter()
            .flat_map(|&id| table[id as usize * 8..][..8].to_vec())
            .collect();
        assert_eq!(
            self.backend.download(&out).unwrap(),
            rows,
            "ids that were sampled"
        );

        // A number that is none is an error, not a token.
        self.backend
            .upload(&mut logits, 2, &vec![f32::NAN; vocabulary])
            .unwrap();
        let mut step = self.step(&self.backend, &layout);
        let failed = self
            .backend
            .sample(&mut step, &logits, &samplers)
            .and_then(|()| self.backend.read_samples(&step));
        assert!(failed.is_err(), "NaN logits were sampled");
    }

    /// The fused op between projection and attention gives what the primitive ops give.
    fn attention_inputs(&self) {
        for element in self.elements() {
            self.attention_inputs_of(element);
        }
    }

    fn attention_inputs_of(&self, element: KvElement) {
        for (heads, kv_heads, head_dim) in [(3, 1, 24), (9, 3, 64), (2, 2, 128), (0, 2, 8)] {
            let spans = [(5, 3), (0, 6)];
            let kv = KvLayout {
                page_size: 4,
                kv_heads,
                head_dim,
                element,
            };
            let layout = layout(&spans, 4, 16);
            let (rows, width) = (layout.rows(), (heads + 2 * kv_heads) * head_dim);
            let x = self.seed(12).normals(rows * width, 1.0, ComputeType::F32);
            let weights = [
                self.seed(13).normals(head_dim, 1.0, self.kind),
                self.seed(14).normals(head_dim, 1.0, self.kind),
            ];
            let table = self.rope(head_dim, 40);
            let shape = AttentionShape {
                heads,
                kv_heads,
                head_dim,
                scale: 1.0,
                mask: Mask::Causal,
            };
            for (normed, rotated) in [(true, true), (false, true), (false, false)] {
                let found = self.inputs(
                    &self.backend,
                    &kv,
                    &layout,
                    &x,
                    &weights,
                    &table,
                    &shape,
                    normed,
                    rotated,
                );
                let judged = self.inputs(
                    &self.reference,
                    &kv,
                    &layout,
                    &x,
                    &weights,
                    &table,
                    &shape,
                    normed,
                    rotated,
                );
                let what = format!(
                    "qk_norm_rope_store {heads}/{kv_heads} x {head_dim}, {normed} {rotated}"
                );
                // A key that comes out one rounding apart can round to the neighbouring integer, which is as much
                // as its scale: 1/127 of the largest, times the channel's factor.
                let tolerance = match element {
                    KvElement::Compute(_) => self.tolerance(),
                    KvElement::Int8 => self.tolerance() + 1.0 / 127.0,
                };
                assert_close(&what, &found, &judged, tolerance);
            }
        }
    }

    fn inputs<C: Backend>(
        &self,
        on: &C,
        kv: &KvLayout,
        layout: &StepLayout,
        x: &[f32],
        weights: &[Vec<f32>; 2],
        table: &RopeTable,
        shape: &AttentionShape,
        normed: bool,
        rotated: bool,
    ) -> Vec<f32> {
        let rows = layout.rows();
        let mut pages = self.cache(on, kv, 16);
        let mut queries = self.blank(on, Element::Model, rows, shape.heads * shape.head_dim);
        let mut scratch = HeadScratch::new(on, shape, rows).unwrap();
        scratch.set_rows(on, rows).unwrap();
        let qkv = self.tensor_of(on, Element::F32, rows, x.len() / rows, x);
        let vectors = [
            on.load_vector(&weights[0]).unwrap(),
            on.load_vector(&weights[1]).unwrap(),
        ];
        let norms = QkNorms {
            query: normed.then_some(&vectors[0]),
            key: normed.then_some(&vectors[1]),
            eps: 1e-6,
        };
        let rope = on.load_rope(table).unwrap();
        let step = self.step(on, layout);
        on.qk_norm_rope_store(
            &mut queries,
            &mut pages,
            &mut scratch,
            &qkv,
            norms,
            rotated.then_some(&rope),
            &step,
            shape,
        )
        .unwrap();
        let mut all = on.download(&queries).unwrap();
        let mut written = std::collections::BTreeSet::new();
        for &slot in &layout.slots {
            written.insert(slot);
            for head in 0..shape.kv_heads {
                let (page, offset) = (slot as usize / kv.page_size, slot as usize % kv.page_size);
                let (key, value) = on.read_slot(&pages, page, head, offset).unwrap();
                all.extend(key.into_iter().chain(value));
            }
        }
        // What was not written stays zero.
        for slot in (0..16 * kv.page_size).filter(|slot| !written.contains(&(*slot as u32))) {
            let (key, value) = on
                .read_slot(&pages, slot / kv.page_size, 0, slot % kv.page_size)
                .unwrap();
            assert!(key.iter().chain(&value).all(|&v| v == 0.0));
        }
        all
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}
