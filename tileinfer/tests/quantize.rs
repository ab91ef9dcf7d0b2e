//! Int8 checkpoints: what is written is what rounding at load gives, to the bit; other tools' forms of it load; what does
//! not fit is refused by name; the plan knows their size.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value, json};
use tempfile::TempDir;
use tileinfer::config::ModelConfig;
use tileinfer::weights::{
    Checkpoint, ComputeType, Dtype, HostModel, Int8Scheme, Weight, quantize_checkpoint,
};
use tileinfer::{Error, ErrorKind};

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../testdata/golden/models/{name}"))
}

fn load(dir: &Path, compute: ComputeType) -> Result<HostModel, Error> {
    HostModel::load(
        &ModelConfig::from_dir(dir)?,
        &Checkpoint::open(dir)?,
        compute,
    )
}

fn quantized(name: &str) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    let mut calls = Vec::new();
    quantize_checkpoint(&golden(name), dir.path(), &mut |done, all| {
        calls.push((done, all))
    })
    .unwrap();
    let all = calls.len();
    assert_eq!((calls[0], calls[all - 1]), ((1, all), (all, all)));
    dir
}

fn linears(model: &HostModel) -> impl Iterator<Item = &Weight> {
    let layers = model.layers.iter();
    layers.flat_map(|layer| [&layer.qkv, &layer.o, &layer.gate_up, &layer.down])
}

/// The integers and scales of a weight, part after part.
fn int8(weight: &Weight) -> (Vec<i8>, Vec<u32>) {
    let (mut q, mut scales) = (Vec::new(), Vec::new());
    for part in weight.parts() {
        let (values, of_rows) = part.data().int8().expect("the part is in int8");
        q.extend(values);
        scales.extend(of_rows.iter().map(|scale| scale.to_bits()));
    }
    (q, scales)
}

fn all_f32(weight: &Weight) -> Vec<f32> {
    let mut values = vec![0.0; weight.rows() * weight.cols()];
    for (row, out) in values.chunks_exact_mut(weight.cols()).enumerate() {
        weight.row_f32(row, out);
    }
    values
}

#[test]
fn what_is_written_is_what_rounding_at_load_gives() {
    // Tied, untied, with biases, of f16 and f32, without a gate.
    for name in [
        "llama-3heads",
        "qwen2",
        "qwen3",
        "llama-f16",
        "llama-f32",
        "apertus",
    ] {
        let dir = quantized(name);
        let config = ModelConfig::from_dir(dir.path()).unwrap();
        assert_eq!(Int8Scheme::of(&config), Ok(Some(Int8Scheme::W8A16)));
        let written = load(dir.path(), ComputeType::F32).unwrap();
        let original = load(&golden(name), ComputeType::F32).unwrap();
        for (written, original) in linears(&written).zip(linears(&original)) {
            assert!(written.has_int8());
            assert_eq!(int8(written), int8(&original.to_int8()), "{name}");
        }
        assert_eq!(all_f32(&written.embed), all_f32(&original.embed), "{name}");
        assert_eq!(
            written.head.as_ref().map(all_f32),
            original.head.as_ref().map(all_f32)
        );
        assert_eq!(written.final_norm, original.final_norm);
        assert_eq!(written.layers[0].qkv_bias, original.layers[0].qkv_bias);

        // All else is there, and nothing half done.
        let names = |dir: &Path| {
            let files = std::fs::read_dir(dir).unwrap();
            let mut names: Vec<_> = files
                .map(|f| f.unwrap().file_name().into_string().unwrap())
                .collect();
            names.retain(|name| !name.contains(".safetensors"));
            names.sort();
            names
        };
        assert_eq!(names(dir.path()), names(&golden(name)));

        // Once more is once too often, and so is a directory that holds something.
        let again = tempfile::tempdir().unwrap();
        let refused = quantize_checkpoint(dir.path(), again.path(), &mut |_, _| ()).unwrap_err();
        assert!(refused.kind() == ErrorKind::Usage && refused.to_string().contains("already"));
        let refused = quantize_checkpoint(&golden(name), dir.path(), &mut |_, _| ()).unwrap_err();
        assert!(refused.kind() == ErrorKind::Usage && refused.to_string().contains("not empty"));
    }
}

