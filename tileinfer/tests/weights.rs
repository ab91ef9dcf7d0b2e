//! Weights: every golden model is found whole, conversions are exact or rounded as promised, and damaged or hostile
//! files give errors that name the tensor.

use half::{bf16, f16};
use proptest::prelude::*;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use tileinfer::config::ModelConfig;
use tileinfer::weights::{
    Checkpoint, ComputeType, Dtype, Header, HostModel, Weight, WeightData, WeightPart, Xielu,
};
use tileinfer::{Error, ErrorKind};

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../testdata/golden/models/{name}"))
}

fn golden_names() -> Vec<String> {
    let entries = std::fs::read_dir(golden("")).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(names.len(), 18);
    names
}

fn load(dir: &Path, compute: ComputeType) -> Result<HostModel, Error> {
    let config = ModelConfig::from_dir(dir)?;
    HostModel::load(&config, &Checkpoint::open(dir)?, compute)
}

/// A tensor to be written to a file.
#[derive(Clone)]
struct Tensor {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    data: Vec<u8>,
}

fn tensor(name: &str, dtype: &'static str, shape: &[usize], data: Vec<u8>) -> Tensor {
    Tensor {
        name: name.to_owned(),
        dtype,
        shape: shape.to_vec(),
        data,
    }
}

/// A safetensors file of a header and data.
fn file_of(header: &str, data: &[u8]) -> Vec<u8> {
    let length = (header.len() as u64).to_le_bytes();
    [&length, header.as_bytes(), data].concat()
}

fn safetensors(tensors: &[Tensor]) -> Vec<u8> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut data = Vec::new();
    for t in tensors {
        let begin = data.len();
        data.extend(&t.data);
        let entry =
            json!({"dtype": t.dtype, "shape": t.shape, "data_offsets": [begin, data.len()]});
        header.insert(t.name.clone(), entry);
    }
    file_of(&Value::from(header).to_string(), &data)
}

fn tensors_of(dir: &Path) -> Vec<Tensor> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let names: Vec<_> = checkpoint.names().collect();
    names
        .into_iter()
        .map(|name| {
            let view = checkpoint.tensor(name).unwrap();
            let dtype = match view.dtype {
                Dtype::Bf16 => "BF16",
                Dtype::F16 => "F16",
                Dtype::F32 => "F32",
                other => panic!("{other}"),
            };
            tensor(name, dtype, view.shape, view.data.to_vec())
        })
        .collect()
}

/// A directory with a golden model's configuration and its tensors after a change.
fn changed(name: &str, change: impl FnOnce(&mut Vec<Tensor>)) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(
        golden(name).join("config.json"),
        dir.path().join("config.json"),
    )
    .unwrap();
    let mut tensors = tensors_of(&golden(name));
    change(&mut tensors);
    std::fs::write(dir.path().join("model.safetensors"), safetensors(&tensors)).unwrap();
    dir
}

fn edit_config(dir: &Path, edit: impl FnOnce(&mut Value)) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    edit(&mut config);
    std::fs::write(path, config.to_string()).unwrap();
}

/// The message of a refusal, which must be about the model's files.
fn refusal<T>(result: Result<T, Error>) -> String {
    match result {
        Ok(_) => panic!("not refused"),
        Err(error) => {
            assert_eq!(error.kind(), ErrorKind::BadModel, "{error}");
            error.to_string()
        }
    }
}

fn all_f32(weight: &Weight) -> Vec<f32> {
    let mut out = vec![0.0; weight.rows() * weight.cols()];
    for (row, out) in out.chunks_mut(weight.cols()).enumerate() {
        weight.row_f32(row, out);
    }
    out
}

/// A tensor of a checkpoint as f32, by the plainest way.
fn plain_f32(checkpoint: &Checkpoint, name: &str) -> Vec<f32> {
    let view = checkpoint.tensor(name).unwrap_or_else(|| panic!("{name}"));
    match view.dtype {
        Dtype::F32 => {
            let words = view.data.chunks_exact(4);
            words
                .map(|b| f32::from_le_bytes(b.try_into().unwrap()))
                .collect()
        }
        dtype => {
            let words = view.data.chunks_exact(2);
            let bits = words.map(|b| u16::from_le_bytes(b.try_into().unwrap()));
            match dtype {
                Dtype::Bf16 => bits.map(|b| f32::from_bits(u32::from(b) << 16)).collect(),
                Dtype::F16 => bits.map(|b| f16::from_bits(b).to_f32()).collect(),
                other => panic!("{other}"),
            }
        }
    }
}

