//! A conversation over a runner without a model: what a turn reuses of the cache, what it costs, and that an
//! error changes nothing.

use std::ops::ControlFlow;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use tileinfer::chat::{ChatMessage, ChatTemplate};
use tileinfer::engine::{FinishReason, GenerationOptions, StepLoop};
use tileinfer::generate::{GenerationStats, answer, generate};
use tileinfer::runner::{FakeOptions, FakeRunner};
use tileinfer::sampling::SamplingParams;
use tileinfer::session::{Reply, Session, SessionOptions, TurnStats};
use tileinfer::tokenizer::Tokenizer;
use tileinfer::{ErrorKind, Result};

/// `<|im_end|>` of the golden model.
const END: u32 = 639;

fn dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../testdata/golden/models/qwen3")
}

fn tokenizer() -> Tokenizer {
    Tokenizer::from_dir(&dir()).unwrap()
}

fn fake(max_length: usize) -> FakeOptions {
    FakeOptions {
        vocabulary: 640,
        max_length,
        page_size: 4,
        pages: max_length.div_ceil(4),
        ..FakeOptions::default()
    }
}

fn session_options(max_tokens: Option<usize>) -> SessionOptions {
    SessionOptions {
        sampling: SamplingParams {
            temperature: 1.0,
            ..SamplingParams::default()
        },
        seed: 17,
        stop_ids: vec![END],
        stop_strings: Vec::new(),
        max_tokens,
        thinking: None,
    }
}

fn session(fake: &FakeOptions, options: SessionOptions) -> Session {
    let steps = StepLoop::new(Box::new(FakeRunner::new(fake)));
    Session::new(
        steps,
        tokenizer(),
        ChatTemplate::load(&dir()).unwrap(),
        options,
    )
}

fn reply(session: &mut Session, text: &str) -> Result<Reply> {
    session.reply(text, &mut |_| ControlFlow::Continue(()), &mut |_| {
        ControlFlow::Continue(())
    })
}

/// The tokens that follow `prompt` in a cold cache.
fn cold(prompt: &[u32], options: &SessionOptions, fake: &FakeOptions) -> Vec<u32> {
    let mut steps = StepLoop::new(Box::new(FakeRunner::new(fake)));
    let options = GenerationOptions {
        sampling: Arc::new(options.sampling.clone()),
        seed: options.seed,
        max_tokens: options.max_tokens,
        stop_ids: options.stop_ids.clone().into(),
        vocabulary: tokenizer().vocab_size(),
        top_logprobs: None,
    };
    let sequence = steps.new_sequence();
    let on_token = &mut |_: &_| ControlFlow::Continue(());
    generate(
        &mut steps,
        sequence,
        prompt,
        options,
        &mut |_| ControlFlow::Continue(()),
        on_token,
    )
    .unwrap()
    .tokens
}

fn chatml(messages: &[ChatMessage]) -> String {
    let turns = messages
        .iter()
        .map(|turn| format!("<|im_start|>{}\n{}<|im_end|>\n", turn.role, turn.content));
    turns.collect::<String>() + "<|im_start|>assistant\n"
}

fn common_prefix(one: &[u32], other: &[u32]) -> usize {
    one.iter()
        .zip(other)
        .take_while(|(one, other)| one == other)
        .count()
}

