//! `tokenize --jsonl`: a line in, a line out, each flushed, so that another program can hold a conversation.

use serde::Deserialize;
use serde_json::json;

use super::json_array;
use crate::cli::output::{self, Written};
use crate::cli::prompt::{Source, check_vocabulary};
use crate::engine::Progress;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::text::{Specials, Tokenizer};

/// Longest line that is taken.
const LINE_BYTES_MAX: usize = 256 << 20;
const BOM: &[u8] = b"\xef\xbb\xbf";

#[derive(Deserialize)]
struct Line {
    text: Option<String>,
    ids: Option<Vec<u32>>,
}

/// Answers every line of `source` on stdout.
///
/// # Errors
/// Kind `Usage` with the line's number for one that is no such object; `Io`; `Interrupted`.
pub(super) fn answer(
    source: &Source,
    tokenizer: &Tokenizer,
    specials: Specials,
    progress: &dyn Progress,
    interrupt: &Interrupt,
) -> Result<()> {
    let mut chunks = source.chunks(progress, interrupt)?;
    let mut pending = Vec::new();
    let mut number = 1;
    let reply = |line: &[u8], number: usize| {
        let line = if number == 1 { line.strip_prefix(BOM).unwrap_or(line) } else { line };
        let answer = answer_line(line, tokenizer, specials)
            .map_err(|error| error.context(format_args!("{}: line {number}", source.name())))?;
        answer.map_or(Ok(Written::Yes), |answer| output::stdout(answer.as_bytes()))
    };
    while let Some(chunk) = chunks.next()? {
        let mut rest = chunk.as_slice();
        while let Some(end) = rest.iter().position(|byte| *byte == b'\n') {
            pending.extend_from_slice(&rest[..end]);
            if reply(&pending, number)? == Written::PipeClosed {
                return Ok(());
            }
            pending.clear();
            number += 1;
            rest = &rest[end + 1..];
        }
        pending.extend_from_slice(rest);
        if pending.len() > LINE_BYTES_MAX {
            let (name, most) = (source.name(), LINE_BYTES_MAX >> 20);
            return Err(Error::usage(format!("{name}: line {number}: longer than {most} MiB")));
        }
    }
    let _ = reply(&pending, number)?;
    Ok(())
}

/// The answer with its line end; `None` for a blank line.
fn answer_line(line: &[u8], tokenizer: &Tokenizer, specials: Specials) -> Result<Option<String>> {
    if line.trim_ascii().is_empty() {
        return Ok(None);
    }
    let expected = "expected {\"text\": …} or {\"ids\": […]}";
    // An array would do for the parser, too.
    if !line.trim_ascii_start().starts_with(b"{") {
        return Err(Error::usage(format!("{expected}, found no object")));
    }
    let line: Line =
        serde_json::from_slice(line).map_err(|error| Error::usage(format!("{expected}: {}", reason(&error))))?;
    let answer = match line {
        Line { text: Some(text), ids: None } => {
            format!("{{\"ids\":{}}}\n", json_array(&tokenizer.encode(&text, specials)))
        }
        Line { text: None, ids: Some(ids) } => {
            check_vocabulary(&ids, tokenizer.vocab_size())?;
            format!("{}\n", json!({ "text": tokenizer.decode(&ids, false)? }))
        }
        Line { text: None, ids: None } => return Err(Error::usage(format!("{expected}, found neither key"))),
        Line { .. } => return Err(Error::usage(format!("{expected}, found both keys"))),
    };
    Ok(Some(answer))
}

/// What is wrong and where in the line; that it is "line 1" of the parsed line helps nobody.
fn reason(error: &serde_json::Error) -> String {
    error.to_string().replace(" at line 1 column ", " at column ")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn lines_are_answered_or_refused() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model");
        let tokenizer = Tokenizer::from_dir(&dir, None).unwrap();
        let answer = |line: &str| answer_line(line.as_bytes(), &tokenizer, Specials::Ordinary);
        let ids = answer(r#"{"text": "A fox 🦊", "id": 7}"#).unwrap().unwrap();
        assert!(ids.starts_with("{\"ids\":["), "{ids}");
        assert_eq!(answer(&ids).unwrap().unwrap(), "{\"text\":\"A fox 🦊\"}\n");
        assert_eq!(answer(r#"{"text": ""}"#).unwrap().unwrap(), "{\"ids\":[]}\n");
        assert_eq!(answer(" \r").unwrap(), None);
        for bad in [
            "{}",
            "[1]",
            r#"["a", null]"#,
            "text",
            r#"{"text": 1}"#,
            r#"{"ids": [1.5]}"#,
            r#"{"ids": [-1]}"#,
            r#"{"ids": [99999999]}"#,
            r#"{"ids": "1"}"#,
            r#"{"text": "a", "ids": []}"#,
            r#"{"text": "a", "text": "b"}"#,
            r#"{"text": "\ud800"}"#,
            r#"{"text": "a"} {"text": "b"}"#,
        ] {
            assert!(answer(bad).is_err(), "{bad}");
        }
    }
}
