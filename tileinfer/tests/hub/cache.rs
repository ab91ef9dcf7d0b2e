//! The cache: found without network, listed, removed, read-only, of other programs' making, and full.

use tileinfer::hub::{CachedModel, Hub, HubErrorKind, Silent};

use super::mock::{Fault, Server, sha256};
use super::*;

fn list(world: &World) -> Vec<CachedModel> {
    world.client().list().unwrap()
}

#[test]
fn a_model_is_a_directory_or_an_id_in_the_cache() {
    let world = World::new();
    let client = world.client();
    let snapshot = world.pull().unwrap();
    assert_eq!(client.model_dir(REPO, None).unwrap(), snapshot);
    let folder = snapshot.to_str().unwrap();
    assert_eq!(client.model_dir(folder, None).unwrap(), snapshot);
    assert_eq!(
        client.cached_file(REPO, None, "tokenizer.json").unwrap(),
        Some(snapshot.join("tokenizer.json"))
    );
    assert_eq!(client.cached_file(REPO, None, "README.md").unwrap(), None);
    assert_eq!(
        client.cached_file("org/none", None, "README.md").unwrap(),
        None
    );

    let config = snapshot.join("config.json");
    let gguf = snapshot.join("x.gguf");
    let cases = [
        (folder, Some("main")),
        (config.to_str().unwrap(), None),
        (gguf.to_str().unwrap(), None),
        ("./no/such/folder", None),
        ("", None),
        ("org/model", Some("../main")),
    ];
    for (model, revision) in cases {
        let error = client.model_dir(model, revision).unwrap_err();
        assert!(matches!(error, Error::Usage(_)), "{model}: {error}");
    }
    assert_eq!(
        kind(client.model_dir("org/none", None)),
        HubErrorKind::NotCached
    );
}

#[test]
fn an_incomplete_snapshot_is_not_a_model() {
    let world = World::new();
    let snapshot = world.pull().unwrap();
    for path in ["config.json", SHARDS[0], SHARDS[1]] {
        // A link whose blob is gone is as bad as no link.
        let link = snapshot.join(path);
        let blob = std::fs::canonicalize(&link).unwrap();
        let away = blob.with_extension("away");
        std::fs::rename(&blob, &away).unwrap();
        let error = world
            .client()
            .model_dir(REPO, None)
            .unwrap_err()
            .to_string();
        assert!(error.contains(path) && error.contains("pull"), "{error}");
        assert!(!list(&world)[0].complete);
        std::fs::rename(&away, &blob).unwrap();
    }
    // And a pull repairs it.
    let link = snapshot.join(SHARDS[0]);
    std::fs::remove_file(std::fs::canonicalize(&link).unwrap()).unwrap();
    assert_eq!(world.pull().unwrap(), snapshot);
    assert_eq!(contents(&snapshot), expected(1));
}

#[test]
fn garbage_in_the_cache_is_ignored() {
    let world = World::new();
    let snapshot = world.pull().unwrap();
    let cache = world.cache();
    for folder in [
        "models--",
        "models--a--b--c--d",
        "models--..--x",
        "datasets--a--b",
        "other",
        "models--org--empty/snapshots/x",
    ] {
        std::fs::create_dir_all(cache.join(folder)).unwrap();
    }
    std::fs::write(cache.join("models--file"), "x").unwrap();
    let refs = cache.join("models--org--model/refs");
    std::fs::write(refs.join("odd"), "not a commit").unwrap();
    std::fs::write(refs.join("padded"), format!("{FIRST}\n")).unwrap();
    assert_eq!(list(&world).len(), 1);
    assert_eq!(
        kind(world.client().model_dir(REPO, Some("odd"))),
        HubErrorKind::NotCached
    );
    assert_eq!(
        world.client().model_dir(REPO, Some("padded")).unwrap(),
        snapshot
    );
}

