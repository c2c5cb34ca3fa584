//! Activation rows as the many-row kernels read them: in tiles of a few rows, each a single run of cache lines.
//!
//! As they come, rows lie across cache lines, so that a load takes two accesses, and often a multiple of 4 KiB apart, so
//! that they compete for a few sets of the first-level cache.

use std::ops::Range;

use super::super::disjoint::Disjoint;
use super::super::lanes::LANES;

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

    /// Packs tile `i` of what begins at `start` of `to`. Row t of x begins at `t · x_stride`.
    ///
    /// # Safety
    /// Nobody else uses the tile's part of `to` at the same time.
    pub(super) unsafe fn pack(self, i: usize, x: &[f32], x_stride: usize, to: Disjoint<'_>, start: usize) {
        let rows = self.tile(i);
        // SAFETY: by this function's contract.
        let to = unsafe { to.part(start + self.floats(rows.start)..start + self.floats(rows.end)) };
        for (r, row) in rows.clone().enumerate() {
            let row = &x[row * x_stride..][..self.cols];
            let (whole, rest) = row.as_chunks::<LANES>();
            let mut lines = to.as_chunks_mut::<LANES>().0.iter_mut().skip(r).step_by(rows.len());
            for (values, line) in whole.iter().zip(lines.by_ref()) {
                *line = *values;
            }
            if let (false, Some(line)) = (rest.is_empty(), lines.next()) {
                *line = [0.0; LANES];
                line[..rest.len()].copy_from_slice(rest);
            }
        }
    }
}
