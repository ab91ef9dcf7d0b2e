//! All weights of a model on the host, by role: which tensor of a checkpoint is which, and whether all are there.
//!
//! The names are those of the classes in transformers. It decided not to know what the weights are multiplied with.

use super::checkpoint::Checkpoint;
use super::safetensors::{Dtype, TensorInfo, shown};
use super::tensor::{ComputeType, Weight, WeightPart};
use crate::config::{Activation, AttentionBias, Family, ModelConfig};
use crate::{Error, Result};
use std::collections::HashSet;

/// The weights of a model. H is the hidden size, I the intermediate size, hd the head dimension.
#[derive(Debug, Clone)]
pub struct HostModel {
    /// `[vocab_size, H]`.
    pub embed: Weight,
    /// `[output_vocab_size, H]`; `None`: the embedding is the head too.
    pub head: Option<Weight>,
    /// `[H]`.
    pub final_norm: Vec<f32>,
    /// The layers, first to last.
    pub layers: Vec<HostLayer>,
}

/// The weights of one layer.
#[derive(Debug, Clone)]
pub struct HostLayer {
    /// Norm before the attention, `[H]`.
    pub attn_norm: Vec<f32>,
    /// Queries, keys and values as three parts, `[(heads + 2 * kv_heads) * hd, H]`.
    pub qkv: Weight,
    /// One number per row of `qkv`.
    pub qkv_bias: Option<Vec<f32>>,
    /// Norm of each query head, `[hd]`.
    pub q_norm: Option<Vec<f32>>,
    /// Norm of each key head, `[hd]`.
    pub k_norm: Option<Vec<f32>>,
    /// Output of the attention, `[H, heads * hd]`.
    pub o: Weight,
    /// `[H]`.
    pub o_bias: Option<Vec<f32>>,
    /// Norm before the MLP, `[H]`.
    pub mlp_norm: Vec<f32>,
    /// Gate and up as two parts, `[2 * I, H]`; without a gate up alone, `[I, H]`.
    pub gate_up: Weight,
    /// One number per row of `gate_up`.
    pub gate_up_bias: Option<Vec<f32>>,
    /// Output of the MLP, `[H, I]`.
    pub down: Weight,
    /// `[H]`.
    pub down_bias: Option<Vec<f32>>,
    /// Parameters of the activation, if it has any.
    pub xielu: Option<Xielu>,
}

/// Parameters of xIELU (arXiv 2411.13010) as they are used: `alpha_p * x² + beta * x` above zero, else
/// `(expm1(min(x, eps)) - x) * alpha_n + beta * x`. Files hold other numbers, see [`Xielu::from_raw`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Xielu {
    /// Curvature above zero, after softplus.
    pub alpha_p: f32,
    /// Weight of the exponential below zero, after softplus and with `beta` added.
    pub alpha_n: f32,
    /// Slope at zero.
    pub beta: f32,
    /// Just below zero: where the exponential stops following x.
    pub eps: f32,
}

impl Xielu {
    /// From the numbers of a checkpoint: alpha_p is the softplus of the raw one, alpha_n is beta plus that.
    pub fn from_raw(alpha_p: f32, alpha_n: f32, beta: f32, eps: f32) -> Self {
        let softplus = |x: f32| f64::from(x).exp().ln_1p();
        // exp overflows far out, where softplus is x itself.
        let softplus = |x: f32| if x > 40.0 { f64::from(x) } else { softplus(x) };
        Xielu {
            alpha_p: softplus(alpha_p) as f32,
            alpha_n: (f64::from(beta) + softplus(alpha_n)) as f32,
            beta,
            eps,
        }
    }
}

impl HostModel {
    /// Finds every tensor of the model in a checkpoint. For bf16 compute, f16 and f32 tensors (norms and biases too)
    /// are rounded to bf16; see [`Weight::to_dtype`].
    ///
    /// # Errors
    /// `BadModel` listing what is missing, of another shape or type than the configuration says, or left over.
    pub fn load(
        config: &ModelConfig,
        checkpoint: &Checkpoint,
        compute: ComputeType,
    ) -> Result<Self> {
        if let Some(quantization) = &config.quantization {
            let method = quantization.get("quant_method");
            let method = method.and_then(|m| m.as_str()).unwrap_or("no name");
            return Err(Error::bad_model(
                checkpoint.dir().join("config.json"),
                format!(
                    "quantization_config asks for quantized weights ({}), which are not supported; use the model's original in bf16",
                    shown(method)
                ),
            ));
        }
        let mut finder = Finder::new(checkpoint);
        let found = finder.model(config);
        finder.finish()?;
        let mut model = found
            .ok_or_else(|| Error::Bug("tensors are missing and nobody said which".to_owned()))?;
        model.convert(compute);
        Ok(model)
    }

