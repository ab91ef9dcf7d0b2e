//! Compiles chat templates and renders conversations, as transformers' `apply_chat_template` does.
//!
//! It does not know what any model's template looks like.

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock, PoisonError, Weak},
    time::Duration,
};

use jiff::{Zoned, civil::DateTime};
use minijinja::{Environment, ErrorKind, value::Serde};
use serde_json::{Map, Value};

use super::{
    ChatRequest,
    accommodate::Shapes,
    python::{self, MAX_OUTPUT, Refusal, is_blank},
    source::{Sources, special_tokens_of},
};
use crate::{Error, Result};

/// Stands after the text that `continue_final_message` continues, to find it in the prompt.
/// Whether its blank survives tells whether the template trims.
const CONTINUE_TAG: &str = "THE_TEXT_TO_CONTINUE_ENDS_HERE ";

/// Fuel bounds what the engine counts, and a prompt takes milliseconds. Some work it does not count: a list that
/// holds another twice, and so on forty times, is compared or joined to text item by item.
const PATIENCE: Duration = Duration::from_secs(10);

/// The names that clients give to a message's reasoning; templates read the first two.
const REASONING_FIELDS: [&str; 3] = ["reasoning_content", "thinking", "reasoning"];

/// A model's chat templates, ready to render. Clones share one copy.
#[derive(Clone)]
pub struct ChatTemplate(Arc<Inner>);

struct Inner {
    /// Named in errors.
    path: PathBuf,
    environment: Environment<'static>,
    /// By name. One that does not compile is an error only when it is asked for.
    templates: BTreeMap<String, Compiled>,
    special_tokens: Map<String, Value>,
    shapes: OnceLock<Shapes>,
    /// Lives as long as a rendering that nobody waits for any more.
    runs_away: Mutex<Weak<()>>,
}

struct Compiled {
    source: String,
    syntax_error: Option<String>,
}

impl std::fmt::Debug for ChatTemplate {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("ChatTemplate")
            .field("path", &self.0.path)
            .field("names", &self.0.templates.keys())
            .finish()
    }
}

impl ChatTemplate {
    /// Read the templates and special tokens of a model directory: `chat_template.jinja` and
    /// `additional_chat_templates/`, else the field of `tokenizer_config.json`, else
    /// `chat_template.json`. No other file is needed.
    ///
    /// # Errors
    /// The model is bad if it has no template or a file is damaged.
    pub fn load(dir: &Path) -> Result<Self> {
        let sources = Sources::read(dir)?;
        Ok(Self::new(
            sources.path,
            sources.templates,
            sources.special_tokens,
        ))
    }

    /// The template in `file`, with the special tokens of the model in `dir`.
    ///
    /// # Errors
    /// A file that cannot be read or does not compile.
    pub fn from_file(file: &Path, dir: &Path) -> Result<Self> {
        let source = std::fs::read_to_string(file).map_err(|error| Error::io(file, error))?;
        Self::from_source(&source, special_tokens_of(dir)?)
    }

    /// A template given as text, with the special tokens that it may name, such as `bos_token`.
    ///
    /// # Errors
    /// A template that does not compile is a usage error.
    pub fn from_source(source: &str, special_tokens: Map<String, Value>) -> Result<Self> {
        let templates = BTreeMap::from([("default".to_owned(), source.to_owned())]);
        let template = Self::new(PathBuf::from("chat template"), templates, special_tokens);
        match template.compiled("default")?.syntax_error.as_deref() {
            Some(error) => Err(Error::usage(format!(
                "the chat template has a mistake: {error}"
            ))),
            None => Ok(template),
        }
    }

    fn new(
        path: PathBuf,
        sources: BTreeMap<String, String>,
        special_tokens: Map<String, Value>,
    ) -> Self {
        let mut environment = python::environment();
        let templates = sources
            .into_iter()
            .map(|(name, source)| {
                let result =
                    python::add_template(&mut environment, &name, without_generation_tags(&source));
                let syntax_error = result.err();
                (
                    name,
                    Compiled {
                        source,
                        syntax_error,
                    },
                )
            })
            .collect();
        Self(Arc::new(Inner {
            path,
            environment,
            templates,
            special_tokens,
            shapes: OnceLock::new(),
            runs_away: Mutex::default(),
        }))
    }

