//! Help, completions, the manual, and what wrong usage gets.

use super::*;

const VERBS: [&str; 14] = [
    "serve",
    "run",
    "pull",
    "list",
    "rm",
    "show",
    "plan",
    "doctor",
    "tokenize",
    "eval",
    "bench",
    "quantize",
    "completions",
    "man",
];

#[test]
fn every_verb_has_help_with_examples() {
    let all = run(&["--help"]);
    assert_eq!(all.code, Some(0));
    for verb in VERBS {
        assert!(all.out.contains(&format!("\n  {verb} ")), "{verb}");
        let help = run(&[verb, "--help"]);
        assert_eq!(help.code, Some(0), "{verb}");
        assert!(help.out.contains("Examples:\n"), "{verb}");
        assert!(help.out.contains(&format!("tileinfer {verb}")), "{verb}");
    }
    assert!(run(&["--version"]).out.starts_with("tileinfer "));
}

#[test]
fn completions_and_manual_know_every_verb() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let script = run(&["completions", shell]);
        assert_eq!(script.code, Some(0), "{shell}");
        for verb in VERBS {
            assert!(script.out.contains(verb), "{shell} {verb}");
        }
    }
    let page = run(&["man"]);
    assert!(page.out.contains(".TH tileinfer 1"), "{page:?}");
    let folder = tempfile::tempdir().unwrap();
    let dir = folder.path().join("man1");
    let written = run(&["man", "--dir", dir.to_str().unwrap()]);
    assert_eq!(written.code, Some(0), "{written:?}");
    let read = |name: &str| fs::read_to_string(dir.join(name)).unwrap();
    assert_eq!(read("tileinfer.1"), page.out);
    for verb in VERBS {
        assert!(
            read(&format!("tileinfer-{verb}.1")).contains("Examples"),
            "{verb}"
        );
    }
    assert_eq!(fs::read_dir(&dir).unwrap().count(), VERBS.len() + 1);
}

#[test]
fn wrong_usage_is_exit_code_2() {
    let model = qwen3();
    let model = model.as_str();
    let cases: &[&[&str]] = &[
        &[],
        &["nonsense"],
        &["run"],
        &["run", model],
        &["run", model, "x", "--nonsense"],
        &["run", model, "x", "--device", "tpu"],
        &["run", model, "x", "--device", "cuda:x"],
        &["run", model, "x", "--threads", "0"],
        &["run", model, "x", "--spec", "perhaps"],
        &["run", model, "x", "--spec", "draft"],
        &["run", model, "x", "--spec", "dflash"],
        &["run", model, "x", "--spec", "ngram", "--draft-model", model],
        &["run", model, "x", "--spec", "ngram", "--draft-sample"],
        &["run", model, "x", "--num-draft-tokens", "3"],
        &[
            "run",
            model,
            "x",
            "--spec",
            "ngram",
            "--num-draft-tokens",
            "0",
        ],
        &["bench", "--random", "qwen3-0.6b", "--spec", "ngram"],
        &["run", model, "x", "--threads", "many"],
        &["run", model, "x", "--ctx-size", "0"],
        &["run", model, "x", "--dtype", "f64"],
        &["run", model, "x", "--gpu-memory-utilization", "0"],
        &["run", model, "x", "--gpu-memory-utilization", "1.5"],
        &["run", model, "x", "--gpu-memory-utilization", "NaN"],
        &["run", model, "x", "--temperature", "hot"],
        &["run", model, "x", "--temperature=-1"],
        &["run", model, "x", "--temperature", "-1"],
        &["run", model, "x", "--top-k", "-1"],
        &["run", model, "x", "--max-tokens", "-1"],
        &["run", model, "x", "--stop", ""],
        &["run", model, "x", "--logit-bias", "640=1"],
        &["run", model, "x", "--top-p", "2"],
        &["run", model, "x", "--logit-bias", "5"],
        &["run", model, "x", "--prompt-ids", "file"],
        &["run", model, "x", "--raw", "--system", "s"],
        &["run", model, "x", "--quiet", "--verbose"],
        &["tokenize", model],
        &["tokenize", model, "x", "--decode", "1"],
        &["eval", model],
        &["eval", model, "--text", "x", "--ctx-size", "1"],
        &["bench"],
        &["bench", model, "--random", "qwen3-0.6b"],
        &["bench", model, "--runs", "0"],
        &["completions", "tcsh"],
        &["rm"],
        &["pull"],
    ];
    for args in cases {
        let done = run(args);
        assert_eq!(done.code, Some(2), "{args:?}: {done:?}");
        assert_eq!(done.out, "", "{args:?}");
        assert!(!done.err.is_empty(), "{args:?}");
    }
}