    /// A model of random weights for benchmarks: about normal, with a deviation that keeps activations of ordinary
    /// size. Norms are 1.
    pub fn random(config: &ModelConfig, seed: u64) -> Self {
        let (h, i) = (config.hidden_size, config.intermediate_size);
        let (q, kv) = (config.q_width(), config.kv_width());
        let mut stream = seed;
        let mut linear = |rows: usize, cols: usize| {
            // Far apart, so that no two weights share a piece of the generator's sequence.
            stream = stream.wrapping_add(0xd1b5_4a32_d192_ed03);
            Weight::random(rows, cols, stream, (cols as f32).powf(-0.5))
        };
        let mut join = |rows: &[usize], cols| {
            let parts = rows
                .iter()
                .flat_map(|&rows| linear(rows, cols).into_parts());
            Weight::new(parts.collect()).expect("all parts are equally wide")
        };
        let ones = |n: usize| vec![1.0; n];
        let zeros = |n: usize, there: bool| there.then(|| vec![0.0; n]);
        let gated = config.activation == Activation::SiluGated;
        let inputs = if gated { vec![i, i] } else { vec![i] };
        let layers = (0..config.num_layers).map(|_| HostLayer {
            attn_norm: ones(h),
            qkv: join(&[q, kv, kv], h),
            qkv_bias: zeros(q + 2 * kv, config.attention_bias != AttentionBias::None),
            q_norm: config.qk_norm.then(|| ones(config.head_dim)),
            k_norm: config.qk_norm.then(|| ones(config.head_dim)),
            o: join(&[h], q),
            o_bias: zeros(h, config.attention_bias == AttentionBias::Qkvo),
            mlp_norm: ones(h),
            gate_up: join(&inputs, h),
            gate_up_bias: zeros(inputs.len() * i, config.mlp_bias),
            down: join(&[h], i),
            down_bias: zeros(h, config.mlp_bias),
            xielu: (!gated).then(|| Xielu::from_raw(0.0, 0.0, XIELU_BETA, XIELU_EPS)),
        });
        HostModel {
            layers: layers.collect(),
            embed: join(&[config.vocab_size], h),
            head: (!config.tie_word_embeddings).then(|| join(&[config.output_vocab_size], h)),
            final_norm: ones(h),
        }
    }

    /// Bytes of all matrices.
    pub fn bytes(&self) -> u64 {
        let tables = std::iter::once(&self.embed).chain(&self.head);
        tables.chain(self.linears()).map(Weight::bytes).sum()
    }

    /// Bytes of the matrices that every step reads, the linears and the head, once they are loaded: in int8 if `int8`
    /// or where they are already, else in `compute`.
    pub fn step_bytes(&self, compute: ComputeType, int8: bool) -> u64 {
        let head = self.head.as_ref().unwrap_or(&self.embed);
        let loaded = |weight: &Weight| loaded_bytes(weight, compute, int8 || weight.has_int8());
        self.linears().chain([head]).map(loaded).sum()
    }

    /// Bytes of all matrices once they are loaded. In int8 a head that is the embedding becomes a matrix of its own.
    pub fn loaded_bytes(&self, compute: ComputeType, int8: bool) -> u64 {
        let shared = self.head.is_none() && !int8;
        let embed = if shared {
            0
        } else {
            loaded_bytes(&self.embed, compute, false)
        };
        embed + self.step_bytes(compute, int8)
    }

    fn linears(&self) -> impl Iterator<Item = &Weight> {
        self.layers
            .iter()
            .flat_map(|layer| [&layer.qkv, &layer.o, &layer.gate_up, &layer.down])
    }

