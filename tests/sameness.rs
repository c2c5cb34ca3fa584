//! Same input, same bits: whatever the instruction set, the threads, the step size, the number of slots, whether experts are
//! read ahead, and whether rows were first tried as a draft.

use std::path::{Path, PathBuf};

use deltafin::engine::{Engine, EngineOptions};
use deltafin::interrupt::Interrupt;
use deltafin::kernels::{Compute, Isa};
use deltafin::model::{Scratch, Segment, Sequence};

const MODELS: [&str; 3] = ["tests/golden/tiny-k3", "tests/golden/odd-k3", "tests/golden/tiny-kimi-linear"];

fn options(model: &str) -> EngineOptions {
    EngineOptions {
        memory: Some(1 << 30),
        threads: Some(1),
        ..EngineOptions::new(Path::new(env!("CARGO_MANIFEST_DIR")).join(model), 256)
    }
}

fn open(options: &EngineOptions) -> Engine {
    Engine::open(options, &(), &Interrupt::new()).expect("the model opens")
}

/// Ids that any of the models has.
fn ids(n: usize) -> Vec<u32> {
    (0..n as u32).map(|i| (i * 37 + i * i * 11) % 240).collect()
}

/// FNV-1a over the bits of all logits, then of ten greedy tokens.
fn fingerprint(options: &EngineOptions, ids: &[u32]) -> u64 {
    let engine = open(options);
    let mut hash = Hash::default();
    let mut session = engine.session().expect("a session");
    let each = &mut |_, logits: &[f32]| {
        hash.floats(logits);
        Ok(())
    };
    session.feed_all(ids, &(), each).expect("logits");
    let mut next = ids[0];
    for _ in 0..10 {
        let logits = session.feed(&[next], &()).expect("decode");
        hash.floats(logits);
        next = (0..logits.len()).max_by(|&a, &b| logits[a].total_cmp(&logits[b])).expect("a vocabulary") as u32;
    }
    hash.0
}

struct Hash(u64);

impl Default for Hash {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422_2325)
    }
}

impl Hash {
    fn floats(&mut self, floats: &[f32]) {
        for byte in floats.iter().flat_map(|x| x.to_bits().to_le_bytes()) {
            self.0 = (self.0 ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3);
        }
    }
}

