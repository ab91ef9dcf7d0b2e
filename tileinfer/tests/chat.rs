//! Chat templates against transformers' `apply_chat_template`, refusals included.

use std::time::{Duration, Instant};
use std::{fs, path::Path};

use proptest::prelude::*;
use serde_json::{Map, Value, json};
use tileinfer::{
    ErrorKind,
    chat::{ChatMessage, ChatRequest, ChatTemplate, chat_prompt},
    tokenizer::Tokenizer,
};

mod common;

use common::{golden, model_dir, testdata};

const NAMES: [&str; 10] = [
    "apertus",
    "llama3",
    "llama3_1",
    "llama3_1-json-tools",
    "mistral-7b-v0.1",
    "mistral-7b-v0.3",
    "mistral-nemo",
    "qwen2_5",
    "qwen3",
    "smollm2",
];

/// The golden record as a request.
fn request(record: &Value) -> ChatRequest {
    let mut object = record.as_object().unwrap().clone();
    for field in ["case", "rendered", "ids", "error"] {
        object.remove(field);
    }
    serde_json::from_value(object.into()).unwrap()
}

fn parsed(request: Value) -> ChatRequest {
    serde_json::from_value(request).unwrap()
}

fn template(source: &str) -> ChatTemplate {
    ChatTemplate::from_source(source, Map::new()).unwrap()
}

fn load(name: &str) -> Option<ChatTemplate> {
    model_dir(name).map(|dir| ChatTemplate::load(&dir).unwrap())
}

/// What a template makes of some data.
fn rendered(source: &str, variables: Value) -> tileinfer::Result<String> {
    let mut object = variables;
    object["messages"] = json!([{"role": "user", "content": "Hi"}]);
    template(source).render(&parsed(object))
}

#[test]
fn prompts_agree_with_transformers() {
    for name in NAMES {
        let Some(dir) = model_dir(name) else { continue };
        let template = ChatTemplate::load(&dir).unwrap();
        let tokenizer = dir
            .join("tokenizer.json")
            .exists()
            .then(|| Tokenizer::from_dir(&dir).unwrap());
        for record in golden(name, "chat") {
            let case = record["case"].as_str().unwrap();
            match (
                template.render(&request(&record)),
                record["rendered"].as_str(),
            ) {
                (Ok(text), Some(expected)) => {
                    assert_eq!(text, expected, "{name}: {case}");
                    if let Some(tokenizer) = &tokenizer {
                        let ids: Vec<u32> = serde_json::from_value(record["ids"].clone()).unwrap();
                        assert_eq!(
                            tokenizer.encode(&text, false).unwrap(),
                            ids,
                            "{name}: {case}"
                        );
                    }
                }
                (Err(error), None) => {
                    assert_eq!(error.kind(), ErrorKind::Usage, "{name}: {case}: {error}");
                    let theirs = record["error"].as_str().unwrap();
                    if let Some(reason) = theirs.strip_prefix("TemplateError: ") {
                        assert!(
                            error.to_string().ends_with(reason),
                            "{name}: {case}: {error}"
                        );
                    }
                }
                (Ok(text), None) => panic!("{name}: {case}: not refused: {text}\n{record}"),
                (Err(error), Some(_)) => panic!("{name}: {case}: {error}"),
            }
        }
    }
}

/// Golden records that are plain conversations.
fn plain_records(name: &str) -> impl Iterator<Item = (Value, Vec<ChatMessage>)> {
    golden(name, "chat").into_iter().filter_map(|record| {
        let messages: Vec<ChatMessage> = serde_json::from_value(record["messages"].clone()).ok()?;
        let fields = record["messages"]
            .as_array()?
            .iter()
            .map(|message| message.as_object());
        let is_plain = fields.flatten().all(|message| message.len() == 2)
            && record.get("continue_final_message").is_none()
            && record["tools"].as_array().is_none_or(Vec::is_empty);
        is_plain.then_some((record, messages))
    })
}