#[test]
fn turns_reuse_what_they_share_with_the_cache() {
    let fake = fake(2048);
    let options = session_options(Some(12));
    let mut session = session(&fake, options.clone());
    session.set_system(Some("Be brief.".to_owned()));
    let mut messages = vec![ChatMessage::new("system", "Be brief.")];
    let mut cached: Vec<u32> = Vec::new();
    for (turn, text) in [
        "Who are you?",
        "And why?",
        "",
        "What is 2 + 2? 🙂 Jetzt auf Deutsch.",
    ]
    .into_iter()
    .enumerate()
    {
        messages.push(ChatMessage::new("user", text));
        let prompt = tokenizer().encode(&chatml(&messages), false).unwrap();
        let tokens = cold(&prompt, &options, &fake);

        let mut streamed = String::new();
        let on_text = &mut |piece: &str| {
            assert!(!piece.is_empty());
            streamed += piece;
            ControlFlow::Continue(())
        };
        let reply = session
            .reply(text, &mut |_| ControlFlow::Continue(()), on_text)
            .unwrap();
        let end = if tokens.last() == Some(&END) {
            FinishReason::Stop
        } else {
            FinishReason::Length
        };
        assert_eq!((reply.finish, reply.context_full), (end, false));
        assert_eq!(reply.text, tokenizer().decode(&tokens, true), "turn {turn}");
        assert_eq!(reply.text, streamed);

        let stats: &TurnStats = &reply.stats;
        assert_eq!(
            (stats.prompt_tokens, stats.completion_tokens),
            (prompt.len(), tokens.len())
        );
        assert_eq!(
            stats.cached_tokens,
            common_prefix(&cached, &prompt).min(prompt.len() - 1),
            "turn {turn}"
        );
        assert!(turn == 0 || stats.cached_tokens > 5 * turn, "{stats:?}");

        messages.push(ChatMessage::new("assistant", reply.text));
        assert_eq!(session.messages(), messages);
        cached = [&prompt[..], &tokens[..tokens.len() - 1]].concat();
    }
}

#[test]
fn reset_forgets_and_frees() {
    let fake = fake(512);
    let mut session = session(&fake, session_options(Some(8)));
    session.set_system(Some("Be brief.".to_owned()));
    let first = reply(&mut session, "Hello").unwrap();
    assert!(session.steps().pool().free() < fake.pages);
    session.reset();
    assert!(session.messages().is_empty());
    assert_eq!(session.steps().pool().free(), fake.pages);
    session.set_system(Some("Be brief.".to_owned()));
    let again = reply(&mut session, "Hello").unwrap();
    assert_eq!((again.text, again.stats.cached_tokens), (first.text, 0));
}

#[test]
fn an_edit_reuses_the_longest_common_prefix() {
    let fake = fake(1024);
    let options = session_options(Some(10));
    let mut session = session(&fake, options.clone());
    reply(&mut session, "Tell me about the sea.").unwrap();
    reply(&mut session, "And about the mountains.").unwrap();
    let mut messages = session.messages().to_vec();
    let before = session.prompt().unwrap();

    // Asks the second question in other words.
    messages.truncate(2);
    session.set_messages(messages.clone());
    let edited = reply(&mut session, "And about the valleys.").unwrap();
    messages.push(ChatMessage::new("user", "And about the valleys."));
    let prompt = tokenizer().encode(&chatml(&messages), false).unwrap();
    let shared = common_prefix(&before, &prompt);
    assert_eq!(edited.stats.cached_tokens, shared);
    assert!(
        shared
            > tokenizer()
                .encode(&chatml(&messages[..1]), false)
                .unwrap()
                .len()
    );
    assert_eq!(
        edited.text,
        tokenizer().decode(&cold(&prompt, &options, &fake), true)
    );

    // Asks the same again: all but the last token of the prompt is there.
    messages.pop();
    session.set_messages(messages);
    let repeated = reply(&mut session, "And about the valleys.").unwrap();
    assert_eq!(
        (repeated.text, repeated.stats.cached_tokens),
        (edited.text, prompt.len() - 1)
    );

    // Another system message changes all that follows.
    let prompt = session.prompt().unwrap();
    session.set_system(Some("Answer in verse.".to_owned()));
    let shared = common_prefix(&prompt, &session.prompt().unwrap());
    assert!(shared < 4);
    assert_eq!(
        reply(&mut session, "Go on.").unwrap().stats.cached_tokens,
        shared
    );
    session.set_system(None);
    assert!(
        session
            .messages()
            .iter()
            .all(|message| message.role != "system")
    );
}

