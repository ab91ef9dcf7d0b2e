//! What the GPU crate needs to be built and checked: NVIDIA's headers and kernel assembler from PyPI, packs
//! of compiled kernels, and a bundle to carry to a machine with a GPU. Nothing here touches a GPU.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, Result, bail, ensure};

use crate::files::NewFolder;

/// A wheel and what of it is wanted.
struct Wheel {
    /// Package and version.
    package: &'static str,
    /// The folder in the wheel that becomes the toolchain's `to`.
    from: &'static str,
    /// See `from`; empty for the toolchain itself.
    to: &'static str,
    /// How the wanted paths in it begin.
    part: &'static str,
}

impl Wheel {
    /// One of NVIDIA's, whose toolkit folder becomes the toolchain.
    const fn nvidia(package: &'static str, part: &'static str) -> Self {
        Wheel {
            package,
            from: "nvidia/cu13",
            to: "",
            part,
        }
    }
}

/// Headers for the bindings and the libclang that reads them; `tileiras` with the `libnvvm` and `ptxas` that it
/// runs, whose versions have to match; what shows a kernel's instructions.
const WHEELS: [Wheel; 9] = [
    Wheel::nvidia("nvidia-cuda-runtime==13.5.37", "include/"),
    Wheel::nvidia("nvidia-cuda-crt==13.5.37", "include/"),
    Wheel::nvidia("nvidia-curand==10.4.5.25", "include/"),
    Wheel::nvidia("nvidia-cuda-tileiras==13.5.37", "bin/tileiras"),
    Wheel::nvidia("nvidia-nvvm==13.5.37", "lib/libnvvm"),
    Wheel::nvidia("nvidia-cuda-nvcc==13.5.37", "bin/ptxas"),
    Wheel::nvidia("nvidia-cuda-nvdisasm==13.5.37", "bin/nvdisasm"),
    Wheel::nvidia("nvidia-cuda-cuobjdump==13.5.37", "bin/cuobjdump"),
    Wheel {
        package: "libclang==18.1.1",
        from: "libclang-18.1.1.data/platlib/clang/native",
        to: "lib",
        part: "libclang",
    },
];

/// Headers that belong to a C compiler and that libclang's wheel lacks: they are taken from the one that Rust
/// links with. Not every compiler has all of them.
const COMPILER_HEADERS: [&str; 5] = [
    "stddef.h",
    "limits.h",
    "syslimits.h",
    "stdarg.h",
    "stdbool.h",
];

/// What a finished toolchain folder says it holds.
const MANIFEST: &str = "wheels.txt";

/// Where the toolchain lies: `.cargo/config.toml` names the same folder.
pub(crate) fn toolchain(root: &Path) -> PathBuf {
    root.join("target/cuda-toolchain")
}

/// Whether the toolchain is laid out, so that `tileinfer-cuda` can be built.
pub(crate) fn has_toolchain(root: &Path) -> bool {
    fs::read_to_string(toolchain(root).join(MANIFEST)).is_ok_and(|text| text == manifest())
}

fn manifest() -> String {
    WHEELS
        .map(|wheel| format!("{} {}\n", wheel.package, wheel.part))
        .concat()
}

/// Lay out the toolchain unless it is there.
pub(crate) fn lay_out(root: &Path) -> Result<()> {
    let place = toolchain(root);
    if has_toolchain(root) {
        eprintln!("{} is complete, nothing to do", place.display());
        return Ok(());
    }
    fs::create_dir_all(root.join("target")).context("cannot create the folder target")?;
    let folder = NewFolder::new(&place)?;
    let wheels = folder.path().join("wheels");
    eprintln!("downloading NVIDIA's headers and kernel assembler, and libclang, with pip (280 MB)");
    let status = Command::new("python3")
        .args([
            "-m",
            "pip",
            "--disable-pip-version-check",
            "download",
            "--quiet",
            "--no-deps",
        ])
        .args(["--only-binary", ":all:", "-d"])
        .arg(&wheels)
        .args(WHEELS.map(|wheel| wheel.package))
        .status()
        .context(
            "cannot start python3: install Python 3 with pip (Debian: apt-get install python3-pip)",
        )?;
    ensure!(
        status.success(),
        "pip could not download the wheels ({status}, its message is above): check the network and pip's \
         settings for proxy and index"
    );
    for wheel in WHEELS {
        let name = wheel.package.split("==").next().unwrap_or(wheel.package);
        let file = find(&wheels, &name.replace('-', "_"))?;
        unpack(&file, &wheel, folder.path())?;
    }
    take_compiler_headers(&folder.path().join("include"))?;
    fs::remove_dir_all(&wheels).with_context(|| format!("cannot delete {}", wheels.display()))?;
    fs::write(folder.path().join(MANIFEST), manifest())
        .with_context(|| format!("cannot write {MANIFEST}"))?;
    folder.publish()?;
    eprintln!("{} is ready", place.display());
    Ok(())
}

