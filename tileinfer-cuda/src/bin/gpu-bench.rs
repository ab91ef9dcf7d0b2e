//! A model of random weights at a real shape on the GPU: steps of many kinds timed against the bandwidth and
//! the tensor throughput measured in the same run, and the rule that a recorded step gives what an eager one
//! gives.
//!
//! `gpu-bench [--toolkit DIR] [--int8] [--int8-cache] [--profile] [--only TEXT] PACK_FOLDER MODEL_FOLDER`, where the
//! model's folder holds a `config.json`; with `--profile`, what each kernel of some steps takes as well; with `--only`,
//! no checks, and the steps whose names hold one of the texts, separated by semicolons.

use std::path::PathBuf;
use std::time::Instant;

use tileinfer::backend::{Backend, ComputeType, StepLayout};
use tileinfer::config::ModelConfig;
use tileinfer::kv::{KvElement, KvLayout};
use tileinfer::model::{DecoderLM, LoadOptions, Quant, Workspace, forward};
use tileinfer::weights::HostModel;
use tileinfer::{Error, Result};
use tileinfer_cuda::{CudaBackend, CudaOptions, CudaPages, ceiling};

/// Slots of a page.
const PAGE: usize = 64;

/// The longest sequence.
const LONGEST: usize = 131_072 + PAGE;

/// Positions the cache has room for.
const POSITIONS: usize = 139_264;

fn main() {
    let mut options = CudaOptions::default();
    let mut arguments = std::env::args().skip(1).peekable();
    if arguments
        .next_if(|argument| argument == "--toolkit")
        .is_some()
    {
        options.kernels.toolkit = arguments.next().map(PathBuf::from);
    }
    let mut flag = |name: &str| arguments.next_if(|argument| argument == name).is_some();
    let (int8, int8_cache) = (flag("--int8"), flag("--int8-cache"));
    let profile = flag("--profile");
    let only = flag("--only").then(|| arguments.next().unwrap_or_default());
    options
        .kernels
        .pack_folders
        .extend(arguments.next().map(PathBuf::from));
    let result = match arguments.next() {
        Some(model) => {
            let model = PathBuf::from(model);
            run(
                &options,
                &model,
                [int8, int8_cache, profile],
                only.as_deref(),
            )
        }
        None => Err(Error::usage(
            "usage: gpu-bench [--toolkit DIR] [--int8] [--int8-cache] [--profile] [--only TEXT] PACK_FOLDER MODEL_FOLDER",
        )),
    };
    if let Err(error) = result {
        println!("error: {error}");
        std::process::exit(1);
    }
}

struct Bench {
    backend: CudaBackend,
    model: DecoderLM<CudaBackend>,
    workspace: Workspace<CudaBackend>,
    pages: Vec<CudaPages>,
    /// Bytes of all linears and the head.
    weights: f64,
    /// Elements of all linears but the head.
    elements: f64,
    /// Bytes of keys and values of one position, all layers.
    position: f64,
    /// Bytes a second of the best plain read.
    read: f64,
}

