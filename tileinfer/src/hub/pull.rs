//! A whole model from the hub into the cache: which files inference needs, in which order they are fetched, and
//! when an older copy will do. Asks about files by name; the hub's list of files is not needed.

use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use super::cache::{CONFIG, INDEX, Known, RepoFolder, SIDE_FILES, SINGLE};
use super::client::{Client, RemoteFile};
use super::download::Job;
use super::error::HubErrorKind;
use super::name::{RepoId, is_commit};
use super::parallel::in_parallel;
use super::progress::{PlannedFile, Progress};
use super::reply::shards;
use crate::{Error, Result};

/// Largest index that is read: some hundred bytes per tensor are usual.
const MAX_INDEX_BYTES: u64 = 256 << 20;

/// Brings everything that inference needs into the cache and returns the folder of the snapshot.
/// `config.json` comes last and the ref after it, so an interrupted pull never looks like a model.
pub(super) fn pull(
    client: &Client,
    repo: &RepoId,
    revision: &str,
    progress: &dyn Progress,
) -> Result<PathBuf> {
    let folder = RepoFolder::new(&client.options.cache, repo);
    let stop = AtomicBool::new(false);
    let pull = Pull {
        job: Job {
            client,
            repo,
            folder: &folder,
            progress,
            stop: &stop,
        },
    };
    let cached = folder
        .commit_of(revision)
        .filter(|commit| folder.first_missing(commit).is_none());
    if let Some(commit) = &cached
        && (client.options.offline || is_commit(revision) && pull.nothing_to_ask(commit))
    {
        return Ok(folder.snapshot(commit));
    }

    let asked = match &cached {
        // With a copy at hand there is no point in waiting for a hub that does not answer.
        Some(_) => client
            .describe(repo, revision, CONFIG)
            .map_err(|failure| failure.into_error()),
        None => pull.describe(revision, CONFIG),
    };
    let config = match (asked, cached) {
        (Ok(config), _) => config,
        (Err(error), Some(commit)) if may_fall_back(&error) => {
            progress.note(&format!(
                "{error}. Using the copy of {repo} in the cache, commit {commit}"
            ));
            return Ok(folder.snapshot(&commit));
        }
        (Err(error), _) => return Err(explain(error, repo, revision)),
    };
    let commit = config.facts.commit.clone();
    pull.files(&commit, config)?;
    if let Err(error) = folder.write_ref(revision, &commit) {
        progress.note(&format!(
            "{}: {error}; that {revision} stands for commit {commit} is not noted",
            folder.refs().display()
        ));
    }
    match folder.first_missing(&commit) {
        None => Ok(folder.snapshot(&commit)),
        Some(path) => Err(Error::bad_model(
            folder.snapshot(&commit).join(path),
            "it was there a moment ago; is another program removing the model?",
        )),
    }
}

/// Whether a copy in the cache may stand in after this error. A hub that says that the revision is gone, or has
/// no `config.json` any more, is believed.
fn may_fall_back(error: &Error) -> bool {
    !matches!(
        error,
        Error::Hub {
            kind: HubErrorKind::RevisionNotFound | HubErrorKind::FileNotFound,
            ..
        }
    )
}

/// A better sentence for a repository that is no model, and for a pull without network.
fn explain(error: Error, repo: &RepoId, revision: &str) -> Error {
    match error {
        Error::Hub {
            kind: HubErrorKind::FileNotFound,
            ..
        } => HubErrorKind::FileNotFound.error(format!(
            "{repo} has no config.json in revision {revision}, so it is not a model in the format of transformers (GGUF files and adapters alone cannot be run); choose a repository with config.json, tokenizer.json and *.safetensors"
        )),
        Error::Hub {
            kind: HubErrorKind::Offline,
            message,
        } => HubErrorKind::Offline.error(format!(
            "{repo} is not completely in the cache in revision {revision}: {message}"
        )),
        other => other,
    }
}

struct Pull<'a> {
    job: Job<'a>,
}

