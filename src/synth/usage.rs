//! How often each expert of a layer is used: the skew of real routing, scaled to any number of experts.
//!
//! Measured on the released weights: 4 % of a layer's experts take 45 % of the reads, 8 % take 62 %. Two tokens that
//! have nothing in common still share Σp²/k of their k experts, p being the share of tokens that use an expert; with
//! these figures 10.6 %, which is why a token's share with the eighth after it cannot fall to the 9 % measured
//! elsewhere.

/// Share of the reads that the first 4 % of the experts take, then the next 4 %, then the rest.
const SHARES: [f64; 3] = [0.45, 0.17, 0.38];
/// Where these groups end, as a share of the experts.
const ENDS: [f64; 3] = [0.04, 0.08, 1.0];
/// Experts of a group differ: the first is used so much more than the group's mean, the last so much less.
const SLOPES: [f64; 3] = [0.2, 0.2, 0.8];
/// Largest share of its experts that a token has in common with an unrelated one, where fewer experts would make it
/// more. Models with few experts are less skewed for it.
const COMMON_MAX: f64 = 0.107;
/// No expert is used by a larger share of the tokens.
const USE_MAX: f64 = 0.6;

/// The share of tokens that use each expert, the most used first; sums to `top_k`.
pub(super) fn usage(experts: usize, top_k: usize, uniform: bool) -> Vec<f64> {
    let even = vec![top_k as f64 / experts as f64; experts];
    if uniform || top_k == experts {
        return even;
    }
    let skewed = skewed(experts, top_k);
    let blend = |skew: f64| -> Vec<f64> { even.iter().zip(&skewed).map(|(e, s)| e + skew * (s - e)).collect() };
    let fits = |skew: f64| {
        let usage = blend(skew);
        common(&usage, top_k) <= COMMON_MAX.max(1.02 * even[0]) && usage[0] <= USE_MAX.max(even[0])
    };
    if fits(1.0) {
        return skewed;
    }
    let (mut low, mut high) = (0.0, 1.0);
    for _ in 0..40 {
        let middle = (low + high) / 2.0;
        if fits(middle) { low = middle } else { high = middle }
    }
    blend(low)
}

/// The measured figures, whatever they make of few experts.
fn skewed(experts: usize, top_k: usize) -> Vec<f64> {
    let n = experts as f64;
    let mut usage = Vec::with_capacity(experts);
    for ((share, end), slope) in SHARES.into_iter().zip(ENDS).zip(SLOPES) {
        let members = ((end * n).round() as usize).saturating_sub(usage.len());
        let mean = share * top_k as f64 / members.max(1) as f64;
        usage.extend((0..members).map(|i| mean * (1.0 + slope * (1.0 - (2 * i + 1) as f64 / members as f64))));
    }
    // Groups that rounding left empty.
    let sum: f64 = usage.iter().sum();
    usage.iter_mut().for_each(|p| *p *= top_k as f64 / sum);
    usage
}

/// Share of its experts that a token has in common with an unrelated one.
pub(super) fn common(usage: &[f64], top_k: usize) -> f64 {
    usage.iter().map(|p| p * p).sum::<f64>() / top_k as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    fn share_of_first(usage: &[f64], part: f64) -> f64 {
        let first = (part * usage.len() as f64).round() as usize;
        usage[..first].iter().sum::<f64>() / usage.iter().sum::<f64>()
    }

    #[test]
    fn k3_has_the_measured_skew() {
        let usage = usage(896, 16, false);
        assert!((share_of_first(&usage, 0.04) - 0.45).abs() < 0.01, "{}", share_of_first(&usage, 0.04));
        assert!((share_of_first(&usage, 0.08) - 0.62).abs() < 0.01, "{}", share_of_first(&usage, 0.08));
        assert!(usage.is_sorted_by(|a, b| a >= b));
    }

    #[test]
    fn any_number_of_experts_has_a_usage_that_sums_to_top_k() {
        for (experts, top_k) in [(1, 1), (2, 1), (3, 2), (8, 8), (16, 15), (64, 8), (128, 16), (448, 16), (896, 1)] {
            for uniform in [false, true] {
                let usage = usage(experts, top_k, uniform);
                let sum: f64 = usage.iter().sum();
                assert_eq!(usage.len(), experts);
                assert!((sum - top_k as f64).abs() < 1e-9, "{experts} {top_k}: {sum}");
                assert!(usage.iter().all(|p| *p > 0.0 && *p <= 1.0), "{experts} {top_k}: {usage:?}");
                let even = top_k as f64 / experts as f64;
                assert!(common(&usage, top_k) <= COMMON_MAX.max(1.03 * even), "{experts} {top_k}");
            }
        }
    }
}
