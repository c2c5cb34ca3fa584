//! An output that several tasks write at once, each its own part.

use std::marker::PhantomData;
use std::ops::Range;

/// A mutable slice whose parts are handed out without the borrow checker's help.
#[derive(Clone, Copy)]
pub(super) struct Disjoint<'a> {
    start: *mut f32,
    len: usize,
    slice: PhantomData<&'a mut [f32]>,
}

// SAFETY: access goes through unsafe methods, whose callers keep parts in use at the same time apart.
unsafe impl Send for Disjoint<'_> {}
// SAFETY: as above.
unsafe impl Sync for Disjoint<'_> {}

impl<'a> Disjoint<'a> {
    /// The whole of `slice`.
    pub(super) fn new(slice: &'a mut [f32]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// Writes one element.
    ///
    /// # Safety
    /// No other thread accesses element `i` at the same time.
    #[inline(always)]
    pub(super) unsafe fn write(self, i: usize, value: f32) {
        assert!(i < self.len);
        // SAFETY: in bounds; exclusive by this method's contract, and the slice is borrowed for `'a`.
        unsafe { self.start.add(i).write(value) }
    }

    /// A part to write.
    ///
    /// # Safety
    /// Parts in use at the same time do not overlap.
    pub(super) unsafe fn part(self, range: Range<usize>) -> &'a mut [f32] {
        assert!(range.start <= range.end && range.end <= self.len, "{range:?} of {} elements", self.len);
        // SAFETY: in bounds; exclusive by this method's contract, and the slice is borrowed for `'a`.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }
    /// The first element, for parts that are not one run of elements. Whoever writes through it keeps to elements that
    /// no other task touches.
    pub(super) fn as_ptr(&self) -> *mut f32 {
        self.start
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    #[should_panic(expected = "3..9 of 8 elements")]
    fn a_part_outside_the_slice_is_refused() {
        let mut data = [0.0; 8];
        let shared = Disjoint::new(&mut data);
        // SAFETY: the only part; it panics before it is made.
        let _ = unsafe { shared.part(3..9) };
    }
}
