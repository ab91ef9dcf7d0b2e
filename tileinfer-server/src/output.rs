//! What a model's text means: reasoning, an answer, calls of tools. Each family writes these in its own way;
//! here they are read as the text grows. It knows text only: no tokens, no HTTP.

use tileinfer::chat::ChatTemplate;

use crate::calls::CallReader;

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
    /// A call of the tool of this name begins.
    Call(String),
    /// Of the arguments of the call that began last, as JSON text.
    Arguments(String),
}

/// Reads a text as it grows.
#[derive(Debug)]
pub(crate) struct OutputParser {
    style: Style,
    tools: bool,
    at: At,
    held: String,
    /// While between the marks of calls.
    reader: Option<CallReader>,
    calls: usize,
    most_calls: usize,
    /// Whether the call that began last is one too many.
    drops: bool,
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
    /// Between the marks of calls.
    Calls,
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
            reader: None,
            calls: 0,
            most_calls,
            drops: false,
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
            At::Calls => self.end_calls(false, &mut pieces),
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
                    // A call is the whole answer, with the mark or without.
                    if let Some(rest) = text.strip_prefix(PYTHON_TAG) {
                        self.held = rest.to_owned();
                        return self.begin_calls(PYTHON_TAG);
                    }
                    if text.starts_with(['{', '[']) {
                        return self.begin_calls("");
                    }
                    if PYTHON_TAG.starts_with(text) {
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
                let open = self.style.tools.marks().open;
                let (text, opened) = self.until(open);
                show(pieces, &text, Piece::Content);
                opened && self.begin_calls(open)
            }
            At::Content => {
                show(pieces, &std::mem::take(&mut self.held), Piece::Content);
                false
            }
            At::Calls => self.read_calls(pieces),
        }
    }

    fn begin_calls(&mut self, opened: &'static str) -> bool {
        self.reader = Some(CallReader::new(self.style.tools, opened));
        self.at = At::Calls;
        true
    }

    /// Reads on between the marks of calls; whether they have ended.
    fn read_calls(&mut self, pieces: &mut Vec<Piece>) -> bool {
        let Some(reader) = &mut self.reader else {
            return false;
        };
        let mut read = Vec::new();
        let rest = reader.push(&std::mem::take(&mut self.held), &mut read);
        for piece in read {
            if let Piece::Call(_) = piece {
                self.drops = self.calls == self.most_calls;
                self.calls += usize::from(!self.drops);
            }
            if !self.drops {
                pieces.push(piece);
            }
        }
        let Some(rest) = rest else {
            return false;
        };
        self.held = rest;
        self.end_calls(true, pieces);
        true
    }

    /// What is no call is text. Where no mark ends calls, all that follows is.
    fn end_calls(&mut self, closed: bool, pieces: &mut Vec<Piece>) {
        let Some(reader) = self.reader.take() else {
            return;
        };
        let goes_on = self.style.tools.marks().close.is_empty();
        self.at = if goes_on && !reader.has_called() {
            At::Content
        } else {
            At::BeforeContent
        };
        show(pieces, &reader.unread(closed), Piece::Content);
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
}