    /// What [`loaded_bytes`](Self::loaded_bytes) will be for `tensors`, all those of a model's files.
    pub fn bytes_of(tensors: &[TensorInfo], compute: ComputeType, int8: bool) -> u64 {
        let is_text = |name: &str| !NOT_TEXT.iter().any(|part| name.starts_with(part));
        let matrices = || {
            tensors
                .iter()
                .filter(|tensor| tensor.shape.len() == 2 && is_text(&tensor.name))
        };
        let tied = !tensors.iter().any(|t| HEADS.contains(&t.name.as_str()));
        let bytes = |tensor: &TensorInfo| {
            let (elements, rows) = (tensor.shape.iter().product::<usize>(), tensor.shape[0]);
            let in_int8 = elements + rows * size_of::<f32>();
            let plain = match (tensor.dtype, compute) {
                // Rows of a quantized checkpoint, whose scales are a matrix of one column; packed ones are four a word.
                (Dtype::I8, _) => elements,
                (Dtype::I32, _) => 4 * elements,
                (_, ComputeType::F32) => tensor.range.len(),
                (_, ComputeType::Bf16) => 2 * elements,
            };
            let is_embedding = tensor.name.ends_with("embed_tokens.weight");
            let rounded =
                int8 && !matches!(tensor.dtype, Dtype::I8 | Dtype::I32) && tensor.shape[1] > 1;
            match (is_embedding, rounded) {
                (true, true) if tied => plain + in_int8,
                (false, true) => in_int8,
                _ => plain,
            }
        };
        matrices().map(|tensor| bytes(tensor) as u64).sum()
    }

    fn convert(&mut self, compute: ComputeType) {
        if compute == ComputeType::F32 {
            return;
        }
        let matrix = |weight: &mut Weight| *weight = weight.to_dtype(compute);
        let vector = |vector: &mut Vec<f32>| {
            for value in vector {
                *value = compute.round(*value);
            }
        };
        matrix(&mut self.embed);
        self.head.iter_mut().for_each(matrix);
        vector(&mut self.final_norm);
        for layer in &mut self.layers {
            let matrices = [
                &mut layer.qkv,
                &mut layer.o,
                &mut layer.gate_up,
                &mut layer.down,
            ];
            matrices.into_iter().for_each(matrix);
            let norms = [&mut layer.attn_norm, &mut layer.mlp_norm];
            norms.into_iter().for_each(vector);
            let maybe = [
                &mut layer.qkv_bias,
                &mut layer.q_norm,
                &mut layer.k_norm,
                &mut layer.o_bias,
                &mut layer.gate_up_bias,
                &mut layer.down_bias,
            ];
            maybe.into_iter().flatten().for_each(vector);
        }
    }
}

/// Bytes of a matrix in int8 or in `compute`.
fn loaded_bytes(weight: &Weight, compute: ComputeType, int8: bool) -> u64 {
    let (rows, cols) = (weight.rows() as u64, weight.cols() as u64);
    match (int8, compute) {
        (true, _) => rows * (cols + 4),
        // f32 keeps bf16 as it is.
        (false, ComputeType::F32) => weight.bytes(),
        (false, ComputeType::Bf16) => 2 * rows * cols,
    }
}

/// Where `beta` and `eps` of xIELU are absent.
const XIELU_BETA: f32 = 0.5;
const XIELU_EPS: f32 = -1e-6;

/// Where the layers of a text model can begin; wrappers of several versions differ.
const PREFIXES: [&str; 4] = [
    "model.",
    "language_model.model.",
    "model.language_model.",
    "",
];
const HEADS: [&str; 2] = ["lm_head.weight", "language_model.lm_head.weight"];
/// The parts of wrappers that see and hear.
const NOT_TEXT: [&str; 8] = [
    "vision_tower.",
    "multi_modal_projector.",
    "model.vision_tower.",
    "model.multi_modal_projector.",
    "model.vision_tokenizer.",
    "model.audio_tokenizer.",
    "vision_tokenizer.",
    "audio_tokenizer.",
];
/// Frequencies that old versions stored; they follow from the configuration.
const BUFFER: &str = "rotary_emb.inv_freq";

/// Takes tensors out of a checkpoint and notes all that is wrong on the way.
struct Finder<'a> {
    checkpoint: &'a Checkpoint,
    prefix: &'static str,
    used: HashSet<String>,
    problems: Vec<String>,
}

impl<'a> Finder<'a> {
    fn new(checkpoint: &'a Checkpoint) -> Self {
        let is_there = |prefix: &&&str| {
            ["norm.weight", "embed_tokens.weight"]
                .iter()
                .any(|name| checkpoint.tensor(&format!("{prefix}{name}")).is_some())
        };
        Finder {
            checkpoint,
            prefix: PREFIXES.iter().find(is_there).unwrap_or(&PREFIXES[0]),
            used: HashSet::new(),
            problems: Vec::new(),
        }
    }