#[test]
fn an_error_leaves_the_conversation_as_it_was() {
    let fake = FakeOptions {
        pages: 24,
        ..fake(160)
    };
    let mut session = session(&fake, session_options(Some(4)));
    let first = reply(&mut session, "Hello").unwrap();
    let messages = session.messages().to_vec();

    // Longer than the context: nothing is touched, the cache neither.
    let long = "one two three four five six seven ".repeat(20);
    let needed = tokenizer().encode(&long, false).unwrap().len();
    assert!(needed > 160);
    let error = reply(&mut session, &long).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    let text = error.to_string();
    assert!(
        text.starts_with("the context is full: ") && text.contains("the limit is 160"),
        "{text}"
    );
    assert_eq!(session.messages(), messages);

    // Shorter than that, but longer than there are pages for.
    let long = "one two three four five ".repeat(7);
    let needed = tokenizer().encode(&long, false).unwrap().len();
    assert!((97..130).contains(&needed), "{needed}");
    let error = reply(&mut session, &long).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Overload);
    assert!(
        error
            .to_string()
            .starts_with("the KV cache is out of pages: "),
        "{error}"
    );
    assert_eq!(session.messages(), messages);
    assert_eq!(
        (session.steps().pool().free(), session.steps().in_flight()),
        (24, 0)
    );

    // A stop string that cannot be one.
    session.options.stop_strings = vec![String::new()];
    let error = reply(&mut session, "Hello").unwrap_err();
    assert_eq!(error.to_string(), "stop string 0 is empty; leave it out");
    assert_eq!(session.messages(), messages);
    session.options.stop_strings.clear();

    session.options.sampling.top_p = 0.0;
    let error = reply(&mut session, "Hello").unwrap_err();
    assert_eq!(
        error.to_string(),
        "top_p is 0, it must be above 0 and at most 1 (1 is off)"
    );
    assert_eq!(session.messages(), messages);
    session.options.sampling.top_p = 1.0;

    session.reset();
    assert_eq!(reply(&mut session, "Hello").unwrap().text, first.text);
}

#[test]
fn a_refused_turn_keeps_the_cache() {
    let fake = fake(160);
    let mut session = session(&fake, session_options(Some(4)));
    reply(&mut session, "Hello").unwrap();
    let free = session.steps().pool().free();
    reply(
        &mut session,
        &"one two three four five six seven ".repeat(20),
    )
    .unwrap_err();
    session.options.stop_strings = vec![String::new()];
    reply(&mut session, "Hello").unwrap_err();
    session.options.stop_strings.clear();
    session.options.sampling.top_p = 0.0;
    reply(&mut session, "Hello").unwrap_err();
    session.options.sampling.top_p = 1.0;
    assert_eq!(session.steps().pool().free(), free);
    assert!(reply(&mut session, "And?").unwrap().stats.cached_tokens > 5);
}

#[test]
fn the_context_can_be_full_in_the_middle_of_an_answer() {
    let fake = fake(48);
    let options = SessionOptions {
        stop_ids: Vec::new(),
        ..session_options(None)
    };
    let mut session = session(&fake, options);
    let full = reply(&mut session, "Hello").unwrap();
    assert_eq!(
        (full.finish, full.context_full),
        (FinishReason::Length, true)
    );
    assert_eq!(full.stats.prompt_tokens + full.stats.completion_tokens, 48);
    let messages = session.messages().to_vec();
    assert_eq!(messages.len(), 2);
    let error = reply(&mut session, "Go on").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert!(
        error
            .to_string()
            .contains("shorten the prompt, ask for fewer tokens or raise the context size"),
        "{error}"
    );
    assert_eq!(session.messages(), messages);

    session.reset();
    session.options.max_tokens = Some(3);
    let short = reply(&mut session, "Hello").unwrap();
    assert_eq!(
        (short.finish, short.context_full),
        (FinishReason::Length, false)
    );
    assert_eq!(short.stats.completion_tokens, 3);
}

