//! [`Region`], memory that drives write to: one lazily committed mapping, cut into regions that have one owner each.
//!
//! It owns its bytes as a `Box<[u8]>` would, and can be split and joined. Whoever holds it may write it, so a
//! slot that is being filled is out of everybody's reach but the readers' that hold its pieces, and a read that never
//! returns keeps its piece (and the mapping beneath it) alive however long it takes.

use std::io;
use std::ops::{Deref, DerefMut};
use std::ptr::NonNull;
use std::sync::Arc;

use crate::error::{Error, Result};

/// Offset, length and address of a read past the page cache are multiples of this: a page, which is at least a sector.
pub(crate) const ALIGN: usize = if cfg!(target_os = "macos") { 16384 } else { 4096 };

/// Large pages start at multiples of this.
const HUGE: usize = 2 << 20;

/// The anonymous mapping beneath regions; unmapped with the last of them. Gives no access to its bytes by itself.
struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: the mapping is plain process memory that belongs to no thread; bytes are reached through regions alone, which
// are disjoint (`Region::split_to`).
unsafe impl Send for Mapping {}
// SAFETY: as above; a shared `Mapping` offers no operation but to be dropped.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// `len` zero bytes, none of them committed yet; aligned to [`HUGE`] where long enough to profit.
    fn new(len: usize) -> io::Result<Self> {
        let huge = len >= HUGE;
        let asked = if huge { len.checked_add(HUGE) } else { Some(len) };
        let asked = asked.ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        // SAFETY: an anonymous mapping at an address of the system's choice replaces nothing that exists.
        let start = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                asked,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS,
                -1,
                0,
            )
        };
        if start == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let start = start.cast::<u8>();
        let before = if huge { start.align_offset(HUGE) } else { 0 };
        let base = start.wrapping_add(before);
        // SAFETY: both ranges lie inside the fresh mapping, before and after `base .. base + len`, are whole pages
        // (`len` and HUGE are multiples of the page), and nobody has a pointer into them. Failure only leaves address
        // space reserved.
        unsafe {
            if before > 0 {
                libc::munmap(start.cast(), before);
            }
            if asked - before > len {
                libc::munmap(base.wrapping_add(len).cast(), asked - before - len);
            }
            #[cfg(target_os = "linux")]
            if huge {
                libc::madvise(base.cast(), len, libc::MADV_HUGEPAGE);
            }
        }
        let base = NonNull::new(base).ok_or_else(|| io::Error::from_raw_os_error(libc::ENOMEM))?;
        Ok(Self { base, len })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: `base .. base + len` is what `new` left mapped; the last region is gone, so no reference into it
        // exists.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// Sole owner of a run of bytes in a mapping.
pub(crate) struct Region {
    mapping: Arc<Mapping>,
    start: usize,
    len: usize,
}

impl Region {
    /// At least `len` zero bytes, rounded up to [`ALIGN`] and aligned to it; committed as they are touched.
    ///
    /// # Errors
    /// Kind `Memory`, naming `purpose` and the size.
    pub(crate) fn allocate(len: usize, purpose: &str) -> Result<Self> {
        let failed = |cause: io::Error| {
            Error::memory(format!("cannot allocate {len} bytes for {purpose}: {cause}"))
                .hint("give less memory (--memory, --expert-memory), a smaller --step or --context, or free some")
        };
        let rounded = len
            .max(1)
            .checked_next_multiple_of(ALIGN.max(page_bytes()))
            .ok_or_else(|| failed(io::Error::from_raw_os_error(libc::ENOMEM)))?;
        let mapping = Mapping::new(rounded).map_err(failed)?;
        Ok(Self { mapping: Arc::new(mapping), start: 0, len: rounded })
    }

    /// Cuts off the first `at` bytes and returns them; `self` keeps the rest.
    ///
    /// # Panics
    /// When `at` is beyond the end.
    pub(crate) fn split_to(&mut self, at: usize) -> Self {
        assert!(at <= self.len, "a region of {} bytes is split at {at}", self.len);
        let front = Self { mapping: Arc::clone(&self.mapping), start: self.start, len: at };
        self.start += at;
        self.len -= at;
        front
    }