#[test]
fn lists_models_with_their_sizes() {
    let world = World::new();
    assert_eq!(list(&world), []);
    world.pull().unwrap();
    world.commit(SECOND, &["v2"], 2);
    world.client().pull(REPO, Some(SECOND), &Silent).unwrap();
    world.hub.commit(
        "solo",
        FIRST,
        &["main"],
        &[("config.json", b"{}"), ("model.safetensors", b"x")],
    );
    world.client().pull("solo", None, &Silent).unwrap();

    let models = list(&world);
    let names: Vec<(&str, &str, &str)> = models
        .iter()
        .map(|m| (m.id.as_str(), m.revision.as_str(), m.commit.as_str()))
        .collect();
    assert_eq!(
        names,
        [
            (REPO, "main", FIRST),
            (REPO, SECOND, SECOND),
            ("solo", "main", FIRST)
        ]
    );
    let size: usize = expected(1).values().map(Vec::len).sum();
    assert_eq!(models[0].size_bytes, size as u64);
    assert_eq!(models[0].files, expected(1).into_keys().collect::<Vec<_>>());
    assert!(models.iter().all(|model| model.complete));
    let json = serde_json::to_value(&models[2]).unwrap();
    let keys: Vec<&String> = json.as_object().unwrap().keys().collect();
    assert_eq!(keys, ["id", "revision", "commit", "size_bytes", "path"]);
}

#[test]
fn removes_all_of_a_model() {
    let world = World::new();
    world.pull().unwrap();
    world.hub.commit(
        "solo",
        FIRST,
        &["main"],
        &[("config.json", b"{}"), ("model.safetensors", b"x")],
    );
    world.client().pull("solo", None, &Silent).unwrap();
    let removed = world.client().remove(REPO, None).unwrap();
    assert_eq!(
        (removed.commits, removed.refs),
        (vec![FIRST.to_owned()], vec!["main".to_owned()])
    );
    let size: usize = expected(1).values().map(Vec::len).sum();
    assert!(removed.freed_bytes >= size as u64);
    assert!(!world.cache().join("models--org--model").exists());
    assert!(!world.cache().join(".locks/models--org--model").exists());
    assert_eq!(list(&world).len(), 1);
    let again = world.client().remove(REPO, None).unwrap_err();
    assert!(matches!(
        again,
        Error::Hub {
            kind: HubErrorKind::NotCached,
            ..
        }
    ));
    for id in ["../hub", "..", "/", ""] {
        assert!(
            matches!(world.client().remove(id, None), Err(Error::Usage(_))),
            "{id}"
        );
    }
}

#[test]
fn removes_one_revision_and_keeps_shared_blobs() {
    let world = World::new();
    let client = world.client();
    let first = world.pull().unwrap();
    world.commit(SECOND, &["main", "v2"], 2);
    let second = world.pull().unwrap();
    client.pull(REPO, Some("v2"), &Silent).unwrap();

    // `v2` and `main` stand for the same commit: only the name goes.
    let removed = client.remove(REPO, Some("v2")).unwrap();
    assert_eq!(
        (removed.commits.len(), removed.refs),
        (0, vec!["v2".to_owned()])
    );
    assert_eq!(contents(&second), expected(2));

    let removed = client.remove(REPO, Some(FIRST)).unwrap();
    assert_eq!(removed.commits, [FIRST]);
    assert_eq!(removed.freed_bytes, SHARD_BYTES as u64);
    assert!(!first.exists());
    assert!(
        !world
            .cache()
            .join("models--org--model/.no_exist")
            .join(FIRST)
            .exists()
    );
    assert_eq!(contents(&second), expected(2));
    assert!(!world.blobs().join(sha256(&noise(SHARD_BYTES, 1))).exists());

    for absent in [FIRST, "v2", "v9"] {
        let error = client.remove(REPO, Some(absent)).unwrap_err();
        assert!(error.to_string().contains("main"), "{error}");
    }
    // The last revision takes the rest along.
    client.remove(REPO, Some("main")).unwrap();
    assert!(!world.cache().join("models--org--model").exists());
}

