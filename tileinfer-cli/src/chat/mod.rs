//! The chat: a conversation on a terminal. What a line means is in `command`, where lines come from in `input`,
//! how answers are shown in `screen`, what can be set in `settings`, conversations as files in `saved`, Ctrl-C in
//! `interrupt`.

mod command;
mod input;
mod interrupt;
mod saved;
mod screen;
mod settings;

use std::io::IsTerminal;
use std::ops::ControlFlow;

use anyhow::Result;
use tileinfer::Error;
use tileinfer::chat::{ChatMessage, ChatRequest, ReasoningMarks};
use tileinfer::engine::FinishReason;
use tileinfer::session::{Reply, Session, SessionOptions};

use crate::args::RunArgs;
use crate::open::{self, Purpose};
use crate::run::{self, Model};
use crate::speculate::Speculating;
use crate::voice::{Voice, say};
use command::Command;
use input::{Input, Typed};
use screen::Screen;

/// A chat with the model, until the user leaves.
pub(crate) fn chat(model: &Model, args: &RunArgs, voice: Voice) -> Result<()> {
    let template = run::template(args, &model.dir)?;
    let marks = ReasoningMarks::of(&model.tokenizer, &template);
    let tokenizer = match &marks {
        Some(marks) => model.tokenizer.showing(&[marks.open, marks.close]),
        None => model.tokenizer.clone(),
    };
    let mut raw = args.raw;
    if !raw && template.names().next().is_none() {
        voice.note("the model has no chat template: texts are continued as they are (/raw off)");
        raw = true;
    }
    let options = SessionOptions {
        sampling: model.settings.sampling.clone(),
        seed: model.settings.seed,
        stop_ids: model.settings.stop_ids.clone(),
        stop_strings: args.stop.clone(),
        max_tokens: args.max_tokens,
        thinking: run::thinking(args, &template, &voice),
    };
    let spec = Speculating::choose(&args.spec, args.model.name.hub, &voice)?;
    if let Some(spec) = &spec
        && !raw
        && template.supports_thinking()
    {
        spec.warn_of_thinking(options.thinking, &voice);
    }
    let purpose = Purpose::one(None).speculating(spec.as_ref());
    let opened = open::open(&model.dir, &args.model.place, purpose, &voice)?;
    let mut session = Session::new(opened.steps, tokenizer, template, options);
    session.set_system(args.system.clone());

    let mut chat = Chat {
        name: args.model.name.model.clone(),
        marks,
        raw,
        show_reasoning: true,
        verbose: voice.is_verbose(),
        screen: Screen::new(std::io::stdout().is_terminal()),
        session,
        voice,
    };
    interrupt::listen()?;
    let history = if args.no_history {
        None
    } else {
        input::history_file(&voice)
    };
    let mut input = Input::new(history, voice)?;
    voice.note("/help lists the commands, Ctrl-D leaves");
    loop {
        match input.read()? {
            Typed::End => return Ok(()),
            Typed::Nothing => {}
            Typed::Line(line) => match Command::parse(&line) {
                None if line.trim().is_empty() => {}
                None => chat.answer(&line)?,
                Some(Ok(Command::Bye)) => return Ok(()),
                Some(Ok(command)) => chat.obey(command),
                Some(Err(reason)) => say(reason),
            },
            Typed::Text(text) => chat.answer(&text)?,
        }
    }
}

/// Goes on unless Ctrl-C was pressed.
fn unless_asked() -> ControlFlow<()> {
    if interrupt::asked() {
        ControlFlow::Break(())
    } else {
        ControlFlow::Continue(())
    }
}

/// A conversation and how it is shown.
struct Chat {
    /// What the user calls the model.
    name: String,
    session: Session,
    marks: Option<ReasoningMarks>,
    /// Texts are continued as they are, outside the conversation.
    raw: bool,
    show_reasoning: bool,
    verbose: bool,
    screen: Screen,
    voice: Voice,
}

impl Chat {
    /// Shows the model's answer. An error of the model or of the context is said, and the chat goes on; one of
    /// the terminal ends it.
    fn answer(&mut self, text: &str) -> Result<()> {
        interrupt::forget();
        let inside = !self.raw && self.starts_inside_reasoning();
        let mut shown = self.screen.answer(self.marks, inside, self.show_reasoning);
        let bar = self.voice.bar("reading the prompt", 0);
        let mut on_progress = |done: usize| {
            bar.set_length(bar.length().unwrap_or(0).max(done as u64));
            bar.set_position(done as u64);
            unless_asked()
        };
        let mut broken = None;
        let mut on_text = |piece: &str| {
            bar.finish_and_clear();
            if let Err(error) = shown.push(piece) {
                broken = Some(error);
                return ControlFlow::Break(());
            }
            unless_asked()
        };
        let result = if self.raw {
            self.session
                .continue_text(text, &mut on_progress, &mut on_text)
        } else {
            self.session.reply(text, &mut on_progress, &mut on_text)
        };
        bar.finish_and_clear();
        shown.finish()?;
        if let Some(error) = broken {
            return Err(error.into());
        }
        match result {
            Ok(reply) => self.remark(&reply),
            Err(error @ Error::ContextFull { .. }) => {
                say(error);
                self.offer_room();
            }
            Err(error) => say(error),
        }
        Ok(())
    }

