//! A pack: the compiled kernels of one architecture in one file, each compressed by itself.
//!
//! Little-endian: `TILEPACK`, version u32, fingerprint u64, architecture (length u32, bytes), number of
//! kernels u32; for each its name (length u32, bytes), bytes compressed u32 and plain u32; then the
//! compressed kernels one after the other.

use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::path::Path;

use flate2::Compression;
use flate2::read::DeflateDecoder;
use flate2::write::DeflateEncoder;
use tileinfer::{Error, Result};

const MAGIC: &[u8; 8] = b"TILEPACK";
const VERSION: u32 = 1;

/// A pack in memory.
#[derive(Debug, Clone, Default)]
pub struct Pack {
    /// Of the kernels' text, see [`crate::kernels::fingerprint`].
    pub fingerprint: u64,
    /// The architecture, `sm_90` for example.
    pub arch: String,
    kernels: BTreeMap<String, (usize, Vec<u8>)>,
}

impl Pack {
    /// An empty pack.
    pub fn new(arch: &str, fingerprint: u64) -> Self {
        Pack {
            fingerprint,
            arch: arch.to_owned(),
            kernels: BTreeMap::new(),
        }
    }

    /// How many kernels it holds.
    pub fn len(&self) -> usize {
        self.kernels.len()
    }

    /// Whether it holds none.
    pub fn is_empty(&self) -> bool {
        self.kernels.is_empty()
    }

    /// Adds a kernel.
    pub fn insert(&mut self, name: &str, cubin: &[u8]) {
        let mut encoder = DeflateEncoder::new(Vec::new(), Compression::best());
        encoder.write_all(cubin).expect("memory takes everything");
        let compressed = encoder.finish().expect("memory takes everything");
        self.kernels
            .insert(name.to_owned(), (cubin.len(), compressed));
    }

    /// The machine code of a kernel, if it is here and whole.
    pub fn get(&self, name: &str) -> Option<Vec<u8>> {
        let (len, compressed) = self.kernels.get(name)?;
        let mut cubin = Vec::with_capacity(*len);
        DeflateDecoder::new(compressed.as_slice())
            .read_to_end(&mut cubin)
            .ok()?;
        (cubin.len() == *len).then_some(cubin)
    }

    /// Writes the pack: under a temporary name, then renamed.
    ///
    /// # Errors
    /// [`Error::Io`] naming the file.
    pub fn write(&self, path: &Path) -> Result<()> {
        let mut out = Vec::new();
        out.extend(MAGIC);
        out.extend(VERSION.to_le_bytes());
        out.extend(self.fingerprint.to_le_bytes());
        put_text(&mut out, &self.arch);
        out.extend((self.kernels.len() as u32).to_le_bytes());
        for (name, (len, compressed)) in &self.kernels {
            put_text(&mut out, name);
            out.extend((compressed.len() as u32).to_le_bytes());
            out.extend((*len as u32).to_le_bytes());
        }
        for (_, compressed) in self.kernels.values() {
            out.extend(compressed);
        }
        let temporary = path.with_extension(format!("{}.incomplete", std::process::id()));
        std::fs::write(&temporary, &out).map_err(|source| Error::io(&temporary, source))?;
        std::fs::rename(&temporary, path).map_err(|source| Error::io(path, source))
    }

    /// Reads a pack.
    ///
    /// # Errors
    /// [`Error::Io`], or [`Error::Device`] if the file is not a whole pack of this version.
    pub fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|source| Error::io(path, source))?;
        Self::parse(&bytes).ok_or_else(|| {
            Error::Device(format!(
                "{}: not a whole kernel pack of version {VERSION}; build it anew",
                path.display()
            ))
        })
    }

    /// A pack from its bytes; nothing if they are not a whole pack of this version.
    pub fn parse(bytes: &[u8]) -> Option<Self> {
        let mut rest = bytes.strip_prefix(MAGIC)?;
        if take_u32(&mut rest)? != VERSION {
            return None;
        }
        let (fingerprint, tail) = rest.split_first_chunk::<8>()?;
        rest = tail;
        let mut pack = Pack::new("", u64::from_le_bytes(*fingerprint));
        pack.arch = take_text(&mut rest)?;
        let mut directory = Vec::new();
        for _ in 0..take_u32(&mut rest)? {
            let name = take_text(&mut rest)?;
            let (compressed, plain) = (take_u32(&mut rest)?, take_u32(&mut rest)?);
            directory.push((name, compressed as usize, plain as usize));
        }
        for (name, compressed, plain) in directory {
            let (kernel, tail) = rest.split_at_checked(compressed)?;
            rest = tail;
            pack.kernels.insert(name, (plain, kernel.to_vec()));
        }
        rest.is_empty().then_some(pack)
    }
}

fn put_text(out: &mut Vec<u8>, text: &str) {
    out.extend((text.len() as u32).to_le_bytes());
    out.extend(text.as_bytes());
}

fn take_u32(rest: &mut &[u8]) -> Option<u32> {
    let (number, tail) = rest.split_first_chunk::<4>()?;
    *rest = tail;
    Some(u32::from_le_bytes(*number))
}

fn take_text(rest: &mut &[u8]) -> Option<String> {
    let len = take_u32(rest)? as usize;
    let (text, tail) = rest.split_at_checked(len)?;
    *rest = tail;
    String::from_utf8(text.to_vec()).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sample() -> Pack {
        let mut pack = Pack::new("sm_90", 0x1234_5678_9abc_def0);
        pack.insert("a<1>", &[7; 1000]);
        pack.insert("b<2>", &[]);
        pack
    }

    #[test]
    fn what_goes_in_comes_out() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.pack");
        sample().write(&path).unwrap();
        let pack = Pack::read(&path).unwrap();
        assert_eq!(
            (pack.arch.as_str(), pack.fingerprint, pack.len()),
            ("sm_90", 0x1234_5678_9abc_def0, 2)
        );
        assert_eq!(pack.get("a<1>").unwrap(), [7; 1000]);
        assert_eq!(pack.get("b<2>").unwrap(), [0u8; 0]);
        assert_eq!(pack.get("c"), None);
        assert_eq!(
            std::fs::read_dir(folder.path()).unwrap().count(),
            1,
            "no temporary file stays"
        );
    }

    #[test]
    fn a_cut_or_lengthened_pack_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x.pack");
        sample().write(&path).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for len in 0..whole.len() {
            assert!(
                Pack::parse(&whole[..len]).is_none(),
                "{len} bytes of {}",
                whole.len()
            );
        }
        assert!(Pack::parse(&[whole.as_slice(), b"x"].concat()).is_none());
        std::fs::write(&path, b"something else").unwrap();
        assert!(
            Pack::read(&path)
                .unwrap_err()
                .to_string()
                .contains("x.pack")
        );
    }
}
