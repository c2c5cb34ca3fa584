//! `deltafin inspect`: what a directory is, what running it takes, and what stands in the way.

mod copies;
mod findings;
mod show;
mod speed;

use std::path::PathBuf;

use clap::ValueEnum;

use super::args::{self, EngineArgs, Shown};
use super::output;
use crate::config::ModelConfig;
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::report::progress::Reporter;
use findings::{Findings, Reading};

/// Tokens to plan for when `--context` does not say.
const CONTEXT: usize = 4096;

/// Flags of `inspect`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  deltafin inspect -m ~/models/Kimi-K3
  deltafin inspect -m ~/models/Kimi-K3 --memory 96GiB --context 32768
  deltafin inspect -m demo --output json
  deltafin inspect -m ~/models/Kimi-K3 --experts /mnt/a/k3 /mnt/b/k3 --verify

Reads headers and one page of each drive, with --verify every byte; loads nothing. Exit code 3: the directory cannot be \
run, and the message lists what is missing or damaged. 5: it would not fit in memory.")]
pub struct InspectArgs {
    /// Model directory, or `demo` for the embedded model
    #[arg(short, long, value_name = "DIR")]
    model: PathBuf,
    /// Form of the report
    #[arg(long, value_name = "FORM", default_value = "text")]
    output: Form,
    /// Read every byte of the shards and of the --experts roots, and compare checksums
    #[arg(long)]
    verify: bool,
    #[command(flatten)]
    engine: EngineArgs,
}

/// `--output`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// For people
    Text,
    /// One JSON object
    Json,
}

pub(super) fn run(args: &InspectArgs, shown: &Shown, interrupt: &Interrupt) -> Result<()> {
    let directory = args::model_dir(&args.model)?;
    let config = ModelConfig::load(&directory)?;
    let context = args.engine.context.unwrap_or(CONTEXT.min(config.max_position_embeddings));
    let options = args.engine.options(directory, context, None)?;
    let reporter = Reporter::new(shown);
    let mut progress = |done, total| reporter.working("reading", done, total);
    let reading = args.verify.then_some(Reading { progress: &mut progress, interrupt });
    let (findings, obstacles) = Findings::of(&options, config, reading)
        .map_err(|error| if shown.verbose > 0 { error } else { error.shortened(show::SHARDS_SHOWN) })?;
    reporter.finish();
    let report = match args.output {
        Form::Text => show::text(&findings, shown.verbose > 0),
        Form::Json => show::json(&findings),
    };
    let written = output::stdout(report.as_bytes())?;
    match first_by_weight(obstacles) {
        Some(error) if written == output::Written::Yes => Err(error),
        _ => Ok(()),
    }
}

/// The obstacle that decides the exit code: what is damaged before what does not fit.
fn first_by_weight(obstacles: Vec<Error>) -> Option<Error> {
    obstacles.into_iter().min_by_key(|error| match error.kind() {
        Kind::Model => 0,
        Kind::Io => 1,
        _ => 2,
    })
}
