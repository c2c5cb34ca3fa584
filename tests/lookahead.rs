//! How good the guesses are that have the next layer's experts read ahead, and that they come where they should.
//! `cargo test --test lookahead -- --nocapture` prints the figures.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use deltafin::engine::{Engine, EngineOptions};
use deltafin::interrupt::Interrupt;
use deltafin::model::{Machine, Observer, Routes, Scratch, Segment, Sequence};
use deltafin::text::{Specials, Tokenizer};

const DEMO: &str = "assets/demo-model";
const RANDOM: [&str; 3] = ["tests/golden/tiny-k3", "tests/golden/odd-k3", "tests/golden/tiny-kimi-linear"];

/// Experts of the likelier halves of guesses, those of them that were then asked for, and all that were asked for.
#[derive(Default, Clone, Copy)]
struct Count {
    guessed: usize,
    useful: usize,
    asked: usize,
}

impl Count {
    fn precision(self) -> f64 {
        self.useful as f64 / self.guessed.max(1) as f64
    }
}

/// Compares guesses with what follows.
#[derive(Default)]
struct Seen {
    /// Guesses, and how many of them are the likelier.
    open: BTreeMap<usize, (Vec<u16>, usize)>,
    layers: BTreeMap<usize, Count>,
    /// Right and all guesses by their place in the guess.
    places: Vec<(usize, usize)>,
}

impl Observer for Seen {
    fn guess(&mut self, layer: usize, experts: &[u16], likely: usize) {
        assert!((1..=experts.len()).contains(&likely));
        assert_eq!(self.open.insert(layer, (experts.to_vec(), likely)), None, "layer {layer} was guessed twice");
    }

    fn routes(&mut self, layer: usize, routes: &Routes) {
        let count = self.layers.entry(layer).or_default();
        let distinct: std::collections::BTreeSet<u16> = routes.ids.iter().copied().collect();
        count.asked += distinct.len();
        let (guess, likely) = self.open.remove(&layer).unwrap_or_default();
        for (place, expert) in guess.iter().enumerate() {
            count.guessed += usize::from(place < likely);
            count.useful += usize::from(place < likely && distinct.contains(expert));
            self.places.resize(self.places.len().max(place + 1), (0, 0));
            self.places[place].0 += usize::from(distinct.contains(expert));
            self.places[place].1 += 1;
        }
    }
}

impl Seen {
    fn total(&self) -> Count {
        self.layers.values().fold(Count::default(), |sum, layer| Count {
            guessed: sum.guessed + layer.guessed,
            useful: sum.useful + layer.useful,
            asked: sum.asked + layer.asked,
        })
    }
}

fn path(model: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(model)
}

fn open(model: &str) -> Engine {
    let options = EngineOptions { threads: Some(1), memory: Some(1 << 30), ..EngineOptions::new(path(model), 500) };
    Engine::open(&options, &(), &Interrupt::new()).expect("the model opens")
}

/// What the demo model writes itself, or any ids for models that were never trained.
fn ids(model: &str, engine: &Engine) -> Vec<u32> {
    if model != DEMO {
        return (0..256).map(|i: u32| (i * 37 + i * i * 11) % 240).collect();
    }
    let tokenizer = Tokenizer::from_dir(&path(model), Some(engine.config().vocab_size)).expect("a tokenizer");
    let mut ids = Vec::new();
    for start in ["Once upon a time", "There once was a", "This is the story of"] {
        let mut session = engine.session().expect("a session");
        let mut next = tokenizer.encode(start, Specials::Ordinary);
        for _ in 0..120 {
            ids.extend_from_slice(&next);
            let logits = session.feed(&next, &()).expect("logits");
            let best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("a vocabulary");
            next = vec![best as u32];
        }
    }
    ids
}