fn run(
    options: &CudaOptions,
    folder: &std::path::Path,
    [int8, int8_cache, profile]: [bool; 3],
    only: Option<&str>,
) -> Result<()> {
    let backend = CudaBackend::open(ComputeType::Bf16, options)?;
    let config = ModelConfig::from_dir(folder)?;
    let started = Instant::now();
    let host = HostModel::random(&config, 1);
    println!(
        "{}, {}: made in {:.1} s",
        backend.name(),
        folder.display(),
        started.elapsed().as_secs_f64()
    );
    let started = Instant::now();
    let mut load = LoadOptions::new(LONGEST);
    if int8 {
        load.quant = Quant::Int8;
    }
    let model = DecoderLM::load(&backend, &config, &host, &load, &mut |_, _| ())?;
    backend.ops().device().synchronize()?;
    let seconds = started.elapsed().as_secs_f64();
    println!(
        "loaded {:.2} GB in {seconds:.2} s, {:.1} GB/s",
        host.bytes() as f64 / 1e9,
        host.bytes() as f64 / 1e9 / seconds
    );
    drop(host);

    let attention = model.layers[0].attention;
    let element = match int8_cache {
        true => KvElement::Int8,
        false => KvElement::Compute(ComputeType::Bf16),
    };
    let layout = KvLayout {
        page_size: PAGE,
        kv_heads: attention.kv_heads,
        head_dim: attention.head_dim,
        element,
    };
    let pages = model
        .layers
        .iter()
        .map(|_| backend.alloc_pages(&layout, None, POSITIONS / PAGE))
        .collect::<Result<_>>()?;
    let workspace = Workspace::new(&backend, &model, 4096, 64, LONGEST.div_ceil(PAGE), &[])?;
    let (hidden, wide) = (model.hidden, model.layers[0].wide);
    let q = attention.heads * attention.head_dim;
    let kv = attention.kv_heads * attention.head_dim;
    let down = model.layers[0].activation.output_width(wide);
    let layer = hidden * (q + 2 * kv) + q * hidden + hidden * wide + down * hidden;
    let size = if int8 { 1 } else { 2 };
    let model_layers = model.layers.len();
    let weights = (size * (layer * model_layers + hidden * model.head_rows)) as f64;
    let position = (layout.position_bytes() * model.layers.len()) as f64;
    let mut bench = Bench {
        backend,
        model,
        workspace,
        pages,
        weights,
        elements: (layer * model_layers) as f64,
        position,
        read: 0.0,
    };
    let ceilings = ceiling::measure(bench.backend.ops())?;
    bench.read = ceilings.read;
    println!(
        "best read {:.0} GB/s, product {:.0} TFLOP/s, weights of a step {:.2} GB",
        bench.read / 1e9,
        ceilings.matmul / 1e12,
        weights / 1e9
    );
    if only.is_none() {
        bench.same_text()?;
        bench.crowd()?;
    }
    let mut steps: Vec<_> = [
        (128, 1, 1),
        (4096, 1, 1),
        (32768, 1, 1),
        (131_072, 1, 1),
        (4096, 4, 1),
        (4096, 8, 1),
        (4096, 16, 1),
        (1024, 1, 8),
        (1024, 1, 32),
        (1024, 1, 64),
        (512, 512, 1),
        (4096, 4096, 1),
    ]
    .map(|(context, new, sequences)| {
        let name = format!("{sequences:3} x {new:4} rows at {context:5}");
        (name, vec![(context, new); sequences])
    })
    .into();
    for prompt in [65, 129, 193, 257] {
        let spans = [vec![(640, 1); 63], vec![(512, prompt)]].concat();
        steps.push((format!("63 x 1 at 640 + {prompt:3} of a prompt"), spans));
    }
    let asked =
        |name: &str| only.is_none_or(|texts| texts.split(';').any(|text| name.contains(text)));
    for (i, (name, spans)) in steps
        .iter()
        .enumerate()
        .filter(|(_, (name, _))| asked(name))
    {
        bench.step(name, spans)?;
        if profile && (only.is_some() || [0, 9, 10, steps.len() - 1].contains(&i)) {
            bench.profile(name, spans)?;
        }
    }
    for name in bench.backend.ops().kernels().compiled() {
        println!("not in the pack: {name}");
    }
    Ok(())
}

impl Bench {
    /// The last rows of sequences, given as number, positions and how many of them are rows; the last rows' logits.
    /// Each number has pages of its own, `width` of them.
    fn layout(width: usize, spans: &[(usize, usize, usize)]) -> StepLayout {
        let mut layout = StepLayout {
            span_rows: vec![0],
            table_width: width,
            ..StepLayout::default()
        };
        for &(number, context, new) in spans {
            // Scattered, each page once: 7919 is prime and does not divide the number of pages.
            let page = |at: usize| ((number * width + at) * 7919 % (POSITIONS / PAGE)) as u32;
            layout.tables.extend((0..width).map(page));
            for position in context - new..context {
                layout.ids.push(((number + position) * 31 % 1000) as u32);
                layout.positions.push(position as u32);
                layout
                    .slots
                    .push(page(position / PAGE) * PAGE as u32 + (position % PAGE) as u32);
            }
            layout.first_pages.push(0);
            layout.span_rows.push(layout.positions.len() as u32);
            layout.wanted.push(layout.positions.len() as u32 - 1);
        }
        layout
    }

