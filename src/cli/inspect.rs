//! `deltafin inspect`.

use super::args::Shown;
use crate::error::Result;

/// Flags of `inspect`.
#[derive(Debug, clap::Args)]
pub struct InspectArgs {}

pub(super) fn run(_args: &InspectArgs, _shown: &Shown) -> Result<()> {
    todo!()
}
