//! "Same text, always", bit for bit: whichever step a position is computed in, alone or beside others, its
//! logits, key and value are those of one pass over the whole text, and whatever crowd an answer is drawn in,
//! its tokens are those it has alone. Knows no numbers of any model: a backend is compared with itself.

use std::hash::{Hash, Hasher};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use super::{Numbers, load_quantized, tokens};
use crate::backend::{Backend, ComputeType};
use crate::config::ModelConfig;
use crate::engine::{Generation, GenerationOptions, Planned, Slot, StepLoop};
use crate::generate::{TextOutput, answer};
use crate::kv::{KeySmoothing, PagePool, Sequence};
use crate::model::Quant;
use crate::runner::{Batch, Input, ModelRunner, Rows, Runner, RunnerOptions, Span, Want};
use crate::sampling::SamplingParams;
use crate::tokenizer::Tokenizer;

/// The golden models that [`same_text`] takes: one for each way a forward pass differs.
pub const SAME_TEXT_MODELS: [&str; 6] = [
    "qwen3",
    "mistral-window",
    "llama-3heads",
    "apertus",
    "smollm3",
    "qwen3-windows",
];

/// Small enough that windows of ten positions let pages go and most spans end within one.
const PAGE_SIZE: usize = 16;
const PAGES: usize = 256;

/// Positions of the text: more than one block of keys.
const LENGTH: usize = 300;

/// Holds backends that `make` makes to the promise on every model of [`SAME_TEXT_MODELS`] in `golden` (a
/// folder with `models`). Backends with threads are to be tried with several counts by the caller, who can
/// compare what comes back: a hash of the bits of all logits, keys and values and of the answers.
pub fn same_text<B: Backend>(make: &dyn Fn(ComputeType) -> B, golden: &Path) -> u64 {
    let models = SAME_TEXT_MODELS.map(|name| same_text_model(make, golden, name));
    hash(&models)
}

/// [`same_text`] on one model.
pub fn same_text_model<B: Backend>(
    make: &dyn Fn(ComputeType) -> B,
    golden: &Path,
    name: &str,
) -> u64 {
    same_text_of(make, golden, name, false)
}

/// [`same_text_model`] with int8 weights and a smoothed int8 cache.
pub fn same_text_model_int8<B: Backend>(
    make: &dyn Fn(ComputeType) -> B,
    golden: &Path,
    name: &str,
) -> u64 {
    same_text_of(make, golden, name, true)
}

fn same_text_of<B: Backend>(
    make: &dyn Fn(ComputeType) -> B,
    golden: &Path,
    name: &str,
    int8: bool,
) -> u64 {
    let dir = golden.join("models").join(name);
    let kinds = [ComputeType::F32, ComputeType::Bf16].map(|kind| {
        let load = |backend| loaded(backend, &dir, int8);
        let mut suite = Suite::new(load(make(kind)), format!("{name}, {kind:?}, int8 {int8}"));
        suite.chunks();
        suite.mixed_steps();
        suite.other_texts_beside();
        suite.cached_prefixes();
        suite.retired_pages();
        let answers = [1, 2].map(|depth| crowd(load(make(kind)).with_depth(depth), &dir));
        assert_eq!(
            answers[0], answers[1],
            "{name}, {kind:?}: one and two steps in flight"
        );
        hash(&(&suite.text.logits, &suite.text.cached, answers))
    });
    hash(&kinds)
}

/// The same for the same values, on every machine.
fn hash(values: &impl Hash) -> u64 {
    let mut hasher = std::hash::DefaultHasher::new();
    values.hash(&mut hasher);
    hasher.finish()
}

/// What one pass over a text computes.
struct Text {
    ids: Vec<u32>,
    /// Of every position, f32 bits `[head rows]`.
    logits: Vec<Vec<u32>>,
    /// Of every position, f32 bits of the keys and values of all layers and heads.
    cached: Vec<Vec<u32>>,
}

struct Suite<B: Backend> {
    what: String,
    runner: ModelRunner<B>,
    pool: PagePool,
    text: Text,
}

