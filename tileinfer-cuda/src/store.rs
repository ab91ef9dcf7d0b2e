//! Where compiled kernels come from: the pack, else a cache of earlier compilations, else the assembler if
//! it is there. What a launch asks for is loaded once.

use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};

use tileinfer::{Error, Result};

use crate::compile::{self, Assembler};
use crate::driver::{Device, Function};
use crate::kernels::{self, Variant};
use crate::pack::Pack;

/// Where to look for kernels.
#[derive(Debug, Clone, Default)]
pub struct KernelOptions {
    /// Folders with packs, `tileinfer-<arch>.pack`; the program's own folder if empty.
    pub pack_folders: Vec<PathBuf>,
    /// Packs that are part of the program; one in a folder goes before them.
    pub built_in: &'static [&'static [u8]],
    /// Where compiled kernels are kept; nowhere if none.
    pub cache: Option<PathBuf>,
    /// A CUDA toolkit, 13.5 or newer, for kernels that no pack has.
    pub toolkit: Option<PathBuf>,
}

/// The kernels of one open device.
#[derive(Debug)]
pub struct KernelStore {
    device: Arc<Device>,
    arch: String,
    packs: Vec<Pack>,
    cache: Option<PathBuf>,
    assembler: Option<Assembler>,
    loaded: Mutex<HashMap<Variant, Arc<Function>>>,
    compiled: Mutex<Vec<String>>,
}

/// The architectures whose machine code runs on a device, best first: its own, then older ones of the
/// same generation.
pub fn architectures((major, minor): (i32, i32)) -> Vec<String> {
    (0..=minor)
        .rev()
        .map(|minor| format!("sm_{major}{minor}"))
        .collect()
}

/// The packs that fit a device of this compute capability and this version of the kernels, and where they are: the
/// program itself for those built into it.
///
/// # Errors
/// A pack that is there but damaged.
pub fn packs(capability: (i32, i32), options: &KernelOptions) -> Result<Vec<(PathBuf, Pack)>> {
    let mut folders = options.pack_folders.clone();
    if folders.is_empty() {
        let program = std::env::current_exe().ok();
        folders.extend(program.and_then(|program| program.parent().map(PathBuf::from)));
    }
    let architectures = architectures(capability);
    let mut packs = Vec::new();
    for folder in &folders {
        for arch in &architectures {
            let path = folder.join(format!("tileinfer-{arch}.pack"));
            if path.is_file() {
                let pack = Pack::read(&path)?;
                packs.push((path, pack));
            }
        }
    }
    let program = std::env::current_exe().unwrap_or_default();
    let built_in = options.built_in.iter().copied().filter_map(Pack::parse);
    let built_in: Vec<Pack> = built_in.collect();
    for arch in &architectures {
        let fitting = built_in.iter().filter(|pack| pack.arch == *arch);
        packs.extend(fitting.map(|pack| (program.clone(), pack.clone())));
    }
    packs.retain(|(path, pack)| {
        let same = pack.fingerprint == kernels::fingerprint();
        if !same {
            tracing::warn!(
                "the kernel pack for {} in {} is of another version of tileinfer and is not used",
                pack.arch,
                path.display()
            );
        }
        same
    });
    Ok(packs)
}

impl KernelStore {
    /// Looks for packs that fit the device.
    ///
    /// # Errors
    /// A pack that is there but damaged. None at all is no error yet: a missing kernel is.
    pub fn open(device: &Arc<Device>, options: &KernelOptions) -> Result<Self> {
        let architectures = architectures(device.info().capability);
        let packs = packs(device.info().capability, options)?
            .into_iter()
            .map(|(_, pack)| pack)
            .collect();
        Ok(KernelStore {
            device: device.clone(),
            arch: architectures[0].clone(),
            packs,
            cache: options.cache.clone(),
            assembler: options.toolkit.as_deref().and_then(Assembler::in_toolkit),
            loaded: Mutex::default(),
            compiled: Mutex::default(),
        })
    }

    /// The function of a variant.
    ///
    /// # Errors
    /// [`Error::Device`] naming the kernel if no pack has it and it cannot be compiled here.
    pub fn get(&self, variant: &Variant) -> Result<Arc<Function>> {
        let loaded = || {
            self.loaded
                .lock()
                .expect("no thread panics while it holds the kernels")
        };
        if let Some(function) = loaded().get(variant) {
            return Ok(function.clone());
        }
        // Not under the lock: another thread may compile another kernel meanwhile.
        let cubin = self.find(variant)?;
        let function = self
            .device
            .load(&cubin, &format!("{}_entry", variant.kernel.name))?;
        Ok(loaded()
            .entry(*variant)
            .or_insert_with(|| Arc::new(function))
            .clone())
    }