#[test]
fn wrong_values_are_told_their_range() {
    let model = qwen3();
    for (flag, value, hint) in [
        ("--temperature", "-1", "0 or more"),
        ("--top-p", "1.5", "at most 1"),
        ("--min-p", "-0.5", "between 0"),
        ("--repetition-penalty", "0", "between 0.01 and 100"),
        ("--presence-penalty", "3", "between -2 and 2"),
        ("--stop", "", "--stop"),
        ("--logit-bias", "640=1", "640 tokens, counted from 0"),
    ] {
        let done = run(&["run", &model, "x", flag, value]);
        assert_eq!(done.code, Some(2), "{flag} {value}: {done:?}");
        assert!(done.err.contains(hint), "{flag} {value}: {done:?}");
    }
}

#[test]
fn failures_are_exit_code_1_and_say_what_to_do() {
    let (model, folder) = (qwen3(), tempfile::tempdir().unwrap());
    let (model, empty) = (model.as_str(), folder.path().to_str().unwrap());
    let config = format!("{model}/config.json");
    let cases: &[(&[&str], &str)] = &[
        (&["run", "org/name", "x"], "--offline, HF_HUB_OFFLINE"),
        (
            &["eval", "org/name", "--text", "x"],
            "tileinfer pull org/name",
        ),
        (&["bench", "org/name"], "tileinfer pull org/name"),
        (&["tokenize", "org/name", "x"], "tileinfer pull org/name"),
        (&["show", "org/name"], "tileinfer pull org/name"),
        (&["plan", "org/name"], "tileinfer pull org/name"),
        (&["pull", "org/name"], "--offline, HF_HUB_OFFLINE"),
        (&["rm", "org/name"], "`list` shows"),
        (&["run", "x.gguf", "x"], "safetensors repository"),
        (&["run", "a/b/c", "x"], "expected a hub id"),
        (&["run", &config, "x"], "give the directory"),
        (&["run", model, "x", "--revision", "v1"], "has no revision"),
        (&["run", empty, "x"], "config.json"),
        (&["run", model, "x", "--device", "cuda"], "--device cpu"),
        (
            &["run", model, "x", "--ctx-size", "9999999999999"],
            "--ctx-size",
        ),
        (
            &["run", model, "x", "--ctx-size", "9999999999999"],
            "of buffers, and ",
        ),
        (
            &["run", model, "--prompt-ids", "/nonexistent/ids"],
            "/nonexistent/ids",
        ),
        (
            &["run", model, "--prompt-ids", &config],
            "JSON array of token ids",
        ),
        (
            &["run", model, "x", "--chat-template", "/nonexistent/t"],
            "/nonexistent/t",
        ),
        (
            &["run", model, "x", "--ctx-size", "4"],
            "shorten the prompt",
        ),
        (&["bench", "--random", "gpt-5"], "qwen3-0.6b"),
        (&["man", "--dir", &config], "config.json"),
    ];
    for (args, hint) in cases {
        let done = run(args);
        assert_eq!(done.code, Some(1), "{args:?}: {done:?}");
        assert_eq!(done.out, "", "{args:?}");
        assert!(done.err.contains(hint), "{args:?}: {done:?}");
        assert!(done.err.contains("tileinfer: "), "{args:?}: {done:?}");
    }
}
