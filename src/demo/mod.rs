//! The embedded small model: its files in the binary, unpacked once into the user's cache directory.
//!
//! Every start compares the copy with what is embedded, so that a damaged or half-made one is never run.

mod unpack;

use std::env;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::{Error, Result};
use crate::user_cache;

/// A file of the model, by its name in the directory.
struct Embedded {
    name: &'static str,
    bytes: &'static [u8],
}

macro_rules! embedded {
    ($($name:literal),* $(,)?) => {
        [$(Embedded { name: $name, bytes: include_bytes!(concat!("../../assets/demo-model/", $name)) }),*]
    };
}

static FILES: [Embedded; 6] = embedded![
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tiktoken.model",
    "tokenizer.json",
    "tokenizer_config.json",
];

static LOOKED_AT: AtomicU64 = AtomicU64::new(0);

/// Prompts that the model was trained for: stories to go on with, then things to ask it in a chat.
pub const STORIES: [&str; 3] = ["Once upon a time", "There once was a", "This is the story of"];
/// See [`STORIES`].
pub const QUESTIONS: [&str; 4] = [
    "Write a story about a dinosaur.",
    "We bought paper for 120 and pens for 45. What is the total?",
    "What is a profit?",
    "Who are you?",
];

/// The directory that holds the unpacked model; unpacks it when it is not there whole.
///
/// # Errors
/// Kind `Io` when no place can be written.
pub fn unpack() -> Result<PathBuf> {
    unpack_noting(|_| {})
}

/// As [`unpack`]; `note` is told why the model lies among the temporary files, where the user's cache directory cannot
/// be had.
///
/// # Errors
/// As [`unpack`].
pub fn unpack_noting(note: impl FnOnce(&str)) -> Result<PathBuf> {
    LOOKED_AT.store(FILES.iter().map(|file| file.bytes.len() as u64).sum(), Ordering::Relaxed);
    let name = unpack::directory_name(&FILES);
    let mut refused = Vec::new();
    for parent in parents() {
        match unpack::into(&parent.join(&name), &FILES) {
            Ok(directory) => {
                if let [refused, ..] = refused.as_slice() {
                    note(&format!("the demo model is in {}: {refused}", directory.display()));
                }
                return Ok(directory);
            }
            Err(error) => refused.push(format!("{}: {error}", parent.display())),
        }
    }
    Err(Error::io(format!("cannot unpack the demo model: {}", refused.join("; ")))
        .hint("set XDG_CACHE_HOME or TMPDIR to a directory that can be written"))
}

/// Bytes of this program's file that [`unpack`] has brought into memory, where they stay beside what is read from the
/// directory: 0 in a process that never called it.
pub fn looked_at_bytes() -> u64 {
    LOOKED_AT.load(Ordering::Relaxed)
}

/// Where the model may be unpacked, best first.
fn parents() -> impl Iterator<Item = PathBuf> {
    user_cache::directory().into_iter().chain([env::temp_dir().join("deltafin")])
}
