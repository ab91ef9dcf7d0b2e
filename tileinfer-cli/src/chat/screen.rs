//! How answers are shown: reasoning dimmed or hidden, and nothing that could take over the terminal.

use std::io::{self, Write};

use tileinfer::chat::{AnswerPart, ReasoningMarks, ReasoningSplit};

use crate::voice::harmless;

const DIM: &str = "\x1b[2m";
const PLAIN: &str = "\x1b[0m";

/// What the terminal can do.
#[derive(Debug, Clone, Copy)]
pub(super) struct Screen {
    dims: bool,
}

impl Screen {
    /// Text is dimmed on a terminal, unless `NO_COLOR` is set or the terminal is dumb.
    pub(super) fn new(is_terminal: bool) -> Self {
        let is_set = |name: &str| std::env::var_os(name).is_some_and(|value| !value.is_empty());
        let is_dumb = std::env::var_os("TERM").is_some_and(|term| term == "dumb");
        Screen {
            dims: is_terminal && !is_set("NO_COLOR") && !is_dumb,
        }
    }

    /// An answer that is about to come; `inside` says that it starts in reasoning.
    pub(super) fn answer(
        &self,
        marks: Option<ReasoningMarks>,
        inside: bool,
        show_reasoning: bool,
    ) -> ShownAnswer<io::Stdout> {
        ShownAnswer {
            split: ReasoningSplit::new(marks, inside),
            page: Page {
                out: io::stdout(),
                dims: self.dims,
                show_reasoning,
                last: None,
                at_line_start: true,
                starts: true,
            },
        }
    }
}

/// An answer on its way to the screen.
pub(super) struct ShownAnswer<W: Write> {
    split: ReasoningSplit,
    page: Page<W>,
}

struct Page<W: Write> {
    out: W,
    dims: bool,
    show_reasoning: bool,
    last: Option<AnswerPart>,
    at_line_start: bool,
    /// Nothing of the current part is shown yet: blanks are left out.
    starts: bool,
}

impl<W: Write> ShownAnswer<W> {
    /// Shows the next piece.
    pub(super) fn push(&mut self, text: &str) -> io::Result<()> {
        let (page, mut result) = (&mut self.page, Ok(()));
        self.split.push(text, &mut |part, text| {
            if result.is_ok() {
                result = page.write(part, text);
            }
        });
        result?;
        self.page.out.flush()
    }

    /// Shows what was held back and ends the line.
    pub(super) fn finish(&mut self) -> io::Result<()> {
        let (page, mut result) = (&mut self.page, Ok(()));
        self.split.finish(&mut |part, text| {
            if result.is_ok() {
                result = page.write(part, text);
            }
        });
        result?;
        self.page.end_part()?;
        if !self.page.at_line_start {
            self.page.out.write_all(b"\n")?;
        }
        self.page.out.flush()
    }
}

impl<W: Write> Page<W> {
    fn write(&mut self, part: AnswerPart, text: &str) -> io::Result<()> {
        if self.last != Some(part) {
            self.end_part()?;
            if self.last.is_some() && !self.at_line_start {
                self.out.write_all(b"\n")?;
                self.at_line_start = true;
            }
            self.last = Some(part);
            self.starts = true;
            if part == AnswerPart::Reasoning {
                self.begin(DIM)?;
                if !self.show_reasoning {
                    self.out.write_all(b"(thinking)")?;
                    self.at_line_start = false;
                }
            }
        }
        if part == AnswerPart::Reasoning && !self.show_reasoning {
            return Ok(());
        }
        let text = if self.starts { text.trim_start() } else { text };
        if text.is_empty() {
            return Ok(());
        }
        self.starts = false;
        self.at_line_start = text.ends_with('\n');
        self.out.write_all(harmless(text).as_bytes())
    }

    fn begin(&mut self, style: &str) -> io::Result<()> {
        if self.dims {
            self.out.write_all(style.as_bytes())?;
        }
        Ok(())
    }

    fn end_part(&mut self) -> io::Result<()> {
        if self.last == Some(AnswerPart::Reasoning) {
            self.begin(PLAIN)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MARKS: ReasoningMarks = ReasoningMarks {
        open: "<think>",
        close: "</think>",
    };

    fn shown(pieces: &[&str], dims: bool, show_reasoning: bool) -> String {
        let mut answer = ShownAnswer {
            split: ReasoningSplit::new(Some(MARKS), false),
            page: Page {
                out: Vec::new(),
                dims,
                show_reasoning,
                last: None,
                at_line_start: true,
                starts: true,
            },
        };
        for piece in pieces {
            answer.push(piece).unwrap();
        }
        answer.finish().unwrap();
        String::from_utf8(answer.page.out).unwrap()
    }

    #[test]
    fn reasoning_is_dimmed_hidden_or_plain() {
        let pieces = ["<think>\nwhy", " so\n</th", "ink>\n\nbe", "cause"];
        assert_eq!(
            shown(&pieces, true, true),
            "\x1b[2mwhy so\n\x1b[0mbecause\n"
        );
        assert_eq!(shown(&pieces, false, true), "why so\nbecause\n");
        assert_eq!(
            shown(&pieces, true, false),
            "\x1b[2m(thinking)\x1b[0m\nbecause\n"
        );
        assert_eq!(shown(&pieces, false, false), "(thinking)\nbecause\n");
    }

    #[test]
    fn the_style_ends_with_an_answer_that_breaks_off() {
        assert_eq!(shown(&["<think>why"], true, true), "\x1b[2mwhy\x1b[0m\n");
        assert_eq!(shown(&[], true, true), "");
        assert_eq!(shown(&["plain"], true, true), "plain\n");
    }

    #[test]
    fn escape_sequences_do_no_harm() {
        assert_eq!(
            shown(&["a\x1b]0;title\x07b\tc\nd"], false, true),
            "a\u{fffd}]0;title\u{fffd}b\tc\nd\n"
        );
    }
}
