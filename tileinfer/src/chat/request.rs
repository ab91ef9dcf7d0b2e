//! What a caller asks a chat template to render.

use jiff::civil::DateTime;
use serde::{Deserialize, Deserializer, Serialize, de::Error as _};
use serde_json::{Map, Value, json};

/// One turn of a plain conversation.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct ChatMessage {
    /// `system`, `user` or `assistant`, or what else the template knows.
    pub role: String,
    /// What was said.
    pub content: String,
}

impl ChatMessage {
    /// A message of `role` that says `content`.
    pub fn new(role: impl Into<String>, content: impl Into<String>) -> Self {
        Self {
            role: role.into(),
            content: content.into(),
        }
    }
}

impl From<&ChatMessage> for Value {
    fn from(message: &ChatMessage) -> Self {
        json!({"role": message.role, "content": message.content})
    }
}

/// A conversation and the options of transformers' `apply_chat_template`. As JSON it is one object;
/// keys that are not fields here become variables of the template.
#[derive(Debug, Clone, Default, Deserialize)]
pub struct ChatRequest {
    /// The conversation: objects with at least a `role`, in the shapes that the template knows.
    pub messages: Vec<Value>,
    /// JSON schemas of the functions that the model may call. An empty list is not the same as none.
    #[serde(default)]
    pub tools: Option<Vec<Value>>,
    /// Documents for templates that put retrieved text into the prompt.
    #[serde(default)]
    pub documents: Option<Vec<Value>>,
    /// Whether the prompt ends with the opening of an assistant turn.
    #[serde(default, deserialize_with = "null_as_default")]
    pub add_generation_prompt: bool,
    /// The field of the last message that the model is to continue, whose end the prompt then ends
    /// with; `true` in JSON means `content`.
    #[serde(default, deserialize_with = "continued_field")]
    pub continue_final_message: Option<String>,
    /// The time that `strftime_now` tells, such as `2025-03-14T09:26:53`; none is the local time now.
    #[serde(default, deserialize_with = "civil_time")]
    pub now: Option<DateTime>,
    /// Further variables, such as `enable_thinking`. They go before special tokens of the same name.
    #[serde(flatten)]
    pub variables: Map<String, Value>,
}

impl ChatRequest {
    /// A request to answer a plain conversation.
    pub fn answer(messages: &[ChatMessage]) -> Self {
        Self {
            messages: messages.iter().map(Value::from).collect(),
            add_generation_prompt: true,
            ..Self::default()
        }
    }
}

fn null_as_default<'de, D, T>(deserializer: D) -> Result<T, D::Error>
where
    D: Deserializer<'de>,
    T: Deserialize<'de> + Default,
{
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

fn continued_field<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<String>, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Null | Value::Bool(false) => Ok(None),
        Value::Bool(true) => Ok(Some("content".to_owned())),
        Value::String(field) => Ok(Some(field)),
        other => Err(D::Error::custom(format!(
            "continue_final_message is {other}; it must be true, false or the name of a field"
        ))),
    }
}

fn civil_time<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Option<DateTime>, D::Error> {
    let Some(text) = Option::<String>::deserialize(deserializer)? else {
        return Ok(None);
    };
    text.parse().map(Some).map_err(|error| {
        D::Error::custom(format!(
            "now is {text:?}; it must be a time such as 2025-03-14T09:26:53 ({error})"
        ))
    })
}
