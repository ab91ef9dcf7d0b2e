//! Shapes of well-known models, for benchmarks with random weights. For a real model its own `config.json` counts.

use super::ModelConfig;

const SHAPES: [(&str, &str); 8] = [
    ("smollm2-135m", include_str!("builtin/smollm2-135m.json")),
    ("qwen3-0.6b", include_str!("builtin/qwen3-0.6b.json")),
    ("qwen3-4b", include_str!("builtin/qwen3-4b.json")),
    ("qwen3-8b", include_str!("builtin/qwen3-8b.json")),
    ("qwen3-32b", include_str!("builtin/qwen3-32b.json")),
    ("llama-3.1-8b", include_str!("builtin/llama-3.1-8b.json")),
    ("mistral-7b", include_str!("builtin/mistral-7b.json")),
    ("apertus-8b", include_str!("builtin/apertus-8b.json")),
];

impl ModelConfig {
    /// The shape of a well-known model by name, upper or lower case; `None` if it is not among
    /// [`builtin_names`](Self::builtin_names).
    pub fn builtin(name: &str) -> Option<Self> {
        let (name, text) = SHAPES
            .iter()
            .find(|(known, _)| known.eq_ignore_ascii_case(name))?;
        Some(Self::from_json(text, name).expect("the built-in shapes are valid"))
    }

    /// Names of the built-in shapes, from small to large.
    pub fn builtin_names() -> impl Iterator<Item = &'static str> {
        SHAPES.iter().map(|(name, _)| *name)
    }
}
