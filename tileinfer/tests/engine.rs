//! The decode loop over a runner without a model: whatever is planned, whatever goes wrong on the way, every
//! answer has the tokens that the plainest loop gives it, and no page is lost.

use std::ops::ControlFlow;
use std::sync::Arc;

use tileinfer::engine::{FinishReason, Generation, GenerationOptions, Planned, Slot, StepLoop};
use tileinfer::generate::{Generated, generate};
use tileinfer::kv::{PagePool, Sequence};
use tileinfer::runner::{
    Batch, FakeOptions, FakeRunner, Input, Rows, Runner, RunnerLimits, Span, StepOutput, Ticket,
    Want,
};
use tileinfer::sampling::{Draw, RowSampler, SamplingParams, TokenCounts};
use tileinfer::testing::Numbers;
use tileinfer::{Error, ErrorKind, Result};

fn steps(fake: &FakeOptions) -> StepLoop {
    StepLoop::new(Box::new(FakeRunner::new(fake)))
}

fn greedy(max_tokens: Option<usize>) -> GenerationOptions {
    GenerationOptions {
        sampling: Arc::new(SamplingParams::default()),
        seed: 0,
        max_tokens,
        stop_ids: [].into(),
        vocabulary: usize::MAX,
        top_logprobs: None,
    }
}

/// The answer by the plainest loop: for each token everything before it is run again from an empty cache.
fn plain(
    prompt: &[u32],
    options: &GenerationOptions,
    fake: &FakeOptions,
) -> (Vec<u32>, FinishReason) {
    let fake = FakeOptions {
        max_rows: fake.max_length,
        pages: 1000,
        depth: 1,
        ..fake.clone()
    };
    let mut runner = FakeRunner::new(&fake);
    let mut tokens = prompt.to_vec();
    let limit = options.max_tokens.map_or(fake.max_length, |most| {
        fake.max_length.min(prompt.len().saturating_add(most))
    });
    while tokens.len() < limit {
        let mut sequence = Sequence::new(&PagePool::new(fake.pages), fake.page_size);
        sequence.reserve(0, tokens.len()).unwrap();
        let mut counts = TokenCounts::new(prompt);
        for &token in &tokens[prompt.len()..] {
            counts.push_output(token);
        }
        let sampler = RowSampler {
            params: options.sampling.clone(),
            counts: Some(Arc::new(counts)),
            drafts: Vec::new(),
            mask: None,
            seed: options.seed,
            position: tokens.len() as u64,
            vocabulary: options.vocabulary,
            top_logprobs: None,
            draw: Draw::Token,
        };
        let want = Want {
            rows: Rows::Last,
            sample: vec![sampler],
            ..Want::default()
        };
        let span = Span {
            input: Input::Ids(tokens.clone()),
            start: 0,
            table: sequence.table(),
            want,
        };
        let output = runner
            .step(&Batch {
                spans: vec![span],
                copies: Vec::new(),
            })
            .unwrap();
        let token = output.spans[0].sampled[0].token;
        tokens.push(token);
        if options.stop_ids.contains(&token) {
            return (tokens.split_off(prompt.len()), FinishReason::Stop);
        }
    }
    (tokens.split_off(prompt.len()), FinishReason::Length)
}

fn random_ids(numbers: &mut Numbers, count: usize, vocabulary: usize) -> Vec<u32> {
    (0..count)
        .map(|_| numbers.below(vocabulary) as u32)
        .collect()
}

/// A request of any kind that has room in the context.
fn random_request(numbers: &mut Numbers, fake: &FakeOptions) -> (Vec<u32>, GenerationOptions) {
    let prompt_len = match numbers.below(8) {
        0 => fake.max_length - 1,
        1 => 1,
        _ => 1 + numbers.below(fake.max_length / 2),
    };
    let prompt = random_ids(numbers, prompt_len, fake.vocabulary);
    let penalties = numbers.below(3) == 0;
    let sampling = SamplingParams {
        temperature: [0.0, 0.8, 1.4][numbers.below(3)],
        top_k: [0, 0, 7][numbers.below(3)],
        top_p: [1.0, 0.9][numbers.below(2)],
        repetition_penalty: if penalties { 1.3 } else { 1.0 },
        frequency_penalty: if penalties { 0.5 } else { 0.0 },
        ..SamplingParams::default()
    };
    let stops = numbers.below(4);
    let options = GenerationOptions {
        sampling: Arc::new(sampling),
        seed: numbers.bits(),
        max_tokens: [None, Some(numbers.below(3)), Some(numbers.below(20))][numbers.below(3)],
        stop_ids: random_ids(numbers, stops, fake.vocabulary).into(),
        vocabulary: fake.vocabulary,
        top_logprobs: None,
    };
    (prompt, options)
}

