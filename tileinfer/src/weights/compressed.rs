//! Checkpoints in the format of compressed-tensors whose linears are int8 with one scale a row: which they are, and how
//! such a matrix lies in the file. What is multiplied with them is not known here; activations are never read in fewer
//! bits than the engine keeps, whatever the checkpoint says about them.

use super::checkpoint::Checkpoint;
use super::safetensors::{Dtype, shown};
use super::tensor::{WeightData, WeightPart};
use crate::config::ModelConfig;
use serde_json::Value;
use std::fmt;
use std::sync::Arc;

/// An int8 checkpoint that can be loaded, by how it was meant to run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Int8Scheme {
    /// Weights alone: `pack-quantized`, four integers a word.
    W8A16,
    /// Weights and activations: `int-quantized`. Here it runs as [`Int8Scheme::W8A16`]: activations keep 16 bits.
    W8A8,
}

impl fmt::Display for Int8Scheme {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Int8Scheme::W8A16 => "int8 weights, 16-bit activations",
            Int8Scheme::W8A8 => {
                "int8 weights; made for 8-bit activations, which are kept at 16 bits here"
            }
        })
    }
}

impl Int8Scheme {
    /// The scheme of a model's `quantization_config`; none: its weights are plain.
    ///
    /// # Errors
    /// Why it cannot be loaded.
    pub fn of(config: &ModelConfig) -> Result<Option<Self>, String> {
        let Some(quantization) = &config.quantization else {
            return Ok(None);
        };
        let text =
            |value: Option<&Value>| shown(value.and_then(Value::as_str).unwrap_or("no name"));
        if quantization["quant_method"] != "compressed-tensors" {
            return Err(format!(
                "quantization_config asks for quantized weights ({}), which are not supported; use the model's original in bf16",
                text(quantization.get("quant_method"))
            ));
        }
        let scheme = match quantization["format"].as_str() {
            Some("int-quantized") => Int8Scheme::W8A8,
            Some("pack-quantized") => Int8Scheme::W8A16,
            _ => {
                return Err(format!(
                    "quantization_config has the format {}; of compressed-tensors pack-quantized and int-quantized are supported",
                    text(quantization.get("format"))
                ));
            }
        };
        let groups = quantization["config_groups"].as_object();
        for group in groups.into_iter().flat_map(|groups| groups.values()) {
            let weights = &group["weights"];
            let is = |field: &str, wanted: Value| weights[field] == wanted;
            let strategy = is("strategy", "channel".into())
                || (weights["strategy"].is_null() && is("group_size", (-1).into()));
            let fits = is("num_bits", 8.into())
                && is("type", "int".into())
                && !is("symmetric", false.into())
                && strategy;
            if !fits {
                return Err(format!(
                    "quantization_config rounds weights to num_bits {}, type {}, symmetric {}, strategy {}; supported are 8, int, true and channel (one scale a row)",
                    shown(&weights["num_bits"].to_string()),
                    shown(&weights["type"].to_string()),
                    shown(&weights["symmetric"].to_string()),
                    shown(&weights["strategy"].to_string()),
                ));
            }
        }
        Ok(Some(scheme))
    }
}

/// Names of tensors that belong to an int8 matrix `base` and are not read, as activations and the cache are not kept as
/// the checkpoint says: their end.
pub(super) const UNUSED: [&str; 5] = [
    ".input_scale",
    ".input_zero_point",
    ".output_scale",
    ".k_scale",
    ".v_scale",
];

/// The int8 matrix `base` of `rows` × `cols`, and the names of its tensors. `None` if it is not there in int8; `Err` says
/// what is wrong with it.
pub(super) fn int8_part(
    checkpoint: &Checkpoint,
    base: &str,
    rows: usize,
    cols: usize,
) -> Option<Result<(WeightPart, Vec<String>), String>> {
    let packed = format!("{base}.weight_packed");
    let plain = format!("{base}.weight");
    let is_int8 = |name: &str| {
        let tensor = checkpoint.tensor(name)?;
        (tensor.dtype == Dtype::I8).then_some(())
    };
    let name = if checkpoint.tensor(&packed).is_some() {
        packed
    } else {
        is_int8(&plain)?;
        plain
    };
    Some(read(checkpoint, base, name, rows, cols))
}

