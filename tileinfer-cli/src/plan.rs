//! `tileinfer plan`: the memory a model takes, from its configuration and the headers of its weights alone.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::json;
use tileinfer::config::ModelConfig;
use tileinfer::weights::{Checkpoint, HostModel, Int8Scheme, TensorInfo};

use crate::args::PlanArgs;
use crate::memory::readable;
use crate::models;
use crate::open::{self, Device};
use crate::pulling::PullProgress;
use crate::voice::Voice;

pub(crate) fn plan(args: &PlanArgs) -> Result<()> {
    let voice = Voice::new(args.model.voice);
    let place = &args.model.place;
    let device = Device::choose(place, &voice)?;
    let (config, tensors) = read(args, &voice)?;
    if let Some(scheme) = Int8Scheme::of(&config).map_err(anyhow::Error::msg)? {
        voice.note(&format!("the checkpoint holds {scheme}"));
    }
    let compute = open::compute_type(place.dtype);
    let weights_bytes = HostModel::bytes_of(&tensors, compute, open::int8(place));
    let plan = device.memory_plan(&config, weights_bytes, place, 1);
    let available = device.available()?;
    let most = config.max_position_embeddings as u64;
    let room = plan.max_context(available);
    let fitting = room.min(most);
    let fits = match place.ctx_size {
        Some(wanted) => wanted as u64 <= room,
        None => fitting > 0,
    };
    // What goes with the context beside its keys and values.
    let context = place.ctx_size.map_or(most, |wanted| wanted as u64);
    let rotations = plan.rope_bytes_per_position.saturating_mul(context);
    let workspace = plan.workspace_bytes.saturating_add(rotations);
    let mut out = std::io::stdout().lock();
    if args.json {
        let object = json!({
            "weights_bytes": plan.weights_bytes,
            "kv_bytes_per_token": plan.kv_bytes_per_token,
            "workspace_bytes": workspace,
            "max_context_that_fits": fitting,
            "device": device.name(),
            "fits": fits,
        });
        writeln!(out, "{object}")?;
        return Ok(());
    }
    let cache = plan.kv_bytes_per_token.saturating_mul(context);
    let all = plan
        .weights_bytes
        .saturating_add(workspace)
        .saturating_add(cache);
    for (what, bytes) in [
        ("weights", plan.weights_bytes),
        ("cache", cache),
        ("workspace", workspace),
        ("together", all),
        ("available", available),
    ] {
        writeln!(out, "{what:10} {:>9}", readable(bytes))?;
    }
    let device = device.name();
    if fits && fitting >= context.min(most) {
        writeln!(
            out,
            "fits on the {device} with a context of {context} tokens"
        )?;
    } else if fitting > 0 {
        writeln!(
            out,
            "fits on the {device} with a context of {fitting} tokens at most, not {context}: run it with --ctx-size {fitting} or less"
        )?;
    } else {
        writeln!(
            out,
            "does not fit on the {device}: close other programs, or choose a smaller model"
        )?;
    }
    Ok(())
}

/// Configuration and tensors of a model here, in the cache or on the hub.
fn read(args: &PlanArgs, voice: &Voice) -> Result<(ModelConfig, Vec<TensorInfo>)> {
    let name = &args.model.name;
    let revision = args.revision.revision.as_deref();
    let hub = models::hub_for(&name.model, name.hub)?;
    match hub.model_dir(&name.model, revision) {
        Ok(dir) => {
            let config = ModelConfig::from_dir(&dir)?;
            Ok((config, Checkpoint::open(&dir)?.tensors()))
        }
        Err(error) if models::is_not_cached(&error) && !hub.options().offline => {
            let progress = PullProgress::new(voice);
            let remote = hub.remote(&name.model, revision, &progress)?;
            let text = String::from_utf8(remote.read("config.json")?)
                .context("config.json is not UTF-8 text")?;
            let config = ModelConfig::from_json(&text, Path::new("config.json"))?;
            let headers = remote.headers()?;
            let tensors = headers.into_iter().flat_map(|file| file.header.tensors);
            Ok((config, tensors.collect()))
        }
        Err(error) => Err(error.into()),
    }
}
