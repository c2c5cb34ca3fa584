//! The prompt, then token by token until something ends the answer.

use std::time::Instant;

use super::answer::{Answer, Next};
use crate::engine::{Engine, Progress};
use crate::error::Result;
use crate::generate::{Sampler, StopReason};
use crate::interrupt::Interrupt;
use crate::report::json::{Timings, rate};
use crate::report::progress::Reporter;
use crate::text::StopIds;

/// What is computed, and how far.
pub(super) struct Job<'a> {
    pub engine: &'a Engine,
    pub prompt: &'a [u32],
    /// Most new tokens.
    pub limit: usize,
    /// Ids that end the answer.
    pub stops: Option<&'a StopIds>,
    pub reporter: &'a Reporter,
    pub interrupt: &'a Interrupt,
}

/// Computes the prompt and hands token after token to `answer`. `None`: nobody reads the answer any more.
///
/// # Errors
/// As the engine and stdout report; `Interrupted`. What `answer` got until then stands.
pub(super) fn generate(
    job: &Job<'_>,
    sampler: &mut Sampler,
    clock: &mut Clock,
    answer: &mut Answer<'_>,
) -> Result<Option<StopReason>> {
    let mut session = job.engine.session()?;
    let mut logits = session.feed(job.prompt, job.reporter)?;
    clock.prefilled();
    job.reporter.finish();
    answer.begin();
    for left in (0..job.limit).rev() {
        job.interrupt.check()?;
        let id = sampler.sample(logits);
        clock.token();
        if job.stops.is_some_and(|stops| stops.contains(id)) {
            return Ok(Some(StopReason::Eos));
        }
        match answer.token(id)? {
            Next::More => {}
            Next::StopString => return Ok(Some(StopReason::StopString)),
            Next::Closed if job.stops.is_some() => return Ok(Some(StopReason::Eos)),
            Next::Closed => {}
            Next::PipeClosed => return Ok(None),
        }
        // The last token's own logits are nobody's.
        if left > 0 {
            logits = session.feed(&[id], &Notices(job.reporter))?;
        }
    }
    Ok(Some(StopReason::Length))
}

/// Progress of one token is its text; only notices are passed on.
struct Notices<'a>(&'a Reporter);

impl Progress for Notices<'_> {
    fn loading(&self, _done: u64, _total: u64) {}
    fn prefill(&self, _done: usize, _total: usize, _layer: usize, _layers: usize, _bytes: u64) {}
    fn notice(&self, text: &str) {
        self.0.notice(text);
    }
}

/// When what happened.
pub(super) struct Clock {
    start: Instant,
    loaded: Option<Instant>,
    prefilled: Option<Instant>,
    first: Option<Instant>,
    last: Option<Instant>,
    tokens: usize,
}

impl Clock {
    /// Runs from `start`.
    pub(super) fn start(start: Instant) -> Self {
        Self { start, loaded: None, prefilled: None, first: None, last: None, tokens: 0 }
    }

    /// The model is ready.
    pub(super) fn loaded(&mut self) {
        self.loaded = Some(Instant::now());
    }

    fn prefilled(&mut self) {
        self.prefilled = Some(Instant::now());
    }

    fn token(&mut self) {
        let now = Instant::now();
        self.first.get_or_insert(now);
        self.last = Some(now);
        self.tokens += 1;
    }

    /// As reported, for a prompt of `prompt_tokens`.
    pub(super) fn timings(&self, prompt_tokens: usize) -> Timings {
        let between = |from: Option<Instant>, to: Option<Instant>| Some((to? - from?).as_secs_f64());
        let start = Some(self.start);
        let prefill_s = between(self.loaded, self.prefilled);
        let decode_s = between(self.first, self.last);
        Timings {
            load_s: between(start, self.loaded),
            prefill_s,
            first_token_s: between(start, self.first),
            decode_s,
            prefill_tps: rate(prompt_tokens, prefill_s),
            decode_tps: rate(self.tokens.saturating_sub(1), decode_s),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_did_not_happen_has_no_time() {
        let mut clock = Clock::start(Instant::now());
        clock.loaded();
        let timings = clock.timings(5);
        assert_eq!((timings.prefill_s, timings.first_token_s, timings.decode_s), (None, None, None));
        clock.prefilled();
        clock.token();
        let timings = clock.timings(5);
        assert_eq!((timings.decode_s, timings.decode_tps), (Some(0.0), None));
        assert!(timings.first_token_s.is_some());
    }
}
