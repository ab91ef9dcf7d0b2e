//! The reference backend against transformers, on every golden model.

use std::path::Path;

use tileinfer::backend::ReferenceBackend;
use tileinfer::testing::golden_models;

#[test]
fn reference_matches_transformers() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden");
    golden_models(&ReferenceBackend::new, &golden, 5e-4);
}