    /// The prompt of a conversation: with several templates, that of `tool_use` if there are tools
    /// and it exists, else that of `default`.
    ///
    /// # Errors
    /// A conversation that the template refuses is a usage error; a template that is damaged or
    /// does not come to an end is a bad model.
    pub fn render(&self, request: &ChatRequest) -> Result<String> {
        let templates = &self.0.templates;
        let name = ["tool_use", "default"]
            .into_iter()
            .filter(|&name| name != "tool_use" || request.tools.is_some())
            .find(|&name| templates.contains_key(name))
            .ok_or_else(|| {
                Error::usage(format!(
                    "the model has several chat templates and none is the default; choose one of {:?}",
                    templates.keys().collect::<Vec<_>>()
                ))
            })?;
        self.render_named(name, request)
    }

    /// The prompt that the template called `name` makes of a conversation.
    ///
    /// # Errors
    /// As [`ChatTemplate::render`]; a name that does not exist is a usage error.
    pub fn render_named(&self, name: &str, request: &ChatRequest) -> Result<String> {
        let compiled = self.compiled(name)?;
        if let Some(error) = &compiled.syntax_error {
            let reason = format!("the chat template {name:?} has a mistake: {error}");
            return Err(Error::bad_model(&self.0.path, reason));
        }
        let mut messages = normalized(request)?;
        let continued = match &request.continue_final_message {
            None => None,
            Some(_) if request.add_generation_prompt => {
                return Err(Error::usage(
                    "continue_final_message and add_generation_prompt exclude each other: the prompt ends either inside the last message or with the opening of a new one",
                ));
            }
            Some(field) => Some(mark_end(&mut messages, field, &compiled.source)?),
        };
        let prompt = self.evaluate_in_time(name, messages, request)?;
        match continued {
            None => Ok(prompt),
            Some(text) => cut_at_mark(prompt, &text),
        }
    }

    /// Whether a template asks about `enable_thinking`, so that the model can be told to think or not.
    pub fn supports_thinking(&self) -> bool {
        self.mentions("enable_thinking")
    }

    /// Whether any template contains `word`.
    pub fn mentions(&self, word: &str) -> bool {
        let mut templates = self.0.templates.values();
        templates.any(|template| template.source.contains(word))
    }

