//! What a line that starts with `/` means. Knows neither the session nor the terminal.

use std::path::PathBuf;

/// A command of the chat.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Command {
    Help,
    Clear,
    System(Option<String>),
    /// A name and a value; none lists them.
    Set(Option<(String, String)>),
    Show,
    Save(PathBuf),
    Load(PathBuf),
    /// On or off; without a word the other of the two.
    Think(Option<bool>),
    Raw(Option<bool>),
    Bye,
}

/// As they are typed, and what they do.
const COMMANDS: [(&str, &str); 11] = [
    ("/help, /?", "this list"),
    ("/clear", "start a new conversation"),
    ("/system [TEXT]", "set the system prompt, or take it away"),
    ("/set [NAME VALUE]", "change a setting, or list them"),
    ("/show", "what is in force, and how full the context is"),
    ("/save FILE", "write the conversation to a file"),
    ("/load FILE", "go on with a conversation from a file"),
    ("/think [on|off]", "whether the model reasons first"),
    (
        "/raw [on|off]",
        "continue texts as they are, without a chat template",
    ),
    ("/bye", "leave (as does Ctrl-D)"),
    (
        "\"\"\"",
        "around a text of several lines; Ctrl-C stops an answer",
    ),
];

impl Command {
    /// The command on `line`, or what is wrong with it; none if the line is no command.
    pub(super) fn parse(line: &str) -> Option<Result<Self, String>> {
        // A blank before it makes a `/` part of a message.
        if !line.starts_with('/') {
            return None;
        }
        let line = line.trim_end();
        let (name, rest) = line.split_once(char::is_whitespace).unwrap_or((line, ""));
        let rest = rest.trim();
        let file = |make: fn(PathBuf) -> Command| match rest {
            "" => Err(format!("{name} needs the name of a file")),
            _ => Ok(make(PathBuf::from(rest))),
        };
        let alone = |command: Command| match rest {
            "" => Ok(command),
            _ => Err(format!("{name} takes nothing after it")),
        };
        let switch = |make: fn(Option<bool>) -> Command| match rest {
            "" => Ok(make(None)),
            "on" => Ok(make(Some(true))),
            "off" => Ok(make(Some(false))),
            _ => Err(format!("write {name} on or {name} off")),
        };
        Some(match name {
            "/help" | "/?" => alone(Command::Help),
            "/clear" => alone(Command::Clear),
            "/system" => Ok(Command::System(
                Some(rest.to_owned()).filter(|text| !text.is_empty()),
            )),
            "/set" => match rest.split_once(char::is_whitespace) {
                None if rest.is_empty() => Ok(Command::Set(None)),
                None => Err(format!("write /set {rest} VALUE; /set lists the names")),
                Some((name, value)) => {
                    let pair = (name.to_owned(), value.trim().to_owned());
                    Ok(Command::Set(Some(pair)))
                }
            },
            "/show" => alone(Command::Show),
            "/save" => file(Command::Save),
            "/load" => file(Command::Load),
            "/think" => switch(Command::Think),
            "/raw" => switch(Command::Raw),
            "/bye" | "/exit" | "/quit" => alone(Command::Bye),
            _ => Err(format!(
                "there is no command {name}: /help lists them; with a blank before it, it is a message"
            )),
        })
    }
}

/// The list of commands.
pub(super) fn help() -> String {
    let lines = COMMANDS.map(|(usage, what)| format!("{usage:18} {what}"));
    lines.join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_mean_what_they_say() {
        let set = |name: &str, value: &str| Command::Set(Some((name.to_owned(), value.to_owned())));
        let cases = [
            ("/help", Command::Help),
            ("/?  ", Command::Help),
            ("/clear", Command::Clear),
            ("/system", Command::System(None)),
            (
                "/system  be brief ",
                Command::System(Some("be brief".to_owned())),
            ),
            ("/set", Command::Set(None)),
            ("/set top-k  40", set("top-k", "40")),
            ("/set stop a b", set("stop", "a b")),
            ("/save a b.json", Command::Save("a b.json".into())),
            ("/load x", Command::Load("x".into())),
            ("/think", Command::Think(None)),
            ("/think off", Command::Think(Some(false))),
            ("/raw on", Command::Raw(Some(true))),
            ("/bye", Command::Bye),
        ];
        for (line, command) in cases {
            assert_eq!(Command::parse(line), Some(Ok(command)), "{line}");
        }
        for line in [
            "/",
            "/nonsense",
            "/save",
            "/load ",
            "/think maybe",
            "/set x",
            "/bye now",
        ] {
            let parsed = Command::parse(line);
            assert!(matches!(parsed, Some(Err(_))), "{line}: {parsed:?}");
        }
        for line in ["", "hello", " /bye", "a /bye"] {
            assert_eq!(Command::parse(line), None, "{line}");
        }
    }

    #[test]
    fn the_list_has_every_command() {
        let help = help();
        for name in [
            "/help", "/?", "/clear", "/system", "/set", "/show", "/save", "/load", "/think",
            "/raw", "/bye",
        ] {
            assert!(help.contains(name), "{name}");
        }
    }
}
