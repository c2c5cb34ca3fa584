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
pub mod packed;
pub mod policy;
mod reader;
mod request;
mod sealed;
pub mod simulate;
mod slab;
mod slots;
#[cfg(test)]
mod tests;
pub mod trace;
mod volume;

use std::sync::Arc;
use std::time::{Duration, Instant};

use self::catalog::Catalog;
use self::drive::Drive;
use self::slots::Slots;
use crate::checkpoint::Manifest;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;

pub(crate) use self::files::Files;
pub(crate) use self::reader::{Disk, System, Tally};
pub use self::request::{Expert, Request};
pub(crate) use self::slab::{ALIGN, Region};
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
}

/// Experts on disk and the slots that hold some of them.
pub struct ExpertStore {
    slots: Arc<Slots>,
    drives: Vec<Drive>,
    /// `[shards]`: index into `drives`.
    drive_of_file: Vec<usize>,
    piece_bytes: usize,
    interrupt: Interrupt,
}

impl ExpertStore {
    /// Bytes of one slot for the experts of `manifest`: payload plus alignment room. 0 for a model without routed experts.
    pub fn slot_bytes(manifest: &Manifest) -> u64 {
        Catalog::of_shards(manifest).map_or(0, |catalog| catalog.slot_bytes() as u64)
    }

    /// Opens the shards and allocates the slots; more slots than the model has experts are not made.
    ///
    /// # Errors
    /// Kind `Model` for files that cannot be opened, `Memory` for a slab that cannot be allocated or for no slot at all.
    pub fn open(manifest: &Manifest, options: &StoreOptions, interrupt: Interrupt) -> Result<Arc<Self>> {
        Self::open_on(Arc::new(System), manifest, options, interrupt)
    }

    /// As [`ExpertStore::open`], reading through `disk`.
    fn open_on(
        disk: Arc<dyn Disk>,
        manifest: &Manifest,
        options: &StoreOptions,
        interrupt: Interrupt,
    ) -> Result<Arc<Self>> {
        let catalog = Catalog::of_shards(manifest)?;
        let slots = options.slots.min(catalog.len());
        if slots == 0 && catalog.len() > 0 {
            return Err(Error::memory("no memory for experts: the store needs one slot at least, found 0")
                .hint("give more memory (--memory, --expert-memory)"));
        }
        let files = Arc::new(Files::new(disk, &manifest.shards, &manifest.shard_bytes, options.queue_depth.max(1)));
        let volumes = Volumes::open(&files, &catalog.files(), options.direct)?;
        let slot_bytes = catalog.slot_bytes();
        let slab_bytes = slot_bytes.saturating_mul(slots);
        let mut slab = Region::allocate(slab_bytes, &format!("{slots} expert slots of {slot_bytes} bytes"))?;
        let memory = (0..slots).map(|_| slab.split_to(slot_bytes)).collect();
        let mut drives = Vec::new();
        for (number, volume) in volumes.list.into_iter().enumerate() {
            drives.push(Drive::start(volume, number, options.queue_depth)?);
        }
        Ok(Arc::new(Self {
            slots: Arc::new(Slots::new(catalog, manifest.shards.clone(), memory)),
            drives,
            drive_of_file: volumes.of_file,
            piece_bytes: options.piece_bytes,
            interrupt,
        }))
    }

    /// Asks for `experts` (ascending, distinct) of `layer`; reads start at once, as far as free slots allow.
    pub fn request(&self, layer: u16, experts: &[u16]) -> Request<'_> {
        Request::new(self, layer, experts)
    }

    /// Begins to read `experts` of `layer`, which will probably be asked for next, behind all that has been asked for.
    /// What has not begun is dropped when the layer's [`ExpertStore::request`] does not name it.
    pub fn lookahead(&self, layer: u16, experts: &[u16]) {
        let _ = (layer, experts);
    }

    /// Forgets the experts in memory that no request holds; what is being read arrives nevertheless.
    pub fn clear(&self) {
        self.slots.lock().table.clear();
    }

    /// Counters so far.
    pub fn stats(&self) -> StoreStats {
        let drives = self.drives.iter().map(Drive::stats).collect();
        let state = self.slots.lock();
        StoreStats {
            drives,
            hits: state.hits,
            misses: state.misses,
            evictions: state.table.evictions(),
            expert_bytes: state.expert_bytes,
            wait_s: state.wait.as_secs_f64(),
        }
    }

    /// Payload bytes of experts read so far; cheap.
    pub fn expert_bytes(&self) -> u64 {
        self.slots.lock().expert_bytes
    }

    /// Notices for the user that have not been fetched yet (a drive that fell back to buffered reads).
    pub fn take_notices(&self) -> Vec<String> {
        self.drives.iter().filter_map(|drive| drive.volume().take_notice()).collect()
    }
}

impl Drop for ExpertStore {
    fn drop(&mut self) {
        self.drives.iter().for_each(Drive::close);
        let deadline = Instant::now() + SHUTDOWN;
        self.drives.iter_mut().for_each(|drive| drive.join(deadline));
    }
}
