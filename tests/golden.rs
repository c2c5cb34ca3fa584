//! The model against the official code's float32 values: logits at every position, router choices, hidden rows, states,
//! greedy continuations. `tests/golden/README.md` says how the values were made and what to expect.

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

use deltafin::engine::{Engine, EngineOptions};
use deltafin::generate::{Sampler, Sampling};
use deltafin::interrupt::Interrupt;
use deltafin::model::{Observer, Routes};
use safetensors::{Dtype, SafeTensors};

/// Values of one golden file by name.
struct Golden {
    floats: BTreeMap<String, Vec<f32>>,
    ints: BTreeMap<String, Vec<u32>>,
}

impl Golden {
    fn load(file: &Path) -> Self {
        let bytes = std::fs::read(file).unwrap_or_else(|e| panic!("{}: {e}", file.display()));
        let tensors = SafeTensors::deserialize(&bytes).expect("a golden file");
        let (mut floats, mut ints) = (BTreeMap::new(), BTreeMap::new());
        for (name, view) in tensors.tensors() {
            let data = view.data();
            match view.dtype() {
                Dtype::F32 => {
                    let values = data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("4 bytes")));
                    floats.insert(name, values.collect());
                }
                Dtype::I32 => {
                    let values = data.chunks_exact(4).map(|b| u32::from_le_bytes(b.try_into().expect("4 bytes")));
                    ints.insert(name, values.collect());
                }
                Dtype::I64 => {
                    let values =
                        data.chunks_exact(8).map(|b| u64::from_le_bytes(b.try_into().expect("8 bytes")) as u32);
                    ints.insert(name, values.collect());
                }
                _ => {}
            }
        }
        Self { floats, ints }
    }

    fn floats(&self, name: &str) -> &[f32] {
        self.floats.get(name).unwrap_or_else(|| panic!("no golden value {name}"))
    }

    fn ints(&self, name: &str) -> &[u32] {
        self.ints.get(name).unwrap_or_else(|| panic!("no golden value {name}"))
    }
}

fn golden_dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden").join(name)
}

fn open(model: PathBuf) -> Engine {
    let options = EngineOptions { memory: Some(1 << 30), threads: Some(2), ..EngineOptions::new(model, 256) };
    Engine::open(&options, &(), &Interrupt::new()).expect("the model opens")
}

/// Keeps what a step shows.
#[derive(Default)]
struct Seen {
    hidden: BTreeMap<usize, Vec<f32>>,
    routes: BTreeMap<usize, Routes>,
}

impl Observer for Seen {
    fn layer(&mut self, layer: usize, hidden: &[f32]) {
        self.hidden.insert(layer, hidden.to_vec());
    }

    fn routes(&mut self, layer: usize, routes: &Routes) {
        self.routes.insert(layer, routes.clone());
    }
}

/// Largest absolute difference, and the largest wanted value.
fn difference(got: &[f32], want: &[f32]) -> (f32, f32) {
    assert_eq!(got.len(), want.len());
    let diff =
        got.iter().zip(want).map(|(g, w)| (g - w).abs()).fold(0.0, |a: f32, b| if b > a || b.is_nan() { b } else { a });
    (diff, want.iter().fold(0.0, |a: f32, b| a.max(b.abs())))
}

fn assert_close(what: &str, got: &[f32], want: &[f32], relative: f32) {
    let (diff, largest) = difference(got, want);
    assert!(diff <= relative * largest.max(1.0), "{what}: off by {diff}, largest value {largest}");
}

fn all_logits(engine: &Engine, ids: &[u32]) -> Vec<f32> {
    let mut logits = Vec::new();
    let mut session = engine.session().expect("a session");
    let mut next = 0;
    let mut keep = |position, row: &[f32]| {
        assert_eq!(position, next);
        next += 1;
        logits.extend_from_slice(row);
        Ok(())
    };
    session.feed_all(ids, &(), &mut keep).expect("logits");
    logits
}

fn greedy(engine: &Engine, prompt: &[u32], n: usize) -> (Vec<u32>, Vec<f32>) {
    let mut sampler = Sampler::new(&Sampling::default()).expect("greedy");
    let mut session = engine.session().expect("a session");
    let mut logits = session.feed(prompt, &()).expect("prefill").to_vec();
    let (mut ids, mut all) = (Vec::new(), Vec::new());
    loop {
        ids.push(sampler.sample(&logits));
        all.extend_from_slice(&logits);
        if ids.len() == n {
            return (ids, all);
        }
        logits = session.feed(&ids[ids.len() - 1..], &()).expect("decode").to_vec();
    }
}

