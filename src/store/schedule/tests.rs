use std::collections::{BTreeMap, BTreeSet};

use super::*;
use crate::synth::rng::Rng;

const MS: Duration = Duration::from_millis(1);

fn sites(drives: &[u16]) -> Arc<[u16]> {
    drives.iter().copied().collect()
}

/// A piece of 1 MB for each of `jobs`.
fn submit(schedule: &mut Schedule<u32>, jobs: std::ops::Range<u32>, on: &[u16], now: Time) {
    for job in jobs {
        schedule.submit(job, 1_000_000, u64::from(job), &sites(on), false, now);
    }
}

/// Has `drive` read so many pieces of 1 MB in `each`.
fn measure(schedule: &mut Schedule<u32>, drive: u16, each: Duration, now: &mut Time) {
    for _ in 0..200 {
        submit(schedule, 0..1, &[drive], *now);
        let taken = schedule.next(usize::from(drive), *now).unwrap();
        *now += each;
        schedule.done(usize::from(drive), taken.ticket, *now);
    }
}

#[test]
fn what_is_asked_for_goes_before_what_may_be() {
    let mut schedule = Schedule::new(&[4]);
    schedule.submit(1, 1, 1, &sites(&[0]), true, Time::ZERO);
    schedule.submit(2, 1, 2, &sites(&[0]), true, Time::ZERO);
    schedule.submit(3, 1, 3, &sites(&[0]), false, Time::ZERO);
    schedule.promote(2, Time::ZERO);
    let mut order = Vec::new();
    while let Some(taken) = schedule.next(0, Time::ZERO) {
        order.push(taken.job);
    }
    assert_eq!(order, [3, 2, 1]);
}

#[test]
fn no_more_reads_than_the_depth_are_under_way() {
    let mut schedule = Schedule::new(&[2]);
    submit(&mut schedule, 0..5, &[0], Time::ZERO);
    let first = schedule.next(0, Time::ZERO).unwrap();
    assert!(schedule.next(0, Time::ZERO).is_some());
    assert!(schedule.next(0, Time::ZERO).is_none());
    schedule.done(0, first.ticket, MS);
    assert!(schedule.next(0, MS).is_some());
}

#[test]
fn a_slow_drive_gets_nothing_that_a_fast_one_finishes_earlier() {
    let mut schedule = Schedule::new(&[1, 1]);
    let mut now = Time::ZERO;
    measure(&mut schedule, 0, MS, &mut now);
    measure(&mut schedule, 1, 50 * MS, &mut now);
    submit(&mut schedule, 0..10, &[1, 0], now);
    assert!(schedule.next(1, now).is_none(), "ten pieces take the fast drive 10 ms, one takes the slow drive 50 ms");
    submit(&mut schedule, 10..300, &[1, 0], now);
    assert!(schedule.next(1, now).is_some(), "three hundred pieces are work for both");
}

#[test]
fn an_idle_drive_takes_over_from_the_end_of_a_queue() {
    let mut schedule = Schedule::new(&[1, 1]);
    submit(&mut schedule, 0..8, &[0], Time::ZERO);
    submit(&mut schedule, 8..16, &[0, 1], Time::ZERO);
    // Drive 0 alone has the first eight; of the others each has some, and takes over what is left when its own are done.
    let mut read_by_1 = 0;
    while let Some(taken) = schedule.next(1, Time::ZERO) {
        assert!(taken.job >= 8 && taken.site == 1);
        schedule.done(1, taken.ticket, Time::ZERO);
        read_by_1 += 1;
    }
    assert_eq!(read_by_1, 8, "all that it has a copy of");
}

#[test]
fn a_failed_read_goes_to_another_copy_and_then_nowhere() {
    let mut schedule = Schedule::new(&[1, 1]);
    submit(&mut schedule, 0..1, &[0, 1], Time::ZERO);
    let taken = schedule.next(0, Time::ZERO).unwrap();
    let Failed::Again(wake) = schedule.failed(0, taken.ticket, taken.job, MS) else { panic!("there is another copy") };
    assert_eq!(wake, 0b10);
    assert!(schedule.next(0, MS).is_none());
    let taken = schedule.next(1, MS).unwrap();
    assert_eq!((taken.job, taken.site), (0, 1));
    assert!(matches!(schedule.failed(1, taken.ticket, taken.job, MS), Failed::Lost(0)));
    assert_eq!((schedule.retries(), schedule.errors(0), schedule.errors(1)), (1, 1, 1));
}

#[test]
fn a_drive_that_failed_waits_longer_each_time_and_recovers() {
    let mut schedule = Schedule::new(&[1, 1]);
    let mut now = Time::ZERO;
    for round in 0..3_u32 {
        submit(&mut schedule, 0..1, &[0], now);
        let taken = schedule.next(0, now).unwrap();
        assert!(matches!(schedule.failed(0, taken.ticket, taken.job, now), Failed::Lost(_)));
        let wait = BACK_OFF * (1 << round);
        submit(&mut schedule, 0..1, &[0, 1], now + wait / 2);
        assert!(schedule.next(0, now + wait / 2).is_none(), "round {round}");
        let taken = schedule.next(1, now + wait / 2).unwrap();
        schedule.done(1, taken.ticket, now + wait / 2);
        now += wait;
    }
    submit(&mut schedule, 0..1, &[0], now);
    let taken = schedule.next(0, now).unwrap();
    schedule.done(0, taken.ticket, now + MS);
    assert_eq!(schedule.errors(0), 0);
}

