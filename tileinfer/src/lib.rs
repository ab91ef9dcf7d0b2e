//! Language-model inference: the same text every time, close to the hardware's limit.
//!
//! Modules are listed in the order in which one would read them.

mod error;
pub mod memory;
pub mod config;
pub mod hub;
pub mod weights;
pub mod plan;
pub mod tokenizer;
pub mod chat;
pub mod backend;
pub mod kv;
pub mod model;
pub mod runner;
pub mod sampling;
pub mod spec;
pub mod engine;
pub mod generate;
pub mod eval;
pub mod session;
pub mod testing;

pub use error::{Error, ErrorKind, Result};
