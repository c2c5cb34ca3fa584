//! What a chat prompt holds besides its messages.

use std::str::FromStr;

use serde::de::Error as _;
use serde::{Deserialize, Deserializer};
use serde_json::Value;

use crate::error::{Error, Result};

/// How a conversation is rendered. Deserializes from the JSON of a chat request; absent keys have their defaults.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(default)]
pub struct ChatOptions {
    /// Whether the model thinks first; past reasoning is rendered only then.
    pub thinking: bool,
    /// How much to think; `None` (an explicit null) says nothing about it. Ignored without `thinking`.
    pub thinking_effort: Option<Effort>,
    /// Tools that may be called, as the client sent them.
    #[serde(deserialize_with = "tools")]
    pub tools: Vec<Value>,
    /// Whether a tool must, may or must not be called.
    #[serde(deserialize_with = "tool_choice")]
    pub tool_choice: ToolChoice,
    /// What the answer must be.
    #[serde(deserialize_with = "response_format")]
    pub response_format: ResponseFormat,
    /// Whether the prompt ends where the model goes on, inside its answer.
    pub add_generation_prompt: bool,
    /// A media block for each image; without them images are refused.
    pub image_prompts: Option<Vec<String>>,
}

impl Default for ChatOptions {
    fn default() -> Self {
        Self {
            thinking: true,
            thinking_effort: Some(Effort::Max),
            tools: Vec::new(),
            tool_choice: ToolChoice::Auto,
            response_format: ResponseFormat::Text,
            add_generation_prompt: true,
            image_prompts: None,
        }
    }
}

/// How much the model is told to think. `medium` is not among them, though the note's own text lists it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Effort {
    /// Little.
    Low,
    /// Much.
    High,
    /// The most, and the default.
    Max,
}

impl Effort {
    /// The word in the prompt.
    pub fn name(self) -> &'static str {
        match self {
            Self::Low => "low",
            Self::High => "high",
            Self::Max => "max",
        }
    }
}

impl FromStr for Effort {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self> {
        [Self::Low, Self::High, Self::Max]
            .into_iter()
            .find(|effort| effort.name() == name)
            .ok_or_else(|| Error::usage(format!("thinking effort: expected low, high or max, found `{name}`")))
    }
}

/// `tool_choice`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ToolChoice {
    /// The model decides.
    Auto,
    /// A tool must be called.
    Required,
    /// No tool may be called.
    None,
}

/// `response_format`.
#[derive(Debug, Clone, PartialEq)]
pub enum ResponseFormat {
    /// Any text.
    Text,
    /// A JSON object.
    JsonObject,
    /// JSON that matches this schema.
    JsonSchema(Value),
}

fn tools<'de, D: Deserializer<'de>>(deserializer: D) -> Result<Vec<Value>, D::Error> {
    Ok(Option::deserialize(deserializer)?.unwrap_or_default())
}

fn tool_choice<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ToolChoice, D::Error> {
    match Value::deserialize(deserializer)? {
        Value::Null => Ok(ToolChoice::Auto),
        Value::String(choice) if choice == "auto" => Ok(ToolChoice::Auto),
        Value::String(choice) if choice == "required" => Ok(ToolChoice::Required),
        Value::String(choice) if choice == "none" => Ok(ToolChoice::None),
        other => Err(D::Error::custom(format!("tool_choice: expected auto, required or none, found {other}"))),
    }
}

fn response_format<'de, D: Deserializer<'de>>(deserializer: D) -> Result<ResponseFormat, D::Error> {
    let value = Value::deserialize(deserializer)?;
    if value.is_null() {
        return Ok(ResponseFormat::Text);
    }
    match value.get("type").and_then(Value::as_str) {
        Some("text") => Ok(ResponseFormat::Text),
        Some("json_object") => Ok(ResponseFormat::JsonObject),
        Some("json_schema") => {
            let holder = value.get("json_schema").filter(|holder| holder.is_object());
            let holder =
                holder.ok_or_else(|| D::Error::custom("response_format: expected an object as `json_schema`"))?;
            let inner =
                ["schema", "json_schema"].into_iter().find_map(|key| holder.get(key).filter(|it| !it.is_null()));
            Ok(ResponseFormat::JsonSchema(inner.unwrap_or(holder).clone()))
        }
        _ => Err(D::Error::custom(format!(
            "response_format: expected type text, json_object or json_schema, found {value}"
        ))),
    }
}
