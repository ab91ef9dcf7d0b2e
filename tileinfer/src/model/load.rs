//! From checkpoint to device: the decoder's weights, layer by layer.

use crate::backend::{Activation, AttentionShape, Backend, ComputeType, Mask, RopeTable};
use crate::config::{Activation as ConfigActivation, ModelConfig};
use crate::weights::{HostModel, Weight};
use crate::{Error, Result};

/// A linear map on a device.
pub struct Linear<B: Backend> {
    /// `[out, in]`.
    pub weight: B::Weight,
    /// `[1, out]`, if there is one.
    pub bias: Option<B::Tensor>,
}

/// One layer on a device.
pub struct Layer<B: Backend> {
    /// Weight of the norm before attention.
    pub attention_norm: B::Tensor,
    /// Queries, keys and values in one: `[(heads + 2 kv_heads) * head_dim, hidden]`.
    pub qkv: Linear<B>,
    /// Norm of each query head (Qwen3, Apertus), `[1, head_dim]`.
    pub query_norm: Option<B::Tensor>,
    /// Norm of each key head, likewise.
    pub key_norm: Option<B::Tensor>,
    /// Whether queries and keys are rotated (SmolLM3 leaves it out in some layers).
    pub rotates: bool,
    /// Heads, scale and window.
    pub attention: AttentionShape,
    /// From heads back to the stream.
    pub output: Linear<B>,
    /// Weight of the norm before the MLP.
    pub mlp_norm: B::Tensor,
    /// Gate over up, or up alone: `[wide, hidden]`.
    pub up: Linear<B>,
    /// Rows of `up`.
    pub wide: usize,
    /// What happens between `up` and `down`.
    pub activation: Activation,
    /// Back to the stream: `[hidden, intermediate]`.
    pub down: Linear<B>,
}

/// A decoder-only language model on a device. Run it with [`super::forward`], or through a runner.
pub struct DecoderLM<B: Backend> {
    /// `[vocabulary, hidden]`.
    pub embedding: B::Weight,
    /// `[head rows, hidden]`; the embedding where the two are tied.
    pub head: B::Weight,
    /// Weight of the norm before the head.
    pub final_norm: B::Tensor,
    /// The layers.
    pub layers: Vec<Layer<B>>,
    /// Rotations for `max_length` positions.
    pub rope: B::Rope,
    /// Width of the residual stream.
    pub hidden: usize,
    /// Tokens that can be read.
    pub vocabulary: usize,
    /// Tokens that can be written: rows of the head.
    pub head_rows: usize,
    /// Added to the mean square in every norm.
    pub eps: f32,
    max_length: usize,
}

/// What happens to the linear weights on the way to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Quant {
    /// They stay what they are: of the compute type, or int8 where the checkpoint has int8.
    #[default]
    None,
    /// Every linear and the head become int8 with one scale a row ([`crate::weights::int8`]), one matrix after
    /// another. The embedding does not: a token reads one row of it, so fewer bytes would save no time, and its
    /// error would go into the residual stream of every layer. Where the head is the embedding, the matrix is
    /// loaded twice. Norms and biases are vectors and stay as they are.
    Int8,
}

/// How to bring a model to a device.
#[derive(Debug, Clone)]
pub struct LoadOptions {
    /// The longest sequence that will be run: positions that the RoPE table covers.
    pub max_length: usize,
    /// What happens to the linear weights.
    pub quant: Quant,
}

impl LoadOptions {
    /// For sequences of up to `max_length` positions, weights as they are.
    pub fn new(max_length: usize) -> Self {
        LoadOptions {
            max_length,
            quant: Quant::None,
        }
    }
}