fn show(pieces: &mut Vec<Piece>, text: &str, piece: fn(String) -> Piece) {
    if !text.is_empty() {
        pieces.push(piece(text.to_owned()));
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

    fn content(text: &str) -> (String, String) {
        ("content".to_owned(), text.to_owned())
    }

    fn reasoning(text: &str) -> (String, String) {
        ("reasoning".to_owned(), text.to_owned())
    }

    fn call(name: &str, arguments: &str) -> (String, String) {
        (format!("call {name}"), arguments.to_owned())
    }

    /// Text, piece by piece, as it is read `size` characters at a time.
    fn cut(parser: &mut OutputParser, text: &str, size: usize) -> Vec<Piece> {
        let characters: Vec<char> = text.chars().collect();
        let mut all = Vec::new();
        for cut in characters.chunks(size) {
            all.extend(parser.push(&cut.iter().collect::<String>()));
        }
        all.extend(parser.finish());
        all
    }

    /// What `text` says, neighbours of one kind joined; the same however the text is cut.
    fn pieces(style: Style, tools: bool, in_reasoning: bool, text: &str) -> Vec<(String, String)> {
        let cut_into = |size: usize| {
            let mut parser = OutputParser::new(style, tools, in_reasoning, 9);
            let mut joined: Vec<(String, String)> = Vec::new();
            for piece in cut(&mut parser, text, size) {
                let (kind, text) = match piece {
                    Piece::Content(text) => ("content".to_owned(), text),
                    Piece::Reasoning(text) => ("reasoning".to_owned(), text),
                    Piece::Call(name) => {
                        joined.push((format!("call {name}"), String::new()));
                        continue;
                    }
                    Piece::Arguments(text) => {
                        let (kind, arguments) = joined.last_mut().expect("a call began");
                        assert!(kind.starts_with("call"), "{kind}");
                        arguments.push_str(&text);
                        continue;
                    }
                };
                match joined.last_mut().filter(|last| last.0 == kind) {
                    Some(last) => last.1.push_str(&text),
                    None => joined.push((kind, text)),
                }
            }
            joined
        };
        let whole = cut_into(usize::MAX);
        for size in [1, 2, 3, 7] {
            assert_eq!(cut_into(size), whole, "cut into {size}: {text}");
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
        let read = call("f", "{\"x\": \"</b>\", \"n\": 1.0}");
        assert_eq!(pieces(qwen, true, false, one), std::slice::from_ref(&read));
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
            std::slice::from_ref(&read),
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
        let read = call("get", "{\"city\": \"Bern\"}");
        assert_eq!(
            pieces(llama, true, false, text),
            std::slice::from_ref(&read)
        );
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
            [call("f", "{}"), call("g", "{\"a\": [1]}")]
        );
        let newer = "Sure. [TOOL_CALLS]f[ARGS]{\"a\": 1}[TOOL_CALLS]g{}";
        assert_eq!(
            pieces(mistral, true, false, newer),
            [content("Sure."), call("f", "{\"a\": 1}"), call("g", "{}")]
        );
        let apertus = Style {
            think: Some(INNER),
            tools: ToolStyle::Apertus,
            tools_untold: false,
        };
        let text = "<|inner_prefix|>hm<|inner_suffix|><|tools_prefix|>[{\"f\": {\"x\": 1}}]";
        assert_eq!(
            pieces(apertus, true, false, text),
            [reasoning("hm"), call("f", "{\"x\": 1}")]
        );
    }

    #[test]
    fn arguments_come_in_pieces() {
        let whole =
            "{\"city\": \"Z\u{fc}rich \\\"}\\\" </tool_call>\", \"days\": [1, {\"a\": {}}]}";
        let spoken = [
            (
                ToolStyle::Hermes,
                format!("<tool_call>\n{{\"name\": \"f\", \"arguments\": {whole}}}\n</tool_call>"),
            ),
            (
                ToolStyle::Llama,
                format!("{{\"name\": \"f\", \"parameters\": {whole}}}"),
            ),
            (
                ToolStyle::Mistral,
                format!(
                    "[TOOL_CALLS][{{\"name\": \"f\", \"arguments\": {whole}, \"id\": \"a{{b\"}}]"
                ),
            ),
            (
                ToolStyle::Mistral,
                format!("[TOOL_CALLS]f[CALL_ID]x[ARGS]{whole}"),
            ),
            (
                ToolStyle::Apertus,
                format!("<|tools_prefix|>[{{\"f\": {whole}}}]<|tools_suffix|>"),
            ),
        ];
        for (tools, text) in spoken {
            let style = style(false, tools);
            assert_eq!(pieces(style, true, false, &text), [call("f", whole)]);
            let mut parser = OutputParser::new(style, true, false, 9);
            let told = cut(&mut parser, &text, 1);
            assert!(told.len() > whole.chars().count(), "{told:?}");
            // The name is known before any argument, and each character is told as it comes.
            let start = text.find(whole).unwrap();
            let mut parser = OutputParser::new(style, true, false, 9);
            assert_eq!(
                parser.push(&text[..start + 1]),
                [
                    Piece::Call("f".to_owned()),
                    Piece::Arguments("{".to_owned())
                ]
            );
            assert_eq!(
                parser.push("\"city\": \"Z"),
                [Piece::Arguments("\"city\": \"Z".to_owned())]
            );
            // Cut off there, it is a call all the same: what was told stays true.
            assert_eq!(parser.finish(), []);
            assert_eq!(parser.calls(), 1);
        }
    }

    #[test]
    fn calls_that_are_not_quite_right() {
        let qwen = style(true, ToolStyle::Hermes);
        for (text, expected) in [
            // The last bracket forgotten, or one too many.
            (
                "<tool_call>\n{\"name\": \"f\", \"arguments\": {\"x\": 1}\n</tool_call>",
                vec![call("f", "{\"x\": 1}")],
            ),
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1}}}</tool_call>ok",
                vec![call("f", "{\"x\": 1}"), content("ok")],
            ),
            // Another order, arguments as text, none at all.
            (
                "<tool_call>{\"arguments\": {\"x\": 1}, \"name\": \"f\"}</tool_call>",
                vec![call("f", "{\"x\":1}")],
            ),
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"x\\\": 1}\"}</tool_call>",
                vec![call("f", "{\"x\": 1}")],
            ),
            (
                "<tool_call>{\"name\": \"f\"}</tool_call>",
                vec![call("f", "{}")],
            ),
            // Two in one section, and a mark that was never closed.
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": {}}\n{\"name\": \"g\", \"arguments\": {}}</tool_call>",
                vec![call("f", "{}"), call("g", "{}")],
            ),
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": {}}<tool_call>{\"name\": \"g\", \"arguments\": {}}</tool",
                vec![call("f", "{}"), call("g", "{}")],
            ),
            // Arguments that are no JSON end where they cannot go on.
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": {\"x\": 1\n</tool_call> So.",
                vec![call("f", "{\"x\": 1\n"), content("So.")],
            ),
            // Cut off before the name is sure.
            (
                "<tool_call>{\"name\": \"f\", \"argu",
                vec![content("<tool_call>{\"name\": \"f\", \"argu")],
            ),
            ("<tool_call>", vec![content("<tool_call>")]),
            (
                "<tool_call>no json</tool_call>",
                vec![content("<tool_call>no json</tool_call>")],
            ),
        ] {
            assert_eq!(pieces(qwen, true, false, text), expected, "{text}");
        }
        let llama = style(false, ToolStyle::Llama);
        assert_eq!(
            pieces(llama, true, false, "[1] and {\"name\": \"f\"}"),
            [content("[1] and {\"name\": \"f\"}")]
        );
        assert_eq!(
            pieces(
                llama,
                true,
                false,
                "{\"name\": \"f\", \"parameters\": {}} Done {x}"
            ),
            [call("f", "{}"), content("Done {x}")]
        );
        assert_eq!(
            pieces(llama, true, false, "<|python_tag|>print(1)"),
            [content("<|python_tag|>print(1)")]
        );
        let mistral = style(false, ToolStyle::Mistral);
        assert_eq!(
            pieces(mistral, true, false, "[TOOL_CALLS]nothing [TOO"),
            [content("[TOOL_CALLS]nothing [TOO")]
        );
    }
}
