//! Where keys and values lie inside a page.
//!
//! A page is `(page, kv_head, unit, inside)`; a unit is 64 positions (or the page, if its size is no multiple
//! of 64). Inside a unit of one head:
//! - keys `[head_dim / 2][slots][2]` in bf16, `[head_dim][slots]` in f32 and int8: a vector holds the same
//!   dimensions of neighbouring positions, so scores need no sums across lanes;
//! - values `[head_dim / 32][slots][32]` (the last part may be narrower): each part is one stream;
//! - of int8 the scales, f32 `(page, kv_head, slot)`, one array for keys and one for values.
//!
//! What int8 vectors are is written down in [`tileinfer::weights::int8`].
//! What this module decided not to know: whose pages they are.

use tileinfer::backend::ComputeType;
use tileinfer::kv::{KvElement, KvLayout};
use tileinfer::{Error, Result};

use crate::SharedMut;
use crate::memory::Aligned;
use crate::simd::{Isa, Kernel, Level};

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
    /// Of int8 one a vector, else none.
    pub(crate) key_scales: Aligned<f32>,
    pub(crate) value_scales: Aligned<f32>,
    /// What int8 keys were divided by, `[kv_heads, head_dim]`; empty: nothing.
    pub(crate) factors: Vec<f32>,
}

/// How elements are kept.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Kept {
    Bf16,
    F32,
    Int8,
}

impl Kept {
    /// Bytes of one.
    pub(crate) fn size(self) -> usize {
        match self {
            Kept::Bf16 => 2,
            Kept::F32 => 4,
            Kept::Int8 => 1,
        }
    }
}

/// The shape of a page, as numbers that the kernels use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Geometry {
    pub(crate) page_size: usize,
    pub(crate) kv_heads: usize,
    pub(crate) head_dim: usize,
    pub(crate) kind: Kept,
    /// Slots of a unit.
    pub(crate) unit: usize,
}

