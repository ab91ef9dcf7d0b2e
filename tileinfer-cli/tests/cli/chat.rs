//! The chat, in a terminal.

use std::os::unix::process::ExitStatusExt;
use std::time::{Duration, Instant};

use serde_json::json;

use super::terminal::Terminal;
use super::*;

const PROMPT: &str = ">>> ";
const CTRL_C: &str = "\x03";
const CTRL_D: &str = "\x04";
const DIM: &str = "\x1b[2m";

/// A folder for the history and for saved conversations.
struct Home(tempfile::TempDir);

impl Home {
    fn new() -> Self {
        Home(tempfile::tempdir().unwrap())
    }

    fn path(&self, name: &str) -> String {
        self.0.path().join(name).display().to_string()
    }

    fn command(&self, more: &[&str]) -> Command {
        let model = qwen3();
        let mut command = tileinfer(&[&["run", &model, "--max-tokens", "12"], more].concat());
        command.env("XDG_STATE_HOME", self.0.path());
        command
    }

    /// A chat that waits for the first message.
    fn chat(&self, more: &[&str]) -> Terminal {
        started(self.command(more))
    }

    /// The messages of a saved conversation, as pairs of role and content.
    fn saved(&self, name: &str) -> Vec<(String, String)> {
        let text = fs::read_to_string(self.path(name)).unwrap();
        let value: Value = serde_json::from_str(&text).unwrap();
        let word = |value: &Value| value.as_str().unwrap().to_owned();
        value["messages"]
            .as_array()
            .unwrap()
            .iter()
            .map(|message| (word(&message["role"]), word(&message["content"])))
            .collect()
    }
}

fn started(command: Command) -> Terminal {
    let mut terminal = Terminal::start(command);
    terminal.expect("/help lists the commands");
    terminal.expect(PROMPT);
    terminal
}

/// The editor's last word on a line. While keys arrive it may draw the prompt again.
const LINE_ENDS: &str = "\x1b[?2004l";

/// Types a line and waits for the next prompt; what was shown between.
fn say(terminal: &mut Terminal, line: &str) -> String {
    terminal.line(line);
    terminal.expect(LINE_ENDS);
    terminal.expect(PROMPT)
}

/// Presses Ctrl-C at the prompt and waits for a new one.
fn drop_line(terminal: &mut Terminal) {
    terminal.press(CTRL_C);
    terminal.expect(LINE_ENDS);
    terminal.expect(PROMPT);
}

/// Types a line of a longer text.
fn say_more(terminal: &mut Terminal, line: &str) {
    terminal.line(line);
    terminal.expect(LINE_ENDS);
    terminal.expect("... ");
}

fn save(terminal: &mut Terminal, home: &Home, name: &str) -> Vec<(String, String)> {
    let path = home.path(name);
    let said = say(terminal, &format!("/save {path}"));
    assert!(said.contains("saved in"), "{said}");
    home.saved(name)
}

fn leave(mut terminal: Terminal) {
    terminal.line("/bye");
    assert_eq!(terminal.end().0.code(), Some(0));
}

#[test]
fn a_conversation_goes_on_where_it_was() {
    let home = Home::new();
    let mut chat = home.chat(&["--verbose"]);
    let first = say(&mut chat, "hello there");
    assert!(first.contains("(0 from the cache)"), "{first}");
    let second = say(&mut chat, "and then?");
    assert!(
        second.contains(" from the cache)") && !second.contains("(0 from"),
        "{second}"
    );
    let off = say(&mut chat, "/set verbose off");
    assert!(off.contains("verbose is off"), "{off}");
    let third = say(&mut chat, "more");
    assert!(!third.contains("from the cache"), "{third}");
    let messages = save(&mut chat, &home, "saved");
    let roles: Vec<&str> = messages.iter().map(|(role, _)| role.as_str()).collect();
    assert_eq!(
        roles,
        [
            "user",
            "assistant",
            "user",
            "assistant",
            "user",
            "assistant"
        ]
    );
    let single = json(&[
        "run",
        &qwen3(),
        "hello there",
        "--max-tokens",
        "12",
        "--json",
    ]);
    assert_eq!(single["text"], messages[1].1);
    leave(chat);
}

