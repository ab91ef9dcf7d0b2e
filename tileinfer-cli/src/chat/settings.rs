//! What `/set` knows.

use std::str::FromStr;

use anyhow::{Result, bail};

use super::Chat;

/// Names, and what may follow them.
const NAMES: [(&str, &str); 12] = [
    ("temperature", "0 takes the likeliest token"),
    ("top-k", "0 is off"),
    ("top-p", "1 is off"),
    ("min-p", "0 is off"),
    ("repetition-penalty", "1 is off"),
    ("presence-penalty", "0 is off"),
    ("frequency-penalty", "0 is off"),
    ("seed", "a number"),
    ("max-tokens", "a number, or none"),
    ("stop", "a text that ends an answer, or none"),
    ("think", "show or hide the reasoning"),
    ("verbose", "on or off: what each answer cost"),
];

/// The settings and their values.
pub(super) fn list(chat: &Chat) -> String {
    let lines = NAMES.map(|(name, what)| format!("{name:18} {:10} {what}", value(chat, name)));
    lines.join("\n")
}

fn value(chat: &Chat, name: &str) -> String {
    let options = &chat.session.options;
    let sampling = &options.sampling;
    let switch = |on: bool, words: [&str; 2]| words[usize::from(!on)].to_owned();
    match name {
        "temperature" => sampling.temperature.to_string(),
        "top-k" => sampling.top_k.to_string(),
        "top-p" => sampling.top_p.to_string(),
        "min-p" => sampling.min_p.to_string(),
        "repetition-penalty" => sampling.repetition_penalty.to_string(),
        "presence-penalty" => sampling.presence_penalty.to_string(),
        "frequency-penalty" => sampling.frequency_penalty.to_string(),
        "seed" => options.seed.to_string(),
        "max-tokens" => options
            .max_tokens
            .map_or("none".to_owned(), |most| most.to_string()),
        "stop" if options.stop_strings.is_empty() => "none".to_owned(),
        "stop" => format!("{:?}", options.stop_strings),
        "think" => switch(chat.show_reasoning, ["show", "hide"]),
        "verbose" => switch(chat.verbose, ["on", "off"]),
        _ => String::new(),
    }
}

/// Gives the setting `name` a value; what there is to say about it.
pub(super) fn set(chat: &mut Chat, name: &str, text: &str) -> Result<String> {
    let mut options = chat.session.options.clone();
    let sampling = &mut options.sampling;
    match name {
        "temperature" => sampling.temperature = number(name, text)?,
        "top-k" => sampling.top_k = number(name, text)?,
        "top-p" => sampling.top_p = number(name, text)?,
        "min-p" => sampling.min_p = number(name, text)?,
        "repetition-penalty" => sampling.repetition_penalty = number(name, text)?,
        "presence-penalty" => sampling.presence_penalty = number(name, text)?,
        "frequency-penalty" => sampling.frequency_penalty = number(name, text)?,
        "seed" => options.seed = number(name, text)?,
        "max-tokens" if text == "none" => options.max_tokens = None,
        "max-tokens" => match number(name, text)? {
            0 => bail!("max-tokens has to be at least 1"),
            most => options.max_tokens = Some(most),
        },
        "stop" if text == "none" => options.stop_strings.clear(),
        "stop" => options.stop_strings.push(text.to_owned()),
        "think" => chat.show_reasoning = one_of(name, text, ["show", "hide"])?,
        "verbose" => chat.verbose = one_of(name, text, ["on", "off"])?,
        _ => bail!("there is no setting {name}: /set lists them"),
    }
    options.sampling.validate()?;
    chat.session.options = options;
    Ok(format!("{name} is {}", value(chat, name)))
}

fn number<T: FromStr>(name: &str, text: &str) -> Result<T> {
    match text.parse() {
        Ok(number) => Ok(number),
        Err(_) => bail!("{text} is no value for {name}: /set lists what may be said"),
    }
}

/// Whether the text is the first of two words.
fn one_of(name: &str, text: &str, [yes, no]: [&str; 2]) -> Result<bool> {
    if text != yes && text != no {
        bail!("write /set {name} {yes} or /set {name} {no}");
    }
    Ok(text == yes)
}
