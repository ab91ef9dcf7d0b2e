//! A pull as the user sees it: a bar for each file under way and one for all, or plain lines where stderr is
//! no terminal.

use std::collections::BTreeMap;
use std::io::IsTerminal;
use std::sync::{Mutex, MutexGuard, PoisonError};

use indicatif::{HumanDuration, MultiProgress, ProgressBar, ProgressState, ProgressStyle};
use tileinfer::hub::{PlannedFile, Progress};

use crate::memory::readable;
use crate::voice::Voice;

/// Receives the events of one pull.
pub(crate) struct PullProgress {
    voice: Voice,
    bars: Option<MultiProgress>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    files: BTreeMap<String, Transfer>,
    total: Option<ProgressBar>,
}

/// A file of the pull; it gets its bar once it moves, so that a model of a hundred files shows only those under way.
struct Transfer {
    size: Option<u64>,
    position: u64,
    bar: Option<ProgressBar>,
}

impl PullProgress {
    pub(crate) fn new(voice: &Voice) -> Self {
        let with_bars = !voice.is_quiet() && std::io::stderr().is_terminal();
        PullProgress {
            voice: *voice,
            bars: with_bars.then(MultiProgress::new),
            state: Mutex::default(),
        }
    }

    fn state(&self) -> MutexGuard<'_, State> {
        // The counts of a thread that panicked are as good as any.
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A line above the bars.
    fn line(&self, text: &str) {
        match &self.bars {
            // Without a terminal to write to there is nobody to tell that either.
            Some(bars) => bars.println(text).unwrap_or_default(),
            None => self.voice.note(text),
        }
    }
}

impl State {
    fn update_total(&self) {
        if let Some(total) = &self.total {
            total.set_position(self.files.values().map(|file| file.position).sum());
        }
    }
}

impl Progress for PullProgress {
    fn planned(&self, files: &[PlannedFile]) {
        let mut state = self.state();
        for file in files {
            if self.bars.is_none() {
                let size = file.size.map(readable);
                let size = size.unwrap_or_else(|| "unknown size".to_owned());
                let have = match file.have {
                    0 => String::new(),
                    have => format!(", {} of it are here", readable(have)),
                };
                self.line(&format!("downloading {} ({size}{have})", file.path));
            }
            let transfer = Transfer {
                size: file.size,
                position: file.have,
                bar: None,
            };
            state.files.insert(file.path.clone(), transfer);
        }
        if let Some(bars) = &self.bars {
            let total = state
                .total
                .get_or_insert_with(|| bars.add(bar("total", "{wide_bar}")))
                .clone();
            let sizes = state.files.values().filter_map(|file| file.size);
            total.set_length(sizes.sum());
        }
        state.update_total();
    }

    fn advanced(&self, path: &str, position: u64) {
        let mut state = self.state();
        let Some(file) = state.files.get_mut(path) else {
            return;
        };
        file.position = position;
        if let Some(bars) = &self.bars {
            let bar = file.bar.get_or_insert_with(|| {
                let bar = bars.insert(0, bar(path, "{wide_bar}"));
                bar.set_length(file.size.unwrap_or(0));
                bar
            });
            bar.set_position(position);
        }
        state.update_total();
    }

    fn finished(&self, path: &str) {
        let mut state = self.state();
        let Some(file) = state.files.get_mut(path) else {
            return;
        };
        file.position = file.size.unwrap_or(file.position);
        if let Some(bar) = file.bar.take() {
            bar.finish_and_clear();
        }
        let size = readable(file.position);
        state.update_total();
        let all = state
            .files
            .values()
            .all(|file| file.size == Some(file.position));
        if let (true, Some(total)) = (all, &state.total) {
            total.finish_and_clear();
            state.total = None;
        }
        drop(state);
        self.line(&format!("{path} is here ({size})"));
    }

    fn note(&self, message: &str) {
        self.line(message);
    }
}

fn bar(name: &str, shape: &str) -> ProgressBar {
    let template = format!(
        "{{prefix:28!}} {shape} {{decimal_bytes:>9}} of {{decimal_total_bytes:9}} {{decimal_bytes_per_sec:>11}} {{left:>4}}"
    );
    let bar = ProgressBar::new(0).with_prefix(name.to_owned());
    match ProgressStyle::with_template(&template) {
        Ok(style) => bar.with_style(style.with_key("left", time_left).progress_chars("=> ")),
        Err(_) => bar,
    }
}

/// How long it will take, once there is anything to tell it from.
fn time_left(state: &ProgressState, out: &mut dyn std::fmt::Write) {
    if state.pos() > 0 && state.per_sec() > 0.0 {
        // What cannot be shown is not worth an error.
        let _ = write!(out, "{:#}", HumanDuration(state.eta()));
    }
}
