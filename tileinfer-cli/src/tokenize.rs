//! `tileinfer tokenize`: text to ids, ids to text, conversations to prompts.

use std::io::{BufRead, Write};
use std::path::Path;

use anyhow::{Context, Result};
use serde_json::{Value, json};
use tileinfer::chat::ChatRequest;

use crate::answers::Files;
use crate::args::TokenizeArgs;
use crate::files;
use crate::models;
use crate::usage;

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
