//! What is asked of an engine, and what it tells in return. It knows no queue and no step.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;
use std::sync::mpsc::Sender;
use std::time::Duration;

use super::engine::Message;
use super::generation::{FinishReason, GenerationOptions};
use super::scheduler::RequestId;
use crate::sampling::{Sampled, TokenMask};
use crate::spec::SpecStats;
use crate::{Error, Result};

/// Which tokens may come next, as a text under a grammar grows. It is called on the engine's thread, between
/// two steps: all others wait for it.
pub trait Constraint: Send {
    /// The tokens that may come next; none, if the text is complete and nothing may follow.
    ///
    /// # Errors
    /// Ends the request.
    fn mask(&mut self) -> Result<Option<Arc<TokenMask>>>;

    /// The token that came.
    ///
    /// # Errors
    /// Ends the request.
    fn accept(&mut self, token: u32) -> Result<()>;
}

/// Hears the events of one request, on the engine's thread: it must neither block nor take long. False says
/// that nobody listens any more, which cancels the request.
pub type OnEvent = Box<dyn FnMut(Event) -> bool + Send>;

/// One prompt to continue.
pub struct Request {
    /// The prompt.
    pub prompt: Vec<u32>,
    /// How to continue it.
    pub options: GenerationOptions,
    /// Texts that end the answer; none of them is part of it.
    pub stop_strings: Vec<String>,
    /// Whether special tokens are left out of the text.
    pub skip_special: bool,
    /// A grammar that the answer follows.
    pub constraint: Option<Box<dyn Constraint>>,
    /// Hears what happens.
    pub on_event: OnEvent,
}

/// What happens to a request: it starts, brings tokens, and ends once.
#[derive(Debug)]
pub enum Event {
    /// It left the queue; told once.
    Started {
        /// Tokens of the prompt that were found in the prefix cache.
        cached_tokens: usize,
    },
    /// A step brought tokens.
    Tokens {
        /// Text that can be shown now. What may yet become another character or a stop string is held back.
        text: String,
        /// The tokens, an end token included.
        tokens: Vec<Sampled>,
    },
    /// It is over. Nothing follows.
    End(Ended),
}

/// How a request ended.
#[derive(Debug)]
pub enum Ended {
    /// With an answer.
    Finished(Finished),
    /// It was cancelled, or nobody listened.
    Cancelled,
    /// With an error.
    Failed(Error),
}

/// The end of an answer.
#[derive(Debug, Clone, PartialEq)]
pub struct Finished {
    /// Why.
    pub reason: FinishReason,
    /// Text that was held back until now.
    pub text: String,
    /// Tokens of the prompt.
    pub prompt_tokens: usize,
    /// Of these, found in the prefix cache.
    pub cached_tokens: usize,
    /// Tokens generated, an end token included.
    pub completion_tokens: usize,
    /// When it happened.
    pub times: RequestTimes,
    /// What speculation did, where the engine speculates.
    pub spec: Option<SpecStats>,
}

/// Times of one request, each from its arrival on.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct RequestTimes {
    /// Until it left the queue.
    pub to_start: Duration,
    /// Until its first token.
    pub to_first: Duration,
    /// Until its end.
    pub to_end: Duration,
}

/// A request that was handed in. Dropping it cancels what has not ended yet.
#[derive(Debug)]
pub struct RequestHandle {
    pub(super) id: RequestId,
    pub(super) messages: Sender<Message>,
}

impl RequestHandle {
    /// Ends the request, wherever it is; its pages are free before the next step.
    pub fn cancel(&self) {
        // Without an engine there is nothing to cancel.
        let _ = self.messages.send(Message::Cancel(self.id));
    }
}

impl Drop for RequestHandle {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// The one who hears: told of the end exactly once, whatever becomes of the engine.
pub(super) struct Listener {
    on_event: Option<OnEvent>,
}

impl Listener {
    pub(super) fn new(on_event: OnEvent) -> Self {
        Listener {
            on_event: Some(on_event),
        }
    }

    /// Whether somebody listens.
    pub(super) fn tell(&mut self, event: Event) -> bool {
        let on_event = &mut self.on_event;
        // A listener that panics has lost its request, not the engine.
        catch_unwind(AssertUnwindSafe(move || {
            on_event.as_mut().is_some_and(|on_event| on_event(event))
        }))
        .unwrap_or(false)
    }

    pub(super) fn end(mut self, ended: Ended) {
        self.say(ended);
    }

    fn say(&mut self, ended: Ended) {
        if let Some(mut on_event) = self.on_event.take() {
            let _ = catch_unwind(AssertUnwindSafe(move || on_event(Event::End(ended))));
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        self.say(Ended::Failed(Error::Device(
            "the engine has stopped".to_owned(),
        )));
    }
}
