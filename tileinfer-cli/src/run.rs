//! `tileinfer run`: one prompt, one answer. Without a prompt, on a terminal, a chat.

use std::borrow::Cow;
use std::io::{IsTerminal, Read, Write};
use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;
use tileinfer::chat::{ChatMessage, ChatRequest, ChatTemplate};
use tileinfer::config::ModelConfig;
use tileinfer::engine::GenerationOptions;
use tileinfer::generate::{Answer, GenerationStats, answer};
use tileinfer::sampling::{SamplingParams, generation_defaults, random_seed};
use tileinfer::tokenizer::Tokenizer;

use crate::args::{RunArgs, SamplingArgs};
use crate::chat;
use crate::files;
use crate::models;
use crate::open::{self, Opened, Purpose};
use crate::speculate::{self, Speculating};
use crate::usage;
use crate::voice::{Voice, harmless};

pub(crate) fn run(args: &RunArgs, process_start: Instant) -> Result<()> {
    let voice = Voice::new(args.model.voice);
    // Before anything is downloaded.
    choose(&args.sampling, SamplingParams::default())?;
    let Some(prompt) = typed_prompt(args)? else {
        return chat::chat(&open_model(args, &voice)?, args, voice);
    };
    let model = open_model(args, &voice)?;
    let ids = prompt_ids(args, &prompt, &model, &voice)?;
    answer_once(args, model, &ids, &voice, process_start)
}

/// The small files of a model.
pub(crate) struct Model {
    pub(crate) dir: PathBuf,
    pub(crate) tokenizer: Tokenizer,
    pub(crate) settings: Settings,
}

fn open_model(args: &RunArgs, voice: &Voice) -> Result<Model> {
    let name = &args.model.name;
    let revision = args.revision.revision.as_deref();
    let dir = models::dir_or_pull(&name.model, revision, name.hub, voice)?;
    let config = ModelConfig::from_dir(&dir)?;
    let tokenizer = Tokenizer::from_dir(&dir)?;
    let mut settings = Settings::new(&args.sampling, &dir, &config)?;
    let vocabulary = tokenizer.vocab_size().min(config.output_vocab_size);
    if let Some((id, _)) = args
        .sampling
        .logit_bias
        .iter()
        .find(|(id, _)| *id as usize >= vocabulary)
    {
        return Err(usage(format!(
            "--logit-bias names token {id}, and the model has {vocabulary} tokens, counted from 0"
        )));
    }
    if args.ignore_eos {
        settings.stop_ids.clear();
    }
    settings.say(voice);
    Ok(Model {
        dir,
        tokenizer,
        settings,
    })
}

/// The template that is asked for, or the model's own.
pub(crate) fn template(args: &RunArgs, dir: &Path) -> Result<ChatTemplate> {
    Ok(match &args.chat_template {
        Some(file) => ChatTemplate::from_file(file, dir)?,
        None => ChatTemplate::load(dir)?,
    })
}

/// Whether the model is to reason first, if that was said and it makes a difference.
pub(crate) fn thinking(args: &RunArgs, template: &ChatTemplate, voice: &Voice) -> Option<bool> {
    if !args.think && !args.no_think {
        return None;
    }
    if !template.supports_thinking() {
        voice.note(
            "the model's chat template knows no thinking: --think and --no-think change nothing",
        );
        return None;
    }
    Some(args.think)
}

