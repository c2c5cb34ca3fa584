//! Routed experts: where they live, how they reach memory, what is kept. The only way in is [`ExpertStore::request`].
//!
//! Catalog → which bytes of which file; slots → memory for so many experts; drives → threads that read the one into the
//! other; cache → which slots are given up. K3 asks for 16 experts of 17.5 MB in each of 92 layers, 25.8 GB a token, so the
//! drives' bandwidth is what all of this is about.

mod cache;
mod catalog;
mod check;
mod drive;
mod files;
pub mod histogram;
mod lookahead;
pub mod packed;
pub mod policy;
mod reader;
mod request;
mod schedule;
mod sealed;
pub mod simulate;
mod slots;
#[cfg(test)]
mod tests;
pub mod trace;
mod volume;
mod warm;

use std::sync::Arc;
use std::time::{Duration, Instant};

use self::drive::Readers;
use self::histogram::Histogram;
use self::lookahead::Guess;
use self::packed::PackedRoot;
use self::slots::{Fill, Reading, SlotState, Slots};
use crate::checkpoint::Manifest;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
pub(crate) use crate::memory::{ALIGN, Region};

pub(crate) use self::catalog::{Catalog, Piece, Replica};
pub(crate) use self::check::reserved_scale;
pub(crate) use self::files::{Files, Names};
pub(crate) use self::reader::{Disk, ReadError, System, Tally};
pub use self::request::{Expert, Request};
pub(crate) use self::schedule::DRIVES_MAX;
pub(crate) use self::sealed::checksum;
pub(crate) use self::volume::Volumes;

/// How long the end waits for reads in flight; one that takes longer is left behind.
const SHUTDOWN: Duration = Duration::from_millis(500);

/// A routed expert: 0-based layer and expert number, as in the tensor names. Displays as `L17/E403`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct ExpertId {
    /// 0-based layer.
    pub layer: u16,
    /// 0-based expert of that layer.
    pub expert: u16,
}

impl std::fmt::Display for ExpertId {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "L{}/E{}", self.layer, self.expert)
    }
}

/// How the store is set up.
#[derive(Debug, Clone)]
pub struct StoreOptions {
    /// Experts that fit in memory at once.
    pub slots: usize,
    /// Read past the page cache where the file system allows.
    pub direct: bool,
    /// Reader threads (queue depth) a drive.
    pub queue_depth: usize,
    /// Bytes of one positional read.
    pub piece_bytes: usize,
    /// Compare every expert read from a drive root with its checksum.
    pub verify: bool,
}

/// How one drive was read, for the report.
#[derive(Debug, Clone, serde::Serialize)]
pub struct DriveStats {
    /// Directory the drive's files are in.
    pub path: String,
    /// `direct` or `buffered`: the mode in force.
    pub mode: String,
    /// Bytes asked of the operating system for experts.
    pub bytes: u64,
    /// Positional reads issued.
    pub reads: u64,
    /// Seconds during which at least one read was in flight.
    pub seconds: f64,
    /// Reads that failed.
    pub errors: u64,
    /// `ok`, or `failing`: its last read failed.
    pub state: String,
}

/// Counters since the store was opened. `hits + misses` is the number of experts asked for.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct StoreStats {
    /// One entry a drive.
    pub drives: Vec<DriveStats>,
    /// Requests answered from memory, or by a read that was under way for another request.
    pub hits: u64,
    /// Requests that had to be read.
    pub misses: u64,
    /// Experts that made way for others.
    pub evictions: u64,
    /// Payload bytes of the experts that were read (without alignment padding).
    pub expert_bytes: u64,
    /// Seconds that the model waited for reads.
    pub wait_s: f64,
    /// Bytes that were read because they were guessed, and then asked for.
    pub lookahead_useful_bytes: u64,
    /// Bytes that were read because they were guessed, and not asked for by the layer they were guessed for.
    pub lookahead_wasted_bytes: u64,
    /// Guessed experts that were dropped before a read began.
    pub lookahead_dropped: u64,
    /// Pieces that were read from another copy after a failure.
    pub retries: u64,
}

