//! Commands: flags in, engine calls, data out. A file a subcommand; nothing below this module sees clap.
//! What could be piped goes to stdout, everything else to stderr.

pub mod args;
mod bench;
mod completions;
mod demo;
mod drives;
mod inspect;
mod logits;
mod man;
pub mod output;
mod pack;
mod prompt;
mod run;
mod synth;
mod tokenize;

use std::env;
use std::ffi::{OsStr, OsString};

use clap::{ColorChoice, CommandFactory, FromArgMatches, Parser, Subcommand};

use crate::engine::{Engine, EngineOptions, Survey};
use crate::error::Result;
use crate::interrupt::Interrupt;
use crate::learned::Kept;

/// Help is not wrapped to fewer columns, nor laid out on more.
const COLUMNS_MIN: usize = 20;
const COLUMNS_MAX: usize = 100;

/// The version, with the commit it was built from.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("DELTAFIN_COMMIT_SHORT"), ")");

/// Run Kimi K3, whole and unaltered, on this machine
#[derive(Debug, Parser)]
#[command(name = "deltafin", version = VERSION, max_term_width = COLUMNS_MAX, infer_subcommands = false)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
    /// Flags that every command takes
    #[command(flatten)]
    pub shown: args::Shown,
}

impl Cli {
    /// Parses a whole command line, the program's name included. What clap itself then has to say, help and errors,
    /// is coloured as `--color` asks wherever in the line it stands, for the line may be wrong.
    ///
    /// # Errors
    /// As clap reports; help and version are errors to it, too.
    pub fn parse_line(line: Vec<OsString>) -> Result<Self, clap::Error> {
        let color = match asked_color(&line) {
            Some("always") => ColorChoice::Always,
            Some("never") => ColorChoice::Never,
            // Clap's own rule is that of `--color auto`.
            _ => ColorChoice::Auto,
        };
        let mut command = Self::command().color(color);
        // What has no width says 0, and a line must hold a word.
        if let Some(0..COLUMNS_MIN) = env::var("COLUMNS").ok().and_then(|columns| columns.parse().ok()) {
            command = command.term_width(COLUMNS_MAX);
        }
        let matches = command.try_get_matches_from_mut(line)?;
        Self::from_arg_matches(&matches).map_err(|error| error.format(&mut command))
    }
}

/// The last `--color` of a command line.
fn asked_color(line: &[OsString]) -> Option<&str> {
    let words: Vec<&OsStr> = line.iter().map(OsString::as_os_str).take_while(|word| *word != "--").collect();
    (0..words.len()).rev().find_map(|at| match words[at].to_str()? {
        "--color" => words.get(at + 1)?.to_str(),
        word => word.strip_prefix("--color="),
    })
}

/// The subcommands.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Generate text from a prompt, files or stdin
    Run(run::RunArgs),
    /// Run the embedded small model through the whole path
    Demo(demo::DemoArgs),
    /// Measure prefill and decode speed, bytes read, and what the machine can do
    Bench(bench::BenchArgs),
    /// Logits or log-likelihood of given tokens or text
    Logits(logits::LogitsArgs),
    /// What a model directory is, what is missing, and the memory plan
    Inspect(inspect::InspectArgs),
    /// Text to token ids and back
    Tokenize(tokenize::TokenizeArgs),
    /// Write experts to one file each on drive roots, and the trunk to one file
    Pack(pack::PackArgs),
    /// Measure drives alone and together, and what tokens/s they allow
    Drives(drives::DrivesArgs),
    /// Make a synthetic checkpoint
    Synth(synth::SynthArgs),
    /// Shell completions to stdout
    Completions(completions::CompletionsArgs),
    /// Manual pages
    Man(man::ManArgs),
}

/// Runs the chosen command.
///
/// # Errors
/// What the command reports; the kind decides the exit code.
pub fn dispatch(cli: &Cli, interrupt: &Interrupt) -> Result<()> {
    match &cli.command {
        Command::Run(args) => run::run(args, &cli.shown, interrupt),
        Command::Demo(args) => demo::run(args, &cli.shown, interrupt),
        Command::Bench(args) => bench::run(args, &cli.shown, interrupt),
        Command::Logits(args) => logits::run(args, &cli.shown, interrupt),
        Command::Inspect(args) => inspect::run(args, &cli.shown, interrupt),
        Command::Tokenize(args) => tokenize::run(args, &cli.shown, interrupt),
        Command::Pack(args) => pack::run(args, &cli.shown, interrupt),
        Command::Drives(args) => drives::run(args, &cli.shown, interrupt),
        Command::Synth(args) => synth::run(args, &cli.shown, interrupt),
        Command::Completions(args) => completions::run(args),
        Command::Man(args) => man::run(args, &cli.shown),
    }
}

/// With `-v`: the memory plan and what earlier runs learned on stderr, before anything is loaded.
fn show_plan(options: &EngineOptions, shown: &args::Shown) -> Result<()> {
    if shown.verbose > 0 {
        let Survey { config, manifest, plan, .. } = Engine::survey(options)?;
        output::stderr(format_args!("memory plan\n{plan}"));
        if let Some(moe) = config.moe.filter(|_| options.learn) {
            let kept = Kept::load(&manifest).and_then(|kept| kept.make_folder().map(|()| kept));
            let line =
                kept.map_or_else(|error| format!("not kept: {error}"), |kept| kept.line(moe.num_experts_per_token));
            output::stderr(format_args!("expert use counts: {line}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Tables and examples are never wrapped to fewer columns than this.
    const TABLE_COLUMNS: usize = 80;

    #[test]
    fn what_closes_a_help_is_wrapped_once() {
        let command = Cli::command();
        for subcommand in command.get_subcommands() {
            let help = subcommand.get_after_long_help().map(ToString::to_string).unwrap_or_default();
            let lines: Vec<&str> = help.lines().collect();
            let is_text = |line: &str| !line.is_empty() && !line.starts_with(' ');
            for line in &lines {
                assert!(is_text(line) || line.chars().count() <= TABLE_COLUMNS, "{}: {line}", subcommand.get_name());
            }
            for two in lines.windows(2) {
                assert!(!two.iter().all(|line| is_text(line)), "{}: {two:?}", subcommand.get_name());
            }
        }
    }
}
