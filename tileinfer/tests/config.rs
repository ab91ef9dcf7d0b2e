//! Configurations: every golden model and built-in shape resolves to what is written down here, RoPE frequencies are
//! those of transformers, and bad files give errors that name the field.

use proptest::prelude::*;
use serde_json::{Value, json};
use std::path::PathBuf;
use tileinfer::config::{
    Activation::{self, *},
    AttentionBias::{self, *},
    Family, ModelConfig, RopeKind,
};
use tileinfer::weights::Dtype;
use tileinfer::{Error, ErrorKind};

fn golden(name: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join(format!("../testdata/golden/models/{name}"))
}

fn parse(value: &Value) -> Result<ModelConfig, Error> {
    ModelConfig::from_json(&value.to_string(), "config.json")
}

/// What a golden model must resolve to.
struct Expected {
    name: &'static str,
    family: Family,
    /// Embedding rows, head rows.
    vocab: [usize; 2],
    /// Hidden, intermediate.
    widths: [usize; 2],
    /// Query heads, key-value heads, head dimension.
    heads: [usize; 3],
    eps: f64,
    tied: bool,
    bias: AttentionBias,
    mlp_bias: bool,
    qk_norm: bool,
    activation: Activation,
    theta: f64,
    rope: RopeKind,
    /// (beta, original_max) of the query scale.
    query_scale: Option<(f64, usize)>,
    /// Per layer.
    windows: &'static [Option<usize>],
    /// Per layer.
    rotated: &'static [bool],
    eos: u32,
    dtype: Dtype,
}

fn expectations() -> Vec<Expected> {
    let llama = || Expected {
        name: "",
        family: Family::Llama,
        vocab: [0, 0],
        widths: [64, 128],
        heads: [4, 2, 16],
        eps: 1e-5,
        tied: false,
        bias: None,
        mlp_bias: false,
        qk_norm: false,
        activation: SiluGated,
        theta: 1e4,
        rope: RopeKind::Default,
        query_scale: Option::None,
        windows: &[Option::None; 2],
        rotated: &[true; 2],
        eos: 599,
        dtype: Dtype::Bf16,
    };
    let llama3 = |factor| RopeKind::Llama3 {
        factor,
        low_freq_factor: 1.0,
        high_freq_factor: 4.0,
        original_max: 32,
    };
    let yarn = |factor, original_max, attention_factor| RopeKind::Yarn {
        factor,
        original_max,
        beta_fast: 32.0,
        beta_slow: 1.0,
        truncate: true,
        attention_factor,
    };
    vec![
        Expected {
            name: "apertus",
            family: Family::Apertus,
            vocab: [620, 620],
            widths: [64, 224],
            qk_norm: true,
            activation: Xielu,
            theta: 12e6,
            rope: llama3(8.0),
            windows: &[Option::None; 3],
            rotated: &[true; 3],
            eos: 619,
            ..llama()
        },
        Expected {
            name: "apertus1p5",
            family: Family::Apertus,
            vocab: [720, 620],
            widths: [64, 192],
            qk_norm: true,
            activation: Xielu,
            theta: 4e6,
            rope: llama3(32.0),
            eos: 619,
            ..llama()
        },
        Expected {
            name: "llama-3heads",
            vocab: [653, 653],
            widths: [60, 100],
            heads: [3, 1, 24],
            windows: &[Option::None; 3],
            rotated: &[true; 3],
            eos: 652,
            ..llama()
        },
        Expected {
            name: "llama-bias",
            vocab: [600, 600],
            widths: [64, 100],
            heads: [4, 2, 32],
            eps: 1e-6,
            tied: true,
            bias: Qkvo,
            mlp_bias: true,
            windows: &[Option::None; 3],
            rotated: &[true; 3],
            ..llama()
        },
        Expected {
            name: "llama-both",
            vocab: [576, 576],
            tied: true,
            eos: 575,
            ..llama()
        },
        Expected {
            name: "llama-f16",
            vocab: [512, 512],
            widths: [64, 96],
            heads: [4, 1, 16],
            eos: 511,
            dtype: Dtype::F16,
            ..llama()
        },
        Expected {
            name: "llama-f32",
            vocab: [512, 512],
            widths: [64, 96],
            heads: [4, 4, 16],
            tied: true,
            eos: 511,
            dtype: Dtype::F32,
            ..llama()
        },
        Expected {
            name: "llama-linear",
            vocab: [600, 600],
            rope: RopeKind::Linear { factor: 2.0 },
            ..llama()
        },
        Expected {
            name: "llama-rope3",
            vocab: [640, 640],
            widths: [64, 176],
            heads: [8, 2, 8],
            rope: llama3(8.0),
            windows: &[Option::None; 3],
            rotated: &[true; 3],
            eos: 639,
            ..llama()
        },
        Expected {
            name: "llama-tied",
            vocab: [700, 700],
            widths: [96, 128],
            heads: [6, 6, 16],
            eps: 1e-3,
            tied: true,
            theta: 5e5,
            eos: 699,
            ..llama()
        },
        Expected {
            name: "ministral3",
            family: Family::Mistral,
            vocab: [610, 610],
            heads: [4, 2, 32],
            tied: true,
            theta: 1e6,
            rope: yarn(16.0, 32, 1.0),
            query_scale: Some((0.5, 32)),
            eos: 609,
            ..llama()
        },
        Expected {
            name: "mistral-window",
            family: Family::Mistral,
            vocab: [640, 640],
            widths: [64, 160],
            heads: [4, 2, 24],
            theta: 1e6,
            windows: &[Some(10); 3],
            rotated: &[true; 3],
            eos: 639,
            ..llama()
        },
        Expected {
            name: "mistral3",
            family: Family::Mistral,
            vocab: [610, 610],
            heads: [4, 2, 32],
            theta: 1e6,
            ..llama()
        },
        Expected {
            name: "qwen2",
            family: Family::Qwen2,
            vocab: [680, 680],
            widths: [80, 144],
            heads: [5, 1, 16],
            eps: 1e-6,
            tied: true,
            bias: Qkv,
            theta: 1e6,
            windows: &[Option::None; 3],
            rotated: &[true; 3],
            eos: 659,
            ..llama()
        },
        Expected {
            name: "qwen3",
            family: Family::Qwen3,
            vocab: [652, 652],
            heads: [3, 1, 128],
            eps: 1e-6,
            tied: true,
            qk_norm: true,
            theta: 1e6,
            eos: 639,
            ..llama()
        },
        Expected {
            name: "qwen3-windows",
            family: Family::Qwen3,
            vocab: [600, 600],
            widths: [64, 80],
            heads: [3, 1, 32],
            eps: 1e-6,
            tied: true,
            qk_norm: true,
            theta: 1e6,
            windows: &[Option::None, Option::None, Some(10), Some(10)],
            rotated: &[true; 4],
            ..llama()
        },
        Expected {
            name: "qwen3-yarn",
            family: Family::Qwen3,
            vocab: [600, 600],
            heads: [4, 2, 64],
            eps: 1e-6,
            qk_norm: true,
            theta: 1e6,
            rope: yarn(4.0, 64, 0.1 * 4f64.ln() + 1.0),
            ..llama()
        },
        Expected {
            name: "smollm3",
            family: Family::SmolLm3,
            vocab: [660, 660],
            widths: [64, 96],
            eps: 1e-6,
            tied: true,
            windows: &[Option::None; 5],
            rotated: &[true, false, true, false, false],
            eos: 659,
            ..llama()
        },
    ]
}