#[test]
fn the_plan_knows_what_is_loaded() {
    for entry in std::fs::read_dir(golden("")).unwrap() {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let dir = quantized_or_none(&name);
        let places = [
            Some(golden(&name)),
            dir.as_ref().map(|dir| dir.path().to_owned()),
        ];
        for dir in places.into_iter().flatten() {
            for compute in [ComputeType::F32, ComputeType::Bf16] {
                for rounded in [false, true] {
                    let model = load(&dir, compute).unwrap();
                    let tensors = Checkpoint::open(&dir).unwrap().tensors();
                    let planned = HostModel::bytes_of(&tensors, compute, rounded);
                    let what = format!("{}, {compute:?}, {rounded}", dir.display());
                    assert_eq!(planned, model.loaded_bytes(compute, rounded), "{what}");
                    assert!(model.step_bytes(compute, rounded) <= planned, "{what}");
                }
            }
        }
    }
}

fn quantized_or_none(name: &str) -> Option<TempDir> {
    let dir = tempfile::tempdir().unwrap();
    let made = quantize_checkpoint(&golden(name), dir.path(), &mut |_, _| ());
    match made {
        Ok(()) => Some(dir),
        Err(error) => {
            assert!(
                error.to_string().contains("more than a text model"),
                "{error}"
            );
            None
        }
    }
}

