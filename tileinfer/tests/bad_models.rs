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
use tileinfer::engine::{GenerationOptions, StepLoop};
use tileinfer::eval;
use tileinfer::generate::answer;
use tileinfer::model::{DecoderLM, LoadOptions};
use tileinfer::plan::MemoryPlan;
use tileinfer::runner::{ModelRunner, RunnerOptions};
use tileinfer::sampling::SamplingParams;
use tileinfer::tokenizer::Tokenizer;
use tileinfer::weights::{Checkpoint, HostModel};
use tileinfer::{Error, ErrorKind, Result};

/// Positions that models are opened for.
const LENGTH: usize = 128;

const KINDS: [ComputeType; 2] = [ComputeType::Bf16, ComputeType::F32];

/// A copy of the golden model `name` to spoil.
fn model(name: &str) -> TempDir {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/models").join(name);
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
    fs::write(weights(dir), [&length, header.as_bytes(), &bytes[end..]].concat()).unwrap();
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
    let load = LoadOptions { max_length: LENGTH };
    let model = DecoderLM::load(&backend, &config, &host, &load, &mut |_, _| ())?;
    let runner = ModelRunner::new(backend, model, &RunnerOptions::for_length(LENGTH))?;
    Ok(StepLoop::new(Box::new(runner)))
}

fn options(temperature: f32) -> GenerationOptions {
    GenerationOptions {
        sampling: Arc::new(SamplingParams { temperature, ..SamplingParams::default() }),
        seed: 3,
        max_tokens: Some(4),
        stop_ids: [].into(),
        vocabulary: usize::MAX,
        top_logprobs: None,
    }
}

/// The text that follows `prompt`.
fn ask(steps: &mut StepLoop, dir: &Path, prompt: &str, options: GenerationOptions) -> Result<String> {
    let tokenizer = Tokenizer::from_dir(dir)?;
    let ids = tokenizer.encode_prompt(prompt)?;
    let sequence = steps.new_sequence();
    let on_text = &mut |_: &str| ControlFlow::Continue(());
    let answer = answer(steps, &tokenizer, sequence, &ids, options, &[], &mut |_| (), on_text)?;
    Ok(answer.text)
}

/// The message of a refusal of that kind, without the name of the directory.
fn refusal<T>(result: Result<T>, kind: ErrorKind, dir: &TempDir) -> String {
    let error = result.err().expect("it is refused");
    assert_eq!(error.kind(), kind, "{error}");
    error.to_string().replace(&format!("{}/", dir.path().display()), "").replace(&dir.path().display().to_string(), "DIR")
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
        assert!(!ask(&mut steps, dir.path(), "Hello", options(0.0)).unwrap().is_empty());
    }
}

#[test]
fn truncated_weights() {
    let dir = model("qwen3");
    let bytes = fs::read(weights(&dir)).unwrap();
    for len in [bytes.len() - 1, bytes.len() / 2, 4000, 100, 8, 7, 0] {
        fs::write(weights(&dir), &bytes[..len]).unwrap();
        println!("{len}: {}", refused(&dir));
    }
}

#[test]
fn weights_of_another_type() {
    let dir = model("qwen3");
    for dtype in ["I16", "U16", "F16", "F8_E4M3", "Q4"] {
        edit_header(&dir, |header| header["model.layers.1.mlp.down_proj.weight"]["dtype"] = dtype.into());
        println!("{dtype}: {:?}", open(dir.path(), ComputeType::F32).err().map(|e| e.to_string()));
    }
}

#[test]
fn absurd_sizes() {
    let dir = model("qwen3");
    for (field, value) in [
        ("hidden_size", json!(1u64 << 60)),
        ("num_hidden_layers", json!(1u64 << 40)),
        ("num_hidden_layers", json!(4096)),
        ("vocab_size", json!(1 << 24)),
        ("vocab_size", json!(-1)),
        ("num_attention_heads", json!(0)),
        ("head_dim", json!(1e300)),
        ("max_position_embeddings", json!(1u64 << 62)),
    ] {
        let dir = model("qwen3");
        edit_config(&dir, |config| {
            config[field] = value.clone();
            if field == "num_hidden_layers" { config.as_object_mut().unwrap().remove("layer_types"); }
        });
        println!("{field} {value}: {}", refused(&dir));
    }
    let bytes = fs::read(weights(&dir)).unwrap();
    for length in [u64::MAX, 1 << 62, 1 << 30] {
        fs::write(weights(&dir), [&length.to_le_bytes(), &bytes[8..]].concat()).unwrap();
        println!("{length}: {}", refused(&dir));
    }
    fs::write(weights(&dir), &bytes).unwrap();
    for shape in [json!([1u64 << 62, 4]), json!([u64::MAX, u64::MAX]), json!([-1, 3]), json!([0])] {
        edit_header(&dir, |header| header["model.norm.weight"]["shape"] = shape.clone());
        println!("{shape}: {}", refused(&dir));
    }
}

#[test]
fn weights_that_are_not_numbers() {
    for (name, tensor, values) in [
        ("qwen3", "model.norm.weight", [f32::NAN]),
        ("qwen3", "model.norm.weight", [f32::INFINITY]),
        ("qwen3", "model.layers.0.self_attn.k_proj.weight", [f32::NAN]),
        ("qwen3", "model.layers.1.mlp.down_proj.weight", [f32::NEG_INFINITY]),
        ("qwen3", "model.embed_tokens.weight", [f32::NAN]),
        ("apertus", "model.layers.2.mlp.up_proj.weight", [f32::INFINITY]),
        ("apertus", "lm_head.weight", [f32::INFINITY]),
    ] {
        let dir = model(name);
        poison(&dir, tensor, 0, &values);
        for kind in KINDS {
            let mut steps = open(dir.path(), kind).unwrap();
            for temperature in [0.0, 1.0] {
                let r = ask(&mut steps, dir.path(), "Hello", options(temperature));
                println!("{name} {tensor} {values:?} {kind:?}: {:?}", r.map_err(|e| e.to_string()));
            }
            println!("  eval {:?}", eval::log_probs(&mut steps, &[1, 2, 3]).map_err(|e| e.to_string()));
        }
    }
}
