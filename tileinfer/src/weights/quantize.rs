//! Writes a checkpoint again with its linears in int8: `pack-quantized` compressed-tensors, one scale a row, which other
//! engines read too. One matrix is in memory at a time. It does not run anything.

use super::checkpoint::Checkpoint;
use super::compressed;
use super::host::NOT_TEXT;
use super::safetensors::{Dtype, TensorInfo};
use super::tensor::{Weight, WeightPart};
use crate::{Error, Result};
use serde_json::{Map, Value, json};
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::{Path, PathBuf};

/// The linears of a layer, by the end of their names.
const LINEARS: [&str; 7] = [
    "q_proj",
    "k_proj",
    "v_proj",
    "o_proj",
    "gate_proj",
    "up_proj",
    "down_proj",
];

/// Writes the model in `from` to the new directory `to`, its linears in int8. Embedding and head stay as they are (a
/// head that is the embedding is no tensor of its own; `--quant int8` rounds it at load), and so do norms and biases.
/// The other files are copied. `progress` is told the tensors done and how many there are.
///
/// `config.json` is written last: a directory without it is one whose making was cut off.
///
/// # Errors
/// `Usage` if `to` holds something already, or the model is quantized, or is more than a text model; `Io`; what opening
/// the checkpoint fails with.
pub fn quantize_checkpoint(
    from: &Path,
    to: &Path,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    let config_path = from.join("config.json");
    let io = |path: &Path| {
        let path = path.to_owned();
        move |error| Error::io(path, error)
    };
    let text = fs::read(&config_path).map_err(io(&config_path))?;
    let mut config: Map<String, Value> = serde_json::from_slice(&text)
        .map_err(|error| Error::bad_model(&config_path, format!("not a JSON object: {error}")))?;
    if config.contains_key("quantization_config") {
        return Err(Error::usage(format!(
            "{} is quantized already",
            from.display()
        )));
    }
    let checkpoint = Checkpoint::open(from)?;
    if let Some(name) = checkpoint
        .names()
        .find(|name| NOT_TEXT.iter().any(|part| name.starts_with(part)))
    {
        return Err(Error::usage(format!(
            "{} holds more than a text model ({name}), which cannot be rounded",
            from.display()
        )));
    }
    fs::create_dir_all(to).map_err(io(to))?;
    if let Some(found) = fs::read_dir(to).map_err(io(to))?.next() {
        let found = found.map_err(io(to))?.file_name();
        return Err(Error::usage(format!(
            "{} is not empty ({}); name a new directory",
            to.display(),
            found.display()
        )));
    }

    write_weights(&checkpoint, &to.join("model.safetensors"), progress)?;
    for entry in fs::read_dir(from).map_err(io(from))? {
        let entry = entry.map_err(io(from))?;
        let name = entry.file_name();
        let text = name.to_string_lossy();
        let weights = text.ends_with(".safetensors") || text.ends_with(".safetensors.index.json");
        let other = text.starts_with('.') || text == "config.json" || is_other_weights(&text);
        // Through links: caches are made of them.
        let path = entry.path();
        if !weights && !other && fs::metadata(&path).map_err(io(&path))?.is_file() {
            let bytes = fs::read(&path).map_err(io(&path))?;
            write_whole(&to.join(&name), |file| file.write_all(&bytes))?;
        }
    }
    config.insert("quantization_config".to_owned(), quantization_config());
    let text = serde_json::to_vec_pretty(&Value::Object(config))
        .map_err(|error| Error::Bug(format!("config.json: {error}")))?;
    write_whole(&to.join("config.json"), |file| file.write_all(&text))
}

/// Weights in forms that are not read here and would be copied for nothing.
fn is_other_weights(name: &str) -> bool {
    let ends = [".bin", ".pt", ".pth", ".gguf", ".onnx", ".h5", ".msgpack"];
    ends.iter().any(|end| name.ends_with(end))
}

fn quantization_config() -> Value {
    json!({
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {
            "group_0": {
                "targets": ["Linear"],
                "weights": {
                    "num_bits": 8,
                    "type": "int",
                    "symmetric": true,
                    "strategy": "channel",
                    "group_size": null,
                    "block_structure": null,
                    "dynamic": false,
                    "actorder": null,
                    "observer": "minmax",
                    "observer_kwargs": {},
                },
                "input_activations": null,
                "output_activations": null,
            },
        },
        "ignore": ["lm_head"],
        "kv_cache_scheme": null,
        "global_compression_ratio": null,
    })
}