/// A runner that refuses a step in `one_in`, half of the time when it is launched, half when it is read.
struct Flaky {
    inner: FakeRunner,
    numbers: Numbers,
    one_in: usize,
}

impl Flaky {
    fn trip(&mut self) -> Result<()> {
        match self.numbers.below(2 * self.one_in) {
            0 => Err(Error::Device("tripped over a cable".to_owned())),
            _ => Ok(()),
        }
    }
}

impl Runner for Flaky {
    fn device(&self) -> String {
        "flaky".to_owned()
    }

    fn limits(&self) -> &RunnerLimits {
        self.inner.limits()
    }

    fn launch(&mut self, batch: &Batch) -> Result<Ticket> {
        self.trip()?;
        self.inner.launch(batch)
    }

    fn read(&mut self, ticket: Ticket) -> Result<StepOutput> {
        let output = self.inner.read(ticket)?;
        self.trip()?;
        Ok(output)
    }
}

/// What may happen to the requests of [`run_all`].
#[derive(Debug, Clone, Copy, Default)]
struct Events {
    preempt: bool,
    cancel: bool,
    draft: bool,
}

/// How often the things happened that a test is about.
#[derive(Debug, Default)]
struct Happened {
    out_of_pages: usize,
    failures: usize,
    accepted: usize,
    rejected: usize,
    drafts_beside_others: usize,
    cancelled_in_flight: usize,
}