#[test]
fn golden_models_are_found_whole() {
    for name in golden_names() {
        let dir = golden(&name);
        let config = ModelConfig::from_dir(&dir).unwrap();
        let checkpoint = Checkpoint::open(&dir).unwrap();
        checkpoint.verify_unchanged().unwrap();
        let model = HostModel::load(&config, &checkpoint, ComputeType::F32)
            .unwrap_or_else(|error| panic!("{name}: {error}"));

        let (h, i) = (config.hidden_size, config.intermediate_size);
        let (q, kv) = (config.q_width(), config.kv_width());
        let (prefix, head) = match name.as_str() {
            "mistral3" => ("language_model.model", "language_model.lm_head.weight"),
            "apertus1p5" => ("model.language_model", "lm_head.weight"),
            _ => ("model", "lm_head.weight"),
        };
        let plain = |tensor: &str| plain_f32(&checkpoint, &format!("{prefix}.{tensor}"));
        assert_eq!(
            all_f32(&model.embed),
            plain("embed_tokens.weight"),
            "{name}"
        );
        assert_eq!(
            [model.embed.rows(), model.embed.cols()],
            [config.vocab_size, h]
        );
        // llama-both says tied and holds a head all the same.
        let has_head = !config.tie_word_embeddings || name == "llama-both";
        assert_eq!(model.head.is_some(), has_head, "{name}");
        if let Some(weight) = &model.head {
            assert_eq!(all_f32(weight), plain_f32(&checkpoint, head), "{name}");
            assert_eq!(
                [weight.rows(), weight.cols()],
                [config.output_vocab_size, h]
            );
        }
        assert_eq!(model.final_norm, plain("norm.weight"), "{name}");
        assert_eq!(model.layers.len(), config.num_layers);

        let apertus = name.starts_with("apertus");
        for (index, layer) in model.layers.iter().enumerate() {
            let plain = |tensor: &str| plain(&format!("layers.{index}.{tensor}"));
            let concat = |tensors: &[&str]| -> Vec<f32> {
                tensors.iter().flat_map(|tensor| plain(tensor)).collect()
            };
            let norms = if apertus {
                ["attention_layernorm.weight", "feedforward_layernorm.weight"]
            } else {
                ["input_layernorm.weight", "post_attention_layernorm.weight"]
            };
            assert_eq!(layer.attn_norm, plain(norms[0]), "{name}");
            assert_eq!(layer.mlp_norm, plain(norms[1]), "{name}");
            let rows = |weight: &Weight| -> Vec<usize> {
                weight.parts().iter().map(WeightPart::rows).collect()
            };
            assert_eq!(rows(&layer.qkv), [q, kv, kv], "{name}");
            let (qp, kp, vp) = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj");
            let suffixed = |names: &[&str], suffix: &str| -> Vec<f32> {
                let names: Vec<_> = names.iter().map(|n| format!("{n}.{suffix}")).collect();
                concat(&names.iter().map(String::as_str).collect::<Vec<_>>())
            };
            assert_eq!(
                all_f32(&layer.qkv),
                suffixed(&[qp, kp, vp], "weight"),
                "{name}"
            );
            let biased = matches!(name.as_str(), "llama-bias" | "qwen2");
            let bias = biased.then(|| suffixed(&[qp, kp, vp], "bias"));
            assert_eq!(layer.qkv_bias, bias, "{name}");
            assert_eq!([layer.o.rows(), layer.o.cols()], [h, q]);
            assert_eq!(
                all_f32(&layer.o),
                plain("self_attn.o_proj.weight"),
                "{name}"
            );
            let all_biased = name == "llama-bias";
            assert_eq!(
                layer.o_bias,
                all_biased.then(|| plain("self_attn.o_proj.bias"))
            );
            let normed = apertus || name.starts_with("qwen3");
            assert_eq!(
                layer.q_norm,
                normed.then(|| plain("self_attn.q_norm.weight"))
            );
            assert_eq!(
                layer.k_norm,
                normed.then(|| plain("self_attn.k_norm.weight"))
            );
            let inputs: &[&str] = if apertus {
                &["mlp.up_proj"]
            } else {
                &["mlp.gate_proj", "mlp.up_proj"]
            };
            assert_eq!(rows(&layer.gate_up), vec![i; inputs.len()], "{name}");
            assert_eq!(
                all_f32(&layer.gate_up),
                suffixed(inputs, "weight"),
                "{name}"
            );
            assert_eq!(
                layer.gate_up_bias,
                all_biased.then(|| suffixed(inputs, "bias"))
            );
            assert_eq!([layer.down.rows(), layer.down.cols()], [h, i]);
            assert_eq!(
                all_f32(&layer.down),
                plain("mlp.down_proj.weight"),
                "{name}"
            );
            assert_eq!(
                layer.down_bias,
                all_biased.then(|| plain("mlp.down_proj.bias"))
            );
            let xielu = apertus.then(|| {
                let [p, n, beta, eps] = ["alpha_p", "alpha_n", "beta", "eps"]
                    .map(|a| plain(&format!("mlp.act_fn.{a}"))[0]);
                Xielu::from_raw(p, n, beta, eps)
            });
            assert_eq!(layer.xielu, xielu, "{name}");
        }
    }
}

#[test]
fn sizes_from_the_configuration_are_those_of_the_files() {
    for name in golden_names() {
        let config = ModelConfig::from_dir(golden(&name)).unwrap();
        let checkpoint = Checkpoint::open(golden(&name)).unwrap();
        let size = config.dtype.unwrap().size();
        let mut bytes = config.weights_bytes(size);
        if name == "llama-both" {
            // Its second copy of the embedding.
            bytes += (config.vocab_size * config.hidden_size * size) as u64;
        }
        assert_eq!(checkpoint.total_bytes(), bytes, "{name}");
    }
}