#[test]
fn texts_may_have_several_lines_and_wide_characters() {
    let home = Home::new();
    let mut chat = home.chat(&[]);
    say_more(&mut chat, "\"\"\"日本語 first");
    say_more(&mut chat, "/bye is no command here");
    say(&mut chat, "naïve 🦀\"\"\"");
    // Backspace takes a whole wide character away, an arrow goes over one.
    say(&mut chat, "ab語\x7f界c\x1b[D\x1b[Dé");
    let messages = save(&mut chat, &home, "saved");
    assert_eq!(
        messages[0].1,
        "日本語 first\n/bye is no command here\nnaïve 🦀"
    );
    assert_eq!(messages[2].1, "abé界c");
    leave(chat);
}

#[test]
fn ctrl_c_stops_the_answer_and_keeps_the_session() {
    let home = Home::new();
    let mut chat = home.chat(&["--ctx-size", "100000", "--ignore-eos"]);
    say(&mut chat, "/set max-tokens none");
    chat.line("count to infinity");
    chat.expect(LINE_ENDS);
    // Something of the answer is there.
    std::thread::sleep(Duration::from_millis(500));
    chat.press(CTRL_C);
    chat.expect("(stopped)");
    chat.expect(PROMPT);
    let messages = save(&mut chat, &home, "saved");
    assert_eq!(messages.len(), 2);
    assert!(!messages[1].1.is_empty());
    say(&mut chat, "/set max-tokens 4");
    let after = say(&mut chat, "again");
    assert!(!after.contains("(stopped)"), "{after}");
    assert_eq!(save(&mut chat, &home, "after").len(), 4);
    leave(chat);
}

#[test]
fn ctrl_c_stops_the_reading_of_a_long_prompt() {
    let home = Home::new();
    let long = "many words ".repeat(2000);
    let conversation =
        json!([{"role": "user", "content": long}, {"role": "assistant", "content": "?"}]);
    fs::write(home.path("long"), conversation.to_string()).unwrap();
    let mut chat = home.chat(&["--ctx-size", "60000", "--device", "reference"]);
    let loaded = say(&mut chat, &format!("/load {}", home.path("long")));
    assert!(loaded.contains("loaded 2 messages"), "{loaded}");
    chat.line("and what is this about?");
    chat.expect("reading the prompt");
    chat.press(CTRL_C);
    let shown = chat.expect("(stopped)");
    assert!(!shown.contains(PROMPT), "{shown}");
    chat.expect(PROMPT);
    // Nothing was said yet, so the question is not part of the conversation.
    assert_eq!(save(&mut chat, &home, "saved").len(), 2);
    say(&mut chat, "/clear");
    say(&mut chat, "hello");
    assert_eq!(save(&mut chat, &home, "after").len(), 2);
    leave(chat);
}

/// At the prompt and in the middle of an answer.
#[test]
fn a_window_that_is_closed_ends_the_chat() {
    for answering in [false, true] {
        let home = Home::new();
        let mut chat = home.chat(&["--ctx-size", "100000", "--ignore-eos"]);
        say(&mut chat, "/set max-tokens none");
        let history = || fs::read_to_string(home.0.path().join("tileinfer/history")).unwrap();
        if answering {
            chat.line("count to infinity");
            chat.expect(LINE_ENDS);
            // The line is kept a moment after the terminal is given back, before it is answered.
            let begun = Instant::now();
            while !history().contains("count to infinity\n") {
                assert!(begun.elapsed() < Duration::from_secs(10), "{}", history());
                std::thread::sleep(Duration::from_millis(10));
            }
        }
        let status = chat.hang_up();
        // The signal, an error about the terminal, or a quiet end: but no crash and no process that stays.
        assert!(
            matches!(
                (status.code(), status.signal()),
                (Some(0 | 1), None) | (None, Some(1))
            ),
            "{status:?}"
        );
        let history = history();
        assert!(history.contains("/set max-tokens none\n"), "{history}");
        assert_eq!(
            history.contains("count to infinity\n"),
            answering,
            "{history}"
        );
    }
}

