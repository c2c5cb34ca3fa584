//! The table under every order of operations, and what its policy answers.

use super::*;
use crate::synth::trace::{Trace, TraceShape};

impl<M> Table<M> {
    /// Everything that must hold between any two operations.
    fn check(&self) {
        let mut listed = vec![false; self.slots.len()];
        let (mut at, mut previous) = (self.reserved.first, NONE);
        while at != NONE {
            let entry = &self.slots[at as usize];
            assert_eq!((entry.is_listed, entry.previous), (true, previous));
            listed[at as usize] = true;
            (previous, at) = (at, entry.next);
        }
        assert_eq!(self.reserved.last, previous);
        for (at, entry) in self.slots.iter().enumerate() {
            assert_eq!(entry.is_listed, listed[at]);
            let (offered, reserved) = match &entry.state {
                State::Ready(_) if entry.pins == 0 => (entry.reservations == 0, entry.reservations > 0),
                State::Failed(..) if entry.pins == 0 => (false, true),
                _ => (false, false),
            };
            assert_eq!(entry.is_listed, reserved);
            assert_eq!(self.policy.offer_of(at as u32), offered.then_some(entry.expert));
            let is_empty = matches!(entry.state, State::Empty(_));
            assert_eq!(self.empty.contains(&(at as u32)), is_empty);
            assert!(!matches!(entry.state, State::Moving));
            if !is_empty {
                assert_eq!(self.slot_of[entry.expert as usize], at as u32);
            }
            if let State::Ready(memory) = &entry.state {
                assert_eq!(Arc::strong_count(memory), 1, "tests hold no memory between operations");
            }
        }
        let filling = self.slots.iter().filter(|entry| matches!(entry.state, State::Filling)).count();
        assert_eq!(self.filling, filling);
        let found = self.slot_of.iter().filter(|slot| **slot != NONE).count();
        assert_eq!(found, self.slots.len() - self.empty.len(), "each expert is in one slot at most");
    }
}

fn fill(table: &mut Table<u32>, expert: Index) -> Hold {
    match table.reserve(expert, false) {
        Reserved::Absent(hold, memory) => {
            table.complete(hold.slot, memory, Ok(()));
            hold
        }
        Reserved::Present(hold) => hold,
        Reserved::Full => panic!("no slot for {expert}"),
    }
}

/// A whole request, one expert after the other. Returns how many were there when it came to them.
fn ask(table: &mut Table<u32>, experts: &[Index]) -> usize {
    let mut kept = table.begin(experts);
    let mut hits = 0;
    for &expert in experts {
        hits += usize::from(is_present(table, expert));
        let hold = fill(table, expert);
        table.come_to(Some(expert), &mut kept);
        table.pin(hold);
        table.release(hold);
        table.unpin(hold);
    }
    table.come_to(None, &mut kept);
    hits
}

fn is_present(table: &Table<u32>, expert: Index) -> bool {
    table.slot_of[expert as usize] != NONE
}

#[test]
fn the_least_recently_used_expert_makes_way() {
    let mut table = Table::new(vec![0, 1, 2], 1, 10);
    for expert in [1, 2, 3, 1] {
        ask(&mut table, &[expert]);
    }
    ask(&mut table, &[4]);
    assert!(is_present(&table, 1) && !is_present(&table, 2) && is_present(&table, 3) && is_present(&table, 4));
    ask(&mut table, &[3]);
    ask(&mut table, &[5]);
    assert!(is_present(&table, 3) && !is_present(&table, 4));
    assert_eq!(table.evictions(), 2);
    table.check();
}

#[test]
fn a_filling_or_pinned_slot_is_never_given_away() {
    let mut table = Table::new(vec![0, 1], 1, 10);
    let pinned = fill(&mut table, 1);
    table.pin(pinned);
    table.release(pinned);
    let Reserved::Absent(filling, memory) = table.reserve(2, false) else { panic!() };
    assert!(matches!(table.reserve(3, true), Reserved::Full));
    table.release(filling);
    assert!(matches!(table.reserve(3, true), Reserved::Full), "nobody waits for it, yet it is being written");
    table.complete(filling.slot, memory, Ok(()));
    assert!(matches!(table.reserve(3, false), Reserved::Absent(hold, 1) if hold.slot == filling.slot));
    table.unpin(pinned);
    table.check();
}

