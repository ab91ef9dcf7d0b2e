//! Every route over a fake runner, through a plain HTTP client on loopback.

use std::io::{BufReader, Read, Write};
use std::net::TcpStream;
use std::time::{Duration, Instant};

use crate::common::{Live, Setup, agent, live, read_stream, until};
use serde_json::{Value, json};
use tileinfer::engine::EngineOptions;
use tileinfer::runner::FakeOptions;
use tileinfer_server::{ServeOptions, Server};

const CHAT: &str = "/v1/chat/completions";
const TEXT: &str = "/v1/completions";

fn hello(more: &Value) -> Value {
    let mut body = json!({
        "model": "test/model",
        "messages": [{"role": "user", "content": "Hello, who are you?"}],
        "max_tokens": 12,
        "seed": 7,
    });
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

/// What a stream said in one of the deltas' fields.
fn said(chunks: &[Value], index: usize, field: &str) -> String {
    let choices = chunks
        .iter()
        .flat_map(|chunk| chunk["choices"].as_array().unwrap());
    choices
        .filter(|choice| choice["index"] == index)
        .filter_map(|choice| choice["delta"][field].as_str())
        .collect()
}

#[test]
fn small_services() {
    let live = live(&Setup::default());
    assert_eq!(live.get("/health"), (200, "{\"status\":\"ok\"}".to_owned()));
    let (status, models) = live.get("/v1/models");
    let models: Value = serde_json::from_str(&models).unwrap();
    assert_eq!(
        (status, &models["object"], &models["data"][0]["id"]),
        (200, &json!("list"), &json!("test/model"))
    );
    assert_eq!(live.get("/v1/models/test/model").0, 200);
    let (status, error) = live.get("/v1/models/other");
    assert!(
        status == 404 && error.contains("model_not_found"),
        "{error}"
    );
    let tokens = live.ok(
        "/tokenize",
        &json!({"prompt": "Hello <|im_end|> world", "return_token_strs": true}),
    );
    assert_eq!(tokens["count"], tokens["tokens"].as_array().unwrap().len());
    assert_eq!(tokens["token_strs"][2], "<|im_end|>");
    let text = live.ok("/detokenize", &json!({"tokens": tokens["tokens"]}));
    assert_eq!(text["prompt"], "Hello <|im_end|> world");
    let chat = live.ok(
        "/tokenize",
        &json!({"messages": [{"role": "user", "content": "Hi"}]}),
    );
    let text = live.ok("/detokenize", &json!({"tokens": chat["tokens"]}))["prompt"]
        .as_str()
        .unwrap()
        .to_owned();
    assert!(
        text.ends_with("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"),
        "{text}"
    );
    let (status, page) = live.get("/");
    assert!(status == 200 && page.contains("<!doctype html>"));
    assert_eq!(live.get("/nothing").0, 404);
    assert_eq!(live.get(CHAT).0, 405);
}

#[test]
fn an_answer_and_its_stream_are_the_same() {
    let live = live(&Setup::default());
    let whole = live.ok(CHAT, &hello(&json!({})));
    assert_eq!(whole["object"], "chat.completion");
    assert!(
        whole["id"].as_str().unwrap().starts_with("chatcmpl-")
            && whole["created"].as_u64().unwrap() > 1_600_000_000
    );
    let choice = &whole["choices"][0];
    assert_eq!(
        (&choice["finish_reason"], &choice["message"]["role"]),
        (&json!("length"), &json!("assistant"))
    );
    let text = choice["message"]["content"].as_str().unwrap();
    assert!(text.len() > 10);
    let usage = &whole["usage"];
    assert_eq!(
        (
            &usage["completion_tokens"],
            &usage["prompt_tokens_details"]["cached_tokens"]
        ),
        (&json!(12), &json!(0))
    );
    assert_eq!(
        usage["total_tokens"].as_u64(),
        Some(usage["prompt_tokens"].as_u64().unwrap() + 12)
    );

    let (chunks, _) = live.stream(CHAT, &hello(&json!({"stream": true})));
    assert_eq!(
        chunks[0]["choices"][0]["delta"],
        json!({"role": "assistant", "content": ""})
    );
    assert!(
        chunks
            .iter()
            .all(|chunk| chunk["object"] == "chat.completion.chunk"
                && chunk["id"] == chunks[0]["id"])
    );
    assert!(chunks.iter().all(|chunk| chunk.get("usage").is_none()));
    assert_eq!(said(&chunks, 0, "content"), text);
    assert!(chunks.len() > 8, "it streams");
    let last = chunks.last().unwrap();
    assert_eq!(last["choices"][0]["finish_reason"], "length");

    let options = json!({"stream": true, "stream_options": {"include_usage": true}});
    let (chunks, _) = live.stream(CHAT, &hello(&options));
    let (last, others) = chunks.split_last().unwrap();
    assert_eq!(
        (&last["choices"], &last["usage"]["completion_tokens"]),
        (&json!([]), &json!(12))
    );
    assert!(
        last["usage"]["prompt_tokens_details"]["cached_tokens"]
            .as_u64()
            .unwrap()
            >= 16,
        "seen before"
    );
    assert!(
        others
            .iter()
            .all(|chunk| chunk["usage"].is_null() && chunk.get("usage").is_some())
    );
    live.assert_whole();
}

#[test]
fn completions_take_texts_and_ids() {
    let live = live(&Setup::default());
    let body = |prompt: Value| json!({"prompt": prompt, "max_tokens": 9, "temperature": 0});
    let one = live.ok(TEXT, &body(json!("Once upon a time")));
    assert_eq!(one["object"], "text_completion");
    let text = one["choices"][0]["text"].as_str().unwrap().to_owned();
    let ids = live.tokenizer.encode("Once upon a time", true).unwrap();
    assert_eq!(live.ok(TEXT, &body(json!(ids)))["choices"][0]["text"], text);
    let many = live.ok(TEXT, &body(json!(["Once upon a time", "And"])));
    assert_eq!(
        (&many["choices"][0]["text"], &many["choices"][1]["index"]),
        (&json!(text), &json!(1))
    );
    assert_eq!(many["usage"]["completion_tokens"], 18);
    let both = live.ok(TEXT, &body(json!([ids, [1, 2, 3]])));
    assert_eq!(both["choices"][0]["text"], text);
    let mut echoed = body(json!("Once upon a time"));
    echoed["echo"] = true.into();
    assert_eq!(
        live.ok(TEXT, &echoed)["choices"][0]["text"],
        format!("Once upon a time{text}")
    );
    assert_eq!(
        live.ok(TEXT, &json!({"prompt": "x"}))["usage"]["completion_tokens"],
        16,
        "OpenAI's default"
    );

    let mut streamed = body(json!(["Once upon a time", "And"]));
    streamed["stream"] = true.into();
    let (chunks, _) = live.stream(TEXT, &streamed);
    let mut texts = [String::new(), String::new()];
    for chunk in &chunks {
        let choice = &chunk["choices"][0];
        texts[choice["index"].as_u64().unwrap() as usize]
            .push_str(choice["text"].as_str().unwrap());
    }
    assert_eq!(
        (&json!(texts[0]), &json!(texts[1])),
        (&many["choices"][0]["text"], &many["choices"][1]["text"])
    );

    let mut stopped = body(json!("Once upon a time"));
    let stop: String = text
        .chars()
        .skip(text.chars().count() / 2)
        .take(3)
        .collect();
    stopped["stop"] = json!(stop);
    let cut = live.ok(TEXT, &stopped);
    assert_eq!(cut["choices"][0]["text"], text[..text.find(&stop).unwrap()]);
    assert_eq!(cut["choices"][0]["finish_reason"], "stop");
    live.assert_whole();
}

#[test]
fn several_choices_differ_by_seed_and_repeat() {
    let live = live(&Setup::default());
    let body = hello(&json!({"n": 3, "temperature": 1.0}));
    let three = live.ok(CHAT, &body);
    let texts: Vec<&Value> = three["choices"]
        .as_array()
        .unwrap()
        .iter()
        .map(|choice| &choice["message"]["content"])
        .collect();
    assert!(texts.len() == 3 && texts[0] != texts[1] && texts[1] != texts[2]);
    assert_eq!(
        three["choices"],
        live.ok(CHAT, &body)["choices"],
        "a seed repeats"
    );
    assert_eq!(
        live.ok(CHAT, &hello(&json!({"temperature": 1.0})))["choices"][0]["message"]["content"],
        *texts[0]
    );
    assert_eq!(
        live.ok(CHAT, &hello(&json!({"temperature": 1.0, "seed": 8})))["choices"][0]["message"]["content"],
        *texts[1]
    );
    let mut streamed = body;
    streamed["stream"] = true.into();
    let (chunks, _) = live.stream(CHAT, &streamed);
    for (index, text) in texts.iter().enumerate() {
        assert_eq!(json!(said(&chunks, index, "content")), **text);
    }
}

#[test]
fn log_probabilities_in_both_shapes() {
    let live = live(&Setup::default());
    let answer = live.ok(
        CHAT,
        &hello(&json!({"logprobs": true, "top_logprobs": 3, "temperature": 0})),
    );
    let content = answer["choices"][0]["logprobs"]["content"]
        .as_array()
        .unwrap()
        .clone();
    assert_eq!(content.len(), 12);
    let text: String = content
        .iter()
        .map(|token| token["token"].as_str().unwrap())
        .collect();
    assert_eq!(answer["choices"][0]["message"]["content"], text);
    for token in &content {
        let top = token["top_logprobs"].as_array().unwrap();
        assert_eq!(
            (top.len(), &top[0]["token"], &top[0]["logprob"]),
            (3, &token["token"], &token["logprob"])
        );
        assert!(top[0]["logprob"].as_f64().unwrap() >= top[1]["logprob"].as_f64().unwrap());
        let bytes: Vec<u8> = token["bytes"]
            .as_array()
            .unwrap()
            .iter()
            .map(|byte| byte.as_u64().unwrap() as u8)
            .collect();
        assert_eq!(
            String::from_utf8_lossy(&bytes),
            token["token"].as_str().unwrap()
        );
    }
    let (chunks, _) = live.stream(
        CHAT,
        &hello(&json!({"logprobs": true, "top_logprobs": 3, "temperature": 0, "stream": true})),
    );
    let streamed: Vec<Value> = chunks
        .iter()
        .filter_map(|chunk| {
            chunk["choices"][0]["logprobs"]["content"]
                .as_array()
                .cloned()
        })
        .flatten()
        .collect();
    assert_eq!(streamed, content);

    let old = live.ok(
        TEXT,
        &json!({"prompt": "Hi", "max_tokens": 4, "logprobs": 2, "temperature": 0}),
    );
    let logprobs = &old["choices"][0]["logprobs"];
    assert_eq!(logprobs["tokens"].as_array().unwrap().len(), 4);
    assert_eq!(logprobs["top_logprobs"][0].as_object().unwrap().len(), 2);
    assert_eq!(
        logprobs["text_offset"][1].as_u64().unwrap() as usize,
        logprobs["tokens"][0].as_str().unwrap().chars().count()
    );
    // Without being asked for there are none.
    assert!(live.ok(CHAT, &hello(&json!({})))["choices"][0]["logprobs"].is_null());
}

/// Every way to be wrong is told in OpenAI's shape, and names the field.
#[test]
fn mistakes_are_named() {
    let live = live(&Setup {
        fake: FakeOptions {
            max_length: 64,
            ..Setup::default().fake
        },
        ..Setup::default()
    });
    let f = json!({"type": "function", "function": {"name": "f"}});
    let cases = [
        (json!({"frobnicate": 1}), "frobnicate", "not supported"),
        (
            json!({"response_format": {"type": "json_object", "extra": 1}}),
            "response_format.extra",
            "not supported",
        ),
        (json!({"functions": []}), "functions", "not supported"),
        (json!({"temperature": -1}), "temperature", "0 or more"),
        (json!({"temperature": "hot"}), "temperature", "number"),
        (json!({"top_p": 0}), "top_p", "above 0"),
        (json!({"top_k": -2}), "top_k", "0 or more"),
        (
            json!({"presence_penalty": 3}),
            "presence_penalty",
            "between",
        ),
        (json!({"n": 0}), "n", "between 1 and"),
        (json!({"n": 1000}), "n", "between 1 and"),
        (json!({"seed": 1.5}), "seed", "whole"),
        (json!({"stop": [1]}), "stop", "string"),
        (json!({"stop": [""]}), "stop", "empty"),
        (json!({"logit_bias": {"x": 1}}), "logit_bias", "token ids"),
        (json!({"top_logprobs": 2}), "top_logprobs", "logprobs"),
        (
            json!({"logprobs": true, "top_logprobs": 99}),
            "top_logprobs",
            "at most 20",
        ),
        (json!({"messages": []}), "messages", "between 1 and"),
        (json!({"messages": null}), "messages", "missing"),
        (
            json!({"messages": [{"role": "wizard", "content": "x"}]}),
            "messages[0]",
            "role",
        ),
        (
            json!({"messages": [{"role": "user", "content": 3}]}),
            "messages[0]",
            "content",
        ),
        (
            json!({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}),
            "messages",
            "only text",
        ),
        (
            json!({"stream_options": {"include_usage": true}}),
            "stream_options",
            "stream",
        ),
        (
            json!({"tools": [{"type": "retrieval"}]}),
            "tools[0].type",
            "functions",
        ),
        (
            json!({"tools": [{"type": "function", "function": {}}]}),
            "tools[0].function.name",
            "missing",
        ),
        (json!({"tools": [f, f]}), "tools", "two tools"),
        (
            json!({"tools": [f], "tool_choice": {"type": "function", "function": {"name": "g"}}}),
            "tool_choice",
            "name one",
        ),
        (
            json!({"tool_choice": "required"}),
            "tool_choice",
            "no tools",
        ),
        (
            json!({"response_format": {"type": "yaml"}}),
            "response_format.type",
            "yaml",
        ),
        (
            json!({"response_format": {"type": "json_schema"}}),
            "response_format.json_schema",
            "missing",
        ),
        (
            json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "wrong"}}}}),
            "response_format",
            "schema",
        ),
        (json!({"store": true}), "store", "false"),
        (json!({"modalities": ["audio"]}), "modalities", "text"),
    ];
    for (wrong, param, words) in cases {
        let (status, answer) = live.post(CHAT, &hello(&wrong));
        let error = &answer["error"];
        assert_eq!(
            (status, &error["type"]),
            (400, &json!("invalid_request_error")),
            "{wrong}: {answer}"
        );
        assert_eq!(error["param"], param, "{wrong}: {answer}");
        assert!(
            error["message"].as_str().unwrap().contains(words),
            "{wrong}: {answer}"
        );
        assert!(error.get("code").is_some());
    }
    let (status, answer) = live.post(CHAT, &hello(&json!({"model": "gpt-4"})));
    assert_eq!(
        (status, &answer["error"]["code"]),
        (404, &json!("model_not_found"))
    );
    let long = json!({"messages": [{"role": "user", "content": "word ".repeat(100)}]});
    let (status, answer) = live.post(CHAT, &hello(&long));
    let message = answer["error"]["message"].as_str().unwrap();
    assert_eq!(
        (status, &answer["error"]["code"]),
        (400, &json!("context_length_exceeded"))
    );
    assert!(message.contains("the limit is 64"), "{message}");
    for (wrong, param) in [
        (json!({"prompt": "x", "suffix": "y"}), "suffix"),
        (json!({"prompt": "x", "best_of": 2}), "best_of"),
        (json!({"prompt": {}}), "prompt"),
        (json!({}), "prompt"),
        (json!({"prompt": "x", "echo": true, "logprobs": 1}), "echo"),
    ] {
        let (status, answer) = live.post(TEXT, &wrong);
        assert_eq!(
            (status, &answer["error"]["param"]),
            (400, &json!(param)),
            "{answer}"
        );
    }
    let (status, answer) = live.post(TEXT, &json!({"prompt": [99_999_999]}));
    assert!(
        status == 400
            && answer["error"]["message"]
                .as_str()
                .unwrap()
                .contains("no token 99999999")
    );
    let mut response = agent().post(&live.url(CHAT)).send("{\"model\":").unwrap();
    assert_eq!(response.status(), 400);
    assert!(
        response
            .body_mut()
            .read_to_string()
            .unwrap()
            .contains("not JSON")
    );
    live.assert_whole();
}

