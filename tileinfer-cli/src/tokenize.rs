//! `tileinfer tokenize`: text to ids, ids to text, conversations to prompts.

use std::io::{BufRead, Write};
use std::path::Path;

use anyhow::{Context, Result, bail};
use serde::Deserialize;
use serde_json::{Value, json};
use tileinfer::chat::{ChatRequest, ChatTemplate};
use tileinfer::tokenizer::Tokenizer;

use crate::args::TokenizeArgs;
use crate::files;
use crate::models;
use crate::usage;

/// What a directory has: a tokenizer, a template, or both. Each is an error only once it is needed.
struct Files {
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
    fn open(dir: &Path) -> Self {
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

    fn encode(&self, text: &str, special: bool) -> Result<Value> {
        Ok(json!({"ids": self.tokenizer()?.encode(text, special)?}))
    }

    fn decode(&self, ids: &[u32], skip_special: bool) -> Result<Value> {
        Ok(json!({"text": self.tokenizer()?.decode(ids, skip_special)}))
    }

    fn chat(&self, request: &ChatRequest) -> Result<Value> {
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
    fn line(&self, line: &str) -> Result<Value> {
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

pub(crate) fn tokenize(args: &TokenizeArgs) -> Result<()> {
    let files = Files::open(&models::dir(&args.name.model, None, args.name.hub)?);
    if let Some(path) = &args.jsonl {
        return jsonl(&files, path);
    }
    let answer = if let Some(ids) = &args.decode {
        files.decode(ids, args.skip_special)?
    } else if let Some(path) = &args.chat {
        let text = files::read_text(path)?;
        let request: ChatRequest = serde_json::from_str(&text)
            .with_context(|| format!("{} is not a chat request", path.display()))?;
        files.chat(&request)?
    } else if let Some(path) = &args.file {
        files.encode(&files::read_text(path)?, args.special)?
    } else if let Some(text) = &args.text {
        files.encode(text, args.special)?
    } else {
        return Err(usage("give a TEXT, or --file, --decode, --chat or --jsonl"));
    };
    let mut out = std::io::stdout().lock();
    match (args.json, answer.get("text"), answer.get("ids")) {
        (false, Some(Value::String(text)), _) => writeln!(out, "{text}")?,
        (false, None, Some(ids)) => writeln!(out, "{ids}")?,
        _ => writeln!(out, "{answer}")?,
    }
    Ok(())
}

/// One answer a line, in order; a line that fails answers what is wrong with it.
fn jsonl(files: &Files, path: &Path) -> Result<()> {
    let reader: Box<dyn BufRead> = if path == Path::new("-") {
        Box::new(std::io::stdin().lock())
    } else {
        let file =
            std::fs::File::open(path).with_context(|| format!("reading {}", path.display()))?;
        Box::new(std::io::BufReader::new(file))
    };
    let mut out = std::io::BufWriter::new(std::io::stdout().lock());
    for line in reader.split(b'\n') {
        let line = line.with_context(|| format!("reading {}", path.display()))?;
        let line = String::from_utf8_lossy(&line);
        if line.trim().is_empty() {
            continue;
        }
        let answer = files
            .line(&line)
            .unwrap_or_else(|error| json!({"error": format!("{error:#}")}));
        writeln!(out, "{answer}")?;
    }
    out.flush()?;
    Ok(())
}
