//! The slots behind their lock: who waits for what, the counters, and an expert's way from pieces to a ready slot.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use super::cache::{Hold, Table};
use super::catalog::{Catalog, Index, Piece, Replica};
use super::check::reserved_scale;
use super::reader::ReadError;
use super::slab::Region;
use crate::checkpoint::ExpertFormat;
use crate::error::{Error, Kind, Result};

/// Catalog and slots, shared by requests and readers.
pub(crate) struct Slots {
    pub catalog: Catalog,
    /// File paths, for messages.
    pub shards: Vec<std::path::PathBuf>,
    state: Mutex<SlotState>,
    changed: Condvar,
}

/// What the lock guards.
pub(crate) struct SlotState {
    pub table: Table<Region>,
    /// Experts asked for that were in memory or on their way.
    pub hits: u64,
    /// Experts asked for that had to be read.
    pub misses: u64,
    /// Payload of experts that were read.
    pub expert_bytes: u64,
    /// Time that requests waited.
    pub wait: Duration,
    waiting: usize,
}

impl Slots {
    /// One slot for each of `memory`.
    pub(crate) fn new(catalog: Catalog, shards: Vec<std::path::PathBuf>, memory: Vec<Region>) -> Self {
        let (layers, experts) = catalog.shape();
        let table = Table::new(memory, layers, experts);
        let state = SlotState { table, hits: 0, misses: 0, expert_bytes: 0, wait: Duration::ZERO, waiting: 0 };
        Self { catalog, shards, state: Mutex::new(state), changed: Condvar::new() }
    }

    /// The table and counters.
    pub(crate) fn lock(&self) -> MutexGuard<'_, SlotState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Waits until something changed, `patience` at most.
    pub(crate) fn wait<'a>(
        &self,
        mut state: MutexGuard<'a, SlotState>,
        patience: Duration,
    ) -> MutexGuard<'a, SlotState> {
        state.waiting += 1;
        let (mut state, _) = self.changed.wait_timeout(state, patience).unwrap_or_else(PoisonError::into_inner);
        state.waiting -= 1;
        state
    }

    /// Ends a pin; a request may be waiting for the slot.
    pub(crate) fn unpin(&self, slot: u32) {
        let mut state = self.lock();
        state.table.unpin(slot);
        self.notify(state);
    }

    fn complete(&self, slot: u32, memory: Region, result: Result<()>) {
        let mut state = self.lock();
        if result.is_ok() {
            state.expert_bytes += self.catalog.expert_bytes();
        }
        state.table.complete(slot, memory, result);
        self.notify(state);
    }

    /// Wakes whoever waits, after giving the lock back.
    pub(crate) fn notify(&self, state: MutexGuard<'_, SlotState>) {
        if state.waiting > 0 {
            drop(state);
            self.changed.notify_all();
        }
    }
}

/// An expert on its way into a slot. Its pieces come from any reader in any order; the last one makes it ready.
pub(crate) struct Fill {
    slots: Arc<Slots>,
    index: Index,
    replica: Replica,
    slot: u32,
    failed: AtomicBool,
    arrived: Mutex<Arrived>,
}

struct Arrived {
    /// In the order of the slot; `None` while with a reader.
    pieces: Vec<Option<Region>>,
    missing: usize,
    error: Option<Error>,
}

/// One piece to read: it owns the memory that the system will write to.
pub(crate) struct Job {
    /// What it is part of.
    pub fill: Arc<Fill>,
    /// Its place in the slot.
    pub number: usize,
    /// What to read.
    pub piece: Piece,
    /// Where to.
    pub memory: Region,
}

impl Fill {
    /// Cuts `memory` of the slot behind `hold` into the pieces of `index`, to be read.
    pub(crate) fn start(
        slots: &Arc<Slots>,
        index: Index,
        hold: Hold,
        mut memory: Region,
        piece_bytes: usize,
    ) -> Vec<Job> {
        let replica = slots.catalog.replicas(index)[0];
        let pieces: Vec<Piece> = slots.catalog.pieces(replica, piece_bytes).collect();
        let mut arrived = Arrived { pieces: Vec::new(), missing: pieces.len(), error: None };
        arrived.pieces.resize_with(pieces.len() + 1, || None);
        let parts: Vec<Region> = pieces.iter().map(|piece| memory.split_to(piece.len)).collect();
        arrived.pieces[pieces.len()] = Some(memory); // what this expert leaves of the slot
        let fill = Arc::new(Self {
            slots: Arc::clone(slots),
            index,
            replica,
            slot: hold.slot,
            failed: AtomicBool::new(false),
            arrived: Mutex::new(arrived),
        });
        let jobs = pieces.into_iter().zip(parts).enumerate();
        jobs.map(|(number, (piece, memory))| Job { fill: Arc::clone(&fill), number, piece, memory }).collect()
    }

    /// Whether another piece failed, so that reading the rest would be in vain.
    pub(crate) fn has_failed(&self) -> bool {
        self.failed.load(Ordering::Relaxed)
    }

    /// Takes a piece back from its reader.
    pub(crate) fn arrive(&self, number: usize, memory: Region, result: Result<(), ReadError>) {
        let mut arrived = self.arrived.lock().unwrap_or_else(PoisonError::into_inner);
        arrived.pieces[number] = Some(memory);
        arrived.missing -= 1;
        if let Err(error) = result {
            self.failed.store(true, Ordering::Relaxed);
            let id = self.slots.catalog.id(self.index);
            arrived.error.get_or_insert(error.into_error(Kind::Io, format_args!("expert {id}")));
        }
        if arrived.missing > 0 {
            return;
        }
        let whole = arrived.pieces.drain(..).flatten().reduce(|mut whole, piece| {
            whole.join(piece);
            whole
        });
        let error = arrived.error.take();
        drop(arrived);
        let Some(whole) = whole else { return };
        let result = error.map_or_else(|| self.check(&whole), Err);
        self.slots.complete(self.slot, whole, result);
    }

    /// Refuses scales that stand for no number.
    fn check(&self, memory: &Region) -> Result<()> {
        let catalog = &self.slots.catalog;
        if catalog.format() != ExpertFormat::Mxfp4 {
            return Ok(());
        }
        for (part, matrix) in [(1, "w1"), (3, "w3"), (5, "w2")] {
            let Some(range) = catalog.part_in_slot(self.replica, part) else { continue };
            if let Some(at) = reserved_scale(&memory[range.clone()]) {
                let id = catalog.id(self.index);
                let (file, offset) = catalog.place(self.replica, part, at).unwrap_or_default();
                return Err(Error::model(format!(
                    "expert {id}: {matrix}.weight_scale: scale {at} of {} is 255, which MXFP4 reserves, at offset \
                     {offset} of {}",
                    range.len(),
                    self.slots.shards[file].display()
                ))
                .hint("the file is damaged; fetch it again"));
            }
        }
        Ok(())
    }
}