impl<B: Backend> Suite<B> {
    /// Passes once over a random text, with pages in order.
    fn new(runner: ModelRunner<B>, what: String) -> Self {
        let vocabulary = runner.limits().vocabulary;
        let ids = random_ids(&mut Numbers::new(7), LENGTH, vocabulary);
        let pool = PagePool::new(PAGES);
        let text = Text {
            ids,
            logits: Vec::new(),
            cached: Vec::new(),
        };
        let mut suite = Suite {
            what,
            runner,
            pool,
            text,
        };
        suite.text = suite.cold(suite.text.ids.clone());
        let logits: Vec<f32> = suite
            .text
            .logits
            .concat()
            .into_iter()
            .map(f32::from_bits)
            .collect();
        assert!(
            logits.iter().all(|logit| logit.is_finite()),
            "{}: a logit is not finite",
            suite.what
        );
        // A pool hands out first what was given back last: from here on pages come shuffled.
        let mut numbers = Numbers::new(11);
        let mut pages = suite.pool.take(PAGES).unwrap();
        while !pages.is_empty() {
            drop(pages.swap_remove(numbers.below(pages.len())));
        }
        suite
    }

    /// One pass over `ids` in pages of its own.
    fn cold(&mut self, ids: Vec<u32>) -> Text {
        let mut sequence = self.sequence();
        let logits = self.step(&mut [(&mut sequence, &ids)]).remove(0);
        Text {
            logits,
            cached: self.cached(&sequence, 0),
            ids,
        }
    }

    fn sequence(&self) -> Sequence {
        Sequence::new(&self.pool, PAGE_SIZE)
    }

    /// Runs one step that continues each sequence with some tokens; the logits of all its rows.
    fn step(&mut self, spans: &mut [(&mut Sequence, &[u32])]) -> Vec<Vec<Vec<u32>>> {
        let mut batch = Batch::default();
        let mut copies = Vec::new();
        for (sequence, ids) in &mut *spans {
            let start = sequence.len();
            copies.extend(sequence.reserve(start, start + ids.len()).unwrap());
            let want = Want {
                rows: Rows::All,
                logits: true,
                ..Want::default()
            };
            batch.spans.push(Span {
                input: Input::Ids(ids.to_vec()),
                start,
                table: sequence.table(),
                want,
            });
        }
        batch.copies = copies.iter().map(|copy| copy.pages()).collect();
        let output = self.runner.step(&batch).unwrap();
        drop(copies);
        for (sequence, ids) in spans {
            sequence.append(ids).unwrap();
        }
        let width = self.runner.limits().head_rows;
        let rows = |logits: &[f32]| logits.chunks_exact(width).map(bits).collect();
        output.spans.iter().map(|span| rows(&span.logits)).collect()
    }

    /// The keys and values of `sequence` at the positions from `first` on.
    fn cached(&self, sequence: &Sequence, first: usize) -> Vec<Vec<u32>> {
        let table = sequence.table();
        let limits = self.runner.limits();
        let position = |position: usize| {
            let page = table.pages[position / PAGE_SIZE - table.first_page] as usize;
            let mut vectors = Vec::new();
            for layer in 0..limits.layers {
                for head in 0..limits.kv.kv_heads {
                    let (key, value) = self
                        .runner
                        .read_slot(layer, page, head, position % PAGE_SIZE)
                        .unwrap();
                    vectors.extend(bits(&key));
                    vectors.extend(bits(&value));
                }
            }
            vectors
        };
        (first..sequence.len()).map(position).collect()
    }

    /// Runs the text in `sequence` up to `end`, `chunk` rows a step.
    fn run_text(&mut self, how: &str, sequence: &mut Sequence, chunk: usize, end: usize) {
        while sequence.len() < end {
            let start = sequence.len();
            let ids = self.text.ids[start..(start + chunk).min(end)].to_vec();
            let logits = self.step(&mut [(&mut *sequence, &ids)]).remove(0);
            self.same_logits(how, start, &logits);
        }
    }

    fn same_logits(&self, how: &str, start: usize, found: &[Vec<u32>]) {
        same(
            &format!("{}: logits, {how}", self.what),
            start,
            found,
            &self.text.logits[start..],
        );
    }

    /// The keys and values of `sequence`, which holds a part of the text, from position `first` on.
    fn same_cached(&self, how: &str, sequence: &Sequence, first: usize) {
        let found = self.cached(sequence, first);
        same(
            &format!("{}: keys and values, {how}", self.what),
            first,
            &found,
            &self.text.cached[first..],
        );
    }

