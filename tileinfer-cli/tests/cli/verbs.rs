//! Each verb does what the contract says, with the fields it says.

use serde_json::{Value, json};

use super::*;

/// The small model says one word for ever if it is greedy, which would hide what went in.
const SAMPLED: [&str; 6] = [
    "--json",
    "--max-tokens=24",
    "--temperature",
    "1",
    "--seed",
    "3",
];

fn run_json(more: &[&str]) -> Value {
    let model = qwen3();
    json(&[&["run", &model], &SAMPLED[..], more].concat())
}

#[test]
fn run_reports_text_ids_and_times() {
    let answer = run_json(&["hello there"]);
    assert_eq!(
        names(&answer),
        [
            "finish_reason",
            "ids",
            "sampling",
            "text",
            "timings",
            "usage"
        ]
    );
    assert_eq!(
        names(&answer["usage"]),
        ["cached_tokens", "completion_tokens", "prompt_tokens"]
    );
    assert_eq!(
        names(&answer["timings"]),
        [
            "decode_tok_s",
            "load_s",
            "prefill_tok_s",
            "start_to_first_s",
            "ttft_s"
        ]
    );
    assert_eq!(answer["sampling"]["temperature"], json!(1.0));
    assert_eq!(answer["sampling"]["seed"], 3);
    let ids = answer["ids"].as_array().unwrap();
    assert_eq!(answer["usage"]["completion_tokens"], json!(ids.len()));
    assert_eq!(answer["usage"]["cached_tokens"], json!(0));
    assert!(["stop", "length"].contains(&answer["finish_reason"].as_str().unwrap()));
    let list: Vec<String> = ids.iter().map(Value::to_string).collect();
    let decode = [
        "tokenize",
        &qwen3(),
        "--decode",
        &list.join(","),
        "--skip-special",
        "--json",
    ];
    assert_eq!(json(&decode)["text"], answer["text"]);
}

#[test]
fn run_prints_the_text_alone_on_stdout() {
    let model = qwen3();
    let greedy = ["run", &model, "hello there", "--max-tokens", "24"];
    let text = json(&[&greedy[..], &["--json"]].concat())["text"].clone();
    let plain = run(&greedy);
    assert_eq!(plain.code, Some(0));
    assert_eq!(plain.out, format!("{}\n", text.as_str().unwrap()));
    assert!(plain.err.contains("sampling: greedy"), "{plain:?}");
    let quiet = run(&[&greedy[..], &["--quiet"]].concat());
    assert_eq!((quiet.out, quiet.err.as_str()), (plain.out, ""));
}

#[test]
fn the_same_seed_gives_the_same_text_on_any_number_of_threads() {
    let model = qwen3();
    let sampled = |seed: &str, threads: &str| {
        let rest = ["--temperature", "1", "--seed", seed, "--threads", threads];
        let base = ["run", &model, "go", "--max-tokens", "24", "--json"];
        json(&[&base[..], &rest].concat())["ids"].clone()
    };
    let first = sampled("7", "1");
    assert_eq!(sampled("7", "1"), first);
    assert_eq!(sampled("7", "2"), first);
    assert_ne!(sampled("8", "1"), first);
}

#[test]
fn a_prompt_may_be_piped_and_follows_what_is_typed() {
    let model = qwen3();
    let base = [&["run", model.as_str()], &SAMPLED[..]].concat();
    let ids = |done: &Done| parsed(done)["ids"].clone();
    let typed = run(&[&base[..], &["one\n\ntwo"]].concat());
    assert_eq!(ids(&run_with_input(&base, "one\n\ntwo\n")), ids(&typed));
    assert_eq!(
        ids(&run_with_input(&[&base[..], &["one"]].concat(), "two\n")),
        ids(&typed)
    );
    assert_ne!(ids(&run_with_input(&base, "three")), ids(&typed));
}

#[test]
fn prompt_ids_are_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let (chat, file) = (folder.path().join("chat"), folder.path().join("ids"));
    let request =
        json!({"messages": [{"role": "user", "content": "hi"}], "add_generation_prompt": true});
    fs::write(&chat, request.to_string()).unwrap();
    let rendered = json(&[
        "tokenize",
        &qwen3(),
        "--chat",
        chat.to_str().unwrap(),
        "--json",
    ]);
    fs::write(&file, rendered["ids"].to_string()).unwrap();
    let from_ids = run_json(&["--prompt-ids", file.to_str().unwrap()]);
    assert_eq!(from_ids["ids"], run_json(&["hi"])["ids"]);
    let text = rendered["text"].as_str().unwrap();
    assert_eq!(run_json(&["--raw", text])["ids"], from_ids["ids"]);
}

