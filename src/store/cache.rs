//! Which expert is in which slot. Pure bookkeeping: no memory is touched, no thread waits here. Every operation is O(1) in
//! the number of slots.
//!
//! A slot is empty, filling, ready, failed, or in use (ready and pinned). It changes hands only when it is none of filling
//! and pinned. Reservations are weaker than pins: a request reserves the experts it will yield later, which keeps them
//! until someone has no other way to go on; that is why a request can wait for its next expert, and for nothing else.
//! Which of the slots that nobody wants is given up is the [`Policy`]'s choice.

use std::collections::VecDeque;
use std::sync::Arc;

use super::catalog::Index;
use super::histogram::Histogram;
use super::policy::{Policy, Tuning};
use crate::error::Error;

/// Experts and the slots that hold them, over slot memory of type `M`.
pub(crate) struct Table<M> {
    slots: Vec<Slot<M>>,
    /// `[experts]`: slot, or [`NONE`].
    slot_of: Vec<u32>,
    empty: Vec<u32>,
    /// Is offered the slots that are ready and wanted by nobody.
    policy: Policy,
    /// Ready or failed, and reserved; the most recently reserved last.
    reserved: List,
    evictions: u64,
    filling: usize,
}

const NONE: u32 = u32::MAX;

struct Slot<M> {
    state: State<M>,
    expert: Index,
    /// Counts the fills of this slot: tells a [`Hold`] whether it still holds.
    generation: u64,
    pins: u32,
    reservations: u32,
    /// Place on the list of reserved slots.
    is_listed: bool,
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

/// What keeps experts that are in memory already for the request that names them, until it comes to them.
#[derive(Debug, Default)]
pub(crate) struct Kept(VecDeque<(Index, Hold)>);

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
    /// One empty slot for each of `memory`, for `layers` layers of `experts` experts, numbered `layer · experts + expert`.
    pub(crate) fn new(memory: Vec<M>, layers: usize, experts: usize) -> Self {
        let slots: Vec<_> = memory
            .into_iter()
            .map(|memory| Slot {
                state: State::Empty(memory),
                expert: NONE,
                generation: 0,
                pins: 0,
                reservations: 0,
                is_listed: false,
                previous: NONE,
                next: NONE,
            })
            .collect();
        let empty = (0..slots.len() as u32).rev().collect();
        // Until somebody says how many experts a token takes, every request counts as one token's.
        let policy = Policy::new(layers, experts, usize::MAX, slots.len(), Tuning::default());
        let reserved = List { first: NONE, last: NONE };
        Self { slots, slot_of: vec![NONE; layers * experts], empty, policy, reserved, evictions: 0, filling: 0 }
    }

    /// Experts that made way for others so far.
    pub(crate) fn evictions(&self) -> u64 {
        self.evictions
    }

    /// What the choice of experts to keep goes by: a token asks `top_k` experts of a layer, and earlier runs left
    /// `histogram`.
    pub(crate) fn learn(&mut self, top_k: usize, histogram: &Histogram) {
        self.policy.learn(top_k, histogram);
    }

    /// The model asks for `experts`, ascending, all of one layer. Those that are there are reserved, so that they do not
    /// make way for the others before the request comes to them; half of the slots at most, for the others need some too.
    pub(crate) fn begin(&mut self, experts: &[Index]) -> Kept {
        self.begin_with(experts, &[])
    }

    /// As [`Table::begin`], where some of `experts` are reserved already: `guessed`, ascending, which go before the others
    /// in what is kept, for they were read for this request and no other.
    pub(crate) fn begin_with(&mut self, experts: &[Index], guessed: &[(Index, Hold)]) -> Kept {
        self.policy.requested(experts);
        let mut kept = Kept::default();
        let mut room = (self.slots.len() / 2).saturating_sub(guessed.len());
        for &expert in experts {
            if let Ok(at) = guessed.binary_search_by_key(&expert, |(expert, _)| *expert) {
                kept.0.push_back(guessed[at]);
            } else if room > 0
                && let Some(hold) = self.reserve_present(expert)
            {
                kept.0.push_back((expert, hold));
                room -= 1;
            }
        }
        kept
    }

    /// The request has come to `expert` and reserved it, or `None` when it ends: nothing up to there need be kept.
    pub(crate) fn come_to(&mut self, expert: Option<Index>, kept: &mut Kept) {
        while let Some(&(next, hold)) = kept.0.front()
            && expert.is_none_or(|expert| next <= expert)
        {
            kept.0.pop_front();
            self.release(hold);
        }
    }

