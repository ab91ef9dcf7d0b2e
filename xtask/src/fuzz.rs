//! Runs the fuzz targets, each for a while, with limits on what one input may take. What they do is in `fuzz`.

use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, ensure};

/// Seconds that one input may take; templates may take 20 before they are given up on.
const SECONDS: u32 = 60;
/// Memory that an input may take, in MiB, the sanitizer's own included.
const MEGABYTES: u32 = 4096;
/// Bytes of an input; longer ones find nothing that shorter ones do not.
const BYTES: u32 = 32 << 10;

#[derive(clap::Args)]
pub(crate) struct Arguments {
    /// Minutes for each target
    #[arg(long, default_value_t = 10)]
    minutes: u64,
    /// Only these targets (default: all in fuzz/seeds)
    targets: Vec<String>,
}

pub(crate) fn run(root: &Path, arguments: &Arguments) -> Result<()> {
    let mut targets = arguments.targets.clone();
    if targets.is_empty() {
        for entry in std::fs::read_dir(root.join("fuzz/seeds"))? {
            targets.push(entry?.file_name().to_string_lossy().into_owned());
        }
        targets.sort();
    }
    for target in targets {
        let corpus = format!("fuzz/corpus/{target}");
        std::fs::create_dir_all(root.join(&corpus))
            .with_context(|| format!("making the folder {corpus}"))?;
        let status = Command::new("cargo")
            .current_dir(root)
            .args(["+nightly", "fuzz", "run", &target, &corpus])
            .args([format!("fuzz/seeds/{target}"), "--".to_owned()])
            .arg(format!("-max_total_time={}", 60 * arguments.minutes))
            .arg(format!("-timeout={SECONDS}"))
            .arg(format!("-rss_limit_mb={MEGABYTES}"))
            .arg(format!("-max_len={BYTES}"))
            .arg("-print_final_stats=1")
            .status()
            .context("cannot start cargo")?;
        ensure!(
            status.success(),
            "{target} has a finding, or `cargo install cargo-fuzz` and a nightly compiler are missing; mend what it shows and add the input to fuzz/seeds/{target}"
        );
    }
    Ok(())
}