#[test]
fn an_answer_ends_before_a_stop_string() {
    let whole = run_json(&["hello there", "--ignore-eos"]);
    let text = whole["text"].as_str().unwrap();
    let middle: Vec<char> = text
        .chars()
        .skip(text.chars().count() / 2)
        .take(3)
        .collect();
    let stop: String = middle.into_iter().collect();
    let cut = run_json(&[
        "hello there",
        "--ignore-eos",
        "--stop",
        "not in there",
        "--stop",
        &stop,
    ]);
    assert_eq!(cut["finish_reason"], "stop");
    assert_eq!(cut["text"], text[..text.find(&stop).unwrap()]);
}

#[test]
fn system_prompts_and_templates_change_the_prompt() {
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("t.jinja");
    fs::write(
        &file,
        "{% for m in messages %}[{{ m.role }}:{{ m.content }}]{% endfor %}",
    )
    .unwrap();
    let template = [
        "--chat-template",
        file.to_str().unwrap(),
        "--system",
        "S",
        "hi",
    ];
    assert_eq!(
        run_json(&template)["ids"],
        run_json(&["--raw", "[system:S][user:hi]"])["ids"]
    );
    let tokens = |more: &[&str]| run_json(more)["usage"]["prompt_tokens"].as_u64().unwrap();
    assert!(tokens(&["--system", "be brief", "hi"]) > tokens(&["hi"]));
    assert!(tokens(&["--raw", "hi"]) < tokens(&["hi"]));
}

#[test]
fn tokenize_goes_both_ways() {
    let model = qwen3();
    let ids = json(&["tokenize", &model, "Hello <|im_end|>", "--json"]);
    assert_eq!(names(&ids), ["ids"]);
    let list: Vec<String> = ids["ids"]
        .as_array()
        .unwrap()
        .iter()
        .map(Value::to_string)
        .collect();
    let decode = |more: &[&str]| {
        json(
            &[
                &["tokenize", &model, "--decode", &list.join(","), "--json"],
                more,
            ]
            .concat(),
        )
    };
    assert_eq!(decode(&[]), json!({"text": "Hello <|im_end|>"}));
    assert_eq!(decode(&["--skip-special"]), json!({"text": "Hello "}));
    let lines = "{\"text\":\"Hello\"}\nnonsense\n{\"ids\":[1]}\n{\"messages\":[{\"role\":\"user\",\"content\":\"x\"}]}\n{}\n";
    let done = run_with_input(&["tokenize", &model, "--jsonl", "-"], lines);
    assert_eq!(done.code, Some(0));
    let answers: Vec<Value> = done
        .out
        .lines()
        .map(|line| serde_json::from_str(line).unwrap())
        .collect();
    let shapes: Vec<Vec<&str>> = answers.iter().map(names).collect();
    assert_eq!(
        shapes,
        [
            vec!["ids"],
            vec!["error"],
            vec!["text"],
            vec!["ids", "text"],
            vec!["error"]
        ]
    );
}

#[test]
fn eval_scores_ids_and_texts() {
    let folder = tempfile::tempdir().unwrap();
    let (ids, text) = (folder.path().join("ids"), folder.path().join("text"));
    fs::write(&ids, "[1, 2, 3, 4]").unwrap();
    fs::write(&text, "Some text to be scored, word by word.").unwrap();
    let (model, ids, text) = (qwen3(), ids.to_str().unwrap(), text.to_str().unwrap());
    let scored = json(&["eval", &model, "--ids", ids, "--top", "3", "--json"]);
    assert_eq!(names(&scored), ["logprobs", "top"]);
    assert_eq!(scored["logprobs"].as_array().unwrap().len(), 3);
    let top = scored["top"].as_array().unwrap();
    assert_eq!(top.len(), 4);
    for position in top {
        let best = position.as_array().unwrap();
        assert_eq!(best.len(), 3);
        assert_eq!(names(&best[0]), ["id", "logit"]);
        let logit = |i: usize| best[i]["logit"].as_f64().unwrap();
        assert!(logit(0) >= logit(1) && logit(1) >= logit(2), "{position}");
    }
    // More than the model was made for are scored, and that is said.
    fs::write(ids, serde_json::to_string(&vec![1; 520]).unwrap()).unwrap();
    let longer = run(&["eval", &model, "--ids", ids, "--json"]);
    let said = "a context of 520 tokens is longer than the 512";
    assert!(longer.err.contains(said), "{longer:?}");
    assert_eq!(parsed(&longer)["logprobs"].as_array().unwrap().len(), 519);
    let scored = json(&["eval", &model, "--text", text, "--json"]);
    assert_eq!(names(&scored), ["nats_per_token", "perplexity", "tokens"]);
    let compared = json(&[
        "eval",
        &model,
        "--text",
        text,
        "--compare",
        "bf16",
        "--json",
    ]);
    assert_eq!(
        names(&compared),
        [
            "kl_mean",
            "kl_p99",
            "nats_per_token",
            "perplexity",
            "perplexity_ratio",
            "tokens",
            "top1_agreement"
        ]
    );
    assert_eq!(compared["perplexity_ratio"], json!(1.0));
}