#[test]
fn a_reserved_slot_goes_only_to_the_urgent() {
    let mut table = Table::new(vec![0, 1], 1, 10);
    let (first, last) = (fill(&mut table, 1), fill(&mut table, 2));
    assert!(matches!(table.reserve(3, false), Reserved::Full));
    let Reserved::Absent(hold, memory) = table.reserve(3, true) else { panic!() };
    assert_eq!(hold.slot, last.slot, "the one needed last");
    assert!(matches!(table.view(last), View::Lapsed) && matches!(table.view(first), View::Ready(_)));
    table.release(last);
    table.complete(hold.slot, memory, Ok(()));
    table.check();
    assert_eq!(table.slots[hold.slot as usize].reservations, 1, "a lapsed hold releases nothing");
}

#[test]
fn a_failure_is_told_to_all_who_wait_and_then_forgotten() {
    let mut table = Table::new(vec![0], 1, 10);
    let Reserved::Absent(one, memory) = table.reserve(1, false) else { panic!() };
    let Reserved::Present(two) = table.reserve(1, false) else { panic!() };
    table.complete(one.slot, memory, Err(Error::io("no")));
    for hold in [one, two] {
        assert!(matches!(table.view(hold), View::Failed(_)));
        table.release(hold);
        table.check();
    }
    assert!(!is_present(&table, 1));
    assert!(matches!(table.reserve(1, false), Reserved::Absent(..)));
}

/// Two clients, each wanting experts of its own choice: every order of their operations and of completions, to a depth
/// that reaches every state of two slots and three experts.
#[test]
fn no_order_of_operations_breaks_the_table() {
    fn explore(path: &mut Vec<u8>, depth: usize, seen: &mut usize) {
        if depth == 0 {
            return;
        }
        for operation in 0..16 {
            path.push(operation);
            if replay(path) {
                *seen += 1;
                explore(path, depth - 1, seen);
            }
            path.pop();
        }
    }
    /// Whether the last operation was possible.
    fn replay(path: &[u8]) -> bool {
        let mut table = Table::new(vec![0_u32, 1], 1, 3);
        let mut filling: Vec<(u32, u32)> = Vec::new();
        let mut holds: Vec<(Hold, bool)> = Vec::new();
        for operation in path {
            let possible = match operation {
                0..6 => match table.reserve(u32::from(operation % 3), operation / 3 == 1) {
                    Reserved::Full => true,
                    Reserved::Present(hold) => {
                        holds.push((hold, false));
                        true
                    }
                    Reserved::Absent(hold, memory) => {
                        assert!(filling.iter().all(|(slot, held)| *slot != hold.slot && *held != memory));
                        let pinned = holds.iter().any(|(other, pinned)| *pinned && other.slot == hold.slot);
                        assert!(!pinned, "a pinned slot changed hands");
                        filling.push((hold.slot, memory));
                        holds.push((hold, false));
                        true
                    }
                },
                6..10 => {
                    let at = usize::from(operation - 6) / 2;
                    let result = if operation % 2 == 0 { Ok(()) } else { Err(Error::io("no")) };
                    at < filling.len() && {
                        let (slot, memory) = filling.remove(at);
                        table.complete(slot, memory, result);
                        true
                    }
                }
                10..13 => {
                    let at = usize::from(operation - 10);
                    at < holds.len() && !holds[at].1 && {
                        let (hold, _) = holds.remove(at);
                        table.release(hold);
                        true
                    }
                }
                _ => {
                    let at = usize::from(operation - 13);
                    at < holds.len()
                        && match (holds[at].1, table.view(holds[at].0)) {
                            (true, view) => {
                                assert!(!matches!(view, View::Lapsed), "a pinned reservation lapsed");
                                drop(view);
                                let (hold, _) = holds.remove(at);
                                table.release(hold);
                                table.unpin(hold);
                                true
                            }
                            (false, View::Lapsed) => false,
                            (false, view) => {
                                drop(view);
                                table.pin(holds[at].0);
                                holds[at].1 = true;
                                true
                            }
                        }
                }
            };
            if !possible {
                return false;
            }
            table.check();
        }
        true
    }
    let mut seen = 0;
    explore(&mut Vec::new(), 5, &mut seen);
    assert!(seen > 50_000, "{seen}");
}

