//! Activation rows as the many-row kernels read them: in tiles of a few rows, each a single run of cache lines.
//!
//! As they come, rows lie across cache lines, so that a load takes two accesses, and often a multiple of 4 KiB apart, so
//! that they compete for a few sets of the first-level cache.

use std::ops::Range;

use super::super::lanes::{Kernel, LANES, Lanes};
use super::super::slices::load;

/// How `rows` activation rows of `cols` columns are packed: tile after tile, in a tile sixteen columns after sixteen
/// columns, of those row after row. Columns missing from the last sixteen are +0.0.
#[derive(Clone, Copy)]
pub(super) struct Layout {
    rows: usize,
    cols: usize,
    tiles: usize,
}

impl Layout {
    /// Tiles of at most `width` rows, whose sizes differ by one at most. There is at least one row.
    pub(super) fn new(rows: usize, cols: usize, width: usize) -> Self {
        Self { rows, cols, tiles: rows.div_ceil(width) }
    }

    pub(super) fn tiles(self) -> usize {
        self.tiles
    }

    /// The rows of tile `i`.
    pub(super) fn tile(self, i: usize) -> Range<usize> {
        i * self.rows / self.tiles..(i + 1) * self.rows / self.tiles
    }

    /// Floats that `rows` rows take.
    pub(super) fn floats(self, rows: usize) -> usize {
        rows * self.cols.next_multiple_of(LANES)
    }
}

/// Packs tile `tile` of `layout` into `to`. Row t of x begins at `t · x_stride`.
pub(super) struct Pack<'a> {
    pub(super) layout: Layout,
    pub(super) tile: usize,
    pub(super) x: &'a [f32],
    pub(super) x_stride: usize,
    /// The tile's `rows · steps · 16` floats.
    pub(super) to: &'a mut [f32],
}

impl Kernel for Pack<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let rows = self.layout.tile(self.tile);
        let (n, cols) = (rows.len(), self.layout.cols);
        assert_eq!(self.to.len(), self.layout.floats(n));
        for r in 0..n {
            let row = &self.x[(rows.start + r) * self.x_stride..][..cols];
            let mut column = 0;
            while column < cols {
                // SAFETY: cols − column elements are left of the row; by the assertion the tile has room for n rows of
                // whole vectors; the CPU has the instructions (caller).
                unsafe {
                    let value = load::<L>(row.as_ptr().add(column), cols - column);
                    value.store(self.to.as_mut_ptr().add(column * n + r * LANES));
                }
                column += LANES;
            }
        }
    }
}
