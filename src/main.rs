//! Parse, dispatch, error, exit code.

use std::ffi::OsString;
use std::process::exit;

use clap::error::ErrorKind;
use deltafin::bug;
use deltafin::cli::{self, Cli, output};
use deltafin::error::{Error, Kind, Result};
use deltafin::interrupt::Interrupt;
use deltafin::signals;

fn main() {
    exit(bug::guard(|| main_of(std::env::args_os().collect())).into());
}

/// Returns the exit code.
fn main_of(line: Vec<OsString>) -> u8 {
    let cli = match Cli::parse_line(line) {
        Ok(cli) => cli,
        Err(error) => return show_usage(&error),
    };
    match run(&cli) {
        Ok(()) => 0,
        Err(error) => {
            show(&error, cli.shown.quiet);
            error.kind().exit_code()
        }
    }
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
fn show_usage(error: &clap::Error) -> u8 {
    let asked_for = matches!(error.kind(), ErrorKind::DisplayHelp | ErrorKind::DisplayVersion);
    let written = error.print();
    match (asked_for, written) {
        (false, _) => Kind::Usage.exit_code(),
        (true, Err(error)) if error.kind() != std::io::ErrorKind::BrokenPipe => {
            output::stderr(format_args!("deltafin: cannot write to standard output: {error}"));
            Kind::Io.exit_code()
        }
        (true, _) => 0,
    }
}