/// A tensor of the new file.
struct Written {
    name: String,
    dtype: &'static str,
    shape: Vec<usize>,
    bytes: usize,
}

/// The base name of a tensor that is the weight of a linear.
fn linear(tensor: &TensorInfo) -> Option<&str> {
    let base = tensor.name.strip_suffix(".weight")?;
    let last = base.rsplit('.').next()?;
    let float = matches!(tensor.dtype, Dtype::Bf16 | Dtype::F16 | Dtype::F32);
    (tensor.shape.len() == 2 && float && LINEARS.contains(&last)).then_some(base)
}

fn write_weights(
    checkpoint: &Checkpoint,
    path: &Path,
    progress: &mut dyn FnMut(usize, usize),
) -> Result<()> {
    let tensors = checkpoint.tensors();
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
    let mut at = 0;
    let plans: Vec<Vec<Written>> = tensors.iter().map(written).collect();
    for tensor in plans.iter().flatten() {
        let place = json!({
            "dtype": tensor.dtype,
            "shape": tensor.shape,
            "data_offsets": [at, at + tensor.bytes],
        });
        header.insert(tensor.name.clone(), place);
        at += tensor.bytes;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    // The data begin at a multiple of eight bytes.
    header.resize(header.len().next_multiple_of(8), b' ');
    write_whole(path, |file| {
        file.write_all(&(header.len() as u64).to_le_bytes())?;
        file.write_all(&header)?;
        for (i, tensor) in tensors.iter().enumerate() {
            let view = checkpoint.tensor(&tensor.name);
            let view = view.ok_or_else(|| std::io::Error::other("a tensor went away"))?;
            if linear(tensor).is_none() {
                file.write_all(&view.data)?;
            } else {
                let part = WeightPart::from_tensor(view).map_err(std::io::Error::other)?;
                let weight = Weight::new(vec![part]).map_err(std::io::Error::other)?;
                let weight = weight.to_int8();
                let (values, scales) = weight.parts()[0]
                    .data()
                    .int8()
                    .ok_or_else(|| std::io::Error::other("a matrix is not in int8"))?;
                file.write_all(&compressed::pack(values, weight.cols()))?;
                for scale in scales {
                    file.write_all(&scale.to_le_bytes())?;
                }
                for n in [weight.rows(), weight.cols()] {
                    file.write_all(&(n as i64).to_le_bytes())?;
                }
            }
            progress(i + 1, tensors.len());
        }
        Ok(())
    })
}

/// What becomes of a tensor, in the order in which it is written.
fn written(tensor: &TensorInfo) -> Vec<Written> {
    let Some(base) = linear(tensor) else {
        return vec![Written {
            name: tensor.name.clone(),
            dtype: tensor.dtype.header_name(),
            shape: tensor.shape.clone(),
            bytes: tensor.range.len(),
        }];
    };
    let (rows, words) = (tensor.shape[0], tensor.shape[1].div_ceil(4));
    let one = |end: &str, dtype: Dtype, shape: Vec<usize>| Written {
        name: format!("{base}.{end}"),
        dtype: dtype.header_name(),
        bytes: shape.iter().product::<usize>() * dtype.size(),
        shape,
    };
    vec![
        one("weight_packed", Dtype::I32, vec![rows, words]),
        one("weight_scale", Dtype::F32, vec![rows, 1]),
        one("weight_shape", Dtype::I64, vec![2]),
    ]
}

/// Writes `path` under another name and renames it.
fn write_whole(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> std::io::Result<()>,
) -> Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let part: PathBuf = path.with_file_name(format!(".{name}.{}.part", std::process::id()));
    let written = File::create(&part).and_then(|file| {
        let mut file = BufWriter::with_capacity(1 << 20, file);
        write(&mut file)?;
        file.into_inner()?.sync_all()?;
        fs::rename(&part, path)
    });
    written.map_err(|error| {
        // It may not be there at all.
        let _ = fs::remove_file(&part);
        Error::io(path, error)
    })
}
