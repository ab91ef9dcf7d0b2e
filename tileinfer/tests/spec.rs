//! Speculation loses nothing: whoever proposes whatever, the tokens are those of plain decoding, or, where drafts
//! are drawn, follow the same distribution; and a text that drafts do not pay for is hardly slower.

use std::collections::HashMap;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::mpsc::channel;
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use serde_json::Value;
use tileinfer::backend::{ComputeType, ReferenceBackend};
use tileinfer::config::ModelConfig;
use tileinfer::engine::{
    Ended, Engine, EngineOptions, Event, FinishReason, GenerationOptions, Request, StepLoop,
};
use tileinfer::generate::{Generated, answer, generate};
use tileinfer::kv::{BlockTable, PagePool, Sequence};
use tileinfer::model::{DFlashDrafter, DecoderLM, LoadOptions};
use tileinfer::runner::{
    Batch, Block, FakeOptions, FakeRunner, Input, ModelRunner, Rows, Runner, RunnerLimits,
    RunnerOptions, Span, StepOutput, Ticket, Want,
};
use tileinfer::sampling::{
    Distribution, Draw, RowSampler, SampleRow, Sampled, SamplingParams, Scratch, TokenCounts,
    distribution,
};
use tileinfer::spec::{
    Ask, DFlashProposer, DraftProposer, Drafts, NgramProposer, Proposer, Speculation,
    check_vocabulary,
};
use tileinfer::testing::{Numbers, random_dflash};
use tileinfer::tokenizer::Tokenizer;
use tileinfer::weights::HostModel;
use tileinfer::{ErrorKind, Result};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden")
}

fn options(sampling: SamplingParams, seed: u64, max_tokens: usize) -> GenerationOptions {
    GenerationOptions {
        sampling: Arc::new(sampling),
        seed,
        max_tokens: Some(max_tokens),
        stop_ids: Arc::default(),
        vocabulary: usize::MAX,
        top_logprobs: None,
    }
}

fn random_ids(numbers: &mut Numbers, count: usize, vocabulary: usize) -> Vec<u32> {
    (0..count)
        .map(|_| numbers.below(vocabulary) as u32)
        .collect()
}

fn run(steps: &mut StepLoop, prompt: &[u32], options: &GenerationOptions) -> Generated {
    let sequence = steps.new_sequence();
    let on_token = &mut |_: &_| ControlFlow::Continue(());
    let generated = generate(
        steps,
        sequence,
        prompt,
        options.clone(),
        &mut |_| ControlFlow::Continue(()),
        on_token,
    );
    generated.unwrap()
}

#[test]
fn ngrams_are_looked_up_as_the_reference_does() {
    let path = golden().join("ngram/cases.json");
    let golden: Value = serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap();
    let cases = golden["cases"].as_array().unwrap();
    assert!(cases.len() > 20);
    for case in cases {
        let ids = |name: &str| -> Vec<u32> {
            let ids = case[name].as_array().unwrap().iter();
            ids.map(|id| id.as_u64().unwrap() as u32).collect()
        };
        let number = |name: &str| case[name].as_u64().unwrap() as usize;
        let (k, max, min) = (number("k"), number("max_ngram"), number("min_ngram"));
        let mut proposer = NgramProposer::new(k, max, min).unwrap();
        let tokens = ids("tokens");
        assert_eq!(
            proposer.propose_after(1, &tokens, k),
            ids("proposal"),
            "{}",
            case["name"]
        );
        // And when it has seen the text grow.
        for len in 0..=tokens.len() {
            proposer.propose_after(2, &tokens[..len], k);
        }
        assert_eq!(proposer.propose_after(2, &tokens, k), ids("proposal"));
    }
    for (max, min) in [(3, 0), (1, 2)] {
        let error = NgramProposer::new(4, max, min).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    }
}

/// The rule in its plainest form.
fn looked_up(tokens: &[u32], k: usize, max: usize, min: usize) -> Vec<u32> {
    for n in (min..=max).rev().filter(|&n| n < tokens.len()) {
        let last = &tokens[tokens.len() - n..];
        let place = (0..tokens.len() - n)
            .rev()
            .find(|&i| &tokens[i..i + n] == last);
        if let Some(place) = place {
            return tokens[place + n..].iter().copied().take(k).collect();
        }
    }
    Vec::new()
}

/// The least of three times that `body` takes.
fn least(mut body: impl FnMut()) -> Duration {
    let once = || {
        let start = Instant::now();
        body();
        start.elapsed()
    };
    std::iter::repeat_with(once)
        .take(3)
        .min()
        .unwrap_or_default()
}

