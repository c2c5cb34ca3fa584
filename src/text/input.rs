//! Prompt bytes from a file, a pipe or an argument to the text that is encoded.

use crate::error::{Error, Result};

const BOM: &[u8] = b"\xef\xbb\xbf";

/// The text of prompt input named `source` (a path, or `standard input`).
///
/// A UTF-8 byte order mark at the start is dropped: it belongs to the file, not to the text. Everything else is kept as
/// it is, CRLF line ends included, because ids depend on every character.
///
/// # Errors
/// Kind `Usage` for bytes that are not UTF-8, naming `source` and the first bad byte's offset.
pub fn normalize_input(bytes: Vec<u8>, source: &str) -> Result<String> {
    let mark = if bytes.starts_with(BOM) { BOM.len() } else { 0 };
    let utf16 = bytes.starts_with(b"\xff\xfe") || bytes.starts_with(b"\xfe\xff");
    let mut text = String::from_utf8(bytes).map_err(|error| {
        let offset = error.utf8_error().valid_up_to();
        let byte = error.as_bytes()[offset];
        let hint = if utf16 {
            "it looks like UTF-16: convert it first, e.g. with `iconv -f UTF-16 -t UTF-8`"
        } else {
            "prompts are UTF-8 text: convert it first, e.g. with `iconv -f LATIN1 -t UTF-8`"
        };
        Error::usage(format!("{source}: byte {byte:#04x} at offset {offset} is not valid UTF-8")).hint(hint)
    })?;
    text.drain(..mark);
    Ok(text)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn only_the_leading_byte_order_mark_is_dropped() {
        assert_eq!(normalize_input(b"\xef\xbb\xbfa\xef\xbb\xbfb".to_vec(), "x").unwrap(), "a\u{feff}b");
        assert_eq!(normalize_input(b"\xef\xbb\xbf".to_vec(), "x").unwrap(), "");
        assert_eq!(normalize_input(Vec::new(), "x").unwrap(), "");
    }

    #[test]
    fn line_ends_stay_as_they_are() {
        assert_eq!(normalize_input(b"a\r\nb\rc\n\0".to_vec(), "x").unwrap(), "a\r\nb\rc\n\0");
    }

    #[test]
    fn bytes_that_are_not_utf8_are_refused_with_their_offset() {
        let error = normalize_input(b"caf\xe9 noir".to_vec(), "menu.txt").unwrap_err();
        assert_eq!(error.kind(), Kind::Usage);
        assert_eq!(error.message(), "menu.txt: byte 0xe9 at offset 3 is not valid UTF-8");
        let error = normalize_input(b"\xff\xfea\0".to_vec(), "standard input").unwrap_err();
        assert!(error.hint_text().unwrap().contains("UTF-16"));
        let error = normalize_input(b"ab\xe4\xb8".to_vec(), "standard input").unwrap_err();
        assert!(error.message().contains("offset 2"), "{error}");
    }
}
