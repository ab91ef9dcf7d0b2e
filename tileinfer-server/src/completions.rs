//! `/v1/completions`: text or token ids in, the text that follows out.

use axum::body::Bytes;
use axum::extract::State as Shared;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use std::sync::Arc;
use tileinfer::engine::Event;
use tileinfer::sampling::Sampled;

use crate::answers::{Answers, App, Usage, aside, finished};
use crate::error::{ApiError, ApiResult};
use crate::fields::{self, Fields};
use crate::logprobs;
use crate::params::Params;
use crate::state::{Loaded, State, now_nanos};
use crate::stream::{Chunks, respond};

/// Tokens where a request does not say how many, as in OpenAI's API.
const DEFAULT_MAX_TOKENS: usize = 16;
/// The likeliest tokens to report at most.
const MAX_LOGPROBS: usize = 20;

/// Answers a request.
pub(crate) async fn completions(Shared(app): Shared<App>, body: Bytes) -> ApiResult<Response> {
    let loaded = app.ready()?;
    let (prepared, mut answers) = aside({
        let (app, loaded) = (app.clone(), loaded.clone());
        move || {
            let prepared = Prepared::read(&body, &app, &loaded)?;
            let answers = Answers::ask(
                &app,
                &loaded,
                &prepared.prompts,
                &prepared.params,
                true,
                &|| Ok(None),
            )?;
            Ok((prepared, answers))
        }
    })
    .await?;
    let (stream, count) = (prepared.params.stream, answers.count());
    let mut telling = Telling::new(prepared, &app, loaded, count);
    if stream {
        return Ok(respond(answers, telling, app.options.ping));
    }
    while let Some((index, event)) = answers.next().await {
        telling.collect(index, event)?;
    }
    Ok(axum::Json(telling.whole(&answers.usage)).into_response())
}

/// A request that has been read.
struct Prepared {
    params: Params,
    prompts: Vec<Vec<u32>>,
    echo: bool,
}

impl Prepared {
    fn read(body: &[u8], state: &State, loaded: &Loaded) -> ApiResult<Self> {
        let mut fields = Fields::from_body(body)?;
        let mut params = Params::read(&mut fields, state, loaded)?;
        params.options.max_tokens = Some(fields.count("max_tokens")?.unwrap_or(DEFAULT_MAX_TOKENS));
        params.options.top_logprobs = fields.count("logprobs")?;
        if params
            .options
            .top_logprobs
            .is_some_and(|top| top > MAX_LOGPROBS)
        {
            return Err(ApiError::field(
                "logprobs",
                format!("logprobs must be at most {MAX_LOGPROBS}"),
            ));
        }
        let echo = fields.flag("echo")?.unwrap_or(false);
        if echo && params.options.top_logprobs.is_some() {
            return Err(ApiError::unsupported(
                "echo",
                "echo is not supported together with logprobs; leave one out",
            ));
        }
        if fields
            .count("best_of")?
            .is_some_and(|best| best != params.choices)
        {
            return Err(ApiError::unsupported(
                "best_of",
                "best_of is not supported unless it equals n",
            ));
        }
        let prompt = fields
            .take("prompt")
            .ok_or_else(|| ApiError::field("prompt", "prompt is missing"))?;
        fields.finish()?;
        let prompts = prompts(&prompt, loaded)?;
        let (count, most) = (prompts.len() * params.choices, state.options.max_choices);
        if count > most {
            return Err(ApiError::field(
                "prompt",
                format!("prompts times n are {count}, the limit is {most}"),
            ));
        }
        Ok(Prepared {
            params,
            prompts,
            echo,
        })
    }
}

/// A text, a list of them, token ids, or a list of those.
fn prompts(prompt: &Value, loaded: &Loaded) -> ApiResult<Vec<Vec<u32>>> {
    let encode = |text: &str| Ok(loaded.model.tokenizer.encode_prompt(text)?);
    let one = |prompt: &Value| match (prompt, fields::ids(prompt)) {
        (Value::String(text), _) => encode(text),
        (_, Some(ids)) => Ok(ids),
        _ => Err(ApiError::field(
            "prompt",
            "prompt must be a string, token ids, or a list of either",
        )),
    };
    match prompt {
        Value::Array(list) if !list.is_empty() && !list[0].is_number() => {
            list.iter().map(one).collect()
        }
        prompt => Ok(vec![one(prompt)?]),
    }
}