#[test]
fn golden_models_resolve() {
    let expected = expectations();
    let mut names: Vec<_> = std::fs::read_dir(golden(""))
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    assert_eq!(
        names,
        expected.iter().map(|e| e.name).collect::<Vec<_>>(),
        "a model without an expectation, or the other way round"
    );
    for e in expected {
        let name = e.name;
        let c = ModelConfig::from_dir(golden(name)).unwrap();
        let model_type = match name {
            "apertus1p5" | "mistral3" | "ministral3" => name,
            _ => name.split('-').next().unwrap(),
        };
        assert_eq!(c.model_type, model_type, "{name}");
        assert_eq!(c.family, e.family, "{name}");
        assert_eq!([c.vocab_size, c.output_vocab_size], e.vocab, "{name}");
        assert_eq!([c.hidden_size, c.intermediate_size], e.widths, "{name}");
        assert_eq!([c.num_heads, c.num_kv_heads, c.head_dim], e.heads, "{name}");
        assert_eq!(c.rms_norm_eps, e.eps, "{name}");
        assert_eq!(c.max_position_embeddings, 512, "{name}");
        assert_eq!(c.tie_word_embeddings, e.tied, "{name}");
        assert_eq!(c.attention_bias, e.bias, "{name}");
        assert_eq!(c.mlp_bias, e.mlp_bias, "{name}");
        assert_eq!(c.qk_norm, e.qk_norm, "{name}");
        assert_eq!(c.activation, e.activation, "{name}");
        assert_eq!(c.rope.theta, e.theta, "{name}");
        assert_eq!(c.rope.kind, e.rope, "{name}");
        let scale = c.rope.query_scale.map(|s| (s.beta, s.original_max));
        assert_eq!(scale, e.query_scale, "{name}");
        assert_eq!(c.num_layers, c.layers.len(), "{name}");
        let windows: Vec<_> = c.layers.iter().map(|layer| layer.window).collect();
        assert_eq!(windows, e.windows, "{name}");
        let rotated: Vec<_> = c.layers.iter().map(|layer| layer.rope).collect();
        assert_eq!(rotated, e.rotated, "{name}");
        assert_eq!(c.eos_token_ids, [e.eos], "{name}");
        assert_eq!(c.bos_token_id, Option::None, "{name}");
        assert_eq!(c.pad_token_id, Some(e.eos - 2), "{name}");
        assert_eq!(c.dtype, Some(e.dtype), "{name}");
        assert_eq!(c.quantization, Option::None, "{name}");
    }
}