    /// Reserves `expert`, in a slot that nobody wants if it is not there; with `urgent`, also in a slot that others
    /// reserved for later.
    pub(crate) fn reserve(&mut self, expert: Index, urgent: bool) -> Reserved<M> {
        if let Some((slot, memory)) = self.take_failed(expert) {
            return Reserved::Absent(self.fill(slot, expert), memory);
        }
        if let Some(hold) = self.reserve_present(expert) {
            return Reserved::Present(hold);
        }
        let Some((slot, memory)) = self.take(urgent) else { return Reserved::Full };
        Reserved::Absent(self.fill(slot, expert), memory)
    }

    /// Reserves `expert` in a slot that holds nothing, to be read into this memory; `None` when it is there already, or when
    /// there is no such slot.
    pub(crate) fn reserve_empty(&mut self, expert: Index) -> Option<(Hold, M)> {
        if self.slot_of[expert as usize] != NONE {
            return None;
        }
        let (slot, memory) = self.take_empty()?;
        Some((self.fill(slot, expert), memory))
    }

    /// Reserves `expert`, which will probably be asked for, in a slot that nobody wants; `None` when it is there already, when
    /// there is no such slot, or when `guessed` such experts have half of the slots: those that were not guessed need some.
    pub(crate) fn prefetch(&mut self, expert: Index, guessed: usize) -> Option<(Hold, M)> {
        if self.slot_of[expert as usize] != NONE || 2 * (guessed + 1) > self.slots.len() {
            return None;
        }
        let (slot, memory) = self.take(false)?;
        Some((self.fill(slot, expert), memory))
    }

    /// Whether `expert` is in memory, or on its way.
    pub(crate) fn has(&self, expert: Index) -> bool {
        self.slot_of[expert as usize] != NONE
    }

    /// Reserves `expert` if it is in memory, or on its way.
    pub(crate) fn reserve_present(&mut self, expert: Index) -> Option<Hold> {
        let slot = self.slot_of[expert as usize];
        if slot == NONE {
            return None;
        }
        self.slots[slot as usize].reservations += 1;
        self.relist(slot);
        Some(self.hold(slot))
    }

    /// A reservation that will not be filled after all.
    pub(crate) fn abandon(&mut self, hold: Hold, memory: M) {
        self.forsake(hold.slot);
        self.complete(hold.slot, memory, Ok(()));
    }

    /// Nobody waits for what is being read into `slot` any more: its reservations lapse, its expert can be had elsewhere,
    /// and it is empty once the read ends.
    pub(crate) fn forsake(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        assert!(matches!(entry.state, State::Filling), "only a slot that is being filled is forsaken");
        if entry.expert == NONE {
            return; // already
        }
        self.slot_of[entry.expert as usize] = NONE;
        (entry.expert, entry.reservations, entry.pins) = (NONE, 0, 0);
        entry.generation += 1;
    }

    /// Empties a forsaken slot whose read still hangs by giving it other memory; whether there was one. Looks through all
    /// slots: it is for when there is no other way to go on.
    pub(crate) fn replace(&mut self, memory: impl FnOnce() -> Option<M>) -> bool {
        let is_forsaken = |slot: &Slot<M>| matches!(slot.state, State::Filling) && slot.expert == NONE;
        let Some(slot) = self.slots.iter().position(is_forsaken) else { return false };
        let Some(memory) = memory() else { return false };
        self.complete(slot as u32, memory, Ok(()));
        true
    }

    /// Whether the reservation has not lapsed.
    pub(crate) fn is_live(&self, hold: Hold) -> bool {
        self.slots[hold.slot as usize].generation == hold.generation
    }

    /// As [`Table::complete`], for the fill that began with `hold`. When its slot was forsaken the memory empties it; when
    /// the slot was given other memory since, it goes back to the system.
    pub(crate) fn end(&mut self, hold: Hold, memory: M, result: Result<(), Error>) {
        let entry = &self.slots[hold.slot as usize];
        let is_forsaken = matches!(entry.state, State::Filling) && entry.expert == NONE;
        if is_forsaken || entry.generation == hold.generation {
            self.complete(hold.slot, memory, result);
        }
    }

