//! From a name on the command line to a directory: what is there, what the cache has, what the hub has.

use std::path::{Path, PathBuf};

use anyhow::Result;
use tileinfer::Error;
use tileinfer::hub::{Hub, HubErrorKind, HubOptions};

use crate::args::HubArgs;
use crate::pulling::PullProgress;
use crate::voice::Voice;

/// The hub that the environment names.
pub(crate) fn hub(args: HubArgs) -> Result<Hub> {
    let mut options = HubOptions::from_env()?;
    options.offline |= args.offline;
    Ok(Hub::new(options)?)
}

/// The directory of `model`, which has to be here already. Opens no socket.
pub(crate) fn dir(model: &str, revision: Option<&str>, args: HubArgs) -> Result<PathBuf> {
    Ok(hub_for(model, args)?.model_dir(model, revision)?)
}

/// The directory of `model`, downloaded first if it is not here.
pub(crate) fn dir_or_pull(
    model: &str,
    revision: Option<&str>,
    args: HubArgs,
    voice: &Voice,
) -> Result<PathBuf> {
    let hub = hub_for(model, args)?;
    match hub.model_dir(model, revision) {
        Err(error) if is_not_cached(&error) => {
            let progress = PullProgress::new(voice);
            Ok(hub.pull(model, revision, &progress)?)
        }
        found => Ok(found?),
    }
}

/// Whether a model is merely not here.
pub(crate) fn is_not_cached(error: &Error) -> bool {
    let kind = HubErrorKind::NotCached;
    matches!(error, Error::Hub { kind: found, .. } if *found == kind)
}

/// A directory needs no cache, so it also runs where there is no place for one.
pub(crate) fn hub_for(model: &str, args: HubArgs) -> Result<Hub> {
    match hub(args) {
        Err(_) if Path::new(model).exists() => Ok(Hub::new(HubOptions::new(""))?),
        result => result,
    }
}
