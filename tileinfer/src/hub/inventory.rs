//! What is in the cache, and taking it out again. Opens no socket.

use std::collections::{BTreeMap, BTreeSet};
use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use serde::Serialize;

use super::cache::{RepoFolder, files_below, first_missing, refs_below};
use super::error::HubErrorKind;
use super::name::{DEFAULT_REVISION, RepoId, check_revision, is_commit};
use crate::{Error, Result};

/// A model in the cache: one commit of one repository.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct CachedModel {
    /// Repository id.
    pub id: String,
    /// A ref that stands for the commit (`main` if it does), else the commit itself.
    pub revision: String,
    /// Commit hash.
    pub commit: String,
    /// Total size of the files in bytes. Files shared with other commits count for each.
    pub size_bytes: u64,
    /// The folder with its files.
    pub path: PathBuf,
    /// Paths of its files.
    #[serde(skip)]
    pub files: Vec<String>,
    /// Whether everything that inference needs is there.
    #[serde(skip)]
    pub complete: bool,
}

/// What [`Hub::remove`](super::Hub::remove) did.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Removed {
    /// Commits whose files are gone.
    pub commits: Vec<String>,
    /// Refs that are gone.
    pub refs: Vec<String>,
    /// Bytes that are free again.
    pub freed_bytes: u64,
}

pub(super) fn list(cache: &Path) -> Result<Vec<CachedModel>> {
    let entries = match fs::read_dir(cache) {
        Ok(entries) => entries,
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(Error::io(cache, error)),
    };
    let mut repos: Vec<RepoId> = entries
        .flatten()
        .filter_map(|entry| RepoId::from_folder(entry.file_name().to_str()?))
        .collect();
    repos.sort();
    let mut models = Vec::new();
    for repo in repos {
        let folder = RepoFolder::new(cache, &repo);
        let refs = refs_below(&folder.refs());
        for commit in commits(&folder) {
            let path = folder.snapshot(&commit);
            let sizes: Vec<(String, u64)> = files_below(&path)
                .into_iter()
                .filter_map(|file| Some((file.clone(), fs::metadata(path.join(file)).ok()?.len())))
                .collect();
            if !sizes.iter().any(|(file, _)| file.ends_with(".safetensors")) {
                continue;
            }
            models.push(CachedModel {
                id: repo.as_str().to_owned(),
                revision: best_ref(&refs, &commit).unwrap_or(&commit).to_owned(),
                size_bytes: sizes.iter().map(|(_, size)| size).sum(),
                complete: first_missing(&path).is_none(),
                files: sizes.into_iter().map(|(file, _)| file).collect(),
                commit,
                path,
            });
        }
    }
    Ok(models)
}

fn best_ref<'a>(refs: &'a [(String, String)], commit: &str) -> Option<&'a str> {
    let mut names: Vec<&str> = refs
        .iter()
        .filter(|(_, c)| c == commit)
        .map(|(name, _)| name.as_str())
        .collect();
    names.sort_by_key(|name| (*name != DEFAULT_REVISION, *name));
    names.first().copied()
}

fn commits(folder: &RepoFolder) -> Vec<String> {
    let mut commits: Vec<String> = fs::read_dir(folder.snapshots())
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().into_string().ok())
        .filter(|name| is_commit(name))
        .collect();
    commits.sort();
    commits
}