/// Runs `requests` by random plans and holds each answer against `expected`. Every page is free at the end.
fn run_all(
    what: &str,
    numbers: &mut Numbers,
    steps: &mut StepLoop,
    requests: &[(Vec<u32>, GenerationOptions)],
    expected: &[(Vec<u32>, FinishReason)],
    events: Events,
    happened: &mut Happened,
) {
    let limits = steps.limits().clone();
    let new = |sequence: Sequence, (prompt, options): &(Vec<u32>, GenerationOptions)| {
        Generation::new(sequence, prompt, options.clone(), limits.max_length).unwrap()
    };
    let mut waiting: Vec<usize> = (0..requests.len()).rev().collect();
    let mut running: Vec<(usize, Slot)> = Vec::new();
    for round in 0.. {
        assert!(round < 20_000, "{what}: no end");
        // Nobody who is disturbed for ever comes to an end.
        let disturbed = round < 300;
        while !waiting.is_empty() && (running.is_empty() || numbers.below(3) == 0) {
            let request = waiting.pop().unwrap();
            running.push((
                request,
                steps.admit(new(steps.new_sequence(), &requests[request])),
            ));
        }
        if events.preempt && disturbed && numbers.below(10) == 0 && !running.is_empty() {
            let (_, slot) = running[numbers.below(running.len())];
            steps.get_mut(slot).unwrap().preempt();
        }
        if events.cancel && disturbed && numbers.below(12) == 0 && !running.is_empty() {
            // Then the client comes back at once; what it had cached is used.
            let index = numbers.below(running.len());
            let (request, slot) = running[index];
            let sequence = steps.remove(slot).unwrap().into_sequence();
            assert!(steps.get(slot).is_none() && steps.remove(slot).is_none());
            running[index].1 = steps.admit(new(sequence, &requests[request]));
            happened.cancelled_in_flight += steps.in_flight();
        }

        let mut plan: Vec<Planned> = Vec::new();
        let mut room = limits.max_rows;
        for &(request, slot) in &running {
            let generation = steps.get(slot).unwrap();
            let ready = generation.ready_rows();
            if ready == 0 || room == 0 || plan.len() == limits.max_spans || numbers.below(4) == 0 {
                continue;
            }
            let mut rows = ready.min(room);
            if rows > 1 && numbers.below(2) == 0 {
                rows = 1 + numbers.below(rows);
            }
            let mut drafts = Vec::new();
            if events.draft && generation.takes_drafts() && numbers.below(2) == 0 {
                let answer = &expected[request].0;
                let from = generation.generated().len();
                let count = numbers.below(7).min(room - 1);
                drafts.extend(answer[from..].iter().copied().take(count));
                drafts.resize_with(count, || numbers.below(limits.vocabulary) as u32);
                if count > 0 && numbers.below(2) == 0 {
                    drafts[numbers.below(count)] = numbers.below(limits.vocabulary) as u32;
                }
            }
            room -= rows + drafts.len();
            plan.push(Planned { slot, rows, drafts });
        }
        happened.drafts_beside_others +=
            usize::from(plan.len() > 1 && plan.iter().any(|part| !part.drafts.is_empty()));

        let advances = match steps.advance(&plan) {
            Ok(advances) => advances,
            Err(Error::OutOfPages { needed, free }) => {
                assert!(
                    needed > free && free < limits.pages,
                    "{what}: {needed} of {free}"
                );
                happened.out_of_pages += 1;
                // Whoever came last begins again.
                let holder = running.iter().rev().map(|&(_, slot)| slot);
                let last = holder
                    .into_iter()
                    .find(|&slot| steps.get(slot).unwrap().cached_now() > 0);
                let last = last.unwrap_or(running[running.len() - 1].1);
                for &(_, slot) in running.iter().rev().take_while(|(_, slot)| *slot != last) {
                    // Nothing is cached for these, but pages may be reserved.
                    steps.get_mut(slot).unwrap().preempt();
                }
                steps.get_mut(last).unwrap().preempt();
                continue;
            }
            Err(Error::Device(_)) => {
                happened.failures += 1;
                continue;
            }
            Err(error) => panic!("{what}: {error}"),
        };
        for advance in advances {
            let given = advance.tokens.len();
            assert!(
                given <= advance.drafted + 1,
                "{what}: {given} tokens after {} drafts",
                advance.drafted
            );
            if advance.drafted > 0 {
                happened.accepted += given - 1;
                happened.rejected +=
                    usize::from(given <= advance.drafted && advance.finish.is_none());
            }
        }
        running.retain(|&(request, slot)| {
            let Some(finish) = steps.get(slot).unwrap().finish() else {
                return true;
            };
            let generation = steps.remove(slot).unwrap();
            let (answer, reason) = &expected[request];
            assert_eq!(
                generation.generated(),
                answer,
                "{what}: request {request}, {:?}",
                requests[request]
            );
            assert_eq!(finish, *reason, "{what}: request {request}");
            let (cached, sequence) = (generation.cached_now(), generation.into_sequence());
            if let Some((_, but_last)) = answer.split_last() {
                let held = [&requests[request].0[..], but_last].concat();
                assert_eq!(sequence.tokens(), held, "{what}: request {request}");
                assert!(
                    sequence.capacity() < held.len() + limits.kv.page_size,
                    "{what}: a page too many"
                );
                assert_eq!(cached, held.len());
            }
            false
        });
        if running.is_empty() && waiting.is_empty() {
            break;
        }
    }
    while steps.in_flight() > 0 {
        match steps.advance(&[]) {
            Ok(advances) => assert!(advances.is_empty(), "{what}: tokens for nobody"),
            Err(error) => assert!(matches!(error, Error::Device(_)), "{what}: {error}"),
        }
    }
    assert_eq!(
        steps.pool().free(),
        limits.pages,
        "{what}: pages are missing"
    );
}

fn any_fake(numbers: &mut Numbers) -> FakeOptions {
    FakeOptions {
        vocabulary: 24,
        max_length: 48,
        page_size: [1, 4, 7][numbers.below(3)],
        max_rows: [8, 32][numbers.below(2)],
        max_spans: [2, 16][numbers.below(2)],
        window: [None, Some(1), Some(9)][numbers.below(3)],
        depth: 1 + numbers.below(2),
        ..FakeOptions::default()
    }
}

