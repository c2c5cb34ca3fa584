//! The model's ids back to reasoning, content and tool calls.
//!
//! Structure is what the control ids make, never what characters spell: text that reads `<|close|>` stays text, and no
//! part of a marker is ever shown.

use serde_json::{Map, Value};

use super::ChatTokens;
use crate::error::Result;
use crate::text::classes::is_python_space;
use crate::text::tokenizer::Tokenizer;
use crate::text::utf8::Utf8Stream;

/// A tag longer than this is none: the model opened one and then went on with text.
const TAG_BYTES_MAX: usize = 4096;

/// What a token brought.
#[derive(Debug, Clone, PartialEq)]
pub enum ChatEvent {
    /// More of what the model thinks.
    Reasoning(String),
    /// More of the answer.
    Content(String),
    /// A complete call.
    ToolCall(ParsedCall),
    /// The message is closed; nothing comes after it.
    End,
}

/// A tool that the model calls.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct ParsedCall {
    /// The tool.
    pub name: String,
    /// The number that the model gave the call, from 1.
    pub index: Option<u32>,
    /// What it is called with.
    pub arguments: Arguments,
}

/// A call's arguments.
#[derive(Debug, Clone, PartialEq)]
pub enum Arguments {
    /// One value a key, in the model's order.
    Object(Map<String, Value>),
    /// Text that the model gave for the whole object; it may not be JSON.
    Raw(String),
}

impl Default for Arguments {
    fn default() -> Self {
        Self::Object(Map::new())
    }
}

impl Arguments {
    /// The arguments as JSON text; raw ones as they are.
    pub fn to_json(&self) -> String {
        match self {
            Self::Object(arguments) => serde_json::to_string(arguments).expect("JSON values are always JSON"),
            Self::Raw(text) => text.clone(),
        }
    }
}

/// A finished answer.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Answer {
    /// What the model thought.
    pub reasoning: String,
    /// What it answered.
    pub content: String,
    /// Calls that it completed.
    pub tool_calls: Vec<ParsedCall>,
    /// The call that the answer broke off in: its arguments are not all there.
    pub open_call: Option<ParsedCall>,
    /// Whether the message was closed, rather than cut off.
    pub complete: bool,
}

/// Where text goes.
#[derive(Debug, Clone, PartialEq)]
enum Place {
    Reasoning,
    Content,
    /// Outside all channels, before the answer: a model that forgot to open it.
    BeforeContent,
    /// Outside all channels.
    Between,
    Argument {
        key: String,
        kind: String,
    },
    Json,
    End,
}

/// Reads an answer as it is generated.
#[derive(Debug)]
pub struct ChatParser<'t> {
    tokenizer: &'t Tokenizer,
    tokens: ChatTokens,
    place: Place,
    /// Whether a tag is being read that closes (true) or opens (false), and its text so far.
    tag: Option<(bool, Vec<u8>)>,
    utf8: Utf8Stream,
    /// Bytes of the argument or JSON being read.
    value: Vec<u8>,
    call: Option<ParsedCall>,
    answer: Answer,
}

impl<'t> ChatParser<'t> {
    /// For an answer to a prompt that ends inside `think` (with `thinking`) or inside `response`.
    ///
    /// # Errors
    /// As [`ChatTokens::of`].
    pub fn new(tokenizer: &'t Tokenizer, thinking: bool) -> Result<Self> {
        Ok(Self {
            tokenizer,
            tokens: ChatTokens::of(tokenizer)?,
            place: if thinking { Place::Reasoning } else { Place::Content },
            tag: None,
            utf8: Utf8Stream::new(),
            value: Vec::new(),
            call: None,
            answer: Answer::default(),
        })
    }

    /// Takes the next generated id and returns what it settles, in order.
    ///
    /// # Errors
    /// Kind `Usage` for an id outside the vocabulary.
    pub fn push(&mut self, id: u32) -> Result<Vec<ChatEvent>> {
        let bytes = self.tokenizer.bytes(id)?;
        let mut events = Vec::new();
        if self.place == Place::End {
            return Ok(events);
        }
        if id == self.tokens.open || id == self.tokens.close {
            self.flush(&mut events);
            self.tag = Some((id == self.tokens.close, Vec::new()));
        } else if id == self.tokens.sep {
            match self.tag.take() {
                Some((false, tag)) => self.open(&String::from_utf8_lossy(&tag), &mut events),
                Some((true, tag)) => self.close(&String::from_utf8_lossy(&tag), &mut events),
                None => {}
            }
        } else if id == self.tokens.end_of_msg {
            self.end(&mut events);
        } else if !self.tokenizer.is_control(id) {
            self.text(bytes, &mut events);
        }
        Ok(events)
    }

    /// Ends the answer, wherever it is: held-back bytes come out as events, and all of it as one [`Answer`].
    pub fn finish(mut self) -> (Vec<ChatEvent>, Answer) {
        let mut events = Vec::new();
        self.flush(&mut events);
        if matches!(self.place, Place::Argument { .. } | Place::Json) {
            self.end_value();
        }
        self.answer.open_call = self.call.take();
        (events, self.answer)
    }