#[test]
fn bench_reports_rates_and_ceilings() {
    let model = model("llama-f32").display().to_string();
    let lengths = ["--prompt-tokens", "16", "--gen-tokens", "4", "--runs", "1"];
    let bench = json(&[&["bench", &model, "--threads", "1", "--json"], &lengths[..]].concat());
    assert_eq!(names(&bench["prefill"]), ["fraction", "tflop_s", "tok_s"]);
    assert_eq!(
        names(&bench["decode"]),
        [
            "bytes_per_token",
            "fraction",
            "gb_s",
            "ms_per_token",
            "tok_s"
        ]
    );
    assert_eq!(
        names(&bench["ceilings"]),
        ["copy_gb_s", "matmul_tflop_s", "read_gb_s"]
    );
    assert_eq!(bench["threads"], 1);
    assert!(bench["device"].is_string());
    assert!(bench["profile"].is_null());
    // The plan foresees what the model then takes.
    let plan = json(&["plan", &model, "--json"]);
    assert_eq!(plan["weights_bytes"], bench["weights_bytes"]);
}

#[test]
fn bench_says_what_each_op_takes() {
    let model = model("llama-f32").display().to_string();
    let what = ["bench", &model, "--threads", "1", "--profile"];
    let lengths = ["--prompt-tokens", "16", "--gen-tokens", "4", "--runs", "2"];
    let bench = json(&[&what[..], &lengths, &["--json"]].concat());
    // Steps of the counted runs: one of each prompt, one for each token; warming up is not counted.
    for (phase, steps) in [("prefill", 2), ("decode", 8)] {
        let ops = bench["profile"][phase].as_array().unwrap();
        assert_eq!(
            names(&ops[0]),
            [
                "bytes_per_call",
                "calls",
                "gb_s",
                "gflop_s",
                "op",
                "product_fraction",
                "read_fraction",
                "us_per_call",
            ]
        );
        let find = |name: &str| ops.iter().find(|op| op["op"] == name).unwrap();
        assert_eq!(find("embed")["calls"], steps);
        let attention = find("attention");
        assert_eq!(attention["calls"], 2 * steps, "it has two layers");
        let number = |name: &str| attention[name].as_f64().unwrap();
        // Bytes of a call in its time are the speed, of which the ceiling makes the fraction.
        let gb_s = number("bytes_per_call") / number("us_per_call") / 1e3;
        assert!(gb_s > 0.0 && (number("gb_s") / gb_s - 1.0).abs() < 0.01);
        let part = gb_s / bench["ceilings"]["read_gb_s"].as_f64().unwrap();
        assert!((number("read_fraction") / part - 1.0).abs() < 0.01);
        assert!(number("product_fraction") > 0.0);
    }

    let text = run(&[&what[..], &lengths].concat());
    assert_eq!(text.code, Some(0), "{text:?}");
    for phase in ["prefill", "decode"] {
        let heading = text
            .out
            .lines()
            .find(|line| line.starts_with(phase) && line.contains("calls"));
        assert!(heading.is_some(), "{text:?}");
    }
    assert!(
        text.out
            .lines()
            .any(|line| line.starts_with("linear_qk_norm_rope_store"))
    );
}

