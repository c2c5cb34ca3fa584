//! The slots behind their lock: who waits for what, the counters, and an expert's way from pieces to a ready slot.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::cache::{Hold, Table};
use super::catalog::{Catalog, Index, Piece, Replica};
use super::check::reserved_scale;
use super::drive::Queue;
use super::files::Files;
use super::lookahead::Ahead;
use super::reader::ReadError;
use super::schedule::SITES_MAX;
use super::slab::Region;
use crate::checkpoint::ExpertFormat;
use crate::error::{Error, Kind, Result};

/// Catalog and slots, shared by requests and readers.
pub(crate) struct Slots {
    pub catalog: Catalog,
    /// Drive of each file.
    drive_of_file: Vec<u16>,
    files: Arc<Files>,
    queue: Queue,
    piece_bytes: usize,
    /// Compare copies on drive roots with their checksums.
    verify: bool,
    state: Mutex<SlotState>,
    changed: Condvar,
    /// Fills under way, by number.
    fills: Mutex<FxHashMap<u64, Arc<Fill>>>,
    groups: AtomicU64,
}

/// What the lock guards.
pub(crate) struct SlotState {
    pub table: Table<Region>,
    /// `[slots]`: the copy that a slot was filled from, or one that fills it alike.
    replica_of: Vec<Option<Replica>>,
    /// What was guessed.
    pub ahead: Ahead,
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

/// How experts are read.
pub(crate) struct Reading {
    /// Drive of each file.
    pub drive_of_file: Vec<u16>,
    /// The files.
    pub files: Arc<Files>,
    /// Where reads are queued.
    pub queue: Queue,
    /// Bytes of one read.
    pub piece_bytes: usize,
    /// Compare copies on drive roots with their checksums.
    pub verify: bool,
}

impl Slots {
    /// One slot for each of `memory`.
    pub(crate) fn new(catalog: Catalog, memory: Vec<Region>, reading: Reading) -> Self {
        let (layers, experts) = catalog.shape();
        let replica_of = vec![None; memory.len()];
        let table = Table::new(memory, layers, experts);
        let state = SlotState {
            table,
            replica_of,
            ahead: Ahead::default(),
            hits: 0,
            misses: 0,
            expert_bytes: 0,
            wait: Duration::ZERO,
            waiting: 0,
        };
        let Reading { drive_of_file, files, queue, piece_bytes, verify } = reading;
        Self {
            catalog,
            drive_of_file,
            files,
            queue,
            piece_bytes,
            verify,
            state: Mutex::new(state),
            changed: Condvar::new(),
            fills: Mutex::default(),
            groups: AtomicU64::new(0),
        }
    }

    /// Where reads are queued.
    pub(crate) fn queue(&self) -> &Queue {
        &self.queue
    }

    /// The readers have been told to end: what they have not read will not come.
    pub(crate) fn end(&self) {
        lock(&self.fills).clear();
    }

    /// Gives up the fills of `groups`, whose reads hang: their experts can be asked for again at once, in other slots.
    pub(crate) fn give_up(&self, state: &mut SlotState, groups: &[u64]) {
        for group in groups {
            let fill = lock(&self.fills).get(group).cloned();
            let Some(fill) = fill else { continue };
            if !fill.is_given_up.swap(true, Ordering::Relaxed) {
                state.table.forsake(fill.slot);
            }
        }
    }

    /// The table and counters.
    pub(crate) fn lock(&self) -> MutexGuard<'_, SlotState> {
        lock(&self.state)
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
    pub(crate) fn unpin(&self, hold: Hold) {
        let mut state = self.lock();
        state.table.unpin(hold);
        self.notify(state);
    }

