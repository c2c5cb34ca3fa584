//! One step: rows of one or more sequences in, their final hidden rows out; layer by layer, each needed expert once.

use super::attn_res::Residual;
use super::lookahead::{self, Next};
use super::scratch::{Carver, Scratch};
use super::sequence::Sequence;
use super::{Attention, FeedForward, Machine, Model, Observer, kda, mla, mlp, moe};
use crate::error::{Error, Result};

/// The rows that one sequence has in a step: tokens at its next positions.
pub struct Segment<'s> {
    /// Whose.
    pub sequence: &'s mut Sequence,
    /// At least one.
    pub tokens: &'s [u32],
    /// Whether the rows may yet be rejected: then they count only after [`Sequence::commit`], and cost room and time to
    /// keep. Rows that are certain count as soon as the step has ended.
    pub tentative: bool,
}

/// Position of row `row` of a step in its own sequence.
pub(super) fn position(segments: &[Segment<'_>], mut row: usize) -> usize {
    for segment in segments {
        if row < segment.tokens.len() {
            return segment.sequence.len() + row;
        }
        row -= segment.tokens.len();
    }
    unreachable!("a row belongs to a segment")
}

impl Model {
    /// Computes a step of all rows of all `segments`, in order; `scratch.output()` then holds their final hidden rows.
    ///
    /// # Errors
    /// Kind `Usage` for a token outside the vocabulary, no rows, more rows than `scratch` holds or a full context, with
    /// nothing changed; `Numerical`, `Io` or an interrupt from within, which leave sequences with certain rows unusable.
    pub fn forward(
        &self,
        machine: Machine<'_>,
        segments: &mut [Segment<'_>],
        scratch: &mut Scratch,
        observer: &mut dyn Observer,
    ) -> Result<()> {
        let rows = self.check(segments, scratch)?;
        for segment in segments.iter_mut() {
            segment.sequence.begin(segment.tentative);
        }
        let (compute, config) = (machine.compute, &self.config);
        let size = rows * config.hidden_size;
        let eps = config.rms_norm_eps;
        let ids: Vec<u32> = segments.iter().flat_map(|segment| segment.tokens).copied().collect();
        let (mixed, normed, delta) =
            (&mut scratch.mixed[..size], &mut scratch.normed[..size], &mut scratch.delta[..size]);
        let work = &mut scratch.work[..];

        compute.gather(self.embed_tokens.matrix(), &ids, &mut scratch.sum[..size]);
        let mut residual = Residual::new(&mut scratch.blocks, &mut scratch.sum[..size]);
        for (index, layer) in self.layers.iter().enumerate() {
            let (attention_query, mlp_query) = match &layer.attn_res {
                Some((attention, mlp)) => (Some(&attention[..]), Some(&mlp[..])),
                None => (None, None),
            };
            residual.mix(compute, attention_query, eps, mixed);
            if config.attn_res_block_size.is_some_and(|size| index % size == 0) {
                residual.complete_block();
            }
            compute.rms_norm(mixed, &layer.input_layernorm, eps, normed);
            match &layer.attention {
                Attention::Kda(w) => {
                    kda::forward(compute, config, w, index, segments, normed, Carver::new(work), delta);
                }
                Attention::Mla(w) => {
                    mla::forward(compute, config, w, index, segments, normed, Carver::new(work), delta);
                }
            }
            residual.add(compute, delta);
            machine.interrupt.check()?;

            residual.mix(compute, mlp_query, eps, mixed);
            compute.rms_norm(mixed, &layer.post_attention_layernorm, eps, normed);
            let next = machine.lookahead.then(|| Next::after(index, &self.layers, &residual, segments)).flatten();
            match &layer.feed_forward {
                FeedForward::Dense(w) => {
                    if let Some(next) = next {
                        lookahead::tell_from_dense(machine, config, &next, Carver::new(work), observer);
                    }
                    mlp::forward(compute, w, config.activation, normed, Carver::new(work), delta);
                }
                FeedForward::Moe(w) => {
                    moe::forward(
                        machine,
                        config,
                        w,
                        index,
                        segments,
                        normed,
                        next,
                        Carver::new(work),
                        delta,
                        observer,
                    )?;
                }
            }
            residual.add(compute, delta);
            machine.interrupt.check()?;
            observer.layer(index, residual.sum);
        }
        residual.mix(compute, self.output_attn_res.as_deref(), eps, normed);
        compute.rms_norm(normed, &self.norm, eps, mixed);
        machine.interrupt.check()?;
        for segment in segments.iter_mut() {
            segment.sequence.end(segment.tokens.len(), segment.tentative);
        }
        Ok(())
    }

    /// logits `[rows, vocab_size]` of final hidden rows `hidden` `[rows, hidden_size]`, the first of them at `position`.
    ///
    /// # Errors
    /// Kind `Numerical` with the position when a logit is not finite; an interrupt.
    pub fn logits(&self, machine: Machine<'_>, hidden: &[f32], position: usize, logits: &mut [f32]) -> Result<()> {
        machine.compute.matmul(self.lm_head.matrix(), hidden, logits);
        machine.interrupt.check()?;
        for (row, logits) in logits.chunks_exact(self.config.vocab_size).enumerate() {
            if !logits.iter().all(|x| x.is_finite()) {
                return Err(Error::numerical(format!(
                    "logits after layer {} are not finite at position {}",
                    self.layers.len() - 1,
                    position + row
                ))
                .hint("a damaged weight is the usual cause; `deltafin inspect` checks the files"));
            }
        }
        Ok(())
    }

    /// Number of rows, or why there can be no such step.
    fn check(&self, segments: &[Segment<'_>], scratch: &Scratch) -> Result<usize> {
        let rows: usize = segments.iter().map(|segment| segment.tokens.len()).sum();
        if segments.iter().any(|segment| segment.tokens.is_empty()) || rows == 0 {
            return Err(Error::usage("a step needs at least one token of each sequence"));
        }
        if rows > scratch.rows_max() {
            return Err(Error::usage(format!("a step of {rows} rows, where {} fit", scratch.rows_max())));
        }
        for segment in segments {
            segment.sequence.check_room(segment.tokens.len())?;
            if let Some(id) = segment.tokens.iter().find(|&&id| id as usize >= self.config.vocab_size) {
                return Err(Error::usage(format!(
                    "token id {id} is outside the vocabulary of {} (0..={})",
                    self.config.vocab_size,
                    self.config.vocab_size - 1
                )));
            }
        }
        Ok(rows)
    }
}
