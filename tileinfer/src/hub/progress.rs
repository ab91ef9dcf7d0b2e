//! What a pull tells about itself while it runs. Knows nothing of terminals.

/// One file of a pull.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlannedFile {
    /// Its path in the repository.
    pub path: String,
    /// Its size in bytes, if the hub says.
    pub size: Option<u64>,
    /// Bytes of it that are on this machine already.
    pub have: u64,
}

/// Receives the events of a pull, from several threads at once. Every method may be left out.
pub trait Progress: Sync {
    /// Files to be downloaded. It is called again when more of them become known, with those only.
    fn planned(&self, files: &[PlannedFile]) {
        let _ = files;
    }

    /// `path` has its first `position` bytes now. That may be fewer than before: a transfer can start over.
    fn advanced(&self, path: &str, position: u64) {
        let _ = (path, position);
    }

    /// `path` has been checked and is in the cache.
    fn finished(&self, path: &str) {
        let _ = path;
    }

    /// Something worth a line: a wait, a new attempt, a fallback.
    fn note(&self, message: &str) {
        let _ = message;
    }
}

/// A [`Progress`] that tells nobody.
#[derive(Debug, Clone, Copy, Default)]
pub struct Silent;

impl Progress for Silent {}
