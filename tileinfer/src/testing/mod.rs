//! What tests of several crates share: random numbers, comparisons, and the suite that every backend passes.

mod conformance;
mod numbers;

pub use conformance::conformance;
pub use numbers::{Numbers, assert_close, weight};
