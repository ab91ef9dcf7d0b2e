//! The cache on disk, laid out as Python's `huggingface_hub` does, so that both read what either wrote:
//!
//! ```text
//! <cache>/models--org--name/refs/<revision>            the commit, 40 digits, no newline
//!                           blobs/<etag>               contents (or links into a store shared by all models)
//!                           snapshots/<commit>/<path>  links to blobs (or files, where there are no links)
//!                           .no_exist/<commit>/<path>  empty: the commit has no such file
//! <cache>/.locks/models--org--name/<etag>.lock         held while a blob is written
//! ```
//!
//! Whatever appears under its final name is complete: it is written elsewhere and renamed. Knows no network.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use super::name::{RepoId, is_commit, is_safe_path};
use super::reply;

/// Files that inference reads if a repository has them, beside the weights and `config.json`.
pub(super) const SIDE_FILES: [&str; 5] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
];
pub(super) const CONFIG: &str = "config.json";
pub(super) const INDEX: &str = "model.safetensors.index.json";
pub(super) const SINGLE: &str = "model.safetensors";

/// The folder of one repository in the cache.
#[derive(Debug, Clone)]
pub(super) struct RepoFolder {
    cache: PathBuf,
    name: String,
}

/// What the cache knows about a file of a commit.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Known {
    /// It is here.
    Present,
    /// The commit has no such file.
    Absent,
    /// Nobody asked yet.
    Unknown,
}

impl RepoFolder {
    pub(super) fn new(cache: &Path, repo: &RepoId) -> Self {
        RepoFolder {
            cache: cache.to_owned(),
            name: repo.folder(),
        }
    }

    pub(super) fn path(&self) -> PathBuf {
        self.cache.join(&self.name)
    }

    pub(super) fn refs(&self) -> PathBuf {
        self.path().join("refs")
    }

    pub(super) fn blobs(&self) -> PathBuf {
        self.path().join("blobs")
    }

    pub(super) fn blob(&self, etag: &str) -> PathBuf {
        self.blobs().join(etag)
    }

    pub(super) fn snapshots(&self) -> PathBuf {
        self.path().join("snapshots")
    }

    pub(super) fn snapshot(&self, commit: &str) -> PathBuf {
        self.snapshots().join(commit)
    }

    pub(super) fn absences(&self, commit: &str) -> PathBuf {
        self.path().join(".no_exist").join(commit)
    }

    pub(super) fn tree(&self, commit: &str) -> PathBuf {
        self.path().join("trees").join(format!("{commit}.json"))
    }

    pub(super) fn locks(&self) -> PathBuf {
        self.cache.join(".locks").join(&self.name)
    }

    /// The commit a checked revision stands for, as far as the cache knows.
    pub(super) fn commit_of(&self, revision: &str) -> Option<String> {
        if is_commit(revision) {
            return Some(revision.to_owned());
        }
        read_ref(&self.refs().join(revision))
    }

    pub(super) fn known(&self, commit: &str, path: &str) -> Known {
        if self.absences(commit).join(path).exists() {
            Known::Absent
        } else if self.snapshot(commit).join(path).is_file() {
            Known::Present
        } else {
            Known::Unknown
        }
    }

    /// The first file that inference needs and `commit` lacks here; `None` if the snapshot is complete.
    /// A folder is no proof: a pull may have been interrupted, or a program may have wanted one file only.
    pub(super) fn first_missing(&self, commit: &str) -> Option<String> {
        first_missing(&self.snapshot(commit))
    }

    /// Notes which commit a revision stands for. A cache that cannot be written keeps what it says.
    pub(super) fn write_ref(&self, revision: &str, commit: &str) -> io::Result<()> {
        if is_commit(revision) {
            return Ok(());
        }
        let path = self.refs().join(revision);
        if read_ref(&path).as_deref() == Some(commit) {
            return Ok(());
        }
        fs::create_dir_all(path.parent().unwrap_or(&path))?;
        replace(&path, |temporary| {
            let mut file = File::create_new(temporary)?;
            file.write_all(commit.as_bytes())?;
            file.sync_all()
        })
    }

    /// Notes that `commit` has no file `path`. It only saves a question later, so failing is no harm.
    pub(super) fn write_absence(&self, commit: &str, path: &str) -> io::Result<()> {
        let path = self.absences(commit).join(path);
        fs::create_dir_all(path.parent().unwrap_or(&path))?;
        OpenOptions::new()
            .create(true)
            .append(true)
            .open(path)
            .map(|_| ())
    }

    /// Makes `path` of `commit` show the blob: a relative link, or where there are no links the blob itself,
    /// moved if it is `new` and copied if something else may use it.
    pub(super) fn show_blob(
        &self,
        etag: &str,
        commit: &str,
        path: &str,
        new: bool,
        links: bool,
    ) -> io::Result<()> {
        let entry = self.snapshot(commit).join(path);
        if entry.is_file() {
            return Ok(());
        }
        fs::create_dir_all(entry.parent().unwrap_or(&entry))?;
        let ups = "../".repeat(path.split('/').count() + 1);
        let target = format!("{ups}blobs/{etag}");
        if links && replace(&entry, |temporary| symlink(&target, temporary)).is_ok() {
            return Ok(());
        }
        let blob = self.blob(etag);
        if new && fs::rename(&blob, &entry).is_ok() {
            return Ok(());
        }
        replace(&entry, |temporary| fs::copy(&blob, temporary).map(|_| ()))?;
        if new {
            fs::remove_file(&blob)?;
        }
        Ok(())
    }

