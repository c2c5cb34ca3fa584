//! `tokenizer.json`: byte pair encoding through the `tokenizers` crate.
//!
//! The crate does normalizing, splitting and merging. Added tokens are found here instead: the crate renumbers them
//! when their ids have gaps, and always takes control spellings in a text for control tokens. Kimi's split pattern is
//! recognised and run by the linear scanner, with the official tokenizer's cuts.

use std::path::Path;

use serde_json::{Map, Value};
use tokenizers::models::bpe::BPE;
use tokenizers::{
    Model, NormalizedString, Normalizer, NormalizerWrapper, OffsetReferential, OffsetType, PreTokenizedString,
    PreTokenizer, PreTokenizerWrapper,
};

use super::files::read_json;
use super::scanner::pieces;
use super::tokenizer::Added;
use super::tokens::TokenTable;
use crate::error::{Error, Result};

/// Far above any vocabulary; an id past it is damage.
const IDS_MAX: usize = 1 << 24;

/// The split pattern of K3's tokenizer, as converters write it.
const KIMI_PATTERN: &str = concat!(
    r"[\p{Han}]+",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*",
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)?",
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
);

/// A `tokenizer.json`, taken apart.
pub struct Json {
    /// Bytes of the model's vocabulary and of the added tokens.
    pub tokens: TokenTable,
    /// `added_tokens`.
    pub added: Vec<Added>,
    /// Text to ids.
    pub encoder: JsonEncoder,
}

/// How the vocabulary spells bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Spelling {
    /// GPT-2's character for each byte.
    ByteLevel,
    /// `▁` for a space and `<0xAB>` for a byte.
    Metaspace,
    /// As it is.
    Plain,
}

/// Reads `file`; ids must lie below `vocab_size`, when it is known.
///
/// # Errors
/// Kind `Model`, naming the file and the key: damaged, not BPE, or with parts that change the text's ids in a way that
/// is not supported.
pub fn load(file: &Path, vocab_size: Option<usize>) -> Result<Json> {
    let object = read_json(file)?;
    take_apart(object, vocab_size).map_err(|error| error.context(file.display()))
}

fn take_apart(mut object: Map<String, Value>, vocab_size: Option<usize>) -> Result<Json> {
    let ids_max = vocab_size.unwrap_or(IDS_MAX).min(IDS_MAX);
    let added = added_tokens(object.get("added_tokens"), ids_max)?;
    let spelling = spelling(&object)?;
    let kimi = is_kimi(&object);
    let part = |value: Option<Value>| value.filter(|value| !value.is_null());
    let normalizer: Option<NormalizerWrapper> = part(object.remove("normalizer"))
        .map(serde_json::from_value)
        .transpose()
        .map_err(|error| Error::model(format!("normalizer: {error}")))?;
    let pre_tokenizer: Option<PreTokenizerWrapper> = part(object.remove("pre_tokenizer"))
        .map(serde_json::from_value)
        .transpose()
        .map_err(|error| Error::model(format!("pre_tokenizer: {error}")))?;
    let Some(Value::Object(mut model)) = object.remove("model") else {
        return Err(Error::model("model: expected an object"));
    };
    check_model(&model)?;
    let tokens = vocabulary(&model, spelling, &added, ids_max)?;
    model.remove("type");
    let bpe: BPE =
        serde_json::from_value(Value::Object(model)).map_err(|error| Error::model(format!("model: {error}")))?;
    if let Some(unk) = bpe.get_unk_token().as_ref().filter(|unk| bpe.token_to_id(unk).is_none()) {
        return Err(Error::model(format!("model.unk_token: `{unk}` is not in the vocabulary")));
    }
    let chars = byte_chars();
    if let (Spelling::ByteLevel, Some(byte)) =
        (spelling, (0..256).find(|byte| bpe.token_to_id(&chars[*byte].to_string()).is_none()))
    {
        return Err(Error::model(format!("model.vocab: no token for the single byte {byte:#04x}: expected all 256")));
    }
    Ok(Json { tokens, added, encoder: JsonEncoder { normalizer, pre_tokenizer, bpe, kimi, chars } })
}