#[test]
fn every_instruction_set_gives_the_same_bits() {
    for model in MODELS {
        let of = |isa| fingerprint(&EngineOptions { isa: Some(isa), ..options(model) }, &ids(40));
        let want = of(Isa::Scalar);
        for isa in Compute::available() {
            assert_eq!(of(isa), want, "{model}: {isa}");
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for model in MODELS {
        let of = |threads| fingerprint(&EngineOptions { threads: Some(threads), ..options(model) }, &ids(70));
        let want = of(1);
        for threads in [2, 3, 8] {
            assert_eq!(of(threads), want, "{model}: {threads} threads");
        }
    }
}

#[test]
fn any_step_size_gives_the_same_bits() {
    for model in MODELS {
        for length in [1, 2, 6, 7, 8, 63, 64, 65, 200] {
            let of = |step| fingerprint(&EngineOptions { step: Some(step), ..options(model) }, &ids(length));
            let want = of(256);
            for step in [1, 7, 64] {
                assert_eq!(of(step), want, "{model}: {length} tokens in steps of {step}");
            }
        }
    }
}

#[test]
fn any_number_of_slots_and_either_way_of_reading_give_the_same_bits() {
    for model in MODELS {
        let roomy = options(model);
        let survey = Engine::survey(&roomy).expect("a plan");
        let smallest = survey.config.moe.as_ref().expect("experts").num_experts_per_token as u64;
        let slot = survey.plan.experts / survey.plan.slots;
        let want = fingerprint(&roomy, &ids(70));
        for slots in [smallest, smallest + 1, 2 * smallest] {
            let tight = EngineOptions { expert_memory: Some(slots * slot), ..roomy.clone() };
            assert_eq!(Engine::survey(&tight).expect("a plan").plan.slots, slots);
            assert_eq!(fingerprint(&tight, &ids(70)), want, "{model}: {slots} slots");
        }
        let buffered = EngineOptions { direct: false, ..roomy };
        assert_eq!(fingerprint(&buffered, &ids(70)), want, "{model}: through the page cache");
    }
}

#[test]
fn reading_ahead_or_not_gives_the_same_bits() {
    for model in MODELS {
        let roomy = options(model);
        let survey = Engine::survey(&roomy).expect("a plan");
        let smallest = survey.config.moe.as_ref().expect("experts").num_experts_per_token as u64;
        let slot = survey.plan.experts / survey.plan.slots;
        for slots in [smallest, smallest + 1, 3 * smallest, survey.plan.slots] {
            for step in [1, 33] {
                let of = |lookahead| {
                    let expert_memory = Some(slots * slot);
                    fingerprint(
                        &EngineOptions { lookahead, expert_memory, step: Some(step), ..roomy.clone() },
                        &ids(70),
                    )
                };
                assert_eq!(of(true), of(false), "{model}: {slots} slots, steps of {step}");
            }
        }
    }
}

/// Computes `rows` with `sequence` and returns the final hidden rows.
fn step(engine: &Engine, scratch: &mut Scratch, sequence: &mut Sequence, rows: &[u32], tentative: bool) -> Vec<f32> {
    let segment = Segment { sequence, tokens: rows, tentative };
    engine.model().forward(engine.machine(), &mut [segment], scratch, &mut ()).expect("a step");
    scratch.output()[..rows.len() * engine.config().hidden_size].to_vec()
}

#[test]
fn a_draft_leaves_exactly_the_rows_that_were_accepted() {
    for model in MODELS {
        let engine = open(&options(model));
        let config = engine.config();
        let mut scratch = Scratch::new(config, 64).expect("buffers");
        let text = ids(120);
        let mut plain = Sequence::new(config, 256).expect("a sequence");
        let want = text.chunks(1).flat_map(|id| step(&engine, &mut scratch, &mut plain, id, false)).collect::<Vec<_>>();

        let mut drafted = Sequence::new(config, 256).expect("a sequence");
        let (mut got, mut at, mut accept) = (Vec::new(), 0, 0);
        while at < text.len() {
            // Four rows of the text and two wrong ones; 0 to 4 of them accepted in turn.
            let right = 4.min(text.len() - at);
            let mut draft = text[at..at + right].to_vec();
            draft.extend([3, 5]);
            let rows = step(&engine, &mut scratch, &mut drafted, &draft, true);
            let accepted = accept.min(right);
            drafted.commit(config, engine.machine(), accepted).expect("commit");
            got.extend_from_slice(&rows[..accepted * config.hidden_size]);
            at += accepted;
            accept = (accept + 1) % 5;
        }
        assert!(got.iter().zip(&want).all(|(a, b)| a.to_bits() == b.to_bits()) && got.len() == want.len(), "{model}");
        for layer in 0..config.layers.len() {
            assert_eq!(drafted.kda_state(layer), plain.kda_state(layer), "{model}: layer {layer}");
            assert_eq!(drafted.conv_state(layer), plain.conv_state(layer), "{model}: layer {layer}");
            assert_eq!(drafted.latent_cache(layer), plain.latent_cache(layer), "{model}: layer {layer}");
        }
    }
}

#[test]
fn sequences_in_one_step_do_not_see_each_other() {
    for model in MODELS {
        let engine = open(&options(model));
        let config = engine.config();
        let mut scratch = Scratch::new(config, 64).expect("buffers");
        let texts = [ids(11), ids(30)[13..].to_vec(), vec![9]];
        let want: Vec<Vec<f32>> = texts
            .iter()
            .map(|text| step(&engine, &mut scratch, &mut Sequence::new(config, 64).expect("a sequence"), text, false))
            .collect();
        let mut sequences: Vec<Sequence> =
            texts.iter().map(|_| Sequence::new(config, 64).expect("a sequence")).collect();
        let mut segments: Vec<Segment<'_>> = sequences
            .iter_mut()
            .zip(&texts)
            .map(|(sequence, tokens)| Segment { sequence, tokens, tentative: tokens.len() == 1 })
            .collect();
        engine.model().forward(engine.machine(), &mut segments, &mut scratch, &mut ()).expect("a step");
        let want = want.concat();
        assert_eq!(&scratch.output()[..want.len()], &want[..], "{model}");
    }
}

#[test]
fn a_step_that_cannot_be_changes_nothing() {
    let engine = open(&options(MODELS[0]));
    let config = engine.config();
    let mut scratch = Scratch::new(config, 8).expect("buffers");
    let mut sequence = Sequence::new(config, 10).expect("a sequence");
    let mut try_rows = |sequence: &mut Sequence, tokens: &[u32]| {
        let segment = Segment { sequence, tokens, tentative: false };
        engine.model().forward(engine.machine(), &mut [segment], &mut scratch, &mut ())
    };
    try_rows(&mut sequence, &[1, 2, 3, 4, 5]).expect("a step");
    for wrong in [&[][..], &[1; 9], &[1; 6], &[512]] {
        let error = try_rows(&mut sequence, wrong).expect_err("refused");
        assert_eq!(error.kind(), deltafin::error::Kind::Usage, "{error}");
        assert_eq!(sequence.len(), 5);
    }
    try_rows(&mut sequence, &[1, 2, 3, 4, 5]).expect("the context is then exactly full");
}

#[test]
fn a_raised_interrupt_ends_a_step_and_the_sequence_says_so() {
    let interrupt = Interrupt::new();
    let path: PathBuf = options(MODELS[0]).model;
    let engine = Engine::open(&EngineOptions { model: path, ..options(MODELS[0]) }, &(), &interrupt).expect("opens");
    let mut session = engine.session().expect("a session");
    session.feed(&[1, 2, 3], &()).expect("prefill");
    interrupt.raise(2);
    let error = session.feed(&[4], &()).expect_err("interrupted");
    assert_eq!(error.kind(), deltafin::error::Kind::Interrupted(2));
}
