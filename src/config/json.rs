//! A JSON tree that keeps what `serde_json::Value` loses: repeated keys are an error, numbers stay as written.

use std::collections::HashSet;
use std::fmt;

use serde::de::{self, Deserialize, Deserializer, MapAccess, SeqAccess, Visitor};

/// The key under which `serde_json` hands over the text of a number that is not a plain 64-bit integer
/// (its `arbitrary_precision`).
const NUMBER_KEY: &str = "$serde_json::private::Number";

/// A JSON value.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Json {
    Null,
    Bool(bool),
    /// The number's own characters: `1`, `1.0` and `1e0` are three things.
    Number(String),
    Text(String),
    Array(Vec<Json>),
    /// In the order of the file.
    Object(Vec<(String, Json)>),
}

impl Json {
    /// Parses `text`; a key that occurs twice in an object is an error wherever it is.
    pub(super) fn parse(text: &str) -> Result<Self, String> {
        serde_json::from_str(text).map_err(|e| format!("not valid JSON: {e}"))
    }

    /// Whether the value switches nothing on: null, false, or an empty text, list or object.
    pub(super) fn is_off(&self) -> bool {
        match self {
            Json::Null | Json::Bool(false) => true,
            Json::Bool(true) | Json::Number(_) => false,
            Json::Text(text) => text.is_empty(),
            Json::Array(items) => items.is_empty(),
            Json::Object(entries) => entries.is_empty(),
        }
    }
}

/// As in the file, cut to a length that fits a message.
impl fmt::Display for Json {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Json::Null => f.write_str("null"),
            Json::Bool(b) => write!(f, "{b}"),
            Json::Number(text) => f.write_str(&cut(text)),
            Json::Text(text) => write!(f, "{:?}", cut(text)),
            Json::Array(items) => write!(f, "a list of {}", items.len()),
            Json::Object(entries) => write!(f, "an object of {} keys", entries.len()),
        }
    }
}

fn cut(text: &str) -> String {
    const SHOWN: usize = 60;
    match text.char_indices().nth(SHOWN) {
        Some((at, _)) => format!("{}…", &text[..at]),
        None => text.to_owned(),
    }
}

impl<'de> Deserialize<'de> for Json {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        struct JsonVisitor;

        impl<'de> Visitor<'de> for JsonVisitor {
            type Value = Json;

            fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
                f.write_str("a JSON value")
            }

            fn visit_unit<E>(self) -> Result<Json, E> {
                Ok(Json::Null)
            }

            fn visit_bool<E>(self, value: bool) -> Result<Json, E> {
                Ok(Json::Bool(value))
            }

            fn visit_u64<E>(self, value: u64) -> Result<Json, E> {
                Ok(Json::Number(value.to_string()))
            }

            fn visit_i64<E>(self, value: i64) -> Result<Json, E> {
                Ok(Json::Number(value.to_string()))
            }

            fn visit_f64<E>(self, value: f64) -> Result<Json, E> {
                Ok(Json::Number(format!("{value:?}")))
            }

            fn visit_str<E>(self, value: &str) -> Result<Json, E> {
                Ok(Json::Text(value.to_owned()))
            }

            fn visit_seq<A: SeqAccess<'de>>(self, mut seq: A) -> Result<Json, A::Error> {
                let mut items = Vec::new();
                while let Some(item) = seq.next_element()? {
                    items.push(item);
                }
                Ok(Json::Array(items))
            }

            fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<Json, A::Error> {
                let mut entries: Vec<(String, Json)> = Vec::new();
                let mut keys = HashSet::new();
                while let Some(key) = map.next_key::<String>()? {
                    if key == NUMBER_KEY && entries.is_empty() {
                        return Ok(Json::Number(map.next_value()?));
                    }
                    if !keys.insert(key.clone()) {
                        return Err(de::Error::custom(format!("key {:?} occurs twice", cut(&key))));
                    }
                    let value = map.next_value()?;
                    entries.push((key, value));
                }
                Ok(Json::Object(entries))
            }
        }

        deserializer.deserialize_any(JsonVisitor)
    }
}
