//! The ways in which a hub can say no, told apart. Knows neither HTTP nor files.

use std::time::Duration;

use crate::{Error, ErrorKind};

/// What went wrong between this machine and the model hub.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub enum HubErrorKind {
    /// The hub does not know the token that was sent.
    BadToken,
    /// The model's licence has to be accepted on `page` first, by the account the token belongs to.
    Gated {
        /// The web page on which to accept it.
        page: String,
    },
    /// No such repository, or a private one: hubs do not say which.
    RepoNotFound,
    /// The repository has no such branch, tag or commit.
    RevisionNotFound,
    /// The repository has no such file in that revision.
    FileNotFound,
    /// The repository has been closed by the hub.
    Disabled,
    /// The token is valid and may not do this.
    Forbidden,
    /// Too many requests.
    RateLimited {
        /// How long the hub asks to wait, if it says.
        retry_after: Option<Duration>,
    },
    /// What answered is not a hub: a proxy, a login page, a wrong endpoint.
    NotAHub,
    /// The hub or its storage answered with this status, again and again.
    Status(u16),
    /// No connection, or one that breaks or stalls again and again.
    Unreachable,
    /// The network would be needed and is switched off.
    Offline,
    /// The model is not, or not completely, in the cache.
    NotCached,
    /// A file came with another length than the hub announced.
    WrongLength,
    /// A file's content does not have the hash that the hub announced.
    WrongHash,
    /// The disk of the cache is full.
    DiskFull,
    /// A redirect that leads in circles or where it must not.
    BadRedirect,
    /// A reply that cannot be used: a field is missing, or a name in it is not safe.
    BadReply,
}

impl HubErrorKind {
    /// Whose problem it is.
    pub fn error_kind(&self) -> ErrorKind {
        match self {
            HubErrorKind::BadToken
            | HubErrorKind::Gated { .. }
            | HubErrorKind::RepoNotFound
            | HubErrorKind::RevisionNotFound
            | HubErrorKind::FileNotFound
            | HubErrorKind::Disabled
            | HubErrorKind::Forbidden
            | HubErrorKind::Offline
            | HubErrorKind::NotCached => ErrorKind::Usage,
            HubErrorKind::RateLimited { .. } => ErrorKind::Overload,
            HubErrorKind::NotAHub
            | HubErrorKind::Status(_)
            | HubErrorKind::Unreachable
            | HubErrorKind::WrongLength
            | HubErrorKind::WrongHash
            | HubErrorKind::DiskFull
            | HubErrorKind::BadRedirect
            | HubErrorKind::BadReply => ErrorKind::System,
        }
    }

    pub(super) fn error(self, message: impl Into<String>) -> Error {
        Error::Hub {
            kind: self,
            message: message.into(),
        }
    }
}

/// A failed attempt, and whether another one makes sense.
#[derive(Debug)]
pub(super) enum Failure {
    /// May pass: try again, not before the given time.
    Passing(Error, Option<Duration>),
    /// The address of the file no longer works: ask the hub for a new one, then try again.
    Expired(Error),
    /// Trying again would not change it.
    Final(Error),
}

impl Failure {
    pub(super) fn into_error(self) -> Error {
        match self {
            Failure::Passing(error, _) | Failure::Expired(error) | Failure::Final(error) => error,
        }
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        Failure::Final(error)
    }
}
