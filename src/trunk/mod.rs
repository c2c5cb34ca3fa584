//! The dense trunk, resident: read once into one aligned slab, as stored. Only half-precision values are widened (to f32,
//! exactly), since no kernel takes them.

mod layout;
mod resident;
mod tensor;

#[cfg(test)]
mod tests;

use std::sync::Arc;

use rustc_hash::FxHashMap;

use self::layout::Layout;
use crate::checkpoint::Manifest;
use crate::error::Result;
use crate::interrupt::Interrupt;
use crate::store::Region;

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
    /// In the order of the manifest.
    tensors: Vec<(String, Tensor)>,
    by_name: FxHashMap<String, usize>,
    modes: Vec<(String, &'static str)>,
    notices: Vec<String>,
}

impl Trunk {
    /// Bytes the trunk will occupy once loaded: tensors at multiples of 64, the sum rounded up to whole pages. While
    /// loading, buffers of [`Trunk::LOAD_BYTES_MAX`] at most come on top.
    pub fn planned_bytes(manifest: &Manifest) -> u64 {
        Layout::new(manifest).map_or(0, |layout| layout.slab_bytes as u64)
    }

    /// Bytes of the buffers that loading needs at most, and gives back when it is done.
    pub const LOAD_BYTES_MAX: u64 = resident::BUFFERS_BYTES_MAX as u64;

    /// Reads every trunk tensor of `manifest`, past the page cache where `direct` and the file system allow.
    ///
    /// # Errors
    /// Kind `Io` for a read that fails (file, offset and cause), `Model` for a file that cannot be opened or a tensor that
    /// is not of a float type, `Memory` when there is not enough of it; an interrupt ends the load.
    pub fn load(manifest: &Manifest, direct: bool, progress: &dyn LoadProgress, interrupt: &Interrupt) -> Result<Self> {
        let layout = Layout::new(manifest)?;
        let places = layout.places.clone();
        let loaded = resident::load(manifest, layout, direct, progress, interrupt)?;
        let slab = Arc::new(loaded.slab);
        let tensors: Vec<_> = manifest
            .trunk
            .iter()
            .zip(&places)
            .map(|(stored, place)| {
                let tensor = Tensor::new(place.dtype, stored.shape.clone(), Arc::clone(&slab), place.range());
                (stored.name.clone(), tensor)
            })
            .collect();
        let by_name = tensors.iter().enumerate().map(|(at, (name, _))| (name.clone(), at)).collect();
        Ok(Self { slab, tensors, by_name, modes: loaded.modes, notices: loaded.notices })
    }

    /// The tensor of that name, `None` when the model has none.
    pub fn get(&self, name: &str) -> Option<Tensor> {
        self.by_name.get(name).map(|at| self.tensors[*at].1.clone())
    }

    /// Names of all tensors, in the order of the manifest.
    pub fn names(&self) -> impl Iterator<Item = &str> {
        self.tensors.iter().map(|(name, _)| name.as_str())
    }

    /// Bytes the trunk occupies; as planned.
    pub fn resident_bytes(&self) -> u64 {
        self.slab.len() as u64
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