#[test]
fn null_is_absent_and_names_of_callers_pass() {
    let live = live(&Setup::default());
    let plain = live.ok(CHAT, &hello(&json!({})));
    let nulls = json!({
        "stop": null, "tools": null, "tool_choice": null, "response_format": null, "logit_bias": null, "n": null,
        "functions": null, "user": "me", "metadata": {"a": "b"}, "store": false, "temperature": null,
        "max_tokens": null, "max_completion_tokens": 12, "parallel_tool_calls": true, "service_tier": "auto",
        // What sglang's gateway adds to every request.
        "separate_reasoning": true, "stream_reasoning": true, "skip_special_tokens": true, "no_stop_trim": false,
        "return_hidden_states": false, "ignore_eos": false, "continue_final_message": false,
    });
    assert_eq!(live.ok(CHAT, &hello(&nulls))["choices"], plain["choices"]);
}

#[test]
fn parameters_reach_the_sampler() {
    let live = live(&Setup::default());
    let text = |more: Value| {
        live.ok(CHAT, &hello(&more))["choices"][0]["message"]["content"]
            .as_str()
            .unwrap()
            .to_owned()
    };
    let plain = text(json!({}));
    let ids = live.ok(CHAT, &hello(&json!({"logprobs": true})));
    let first_text = ids["choices"][0]["logprobs"]["content"][0]["token"]
        .as_str()
        .unwrap()
        .to_owned();
    let first = (0..live.tokenizer.vocab_size() as u32)
        .find(|&id| live.tokenizer.token_bytes(id).as_deref() == Some(first_text.as_bytes()))
        .unwrap();
    assert!(plain.starts_with(&first_text));
    assert!(!text(json!({"logit_bias": {first.to_string(): -100}})).starts_with(&first_text));
    let forced = live.tokenizer.encode(" yes", false).unwrap();
    let yes = text(json!({"logit_bias": {forced[0].to_string(): 100}}));
    assert_eq!(yes, " yes".repeat(12));
    assert_ne!(
        text(json!({"logit_bias": {forced[0].to_string(): 9}, "repetition_penalty": 100})),
        yes
    );
    // Clearly the best of all, and of only a small share of the probability.
    let best = json!({forced[0].to_string(): 9});
    for (name, value) in [
        ("top_k", json!(1)),
        ("min_p", json!(1.0)),
        ("top_p", json!(1e-6)),
    ] {
        let filtered = text(json!({"temperature": 2.0, "logit_bias": best, name: value}));
        assert_eq!(filtered, yes, "{name}");
    }
    assert_ne!(text(json!({"temperature": 2.0, "logit_bias": best})), yes);
    assert_ne!(text(json!({"temperature": 2.0})), plain);
    let stop = live.ok(CHAT, &hello(&json!({"stop_token_ids": [first]})));
    assert_eq!(
        (
            &stop["choices"][0]["finish_reason"],
            &stop["usage"]["completion_tokens"]
        ),
        (&json!("stop"), &json!(1))
    );
    let end = crate::common::stop_ids(&live.tokenizer)[0].to_string();
    let ended = live.ok(CHAT, &hello(&json!({"logit_bias": {&end: 100}})));
    assert_eq!(
        (
            &ended["choices"][0]["finish_reason"],
            &ended["choices"][0]["message"]["content"]
        ),
        (&json!("stop"), &json!(""))
    );
    let on = live.ok(
        CHAT,
        &hello(&json!({"logit_bias": {&end: 100}, "ignore_eos": true})),
    );
    assert_eq!(
        (
            &on["choices"][0]["finish_reason"],
            &on["usage"]["completion_tokens"]
        ),
        (&json!("length"), &json!(12))
    );
}

