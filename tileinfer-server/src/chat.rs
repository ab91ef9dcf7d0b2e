//! `/v1/chat/completions`: a conversation in, messages out.

use axum::body::Bytes;
use axum::extract::State as Shared;
use axum::response::{IntoResponse, Response};
use serde_json::{Map, Value, json};
use std::sync::Arc;
use tileinfer::chat::{ChatRequest, ChatTemplate};
use tileinfer::engine::{Event, FinishReason};
use tileinfer::sampling::Sampled;

use crate::answers::{Answers, App, Usage, aside, finished};
use crate::error::{ApiError, ApiResult};
use crate::fields::{Fields, brief};
use crate::grammar::{Form, Reasoning};
use crate::logprobs;
use crate::output::{OutputParser, Piece, ToolStyle};
use crate::params::Params;
use crate::state::{Loaded, State, now_nanos};
use crate::stream::{Chunks, respond};
use crate::tools::{Tools, tell};

/// The likeliest tokens to report at most.
const MAX_TOP_LOGPROBS: usize = 20;

/// Answers a request.
pub(crate) async fn chat_completions(Shared(app): Shared<App>, body: Bytes) -> ApiResult<Response> {
    let loaded = app.ready()?;
    let (prepared, mut answers) = aside({
        let (app, loaded) = (app.clone(), loaded.clone());
        move || {
            let prepared = Prepared::read(Fields::from_body(&body)?, &app, &loaded)?;
            let answers = prepared.ask(&app, &loaded)?;
            Ok((prepared, answers))
        }
    })
    .await?;
    let telling = Telling::new(&prepared, &app, loaded, answers.count());
    if prepared.params.stream {
        return Ok(respond(answers, telling, app.options.ping));
    }
    let mut telling = telling;
    while let Some((index, event)) = answers.next().await {
        telling.collect(index, event)?;
    }
    Ok(axum::Json(telling.whole(&answers.usage)).into_response())
}

/// A request that has been read.
pub(crate) struct Prepared {
    pub(crate) params: Params,
    pub(crate) prompt: Vec<u32>,
    tools: Tools,
    form: Option<Form>,
    reasoning: Option<Reasoning>,
    /// Whether the prompt ends inside of reasoning.
    in_reasoning: bool,
    logprobs: bool,
}

impl Prepared {
    pub(crate) fn read(mut fields: Fields, state: &State, loaded: &Loaded) -> ApiResult<Self> {
        let model = &loaded.model;
        let template = model.template.as_ref().ok_or_else(|| {
            ApiError::invalid(format!(
                "{} has no chat template; use /v1/completions",
                model.name
            ))
        })?;
        let mut params = Params::read(&mut fields, state, loaded)?;
        let max_tokens = fields.count("max_tokens")?;
        params.options.max_tokens = fields.count("max_completion_tokens")?.or(max_tokens);
        let logprobs = fields.flag("logprobs")?.unwrap_or(false);
        let top_logprobs = fields.count("top_logprobs")?;
        if top_logprobs.is_some_and(|top| top > MAX_TOP_LOGPROBS || !logprobs) {
            let what = format!(
                "top_logprobs must be at most {MAX_TOP_LOGPROBS} and needs logprobs to be true"
            );
            return Err(ApiError::field("top_logprobs", what));
        }
        params.options.top_logprobs = logprobs.then(|| top_logprobs.unwrap_or(0));
        if let Some(modalities) = fields
            .take("modalities")
            .filter(|modalities| *modalities != json!(["text"]))
        {
            let reason = format!(
                "modalities is {}; only [\"text\"] can be had",
                brief(&modalities)
            );
            return Err(ApiError::unsupported("modalities", &reason));
        }
        let tools = Tools::read(&mut fields, state.options.max_schema_bytes)?;
        let mut form = response_form(&mut fields, state.options.max_schema_bytes)?;
        if form.is_some() && !tools.is_empty() {
            let reason =
                "response_format and tools are not supported together; leave one of them out";
            return Err(ApiError::unsupported("response_format", reason));
        }
        if let Some((tools, most)) = tools.forced() {
            form = Some(Form::Calls {
                style: loaded.style.tools,
                tools,
                most,
            });
        }
        let mut request = conversation(&mut fields, state.options.max_messages, template)?;
        fields.finish()?;
        if loaded.style.tools_untold {
            tell(&mut request.messages, &tools);
        } else if !tools.is_empty() {
            request.tools = Some(tools.given.clone());
        }
        let thinks = template.supports_thinking();
        let asked_to_think = request
            .variables
            .get("enable_thinking")
            .and_then(Value::as_bool);
        if form.is_some() && thinks && asked_to_think.is_none() {
            // Who asks for a form wants it at once.
            request
                .variables
                .insert("enable_thinking".to_owned(), false.into());
        }
        let text = template
            .accommodate(request)
            .and_then(|request| template.render(&request));
        let text = text.map_err(|error| ApiError::from(error).about("messages"))?;
        let in_reasoning = loaded
            .style
            .think
            .is_some_and(|marks| text.trim_end().ends_with(marks.open));
        let prompt = model.tokenizer.encode(&text, false)?;
        let reasoning = match loaded.style.think.filter(|_| form.is_some()) {
            Some(marks) if in_reasoning => Some(Reasoning {
                open: None,
                close: marks.close,
            }),
            Some(marks) if thinks && asked_to_think == Some(true) => {
                let open = model.tokenizer.token_id(marks.open);
                Some(Reasoning {
                    open,
                    close: marks.close,
                })
            }
            _ => None,
        };
        Ok(Prepared {
            params,
            prompt,
            tools,
            form,
            reasoning,
            in_reasoning,
            logprobs,
        })
    }