#[test]
fn breaking_off_keeps_what_came_until_then() {
    let fake = fake(512);
    let mut session = session(
        &fake,
        SessionOptions {
            stop_ids: Vec::new(),
            ..session_options(Some(40))
        },
    );
    let whole = reply(&mut session, "Hello").unwrap();
    for pieces in 1..6 {
        session.reset();
        let mut shown = Vec::new();
        let on_text = &mut |piece: &str| {
            shown.push(piece.to_owned());
            if shown.len() < pieces {
                ControlFlow::Continue(())
            } else {
                ControlFlow::Break(())
            }
        };
        let part = session
            .reply("Hello", &mut |_| ControlFlow::Continue(()), on_text)
            .unwrap();
        assert_eq!(shown.len(), pieces, "text after breaking off: {shown:?}");
        assert_eq!(
            (part.text, part.finish),
            (shown.concat(), FinishReason::Stop)
        );
        assert!(whole.text.starts_with(&shown.concat()));
        assert_eq!(session.messages()[1].content, shown.concat());
        assert!(part.stats.completion_tokens < 40);
    }
}

#[test]
fn a_stop_string_ends_the_answer_and_is_not_part_of_it() {
    let fake = fake(512);
    let mut session = session(
        &fake,
        SessionOptions {
            stop_ids: Vec::new(),
            ..session_options(Some(30))
        },
    );
    let whole = reply(&mut session, "Hello").unwrap();
    let characters: Vec<char> = whole.text.chars().collect();
    assert!(characters.len() > 20, "{:?}", whole.text);
    for (from, len) in [(0, 1), (3, 4), (10, 1), (8, 9), (characters.len() - 2, 2)] {
        let stop: String = characters[from..from + len].iter().collect();
        let start = whole.text.find(&stop).unwrap();
        session.reset();
        session.options.stop_strings = vec![stop.clone(), "never there".to_owned()];
        let mut streamed = String::new();
        let on_text = &mut |piece: &str| {
            streamed += piece;
            ControlFlow::Continue(())
        };
        let part = session
            .reply("Hello", &mut |_| ControlFlow::Continue(()), on_text)
            .unwrap();
        assert_eq!(part.text, whole.text[..start], "{stop:?}");
        assert_eq!(part.text, streamed);
        // The last one is complete with the last token that was asked for, and counts all the same.
        assert_eq!(
            (part.finish, part.context_full),
            (FinishReason::Stop, false),
            "{stop:?}"
        );
        assert_eq!(session.messages()[1].content, part.text);
        // What the cache holds beyond the answer does no harm.
        session.options.stop_strings.clear();
        let next = reply(&mut session, "Go on").unwrap();
        let messages = session.messages();
        let prompt = tokenizer()
            .encode(&chatml(&messages[..messages.len() - 1]), false)
            .unwrap();
        assert_eq!(
            next.text,
            tokenizer().decode(&cold(&prompt, &session.options, &fake), true)
        );
    }
}

#[test]
fn a_text_is_continued_outside_of_the_conversation() {
    let fake = fake(512);
    let options = session_options(Some(9));
    let mut session = session(&fake, options.clone());
    reply(&mut session, "Hello").unwrap();
    let messages = session.messages().to_vec();
    let mut continue_text = |text: &str| {
        session.continue_text(text, &mut |_| ControlFlow::Continue(()), &mut |_| {
            ControlFlow::Continue(())
        })
    };
    let prompt = tokenizer().encode_prompt("Once upon a time").unwrap();
    let first = continue_text("Once upon a time").unwrap();
    assert_eq!(
        first.text,
        tokenizer().decode(&cold(&prompt, &options, &fake), true)
    );
    assert_eq!(
        (first.stats.cached_tokens, first.stats.prompt_tokens),
        (0, prompt.len())
    );
    assert_eq!(
        continue_text("Once upon a time")
            .unwrap()
            .stats
            .cached_tokens,
        prompt.len() - 1
    );
    let error = continue_text("").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Usage);
    assert_eq!(
        error.to_string(),
        "the prompt is empty: there is nothing to continue"
    );
    assert_eq!(session.messages(), messages);
}

