//! Character classes of the pre-tokenizer's pattern, one byte a code point.

use std::sync::OnceLock;

use regex_syntax::hir::{Class, HirKind};

/// Script=Han (not Script_Extensions).
pub const HAN: u8 = 1 << 0;
/// Lu or Lt, not Han.
pub const UPPER: u8 = 1 << 1;
/// Lm, Lo or M, not Han: members of both letter classes.
pub const BOTH: u8 = 1 << 2;
/// Ll, not Han.
pub const LOWER: u8 = 1 << 3;
/// N.
pub const NUMBER: u8 = 1 << 4;
/// White_Space, the pattern's `\s`.
pub const SPACE: u8 = 1 << 5;
/// Neither white space nor L nor N; marks are here too.
pub const PUNCT: u8 = 1 << 6;
/// CR or LF.
pub const NEWLINE: u8 = 1 << 7;

const CODE_POINTS: usize = 0x11_0000;

/// Each class with the pattern that defines it.
const DEFINITIONS: [(u8, &str); 8] = [
    (HAN, r"\p{Han}"),
    (UPPER, r"[\p{Lu}\p{Lt}&&[^\p{Han}]]"),
    (BOTH, r"[\p{Lm}\p{Lo}\p{M}&&[^\p{Han}]]"),
    (LOWER, r"[\p{Ll}&&[^\p{Han}]]"),
    (NUMBER, r"\p{N}"),
    (SPACE, r"\s"),
    (PUNCT, r"[^\s\p{L}\p{N}]"),
    (NEWLINE, r"[\r\n]"),
];

/// The classes of every code point.
pub struct Classes(Box<[u8]>);

impl Classes {
    /// The table, built once from `regex-syntax`'s Unicode data.
    pub fn get() -> &'static Self {
        static CLASSES: OnceLock<Classes> = OnceLock::new();
        CLASSES.get_or_init(Self::build)
    }

    /// The classes of `c`, as bits.
    pub fn of(&self, c: char) -> u8 {
        self.0[c as usize]
    }

    fn build() -> Self {
        let mut table = vec![0; CODE_POINTS].into_boxed_slice();
        for (class, pattern) in DEFINITIONS {
            let hir = regex_syntax::parse(pattern).expect("constant patterns parse");
            let HirKind::Class(Class::Unicode(members)) = hir.kind() else {
                unreachable!("{pattern} is a class of code points")
            };
            for range in members.ranges() {
                for code_point in &mut table[range.start() as usize..=range.end() as usize] {
                    *code_point |= class;
                }
            }
        }
        Self(table)
    }
}

/// Python's `str.isspace`: White_Space and the four separators U+001C..U+001F.
pub fn is_python_space(c: char) -> bool {
    c.is_whitespace() || ('\u{1c}'..='\u{1f}').contains(&c)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_tables_are_unicode_16() {
        let classes = Classes::get();
        assert_ne!(classes.of('\u{105C0}') & BOTH, 0, "Todhri letters came with 16.0");
        assert_ne!(classes.of('\u{1E5D0}') & BOTH, 0, "Ol Onal letters came with 16.0");
        assert_eq!(classes.of('\u{323B0}'), PUNCT, "Han extension J comes with 17.0");
        assert_eq!(classes.of('\u{16EA0}'), PUNCT, "Beria Erfe comes with 17.0");
    }

    #[test]
    fn classes_are_those_of_the_pattern() {
        let classes = Classes::get();
        for (c, want) in [
            ('A', UPPER),
            ('a', LOWER),
            ('ǅ', UPPER),
            ('ª', BOTH),
            ('\u{301}', BOTH | PUNCT),
            ('한', BOTH),
            ('中', HAN),
            ('々', HAN),
            ('〇', HAN | NUMBER),
            ('⺀', HAN | PUNCT),
            ('、', PUNCT),
            ('7', NUMBER),
            ('²', NUMBER),
            (' ', SPACE),
            ('\n', SPACE | NEWLINE),
            ('\u{85}', SPACE),
            ('\u{1c}', PUNCT),
            ('\u{200b}', PUNCT),
            ('🙂', PUNCT),
        ] {
            assert_eq!(classes.of(c), want, "{c:?}");
        }
    }

    #[test]
    fn python_counts_29_white_space_characters_and_the_pattern_25() {
        let all = || (0..CODE_POINTS as u32).filter_map(char::from_u32);
        assert_eq!(all().filter(|c| is_python_space(*c)).count(), 29);
        assert_eq!(all().filter(|c| Classes::get().of(*c) & SPACE != 0).count(), 25);
    }

    #[test]
    fn every_code_point_is_a_letter_a_number_white_space_or_punctuation() {
        for c in (0..CODE_POINTS as u32).filter_map(char::from_u32) {
            assert_ne!(Classes::get().of(c), 0, "{c:?}");
        }
    }
}
