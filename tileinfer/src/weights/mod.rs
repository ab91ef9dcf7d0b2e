//! Weights: from the files of a model, or from a random generator, to what a backend uploads or reads in place.
//!
//! The only module that maps files. From bytes to layers, in this order: `safetensors` parses headers, `checkpoint` maps
//! the files of a model, `tensor` holds matrices as lists of row parts and converts elements, `int8` says how they become integers, `host` finds each tensor
//! that a configuration asks for; `lost` names a file that lost pages while it was mapped. It decided not to know devices, and how weights are laid out for a kernel.

mod checkpoint;
mod host;
pub mod int8;
#[cfg(unix)]
mod lost;
mod safetensors;
mod tensor;

pub use checkpoint::{Checkpoint, MappedBytes, TensorView};
pub use host::{HostLayer, HostModel, Xielu};
#[cfg(unix)]
pub use lost::exit_on_lost_pages;
pub use safetensors::{Dtype, Header, TensorInfo};
pub use tensor::{ComputeType, Weight, WeightData, WeightPart};
