//! What a token adds to a text, and text that grows token by token.
//!
//! The rules follow Hugging Face's decoders, restated so that each token is looked at once: a
//! byte-level vocabulary spells bytes as letters and the bytes of all tokens together are UTF-8; a
//! SentencePiece one spells blanks as `▁` and bytes it has no token for as `<0xE4>`.

use std::io;

use serde_json::Value;

use super::Tokenizer;

/// How the tokens of one vocabulary become text.
pub(super) struct Decoding {
    spelling: Spelling,
    /// What is removed from the start of the text: a character, at most so many times.
    strip: (char, usize),
}

enum Spelling {
    /// Every character stands for a byte, as in GPT-2's vocabulary.
    ByteLevel,
    /// Characters stand for themselves once `steps` are done.
    Text {
        steps: Vec<Step>,
        byte_fallback: bool,
        /// Stands between two tokens.
        separator: &'static str,
    },
}

enum Step {
    Replace {
        from: String,
        to: String,
    },
    /// Blanks spelled as `blank`; those of the first token vanish if encoding put one there.
    Metaspace {
        blank: char,
        drop_first: bool,
    },
}

/// What one token adds.
pub(super) enum Piece {
    /// Bytes that may begin or end inside a character only if the vocabulary is byte-level.
    Text(Vec<u8>),
    /// A byte that only together with its neighbours of the same kind is text.
    Byte([u8; 1]),
}

impl Piece {
    pub(super) fn bytes(&self) -> &[u8] {
        match self {
            Piece::Text(bytes) => bytes,
            Piece::Byte(byte) => byte,
        }
    }
}

impl Decoding {
    /// The rules of a decoder, or why it is not supported.
    pub(super) fn new(decoder: Option<&tokenizers::DecoderWrapper>) -> Result<Self, String> {
        let Some(decoder) = decoder else {
            return Ok(Self {
                spelling: Spelling::Text {
                    steps: Vec::new(),
                    byte_fallback: false,
                    separator: " ",
                },
                strip: (' ', 0),
            });
        };
        let decoder = serde_json::to_value(decoder).map_err(|error| error.to_string())?;
        let sequence = match decoder["decoders"].as_array() {
            Some(sequence) => sequence.as_slice(),
            None => std::slice::from_ref(&decoder),
        };
        Self::from_sequence(sequence)
    }

    fn from_sequence(sequence: &[Value]) -> Result<Self, String> {
        let mut steps = Vec::new();
        let mut byte_fallback = false;
        let mut fused = false;
        let mut strip = (' ', 0);
        for (position, decoder) in sequence.iter().enumerate() {
            let unsupported = || {
                format!(
                    "field decoder: {decoder} at position {position} is not supported; ByteLevel alone is, or Replace and Metaspace, then ByteFallback, Fuse and a Strip of the start"
                )
            };
            let kind = decoder["type"].as_str().unwrap_or_default();
            let before_bytes = !byte_fallback && !fused;
            match kind {
                "ByteLevel" if sequence.len() == 1 => {
                    return Ok(Self {
                        spelling: Spelling::ByteLevel,
                        strip,
                    });
                }
                "Replace" if before_bytes => steps.push(Step::Replace {
                    from: match decoder["pattern"]["String"].as_str() {
                        Some(from) if !from.is_empty() => from.to_owned(),
                        _ => return Err(unsupported()),
                    },
                    to: decoder["content"].as_str().unwrap_or_default().to_owned(),
                }),
                "Metaspace" if before_bytes => steps.push(Step::Metaspace {
                    blank: the_char(&decoder["replacement"]).ok_or_else(unsupported)?,
                    drop_first: decoder["prepend_scheme"] != "never",
                }),
                "ByteFallback" if !fused => byte_fallback = true,
                "Fuse" => fused = true,
                "Strip" if fused && strip.1 == 0 && decoder["stop"] == 0 => {
                    let content = the_char(&decoder["content"]).ok_or_else(unsupported)?;
                    strip = (content, decoder["start"].as_u64().unwrap_or(0) as usize);
                }
                _ => return Err(unsupported()),
            }
        }
        Ok(Self {
            spelling: Spelling::Text {
                steps,
                byte_fallback,
                separator: "",
            },
            strip,
        })
    }

