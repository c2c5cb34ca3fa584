//! AttnRes: the softmax mix over completed blocks and the running sum.

use super::Compute;

#[expect(unused_variables, reason = "signatures")]
impl Compute {
    /// AttnRes: for each row, out = Σ p_i v_i over the candidates, p = softmax of Σ_d rms(v_i)_d · query_d.
    /// `candidates`: each `[T, hidden]`, oldest block first, the running sum last; `query` = norm.weight · proj.weight.
    pub fn attn_res_mix(&self, candidates: &[&[f32]], query: &[f32], eps: f32, out: &mut [f32]) {
        todo!()
    }
}
