//! Models from a hub (Hugging Face or a mirror), kept in the cache that Python's `huggingface_hub` uses too.
//!
//! This is the only module that speaks HTTP. It knows which files inference needs, and nothing of what they mean.
//!
//! ```no_run
//! use tileinfer::hub::{Hub, HubOptions, Silent};
//!
//! let hub = Hub::new(HubOptions::from_env()?)?;
//! let folder = hub.pull("Qwen/Qwen3-0.6B", None, &Silent)?;
//! assert_eq!(hub.model_dir("Qwen/Qwen3-0.6B", None)?, folder);
//! # Ok::<(), tileinfer::Error>(())
//! ```
//!
//! In the order of reading: `name` makes outside names safe, `options` says where and how patiently, `reply`
//! understands answers, `client` asks, `cache` is the layout on disk, `download` brings one file, `pull` a model,
//! `inventory` lists and removes, `remote` looks without downloading.

mod cache;
mod client;
mod download;
mod error;
mod inventory;
mod name;
mod options;
mod parallel;
mod progress;
mod pull;
mod remote;
pub mod reply;

use std::path::{Path, PathBuf};

pub use error::HubErrorKind;
pub use inventory::{CachedModel, Removed};
pub use name::{DEFAULT_REVISION, RepoId};
pub use options::{DEFAULT_ENDPOINT, HubOptions};
pub use progress::{PlannedFile, Progress, Silent};
pub use remote::{Remote, RemoteHeader};

use crate::{Error, Result};
use cache::RepoFolder;
use client::Client;

/// A hub and the cache in front of it. Making one opens nothing.
#[derive(Debug)]
pub struct Hub {
    client: Client,
}

impl Hub {
    /// # Errors
    /// A usage error if the endpoint is no address or the token cannot be sent.
    pub fn new(options: HubOptions) -> Result<Self> {
        Ok(Hub {
            client: Client::new(options)?,
        })
    }

    /// The settings it was made with.
    pub fn options(&self) -> &HubOptions {
        &self.client.options
    }

    /// Downloads what inference needs of a model and is not in the cache yet, and returns the folder with its files.
    /// `revision` is a branch, a tag or a commit; `None` means `main`.
    ///
    /// A branch or tag costs one question even if everything is here; without an answer the copy in the cache is
    /// returned and `progress` gets a note. A commit that is here costs none.
    ///
    /// # Errors
    /// [`Error::Hub`] with its kind, [`Error::Io`] for a cache that cannot be written, a usage error for an
    /// impossible id or revision. Files that are complete stay, partial ones are resumed by the next pull.
    pub fn pull(
        &self,
        repo: &str,
        revision: Option<&str>,
        progress: &dyn Progress,
    ) -> Result<PathBuf> {
        let (repo, revision) = names(repo, revision)?;
        pull::pull(&self.client, &repo, revision, progress)
    }

    /// The folder with the files of `model`, which is a directory or the id of a model in the cache. Opens no socket.
    ///
    /// # Errors
    /// [`HubErrorKind::NotCached`] if the model is not, or not completely, in the cache; a usage error for what is
    /// neither a directory nor an id.
    pub fn model_dir(&self, model: &str, revision: Option<&str>) -> Result<PathBuf> {
        let path = Path::new(model);
        if path.is_dir() {
            if let Some(revision) = revision {
                return Err(Error::usage(format!(
                    "{model} is a directory and has no revision {revision}"
                )));
            }
            return Ok(path.to_owned());
        }
        if path
            .extension()
            .is_some_and(|e| e.eq_ignore_ascii_case("gguf"))
        {
            return Err(Error::usage(format!(
                "{model}: GGUF files are not supported yet; use the model's safetensors repository"
            )));
        }
        if path.is_file() {
            return Err(Error::usage(format!(
                "{model} is a file; give the directory that holds config.json and the weights"
            )));
        }
        let (repo, revision) = names(model, revision)?;
        let folder = RepoFolder::new(&self.options().cache, &repo);
        let not_cached = |what: String| {
            HubErrorKind::NotCached.error(format!("{what}; run `tileinfer pull {repo}` first"))
        };
        let Some(commit) = folder.commit_of(revision) else {
            return Err(not_cached(format!(
                "{repo} is not in the cache {} in revision {revision}",
                self.options().cache.display()
            )));
        };
        match folder.first_missing(&commit) {
            None => Ok(folder.snapshot(&commit)),
            Some(path) => Err(not_cached(format!(
                "{repo} is not completely in the cache: {} is missing",
                folder.snapshot(&commit).join(path).display()
            ))),
        }
    }

    /// A file of a model in the cache, whether or not the rest of the model is there. Opens no socket.
    pub fn cached_file(
        &self,
        repo: &str,
        revision: Option<&str>,
        path: &str,
    ) -> Result<Option<PathBuf>> {
        let (repo, revision) = names(repo, revision)?;
        if !name::is_safe_path(path) {
            return Err(Error::usage(format!(
                "{path:?} is not a path in a repository"
            )));
        }
        let folder = RepoFolder::new(&self.options().cache, &repo);
        Ok(folder
            .commit_of(revision)
            .map(|commit| folder.snapshot(&commit).join(path))
            .filter(|path| path.is_file()))
    }

    /// The models in the cache that have weights in safetensors format, by id and commit. Opens no socket.
    pub fn list(&self) -> Result<Vec<CachedModel>> {
        inventory::list(&self.options().cache)
    }

    /// Removes a model from the cache: all of it, or one revision. A branch or tag whose commit other names stand
    /// for as well loses its name only; blobs that other revisions show stay. Opens no socket.
    ///
    /// # Errors
    /// [`HubErrorKind::NotCached`] if it is not there.
    pub fn remove(&self, repo: &str, revision: Option<&str>) -> Result<Removed> {
        let repo = RepoId::parse(repo)?;
        inventory::remove(&self.options().cache, &repo, revision)
    }

    /// A model on the hub, to be looked at without downloading it.
    pub fn remote<'a>(
        &'a self,
        repo: &str,
        revision: Option<&str>,
        progress: &'a dyn Progress,
    ) -> Result<Remote<'a>> {
        let (repo, revision) = names(repo, revision)?;
        Remote::new(&self.client, repo, revision, progress)
    }
}

fn names<'a>(repo: &str, revision: Option<&'a str>) -> Result<(RepoId, &'a str)> {
    let revision = revision.unwrap_or(DEFAULT_REVISION);
    let repo = RepoId::parse(repo)?;
    name::check_revision(revision)?;
    Ok((repo, revision))
}