    /// What `token` adds to a text that it may be the first token of.
    pub(super) fn piece(&self, token: String, is_first: bool) -> Piece {
        let (steps, byte_fallback, separator) = match &self.spelling {
            Spelling::ByteLevel => return Piece::Text(bytes_of_letters(token)),
            Spelling::Text {
                steps,
                byte_fallback,
                separator,
            } => (steps, *byte_fallback, *separator),
        };
        let token = steps.iter().fold(token, |token, step| match step {
            Step::Replace { from, to } => token.replace(from, to),
            Step::Metaspace { blank, drop_first } => {
                token.replace(*blank, if is_first && *drop_first { "" } else { " " })
            }
        });
        if byte_fallback && let Some(byte) = byte_of_name(&token) {
            return Piece::Byte([byte]);
        }
        if is_first || separator.is_empty() {
            return Piece::Text(token.into_bytes());
        }
        Piece::Text([separator, &token].concat().into_bytes())
    }

    /// Remove from a whole text what is removed from its start.
    pub(super) fn strip_start(&self, text: &mut Vec<u8>) {
        let (content, at_most) = self.strip;
        let mut buffer = [0; 4];
        let content = content.encode_utf8(&mut buffer).as_bytes();
        let stripped = (0..at_most)
            .take_while(|n| text[n * content.len()..].starts_with(content))
            .count();
        text.drain(..stripped * content.len());
    }
}

fn the_char(value: &Value) -> Option<char> {
    value.as_str()?.chars().next()
}

/// The byte that `<0xE4>` names.
fn byte_of_name(token: &str) -> Option<u8> {
    let digits = token.strip_prefix("<0x")?.strip_suffix('>')?;
    (digits.len() == 2)
        .then(|| u8::from_str_radix(digits, 16).ok())
        .flatten()
}

/// The bytes that a byte-level token spells; a token with other letters stands for itself.
fn bytes_of_letters(token: String) -> Vec<u8> {
    let byte = |letter| usize::try_from(u32::from(letter)).map(|at| *BYTE_OF_LETTER.get(at)?);
    let bytes: Option<Vec<u8>> = token
        .chars()
        .map(|letter| byte(letter).ok().flatten())
        .collect();
    bytes.unwrap_or_else(|| token.into_bytes())
}

/// GPT-2's alphabet: printable Latin-1 characters stand for their own code, the other bytes in
/// order have the characters from U+0100 on.
const BYTE_OF_LETTER: [Option<u8>; 256 + 68] = {
    let mut table = [None; 256 + 68];
    let mut spare = 256;
    let mut byte = 0;
    while byte < 256 {
        let printable = matches!(byte, 0x21..=0x7e | 0xa1..=0xac | 0xae..=0xff);
        if printable {
            table[byte] = Some(byte as u8);
        } else {
            table[spare] = Some(byte as u8);
            spare += 1;
        }
        byte += 1;
    }
    table
};

/// Text that grows token by token. The pieces put together are what [`Tokenizer::decode`] makes of
/// all the ids, whatever they are.
///
/// A piece never ends inside a character. A SentencePiece vocabulary's byte tokens are text only if
/// their whole run is, so a run is held back until another token or [`DecodeStream::finish`] ends it.
/// Each token costs the work of its own bytes.
pub struct DecodeStream {
    tokenizer: Tokenizer,
    skip_special: bool,
    is_first: bool,
    /// Bytes that are not text yet: part of a character, or a run of byte tokens.
    held: Vec<u8>,
    /// How often the character that is removed from the start may still be.
    strip: usize,
}

