//! Log probabilities in the two shapes that OpenAI's API has for them.

use serde_json::{Map, Value, json};
use tileinfer::sampling::{Sampled, TokenLogprob};
use tileinfer::tokenizer::Tokenizer;

/// Stands for a probability of zero, which JSON has no logarithm of.
const LEAST: f32 = -9999.0;

/// One token of a chat completion.
pub(crate) fn of_chat(tokenizer: &Tokenizer, sampled: &Sampled) -> Value {
    let entry = |id: u32, logprob: f32| {
        let bytes = tokenizer.token_bytes(id).unwrap_or_default();
        let logprob = logprob.max(LEAST);
        let token = String::from_utf8_lossy(&bytes).into_owned();
        Map::from_iter([
            ("token".to_owned(), token.into()),
            ("logprob".to_owned(), json!(logprob)),
            ("bytes".to_owned(), bytes.into()),
        ])
    };
    let mut own = entry(sampled.token, logprob(sampled));
    let top = sampled
        .top
        .iter()
        .map(|top: &TokenLogprob| Value::Object(entry(top.id, top.logprob)));
    own.insert("top_logprobs".to_owned(), top.collect());
    Value::Object(own)
}

/// The tokens of a completion, whose text begins `offset` characters into the whole; how many characters they
/// are.
pub(crate) fn of_completion(
    tokenizer: &Tokenizer,
    tokens: &[Sampled],
    offset: usize,
) -> (Value, usize) {
    let text = |id: u32| {
        String::from_utf8_lossy(&tokenizer.token_bytes(id).unwrap_or_default()).into_owned()
    };
    let (mut names, mut own, mut tops, mut offsets) =
        (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    let mut length = 0;
    for sampled in tokens {
        let name = text(sampled.token);
        offsets.push(offset + length);
        length += name.chars().count();
        names.push(name);
        own.push(logprob(sampled).max(LEAST));
        let top: Map<String, Value> = sampled
            .top
            .iter()
            .map(|top| (text(top.id), json!(top.logprob.max(LEAST))))
            .collect();
        tops.push(top);
    }
    (
        json!({"tokens": names, "token_logprobs": own, "top_logprobs": tops, "text_offset": offsets}),
        length,
    )
}

fn logprob(sampled: &Sampled) -> f32 {
    sampled.logprob.map_or(LEAST, |own| own.logprob)
}