#[test]
fn the_built_in_qwen3_prompt_agrees_with_the_models() {
    let mut count = 0;
    for (record, messages) in plain_records("qwen3") {
        let case = record["case"].as_str().unwrap();
        let prompt = chat_prompt(
            "qwen3",
            &messages,
            record["add_generation_prompt"] == true,
            record["enable_thinking"] != false,
        );
        if case == "unknown role" {
            // The model's template drops such a message without a word.
            assert!(prompt.unwrap_err().to_string().contains("critic"));
            continue;
        }
        assert_eq!(
            prompt.ok().as_deref(),
            record["rendered"].as_str(),
            "{case}"
        );
        count += 1;
    }
    assert!(count > 15, "only {count} plain conversations");
}

#[test]
fn the_built_in_apertus_prompt_agrees_with_the_models() {
    let model = load("apertus").unwrap();
    let mut count = 0;
    for (record, messages) in plain_records("apertus") {
        let case = record["case"].as_str().unwrap();
        for enable_thinking in [true, false] {
            let mut request = request(&record);
            // The built-in one tells today's date.
            request.now = None;
            request
                .variables
                .insert("enable_thinking".into(), enable_thinking.into());
            let expected = model.render(&request);
            let prompt = chat_prompt(
                "apertus",
                &messages,
                request.add_generation_prompt,
                enable_thinking,
            );
            assert_eq!(prompt.ok(), expected.ok(), "{case}");
            count += 1;
        }
    }
    assert!(count > 30, "only {count} plain conversations");
    let two = [
        ChatMessage::new("assistant", "One."),
        ChatMessage::new("assistant", "Two."),
    ];
    let prompt = chat_prompt("apertus", &two, true, true).unwrap();
    assert!(prompt.starts_with("<s><|system_start|>You are Apertus, a helpful assistant"));
    assert!(prompt.contains(
        "<|developer_start|>Deliberation: enabled\nTool Capabilities: disabled<|developer_end|>"
    ));
    assert!(prompt.ends_with("<|developer_end|><|assistant_start|>One.Two.<|assistant_start|>"));
    let late = [
        ChatMessage::new("user", "Hi"),
        ChatMessage::new("system", "Late."),
    ];
    assert!(chat_prompt("apertus", &late, true, true).is_err());
}

#[test]
fn other_model_types_have_no_built_in_prompt() {
    let hi = [ChatMessage::new("user", "Hi")];
    let error = chat_prompt("llama", &hi, true, true).unwrap_err();
    assert!(error.to_string().contains("llama"), "{error}");
    assert!(chat_prompt("qwen3", &[], true, true).is_err());
}

fn directory(files: &[(&str, &str)]) -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in files {
        let path = dir.path().join(name);
        fs::create_dir_all(path.parent().unwrap()).unwrap();
        fs::write(path, text).unwrap();
    }
    dir
}

