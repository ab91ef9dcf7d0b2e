//! Conversations as files: one JSON object with the messages, which `tokenize --chat` reads too.

use std::path::Path;

use anyhow::{Context, Result};
use serde::{Deserialize, Serialize};
use tileinfer::chat::ChatMessage;

use crate::files;

#[derive(Serialize)]
struct Saved<'a> {
    model: &'a str,
    messages: &'a [ChatMessage],
}

/// What is read: a saved conversation, or the messages alone.
#[derive(Deserialize)]
#[serde(untagged)]
enum Loaded {
    Conversation { messages: Vec<ChatMessage> },
    Messages(Vec<ChatMessage>),
}

/// Writes the conversation with `model` to `path`.
pub(super) fn save(path: &Path, model: &str, messages: &[ChatMessage]) -> Result<()> {
    let mut text = serde_json::to_string_pretty(&Saved { model, messages })?;
    text.push('\n');
    files::write_whole(path, text.as_bytes())
}

/// The messages in `path`.
pub(super) fn load(path: &Path) -> Result<Vec<ChatMessage>> {
    let text = files::read_text(path)?;
    let loaded: Loaded = serde_json::from_str(&text).with_context(|| {
        format!(
            "{} is not a conversation: it has to be a JSON object with `messages`, each with `role` and `content`",
            path.display()
        )
    })?;
    Ok(match loaded {
        Loaded::Conversation { messages } | Loaded::Messages(messages) => messages,
    })
}
