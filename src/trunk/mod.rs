//! The dense trunk, resident: read once into one aligned slab, never converted to something larger.

use std::sync::Arc;

use crate::checkpoint::{Dtype, Manifest};
use crate::error::Result;
use crate::interrupt::Interrupt;
use crate::kernels::Matrix;

/// One resident tensor; cheap to clone.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// As in the checkpoint.
    pub dtype: Dtype,
    /// As in the checkpoint.
    pub shape: Vec<usize>,
    slab: Arc<Vec<u8>>,
    start: usize,
    len: usize,
}

impl Tensor {
    /// The stored bytes, little-endian.
    pub fn bytes(&self) -> &[u8] {
        &self.slab[self.start..self.start + self.len]
    }

    /// As a `[rows, cols]` matrix for the kernels.
    pub fn matrix(&self) -> Matrix<'_> {
        todo!()
    }

    /// All values as f32, in stored order. For vectors and convolution taps, which are small.
    pub fn to_f32(&self) -> Vec<f32> {
        todo!()
    }
}

/// What loading reports while it runs.
pub trait LoadProgress {
    /// `done` of `total` bytes are in memory.
    fn loaded(&self, done: u64, total: u64);
}

/// All trunk tensors of a model.
pub struct Trunk;

impl Trunk {
    /// Bytes the trunk will occupy once loaded.
    pub fn planned_bytes(manifest: &Manifest) -> u64 {
        let _ = manifest;
        todo!()
    }

    /// Reads every trunk tensor of `manifest`, past the page cache where `direct` and the file system allow.
    ///
    /// # Errors
    /// A read that fails names file, offset and cause; an interrupt ends the load.
    pub fn load(manifest: &Manifest, direct: bool, progress: &dyn LoadProgress, interrupt: &Interrupt) -> Result<Self> {
        let _ = (manifest, direct, progress, interrupt);
        todo!()
    }

    /// The tensor of that name, `None` when the model has none.
    pub fn get(&self, name: &str) -> Option<Tensor> {
        let _ = name;
        todo!()
    }
}
