//! Compiles every kernel for the architectures named into packs. Needs a CUDA toolkit's `tileiras`, no GPU.
//!
//! `tileinfer-kernels [--sweep] TOOLKIT FOLDER ARCH...`; with `--sweep`, what `gpu-check --sweep` tries
//! instead

use std::path::PathBuf;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use tileinfer::{Error, Result};
use tileinfer_cuda::compile::{self, Assembler};
use tileinfer_cuda::kernels::{Variant, fingerprint};
use tileinfer_cuda::ops::{catalog, sweep_catalog};
use tileinfer_cuda::pack::Pack;

fn main() {
    let mut arguments = std::env::args().skip(1).peekable();
    let sweep = arguments
        .next_if(|argument| argument == "--sweep")
        .is_some();
    let catalog = if sweep { sweep_catalog() } else { catalog() };
    let (Some(toolkit), Some(folder)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: tileinfer-kernels [--sweep] TOOLKIT FOLDER ARCH...");
        std::process::exit(2);
    };
    let result = arguments.try_for_each(|arch| {
        build(
            &catalog,
            &PathBuf::from(&toolkit),
            &PathBuf::from(&folder),
            &arch,
        )
    });
    if let Err(error) = result {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

/// Compiles the catalog for `arch`. What an earlier pack of the same kernels holds is taken from it.
fn build(
    variants: &[Variant],
    toolkit: &std::path::Path,
    folder: &std::path::Path,
    arch: &str,
) -> Result<()> {
    let Some(assembler) = Assembler::in_toolkit(toolkit) else {
        return Err(Error::Device(format!(
            "{} holds no bin/tileiras; `cargo xtask cuda-toolchain` lays one out",
            toolkit.display()
        )));
    };
    std::fs::create_dir_all(folder).map_err(|source| Error::io(folder, source))?;
    let path = folder.join(format!("tileinfer-{arch}.pack"));
    let earlier = Pack::read(&path)
        .ok()
        .filter(|pack| pack.fingerprint == fingerprint());
    let pack = Mutex::new(Pack::new(arch, fingerprint()));
    let failures = Mutex::new(Vec::new());
    let next = AtomicUsize::new(0);
    let work = || {
        while let Some(variant) = variants.get(next.fetch_add(1, Ordering::Relaxed)) {
            let name = variant.to_string();
            let kept = earlier.as_ref().and_then(|pack| pack.get(&name));
            let cubin = match kept {
                Some(cubin) => Ok(cubin),
                None => compile::bytecode(variant, arch)
                    .and_then(|code| assembler.assemble(&name, &code, arch)),
            };
            match cubin {
                Ok(cubin) => pack
                    .lock()
                    .expect("no thread panics with the pack")
                    .insert(&name, &cubin),
                Err(error) => failures
                    .lock()
                    .expect("no thread panics with the list")
                    .push(error.to_string()),
            }
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        for _ in 0..threads {
            scope.spawn(work);
        }
    });
    let failures = failures
        .into_inner()
        .expect("no thread panicked with the list");
    for failure in &failures {
        eprintln!("{failure}");
    }
    let pack = pack.into_inner().expect("no thread panicked with the pack");
    pack.write(&path)?;
    let bytes = std::fs::metadata(&path).map_or(0, |file| file.len());
    println!(
        "{}: {} kernels, {} KiB",
        path.display(),
        pack.len(),
        bytes / 1024
    );
    match failures.len() {
        0 => Ok(()),
        count => Err(Error::Bug(format!(
            "{count} kernels do not compile for {arch}"
        ))),
    }
}
