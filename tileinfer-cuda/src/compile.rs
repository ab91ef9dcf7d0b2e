//! From a [`Variant`] to machine code: the kernel compiler makes Tile IR bytecode without a GPU, the
//! program `tileiras` turns it into a cubin. It knows nothing about devices.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use cutile::compile_api::{CompileArtifacts, KernelCompiler};
use cutile::tile_kernel::CompileOptions;
use cutile_compiler::cuda_tile_runtime_utils::serialize_tile_ir_bytecode_for_version;
use cutile_compiler::specialization::DivHint;
use cutile_ir::bytecode::{BytecodeVersion, Opcode};
use cutile_ir::ir::{Attribute, Module, Operation, OptimizationHints};
use tileinfer::{Error, Result};

use crate::kernels::Variant;

/// Stack of the compiling thread: the kernel compiler recurses deeply.
const STACK: usize = 64 << 20;

/// The first one that has every hint we give.
const VERSION: BytecodeVersion = BytecodeVersion::V13_5;

/// The Tile IR bytecode of `variant` for an architecture such as `sm_90`.
///
/// # Errors
/// [`Error::Bug`] if the kernel compiler refuses the kernel.
pub fn bytecode(variant: &Variant, arch: &str) -> Result<Vec<u8>> {
    let mut all = bytecodes(variant, &[arch], true)?;
    Ok(all.pop().expect("one for each architecture"))
}

/// The same for several architectures. To them the kernel compiler says the same but for their name, and nearly
/// all of its time goes into what it says, so it runs once. Without `tma` views are loaded and stored by plain
/// instructions: slower, and what memory checkers can follow.
///
/// # Errors
/// As [`bytecode`].
pub fn bytecodes(variant: &Variant, archs: &[&str], tma: bool) -> Result<Vec<Vec<u8>>> {
    let work = || -> Result<Vec<Vec<u8>>, String> {
        let Some(&first) = archs.first() else {
            return Ok(Vec::new());
        };
        let mut module = compile(variant, first)?;
        if !tma {
            each_operation(&mut module, |operation| forbid_tma(operation, first));
        }
        let bytecode = |arch: &&str| {
            each_operation(&mut module, |operation| rename(operation, arch));
            serialize_tile_ir_bytecode_for_version(&module, VERSION)
                .map(|(bytecode, _)| bytecode)
                .map_err(|error| error.to_string())
        };
        archs.iter().map(bytecode).collect()
    };
    let thread = std::thread::Builder::new().stack_size(STACK);
    let compiled = std::thread::scope(|scope| Ok(thread.spawn_scoped(scope, work)?.join()))
        .map_err(|source| Error::io("the kernel compiler's thread", source))?;
    match compiled {
        Ok(result) => result.map_err(|reason| Error::Bug(format!("kernel {variant}: {reason}"))),
        Err(_) => Err(Error::Bug(format!(
            "kernel {variant}: the kernel compiler panicked"
        ))),
    }
}

/// What the kernel compiler makes of a variant.
fn compile(variant: &Variant, arch: &str) -> Result<Module, String> {
    let options = CompileOptions::default()
        .num_worker_warps_per_cta(variant.warps)
        .occupancy(variant.occupancy);
    let sixteen = |name: &&'static str| (*name, DivHint::from_value(16));
    // An aligned size is a multiple of 8: of 16 bytes in bfloat16. Pointers count in bytes.
    let eight = |name: &&'static str| {
        (
            *name,
            DivHint::from_value(if is_size(name) { 8 } else { 16 }),
        )
    };
    let mut hints: Vec<_> = variant.kernel.bases.iter().map(sixteen).collect();
    if variant.aligned {
        hints.extend(variant.kernel.aligned.iter().map(eight));
    }
    KernelCompiler::new(
        variant.kernel.source,
        variant.kernel.module,
        variant.kernel.name,
    )
    .generics(variant.generics())
    .scalar_hints(&hints)
    .options(options)
    .target(arch)
    .bytecode_version(VERSION)
    .compile()
    .map(CompileArtifacts::into_module)
    .map_err(|error| error.to_string())
}

fn each_operation(module: &mut Module, mut change: impl FnMut(&mut Operation)) {
    let mut operations = module.functions.clone();
    while let Some(id) = operations.pop() {
        change(module.op_mut(id));
        for &region in &module.op(id).regions {
            for &block in &module.region(region).blocks {
                operations.extend(&module.block(block).ops);
            }
        }
    }
}

