//! Times each operation on the shapes of small models: `cargo run --release -p tileinfer-cpu --example ops`.
//!
//! Options: `--threads N`, `--level avx512_bf16|avx512|avx2|neon|portable`, `--only PART` (operations whose name
//! contains it). A mapped file's pages lie in runs, those of an allocation do not: on Linux, with
//! `GLIBC_TUNABLES=glibc.malloc.hugetlb=1`, weights are as fast to read as those of a file. With one thread the
//! time is that of the thread's own work, so a busy machine can be measured too; with more it is the wall clock's.
//! Weights and caches are larger than the caches of the processor, as they are in a model.

use std::hint::black_box;
use std::sync::Arc;
use std::time::Instant;

use tileinfer::backend::{
    Activation, AttentionShape, Backend, ComputeType, Element, HeadScratch, KvRows, Mask, QkNorms,
    RopeTable, StepLayout,
};
use tileinfer::kv::{KvElement, KvLayout};
use tileinfer::weights::Weight;
use tileinfer_cpu::{CpuBackend, CpuTensor, Level, Pool, ceiling};

/// The shapes that matter of a model.
struct Shapes {
    name: &'static str,
    hidden: usize,
    intermediate: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    vocabulary: usize,
    qk_norm: bool,
}

const MODELS: [Shapes; 2] = [
    Shapes {
        name: "SmolLM2-135M",
        hidden: 576,
        intermediate: 1536,
        heads: 9,
        kv_heads: 3,
        head_dim: 64,
        vocabulary: 49152,
        qk_norm: false,
    },
    Shapes {
        name: "Qwen3-0.6B",
        hidden: 1024,
        intermediate: 3072,
        heads: 16,
        kv_heads: 8,
        head_dim: 128,
        vocabulary: 151_936,
        qk_norm: true,
    },
];

fn main() {
    let mut threads = 2;
    let mut level = Level::best();
    let mut only = String::new();
    let mut args = std::env::args().skip(1);
    while let Some(arg) = args.next() {
        let value = args.next().unwrap_or_default();
        match arg.as_str() {
            "--threads" => threads = value.parse().expect("--threads takes a number"),
            "--level" => {
                level = Level::named(&value).expect("--level takes a level of this machine")
            }
            "--only" => only = value,
            other => panic!("unknown option {other}"),
        }
    }
    let pool = Arc::new(Pool::new(threads));
    let backend = CpuBackend::with_pool(ComputeType::Bf16, level, Arc::clone(&pool));
    let mut bench = Bench {
        backend,
        pool,
        read: 0.0,
        flops: 0.0,
        start: Instant::now(),
        only,
    };
    bench.ceilings();
    for shapes in &MODELS {
        println!("{}", shapes.name);
        for int8 in [false, true] {
            bench.linears(shapes, int8);
            bench.attention(shapes, int8);
        }
        bench.rest(shapes);
    }
    bench.ceilings();
}

fn named(int8: bool) -> &'static str {
    if int8 { " int8" } else { "" }
}

struct Bench {
    backend: CpuBackend,
    pool: Arc<Pool>,
    read: f64,
    flops: f64,
    start: Instant,
    only: String,
}

impl Bench {
    fn ceilings(&mut self) {
        let level = self.backend.level();
        self.read = ceiling::read_bandwidth(level, &self.pool, 1 << 30, 4, &|| self.clock());
        self.flops = ceiling::multiply_add_rate(level, &self.pool, 20, &|| self.clock());
        println!(
            "{}: read {:.1} GB/s, multiply-add {:.1} GFLOP/s",
            self.backend.name(),
            self.read / 1e9,
            self.flops / 1e9
        );
    }

    /// Seconds since some moment: of the wall, or of this thread's work if it is alone.
    fn clock(&self) -> f64 {
        if self.pool.threads() > 1 {
            return self.start.elapsed().as_secs_f64();
        }
        let mut now = libc::timespec {
            tv_sec: 0,
            tv_nsec: 0,
        };
        // SAFETY: `now` is a timespec that the call may write.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &mut now) };
        now.tv_sec as f64 + now.tv_nsec as f64 * 1e-9
    }

    /// Times `f` over `copies` different operands and prints the best of some passes, per operand.
    fn line(
        &self,
        what: &str,
        bytes: usize,
        flops: usize,
        copies: usize,
        mut f: impl FnMut(usize),
    ) {
        if !what.contains(&self.only) {
            return;
        }
        let mut best = f64::INFINITY;
        for _ in 0..5 {
            let start = self.clock();
            (0..copies).for_each(&mut f);
            best = best.min((self.clock() - start) / copies as f64);
        }
        let (rate, work) = (bytes as f64 / best, flops as f64 / best);
        println!(
            "  {what:44} {:9.1} us  {:6.1} GB/s ({:4.2})  {:6.1} GFLOP/s ({:4.2})",
            best * 1e6,
            rate / 1e9,
            rate / self.read,
            work / 1e9,
            work / self.flops
        );
    }