    /// The bytes as floats; those of a last, broken one are left out.
    pub(super) fn floats(&self) -> &[f32] {
        // SAFETY: every pattern of bits is an f32.
        let (before, floats, _) = unsafe { self.align_to::<f32>() };
        debug_assert!(before.is_empty(), "a region begins on a page");
        floats
    }

    /// As [`Region::floats`].
    pub(super) fn floats_mut(&mut self) -> &mut [f32] {
        // SAFETY: every pattern of bits is an f32, and the bytes of every f32 may be read as bytes.
        let (before, floats, _) = unsafe { self.align_to_mut::<f32>() };
        debug_assert!(before.is_empty(), "a region begins on a page");
        floats
    }

    /// Appends the region that follows this one in memory.
    ///
    /// # Panics
    /// When `next` is not the neighbour.
    pub(crate) fn join(&mut self, next: Self) {
        let adjacent = Arc::ptr_eq(&self.mapping, &next.mapping) && self.start + self.len == next.start;
        assert!(adjacent, "regions are joined in another order than they were split in");
        self.len += next.len;
    }
}

impl Deref for Region {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: `start + len` is within the mapping (`allocate`, kept by `split_to` and `join`), whose pages are
        // initialised to zero by the system and stay mapped while `self.mapping` lives. Regions are never cloned and
        // split without overlap, so no `&mut` to these bytes exists while `self` is borrowed.
        unsafe { std::slice::from_raw_parts(self.mapping.base.as_ptr().add(self.start), self.len) }
    }
}

impl DerefMut for Region {
    fn deref_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `deref`; `self` is borrowed mutably and is the bytes' only owner.
        unsafe { std::slice::from_raw_parts_mut(self.mapping.base.as_ptr().add(self.start), self.len) }
    }
}

impl std::fmt::Debug for Region {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Region({}..{})", self.start, self.start + self.len)
    }
}

/// Bytes of a page of this system, which may be more than [`ALIGN`] (64 KiB on some ARM kernels).
fn page_bytes() -> usize {
    // SAFETY: `sysconf` reads a constant of the system and touches no memory of ours.
    let bytes = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
    usize::try_from(bytes).unwrap_or(0).max(4096)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn a_region_starts_zeroed_and_aligned() {
        let small = Region::allocate(1, "a test").unwrap();
        assert_eq!(small.len() % ALIGN, 0);
        let large = Region::allocate(3 * HUGE + 5, "a test").unwrap();
        assert_eq!(large.as_ptr() as usize % HUGE, 0);
        assert!(large.iter().step_by(4096).all(|byte| *byte == 0));
    }

    #[test]
    fn split_pieces_are_disjoint_and_join_to_the_whole() {
        let mut whole = Region::allocate(4 * ALIGN, "a test").unwrap();
        let mut front = whole.split_to(ALIGN);
        front.fill(1);
        whole.fill(2);
        front.join(whole);
        assert_eq!(front.len(), 4 * ALIGN);
        assert_eq!((front[ALIGN - 1], front[ALIGN]), (1, 2));
    }

    #[test]
    #[should_panic(expected = "another order")]
    fn regions_do_not_join_out_of_order() {
        let mut whole = Region::allocate(2 * ALIGN, "a test").unwrap();
        let front = whole.split_to(ALIGN);
        whole.join(front);
    }

    #[test]
    fn memory_outlives_the_owner_of_the_other_pieces() {
        let mut whole = Region::allocate(2 * ALIGN, "a test").unwrap();
        let mut late = whole.split_to(ALIGN);
        drop(whole);
        late.fill(7);
        assert!(late.iter().all(|byte| *byte == 7));
    }

    #[test]
    fn an_impossible_size_is_refused_not_aborted() {
        for len in [usize::MAX, usize::MAX - HUGE, usize::MAX / 2] {
            let error = Region::allocate(len, "expert slots").unwrap_err();
            assert_eq!(error.kind(), Kind::Memory);
            assert!(error.message().contains("expert slots"), "{error}");
        }
    }
}