#[test]
fn xielu_parameters_go_through_softplus() {
    let ln2 = std::f32::consts::LN_2;
    let xielu = Xielu::from_raw(0.0, 0.0, 0.5, -1e-6);
    assert_eq!(xielu.alpha_p, ln2);
    assert_eq!(xielu.alpha_n, 0.5 + ln2);
    // The exact values of the function at 2 and -2.
    let f = |x: f64| {
        let [p, n, beta, eps] =
            [xielu.alpha_p, xielu.alpha_n, xielu.beta, xielu.eps].map(f64::from);
        if x > 0.0 {
            p * x * x + beta * x
        } else {
            (x.min(eps).exp_m1() - x) * n + beta * x
        }
    };
    assert!((f(2.0) - 3.772588722239781).abs() < 1e-6);
    assert!((f(-2.0) - 0.35462209218399154).abs() < 1e-6);
    assert_eq!(Xielu::from_raw(1000.0, -1000.0, 0.5, 0.0).alpha_p, 1000.0);
    assert_eq!(Xielu::from_raw(1000.0, -1000.0, 0.5, 0.0).alpha_n, 0.5);
}

#[test]
fn absent_xielu_constants_have_defaults() {
    let dir = changed("apertus", |tensors| {
        tensors.retain(|t| !t.name.ends_with("act_fn.beta") && !t.name.ends_with("act_fn.eps"));
    });
    let xielu = load(dir.path(), ComputeType::Bf16).unwrap().layers[0]
        .xielu
        .unwrap();
    assert_eq!((xielu.beta, xielu.eps), (0.5, -1e-6));
    // A scalar where a vector of one is usual, and the other way round.
    let dir = changed("apertus", |tensors| {
        for t in tensors {
            match t.name.rsplit('.').next() {
                Some("alpha_p") => t.shape = vec![],
                Some("beta") => t.shape = vec![1],
                _ => {}
            }
        }
    });
    load(dir.path(), ComputeType::Bf16).unwrap();
}

#[test]
fn weights_stay_mapped_or_are_rounded() {
    for (name, compute) in [
        ("qwen3", ComputeType::Bf16),
        ("qwen3", ComputeType::F32),
        ("llama-f16", ComputeType::F32),
        ("llama-f32", ComputeType::F32),
    ] {
        let model = load(&golden(name), compute).unwrap();
        let data = model.layers[0].qkv.parts()[0].data();
        assert!(
            matches!(
                data,
                WeightData::Bf16(_) | WeightData::F16(_) | WeightData::F32(_)
            ),
            "{name}: {data:?}"
        );
    }
    for name in ["llama-f16", "llama-f32"] {
        let exact = load(&golden(name), ComputeType::F32).unwrap();
        let rounded = load(&golden(name), ComputeType::Bf16).unwrap();
        let round = |values: &[f32]| -> Vec<f32> {
            values.iter().map(|&v| bf16::from_f32(v).to_f32()).collect()
        };
        assert_eq!(all_f32(&rounded.embed), round(&all_f32(&exact.embed)));
        assert_eq!(rounded.head.is_some(), exact.head.is_some());
        assert_eq!(rounded.final_norm, round(&exact.final_norm));
        for (rounded, exact) in rounded.layers.iter().zip(&exact.layers) {
            let matrices = |l: &tileinfer::weights::HostLayer| {
                [&l.qkv, &l.o, &l.gate_up, &l.down].map(all_f32)
            };
            assert_eq!(matrices(rounded), matrices(exact).map(|m| round(&m)));
            assert_eq!(rounded.attn_norm, round(&exact.attn_norm));
            assert_eq!(rounded.mlp_norm, round(&exact.mlp_norm));
            let data = rounded.down.parts()[0].data();
            assert!(matches!(data, WeightData::OwnedBf16(_)), "{data:?}");
        }
    }
}

#[test]
fn rounding_is_to_nearest_even() {
    // Halfway between 1 and the next bf16, and between that and the one after it; a NaN stays one.
    let values = [
        1.0 + 1.0 / 256.0,
        1.0 + 3.0 / 256.0,
        -1.0 - 1.0 / 256.0,
        1e39f64 as f32,
        f32::NAN,
    ];
    let data = WeightData::OwnedF32(values.into());
    let weight = Weight::new(vec![WeightPart::new(1, 5, data).unwrap()]).unwrap();
    let rounded = all_f32(&weight.to_dtype(ComputeType::Bf16));
    assert_eq!(rounded[..4], [1.0, 1.0 + 4.0 / 256.0, -1.0, f32::INFINITY]);
    assert!(rounded[4].is_nan());
    assert_eq!(
        all_f32(&weight.to_dtype(ComputeType::F32))[..4],
        values[..4]
    );
    assert_eq!(ComputeType::Bf16.round(values[1]), rounded[1]);
}