/// Copies what the C compiler has of its headers into `folder`.
fn take_compiler_headers(folder: &Path) -> Result<()> {
    let mut taken = 0;
    for header in COMPILER_HEADERS {
        let output = Command::new("cc")
            .arg(format!("-print-file-name=include/{header}"))
            .output()
            .context("cannot start cc: install a C compiler (Debian: apt-get install gcc)")?;
        let path = PathBuf::from(String::from_utf8_lossy(&output.stdout).trim());
        // A compiler without that header prints the name as it was given.
        if path.is_absolute() {
            fs::copy(&path, folder.join(header))
                .with_context(|| format!("cannot copy {}", path.display()))?;
            taken += 1;
        }
    }
    ensure!(
        taken > 0,
        "cc does not say where its headers are (-print-file-name=include/stddef.h): install gcc or clang"
    );
    Ok(())
}

/// The wheel of the package called `name` in `folder`.
fn find(folder: &Path, name: &str) -> Result<PathBuf> {
    let prefix = format!("{name}-");
    for entry in
        fs::read_dir(folder).with_context(|| format!("cannot read {}", folder.display()))?
    {
        let entry = entry?;
        if entry.file_name().to_string_lossy().starts_with(&prefix) {
            return Ok(entry.path());
        }
    }
    bail!("pip left no wheel of {name} in {}", folder.display());
}

/// Unpack what is wanted of a wheel into the toolchain's folder.
fn unpack(file: &Path, wheel: &Wheel, to: &Path) -> Result<()> {
    let context = || format!("in {}", file.display());
    let mut archive = zip::ZipArchive::new(File::open(file)?).with_context(context)?;
    let mut found = false;
    for index in 0..archive.len() {
        let mut member = archive.by_index(index).with_context(context)?;
        let Some(inside) = member.enclosed_name() else {
            continue;
        };
        let Ok(path) = inside.strip_prefix(wheel.from) else {
            continue;
        };
        if member.is_dir() || !path.to_string_lossy().starts_with(wheel.part) {
            continue;
        }
        found = true;
        let target = to.join(wheel.to).join(path);
        if let Some(parent) = target.parent() {
            fs::create_dir_all(parent)
                .with_context(|| format!("cannot create {}", parent.display()))?;
        }
        let mut file =
            File::create(&target).with_context(|| format!("cannot create {}", target.display()))?;
        io::copy(&mut member, &mut file).with_context(context)?;
        #[cfg(unix)]
        if path.starts_with("bin") {
            use std::os::unix::fs::PermissionsExt;
            fs::set_permissions(&target, fs::Permissions::from_mode(0o755))
                .with_context(|| format!("cannot make {} executable", target.display()))?;
        }
    }
    ensure!(
        found,
        "{} holds no {}/{}",
        file.display(),
        wheel.from,
        wheel.part
    );
    Ok(())
}

#[derive(clap::Args)]
pub(crate) struct KernelArguments {
    /// Architectures, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "sm_90")]
    arch: Vec<String>,
    /// Where the packs go [default: target/kernels in the workspace]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
    /// Leave out what bfloat16 models of usual sizes do not launch
    #[arg(long)]
    usual: bool,
}

/// Compile every kernel for some architectures into packs.
pub(crate) fn kernels(root: &Path, arguments: &KernelArguments) -> Result<()> {
    lay_out(root)?;
    let out = arguments
        .out
        .clone()
        .unwrap_or_else(|| root.join("target/kernels"));
    let mut build = cargo(root);
    build.args([
        "run",
        "--package",
        "tileinfer-cuda",
        "--bin",
        "tileinfer-kernels",
        "--",
    ]);
    if arguments.usual {
        build.arg("--usual");
    }
    build.arg(toolchain(root)).arg(out).args(&arguments.arch);
    run(&mut build)
}

