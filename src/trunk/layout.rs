//! Where each tensor goes in the slab, and the reads that bring it there. The slab has the tensors in the order of the
//! files, so that one large read serves many small tensors.

use std::ops::Range;

use crate::checkpoint::{Dtype, Manifest};
use crate::error::{Error, Result};
use crate::store::ALIGN;

/// Tensors start at multiples of this: a cache line, and the widest SIMD register.
const TENSOR_ALIGN: usize = 64;

/// Bytes of one read at most.
pub(super) const CHUNK_BYTES: usize = 4 << 20;

/// What lies between two tensors is read along rather than skipped, up to so many bytes.
const GAP_BYTES: u64 = 64 << 10;

/// Places of the tensors, and what to read.
pub(super) struct Layout {
    /// `[tensors]`, in the order of the manifest.
    pub places: Vec<Place>,
    /// In the order of the slab; the first starts at 0.
    pub chunks: Vec<Chunk>,
    /// Bytes of the slab: whole pages.
    pub slab_bytes: usize,
    /// Bytes to load, as stored.
    pub stored_bytes: u64,
}

/// A tensor in the slab.
#[derive(Debug, Clone, Copy)]
pub(super) struct Place {
    /// As resident: f16 becomes f32.
    pub dtype: Dtype,
    start: usize,
    len: usize,
}

impl Place {
    /// In bytes of the slab.
    pub fn range(&self) -> Range<usize> {
        self.start..self.start + self.len
    }
}

/// One read and where its bytes go.
#[derive(Debug)]
pub(super) struct Chunk {
    pub file: usize,
    /// A multiple of [`ALIGN`].
    pub offset: u64,
    /// Bytes that matter, from the start.
    pub needed: usize,
    /// Where its part of the slab begins; it ends where the next chunk's begins.
    pub start: usize,
    pub copies: Vec<Copy>,
}

/// From a chunk's bytes to its part of the slab.
#[derive(Debug)]
pub(super) struct Copy {
    pub from: usize,
    pub to: usize,
    /// Bytes as stored.
    pub len: usize,
    /// From f16 to f32: twice the bytes.
    pub widen: bool,
}

impl Chunk {
    /// Bytes as stored that it brings.
    pub fn stored_bytes(&self) -> u64 {
        self.copies.iter().map(|copy| copy.len as u64).sum()
    }
}

impl Layout {
    /// # Errors
    /// Kind `Model` for a tensor whose type, shape and span disagree, which a checked manifest rules out, or that is not
    /// of a float type; `Memory` when no address space could hold the trunk.
    pub fn new(manifest: &Manifest) -> Result<Self> {
        let mut order: Vec<usize> = (0..manifest.trunk.len()).collect();
        order.sort_by_key(|at| (manifest.trunk[*at].span.shard, manifest.trunk[*at].span.offset));
        let mut layout = Self { places: Vec::new(), chunks: Vec::new(), slab_bytes: 0, stored_bytes: 0 };
        layout.places.resize(manifest.trunk.len(), Place { dtype: Dtype::F32, start: 0, len: 0 });
        let mut start = 0_usize;
        for at in order {
            let (stored, place) = place(manifest, at, start)?;
            let too_much = || Error::memory("the trunk is larger than the address space");
            let end = start.checked_add(place.len).and_then(|end| end.checked_next_multiple_of(TENSOR_ALIGN));
            layout.read(manifest, at, stored, place);
            layout.places[at] = place;
            layout.stored_bytes += stored as u64;
            start = end.ok_or_else(too_much)?;
        }
        layout.slab_bytes = start.max(1).next_multiple_of(ALIGN);
        Ok(layout)
    }

    /// Adds the reads of tensor `at`, in the last chunk as far as it reaches.
    fn read(&mut self, manifest: &Manifest, at: usize, stored: usize, place: Place) {
        let span = manifest.trunk[at].span;
        let file = usize::from(span.shard);
        let factor = place.len.checked_div(stored).unwrap_or(1);
        let mut done = 0;
        while done < stored {
            let offset = span.offset + done as u64;
            let room = self.chunks.last().map_or(0, |chunk| chunk.room(file, offset));
            let room = if factor == 2 { room & !1 } else { room };
            if room == 0 {
                let page = offset / ALIGN as u64 * ALIGN as u64;
                let start = place.start + done * factor;
                self.chunks.push(Chunk { file, offset: page, needed: 0, start, copies: Vec::new() });
                continue;
            }
            if let Some(chunk) = self.chunks.last_mut() {
                let len = room.min(stored - done);
                let from = (offset - chunk.offset) as usize;
                let to = place.start + done * factor - chunk.start;
                chunk.copies.push(Copy { from, to, len, widen: factor == 2 });
                chunk.needed = from + len;
                done += len;
            }
        }
    }
}

impl Chunk {
    /// Bytes from `offset` of `file` that this chunk can still take.
    fn room(&self, file: usize, offset: u64) -> usize {
        let (end, limit) = (self.offset + self.needed as u64, self.offset + CHUNK_BYTES as u64);
        let is_near = self.copies.is_empty() || offset <= end + GAP_BYTES;
        if file == self.file && offset >= end && is_near { limit.saturating_sub(offset) as usize } else { 0 }
    }
}

/// Bytes of tensor `at` as stored, and its place at `start`.
fn place(manifest: &Manifest, at: usize, start: usize) -> Result<(usize, Place)> {
    let tensor = &manifest.trunk[at];
    let shard = usize::from(tensor.span.shard);
    let values = tensor.shape.iter().try_fold(1_usize, |values, size| values.checked_mul(*size));
    let bytes = values.and_then(|values| values.checked_mul(tensor.dtype.size()));
    let inside = manifest.shard_bytes.get(shard).is_some_and(|bytes| {
        shard < manifest.shards.len()
            && tensor.span.offset.checked_add(tensor.span.len).is_some_and(|end| end <= *bytes)
    });
    let stored = match bytes {
        Some(bytes) if bytes as u64 == tensor.span.len && inside => bytes,
        _ => {
            return Err(Error::model(format!(
                "{}: {:?} {:?} does not fit {} bytes at offset {} of shard number {shard}",
                tensor.name, tensor.dtype, tensor.shape, tensor.span.len, tensor.span.offset
            )));
        }
    };
    match tensor.dtype {
        Dtype::Bf16 | Dtype::F32 => Ok((stored, Place { dtype: tensor.dtype, start, len: stored })),
        Dtype::F16 => {
            let len =
                stored.checked_mul(2).ok_or_else(|| Error::memory("the trunk is larger than the address space"))?;
            Ok((stored, Place { dtype: Dtype::F32, start, len }))
        }
        Dtype::U8 => Err(Error::model(format!("{}: expected bf16, f16 or f32, found u8", tensor.name))),
    }
}
