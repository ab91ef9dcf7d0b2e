//! The weights of a DFlash drafter on the host, by role. Its layers are those of Qwen3; what it has besides makes
//! a context out of its target's hidden states. It has no embedding and no head of its own.

use super::checkpoint::Checkpoint;
use super::host::{Finder, HostLayer, matrix, round};
use super::tensor::{ComputeType, Weight};
use crate::config::DFlashConfig;
use crate::{Error, Result};

/// The weights of a drafter. H is its hidden size, K the number of target layers that it reads.
#[derive(Debug, Clone)]
pub struct HostDFlash {
    /// The layers, first to last.
    pub layers: Vec<HostLayer>,
    /// From hidden states side by side to one, `[H, K * H]`.
    pub fc: Weight,
    /// Norm of what `fc` gives, `[H]`.
    pub hidden_norm: Vec<f32>,
    /// Norm before the head, `[H]`.
    pub final_norm: Vec<f32>,
}

impl HostDFlash {
    /// Finds every tensor of the drafter in a checkpoint.
    ///
    /// # Errors
    /// `BadModel` listing what is missing, of another shape than the configuration says, or left over.
    pub fn load(
        config: &DFlashConfig,
        checkpoint: &Checkpoint,
        compute: ComputeType,
    ) -> Result<Self> {
        let mut finder = Finder::new(checkpoint, false);
        let found = Self::find(&mut finder, config);
        finder.finish()?;
        let mut found = found
            .ok_or_else(|| Error::Bug("tensors are missing and nobody said which".to_owned()))?;
        if compute == ComputeType::Bf16 {
            for layer in &mut found.layers {
                layer.convert(compute);
            }
            found.fc = found.fc.to_dtype(compute);
            round(&mut found.hidden_norm, compute);
            round(&mut found.final_norm, compute);
        }
        Ok(found)
    }

    fn find(finder: &mut Finder<'_>, config: &DFlashConfig) -> Option<Self> {
        let h = config.model.hidden_size;
        let fc = finder.matrix_part("fc", h, config.target_layers.len() * h);
        let hidden_norm = finder.vector("hidden_norm.weight", h);
        let final_norm = finder.vector("norm.weight", h);
        let layers: Vec<_> = (0..config.model.num_layers)
            .map(|layer| finder.layer(&config.model, layer))
            .collect();
        Some(HostDFlash {
            layers: layers.into_iter().collect::<Option<_>>()?,
            fc: matrix([fc])?,
            hidden_norm: hidden_norm?,
            final_norm: final_norm?,
        })
    }

    /// Bytes of all matrices.
    pub fn bytes(&self) -> u64 {
        let layers = self
            .layers
            .iter()
            .flat_map(|layer| [&layer.qkv, &layer.o, &layer.gate_up, &layer.down]);
        layers.chain([&self.fc]).map(Weight::bytes).sum()
    }
}