#[test]
fn built_in_shapes_have_the_right_sizes() {
    // Parameter counts as the makers' model cards and checkpoints have them (xIELU's numbers included).
    let counts = [
        ("smollm2-135m", 134_515_008),
        ("qwen3-0.6b", 596_049_920),
        ("qwen3-4b", 4_022_468_096),
        ("qwen3-8b", 8_190_735_360),
        ("qwen3-32b", 32_762_123_264),
        ("llama-3.1-8b", 8_030_261_248),
        ("mistral-7b", 7_248_023_552),
        ("apertus-8b", 8_053_338_240),
    ];
    assert_eq!(
        ModelConfig::builtin_names().collect::<Vec<_>>(),
        counts.map(|(name, _)| name)
    );
    for (name, count) in counts {
        let config = ModelConfig::builtin(name).unwrap();
        assert_eq!(config.parameter_count(), count, "{name}");
        assert_eq!(config.weights_bytes(2), 2 * count, "{name}");
    }
    let qwen3 = ModelConfig::builtin("Qwen3-8B").unwrap();
    assert_eq!(qwen3.kv_bytes_per_token(2), 2 * 36 * 8 * 128 * 2);
    assert_eq!(ModelConfig::builtin("gpt-2"), Option::None);
}

/// `inv_freq` at some indices, as transformers computes it in f32.
fn check_inv_freq(config: &ModelConfig, expected: &[(usize, f64)]) {
    let inv_freq = config.rope.inv_freq(config.head_dim);
    assert_eq!(inv_freq.len(), config.head_dim / 2);
    for &(index, expected) in expected {
        let found = f64::from(inv_freq[index]);
        assert!(
            (found / expected - 1.0).abs() < 1e-6,
            "index {index}: {found}, expected {expected}"
        );
    }
}

/// Indices at which the 128-wide goldens are given.
const AT: [usize; 10] = [0, 1, 20, 28, 29, 30, 34, 36, 40, 63];

fn at_128(values: [f64; 10]) -> Vec<(usize, f64)> {
    AT.into_iter().zip(values).collect()
}

