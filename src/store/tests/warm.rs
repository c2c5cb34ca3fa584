//! A warm start fills what is empty, waits for everybody else, and ends when it is told to.

use std::sync::Mutex;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use super::disk::{Answer, Call};
use super::*;

/// Experts of layer 3, as the warm start counts them.
fn first(count: u32) -> Vec<u32> {
    (0..count).collect()
}

#[test]
fn empty_slots_are_filled_in_the_order_given_and_nothing_makes_way() {
    let model = Model::new(10, ExpertFormat::Mxfp4, Order::Adjacent);
    let store = model.open(5);
    model.read(&store, &[8]);
    store.warm(&[7, 8, 3, 999, 5, 15, 1, 2], &AtomicBool::new(false));
    // What is on its way when no slot is empty any more arrives by itself.
    model.read(&store, &[3, 5, 7, 8]);
    assert_eq!((store.stats().hits, store.stats().misses, store.stats().evictions), (4, 1, 0));
    let expert = store.request(7, &[5]).next().unwrap().unwrap();
    model.check(&expert);
    assert_eq!((store.stats().hits, store.stats().misses), (5, 1), "number 15 is expert 5 of the second layer");
}

#[test]
fn with_room_for_all_every_expert_is_read_once_whoever_asks() {
    let model = Model::new(30, ExpertFormat::Mxfp4, Order::Apart);
    let store = model.open(60);
    std::thread::scope(|scope| {
        scope.spawn(|| store.warm(&first(60), &AtomicBool::new(false)));
        (0..20).for_each(|_| model.read(&store, &all(30)));
    });
    model.read(&store, &all(30));
    let expert_bytes: u64 = model.manifest.experts.as_ref().unwrap().part_bytes.iter().sum();
    assert!(store.stats().expert_bytes <= 60 * expert_bytes);
    // The last reads of the warm start may still be under way.
    let deadline = Instant::now() + Duration::from_secs(10);
    while store.slots.lock().table.filling() > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(1));
    }
    assert_eq!(store.slots.lock().table.filling(), 0);
}

#[test]
fn a_request_waits_for_few_of_the_reads_of_a_warm_start() {
    let model = Model::new(40, ExpertFormat::Mxfp4, Order::Adjacent);
    let asked = Arc::new(Mutex::new(Vec::new()));
    let log = Arc::clone(&asked);
    let disk = Faulty::new(move |call| {
        if let Call::Read { path, offset, .. } = call {
            std::thread::sleep(Duration::from_millis(1));
            log.lock().unwrap().push((path.ends_with("one"), offset));
        }
        Answer::Real
    });
    let store = model.open_on(disk, 80);
    let stop = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| store.warm(&first(80), &stop));
        std::thread::sleep(Duration::from_millis(10));
        let before = asked.lock().unwrap().len();
        model.read(&store, &[30, 31, 32, 33, 34, 35]);
        let reads = asked.lock().unwrap().len() - before;
        stop.store(true, Ordering::SeqCst);
        // Six experts of five pieces each; two of others that had begun, and two that come once few are on their way.
        assert!(reads <= (6 + 2 + 2) * 5, "{reads} reads");
        assert!(store.stats().misses == 6, "{:?}", store.stats());
    });
}

#[test]
fn it_ends_at_once_when_told_even_if_a_read_is_stuck() {
    let model = Model::new(10, ExpertFormat::Mxfp4, Order::Adjacent);
    let gate = Arc::new(AtomicBool::new(false));
    for by_interrupt in [true, false] {
        let opened = Arc::clone(&gate);
        let disk = Faulty::new(move |call| {
            while matches!(call, Call::Read { number, .. } if number > 3) && !opened.load(Ordering::SeqCst) {
                std::thread::sleep(Duration::from_millis(1));
            }
            Answer::Real
        });
        let (interrupt, stop) = (Interrupt::new(), AtomicBool::new(false));
        let store = ExpertStore::open_on(disk, &model.manifest, &[], &options(10), interrupt.clone()).unwrap();
        std::thread::scope(|scope| {
            let warm = scope.spawn(|| store.warm(&first(20), &stop));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!warm.is_finished());
            let start = Instant::now();
            if by_interrupt {
                interrupt.raise(2)
            } else {
                stop.store(true, Ordering::SeqCst)
            }
            warm.join().unwrap();
            assert!(start.elapsed() < Duration::from_millis(500), "{:?}", start.elapsed());
        });
    }
    gate.store(true, Ordering::SeqCst); // the late reads still have memory to go to
}

#[test]
fn a_read_that_fails_ends_it_in_silence_and_is_told_to_whoever_needs_the_expert() {
    let model = Model::new(10, ExpertFormat::Mxfp4, Order::Adjacent);
    let broken = Arc::new(AtomicBool::new(false));
    let is_broken = Arc::clone(&broken);
    let disk = Faulty::new(move |call| match call {
        Call::Read { path, .. } if path.ends_with("two") && is_broken.load(Ordering::SeqCst) => {
            Answer::Errno(libc::EIO)
        }
        _ => Answer::Real,
    });
    let store = model.open_on(disk, 10);
    broken.store(true, Ordering::SeqCst);
    store.warm(&first(10), &AtomicBool::new(false));
    assert_eq!(error_of(&store, &[0, 1]).kind(), Kind::Io);
    broken.store(false, Ordering::SeqCst);
    model.read(&store, &all(10));
}
