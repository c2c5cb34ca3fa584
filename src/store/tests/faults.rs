//! Drives that stall, copies that differ, ends in the middle of a failure: what must not be lost is found again.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::disk::{Answer, Call};
use super::replicas::{EXPERTS, Gate, Spread, everything, path_of};
use super::*;
use crate::checkpoint::ExpertFormat;
use crate::store::schedule::Schedule;

/// Runs `act` and panics when it takes longer than `limit`: a wait that would never end fails instead of hanging.
fn within<T: Send + 'static>(limit: Duration, act: impl FnOnce() -> T + Send + 'static) -> T {
    let (sender, receiver) = std::sync::mpsc::channel();
    std::thread::spawn(move || sender.send(act()));
    receiver.recv_timeout(limit).unwrap_or_else(|_| panic!("not over after {limit:?}"))
}

fn is_read_under(call: Call<'_>, dir: &Path) -> bool {
    matches!(call, Call::Read { .. }) && path_of(call).starts_with(dir)
}

/// A store whose drive 0 hangs in every read once `stuck` is set, until the gate is opened.
struct Hanging {
    spread: Arc<Spread>,
    store: Arc<ExpertStore>,
    gate: Arc<Gate>,
    is_stuck: Arc<AtomicBool>,
}

fn hanging(slots: usize, verify: bool) -> Hanging {
    let spread = Arc::new(Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything]));
    let (gate, is_stuck) = (Arc::new(Gate::default()), Arc::new(AtomicBool::new(false)));
    let (dir, closed, stuck) = (spread.dir(0), Arc::clone(&gate), Arc::clone(&is_stuck));
    let store = spread.open(slots, verify, move |call| {
        if stuck.load(Ordering::SeqCst) && is_read_under(call, &dir) {
            closed.pass();
        }
        Answer::Real
    });
    store.slots.queue().with(|schedule, _| (schedule.overdue_after(Duration::from_millis(30)), 0));
    Hanging { spread, store, gate, is_stuck }
}

#[test]
fn a_drive_that_hangs_costs_no_slot_that_is_needed() {
    for slots in [1, 2, 3] {
        for verify in [false, true] {
            let Hanging { spread, store, gate, is_stuck } = hanging(slots, verify);
            is_stuck.store(true, Ordering::SeqCst);
            let (read_by, of) = (Arc::clone(&store), Arc::clone(&spread));
            within(Duration::from_secs(20), move || {
                for _ in 0..3 {
                    of.model.read(&read_by, &all(EXPERTS));
                }
            });
            assert_eq!(store.take_notices().len(), 1);
            is_stuck.store(false, Ordering::SeqCst);
            gate.open();
            for _ in 0..3 {
                spread.model.read(&store, &all(EXPERTS));
            }
        }
    }
}

#[test]
fn a_caller_that_holds_all_slots_but_one_gets_on_though_a_read_hangs() {
    let Hanging { spread, store, gate, is_stuck } = hanging(4, false);
    is_stuck.store(true, Ordering::SeqCst);
    let (read_by, of) = (Arc::clone(&store), Arc::clone(&spread));
    within(Duration::from_secs(20), move || {
        let mut request = read_by.request(LAYER, &all(EXPERTS));
        let mut held = std::collections::VecDeque::new();
        while let Some(expert) = request.next().unwrap() {
            of.model.check(&expert);
            held.push_back(expert);
            if held.len() > 3 {
                held.pop_front();
            }
        }
    });
    gate.open();
    spread.model.read(&store, &all(EXPERTS));
}

#[test]
fn a_drive_that_hung_is_read_again_once_it_answers() {
    let Hanging { spread, store, gate, is_stuck } = hanging(1, false);
    is_stuck.store(true, Ordering::SeqCst);
    let (read_by, of) = (Arc::clone(&store), Arc::clone(&spread));
    within(Duration::from_secs(20), move || of.model.read(&read_by, &all(EXPERTS)));
    std::thread::sleep(Duration::from_millis(1000));
    is_stuck.store(false, Ordering::SeqCst);
    gate.open();
    std::thread::sleep(Duration::from_millis(300));
    let before = store.stats().drives[0].bytes;
    let deadline = Instant::now() + Duration::from_secs(10);
    while store.stats().drives[0].bytes < before + 1_000_000 {
        assert!(Instant::now() < deadline, "{:?}", store.stats().drives);
        spread.model.read(&store, &all(EXPERTS));
    }
    assert_eq!(store.stats().drives[0].state, "ok");
}

