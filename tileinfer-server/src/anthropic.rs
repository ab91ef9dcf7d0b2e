//! Requests of Anthropic's messages API in the words of OpenAI's, field by field: what a conversation means is
//! decided in one place, for both. It knows no model and no answer.

use serde_json::{Map, Value, json};

use crate::error::{ApiError, ApiResult};
use crate::fields::Fields;

/// The same request as a chat completion. `counts` if only its tokens are to be counted.
pub(crate) fn as_chat_completion(mut fields: Fields, counts: bool) -> ApiResult<Fields> {
    let mut chat = Map::new();
    let same = [
        "model",
        "max_tokens",
        "stream",
        "temperature",
        "top_p",
        "top_k",
    ];
    for name in same {
        chat.extend(fields.take(name).map(|value| (name.to_owned(), value)));
    }
    if !counts && !chat.contains_key("max_tokens") {
        return Err(ApiError::field("max_tokens", "max_tokens is missing"));
    }
    if let Some(stops) = fields.list("stop_sequences")? {
        chat.insert("stop".to_owned(), stops.into());
    }
    // They say who asks, or ask for what is always so: prefixes are cached unasked.
    fields.let_pass(&["metadata", "service_tier", "cache_control", "inference_geo"]);
    let thinks = thinking(&mut fields)?;
    let variables = json!({"enable_thinking": thinks});
    chat.insert("chat_template_kwargs".to_owned(), variables);
    chat.extend(response_format(&mut fields)?);
    chat.extend(tools(&mut fields)?);
    let mut messages = Vec::new();
    if let Some(system) = fields.take("system") {
        let parts = texts("system", system)?;
        messages.push(json!({"role": "system", "content": parts}));
    }
    let given = fields.list("messages")?.unwrap_or_default();
    if given.is_empty() {
        let what = "messages is missing or empty: there must be at least one";
        return Err(ApiError::field("messages", what));
    }
    fields.finish()?;
    for (i, message) in given.into_iter().enumerate() {
        add_message(&mut messages, &format!("messages[{i}]"), message)?;
    }
    // An answer that the caller began is continued.
    let begun = messages
        .last()
        .is_some_and(|last| last["role"] == "assistant" && last.get("tool_calls").is_none());
    if begun {
        chat.insert("continue_final_message".to_owned(), true.into());
    }
    chat.insert("messages".to_owned(), messages.into());
    Ok(Fields::of(chat))
}

/// Whether the model is to think. How long it does is up to it: a budget is a hint.
fn thinking(fields: &mut Fields) -> ApiResult<bool> {
    let Some(mut thinking) = fields.object("thinking")? else {
        return Ok(false);
    };
    thinking.let_pass(&["budget_tokens", "display"]);
    let kind = thinking.string("type")?.unwrap_or_default();
    thinking.finish()?;
    match kind.as_str() {
        "enabled" | "adaptive" => Ok(true),
        "disabled" => Ok(false),
        other => Err(ApiError::field(
            "thinking.type",
            format!("thinking.type is {other:?}, it must be enabled, adaptive or disabled"),
        )),
    }
}

fn response_format(fields: &mut Fields) -> ApiResult<Option<(String, Value)>> {
    let Some(mut config) = fields.object("output_config")? else {
        return Ok(None);
    };
    // A hint.
    config.let_pass(&["effort"]);
    let format = config.object("format")?;
    config.finish()?;
    let Some(mut format) = format else {
        return Ok(None);
    };
    let kind = format.string("type")?.unwrap_or_default();
    if kind != "json_schema" {
        let what = format!("output_config.format.type is {kind:?}, it must be json_schema");
        return Err(ApiError::field("output_config.format.type", what));
    }
    let schema = format.take("schema").ok_or_else(|| {
        let name = "output_config.format.schema";
        ApiError::field(name, format!("{name} is missing"))
    })?;
    format.finish()?;
    let format = json!({"type": "json_schema", "json_schema": {"schema": schema}});
    Ok(Some(("response_format".to_owned(), format)))
}

/// `tools` and `tool_choice`.
fn tools(fields: &mut Fields) -> ApiResult<Map<String, Value>> {
    let mut chat = Map::new();
    if let Some(given) = fields.list("tools")? {
        let tools = given.into_iter().enumerate();
        let tools = tools.map(|(i, tool)| function(&format!("tools[{i}]"), tool));
        chat.insert("tools".to_owned(), tools.collect::<ApiResult<_>>()?);
    }
    if let Some(mut choice) = fields.object("tool_choice")? {
        if let Some(single) = choice.flag("disable_parallel_tool_use")? {
            chat.insert("parallel_tool_calls".to_owned(), (!single).into());
        }
        let name = choice.string("name")?;
        let kind = choice.string("type")?.unwrap_or_default();
        choice.finish()?;
        let choice = match (kind.as_str(), name) {
            ("auto" | "none", None) => json!(kind),
            ("any", None) => json!("required"),
            ("tool", Some(name)) => json!({"type": "function", "function": {"name": name}}),
            _ => {
                let what =
                    "tool_choice must be of type auto, any or none, or of type tool with a name";
                return Err(ApiError::field("tool_choice", what));
            }
        };
        chat.insert("tool_choice".to_owned(), choice);
    }
    Ok(chat)
}