#[test]
fn keys_origins_and_sizes() {
    let options = ServeOptions {
        api_key: Some("secret".to_owned()),
        cors_origins: vec!["https://app.example".to_owned()],
        max_body_bytes: 2000,
        max_messages: 3,
        max_schema_bytes: 100,
        ..ServeOptions::default()
    };
    let live = live(&Setup {
        options,
        ..Setup::default()
    });
    let send = |key: Option<&str>, body: &Value| {
        let mut request = agent().post(&live.url(CHAT));
        if let Some(key) = key {
            request = request.header("authorization", &format!("Bearer {key}"));
        }
        let mut response = request.send_json(body).unwrap();
        (
            response.status().as_u16(),
            response.body_mut().read_json::<Value>().unwrap(),
        )
    };
    for key in [
        None,
        Some(""),
        Some("secre"),
        Some("secrets"),
        Some("SECRET"),
        Some("secretsecret"),
    ] {
        let (status, answer) = send(key, &hello(&json!({})));
        assert_eq!(
            (status, &answer["error"]["code"]),
            (401, &json!("invalid_api_key")),
            "{key:?}"
        );
    }
    assert_eq!(send(Some("secret"), &hello(&json!({}))).0, 200);
    assert_eq!(live.get("/v1/models").0, 401);
    assert_eq!(live.get("/health").0, 200);
    let (status, answer) = send(Some("secret"), &hello(&json!({"user": "x".repeat(3000)})));
    assert!(
        status == 413
            && answer["error"]["message"]
                .as_str()
                .unwrap()
                .contains("2000 bytes")
    );
    let message = json!({"role": "user", "content": "x"});
    let many = json!({"messages": [message, message, message, message]});
    assert!(
        send(Some("secret"), &hello(&many)).1["error"]["message"]
            .as_str()
            .unwrap()
            .contains("between 1 and 3")
    );
    let schema = json!({"type": "object", "description": "d".repeat(200)});
    let format = json!({"response_format": {"type": "json_schema", "json_schema": {"name": "s", "schema": schema}}});
    assert!(
        send(Some("secret"), &hello(&format)).1["error"]["message"]
            .as_str()
            .unwrap()
            .contains("the limit is 100")
    );

    let asked = |origin: &str| {
        let request = ureq::http::Request::options(live.url(CHAT))
            .header("origin", origin)
            .body(())
            .unwrap();
        let response = agent().run(request).unwrap();
        let allowed = response.headers().get("access-control-allow-origin");
        (
            response.status().as_u16(),
            allowed.map(|value| value.to_str().unwrap().to_owned()),
        )
    };
    assert_eq!(
        asked("https://app.example"),
        (204, Some("https://app.example".to_owned()))
    );
    assert_eq!(asked("https://evil.example").1, None);
}

