//! Rows as lines of comma-separated values: a column for each number, those of a spread side by side.

use serde_json::Value;

use crate::bench::Row;

/// Names and values of a row, nested ones as `tokens_per_s_mean`.
fn columns(row: &Row) -> Vec<(String, Value)> {
    let mut columns = Vec::new();
    if let Ok(Value::Object(object)) = serde_json::to_value(row) {
        for (name, value) in object {
            match value {
                Value::Object(inner) => {
                    columns.extend(inner.into_iter().map(|(part, value)| (format!("{name}_{part}"), value)));
                }
                value => columns.push((name, value)),
            }
        }
    }
    columns
}

/// The header's line.
pub(super) fn header(row: &Row) -> String {
    let names: Vec<String> = columns(row).into_iter().map(|(name, _)| name).collect();
    names.join(",") + "\n"
}

/// A row's line; nothing stands for what has no value.
pub(super) fn line(row: &Row) -> String {
    let values = columns(row).into_iter().map(|(_, value)| match value {
        Value::Null => String::new(),
        Value::String(text) => quoted(&text),
        other => other.to_string(),
    });
    values.collect::<Vec<_>>().join(",") + "\n"
}

/// As RFC 4180 has it.
fn quoted(text: &str) -> String {
    match text.contains([',', '"', '\n', '\r']) {
        true => format!("\"{}\"", text.replace('"', "\"\"")),
        false => text.to_owned(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn text_that_would_break_a_line_is_quoted() {
        assert_eq!(quoted("plain (x) @ 3"), "plain (x) @ 3");
        assert_eq!(quoted("a, \"b\""), "\"a, \"\"b\"\"\"");
    }
}
