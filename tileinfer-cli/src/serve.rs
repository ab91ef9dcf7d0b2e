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
use crate::open::{self, Device, Purpose};
use crate::speculate::Speculating;
use crate::voice::Voice;

/// Rows of new prompts that a step of the CPU takes beside the next tokens of those who are answered already. A step
/// of SmolLM2 with 64 rows takes as long as some 7 without, one of 512 as long as 50: that is how long each of the
/// others would wait when somebody comes. More rows would cost each a little less, by a tenth from 64 to 128.
const PREFILL_BESIDE_DECODE_ON_CPU: usize = 64;

/// The same on a GPU: a step of an 8B model with 64 sequences and so many rows takes less than twice as long as one
/// without.
#[cfg(feature = "cuda")]
const PREFILL_BESIDE_DECODE_ON_GPU: usize = 192;

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
        .unwrap_or_else(|| usual_name(&name.model));
    let (place, sequences) = (args.model.place.clone(), args.max_sequences.unwrap_or(0));
    let spec = Speculating::choose(&args.spec, name.hub, &voice)?;
    let load = move || load(&dir, served, &place, sequences, spec.as_ref(), &voice);
    let ready = move |address| voice.note(&format!("listening on http://{address} (Ctrl-C stops)"));
    tileinfer_server::serve(options, load, ready)
}

/// What clients call a model: its id on the hub, or the folder's own name.
fn usual_name(model: &str) -> String {
    let folder = Path::new(model);
    let canonical = folder.canonicalize().ok().filter(|path| path.is_dir());
    let last = canonical.as_deref().and_then(Path::file_name);
    last.map_or_else(
        || model.to_owned(),
        |name| name.to_string_lossy().into_owned(),
    )
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
    let options = EngineOptions {
        prefill_beside_decode: match opened.device {
            Device::Cpu | Device::Reference => PREFILL_BESIDE_DECODE_ON_CPU,
            #[cfg(feature = "cuda")]
            Device::Cuda(_) => PREFILL_BESIDE_DECODE_ON_GPU,
        },
        ..EngineOptions::default()
    };
    let engine = Engine::start(opened.steps, Some(tokenizer.clone()), options)?;
    Ok(Model {
        name,
        engine,
        tokenizer,
        template,
        defaults,
    })
}
