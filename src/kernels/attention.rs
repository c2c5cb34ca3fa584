//! Latent attention over the cached 576 (rank + rope) values a token.

use super::Compute;

#[expect(unused_variables, reason = "signatures")]
impl Compute {
    /// Latent attention of T new rows of one sequence. q `[T, heads, width]` with width = rank + rope; `cache`
    /// `[past + T, width]`, row = latent then rope key; row t sees the first `past + t + 1` of it. out `[T, heads, rank]`
    /// = softmax(q · cache · scale) · latents. Softmax and sums run over keys in a fixed order.
    #[expect(clippy::too_many_arguments, reason = "shapes")]
    pub fn latent_attention(
        &self,
        q: &[f32],
        cache: &[f32],
        past: usize,
        heads: usize,
        width: usize,
        rank: usize,
        scale: f32,
        out: &mut [f32],
    ) {
        todo!()
    }
}