fn slow(max_spans: usize) -> Setup {
    let latency = Duration::from_millis(3);
    Setup {
        fake: FakeOptions {
            max_spans,
            latency,
            max_rows: 8,
            ..Setup::default().fake
        },
        ..Setup::default()
    }
}

/// Sends a request and leaves the connection open.
fn send_raw(live: &Live, body: &Value) -> TcpStream {
    let mut connection = TcpStream::connect(live.address).unwrap();
    let body = body.to_string();
    let head = format!(
        "POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\ncontent-length: {}\r\n\r\n",
        body.len()
    );
    connection.write_all(head.as_bytes()).unwrap();
    connection.write_all(body.as_bytes()).unwrap();
    connection
}

#[test]
fn who_hangs_up_frees_the_pages() {
    let live = live(&slow(1));
    let metrics = || live.engine.metrics().snapshot();
    for stream in [true, false] {
        let before = metrics().cancelled;
        let running = send_raw(
            &live,
            &hello(&json!({"max_tokens": 4000, "stream": stream})),
        );
        until(|| metrics().running == 1);
        let waiting = send_raw(
            &live,
            &hello(&json!({"max_tokens": 4000, "stream": stream})),
        );
        until(|| metrics().waiting == 1);
        drop(waiting);
        until(|| metrics().waiting == 0 && metrics().cancelled == before + 1);
        drop(running);
        until(|| metrics().cancelled == before + 2);
        live.assert_whole();
    }
    assert_eq!((metrics().finished_stop, metrics().finished_length), (0, 0));
}

