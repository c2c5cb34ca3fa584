//! Traces: made up with the sharing and skew of the released model, or recorded from a model that runs.

use std::path::Path;

use deltafin::engine::{Engine, EngineOptions};
use deltafin::interrupt::Interrupt;
use deltafin::model::{Observer, Routes};
use deltafin::store::trace::Trace;
use deltafin::synth::figures::Figures;
use deltafin::synth::trace::{Trace as Source, TraceShape};
use deltafin::text::{Specials, Tokenizer};

/// A trace of texts of `text_tokens` tokens each, `tokens` in all. Texts are numbered from `text`: other numbers, other
/// texts, with preferences of their own beside those of the model.
pub fn generate(shape: TraceShape, text: u64, tokens: usize, text_tokens: usize) -> Trace {
    let mut trace = Trace::new(shape.layers, shape.experts);
    for (number, start) in (0..tokens).step_by(text_tokens).enumerate() {
        let mut source = Source::new(shape, 1, text + number as u64, false);
        for _ in start..tokens.min(start + text_tokens) {
            for (layer, experts) in source.next_token().chunks(shape.top_k).enumerate() {
                trace.push(layer as u16, experts).expect("made for this shape");
            }
        }
    }
    trace
}

/// Runs the model in directory `model` over the text in file `text`, as far as the context goes, and keeps its routes.
pub fn record(model: &Path, text: &Path) -> Trace {
    const CONTEXT: usize = 1024;
    let options = EngineOptions { step: Some(1), ..EngineOptions::new(model, CONTEXT) };
    let engine = Engine::open(&options, &(), &Interrupt::new()).expect("the model opens");
    let tokenizer = Tokenizer::from_dir(model, Some(engine.config().vocab_size)).expect("it has a tokenizer");
    let text = std::fs::read_to_string(text).expect("the text can be read");
    let mut ids = tokenizer.encode(&text, Specials::Ordinary);
    ids.truncate(CONTEXT - 1);
    let mut recorder = Recorder::default();
    let mut session = engine.session().expect("a session");
    session.feed_observed(&ids, &(), &mut recorder).expect("the model runs");
    recorder.into_trace().0
}

/// For each request of a trace the experts that were guessed before it; none where there was no guess.
pub type Guesses = Vec<Vec<u16>>;

/// What the demo model writes, `tokens` of it a story; `set` 0 or 1 chooses the stories' beginnings.
pub fn stories(set: usize, tokens: usize) -> (Trace, Guesses) {
    const BEGINNINGS: [[&str; 2]; 2] =
        [["Once upon a time", "There once was a"], ["This is the story of", "One day a little girl"]];
    let model = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model");
    let engine = Engine::open(&EngineOptions::new(&model, 512), &(), &Interrupt::new()).expect("the model opens");
    let tokenizer = Tokenizer::from_dir(&model, Some(engine.config().vocab_size)).expect("it has a tokenizer");
    let mut recorder = Recorder::default();
    for beginning in BEGINNINGS[set] {
        let mut session = engine.session().expect("a session");
        let mut next = tokenizer.encode(beginning, Specials::Ordinary);
        for _ in 0..tokens {
            // Token by token, as when it is decoded.
            let mut best = 0;
            for id in next {
                let logits = session.feed_observed(&[id], &(), &mut recorder).expect("the model runs");
                best = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("a vocabulary");
            }
            next = vec![best as u32];
        }
    }
    recorder.into_trace()
}

/// `count` guesses for each request of `trace` but those of the first layer. Each is right with a chance of `precision`, and
/// then any of the request's experts; else any other of the layer, which in memory is the least likely to be.
pub fn guesses(trace: &Trace, count: usize, precision: f64) -> Guesses {
    let mut random = 1_u64;
    let mut draw = |below: usize| {
        random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (((random >> 32) * below as u64) >> 32) as usize
    };
    let mut guess = |experts: &[u16]| {
        let mut guess: Vec<u16> = Vec::with_capacity(count);
        while guess.len() < count.min(experts.len()) {
            let is_right = (draw(1 << 20) as f64) < precision * f64::from(1 << 20);
            let expert = if is_right { experts[draw(experts.len())] } else { draw(trace.experts()) as u16 };
            if experts.contains(&expert) == is_right && !guess.contains(&expert) {
                guess.push(expert);
            }
        }
        guess
    };
    trace.requests().map(|(layer, experts)| if layer == 0 { Vec::new() } else { guess(experts) }).collect()
}

/// Layer and experts of every row, in the order of the run.
#[derive(Default)]
struct Recorder {
    requests: Vec<(usize, Vec<u16>)>,
    guesses: Guesses,
    /// Of the layer to come.
    guess: Vec<u16>,
}

impl Observer for Recorder {
    fn guess(&mut self, _layer: usize, experts: &[u16], likely: usize) {
        self.guess = experts[..likely].to_vec();
    }

    fn routes(&mut self, layer: usize, routes: &Routes) {
        let rows = routes.ids.len() / routes.top_k;
        self.guesses.extend((0..rows).map(|_| std::mem::take(&mut self.guess)));
        self.requests.extend(routes.ids.chunks(routes.top_k).map(|row| (layer, row.to_vec())));
    }
}

impl Recorder {
    /// Layers are numbered anew, without those that have no routed experts.
    fn into_trace(self) -> (Trace, Guesses) {
        let layers: std::collections::BTreeSet<usize> = self.requests.iter().map(|(layer, _)| *layer).collect();
        let layers: Vec<usize> = layers.into_iter().collect();
        let experts = self.requests.iter().flat_map(|(_, row)| row).max().map_or(0, |most| usize::from(*most) + 1);
        let mut trace = Trace::new(layers.len(), experts);
        for (layer, row) in &self.requests {
            let number = layers.binary_search(layer).expect("all layers are listed");
            trace.push(number as u16, row).expect("rows are ascending");
        }
        (trace, self.guesses)
    }
}

/// Sharing and skew of `trace`, which asks each layer in turn for `top_k` experts; what pinning 2.8 % learned from `train`
/// answers of it.
pub fn print_figures(name: &str, trace: &Trace, train: &Trace, top_k: usize) {
    let of = |trace: &Trace| {
        let mut figures = Figures::new(trace.layers(), trace.experts(), top_k);
        let mut token = Vec::new();
        for (_, experts) in trace.requests() {
            token.extend_from_slice(experts);
            if token.len() == trace.layers() * top_k {
                figures.add(&token);
                token.clear();
            }
        }
        figures
    };
    let (figures, learned) = (of(trace), of(train).most_used_ids(0.028));
    println!(
        "{name}: shared at distance 1 2 4 8: {} %; 4 8 % of experts take {} %; learned 2.8 %: {:.0} %",
        [1, 2, 4, 8].map(|back| format!("{:.0}", figures.shared(back) * 100.0)).join(" "),
        [0.04, 0.08].map(|part| format!("{:.0}", figures.most_used(part) * 100.0)).join(" "),
        figures.share_of(&learned) * 100.0
    );
}
