//! A model's tokenizer: text to ids, and ids to bytes, whichever file it came from.

use std::fmt;
use std::path::{Path, PathBuf};

use super::bpe::{RankIndex, Scratch};
use super::cuts::{CHUNK_CHARS, cut};
use super::hf::{self, JsonEncoder};
use super::scanner::pieces;
use super::spellings::Spellings;
use super::tiktoken;
use super::tokens::TokenTable;
use crate::error::{Error, Result};

const TIKTOKEN: &str = "tiktoken.model";
const JSON: &str = "tokenizer.json";

/// Whether spellings of control tokens in a text become control tokens.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Specials {
    /// Everything is ordinary text.
    Ordinary,
    /// Spellings become their single id.
    Control,
}

/// A token that text reaches by its spelling rather than by merging.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Added {
    pub id: u32,
    pub spelling: String,
    /// Structure rather than text: encoded only on request, never shown.
    pub control: bool,
    /// Left out by `skip_special`.
    pub skipped: bool,
}

enum Encoder {
    Ranks(RankIndex),
    Json(Box<JsonEncoder>),
}

/// A model's tokenizer, from `tiktoken.model` or `tokenizer.json`.
///
/// It never adds a token of its own: no BOS, no EOS.
pub struct Tokenizer {
    file: PathBuf,
    tokens: TokenTable,
    encoder: Encoder,
    /// All added tokens.
    added: Spellings,
    /// Those that ordinary text reaches too.
    added_text: Spellings,
    /// Flags of ids from `flags_start` on: control, skipped. Ids below have neither.
    flags: Vec<(bool, bool)>,
    flags_start: u32,
    vocab_size: usize,
}

impl fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Tokenizer({}, {} ids)", self.file.display(), self.vocab_size)
    }
}

impl Tokenizer {
    /// From a model directory: `tiktoken.model` (with names from `tokenizer_config.json`, when there), else
    /// `tokenizer.json`. `vocab_size` (from `config.json`) bounds the ids.
    ///
    /// # Errors
    /// Kind `Model`: neither file there, or damaged.
    pub fn from_dir(dir: &Path, vocab_size: Option<usize>) -> Result<Self> {
        let there = |name: &str| Some(dir.join(name)).filter(|file| file.symlink_metadata().is_ok());
        if let Some(file) = there(TIKTOKEN) {
            Self::from_ranks(&file, vocab_size)
        } else if let Some(file) = there(JSON) {
            Self::from_json(&file, vocab_size)
        } else {
            Err(Error::model(format!("{}: no tokenizer: neither {TIKTOKEN} nor {JSON} is there", dir.display()))
                .hint("download tiktoken.model from the model's repository, or give token ids instead of text"))
        }
    }

    /// From one file, either kind; what is in it decides, not its name.
    ///
    /// # Errors
    /// As [`Tokenizer::from_dir`].
    pub fn from_file(file: &Path) -> Result<Self> {
        let is_json = super::files::read(file)?.iter().find(|byte| !byte.is_ascii_whitespace()) == Some(&b'{');
        if is_json { Self::from_json(file, None) } else { Self::from_ranks(file, None) }
    }

    fn from_ranks(file: &Path, vocab_size: Option<usize>) -> Result<Self> {
        let ranks = tiktoken::load(file, vocab_size)?;
        Self::assemble(file, ranks.tokens, Encoder::Ranks(ranks.index), &ranks.slots, vocab_size)
    }

    fn from_json(file: &Path, vocab_size: Option<usize>) -> Result<Self> {
        let json = hf::load(file, vocab_size)?;
        Self::assemble(file, json.tokens, Encoder::Json(Box::new(json.encoder)), &json.added, vocab_size)
    }

    fn assemble(
        file: &Path,
        mut tokens: TokenTable,
        encoder: Encoder,
        added: &[Added],
        vocab_size: Option<usize>,
    ) -> Result<Self> {
        for token in added {
            if !tokens.insert(token.id, token.spelling.as_bytes())
                && tokens.get(token.id) != Some(token.spelling.as_bytes())
            {
                let (id, spelling) = (token.id, &token.spelling);
                return Err(Error::model(format!("{}: id {id} of `{spelling}` is another token", file.display())));
            }
        }
        let flags_start = added.iter().map(|token| token.id).min().unwrap_or(tokens.len() as u32);
        let mut flags = vec![(false, false); tokens.len() - flags_start as usize];
        for token in added {
            flags[(token.id - flags_start) as usize] = (token.control, token.skipped);
        }
        let spellings = |wanted: fn(&Added) -> bool| {
            Spellings::new(added.iter().filter(|token| wanted(token)).map(|token| (token.spelling.as_str(), token.id)))
        };
        Ok(Self {
            file: file.to_owned(),
            vocab_size: vocab_size.unwrap_or(tokens.len()),
            tokens,
            encoder,
            added: spellings(|_| true),
            added_text: spellings(|token| !token.control),
            flags,
            flags_start,
        })
    }

