//! Logits → one token. Greedy, or seeded sampling; nothing here depends on threads, time or platform.

use crate::error::{Error, Result};
use crate::kernels::exp;

/// How a token is chosen from logits. Temperature 0 is greedy and ignores the rest. Otherwise logits are divided by the
/// temperature, then `top_k`, `top_p` and `min_p` narrow the choice in this order, each on the probabilities that the
/// ones before it left, and one token is drawn.
#[derive(Debug, Clone, PartialEq)]
pub struct Sampling {
    /// 0: the largest logit, ties to the smaller id.
    pub temperature: f32,
    /// Keep the k most likely; 0: all.
    pub top_k: usize,
    /// Keep the most likely whose probabilities sum to this; 1: all.
    pub top_p: f32,
    /// Keep those at least this share of the most likely; 0: all.
    pub min_p: f32,
    /// Same seed, same text.
    pub seed: u64,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0 }
    }
}

/// Chooses tokens; holds the random state.
pub struct Sampler {
    sampling: Sampling,
    state: u64,
    /// Candidates of the token in work: probability up to a factor, id; most likely first.
    candidates: Vec<(f32, u32)>,
}

impl Sampler {
    /// # Errors
    /// Kind `Usage` for settings outside their ranges.
    pub fn new(sampling: &Sampling) -> Result<Self> {
        let refuse =
            |flag: &str, value: f32, range: &str| Err(Error::usage(format!("--{flag} {value}: expected {range}")));
        let Sampling { temperature, top_p, min_p, .. } = *sampling;
        if !(temperature.is_finite() && temperature >= 0.0) {
            return refuse("temperature", temperature, "a number from 0 (greedy) up");
        }
        if !(top_p > 0.0 && top_p <= 1.0) {
            return refuse("top-p", top_p, "more than 0 and at most 1");
        }
        if !(0.0..=1.0).contains(&min_p) {
            return refuse("min-p", min_p, "0 to 1");
        }
        Ok(Self { sampling: sampling.clone(), state: sampling.seed, candidates: Vec::new() })
    }

    /// The next token from `logits` `[vocab]`, which are finite.
    pub fn sample(&mut self, logits: &[f32]) -> u32 {
        let (best, max) = argmax(logits);
        if self.sampling.temperature == 0.0 {
            return best;
        }
        let candidates = &mut self.candidates;
        candidates.clear();
        // Dividing the difference keeps tiny temperatures finite: the best is at exp(0).
        let weight = |&logit: &f32| exp((logit - max) / self.sampling.temperature);
        candidates.extend(logits.iter().map(weight).zip(0..));
        let best_first = |a: &(f32, u32), b: &(f32, u32)| b.0.total_cmp(&a.0).then(a.1.cmp(&b.1));
        let top_k = self.sampling.top_k;
        if top_k > 0 && top_k < candidates.len() {
            candidates.select_nth_unstable_by(top_k - 1, best_first);
            candidates.truncate(top_k);
        }
        candidates.sort_unstable_by(best_first);
        if self.sampling.top_p < 1.0 {
            let target = f64::from(self.sampling.top_p) * total(candidates);
            let mut sum = 0.0;
            let beyond = candidates.iter().position(|&(p, _)| {
                sum += f64::from(p);
                sum >= target
            });
            candidates.truncate(beyond.map_or(candidates.len(), |last| last + 1));
        }
        let floor = self.sampling.min_p * candidates[0].0;
        let kept = candidates.partition_point(|&(p, _)| p >= floor).max(1);
        candidates.truncate(kept);

        let target = uniform(&mut self.state) * total(candidates);
        let mut sum = 0.0;
        for &(p, id) in candidates.iter() {
            sum += f64::from(p);
            if sum > target {
                return id;
            }
        }
        candidates.last().map_or(best, |&(_, id)| id)
    }
}

/// The largest logit and its id; ties to the smaller id.
fn argmax(logits: &[f32]) -> (u32, f32) {
    let mut best = (0, f32::NEG_INFINITY);
    for (id, &logit) in logits.iter().enumerate() {
        if logit > best.1 {
            best = (id as u32, logit);
        }
    }
    best
}

