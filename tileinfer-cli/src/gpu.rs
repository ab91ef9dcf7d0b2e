//! The GPU as the command line sees it, where CUDA is built in: which there are, whether one is usable, what it
//! has room for. Everything that runs on it is in `tileinfer-cuda`.

use std::path::PathBuf;
use std::sync::Arc;

use tileinfer::backend::ComputeType;
use tileinfer::config::ModelConfig;
use tileinfer::plan::budget;
use tileinfer::{Error, Result};
use tileinfer_cuda::CudaBackend;
use tileinfer_cuda::ceiling::{self, Ceilings};
use tileinfer_cuda::driver::{self, DeviceInfo};
use tileinfer_cuda::ops::Ops;
use tileinfer_cuda::store::{self, KernelOptions};

/// Rows of one step: enough to fill the tensor cores many times over.
pub(crate) const ROWS: usize = 2048;

/// An open GPU with kernels for it.
#[derive(Debug, Clone)]
pub(crate) struct Gpu {
    ops: Arc<Ops>,
    /// The part of its memory that is taken at most.
    pub(crate) utilization: f64,
}

impl Gpu {
    /// Opens a GPU; the error says why it is not usable.
    pub(crate) fn open(number: usize, utilization: f64) -> Result<Self> {
        let found = driver::devices()?;
        if let Some(info) = found.get(number) {
            pack(info)?;
        }
        let ops = Arc::new(Ops::open(number, &kernels())?);
        Ok(Gpu { ops, utilization })
    }

    /// What the driver calls it.
    pub(crate) fn name(&self) -> &str {
        &self.ops.device().info().name
    }

    /// Bytes of its memory that may still be taken: the driver and its recordings need some as well.
    pub(crate) fn available(&self) -> Result<u64> {
        let (free, total) = self.ops.device().memory()?;
        Ok(budget(free, total, self.utilization))
    }

    /// A backend on it.
    pub(crate) fn backend(&self, compute: ComputeType) -> CudaBackend {
        CudaBackend::with_ops(compute, self.ops.clone())
    }

    /// What it can do, measured.
    pub(crate) fn ceilings(&self) -> Result<Ceilings> {
        ceiling::measure(&self.ops)
    }
}

/// Bytes that running a model of `config` takes as it goes, besides what is allocated for it at first.
pub(crate) fn scratch(config: &ModelConfig, sequences: usize, longest: usize) -> u64 {
    // Steps of up to so many rows are recorded whatever the number of sequences.
    const RECORDED_ROWS: usize = 16;
    let rows = sequences.max(RECORDED_ROWS);
    tileinfer_cuda::scratch_reserve(rows, config.num_heads, config.head_dim, longest)
}

/// The GPUs that the driver shows.
pub(crate) fn devices() -> Result<Vec<DeviceInfo>> {
    let found = driver::devices()?;
    if found.is_empty() {
        return Err(Error::Device(
            "the NVIDIA driver shows no GPU (CUDA_VISIBLE_DEVICES may hide it)".to_owned(),
        ));
    }
    Ok(found)
}

/// The kernel pack of a GPU and how many kernels it holds.
pub(crate) fn pack(info: &DeviceInfo) -> Result<(PathBuf, usize)> {
    let packs = store::packs(info.capability, &kernels())?;
    let found = packs
        .into_iter()
        .next()
        .map(|(path, pack)| (path, pack.len()));
    found.ok_or_else(|| {
        let (major, minor) = info.capability;
        Error::Device(format!(
            "there is no kernel pack of this version for {}: put tileinfer-sm_{major}{minor}.pack beside the program \
             (cargo xtask kernels --arch sm_{major}{minor} builds it)",
            info.name
        ))
    })
}

/// The packs that the build took into the program: see `build.rs`.
const BUILT_IN: &[&[u8]] = include!(concat!(env!("OUT_DIR"), "/packs.rs"));

/// Packs lie beside the program, or where a build in the source tree puts them, `target/kernels` beside
/// `target/release`, or are part of the program.
fn kernels() -> KernelOptions {
    let program = std::env::current_exe().ok();
    let folder = program.as_deref().and_then(|program| program.parent());
    let pack_folders = folder.map_or(Vec::new(), |folder| {
        vec![folder.to_owned(), folder.join("../kernels")]
    });
    KernelOptions {
        pack_folders,
        built_in: BUILT_IN,
        ..KernelOptions::default()
    }
}