#[test]
fn a_drive_that_failed_for_a_while_is_read_again() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything]);
    let (dir, broken) = (spread.dir(0), Arc::new(AtomicBool::new(false)));
    let seen = Arc::clone(&broken);
    let store = spread.open(2, false, move |call| {
        let fails = seen.load(Ordering::SeqCst) && path_of(call).starts_with(&dir);
        if fails { Answer::Errno(libc::EIO) } else { Answer::Real }
    });
    broken.store(true, Ordering::SeqCst);
    let deadline = Instant::now() + Duration::from_secs(10);
    while store.stats().drives[0].errors == 0 {
        assert!(Instant::now() < deadline);
        spread.model.read(&store, &all(EXPERTS));
    }
    assert_eq!(store.stats().drives[0].state, "failing");
    broken.store(false, Ordering::SeqCst);
    let deadline = Instant::now() + Duration::from_secs(20);
    while store.stats().drives[0].state != "ok" {
        assert!(Instant::now() < deadline, "{:?}", store.stats().drives);
        spread.model.read(&store, &all(EXPERTS));
    }
    assert_eq!(store.take_notices().len(), 1);
}

#[test]
fn a_drive_that_cannot_be_read_from_the_start_is_done_without_where_all_it_has_is_elsewhere() {
    for code in [libc::EIO, libc::ENOENT, libc::ENODEV, libc::EACCES] {
        let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything]);
        let dir = spread.dir(0);
        let store =
            spread.open(
                4,
                false,
                move |call| {
                    if path_of(call).starts_with(&dir) { Answer::Errno(code) } else { Answer::Real }
                },
            );
        for _ in 0..2 {
            spread.model.read(&store, &all(EXPERTS));
        }
        let notices = store.take_notices();
        assert!(notices.len() == 1 && notices[0].contains(&format!("os error {code}")), "{notices:?}");
        assert_eq!(store.stats().drives[0].state, "failing");
    }
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &|number| number > 0]);
    let dir = spread.dir(0);
    let error = spread
        .try_open(
            4,
            false,
            move |call| {
                if path_of(call).starts_with(&dir) { Answer::Errno(libc::EIO) } else { Answer::Real }
            },
        )
        .err()
        .unwrap();
    assert!(error.message().contains("os error 5"), "{error}");
}

/// Copies in the shards, whose parts are at odd offsets, and on a root, whose parts are at pages.
#[test]
fn copies_that_lie_differently_stand_in_for_each_other() {
    for format in [ExpertFormat::Mxfp4, ExpertFormat::Bf16] {
        for bad in [0, 1] {
            let spread = Spread::with_shards(format, &[&everything]);
            let dirs = [spread.model.manifest.dir.clone(), spread.dir(0)];
            let (dir, broken) = (dirs[bad].clone(), Arc::new(AtomicBool::new(false)));
            let seen = Arc::clone(&broken);
            let store = spread.open(3, false, move |call| {
                let fails = seen.load(Ordering::SeqCst) && path_of(call).starts_with(&dir);
                if fails { Answer::Errno(libc::EIO) } else { Answer::Real }
            });
            for _ in 0..2 {
                spread.model.read(&store, &all(EXPERTS));
            }
            broken.store(true, Ordering::SeqCst);
            for _ in 0..6 {
                spread.model.read(&store, &all(EXPERTS));
            }
            let stats = store.stats();
            let errors: u64 = stats.drives.iter().map(|drive| drive.errors).sum();
            let notices = store.take_notices();
            assert_eq!(notices.len(), usize::from(errors > 0), "{notices:?}");
            assert_eq!(stats.retries > 0, errors > 0, "{stats:?}");
        }
    }
}

#[test]
fn a_failure_with_checksums_wanted_is_said_and_counted_too() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything]);
    let (dir, seen) = (spread.dir(0), AtomicUsize::new(0));
    let store = spread.open(4, true, move |call| {
        let fails = path_of(call).starts_with(&dir) && seen.fetch_add(1, Ordering::SeqCst) >= 6;
        if fails { Answer::Errno(libc::EIO) } else { Answer::Real }
    });
    for _ in 0..4 {
        spread.model.read(&store, &all(EXPERTS));
    }
    let stats = store.stats();
    assert!(stats.drives[0].errors > 0 && stats.retries > 0, "{stats:?}");
    let notices = store.take_notices();
    assert!(notices.len() == 1 && notices[0].contains("os error 5"), "{notices:?}");
}

