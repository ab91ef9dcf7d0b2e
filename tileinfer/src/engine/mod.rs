//! Turning steps into answers: [`Generation`] is one request on its way, [`StepLoop`] the only decode loop
//! there is. One sequence or many, chunks of prefill, decode tokens and drafts to verify go through it.

mod generation;
mod step;

pub use generation::{FinishReason, Generation, GenerationOptions};
pub use step::{Advance, Planned, Slot, StepLoop};