#[test]
fn templates_are_found_in_transformers_order() {
    let file = ("chat_template.jinja", "file {{ bos_token }}");
    let config = (
        "tokenizer_config.json",
        r#"{"chat_template": "config {{ bos_token }}", "bos_token": {"content": "<b>", "special": true}}"#,
    );
    let list = (
        "tokenizer_config.json",
        r#"{"bos_token": "<b>", "chat_template": [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "with tools"}]}"#,
    );
    let old = (
        "chat_template.json",
        r#"{"chat_template": "old{{ bos_token }}"}"#,
    );
    let extra = ("additional_chat_templates/tool_use.jinja", "extra");
    let tokens = ("tokens.json", r#"{"bos_token": "<t>"}"#);
    let map = ("special_tokens_map.json", r#"{"bos_token": "<m>"}"#);
    let with_tools = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": []});
    let without = json!({"messages": [{"role": "user", "content": "Hi"}], "tools": null});
    for (files, plain, tools) in [
        (vec![file, config, old], "file <b>", "file <b>"),
        (vec![file, config, extra], "file <b>", "extra"),
        (vec![config, old], "config <b>", "config <b>"),
        (vec![config, map], "config <m>", "config <m>"),
        (vec![config, tokens], "config <b>", "config <b>"),
        (vec![list], "plain", "with tools"),
        (vec![old, tokens], "old<t>", "old<t>"),
        (vec![file, tokens], "file <t>", "file <t>"),
        (vec![file], "file ", "file "),
    ] {
        let dir = directory(&files);
        let template = ChatTemplate::load(dir.path()).unwrap();
        assert_eq!(template.render(&parsed(without.clone())).unwrap(), plain);
        assert_eq!(template.render(&parsed(with_tools.clone())).unwrap(), tools);
    }

    let dir = directory(&[extra, config]);
    let template = ChatTemplate::load(dir.path()).unwrap();
    let error = template.render(&parsed(without.clone())).unwrap_err();
    assert!(error.to_string().contains("tool_use"), "{error}");
    assert_eq!(
        template
            .render_named("tool_use", &parsed(without.clone()))
            .unwrap(),
        "extra"
    );
    assert!(template.render_named("other", &parsed(without)).is_err());
    assert_eq!(template.names().collect::<Vec<_>>(), ["tool_use"]);
}

#[test]
fn directories_without_a_usable_template_are_refused() {
    for (files, word) in [
        (vec![], "--raw"),
        (vec![("tokenizer_config.json", "{}")], "--raw"),
        (
            vec![("tokenizer_config.json", "{")],
            "tokenizer_config.json",
        ),
        (
            vec![("tokenizer_config.json", r#"{"chat_template": 7}"#)],
            "chat_template",
        ),
        (
            vec![(
                "tokenizer_config.json",
                r#"{"chat_template": [{"name": "x"}]}"#,
            )],
            "chat_template",
        ),
        (vec![("tokenizer_config.json", "[]")], "--raw"),
    ] {
        let error = ChatTemplate::load(directory(&files).path()).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadModel);
        assert!(error.to_string().contains(word), "{error}");
    }
    assert!(ChatTemplate::load(Path::new("/nowhere")).is_err());
    let dir = directory(&[("chat_template.jinja", "{% if %}")]);
    let template = ChatTemplate::load(dir.path()).unwrap();
    let error = template
        .render(&ChatRequest::answer(&[ChatMessage::new("user", "Hi")]))
        .unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadModel);
    assert!(error.to_string().contains("chat_template.jinja"), "{error}");
    assert_eq!(
        ChatTemplate::from_source("{% if %}", Map::new())
            .unwrap_err()
            .kind(),
        ErrorKind::Usage
    );
}

#[test]
fn requests_are_read_as_transformers_reads_them() {
    let source = "{{ messages | tojson }}|{{ tools }}|{{ documents }}|{{ add_generation_prompt }}|{{ x }}|{{ bos_token }}";
    let tokens = Map::from_iter([("bos_token".to_owned(), json!("<s>"))]);
    let template = ChatTemplate::from_source(source, tokens).unwrap();
    let render = |request: Value| template.render(&parsed(request)).unwrap();
    let messages = json!([{"role": "user", "content": null, "reasoning": "r", "z": 1}]);
    assert_eq!(
        render(json!({"messages": messages, "x": [1, null, "é"]})),
        r#"[{"thinking": "r", "role": "user", "reasoning": "r", "z": 1, "reasoning_content": "r"}]|None|None|False|[1, None, 'é']|<s>"#
    );
    let messages = json!([{"role": "user", "content": "a"}]);
    assert_eq!(
        render(
            json!({"messages": messages, "tools": [], "documents": [{"text": "d"}], "add_generation_prompt": true, "bos_token": "<x>"})
        ),
        r#"[{"role": "user", "content": "a"}]|[]|[{'text': 'd'}]|True||<x>"#
    );
    for bad in [
        json!({"messages": []}),
        json!({"messages": ["Hi"]}),
        json!({"messages": messages, "tools": ["f"]}),
        json!({"messages": messages, "documents": [1]}),
        json!({"messages": messages, "add_generation_prompt": true, "continue_final_message": true}),
        json!({"messages": messages, "continue_final_message": "title"}),
        json!({"messages": [{"role": "user"}], "continue_final_message": true}),
        json!({"messages": [{"role": "user", "content": [{"type": "image"}]}], "continue_final_message": true}),
    ] {
        let error = template.render(&parsed(bad.clone())).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Usage, "{bad}");
    }
    for bad in [
        json!({}),
        json!({"messages": "Hi"}),
        json!({"messages": [], "now": "yesterday"}),
        json!({"messages": [], "continue_final_message": 1}),
    ] {
        assert!(
            serde_json::from_value::<ChatRequest>(bad.clone()).is_err(),
            "{bad}"
        );
    }
}

#[test]
fn the_last_message_can_be_continued() {
    let trims =
        template("{% for m in messages %}[{{ m.role }}]{{ m.content | trim }}\n{% endfor %}");
    let keeps = template("{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}");
    let joins = template(
        "{% for m in messages %}{% for p in m.content %}{{ p.text }};{% endfor %}{% endfor %}",
    );
    let thinks =
        template("{% for m in messages %}<{{ m.reasoning_content }}>{{ m.content }}{% endfor %}");
    let drops = template("content{{ messages[0].role }}");
    let request = |content: Value| {
        parsed(
            json!({"messages": [{"role": "user", "content": content}], "continue_final_message": true}),
        )
    };
    assert_eq!(
        keeps.render(&request(json!(" So \n"))).unwrap(),
        "[user] So \n"
    );
    assert_eq!(trims.render(&request(json!(" So \n"))).unwrap(), "[user]So");
    let parts = json!([{"type": "text", "text": "a"}, {"type": "text", "text": "b "}]);
    assert_eq!(joins.render(&request(parts)).unwrap(), "a;b ");
    let reasoning = json!({"messages": [{"role": "assistant", "content": "x", "reasoning": "so"}], "continue_final_message": "reasoning"});
    assert_eq!(thinks.render(&parsed(reasoning)).unwrap(), "<so");
    assert!(drops.render(&request(json!("gone"))).is_err());
}

#[test]
fn the_clock_is_the_callers_or_the_machines() {
    let source = template("{{ strftime_now('%d %B %Y, %H:%M') }}");
    let mut request = parsed(json!({"messages": [{"role": "user"}], "now": "2025-03-14T09:26:53"}));
    assert_eq!(source.render(&request).unwrap(), "14 March 2025, 09:26");
    request.now = None;
    let year = jiff::Zoned::now().datetime().year().to_string();
    assert!(source.render(&request).unwrap().contains(&year));
}

#[test]
fn expressions_print_as_in_python() {
    let data = json!({"d": {"b": [1, 2.0, {"x": null}], "a<": "é'\"&\u{7f}\u{1}", "e": [], "f": {}}, "n": null, "items": {"items": 1, "keys": 2, "get": 3}});
    for (source, text) in [
        (
            "{{ d | tojson }}",
            r#"{"b": [1, 2.0, {"x": null}], "a<": "é'\"&\u0001", "e": [], "f": {}}"#
                .replace('&', "&\u{7f}"),
        ),
        (
            "{{ d | tojson(ensure_ascii=True, sort_keys=true) }}",
            r#"{"a<": "\u00e9'\"&\u007f\u0001", "b": [1, 2.0, {"x": null}], "e": [], "f": {}}"#
                .into(),
        ),
        (
            "{{ d.b | tojson(separators=(',', ':')) }}",
            r#"[1,2.0,{"x":null}]"#.into(),
        ),
        (
            "{{ {'a': [1, {}], 'c': []} | tojson(indent=2) }}",
            "{\n  \"a\": [\n    1,\n    {}\n  ],\n  \"c\": []\n}".into(),
        ),
        ("{{ '😀' | tojson(true) }}", r#""\ud83d\ude00""#.into()),
        (
            "{{ {1: 2, none: 3, false: 4} | tojson }}",
            r#"{"1": 2, "null": 3, "false": 4}"#.into(),
        ),
        ("{{ (1, 2) | tojson }}", "[1, 2]".into()),
        (
            "{{ n is iterable }} {{ 'a' is iterable }} {{ d is iterable }} {{ 1 is iterable }}",
            "False True True False".into(),
        ),
        (
            "{{ 'a' is sequence }} {{ d is sequence }} {{ [] is sequence }} {{ n is sequence }}",
            "True True True False".into(),
        ),
        (
            "{{ d.b }} {{ n }} {{ true }}",
            "[1, 2.0, {'x': None}] None True".into(),
        ),
        (
            "{{ '\\x1c a \\x1f'.strip() }}|{{ ' a\\x1d' | trim }}|{{ 'xax' | trim('x') }}|{{ 'xax'.strip('x') }}",
            "a|a|a|a".into(),
        ),
        (
            "{{ 'a.b.c'.partition('.') }}{{ 'a.b.c'.rpartition('.')[2] }}{{ 'abc'.removeprefix('a').removesuffix('c') }}",
            "('a', '.', 'b.c')cb".into(),
        ),
        (
            "{% for k, v in items.items() %}{{ k }}={{ v }} {% endfor %}{{ items.get('get') }}",
            "items=1 keys=2 get=3 3".into(),
        ),
        (
            "{% generation %}a{% set q = 1 %}{% endgeneration %}\n{{ q }}b",
            "ab".into(),
        ),
        (
            "{% for i in range(9) %}{% if i == 2 %}{% continue %}{% elif i == 4 %}{% break %}{% endif %}{{ i }}{% endfor %}",
            "013".into(),
        ),
        ("  {% if true %}\n  x\n  {% endif %}\ny\n", "  x\ny".into()),
    ] {
        match rendered(source, data.clone()) {
            Ok(result) => assert_eq!(result, text, "{source}"),
            Err(error) => panic!("{source}: {error}"),
        }
    }
    for source in [
        "{{ x.y }}",
        "{{ 'a' + x }}",
        "{{ x | tojson }}",
        "{{ 'a' + 1 }}",
        "{{ raise_exception('no') }}",
        "{{ f() }}",
        "{{ d | tojson(other=1) }}",
        "{{ x | int }}",
        "{{ x | float }}",
    ] {
        assert_eq!(
            rendered(source, data.clone()).unwrap_err().kind(),
            ErrorKind::Usage,
            "{source}"
        );
    }
}

#[test]
fn templates_cannot_run_away() {
    for source in [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{% set ns = namespace(x='aaaaaaaa') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | tojson }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x | string | length }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% for j in range(99999) %}{% set ns.x = [ns.x] %}{% endfor %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(90000) %}{% set ns.x = {'a': ns.x} %}{% endfor %}{{ ns.x == {'a': ns.x} }}{{ ns.x | tojson }}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(40) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{% set y %}{{ ns.x }}{% endset %}",
        "{{ 'a' * 999999999999 }}",
        "{{ 'a' | indent(999999999) }}",
        "{% for i in range(100000) %}{{ 'a' * 10000 }}{% endfor %}",
    ] {
        let error = rendered(source, json!({})).unwrap_err();
        assert!(
            matches!(error.kind(), ErrorKind::BadModel | ErrorKind::Usage),
            "{source}: {error}"
        );
    }
}

