//! Calls of tools as they are being written: a name is told as soon as it is known, arguments piece by piece. It
//! knows how each family spells a call; not where in an answer calls stand, and not which tools there are.

use serde_json::{Map, Value};

use crate::output::{Piece, ToolStyle};

/// Reads a section of calls: what stands after an opening mark, up to the closing one if the style has one.
#[derive(Debug)]
pub(crate) struct CallReader {
    style: ToolStyle,
    /// The mark before the section, as it stood there.
    opened: &'static str,
    at: At,
    held: String,
    calls: usize,
}

#[derive(Debug, Clone, Copy)]
enum At {
    /// A call may begin.
    Between,
    /// In arguments; whether an object stands around them.
    Arguments(Brackets, bool),
    /// In what follows the arguments in that object.
    Rest,
    /// In something that is no call.
    Text,
}

/// What separates calls and says nothing else.
const SEPARATORS: [char; 7] = [' ', '\n', '\t', '\r', ',', ';', ']'];

impl CallReader {
    /// A reader for the section after `opened`, which is empty where a call needs no mark.
    pub(crate) fn new(style: ToolStyle, opened: &'static str) -> Self {
        CallReader {
            style,
            opened,
            at: At::Between,
            held: String::new(),
            calls: 0,
        }
    }

    /// Adds text and tells what it brings. At the end of the section, what stands after it.
    pub(crate) fn push(&mut self, text: &str, pieces: &mut Vec<Piece>) -> Option<String> {
        let close = self.style.marks().close;
        let closes = |text: &str| text.find(close).filter(|_| !close.is_empty());
        self.held.push_str(text);
        loop {
            match self.at {
                At::Between => {
                    let text = self.skip_separators()?;
                    if let Some(rest) = text.strip_prefix(close).filter(|_| !close.is_empty()) {
                        let rest = rest.to_owned();
                        self.held.clear();
                        return Some(rest);
                    }
                    let skipped = self.held.len() - text.len();
                    let (call, read) = match begin(self.style, text) {
                        Ok(found) => found,
                        Err(Stop::More) => return None,
                        Err(Stop::Not) if close.starts_with(text) => return None,
                        Err(Stop::Not) => {
                            self.at = At::Text;
                            continue;
                        }
                    };
                    self.held.drain(..skipped + read);
                    self.calls += 1;
                    match call {
                        Found::Beginning { name, wrapped } => {
                            pieces.push(Piece::Call(name));
                            self.at = At::Arguments(Brackets::default(), wrapped);
                        }
                        Found::Whole { name, arguments } => {
                            pieces.extend([Piece::Call(name), Piece::Arguments(arguments)]);
                        }
                    }
                }
                At::Arguments(mut brackets, wrapped) => {
                    let end = brackets.end(&self.held);
                    let arguments: String = match end {
                        Some(Closed::At(end) | Closed::Broken(end)) => {
                            self.held.drain(..end).collect()
                        }
                        None => std::mem::take(&mut self.held),
                    };
                    if !arguments.is_empty() {
                        pieces.push(Piece::Arguments(arguments));
                    }
                    self.at = match end {
                        None => {
                            self.at = At::Arguments(brackets, wrapped);
                            return None;
                        }
                        Some(Closed::At(_)) if wrapped => At::Rest,
                        Some(_) => At::Between,
                    };
                }
                At::Rest => {
                    let end = Brackets::inside().end(&self.held);
                    match (end, closes(&self.held)) {
                        (Some(Closed::At(end)), closed)
                            if closed.is_none_or(|closed| end <= closed) =>
                        {
                            self.held.drain(..end);
                            self.at = At::Between;
                        }
                        // Models forget the last bracket.
                        (_, Some(_)) => self.at = At::Text,
                        (Some(Closed::Broken(_)), None) if close.is_empty() => self.at = At::Text,
                        _ => return None,
                    }
                }
                At::Text => {
                    let start = match closes(&self.held) {
                        Some(start) => start,
                        None if close.is_empty() => self.held.len(),
                        None => return None,
                    };
                    let rest = self.held.split_off(start).split_off(close.len());
                    return Some(rest);
                }
            }
        }
    }

    /// Whether a call has been read.
    pub(crate) fn has_called(&self) -> bool {
        self.calls > 0
    }

    /// What could not be read as a call, as it stood there, once the section has ended; `closed` if by its mark.
    pub(crate) fn unread(self, closed: bool) -> String {
        let close = self.style.marks().close;
        if self.calls == 0 {
            let close = if closed { close } else { "" };
            return format!("{}{}{close}", self.opened, self.held);
        }
        let is_blank = |c: char| SEPARATORS.contains(&c) || "[}".contains(c);
        match self.at {
            // A call that was told, whatever became of its end.
            At::Arguments(..) | At::Rest => String::new(),
            _ if self.held.chars().all(is_blank) => String::new(),
            // The text ended within the mark.
            _ if close.starts_with(self.held.trim_start()) => String::new(),
            _ => self.held.trim_start().to_owned(),
        }
    }

    /// The held text from where a call may begin; none, if that is still to come.
    fn skip_separators(&self) -> Option<&str> {
        let open = self.style.marks().open;
        let mut text = self.held.as_str();
        loop {
            text = text.trim_start_matches(SEPARATORS);
            if let Some(rest) = text.strip_prefix(open) {
                text = rest;
            } else if open.starts_with(text) {
                return None;
            } else if let Some(rest) = text.strip_prefix('[') {
                text = rest;
            } else {
                return Some(text);
            }
        }
    }
}

/// The beginning of a call that can be told, or a whole one.
enum Found {
    Beginning { name: String, wrapped: bool },
    Whole { name: String, arguments: String },
}