#[test]
fn a_long_prompt_is_read_once() {
    const PROMPT: usize = 100_000;
    const ANSWER: usize = 4000;
    // Words as often as in a language: a few make up most of a text.
    let mut numbers = Numbers::new(7);
    let mut word = || (32_000f32.powf(numbers.below(1 << 16) as f32 / 65536.0) - 1.0) as u32;
    let text: Vec<u32> = (0..PROMPT + ANSWER).map(|_| word()).collect();
    let read = || {
        let mut proposer = NgramProposer::new(8, 3, 1).unwrap();
        proposer.propose_after(1, &text[..PROMPT], 8);
        proposer
    };
    let whole = least(|| drop(read()));
    let mut found = 0;
    let answer = least(|| {
        let mut proposer = read();
        for end in PROMPT..PROMPT + ANSWER {
            found += proposer.propose_after(1, &text[..end], 8).len();
        }
    });
    assert!(found > ANSWER);
    let scan = least(|| drop(looked_up(&text[..PROMPT], 8, 3, 1)));
    println!(
        "{PROMPT} tokens: read in {whole:?}, with {ANSWER} tokens after in {answer:?}; a search takes {scan:?}"
    );
    // Reading the prompt costs less than a hundred searches, and a token more next to nothing.
    assert!(whole < 100 * scan, "{whole:?}, {scan:?} a search");
    assert!(
        answer < scan * ANSWER as u32 / 4,
        "{answer:?}, {scan:?} a search"
    );
}

#[test]
fn an_index_that_grows_with_the_text_finds_what_a_search_finds() {
    let mut numbers = Numbers::new(3);
    let mut proposer = NgramProposer::new(5, 4, 2).unwrap();
    for id in 0..60 {
        let vocabulary = 2 + numbers.below(6);
        let mut tokens = Vec::new();
        for _ in 0..60 {
            let more = 1 + numbers.below(4);
            tokens.extend(random_ids(&mut numbers, more, vocabulary));
            let found = proposer.propose_after(id, &tokens, 5);
            assert_eq!(found, looked_up(&tokens, 5, 4, 2), "{tokens:?}");
        }
        // A text that was cut is another one.
        tokens.truncate(tokens.len() / 2);
        tokens.extend(random_ids(&mut numbers, 3, vocabulary));
        assert_eq!(
            proposer.propose_after(id, &tokens, 5),
            looked_up(&tokens, 5, 4, 2)
        );
        proposer.forget(id);
    }
}

/// Says what the answer is, and lies about some of it.
struct Teller {
    answers: HashMap<Vec<u32>, Vec<u32>>,
    k: usize,
    numbers: Numbers,
    /// One token in so many is wrong; 0: none.
    wrong: usize,
    vocabulary: usize,
}

impl Proposer for Teller {
    fn most(&self) -> usize {
        self.k
    }

