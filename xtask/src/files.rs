//! Files that appear whole or not at all, with their checksums. Knows nothing of what is in them.

use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

/// A folder that is filled under a temporary name beside its place and removed again unless
/// [`publish`](Self::publish) gives it its name.
pub(crate) struct NewFolder {
    place: PathBuf,
    scratch: PathBuf,
}

impl NewFolder {
    /// Start a folder that is to become `place`.
    pub(crate) fn new(place: &Path) -> Result<Self> {
        let scratch = beside(place, "incomplete")?;
        fs::create_dir_all(&scratch)
            .with_context(|| format!("cannot create the folder {}", scratch.display()))?;
        Ok(Self {
            place: place.to_path_buf(),
            scratch,
        })
    }

    /// Where to write until the folder is published.
    pub(crate) fn path(&self) -> &Path {
        &self.scratch
    }

    /// Give the folder its name. What stood there before is moved away first and then deleted.
    pub(crate) fn publish(self) -> Result<()> {
        let old = beside(&self.place, "old.incomplete")?;
        let replaces = self.place.exists();
        if replaces {
            fs::rename(&self.place, &old)
                .with_context(|| format!("cannot move {} out of the way", self.place.display()))?;
        }
        fs::rename(&self.scratch, &self.place).with_context(|| {
            format!(
                "cannot rename {} to {}",
                self.scratch.display(),
                self.place.display()
            )
        })?;
        if replaces {
            fs::remove_dir_all(&old)
                .with_context(|| format!("cannot delete the old {}", old.display()))?;
        }
        Ok(())
    }
}

impl Drop for NewFolder {
    fn drop(&mut self) {
        // After `publish` there is nothing of this name; after a failure the cause matters more.
        let _ = fs::remove_dir_all(&self.scratch);
    }
}

/// A name beside `place` that git ignores and that no other process uses.
fn beside(place: &Path, ending: &str) -> Result<PathBuf> {
    let name = place
        .file_name()
        .with_context(|| format!("{} does not name a folder", place.display()))?
        .to_string_lossy();
    Ok(place.with_file_name(format!("{name}.{}.{ending}", std::process::id())))
}

/// Write a file through `fill`; the result is the SHA-256 of what was written, in hexadecimal.
pub(crate) fn write_hashed(
    path: &Path,
    fill: impl FnOnce(&mut dyn Write) -> Result<()>,
) -> Result<String> {
    let write = || -> Result<String> {
        let mut out = Hashing {
            inner: BufWriter::with_capacity(4 << 20, File::create(path)?),
            hash: Sha256::new(),
        };
        fill(&mut out)?;
        out.flush()?;
        Ok(hex(out.hash))
    };
    write().with_context(|| format!("cannot write {}", path.display()))
}

/// The SHA-256 of a file, in hexadecimal.
pub(crate) fn sha256(path: &Path) -> Result<String> {
    let read = || -> io::Result<String> {
        let mut file = File::open(path)?;
        let (mut hash, mut buffer) = (Sha256::new(), vec![0; 1 << 20]);
        loop {
            match file.read(&mut buffer)? {
                0 => return Ok(hex(hash)),
                n => hash.update(&buffer[..n]),
            }
        }
    };
    read().with_context(|| format!("cannot read {}", path.display()))
}

fn hex(hash: Sha256) -> String {
    hash.finalize()
        .iter()
        .map(|byte| format!("{byte:02x}"))
        .collect()
}

struct Hashing<W> {
    inner: W,
    hash: Sha256,
}

impl<W: Write> Write for Hashing<W> {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        let written = self.inner.write(bytes)?;
        self.hash.update(&bytes[..written]);
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.inner.flush()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn hash_is_of_what_was_written() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("abc");
        let hash = write_hashed(&path, |out| Ok(out.write_all(b"abc")?)).unwrap();
        // FIPS 180-2, appendix B.1.
        assert_eq!(
            hash,
            "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
        );
        assert_eq!(sha256(&path).unwrap(), hash);
    }

    #[test]
    fn folder_appears_only_when_published() {
        let parent = tempfile::tempdir().unwrap();
        let place = parent.path().join("made");
        let names = || fs::read_dir(parent.path()).unwrap().count();

        let dropped = NewFolder::new(&place).unwrap();
        fs::write(dropped.path().join("file"), "half").unwrap();
        assert!(!place.exists());
        drop(dropped);
        assert_eq!(names(), 0);

        for text in ["first", "second"] {
            let folder = NewFolder::new(&place).unwrap();
            fs::write(folder.path().join("file"), text).unwrap();
            folder.publish().unwrap();
            assert_eq!(fs::read_to_string(place.join("file")).unwrap(), text);
            assert_eq!(names(), 1);
        }
    }
}
