//! How much memory a model takes, from its configuration alone, before anything is loaded.

use crate::config::ModelConfig;
use crate::kv::{KvElement, KvLayout, PAGE_SIZE};

/// What a model takes in memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryPlan {
    /// Bytes of the weights as they are kept.
    pub weights_bytes: u64,
    /// Bytes of keys and values of one position, all layers together.
    pub kv_bytes_per_token: u64,
    /// Bytes of the buffers of a step.
    pub workspace_bytes: u64,
}

impl MemoryPlan {
    /// The plan for a model of `config` whose weights take `weights_bytes`, for steps of up to `max_rows` rows
    /// in up to `max_spans` spans, with activations that are kept in words of
    /// `activation_bytes` (a CPU keeps bf16 values in f32 words) and a cache of `element`s.
    pub fn new(
        config: &ModelConfig,
        weights_bytes: u64,
        element: KvElement,
        activation_bytes: usize,
        max_rows: usize,
        max_spans: usize,
    ) -> Self {
        let kv = KvLayout {
            page_size: PAGE_SIZE,
            kv_heads: config.num_kv_heads,
            head_dim: config.head_dim,
            element,
        };
        // The buffers of `model::Workspace`: four of the stream's width, queries twice, keys and values
        // twice, the MLP before and after its activation; and the logits of a few rows.
        let (q, k) = (
            config.num_heads * config.head_dim,
            config.num_kv_heads * config.head_dim,
        );
        let row = 4 * config.hidden_size + 3 * q + 4 * k + 3 * config.intermediate_size;
        let logits = 4 * config.output_vocab_size * max_spans.max(16).min(max_rows.max(1));
        MemoryPlan {
            weights_bytes,
            kv_bytes_per_token: (config.layers.len() * kv.position_bytes()) as u64,
            workspace_bytes: (row * activation_bytes * max_rows + logits) as u64,
        }
    }

    /// The longest context whose keys and values fit in `memory` bytes beside everything else, in whole pages.
    pub fn max_context(&self, memory: u64) -> u64 {
        let rest = memory
            .saturating_sub(self.weights_bytes)
            .saturating_sub(self.workspace_bytes);
        let page = self.kv_bytes_per_token * PAGE_SIZE as u64;
        rest / page.max(1) * PAGE_SIZE as u64
    }
}
