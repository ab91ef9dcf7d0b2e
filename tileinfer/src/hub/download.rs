//! One file from the hub into a blob of the cache: resumed where an earlier attempt or run stopped, hashed as it
//! arrives, and given its name only once length and hash are what the hub announced.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use sha1::Sha1;
use sha2::{Digest, Sha256};

use super::cache::{BlobLock, RepoFolder, free_space, unique};
use super::client::{Answer, Client, RemoteFile};
use super::error::{Failure, HubErrorKind};
use super::name::RepoId;
use super::progress::Progress;
use super::reply::HashKind;
use crate::{Error, Result};

/// Bytes read and written at a time.
const CHUNK: usize = 256 << 10;
/// How often to look whether another process has finished a file.
const LOCK_POLL: Duration = Duration::from_millis(50);

/// A pull at work: who asks, where it goes, whom it tells.
pub(super) struct Job<'a> {
    pub(super) client: &'a Client,
    pub(super) repo: &'a RepoId,
    pub(super) folder: &'a RepoFolder,
    pub(super) progress: &'a dyn Progress,
    /// Set when another file of the pull has failed.
    pub(super) stop: &'a AtomicBool,
}

impl Job<'_> {
    /// Bytes of a file that are here: all of them if its blob is, else those of a partial one.
    pub(super) fn have(&self, file: &RemoteFile) -> u64 {
        let length = |path: PathBuf| fs::metadata(path).ok().map(|meta| meta.len());
        let etag = &file.facts.etag;
        length(self.folder.blob(etag))
            .or_else(|| length(partial_path(self.folder, etag)))
            .unwrap_or(0)
    }

    /// Refuses a pull that cannot fit before it starts. `needed` counts the bytes still to come.
    pub(super) fn check_space(&self, needed: u64) -> Result<()> {
        let blobs = self.folder.blobs();
        match free_space(&blobs) {
            Some(free) if free < needed => Err(HubErrorKind::DiskFull.error(format!(
                "{} needs {needed} more bytes in {} and the disk has {free} left; free some space, or set HF_HUB_CACHE to a folder on another disk",
                self.repo,
                blobs.display()
            ))),
            _ => Ok(()),
        }
    }

    /// Makes sure that the file's blob is in the cache and that its snapshot shows it.
    pub(super) fn bring(&self, file: RemoteFile) -> Result<()> {
        let etag = file.facts.etag.clone();
        let path = file.path.clone();
        let commit = file.facts.commit.clone();
        let blobs = self.folder.blobs();
        fs::create_dir_all(&blobs).map_err(|error| disk_error(&blobs, error))?;
        let mut waited = false;
        let lock = BlobLock::take(self.folder, &etag, || {
            if !waited {
                self.progress.note(&format!(
                    "{path} is being downloaded by another process; waiting for it"
                ));
            }
            waited = true;
            if self.stop.load(Ordering::Relaxed) {
                return Err(io::ErrorKind::Interrupted.into());
            }
            std::thread::sleep(LOCK_POLL);
            self.progress.advanced(&path, self.have(&file));
            Ok(())
        })
        .map_err(|error| disk_error(&self.folder.locks(), error))?;
        let new = !self.is_here(&file);
        if new && !self.folder.snapshot(&commit).join(&path).is_file() {
            Download::new(self, file, lock.is_some())?.run()?;
        }
        self.folder
            .show_blob(&etag, &commit, &path, new, self.client.options.symlinks)
            .map_err(|error| disk_error(&self.folder.snapshot(&commit).join(&path), error))?;
        self.progress.finished(&path);
        Ok(())
    }

    /// Whether the blob is here, in the announced length.
    fn is_here(&self, file: &RemoteFile) -> bool {
        match fs::metadata(self.folder.blob(&file.facts.etag)) {
            Ok(meta) => meta.is_file() && file.facts.size.is_none_or(|size| size == meta.len()),
            Err(_) => false,
        }
    }
}

/// The name under which a partial blob waits for the next run. Nobody but the holder of the blob's lock uses it.
fn partial_path(folder: &RepoFolder, etag: &str) -> PathBuf {
    folder.blob(&format!("{etag}.incomplete"))
}

