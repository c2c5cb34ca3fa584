//! `deltafin completions`.

use crate::error::Result;

/// Flags of `completions`.
#[derive(Debug, clap::Args)]
pub struct CompletionsArgs {}

pub(super) fn run(_args: &CompletionsArgs) -> Result<()> {
    todo!()
}
