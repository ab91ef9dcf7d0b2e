//! The command as its users meet it: a process with arguments, streams, an exit code and sometimes a terminal.

#[cfg(unix)]
mod chat;
mod corpus;
mod faults;
mod hub;
#[path = "../../../tileinfer/tests/hub/mock.rs"]
#[expect(dead_code, reason = "the library's tests of the hub use the rest")]
mod mock;
#[path = "../../../fuzz/src/targets.rs"]
#[expect(unreachable_pub, reason = "the fuzzer uses it from another crate")]
mod targets;
#[cfg(unix)]
mod terminal;
mod usage;
mod verbs;

use std::fs;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;

/// A small model with random weights.
fn model(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../testdata/golden/models")
        .join(name)
}

/// The one that most tests run.
fn qwen3() -> String {
    model("qwen3").display().to_string()
}

/// A copy of the small model, to be damaged.
fn copy_of_qwen3() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    for entry in fs::read_dir(model("qwen3")).unwrap() {
        let path = entry.unwrap().path();
        fs::copy(&path, folder.path().join(path.file_name().unwrap())).unwrap();
    }
    folder
}

/// The command, with nothing of the environment but what it needs and what tests set.
fn tileinfer(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_tileinfer"));
    command
        .args(args)
        .env_clear()
        .env("HF_HUB_OFFLINE", "1")
        .env("HOME", "/nonexistent/home")
        .env("HF_HUB_CACHE", "/nonexistent/cache")
        .stdin(Stdio::null());
    command
}

/// What a process left behind.
#[derive(Debug)]
struct Done {
    /// None: a signal ended it.
    code: Option<i32>,
    out: String,
    err: String,
}

impl From<Output> for Done {
    fn from(output: Output) -> Self {
        Done {
            code: output.status.code(),
            out: String::from_utf8(output.stdout).unwrap(),
            err: String::from_utf8(output.stderr).unwrap(),
        }
    }
}

fn run(args: &[&str]) -> Done {
    tileinfer(args).output().unwrap().into()
}

fn run_with_input(args: &[&str], input: &str) -> Done {
    let mut child = tileinfer(args)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdin = child.stdin.take().unwrap();
    stdin.write_all(input.as_bytes()).unwrap();
    drop(stdin);
    child.wait_with_output().unwrap().into()
}

/// The one line of JSON that a successful run prints.
fn json(args: &[&str]) -> Value {
    parsed(&run(args))
}

fn parsed(done: &Done) -> Value {
    assert_eq!(done.code, Some(0), "{done:?}");
    assert_eq!(done.out.lines().count(), 1, "{done:?}");
    serde_json::from_str(&done.out).unwrap()
}

/// The names in an object, sorted.
fn names(value: &Value) -> Vec<&str> {
    let object = value.as_object().unwrap_or_else(|| panic!("{value}"));
    let mut names: Vec<&str> = object.keys().map(String::as_str).collect();
    names.sort_unstable();
    names
}
