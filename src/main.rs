//! Parse, dispatch, error, exit code.

use std::process::exit;

use clap::Parser;
use clap::error::ErrorKind;
use deltafin::cli::{self, Cli, output};
use deltafin::error::{Error, Kind, Result};
use deltafin::interrupt::Interrupt;
use deltafin::signals;

fn main() {
    let cli = Cli::try_parse().unwrap_or_else(|error| exit(show_usage(&error)));
    let quiet = cli.shown.quiet;
    let code = match run(&cli) {
        Ok(()) => 0,
        Err(error) => {
            show(&error, quiet);
            error.kind().exit_code()
        }
    };
    exit(code.into());
}

fn run(cli: &Cli) -> Result<()> {
    let interrupt = Interrupt::new();
    signals::install(&interrupt)?;
    cli::dispatch(cli, &interrupt)
}

fn show(error: &Error, quiet: bool) {
    let interrupted = matches!(error.kind(), Kind::Interrupted(_));
    if interrupted && quiet {
        return;
    }
    output::stderr(format_args!("deltafin: {error}"));
    if let Some(hint) = error.hint_text().filter(|_| !interrupted) {
        output::stderr(format_args!("hint: {hint}"));
    }
}

/// Help and version go to stdout and are no failure; whatever cannot be shown is dropped.
fn show_usage(error: &clap::Error) -> i32 {
    let asked_for = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    let written = error.print();
    match (asked_for, written) {
        (false, _) => Kind::Usage.exit_code().into(),
        (true, Err(error)) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            output::stderr(format_args!("deltafin: cannot write to standard output: {error}"));
            Kind::Io.exit_code().into()
        }
        (true, _) => 0,
    }
}
