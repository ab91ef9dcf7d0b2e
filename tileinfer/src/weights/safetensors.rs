//! The header of a safetensors file: eight bytes of length (little-endian), then JSON that says where each tensor lies.
//!
//! As strict as the format's definition: the tensors must cover the data without overlap or gap. Nothing here opens a
//! file, so a header fetched on its own can be read too.

use crate::{Error, Result};
use serde::de::{Deserialize, Deserializer, IgnoredAny, MapAccess, Visitor};
use serde::{Deserialize as DeserializeDerive, Serialize};
use std::collections::HashSet;
use std::fmt;
use std::ops::Range;
use std::path::Path;

/// Longest header that the format allows, in bytes.
const HEADER_LIMIT: u64 = 100_000_000;

/// Element type of a tensor in a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize)]
#[serde(rename_all = "lowercase")]
#[expect(missing_docs, reason = "the names say it all")]
pub enum Dtype {
    Bool,
    U8,
    I8,
    F8E4m3,
    F8E5m2,
    F8E8m0,
    U16,
    I16,
    F16,
    Bf16,
    U32,
    I32,
    F32,
    U64,
    I64,
    F64,
    C64,
}

impl Dtype {
    const NAMES: [(Dtype, &str, usize); 17] = [
        (Dtype::Bool, "BOOL", 1),
        (Dtype::U8, "U8", 1),
        (Dtype::I8, "I8", 1),
        (Dtype::F8E4m3, "F8_E4M3", 1),
        (Dtype::F8E5m2, "F8_E5M2", 1),
        (Dtype::F8E8m0, "F8_E8M0", 1),
        (Dtype::U16, "U16", 2),
        (Dtype::I16, "I16", 2),
        (Dtype::F16, "F16", 2),
        (Dtype::Bf16, "BF16", 2),
        (Dtype::U32, "U32", 4),
        (Dtype::I32, "I32", 4),
        (Dtype::F32, "F32", 4),
        (Dtype::U64, "U64", 8),
        (Dtype::I64, "I64", 8),
        (Dtype::F64, "F64", 8),
        (Dtype::C64, "C64", 8),
    ];

    /// Bytes of one element.
    pub fn size(self) -> usize {
        Self::NAMES[self as usize].2
    }

    /// Its name in a header.
    pub(super) fn header_name(self) -> &'static str {
        Self::NAMES[self as usize].1
    }

    fn from_header(name: &str) -> Option<Self> {
        let known = Self::NAMES.iter().find(|(_, known, _)| *known == name)?;
        Some(known.0)
    }

    /// By the name that PyTorch and `config.json` use; `None` for types that weights do not have.
    pub(crate) fn from_torch(name: &str) -> Option<Self> {
        match name.strip_prefix("torch.").unwrap_or(name) {
            "bfloat16" => Some(Dtype::Bf16),
            "float16" => Some(Dtype::F16),
            "float32" => Some(Dtype::F32),
            _ => None,
        }
    }
}

impl fmt::Display for Dtype {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.header_name())
    }
}

/// Where a tensor lies.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct TensorInfo {
    /// Its name in the file.
    pub name: String,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions, the last one contiguous; empty for a scalar.
    pub shape: Vec<usize>,
    /// Its bytes, counted from the start of the file.
    pub range: Range<usize>,
}

/// A parsed and checked header.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Header {
    /// The tensors, in the order of their bytes.
    pub tensors: Vec<TensorInfo>,
}

impl Header {
    /// Bytes from the start of the file to the first tensor, from the file's first eight bytes.
    ///
    /// # Errors
    /// `BadModel` if the file is too short or the length is absurd.
    pub fn data_start(path: &Path, head: &[u8], file_len: u64) -> Result<usize> {
        let Some(length) = head.first_chunk::<8>() else {
            return Err(Error::bad_model(
                path,
                format!(
                    "truncated: {file_len} bytes are too few for a safetensors file; download it again"
                ),
            ));
        };
        let length = u64::from_le_bytes(*length);
        if length > HEADER_LIMIT {
            return Err(Error::bad_model(
                path,
                format!(
                    "not a safetensors file: its first eight bytes announce a header of {length} bytes, the limit is {HEADER_LIMIT}"
                ),
            ));
        }
        let start = 8 + length;
        if start > file_len {
            return Err(Error::bad_model(
                path,
                format!(
                    "truncated: the header ends at byte {start} and the file has {file_len} bytes; download it again"
                ),
            ));
        }
        Ok(start as usize)
    }

