//! What makes the router of a synthetic model choose like a real one.
//!
//! `e_score_correction_bias` gives every expert its share of the tokens. That neighbours share experts beyond that
//! comes from what the router sees: some first dimensions of the residual stream are written by the first layer's
//! attention alone, whose convolution and decay spread each token over the next few, and the router's first columns
//! read them more than all others.

use super::rng::{Rng, normal_quantile, subkey};
use super::shape::Shape;
use super::usage::usage;
use super::values::Matrix;

/// Factor on what would else go into the routing dimensions: nothing to speak of, but no zeros.
pub(super) const OFF: f32 = 1.0 / 32.0;

/// Deviation of the gate's logits.
const LOGIT_STD: f64 = 1.0;
/// Part of the logits' variance that comes from the routing dimensions.
const ROUTED_PART: f64 = 0.8;

/// Convolution taps of q, k and v, the last for the current token, in the first layer and in the others.
pub(super) const FIRST_TAPS: [[f32; 4]; 3] = [[0.3, 0.5, 0.8, 4.0], [0.3, 0.5, 0.8, 4.0], [0.1, 0.2, 0.4, 1.0]];
pub(super) const TAPS: [[f32; 4]; 3] = [[0.1, 0.2, 0.3, 1.0], [0.1, 0.2, 0.3, 1.0], [0.1, 0.2, 0.3, 1.0]];

/// Range of `dt_bias`: how fast states decay.
pub(super) const FIRST_DT_BIAS: (f32, f32) = (-4.0, -2.0);
pub(super) const DT_BIAS: (f32, f32) = (-6.0, -1.0);

/// The skew of one model.
#[derive(Debug, Clone)]
pub(super) struct Routing {
    /// First dimensions of the residual stream that steer the router; 0: none do.
    pub(super) dims: usize,
    /// By rank, the most used first.
    usage: Vec<f64>,
    uniform: bool,
    seed: u64,
}

impl Routing {
    pub(super) fn new(shape: &Shape, seed: u64, uniform: bool) -> Self {
        let dims = if uniform { 0 } else { shape.hidden / 8 };
        Self { dims, usage: usage(shape.experts, shape.top_k, uniform), uniform, seed: subkey(seed, 0x7275_6f75) }
    }

    /// `gate.weight` of `layer`.
    pub(super) fn gate(&self, shape: &Shape, layer: usize) -> Matrix {
        let even = (LOGIT_STD / (shape.hidden as f64).sqrt()) as f32;
        if self.uniform {
            return Matrix::new(shape.hidden, even);
        }
        let _ = layer;
        let first = LOGIT_STD * (ROUTED_PART / self.dims as f64).sqrt();
        let others = LOGIT_STD * ((1.0 - ROUTED_PART) / (shape.hidden - self.dims) as f64).sqrt();
        Matrix { first_cols: (self.dims, first as f32), ..Matrix::new(shape.hidden, others as f32) }
    }

    /// `e_score_correction_bias` of `layer`: which experts are used most differs from layer to layer.
    pub(super) fn bias(&self, layer: usize) -> Vec<f32> {
        if self.uniform {
            return vec![0.0; self.usage.len()];
        }
        // Scores that a share p of the tokens exceeds, for logits that are normal.
        let exceeded = |p: f64| 1.0 / (1.0 + (-LOGIT_STD * normal_quantile(1.0 - p.clamp(1e-4, 0.9999))).exp());
        let even = exceeded(self.usage.iter().sum::<f64>() / self.usage.len() as f64);
        let mut bias = vec![0.0; self.usage.len()];
        let order = Rng::new(subkey(self.seed, layer as u64)).permutation(bias.len());
        for (expert, p) in order.into_iter().zip(&self.usage) {
            bias[expert] = (even - exceeded(*p)) as f32;
        }
        bias
    }
}
