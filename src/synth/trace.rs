//! Traces of expert use with the sharing and the skew of real routing, made without a model, O(1) a draw: for
//! simulating caches and drives at full scale.
//!
//! Each expert of a token is, at first, one of the token before (with a probability of a quarter or so), of the one
//! before that, or a fresh one by the usage of the layer: an autoregressive process of order 2, whose two weights
//! follow from the measured sharing by the Yule-Walker equations. A part of the fresh ones comes from a set that the
//! text brings with it, so that what one trace teaches about another is less than everything.

use super::rng::{Rng, subkey};
use super::usage::{common, usage};

/// Share of its experts that a token has in common with the one before, and with the one before that.
const SHARED: [f64; 2] = [0.34, 0.23];
/// Tries to find an expert that the token does not have yet, before the lowest free one is taken. Reached only where
/// nearly all experts are used.
const TRIES: usize = 64;
/// Tries among the experts of an earlier token, before a fresh one will do.
const REPEAT_TRIES: usize = 16;

/// What a trace is of.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct TraceShape {
    /// Layers with routed experts.
    pub layers: usize,
    /// Experts a layer; at most 65535.
    pub experts: usize,
    /// Experts a token uses of a layer.
    pub top_k: usize,
}

impl TraceShape {
    /// The released K3.
    pub const K3: TraceShape = TraceShape { layers: 92, experts: 896, top_k: 16 };
}

/// An endless source of tokens' experts.
#[derive(Debug, Clone)]
pub struct Trace {
    shape: TraceShape,
    layers: Vec<Layer>,
    /// Probabilities that an expert is one of the token before, and one of the last two.
    repeat: [f64; 2],
    /// The current token's and the two before, `[3][layers · top_k]`; the current one at `token % 3`.
    recent: [Vec<u16>; 3],
    /// For each expert the last token of the current layer's that took it.
    taken: Vec<u64>,
    token: u64,
    rng: Rng,
}

/// Where fresh experts of one layer come from.
#[derive(Debug, Clone)]
struct Layer {
    usage: Alias,
    /// What an expert of the layer's own usage is called in this text: most are called what they are.
    names: Vec<u16>,
}

/// Share of the most used experts that a text exchanges for others.
const TEXT_SHARE: f64 = 0.12;

impl Trace {
    /// A trace of a model of `shape`. `model` decides which experts of a layer are used most, `text` everything else:
    /// two texts of one model differ in a part of that, too. With `uniform` all experts are alike and tokens have
    /// nothing to do with each other.
    ///
    /// # Panics
    /// When `shape` has no layers, no experts, or a `top_k` that is not within 1 to `experts`.
    pub fn new(shape: TraceShape, model: u64, text: u64, uniform: bool) -> Self {
        let TraceShape { layers, experts, top_k } = shape;
        assert!(layers > 0 && experts <= usize::from(u16::MAX) && (1..=experts).contains(&top_k), "{shape:?}");
        let usage = usage(experts, top_k, uniform);
        let repeat = if uniform { [0.0; 2] } else { repeats(common(&usage, top_k)) };
        // Drawn one after the other without repetition, an expert of weight w is among them with about 1 - exp(-w).
        let weights: Vec<f64> = usage.iter().map(|p| -(1.0 - p.min(0.999)).ln()).collect();
        let layers = (0..layers as u64).map(|layer| Layer::new(&weights, subkey(model, layer), subkey(text, layer)));
        let layers: Vec<Layer> = layers.collect();
        let row = vec![0; layers.len() * top_k];
        Self {
            shape,
            layers,
            repeat,
            recent: [row.clone(), row.clone(), row],
            taken: vec![0; experts],
            token: 0,
            rng: Rng::new(subkey(subkey(model, u64::MAX), text)),
        }
    }

    /// The shape.
    pub fn shape(&self) -> TraceShape {
        self.shape
    }

