//! The experts of a layer on their way to the model: in the order asked, however they arrive.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::cache::{Hold, Kept, Reserved, View};
use super::catalog::Index;
use super::slab::Region;
use super::slots::{Fill, SlotState};
use super::{ExpertId, ExpertStore};
use crate::error::{Error, Result};

/// How long a wait lasts before the interrupt is looked at again.
pub(super) const PATIENCE: Duration = Duration::from_millis(50);

/// The experts of one layer on their way; yields them in the order asked, which is ascending.
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
    /// An expert that the model does not have.
    unknown: Option<Error>,
}

impl<'a> Request<'a> {
    pub(super) fn new(store: &'a ExpertStore, layer: u16, experts: &[u16]) -> Self {
        let asked = VecDeque::with_capacity(experts.len());
        let mut request = Self { store, asked, holds: VecDeque::new(), kept: Kept::default(), unknown: None };
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
        request.kept = state.table.begin(request.asked.make_contiguous());
        request.run_ahead(&mut state);
        drop(state);
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
        let Some(&index) = self.asked.front() else { return Ok(None) };
        let slots = &self.store.slots;
        let mut state = slots.lock();
        let mut began = None;
        // While it is waited for, an expert is pinned: it cannot be lost between its arrival and our waking up.
        let mut pinned = false;
        let outcome = loop {
            if let Err(error) = self.store.interrupt.check() {
                break Err(error);
            }
            if let Some(hold) = self.claim(&mut state) {
                if !pinned {
                    state.table.pin(hold);
                    pinned = true;
                }
                self.run_ahead(&mut state);
                match state.table.view(hold) {
                    View::Ready(memory) => break Ok((hold, memory)),
                    View::Failed(error) => break Err(error),
                    View::Filling | View::Lapsed => {}
                }
            }
            if self.store.drives.iter().any(super::drive::Drive::has_lost_a_reader) {
                break Err(Error::other("a reader thread ended unexpectedly"));
            }
            began.get_or_insert_with(Instant::now);
            state = slots.wait(state, PATIENCE);
        };
        if let Some(began) = began {
            state.wait += began.elapsed();
        }
        match outcome {
            Ok((hold, memory)) => {
                self.asked.pop_front();
                self.holds.pop_front();
                state.table.release(hold);
                let id = slots.catalog.id(index);
                Ok(Some(Expert { id, store: self.store, index, slot: hold.slot, memory: Some(memory) }))
            }
            Err(error) => {
                let interrupted = self.store.interrupt.is_raised();
                if pinned && let Some(hold) = self.holds.front() {
                    state.table.unpin(hold.slot);
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

    /// Reserves, and has read, what slots allow beyond the experts reserved already.
    fn run_ahead(&mut self, state: &mut SlotState) {
        while let Some(&index) = self.asked.get(self.holds.len()) {
            match self.reserve(state, index, false, true) {
                Some(hold) => self.holds.push_back(hold),
                None => break,
            }
        }
    }

    /// One reservation; starts the read of an expert that is not there. `first` when it was not counted before.
    fn reserve(&mut self, state: &mut SlotState, index: Index, urgent: bool, first: bool) -> Option<Hold> {
        let store = self.store;
        let reserved = state.table.reserve(index, urgent);
        if !matches!(reserved, Reserved::Full) {
            state.table.come_to(Some(index), &mut self.kept);
        }
        match reserved {
            Reserved::Present(hold) => {
                state.hits += u64::from(first);
                Some(hold)
            }
            Reserved::Absent(hold, memory) => {
                state.misses += u64::from(first);
                for job in Fill::start(&store.slots, index, hold, memory, store.piece_bytes) {
                    store.drives[store.drive_of_file[job.piece.file]].push(job);
                }
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
    index: Index,
    slot: u32,
    /// `None` only while it is dropped.
    memory: Option<Arc<Region>>,
}

impl Expert<'_> {
    /// Bytes of part `index`, in the order of [`crate::checkpoint::ExpertFormat::parts`]; none for a part that the format
    /// does not have.
    pub fn part(&self, index: usize) -> &[u8] {
        let catalog = &self.store.slots.catalog;
        let range = catalog.part_in_slot(catalog.replicas(self.index)[0], index);
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
