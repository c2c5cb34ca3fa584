//! Floats on whole cache lines, kept from call to call: fresh memory costs more than many a kernel.

use std::cell::RefCell;

use super::lanes::LANES;

/// A cache line.
#[derive(Clone, Copy)]
#[repr(C, align(64))]
struct Line([f32; LANES]);

/// Memory that grows to what was asked for.
#[derive(Default)]
pub(super) struct Buffer(Vec<Line>);

impl Buffer {
    /// `n` floats from the start of a cache line. They hold what was left there.
    pub(super) fn floats(&mut self, n: usize) -> &mut [f32] {
        let lines = n.div_ceil(LANES);
        if self.0.len() < lines {
            self.0.resize(lines, Line([0.0; LANES]));
        }
        // SAFETY: a line is sixteen floats without padding, and there are `lines` of them, borrowed mutably.
        let all = unsafe { std::slice::from_raw_parts_mut(self.0.as_mut_ptr().cast(), lines * LANES) };
        &mut all[..n]
    }
}

/// Calls `f` with `n` floats of this thread, see [`Buffer::floats`]. Not to be called from within `f`.
pub(super) fn with_scratch<R>(n: usize, f: impl FnOnce(&mut [f32]) -> R) -> R {
    thread_local! {
        static SCRATCH: RefCell<Buffer> = RefCell::default();
    }
    SCRATCH.with_borrow_mut(|buffer| f(buffer.floats(n)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn floats_begin_on_a_cache_line_and_are_as_many_as_asked_for() {
        let mut buffer = Buffer::default();
        for n in [0, 1, 16, 17, 5, 1000] {
            let floats = buffer.floats(n);
            assert_eq!(floats.len(), n);
            assert_eq!(floats.as_ptr() as usize % 64, 0);
            floats.fill(1.0);
        }
        assert_eq!(with_scratch(33, |floats| floats.len()), 33);
    }
}