#[test]
fn plan_knows_what_fits() {
    let model = qwen3();
    let plan = json(&["plan", &model, "--json"]);
    assert_eq!(
        names(&plan),
        [
            "device",
            "fits",
            "kv_bytes_per_token",
            "max_context_that_fits",
            "weights_bytes",
            "workspace_bytes"
        ]
    );
    // Two layers, one head of width 128, keys and values, in bf16.
    assert_eq!(plan["kv_bytes_per_token"], 2 * 128 * 2 * 2);
    assert_eq!(plan["max_context_that_fits"], 512);
    assert_eq!(
        (&plan["fits"], &plan["device"]),
        (&json!(true), &json!("cpu"))
    );
    // The table of rotations reaches as far as the context: 128 numbers of four bytes a position.
    let shorter = json(&["plan", &model, "--ctx-size", "12", "--json"]);
    let workspace = |plan: &Value| plan["workspace_bytes"].as_u64().unwrap();
    assert_eq!(workspace(&plan) - workspace(&shorter), 500 * 128 * 4);
    let f32 = json(&["plan", &model, "--dtype", "f32", "--json"]);
    assert_eq!(f32["kv_bytes_per_token"], 2 * 128 * 4 * 2);
    let huge = json(&["plan", &model, "--ctx-size", "1000000000000", "--json"]);
    assert_eq!(huge["fits"], false);
    let for_a_person = run(&["plan", &model]);
    assert!(
        for_a_person.out.contains("a context of 512 tokens"),
        "{for_a_person:?}"
    );
}

#[test]
fn show_resolves_the_configuration() {
    let config = json(&["show", &qwen3(), "--json"]);
    assert_eq!(config["family"], "qwen3");
    assert_eq!(config["num_layers"], 2);
    assert_eq!(config["layers"].as_array().unwrap().len(), 2);
    assert!(run(&["show", &qwen3()]).out.contains("hidden size"));
}

#[test]
fn doctor_has_a_remedy_for_each_thing_missing() {
    let found = json(&["doctor", "--offline", "--json"]);
    for name in [
        "cpu",
        "memory",
        "gpu",
        "driver",
        "kernel_pack",
        "toolchain",
        "cache",
        "hub",
    ] {
        let finding = &found[name];
        let ok = finding["ok"].as_bool().unwrap();
        assert_eq!(finding["remedy"].is_null(), ok, "{name}: {finding}");
        assert!(!finding["found"].as_str().unwrap().is_empty(), "{name}");
    }
    assert!(found["cpu"]["features"].is_array());
    assert!(found["cpu"]["instruction_set"].is_string());
    assert_eq!(found["hub"]["reachable"], Value::Null);
    assert_eq!(found["cache"]["path"], "/nonexistent/cache");
    let for_a_person = run(&["doctor", "--offline"]);
    assert_eq!(for_a_person.code, Some(0));
    assert!(for_a_person.out.contains("instruction") || for_a_person.out.contains("using "));
}

#[test]
fn drafts_change_no_token() {
    let models = model("qwen3").join("../../dflash/models");
    let path = |name: &str| models.join(name).to_str().unwrap().to_owned();
    let (target, drafter) = (path("qwen3-6l"), path("qwen3-6l-dflash-b8"));
    let answer = |more: &[&str]| {
        let prompt = ["run", &target, "Once upon", "--raw", "--json", "-n", "40"];
        let same = ["--dtype", "f32", "--temperature", "0.7", "--seed", "9"];
        json(&[&prompt[..], &same, more].concat())
    };
    let plain = answer(&[]);
    assert_eq!(plain.get("spec"), None);
    for more in [
        &["--spec", "ngram"][..],
        &["--spec", "auto"],
        &["--spec", "draft", "--draft-model", &target],
        &["--spec", "dflash", "--draft-model", &drafter],
        &["--draft-model", &drafter, "--num-draft-tokens", "3"],
    ] {
        let found = answer(more);
        assert_eq!(found["ids"], plain["ids"], "{more:?}");
        let count = |name: &str| found["spec"][name].as_u64().unwrap();
        assert!(count("accepted") <= count("drafted"), "{found}");
        if more.contains(&"draft") {
            assert!(count("accepted") > 20 / 2, "it drafts for itself: {found}");
        }
    }
    // Drawn drafts make another text of the same distribution; a greedy one stays.
    let drawn = answer(&[
        "--spec",
        "dflash",
        "--draft-model",
        &drafter,
        "--draft-sample",
    ]);
    assert_eq!(drawn["ids"].as_array().unwrap().len(), 40);

    let refused = |draft: &str, how: &str| {
        let done = run(&[
            "run",
            &target,
            "x",
            "--raw",
            "--spec",
            how,
            "--draft-model",
            draft,
        ]);
        assert_eq!(done.code, Some(1), "{done:?}");
        done.err
    };
    let message = refused(&path("qwen3-8l"), "draft");
    assert!(message.contains("another vocabulary"), "{message}");
    let message = refused(&path("qwen3-8l-dflash-b16"), "dflash");
    assert!(message.contains("num_target_layers"), "{message}");
    let message = refused(&drafter, "draft");
    assert!(message.contains("--spec dflash"), "{message}");
    let message = refused(&path("qwen3-8l"), "dflash");
    assert!(message.contains("num_target_layers"), "{message}");
}

