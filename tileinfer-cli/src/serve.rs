//! `tileinfer serve`: a model behind the OpenAI-compatible server.

use std::path::Path;

use anyhow::Result;
use tileinfer::chat::ChatTemplate;
use tileinfer::config::ModelConfig;
use tileinfer::engine::{Engine, EngineOptions};
use tileinfer::sampling::generation_defaults;
use tileinfer::tokenizer::Tokenizer;
use tileinfer_server::{Model, ServeOptions};

use crate::args::ServeArgs;
use crate::models;
use crate::open::{self, Purpose};
use crate::speculate::Speculating;
use crate::voice::Voice;

pub(crate) fn serve(args: &ServeArgs) -> Result<()> {
    let voice = Voice::new(args.model.voice);
    let name = &args.model.name;
    let dir = models::dir_or_pull(&name.model, args.revision.as_deref(), name.hub, &voice)?;
    let options = ServeOptions {
        address: args.address,
        api_key: args.api_key.clone(),
        cors_origins: args.cors_origin.clone(),
        ..ServeOptions::default()
    };
    let served = args
        .served_name
        .clone()
        .unwrap_or_else(|| name.model.clone());
    let (place, sequences) = (args.model.place.clone(), args.max_sequences);
    let spec = Speculating::choose(&args.spec, name.hub, &voice)?;
    let load = move || load(&dir, served, &place, sequences, spec.as_ref(), &voice);
    let ready = move |address| voice.note(&format!("listening on http://{address} (Ctrl-C stops)"));
    tileinfer_server::serve(options, load, ready)
}

fn load(
    dir: &Path,
    name: String,
    place: &crate::args::PlaceArgs,
    sequences: usize,
    spec: Option<&Speculating>,
    voice: &Voice,
) -> Result<Model> {
    let tokenizer = Tokenizer::from_dir(dir)?;
    let defaults = generation_defaults(dir, &ModelConfig::from_dir(dir)?.eos_token_ids)?;
    // Without a template there are completions all the same.
    let template = ChatTemplate::load(dir)
        .map_err(|error| voice.note(&error.to_string()))
        .ok();
    let purpose = Purpose {
        sequences,
        length: None,
        profile: None,
        spec,
    };
    let opened = open::open(dir, place, purpose, voice)?;
    let engine = Engine::start(
        opened.steps,
        Some(tokenizer.clone()),
        EngineOptions::default(),
    )?;
    Ok(Model {
        name,
        engine,
        tokenizer,
        template,
        defaults,
    })
}