impl<B: Backend> DecoderLM<B> {
    /// Brings `host` to `backend`, rounding what is not of the compute type yet matrix by matrix. `progress` is
    /// told the layers done and how many there are.
    pub fn load(
        backend: &B,
        config: &ModelConfig,
        host: &HostModel,
        options: &LoadOptions,
        progress: &mut dyn FnMut(usize, usize),
    ) -> Result<Self> {
        let compute = backend.compute_type();
        if options.max_length == 0 {
            return Err(Error::usage(
                "the context size is 0 and should be at least 1",
            ));
        }
        let plain = |weight: &Weight| backend.load_weight(&weight.to_dtype(compute));
        let weight = |weight: &Weight| {
            // A device takes a matrix in one type: where a checkpoint has some parts in int8, all become that.
            if options.quant == Quant::Int8 || weight.has_int8() {
                backend.load_int8(weight)
            } else {
                plain(weight)
            }
        };
        let vector = |values: &[f32]| backend.load_vector(values);
        let linear = |w: &Weight, bias: &Option<Vec<f32>>| -> Result<Linear<B>> {
            Ok(Linear {
                weight: weight(w)?,
                bias: bias.as_deref().map(vector).transpose()?,
            })
        };

        let embedding = plain(&host.embed)?;
        let head = match (&host.head, options.quant) {
            (Some(head), _) => weight(head)?,
            (None, Quant::Int8) => weight(&host.embed)?,
            (None, Quant::None) => embedding.clone(),
        };
        let count = host.layers.len();
        let mut layers = Vec::with_capacity(count);
        for (i, (layer, switches)) in host.layers.iter().zip(&config.layers).enumerate() {
            layers.push(Layer {
                attention_norm: vector(&layer.attn_norm)?,
                qkv: linear(&layer.qkv, &layer.qkv_bias)?,
                query_norm: layer.q_norm.as_deref().map(vector).transpose()?,
                key_norm: layer.k_norm.as_deref().map(vector).transpose()?,
                rotates: switches.rope,
                attention: AttentionShape {
                    heads: config.num_heads,
                    kv_heads: config.num_kv_heads,
                    head_dim: config.head_dim,
                    scale: (1.0 / (config.head_dim as f64).sqrt()) as f32,
                    mask: switches
                        .window
                        .map_or(Mask::Causal, |window| Mask::Window(window as u32)),
                },
                output: linear(&layer.o, &layer.o_bias)?,
                mlp_norm: vector(&layer.mlp_norm)?,
                up: linear(&layer.gate_up, &layer.gate_up_bias)?,
                wide: layer.gate_up.rows(),
                activation: match (config.activation, layer.xielu) {
                    (ConfigActivation::SiluGated, _) => Activation::SiluGated,
                    (ConfigActivation::Xielu, Some(xielu)) => Activation::Xielu(xielu),
                    (ConfigActivation::Xielu, None) => {
                        return Err(Error::Bug(format!("layer {i} has no xIELU scalars")));
                    }
                },
                down: linear(&layer.down, &layer.down_bias)?,
            });
            progress(i + 1, count);
        }
        Ok(DecoderLM {
            embedding,
            head,
            final_norm: vector(&host.final_norm)?,
            layers,
            rope: backend.load_rope(&rope_table(config, options.max_length, compute))?,
            hidden: config.hidden_size,
            vocabulary: config.vocab_size,
            head_rows: host.head.as_ref().unwrap_or(&host.embed).rows(),
            eps: config.rms_norm_eps as f32,
            max_length: options.max_length,
        })
    }

    /// The longest sequence the model can process: the positions its RoPE table covers.
    pub fn max_length(&self) -> usize {
        self.max_length
    }
}

/// The rotations of `positions` positions, rounded as transformers does: angles, cosines and sines in f32,
/// then times the attention factor, then in the compute type.
fn rope_table(config: &ModelConfig, positions: usize, compute: ComputeType) -> RopeTable {
    let frequencies = config.rope.inv_freq(config.head_dim);
    let factor = config.rope.attention_factor();
    let pairs = frequencies.len();
    let (mut cos, mut sin) = (
        Vec::with_capacity(positions * pairs),
        Vec::with_capacity(positions * pairs),
    );
    for position in 0..positions {
        for &frequency in &frequencies {
            let (s, c) = f64::from(position as f32 * frequency).sin_cos();
            cos.push(compute.round(c as f32 * factor));
            sin.push(compute.round(s as f32 * factor));
        }
    }
    let query_scale = config.rope.query_scale.as_ref();
    let query_scale =
        query_scale.map(|scale| (0..positions).map(|p| compute.round(scale.at(p))).collect());
    RopeTable {
        pairs,
        cos,
        sin,
        query_scale,
    }
}
