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
    /// Bytes of the RoPE table for one position.
    pub rope_bytes_per_position: u64,
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
        let row = 2 * config.hidden_size + 2 * q + config.intermediate_size;
        // The stream, what is added to it, and projections with what is made of them on the way.
        let f32s = 2 * config.hidden_size + 2 * q + 4 * k + 2 * config.intermediate_size;
        let row_bytes = row * activation_bytes + f32s * size_of::<f32>();
        let logits = 4 * config.output_vocab_size * max_spans.max(16).min(max_rows.max(1));
        MemoryPlan {
            weights_bytes,
            kv_bytes_per_token: (config.layers.len() * kv.position_bytes()) as u64,
            // A cosine and a sine for each pair of a head, and a factor for the queries, in f32.
            rope_bytes_per_position: 4
                * (config.head_dim + usize::from(config.rope.query_scale.is_some())) as u64,
            workspace_bytes: (row_bytes * max_rows + logits) as u64,
        }
    }

    /// Bytes of a context of `tokens`: its keys and values, and the RoPE table that reaches as far.
    pub fn context_bytes(&self, tokens: u64) -> u64 {
        (self.kv_bytes_per_token + self.rope_bytes_per_position).saturating_mul(tokens)
    }

    /// Bytes without any context: the weights and the buffers of a step.
    pub fn fixed_bytes(&self) -> u64 {
        self.weights_bytes.saturating_add(self.workspace_bytes)
    }

    /// Pages of a cache that `sequences` sequences of up to `length` positions share, where `memory` bytes may be
    /// taken: what is left beside everything else, but no more than the sequences can fill. Those of fewer
    /// positions leave room for others, so that it may be less than all of them need at their longest.
    pub fn shared_pages(&self, memory: u64, sequences: usize, length: usize) -> usize {
        let most = length.div_ceil(PAGE_SIZE).saturating_mul(sequences.max(1));
        let left = self.max_context(memory) / PAGE_SIZE as u64;
        usize::try_from(left).unwrap_or(usize::MAX).min(most)
    }

    /// The longest context that fits in `memory` bytes beside everything else, in whole pages.
    pub fn max_context(&self, memory: u64) -> u64 {
        let rest = memory
            .saturating_sub(self.weights_bytes)
            .saturating_sub(self.workspace_bytes);
        let page = self.context_bytes(PAGE_SIZE as u64);
        rest / page.max(1) * PAGE_SIZE as u64
    }
}

/// Bytes that may be taken of a device with `total` bytes of memory of which `free` are free, if `utilization` (0 to
/// 1) is the part that is taken at most, by this and all other programs together.
pub fn budget(free: u64, total: u64, utilization: f64) -> u64 {
    let kept = (total as f64 * (1.0 - utilization.clamp(0.0, 1.0))) as u64;
    free.saturating_sub(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    const GB: u64 = 1_000_000_000;

    fn plan() -> MemoryPlan {
        MemoryPlan {
            weights_bytes: 16 * GB,
            kv_bytes_per_token: 140_000,
            rope_bytes_per_position: 512,
            workspace_bytes: GB,
        }
    }

    #[test]
    fn a_budget_is_a_part_of_all_memory_less_what_others_took() {
        assert_eq!(budget(141 * GB, 141 * GB, 1.0), 141 * GB);
        assert_eq!(budget(100 * GB, 100 * GB, 0.75), 75 * GB);
        // Others have 30: of the 75 that may be taken 45 are left.
        assert_eq!(budget(70 * GB, 100 * GB, 0.75), 45 * GB);
        assert_eq!(budget(20 * GB, 100 * GB, 0.75), 0);
        assert_eq!(budget(0, 0, 0.9), 0);
    }

    #[test]
    fn the_cache_takes_what_is_left() {
        let page = plan().context_bytes(PAGE_SIZE as u64);
        let memory = plan().fixed_bytes() + 100 * page;
        assert_eq!(plan().shared_pages(memory, 64, 1 << 17), 100);
        assert_eq!(plan().shared_pages(memory + page - 1, 64, 1 << 17), 100);
        assert_eq!(plan().shared_pages(memory - 1, 64, 1 << 17), 99);
        // No more than can be filled.
        assert_eq!(plan().shared_pages(memory, 1, 10 * PAGE_SIZE), 10);
        assert_eq!(plan().shared_pages(memory, 2, 10 * PAGE_SIZE - 1), 20);
        assert_eq!(plan().shared_pages(plan().fixed_bytes(), 64, 1 << 17), 0);
        assert_eq!(plan().shared_pages(0, 64, 1 << 17), 0);
        assert!(plan().shared_pages(u64::MAX, usize::MAX, usize::MAX / 2) > 1 << 20);
    }
}