#[test]
fn int8_in_every_way() {
    let model = qwen3();
    let folder = tempfile::tempdir().unwrap();
    let text = folder.path().join("text");
    fs::write(
        &text,
        "A small text that a small model has no idea of. ".repeat(20),
    )
    .unwrap();
    let eval = |model: &str, more: &[&str]| {
        let text = text.to_str().unwrap();
        json(
            &[
                &["eval", model, "--text", text, "--ctx-size", "64", "--json"],
                more,
            ]
            .concat(),
        )
    };
    let weights = ["--quant", "int8"];
    let cache = ["--kv-cache-dtype", "int8"];
    let compared = eval(
        &model,
        &[&weights[..], &cache, &["--compare", "bf16"]].concat(),
    );
    let kl = compared["kl_mean"].as_f64().unwrap();
    assert!(kl > 0.0 && kl < 0.01, "{compared}");
    // Each counts, and factors of one are no factors.
    let ppl = |more: &[&str]| eval(&model, more)["perplexity"].as_f64().unwrap();
    let smoothed = ppl(&cache);
    let plain = ppl(&[&cache[..], &["--kv-smoothing", "none"]].concat());
    let ones = folder.path().join("ones.json");
    let layer = vec![1.0; 128];
    fs::write(&ones, json!({"layers": [layer, layer]}).to_string()).unwrap();
    let ones = ones.to_str().unwrap();
    assert_eq!(
        ppl(&[&cache[..], &["--kv-smoothing", ones]].concat()),
        plain
    );
    assert!(smoothed != plain && plain != ppl(&[]) && ppl(&weights) != ppl(&[]));

    // As files it is what it is at load, but for the head.
    let out = folder.path().join("out");
    let out = out.to_str().unwrap();
    let done = run(&["quantize", &model, out]);
    assert_eq!(done.code, Some(0), "{done:?}");
    assert_eq!(eval(out, &weights)["perplexity"], ppl(&weights));
    let done = run(&["run", out, "hello", "--max-tokens", "2"]);
    assert!(
        done.code == Some(0) && done.err.contains("int8 weights"),
        "{done:?}"
    );
    let again = run(&["quantize", out, out]);
    assert!(
        again.code == Some(1) && again.err.contains("already"),
        "{again:?}"
    );

    // The plan foresees what is then loaded.
    let lengths = [
        "--prompt-tokens",
        "4",
        "--gen-tokens",
        "2",
        "--runs",
        "1",
        "--threads",
        "1",
    ];
    for (model, more) in [
        (&*model, &[&weights[..], &cache].concat()[..]),
        (out, &[]),
        (out, &weights),
    ] {
        let plan = json(&[&["plan", model, "--json"], more].concat());
        let bench = json(&[&["bench", model, "--json"], &lengths[..], more].concat());
        assert_eq!(plan["weights_bytes"], bench["weights_bytes"], "{more:?}");
        if more.len() > 2 {
            // Two layers, keys and values of 128 bytes and a scale.
            assert_eq!(plan["kv_bytes_per_token"], 2 * 2 * 132);
        }
    }

    let wrong = run(&["run", &model, "--kv-smoothing", ones, "hello"]);
    assert!(
        wrong.code == Some(2) && wrong.err.contains("--kv-cache-dtype int8"),
        "{wrong:?}"
    );
    fs::write(ones, json!({"layers": [[1.0]]}).to_string()).unwrap();
    let wrong = run(&[
        &["run", &model, "hello", "--kv-smoothing", ones],
        &cache[..],
    ]
    .concat());
    assert!(
        wrong.code == Some(1) && wrong.err.contains("does not fit"),
        "{wrong:?}"
    );
}
