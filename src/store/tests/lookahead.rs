//! Guesses: what they cost, what they must not cost, and how they are counted.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::disk::{Answer, Call};
use super::replicas::{EXPERTS, Gate, Spread, everything};
use super::*;
use crate::checkpoint::ExpertFormat;

/// A store on one drive whose reads wait at a gate from the first request on, and the files in the order of their reads.
struct Gated {
    spread: Spread,
    store: Arc<ExpertStore>,
    gate: Arc<Gate>,
    read: Arc<Mutex<Vec<String>>>,
}

fn gated(slots: usize) -> Gated {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything]);
    let (gate, is_ready, read) = (Arc::new(Gate::default()), Arc::new(AtomicBool::new(false)), Arc::default());
    let (closed, ready, log) = (Arc::clone(&gate), Arc::clone(&is_ready), Arc::clone(&read));
    let log: Arc<Mutex<Vec<String>>> = log;
    let store = spread.open(slots, false, move |call| {
        if let Call::Read { path, .. } = call
            && ready.load(Ordering::SeqCst)
        {
            let name = path.file_stem().unwrap().to_string_lossy().into_owned();
            log.lock().unwrap().push(name);
            closed.pass();
        }
        Answer::Real
    });
    is_ready.store(true, Ordering::SeqCst);
    Gated { spread, store, gate, read }
}

impl Gated {
    /// Waits until all four readers are at the gate.
    fn wait_for_readers(&self) {
        let began = Instant::now();
        while self.read.lock().unwrap().len() < 4 {
            assert!(began.elapsed() < Duration::from_secs(5), "{:?}", self.read.lock().unwrap());
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

fn expert_bytes(spread: &Spread) -> u64 {
    spread.model.manifest.experts.as_ref().unwrap().part_bytes.iter().sum()
}

#[test]
fn what_is_asked_for_goes_before_guesses() {
    let gated = gated(16);
    gated.store.lookahead(7, &[0, 1, 2], 8);
    gated.wait_for_readers();
    // Another thread's layer; its request settles the guess for layer 7.
    let mut request = gated.store.request(LAYER, &[4, 5]);
    gated.store.lookahead(7, &[6, 7], 8);
    gated.gate.open();
    while let Some(expert) = request.next().unwrap() {
        gated.spread.model.check(&expert);
    }
    let read = gated.read.lock().unwrap().clone();
    let last_asked = read.iter().rposition(|name| name == "E0004" || name == "E0005").unwrap();
    let first_guess = read.iter().position(|name| name == "E0006" || name == "E0007").unwrap_or(usize::MAX);
    assert!(last_asked < first_guess, "{read:?}");
}

#[test]
fn guesses_that_have_not_begun_are_dropped_and_their_slots_are_free() {
    let gated = gated(16);
    gated.store.lookahead(LAYER, &[0, 1, 2, 3], 8);
    gated.wait_for_readers();
    let request = gated.store.request(LAYER, &[5]);
    let stats = gated.store.stats();
    assert_eq!(stats.lookahead_dropped + stats.lookahead_wasted_bytes / expert_bytes(&gated.spread), 4);
    assert!(stats.lookahead_dropped >= 2, "{stats:?}");
    assert_eq!(stats.lookahead_useful_bytes, 0);
    gated.gate.open();
    drop(request);
    gated.spread.model.read(&gated.store, &all(EXPERTS));
    let stats = gated.store.stats();
    assert_eq!(stats.evictions, 0, "16 slots are enough for 8 experts: {stats:?}");
    assert_eq!(stats.expert_bytes, 8 * expert_bytes(&gated.spread), "{stats:?}");
}

#[test]
fn guesses_without_a_slot_are_read_when_a_layer_needs_no_more_slots_and_before_it_ends() {
    for (slots, guessed) in [(4, 2), (5, 2), (2, 1), (1, 0)] {
        let gated = gated(slots);
        gated.gate.open();
        let one = expert_bytes(&gated.spread);
        let mut request = gated.store.request(LAYER, &all(EXPERTS));
        gated.store.lookahead(7, &[1, 3, 4, 6], 4);
        for _ in 0..EXPERTS - 1 {
            gated.spread.model.check(&request.next().unwrap().unwrap());
        }
        // The last expert has a slot; the others are free.
        let last = request.next().unwrap().unwrap();
        let (before, began) = (EXPERTS as u64 * one, Instant::now());
        while gated.store.stats().expert_bytes < before + guessed * one {
            assert!(began.elapsed() < Duration::from_secs(5), "{slots} slots: {:?}", gated.store.stats());
            std::thread::sleep(Duration::from_millis(1));
        }
        gated.spread.model.check(&last);
        drop(last);
        assert!(request.next().unwrap().is_none());
        drop(request);
        // Half of the slots at most are for guesses, and what is in them is still there when the layer has chosen.
        let mut request = gated.store.request(7, &[1, 2, 3, 4, 5, 6]);
        while request.next().unwrap().is_some() {}
        let stats = gated.store.stats();
        assert_eq!(stats.expert_bytes, before + 6 * one, "{slots} slots: {stats:?}");
        assert_eq!(stats.lookahead_useful_bytes, guessed * one, "{slots} slots: {stats:?}");
        assert_eq!((stats.lookahead_wasted_bytes, stats.hits), (0, 0), "{slots} slots: {stats:?}");
    }
}

#[test]
fn a_guess_that_failed_before_anyone_asked_is_read_anew() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything]);
    let broken = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&broken);
    let store = spread.open(8, false, move |_| match seen.load(Ordering::SeqCst) {
        true => Answer::Errno(libc::EIO),
        false => Answer::Real,
    });
    broken.store(true, Ordering::SeqCst);
    store.lookahead(LAYER, &[1, 2, 3], 8);
    let began = Instant::now();
    while store.slots.lock().table.filling() > 0 {
        assert!(began.elapsed() < Duration::from_secs(5));
        std::thread::sleep(Duration::from_millis(1));
    }
    broken.store(false, Ordering::SeqCst);
    spread.model.read(&store, &[1, 2, 3]);
    spread.model.read(&store, &all(EXPERTS));
}

