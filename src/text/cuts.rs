//! Hard cuts that the official tokenizer makes in a text before anything looks at it.
//!
//! They are part of the ids: no piece, merge or control token crosses one. They also bound the longest piece, which
//! keeps encoding linear.
//!
//! Source: `encode` and `_split_whitespaces_or_nonwhitespaces` of the checkpoint's `tokenization_kimi.py`.

use super::classes::is_python_space;

/// Code points of one chunk in the official tokenizer.
pub const CHUNK_CHARS: usize = 400_000;
/// Longest run of white space, or of anything else, in code points.
pub const RUN_CHARS_MAX: usize = 25_000;

/// Cuts `text` into chunks of `chunk_chars` code points, and each of those wherever a run of white space or of
/// non-white-space would grow past [`RUN_CHARS_MAX`]. The parts, joined, are `text`; none is empty.
pub fn cut(text: &str, chunk_chars: usize) -> Vec<&str> {
    let mut parts = Vec::new();
    let mut part_start = 0;
    let mut chunk_len = 0;
    let mut run_len = 0;
    let mut run_is_space = false;
    for (at, c) in text.char_indices() {
        let is_space = is_python_space(c);
        let chunk_full = chunk_len == chunk_chars;
        let run_full = run_len == RUN_CHARS_MAX && is_space == run_is_space;
        if chunk_full || run_full {
            parts.push(&text[part_start..at]);
            part_start = at;
        }
        chunk_len = if chunk_full { 1 } else { chunk_len + 1 };
        run_len = if chunk_full || run_full || is_space != run_is_space { 1 } else { run_len + 1 };
        run_is_space = is_space;
    }
    if part_start < text.len() {
        parts.push(&text[part_start..]);
    }
    parts
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lengths(text: &str) -> Vec<usize> {
        cut(text, CHUNK_CHARS).iter().map(|part| part.chars().count()).collect()
    }

    #[test]
    fn an_empty_text_has_no_parts() {
        assert!(cut("", CHUNK_CHARS).is_empty());
    }

    #[test]
    fn a_run_is_cut_before_the_character_that_would_exceed_it() {
        assert_eq!(lengths(&"a".repeat(25_000)), [25_000]);
        assert_eq!(lengths(&"a".repeat(25_001)), [25_000, 1]);
        assert_eq!(lengths(&"中".repeat(60_000)), [25_000, 25_000, 10_000]);
        assert_eq!(lengths(&" ".repeat(25_001)), [25_000, 1]);
        assert_eq!(lengths(&("a".repeat(25_000) + " " + &"a".repeat(25_000))), [50_001]);
        assert_eq!(lengths(&("ab ".repeat(3) + &"a".repeat(25_001))), [25_009, 1]);
    }

    #[test]
    fn the_four_separators_count_as_white_space_here() {
        assert_eq!(lengths(&("\u{1c}".repeat(20_000) + &" ".repeat(5_001))), [25_000, 1]);
    }

    #[test]
    fn a_chunk_starts_its_own_run() {
        let text = "a ".repeat(195_000) + &"b".repeat(10_000) + &"b".repeat(20_000);
        assert_eq!(lengths(&text), [400_000, 20_000]);
        assert_eq!(cut(&text, usize::MAX).len(), 2);
    }
}