#[test]
fn a_read_that_hangs_is_reported_once_and_only_where_another_drive_could_do_it() {
    let mut schedule = Schedule::new(&[1, 1]);
    submit(&mut schedule, 0..1, &[0], Time::ZERO);
    submit(&mut schedule, 1..2, &[1, 0], Time::ZERO);
    assert!(schedule.next(0, Time::ZERO).is_some() && schedule.next(1, Time::ZERO).is_some());
    assert!(schedule.overdue(OVERDUE_MIN / 2).0.is_empty());
    let late = 2 * OVERDUE_MIN;
    let (groups, stuck, _) = schedule.overdue(late);
    assert_eq!((groups, stuck), (vec![1], vec![1]));
    assert!(schedule.overdue(2 * late).0.is_empty());
}

#[test]
fn a_drive_that_delivers_stands_in_although_one_of_its_reads_hangs() {
    let mut schedule = Schedule::new(&[2, 2]);
    submit(&mut schedule, 0..1, &[0, 1], Time::ZERO);
    assert!(schedule.next(0, Time::ZERO).is_some());
    let mut now = 2 * OVERDUE_MIN;
    assert_eq!(schedule.overdue(now).0, [0]);
    submit(&mut schedule, 1..2, &[1, 0], now);
    assert!(schedule.next(1, now).is_some(), "the second copy hangs too");
    now += 2 * OVERDUE_MIN;
    assert!(schedule.overdue(now).0.is_empty(), "nobody is known to be able");
    submit(&mut schedule, 2..3, &[0], now);
    let taken = schedule.next(0, now).unwrap();
    schedule.done(0, taken.ticket, now);
    assert_eq!(schedule.overdue(now).0, [1]);
}

#[test]
fn a_guess_that_has_begun_is_not_dropped() {
    let mut schedule = Schedule::new(&[1]);
    for piece in 0..3 {
        schedule.submit(piece, 1, 9, &sites(&[0]), true, Time::ZERO);
    }
    let taken = schedule.next(0, Time::ZERO).unwrap();
    assert!(schedule.drop_ahead(9, 3).is_none());
    schedule.done(0, taken.ticket, MS);
    assert_eq!(schedule.cancel(9), [1, 2]);
    assert!(schedule.next(0, MS).is_none());
}

/// Does what comes up, thousands of times over, and counts every piece.
#[test]
fn no_piece_is_lost_or_read_twice_whatever_happens() {
    for seed in 0..60 {
        let mut rng = Rng::new(seed);
        let drives = 1 + rng.below(4) as u16;
        let mut schedule = Schedule::new(&vec![1 + rng.below(3) as usize; usize::from(drives)]);
        let mut now = Time::ZERO;
        let mut open: BTreeSet<u32> = BTreeSet::new();
        let mut flying: BTreeMap<u64, (usize, u32)> = BTreeMap::new();
        let mut next_job = 0;
        for _ in 0..3000 {
            now += Duration::from_micros(u64::from(rng.below(2000)));
            match rng.below(12) {
                0..=3 => {
                    let group = u64::from(next_job);
                    let on: Vec<u16> = (0..1 + rng.below(3)).map(|_| rng.below(u32::from(drives)) as u16).collect();
                    let ahead = rng.below(2) == 0;
                    for _ in 0..1 + rng.below(3) {
                        schedule.submit(next_job, u64::from(1 + rng.below(5000)), group, &sites(&on), ahead, now);
                        assert!(open.insert(next_job));
                        next_job += 1;
                    }
                }
                4..=7 => {
                    let drive = rng.below(u32::from(drives)) as usize;
                    if let Some(taken) = schedule.next(drive, now) {
                        assert!(open.contains(&taken.job), "{} was done already", taken.job);
                        assert!(flying.values().all(|(_, job)| *job != taken.job), "{} is read twice", taken.job);
                        flying.insert(taken.ticket, (drive, taken.job));
                    }
                }
                8..=9 => {
                    let Some((ticket, (drive, job))) = flying.pop_first() else { continue };
                    if rng.below(4) > 0 {
                        schedule.done(drive, ticket, now);
                        open.remove(&job);
                    } else if let Failed::Lost(job) = schedule.failed(drive, ticket, job, now) {
                        open.remove(&job);
                    }
                }
                10 => drop(schedule.promote(u64::from(rng.below(next_job + 1)), now)),
                _ => {
                    schedule.overdue(now);
                    let group = u64::from(rng.below(next_job + 1));
                    for job in schedule.cancel(group) {
                        assert!(open.remove(&job) && flying.values().all(|(_, flies)| *flies != job));
                    }
                }
            }
        }
        // All that is left can be read.
        now += BACK_OFF_MAX;
        for (ticket, (drive, job)) in std::mem::take(&mut flying) {
            schedule.done(drive, ticket, now);
            open.remove(&job);
        }
        for drive in (0..usize::from(drives)).cycle().take(200 * usize::from(drives) + 4 * next_job as usize) {
            if let Some(taken) = schedule.next(drive, now) {
                schedule.done(drive, taken.ticket, now);
                assert!(open.remove(&taken.job));
            }
        }
        assert!(open.is_empty(), "seed {seed}: {} pieces are left", open.len());
        assert!(schedule.drives.iter().all(|state| state.demand_bytes == 0 && state.ahead_bytes == 0));
        assert!(schedule.drives.iter().all(|state| state.flight_bytes == 0 && state.flights.is_empty()));
    }
}
