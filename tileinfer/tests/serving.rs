//! The engine over a runner whose text betrays every wrong page: a crowd answers as each alone does, and all
//! pages come back.

use std::fs::File;
use std::io::BufReader;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use tileinfer::engine::{
    Constraint, Ended, Engine, EngineOptions, EngineState, Event, FinishReason, Finished,
    GenerationOptions, Request, RequestHandle, StepLoop,
};
use tileinfer::generate::generate;
use tileinfer::runner::{Batch, FakeOptions, FakeRunner, Runner, RunnerLimits, StepOutput, Ticket};
use tileinfer::sampling::{SamplingParams, TokenMask};
use tileinfer::tokenizer::Tokenizer;
use tileinfer::{Error, Result};

fn options(max_tokens: usize) -> GenerationOptions {
    GenerationOptions {
        sampling: Arc::new(SamplingParams::default()),
        seed: 0,
        max_tokens: Some(max_tokens),
        stop_ids: Arc::default(),
        vocabulary: 64,
        top_logprobs: None,
    }
}

/// What one request was told.
#[derive(Debug, Default)]
struct Heard {
    tokens: Vec<u32>,
    text: String,
    started: usize,
    cached_tokens: usize,
    ends: Vec<Ended>,
}

impl Heard {
    fn finished(&self) -> &Finished {
        match &self.ends[..] {
            [Ended::Finished(finished)] => finished,
            other => panic!("{other:?}"),
        }
    }

    fn error(&self) -> String {
        match &self.ends[..] {
            [Ended::Failed(error)] => error.to_string(),
            other => panic!("{other:?}"),
        }
    }
}

struct Asked {
    handle: RequestHandle,
    events: Receiver<Event>,
}

impl Asked {
    /// Everything until nothing more can come.
    fn hear(self) -> Heard {
        let mut heard = Heard::default();
        for event in &self.events {
            assert!(heard.ends.is_empty(), "{event:?} after the end");
            match event {
                Event::Started { cached_tokens } => {
                    heard.started += 1;
                    heard.cached_tokens = cached_tokens;
                }
                Event::Tokens { text, tokens } => {
                    heard.text.push_str(&text);
                    heard.tokens.extend(tokens.iter().map(|token| token.token));
                }
                Event::End(end) => {
                    if let Ended::Finished(finished) = &end {
                        heard.text.push_str(&finished.text);
                        assert_eq!(finished.completion_tokens, heard.tokens.len());
                        assert!(
                            heard.started == 0 || finished.cached_tokens == heard.cached_tokens
                        );
                        assert!(finished.times.to_start <= finished.times.to_end);
                    }
                    heard.ends.push(end);
                }
            }
        }
        assert_eq!(heard.ends.len(), 1, "one end");
        assert!(heard.started <= 1);
        heard
    }
}

fn request(prompt: &[u32], options: GenerationOptions) -> (Request, Receiver<Event>) {
    let (sender, events) = channel();
    let request = Request {
        prompt: prompt.to_vec(),
        options,
        stop_strings: Vec::new(),
        skip_special: true,
        constraint: None,
        on_event: Box::new(move |event| sender.send(event).is_ok()),
    };
    (request, events)
}

fn ask(engine: &Engine, prompt: &[u32], options: GenerationOptions) -> Asked {
    let (request, events) = request(prompt, options);
    Asked {
        handle: engine.submit(request).unwrap(),
        events,
    }
}

fn start(fake: &FakeOptions, options: EngineOptions) -> Engine {
    Engine::start(
        StepLoop::new(Box::new(FakeRunner::new(fake))),
        None,
        options,
    )
    .unwrap()
}

/// Idle, with every page where it belongs, and everything counted.
fn assert_whole(engine: &Engine) {
    let report = engine.when_idle().expect("the engine runs");
    assert!(report.is_whole(), "{report:?}");
    let metrics = engine.metrics().snapshot();
    assert_eq!(
        (metrics.pages_lost, metrics.waiting, metrics.running),
        (0, 0, 0)
    );
    assert_eq!(
        (metrics.pages_in_use, metrics.pages_cached),
        (0, report.cached as u64)
    );
}

/// The answer without an engine.
fn alone(fake: &FakeOptions, prompt: &[u32], options: GenerationOptions) -> Vec<u32> {
    let plain = FakeOptions {
        pages: 4096,
        depth: 1,
        max_rows: 512,
        latency: Duration::ZERO,
        ..fake.clone()
    };
    let mut steps = StepLoop::new(Box::new(FakeRunner::new(&plain)));
    let sequence = steps.new_sequence();
    let nothing = &mut |_: &_| std::ops::ControlFlow::Continue(());
    generate(
        &mut steps,
        sequence,
        prompt,
        options,
        &mut |_| std::ops::ControlFlow::Continue(()),
        nothing,
    )
    .unwrap()
    .tokens
}

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 = self
            .0
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        (self.0 >> 33) as usize % n
    }
}