#[test]
fn a_full_queue_turns_away_politely() {
    let engine = EngineOptions {
        max_waiting: 1,
        ..EngineOptions::default()
    };
    let live = live(&Setup { engine, ..slow(1) });
    let metrics = || live.engine.metrics().snapshot();
    let _running = send_raw(&live, &hello(&json!({"max_tokens": 4000, "stream": true})));
    until(|| metrics().running == 1);
    let _waiting = send_raw(&live, &hello(&json!({"max_tokens": 4000, "stream": true})));
    until(|| metrics().waiting == 1);
    for stream in [true, false] {
        let mut response = agent()
            .post(&live.url(CHAT))
            .send_json(hello(&json!({"stream": stream})))
            .unwrap();
        assert_eq!(
            (
                response.status().as_u16(),
                response.headers()["retry-after"].to_str().unwrap()
            ),
            (429, "1")
        );
        let error: Value = response.body_mut().read_json().unwrap();
        assert!(
            error["error"]["message"]
                .as_str()
                .unwrap()
                .contains("the limit is 1"),
            "{error}"
        );
    }
}

#[test]
fn a_long_prefill_shows_signs_of_life() {
    let mut setup = slow(1);
    setup.options.ping = Duration::from_millis(20);
    let live = live(&setup);
    let words = json!({"messages": [{"role": "user", "content": "word ".repeat(600)}], "stream": true, "max_tokens": 2});
    let (chunks, pings) = live.stream(CHAT, &hello(&words));
    assert!(pings >= 3, "{pings} pings");
    assert_eq!(chunks[0]["choices"][0]["delta"]["role"], "assistant");
}

