//! The safetensors files of a model's directory, mapped into memory and addressed by tensor name.
//!
//! Which tensors a model needs is not known here. `consolidated.safetensors`, which some repositories carry beside the
//! others, holds the same weights in another order and is never looked at.

#[cfg(unix)]
use super::lost::Watch;
use super::safetensors::{Dtype, Header, TensorInfo, shown};
use crate::{Error, Result};
use memmap2::Mmap;
use serde::Deserialize;
use serde::de::{Deserializer, MapAccess, Visitor};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt;
use std::fs::File;
use std::ops::{Deref, Range};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

/// Largest index file that is read, in bytes; real ones have some hundred kilobytes.
const INDEX_LIMIT: u64 = 100_000_000;

/// Bytes of a mapped file. Cheap to clone; the file stays mapped as long as one of them lives. Tensors in a file need
/// not be aligned to their element size.
#[derive(Clone)]
pub struct MappedBytes {
    map: Arc<Mapping>,
    range: Range<usize>,
}

impl Deref for MappedBytes {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        &self.map.bytes[self.range.clone()]
    }
}

/// A mapped file. The watch goes first, as fields are dropped in order.
#[derive(Debug)]
struct Mapping {
    #[cfg(unix)]
    _watch: Watch,
    bytes: Mmap,
}

impl fmt::Debug for MappedBytes {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "MappedBytes({:?})", self.range)
    }
}

/// A tensor of a checkpoint.
#[derive(Debug, Clone)]
pub struct TensorView<'a> {
    /// Its name in the file.
    pub name: &'a str,
    /// Its element type.
    pub dtype: Dtype,
    /// Its dimensions, the last one contiguous; empty for a scalar.
    pub shape: &'a [usize],
    /// Its bytes, little-endian: as many as shape and type ask for.
    pub data: MappedBytes,
}

/// The mapped weights of a model.
#[derive(Debug)]
pub struct Checkpoint {
    dir: PathBuf,
    files: Vec<MappedFile>,
    tensors: BTreeMap<String, Located>,
}

#[derive(Debug)]
struct MappedFile {
    path: PathBuf,
    file: File,
    map: Arc<Mapping>,
    modified: Option<SystemTime>,
}

#[derive(Debug)]
struct Located {
    file: usize,
    dtype: Dtype,
    shape: Vec<usize>,
    range: Range<usize>,
}

impl Checkpoint {
    /// Maps the weights in `dir`: the shards that `model.safetensors.index.json` names if it is there, else
    /// `model.safetensors`.
    ///
    /// # Errors
    /// `BadModel` if a file is missing, truncated or contradicts itself or the index; `Io` if the system refuses.
    pub fn open(dir: impl AsRef<Path>) -> Result<Self> {
        let dir = dir.as_ref();
        let index_path = dir.join("model.safetensors.index.json");
        let Some(index) = Index::read(&index_path)? else {
            let path = dir.join("model.safetensors");
            if !path.exists() {
                return Err(no_weights(dir));
            }
            return Self::map(dir, vec![MappedFile::open(path)?]);
        };

        let names: BTreeSet<&str> = index.0.iter().map(|(_, file)| file.as_str()).collect();
        let mut files = Vec::with_capacity(names.len());
        for name in names {
            let path = dir.join(name);
            if !path.exists() {
                return Err(Error::bad_model(
                    &index_path,
                    format!("names {name}, which is not there; download the model again"),
                ));
            }
            files.push(MappedFile::open(path)?);
        }
        let checkpoint = Self::map(dir, files)?;
        let mut seen = BTreeSet::new();
        for (tensor, file) in &index.0 {
            if !seen.insert(tensor) {
                return Err(Error::bad_model(
                    &index_path,
                    format!("names tensor {} twice", shown(tensor)),
                ));
            }
            let found = checkpoint.tensors.get(tensor);
            let found = found.map(|located| &checkpoint.files[located.file].path);
            if found != Some(&dir.join(file)) {
                return Err(Error::bad_model(
                    &index_path,
                    format!(
                        "says that tensor {} is in {file}, where it is not",
                        shown(tensor)
                    ),
                ));
            }
        }
        Ok(checkpoint)
    }

    /// Maps one safetensors file of any name.
    ///
    /// # Errors
    /// Those of [`Checkpoint::open`].
    pub fn open_file(path: impl AsRef<Path>) -> Result<Self> {
        let path = path.as_ref();
        let dir = path.parent().unwrap_or(Path::new(""));
        Self::map(dir, vec![MappedFile::open(path.to_owned())?])
    }

    fn map(dir: &Path, files: Vec<MappedFile>) -> Result<Self> {
        let mut tensors = BTreeMap::new();
        for (index, file) in files.iter().enumerate() {
            let header = Header::parse(&file.path, &file.map.bytes, file.map.bytes.len() as u64)?;
            for tensor in header.tensors {
                let located = Located {
                    file: index,
                    dtype: tensor.dtype,
                    shape: tensor.shape,
                    range: tensor.range,
                };
                let name = shown(&tensor.name);
                if let Some(other) = tensors.insert(tensor.name, located) {
                    let other = files[other.file].path.display();
                    return Err(Error::bad_model(
                        &file.path,
                        format!("tensor {name} is also in {other}"),
                    ));
                }
            }
        }
        Ok(Checkpoint {
            dir: dir.to_owned(),
            files,
            tensors,
        })
    }