/// Random shapes of cache and budget, shared and unshared prefixes, random sampling, random cancels, pages for
/// a fraction of what is asked: every answer is the one the request gets alone.
#[test]
fn a_crowd_answers_as_each_alone() {
    let mut random = Random(11);
    let (mut preemptions, mut cached, mut cancelled, mut whole) = (0, 0, 0, 0);
    for round in 0..60 {
        let fake = FakeOptions {
            pages: 24 + random.below(60),
            max_rows: 3 + random.below(30),
            max_spans: 1 + random.below(9),
            window: [None, None, Some(7), Some(18)][random.below(4)],
            depth: 1 + random.below(2),
            max_length: 90,
            ..FakeOptions::default()
        };
        let engine_options = EngineOptions {
            prefix_cache: random.below(4) > 0,
            prefill_beside_decode: 1 + random.below(30),
            ..EngineOptions::default()
        };
        let engine = start(&fake, engine_options);
        let mut asked = Vec::new();
        for i in 0..24 {
            let shared = random.below(3) as u32;
            let mut prompt = vec![shared; [0, 9, 16, 30][random.below(4)]];
            prompt.extend((0..1 + random.below(12)).map(|_| random.below(64) as u32));
            let mut options = options(1 + random.below(40));
            options.seed = i;
            let warm = random.below(2) as f32;
            let repetition_penalty = [1.0, 1.3][random.below(2)];
            options.sampling = Arc::new(SamplingParams {
                temperature: warm,
                repetition_penalty,
                ..Default::default()
            });
            options.stop_ids = [63, 17][..random.below(3)].into();
            let one = ask(&engine, &prompt, options.clone());
            match random.below(8) {
                0 => one.handle.cancel(),
                1 => {
                    // Somewhere on its way.
                    let begun = one.events.recv();
                    assert!(matches!(begun, Ok(Event::Started { .. })));
                    one.handle.cancel();
                }
                _ => {}
            }
            asked.push((prompt, options, one));
        }
        for (prompt, options, one) in asked {
            let heard = one.hear();
            let expected = alone(&fake, &prompt, options);
            match &heard.ends[0] {
                Ended::Cancelled => {
                    assert!(expected.starts_with(&heard.tokens));
                    cancelled += 1;
                }
                Ended::Finished(_) => {
                    assert_eq!(heard.tokens, expected, "round {round}");
                    whole += 1;
                }
                Ended::Failed(error) => panic!("{error}"),
            }
        }
        assert_whole(&engine);
        let metrics = engine.metrics().snapshot();
        preemptions += metrics.preemptions;
        cached += metrics.cached_tokens;
        engine.shut_down();
        assert_eq!(engine.state(), EngineState::Stopped);
        assert!(engine.when_idle().is_none());
    }
    assert!(
        preemptions > 50 && cached > 1000,
        "{preemptions} preemptions, {cached} cached tokens"
    );
    assert!(
        cancelled > 100 && whole > 1000,
        "{cancelled} cancelled, {whole} answered"
    );
}

#[test]
fn a_prompt_seen_before_is_not_run_again() {
    let engine = start(&FakeOptions::default(), EngineOptions::default());
    let prompt: Vec<u32> = (0..18).collect();
    let first = ask(&engine, &prompt, options(7)).hear();
    assert_eq!(first.finished().cached_tokens, 0);
    let second = ask(&engine, &prompt, options(7)).hear();
    assert_eq!(
        (
            second.finished().cached_tokens,
            second.finished().prompt_tokens
        ),
        (16, 18)
    );
    assert_eq!(first.tokens, second.tokens);
    // A conversation that goes on finds the answer too: 25 tokens, of which 24 are cached, in pages of 4.
    let longer = [&prompt[..], &first.tokens, &[1, 2]].concat();
    assert_eq!(
        ask(&engine, &longer, options(1))
            .hear()
            .finished()
            .cached_tokens,
        24
    );
    // Of a prompt in whole pages the last token is run all the same.
    assert_eq!(
        ask(&engine, &prompt[..16], options(1))
            .hear()
            .finished()
            .cached_tokens,
        12
    );
    assert_whole(&engine);
    let metrics = engine.metrics().snapshot();
    assert_eq!(
        (metrics.prompt_tokens, metrics.cached_tokens),
        (18 + 18 + 27 + 16, 16 + 24 + 12)
    );
    assert_eq!((metrics.generated_tokens, metrics.finished_length), (16, 4));
}

