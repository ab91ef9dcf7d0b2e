//! The GPU as the command line sees it, where CUDA is built in: which there are, whether one is usable, what it
//! has room for. Everything that runs on it is in `tileinfer-cuda`.

use std::path::PathBuf;
use std::sync::Arc;

use tileinfer::backend::ComputeType;
use tileinfer::{Error, Result};
use tileinfer_cuda::CudaBackend;
use tileinfer_cuda::ceiling::{self, Ceilings};
use tileinfer_cuda::driver::{self, DeviceInfo};
use tileinfer_cuda::ops::Ops;
use tileinfer_cuda::store::{self, KernelOptions};

/// The part of a GPU's memory that is taken at most: the driver and other programs need some as well.
const UTILIZATION: f64 = 0.9;

/// Rows of one step: enough to fill the tensor cores many times over.
pub(crate) const ROWS: usize = 2048;

/// An open GPU with kernels for it.
#[derive(Debug, Clone)]
pub(crate) struct Gpu(Arc<Ops>);

impl Gpu {
    /// Opens a GPU; the error says why it is not usable.
    pub(crate) fn open(number: usize) -> Result<Self> {
        let found = driver::devices()?;
        if let Some(info) = found.get(number) {
            pack(info)?;
        }
        Ok(Gpu(Arc::new(Ops::open(number, &kernels())?)))
    }

    /// What the driver calls it.
    pub(crate) fn name(&self) -> &str {
        &self.0.device().info().name
    }

    /// Bytes of its memory that may still be taken.
    pub(crate) fn available(&self) -> Result<u64> {
        let (free, total) = self.0.device().memory()?;
        let kept = (total as f64 * (1.0 - UTILIZATION)) as u64;
        Ok(free.saturating_sub(kept))
    }

    /// A backend on it.
    pub(crate) fn backend(&self, compute: ComputeType) -> CudaBackend {
        CudaBackend::with_ops(compute, self.0.clone())
    }

    /// What it can do, measured.
    pub(crate) fn ceilings(&self) -> Result<Ceilings> {
        ceiling::measure(&self.0)
    }
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

/// Packs lie beside the program, or where a build in the source tree puts them: `target/kernels` beside
/// `target/release`.
fn kernels() -> KernelOptions {
    let program = std::env::current_exe().ok();
    let folder = program.as_deref().and_then(|program| program.parent());
    let pack_folders = folder.map_or(Vec::new(), |folder| {
        vec![folder.to_owned(), folder.join("../kernels")]
    });
    KernelOptions {
        pack_folders,
        ..KernelOptions::default()
    }
}