fn added_tokens(value: Option<&Value>, ids_max: usize) -> Result<Vec<Added>> {
    let entries = match value {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Array(entries)) => entries,
        Some(_) => return Err(Error::model("added_tokens: expected a list")),
    };
    let mut added: Vec<Added> = Vec::with_capacity(entries.len());
    for (at, entry) in entries.iter().enumerate() {
        let id = entry.get("id").and_then(Value::as_u64);
        let content = entry.get("content").and_then(Value::as_str).filter(|content| !content.is_empty());
        let (Some(id), Some(content)) = (id, content) else {
            return Err(Error::model(format!("added_tokens[{at}]: expected `id` and `content`")));
        };
        if id >= ids_max as u64 {
            return Err(Error::model(format!("`{content}` has id {id}, outside the vocabulary of {ids_max} ids")));
        }
        let special = entry.get("special").and_then(Value::as_bool).unwrap_or(false);
        // Markers are structure even where a file calls them not special, as K3's are.
        let control = special || (content.starts_with("<|") && content.ends_with("|>"));
        added.push(Added { id: id as u32, spelling: content.to_owned(), control, skipped: special });
    }
    added.sort_by_key(|token| token.id);
    if let Some(pair) = added.windows(2).find(|pair| pair[0].id == pair[1].id) {
        return Err(Error::model(format!("added_tokens: id {} is given twice", pair[0].id)));
    }
    Ok(added)
}

fn check_model(model: &Map<String, Value>) -> Result<()> {
    // Files older than the key hold BPE when they hold merges.
    let kind = model.get("type").and_then(Value::as_str);
    if kind.is_some_and(|kind| kind != "BPE") || !model.contains_key("merges") {
        return Err(Error::model(format!(
            "model.type: expected BPE, found {}",
            kind.unwrap_or("a model without merges")
        )));
    }
    for key in ["continuing_subword_prefix", "end_of_word_suffix"] {
        if model.get(key).and_then(Value::as_str).is_some_and(|affix| !affix.is_empty()) {
            return Err(Error::model(format!("model.{key}: expected none")));
        }
    }
    match model.get("dropout") {
        None | Some(Value::Null) => Ok(()),
        Some(dropout) if dropout.as_f64() == Some(0.0) => Ok(()),
        Some(dropout) => Err(Error::model(format!("model.dropout: expected none, found {dropout}"))),
    }
}

fn vocabulary(model: &Map<String, Value>, spelling: Spelling, added: &[Added], ids_max: usize) -> Result<TokenTable> {
    let Some(Value::Object(vocab)) = model.get("vocab") else {
        return Err(Error::model("model.vocab: expected an object"));
    };
    let mut tokens = TokenTable::with_capacity(vocab.len(), vocab.len() * 8);
    for token in added {
        tokens.insert(token.id, token.spelling.as_bytes());
    }
    let bytes_of = byte_of_char(&byte_chars());
    for (token, id) in vocab {
        let id = id.as_u64().filter(|id| *id < ids_max as u64).ok_or_else(|| {
            Error::model(format!("model.vocab: `{token}` has id {id}, outside the vocabulary of {ids_max} ids"))
        })? as u32;
        let bytes = token_bytes(token, spelling, &bytes_of);
        let is_added = added.binary_search_by_key(&id, |token| token.id).is_ok_and(|at| added[at].spelling == *token);
        if !is_added && !tokens.insert(id, &bytes) {
            return Err(Error::model(format!("model.vocab: `{token}` has id {id}, which is another token's")));
        }
    }
    Ok(tokens)
}

fn token_bytes(token: &str, spelling: Spelling, byte_of: &[Option<u8>]) -> Vec<u8> {
    match spelling {
        Spelling::ByteLevel => {
            let bytes: Option<Vec<u8>> = token.chars().map(|c| *byte_of.get(c as usize)?).collect();
            bytes.unwrap_or_else(|| token.as_bytes().to_vec())
        }
        Spelling::Metaspace => {
            let hex = token.strip_prefix("<0x").and_then(|hex| hex.strip_suffix('>')).filter(|hex| hex.len() == 2);
            match hex.and_then(|hex| u8::from_str_radix(hex, 16).ok()) {
                Some(byte) => vec![byte],
                None => token.replace('▁', " ").into_bytes(),
            }
        }
        Spelling::Plain => token.as_bytes().to_vec(),
    }
}

/// The character that stands for each byte in a byte-level vocabulary: itself when printable, else the next of
/// U+0100, U+0101, …
fn byte_chars() -> [char; 256] {
    let mut next = 0x100u32;
    std::array::from_fn(|byte| {
        let printable = matches!(byte, 33..=126 | 161..=172 | 174..=255);
        let code_point = if printable {
            byte as u32
        } else {
            next += 1;
            next - 1
        };
        char::from_u32(code_point).expect("below the surrogates")
    })
}

fn byte_of_char(chars: &[char; 256]) -> Vec<Option<u8>> {
    let mut byte_of = vec![None; 0x200];
    for (byte, c) in (0..=255u8).zip(chars) {
        byte_of[*c as usize] = Some(byte);
    }
    byte_of
}