    /// Marks the cache as one for backup programs.
    pub(super) fn write_tag(&self) {
        let tag = self.cache.join("CACHEDIR.TAG");
        if let Ok(mut file) = File::create_new(tag) {
            let _ = file.write_all(
                b"Signature: 8a477f597d28d172789f06886806bc55\n# This folder is a cache of models; see https://bford.info/cachedir/\n",
            );
        }
    }
}

/// The first file that inference needs and `snapshot` lacks.
pub(super) fn first_missing(snapshot: &Path) -> Option<String> {
    let lacks = |path: &str| !snapshot.join(path).is_file();
    if lacks(CONFIG) {
        return Some(CONFIG.to_owned());
    }
    if lacks(INDEX) {
        return lacks(SINGLE).then(|| SINGLE.to_owned());
    }
    match fs::read(snapshot.join(INDEX)).map(|bytes| reply::shards(&bytes)) {
        Ok(Ok(shards)) => shards.into_iter().find(|shard| lacks(shard)),
        _ => Some(INDEX.to_owned()),
    }
}

fn read_ref(path: &Path) -> Option<String> {
    let text = fs::read_to_string(path).ok()?;
    let commit = text.trim();
    is_commit(commit).then(|| commit.to_owned())
}

/// Every ref below `folder` as (revision, commit).
pub(super) fn refs_below(folder: &Path) -> Vec<(String, String)> {
    files_below(folder)
        .into_iter()
        .filter_map(|revision| {
            let commit = read_ref(&folder.join(&revision))?;
            Some((revision, commit))
        })
        .collect()
}

/// Paths of the files below `folder`, sorted, with `/` between their parts. Links to files count as files;
/// links to folders are not followed, and names that no hub could have sent are left out.
pub(super) fn files_below(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut pending = vec![String::new()];
    while let Some(prefix) = pending.pop() {
        let Ok(entries) = fs::read_dir(folder.join(&prefix)) else {
            continue;
        };
        for entry in entries.flatten() {
            let Ok(name) = entry.file_name().into_string() else {
                continue;
            };
            let path = if prefix.is_empty() {
                name
            } else {
                format!("{prefix}/{name}")
            };
            match entry.file_type() {
                Ok(kind) if kind.is_dir() => pending.push(path),
                Ok(_) if is_safe_path(&path) => found.push(path),
                _ => {}
            }
        }
    }
    found.sort();
    found
}

/// Lets `make` create a file under a temporary name beside `path`, then renames it to `path`.
fn replace(path: &Path, make: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
    let name = path.file_name().unwrap_or_default().to_string_lossy();
    let temporary = path.with_file_name(format!(".{name}.{}.tmp", unique()));
    let made = make(&temporary).and_then(|()| fs::rename(&temporary, path));
    if made.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    made
}

/// Eight hexadecimal digits that no other thread or process is using.
pub(super) fn unique() -> String {
    let mut bytes = [0; 4];
    if getrandom::fill(&mut bytes).is_err() {
        bytes = std::process::id().to_le_bytes();
    }
    format!("{:08x}", u32::from_le_bytes(bytes))
}

#[cfg(unix)]
fn symlink(target: &str, at: &Path) -> io::Result<()> {
    std::os::unix::fs::symlink(target, at)
}

#[cfg(not(unix))]
fn symlink(_target: &str, _at: &Path) -> io::Result<()> {
    Err(io::ErrorKind::Unsupported.into())
}

/// The lock of one blob, held until dropped. It keeps two pulls from downloading the same file twice and from
/// sharing a partial file; that a finished blob is right does not depend on it.
#[derive(Debug)]
pub(super) struct BlobLock {
    _file: File,
}

impl BlobLock {
    /// Takes the lock. While another pull has it, `wait` is called again and again; it sleeps, or gives up with an
    /// error. `None`: this file system has no locks.
    pub(super) fn take(
        folder: &RepoFolder,
        etag: &str,
        mut wait: impl FnMut() -> io::Result<()>,
    ) -> io::Result<Option<Self>> {
        let path = folder.locks().join(format!("{etag}.lock"));
        fs::create_dir_all(folder.locks())?;
        loop {
            let file = match OpenOptions::new().create(true).append(true).open(&path) {
                // Another user's lock file in a shared cache can still be locked through a reading handle.
                Err(error) if error.kind() == io::ErrorKind::PermissionDenied => File::open(&path)?,
                opened => opened?,
            };
            match file.try_lock() {
                Ok(()) => {}
                Err(TryLockError::WouldBlock) => {
                    wait()?;
                    continue;
                }
                Err(TryLockError::Error(_)) => return Ok(None),
            }
            // Whoever had it may have deleted the file; then a third one could lock a new file of that name.
            if same_file(&file, &path) {
                return Ok(Some(BlobLock { _file: file }));
            }
        }
    }
}

#[cfg(unix)]
fn same_file(file: &File, path: &Path) -> bool {
    use std::os::unix::fs::MetadataExt;
    match (file.metadata(), fs::metadata(path)) {
        (Ok(a), Ok(b)) => (a.dev(), a.ino()) == (b.dev(), b.ino()),
        _ => false,
    }
}

#[cfg(not(unix))]
fn same_file(_file: &File, path: &Path) -> bool {
    path.exists()
}

/// Bytes that can still be written to the file system of `folder`; `None` if it does not say.
#[cfg(unix)]
pub(super) fn free_space(folder: &Path) -> Option<u64> {
    let stats = rustix::fs::statvfs(folder).ok()?;
    (stats.f_blocks > 0).then(|| stats.f_bavail.saturating_mul(stats.f_frsize))
}

#[cfg(not(unix))]
pub(super) fn free_space(_folder: &Path) -> Option<u64> {
    None
}
