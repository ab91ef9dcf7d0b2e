//! What is done with input from strangers, one function a target: each takes any bytes and panics if something
//! that must always be true is not. Errors are fine, panics, hangs and endless memory are not. The fuzzer calls
//! these functions, and so does an ordinary test, with the inputs that are kept in `fuzz/seeds`.

#[path = "../../tileinfer-cli/src/answers.rs"]
mod answers;

use std::path::{Path, PathBuf};
use std::sync::LazyLock;

use answers::Files;
use serde_json::{Map, Value, json};
use tileinfer::backend::ComputeType;
use tileinfer::chat::{ChatRequest, ChatTemplate};
use tileinfer::config::ModelConfig;
use tileinfer::hub::reply::{Reply, shards};
use tileinfer::plan::MemoryPlan;
use tileinfer::tokenizer::Tokenizer;
use tileinfer::weights::{Checkpoint, Header};
use tileinfer::{Error, ErrorKind};

/// What is done with an input.
pub type Body = fn(&[u8]);

/// The targets by name, each with the folder of its name in `fuzz/seeds`.
pub const TARGETS: [(&str, Body); 7] = [
    ("config", config),
    ("safetensors", safetensors),
    ("index", index),
    ("tokenizer", tokenizer),
    ("template", template),
    ("hub_reply", hub_reply),
    ("jsonl", jsonl),
];

/// A `config.json`: refused with a reason, or numbers that can be computed with.
pub fn config(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let config = match ModelConfig::from_json(text, "config.json") {
        Ok(config) => config,
        Err(error) => return is_refusal(&error),
    };
    let frequencies = config.rope.inv_freq(config.head_dim);
    assert_eq!(frequencies.len(), config.head_dim / 2);
    assert!(frequencies.iter().all(|f| f.is_finite()), "{frequencies:?}");
    assert!(config.rope.attention_factor().is_finite());
    let weights = config.weights_bytes(2);
    let plan = MemoryPlan::new(
        &config,
        weights,
        tileinfer::kv::KvElement::Compute(ComputeType::Bf16),
        4,
        512,
        1,
    );
    assert!(plan.max_context(weights) == 0);
    assert!(plan.kv_bytes_per_token == config.kv_bytes_per_token(2));
    // `show --json` prints it.
    serde_json::to_string(&config).unwrap();
}

/// A safetensors file: refused with a reason, or tensors that fill the file from the header to its end.
pub fn safetensors(bytes: &[u8]) {
    let path = Path::new("model.safetensors");
    // As long as it is, and as a hub would have it that sent only the beginning.
    for length in [bytes.len() as u64, u64::MAX] {
        let start = match Header::data_start(path, bytes, length) {
            Ok(start) if start <= bytes.len() => start,
            Ok(_) => continue,
            Err(error) => {
                is_refusal(&error);
                continue;
            }
        };
        match Header::parse(path, bytes, length) {
            Ok(header) => {
                let mut end = start;
                for tensor in &header.tensors {
                    assert_eq!(tensor.range.start, end, "{tensor:?}");
                    let elements: usize = tensor.shape.iter().product();
                    assert_eq!(tensor.range.len(), elements * tensor.dtype.size());
                    end = tensor.range.end;
                }
                assert_eq!(end as u64, length);
            }
            Err(error) => is_refusal(&error),
        }
    }
}

/// A `model.safetensors.index.json` beside two shards: refused with a reason, or tensors that can all be read.
pub fn index(bytes: &[u8]) {
    static DIR: LazyLock<tempfile::TempDir> = LazyLock::new(|| {
        let dir = tempfile::tempdir().unwrap();
        for name in ["a", "b"] {
            let header = format!(
                r#"{{"{name}.weight":{{"dtype":"BF16","shape":[2,2],"data_offsets":[0,8]}},"{name}.bias":{{"dtype":"F32","shape":[1],"data_offsets":[8,12]}}}}"#
            );
            let mut file = (header.len() as u64).to_le_bytes().to_vec();
            file.extend(header.as_bytes());
            file.extend([0; 12]);
            std::fs::write(dir.path().join(format!("{name}.safetensors")), file).unwrap();
        }
        dir
    });
    match shards(bytes) {
        Ok(names) => {
            assert!(!names.is_empty() && names.is_sorted());
            names.iter().for_each(|name| stays_inside(name));
        }
        Err(reason) => assert!(!reason.is_empty()),
    }
    let path = DIR.path().join("model.safetensors.index.json");
    std::fs::write(path, bytes).unwrap();
    match Checkpoint::open(DIR.path()) {
        Ok(checkpoint) => {
            for name in checkpoint.names() {
                let tensor = checkpoint.tensor(name).unwrap();
                assert!(tensor.data.iter().all(|&byte| byte == 0), "{name}");
            }
        }
        Err(error) => is_refusal(&error),
    }
}

