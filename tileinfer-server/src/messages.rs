//! `/v1/messages`, as Anthropic's API has it: a conversation in, blocks of thinking, text and calls of tools out.
//! What a request means is for [`crate::chat`] to say.

use std::sync::Arc;

use axum::body::Bytes;
use axum::extract::State as Shared;
use axum::response::{IntoResponse, Response};
use serde_json::{Value, json};
use tileinfer::engine::{Event, FinishReason};

use crate::answers::{App, Usage, aside, finished};
use crate::anthropic::as_chat_completion;
use crate::chat::{Prepared, call_id};
use crate::error::{ApiError, ApiResult};
use crate::fields::Fields;
use crate::output::{OutputParser, Piece, ToolStyle};
use crate::state::Loaded;
use crate::stream::{Chunks, Dialect, respond};

/// Answers a request.
pub(crate) async fn messages(Shared(app): Shared<App>, body: Bytes) -> ApiResult<Response> {
    let loaded = app.ready()?;
    let (prepared, mut answers) = aside({
        let (app, loaded) = (app.clone(), loaded.clone());
        move || {
            let fields = as_chat_completion(Fields::from_body(&body)?, false)?;
            let prepared = Prepared::read(fields, &app, &loaded)?;
            let answers = prepared.ask(&app, &loaded)?;
            Ok((prepared, answers))
        }
    })
    .await?;
    let mut telling = Telling::new(&prepared, &app, loaded);
    if prepared.params.stream {
        return Ok(respond(answers, telling, app.options.ping));
    }
    while let Some((_, event)) = answers.next().await {
        telling.read(event)?;
    }
    Ok(axum::Json(telling.whole(&answers.usage)).into_response())
}

/// Counts the tokens of a request's prompt.
pub(crate) async fn count_tokens(
    Shared(app): Shared<App>,
    body: Bytes,
) -> ApiResult<axum::Json<Value>> {
    let loaded = app.ready()?;
    aside(move || {
        let fields = as_chat_completion(Fields::from_body(&body)?, true)?;
        let prepared = Prepared::read(fields, &app, &loaded)?;
        Ok(axum::Json(json!({"input_tokens": prepared.prompt.len()})))
    })
    .await
}

/// The events of a request as blocks.
struct Telling {
    app: App,
    loaded: Arc<Loaded>,
    id: String,
    parser: OutputParser,
    usage: Usage,
    max_tokens: Option<usize>,
    stop_ids: Arc<[u32]>,
    stops: Vec<String>,
    /// The last bytes of the answer, with what a stop string cut off.
    tail: Vec<u8>,
    /// Whether the last token was one that ends texts.
    ended: bool,
    blocks: Vec<Block>,
    stop_reason: Option<&'static str>,
    stop_sequence: Option<String>,
}

/// A block of an answer, as far as it has been read.
enum Block {
    Thinking(String),
    Text(String),
    Call {
        id: String,
        name: String,
        input: String,
    },
}

impl Block {
    fn whole(self) -> Value {
        match self {
            Block::Thinking(text) => json!({"type": "thinking", "thinking": text, "signature": ""}),
            Block::Text(text) => json!({"type": "text", "text": text}),
            Block::Call { id, name, input } => {
                // It has to be an object, whatever the model wrote.
                let input = serde_json::from_str(&input)
                    .ok()
                    .filter(Value::is_object)
                    .unwrap_or_else(|| json!({"INVALID_JSON": input}));
                json!({"type": "tool_use", "id": id, "name": name, "input": input})
            }
        }
    }

    /// As it is before anything is in it.
    fn empty(&self) -> Value {
        match self {
            Block::Thinking(_) => json!({"type": "thinking", "thinking": "", "signature": ""}),
            Block::Text(_) => json!({"type": "text", "text": ""}),
            Block::Call { id, name, .. } => {
                json!({"type": "tool_use", "id": id, "name": name, "input": {}})
            }
        }
    }
}

impl Telling {
    fn new(prepared: &Prepared, app: &App, loaded: Arc<Loaded>) -> Self {
        let params = &prepared.params;
        Telling {
            app: app.clone(),
            id: format!("msg_{}", app.unique(24)),
            parser: prepared.parser(&loaded),
            usage: Usage {
                prompt: prepared.prompt.len(),
                ..Usage::default()
            },
            max_tokens: params.options.max_tokens,
            stop_ids: params.options.stop_ids.clone(),
            stops: params.stop_strings.clone(),
            tail: Vec::new(),
            ended: false,
            blocks: Vec::new(),
            stop_reason: None,
            stop_sequence: None,
            loaded,
        }
    }