/// Work that the engine's fuel does not see: two lists of 2^40 items, though only of forty lists each, are compared.
/// It is given up on, and as long as it goes on nobody waits for the same template again.
#[test]
fn templates_that_work_in_secret_are_given_up_on() {
    let twice = "{% set ns.x = [ns.x, ns.x] %}";
    let list =
        format!("{{% set ns = namespace(x=[1]) %}}{{% for i in range(40) %}}{twice}{{% endfor %}}");
    let source = format!("{list}{{% set first = ns.x %}}{list}{{{{ first == ns.x }}}}");
    let template = template(&source);
    let request = parsed(json!({"messages": [{"role": "user", "content": "Hi"}]}));
    let start = Instant::now();
    let error = template.render(&request).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::BadModel, "{error}");
    assert!(error.to_string().contains("come to an end"), "{error}");
    assert!(start.elapsed() > Duration::from_secs(9));
    let start = Instant::now();
    assert!(template.render(&request).is_err());
    assert!(start.elapsed() < Duration::from_secs(5));
}

#[test]
fn templates_may_nest_as_deeply_as_they_are_long() {
    for (part, end) in [("+1", "200001"), ("|upper", "1"), ("", "1")] {
        let source = format!(
            "{{{{ 1{} }}}}",
            part.repeat(if part == "+1" { 200_000 } else { 100_000 })
        );
        assert_eq!(rendered(&source, json!({})).unwrap(), end);
    }
    let long = " ".repeat(2 << 20);
    assert!(ChatTemplate::from_source(&long, Map::new()).is_err());
}