/// A `tokenizer.json`: refused with a reason, or a tokenizer whose ids can be decoded, all at once and one by one.
pub fn tokenizer(bytes: &[u8]) {
    let tokenizer = match Tokenizer::from_bytes(Path::new("tokenizer.json"), bytes) {
        Ok(tokenizer) => tokenizer,
        Err(error) => return is_refusal(&error),
    };
    let mut ids = vec![0, 1, 2, 255, 65_535, u32::MAX];
    for text in ["", "Hello, wörld", "  你好\n<|im_end|></s> \u{1f600}"] {
        for special in [false, true] {
            match tokenizer.encode(text, special) {
                Ok(found) => ids.extend(found),
                Err(error) => is_refusal(&error),
            }
        }
    }
    for skip_special in [false, true] {
        let mut stream = tokenizer.decode_stream(skip_special);
        let mut text: String = ids.iter().map(|&id| stream.push(id)).collect();
        text += &stream.finish();
        assert_eq!(text, tokenizer.decode(&ids, skip_special));
        tokenizer.decode_bytes(&ids, skip_special);
    }
    assert!(tokenizer.vocab_size() <= 1 << 32);
    for &id in &ids {
        assert!(tokenizer.token(id).is_some() || tokenizer.token_bytes(id).is_none());
    }
}

/// A chat template and, after a zero byte, a conversation: refused with a reason, or a prompt that is not endless.
pub fn template(bytes: &[u8]) {
    let Ok(text) = std::str::from_utf8(bytes) else {
        return;
    };
    let (source, request) = text.split_once('\0').unwrap_or((text, ""));
    let tokens: Map<String, Value> = [("bos_token", "<s>"), ("eos_token", "</s>")]
        .map(|(name, token)| (name.to_owned(), token.into()))
        .into_iter()
        .collect();
    let template = match ChatTemplate::from_source(source, tokens) {
        Ok(template) => template,
        Err(error) => return is_refusal(&error),
    };
    let request = serde_json::from_str(request).unwrap_or_else(|_| ChatRequest {
        messages: vec![
            json!({"role": "user", "content": "Hi"}),
            json!({"role": "assistant", "content": " a\nb ", "tool_calls": []}),
        ],
        add_generation_prompt: true,
        ..ChatRequest::default()
    });
    for request in [Ok(request.clone()), template.accommodate(request)] {
        match request.and_then(|request| template.render(&request)) {
            Ok(prompt) => assert!(prompt.len() <= 16 << 20),
            Err(error) => is_refusal(&error),
        }
    }
}

/// A hub's reply, as a status line, headers and, after an empty line, a body: a refusal with a reason, or facts
/// that can name files.
pub fn hub_reply(bytes: &[u8]) {
    let text = String::from_utf8_lossy(bytes);
    let (head, body) = text.split_once("\n\n").unwrap_or((&text, ""));
    let mut lines = head.lines();
    let status = lines.next().and_then(|line| line.trim().parse().ok());
    let reply = Reply {
        status: status.unwrap_or(200),
        headers: lines
            .filter_map(|line| line.split_once(':'))
            .map(|(name, value)| (name.to_owned(), value.to_owned()))
            .collect(),
    };
    let endpoint = "https://huggingface.co";
    match reply.file(endpoint, "org/name", "main", "config.json") {
        Ok(facts) => {
            assert!(
                facts.commit.len() == 40 && facts.commit.bytes().all(|b| b.is_ascii_hexdigit())
            );
            stays_inside(&facts.etag);
            assert!(!facts.etag.contains('/') && !facts.etag.ends_with(".incomplete"));
            assert_eq!(reply.commit(), Some(facts.commit.as_str()));
        }
        Err(error) => is_refusal(&error),
    }
    // Whatever they are, asking for them is harmless.
    let _ = (reply.redirect(), reply.retry_after());
    if let (Some((_, total)), length) = (reply.content_range(), reply.total_length()) {
        assert_eq!(total, length);
    }
    if let Ok(names) = shards(body.as_bytes()) {
        names.iter().for_each(|name| stays_inside(name));
    }
}

/// A line of `tokenize --jsonl`: an error with a reason, or an object with ids, a text or both.
pub fn jsonl(bytes: &[u8]) {
    static FILES: LazyLock<Files> =
        LazyLock::new(|| Files::open(&repository().join("testdata/golden/models/qwen3")));
    match FILES.line(&String::from_utf8_lossy(bytes)) {
        Ok(answer) => assert!(
            answer.get("ids").or(answer.get("text")).is_some(),
            "{answer}"
        ),
        Err(error) => assert!(!format!("{error:#}").is_empty()),
    }
}

/// The checkout that this is compiled in.
fn repository() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Whatever a stranger's file holds, it is not our bug, and there is a reason.
fn is_refusal(error: &Error) {
    let reason = error.to_string();
    assert!(error.kind() != ErrorKind::Bug, "{reason}");
    assert!(!reason.is_empty());
}

/// A file name from a stranger leads nowhere else.
fn stays_inside(name: &str) {
    let plain = |part: &str| !part.is_empty() && !part.chars().all(|c| c == '.');
    assert!(name.split('/').all(plain), "{name:?}");
    assert!(!name.contains(['\\', ':', '\0']), "{name:?}");
}