/// Compile every kernel for these architectures, the packs where builds in this tree look for them.
pub(crate) fn kernels_for(root: &Path, arch: &[&str]) -> Result<()> {
    let arguments = KernelArguments {
        arch: arch.iter().map(ToString::to_string).collect(),
        out: None,
        usual: false,
    };
    kernels(root, &arguments)
}

#[derive(clap::Args)]
pub(crate) struct SassArguments {
    /// Architectures, separated by commas
    #[arg(long, value_delimiter = ',', default_value = "sm_90")]
    arch: Vec<String>,
}

/// Hold the machine code of the hot kernels of some architectures against what it is meant to be.
pub(crate) fn sass(root: &Path, arguments: &SassArguments) -> Result<()> {
    let arch: Vec<&str> = arguments.arch.iter().map(String::as_str).collect();
    kernels_for(root, &arch)?;
    sass_of(root, &arch)
}

/// The same for packs that are there.
pub(crate) fn sass_of(root: &Path, arch: &[&str]) -> Result<()> {
    let mut build = cargo(root);
    build.args(["run", "--package", "tileinfer-cuda", "--bin"]);
    build.args(["tileinfer-sass", "--"]);
    build.arg(toolchain(root)).arg(root.join("target/kernels"));
    run(build.args(arch))
}

#[derive(clap::Args)]
pub(crate) struct BundleArguments {
    /// Architecture of the GPU
    #[arg(long, default_value = "sm_90")]
    arch: String,
    /// The bundle's folder [default: target/gpu-bundle in the workspace]
    #[arg(long, value_name = "DIR")]
    out: Option<PathBuf>,
}

/// Put the GPU checks, their kernels and the fixtures of the small models into one folder.
pub(crate) fn bundle(root: &Path, arguments: &BundleArguments) -> Result<()> {
    let arch = &arguments.arch;
    kernels_for(root, &[arch])?;
    run(cargo(root).args([
        "build",
        "--package",
        "tileinfer-cuda",
        "--features",
        "rival",
        "--bins",
    ]))?;
    let out = arguments
        .out
        .clone()
        .unwrap_or_else(|| root.join("target/gpu-bundle"));
    if let Some(parent) = out.parent() {
        fs::create_dir_all(parent)
            .with_context(|| format!("cannot create {}", parent.display()))?;
    }
    let folder = NewFolder::new(&out)?;
    let copy = |from: PathBuf, to: &str| {
        let to = folder.path().join(to);
        fs::copy(&from, &to)
            .with_context(|| format!("cannot copy {}", from.display()))
            .map(|_| ())
    };
    for program in ["gpu-check", "gpu-bench", "gpu-rival", "gpu-spec"] {
        copy(root.join("target/debug").join(program), program)?;
    }
    let pack = format!("tileinfer-{arch}.pack");
    copy(root.join("target/kernels").join(&pack), &pack)?;
    copy_tree(
        &root.join("testdata/golden/models"),
        &folder.path().join("golden/models"),
    )?;
    copy_tree(
        &root.join("testdata/golden/dflash"),
        &folder.path().join("golden/dflash"),
    )?;
    copy_tree(
        &root.join("testdata/golden/expected"),
        &folder.path().join("golden/expected"),
    )?;
    folder.publish()?;
    eprintln!(
        "{} is ready; on a machine with a GPU run there: ./gpu-check . golden",
        out.display()
    );
    Ok(())
}

fn copy_tree(from: &Path, to: &Path) -> Result<()> {
    fs::create_dir_all(to).with_context(|| format!("cannot create {}", to.display()))?;
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let target = to.join(entry.file_name());
        if entry.file_type()?.is_dir() {
            copy_tree(&entry.path(), &target)?;
        } else {
            fs::copy(entry.path(), &target)
                .with_context(|| format!("cannot copy {}", entry.path().display()))?;
        }
    }
    Ok(())
}

fn cargo(root: &Path) -> Command {
    let mut command = Command::new(std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into()));
    command.current_dir(root);
    command
}

fn run(command: &mut Command) -> Result<()> {
    let status = command
        .status()
        .with_context(|| format!("cannot start {command:?}"))?;
    ensure!(status.success(), "{command:?} failed ({status})");
    Ok(())
}
