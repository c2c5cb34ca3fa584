//! Where each tensor goes in the slab, and the reads that bring it there. The slab has the tensors in the order of the
//! files, so that one large read serves many small tensors.

use std::ops::Range;

use super::{TrunkFile, TrunkFormat};
use crate::checkpoint::{Dtype, Manifest, TrunkTensor};
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
    /// As resident.
    pub form: TrunkFormat,
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
    pub how: How,
    /// Number of the tensor in the manifest.
    pub tensor: usize,
}

/// From bytes as stored to bytes as resident.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum How {
    Same,
    /// From f16 to f32: twice the bytes.
    Widen,
    /// Rows of so many bfloat16 to records.
    Encode(TrunkFormat, usize),
}

impl How {
    /// Bytes that are not torn apart, as stored and as resident.
    pub fn unit(self) -> (usize, usize) {
        match self {
            How::Same => (1, 1),
            How::Widen => (2, 4),
            How::Encode(format, cols) => (2 * cols, format.record_bytes(cols)),
        }
    }
}

/// A tensor as stored.
struct Stored<'a> {
    tensor: &'a TrunkTensor,
    file: usize,
    offset: u64,
    len: usize,
    /// Already in this form.
    form: TrunkFormat,
    how: How,
}

impl Chunk {
    /// Bytes as stored that it brings.
    pub fn stored_bytes(&self) -> u64 {
        self.copies.iter().map(|copy| copy.len as u64).sum()
    }
}

impl Layout {
    /// From the shards, to be held as `format`; or from a file that has it so.
    ///
    /// # Errors
    /// Kind `Model` for a tensor whose type, shape and span disagree, which a checked manifest rules out, or that is not
    /// of a float type; `Memory` when no address space could hold the trunk.
    pub fn new(manifest: &Manifest, format: TrunkFormat, packed: Option<&TrunkFile>) -> Result<Self> {
        let stored: Vec<_> =
            (0..manifest.trunk.len()).map(|at| stored(manifest, at, format, packed)).collect::<Result<_>>()?;
        let mut order: Vec<usize> = (0..stored.len()).collect();
        order.sort_by_key(|at| (stored[*at].file, stored[*at].offset));
        let mut layout = Self { places: Vec::new(), chunks: Vec::new(), slab_bytes: 0, stored_bytes: 0 };
        let nowhere = Place { dtype: Dtype::F32, form: TrunkFormat::Bf16, start: 0, len: 0 };
        layout.places.resize(stored.len(), nowhere);
        let mut start = 0_usize;
        for at in order {
            let stored = &stored[at];
            let place = stored.place(start)?;
            let end = start.checked_add(place.len).and_then(|end| end.checked_next_multiple_of(TENSOR_ALIGN));
            layout.read(at, stored, place);
            layout.places[at] = place;
            layout.stored_bytes += stored.len as u64;
            start = end.ok_or_else(too_large)?;
        }
        layout.slab_bytes = start.max(1).next_multiple_of(ALIGN);
        Ok(layout)
    }

    /// Bytes of the tensors that are encoded while loading.
    pub fn encoded_bytes(&self) -> u64 {
        let copies = self.chunks.iter().flat_map(|chunk| &chunk.copies);
        let encoded = copies.filter(|copy| matches!(copy.how, How::Encode(..)));
        encoded.map(|copy| (copy.len / copy.how.unit().0 * copy.how.unit().1) as u64).sum()
    }

    /// Adds the reads of tensor number `at`, in the last chunk as far as it reaches.
    fn read(&mut self, at: usize, stored: &Stored<'_>, place: Place) {
        let (how, (from_unit, to_unit)) = (stored.how, stored.how.unit());
        let mut done = 0;
        while done < stored.len {
            let offset = stored.offset + done as u64;
            let room = self.chunks.last().map_or(0, |chunk| chunk.room(stored.file, offset)) / from_unit * from_unit;
            let at_slab = place.start + done / from_unit * to_unit;
            if room == 0 {
                let page = offset / ALIGN as u64 * ALIGN as u64;
                let file = stored.file;
                self.chunks.push(Chunk { file, offset: page, needed: 0, start: at_slab, copies: Vec::new() });
                continue;
            }
            if let Some(chunk) = self.chunks.last_mut() {
                let len = room.min(stored.len - done);
                let from = (offset - chunk.offset) as usize;
                chunk.copies.push(Copy { from, to: at_slab - chunk.start, len, how, tensor: at });
                chunk.needed = from + len;
                done += len;
            }
        }
    }
}

fn too_large() -> Error {
    Error::memory("the trunk is larger than the address space")
}

impl Stored<'_> {
    /// Its place, from `start` of the slab.
    fn place(&self, start: usize) -> Result<Place> {
        let (from_unit, to_unit) = self.how.unit();
        let len = (self.len / from_unit.max(1)).checked_mul(to_unit).ok_or_else(too_large)?;
        let (dtype, form) = match self.how {
            How::Same => (self.tensor.dtype, self.form),
            How::Widen => (Dtype::F32, self.form),
            How::Encode(format, _) => (self.tensor.dtype, format),
        };
        Ok(Place { dtype, form, start, len })
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

/// Where tensor number `at` is stored, and how it becomes resident as `format`.
fn stored<'a>(
    manifest: &'a Manifest,
    at: usize,
    format: TrunkFormat,
    packed: Option<&TrunkFile>,
) -> Result<Stored<'a>> {
    let tensor = &manifest.trunk[at];
    let shard = usize::from(tensor.span.shard);
    let values = tensor.shape.iter().try_fold(1_usize, |values, size| values.checked_mul(*size));
    let bytes = values.and_then(|values| values.checked_mul(tensor.dtype.size()));
    let inside = manifest.shard_bytes.get(shard).is_some_and(|bytes| {
        shard < manifest.shards.len()
            && tensor.span.offset.checked_add(tensor.span.len).is_some_and(|end| end <= *bytes)
    });
    let len = match bytes {
        Some(bytes) if bytes as u64 == tensor.span.len && inside => bytes,
        _ => {
            return Err(Error::model(format!(
                "{}: {:?} {:?} does not fit {} bytes at offset {} of shard number {shard}",
                tensor.name, tensor.dtype, tensor.shape, tensor.span.len, tensor.span.offset
            )));
        }
    };
    let changes = format.changes(&tensor.name, tensor.dtype, &tensor.shape);
    let how = match (tensor.dtype, changes) {
        (Dtype::Bf16, Some((_, cols))) => How::Encode(format, cols),
        (Dtype::Bf16 | Dtype::F32, _) => How::Same,
        (Dtype::F16, _) => How::Widen,
        (Dtype::U8, _) => {
            return Err(Error::model(format!("{}: expected bf16, f16 or f32, found u8", tensor.name)));
        }
    };
    let Some(packed) = packed else {
        return Ok(Stored { tensor, file: shard, offset: tensor.span.offset, len, form: TrunkFormat::Bf16, how });
    };
    let entry = &packed.table.tensors[at];
    let (form, how) = match how {
        How::Encode(format, _) => (format, How::Same),
        how => (TrunkFormat::Bf16, how),
    };
    let len = usize::try_from(entry.len).map_err(|_| too_large())?;
    Ok(Stored { tensor, file: 0, offset: entry.offset, len, form, how })
}
