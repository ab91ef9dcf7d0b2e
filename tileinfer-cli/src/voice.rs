//! What is said on stderr, and how much of it.

use std::io::{IsTerminal, Write};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::args::VoiceArgs;

/// Says `text` on stderr, without what could harm a terminal: it may quote a file or a hub. Where nobody listens any
/// more there is nobody to tell.
pub(crate) fn say(text: impl std::fmt::Display) {
    let _ = writeln!(std::io::stderr(), "{}", harmless(&text.to_string()));
}

/// The text without control characters: an escape sequence could move the cursor, rename the window or worse.
pub(crate) fn harmless(text: &str) -> String {
    let is_control = |c: char| c.is_control() && c != '\n' && c != '\t';
    text.replace(is_control, "\u{fffd}")
}

/// How much is said.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Voice {
    quiet: bool,
    verbose: bool,
}

impl Voice {
    pub(crate) fn new(args: VoiceArgs) -> Self {
        Voice {
            quiet: args.quiet,
            verbose: args.verbose,
        }
    }

    /// Whether nothing but errors is to be said.
    pub(crate) fn is_quiet(&self) -> bool {
        self.quiet
    }

    /// Whether more than usual is to be said.
    pub(crate) fn is_verbose(&self) -> bool {
        self.verbose
    }

    /// Says what the user should know.
    pub(crate) fn note(&self, text: &str) {
        if !self.quiet {
            say(text);
        }
    }

    /// Says what a curious user asked for.
    pub(crate) fn detail(&self, text: &str) {
        if self.verbose {
            say(text);
        }
    }

    /// Says what took so long, to a curious user.
    pub(crate) fn took(&self, what: &str, start: Instant) {
        let seconds = start.elapsed().as_secs_f64();
        self.detail(&format!("{what} took {seconds:.2} s"));
    }

    /// A bar that shows once a wait has lasted a second.
    pub(crate) fn bar(&self, what: &'static str, length: u64) -> ProgressBar {
        let bar = ProgressBar::new(length).with_message(what);
        if self.quiet || !std::io::stderr().is_terminal() {
            bar.set_draw_target(ProgressDrawTarget::hidden());
            return bar;
        }
        let style = ProgressStyle::with_template("{msg} [{bar:30}] {pos}/{len} {eta}");
        if let Ok(style) = style {
            bar.set_style(style.progress_chars("=> "));
        }
        bar.set_draw_target(ProgressDrawTarget::hidden());
        let shown = bar.downgrade();
        std::thread::spawn(move || {
            std::thread::sleep(Duration::from_secs(1));
            if let Some(bar) = shown.upgrade().filter(|bar| !bar.is_finished()) {
                bar.set_draw_target(ProgressDrawTarget::stderr());
            }
        });
        bar
    }
}
