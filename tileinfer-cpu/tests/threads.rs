//! The number of threads changes no bit: every op, on every instruction set of this machine.

use std::sync::Arc;

use tileinfer::backend::{
    Activation, AttentionShape, Backend, ComputeType, Element, HeadScratch, KvRows, Mask, QkNorms,
    RopeTable, StepLayout,
};
use tileinfer::kv::{KvElement, KvLayout};
use tileinfer::testing::{Numbers, weight};
use tileinfer_cpu::{CpuBackend, CpuTensor, Level, Pool};

const HEADS: usize = 6;
const KV_HEADS: usize = 2;
const HEAD_DIM: usize = 64;
const HIDDEN: usize = 200;

/// One layer's worth of ops over spans that start at the given positions; all that comes out, as bits.
fn layer(backend: &CpuBackend, kind: ComputeType, spans: &[(usize, usize)]) -> Vec<u32> {
    let numbers = &mut Numbers::new(4);
    let longest = spans
        .iter()
        .map(|(start, rows)| start + rows)
        .max()
        .unwrap_or(0);
    let width = longest.div_ceil(64);
    let mut step = StepLayout {
        span_rows: vec![0],
        table_width: width,
        ..StepLayout::default()
    };
    for (s, &(start, rows)) in spans.iter().enumerate() {
        for position in start..start + rows {
            step.ids.push((position % 50) as u32);
            step.positions.push(position as u32);
            step.slots.push((s * width * 64 + position) as u32);
        }
        step.tables
            .extend((0..width).map(|i| (s * width + i) as u32));
        step.first_pages.push(0);
        step.span_rows.push(step.positions.len() as u32);
    }
    let rows = step.rows();
    let pages = spans.len() * width;

    let tensor = |element, rows: usize, width: usize| {
        let mut tensor = backend.alloc(element, rows, width).unwrap();
        backend.set_rows(&mut tensor, rows).unwrap();
        tensor
    };
    let filled = |values: &[f32], rows: usize| -> CpuTensor {
        let mut tensor = tensor(Element::Model, rows, values.len() / rows.max(1));
        backend.upload(&mut tensor, 0, values).unwrap();
        tensor
    };
    let matrix = |numbers: &mut Numbers, n: usize, k: usize| {
        let values = numbers.normals(n * k, 0.1, kind);
        backend.load_weight(&weight(n, k, &values, kind)).unwrap()
    };

    // The past: keys and values of every position.
    let layout = KvLayout {
        page_size: 64,
        kv_heads: KV_HEADS,
        head_dim: HEAD_DIM,
        element: KvElement::Compute(kind),
    };
    let mut cache = backend.alloc_pages(&layout, None, pages).unwrap();
    let past = pages * 64;
    let kv_width = KV_HEADS * HEAD_DIM;
    let slots = StepLayout {
        span_rows: vec![0, past as u32],
        positions: (0..past as u32).collect(),
        slots: (0..past as u32).collect(),
        ids: vec![0; past],
        ..StepLayout::default()
    };
    let kv = KvRows {
        keys: filled(&numbers.normals(past * kv_width, 1.0, kind), past),
        values: filled(&numbers.normals(past * kv_width, 1.0, kind), past),
    };
    let mut on = backend.alloc_step(past, 1, 0).unwrap();
    backend.prepare(&mut on, &slots, None).unwrap();
    backend.store_kv(&mut cache, &kv, &on).unwrap();
    backend.prepare(&mut on, &step, None).unwrap();

    let mut x = tensor(Element::F32, rows, HIDDEN);
    let mut normed = tensor(Element::Model, rows, HIDDEN);
    let mut qkv = tensor(Element::F32, rows, (HEADS + 2 * KV_HEADS) * HEAD_DIM);
    let mut queries = tensor(Element::Model, rows, HEADS * HEAD_DIM);
    let mut attended = tensor(Element::Model, rows, HEADS * HEAD_DIM);
    let mut delta = tensor(Element::F32, rows, HIDDEN);
    let mut wide = tensor(Element::F32, rows, 2 * 300);
    let mut narrow = tensor(Element::Model, rows, 300);
    let mut scratch = HeadScratch {
        queries: tensor(Element::F32, rows, HEADS * HEAD_DIM),
        kv: KvRows {
            keys: tensor(Element::F32, rows, kv_width),
            values: tensor(Element::F32, rows, kv_width),
        },
    };

    let norm = backend
        .load_vector(&numbers.normals(HIDDEN, 1.0, kind))
        .unwrap();
    let head_norm = backend
        .load_vector(&numbers.normals(HEAD_DIM, 1.0, kind))
        .unwrap();
    let angles: Vec<f32> = (0..longest * HEAD_DIM / 2)
        .map(|i| i as f32 * 0.01)
        .collect();
    let rope = RopeTable {
        pairs: HEAD_DIM / 2,
        cos: angles.iter().map(|a| kind.round(a.cos())).collect(),
        sin: angles.iter().map(|a| kind.round(a.sin())).collect(),
        query_scale: None,
    };

    backend
        .embed(&mut x, &matrix(numbers, 50, HIDDEN), &on)
        .unwrap();
    backend.rms_norm(&mut normed, &x, &norm, 1e-5).unwrap();
    let w = matrix(numbers, (HEADS + 2 * KV_HEADS) * HEAD_DIM, HIDDEN);
    backend.linear(&mut qkv, &w, None, &normed).unwrap();
    let norms = QkNorms {
        query: Some(&head_norm),
        key: Some(&head_norm),
        eps: 1e-6,
    };
    let mut all = Vec::new();
    for mask in [Mask::Causal, Mask::Window(300)] {
        let shape = AttentionShape {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            scale: 0.125,
            mask,
        };
        backend
            .qk_norm_rope_store(
                &mut queries,
                &mut cache,
                &mut scratch,
                &qkv,
                norms,
                Some(&rope),
                &on,
                &shape,
            )
            .unwrap();
        backend
            .attention(&mut attended, &queries, &cache, &on, &shape)
            .unwrap();
        all.extend(backend.download(&attended).unwrap());
    }
    backend
        .linear(
            &mut delta,
            &matrix(numbers, HIDDEN, HEADS * HEAD_DIM),
            None,
            &attended,
        )
        .unwrap();
    backend
        .add_rms_norm(&mut x, &mut normed, &delta, &norm, 1e-5)
        .unwrap();
    let w = matrix(numbers, 600, HIDDEN);
    backend
        .linear_activation(
            &mut narrow,
            &mut wide,
            &w,
            None,
            &normed,
            &Activation::SiluGated,
        )
        .unwrap();
    all.extend(backend.download(&narrow).unwrap());
    backend
        .linear(&mut delta, &matrix(numbers, HIDDEN, 300), None, &narrow)
        .unwrap();
    backend.add(&mut x, &delta).unwrap();
    all.extend(backend.download(&x).unwrap());
    assert!(all.iter().all(|x| x.is_finite()));
    all.iter().map(|x| x.to_bits()).collect()
}