#[test]
fn cancelling_works_in_every_state() {
    let fake = FakeOptions {
        max_spans: 1,
        max_rows: 2,
        latency: Duration::from_millis(2),
        ..FakeOptions::default()
    };
    let engine = start(&fake, EngineOptions::default());
    let prefilling = ask(&engine, &[3; 400], options(5));
    let waiting = ask(&engine, &[4; 4], options(5));
    waiting.handle.cancel();
    let heard = waiting.hear();
    assert!(matches!(heard.ends[..], [Ended::Cancelled]) && heard.started == 0);
    assert!(matches!(
        prefilling.events.recv().unwrap(),
        Event::Started { .. }
    ));
    drop(prefilling.handle);
    let decoding = ask(&engine, &[5; 4], options(4000));
    while !matches!(decoding.events.recv().unwrap(), Event::Tokens { .. }) {}
    decoding.handle.cancel();
    decoding.handle.cancel();
    assert!(matches!(
        decoding.events.iter().last().unwrap(),
        Event::End(Ended::Cancelled)
    ));
    // One whose listener has gone.
    let (request, events) = request(&[6; 4], options(4000));
    let _handle = engine.submit(request).unwrap();
    drop(events);
    assert_whole(&engine);
    assert_eq!(engine.metrics().snapshot().cancelled, 4);
}

#[test]
fn the_queue_has_an_end() {
    let fake = FakeOptions {
        max_spans: 1,
        latency: Duration::from_millis(5),
        ..FakeOptions::default()
    };
    let engine = start(
        &fake,
        EngineOptions {
            max_waiting: 2,
            ..EngineOptions::default()
        },
    );
    let running = ask(&engine, &[1], options(4000));
    assert!(matches!(
        running.events.recv().unwrap(),
        Event::Started { .. }
    ));
    let (one, two) = (
        ask(&engine, &[2], options(1)),
        ask(&engine, &[3], options(1)),
    );
    let (third, _events) = request(&[4], options(1));
    match engine.submit(third) {
        Err(Error::QueueFull {
            waiting: 2,
            limit: 2,
        }) => {}
        other => panic!("{other:?}"),
    }
    running.handle.cancel();
    one.hear().finished();
    two.hear().finished();
    assert_whole(&engine);
}

#[test]
fn what_cannot_be_is_refused_with_the_numbers() {
    let engine = start(
        &FakeOptions {
            pages: 5,
            ..FakeOptions::default()
        },
        EngineOptions::default(),
    );
    let refused = |prompt: &[u32], options: GenerationOptions| {
        let (request, _events) = request(prompt, options);
        engine.submit(request).unwrap_err().to_string()
    };
    assert!(refused(&[1; 20], options(1)).contains("21 positions are needed and the limit is 20"));
    assert!(refused(&[], options(1)).contains("empty"));
    assert!(refused(&[64], options(1)).contains("no token 64 in a vocabulary of 64"));
    let bias = SamplingParams {
        logit_bias: vec![(64, 1.0)],
        ..Default::default()
    };
    assert!(
        refused(
            &[1],
            GenerationOptions {
                sampling: Arc::new(bias),
                ..options(1)
            }
        )
        .contains("logit_bias")
    );
    // What fits runs to the end of the pages.
    let heard = ask(&engine, &[1; 15], options(99)).hear();
    assert_eq!(
        (heard.tokens.len(), heard.finished().reason),
        (5, FinishReason::Length)
    );
    // Nothing to generate is an answer too.
    assert_eq!(
        ask(&engine, &[1; 15], options(0))
            .hear()
            .finished()
            .completion_tokens,
        0
    );
    assert_whole(&engine);
}

/// A runner that fails or panics in one of its steps. Its first step waits for the other end of `gate` to be
/// dropped, so that what is asked for by then is asked for in time.
struct Breaking {
    runner: FakeRunner,
    gate: Receiver<()>,
    steps: usize,
    breaks: fn(usize) -> Result<()>,
}

impl Runner for Breaking {
    fn device(&self) -> String {
        "breaking".to_owned()
    }

    fn limits(&self) -> &RunnerLimits {
        self.runner.limits()
    }

    fn launch(&mut self, batch: &Batch) -> Result<Ticket> {
        self.steps += 1;
        let _ = self.gate.recv();
        (self.breaks)(self.steps)?;
        self.runner.launch(batch)
    }

