//! Pulls that go well: what is fetched, in which order, and what is left alone the next time.

use tileinfer::hub::{Hub, HubErrorKind, Silent};

use super::mock::{Server, git_sha1, sha256};
use super::*;

fn gets(world: &World) -> Vec<String> {
    let mut gets: Vec<String> = world
        .hub
        .seen()
        .into_iter()
        .filter(|seen| seen.method == "GET")
        .map(|seen| seen.path.rsplit('/').next().unwrap().to_owned())
        .collect();
    gets.sort();
    gets
}

#[test]
fn fetches_what_inference_needs_and_nothing_else() {
    let world = World::new();
    let events = Events::default();
    let snapshot = world.client().pull(REPO, None, &events).unwrap();

    assert_eq!(
        snapshot,
        world
            .cache()
            .join("models--org--model/snapshots")
            .join(FIRST)
    );
    assert_eq!(contents(&snapshot), expected(1));
    let wanted: Vec<String> = expected(1).into_keys().collect();
    assert_eq!(gets(&world), wanted);
    assert_eq!(leftovers(&world.cache()), Vec::<String>::new());

    let finished = events.finished.lock().unwrap().clone();
    assert_eq!(finished.len(), wanted.len());
    assert_eq!(finished.last().unwrap(), "config.json");
    let planned = events.planned.lock().unwrap().clone();
    for (path, bytes) in expected(1) {
        let file = planned.iter().find(|file| file.path == path).unwrap();
        assert_eq!(
            (file.size, file.have),
            (Some(bytes.len() as u64), 0),
            "{path}"
        );
        assert_eq!(
            events.positions.lock().unwrap()[&path],
            bytes.len() as u64,
            "{path}"
        );
    }
    assert_eq!(events.notes.lock().unwrap().len(), 0);
}

#[test]
fn the_cache_is_laid_out_as_python_does() {
    let world = World::new();
    let snapshot = world.pull().unwrap();
    let repo = world.cache().join("models--org--model");
    assert_eq!(
        std::fs::read_to_string(repo.join("refs/main")).unwrap(),
        FIRST
    );
    for (path, bytes) in expected(1) {
        let etag = if path.ends_with(".safetensors") {
            sha256(&bytes)
        } else {
            git_sha1(&bytes)
        };
        assert_eq!(
            std::fs::read(repo.join("blobs").join(&etag)).unwrap(),
            bytes
        );
        let link = std::fs::read_link(snapshot.join(&path)).unwrap();
        assert_eq!(link, PathBuf::from(format!("../../blobs/{etag}")));
    }
    for absent in ["special_tokens_map.json", "chat_template.jinja"] {
        let marker = repo.join(".no_exist").join(FIRST).join(absent);
        assert_eq!(std::fs::metadata(marker).unwrap().len(), 0);
    }
    let tag = std::fs::read_to_string(world.cache().join("CACHEDIR.TAG")).unwrap();
    assert!(tag.starts_with("Signature: 8a477f597d28d172789f06886806bc55\n"));
}

#[test]
fn a_second_pull_asks_one_question_and_a_pull_of_a_commit_none() {
    let world = World::new();
    let snapshot = world.pull().unwrap();
    world.hub.forget();
    assert_eq!(world.pull().unwrap(), snapshot);
    let seen = world.hub.seen();
    assert_eq!(seen.len(), 1);
    assert_eq!(
        (seen[0].method.as_str(), seen[0].path.as_str()),
        ("HEAD", "/org/model/resolve/main/config.json")
    );

    world.hub.forget();
    assert_eq!(
        world.client().pull(REPO, Some(FIRST), &Silent).unwrap(),
        snapshot
    );
    assert_eq!(world.hub.connections(), 0);
}

#[test]
fn a_new_commit_fetches_only_what_changed() {
    let world = World::new();
    let first = world.pull().unwrap();
    world.commit(SECOND, &["main"], 2);
    world.hub.forget();
    let second = world.pull().unwrap();
    assert_ne!(first, second);
    assert_eq!(contents(&second), expected(2));
    assert_eq!(contents(&first), expected(1));
    assert_eq!(gets(&world), [SHARDS[1]]);
    let main = world.cache().join("models--org--model/refs/main");
    assert_eq!(std::fs::read_to_string(main).unwrap(), SECOND);
}

#[test]
fn revisions_are_branches_tags_and_commits() {
    let world = World::new();
    world.commit(SECOND, &["v2"], 2);
    let client = world.client();
    let pulled = client.pull(REPO, Some("refs/pr/1"), &Silent).unwrap();
    assert!(pulled.ends_with(FIRST));
    let reference = world.cache().join("models--org--model/refs/refs/pr/1");
    assert_eq!(std::fs::read_to_string(reference).unwrap(), FIRST);
    assert!(
        client
            .pull(REPO, Some("v2"), &Silent)
            .unwrap()
            .ends_with(SECOND)
    );
    assert!(
        client
            .pull(REPO, Some(SECOND), &Silent)
            .unwrap()
            .ends_with(SECOND)
    );
    assert!(
        !world
            .cache()
            .join("models--org--model/refs")
            .join(SECOND)
            .exists()
    );
    assert_eq!(
        client.model_dir(REPO, Some("v2")).unwrap(),
        client.model_dir(REPO, Some(SECOND)).unwrap()
    );
    assert_eq!(kind(client.model_dir(REPO, None)), HubErrorKind::NotCached);
}