    fn text(&mut self, bytes: &[u8], events: &mut Vec<ChatEvent>) {
        if let Some((_, tag)) = &mut self.tag {
            tag.extend_from_slice(bytes);
            if tag.len() > TAG_BYTES_MAX {
                self.tag = None;
            }
            return;
        }
        match self.place {
            Place::Reasoning | Place::Content | Place::BeforeContent => {
                let text = self.utf8.push(bytes);
                self.show(text, events);
            }
            Place::Argument { .. } | Place::Json => self.value.extend_from_slice(bytes),
            Place::Between | Place::End => {}
        }
    }

    fn show(&mut self, text: String, events: &mut Vec<ChatEvent>) {
        // White space between two channels is no answer.
        let between = self.place == Place::BeforeContent && self.answer.content.is_empty();
        if text.is_empty() || (between && text.chars().all(is_python_space)) {
            return;
        }
        if self.place == Place::Reasoning {
            self.answer.reasoning.push_str(&text);
            events.push(ChatEvent::Reasoning(text));
        } else {
            self.answer.content.push_str(&text);
            events.push(ChatEvent::Content(text));
        }
    }

    /// A character cut by a marker cannot be completed any more.
    fn flush(&mut self, events: &mut Vec<ChatEvent>) {
        let text = self.utf8.finish();
        self.show(text, events);
    }

    fn open(&mut self, tag: &str, events: &mut Vec<ChatEvent>) {
        let (name, attributes) = tag_parts(tag);
        let attribute =
            |key: &str| attributes.iter().find(|(k, _)| k == key).map(|(_, value)| value.clone()).unwrap_or_default();
        match name {
            "think" => self.enter(Place::Reasoning, events),
            "response" => self.enter(Place::Content, events),
            "tools" => self.enter(Place::Between, events),
            "call" => {
                self.enter(Place::Between, events);
                let index = attribute("index").parse().ok();
                self.call = Some(ParsedCall { name: attribute("tool"), index, arguments: Arguments::default() });
            }
            "argument" if self.call.is_some() => {
                self.end_value();
                self.place = Place::Argument { key: attribute("key"), kind: attribute("type") };
            }
            "json" if self.call.is_some() => {
                self.end_value();
                self.place = Place::Json;
            }
            // A message opened again, or a tag that is not of the format: the marker goes, the place stays.
            _ => {}
        }
    }

    fn close(&mut self, tag: &str, events: &mut Vec<ChatEvent>) {
        match tag_parts(tag).0 {
            "think" if self.place == Place::Reasoning => self.place = Place::BeforeContent,
            "response" if matches!(self.place, Place::Content | Place::BeforeContent) => self.place = Place::Between,
            "argument" | "json" => self.end_value(),
            "call" | "tools" => self.enter(Place::Between, events),
            "message" => self.end(events),
            _ => {}
        }
    }

    /// Goes to a channel; a call still open, whose end the model left out, is complete.
    fn enter(&mut self, place: Place, events: &mut Vec<ChatEvent>) {
        self.end_value();
        if let Some(call) = self.call.take() {
            self.answer.tool_calls.push(call.clone());
            events.push(ChatEvent::ToolCall(call));
        }
        self.place = place;
    }

    fn end(&mut self, events: &mut Vec<ChatEvent>) {
        self.tag = None;
        self.flush(events);
        self.enter(Place::End, events);
        self.answer.complete = true;
        events.push(ChatEvent::End);
    }

    /// Puts the value being read into its call, if one is being read.
    fn end_value(&mut self) {
        if !matches!(self.place, Place::Argument { .. } | Place::Json) {
            return;
        }
        let text = String::from_utf8_lossy(&std::mem::take(&mut self.value)).into_owned();
        let place = std::mem::replace(&mut self.place, Place::Between);
        let Some(call) = &mut self.call else { return };
        match (place, &mut call.arguments) {
            (Place::Argument { key, kind }, Arguments::Object(arguments)) => {
                let value = if kind == "string" { None } else { serde_json::from_str(&text).ok() };
                arguments.insert(key, value.unwrap_or(Value::String(text)));
            }
            (Place::Json, arguments) => *arguments = Arguments::Raw(text),
            _ => {}
        }
    }
}

/// A tag's name and attributes: `call tool="N" index="1"`.
fn tag_parts(tag: &str) -> (&str, Vec<(String, String)>) {
    let (name, mut rest) = tag.split_once(' ').unwrap_or((tag, ""));
    let mut attributes = Vec::new();
    while let Some((key, after)) = rest.split_once("=\"") {
        let (value, after) = after.split_once('"').unwrap_or((after, ""));
        // Undone in the reverse order of escaping.
        let value = value.replace("&quot;", "\"").replace("&amp;", "&");
        attributes.push((key.trim().to_owned(), value));
        rest = after;
    }
    (name.trim(), attributes)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn attributes_are_unescaped() {
        let (name, attributes) = tag_parts("call tool=\"a &amp;quot; &quot;b&quot; = <c>\" index=\"2\"");
        assert_eq!(name, "call");
        assert_eq!(attributes, [("tool".into(), "a &quot; \"b\" = <c>".into()), ("index".into(), "2".into())]);
        assert_eq!(tag_parts("think"), ("think", Vec::new()));
        assert_eq!(tag_parts("call tool=\"x"), ("call", vec![("tool".into(), "x".into())]));
        assert_eq!(tag_parts(""), ("", Vec::new()));
    }
}