impl DecodeStream {
    pub(super) fn new(tokenizer: Tokenizer, skip_special: bool) -> Self {
        Self {
            strip: tokenizer.0.decoding.strip.1,
            tokenizer,
            skip_special,
            is_first: true,
            held: Vec::new(),
        }
    }

    /// Add a token; the text that became certain, possibly none.
    pub fn push(&mut self, id: u32) -> String {
        let Some(piece) = self.tokenizer.piece(id, self.skip_special, self.is_first) else {
            return String::new();
        };
        self.is_first = false;
        let text = match (piece, &self.tokenizer.0.decoding.spelling) {
            (Piece::Byte([byte]), _) => {
                self.held.push(byte);
                return String::new();
            }
            (Piece::Text(bytes), Spelling::ByteLevel) => {
                self.held.extend_from_slice(&bytes);
                self.take_characters()
            }
            (Piece::Text(bytes), Spelling::Text { .. }) => {
                self.take_run() + &String::from_utf8_lossy(&bytes)
            }
        };
        self.stripped(text)
    }

    /// The rest of the text: what is held back is not going to be completed.
    pub fn finish(&mut self) -> String {
        let text = match self.tokenizer.0.decoding.spelling {
            Spelling::ByteLevel => {
                String::from_utf8_lossy(&std::mem::take(&mut self.held)).into_owned()
            }
            Spelling::Text { .. } => self.take_run(),
        };
        self.stripped(text)
    }

    /// Take every byte out of `held` but those of a last character that may still be completed.
    fn take_characters(&mut self) -> String {
        let incomplete = self
            .held
            .utf8_chunks()
            .last()
            .map_or(0, |chunk| may_be_completed(chunk.invalid()));
        let rest = self.held.split_off(self.held.len() - incomplete);
        let taken = std::mem::replace(&mut self.held, rest);
        String::from_utf8_lossy(&taken).into_owned()
    }

    /// Take the run of byte tokens: text as a whole, or one U+FFFD for each of them.
    fn take_run(&mut self) -> String {
        String::from_utf8(std::mem::take(&mut self.held))
            .unwrap_or_else(|error| "\u{fffd}".repeat(error.as_bytes().len()))
    }

    fn stripped(&mut self, mut text: String) -> String {
        let content = self.tokenizer.0.decoding.strip.0;
        while self.strip > 0 && !text.is_empty() {
            if !text.starts_with(content) {
                self.strip = 0;
                break;
            }
            text.remove(0);
            self.strip -= 1;
        }
        text
    }
}

/// How many of the bytes at the end of a text, which are not a character, may become one.
fn may_be_completed(bytes: &[u8]) -> usize {
    match std::str::from_utf8(bytes) {
        Err(error) if error.error_len().is_none() => bytes.len(),
        _ => 0,
    }
}

/// Prints tokens to a writer as they arrive, never part of a character, flushing after each piece.
pub struct TextStream<W: io::Write> {
    stream: DecodeStream,
    writer: W,
}

impl<W: io::Write> TextStream<W> {
    /// Print to `writer` what `tokenizer` makes of the ids to come.
    pub fn new(tokenizer: &Tokenizer, skip_special: bool, writer: W) -> Self {
        Self {
            stream: tokenizer.decode_stream(skip_special),
            writer,
        }
    }

    /// Print what a token adds.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn push(&mut self, id: u32) -> io::Result<()> {
        let text = self.stream.push(id);
        self.print(&text)
    }

    /// Print what was held back and give the writer back.
    ///
    /// # Errors
    /// Those of the writer.
    pub fn finish(mut self) -> io::Result<W> {
        let text = self.stream.finish();
        self.print(&text)?;
        Ok(self.writer)
    }

    fn print(&mut self, text: &str) -> io::Result<()> {
        if text.is_empty() {
            return Ok(());
        }
        self.writer.write_all(text.as_bytes())?;
        self.writer.flush()
    }
}
