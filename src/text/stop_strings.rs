//! User stop strings in a stream of token bytes: found across token borders, and never shown in part.

use crate::error::{Error, Result};

/// Watches a stream of bytes for the first of several strings.
///
/// Of all places where a string occurs the leftmost ends the text, wherever token borders fall: what [`push`] and
/// [`finish`] hand out, joined, is the whole text cut there. Held back is only what may still become part of a string.
///
/// [`push`]: StopStrings::push
/// [`finish`]: StopStrings::finish
#[derive(Debug, Clone, Default)]
pub struct StopStrings {
    patterns: Vec<Pattern>,
    /// Bytes not handed out yet; the first is at `held_start` of the stream.
    held: Vec<u8>,
    held_start: usize,
    /// Leftmost occurrence so far: start, and which string.
    found: Option<(usize, usize)>,
    done: bool,
}

/// One string, and how much of it the bytes so far end with.
#[derive(Debug, Clone)]
struct Pattern {
    bytes: Vec<u8>,
    /// Length of the longest proper prefix that the first n bytes end with, at n.
    fallback: Vec<usize>,
    matched: usize,
}

/// What one call of [`StopStrings`] settles.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct StopStep {
    /// Text that is certain to stand before any stop string.
    pub bytes: Vec<u8>,
    /// The string that ended the text, by its place in the list; nothing comes after it.
    pub stopped: Option<usize>,
}

impl StopStrings {
    /// Watches for `strings`; with none, everything passes at once.
    ///
    /// # Errors
    /// Kind `Usage` for an empty string, which would end every text before it begins.
    pub fn new<S: AsRef<str>>(strings: &[S]) -> Result<Self> {
        if strings.iter().any(|string| string.as_ref().is_empty()) {
            return Err(
                Error::usage("a stop string is empty").hint("leave the option out to stop at the end token only")
            );
        }
        let patterns = strings.iter().map(|string| Pattern::new(string.as_ref().as_bytes())).collect();
        Ok(Self { patterns, ..Self::default() })
    }

    /// Takes the next `bytes` of the stream; they need not end at a character's border.
    pub fn push(&mut self, bytes: &[u8]) -> StopStep {
        if self.done {
            return StopStep { bytes: Vec::new(), stopped: None };
        }
        for &byte in bytes {
            self.held.push(byte);
            let end = self.held_start + self.held.len();
            for (at, pattern) in self.patterns.iter_mut().enumerate() {
                if pattern.advance(byte) {
                    let start = end - pattern.bytes.len();
                    if self.found.is_none_or(|(found, _)| start < found) {
                        self.found = Some((start, at));
                    }
                }
            }
            // An occurrence stands once no string can still begin before it.
            if let Some((start, at)) = self.found
                && self.open_from(end) >= start
            {
                return self.stop(start, at);
            }
        }
        let end = self.held_start + self.held.len();
        let keep_from = self.found.map_or(end, |(start, _)| start).min(self.open_from(end));
        StopStep { bytes: self.release(keep_from), stopped: None }
    }

    /// Ends the stream: what was held back comes out, up to a string that had been found.
    pub fn finish(&mut self) -> StopStep {
        match self.found {
            _ if self.done => StopStep { bytes: Vec::new(), stopped: None },
            Some((start, at)) => self.stop(start, at),
            None => {
                self.done = true;
                StopStep { bytes: std::mem::take(&mut self.held), stopped: None }
            }
        }
    }

    /// Start of the earliest string that may have begun and is not complete.
    fn open_from(&self, end: usize) -> usize {
        end - self.patterns.iter().map(|pattern| pattern.matched).max().unwrap_or(0)
    }

    fn stop(&mut self, start: usize, at: usize) -> StopStep {
        self.done = true;
        let bytes = self.release(start);
        self.held.clear();
        StopStep { bytes, stopped: Some(at) }
    }

    fn release(&mut self, to: usize) -> Vec<u8> {
        let released = self.held.drain(..to - self.held_start).collect();
        self.held_start = to;
        released
    }
}

impl Pattern {
    fn new(bytes: &[u8]) -> Self {
        let mut fallback = vec![0; bytes.len() + 1];
        let mut length = 0;
        for end in 1..bytes.len() {
            while length > 0 && bytes[end] != bytes[length] {
                length = fallback[length];
            }
            length += usize::from(bytes[end] == bytes[length]);
            fallback[end + 1] = length;
        }
        Self { bytes: bytes.to_vec(), fallback, matched: 0 }
    }