#[test]
fn a_slow_reader_stalls_nobody() {
    let live = live(&Setup {
        fake: FakeOptions {
            max_length: 8192,
            ..Setup::default().fake
        },
        ..Setup::default()
    });
    // Reads nothing of a long answer.
    let unread = send_raw(&live, &hello(&json!({"max_tokens": 3000, "stream": true})));
    let before = Instant::now();
    for _ in 0..5 {
        live.ok(CHAT, &hello(&json!({})));
    }
    assert!(before.elapsed() < Duration::from_secs(10));
    until(|| live.engine.metrics().snapshot().finished_length >= 6);
    live.assert_whole();
    // It is all there for who reads late.
    unread
        .set_read_timeout(Some(Duration::from_secs(5)))
        .unwrap();
    let mut reader = BufReader::new(unread);
    let mut text = String::new();
    let mut buffer = [0; 65536];
    while !text.contains("[DONE]") {
        let count = reader.read(&mut buffer).unwrap();
        assert!(count > 0);
        text.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    assert!(text.contains("\"finish_reason\":\"length\""));
}

#[test]
fn a_server_says_that_it_is_loading_dead_or_leaving() {
    let server = Server::new(ServeOptions::default());
    let (address, stop, ended) = crate::common::start(server.clone());
    let status = |path: &str| {
        agent()
            .get(format!("http://{address}{path}"))
            .call()
            .unwrap()
    };
    assert_eq!(status("/health").status(), 503);
    assert!(
        status("/health")
            .body_mut()
            .read_to_string()
            .unwrap()
            .contains("loading")
    );
    assert_eq!(status("/v1/models").headers()["retry-after"], "1");
    assert_eq!(status("/metrics").status(), 200);
    let model = crate::common::model(&Setup::default());
    let engine = model.engine.clone();
    server.load(model);
    assert_eq!(status("/health").status(), 200);
    engine.shut_down();
    assert_eq!(status("/health").status(), 503);
    assert_eq!(status("/v1/models").status(), 503);
    stop.send(()).unwrap();
    ended.recv_timeout(Duration::from_secs(5)).unwrap();
}

#[test]
fn shutting_down_lets_answers_end_until_the_deadline() {
    // Enough time: the answer comes whole.
    let mut live = live(&slow(4));
    let connection = send_raw(&live, &hello(&json!({"max_tokens": 60, "stream": true})));
    until(|| live.engine.metrics().snapshot().running == 1);
    live.stop();
    live.wait(Duration::from_secs(20));
    let (head, chunks) = read_raw(connection);
    assert!(head.starts_with("HTTP/1.1 200"));
    assert!(chunks.contains("[DONE]") && chunks.contains("\"finish_reason\":\"length\""));
    assert!(TcpStream::connect(live.address).is_err());

    // Too little: it is cut, and the server goes all the same.
    let mut setup = slow(4);
    setup.options.grace = Duration::from_millis(50);
    let mut live = crate::common::live(&setup);
    let _connection = send_raw(&live, &hello(&json!({"max_tokens": 4000, "stream": true})));
    until(|| live.engine.metrics().snapshot().running == 1);
    let start = Instant::now();
    live.stop();
    live.wait(Duration::from_secs(5));
    assert!(start.elapsed() < Duration::from_secs(3));
    assert_eq!(live.engine.metrics().snapshot().cancelled, 1);
}

fn read_raw(mut connection: TcpStream) -> (String, String) {
    let mut all = String::new();
    connection.read_to_string(&mut all).unwrap();
    let (head, body) = all.split_once("\r\n\r\n").unwrap();
    (head.to_owned(), body.to_owned())
}

#[test]
fn counts_are_told_to_prometheus() {
    let live = live(&Setup::default());
    live.ok(CHAT, &hello(&json!({})));
    live.ok(CHAT, &hello(&json!({})));
    // Pages are counted now and then, and when nothing runs.
    live.assert_whole();
    let (status, text) = live.get("/metrics");
    assert_eq!(status, 200);
    let value = |name: &str| -> f64 {
        let line = text
            .lines()
            .find(|line| line.starts_with(&format!("tileinfer:{name}{{model_name=\"test/model\"")));
        line.unwrap_or_else(|| panic!("{name} in {text}"))
            .rsplit(' ')
            .next()
            .unwrap()
            .parse()
            .unwrap()
    };
    assert_eq!(value("generation_tokens_total"), 24.0);
    assert_eq!(
        text.matches("finished_reason=\"length\"} 2\n").count(),
        1,
        "{text}"
    );
    assert_eq!(
        (value("num_requests_running"), value("num_requests_waiting")),
        (0.0, 0.0)
    );
    assert!(value("prefix_cache_hits_total") >= 16.0 && value("prefix_cache_queries_total") > 40.0);
    assert_eq!(
        (value("kv_cache_usage_perc"), value("pages_lost_total")),
        (0.0, 0.0)
    );
    assert!(value("prefix_cache_usage_perc") > 0.0);
    assert_eq!(
        (
            value("time_to_first_token_seconds_count"),
            value("inter_token_latency_seconds_count")
        ),
        (2.0, 22.0)
    );
    assert!(value("e2e_request_latency_seconds_sum") > 0.0);
    // What vLLM's dashboards and alerts ask for.
    for name in [
        "num_requests_running",
        "num_requests_waiting",
        "kv_cache_usage_perc",
        "num_preemptions_total",
        "prompt_tokens_total",
        "generation_tokens_total",
        "prefix_cache_queries_total",
        "prefix_cache_hits_total",
        "time_to_first_token_seconds_sum",
        "inter_token_latency_seconds_sum",
        "request_time_per_output_token_seconds_sum",
        "e2e_request_latency_seconds_sum",
        "request_queue_time_seconds_sum",
        "request_prefill_time_seconds_sum",
        "request_decode_time_seconds_sum",
        "request_inference_time_seconds_sum",
        "request_prompt_tokens_sum",
        "request_generation_tokens_sum",
    ] {
        assert!(value(name) >= 0.0, "{name}");
    }
    assert!(text.trim_end().ends_with("# EOF"));
}

#[test]
fn an_engine_that_dies_under_a_stream_says_so() {
    let live = live(&slow(2));
    let connection = send_raw(&live, &hello(&json!({"max_tokens": 4000, "stream": true})));
    until(|| live.engine.metrics().snapshot().running == 1);
    live.engine.shut_down();
    let mut reader = BufReader::new(connection);
    let mut all = String::new();
    let mut buffer = [0; 4096];
    while !all.contains("\r\n0\r\n") {
        let count = reader.read(&mut buffer).unwrap();
        all.push_str(&String::from_utf8_lossy(&buffer[..count]));
    }
    let data: Vec<&str> = all
        .lines()
        .filter(|line| line.starts_with("data:"))
        .collect();
    let (chunks, _) = read_stream(data.join("\n").as_bytes());
    assert_eq!(
        chunks.last().unwrap()["error"]["type"],
        "service_unavailable"
    );
}
