//! The slots behind their lock: who waits for what, the counters, and an expert's way from pieces to a ready slot.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::cache::{Hold, Table};
use super::catalog::{Catalog, Index, Piece, Replica};
use super::check::reserved_scale;
use super::drive::Queue;
use super::files::Files;
use super::lookahead::Ahead;
use super::schedule::SITES_MAX;
use super::{ExpertId, schedule};
use crate::checkpoint::ExpertFormat;
use crate::error::{Error, Kind, Result};
use crate::memory::Region;

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
    /// Fills under way, by number; their jobs keep them.
    fills: Mutex<FxHashMap<u64, Weak<Fill>>>,
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

    /// Fill `group` is asked for now, and goes before all that may be asked for.
    pub(crate) fn promote(&self, group: u64) {
        if let Some(fill) = self.fill(group) {
            // Before the schedule is told: a further attempt that is queued after that looks here.
            fill.ahead.store(false, Ordering::Relaxed);
        }
        self.queue.with(|schedule, now| ((), schedule.promote(group, now)));
    }

    /// Somebody new asks for what is being read behind `hold`: it goes before all that may be asked for. When that read is
    /// bound to fail it is given up, so that it is made anew and not told of a failure from before it was asked for; whether
    /// that is so.
    pub(crate) fn join(&self, state: &mut SlotState, hold: Hold) -> bool {
        let fill = lock(&self.fills).values().filter_map(Weak::upgrade).find(|fill| fill.hold == hold);
        let Some(fill) = fill else { return false };
        if fill.is_vain() && fill.others.is_empty() {
            self.give_up(state, &[fill.group]);
            return true;
        }
        if fill.ahead.load(Ordering::Relaxed) {
            self.promote(fill.group);
        }
        false
    }

    fn fill(&self, group: u64) -> Option<Arc<Fill>> {
        lock(&self.fills).get(&group)?.upgrade()
    }

    /// Makes a slot usable again whose read hangs, with other memory, while the read keeps the slot's own. Whether there was
    /// such a slot, and memory.
    pub(crate) fn replace_lost(&self, state: &mut SlotState) -> bool {
        state.table.replace(|| Region::allocate(self.catalog.slot_bytes(), "an expert slot").ok())
    }

    /// Gives up the fills of `groups`, whose reads hang: their experts can be asked for again at once, in other slots.
    pub(crate) fn give_up(&self, state: &mut SlotState, groups: &[u64]) {
        for group in groups {
            let Some(fill) = self.fill(*group) else { continue };
            if !fill.is_given_up.swap(true, Ordering::Relaxed) && state.table.is_live(fill.hold) {
                state.table.forsake(fill.hold.slot);
            }
            // Pieces that no reader has need not wait for the drive to have their memory back.
            let queued = self.queue.with(|schedule, _| (schedule.cancel(*group), 0));
            if let Some(memory) = Fill::take_back(queued) {
                state.table.end(fill.hold, memory, Ok(()));
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
        if result.is_ok() && state.table.is_live(fill.hold) {
            state.expert_bytes += self.catalog.expert_bytes();
            state.replica_of[fill.hold.slot as usize] = fill.replicas.first().copied();
        }
        state.table.end(fill.hold, memory, result);
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
    hold: Hold,
    /// Copies that pieces may come from.
    replicas: Vec<Replica>,
    /// Copies for a further attempt.
    others: Vec<Replica>,
    /// One copy at a time is read, so that it is known which is wrong.
    singly: bool,
    /// Nobody has asked for it yet; shared by all attempts.
    ahead: Arc<AtomicBool>,
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

/// What a fill is to do.
struct Attempt {
    index: Index,
    group: u64,
    hold: Hold,
    /// Where it may be read.
    copies: Vec<Replica>,
    singly: bool,
    ahead: Arc<AtomicBool>,
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
        let group = slots.groups.fetch_add(1, Ordering::Relaxed);
        let ahead = Arc::new(AtomicBool::new(ahead));
        Self::start_from(slots, Attempt { index, group, hold, copies, singly: slots.verify, ahead }, memory)
    }

    fn start_from(slots: &Arc<Slots>, attempt: Attempt, mut memory: Region) -> Started {
        let Attempt { index, group, hold, copies, singly, ahead } = attempt;
        let (replicas, others) = slots.choose(copies, singly, ahead.load(Ordering::Relaxed));
        let lens: Vec<usize> = slots.catalog.pieces(replicas[0], slots.piece_bytes).map(|piece| piece.len).collect();
        let parts: Vec<Region> = lens.iter().map(|len| memory.split_to(*len)).collect();
        let mut arrived = Arrived { pieces: Vec::new(), missing: lens.len(), error: None };
        arrived.pieces.resize_with(lens.len() + 1, || None);
        arrived.pieces[lens.len()] = Some(memory); // what this expert leaves of the slot
        let sites: Arc<[u16]> = replicas.iter().map(|replica| slots.drive_of(*replica)).collect();
        let elsewhere = others.iter().fold(0, |drives, other| drives | 1 << slots.drive_of(*other));
        let fill = Arc::new(Self {
            slots: Arc::clone(slots),
            index,
            group,
            hold,
            replicas,
            others,
            singly,
            ahead,
            is_vain: AtomicBool::new(false),
            is_given_up: AtomicBool::new(false),
            arrived: Mutex::new(arrived),
        });
        lock(&slots.fills).insert(group, Arc::downgrade(&fill));
        slots.queue.with(|schedule, now| {
            let mut wake: schedule::Drives = 0;
            let ahead = fill.ahead.load(Ordering::Relaxed);
            for (number, memory) in parts.into_iter().enumerate() {
                let bytes = memory.len() as u64;
                let job = Job { fill: Arc::clone(&fill), number, memory };
                wake |= schedule.submit_one_of(job, bytes, group, &sites, elsewhere, ahead, now);
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

    /// Its number in the schedule.
    pub(crate) fn group(&self) -> u64 {
        self.group
    }

    /// Which expert it is.
    pub(crate) fn id(&self) -> ExpertId {
        self.slots.catalog.id(self.index)
    }

    /// Whether other copies are read should those at hand fail.
    pub(crate) fn has_others(&self) -> bool {
        !self.others.is_empty() && !self.is_given_up()
    }

    /// Whether reading more of it would be in vain.
    pub(crate) fn is_vain(&self) -> bool {
        self.is_vain.load(Ordering::Relaxed) || self.is_given_up()
    }

    fn is_given_up(&self) -> bool {
        self.is_given_up.load(Ordering::Relaxed)
    }

    /// Takes a piece back from its reader.
    pub(crate) fn arrive(&self, number: usize, memory: Region, result: Result<()>) {
        let mut arrived = lock(&self.arrived);
        if let Err(error) = result {
            self.is_vain.store(true, Ordering::Relaxed);
            arrived.error.get_or_insert(error);
        }
        let Some(whole) = arrived.put(number, memory) else { return };
        let error = arrived.error.take();
        drop(arrived);
        let is_wrong = error.is_none();
        let result = match error {
            Some(error) => Err(error),
            None if self.is_given_up() => Ok(()),
            None => self.check(&whole),
        };
        let next = result.as_ref().err().and_then(|error| self.next_attempt(error, is_wrong));
        if let Some(next) = next {
            Self::start_from(&self.slots, next, whole);
        } else {
            lock(&self.slots.fills).remove(&self.group);
            self.slots.complete(self, whole, result);
        }
    }

    /// What to read after this one failed with `error`; `is_wrong` when all came, but not the expert.
    fn next_attempt(&self, error: &Error, is_wrong: bool) -> Option<Attempt> {
        let queue = &self.slots.queue;
        let (mut copies, mut singly) = (self.others.clone(), self.singly);
        if is_wrong && self.replicas.len() > 1 {
            // Any of them may be the one that is wrong.
            copies.splice(0..0, self.replicas.iter().copied());
            singly = true;
        } else if is_wrong {
            let drive = usize::from(self.slots.drive_of(self.replicas[0]));
            if copies.is_empty() { queue.count_error(drive) } else { queue.blame(drive, error) }
        }
        if copies.is_empty() || self.is_given_up() {
            return None;
        }
        queue.with(|schedule, _| (schedule.count_retry(), 0));
        let (index, group, hold, ahead) = (self.index, self.group, self.hold, Arc::clone(&self.ahead));
        Some(Attempt { index, group, hold, copies, singly, ahead })
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

    /// The copies to read first, all of which fill a slot alike, and those for later. `singly`: one copy at a
    /// time.
    fn choose(&self, copies: Vec<Replica>, singly: bool, ahead: bool) -> (Vec<Replica>, Vec<Replica>) {
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
            if singly { self.catalog.file_of(*replica) == file } else { self.catalog.fill_alike(first, *replica) }
        };
        let (mut now, later): (Vec<_>, Vec<_>) = copies.into_iter().partition(fits);
        now.truncate(SITES_MAX);
        (now, later)
    }
}
