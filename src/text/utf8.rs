//! Token bytes to text, piece by piece: tokens often end inside a character.

use std::str;

/// Turns a stream of bytes into a stream of whole characters.
///
/// What it hands out, joined, equals [`String::from_utf8_lossy`] of all bytes joined: one U+FFFD for each maximal
/// ill-formed subpart. At most three bytes are held back, and only while they can still become a character.
#[derive(Debug, Clone, Default)]
pub struct Utf8Stream {
    held: Vec<u8>,
}

impl Utf8Stream {
    /// A stream that holds nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Takes `bytes` and returns the text that is now certain; empty when all of it is held back.
    pub fn push(&mut self, bytes: &[u8]) -> String {
        let mut text = String::with_capacity(self.held.len() + bytes.len());
        self.held.extend_from_slice(bytes);
        let mut rest = self.held.as_slice();
        loop {
            match str::from_utf8(rest) {
                Ok(valid) => {
                    text.push_str(valid);
                    rest = &[];
                }
                Err(error) => {
                    let (valid, after) = rest.split_at(error.valid_up_to());
                    text.push_str(str::from_utf8(valid).expect("checked by from_utf8"));
                    rest = after;
                    if let Some(invalid) = error.error_len() {
                        text.push(char::REPLACEMENT_CHARACTER);
                        rest = &rest[invalid..];
                        continue;
                    }
                }
            }
            let held_from = self.held.len() - rest.len();
            self.held.drain(..held_from);
            return text;
        }
    }

    /// Ends the stream: bytes still held back can no longer become a character and give one U+FFFD.
    pub fn finish(&mut self) -> String {
        let text = String::from_utf8_lossy(&self.held).into_owned();
        self.held.clear();
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn streamed(parts: &[&[u8]]) -> String {
        let mut stream = Utf8Stream::new();
        let mut text: String = parts.iter().map(|part| stream.push(part)).collect();
        text += &stream.finish();
        text
    }

    #[test]
    fn a_split_character_comes_out_whole_and_only_when_complete() {
        let mut stream = Utf8Stream::new();
        assert_eq!(stream.push(b"a\xf0\x9f"), "a");
        assert_eq!(stream.push(b"\x99"), "");
        assert_eq!(stream.push(b"\x82b"), "🙂b");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn invalid_bytes_do_not_wait_for_a_completion_that_cannot_come() {
        let mut stream = Utf8Stream::new();
        assert_eq!(stream.push(b"\xff"), "\u{fffd}");
        assert_eq!(stream.push(b"\xe4\xb8"), "");
        assert_eq!(stream.push(b"x"), "\u{fffd}x");
        assert_eq!(stream.push(b"\xf0\x9f"), "");
        assert_eq!(stream.finish(), "\u{fffd}");
        assert_eq!(stream.finish(), "");
    }

    #[test]
    fn every_split_of_odd_bytes_equals_the_lossy_whole() {
        let alphabet = [0x00, 0x41, 0x7f, 0x80, 0x9f, 0xa0, 0xbf, 0xc0, 0xc2, 0xe0, 0xe4, 0xed, 0xef, 0xf0, 0xf4, 0xf5];
        let mut state = 1u64;
        for _ in 0..20_000 {
            let mut bytes = [0u8; 7];
            for byte in &mut bytes {
                state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                *byte = alphabet[(state >> 60) as usize];
            }
            let want = String::from_utf8_lossy(&bytes);
            let first = (state >> 33) as usize % 8;
            let second = first + (state >> 40) as usize % (8 - first);
            let got = streamed(&[&bytes[..first], &bytes[first..second], &bytes[second..]]);
            assert_eq!(got, want, "{bytes:x?} split at {first}, {second}");
            let single: Vec<&[u8]> = bytes.chunks(1).collect();
            assert_eq!(streamed(&single), want, "{bytes:x?} byte by byte");
        }
    }
}