    /// The next token's experts, `[layers, top_k]`, ascending within a layer.
    pub fn next_token(&mut self) -> &[u16] {
        let top_k = self.shape.top_k;
        let now = (self.token % 3) as usize;
        let mut row = std::mem::take(&mut self.recent[now]);
        for (layer, ids) in row.chunks_exact_mut(top_k).enumerate() {
            // Numbers the layers of all tokens, so that `taken` needs no clearing.
            let mark = self.token * self.shape.layers as u64 + layer as u64 + 1;
            for id in ids.iter_mut() {
                *id = self.draw(layer, mark);
            }
            ids.sort_unstable();
        }
        self.recent[now] = row;
        self.token += 1;
        &self.recent[now]
    }

    /// An expert of `layer` that the token does not have yet.
    fn draw(&mut self, layer: usize, mark: u64) -> u16 {
        let back = self.source();
        for attempt in 0..TRIES {
            let id = if back > 0 && attempt < REPEAT_TRIES { self.repeated(layer, back) } else { self.fresh(layer) };
            if self.taken[usize::from(id)] != mark {
                self.taken[usize::from(id)] = mark;
                return id;
            }
        }
        let free = self.taken.iter().position(|taken| *taken != mark).expect("top_k is at most the number of experts");
        self.taken[free] = mark;
        free as u16
    }

    /// How many tokens back the next expert comes from; 0: from none.
    fn source(&mut self) -> u64 {
        let chance = self.rng.unit();
        let back = match self.repeat {
            [first, _] if chance < first => 1,
            [_, both] if chance < both => 2,
            _ => 0,
        };
        if back > self.token { 0 } else { back }
    }

    fn repeated(&mut self, layer: usize, back: u64) -> u16 {
        let top_k = self.shape.top_k;
        let row = &self.recent[((self.token - back) % 3) as usize];
        row[layer * top_k + self.rng.below(top_k as u32) as usize]
    }

    fn fresh(&mut self, layer: usize) -> u16 {
        let layer = &self.layers[layer];
        layer.names[layer.usage.draw(&mut self.rng)]
    }
}

impl Layer {
    fn new(weights: &[f64], model: u64, text: u64) -> Self {
        let experts = weights.len();
        let mut names: Vec<u16> = Rng::new(model).permutation(experts).into_iter().map(|id| id as u16).collect();
        // The most used are at the front: some change places with any other.
        let mut rng = Rng::new(text);
        let most_used = (experts as f64 * 0.08).round() as usize;
        for i in 0..most_used {
            if rng.unit() < TEXT_SHARE {
                names.swap(i, rng.below(experts as u32) as usize);
            }
        }
        Self { usage: Alias::new(weights), names }
    }
}

/// Weights of the two tokens before for which they share what was measured, when unrelated tokens share `common`.
fn repeats(common: f64) -> [f64; 2] {
    let [r1, r2] = SHARED.map(|shared| ((shared - common) / (1.0 - common)).max(0.0));
    let first = (r1 * (1.0 - r2) / (1.0 - r1 * r1)).max(0.0);
    let second = ((r2 - r1 * r1) / (1.0 - r1 * r1)).max(0.0);
    [first, first + second]
}

/// Draws an index by weight in one step (Walker's alias method, as built by Vose).
#[derive(Debug, Clone)]
struct Alias {
    /// Of 2³²: how often the index stays what it is.
    stays: Vec<u32>,
    others: Vec<u16>,
}

impl Alias {
    fn new(weights: &[f64]) -> Self {
        let n = weights.len();
        let sum: f64 = weights.iter().sum();
        let mut left: Vec<f64> = weights.iter().map(|w| w * n as f64 / sum).collect();
        let (mut small, mut large): (Vec<usize>, Vec<usize>) = (0..n).partition(|&i| left[i] < 1.0);
        let (mut stays, mut others) = (vec![u32::MAX; n], (0..n as u16).collect::<Vec<u16>>());
        while let (Some(&s), Some(&l)) = (small.last(), large.last()) {
            small.pop();
            stays[s] = (left[s] * 4_294_967_296.0) as u32;
            others[s] = l as u16;
            left[l] -= 1.0 - left[s];
            if left[l] < 1.0 {
                large.pop();
                small.push(l);
            }
        }
        Self { stays, others }
    }

    fn draw(&self, rng: &mut Rng) -> usize {
        let bits = rng.bits();
        let index = (((bits >> 32) * self.stays.len() as u64) >> 32) as usize;
        if bits as u32 <= self.stays[index] { index } else { usize::from(self.others[index]) }
    }
}

