//! RMSNorm, gated RMSNorm and the per-head L2 norm.

use super::Compute;

#[expect(unused_variables, reason = "signatures")]
impl Compute {
    /// RMSNorm of every row: out = x / sqrt(mean(x²) + eps) · weight, x and out `[T, weight.len()]`.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        todo!()
    }

    /// x = rmsnorm(x) · weight · sigmoid(gate), rows of `weight.len()`; x and gate `[n, weight.len()]`. KDA's output.
    pub fn gated_rms_norm(&self, x: &mut [f32], gate: &[f32], weight: &[f32], eps: f32) {
        todo!()
    }

    /// Per head of width `dim`: x = x / sqrt(Σx² + eps) · scale. x is any number of heads.
    pub fn l2_norm(&self, x: &mut [f32], dim: usize, eps: f32, scale: f32) {
        todo!()
    }
}
