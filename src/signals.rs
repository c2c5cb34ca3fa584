//! SIGINT and SIGTERM raise the interrupt; a second one ends the process at once.

use crate::error::Result;
use crate::interrupt::Interrupt;

/// Installs the handlers for the rest of the process.
///
/// # Errors
/// When the system refuses.
pub fn install(interrupt: &Interrupt) -> Result<()> {
    let _ = interrupt;
    todo!()
}