#[test]
fn ctrl_c_at_the_prompt_drops_the_line() {
    let home = Home::new();
    let mut chat = home.chat(&[]);
    chat.press("never sent");
    drop_line(&mut chat);
    say_more(&mut chat, "\"\"\"nor this");
    drop_line(&mut chat);
    assert_eq!(save(&mut chat, &home, "saved"), []);
    chat.press(CTRL_D);
    let (status, _) = chat.end();
    assert_eq!((status.code(), status.signal()), (Some(0), None));
}

#[test]
fn conversations_are_cleared_saved_and_loaded() {
    let home = Home::new();
    let mut chat = home.chat(&["--system", "be brief"]);
    say(&mut chat, "one");
    let first = save(&mut chat, &home, "first");
    assert_eq!(first[0], ("system".to_owned(), "be brief".to_owned()));
    assert_eq!(first.len(), 3);
    let cleared = say(&mut chat, "/clear");
    assert!(cleared.contains("the system prompt stays"), "{cleared}");
    assert_eq!(save(&mut chat, &home, "cleared"), first[..1]);
    say(&mut chat, "/system");
    assert_eq!(save(&mut chat, &home, "empty"), []);
    let loaded = say(&mut chat, &format!("/load {}", home.path("first")));
    assert!(loaded.contains("loaded 3 messages"), "{loaded}");
    say(&mut chat, "two");
    let second = save(&mut chat, &home, "second");
    assert_eq!(second[..3], first);
    assert_eq!(second.len(), 5);
    // What cannot be read or written is said, and the conversation stays.
    let bad = say(&mut chat, "/load /nonexistent/file");
    assert!(bad.contains("/nonexistent/file"), "{bad}");
    fs::write(home.path("garbage"), "{\"messages\": 3}").unwrap();
    let bad = say(&mut chat, &format!("/load {}", home.path("garbage")));
    assert!(bad.contains("is not a conversation"), "{bad}");
    let bad = say(&mut chat, "/save /nonexistent/file");
    assert!(bad.contains("/nonexistent/file"), "{bad}");
    assert_eq!(save(&mut chat, &home, "again"), second);
    leave(chat);
    let left: Vec<_> = fs::read_dir(home.0.path())
        .unwrap()
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .filter(|name| name.ends_with(".part"))
        .collect();
    assert!(left.is_empty(), "{left:?}");
}

#[test]
fn commands_say_what_they_do() {
    let home = Home::new();
    let mut chat = home.chat(&[]);
    let help = say(&mut chat, "/?");
    for name in [
        "/help", "/clear", "/system", "/set", "/show", "/save", "/load", "/think", "/raw", "/bye",
    ] {
        assert!(help.contains(name), "{name}: {help}");
    }
    let unknown = say(&mut chat, "/nonsense");
    assert!(unknown.contains("/help lists them"), "{unknown}");
    let set = say(&mut chat, "/set top-k 5");
    assert!(set.contains("top-k is 5"), "{set}");
    let refused = say(&mut chat, "/set top-p 7");
    assert!(
        refused.contains("top_p") || refused.contains("top-p"),
        "{refused}"
    );
    let show = say(&mut chat, "/show");
    assert!(show.contains("0 of 512 tokens"), "{show}");
    assert!(show.contains("top-p              1 "), "{show}");
    let think = say(&mut chat, "/think on");
    assert!(think.contains("knows no thinking"), "{think}");
    let raw = say(&mut chat, "/raw");
    assert!(raw.contains("as they are"), "{raw}");
    say(&mut chat, "Once upon a time");
    assert_eq!(save(&mut chat, &home, "saved"), []);
    let nowhere = say(&mut chat, "/save /nonexistent/folder/file");
    assert!(
        nowhere.contains("writing /nonexistent/folder/file"),
        "{nowhere}"
    );
    let nothing = say(&mut chat, "/load /nonexistent/file");
    assert!(nothing.contains("reading /nonexistent/file"), "{nothing}");
    leave(chat);
}

