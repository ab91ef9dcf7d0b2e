//! What this machine can do, measured: the yardstick of `bench`.

use std::time::Instant;

use anyhow::Result;
use tileinfer_cpu::{Level, Pool, ceiling};

use crate::open::Device;

/// Bytes that the plain read goes over: far more than any cache holds.
const READ_BYTES: usize = 1 << 30;

/// The best of what was measured.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ceilings {
    pub(crate) read_gb_s: f64,
    pub(crate) copy_gb_s: f64,
    pub(crate) matmul_tflop_s: f64,
}

impl Ceilings {
    /// Measures `device`, a CPU with `threads` threads.
    pub(crate) fn measure(device: &Device, threads: usize) -> Result<Self> {
        #[cfg(feature = "cuda")]
        if let Device::Cuda(gpu) = device {
            let found = gpu.ceilings()?;
            return Ok(Ceilings {
                read_gb_s: found.read / 1e9,
                copy_gb_s: found.copy / 1e9,
                matmul_tflop_s: found.matmul / 1e12,
            });
        }
        #[cfg(not(feature = "cuda"))]
        let (Device::Cpu | Device::Reference) = device;
        let (level, pool, start) = (Level::best(), Pool::new(threads), Instant::now());
        let clock = || start.elapsed().as_secs_f64();
        Ok(Ceilings {
            read_gb_s: ceiling::read_bandwidth(level, &pool, READ_BYTES, 5, &clock) / 1e9,
            copy_gb_s: ceiling::copy_bandwidth(&pool, READ_BYTES / 2, 3, &clock) / 1e9,
            matmul_tflop_s: ceiling::multiply_add_rate(level, &pool, 5, &clock) / 1e12,
        })
    }

    /// The better of two measurements.
    pub(crate) fn best(&self, other: &Self) -> Self {
        Ceilings {
            read_gb_s: self.read_gb_s.max(other.read_gb_s),
            copy_gb_s: self.copy_gb_s.max(other.copy_gb_s),
            matmul_tflop_s: self.matmul_tflop_s.max(other.matmul_tflop_s),
        }
    }
}
