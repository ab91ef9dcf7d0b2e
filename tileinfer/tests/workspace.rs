//! The buffers of a step say when they have moved: a recording of a step holds their addresses.

use std::path::Path;

use tileinfer::backend::{ComputeType, ReferenceBackend, StepLayout};
use tileinfer::config::ModelConfig;
use tileinfer::model::{DecoderLM, LoadOptions, Workspace};
use tileinfer::weights::{Checkpoint, HostModel};

/// One span of `rows` rows, the first `wanted` of them wanted.
fn layout(rows: usize, wanted: usize) -> StepLayout {
    StepLayout {
        span_rows: vec![0, rows as u32],
        ids: vec![1; rows],
        positions: (0..rows as u32).collect(),
        slots: (0..rows as u32).collect(),
        tables: vec![0],
        table_width: 1,
        first_pages: vec![0],
        wanted: (0..wanted as u32).collect(),
        ..StepLayout::default()
    }
}

#[test]
fn buffers_move_when_more_rows_are_wanted_than_ever() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/models/qwen3");
    let config = ModelConfig::from_dir(&dir).unwrap();
    let host =
        HostModel::load(&config, &Checkpoint::open(&dir).unwrap(), ComputeType::F32).unwrap();
    let backend = ReferenceBackend::new(ComputeType::F32);
    let load = LoadOptions::new(64);
    let model = DecoderLM::load(&backend, &config, &host, &load, &mut |_, _| ()).unwrap();
    let mut workspace = Workspace::new(&backend, &model, 64, 1, 1, &[]).unwrap();
    let moves: Vec<usize> = [
        (1, 1),
        (64, 16),
        (1, 1),
        (17, 17),
        (17, 17),
        (64, 3),
        (18, 18),
        (5, 5),
    ]
    .into_iter()
    .map(|(rows, wanted)| {
        let layout = layout(rows, wanted);
        workspace.begin(&backend, &model, &layout, None).unwrap();
        workspace.moves()
    })
    .collect();
    assert_eq!(moves, [0, 0, 0, 1, 1, 1, 2, 2]);
}
