//! Models and prompts that cannot work, on the reference backend: whatever is wrong, the error says whose
//! problem it is, what is wrong and where, and nothing is lost by it.

use std::fs;
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use serde_json::{Value, json};
use tempfile::TempDir;
use tileinfer::backend::{ComputeType, ReferenceBackend};
use tileinfer::chat::ChatTemplate;
use tileinfer::config::ModelConfig;
use tileinfer::engine::{Generation, GenerationOptions, Planned, StepLoop};
use tileinfer::eval;
use tileinfer::generate::answer;
use tileinfer::model::{DecoderLM, LoadOptions};
use tileinfer::plan::MemoryPlan;
use tileinfer::runner::{ModelRunner, RunnerOptions};
use tileinfer::sampling::SamplingParams;
use tileinfer::tokenizer::Tokenizer;
use tileinfer::weights::{Checkpoint, HostModel};
use tileinfer::{ErrorKind, Result};

/// Positions that models are opened for.
const LENGTH: usize = 128;

const KINDS: [ComputeType; 2] = [ComputeType::Bf16, ComputeType::F32];

/// A copy of the golden model `name` to spoil.
fn model(name: &str) -> TempDir {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../testdata/golden/models")
        .join(name);
    let copy = tempfile::tempdir().unwrap();
    for file in fs::read_dir(golden).unwrap() {
        let file = file.unwrap();
        fs::copy(file.path(), copy.path().join(file.file_name())).unwrap();
    }
    copy
}

fn weights(dir: &TempDir) -> PathBuf {
    dir.path().join("model.safetensors")
}

/// Changes the header of a weights file; lengths are put right.
fn edit_header(dir: &TempDir, edit: impl FnOnce(&mut Value)) {
    let bytes = fs::read(weights(dir)).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let mut header: Value = serde_json::from_slice(&bytes[8..end]).unwrap();
    edit(&mut header);
    let header = header.to_string();
    let length = (header.len() as u64).to_le_bytes();
    fs::write(
        weights(dir),
        [&length, header.as_bytes(), &bytes[end..]].concat(),
    )
    .unwrap();
}

/// Writes `values`, in bf16, into a tensor from element `first` on.
fn poison(dir: &TempDir, tensor: &str, first: usize, values: &[f32]) {
    let mut bytes = fs::read(weights(dir)).unwrap();
    let end = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    let header: Value = serde_json::from_slice(&bytes[8..end]).unwrap();
    assert_eq!(header[tensor]["dtype"], "BF16", "{tensor}");
    let start = end + header[tensor]["data_offsets"][0].as_u64().unwrap() as usize + 2 * first;
    for (i, value) in values.iter().enumerate() {
        let bits = (value.to_bits() >> 16) as u16;
        bytes[start + 2 * i..start + 2 * i + 2].copy_from_slice(&bits.to_le_bytes());
    }
    fs::write(weights(dir), bytes).unwrap();
}

fn edit_config(dir: &TempDir, edit: impl FnOnce(&mut Value)) {
    let path = dir.path().join("config.json");
    let mut config: Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    fs::write(path, config.to_string()).unwrap();
}

fn open(dir: &Path, kind: ComputeType) -> Result<StepLoop> {
    let config = ModelConfig::from_dir(dir)?;
    let host = HostModel::load(&config, &Checkpoint::open(dir)?, kind)?;
    let backend = ReferenceBackend::new(kind);
    let load = LoadOptions::new(LENGTH);
    let model = DecoderLM::load(&backend, &config, &host, &load, &mut |_, _| ())?;
    let options = RunnerOptions {
        pages: 8,
        max_spans: 2,
        ..RunnerOptions::for_length(LENGTH)
    };
    // Two steps in flight, so that an error can come while one of them has not been read.
    let runner = ModelRunner::new(backend, model, &options)?.with_depth(2);
    Ok(StepLoop::new(Box::new(runner)))
}

