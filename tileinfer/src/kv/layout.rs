//! The geometry of a page of keys and values, as a plain value.

use crate::backend::ComputeType;

/// Positions a page, unless asked otherwise.
pub const PAGE_SIZE: usize = 64;

/// How a cached key or value is stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum KvElement {
    /// In the activation type.
    Compute(ComputeType),
    /// int8 with one f32 scale a vector; see [`crate::weights::int8`].
    Int8,
}

impl KvElement {
    /// Bytes of one vector of `head_dim` values.
    pub fn vector_bytes(self, head_dim: usize) -> usize {
        match self {
            KvElement::Compute(kind) => head_dim * kind.size(),
            KvElement::Int8 => head_dim + size_of::<f32>(),
        }
    }
}

/// One layer's pages: keys are `(page, kv_head, slot, head_dim)`, values logically the same (a backend may
/// keep their inside in an order of its own).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// Positions a page.
    pub page_size: usize,
    /// Key-value heads.
    pub kv_heads: usize,
    /// Values a head.
    pub head_dim: usize,
    /// How vectors are stored.
    pub element: KvElement,
}

impl KvLayout {
    /// Bytes of the keys and values of one position.
    pub fn position_bytes(&self) -> usize {
        2 * self.kv_heads * self.element.vector_bytes(self.head_dim)
    }

    /// Bytes of one page of one layer.
    pub fn page_bytes(&self) -> usize {
        self.page_size * self.position_bytes()
    }

    /// Pages that `positions` positions take.
    pub fn pages_for(&self, positions: usize) -> usize {
        positions.div_ceil(self.page_size)
    }
}
