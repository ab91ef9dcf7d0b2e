//! Pulls that go wrong: every fault has its outcome, and nothing half-written is ever taken for a file.

use proptest::prelude::*;
use tileinfer::hub::{Hub, HubErrorKind, Silent};

use super::mock::{Fault, Server, sha256};
use super::*;

/// Body bytes that the storage has sent for a file.
fn sent(world: &World, path: &str) -> usize {
    // The server notes a count after the last byte has left: give it a moment.
    std::thread::sleep(Duration::from_millis(50));
    world
        .hub
        .seen()
        .iter()
        .filter(|seen| seen.server == Server::Storage && seen.path.ends_with(path))
        .map(|seen| seen.sent)
        .sum()
}

/// The pull succeeds in spite of the faults, and everything is right.
fn survives(world: &World) {
    let snapshot = world.pull().unwrap();
    assert_eq!(contents(&snapshot), expected(1));
    assert_eq!(leftovers(&world.cache()), Vec::<String>::new());
}

/// The pull fails with this kind, nothing looks like a model, and once the fault is gone a pull works.
fn fails(world: &World, expected_kind: &HubErrorKind) -> String {
    let error = world.pull().unwrap_err();
    let message = error.to_string();
    assert_eq!(kind(Err(error)), *expected_kind, "{message}");
    let client = world.client();
    assert_eq!(kind(client.model_dir(REPO, None)), HubErrorKind::NotCached);
    assert!(!world.cache().join("models--org--model/refs/main").exists());
    world.hub.no_faults();
    survives(world);
    message
}

#[test]
fn a_cut_connection_is_resumed_in_the_same_run() {
    let world = World::new();
    for cut in [1000, 300_000, 50_000] {
        world
            .hub
            .fault(Server::Storage, "GET", SHARDS[0], 1, Fault::Cut(cut));
    }
    survives(&world);
    assert_eq!(sent(&world, SHARDS[0]), SHARD_BYTES);
    let ranges: Vec<Option<String>> = world
        .hub
        .seen()
        .iter()
        .filter(|seen| seen.server == Server::Storage && seen.path.ends_with(SHARDS[0]))
        .map(|seen| seen.header("range").map(str::to_owned))
        .collect();
    let range = |start: usize| Some(format!("bytes={start}-"));
    assert_eq!(ranges, [None, range(1000), range(301_000), range(351_000)]);
}

#[test]
fn progress_resets_the_count_of_attempts() {
    let world = World::new();
    world
        .hub
        .fault(Server::Storage, "GET", SHARDS[0], 12, Fault::Cut(20_000));
    survives(&world);
    assert_eq!(sent(&world, SHARDS[0]), SHARD_BYTES);
}

#[test]
fn a_pull_is_resumed_in_the_next_run() {
    let world = World::new();
    world
        .hub
        .fault(Server::Storage, "GET", SHARDS[0], 1, Fault::Cut(400_000));
    world
        .hub
        .fault(Server::Storage, "GET", SHARDS[0], 4, Fault::Cut(0));
    assert_eq!(kind(world.pull()), HubErrorKind::Unreachable);
    let partial = world
        .blobs()
        .join(format!("{}.incomplete", sha256(&noise(SHARD_BYTES, 0))));
    assert_eq!(std::fs::metadata(&partial).unwrap().len(), 400_000);
    assert_eq!(sent(&world, SHARDS[0]), 400_000);

    world.hub.no_faults();
    world.hub.forget();
    let events = Events::default();
    let snapshot = world.client().pull(REPO, None, &events).unwrap();
    assert_eq!(contents(&snapshot), expected(1));
    assert_eq!(sent(&world, SHARDS[0]), SHARD_BYTES - 400_000);
    let planned = events.planned.lock().unwrap();
    let shard = planned.iter().find(|file| file.path == SHARDS[0]).unwrap();
    assert_eq!(shard.have, 400_000);
    assert!(!partial.exists());
}

#[test]
fn a_spoilt_partial_file_is_replaced() {
    let world = World::new();
    let etag = sha256(&noise(SHARD_BYTES, 0));
    for partial in [
        vec![0; 1000],
        vec![0; SHARD_BYTES],
        vec![0; SHARD_BYTES + 1],
    ] {
        std::fs::create_dir_all(world.blobs()).unwrap();
        std::fs::write(world.blobs().join(format!("{etag}.incomplete")), partial).unwrap();
        survives(&world);
        std::fs::remove_dir_all(world.cache()).unwrap();
    }
}