    fn propose(&mut self, _: &mut dyn Runner, asks: &[Ask<'_>]) -> Result<Vec<Drafts>> {
        let mut drafts = Vec::new();
        for ask in asks {
            let answer = self
                .answers
                .iter()
                .find_map(|(prompt, answer)| {
                    let generated = ask.tokens.strip_prefix(&prompt[..])?;
                    answer.strip_prefix(generated)
                })
                .expect("a text that is no answer so far");
            let mut tokens: Vec<u32> = answer.iter().copied().take(ask.most).collect();
            // Some rounds have fewer drafts than were wanted, some go on after the answer.
            let count = self.numbers.below(ask.most + 1);
            tokens.resize(count, 0);
            for token in &mut tokens {
                if self.wrong > 0 && self.numbers.below(self.wrong) == 0 {
                    *token = self.numbers.below(self.vocabulary) as u32;
                }
            }
            drafts.push(Drafts {
                tokens,
                ..Drafts::default()
            });
        }
        Ok(drafts)
    }
}

fn any_fake(numbers: &mut Numbers) -> FakeOptions {
    FakeOptions {
        vocabulary: 24,
        max_length: 60,
        page_size: [1, 4, 7][numbers.below(3)],
        max_rows: [8, 32][numbers.below(2)],
        // Few tokens in sight make a text that repeats itself.
        window: [None, Some(1), Some(2)][numbers.below(3)],
        depth: 1 + numbers.below(2),
        block_size: 2 + numbers.below(6),
        drafter_blur: [0.0, 0.2, 1.0][numbers.below(3)],
        ..FakeOptions::default()
    }
}

fn any_sampling(numbers: &mut Numbers) -> SamplingParams {
    let penalties = numbers.below(3) == 0;
    SamplingParams {
        temperature: [0.0, 0.3, 1.2][numbers.below(3)],
        top_k: [0, 0, 7][numbers.below(3)],
        top_p: [1.0, 0.9][numbers.below(2)],
        min_p: [0.0, 0.05][numbers.below(2)],
        repetition_penalty: if penalties { 1.3 } else { 1.0 },
        frequency_penalty: if penalties { 0.5 } else { 0.0 },
        logit_bias: [vec![], vec![(3, 1.5)]][numbers.below(2)].clone(),
        ..SamplingParams::default()
    }
}

fn any_request(numbers: &mut Numbers, fake: &FakeOptions) -> (Vec<u32>, GenerationOptions) {
    let len = 1 + numbers.below(fake.max_length / 2);
    let prompt = random_ids(numbers, len, fake.vocabulary);
    let sampling = any_sampling(numbers);
    let mut options = options(sampling, numbers.bits(), 1 + numbers.below(40));
    options.vocabulary = fake.vocabulary;
    let stops = numbers.below(3);
    options.stop_ids = random_ids(numbers, stops, fake.vocabulary).into();
    (prompt, options)
}

fn draft_model(numbers: &mut Numbers, fake: &FakeOptions) -> DraftProposer {
    let draft = FakeOptions {
        blur: [0.0, 0.2, 1.0][numbers.below(3)],
        depth: 1,
        page_size: 3,
        pages: [20, 200][numbers.below(2)],
        max_rows: 8,
        max_length: [fake.max_length, 40][numbers.below(2)],
        ..fake.clone()
    };
    DraftProposer::new(
        Box::new(FakeRunner::new(&draft)),
        1 + numbers.below(6),
        false,
    )
    .unwrap()
}

fn any_speculation(
    numbers: &mut Numbers,
    fake: &FakeOptions,
    answers: HashMap<Vec<u32>, Vec<u32>>,
) -> Speculation {
    let speculation = match numbers.below(4) {
        0 => Speculation::new(NgramProposer::new(1 + numbers.below(6), 3, 1).unwrap()),
        1 => Speculation::new(draft_model(numbers, fake)),
        2 => {
            let k = 1 + numbers.below(fake.block_size - 1);
            Speculation::new(DFlashProposer::new(&FakeRunner::new(fake), Some(k), false).unwrap())
        }
        _ => Speculation::new(Teller {
            answers,
            k: 1 + numbers.below(9),
            wrong: numbers.below(5),
            vocabulary: fake.vocabulary,
            numbers: Numbers::new(numbers.bits()),
        }),
    };
    match numbers.below(2) {
        0 => speculation.adapting(),
        _ => speculation,
    }
}

#[test]
fn no_draft_changes_a_token() {
    let (mut accepted, mut rejected) = (0, 0);
    for seed in 0..800 {
        let mut numbers = Numbers::new(seed);
        let fake = any_fake(&mut numbers);
        let (prompt, options) = any_request(&mut numbers, &fake);
        let mut plain_loop = StepLoop::new(Box::new(FakeRunner::new(&fake)));
        let plain = run(&mut plain_loop, &prompt, &options);
        assert_eq!(plain.stats.spec, None);

        let answers = HashMap::from([(prompt.clone(), plain.tokens.clone())]);
        let speculation = any_speculation(&mut numbers, &fake, answers);
        // From just enough pages to many.
        let needed = (prompt.len() + plain.tokens.len()).div_ceil(fake.page_size);
        let fake = FakeOptions {
            pages: needed + numbers.below(3),
            ..fake
        };
        let what = format!("seed {seed}, {fake:?}, {speculation:?}, {options:?}");
        let mut steps =
            StepLoop::new(Box::new(FakeRunner::new(&fake))).with_speculation(speculation);
        let found = run(&mut steps, &prompt, &options);
        assert_eq!(found.tokens, plain.tokens, "{what}");
        assert_eq!(
            (found.finish, found.context_full),
            (plain.finish, plain.context_full)
        );
        assert_eq!(found.sequence.tokens(), plain.sequence.tokens(), "{what}");
        let stats = found.stats.spec.unwrap();
        assert!(stats.accepted <= stats.drafted && stats.steps <= stats.drafted);
        assert!(stats.accepted + stats.steps <= found.tokens.len(), "{what}");
        accepted += stats.accepted;
        rejected += stats.drafted - stats.accepted;
        drop(found);
        assert_eq!(steps.pool().free(), fake.pages, "{what}");
    }
    assert!(accepted > 1000 && rejected > 1000, "{accepted}, {rejected}");
}

#[test]
fn a_crowd_answers_as_each_alone_does() {
    let mut accepted = 0;
    for seed in 0..80 {
        let mut numbers = Numbers::new(1000 + seed);
        let fake = any_fake(&mut numbers);
        let requests: Vec<_> = (0..8).map(|_| any_request(&mut numbers, &fake)).collect();
        let mut alone = StepLoop::new(Box::new(FakeRunner::new(&fake)));
        let expected: Vec<_> = requests
            .iter()
            .map(|(prompt, options)| run(&mut alone, prompt, options).tokens)
            .collect();
        let prompts = requests.iter().map(|(prompt, _)| prompt.clone());
        let answers: HashMap<_, _> = prompts.zip(expected.iter().cloned()).collect();
        // Two requests with one prompt may have two answers.
        if answers.len() < requests.len() {
            continue;
        }
        let one = fake.max_length.div_ceil(fake.page_size);
        let speculation = any_speculation(&mut numbers, &fake, answers);
        let fake = FakeOptions {
            pages: one + numbers.below(3 * one),
            max_spans: 4,
            ..fake
        };
        let steps = StepLoop::new(Box::new(FakeRunner::new(&fake))).with_speculation(speculation);
        let engine = Engine::start(steps, None, EngineOptions::default()).unwrap();
        let mut asked = Vec::new();
        for (prompt, options) in &requests {
            let (sender, events) = channel();
            let request = Request {
                prompt: prompt.clone(),
                options: options.clone(),
                stop_strings: Vec::new(),
                skip_special: true,
                constraint: None,
                on_event: Box::new(move |event| sender.send(event).is_ok()),
            };
            asked.push((engine.submit(request).unwrap(), events));
        }
        for (i, (_handle, events)) in asked.iter().enumerate() {
            let mut tokens = Vec::new();
            for event in events {
                match event {
                    Event::Started { .. } => {}
                    Event::Tokens { tokens: more, .. } => {
                        tokens.extend(more.iter().map(|sampled| sampled.token));
                    }
                    Event::End(Ended::Finished(finished)) => {
                        accepted += finished.spec.unwrap().accepted;
                    }
                    Event::End(other) => panic!("seed {seed}: {other:?}"),
                }
            }
            assert_eq!(tokens, expected[i], "seed {seed}, request {i}, {fake:?}");
        }
        let report = engine.when_idle().unwrap();
        assert!(report.is_whole(), "seed {seed}: {report:?}");
        let metrics = engine.metrics().snapshot();
        assert!(metrics.accepted_tokens <= metrics.drafted_tokens);
    }
    assert!(accepted > 500, "{accepted}");
}

/// What a runner is asked, in order.
type Calls = Arc<Mutex<Vec<&'static str>>>;

/// A runner with a list of what it was asked.
struct Watched {
    inner: FakeRunner,
    calls: Calls,
}

impl Watched {
    fn note(&self, call: &'static str) {
        self.calls.lock().unwrap().push(call);
    }
}

impl Runner for Watched {
    fn device(&self) -> String {
        self.inner.device()
    }

