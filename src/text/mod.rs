//! Text to ids and back, chat rendering and parsing, stop ids, incremental UTF-8.

mod bpe;
pub mod chat;
mod classes;
mod cuts;
mod files;
mod hf;
mod input;
mod scanner;
mod spellings;
mod stop_ids;
mod stop_strings;
mod tiktoken;
mod tokenizer;
mod tokenizer_config;
mod tokens;
mod utf8;

pub use input::normalize_input;
pub use scanner::{Pieces, pieces};
pub use stop_ids::{StopIds, stop_ids};
pub use stop_strings::{StopStep, StopStrings};
pub use tokenizer::{Specials, Tokenizer};
pub use utf8::Utf8Stream;
