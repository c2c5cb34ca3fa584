//! How the items of an output are shared out over the threads.

use std::ops::Range;

use super::Compute;

/// Below this many vector operations (a few µs) a task is not worth waking a thread for.
const TASK_MIN: usize = 16 << 10;
/// Above this many (some 10 ms) a task would keep an interrupt waiting and leave unequal cores uneven.
const TASK_MAX: usize = 16 << 20;
/// Tasks a thread, so that a slow core does not hold up the rest.
const TASKS_PER_THREAD: usize = 4;

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
}
