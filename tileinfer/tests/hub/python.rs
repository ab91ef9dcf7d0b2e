//! The cache shared with Python's `huggingface_hub`, in both directions. Needs a Python with that package in
//! `target/venv`, and says so where there is none.

use std::process::Command;

use tileinfer::hub::{Hub, HubErrorKind, Silent};

use super::*;

/// Runs `interop.py`; `None`, with a line on stderr, if there is no Python for it.
fn python(world: &World, arguments: &[&str]) -> Option<serde_json::Value> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
    let program = root.join("target/venv/bin/python");
    let found = Command::new(&program)
        .args(["-c", "import huggingface_hub"])
        .output();
    if !found.is_ok_and(|output| output.status.success()) {
        eprintln!(
            "SKIPPED: {} with huggingface_hub is not there; make it with `python3 -m venv target/venv && target/venv/bin/pip install huggingface_hub`",
            program.display()
        );
        return None;
    }
    let output = Command::new(program)
        .arg(root.join("testdata/hub/interop.py"))
        .args([arguments[0], world.cache().to_str().unwrap()])
        .args(&arguments[1..])
        .env("HF_ENDPOINT", &world.hub.url)
        .env("HF_HOME", world.folder.path().join("home"))
        .env("NO_PROXY", "127.0.0.1")
        .env_remove("HF_HUB_OFFLINE")
        .env_remove("HF_TOKEN")
        .output()
        .unwrap();
    assert!(
        output.status.success(),
        "{}",
        String::from_utf8_lossy(&output.stderr)
    );
    let text = String::from_utf8(output.stdout).unwrap();
    Some(serde_json::from_str(text.lines().last().unwrap()).unwrap())
}

/// Bodies of files sent since the last `forget`.
fn downloads(world: &World) -> usize {
    world
        .hub
        .seen()
        .iter()
        .filter(|s| s.method == "GET" && !s.path.starts_with("/api/"))
        .count()
}

#[test]
fn python_reads_what_we_pulled() {
    let world = World::new();
    let snapshot = world.pull().unwrap();
    world.hub.forget();
    let Some(read) = python(&world, &["read", REPO]) else {
        return;
    };
    assert_eq!(world.hub.connections(), 0);
    assert_eq!(read["folder"], snapshot.to_str().unwrap());
    assert_eq!(
        read["config"],
        snapshot.join("config.json").to_str().unwrap()
    );
    assert_eq!(read["absence_known"], true);
    assert_eq!(read["warnings"], serde_json::json!([]));
    let size: usize = expected(1).values().map(Vec::len).sum();
    let files: Vec<String> = expected(1).into_keys().collect();
    assert_eq!(
        read["repos"],
        serde_json::json!([{"id": REPO, "size": size, "refs": ["main"], "commits": [FIRST], "files": files}])
    );

    // And finds nothing left to download.
    let pulled = python(&world, &["pull", REPO]).unwrap();
    assert_eq!(pulled["folder"], snapshot.to_str().unwrap());
    assert_eq!(downloads(&world), 0);
    assert_eq!(contents(&snapshot), expected(1));

    python(&world, &["remove", REPO, FIRST]).unwrap();
    assert_eq!(world.client().list().unwrap(), []);
    assert_eq!(
        kind(world.client().model_dir(REPO, None)),
        HubErrorKind::NotCached
    );
}

#[test]
fn we_read_what_python_pulled() {
    let world = World::new();
    for extra in [&[][..], &["--no-symlinks"]] {
        let arguments: Vec<&str> = ["pull", REPO].iter().chain(extra).copied().collect();
        let Some(pulled) = python(&world, &arguments) else {
            return;
        };
        let client = world.client();
        let snapshot = client.model_dir(REPO, None).unwrap();
        assert_eq!(pulled["folder"], snapshot.to_str().unwrap());
        assert_eq!(contents(&snapshot), expected(1));
        world.hub.forget();
        assert_eq!(client.pull(REPO, None, &Silent).unwrap(), snapshot);
        assert_eq!(downloads(&world), 0);
        let list = client.list().unwrap();
        assert_eq!(
            (list.len(), list[0].revision.as_str(), list[0].complete),
            (1, "main", true)
        );

        // A new commit shares Python's blobs.
        let removed = client.remove(REPO, None).unwrap();
        assert_eq!(removed.commits, [FIRST]);
        assert_eq!(client.list().unwrap(), []);
    }
}

#[test]
fn python_and_we_take_turns() {
    let world = World::new();
    if python(&world, &["pull", REPO]).is_none() {
        return;
    }
    world.commit(SECOND, &["main"], 2);
    world.hub.forget();
    let second = world.pull().unwrap();
    assert_eq!(downloads(&world), 1, "only the shard that changed");
    assert_eq!(contents(&second), expected(2));

    world.commit("3333333333333333333333333333333333333333", &["main"], 3);
    world.hub.forget();
    let third = python(&world, &["pull", REPO]).unwrap();
    assert_eq!(downloads(&world), 1, "only the shard that changed");
    let third = PathBuf::from(third["folder"].as_str().unwrap());
    assert_eq!(contents(&third), expected(3));
    assert_eq!(world.client().model_dir(REPO, None).unwrap(), third);
    world.client().remove(REPO, Some(SECOND)).unwrap();
    assert_eq!(contents(&third), expected(3));

    let mut options = world.options();
    options.symlinks = false;
    let plain = World {
        hub: world.hub.clone(),
        folder: tempfile::tempdir().unwrap(),
    };
    options.cache = plain.cache();
    let snapshot = Hub::new(options)
        .unwrap()
        .pull(REPO, None, &Silent)
        .unwrap();
    let read = python(&plain, &["read", REPO]).unwrap();
    assert_eq!(read["folder"], snapshot.to_str().unwrap());
    assert_eq!(read["warnings"], serde_json::json!([]));
}