    /// The same of sequences numbered in order, as positions and rows.
    fn step_of(spans: &[(usize, usize)]) -> StepLayout {
        let width = spans.iter().map(|span| span.0.div_ceil(PAGE)).max();
        let numbered = spans.iter().enumerate();
        let numbered: Vec<_> = numbered.map(|(i, &(c, new))| (i, c, new)).collect();
        Self::layout(width.unwrap_or(0), &numbered)
    }

    fn begin(&mut self, layout: &StepLayout) -> Result<()> {
        self.workspace
            .begin(&self.backend, &self.model, layout, None)
    }

    fn forward(&mut self) -> Result<()> {
        forward(
            &self.backend,
            &self.model,
            &mut self.pages,
            &mut self.workspace,
        )
    }

    fn logits(&mut self, layout: &StepLayout) -> Result<Vec<u32>> {
        self.begin(layout)?;
        self.forward()?;
        let logits = self.backend.download(&self.workspace.logits)?;
        Ok(logits.into_iter().map(f32::to_bits).collect())
    }

    /// The same row alone, among 16, in a prefill of 300 and in a recording: the same bits.
    fn same_text(&mut self) -> Result<()> {
        let vocabulary = self.model.head_rows;
        let last = |logits: Vec<u32>| logits[logits.len() - vocabulary..].to_vec();
        let whole = last(self.logits(&Self::step_of(&[(300, 300)]))?);
        let sixteen = last(self.logits(&Self::step_of(&[(300, 16)]))?);
        let one = last(self.logits(&Self::step_of(&[(300, 1)]))?);
        println!(
            "one row as 16 rows: {}, as a prefill of 300: {}",
            verdict(&one, &sixteen),
            verdict(&one, &whole)
        );
        let mut chunks = Vec::new();
        for end in [100, 228, 300] {
            let start = if end == 100 {
                0
            } else if end == 228 {
                100
            } else {
                228
            };
            let mut layout = Self::step_of(&[(300, 300 - start)]);
            let rows = end - start;
            layout.ids.truncate(rows);
            layout.positions.truncate(rows);
            layout.slots.truncate(rows);
            layout.span_rows = vec![0, rows as u32];
            layout.wanted = vec![rows as u32 - 1];
            chunks = last(self.logits(&layout)?);
        }
        println!("a prefill in chunks: {}", verdict(&chunks, &whole));
        // Recorded at another context, replayed here.
        self.begin(&Self::step_of(&[(700, 1)]))?;
        let graph = self.record()?;
        self.begin(&Self::step_of(&[(300, 1)]))?;
        self.backend.replay(&graph)?;
        let replayed = self.backend.download(&self.workspace.logits)?;
        let replayed: Vec<u32> = replayed.into_iter().map(f32::to_bits).collect();
        println!("a recording as an eager step: {}", verdict(&replayed, &one));
        Ok(())
    }

    /// Tokens of many sequences in one step, with a prompt beside them and without, and prompts of many lengths: the
    /// bits that each row has alone.
    fn crowd(&mut self) -> Result<()> {
        const WIDTH: usize = 10;
        let vocabulary = self.model.head_rows;
        let contexts: Vec<usize> = (0..64).map(|i| 260 + 6 * i).collect();
        let layout = |which: &[(usize, usize)]| {
            let spans = which.iter().map(|&(i, new)| (i, contexts[i], new));
            Self::layout(WIDTH, &spans.collect::<Vec<_>>())
        };
        let mut differ = 0;
        for (i, &context) in contexts.iter().enumerate() {
            let whole = self.logits(&layout(&[(i, context)]))?;
            let one = self.logits(&layout(&[(i, 1)]))?;
            differ += usize::from(one != whole);
        }
        println!("of 64 prompts of 260 to 638 tokens {differ} differ from their last row alone");
        for beside in [0, 65, 129, 193, 257, 600] {
            let mut rows: Vec<_> = (0..63).map(|i| (i, 1)).collect();
            if beside > 0 {
                rows.push((63, beside));
            }
            let together = self.logits(&layout(&rows))?;
            let mut differ = 0;
            for (&row, logits) in rows.iter().zip(together.chunks(vocabulary)) {
                differ += usize::from(self.logits(&layout(&[row]))? != logits);
            }
            println!(
                "63 sequences and {beside} rows of a prompt: {differ} differ from themselves alone"
            );
        }
        Ok(())
    }

