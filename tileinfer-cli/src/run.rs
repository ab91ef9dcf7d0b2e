//! `tileinfer run`: one prompt, one answer.

use std::io::{IsTerminal, Read, Write};
use std::ops::ControlFlow;
use std::path::Path;
use std::sync::Arc;
use std::time::Instant;

use anyhow::{Context, Result};
use serde_json::json;
use tileinfer::chat::{ChatMessage, ChatRequest, ChatTemplate};
use tileinfer::config::ModelConfig;
use tileinfer::engine::GenerationOptions;
use tileinfer::generate::{Answer, answer};
use tileinfer::sampling::{SamplingParams, generation_defaults, random_seed};
use tileinfer::tokenizer::Tokenizer;

use crate::WrongUsage;
use crate::args::{RunArgs, SamplingArgs};
use crate::open::{self, Opened, Purpose};
use crate::voice::Voice;

pub(crate) fn run(args: &RunArgs, process_start: Instant) -> Result<()> {
    let voice = Voice::new(&args.model.place.voice);
    let prompt = typed_prompt(args)?;
    let dir = open::model_dir(&args.model.model)?;
    let config = ModelConfig::from_dir(&dir)?;
    let tokenizer = Tokenizer::from_dir(&dir)?;
    let ids = prompt_ids(args, &prompt, &dir, &tokenizer, &voice)?;
    let settings = Settings::new(&args.sampling, &dir, &config)?;
    settings.say(&voice);

    let purpose = Purpose {
        sequences: 1,
        length: None,
    };
    let mut opened = open::open(&dir, &args.model.place, purpose, &voice)?;
    let options = GenerationOptions {
        sampling: Arc::new(settings.sampling.clone()),
        seed: settings.seed,
        max_tokens: args.max_tokens,
        stop_ids: if args.ignore_eos {
            [].into()
        } else {
            settings.stop_ids.clone().into()
        },
        vocabulary: tokenizer.vocab_size(),
        top_logprobs: None,
    };

    let mut out = std::io::stdout().lock();
    let mut broken = None;
    let mut to_first = None;
    let mut on_text = |text: &str| {
        to_first.get_or_insert_with(|| process_start.elapsed());
        let written = if args.json {
            Ok(())
        } else {
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
    let bar = voice.bar("reading the prompt", ids.len() as u64);
    let sequence = opened.steps.new_sequence();
    let mut on_progress = |done: usize| bar.set_position(done as u64);
    let result = answer(
        &mut opened.steps,
        &tokenizer,
        sequence,
        &ids,
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
    voice.detail(&statistics(&answer));
    Ok(())
}

/// What was typed and what was piped in; none where the prompt is ids.
fn typed_prompt(args: &RunArgs) -> Result<String> {
    if args.prompt_ids.is_some() {
        return Ok(String::new());
    }
    let mut piped = String::new();
    let stdin = std::io::stdin();
    if !stdin.is_terminal() {
        stdin
            .lock()
            .read_to_string(&mut piped)
            .context("reading standard input as the prompt")?;
    }
    let piped = piped.trim_end_matches(['\r', '\n']);
    match (&args.prompt, piped.is_empty()) {
        (Some(prompt), true) => Ok(prompt.clone()),
        (Some(prompt), false) => Ok(format!("{prompt}\n\n{piped}")),
        (None, false) => Ok(piped.to_owned()),
        (None, true) => Err(WrongUsage("give a PROMPT, or pipe one in".to_owned()).into()),
    }
}

/// The prompt as the model reads it.
fn prompt_ids(
    args: &RunArgs,
    prompt: &str,
    dir: &Path,
    tokenizer: &Tokenizer,
    voice: &Voice,
) -> Result<Vec<u32>> {
    if let Some(file) = &args.prompt_ids {
        return open::read_ids(file);
    }
    if args.raw {
        return Ok(tokenizer.encode(prompt, true)?);
    }
    let template = match &args.chat_template {
        Some(file) => ChatTemplate::from_file(file, dir)?,
        None => ChatTemplate::load(dir)?,
    };
    let mut messages = Vec::new();
    messages.extend(
        args.system
            .iter()
            .map(|text| ChatMessage::new("system", text.clone())),
    );
    messages.push(ChatMessage::new("user", prompt));
    let mut request = ChatRequest::answer(&messages);
    if args.think || args.no_think {
        if template.supports_thinking() {
            request
                .variables
                .insert("enable_thinking".to_owned(), args.think.into());
        } else {
            voice.note("the model's chat template knows no thinking: --think and --no-think change nothing");
        }
    }
    let text = template.render(&template.accommodate(request)?)?;
    Ok(tokenizer.encode(&text, false)?)
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
        let mut sampling = defaults.sampling.clone();
        let from_file = sampling != SamplingParams::default();
        fn set<T: Copy>(field: &mut T, given: Option<T>) {
            *field = given.unwrap_or(*field);
        }
        set(&mut sampling.temperature, args.temperature);
        set(&mut sampling.top_k, args.top_k);
        set(&mut sampling.top_p, args.top_p);
        set(&mut sampling.min_p, args.min_p);
        set(&mut sampling.repetition_penalty, args.repetition_penalty);
        set(&mut sampling.presence_penalty, args.presence_penalty);
        set(&mut sampling.frequency_penalty, args.frequency_penalty);
        sampling.logit_bias.extend(&args.logit_bias);
        sampling.validate()?;
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
        let SamplingParams {
            temperature,
            top_k,
            top_p,
            min_p,
            repetition_penalty,
            ..
        } = self.sampling;
        let origin = if self.from_file {
            " (defaults from generation_config.json)"
        } else {
            ""
        };
        if self.sampling.is_greedy() {
            voice.note(&format!("sampling: greedy{origin}"));
            return;
        }
        let mut words = format!("sampling: temperature {temperature}");
        for (name, value, off) in [
            ("top-p", top_p, 1.0),
            ("min-p", min_p, 0.0),
            ("repetition-penalty", repetition_penalty, 1.0),
        ] {
            if value != off {
                words += &format!(", {name} {value}");
            }
        }
        if top_k != 0 {
            words += &format!(", top-k {top_k}");
        }
        voice.note(&format!("{words}, seed {}{origin}", self.seed));
    }

    /// The effective values.
    pub(crate) fn json(&self) -> serde_json::Value {
        let mut value = json!(self.sampling);
        value["seed"] = json!(self.seed);
        value
    }
}

fn report(
    answer: &Answer,
    opened: &Opened,
    settings: &Settings,
    start_to_first: f64,
) -> serde_json::Value {
    let generated = &answer.generated;
    let stats = &generated.stats;
    json!({
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
    })
}

fn statistics(answer: &Answer) -> String {
    let stats = &answer.generated.stats;
    format!(
        "{} prompt tokens at {:.0} tokens/s, {} generated at {:.1} tokens/s, first after {:.2} s",
        stats.prompt_tokens,
        stats.prefill_rate(),
        stats.completion_tokens,
        stats.decode_rate(),
        stats.to_first.as_secs_f64()
    )
}
