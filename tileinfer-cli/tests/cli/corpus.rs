//! The inputs that the fuzzer found worth keeping, and those that once broke something, as ordinary tests: what is
//! done with them is in `fuzz/src/targets.rs`.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use super::targets::TARGETS;

/// No input may keep us longer, even on a busy machine: hostile ones are to be given up on.
const PATIENCE: Duration = Duration::from_secs(60);

fn seeds(target: &str) -> Vec<PathBuf> {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../fuzz/seeds")
        .join(target);
    let entries = fs::read_dir(&folder).unwrap_or_else(|error| panic!("{folder:?}: {error}"));
    let mut files: Vec<PathBuf> = entries.map(|entry| entry.unwrap().path()).collect();
    files.sort();
    files
}

#[test]
fn kept_inputs_break_nothing() {
    for (target, body) in TARGETS {
        let files = seeds(target);
        assert!(files.len() >= 5, "{target} has {} inputs", files.len());
        for file in files {
            let bytes = fs::read(&file).unwrap();
            let start = Instant::now();
            let result = std::panic::catch_unwind(|| body(&bytes));
            assert!(result.is_ok(), "{} panics", file.display());
            let taken = start.elapsed();
            assert!(taken < PATIENCE, "{} takes {taken:?}", file.display());
        }
    }
}

/// What is cut off anywhere is what a broken download leaves.
#[test]
fn inputs_that_are_cut_short_break_nothing() {
    for (target, body) in TARGETS {
        for file in seeds(target) {
            let bytes = fs::read(&file).unwrap();
            // Templates that work up to their limits take long, and are no different when cut.
            let points = if target == "template" { 3 } else { 16 };
            for point in 1..points {
                body(&bytes[..bytes.len() * point / points]);
            }
        }
    }
}
