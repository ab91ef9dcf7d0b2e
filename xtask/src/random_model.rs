//! A checkpoint of random weights at a real shape, for measurements: nobody has to download 16 GB to time a load, a
//! step or a server. It knows the tensor names of the plain decoders (Llama, Mistral, Qwen 2 and 3) and nothing of
//! what they compute.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::{BufWriter, Write};
use std::path::PathBuf;

use anyhow::{Context, Result, ensure};
use serde_json::{Map, Value, json};

use crate::files::NewFolder;

/// Random values that are repeated, each time from another place on: odd, so that no two matrices line up.
const VALUES: usize = (1 << 22) - 1;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// A config.json of a Llama, Mistral, Qwen 2 or Qwen 3 model
    config: PathBuf,
    /// The folder to make
    folder: PathBuf,
    /// A folder whose tokenizer files are copied, so that the model can be talked to
    #[arg(long, value_name = "DIR")]
    tokenizer: Option<PathBuf>,
}

struct Tensor {
    name: String,
    shape: Vec<usize>,
}

pub(crate) fn run(arguments: &Arguments) -> Result<()> {
    let text = fs::read_to_string(&arguments.config)
        .with_context(|| format!("cannot read {}", arguments.config.display()))?;
    let config: Map<String, Value> = serde_json::from_str(&text)
        .with_context(|| format!("{} is not a JSON object", arguments.config.display()))?;
    let tensors = tensors(&config)?;
    let folder = NewFolder::new(&arguments.folder)?;
    let path = folder.path().join("model.safetensors");
    write(&path, &tensors).with_context(|| format!("cannot write {}", path.display()))?;
    if let Some(from) = &arguments.tokenizer {
        for name in [
            "tokenizer.json",
            "tokenizer_config.json",
            "chat_template.jinja",
        ] {
            let file = from.join(name);
            if file.exists() {
                fs::copy(&file, folder.path().join(name))
                    .with_context(|| format!("cannot copy {}", file.display()))?;
            }
        }
    }
    fs::write(folder.path().join("config.json"), text).context("cannot write config.json")?;
    folder.publish()?;
    eprintln!("{} is ready", arguments.folder.display());
    Ok(())
}

/// The tensors of the model that a `config.json` describes, named as transformers does.
fn tensors(config: &Map<String, Value>) -> Result<Vec<Tensor>> {
    let kind = config
        .get("model_type")
        .and_then(Value::as_str)
        .unwrap_or("");
    ensure!(
        ["llama", "mistral", "qwen2", "qwen3"].contains(&kind),
        "model_type is \"{kind}\": this makes llama, mistral, qwen2 and qwen3 models"
    );
    let optional = |name: &str| config.get(name).and_then(Value::as_u64).map(|n| n as usize);
    let number = |name: &str| optional(name).with_context(|| format!("config.json has no {name}"));
    let flag = |name: &str| config.get(name).and_then(Value::as_bool).unwrap_or(false);
    let (hidden, wide) = (number("hidden_size")?, number("intermediate_size")?);
    let heads = number("num_attention_heads")?;
    let head = optional("head_dim").unwrap_or(hidden / heads.max(1));
    let (q, kv) = (
        heads * head,
        optional("num_key_value_heads").unwrap_or(heads) * head,
    );
    let vocabulary = number("vocab_size")?;

    let mut all = Vec::new();
    let mut tensor = |name: String, shape: &[usize]| {
        let shape = shape.to_vec();
        all.push(Tensor { name, shape });
    };
    tensor(
        "model.embed_tokens.weight".to_owned(),
        &[vocabulary, hidden],
    );
    for layer in 0..number("num_hidden_layers")? {
        let name = |rest: &str| format!("model.layers.{layer}.{rest}");
        tensor(name("input_layernorm.weight"), &[hidden]);
        for (which, rows, columns, biased) in [
            (
                "self_attn.q_proj",
                q,
                hidden,
                kind == "qwen2" || flag("attention_bias"),
            ),
            (
                "self_attn.k_proj",
                kv,
                hidden,
                kind == "qwen2" || flag("attention_bias"),
            ),
            (
                "self_attn.v_proj",
                kv,
                hidden,
                kind == "qwen2" || flag("attention_bias"),
            ),
            ("self_attn.o_proj", hidden, q, flag("attention_bias")),
            ("mlp.gate_proj", wide, hidden, flag("mlp_bias")),
            ("mlp.up_proj", wide, hidden, flag("mlp_bias")),
            ("mlp.down_proj", hidden, wide, flag("mlp_bias")),
        ] {
            tensor(name(&format!("{which}.weight")), &[rows, columns]);
            if biased {
                tensor(name(&format!("{which}.bias")), &[rows]);
            }
        }
        if kind == "qwen3" {
            tensor(name("self_attn.q_norm.weight"), &[head]);
            tensor(name("self_attn.k_norm.weight"), &[head]);
        }
        tensor(name("post_attention_layernorm.weight"), &[hidden]);
    }
    tensor("model.norm.weight".to_owned(), &[hidden]);
    if !flag("tie_word_embeddings") {
        tensor("lm_head.weight".to_owned(), &[vocabulary, hidden]);
    }
    Ok(all)
}

