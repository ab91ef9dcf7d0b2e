//! Structured output, tools and reasoning, through a plain HTTP client: forms are enforced on a runner that
//! would say anything, styles are read from scripts.

use crate::common::{Live, Setup, live};
use serde_json::{Value, json};

const CHAT: &str = "/v1/chat/completions";

fn ask(live: &Live, more: &Value) -> Value {
    let mut body =
        json!({"messages": [{"role": "user", "content": "Go"}], "max_tokens": 300, "seed": 3});
    body.as_object_mut()
        .unwrap()
        .extend(more.as_object().unwrap().clone());
    body["stream"] = false.into();
    let whole = live.ok(CHAT, &body)["choices"][0].clone();
    body["stream"] = true.into();
    let (chunks, _) = live.stream(CHAT, &body);
    assert_same(&whole, &chunks);
    whole
}

/// A stream says what the whole answer says.
fn assert_same(whole: &Value, chunks: &[Value]) {
    let deltas: Vec<&Value> = chunks
        .iter()
        .map(|chunk| &chunk["choices"][0]["delta"])
        .collect();
    for field in ["content", "reasoning_content"] {
        let streamed: String = deltas
            .iter()
            .filter_map(|delta| delta[field].as_str())
            .collect();
        assert_eq!(
            streamed,
            whole["message"][field].as_str().unwrap_or_default()
        );
    }
    // A call's first piece names it, the others bring its arguments.
    let mut calls: Vec<Value> = Vec::new();
    for piece in deltas
        .iter()
        .filter_map(|delta| delta["tool_calls"].as_array())
        .flatten()
    {
        let nth = piece["index"].as_u64().unwrap() as usize;
        if nth == calls.len() {
            assert!(piece["id"].as_str().unwrap().starts_with("call_"));
            assert_eq!(piece["type"], "function");
            calls.push(piece["function"].clone());
        } else {
            assert_eq!(nth + 1, calls.len(), "calls come one after the other");
            assert!(piece.get("id").is_none() && piece["function"].get("name").is_none());
            let arguments = [&calls[nth]["arguments"], &piece["function"]["arguments"]];
            calls[nth]["arguments"] = arguments.map(|text| text.as_str().unwrap()).concat().into();
        }
    }
    let expected: Vec<Value> = whole["message"]["tool_calls"]
        .as_array()
        .into_iter()
        .flatten()
        .map(|call| call["function"].clone())
        .collect();
    assert_eq!(calls, expected);
    assert_eq!(
        chunks.last().unwrap()["choices"][0]["finish_reason"],
        whole["finish_reason"]
    );
}

fn weather() -> Value {
    let parameters = json!({
        "type": "object",
        "properties": {"city": {"enum": ["Bern", "Zürich", "Genève"]}, "days": {"type": "integer", "minimum": 1, "maximum": 9}},
        "required": ["city", "days"],
        "additionalProperties": false,
    });
    json!({"type": "function", "function": {"name": "weather", "description": "Tells the weather", "parameters": parameters}})
}

fn time() -> Value {
    json!({"type": "function", "function": {"name": "time", "parameters": {"type": "object", "properties": {}, "additionalProperties": false}}})
}