    fn complete(&self, fill: &Fill, memory: Region, result: Result<()>) {
        let mut state = self.lock();
        if result.is_ok() && !fill.is_given_up() {
            state.expert_bytes += self.catalog.expert_bytes();
            state.replica_of[fill.slot as usize] = fill.replicas.first().copied();
        }
        state.table.complete(fill.slot, memory, result);
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

impl SlotState {
    /// The copy that a slot with an expert in it was filled from, or one that fills it alike.
    pub(crate) fn replica_of(&self, slot: u32) -> Replica {
        self.replica_of[slot as usize].expect("a slot with an expert in it was filled")
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// An expert on its way into a slot. Its pieces come from any reader in any order; the last one makes it ready.
///
/// Pieces may come from different copies, as long as those fill the slot alike. Where they do not, one kind is read, and the
/// next after it failed.
pub(crate) struct Fill {
    slots: Arc<Slots>,
    index: Index,
    group: u64,
    slot: u32,
    /// Copies that pieces may come from.
    replicas: Vec<Replica>,
    /// Copies for a further attempt.
    others: Vec<Replica>,
    ahead: bool,
    /// The rest need not be read: a piece failed, or nobody waits any more.
    is_vain: AtomicBool,
    /// The slot's next owner does not wait for it.
    is_given_up: AtomicBool,
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
    /// Where to.
    pub memory: Region,
}

/// A fill that was begun.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Started {
    /// Its number in the schedule.
    pub group: u64,
    /// Its pieces.
    pub pieces: usize,
}

impl Fill {
    /// Has expert `index` read into `memory` of the slot behind `hold`; `ahead` when nobody has asked for it yet.
    pub(crate) fn start(slots: &Arc<Slots>, index: Index, hold: Hold, memory: Region, ahead: bool) -> Started {
        let copies = slots.catalog.replicas(index).to_vec();
        Self::start_from(slots, index, hold.slot, memory, copies, ahead)
    }

    fn start_from(
        slots: &Arc<Slots>,
        index: Index,
        slot: u32,
        mut memory: Region,
        copies: Vec<Replica>,
        ahead: bool,
    ) -> Started {
        let (replicas, others) = slots.choose(copies, ahead);
        let lens: Vec<usize> = slots.catalog.pieces(replicas[0], slots.piece_bytes).map(|piece| piece.len).collect();
        let parts: Vec<Region> = lens.iter().map(|len| memory.split_to(*len)).collect();
        let mut arrived = Arrived { pieces: Vec::new(), missing: lens.len(), error: None };
        arrived.pieces.resize_with(lens.len() + 1, || None);
        arrived.pieces[lens.len()] = Some(memory); // what this expert leaves of the slot
        let group = slots.groups.fetch_add(1, Ordering::Relaxed);
        let sites: Arc<[u16]> = replicas.iter().map(|replica| slots.drive_of(*replica)).collect();
        let fill = Arc::new(Self {
            slots: Arc::clone(slots),
            index,
            group,
            slot,
            replicas,
            others,
            ahead,
            is_vain: AtomicBool::new(false),
            is_given_up: AtomicBool::new(false),
            arrived: Mutex::new(arrived),
        });
        lock(&slots.fills).insert(group, Arc::clone(&fill));
        slots.queue.with(|schedule, now| {
            let mut wake = 0;
            for (number, memory) in parts.into_iter().enumerate() {
                let bytes = memory.len() as u64;
                let job = Job { fill: Arc::clone(&fill), number, memory };
                wake |= schedule.submit(job, bytes, group, &sites, ahead, now);
            }
            ((), wake)
        });
        Started { group, pieces: lens.len() }
    }

    /// Piece `number`, as copy `site` has it.
    pub(crate) fn piece(&self, site: usize, number: usize) -> Piece {
        let mut pieces = self.slots.catalog.pieces(self.replicas[site], self.slots.piece_bytes);
        pieces.nth(number).expect("copies that fill a slot alike have the same pieces")
    }

    /// Whether reading more of it would be in vain.
    pub(crate) fn is_vain(&self) -> bool {
        self.is_vain.load(Ordering::Relaxed) || self.is_given_up()
    }

    fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Relaxed)
    }

    /// Takes a piece back from its reader.
    pub(crate) fn arrive(&self, number: usize, memory: Region, result: Result<(), ReadError>) {
        let mut arrived = lock(&self.arrived);
        if let Err(error) = result {
            self.is_vain.store(true, Ordering::Relaxed);
            let id = self.slots.catalog.id(self.index);
            arrived.error.get_or_insert(error.into_error(Kind::Io, format_args!("expert {id}")));
        }
        let Some(whole) = arrived.put(number, memory) else { return };
        let error = arrived.error.take();
        drop(arrived);
        lock(&self.slots.fills).remove(&self.group);
        let result = match error {
            Some(error) => Err(error),
            None if self.is_given_up() => Ok(()),
            None => self.check(&whole).inspect_err(|error| {
                if !self.others.is_empty() {
                    self.slots.queue.blame(usize::from(self.slots.drive_of(self.replicas[0])), error);
                }
            }),
        };
        if result.is_err() && !self.others.is_empty() && !self.is_given_up() {
            Self::start_from(&self.slots, self.index, self.slot, whole, self.others.clone(), self.ahead);
        } else {
            self.slots.complete(self, whole, result);
        }
    }

    /// The slot's memory again, from all pieces of a fill that no reader has begun.
    pub(crate) fn take_back(jobs: Vec<Job>) -> Option<Region> {
        let mut whole = None;
        for Job { fill, number, memory } in jobs {
            lock(&fill.slots.fills).remove(&fill.group);
            whole = lock(&fill.arrived).put(number, memory);
        }
        whole
    }

    /// Refuses wrong bytes: a checksum that differs, where wanted, and scales that stand for no number.
    fn check(&self, memory: &Region) -> Result<()> {
        let catalog = &self.slots.catalog;
        let replica = self.replicas[0];
        if let Some(checksum) = replica.checksum.filter(|_| self.slots.verify) {
            let found = catalog.checksum_in_slot(replica, memory);
            if found != checksum {
                return Err(Error::new(
                    Kind::Io,
                    format!(
                        "expert {}: {}: checksum {found:016x}, where {checksum:016x} was recorded",
                        catalog.id(self.index),
                        self.slots.files.path(catalog.file_of(replica)).display()
                    ),
                )
                .hint("the file is damaged; delete it and run `deltafin pack` again"));
            }
        }
        if catalog.format() != ExpertFormat::Mxfp4 {
            return Ok(());
        }
        for (part, matrix) in [(1, "w1"), (3, "w3"), (5, "w2")] {
            let Some(range) = catalog.part_in_slot(replica, part) else { continue };
            if let Some(at) = reserved_scale(&memory[range.clone()]) {
                let id = catalog.id(self.index);
                let (file, offset) = catalog.place(replica, part, at).unwrap_or_default();
                return Err(Error::model(format!(
                    "expert {id}: {matrix}.weight_scale: scale {at} of {} is 255, which MXFP4 reserves, at offset \
                     {offset} of {}",
                    range.len(),
                    self.slots.files.path(file).display()
                ))
                .hint("the file is damaged; fetch it again"));
            }
        }
        Ok(())
    }
}

impl Arrived {
    /// A piece is back; the whole memory with the last.
    fn put(&mut self, number: usize, memory: Region) -> Option<Region> {
        self.pieces[number] = Some(memory);
        self.missing -= 1;
        if self.missing > 0 {
            return None;
        }
        self.pieces.drain(..).flatten().reduce(|mut whole, piece| {
            whole.join(piece);
            whole
        })
    }
}

impl Slots {
    fn drive_of(&self, replica: Replica) -> u16 {
        self.drive_of_file[self.catalog.file_of(replica)]
    }

    /// The copies to read first, all of which fill a slot alike, and those for later. With checksums to compare, one copy
    /// at a time, so that it is known which is wrong.
    fn choose(&self, copies: Vec<Replica>, ahead: bool) -> (Vec<Replica>, Vec<Replica>) {
        let first = match copies.as_slice() {
            [_] => return (copies, Vec::new()),
            copies => self.queue.with(|schedule, now| {
                let bytes = self.catalog.expert_bytes();
                let time = |replica: &Replica| schedule.expected(&[self.drive_of(*replica)], bytes, ahead, now);
                let best = copies.iter().min_by(|a, b| time(a).total_cmp(&time(b))).copied();
                (best.expect("an expert has a copy"), 0)
            }),
        };
        let file = self.catalog.file_of(first);
        let fits = |replica: &Replica| {
            if self.verify { self.catalog.file_of(*replica) == file } else { self.catalog.fill_alike(first, *replica) }
        };
        let (mut now, later): (Vec<_>, Vec<_>) = copies.into_iter().partition(fits);
        now.truncate(SITES_MAX);
        (now, later)
    }
}
