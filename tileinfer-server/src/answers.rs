//! The answers to one request on their way: it hands prompts to the engine and brings back what happens to
//! them, in order. Dropping it cancels what is not finished.

use std::sync::Arc;

use serde_json::{Value, json};
use tileinfer::engine::{Constraint, Ended, Event, Finished, Request, RequestHandle};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

use crate::error::{ApiError, ApiResult};
use crate::metrics::Clock;
use crate::params::Params;
use crate::state::{Loaded, State};

/// See the module's first line.
pub(crate) struct Answers {
    events: UnboundedReceiver<(usize, Event)>,
    handles: Vec<RequestHandle>,
    left: usize,
    /// Answers to each prompt.
    choices: usize,
    pub(crate) usage: Usage,
}

/// Tokens of a request.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Usage {
    pub(crate) prompt: usize,
    /// Of these, found in the prefix cache.
    pub(crate) cached: usize,
    pub(crate) completion: usize,
}

impl Usage {
    /// As OpenAI's API tells it.
    pub(crate) fn body(&self) -> Value {
        json!({
            "prompt_tokens": self.prompt,
            "completion_tokens": self.completion,
            "total_tokens": self.prompt + self.completion,
            "prompt_tokens_details": {"cached_tokens": self.cached},
        })
    }
}

impl Answers {
    /// Asks for `params.choices` answers to each of `prompts`; answer `i` is to prompt `i / choices`, with a
    /// seed of its own. `constraint` makes the grammar of each.
    pub(crate) fn ask(
        state: &State,
        loaded: &Loaded,
        prompts: &[Vec<u32>],
        params: &Params,
        skip_special: bool,
        constraint: &dyn Fn() -> ApiResult<Option<Box<dyn Constraint>>>,
    ) -> ApiResult<Self> {
        let (sender, events) = unbounded_channel();
        let count = prompts.len() * params.choices;
        let mut handles = Vec::with_capacity(count);
        for index in 0..count {
            let mut options = params.options.clone();
            options.seed = options.seed.wrapping_add((index % params.choices) as u64);
            let (sender, metrics, mut clock) =
                (sender.clone(), state.metrics.clone(), Clock::start());
            let request = Request {
                prompt: prompts[index / params.choices].clone(),
                options,
                stop_strings: params.stop_strings.clone(),
                skip_special,
                constraint: constraint()?,
                on_event: Box::new(move |event| {
                    metrics.observe(&event, &mut clock);
                    sender.send((index, event)).is_ok()
                }),
            };
            handles.push(loaded.model.engine.submit(request)?);
        }
        let usage = Usage {
            prompt: prompts.iter().map(Vec::len).sum(),
            ..Usage::default()
        };
        Ok(Answers {
            events,
            handles,
            left: count,
            choices: params.choices,
            usage,
        })
    }

    /// How many there are.
    pub(crate) fn count(&self) -> usize {
        self.handles.len()
    }

    /// What happens next, to which answer; none, once all have ended.
    pub(crate) async fn next(&mut self) -> Option<(usize, Event)> {
        if self.left == 0 {
            return None;
        }
        let event = self.events.recv().await;
        if let Some((index, Event::End(ended))) = &event {
            self.left -= 1;
            if let Ended::Finished(finished) = ended {
                self.usage.completion += finished.completion_tokens;
                // A prompt counts once, as its first answer found it.
                self.usage.cached += if index % self.choices == 0 {
                    finished.cached_tokens
                } else {
                    0
                };
            }
        }
        event
    }
}

/// The end of an answer, or why there is none.
pub(crate) fn finished(ended: Ended) -> ApiResult<Finished> {
    match ended {
        Ended::Finished(finished) => Ok(finished),
        Ended::Cancelled => Err(ApiError::unavailable(
            "the request was cancelled: the server is shutting down",
        )),
        Ended::Failed(error) => Err(error.into()),
    }
}

/// Runs what computes for long where it holds nobody up.
pub(crate) async fn aside<T: Send + 'static>(
    work: impl FnOnce() -> ApiResult<T> + Send + 'static,
) -> ApiResult<T> {
    let done = tokio::task::spawn_blocking(work).await;
    done.unwrap_or_else(|_| {
        Err(ApiError::internal(
            "the request set off a panic. This is a bug, please report it",
        ))
    })
}

/// Shared by all who answer.
pub(crate) type App = Arc<State>;
