//! DFlash: what a drafter's configuration means, which drafters are refused, and the reference backend against the
//! reference implementation.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};
use tileinfer::ErrorKind;
use tileinfer::backend::{ComputeType, ReferenceBackend};
use tileinfer::config::{DFlashConfig, ModelConfig};
use tileinfer::model::{DecoderLM, LoadOptions, load_dflash};
use tileinfer::runner::{FakeOptions, FakeRunner, ModelRunner, RunnerOptions};
use tileinfer::spec::DFlashProposer;
use tileinfer::testing::{DFLASH_DRAFTERS, golden_dflash};
use tileinfer::weights::{Checkpoint, HostModel};

fn golden() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/dflash")
}

fn drafter(name: &str) {
    assert!(DFLASH_DRAFTERS.contains(&name));
    golden_dflash(&ReferenceBackend::new, &golden(), name, 2e-3);
}

// One test a drafter, so that they run side by side.

#[test]
fn full_attention() {
    drafter("qwen3-6l-dflash-b8");
}

#[test]
fn block_of_sixteen() {
    drafter("qwen3-8l-dflash-b16");
}

#[test]
fn sliding_windows() {
    drafter("qwen3-8l-dflash-swa-b8");
}

#[test]
fn llama() {
    drafter("llama-6l-dflash-b8");
}

#[test]
fn configurations_mean_what_the_reference_makes_of_them() {
    let text = std::fs::read_to_string(golden().join("expected/configs.json")).unwrap();
    let all: Value = serde_json::from_str(&text).unwrap();
    let cases = all["cases"].as_array().unwrap();
    assert!(cases.len() > 10);
    for case in cases {
        let config = DFlashConfig::from_json(&case["config"].to_string(), "config.json").unwrap();
        let windows: Vec<_> = config
            .model
            .layers
            .iter()
            .map(|layer| layer.window)
            .collect();
        let found = json!({
            "block_size": config.block_size,
            "mask_token_id": config.mask_token,
            "target_layer_ids": config.target_layers,
            "causal": config.causal,
            "window": windows,
            "rope_theta": config.model.rope.theta,
            "rope_type": "default",
        });
        assert_eq!(found, case["resolved"], "{}", case["name"]);
    }
}

fn config(name: &str) -> Value {
    let path = golden().join("models").join(name).join("config.json");
    serde_json::from_str(&std::fs::read_to_string(path).unwrap()).unwrap()
}

#[test]
fn other_kinds_are_refused_by_name() {
    let plain = config("qwen3-6l-dflash-b8");
    let with = |change: &dyn Fn(&mut Value)| {
        let mut value = plain.clone();
        change(&mut value);
        let error = DFlashConfig::from_json(&value.to_string(), "drafter/config.json").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadModel);
        error.to_string()
    };
    for (architecture, kind) in [
        ("DFlash2DraftModel", "DFlash 2"),
        ("Qwen3DSparkModel", "DSpark"),
        ("LlamaForCausalLMEagle3", "EAGLE"),
        ("Eagle3Speculator", "EAGLE"),
        ("DFlashLagunaForCausalLM", "Laguna"),
    ] {
        let message = with(&|value| value["architectures"] = json!([architecture]));
        assert!(
            message.contains(kind) && message.contains("drafter/config.json"),
            "{message}"
        );
    }
    for (field, kind) in [
        ("conv_kernel_size", "DFlash 2"),
        ("markov_rank", "DSpark"),
        ("projector_type", "Domino"),
        ("final_logit_softcapping", "final_logit_softcapping"),
    ] {
        let message = with(&|value| value["dflash_config"][field] = json!(4));
        assert!(message.contains(kind), "{message}");
        let message = with(&|value| value[field] = json!(4));
        assert!(message.contains(kind), "{message}");
    }
    for (field, bad) in [
        ("mask_token_id", json!(-3)),
        ("target_layer_ids", json!([1, 5])),
        ("target_layer_ids", json!([])),
        ("target_layer_ids", json!([1.5])),
        ("block_size", json!(1)),
    ] {
        let message = with(&|value| value["dflash_config"][field] = bad.clone());
        assert!(message.contains(field), "{message}");
    }
    let message = with(&|value| value["num_target_layers"] = Value::Null);
    assert!(message.contains("num_target_layers"), "{message}");
    let message = with(&|value| value["dflash_config"] = Value::Null);
    assert!(message.contains("mask_token_id"), "{message}");
}

#[test]
fn a_drafter_of_another_target_is_refused() {
    let models = golden().join("models");
    for (target, drafter, named) in [
        ("qwen3-8l", "qwen3-6l-dflash-b8", "num_target_layers"),
        ("llama-6l", "qwen3-6l-dflash-b8", "vocab_size"),
        ("qwen3-6l", "qwen3-8l-dflash-b16", "num_target_layers"),
    ] {
        let config = ModelConfig::from_dir(models.join(target)).unwrap();
        let dir = models.join(drafter);
        let error = DFlashConfig::from_dir(&dir)
            .unwrap()
            .check_target(&config, &dir)
            .unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains(named) && message.contains(drafter),
            "{message}"
        );
    }
    assert!(DFlashConfig::is_drafter(&models.join("llama-6l-dflash-b8")));
    assert!(!DFlashConfig::is_drafter(&models.join("llama-6l")));
}

#[test]
fn taps_and_blocks_are_the_drafters() {
    let models = golden().join("models");
    let backend = ReferenceBackend::new(ComputeType::F32);
    let dir = models.join("qwen3-6l");
    let config = ModelConfig::from_dir(&dir).unwrap();
    let checkpoint = Checkpoint::open(&dir).unwrap();
    let host = HostModel::load(&config, &checkpoint, ComputeType::F32).unwrap();
    let load = LoadOptions::new(64);
    let model = DecoderLM::load(&backend, &config, &host, &load, &mut |_, _| ()).unwrap();
    let dir = models.join("qwen3-6l-dflash-b8");
    let drafter = load_dflash(&backend, &dir, &config, &model).unwrap();
    assert_eq!(drafter.taps(), [2, 4]);
    let options = RunnerOptions::for_length(64);
    let runner = ModelRunner::with_dflash(backend, model, drafter, &options).unwrap();
    for k in [0, 8] {
        let error = DFlashProposer::new(&runner, Some(k), false).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{error}");
    }
    let none = FakeRunner::new(&FakeOptions::default());
    assert!(DFlashProposer::new(&none, None, false).is_err());
}