    fn limits(&self) -> &RunnerLimits {
        self.inner.limits()
    }

    fn launch(&mut self, batch: &Batch) -> Result<Ticket> {
        self.note("launch");
        self.inner.launch(batch)
    }

    fn read(&mut self, ticket: Ticket) -> Result<StepOutput> {
        self.note("read");
        self.inner.read(ticket)
    }

    fn block_size(&self) -> Option<usize> {
        self.inner.block_size()
    }

    fn draft(&mut self, blocks: &[Block]) -> Result<()> {
        self.note("draft");
        self.inner.draft(blocks)
    }

    fn read_drafts(&mut self) -> Result<Vec<Vec<Sampled>>> {
        self.note("read drafts");
        self.inner.read_drafts()
    }
}

#[test]
fn a_round_waits_for_the_device_once() {
    let penalties = SamplingParams {
        temperature: 0.3,
        presence_penalty: 0.5,
        ..SamplingParams::default()
    };
    let drawn = SamplingParams {
        temperature: 0.3,
        ..SamplingParams::default()
    };
    for depth in [1, 2] {
        // Who has to know the drafts before they are verified: whoever counts tokens, and the p/q rule.
        for (params, sample, knows) in [
            (SamplingParams::default(), true, false),
            (drawn.clone(), false, false),
            (drawn.clone(), true, true),
            (penalties.clone(), false, true),
        ] {
            let fake = FakeOptions {
                vocabulary: 12,
                block_size: 6,
                drafter_blur: 0.05,
                depth,
                ..FakeOptions::default()
            };
            let calls = Calls::default();
            let runner = Watched {
                inner: FakeRunner::new(&fake),
                calls: calls.clone(),
            };
            let proposer = DFlashProposer::new(&runner, None, sample).unwrap();
            let mut steps =
                StepLoop::new(Box::new(runner)).with_speculation(Speculation::new(proposer));
            let options = options(params, 3, 60);
            let found = run(&mut steps, &[1, 2, 3], &options);
            let plain = run(
                &mut StepLoop::new(Box::new(FakeRunner::new(&fake))),
                &[1, 2, 3],
                &options,
            );
            if !(sample && knows) {
                assert_eq!(found.tokens, plain.tokens);
            }
            let stats = found.stats.spec.unwrap();
            assert!(
                stats.accepted > 10 && stats.accepted < stats.drafted,
                "{stats:?}"
            );
            let calls = calls.lock().unwrap();
            let rounds: Vec<_> = calls.split(|&call| call == "draft").skip(1).collect();
            assert!(rounds.len() >= stats.steps && stats.steps > 5);
            let round: &[_] = match knows {
                true => &["read drafts", "launch", "read"],
                false => &["launch", "read"],
            };
            // The last token may have no room for drafts behind it.
            for calls in &rounds[..rounds.len() - 1] {
                assert_eq!(calls, &round, "depth {depth}, {options:?}");
            }
        }
    }
}

/// The distribution of the token after `tokens`, of which the first `prompt` were read.
fn next_token(
    runner: &mut dyn Runner,
    tokens: &[u32],
    prompt: usize,
    params: &SamplingParams,
) -> Distribution {
    let (pages, page_size) = (runner.limits().pages, runner.limits().kv.page_size);
    let mut sequence = Sequence::new(&PagePool::new(pages), page_size);
    sequence.reserve(0, tokens.len()).unwrap();
    let want = Want {
        rows: Rows::Last,
        logits: true,
        ..Want::default()
    };
    let span = Span {
        input: Input::Ids(tokens.to_vec()),
        start: 0,
        table: sequence.table(),
        want,
    };
    let batch = Batch {
        spans: vec![span],
        copies: Vec::new(),
    };
    let logits = runner.step(&batch).unwrap().spans.remove(0).logits;
    let mut counts = TokenCounts::new(&tokens[..prompt]);
    tokens[prompt..]
        .iter()
        .for_each(|&token| counts.push_output(token));
    let mut row = SampleRow::new(params, 0, 0);
    row.counts = Some(&counts);
    distribution(&row, &logits, &mut Scratch::default()).unwrap()
}

/// The probability of every continuation of `length` tokens.
fn law(
    runner: &mut dyn Runner,
    prompt: &[u32],
    params: &SamplingParams,
    length: usize,
) -> HashMap<Vec<u32>, f64> {
    let mut all = HashMap::from([(Vec::new(), 1.0)]);
    for _ in 0..length {
        let mut longer = HashMap::new();
        for (tokens, probability) in all {
            let text = [prompt, &tokens].concat();
            let next = next_token(runner, &text, prompt.len(), params);
            for (&id, &p) in next.ids.iter().zip(&next.probs) {
                let tokens = [&tokens[..], &[id]].concat();
                longer.insert(tokens, probability * f64::from(p));
            }
        }
        all = longer;
    }
    all
}

/// How far counts are from a law, in standard deviations of the chi-square statistic; rare ones together.
fn distance(counts: &HashMap<Vec<u32>, u32>, law: &HashMap<Vec<u32>, f64>, rounds: u32) -> f64 {
    let (mut statistic, mut cells) = (0.0, 0);
    let mut rare = (0.0, 0.0);
    let mut cell = |found: f64, expected: f64| {
        statistic += (found - expected).powi(2) / expected;
        cells += 1;
    };
    for (tokens, probability) in law {
        let expected = probability * f64::from(rounds);
        let found = f64::from(counts.get(tokens).copied().unwrap_or(0));
        if expected < 8.0 {
            rare = (rare.0 + found, rare.1 + expected);
        } else {
            cell(found, expected);
        }
    }
    if rare.1 > 8.0 {
        cell(rare.0, rare.1);
    }
    let impossible = counts.keys().any(|tokens| !law.contains_key(tokens));
    if impossible {
        return f64::INFINITY;
    }
    let freedom = f64::from(cells - 1);
    (statistic - freedom) / (2.0 * freedom).sqrt()
}

/// Tokens of the texts whose law is known.
const LENGTH: usize = 4;

/// How often each text of [`LENGTH`] tokens comes after `prompt`, and that drafts are accepted and refused.
fn drawn(
    steps: &mut StepLoop,
    prompt: &[u32],
    params: &SamplingParams,
    rounds: u32,
) -> HashMap<Vec<u32>, u32> {
    let mut counts = HashMap::new();
    let (mut drafted, mut accepted) = (0, 0);
    for seed in 0..rounds {
        // One token more, so that three drafts are worth verifying after the first.
        let options = options(params.clone(), u64::from(seed), LENGTH + 1);
        let mut generated = run(steps, prompt, &options);
        generated.tokens.truncate(LENGTH);
        *counts.entry(generated.tokens).or_insert(0) += 1;
        let stats = generated.stats.spec.unwrap();
        drafted += stats.drafted;
        accepted += stats.accepted;
    }
    assert!(
        accepted > drafted / 5 && drafted > accepted + rounds as usize / 5,
        "{params:?}: {accepted} of {drafted}"
    );
    counts
}

/// Parameters of every kind, and all kinds together.
fn every_sampling() -> [SamplingParams; 7] {
    let plain = SamplingParams {
        temperature: 2.0,
        ..SamplingParams::default()
    };
    [
        plain.clone(),
        SamplingParams {
            top_k: 3,
            ..plain.clone()
        },
        SamplingParams {
            top_p: 0.7,
            ..plain.clone()
        },
        SamplingParams {
            min_p: 0.2,
            ..plain.clone()
        },
        SamplingParams {
            repetition_penalty: 1.8,
            presence_penalty: 0.7,
            frequency_penalty: -0.9,
            ..plain.clone()
        },
        SamplingParams {
            logit_bias: vec![(1, 3.0), (4, -2.0)],
            ..plain.clone()
        },
        SamplingParams {
            temperature: 1.2,
            top_k: 5,
            top_p: 0.9,
            min_p: 0.05,
            repetition_penalty: 1.3,
            presence_penalty: 0.4,
            frequency_penalty: 0.5,
            logit_bias: vec![(2, 1.0)],
        },
    ]
}

#[test]
fn drawn_drafts_leave_the_distribution_as_it_is() {
    const ROUNDS: u32 = 5000;
    let fake = FakeOptions {
        vocabulary: 6,
        pages: 32,
        ..FakeOptions::default()
    };
    let blurred = FakeOptions {
        blur: 0.35,
        ..fake.clone()
    };
    let prompt = [3, 1, 1, 5, 0];
    for params in every_sampling() {
        let draft = DraftProposer::new(Box::new(FakeRunner::new(&blurred)), 3, true).unwrap();
        let mut steps = StepLoop::new(Box::new(FakeRunner::new(&fake)))
            .with_speculation(Speculation::new(draft));
        let counts = drawn(&mut steps, &prompt, &params, ROUNDS);
        let law = |fake| law(&mut FakeRunner::new(fake), &prompt, &params, LENGTH);
        let ours = distance(&counts, &law(&fake), ROUNDS);
        assert!(ours < 4.0, "{params:?}: {ours}");
        // The draft model's own law is another one, so this would show.
        let theirs = distance(&counts, &law(&blurred), ROUNDS);
        assert!(theirs > 30.0, "{params:?}: {theirs}");
    }
}

/// Six tokens, two layers: small enough that the probability of every short text can be computed.
const TINY: &str = r#"{
    "model_type": "qwen3", "vocab_size": 6, "hidden_size": 8, "intermediate_size": 16, "num_hidden_layers": 2,
    "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
    "max_position_embeddings": 32, "tie_word_embeddings": false, "hidden_act": "silu"
}"#;