#[test]
fn parts_must_fit() {
    let data = |n: usize| WeightData::OwnedF32(vec![0.0; n].into());
    assert_eq!(
        WeightPart::new(2, 3, data(5)).unwrap_err().kind(),
        ErrorKind::Bug
    );
    assert_eq!(Weight::new(vec![]).unwrap_err().kind(), ErrorKind::Bug);
    let part = |rows, cols| WeightPart::new(rows, cols, data(rows * cols)).unwrap();
    assert_eq!(
        Weight::new(vec![part(1, 2), part(2, 3)])
            .unwrap_err()
            .kind(),
        ErrorKind::Bug
    );
    assert_eq!(Weight::new(vec![part(1, 3), part(2, 3)]).unwrap().rows(), 3);
}

#[test]
fn random_weights_are_about_normal_and_repeatable() {
    // More than one chunk, and an odd number, so that threads and tails count.
    let (rows, cols) = (1025, 2049);
    let weight = Weight::random(rows, cols, 7, 0.02);
    let values = all_f32(&weight);
    let n = values.len() as f64;
    let mean = values.iter().map(|&v| f64::from(v)).sum::<f64>() / n;
    let variance = values.iter().map(|&v| f64::from(v).powi(2)).sum::<f64>() / n;
    assert!(mean.abs() < 1e-4, "{mean}");
    assert!((variance.sqrt() / 0.02 - 1.0).abs() < 0.01, "{variance}");
    let beyond = |sigmas: f32| values.iter().filter(|v| v.abs() > 0.02 * sigmas).count() as f64 / n;
    assert!((beyond(1.0) - 0.317).abs() < 0.02, "{}", beyond(1.0));
    assert!((beyond(2.0) - 0.0455).abs() < 0.01, "{}", beyond(2.0));
    assert_eq!(all_f32(&Weight::random(rows, cols, 7, 0.02)), values);
    assert_ne!(all_f32(&Weight::random(rows, cols, 8, 0.02)), values);
    // The same index gives the same number, however large the whole is.
    assert_eq!(all_f32(&Weight::random(3, 5, 7, 0.02)), values[..15]);
    let repeats = values
        .chunks_exact(cols)
        .filter(|row| row[..8] == values[..8])
        .count();
    assert_eq!(repeats, 1);
}

#[test]
fn random_models_have_the_shapes_of_real_ones() {
    for name in golden_names() {
        let config = ModelConfig::from_dir(golden(&name)).unwrap();
        let real = load(&golden(&name), ComputeType::Bf16).unwrap();
        let random = HostModel::random(&config, 1);
        let shape = |weight: &Weight| -> Vec<[usize; 2]> {
            weight
                .parts()
                .iter()
                .map(|part| [part.rows(), part.cols()])
                .collect()
        };
        assert_eq!(shape(&random.embed), shape(&real.embed), "{name}");
        if !config.tie_word_embeddings {
            assert_eq!(
                random.head.as_ref().map(shape),
                real.head.as_ref().map(shape)
            );
        }
        assert_eq!(random.layers.len(), real.layers.len());
        for (a, b) in random.layers.iter().zip(&real.layers) {
            let shapes = |l: &tileinfer::weights::HostLayer| {
                let matrices = [&l.qkv, &l.o, &l.gate_up, &l.down].map(shape);
                let maybe = [
                    &l.qkv_bias,
                    &l.o_bias,
                    &l.gate_up_bias,
                    &l.down_bias,
                    &l.q_norm,
                    &l.k_norm,
                ];
                let maybe = maybe.map(|v| v.as_ref().map(Vec::len));
                (
                    matrices,
                    maybe,
                    l.attn_norm.len(),
                    l.mlp_norm.len(),
                    l.xielu.is_some(),
                )
            };
            assert_eq!(shapes(a), shapes(b), "{name}");
        }
        assert_ne!(
            all_f32(&random.layers[0].qkv),
            all_f32(&random.layers[1].qkv),
            "{name}"
        );
        assert_eq!(
            all_f32(&HostModel::random(&config, 1).embed),
            all_f32(&random.embed)
        );
    }
    let config = ModelConfig::from_dir(golden("qwen3")).unwrap();
    assert!(HostModel::random(&config, 1).bytes() < config.weights_bytes(2));
}

