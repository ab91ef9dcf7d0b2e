//! Where a model directory keeps its chat templates and special tokens.
//!
//! The order is transformers': files of their own go before the field of `tokenizer_config.json`.

use std::{
    collections::BTreeMap,
    fs,
    io::ErrorKind,
    path::{Path, PathBuf},
};

use serde_json::{Map, Value};

use crate::{Error, Result};

/// The special tokens that templates see by name.
const SPECIAL_TOKENS: [&str; 7] = [
    "bos_token",
    "eos_token",
    "unk_token",
    "sep_token",
    "pad_token",
    "cls_token",
    "mask_token",
];

/// What a model directory says about chat.
pub(super) struct Sources {
    /// Templates by name; a single one is called `default`.
    pub(super) templates: BTreeMap<String, String>,
    /// Where they were found.
    pub(super) path: PathBuf,
    /// Spelling of `bos_token` and the like.
    pub(super) special_tokens: Map<String, Value>,
}

impl Sources {
    pub(super) fn read(dir: &Path) -> Result<Self> {
        let config = read_json(&dir.join("tokenizer_config.json"))?;
        let special_tokens = special_tokens(dir, config.as_ref())?;
        let (templates, path) = templates(dir, config.as_ref())?;
        Ok(Self {
            templates,
            path,
            special_tokens,
        })
    }
}

/// The special tokens that `dir` names, for a template that comes from elsewhere.
pub(super) fn special_tokens_of(dir: &Path) -> Result<Map<String, Value>> {
    let config = read_json(&dir.join("tokenizer_config.json"))?;
    special_tokens(dir, config.as_ref())
}

fn templates(dir: &Path, config: Option<&Value>) -> Result<(BTreeMap<String, String>, PathBuf)> {
    let mut named = BTreeMap::new();
    let main = dir.join("chat_template.jinja");
    if let Some(source) = read_text(&main)? {
        named.insert("default".to_owned(), source);
    }
    for path in template_files(&dir.join("additional_chat_templates"))? {
        let name = path.file_stem().map(|name| name.to_string_lossy().into());
        if let (Some(name), Some(source)) = (name, read_text(&path)?) {
            named.insert(name, source);
        }
    }
    if !named.is_empty() {
        return Ok((named, main));
    }
    let path = dir.join("tokenizer_config.json");
    let named = field_templates(&path, config)?;
    if !named.is_empty() {
        return Ok((named, path));
    }
    let path = dir.join("chat_template.json");
    let named = field_templates(&path, read_json(&path)?.as_ref())?;
    if !named.is_empty() {
        return Ok((named, path));
    }
    Err(Error::bad_model(
        dir,
        "the model has no chat template, so it cannot chat; give it the prompt as it is with --raw",
    ))
}

/// The field `chat_template`: a template, a list of `{name, template}` or an object of them.
fn field_templates(path: &Path, object: Option<&Value>) -> Result<BTreeMap<String, String>> {
    let bad = || {
        Error::bad_model(
            path,
            "field chat_template is neither text nor a list of objects with name and template",
        )
    };
    let text = |value: &Value| value.as_str().map(str::to_owned).ok_or_else(bad);
    match object.map(|object| &object["chat_template"]) {
        None | Some(Value::Null) => Ok(BTreeMap::new()),
        Some(Value::String(source)) => Ok(BTreeMap::from([("default".to_owned(), source.clone())])),
        Some(Value::Array(list)) => list
            .iter()
            .map(|entry| Ok((text(&entry["name"])?, text(&entry["template"])?)))
            .collect(),
        Some(Value::Object(object)) => object
            .iter()
            .map(|(name, source)| Ok((name.clone(), text(source)?)))
            .collect(),
        Some(_) => Err(bad()),
    }
}

/// `tokens.json` stands in for a tokenizer; an old `special_tokens_map.json` counts only where
/// `tokenizer_config.json` does not list the added tokens itself.
fn special_tokens(dir: &Path, config: Option<&Value>) -> Result<Map<String, Value>> {
    let tokens = read_json(&dir.join("tokens.json"))?;
    let map = match config {
        Some(config) if !config["added_tokens_decoder"].is_null() => None,
        _ => read_json(&dir.join("special_tokens_map.json"))?,
    };
    let mut found = Map::new();
    for object in [tokens.as_ref(), config, map.as_ref()]
        .into_iter()
        .flatten()
    {
        for name in SPECIAL_TOKENS {
            let value = &object[name];
            let spelling = value.as_str().or_else(|| value["content"].as_str());
            if let Some(spelling) = spelling {
                found.insert(name.to_owned(), spelling.into());
            }
        }
    }
    Ok(found)
}

fn template_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        Err(error) if is_absent(&error) => return Ok(Vec::new()),
        Err(error) => return Err(Error::io(dir, error)),
    };
    let mut files = Vec::new();
    for entry in entries {
        let path = entry.map_err(|error| Error::io(dir, error))?.path();
        if path
            .extension()
            .is_some_and(|extension| extension == "jinja")
        {
            files.push(path);
        }
    }
    Ok(files)
}

fn read_json(path: &Path) -> Result<Option<Value>> {
    let Some(text) = read_text(path)? else {
        return Ok(None);
    };
    let value = serde_json::from_str(&text)
        .map_err(|error| Error::bad_model(path, format!("is not JSON ({error})")))?;
    Ok(Some(value))
}

/// A text file with the line ends that Python reads, `None` if there is no such file.
fn read_text(path: &Path) -> Result<Option<String>> {
    let bytes = match fs::read(path) {
        Ok(bytes) => bytes,
        Err(error) if is_absent(&error) => return Ok(None),
        Err(error) => return Err(Error::io(path, error)),
    };
    let text = String::from_utf8(bytes)
        .map_err(|error| Error::bad_model(path, format!("is not UTF-8 text ({error})")))?;
    Ok(Some(text.replace("\r\n", "\n").replace('\r', "\n")))
}

fn is_absent(error: &std::io::Error) -> bool {
    matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory)
}