    fn read(&mut self, ticket: Ticket) -> Result<StepOutput> {
        self.runner.read(ticket)
    }
}

fn breaking(depth: usize, breaks: fn(usize) -> Result<()>) -> (Engine, Sender<()>) {
    let (opener, gate) = channel();
    let runner = FakeRunner::new(&FakeOptions {
        depth,
        max_spans: 2,
        ..FakeOptions::default()
    });
    let steps = StepLoop::new(Box::new(Breaking {
        runner,
        gate,
        steps: 0,
        breaks,
    }));
    let engine = Engine::start(steps, None, EngineOptions::default()).unwrap();
    (engine, opener)
}

#[test]
fn a_panic_in_a_step_ends_all_requests_and_the_engine() {
    for depth in [1, 2] {
        let (engine, gate) = breaking(depth, |step| {
            if step == 9 {
                panic!("the device is on fire")
            } else {
                Ok(())
            }
        });
        let asked: Vec<Asked> = (0..5)
            .map(|i| ask(&engine, &[i; 3], options(500)))
            .collect();
        drop(gate);
        for one in asked {
            let error = one.hear().error();
            assert!(
                error.contains("dead") && error.contains("on fire"),
                "{error}"
            );
        }
        assert!(matches!(engine.state(), EngineState::Dead(reason) if reason.contains("on fire")));
        let (late, _events) = request(&[1], options(1));
        assert!(
            engine
                .submit(late)
                .unwrap_err()
                .to_string()
                .contains("on fire")
        );
        let metrics = engine.metrics().snapshot();
        assert_eq!((metrics.failed, metrics.waiting), (5, 0));
        engine.shut_down();
    }
}

#[test]
fn a_failed_step_ends_only_those_in_it() {
    for depth in [1, 2] {
        let (engine, gate) = breaking(depth, |step| match step {
            5 => Err(Error::Bug("logit 3 is NaN".to_owned())),
            _ => Ok(()),
        });
        let asked: Vec<Asked> = (0..4).map(|i| ask(&engine, &[i; 3], options(20))).collect();
        drop(gate);
        let heard: Vec<Heard> = asked.into_iter().map(Asked::hear).collect();
        assert!(heard[0].error().contains("NaN") && heard[1].error().contains("NaN"));
        for (i, heard) in heard.iter().enumerate().skip(2) {
            assert_eq!(
                heard.tokens,
                alone(&FakeOptions::default(), &[i as u32; 3], options(20))
            );
        }
        assert_whole(&engine);
    }
    let (engine, _) = breaking(1, |step| {
        if step == 2 {
            Err(Error::Device("the bus is gone".to_owned()))
        } else {
            Ok(())
        }
    });
    assert!(
        ask(&engine, &[1], options(9))
            .hear()
            .error()
            .contains("the bus is gone")
    );
    assert!(matches!(engine.state(), EngineState::Dead(_)));
}

#[test]
fn a_listener_that_panics_loses_its_request_only() {
    let engine = start(&FakeOptions::default(), EngineOptions::default());
    let ends = Arc::new(AtomicUsize::new(0));
    let (mut bad, _events) = request(&[1], options(50));
    let counted = ends.clone();
    bad.on_event = Box::new(move |event| match event {
        Event::End(_) => counted.fetch_add(1, Ordering::SeqCst) == 0,
        _ => panic!("not today"),
    });
    let _bad = engine.submit(bad).unwrap();
    assert_eq!(ask(&engine, &[2], options(50)).hear().tokens.len(), 50);
    assert_whole(&engine);
    assert_eq!(ends.load(Ordering::SeqCst), 1);
}

#[test]
fn dropping_the_engine_tells_everyone() {
    let fake = FakeOptions {
        max_spans: 1,
        latency: Duration::from_millis(1),
        ..FakeOptions::default()
    };
    let engine = start(&fake, EngineOptions::default());
    let asked: Vec<Asked> = (0..3).map(|i| ask(&engine, &[i], options(4000))).collect();
    engine.shut_down();
    for one in asked {
        assert!(matches!(one.hear().ends[..], [Ended::Cancelled]));
    }
    let (late, _events) = request(&[1], options(1));
    assert!(engine.submit(late).is_err());
}

/// Even and odd tokens take turns, for `left` tokens.
struct Turns {
    left: usize,
    seen: Arc<Mutex<Vec<u32>>>,
}

