//! The `tileinfer` command: verbs, and what they print. Model text and JSON go to stdout, all else to stderr.

mod answers;
mod args;
mod bench;
mod ceilings;
mod chat;
mod doctor;
mod eval;
mod files;
#[cfg(feature = "cuda")]
mod gpu;
mod inventory;
mod manual;
mod memory;
mod models;
mod open;
mod plan;
mod pulling;
mod quantize;
mod run;
mod serve;
mod show;
mod speculate;
mod tokenize;
mod voice;

use std::process::ExitCode;
use std::time::Instant;

use clap::Parser;

use args::{Cli, Verb};

fn main() -> ExitCode {
    let start = Instant::now();
    let cli = Cli::parse();
    #[cfg(unix)]
    if let Err(error) = tileinfer::weights::exit_on_lost_pages() {
        tracing::debug!(%error, "a weight file that is cut short will end this process without a word");
    }
    let result = match &cli.verb {
        Verb::Run(args) => run::run(args, start),
        Verb::Pull(args) => inventory::pull(args),
        Verb::List(args) => inventory::list(args),
        Verb::Rm(args) => inventory::rm(args),
        Verb::Show(args) => show::show(args),
        Verb::Plan(args) => plan::plan(args),
        Verb::Doctor(args) => doctor::doctor(args),
        Verb::Serve(args) => serve::serve(args),
        Verb::Tokenize(args) => tokenize::tokenize(args),
        Verb::Eval(args) => eval::eval(args),
        Verb::Quantize(args) => quantize::quantize(args),
        Verb::Bench(args) => bench::bench(args),
        Verb::Completions(args) => manual::completions(args),
        Verb::Man(args) => manual::man(args),
    };
    match result {
        Ok(()) => ExitCode::SUCCESS,
        // Whoever read our output has seen enough.
        Err(error) if is_closed_pipe(&error) => ExitCode::SUCCESS,
        Err(error) => {
            voice::say(format_args!("tileinfer: {error:#}"));
            ExitCode::from(if error.is::<WrongUsage>() { 2 } else { 1 })
        }
    }
}

/// The command line asks for something that makes no sense: exit code 2.
#[derive(Debug)]
struct WrongUsage(String);

/// A [`WrongUsage`].
fn usage(reason: impl std::fmt::Display) -> anyhow::Error {
    WrongUsage(reason.to_string()).into()
}

impl std::fmt::Display for WrongUsage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}

fn is_closed_pipe(error: &anyhow::Error) -> bool {
    error
        .chain()
        .filter_map(|cause| cause.downcast_ref::<std::io::Error>())
        .any(|error| error.kind() == std::io::ErrorKind::BrokenPipe)
}