#[test]
fn llama3_frequencies() {
    let llama = ModelConfig::builtin("llama-3.1-8b").unwrap();
    check_inv_freq(
        &llama,
        &at_128([
            1.0,
            0.814617217,
            0.0165604409,
            0.00321144611,
            0.00216657063,
            0.00137189368,
            0.000178507791,
            7.78465546e-05,
            3.42810235e-05,
            3.06892588e-07,
        ]),
    );
    assert_eq!(llama.rope.attention_factor(), 1.0);

    let apertus = ModelConfig::builtin("apertus-8b").unwrap();
    check_inv_freq(
        &apertus,
        &at_128([
            1.0,
            0.775153697,
            0.00613417104,
            0.000109853667,
            7.74740111e-05,
            6.00542553e-05,
            2.16817807e-05,
            1.30277858e-05,
            4.70350642e-06,
            1.34381954e-08,
        ]),
    );

    let small = json!({"model_type": "llama", "hidden_size": 2048, "num_hidden_layers": 16, "num_attention_heads": 32,
        "num_key_value_heads": 8, "intermediate_size": 8192, "vocab_size": 128256, "rope_theta": 500000.0,
        "rope_scaling": {"rope_type": "llama3", "factor": 32.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192}});
    check_inv_freq(
        &parse(&small).unwrap(),
        &[
            (0, 1.0),
            (1, 0.66360122),
            (10, 0.0165604409),
            (14, 0.00321144611),
            (15, 0.00129054801),
            (16, 0.000429556705),
            (17, 9.70828623e-05),
            (18, 1.94616387e-05),
            (31, 9.4183072e-08),
        ],
    );

    let apertus1p5 = json!({"model_type": "apertus1p5", "text_config": {"hidden_size": 4096, "num_hidden_layers": 32,
        "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 21504, "vocab_size": 266752,
        "output_vocab_size": 131072, "rope_parameters": {"rope_type": "llama3", "rope_theta": 4e6, "factor": 32.0,
            "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}}});
    check_inv_freq(
        &parse(&apertus1p5).unwrap(),
        &at_128([
            1.0,
            0.788574636,
            0.00864681695,
            0.00032675374,
            0.000140315809,
            3.76728931e-05,
            9.71640657e-06,
            6.04214711e-06,
            2.33648257e-06,
            9.90711513e-09,
        ]),
    );
}

fn qwen3() -> Value {
    json!({"model_type": "qwen3", "hidden_size": 4096, "num_hidden_layers": 36, "num_attention_heads": 32,
        "num_key_value_heads": 8, "head_dim": 128, "intermediate_size": 12288, "vocab_size": 151936,
        "max_position_embeddings": 131072, "rope_theta": 1e6})
}

#[test]
fn yarn_frequencies_and_attention_factor() {
    let mut value = qwen3();
    value["rope_scaling"] =
        json!({"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32768});
    let config = parse(&value).unwrap();
    let golden = at_128([
        1.0,
        0.805842221,
        0.0133352149,
        0.00184827659,
        0.00140511245,
        0.00106436107,
        0.000334240554,
        0.000179841183,
        4.44569851e-05,
        3.10234441e-07,
    ]);
    check_inv_freq(&config, &golden);
    assert!((config.rope.attention_factor() - 1.138_629_4).abs() < 2e-7);

    // No factor: the ratio of the contexts, here 4 too.
    value["rope_scaling"]["factor"] = Value::Null;
    assert_eq!(parse(&value).unwrap().rope, config.rope);

    let factor = |fields: Value| {
        let mut value = qwen3();
        value["rope_scaling"] = fields;
        parse(&value).unwrap().rope.attention_factor()
    };
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "mscale": 1.0, "mscale_all_dim": 0.5});
    let ratio = (0.1 * 4f64.ln() + 1.0) / (0.05 * 4f64.ln() + 1.0);
    assert_eq!(factor(yarn), ratio as f32);
    let yarn = json!({"rope_type": "yarn", "factor": 4.0, "attention_factor": 1.5});
    assert_eq!(factor(yarn), 1.5);
    let yarn = json!({"rope_type": "yarn", "factor": 0.5});
    assert_eq!(factor(yarn), 1.0);
}

#[test]
fn yarn_without_truncation_keeps_the_ramp_where_the_formula_puts_it() {
    let mut value = qwen3();
    value["rope_scaling"] = json!({"rope_type": "yarn", "factor": 4.0, "truncate": false,
        "original_max_position_embeddings": 32768});
    let config = parse(&value).unwrap();
    // The same in f64, straight from the formula.
    let index =
        |r: f64| 128.0 * (32768.0 / (r * 2.0 * std::f64::consts::PI)).ln() / (2.0 * 1e6f64.ln());
    let (low, high) = (index(32.0), index(1.0));
    let expected: Vec<_> = (0..64)
        .map(|j| {
            let plain = 1e6f64.powf(-2.0 * j as f64 / 128.0);
            let ramp = ((j as f64 - low) / (high - low)).clamp(0.0, 1.0);
            (j, plain / 4.0 * ramp + plain * (1.0 - ramp))
        })
        .collect();
    check_inv_freq(&config, &expected);
}

#[test]
fn default_and_linear_frequencies() {
    let plain = parse(&qwen3()).unwrap();
    let expected: Vec<_> = (0..64)
        .map(|j| (j, 1e6f64.powf(-(j as f64) / 64.0)))
        .collect();
    check_inv_freq(&plain, &expected);
    let linear = ModelConfig::from_dir(golden("llama-linear")).unwrap();
    let expected: Vec<_> = (0..8)
        .map(|j| (j, 1e4f64.powf(-(j as f64) / 8.0) / 2.0))
        .collect();
    check_inv_freq(&linear, &expected);
}

#[test]
fn query_scale_grows_with_whole_contexts() {
    let config = ModelConfig::from_dir(golden("ministral3")).unwrap();
    let scale = config.rope.query_scale.unwrap();
    for position in [0, 1, 31] {
        assert_eq!(scale.at(position), 1.0);
    }
    for position in [32, 63] {
        assert_eq!(scale.at(position), (1.0 + 0.5 * 2f64.ln()) as f32);
    }
    assert_eq!(scale.at(259), (1.0 + 0.5 * 9f64.ln()) as f32);
}

/// The least that a file must say.
fn least(model_type: &str) -> Value {
    json!({"model_type": model_type, "hidden_size": 256, "num_hidden_layers": 8, "num_attention_heads": 32,
        "intermediate_size": 512, "vocab_size": 1000})
}

/// `least` with one field changed.
fn with(model_type: &str, field: &str, value: Value) -> Value {
    let mut config = least(model_type);
    config[field] = value;
    config
}

#[test]
fn class_defaults() {
    let c = |model_type| parse(&least(model_type)).unwrap();
    let facts = |c: ModelConfig| {
        (
            (c.num_kv_heads, c.head_dim),
            (c.rope.theta, c.rms_norm_eps),
            c.layers[0].window,
            c.tie_word_embeddings,
            c.attention_bias,
            c.qk_norm,
        )
    };
    assert_eq!(
        facts(c("llama")),
        ((32, 8), (1e4, 1e-6), Option::None, false, None, false)
    );
    assert_eq!(
        facts(c("mistral")),
        ((8, 8), (1e4, 1e-6), Some(4096), false, None, false)
    );
    assert_eq!(
        facts(c("ministral3")),
        ((8, 128), (1e6, 1e-5), Option::None, false, None, false)
    );
    assert_eq!(
        facts(c("qwen2")),
        ((32, 8), (1e4, 1e-6), Option::None, false, Qkv, false)
    );
    assert_eq!(
        facts(c("qwen3")),
        ((32, 128), (1e4, 1e-6), Option::None, false, None, true)
    );
    assert_eq!(
        facts(c("smollm3")),
        ((4, 8), (2e6, 1e-6), Option::None, true, None, false)
    );
    assert_eq!(
        facts(c("apertus")),
        ((32, 8), (12e6, 1e-5), Option::None, false, None, true)
    );
    assert_eq!(facts(c("apertus1p5_text")), facts(c("apertus")));
    // NoPE in every fourth layer.
    let rotated: Vec<_> = c("smollm3").layers.iter().map(|layer| layer.rope).collect();
    assert_eq!(rotated, [true, true, true, false, true, true, true, false]);
    // Apertus and Ministral 3 stretch without being told.
    let kind = c("apertus").rope.kind;
    assert!(
        matches!(
            kind,
            RopeKind::Llama3 {
                factor: 8.0,
                original_max: 8192,
                ..
            }
        ),
        "{kind:?}"
    );
    let ministral3 = c("ministral3").rope;
    let kind = ministral3.kind;
    assert!(
        matches!(
            kind,
            RopeKind::Yarn {
                factor: 16.0,
                original_max: 16384,
                attention_factor: 1.0,
                ..
            }
        ),
        "{kind:?}"
    );
    assert_eq!(ministral3.query_scale.unwrap().beta, 0.1);
}

#[test]
fn wrappers_have_a_say_where_the_text_is_silent() {
    let tied = |outer: Value, text: Value| {
        let mut config = json!({"model_type": "mistral3", "text_config": least("mistral")});
        config["tie_word_embeddings"] = outer;
        config["text_config"]["tie_word_embeddings"] = text;
        config["eos_token_id"] = json!(2);
        config["text_config"]["eos_token_id"] = json!([3, 4]);
        let config = parse(&config).unwrap();
        assert_eq!(config.eos_token_ids, [3, 4, 2]);
        config.tie_word_embeddings
    };
    assert!(tied(Value::Null, Value::Null));
    assert!(!tied(json!(false), Value::Null));
    assert!(!tied(json!(true), json!(false)));
    // Without model_type in text_config it is Mistral's, or Apertus 1.5's.
    for (wrapper, family) in [
        ("mistral3", Family::Mistral),
        ("apertus1p5", Family::Apertus),
    ] {
        let mut text = least("");
        text.as_object_mut().unwrap().remove("model_type");
        let config = parse(&json!({"model_type": wrapper, "text_config": text})).unwrap();
        assert_eq!(
            (config.family, config.model_type.as_str()),
            (family, wrapper)
        );
    }
}

#[test]
fn null_is_not_always_absent() {
    let of = |value| parse(&value).unwrap();
    assert_eq!(
        of(with("mistral", "sliding_window", Value::Null)).layers[0].window,
        Option::None
    );
    assert_eq!(
        of(with("mistral", "num_key_value_heads", Value::Null)).num_kv_heads,
        32
    );
    assert_eq!(of(with("qwen3", "head_dim", Value::Null)).head_dim, 8);
    assert_eq!(
        of(with("llama", "bos_token_id", json!(-1))).bos_token_id,
        Option::None
    );
    assert_eq!(
        of(with("llama", "eos_token_id", json!([7, 9, 7]))).eos_token_ids,
        [7, 9, 7]
    );
    assert_eq!(
        of(with("apertus", "output_vocab_size", Value::Null)).output_vocab_size,
        1000
    );
}

#[test]
fn biases() {
    for (model_type, expected) in [
        ("llama", Qkvo),
        ("apertus", Qkvo),
        ("smollm3", Qkvo),
        ("qwen3", Qkvo),
        ("qwen2", Qkv),
        ("mistral", None),
    ] {
        let config = parse(&with(model_type, "attention_bias", json!(true))).unwrap();
        assert_eq!(config.attention_bias, expected, "{model_type}");
        let config = parse(&with(model_type, "mlp_bias", json!(true))).unwrap();
        assert_eq!(
            config.mlp_bias,
            ["llama", "apertus", "smollm3"].contains(&model_type),
            "{model_type}"
        );
    }
}

#[test]
fn windows() {
    let windows = |config: &Value| -> Vec<Option<usize>> {
        let config = parse(config).unwrap();
        config.layers.iter().map(|layer| layer.window).collect()
    };
    let w = Some(16);
    let n = Option::None;
    let mut qwen = with("qwen3", "sliding_window", json!(16));
    qwen["max_window_layers"] = json!(6);
    assert_eq!(windows(&qwen), [n; 8]);
    qwen["use_sliding_window"] = json!(true);
    assert_eq!(windows(&qwen), [n, n, n, n, n, n, w, w]);
    // An explicit list wins.
    let types: Vec<_> = (0..8)
        .map(|i| ["sliding_attention", "full_attention"][i % 2])
        .collect();
    qwen["layer_types"] = json!(types);
    assert_eq!(windows(&qwen), [w, n, w, n, w, n, w, n]);
    // The default for max_window_layers is more than these eight layers.
    let mut qwen = with("qwen2", "sliding_window", json!(16));
    qwen["use_sliding_window"] = json!(true);
    assert_eq!(windows(&qwen), [n; 8]);
    // SmolLM3's windows are in the layers that do not rotate.
    let mut smol = with("smollm3", "sliding_window", json!(16));
    assert_eq!(windows(&smol), [n; 8]);
    smol["use_sliding_window"] = json!(true);
    assert_eq!(windows(&smol), [n, n, n, w, n, n, n, w]);
    // Llama has no window, whatever its file says.
    assert_eq!(windows(&with("llama", "sliding_window", json!(16))), [n; 8]);
}

#[test]
fn both_spellings_of_rope() {
    let rope = |fields: &[(&str, Value)]| {
        let mut config = least("llama");
        for (name, value) in fields {
            config[*name] = value.clone();
        }
        parse(&config).unwrap().rope
    };
    let old = rope(&[
        ("rope_theta", json!(7e5)),
        ("rope_scaling", json!({"type": "linear", "factor": 3})),
    ]);
    let new = rope(&[(
        "rope_parameters",
        json!({"rope_type": "linear", "factor": 3.0, "rope_theta": 7e5}),
    )]);
    assert_eq!(old, new);
    assert_eq!(
        (old.theta, old.kind),
        (7e5, RopeKind::Linear { factor: 3.0 })
    );
    // The old spelling wins, an empty one does not.
    let both = |scaling| {
        rope(&[
            ("rope_scaling", scaling),
            (
                "rope_parameters",
                json!({"rope_type": "linear", "factor": 2.0}),
            ),
        ])
        .kind
    };
    assert_eq!(both(json!({"type": "default"})), RopeKind::Default);
    assert_eq!(both(json!({})), RopeKind::Linear { factor: 2.0 });
    assert_eq!(both(Value::Null), RopeKind::Linear { factor: 2.0 });
    // Keyed by the kind of layer.
    let keyed =
        json!({"full_attention": {"rope_type": "linear", "factor": 3.0, "rope_theta": 7e5}});
    assert_eq!(rope(&[("rope_parameters", keyed)]), new);
    // The original context: top level, then inside, then max_position_embeddings.
    let original = |top: Value, inside: Value| {
        let yarn =
            json!({"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": inside});
        match rope(&[
            ("original_max_position_embeddings", top),
            ("rope_scaling", yarn),
        ])
        .kind
        {
            RopeKind::Yarn { original_max, .. } => original_max,
            other => panic!("{other:?}"),
        }
    };
    assert_eq!(original(json!(100), json!(200)), 100);
    assert_eq!(original(Value::Null, json!(200)), 200);
    assert_eq!(original(Value::Null, Value::Null), 2048);
}

#[test]
fn end_tokens_of_both_files_are_joined() {
    let dir = tempfile::tempdir().unwrap();
    let config = with("apertus", "eos_token_id", json!(68));
    std::fs::write(dir.path().join("config.json"), config.to_string()).unwrap();
    assert_eq!(
        ModelConfig::from_dir(dir.path()).unwrap().eos_token_ids,
        [68]
    );
    let generation = json!({"eos_token_id": [2, 68, 72]}).to_string();
    std::fs::write(dir.path().join("generation_config.json"), generation).unwrap();
    assert_eq!(
        ModelConfig::from_dir(dir.path()).unwrap().eos_token_ids,
        [68, 2, 72]
    );
}

#[test]
fn architectures_stand_in_for_a_missing_model_type() {
    let mut config = with("", "architectures", json!(["Qwen3ForCausalLM"]));
    config.as_object_mut().unwrap().remove("model_type");
    assert_eq!(parse(&config).unwrap().family, Family::Qwen3);
    config["architectures"] = json!(["GPT2LMHeadModel"]);
    assert!(
        parse(&config)
            .unwrap_err()
            .to_string()
            .contains("GPT2LMHeadModel")
    );
}

/// Model type, field and its JSON value => beginning of the message.
const BAD_FIELDS: &str = r#"
gpt2 x 1 => model_type "gpt2" is not supported; the supported model types are apertus, apertus1p5, apertus1p5_text, llama, ministral3, mistral, mistral3, qwen2, qwen3, smollm3
llama model_type 3 => model_type is 3; it must be a string
llama hidden_size "64" => hidden_size is "64"; it must be a whole number from 1 to 1048576
llama hidden_size -64 => hidden_size is -64;
llama hidden_size 64.5 => hidden_size is 64.5;
llama hidden_size null => hidden_size is missing
llama hidden_size 100 => hidden_size is 100, not a multiple of the 32 heads
llama vocab_size 1099511627776 => vocab_size is 1099511627776;
llama intermediate_size 0 => intermediate_size is 0;
llama num_hidden_layers 1000000000 => num_hidden_layers is 1000000000;
llama num_attention_heads 0 => num_attention_heads is 0;
llama num_key_value_heads 0 => num_key_value_heads is 0;
llama num_key_value_heads 5 => num_attention_heads is 32, not a multiple of the 5 key-value heads
llama head_dim 7 => head_dim comes out as 7; it must be an even number
llama rms_norm_eps -1.0 => rms_norm_eps is -1.0;
llama rms_norm_eps "small" => rms_norm_eps is "small";
llama hidden_act "gelu" => hidden_act is "gelu"; it must be "silu"
apertus hidden_act "silu" => hidden_act is "silu"; it must be "xielu"
llama tie_word_embeddings "yes" => tie_word_embeddings is "yes"; it must be true or false
llama attention_bias 1 => attention_bias is 1;
llama eos_token_id "</s>" => eos_token_id is "</s>"; it must be a token id
llama eos_token_id [1,-7] => eos_token_id is [1,-7];
llama dtype 16 => dtype is 16;
apertus output_vocab_size 1001 => output_vocab_size is 1001; it must be a whole number from 1 to 1000
mistral sliding_window 0 => sliding_window is 0;
qwen3 layer_types ["full_attention"] => layer_types has 1 entries; num_hidden_layers is 8
qwen3 layer_types [1,1,1,1,1,1,1,1] => layer_types names 1; full_attention and sliding_attention are supported
qwen3 layer_types ["chunked","","","","","","",""] => layer_types names "chunked";
qwen3 layer_types ["sliding_attention","attention","attention","attention","attention","attention","attention","attention"] => layer_types asks for sliding_attention, but no sliding_window
qwen3 layer_types "full_attention" => layer_types is "full_attention"; it must be a list
smollm3 no_rope_layers [1,1] => no_rope_layers has 2 entries
smollm3 no_rope_layers [2,1,1,1,1,1,1,1] => no_rope_layers must hold only 0 and 1
smollm3 no_rope_layer_interval 0 => no_rope_layer_interval is 0;
llama rope_scaling "linear" => rope_scaling is "linear"; it must be an object
llama rope_scaling {"type": "dynamic", "factor": 2.0} => rope_scaling.type is "dynamic"; it must be a RoPE type that is supported
llama rope_parameters {"rope_type": "longrope"} => rope_parameters.rope_type is "longrope";
llama rope_scaling {"type": "linear"} => rope_scaling.factor is missing
llama rope_scaling {"type": "linear", "factor": -2.0} => rope_scaling.factor is -2.0;
llama rope_theta 0 => rope_theta is 0;
llama partial_rotary_factor 0.5 => partial_rotary_factor is 0.5;
llama rope_scaling {"type": "llama3", "factor": 8, "high_freq_factor": 4} => rope_scaling.low_freq_factor is missing
llama rope_scaling {"type": "llama3", "factor": 8, "low_freq_factor": 1, "high_freq_factor": 1} => rope_scaling.high_freq_factor is 1; it must be above low_freq_factor, 1
llama rope_scaling {"type": "yarn", "factor": 8, "original_max_position_embeddings": -1} => rope_scaling.original_max_position_embeddings is -1;
llama rope_parameters {"full_attention": {"rope_theta": 1e4}, "sliding_attention": {"rope_theta": 1e5}} => rope_parameters.sliding_attention differs from full_attention
mistral3 text_config null => text_config is missing
mistral3 text_config {"model_type": "mamba"} => text_config.model_type "mamba" is not supported
mistral3 text_config {"hidden_size": 0} => text_config.hidden_size is 0;
"#;

#[test]
fn bad_fields_are_named() {
    for line in BAD_FIELDS.trim().lines() {
        let (config, expected) = line.split_once(" => ").unwrap();
        let mut words = config.splitn(3, ' ');
        let [model_type, field, value] = [(); 3].map(|()| words.next().unwrap());
        let value = serde_json::from_str(value).unwrap();
        let error = parse(&with(model_type, field, value)).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadModel);
        let (message, expected) = (error.to_string(), format!("config.json: {expected}"));
        assert!(
            message.starts_with(&expected),
            "{message}\nshould begin\n{expected}"
        );
    }
}

#[test]
fn unreadable_files() {
    for (text, expected) in [
        ("", "not valid JSON"),
        ("[]", "not a JSON object"),
        ("{\"a\": 1e999}", "not valid JSON"),
        ("{}", "model_type is missing"),
    ] {
        let error = ModelConfig::from_json(text, "config.json").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadModel);
        assert!(error.to_string().contains(expected), "{error}");
    }
    let deep = "[".repeat(100_000);
    assert!(ModelConfig::from_json(&deep, "config.json").is_err());
    let empty = tempfile::tempdir().unwrap();
    let error = ModelConfig::from_dir(empty.path()).unwrap_err();
    assert!(
        error.to_string().contains("there is no config.json"),
        "{error}"
    );
    std::fs::write(empty.path().join("config.json"), least("llama").to_string()).unwrap();
    std::fs::write(empty.path().join("generation_config.json"), "{").unwrap();
    let error = ModelConfig::from_dir(empty.path()).unwrap_err();
    assert!(
        error.to_string().contains("generation_config.json"),
        "{error}"
    );
}

#[test]
fn quantization_is_kept_as_it_stands() {
    let quantization = json!({"quant_method": "fp8", "bits": 8});
    let config = parse(&with("llama", "quantization_config", quantization.clone())).unwrap();
    assert_eq!(config.quantization, Some(quantization));
}

#[test]
fn a_resolved_configuration_can_be_shown() {
    let config = ModelConfig::from_dir(golden("ministral3")).unwrap();
    let shown = serde_json::to_value(&config).unwrap();
    assert_eq!(shown["family"], "mistral");
    assert_eq!(shown["rope"]["kind"]["rope_type"], "yarn");
    assert_eq!(shown["layers"][1], json!({"window": null, "rope": true}));
    assert_eq!(shown["activation"], "silu_gated");
}

/// Values that do not belong, for any field.
fn wild_value() -> impl Strategy<Value = Value> {
    prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<u64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        (-3i64..300).prop_map(Value::from),
        ".{0,12}".prop_map(Value::from),
        prop::collection::vec(-2i64..5, 0..6).prop_map(Value::from),
        prop::sample::select(vec![
            "yarn",
            "llama3",
            "linear",
            "sliding_attention",
            "xielu"
        ])
        .prop_map(Value::from),
        Just(json!({})),
        Just(json!({"rope_type": "yarn", "factor": 1e-3, "rope_theta": 2})),
    ]
}

/// Every field of an object and of those inside, by path.
fn paths(value: &Value, at: &str, found: &mut Vec<String>) {
    for (name, value) in value.as_object().into_iter().flatten() {
        let path = format!("{at}/{name}");
        paths(value, &path, found);
        found.push(path);
    }
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: Option::None, ..ProptestConfig::with_cases(600) })]

    /// A configuration with some fields replaced is refused as a bad model, or gives one that can be computed with.
    #[test]
    fn mutated_configurations_do_no_harm(
        model in 0usize..18,
        changes in prop::collection::vec((any::<prop::sample::Index>(), wild_value()), 1..4),
    ) {
        let name = expectations()[model].name;
        let text = std::fs::read_to_string(golden(name).join("config.json")).unwrap();
        let mut value: Value = serde_json::from_str(&text).unwrap();
        let mut all = Vec::new();
        paths(&value, "", &mut all);
        for (index, change) in changes {
            if let Some(field) = value.pointer_mut(&all[index.index(all.len())]) {
                *field = change;
            }
        }
        match parse(&value) {
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::BadModel),
            Ok(config) => {
                prop_assert!(config.num_heads % config.num_kv_heads == 0);
                prop_assert_eq!(config.layers.len(), config.num_layers);
                prop_assert!(config.layers.iter().all(|layer| layer.window != Some(0)));
                let inv_freq = config.rope.inv_freq(config.head_dim);
                prop_assert_eq!(inv_freq.len() * 2, config.head_dim);
                prop_assert!(inv_freq.iter().all(|f| f.is_finite() && *f >= 0.0), "{:?}", inv_freq);
                prop_assert!(config.rope.attention_factor().is_finite());
                prop_assert!(config.weights_bytes(4) > 0 && config.kv_bytes_per_token(4) > 0);
            }
        }
    }

    /// Text with some bytes replaced or cut off never does anything but parse or be refused.
    #[test]
    fn mutated_texts_do_no_harm(
        model in 0usize..18,
        changes in prop::collection::vec((any::<prop::sample::Index>(), 32u8..127), 0..4),
        keep in any::<prop::sample::Index>(),
        cut in any::<bool>(),
    ) {
        let name = expectations()[model].name;
        let mut text = std::fs::read(golden(name).join("config.json")).unwrap();
        for (index, byte) in changes {
            *index.get_mut(&mut text) = byte;
        }
        if cut {
            text.truncate(keep.index(text.len()));
        }
        let text = String::from_utf8(text).unwrap();
        if let Err(error) = ModelConfig::from_json(&text, "config.json") {
            prop_assert_eq!(error.kind(), ErrorKind::BadModel);
        }
    }
}
