//! Prompts by the name of a model's family, for callers that have messages but no model directory.

use std::sync::LazyLock;

use serde_json::{Map, Value};

use super::{ChatMessage, ChatRequest, ChatTemplate};
use crate::{Error, Result};

static QWEN3: LazyLock<ChatTemplate> =
    LazyLock::new(|| compiled(include_str!("builtin/qwen3.jinja")));
static APERTUS: LazyLock<ChatTemplate> =
    LazyLock::new(|| compiled(include_str!("builtin/apertus.jinja")));

fn compiled(source: &str) -> ChatTemplate {
    let special_tokens = Map::from_iter([("bos_token".to_owned(), Value::from("<s>"))]);
    ChatTemplate::from_source(source, special_tokens).expect("the built-in templates compile")
}

/// The prompt of a plain conversation for a model of type `qwen3` or `apertus`, as the field
/// `model_type` of its `config.json` says.
///
/// `add_generation_prompt` opens an assistant turn for the model to complete; `enable_thinking`
/// lets it reason first. Qwen3's turns before the last question lose their reasoning, and without
/// `enable_thinking` its answer starts after an empty one. Apertus keeps all reasoning, takes
/// a system message only in front (without one it gets its default, with today's date), and joins
/// assistant messages that follow each other into one turn. The prompt includes BOS where the
/// family has one, so encode it without added special tokens.
///
/// # Errors
/// Another model type, no messages, and a role that the family does not know are usage errors.
pub fn chat_prompt(
    model_type: &str,
    messages: &[ChatMessage],
    add_generation_prompt: bool,
    enable_thinking: bool,
) -> Result<String> {
    let template = match model_type {
        "qwen3" => &QWEN3,
        "apertus" => &APERTUS,
        _ => {
            return Err(Error::usage(format!(
                "there is no built-in chat template for model type {model_type:?}, only for qwen3 and apertus; load the model's own"
            )));
        }
    };
    let mut request = ChatRequest {
        add_generation_prompt,
        ..ChatRequest::answer(messages)
    };
    let variables = &mut request.variables;
    variables.insert("enable_thinking".to_owned(), enable_thinking.into());
    template.render(&request)
}
