//! From the text of `config.json` to a [`ModelConfig`]: one table of what the configuration classes of transformers
//! assume when a field is absent, and one walk through the fields.

use super::fields::Fields;
use super::rope::yarn_mscale;
use super::{
    Activation, AttentionBias, Family, LayerConfig, ModelConfig, QueryScale, Rope, RopeKind,
};
use crate::weights::Dtype;
use crate::{Error, Result};
use serde_json::{Value, json};
use std::io::Read;
use std::ops::RangeInclusive;
use std::path::Path;

// Far above any model there is, low enough that no product of them overflows and no list of layers fills the memory.
const LAYERS: RangeInclusive<usize> = 1..=1 << 12;
const HEADS: RangeInclusive<usize> = 1..=1 << 12;
const HEAD_DIM: RangeInclusive<usize> = 1..=1 << 12;
const WIDTH: RangeInclusive<usize> = 1..=1 << 20;
const VOCAB: RangeInclusive<usize> = 1..=1 << 24;
const POSITIONS: RangeInclusive<usize> = 1..=(1 << 31) - 1;
/// `config.json` files have a few kilobytes.
const FILE_LIMIT: u64 = 16 << 20;

/// What a `model_type` assumes where its file is silent.
struct Class {
    model_type: &'static str,
    /// The same in `architectures`, for files without `model_type`.
    architecture: &'static str,
    family: Family,
    head_dim: Option<usize>,
    /// If the field is absent; null always means as many as query heads.
    num_kv_heads: Option<usize>,
    max_position_embeddings: usize,
    rms_norm_eps: f64,
    theta: f64,
    /// RoPE if the file has no field about it besides `rope_theta`.
    rope: fn() -> Value,
    tied: bool,
    attention_bias: BiasRule,
    mlp_bias: bool,
    qk_norm: bool,
    activation: Activation,
    window: WindowRule,
}

#[derive(Clone, Copy)]
enum BiasRule {
    Never,
    Qkv,
    /// `attention_bias: true` puts biases on all four projections.
    Field,
}

/// Where a `sliding_window` applies if there are no `layer_types`.
#[derive(Clone, Copy)]
enum WindowRule {
    /// Nowhere.
    Nowhere,
    /// In every layer; the given default counts if the field is absent, and null means none.
    Everywhere(Option<usize>),
    /// With `use_sliding_window`, from layer `max_window_layers` on.
    FromLayer,
    /// With `use_sliding_window`, in the layers that do not rotate.
    WithoutRope,
}

fn plain_rope() -> Value {
    json!({})
}

fn apertus_rope() -> Value {
    json!({"rope_type": "llama3", "rope_theta": 12e6, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192})
}

fn ministral3_rope() -> Value {
    json!({"rope_type": "yarn", "rope_theta": 1e6, "factor": 16.0, "original_max_position_embeddings": 16384,
        "beta_fast": 32.0, "beta_slow": 1.0, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1})
}

const LLAMA: Class = Class {
    model_type: "llama",
    architecture: "LlamaForCausalLM",
    family: Family::Llama,
    head_dim: None,
    num_kv_heads: None,
    max_position_embeddings: 2048,
    rms_norm_eps: 1e-6,
    theta: 1e4,
    rope: plain_rope,
    tied: false,
    attention_bias: BiasRule::Field,
    mlp_bias: true,
    qk_norm: false,
    activation: Activation::SiluGated,
    window: WindowRule::Nowhere,
};

const MISTRAL: Class = Class {
    model_type: "mistral",
    architecture: "MistralForCausalLM",
    family: Family::Mistral,
    num_kv_heads: Some(8),
    max_position_embeddings: 131_072,
    attention_bias: BiasRule::Never,
    mlp_bias: false,
    window: WindowRule::Everywhere(Some(4096)),
    ..LLAMA
};