    fn tensor(&self, element: Element, rows: usize, width: usize) -> CpuTensor {
        let mut tensor = self
            .backend
            .alloc(element, rows, width)
            .expect("there is memory");
        self.backend
            .set_rows(&mut tensor, rows)
            .expect("as many as asked for");
        let values: Vec<f32> = (0..rows * width)
            .map(|i| (i % 61) as f32 / 32.0 - 0.9)
            .collect();
        self.backend
            .upload(&mut tensor, 0, &values)
            .expect("as many as there are");
        tensor
    }

    fn linears(&self, s: &Shapes, int8: bool) {
        let attention = s.heads * s.head_dim;
        let list = [
            (
                "qkv",
                attention + 2 * s.kv_heads * s.head_dim,
                s.hidden,
                false,
            ),
            ("o", s.hidden, attention, false),
            ("gate+up, silu", 2 * s.intermediate, s.hidden, true),
            ("down", s.hidden, s.intermediate, false),
            ("head", s.vocabulary, s.hidden, false),
        ];
        for (name, n, k, gated) in list {
            let bytes = if int8 { n * (k + 4) } else { n * k * 2 };
            if !format!("linear{} {name}", named(int8)).contains(&self.only) {
                continue;
            }
            let copies = (150_000_000 / bytes).clamp(1, 60);
            let parts = if gated { 2 } else { 1 };
            let weights: Vec<_> = (0..copies)
                .map(|i| {
                    let part = |j: usize| {
                        Weight::random(n / parts, k, (2 * i + j) as u64, 0.02).parts()[0].clone()
                    };
                    let weight =
                        Weight::new((0..parts).map(part).collect()).expect("parts of one width");
                    let loaded = if int8 {
                        self.backend.load_int8(&weight)
                    } else {
                        self.backend.load_weight(&weight)
                    };
                    loaded.expect("bf16, or int8")
                })
                .collect();
            for rows in [1, 2, 4, 8, 16, 512] {
                if name == "head" && rows > 16 {
                    continue;
                }
                let x = self.tensor(Element::Model, rows, k);
                let mut y = self.tensor(if gated { Element::Model } else { Element::F32 }, rows, n);
                let mut narrow = self.tensor(Element::Model, rows, n / 2);
                let copies = if rows > 16 { 1 } else { copies };
                self.line(
                    &format!("linear{} {name} {rows} x {k} -> {n}", named(int8)),
                    bytes,
                    2 * rows * n * k,
                    copies,
                    |i| {
                        if gated {
                            self.backend
                                .linear_activation(
                                    &mut narrow,
                                    &mut y,
                                    &weights[i],
                                    None,
                                    &x,
                                    &Activation::SiluGated,
                                )
                                .expect("shapes fit");
                        } else {
                            self.backend
                                .linear(&mut y, &weights[i], None, &x)
                                .expect("shapes fit");
                        }
                    },
                );
            }
        }
    }

    fn attention(&self, s: &Shapes, int8: bool) {
        let layout = KvLayout {
            page_size: 64,
            kv_heads: s.kv_heads,
            head_dim: s.head_dim,
            element: if int8 {
                KvElement::Int8
            } else {
                KvElement::Compute(ComputeType::Bf16)
            },
        };
        let shape = AttentionShape {
            heads: s.heads,
            kv_heads: s.kv_heads,
            head_dim: s.head_dim,
            scale: 1.0 / (s.head_dim as f32).sqrt(),
            mask: Mask::Causal,
        };
        for (context, rows) in [
            (0_usize, 512_usize),
            (128, 1),
            (2048, 1),
            (8192, 1),
            (8192, 8),
            (4096, 512),
        ] {
            let positions = context + rows;
            let pages = positions.div_ceil(64);
            let bytes = positions * layout.position_bytes();
            let copies = if rows > 8 {
                1
            } else {
                (150_000_000 / bytes).clamp(1, 30)
            };
            let caches: Vec<_> = (0..copies)
                .map(|_| {
                    let mut pages = self
                        .backend
                        .alloc_pages(&layout, None, pages)
                        .expect("an even head dimension");
                    self.fill(&mut pages, s, positions);
                    pages
                })
                .collect();
            let step = self.step(context, rows);
            let queries = self.tensor(Element::Model, rows, s.heads * s.head_dim);
            let mut out = self.tensor(Element::Model, rows, s.heads * s.head_dim);
            let pairs: usize = (context + 1..=positions).sum();
            let flops = 4 * pairs * s.heads * s.head_dim;
            self.line(
                &format!("attention{} {rows} rows after {context}", named(int8)),
                bytes,
                flops,
                copies,
                |i| {
                    self.backend
                        .attention(&mut out, &queries, &caches[i], &step, &shape)
                        .expect("shapes fit");
                },
            );
        }
    }

