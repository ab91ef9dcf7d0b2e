//! Compiles every kernel for the architectures named into packs. Needs a CUDA toolkit's `tileiras`, no GPU.
//!
//! `tileinfer-kernels [--without-tma] [--sweep] [--usual] [--only TEXT] TOOLKIT FOLDER ARCH...`, where `--without-tma`
//! is for memory checkers, which cannot follow it, `--sweep` adds what
//! `gpu-check --sweep` tries, `--usual` leaves out what bfloat16 models of usual sizes do not launch, and `--only`
//! kernels whose names hold none of the texts, separated by semicolons: a quick pack to try something with.

use std::path::Path;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use sha2::{Digest, Sha256};
use tileinfer::{Error, Result};
use tileinfer_cuda::compile::{self, Assembler};
use tileinfer_cuda::kernels::{Type, Variant, fingerprint};
use tileinfer_cuda::ops::{catalog, sweep_catalog};
use tileinfer_cuda::pack::Pack;

fn main() {
    let mut arguments = std::env::args().skip(1).peekable();
    let tma = arguments
        .next_if(|argument| argument == "--without-tma")
        .is_none();
    let mut catalog = catalog();
    if arguments
        .next_if(|argument| argument == "--sweep")
        .is_some()
    {
        catalog.extend(sweep_catalog());
    }
    if arguments
        .next_if(|argument| argument == "--usual")
        .is_some()
    {
        catalog.retain(is_usual);
    }
    if arguments.next_if(|argument| argument == "--only").is_some() {
        let texts = arguments.next().unwrap_or_default();
        catalog.retain(|variant| {
            let name = variant.to_string();
            texts.split(';').any(|text| name.contains(text))
        });
    }
    let (Some(toolkit), Some(folder)) = (arguments.next(), arguments.next()) else {
        eprintln!(
            "usage: tileinfer-kernels [--without-tma] [--sweep] [--usual] [--only TEXT] TOOLKIT FOLDER ARCH..."
        );
        std::process::exit(2);
    };
    let archs: Vec<String> = arguments.collect();
    let (toolkit, folder) = (Path::new(&toolkit), Path::new(&folder));
    let result = build(&catalog, toolkit, folder, &archs, tma);
    if let Err(error) = result {
        eprintln!("error: {error}");
        std::process::exit(1);
    }
}

/// Whether bfloat16 models of usual sizes may launch it: f32 and odd sizes are for tests.
fn is_usual(variant: &Variant) -> bool {
    let mut types = variant.types.iter().flatten().peekable();
    let any = types.peek().is_none();
    (any || types.any(|&kind| kind == Type::Bf16))
        && (variant.aligned || variant.kernel.aligned.is_empty())
}

/// Compiles `variants` for each of `archs`. What was compiled before from the same bytecode is kept in
/// `FOLDER/cubins`.
fn build(
    variants: &[Variant],
    toolkit: &Path,
    folder: &Path,
    archs: &[String],
    tma: bool,
) -> Result<()> {
    let Some(assembler) = Assembler::in_toolkit(toolkit) else {
        return Err(Error::Device(format!(
            "{} holds no bin/tileiras; `cargo xtask cuda-toolchain` lays one out",
            toolkit.display()
        )));
    };
    let cubins = folder.join("cubins");
    std::fs::create_dir_all(&cubins).map_err(|source| Error::io(&cubins, source))?;
    let names: Vec<&str> = archs.iter().map(String::as_str).collect();
    // What the kernel compiler refuses is known long before everything is assembled.
    let bytecodes = on_all_cores(variants, |variant| {
        Ok((variant, compile::bytecodes(variant, &names, tma)?))
    })?;
    for (index, arch) in names.into_iter().enumerate() {
        let assembled = on_all_cores(&bytecodes, |(variant, bytecodes)| {
            let cubin = cubin(&assembler, variant, &bytecodes[index], &cubins, arch)?;
            Ok((variant, cubin))
        })?;
        let mut pack = Pack::new(arch, fingerprint());
        for (variant, cubin) in &assembled {
            pack.insert(&variant.to_string(), cubin);
        }
        let path = folder.join(format!("tileinfer-{arch}.pack"));
        pack.write(&path)?;
        let bytes = std::fs::metadata(&path).map_or(0, |file| file.len());
        println!(
            "{}: {} kernels, {} KiB",
            path.display(),
            pack.len(),
            bytes / 1024
        );
    }
    Ok(())
}

/// `work` on each item; if it fails for some, says why for each.
fn on_all_cores<'a, T: Sync, R: Send>(
    items: &'a [T],
    work: impl Fn(&'a T) -> Result<R> + Sync,
) -> Result<Vec<R>> {
    let results = Mutex::new(Vec::new());
    let next = AtomicUsize::new(0);
    let turn = || {
        while let Some(item) = items.get(next.fetch_add(1, Ordering::Relaxed)) {
            let result = work(item);
            let mut results = results.lock().expect("no thread panics with the list");
            results.push(result);
        }
    };
    std::thread::scope(|scope| {
        let threads = std::thread::available_parallelism().map_or(2, std::num::NonZero::get);
        for _ in 0..threads {
            scope.spawn(turn);
        }
    });
    let results = results.into_inner().expect("no thread panicked with it");
    let failed = results.iter().filter_map(|result| result.as_ref().err());
    let count = failed.inspect(|error| eprintln!("{error}")).count();
    if count > 0 {
        return Err(Error::Bug(format!("{count} kernels do not compile")));
    }
    Ok(results.into_iter().flatten().collect())
}

/// The machine code of a variant: kept, or assembled and kept.
fn cubin(
    assembler: &Assembler,
    variant: &Variant,
    bytecode: &[u8],
    cubins: &Path,
    arch: &str,
) -> Result<Vec<u8>> {
    let mut hasher = Sha256::new();
    hasher.update(bytecode);
    hasher.update(arch);
    let path = cubins.join(format!("{:x}.cubin", hasher.finalize()));
    if let Ok(cubin) = std::fs::read(&path) {
        return Ok(cubin);
    }
    let cubin = assembler.assemble(&variant.to_string(), bytecode, arch)?;
    let temporary = path.with_extension(format!("{}.incomplete", std::process::id()));
    std::fs::write(&temporary, &cubin).map_err(|source| Error::io(&temporary, source))?;
    std::fs::rename(&temporary, &path).map_err(|source| Error::io(&path, source))?;
    Ok(cubin)
}
