//! A backend with DFlash drafters against what the reference computed: hidden states, draft logits, and whole
//! generations round by round. The fixtures are described in `testdata/golden/dflash/README.md`.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::{Arc, Mutex};

use serde::Deserialize;

use super::assert_close;
use super::golden::{fixture, greedy, span};
use crate::Result;
use crate::backend::{Backend, ComputeType};
use crate::config::{DFlashConfig, ModelConfig};
use crate::engine::{Engine, EngineOptions, Event, Request, StepLoop};
use crate::generate::{Generated, generate};
use crate::kv::{PagePool, Sequence};
use crate::model::{DecoderLM, LoadOptions, load_dflash, load_dflash_between};
use crate::runner::{Batch, Block, ModelRunner, Rows, Runner, RunnerOptions, Want};
use crate::sampling::{Draw, RowSampler, SamplingParams};
use crate::spec::{Ask, DFlashProposer, Drafts, Proposer, Speculation};
use crate::weights::{Checkpoint, HostDFlash, HostModel, Weight};

/// The drafters in `testdata/golden/dflash/models`.
pub const DFLASH_DRAFTERS: [&str; 4] = [
    "qwen3-6l-dflash-b8",
    "qwen3-8l-dflash-b16",
    "qwen3-8l-dflash-swa-b8",
    "llama-6l-dflash-b8",
];

/// A drafter of random weights for a target of `target`, for benchmarks and tests: `layers` layers of the target's
/// shape, that read as many of the target's, evenly spread, and fill in blocks of `block_size` tokens.
pub fn random_dflash(
    target: &ModelConfig,
    layers: usize,
    block_size: usize,
    seed: u64,
) -> (DFlashConfig, HostDFlash) {
    let layers = layers.min(target.num_layers);
    let mut model = target.clone();
    model.layers.truncate(layers);
    model.num_layers = layers;
    // It stands between the target's embedding and head.
    let between = ModelConfig {
        vocab_size: 1,
        tie_word_embeddings: true,
        ..model.clone()
    };
    let host = HostModel::random(&between, seed);
    let (hidden, joined) = (target.hidden_size, layers * target.hidden_size);
    let std = (joined as f32).powf(-0.5);
    let config = DFlashConfig {
        causal: model
            .layers
            .iter()
            .map(|layer| layer.window.is_some())
            .collect(),
        model,
        block_size,
        mask_token: target.vocab_size as u32 - 1,
        num_target_layers: target.num_layers,
        target_layers: (0..layers)
            .map(|i| i * target.num_layers / layers)
            .collect(),
    };
    let host = HostDFlash {
        layers: host.layers,
        fc: Weight::random(hidden, joined, seed + 1, std),
        hidden_norm: vec![1.0; hidden],
        final_norm: host.final_norm,
    };
    (config, host)
}

#[derive(Deserialize)]
struct Expected {
    target: String,
    drafter: String,
    block_size: usize,
    acceptance_length_bf16: f64,
    contexts: Vec<Context>,
    runs: Vec<Run>,
    stop: Stop,
}

#[derive(Deserialize)]
struct Context {
    name: String,
    prompt_ids: Vec<u32>,
    anchor: u32,
    draft_ids: Vec<u32>,
    k3_draft_ids: Vec<u32>,
}

#[derive(Deserialize)]
struct Run {
    name: String,
    context: String,
    block_size: usize,
    max_new_tokens: usize,
    answer_ids: Vec<u32>,
    target_min_margin: f64,
    rounds: Vec<Round>,
}

#[derive(Deserialize)]
struct Round {
    start: usize,
    block: usize,
    anchor: u32,
    drafts: Vec<u32>,
    accepted: usize,
}

#[derive(Deserialize)]
struct Stop {
    run: String,
    stop_token_ids: Vec<u32>,
    answer_ids: Vec<u32>,
}

/// Positions of every sequence here.
const LENGTH: usize = 256;
/// One that a GPU's kernels are compiled for.
const PAGE_SIZE: usize = 4;

