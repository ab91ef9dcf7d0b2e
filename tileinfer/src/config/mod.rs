//! What a model is made of: its `config.json` and `generation_config.json`, read, checked and resolved to plain numbers.
//!
//! Both spellings that the transformers library has used are understood (up to 4.x: `rope_theta`, `rope_scaling`,
//! `torch_dtype`; from 5.0: `rope_parameters`, `dtype`), and a field that a file leaves out gets the default of that
//! model's configuration class there. This module decided not to know tensor names, files of weights, or how anything
//! is computed; the one formula here is RoPE's frequencies, because they follow from the configuration alone.

mod builtin;
mod dflash;
mod fields;
mod read;
mod rope;

use crate::weights::Dtype;
use serde::Serialize;

pub use dflash::DFlashConfig;
pub use rope::{QueryScale, Rope, RopeKind};

/// The resolved hyperparameters of a language model (the text half, if the model also sees or hears).
#[derive(Debug, Clone, PartialEq, Serialize)]
#[non_exhaustive]
pub struct ModelConfig {
    /// `model_type` as the file says it, of the wrapper if there is one (`mistral3`, `apertus1p5`).
    pub model_type: String,
    /// Which tensor names and which layer the model has.
    pub family: Family,
    /// Rows of the embedding. The tokenizer may know fewer ids.
    pub vocab_size: usize,
    /// Rows of the head, so the width of the logits. Usually `vocab_size`; never more.
    pub output_vocab_size: usize,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Width of the MLP's inside.
    pub intermediate_size: usize,
    /// Number of layers, the length of `layers`.
    pub num_layers: usize,
    /// Query heads.
    pub num_heads: usize,
    /// Key-value heads; divides `num_heads`.
    pub num_kv_heads: usize,
    /// Width of a head, even. `num_heads * head_dim` need not be `hidden_size`.
    pub head_dim: usize,
    /// Added to the mean square in every RMS norm.
    pub rms_norm_eps: f64,
    /// Positions that the model was made for.
    pub max_position_embeddings: usize,
    /// Whether the head is the embedding. A head in the file is used whatever this says.
    pub tie_word_embeddings: bool,
    /// Which projections of the attention have biases.
    pub attention_bias: AttentionBias,
    /// Whether the projections of the MLP have biases.
    pub mlp_bias: bool,
    /// Whether queries and keys go through an RMS norm per head before RoPE.
    pub qk_norm: bool,
    /// What stands between the MLP's projections.
    pub activation: Activation,
    /// Rotary position embedding.
    pub rope: Rope,
    /// What differs from layer to layer.
    pub layers: Vec<LayerConfig>,
    /// Tokens that end a text: those of `config.json`, then those that only `generation_config.json` names.
    pub eos_token_ids: Vec<u32>,
    /// Token that begins a text, if the file names one.
    pub bos_token_id: Option<u32>,
    /// Padding token, if the file names one.
    pub pad_token_id: Option<u32>,
    /// Element type that the file announces. For loading, the weights' own type counts.
    pub dtype: Option<Dtype>,
    /// `quantization_config` as it stands in the file, if the weights are quantized.
    pub quantization: Option<serde_json::Value>,
}

/// Models with the same tensor names and the same layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Family {
    /// Llama and SmolLM2.
    Llama,
    /// Mistral, Ministral, and the text half of Mistral3.
    Mistral,
    /// Qwen2 and Qwen2.5.
    Qwen2,
    /// Qwen3, dense.
    Qwen3,
    /// SmolLM3.
    SmolLm3,
    /// Apertus, and the text half of Apertus 1.5.
    Apertus,
}

/// Which projections of the attention have biases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum AttentionBias {
    /// None has.
    None,
    /// Queries, keys and values (Qwen2).
    Qkv,
    /// Queries, keys, values and the output.
    Qkvo,
}

/// What stands between the MLP's projections.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
pub enum Activation {
    /// `silu(gate(x)) * up(x)`.
    SiluGated,
    /// `xielu(up(x))`, with learned parameters per layer and no gate.
    Xielu,
}

/// What differs from layer to layer.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct LayerConfig {
    /// Sliding window: a token sees itself and the `window - 1` before it. `None`: all before it.
    pub window: Option<usize>,
    /// Whether queries and keys are rotated.
    pub rope: bool,
}

impl ModelConfig {
    /// Width of all query heads together, the columns of the output projection.
    pub fn q_width(&self) -> usize {
        self.num_heads * self.head_dim
    }

    /// Width of all key heads together; that of all value heads is the same.
    pub fn kv_width(&self) -> usize {
        self.num_kv_heads * self.head_dim
    }

    /// How many numbers the model's tensors hold, counted from the configuration alone (xIELU's as four per layer).
    pub fn parameter_count(&self) -> u64 {
        let [h, i, q, kv] = [
            self.hidden_size,
            self.intermediate_size,
            self.q_width(),
            self.kv_width(),
        ]
        .map(|n| n as u64);
        let (inputs, scalars) = match self.activation {
            Activation::SiluGated => (2, 0),
            Activation::Xielu => (1, 4),
        };
        let attention_bias = match self.attention_bias {
            AttentionBias::None => 0,
            AttentionBias::Qkv => q + 2 * kv,
            AttentionBias::Qkvo => q + 2 * kv + h,
        };
        let mlp_bias = if self.mlp_bias { inputs * i + h } else { 0 };
        let qk_norm = if self.qk_norm {
            2 * self.head_dim as u64
        } else {
            0
        };
        let attention = h * (q + 2 * kv) + q * h + attention_bias + qk_norm;
        let mlp = (inputs + 1) * h * i + mlp_bias + scalars;
        let tables = self.vocab_size as u64
            + if self.tie_word_embeddings {
                0
            } else {
                self.output_vocab_size as u64
            };
        tables * h + h + self.num_layers as u64 * (attention + mlp + 2 * h)
    }

    /// Bytes of all weights at `bytes_per_element` (2 for bf16, 4 for f32).
    pub fn weights_bytes(&self, bytes_per_element: usize) -> u64 {
        self.parameter_count() * bytes_per_element as u64
    }

    /// Bytes that one token takes in the KV cache, all layers, keys and values, at `bytes_per_element`.
    pub fn kv_bytes_per_token(&self, bytes_per_element: usize) -> u64 {
        2 * self.num_layers as u64 * self.kv_width() as u64 * bytes_per_element as u64
    }
}