/// Says what the operating system refused, a full disk in particular.
fn disk_error(path: &Path, error: io::Error) -> Error {
    match error.kind() {
        io::ErrorKind::StorageFull
        | io::ErrorKind::QuotaExceeded
        | io::ErrorKind::FileTooLarge => HubErrorKind::DiskFull.error(format!(
            "{}: {error}; free some space, or set HF_HUB_CACHE to a folder on another disk, and pull again: what has arrived is kept",
            path.display()
        )),
        _ => Error::io(path, error),
    }
}

/// The running hash of a file's first bytes.
enum Hasher {
    Sha256(Sha256),
    GitSha1(Sha1),
    Unknown,
}

impl Hasher {
    /// `size` is part of git's hash; without it there is nothing to check a git blob against.
    fn new(etag: &str, size: Option<u64>) -> Self {
        match (HashKind::of(etag), size) {
            (HashKind::Sha256, _) => Hasher::Sha256(Sha256::new()),
            (HashKind::GitSha1, Some(size)) => {
                Hasher::GitSha1(Sha1::new_with_prefix(format!("blob {size}\0")))
            }
            _ => Hasher::Unknown,
        }
    }

    fn update(&mut self, bytes: &[u8]) {
        match self {
            Hasher::Sha256(hash) => hash.update(bytes),
            Hasher::GitSha1(hash) => hash.update(bytes),
            Hasher::Unknown => {}
        }
    }

    /// The hash in hexadecimal digits, if there is one.
    fn finish(self) -> Option<String> {
        let hex = |bytes: &[u8]| bytes.iter().map(|b| format!("{b:02x}")).collect();
        match self {
            Hasher::Sha256(hash) => Some(hex(&hash.finalize())),
            Hasher::GitSha1(hash) => Some(hex(&hash.finalize())),
            Hasher::Unknown => None,
        }
    }
}

/// One blob on its way.
struct Download<'a> {
    job: &'a Job<'a>,
    file: RemoteFile,
    partial: PathBuf,
    /// Whether the partial file is worth keeping: it has its stable name, under a lock.
    keep: bool,
    out: File,
    /// Bytes of `out` that are part of `hasher`.
    have: u64,
    hasher: Hasher,
    /// The total length: announced by the hub, or else by the storage.
    size: Option<u64>,
    /// Whether the hash has failed before: a partial file of an earlier run may have been spoilt.
    retried_hash: bool,
    /// Whether the address has been renewed since bytes last came.
    renewed: bool,
    /// Whether the last attempt was ended for bringing too little.
    slow: bool,
}

impl<'a> Download<'a> {
    fn new(job: &'a Job<'a>, file: RemoteFile, locked: bool) -> Result<Self> {
        let etag = &file.facts.etag;
        let partial = if locked {
            partial_path(job.folder, etag)
        } else {
            job.folder.blob(&format!("{etag}.{}.incomplete", unique()))
        };
        let out = OpenOptions::new()
            .create(true)
            .read(true)
            .write(true)
            .truncate(false)
            .open(&partial)
            .map_err(|error| disk_error(&partial, error))?;
        let mut download = Download {
            job,
            size: file.facts.size,
            hasher: Hasher::new(etag, file.facts.size),
            file,
            partial,
            keep: locked,
            out,
            have: 0,
            retried_hash: false,
            renewed: false,
            slow: false,
        };
        download.read_partial()?;
        Ok(download)
    }

    /// Hashes what an earlier run left.
    fn read_partial(&mut self) -> Result<()> {
        let length = match self.out.metadata() {
            Ok(meta) => meta.len(),
            Err(error) => return Err(disk_error(&self.partial, error)),
        };
        // Without an announced size a git hash can only be taken once the length is known: start over.
        let usable = match (HashKind::of(&self.file.facts.etag), self.size) {
            (_, Some(size)) => length <= size,
            (HashKind::Sha256, None) => true,
            _ => false,
        };
        if !usable {
            return self.start_over();
        }
        let mut buffer = vec![0; CHUNK];
        loop {
            let read = self
                .out
                .read(&mut buffer)
                .map_err(|error| disk_error(&self.partial, error))?;
            if read == 0 {
                break;
            }
            self.hasher.update(&buffer[..read]);
            self.have += read as u64;
            if self.job.stop.load(Ordering::Relaxed) {
                break;
            }
        }
        self.tell();
        Ok(())
    }