#[test]
fn a_single_weight_file_without_index() {
    let world = World::new();
    let weights = noise(1000, 3);
    world.hub.commit(
        "solo",
        FIRST,
        &["main"],
        &[
            ("config.json", b"{}"),
            ("model.safetensors", &weights),
            ("pytorch_model.bin", b"x"),
        ],
    );
    let snapshot = world.client().pull("solo", None, &Silent).unwrap();
    assert_eq!(
        contents(&snapshot).into_keys().collect::<Vec<_>>(),
        ["config.json", "model.safetensors"]
    );
    assert_eq!(world.client().model_dir("solo", None).unwrap(), snapshot);
}

#[test]
fn shards_in_folders_are_linked_upwards() {
    let world = World::new();
    let weights = noise(1000, 3);
    let index = br#"{"weight_map":{"a":"deep/er/x.safetensors"}}"#;
    world.hub.commit(
        "org/deep",
        FIRST,
        &["main"],
        &[
            ("config.json", b"{}"),
            ("model.safetensors.index.json", index),
            ("deep/er/x.safetensors", &weights),
        ],
    );
    let snapshot = world.client().pull("org/deep", None, &Silent).unwrap();
    let entry = snapshot.join("deep/er/x.safetensors");
    assert_eq!(std::fs::read(&entry).unwrap(), weights);
    assert!(
        std::fs::read_link(entry)
            .unwrap()
            .starts_with("../../../../blobs")
    );
}

#[test]
fn empty_files_are_files() {
    let world = World::new();
    world.hub.commit(
        REPO,
        SECOND,
        &["main"],
        &[
            ("config.json", b"{}"),
            ("model.safetensors", b"x"),
            ("chat_template.jinja", b""),
        ],
    );
    let snapshot = world.pull().unwrap();
    assert_eq!(contents(&snapshot)["chat_template.jinja"], b"");
}

#[test]
fn the_token_goes_to_the_hub_only() {
    let world = World::new();
    world
        .hub
        .gate(REPO, "hf_secret", 401, &[("X-Error-Code", "GatedRepo")]);
    let mut options = world.options();
    options.token = Some("hf_secret".to_owned());
    Hub::new(options)
        .unwrap()
        .pull(REPO, None, &Silent)
        .unwrap();
    let seen = world.hub.seen();
    assert!(seen.iter().any(|s| s.server == Server::Storage));
    for seen in seen {
        let expected = (seen.server == Server::Hub).then_some("Bearer hf_secret");
        assert_eq!(seen.header("authorization"), expected, "{seen:?}");
        assert_eq!(seen.header("accept-encoding"), Some("identity"));
        assert_eq!(seen.header("cookie"), None);
    }
}

#[test]
fn a_renamed_repository_is_followed() {
    let world = World::new();
    let head = "/org/model/resolve/main/config.json".to_owned();
    world.hub.fault(
        Server::Hub,
        "HEAD",
        "old/name/resolve/main/config.json",
        1,
        mock::Fault::Status(307, vec![("Location", head)]),
    );
    for path in expected(1).keys().chain([
        &"special_tokens_map.json".to_owned(),
        &"chat_template.jinja".to_owned(),
    ]) {
        world.hub.fault(
            Server::Hub,
            "HEAD",
            &format!("old/name/resolve/{FIRST}/{path}"),
            1,
            mock::Fault::Status(
                307,
                vec![("Location", format!("/org/model/resolve/{FIRST}/{path}"))],
            ),
        );
    }
    let snapshot = world.client().pull("old/name", None, &Silent).unwrap();
    assert_eq!(contents(&snapshot), expected(1));
    assert!(snapshot.starts_with(world.cache().join("models--old--name")));
}

#[test]
fn without_symlinks_files_are_moved_and_copied() {
    let world = World::new();
    let mut options = world.options();
    options.symlinks = false;
    let client = Hub::new(options).unwrap();
    let snapshot = client.pull(REPO, None, &Silent).unwrap();
    assert_eq!(contents(&snapshot), expected(1));
    for path in expected(1).into_keys() {
        assert!(
            std::fs::symlink_metadata(snapshot.join(path))
                .unwrap()
                .is_file()
        );
    }
    assert_eq!(std::fs::read_dir(world.blobs()).unwrap().count(), 0);
    assert_eq!(client.model_dir(REPO, None).unwrap(), snapshot);
    world.hub.forget();
    client.pull(REPO, None, &Silent).unwrap();
    assert_eq!(gets(&world), Vec::<String>::new());

    // A blob that another snapshot links to is copied, not moved away.
    let other = World {
        hub: world.hub.clone(),
        folder: tempfile::tempdir().unwrap(),
    };
    let first = other.pull().unwrap();
    world.commit(SECOND, &["main"], 2);
    let mut options = other.options();
    options.symlinks = false;
    let second = Hub::new(options)
        .unwrap()
        .pull(REPO, None, &Silent)
        .unwrap();
    assert_eq!(contents(&first), expected(1));
    assert_eq!(contents(&second), expected(2));
}
