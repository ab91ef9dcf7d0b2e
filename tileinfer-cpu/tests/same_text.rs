//! The same text on every instruction set of this machine, with any number of threads.

use std::path::Path;
use std::sync::Arc;

use tileinfer::testing::{SAME_TEXT_MODELS, same_text_model};
use tileinfer_cpu::{CpuBackend, Level, Pool};

#[test]
fn same_text_on_every_level_with_any_threads() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden");
    let levels: Vec<Level> = Level::all().into_iter().collect();
    // Every model and every level, but not each with each.
    for (i, name) in SAME_TEXT_MODELS.into_iter().enumerate() {
        let level = levels[i % levels.len()];
        let [one, three] = [1, 3].map(|threads| {
            let pool = Arc::new(Pool::new(threads));
            let make = |kind| CpuBackend::with_pool(kind, level, Arc::clone(&pool));
            same_text_model(&make, &golden, name)
        });
        assert_eq!(
            one,
            three,
            "{name} on {}: one thread and three",
            level.name()
        );
    }
}
