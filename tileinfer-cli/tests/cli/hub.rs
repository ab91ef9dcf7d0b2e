//! Models by their id, against a hub on loopback.

use super::mock::{Fault, MockHub, Server};
use super::*;

const COMMIT: &str = "1111111111111111111111111111111111111111";
const REPO: &str = "org/tiny";

/// A hub that has the small model, and an empty cache.
struct World {
    hub: MockHub,
    folder: tempfile::TempDir,
}

impl World {
    fn new() -> Self {
        let files: Vec<(String, Vec<u8>)> = fs::read_dir(model("qwen3"))
            .unwrap()
            .map(|entry| {
                let path = entry.unwrap().path();
                let name = path.file_name().unwrap().to_str().unwrap().to_owned();
                (name, fs::read(path).unwrap())
            })
            .collect();
        let files: Vec<(&str, &[u8])> = files
            .iter()
            .map(|(name, bytes)| (name.as_str(), bytes.as_slice()))
            .collect();
        let hub = MockHub::start();
        hub.commit(REPO, COMMIT, &["main", "v1"], &files);
        World {
            hub,
            folder: tempfile::tempdir().unwrap(),
        }
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = tileinfer(args);
        command
            .env_remove("HF_HUB_OFFLINE")
            .env("HF_HUB_CACHE", self.cache())
            .env("HF_ENDPOINT", &self.hub.url);
        command
    }

    fn run(&self, args: &[&str]) -> Done {
        self.command(args).output().unwrap().into()
    }

    fn json(&self, args: &[&str]) -> Value {
        parsed(&self.run(args))
    }

    fn cache(&self) -> PathBuf {
        self.folder.path().join("hub")
    }

    fn snapshot(&self) -> PathBuf {
        self.cache()
            .join("models--org--tiny/snapshots")
            .join(COMMIT)
    }
}

#[test]
fn a_model_comes_and_goes() {
    let world = World::new();
    assert_eq!(world.json(&["list", "--json"]), Value::Array(Vec::new()));
    let pulled = world.run(&["pull", REPO]);
    assert_eq!(pulled.code, Some(0), "{pulled:?}");
    assert_eq!(pulled.out, format!("{}\n", world.snapshot().display()));
    assert!(
        pulled
            .err
            .contains("downloading model.safetensors (448 kB)"),
        "{pulled:?}"
    );
    assert!(
        pulled.err.contains("model.safetensors is here (448 kB)"),
        "{pulled:?}"
    );
    assert_eq!(
        fs::read(world.snapshot().join("model.safetensors")).unwrap(),
        fs::read(model("qwen3").join("model.safetensors")).unwrap()
    );

    let list = world.json(&["list", "--json"]);
    assert_eq!(list.as_array().unwrap().len(), 1);
    assert_eq!(
        names(&list[0]),
        ["commit", "id", "path", "revision", "size_bytes"]
    );
    assert_eq!(
        (&list[0]["id"], &list[0]["revision"]),
        (&REPO.into(), &"main".into())
    );
    assert_eq!(list[0]["path"], world.snapshot().to_str().unwrap());
    assert!(world.run(&["list"]).out.contains(REPO));

    // Everything that is here works without the hub.
    world.hub.forget();
    let connections = world.hub.connections();
    for args in [
        &["run", REPO, "hi", "--max-tokens", "2", "--offline"][..],
        &["run", REPO, "hi", "--max-tokens", "2"],
        &["tokenize", REPO, "hi"],
        &["show", REPO, "--json"],
        &["plan", REPO, "--json"],
        &["pull", REPO, "--offline"],
    ] {
        let done = world.run(args);
        assert_eq!(done.code, Some(0), "{args:?}: {done:?}");
    }
    assert_eq!(world.hub.connections(), connections);

    assert_eq!(
        world
            .run(&["pull", REPO, "--revision", "v1", "--quiet"])
            .err,
        ""
    );
    let named = world.run(&["rm", REPO, "--revision", "v1"]);
    assert_eq!(named.code, Some(0), "{named:?}");
    assert!(
        named.err.contains("the name v1 is gone; its files stay"),
        "{named:?}"
    );
    assert!(world.snapshot().join("config.json").exists());
    let removed = world.run(&["rm", REPO]);
    assert_eq!(removed.code, Some(0), "{removed:?}");
    assert!(removed.err.contains(COMMIT), "{removed:?}");
    assert!(removed.out.ends_with(" freed\n"), "{removed:?}");
    assert_eq!(world.json(&["list", "--json"]), Value::Array(Vec::new()));
    assert_eq!(world.run(&["rm", REPO]).code, Some(1));
}

#[test]
fn run_pulls_what_is_missing() {
    let world = World::new();
    let rest = [
        "hi",
        "--max-tokens=9",
        "--temperature=1",
        "--seed=5",
        "--json",
    ];
    let args = [&["run", REPO], &rest[..]].concat();
    let first = world.json(&args);
    let local = json(&[&["run", &qwen3()], &rest[..]].concat());
    assert_eq!(first["ids"], local["ids"]);
    let seen = world.hub.seen().len();
    assert!(seen > 0);
    assert_eq!(world.json(&args)["ids"], first["ids"]);
    assert_eq!(world.hub.seen().len(), seen);
    // The others leave the network alone and say how to pull.
    let other = world.run(&["bench", "org/other"]);
    assert_eq!(other.code, Some(1));
    assert!(other.err.contains("tileinfer pull org/other"), "{other:?}");
    assert_eq!(world.hub.seen().len(), seen);
}