#[test]
fn thinking_can_be_asked_about() {
    assert!(load("qwen3").unwrap().supports_thinking());
    assert!(load("apertus").unwrap().supports_thinking());
    assert!(!load("qwen2_5").unwrap().supports_thinking());
}

/// Requests as OpenAI's clients write them, made kind: every template that shows tools and calls
/// shows them whole.
#[test]
fn accommodated_requests_suit_every_template() {
    let text = json!({
        "messages": [
            {"role": "user", "content": [{"type": "text", "text": "Which book"}, {"type": "text", "text": "is free?"}]},
            {"role": "assistant", "content": null, "tool_calls": [
                {"id": "call12345", "type": "function", "function": {"name": "find_book", "arguments": "{\"title\": \"Middlemarch\"}"}}]},
            {"role": "tool", "tool_call_id": "call12345", "name": "find_book", "content": "42"},
        ],
        "tools": [{"type": "function", "function": {"name": "find_book", "description": "Find a book", "parameters": {"type": "object", "properties": {"title": {"type": "string"}}}}}],
        "add_generation_prompt": true,
    });
    let flat = {
        let mut request = text.clone();
        request["tools"] = json!([request["tools"][0]["function"]]);
        request
    };
    let directories = fs::read_dir(testdata().join("tokenizers")).unwrap();
    let mut count = 0;
    for entry in directories {
        let name = entry.unwrap().file_name().into_string().unwrap();
        let Some(template) = model_dir(&name).and_then(|dir| ChatTemplate::load(&dir).ok()) else {
            continue;
        };
        for request in [&text, &flat] {
            let request = template.accommodate(parsed(request.clone())).unwrap();
            let prompt = match template.render(&request) {
                Ok(prompt) => prompt,
                // It knows no tool role, and says so.
                Err(error) if name == "mistral-7b-v0.1" => {
                    assert!(error.to_string().contains("role"), "{error}");
                    continue;
                }
                Err(error) => panic!("{name}: {error}"),
            };
            assert!(prompt.contains("is free?"), "{name}: {prompt}");
            assert!(
                !prompt.contains("'text'") && !prompt.contains("\"text\""),
                "{name}: {prompt}"
            );
            if name != "smollm2" {
                assert!(prompt.contains("Find a book"), "{name}: {prompt}");
                assert!(
                    prompt.contains("{\"title\": \"Middlemarch\"}"),
                    "{name}: {prompt}"
                );
            }
            count += 1;
        }
    }
    assert!(count >= 12, "only {count} prompts");
    // Those that read OpenAI's shape say the same whichever shape came in.
    let qwen = load("qwen3").unwrap();
    let prompt = |request: &Value| {
        qwen.render(&qwen.accommodate(parsed(request.clone())).unwrap())
            .unwrap()
    };
    assert_eq!(prompt(&text), prompt(&flat));
    assert!(prompt(&flat).contains(r#"{"type": "function", "function": {"name": "find_book""#));
}

#[test]
fn accommodation_changes_only_what_it_must() {
    let wants_text = template(
        "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ c.function.name + c.function.arguments }}{% endfor %}{% endfor %}",
    );
    let request = json!({"messages": [
        {"role": "assistant", "tool_calls": [{"function": {"name": "f", "arguments": {"a": [1, "é"]}}}]},
        {"role": "assistant", "content": "x", "tool_calls": [{"function": {"name": "g", "arguments": "{}"}}]},
    ]});
    let kind = wants_text.accommodate(parsed(request)).unwrap();
    assert_eq!(wants_text.render(&kind).unwrap(), r#"f{"a": [1, "é"]}xg{}"#);

    let reads_parts = template(
        "{% for m in messages %}{% if m.content is string %}{{ m.content }}{% else %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endif %}{% endfor %}",
    );
    let parts = json!({"messages": [{"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}]});
    let kind = reads_parts.accommodate(parsed(parts.clone())).unwrap();
    assert_eq!(json!(kind.messages), parts["messages"]);
    let image = json!({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}]});
    let error = reads_parts.accommodate(parsed(image)).unwrap_err();
    assert!(error.to_string().contains("image_url"), "{error}");

    let no_object = json!({"messages": [{"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": "not json"}}]}]});
    let qwen = load("qwen3").unwrap();
    let kind = qwen.accommodate(parsed(no_object.clone())).unwrap();
    assert_eq!(json!(kind.messages), no_object["messages"]);
}

/// JSON of any shape, with the words that templates look for.
fn any_json() -> impl Strategy<Value = Value> {
    let word = prop::sample::select(vec![
        "",
        "user",
        "assistant",
        "system",
        "tool",
        "content",
        "function",
        "<think>",
        "</think>\n",
        "text",
        " é😀\u{1c}",
        "{\"a\": 1}",
        "{% x %}",
    ]);
    let leaf = prop_oneof![
        Just(Value::Null),
        any::<bool>().prop_map(Value::from),
        any::<i64>().prop_map(Value::from),
        any::<f64>().prop_map(Value::from),
        word.prop_map(Value::from),
    ];
    let key = prop::sample::select(vec![
        "role",
        "content",
        "type",
        "text",
        "tool_calls",
        "function",
        "name",
        "arguments",
        "id",
        "parameters",
        "properties",
        "items",
        "description",
        "enum",
        "oneOf",
        "blocks",
        "parts",
    ]);
    leaf.prop_recursive(5, 40, 5, move |inner| {
        prop_oneof![
            prop::collection::vec(inner.clone(), 0..4).prop_map(Value::from),
            prop::collection::vec((key.clone(), inner), 0..5).prop_map(|pairs| pairs
                .into_iter()
                .map(|(key, value)| (key.to_owned(), value))
                .collect::<Map<_, _>>()
                .into()),
        ]
    })
}

fn any_message() -> impl Strategy<Value = Value> {
    let role = prop::sample::select(vec![
        "user",
        "assistant",
        "system",
        "tool",
        "ipython",
        "critic",
    ]);
    let fields =
        prop::sample::subsequence(vec!["content", "tool_calls", "reasoning", "name"], 0..4);
    (
        role,
        fields,
        prop::collection::vec(any_json(), 4),
        "[a-z<>/ \n]{0,20}",
        any::<bool>(),
    )
        .prop_map(|(role, fields, values, text, is_text)| {
            let mut message = json!({"role": role});
            for (field, value) in fields.into_iter().zip(values) {
                message[field] = if is_text && field == "content" {
                    text.clone().into()
                } else {
                    value
                };
            }
            message
        })
}

/// Jinja, more or less: what templates are made of, in any order.
fn any_source() -> impl Strategy<Value = String> {
    let piece = prop::sample::select(vec![
        "{% for m in messages %}",
        "{%- endfor -%}",
        "{% if m.content is string %}",
        "{% elif x %}",
        "{% else %}",
        "{% endif %}",
        "{{ m.content }}",
        "{{ messages | tojson(indent=4) }}",
        "{% set ns = namespace(x=[]) %}",
        "{% set ns.x = [ns.x, messages] %}",
        "{% set ns.x = ns.x + ns.x %}",
        "{{ ns.x }}",
        "{% macro f(a, b=1) %}",
        "{% endmacro %}",
        "{{ f(1) }}",
        "{{ f(f) }}",
        "{% generation %}",
        "{% endgeneration %}",
        "{% for i in range(100000) %}",
        "{{ 'x' * 100000 }}",
        "{{ ns.x | string | upper }}",
        "{{ strftime_now('%Q%') }}",
        "{% break %}",
        "{% continue %}",
        "{# ",
        " #}",
        "{% raw %}",
        "{% endraw %}",
        "{{",
        "}}",
        "{%",
        "%}",
        "-",
        "messages[0]",
        "[::-1]",
        " | ",
        "(",
        ")",
        "[",
        "]",
        "'",
        "text\n",
        "  ",
        "é",
        "{% call f() %}",
        "{% endcall %}",
        "{{ messages | map(attribute='content') | list | join(', ') }}",
        "{% set x %}",
        "{% endset %}",
        "{{ x.split('a')[-1].strip() }}",
        "{% filter upper %}",
        "{% endfilter %}",
        "{% include 'default' %}",
        "{% import 'default' as d %}",
        "{% extends 'default' %}",
        "{{ 1 // 0 }}",
        "{{ 9223372036854775807 * 9 }}",
        "{{ '%d' % 1 }}",
        "{{ messages | sort }}",
    ]);
    prop::collection::vec(piece, 0..25).prop_map(|pieces| pieces.concat())
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 400, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn random_templates_end(source in any_source()) {
        let Ok(template) = ChatTemplate::from_source(&source, Map::new()) else { return Ok(()) };
        let request = ChatRequest::answer(&[ChatMessage::new("user", "Hi"), ChatMessage::new("assistant", "Ho")]);
        match template.render(&request) {
            Ok(text) => prop_assert!(text.len() <= 16 << 20),
            Err(error) => prop_assert!(matches!(error.kind(), ErrorKind::Usage | ErrorKind::BadModel)),
        }
    }

    #[test]
    fn random_conversations_never_panic(
        messages in prop::collection::vec(any_message(), 0..5),
        tools in prop::option::of(prop::collection::vec(any_json(), 0..3)),
        continues in any::<bool>(),
        which in 0..NAMES.len(),
    ) {
        thread_local! {
            static TEMPLATES: Vec<ChatTemplate> = NAMES.into_iter().filter_map(load).collect();
        }
        let request = ChatRequest {
            messages,
            tools,
            add_generation_prompt: !continues,
            continue_final_message: continues.then(|| "content".to_owned()),
            ..ChatRequest::default()
        };
        TEMPLATES.with(|templates| {
            let template = &templates[which % templates.len()];
            let result = template.render(&request);
            prop_assert!(result.is_ok() || result.unwrap_err().kind() == ErrorKind::Usage);
            if let Ok(kind) = template.accommodate(request) {
                let result = template.render(&kind);
                prop_assert!(result.is_ok() || result.unwrap_err().kind() == ErrorKind::Usage);
            }
            Ok(())
        })?;
    }
}
