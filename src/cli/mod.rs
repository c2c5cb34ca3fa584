//! Commands: flags in, engine calls, data out. A file a subcommand; nothing below this module sees clap.
//! What could be piped goes to stdout, everything else to stderr.

pub mod args;
mod bench;
mod completions;
mod demo;
mod inspect;
mod logits;
mod man;
pub mod output;
mod prompt;
mod run;
mod synth;
mod tokenize;

use clap::{Parser, Subcommand};

use crate::engine::{Engine, EngineOptions};
use crate::error::Result;
use crate::interrupt::Interrupt;

/// The version, with the commit it was built from.
const VERSION: &str = concat!(env!("CARGO_PKG_VERSION"), " (", env!("DELTAFIN_COMMIT_SHORT"), ")");

/// Run Kimi K3, whole and unaltered, on this machine
#[derive(Debug, Parser)]
#[command(name = "deltafin", version = VERSION, max_term_width = 100, infer_subcommands = false)]
pub struct Cli {
    /// What to do
    #[command(subcommand)]
    pub command: Command,
    /// Flags that every command takes
    #[command(flatten)]
    pub shown: args::Shown,
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
        Command::Inspect(args) => inspect::run(args, &cli.shown),
        Command::Tokenize(args) => tokenize::run(args, &cli.shown, interrupt),
        Command::Synth(args) => synth::run(args, &cli.shown, interrupt),
        Command::Completions(args) => completions::run(args),
        Command::Man(args) => man::run(args),
    }
}

/// The memory plan on stderr with `-v`, before anything is loaded.
fn show_plan(options: &EngineOptions, shown: &args::Shown) -> Result<()> {
    if shown.verbose > 0 {
        output::stderr(format_args!("memory plan\n{}", Engine::survey(options)?.plan));
    }
    Ok(())
}