/// Removes a repository, or one revision of it. A named revision whose commit other refs stand for as well
/// loses its name only. Blobs that remaining snapshots show stay.
pub(super) fn remove(cache: &Path, repo: &RepoId, revision: Option<&str>) -> Result<Removed> {
    let folder = RepoFolder::new(cache, repo);
    if !folder.path().is_dir() {
        return Err(HubErrorKind::NotCached.error(format!(
            "{repo} is not in the cache {}; `list` shows what is",
            cache.display()
        )));
    }
    let refs = refs_below(&folder.refs());
    let Some(revision) = revision else {
        return remove_repo(&folder, refs);
    };
    check_revision(revision)?;
    let Some(commit) = folder.commit_of(revision) else {
        return Err(not_there(&folder, repo, revision, &refs));
    };

    let same: Vec<String> = refs
        .iter()
        .filter(|(_, c)| *c == commit)
        .map(|(name, _)| name.clone())
        .collect();
    let names_only = !is_commit(revision) && same.len() > 1;
    let doomed = if names_only {
        vec![revision.to_owned()]
    } else {
        same
    };
    let there = commits(&folder);
    if !names_only && !there.contains(&commit) && doomed.is_empty() {
        return Err(not_there(&folder, repo, revision, &refs));
    }
    if !names_only && there.iter().all(|c| *c == commit) {
        return remove_repo(&folder, refs);
    }
    for name in &doomed {
        let path = folder.refs().join(name);
        fs::remove_file(&path).map_err(|error| Error::io(&path, error))?;
    }
    let mut removed = Removed {
        refs: doomed,
        ..Removed::default()
    };
    if names_only || !there.contains(&commit) {
        return Ok(removed);
    }

    let mut kept = BTreeSet::new();
    for other in there.iter().filter(|c| **c != commit) {
        kept.extend(shown_blobs(&folder, other).into_values());
    }
    let own = shown_blobs(&folder, &commit);
    let snapshot = folder.snapshot(&commit);
    for file in files_below(&snapshot) {
        if !own.contains_key(&file) {
            removed.freed_bytes += own_size(&snapshot.join(file));
        }
    }
    remove_folder(&snapshot)?;
    for blob in own.into_values().collect::<BTreeSet<_>>() {
        if kept.contains(&blob) {
            continue;
        }
        let path = folder.blob(&blob);
        let size = own_size(&path);
        match fs::remove_file(&path) {
            Ok(()) => removed.freed_bytes += size,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => return Err(Error::io(path, error)),
        }
    }
    remove_folder(&folder.absences(&commit))?;
    let _ = fs::remove_file(folder.tree(&commit));
    removed.commits.push(commit);
    Ok(removed)
}

/// Refs go first, then snapshots: whatever is left by an interruption is no model any more.
fn remove_repo(folder: &RepoFolder, refs: Vec<(String, String)>) -> Result<Removed> {
    let removed = Removed {
        commits: commits(folder),
        refs: refs.into_iter().map(|(name, _)| name).collect(),
        freed_bytes: files_below(&folder.path())
            .iter()
            .map(|file| own_size(&folder.path().join(file)))
            .sum(),
    };
    remove_folder(&folder.refs())?;
    remove_folder(&folder.snapshots())?;
    remove_folder(&folder.path())?;
    let _ = fs::remove_dir_all(folder.locks());
    Ok(removed)
}

/// Removes what stands at `path` without following links.
fn remove_folder(path: &Path) -> Result<()> {
    let gone = match fs::symlink_metadata(path) {
        Ok(kind) if kind.is_dir() => fs::remove_dir_all(path),
        Ok(_) => fs::remove_file(path),
        Err(error) => Err(error),
    };
    match gone {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io(path, error)),
        _ => Ok(()),
    }
}

/// Size of a plain file; a link has none of its own.
fn own_size(path: &Path) -> u64 {
    match fs::symlink_metadata(path) {
        Ok(kind) if kind.is_file() => kind.len(),
        _ => 0,
    }
}

/// The files of a snapshot that are links to blobs of this repository, with the blobs' names.
fn shown_blobs(folder: &RepoFolder, commit: &str) -> BTreeMap<String, String> {
    let snapshot = folder.snapshot(commit);
    let blobs = fs::canonicalize(folder.blobs()).ok();
    files_below(&snapshot)
        .into_iter()
        .filter_map(|file| {
            let entry = snapshot.join(&file);
            let target = entry.parent()?.join(fs::read_link(&entry).ok()?);
            // Only the first link counts: the blob itself may be a link into a store shared by all models.
            if fs::canonicalize(target.parent()?).ok() != blobs {
                return None;
            }
            let blob = target.file_name()?.to_str()?.to_owned();
            Some((file, blob))
        })
        .collect()
}

fn not_there(
    folder: &RepoFolder,
    repo: &RepoId,
    revision: &str,
    refs: &[(String, String)],
) -> Error {
    let mut known: Vec<String> = refs.iter().map(|(name, _)| name.clone()).collect();
    known.extend(commits(folder));
    HubErrorKind::NotCached.error(format!(
        "revision {revision} of {repo} is not in the cache; there are: {}",
        known.join(", ")
    ))
}