#[test]
fn a_blob_of_the_wrong_length_is_replaced() {
    let world = World::new();
    std::fs::create_dir_all(world.blobs()).unwrap();
    std::fs::write(world.blobs().join(sha256(&noise(SHARD_BYTES, 0))), b"short").unwrap();
    survives(&world);
}

#[test]
fn a_server_that_ignores_ranges_sends_all_again() {
    let world = World::new();
    world
        .hub
        .fault(Server::Storage, "GET", SHARDS[0], 1, Fault::Cut(1000));
    world
        .hub
        .fault(Server::Storage, "GET", SHARDS[0], 1, Fault::IgnoreRange);
    survives(&world);
    assert_eq!(sent(&world, SHARDS[0]), 1000 + SHARD_BYTES);
}

#[test]
fn a_range_that_cannot_be_satisfied_starts_over() {
    let world = World::new();
    world
        .hub
        .fault(Server::Storage, "GET", SHARDS[0], 1, Fault::Cut(1000));
    world.hub.fault(
        Server::Storage,
        "GET",
        SHARDS[0],
        1,
        Fault::Status(416, vec![]),
    );
    survives(&world);
    assert_eq!(sent(&world, SHARDS[0]), 1000 + SHARD_BYTES);
}

#[test]
fn another_part_than_asked_for_is_not_taken() {
    let world = World::new();
    world
        .hub
        .fault(Server::Storage, "GET", SHARDS[0], 1, Fault::Cut(1000));
    let wrong = format!("bytes 500-{}/{SHARD_BYTES}", SHARD_BYTES - 1);
    world.hub.fault(
        Server::Storage,
        "GET",
        SHARDS[0],
        1,
        Fault::With("Content-Range", wrong),
    );
    survives(&world);
}

#[test]
fn short_and_long_bodies_are_refused() {
    for fault in [Fault::Short(1000), Fault::Long(1)] {
        let world = World::new();
        world
            .hub
            .fault(Server::Storage, "GET", SHARDS[1], 99, fault);
        let message = fails(&world, &HubErrorKind::WrongLength);
        assert!(
            message.contains(SHARDS[1]) && message.contains("700000"),
            "{message}"
        );
    }
    for fault in [Fault::Short(1000), Fault::Long(1)] {
        let world = World::new();
        world.hub.fault(Server::Storage, "GET", SHARDS[1], 2, fault);
        survives(&world);
    }
}

#[test]
fn a_body_without_length_must_still_be_complete() {
    let world = World::new();
    let half = noise(SHARD_BYTES, 1)[..SHARD_BYTES / 2].to_vec();
    let mut raw = b"HTTP/1.1 200 OK\r\nConnection: close\r\n\r\n".to_vec();
    raw.extend(half);
    world
        .hub
        .fault(Server::Storage, "GET", SHARDS[1], 1, Fault::Raw(raw));
    survives(&world);
}

#[test]
fn wrong_content_is_refused() {
    for path in [SHARDS[1], "tokenizer.json", "config.json"] {
        let world = World::new();
        let server = if path == SHARDS[1] {
            Server::Storage
        } else {
            Server::Hub
        };
        world.hub.fault(server, "GET", path, 99, Fault::Corrupt);
        let message = fails(&world, &HubErrorKind::WrongHash);
        assert!(message.contains(path), "{message}");

        let world = World::new();
        world.hub.fault(server, "GET", path, 1, Fault::Corrupt);
        survives(&world);
    }
}

#[test]
fn server_errors_pass_or_are_reported() {
    for status in [408, 429, 500, 502, 503, 504] {
        let world = World::new();
        world.hub.fault(
            Server::Hub,
            "HEAD",
            "config.json",
            2,
            Fault::Status(status, vec![]),
        );
        world.hub.fault(
            Server::Hub,
            "GET",
            "tokenizer.json",
            2,
            Fault::Status(status, vec![]),
        );
        world.hub.fault(
            Server::Storage,
            "GET",
            SHARDS[0],
            2,
            Fault::Status(status, vec![]),
        );
        survives(&world);
    }
    let world = World::new();
    world.hub.fault(
        Server::Hub,
        "HEAD",
        "config.json",
        99,
        Fault::Status(503, vec![]),
    );
    fails(&world, &HubErrorKind::Status(503));
    let world = World::new();
    world.hub.fault(
        Server::Storage,
        "GET",
        SHARDS[0],
        99,
        Fault::Status(500, vec![]),
    );
    fails(&world, &HubErrorKind::Status(500));
}

