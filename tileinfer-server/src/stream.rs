//! Answers as server-sent events: what becomes of a request is told chunk by chunk, and a stream that has
//! nothing to say shows that it is alive.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::{Value, json};
use tileinfer::engine::Event;

use crate::answers::{Answers, Usage};
use crate::error::{ApiError, ApiResult};

/// What one kind of request says of its events.
pub(crate) trait Chunks: Send + 'static {
    /// The chunks that an event of answer `index` makes.
    fn event(&mut self, index: usize, event: Event) -> ApiResult<Vec<Value>>;

    /// What is said after the last event.
    fn last(&mut self, usage: &Usage) -> Vec<Value>;

    /// What is said of an error, which ends the stream.
    fn failed(&self, error: &ApiError) -> Value {
        error.body()
    }

    /// How it is spelled.
    fn dialect(&self) -> Dialect {
        Dialect::OpenAi
    }
}

/// How events are spelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Dialect {
    /// Without names, and `[DONE]` at the end; a comment is a sign of life.
    OpenAi,
    /// Named after their `type`; an event `ping` is a sign of life.
    Anthropic,
}

impl Dialect {
    fn spell(self, chunk: &Value) -> Sent {
        let sent = match (self, chunk["type"].as_str()) {
            (Dialect::Anthropic, Some(name)) => Sent::default().event(name),
            _ => Sent::default(),
        };
        sent.data(chunk.to_string())
    }
}

struct Telling<C> {
    /// None, once nothing more will come.
    answers: Option<Answers>,
    chunks: C,
    pending: VecDeque<Sent>,
}

/// The stream of `answers`. When the client goes away it is dropped, and so are the answers.
pub(crate) fn respond(answers: Answers, chunks: impl Chunks, ping: Duration) -> Response {
    let telling = Telling {
        answers: Some(answers),
        chunks,
        pending: VecDeque::new(),
    };
    let dialect = telling.chunks.dialect();
    let events = stream::unfold(telling, move |mut telling| async move {
        loop {
            if let Some(sent) = telling.pending.pop_front() {
                return Some((Ok::<_, Infallible>(sent), telling));
            }
            let answers = telling.answers.as_mut()?;
            match answers.next().await {
                Some((index, event)) => match telling.chunks.event(index, event) {
                    Ok(chunks) => {
                        let sent = chunks.iter().map(|chunk| dialect.spell(chunk));
                        telling.pending.extend(sent);
                    }
                    Err(error) => {
                        let failed = telling.chunks.failed(&error);
                        telling.pending.push_back(dialect.spell(&failed));
                        telling.answers = None;
                    }
                },
                None => {
                    let last = telling.chunks.last(&answers.usage);
                    let sent = last.iter().map(|chunk| dialect.spell(chunk));
                    telling.pending.extend(sent);
                    if dialect == Dialect::OpenAi {
                        telling.pending.push_back(Sent::default().data("[DONE]"));
                    }
                    telling.answers = None;
                }
            }
        }
    });
    let alive = KeepAlive::new().interval(ping);
    let alive = match dialect {
        Dialect::OpenAi => alive.text("ping"),
        Dialect::Anthropic => alive.event(dialect.spell(&json!({"type": "ping"}))),
    };
    let mut response = Sse::new(events).keep_alive(alive).into_response();
    // Proxies that collect answers before they pass them on would defeat the stream.
    response.headers_mut().insert(
        "x-accel-buffering",
        axum::http::HeaderValue::from_static("no"),
    );
    response
}
