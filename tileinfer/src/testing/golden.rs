//! A backend against what transformers computed: logits and hidden states of small random models, greedy
//! answers, and a real model's. The fixtures and their tolerances are described in `testdata/golden/README.md`.

use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;

use serde::Deserialize;

use super::assert_close;
use crate::backend::{Backend, ComputeType};
use crate::config::ModelConfig;
use crate::engine::{GenerationOptions, StepLoop};
use crate::eval;
use crate::generate::generate;
use crate::kv::Sequence;
use crate::model::{DecoderLM, LoadOptions, Quant};
use crate::runner::{Batch, Input, ModelRunner, Rows, RunnerOptions, Span, Want};
use crate::sampling::SamplingParams;
use crate::weights::{Checkpoint, Dtype, HostModel};

/// The models in `testdata/golden/models`.
pub const GOLDEN_MODELS: [&str; 18] = [
    "llama-rope3",
    "llama-tied",
    "llama-bias",
    "llama-f16",
    "llama-f32",
    "llama-linear",
    "llama-both",
    "llama-3heads",
    "mistral-window",
    "mistral3",
    "ministral3",
    "qwen2",
    "qwen3",
    "qwen3-yarn",
    "qwen3-windows",
    "apertus",
    "apertus1p5",
    "smollm3",
];

#[derive(Deserialize)]
struct Expected {
    noise: Noise,
    cases: Vec<Case>,
}

#[derive(Deserialize)]
struct Noise {
    rms_f32_minus_bf16: f64,
    top1_same_fraction: f64,
}

#[derive(Deserialize)]
struct Case {
    case: String,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
}

/// A model of `dir` on `backend`, with room for `length` positions and `taps` kept.
pub fn load<B: Backend>(backend: B, dir: &Path, options: &RunnerOptions) -> ModelRunner<B> {
    load_quantized(backend, dir, Quant::None, options)
}

/// [`load`], with what `quant` says done to the weights.
pub fn load_quantized<B: Backend>(
    backend: B,
    dir: &Path,
    quant: Quant,
    options: &RunnerOptions,
) -> ModelRunner<B> {
    let config = ModelConfig::from_dir(dir).unwrap();
    let host = HostModel::load(
        &config,
        &Checkpoint::open(dir).unwrap(),
        backend.compute_type(),
    )
    .unwrap();
    let load = LoadOptions {
        quant,
        ..LoadOptions::new(options.pages * options.page_size / options.max_spans)
    };
    let model = DecoderLM::load(&backend, &config, &host, &load, &mut |_, _| ()).unwrap();
    ModelRunner::new(backend, model, options).unwrap()
}

/// The span that runs `ids` after what `sequence` holds; room is made for it.
pub fn span(sequence: &mut Sequence, ids: &[u32], want: Want) -> Span {
    let start = sequence.len();
    let copies = sequence.reserve(start, start + ids.len()).unwrap();
    assert!(copies.is_empty());
    Span {
        input: Input::Ids(ids.to_vec()),
        start,
        table: sequence.table(),
        want,
    }
}

/// Greedy options for `max_tokens` tokens, with no token that ends the answer.
pub fn greedy(max_tokens: usize) -> GenerationOptions {
    GenerationOptions {
        sampling: Arc::new(SamplingParams::default()),
        seed: 0,
        max_tokens: Some(max_tokens),
        stop_ids: [].into(),
        vocabulary: usize::MAX,
        top_logprobs: None,
    }
}

/// The tokens of `options` after `prompt`.
pub fn tokens(steps: &mut StepLoop, prompt: &[u32], options: GenerationOptions) -> Vec<u32> {
    let sequence = steps.new_sequence();
    let on_token = &mut |_: &_| ControlFlow::Continue(());
    generate(
        steps,
        sequence,
        prompt,
        options,
        &mut |_| ControlFlow::Continue(()),
        on_token,
    )
    .unwrap()
    .tokens
}

/// The f32 tensor `name` of a fixture.
pub(super) fn fixture(fixtures: &Checkpoint, name: &str) -> Vec<f32> {
    let tensor = fixtures
        .tensor(name)
        .unwrap_or_else(|| panic!("no tensor {name}"));
    assert_eq!(tensor.dtype, Dtype::F32);
    tensor
        .data
        .as_chunks()
        .0
        .iter()
        .map(|&bytes| f32::from_le_bytes(bytes))
        .collect()
}

