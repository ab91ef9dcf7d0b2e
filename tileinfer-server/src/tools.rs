//! The tools of a request: read and checked, and told to models whose chat template says nothing of tools.

use serde_json::{Value, json};

use crate::error::{ApiError, ApiResult};
use crate::fields::{Fields, brief};

/// What the model may call.
#[derive(Debug, Clone, Default)]
pub(crate) struct Tools {
    /// As they came.
    pub(crate) given: Vec<Value>,
    /// Names and schemas of arguments.
    pub(crate) schemas: Vec<(String, Value)>,
    pub(crate) choice: Choice,
    /// Calls in one answer at most.
    pub(crate) most_calls: usize,
}

/// Whether the model has to call a tool.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) enum Choice {
    /// It may.
    #[default]
    Auto,
    /// It must.
    Required,
    /// It must call this one.
    Named(String),
}

/// Calls in one answer, where several are allowed.
const MAX_CALLS: usize = 32;

impl Tools {
    /// Takes `tools`, `tool_choice` and `parallel_tool_calls` out of a request.
    pub(crate) fn read(fields: &mut Fields, max_bytes: usize) -> ApiResult<Self> {
        let given = fields.list("tools")?.unwrap_or_default();
        let bytes: usize = given.iter().map(|tool| tool.to_string().len()).sum();
        if bytes > max_bytes {
            return Err(ApiError::field(
                "tools",
                format!("tools are {bytes} bytes, the limit is {max_bytes}"),
            ));
        }
        let mut schemas: Vec<(String, Value)> = Vec::new();
        let mut strict = None;
        for (i, tool) in given.iter().enumerate() {
            let (name, schema, is_strict) = read_tool(&format!("tools[{i}]"), tool.clone())?;
            if schemas.iter().any(|(other, _)| *other == name) {
                return Err(ApiError::field(
                    "tools",
                    format!("there are two tools called {name:?}"),
                ));
            }
            if is_strict {
                strict.get_or_insert(i);
            }
            schemas.push((name, schema));
        }
        let most_calls = if fields.flag("parallel_tool_calls")? == Some(false) {
            1
        } else {
            MAX_CALLS
        };
        let choice = match fields.take("tool_choice") {
            None => Choice::Auto,
            Some(Value::String(word)) if word == "none" => {
                return Ok(Tools {
                    most_calls,
                    ..Tools::default()
                });
            }
            Some(Value::String(word)) if word == "auto" => Choice::Auto,
            Some(Value::String(word)) if word == "required" => Choice::Required,
            Some(Value::Object(choice)) => {
                let name = choice
                    .get("function")
                    .and_then(|function| function["name"].as_str());
                let name = name.filter(|name| schemas.iter().any(|(other, _)| other == name));
                let wrong = "tool_choice must name one of the tools as {\"type\": \"function\", \"function\": {\"name\": …}}";
                Choice::Named(
                    name.ok_or_else(|| ApiError::field("tool_choice", wrong))?
                        .to_owned(),
                )
            }
            Some(other) => {
                let shown = brief(&other);
                let what = "it must be none, auto, required or name a function";
                return Err(ApiError::field(
                    "tool_choice",
                    format!("tool_choice is {shown}, {what}"),
                ));
            }
        };
        if schemas.is_empty() && choice != Choice::Auto {
            return Err(ApiError::field(
                "tool_choice",
                "tool_choice asks for a call and there are no tools",
            ));
        }
        if let (Some(i), Choice::Auto) = (strict, &choice) {
            let param = format!("tools[{i}].function.strict");
            let reason =
                format!("{param} is honoured only where tool_choice asks for a call; leave it out");
            return Err(ApiError::unsupported(&param, &reason));
        }
        Ok(Tools {
            given,
            schemas,
            choice,
            most_calls,
        })
    }

    /// Whether there are none.
    pub(crate) fn is_empty(&self) -> bool {
        self.given.is_empty()
    }

