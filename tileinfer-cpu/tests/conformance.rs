//! The suite that every backend passes, on every instruction set of this machine.

use std::sync::Arc;

use tileinfer_cpu::{CpuBackend, Level, Pool};

#[test]
fn every_level_conforms() {
    let pool = Arc::new(Pool::new(2));
    for level in Level::all() {
        tileinfer::testing::conformance(&|kind| {
            CpuBackend::with_pool(kind, level, Arc::clone(&pool))
        });
    }
}