    fn record(&mut self) -> Result<<CudaBackend as Backend>::Graph> {
        // Once without recording, so that every kernel is loaded and all scratch is there.
        self.forward()?;
        let Bench {
            backend,
            model,
            workspace,
            pages,
            ..
        } = self;
        backend.capture(&mut || forward(backend, model, pages, workspace))
    }

    /// Milliseconds of `body`, the median of `times`.
    fn time(&mut self, times: usize, mut body: impl FnMut(&mut Self) -> Result<()>) -> Result<f64> {
        let device = self.backend.ops().device().clone();
        let (start, end) = (device.event()?, device.event()?);
        body(self)?;
        let mut all = Vec::new();
        for _ in 0..times {
            start.record()?;
            body(self)?;
            end.record()?;
            end.wait()?;
            all.push(f64::from(start.milliseconds_to(&end)?));
        }
        all.sort_by(f64::total_cmp);
        Ok(all[times / 2])
    }

    fn step(&mut self, name: &str, spans: &[(usize, usize)]) -> Result<()> {
        let layout = Self::step_of(spans);
        let rows = layout.rows();
        self.begin(&layout)?;
        let eager = self.time(5, Bench::forward)?;
        let positions: usize = spans.iter().map(|span| span.0).sum();
        let bytes = self.weights + self.position * positions as f64;
        let mut line = format!("{name}: eager {eager:8.3} ms");
        let mut best = eager;
        if rows <= 64 {
            let graph = self.record()?;
            let replay = self.time(20, |bench| bench.backend.replay(&graph))?;
            let whole = self.time(20, |bench| {
                bench.begin(&layout)?;
                bench.backend.replay(&graph)
            })?;
            line += &format!(", recorded {replay:7.3} ms, with its layout {whole:7.3} ms");
            best = replay;
        }
        let linears = 2.0 * self.elements * rows as f64;
        let shape = self.model.layers[0].attention;
        let seen = |&(context, new): &(usize, usize)| {
            new as f64 * (context as f64 - (new as f64 - 1.0) / 2.0)
        };
        let seen: f64 = spans.iter().map(seen).sum();
        let attention =
            4.0 * (shape.heads * shape.head_dim * self.model.layers.len()) as f64 * seen;
        line += &format!(
            ", {:.2} of read, {:.0} TFLOP/s",
            bytes / (best / 1e3) / self.read,
            (linears + attention) / best / 1e9
        );
        println!("{line}");
        Ok(())
    }

    /// What each kernel of a step takes, the most first.
    fn profile(&mut self, name: &str, spans: &[(usize, usize)]) -> Result<()> {
        self.begin(&Self::step_of(spans))?;
        let whole = self.time(3, Bench::forward)?;
        let ops = self.backend.ops().clone();
        let times = ops.time_kernels(&mut || self.forward())?;
        let all: f32 = times.iter().map(|(_, time)| time).sum();
        println!("{name}: {whole:.3} ms, kernel by kernel {all:.3}");
        let mut sums = std::collections::BTreeMap::<_, (usize, f32)>::new();
        for (kernel, time) in times {
            let sum = sums.entry(kernel).or_default();
            *sum = (sum.0 + 1, sum.1 + time);
        }
        let mut sums: Vec<_> = sums.into_iter().collect();
        sums.sort_by(|a, b| b.1.1.total_cmp(&a.1.1));
        for (kernel, (count, time)) in sums {
            let each = 1e3 * time / count as f32;
            println!("  {time:7.3} ms, {count:3} times {each:6.1} us: {kernel}");
        }
        Ok(())
    }
}

fn verdict(a: &[u32], b: &[u32]) -> String {
    let differ = a.iter().zip(b).filter(|(a, b)| a != b).count();
    match differ {
        0 if a.len() == b.len() => "bit for bit".to_owned(),
        _ => format!("FAILED, {differ} of {} differ", b.len()),
    }
}
