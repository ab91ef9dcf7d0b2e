//! Measures the keys of a model on a short fixed text, to choose what an int8 cache divides them by. It does not know
//! what becomes of the factors.

use super::{DecoderLM, Workspace, forward};
use crate::backend::{Backend, StepLayout};
use crate::kv::{KeySmoothing, KvElement, KvLayout, PAGE_SIZE, smoothing_factors};
use crate::{Error, Result};

/// The text that keys are measured on: prose, instructions, code, data and a few languages, written for this project.
pub const CALIBRATION_TEXT: &str = include_str!("calibration.txt");
/// Tokens of it that are used.
pub const CALIBRATION_TOKENS: usize = 512;
/// Rows of a step: their results do not depend on it.
const ROWS: usize = 128;

/// The smoothing of `model`'s keys: runs the first [`CALIBRATION_TOKENS`] of `ids` through it with a cache of the
/// compute type, and takes [`smoothing_factors`] of each head's keys with power 1. Deterministic.
///
/// # Errors
/// [`Error::Usage`] if there are no ids; what the backend fails with.
pub fn calibrate<B: Backend>(
    backend: &B,
    model: &DecoderLM<B>,
    ids: &[u32],
) -> Result<KeySmoothing> {
    let ids = &ids[..ids.len().min(CALIBRATION_TOKENS).min(model.max_length())];
    if ids.is_empty() {
        return Err(Error::usage("there are no tokens to measure keys on"));
    }
    let shape = model.layers[0].attention;
    let kv = KvLayout {
        page_size: PAGE_SIZE,
        kv_heads: shape.kv_heads,
        head_dim: shape.head_dim,
        element: KvElement::Compute(backend.compute_type()),
    };
    let pages = kv.pages_for(ids.len());
    let mut cache = (model.layers.iter())
        .map(|_| backend.alloc_pages(&kv, None, pages))
        .collect::<Result<Vec<_>>>()?;
    let rows = ROWS.min(ids.len());
    let mut ws = Workspace::new(backend, model, rows, 1, pages, &[])?;
    for (chunk, part) in ids.chunks(rows).enumerate() {
        let positions = (chunk * rows..).map(|position| position as u32);
        let positions: Vec<u32> = positions.take(part.len()).collect();
        let layout = StepLayout {
            span_rows: vec![0, part.len() as u32],
            ids: part.to_vec(),
            // Page i holds the positions from 64 i on, so a position is its slot.
            slots: positions.clone(),
            positions,
            tables: (0..pages as u32).collect(),
            table_width: pages,
            first_pages: vec![0],
            ..StepLayout::default()
        };
        ws.begin(backend, model, &layout, None)?;
        forward(backend, model, &mut cache, &mut ws)?;
    }
    let layers = cache.iter().map(|layer| {
        let mut heads = vec![Vec::new(); shape.kv_heads];
        for page in 0..pages {
            let keys = backend.read_keys(layer, &kv, page)?;
            let seen = (ids.len() - page * PAGE_SIZE).min(PAGE_SIZE) * shape.head_dim;
            let of_head = keys.chunks_exact(PAGE_SIZE * shape.head_dim);
            for (head, keys) in heads.iter_mut().zip(of_head) {
                head.extend_from_slice(&keys[..seen]);
            }
        }
        let factors = heads
            .iter()
            .flat_map(|keys| smoothing_factors(keys, shape.head_dim, 1.0));
        Ok(factors.collect())
    });
    KeySmoothing::new(layers.collect::<Result<_>>()?)
}
