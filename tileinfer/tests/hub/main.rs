//! The hub client against a hub on loopback: pulls, faults, refusals, the cache, other processes, Python.

mod cache;
mod child;
mod faults;
mod mock;
mod pull;
mod python;
mod remote;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::Duration;

use mock::MockHub;
use tileinfer::Error;
use tileinfer::hub::{Hub, HubErrorKind, HubOptions, PlannedFile, Progress};

const REPO: &str = "org/model";
const FIRST: &str = "1111111111111111111111111111111111111111";
const SECOND: &str = "2222222222222222222222222222222222222222";
const SHARDS: [&str; 2] = [
    "model-00001-of-00002.safetensors",
    "model-00002-of-00002.safetensors",
];
const SHARD_BYTES: usize = 700_000;

/// A hub with one sharded model at `main`, and an empty cache.
struct World {
    hub: MockHub,
    folder: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let world = World {
            hub: MockHub::start(),
            folder: tempfile::tempdir().unwrap(),
        };
        world.commit(FIRST, &["main", "refs/pr/1"], 1);
        world
    }

    /// A commit whose second shard depends on `seed`; everything else stays the same.
    fn commit(&self, commit: &str, revisions: &[&str], seed: u64) {
        let files = model(seed);
        let files: Vec<(&str, &[u8])> = files.iter().map(|(k, v)| (*k, v.as_slice())).collect();
        self.hub.commit(REPO, commit, revisions, &files);
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("hub")
    }

    /// Impatient settings.
    fn options(&self) -> HubOptions {
        let mut options = HubOptions::new(self.cache());
        options.endpoint = self.hub.url.clone();
        options.head_timeout = Duration::from_secs(5);
        options.read_timeout = Duration::from_secs(5);
        options.backoff = Duration::from_millis(5);
        options.max_wait = Duration::from_secs(2);
        options
    }

    fn client(&self) -> Hub {
        Hub::new(self.options()).unwrap()
    }

    fn blobs(&self) -> PathBuf {
        self.cache().join("models--org--model/blobs")
    }

    fn pull(&self) -> tileinfer::Result<PathBuf> {
        self.client().pull(REPO, None, &Events::default())
    }
}

/// The files of the model: those inference needs, and some it must not fetch.
fn model(seed: u64) -> Vec<(&'static str, Vec<u8>)> {
    let index = format!(
        r#"{{"metadata":{{}},"weight_map":{{"a":"{}","b":"{}","c":"{0}"}}}}"#,
        SHARDS[0], SHARDS[1]
    );
    vec![
        ("config.json", br#"{"model_type":"qwen3"}"#.to_vec()),
        ("generation_config.json", b"{}".to_vec()),
        ("tokenizer.json", noise(5000, 7)),
        ("tokenizer_config.json", b"{\"a\":1}".to_vec()),
        ("model.safetensors.index.json", index.into_bytes()),
        (SHARDS[0], noise(SHARD_BYTES, 0)),
        (SHARDS[1], noise(SHARD_BYTES, seed)),
        ("consolidated.safetensors", noise(1000, 9)),
        ("original/weights.pth", noise(1000, 10)),
        ("README.md", b"hello".to_vec()),
    ]
}

/// Bytes that differ everywhere and by seed.
fn noise(length: usize, seed: u64) -> Vec<u8> {
    let mut state = seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1;
    (0..length)
        .map(|_| {
            state ^= state << 13;
            state ^= state >> 7;
            state ^= state << 17;
            (state >> 32) as u8
        })
        .collect()
}

/// Names and contents of everything in a snapshot.
fn contents(snapshot: &Path) -> BTreeMap<String, Vec<u8>> {
    std::fs::read_dir(snapshot)
        .unwrap()
        .map(|entry| {
            let entry = entry.unwrap();
            let name = entry.file_name().into_string().unwrap();
            (name, std::fs::read(entry.path()).unwrap())
        })
        .collect()
}

/// What a pulled snapshot must look like.
fn expected(seed: u64) -> BTreeMap<String, Vec<u8>> {
    model(seed)
        .into_iter()
        .filter(|(path, _)| {
            ![
                "consolidated.safetensors",
                "original/weights.pth",
                "README.md",
            ]
            .contains(path)
        })
        .map(|(path, bytes)| (path.to_owned(), bytes))
        .collect()
}

/// Every file below a folder that is neither complete nor a lock: there must be none after a success.
fn leftovers(folder: &Path) -> Vec<String> {
    let mut found = Vec::new();
    let mut pending = vec![folder.to_owned()];
    while let Some(folder) = pending.pop() {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            let name = entry.file_name().into_string().unwrap();
            if entry.file_type().unwrap().is_dir() {
                pending.push(entry.path());
            } else if name.ends_with(".incomplete") || name.ends_with(".tmp") {
                found.push(name);
            }
        }
    }
    found
}

fn kind(result: tileinfer::Result<PathBuf>) -> HubErrorKind {
    match result {
        Err(Error::Hub { kind, .. }) => kind,
        other => panic!("{other:?}"),
    }
}

/// A progress that remembers.
#[derive(Default)]
struct Events {
    planned: Mutex<Vec<PlannedFile>>,
    positions: Mutex<BTreeMap<String, u64>>,
    finished: Mutex<Vec<String>>,
    notes: Mutex<Vec<String>>,
}

impl Progress for Events {
    fn planned(&self, files: &[PlannedFile]) {
        self.planned.lock().unwrap().extend_from_slice(files);
    }

    fn advanced(&self, path: &str, position: u64) {
        self.positions
            .lock()
            .unwrap()
            .insert(path.to_owned(), position);
    }

    fn finished(&self, path: &str) {
        self.finished.lock().unwrap().push(path.to_owned());
    }

    fn note(&self, message: &str) {
        self.notes.lock().unwrap().push(message.to_owned());
    }
}
