//! What `tileinfer tokenize` answers: text to ids, ids to text, conversations to prompts, each as one JSON object.
//! It knows neither the command line nor where requests come from.

use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use tileinfer::chat::{ChatRequest, ChatTemplate};
use tileinfer::tokenizer::Tokenizer;

/// What a directory has: a tokenizer, a template, or both. Each is an error only once it is needed.
pub(crate) struct Files {
    tokenizer: tileinfer::Result<Tokenizer>,
    has_tokenizer: bool,
    template: tileinfer::Result<ChatTemplate>,
}

/// What is asked of one line of `--jsonl`.
#[derive(Deserialize)]
struct TextRequest {
    text: String,
    #[serde(default)]
    special: bool,
}

#[derive(Deserialize)]
struct IdsRequest {
    ids: Vec<u32>,
    #[serde(default)]
    skip_special: bool,
}

impl Files {
    /// Reads what is there.
    pub(crate) fn open(dir: &Path) -> Self {
        Files {
            tokenizer: Tokenizer::from_dir(dir),
            has_tokenizer: dir.join("tokenizer.json").exists(),
            template: ChatTemplate::load(dir),
        }
    }

    fn tokenizer(&self) -> Result<&Tokenizer> {
        self.tokenizer
            .as_ref()
            .map_err(|error| anyhow::anyhow!("{error}"))
    }

    pub(crate) fn encode(&self, text: &str, special: bool) -> Result<Value> {
        Ok(json!({"ids": self.tokenizer()?.encode(text, special)?}))
    }

    pub(crate) fn decode(&self, ids: &[u32], skip_special: bool) -> Result<Value> {
        Ok(json!({"text": self.tokenizer()?.decode(ids, skip_special)}))
    }

    pub(crate) fn chat(&self, request: &ChatRequest) -> Result<Value> {
        let template = self
            .template
            .as_ref()
            .map_err(|error| anyhow::anyhow!("{error}"))?;
        let text = template.render(request)?;
        if !self.has_tokenizer {
            return Ok(json!({"text": text}));
        }
        let ids = self.tokenizer()?.encode(&text, false)?;
        Ok(json!({"text": text, "ids": ids}))
    }

    /// Answers one line of `--jsonl`.
    pub(crate) fn line(&self, line: &str) -> Result<Value> {
        let request: Value = serde_json::from_str(line).context("the line is not JSON")?;
        if request.get("messages").is_some() {
            self.chat(&serde_json::from_value(request)?)
        } else if request.get("ids").is_some() {
            let request: IdsRequest = serde_json::from_value(request)?;
            self.decode(&request.ids, request.skip_special)
        } else if request.get("text").is_some() {
            let request: TextRequest = serde_json::from_value(request)?;
            self.encode(&request.text, request.special)
        } else {
            bail!("the line has none of `text`, `ids` and `messages`")
        }
    }
}
