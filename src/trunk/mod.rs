//! The dense trunk, resident: read once into one aligned slab, as stored or in a form that takes less memory.
//! Half-precision values are widened (to f32, exactly), since no kernel takes them.

mod file;
mod format;
mod layout;
mod resident;
mod tensor;

#[cfg(test)]
mod tests;

use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::xxh3_64;

use self::layout::Layout;
use crate::checkpoint::Manifest;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::store::{Names, Region};

pub use self::file::TrunkFile;
pub(crate) use self::file::{Entry, MAGIC, Table, dtype_name};
pub use self::format::TrunkFormat;
pub use self::tensor::Tensor;

/// What loading reports while it runs.
pub trait LoadProgress {
    /// `done` of `total` bytes are in memory. Called from the thread that loads, ten times a second or more often.
    fn loaded(&self, done: u64, total: u64);
}

/// All trunk tensors of a model.
#[derive(Debug)]
pub struct Trunk {
    slab: Arc<Region>,
    /// What records in the slab refer to.
    side: Option<Arc<Vec<u8>>>,
    /// In the order of the manifest.
    tensors: Vec<(String, Tensor)>,
    by_name: FxHashMap<String, usize>,
    modes: Vec<(String, &'static str)>,
    notices: Vec<String>,
}

impl Trunk {
    /// Bytes the trunk will occupy once loaded: tensors at multiples of 64, the sum rounded up to whole pages. Exact, but for
    /// what the exceptions of bf12 take, which is not known before they are read; [`Trunk::resident_bytes`] has it. While
    /// loading, buffers of [`Trunk::LOAD_BYTES_MAX`] at most come on top.
    pub fn planned_bytes(manifest: &Manifest, format: TrunkFormat, packed: Option<&TrunkFile>) -> u64 {
        Layout::new(manifest, format, packed).map_or(0, |layout| {
            let records = layout.encoded_bytes();
            layout.slab_bytes as u64 + format.side_bytes_expected(records)
        })
    }

    /// Bytes of the buffers that loading needs at most, and gives back when it is done.
    pub const LOAD_BYTES_MAX: u64 = resident::BUFFERS_BYTES_MAX as u64;

    /// Reads every trunk tensor of `manifest`, past the page cache where `direct` and the file system allow, to be held as
    /// `format`: from `packed`, a file of that format, or else from the shards.
    ///
    /// # Errors
    /// Kind `Io` for a read that fails (file, offset and cause), `Model` for a file that cannot be opened, a tensor that
    /// is not of a float type, has values that the format cannot hold or differs from its checksum, `Memory` when there is
    /// not enough of it; an interrupt ends the load.
    pub fn load(
        manifest: &Manifest,
        format: TrunkFormat,
        packed: Option<&TrunkFile>,
        direct: bool,
        progress: &dyn LoadProgress,
        interrupt: &Interrupt,
    ) -> Result<Self> {
        let layout = Layout::new(manifest, format, packed)?;
        let places = layout.places.clone();
        let names = match packed {
            Some(packed) => Names::of_files(vec![packed.path.clone()], vec![packed.table.bytes]),
            None => Names::of_shards(manifest),
        };
        let loaded = resident::load(manifest, names, layout, direct, progress, interrupt)?;
        let slab = Arc::new(loaded.slab);
        let side = packed.is_none().then(|| Arc::new(loaded.side));
        let tensors: Vec<_> = manifest
            .trunk
            .iter()
            .zip(&places)
            .map(|(stored, place)| {
                let (slab, side) = (Arc::clone(&slab), side.clone());
                let tensor = Tensor::new(place.dtype, stored.shape.clone(), place.form, slab, place.range(), side);
                (stored.name.clone(), tensor)
            })
            .collect();
        if let Some(packed) = packed {
            check(packed, &tensors, interrupt)?;
        }
        let by_name = tensors.iter().enumerate().map(|(at, (name, _))| (name.clone(), at)).collect();
        Ok(Self { slab, side, tensors, by_name, modes: loaded.modes, notices: loaded.notices })
    }

    /// The tensor of that name, `None` when the model has none.
    pub fn get(&self, name: &str) -> Option<Tensor> {
        self.by_name.get(name).map(|at| self.tensors[*at].1.clone())
    }

    /// Names of all tensors, in the order of the manifest.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|(name, _)| name.as_str())
    }

    /// Bytes the trunk occupies.
    pub fn resident_bytes(&self) -> u64 {
        (self.slab.len() + self.side.as_ref().map_or(0, |side| side.capacity())) as u64
    }

    /// How it was read: directory and `direct` or `buffered`, one entry a device.
    pub fn modes(&self) -> &[(String, &'static str)] {
        &self.modes
    }

    /// Notices for the user: a device that fell back to buffered reads. The expert store has the same one for the same
    /// directory.
    pub fn notices(&self) -> &[String] {
        &self.notices
    }
}

/// A tensor with values that no scale of int8 can say.
pub(crate) fn not_quantizable(name: &str) -> Error {
    Error::model(format!("{name}: has values that are not finite or too large, which int8 cannot hold"))
        .hint("use --trunk bf12, which holds every value, or --trunk bf16")
}

/// Compares what came from `packed` with its checksums, on all processors, except what was widened.
fn check(packed: &TrunkFile, tensors: &[(String, Tensor)], interrupt: &Interrupt) -> Result<()> {
    let next = AtomicUsize::new(0);
    let threads = std::thread::available_parallelism().map_or(1, std::num::NonZero::get);
    let search = || -> Result<Option<usize>> {
        loop {
            interrupt.check()?;
            let at = next.fetch_add(1, Ordering::Relaxed);
            let (Some((_, tensor)), Some(entry)) = (tensors.get(at), packed.table.tensors.get(at)) else {
                return Ok(None);
            };
            let same = entry.dtype == "F16" || format!("{:016x}", xxh3_64(tensor.bytes())) == entry.checksum;
            if !same || !tensor.is_whole() {
                return Ok(Some(at));
            }
        }
    };
    let found = std::thread::scope(|scope| {
        let searches: Vec<_> = (0..threads).map(|_| scope.spawn(search)).collect();
        let found = searches.into_iter().map(|search| search.join());
        found
            .map(|found| found.unwrap_or_else(|_| Err(Error::other("a check of the trunk ended unexpectedly"))))
            .collect::<Result<Vec<_>>>()
    })?;
    let Some(at) = found.into_iter().flatten().min() else { return Ok(()) };
    let entry = &packed.table.tensors[at];
    let (path, from, to) = (packed.path.display(), entry.offset, entry.offset + entry.len);
    Err(Error::model(format!("{path}: {} is damaged: bytes {from} to {to} do not match its checksum", entry.name))
        .hint("remove that file; pack --trunk writes it again"))
}