#[test]
fn a_failed_file_stops_the_others_soon() {
    let world = World::new();
    let pause = Duration::from_millis(100);
    world.hub.fault(
        Server::Storage,
        "GET",
        SHARDS[0],
        1,
        Fault::Trickle(10_000, pause),
    );
    world.hub.fault(
        Server::Storage,
        "GET",
        SHARDS[1],
        99,
        Fault::Status(418, vec![]),
    );
    let start = std::time::Instant::now();
    assert_eq!(kind(world.pull()), HubErrorKind::Status(418));
    assert!(
        start.elapsed() < Duration::from_secs(4),
        "{:?}",
        start.elapsed()
    );
}

#[test]
fn a_rate_limit_is_waited_for_or_reported() {
    let world = World::new();
    let limit = |seconds: u64| Fault::Status(429, vec![("Retry-After", seconds.to_string())]);
    world
        .hub
        .fault(Server::Hub, "HEAD", "tokenizer.json", 1, limit(1));
    let start = std::time::Instant::now();
    survives(&world);
    assert!(start.elapsed() >= Duration::from_secs(1));

    let world = World::new();
    world
        .hub
        .fault(Server::Hub, "HEAD", "tokenizer.json", 99, limit(3600));
    let retry_after = Some(Duration::from_secs(3600));
    let message = fails(&world, &HubErrorKind::RateLimited { retry_after });
    assert!(message.contains("3600 s"), "{message}");
}

#[test]
fn silence_and_trickle_count_as_broken_connections() {
    let world = World::new();
    let mut options = world.options();
    options.read_timeout = Duration::from_millis(300);
    options.slow_window = Duration::from_millis(200);
    options.slow_bytes = 10_000;
    options.tries = 3;
    let pull = || Hub::new(options.clone()).unwrap().pull(REPO, None, &Silent);

    let stall = Fault::Stall(Duration::from_secs(3));
    let trickle = Fault::Trickle(10, Duration::from_millis(40));
    for fault in [stall, trickle] {
        world
            .hub
            .fault(Server::Storage, "GET", SHARDS[0], 1, fault.clone());
        assert_eq!(contents(&pull().unwrap()), expected(1));
        std::fs::remove_dir_all(world.cache()).unwrap();
        world
            .hub
            .fault(Server::Storage, "GET", SHARDS[0], 99, fault);
        assert_eq!(kind(pull()), HubErrorKind::Unreachable);
        world.hub.no_faults();
        std::fs::remove_dir_all(world.cache()).unwrap();
    }
}

#[test]
fn an_expired_address_is_renewed() {
    let world = World::new();
    world
        .hub
        .fault(Server::Storage, "GET", SHARDS[0], 1, Fault::Cut(1000));
    world.hub.fault(
        Server::Storage,
        "GET",
        SHARDS[0],
        1,
        Fault::Status(403, vec![]),
    );
    survives(&world);
    assert_eq!(sent(&world, SHARDS[0]), SHARD_BYTES);
    let heads = world
        .hub
        .seen()
        .iter()
        .filter(|s| s.method == "HEAD" && s.path.ends_with(SHARDS[0]))
        .count();
    assert_eq!(heads, 2);

    // Storage that refuses every address is not reported as a gated model.
    let world = World::new();
    world.hub.fault(
        Server::Storage,
        "GET",
        SHARDS[0],
        99,
        Fault::Status(403, vec![]),
    );
    fails(&world, &HubErrorKind::Status(403));
}

#[test]
fn addresses_that_expire_while_other_files_download() {
    let world = World::new();
    world.hub.fault(
        Server::Hub,
        "GET",
        "tokenizer.json",
        1,
        Fault::Stall(Duration::from_millis(300)),
    );
    let mut options = world.options();
    options.workers = 1;
    let hub = world.hub.clone();
    struct ExpireOnce(MockHub, std::sync::Once);
    impl Progress for ExpireOnce {
        fn planned(&self, files: &[PlannedFile]) {
            if files.len() > 1 {
                self.1.call_once(|| self.0.expire_signatures());
            }
        }
    }
    let expire = ExpireOnce(hub, std::sync::Once::new());
    let snapshot = Hub::new(options)
        .unwrap()
        .pull(REPO, None, &expire)
        .unwrap();
    assert!(expire.1.is_completed());
    assert_eq!(contents(&snapshot), expected(1));
}