fn options(temperature: f32) -> GenerationOptions {
    GenerationOptions {
        sampling: Arc::new(SamplingParams {
            temperature,
            ..SamplingParams::default()
        }),
        seed: 3,
        max_tokens: Some(4),
        stop_ids: [].into(),
        vocabulary: usize::MAX,
        top_logprobs: None,
    }
}

/// The text that follows `prompt`.
fn ask(
    steps: &mut StepLoop,
    dir: &Path,
    prompt: &str,
    options: GenerationOptions,
) -> Result<String> {
    let tokenizer = Tokenizer::from_dir(dir)?;
    let ids = tokenizer.encode_prompt(prompt)?;
    let sequence = steps.new_sequence();
    let on_text = &mut |_: &str| ControlFlow::Continue(());
    let answer = answer(
        steps,
        &tokenizer,
        sequence,
        &ids,
        options,
        &[],
        &mut |_| (),
        on_text,
    )?;
    Ok(answer.text)
}

/// The message of a refusal of that kind, without the name of the directory.
fn refusal<T>(result: Result<T>, kind: ErrorKind, dir: &TempDir) -> String {
    let error = result.err().expect("it is refused");
    assert_eq!(error.kind(), kind, "{error}");
    error
        .to_string()
        .replace(&format!("{}/", dir.path().display()), "")
        .replace(&dir.path().display().to_string(), "DIR")
}

/// The message of the refusal to open a model.
fn refused(dir: &TempDir) -> String {
    let messages = KINDS.map(|kind| refusal(open(dir.path(), kind), ErrorKind::BadModel, dir));
    assert_eq!(messages[0], messages[1]);
    messages[0].clone()
}

#[test]
fn an_unspoilt_model_answers() {
    let dir = model("qwen3");
    for kind in KINDS {
        let mut steps = open(dir.path(), kind).unwrap();
        assert!(
            !ask(&mut steps, dir.path(), "Hello", options(0.0))
                .unwrap()
                .is_empty()
        );
    }
}

#[test]
fn truncated_weights() {
    let dir = model("qwen3");
    let bytes = fs::read(weights(&dir)).unwrap();
    for (len, reason) in [
        (
            bytes.len() - 1,
            "tensor model.norm.weight ends at byte 445568 of the data and the file has 445567 bytes of data",
        ),
        (
            4000,
            "tensor model.embed_tokens.weight ends at byte 83456 of the data and the file has 1496 bytes of data",
        ),
        (
            100,
            "the header ends at byte 2504 and the file has 100 bytes",
        ),
        (7, "7 bytes are too few for a safetensors file"),
        (0, "0 bytes are too few for a safetensors file"),
    ] {
        fs::write(weights(&dir), &bytes[..len]).unwrap();
        let expected = format!("model.safetensors: truncated: {reason}; download it again");
        assert_eq!(refused(&dir), expected);
    }
}

#[test]
fn weights_of_another_type() {
    let tensor = "model.layers.1.mlp.down_proj.weight";
    for (dtype, message) in [
        (
            "I16",
            "DIR: the weights do not fit config.json: model.layers.1.mlp.down_proj.weight is I16; BF16, F16 and F32 are supported",
        ),
        (
            "F8_E4M3",
            "model.safetensors: tensor model.layers.1.mlp.down_proj.weight is F8_E4M3 [64, 128] but has 16384 bytes",
        ),
        (
            "Q4",
            "model.safetensors: tensor model.layers.1.mlp.down_proj.weight has the unknown dtype Q4",
        ),
    ] {
        let dir = model("qwen3");
        edit_header(&dir, |header| header[tensor]["dtype"] = dtype.into());
        assert_eq!(refused(&dir), message);
    }
}

