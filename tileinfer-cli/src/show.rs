//! `tileinfer show`: a model's configuration as it is understood.

use std::io::Write;
use std::path::Path;

use anyhow::{Context, Result};
use tileinfer::config::ModelConfig;

use crate::args::{NameArgs, RevisionArgs, ShowArgs};
use crate::models;
use crate::pulling::PullProgress;
use crate::voice::Voice;

pub(crate) fn show(args: &ShowArgs) -> Result<()> {
    let voice = Voice::new(args.voice);
    let config = config(&args.name, &args.revision, &voice)?;
    let mut out = std::io::stdout().lock();
    if args.json {
        writeln!(out, "{}", serde_json::to_string(&config)?)?;
        return Ok(());
    }
    let windows = config.layers.iter().filter(|layer| layer.window.is_some());
    let no_rope = config.layers.iter().filter(|layer| !layer.rope).count();
    let rows = [
        ("model type", config.model_type.clone()),
        (
            "parameters",
            format!("{:.3} billion", config.parameter_count() as f64 / 1e9),
        ),
        ("layers", config.num_layers.to_string()),
        ("hidden size", config.hidden_size.to_string()),
        ("intermediate size", config.intermediate_size.to_string()),
        (
            "heads",
            format!(
                "{} of width {}, {} for keys and values",
                config.num_heads, config.head_dim, config.num_kv_heads
            ),
        ),
        ("vocabulary", config.vocab_size.to_string()),
        ("context", config.max_position_embeddings.to_string()),
        ("layers with a window", windows.count().to_string()),
        ("layers without RoPE", no_rope.to_string()),
        ("head is the embedding", yes(config.tie_word_embeddings)),
        ("end tokens", format!("{:?}", config.eos_token_ids)),
    ];
    for (name, value) in rows {
        writeln!(out, "{name:22} {value}")?;
    }
    if let Some(quantization) = &config.quantization {
        writeln!(out, "{:22} {quantization}", "quantization")?;
    }
    Ok(())
}

fn yes(is: bool) -> String {
    if is { "yes" } else { "no" }.to_owned()
}

/// The configuration of a model here, in the cache or on the hub.
fn config(name: &NameArgs, revision: &RevisionArgs, voice: &Voice) -> Result<ModelConfig> {
    let revision = revision.revision.as_deref();
    let hub = models::hub_for(&name.model, name.hub)?;
    match hub.model_dir(&name.model, revision) {
        Ok(dir) => Ok(ModelConfig::from_dir(&dir)?),
        Err(error) if models::is_not_cached(&error) && !hub.options().offline => {
            let progress = PullProgress::new(voice);
            let remote = hub.remote(&name.model, revision, &progress)?;
            let text = String::from_utf8(remote.read("config.json")?)
                .context("config.json is not UTF-8 text")?;
            Ok(ModelConfig::from_json(&text, Path::new("config.json"))?)
        }
        Err(error) => Err(error.into()),
    }
}
