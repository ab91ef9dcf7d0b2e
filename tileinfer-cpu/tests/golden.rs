//! The CPU backend against transformers: the small models on every instruction set the machine has, and the
//! real one.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use tileinfer::testing::{golden_models, golden_smollm2};
use tileinfer_cpu::{CpuBackend, Level, Pool};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

#[test]
fn golden_models_on_every_level() {
    for level in Level::all() {
        println!("{}", level.name());
        let pool = Arc::new(Pool::new(2));
        let make = |kind| CpuBackend::with_pool(kind, level, pool.clone());
        golden_models(&make, &root().join("testdata/golden"), 5e-4);
    }
}

#[test]
fn smollm2_answers() {
    let dir = root().join("models/smollm2-135m-instruct");
    if !dir.join("model.safetensors").exists() {
        assert!(
            std::env::var_os("CI").is_none(),
            "the real model has to be there in CI"
        );
        println!(
            "SKIPPED: there is no {}; cargo xtask demo-model makes it",
            dir.display()
        );
        return;
    }
    golden_smollm2(
        &|kind| CpuBackend::new(kind, 2),
        &root().join("testdata/golden"),
        &dir,
    );
}
