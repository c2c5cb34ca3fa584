//! Mean negative log-likelihood of the tokens that came.

/// Sums over positions, in double precision.
#[derive(Debug, Default)]
pub(super) struct Likelihood {
    nats: f64,
    tokens: usize,
}

impl Likelihood {
    /// Adds −log softmax(`logits`)[`next`]. `logits` `[vocab]`, finite; `next` is in the vocabulary.
    pub(super) fn add(&mut self, logits: &[f32], next: u32) {
        let max = logits.iter().copied().fold(f32::NEG_INFINITY, f32::max);
        let difference = |logit: f32| f64::from(logit) - f64::from(max);
        let sum: f64 = logits.iter().map(|logit| difference(*logit).exp()).sum();
        self.nats += sum.ln() - difference(logits[next as usize]);
        self.tokens += 1;
    }

    /// Mean, in nats a token.
    pub(super) fn mean(&self) -> f64 {
        self.nats / self.tokens as f64
    }

    /// As printed.
    pub(super) fn lines(&self) -> String {
        let mean = self.mean();
        format!("nll {mean:.9}\nperplexity {:.9}\n", mean.exp())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_mean_is_that_of_the_softmax_even_for_huge_logits() {
        let mut likelihood = Likelihood::default();
        likelihood.add(&[0.25f32.ln(), 0.75f32.ln()], 1);
        likelihood.add(&[3e38, 3e38, -3e38], 0);
        let expected = (-(0.75f64.ln()) + 2f64.ln()) / 2.0;
        assert!((likelihood.mean() - expected).abs() < 1e-7, "{}", likelihood.mean());
        assert!(likelihood.lines().starts_with("nll 0.49041"), "{}", likelihood.lines());
    }
}
