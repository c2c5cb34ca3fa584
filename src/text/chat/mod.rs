//! K3's chat format: messages to segments to ids, and the model's ids back to reasoning, content and tool calls.
//!
//! A prompt is a list of segments, each encoded on its own: only the renderer's own segments make control tokens, so no
//! text can forge structure, and no merge crosses a border.
//!
//! Source: `encoding_k3.py` of the checkpoint.

mod json;
mod message;
mod options;
mod parse;
mod render;
mod results;

use super::tokenizer::{Specials, Tokenizer};
use crate::error::{Error, Result};

pub use message::{Content, FunctionCall, Message, Part, ToolCall};
pub use options::{ChatOptions, Effort, ResponseFormat, ToolChoice};
pub use parse::{Answer, Arguments, ChatEvent, ChatParser, ParsedCall};
pub use render::render;

/// A stretch of a rendered prompt, encoded on its own.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// What is encoded; never empty.
    pub text: String,
    /// Whether spellings in it become control tokens: true for the renderer's markers alone.
    pub control: bool,
}

/// Ids of the four tokens that the format is made of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ChatTokens {
    /// `<|open|>`.
    pub open: u32,
    /// `<|close|>`.
    pub close: u32,
    /// `<|sep|>`.
    pub sep: u32,
    /// `<|end_of_msg|>`.
    pub end_of_msg: u32,
}

impl ChatTokens {
    /// The tokens of `tokenizer`.
    ///
    /// # Errors
    /// Kind `Model` when the tokenizer lacks one: the model has no chat format that is known here.
    pub fn of(tokenizer: &Tokenizer) -> Result<Self> {
        let id = |spelling: &str| {
            tokenizer.control_id(spelling).ok_or_else(|| {
                let file = tokenizer.file().display();
                Error::model(format!("{file}: no chat format: the tokenizer has no control token `{spelling}`"))
                    .hint("give the prompt as plain text, without chat")
            })
        };
        Ok(Self { open: id(OPEN)?, close: id(CLOSE)?, sep: id(SEP)?, end_of_msg: id(END_OF_MSG)? })
    }
}

/// Ids of `segments`, each encoded on its own.
///
/// # Errors
/// As [`ChatTokens::of`]; kind `Model` also for a control segment with a marker that the tokenizer lacks (media).
pub fn encode(segments: &[Segment], tokenizer: &Tokenizer) -> Result<Vec<u32>> {
    ChatTokens::of(tokenizer)?;
    let mut ids = Vec::new();
    for segment in segments {
        let specials = if segment.control { Specials::Control } else { Specials::Ordinary };
        let segment_ids = tokenizer.encode(&segment.text, specials);
        if segment.control && !segment_ids.iter().any(|id| tokenizer.is_control(*id)) {
            let (file, text) = (tokenizer.file().display(), &segment.text);
            return Err(Error::model(format!(
                "{file}: no chat format: the tokenizer has no control token in `{text}`"
            )));
        }
        ids.extend(segment_ids);
    }
    Ok(ids)
}

const OPEN: &str = "<|open|>";
const CLOSE: &str = "<|close|>";
const SEP: &str = "<|sep|>";
const END_OF_MSG: &str = "<|end_of_msg|>";