    /// Begins again in a new file. The old one is not cut short: where locks do not work, another process may have
    /// finished it and given it its name, and programs map it.
    fn start_over(&mut self) -> Result<()> {
        let fresh = match fs::remove_file(&self.partial) {
            Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
            _ => OpenOptions::new()
                .create(true)
                .read(true)
                .write(true)
                .truncate(false)
                .open(&self.partial),
        };
        self.out = fresh.map_err(|error| disk_error(&self.partial, error))?;
        self.have = 0;
        self.hasher = Hasher::new(&self.file.facts.etag, self.size);
        self.tell();
        Ok(())
    }

    fn tell(&self) {
        self.job.progress.advanced(&self.file.path, self.have);
    }

    fn run(mut self) -> Result<()> {
        let path = self.file.path.clone();
        let (client, progress, stop) = (self.job.client, self.job.progress, self.job.stop);
        let arrived = client.persist(&path, progress, stop, |progressed| {
            let before = self.have;
            self.slow = false;
            let outcome = match self.attempt() {
                Err(Failure::Expired(error)) => self.renew(error),
                outcome => outcome,
            };
            if self.have > before {
                self.renewed = false;
                *progressed = !self.slow;
            }
            outcome
        });
        let done = arrived.and_then(|()| self.publish());
        if done.is_err() && (!self.keep || self.have == 0) {
            let _ = fs::remove_file(&self.partial);
        }
        done
    }

    /// A new address for the file. The first time costs no attempt; if it is refused too, the wait grows.
    fn renew(&mut self, error: Error) -> Result<(), Failure> {
        let facts = &self.file.facts;
        let fresh = self
            .job
            .client
            .describe(self.job.repo, &facts.commit, &self.file.path)?;
        if fresh.facts.etag != facts.etag {
            return Err(Failure::Final(HubErrorKind::BadReply.error(format!(
                "the hub now gives another hash for {} of the same commit; pull again",
                self.file.path
            ))));
        }
        self.file.address = fresh.address;
        if self.renewed {
            return Err(Failure::Passing(error, None));
        }
        self.renewed = true;
        match self.attempt() {
            Err(Failure::Expired(error)) => Err(Failure::Passing(error, None)),
            outcome => outcome,
        }
    }

    /// One request, from the byte where we are to the end, and the checks at the end.
    fn attempt(&mut self) -> Result<(), Failure> {
        if self.size != Some(self.have) {
            let range = (self.have > 0).then_some((self.have, None));
            let answer = self.job.client.get(self.job.repo, &self.file, range)?;
            self.accept(&answer)?;
            self.receive(answer)?;
        }
        self.check()
    }

    /// Decides by status and lengths whether the body continues what we have, replaces it, or is not the file.
    fn accept(&mut self, answer: &Answer) -> Result<(), Failure> {
        let reply = &answer.reply;
        match reply.status {
            200 => {
                // All of it: either we asked so, or the range was ignored.
                if self.have > 0 {
                    self.start_over()?;
                }
            }
            206 => {
                if !matches!(reply.content_range(), Some((Some(start), _)) if start == self.have) {
                    self.start_over()?;
                    return Err(self.wrong_length("the storage sends another part than asked for"));
                }
            }
            416 => {
                // We have more than there is.
                self.start_over()?;
                return Err(self.wrong_length("the storage has fewer bytes than are here already"));
            }
            _ => return Err(self.job.client.refused(self.job.repo, &self.file, answer)),
        }
        match (self.size, reply.total_length()) {
            (Some(size), Some(total)) if size != total => {
                Err(self.wrong_length(&format!("the storage announces {total} bytes")))
            }
            (None, Some(total)) => {
                self.size = Some(total);
                self.hasher = match (&self.hasher, self.have) {
                    (Hasher::Unknown, 0) => Hasher::new(&self.file.facts.etag, self.size),
                    _ => return Ok(()),
                };
                Ok(())
            }
            _ => Ok(()),
        }
    }