#[test]
fn a_full_context_is_said_and_the_chat_goes_on() {
    let home = Home::new();
    let mut chat = home.chat(&["--ctx-size", "64", "--ignore-eos"]);
    say(&mut chat, "/set max-tokens none");
    let full = say(&mut chat, "hello");
    assert!(full.contains("the context of 64 tokens is full"), "{full}");
    assert!(full.contains("/clear starts a new one"), "{full}");
    let refused = say(&mut chat, "and more");
    assert!(refused.contains("the context is full"), "{refused}");
    assert_eq!(save(&mut chat, &home, "saved").len(), 2);
    say(&mut chat, "/clear");
    say(&mut chat, "/set max-tokens 4");
    let again = say(&mut chat, "hello");
    assert!(!again.contains("full"), "{again}");
    leave(chat);
}

/// A template that opens the reasoning itself, so that all of an answer is reasoning.
fn reasoning_template(home: &Home) -> String {
    let path = home.path("think.jinja");
    let template = "{% for m in messages %}{{ m.content }}{% endfor %}{# </think> #}<think>\n";
    fs::write(&path, template).unwrap();
    path
}

#[test]
fn reasoning_is_dimmed_or_hidden() {
    let home = Home::new();
    let template = reasoning_template(&home);
    let mut chat = home.chat(&["--chat-template", &template]);
    let dimmed = say(&mut chat, "hello");
    assert!(
        dimmed.contains(DIM) && dimmed.contains("\x1b[0m"),
        "{dimmed:?}"
    );
    say(&mut chat, "/set think hide");
    let hidden = say(&mut chat, "hello");
    assert!(hidden.contains("(thinking)"), "{hidden:?}");
    leave(chat);

    let mut command = home.command(&["--chat-template", &template]);
    command.env("NO_COLOR", "1");
    let mut chat = started(command);
    let plain = say(&mut chat, "hello");
    assert!(
        !plain.contains(DIM) && !plain.contains("\x1b[0m"),
        "{plain:?}"
    );
    leave(chat);
}

#[test]
fn the_history_outlives_the_chat_unless_it_is_not_wanted() {
    let home = Home::new();
    let file = home.0.path().join("tileinfer/history");
    let mut chat = home.chat(&["--no-history"]);
    say(&mut chat, "a secret");
    leave(chat);
    assert!(!file.exists());

    let mut chat = home.chat(&[]);
    say(&mut chat, "remember me");
    leave(chat);
    let kept = fs::read_to_string(&file).unwrap();
    assert!(
        kept.contains("remember me") && !kept.contains("a secret"),
        "{kept}"
    );
    // The arrow brings back the last line, which was the farewell, then the one before.
    let mut chat = home.chat(&[]);
    chat.press("\x1b[A\x1b[A");
    say(&mut chat, "");
    assert_eq!(save(&mut chat, &home, "saved")[0].1, "remember me");
    leave(chat);
}

#[test]
fn a_history_that_cannot_be_written_is_a_note() {
    let home = Home::new();
    fs::write(home.0.path().join("file"), "no folder").unwrap();
    let mut command = home.command(&[]);
    command.env("XDG_STATE_HOME", home.0.path().join("file"));
    let mut chat = Terminal::start(command);
    chat.expect("what you type is not kept");
    chat.expect(PROMPT);
    say(&mut chat, "hello");
    assert_eq!(save(&mut chat, &home, "saved").len(), 2);
    leave(chat);
}

#[test]
fn without_a_terminal_there_is_no_chat() {
    let model = qwen3();
    let done = run_with_input(&["run", &model, "--max-tokens", "3", "--json"], "/help\n");
    assert_eq!(parsed(&done)["usage"]["completion_tokens"], json!(3));
}