    /// Hands it to the engine.
    pub(crate) fn ask(&self, state: &State, loaded: &Loaded) -> ApiResult<Answers> {
        let skip_special = !loaded.style.needs_special_tokens(!self.tools.is_empty());
        let form_field = if self.tools.is_empty() {
            "response_format"
        } else {
            "tools"
        };
        let constraint = || {
            let Some(form) = &self.form else {
                return Ok(None);
            };
            let stop_ids = self.params.options.stop_ids.clone();
            let made = loaded
                .grammars()?
                .constraint(form, stop_ids, self.reasoning.clone());
            made.map(Some)
                .map_err(|error| ApiError::from(error).about(form_field))
        };
        let prompts = std::slice::from_ref(&self.prompt);
        Answers::ask(
            state,
            loaded,
            prompts,
            &self.params,
            skip_special,
            &constraint,
        )
    }

    /// What reads an answer to it.
    pub(crate) fn parser(&self, loaded: &Loaded) -> OutputParser {
        let has_tools = !self.tools.is_empty();
        OutputParser::new(
            loaded.style,
            has_tools,
            self.in_reasoning,
            self.tools.most_calls,
        )
    }
}

/// What `response_format` asks for.
fn response_form(fields: &mut Fields, max_bytes: usize) -> ApiResult<Option<Form>> {
    let Some(mut format) = fields.object("response_format")? else {
        return Ok(None);
    };
    let kind = format.string("type")?.unwrap_or_default();
    let form = match kind.as_str() {
        "text" => None,
        "json_object" => Some(Form::Json(json!({"type": "object"}))),
        "json_schema" => {
            let missing = |what| {
                ApiError::field(
                    format!("response_format.{what}"),
                    format!("response_format.{what} is missing"),
                )
            };
            let mut described = format
                .object("json_schema")?
                .ok_or_else(|| missing("json_schema"))?;
            // Names and descriptions are for people, and the schema is followed strictly either way.
            described.let_pass(&["name", "description"]);
            described.flag("strict")?;
            let schema = described
                .take("schema")
                .ok_or_else(|| missing("json_schema.schema"))?;
            described.finish()?;
            let bytes = schema.to_string().len();
            if bytes > max_bytes {
                let what = format!("the schema is {bytes} bytes, the limit is {max_bytes}");
                return Err(ApiError::field("response_format", what));
            }
            Some(Form::Json(schema))
        }
        other => {
            let what = format!(
                "response_format.type is {other:?}, it must be text, json_object or json_schema"
            );
            return Err(ApiError::field("response_format.type", what));
        }
    };
    format.finish()?;
    Ok(form)
}

