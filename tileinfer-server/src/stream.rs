//! Answers as server-sent events: what becomes of a request is told chunk by chunk, and a stream that has
//! nothing to say shows that it is alive.

use std::collections::VecDeque;
use std::convert::Infallible;
use std::time::Duration;

use axum::response::sse::{Event as Sent, KeepAlive, Sse};
use axum::response::{IntoResponse, Response};
use futures_util::stream;
use serde_json::Value;
use tileinfer::engine::Event;

use crate::answers::{Answers, Usage};
use crate::error::ApiResult;

/// What one kind of request says of its events.
pub(crate) trait Chunks: Send + 'static {
    /// The chunks that an event of answer `index` makes.
    fn event(&mut self, index: usize, event: Event) -> ApiResult<Vec<Value>>;

    /// The last chunk, if usage is asked for.
    fn usage(&self, usage: &Usage) -> Option<Value>;
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
    let events = stream::unfold(telling, |mut telling| async move {
        loop {
            if let Some(sent) = telling.pending.pop_front() {
                return Some((Ok::<_, Infallible>(sent), telling));
            }
            let answers = telling.answers.as_mut()?;
            match answers.next().await {
                Some((index, event)) => match telling.chunks.event(index, event) {
                    Ok(chunks) => telling.pending.extend(chunks.iter().map(data)),
                    Err(error) => {
                        telling.pending.push_back(data(&error.body()));
                        telling.answers = None;
                    }
                },
                None => {
                    telling
                        .pending
                        .extend(telling.chunks.usage(&answers.usage).as_ref().map(data));
                    telling.pending.push_back(Sent::default().data("[DONE]"));
                    telling.answers = None;
                }
            }
        }
    });
    let alive = KeepAlive::new().interval(ping).text("ping");
    let mut response = Sse::new(events).keep_alive(alive).into_response();
    // Proxies that collect answers before they pass them on would defeat the stream.
    response.headers_mut().insert(
        "x-accel-buffering",
        axum::http::HeaderValue::from_static("no"),
    );
    response
}

fn data(value: &Value) -> Sent {
    Sent::default().data(value.to_string())
}
