//! JSON as Python's `json.dumps(…, ensure_ascii=False)` writes it: prompts were made that way in training.

use serde_json::{Number, Value};

/// Separators and order of keys.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Style {
    /// `,` and `:`, keys sorted by code point at every level.
    CompactSorted,
    /// `, ` and `: `, keys in the order given.
    Spaced,
}

/// `value` as JSON text.
pub fn dumps(value: &Value, style: Style) -> String {
    let mut out = String::new();
    write(value, style, &mut out);
    out
}

fn write(value: &Value, style: Style, out: &mut String) {
    let (comma, colon) = match style {
        Style::CompactSorted => (",", ":"),
        Style::Spaced => (", ", ": "),
    };
    match value {
        Value::Null => out.push_str("null"),
        Value::Bool(value) => out.push_str(if *value { "true" } else { "false" }),
        Value::Number(number) => out.push_str(&python_number(number)),
        Value::String(text) => write_string(text, out),
        Value::Array(items) => {
            out.push('[');
            for (at, item) in items.iter().enumerate() {
                out.push_str(if at > 0 { comma } else { "" });
                write(item, style, out);
            }
            out.push(']');
        }
        Value::Object(entries) => {
            let mut entries: Vec<_> = entries.iter().collect();
            if style == Style::CompactSorted {
                entries.sort_by_key(|(key, _)| *key);
            }
            out.push('{');
            for (at, (key, value)) in entries.into_iter().enumerate() {
                out.push_str(if at > 0 { comma } else { "" });
                write_string(key, out);
                out.push_str(colon);
                write(value, style, out);
            }
            out.push('}');
        }
    }
}

/// Escapes what both JSON writers escape, in the same spelling: quotes, backslashes and characters below U+0020.
fn write_string(text: &str, out: &mut String) {
    out.push_str(&serde_json::to_string(text).expect("a string is always JSON"));
}

/// A number as Python prints it: integers keep all their digits, everything else is a float's `repr`.
pub fn python_number(number: &Number) -> String {
    let given = number.as_str();
    if given == "-0" {
        return "0".to_owned();
    }
    if !given.contains(['.', 'e', 'E']) {
        return given.to_owned();
    }
    python_float(given.parse().expect("a JSON number parses as a float"))
}

/// Python's `repr` of a float: shortest digits that round-trip, exponents from 1e16 up and below 1e-4.
fn python_float(value: f64) -> String {
    if value.is_infinite() {
        return if value > 0.0 { "Infinity" } else { "-Infinity" }.to_owned();
    }
    let scientific = format!("{value:e}");
    let (mantissa, exponent) = scientific.split_once('e').expect("{:e} writes an exponent");
    let exponent: i32 = exponent.parse().expect("{:e} writes a decimal exponent");
    if (-4..16).contains(&exponent) {
        let positional = format!("{value}");
        if positional.contains('.') { positional } else { positional + ".0" }
    } else {
        let sign = if exponent < 0 { '-' } else { '+' };
        format!("{mantissa}e{sign}{:02}", exponent.abs())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_written_as_python_writes_them() {
        for (given, want) in [
            ("1e2", "100.0"),
            ("1.0", "1.0"),
            ("-0", "0"),
            ("0", "0"),
            ("1e16", "1e+16"),
            ("1e15", "1000000000000000.0"),
            ("-0.0", "-0.0"),
            ("0e0", "0.0"),
            ("1e-7", "1e-07"),
            ("0.00001", "1e-05"),
            ("0.0001", "0.0001"),
            ("0.00012", "0.00012"),
            ("1E5", "100000.0"),
            ("123456789012345678901234567890", "123456789012345678901234567890"),
            ("-123456789012345678901234567890", "-123456789012345678901234567890"),
            ("100000000000000000.0", "1e+17"),
            ("123456789012345680.0", "1.2345678901234568e+17"),
            ("9999999999999998.0", "9999999999999998.0"),
            ("1e400", "Infinity"),
            ("-1e400", "-Infinity"),
            ("1e-400", "0.0"),
            ("5e-324", "5e-324"),
            ("1.7976931348623157e308", "1.7976931348623157e+308"),
            ("0.1", "0.1"),
            ("0.30000000000000004", "0.30000000000000004"),
            ("1.50", "1.5"),
        ] {
            let Value::Number(number) = serde_json::from_str(given).unwrap() else { panic!("{given}") };
            assert_eq!(python_number(&number), want, "{given}");
        }
    }

    #[test]
    fn keys_are_sorted_at_every_level_or_kept() {
        let value: Value =
            serde_json::from_str(r#"{"b":[{"z":1,"é":2,"Z":3.0}],"a":"x\u0001\n\"\\/é\u2028\u007f"}"#).unwrap();
        let text = "\"x\\u0001\\n\\\"\\\\/é\u{2028}\u{7f}\"";
        assert_eq!(dumps(&value, Style::CompactSorted), format!(r#"{{"a":{text},"b":[{{"Z":3.0,"z":1,"é":2}}]}}"#));
        assert_eq!(dumps(&value, Style::Spaced), format!(r#"{{"b": [{{"z": 1, "é": 2, "Z": 3.0}}], "a": {text}}}"#));
        assert_eq!(dumps(&serde_json::from_str("[[],{}]").unwrap(), Style::Spaced), "[[], {}]");
    }
}