#[test]
fn no_plan_changes_a_token() {
    let mut happened = Happened::default();
    for seed in 0..400 {
        let mut numbers = Numbers::new(seed);
        let mut fake = any_fake(&mut numbers);
        // From room for one of them to room for all.
        let one = fake.max_length.div_ceil(fake.page_size);
        fake.pages = one + numbers.below(3 * one);
        let requests: Vec<_> = (0..6)
            .map(|_| random_request(&mut numbers, &fake))
            .collect();
        let expected: Vec<_> = requests
            .iter()
            .map(|(prompt, options)| plain(prompt, options, &fake))
            .collect();
        let mut coin = || numbers.below(2) == 0;
        let events = Events {
            preempt: coin(),
            cancel: coin(),
            draft: coin(),
        };
        let what = format!("seed {seed}, {fake:?}, {events:?}");
        let mut steps = steps(&fake);
        run_all(
            &what,
            &mut numbers,
            &mut steps,
            &requests,
            &expected,
            events,
            &mut happened,
        );
    }
    // Or else the test would be about nothing.
    let Happened {
        out_of_pages,
        accepted,
        rejected,
        drafts_beside_others,
        cancelled_in_flight,
        ..
    } = happened;
    let counts = [
        out_of_pages,
        accepted,
        rejected,
        drafts_beside_others,
        cancelled_in_flight,
    ];
    assert!(counts.into_iter().min() >= Some(100), "{happened:?}");
}

#[test]
fn a_device_that_fails_now_and_then_costs_time_only() {
    let mut happened = Happened::default();
    for seed in 0..100 {
        let mut numbers = Numbers::new(seed);
        let fake = any_fake(&mut numbers);
        let requests: Vec<_> = (0..5)
            .map(|_| random_request(&mut numbers, &fake))
            .collect();
        let expected: Vec<_> = requests
            .iter()
            .map(|(prompt, options)| plain(prompt, options, &fake))
            .collect();
        let flaky = Flaky {
            inner: FakeRunner::new(&fake),
            numbers: Numbers::new(seed),
            one_in: 15,
        };
        let mut steps = StepLoop::new(Box::new(flaky));
        let events = Events {
            draft: true,
            ..Events::default()
        };
        let what = format!("seed {seed}, {fake:?}");
        run_all(
            &what,
            &mut numbers,
            &mut steps,
            &requests,
            &expected,
            events,
            &mut happened,
        );
    }
    assert!(happened.failures >= 100, "{happened:?}");
}

/// Continues `prompt` as [`generate`] does, breaking off after `most` tokens.
fn run(
    steps: &mut StepLoop,
    sequence: Sequence,
    prompt: &[u32],
    options: &GenerationOptions,
    most: usize,
) -> Result<Generated> {
    let mut heard = 0;
    let on_token = &mut |_: &_| {
        heard += 1;
        if heard < most {
            ControlFlow::Continue(())
        } else {
            ControlFlow::Break(())
        }
    };
    generate(
        steps,
        sequence,
        prompt,
        options.clone(),
        &mut |_| ControlFlow::Continue(()),
        on_token,
    )
}