    /// Chunks of every kind, one row at a time included: what decode writes is what prefill writes. The
    /// pages are shuffled where those of the one pass were in order.
    fn chunks(&mut self) {
        // Single tokens, which take the longest, at the beginning and across the end of a block of keys.
        let plans: [&[(usize, usize)]; 5] = [
            &[(1, 40), (190, 230), (1, LENGTH)],
            &[(3, LENGTH)],
            &[(16, LENGTH)],
            &[(61, LENGTH)],
            &[(LENGTH, LENGTH)],
        ];
        for plan in plans {
            let how = format!("in chunks of (rows, up to) {plan:?}");
            let mut sequence = self.sequence();
            for &(chunk, end) in plan {
                self.run_text(&how, &mut sequence, chunk, end);
            }
            self.same_cached(&how, &sequence, 0);
        }
    }

    /// Steps of many kinds of spans of the same text in different sequences: prompts, chunks, single tokens
    /// and tokens with drafts behind them.
    fn mixed_steps(&mut self) {
        // (cached, rows in the same step)
        let parts = [
            (0, 1),
            (0, 17),
            (99, 1),
            (47, 5),
            (255, 2),
            (120, 33),
            (256, 1),
            (15, 1),
            (16, 16),
            (287, 8),
        ];
        let ids = self.text.ids.clone();
        let mut sequences: Vec<Sequence> = parts.iter().map(|_| self.sequence()).collect();
        for (sequence, (cached, _)) in sequences.iter_mut().zip(parts) {
            self.run_text("before a mixed step", sequence, 128, cached);
        }
        // Then all of them decode together.
        for decode in [false, true] {
            let spans = sequences
                .iter_mut()
                .zip(parts)
                .map(|(sequence, (_, rows))| {
                    let start = sequence.len();
                    (sequence, &ids[start..start + if decode { 1 } else { rows }])
                });
            let logits = self.step(&mut spans.collect::<Vec<_>>());
            for (sequence, logits) in sequences.iter().zip(logits) {
                self.same_logits("in a mixed step", sequence.len() - logits.len(), &logits);
            }
        }
        for sequence in &sequences {
            self.same_cached("in a mixed step", sequence, 0);
        }
    }

    /// Several texts in one step, then single tokens of each, are each as alone.
    fn other_texts_beside(&mut self) {
        let mut numbers = Numbers::new(23);
        let vocabulary = self.runner.limits().vocabulary;
        let texts: Vec<Text> = [1, 2, 15, 40, 64]
            .into_iter()
            .map(|len| self.cold(random_ids(&mut numbers, len + 3, vocabulary)))
            .collect();
        let mut sequences: Vec<Sequence> = texts.iter().map(|_| self.sequence()).collect();
        let mut end = 3;
        while end > 0 {
            let spans = sequences.iter_mut().zip(&texts).map(|(sequence, text)| {
                let ids = &text.ids[sequence.len()..text.ids.len() - end + 1];
                (sequence, ids)
            });
            let logits = self.step(&mut spans.collect::<Vec<_>>());
            for ((text, sequence), logits) in texts.iter().zip(&sequences).zip(logits) {
                let start = sequence.len() - logits.len();
                let what = format!(
                    "{}: logits, a text of {} beside others",
                    self.what,
                    text.ids.len()
                );
                same(&what, start, &logits, &text.logits[start..]);
            }
            end -= 1;
        }
        for (text, sequence) in texts.iter().zip(&sequences) {
            let what = format!(
                "{}: keys and values, a text of {} beside others",
                self.what,
                text.ids.len()
            );
            same(&what, 0, &self.cached(sequence, 0), &text.cached);
        }
    }

    /// Rewound or forked in the middle of a page, a sequence goes on as if nothing had been there.
    fn cached_prefixes(&mut self) {
        let mut sequence = self.sequence();
        self.run_text("before a rewind", &mut sequence, 160, 160);
        assert_eq!(sequence.truncate(137), 137);
        // What a rewind leaves behind is another text.
        let other = random_ids(&mut Numbers::new(31), 23, self.runner.limits().vocabulary);
        self.step(&mut [(&mut sequence, &other)]);
        assert_eq!(sequence.truncate(121), 121);

        let branch: Vec<u32> = self.text.ids[..121].iter().chain(&other).copied().collect();
        let branch = self.cold(branch);
        let mut fork = sequence.fork();
        let mut fork_of_the_same = sequence.fork();
        let found = self.step(&mut [(&mut fork, &other)]).remove(0);
        same(
            &format!("{}: logits, a fork", self.what),
            121,
            &found,
            &branch.logits[121..],
        );
        self.run_text("after a rewind", &mut sequence, 150, LENGTH);
        self.run_text("in a second fork", &mut fork_of_the_same, 7, 160);
        self.same_cached("after a rewind", &sequence, 0);
        self.same_cached("in a second fork", &fork_of_the_same, 0);
        same(
            &format!("{}: keys and values, a fork", self.what),
            0,
            &self.cached(&fork, 0),
            &branch.cached,
        );
    }

