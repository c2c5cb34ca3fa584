//! `deltafin demo`.

use super::args::Shown;
use crate::error::Result;
use crate::interrupt::Interrupt;

/// Flags of `demo`.
#[derive(Debug, clap::Args)]
pub struct DemoArgs {}

pub(super) fn run(_args: &DemoArgs, _shown: &Shown, _interrupt: &Interrupt) -> Result<()> {
    todo!()
}
