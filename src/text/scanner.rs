//! The pre-tokenizer: K3's pattern as a linear scanner, without look-ahead or backtracking.
//!
//! The pattern, leftmost-first, every match one piece:
//!
//! ```text
//! [\p{Han}]+
//! [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?
//! [^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]+[\p{Ll}\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?
//! \p{N}{1,3}
//!  ?[^\s\p{L}\p{N}]+[\r\n]*
//! \s*[\r\n]+
//! \s+(?!\S)
//! \s+
//! ```
//!
//! Source: `pat_str` of the checkpoint's `tokenization_kimi.py`.

use super::classes::{BOTH, Classes, HAN, LOWER, NEWLINE, NUMBER, PUNCT, SPACE, UPPER};

/// The pieces of `text`; joined, they are `text`.
pub fn pieces(text: &str) -> Pieces<'_> {
    Pieces { text, at: 0, classes: Classes::get() }
}

/// Iterator over the pre-tokenizer's pieces, from [`pieces`].
pub struct Pieces<'t> {
    text: &'t str,
    at: usize,
    classes: &'static Classes,
}

impl<'t> Iterator for Pieces<'t> {
    type Item = &'t str;

    fn next(&mut self) -> Option<&'t str> {
        let start = self.at;
        if start == self.text.len() {
            return None;
        }
        self.at = self.piece_end(start);
        Some(&self.text[start..self.at])
    }
}