/// A tensor of a file: name, type, shape, bytes.
type Tensor = (String, &'static str, Vec<usize>, Vec<u8>);

fn tensors_of(dir: &Path) -> Vec<Tensor> {
    let checkpoint = Checkpoint::open(dir).unwrap();
    let names: Vec<_> = checkpoint.names().map(str::to_owned).collect();
    let tensors = names.into_iter().map(|name| {
        let view = checkpoint.tensor(&name).unwrap();
        let dtype = match view.dtype {
            Dtype::Bf16 => "BF16",
            Dtype::F32 => "F32",
            Dtype::I32 => "I32",
            Dtype::I64 => "I64",
            other => panic!("{other}"),
        };
        let (shape, data) = (view.shape.to_vec(), view.data.to_vec());
        (name.clone(), dtype, shape, data)
    });
    tensors.collect()
}

fn write(dir: &Path, tensors: &[Tensor]) {
    let (mut header, mut data) = (Map::new(), Vec::new());
    for (name, dtype, shape, bytes) in tensors {
        let begin = data.len();
        data.extend(bytes);
        let entry = json!({"dtype": dtype, "shape": shape, "data_offsets": [begin, data.len()]});
        header.insert(name.clone(), entry);
    }
    let header = Value::Object(header).to_string();
    let length = (header.len() as u64).to_le_bytes();
    let file = [&length, header.as_bytes(), &data].concat();
    std::fs::write(dir.join("model.safetensors"), file).unwrap();
}

fn edit_config(dir: &Path, edit: impl FnOnce(&mut Value)) {
    let path = dir.join("config.json");
    let mut config: Value = serde_json::from_slice(&std::fs::read(&path).unwrap()).unwrap();
    edit(&mut config);
    std::fs::write(path, config.to_string()).unwrap();
}

/// What W8A8 tools write: bytes as they are, bf16 scales, static activation scales here and there.
fn w8a8(name: &str) -> TempDir {
    let dir = quantized(name);
    let mut tensors = Vec::new();
    for (name, dtype, mut shape, bytes) in tensors_of(dir.path()) {
        if let Some(base) = name.strip_suffix("_packed") {
            shape[1] *= 4;
            let bytes = bytes.iter().map(|byte| byte ^ 0x80).collect();
            tensors.push((base.to_owned(), "I8", shape, bytes));
            let at = base.replace(".weight", ".input_scale");
            tensors.push((at, "BF16", vec![1], vec![0, 0x3f]));
        } else if name.ends_with("_scale") {
            let scales = bytes
                .as_chunks::<4>()
                .0
                .iter()
                .map(|&b| f32::from_le_bytes(b));
            let bytes = scales.flat_map(|scale| half::bf16::from_f32(scale).to_le_bytes());
            tensors.push((name, "BF16", shape, bytes.collect()));
        } else if !name.ends_with("_shape") {
            tensors.push((name, dtype, shape, bytes));
        }
    }
    write(dir.path(), &tensors);
    edit_config(dir.path(), |config| {
        config["quantization_config"]["format"] = "int-quantized".into();
    });
    dir
}

#[test]
fn checkpoints_of_8_bit_activations_load_as_weights() {
    let dir = w8a8("qwen3");
    let config = ModelConfig::from_dir(dir.path()).unwrap();
    assert_eq!(Int8Scheme::of(&config), Ok(Some(Int8Scheme::W8A8)));
    assert!(Int8Scheme::W8A8.to_string().contains("16 bits"));
    let model = load(dir.path(), ComputeType::Bf16).unwrap();
    let original = load(&golden("qwen3"), ComputeType::Bf16).unwrap();
    for (found, original) in linears(&model).zip(linears(&original)) {
        let ((q, scales), (q_wanted, scales_wanted)) = (int8(found), int8(&original.to_int8()));
        assert_eq!(q, q_wanted);
        let rounded = scales_wanted
            .iter()
            .map(|&bits| half::bf16::from_f32(f32::from_bits(bits)));
        let rounded: Vec<u32> = rounded.map(|scale| scale.to_f32().to_bits()).collect();
        assert_eq!(scales, rounded);
    }
}

#[test]
fn what_does_not_fit_is_refused_by_name() {
    let refusal = |dir: &TempDir, words: &[&str]| {
        let error = load(dir.path(), ComputeType::Bf16).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadModel, "{error}");
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    };
    let configs: [(&str, Value, &[&str]); 6] = [
        (
            "strategy",
            json!("group"),
            &["strategy", "group", "channel"],
        ),
        ("num_bits", json!(4), &["num_bits 4"]),
        ("symmetric", json!(false), &["symmetric false"]),
        ("type", json!("float"), &["float"]),
        (
            "format",
            json!("nvfp4-pack-quantized"),
            &["nvfp4", "pack-quantized"],
        ),
        ("quant_method", json!("gptq"), &["gptq", "not supported"]),
    ];
    for (field, value, words) in configs {
        let dir = quantized("qwen3");
        edit_config(dir.path(), |config| {
            let config = &mut config["quantization_config"];
            if config[field].is_null() {
                config["config_groups"]["group_0"]["weights"][field] = value;
            } else {
                config[field] = value;
            }
        });
        refusal(&dir, words);
    }
    let q = "model.layers.0.self_attn.q_proj";
    let edits: [(&str, &dyn Fn(&mut Tensor), &[&str]); 5] = [
        (
            "weight_scale",
            &|t| t.0.push('x'),
            &["q_proj.weight_scale is missing"],
        ),
        (
            "weight_scale",
            &|t| t.2 = vec![1, t.2[0]],
            &["one scale for each of"],
        ),
        ("weight_scale", &|t| t.3[2..4].fill(0xff), &["NaN"]),
        (
            "weight_packed",
            &|t| t.2.reverse(),
            &["q_proj.weight_packed", "I32"],
        ),
        (
            "weight_shape",
            &|t| t.3[0] ^= 1,
            &["weight_shape does not say"],
        ),
    ];
    for (end, edit, words) in edits {
        let dir = quantized("qwen3");
        let mut tensors = tensors_of(dir.path());
        let name = format!("{q}.{end}");
        edit(tensors.iter_mut().find(|t| t.0 == name).unwrap());
        write(dir.path(), &tensors);
        refusal(&dir, words);
    }
    let dir = quantized("qwen3");
    let mut tensors = tensors_of(dir.path());
    tensors.push((
        format!("{q}.weight_zero_point"),
        "I32",
        vec![1],
        vec![1, 0, 0, 0],
    ));
    write(dir.path(), &tensors);
    refusal(&dir, &["weight_zero_point", "symmetric"]);
}
