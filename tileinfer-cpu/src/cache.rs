//! Where keys and values lie inside a page.
//!
//! A page is `(page, kv_head, unit, inside)`; a unit is 64 positions (or the page, if its size is no multiple
//! of 64). Inside a unit of one head:
//! - keys `[head_dim / 2][slots][2]` in bf16, `[head_dim][slots]` in f32: a vector holds the same two
//!   dimensions of neighbouring positions, so scores need no sums across lanes;
//! - values `[head_dim / 32][slots][32]` (the last part may be narrower): each part is one stream.
//!
//! What this module decided not to know: whose pages they are.

use tileinfer::backend::ComputeType;
use tileinfer::kv::{KvElement, KvLayout};
use tileinfer::{Error, Result};

use crate::SharedMut;
use crate::memory::Aligned;

/// Positions of a unit of a common page.
pub(crate) const UNIT: usize = 64;
/// Dimensions of a part of the values.
pub(crate) const PART: usize = 32;

/// One layer's pages of keys and values.
#[derive(Debug)]
pub struct Pages {
    pub(crate) geometry: Geometry,
    pub(crate) keys: Aligned<u8>,
    pub(crate) values: Aligned<u8>,
}

/// The shape of a page, as numbers that the kernels use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) page_size: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) kind: ComputeType,
    /// Slots of a unit.
    pub(crate) unit: usize,
}

impl Pages {
    /// `pages` zeroed pages.
    ///
    /// # Errors
    /// An odd head dimension; more bytes than can be addressed.
    pub(crate) fn new(layout: &KvLayout, pages: usize) -> Result<Self> {
        let &KvLayout {
            page_size,
            kv_heads,
            head_dim,
            element,
        } = layout;
        let KvElement::Compute(kind) = element else {
            return Err(Error::usage("an int8 cache is not supported on the CPU"));
        };
        if head_dim % 2 != 0 {
            return Err(Error::usage(format!(
                "heads of {head_dim} dimensions: the CPU backend's cache needs an even number"
            )));
        }
        let unit = if page_size % UNIT == 0 {
            UNIT
        } else {
            page_size
        };
        let geometry = Geometry {
            page_size,
            kv_heads,
            head_dim,
            kind,
            unit,
        };
        let bytes = geometry
            .page_bytes()
            .checked_mul(pages)
            .ok_or_else(|| Error::OutOfMemory {
                what: format!("a cache of {pages} pages"),
                needed: u64::MAX,
                available: usize::MAX as u64,
            })?;
        Ok(Pages {
            geometry,
            keys: Aligned::new(bytes, 0),
            values: Aligned::new(bytes, 0),
        })
    }

    /// Copies whole pages `(from, to)`.
    pub(crate) fn copy(&mut self, copies: &[(u32, u32)]) {
        let len = self.geometry.page_bytes();
        for &(from, to) in copies {
            let (from, to) = (from as usize * len, to as usize * len);
            self.keys.copy_within(from..from + len, to);
            self.values.copy_within(from..from + len, to);
        }
    }

    /// The key and the value at `(page, head, offset)`.
    pub(crate) fn read(&self, page: usize, head: usize, offset: usize) -> (Vec<f32>, Vec<f32>) {
        let geometry = self.geometry;
        let slot = geometry.slot(page, head, offset);
        let dims = 0..geometry.head_dim;
        (
            dims.clone()
                .map(|d| geometry.read(&self.keys, slot.key(geometry, d)))
                .collect(),
            dims.map(|d| geometry.read(&self.values, slot.value(geometry, d)))
                .collect(),
        )
    }
}

impl Geometry {
    /// Bytes of the keys (or of the values) of a page.
    pub(crate) fn page_bytes(&self) -> usize {
        self.page_size * self.kv_heads * self.head_dim * self.kind.size()
    }

    /// Bytes of the keys (or of the values) of a unit of one head.
    pub(crate) fn unit_bytes(&self) -> usize {
        self.unit * self.head_dim * self.kind.size()
    }