/// Makes an operation whose hints name one architecture name another one.
fn rename(operation: &mut Operation, arch: &str) {
    for (_, attribute) in &mut operation.attributes {
        if let Attribute::OptimizationHints(hints) = attribute {
            for (name, _) in &mut hints.entries {
                arch.clone_into(name);
            }
        }
    }
}

/// Hints that a view is to be loaded or stored without TMA.
fn forbid_tma(operation: &mut Operation, arch: &str) {
    if !matches!(operation.opcode, Opcode::LoadViewTko | Opcode::StoreViewTko) {
        return;
    }
    let hints = "optimization_hints";
    let mut entries = vec![("allow_tma".to_owned(), Attribute::Bool(false))];
    for (_, attribute) in &operation.attributes {
        if let Attribute::OptimizationHints(given) = attribute {
            let given = given.entries.iter().flat_map(|(_, entries)| entries);
            entries.extend(given.filter(|(name, _)| name != "allow_tma").cloned());
        }
    }
    operation.attributes.retain(|(name, _)| name != hints);
    let entries = vec![(arch.to_owned(), entries)];
    let entries = Attribute::OptimizationHints(OptimizationHints { entries });
    operation.attributes.push((hints.to_owned(), entries));
}

/// Whether an argument is a size in values and not a pointer or a size in bytes.
fn is_size(argument: &str) -> bool {
    matches!(argument, "k" | "width" | "count" | "head_dim" | "vocab")
}

/// The kernel assembler of a CUDA toolkit, 13.5 or newer.
#[derive(Debug, Clone)]
pub struct Assembler {
    program: PathBuf,
}

impl Assembler {
    /// The one in a toolkit's folder, if it is there.
    pub fn in_toolkit(toolkit: &Path) -> Option<Self> {
        let program = toolkit.join("bin/tileiras");
        program.is_file().then_some(Assembler { program })
    }

    /// The cubin of `bytecode` for an architecture.
    ///
    /// # Errors
    /// [`Error::Device`] with what the assembler said; [`Error::Io`] if it cannot be run.
    pub fn assemble(&self, name: &str, bytecode: &[u8], arch: &str) -> Result<Vec<u8>> {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let number = COUNT.fetch_add(1, Ordering::Relaxed);
        let stem = std::env::temp_dir().join(format!("tileinfer-{}-{number}", std::process::id()));
        let (input, output) = (stem.with_extension("bc"), stem.with_extension("cubin"));
        std::fs::write(&input, bytecode).map_err(|source| Error::io(&input, source))?;
        let run = Command::new(&self.program)
            .args(["--opt-level", "3", "--gpu-name", arch, "-o"])
            .arg(&output)
            .arg(&input)
            // With these set it takes libnvvm and ptxas from another toolkit, older perhaps, and fails
            // without saying why.
            .env_remove("CUDA_HOME")
            .env_remove("CUDA_PATH")
            .output();
        let cubin = std::fs::read(&output);
        for file in [&input, &output] {
            // A file that was never written need not go.
            let _ = std::fs::remove_file(file);
        }
        let run = run.map_err(|source| Error::io(&self.program, source))?;
        if !run.status.success() {
            let said = String::from_utf8_lossy(&run.stderr);
            return Err(Error::Device(format!(
                "{}: kernel {name} for {arch}: {}",
                self.program.display(),
                said.trim()
            )));
        }
        cubin.map_err(|source| Error::io(&output, source))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::{self, Type};
    use crate::ops::{LinearShape, linear_plan};

    /// What the compiler says to several architectures at once is what it says to each alone.
    #[test]
    fn bytecode_for_several_architectures_is_that_for_each() {
        let shape = LinearShape::new([Type::Bf16; 2], [1, 6144, 4096]);
        let add = Variant::new(&kernels::ADD, &[Type::F32; 2], &[1024]);
        for variant in [linear_plan(&shape).variant, add] {
            let archs = ["sm_90", "sm_120", "sm_80"];
            let [with, without] = [true, false].map(|tma| {
                let together = bytecodes(&variant, &archs, tma).unwrap();
                assert_eq!(together.len(), archs.len());
                for (bytecode_of_all, arch) in together.iter().zip(archs) {
                    let alone = bytecodes(&variant, &[arch], tma).unwrap();
                    assert!(*bytecode_of_all == alone[0], "{variant} {arch} {tma}");
                }
                assert_ne!(together[0], together[1]);
                together
            });
            // Both load views.
            assert_ne!(with, without, "{variant}");
        }
    }
}