#[test]
fn answers_follow_a_schema() {
    for model in ["smollm2", "qwen3"] {
        let live = live(&Setup {
            model,
            ..Setup::default()
        });
        let schema = json!({
            "type": "object",
            "properties": {
                "name": {"enum": ["Ada", "Grace", "Käthe"]},
                "age": {"type": "integer", "minimum": 0, "maximum": 150},
                "tags": {"type": "array", "items": {"type": "boolean"}, "minItems": 2, "maxItems": 3},
                "next": {"anyOf": [{"type": "null"}, {"$ref": "#/$defs/point"}]},
            },
            "required": ["name", "age", "tags", "next"],
            "additionalProperties": false,
            "$defs": {"point": {
                "type": "object", "properties": {"x": {"type": "boolean"}}, "required": ["x"], "additionalProperties": false,
            }},
        });
        for seed in 0..6 {
            let format = json!({"type": "json_schema", "json_schema": {"name": "person", "schema": schema, "strict": true}});
            let choice = ask(
                &live,
                &json!({"response_format": format, "seed": seed, "temperature": 1.0}),
            );
            assert_eq!(choice["finish_reason"], "stop");
            let text = choice["message"]["content"].as_str().unwrap();
            let value: Value =
                serde_json::from_str(text).unwrap_or_else(|error| panic!("{text}: {error}"));
            assert!(["Ada", "Grace", "Käthe"].contains(&value["name"].as_str().unwrap()));
            assert!(value["age"].as_u64().unwrap() <= 150);
            let tags = value["tags"].as_array().unwrap();
            assert!((2..=3).contains(&tags.len()) && tags.iter().all(Value::is_boolean));
            assert!(value["next"].is_null() || value["next"]["x"].is_boolean());
            assert_eq!(value.as_object().unwrap().len(), 4);
        }
        let object = ask(
            &live,
            &json!({"response_format": {"type": "json_object"}, "max_tokens": 40}),
        );
        assert!(
            object["message"]["content"]
                .as_str()
                .unwrap()
                .trim_start()
                .starts_with('{')
        );
        live.assert_whole();
    }
}

#[test]
fn a_call_can_be_demanded() {
    // One whose template knows tools, and one that has to be told of them.
    for model in ["qwen3", "smollm2"] {
        let live = live(&Setup {
            model,
            ..Setup::default()
        });
        for (seed, choice) in [
            json!("required"),
            json!({"type": "function", "function": {"name": "weather"}}),
        ]
        .iter()
        .enumerate()
        {
            let tools = json!([weather(), time()]);
            let more = json!({"tools": tools, "tool_choice": choice, "seed": seed, "parallel_tool_calls": false, "temperature": 1.0});
            let answer = ask(&live, &more);
            assert_eq!(
                (&answer["finish_reason"], &answer["message"]["content"]),
                (&json!("tool_calls"), &Value::Null)
            );
            let calls = answer["message"]["tool_calls"].as_array().unwrap();
            assert_eq!((calls.len(), &calls[0]["type"]), (1, &json!("function")));
            let function = &calls[0]["function"];
            let arguments: Value =
                serde_json::from_str(function["arguments"].as_str().unwrap()).unwrap();
            if function["name"] == "weather" {
                assert!(
                    (1..=9).contains(&arguments["days"].as_u64().unwrap())
                        && arguments["city"].is_string()
                );
            } else {
                assert!(function["name"] == "time" && seed == 0 && arguments == json!({}));
            }
        }
        live.assert_whole();
    }
}

#[test]
fn calls_and_reasoning_are_read() {
    let call = "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\", \"days\": 2}}\n</tool_call>";
    let answer = format!("<think>\nBern it is.\n</think>\n\nLet me look.\n\n{call}\n{call}");
    let script = vec![answer; 8];
    let live = live(&Setup {
        model: "qwen3",
        script,
        ..Setup::default()
    });
    let choice = ask(&live, &json!({"tools": [weather(), time()]}));
    let message = &choice["message"];
    assert_eq!(
        (&message["reasoning_content"], &message["content"]),
        (&json!("Bern it is."), &json!("Let me look."))
    );
    assert_eq!(message["tool_calls"].as_array().unwrap().len(), 2);
    assert_eq!(
        message["tool_calls"][1]["function"],
        json!({"name": "weather", "arguments": "{\"city\": \"Bern\", \"days\": 2}"})
    );
    assert_ne!(
        message["tool_calls"][0]["id"],
        message["tool_calls"][1]["id"]
    );
    assert_eq!(choice["finish_reason"], "tool_calls");
    let single = ask(
        &live,
        &json!({"tools": [weather()], "parallel_tool_calls": false}),
    );
    assert_eq!(single["message"]["tool_calls"].as_array().unwrap().len(), 1);
    // Without tools, or with none to be called, it is text.
    for more in [
        json!({}),
        json!({"tools": [weather()], "tool_choice": "none"}),
    ] {
        let plain = ask(&live, &more);
        assert_eq!(
            plain["message"]["content"],
            format!("Let me look.\n\n{call}\n{call}")
        );
        assert!(plain["message"].get("tool_calls").is_none() && plain["finish_reason"] == "stop");
    }
}