    /// The directory that was opened.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// A tensor by its name in the files.
    pub fn tensor(&self, name: &str) -> Option<TensorView<'_>> {
        let (name, located) = self.tensors.get_key_value(name)?;
        Some(TensorView {
            name,
            dtype: located.dtype,
            shape: &located.shape,
            data: MappedBytes {
                map: Arc::clone(&self.files[located.file].map),
                range: located.range.clone(),
            },
        })
    }

    /// The names of all tensors, sorted.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.keys().map(String::as_str)
    }

    /// All tensors as the headers describe them, by name.
    pub fn tensors(&self) -> Vec<TensorInfo> {
        let info = |(name, located): (&String, &Located)| TensorInfo {
            name: name.clone(),
            dtype: located.dtype,
            shape: located.shape.clone(),
            range: located.range.clone(),
        };
        self.tensors.iter().map(info).collect()
    }

    /// Bytes of all tensors together.
    pub fn total_bytes(&self) -> u64 {
        self.tensors
            .values()
            .map(|located| located.range.len() as u64)
            .sum()
    }

    /// Whether the mapped files still have the length and time of change that they had when they were opened. Touching
    /// a page that a file has lost ends the process, so ask before a long walk over the weights. Replacing a file by
    /// renaming another over it does no harm: the old one stays mapped.
    ///
    /// # Errors
    /// `BadModel` naming the file that changed; `Io` if the system does not say.
    pub fn verify_unchanged(&self) -> Result<()> {
        for mapped in &self.files {
            let metadata = mapped
                .file
                .metadata()
                .map_err(|error| Error::io(&mapped.path, error))?;
            let mapped_len = mapped.map.bytes.len() as u64;
            if metadata.len() != mapped_len || metadata.modified().ok() != mapped.modified {
                return Err(Error::bad_model(
                    &mapped.path,
                    format!(
                        "changed while it was in use: it had {mapped_len} bytes and has {}; load the model again",
                        metadata.len()
                    ),
                ));
            }
        }
        Ok(())
    }
}

impl MappedFile {
    fn open(path: PathBuf) -> Result<Self> {
        let io = |error| Error::io(&path, error);
        // A pipe would block in `open` until somebody writes to it.
        if !std::fs::metadata(&path).map_err(io)?.is_file() {
            return Err(Error::bad_model(&path, "not a regular file"));
        }
        let file = File::open(&path).map_err(io)?;
        let metadata = file.metadata().map_err(io)?;
        if metadata.len() < 8 {
            // Also keeps empty files, which cannot be mapped, away from the next line.
            Header::data_start(&path, &[], metadata.len())?;
        }
        // SAFETY: a mapping is sound as long as nobody changes the file beneath it. The mapping is private and read
        // only, so nothing here does; downloads are written elsewhere and renamed, which leaves the mapped file as it
        // was. Against other programs there is no defence in any API for mapped files: what they write in place could
        // show up as changed numbers (every bit pattern is a valid byte) and a truncation as SIGBUS, never as a wild
        // access, and `verify_unchanged` tells both.
        let bytes = unsafe { Mmap::map(&file) }.map_err(io)?;
        // A file that is not in memory yet then comes in large pages (see `memory`). Where the system cannot, it says so,
        // and nothing is lost.
        #[cfg(target_os = "linux")]
        let _ = bytes.advise(memmap2::Advice::HugePage);
        let mapping = Mapping {
            #[cfg(unix)]
            _watch: Watch::new(&path, &bytes),
            bytes,
        };
        Ok(MappedFile {
            modified: metadata.modified().ok(),
            map: Arc::new(mapping),
            file,
            path,
        })
    }
}

fn no_weights(dir: &Path) -> Error {
    let others = [
        "consolidated.safetensors",
        "pytorch_model.bin",
        "pytorch_model.bin.index.json",
    ];
    let found = others.iter().find(|name| dir.join(name).exists());
    let hint = match found {
        Some(name) => format!("; {name} is, but that form is not supported"),
        None => String::new(),
    };
    Error::bad_model(
        dir,
        format!("neither model.safetensors nor model.safetensors.index.json is here{hint}"),
    )
}

/// `weight_map` of an index: tensor names and the files they are in, as they stand there.
struct Index(Vec<(String, String)>);

impl Index {
    fn read(path: &Path) -> Result<Option<Self>> {
        let length = match std::fs::metadata(path) {
            Ok(metadata) => metadata.len(),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
            Err(error) => return Err(Error::io(path, error)),
        };
        if length > INDEX_LIMIT {
            return Err(Error::bad_model(
                path,
                format!("has {length} bytes; the limit is {INDEX_LIMIT}"),
            ));
        }
        #[derive(Deserialize)]
        struct File {
            weight_map: Index,
        }
        let text = std::fs::read(path).map_err(|error| Error::io(path, error))?;
        let File { weight_map } = serde_json::from_slice(&text)
            .map_err(|error| Error::bad_model(path, format!("not a valid index: {error}")))?;
        if weight_map.0.is_empty() {
            return Err(Error::bad_model(path, "weight_map names no tensor"));
        }
        for (_, file) in &weight_map.0 {
            // The index comes from whoever made the model: it may name files beside it and nothing else.
            let plain = file.ends_with(".safetensors")
                && file.len() <= 255
                && !file.starts_with('.')
                && !file.contains(|c: char| matches!(c, '/' | '\\' | ':') || c.is_control());
            if !plain {
                return Err(Error::bad_model(
                    path,
                    format!(
                        "weight_map names {}; only .safetensors files of the same directory are allowed",
                        shown(file)
                    ),
                ));
            }
        }
        Ok(Some(weight_map))
    }
}

impl<'de> Deserialize<'de> for Index {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct Collect;
        impl<'de> Visitor<'de> for Collect {
            type Value = Index;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("an object of file names")
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Index, A::Error> {
                let mut entries = Vec::new();
                while let Some(entry) = map.next_entry()? {
                    entries.push(entry);
                }
                Ok(Index(entries))
            }
        }
        deserializer.deserialize_map(Collect)
    }
}
