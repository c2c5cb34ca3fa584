//! One object of `config.json`: typed getters that name key, value and expectation, and a list of keys nobody asked for.

use std::cell::RefCell;
use std::ops::RangeInclusive;

use super::json::Json;

/// Longest list of ids taken for one key; the published files have one id.
const IDS_MAX: usize = 256;

/// An object of the file. Every key that a getter asks for counts as known.
pub(super) struct Section<'a> {
    /// `""`, `"text_config."`, …: put before a key in messages.
    prefix: String,
    entries: &'a [(String, Json)],
    asked: RefCell<Vec<&'static str>>,
}

impl<'a> Section<'a> {
    /// The whole file.
    pub(super) fn root(json: &'a Json) -> Result<Self, String> {
        Self::new(String::new(), json).ok_or_else(|| format!("expected an object, found {json}"))
    }

    fn new(prefix: String, json: &'a Json) -> Option<Self> {
        match json {
            Json::Object(entries) => Some(Self { prefix, entries, asked: RefCell::new(Vec::new()) }),
            _ => None,
        }
    }

    /// `key` with the objects it lies in.
    pub(super) fn path(&self, key: &str) -> String {
        format!("{}{key}", self.prefix)
    }

    /// The value of `key`; `None` when the key is not there.
    pub(super) fn get(&self, key: &'static str) -> Option<&'a Json> {
        self.asked.borrow_mut().push(key);
        self.entries.iter().find(|(known, _)| known == key).map(|(_, value)| value)
    }

    /// As [`Section::get`], and null counts as not there.
    pub(super) fn get_some(&self, key: &'static str) -> Option<&'a Json> {
        self.get(key).filter(|value| **value != Json::Null)
    }

    /// `key: expected …, found …`.
    pub(super) fn wrong(&self, key: &str, expected: &str, found: &Json) -> String {
        format!("{}: expected {expected}, found {found}", self.path(key))
    }

    /// `key is missing: expected …`.
    pub(super) fn missing(&self, key: &str, expected: &str) -> String {
        format!("{} is missing: expected {expected}", self.path(key))
    }

    fn need(&self, key: &'static str, expected: &str) -> Result<&'a Json, String> {
        self.get(key).ok_or_else(|| self.missing(key, expected))
    }

    /// A key that must be there, with a whole number in `range`.
    pub(super) fn int(&self, key: &'static str, range: RangeInclusive<u64>) -> Result<usize, String> {
        let expected = whole_number(&range);
        self.as_int(key, self.need(key, &expected)?, range)
    }

    /// A key that must be there, with a whole number in `range` or null.
    pub(super) fn int_or_null(&self, key: &'static str, range: RangeInclusive<u64>) -> Result<Option<usize>, String> {
        let expected = format!("{} or null", whole_number(&range));
        match self.need(key, &expected)? {
            Json::Null => Ok(None),
            value => self.as_int(key, value, range).map(Some).map_err(|_| self.wrong(key, &expected, value)),
        }
    }

    /// A key whose absence is a statement, with a whole number in `range` or null.
    pub(super) fn int_or_absent(&self, key: &'static str, range: RangeInclusive<u64>) -> Result<Option<usize>, String> {
        self.get_some(key).map(|value| self.as_int(key, value, range)).transpose()
    }

    /// `value` as a whole number in `range`: digits only, so neither `1.0` nor `true` nor `"1"`.
    pub(super) fn as_int(&self, key: &str, value: &Json, range: RangeInclusive<u64>) -> Result<usize, String> {
        match value {
            Json::Number(text) => text.parse::<u64>().ok().filter(|n| range.contains(n)).map(|n| n as usize),
            _ => None,
        }
        .ok_or_else(|| self.wrong(key, &whole_number(&range), value))
    }

    /// A key that must be there, with true or false.
    pub(super) fn bool(&self, key: &'static str) -> Result<bool, String> {
        self.as_bool(key, self.need(key, "true or false")?)
    }

    /// A key whose absence means false, with true, false or null.
    pub(super) fn bool_or_absent(&self, key: &'static str) -> Result<bool, String> {
        self.get_some(key).map_or(Ok(false), |value| self.as_bool(key, value))
    }

    fn as_bool(&self, key: &str, value: &Json) -> Result<bool, String> {
        match value {
            Json::Bool(b) => Ok(*b),
            _ => Err(self.wrong(key, "true or false", value)),
        }
    }

    /// A key that must be there, with a number that f32 holds and `accept` takes; `expected` says which those are.
    pub(super) fn float(&self, key: &'static str, expected: &str, accept: fn(f32) -> bool) -> Result<f32, String> {
        self.as_float(key, self.need(key, expected)?, expected, accept)
    }

    /// `value` as a number that f32 holds and `accept` takes.
    pub(super) fn as_float(
        &self,
        key: &str,
        value: &Json,
        expected: &str,
        accept: fn(f32) -> bool,
    ) -> Result<f32, String> {
        match value {
            Json::Number(text) => text.parse::<f64>().ok().map(|x| x as f32).filter(|x| x.is_finite() && accept(*x)),
            _ => None,
        }
        .ok_or_else(|| self.wrong(key, expected, value))
    }

    /// A key that must be there, with a text.
    pub(super) fn text(&self, key: &'static str, expected: &str) -> Result<&'a str, String> {
        match self.need(key, expected)? {
            Json::Text(text) => Ok(text),
            value => Err(self.wrong(key, expected, value)),
        }
    }

    /// A key that must be there, with exactly the value `only`, which is all that this program computes.
    pub(super) fn only(&self, key: &'static str, only: &Json) -> Result<(), String> {
        let expected = format!("{only} (nothing else is supported)");
        self.need(key, &expected).and_then(|v| if v == only { Ok(()) } else { Err(self.wrong(key, &expected, v)) })
    }

    /// As [`Section::only`], for a key that may be absent.
    pub(super) fn only_if_given(&self, key: &'static str, only: &Json) -> Result<(), String> {
        if self.get(key).is_some() { self.only(key, only) } else { Ok(()) }
    }

    /// A key that must be there, with a list.
    pub(super) fn list(&self, key: &'static str, expected: &str) -> Result<&'a [Json], String> {
        match self.need(key, expected)? {
            Json::Array(items) => Ok(items),
            value => Err(self.wrong(key, expected, value)),
        }
    }

    /// A key that must be there, with an object.
    pub(super) fn section(&self, key: &'static str) -> Result<Section<'a>, String> {
        let value = self.need(key, "an object")?;
        Section::new(format!("{}{key}.", self.prefix), value).ok_or_else(|| self.wrong(key, "an object", value))
    }

    /// One id or a list of ids, each below `vocab_size`; empty when absent or null.
    pub(super) fn token_ids(&self, key: &'static str, vocab_size: usize) -> Result<Vec<u32>, String> {
        let range = 0..=vocab_size as u64 - 1;
        match self.get_some(key) {
            None => Ok(Vec::new()),
            Some(value @ Json::Array(items)) if items.len() > IDS_MAX => {
                return Err(self.wrong(key, &format!("at most {IDS_MAX} ids"), value));
            }
            Some(Json::Array(items)) => items.iter().map(|v| self.as_int(key, v, range.clone())).collect(),
            Some(value) => self.as_int(key, value, range).map(|id| vec![id]),
        }
        .map(|ids: Vec<usize>| ids.into_iter().map(|id| id as u32).collect())
    }

    /// Refuses every key that no getter asked for, unless it is among `harmless` or, with `off_is_fine`, switched off.
    pub(super) fn refuse_unknown(&self, harmless: &[&str], off_is_fine: bool) -> Result<(), String> {
        let asked = self.asked.borrow();
        for (key, value) in self.entries {
            let known = asked.contains(&key.as_str()) || harmless.contains(&key.as_str()) || key.starts_with('_');
            let off = off_is_fine && value.is_off();
            if !known && !off {
                return Err(format!(
                    "{} = {value} is not a key this program knows; it may change the model",
                    self.path(key)
                ));
            }
        }
        Ok(())
    }
}

fn whole_number(range: &RangeInclusive<u64>) -> String {
    format!("a whole number from {} to {}", range.start(), range.end())
}
