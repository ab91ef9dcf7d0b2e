//! The CPU backend with DFlash drafters against the reference implementation, on every instruction set the machine has.

use std::path::Path;
use std::sync::Arc;

use tileinfer::testing::{DFLASH_DRAFTERS, golden_dflash};
use tileinfer_cpu::{CpuBackend, Level, Pool};

#[test]
fn golden_drafters() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/dflash");
    let levels: Vec<Level> = Level::all().into_iter().collect();
    // Every drafter and every level, but not each with each.
    for (i, name) in DFLASH_DRAFTERS
        .into_iter()
        .cycle()
        .take(levels.len().max(4))
        .enumerate()
    {
        let level = levels[i % levels.len()];
        let pool = Arc::new(Pool::new(2));
        let make = |kind| CpuBackend::with_pool(kind, level, Arc::clone(&pool));
        println!("{name} on {}", level.name());
        golden_dflash(&make, &golden, name, 2e-3);
    }
}