/// The events of a request as chunks, or gathered into one answer.
struct Telling {
    loaded: Arc<Loaded>,
    id: String,
    created: u64,
    include_usage: bool,
    logprobs: bool,
    stop_ids: Arc<[u32]>,
    choices: Vec<Choice>,
}

struct Choice {
    /// The prompt's text, until it has been told.
    echo: String,
    text: String,
    tokens: Vec<Sampled>,
    /// Characters of tokens told.
    offset: usize,
    finish: Option<&'static str>,
}

impl Telling {
    fn new(prepared: Prepared, app: &App, loaded: Arc<Loaded>, count: usize) -> Self {
        let Prepared {
            params,
            prompts,
            echo,
        } = prepared;
        let choice = |index: usize| {
            let prompt = &prompts[index / params.choices];
            let echo = if echo {
                loaded.model.tokenizer.decode(prompt, true)
            } else {
                String::new()
            };
            Choice {
                echo,
                text: String::new(),
                tokens: Vec::new(),
                offset: 0,
                finish: None,
            }
        };
        let choices = (0..count).map(choice).collect();
        Telling {
            id: format!("cmpl-{}", app.unique(24)),
            created: now_nanos() / 1_000_000_000,
            include_usage: params.include_usage,
            logprobs: params.options.top_logprobs.is_some(),
            stop_ids: params.options.stop_ids,
            choices,
            loaded,
        }
    }

    fn collect(&mut self, index: usize, event: Event) -> ApiResult<()> {
        let choice = &mut self.choices[index];
        match event {
            Event::Started { .. } => choice.text = std::mem::take(&mut choice.echo),
            Event::Tokens { text, tokens } => {
                choice.text.push_str(&text);
                if self.logprobs {
                    choice.tokens.extend(
                        tokens
                            .into_iter()
                            .filter(|token| !self.stop_ids.contains(&token.token)),
                    );
                }
            }
            Event::End(ended) => {
                let finished = finished(ended)?;
                choice.text.push_str(&finished.text);
                choice.finish = Some(finished.reason.as_str());
            }
        }
        Ok(())
    }

    /// What has been gathered of an answer since it was last told.
    fn told(&mut self, index: usize) -> Value {
        let choice = &mut self.choices[index];
        let (text, tokens) = (
            std::mem::take(&mut choice.text),
            std::mem::take(&mut choice.tokens),
        );
        let mut logprobs = Value::Null;
        if self.logprobs {
            let (body, length) =
                logprobs::of_completion(&self.loaded.model.tokenizer, &tokens, choice.offset);
            choice.offset += length;
            logprobs = body;
        }
        json!({"index": index, "text": text, "logprobs": logprobs, "finish_reason": choice.finish})
    }

    fn envelope(&self, choices: &Value) -> Value {
        json!({
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.loaded.model.name,
            "choices": choices,
        })
    }

    fn whole(mut self, usage: &Usage) -> Value {
        let choices = (0..self.choices.len())
            .map(|index| self.told(index))
            .collect();
        let mut whole = self.envelope(&choices);
        whole["usage"] = usage.body();
        whole
    }
}

impl Chunks for Telling {
    fn event(&mut self, index: usize, event: Event) -> ApiResult<Vec<Value>> {
        self.collect(index, event)?;
        let choice = &self.choices[index];
        if choice.text.is_empty() && choice.finish.is_none() {
            return Ok(Vec::new());
        }
        let told = self.told(index);
        let mut chunk = self.envelope(&json!([told]));
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        Ok(vec![chunk])
    }

    fn last(&mut self, usage: &Usage) -> Vec<Value> {
        let with_usage = self.include_usage.then(|| {
            let mut chunk = self.envelope(&json!([]));
            chunk["usage"] = usage.body();
            chunk
        });
        with_usage.into_iter().collect()
    }
}
