//! Routed experts: where they live, how they reach memory, what is kept. The only way in is [`ExpertStore::request`].

pub mod histogram;
pub mod policy;
mod sealed;
pub mod trace;

use std::sync::Arc;

use crate::checkpoint::Manifest;
use crate::error::Result;
use crate::interrupt::Interrupt;

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

/// Counters since the store was opened.
#[derive(Debug, Clone, Default, serde::Serialize)]
pub struct StoreStats {
    /// One entry a drive.
    pub drives: Vec<DriveStats>,
    /// Requests answered from memory.
    pub hits: u64,
    /// Requests that had to be read.
    pub misses: u64,
    /// Payload bytes of the experts that were read (without alignment padding).
    pub expert_bytes: u64,
    /// Seconds that the model waited for reads.
    pub wait_s: f64,
}

/// Experts on disk and the slots that hold some of them.
pub struct ExpertStore;

impl ExpertStore {
    /// Bytes of one slot for the experts of `manifest`: payload plus alignment room.
    pub fn slot_bytes(manifest: &Manifest) -> u64 {
        let _ = manifest;
        todo!()
    }

    /// Opens the shards and allocates the slots.
    ///
    /// # Errors
    /// Kind `Model` for files that cannot be opened, `Memory` for a slab that cannot be allocated.
    pub fn open(manifest: &Manifest, options: &StoreOptions, interrupt: Interrupt) -> Result<Arc<Self>> {
        let _ = (manifest, options, interrupt);
        todo!()
    }

    /// Asks for `experts` (ascending, distinct) of `layer`; reads start at once, as far as free slots allow.
    pub fn request(&self, layer: u16, experts: &[u16]) -> Request<'_> {
        let _ = (layer, experts);
        todo!()
    }

    /// Counters so far.
    pub fn stats(&self) -> StoreStats {
        todo!()
    }

    /// Payload bytes of experts read so far; cheap.
    pub fn expert_bytes(&self) -> u64 {
        todo!()
    }

    /// Notices for the user that have not been fetched yet (a drive that fell back to buffered reads).
    pub fn take_notices(&self) -> Vec<String> {
        todo!()
    }
}

/// The experts of one layer on their way; yields them in ascending order.
pub struct Request<'a> {
    _store: &'a ExpertStore,
}

impl<'a> Request<'a> {
    /// Waits for the next expert; `None` after the last.
    ///
    /// # Errors
    /// Kind `Io` when a read failed for good (expert, file, offset, cause), `Model` when the bytes are not legal MXFP4
    /// (reserved scale 255), `Interrupted`.
    #[expect(clippy::should_implement_trait, reason = "lends from the store and fails")]
    pub fn next(&mut self) -> Result<Option<Expert<'a>>> {
        todo!()
    }
}

/// One expert in memory; its slot is not reused while this lives.
pub struct Expert<'a> {
    /// Which.
    pub id: ExpertId,
    _store: &'a ExpertStore,
}

impl Expert<'_> {
    /// Bytes of part `index`, in the order of [`crate::checkpoint::ExpertFormat::parts`].
    pub fn part(&self, index: usize) -> &[u8] {
        let _ = index;
        todo!()
    }
}