#[cfg(test)]
mod tests {
    use super::super::figures::Figures;
    use super::*;

    fn figures(shape: TraceShape, tokens: usize, uniform: bool) -> Figures {
        let mut trace = Trace::new(shape, 1, 2, uniform);
        let mut figures = Figures::new(shape.layers, shape.experts, shape.top_k);
        (0..tokens).for_each(|_| figures.add(trace.next_token()));
        figures
    }

    /// The measured figures, each within two points and unions within six; see the usage for why not all can be met at once.
    #[test]
    fn a_trace_of_k3_has_the_measured_sharing_and_skew() {
        let figures = figures(TraceShape { layers: 8, ..TraceShape::K3 }, 1000, false);
        for (back, wanted, within) in [(1, 0.34, 0.02), (2, 0.23, 0.02), (4, 0.13, 0.02), (8, 0.09, 0.02)] {
            let got = figures.shared(back);
            assert!((got - wanted).abs() <= within, "{back} apart: got {got:.3}, wanted {wanted}");
        }
        for (part, wanted) in [(0.04, 0.45), (0.08, 0.62)] {
            let got = figures.most_used(part);
            assert!((got - wanted).abs() <= 0.02, "{part} of the experts: got {got:.3}, wanted {wanted}");
        }
        for (tokens, wanted) in [(2, 0.83), (3, 0.74), (4, 0.69), (6, 0.62), (8, 0.59), (12, 0.57)] {
            let got = figures.union(tokens);
            assert!((got - wanted).abs() <= 0.06, "union of {tokens}: got {got:.3}, wanted {wanted}");
        }
    }

    #[test]
    fn other_shapes_share_as_much_with_their_neighbour() {
        for (experts, top_k) in [(448, 16), (128, 16), (64, 8)] {
            let got = figures(TraceShape { layers: 8, experts, top_k }, 500, false).shared(1);
            assert!((got - 0.34).abs() <= 0.03, "{experts} experts, {top_k} a token: got {got:.3}");
        }
    }

    #[test]
    fn uniform_has_no_skew_and_no_memory() {
        let figures = figures(TraceShape { layers: 8, ..TraceShape::K3 }, 1000, true);
        for back in [1, 2, 8] {
            assert!((figures.shared(back) - 16.0 / 896.0).abs() < 0.003, "{}", figures.shared(back));
        }
        assert!(figures.most_used(0.04) < 0.08, "{}", figures.most_used(0.04));
    }

    #[test]
    fn what_one_text_teaches_about_another_is_a_part() {
        let shape = TraceShape { layers: 8, ..TraceShape::K3 };
        let used_by = |text: u64| {
            let mut trace = Trace::new(shape, 1, text, false);
            let mut figures = Figures::new(shape.layers, shape.experts, shape.top_k);
            (0..500).for_each(|_| figures.add(trace.next_token()));
            figures
        };
        let (first, second) = (used_by(2), used_by(3));
        let held_out = second.share_of(&first.most_used_ids(0.04));
        let own = second.most_used(0.04);
        assert!((0.70..0.92).contains(&(held_out / own)), "held out {held_out:.3}, own {own:.3}");
    }

    #[test]
    fn a_trace_is_its_seeds() {
        let shape = TraceShape { layers: 3, experts: 50, top_k: 4 };
        let first = |model, text| Trace::new(shape, model, text, false).next_token().to_vec();
        assert_eq!(first(1, 2), first(1, 2));
        assert_ne!(first(1, 2), first(1, 3));
        assert_ne!(first(1, 2), first(2, 2));
    }

    #[test]
    fn every_token_has_top_k_different_experts_in_order() {
        for (experts, top_k) in [(1, 1), (2, 2), (5, 4), (16, 16), (896, 16), (65_535, 3)] {
            let shape = TraceShape { layers: 2, experts, top_k };
            let mut trace = Trace::new(shape, 5, 6, false);
            for _ in 0..20 {
                for ids in trace.next_token().chunks_exact(top_k) {
                    assert!(ids.is_sorted_by(|a, b| a < b), "{experts} {top_k}: {ids:?}");
                    assert!(usize::from(ids[top_k - 1]) < experts);
                }
            }
        }
    }
}