    /// The pieces that an event brings, each with the block that it belongs to and whether that is new.
    fn read(&mut self, event: Event) -> ApiResult<Vec<(Piece, bool)>> {
        let pieces = match event {
            Event::Started { cached_tokens } => {
                self.usage.cached = cached_tokens;
                Vec::new()
            }
            Event::Tokens { text, tokens } => {
                for token in tokens {
                    self.ended = self.stop_ids.contains(&token.token);
                    let bytes = self.loaded.model.tokenizer.token_bytes(token.token);
                    self.tail.extend(bytes.unwrap_or_default());
                }
                let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
                // The token before last may hold the beginning of a stop string, and the last one more than it.
                let kept = 2 * longest + 256;
                self.tail.drain(..self.tail.len().saturating_sub(kept));
                self.parser.push(&text)
            }
            Event::End(ended) => {
                let finished = finished(ended)?;
                let mut pieces = self.parser.push(&finished.text);
                pieces.extend(self.parser.finish());
                if finished.reason == FinishReason::Stop && !self.ended {
                    self.stop_sequence = self.stop_string();
                }
                let asked = self.max_tokens.unwrap_or(usize::MAX);
                self.stop_reason = Some(match finished.reason {
                    FinishReason::Stop if self.stop_sequence.is_some() => "stop_sequence",
                    FinishReason::Stop if self.parser.calls() > 0 => "tool_use",
                    FinishReason::Stop => "end_turn",
                    FinishReason::Length if finished.completion_tokens < asked => {
                        "model_context_window_exceeded"
                    }
                    FinishReason::Length => "max_tokens",
                });
                pieces
            }
        };
        let with_blocks = pieces.into_iter().map(|piece| {
            let new = self.add(&piece);
            (piece, new)
        });
        Ok(with_blocks.collect())
    }

    /// Adds a piece to the last block, or to a new one; whether it is new.
    fn add(&mut self, piece: &Piece) -> bool {
        match (self.blocks.last_mut(), piece) {
            (Some(Block::Thinking(before)), Piece::Reasoning(text))
            | (Some(Block::Text(before)), Piece::Content(text))
            | (Some(Block::Call { input: before, .. }), Piece::Arguments(text)) => {
                before.push_str(text);
                return false;
            }
            // Arguments follow their call.
            (_, Piece::Arguments(_)) => return false,
            (_, Piece::Reasoning(text)) => self.blocks.push(Block::Thinking(text.clone())),
            (_, Piece::Content(text)) => self.blocks.push(Block::Text(text.clone())),
            (_, Piece::Call(name)) => {
                let id = match self.loaded.style.tools {
                    ToolStyle::Mistral => call_id(&self.app, &self.loaded),
                    _ => format!("toolu_{}", self.app.unique(24)),
                };
                self.blocks.push(Block::Call {
                    id,
                    name: name.clone(),
                    input: String::new(),
                });
            }
        }
        true
    }

    /// The stop string that the answer ended with.
    fn stop_string(&self) -> Option<String> {
        let find = |stop: &String| {
            let mut windows = self.tail.windows(stop.len());
            windows.position(|window| window == stop.as_bytes())
        };
        let found = self
            .stops
            .iter()
            .filter_map(|stop| Some((find(stop)?, stop)));
        found
            .min_by_key(|(start, _)| *start)
            .map(|(_, stop)| stop.clone())
    }

    fn message(&self, content: &[Value], usage: &Usage) -> Value {
        json!({
            "id": self.id,
            "type": "message",
            "role": "assistant",
            "model": self.loaded.model.name,
            "content": content,
            "stop_reason": self.stop_reason,
            "stop_sequence": self.stop_sequence,
            "usage": counts(usage),
        })
    }

    fn whole(mut self, usage: &Usage) -> Value {
        let blocks = std::mem::take(&mut self.blocks);
        let content: Vec<Value> = blocks.into_iter().map(Block::whole).collect();
        self.message(&content, usage)
    }
}

/// Tokens as Anthropic's API counts them: those found in the cache are not among those that came in.
fn counts(usage: &Usage) -> Value {
    json!({
        "input_tokens": usage.prompt - usage.cached,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached,
        "output_tokens": usage.completion,
    })
}

impl Chunks for Telling {
    fn event(&mut self, _index: usize, event: Event) -> ApiResult<Vec<Value>> {
        let starts = matches!(event, Event::Started { .. });
        let before = self.blocks.len();
        let pieces = self.read(event)?;
        if starts {
            let message = self.message(&[], &self.usage);
            return Ok(vec![json!({"type": "message_start", "message": message})]);
        }
        let mut chunks = Vec::new();
        let mut open = before;
        let stop = |index: usize| json!({"type": "content_block_stop", "index": index});
        for (piece, new) in pieces {
            if new {
                if open > 0 {
                    chunks.push(stop(open - 1));
                }
                let block = self.blocks[open].empty();
                chunks.push(
                    json!({"type": "content_block_start", "index": open, "content_block": block}),
                );
                open += 1;
            }
            let delta = match piece {
                Piece::Call(_) => continue,
                Piece::Content(text) => json!({"type": "text_delta", "text": text}),
                Piece::Reasoning(text) => json!({"type": "thinking_delta", "thinking": text}),
                Piece::Arguments(text) => json!({"type": "input_json_delta", "partial_json": text}),
            };
            chunks.push(json!({"type": "content_block_delta", "index": open.saturating_sub(1), "delta": delta}));
        }
        if self.stop_reason.is_some() && open > 0 {
            chunks.push(stop(open - 1));
        }
        Ok(chunks)
    }

    fn last(&mut self, usage: &Usage) -> Vec<Value> {
        let delta = json!({"stop_reason": self.stop_reason, "stop_sequence": self.stop_sequence});
        vec![
            json!({"type": "message_delta", "delta": delta, "usage": counts(usage)}),
            json!({"type": "message_stop"}),
        ]
    }

    fn failed(&self, error: &ApiError) -> Value {
        error.anthropic_body()
    }

    fn dialect(&self) -> Dialect {
        Dialect::Anthropic
    }
}