/// Holds a backend against the drafter `name` under `golden` (a folder with `models` and `expected`): in f32 hidden
/// states within half of `tolerance`, draft logits within `tolerance`, every draft and every round; in bf16 the
/// answers and how many drafts are accepted.
pub fn golden_dflash<B: Backend>(
    make: &dyn Fn(ComputeType) -> B,
    golden: &Path,
    name: &str,
    tolerance: f32,
) {
    let text = std::fs::read_to_string(golden.join(format!("expected/{name}.json"))).unwrap();
    let expected: Expected = serde_json::from_str(&text).unwrap();
    let fixtures =
        Checkpoint::open_file(golden.join(format!("expected/{name}.safetensors"))).unwrap();
    let load = |kind, max_rows| load(make(kind), golden, &expected, max_rows);

    let mut runner = load(ComputeType::F32, LENGTH);
    for context in &expected.contexts {
        first_blocks(&mut runner, context, &expected, &fixtures, tolerance);
    }
    for run in &expected.runs {
        rounds(&mut runner, run, &expected, &fixtures, tolerance);
    }
    answers(&expected, &|| load(ComputeType::F32, LENGTH));
    // The prompt in chunks, which end in the middle of pages.
    answers(&expected, &|| load(ComputeType::F32, 23));
    stops(&expected, load(ComputeType::F32, LENGTH));
    shared_beginnings(&expected, &|| load(ComputeType::F32, LENGTH));
    // Two steps in flight, each with drafts that nobody has read.
    shared_beginnings(&expected, &|| load(ComputeType::F32, 40));
    nearly_as_good_in_bf16(&expected, &|| load(ComputeType::Bf16, LENGTH));
}

fn load<B: Backend>(
    backend: B,
    golden: &Path,
    expected: &Expected,
    max_rows: usize,
) -> ModelRunner<B> {
    let dir = golden.join("models").join(&expected.target);
    let config = ModelConfig::from_dir(&dir).unwrap();
    let compute = backend.compute_type();
    let host = HostModel::load(&config, &Checkpoint::open(&dir).unwrap(), compute).unwrap();
    let max_length = LENGTH;
    let options = LoadOptions::new(max_length);
    let model = DecoderLM::load(&backend, &config, &host, &options, &mut |_, _| ()).unwrap();
    let dir = golden.join("models").join(&expected.drafter);
    // The two ways to load one.
    let drafter = if max_rows == LENGTH {
        load_dflash(&backend, &dir, &config, &model)
    } else {
        let (embedding, head) = (model.embedding.clone(), model.head.clone());
        load_dflash_between(&backend, &dir, &config, embedding, head, LENGTH)
    };
    let options = RunnerOptions {
        page_size: PAGE_SIZE,
        pages: 4 * LENGTH / PAGE_SIZE,
        max_rows,
        max_spans: 4,
        ..RunnerOptions::for_length(LENGTH)
    };
    let runner = ModelRunner::with_dflash(backend, model, drafter.unwrap(), &options).unwrap();
    // And one or two steps in flight.
    let runner = runner.with_depth(if max_rows == LENGTH { 1 } else { 2 });
    assert_eq!(runner.block_size(), Some(expected.block_size));
    runner
}

fn argmax(position: usize) -> RowSampler {
    RowSampler {
        params: Arc::new(SamplingParams::default()),
        counts: None,
        drafts: Vec::new(),
        mask: None,
        seed: 0,
        position: position as u64,
        vocabulary: usize::MAX,
        top_logprobs: None,
        draw: Draw::Token,
    }
}

/// The likeliest drafts after `sequence` and `anchor`, and their logits.
fn drafted<B: Backend>(
    runner: &mut ModelRunner<B>,
    sequence: &mut Sequence,
    anchor: u32,
    k: usize,
) -> (Vec<u32>, Vec<f32>) {
    let start = sequence.len();
    sequence.reserve(start, start + 1 + k).unwrap();
    let block = Block {
        anchor,
        start,
        table: sequence.table(),
        sample: (1..=k).map(|i| argmax(start + i)).collect(),
    };
    let sampled = runner.propose(&[block]).unwrap().remove(0);
    let tokens = sampled.iter().map(|sampled| sampled.token).collect();
    (tokens, runner.block_logits().unwrap())
}

