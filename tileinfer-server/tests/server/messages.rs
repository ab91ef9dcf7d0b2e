//! Anthropic's messages API through a plain client: what is sent byte by byte, where the official package would
//! forgive.

use std::io::{BufRead, BufReader};

use crate::common::{Live, Setup, agent, live};
use serde_json::{Value, json};
use tileinfer_server::ServeOptions;

const MESSAGES: &str = "/v1/messages";

fn body(more: &Value) -> Value {
    let mut body = json!({"model": "test/model", "max_tokens": 200, "messages": [{"role": "user", "content": "Go"}]});
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body
}

/// Names and data of a stream's events.
fn events(live: &Live, more: &Value) -> Vec<(String, Value)> {
    let mut body = body(more);
    body["stream"] = true.into();
    let mut response = agent().post(&live.url(MESSAGES)).send_json(&body).unwrap();
    assert_eq!(response.status().as_u16(), 200);
    let lines = BufReader::new(response.body_mut().as_reader()).lines();
    let lines: Vec<String> = lines
        .map(Result::unwrap)
        .filter(|line| !line.is_empty())
        .collect();
    let events = lines.chunks(2).map(|event| {
        let name = event[0].strip_prefix("event: ").unwrap().to_owned();
        let data: Value = serde_json::from_str(event[1].strip_prefix("data: ").unwrap()).unwrap();
        assert_eq!(data["type"], name);
        (name, data)
    });
    events.collect()
}

/// The message that the events of a stream make, checked for their order on the way.
fn gathered(events: &[(String, Value)]) -> Value {
    let (first, rest) = events.split_first().unwrap();
    assert_eq!(first.0, "message_start");
    let mut message = first.1["message"].clone();
    assert_eq!(
        (&message["content"], &message["stop_reason"]),
        (&json!([]), &Value::Null)
    );
    let mut blocks: Vec<Value> = Vec::new();
    let (mut open, mut input) = (false, String::new());
    for (name, data) in rest {
        let index = data["index"].as_u64().map(|index| index as usize);
        match name.as_str() {
            "ping" => {}
            "content_block_start" => {
                assert!(!open && index == Some(blocks.len()), "{events:?}");
                (open, input) = (true, String::new());
                blocks.push(data["content_block"].clone());
            }
            "content_block_delta" => {
                assert!(open && index == Some(blocks.len() - 1), "{events:?}");
                let (block, delta) = (blocks.last_mut().unwrap(), &data["delta"]);
                let (field, piece) = match delta["type"].as_str().unwrap() {
                    "text_delta" => ("text", &delta["text"]),
                    "thinking_delta" => ("thinking", &delta["thinking"]),
                    "input_json_delta" => {
                        input.push_str(delta["partial_json"].as_str().unwrap());
                        continue;
                    }
                    other => panic!("{other}"),
                };
                block[field] = format!(
                    "{}{}",
                    block[field].as_str().unwrap(),
                    piece.as_str().unwrap()
                )
                .into();
            }
            "content_block_stop" => {
                assert!(open && index == Some(blocks.len() - 1), "{events:?}");
                open = false;
                if !input.is_empty() {
                    blocks.last_mut().unwrap()["input"] = serde_json::from_str(&input).unwrap();
                }
            }
            "message_delta" => {
                assert!(!open);
                for field in ["stop_reason", "stop_sequence"] {
                    message[field] = data["delta"][field].clone();
                }
                message["usage"] = data["usage"].clone();
            }
            "message_stop" => {}
            other => panic!("{other}"),
        }
    }
    let names: Vec<&str> = events.iter().map(|(name, _)| name.as_str()).collect();
    assert_eq!(names[names.len() - 2..], ["message_delta", "message_stop"]);
    message["content"] = blocks.into();
    message
}

/// An answer, whole and streamed, which must be the same.
fn ask(live: &Live, more: &Value) -> Value {
    let mut whole = live.ok(MESSAGES, &body(more));
    let mut streamed = gathered(&events(live, more));
    for message in [&mut whole, &mut streamed] {
        assert!(message["id"].as_str().unwrap().starts_with("msg_"));
        message["id"] = Value::Null;
        // The second one finds the prompt in the cache.
        let usage = &message["usage"];
        let prompt = usage["input_tokens"].as_u64().unwrap()
            + usage["cache_read_input_tokens"].as_u64().unwrap();
        message["usage"] = json!({"prompt": prompt, "output_tokens": usage["output_tokens"]});
        for block in message["content"].as_array_mut().unwrap() {
            if block["type"] == "tool_use" {
                assert!(block["id"].as_str().unwrap().starts_with("toolu_"));
                block["id"] = Value::Null;
            }
        }
    }
    assert_eq!(whole, streamed);
    whole
}

fn scripted(text: &str) -> Live {
    live(&Setup {
        model: "qwen3",
        script: vec![text.to_owned(); 4],
        ..Setup::default()
    })
}