    /// Parses and checks the header of the file `path` of `file_len` bytes; `head` is its beginning, at least up to
    /// [`data_start`](Self::data_start).
    ///
    /// # Errors
    /// `BadModel` naming the tensor and the numbers that do not fit together.
    pub fn parse(path: &Path, head: &[u8], file_len: u64) -> Result<Self> {
        let bad = |reason: String| Error::bad_model(path, reason);
        let start = Self::data_start(path, head, file_len)?;
        let text = head.get(8..start).ok_or_else(|| {
            Error::Bug(format!(
                "{} bytes of a header of {start} were given",
                head.len()
            ))
        })?;
        let Entries(entries) = serde_json::from_slice(text)
            .map_err(|error| bad(format!("the safetensors header is not valid: {error}")))?;

        let data_len = file_len - start as u64;
        let mut seen = HashSet::with_capacity(entries.len());
        let mut tensors = Vec::with_capacity(entries.len());
        for (name, entry) in &entries {
            if !seen.insert(name) {
                return Err(bad(format!("tensor {} occurs twice", shown(name))));
            }
            let name_shown = shown(name);
            let dtype = Dtype::from_header(&entry.dtype).ok_or_else(|| {
                bad(format!(
                    "tensor {name_shown} has the unknown dtype {}",
                    shown(&entry.dtype)
                ))
            })?;
            let [begin, end] = entry.data_offsets;
            if begin > end {
                return Err(bad(format!(
                    "tensor {name_shown} begins at byte {begin} of the data, after its end at {end}"
                )));
            }
            let bytes = entry
                .shape
                .iter()
                .try_fold(dtype.size() as u64, |bytes, &n| bytes.checked_mul(n));
            if bytes != Some(end - begin) {
                return Err(bad(format!(
                    "tensor {name_shown} is {dtype} {:?} but has {} bytes",
                    &entry.shape[..entry.shape.len().min(8)],
                    end - begin
                )));
            }
            if end > data_len {
                return Err(bad(format!(
                    "truncated: tensor {name_shown} ends at byte {end} of the data and the file has {data_len} bytes of data; download it again"
                )));
            }
            tensors.push(TensorInfo {
                name: name.clone(),
                dtype,
                shape: entry.shape.iter().map(|&n| n as usize).collect(),
                range: start + begin as usize..start + end as usize,
            });
        }

        tensors.sort_by_key(|tensor| (tensor.range.start, tensor.range.end));
        let mut end = start;
        for tensor in &tensors {
            if tensor.range.start != end {
                let what = if tensor.range.start < end {
                    "overlaps the one before it"
                } else {
                    "leaves a gap before it"
                };
                let name = shown(&tensor.name);
                return Err(bad(format!("tensor {name} {what}; the file is damaged")));
            }
            end = tensor.range.end;
        }
        if end as u64 != file_len {
            return Err(bad(format!(
                "{} bytes follow the last tensor; the file is damaged",
                file_len - end as u64
            )));
        }
        Ok(Header { tensors })
    }
}

/// A name from a file, fit to be printed.
pub(super) fn shown(name: &str) -> String {
    if name.len() <= 120 && !name.contains(char::is_control) {
        return name.to_owned();
    }
    let start: String = name.chars().take(120).collect();
    format!("{start:?}…")
}

#[derive(DeserializeDerive)]
struct Entry {
    dtype: String,
    shape: Vec<u64>,
    data_offsets: [u64; 2],
}

/// The header's object as a list, so that a name that occurs twice is not lost.
struct Entries(Vec<(String, Entry)>);

impl<'de> Deserialize<'de> for Entries {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Entries;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of tensors")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Entries, A::Error> {
                let mut entries = Vec::new();
                while let Some(name) = map.next_key::<String>()? {
                    if name == "__metadata__" {
                        map.next_value::<IgnoredAny>()?;
                    } else {
                        entries.push((name, map.next_value()?));
                    }
                }
                Ok(Entries(entries))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}
