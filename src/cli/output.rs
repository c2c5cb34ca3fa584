//! Writing to stdout: every piece flushed, a closed pipe ends the run quietly, a full disk is an I/O error.

use crate::error::Result;

/// What a write came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Written {
    /// It is out.
    Yes,
    /// Nobody reads any more: stop, with success.
    PipeClosed,
}

/// Writes `bytes` to stdout and flushes.
///
/// # Errors
/// Kind `Io` for anything but a closed pipe (`/dev/full`, a closed descriptor).
pub fn stdout(bytes: &[u8]) -> Result<Written> {
    let _ = bytes;
    todo!()
}
