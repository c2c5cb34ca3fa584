//! Experts in the order of their arrival.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::disk::{Answer, Call};
use super::replicas::{Gate, Spread, everything};
use super::*;
use crate::checkpoint::ExpertFormat;

/// All that is asked for, each once, whole, sorted.
fn read_as_they_arrive(spread: &Spread, store: &ExpertStore, experts: &[u16]) -> Vec<u16> {
    let mut request = store.request(LAYER, experts);
    let mut got = Vec::new();
    while let Some(expert) = request.next_there().unwrap() {
        spread.model.check(&expert);
        got.push(expert.id.expert);
    }
    got
}

#[test]
fn what_is_there_goes_before_what_is_not() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything]);
    let (gate, ready) = (Arc::new(Gate::default()), Arc::new(AtomicBool::new(false)));
    let (closed, opened) = (Arc::clone(&gate), Arc::clone(&ready));
    let store = spread.open(8, false, move |call| {
        // One read of expert 1 hangs, the drive's other readers go on.
        if let Call::Read { path, .. } = call
            && path.to_string_lossy().contains("E0001")
            && opened.swap(false, Ordering::SeqCst)
        {
            closed.pass();
        }
        Answer::Real
    });
    ready.store(true, Ordering::SeqCst);
    spread.model.read(&store, &[0, 4]);
    let mut request = store.request(LAYER, &[0, 1, 2, 4]);
    // Expert 2 is read meanwhile.
    let began = Instant::now();
    while store.slots.lock().table.filling() > 1 {
        assert!(began.elapsed() < Duration::from_secs(5));
        std::thread::sleep(Duration::from_millis(1));
    }
    for expected in [0, 2, 4] {
        let expert = request.next_there().unwrap().unwrap();
        spread.model.check(&expert);
        assert_eq!(expert.id.expert, expected);
    }
    gate.open();
    assert_eq!(request.next_there().unwrap().map(|expert| expert.id.expert), Some(1));
    assert!(request.next_there().unwrap().is_none());
}

#[test]
fn each_comes_once_with_any_number_of_slots() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything]);
    for slots in [1, 2, 3, 5, 8, 20] {
        let store = spread.open(slots, false, |_| Answer::Real);
        let mut all_asked = 0;
        for round in 0..20_u16 {
            let asked: Vec<u16> = (0..8).filter(|expert| (expert * 5 + round) % 3 != 0).collect();
            let mut got = read_as_they_arrive(&spread, &store, &asked);
            got.sort_unstable();
            assert_eq!(got, asked, "{slots} slots");
            all_asked += asked.len() as u64;
        }
        let stats = store.stats();
        assert_eq!(stats.hits + stats.misses, all_asked, "{slots} slots");
    }
}

#[test]
fn one_that_fails_is_told_once_and_the_others_come() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything]);
    let broken = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&broken);
    let store = spread.open(8, false, move |call| match call {
        Call::Read { path, .. } if seen.load(Ordering::SeqCst) && path.to_string_lossy().contains("E0003") => {
            Answer::Errno(libc::EIO)
        }
        _ => Answer::Real,
    });
    broken.store(true, Ordering::SeqCst);
    let mut request = store.request(LAYER, &[2, 3, 5, 7]);
    let (mut got, mut failures) = (Vec::new(), 0);
    for _ in 0..4 {
        match request.next_there() {
            Ok(expert) => got.extend(expert.map(|expert| expert.id.expert)),
            Err(error) => {
                assert!(error.message().contains("E3"), "{error}");
                failures += 1;
            }
        }
    }
    got.sort_unstable();
    assert_eq!((got, failures), (vec![2, 5, 7], 1));
    assert!(request.next_there().unwrap().is_none());
}
