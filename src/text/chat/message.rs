//! Messages of a conversation, as chat clients send them.

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

/// One message. Deserializes from the usual JSON: absent keys and nulls are alike, unknown keys are ignored.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct Message {
    /// `system`, `user`, `assistant` or `tool`.
    pub role: String,
    /// What is said.
    #[serde(default)]
    pub content: Content,
    /// Who says it; for a `tool` message, the tool.
    #[serde(default)]
    pub name: Option<String>,
    /// What an assistant thought before it answered.
    #[serde(default)]
    pub reasoning_content: Option<String>,
    /// Another name for `reasoning_content`, which goes first.
    #[serde(default)]
    pub reasoning: Option<String>,
    /// Tools that an assistant called.
    #[serde(default, deserialize_with = "null_is_default")]
    pub tool_calls: Vec<ToolCall>,
    /// The call that a `tool` message answers.
    #[serde(default)]
    pub tool_call_id: Option<String>,
    /// Another name for `tool_call_id`, which goes first.
    #[serde(default)]
    pub id: Option<String>,
    /// The tool that a `tool` message comes from.
    #[serde(default)]
    pub tool: Option<String>,
    /// Tools that a `system` message adds; its content is then ignored.
    #[serde(default, deserialize_with = "null_is_default")]
    pub tools: Vec<Value>,
}

impl Message {
    /// What the system says.
    pub fn system(text: impl Into<String>) -> Self {
        Self::of("system", text.into())
    }

    /// What the user says.
    pub fn user(text: impl Into<String>) -> Self {
        Self::of("user", text.into())
    }

    /// What the model said.
    pub fn assistant(text: impl Into<String>) -> Self {
        Self::of("assistant", text.into())
    }

    fn of(role: &str, text: String) -> Self {
        Self { role: role.to_owned(), content: Content::Text(text), ..Self::default() }
    }
}

/// The body of a message.
#[derive(Debug, Clone, Default, PartialEq)]
pub enum Content {
    /// Null or absent.
    #[default]
    None,
    /// A string.
    Text(String),
    /// A list of parts.
    Parts(Vec<Part>),
}

/// A part of a message's body.
#[derive(Debug, Clone, PartialEq)]
pub enum Part {
    /// `{"type": "text", "text": …}`.
    Text(String),
    /// `{"type": "image"}` or `{"type": "image_url"}`; the image itself is not kept.
    Image,
}

impl<'de> Deserialize<'de> for Content {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        match Value::deserialize(deserializer)? {
            Value::Null => Ok(Self::None),
            Value::String(text) => Ok(Self::Text(text)),
            Value::Array(parts) => parts.iter().map(part).collect::<Result<_, _>>().map(Self::Parts),
            _ => Err("content: expected a string, a list of parts or null".to_owned()),
        }
        .map_err(D::Error::custom)
    }
}

fn part(value: &Value) -> Result<Part, String> {
    match value.get("type").and_then(Value::as_str) {
        Some("text") => match value.get("text").and_then(Value::as_str) {
            Some(text) => Ok(Part::Text(text.to_owned())),
            None => Err("content: a part of type text without a text".to_owned()),
        },
        Some("image" | "image_url") => Ok(Part::Image),
        Some(kind) => Err(format!("content: expected parts of type text or image_url, found `{kind}`")),
        None => Err("content: a part without a type".to_owned()),
    }
}

/// A tool that an assistant called: `{"id": …, "function": {"name": …, "arguments": …}}`.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct ToolCall {
    /// What results refer to.
    #[serde(default)]
    pub id: Option<String>,
    /// The tool and its arguments.
    pub function: FunctionCall,
}

/// The tool and its arguments.
#[derive(Debug, Clone, Default, PartialEq, Deserialize)]
pub struct FunctionCall {
    /// The tool.
    pub name: String,
    /// An object, a string with an object's JSON, or null.
    #[serde(default)]
    pub arguments: Value,
}

fn null_is_default<'de, D: Deserializer<'de>, T: Deserialize<'de> + Default>(deserializer: D) -> Result<T, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}