#[test]
fn a_model_is_looked_at_without_downloading_it() {
    let world = World::new();
    let local = qwen3();
    for verb in ["show", "plan"] {
        assert_eq!(
            world.json(&[verb, REPO, "--json"]),
            json(&[verb, &local, "--json"]),
            "{verb}"
        );
    }
    assert_eq!(
        world.json(&["show", REPO, "--revision", COMMIT, "--json"]),
        json(&["show", &local, "--json"])
    );
    assert!(!world.cache().exists());
    let sent: usize = world.hub.seen().iter().map(|seen| seen.sent).sum();
    let weights = fs::metadata(model("qwen3").join("model.safetensors")).unwrap();
    assert!((sent as u64) < weights.len(), "{sent} bytes were sent");
}

#[test]
fn refusals_say_what_to_do() {
    let world = World::new();
    let missing = world.run(&["pull", "org/nothing"]);
    assert_eq!(missing.code, Some(1));
    assert!(missing.err.contains("org/nothing"), "{missing:?}");
    let revision = world.run(&["pull", REPO, "--revision", "v9"]);
    assert_eq!(revision.code, Some(1));
    assert!(revision.err.contains("v9"), "{revision:?}");
    let page = world.hub.url.clone() + "/" + REPO;
    world
        .hub
        .gate(REPO, "secret", 403, &[("X-Error-Code", "GatedRepo")]);
    let gated = world.run(&["run", REPO, "hi"]);
    assert_eq!(gated.code, Some(1));
    assert!(gated.err.contains(&page), "{gated:?}");
    let done = world
        .command(&["pull", REPO])
        .env("HF_TOKEN", "secret")
        .output()
        .unwrap();
    assert_eq!(Done::from(done).code, Some(0));
}

/// A mistake in what was typed is told before a model is downloaded for it.
#[test]
fn wrong_values_cost_no_download() {
    let world = World::new();
    let done = world.run(&["run", REPO, "hi", "--top-p", "7"]);
    assert_eq!(done.code, Some(2), "{done:?}");
    assert!(done.err.contains("top_p is 7"), "{done:?}");
    assert!(world.hub.seen().is_empty());
}

/// A bar for each file under way and one for all, in a terminal.
#[cfg(unix)]
#[test]
fn a_pull_shows_how_far_it_is() {
    let world = World::new();
    let slowly = Fault::Trickle(16_000, std::time::Duration::from_millis(100));
    for (server, path) in [
        (Server::Storage, "model.safetensors"),
        (Server::Hub, "tokenizer.json"),
    ] {
        world.hub.fault(server, "GET", path, 1, slowly.clone());
    }
    let mut terminal = terminal::Terminal::start(world.command(&["pull", REPO]));
    // The large file moves, then all together do; sizes are those that the last word on it has.
    terminal.expect("model.safetensors ");
    terminal.expect(" kB of 448.07 kB");
    let total: u64 = fs::read_dir(model("qwen3"))
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len())
        .sum();
    terminal.expect("total ");
    terminal.expect(&format!(" of {:.2} kB", total as f64 / 1e3));
    terminal.expect("model.safetensors is here (448 kB)");
    let (status, rest) = terminal.end();
    assert_eq!(status.code(), Some(0), "{rest}");
    // The bars are gone at the end, the path is not.
    let last = rest.trim_end().rsplit('\n').next().unwrap_or_default();
    assert!(last.contains(COMMIT), "{rest:?}");
}

#[test]
fn waits_are_told() {
    let world = World::new();
    let wait = Fault::Status(429, vec![("Retry-After", "1".to_owned())]);
    world
        .hub
        .fault(Server::Hub, "HEAD", "config.json", 1, wait.clone());
    let done = world.run(&["pull", REPO]);
    assert_eq!(done.code, Some(0), "{done:?}");
    assert!(done.err.contains("Trying again in 1 s"), "{done:?}");
}

#[test]
fn a_cache_that_cannot_be_written_is_named() {
    let world = World::new();
    let file = world.folder.path().join("file");
    fs::write(&file, "no folder").unwrap();
    let cache = file.join("hub");
    let done: Done = world
        .command(&["pull", REPO])
        .env("HF_HUB_CACHE", &cache)
        .output()
        .unwrap()
        .into();
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(done.err.contains(cache.to_str().unwrap()), "{done:?}");
    let doctor: Done = world
        .command(&["doctor", "--json"])
        .env("HF_HUB_CACHE", &cache)
        .output()
        .unwrap()
        .into();
    let found = parsed(&doctor);
    assert_eq!(found["cache"]["writable"], false, "{found}");
    assert!(found["cache"]["remedy"].is_string(), "{found}");
    assert_eq!(found["hub"]["reachable"], true, "{found}");
}

#[test]
fn doctor_knows_a_hub_that_is_not_there() {
    let world = World::new();
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let nobody = format!("http://{}", listener.local_addr().unwrap());
    drop(listener);
    let done: Done = world
        .command(&["doctor", "--json"])
        .env("HF_ENDPOINT", &nobody)
        .output()
        .unwrap()
        .into();
    let found = parsed(&done);
    assert_eq!(found["hub"]["reachable"], false, "{found}");
    assert!(found["hub"]["remedy"].is_string(), "{found}");
}