#[test]
fn what_is_there_when_a_request_begins_does_not_make_way_for_the_rest_of_it() {
    let mut table = Table::new((0..8).collect(), 1, 100);
    ask(&mut table, &[90, 91, 92]);
    // Ten others, each worth as much, come first.
    assert_eq!(ask(&mut table, &[1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 90, 91, 92]), 3);
    table.check();
    assert!(table.slots.iter().all(|slot| slot.reservations == 0));
    // Half of the slots at most are kept, so that reads can run ahead.
    let there: Vec<Index> = (0..100).filter(|expert| is_present(&table, *expert)).collect();
    let mut kept = table.begin(&there);
    assert_eq!((there.len(), kept.0.len(), table.policy.offered()), (8, 4, 4));
    table.check();
    // One that is taken by somebody who cannot go on otherwise is not missed when it is given back.
    for expert in 50..58 {
        assert!(matches!(table.reserve(expert, true), Reserved::Absent(..)));
    }
    assert!(matches!(table.reserve(60, true), Reserved::Full));
    table.come_to(Some(there[1]), &mut kept);
    assert_eq!(kept.0.len(), 2);
    table.come_to(None, &mut kept);
    table.check();
    assert!(table.slots.iter().all(|slot| slot.reservations == 1));
}

#[test]
fn routing_with_the_sharing_of_the_released_model_hits_at_least_45_percent_in_4_percent_of_the_slots() {
    const LAYERS: usize = 4;
    let shape = TraceShape { layers: LAYERS, ..TraceShape::K3 };
    let mut histogram = Histogram::new(0, LAYERS, shape.experts);
    // Layer and experts of 150 tokens; each text has preferences of its own beside the model's.
    let requests = |text| -> Vec<(u16, Vec<u16>)> {
        let mut source = Trace::new(shape, 1, text, false);
        let mut token = || source.next_token().chunks(shape.top_k).map(<[u16]>::to_vec).collect::<Vec<_>>();
        (0..150).flat_map(|_| (0..).zip(token())).collect()
    };
    for (layer, experts) in (0..4).flat_map(requests) {
        histogram.record(layer, &experts);
    }
    let slots = LAYERS * shape.experts / 25;
    let mut table = Table::new((0..slots as u32).collect(), LAYERS, shape.experts);
    table.learn(shape.top_k, &histogram);
    for expert in histogram.hottest().into_iter().take(slots) {
        let hold = fill(&mut table, expert);
        table.release(hold);
    }
    let (mut hits, mut asked) = (0, 0);
    for (layer, experts) in (1000..1002).flat_map(requests) {
        let index = |expert: &u16| u32::from(layer) * shape.experts as u32 + u32::from(*expert);
        hits += ask(&mut table, &experts.iter().map(index).collect::<Vec<_>>());
        asked += experts.len();
    }
    let rate = hits as f64 / asked as f64;
    assert!(rate > 0.45, "{rate:.3} of {asked}");
    table.check();
}

#[test]
fn an_operation_among_a_hundred_thousand_slots_looks_at_no_more_of_them_than_among_a_thousand() {
    let candidates = Tuning::default().candidates as u64;
    for slots in [1_000, 100_000] {
        let mut table = Table::new((0..slots).collect(), 400, 1000);
        for first in (0..2 * slots).step_by(10) {
            ask(&mut table, &(first..first + 10).collect::<Vec<_>>());
        }
        assert_eq!(table.evictions(), u64::from(slots));
        assert_eq!(table.policy.examined(), u64::from(slots) * candidates, "{slots} slots");
    }
}
