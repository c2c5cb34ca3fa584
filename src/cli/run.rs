//! `deltafin run`.

use super::args::Shown;
use crate::error::Result;
use crate::interrupt::Interrupt;

/// Flags of `run`.
#[derive(Debug, clap::Args)]
pub struct RunArgs {}

pub(super) fn run(_args: &RunArgs, _shown: &Shown, _interrupt: &Interrupt) -> Result<()> {
    todo!()
}
