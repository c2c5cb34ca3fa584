//! The short causal convolution in front of KDA.

use super::Compute;

#[expect(unused_variables, reason = "signatures")]
impl Compute {
    /// Causal depthwise convolution with SiLU. `window` `[taps − 1 + T, channels]`: history, then the step's rows;
    /// `weight` `[taps, channels]`, the last tap meets the current row; out `[T, channels]`.
    pub fn short_conv(&self, window: &[f32], weight: &[f32], channels: usize, out: &mut [f32]) {
        todo!()
    }
}
