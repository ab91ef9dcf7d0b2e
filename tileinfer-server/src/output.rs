//! What a model's text means: reasoning, an answer, calls of tools. Each family writes these in its own way;
//! here they are read as the text grows. It knows text only: no tokens, no HTTP.

use serde_json::{Map, Value};
use tileinfer::chat::ChatTemplate;

/// How a model writes what is not plain text, as its chat template shows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Style {
    /// What stands around reasoning.
    pub(crate) think: Option<Marks>,
    /// How calls are written.
    pub(crate) tools: ToolStyle,
    /// Whether the template says nothing of tools, so that they have to be told in the system message.
    pub(crate) tools_untold: bool,
}

/// What stands before and after something.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Marks {
    pub(crate) open: &'static str,
    pub(crate) close: &'static str,
}

/// How calls of tools are written.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum ToolStyle {
    /// `<tool_call>{"name": …, "arguments": …}</tool_call>`, once for each call: Qwen, Hermes and many more.
    Hermes,
    /// The whole answer is `{"name": …, "parameters": …}`, perhaps after `<|python_tag|>`: Llama 3.1.
    Llama,
    /// `[TOOL_CALLS]` and a list of `{"name": …, "arguments": …}` to the end, or `name[ARGS]{…}`.
    Mistral,
    /// `<|tools_prefix|>` and a list of `{"name": arguments}`: Apertus.
    Apertus,
}

const THINK: Marks = Marks {
    open: "<think>",
    close: "</think>",
};
const INNER: Marks = Marks {
    open: "<|inner_prefix|>",
    close: "<|inner_suffix|>",
};
const PYTHON_TAG: &str = "<|python_tag|>";

impl Style {
    /// The style that a template shows.
    pub(crate) fn of(template: Option<&ChatTemplate>) -> Self {
        let mentions = |word| template.is_some_and(|template| template.mentions(word));
        let think = [THINK, INNER]
            .into_iter()
            .find(|marks| mentions(marks.close));
        let told = if mentions("[TOOL_CALLS]") {
            Some(ToolStyle::Mistral)
        } else if mentions("<|tools_prefix|>") {
            Some(ToolStyle::Apertus)
        } else if mentions("<tool_call>") {
            Some(ToolStyle::Hermes)
        } else if mentions(PYTHON_TAG) || mentions("ipython") {
            Some(ToolStyle::Llama)
        } else {
            None
        };
        Style {
            think,
            tools: told.unwrap_or(ToolStyle::Hermes),
            tools_untold: told.is_none(),
        }
    }

    /// Whether the marks are special tokens, which a plain text leaves out.
    pub(crate) fn needs_special_tokens(&self, tools: bool) -> bool {
        self.think == Some(INNER) || (tools && self.tools != ToolStyle::Hermes)
    }
}

impl ToolStyle {
    /// What stands around a call, or around all of them.
    pub(crate) fn marks(self) -> Marks {
        match self {
            ToolStyle::Hermes => Marks {
                open: "<tool_call>",
                close: "</tool_call>",
            },
            ToolStyle::Llama => Marks {
                open: PYTHON_TAG,
                close: "",
            },
            ToolStyle::Mistral => Marks {
                open: "[TOOL_CALLS]",
                close: "",
            },
            ToolStyle::Apertus => Marks {
                open: "<|tools_prefix|>",
                close: "<|tools_suffix|>",
            },
        }
    }
}

/// A piece of an answer, once it is clear what it is.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Piece {
    /// Of the reasoning.
    Reasoning(String),
    /// Of the answer.
    Content(String),
    /// A whole call.
    Call(Call),
}

/// A call of a tool.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Call {
    /// Of which.
    pub(crate) name: String,
    /// The arguments, as JSON text.
    pub(crate) arguments: String,
}

/// Reads a text as it grows.
#[derive(Debug)]
pub(crate) struct OutputParser {
    style: Style,
    tools: bool,
    at: At,
    held: String,
    calls: usize,
    most_calls: usize,
}

/// Where in the answer the held text begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum At {
    /// Reasoning may begin.
    Start,
    /// In reasoning; whether some of it has been shown.
    Reasoning(bool),
    /// The answer may begin: blanks before it are nothing.
    BeforeContent,
    /// In the answer.
    Content,
    /// Inside the marks of a call.
    Call,
}

impl OutputParser {
    /// A parser for the text after a prompt; `in_reasoning` if the prompt has opened it already. Calls are
    /// read if there are `tools`, at most `most_calls` of them.
    pub(crate) fn new(style: Style, tools: bool, in_reasoning: bool, most_calls: usize) -> Self {
        let at = match style.think {
            Some(_) if in_reasoning => At::Reasoning(false),
            Some(_) => At::Start,
            None if tools => At::BeforeContent,
            None => At::Content,
        };
        OutputParser {
            style,
            tools,
            at,
            held: String::new(),
            calls: 0,
            most_calls,
        }
    }

