//! Every buffer a step needs, allocated once for the largest step, with its shape; nothing large is allocated later.

use super::{kda, mla, mlp, moe};
use crate::config::{FeedForwardKind, ModelConfig};
use crate::error::Result;
use crate::memory::Floats;

/// Buffers for steps of up to `rows_max` rows.
pub struct Scratch {
    rows_max: usize,
    /// Running sum `[rows, hidden_size]`.
    pub(super) sum: Floats,
    /// Completed AttnRes blocks `[blocks, rows, hidden_size]`.
    pub(super) blocks: Floats,
    /// Mixed rows `[rows, hidden_size]`; after a step: the normed rows that `lm_head` reads.
    pub(super) mixed: Floats,
    /// Normed rows `[rows, hidden_size]`.
    pub(super) normed: Floats,
    /// What a half-layer adds `[rows, hidden_size]`.
    pub(super) delta: Floats,
    /// Working room of whichever block runs; each block states its need.
    pub(super) work: Floats,
}

impl Scratch {
    /// Buffers for steps of up to `rows_max` rows of a model of this `config`.
    ///
    /// # Errors
    /// Kind `Memory` when they cannot be allocated.
    pub fn new(config: &ModelConfig, rows_max: usize) -> Result<Self> {
        let rows = rows_max * config.hidden_size;
        let zeroed = |n| Floats::zeroed(n, "the buffers of a step");
        Ok(Self {
            rows_max,
            sum: zeroed(rows)?,
            blocks: zeroed(rows * blocks(config))?,
            mixed: zeroed(rows)?,
            normed: zeroed(rows)?,
            delta: zeroed(rows)?,
            work: zeroed(work_floats(config, rows_max))?,
        })
    }

    /// Bytes that [`Scratch::new`] will take.
    pub fn planned_bytes(config: &ModelConfig, rows_max: usize) -> u64 {
        let floats = rows_max * config.hidden_size * (4 + blocks(config)) + work_floats(config, rows_max);
        // Routes and the rows by expert: ids, weights, positions and offsets, at most this many bytes a choice.
        let routes = config.moe.as_ref().map_or(0, |moe| rows_max * moe.num_experts_per_token * 32);
        (floats * size_of::<f32>() + routes) as u64
    }

    /// Most rows of one step.
    pub fn rows_max(&self) -> usize {
        self.rows_max
    }

    /// After a step: the final normed hidden rows `[rows, hidden_size]`, input of the head.
    pub fn output(&self) -> &[f32] {
        &self.mixed
    }
}

/// AttnRes blocks that `config`'s model completes.
pub(super) fn blocks(config: &ModelConfig) -> usize {
    config.attn_res_block_size.map_or(0, |size| config.layers.len().div_ceil(size))
}

fn work_floats(config: &ModelConfig, rows: usize) -> usize {
    let dense = config.layers.iter().any(|layer| layer.feed_forward == FeedForwardKind::Dense);
    [
        kda::work_floats(config, rows),
        mla::work_floats(config, rows),
        if dense { mlp::work_floats(rows, config.intermediate_size) } else { 0 },
        moe::work_floats(config, rows),
    ]
    .into_iter()
    .max()
    .unwrap_or(0)
}

/// Cuts a working buffer into pieces, front to back.
pub(super) struct Carver<'a>(&'a mut [f32]);

impl<'a> Carver<'a> {
    pub(super) fn new(work: &'a mut [f32]) -> Self {
        Self(work)
    }

    /// The next `n` floats, with whatever an earlier block left in them.
    pub(super) fn take(&mut self, n: usize) -> &'a mut [f32] {
        let (piece, rest) = std::mem::take(&mut self.0).split_at_mut(n);
        self.0 = rest;
        piece
    }

    /// What is left, to be cut again by someone who ends first.
    pub(super) fn rest(&mut self) -> Carver<'_> {
        Carver(self.0)
    }
}