    /// Where every layer has a window, pages before it may go, and be filled with something else.
    fn retired_pages(&mut self) {
        let Some(window) = self.runner.limits().window else {
            return;
        };
        let mut sequence = self.sequence();
        let mut neighbour = self.sequence();
        let vocabulary = self.runner.limits().vocabulary;
        let other = random_ids(&mut Numbers::new(41), LENGTH, vocabulary);
        // The pages that are let go are all that the neighbour gets.
        let hoard = self
            .pool
            .take(self.pool.free() - LENGTH.div_ceil(PAGE_SIZE))
            .unwrap();
        let chunk = 12;
        for end in (chunk..=LENGTH).step_by(chunk) {
            self.run_text("with pages let go", &mut sequence, chunk, end);
            sequence.retire_before(end.saturating_sub(window));
            self.step(&mut [(&mut neighbour, &other[end - chunk..end])]);
            neighbour.retire_before(end.saturating_sub(window));
        }
        let first = sequence.table().first_page;
        assert!(
            first >= (LENGTH - window) / PAGE_SIZE - 1,
            "{}: only {first} pages went",
            self.what
        );
        self.same_cached("with pages let go", &sequence, first * PAGE_SIZE);
        drop(hoard);
    }
}

/// The answers of sampled requests, which are the same that comes and goes as alone,
/// and streamed as whole.
fn crowd<B: Backend>(runner: ModelRunner<B>, dir: &Path) -> Vec<Vec<u32>> {
    let limits = runner.limits();
    let what = format!("{}, {limits:?}", dir.display());
    let tokenizer = Tokenizer::from_dir(dir).unwrap();
    let mut steps = StepLoop::new(Box::new(runner));
    let mut numbers = Numbers::new(5);
    let requests: Vec<(Vec<u32>, GenerationOptions)> = (0..8)
        .map(|i| {
            let prompt_len = 1 + numbers.below(40);
            let prompt = random_ids(&mut numbers, prompt_len, tokenizer.vocab_size());
            let sampling = SamplingParams {
                temperature: [0.0, 0.7, 1.0, 1.5][i % 4],
                top_k: [0, 40, 5][i % 3],
                top_p: [1.0, 0.9][i / 4],
                min_p: [0.0, 0.02][i / 2 % 2],
                repetition_penalty: [1.0, 1.0, 1.2, 1.0, 1.3][i % 5],
                presence_penalty: [0.0, 0.5][i / 3 % 2],
                frequency_penalty: [0.0, 0.0, 0.4][i % 3],
                ..SamplingParams::default()
            };
            let options = GenerationOptions {
                sampling: Arc::new(sampling),
                seed: numbers.bits(),
                max_tokens: Some(12 + numbers.below(12)),
                stop_ids: [].into(),
                vocabulary: tokenizer.vocab_size(),
                top_logprobs: None,
            };
            (prompt, options)
        })
        .collect();
    let alone: Vec<Vec<u32>> = requests
        .iter()
        .map(|(prompt, options)| tokens(&mut steps, prompt, options.clone()))
        .collect();

    let mut waiting: Vec<usize> = (0..requests.len()).rev().collect();
    let mut running: Vec<(usize, Slot)> = Vec::new();
    let mut done = 0;
    while done < requests.len() {
        while !waiting.is_empty() && (running.is_empty() || numbers.below(3) == 0) {
            let request = waiting.pop().unwrap();
            let (prompt, options) = requests[request].clone();
            let max_length = steps.limits().max_length;
            let generation =
                Generation::new(steps.new_sequence(), &prompt, options, max_length).unwrap();
            running.push((request, steps.admit(generation)));
        }
        if numbers.below(12) == 0 {
            let (_, slot) = running[numbers.below(running.len())];
            steps.get_mut(slot).unwrap().preempt();
        }
        let mut plan = Vec::new();
        for &(request, slot) in &running {
            let generation = steps.get(slot).unwrap();
            let ready = generation.ready_rows();
            if ready == 0 || numbers.below(4) == 0 {
                continue;
            }
            let rows = if ready > 1 && numbers.below(2) == 0 {
                1 + numbers.below(ready)
            } else {
                ready
            };
            let mut drafts = Vec::new();
            if generation.takes_drafts() && numbers.below(2) == 0 {
                // Right ones with a wrong one among them, sometimes.
                let from = generation.generated().len();
                let to = (from + numbers.below(5)).min(alone[request].len());
                drafts.extend(&alone[request][from..to]);
                if !drafts.is_empty() && numbers.below(2) == 0 {
                    let at = numbers.below(drafts.len());
                    drafts[at] = (drafts[at] + 1) % tokenizer.vocab_size() as u32;
                }
            }
            plan.push(Planned { slot, rows, drafts });
        }
        for advance in steps.advance(&plan).unwrap() {
            if advance.finish.is_some() {
                let index = running
                    .iter()
                    .position(|(_, slot)| *slot == advance.slot)
                    .unwrap();
                let (request, slot) = running.swap_remove(index);
                let generation = steps.remove(slot).unwrap();
                assert_eq!(
                    generation.generated(),
                    alone[request],
                    "{what}: request {request} in a crowd"
                );
                done += 1;
            }
        }
    }
    while steps.in_flight() > 0 {
        steps.advance(&[]).unwrap();
    }
    assert_eq!(
        steps.pool().free(),
        steps.pool().total(),
        "{what}: pages are missing"
    );

    for ((prompt, options), alone) in requests.iter().zip(&alone) {
        let sequence = steps.new_sequence();
        let mut streamed = String::new();
        let on_text = &mut |text: &str| {
            streamed += text;
            ControlFlow::Continue(())
        };
        let options = options.clone();
        let answer = answer(
            &mut steps,
            &tokenizer,
            sequence,
            prompt,
            options,
            &[],
            &mut |_| (),
            on_text,
        )
        .unwrap();
        let mut output = TextOutput::new(&tokenizer, &[]).unwrap();
        for &token in alone {
            output.push(token);
        }
        output.finish();
        assert_eq!(
            &answer.generated.tokens, alone,
            "{what}: tokens of streamed text"
        );
        assert_eq!(
            streamed,
            tokenizer.decode(alone, true),
            "{what}: streamed text"
        );
        assert_eq!(
            (answer.text.as_str(), output.text()),
            (streamed.as_str(), streamed.as_str()),
            "{what}"
        );
    }
    alone
}