/// Holds a backend against the golden model `name` under `golden` (a folder with `models` and `expected`):
/// f32 logits and hidden states within `tolerance`, greedy answers equal, and bf16 about as near to f32 as
/// transformers' own bf16. Returns a line of a table, and panics at the first f32 number that is wrong.
pub fn golden_model<B: Backend>(
    make: &dyn Fn(ComputeType) -> B,
    golden: &Path,
    name: &str,
    tolerance: f32,
) -> GoldenReport {
    let dir = golden.join("models").join(name);
    let text = std::fs::read_to_string(golden.join(format!("expected/{name}.json"))).unwrap();
    let expected: Expected = serde_json::from_str(&text).unwrap();
    let fixtures =
        Checkpoint::open_file(golden.join(format!("expected/{name}.safetensors"))).unwrap();
    let layers = ModelConfig::from_dir(&dir).unwrap().layers.len();

    let mut report = GoldenReport {
        name: name.to_owned(),
        rms: 0.0,
        rms_limit: 1.5 * expected.noise.rms_f32_minus_bf16,
        margin: 0.0,
        margin_limit: 4.0 * expected.noise.rms_f32_minus_bf16,
        same: 0.0,
        same_limit: expected.noise.top1_same_fraction - 0.03,
    };
    for kind in [ComputeType::F32, ComputeType::Bf16] {
        let options = RunnerOptions {
            taps: (0..=layers).collect(),
            ..RunnerOptions::for_length(320)
        };
        let mut steps = StepLoop::new(Box::new(load(make(kind), &dir, &options)));
        let width = steps.limits().head_rows;
        for case in &expected.cases {
            let mut sequence = steps.new_sequence();
            let want = Want {
                rows: Rows::All,
                logits: true,
                hidden: true,
                taps: true,
                sample: Vec::new(),
            };
            let batch = Batch {
                spans: vec![span(&mut sequence, &case.prompt_ids, want)],
                copies: Vec::new(),
            };
            let output = steps
                .runner()
                .unwrap()
                .step(&batch)
                .unwrap()
                .spans
                .remove(0);
            drop(sequence);

            let what = format!("{name}, {}, {kind:?}", case.case);
            let exact = fixture(&fixtures, &format!("{}.logits_f32", case.case));
            let logits = &output.logits[output.logits.len() - exact.len()..];
            match kind {
                ComputeType::F32 => {
                    assert_close(&format!("{what}: logits"), logits, &exact, tolerance);
                    if case.case == "short" {
                        let hidden = fixture(&fixtures, "short.hidden_f32");
                        hidden_states(
                            &what,
                            &output.taps,
                            &output.hidden,
                            &hidden,
                            layers + 1,
                            tolerance,
                        );
                    }
                    let answer =
                        tokens(&mut steps, &case.prompt_ids, greedy(case.greedy_ids.len()));
                    assert_eq!(answer, case.greedy_ids, "{what}: greedy answer");
                }
                ComputeType::Bf16 if case.case == "short" => {
                    report.compare(logits, &exact, width);
                }
                ComputeType::Bf16 => {}
            }
        }
    }
    report
}

/// How far a backend's bf16 is from f32 on one golden model, and how far it may be.
#[derive(Debug, Clone)]
pub struct GoldenReport {
    /// The model.
    pub name: String,
    /// Root mean square difference of bf16 logits from transformers' f32 ones.
    pub rms: f64,
    /// One and a half times what transformers' own bf16 has.
    pub rms_limit: f64,
    /// Where the best token is another: how far apart the two are in f32, at most.
    pub margin: f64,
    /// Four times the root mean square difference of transformers' own bf16: two logits that near may change places.
    pub margin_limit: f64,
    /// Fraction of positions whose best token is the same.
    pub same: f64,
    /// What transformers' own bf16 has, less 0.03.
    pub same_limit: f64,
}

impl GoldenReport {
    /// Whether bf16 is as near as it has to be.
    pub fn passes(&self) -> bool {
        self.rms <= self.rms_limit
            && self.margin <= self.margin_limit
            && self.same >= self.same_limit
    }

    /// Compares rows of `width` logits in bf16 with those in f32.
    fn compare(&mut self, found: &[f32], exact: &[f32], width: usize) {
        let squares = found.iter().zip(exact);
        let squares: f64 = squares.map(|(a, b)| f64::from(a - b).powi(2)).sum();
        self.rms = (squares / found.len() as f64).sqrt();
        let rows = found.chunks_exact(width).zip(exact.chunks_exact(width));
        let mut same = 0;
        for (found, exact) in rows.clone() {
            let (here, there) = (eval::argmax(found), eval::argmax(exact));
            same += usize::from(here == there);
            self.margin = self.margin.max((exact[there] - exact[here]).into());
        }
        self.same = same as f64 / rows.count() as f64;
    }
}

impl std::fmt::Display for GoldenReport {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let GoldenReport {
            name,
            rms,
            rms_limit,
            margin,
            margin_limit,
            same,
            same_limit,
        } = self;
        let verdict = if self.passes() { "ok" } else { "FAILED" };
        write!(
            f,
            "{name:16} rms {rms:.5} of {rms_limit:.5}  margin {margin:.4} of {margin_limit:.4}  same {same:.3} of {same_limit:.3}  {verdict}"
        )
    }
}