#[test]
fn a_finished_sequence_holds_all_but_the_last_token() {
    for depth in [1, 2] {
        let fake = FakeOptions {
            depth,
            page_size: 4,
            ..FakeOptions::default()
        };
        let mut steps = steps(&fake);
        let prompt = random_ids(&mut Numbers::new(3), 39, fake.vocabulary);
        let options = greedy(Some(9));
        let (answer, _) = plain(&prompt, &options, &fake);
        let stop_at_four = GenerationOptions {
            stop_ids: [answer[3]].into(),
            ..options.clone()
        };
        let first = 1 + answer.iter().position(|&token| token == answer[3]).unwrap();
        for (most, options, len, finish) in [
            (usize::MAX, &options, 9, FinishReason::Length),
            (usize::MAX, &stop_at_four, first, FinishReason::Stop),
            (1, &options, 1, FinishReason::Stop),
            (5, &options, 5, FinishReason::Stop),
            // The token that completes a stop string may be the last that was asked for.
            (9, &options, 9, FinishReason::Stop),
        ] {
            let sequence = steps.new_sequence();
            let generated = run(&mut steps, sequence, &prompt, options, most).unwrap();
            assert_eq!(
                (&generated.tokens[..], generated.finish),
                (&answer[..len], finish)
            );
            assert!(!generated.context_full);
            assert_eq!(
                generated.sequence.tokens(),
                [&prompt, &answer[..len - 1]].concat()
            );
            assert_eq!(steps.in_flight(), 0);
            assert_eq!(generated.stats.prompt_tokens, 39);
            assert_eq!(
                (
                    generated.stats.cached_tokens,
                    generated.stats.completion_tokens
                ),
                (0, len)
            );

            // And it can be gone on with: all but the last token are reused.
            let longer = [&prompt[..], &answer[..len]].concat();
            let again = run(
                &mut steps,
                generated.sequence,
                &longer,
                &greedy(Some(9 - len)),
                usize::MAX,
            )
            .unwrap();
            assert_eq!(
                (again.tokens, again.stats.cached_tokens),
                (answer[len..].to_vec(), longer.len() - 1)
            );
            drop(again.sequence);
            assert_eq!(steps.pool().free(), fake.pages);
        }
    }
}

#[test]
fn breaking_off_among_accepted_drafts_drops_what_came_after() {
    let fake = FakeOptions::default();
    let prompt = random_ids(&mut Numbers::new(4), 10, fake.vocabulary);
    let (answer, _) = plain(&prompt, &greedy(Some(8)), &fake);
    for kept in 1..=6 {
        let mut steps = steps(&fake);
        let generation = Generation::new(
            steps.new_sequence(),
            &prompt,
            greedy(Some(8)),
            fake.max_length,
        )
        .unwrap();
        let slot = steps.admit(generation);
        steps
            .advance(&[Planned {
                slot,
                rows: 10,
                drafts: Vec::new(),
            }])
            .unwrap();
        let drafts = answer[1..5].to_vec();
        let advances = steps
            .advance(&[Planned {
                slot,
                rows: 1,
                drafts,
            }])
            .unwrap();
        assert_eq!((advances[0].tokens.len(), advances[0].drafted), (5, 4));
        steps
            .get_mut(slot)
            .unwrap()
            .end_after(kept, FinishReason::Stop);
        let generation = steps.remove(slot).unwrap();
        assert_eq!(generation.finish(), Some(FinishReason::Stop));
        assert_eq!(generation.generated(), &answer[..kept]);
        let sequence = generation.into_sequence();
        assert_eq!(sequence.tokens(), [&prompt, &answer[..kept - 1]].concat());

        let longer = [&prompt[..], &answer[..kept]].concat();
        let rest = run(
            &mut steps,
            sequence,
            &longer,
            &greedy(Some(8 - kept)),
            usize::MAX,
        )
        .unwrap();
        assert_eq!(
            (rest.tokens, rest.stats.cached_tokens),
            (answer[kept..].to_vec(), longer.len() - 1)
        );
    }
}

