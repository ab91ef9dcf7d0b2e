//! What tests of several crates share: random numbers, comparisons, and the suite that every backend passes.

mod conformance;
mod dflash;
mod golden;
mod numbers;
mod same_text;

pub use conformance::conformance;
pub use dflash::{DFLASH_DRAFTERS, golden_dflash};
pub use golden::{
    GOLDEN_MODELS, GoldenReport, golden_model, golden_models, golden_smollm2, greedy, load, span,
    tokens,
};
pub use numbers::{Numbers, assert_close, weight};
pub use same_text::{SAME_TEXT_MODELS, same_text, same_text_model};
