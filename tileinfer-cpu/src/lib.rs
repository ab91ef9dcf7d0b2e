//! The CPU backend of tileinfer: fast, and the same bits whatever the batch, the tile or the thread.
//!
//! Read in this order: `simd` (the instruction sets), `pool` (threads), `linear`, `attention`, `elementwise`.
//! Every kernel is written once over the vocabulary of `simd`; each output element is computed in an order
//! that depends on shapes alone. What this crate decided not to know: models.

pub mod ceiling;
pub mod linear;
pub mod pool;
mod rounding;
mod shared;
pub mod simd;
mod vector;

pub use pool::Pool;
pub use rounding::Rounding;
pub use simd::Level;

pub(crate) use shared::SharedMut;