    /// The tools that have to be called, if any have.
    pub(crate) fn forced(&self) -> Option<(Vec<(String, Value)>, usize)> {
        match &self.choice {
            Choice::Auto => None,
            Choice::Required => Some((self.schemas.clone(), self.most_calls)),
            Choice::Named(name) => Some((
                self.schemas
                    .iter()
                    .filter(|(other, _)| other == name)
                    .cloned()
                    .collect(),
                1,
            )),
        }
    }
}

fn read_tool(name: &str, tool: Value) -> ApiResult<(String, Value, bool)> {
    let mut tool = Fields::within(name, tool)?;
    let kind = tool
        .string("type")?
        .unwrap_or_else(|| "function".to_owned());
    if kind != "function" {
        let param = format!("{name}.type");
        let reason = format!("{param} is {kind:?}; only functions can be called");
        return Err(ApiError::unsupported(&param, &reason));
    }
    let missing = |what: &str| {
        ApiError::field(
            format!("{name}.{what}"),
            format!("{name}.{what} is missing"),
        )
    };
    let mut function = tool
        .object("function")?
        .ok_or_else(|| missing("function"))?;
    tool.finish()?;
    let called = function.string("name")?.filter(|name| !name.is_empty());
    let called = called.ok_or_else(|| missing("function.name"))?;
    function.string("description")?;
    let strict = function.flag("strict")?.unwrap_or(false);
    let schema = function.map("parameters")?;
    function.finish()?;
    let schema = schema.map_or_else(
        || json!({"type": "object", "properties": {}}),
        Value::Object,
    );
    Ok((called, schema, strict))
}

/// Tells a model whose template knows no tools of them: in the system message, and calls and their results in
/// the words that it is told to use.
pub(crate) fn tell(messages: &mut Vec<Value>, tools: &Tools) {
    for message in messages.iter_mut() {
        let Some(content) = text_of(&message["content"]) else {
            // What is not text is refused where the conversation is rendered.
            continue;
        };
        if message["role"] == "tool" {
            *message = json!({"role": "user", "content": format!("<tool_response>\n{content}\n</tool_response>")});
        } else if let Some(calls) = message["tool_calls"].as_array() {
            let mut text = content;
            for call in calls {
                let function = &call["function"];
                let arguments = function["arguments"].as_str().map(str::to_owned);
                let arguments = arguments.unwrap_or_else(|| function["arguments"].to_string());
                let name = &function["name"];
                text.push_str(&format!(
                    "\n<tool_call>\n{{\"name\": {name}, \"arguments\": {arguments}}}\n</tool_call>"
                ));
            }
            *message = json!({"role": "assistant", "content": text.trim_start()});
        }
    }
    if tools.is_empty() {
        return;
    }
    let list: Vec<String> = tools
        .given
        .iter()
        .map(|tool| tool["function"].to_string())
        .collect();
    let told = format!(
        "You can call these functions, described as JSON one a line:\n{}\nTo call one, answer with nothing but\n<tool_call>\n{{\"name\": the function's name, \"arguments\": its arguments as a JSON object}}\n</tool_call>",
        list.join("\n")
    );
    match messages
        .first_mut()
        .filter(|first| first["role"] == "system")
    {
        Some(system) => {
            let before = text_of(&system["content"]).unwrap_or_default();
            system["content"] = format!("{before}\n\n{told}").trim_start().into();
        }
        None => messages.insert(0, json!({"role": "system", "content": told})),
    }
}

/// Content as one text, be it written as one or in parts; none, if a part is something else.
fn text_of(content: &Value) -> Option<String> {
    match content {
        Value::Array(parts) => {
            let texts = parts
                .iter()
                .map(|part| part.as_str().or(part["text"].as_str()));
            Some(texts.collect::<Option<Vec<_>>>()?.join("\n"))
        }
        content => Some(content.as_str().unwrap_or_default().to_owned()),
    }
}
