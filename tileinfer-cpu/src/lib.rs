//! The CPU backend of tileinfer: fast, and the same bits whatever the batch, the tile or the thread.
//!
//! Read in this order: `backend` (the ops), `linear`, `attention` and `elementwise` (the kernels), `simd` (the
//! vocabulary they are written in, once for all instruction sets), `pool` (threads). Each output element is
//! computed in an order that depends on shapes and absolute positions alone. What this crate decided not to
//! know: models.

mod attention;
mod backend;
mod cache;
pub mod ceiling;
mod elementwise;
mod linear;
mod math;
mod memory;
mod pool;
mod rounding;
mod shared;
mod simd;
mod vector;

pub use backend::{CpuBackend, CpuStep, CpuTensor, CpuWeight};
pub use cache::Pages;
pub use pool::Pool;
pub use rounding::Rounding;
pub use simd::Level;

pub(crate) use shared::SharedMut;