impl Pull<'_> {
    fn known(&self, commit: &str, path: &str) -> Known {
        self.job.folder.known(commit, path)
    }

    /// Whether it is known of every optional file of a complete snapshot that it is here or does not exist.
    fn nothing_to_ask(&self, commit: &str) -> bool {
        SIDE_FILES
            .iter()
            .all(|path| self.known(commit, path) != Known::Unknown)
    }

    fn describe(&self, revision: &str, path: &str) -> Result<RemoteFile> {
        let job = &self.job;
        let file = job.client.persist(path, job.progress, job.stop, |_| {
            job.client.describe(job.repo, revision, path)
        })?;
        if is_commit(revision) && file.facts.commit != revision {
            return Err(HubErrorKind::BadReply.error(format!(
                "{} was asked for {path} in commit {revision} of {} and describes commit {}",
                job.client.endpoint(),
                job.repo,
                file.facts.commit
            )));
        }
        Ok(file)
    }

    /// The description of an optional file, unless it is here already or there is none, which is noted.
    fn describe_optional(&self, commit: &str, path: &str) -> Result<Option<RemoteFile>> {
        if self.known(commit, path) != Known::Unknown {
            return Ok(None);
        }
        match self.describe(commit, path) {
            Ok(file) => Ok(Some(file)),
            Err(Error::Hub {
                kind: HubErrorKind::FileNotFound,
                ..
            }) => {
                if let Err(error) = self.job.folder.write_absence(commit, path) {
                    tracing::debug!(%error, path, "cannot note that a file does not exist");
                }
                Ok(None)
            }
            Err(error) => Err(error),
        }
    }

    /// Downloads what is missing of a commit.
    fn files(&self, commit: &str, config: RemoteFile) -> Result<()> {
        let shards = self.shards(commit)?;
        let missing: Vec<String> = shards
            .into_iter()
            .filter(|path| self.known(commit, path) != Known::Present)
            .collect();
        let mut wanted = self.in_parallel(missing, |path| {
            self.describe(commit, &path)
                .map_err(|error| no_weights(error, &path))
        })?;
        let sides = SIDE_FILES.map(str::to_owned).to_vec();
        let sides = self.in_parallel(sides, |path| self.describe_optional(commit, &path))?;
        wanted.extend(sides.into_iter().flatten());

        let config = (self.known(commit, CONFIG) != Known::Present).then_some(config);
        let planned: Vec<PlannedFile> = wanted
            .iter()
            .chain(&config)
            .map(|file| self.plan(file))
            .collect();
        if planned.is_empty() {
            return Ok(());
        }
        self.prepare()?;
        let needed = planned
            .iter()
            .map(|file| file.size.unwrap_or(0).saturating_sub(file.have))
            .fold(0u64, u64::saturating_add);
        self.job.check_space(needed)?;
        self.job.progress.planned(&planned);
        self.in_parallel(wanted, |file| self.job.bring(file))?;
        if let Some(config) = config {
            self.job.bring(config)?;
        }
        Ok(())
    }

    /// The weight files: those the index names, fetched first, or the single one.
    fn shards(&self, commit: &str) -> Result<Vec<String>> {
        let index = self.job.folder.snapshot(commit).join(INDEX);
        if let Some(file) = self.describe_optional(commit, INDEX)? {
            if let Some(size) = file.facts.size
                && size > MAX_INDEX_BYTES
            {
                return Err(HubErrorKind::BadReply.error(format!(
                    "{INDEX} of {} would have {size} bytes, which is not plausible; the limit is {MAX_INDEX_BYTES}",
                    self.job.repo
                )));
            }
            self.prepare()?;
            self.job.progress.planned(&[self.plan(&file)]);
            self.job.bring(file)?;
        }
        if self.known(commit, INDEX) != Known::Present {
            return Ok(vec![SINGLE.to_owned()]);
        }
        let bytes = std::fs::read(&index).map_err(|error| Error::io(&index, error))?;
        shards(&bytes).map_err(|reason| Error::bad_model(index, reason))
    }

    fn plan(&self, file: &RemoteFile) -> PlannedFile {
        PlannedFile {
            path: file.path.clone(),
            size: file.facts.size,
            have: self.job.have(file),
        }
    }

    fn prepare(&self) -> Result<()> {
        let blobs = self.job.folder.blobs();
        std::fs::create_dir_all(&blobs).map_err(|error| Error::io(&blobs, error))?;
        self.job.folder.write_tag();
        Ok(())
    }

    fn in_parallel<T: Send, R: Send>(
        &self,
        items: Vec<T>,
        work: impl Fn(T) -> Result<R> + Sync,
    ) -> Result<Vec<R>> {
        in_parallel(self.job.client.options.workers, self.job.stop, items, work)
    }
}

fn no_weights(error: Error, path: &str) -> Error {
    match error {
        Error::Hub {
            kind: HubErrorKind::FileNotFound,
            message,
        } if path == SINGLE => HubErrorKind::FileNotFound.error(format!(
            "{message}, nor {INDEX}: there are no weights in safetensors format; choose a repository that has them"
        )),
        other => other,
    }
}
