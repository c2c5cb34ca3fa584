//! `deltafin man`.

use crate::error::Result;

/// Flags of `man`.
#[derive(Debug, clap::Args)]
pub struct ManArgs {}

pub(super) fn run(_args: &ManArgs) -> Result<()> {
    todo!()
}