#[test]
fn the_number_of_threads_changes_no_bit() {
    for kind in [ComputeType::Bf16, ComputeType::F32] {
        for spans in [
            vec![(900, 1)],
            vec![(0, 70)],
            vec![(300, 9), (0, 1), (1000, 2)],
        ] {
            for level in Level::all() {
                let run = |threads| {
                    layer(
                        &CpuBackend::with_pool(kind, level, Arc::new(Pool::new(threads))),
                        kind,
                        &spans,
                    )
                };
                let one = run(1);
                for threads in [2, 3, 7] {
                    assert_eq!(
                        run(threads),
                        one,
                        "{} with {threads} threads, {spans:?}",
                        level.name()
                    );
                }
            }
        }
    }
}

/// Rows in one step have the bits they have in steps of their own, attention over what was written included.
#[test]
fn a_prompt_in_one_piece_and_in_pieces() {
    let kind = ComputeType::Bf16;
    for level in Level::all() {
        let backend = CpuBackend::with_pool(kind, level, Arc::new(Pool::new(2)));
        let numbers = &mut Numbers::new(6);
        let (rows, width) = (600, (HEADS + 2 * KV_HEADS) * HEAD_DIM);
        let values = numbers.normals(rows * width, 1.0, kind);
        let layout = KvLayout {
            page_size: 64,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            element: KvElement::Compute(kind),
        };
        let shape = AttentionShape {
            heads: HEADS,
            kv_heads: KV_HEADS,
            head_dim: HEAD_DIM,
            scale: 0.125,
            mask: Mask::Causal,
        };
        let run = |pieces: &[usize]| {
            let mut cache = backend.alloc_pages(&layout, None, 10).unwrap();
            let (mut out, mut first) = (Vec::new(), 0);
            for &piece in pieces {
                let positions: Vec<u32> = (first as u32..(first + piece) as u32).collect();
                let step = StepLayout {
                    span_rows: vec![0, piece as u32],
                    ids: vec![0; piece],
                    slots: positions.clone(),
                    positions,
                    tables: (0..10).collect(),
                    table_width: 10,
                    first_pages: vec![0],
                    ..StepLayout::default()
                };
                let mut on = backend.alloc_step(piece, 1, 10).unwrap();
                backend.prepare(&mut on, &step, None).unwrap();
                let tensor = |width: usize| {
                    let mut tensor = backend.alloc(Element::Model, piece, width).unwrap();
                    backend.set_rows(&mut tensor, piece).unwrap();
                    tensor
                };
                let mut qkv = tensor(width);
                backend
                    .upload(&mut qkv, 0, &values[first * width..(first + piece) * width])
                    .unwrap();
                let mut scratch = HeadScratch::new(&backend, &shape, piece).unwrap();
                let (mut queries, mut attended) =
                    (tensor(HEADS * HEAD_DIM), tensor(HEADS * HEAD_DIM));
                let norms = QkNorms {
                    query: None,
                    key: None,
                    eps: 0.0,
                };
                backend
                    .qk_norm_rope_store(
                        &mut queries,
                        &mut cache,
                        &mut scratch,
                        &qkv,
                        norms,
                        None,
                        &on,
                        &shape,
                    )
                    .unwrap();
                backend
                    .attention(&mut attended, &queries, &cache, &on, &shape)
                    .unwrap();
                out.extend(
                    backend
                        .download(&attended)
                        .unwrap()
                        .iter()
                        .map(|x| x.to_bits()),
                );
                first += piece;
            }
            assert_eq!(first, rows);
            out
        };
        let whole = run(&[rows]);
        assert!(run(&[1, 255, 1, 1, 100, 242]) == whole, "{}", level.name());
        assert!(
            run(&[16; 37].into_iter().chain([8]).collect::<Vec<_>>()) == whole,
            "{}",
            level.name()
        );
        let mut ones = vec![560];
        ones.extend([1; 40]);
        assert!(run(&ones) == whole, "{}", level.name());
    }
}