    /// The names of the templates; a single one is called `default`.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.0.templates.keys().map(String::as_str)
    }

    /// The shapes of input that the templates read, found out once.
    pub(super) fn shapes(&self) -> &Shapes {
        self.0.shapes.get_or_init(|| Shapes::probe(self))
    }

    fn compiled(&self, name: &str) -> Result<&Compiled> {
        self.0.templates.get(name).ok_or_else(|| {
            Error::usage(format!(
                "the model has no chat template {name:?}; there are {:?}",
                self.0.templates.keys().collect::<Vec<_>>()
            ))
        })
    }

    /// Evaluates for as long as a template may take. A thread cannot be stopped: one that takes longer goes on, and
    /// until it ends the template is refused at once, so that there is never more than a few of them.
    fn evaluate_in_time(
        &self,
        name: &str,
        messages: Vec<Value>,
        request: &ChatRequest,
    ) -> Result<String> {
        let refuse = || {
            Error::bad_model(
                &self.0.path,
                format!(
                    "the chat template does not come to an end within {} s; choose another with --chat-template",
                    PATIENCE.as_secs()
                ),
            )
        };
        let runs_away = || {
            self.0
                .runs_away
                .lock()
                .unwrap_or_else(PoisonError::into_inner)
        };
        if runs_away().strong_count() > 0 {
            return Err(refuse());
        }
        let (template, name, request) = (self.clone(), name.to_owned(), request.clone());
        let running = Arc::new(());
        let sign_of_life = Arc::downgrade(&running);
        let work = move || {
            let prompt = template.evaluate(&name, &messages, &request);
            drop(running);
            prompt
        };
        python::within(PATIENCE, work)?.unwrap_or_else(|| {
            *runs_away() = sign_of_life;
            Err(refuse())
        })
    }

    fn evaluate(&self, name: &str, messages: &[Value], request: &ChatRequest) -> Result<String> {
        let now = request.now;
        let clock = minijinja::Value::from_function(move |format: &str| {
            python::strftime(now.unwrap_or_else(local_time), format)
        });
        let tools = request.tools.as_ref();
        let documents = request.documents.as_ref();
        let fixed = [
            ("messages", minijinja::Value::from(Serde(messages))),
            ("tools", minijinja::Value::from(Serde(tools))),
            ("documents", minijinja::Value::from(Serde(documents))),
            (
                "add_generation_prompt",
                request.add_generation_prompt.into(),
            ),
        ];
        // Later ones win: no variable can take the place of the conversation.
        let context = minijinja::Value::from_pairs(
            [("strftime_now", clock)]
                .into_iter()
                .chain(json_pairs(&self.0.special_tokens))
                .chain(json_pairs(&request.variables))
                .chain(fixed),
        );
        let mut output = Limited(Vec::new());
        let template = self.0.environment.get_template(name);
        template
            .and_then(|template| template.render_captured_to(context, &mut output).map(drop))
            .map_err(|error| self.explained(&error))?;
        String::from_utf8(output.0).map_err(|error| {
            Error::Bug(format!(
                "a chat template printed what is not UTF-8: {error}"
            ))
        })
    }

    /// Whose problem a template's error is.
    fn explained(&self, error: &minijinja::Error) -> Error {
        let mut cause: Option<&(dyn std::error::Error + 'static)> = Some(error);
        while let Some(inner) = cause {
            if let Some(Refusal(reason)) = inner.downcast_ref() {
                return Error::usage(format!(
                    "the chat template refuses this conversation: {reason}"
                ));
            }
            cause = inner.source();
        }
        match error.kind() {
            ErrorKind::OutOfFuel | ErrorKind::WriteFailure => Error::bad_model(
                &self.0.path,
                format!(
                    "the chat template asks for more work or text than a prompt can need: {error}"
                ),
            ),
            _ => Error::usage(format!(
                "the chat template cannot print this conversation: {error}"
            )),
        }
    }
}

/// The messages as templates see them: without fields that are null, reasoning under both names.
fn normalized(request: &ChatRequest) -> Result<Vec<Value>> {
    if request.messages.is_empty() {
        return Err(Error::usage("the conversation has no messages"));
    }
    for (what, list) in [("tool", &request.tools), ("document", &request.documents)] {
        let bad = list.iter().flatten().position(|entry| !entry.is_object());
        if let Some(position) = bad {
            return Err(Error::usage(format!("{what} {position} is not an object")));
        }
    }
    let messages = request.messages.iter().enumerate();
    messages
        .map(|(position, message)| {
            let Value::Object(message) = message else {
                return Err(Error::usage(format!("message {position} is not an object")));
            };
            let mut message = message.clone();
            message.retain(|_, value| !value.is_null());
            let reasoning = REASONING_FIELDS
                .iter()
                .find_map(|&field| message.get(field));
            if let Some(reasoning) = reasoning.cloned() {
                if !message.contains_key("thinking") {
                    message.shift_insert(0, "thinking".to_owned(), reasoning.clone());
                }
                message.insert("reasoning_content".to_owned(), reasoning);
            }
            Ok(Value::Object(message))
        })
        .collect()
}