/// [`golden_model`] for all of them; prints the table and panics if any fails.
pub fn golden_models<B: Backend>(make: &dyn Fn(ComputeType) -> B, golden: &Path, tolerance: f32) {
    let reports: Vec<_> = GOLDEN_MODELS
        .iter()
        .map(|name| golden_model(make, golden, name, tolerance))
        .collect();
    for report in &reports {
        println!("{report}");
    }
    assert!(
        reports.iter().all(GoldenReport::passes),
        "bf16 is too far from f32, see the table"
    );
}

/// `taps` holds all states of a row side by side, `expected` all rows of a state one after the other, the
/// last state after the final norm, as `last` is.
fn hidden_states(
    what: &str,
    taps: &[f32],
    last: &[f32],
    expected: &[f32],
    states: usize,
    tolerance: f32,
) {
    let state_len = expected.len() / states;
    assert_eq!(
        (taps.len(), last.len()),
        (expected.len(), state_len),
        "{what}: sizes of hidden states"
    );
    // As many rows as the short prompt has tokens.
    let rows = 40;
    let hidden = state_len / rows;
    for (state, expected) in expected.chunks_exact(state_len).enumerate() {
        let found: Vec<f32> = if state == states - 1 {
            last.to_vec()
        } else {
            let row = |row: usize| &taps[(row * states + state) * hidden..][..hidden];
            (0..rows).flat_map(|i| row(i).to_vec()).collect()
        };
        assert_close(
            &format!("{what}: hidden state {state}"),
            &found,
            expected,
            tolerance,
        );
    }
}

#[derive(Deserialize)]
struct Real {
    cases: Vec<RealCase>,
}

#[derive(Deserialize)]
struct RealCase {
    case: usize,
    prompt_ids: Vec<u32>,
    greedy_ids: Vec<u32>,
    greedy_top_f32: Vec<Top>,
    prompt_logprobs_f32: Vec<f64>,
}

#[derive(Deserialize)]
struct Top {
    logits: Vec<f32>,
}

/// Holds a backend against what transformers answers with SmolLM2-135M-Instruct, whose directory is `dir`: in
/// f32 the same answers and log probabilities within 2e-3; along these answers, the same best token in bf16
/// too wherever the two best are more than 0.5 apart.
pub fn golden_smollm2<B: Backend>(make: &dyn Fn(ComputeType) -> B, golden: &Path, dir: &Path) {
    let text = std::fs::read_to_string(golden.join("expected/smollm2-135m-instruct.json")).unwrap();
    let real: Real = serde_json::from_str(&text).unwrap();
    let eos = ModelConfig::from_dir(dir).unwrap().eos_token_ids;
    for kind in [ComputeType::F32, ComputeType::Bf16] {
        let mut steps = StepLoop::new(Box::new(load(
            make(kind),
            dir,
            &RunnerOptions::for_length(256),
        )));
        for case in &real.cases {
            let along = [&case.prompt_ids[..], &case.greedy_ids].concat();
            let first = case.prompt_ids.len() - 1;
            let mut best = Vec::new();
            eval::teacher_force(&mut steps, &along, &mut |position, logits| {
                if (first..along.len() - 1).contains(&position) {
                    best.push(eval::argmax(logits) as u32);
                }
                Ok(())
            })
            .unwrap();
            assert_eq!(best.len(), case.greedy_top_f32.len());
            for (i, (&found, top)) in best.iter().zip(&case.greedy_top_f32).enumerate() {
                let margin = top.logits[0] - top.logits[1];
                let close = kind == ComputeType::Bf16 && margin <= 0.5;
                let what = format!(
                    "case {}, {kind:?}: token {i} with margin {margin}",
                    case.case
                );
                assert!(close || found == case.greedy_ids[i], "{what}");
            }
            if kind == ComputeType::F32 {
                let mut options = greedy(case.greedy_ids.len());
                options.stop_ids = eos.clone().into();
                assert_eq!(
                    tokens(&mut steps, &case.prompt_ids, options),
                    case.greedy_ids,
                    "case {}",
                    case.case
                );
                let found = eval::log_probs(&mut steps, &case.prompt_ids).unwrap();
                assert_eq!(found.len(), case.prompt_logprobs_f32.len());
                for (i, (found, expected)) in
                    found.iter().zip(&case.prompt_logprobs_f32).enumerate()
                {
                    let near = (found - expected).abs() <= 2e-3;
                    assert!(
                        near,
                        "case {}: log probability {i} is {found}, not {expected}",
                        case.case
                    );
                }
            }
        }
    }
}