/// The `type`s of a normalizer, pre-tokenizer or decoder and of all parts of a sequence.
fn part_types<'v>(value: Option<&'v Value>, types: &mut Vec<&'v str>) {
    let Some(value) = value else { return };
    types.extend(value.get("type").and_then(Value::as_str));
    for key in ["normalizers", "pretokenizers", "decoders"] {
        for part in value.get(key).and_then(Value::as_array).into_iter().flatten() {
            part_types(Some(part), types);
        }
    }
}

fn spelling(object: &Map<String, Value>) -> Result<Spelling> {
    let mut types = Vec::new();
    part_types(object.get("normalizer"), &mut types);
    part_types(object.get("pre_tokenizer"), &mut types);
    if types.contains(&"ByteLevel") {
        return Ok(Spelling::ByteLevel);
    }
    types.clear();
    part_types(object.get("decoder"), &mut types);
    if let Some(kind) = types.iter().find(|kind| matches!(**kind, "WordPiece" | "CTC" | "BPEDecoder")) {
        return Err(Error::model(format!("decoder: expected ByteLevel or ByteFallback, found {kind}")));
    }
    let metaspace = types.iter().any(|kind| matches!(*kind, "ByteFallback" | "Metaspace" | "Replace"));
    Ok(if metaspace { Spelling::Metaspace } else { Spelling::Plain })
}

/// Whether text is split by Kimi's pattern and nothing else.
fn is_kimi(object: &Map<String, Value>) -> bool {
    let part = |key| object.get(key).filter(|value| !value.is_null());
    let steps = part("pre_tokenizer").and_then(|sequence| sequence.get("pretokenizers")).and_then(Value::as_array);
    let Some([split, bytes]) = steps.map(Vec::as_slice) else { return false };
    let is = |step: &Value, kind: &str| step.get("type").is_some_and(|found| found == kind);
    let flag = |step: &Value, key: &str| step.get(key).and_then(Value::as_bool);
    part("normalizer").is_none()
        && is(split, "Split")
        && split.pointer("/pattern/Regex").is_some_and(|pattern| pattern == KIMI_PATTERN)
        && split.get("behavior").is_some_and(|behavior| behavior == "Isolated")
        && flag(split, "invert") == Some(false)
        && is(bytes, "ByteLevel")
        && flag(bytes, "add_prefix_space") == Some(false)
        && flag(bytes, "use_regex") == Some(false)
}

/// Text to ids by the crate's parts.
pub struct JsonEncoder {
    normalizer: Option<NormalizerWrapper>,
    pre_tokenizer: Option<PreTokenizerWrapper>,
    bpe: BPE,
    kimi: bool,
    chars: [char; 256],
}

impl JsonEncoder {
    /// Whether the text is split by Kimi's pattern; then the official tokenizer's cuts belong to the ids.
    pub fn is_kimi(&self) -> bool {
        self.kimi
    }

    /// Appends the ids of `text`, in which added tokens are not looked for.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) {
        if !self.kimi {
            return self.encode_by_parts(text, ids);
        }
        let mut spelled = String::new();
        for piece in pieces(text) {
            spelled.clear();
            spelled.extend(piece.bytes().map(|byte| self.chars[usize::from(byte)]));
            self.push_ids(&spelled, ids);
        }
    }

    /// The crate's steps fail on a text only where a pattern exceeds its limits: halves of the text then stay within
    /// them, at the price of a cut.
    fn encode_by_parts(&self, text: &str, ids: &mut Vec<u32>) {
        if text.is_empty() {
            return;
        }
        match self.split(text) {
            Ok(split) => {
                for (piece, _, _) in split.get_splits(OffsetReferential::Normalized, OffsetType::Byte) {
                    self.push_ids(piece, ids);
                }
            }
            Err(_) => {
                let middle = (text.len() / 2..=text.len()).find(|at| text.is_char_boundary(*at)).unwrap_or(text.len());
                if middle < text.len() {
                    self.encode_by_parts(&text[..middle], ids);
                    self.encode_by_parts(&text[middle..], ids);
                }
            }
        }
    }

    fn split(&self, text: &str) -> tokenizers::Result<PreTokenizedString> {
        let mut normalized = NormalizedString::from(text);
        if let Some(normalizer) = &self.normalizer {
            normalizer.normalize(&mut normalized)?;
        }
        let mut split = PreTokenizedString::from(normalized);
        if let Some(pre_tokenizer) = &self.pre_tokenizer {
            pre_tokenizer.pre_tokenize(&mut split)?;
        }
        Ok(split)
    }

    fn push_ids(&self, piece: &str, ids: &mut Vec<u32>) {
        // The only failure is an unknown-token without an id, which `load` has excluded.
        if let Ok(tokens) = self.bpe.tokenize(piece) {
            ids.extend(tokens.iter().map(|token| token.id));
        }
    }
}