/// Put the tag after the text that is to be continued; that text.
fn mark_end(messages: &mut [Value], field: &str, source: &str) -> Result<String> {
    let refuse = |reason: &str| {
        Error::usage(format!(
            "continue_final_message: field {field} of the last message {reason}"
        ))
    };
    let Some(Value::Object(last)) = messages.last_mut() else {
        return Err(refuse("is not there"));
    };
    let content = last.get(field).ok_or_else(|| refuse("is not there"))?;
    // Reasoning stands under several names, and the template reads one of them.
    let is_reasoning = REASONING_FIELDS.contains(&field);
    let fields: Vec<&str> = std::iter::once(field)
        .chain(
            REASONING_FIELDS
                .into_iter()
                .filter(|&name| is_reasoning && name != field && last.get(name) == Some(content)),
        )
        .collect();
    if !fields.iter().any(|&field| source.contains(field)) {
        return Err(refuse("is not read by the chat template"));
    }
    let mut text = None;
    for field in fields {
        let end = last.get_mut(field).and_then(end_of_text);
        let end = end.ok_or_else(|| refuse("has no text to continue"))?;
        text.get_or_insert_with(|| end.clone());
        end.push_str(CONTINUE_TAG);
    }
    text.ok_or_else(|| refuse("has no text to continue"))
}

/// The text that content ends with: itself, or that of its last part that has any.
fn end_of_text(content: &mut Value) -> Option<&mut String> {
    match content {
        Value::String(text) => Some(text),
        Value::Array(parts) => {
            let last = parts
                .iter_mut()
                .rev()
                .find_map(|part| part.get_mut("text"))?;
            match last {
                Value::String(text) => Some(text),
                _ => None,
            }
        }
        _ => None,
    }
}

/// End the prompt where the text to continue ends.
fn cut_at_mark(mut prompt: String, text: &str) -> Result<String> {
    let bare_tag = CONTINUE_TAG.trim_end();
    let end = prompt.rfind(bare_tag);
    let Some(end) = end.filter(|_| prompt.contains(text.trim_matches(is_blank))) else {
        return Err(Error::usage(
            "continue_final_message: the chat template does not print the last message as it is, so it cannot be continued",
        ));
    };
    let keeps_blanks = prompt[end..].starts_with(CONTINUE_TAG);
    prompt.truncate(end);
    if !keeps_blanks {
        prompt.truncate(prompt.trim_end_matches(is_blank).len());
    }
    Ok(prompt)
}

fn json_pairs(map: &Map<String, Value>) -> impl Iterator<Item = (&str, minijinja::Value)> {
    map.iter()
        .map(|(name, value)| (name.as_str(), minijinja::Value::from(Serde(value))))
}

fn local_time() -> DateTime {
    Zoned::now().datetime()
}

/// `{% generation %}` marks what training learns from and prints its body; a block that opens a
/// scope and does nothing else takes its place, with the same effect on blanks around it.
fn without_generation_tags(source: &str) -> String {
    let mut result = String::with_capacity(source.len());
    let mut rest = source;
    while let Some(start) = rest.find("{%") {
        let (before, tag) = rest.split_at(start + 2);
        result.push_str(before);
        rest = tag;
        let Some(end) = tag.find("%}") else { break };
        let word = tag[..end].trim_matches(|c: char| c.is_whitespace() || matches!(c, '-' | '+'));
        let block = match word {
            "generation" => "with",
            "endgeneration" => "endwith",
            _ => continue,
        };
        result.push_str(&tag[..end].replace(word, block));
        rest = &tag[end..];
    }
    result + rest
}

/// Collects output up to what a prompt can need.
struct Limited(Vec<u8>);

impl io::Write for Limited {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.0.len() + bytes.len() > MAX_OUTPUT {
            return Err(io::Error::other(format!("more than {MAX_OUTPUT} bytes")));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn generation_tags_become_scopes() {
        for (source, result) in [
            (
                "a{% generation %}b{% endgeneration %}c",
                "a{% with %}b{% endwith %}c",
            ),
            (
                "{%- generation -%}\n{%+endgeneration-%}",
                "{%- with -%}\n{%+endwith-%}",
            ),
            (
                "{% if generation %}{{ generation }}{% endif %}",
                "{% if generation %}{{ generation }}{% endif %}",
            ),
            ("{% generation", "{% generation"),
            ("", ""),
        ] {
            assert_eq!(without_generation_tags(source), result);
        }
    }
}