/// Experts on disk and the slots that hold some of them.
pub struct ExpertStore {
    slots: Arc<Slots>,
    readers: Readers,
    interrupt: Interrupt,
}

impl ExpertStore {
    /// Bytes of one slot for the experts of `manifest`, whichever copy is read: payload plus alignment room. 0 for a model
    /// without routed experts.
    ///
    /// # Errors
    /// Kind `Model` for an expert that is neither in a shard nor on a root.
    pub fn slot_bytes(manifest: &Manifest, roots: &[PackedRoot]) -> Result<u64> {
        let catalog = Catalog::new(manifest, roots, &Names::new(manifest, roots))?;
        Ok(catalog.slot_bytes() as u64)
    }

    /// Opens the shards and the drive roots, and allocates the slots; more slots than the model has experts are not made.
    ///
    /// # Errors
    /// Kind `Model` for files that cannot be opened or an expert that is nowhere, `Memory` for a slab that cannot be
    /// allocated or for no slot at all.
    pub fn open(
        manifest: &Manifest,
        roots: &[PackedRoot],
        options: &StoreOptions,
        interrupt: Interrupt,
    ) -> Result<Arc<Self>> {
        Self::open_on(Arc::new(System), manifest, roots, options, interrupt)
    }

    /// As [`ExpertStore::open`], reading through `disk`.
    fn open_on(
        disk: Arc<dyn Disk>,
        manifest: &Manifest,
        roots: &[PackedRoot],
        options: &StoreOptions,
        interrupt: Interrupt,
    ) -> Result<Arc<Self>> {
        let names = Names::new(manifest, roots);
        let catalog = Catalog::new(manifest, roots, &names)?;
        let slots = options.slots.min(catalog.len());
        if slots == 0 && catalog.len() > 0 {
            return Err(Error::memory("no memory for experts: the store needs one slot at least, found 0")
                .hint("give more memory (--memory, --expert-memory)"));
        }
        let files = Arc::new(Files::new(disk, names, options.queue_depth.max(1)));
        let mut volumes = Volumes::open(&files, &catalog.files(), options.direct)?;
        let unread = std::mem::take(&mut volumes.unread);
        let is_read = |file: usize| unread.iter().all(|(drive, _)| usize::from(volumes.of_file[file]) != *drive);
        if let Some((_, error)) = unread.first()
            && !catalog.is_whole_on(is_read)
        {
            return Err(error.clone());
        }
        let slot_bytes = catalog.slot_bytes();
        let slab_bytes = slot_bytes.saturating_mul(slots);
        let mut slab = Region::allocate(slab_bytes, &format!("{slots} expert slots of {slot_bytes} bytes"))?;
        let memory = (0..slots).map(|_| slab.split_to(slot_bytes)).collect();
        let readers = Readers::start(volumes.list, options.queue_depth)?;
        for (drive, error) in &unread {
            readers.queue().blame(*drive, error);
        }
        let reading = Reading {
            drive_of_file: volumes.of_file,
            files,
            queue: readers.queue(),
            piece_bytes: options.piece_bytes,
            verify: options.verify,
        };
        Ok(Arc::new(Self { slots: Arc::new(Slots::new(catalog, memory, reading)), readers, interrupt }))
    }