#[test]
fn the_head_in_the_file_counts() {
    // Tied by configuration, and a head of its own in the file.
    let dir = changed("llama-tied", |tensors| {
        let embed = tensors
            .iter()
            .find(|t| t.name.ends_with("embed_tokens.weight"))
            .unwrap();
        let data = vec![0; embed.data.len()];
        tensors.push(tensor("lm_head.weight", "BF16", &[700, 96], data));
    });
    let model = load(dir.path(), ComputeType::Bf16).unwrap();
    assert!(
        all_f32(model.head.as_ref().unwrap())
            .iter()
            .all(|&v| v == 0.0)
    );
    assert!(all_f32(&model.embed).iter().any(|&v| v != 0.0));
    // A head and no embedding: it serves as both.
    let dir = changed("llama-both", |tensors| {
        tensors.retain(|t| !t.name.ends_with("embed_tokens.weight"));
    });
    let both = load(dir.path(), ComputeType::Bf16).unwrap();
    let original = load(&golden("llama-both"), ComputeType::Bf16).unwrap();
    assert_eq!(all_f32(&both.embed), all_f32(&original.embed));
    // No head and not tied.
    let dir = changed("llama-linear", |tensors| {
        tensors.retain(|t| t.name != "lm_head.weight");
    });
    let message = refusal(load(dir.path(), ComputeType::Bf16));
    assert!(message.contains("lm_head.weight is missing"), "{message}");
    // Tied, but the head should have fewer rows than the embedding.
    let dir = changed("apertus1p5", |tensors| {
        tensors.retain(|t| t.name != "lm_head.weight");
    });
    edit_config(dir.path(), |config| {
        config["text_config"]["tie_word_embeddings"] = json!(true);
    });
    let message = refusal(load(dir.path(), ComputeType::Bf16));
    assert!(message.contains("output_vocab_size is 620"), "{message}");
}

#[test]
fn tensors_that_are_not_text_are_skipped() {
    let dir = changed("mistral3", |tensors| {
        tensors.push(tensor("vision_tower.ln.weight", "F32", &[1], vec![0; 4]));
        tensors.push(tensor(
            "multi_modal_projector.linear.weight",
            "I64",
            &[1],
            vec![0; 8],
        ));
        let buffer = "language_model.model.layers.0.self_attn.rotary_emb.inv_freq";
        tensors.push(tensor(buffer, "F32", &[2], vec![0; 8]));
    });
    load(dir.path(), ComputeType::Bf16).unwrap();
    // The same text model under the names of newer files, and of a bare text model.
    for (from, to) in [
        ("language_model.model.", "model.language_model."),
        ("language_model.", ""),
    ] {
        let dir = changed("mistral3", |tensors| {
            for t in tensors {
                t.name = t
                    .name
                    .replace(from, to)
                    .replace("language_model.lm_head", "lm_head");
            }
        });
        load(dir.path(), ComputeType::Bf16).unwrap();
    }
}

#[test]
fn all_that_does_not_fit_is_told_at_once() {
    let dir = changed("qwen3", |tensors| {
        tensors.retain(|t| t.name != "model.layers.1.self_attn.q_norm.weight");
        for t in tensors.iter_mut() {
            match t.name.as_str() {
                "model.layers.0.mlp.down_proj.weight" => t.shape = vec![128, 64],
                "model.norm.weight" => (t.dtype, t.shape) = ("I32", vec![32]),
                "model.layers.0.self_attn.o_proj.weight" => t.shape = vec![64 * 384],
                "model.layers.1.mlp.up_proj.weight" => {
                    (t.dtype, t.data) = ("I32", vec![0; 128 * 64 * 4]);
                }
                _ => {}
            }
        }
        tensors.push(tensor(
            "model.layers.0.self_attn.q_proj.bias",
            "BF16",
            &[1],
            vec![0; 2],
        ));
    });
    let message = refusal(load(dir.path(), ComputeType::Bf16));
    for part in [
        "the weights do not fit config.json: ",
        "model.layers.1.self_attn.q_norm.weight is missing",
        "model.layers.0.mlp.down_proj.weight has the shape [128, 64], config.json says [64, 128]",
        "model.norm.weight has the shape [32], config.json says [64]",
        "model.layers.0.self_attn.o_proj.weight has the shape [24576], config.json says [64, 384]",
        "model.layers.1.mlp.up_proj.weight is I32; BF16, F16 and F32 are supported",
        "model.layers.0.self_attn.q_proj.bias is in the file but not part of the model",
    ] {
        assert!(message.contains(part), "{message}\nlacks {part}");
    }

    // Another model's weights: the first ten problems and a count.
    let dir = changed("qwen3", |_| ());
    std::fs::copy(golden("qwen2/config.json"), dir.path().join("config.json")).unwrap();
    let message = refusal(load(dir.path(), ComputeType::Bf16));
    assert_eq!(message.matches("; ").count(), 10, "{message}");
    assert!(
        message.contains("; and ") && message.ends_with(" more"),
        "{message}"
    );
}

#[test]
fn quantized_weights_are_refused_by_name() {
    let dir = changed("qwen3", |_| ());
    edit_config(dir.path(), |config| {
        config["quantization_config"] = json!({"quant_method": "gptq"});
    });
    let message = refusal(load(dir.path(), ComputeType::Bf16));
    assert!(
        message.contains("gptq") && message.contains("config.json"),
        "{message}"
    );
}

/// Writes `bytes` as the only file of a model and says why it is refused.
fn refused_file(bytes: &[u8]) -> String {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    let message = refusal(Checkpoint::open(dir.path()));
    assert!(message.contains("model.safetensors: "), "{message}");
    message
}

