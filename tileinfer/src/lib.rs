//! Language-model inference: the same text every time, close to the hardware's limit.
//!
//! Modules are listed in the order in which one would read them.

pub mod backend;
pub mod chat;
pub mod config;
pub mod engine;
mod error;
pub mod eval;
pub mod generate;
pub mod kv;
pub mod model;
pub mod plan;
pub mod runner;
pub mod sampling;
pub mod session;
pub mod testing;
pub mod tokenizer;
pub mod weights;

pub use error::{Error, ErrorKind, Result};