#[test]
fn drafts_drawn_by_dflash_leave_the_distribution_as_it_is() {
    const ROUNDS: u32 = 3000;
    let config = ModelConfig::from_json(TINY, "tiny").unwrap();
    let host = HostModel::random(&config, 3);
    let (dflash, weights) = random_dflash(&config, 2, 5, 4);
    let runner = || {
        let backend = ReferenceBackend::new(ComputeType::F32);
        let load = LoadOptions::new(32);
        let model = DecoderLM::load(&backend, &config, &host, &load, &mut |_, _| ()).unwrap();
        let (embedding, head) = (model.embedding.clone(), model.head.clone());
        let drafter = DFlashDrafter::load(
            &backend,
            dflash.clone(),
            &weights,
            &config,
            embedding,
            head,
            32,
        );
        let options = RunnerOptions::for_length(32);
        ModelRunner::with_dflash(backend, model, drafter.unwrap(), &options).unwrap()
    };
    let prompt = [3, 1, 1, 5, 0];
    for params in every_sampling() {
        let runner = runner();
        let proposer = DFlashProposer::new(&runner, Some(3), true).unwrap();
        let mut steps =
            StepLoop::new(Box::new(runner)).with_speculation(Speculation::new(proposer));
        let counts = drawn(&mut steps, &prompt, &params, ROUNDS);
        steps.set_speculation(None);
        let law = law(steps.runner().unwrap(), &prompt, &params, LENGTH);
        let ours = distance(&counts, &law, ROUNDS);
        assert!(ours < 4.0, "{params:?}: {ours}");
        // Of another law, this would show: with any other bias.
        let other = SamplingParams {
            logit_bias: vec![(2, 1.0), (0, 3.0)],
            ..params.clone()
        };
        let other = self::law(steps.runner().unwrap(), &prompt, &other, LENGTH);
        let theirs = distance(&counts, &other, ROUNDS);
        assert!(theirs > 30.0, "{params:?}: {theirs}");
    }
}