/// A sequence with `ids` run, and what was wanted of them.
fn run_ids<B: Backend>(
    runner: &mut ModelRunner<B>,
    ids: &[u32],
    want: Want,
) -> (Sequence, Vec<f32>) {
    let mut sequence = Sequence::new(&PagePool::new(runner.limits().pages), PAGE_SIZE);
    let batch = Batch {
        spans: vec![span(&mut sequence, ids, want)],
        copies: Vec::new(),
    };
    let output = runner.step(&batch).unwrap().spans.remove(0);
    sequence.append(ids).unwrap();
    (sequence, output.taps)
}

/// Hidden states after a prompt, and the drafts of a whole block and of a short one.
fn first_blocks<B: Backend>(
    runner: &mut ModelRunner<B>,
    context: &Context,
    expected: &Expected,
    fixtures: &Checkpoint,
    tolerance: f32,
) {
    let what = format!("{}, {}", expected.drafter, context.name);
    let want = Want {
        rows: Rows::Last,
        taps: true,
        sample: vec![argmax(context.prompt_ids.len())],
        ..Want::default()
    };
    let (mut sequence, taps) = run_ids(runner, &context.prompt_ids, want);
    let features = fixture(fixtures, &format!("{}.features", context.name));
    let last = &taps[taps.len() - features.len()..];
    assert_close(
        &format!("{what}: features"),
        last,
        &features,
        tolerance / 2.0,
    );

    let width = runner.limits().head_rows;
    let k = expected.block_size - 1;
    for (k, ids, tensor) in [
        (k, &context.draft_ids, "draft_logits"),
        (3, &context.k3_draft_ids, "k3.draft_logits"),
        // And again: a short block leaves nothing behind, nor does a long one.
        (k, &context.draft_ids, "draft_logits"),
    ] {
        let (drafts, logits) = drafted(runner, &mut sequence, context.anchor, k);
        let exact = fixture(fixtures, &format!("{}.{tensor}", context.name));
        assert_close(
            &format!("{what}: {tensor}"),
            &logits,
            // The anchor's own row is not computed.
            &exact[width..],
            tolerance,
        );
        assert_eq!(&drafts, ids, "{what}");
    }
}

/// A generation round by round, the last short blocks included.
fn rounds<B: Backend>(
    runner: &mut ModelRunner<B>,
    run: &Run,
    expected: &Expected,
    fixtures: &Checkpoint,
    tolerance: f32,
) {
    let context = expected.contexts.iter().find(|c| c.name == run.context);
    let prompt = &context.unwrap().prompt_ids;
    let (mut sequence, _) = run_ids(runner, prompt, Want::default());
    let mut compared = 0;
    for (i, round) in run.rounds.iter().enumerate() {
        let what = format!("{}, {}, round {i}", expected.drafter, run.name);
        assert_eq!(sequence.len(), round.start, "{what}");
        if round.block > 1 {
            let (drafts, logits) = drafted(runner, &mut sequence, round.anchor, round.block - 1);
            let tensor = format!("{}.round{i}.draft_logits", run.name);
            if fixtures.tensor(&tensor).is_some() {
                assert_close(&what, &logits, &fixture(fixtures, &tensor), tolerance);
                compared += 1;
            }
            assert_eq!(drafts, round.drafts, "{what}");
        }
        let rows = [&[round.anchor][..], &round.drafts].concat();
        let start = sequence.len();
        let batch = Batch {
            spans: vec![span(&mut sequence, &rows, Want::default())],
            copies: Vec::new(),
        };
        runner.step(&batch).unwrap();
        sequence.append(&rows).unwrap();
        sequence.truncate(start + 1 + round.accepted);
    }
    assert!(compared > 0 || run.context != "c40", "{}", run.name);
}

/// Positions of anchors, and what was proposed after them.
type Proposed = Arc<Mutex<Vec<(usize, Vec<u32>)>>>;

