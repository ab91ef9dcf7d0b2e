//! Where lines come from: an editor with a history that outlives the chat, if it can be written.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use rustyline::error::ReadlineError;
use rustyline::history::{FileHistory, History};
use rustyline::{Config, Editor};

use crate::voice::Voice;

/// Begins and ends a text of several lines.
const FENCE: &str = "\"\"\"";
/// Entries of the history that are kept.
const HISTORY: usize = 1000;

/// What the user did at the prompt.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Typed {
    /// A line, which may be a command.
    Line(String),
    /// A text between fences, which is a message whatever is in it.
    Text(String),
    /// Ctrl-C: what was typed is dropped.
    Nothing,
    /// Ctrl-D.
    End,
}

pub(super) struct Input {
    editor: Editor<(), FileHistory>,
    history: Option<PathBuf>,
    voice: Voice,
}

impl Input {
    /// Lines from the terminal, with the history in `history`, if there is to be one.
    pub(super) fn new(history: Option<PathBuf>, voice: Voice) -> Result<Self> {
        let config = Config::builder()
            .max_history_size(HISTORY)
            .and_then(|config| config.history_ignore_dups(true))
            .context("setting up the history")?
            .history_ignore_space(true)
            .auto_add_history(false)
            .build();
        let mut editor = Editor::with_config(config).context("opening the terminal")?;
        let mut history = history;
        if let Some(path) = &history
            && let Err(error) = open_history(&mut editor, path)
        {
            voice.note(&format!(
                "what you type is not kept: {}: {error} (--no-history)",
                path.display()
            ));
            history = None;
        }
        Ok(Input {
            editor,
            history,
            voice,
        })
    }

    /// The next thing that the user does.
    pub(super) fn read(&mut self) -> Result<Typed> {
        let first = match self.line(">>> ")? {
            Typed::Line(line) => line,
            other => return Ok(other),
        };
        let Some(begin) = first.trim_start().strip_prefix(FENCE) else {
            self.remember(&first);
            return Ok(Typed::Line(first));
        };
        let mut text = begin.to_owned();
        while !text.trim_end().ends_with(FENCE) {
            match self.line("... ")? {
                Typed::Line(line) => {
                    text.push('\n');
                    text.push_str(&line);
                }
                // The text has no end: what was typed is dropped.
                _ => return Ok(Typed::Nothing),
            }
        }
        self.remember(&format!("{FENCE}{text}"));
        let text = text.trim_end();
        let text = text[..text.len() - FENCE.len()].trim_matches('\n');
        Ok(if text.trim().is_empty() {
            Typed::Nothing
        } else {
            Typed::Text(text.to_owned())
        })
    }

    fn line(&mut self, prompt: &str) -> Result<Typed> {
        match self.editor.readline(prompt) {
            Ok(line) => Ok(Typed::Line(line)),
            Err(ReadlineError::Interrupted) => Ok(Typed::Nothing),
            Err(ReadlineError::Eof) => Ok(Typed::End),
            Err(error) => Err(error).context("reading from the terminal"),
        }
    }

    fn remember(&mut self, entry: &str) {
        if entry.trim().is_empty() {
            return;
        }
        let added = self.editor.add_history_entry(entry);
        let Some(path) = &self.history else {
            return;
        };
        if let Ok(true) = added
            && let Err(error) = self.editor.append_history(path)
        {
            let path = path.display();
            self.voice
                .note(&format!("what you type is no longer kept: {path}: {error}"));
            self.history = None;
        }
    }
}

/// Reads the history and makes sure that it can be written.
fn open_history(editor: &mut Editor<(), FileHistory>, path: &Path) -> rustyline::Result<()> {
    if let Some(folder) = path.parent() {
        std::fs::create_dir_all(folder)?;
    }
    if path.exists() {
        editor.load_history(path)?;
    }
    editor.history_mut().append(path)
}

/// Where the history lies: in the user's state folder.
pub(super) fn history_file(voice: &Voice) -> Option<PathBuf> {
    let folder = |name: &str| {
        let value = std::env::var_os(name).filter(|value| !value.is_empty())?;
        Some(PathBuf::from(value)).filter(|path| path.is_absolute())
    };
    let state = folder("XDG_STATE_HOME")
        .or_else(|| folder("LOCALAPPDATA"))
        .or_else(|| Some(folder("HOME")?.join(".local/state")));
    if state.is_none() {
        voice.note("what you type is not kept: there is no home directory (--no-history)");
    }
    Some(state?.join("tileinfer/history"))
}
