//! What goes wrong around the program: pipes that close, files that are damaged or cut short, memory that is scarce.

use std::io::Read;

use super::*;

#[test]
fn a_closed_pipe_is_no_failure() {
    let model = qwen3();
    let long = ["--ctx-size", "4000", "--ignore-eos", "--raw"];
    let cases: [&[&str]; 4] = [
        &[&["run", &model, "hello"], &long[..]].concat(),
        &["completions", "bash"],
        &["man"],
        &["doctor", "--offline"],
    ];
    for args in cases {
        let mut child = tileinfer(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stdout.take());
        let done = Done::from(child.wait_with_output().unwrap());
        assert_eq!(done.code, Some(0), "{args:?}: {done:?}");
        assert!(!done.err.contains("panicked"), "{args:?}: {done:?}");
    }
}

/// Nobody hears what is said: the work is done all the same.
#[test]
fn a_closed_stderr_is_no_failure() {
    let model = qwen3();
    let long = ["--ctx-size", "1000", "--max-tokens", "4", "--verbose"];
    for args in [
        &[&["run", &model, "hello"], &long[..]].concat()[..],
        &["run", "org/name", "x"],
    ] {
        let mut child = tileinfer(args)
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        drop(child.stderr.take());
        let done = Done::from(child.wait_with_output().unwrap());
        let fails = args[1] == "org/name";
        assert_eq!(done.code, Some(i32::from(fails)), "{args:?}: {done:?}");
        assert_eq!(done.out.is_empty(), fails, "{args:?}: {done:?}");
    }
}

#[test]
fn damaged_files_are_named() {
    let cut = |length: u64| {
        move |path: &Path| {
            let file = fs::File::options().write(true).open(path).unwrap();
            file.set_len(length).unwrap();
        }
    };
    let absent = |path: &Path| fs::remove_file(path).unwrap();
    let garbage = |path: &Path| fs::write(path, "\u{0}{]").unwrap();
    type Damage = Box<dyn Fn(&Path)>;
    let cases: Vec<(&str, Damage)> = vec![
        ("config.json", Box::new(absent)),
        ("config.json", Box::new(garbage)),
        ("config.json", Box::new(cut(100))),
        ("tokenizer.json", Box::new(absent)),
        ("tokenizer.json", Box::new(garbage)),
        ("tokenizer.json", Box::new(cut(1000))),
        ("tokenizer_config.json", Box::new(garbage)),
        ("generation_config.json", Box::new(garbage)),
        ("model.safetensors", Box::new(absent)),
        ("model.safetensors", Box::new(garbage)),
        ("model.safetensors", Box::new(cut(0))),
        ("model.safetensors", Box::new(cut(7))),
        ("model.safetensors", Box::new(cut(100))),
        ("model.safetensors", Box::new(cut(400_000))),
    ];
    for (i, (name, damage)) in cases.iter().enumerate() {
        let folder = copy_of_qwen3();
        damage(&folder.path().join(name));
        let dir = folder.path().to_str().unwrap();
        let done = run(&["run", dir, "hi", "--max-tokens", "2"]);
        assert_eq!(done.code, Some(1), "case {i}, {name}: {done:?}");
        assert!(done.err.contains(name), "case {i}, {name}: {done:?}");
        assert!(!done.err.contains("panicked"), "case {i}, {name}: {done:?}");
    }
}

/// What a stranger wrote may be quoted, but does not reach the terminal as it is.
#[test]
fn quoted_files_cannot_take_over_the_terminal() {
    let folder = copy_of_qwen3();
    let config = folder.path().join("config.json");
    let text = fs::read_to_string(&config).unwrap();
    let hostile = text.replace("\"qwen3\"", "\"\\u001b]0;owned\\u0007qwen3\"");
    assert_ne!(text, hostile);
    fs::write(&config, hostile).unwrap();
    let done = run(&["run", folder.path().to_str().unwrap(), "hi"]);
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(done.err.contains("owned"), "{done:?}");
    assert!(!done.err.contains(['\u{1b}', '\u{7}']), "{done:?}");
}

#[cfg(unix)]
#[test]
fn weights_that_are_cut_short_while_they_are_used_are_named() {
    let folder = copy_of_qwen3();
    let dir = folder.path().to_str().unwrap();
    let long = ["--ctx-size", "100000", "--ignore-eos", "--quiet"];
    let mut child = tileinfer(&[&["run", dir, "hi"], &long[..]].concat())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut stdout = child.stdout.take().unwrap();
    stdout.read_exact(&mut [0; 20]).unwrap();
    let weights = folder.path().join("model.safetensors");
    let file = fs::File::options().write(true).open(&weights).unwrap();
    file.set_len(0).unwrap();
    let mut rest = Vec::new();
    stdout.read_to_end(&mut rest).unwrap();
    let done = Done::from(child.wait_with_output().unwrap());
    assert_eq!(done.code, Some(1), "{done:?}");
    assert!(done.err.contains(weights.to_str().unwrap()), "{done:?}");
}

#[cfg(target_os = "linux")]
#[test]
fn scarce_memory_is_an_error_not_a_crash() {
    let mut succeeded = Vec::new();
    // From too little to read the model to enough for it.
    for megabytes in [24, 32, 48, 64, 96, 128, 256, 512, 4096] {
        let script = format!("ulimit -v {} && exec \"$0\" \"$@\"", megabytes * 1024);
        let output = Command::new("sh")
            .args(["-c", &script, env!("CARGO_BIN_EXE_tileinfer")])
            .args(["run", &qwen3(), "hi", "--max-tokens", "4", "--threads", "2"])
            .env("HF_HUB_OFFLINE", "1")
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let done = Done::from(output);
        let code = done.code;
        assert!(matches!(code, Some(0 | 1)), "{megabytes} MB: {done:?}");
        assert!(!done.err.contains("panicked"), "{megabytes} MB: {done:?}");
        assert!(!done.err.is_empty(), "{megabytes} MB: {done:?}");
        succeeded.push(code == Some(0));
    }
    assert!(succeeded.is_sorted(), "{succeeded:?}");
    assert_eq!(succeeded.last(), Some(&true));
}