#[test]
fn a_store_shared_by_all_models_is_read_and_left_alone() {
    let world = World::new();
    let bytes = noise(SHARD_BYTES, 0);
    let store = world.cache().join("blobs/ab");
    std::fs::create_dir_all(&store).unwrap();
    std::fs::create_dir_all(world.blobs()).unwrap();
    std::fs::write(store.join("abc"), &bytes).unwrap();
    symlink("../../blobs/ab/abc", &world.blobs().join(sha256(&bytes)));
    let snapshot = world.pull().unwrap();
    assert_eq!(contents(&snapshot), expected(1));
    assert!(
        !world
            .hub
            .seen()
            .iter()
            .any(|s| s.method == "GET" && s.path.ends_with(SHARDS[0]))
    );
    world.client().remove(REPO, None).unwrap();
    assert_eq!(std::fs::read(store.join("abc")).unwrap(), bytes);
}

#[cfg(unix)]
fn symlink(target: &str, at: &Path) {
    std::os::unix::fs::symlink(target, at).unwrap();
}

/// Root may write anywhere, so a folder is made impossible to write by a file in its place.
#[test]
fn an_unwritable_cache_is_named() {
    let world = World::new();
    std::fs::write(world.cache(), "a file").unwrap();
    let error = world.pull().unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    assert!(error.to_string().contains("models--org--model"), "{error}");

    std::fs::remove_file(world.cache()).unwrap();
    std::fs::create_dir_all(world.cache()).unwrap();
    std::fs::write(world.cache().join(".locks"), "a file").unwrap();
    let error = world.pull().unwrap_err();
    assert!(error.to_string().contains(".locks"), "{error}");
}

/// Everything is there, nothing can be written: no refs, no markers, no locks.
#[test]
fn a_read_only_cache_works() {
    let world = World::new();
    let snapshot = world.pull().unwrap();
    let repo = world.cache().join("models--org--model");
    for name in ["refs", ".no_exist"] {
        std::fs::remove_dir_all(repo.join(name)).unwrap();
        std::fs::write(repo.join(name), "").unwrap();
    }
    let events = Events::default();
    assert_eq!(world.client().pull(REPO, None, &events).unwrap(), snapshot);
    assert!(events.notes.lock().unwrap()[0].contains("refs"));
    assert_eq!(
        world.client().model_dir(REPO, Some(FIRST)).unwrap(),
        snapshot
    );

    // The same through the kernel, where mounting is allowed.
    let world = World::new();
    let snapshot = world.pull().unwrap();
    let Some(_mount) = Mount::new("-o bind,ro", Some(&world.cache()), &world.cache()) else {
        eprintln!("SKIPPED the second half: mounting is not permitted here");
        return;
    };
    assert!(std::fs::write(world.cache().join("x"), "x").is_err());
    assert_eq!(world.client().pull(REPO, None, &Silent).unwrap(), snapshot);
    assert_eq!(
        world.client().pull(REPO, Some(FIRST), &Silent).unwrap(),
        snapshot
    );
    assert_eq!(world.client().model_dir(REPO, None).unwrap(), snapshot);
    world.commit(SECOND, &["main"], 2);
    let error = world.pull().unwrap_err();
    assert!(matches!(error, Error::Io { .. }), "{error}");
    assert!(world.client().remove(REPO, None).is_err());
    assert_eq!(contents(&snapshot), expected(1));
}

