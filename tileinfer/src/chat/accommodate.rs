//! Brings requests as clients write them into the shape that a template reads.
//!
//! Which shape that is, a template tells when it is tried: a probe's words must come out of it
//! whole. This module does not know the names of any models.

use std::borrow::Cow;

use serde_json::{Value, json};

use super::{ChatRequest, ChatTemplate, python};
use crate::{Error, Result};

/// Words that no template has and all print as they are.
const NAME: &str = "probe_name";
const ABOUT: &str = "probe_about";
const KEY: &str = "probe_key";
const PART: &str = "probe_part";

/// The shapes of input that a template reads.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Shapes {
    /// `None` if tools do not show in the prompt in either shape.
    tools: Option<ToolShape>,
    /// Whether the arguments of a call are to be JSON text instead of an object.
    arguments_as_text: bool,
    /// Whether content may be a list of parts.
    parts: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ToolShape {
    /// `{"type": "function", "function": {"name": …}}`, as in OpenAI's API.
    Wrapped,
    /// `{"name": …}`.
    Flat,
}

impl Shapes {
    /// Find out what `template` reads.
    pub(super) fn probe(template: &ChatTemplate) -> Self {
        let tools = [ToolShape::Wrapped, ToolShape::Flat]
            .into_iter()
            .find(|shape| {
                let prompt = probe(
                    template,
                    Some(*shape),
                    &[json!({"role": "user", "content": "Hi"})],
                );
                prompt.contains(NAME) && prompt.contains(ABOUT)
            });
        let arguments = json!({KEY: "value"});
        let as_object = probe(template, tools, &called(&arguments));
        let as_text = probe(template, tools, &called(&arguments.to_string().into()));
        let is_json = |prompt: &str| {
            prompt.contains(&format!("{KEY}\"")) && !prompt.contains(&format!("{KEY}\\\""))
        };
        let part = json!([{"type": "text", "text": PART}]);
        let parts = probe(template, None, &[json!({"role": "user", "content": part})]);
        Self {
            tools,
            arguments_as_text: !is_json(&as_object) && is_json(&as_text),
            parts: parts.contains(PART) && !parts.contains("'text'") && !parts.contains("\"text\""),
        }
    }
}

/// What the template makes of a conversation, nothing if it refuses.
fn probe(template: &ChatTemplate, tools: Option<ToolShape>, messages: &[Value]) -> String {
    let tool = json!({
        "name": NAME,
        "description": ABOUT,
        "parameters": {"type": "object", "properties": {}},
    });
    let request = ChatRequest {
        messages: messages.to_vec(),
        tools: tools.map(|shape| vec![shaped(tool, shape)]),
        ..ChatRequest::default()
    };
    template.render(&request).unwrap_or_default()
}

fn called(arguments: &Value) -> [Value; 3] {
    let call = json!({
        // As long as Mistral's templates demand.
        "id": "callcall1",
        "type": "function",
        "function": {"name": NAME, "arguments": arguments},
    });
    [
        json!({"role": "user", "content": "Hi"}),
        json!({"role": "assistant", "content": "", "tool_calls": [call]}),
        json!({"role": "tool", "name": NAME, "tool_call_id": "callcall1", "content": "done"}),
    ]
}

impl ChatTemplate {
    /// The request as the template wants it: absent content becomes empty, tools are wrapped or
    /// unwrapped, the arguments of calls become objects or text, and parts of text are joined by
    /// line ends for templates that read strings only.
    ///
    /// # Errors
    /// Content that is not text is a usage error.
    pub fn accommodate(&self, mut request: ChatRequest) -> Result<ChatRequest> {
        let shapes = self.shapes();
        for (position, message) in request.messages.iter_mut().enumerate() {
            if !message.is_object() {
                return Err(Error::usage(format!("message {position} is not an object")));
            }
            match &message["content"] {
                Value::Null => message["content"] = "".into(),
                Value::Array(parts) => {
                    let text = joined(parts, position)?;
                    if !shapes.parts {
                        message["content"] = text.into();
                    }
                }
                _ => {}
            }
            let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut);
            for call in calls.into_iter().flatten() {
                let function = match call.get("function") {
                    Some(_) => &mut call["function"],
                    None => call,
                };
                if let Some(arguments) = function.get_mut("arguments") {
                    shape_arguments(arguments, shapes.arguments_as_text);
                }
            }
        }
        if let (Some(tools), Some(shape)) = (&mut request.tools, shapes.tools) {
            for tool in tools {
                *tool = shaped(tool.take(), shape);
            }
        }
        Ok(request)
    }
}

/// The text of a message's parts.
fn joined(parts: &[Value], position: usize) -> Result<String> {
    let texts: Result<Vec<Cow<'_, str>>> = parts
        .iter()
        .map(|part| {
            let text = part.as_str().or_else(|| part["text"].as_str());
            text.map(Cow::from).ok_or_else(|| {
                let kind = part["type"].as_str().unwrap_or("unknown");
                Error::usage(format!(
                    "message {position} has a part of type {kind:?}; only text can be read"
                ))
            })
        })
        .collect();
    Ok(texts?.join("\n"))
}

fn shape_arguments(arguments: &mut Value, as_text: bool) {
    match arguments {
        Value::String(text) if !as_text => {
            // What is no object may still be what the model wrote, so it stays as it is.
            if let Ok(object @ Value::Object(_)) = serde_json::from_str(text) {
                *arguments = object;
            }
        }
        Value::Object(_) if as_text => {
            if let Ok(text) = python::dumps(arguments) {
                *arguments = text.into();
            }
        }
        _ => {}
    }
}

fn shaped(mut tool: Value, shape: ToolShape) -> Value {
    let is_wrapped = tool.get("function").is_some_and(Value::is_object);
    match shape {
        ToolShape::Flat if is_wrapped => tool["function"].take(),
        ToolShape::Wrapped if !is_wrapped && tool.get("name").is_some() => {
            if let Value::Object(fields) = &mut tool {
                fields.shift_remove("type");
            }
            json!({"type": "function", "function": tool})
        }
        _ => tool,
    }
}