fn weather() -> Value {
    json!({"name": "weather", "description": "Tells the weather", "input_schema": {
        "type": "object", "properties": {"city": {"enum": ["Bern", "Zürich"]}}, "required": ["city"], "additionalProperties": false,
    }})
}

#[test]
fn text_thinking_and_calls_are_blocks() {
    let call =
        "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call>";
    let live = scripted(&format!(
        "<think>\nBern it is.\n</think>\n\nLet me look.\n\n{call}\n{call}"
    ));
    let more =
        json!({"tools": [weather()], "thinking": {"type": "enabled", "budget_tokens": 1024}});
    let message = ask(&live, &more);
    let used =
        json!({"type": "tool_use", "id": null, "name": "weather", "input": {"city": "Bern"}});
    assert_eq!(
        message["content"],
        json!([
            {"type": "thinking", "thinking": "Bern it is.", "signature": ""},
            {"type": "text", "text": "Let me look."},
            used,
            used,
        ])
    );
    assert_eq!(
        (&message["stop_reason"], &message["stop_sequence"]),
        (&json!("tool_use"), &Value::Null)
    );
    assert_eq!(
        (&message["role"], &message["type"], &message["model"]),
        (&json!("assistant"), &json!("message"), &json!("test/model"))
    );
    let single = json!({"tools": [weather()], "tool_choice": {"type": "auto", "disable_parallel_tool_use": true}});
    assert_eq!(ask(&live, &single)["content"].as_array().unwrap().len(), 3);
    live.assert_whole();
}

#[test]
fn reasons_to_stop_are_told() {
    // A stop string leaves the script where it is, so each request has a server of its own.
    let says = "One two three four.";
    for (more, text, reason, sequence) in [
        (json!({}), says, "end_turn", Value::Null),
        (
            json!({"stop_sequences": ["nowhere", "thr", "two th"]}),
            "One ",
            "stop_sequence",
            json!("two th"),
        ),
    ] {
        let whole = scripted(says).ok(MESSAGES, &body(&more));
        let streamed = gathered(&events(&scripted(says), &more));
        for message in [whole, streamed] {
            assert_eq!(
                (
                    &message["content"][0]["text"],
                    &message["stop_reason"],
                    &message["stop_sequence"]
                ),
                (&json!(text), &json!(reason), &sequence)
            );
        }
    }
}

#[test]
fn a_limit_is_told_and_a_call_can_be_demanded() {
    let live = live(&Setup {
        model: "qwen3",
        ..Setup::default()
    });
    let message = ask(&live, &json!({"max_tokens": 5, "temperature": 0.0}));
    assert_eq!(message["stop_reason"], "max_tokens");
    assert_eq!(message["usage"]["output_tokens"], 5);
    for choice in [
        json!({"type": "any"}),
        json!({"type": "tool", "name": "weather"}),
    ] {
        let message = live.ok(
            MESSAGES,
            &body(&json!({"tools": [weather()], "tool_choice": choice})),
        );
        let block = &message["content"][0];
        assert_eq!(
            (&block["type"], &message["stop_reason"]),
            (&json!("tool_use"), &json!("tool_use"))
        );
        assert!(["Bern", "Zürich"].contains(&block["input"]["city"].as_str().unwrap()));
    }
    let schema = json!({"type": "object", "properties": {"yes": {"type": "boolean"}}, "required": ["yes"], "additionalProperties": false});
    let more = json!({"output_config": {"format": {"type": "json_schema", "schema": schema}}});
    let message = live.ok(MESSAGES, &body(&more));
    let text = message["content"][0]["text"].as_str().unwrap();
    let value: Value = serde_json::from_str(text).unwrap();
    assert!(value["yes"].is_boolean(), "{text}");
}

