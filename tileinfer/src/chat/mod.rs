//! Conversations to prompts, by a model's own chat template.
//!
//! [`ChatTemplate::render`] gives the text that `apply_chat_template` of transformers gives, refusals
//! included; [`ChatTemplate::accommodate`] is the kinder step that chat front ends take before it.
//! The text is to be encoded without added special tokens, because a template writes BOS itself.
//! Nothing here knows about token ids. Special tokens that a user spells out in a message become
//! real ones when the prompt is encoded, as they do with transformers.

mod accommodate;
mod builtin;
mod python;
mod reasoning;
mod request;
mod source;
mod template;

pub use builtin::chat_prompt;
pub use reasoning::{AnswerPart, ReasoningMarks, ReasoningSplit};
pub use request::{ChatMessage, ChatRequest};
pub use template::ChatTemplate;