#[test]
fn drafts_that_reach_past_the_end_are_left_out() {
    let fake = FakeOptions {
        max_length: 16,
        ..FakeOptions::default()
    };
    let prompt = random_ids(&mut Numbers::new(8), 12, fake.vocabulary);
    // Ends: the context, the tokens asked for, a stop token.
    let (answer, _) = plain(&prompt, &greedy(None), &fake);
    assert_eq!(answer.len(), 4);
    let stop = GenerationOptions {
        stop_ids: [answer[2]].into(),
        ..greedy(None)
    };
    let stop_len = 1 + answer.iter().position(|&token| token == answer[2]).unwrap();
    for (options, len, drafted) in [
        (greedy(None), 4, 2),
        (greedy(Some(2)), 2, 0),
        (stop, stop_len, 2),
    ] {
        let mut steps = steps(&fake);
        let generation =
            Generation::new(steps.new_sequence(), &prompt, options, fake.max_length).unwrap();
        let slot = steps.admit(generation);
        steps
            .advance(&[Planned {
                slot,
                rows: 12,
                drafts: Vec::new(),
            }])
            .unwrap();
        if steps.get(slot).unwrap().finish().is_none() {
            let drafts = [&answer[1..], &[0; 20]].concat();
            let advances = steps
                .advance(&[Planned {
                    slot,
                    rows: 1,
                    drafts,
                }])
                .unwrap();
            assert_eq!(advances[0].drafted, drafted);
        }
        let generation = steps.remove(slot).unwrap();
        assert!(generation.finish().is_some());
        assert_eq!(generation.generated(), &answer[..len]);
        assert_eq!(generation.into_sequence().len(), 12 + len - 1);
    }
}

#[test]
fn a_step_is_launched_before_the_one_before_it_is_read() {
    let fake = FakeOptions {
        depth: 2,
        ..FakeOptions::default()
    };
    let prompt = random_ids(&mut Numbers::new(5), 6, fake.vocabulary);
    let penalized = SamplingParams {
        frequency_penalty: 0.5,
        ..SamplingParams::default()
    };
    let penalized = GenerationOptions {
        sampling: Arc::new(penalized),
        ..greedy(Some(6))
    };
    for (options, ahead) in [(greedy(Some(6)), 1), (penalized, 0)] {
        let mut steps = steps(&fake);
        let (answer, _) = plain(&prompt, &options, &fake);
        let generation =
            Generation::new(steps.new_sequence(), &prompt, options, fake.max_length).unwrap();
        let slot = steps.admit(generation);
        let mut tokens = Vec::new();
        while steps.get(slot).unwrap().finish().is_none() {
            let ready = steps.get(slot).unwrap().ready_rows();
            let plan = (ready > 0).then(|| Planned {
                slot,
                rows: ready,
                drafts: Vec::new(),
            });
            for advance in steps.advance(plan.as_slice()).unwrap() {
                tokens.extend(advance.tokens.iter().map(|sampled| sampled.token));
                // Of the last token no successor is wanted.
                let expected = if tokens.len() < 6 { ahead } else { 0 };
                assert_eq!(steps.in_flight(), expected, "after {} tokens", tokens.len());
            }
        }
        assert_eq!(tokens, answer);
    }
}

#[test]
fn limits_of_tokens_and_context() {
    for depth in [1, 2] {
        let fake = FakeOptions {
            max_length: 20,
            depth,
            ..FakeOptions::default()
        };
        let mut steps = steps(&fake);
        let ids = random_ids(&mut Numbers::new(6), 30, fake.vocabulary);
        let mut answer = |len: usize, max_tokens| {
            let sequence = steps.new_sequence();
            let result = run(
                &mut steps,
                sequence,
                &ids[..len],
                &greedy(max_tokens),
                usize::MAX,
            );
            let result = result.map(|generated| {
                let Generated {
                    tokens,
                    finish,
                    context_full,
                    sequence,
                    ..
                } = generated;
                assert_eq!(finish, FinishReason::Length);
                assert_eq!(tokens, plain(&ids[..len], &greedy(max_tokens), &fake).0);
                (tokens.len(), context_full, sequence.len())
            });
            assert_eq!((steps.pool().free(), steps.in_flight()), (fake.pages, 0));
            result
        };
        // Nothing is asked for, so nothing is run.
        assert_eq!(answer(5, Some(0)).unwrap(), (0, false, 0));
        assert_eq!(answer(5, Some(1)).unwrap(), (1, false, 5));
        assert_eq!(answer(5, Some(15)).unwrap(), (15, false, 19));
        assert_eq!(answer(5, Some(16)).unwrap(), (15, true, 19));
        assert_eq!(answer(5, Some(usize::MAX)).unwrap(), (15, true, 19));
        assert_eq!(answer(5, None).unwrap(), (15, true, 19));
        assert_eq!(answer(19, None).unwrap(), (1, true, 19));
        assert_eq!(answer(19, Some(1)).unwrap(), (1, false, 19));
        for len in [20, 21, 30] {
            let error = answer(len, Some(1)).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Usage);
            let expected = format!(
                "the context is full: {} positions are needed and the limit is 20",
                len + 1
            );
            assert!(error.to_string().starts_with(&expected), "{error}");
        }
        let error = answer(0, None).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert_eq!(
            error.to_string(),
            "the prompt is empty: there is nothing to continue"
        );
    }
}

