//! `deltafin drives`: what drives deliver, measured.

mod measure;

use clap::ValueEnum;
use serde_json::json;

use self::measure::MeasureArgs;
use super::args::Shown;
use super::output;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;

/// Flags of `drives`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Each root is read alone (one after the other, then anywhere, with 1 to 32 readers), then all together, the fastest first and
one more added each time. Nothing is changed on a drive; where there are no large files to read, one is made and removed.

Examples:
  deltafin drives /models/k3
  deltafin drives /mnt/a /mnt/b /mnt/c --plot drives.svg
  deltafin drives /mnt/a /mnt/b --seconds 10 --output json")]
pub struct DrivesArgs {
    #[command(flatten)]
    measure: MeasureArgs,
    /// Form of the report
    #[arg(long, value_name = "FORM", default_value = "table")]
    output: Form,
}

/// `--output`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// For people
    Table,
    /// One JSON object
    Json,
}

/// Measures and prints.
///
/// # Errors
/// As measuring and printing report.
pub(super) fn run(args: &DrivesArgs, shown: &Shown, interrupt: &Interrupt) -> Result<()> {
    if args.measure.roots.is_empty() {
        return Err(Error::usage("no directory to measure").hint("give one on each drive"));
    }
    let report = measure::run(&args.measure, shown, interrupt)?;
    let text = match args.output {
        Form::Table => measure::table(&report),
        Form::Json => format!("{}\n", json!(report)),
    };
    // A reader that has gone away has seen what it wanted.
    output::stdout(text.as_bytes()).map(drop)
}