impl Pieces<'_> {
    /// Byte offset where the piece that starts at `start` ends. Offsets are at character borders throughout.
    fn piece_end(&self, start: usize) -> usize {
        let (class, after) = self.char_at(start);
        if class & HAN != 0 {
            return self.run_end(start, HAN);
        }
        if let Some(end) = self.word_end(start, class, after) {
            return end;
        }
        if class & NUMBER != 0 {
            return self.digits_end(start);
        }
        if let Some(end) = self.punctuation_end(start, after) {
            return end;
        }
        self.space_end(start)
    }

    /// The second and third alternative.
    fn word_end(&self, start: usize, class: u8, after: usize) -> Option<usize> {
        // The optional first character: anything but CR, LF, letters and numbers.
        if class & (SPACE | PUNCT) != 0 && class & NEWLINE == 0 {
            self.word_with_lower(after)
                .or_else(|| self.word_with_lower(start))
                .or_else(|| self.word_with_upper(after))
                .or_else(|| self.word_with_upper(start))
        } else {
            self.word_with_lower(start).or_else(|| self.word_with_upper(start))
        }
    }

    /// `[UPPER BOTH]*[LOWER BOTH]+` and a contraction. With no LOWER after the first run, the run gives back
    /// characters until it stands before a BOTH.
    fn word_with_lower(&self, start: usize) -> Option<usize> {
        let (mut upper_end, mut last_both_end) = (start, None);
        loop {
            let (class, after) = self.char_at(upper_end);
            if class & (UPPER | BOTH) == 0 {
                break;
            }
            upper_end = after;
            if class & BOTH != 0 {
                last_both_end = Some(after);
            }
        }
        let lower_end = self.run_end(upper_end, LOWER | BOTH);
        let end = if lower_end > upper_end { Some(lower_end) } else { last_both_end };
        end.map(|end| self.contraction_end(end))
    }

    /// `[UPPER BOTH]+[LOWER BOTH]*` and a contraction.
    fn word_with_upper(&self, start: usize) -> Option<usize> {
        let upper_end = self.run_end(start, UPPER | BOTH);
        (upper_end > start).then(|| self.contraction_end(self.run_end(upper_end, LOWER | BOTH)))
    }

    /// `at`, or the end of the contraction that starts there.
    fn contraction_end(&self, at: usize) -> usize {
        let mut chars = self.text[at..].chars();
        if chars.next() != Some('\'') {
            return at;
        }
        let Some(first) = chars.next() else { return at };
        match first.to_ascii_lowercase() {
            // U+017F is a lower-case s to a case-insensitive pattern.
            's' | 't' | 'm' | 'd' | 'ſ' => at + 1 + first.len_utf8(),
            first => match (first, chars.next().map(|c| c.to_ascii_lowercase())) {
                ('r' | 'v', Some('e')) | ('l', Some('l')) => at + 3,
                _ => at,
            },
        }
    }

    fn digits_end(&self, start: usize) -> usize {
        let mut end = start;
        for _ in 0..3 {
            let (class, after) = self.char_at(end);
            if class & NUMBER == 0 {
                break;
            }
            end = after;
        }
        end
    }

    /// One U+0020 or none, punctuation, and the line ends that follow.
    fn punctuation_end(&self, start: usize, after: usize) -> Option<usize> {
        let first = if self.text.as_bytes()[start] == b' ' { after } else { start };
        let end = self.run_end(first, PUNCT);
        (end > first).then(|| self.run_end(end, NEWLINE))
    }

    /// White space: through the last line end; else up to the last character, which the next piece may take; else all.
    fn space_end(&self, start: usize) -> usize {
        let (mut end, mut last_start, mut newline_end) = (start, start, None);
        loop {
            let (class, after) = self.char_at(end);
            if class & SPACE == 0 {
                break;
            }
            if class & NEWLINE != 0 {
                newline_end = Some(after);
            }
            last_start = end;
            end = after;
        }
        match newline_end {
            Some(newline_end) => newline_end,
            None if end < self.text.len() && last_start > start => last_start,
            None => end,
        }
    }

    /// End of the longest run from `start` of characters in any of `classes`.
    fn run_end(&self, start: usize, classes: u8) -> usize {
        let mut end = start;
        loop {
            let (class, after) = self.char_at(end);
            if class & classes == 0 {
                return end;
            }
            end = after;
        }
    }

    /// Classes of the character at `at` and the offset after it; no class at the end of the text.
    fn char_at(&self, at: usize) -> (u8, usize) {
        match self.text[at..].chars().next() {
            Some(c) => (self.classes.of(c), at + c.len_utf8()),
            None => (0, at),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pieces_are_those_of_the_pattern() {
        for (text, want) in [
            ("", &[][..]),
            ("Hello, world!", &["Hello", ",", " world", "!"]),
            ("don't DON'T", &["don't", " DON'T"]),
            ("1's", &["1", "'s"]),
            ("'llama", &["'llama"]),
            ("HTMLParser", &["HTMLParser"]),
            ("camelCase", &["camel", "Case"]),
            ("1234567", &["123", "456", "7"]),
            ("a   b", &["a", "  ", " b"]),
            ("  1", &[" ", " ", "1"]),
            ("a\u{1c}b", &["a", "\u{1c}b"]),
            (" 中文", &[" ", "中文"]),
            ("A中B", &["A", "中", "B"]),
            ("x々y", &["x", "々", "y"]),
            ("1〇〇〇", &["1〇〇", "〇"]),
            ("ABC한국DEF", &["ABC한국", "DEF"]),
            ("カタカナー中", &["カタカナー", "中"]),
            (" ⺀x", &[" ⺀", "x"]),
            ("!\n/x", &["!\n", "/x"]),
            ("a \r\n b", &["a", " \r\n", " b"]),
            ("\u{301}A!", &["\u{301}", "A", "!"]),
            ("it'ſ ok", &["it'ſ", " ok"]),
            ("we'RE", &["we'RE"]),
            ("a'", &["a", "'"]),
            ("a'l", &["a", "'l"]),
            ("   ", &["   "]),
            (" \n \n x", &[" \n \n", " x"]),
        ] {
            let got: Vec<&str> = pieces(text).collect();
            assert_eq!(got, want, "{text:?}");
        }
    }

    #[test]
    fn pieces_joined_are_the_text() {
        let alphabet: Vec<char> = "aA'sſ1 \n\r\t中々〇⺀한\u{301}!🙂\u{85}\u{3000}é".chars().collect();
        let mut state = 3u64;
        for _ in 0..20_000 {
            let text: String = (0..12)
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    alphabet[(state >> 33) as usize % alphabet.len()]
                })
                .collect();
            let got: Vec<&str> = pieces(&text).collect();
            assert_eq!(got.concat(), text);
            assert!(got.iter().all(|piece| !piece.is_empty()), "{text:?}");
        }
    }
}
