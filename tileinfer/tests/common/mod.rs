//! Test data: tokenizers unpacked once per test binary, and lines of golden files.

use std::{
    fs::{self, File},
    io::BufReader,
    path::{Path, PathBuf},
    sync::LazyLock,
};

use serde_json::Value;
use tempfile::TempDir;

pub(crate) fn testdata() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata")
}

/// The folders of `testdata/tokenizers` with `tokenizer.json` unpacked.
static UNPACKED: LazyLock<TempDir> = LazyLock::new(|| {
    let target = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(testdata().join("tokenizers")).unwrap() {
        let folder = entry.unwrap().path();
        if !folder.is_dir() {
            continue;
        }
        let copy = target.path().join(folder.file_name().unwrap());
        fs::create_dir(&copy).unwrap();
        for file in fs::read_dir(&folder).unwrap() {
            let file = file.unwrap().path();
            if file.extension().is_some_and(|extension| extension == "xz") {
                let mut packed = BufReader::new(File::open(&file).unwrap());
                let mut plain = File::create(copy.join(file.file_stem().unwrap())).unwrap();
                lzma_rs::xz_decompress(&mut packed, &mut plain).unwrap();
            } else {
                fs::copy(&file, copy.join(file.file_name().unwrap())).unwrap();
            }
        }
    }
    target
});

/// The directory of the tokenizer called `name`; `None`, with a word about it, where it has to be
/// fetched and is not there.
pub(crate) fn model_dir(name: &str) -> Option<PathBuf> {
    let shipped = UNPACKED.path().join(name);
    let fetched = testdata().join("fetched").join(name);
    let found = [shipped, fetched].into_iter().find(|dir| dir.is_dir());
    if found.is_none() {
        eprintln!(
            "SKIPPED {name}: its licence forbids a copy here; fetch it into testdata/fetched/{name}"
        );
    }
    found
}

/// The records of a golden file.
pub(crate) fn golden(name: &str, kind: &str) -> Vec<Value> {
    let path = testdata().join(format!("tokenizer-golden/{name}.{kind}.jsonl"));
    let text = fs::read_to_string(&path).unwrap();
    let records: Vec<Value> = text
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    assert!(records.len() > 20, "{} is too short", path.display());
    records
}
