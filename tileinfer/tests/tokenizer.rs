//! The tokenizer against Hugging Face's: ids and text of difficult strings, whole and streamed.

use std::{fs, path::Path, sync::LazyLock};

use proptest::prelude::*;
use serde_json::Value;
use tileinfer::{
    ErrorKind,
    tokenizer::{StopStrings, TextStream, Tokenizer},
};

mod common;

use common::{golden, model_dir};

const NAMES: [&str; 7] = [
    "qwen3",
    "mistral-nemo",
    "mistral-7b-v0.3",
    "mistral-7b-v0.1",
    "smollm2",
    "llama3",
    "llama3_1",
];

/// Every tokenizer that is there, loaded once.
static TOKENIZERS: LazyLock<Vec<(&str, Tokenizer)>> = LazyLock::new(|| {
    let loaded = NAMES.into_iter().filter_map(|name| {
        let dir = model_dir(name)?;
        Some((name, Tokenizer::from_dir(&dir).unwrap()))
    });
    loaded.collect()
});

fn tokenizers() -> impl Iterator<Item = (&'static str, &'static Tokenizer)> {
    TOKENIZERS
        .iter()
        .map(|(name, tokenizer)| (*name, tokenizer))
}

fn tokenizer(name: &str) -> &'static Tokenizer {
    tokenizers().find(|(found, _)| *found == name).unwrap().1
}

fn ids(value: &Value) -> Vec<u32> {
    serde_json::from_value(value.clone()).unwrap()
}

fn streamed(tokenizer: &Tokenizer, ids: &[u32], skip_special: bool) -> String {
    let mut stream = tokenizer.decode_stream(skip_special);
    let mut text = String::new();
    for &id in ids {
        text += &stream.push(id);
    }
    text + &stream.finish()
}

fn printed(tokenizer: &Tokenizer, ids: &[u32]) -> String {
    let mut stream = TextStream::new(tokenizer, true, Vec::new());
    for &id in ids {
        stream.push(id).unwrap();
    }
    String::from_utf8(stream.finish().unwrap()).unwrap()
}

#[test]
fn encoding_and_decoding_agree_with_hugging_face() {
    for (name, tokenizer) in tokenizers() {
        for record in golden(name, "encode") {
            let text = record["text"].as_str().unwrap();
            let plain = tokenizer.encode(text, false).unwrap();
            let special = tokenizer.encode(text, true).unwrap();
            assert_eq!(plain, ids(&record["ids"]), "{name}: {text:?}");
            assert_eq!(
                special,
                ids(&record["ids_with_special"]),
                "{name}: {text:?}"
            );
            let decoded = record["decoded"].as_str().unwrap();
            let skipped = record["decoded_skip_special"].as_str().unwrap();
            assert_eq!(tokenizer.decode(&plain, false), decoded, "{name}: {text:?}");
            assert_eq!(
                tokenizer.decode(&special, true),
                skipped,
                "{name}: {text:?}"
            );
            assert_eq!(
                streamed(tokenizer, &plain, false),
                decoded,
                "{name}: {text:?}"
            );
            assert_eq!(printed(tokenizer, &special), skipped, "{name}: {text:?}");
            // The bytes of what is text throughout are the text's.
            let bytes = tokenizer.decode_bytes(&plain, false);
            assert_eq!(String::from_utf8_lossy(&bytes), decoded, "{name}: {text:?}");
        }
    }
}