fn answer_once(
    args: &RunArgs,
    model: Model,
    ids: &[u32],
    voice: &Voice,
    process_start: Instant,
) -> Result<()> {
    let Model {
        dir,
        tokenizer,
        settings,
    } = model;
    let spec = Speculating::choose(&args.spec, args.model.name.hub, voice)?;
    if let Some(spec) = &spec
        && !args.raw
        && args.prompt_ids.is_none()
        && template(args, &dir)?.supports_thinking()
    {
        spec.warn_of_thinking((args.think || args.no_think).then_some(args.think), voice);
    }
    let purpose = Purpose::one(None).speculating(spec.as_ref());
    let mut opened = open::open(&dir, &args.model.place, purpose, voice)?;
    let options = GenerationOptions {
        sampling: Arc::new(settings.sampling.clone()),
        seed: settings.seed,
        max_tokens: args.max_tokens,
        stop_ids: settings.stop_ids.clone().into(),
        vocabulary: tokenizer.vocab_size(),
        top_logprobs: None,
    };

    let mut out = std::io::stdout().lock();
    let is_terminal = std::io::stdout().is_terminal();
    let bar = voice.bar("reading the prompt", ids.len() as u64);
    let mut broken = None;
    let mut to_first = None;
    let mut on_text = |text: &str| {
        if to_first.is_none() {
            // Cleared any later, it would take the line of the answer with it.
            bar.finish_and_clear();
            to_first = Some(process_start.elapsed());
        }
        let written = if args.json {
            Ok(())
        } else {
            let text = if is_terminal {
                harmless(text).into()
            } else {
                Cow::Borrowed(text)
            };
            out.write_all(text.as_bytes()).and_then(|()| out.flush())
        };
        match written {
            Ok(()) => ControlFlow::Continue(()),
            Err(error) => {
                broken = Some(error);
                ControlFlow::Break(())
            }
        }
    };
    let sequence = opened.steps.new_sequence();
    let mut on_progress = |done: usize| {
        bar.set_position(done as u64);
        ControlFlow::Continue(())
    };
    let result = answer(
        &mut opened.steps,
        &tokenizer,
        sequence,
        ids,
        options,
        &args.stop,
        &mut on_progress,
        &mut on_text,
    );
    bar.finish_and_clear();
    let answer = result?;
    if let Some(error) = broken {
        return Err(error).context("writing the answer");
    }
    if args.json {
        let first = to_first
            .unwrap_or_else(|| process_start.elapsed())
            .as_secs_f64();
        writeln!(out, "{}", report(&answer, &opened, &settings, first))?;
    } else {
        writeln!(out)?;
    }
    if answer.generated.context_full {
        let limit = opened.steps.limits().max_length;
        voice.note(&format!(
            "the answer is cut off: the context of {limit} tokens is full (--ctx-size)"
        ));
    }
    let stats = &answer.generated.stats;
    if let Some(spec) = stats.spec.filter(|spec| spec.held_back > spec.steps) {
        voice.note(&spec.describe());
    }
    voice.detail(&statistics(stats));
    Ok(())
}

/// What was typed and what was piped in, empty where the prompt is ids; none where there is to be a chat.
fn typed_prompt(args: &RunArgs) -> Result<Option<String>> {
    if args.prompt_ids.is_some() {
        return Ok(Some(String::new()));
    }
    let stdin = std::io::stdin();
    if stdin.is_terminal() {
        if args.prompt.is_some() {
            return Ok(args.prompt.clone());
        }
        if args.json || !std::io::stdout().is_terminal() {
            return Err(usage(
                "give a PROMPT, or pipe one in: there is a chat only where both input and output are a terminal",
            ));
        }
        return Ok(None);
    }
    let mut piped = String::new();
    stdin
        .lock()
        .read_to_string(&mut piped)
        .context("reading standard input as the prompt")?;
    let piped = piped.trim_end_matches(['\r', '\n']);
    match (&args.prompt, piped.is_empty()) {
        (Some(prompt), true) => Ok(Some(prompt.clone())),
        (Some(prompt), false) => Ok(Some(format!("{prompt}\n\n{piped}"))),
        (None, false) => Ok(Some(piped.to_owned())),
        (None, true) => Err(usage("give a PROMPT, or pipe one in")),
    }
}

/// The prompt as the model reads it.
fn prompt_ids(args: &RunArgs, prompt: &str, model: &Model, voice: &Voice) -> Result<Vec<u32>> {
    let tokenizer = &model.tokenizer;
    if let Some(file) = &args.prompt_ids {
        return files::read_ids(file);
    }
    if args.raw {
        return Ok(tokenizer.encode_prompt(prompt)?);
    }
    let template = template(args, &model.dir)?;
    let mut messages = Vec::new();
    messages.extend(
        args.system
            .iter()
            .map(|text| ChatMessage::new("system", text.clone())),
    );
    messages.push(ChatMessage::new("user", prompt));
    let mut request = ChatRequest::answer(&messages);
    if let Some(thinking) = thinking(args, &template, voice) {
        request
            .variables
            .insert("enable_thinking".to_owned(), thinking.into());
    }
    let text = template.render(&template.accommodate(request)?)?;
    Ok(tokenizer.encode(&text, false)?)
}