    /// Writes the body to the partial file.
    fn receive(&mut self, mut answer: Answer) -> Result<(), Failure> {
        let options = &self.job.client.options;
        let mut buffer = vec![0; CHUNK];
        let mut window = (Instant::now(), 0);
        loop {
            if self.job.stop.load(Ordering::Relaxed) {
                return Err(Failure::Final(
                    HubErrorKind::Unreachable.error(format!("{} was stopped", self.file.path)),
                ));
            }
            let read = match answer.body.read(&mut buffer) {
                Ok(read) => read,
                Err(error) if error.kind() == io::ErrorKind::Interrupted => continue,
                Err(error) => {
                    return Err(self.broken(&format!("the connection broke: {error}")));
                }
            };
            if read == 0 {
                return match self.size {
                    Some(size) if self.have < size => {
                        Err(self.broken("the connection ended early"))
                    }
                    _ => Ok(()),
                };
            }
            if let Some(size) = self.size
                && self.have + read as u64 > size
            {
                self.start_over()?;
                return Err(self.wrong_length("more bytes came"));
            }
            self.out
                .write_all(&buffer[..read])
                .map_err(|error| disk_error(&self.partial, error))?;
            self.hasher.update(&buffer[..read]);
            self.have += read as u64;
            self.tell();

            window.1 += read as u64;
            if window.0.elapsed() >= options.slow_window {
                if window.1 < options.slow_bytes && self.size != Some(self.have) {
                    self.slow = true;
                    return Err(self.broken(&format!(
                        "only {} bytes came in {} s",
                        window.1,
                        options.slow_window.as_secs_f64()
                    )));
                }
                window = (Instant::now(), 0);
            }
        }
    }

    /// Compares the hash of the complete file with the one announced.
    fn check(&mut self) -> Result<(), Failure> {
        let hasher = std::mem::replace(&mut self.hasher, Hasher::Unknown);
        let etag = self.file.facts.etag.clone();
        match hasher.finish() {
            None => {
                self.job.progress.note(&format!(
                    "{}: the hub gives no hash that its content could be checked against; only its length was",
                    self.file.path
                ));
                Ok(())
            }
            Some(hash) if hash == etag => Ok(()),
            Some(hash) => {
                let error = HubErrorKind::WrongHash.error(format!(
                    "{} of {} came with hash {hash} instead of {etag}: it was damaged or replaced on its way; nothing of it was kept",
                    self.file.path, self.job.repo
                ));
                self.start_over()?;
                if self.retried_hash {
                    return Err(Failure::Final(error));
                }
                self.retried_hash = true;
                Err(Failure::Passing(error, None))
            }
        }
    }

    /// Gives the blob its name.
    fn publish(&mut self) -> Result<()> {
        let blob = self.job.folder.blob(&self.file.facts.etag);
        let renamed = self
            .out
            .sync_all()
            .and_then(|()| fs::rename(&self.partial, &blob));
        match renamed {
            // Where locks do not work, another process may have been faster.
            Err(error)
                if error.kind() == io::ErrorKind::NotFound && self.job.is_here(&self.file) =>
            {
                Ok(())
            }
            renamed => renamed.map_err(|error| disk_error(&blob, error)),
        }
    }

    fn broken(&self, reason: &str) -> Failure {
        let of = match self.size {
            Some(size) => format!(" of {size}"),
            None => String::new(),
        };
        Failure::Passing(
            HubErrorKind::Unreachable.error(format!(
                "{} stopped after {}{of} bytes: {reason}; pull again to go on from there",
                self.file.path, self.have
            )),
            None,
        )
    }

    fn wrong_length(&self, reason: &str) -> Failure {
        let expected = match self.size {
            Some(size) => format!("{size} bytes"),
            None => "an unknown number of bytes".to_owned(),
        };
        Failure::Passing(
            HubErrorKind::WrongLength.error(format!(
                "{} of {} should have {expected}, but {reason}",
                self.file.path, self.job.repo
            )),
            None,
        )
    }
}