fn read(
    checkpoint: &Checkpoint,
    base: &str,
    name: String,
    rows: usize,
    cols: usize,
) -> Result<(WeightPart, Vec<String>), String> {
    let tensor = checkpoint
        .tensor(&name)
        .ok_or_else(|| format!("{name} is missing"))?;
    let scale_name = format!("{base}.weight_scale");
    let scale = checkpoint
        .tensor(&scale_name)
        .ok_or_else(|| format!("{scale_name} is missing"))?;
    if scale.shape != [rows, 1] && scale.shape != [rows] {
        let found = &scale.shape[..scale.shape.len().min(8)];
        return Err(format!(
            "{scale_name} has the shape {found:?} and should have one scale for each of {rows} rows"
        ));
    }
    let scales: Arc<[f32]> = WeightPart::from_tensor(scale)?.to_f32().into();
    if let Some(scale) = scales.iter().find(|scale| !scale.is_finite()) {
        return Err(format!("{scale_name} holds {scale}"));
    }
    let mut names = vec![scale_name];
    for (end, wanted) in [
        ("weight_zero_point", [0, 0]),
        ("weight_shape", [rows, cols]),
    ] {
        let name = format!("{base}.{end}");
        let Some(tensor) = checkpoint.tensor(&name) else {
            continue;
        };
        let fits = match end {
            "weight_shape" => {
                let numbers = tensor.data.as_chunks::<8>().0.iter();
                tensor.dtype == Dtype::I64
                    && numbers
                        .map(|&n| i64::from_le_bytes(n))
                        .eq(wanted.map(|n| n as i64))
            }
            _ => tensor.data.iter().all(|byte| *byte == 0),
        };
        if !fits {
            return Err(match end {
                "weight_shape" => format!("{name} does not say {rows} × {cols}"),
                _ => format!("{name} is not zero; only symmetric rounding is supported"),
            });
        }
        names.push(name);
    }
    let wanted = match tensor.dtype {
        Dtype::I8 => [rows, cols],
        _ => [rows, cols.div_ceil(4)],
    };
    if tensor.shape != wanted || !matches!(tensor.dtype, Dtype::I8 | Dtype::I32) {
        let found = &tensor.shape[..tensor.shape.len().min(8)];
        return Err(format!(
            "{name} is {} of the shape {found:?}, config.json says {wanted:?} of I8, or of I32 packed",
            tensor.dtype
        ));
    }
    let data = match tensor.dtype {
        Dtype::I8 => WeightData::Int8 {
            values: tensor.data,
            scales,
        },
        _ => WeightData::OwnedInt8 {
            values: unpack(&tensor.data, cols),
            scales,
        },
    };
    names.push(name);
    let part = WeightPart::new(rows, cols, data).map_err(|error| error.to_string())?;
    Ok((part, names))
}

/// Bytes that hold `q + 128`, rows filled up to whole words, as `q`.
fn unpack(bytes: &[u8], cols: usize) -> Arc<[i8]> {
    let row_bytes = cols.next_multiple_of(4).max(4);
    let rows = bytes.chunks_exact(row_bytes);
    rows.flat_map(|row| row[..cols].iter().map(|byte| (byte ^ 0x80) as i8))
        .collect()
}

/// `q` as bytes that hold `q + 128`, rows filled up to whole words with zeros.
pub(super) fn pack(values: &[i8], cols: usize) -> Vec<u8> {
    let row_bytes = cols.next_multiple_of(4);
    let mut bytes = Vec::with_capacity(values.len() / cols.max(1) * row_bytes);
    for row in values.chunks_exact(cols.max(1)) {
        bytes.extend(row.iter().map(|&q| q as u8 ^ 0x80));
        bytes.resize(bytes.len() + row_bytes - cols, 0);
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::{pack, unpack};

    #[test]
    fn rows_are_filled_up_to_whole_words() {
        for cols in 1..=9 {
            let values: Vec<i8> = (0..3 * cols).map(|i| (i * 29 + 128) as u8 as i8).collect();
            let bytes = pack(&values, cols);
            assert_eq!(bytes.len(), 3 * cols.next_multiple_of(4));
            // Element i of a row is byte i of its words, raised by 128.
            assert_eq!(
                bytes[cols.next_multiple_of(4)],
                (i16::from(values[cols]) + 128) as u8
            );
            assert_eq!(unpack(&bytes, cols)[..], values);
        }
    }
}
