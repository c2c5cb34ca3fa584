//! `deltafin completions`.

use clap::CommandFactory;
use clap_complete::{Shell, generate};

use super::{Cli, output};
use crate::error::Result;

/// Flags of `completions`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Examples:
  deltafin completions bash >~/.local/share/bash-completion/completions/deltafin
  deltafin completions zsh >~/.zfunc/_deltafin
  deltafin completions fish >~/.config/fish/completions/deltafin.fish")]
pub struct CompletionsArgs {
    /// Shell to complete in
    shell: Shell,
}

pub(super) fn run(args: &CompletionsArgs) -> Result<()> {
    let mut script = Vec::new();
    generate(args.shell, &mut Cli::command(), "deltafin", &mut script);
    output::stdout(&script).map(|_| ())
}
