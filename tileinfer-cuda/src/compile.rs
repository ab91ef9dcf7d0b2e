//! From a [`Variant`] to machine code: the kernel compiler makes Tile IR bytecode without a GPU, the
//! program `tileiras` turns it into a cubin. It knows nothing about devices.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::atomic::{AtomicU64, Ordering};

use cutile::compile_api::KernelCompiler;
use cutile::tile_kernel::CompileOptions;
use cutile_compiler::specialization::DivHint;
use cutile_ir::bytecode::BytecodeVersion;
use tileinfer::{Error, Result};

use crate::kernels::Variant;

/// Stack of the compiling thread: the kernel compiler recurses deeply.
const STACK: usize = 64 << 20;

/// The Tile IR bytecode of `variant` for an architecture such as `sm_90`.
///
/// # Errors
/// [`Error::Bug`] if the kernel compiler refuses the kernel.
pub fn bytecode(variant: &Variant, arch: &str) -> Result<Vec<u8>> {
    let (variant, arch) = (*variant, arch.to_owned());
    let name = variant.to_string();
    let thread = std::thread::Builder::new().stack_size(STACK);
    let work = move || -> Result<Vec<u8>, String> {
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
        .target(&arch)
        .bytecode_version(BytecodeVersion::V13_5)
        .compile()
        .and_then(|artifacts| artifacts.bytecode())
        .map_err(|error| error.to_string())
    };
    let compiled = thread
        .spawn(work)
        .map_err(|source| Error::io("the kernel compiler's thread", source))?
        .join();
    match compiled {
        Ok(result) => result.map_err(|reason| Error::Bug(format!("kernel {name}: {reason}"))),
        Err(_) => Err(Error::Bug(format!(
            "kernel {name}: the kernel compiler panicked"
        ))),
    }
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
