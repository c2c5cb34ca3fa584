//! One output split over threads: ranges of its items, and a slice whose separate parts tasks write at the same time.

use std::marker::PhantomData;
use std::ops::Range;

use super::Compute;

/// Below this many vector operations (a few µs) a task is not worth waking a thread for.
const TASK_MIN: usize = 16 << 10;
/// Above this many (some 10 ms) a task would keep an interrupt waiting and leave unequal cores uneven.
const TASK_MAX: usize = 16 << 20;
/// Tasks a thread, so that a slow core does not hold up the rest.
const TASKS_PER_THREAD: usize = 4;

/// A mutable slice that several tasks hold at once, each writing parts that no other task touches.
pub(super) struct DisjointMut<'a, T> {
    start: *mut T,
    len: usize,
    slice: PhantomData<&'a mut [T]>,
}

impl<T> Clone for DisjointMut<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for DisjointMut<'_, T> {}

// SAFETY: as for `Sync`: a copy elsewhere gives its parts under the same contract.
unsafe impl<T: Send> Send for DisjointMut<'_, T> {}
// SAFETY: sharing it only hands out what `range` and `as_ptr` give, whose callers keep the parts of different threads
// apart; each part is then used by one thread, which `T: Send` allows.
unsafe impl<T: Send> Sync for DisjointMut<'_, T> {}

impl<'a, T> DisjointMut<'a, T> {
    /// Takes the slice for as long as the tasks run.
    pub(super) fn new(slice: &'a mut [T]) -> Self {
        Self { start: slice.as_mut_ptr(), len: slice.len(), slice: PhantomData }
    }

    /// The part `range` of the slice.
    ///
    /// # Safety
    /// While the part is in use, nothing else touches any element of it.
    ///
    /// # Panics
    /// When `range` is not inside the slice.
    #[expect(clippy::mut_from_ref, reason = "the caller keeps the parts apart")]
    pub(super) unsafe fn range(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.len, "part {range:?} of a slice of {}", self.len);
        // SAFETY: inside the slice that was borrowed for 'a; nobody else uses these elements (caller).
        unsafe { std::slice::from_raw_parts_mut(self.start.add(range.start), range.len()) }
    }

    /// Its elements.
    pub(super) fn len(&self) -> usize {
        self.len
    }

    /// Writes one element.
    ///
    /// # Safety
    /// Nothing else touches element `i` at the same time.
    ///
    /// # Panics
    /// When there is no element `i`.
    #[inline(always)]
    pub(super) unsafe fn write(&self, i: usize, value: T) {
        assert!(i < self.len, "element {i} of a slice of {}", self.len);
        // SAFETY: inside the slice that was borrowed for 'a; nobody else uses this element (caller).
        unsafe { self.start.add(i).write(value) }
    }

    /// The first element, for parts that are not one run of elements. Whoever writes through it keeps to elements that
    /// no other task touches.
    pub(super) fn as_ptr(&self) -> *mut T {
        self.start
    }
}

impl Compute {
    /// Calls `task` with ranges that together make up `0..items`, over the threads; on this one alone when the whole is
    /// small. `cost` is about the number of vector operations an item takes. How the items are cut depends on the
    /// thread count, so a task's results must depend on each item alone.
    pub(super) fn ranges(&self, items: usize, cost: usize, task: &(dyn Fn(Range<usize>) + Sync)) {
        let at_least = TASK_MIN.div_ceil(cost.max(1));
        let at_most = (TASK_MAX / cost.max(1)).max(at_least);
        let each = items.div_ceil(self.threads() * TASKS_PER_THREAD).clamp(at_least, at_most);
        match items.div_ceil(each) {
            0 => {}
            1 => task(0..items),
            tasks => self.parallel(tasks, &|i| task(i * each..items.min((i + 1) * each))),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Mutex;

    use super::*;
    use crate::interrupt::Interrupt;

    #[test]
    fn ranges_cover_every_item_once() {
        for threads in [1, 2, 3, 8] {
            let compute = Compute::new(None, threads, Interrupt::new()).unwrap();
            for (items, cost) in [(0, 1), (1, 1), (7, 1 << 30), (1000, 1 << 14), (40_000, 3), (5, 0)] {
                let seen = Mutex::new(vec![0u8; items]);
                compute.ranges(items, cost, &|range| seen.lock().unwrap()[range].iter_mut().for_each(|n| *n += 1));
                assert!(
                    seen.into_inner().unwrap().iter().all(|n| *n == 1),
                    "{items} items of {cost}, {threads} threads"
                );
            }
        }
    }

    #[test]
    #[should_panic(expected = "part 3..9 of a slice of 8")]
    fn a_part_outside_the_slice_is_refused() {
        let mut data = [0u8; 8];
        let shared = DisjointMut::new(&mut data);
        // SAFETY: the only part; it panics before it is made.
        let _ = unsafe { shared.range(3..9) };
    }
}
