//! A weight file that is cut short while it is mapped: a sentence and exit code 1, no crash. In a process of its own,
//! since that process ends.
#![cfg(unix)]

use std::fs;
use std::os::unix::process::ExitStatusExt;
use std::path::Path;
use std::process::{Command, Output};

use tileinfer::weights::{Checkpoint, exit_on_lost_pages};

/// Tells a run of this test program what to do: a word and the directory of a model.
const TASK: &str = "TILEINFER_TEST_LOST_PAGES";

/// What the other tests start as a process of its own. Without a task it checks that it has none.
#[test]
fn child() {
    let Ok(task) = std::env::var(TASK) else {
        assert!(std::env::var_os(TASK).is_none());
        return;
    };
    let (what, dir) = task.split_once('|').unwrap();
    exit_on_lost_pages().unwrap();
    exit_on_lost_pages().unwrap();
    let path = Path::new(dir).join("model.safetensors");
    let other = Checkpoint::open(dir).unwrap();
    let checkpoint = Checkpoint::open(dir).unwrap();
    drop(other);
    match what {
        "cut" => {
            let file = fs::File::options().write(true).open(&path).unwrap();
            file.set_len(4096).unwrap();
            assert!(checkpoint.verify_unchanged().is_err());
        }
        "replace" => {
            let new = path.with_extension("new");
            fs::write(&new, b"something else").unwrap();
            fs::rename(new, &path).unwrap();
        }
        "other" => {
            // A file that some other part of a program has mapped.
            let path = Path::new(dir).join("other");
            fs::write(&path, vec![1; 8192]).unwrap();
            let file = fs::File::options().read(true).write(true).open(&path);
            let file = file.unwrap();
            // SAFETY: what is read from it is never used: the read is to fail.
            let map = unsafe { memmap2::Mmap::map(&file) }.unwrap();
            file.set_len(0).unwrap();
            println!("read {}", map[5000]);
        }
        _ => {}
    }
    let names: Vec<String> = checkpoint.names().map(str::to_owned).collect();
    let tensors = names.iter().filter_map(|name| checkpoint.tensor(name));
    let sum: u64 = tensors
        .flat_map(|tensor| tensor.data.to_vec())
        .map(u64::from)
        .sum();
    println!("\nsum {sum}");
}

fn run(what: &str) -> (Output, String) {
    let models = Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/models/qwen3");
    let folder = tempfile::tempdir().unwrap();
    let copy = folder.path().join("model.safetensors");
    fs::copy(models.join("model.safetensors"), &copy).unwrap();
    let output = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "child", "--nocapture"])
        .env(TASK, format!("{what}|{}", folder.path().display()))
        .output()
        .unwrap();
    (output, copy.display().to_string())
}

#[test]
fn a_file_that_is_cut_short_is_named() {
    let (output, path) = run("cut");
    let stderr = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{stderr}");
    assert!(stderr.contains(&format!("tileinfer: {path}: ")), "{stderr}");
    assert!(stderr.contains("cut short"), "{stderr}");
    assert!(!String::from_utf8_lossy(&output.stdout).contains("sum "));
}

#[test]
fn a_file_that_is_replaced_stays_as_it_was() {
    let sum = |output: &Output| {
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{output:?}");
        text.lines()
            .find(|line| line.starts_with("sum "))
            .map(str::to_owned)
            .unwrap_or_else(|| panic!("{text}"))
    };
    assert_eq!(sum(&run("replace").0), sum(&run("nothing").0));
}

#[test]
fn what_else_raises_the_signal_ends_the_process_as_before() {
    let (output, _) = run("other");
    assert_eq!(output.status.signal(), Some(libc::SIGBUS));
}
