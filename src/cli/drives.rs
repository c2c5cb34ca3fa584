//! `deltafin drives`: what drives deliver, measured or on paper.

mod measure;
mod simulate;

use clap::ValueEnum;
use serde_json::json;

use self::measure::MeasureArgs;
use self::simulate::SimulateArgs;
use super::args::Shown;
use super::output;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;

/// Flags of `drives`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Each root is read alone (one after the other, then anywhere, with 1 to 32 readers), then all together, the fastest first and
one more added each time. Nothing is changed on a drive; where there are no large files to read, one is made and removed.

With --simulate nothing is read: the engine's scheduling, cache and lookahead run over drives of the given rates, with a
clock of their own. `of the sum` is the share of the drives' rates that was used while there was something to read.

Examples:
  deltafin drives /models/k3
  deltafin drives /mnt/a /mnt/b /mnt/c --plot drives.svg
  deltafin drives /mnt/a /mnt/b --seconds 10 --output json
  deltafin drives --simulate 13.6,7.1,7.1,5.7 --cache-share 0.04
  deltafin drives --simulate 13.6,7.1,7.1,5.7 --in-turn")]
pub struct DrivesArgs {
    #[command(flatten)]
    measure: MeasureArgs,
    #[command(flatten)]
    simulate: SimulateArgs,
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
    let text = if !args.simulate.simulate.is_empty() {
        let ladder = simulate::run(&args.simulate)?;
        match args.output {
            Form::Table => simulate::table(&args.simulate, &ladder),
            Form::Json => format!("{}\n", json!({ "ladder": ladder })),
        }
    } else if args.measure.roots.is_empty() {
        return Err(
            Error::usage("no directory to measure").hint("give one on each drive, or rates on paper with --simulate")
        );
    } else {
        let report = measure::run(&args.measure, shown, interrupt)?;
        match args.output {
            Form::Table => measure::table(&report),
            Form::Json => format!("{}\n", json!(report)),
        }
    };
    // A reader that has gone away has seen what it wanted.
    output::stdout(text.as_bytes()).map(drop)
}
