//! The official packages of both APIs as clients, where a Python has them: what any model owes, two hundred schemas
//! among it. The same scripts drive any server; the command's tests let them drive a real model.

use std::path::Path;
use std::process::Command;

use tileinfer::runner::FakeOptions;

use crate::common::{Live, Setup, live};

/// A script of `testdata/server`, which checks what it is told as its users would.
fn is_content(packages: &str, script: &str, arguments: impl Fn(&Live) -> Vec<String>) {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let own = root.join("target/venv/bin/python");
    let has_packages = |python: &Path| {
        let import = format!("import {packages}");
        let probe = Command::new(python).args(["-c", &import]).output();
        probe.is_ok_and(|output| output.status.success())
    };
    let mut pythons = [own.as_path(), Path::new("python3")].into_iter();
    let Some(python) = pythons.find(|python| has_packages(python)) else {
        eprintln!("SKIPPED: no Python here has the packages {packages}");
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
        .arg(root.join("testdata/server").join(script))
        .args(arguments(&live))
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

#[test]
fn the_official_openai_client_is_content() {
    let arguments = |live: &Live| vec![live.url("/v1"), "--schemas".to_owned(), "200".to_owned()];
    is_content("openai, jsonschema", "openai_client.py", arguments);
}

#[test]
fn the_official_anthropic_client_is_content() {
    let arguments = |live: &Live| vec![live.url("")];
    is_content("anthropic, jsonschema", "anthropic_client.py", arguments);
}