/// A full disk, where mounting is allowed; `child.rs` has a test that needs no mount.
#[test]
fn a_full_disk_is_told_before_and_while_downloading() {
    let world = World::new();
    std::fs::create_dir_all(world.cache()).unwrap();
    let Some(_mount) = Mount::new("-t tmpfs -o size=1m", None, &world.cache()) else {
        eprintln!("SKIPPED: mounting is not permitted here");
        return;
    };
    let error = world.pull().unwrap_err();
    assert!(error.to_string().contains("more bytes"), "{error}");
    assert_eq!(kind(Err(error)), HubErrorKind::DiskFull);
    assert!(
        !world
            .hub
            .seen()
            .iter()
            .any(|seen| seen.path.ends_with(".safetensors") && seen.method == "GET")
    );

    // Storage that does not say how much is coming.
    for shard in SHARDS {
        world.hub.fault(
            Server::Hub,
            "HEAD",
            shard,
            99,
            Fault::Without("X-Linked-Size"),
        );
    }
    assert_eq!(kind(world.pull()), HubErrorKind::DiskFull);
    assert_eq!(
        kind(world.client().model_dir(REPO, None)),
        HubErrorKind::NotCached
    );
}

/// A mount that is taken away again.
struct Mount(PathBuf);

impl Mount {
    fn new(options: &str, source: Option<&Path>, at: &Path) -> Option<Self> {
        let status = std::process::Command::new("mount")
            .args(options.split(' '))
            .arg(source.unwrap_or(Path::new("tileinfer-test")))
            .arg(at)
            .stderr(std::process::Stdio::null())
            .status();
        status
            .is_ok_and(|s| s.success())
            .then(|| Mount(at.to_owned()))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = std::process::Command::new("umount")
            .arg("-l")
            .arg(&self.0)
            .status();
    }
}

#[test]
fn threads_of_one_process_do_not_disturb_each_other() {
    let world = World::new();
    let pause = Duration::from_millis(5);
    world.hub.fault(
        Server::Storage,
        "GET",
        SHARDS[0],
        1,
        Fault::Trickle(50_000, pause),
    );
    let snapshots: Vec<PathBuf> = std::thread::scope(|scope| {
        let pulls: Vec<_> = (0..4)
            .map(|_| scope.spawn(|| world.pull().unwrap()))
            .collect();
        pulls.into_iter().map(|pull| pull.join().unwrap()).collect()
    });
    assert!(snapshots.iter().all(|s| contents(s) == expected(1)));
    let gets = world
        .hub
        .seen()
        .iter()
        .filter(|s| s.server == Server::Storage)
        .count();
    assert_eq!(gets, 2, "every shard is downloaded once");
    assert_eq!(leftovers(&world.cache()), Vec::<String>::new());
}

#[test]
fn a_hub_that_gives_no_hash_is_noted() {
    let world = World::new();
    world.hub.fault(
        Server::Hub,
        "HEAD",
        "tokenizer.json",
        1,
        Fault::With("ETag", "\"some-mirror-7\"".to_owned()),
    );
    let events = Events::default();
    let snapshot = world.client().pull(REPO, None, &events).unwrap();
    assert_eq!(contents(&snapshot), expected(1));
    assert!(
        events
            .notes
            .lock()
            .unwrap()
            .iter()
            .any(|note| note.contains("tokenizer.json"))
    );
    assert!(world.blobs().join("some-mirror-7").is_file());
}

#[test]
fn bad_settings_are_usage_errors() {
    let world = World::new();
    for endpoint in ["", "hub", "ftp://hub", "http://user:pw@hub"] {
        let mut options = world.options();
        options.endpoint = endpoint.to_owned();
        assert!(
            matches!(Hub::new(options), Err(Error::Usage(_))),
            "{endpoint}"
        );
    }
    let mut options = world.options();
    options.token = Some("a\nb".to_owned());
    assert!(matches!(Hub::new(options), Err(Error::Usage(_))));
    let mut options = world.options();
    options.ca_bundle = Some(world.folder.path().join("none.pem"));
    assert!(matches!(Hub::new(options), Err(Error::Io { .. })));
}

#[test]
fn a_hub_can_be_shared_between_threads() {
    fn shared<T: Send + Sync>() {}
    shared::<Hub>();
}
