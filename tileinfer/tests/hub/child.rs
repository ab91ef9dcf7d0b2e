//! Other processes: two pulling the same model, one killed half-way, one that may write only little.

use std::process::{Child, Command, Stdio};

use tileinfer::hub::{Hub, HubErrorKind, HubOptions, Silent};

use super::mock::{Fault, Server, sha256};
use super::*;

/// Tells a run of this test program to be a pull: `endpoint|cache`.
const TASK: &str = "TILEINFER_TEST_PULL";

/// The pull that the other tests start as a process of its own. Without a task it checks that it has none.
#[test]
fn child_pull() {
    let Ok(task) = std::env::var(TASK) else {
        assert!(std::env::var_os(TASK).is_none());
        return;
    };
    let (endpoint, cache) = task.split_once('|').unwrap();
    let mut options = HubOptions::new(cache);
    options.endpoint = endpoint.to_owned();
    options.backoff = Duration::from_millis(5);
    match Hub::new(options).unwrap().pull(REPO, None, &Silent) {
        Ok(snapshot) => println!("\npulled {}", snapshot.display()),
        Err(error) => println!("\nfailed {error:?}"),
    }
}

/// Starts a pull, through `sh` with `setup` before it.
fn start(world: &World, setup: &str) -> Child {
    let program = std::env::current_exe().unwrap();
    Command::new("sh")
        .arg("-c")
        .arg(format!("{setup} exec \"$0\" \"$@\""))
        .arg(program)
        .args(["--exact", "child::child_pull", "--nocapture"])
        .env(
            TASK,
            format!("{}|{}", world.hub.url, world.cache().display()),
        )
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

fn outcome(child: Child) -> String {
    let output = child.wait_with_output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.lines()
        .find(|line| line.starts_with("pulled ") || line.starts_with("failed "))
        .unwrap_or_else(|| panic!("{text}"))
        .to_owned()
}

#[test]
fn two_processes_download_everything_once() {
    let world = World::new();
    let pause = Duration::from_millis(20);
    world.hub.fault(
        Server::Storage,
        "GET",
        SHARDS[0],
        1,
        Fault::Trickle(50_000, pause),
    );
    let children = [start(&world, ""), start(&world, "")];
    let snapshot = world
        .cache()
        .join("models--org--model/snapshots")
        .join(FIRST);
    for child in children {
        assert_eq!(outcome(child), format!("pulled {}", snapshot.display()));
    }
    assert_eq!(contents(&snapshot), expected(1));
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
fn a_killed_pull_is_resumed() {
    let world = World::new();
    let pause = Duration::from_millis(50);
    world.hub.fault(
        Server::Storage,
        "GET",
        SHARDS[0],
        1,
        Fault::Trickle(50_000, pause),
    );
    let mut child = start(&world, "");
    let partial = world
        .blobs()
        .join(format!("{}.incomplete", sha256(&noise(SHARD_BYTES, 0))));
    let length = || std::fs::metadata(&partial).map_or(0, |meta| meta.len());
    let start = std::time::Instant::now();
    while length() < 100_000 {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(5));
    }
    child.kill().unwrap();
    child.wait().unwrap();
    let have = length();
    assert!(have < SHARD_BYTES as u64);
    assert_eq!(
        kind(world.client().model_dir(REPO, None)),
        HubErrorKind::NotCached
    );

    world.hub.forget();
    let snapshot = world.pull().unwrap();
    assert_eq!(contents(&snapshot), expected(1));
    let range = format!("bytes={have}-");
    assert!(
        world
            .hub
            .seen()
            .iter()
            .any(|s| s.header("range") == Some(&range))
    );
}

/// The limit on file sizes stands in for a disk that fills up while a file is written.
#[test]
fn a_write_that_is_refused_is_a_full_disk() {
    let world = World::new();
    let child = start(&world, "trap '' XFSZ; ulimit -f 600;");
    let line = outcome(child);
    assert!(
        line.starts_with("failed ") && line.contains("DiskFull"),
        "{line}"
    );
    assert_eq!(
        kind(world.client().model_dir(REPO, None)),
        HubErrorKind::NotCached
    );

    // What had arrived is not lost, and not trusted blindly.
    world.hub.forget();
    let snapshot = world.pull().unwrap();
    assert_eq!(contents(&snapshot), expected(1));
    assert!(world.hub.seen().iter().any(|s| s.header("range").is_some()));
}