    /// Byte at which the unit of one head begins that holds `offset` of `page`.
    #[inline(always)]
    pub(crate) fn unit_start(&self, page: usize, head: usize, offset: usize) -> usize {
        let units = self.page_size / self.unit;
        ((page * self.kv_heads + head) * units + offset / self.unit) * self.unit_bytes()
    }

    #[inline(always)]
    pub(crate) fn slot(&self, page: usize, head: usize, offset: usize) -> Slot {
        Slot {
            start: self.unit_start(page, head, offset),
            slot: offset % self.unit,
        }
    }

    fn read(&self, from: &[u8], at: usize) -> f32 {
        match self.kind {
            ComputeType::Bf16 => half::bf16::from_le_bytes([from[at], from[at + 1]]).to_f32(),
            ComputeType::F32 => {
                f32::from_le_bytes([from[at], from[at + 1], from[at + 2], from[at + 3]])
            }
        }
    }

    /// Writes the key and the value of one position and head; values that bf16 does not have are cut off,
    /// so they have to be rounded before.
    ///
    /// # Safety
    /// No other thread may touch this position of these pages.
    #[inline(always)]
    pub(crate) unsafe fn write(
        self,
        keys: SharedMut<'_, u8>,
        values: SharedMut<'_, u8>,
        slot: Slot,
        key: &[f32],
        value: &[f32],
    ) {
        let n = self.head_dim;
        let (key, value) = (&key[..n], &value[..n]);
        let size = self.kind.size();
        for part in (0..n).step_by(PART) {
            let part = part..n.min(part + PART);
            // SAFETY: elements of this position, which is ours by the caller's promise.
            let to = unsafe { values.range(slot.value(self, part.start), part.len() * size) };
            match self.kind {
                ComputeType::Bf16 => {
                    for (to, x) in to.as_chunks_mut().0.iter_mut().zip(&value[part]) {
                        *to = ((x.to_bits() >> 16) as u16).to_le_bytes();
                    }
                }
                ComputeType::F32 => {
                    for (to, x) in to.as_chunks_mut().0.iter_mut().zip(&value[part]) {
                        *to = x.to_le_bytes();
                    }
                }
            }
        }
        match self.kind {
            ComputeType::Bf16 => {
                for (pair, x) in key.as_chunks::<2>().0.iter().enumerate() {
                    let bits = (x[0].to_bits() >> 16) | (x[1].to_bits() & 0xffff_0000);
                    // SAFETY: as above.
                    let to = unsafe { keys.range(slot.key(self, 2 * pair), 4) };
                    to.copy_from_slice(&bits.to_le_bytes());
                }
            }
            ComputeType::F32 => {
                for (d, x) in key.iter().enumerate() {
                    // SAFETY: as above.
                    let to = unsafe { keys.range(slot.key(self, d), 4) };
                    to.copy_from_slice(&x.to_le_bytes());
                }
            }
        }
    }
}

/// A position of one head: the byte at which its unit begins, and which of the unit's positions it is.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Slot {
    start: usize,
    slot: usize,
}

impl Slot {
    /// Byte of dimension `d` of the key.
    #[inline(always)]
    pub(crate) fn key(self, geometry: Geometry, d: usize) -> usize {
        self.start + geometry.kind.size() * key_index(geometry.kind, geometry.unit, self.slot, d)
    }

    /// Byte of dimension `d` of the value.
    #[inline(always)]
    pub(crate) fn value(self, geometry: Geometry, d: usize) -> usize {
        self.start
            + geometry.kind.size() * value_index(geometry.unit, geometry.head_dim, self.slot, d)
    }
}

/// Index of dimension `d` of the key in `slot` among the elements of a unit of `unit` slots.
#[inline(always)]
fn key_index(kind: ComputeType, unit: usize, slot: usize, d: usize) -> usize {
    match kind {
        ComputeType::Bf16 => (d / 2 * unit + slot) * 2 + d % 2,
        ComputeType::F32 => d * unit + slot,
    }
}

/// Index of dimension `d` of the value in `slot`.
#[inline(always)]
fn value_index(unit: usize, head_dim: usize, slot: usize, d: usize) -> usize {
    let first = d / PART * PART;
    first * unit + slot * PART.min(head_dim - first) + d - first
}