    /// Ids of `text`; no BOS, no EOS.
    pub fn encode(&self, text: &str, specials: Specials) -> Vec<u32> {
        let added = match specials {
            Specials::Ordinary => &self.added_text,
            Specials::Control => &self.added,
        };
        let chunk_chars = match &self.encoder {
            Encoder::Json(json) if !json.is_kimi() => usize::MAX,
            _ => CHUNK_CHARS,
        };
        let mut ids = Vec::with_capacity(text.len() / 3);
        let mut scratch = Scratch::default();
        for part in cut(text, chunk_chars) {
            let mut from = 0;
            while let Some((start, end, id)) = added.find(part, from) {
                self.encode_text(&part[from..start], &mut scratch, &mut ids);
                ids.push(id);
                from = end;
            }
            self.encode_text(&part[from..], &mut scratch, &mut ids);
        }
        ids
    }

    fn encode_text(&self, text: &str, scratch: &mut Scratch, ids: &mut Vec<u32>) {
        match &self.encoder {
            Encoder::Ranks(index) => {
                for piece in pieces(text) {
                    index.encode(&self.tokens, piece.as_bytes(), scratch, ids);
                }
            }
            Encoder::Json(json) => json.encode(text, ids),
        }
    }

    /// Bytes of one id; control tokens give their spelling. An id of the vocabulary that has no token (a padding row
    /// of the embedding) gives none.
    ///
    /// # Errors
    /// Kind `Usage` for an id outside the vocabulary.
    pub fn bytes(&self, id: u32) -> Result<&[u8]> {
        if id as usize >= self.vocab_size {
            let vocab_size = self.vocab_size;
            return Err(Error::usage(format!(
                "token id {id} is outside the vocabulary: expected 0 to {}",
                vocab_size - 1
            )));
        }
        Ok(self.tokens.get(id).unwrap_or_default())
    }

    /// Bytes of `ids`, joined. `skip_special` leaves out the tokens that the files call special.
    ///
    /// # Errors
    /// As [`Tokenizer::bytes`].
    pub fn decode_bytes(&self, ids: &[u32], skip_special: bool) -> Result<Vec<u8>> {
        let mut bytes = Vec::with_capacity(ids.len() * 4);
        for &id in ids {
            let token = self.bytes(id)?;
            if !(skip_special && self.flags(id).1) {
                bytes.extend_from_slice(token);
            }
        }
        Ok(bytes)
    }

    /// Text of `ids`: [`Tokenizer::decode_bytes`] with one U+FFFD for each maximal ill-formed subpart.
    ///
    /// # Errors
    /// As [`Tokenizer::bytes`].
    pub fn decode(&self, ids: &[u32], skip_special: bool) -> Result<String> {
        Ok(String::from_utf8_lossy(&self.decode_bytes(ids, skip_special)?).into_owned())
    }

    /// The id of a control token's spelling.
    pub fn control_id(&self, spelling: &str) -> Option<u32> {
        self.added.id(spelling).filter(|id| self.is_control(*id))
    }

    /// Whether `id` is a control token: not shown in answers. Ids without a token count as such.
    pub fn is_control(&self, id: u32) -> bool {
        self.flags(id).0
    }

    /// Number of ids.
    pub fn vocab_size(&self) -> usize {
        self.vocab_size
    }

    /// The file that the tokenizer was read from.
    pub fn file(&self) -> &Path {
        &self.file
    }

    fn flags(&self, id: u32) -> (bool, bool) {
        let no_token = (self.tokens.get(id).is_none(), false);
        match id.checked_sub(self.flags_start) {
            Some(at) => self.flags.get(at as usize).map_or(no_token, |flags| (flags.0 || no_token.0, flags.1)),
            None => no_token,
        }
    }
}
