//! The official `openai` package as the client, where a Python has it.

use std::path::Path;
use std::process::Command;

use tileinfer::runner::FakeOptions;

use crate::common::{Setup, live};

/// Runs `testdata/server/openai_client.py`, which checks what it is told as its users would. The same script
/// drives any server: `python openai_client.py http://127.0.0.1:8080/v1`.
#[test]
fn the_official_client_is_content() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let own = root.join("target/venv/bin/python");
    let has_packages = |python: &Path| {
        let probe = Command::new(python)
            .args(["-c", "import openai, jsonschema"])
            .output();
        probe.is_ok_and(|output| output.status.success())
    };
    let Some(python) = [own.as_path(), Path::new("python3")]
        .into_iter()
        .find(|python| has_packages(python))
    else {
        eprintln!("SKIPPED: no Python here has the packages openai and jsonschema");
        return;
    };
    let fake = FakeOptions {
        max_spans: 8,
        depth: 2,
        ..Setup::default().fake
    };
    let live = live(&Setup {
        fake,
        ..Setup::default()
    });
    let output = Command::new(python)
        .arg(root.join("testdata/server/openai_client.py"))
        .args([live.url("/v1"), "--schemas".to_owned(), "30".to_owned()])
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(
        output.status.success(),
        "{said}{}",
        String::from_utf8_lossy(&output.stderr)
    );
    assert!(said.contains("all checks passed"), "{said}");
    live.assert_whole();
}
