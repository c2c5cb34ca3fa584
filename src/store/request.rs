//! The experts of a layer on their way to the model: in the order asked, or in that of arrival.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cache::{Hold, Kept, Reserved, View};
use super::catalog::{Index, Replica};
use super::slots::{Fill, SlotState};
use super::{ExpertId, ExpertStore};
use crate::error::{Error, Result};
use crate::memory::Region;

/// How long a wait lasts before the interrupt is looked at again.
pub(super) const PATIENCE: Duration = Duration::from_millis(50);

/// The experts of one layer on their way; [`Request::next`] yields them in the order asked, which is ascending.
///
/// Reads run ahead as far as there are slots. The caller must let go of enough [`Expert`]s: with n slots, it may hold
/// n − 1 when it calls [`Request::next`] (none, with one slot), all requests on the store together; else `next` waits until
/// another thread lets go of one. A request that is dropped early leaves what is being read to the cache.
pub struct Request<'a> {
    store: &'a ExpertStore,
    /// Not yielded yet.
    asked: VecDeque<Index>,
    /// Reservations of the first of `asked`.
    holds: VecDeque<Hold>,
    /// Those of the others that were there from the start.
    kept: Kept,
    /// Those that were on their way already because they were guessed, ascending.
    guessed: Vec<Index>,
    /// An expert that the model does not have.
    unknown: Option<Error>,
}

impl<'a> Request<'a> {
    pub(super) fn new(store: &'a ExpertStore, layer: u16, experts: &[u16]) -> Self {
        let asked = VecDeque::with_capacity(experts.len());
        let mut request =
            Self { store, asked, holds: VecDeque::new(), kept: Kept::default(), guessed: Vec::new(), unknown: None };
        for &expert in experts {
            match store.slots.catalog.index(layer, expert) {
                Some(index) => request.asked.push_back(index),
                None => {
                    let id = ExpertId { layer, expert };
                    request.unknown = Some(Error::model(format!("the model has no expert {id}")));
                    request.asked.clear();
                    break;
                }
            }
        }
        let mut state = store.slots.lock();
        let guessed = store.settle(&mut state, layer, request.asked.make_contiguous());
        let mut guessed: Vec<_> = guessed.into_iter().map(|guess| (guess.index, guess.hold)).collect();
        guessed.sort_unstable_by_key(|(index, _)| *index);
        request.kept = state.table.begin_with(request.asked.make_contiguous(), &guessed);
        request.guessed = guessed.into_iter().map(|(index, _)| index).collect();
        request.run_ahead(&mut state);
        store.slots.notify(state);
        request
    }

