//! Text to ids and back, chat rendering and parsing, stop ids, incremental UTF-8.

use std::path::Path;

use crate::error::Result;

/// Whether spellings of control tokens in a text become control tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// Everything is ordinary text.
    Ordinary,
    /// Spellings become their single id.
    Control,
}

/// A model's tokenizer, from `tiktoken.model` or `tokenizer.json`.
pub struct Tokenizer;

#[expect(unused_variables, reason = "signatures")]
impl Tokenizer {
    /// From a model directory: `tiktoken.model` (with names from `tokenizer_config.json`, when there), else
    /// `tokenizer.json`. `vocab_size` (from `config.json`) bounds the ids.
    ///
    /// # Errors
    /// Kind `Model`: neither file there, or damaged.
    pub fn from_dir(dir: &Path, vocab_size: Option<usize>) -> Result<Self> {
        todo!()
    }

    /// From one file, either kind.
    ///
    /// # Errors
    /// As [`Tokenizer::from_dir`].
    pub fn from_file(file: &Path) -> Result<Self> {
        todo!()
    }

    /// Ids of `text`; no BOS, no EOS.
    pub fn encode(&self, text: &str, specials: Specials) -> Vec<u32> {
        todo!()
    }

    /// Bytes of one id; control tokens give their spelling.
    ///
    /// # Errors
    /// Kind `Usage` for an id outside the vocabulary.
    pub fn bytes(&self, id: u32) -> Result<&[u8]> {
        todo!()
    }

    /// The id of a control token's spelling.
    pub fn control_id(&self, spelling: &str) -> Option<u32> {
        todo!()
    }

    /// Whether `id` is a control token: not shown in answers.
    pub fn is_control(&self, id: u32) -> bool {
        todo!()
    }

    /// Number of ids.
    pub fn vocab_size(&self) -> usize {
        todo!()
    }
}
