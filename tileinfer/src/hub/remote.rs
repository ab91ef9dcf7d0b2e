//! A model on the hub, looked at without downloading it: its small files and the headers of its weights.
//! Leaves nothing in the cache.

use std::ops::Range;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use super::cache::{CONFIG, INDEX, SINGLE};
use super::client::{Client, RemoteFile};
use super::error::HubErrorKind;
use super::name::{RepoId, is_safe_path};
use super::parallel::in_parallel;
use super::progress::Progress;
use super::reply::shards;
use crate::weights::Header;
use crate::{Error, Result};

/// Largest file that is read into memory.
const MAX_FILE_BYTES: u64 = 256 << 20;
/// Bytes of a safetensors file asked for first: most headers fit.
const FIRST_READ: u64 = 64 << 10;

/// One commit of a repository on the hub.
pub struct Remote<'a> {
    client: &'a Client,
    progress: &'a dyn Progress,
    repo: RepoId,
    commit: String,
}

/// The header of a weight file on the hub.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct RemoteHeader {
    /// Path of the file in the repository.
    pub path: String,
    /// Length of the file in bytes.
    pub size: u64,
    /// Names, types and shapes of its tensors.
    pub header: Header,
}

impl<'a> Remote<'a> {
    pub(super) fn new(
        client: &'a Client,
        repo: RepoId,
        revision: &str,
        progress: &'a dyn Progress,
    ) -> Result<Self> {
        let mut remote = Remote {
            client,
            progress,
            repo,
            commit: revision.to_owned(),
        };
        remote.commit = remote.describe(CONFIG)?.facts.commit;
        Ok(remote)
    }

    /// The commit that the revision stands for.
    pub fn commit(&self) -> &str {
        &self.commit
    }

    /// A whole file, for small ones such as `config.json`.
    ///
    /// # Errors
    /// [`HubErrorKind::FileNotFound`] if there is none, and all that a hub can answer.
    pub fn read(&self, path: &str) -> Result<Vec<u8>> {
        let file = self.describe(path)?;
        match file.facts.size {
            Some(size) if size <= MAX_FILE_BYTES => self.range(&file, 0..size),
            size => Err(HubErrorKind::BadReply.error(format!(
                "{path} of {} has {} bytes; at most {MAX_FILE_BYTES} are read into memory",
                self.repo,
                size.map_or("an unknown number of".to_owned(), |size| size.to_string())
            ))),
        }
    }

    /// Bytes `range` of a file.
    ///
    /// # Errors
    /// As [`read`](Self::read); and [`HubErrorKind::BadReply`] if the file has fewer bytes.
    pub fn read_range(&self, path: &str, range: Range<u64>) -> Result<Vec<u8>> {
        let file = self.describe(path)?;
        self.range(&file, range)
    }

    /// The headers of all weight files, in the order of their names, by a few small range requests each.
    ///
    /// # Errors
    /// [`HubErrorKind::FileNotFound`] if there are no weights in safetensors format.
    pub fn headers(&self) -> Result<Vec<RemoteHeader>> {
        let names = match self.read(INDEX) {
            Ok(index) => shards(&index).map_err(|reason| Error::bad_model(INDEX, reason))?,
            Err(Error::Hub {
                kind: HubErrorKind::FileNotFound,
                ..
            }) => vec![SINGLE.to_owned()],
            Err(error) => return Err(error),
        };
        let stop = AtomicBool::new(false);
        in_parallel(self.client.options.workers, &stop, names, |name| {
            self.header(&name)
        })
    }

    /// The header of one safetensors file.
    ///
    /// # Errors
    /// As [`read`](Self::read); and [`Error::BadModel`] if it is not such a file.
    pub fn header(&self, path: &str) -> Result<RemoteHeader> {
        let file = self.describe(path)?;
        let Some(size) = file.facts.size else {
            return Err(HubErrorKind::BadReply.error(format!(
                "the hub does not say how long {path} of {} is",
                self.repo
            )));
        };
        let name = Path::new(path);
        let mut head = self.range(&file, 0..size.min(FIRST_READ))?;
        let end = Header::data_start(name, &head, size)? as u64;
        if (head.len() as u64) < end {
            head.extend(self.range(&file, head.len() as u64..end)?);
        }
        Ok(RemoteHeader {
            path: path.to_owned(),
            size,
            header: Header::parse(name, &head, size)?,
        })
    }

    fn describe(&self, path: &str) -> Result<RemoteFile> {
        if !is_safe_path(path) {
            return Err(Error::usage(format!(
                "{path:?} is not a path in a repository"
            )));
        }
        let never = AtomicBool::new(false);
        self.client.persist(path, self.progress, &never, |_| {
            self.client.describe(&self.repo, &self.commit, path)
        })
    }

    fn range(&self, file: &RemoteFile, range: Range<u64>) -> Result<Vec<u8>> {
        if file.facts.size.is_some_and(|size| range.end > size) || range.start > range.end {
            return Err(HubErrorKind::BadReply.error(format!(
                "{} of {} has no bytes {}–{}",
                file.path, self.repo, range.start, range.end
            )));
        }
        let never = AtomicBool::new(false);
        self.client.persist(&file.path, self.progress, &never, |_| {
            self.client.read_range(&self.repo, file, range.clone())
        })
    }
}