#[test]
fn an_error_leaves_the_loop_idle_and_all_pages_free() {
    for depth in [1, 2] {
        let fake = FakeOptions {
            depth,
            pages: 12,
            max_rows: 8,
            ..FakeOptions::default()
        };
        let mut steps = steps(&fake);
        let ids = random_ids(&mut Numbers::new(9), 60, fake.vocabulary);

        // The bad token is in the second chunk; with two steps in flight the first one is not read yet.
        let mut bad = ids[..12].to_vec();
        bad[10] = 64;
        let sequence = steps.new_sequence();
        let error = run(&mut steps, sequence, &bad, &greedy(None), usize::MAX).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage);
        assert_eq!(
            error.to_string(),
            "there is no token 64 in a vocabulary of 64"
        );
        assert_eq!((steps.in_flight(), steps.pool().free()), (0, 12));
        assert!(steps.runner().is_ok());

        let sequence = steps.new_sequence();
        let error = run(&mut steps, sequence, &ids, &greedy(None), usize::MAX).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Overload);
        assert_eq!(
            error.to_string(),
            "the KV cache is out of pages: 2 more are needed and 0 are free"
        );
        assert_eq!((steps.in_flight(), steps.pool().free()), (0, 12));

        // Out of pages in the middle of an answer.
        let sequence = steps.new_sequence();
        let error = run(&mut steps, sequence, &ids[..40], &greedy(None), usize::MAX).unwrap_err();
        assert_eq!(
            error.to_string(),
            "the KV cache is out of pages: 1 more are needed and 0 are free"
        );
        assert_eq!((steps.in_flight(), steps.pool().free()), (0, 12));

        let sequence = steps.new_sequence();
        let generated = run(
            &mut steps,
            sequence,
            &ids[..40],
            &greedy(Some(9)),
            usize::MAX,
        )
        .unwrap();
        assert_eq!(
            generated.tokens,
            plain(&ids[..40], &greedy(Some(9)), &fake).0
        );
    }
}

#[test]
fn wrong_plans_are_bugs_that_change_nothing() {
    let fake = FakeOptions::default();
    let mut steps = steps(&fake);
    let ids = random_ids(&mut Numbers::new(9), 10, fake.vocabulary);
    let generation =
        Generation::new(steps.new_sequence(), &ids, greedy(Some(3)), fake.max_length).unwrap();
    let slot = steps.admit(generation);
    let gone = steps
        .admit(Generation::new(steps.new_sequence(), &ids, greedy(None), fake.max_length).unwrap());
    steps.remove(gone).unwrap();
    let planned = |slot, rows, drafts: &[u32]| Planned {
        slot,
        rows,
        drafts: drafts.to_vec(),
    };
    for (plan, reason) in [
        (
            vec![planned(slot, 11, &[])],
            "11 rows planned where 10 are ready",
        ),
        (
            vec![planned(slot, 0, &[])],
            "0 rows planned where 10 are ready",
        ),
        (
            vec![planned(slot, 10, &[1])],
            "drafts follow one known last token",
        ),
        (
            vec![planned(slot, 1, &[]), planned(slot, 1, &[])],
            "slot 0 is planned twice",
        ),
        (
            vec![planned(slot, 1, &[]), planned(gone, 1, &[])],
            "no generation is in slot 1",
        ),
    ] {
        let error = steps.advance(&plan).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Bug);
        assert!(error.to_string().starts_with(reason), "{error}");
    }
    let mut tokens = Vec::new();
    while steps.get(slot).unwrap().finish().is_none() {
        let rows = steps.get(slot).unwrap().ready_rows();
        let advances = steps.advance(&[planned(slot, rows, &[])]).unwrap();
        tokens.extend(advances[0].tokens.iter().map(|sampled| sampled.token));
    }
    assert_eq!(tokens, plain(&ids, &greedy(Some(3)), &fake).0);
}