    /// `None` if anything is missing; then `problems` says what.
    fn model(&mut self, config: &ModelConfig) -> Option<HostModel> {
        let h = config.hidden_size;
        let head_name = HEADS
            .into_iter()
            .find(|name| self.checkpoint.tensor(name).is_some());
        let head = head_name.map(|name| self.part(name, &[config.output_vocab_size, h]));
        let embed_name = format!("{}embed_tokens.weight", self.prefix);
        // A head without an embedding serves as both.
        let head_is_embed = head.is_some() && self.checkpoint.tensor(&embed_name).is_none();
        let embed = if head_is_embed && config.output_vocab_size == config.vocab_size {
            head.clone()?
        } else {
            self.part(&embed_name, &[config.vocab_size, h])
        };
        if head.is_none() {
            if !config.tie_word_embeddings {
                let reason = "is missing, and config.json does not say that the head is the embedding (tie_word_embeddings)";
                self.problems.push(format!("{} {reason}", HEADS[0]));
            } else if config.output_vocab_size != config.vocab_size {
                self.problems.push(format!(
                    "{} is missing: output_vocab_size is {} and the embedding has {} rows",
                    HEADS[0], config.output_vocab_size, config.vocab_size
                ));
            }
        }
        let final_norm = self.vector("norm.weight", h);
        // All layers are looked at before anything missing ends the walk, so that all problems are told at once.
        let layers: Vec<_> = (0..config.num_layers)
            .map(|layer| self.layer(config, layer))
            .collect();
        let head = match head {
            Some(part) => Some(matrix([part])?),
            None => None,
        };
        Some(HostModel {
            embed: matrix([embed])?,
            head,
            final_norm: final_norm?,
            layers: layers.into_iter().collect::<Option<_>>()?,
        })
    }

    fn layer(&mut self, config: &ModelConfig, layer: usize) -> Option<HostLayer> {
        let (h, i) = (config.hidden_size, config.intermediate_size);
        let (q, kv, hd) = (config.q_width(), config.kv_width(), config.head_dim);
        let (attn_norm, mlp_norm) = match config.family {
            Family::Apertus => ("attention_layernorm", "feedforward_layernorm"),
            _ => ("input_layernorm", "post_attention_layernorm"),
        };
        let gate = config.activation == Activation::SiluGated;
        let name = |rest: &str| format!("layers.{layer}.{rest}");

        let attn_norm = self.vector(&name(&format!("{attn_norm}.weight")), h);
        let qkv_rows = [("q_proj", q), ("k_proj", kv), ("v_proj", kv)];
        let qkv_rows = qkv_rows.map(|(proj, rows)| (name(&format!("self_attn.{proj}")), rows));
        let qkv = qkv_rows
            .each_ref()
            .map(|(name, rows)| self.matrix_part(name, *rows, h));
        let qkv_bias = self.bias(config.attention_bias != AttentionBias::None, &qkv_rows);
        let q_norm = self.vector_if(config.qk_norm, &name("self_attn.q_norm.weight"), hd);
        let k_norm = self.vector_if(config.qk_norm, &name("self_attn.k_norm.weight"), hd);
        let o_rows = [(name("self_attn.o_proj"), h)];
        let o = self.matrix_part(&o_rows[0].0, h, q);
        let o_bias = self.bias(config.attention_bias == AttentionBias::Qkvo, &o_rows);
        let mlp_norm = self.vector(&name(&format!("{mlp_norm}.weight")), h);
        let mut gate_up_rows = vec![(name("mlp.up_proj"), i)];
        if gate {
            gate_up_rows.insert(0, (name("mlp.gate_proj"), i));
        }
        let gate_up: Vec<_> = gate_up_rows
            .iter()
            .map(|(name, rows)| self.matrix_part(name, *rows, h))
            .collect();
        let gate_up_bias = self.bias(config.mlp_bias, &gate_up_rows);
        let down_rows = [(name("mlp.down_proj"), h)];
        let down = self.matrix_part(&down_rows[0].0, h, i);
        let down_bias = self.bias(config.mlp_bias, &down_rows);
        let xielu = (!gate).then(|| self.xielu(&name("mlp.act_fn.")));

        Some(HostLayer {
            attn_norm: attn_norm?,
            qkv: matrix(qkv)?,
            qkv_bias: qkv_bias?,
            q_norm: q_norm?,
            k_norm: k_norm?,
            o: matrix([o])?,
            o_bias: o_bias?,
            mlp_norm: mlp_norm?,
            gate_up: matrix(gate_up)?,
            gate_up_bias: gate_up_bias?,
            down: matrix([down])?,
            down_bias: down_bias?,
            xielu: match xielu {
                Some(xielu) => Some(xielu?),
                None => None,
            },
        })
    }

