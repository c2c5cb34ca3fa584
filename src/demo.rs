//! The embedded small model: its files in the binary, unpacked once into the user's cache directory.

use std::path::PathBuf;

use crate::error::Result;

/// The directory that holds the unpacked model; unpacks it when it is not there whole.
///
/// # Errors
/// Kind `Io` when no place can be written.
pub fn unpack() -> Result<PathBuf> {
    todo!()
}