    /// Calls read so far.
    pub(crate) fn calls(&self) -> usize {
        self.calls
    }

    /// Adds text; what has become clear.
    pub(crate) fn push(&mut self, text: &str) -> Vec<Piece> {
        self.held.push_str(text);
        let mut pieces = Vec::new();
        while self.advance(&mut pieces) {}
        pieces
    }

    /// What is left at the end of the text.
    pub(crate) fn finish(&mut self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        let rest = std::mem::take(&mut self.held);
        match self.at {
            At::Reasoning(_) => show(&mut pieces, rest.trim_end_matches('\n'), Piece::Reasoning),
            At::Start | At::BeforeContent if self.tools && self.style.tools == ToolStyle::Llama => {
                self.calls_or_text(&rest, &rest, &mut pieces);
            }
            At::Call => {
                let open = self.style.tools.marks().open;
                self.calls_or_text(&rest, &format!("{open}{rest}"), &mut pieces);
            }
            // Blanks after reasoning or a call are nothing, as before an answer.
            At::BeforeContent
                if rest.trim().is_empty() && (self.style.think.is_some() || self.calls > 0) => {}
            _ => show(&mut pieces, &rest, Piece::Content),
        }
        pieces
    }

    /// One move; whether another may follow.
    fn advance(&mut self, pieces: &mut Vec<Piece>) -> bool {
        match self.at {
            At::Start => {
                let Some(Marks { open, .. }) = self.style.think else {
                    self.at = At::BeforeContent;
                    return true;
                };
                let text = self.held.trim_start();
                if let Some(rest) = text.strip_prefix(open) {
                    self.held = rest.to_owned();
                    self.at = At::Reasoning(false);
                    return true;
                }
                if open.starts_with(text) {
                    return false;
                }
                self.at = if self.tools {
                    At::BeforeContent
                } else {
                    At::Content
                };
                true
            }
            At::Reasoning(shown) => {
                let close = self.style.think.map_or("", |marks| marks.close);
                if !shown {
                    self.held = self.held.trim_start_matches('\n').to_owned();
                }
                let (text, closed) = self.until(close);
                show(pieces, &text, Piece::Reasoning);
                self.at = if closed {
                    At::BeforeContent
                } else {
                    At::Reasoning(shown || !text.is_empty())
                };
                closed
            }
            At::BeforeContent => {
                let text = self.held.trim_start();
                if text.is_empty() {
                    return false;
                }
                if self.tools && self.style.tools == ToolStyle::Llama {
                    // A call is the whole answer: what begins like one is held to the end.
                    if text.starts_with(['{', '[']) || PYTHON_TAG.starts_with(text) {
                        return false;
                    }
                    if let Some(rest) = text.strip_prefix(PYTHON_TAG) {
                        self.held = rest.to_owned();
                        self.at = At::Call;
                        return false;
                    }
                }
                if self.style.think.is_some() || self.calls > 0 {
                    self.held = text.to_owned();
                }
                self.at = At::Content;
                true
            }
            At::Content if self.tools && self.style.tools != ToolStyle::Llama => {
                let (text, opened) = self.until(self.style.tools.marks().open);
                show(pieces, &text, Piece::Content);
                if opened {
                    self.at = At::Call;
                }
                opened
            }
            At::Content => {
                show(pieces, &std::mem::take(&mut self.held), Piece::Content);
                false
            }
            At::Call => {
                let Marks { open, close } = self.style.tools.marks();
                let Some(end) = self.held.find(close).filter(|_| !close.is_empty()) else {
                    return false;
                };
                let text = self.held[..end].to_owned();
                self.held.drain(..end + close.len());
                self.calls_or_text(&text, &format!("{open}{text}{close}"), pieces);
                self.at = At::BeforeContent;
                true
            }
        }
    }

    /// Takes what stands before `mark` out of the held text, and whether the mark was there, which goes too.
    /// What may be its beginning stays, and so do blanks before it, which belong to neither side.
    fn until(&mut self, mark: &str) -> (String, bool) {
        if let Some(start) = self.held.find(mark) {
            let text = self.held[..start].trim_end().to_owned();
            self.held.drain(..start + mark.len());
            return (text, true);
        }
        let possible = (0..self.held.len())
            .filter(|&start| self.held.is_char_boundary(start))
            .find(|&start| mark.starts_with(&self.held[start..]));
        let safe = self.held[..possible.unwrap_or(self.held.len())]
            .trim_end()
            .len();
        let rest = self.held.split_off(safe);
        (std::mem::replace(&mut self.held, rest), false)
    }