    fn xielu(&mut self, at: &str) -> Option<Xielu> {
        let alpha_p = self.vector(&format!("{at}alpha_p"), 1);
        let alpha_n = self.vector(&format!("{at}alpha_n"), 1);
        let mut or = |name: &str, default: f32| {
            let name = format!("{at}{name}");
            match self.checkpoint.tensor(&format!("{}{name}", self.prefix)) {
                Some(_) => self.vector(&name, 1),
                None => Some(vec![default]),
            }
        };
        let beta = or("beta", XIELU_BETA);
        let eps = or("eps", XIELU_EPS);
        Some(Xielu::from_raw(alpha_p?[0], alpha_n?[0], beta?[0], eps?[0]))
    }

    fn matrix_part(&mut self, name: &str, rows: usize, cols: usize) -> Option<WeightPart> {
        let name = format!("{}{name}.weight", self.prefix);
        self.part(&name, &[rows, cols])
    }

    fn vector(&mut self, name: &str, length: usize) -> Option<Vec<f32>> {
        let name = format!("{}{name}", self.prefix);
        Some(self.part(&name, &[length])?.to_f32())
    }

    fn vector_if(&mut self, there: bool, name: &str, length: usize) -> Option<Option<Vec<f32>>> {
        if !there {
            return Some(None);
        }
        self.vector(name, length).map(Some)
    }

    /// The biases of projections, one after another.
    fn bias(&mut self, there: bool, rows: &[(String, usize)]) -> Option<Option<Vec<f32>>> {
        if !there {
            return Some(None);
        }
        let parts: Vec<_> = rows
            .iter()
            .map(|(name, rows)| self.vector(&format!("{name}.bias"), *rows))
            .collect();
        let parts: Option<Vec<_>> = parts.into_iter().collect();
        parts.map(|parts| Some(parts.concat()))
    }

    /// The tensor called `name`, if it is there and has the shape `wanted`; a scalar is as good as a vector of one.
    fn part(&mut self, name: &str, wanted: &[usize]) -> Option<WeightPart> {
        let Some(tensor) = self.checkpoint.tensor(name) else {
            self.problems.push(format!("{name} is missing"));
            return None;
        };
        self.used.insert(name.to_owned());
        if tensor.shape != wanted && !(tensor.shape.is_empty() && wanted == [1]) {
            let found = &tensor.shape[..tensor.shape.len().min(8)];
            let problem = format!("{name} has the shape {found:?}, config.json says {wanted:?}");
            self.problems.push(problem);
            return None;
        }
        WeightPart::from_tensor(tensor)
            .map_err(|problem| self.problems.push(problem))
            .ok()
    }

    /// Complains about everything at once.
    fn finish(mut self) -> Result<()> {
        for name in self.checkpoint.names() {
            let ignored =
                name.ends_with(BUFFER) || NOT_TEXT.iter().any(|part| name.starts_with(part));
            if !ignored && !self.used.contains(name) {
                let name = shown(name);
                self.problems
                    .push(format!("{name} is in the file but not part of the model"));
            }
        }
        if self.problems.is_empty() {
            return Ok(());
        }
        const SHOWN: usize = 10;
        let mut list = self.problems[..self.problems.len().min(SHOWN)].join("; ");
        if self.problems.len() > SHOWN {
            list += &format!("; and {} more", self.problems.len() - SHOWN);
        }
        Err(Error::bad_model(
            self.checkpoint.dir(),
            format!("the weights do not fit config.json: {list}"),
        ))
    }
}

fn matrix(parts: impl IntoIterator<Item = Option<WeightPart>>) -> Option<Weight> {
    let parts: Option<Vec<_>> = parts.into_iter().collect();
    Weight::new(parts?).ok()
}