#[test]
fn damaged_files_are_refused() {
    let entry = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"dtype":"{dtype}","shape":{shape},"data_offsets":{offsets}}}"#)
    };
    let a = entry("F32", "[2]", "[0,8]");
    let one = |dtype: &str, shape: &str, offsets: &str| {
        format!(r#"{{"a":{}}}"#, entry(dtype, shape, offsets))
    };
    let two = |second: &str, offsets: &str| {
        format!(r#"{{"a":{a},"{second}":{}}}"#, entry("F32", "[2]", offsets))
    };
    let cases = [
        (
            one("F32", "[2]", "[0,8]"),
            7,
            "truncated: tensor a ends at byte 8 of the data and the file has 7 bytes",
        ),
        (
            one("F32", "[2]", "[0,8]"),
            9,
            "1 bytes follow the last tensor",
        ),
        (
            one("F32", "[3]", "[0,8]"),
            8,
            "tensor a is F32 [3] but has 8 bytes",
        ),
        (
            one("F32", "[2]", "[8,0]"),
            8,
            "tensor a begins at byte 8 of the data, after its end at 0",
        ),
        (
            one("F33", "[2]", "[0,8]"),
            8,
            "tensor a has the unknown dtype F33",
        ),
        (
            one("F32", "[4611686018427387904]", "[0,0]"),
            0,
            "tensor a is F32 [4611686018427387904] but has 0 bytes",
        ),
        (
            one("F32", "[4294967296,4294967296]", "[0,0]"),
            0,
            "but has 0 bytes",
        ),
        (
            one("F32", "[2]", "[18446744073709551608,18446744073709551615]"),
            8,
            "but has 7 bytes",
        ),
        (
            one("U8", "[18446744073709551615]", "[0,18446744073709551615]"),
            8,
            "truncated: tensor a ends",
        ),
        (one("F32", "[-2]", "[0,8]"), 8, "header is not valid"),
        (one("F32", "[2]", "[0,8,16]"), 8, "header is not valid"),
        (one("F32", "2", "[0,8]"), 8, "header is not valid"),
        (
            r#"{"a":{"dtype":"F32","shape":[2]}}"#.to_owned(),
            8,
            "missing field `data_offsets`",
        ),
        (r#"["a"]"#.to_owned(), 8, "header is not valid"),
        (String::new(), 0, "header is not valid"),
        (two("a", "[8,16]"), 16, "tensor a occurs twice"),
        (
            two("b", "[4,12]"),
            12,
            "tensor b overlaps the one before it",
        ),
        (two("b", "[0,8]"), 8, "overlaps the one before it"),
        (two("b", "[9,17]"), 17, "tensor b leaves a gap before it"),
    ];
    for (header, data, expected) in cases {
        let message = refused_file(&file_of(&header, &vec![0; data]));
        assert!(message.contains(expected), "{message}\nlacks {expected}");
    }

    for length in 0..8 {
        let message = refused_file(&vec![0; length]);
        assert!(
            message.contains(&format!("truncated: {length} bytes")),
            "{message}"
        );
    }
    let message = refused_file(&u64::MAX.to_le_bytes());
    assert!(
        message.contains("announce a header of 18446744073709551615 bytes"),
        "{message}"
    );
    let message = refused_file(&100u64.to_le_bytes());
    assert!(
        message.contains("truncated: the header ends at byte 108 and the file has 8 bytes"),
        "{message}"
    );
    let nested = format!(r#"{{"a":{}"#, "[".repeat(100_000));
    assert!(refused_file(&file_of(&nested, &[])).contains("header is not valid"));
}

#[test]
fn every_truncation_is_noticed() {
    let whole = safetensors(&[
        tensor("a", "BF16", &[3, 2], vec![1; 12]),
        tensor("b", "F32", &[], vec![2; 4]),
    ]);
    for length in 0..whole.len() {
        refused_file(&whole[..length]);
    }
    // A real one, cut in the data.
    let bytes = std::fs::read(golden("qwen3/model.safetensors")).unwrap();
    let message = refused_file(&bytes[..bytes.len() - 1]);
    assert!(message.contains("truncated: tensor"), "{message}");
}

#[test]
fn unusual_but_valid_files_are_read() {
    let dir = tempfile::tempdir().unwrap();
    let header = r#"{"empty":{"dtype":"F32","shape":[0,5],"data_offsets":[4,4]},
        "__metadata__":{"format":"pt"},
        "odd":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},
        "unaligned":{"data_offsets":[1,4],"shape":[3,1],"dtype":"I8"}}   "#;
    std::fs::write(
        dir.path().join("model.safetensors"),
        file_of(header, &[1, 2, 3, 4]),
    )
    .unwrap();
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(
        checkpoint.names().collect::<Vec<_>>(),
        ["empty", "odd", "unaligned"]
    );
    assert_eq!(checkpoint.total_bytes(), 4);
    let view = checkpoint.tensor("unaligned").unwrap();
    assert_eq!(
        (view.dtype, view.shape, &*view.data),
        (Dtype::I8, &[3, 1][..], &[2, 3, 4][..])
    );
    assert!(checkpoint.tensor("empty").unwrap().data.is_empty());
    assert!(checkpoint.tensor("none").is_none());
}

#[test]
fn a_header_can_be_read_without_the_file() {
    let bytes = std::fs::read(golden("qwen3/model.safetensors")).unwrap();
    let path = Path::new("remote");
    let start = Header::data_start(path, &bytes[..8], bytes.len() as u64).unwrap();
    let header = Header::parse(path, &bytes[..start], bytes.len() as u64).unwrap();
    let total: usize = header.tensors.iter().map(|t| t.range.len()).sum();
    assert_eq!(start + total, bytes.len());
    let short = Header::parse(path, &bytes[..start - 1], bytes.len() as u64);
    assert_eq!(short.unwrap_err().kind(), ErrorKind::Bug);
}

/// A directory with two shards and an index.
fn sharded(edit: impl FnOnce(&mut Value)) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let shards = [("one.safetensors", "a"), ("two.safetensors", "b")];
    let mut map = Map::new();
    for (file, name) in shards {
        let bytes = safetensors(&[tensor(name, "F32", &[1], vec![0; 4])]);
        std::fs::write(dir.path().join(file), bytes).unwrap();
        map.insert(name.to_owned(), json!(file));
    }
    let mut index = json!({"metadata": {"total_size": 8}, "weight_map": map});
    edit(&mut index);
    std::fs::write(
        dir.path().join("model.safetensors.index.json"),
        index.to_string(),
    )
    .unwrap();
    dir
}