/// The messages, and what else the template is told.
fn conversation(
    fields: &mut Fields,
    max_messages: usize,
    template: &ChatTemplate,
) -> ApiResult<ChatRequest> {
    let mut messages = fields
        .list("messages")?
        .ok_or_else(|| ApiError::field("messages", "messages is missing"))?;
    if messages.is_empty() || messages.len() > max_messages {
        let count = messages.len();
        let what =
            format!("there are {count} messages, there must be between 1 and {max_messages}");
        return Err(ApiError::field("messages", what));
    }
    for (i, message) in messages.iter_mut().enumerate() {
        let wrong =
            |what: &str| ApiError::field(format!("messages[{i}]"), format!("messages[{i}] {what}"));
        let Value::Object(fields) = message else {
            return Err(wrong("is not an object"));
        };
        fields.retain(|_, value| !value.is_null());
        if fields.contains_key("function_call") || fields.contains_key("audio") {
            return Err(wrong(
                "has a function_call or audio, which are not supported",
            ));
        }
        match fields.get("role").and_then(Value::as_str) {
            Some("developer") if !template.mentions("developer") => {
                fields.insert("role".to_owned(), "system".into());
            }
            Some("system" | "developer" | "user" | "assistant" | "tool") => {}
            _ => {
                return Err(wrong(
                    "needs a role: system, developer, user, assistant or tool",
                ));
            }
        }
        if !matches!(
            fields.get("content"),
            None | Some(Value::String(_) | Value::Array(_))
        ) {
            return Err(wrong(
                "has content that is neither a string nor a list of parts",
            ));
        }
    }
    let variables = fields.map("chat_template_kwargs")?.unwrap_or_default();
    let continues = fields.flag("continue_final_message")?.unwrap_or(false);
    let add_generation_prompt = fields.flag("add_generation_prompt")?.unwrap_or(!continues);
    if continues && add_generation_prompt {
        let what = "continue_final_message and add_generation_prompt exclude each other";
        return Err(ApiError::field("continue_final_message", what));
    }
    let continue_final_message = continues.then(|| "content".to_owned());
    Ok(ChatRequest {
        messages,
        add_generation_prompt,
        continue_final_message,
        variables,
        ..ChatRequest::default()
    })
}

/// The events of a request as chunks, or gathered into one answer.
struct Telling {
    app: App,
    loaded: Arc<Loaded>,
    id: String,
    created: u64,
    include_usage: bool,
    logprobs: bool,
    stop_ids: Arc<[u32]>,
    choices: Vec<Choice>,
}

/// One answer.
struct Choice {
    parser: OutputParser,
    /// Log probabilities that have not been told.
    logprobs: Vec<Value>,
    content: String,
    reasoning: String,
    calls: Vec<Call>,
    finish: Option<&'static str>,
}

/// A call of a tool, as far as it has been read.
struct Call {
    id: String,
    name: String,
    arguments: String,
}

impl Telling {
    fn new(prepared: &Prepared, app: &App, loaded: Arc<Loaded>, count: usize) -> Self {
        let choice = || Choice {
            parser: prepared.parser(&loaded),
            logprobs: Vec::new(),
            content: String::new(),
            reasoning: String::new(),
            calls: Vec::new(),
            finish: None,
        };
        let choices = (0..count).map(|_| choice()).collect();
        Telling {
            app: app.clone(),
            id: format!("chatcmpl-{}", app.unique(24)),
            created: now_nanos() / 1_000_000_000,
            include_usage: prepared.params.include_usage,
            logprobs: prepared.logprobs,
            stop_ids: prepared.params.options.stop_ids.clone(),
            choices,
            loaded,
        }
    }

    /// The pieces that an event makes of an answer, and how it ended if it did.
    fn read(
        &mut self,
        index: usize,
        event: Event,
    ) -> ApiResult<(Vec<Piece>, Option<&'static str>)> {
        let choice = &mut self.choices[index];
        match event {
            Event::Started { .. } => Ok((Vec::new(), None)),
            Event::Tokens { text, tokens } => {
                if self.logprobs {
                    let told = tokens
                        .iter()
                        .filter(|token| !self.stop_ids.contains(&token.token));
                    let tokenizer = &self.loaded.model.tokenizer;
                    choice
                        .logprobs
                        .extend(told.map(|token: &Sampled| logprobs::of_chat(tokenizer, token)));
                }
                Ok((choice.parser.push(&text), None))
            }
            Event::End(ended) => {
                let finished = finished(ended)?;
                let mut pieces = choice.parser.push(&finished.text);
                pieces.extend(choice.parser.finish());
                let reason = match finished.reason {
                    FinishReason::Stop if choice.parser.calls() > 0 => "tool_calls",
                    reason => reason.as_str(),
                };
                Ok((pieces, Some(reason)))
            }
        }
    }

    /// A call of `name` begins.
    fn begin_call(&mut self, index: usize, name: String) {
        self.choices[index].calls.push(Call {
            id: call_id(&self.app, &self.loaded),
            name,
            arguments: String::new(),
        });
    }

    fn collect(&mut self, index: usize, event: Event) -> ApiResult<()> {
        let (pieces, finish) = self.read(index, event)?;
        for piece in pieces {
            match piece {
                Piece::Content(text) => self.choices[index].content.push_str(&text),
                Piece::Reasoning(text) => self.choices[index].reasoning.push_str(&text),
                Piece::Call(name) => self.begin_call(index, name),
                Piece::Arguments(text) => {
                    if let Some(call) = self.choices[index].calls.last_mut() {
                        call.arguments.push_str(&text);
                    }
                }
            }
        }
        self.choices[index].finish = finish;
        Ok(())
    }