const QWEN2: Class = Class {
    model_type: "qwen2",
    architecture: "Qwen2ForCausalLM",
    family: Family::Qwen2,
    num_kv_heads: Some(32),
    max_position_embeddings: 32_768,
    attention_bias: BiasRule::Qkv,
    mlp_bias: false,
    window: WindowRule::FromLayer,
    ..LLAMA
};

const APERTUS: Class = Class {
    model_type: "apertus",
    architecture: "ApertusForCausalLM",
    family: Family::Apertus,
    max_position_embeddings: 65_536,
    rms_norm_eps: 1e-5,
    theta: 12e6,
    rope: apertus_rope,
    qk_norm: true,
    activation: Activation::Xielu,
    ..LLAMA
};

static CLASSES: [Class; 8] = [
    LLAMA,
    MISTRAL,
    Class {
        model_type: "ministral3",
        architecture: "Ministral3ForCausalLM",
        head_dim: Some(128),
        max_position_embeddings: 262_144,
        rms_norm_eps: 1e-5,
        rope: ministral3_rope,
        window: WindowRule::Everywhere(None),
        ..MISTRAL
    },
    QWEN2,
    Class {
        model_type: "qwen3",
        architecture: "Qwen3ForCausalLM",
        family: Family::Qwen3,
        head_dim: Some(128),
        attention_bias: BiasRule::Field,
        qk_norm: true,
        ..QWEN2
    },
    Class {
        model_type: "smollm3",
        architecture: "SmolLM3ForCausalLM",
        family: Family::SmolLm3,
        num_kv_heads: Some(4),
        max_position_embeddings: 32_768,
        theta: 2e6,
        tied: true,
        window: WindowRule::WithoutRope,
        ..LLAMA
    },
    APERTUS,
    Class {
        model_type: "apertus1p5_text",
        architecture: "Apertus1p5TextForCausalLM",
        ..APERTUS
    },
];

/// A model with more than text, whose text fields stand in `text_config`.
struct Wrapper {
    model_type: &'static str,
    architecture: &'static str,
    /// The text half if `text_config` does not say.
    text: &'static str,
    /// Class default of the wrapper's own `tie_word_embeddings`.
    tied: bool,
}

static WRAPPERS: [Wrapper; 2] = [
    Wrapper {
        model_type: "mistral3",
        architecture: "Mistral3ForConditionalGeneration",
        text: "mistral",
        tied: true,
    },
    Wrapper {
        model_type: "apertus1p5",
        architecture: "Apertus1p5ForConditionalGeneration",
        text: "apertus1p5_text",
        tied: false,
    },
];

impl ModelConfig {
    /// Reads `config.json` in a model's directory, and the end tokens of `generation_config.json` if there is one.
    ///
    /// # Errors
    /// `BadModel` naming the file and the field; `Io` if a file is there and cannot be read.
    pub fn from_dir(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let path = dir.join("config.json");
        let text = read_text(&path)?.ok_or_else(|| {
            Error::bad_model(
                dir,
                "there is no config.json here; give the directory of a model in the Hugging Face layout",
            )
        })?;
        let mut config = Self::from_json(&text, &path)?;
        let path = dir.join("generation_config.json");
        if let Some(text) = read_text(&path)? {
            let value = parse(&text, &path)?;
            add_new(
                &mut config.eos_token_ids,
                Fields::new(&path, &value)?.tokens("eos_token_id")?,
            );
        }
        Ok(config)
    }

    /// Reads the text of a `config.json`; `path` is what errors call it.
    ///
    /// # Errors
    /// `BadModel` naming the field: missing, of a wrong type, out of bounds, or of a kind that is not supported.
    pub fn from_json(text: &str, path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let value = parse(text, path)?;
        let outer = Fields::new(path, &value)?;
        let model_type = model_type(&outer)?;
        let Some(wrapper) = WRAPPERS.iter().find(|w| w.model_type == model_type) else {
            let class = class(&outer, model_type)?;
            return resolve(&outer, &outer, model_type, class, class.tied);
        };
        let fields = outer
            .object("text_config")?
            .ok_or_else(|| outer.error("text_config", "is missing"))?;
        let text_type = fields.text("model_type")?.unwrap_or(wrapper.text);
        resolve(
            &outer,
            &fields,
            model_type,
            class(&fields, text_type)?,
            wrapper.tied,
        )
    }
}

