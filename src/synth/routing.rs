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
/// Part of the logits' variance that comes from the routing dimensions: so much in K3, less where a token uses so many of
/// few experts that it has many in common with any other.
const ROUTED_PART: f64 = 0.9;
const ROUTED_PART_MIN: f64 = 0.6;

/// Deviation of the embedding: little, so that what a token is reaches the layers through the first one's attention.
const EMBED_STD: f32 = 0.25;
/// With uniform routing: much, so that neighbours look as different as they can.
const EMBED_STD_UNIFORM: f32 = 1.0;

/// Mean squares in the residual stream, as measured in models of several shapes: of what the first layer's attention
/// adds, and of what each later layer adds.
const FIRST_ENERGY: f64 = 0.21;
const LAYER_ENERGY: f64 = 0.046;

/// How long KDA remembers: convolution taps of q, k and v, the last for the current token, and the range of `dt_bias`.
pub(super) type Memory = ([[f32; 4]; 3], (f32, f32));

/// The first layer: strongly positive queries and keys, so that all of the last few tokens answer any query, each less
/// than the one after it.
const FIRST_MEMORY: Memory = ([[0.3, 0.5, 0.8, 4.0], [0.3, 0.5, 0.8, 4.0], [0.3, 0.5, 0.8, 1.0]], (-2.0, 0.0));
/// The others: some channels forget within a token, some remember hundreds.
const MEMORY: Memory = ([[0.1, 0.2, 0.3, 1.0]; 3], (-6.0, -1.0));

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

    /// Deviation of `embed_tokens.weight`.
    pub(super) fn embed_std(&self) -> f32 {
        if self.uniform { EMBED_STD_UNIFORM } else { EMBED_STD }
    }

    /// How long the KDA of `layer` remembers.
    pub(super) fn memory(&self, layer: usize) -> Memory {
        if layer == 0 && !self.uniform { FIRST_MEMORY } else { MEMORY }
    }

    /// `gate.weight` of `layer`.
    pub(super) fn gate(&self, shape: &Shape, layer: usize) -> Matrix {
        let even = (LOGIT_STD / (shape.hidden as f64).sqrt()) as f32;
        if self.uniform {
            return Matrix::new(shape.hidden, even);
        }
        // Deeper layers see the routing dimensions among more else, after their norm.
        let part = self.dims as f64 / shape.hidden as f64;
        let others = f64::from(EMBED_STD).powi(2) + FIRST_ENERGY + LAYER_ENERGY * layer as f64;
        let energy = FIRST_ENERGY / (part * FIRST_ENERGY + (1.0 - part) * others);
        let even = shape.top_k as f64 / shape.experts as f64;
        let routed_part = (ROUTED_PART - 2.8 * (even - 0.036).max(0.0)).max(ROUTED_PART_MIN);
        let first = LOGIT_STD * (routed_part / (energy * self.dims as f64)).sqrt();
        let others = LOGIT_STD * ((1.0 - routed_part) / (shape.hidden - self.dims) as f64).sqrt();
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

#[cfg(test)]
mod tests {
    use super::super::figures::Figures;
    use super::super::shape::Preset;
    use super::*;

    /// A router over hidden states that change slowly in one part and with every token in the other, seen through the
    /// gate's logits: each is normal, and remembers the last tokens as the first layer's attention does.
    fn simulated(shape: &Shape, uniform: bool, tokens: usize) -> Figures {
        const SLOW: [f64; 6] = [0.62, 0.56, 0.42, 0.28, 0.18, 0.10];
        let slow_norm = SLOW.iter().map(|w| w * w).sum::<f64>().sqrt();
        let slow_part: f64 = if uniform { 0.0 } else { 0.75 };
        let routing = Routing::new(shape, 4, uniform);
        let bias = routing.bias(1);
        let mut rng = Rng::new(11);
        let mut noise = vec![[0.0; SLOW.len()]; shape.experts];
        let mut figures = Figures::new(1, shape.experts, shape.top_k);
        for _ in 0..tokens {
            let mut choice: Vec<(f64, u16)> = Vec::with_capacity(shape.experts);
            for (expert, noise) in noise.iter_mut().enumerate() {
                noise.rotate_right(1);
                noise[0] = rng.normal();
                let slow = noise.iter().zip(SLOW).map(|(x, w)| x * w).sum::<f64>() / slow_norm;
                let logit = LOGIT_STD * (slow_part.sqrt() * slow + (1.0 - slow_part).sqrt() * rng.normal());
                choice.push((1.0 / (1.0 + (-logit).exp()) + f64::from(bias[expert]), expert as u16));
            }
            choice.sort_by(|a, b| b.0.total_cmp(&a.0));
            let mut ids: Vec<u16> = choice[..shape.top_k].iter().map(|(_, id)| *id).collect();
            ids.sort_unstable();
            figures.add(&ids);
        }
        figures
    }

    #[test]
    fn the_bias_gives_k3s_skew_and_slow_states_its_sharing() {
        let figures = simulated(&Preset::K3.shape(), false, 2000);
        for (part, wanted) in [(0.04, 0.45), (0.08, 0.62)] {
            let got = figures.most_used(part);
            assert!((got - wanted).abs() <= 0.02, "{part} of the experts: got {got:.3}, wanted {wanted}");
        }
        for (back, wanted) in [(1, 0.34), (2, 0.23), (4, 0.13), (8, 0.09)] {
            let got = figures.shared(back);
            assert!((got - wanted).abs() <= 0.02, "{back} apart: got {got:.3}, wanted {wanted}");
        }
    }

    #[test]
    fn uniform_routing_has_no_bias_and_no_skew() {
        let figures = simulated(&Preset::K3.shape(), true, 2000);
        assert!(figures.most_used(0.04) < 0.07, "{}", figures.most_used(0.04));
        assert!(figures.shared(1) < 0.03, "{}", figures.shared(1));
    }

    #[test]
    fn each_layer_prefers_other_experts() {
        let routing = Routing::new(&Preset::K3.shape(), 4, false);
        let hottest = |layer| {
            let bias = routing.bias(layer);
            (0..bias.len()).max_by(|a, b| bias[*a].total_cmp(&bias[*b])).unwrap()
        };
        assert!((1..6).any(|layer| hottest(layer) != hottest(0)));
        assert!(routing.bias(3).iter().all(|bias| bias.is_finite()));
        assert_eq!(routing.bias(3), routing.bias(3));
    }
}