/// [`DFlashProposer`] with what it proposed.
struct Recording {
    inner: DFlashProposer,
    proposed: Proposed,
}

impl Proposer for Recording {
    fn most(&self) -> usize {
        self.inner.most()
    }

    fn propose(&mut self, runner: &mut dyn Runner, asks: &[Ask<'_>]) -> Result<Vec<Drafts>> {
        let drafts = self.inner.propose(runner, asks)?;
        // Penalties aside, the loop verifies them without having read them.
        assert!(drafts.iter().all(|drafts| drafts.tokens.is_empty()));
        let starts = asks.iter().map(|ask| ask.tokens.len() - 1);
        let read = runner.read_drafts()?.into_iter();
        let tokens = read.map(|drafts| drafts.iter().map(|draft| draft.token).collect());
        let rounds = starts.zip(tokens);
        self.proposed.lock().unwrap().extend(rounds);
        Ok(drafts)
    }
}

fn speculating<B: Backend>(runner: ModelRunner<B>, k: Option<usize>) -> StepLoop {
    let proposer = DFlashProposer::new(&runner, k, false).unwrap();
    StepLoop::new(Box::new(runner)).with_speculation(Speculation::new(proposer))
}

fn answer(steps: &mut StepLoop, sequence: Sequence, prompt: &[u32], tokens: usize) -> Generated {
    let on_token = &mut |_: &_| ControlFlow::Continue(());
    generate(
        steps,
        sequence,
        prompt,
        greedy(tokens),
        &mut |_| ControlFlow::Continue(()),
        on_token,
    )
    .unwrap()
}

/// The same generations by the decode loop: every round with a whole block, and the answer.
fn answers<B: Backend>(expected: &Expected, load: &dyn Fn() -> ModelRunner<B>) {
    let mut accepted = 0;
    for run in &expected.runs {
        let what = format!("{}, {}", expected.drafter, run.name);
        let context = expected.contexts.iter().find(|c| c.name == run.context);
        let prompt = &context.unwrap().prompt_ids;
        let runner = load();
        let proposed = Proposed::default();
        let inner = DFlashProposer::new(&runner, Some(run.block_size - 1), false).unwrap();
        let recording = Recording {
            inner,
            proposed: proposed.clone(),
        };
        let mut steps =
            StepLoop::new(Box::new(runner)).with_speculation(Speculation::new(recording));
        let sequence = steps.new_sequence();
        let generated = answer(&mut steps, sequence, prompt, run.max_new_tokens);
        assert_eq!(generated.tokens, run.answer_ids, "{what}");
        let whole = run
            .rounds
            .iter()
            .filter(|round| round.start - prompt.len() + run.block_size < run.max_new_tokens);
        let whole: Vec<(usize, Vec<u32>)> = whole
            .map(|round| (round.start, round.drafts.clone()))
            .collect();
        assert!(!whole.is_empty());
        // The loop drafts behind a prompt's last token too, where that is all there is to run.
        let mut proposed = proposed.lock().unwrap().clone();
        proposed.retain(|(start, _)| *start >= prompt.len());
        assert_eq!(proposed[..whole.len()], whole, "{what}");
        accepted += generated.stats.spec.unwrap().accepted;
    }
    assert!(accepted > 100, "{}: {accepted}", expected.drafter);
}

/// A stop token among accepted drafts.
fn stops<B: Backend>(expected: &Expected, runner: ModelRunner<B>) {
    let Stop {
        run,
        stop_token_ids,
        answer_ids,
    } = &expected.stop;
    let run = expected.runs.iter().find(|r| r.name == *run).unwrap();
    let context = expected.contexts.iter().find(|c| c.name == run.context);
    let mut steps = speculating(runner, Some(run.block_size - 1));
    let mut options = greedy(run.max_new_tokens);
    options.stop_ids = stop_token_ids.as_slice().into();
    let sequence = steps.new_sequence();
    let prompt = &context.unwrap().prompt_ids;
    let on_token = &mut |_: &_| ControlFlow::Continue(());
    let generated = generate(
        &mut steps,
        sequence,
        prompt,
        options,
        &mut |_| ControlFlow::Continue(()),
        on_token,
    );
    assert_eq!(
        &generated.unwrap().tokens,
        answer_ids,
        "{}",
        expected.drafter
    );
}

/// What is cached of a text is cached for the drafter too: after a fork, a rewind, and in an engine.
fn shared_beginnings<B: Backend>(expected: &Expected, load: &dyn Fn() -> ModelRunner<B>) {
    let what = &expected.drafter;
    let run = expected
        .runs
        .iter()
        .find(|run| run.name.starts_with("c130.b"))
        .unwrap();
    let prompt = &expected
        .contexts
        .iter()
        .find(|c| c.name == run.context)
        .unwrap()
        .prompt_ids;
    let tokens = run.max_new_tokens;
    let mut steps = speculating(load(), None);
    let sequence = steps.new_sequence();
    let first = answer(&mut steps, sequence, prompt, tokens);
    let fork = first.sequence.fork();
    let again = answer(&mut steps, first.sequence, prompt, tokens);
    let forked = answer(&mut steps, fork, prompt, tokens);
    for later in [&again, &forked] {
        assert_eq!(later.tokens, run.answer_ids, "{what}");
        assert!(later.stats.cached_tokens > 100);
        // One round earlier, as only the prompt's last token had to run: no more of them, then.
        let (ours, before) = (later.stats.spec.unwrap(), first.stats.spec.unwrap());
        assert!(ours.steps <= before.steps, "{what}: {ours:?}, {before:?}");
        assert!(ours.accepted >= before.accepted, "{what}");
    }
    drop((again, forked));

    // Several at once, some of whose beginnings are found again.
    let engine = Engine::start(steps, None, EngineOptions::default()).unwrap();
    for _ in 0..2 {
        let mut asked = Vec::new();
        for run in &expected.runs[..4] {
            let context = expected.contexts.iter().find(|c| c.name == run.context);
            let (sender, events) = std::sync::mpsc::channel();
            let request = Request {
                prompt: context.unwrap().prompt_ids.clone(),
                options: greedy(tokens),
                stop_strings: Vec::new(),
                skip_special: true,
                constraint: None,
                on_event: Box::new(move |event| sender.send(event).is_ok()),
            };
            asked.push((engine.submit(request).unwrap(), events, run));
        }
        for (_handle, events, run) in asked {
            let mut tokens = Vec::new();
            for event in events {
                if let Event::Tokens { tokens: more, .. } = event {
                    tokens.extend(more.iter().map(|sampled| sampled.token));
                }
            }
            assert_eq!(tokens, run.answer_ids, "{what}, {}", run.name);
        }
    }
    assert!(engine.when_idle().unwrap().is_whole());
    assert!(engine.metrics().snapshot().accepted_tokens > 0);
}

fn nearly_as_good_in_bf16<B: Backend>(expected: &Expected, load: &dyn Fn() -> ModelRunner<B>) {
    let (mut emitted, mut steps_taken) = (0, 0);
    let whole = expected
        .runs
        .iter()
        .filter(|run| run.block_size == expected.block_size);
    for run in whole {
        let mut steps = speculating(load(), None);
        let context = expected.contexts.iter().find(|c| c.name == run.context);
        let sequence = steps.new_sequence();
        let prompt = &context.unwrap().prompt_ids;
        let generated = answer(&mut steps, sequence, prompt, run.max_new_tokens);
        if run.target_min_margin > 0.1 {
            assert_eq!(generated.tokens, run.answer_ids, "{}", run.name);
        }
        let stats = generated.stats.spec.unwrap();
        emitted += stats.accepted + stats.steps;
        steps_taken += stats.steps;
    }
    let found = emitted as f64 / steps_taken as f64;
    let wanted = expected.acceptance_length_bf16;
    assert!(
        (found - wanted).abs() < 0.12 * wanted,
        "{}: {found} tokens a round, the reference's bf16 has {wanted}",
        expected.drafter
    );
}