/// The defaults, with what was typed in their place.
fn choose(args: &SamplingArgs, defaults: SamplingParams) -> Result<SamplingParams> {
    fn set<T: Copy>(field: &mut T, given: Option<T>) {
        *field = given.unwrap_or(*field);
    }
    let mut sampling = defaults;
    set(&mut sampling.temperature, args.temperature);
    set(&mut sampling.top_k, args.top_k);
    set(&mut sampling.top_p, args.top_p);
    set(&mut sampling.min_p, args.min_p);
    set(&mut sampling.repetition_penalty, args.repetition_penalty);
    set(&mut sampling.presence_penalty, args.presence_penalty);
    set(&mut sampling.frequency_penalty, args.frequency_penalty);
    sampling.logit_bias.extend(&args.logit_bias);
    sampling.validate().map_err(usage)?;
    Ok(sampling)
}

/// How tokens are chosen, after the model's defaults and what was typed.
pub(crate) struct Settings {
    pub(crate) sampling: SamplingParams,
    pub(crate) seed: u64,
    pub(crate) stop_ids: Vec<u32>,
    from_file: bool,
}

impl Settings {
    pub(crate) fn new(args: &SamplingArgs, dir: &Path, config: &ModelConfig) -> Result<Self> {
        let defaults = generation_defaults(dir, &config.eos_token_ids)?;
        let from_file = defaults.sampling != SamplingParams::default();
        let sampling = choose(args, defaults.sampling)?;
        let seed = match args.seed {
            Some(seed) => seed,
            None => random_seed()?,
        };
        Ok(Settings {
            sampling,
            seed,
            stop_ids: defaults.stop_ids,
            from_file,
        })
    }

    /// Says what is in force, so that an answer can be had again.
    pub(crate) fn say(&self, voice: &Voice) {
        let origin = if self.from_file {
            " (defaults from generation_config.json)"
        } else {
            ""
        };
        voice.note(&format!("{}{origin}", describe(&self.sampling, self.seed)));
    }

    /// The effective values.
    pub(crate) fn json(&self) -> serde_json::Value {
        let mut value = json!(self.sampling);
        value["seed"] = json!(self.seed);
        value
    }
}

/// One line of what is in force.
pub(crate) fn describe(sampling: &SamplingParams, seed: u64) -> String {
    let greedy = sampling.is_greedy();
    let mut words = match greedy {
        true => "sampling: greedy".to_owned(),
        false => format!("sampling: temperature {}", sampling.temperature),
    };
    // Greedy, the filters change nothing.
    let filters = [
        ("top-p", sampling.top_p, 1.0),
        ("min-p", sampling.min_p, 0.0),
    ];
    let filters = filters.into_iter().filter(|_| !greedy);
    for (name, value, off) in filters.chain([
        ("repetition-penalty", sampling.repetition_penalty, 1.0),
        ("presence-penalty", sampling.presence_penalty, 0.0),
        ("frequency-penalty", sampling.frequency_penalty, 0.0),
    ]) {
        if value != off {
            words += &format!(", {name} {value}");
        }
    }
    if !sampling.logit_bias.is_empty() {
        words += &format!(", a bias on {} tokens", sampling.logit_bias.len());
    }
    if greedy {
        return words;
    }
    if sampling.top_k != 0 {
        words += &format!(", top-k {}", sampling.top_k);
    }
    format!("{words}, seed {seed}")
}

fn report(
    answer: &Answer,
    opened: &Opened,
    settings: &Settings,
    start_to_first: f64,
) -> serde_json::Value {
    let generated = &answer.generated;
    let stats = &generated.stats;
    let mut object = json!({
        "text": answer.text,
        "ids": generated.tokens,
        "finish_reason": generated.finish.as_str(),
        "usage": {
            "prompt_tokens": stats.prompt_tokens,
            "cached_tokens": stats.cached_tokens,
            "completion_tokens": stats.completion_tokens,
        },
        "timings": {
            "load_s": opened.load_seconds,
            "start_to_first_s": start_to_first,
            "ttft_s": stats.to_first.as_secs_f64(),
            "prefill_tok_s": stats.prefill_rate(),
            "decode_tok_s": stats.decode_rate(),
        },
        "sampling": settings.json(),
    });
    if let Some(spec) = &stats.spec {
        object["spec"] = speculate::json(spec);
    }
    object
}

/// One line of what an answer cost.
pub(crate) fn statistics(stats: &GenerationStats) -> String {
    let line = format!(
        "{} prompt tokens ({} from the cache) at {:.0} tokens/s, {} generated at {:.1} tokens/s, first after {:.2} s",
        stats.prompt_tokens,
        stats.cached_tokens,
        stats.prefill_rate(),
        stats.completion_tokens,
        stats.decode_rate(),
        stats.to_first.as_secs_f64()
    );
    match stats.spec {
        Some(spec) => format!("{line}\n{}", spec.describe()),
        None => line,
    }
}