    /// Takes one byte; true when the string ends with it.
    fn advance(&mut self, byte: u8) -> bool {
        while self.matched > 0 && self.bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched];
        }
        self.matched += usize::from(self.bytes[self.matched] == byte);
        let complete = self.matched == self.bytes.len();
        if complete {
            self.matched = self.fallback[self.matched];
        }
        complete
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn streamed(stops: &[&str], parts: &[&[u8]]) -> (Vec<u8>, Option<usize>) {
        let mut strings = StopStrings::new(stops).unwrap();
        let (mut text, mut stopped) = (Vec::new(), None);
        for part in parts {
            let step = strings.push(part);
            assert!(stopped.is_none() || step.bytes.is_empty(), "text after the stop");
            text.extend(step.bytes);
            stopped = stopped.or(step.stopped);
        }
        let step = strings.finish();
        assert!(stopped.is_none() || step.bytes.is_empty(), "text after the stop");
        text.extend(step.bytes);
        assert_eq!(strings.finish(), StopStep { bytes: Vec::new(), stopped: None });
        (text, stopped.or(step.stopped))
    }

    #[test]
    fn a_string_over_several_tokens_is_found_and_never_shown_in_part() {
        let mut strings = StopStrings::new(&["\nUser:"]).unwrap();
        assert_eq!(strings.push(b"Hi\n").bytes, b"Hi");
        assert_eq!(strings.push(b"Us").bytes, b"");
        assert_eq!(strings.push(b"ual\n").bytes, b"\nUsual");
        assert_eq!(strings.push(b"User").bytes, b"");
        assert_eq!(strings.push(b": x"), StopStep { bytes: Vec::new(), stopped: Some(0) });
        assert_eq!(strings.push(b"more"), StopStep { bytes: Vec::new(), stopped: None });
    }

    #[test]
    fn the_held_tail_comes_out_at_the_end() {
        assert_eq!(streamed(&["END"], &[b"the EN"]), (b"the EN".to_vec(), None));
        assert_eq!(streamed(&[], &[b"a", b"b"]), (b"ab".to_vec(), None));
    }

    #[test]
    fn the_leftmost_occurrence_wins() {
        assert_eq!(streamed(&["bc", "abcd"], &[b"xabc", b"d"]), (b"x".to_vec(), Some(1)));
        assert_eq!(streamed(&["bc", "abcd"], &[b"xabc", b"e"]), (b"xa".to_vec(), Some(0)));
        assert_eq!(streamed(&["bc", "abcd"], &[b"xabc"]), (b"xa".to_vec(), Some(0)));
        assert_eq!(streamed(&["aab"], &[b"aaaab"]), (b"aa".to_vec(), Some(0)));
    }

    #[test]
    fn an_empty_string_is_refused() {
        assert_eq!(StopStrings::new(&["a", ""]).unwrap_err().kind(), Kind::Usage);
    }

    #[test]
    fn every_split_gives_the_whole_text_cut_at_the_first_string() {
        let mut state = 5u64;
        let mut random = move |below: usize| {
            state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
            (state >> 33) as usize % below
        };
        for _ in 0..20_000 {
            let mut word =
                |max: usize| -> String { (0..1 + random(max)).map(|_| ['a', 'b', 'é'][random(3)]).collect() };
            let stops = [word(4), word(4), word(6)];
            let text = word(20);
            let cut = stops.iter().filter_map(|stop| text.find(stop.as_str())).min();
            let mut parts: Vec<&[u8]> = Vec::new();
            let mut rest = text.as_bytes();
            while !rest.is_empty() {
                let (part, after) = rest.split_at(1 + random(3.min(rest.len())));
                parts.push(part);
                rest = after;
            }
            let stops: Vec<&str> = stops.iter().map(String::as_str).collect();
            let (got, stopped) = streamed(&stops, &parts);
            assert_eq!(String::from_utf8(got).unwrap(), text[..cut.unwrap_or(text.len())], "{stops:?} in {text:?}");
            assert_eq!(stopped.is_some(), cut.is_some());
            assert!(stopped.is_none_or(|at| text[cut.unwrap()..].starts_with(stops[at])));
        }
    }

    #[test]
    fn a_long_near_miss_takes_linear_time() {
        let stop = "a".repeat(10_000) + "b";
        let start = std::time::Instant::now();
        let (text, stopped) = streamed(&[&stop], &[&vec![b'a'; 1_000_000]]);
        assert_eq!((text.len(), stopped), (1_000_000, None));
        assert!(start.elapsed().as_secs() < 2);
    }
}