#[test]
fn absurd_sizes_in_the_configuration() {
    for (field, value, message) in [
        (
            "hidden_size",
            json!(1u64 << 60),
            "config.json: hidden_size is 1152921504606846976; it must be a whole number from 1 to 1048576",
        ),
        (
            "num_hidden_layers",
            json!(1u64 << 40),
            "config.json: num_hidden_layers is 1099511627776; it must be a whole number from 1 to 4096",
        ),
        (
            "num_attention_heads",
            json!(0),
            "config.json: num_attention_heads is 0; it must be a whole number from 1 to 4096",
        ),
        (
            "head_dim",
            json!(1e300),
            "config.json: head_dim is 1e+300; it must be a whole number from 1 to 4096",
        ),
        (
            "max_position_embeddings",
            json!(1u64 << 62),
            "config.json: max_position_embeddings is 4611686018427387904; it must be a whole number from 1 to 2147483647",
        ),
        (
            "vocab_size",
            json!(-1),
            "config.json: vocab_size is -1; it must be a whole number from 1 to 16777216",
        ),
        // Not absurd by itself, but nothing is allocated for it either.
        (
            "vocab_size",
            json!(1 << 24),
            "DIR: the weights do not fit config.json: model.embed_tokens.weight has the shape [652, 64], config.json says [16777216, 64]",
        ),
    ] {
        let dir = model("qwen3");
        edit_config(&dir, |config| config[field] = value.clone());
        assert_eq!(refused(&dir), message);
    }

    let dir = model("qwen3");
    edit_config(&dir, |config| {
        config["num_hidden_layers"] = 4096.into();
        config.as_object_mut().unwrap().remove("layer_types");
    });
    let message = refused(&dir);
    assert!(
        message.starts_with("DIR: the weights do not fit config.json: model.layers.2.input_layernorm.weight is missing; "),
        "{message}"
    );
    assert!(message.len() < 1000, "{message}");
}

#[test]
fn absurd_sizes_in_the_weights() {
    let dir = model("qwen3");
    let bytes = fs::read(weights(&dir)).unwrap();
    for length in [u64::MAX, 1 << 62, 1 << 30] {
        fs::write(weights(&dir), [&length.to_le_bytes(), &bytes[8..]].concat()).unwrap();
        let expected = format!(
            "model.safetensors: not a safetensors file: its first eight bytes announce a header of {length} bytes, the limit is 100000000"
        );
        assert_eq!(refused(&dir), expected);
    }
    fs::write(weights(&dir), &bytes).unwrap();
    for (shape, reason) in [
        (
            json!([1u64 << 62, 4]),
            "is BF16 [4611686018427387904, 4] but has 128 bytes",
        ),
        (
            json!([u64::MAX, u64::MAX]),
            "is BF16 [18446744073709551615, 18446744073709551615] but has 128 bytes",
        ),
        (json!([0]), "is BF16 [0] but has 128 bytes"),
    ] {
        edit_header(&dir, |header| {
            header["model.norm.weight"]["shape"] = shape.clone();
        });
        assert_eq!(
            refused(&dir),
            format!("model.safetensors: tensor model.norm.weight {reason}")
        );
    }
}

#[test]
fn memory_of_the_largest_configuration_is_a_number() {
    let dir = model("qwen3");
    edit_config(&dir, |config| {
        let config = config.as_object_mut().unwrap();
        config.remove("layer_types");
        for (field, value) in [
            ("hidden_size", 1 << 20),
            ("intermediate_size", 1 << 20),
            ("num_hidden_layers", 1 << 12),
            ("num_attention_heads", 1 << 12),
            ("num_key_value_heads", 1 << 12),
            ("head_dim", 1 << 12),
            ("vocab_size", 1 << 24),
            ("max_position_embeddings", (1u64 << 31) - 1),
        ] {
            config.insert(field.to_owned(), value.into());
        }
    });
    let config = ModelConfig::from_dir(dir.path()).unwrap();
    let plan = MemoryPlan::new(
        &config,
        config.weights_bytes(2),
        tileinfer::kv::KvElement::Compute(ComputeType::F32),
        4,
        512,
        64,
    );
    // Layers, keys and values, heads, values a head, bytes.
    assert_eq!(plan.kv_bytes_per_token, 4096 * 2 * 4096 * 4096 * 4);
    assert!(plan.weights_bytes > 1 << 50 && plan.workspace_bytes > 1 << 30);
    assert_eq!(plan.max_context(1 << 40), 0);
    assert!(plan.max_context(u64::MAX) > 0);
}

