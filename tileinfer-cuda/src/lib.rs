//! The NVIDIA GPU backend: kernels in Rust (cuTile), compiled ahead of time into a pack and started with
//! the driver alone. It knows shapes and numbers, never model names.
//!
//! Read [`kernels`] for what runs on the device, [`ops`] for how each kernel is launched and why with that
//! tile, [`driver`] for the little that is needed of CUDA, [`store`] for where machine code comes from, [`sampling`]
//! for what of sampling is done on the device.

mod backend;
pub mod ceiling;
pub mod compile;
pub mod driver;
pub mod kernels;
pub mod ops;
pub mod pack;
mod passes;
pub mod sampling;
pub mod sass;
pub mod store;

pub use backend::{
    CudaBackend, CudaGraph, CudaOptions, CudaPages, CudaRope, CudaStep, CudaTensor, CudaWeight,
    scratch_reserve,
};