#[test]
fn any_ids_decode_as_with_hugging_face() {
    for (name, tokenizer) in tokenizers() {
        for record in golden(name, "decode") {
            let case = record["case"].as_str().unwrap();
            let ids = ids(&record["ids"]);
            let decoded = record["decoded"].as_str().unwrap();
            let skipped = record["decoded_skip_special"].as_str().unwrap();
            assert_eq!(tokenizer.decode(&ids, false), decoded, "{name}: {case}");
            assert_eq!(tokenizer.decode(&ids, true), skipped, "{name}: {case}");
            assert_eq!(streamed(tokenizer, &ids, false), decoded, "{name}: {case}");
            assert_eq!(printed(tokenizer, &ids), skipped, "{name}: {case}");
            if let Some(hex) = case.strip_prefix("bytes ") {
                let bytes: Vec<u8> = hex
                    .split(' ')
                    .map(|byte| u8::from_str_radix(byte, 16).unwrap())
                    .collect();
                let mut decoded = tokenizer.decode_bytes(&ids, false);
                if name.starts_with("mistral-7b") && bytes[0] == b' ' {
                    decoded.insert(0, b' ');
                }
                assert_eq!(decoded, bytes, "{name}: bytes that are not text are kept");
                let each: Vec<u8> = ids
                    .iter()
                    .flat_map(|&id| tokenizer.token_bytes(id).unwrap())
                    .collect();
                assert_eq!(each, bytes, "{name}: {case}");
            }
        }
    }
}

#[test]
fn decoding_agrees_with_the_crate_that_encodes() {
    // One of each kind: loading is what takes time.
    for name in ["smollm2", "mistral-7b-v0.1"] {
        let tokenizer = tokenizer(name);
        let path = model_dir(name).unwrap().join("tokenizer.json");
        let reference = tokenizers::Tokenizer::from_file(path).unwrap();
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let size = tokenizer.vocab_size() as u32;
        // Low ids are where control and byte tokens are.
        let id = prop_oneof![0..size + 10, 0..1000u32];
        let strategy = (prop::collection::vec(id, 0..40), any::<bool>());
        runner
            .run(&strategy, |(ids, skip_special)| {
                let expected = reference.decode(&ids, skip_special).unwrap();
                prop_assert_eq!(&tokenizer.decode(&ids, skip_special), &expected);
                prop_assert_eq!(streamed(tokenizer, &ids, skip_special), expected);
                Ok(())
            })
            .unwrap();
    }
}

#[test]
fn a_stream_shows_text_as_soon_as_it_is_certain() {
    let tokenizer = tokenizer("qwen3");
    let ids = tokenizer.encode("Hi 🧑🏻‍🤝‍🧑🏿!", false).unwrap();
    let mut stream = tokenizer.decode_stream(false);
    let mut bytes = 0;
    for &id in &ids {
        bytes += tokenizer.token_bytes(id).unwrap().len();
        bytes -= stream.push(id).len();
        assert!(
            bytes < 4,
            "{bytes} bytes are held back, more than part of a character"
        );
    }
    assert_eq!(bytes, 0);
    assert_eq!(stream.finish(), "");
}

#[test]
fn vocabulary_look_ups() {
    let tokenizer = tokenizer("qwen3");
    assert_eq!(tokenizer.vocab_size(), 151_669);
    assert_eq!(tokenizer.token_id("<|im_end|>"), Some(151_645));
    assert_eq!(tokenizer.token(151_645).as_deref(), Some("<|im_end|>"));
    assert!(tokenizer.is_special(151_645));
    assert!(
        !tokenizer.is_special(151_667),
        "<think> is no special token"
    );
    assert!(!tokenizer.is_special(0) && !tokenizer.is_special(9_999_999));
    assert_eq!(tokenizer.token_id("no such token"), None);
    assert_eq!(tokenizer.token(9_999_999), None);
    assert_eq!(tokenizer.token_bytes(9_999_999), None);
    assert_eq!(tokenizer.token_bytes(1879).unwrap(), b" world");
    assert_eq!(tokenizer.bos().unwrap(), None);

    let tokenizer = self::tokenizer("mistral-7b-v0.3");
    assert_eq!(tokenizer.vocab_size(), 32_768);
    assert_eq!(tokenizer.bos().unwrap(), Some(1));
    let newline = tokenizer.token_id("<0x0A>").unwrap();
    assert_eq!(tokenizer.token_bytes(newline).unwrap(), b"\n");
}

