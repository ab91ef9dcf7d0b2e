//! A decoder on a backend: its weights there ([`DecoderLM`]), the buffers of a step ([`Workspace`]) and the
//! forward pass ([`forward`]), which is one page for all families. What differs between families is data:
//! see [`crate::config::ModelConfig`].

mod calibrate;
mod decoder;
mod dflash;
mod load;
mod workspace;

pub use calibrate::{CALIBRATION_TEXT, CALIBRATION_TOKENS, calibrate};
pub use decoder::forward;
pub(crate) use dflash::{DFlashBlock, Taken};
pub use dflash::{DFlashDrafter, load_dflash, load_dflash_between};
pub use load::{DecoderLM, Layer, Linear, LoadOptions, Quant};
pub use workspace::Workspace;
