//! Speculation on a real model: a hundred answers, greedy and sampled, have the tokens of plain decoding.

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::mpsc::channel;

use tileinfer::backend::ComputeType;
use tileinfer::config::ModelConfig;
use tileinfer::engine::{
    Ended, Engine, EngineOptions, Event, GenerationOptions, Request, StepLoop,
};
use tileinfer::model::{DecoderLM, LoadOptions, Quant};
use tileinfer::runner::{ModelRunner, Runner, RunnerOptions};
use tileinfer::sampling::SamplingParams;
use tileinfer::spec::{DraftProposer, NgramProposer, SpecStats, Speculation};
use tileinfer::testing::load;
use tileinfer::tokenizer::Tokenizer;
use tileinfer::weights::{Checkpoint, HostModel};
use tileinfer_cpu::CpuBackend;

/// Tokens of an answer: enough for several rounds, few enough for a test.
const TOKENS: usize = 8;

/// A hundred prompts that repeat themselves more or less.
fn prompts() -> Vec<String> {
    let things = ["red", "seven", "river", "Paris", "apple"];
    let others = ["blue", "nine", "forest", "Rome"];
    let forms: [fn(&str, &str) -> String; 5] = [
        |a, b| format!("{a}, {b}, {a}, {b}, {a},"),
        |a, b| format!("The {a} is here and the {b} is there. The {a} is here and the"),
        |a, b| format!("def {a}(x):\n    return x + 1\n\ndef {b}(x):\n"),
        |a, b| format!("Question: what is {a}? Answer: {b}. Question: what is {b}?"),
        |a, b| format!("Once there was {a}, and after that came {b}"),
    ];
    let mut all = Vec::new();
    for form in forms {
        for a in things {
            all.extend(others.iter().map(|b| form(a, b)));
        }
    }
    all
}

/// Room for many short texts.
fn options() -> RunnerOptions {
    RunnerOptions {
        pages: 25 * 2,
        max_rows: 256,
        max_spans: 25,
        ..RunnerOptions::for_length(64)
    }
}

fn runner(dir: &Path) -> Box<dyn Runner> {
    let backend = CpuBackend::new(ComputeType::Bf16, 2);
    Box::new(load(backend, dir, &options()))
}

/// The same model with int8 weights.
fn int8_runner(dir: &Path) -> Box<dyn Runner> {
    let backend = CpuBackend::new(ComputeType::Bf16, 2);
    let config = ModelConfig::from_dir(dir).unwrap();
    let host = HostModel::load(&config, &Checkpoint::open(dir).unwrap(), ComputeType::F32);
    let load = LoadOptions {
        quant: Quant::Int8,
        ..LoadOptions::new(128)
    };
    let model = DecoderLM::load(&backend, &config, &host.unwrap(), &load, &mut |_, _| ());
    Box::new(ModelRunner::new(backend, model.unwrap(), &options()).unwrap())
}

/// The answers to `prompts`, many at a time, and what speculation counted.
fn answers(
    steps: StepLoop,
    tokenizer: &Tokenizer,
    prompts: &[String],
    sampled: bool,
) -> (Vec<Vec<u32>>, SpecStats) {
    let engine = Engine::start(steps, None, EngineOptions::default()).unwrap();
    let ask = |(i, prompt): (usize, &String)| {
        let sampling = SamplingParams {
            temperature: if sampled && i % 2 == 1 { 0.8 } else { 0.0 },
            top_p: 0.95,
            repetition_penalty: if i % 8 == 3 { 1.1 } else { 1.0 },
            ..SamplingParams::default()
        };
        let (sender, events) = channel();
        let request = Request {
            prompt: tokenizer.encode_prompt(prompt).unwrap(),
            options: GenerationOptions {
                sampling: Arc::new(sampling),
                seed: i as u64,
                max_tokens: Some(TOKENS),
                stop_ids: Arc::default(),
                vocabulary: tokenizer.vocab_size(),
                top_logprobs: None,
            },
            stop_strings: Vec::new(),
            skip_special: true,
            constraint: None,
            on_event: Box::new(move |event| sender.send(event).is_ok()),
        };
        (engine.submit(request).unwrap(), events)
    };
    let asked: Vec<_> = prompts.iter().enumerate().map(ask).collect();
    let mut all = SpecStats::default();
    let mut hear = |events| {
        let mut tokens = Vec::new();
        for event in events {
            match event {
                Event::Tokens { tokens: more, .. } => {
                    tokens.extend(more.iter().map(|sampled| sampled.token));
                }
                Event::End(Ended::Finished(finished)) => {
                    let spec = finished.spec.unwrap_or_default();
                    all.steps += spec.steps;
                    all.drafted += spec.drafted;
                    all.accepted += spec.accepted;
                }
                Event::End(other) => panic!("{other:?}"),
                Event::Started { .. } => {}
            }
        }
        tokens
    };
    let answers = asked
        .into_iter()
        .map(|(_handle, events)| hear(events))
        .collect();
    assert!(engine.when_idle().unwrap().is_whole());
    (answers, all)
}

#[test]
fn a_hundred_answers_are_those_of_plain_decoding() {
    let dir: PathBuf =
        Path::new(env!("CARGO_MANIFEST_DIR")).join("../models/smollm2-135m-instruct");
    if !dir.join("model.safetensors").exists() {
        assert!(
            std::env::var_os("CI").is_none(),
            "the real model has to be there in CI"
        );
        println!(
            "SKIPPED: there is no {}; cargo xtask demo-model makes it",
            dir.display()
        );
        return;
    }
    let tokenizer = Tokenizer::from_dir(&dir).unwrap();
    let prompts = prompts();
    assert_eq!(prompts.len(), 100);
    let (plain, none) = answers(StepLoop::new(runner(&dir)), &tokenizer, &prompts, true);
    assert_eq!(none, SpecStats::default());
    assert!(plain.iter().all(|answer| answer.len() == TOKENS));

    let ngrams = NgramProposer::new(4, 3, 1).unwrap();
    let steps = StepLoop::new(runner(&dir)).with_speculation(Speculation::new(ngrams));
    let (found, stats) = answers(steps, &tokenizer, &prompts, true);
    for (i, prompt) in prompts.iter().enumerate() {
        assert_eq!(found[i], plain[i], "{prompt}");
    }
    assert!(
        stats.accepted > 50 && stats.accepted < stats.drafted,
        "{stats:?}"
    );

    // Its int8 form is nearly always right.
    let int8 = DraftProposer::new(int8_runner(&dir), 3, false).unwrap();
    let steps = StepLoop::new(runner(&dir)).with_speculation(Speculation::new(int8));
    let (found, stats) = answers(steps, &tokenizer, &prompts, true);
    for (i, prompt) in prompts.iter().enumerate() {
        assert_eq!(found[i], plain[i], "{prompt}");
    }
    assert!(stats.acceptance_rate() > 0.5, "{stats:?}");

    // A model that drafts for itself is always right, where nothing is drawn and nothing penalized.
    let few: Vec<String> = prompts.into_iter().step_by(8).collect();
    let (plain, _) = answers(StepLoop::new(runner(&dir)), &tokenizer, &few, false);
    let itself = DraftProposer::new(runner(&dir), 3, false).unwrap();
    let steps = StepLoop::new(runner(&dir)).with_speculation(Speculation::new(itself));
    let (found, stats) = answers(steps, &tokenizer, &few, false);
    assert_eq!(found, plain);
    assert_eq!(stats.accepted, stats.drafted, "{stats:?}");
    assert!(stats.accepted >= few.len() * (TOKENS - 4), "{stats:?}");
}
