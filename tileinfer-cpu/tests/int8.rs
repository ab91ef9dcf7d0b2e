//! INT8 by the reference numbers, on every instruction set of this machine.

use std::path::Path;
use std::sync::Arc;

use tileinfer::testing::{SAME_TEXT_MODELS, golden_int8, int8_activations, same_text_model_int8};
use tileinfer_cpu::{CpuBackend, Level, Pool};

fn golden() -> std::path::PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden")
}

#[test]
fn every_level_keeps_to_the_reference_numbers() {
    let pool = Arc::new(Pool::new(2));
    for level in Level::all() {
        let make = |kind| CpuBackend::with_pool(kind, level, Arc::clone(&pool));
        golden_int8(&make, &golden().join("int8"));
        int8_activations(&make);
    }
}

#[test]
fn same_text_with_int8_weights_and_cache() {
    let levels: Vec<Level> = Level::all().into_iter().collect();
    // Every model and every level, but not each with each; the levels in another turn than without int8.
    for (i, name) in SAME_TEXT_MODELS.into_iter().enumerate() {
        let level = levels[(i + 1) % levels.len()];
        let [one, three] = [1, 3].map(|threads| {
            let pool = Arc::new(Pool::new(threads));
            let make = |kind| CpuBackend::with_pool(kind, level, Arc::clone(&pool));
            same_text_model_int8(&make, &golden(), name)
        });
        let level = level.name();
        assert_eq!(one, three, "{name} on {level}: one thread and three");
    }
}
