//! The reference backend against transformers, on every golden model.

use std::path::Path;

use tileinfer::backend::ReferenceBackend;
use tileinfer::testing::{GOLDEN_MODELS, golden_model};

#[test]
fn reference_matches_transformers() {
    let golden = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden");
    for name in GOLDEN_MODELS {
        golden_model(&ReferenceBackend::new, &golden, name, 5e-4);
    }
}