/// Everything in one golden folder.
fn check(name: &str) {
    let golden = Golden::load(&golden_dir(name).join("golden.safetensors"));
    let engine = open(golden_dir(name));
    let config = engine.config();
    let ids = golden.ints("input_ids");

    let vocab = config.vocab_size;
    let logits = all_logits(&engine, ids);
    for (position, (got, want)) in
        logits.chunks_exact(vocab).zip(golden.floats("logits").chunks_exact(vocab)).enumerate()
    {
        assert_close(&format!("{name}: logits at {position}"), got, want, 1e-4);
    }

    let mut seen = Seen::default();
    let mut session = engine.session().expect("a session");
    session.feed_observed(ids, &(), &mut seen).expect("prefill");
    for layer in 0..config.layers.len() {
        let what = |part: &str| format!("{name}: layer {layer}, {part}");
        assert_close(&what("hidden"), &seen.hidden[&layer], golden.floats(&format!("hidden.{layer}")), 1e-4);
        if let Some(routes) = seen.routes.get(&layer) {
            let got: Vec<u32> = routes.ids.iter().map(|&id| id.into()).collect();
            assert_eq!(got, golden.ints(&format!("moe.{layer}.topk_ids")), "{}", what("experts"));
            let want = golden.floats(&format!("moe.{layer}.topk_weights"));
            assert_close(&what("weights"), &routes.weights, want, 1e-5);
        }
        check_state(&what("state"), session.sequence(), config, layer, &golden);
    }

    for (prefix, prompt) in [("", "input_ids"), ("short.", "short.input_ids")] {
        let want = golden.ints(&format!("{prefix}greedy_ids"));
        let (got, logits) = greedy(&engine, golden.ints(prompt), want.len());
        assert_eq!(got, want, "{name}: {prefix}greedy ids");
        assert_close(
            &format!("{name}: {prefix}greedy logits"),
            &logits,
            golden.floats(&format!("{prefix}greedy_logits")),
            1e-4,
        );
    }
    let short = all_logits(&engine, golden.ints("short.input_ids"));
    assert_close(&format!("{name}: short logits"), &short, golden.floats("short.logits"), 1e-4);
}

fn check_state(
    what: &str,
    sequence: &deltafin::model::Sequence,
    config: &deltafin::config::ModelConfig,
    layer: usize,
    golden: &Golden,
) {
    if let Some(state) = sequence.kda_state(layer) {
        // Golden: [heads, v, k]; here [heads, k, v].
        let dim = config.kda.head_dim;
        let want = golden.floats(&format!("kda.{layer}.state"));
        let transposed: Vec<f32> = want
            .chunks_exact(dim * dim)
            .flat_map(|head| (0..dim * dim).map(move |i| head[i % dim * dim + i / dim]))
            .collect();
        assert_close(what, state, &transposed, 1e-4);
        let tails = sequence.conv_state(layer).expect("a KDA layer");
        for (tail, part) in tails.iter().zip(["q", "k", "v"]) {
            // Golden: [channels, 4], of which the next step uses the last 3; here [3, channels].
            let want = golden.floats(&format!("kda.{layer}.conv_{part}"));
            let channels = want.len() / 4;
            let want: Vec<f32> = (1..4).flat_map(|tap| (0..channels).map(move |c| want[c * 4 + tap])).collect();
            assert_close(&format!("{what}, conv {part}"), tail, &want, 1e-4);
        }
    } else {
        let rank = config.mla.kv_lora_rank;
        let width = rank + config.mla.qk_rope_head_dim;
        let cache = sequence.latent_cache(layer).expect("an MLA layer");
        let latent: Vec<f32> = cache.chunks_exact(width).flat_map(|row| row[..rank].to_vec()).collect();
        let rope: Vec<f32> = cache.chunks_exact(width).flat_map(|row| row[rank..].to_vec()).collect();
        assert_close(what, &latent, golden.floats(&format!("mla.{layer}.latent")), 1e-4);
        assert_close(what, &rope, golden.floats(&format!("mla.{layer}.rope")), 1e-4);
    }
}

#[test]
fn tiny_k3_is_the_official_model() {
    check("tiny-k3");
}

#[test]
fn odd_k3_is_the_official_model() {
    check("odd-k3");
}

#[test]
fn tiny_kimi_linear_is_the_official_model() {
    check("tiny-kimi-linear");
}

#[test]
fn the_demo_model_matches_its_reference() {
    let golden = Golden::load(&golden_dir("demo.safetensors"));
    let engine = open(Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model"));
    for i in 0..2 {
        let ids = golden.ints(&format!("prompt{i}.input_ids"));
        let logits = all_logits(&engine, ids);
        assert_close(&format!("prompt {i}"), &logits, golden.floats(&format!("prompt{i}.logits")), 1e-4);
        let want = golden.ints(&format!("prompt{i}.greedy_ids"));
        assert_eq!(greedy(&engine, ids, want.len()).0, want, "prompt {i}: greedy ids");
    }
}

#[test]
fn the_first_token_matters_to_the_last() {
    let engine = open(golden_dir("tiny-k3"));
    let golden = Golden::load(&golden_dir("tiny-k3").join("golden.safetensors"));
    let mut ids = golden.ints("input_ids").to_vec();
    let before = all_logits(&engine, &ids);
    ids[0] += 1;
    let after = all_logits(&engine, &ids);
    let last = before.len() - engine.config().vocab_size;
    assert!(difference(&after[last..], &before[last..]).0 > 1e-3);
}