#[test]
fn the_index_decides_which_files_there_are() {
    let dir = sharded(|_| ());
    let other = safetensors(&[tensor("other", "F32", &[1], vec![0; 4])]);
    for name in [
        "model.safetensors",
        "consolidated.safetensors",
        "three.safetensors",
    ] {
        std::fs::write(dir.path().join(name), &other).unwrap();
    }
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    assert_eq!(checkpoint.names().collect::<Vec<_>>(), ["a", "b"]);
}

#[test]
fn bad_indices_are_refused() {
    type Edit = fn(&mut Value);
    let cases: [(Edit, &str); 9] = [
        (
            |i| i["weight_map"]["b"] = json!("../two.safetensors"),
            "names ../two.safetensors; only .safetensors files of the same directory",
        ),
        (
            |i| i["weight_map"]["b"] = json!("/etc/two.safetensors"),
            "names /etc/two.safetensors; only",
        ),
        (
            |i| i["weight_map"]["b"] = json!("config.json"),
            "names config.json; only",
        ),
        (|i| i["weight_map"]["b"] = json!(".."), "names ..; only"),
        (
            |i| i["weight_map"]["b"] = json!("three.safetensors"),
            "names three.safetensors, which is not there",
        ),
        (
            |i| i["weight_map"]["b"] = json!("one.safetensors"),
            "says that tensor b is in one.safetensors, where it is not",
        ),
        (
            |i| i["weight_map"]["c"] = json!("two.safetensors"),
            "says that tensor c is in two.safetensors, where it is not",
        ),
        (
            |i| i["weight_map"] = json!({}),
            "weight_map names no tensor",
        ),
        (|i| i["weight_map"] = json!({"a": 1}), "not a valid index"),
    ];
    for (edit, expected) in cases {
        let dir = sharded(edit);
        let message = refusal(Checkpoint::open(dir.path()));
        assert!(message.contains(expected), "{message}\nlacks {expected}");
    }
    let dir = sharded(|_| ());
    let doubled = r#"{"weight_map": {"a": "one.safetensors", "b": "two.safetensors", "a": "two.safetensors"}}"#;
    std::fs::write(dir.path().join("model.safetensors.index.json"), doubled).unwrap();
    refusal(Checkpoint::open(dir.path()));
    // The same tensor in two shards.
    let dir = sharded(|_| ());
    std::fs::copy(
        dir.path().join("one.safetensors"),
        dir.path().join("two.safetensors"),
    )
    .unwrap();
    let message = refusal(Checkpoint::open(dir.path()));
    assert!(message.contains("tensor a is also in"), "{message}");
}

#[test]
fn missing_files_are_named() {
    let dir = tempfile::tempdir().unwrap();
    let message = refusal(Checkpoint::open(dir.path()));
    assert!(
        message.contains("neither model.safetensors nor model.safetensors.index.json"),
        "{message}"
    );
    std::fs::write(dir.path().join("consolidated.safetensors"), "").unwrap();
    let message = refusal(Checkpoint::open(dir.path()));
    assert!(
        message.contains("consolidated.safetensors is, but"),
        "{message}"
    );
    std::fs::create_dir(dir.path().join("model.safetensors")).unwrap();
    assert!(refusal(Checkpoint::open(dir.path())).contains("not a regular file"));
}

