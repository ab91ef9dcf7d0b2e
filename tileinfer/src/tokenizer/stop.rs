//! Ends a text at the first stop string, without ever showing a part of one.
//!
//! It sees text only, so it does not know tokens; stop tokens are someone else's.

use crate::{Error, Result};

/// Watches text as it arrives for strings that end it.
///
/// The text ends where a stop string is first complete; of several that are complete there, the
/// longest counts. How the text was cut into pieces makes no difference.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<String>,
    /// The end of the text so far, which may be the start of a stop string.
    held: String,
    stopped: bool,
}

/// What [`StopStrings::push`] found.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopText {
    /// Text that may be shown.
    pub text: String,
    /// Whether a stop string ended the text.
    pub stopped: bool,
}

impl StopStrings {
    /// Stop at any of `stops`; with none, nothing is ever held back.
    ///
    /// # Errors
    /// An empty stop string would end every text before it begins, so it is refused.
    pub fn new(stops: Vec<String>) -> Result<Self> {
        if let Some(position) = stops.iter().position(String::is_empty) {
            return Err(Error::usage(format!(
                "stop string {position} is empty; leave it out"
            )));
        }
        Ok(Self {
            stops,
            held: String::new(),
            stopped: false,
        })
    }

    /// Add a piece of text. After a stop nothing more is shown.
    pub fn push(&mut self, piece: &str) -> StopText {
        if self.stopped {
            return self.shown(String::new());
        }
        let mut text = std::mem::take(&mut self.held) + piece;
        let first = self
            .stops
            .iter()
            .filter_map(|stop| text.find(stop).map(|start| (start + stop.len(), start)))
            .min();
        if let Some((_, start)) = first {
            self.stopped = true;
            text.truncate(start);
        } else {
            self.held = text.split_off(self.possible_start(&text));
        }
        self.shown(text)
    }

    /// The text that was held back, now that no more comes.
    pub fn finish(&mut self) -> String {
        std::mem::take(&mut self.held)
    }

    /// Where the longest end of `text` begins that is the start of a stop string.
    fn possible_start(&self, text: &str) -> usize {
        let longest = self.stops.iter().map(String::len).max().unwrap_or(0);
        let from = text.len().saturating_sub(longest.saturating_sub(1));
        (from..text.len())
            .filter(|&start| text.is_char_boundary(start))
            .find(|&start| {
                self.stops
                    .iter()
                    .any(|stop| stop.starts_with(&text[start..]))
            })
            .unwrap_or(text.len())
    }

    fn shown(&self, text: String) -> StopText {
        StopText {
            text,
            stopped: self.stopped,
        }
    }
}