    /// Asks for `experts` (ascending, distinct) of `layer`; reads start at once, as far as free slots allow.
    pub fn request(&self, layer: u16, experts: &[u16]) -> Request<'_> {
        Request::new(self, layer, experts)
    }

    /// Tells what a token takes, `top_k` experts of a layer, and what earlier runs learned: the choice of experts to keep
    /// goes by both. A histogram of another model's shape is ignored.
    pub fn learn(&self, top_k: usize, histogram: &Histogram) {
        self.slots.lock().table.learn(top_k, histogram);
    }

    /// Begins to read `experts` of `layer`, likeliest first, which will probably be asked for next, behind all that has been
    /// asked for: the first `likely` of them, and the others where such guesses have mostly come true. What finds no slot
    /// now is begun when the request under way needs no more of them. What has not begun is dropped when the layer's
    /// [`ExpertStore::request`] does not name it.
    pub fn lookahead(&self, layer: u16, experts: &[u16], likely: usize) {
        let mut state = self.slots.lock();
        self.settle(&mut state, layer, &[]); // an earlier guess that nothing came of
        if !state.ahead.pays() {
            return;
        }
        for (place, &expert) in experts.iter().enumerate() {
            let Some(index) = self.slots.catalog.index(layer, expert) else { continue };
            if place < likely || !state.table.has(index) && state.ahead.push_unlikely(layer, index) {
                state.ahead.expect(layer, index);
            }
        }
        self.read_ahead(&mut state);
    }

    /// Begins to read what was guessed, as far as there are slots that nobody wants.
    fn read_ahead(&self, state: &mut SlotState) {
        while let Some((layer, index)) = state.ahead.next() {
            let guess = match state.table.reserve_present(index) {
                // Kept until the layer has chosen, lest this layer's reads take its slot.
                Some(hold) => Guess { index, hold, started: None },
                None => match state.table.prefetch(index, state.ahead.held()) {
                    Some((hold, memory)) => {
                        Guess { index, hold, started: Some(Fill::start(&self.slots, index, hold, memory, true)) }
                    }
                    None => return state.ahead.put_back(index),
                },
            };
            state.ahead.push(layer, guess);
        }
    }

    /// The router of `layer` has chosen `asked`, ascending: the guesses that came true go before all others, those that did
    /// not and have not begun are dropped. Returns the former; their slots are kept until released.
    fn settle(&self, state: &mut SlotState, layer: u16, asked: &[u32]) -> Vec<Guess> {
        let SlotState { ahead, table, .. } = state;
        let queue = self.slots.queue();
        let (useful, others) =
            ahead.settle(layer, asked, self.slots.catalog.expert_bytes(), |guess, started, is_asked| {
                if is_asked {
                    self.slots.promote(started.group);
                    return true;
                }
                let dropped = queue.with(|schedule, _| (schedule.drop_ahead(started.group, started.pieces), 0));
                match dropped.and_then(Fill::take_back) {
                    Some(memory) => table.abandon(guess.hold, memory),
                    None => return true,
                }
                false
            });
        others.into_iter().for_each(|hold| table.release(hold));
        useful
    }

    /// Forgets the experts in memory that no request holds; what is being read arrives nevertheless.
    pub fn clear(&self) {
        self.slots.lock().table.clear();
    }

    /// Counters so far.
    pub fn stats(&self) -> StoreStats {
        let drives = self.readers.stats();
        let retries = self.readers.retries();
        let state = self.slots.lock();
        StoreStats {
            drives,
            hits: state.hits,
            misses: state.misses,
            evictions: state.table.evictions(),
            expert_bytes: state.expert_bytes,
            wait_s: state.wait.as_secs_f64(),
            lookahead_useful_bytes: state.ahead.useful_bytes,
            lookahead_wasted_bytes: state.ahead.wasted_bytes,
            lookahead_dropped: state.ahead.dropped,
            retries,
        }
    }

    /// Payload bytes of experts read so far; cheap.
    pub fn expert_bytes(&self) -> u64 {
        self.slots.lock().expert_bytes
    }

    /// Notices for the user that have not been fetched yet (a drive that fell back to buffered reads).
    pub fn take_notices(&self) -> Vec<String> {
        self.readers.take_notices()
    }
}

impl Drop for ExpertStore {
    fn drop(&mut self) {
        self.readers.close();
        self.readers.join(Instant::now() + SHUTDOWN);
    }
}