    /// The calls that `text` holds, or `raw` as it stands if it holds none.
    fn calls_or_text(&mut self, text: &str, raw: &str, pieces: &mut Vec<Piece>) {
        let Some(calls) = read_calls(self.style.tools, text) else {
            return show(pieces, raw, Piece::Content);
        };
        let room = self.most_calls - self.calls.min(self.most_calls);
        self.calls += calls.len().min(room);
        pieces.extend(calls.into_iter().take(room).map(Piece::Call));
    }
}

fn show(pieces: &mut Vec<Piece>, text: &str, piece: fn(String) -> Piece) {
    if !text.is_empty() {
        pieces.push(piece(text.to_owned()));
    }
}

/// The calls in the text between marks.
fn read_calls(style: ToolStyle, text: &str) -> Option<Vec<Call>> {
    let text = text.trim();
    if style == ToolStyle::Mistral && !text.starts_with(['[', '{']) {
        return text.split("[TOOL_CALLS]").map(named_call).collect();
    }
    let mut values = Vec::new();
    // Several objects one after the other are several calls, with or without a semicolon between them.
    let mut rest = text;
    while !rest.is_empty() {
        let mut stream = serde_json::Deserializer::from_str(rest).into_iter::<Value>();
        match stream.next()?.ok()? {
            Value::Array(list) => values.extend(list),
            other => values.push(other),
        }
        rest = rest[stream.byte_offset()..].trim_start_matches([';', ' ', '\n', '\t']);
    }
    let calls: Option<Vec<Call>> = values
        .into_iter()
        .map(|value| read_call(style, value))
        .collect();
    calls.filter(|calls| !calls.is_empty())
}

/// `name[ARGS]{…}`, or without the word.
fn named_call(text: &str) -> Option<Call> {
    let start = text.find('{')?;
    let name = text[..start].trim().trim_end_matches("[ARGS]").trim();
    let arguments: Map<String, Value> = serde_json::from_str(text[start..].trim()).ok()?;
    (!name.is_empty()).then(|| Call {
        name: name.to_owned(),
        arguments: Value::Object(arguments).to_string(),
    })
}

fn read_call(style: ToolStyle, value: Value) -> Option<Call> {
    let Value::Object(mut object) = value else {
        return None;
    };
    if style == ToolStyle::Apertus && object.len() == 1 {
        let (name, arguments) = object.into_iter().next()?;
        return Some(Call {
            name,
            arguments: as_text(arguments),
        });
    }
    let arguments = ["arguments", "parameters"]
        .into_iter()
        .find_map(|key| object.remove(key));
    let Some(Value::String(name)) = object.remove("name") else {
        return None;
    };
    // A tool without arguments may be called without them.
    let arguments = arguments.unwrap_or_else(|| Value::Object(Map::new()));
    Some(Call {
        name,
        arguments: as_text(arguments),
    })
}