#[test]
fn drawn_drafts_of_a_greedy_text_change_no_token() {
    let fake = FakeOptions {
        vocabulary: 24,
        ..FakeOptions::default()
    };
    let blurred = FakeOptions {
        blur: 0.2,
        ..fake.clone()
    };
    let options = options(SamplingParams::default(), 0, 50);
    let plain = run(
        &mut StepLoop::new(Box::new(FakeRunner::new(&fake))),
        &[1, 2],
        &options,
    );
    let draft = DraftProposer::new(Box::new(FakeRunner::new(&blurred)), 4, true).unwrap();
    let mut steps =
        StepLoop::new(Box::new(FakeRunner::new(&fake))).with_speculation(Speculation::new(draft));
    assert_eq!(run(&mut steps, &[1, 2], &options).tokens, plain.tokens);
}

#[test]
fn a_stop_string_among_accepted_drafts_ends_the_answer_there() {
    let tokenizer = Tokenizer::from_dir(&golden().join("models/qwen3")).unwrap();
    let fake = FakeOptions {
        vocabulary: tokenizer.vocab_size(),
        ..FakeOptions::default()
    };
    let options = options(SamplingParams::default(), 0, 40);
    let prompt = vec![7, 8, 9];
    let mut plain_loop = StepLoop::new(Box::new(FakeRunner::new(&fake)));
    let plain = run(&mut plain_loop, &prompt, &options).tokens;
    let mut cuts = 0;
    for at in 1..30 {
        let stop = tokenizer.decode(&plain[at..=at + 1], true);
        if stop.is_empty() || stop.contains('\u{fffd}') {
            continue;
        }
        let teller = || Teller {
            answers: HashMap::from([(prompt.clone(), plain.clone())]),
            k: 9,
            numbers: Numbers::new(at as u64),
            wrong: 0,
            vocabulary: fake.vocabulary,
        };
        let answer_by = |steps: &mut StepLoop| {
            let sequence = steps.new_sequence();
            let stops = [stop.clone()];
            let on_text = &mut |_: &str| ControlFlow::Continue(());
            let (options, on_progress) = (options.clone(), &mut |_| ControlFlow::Continue(()));
            answer(
                steps,
                &tokenizer,
                sequence,
                &prompt,
                options,
                &stops,
                on_progress,
                on_text,
            )
            .unwrap()
        };
        let expected = answer_by(&mut plain_loop);
        let runner = || Box::new(FakeRunner::new(&fake));
        let mut steps = StepLoop::new(runner()).with_speculation(Speculation::new(teller()));
        let found = answer_by(&mut steps);
        assert_eq!(found.text, expected.text);
        assert_eq!(found.generated.tokens, expected.generated.tokens);
        assert_eq!(
            found.generated.sequence.tokens(),
            expected.generated.sequence.tokens()
        );
        cuts += usize::from(found.generated.tokens.len() < plain.len());

        let steps = StepLoop::new(runner()).with_speculation(Speculation::new(teller()));
        let engine =
            Engine::start(steps, Some(tokenizer.clone()), EngineOptions::default()).unwrap();
        let (sender, events) = channel();
        let request = Request {
            prompt: prompt.clone(),
            options: options.clone(),
            stop_strings: vec![stop.clone()],
            skip_special: true,
            constraint: None,
            on_event: Box::new(move |event| sender.send(event).is_ok()),
        };
        let _handle = engine.submit(request).unwrap();
        let (mut text, mut tokens) = (String::new(), Vec::new());
        for event in events {
            match event {
                Event::Started { .. } => {}
                Event::Tokens {
                    text: more,
                    tokens: sampled,
                } => {
                    text += &more;
                    tokens.extend(sampled.iter().map(|sampled| sampled.token));
                }
                Event::End(Ended::Finished(finished)) => {
                    text += &finished.text;
                    assert_eq!(finished.completion_tokens, tokens.len());
                    let stopped = expected.generated.finish == FinishReason::Stop;
                    assert_eq!(finished.reason == FinishReason::Stop, stopped);
                }
                Event::End(other) => panic!("{other:?}"),
            }
        }
        assert_eq!((text, tokens), (expected.text, expected.generated.tokens));
        assert!(engine.when_idle().unwrap().is_whole());
    }
    assert!(cuts > 10, "{cuts}");
}