    /// Waits for the next expert; `None` after the last. After an error the rest can still be asked for.
    ///
    /// # Errors
    /// Kind `Io` when a read failed for good (expert, file, offset, cause), `Model` when the bytes are not legal MXFP4
    /// (reserved scale 255) or the model has no such expert, `Interrupted`.
    #[expect(clippy::should_implement_trait, reason = "lends from the store and fails")]
    pub fn next(&mut self) -> Result<Option<Expert<'a>>> {
        if let Some(error) = self.unknown.take() {
            return Err(error);
        }
        let slots = &self.store.slots;
        let mut state = slots.lock();
        if self.asked.is_empty() {
            // The last expert has let go of its slot.
            self.store.read_ahead(&mut state);
            return Ok(None);
        }
        let mut began = None;
        // While it is waited for, an expert is pinned: it cannot be lost between its arrival and our waking up.
        let mut pinned = None;
        let outcome = loop {
            if let Err(error) = self.store.interrupt.check() {
                break Err(error);
            }
            if let Some(hold) = self.claim(&mut state) {
                // A fill whose read hung was given up: what is claimed now is another.
                if pinned != Some(hold) {
                    state.table.pin(hold);
                    pinned = Some(hold);
                }
                self.run_ahead(&mut state);
                match state.table.view(hold) {
                    View::Ready(memory) => break Ok((hold, memory)),
                    View::Failed(error) => break Err(error),
                    View::Filling | View::Lapsed => {}
                }
            } else if slots.replace_lost(&mut state) {
                continue;
            }
            if self.store.readers.has_lost_one() {
                break Err(Error::other("a reader thread ended unexpectedly"));
            }
            let overdue = self.store.readers.overdue();
            if !overdue.is_empty() {
                slots.give_up(&mut state, &overdue);
                continue;
            }
            began.get_or_insert_with(Instant::now);
            state = slots.wait(state, PATIENCE);
        };
        if let Some(began) = began {
            state.wait += began.elapsed();
        }
        match outcome {
            Ok((hold, memory)) => {
                let index = self.asked.pop_front();
                self.holds.pop_front();
                state.table.release(hold);
                let id = slots.catalog.id(index.unwrap_or_default());
                let replica = state.replica_of(hold.slot);
                Ok(Some(Expert { id, store: self.store, replica, slot: hold, memory: Some(memory) }))
            }
            Err(error) => {
                let interrupted = self.store.interrupt.is_raised();
                if let Some(hold) = pinned {
                    state.table.unpin(hold);
                }
                if !interrupted {
                    self.asked.pop_front();
                    if let Some(hold) = self.holds.pop_front() {
                        state.table.release(hold);
                    }
                }
                Err(error)
            }
        }
    }

    /// As [`Request::next`], but an expert that is in memory goes before one that is not: the order is that of arrival, and
    /// what depends on an order is the caller's to see to.
    ///
    /// # Errors
    /// As [`Request::next`].
    pub fn next_there(&mut self) -> Result<Option<Expert<'a>>> {
        {
            let state = self.store.slots.lock();
            let there = |hold: &Hold| matches!(state.table.view(*hold), View::Ready(_));
            if let Some(at) = self.holds.iter().position(there).filter(|at| *at > 0) {
                self.holds.make_contiguous()[..=at].rotate_right(1);
                self.asked.make_contiguous()[..=at].rotate_right(1);
            }
        }
        self.next()
    }

    /// A live reservation of the first expert, if a slot can be had for it at all.
    fn claim(&mut self, state: &mut SlotState) -> Option<Hold> {
        let index = *self.asked.front()?;
        match self.holds.front() {
            Some(hold) if !matches!(state.table.view(*hold), View::Lapsed) => return Some(*hold),
            Some(_) => {
                let hold = self.reserve(state, index, true, false)?;
                self.holds[0] = hold;
            }
            None => {
                let hold = self.reserve(state, index, true, true)?;
                self.holds.push_back(hold);
            }
        }
        self.holds.front().copied()
    }

    /// Reserves, and has read, what slots allow beyond the experts reserved already: the rest of this layer's, then what
    /// was guessed for the next, so that the drives go on while this layer ends.
    fn run_ahead(&mut self, state: &mut SlotState) {
        while let Some(&index) = self.asked.get(self.holds.len()) {
            match self.reserve(state, index, false, true) {
                Some(hold) => self.holds.push_back(hold),
                None => return,
            }
        }
        self.store.read_ahead(state);
    }

    /// One reservation; starts the read of an expert that is not there. `first` when it was not counted before.
    fn reserve(&mut self, state: &mut SlotState, index: Index, urgent: bool, first: bool) -> Option<Hold> {
        let store = self.store;
        let mut reserved = state.table.reserve(index, urgent);
        if let Reserved::Present(hold) = reserved
            && matches!(state.table.view(hold), View::Filling)
            && store.slots.join(state, hold)
        {
            reserved = state.table.reserve(index, urgent);
        }
        if !matches!(reserved, Reserved::Full) {
            state.table.come_to(Some(index), &mut self.kept);
        }
        match reserved {
            Reserved::Present(hold) => {
                let was_read = self.guessed.binary_search(&index).is_ok();
                state.misses += u64::from(first && was_read);
                state.hits += u64::from(first && !was_read);
                Some(hold)
            }
            Reserved::Absent(hold, memory) => {
                state.misses += u64::from(first);
                Fill::start(&store.slots, index, hold, memory, false);
                Some(hold)
            }
            Reserved::Full => None,
        }
    }
}

impl Drop for Request<'_> {
    fn drop(&mut self) {
        let mut state = self.store.slots.lock();
        for hold in self.holds.drain(..) {
            state.table.release(hold);
        }
        state.table.come_to(None, &mut self.kept);
        self.store.slots.notify(state);
    }
}

/// One expert in memory; its slot is not reused while this lives.
pub struct Expert<'a> {
    /// Which.
    pub id: ExpertId,
    store: &'a ExpertStore,
    replica: Replica,
    slot: Hold,
    /// `None` only while it is dropped.
    memory: Option<Arc<Region>>,
}

impl Expert<'_> {
    /// Bytes of part `index`, in the order of [`crate::checkpoint::ExpertFormat::parts`]; none for a part that the format
    /// does not have.
    pub fn part(&self, index: usize) -> &[u8] {
        let catalog = &self.store.slots.catalog;
        let range = catalog.part_in_slot(self.replica, index);
        match (&self.memory, range) {
            (Some(memory), Some(range)) => &memory[range],
            _ => &[],
        }
    }
}

impl std::fmt::Debug for Expert<'_> {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Expert({})", self.id)
    }
}

impl Drop for Expert<'_> {
    fn drop(&mut self) {
        self.memory = None; // first: an unpinned slot's memory has one owner, the table
        self.store.slots.unpin(self.slot);
    }
}