    /// Gets kernels that are going to be needed, on all cores: compiling takes seconds each.
    ///
    /// # Errors
    /// Those of [`KernelStore::get`], the first there is.
    pub fn prefetch(&self, variants: &[Variant]) -> Result<()> {
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(variant) = variants.get(next.fetch_add(1, Ordering::Relaxed)) {
                self.get(variant)?;
            }
            Ok(())
        };
        let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
        std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads.min(variants.len()))
                .map(|_| scope.spawn(work))
                .collect();
            workers
                .into_iter()
                .try_for_each(|worker| match worker.join() {
                    Ok(result) => result,
                    Err(panic) => std::panic::resume_unwind(panic),
                })
        })
    }

    /// Names of the kernels that had to be compiled here.
    pub fn compiled(&self) -> Vec<String> {
        self.compiled
            .lock()
            .expect("no thread panics while it holds the list")
            .clone()
    }

    fn find(&self, variant: &Variant) -> Result<Vec<u8>> {
        let name = variant.to_string();
        if let Some(cubin) = self.packs.iter().find_map(|pack| pack.get(&name)) {
            return Ok(cubin);
        }
        let kept = self.cache.as_ref().map(|cache| {
            cache
                .join(format!("{:016x}", kernels::fingerprint()))
                .join(format!("{}.{name}.cubin", self.arch))
        });
        if let Some(cubin) = kept.as_ref().and_then(|path| std::fs::read(path).ok()) {
            return Ok(cubin);
        }
        let Some(assembler) = &self.assembler else {
            return Err(Error::Device(format!(
                "the kernel {name} for {} is in no kernel pack; put tileinfer-{}.pack beside the program, or install \
                 the CUDA toolkit 13.5 (or the wheels nvidia-cuda-tileiras, nvidia-nvvm, nvidia-cuda-nvcc) and name \
                 its folder",
                self.arch, self.arch
            )));
        };
        tracing::info!("compiling the kernel {name} for {}", self.arch);
        let cubin =
            assembler.assemble(&name, &compile::bytecode(variant, &self.arch)?, &self.arch)?;
        self.compiled
            .lock()
            .expect("no thread panics while it holds the list")
            .push(name);
        if let Some(path) = kept {
            // A cache that cannot be written costs time, not correctness.
            if let Err(error) = keep(&path, &cubin) {
                tracing::warn!("{error}");
            }
        }
        Ok(cubin)
    }
}

fn keep(path: &std::path::Path, cubin: &[u8]) -> Result<()> {
    let folder = path.parent().expect("a file in a folder");
    std::fs::create_dir_all(folder).map_err(|source| Error::io(folder, source))?;
    let temporary = path.with_extension(format!("{}.incomplete", std::process::id()));
    std::fs::write(&temporary, cubin).map_err(|source| Error::io(&temporary, source))?;
    std::fs::rename(&temporary, path).map_err(|source| Error::io(path, source))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The bytes of a pack with one kernel.
    fn bytes(arch: &str, fingerprint: u64, folder: &std::path::Path) -> Vec<u8> {
        let mut pack = Pack::new(arch, fingerprint);
        pack.insert("kernel", arch.as_bytes());
        let path = folder.join(format!("tileinfer-{arch}.pack"));
        pack.write(&path).unwrap();
        std::fs::read(path).unwrap()
    }

    #[test]
    fn packs_that_fit_are_found_best_first_those_in_folders_before_those_built_in() {
        let folder = tempfile::tempdir().unwrap();
        let [here, other] = ["here", "other"].map(|name| folder.path().join(name));
        for folder in [&here, &other] {
            std::fs::create_dir(folder).unwrap();
        }
        let current = kernels::fingerprint();
        let mut built_in = Vec::new();
        for (arch, fingerprint) in [
            ("sm_80", current),
            ("sm_89", current),
            ("sm_86", current ^ 1),
            ("sm_90", current),
        ] {
            let bytes: &'static [u8] = bytes(arch, fingerprint, &other).leak();
            built_in.push(bytes);
        }
        bytes("sm_80", current, &here);
        bytes("sm_89", current ^ 1, &here);
        let options = KernelOptions {
            pack_folders: vec![here.clone()],
            built_in: built_in.leak(),
            ..KernelOptions::default()
        };
        let found = packs((8, 9), &options).unwrap();
        let found: Vec<_> = found
            .iter()
            .map(|(path, pack)| (path.clone(), pack.arch.as_str()))
            .collect();
        let program = std::env::current_exe().unwrap();
        let expected = [
            (here.join("tileinfer-sm_80.pack"), "sm_80"),
            (program.clone(), "sm_89"),
            (program, "sm_80"),
        ];
        assert_eq!(found, expected);
    }
}