/// A runner whose steps take a made-up time.
struct Timed {
    inner: FakeRunner,
    clock: Arc<AtomicU64>,
    /// Time of a step with so many rows.
    cost: fn(usize) -> f64,
    rows: usize,
}

/// Nanoseconds of a plain step.
const PLAIN: f64 = 1e6;

impl Runner for Timed {
    fn device(&self) -> String {
        "timed".to_owned()
    }

    fn limits(&self) -> &RunnerLimits {
        self.inner.limits()
    }

    fn launch(&mut self, batch: &Batch) -> Result<Ticket> {
        self.rows = batch.spans.iter().map(|span| span.input.rows(1)).sum();
        self.inner.launch(batch)
    }

    fn read(&mut self, ticket: Ticket) -> Result<StepOutput> {
        let nanos = PLAIN * (self.cost)(self.rows);
        self.clock.fetch_add(nanos as u64, Relaxed);
        self.inner.read(ticket)
    }
}

/// Proposes the truth where `knows` says so for the number of the token, else nonsense; drafting takes time.
struct Costly {
    answer: Vec<u32>,
    prompt: usize,
    k: usize,
    knows: fn(usize) -> bool,
    clock: Arc<AtomicU64>,
    /// Time for each draft, in plain steps.
    draft: f64,
}

impl Proposer for Costly {
    fn most(&self) -> usize {
        self.k
    }

    fn propose(&mut self, _: &mut dyn Runner, asks: &[Ask<'_>]) -> Result<Vec<Drafts>> {
        let propose = |ask: &Ask<'_>| {
            let generated = ask.tokens.len() - self.prompt;
            let draft = |i: usize| match self.answer.get(i) {
                Some(&token) if (self.knows)(i) => token,
                Some(&token) => token ^ 1,
                None => 0,
            };
            let nanos = PLAIN * self.draft * ask.most as f64;
            self.clock.fetch_add(nanos as u64, Relaxed);
            Drafts {
                tokens: (generated..generated + ask.most).map(draft).collect(),
                ..Drafts::default()
            }
        };
        Ok(asks.iter().map(propose).collect())
    }
}

/// Plain time over the time with a proposer that knows some tokens, and what it counted.
fn speed(
    tokens: usize,
    k: usize,
    cost: fn(usize) -> f64,
    draft: f64,
    knows: fn(usize) -> bool,
) -> (f64, tileinfer::spec::SpecStats) {
    let fake = FakeOptions::default();
    let (prompt, options) = ([1, 2, 3], options(SamplingParams::default(), 0, tokens));
    let answer = run(
        &mut StepLoop::new(Box::new(FakeRunner::new(&fake))),
        &prompt,
        &options,
    );
    let clock = Arc::new(AtomicU64::new(0));
    let runner = Timed {
        inner: FakeRunner::new(&fake),
        clock: clock.clone(),
        cost,
        rows: 0,
    };
    let proposer = Costly {
        answer: answer.tokens.clone(),
        prompt: prompt.len(),
        k,
        knows,
        clock: clock.clone(),
        draft,
    };
    let now = clock.clone();
    let speculation = Speculation::new(proposer)
        .adapting()
        .with_clock(Arc::new(move || Duration::from_nanos(now.load(Relaxed))));
    let mut steps = StepLoop::new(Box::new(runner)).with_speculation(speculation);
    let found = run(&mut steps, &prompt, &options);
    assert_eq!(found.tokens, answer.tokens);
    // The prompt's step is the same with and without drafts, and not counted.
    let prefill = PLAIN * cost(prompt.len());
    let plain = PLAIN * cost(1) * (tokens - 1) as f64;
    let speed = plain / (clock.load(Relaxed) as f64 - prefill);
    (speed, found.stats.spec.unwrap())
}

const FLAT: fn(usize) -> f64 = |rows| 1.0 + 0.02 * (rows - 1) as f64;
const STEEP: fn(usize) -> f64 = |rows| 1.0 + 0.3 * (rows - 1) as f64;
const LINEAR: fn(usize) -> f64 = |rows| rows as f64;
/// As on a CPU: the second row costs a lot, the others little.
const STEP: fn(usize) -> f64 = |rows| {
    if rows == 1 {
        1.0
    } else {
        1.6 + 0.1 * rows as f64
    }
};

