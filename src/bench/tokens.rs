//! The tokens that a measurement computes: random ones, or those of a text. They do not depend on what the model answers,
//! so that every engine, thread count and step size computes the same.

use crate::synth::rng::Rng;

/// Which tokens: the context before the test, the run to warm up, or a repetition's.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stream {
    Fill,
    WarmUp,
    Repetition(usize),
}

/// Where tokens come from.
pub(super) struct Tokens<'a> {
    /// Used over and over; random ones where there are none.
    pub text: Option<&'a [u32]>,
    pub vocab_size: usize,
    pub seed: u64,
}

impl Tokens<'_> {
    /// `n` tokens of `stream`, behind a context of `depth`.
    pub fn take(&self, stream: Stream, depth: usize, n: usize) -> Vec<u32> {
        let number = match stream {
            Stream::Fill => 0,
            Stream::WarmUp => 1,
            Stream::Repetition(repetition) => 2 + repetition,
        };
        match self.text {
            Some(text) if !text.is_empty() => {
                // Each stream goes on where the one before ends.
                let start = if stream == Stream::Fill { 0 } else { depth.wrapping_add((number - 1).wrapping_mul(n)) };
                text.iter().copied().cycle().skip(start % text.len()).take(n).collect()
            }
            _ => {
                let mut rng = Rng::new(self.seed ^ (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15));
                let vocab_size = u32::try_from(self.vocab_size).unwrap_or(u32::MAX).max(1);
                (0..n).map(|_| rng.below(vocab_size)).collect()
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_tokens_are_the_same_again_and_differ_between_streams() {
        let tokens = Tokens { text: None, vocab_size: 1000, seed: 7 };
        let first = tokens.take(Stream::Repetition(0), 0, 50);
        assert_eq!(first, tokens.take(Stream::Repetition(0), 0, 50));
        for other in [Stream::Fill, Stream::WarmUp, Stream::Repetition(1)] {
            assert_ne!(first, tokens.take(other, 0, 50), "{other:?}");
        }
        assert!(first.iter().all(|id| *id < 1000));
        assert_ne!(first, Tokens { seed: 8, ..tokens }.take(Stream::Repetition(0), 0, 50));
    }

    #[test]
    fn a_text_is_used_over_and_over_and_goes_on_from_stream_to_stream() {
        let text = [1, 2, 3, 4, 5];
        let tokens = Tokens { text: Some(&text), vocab_size: 10, seed: 0 };
        assert_eq!(tokens.take(Stream::Fill, 7, 7), [1, 2, 3, 4, 5, 1, 2]);
        assert_eq!(tokens.take(Stream::WarmUp, 7, 3), [3, 4, 5]);
        assert_eq!(tokens.take(Stream::Repetition(0), 7, 3), [1, 2, 3]);
        let empty = Tokens { text: Some(&[]), ..tokens };
        assert_eq!(empty.take(Stream::Fill, 0, 3).len(), 3);
    }
}
