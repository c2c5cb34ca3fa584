//! Which experts each simulated token uses: made up with the figures of real routing, or recorded.

use std::path::Path;

use super::estimate::Model;
use crate::error::{Error, Result};
use crate::store::trace::Trace as Recorded;
use crate::synth::trace::{Trace as MadeUp, TraceShape};

/// Experts of one token, `[moe_layers, top_k]`, ascending within a layer.
type Token = Vec<u16>;

/// Tokens that can be asked for in any order.
#[derive(Debug, Clone)]
pub(super) struct Routing {
    tokens: Vec<Token>,
    /// Makes up more of them; recorded ones begin again.
    source: Option<MadeUp>,
}

impl Routing {
    /// Tokens made up for `model` from `seed`.
    pub(super) fn made_up(model: &Model, seed: u64) -> Self {
        let shape = TraceShape { layers: model.moe_layers, experts: model.experts, top_k: model.top_k };
        Self { tokens: Vec::new(), source: Some(MadeUp::new(shape, seed, seed, false)) }
    }

    /// The decoded tokens of the trace at `path`.
    ///
    /// # Errors
    /// Kind `Io` for a trace that cannot be read, `Usage` for one of another model or without a decoded token.
    pub(super) fn recorded(path: &Path, model: &Model) -> Result<Self> {
        let tokens = tokens(&Recorded::read(path)?, model).map_err(|what| {
            Error::usage(format!("--trace {}: {what}", path.display()))
                .hint("take a trace of the model that --shape or -m names")
        })?;
        Ok(Self { tokens, source: None })
    }

    /// Tokens there are; `None`: as many as are asked for.
    pub(super) fn len(&self) -> Option<usize> {
        self.source.is_none().then_some(self.tokens.len())
    }

    /// The experts of the token with this number, from 0.
    pub(super) fn token(&mut self, token: usize) -> Token {
        if let Some(source) = &mut self.source {
            while self.tokens.len() <= token {
                self.tokens.push(source.next_token().to_vec());
            }
        }
        self.tokens[token % self.tokens.len()].clone()
    }
}

/// The requests of `trace` token by token. Steps of several tokens (prompts) ask for more experts and are left out, and so
/// is a token whose requests do not reach all layers.
fn tokens(trace: &Recorded, model: &Model) -> Result<Vec<Token>, String> {
    let mut layers: Vec<u16> = trace.requests().map(|(layer, _)| layer).collect();
    layers.sort_unstable();
    layers.dedup();
    if trace.experts() != model.experts || layers.len() != model.moe_layers {
        return Err(format!(
            "it is of {} layers of {} experts, expected {} of {}",
            layers.len(),
            trace.experts(),
            model.moe_layers,
            model.experts
        ));
    }
    let mut tokens: Vec<Token> = Vec::new();
    let mut token: Vec<&[u16]> = Vec::new();
    let mut last = None;
    let mut keep = |token: Vec<&[u16]>| {
        if token.len() == layers.len() && token.iter().all(|experts| experts.len() == model.top_k) {
            tokens.push(token.concat());
        }
    };
    for (layer, experts) in trace.requests() {
        if last.is_some_and(|last| layer <= last) {
            keep(std::mem::take(&mut token));
        }
        last = Some(layer);
        token.push(experts);
    }
    keep(token);
    if tokens.is_empty() {
        return Err(format!("no token in it asks for {} experts in each of {} layers", model.top_k, layers.len()));
    }
    Ok(tokens)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn model(moe_layers: usize, experts: usize, top_k: usize) -> Model {
        Model { name: "m".into(), moe_layers, experts, top_k, expert_bytes: 4096 }
    }

    fn trace(requests: &[(u16, &[u16])]) -> Recorded {
        let mut trace = Recorded::new(4, 8);
        requests.iter().for_each(|(layer, experts)| trace.push(*layer, experts).unwrap());
        trace
    }

    #[test]
    fn recorded_requests_become_tokens_and_prompts_are_left_out() {
        let trace = trace(&[
            (1, &[0, 1, 2]),
            (3, &[0, 1, 2]),
            (1, &[0, 1]),
            (3, &[2, 3]),
            (1, &[4, 5]),
            (1, &[6, 7]),
            (3, &[1, 2]),
            (1, &[0, 7]),
        ]);
        let tokens = tokens(&trace, &model(2, 8, 2)).unwrap();
        assert_eq!(tokens, [[0, 1, 2, 3], [6, 7, 1, 2]]);
    }

    #[test]
    fn a_trace_of_another_model_is_refused_with_both_shapes() {
        let recorded = trace(&[(1, &[0, 1]), (3, &[2, 3])]);
        for other in [model(3, 8, 2), model(2, 9, 2)] {
            assert!(tokens(&recorded, &other).unwrap_err().contains("2 layers of 8 experts"));
        }
        assert!(tokens(&recorded, &model(2, 8, 4)).unwrap_err().contains("no token"));
        assert!(tokens(&trace(&[]), &model(2, 8, 2)).is_err());
        let error = Routing::recorded(Path::new("/nonexistent"), &model(2, 8, 2)).unwrap_err();
        assert!(error.message().contains("does not exist"), "{error}");
    }

    #[test]
    fn tokens_are_the_same_in_whatever_order_they_are_asked_for() {
        let model = model(3, 64, 4);
        let (mut forward, mut backward) = (Routing::made_up(&model, 5), Routing::made_up(&model, 5));
        let one: Vec<_> = (0..6).map(|token| forward.token(token)).collect();
        let mut other: Vec<_> = (0..6).rev().map(|token| backward.token(token)).collect();
        other.reverse();
        assert_eq!(one, other);
        assert_eq!(one[0].len(), 12);
        assert_ne!(one[0], Routing::made_up(&model, 6).token(0));
        assert_eq!(forward.len(), None);
    }
}