    /// What is to be said after an answer.
    fn remark(&self, reply: &Reply) {
        if interrupt::asked() {
            self.voice.note("(stopped)");
        } else if reply.context_full {
            let limit = self.session.steps().limits().max_length;
            say(format_args!(
                "the answer is cut off: the context of {limit} tokens is full"
            ));
            self.offer_room();
        } else if reply.finish == FinishReason::Length {
            self.voice
                .note("(cut off by the limit: /set max-tokens N, or none)");
        }
        if self.verbose {
            say(run::statistics(&reply.stats));
        }
    }

    fn offer_room(&self) {
        say(
            "/save FILE keeps the conversation, /clear starts a new one; a larger --ctx-size holds more",
        );
    }

    /// Whether the template opens the reasoning itself, so that no mark of its beginning will come.
    fn starts_inside_reasoning(&self) -> bool {
        let Some(marks) = self.marks else {
            return false;
        };
        let mut request = ChatRequest::answer(&[ChatMessage::new("user", "?")]);
        if let Some(thinking) = self.session.options.thinking {
            request
                .variables
                .insert("enable_thinking".to_owned(), thinking.into());
        }
        let template = self.session.template();
        template
            .accommodate(request)
            .and_then(|request| template.render(&request))
            // An error will come up again where the answer is asked for.
            .is_ok_and(|prompt| marks.is_open_after(&prompt))
    }

    fn obey(&mut self, command: Command) {
        let said = match command {
            Command::Help => Ok(command::help()),
            Command::Bye => return,
            Command::Clear => {
                let system = self.system();
                self.session.reset();
                let kept = if system.is_some() {
                    "; the system prompt stays"
                } else {
                    ""
                };
                self.session.set_system(system);
                Ok(format!("the conversation is cleared{kept}"))
            }
            Command::System(text) => {
                let said = match &text {
                    Some(_) => "the system prompt is set",
                    None => "there is no system prompt now",
                };
                self.session.set_system(text);
                Ok(said.to_owned())
            }
            Command::Set(None) => Ok(settings::list(self)),
            Command::Set(Some((name, value))) => settings::set(self, &name, &value),
            Command::Show => self.show(),
            Command::Save(path) => saved::save(&path, &self.name, self.session.messages())
                .map(|()| format!("saved in {}", path.display())),
            Command::Load(path) => saved::load(&path).map(|messages| {
                let count = messages.len();
                self.session.set_messages(messages);
                format!("loaded {count} messages")
            }),
            Command::Think(thinking) => self.think(thinking),
            Command::Raw(raw) => {
                self.raw = raw.unwrap_or(!self.raw);
                Ok(if self.raw {
                    "texts are continued as they are, outside the conversation"
                } else {
                    "texts are messages of the conversation"
                }
                .to_owned())
            }
        };
        match said {
            Ok(text) => say(text),
            Err(error) => say(format_args!("{error:#}")),
        }
    }

    fn system(&self) -> Option<String> {
        let first = self.session.messages().first();
        first
            .filter(|message| message.role == "system")
            .map(|message| message.content.clone())
    }

    fn think(&mut self, thinking: Option<bool>) -> Result<String> {
        if !self.session.template().supports_thinking() {
            anyhow::bail!("the model's chat template knows no thinking: /think changes nothing");
        }
        let thinking = thinking.unwrap_or(self.session.options.thinking != Some(true));
        self.session.options.thinking = Some(thinking);
        Ok(if thinking {
            "the model reasons first"
        } else {
            "the model answers at once"
        }
        .to_owned())
    }

    fn show(&self) -> Result<String> {
        let limits = self.session.steps().limits();
        let used = if self.session.messages().is_empty() {
            0
        } else {
            self.session.prompt().map_or(0, |prompt| prompt.len())
        };
        Ok(format!(
            "model      {}\ndevice     {}\ncontext    {used} of {} tokens, {} messages\nsystem     {}\n{}\n{}",
            self.name,
            self.session.steps().device(),
            limits.max_length,
            self.session.messages().len(),
            self.system().unwrap_or_else(|| "none".to_owned()),
            run::describe(&self.session.options.sampling, self.session.options.seed),
            settings::list(self)
        ))
    }
}