pub(super) fn read_text(path: &Path) -> Result<Option<String>> {
    let file = match std::fs::File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(Error::io(path, error)),
    };
    let mut bytes = Vec::new();
    file.take(FILE_LIMIT + 1)
        .read_to_end(&mut bytes)
        .map_err(|error| Error::io(path, error))?;
    if bytes.len() as u64 > FILE_LIMIT {
        return Err(Error::bad_model(
            path,
            format!("larger than {FILE_LIMIT} bytes, which no configuration is"),
        ));
    }
    String::from_utf8(bytes)
        .map(Some)
        .map_err(|error| Error::bad_model(path, format!("not UTF-8 text: {error}")))
}

pub(super) fn parse(text: &str, path: &Path) -> Result<Value> {
    serde_json::from_str(text)
        .map_err(|error| Error::bad_model(path, format!("not valid JSON: {error}")))
}

fn add_new(ids: &mut Vec<u32>, more: Vec<u32>) {
    for id in more {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
}

fn model_type<'a>(fields: &Fields<'a>) -> Result<&'a str> {
    if let Some(model_type) = fields.text("model_type")? {
        return Ok(model_type);
    }
    let architecture = fields
        .list("architectures")?
        .and_then(|list| list.first()?.as_str())
        .ok_or_else(|| fields.error("model_type", "is missing, and so is architectures"))?;
    let known = CLASSES
        .iter()
        .map(|class| (class.architecture, class.model_type));
    let wrappers = WRAPPERS.iter().map(|w| (w.architecture, w.model_type));
    known
        .chain(wrappers)
        .find(|(name, _)| *name == architecture)
        .map(|(_, model_type)| model_type)
        .ok_or_else(|| unsupported(fields, "architectures", architecture))
}

