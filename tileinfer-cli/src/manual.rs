//! `tileinfer completions` and `tileinfer man`: what a shell and `man` want to know, made from the flags themselves.

use std::io::Write;

use anyhow::{Context, Result};
use clap::{Command, CommandFactory};

use crate::args::{Cli, CompletionsArgs, ManArgs};
use crate::files;

pub(crate) fn completions(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    clap_complete::generate(args.shell, &mut Cli::command(), "tileinfer", &mut script);
    std::io::stdout().write_all(&script)?;
    Ok(())
}

pub(crate) fn man(args: &ManArgs) -> Result<()> {
    let mut command = Cli::command();
    command.build();
    let Some(dir) = &args.dir else {
        std::io::stdout().write_all(&page(command)?)?;
        return Ok(());
    };
    std::fs::create_dir_all(dir).with_context(|| format!("making {}", dir.display()))?;
    for verb in command
        .get_subcommands()
        .filter(|verb| verb.get_name() != "help")
    {
        let name = format!("tileinfer-{}", verb.get_name());
        // The name of a page is a static string to clap; a process writes a dozen of them.
        let verb = verb.clone().name(name.clone().leak() as &str);
        files::write_whole(&dir.join(format!("{name}.1")), &page(verb)?)?;
    }
    files::write_whole(&dir.join("tileinfer.1"), &page(command)?)
}

fn page(command: Command) -> Result<Vec<u8>> {
    let mut page = Vec::new();
    clap_mangen::Man::new(command).render(&mut page)?;
    Ok(page)
}
