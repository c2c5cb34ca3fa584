//! Which expert is in which slot, and which slot is given up next. Pure bookkeeping: no memory is touched, no thread
//! waits here. Every operation is O(1) in the number of slots.
//!
//! A slot is empty, filling, ready, failed, or in use (ready and pinned). It changes hands only when it is none of filling
//! and pinned. Reservations are weaker than pins: a request reserves the experts it will yield later, which keeps them
//! until someone has no other way to go on; that is why a request can wait for its next expert, and for nothing else.

use std::sync::Arc;

use super::catalog::Index;
use crate::error::Error;

/// Experts and the slots that hold them, over slot memory of type `M`.
pub(crate) struct Table<M> {
    slots: Vec<Slot<M>>,
    /// `[experts]`: slot, or [`NONE`].
    slot_of: Vec<u32>,
    empty: Vec<u32>,
    /// Ready and wanted by nobody, least recently used first.
    idle: List,
    /// Ready or failed, and reserved; the most recently reserved last.
    reserved: List,
    evictions: u64,
}

const NONE: u32 = u32::MAX;

struct Slot<M> {
    state: State<M>,
    expert: Index,
    /// Counts the fills of this slot: tells a [`Hold`] whether it still holds.
    generation: u64,
    pins: u32,
    reservations: u32,
    on: On,
    previous: u32,
    next: u32,
}

enum State<M> {
    Empty(M),
    /// The memory is with the readers.
    Filling,
    Ready(Arc<M>),
    Failed(M, Error),
    /// Only while a slot changes state.
    Moving,
}

/// The list a slot is on.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
enum On {
    Nothing,
    Idle,
    Reserved,
}

/// Ends of a list through the slots.
#[derive(Clone, Copy)]
struct List {
    first: u32,
    last: u32,
}

/// A reservation of an expert in a slot. Lapses when somebody else needed the slot more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hold {
    /// The slot.
    pub slot: u32,
    generation: u64,
}

/// What became of an attempt to reserve.
pub(crate) enum Reserved<M> {
    /// The expert is in memory, or on its way already.
    Present(Hold),
    /// The expert must be read into this memory.
    Absent(Hold, M),
    /// No slot can be had now.
    Full,
}

/// What a reserved slot has to offer.
pub(crate) enum View<M> {
    /// The reservation lapsed.
    Lapsed,
    /// Still being read.
    Filling,
    /// There.
    Ready(Arc<M>),
    /// Could not be read.
    Failed(Error),
}

impl<M> Table<M> {
    /// One empty slot for each of `memory`; experts are numbered below `experts`.
    pub(crate) fn new(memory: Vec<M>, experts: usize) -> Self {
        let slots: Vec<_> = memory
            .into_iter()
            .map(|memory| Slot {
                state: State::Empty(memory),
                expert: NONE,
                generation: 0,
                pins: 0,
                reservations: 0,
                on: On::Nothing,
                previous: NONE,
                next: NONE,
            })
            .collect();
        let list = List { first: NONE, last: NONE };
        let empty = (0..slots.len() as u32).rev().collect();
        Self { slots, slot_of: vec![NONE; experts], empty, idle: list, reserved: list, evictions: 0 }
    }