/// The model of `dir`, its weights and its cache in int8 if that is asked for.
fn loaded<B: Backend>(backend: B, dir: &Path, int8: bool) -> ModelRunner<B> {
    let mut options = options();
    let mut quant = Quant::None;
    if int8 {
        let config = ModelConfig::from_dir(dir).unwrap();
        let mut numbers = Numbers::new(3);
        let width = config.num_kv_heads * config.head_dim;
        let layer = |_| (0..width).map(|_| numbers.normal(0.5).exp()).collect();
        let layers = (0..config.num_layers).map(layer).collect();
        options.int8_cache = Some(KeySmoothing::new(layers).unwrap());
        quant = Quant::Int8;
    }
    load_quantized(backend, dir, quant, &options)
}

fn options() -> RunnerOptions {
    RunnerOptions {
        page_size: PAGE_SIZE,
        pages: PAGES,
        max_rows: 320,
        max_spans: 10,
        taps: Vec::new(),
        int8_cache: None,
        graphs: true,
    }
}

fn random_ids(numbers: &mut Numbers, count: usize, vocabulary: usize) -> Vec<u32> {
    (0..count)
        .map(|_| numbers.below(vocabulary) as u32)
        .collect()
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|value| value.to_bits()).collect()
}

/// Panics, saying where, unless `found` is bit for bit the beginning of `expected`; positions from `start` on.
fn same(what: &str, start: usize, found: &[Vec<u32>], expected: &[Vec<u32>]) {
    assert!(
        !found.is_empty() && found.len() <= expected.len(),
        "{what}: {} rows",
        found.len()
    );
    for (i, (found, expected)) in found.iter().zip(expected).enumerate() {
        assert_eq!(
            found.len(),
            expected.len(),
            "{what}: position {}: another number of values",
            start + i
        );
        if let Some(at) = (0..found.len()).find(|&at| found[at] != expected[at]) {
            let (found, expected) = (f32::from_bits(found[at]), f32::from_bits(expected[at]));
            panic!(
                "{what}: position {}, value {at} is {found:?} and was {expected:?}",
                start + i
            );
        }
    }
}