    fn fill(&self, pages: &mut tileinfer_cpu::Pages, s: &Shapes, positions: usize) {
        for first in (0..positions).step_by(1024) {
            let n = 1024.min(positions - first);
            let width = s.kv_heads * s.head_dim;
            let rows = KvRows {
                keys: self.tensor(Element::Model, n, width),
                values: self.tensor(Element::Model, n, width),
            };
            self.backend
                .store_kv(pages, &rows, &self.step(first, n))
                .expect("shapes fit");
        }
    }

    fn step(&self, start: usize, rows: usize) -> tileinfer_cpu::CpuStep {
        let positions: Vec<u32> = (start as u32..(start + rows) as u32).collect();
        let width = (start + rows).div_ceil(64);
        let layout = StepLayout {
            span_rows: vec![0, rows as u32],
            ids: positions.iter().map(|p| p * 37 % 40_000).collect(),
            slots: positions.clone(),
            positions,
            tables: (0..width as u32).collect(),
            table_width: width,
            first_pages: vec![0],
            ..StepLayout::default()
        };
        let mut step = self
            .backend
            .alloc_step(rows, 1, width)
            .expect("there is memory");
        self.backend
            .prepare(&mut step, &layout, None)
            .expect("a sound layout");
        step
    }

    fn rest(&self, s: &Shapes) {
        let norm = self
            .backend
            .load_vector(&vec![1.0; s.hidden])
            .expect("there is memory");
        let head_norm = self
            .backend
            .load_vector(&vec![1.0; s.head_dim])
            .expect("there is memory");
        let pairs = s.head_dim / 2;
        let table = RopeTable {
            pairs,
            cos: (0..1024 * pairs).map(|i| (i as f32).cos()).collect(),
            sin: (0..1024 * pairs).map(|i| (i as f32).sin()).collect(),
            query_scale: None,
        };
        let embedding = self
            .backend
            .load_weight(&Weight::random(40_000, s.hidden, 1, 0.02))
            .expect("bf16");
        let layout = KvLayout {
            page_size: 64,
            kv_heads: s.kv_heads,
            head_dim: s.head_dim,
            element: KvElement::Compute(ComputeType::Bf16),
        };
        let shape = AttentionShape {
            heads: s.heads,
            kv_heads: s.kv_heads,
            head_dim: s.head_dim,
            scale: 1.0,
            mask: Mask::Causal,
        };
        for rows in [1, 512] {
            let (q, kv) = (s.heads * s.head_dim, s.kv_heads * s.head_dim);
            let mut x = self.tensor(Element::F32, rows, s.hidden);
            let delta = self.tensor(Element::F32, rows, s.hidden);
            let mut out = self.tensor(Element::Model, rows, s.hidden);
            let step = self.step(0, rows);
            self.line(&format!("embed {rows}"), rows * s.hidden * 6, 0, 10, |_| {
                self.backend
                    .embed(&mut x, &embedding, &step)
                    .expect("shapes fit");
            });
            self.line(
                &format!("add_rms_norm {rows}"),
                rows * s.hidden * 16,
                0,
                10,
                |_| {
                    self.backend
                        .add_rms_norm(&mut x, &mut out, &delta, &norm, 1e-5)
                        .expect("shapes fit");
                },
            );
            let qkv = self.tensor(Element::F32, rows, q + 2 * kv);
            let mut queries = self.tensor(Element::Model, rows, q);
            let mut scratch = HeadScratch::new(&self.backend, &shape, rows).expect("room for them");
            let mut pages = self
                .backend
                .alloc_pages(&layout, None, rows.div_ceil(64))
                .expect("an even head dimension");
            let norm = s.qk_norm.then_some(&head_norm);
            let norms = QkNorms {
                query: norm,
                key: norm,
                eps: 1e-6,
            };
            let bytes = rows * (8 * q + 12 * kv);
            self.line(&format!("qk_norm_rope_store {rows}"), bytes, 0, 10, |_| {
                self.backend
                    .qk_norm_rope_store(
                        &mut queries,
                        &mut pages,
                        &mut scratch,
                        &qkv,
                        norms,
                        Some(&table),
                        &step,
                        &shape,
                    )
                    .expect("shapes fit");
            });
            let wide = self.tensor(Element::F32, rows, 2 * s.intermediate);
            let mut narrow = self.tensor(Element::Model, rows, s.intermediate);
            self.line(
                &format!("silu {rows}"),
                rows * s.intermediate * 12,
                0,
                10,
                |_| {
                    self.backend
                        .activation(&mut narrow, &wide, &Activation::SiluGated)
                        .expect("shapes fit");
                },
            );
        }
        self.line("fork and join", 0, 0, 2000, |_| {
            self.pool.run(self.pool.threads(), |i| {
                black_box(i);
            });
        });
    }
}
