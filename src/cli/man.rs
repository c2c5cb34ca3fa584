//! `deltafin man`.

use std::fs;
use std::path::{Path, PathBuf};

use clap::{Command, CommandFactory};
use clap_mangen::Man;

use super::args::Shown;
use super::{Cli, output};
use crate::error::{Error, Result};

/// Flags of `man`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  deltafin man | man -l -
  deltafin man run | man -l -
  deltafin man --dir ~/.local/share/man/man1")]
pub struct ManArgs {
    /// Command whose page goes to standard output; without one the main page
    ///
    /// What holds a slash is a directory, as with --dir.
    #[arg(value_name = "COMMAND")]
    command: Option<PathBuf>,
    /// Write one page a command to this directory, which is made where it is not there
    #[arg(long, value_name = "DIR", conflicts_with = "command")]
    dir: Option<PathBuf>,
}

pub(super) fn run(args: &ManArgs, shown: &Shown) -> Result<()> {
    let mut main = Cli::command();
    main.build();
    let is_path = |word: &&PathBuf| word.to_string_lossy().contains('/');
    if let Some(directory) = args.dir.as_ref().or(args.command.as_ref().filter(is_path)) {
        let pages = write_all(main, directory)?;
        if !shown.quiet {
            output::stderr(format_args!("{pages} pages written to {}", directory.display()));
        }
        return Ok(());
    }
    let page = match &args.command {
        Some(name) => {
            let named = pages(&main).find(|subcommand| name.as_os_str() == subcommand.get_name());
            page(with_hyphen(named.ok_or_else(|| unknown(&main, name))?))
        }
        None => page(main),
    };
    output::stdout(&page).map(|_| ())
}

fn unknown(main: &Command, name: &Path) -> Error {
    let names: Vec<&str> = pages(main).map(Command::get_name).collect();
    Error::usage(format!("no command {}: expected one of {}", name.display(), names.join(", ")))
        .hint(format!("a directory is given with --dir {}", name.display()))
}

/// The subcommands that have a page.
fn pages(main: &Command) -> impl Iterator<Item = &Command> {
    main.get_subcommands().filter(|subcommand| subcommand.get_name() != "help")
}

/// Help refers to pages by the name with a hyphen, synopses show the command line.
fn with_hyphen(subcommand: &Command) -> Command {
    subcommand.clone().display_name(format!("deltafin-{}", subcommand.get_name()))
}

/// Writes all pages; gives their number.
fn write_all(main: Command, directory: &Path) -> Result<usize> {
    let write = |command: Command| {
        let name = command.get_display_name().unwrap_or_else(|| command.get_name()).to_owned();
        let file = directory.join(format!("{name}.1"));
        fs::write(&file, page(command)).map_err(|error| Error::io(format!("cannot write {}: {error}", file.display())))
    };
    fs::create_dir_all(directory)
        .map_err(|error| Error::io(format!("cannot make the directory {}: {error}", directory.display())))?;
    let subcommands: Vec<Command> = pages(&main).map(with_hyphen).collect();
    let count = subcommands.len() + 1;
    subcommands.into_iter().chain([main]).try_for_each(write)?;
    Ok(count)
}

fn page(command: Command) -> Vec<u8> {
    let mut page = Vec::new();
    Man::new(command).render(&mut page).expect("memory takes all that is written");
    page
}