#[test]
fn a_reserved_scale_in_one_copy_is_read_from_the_other() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything]);
    for bad in [0, 1] {
        let good: Vec<Vec<u8>> = (0..EXPERTS as u16).map(|expert| spread.damage(bad, expert, 24_576, 255)).collect();
        for verify in [false, true] {
            for slots in [1, 4] {
                let store = spread.open(slots, verify, |_| {
                    std::thread::sleep(Duration::from_micros(200));
                    Answer::Real
                });
                for _ in 0..3 {
                    spread.model.read(&store, &all(EXPERTS));
                }
                let (notices, stats) = (store.take_notices(), store.stats());
                assert_eq!(stats.drives[1 - bad].errors, 0, "the copy that is right is not blamed: {stats:?}");
                let dir = spread.dir(bad).display().to_string();
                assert!(notices.len() <= 1 && notices.iter().all(|notice| notice.contains(&dir)), "{notices:?}");
            }
        }
        for (expert, bytes) in good.into_iter().enumerate() {
            std::fs::write(spread.file(bad, expert as u16), bytes).unwrap();
        }
    }
    for root in [0, 1] {
        spread.damage(root, 3, 24_576, 255);
    }
    let store = spread.open(4, false, |_| Answer::Real);
    let error = error_of(&store, &all(EXPERTS));
    for part in ["L3/E3", "w1.weight_scale", "E0003.mxfp4"] {
        assert!(error.message().contains(part), "{part}: {error}");
    }
    spread.model.read(&store, &[0, 1, 2, 4, 5, 6, 7]);
}

#[test]
fn the_store_ends_at_any_moment_of_a_failure_and_leaves_nothing_behind() {
    for copies_differ in [false, true] {
        for moment in 0..12 {
            let spread = if copies_differ {
                Spread::with_shards(ExpertFormat::Mxfp4, &[&everything])
            } else {
                Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything])
            };
            let is_ready = Arc::new(AtomicBool::new(false));
            let ready = Arc::clone(&is_ready);
            let store = spread.open(8, moment % 2 == 0, move |call| {
                if ready.load(Ordering::SeqCst) && matches!(call, Call::Read { .. }) {
                    std::thread::sleep(Duration::from_millis(20));
                    return Answer::Errno(libc::EIO);
                }
                Answer::Real
            });
            is_ready.store(true, Ordering::SeqCst);
            let slots = Arc::downgrade(&store.slots);
            drop(store.request(LAYER, &all(EXPERTS)));
            store.lookahead(7, &[1, 2, 3], 8);
            std::thread::sleep(Duration::from_millis(5 * moment));
            let began = Instant::now();
            drop(store);
            assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
            let deadline = Instant::now() + Duration::from_secs(5);
            while slots.strong_count() > 0 && Instant::now() < deadline {
                std::thread::sleep(Duration::from_millis(2));
            }
            assert_eq!(slots.strong_count(), 0, "moment {moment}: memory is left");
        }
    }
}

#[test]
fn all_readers_of_a_drive_work_on_one_expert() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything]);
    let gate = Arc::new(Gate::default());
    let (closed, is_ready, under_way) =
        (Arc::clone(&gate), Arc::new(AtomicBool::new(false)), Arc::new(AtomicUsize::new(0)));
    let (ready, count) = (Arc::clone(&is_ready), Arc::clone(&under_way));
    let store = spread.open(2, false, move |call| {
        if ready.load(Ordering::SeqCst) && matches!(call, Call::Read { .. }) {
            count.fetch_add(1, Ordering::SeqCst);
            closed.pass();
        }
        Answer::Real
    });
    std::thread::sleep(Duration::from_millis(100));
    is_ready.store(true, Ordering::SeqCst);
    let began = Instant::now();
    let request = store.request(LAYER, &[0]);
    while under_way.load(Ordering::SeqCst) < 4 && began.elapsed() < Duration::from_millis(350) {
        std::thread::sleep(Duration::from_millis(1));
    }
    let seen = under_way.load(Ordering::SeqCst);
    gate.open();
    drop(request);
    assert_eq!(seen, 4);
}

#[test]
fn what_is_queued_behind_a_read_that_hangs_is_given_up_with_it() {
    let mut schedule = Schedule::new(&[1, 1]);
    schedule.overdue_after(Duration::from_millis(30));
    let only: Arc<[u16]> = Arc::from([0]);
    for group in [1, 2] {
        schedule.submit_one_of(group, 4096, group, &only, 1 << 1, false, Duration::ZERO);
    }
    schedule.submit(3, 4096, 3, &only, false, Duration::ZERO);
    assert!(schedule.next(0, Duration::ZERO).is_some());
    let (groups, stuck, _) = schedule.overdue(Duration::from_secs(1));
    assert_eq!((groups, stuck), (vec![1, 2], vec![0]), "3 has no other copy");
}

#[test]
fn what_nobody_reads_does_not_make_a_drive_well_again() {
    let mut schedule = Schedule::new(&[1]);
    let only: Arc<[u16]> = Arc::from([0]);
    schedule.submit(1, 4096, 1, &only, false, Duration::ZERO);
    let taken = schedule.next(0, Duration::ZERO).unwrap();
    schedule.put_down(0, Duration::ZERO);
    schedule.skipped(0, taken.ticket, Duration::from_millis(1));
    assert_eq!(schedule.errors(0), 1);
}
