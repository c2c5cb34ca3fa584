//! One sequence being computed: cuts what it is fed into steps and hands out logits.

use crate::engine::{Engine, Progress};
use crate::error::{Error, Result};
use crate::model::{Mark, Observer, Segment, Sequence};

/// Rows whose logits are computed at a time when every position is wanted.
pub(crate) const LOGIT_ROWS: usize = 16;

/// One sequence being computed.
pub struct Session<'a> {
    engine: &'a Engine,
    sequence: Sequence,
    /// `[up to LOGIT_ROWS, vocab_size]`.
    logits: Vec<f32>,
}

impl<'a> Session<'a> {
    pub(crate) fn new(engine: &'a Engine, sequence: Sequence) -> Self {
        Self { engine, sequence, logits: Vec::new() }
    }

    /// Appends `ids` to the sequence, in steps of at most the planned rows, and returns the logits `[vocab]` after the
    /// last. An error leaves the session unusable.
    ///
    /// # Errors
    /// `Usage` for ids outside the vocabulary, nothing to feed, or a context that is full (with the numbers); `Io`;
    /// `Numerical` with layer and position; `Interrupted`.
    pub fn feed(&mut self, ids: &[u32], progress: &dyn Progress) -> Result<&[f32]> {
        self.feed_observed(ids, progress, &mut ())
    }

    /// As [`Session::feed`], with `observer` looking on.
    ///
    /// # Errors
    /// As [`Session::feed`].
    pub fn feed_observed(
        &mut self,
        ids: &[u32],
        progress: &dyn Progress,
        observer: &mut dyn Observer,
    ) -> Result<&[f32]> {
        self.check(ids)?;
        let engine = self.engine;
        let mut scratch = engine.scratch();
        let vocab = engine.config().vocab_size;
        self.logits.resize(vocab, 0.0);
        let mut done = 0;
        for step in ids.chunks(scratch.rows_max()) {
            let mut watch = Watch { inner: observer, progress, engine, done, total: ids.len() };
            watch.begin();
            let segment = Segment { sequence: &mut self.sequence, tokens: step, tentative: false };
            engine.model().forward(engine.machine(), &mut [segment], &mut scratch, &mut watch)?;
            done += step.len();
            engine.pass_notices_on(progress);
            if done == ids.len() {
                let hidden = engine.config().hidden_size;
                let last = &scratch.output()[(step.len() - 1) * hidden..step.len() * hidden];
                engine.model().logits(engine.machine(), last, self.sequence.len() - 1, &mut self.logits)?;
            }
        }
        Ok(&self.logits[..vocab])
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
        self.check(ids)?;
        let engine = self.engine;
        let (hidden, vocab) = (engine.config().hidden_size, engine.config().vocab_size);
        let mut scratch = engine.scratch();
        self.logits.resize(LOGIT_ROWS.min(ids.len()) * vocab, 0.0);
        let mut done = 0;
        for step in ids.chunks(scratch.rows_max()) {
            let mut watch = Watch { inner: &mut (), progress, engine, done, total: ids.len() };
            watch.begin();
            let segment = Segment { sequence: &mut self.sequence, tokens: step, tentative: false };
            engine.model().forward(engine.machine(), &mut [segment], &mut scratch, &mut watch)?;
            done += step.len();
            engine.pass_notices_on(progress);
            let mut position = self.sequence.len() - step.len();
            for rows in scratch.output()[..step.len() * hidden].chunks(LOGIT_ROWS * hidden) {
                let logits = &mut self.logits[..rows.len() / hidden * vocab];
                engine.model().logits(engine.machine(), rows, position, logits)?;
                for logits in logits.chunks_exact(vocab) {
                    each(position, logits)?;
                    position += 1;
                }
            }
        }
        Ok(())
    }

    /// Tokens so far.
    pub fn len(&self) -> usize {
        self.sequence.len()
    }

    /// Whether nothing was fed yet.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Marks the place reached, for [`Session::rewind`].
    ///
    /// # Errors
    /// As [`Sequence::mark`].
    pub fn mark(&self) -> Result<Mark> {
        self.sequence.mark()
    }

    /// Goes back to `mark`.
    ///
    /// # Errors
    /// As [`Sequence::rewind`].
    pub fn rewind(&mut self, mark: &Mark) -> Result<()> {
        self.sequence.rewind(mark)
    }

    /// The state behind it.
    pub fn sequence(&self) -> &Sequence {
        &self.sequence
    }

    /// Everything that can be refused before a step begins, so that a refusal changes nothing.
    fn check(&self, ids: &[u32]) -> Result<()> {
        let vocab = self.engine.config().vocab_size;
        if ids.is_empty() {
            return Err(Error::usage("nothing to compute: no token was given"));
        }
        if let Some((at, id)) = ids.iter().enumerate().find(|(_, id)| **id as usize >= vocab) {
            return Err(Error::usage(format!(
                "token id {id} (number {}) is outside the vocabulary of {vocab}",
                at + 1
            )));
        }
        if self.len() + ids.len() > self.sequence.context() {
            return Err(Error::usage(format!(
                "the context is full: {} tokens held, {} more asked, room for {}",
                self.len(),
                ids.len(),
                self.sequence.context()
            ))
            .hint("a larger --context makes room for more"));
        }
        Ok(())
    }
}

/// Passes a step's progress on while letting another observer see everything.
struct Watch<'a> {
    inner: &'a mut dyn Observer,
    progress: &'a dyn Progress,
    engine: &'a Engine,
    done: usize,
    total: usize,
}

impl Watch<'_> {
    /// A step's first layer may take minutes: the phase is told before it, not after.
    fn begin(&self) {
        let layers = self.engine.config().layers.len();
        self.progress.prefill(self.done, self.total, 0, layers, self.engine.expert_bytes_read());
    }
}

impl Observer for Watch<'_> {
    fn layer(&mut self, layer: usize, hidden: &[f32]) {
        self.inner.layer(layer, hidden);
        let layers = self.engine.config().layers.len();
        self.progress.prefill(self.done, self.total, layer + 1, layers, self.engine.expert_bytes_read());
    }

    fn guess(&mut self, layer: usize, experts: &[u16], likely: usize) {
        self.inner.guess(layer, experts, likely);
    }

    fn routes(&mut self, layer: usize, routes: &crate::model::Routes) {
        self.engine.record_routes(layer, routes);
        self.inner.routes(layer, routes);
    }
}