#[test]
fn weights_that_are_not_numbers() {
    for (name, tensor, value, logit) in [
        ("qwen3", "model.norm.weight", f32::NAN, "NaN"),
        ("qwen3", "model.norm.weight", f32::INFINITY, "inf"),
        (
            "qwen3",
            "model.layers.0.self_attn.k_proj.weight",
            f32::NAN,
            "NaN",
        ),
        (
            "qwen3",
            "model.layers.1.mlp.down_proj.weight",
            f32::NEG_INFINITY,
            "NaN",
        ),
        (
            "apertus",
            "model.layers.2.mlp.up_proj.weight",
            f32::INFINITY,
            "NaN",
        ),
    ] {
        let dir = model(name);
        // A whole row of the smallest of these, and a part of the others.
        poison(&dir, tensor, 0, &[value; 64]);
        for kind in KINDS {
            let what = format!("{name}, {tensor} of {value}, {kind:?}");
            let mut steps = open(dir.path(), kind).unwrap();
            for temperature in [0.0, 1.0] {
                let result = ask(&mut steps, dir.path(), "Hello", options(temperature));
                let message = refusal(result, ErrorKind::BadModel, &dir);
                assert!(
                    message.starts_with("model: the logit of token ") && message.contains(logit),
                    "{what}: {message}"
                );
                assert!(message.ends_with(BLAME), "{what}: {message}");
                assert_eq!(
                    (steps.pool().free(), steps.in_flight()),
                    (steps.pool().total(), 0),
                    "{what}"
                );
            }
            let message = refusal(
                eval::log_probs(&mut steps, &[1, 2, 3]),
                ErrorKind::BadModel,
                &dir,
            );
            assert!(
                message.starts_with("model: a logit is ") && message.ends_with(BLAME),
                "{what}: {message}"
            );
        }
    }
}

const BLAME: &str = ": the weights hold NaN or infinite values, or the activations overflow in bf16 (try --dtype f32)";

#[test]
fn the_token_with_a_broken_logit_is_named() {
    // The head is the embedding, of 64 values a row.
    let dir = model("qwen3");
    poison(&dir, "model.embed_tokens.weight", 300 * 64 + 7, &[f32::NAN]);
    for kind in KINDS {
        let mut steps = open(dir.path(), kind).unwrap();
        let result = ask(&mut steps, dir.path(), "Hello", options(0.7));
        let message = refusal(result, ErrorKind::BadModel, &dir);
        assert_eq!(
            message,
            format!("model: the logit of token 300 is NaN{BLAME}")
        );
    }
}

#[test]
fn prompts_that_do_not_fit() {
    let dir = model("qwen3");
    let mut steps = open(dir.path(), ComputeType::F32).unwrap();
    let result = ask(&mut steps, dir.path(), "", options(0.0));
    let message = refusal(result, ErrorKind::Usage, &dir);
    assert_eq!(message, "the prompt is empty: there is nothing to continue");
    let message = refusal(eval::log_probs(&mut steps, &[]), ErrorKind::Usage, &dir);
    assert_eq!(message, "there are no tokens to score");

    let long = "Hello ".repeat(100);
    let count = Tokenizer::from_dir(dir.path())
        .unwrap()
        .encode_prompt(&long)
        .unwrap()
        .len();
    let full = |needed: usize| {
        format!(
            "the context is full: {needed} positions are needed and the limit is 128; shorten the prompt, ask for fewer tokens or raise the context size"
        )
    };
    let message = refusal(
        ask(&mut steps, dir.path(), &long, options(0.0)),
        ErrorKind::Usage,
        &dir,
    );
    assert_eq!(message, full(count + 1));
    let message = refusal(
        eval::log_probs(&mut steps, &[1; 129]),
        ErrorKind::Usage,
        &dir,
    );
    assert_eq!(message, full(129));
    assert_eq!(eval::log_probs(&mut steps, &[1; 128]).unwrap().len(), 127);
    let message = refusal(
        eval::log_probs(&mut steps, &[1, 652]),
        ErrorKind::Usage,
        &dir,
    );
    assert_eq!(message, "there is no token 652 in a vocabulary of 652");
    assert_eq!(steps.pool().free(), steps.pool().total());
    assert!(
        !ask(&mut steps, dir.path(), "Hello", options(0.0))
            .unwrap()
            .is_empty()
    );
}

