//! Disassembles the hot kernels of packs and says where their machine code is not what it is meant to be. Needs a
//! CUDA toolkit's `nvdisasm` and `cuobjdump`, no GPU.
//!
//! `tileinfer-sass TOOLKIT FOLDER ARCH...`, where FOLDER holds the packs. It ends with 1 where a rule of
//! [`tileinfer_cuda::sass`] fails.

use std::path::{Path, PathBuf};
use std::process::Command;

use tileinfer::{Error, Result};
use tileinfer_cuda::kernels::fingerprint;
use tileinfer_cuda::pack::Pack;
use tileinfer_cuda::sass::{self, Counts, Resources};

fn main() {
    let mut arguments = std::env::args().skip(1);
    let (Some(toolkit), Some(folder)) = (arguments.next(), arguments.next()) else {
        eprintln!("usage: tileinfer-sass TOOLKIT FOLDER ARCH...");
        std::process::exit(2);
    };
    let check = |arch: String| check(&PathBuf::from(&toolkit), &PathBuf::from(&folder), &arch);
    let wrong = arguments.map(check).sum::<Result<usize>>();
    match wrong {
        Ok(0) => {}
        Ok(wrong) => {
            eprintln!("error: {wrong} kernels are not what they are meant to be");
            std::process::exit(1);
        }
        Err(error) => {
            eprintln!("error: {error}");
            std::process::exit(1);
        }
    }
}

/// Prints a line for each hot kernel of a pack; how many are wrong.
fn check(toolkit: &Path, folder: &Path, arch: &str) -> Result<usize> {
    let path = folder.join(format!("tileinfer-{arch}.pack"));
    let pack = Pack::read(&path)?;
    if pack.fingerprint != fingerprint() {
        return Err(Error::Device(format!(
            "{} holds other kernels than this program: `cargo xtask kernels --arch {arch}` makes it anew",
            path.display()
        )));
    }
    println!("{}", path.display());
    println!("registers  shared B  products  bulk  ahead  wide  narrow  spills  stack B  kernel");
    let mut wrong = 0;
    for variant in sass::hot() {
        let name = variant.to_string();
        let Some(cubin) = pack.get(&name) else {
            return Err(Error::Bug(format!(
                "{}: there is no {name}",
                path.display()
            )));
        };
        let (counts, resources) = disassemble(toolkit, &name, &cubin)?;
        println!(
            "{:9}  {:8}  {:8}  {:4}  {:5}  {:4}  {:6}  {:6}  {:7}  {name}",
            resources.registers,
            resources.shared,
            counts.products,
            counts.bulk,
            counts.ahead,
            counts.wide,
            counts.narrow,
            counts.spills,
            resources.stack
        );
        let faults = sass::faults(arch, &variant, &counts, &resources);
        wrong += usize::from(!faults.is_empty());
        for fault in faults {
            println!("    WRONG: {fault}");
        }
    }
    Ok(wrong)
}

fn disassemble(toolkit: &Path, name: &str, cubin: &[u8]) -> Result<(Counts, Resources)> {
    let file = std::env::temp_dir().join(format!("tileinfer-sass-{}.cubin", std::process::id()));
    std::fs::write(&file, cubin).map_err(|source| Error::io(&file, source))?;
    let listing = output(toolkit, "nvdisasm", "-c", &file);
    let usage = output(toolkit, "cuobjdump", "-res-usage", &file);
    // A file that stays is in the folder for such files.
    let _ = std::fs::remove_file(&file);
    let usage = usage?;
    let resources = sass::resources(&usage).ok_or_else(|| {
        Error::Device(format!(
            "cuobjdump says nothing of {name}'s registers: {usage}"
        ))
    })?;
    Ok((sass::count(&listing?), resources))
}

/// What a tool of the toolkit prints about a file.
fn output(toolkit: &Path, tool: &str, option: &str, file: &Path) -> Result<String> {
    let program = toolkit.join("bin").join(tool);
    let run = Command::new(&program)
        .arg(option)
        .arg(file)
        .output()
        .map_err(|source| Error::io(&program, source))?;
    if !run.status.success() {
        return Err(Error::Device(format!(
            "{}: {}",
            program.display(),
            String::from_utf8_lossy(&run.stderr).trim()
        )));
    }
    Ok(String::from_utf8_lossy(&run.stdout).into_owned())
}