#[test]
fn thinking_can_come_before_a_form() {
    let live = live(&Setup {
        model: "qwen3",
        ..Setup::default()
    });
    let close = live.tokenizer.token_id("</think>").unwrap().to_string();
    let schema = json!({"enum": ["yes", "no"]});
    let format =
        json!({"type": "json_schema", "json_schema": {"name": "answer", "schema": schema}});
    // The fake runner would never close its reasoning by itself.
    let more = json!({
        "response_format": format, "chat_template_kwargs": {"enable_thinking": true},
        "logit_bias": {close: 7.5}, "temperature": 1.0,
    });
    let choice = ask(&live, &more);
    assert_eq!(choice["finish_reason"], "stop", "{choice}");
    assert!(
        ["\"yes\"", "\"no\""].contains(&choice["message"]["content"].as_str().unwrap()),
        "{choice}"
    );
    assert!(
        !choice["message"]["reasoning_content"]
            .as_str()
            .unwrap()
            .is_empty()
    );
    // Unless asked for, a form comes at once.
    let choice = ask(
        &live,
        &json!({"response_format": {"type": "json_schema", "json_schema": {"schema": {"const": 1}}}}),
    );
    assert_eq!(
        (
            &choice["message"]["content"],
            &choice["message"]["reasoning_content"]
        ),
        (&json!("1"), &Value::Null)
    );
}

#[test]
fn tools_are_told_to_templates_that_know_none() {
    let live = live(&Setup::default());
    let call = json!({"id": "call_1", "type": "function", "function": {"name": "weather", "arguments": "{\"city\": \"Bern\"}"}});
    let messages = json!([
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Weather?"},
        {"role": "assistant", "content": null, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "sunny"},
    ]);
    let tokens = live.ok(
        "/tokenize",
        &json!({"messages": messages, "tools": [weather()]}),
    );
    let text = live.ok("/detokenize", &json!({"tokens": tokens["tokens"]}))["prompt"]
        .as_str()
        .unwrap()
        .to_owned();
    for part in [
        "<|im_start|>system\nBe brief.\n\nYou can call these functions",
        "\"name\":\"weather\"",
        "<|im_start|>assistant\n<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Bern\"}}\n</tool_call><|im_end|>",
        "<|im_start|>user\n<tool_response>\nsunny\n</tool_response><|im_end|>",
    ] {
        assert!(text.contains(part), "{part} in {text}");
    }
}

#[test]
fn what_cannot_go_together_is_refused() {
    let live = live(&Setup::default());
    let refuse = |more: Value, param: &str| {
        let mut body = json!({"messages": [{"role": "user", "content": "Go"}]});
        body.as_object_mut()
            .unwrap()
            .extend(more.as_object().unwrap().clone());
        let (status, answer) = live.post(CHAT, &body);
        assert_eq!(
            (status, &answer["error"]["param"]),
            (400, &json!(param)),
            "{answer}"
        );
    };
    refuse(
        json!({"tools": [weather()], "response_format": {"type": "json_object"}}),
        "response_format",
    );
    let mut strict = weather();
    strict["function"]["strict"] = true.into();
    refuse(json!({"tools": [strict]}), "tools[0].function.strict");
    let unsupported =
        json!({"type": "object", "not": {"type": "string"}, "unevaluatedProperties": false});
    refuse(
        json!({"response_format": {"type": "json_schema", "json_schema": {"schema": unsupported}}}),
        "response_format",
    );
}