#[test]
fn rates_are_of_the_tokens_that_ran() {
    let stats = GenerationStats {
        prompt_tokens: 110,
        cached_tokens: 10,
        completion_tokens: 41,
        to_first: Duration::from_millis(500),
        after_first: Duration::from_secs(4),
        spec: None,
    };
    assert_eq!((stats.prefill_rate(), stats.decode_rate()), (200.0, 10.0));
    let none = GenerationStats::default();
    assert_eq!((none.prefill_rate(), none.decode_rate()), (0.0, 0.0));

    let fake = FakeOptions {
        latency: Duration::from_millis(3),
        max_rows: 8,
        ..fake(512)
    };
    let mut session = session(
        &fake,
        SessionOptions {
            stop_ids: Vec::new(),
            ..session_options(Some(5))
        },
    );
    let stats = reply(&mut session, "Hello").unwrap().stats;
    let steps_to_first = stats.prompt_tokens.div_ceil(8) as u32;
    assert!(steps_to_first > 1);
    assert!(stats.to_first >= steps_to_first * fake.latency, "{stats:?}");
    assert!(stats.after_first >= 4 * fake.latency, "{stats:?}");
}

#[test]
fn special_tokens_are_not_shown() {
    let fake = fake(256);
    let mut steps = StepLoop::new(Box::new(FakeRunner::new(&fake)));
    let options = |stop_ids: &[u32], bias| GenerationOptions {
        sampling: Arc::new(SamplingParams {
            logit_bias: vec![(bias, 100.0)],
            ..SamplingParams::default()
        }),
        seed: 0,
        max_tokens: Some(3),
        stop_ids: stop_ids.into(),
        vocabulary: 640,
        top_logprobs: None,
    };
    let visible = tokenizer().encode("a", false).unwrap()[0];
    for (options, text, tokens) in [
        (options(&[], END), "", vec![END; 3]),
        (options(&[END], END), "", vec![END]),
        (options(&[], visible), "aaa", vec![visible; 3]),
        // Not even a stop token that is an ordinary one.
        (options(&[visible], visible), "", vec![visible]),
    ] {
        let sequence = steps.new_sequence();
        let on_text = &mut |_: &str| ControlFlow::Continue(());
        let answer = answer(
            &mut steps,
            &tokenizer(),
            sequence,
            &[1, 2],
            options,
            &[],
            &mut |_| ControlFlow::Continue(()),
            on_text,
        )
        .unwrap();
        assert_eq!(
            (answer.text.as_str(), answer.generated.tokens),
            (text, tokens)
        );
    }
}

#[test]
fn an_answer_can_be_given_up_while_the_prompt_runs() {
    for depth in [1, 2] {
        let fake = FakeOptions {
            depth,
            max_rows: 8,
            ..fake(2048)
        };
        let options = session_options(Some(12));
        let mut session = session(&fake, options.clone());
        reply(&mut session, "Hello").unwrap();
        let before = session.messages().to_vec();

        let text = "A question that takes more than a few steps to read. ".repeat(8);
        let mut heard = 0;
        let given_up = session
            .reply(
                &text,
                &mut |_| {
                    heard += 1;
                    if heard < 2 {
                        ControlFlow::Continue(())
                    } else {
                        ControlFlow::Break(())
                    }
                },
                &mut |piece| panic!("{piece:?} is said after all"),
            )
            .unwrap();
        assert_eq!(heard, 2, "it went on");
        assert_eq!(given_up.text, "");
        assert_eq!(given_up.finish, FinishReason::Stop);
        assert_eq!(given_up.stats.completion_tokens, 0);
        assert_eq!(session.messages(), before, "nothing was said");

        // Asked again, it is answered as if it had never been given up, and what was read is not read again.
        let again = reply(&mut session, &text).unwrap();
        let mut messages = before;
        messages.push(ChatMessage::new("user", text));
        let prompt = tokenizer().encode(&chatml(&messages), false).unwrap();
        assert_eq!(
            again.text,
            tokenizer().decode(&cold(&prompt, &options, &fake), true)
        );
        assert!(again.stats.cached_tokens > given_up.stats.cached_tokens);
        assert!(again.stats.cached_tokens < prompt.len());
    }
}
