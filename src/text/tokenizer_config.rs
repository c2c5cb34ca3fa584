//! `tokenizer_config.json`: names of control slots, and the end token. The rest of the file is not used.

use std::path::{Path, PathBuf};

use serde_json::{Map, Value};

use super::files::read_json_if_there;
use crate::error::{Error, Result};

/// The file's name in a model directory.
pub const FILE_NAME: &str = "tokenizer_config.json";

/// An entry of `added_tokens_decoder`.
#[derive(Debug, Clone, PartialEq)]
pub struct NamedSlot {
    /// Token id.
    pub id: u32,
    /// Its spelling.
    pub content: String,
    /// Whether decoding may leave it out.
    pub special: bool,
}

/// What the tokenizer and the stop rules need of the file.
#[derive(Debug, Clone)]
pub struct TokenizerConfig {
    /// Where it was read.
    pub file: PathBuf,
    /// `added_tokens_decoder`, by ascending id.
    pub slots: Vec<NamedSlot>,
    /// Spelling of `eos_token`.
    pub eos_token: Option<String>,
}

impl TokenizerConfig {
    /// Reads `dir/tokenizer_config.json`; `None` when there is none.
    ///
    /// # Errors
    /// Kind `Model`, naming the file and the key: unreadable, not JSON, keys of the wrong type, one spelling or id twice.
    pub fn load(dir: &Path) -> Result<Option<Self>> {
        let file = dir.join(FILE_NAME);
        let Some(object) = read_json_if_there(&file)? else { return Ok(None) };
        let at_fault = |error: Error| error.context(file.display());
        let slots = slots(&object).map_err(at_fault)?;
        let eos_token = spelling(object.get("eos_token")).map_err(at_fault)?;
        Ok(Some(Self { file, slots, eos_token }))
    }

    /// The id that the file itself gives `spelling`.
    pub fn id(&self, spelling: &str) -> Option<u32> {
        self.slots.iter().find(|slot| slot.content == spelling).map(|slot| slot.id)
    }
}

fn slots(object: &Map<String, Value>) -> Result<Vec<NamedSlot>> {
    let decoder = match object.get("added_tokens_decoder") {
        None | Some(Value::Null) => return Ok(Vec::new()),
        Some(Value::Object(decoder)) => decoder,
        Some(_) => return Err(Error::model("added_tokens_decoder: expected an object of ids")),
    };
    let mut slots = Vec::with_capacity(decoder.len());
    for (key, entry) in decoder {
        let id = key
            .parse::<u32>()
            .map_err(|_| Error::model(format!("added_tokens_decoder: expected a token id as key, found `{key}`")))?;
        let content = entry.get("content").and_then(Value::as_str).filter(|content| !content.is_empty());
        let content = content
            .ok_or_else(|| Error::model(format!("added_tokens_decoder.{key}: expected `content` with a spelling")))?;
        let special = entry.get("special").and_then(Value::as_bool).unwrap_or(false);
        slots.push(NamedSlot { id, content: content.to_owned(), special });
    }
    slots.sort_by(|a, b| (&a.content, a.id).cmp(&(&b.content, b.id)));
    if let Some(pair) = slots.windows(2).find(|pair| pair[0].content == pair[1].content) {
        let (content, first, second) = (&pair[0].content, pair[0].id, pair[1].id);
        return Err(Error::model(format!(
            "added_tokens_decoder: ids {first} and {second} are both spelled `{content}`"
        )));
    }
    slots.sort_by_key(|slot| slot.id);
    if let Some(pair) = slots.windows(2).find(|pair| pair[0].id == pair[1].id) {
        return Err(Error::model(format!("added_tokens_decoder: id {} is named twice", pair[0].id)));
    }
    Ok(slots)
}

/// `eos_token` is a string, or an object with the string as `content`.
fn spelling(value: Option<&Value>) -> Result<Option<String>> {
    match value {
        None | Some(Value::Null) => Ok(None),
        Some(Value::String(spelling)) => Ok(Some(spelling.clone())),
        Some(other) => match other.get("content").and_then(Value::as_str) {
            Some(spelling) => Ok(Some(spelling.to_owned())),
            None => Err(Error::model("eos_token: expected a spelling, or an object with `content`")),
        },
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn load(content: &str) -> Result<Option<TokenizerConfig>> {
        let dir = tempfile::tempdir().unwrap();
        std::fs::write(dir.path().join(FILE_NAME), content).unwrap();
        TokenizerConfig::load(dir.path())
    }

    #[test]
    fn both_forms_of_eos_token_are_read() {
        for eos in [r#""[EOS]""#, r#"{"content":"[EOS]","special":true}"#] {
            let config = load(&format!(
                r#"{{"added_tokens_decoder":{{"9":{{"content":"[EOS]","special":true}},"7":{{"content":"[BOS]"}}}},"eos_token":{eos}}}"#
            ));
            let config = config.unwrap().unwrap();
            assert_eq!(config.eos_token.as_deref(), Some("[EOS]"));
            assert_eq!(config.id("[EOS]"), Some(9));
            assert_eq!(
                config.slots.iter().map(|slot| (slot.id, slot.special)).collect::<Vec<_>>(),
                [(7, false), (9, true)]
            );
        }
        let empty = load("{}").unwrap().unwrap();
        assert!(empty.slots.is_empty() && empty.eos_token.is_none());
        assert!(TokenizerConfig::load(Path::new("/nonexistent")).unwrap().is_none());
    }

    #[test]
    fn a_damaged_file_is_refused_by_name() {
        for (content, want) in [
            ("", "is empty"),
            ("{", "not valid JSON"),
            (r#"{"added_tokens_decoder":[]}"#, "expected an object of ids"),
            (r#"{"added_tokens_decoder":{"x":{"content":"a"}}}"#, "found `x`"),
            (r#"{"added_tokens_decoder":{"-1":{"content":"a"}}}"#, "found `-1`"),
            (r#"{"added_tokens_decoder":{"5000000000":{"content":"a"}}}"#, "found `5000000000`"),
            (r#"{"added_tokens_decoder":{"1":{"content":""}}}"#, "added_tokens_decoder.1"),
            (r#"{"added_tokens_decoder":{"1":"a"}}"#, "added_tokens_decoder.1"),
            (r#"{"added_tokens_decoder":{"1":{"content":"a"},"2":{"content":"a"}}}"#, "both spelled `a`"),
            (r#"{"added_tokens_decoder":{"1":{"content":"a"},"01":{"content":"b"}}}"#, "named twice"),
            (r#"{"eos_token":5}"#, "eos_token"),
            (r#"{"eos_token":{"text":"a"}}"#, "eos_token"),
        ] {
            let error = load(content).unwrap_err();
            assert_eq!(error.kind(), Kind::Model, "{content}");
            assert!(error.message().contains(want) && error.message().contains(FILE_NAME), "{content}: {error}");
        }
    }
}
