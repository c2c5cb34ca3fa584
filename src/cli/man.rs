//! `deltafin man`.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use clap_mangen::Man;

use super::{Cli, output};
use crate::error::{Error, Result};

/// Flags of `man`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  deltafin man | man -l -
  deltafin man ~/.local/share/man/man1")]
pub struct ManArgs {
    /// Directory for one page a command; without it the main page goes to standard output
    #[arg(value_name = "DIR")]
    directory: Option<PathBuf>,
}

pub(super) fn run(args: &ManArgs) -> Result<()> {
    let mut command = Cli::command();
    command.build();
    match &args.directory {
        None => output::stdout(&page(command)).map(|_| ()),
        Some(directory) => write_all(command, directory),
    }
}

fn write_all(command: Command, directory: &Path) -> Result<()> {
    let write = |name: &str, command: Command| {
        let file = directory.join(format!("{name}.1"));
        fs::write(&file, page(command)).map_err(|error| Error::io(format!("cannot write {}: {error}", file.display())))
    };
    fs::create_dir_all(directory)
        .map_err(|error| Error::io(format!("cannot make the directory {}: {error}", directory.display())))?;
    for subcommand in command.get_subcommands().filter(|subcommand| subcommand.get_name() != "help") {
        let name = format!("deltafin-{}", subcommand.get_name());
        // Help refers to pages by the name with a hyphen, synopses show the command line.
        write(&name, subcommand.clone().display_name(name.clone()))?;
    }
    write("deltafin", command)
}

fn page(command: Command) -> Vec<u8> {
    let mut page = Vec::new();
    Man::new(command).render(&mut page).expect("memory takes all that is written");
    page
}