/// What a conversation becomes is what the same conversation becomes through OpenAI's API.
#[test]
fn conversations_mean_the_same() {
    let live = live(&Setup {
        model: "qwen3",
        ..Setup::default()
    });
    let mut asked = body(&json!({
        "system": [{"type": "text", "text": "Be brief.", "cache_control": {"type": "ephemeral"}}],
        "tools": [weather()],
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Weather"}]},
            {"role": "user", "content": "in Bern?"},
            {"role": "assistant", "content": [
                {"type": "thinking", "thinking": "Look it up.", "signature": "x"},
                {"type": "text", "text": "Wait."},
                {"type": "tool_use", "id": "toolu_1", "name": "weather", "input": {"city": "Bern"}},
            ]},
            {"role": "user", "content": [
                {"type": "tool_result", "tool_use_id": "toolu_1", "content": [{"type": "text", "text": "sunny"}]},
                {"type": "text", "text": "And?"},
            ]},
        ],
    }));
    let function = json!({"name": "weather", "arguments": "{\"city\":\"Bern\"}"});
    let same = json!({
        "chat_template_kwargs": {"enable_thinking": false},
        "tools": [{"type": "function", "function": {
            "name": "weather", "description": "Tells the weather", "parameters": weather()["input_schema"],
        }}],
        "messages": [
            {"role": "system", "content": "Be brief."},
            {"role": "user", "content": "Weather\nin Bern?"},
            {"role": "assistant", "content": "Wait.", "reasoning_content": "Look it up.", "tool_calls": [{"id": "toolu_1", "type": "function", "function": function}]},
            {"role": "tool", "tool_call_id": "toolu_1", "content": "sunny"},
            {"role": "user", "content": "And?"},
        ],
    });
    let tokens = live.ok("/tokenize", &same)["tokens"].clone();
    asked.as_object_mut().unwrap().remove("max_tokens");
    let counted = live.ok("/v1/messages/count_tokens", &asked);
    assert_eq!(counted["input_tokens"], tokens.as_array().unwrap().len());
    // The prompts are the same token by token: one is found in the cache whole, but for its last page.
    let mut chat = same;
    chat["max_tokens"] = 1.into();
    live.ok("/v1/chat/completions", &chat);
    asked["max_tokens"] = 1.into();
    let usage = &live.ok(MESSAGES, &asked)["usage"];
    let (new, cached) = (
        usage["input_tokens"].as_u64().unwrap(),
        usage["cache_read_input_tokens"].as_u64().unwrap(),
    );
    assert!(new <= 16 && cached > 100, "{usage}");
    // An answer that the caller began goes on.
    let begun = body(
        &json!({"messages": [{"role": "user", "content": "Go"}, {"role": "assistant", "content": "So"}]}),
    );
    let counted = live.ok("/v1/messages/count_tokens", &begun);
    let same = json!({
        "messages": begun["messages"], "continue_final_message": true,
        "chat_template_kwargs": {"enable_thinking": false},
    });
    assert_eq!(
        counted["input_tokens"],
        live.ok("/tokenize", &same)["count"]
    );
}

#[test]
fn mistakes_are_told_in_its_own_shape() {
    let live = live(&Setup {
        options: ServeOptions {
            api_key: Some("secret".to_owned()),
            max_body_bytes: 4000,
            ..ServeOptions::default()
        },
        ..Setup::default()
    });
    let post = |body: &Value, name: &str, key: &str| {
        let request = agent().post(&live.url(MESSAGES)).header(name, key);
        let mut response = request.send_json(body).unwrap();
        let answer: Value = response.body_mut().read_json().unwrap();
        (response.status().as_u16(), answer)
    };
    for (name, key) in [("x-api-key", "secret"), ("authorization", "Bearer secret")] {
        assert_eq!(post(&body(&json!({"max_tokens": 1})), name, key).0, 200);
    }
    let mut without = body(&json!({}));
    without.as_object_mut().unwrap().remove("max_tokens");
    let long = json!({"messages": [{"role": "user", "content": "x".repeat(5000)}]});
    let image = json!([{"type": "image", "source": {"type": "url", "url": "x"}}]);
    for (wrong, key, status, kind, says) in [
        (
            body(&json!({})),
            "wrong",
            401,
            "authentication_error",
            "x-api-key",
        ),
        (
            body(&json!({"model": "other"})),
            "secret",
            404,
            "not_found_error",
            "other",
        ),
        (body(&long), "secret", 413, "request_too_large", "4000"),
        (
            without,
            "secret",
            400,
            "invalid_request_error",
            "max_tokens is missing",
        ),
        (
            body(&json!({"mcp_servers": []})),
            "secret",
            400,
            "invalid_request_error",
            "mcp_servers",
        ),
        (
            body(&json!({"messages": []})),
            "secret",
            400,
            "invalid_request_error",
            "messages",
        ),
        (
            body(&json!({"messages": [{"role": "tool", "content": "x"}]})),
            "secret",
            400,
            "invalid_request_error",
            "messages[0].role",
        ),
        (
            body(&json!({"messages": [{"role": "user", "content": image}]})),
            "secret",
            400,
            "invalid_request_error",
            "messages[0].content[0]",
        ),
        (
            body(&json!({"tools": [{"type": "web_search_20250305", "name": "web_search"}]})),
            "secret",
            400,
            "invalid_request_error",
            "tools[0].type",
        ),
        (
            body(&json!({"temperature": -1})),
            "secret",
            400,
            "invalid_request_error",
            "temperature",
        ),
        (
            body(&json!({"thinking": {"type": "loud"}})),
            "secret",
            400,
            "invalid_request_error",
            "thinking.type",
        ),
    ] {
        let (got, answer) = post(&wrong, "x-api-key", key);
        assert_eq!(got, status, "{answer}");
        assert_eq!(answer["type"], "error");
        assert_eq!(answer["error"]["type"], kind);
        assert!(
            answer["error"]["message"].as_str().unwrap().contains(says),
            "{answer}"
        );
    }
}
