//! Synthetic models run: finite logits, and a router that chooses like a real one.

use std::path::Path;

use deltafin::engine::{Engine, EngineOptions};
use deltafin::interrupt::Interrupt;
use deltafin::model::{Observer, Routes};
use deltafin::synth::figures::Figures;
use deltafin::synth::rng::Rng;
use deltafin::synth::{self, Content, Preset, Recipe, Shape};

/// The routes of every layer with experts, `[tokens][layers · top_k]`.
struct Seen {
    first: usize,
    top_k: usize,
    tokens: Vec<Vec<u16>>,
    step: usize,
}

impl Observer for Seen {
    fn routes(&mut self, layer: usize, routes: &Routes) {
        if layer == self.first {
            self.step = self.tokens.len();
        }
        for (row, ids) in routes.ids.chunks_exact(self.top_k).enumerate() {
            if layer == self.first {
                self.tokens.push(Vec::new());
            }
            self.tokens[self.step + row].extend_from_slice(ids);
        }
    }
}

fn open(dir: &Path, context: usize) -> Engine {
    let options = EngineOptions { threads: Some(2), step: Some(64), direct: false, ..EngineOptions::new(dir, context) };
    Engine::open(&options, &(), &Interrupt::new()).unwrap()
}

/// Figures of `tokens` random tokens after the first few.
fn figures(shape: &Shape, uniform: bool, tokens: usize) -> Figures {
    let dir = tempfile::tempdir().unwrap();
    let recipe = Recipe::new(shape.clone(), 5, uniform, Content::Seeded);
    synth::write(dir.path(), &recipe, 2, &mut |_, _| (), &Interrupt::new()).unwrap();
    let engine = open(dir.path(), tokens);
    let mut rng = Rng::new(9);
    let ids: Vec<u32> = (0..tokens).map(|_| rng.below(shape.special_ids() as u32)).collect();
    let mut seen = Seen { first: shape.dense_layers, top_k: shape.top_k, tokens: Vec::new(), step: 0 };
    let mut session = engine.session().unwrap();
    let logits = session.feed_observed(&ids, &(), &mut seen).unwrap();
    assert!(logits.iter().all(|logit| logit.is_finite() && logit.abs() < 20.0));
    let rms = (logits.iter().map(|logit| logit * logit).sum::<f32>() / logits.len() as f32).sqrt();
    assert!((0.3..3.0).contains(&rms), "logits of {rms}");
    let mut figures = Figures::new(shape.moe_layers(), shape.experts, shape.top_k);
    seen.tokens[8..].iter().for_each(|token| figures.add(token));
    figures
}

/// K3's experts and depth of routing over narrow layers.
fn narrow_k3() -> Shape {
    Shape {
        layers: 6,
        hidden: 512,
        heads: 4,
        q_lora: 128,
        kv_lora: 128,
        dense_inner: 512,
        latent: 64,
        inner: 64,
        vocab: 4096,
        attn_res_block: 4,
        ..Preset::K3.shape()
    }
}

#[test]
fn a_model_with_k3s_experts_routes_as_was_measured() {
    let figures = figures(&narrow_k3(), false, 500);
    for (back, wanted) in [(1, 0.34), (2, 0.23), (4, 0.13), (8, 0.09)] {
        let got = figures.shared(back);
        assert!((got - wanted).abs() <= 0.04, "{back} apart: got {got:.3}, wanted {wanted}");
    }
    for (part, wanted) in [(0.04, 0.45), (0.08, 0.62)] {
        let got = figures.most_used(part);
        assert!((got - wanted).abs() <= 0.05, "{part} of the experts: got {got:.3}, wanted {wanted}");
    }
}

#[test]
fn uniform_routing_has_neither_skew_nor_memory_to_speak_of() {
    let figures = figures(&narrow_k3(), true, 500);
    assert!(figures.shared(1) < 0.06, "{}", figures.shared(1));
    assert!(figures.most_used(0.04) < 0.12, "{}", figures.most_used(0.04));
}

#[test]
fn a_tiny_model_shares_a_good_third_with_its_neighbour() {
    let got = figures(&Preset::Tiny.shape(), false, 400).shared(1);
    assert!((0.30..0.42).contains(&got), "{got}");
}

#[test]
fn greedy_decoding_never_meets_an_end() {
    let dir = tempfile::tempdir().unwrap();
    let shape = Preset::Tiny.shape();
    let recipe = Recipe::new(shape.clone(), 5, false, Content::Seeded);
    synth::write(dir.path(), &recipe, 2, &mut |_, _| (), &Interrupt::new()).unwrap();
    let engine = open(dir.path(), 256);
    let mut session = engine.session().unwrap();
    let mut id = 1;
    for _ in 0..200 {
        let logits = session.feed(&[id], &()).unwrap();
        id = (0..logits.len() as u32).max_by(|a, b| logits[*a as usize].total_cmp(&logits[*b as usize])).unwrap();
        assert!((id as usize) < shape.special_ids(), "{id}");
    }
}