fn function(path: &str, tool: Value) -> ApiResult<Value> {
    let mut tool = Fields::within(path, tool)?;
    // Arguments always come as they are written, and prefixes are always cached.
    tool.let_pass(&["cache_control", "eager_input_streaming"]);
    let kind = tool.string("type")?.unwrap_or_else(|| "custom".to_owned());
    if kind != "custom" {
        let name = format!("{path}.type");
        let reason = format!("{name} is {kind:?}; only tools of the caller's own can be called");
        return Err(ApiError::unsupported(&name, &reason));
    }
    let mut function = Map::new();
    for (name, called) in [
        ("name", "name"),
        ("description", "description"),
        ("input_schema", "parameters"),
        ("strict", "strict"),
    ] {
        let field = tool.take(name).map(|value| (called.to_owned(), value));
        function.extend(field);
    }
    tool.finish()?;
    Ok(json!({"type": "function", "function": function}))
}

/// One message, which may be several there: the result of each tool is one of its own.
fn add_message(messages: &mut Vec<Value>, path: &str, message: Value) -> ApiResult<()> {
    let mut message = Fields::within(path, message)?;
    let role = message.string("role")?.unwrap_or_default();
    if !["user", "assistant", "system"].contains(&role.as_str()) {
        let what = format!("{path}.role is {role:?}, it must be user or assistant");
        return Err(ApiError::field(format!("{path}.role"), what));
    }
    let content = message.take("content");
    message.finish()?;
    let blocks = match content {
        Some(Value::Array(blocks)) => blocks,
        Some(Value::String(text)) => vec![json!({"type": "text", "text": text})],
        _ => {
            let what = format!("{path}.content must be a string or a list of blocks");
            return Err(ApiError::field(format!("{path}.content"), what));
        }
    };
    let (mut parts, mut calls, mut thoughts) = (Vec::new(), Vec::new(), String::new());
    for (i, block) in blocks.into_iter().enumerate() {
        let path = format!("{path}.content[{i}]");
        let mut block = Fields::within(&path, block)?;
        block.let_pass(&["cache_control"]);
        let kind = block.string("type")?.unwrap_or_default();
        match (kind.as_str(), role.as_str()) {
            ("text", _) => {
                let text = block.needed("text")?;
                parts.push(json!({"type": "text", "text": text}));
                block.let_pass(&["citations"]);
            }
            ("tool_result", "user") => {
                add_text(messages, &role, &mut parts);
                let id = block.needed("tool_use_id")?;
                let result = block.take("content").unwrap_or_else(|| "".into());
                let result = texts(&format!("{path}.content"), result)?;
                // That it failed is for its text to say.
                block.let_pass(&["is_error"]);
                messages.push(json!({"role": "tool", "tool_call_id": id, "content": result}));
            }
            ("tool_use", "assistant") => {
                let (id, name) = (block.needed("id")?, block.needed("name")?);
                let input = Value::Object(block.map("input")?.unwrap_or_default());
                let function = json!({"name": name, "arguments": input.to_string()});
                calls.push(json!({"id": id, "type": "function", "function": function}));
                block.let_pass(&["caller"]);
            }
            ("thinking", "assistant") => {
                thoughts.push_str(&block.needed("thinking")?);
                block.let_pass(&["signature"]);
            }
            _ => {
                let reason =
                    format!("{path} is of type {kind:?}, which a {role} message cannot hold here");
                return Err(ApiError::unsupported(&path, &reason));
            }
        }
        block.finish()?;
    }
    if calls.is_empty() && thoughts.is_empty() {
        add_text(messages, &role, &mut parts);
        return Ok(());
    }
    let mut answer = json!({"role": role, "content": parts});
    if !calls.is_empty() {
        answer["tool_calls"] = calls.into();
    }
    if !thoughts.is_empty() {
        answer["reasoning_content"] = thoughts.into();
    }
    messages.push(answer);
    Ok(())
}

/// Adds text to the conversation: to the last message, if it is of the same role.
fn add_text(messages: &mut Vec<Value>, role: &str, parts: &mut Vec<Value>) {
    if parts.is_empty() {
        return;
    }
    let last = messages.last_mut().filter(|last| {
        last["role"] == role && role != "system" && last.get("tool_calls").is_none()
    });
    match last.and_then(|last| last["content"].as_array_mut()) {
        Some(content) => content.append(parts),
        None => messages.push(json!({"role": role, "content": std::mem::take(parts)})),
    }
}

/// A string, or a list of blocks of text, as parts.
fn texts(path: &str, content: Value) -> ApiResult<Vec<Value>> {
    let wrong = |path: &str| {
        ApiError::field(
            path,
            format!("{path} must be a string or a list of blocks of type text"),
        )
    };
    match content {
        Value::String(text) => Ok(vec![json!({"type": "text", "text": text})]),
        Value::Array(blocks) => {
            let blocks = blocks.iter().enumerate();
            let text = |(i, block): (usize, &Value)| match (&block["type"], &block["text"]) {
                (Value::String(kind), Value::String(text)) if kind == "text" => {
                    Ok(json!({"type": "text", "text": text}))
                }
                _ => Err(wrong(&format!("{path}[{i}]"))),
            };
            blocks.map(text).collect()
        }
        _ => Err(wrong(path)),
    }
}