#[test]
fn a_page_that_was_reserved_but_never_copied_is_not_reused() {
    let fake = FakeOptions {
        page_size: 4,
        pages: 8,
        ..FakeOptions::default()
    };
    let mut steps = steps(&fake);
    let ids = random_ids(&mut Numbers::new(12), 11, fake.vocabulary);
    let sequence = steps.new_sequence();
    let first = run(
        &mut steps,
        sequence,
        &ids[..6],
        &greedy(Some(1)),
        usize::MAX,
    )
    .unwrap();
    let generation = Generation::new(
        first.sequence.fork(),
        &ids,
        greedy(Some(4)),
        fake.max_length,
    )
    .unwrap();
    assert_eq!(generation.cached_tokens(), 6);
    let slot = steps.admit(generation);
    // A page of its own for positions 4 and 5, which hold nothing until a step copies them.
    steps.reserve(slot, 5).unwrap();
    let sequence = steps.remove(slot).unwrap().into_sequence();
    let generated = run(&mut steps, sequence, &ids, &greedy(Some(4)), usize::MAX).unwrap();
    assert_eq!(generated.tokens, plain(&ids, &greedy(Some(4)), &fake).0);
    assert_eq!(generated.stats.cached_tokens, 4);
    assert_eq!(first.sequence.tokens(), &ids[..6]);
}

#[test]
fn a_window_needs_no_more_pages_than_it_sees() {
    for depth in [1, 2] {
        let fake = FakeOptions {
            max_length: 400,
            page_size: 4,
            // What a window sees, and a chunk for each step on its way.
            pages: [6, 8][depth - 1],
            max_rows: 8,
            window: Some(9),
            depth,
            ..FakeOptions::default()
        };
        let mut steps = steps(&fake);
        let prompt = random_ids(&mut Numbers::new(13), 100, fake.vocabulary);
        let sequence = steps.new_sequence();
        let generated = run(
            &mut steps,
            sequence,
            &prompt,
            &greedy(Some(150)),
            usize::MAX,
        )
        .unwrap();
        assert_eq!(
            generated.tokens,
            plain(&prompt, &greedy(Some(150)), &fake).0
        );
        assert_eq!(generated.sequence.len(), 249);
        assert!(generated.sequence.table().first_page > 50);
        // What follows is reused, what branches off is not.
        let longer = [&prompt[..], &generated.tokens].concat();
        let again = run(
            &mut steps,
            generated.sequence,
            &longer,
            &greedy(Some(5)),
            usize::MAX,
        )
        .unwrap();
        assert_eq!(
            (again.tokens, again.stats.cached_tokens),
            (plain(&longer, &greedy(Some(5)), &fake).0, 249)
        );
        let branch = run(
            &mut steps,
            again.sequence,
            &longer[..200],
            &greedy(Some(5)),
            usize::MAX,
        )
        .unwrap();
        assert_eq!(
            (branch.tokens, branch.stats.cached_tokens),
            (plain(&longer[..200], &greedy(Some(5)), &fake).0, 0)
        );
        drop(branch.sequence);
        assert_eq!(steps.pool().free(), fake.pages);
    }
}

#[test]
fn progress_counts_the_prompt() {
    for depth in [1, 2] {
        let fake = FakeOptions {
            depth,
            max_rows: 8,
            ..FakeOptions::default()
        };
        let mut steps = steps(&fake);
        let ids = random_ids(&mut Numbers::new(14), 20, fake.vocabulary);
        let mut heard = Vec::new();
        let sequence = steps.new_sequence();
        let on_token = &mut |_: &_| ControlFlow::Continue(());
        generate(
            &mut steps,
            sequence,
            &ids,
            greedy(Some(2)),
            &mut |done| {
                heard.push(done);
                ControlFlow::Continue(())
            },
            on_token,
        )
        .unwrap();
        assert_eq!(heard, [8, 16]);
    }
}
