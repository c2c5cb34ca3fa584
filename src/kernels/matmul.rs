//! Matrix × rows: bf16, f32 and MXFP4 weights, f32 activations, canonical dot products.

use super::{Compute, Matrix};

#[expect(unused_variables, reason = "signatures")]
impl Compute {
    /// y `[T, w.rows]` = x `[T, w.cols]` · Wᵀ. T follows from the lengths.
    ///
    /// Each dot product runs in 16 partial sums by fused multiply-add (lane i takes columns i, i+16, …; columns missing
    /// from the last group count as w = 0, x = 0), then [`lanes::Lanes::sum`]'s tree.
    pub fn matmul(&self, w: Matrix<'_>, x: &[f32], y: &mut [f32]) {
        todo!()
    }

    /// Several matrices on the same x in one go: `y[i]` `[T, w[i].rows]`. Same bits as one by one.
    pub fn matmul_each(&self, w: &[Matrix<'_>], x: &[f32], y: &mut [&mut [f32]]) {
        todo!()
    }

    /// For each row t and head h: y `[T, heads, cols]` = Σ_d x `[T, heads, x_stride]`\[d\] · W_h\[d, :\], with W_h the
    /// rows `h · head_rows + first_row ..` of `w` (`[heads · head_rows, cols]`) and d < `depth`. Sum over d ascending by
    /// fused multiply-add from +0.0. Absorbs `kv_b`'s key half into the query.
    #[expect(clippy::too_many_arguments, reason = "shapes")]
    pub fn matmul_transposed_heads(
        &self,
        w: Matrix<'_>,
        heads: usize,
        head_rows: usize,
        first_row: usize,
        depth: usize,
        x: &[f32],
        x_stride: usize,
        y: &mut [f32],
    ) {
        todo!()
    }

    /// For each row t and head h: y `[T, heads, depth]` = W_h x `[T, heads, w.cols]`\[h\], with W_h the rows
    /// `h · head_rows + first_row ..+ depth` of `w`. Dot products as in [`Compute::matmul`]. Expands the attended latent
    /// to values.
    pub fn matmul_heads(
        &self,
        w: Matrix<'_>,
        heads: usize,
        head_rows: usize,
        first_row: usize,
        depth: usize,
        x: &[f32],
        y: &mut [f32],
    ) {
        todo!()
    }

    /// Rows of an embedding: out `[ids, cols]`.
    pub fn gather(&self, w: Matrix<'_>, ids: &[u32], out: &mut [f32]) {
        todo!()
    }
}