fn total(candidates: &[(f32, u32)]) -> f64 {
    candidates.iter().map(|&(p, _)| f64::from(p)).sum()
}

/// Uniform in [0, 1) with 53 bits, by SplitMix64 (Steele, Lea, Flood: "Fast splittable pseudorandom number generators").
fn uniform(state: &mut u64) -> f64 {
    *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let mut z = *state;
    z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    z ^= z >> 31;
    (z >> 11) as f64 / (1u64 << 53) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sampler(temperature: f32, top_k: usize, top_p: f32, min_p: f32, seed: u64) -> Sampler {
        Sampler::new(&Sampling { temperature, top_k, top_p, min_p, seed }).expect("legal")
    }

    #[test]
    fn greedy_takes_the_largest_and_the_smaller_id_of_equals() {
        assert_eq!(sampler(0.0, 0, 1.0, 0.0, 1).sample(&[-3.0, 2.0, 7.0, 7.0]), 2);
        assert_eq!(sampler(0.0, 0, 1.0, 0.0, 1).sample(&[-9.0, -8.0]), 1);
    }

    #[test]
    fn one_seed_gives_one_text_and_another_seed_another() {
        let logits: Vec<f32> = (0..100).map(|i| (i as f32 * 0.37).sin()).collect();
        let draw = |seed| {
            let mut s = sampler(1.0, 0, 1.0, 0.0, seed);
            (0..50).map(|_| s.sample(&logits)).collect::<Vec<_>>()
        };
        assert_eq!(draw(7), draw(7));
        assert_ne!(draw(7), draw(8));
    }

    #[test]
    fn top_k_top_p_and_min_p_leave_what_they_say() {
        // Probabilities 0.5, 0.3, 0.15, 0.05.
        let logits = [0.5f32, 0.3, 0.15, 0.05].map(f32::ln);
        let seen = |mut s: Sampler| {
            let mut seen = [false; 4];
            (0..2000).for_each(|_| seen[s.sample(&logits) as usize] = true);
            seen
        };
        assert_eq!(seen(sampler(1.0, 0, 1.0, 0.0, 3)), [true; 4]);
        assert_eq!(seen(sampler(1.0, 2, 1.0, 0.0, 3)), [true, true, false, false]);
        assert_eq!(seen(sampler(1.0, 0, 0.79, 0.0, 3)), [true, true, false, false]);
        assert_eq!(seen(sampler(1.0, 0, 0.81, 0.0, 3)), [true, true, true, false]);
        assert_eq!(seen(sampler(1.0, 0, 1.0, 0.2, 3)), [true, true, true, false]);
        assert_eq!(seen(sampler(1.0, 1, 1.0, 0.0, 3)), [true, false, false, false]);
        assert_eq!(seen(sampler(1e-30, 0, 1.0, 0.0, 3)), [true, false, false, false]);
    }

    #[test]
    fn frequencies_follow_the_probabilities() {
        let logits = [0.5f32, 0.3, 0.2].map(f32::ln);
        let mut s = sampler(1.0, 0, 1.0, 0.0, 11);
        let mut counts = [0f64; 3];
        (0..20_000).for_each(|_| counts[s.sample(&logits) as usize] += 1.0);
        for (count, p) in counts.iter().zip([0.5, 0.3, 0.2]) {
            assert!((count / 20_000.0 - p).abs() < 0.02, "{counts:?}");
        }
    }

    #[test]
    fn settings_outside_their_ranges_are_refused_by_flag() {
        let bad = |s: Sampling| Sampler::new(&s).err().expect("refused").message().to_owned();
        assert!(bad(Sampling { temperature: -1.0, ..Sampling::default() }).contains("--temperature"));
        assert!(bad(Sampling { temperature: f32::NAN, ..Sampling::default() }).contains("--temperature"));
        assert!(bad(Sampling { top_p: 0.0, ..Sampling::default() }).contains("--top-p"));
        assert!(bad(Sampling { min_p: 1.5, ..Sampling::default() }).contains("--min-p"));
    }
}
