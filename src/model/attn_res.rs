//! Attention residuals: the block sums a step keeps, and the mix that every half-layer reads instead of the plain sum.
//!
//! Source: `KimiDecoderLayer._forward_attn_residual` of the released modelling code.

use crate::kernels::Compute;

/// Completed block sums and the running sum of a step's rows. Without `attn_res_block_size` there are no blocks and the
/// mix is the running sum.
pub(super) struct Residual<'a> {
    /// Room for all blocks, `[blocks_max, rows, hidden_size]`.
    blocks: &'a mut [f32],
    completed: usize,
    /// The running sum `[rows, hidden_size]`.
    pub(super) sum: &'a mut [f32],
    /// Set at a block's start, when the running sum holds nothing yet.
    empty: bool,
}

impl<'a> Residual<'a> {
    /// Starts with `sum` = the embedded rows; `blocks` has room for every block of the model.
    pub(super) fn new(blocks: &'a mut [f32], sum: &'a mut [f32]) -> Self {
        Self { blocks, completed: 0, sum, empty: false }
    }

    /// out `[rows, hidden_size]` = mix of the blocks and the running sum by `query`, or the running sum itself.
    pub(super) fn mix(&self, compute: &Compute, query: Option<&[f32]>, eps: f32, out: &mut [f32]) {
        self.mix_with(compute, self.sum, query, eps, out);
    }

    /// As [`Residual::mix`], with `sum` in the running sum's place.
    pub(super) fn mix_with(&self, compute: &Compute, sum: &[f32], query: Option<&[f32]>, eps: f32, out: &mut [f32]) {
        match query {
            Some(query) if self.completed > 0 => {
                let mut candidates: Vec<&[f32]> = self.blocks.chunks_exact(sum.len()).take(self.completed).collect();
                candidates.push(sum);
                compute.attn_res_mix(&candidates, query, eps, out);
            }
            _ => out.copy_from_slice(sum),
        }
    }

    /// Ends a block: the running sum joins the candidates and starts anew.
    pub(super) fn complete_block(&mut self) {
        let size = self.sum.len();
        self.blocks[self.completed * size..][..size].copy_from_slice(self.sum);
        self.completed += 1;
        self.empty = true;
    }

    /// Adds a half-layer's output to the running sum.
    pub(super) fn add(&mut self, compute: &Compute, x: &[f32]) {
        if std::mem::take(&mut self.empty) {
            self.sum.copy_from_slice(x);
        } else {
            compute.add(self.sum, x);
        }
    }
}
