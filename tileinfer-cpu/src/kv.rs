//! Where keys and values lie inside a page.
//!
//! A page holds 64 positions of every kv head: `(page, kv_head, inside)`. Inside, for one head:
//! - keys `[head_dim / 2][64 slots][2]` in bf16, `[head_dim][64 slots]` in f32: a vector holds the same two
//!   dimensions of neighbouring positions, so scores need no sums across lanes;
//! - values `[head_dim / 32][64 slots][32]` (the last part may be narrower): each part is one stream.
//!
//! What this module decided not to know: whose pages they are.

use crate::linear::Element;
use crate::pool::Pool;
use crate::SharedMut;

/// Positions of a page.
pub const PAGE: usize = 64;
/// Dimensions of a part of the values.
pub(crate) const PART: usize = 32;

/// The shape of a layer's cache.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct KvLayout {
    /// Key-value heads.
    pub kv_heads: usize,
    /// Dimensions of a head; an even number.
    pub head_dim: usize,
    /// [`Element::Bf16`] or [`Element::F32`].
    pub element: Element,
}

impl KvLayout {
    /// Bytes of the keys (or of the values) of a page.
    pub fn page_bytes(&self) -> usize {
        self.kv_heads * self.head_bytes()
    }

    /// Bytes of the keys (or of the values) of one head in a page.
    pub(crate) fn head_bytes(&self) -> usize {
        PAGE * self.head_dim * self.element.bytes()
    }

    /// Element index of dimension `d` of the key in `slot`, within its head.
    #[inline(always)]
    pub(crate) fn key_index(&self, slot: usize, d: usize) -> usize {
        match self.element {
            Element::F32 => d * PAGE + slot,
            _ => (d / 2 * PAGE + slot) * 2 + d % 2,
        }
    }

    /// Element index of dimension `d` of the value in `slot`, within its head.
    #[inline(always)]
    pub(crate) fn value_index(&self, slot: usize, d: usize) -> usize {
        let first = d / PART * PART;
        let width = PART.min(self.head_dim - first);
        first * PAGE + slot * width + d - first
    }
}

/// Writes key and value rows into pages: row `r` goes to slot `slots[r] % 64` of page `slots[r] / 64`.
///
/// `k` and `v` are `[rows, kv_heads, head_dim]`, rows at a distance of `stride` elements; bf16 caches take
/// values that bf16 has (others are rounded). Slots must differ from each other.
///
/// # Panics
/// If the sizes do not fit each other or a slot lies outside of the pages.
pub fn store_kv(
    pool: &Pool,
    layout: KvLayout,
    keys: &mut [u8],
    values: &mut [u8],
    k: &[f32],
    v: &[f32],
    stride: usize,
    slots: &[usize],
) {
    let width = layout.kv_heads * layout.head_dim;
    assert!(width <= stride || slots.len() <= 1, "rows of keys overlap");
    assert!(layout.head_dim % 2 == 0, "head_dim {} is odd", layout.head_dim);
    let (page_bytes, head_bytes) = (layout.page_bytes(), layout.head_bytes());
    debug_assert!(
        slots.iter().collect::<std::collections::HashSet<_>>().len() == slots.len(),
        "two rows for one slot"
    );
    let (keys, values) = (SharedMut::new(keys), SharedMut::new(values));
    // Neighbouring rows share cache lines of a page: a thread takes many.
    pool.run_chunks(slots.len(), 128, |rows| {
        for row in rows {
            let (page, slot) = (slots[row] / PAGE, slots[row] % PAGE);
            for head in 0..layout.kv_heads {
                let from = row * stride + head * layout.head_dim;
                let (k, v) = (&k[from..][..layout.head_dim], &v[from..][..layout.head_dim]);
                let at = page * page_bytes + head * head_bytes;
                for d in 0..layout.head_dim {
                    write(keys, layout.element, at, layout.key_index(slot, d), k[d]);
                    write(values, layout.element, at, layout.value_index(slot, d), v[d]);
                }
            }
        }
    });
}

/// Reads back the key and the value of one position and head.
///
/// # Panics
/// If the slot lies outside of the pages.
pub fn load_kv(layout: KvLayout, keys: &[u8], values: &[u8], slot: usize, head: usize) -> (Vec<f32>, Vec<f32>) {
    let at = slot / PAGE * layout.page_bytes() + head * layout.head_bytes();
    let slot = slot % PAGE;
    let key = (0..layout.head_dim).map(|d| read(keys, layout.element, at, layout.key_index(slot, d)));
    let value = (0..layout.head_dim).map(|d| read(values, layout.element, at, layout.value_index(slot, d)));
    (key.collect(), value.collect())
}

#[inline(always)]
fn write(to: SharedMut<'_, u8>, element: Element, at: usize, index: usize, x: f32) {
    let size = element.bytes();
    // SAFETY: slots differ, so each element is written by one thread, once.
    let to = unsafe { to.range(at + index * size, size) };
    match element {
        Element::Bf16 => to.copy_from_slice(&half::bf16::from_f32(x).to_le_bytes()),
        Element::F16 => to.copy_from_slice(&half::f16::from_f32(x).to_le_bytes()),
        Element::F32 => to.copy_from_slice(&x.to_le_bytes()),
    }
}

fn read(from: &[u8], element: Element, at: usize, index: usize) -> f32 {
    let size = element.bytes();
    let from = &from[at + index * size..][..size];
    match element {
        Element::Bf16 => half::bf16::from_le_bytes([from[0], from[1]]).to_f32(),
        Element::F16 => half::f16::from_le_bytes([from[0], from[1]]).to_f32(),
        Element::F32 => f32::from_le_bytes([from[0], from[1], from[2], from[3]]),
    }
}