#[test]
fn a_file_that_changes_is_noticed() {
    let dir = changed("qwen3", |_| ());
    let path = dir.path().join("model.safetensors");
    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    checkpoint.verify_unchanged().unwrap();
    // Replaced by renaming: the mapped one is what it was.
    let copy = dir.path().join("copy");
    std::fs::copy(&path, &copy).unwrap();
    std::fs::rename(&copy, &path).unwrap();
    checkpoint.verify_unchanged().unwrap();

    let checkpoint = Checkpoint::open(dir.path()).unwrap();
    let length = std::fs::metadata(&path).unwrap().len();
    let file = std::fs::OpenOptions::new().write(true).open(&path).unwrap();
    file.set_len(length - 100).unwrap();
    let message = refusal(checkpoint.verify_unchanged());
    assert!(
        message.contains(&format!("it had {length} bytes and has {}", length - 100)),
        "{message}"
    );
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(400) })]

    /// A file with some bytes of length or header changed is refused as a bad model, or its tensors lie inside it.
    #[test]
    fn mutated_headers_do_no_harm(
        changes in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 1..6),
        digits in any::<bool>(),
    ) {
        let mut bytes = safetensors(&[
            tensor("a.weight", "BF16", &[3, 2], vec![1; 12]),
            tensor("b.weight", "F32", &[], vec![2; 4]),
            tensor("c.weight", "F16", &[5], vec![3; 10]),
        ]);
        let data = 26;
        let end = bytes.len() - data;
        for (index, byte) in changes {
            let at = index.index(end);
            // Digits hit numbers more often than any byte would.
            bytes[at] = if digits && bytes[at].is_ascii_digit() { b'0' + byte % 10 } else { byte };
        }
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join("model.safetensors"), &bytes).unwrap();
        match Checkpoint::open(dir.path()) {
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::BadModel),
            Ok(checkpoint) => {
                prop_assert!(checkpoint.total_bytes() <= bytes.len() as u64);
                for name in checkpoint.names() {
                    let view = checkpoint.tensor(name).unwrap();
                    let elements: usize = view.shape.iter().product();
                    prop_assert_eq!(view.data.len(), elements * view.dtype.size());
                }
            }
        }
    }

    /// A random layout is accepted exactly if it covers the data without overlap or gap.
    #[test]
    fn layouts_must_cover_the_data(offsets in prop::collection::vec((0u64..6, 0u64..6), 1..4)) {
        let mut header = Map::new();
        for (index, &(begin, length)) in offsets.iter().enumerate() {
            let entry = json!({"dtype": "U8", "shape": [length], "data_offsets": [begin, begin + length]});
            header.insert(format!("t{index}"), entry);
        }
        let mut cover = [0; 12];
        for &(begin, length) in &offsets {
            cover[begin as usize..(begin + length) as usize].iter_mut().for_each(|n| *n += 1);
        }
        let end = offsets.iter().map(|(begin, length)| begin + length).max().unwrap() as usize;
        let covered = cover[..end].iter().all(|&n| n == 1);
        let dir = tempfile::tempdir().unwrap();
        let bytes = file_of(&Value::from(header).to_string(), &vec![0; end]);
        std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
        let opened = Checkpoint::open(dir.path());
        // An empty tensor in the middle of another covers nothing; it is refused, as an overlap.
        if covered && offsets.iter().all(|(_, length)| *length > 0) {
            prop_assert!(opened.is_ok(), "{:?}", opened.err());
        }
        if !covered {
            prop_assert!(opened.is_err());
        }
    }

    /// An index with some bytes changed never does anything but open or be refused.
    #[test]
    fn mutated_indices_do_no_harm(
        changes in prop::collection::vec((any::<prop::sample::Index>(), 32u8..127), 1..4),
    ) {
        let dir = sharded(|_| ());
        let path = dir.path().join("model.safetensors.index.json");
        let mut text = std::fs::read(&path).unwrap();
        for (index, byte) in changes {
            *index.get_mut(&mut text) = byte;
        }
        std::fs::write(&path, text).unwrap();
        match Checkpoint::open(dir.path()) {
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::BadModel),
            Ok(checkpoint) => prop_assert!(checkpoint.total_bytes() <= 8),
        }
    }

    /// A golden model's configuration with sizes changed: the files refuse what they do not hold, and nothing large is
    /// allocated on the way.
    #[test]
    fn other_sizes_than_the_files_have_are_refused(
        model in prop::sample::select(vec!["qwen3", "llama-bias", "apertus", "smollm3"]),
        field in prop::sample::select(vec!["hidden_size", "intermediate_size", "vocab_size", "num_hidden_layers",
            "num_attention_heads", "num_key_value_heads", "head_dim"]),
        size in prop_oneof![1u64..200, Just(1 << 12), Just(1 << 20), Just(1 << 24)],
    ) {
        let text = std::fs::read_to_string(golden(model).join("config.json")).unwrap();
        let mut value: Value = serde_json::from_str(&text).unwrap();
        let plain = ModelConfig::from_dir(golden(model)).unwrap();
        value[field] = json!(size);
        if let Ok(config) = ModelConfig::from_json(&value.to_string(), "config.json") {
            let checkpoint = Checkpoint::open(golden(model)).unwrap();
            let loaded = HostModel::load(&config, &checkpoint, ComputeType::Bf16);
            let sizes = |c: &ModelConfig| (c.hidden_size, c.intermediate_size, c.vocab_size, c.num_layers, c.q_width(),
                c.kv_width(), c.head_dim);
            if loaded.is_ok() {
                prop_assert_eq!(sizes(&config), sizes(&plain));
            } else {
                prop_assert_ne!(sizes(&config), sizes(&plain));
            }
        }
    }
}