impl Constraint for Turns {
    fn mask(&mut self) -> Result<Option<Arc<TokenMask>>> {
        if self.left == 0 {
            return Ok(None);
        }
        let odd = (self.seen.lock().unwrap().len() % 2) as u32;
        let mut mask = TokenMask::none(64);
        (0..32).for_each(|i| mask.allow(2 * i + odd));
        Ok(Some(Arc::new(mask)))
    }

    fn accept(&mut self, token: u32) -> Result<()> {
        assert_ne!(token, 62, "a token that this grammar cannot take");
        self.seen.lock().unwrap().push(token);
        self.left -= 1;
        Ok(())
    }
}

#[test]
fn a_grammar_is_followed_and_ends_the_answer() {
    for (depth, pages) in [(1, 500), (2, 500), (2, 12)] {
        let fake = FakeOptions {
            depth,
            pages,
            max_length: 48,
            ..FakeOptions::default()
        };
        let engine = start(&fake, EngineOptions::default());
        let mut asked = Vec::new();
        for i in 0..12_u32 {
            let (mut request, events) = request(&[i; 5], options(40));
            let seen = Arc::new(Mutex::new(Vec::new()));
            if i % 2 == 0 {
                request.constraint = Some(Box::new(Turns {
                    left: 11,
                    seen: seen.clone(),
                }));
            }
            asked.push((
                seen,
                Asked {
                    handle: engine.submit(request).unwrap(),
                    events,
                },
            ));
        }
        for (i, (seen, one)) in asked.into_iter().enumerate() {
            let heard = one.hear();
            if i % 2 == 1 {
                assert_eq!(heard.tokens, alone(&fake, &[i as u32; 5], options(40)));
            } else if matches!(heard.ends[0], Ended::Failed(_)) {
                assert!(
                    heard.error().contains("cannot take"),
                    "a grammar's panic is its request's error"
                );
                assert!(!heard.tokens.contains(&62));
            } else {
                assert_eq!(
                    (heard.tokens.len(), heard.finished().reason),
                    (11, FinishReason::Stop)
                );
                assert!(
                    heard
                        .tokens
                        .iter()
                        .enumerate()
                        .all(|(i, token)| token % 2 == i as u32 % 2)
                );
                assert_eq!(*seen.lock().unwrap(), heard.tokens);
            }
        }
        assert_whole(&engine);
    }
}

#[test]
fn texts_end_at_stop_strings_and_hide_end_tokens() {
    let packed = concat!(
        env!("CARGO_MANIFEST_DIR"),
        "/../testdata/tokenizers/smollm2/tokenizer.json.xz"
    );
    let mut plain = Vec::new();
    lzma_rs::xz_decompress(&mut BufReader::new(File::open(packed).unwrap()), &mut plain).unwrap();
    let tokenizer = Tokenizer::from_bytes(Path::new(packed), &plain).unwrap();
    let vocabulary = tokenizer.vocab_size();
    let fake = FakeOptions {
        vocabulary,
        depth: 2,
        ..FakeOptions::default()
    };
    let runner = Box::new(FakeRunner::new(&fake));
    let engine = Engine::start(
        StepLoop::new(runner),
        Some(tokenizer.clone()),
        EngineOptions::default(),
    )
    .unwrap();
    let options = GenerationOptions {
        vocabulary,
        ..options(30)
    };
    let whole = ask(&engine, &[7, 8], options.clone()).hear();
    assert_eq!(whole.text, tokenizer.decode(&whole.tokens, true));
    // A stop string from the middle, across tokens.
    let middle = whole
        .text
        .char_indices()
        .nth(whole.text.chars().count() / 2)
        .unwrap()
        .0;
    let stop: String = whole.text[middle..].chars().take(4).collect();
    let first = whole.text.find(&stop).unwrap();
    let (mut request, events) = request(&[7, 8], options.clone());
    request.stop_strings = vec![stop];
    let cut = Asked {
        handle: engine.submit(request).unwrap(),
        events,
    }
    .hear();
    assert_eq!(cut.text, whole.text[..first]);
    assert!(cut.tokens.len() < 30 && whole.tokens.starts_with(&cut.tokens));
    assert_eq!(cut.finished().reason, FinishReason::Stop);
    // An end token is told and counted, its text is not.
    let stop_ids = [whole.tokens[9]].into();
    let ended = ask(
        &engine,
        &[7, 8],
        GenerationOptions {
            stop_ids,
            ..options
        },
    )
    .hear();
    let end = ended.tokens.len();
    assert_eq!(ended.tokens, whole.tokens[..end]);
    assert_eq!(ended.text, tokenizer.decode(&whole.tokens[..end - 1], true));
    assert_eq!(ended.finished().reason, FinishReason::Stop);
    assert_whole(&engine);
}
