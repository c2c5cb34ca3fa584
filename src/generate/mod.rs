//! Decides the rows of the next step: sessions, sampling, stop rules.

use crate::engine::Progress;
use crate::error::Result;

/// How a token is chosen from logits. Temperature 0 is greedy and ignores the rest.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0: the largest logit, ties to the smaller id.
    pub temperature: f32,
    /// Keep the k most likely; 0: all.
    pub top_k: usize,
    /// Keep the most likely whose probabilities sum to this; 1: all.
    pub top_p: f32,
    /// Keep those at least this share of the most likely; 0: all.
    pub min_p: f32,
    /// Same seed, same text.
    pub seed: u64,
}

/// Why a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// A stop id.
    Eos,
    /// `-n` reached.
    Length,
    /// A stop string.
    StopString,
    /// A signal.
    Interrupted,
}

/// Chooses tokens; holds the random state.
pub struct Sampler {
    _private: (),
}

#[expect(unused_variables, reason = "signatures")]
impl Sampler {
    /// # Errors
    /// Kind `Usage` for settings outside their ranges.
    pub fn new(sampling: &Sampling) -> Result<Self> {
        todo!()
    }

    /// The next token from `logits` `[vocab]`.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        todo!()
    }
}

/// One sequence being computed.
pub struct Session<'a> {
    _engine: std::marker::PhantomData<&'a ()>,
}

#[expect(unused_variables, reason = "signatures")]
impl Session<'_> {
    /// Appends `ids` to the sequence, in steps of at most the planned rows, and returns the logits `[vocab]` after the
    /// last. An error leaves the session unusable.
    ///
    /// # Errors
    /// `Usage` for ids outside the vocabulary, nothing to feed, or a context that is full (with the numbers); `Io`;
    /// `Numerical` with layer and position; `Interrupted`.
    pub fn feed(&mut self, ids: &[u32], progress: &dyn Progress) -> Result<&[f32]> {
        todo!()
    }

    /// As [`Session::feed`], handing the logits of every position, in order, to `each(position, logits)`.
    ///
    /// # Errors
    /// As [`Session::feed`], or what `each` returns.
    pub fn feed_all(
        &mut self,
        ids: &[u32],
        progress: &dyn Progress,
        each: &mut dyn FnMut(usize, &[f32]) -> Result<()>,
    ) -> Result<()> {
        todo!()
    }

    /// Tokens so far.
    pub fn len(&self) -> usize {
        todo!()
    }

    /// Whether nothing was fed yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }
}