fn as_text(arguments: Value) -> String {
    match arguments {
        Value::String(text) => text,
        other => other.to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn style(think: bool, tools: ToolStyle) -> Style {
        Style {
            think: think.then_some(THINK),
            tools,
            tools_untold: false,
        }
    }

    fn content(text: &str) -> Piece {
        Piece::Content(text.to_owned())
    }

    fn reasoning(text: &str) -> Piece {
        Piece::Reasoning(text.to_owned())
    }

    fn call(name: &str, arguments: &str) -> Piece {
        Piece::Call(Call {
            name: name.to_owned(),
            arguments: arguments.to_owned(),
        })
    }

    /// The pieces of `text`, neighbours of one kind joined; the same however the text is cut.
    fn pieces(style: Style, tools: bool, in_reasoning: bool, text: &str) -> Vec<Piece> {
        let cut_into = |size: usize| {
            let mut parser = OutputParser::new(style, tools, in_reasoning, 9);
            let characters: Vec<char> = text.chars().collect();
            let mut all = Vec::new();
            for cut in characters.chunks(size) {
                all.extend(parser.push(&cut.iter().collect::<String>()));
            }
            all.extend(parser.finish());
            let mut joined: Vec<Piece> = Vec::new();
            for piece in all {
                match (joined.last_mut(), piece) {
                    (Some(Piece::Content(before)), Piece::Content(text)) => before.push_str(&text),
                    (Some(Piece::Reasoning(before)), Piece::Reasoning(text)) => {
                        before.push_str(&text)
                    }
                    (_, piece) => joined.push(piece),
                }
            }
            joined
        };
        let whole = cut_into(usize::MAX);
        for size in [1, 2, 3, 7] {
            assert_eq!(cut_into(size), whole, "cut into {size}");
        }
        whole
    }

    #[test]
    fn reasoning_is_split_off() {
        let qwen = style(true, ToolStyle::Hermes);
        let text = "<think>\nLet me see.\n\nYes.\n</think>\n\nIt is <b>.";
        assert_eq!(
            pieces(qwen, false, false, text),
            [reasoning("Let me see.\n\nYes."), content("It is <b>.")]
        );
        assert_eq!(
            pieces(qwen, false, true, "Hm.\n</think>\n\nOk"),
            [reasoning("Hm."), content("Ok")]
        );
        assert_eq!(
            pieces(qwen, false, false, "Plain <think> text\n"),
            [content("Plain <think> text\n")]
        );
        assert_eq!(
            pieces(qwen, false, false, "<think>\nnever en"),
            [reasoning("never en")]
        );
        assert_eq!(pieces(qwen, false, false, "<thi"), [content("<thi")]);
        assert_eq!(pieces(qwen, false, false, "<think>\n\n</think>\n\n"), []);
        let plain = style(false, ToolStyle::Hermes);
        assert_eq!(
            pieces(plain, false, false, " <think>a</think> b"),
            [content(" <think>a</think> b")]
        );
    }

    #[test]
    fn calls_in_the_style_of_hermes() {
        let qwen = style(true, ToolStyle::Hermes);
        let one = "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": \"</b>\", \"n\": 1.0}}\n</tool_call>";
        let read = call("f", "{\"x\":\"</b>\",\"n\":1.0}");
        assert_eq!(pieces(qwen, true, false, one), [read.clone()]);
        let two = format!("<think>\nhm\n</think>\n\nI will.\n\n{one}\n{one}\nDone");
        assert_eq!(
            pieces(qwen, true, false, &two),
            [
                reasoning("hm"),
                content("I will."),
                read.clone(),
                read.clone(),
                content("Done")
            ]
        );
        assert_eq!(
            pieces(qwen, true, false, &one[..one.len() - 12]),
            [read.clone()],
            "the end may be missing"
        );
        assert_eq!(
            pieces(qwen, false, false, one),
            [content(one)],
            "without tools it is text"
        );
        let broken = "a <tool_call>\n{\"name\": 3}\n</tool_call> b";
        let shown = "a<tool_call>\n{\"name\": 3}\n</tool_call>b";
        assert_eq!(pieces(qwen, true, false, broken), [content(shown)]);
        assert_eq!(
            pieces(qwen, true, false, "1 < 2 <tool"),
            [content("1 < 2 <tool")]
        );
        let mut single = OutputParser::new(qwen, true, false, 1);
        assert_eq!(
            single
                .push(&two)
                .iter()
                .filter(|piece| matches!(piece, Piece::Call(_)))
                .count(),
            1
        );
    }

    #[test]
    fn calls_in_the_style_of_llama() {
        let llama = style(false, ToolStyle::Llama);
        let text = "{\"name\": \"get\", \"parameters\": {\"city\": \"Bern\"}}";
        let read = call("get", "{\"city\":\"Bern\"}");
        assert_eq!(pieces(llama, true, false, text), [read.clone()]);
        assert_eq!(
            pieces(llama, true, false, &format!("<|python_tag|>{text}; {text}")),
            [read.clone(), read]
        );
        assert_eq!(
            pieces(llama, true, false, "{\"a\": 1}"),
            [content("{\"a\": 1}")]
        );
        assert_eq!(
            pieces(llama, true, false, "It is {x}."),
            [content("It is {x}.")]
        );
    }

    #[test]
    fn calls_in_the_style_of_mistral_and_apertus() {
        let mistral = style(false, ToolStyle::Mistral);
        let text = "[TOOL_CALLS][{\"name\": \"f\", \"arguments\": {}}, {\"name\": \"g\", \"arguments\": {\"a\": [1]}}]";
        assert_eq!(
            pieces(mistral, true, false, text),
            [call("f", "{}"), call("g", "{\"a\":[1]}")]
        );
        let newer = "Sure. [TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g{}";
        assert_eq!(
            pieces(mistral, true, false, newer),
            [content("Sure."), call("f", "{\"a\":1}"), call("g", "{}")]
        );
        let apertus = Style {
            think: Some(INNER),
            tools: ToolStyle::Apertus,
            tools_untold: false,
        };
        let text = "<|inner_prefix|>hm<|inner_suffix|><|tools_prefix|>[{\"f\": {\"x\": 1}}]";
        assert_eq!(
            pieces(apertus, true, false, text),
            [reasoning("hm"), call("f", "{\"x\":1}")]
        );
    }
}
