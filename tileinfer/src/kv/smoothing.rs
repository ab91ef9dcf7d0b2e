//! What the keys of an int8 cache are divided by: the factors as plain numbers, where they come from in a tensor of
//! keys, and the file that holds them.
//!
//! In some models a few channels of the keys are much larger than the others, and one scale a vector then leaves few
//! levels for the rest. Dividing channel `c` of every key by a factor, and multiplying channel `c` of the queries by
//! it, changes no score. Who measures the keys is not known here.

use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::{Error, Result};

/// The factors of every layer, f32 `[kv_heads, head_dim]` each; or none, which is a factor of 1 everywhere. They are
/// fixed as long as a cache lives: pages made under other factors hold other numbers.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct KeySmoothing {
    layers: Vec<Vec<f32>>,
}

impl KeySmoothing {
    /// Keys are rounded as they are.
    pub fn none() -> Self {
        KeySmoothing::default()
    }

    /// The factors of each layer.
    ///
    /// # Errors
    /// [`Error::Usage`] if one is no positive number.
    pub fn new(layers: Vec<Vec<f32>>) -> Result<Self> {
        for (layer, factors) in layers.iter().enumerate() {
            let wrong = factors.iter().find(|f| !(f.is_normal() && **f > 0.0));
            if let Some(factor) = wrong {
                return Err(Error::usage(format!(
                    "smoothing factor {factor} of layer {layer} is no positive number"
                )));
            }
        }
        Ok(KeySmoothing { layers })
    }

    /// The factors of `layer`, `[kv_heads, head_dim]`.
    pub fn layer(&self, layer: usize) -> Option<&[f32]> {
        self.layers.get(layer).map(Vec::as_slice)
    }

    /// Whether there are factors.
    pub fn is_none(&self) -> bool {
        self.layers.is_empty()
    }

    /// Whether these factors, if there are any, are for a model of this shape.
    ///
    /// # Errors
    /// [`Error::Usage`] if not.
    pub fn check(&self, layers: usize, kv_heads: usize, head_dim: usize) -> Result<()> {
        let width = kv_heads * head_dim;
        let fits = self.layers.len() == layers && self.layers.iter().all(|l| l.len() == width);
        if self.is_none() || fits {
            return Ok(());
        }
        let (found, of) = (self.layers.len(), self.layers.first().map_or(0, Vec::len));
        Err(Error::usage(format!(
            "key smoothing for {found} layers of {of} channels does not fit a model of {layers} layers of {width}"
        )))
    }

    /// Reads factors from a JSON file: `{"layers": [[factor, ...], ...]}`, `kv_heads * head_dim` numbers a layer.
    ///
    /// # Errors
    /// `Io` if the file cannot be read, [`Error::Usage`] naming it if it holds something else.
    pub fn read(path: &Path) -> Result<Self> {
        let text = std::fs::read(path).map_err(|error| Error::io(path, error))?;
        let read: KeySmoothing = serde_json::from_slice(&text).map_err(|error| {
            Error::usage(format!(
                "{}: not a file of smoothing factors, which is {{\"layers\": [[factor, ...], ...]}}: {error}",
                path.display()
            ))
        })?;
        KeySmoothing::new(read.layers)
            .map_err(|error| Error::usage(format!("{}: {error}", path.display())))
    }
}

/// The factors of one head from its keys, `[tokens, head_dim]`: of channel `c` with `top_c` the largest magnitude over
/// the tokens, `(top_c / geometric mean of all top) ^ power`. Power 1 gives all channels the same largest value; the
/// geometric mean of the factors is 1. A channel of zeros gets 1 and is left out of the mean. In f64, kept in f32.
pub fn factors(keys: &[f32], head_dim: usize, power: f64) -> Vec<f32> {
    let mut top = vec![0.0_f64; head_dim];
    for key in keys.chunks_exact(head_dim) {
        for (top, key) in top.iter_mut().zip(key) {
            *top = top.max(f64::from(key.abs()));
        }
    }
    let logs = top.iter().filter(|top| **top > 0.0).map(|top| top.ln());
    let (sum, count) = logs.fold((0.0, 0), |(sum, count), log| (sum + log, count + 1));
    let mean = sum / f64::from(count.max(1));
    let factor = |top: &f64| {
        if *top > 0.0 {
            ((top.ln() - mean) * power).exp() as f32
        } else {
            1.0
        }
    };
    top.iter().map(factor).collect()
}
