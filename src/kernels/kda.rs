//! Kimi Delta Attention: decay and the gated delta rule.

use super::Compute;

#[expect(unused_variables, reason = "signatures")]
impl Compute {
    /// KDA decay: g `[T, heads, dim]` → α = exp(log α) in place; `a` = exp(A_log) `[heads]`, `dt_bias` `[heads · dim]`.
    /// log α = lower_bound · sigmoid(a (g + dt_bias)), or −a · softplus(g + dt_bias) without a bound.
    pub fn kda_decay(&self, g: &mut [f32], a: &[f32], dt_bias: &[f32], lower_bound: Option<f32>) {
        todo!()
    }

    /// The gated delta rule over T rows of one sequence. `state` `[heads, d_k, d_v]` is updated in place; q, k, alpha, v
    /// `[T, heads, dim]`, beta `[T, heads]`; out `[T, heads, dim]`, or empty when only the state is wanted (same bits).
    ///
    /// Per row: S ← diag(α) S; r = Sᵀk (keys ascending, fused, from +0.0); S ← S + (β k) ⊗ (v − r); o = Sᵀ q likewise.
    #[expect(clippy::too_many_arguments, reason = "the rule's operands")]
    pub fn kda_rows(
        &self,
        state: &mut [f32],
        heads: usize,
        dim: usize,
        q: &[f32],
        k: &[f32],
        alpha: &[f32],
        v: &[f32],
        beta: &[f32],
        out: &mut [f32],
    ) {
        todo!()
    }
}
