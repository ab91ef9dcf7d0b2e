//! INT8 by the reference numbers: rounding, smoothing, and the reference backend's ops on what is rounded.

use std::path::Path;

use tileinfer::backend::ReferenceBackend;
use tileinfer::testing::{golden_int8, int8_activations};

#[test]
fn reference_numbers() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/int8");
    golden_int8(&ReferenceBackend::new, &folder);
}

#[test]
fn outliers_stay_within_the_bound() {
    int8_activations(&ReferenceBackend::new);
}