    /// Experts that made way for others so far.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions
    }

    /// Marks an expert as used just now, if it is in memory.
    pub(crate) fn touch(&mut self, expert: Index) {
        let slot = self.slot_of[expert as usize];
        if slot != NONE && self.slots[slot as usize].on == On::Idle {
            self.unlist(slot);
            self.list(slot, On::Idle);
        }
    }

    /// Reserves `expert`, in a slot that nobody wants if it is not there; with `urgent`, also in a slot that others
    /// reserved for later.
    pub(crate) fn reserve(&mut self, expert: Index, urgent: bool) -> Reserved<M> {
        let slot = self.slot_of[expert as usize];
        if slot != NONE {
            self.slots[slot as usize].reservations += 1;
            self.relist(slot);
            return Reserved::Present(self.hold(slot));
        }
        let Some((slot, memory)) = self.take(urgent) else { return Reserved::Full };
        let entry = &mut self.slots[slot as usize];
        entry.state = State::Filling;
        entry.expert = expert;
        entry.generation += 1;
        entry.reservations = 1;
        self.slot_of[expert as usize] = slot;
        Reserved::Absent(self.hold(slot), memory)
    }

    /// Gives a reservation back.
    pub(crate) fn release(&mut self, hold: Hold) {
        let entry = &mut self.slots[hold.slot as usize];
        if entry.generation == hold.generation {
            entry.reservations -= 1;
            self.relist(hold.slot);
        }
    }

    /// What is behind a reservation.
    pub(crate) fn view(&self, hold: Hold) -> View<M> {
        let entry = &self.slots[hold.slot as usize];
        if entry.generation != hold.generation {
            return View::Lapsed;
        }
        match &entry.state {
            State::Filling => View::Filling,
            State::Ready(memory) => View::Ready(Arc::clone(memory)),
            State::Failed(_, error) => View::Failed(error.clone()),
            State::Empty(_) | State::Moving => View::Lapsed,
        }
    }

    /// Keeps the slot from being given to anyone else until [`Table::unpin`]. The reservation must not have lapsed.
    pub(crate) fn pin(&mut self, hold: Hold) {
        let entry = &mut self.slots[hold.slot as usize];
        assert_eq!(entry.generation, hold.generation, "only a live reservation is pinned");
        entry.pins += 1;
        self.relist(hold.slot);
    }

    /// Ends a [`Table::pin`]; whoever pinned has let go of the memory before.
    pub(crate) fn unpin(&mut self, slot: u32) {
        self.slots[slot as usize].pins -= 1;
        self.relist(slot);
    }

    /// Takes the memory of a filling slot back from the readers, filled or with the error that stopped them.
    pub(crate) fn complete(&mut self, slot: u32, memory: M, result: Result<(), Error>) {
        let entry = &mut self.slots[slot as usize];
        assert!(matches!(entry.state, State::Filling), "a slot is completed once");
        entry.state = match result {
            Ok(()) => State::Ready(Arc::new(memory)),
            Err(error) => State::Failed(memory, error),
        };
        self.relist(slot);
    }

    /// Empties every slot that is ready and wanted by nobody.
    pub(crate) fn clear(&mut self) {
        for slot in 0..self.slots.len() as u32 {
            let entry = &self.slots[slot as usize];
            let State::Ready(memory) = &entry.state else { continue };
            if entry.pins > 0 || entry.reservations > 0 || Arc::strong_count(memory) > 1 {
                continue;
            }
            self.unlist(slot);
            let entry = &mut self.slots[slot as usize];
            if let State::Ready(memory) = std::mem::replace(&mut entry.state, State::Moving) {
                let memory = Arc::into_inner(memory).expect("an unpinned slot is referred to by nobody");
                entry.state = State::Empty(memory);
            }
            let expert = std::mem::replace(&mut entry.expert, NONE);
            self.slot_of[expert as usize] = NONE;
            self.empty.push(slot);
        }
    }

    fn hold(&self, slot: u32) -> Hold {
        Hold { slot, generation: self.slots[slot as usize].generation }
    }

    /// An empty slot: one that was, else the least recently used, else (when `urgent`) the one reserved last.
    fn take(&mut self, urgent: bool) -> Option<(u32, M)> {
        if let Some(slot) = self.empty.pop() {
            return match std::mem::replace(&mut self.slots[slot as usize].state, State::Moving) {
                State::Empty(memory) => Some((slot, memory)),
                _ => unreachable!("slots on the empty stack are empty"),
            };
        }
        let slot = match (self.idle.first, self.reserved.last) {
            (NONE, NONE) => return None,
            (NONE, last) if urgent => last,
            (NONE, _) => return None,
            (first, _) => first,
        };
        self.unlist(slot);
        let entry = &mut self.slots[slot as usize];
        self.slot_of[entry.expert as usize] = NONE;
        entry.reservations = 0;
        match std::mem::replace(&mut entry.state, State::Moving) {
            State::Ready(memory) => {
                self.evictions += 1;
                let memory = Arc::into_inner(memory).expect("an unpinned slot is referred to by nobody");
                Some((slot, memory))
            }
            State::Failed(memory, _) => Some((slot, memory)),
            _ => unreachable!("listed slots are ready or failed"),
        }
    }

    /// Puts a slot on the list where its state belongs, at the recent end.
    fn relist(&mut self, slot: u32) {
        self.unlist(slot);
        let entry = &mut self.slots[slot as usize];
        if entry.pins > 0 {
            return;
        }
        match &entry.state {
            State::Ready(_) if entry.reservations == 0 => self.list(slot, On::Idle),
            State::Ready(_) | State::Failed(..) if entry.reservations > 0 => self.list(slot, On::Reserved),
            State::Failed(..) => {
                // Nobody waits for it any more: whoever asks next has it read anew.
                if let State::Failed(memory, _) = std::mem::replace(&mut entry.state, State::Moving) {
                    entry.state = State::Empty(memory);
                }
                self.slot_of[entry.expert as usize] = NONE;
                entry.expert = NONE;
                self.empty.push(slot);
            }
            _ => {}
        }
    }

    fn ends(&mut self, on: On) -> &mut List {
        if on == On::Idle { &mut self.idle } else { &mut self.reserved }
    }

    fn list(&mut self, slot: u32, on: On) {
        let last = std::mem::replace(&mut self.ends(on).last, slot);
        match last {
            NONE => self.ends(on).first = slot,
            last => self.slots[last as usize].next = slot,
        }
        let entry = &mut self.slots[slot as usize];
        (entry.on, entry.previous, entry.next) = (on, last, NONE);
    }

    fn unlist(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        let (on, previous, next) = (entry.on, entry.previous, entry.next);
        if on == On::Nothing {
            return;
        }
        (entry.on, entry.previous, entry.next) = (On::Nothing, NONE, NONE);
        match previous {
            NONE => self.ends(on).first = next,
            previous => self.slots[previous as usize].next = next,
        }
        match next {
            NONE => self.ends(on).last = previous,
            next => self.slots[next as usize].previous = previous,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    impl<M> Table<M> {
        /// Everything that must hold between any two operations.
        fn check(&self) {
            let mut listed = vec![On::Nothing; self.slots.len()];
            for (list, on) in [(self.idle, On::Idle), (self.reserved, On::Reserved)] {
                let (mut at, mut previous) = (list.first, NONE);
                while at != NONE {
                    let entry = &self.slots[at as usize];
                    assert_eq!((entry.on, entry.previous), (on, previous));
                    listed[at as usize] = on;
                    (previous, at) = (at, entry.next);
                }
                assert_eq!(list.last, previous);
            }
            for (at, entry) in self.slots.iter().enumerate() {
                assert_eq!(entry.on, listed[at]);
                let expected = match &entry.state {
                    State::Ready(_) if entry.pins == 0 && entry.reservations == 0 => On::Idle,
                    State::Ready(_) | State::Failed(..) if entry.pins == 0 => On::Reserved,
                    _ => On::Nothing,
                };
                assert_eq!(entry.on, expected);
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

    fn is_present(table: &Table<u32>, expert: Index) -> bool {
        table.slot_of[expert as usize] != NONE
    }

    #[test]
    fn the_least_recently_used_expert_makes_way() {
        let mut table = Table::new(vec![0, 1, 2], 10);
        for expert in [1, 2, 3, 1] {
            let hold = fill(&mut table, expert);
            table.release(hold);
        }
        let hold = fill(&mut table, 4);
        table.release(hold);
        assert!(is_present(&table, 1) && !is_present(&table, 2) && is_present(&table, 3) && is_present(&table, 4));
        table.touch(3);
        let hold = fill(&mut table, 5);
        table.release(hold);
        assert!(is_present(&table, 3) && !is_present(&table, 1));
        assert_eq!(table.evictions(), 2);
        table.check();
    }

    #[test]
    fn a_filling_or_pinned_slot_is_never_given_away() {
        let mut table = Table::new(vec![0, 1], 10);
        let pinned = fill(&mut table, 1);
        table.pin(pinned);
        table.release(pinned);
        let Reserved::Absent(filling, memory) = table.reserve(2, false) else { panic!() };
        assert!(matches!(table.reserve(3, true), Reserved::Full));
        table.release(filling);
        assert!(matches!(table.reserve(3, true), Reserved::Full), "nobody waits for it, yet it is being written");
        table.complete(filling.slot, memory, Ok(()));
        assert!(matches!(table.reserve(3, false), Reserved::Absent(hold, 1) if hold.slot == filling.slot));
        table.unpin(pinned.slot);
        table.check();
    }

    #[test]
    fn a_reserved_slot_goes_only_to_the_urgent() {
        let mut table = Table::new(vec![0, 1], 10);
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
        let mut table = Table::new(vec![0], 10);
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
            let mut table = Table::new(vec![0_u32, 1], 3);
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
                                    table.unpin(hold.slot);
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
    fn a_hundred_thousand_slots_cost_no_more_than_ten() {
        let mut table = Table::new((0..100_000).collect(), 200_000);
        let start = std::time::Instant::now();
        for expert in (0..200_000).chain(0..200_000) {
            let hold = fill(&mut table, expert);
            table.pin(hold);
            table.release(hold);
            table.unpin(hold.slot);
        }
        assert!(start.elapsed().as_secs() < 5, "{:?}", start.elapsed());
        assert_eq!(table.evictions(), 300_000);
    }
}