    fn whole(self, usage: &Usage) -> Value {
        let (with_logprobs, has_style) = (self.logprobs, self.loaded.style.think.is_some());
        let choices = self.choices.into_iter().enumerate().map(|(index, choice)| {
            let mut message = Map::new();
            message.insert("role".to_owned(), "assistant".into());
            let silent = choice.content.is_empty() && !choice.calls.is_empty();
            message.insert("content".to_owned(), if silent { Value::Null } else { choice.content.into() });
            message.insert("refusal".to_owned(), Value::Null);
            if has_style {
                let reasoning = choice.reasoning;
                message.insert("reasoning_content".to_owned(), if reasoning.is_empty() { Value::Null } else { reasoning.into() });
            }
            if !choice.calls.is_empty() {
                let calls = choice.calls.iter().map(|call| {
                    json!({"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}})
                });
                message.insert("tool_calls".to_owned(), calls.collect());
            }
            let logprobs = if with_logprobs { json!({"content": choice.logprobs, "refusal": null}) } else { Value::Null };
            json!({"index": index, "message": message, "logprobs": logprobs, "finish_reason": choice.finish})
        });
        json!({
            "id": self.id,
            "object": "chat.completion",
            "created": self.created,
            "model": self.loaded.model.name,
            "choices": choices.collect::<Vec<_>>(),
            "usage": usage.body(),
        })
    }

    fn chunk(&mut self, index: usize, delta: &Value, finish: Option<&str>) -> Value {
        let told = std::mem::take(&mut self.choices[index].logprobs);
        let logprobs = if told.is_empty() {
            Value::Null
        } else {
            json!({"content": told, "refusal": null})
        };
        self.envelope(&json!([{"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}]))
    }

    fn envelope(&self, choices: &Value) -> Value {
        let mut chunk = json!({
            "id": self.id,
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.loaded.model.name,
            "choices": choices,
        });
        if self.include_usage {
            chunk["usage"] = Value::Null;
        }
        chunk
    }
}

impl Chunks for Telling {
    fn event(&mut self, index: usize, event: Event) -> ApiResult<Vec<Value>> {
        if let Event::Started { .. } = event {
            return Ok(vec![self.chunk(
                index,
                &json!({"role": "assistant", "content": ""}),
                None,
            )]);
        }
        let (pieces, finish) = self.read(index, event)?;
        let mut chunks = Vec::with_capacity(pieces.len() + 1);
        for piece in pieces {
            let delta = match piece {
                Piece::Content(text) => json!({"content": text}),
                Piece::Reasoning(text) => json!({"reasoning_content": text}),
                Piece::Call(name) => {
                    self.begin_call(index, name);
                    let calls = &self.choices[index].calls;
                    let (nth, call) = (calls.len() - 1, &calls[calls.len() - 1]);
                    json!({"tool_calls": [{
                        "index": nth, "id": call.id, "type": "function", "function": {"name": call.name, "arguments": ""},
                    }]})
                }
                Piece::Arguments(text) => {
                    let nth = self.choices[index].calls.len().saturating_sub(1);
                    json!({"tool_calls": [{"index": nth, "function": {"arguments": text}}]})
                }
            };
            chunks.push(self.chunk(index, &delta, None));
        }
        if finish.is_some() {
            chunks.push(self.chunk(index, &json!({}), finish));
        }
        Ok(chunks)
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

/// What a new call is called.
pub(crate) fn call_id(app: &State, loaded: &Loaded) -> String {
    // Mistral's templates accept ids of nine characters only.
    match loaded.style.tools {
        ToolStyle::Mistral => app.unique(9),
        _ => format!("call_{}", app.unique(24)),
    }
}

/// The prompt that a conversation makes, for `/tokenize`.
pub(crate) fn prompt_of(
    fields: &mut Fields,
    state: &State,
    loaded: &Loaded,
) -> ApiResult<Vec<u32>> {
    let model = &loaded.model;
    let template = model
        .template
        .as_ref()
        .ok_or_else(|| ApiError::invalid(format!("{} has no chat template", model.name)))?;
    let tools = Tools::read(fields, state.options.max_schema_bytes)?;
    let mut request = conversation(fields, state.options.max_messages, template)?;
    if loaded.style.tools_untold {
        tell(&mut request.messages, &tools);
    } else if !tools.is_empty() {
        request.tools = Some(tools.given);
    }
    Ok(model
        .tokenizer
        .encode(&template.render(&template.accommodate(request)?)?, false)?)
}
