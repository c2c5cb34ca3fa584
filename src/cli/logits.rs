//! `deltafin logits`.

use super::args::Shown;
use crate::error::Result;
use crate::interrupt::Interrupt;

/// Flags of `logits`.
#[derive(Debug, clap::Args)]
pub struct LogitsArgs {}

pub(super) fn run(_args: &LogitsArgs, _shown: &Shown, _interrupt: &Interrupt) -> Result<()> {
    todo!()
}
