//! What can go wrong, sorted by whose problem it is.

use std::path::{Path, PathBuf};

use crate::hub::HubErrorKind;

/// Shorthand for results of this crate.
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Whose problem an [`Error`] is; a server maps it to a status, the command line to advice.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ErrorKind {
    /// The caller asked for something that cannot be: a wrong parameter, a prompt that does not fit.
    Usage,
    /// The request is fine, there is no room for it now: pages, memory, queue.
    Overload,
    /// A file of the model is missing, damaged or of a kind that is not supported.
    BadModel,
    /// The operating system or the device refused.
    System,
    /// A mistake of this program.
    Bug,
}

/// An error of the library. Every message names the file, tensor, field or number it is about.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum Error {
    /// A parameter or an input that cannot be used as given.
    #[error("{0}")]
    Usage(String),

    /// A model file that cannot be used.
    #[error("{}: {reason}", path.display())]
    BadModel {
        /// The file, or the directory if the file itself is missing.
        path: PathBuf,
        /// What is wrong with it, naming the field or tensor.
        reason: String,
    },

    /// More positions than the model or the cache can hold.
    #[error(
        "the context is full: {needed} positions are needed and the limit is {limit}; shorten the prompt, ask for fewer tokens or raise the context size"
    )]
    ContextFull {
        /// Positions that the request needs.
        needed: usize,
        /// Positions there are.
        limit: usize,
    },

    /// The KV cache has fewer free pages than a step needs.
    #[error("the KV cache is out of pages: {needed} more are needed and {free} are free")]
    OutOfPages {
        /// Pages that the step needs beyond those it has.
        needed: usize,
        /// Pages that are free.
        free: usize,
    },

    /// More requests than may wait.
    #[error(
        "{waiting} requests are waiting already and no more may (the limit is {limit}); try again later"
    )]
    QueueFull {
        /// Requests that wait.
        waiting: usize,
        /// How many may.
        limit: usize,
    },

    /// An allocation that does not fit.
    #[error("out of memory: {what} needs {needed} bytes and {available} are available")]
    OutOfMemory {
        /// What was to be allocated.
        what: String,
        /// Bytes it needs.
        needed: u64,
        /// Bytes there are.
        available: u64,
    },

    /// The operating system refused something about a file.
    #[error("{}: {source}", path.display())]
    Io {
        /// The file.
        path: PathBuf,
        /// What the operating system said.
        source: std::io::Error,
    },

    /// The model hub refused, cannot be reached, or sent something that cannot be trusted.
    #[error("{message}")]
    Hub {
        /// What it is, for callers that act on it.
        kind: HubErrorKind,
        /// The whole sentence: what was asked, what came back, what to do.
        message: String,
    },

    /// A device (a GPU, its driver, its compiler) refused.
    #[error("{0}")]
    Device(String),

    /// A mistake of this program.
    #[error("{0}. This is a bug, please report it")]
    Bug(String),
}

impl Error {
    /// Whose problem it is.
    pub fn kind(&self) -> ErrorKind {
        match self {
            Error::Usage(_) | Error::ContextFull { .. } => ErrorKind::Usage,
            Error::OutOfPages { .. } | Error::OutOfMemory { .. } | Error::QueueFull { .. } => {
                ErrorKind::Overload
            }
            Error::BadModel { .. } => ErrorKind::BadModel,
            Error::Hub { kind, .. } => kind.error_kind(),
            Error::Io { .. } | Error::Device(_) => ErrorKind::System,
            Error::Bug(_) => ErrorKind::Bug,
        }
    }

    /// A model file that cannot be used, and why.
    pub fn bad_model(path: impl AsRef<Path>, reason: impl Into<String>) -> Self {
        Error::BadModel {
            path: path.as_ref().to_owned(),
            reason: reason.into(),
        }
    }

    /// What the operating system said about `path`.
    pub fn io(path: impl AsRef<Path>, source: std::io::Error) -> Self {
        Error::Io {
            path: path.as_ref().to_owned(),
            source,
        }
    }

    /// A parameter that cannot be used as given.
    pub fn usage(reason: impl Into<String>) -> Self {
        Error::Usage(reason.into())
    }
}
