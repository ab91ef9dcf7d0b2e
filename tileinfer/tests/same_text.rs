//! The reference backend gives the same text, whatever runs beside it.

use std::path::Path;

use tileinfer::backend::ReferenceBackend;
use tileinfer::testing::{SAME_TEXT_MODELS, same_text_model, same_text_model_int8};

fn model(name: &str) {
    assert!(SAME_TEXT_MODELS.contains(&name));
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden");
    same_text_model(&ReferenceBackend::new, &golden, name);
}

// One test a model, so that they run side by side.

#[test]
fn qwen3() {
    model("qwen3");
}

#[test]
fn qwen3_windows() {
    model("qwen3-windows");
}

#[test]
fn mistral_window() {
    model("mistral-window");
}

#[test]
fn llama_3heads() {
    model("llama-3heads");
}

#[test]
fn apertus() {
    model("apertus");
}

#[test]
fn smollm3() {
    model("smollm3");
}

#[test]
fn int8() {
    // A window of ten lets pages go; the other norms queries and keys.
    for name in ["qwen3-windows", "qwen3"] {
        let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden");
        same_text_model_int8(&ReferenceBackend::new, &golden, name);
    }
}