fn class(fields: &Fields<'_>, model_type: &str) -> Result<&'static Class> {
    CLASSES
        .iter()
        .find(|class| class.model_type == model_type)
        .ok_or_else(|| unsupported(fields, "model_type", model_type))
}

fn unsupported(fields: &Fields<'_>, name: &str, value: &str) -> Error {
    let wrappers = WRAPPERS.iter().map(|w| w.model_type);
    let mut names: Vec<_> = CLASSES
        .iter()
        .map(|class| class.model_type)
        .chain(wrappers)
        .collect();
    names.sort_unstable();
    let value: String = value.chars().take(60).collect();
    fields.error(
        name,
        format_args!(
            "{value:?} is not supported; the supported model types are {}",
            names.join(", ")
        ),
    )
}

/// `fields` hold the text model's fields; `outer` is the whole file, the same object unless there is a wrapper.
fn resolve(
    outer: &Fields<'_>,
    fields: &Fields<'_>,
    model_type: &str,
    class: &Class,
    tied: bool,
) -> Result<ModelConfig> {
    let hidden_size = fields.required("hidden_size", WIDTH)?;
    let num_layers = fields.required("num_hidden_layers", LAYERS)?;
    let num_heads = fields.required("num_attention_heads", HEADS)?;
    let num_kv_heads = match fields.whole("num_key_value_heads", HEADS)? {
        Some(heads) => heads,
        None if fields.is_null("num_key_value_heads") => num_heads,
        None => class.num_kv_heads.unwrap_or(num_heads),
    };
    if num_heads % num_kv_heads != 0 {
        let reason =
            format_args!("is {num_heads}, not a multiple of the {num_kv_heads} key-value heads");
        return Err(fields.error("num_attention_heads", reason));
    }
    let head_dim = match fields.whole("head_dim", HEAD_DIM)? {
        Some(head_dim) => head_dim,
        None if fields.is_null("head_dim") || class.head_dim.is_none() => {
            if hidden_size % num_heads != 0 {
                let reason = format_args!(
                    "is {hidden_size}, not a multiple of the {num_heads} heads, and there is no head_dim"
                );
                return Err(fields.error("hidden_size", reason));
            }
            hidden_size / num_heads
        }
        None => class.head_dim.unwrap_or(hidden_size / num_heads),
    };
    if head_dim % 2 != 0 || !HEAD_DIM.contains(&head_dim) {
        return Err(fields.error(
            "head_dim",
            format_args!(
                "comes out as {head_dim}; it must be an even number up to {}",
                HEAD_DIM.end()
            ),
        ));
    }

    let vocab_size = fields.required("vocab_size", VOCAB)?;
    let output_vocab_size = fields
        .whole("output_vocab_size", 1..=vocab_size)?
        .unwrap_or(vocab_size);
    let max_position_embeddings = fields
        .whole("max_position_embeddings", POSITIONS)?
        .unwrap_or(class.max_position_embeddings);
    let hidden_act = fields.text("hidden_act")?;
    let expected_act = match class.activation {
        Activation::SiluGated => "silu",
        Activation::Xielu => "xielu",
    };
    if hidden_act.is_some_and(|name| name != expected_act) {
        return Err(fields.wrong("hidden_act", format_args!("{expected_act:?}")));
    }
    let attention_bias = match class.attention_bias {
        BiasRule::Never => AttentionBias::None,
        BiasRule::Qkv => AttentionBias::Qkv,
        BiasRule::Field if fields.flag("attention_bias")?.unwrap_or(false) => AttentionBias::Qkvo,
        BiasRule::Field => AttentionBias::None,
    };
    let tie_word_embeddings = match fields.flag("tie_word_embeddings")? {
        Some(tied) => tied,
        None => outer.flag("tie_word_embeddings")?.unwrap_or(tied),
    };
    let mut eos_token_ids = fields.tokens("eos_token_id")?;
    add_new(&mut eos_token_ids, outer.tokens("eos_token_id")?);
    let dtype = [fields, outer]
        .iter()
        .flat_map(|fields| ["dtype", "torch_dtype"].map(|name| fields.text(name)))
        .find_map(Result::transpose)
        .transpose()?;

    Ok(ModelConfig {
        model_type: model_type.to_owned(),
        family: class.family,
        vocab_size,
        output_vocab_size,
        hidden_size,
        intermediate_size: fields.required("intermediate_size", WIDTH)?,
        num_layers,
        num_heads,
        num_kv_heads,
        head_dim,
        rms_norm_eps: fields
            .number("rms_norm_eps", 0.0..=1.0)?
            .unwrap_or(class.rms_norm_eps),
        max_position_embeddings,
        tie_word_embeddings,
        attention_bias,
        mlp_bias: class.mlp_bias && fields.flag("mlp_bias")?.unwrap_or(false),
        qk_norm: class.qk_norm,
        activation: class.activation,
        layers: layers(fields, class, num_layers)?,
        rope: rope(fields, class, max_position_embeddings)?,
        eos_token_ids,
        bos_token_id: fields.token("bos_token_id")?,
        pad_token_id: fields.token("pad_token_id")?,
        dtype: dtype.and_then(Dtype::from_torch),
        quantization: [fields, outer]
            .iter()
            .find_map(|fields| fields.get("quantization_config"))
            .cloned(),
    })
}

/// Window and rotation of each layer.
fn layers(fields: &Fields<'_>, class: &Class, num_layers: usize) -> Result<Vec<LayerConfig>> {
    let rope = match class.window {
        WindowRule::WithoutRope => rotated_layers(fields, num_layers)?,
        _ => vec![true; num_layers],
    };
    let mut window = fields.whole("sliding_window", POSITIONS)?;
    match class.window {
        WindowRule::Nowhere => {}
        WindowRule::Everywhere(default) => {
            if !fields.is_null("sliding_window") {
                window = window.or(default);
            }
        }
        WindowRule::FromLayer | WindowRule::WithoutRope => {
            if !fields.flag("use_sliding_window")?.unwrap_or(false) {
                window = None;
            }
        }
    }
    let slides: Vec<bool> = match fields.list("layer_types")? {
        Some(types) => {
            if types.len() != num_layers {
                let reason = format_args!(
                    "has {} entries; num_hidden_layers is {num_layers}",
                    types.len()
                );
                return Err(fields.error("layer_types", reason));
            }
            let slides = types.iter().map(|layer_type| match layer_type.as_str() {
                Some("full_attention" | "attention") => Ok(false),
                Some("sliding_attention") => Ok(true),
                _ => {
                    let shown: String = layer_type.to_string().chars().take(60).collect();
                    let reason = format_args!(
                        "names {shown}; full_attention and sliding_attention are supported"
                    );
                    Err(fields.error("layer_types", reason))
                }
            });
            slides.collect::<Result<_>>()?
        }
        None => {
            let first = fields
                .whole("max_window_layers", 0..=usize::MAX)?
                .unwrap_or(28);
            let slides = (0..num_layers).map(|layer| match class.window {
                WindowRule::Nowhere => false,
                WindowRule::Everywhere(_) => true,
                WindowRule::FromLayer => layer >= first,
                WindowRule::WithoutRope => !rope[layer],
            });
            // Without a window there is nothing to slide.
            slides.map(|slides| slides && window.is_some()).collect()
        }
    };
    if slides.contains(&true) && window.is_none() {
        return Err(fields.error(
            "layer_types",
            "asks for sliding_attention, but no sliding_window is given or use_sliding_window is off",
        ));
    }
    let layer = |(slides, rope): (bool, bool)| LayerConfig {
        window: window.filter(|_| slides),
        rope,
    };
    Ok(slides.into_iter().zip(rope).map(layer).collect())
}

/// SmolLM3's list of layers with RoPE. Its name, `no_rope_layers`, says the opposite of what its ones mean.
fn rotated_layers(fields: &Fields<'_>, num_layers: usize) -> Result<Vec<bool>> {
    let Some(list) = fields.list("no_rope_layers")? else {
        let interval = fields
            .whole("no_rope_layer_interval", 1..=usize::MAX)?
            .unwrap_or(4);
        return Ok((1..=num_layers)
            .map(|layer| layer % interval != 0)
            .collect());
    };
    if list.len() < num_layers {
        let reason = format_args!(
            "has {} entries; num_hidden_layers is {num_layers}",
            list.len()
        );
        return Err(fields.error("no_rope_layers", reason));
    }
    list[..num_layers]
        .iter()
        .map(|entry| match entry.as_u64() {
            Some(rope @ 0..=1) => Ok(rope == 1),
            _ => Err(fields.error("no_rope_layers", "must hold only 0 and 1")),
        })
        .collect()
}

fn rope(fields: &Fields<'_>, class: &Class, max_positions: usize) -> Result<Rope> {
    let default = (class.rope)();
    let default = Fields::new(fields.file, &default)?;
    // An empty object counts as absent.
    let given = |name| {
        let object = fields.object(name)?;
        Ok::<_, Error>(object.filter(|object| object.names().next().is_some()))
    };
    let spelled = match given("rope_scaling")? {
        Some(rope) => Some(rope),
        None => given("rope_parameters")?
            .map(one_for_all_layers)
            .transpose()?,
    };
    let rope = spelled.as_ref().unwrap_or(&default);

    for fields in [fields, rope] {
        if fields
            .number("partial_rotary_factor", 0.0..=1.0)?
            .unwrap_or(1.0)
            != 1.0
        {
            return Err(fields.wrong(
                "partial_rotary_factor",
                "1: heads that rotate in part are not supported",
            ));
        }
    }
    const THETA: RangeInclusive<f64> = 1.000001..=1e30;
    let theta = match rope.number("rope_theta", THETA)? {
        Some(theta) => theta,
        None => fields.number("rope_theta", THETA)?.unwrap_or(class.theta),
    };
    const FACTOR: RangeInclusive<f64> = 1e-3..=1e6;
    let factor = || {
        rope.number("factor", FACTOR)?
            .ok_or_else(|| rope.error("factor", "is missing"))
    };
    let original_max = || {
        const NAME: &str = "original_max_position_embeddings";
        Ok::<_, Error>(match fields.whole(NAME, POSITIONS)? {
            Some(positions) => positions,
            None => rope.whole(NAME, POSITIONS)?.unwrap_or(max_positions),
        })
    };
    let type_name = match rope.get("rope_type") {
        Some(_) => "rope_type",
        None => "type",
    };
    let kind = match rope.text(type_name)?.unwrap_or("default") {
        "default" => RopeKind::Default,
        "linear" => RopeKind::Linear { factor: factor()? },
        "llama3" => {
            let bound = |name| {
                rope.number(name, FACTOR)?
                    .ok_or_else(|| rope.error(name, "is missing"))
            };
            let low_freq_factor = bound("low_freq_factor")?;
            let high_freq_factor = bound("high_freq_factor")?;
            if high_freq_factor <= low_freq_factor {
                return Err(rope.wrong(
                    "high_freq_factor",
                    format_args!("above low_freq_factor, {low_freq_factor}"),
                ));
            }
            RopeKind::Llama3 {
                factor: factor()?,
                low_freq_factor,
                high_freq_factor,
                original_max: original_max()?,
            }
        }
        "yarn" => {
            let original_max = original_max()?;
            let factor = match rope.number("factor", FACTOR)? {
                Some(factor) => factor,
                None => max_positions as f64 / original_max as f64,
            };
            const MSCALE: RangeInclusive<f64> = 0.0..=1e3;
            let mscale = rope.number("mscale", MSCALE)?.filter(|&m| m != 0.0);
            let mscale_all_dim = rope.number("mscale_all_dim", MSCALE)?.filter(|&m| m != 0.0);
            let attention_factor = match (mscale, mscale_all_dim) {
                (Some(mscale), Some(all_dim)) => {
                    yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
                }
                _ => yarn_mscale(factor, 1.0),
            };
            RopeKind::Yarn {
                factor,
                original_max,
                beta_fast: rope.number("beta_fast", FACTOR)?.unwrap_or(32.0),
                beta_slow: rope.number("beta_slow", FACTOR)?.unwrap_or(1.0),
                truncate: rope.flag("truncate")?.unwrap_or(true),
                attention_factor: rope
                    .number("attention_factor", FACTOR)?
                    .unwrap_or(attention_factor),
            }
        }
        _ => {
            return Err(rope.wrong(
                type_name,
                "a RoPE type that is supported: default, linear, llama3 or yarn",
            ));
        }
    };
    let query_scale = match rope.number("llama_4_scaling_beta", 0.0..=1e3)? {
        Some(beta) => Some(QueryScale {
            beta,
            original_max: rope
                .whole("original_max_position_embeddings", POSITIONS)?
                .unwrap_or(max_positions),
        }),
        None => None,
    };
    Ok(Rope {
        theta,
        kind,
        query_scale,
    })
}

/// Models with several kinds of layers key `rope_parameters` by kind; one entry, or equal ones, can be had.
fn one_for_all_layers(rope: Fields<'_>) -> Result<Fields<'_>> {
    const KINDS: [&str; 2] = ["full_attention", "sliding_attention"];
    let mut found = KINDS.iter().filter(|kind| rope.get(kind).is_some());
    let Some(first) = found.next() else {
        return Ok(rope);
    };
    if found.any(|kind| rope.get(kind) != rope.get(first)) {
        return Err(rope.error(
            "sliding_attention",
            "differs from full_attention; one RoPE for all layers is supported",
        ));
    }
    rope.object(first)?
        .ok_or_else(|| rope.error(first, "is missing"))
}