#[test]
fn refusals_are_told_apart() {
    let page = |world: &World| format!("{}/org/model", world.hub.url);
    let refused = |status: u16, headers: &[(&'static str, &str)]| {
        let world = World::new();
        world.hub.gate(REPO, "hf_right", status, headers);
        let mut options = world.options();
        options.token = Some("hf_wrong".to_owned());
        let error = Hub::new(options)
            .unwrap()
            .pull(REPO, None, &Silent)
            .unwrap_err();
        let message = error.to_string();
        assert!(
            message.contains(REPO) || message.contains("HF_TOKEN"),
            "{message}"
        );
        assert!(!message.contains("hf_wrong"), "{message}");
        (kind(Err(error)), page(&world))
    };
    for status in [401, 403] {
        let (kind, page) = refused(status, &[("X-Error-Code", "GatedRepo")]);
        assert_eq!(kind, HubErrorKind::Gated { page });
    }
    let cases = [
        (
            401,
            "Invalid credentials in Authorization header",
            HubErrorKind::BadToken,
        ),
        (
            401,
            "Invalid username or password.",
            HubErrorKind::RepoNotFound,
        ),
        (
            403,
            "Access to this resource is disabled.",
            HubErrorKind::Disabled,
        ),
        (403, "Your token may not", HubErrorKind::Forbidden),
        (404, "", HubErrorKind::RepoNotFound),
    ];
    for (status, message, expected) in cases {
        assert_eq!(
            refused(status, &[("X-Error-Message", message)]).0,
            expected,
            "{status} {message}"
        );
    }

    let world = World::new();
    let client = world.client();
    assert_eq!(
        kind(client.pull("org/other", None, &Silent)),
        HubErrorKind::RepoNotFound
    );
    assert_eq!(
        kind(client.pull(REPO, Some("v9"), &Silent)),
        HubErrorKind::RevisionNotFound
    );
    world
        .hub
        .commit("org/gguf", FIRST, &["main"], &[("model.gguf", b"x")]);
    assert_eq!(
        kind(client.pull("org/gguf", None, &Silent)),
        HubErrorKind::FileNotFound
    );
    world.hub.commit(
        "org/torch",
        FIRST,
        &["main"],
        &[("config.json", b"{}"), ("pytorch_model.bin", b"x")],
    );
    assert_eq!(
        kind(client.pull("org/torch", None, &Silent)),
        HubErrorKind::FileNotFound
    );
    assert!(!world.cache().join("models--org--torch/refs").exists());
}

#[test]
fn what_is_not_a_hub_is_recognised() {
    let world = World::new();
    world.hub.fault(
        Server::Hub,
        "HEAD",
        "config.json",
        99,
        Fault::Without("X-Repo-Commit"),
    );
    fails(&world, &HubErrorKind::NotAHub);
    let world = World::new();
    world.hub.fault(
        Server::Hub,
        "HEAD",
        "tokenizer.json",
        99,
        Fault::Without("ETag"),
    );
    fails(&world, &HubErrorKind::BadReply);

    let mut options = world.options();
    options.endpoint = "http://127.0.0.1:1".to_owned();
    options.cache = world.folder.path().join("empty");
    assert_eq!(
        kind(Hub::new(options).unwrap().pull(REPO, None, &Silent)),
        HubErrorKind::Unreachable
    );
}

#[test]
fn names_from_the_server_cannot_leave_the_cache() {
    let hostile = [
        ("X-Repo-Commit", "../../../../evil"),
        ("X-Repo-Commit", "/evil"),
        ("ETag", "\"../../../evil\""),
        ("ETag", "\"/tmp/evil\""),
    ];
    for (name, value) in hostile {
        let world = World::new();
        world.hub.fault(
            Server::Hub,
            "HEAD",
            "config.json",
            99,
            Fault::With(name, value.to_owned()),
        );
        let got = kind(world.pull());
        assert!(
            matches!(got, HubErrorKind::NotAHub | HubErrorKind::BadReply),
            "{got:?}"
        );
        assert!(!world.cache().exists(), "{name}: {value}");
    }
    for shard in [
        "../../../../evil.safetensors",
        "/tmp/evil.safetensors",
        "a\\..\\evil.safetensors",
        "x.py",
    ] {
        let world = World::new();
        let index = serde_json::json!({"weight_map": {"a": shard}}).to_string();
        world.hub.commit(
            REPO,
            SECOND,
            &["main"],
            &[
                ("config.json", b"{}"),
                ("model.safetensors.index.json", index.as_bytes()),
            ],
        );
        let error = world.pull().unwrap_err();
        assert!(matches!(error, Error::BadModel { .. }), "{error}");
        assert!(
            !world
                .hub
                .seen()
                .iter()
                .any(|seen| seen.path.contains("evil"))
        );
    }
    let world = World::new();
    for id in ["../x", "a/../b", "/etc", "a/b/c", "a\\b", "https://x", ""] {
        assert!(
            matches!(world.client().pull(id, None, &Silent), Err(Error::Usage(_))),
            "{id}"
        );
    }
    for revision in ["../x", "", "a b", "/x"] {
        assert!(
            matches!(
                world.client().pull(REPO, Some(revision), &Silent),
                Err(Error::Usage(_))
            ),
            "{revision}"
        );
    }
    assert_eq!(world.hub.connections(), 0);
}

#[test]
fn an_index_that_is_no_index() {
    let world = World::new();
    let size = Fault::With("X-Linked-Size", (1u64 << 40).to_string());
    world.hub.fault(
        Server::Hub,
        "HEAD",
        "model.safetensors.index.json",
        99,
        size,
    );
    fails(&world, &HubErrorKind::BadReply);

    let world = World::new();
    let files: [(&str, &[u8]); 2] = [
        ("config.json", b"{}"),
        ("model.safetensors.index.json", b"<html>"),
    ];
    world.hub.commit(REPO, SECOND, &["main"], &files);
    let error = world.pull().unwrap_err();
    assert!(matches!(error, Error::BadModel { .. }), "{error}");
    assert!(
        error.to_string().contains("model.safetensors.index.json"),
        "{error}"
    );
}

#[test]
fn a_commit_must_stay_the_same_while_pulling() {
    let world = World::new();
    world.hub.fault(
        Server::Hub,
        "HEAD",
        "tokenizer.json",
        99,
        Fault::With("X-Repo-Commit", SECOND.to_owned()),
    );
    fails(&world, &HubErrorKind::BadReply);
}

#[test]
fn redirects_are_bounded_and_stay_away_from_other_schemes() {
    let redirect = |location: &str| Fault::Status(302, vec![("Location", location.to_owned())]);
    let world = World::new();
    let own = format!("/{REPO}/resolve/main/config.json");
    world
        .hub
        .fault(Server::Hub, "HEAD", "config.json", 999, redirect(&own));
    fails(&world, &HubErrorKind::BadRedirect);
    assert!(world.hub.seen().len() < 100);

    let world = World::new();
    let own = format!("{}/x?sig=9", world.hub.storage_url);
    world
        .hub
        .fault(Server::Storage, "GET", SHARDS[0], 999, redirect(&own));
    world
        .hub
        .fault(Server::Storage, "GET", "/x", 999, redirect(&own));
    fails(&world, &HubErrorKind::BadRedirect);

    for location in [
        "file:///etc/passwd",
        "ftp://127.0.0.1/x",
        "http://user@127.0.0.1/x",
        "gopher:x",
        "http://",
        "x y",
    ] {
        let world = World::new();
        world
            .hub
            .fault(Server::Hub, "HEAD", "config.json", 1, redirect(location));
        fails(&world, &HubErrorKind::BadRedirect);
    }
}

#[test]
fn a_redirect_to_another_host_gets_no_token() {
    let world = World::new();
    world.hub.gate(REPO, "hf_secret", 401, &[]);
    let mut options = world.options();
    options.token = Some("hf_secret".to_owned());
    // The hub sends small files elsewhere too; and the storage sends us back to the hub and away again.
    let elsewhere = format!("{}/stolen", world.hub.storage_url);
    world.hub.fault(
        Server::Hub,
        "GET",
        "tokenizer.json",
        99,
        Fault::Status(302, vec![("Location", elsewhere)]),
    );
    let got = kind(Hub::new(options).unwrap().pull(REPO, None, &Silent));
    assert_eq!(got, HubErrorKind::Status(404));
    let stolen: Vec<_> = world
        .hub
        .seen()
        .into_iter()
        .filter(|seen| seen.path == "/stolen")
        .collect();
    assert!(!stolen.is_empty());
    assert!(
        stolen
            .iter()
            .all(|seen| seen.header("authorization").is_none())
    );
}

#[test]
fn without_an_answer_the_copy_in_the_cache_is_used_and_said() {
    let world = World::new();
    let snapshot = world.pull().unwrap();
    for fault in [
        Fault::Status(503, vec![]),
        Fault::Status(401, vec![]),
        Fault::Status(403, vec![("X-Error-Code", "GatedRepo".to_owned())]),
        Fault::Without("X-Repo-Commit"),
        Fault::Raw(b"nonsense\r\n\r\n".to_vec()),
        Fault::Raw(Vec::new()),
    ] {
        world
            .hub
            .fault(Server::Hub, "HEAD", "config.json", 99, fault.clone());
        let events = Events::default();
        assert_eq!(world.client().pull(REPO, None, &events).unwrap(), snapshot);
        let notes = events.notes.lock().unwrap();
        assert!(notes.last().unwrap().contains(FIRST), "{fault:?} {notes:?}");
        world.hub.no_faults();
    }
    let gone = Fault::Status(404, vec![("X-Error-Code", "RevisionNotFound".to_owned())]);
    world.hub.fault(Server::Hub, "HEAD", "config.json", 1, gone);
    assert_eq!(kind(world.pull()), HubErrorKind::RevisionNotFound);
}

#[test]
fn offline_opens_no_socket() {
    let world = World::new();
    let mut options = world.options();
    options.offline = true;
    let offline = Hub::new(options).unwrap();
    assert_eq!(
        kind(offline.pull(REPO, None, &Silent)),
        HubErrorKind::Offline
    );
    assert!(matches!(
        offline.remote(REPO, None, &Silent).map(|_| ()),
        Err(Error::Hub {
            kind: HubErrorKind::Offline,
            ..
        })
    ));
    assert_eq!(kind(offline.model_dir(REPO, None)), HubErrorKind::NotCached);
    assert_eq!(world.hub.connections(), 0);

    let snapshot = world.pull().unwrap();
    world.hub.forget();
    assert_eq!(offline.pull(REPO, None, &Silent).unwrap(), snapshot);
    assert_eq!(offline.pull(REPO, Some(FIRST), &Silent).unwrap(), snapshot);
    assert_eq!(offline.model_dir(REPO, None).unwrap(), snapshot);
    assert_eq!(offline.list().unwrap().len(), 1);
    std::fs::remove_file(snapshot.join(SHARDS[0])).unwrap();
    assert_eq!(
        kind(offline.pull(REPO, None, &Silent)),
        HubErrorKind::Offline
    );
    assert_eq!(world.hub.connections(), 0);
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 150, ..ProptestConfig::default() })]

    /// Whatever bytes answer, the outcome is an error, quickly, and nothing appears in the cache.
    #[test]
    fn any_bytes_for_an_answer(
        status in "[ -~]{0,20}|HTTP/1.1 [1-5][0-9]{2} [A-Z]{0,5}",
        headers in proptest::collection::vec(
            ("X-Repo-Commit|ETag|X-Linked-Etag|X-Linked-Size|Content-Length|Location|Transfer-Encoding|[ -~]{0,20}", "[ -~]{0,50}|[0-9]{1,25}|1{40}"),
            0..8,
        ),
        body in proptest::collection::vec(any::<u8>(), 0..100),
        on_get in any::<bool>(),
    ) {
        static SERVERS: std::sync::OnceLock<World> = std::sync::OnceLock::new();
        let world = World {
            hub: SERVERS.get_or_init(World::new).hub.clone(),
            folder: tempfile::tempdir().unwrap(),
        };
        world.hub.no_faults();
        let mut raw = format!("{status}\r\n").into_bytes();
        for (name, value) in headers {
            raw.extend(format!("{name}: {value}\r\n").bytes());
        }
        raw.extend(b"\r\n");
        raw.extend(body);
        if on_get {
            world.hub.fault(Server::Hub, "GET", "config.json", 99, Fault::Raw(raw));
        } else {
            world.hub.fault(Server::Hub, "HEAD", "model.safetensors.index.json", 99, Fault::Raw(raw));
        }
        let mut options = world.options();
        options.tries = 2;
        options.head_timeout = Duration::from_millis(500);
        options.read_timeout = Duration::from_millis(500);
        let pulled = Hub::new(options).unwrap().pull(REPO, None, &Silent);
        prop_assert!(pulled.is_err());
        prop_assert!(!world.cache().join("models--org--model/snapshots").join(FIRST).join("config.json").exists());
    }
}