/// Runs `ids` in steps of `rows`, and looks on.
fn seen(engine: &Engine, machine: Machine<'_>, ids: &[u32], rows: usize, tentative: bool) -> Seen {
    let config = engine.config();
    let mut seen = Seen::default();
    let mut scratch = Scratch::new(config, rows).expect("buffers");
    let mut sequence = Sequence::new(config, ids.len()).expect("a sequence");
    for tokens in ids.chunks(rows) {
        let segment = Segment { sequence: &mut sequence, tokens, tentative };
        engine.model().forward(machine, &mut [segment], &mut scratch, &mut seen).expect("a step");
        if tentative {
            sequence.commit(config, machine, tokens.len()).expect("committed");
        }
        assert!(seen.open.is_empty(), "a layer was guessed that has no experts, or that never came");
    }
    seen
}

#[test]
fn the_likelier_half_of_a_tokens_guess_for_each_following_layer_is_mostly_right() {
    for model in [DEMO, RANDOM[0], RANDOM[1], RANDOM[2]] {
        let engine = open(model);
        let moe = engine.config().moe.clone().expect("experts");
        let ids = ids(model, &engine);
        let seen = seen(&engine, engine.machine(), &ids, 1, false);
        let total = seen.total();
        println!("{model}: {:.3} of {} guesses useful, one token a step", total.precision(), total.guessed);
        for (layer, count) in &seen.layers {
            println!("  layer {layer}: {:.3} of {} guesses useful", count.precision(), count.guessed);
        }
        for (place, (useful, all)) in seen.places.iter().enumerate() {
            println!("  guess {}: {:.3}", place + 1, *useful as f64 / *all as f64);
        }
        assert!(total.precision() > 0.84, "{model}: {:.3}", total.precision());
        // All layers with experts, but not the model's first.
        let layers = seen.layers.values().filter(|count| count.guessed > 0).count();
        assert_eq!(layers, seen.layers.len() - usize::from(seen.layers.contains_key(&0)));
        assert_eq!(total.guessed, layers * ids.len() * moe.num_experts_per_token.div_ceil(2));
    }
}

#[test]
fn a_prompt_guesses_nothing_in_vain() {
    for model in [DEMO, RANDOM[0], RANDOM[1], RANDOM[2]] {
        let engine = open(model);
        let ids = ids(model, &engine);
        for rows in [2, 5, 6, 16, 64, 128, 256] {
            // A last step of one row would be a token alone.
            let whole = &ids[..ids.len() / rows * rows];
            let total = seen(&engine, engine.machine(), whole, rows, false).total();
            let share = total.useful as f64 / total.asked as f64;
            println!("{model}: {} guesses, {share:.3} of what {rows} rows ask for", total.guessed);
            assert_eq!(total.useful, total.guessed, "{model}: {rows} rows");
            assert!(rows > 5 || total.guessed == 0, "{model}: {rows} rows cannot have the votes");
            assert!(rows < 128 || share > 0.3, "{model}: {rows} rows: {share:.3}");
        }
    }
}

#[test]
fn drafts_guess_as_single_tokens_do() {
    let engine = open(DEMO);
    let ids = ids(DEMO, &engine);
    let total = seen(&engine, engine.machine(), &ids, 4, true).total();
    println!("drafts of 4: {:.3} of {} guesses useful", total.precision(), total.guessed);
    assert!(total.guessed > ids.len() && total.precision() > 0.85, "{:.3}", total.precision());
}

#[test]
fn nothing_is_guessed_when_not_wanted() {
    let engine = open(RANDOM[0]);
    let machine = Machine { lookahead: false, ..engine.machine() };
    assert_eq!(seen(&engine, machine, &ids(RANDOM[0], &engine), 1, false).total().guessed, 0);
    let options = EngineOptions { lookahead: false, memory: Some(1 << 30), ..EngineOptions::new(path(RANDOM[0]), 64) };
    assert!(!Engine::open(&options, &(), &Interrupt::new()).expect("opens").machine().lookahead);
}