#[test]
fn bos_is_added_exactly_once() {
    for (name, tokenizer) in tokenizers() {
        let bos = tokenizer.bos().unwrap();
        let text = "Hello";
        let plain = tokenizer.encode_prompt(text).unwrap();
        let spelled = match bos.and_then(|bos| tokenizer.token(bos)) {
            Some(bos) => tokenizer.encode_prompt(&format!("{bos}{text}")).unwrap(),
            None => plain.clone(),
        };
        let count = |ids: &[u32]| ids.iter().filter(|&&id| Some(id) == bos).count();
        assert_eq!(count(&plain), usize::from(bos.is_some()), "{name}");
        assert_eq!(count(&spelled), usize::from(bos.is_some()), "{name}");
        assert_eq!(spelled[0], plain[0], "{name}");
    }
}

#[test]
fn a_clone_shares_the_vocabulary() {
    fn assert_shareable<T: Send + Sync + Clone>(_: &T) {}
    let tokenizer = tokenizer("smollm2");
    assert_shareable(tokenizer);
    let clone = tokenizer.clone();
    let ids = std::thread::spawn(move || clone.encode("two threads", false).unwrap());
    assert_eq!(
        ids.join().unwrap(),
        tokenizer.encode("two threads", false).unwrap()
    );
}

