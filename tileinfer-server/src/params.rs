//! The fields that chat completions and completions share: how tokens are chosen and when to stop.

use std::sync::Arc;

use serde_json::Value;
use tileinfer::engine::GenerationOptions;
use tileinfer::sampling::{SamplingParams, random_seed};

use crate::error::{ApiError, ApiResult};
use crate::fields::{Fields, brief};
use crate::state::{Loaded, State};

/// Stop strings at most.
const MAX_STOPS: usize = 16;
/// Tokens with a bias at most.
const MAX_BIASES: usize = 1024;

/// See the module's first line.
#[derive(Debug, Clone)]
pub(crate) struct Params {
    pub(crate) options: GenerationOptions,
    pub(crate) stop_strings: Vec<String>,
    pub(crate) choices: usize,
    pub(crate) stream: bool,
    pub(crate) include_usage: bool,
}

impl Params {
    /// Takes its fields out of a request.
    pub(crate) fn read(fields: &mut Fields, state: &State, loaded: &Loaded) -> ApiResult<Self> {
        let model = &loaded.model;
        if let Some(name) = fields.string("model")?.filter(|name| *name != model.name) {
            return Err(ApiError::no_model(&name, &model.name));
        }
        // They identify the caller or ask for what is always so.
        fields.let_pass(&["user", "metadata", "safety_identifier", "prompt_cache_key"]);
        only_as_always(fields)?;
        let sampling = Arc::new(sampling(fields, &model.defaults.sampling)?);
        let seed = match fields.integer("seed")? {
            Some(seed) => seed as u64,
            None => random_seed()?,
        };
        let choices = fields.count("n")?.unwrap_or(1);
        if choices == 0 || choices > state.options.max_choices {
            let most = state.options.max_choices;
            return Err(ApiError::field(
                "n",
                format!("n is {choices}, it must be between 1 and {most}"),
            ));
        }
        let stop_strings = stop_strings(fields)?;
        let mut stop_ids = model.defaults.stop_ids.clone();
        if fields.flag("ignore_eos")? == Some(true) {
            stop_ids.clear();
        }
        stop_ids.extend(fields.ids("stop_token_ids")?.unwrap_or_default());
        let stream = fields.flag("stream")?.unwrap_or(false);
        let include_usage = match fields.object("stream_options")? {
            None => false,
            Some(_) if !stream => {
                return Err(ApiError::field(
                    "stream_options",
                    "stream_options is for streams: set stream to true",
                ));
            }
            Some(mut options) => {
                let include = options.flag("include_usage")?.unwrap_or(false);
                options.finish()?;
                include
            }
        };
        let options = GenerationOptions {
            sampling,
            seed,
            max_tokens: None,
            stop_ids: stop_ids.into(),
            vocabulary: model.tokenizer.vocab_size(),
            top_logprobs: None,
        };
        Ok(Params {
            options,
            stop_strings,
            choices,
            stream,
            include_usage,
        })
    }
}

/// Fields that other servers have, for which there is one value here: what is always so. Gateways send them unasked.
fn only_as_always(fields: &mut Fields) -> ApiResult<()> {
    for (name, only) in [
        ("store", Value::from(false)),
        ("service_tier", "auto".into()),
        ("separate_reasoning", true.into()),
        ("include_reasoning", true.into()),
        ("stream_reasoning", true.into()),
        ("skip_special_tokens", true.into()),
        ("spaces_between_special_tokens", true.into()),
        ("no_stop_trim", false.into()),
        ("include_stop_str_in_output", false.into()),
        ("return_hidden_states", false.into()),
        ("use_beam_search", false.into()),
    ] {
        let other = fields.take(name).filter(|value| *value != only);
        if let Some(value) = other.filter(|value| name != "service_tier" || *value != "default") {
            let reason = format!("{name} can only be {only}, not {}", brief(&value));
            return Err(ApiError::unsupported(name, &reason));
        }
    }
    Ok(())
}

fn sampling(fields: &mut Fields, defaults: &SamplingParams) -> ApiResult<SamplingParams> {
    let mut params = defaults.clone();
    let mut set = |name: &str, field: &mut f32| -> ApiResult<()> {
        *field = fields.number(name)?.unwrap_or(*field);
        Ok(())
    };
    set("temperature", &mut params.temperature)?;
    set("top_p", &mut params.top_p)?;
    set("min_p", &mut params.min_p)?;
    set("repetition_penalty", &mut params.repetition_penalty)?;
    set("presence_penalty", &mut params.presence_penalty)?;
    set("frequency_penalty", &mut params.frequency_penalty)?;
    match fields.integer("top_k")? {
        None => {}
        Some(-1) => params.top_k = 0,
        Some(k) => {
            let wrong = |_| {
                ApiError::field(
                    "top_k",
                    format!("top_k is {k}, it must be 0 or more (0 and -1 are off)"),
                )
            };
            params.top_k = u32::try_from(k).map_err(wrong)?;
        }
    }
    if let Some(biases) = fields.map("logit_bias")? {
        if biases.len() > MAX_BIASES {
            return Err(ApiError::field(
                "logit_bias",
                format!("logit_bias names more than {MAX_BIASES} tokens"),
            ));
        }
        for (id, bias) in biases {
            let pair = id.parse().ok().zip(bias.as_f64()).ok_or_else(|| {
                let what = "it must map token ids to numbers";
                ApiError::field(
                    "logit_bias",
                    format!("logit_bias holds {id:?}: {}, {what}", brief(&bias)),
                )
            })?;
            params.logit_bias.push((pair.0, pair.1 as f32));
        }
    }
    params.validate().map_err(|error| {
        let message = error.to_string();
        // The message begins with the parameter's name.
        let param = message
            .split_whitespace()
            .next()
            .unwrap_or_default()
            .to_owned();
        ApiError::field(param, message)
    })?;
    Ok(params)
}

fn stop_strings(fields: &mut Fields) -> ApiResult<Vec<String>> {
    let wrong = |why: &str| {
        ApiError::field(
            "stop",
            format!("stop {why}: it must be a string or a list of them"),
        )
    };
    let stops = match fields.take("stop") {
        None => Vec::new(),
        Some(Value::String(stop)) => vec![stop],
        Some(Value::Array(list)) => {
            let texts = list.iter().map(|stop| stop.as_str().map(str::to_owned));
            texts
                .collect::<Option<_>>()
                .ok_or_else(|| wrong("holds something else"))?
        }
        Some(_) => return Err(wrong("is something else")),
    };
    if stops.len() > MAX_STOPS || stops.iter().any(String::is_empty) {
        return Err(ApiError::field(
            "stop",
            format!("stop must be at most {MAX_STOPS} strings, none of them empty"),
        ));
    }
    Ok(stops)
}