#[test]
fn a_guess_that_fails_while_it_is_asked_for_is_an_error_once() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything]);
    let broken = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&broken);
    let store = spread.open(8, false, move |_| {
        if seen.load(Ordering::SeqCst) {
            std::thread::sleep(Duration::from_millis(30));
            return Answer::Errno(libc::EIO);
        }
        Answer::Real
    });
    broken.store(true, Ordering::SeqCst);
    store.lookahead(LAYER, &[1], 8);
    let error = error_of(&store, &[1]);
    assert_eq!(error.kind(), Kind::Io);
    broken.store(false, Ordering::SeqCst);
    spread.model.read(&store, &[1, 2]);
}

#[test]
fn guesses_of_any_kind_do_no_harm_with_any_number_of_slots() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &|number| number % 2 == 0]);
    for slots in [1, 2, 3, 16] {
        let store = spread.open(slots, false, |_| Answer::Real);
        for round in 0..10 {
            store.lookahead(LAYER, &[round % 8, 3], 8);
            store.lookahead(LAYER, &[round % 8, 3], 8); // twice
            spread.model.read(&store, &[1, 3, 5]);
            store.lookahead(7, &all(EXPERTS), 8); // more than there are slots, and never asked for
            store.lookahead(1, &[0], 8); // no such layer
            store.lookahead(LAYER, &[900], 8); // no such expert
            store.lookahead(LAYER, &[], 8);
            spread.model.read(&store, &[0, 3, 7]);
        }
    }
}

#[test]
fn threads_ask_while_guesses_run() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything]);
    for slots in [1, 2, 5, 16] {
        let store = spread.open(slots, false, |_| Answer::Real);
        std::thread::scope(|scope| {
            for thread in 0..3_u16 {
                let (store, spread) = (&store, &spread);
                scope.spawn(move || {
                    for round in 0..40_u16 {
                        store.lookahead(LAYER, &[(round + thread) % 8, (round * 3) % 8, (round * 5 + 1) % 8], 8);
                        let asked: Vec<u16> = (0..8).filter(|at| (at * 5 + thread + round) % 3 > 0).collect();
                        spread.model.read(store, &asked);
                    }
                });
            }
        });
    }
}

#[test]
fn guessing_ends_where_it_does_not_pay_and_is_tried_now_and_then() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything]);
    let store = spread.open(4, false, |_| Answer::Real);
    let mut at_half = 0;
    for round in 0..600_u16 {
        store.lookahead(LAYER, &[4 + round % 2, 6 + round % 2], 8);
        spread.model.read(&store, &[round % 2, 2 + round % 2]);
        if round == 300 {
            let stats = store.stats();
            at_half = stats.lookahead_wasted_bytes / expert_bytes(&spread) + stats.lookahead_dropped;
        }
    }
    let stats = store.stats();
    let after = stats.lookahead_wasted_bytes / expert_bytes(&spread) + stats.lookahead_dropped - at_half;
    assert!(at_half > 20, "guesses were made: {at_half}");
    assert!((1..=20).contains(&after), "{after} guesses after it was known that they do not pay");
}
