//! Turning steps into answers: [`Generation`] is one request on its way, [`StepLoop`] the only decode loop
//! there is. One sequence or many, chunks of prefill, decode tokens and drafts to verify go through it.
//!
//! [`Engine`] serves many requests at once: it owns a loop on a thread of its own, asks the [`scheduler`] who
//! runs next, and tells each [`Request`] what happens to it.

#[allow(
    clippy::module_inception,
    reason = "the module is named after what it defines"
)]
mod engine;
mod generation;
mod metrics;
mod request;
pub mod scheduler;
mod step;

pub use engine::{Engine, EngineOptions, EngineState, IdleReport};
pub use generation::{FinishReason, Generation, GenerationOptions};
pub use metrics::{Metrics, MetricsSnapshot};
pub use request::{
    Constraint, Ended, Event, Finished, OnEvent, Request, RequestHandle, RequestTimes,
};
pub use step::{Advance, Planned, Slot, StepLoop};
