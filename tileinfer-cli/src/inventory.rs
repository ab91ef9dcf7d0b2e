//! `tileinfer pull`, `list` and `rm`: what the cache gets, holds and loses.

use std::io::Write;

use anyhow::Result;

use crate::args::{ListArgs, PullArgs, RmArgs};
use crate::memory::readable;
use crate::models;
use crate::pulling::PullProgress;
use crate::voice::Voice;

pub(crate) fn pull(args: &PullArgs) -> Result<()> {
    let voice = Voice::new(args.voice);
    let hub = models::hub(args.hub)?;
    let revision = args.revision.revision.as_deref();
    let dir = hub.pull(&args.model, revision, &PullProgress::new(&voice))?;
    writeln!(std::io::stdout(), "{}", dir.display())?;
    Ok(())
}

pub(crate) fn list(args: &ListArgs) -> Result<()> {
    let voice = Voice::new(args.voice);
    let hub = models::hub(crate::args::HubArgs { offline: true })?;
    let models = hub.list()?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&models)?)?;
        return Ok(());
    }
    if models.is_empty() {
        voice.note(&format!(
            "there is no model in {}; `tileinfer pull Qwen/Qwen3-0.6B` would get one",
            hub.options().cache.display()
        ));
        return Ok(());
    }
    let widest = |length: fn(&tileinfer::hub::CachedModel) -> usize| {
        models.iter().map(length).max().unwrap_or(0)
    };
    let (ids, revisions) = (widest(|m| m.id.len()), widest(|m| m.revision.len().min(12)));
    for model in &models {
        let state = if model.complete { "" } else { "  incomplete" };
        writeln!(
            out,
            "{:ids$}  {:revisions$.12}  {:.8}  {:>8}{state}",
            model.id,
            model.revision,
            model.commit,
            readable(model.size_bytes)
        )?;
    }
    Ok(())
}

pub(crate) fn rm(args: &RmArgs) -> Result<()> {
    let voice = Voice::new(args.voice);
    let hub = models::hub(args.hub)?;
    let removed = hub.remove(&args.model, args.revision.as_deref())?;
    let model = &args.model;
    if removed.commits.is_empty() && !removed.refs.is_empty() {
        voice.note(&format!(
            "{model}: the name {} is gone; its files stay, since another name stands for the same commit",
            removed.refs.join(", ")
        ));
        return Ok(());
    }
    for commit in &removed.commits {
        voice.note(&format!("{model}: removed commit {commit}"));
    }
    let freed = readable(removed.freed_bytes);
    writeln!(std::io::stdout(), "{freed} freed")?;
    Ok(())
}
