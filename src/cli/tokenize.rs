//! `deltafin tokenize`.

use crate::error::Result;

/// Flags of `tokenize`.
#[derive(Debug, clap::Args)]
pub struct TokenizeArgs {}

pub(super) fn run(_args: &TokenizeArgs) -> Result<()> {
    todo!()
}
