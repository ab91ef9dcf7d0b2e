//! `cargo xtask neon`: the tests of the CPU backend's kernels, built for 64-bit ARM and run under qemu. No
//! speed is learnt from it, only that the NEON code is right.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

const TARGET: &str = "aarch64-unknown-linux-gnu";
const LINKER: &str = "aarch64-linux-gnu-gcc";
const EMULATOR: &str = "qemu-aarch64";

pub(crate) fn run(root: &Path) -> Result<()> {
    for (program, package) in [(LINKER, "gcc-aarch64-linux-gnu"), (EMULATOR, "qemu-user")] {
        if !answers(program) {
            eprintln!("SKIPPED: there is no {program} (Debian: apt-get install {package})");
            return Ok(());
        }
    }
    // Without rustup the compiler may have the target all the same; then the build tells.
    let added = Command::new("rustup")
        .args(["target", "add", TARGET])
        .status();
    if !added.is_ok_and(|status| status.success()) {
        eprintln!("SKIPPED: `rustup target add {TARGET}` failed");
        return Ok(());
    }
    let cargo = std::env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let status = Command::new(cargo)
        .current_dir(root)
        .args(["test", "-p", "tileinfer-cpu", "--target", TARGET])
        .args(["--lib", "--test", "conformance"])
        .env("CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_LINKER", LINKER)
        .env(
            "CARGO_TARGET_AARCH64_UNKNOWN_LINUX_GNU_RUNNER",
            format!("{EMULATOR} -L /usr/aarch64-linux-gnu"),
        )
        .env("CC_aarch64_unknown_linux_gnu", LINKER)
        .status()
        .context("cannot start cargo")?;
    ensure!(status.success(), "the tests for {TARGET} failed ({status})");
    Ok(())
}

fn answers(program: &str) -> bool {
    let output = Command::new(program).arg("--version").output();
    output.is_ok_and(|output| output.status.success())
}