#[test]
fn missing_files() {
    let remove = |file: &str| {
        let dir = model("qwen3");
        fs::remove_file(dir.path().join(file)).unwrap();
        dir
    };
    let dir = remove("tokenizer.json");
    let message = refusal(Tokenizer::from_dir(dir.path()), ErrorKind::BadModel, &dir);
    assert_eq!(
        message,
        "tokenizer.json: there is no such file, and text cannot become token ids without it; download the model's tokenizer files too"
    );
    let dir = remove("tokenizer_config.json");
    let message = refusal(ChatTemplate::load(dir.path()), ErrorKind::BadModel, &dir);
    assert_eq!(
        message,
        "DIR: the model has no chat template, so it cannot chat; give it the prompt as it is with --raw"
    );
    let dir = remove("model.safetensors");
    assert_eq!(
        refused(&dir),
        "DIR: neither model.safetensors nor model.safetensors.index.json is here"
    );
    let dir = remove("config.json");
    assert_eq!(
        refused(&dir),
        "DIR: there is no config.json here; give the directory of a model in the Hugging Face layout"
    );
}

#[test]
fn a_step_that_fails_harms_nobody_else() {
    let dir = model("llama-3heads");
    // A row of the embedding: whoever's prompt holds token 300 has no logits.
    poison(&dir, "model.embed_tokens.weight", 300 * 60, &[f32::NAN; 60]);
    let options = GenerationOptions {
        max_tokens: Some(8),
        ..options(1.0)
    };
    let answer = |failing: bool| {
        let mut steps = open(dir.path(), ComputeType::Bf16).unwrap();
        let new = |steps: &StepLoop, prompt: &[u32]| {
            Generation::new(steps.new_sequence(), prompt, options.clone(), LENGTH).unwrap()
        };
        let good = new(&steps, &[1, 2, 3]);
        let good = steps.admit(good);
        let mut failures = 0;
        let mut tokens = Vec::new();
        while steps.get(good).unwrap().finish().is_none() {
            let rows = steps.get(good).unwrap().ready_rows();
            let planned = |slot, rows| Planned {
                slot,
                rows,
                drafts: Vec::new(),
            };
            if failing && rows > 0 {
                let bad = new(&steps, &[5, 300, 7]);
                let bad = steps.admit(bad);
                let in_flight = steps.in_flight();
                let error = steps
                    .advance(&[planned(bad, 3), planned(good, rows)])
                    .unwrap_err();
                assert_eq!(error.kind(), ErrorKind::BadModel);
                assert_eq!(steps.in_flight(), in_flight);
                steps.remove(bad).unwrap();
                failures += in_flight;
            }
            let plan = (rows > 0).then(|| planned(good, rows));
            for advance in steps.advance(plan.as_slice()).unwrap() {
                tokens.extend(advance.tokens.iter().map(|sampled| sampled.token));
            }
        }
        (tokens, failures)
    };
    let ((alone, _), (disturbed, failures)) = (answer(false), answer(true));
    assert_eq!(alone.len(), 8);
    assert_eq!(disturbed, alone);
    assert!(
        failures > 4,
        "{failures} steps failed while another was in flight"
    );
}