    /// Whether no slot is empty.
    pub(crate) fn is_full(&self) -> bool {
        self.empty.is_empty()
    }

    /// Slots that are being read into.
    pub(crate) fn filling(&self) -> usize {
        self.filling
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
    pub(crate) fn unpin(&mut self, hold: Hold) {
        let entry = &mut self.slots[hold.slot as usize];
        if entry.generation == hold.generation {
            entry.pins -= 1;
            self.relist(hold.slot);
        }
    }

    /// Takes the memory of a filling slot back from the readers, filled or with the error that stopped them.
    pub(crate) fn complete(&mut self, slot: u32, memory: M, result: Result<(), Error>) {
        let entry = &mut self.slots[slot as usize];
        assert!(matches!(entry.state, State::Filling), "a slot is completed once");
        self.filling -= 1;
        if entry.expert == NONE {
            entry.state = State::Empty(memory);
            self.empty.push(slot);
            return;
        }
        entry.state = match result {
            Ok(()) => State::Ready(Arc::new(memory)),
            Err(error) => State::Failed(memory, error),
        };
        self.relist(slot);
    }

    /// A slot whose memory was taken is now `expert`'s, who has one reservation.
    fn fill(&mut self, slot: u32, expert: Index) -> Hold {
        let entry = &mut self.slots[slot as usize];
        entry.state = State::Filling;
        entry.expert = expert;
        entry.generation += 1;
        entry.reservations = 1;
        self.slot_of[expert as usize] = slot;
        self.filling += 1;
        self.hold(slot)
    }

    /// The slot of an expert that could not be read, if nobody is just being told: whoever asks anew has it read anew.
    fn take_failed(&mut self, expert: Index) -> Option<(u32, M)> {
        let slot = self.slot_of[expert as usize];
        let entry = self.slots.get(slot as usize)?;
        if entry.pins > 0 || !matches!(entry.state, State::Failed(..)) {
            return None;
        }
        self.unlist(slot);
        match std::mem::replace(&mut self.slots[slot as usize].state, State::Moving) {
            State::Failed(memory, _) => Some((slot, memory)),
            _ => unreachable!("the slot was looked at"),
        }
    }

    fn take_empty(&mut self) -> Option<(u32, M)> {
        let slot = self.empty.pop()?;
        match std::mem::replace(&mut self.slots[slot as usize].state, State::Moving) {
            State::Empty(memory) => Some((slot, memory)),
            _ => unreachable!("slots on the empty stack are empty"),
        }
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
            self.policy.withdraw(slot);
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

    /// An empty slot: one that was, else the policy's choice, else (when `urgent`) the one reserved last.
    fn take(&mut self, urgent: bool) -> Option<(u32, M)> {
        if let Some(empty) = self.take_empty() {
            return Some(empty);
        }
        let slot = match (self.policy.victim(), self.reserved.last) {
            (Some(victim), _) => victim,
            (None, last) if urgent && last != NONE => last,
            _ => return None,
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

    /// Puts a slot where its state belongs: on offer, or at the recent end of the reserved.
    fn relist(&mut self, slot: u32) {
        self.unlist(slot);
        self.policy.withdraw(slot);
        let entry = &mut self.slots[slot as usize];
        if entry.pins > 0 {
            return;
        }
        match &entry.state {
            State::Ready(_) if entry.reservations == 0 => self.policy.offer(slot, entry.expert),
            State::Ready(_) | State::Failed(..) if entry.reservations > 0 => self.list(slot),
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

    fn list(&mut self, slot: u32) {
        let last = std::mem::replace(&mut self.reserved.last, slot);
        match last {
            NONE => self.reserved.first = slot,
            last => self.slots[last as usize].next = slot,
        }
        let entry = &mut self.slots[slot as usize];
        (entry.is_listed, entry.previous, entry.next) = (true, last, NONE);
    }

    fn unlist(&mut self, slot: u32) {
        let entry = &mut self.slots[slot as usize];
        let (previous, next) = (entry.previous, entry.next);
        if !std::mem::take(&mut entry.is_listed) {
            return;
        }
        (entry.previous, entry.next) = (NONE, NONE);
        match previous {
            NONE => self.reserved.first = next,
            previous => self.slots[previous as usize].next = next,
        }
        match next {
            NONE => self.reserved.last = previous,
            next => self.slots[next as usize].previous = previous,
        }
    }
}

#[cfg(test)]
mod tests;
