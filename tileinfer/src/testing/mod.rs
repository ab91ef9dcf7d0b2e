//! What tests of several crates share: random numbers, comparisons, and the suite that every backend passes.

mod conformance;
mod dflash;
mod golden;
mod int8;
mod numbers;
mod same_text;

pub use conformance::{ATTENTION_HEADS, NORM_WIDTHS, RESIDUAL_LAYERS, RESIDUAL_ROWS, conformance};
pub use dflash::{DFLASH_DRAFTERS, golden_dflash, random_dflash};
pub use golden::{
    GOLDEN_MODELS, GoldenReport, golden_model, golden_models, golden_smollm2, greedy, load,
    load_quantized, span, tokens,
};
pub use int8::{golden_int8, int8_activations};
pub use numbers::{Numbers, assert_close, weight};
pub use same_text::{SAME_TEXT_MODELS, same_text, same_text_model, same_text_model_int8};