/// A tokenizer of a few tokens, as text to damage.
fn small(decoder: &str) -> String {
    let letters: Vec<String> = (0..26u8)
        .map(|n| format!("\"{}\":{n}", char::from(b'a' + n)))
        .collect();
    format!(
        r#"{{"version":"1.0","truncation":{{"direction":"Right","max_length":3,"strategy":"LongestFirst","stride":0}},
        "padding":{{"strategy":{{"Fixed":9}},"direction":"Right","pad_to_multiple_of":null,"pad_id":0,"pad_type_id":0,"pad_token":"a"}},
        "added_tokens":[{{"id":31,"content":"<s>","single_word":false,"lstrip":false,"rstrip":false,"normalized":false,"special":true}}],
        "normalizer":{{"type":"NFC"}},
        "pre_tokenizer":{{"type":"Sequence","pretokenizers":[{{"type":"Split","pattern":{{"Regex":"\\s+(?!\\S)|\\w+"}},"behavior":"Isolated","invert":false}},
          {{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":false,"use_regex":false}}]}},
        "post_processor":{{"type":"TemplateProcessing","single":[{{"SpecialToken":{{"id":"<s>","type_id":0}}}},{{"Sequence":{{"id":"A","type_id":0}}}}],
          "pair":[{{"Sequence":{{"id":"A","type_id":0}}}},{{"Sequence":{{"id":"B","type_id":1}}}}],"special_tokens":{{"<s>":{{"id":"<s>","ids":[31],"tokens":["<s>"]}}}}}},
        "decoder":{decoder},
        "model":{{"type":"BPE","dropout":null,"unk_token":null,"continuing_subword_prefix":null,"end_of_word_suffix":null,"fuse_unk":false,"byte_fallback":false,"ignore_merges":false,
          "vocab":{{{},"ab":26,"abc":27,"Ġ":28,"<0xE4>":29,"▁d":30}},"merges":[["a","b"],["ab","c"]]}}}}"#,
        letters.join(",")
    )
}

const BYTE_LEVEL: &str =
    r#"{"type":"ByteLevel","add_prefix_space":true,"trim_offsets":true,"use_regex":true}"#;

fn load(json: &str) -> tileinfer::Result<Tokenizer> {
    Tokenizer::from_bytes(Path::new("tokenizer.json"), json.as_bytes())
}

#[test]
fn prompts_are_neither_cut_nor_padded() {
    let tokenizer = load(&small(BYTE_LEVEL)).unwrap();
    assert_eq!(tokenizer.encode("abcde", true).unwrap(), [31, 27, 3, 4]);
    assert_eq!(tokenizer.encode("a", false).unwrap(), [0]);
    assert_eq!(tokenizer.vocab_size(), 32);
}

#[test]
fn every_decoder_decodes_as_the_crate_does() {
    let replace = r#"{"type":"Replace","pattern":{"String":"▁"},"content":" "}"#;
    let metaspace = |scheme| {
        format!(
            r#"{{"type":"Metaspace","replacement":"▁","prepend_scheme":"{scheme}","split":true}}"#
        )
    };
    let bytes = r#"{"type":"ByteFallback"}"#;
    let fuse = r#"{"type":"Fuse"}"#;
    let strip = |count| format!(r#"{{"type":"Strip","content":" ","start":{count},"stop":0}}"#);
    let sequence =
        |parts: &[&str]| format!(r#"{{"type":"Sequence","decoders":[{}]}}"#, parts.join(","));
    let decoders = [
        "null".to_owned(),
        BYTE_LEVEL.to_owned(),
        metaspace("always"),
        metaspace("first"),
        metaspace("never"),
        sequence(&[BYTE_LEVEL]),
        sequence(&[replace, bytes, fuse]),
        sequence(&[replace, bytes, fuse, &strip(1)]),
        sequence(&[replace, fuse, &strip(2)]),
        sequence(&[bytes]),
        sequence(&[]),
    ];
    for decoder in decoders {
        let json = small(&decoder);
        let tokenizer = load(&json).unwrap();
        let reference = tokenizers::Tokenizer::from_bytes(&json).unwrap();
        let mut runner = proptest::test_runner::TestRunner::deterministic();
        let id = prop_oneof![0..34u32, 26..32u32];
        runner
            .run(
                &(prop::collection::vec(id, 0..8), any::<bool>()),
                |(ids, skip)| {
                    prop_assert_eq!(
                        tokenizer.decode(&ids, skip),
                        reference.decode(&ids, skip).unwrap()
                    );
                    Ok(())
                },
            )
            .unwrap_or_else(|error| panic!("{decoder}: {error}"));
    }
}

#[test]
fn what_cannot_be_used_is_named() {
    let missing = Tokenizer::from_dir(Path::new("/nowhere")).unwrap_err();
    assert_eq!(missing.kind(), ErrorKind::BadModel);
    assert!(
        missing.to_string().contains("/nowhere/tokenizer.json"),
        "{missing}"
    );
    for (json, word) in [
        ("", "not JSON"),
        ("{", "not JSON"),
        (r#"{"decoder":{"type":"#, "not JSON"),
        ("[]", "not a tokenizer"),
        ("{}", "not a tokenizer"),
        (
            &small(r#"{"type":"WordPiece","prefix":"","cleanup":false}"#),
            "WordPiece",
        ),
        (
            &small(r#"{"type":"Strip","content":" ","start":1,"stop":1}"#),
            "Strip",
        ),
        (
            &small(r#"{"type":"Replace","pattern":{"Regex":"a+"},"content":" "}"#),
            "Replace",
        ),
    ] {
        let error = load(json).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::BadModel, "{error}");
        assert!(error.to_string().contains("tokenizer.json"), "{error}");
        assert!(
            error.to_string().contains(word),
            "{error} does not say {word}"
        );
    }
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("tokenizer.json"), [0xff, 0xfe]).unwrap();
    assert_eq!(
        Tokenizer::from_dir(dir.path()).unwrap_err().kind(),
        ErrorKind::BadModel
    );
}

/// Something to write over a stretch of a file.
fn damage() -> impl Strategy<Value = (usize, usize, Vec<u8>)> {
    let pieces = prop_oneof![
        prop::sample::select(vec![
            "",
            "null",
            "-1",
            "4294967295",
            "99999999999999999999",
            "1e400",
            "\"\"",
            "[]",
            "{}",
            "true",
            "\"a\"",
            "\\u0000",
            "\"▁\"",
            "Unigram",
            "WordLevel",
            "WordPiece",
            "Fuse",
            "Metaspace",
            "(",
            "[",
            "\\\\p{",
        ])
        .prop_map(|text| text.as_bytes().to_vec()),
        prop::collection::vec(any::<u8>(), 0..4),
    ];
    (any::<usize>(), 0..12usize, pieces)
}

/// Ends of values in the file, where damage keeps it JSON more often.
fn boundaries(json: &str) -> Vec<usize> {
    json.match_indices([':', ',', '"', '{', '['])
        .map(|(at, _)| at + 1)
        .collect()
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 3000, failure_persistence: None, ..ProptestConfig::default() })]

    #[test]
    fn damaged_files_never_panic(changes in prop::collection::vec(damage(), 1..4), at_boundary in any::<bool>(), kind in 0..3usize) {
        let decoder = [BYTE_LEVEL, "null", r#"{"type":"Sequence","decoders":[{"type":"ByteFallback"},{"type":"Fuse"},{"type":"Strip","content":" ","start":1,"stop":0}]}"#][kind];
        let json = small(decoder);
        let boundaries = boundaries(&json);
        let mut bytes = json.into_bytes();
        for (place, length, piece) in changes {
            let start = if at_boundary { boundaries[place % boundaries.len()] } else { place % bytes.len() }.min(bytes.len());
            let end = (start + length).min(bytes.len());
            bytes.splice(start..end, piece);
        }
        match Tokenizer::from_bytes(Path::new("t.json"), &bytes) {
            Ok(tokenizer) => {
                if let Ok(ids) = tokenizer.encode("abcd <s> é  \n", true) {
                    tokenizer.decode(&ids, true);
                    tokenizer.decode_bytes(&ids, false);
                }
                for id in [0, 29, 31, u32::MAX] {
                    tokenizer.token_bytes(id);
                    tokenizer.is_special(id);
                }
                tokenizer.vocab_size();
            }
            Err(error) => prop_assert_eq!(error.kind(), ErrorKind::BadModel),
        }
    }

    #[test]
    fn stop_strings_do_not_depend_on_the_pieces(
        text in "[abé]{0,30}",
        stops in prop::collection::vec("[abé]{1,5}", 0..4),
        cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..12),
    ) {
        // The obvious way: look at every longer part of the text until one ends with a stop string.
        let end = text.char_indices().map(|(at, c)| at + c.len_utf8())
            .find(|&end| stops.iter().any(|stop| text[..end].ends_with(stop.as_str())));
        let expected = match end {
            None => (text.as_str(), false),
            Some(end) => {
                let longest = stops.iter().filter(|stop| text[..end].ends_with(stop.as_str())).map(String::len).max();
                (&text[..end - longest.unwrap()], true)
            }
        };
        let mut starts: Vec<usize> = cuts.iter().map(|cut| cut.index(text.len() + 1)).filter(|&at| text.is_char_boundary(at)).collect();
        starts.extend([0, text.len()]);
        starts.sort_unstable();
        let mut matcher = StopStrings::new(stops.clone()).unwrap();
        let (mut shown, mut stopped) = (String::new(), false);
        for pair in starts.windows(2) {
            let result = matcher.push(&text[pair[0]..pair[1]]);
            shown += &result.text;
            stopped = result.stopped;
            prop_assert!(expected.0.starts_with(&shown), "{:?} is not part of {:?}", shown, expected.0);
        }
        shown += &matcher.finish();
        prop_assert_eq!((shown.as_str(), stopped), expected);
    }
}

#[test]
fn stop_strings_hold_back_no_more_than_they_must() {
    let mut matcher = StopStrings::new(vec!["</end>".into(), "\n\n".into()]).unwrap();
    assert_eq!(matcher.push("text <").text, "text ");
    assert_eq!(matcher.push("/em>\n").text, "</em>");
    assert_eq!(matcher.push("more").text, "\nmore");
    let last = matcher.push("</end> unseen");
    assert_eq!((last.text.as_str(), last.stopped), ("", true));
    assert_eq!(matcher.push("x").text, "");
    assert_eq!(matcher.finish(), "");
    assert!(StopStrings::new(vec!["a".into(), String::new()]).is_err());
}