/// Why there is no call yet.
enum Stop {
    /// The text is too short to say.
    More,
    /// It is none.
    Not,
}

/// The call that `text` begins with, and how many bytes of it have been read: to the first bracket of the
/// arguments where name and arguments come in the usual order, else to the end of the call.
fn begin(style: ToolStyle, text: &str) -> Result<(Found, usize), Stop> {
    if style == ToolStyle::Mistral && !text.starts_with('{') {
        // `name{…}`, `name[ARGS]{…}` or `name[CALL_ID]…[ARGS]{…}`.
        let start = text.find('{').ok_or(Stop::More)?;
        let name = text[..start].split('[').next().unwrap_or_default().trim();
        let name = Some(name.to_owned()).filter(|name| !name.is_empty());
        let found = name.map(|name| Found::Beginning {
            name,
            wrapped: false,
        });
        return found.map(|found| (found, start)).ok_or(Stop::Not);
    }
    match usual(style, text) {
        Err(Stop::Not) => whole(style, text),
        Err(Stop::More) => Err(Stop::More),
        Ok((name, read)) => Ok((
            Found::Beginning {
                name,
                wrapped: true,
            },
            read,
        )),
    }
}

/// An object that begins with the name, arguments after it.
fn usual(style: ToolStyle, text: &str) -> Result<(String, usize), Stop> {
    let mut cursor = Cursor(text);
    cursor.word("{")?;
    let name = if style == ToolStyle::Apertus {
        cursor.string()?
    } else {
        cursor.word("\"name\"")?;
        cursor.word(":")?;
        let name = cursor.string()?;
        cursor.word(",")?;
        match cursor.word("\"arguments\"") {
            Err(Stop::Not) => cursor.word("\"parameters\"")?,
            other => other?,
        }
        name
    };
    cursor.word(":")?;
    let before = cursor;
    cursor.word("{")?;
    let blanks = before.0.len() - before.0.trim_start().len();
    Ok((name, text.len() - before.0.len() + blanks))
}

/// A call in any order of its fields, once all of it is there.
fn whole(style: ToolStyle, text: &str) -> Result<(Found, usize), Stop> {
    if !text.starts_with('{') {
        return Err(Stop::Not);
    }
    let mut stream = serde_json::Deserializer::from_str(text).into_iter::<Map<String, Value>>();
    let object = match stream.next() {
        Some(Ok(object)) => object,
        Some(Err(error)) if error.is_eof() => return Err(Stop::More),
        _ => return Err(Stop::Not),
    };
    let (name, arguments) = named(style, object).ok_or(Stop::Not)?;
    // Some models write the arguments as a text that holds JSON.
    let arguments = match arguments {
        Value::String(text) => text,
        other => other.to_string(),
    };
    Ok((Found::Whole { name, arguments }, stream.byte_offset()))
}

fn named(style: ToolStyle, mut object: Map<String, Value>) -> Option<(String, Value)> {
    if style == ToolStyle::Apertus && object.len() == 1 {
        return object.into_iter().next();
    }
    let mut keys = ["arguments", "parameters"].into_iter();
    let arguments = keys.find_map(|key| object.remove(key));
    let Some(Value::String(name)) = object.remove("name") else {
        return None;
    };
    // A tool without arguments may be called without them.
    Some((name, arguments.unwrap_or_else(|| Value::Object(Map::new()))))
}

/// What is left of a text that is read word by word, blanks before each left out.
#[derive(Clone, Copy)]
struct Cursor<'a>(&'a str);

impl Cursor<'_> {
    fn word(&mut self, word: &str) -> Result<(), Stop> {
        let text = self.0.trim_start();
        match text.strip_prefix(word) {
            Some(rest) => self.0 = rest,
            None if word.starts_with(text) => return Err(Stop::More),
            None => return Err(Stop::Not),
        }
        Ok(())
    }

    /// A JSON string.
    fn string(&mut self) -> Result<String, Stop> {
        let text = self.0.trim_start();
        let mut stream = serde_json::Deserializer::from_str(text).into_iter::<String>();
        match stream.next() {
            None => Err(Stop::More),
            Some(Err(error)) if error.is_eof() => Err(Stop::More),
            Some(Err(_)) => Err(Stop::Not),
            Some(Ok(string)) => {
                self.0 = &text[stream.byte_offset()..];
                Ok(string)
            }
        }
    }
}

/// Counts brackets outside of strings, piece by piece.
#[derive(Debug, Clone, Copy, Default)]
struct Brackets {
    depth: usize,
    in_string: bool,
    escaped: bool,
}

/// Where a value ends.
enum Closed {
    /// With its last bracket, which stands before this byte.
    At(usize),
    /// Before this byte, which cannot be part of one.
    Broken(usize),
}

impl Brackets {
    /// Inside of an object.
    fn inside() -> Self {
        Brackets {
            depth: 1,
            ..Brackets::default()
        }
    }

    /// The end of the value in the next piece of text, if it is there.
    fn end(&mut self, text: &str) -> Option<Closed> {
        for (i, byte) in text.bytes().enumerate() {
            if self.in_string {
                self.in_string = byte != b'"' || self.escaped;
                self.escaped = byte == b'\\' && !self.escaped;
                continue;
            }
            match byte {
                b'"' => self.in_string = true,
                b'{' | b'[' => self.depth += 1,
                b'}' | b']' => {
                    self.depth = self.depth.saturating_sub(1);
                    if self.depth == 0 {
                        return Some(Closed::At(i + 1));
                    }
                }
                b',' | b':' | b'+' | b'-' | b'.' => {}
                _ if byte.is_ascii_alphanumeric() || byte.is_ascii_whitespace() => {}
                _ => return Some(Closed::Broken(i)),
            }
        }
        None
    }
}
