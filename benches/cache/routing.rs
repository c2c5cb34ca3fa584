//! Synthetic routing with the sharing and the skew of the released model.
//!
//! An expert is chosen when its score is among the `top_k` best of its layer. A score adds four terms: what the expert is
//! worth always (skew), what it is worth in this prompt, a part that fades from token to token (sharing between neighbours),
//! and noise of its own for each token. The standard deviations below were fitted to the published figures; the benchmark
//! prints how near they come.

use deltafin::store::trace::Trace;

/// Standard deviations of the terms of a score, where the noise of a single token has 1.
#[derive(Debug, Clone, Copy)]
pub struct Spread {
    /// What an expert is worth in every prompt.
    pub always: f32,
    /// What it is worth in one prompt.
    pub prompt: f32,
    /// What fades.
    pub fading: f32,
    /// Share of the fading term that is left after a token.
    pub keep: f32,
    /// How few experts are worth much always: the quantile u is worth `always · (1 − u)^steepness`.
    pub steepness: f32,
}

impl Spread {
    /// Fitted to the released model.
    pub const RELEASED: Self = Self { always: 8.5, prompt: 1.1, fading: 3.9, keep: 0.59, steepness: 14.0 };
}

/// A small generator (SplitMix64).
pub struct Random(pub u64);

impl Random {
    fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    /// Uniform in [0, 1).
    fn uniform(&mut self) -> f32 {
        (self.next() >> 40) as f32 / 16_777_216.0
    }

    /// Near enough normal, with standard deviation 1: a sum of four uniform numbers.
    fn normal(&mut self) -> f32 {
        let bits = self.next();
        let sum: u32 = (0..4).map(|i| (bits >> (16 * i)) as u32 & 0xffff).sum();
        (sum as f32 / 65_535.0 - 2.0) * 3.0_f32.sqrt()
    }
}

/// A trace of `tokens` tokens in prompts of `prompt_tokens` each. Models with the same `model_seed` have the same skew.
pub fn generate(
    shape: [usize; 3],
    spread: Spread,
    model_seed: u64,
    prompt_seed: u64,
    tokens: usize,
    prompt_tokens: usize,
) -> Trace {
    let [layers, experts, top_k] = shape;
    let mut layers_of_tokens: Vec<Vec<Vec<u16>>> = vec![Vec::with_capacity(layers); tokens];
    for layer in 0..layers as u64 {
        let mut model = Random(model_seed ^ (layer << 32));
        let mut random = Random(prompt_seed ^ (layer << 40));
        let always: Vec<f32> =
            (0..experts).map(|_| (1.0 - model.uniform()).powf(spread.steepness) * spread.always).collect();
        let mut prompt = vec![0.0; experts];
        let mut fading: Vec<f32> = (0..experts).map(|_| random.normal() * spread.fading).collect();
        let fresh = spread.fading * (1.0 - spread.keep * spread.keep).sqrt();
        let mut scores: Vec<(f32, u16)> = Vec::with_capacity(experts);
        for (token, chosen) in layers_of_tokens.iter_mut().enumerate() {
            if token % prompt_tokens == 0 {
                prompt.iter_mut().for_each(|value| *value = random.normal() * spread.prompt);
            }
            scores.clear();
            for expert in 0..experts {
                fading[expert] = fading[expert] * spread.keep + random.normal() * fresh;
                let score = always[expert] + prompt[expert] + fading[expert] + random.normal();
                scores.push((score, expert as u16));
            }
            scores.select_nth_unstable_by(top_k - 1, |a, b| b.0.total_cmp(&a.0));
            let mut best: Vec<u16> = scores[..top_k].iter().map(|(_, expert)| *expert).collect();
            best.sort_unstable();
            chosen.push(best);
        }
    }
    let mut trace = Trace::new(layers, experts);
    for token in layers_of_tokens {
        for (layer, chosen) in token.iter().enumerate() {
            trace.push(layer as u16, chosen).expect("generated in range");
        }
    }
    trace
}

/// How a trace compares with the published figures.
pub struct Figures {
    /// Share of a token's experts that the token 1, 2, 4, 8 before used.
    pub shared: [f64; 4],
    /// Union of 2, 3, 4, 6, 8, 12 consecutive tokens over what they use one by one.
    pub union: [f64; 6],
    /// Share of reads that the most used 4 % and 8 % of each layer's experts take.
    pub top: [f64; 2],
}

/// Measures `trace`, of which every layer has the same number of requests.
pub fn figures(trace: &Trace) -> Figures {
    let mut of_layer: Vec<Vec<&[u16]>> = vec![Vec::new(); trace.layers()];
    trace.requests().for_each(|(layer, chosen)| of_layer[usize::from(layer)].push(chosen));
    let mut result = Figures { shared: [0.0; 4], union: [0.0; 6], top: [0.0; 2] };
    for tokens in &of_layer {
        for (shared, distance) in result.shared.iter_mut().zip([1, 2, 4, 8]) {
            let pairs = tokens.iter().zip(&tokens[distance..]);
            let (mut both, mut all) = (0, 0);
            for (before, now) in pairs {
                both += now.iter().filter(|expert| before.contains(expert)).count();
                all += now.len();
            }
            *shared += both as f64 / all as f64;
        }
        for (union, length) in result.union.iter_mut().zip([2, 3, 4, 6, 8, 12]) {
            let (mut distinct, mut all) = (0, 0);
            let mut seen = vec![usize::MAX; trace.experts()];
            for (number, window) in tokens.windows(length).enumerate() {
                for expert in window.iter().copied().flatten() {
                    distinct += usize::from(seen[usize::from(*expert)] != number);
                    seen[usize::from(*expert)] = number;
                    all += 1;
                }
            }
            *union += f64::from(distinct as u32) / f64::from(all);
        }
        let mut counts = vec![0_u32; trace.experts()];
        tokens.iter().copied().flatten().for_each(|expert| counts[usize::from(*expert)] += 1);
        counts.sort_unstable_by(|a, b| b.cmp(a));
        let all: u32 = counts.iter().sum();
        for (top, share) in result.top.iter_mut().zip([0.04, 0.08]) {
            let most = (trace.experts() as f64 * share).round() as usize;
            *top += f64::from(counts[..most].iter().sum::<u32>()) / f64::from(all);
        }
    }
    let layers = of_layer.len() as f64;
    result.shared.iter_mut().chain(&mut result.union).chain(&mut result.top).for_each(|value| *value /= layers);
    result
}