/// One safetensors file in bf16: matrices about normal with a deviation of one over the root of their columns, norms
/// of ones, biases of zeros.
fn write(path: &std::path::Path, tensors: &[Tensor]) -> Result<()> {
    let mut header = Map::new();
    let mut at = 0;
    for tensor in tensors {
        let end = at + 2 * tensor.shape.iter().product::<usize>();
        let place = json!({"dtype": "BF16", "shape": tensor.shape, "data_offsets": [at, end]});
        header.insert(tensor.name.clone(), place);
        at = end;
    }
    let mut header = Value::Object(header).to_string().into_bytes();
    header.resize(header.len().next_multiple_of(8), b' ');
    let mut file = BufWriter::with_capacity(1 << 20, File::create(path)?);
    file.write_all(&(header.len() as u64).to_le_bytes())?;
    file.write_all(&header)?;
    let normal = normal(VALUES);
    let mut scaled = HashMap::new();
    let mut place = 0;
    for tensor in tensors {
        let count: usize = tensor.shape.iter().product();
        match tensor.shape[..] {
            [_, columns] => {
                let values = scaled.entry(columns).or_insert_with(|| {
                    let by = (columns as f32).powf(-0.5);
                    bf16_bytes(normal.iter().map(|value| value * by))
                });
                let mut left = 2 * count;
                while left > 0 {
                    let part = left.min(values.len() - place);
                    file.write_all(&values[place..place + part])?;
                    place = (place + part) % values.len();
                    left -= part;
                }
            }
            _ => {
                let value = if tensor.name.ends_with(".bias") {
                    0.0
                } else {
                    1.0
                };
                file.write_all(&bf16_bytes(std::iter::repeat_n(value, count)))?;
            }
        }
    }
    file.into_inner().context("the last bytes")?.sync_all()?;
    Ok(())
}

/// About normal values of deviation 1, the same at every run: sums of four uniform ones (SplitMix64).
fn normal(count: usize) -> Vec<f32> {
    let mut state = 1u64;
    let mut uniform = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = state;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z ^ (z >> 31)) >> 40) as f32 / (1u64 << 24) as f32 - 0.5
    };
    let mut value = || 1.732 * (uniform() + uniform() + uniform() + uniform());
    (0..count).map(|_| value()).collect()
}

/// Upper halves of f32 values: rounding toward zero is good enough for noise.
fn bf16_bytes(values: impl Iterator<Item = f32>) -> Vec<u8> {
    values
        .flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes())
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_config_names_its_tensors() {
        let config = json!({
            "model_type": "qwen3", "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 2,
            "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 4, "vocab_size": 10,
            "tie_word_embeddings": true,
        });
        let tensors = tensors(config.as_object().expect("it is one")).expect("all is there");
        let shape = |name: &str| {
            let found = tensors.iter().find(|tensor| tensor.name == name);
            found.map(|tensor| tensor.shape.clone())
        };
        assert_eq!(tensors.len(), 2 + 2 * 11);
        assert_eq!(
            shape("model.layers.1.self_attn.k_proj.weight"),
            Some(vec![4, 8])
        );
        assert_eq!(
            shape("model.layers.0.mlp.down_proj.weight"),
            Some(vec![8, 12])
        );
        assert_eq!(
            shape("model.layers.0.self_attn.q_norm.weight"),
            Some(vec![4])
        );
        assert_eq!(shape("lm_head.weight"), None);
    }

    #[test]
    fn a_file_is_as_long_as_its_header_says() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("model.safetensors");
        let tensor = |name: &str, shape: &[usize]| Tensor {
            name: name.to_owned(),
            shape: shape.to_vec(),
        };
        let tensors = [
            tensor("a.weight", &[2100, 1000]),
            tensor("a.bias", &[2100]),
            tensor("b.weight", &[3000, 1000]),
        ];
        write(&path, &tensors).expect("it is written");
        let bytes = fs::read(&path).expect("it is there");
        let header = u64::from_le_bytes(bytes[..8].try_into().expect("eight")) as usize;
        assert_eq!(bytes.len(), 8 + header + 2 * (2_100_000 + 2100 + 3_000_000));
        let names: Map<String, Value> =
            serde_json::from_slice(&bytes[8..8 + header]).expect("JSON");
        assert_eq!(names["b.weight"]["shape"], json!([3000, 1000]));
    }
}