#[test]
fn what_is_lost_on_a_hostile_text_is_little() {
    for cost in [FLAT, STEEP, LINEAR, STEP] {
        for k in [1, 4, 15] {
            for draft in [0.0, 0.05, 0.3] {
                for tokens in [60, 128, 600] {
                    let (speed, stats) = speed(tokens, k, cost, draft, |_| false);
                    assert!(
                        (0.97..=1.0).contains(&speed),
                        "{speed} with {k} drafts at {draft} each, {tokens} tokens, {stats:?}"
                    );
                    // And it says so.
                    assert!(
                        stats.held_back > tokens / 2 || draft + cost(2) < 1.03,
                        "{stats:?}"
                    );
                    assert!((stats.speedup().unwrap() - speed).abs() < 0.02, "{stats:?}");
                }
            }
        }
    }
}

#[test]
fn what_can_be_gained_is_gained() {
    // Everything is right: as many drafts as there may be.
    let (all, stats) = speed(400, 7, FLAT, 0.01, |_| true);
    assert!(all > 5.0, "{all}, {stats:?}");
    let (steep, _) = speed(400, 7, STEEP, 0.0, |_| true);
    assert!(steep > 2.0, "{steep}");
    // The first draft is dear, the others are cheap: it does not stop at one.
    let (steps, stats) = speed(400, 7, STEP, 0.01, |_| true);
    assert!(steps > 2.2, "{steps}, {stats:?}");
    // Two of three are right: fewer drafts where they are dear.
    let (flat, many) = speed(600, 8, FLAT, 0.02, |i| i % 3 != 0);
    let (dear, few) = speed(600, 8, STEEP, 0.02, |i| i % 3 != 0);
    assert!(flat > 1.6 && dear > 1.0, "{flat}, {dear}");
    assert!(many.drafted as f64 / many.steps as f64 > few.drafted as f64 / few.steps as f64);
    // A text that becomes easy is noticed, and one that becomes hard again.
    let (late, stats) = speed(900, 6, FLAT, 0.02, |i| (300..600).contains(&i));
    assert!(late > 1.3, "{late}, {stats:?}");
    assert!(stats.held_back > 100, "{stats:?}");
}

/// Asks for three drafts.
fn ask(id: u64, tokens: &[u32]) -> Ask<'_> {
    let sampler = RowSampler {
        params: Arc::default(),
        counts: None,
        drafts: Vec::new(),
        mask: None,
        seed: 0,
        position: tokens.len() as u64,
        vocabulary: usize::MAX,
        top_logprobs: None,
        draw: Draw::Token,
    };
    Ask {
        id,
        tokens,
        most: 3,
        table: BlockTable::default(),
        sampler,
    }
}

#[test]
fn a_draft_model_reads_what_is_new_of_a_text() {
    let fake = FakeOptions::default();
    let mut target = FakeRunner::new(&fake);
    let mut proposer = DraftProposer::new(Box::new(FakeRunner::new(&fake)), 3, false).unwrap();
    let mut text = random_ids(&mut Numbers::new(1), 40, fake.vocabulary);
    let mut read = |id: u64, tokens: &[u32]| {
        let drafts = proposer.propose(&mut target, &[ask(id, tokens)]).unwrap();
        assert_eq!(drafts[0].tokens.len(), 3);
        let tokens = drafts[0].tokens.clone();
        (drafts[0].read, tokens, proposer.pool().free())
    };
    let (first, drafts, _) = read(1, &text);
    assert_eq!(first, 40);
    // All were right, and the token after them: the last draft was never read.
    text.extend(&drafts);
    text.push(7);
    assert_eq!(read(1, &text).0, 2);
    // All were wrong.
    text.push(63);
    assert_eq!(read(1, &text).0, 1);
    // The next turn of a conversation is another text, and finds whole pages of it.
    proposer.forget(1);
    text.extend([5, 6, 7, 8, 9]);
    let drafts = proposer.propose(&mut target, &[ask(2, &text)]).unwrap();
    assert!(
        drafts[0].read < 5 + 2 * fake.page_size,
        "{}",
        drafts[0].read
    );
    proposer.forget(2);
    // Without room there are no drafts, and no error.
    let small = FakeOptions {
        pages: 3,
        ..fake.clone()
    };
    let mut proposer = DraftProposer::new(Box::new(FakeRunner::new(&small)), 3, false).unwrap();
    let drafts = proposer.propose(&mut target, &[ask(3, &text)]).unwrap();
    assert_eq!(
        drafts,
        [Drafts {
            read: text.len(),
            ..Drafts::default()
        }]
    );
    // Nor for a text that the model has no rows for.
    let narrow = FakeOptions {
        vocabulary: 8,
        ..fake
    };
    let mut proposer = DraftProposer::new(Box::new(FakeRunner::new(&narrow)), 3, false).unwrap();
    let drafts = proposer.propose(&mut target, &[ask(4, &text)]).unwrap();
    assert_eq!(drafts, [Drafts::default()]);
}

#[test]
fn a_draft_model_of_another_vocabulary_is_refused() {
    let tokenizer = |name: &str| Tokenizer::from_dir(&golden().join("models").join(name)).unwrap();
    let (one, other) = (tokenizer("qwen3"), tokenizer("llama-tied"));
    check_vocabulary(&one, &one).unwrap();
    let error = check_vocabulary(&one, &other).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(error.to_string().contains("token "), "{error}");
}