impl Pages {
    /// `pages` zeroed pages.
    ///
    /// # Errors
    /// An odd head dimension; more bytes than can be addressed.
    pub(crate) fn new(layout: &KvLayout, factors: Option<&[f32]>, pages: usize) -> Result<Self> {
        let &KvLayout {
            page_size,
            kv_heads,
            head_dim,
            element,
        } = layout;
        let kind = match element {
            KvElement::Compute(ComputeType::Bf16) => Kept::Bf16,
            KvElement::Compute(ComputeType::F32) => Kept::F32,
            KvElement::Int8 => Kept::Int8,
        };
        let factors = factors.unwrap_or_default().to_vec();
        let wanted = [0, kv_heads * head_dim];
        if !wanted.contains(&factors.len()) || (kind != Kept::Int8 && !factors.is_empty()) {
            let count = factors.len();
            return Err(Error::Bug(format!(
                "{count} smoothing factors for {} channels of {kind:?}",
                wanted[1]
            )));
        }
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
        let scales = if kind == Kept::Int8 {
            pages * geometry.page_scales()
        } else {
            0
        };
        Ok(Pages {
            geometry,
            keys: Aligned::new(bytes, 0),
            values: Aligned::new(bytes, 0),
            key_scales: Aligned::new(scales, 0.0),
            value_scales: Aligned::new(scales, 0.0),
            factors,
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
        if self.geometry.kind == Kept::Int8 {
            let len = self.geometry.page_scales();
            for &(from, to) in copies {
                let (from, to) = (from as usize * len, to as usize * len);
                self.key_scales.copy_within(from..from + len, to);
                self.value_scales.copy_within(from..from + len, to);
            }
        }
    }

    /// What keys of `head` were divided by.
    pub(crate) fn factors(&self, head: usize) -> Option<&[f32]> {
        let dims = self.geometry.head_dim;
        (!self.factors.is_empty()).then(|| &self.factors[head * dims..(head + 1) * dims])
    }

    /// The key and the value at `(page, head, offset)`.
    pub(crate) fn read(&self, page: usize, head: usize, offset: usize) -> (Vec<f32>, Vec<f32>) {
        let geometry = self.geometry;
        let slot = geometry.slot(page, head, offset);
        let dims = 0..geometry.head_dim;
        let mut key: Vec<f32> = dims
            .clone()
            .map(|d| geometry.read(&self.keys, slot.key(geometry, d)))
            .collect();
        let mut value: Vec<f32> = dims
            .map(|d| geometry.read(&self.values, slot.value(geometry, d)))
            .collect();
        if geometry.kind == Kept::Int8 {
            let at = geometry.scale(page, head, offset);
            key.iter_mut().for_each(|k| *k *= self.key_scales[at]);
            value.iter_mut().for_each(|v| *v *= self.value_scales[at]);
        }
        for (key, factor) in key.iter_mut().zip(self.factors(head).into_iter().flatten()) {
            *key *= factor;
        }
        (key, value)
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

    /// Scales of the keys (or of the values) of a page.
    pub(crate) fn page_scales(&self) -> usize {
        self.page_size * self.kv_heads
    }

    /// Index of the scale of one position and head.
    #[inline(always)]
    pub(crate) fn scale(&self, page: usize, head: usize, offset: usize) -> usize {
        (page * self.kv_heads + head) * self.page_size + offset
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
            Kept::Bf16 => half::bf16::from_le_bytes([from[at], from[at + 1]]).to_f32(),
            Kept::F32 => f32::from_le_bytes([from[at], from[at + 1], from[at + 2], from[at + 3]]),
            Kept::Int8 => f32::from(from[at] as i8),
        }
    }

    /// Writes a value's elements, `BYTES` each, to its slot.
    ///
    /// # Safety
    /// No other thread may touch this position of these pages.
    #[inline(always)]
    unsafe fn write_value<T: Copy, const BYTES: usize>(
        self,
        values: SharedMut<'_, u8>,
        slot: Slot,
        value: &[T],
        bytes: impl Fn(T) -> [u8; BYTES],
    ) {
        for part in (0..self.head_dim).step_by(PART) {
            let part = part..self.head_dim.min(part + PART);
            // SAFETY: elements of this position, which is ours by the caller's promise.
            let to = unsafe { values.range(slot.value(self, part.start), part.len() * BYTES) };
            for (to, &x) in to.as_chunks_mut().0.iter_mut().zip(&value[part]) {
                *to = bytes(x);
            }
        }
    }

    /// Writes a key's elements, `BYTES` each, to its slot, where they do not lie together.
    ///
    /// # Safety
    /// As for [`Geometry::write_value`].
    #[inline(always)]
    unsafe fn write_key<T: Copy, const BYTES: usize>(
        self,
        keys: SharedMut<'_, u8>,
        slot: Slot,
        key: &[T],
        bytes: impl Fn(T) -> [u8; BYTES],
    ) {
        for (d, &x) in key.iter().enumerate() {
            // SAFETY: an element of this position, which is ours by the caller's promise.
            let to = unsafe { keys.range(slot.key(self, d), BYTES) };
            to.copy_from_slice(&bytes(x));
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
        // SAFETY: the caller's promise, for all of these.
        unsafe {
            match self.kind {
                Kept::Bf16 => {
                    self.write_value(values, slot, value, |x| {
                        ((x.to_bits() >> 16) as u16).to_le_bytes()
                    });
                    for (pair, x) in key.as_chunks::<2>().0.iter().enumerate() {
                        let bits = (x[0].to_bits() >> 16) | (x[1].to_bits() & 0xffff_0000);
                        let to = keys.range(slot.key(self, 2 * pair), 4);
                        to.copy_from_slice(&bits.to_le_bytes());
                    }
                }
                Kept::F32 => {
                    self.write_value(values, slot, value, f32::to_le_bytes);
                    self.write_key(keys, slot, key, f32::to_le_bytes);
                }
                Kept::Int8 => unreachable!("int8 vectors are rounded first. This is a bug"),
            }
        }
    }

    /// [`Geometry::write`] of vectors that are int8.
    ///
    /// # Safety
    /// No other thread may touch this position of these pages.
    #[inline(always)]
    pub(crate) unsafe fn write_int8(
        self,
        keys: SharedMut<'_, u8>,
        values: SharedMut<'_, u8>,
        slot: Slot,
        key: &[i8],
        value: &[i8],
    ) {
        let n = self.head_dim;
        // SAFETY: the caller's promise.
        unsafe {
            self.write_value(values, slot, &value[..n], |x| [x as u8]);
            self.write_key(keys, slot, &key[..n], |x| [x as u8]);
        }
    }
}

/// Rounds a vector, divided by `factors` if there are any, to int8; its scale. The rule of
/// [`tileinfer::weights::int8::round_row`].
pub(crate) fn round_vector(
    level: Level,
    x: &[f32],
    factors: Option<&[f32]>,
    divided: &mut [f32],
    q: &mut [i8],
) -> f32 {
    level.dispatch(RoundVector {
        x,
        factors,
        divided,
        q,
    })
}

struct RoundVector<'a> {
    x: &'a [f32],
    factors: Option<&'a [f32]>,
    /// Room for the vector after division.
    divided: &'a mut [f32],
    q: &'a mut [i8],
}

impl Kernel for RoundVector<'_> {
    type Output = f32;
    // Plain loops: with the features of the level they become vectors, and every operation of them is exact in IEEE's
    // sense, so they are the same everywhere.
    #[inline(always)]
    fn run<I: Isa>(self, _: I) -> f32 {
        use tileinfer::weights::int8::LEVELS;
        let RoundVector {
            x,
            factors,
            divided,
            q,
        } = self;
        let n = x.len();
        let (divided, q) = (&mut divided[..n], &mut q[..n]);
        match factors {
            Some(factors) => {
                for ((out, x), factor) in divided.iter_mut().zip(x).zip(factors) {
                    *out = x / factor;
                }
            }
            None => divided.copy_from_slice(x),
        }
        let mut top = 0;
        for x in divided.iter() {
            // Numbers without a sign are in order as bits; infinity comes after them, then NaN.
            top = std::cmp::max(top, x.to_bits() & 0x7fff_ffff);
        }
        let top = f32::from_bits(top);
        if !top.is_finite() {
            q.fill(0);
            return f32::NAN;
        }
        let scale = if top > 0.0 { top / LEVELS } else { 1.0 };
        // Adding 1.5 * 2^23 leaves the nearest integer in the low bits, ties to even.
        const MAGIC: f32 = 12_582_912.0;
        for (q, x) in q.iter_mut().zip(divided.iter()) {
            let near = (x / scale).clamp(-LEVELS, LEVELS) + MAGIC;
            *q = near.to_bits().wrapping_sub(MAGIC.to_bits()) as i8;
        }
        scale
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
fn key_index(kind: Kept, unit: usize, slot: usize, d: usize) -> usize {
    match kind {
        Kept::Bf16 => (d / 2 * unit + slot) * 2 + d % 2,
        Kept::F32 | Kept::Int8 => d * unit + slot,
    }
}

/// Index of dimension `d` of the value in `slot`.
#[inline(always)]
fn value_index(unit: usize, head_dim: usize, slot: usize, d: usize) -> usize {
    let first = d / PART * PART;
    first * unit + slot * PART.min(head_dim - first) + d - first
}
