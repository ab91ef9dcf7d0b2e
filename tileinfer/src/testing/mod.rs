//! What tests of several crates share: random numbers, comparisons, and the suite that every backend passes.

mod conformance;
mod golden;
mod numbers;

pub use conformance::conformance;
pub use golden::{
    GOLDEN_MODELS, GoldenReport, golden_model, golden_models, golden_smollm2, greedy, load, span,
    tokens,
};
pub use numbers::{Numbers, assert_close, weight};
