//! Weight rows × many activation rows: weights are decoded once and met by every activation row.
//!
//! Columns are taken in blocks that fit the caches; between blocks the sixteen partial sums of each dot product rest in
//! memory, so its order is that of one pass over all columns. In a block, the first tile of activations decodes each
//! weight on its way, in the shadow of its multiply-adds, and leaves it in a panel for the tiles that follow.

#![expect(clippy::needless_range_loop, reason = "indices below constants unroll into registers")]

use std::ops::Range;

use super::super::Isa;
use super::super::buffer::with_scratch;
use super::super::disjoint::Disjoint;
use super::super::dispatch::Detected;
use super::super::lanes::{Kernel, LANES, Lanes};
use super::format::{Format, GROUP};
use super::pack::Layout;

/// Columns of a block: 6 activation rows of it take 24 KiB of the first-level cache.
const COLS: usize = 1024;
/// The same where a tile has more rows than 6.
const COLS_TALL: usize = 768;
/// Weight rows of a panel, which then takes 128 KiB of the second-level cache.
pub(super) const ROWS: usize = 48;
/// Activation rows that share a panel; their partial sums take 32 · 96 · 64 B = 192 KiB of the second-level cache.
pub(super) const T_MAX: usize = 96;
/// Tiles of this many weight rows × up to 6 activation rows fill 32 registers: 24 sums, 4 weights, an activation.
const WIDE: (usize, usize) = (4, 6);
/// Tiles of this many weight rows × 7 to 12 activation rows, which decode in registers: 24 sums, 2 weights and what they
/// are decoded with. So few activation rows are one tile, and no weight goes through a panel.
const TALL: (usize, usize) = (2, 12);
const TALL_MIN: usize = 7;
/// Sums of a tile of 4 weight rows that leave room for decoding in registers; with more, weights go through memory.
const IN_REGISTERS_MAX: usize = 20;
/// Tiles for 8 registers: 6 sums, and the rest in part from memory.
const NARROW: (usize, usize) = (2, 3);

/// Activation rows of a tile, at most, when there are `t`.
pub(super) fn tile_rows(isa: Isa, t: usize) -> usize {
    match isa {
        Isa::Avx512 if (TALL_MIN..=TALL.1).contains(&t) => TALL.1,
        Isa::Avx512 => WIDE.1,
        _ => NARROW.1,
    }
}

/// A product of many activation rows: y\[t, r\] = Σ_k W\[r, k\] x\[t, k\].
#[derive(Clone, Copy)]
pub(super) struct Panels<'a, F> {
    pub(super) weights: F,
    /// The weight rows: `first_row .. first_row + rows`.
    pub(super) first_row: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Packed activations, and which tiles of them to meet, from the first to before the second: at most [`T_MAX`] rows,
    /// in tiles of [`tile_rows`].
    pub(super) x: &'a [f32],
    pub(super) layout: Layout,
    pub(super) tiles: (usize, usize),
    /// The result of (t, r) goes to `y_start + t · y_stride + r`.
    pub(super) y: Disjoint<'a>,
    pub(super) y_start: usize,
    pub(super) y_stride: usize,
}

impl<F: Format> Panels<'_, F> {
    /// Whether all activation rows are one tile of [`TALL`].
    fn is_tall(self) -> bool {
        self.tiles.1 - self.tiles.0 == 1 && self.layout.tile(self.tiles.0).len() >= TALL_MIN
    }

    /// Computes the product. Nobody else writes these results at the same time.
    pub(super) fn run(self, isa: Detected) {
        with_scratch(ROWS * COLS + ROWS * T_MAX * LANES, |scratch| {
            let (panel, sums) = scratch.split_at_mut(ROWS * COLS);
            self.run_with(isa, panel.as_mut_ptr(), sums.as_mut_ptr());
        });
    }

    /// With room for a panel (for each tile of rows, for each sixteen columns, the rows' lanes one after the other) and
    /// for its partial sums, tile by tile.
    fn run_with(self, isa: Detected, panel: *mut f32, sums: *mut f32) {
        let at_most = if self.is_tall() { COLS_TALL } else { COLS };
        let cols = self.cols.div_ceil(self.cols.div_ceil(at_most)).next_multiple_of(GROUP);
        let mut row = 0;
        while row < self.rows {
            let rows = ROWS.min(self.rows - row);
            let mut k = 0;
            while k < self.cols {
                let width = cols.min(self.cols - k);
                let next = if k + cols < self.cols { (row, k + cols) } else { (row + ROWS, 0) };
                Block { product: self, panel, sums, row, rows, k, width, next }.run(isa);
                k += cols;
            }
            row += ROWS;
        }
    }
}

/// Weight rows of a panel × columns at work. Blocks of columns come in ascending order.
#[derive(Clone, Copy)]
struct Block<'a, F> {
    product: Panels<'a, F>,
    panel: *mut f32,
    sums: *mut f32,
    /// Weight rows `row .. row + rows` of the product.
    row: usize,
    rows: usize,
    /// Columns `k .. k + width`; `width` is a multiple of 32 unless they are the last.
    k: usize,
    width: usize,
    /// First weight row and first column of the block that follows.
    next: (usize, usize),
}

/// Where a tile takes its weights from: as stored, as stored and leaving them in the panel, from the panel.
const STORED: u8 = 0;
const STORED_TO_PANEL: u8 = 1;
const PANEL: u8 = 2;

/// Runs `Meet` of `$rows` weight rows × as many activation rows as the tile has.
macro_rules! meet {
    ($isa:ident, $block:ident, $i:expr, $source:ident, $rows:ident, [$($width:literal)+]) => {{
        let (i, tiles) = ($i, $block.product.tiles);
        let (t, turn) = ($block.product.layout.tile(i), (i - tiles.0, tiles.1 - tiles.0));
        match t.len() {
            $($width => $isa.run(Meet::<_, $rows, $width, $source> { block: $block, t, turn }),)+
            n => unreachable!("a tile of {n} activation rows"),
        }
    }};
}

impl<F: Format> Block<'_, F> {
    /// Every tile of activations on every row of the panel.
    fn run(self, isa: Detected) {
        const WIDE_ROWS: usize = WIDE.0;
        const TALL_ROWS: usize = TALL.0;
        const NARROW_ROWS: usize = NARROW.0;
        let (first, end) = self.product.tiles;
        if isa.isa() == Isa::Avx512 {
            if self.product.is_tall() {
                meet!(isa, self, first, STORED, TALL_ROWS, [7 8 9 10 11 12]);
                return;
            }
            if first + 1 == end {
                meet!(isa, self, first, STORED, WIDE_ROWS, [1 2 3 4 5 6]);
                return;
            }
            meet!(isa, self, first, STORED_TO_PANEL, WIDE_ROWS, [1 2 3 4 5 6]);
            for i in first + 1..end {
                meet!(isa, self, i, PANEL, WIDE_ROWS, [1 2 3 4 5 6]);
            }
        } else {
            meet!(isa, self, first, STORED_TO_PANEL, NARROW_ROWS, [1 2 3]);
            for i in first + 1..end {
                meet!(isa, self, i, PANEL, NARROW_ROWS, [1 2 3]);
            }
        }
    }
}

/// All rows of a panel, R at a time, × the T activation rows `t`, which stay in the first-level cache meanwhile.
struct Meet<'a, F, const R: usize, const T: usize, const SOURCE: u8> {
    block: Block<'a, F>,
    t: Range<usize>,
    /// Which of how many tiles this is.
    turn: (usize, usize),
}

impl<F: Format, const R: usize, const T: usize, const SOURCE: u8> Kernel for Meet<'_, F, R, T, SOURCE> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        if (R * T > NARROW.0 * NARROW.1) && L::REGISTERS < 32 {
            unreachable!("a tile for more registers");
        }
        let Block { product, rows, k, width, .. } = self.block;
        let first = product.layout.tile(product.tiles.0).start;
        let t_len = product.layout.tile(product.tiles.1 - 1).end - first;
        let padded = width.next_multiple_of(LANES);
        let x = product.x[product.layout.floats(self.t.start)..][k * T..][..padded * T].as_ptr();
        let mut row = 0;
        while row < rows {
            // SAFETY: the tile's weights lie inside the panel and its sums inside theirs: row + R ≤ ROWS, the width is
            // at most COLS, and t_len at most T_MAX. From the second block of columns on, the sums are there.
            unsafe {
                let panel = self.block.panel.add(row * padded);
                let kept = self.block.sums.add((row * t_len + R * (self.t.start - first)) * LANES);
                let mut sums = [[L::splat(0.0); T]; R];
                if k > 0 {
                    for r in 0..R {
                        for i in 0..T {
                            sums[r][i] = L::load(kept.add((r * T + i) * LANES));
                        }
                    }
                }
                sums = self.columns(row, x, panel, sums);
                // Results are taken from there too: an index that is not constant would keep all sums in memory.
                for r in 0..R {
                    for i in 0..T {
                        sums[r][i].store(kept.add((r * T + i) * LANES));
                    }
                }
                if k + width == product.cols {
                    let n = R * T;
                    let y = product.y_start + self.t.start * product.y_stride + self.block.row + row;
                    for i in (0..n).step_by(4) {
                        let mut four = [L::splat(0.0); 4];
                        for j in 0..4 {
                            let (r, t) = ((i + j).min(n - 1) % R, (i + j).min(n - 1) / R);
                            four[j] = L::load(kept.add((r * T + t) * LANES));
                        }
                        for (j, sum) in L::sum_each(four).into_iter().enumerate() {
                            let (r, t) = ((i + j) % R, (i + j) / R);
                            if t < T && row + r < rows {
                                product.y.write(y + t * product.y_stride + r, sum);
                            }
                        }
                    }
                }
            }
            row += R;
        }
    }
}

impl<F: Format, const R: usize, const T: usize, const SOURCE: u8> Meet<'_, F, R, T, SOURCE> {
    /// R weight rows from `row`, decoded or to be decoded at `panel`, × the activations at `x`.
    ///
    /// # Safety
    /// As of [`Kernel::run`]; the tile's weights have room at `panel`, and its activations are at `x`.
    #[inline(always)]
    unsafe fn columns<L: Lanes>(
        &self,
        row: usize,
        x: *const f32,
        panel: *mut f32,
        mut sums: [[L; T]; R],
    ) -> [[L; T]; R] {
        let Block { product, rows, width, next, .. } = self.block;
        let first_row = product.first_row + self.block.row;
        let last_row = product.first_row + product.rows - 1;
        let (mut from, mut ahead) = ([product.weights.row(first_row); R], [product.weights.row(first_row); R]);
        for r in 0..R {
            // Rows that the last tile lacks repeat the last; what comes of them is dropped.
            from[r] = product.weights.row(first_row + (row + r).min(rows - 1));
            ahead[r] = product.weights.row((product.first_row + next.0 + row + r).min(last_row));
        }
        // Decoded weights go through memory even where no other tile wants them: with the sums there are too few registers
        // to decode a step's weights in. Decoding a step and multiplying the one before overlap in the processor.
        let step = if SOURCE == STORED { 0 } else { R * LANES };
        let mut w = panel;
        let mut turn = self.turn.0;
        // SAFETY: by this method's contract; rows and columns read exist.
        unsafe {
            let mut k = 0;
            while k + GROUP <= width {
                // The tiles share in bringing the next block near: memory is then read during all the work on a block, and
                // rows lie too far apart for the processor to see by itself where this goes.
                if turn == 0 {
                    for r in 0..R {
                        F::prefetch(ahead[r], next.1 + k);
                    }
                    turn = self.turn.1;
                }
                turn -= 1;
                if SOURCE == PANEL {
                    sums = meet_step(self.at::<L>(w), x.add(k * T), sums);
                    sums = meet_step(self.at::<L>(w.add(R * LANES)), x.add((k + LANES) * T), sums);
                } else if R * T > IN_REGISTERS_MAX && R > TALL.0 && size_of::<F::Group<L>>() > 0 {
                    let column = self.block.k + k;
                    for r in 0..R {
                        let group = F::group::<L>(from[r], column);
                        F::load::<L>(from[r], column, group).store(w.add(r * LANES));
                        F::load::<L>(from[r], column + LANES, group).store(w.add((R + r) * LANES));
                    }
                    sums = meet_step(self.at::<L>(w), x.add(k * T), sums);
                    sums = meet_step(self.at::<L>(w.add(R * LANES)), x.add((k + LANES) * T), sums);
                } else {
                    let column = self.block.k + k;
                    let mut group = [F::group::<L>(from[0], column); R];
                    let mut tile = [L::splat(0.0); R];
                    for r in 0..R {
                        group[r] = F::group::<L>(from[r], column);
                        tile[r] = F::load::<L>(from[r], column, group[r]);
                        if SOURCE == STORED_TO_PANEL {
                            tile[r].store(w.add(r * LANES));
                        }
                    }
                    sums = meet_step(tile, x.add(k * T), sums);
                    for r in 0..R {
                        tile[r] = F::load::<L>(from[r], column + LANES, group[r]);
                        if SOURCE == STORED_TO_PANEL {
                            tile[r].store(w.add((R + r) * LANES));
                        }
                    }
                    sums = meet_step(tile, x.add((k + LANES) * T), sums);
                }
                k += GROUP;
                w = w.add(2 * step);
            }
            while k < width {
                if SOURCE != PANEL {
                    let (column, n) = (self.block.k + k, width - k);
                    for r in 0..R {
                        let part = if n >= LANES {
                            F::load::<L>(from[r], column, F::group::<L>(from[r], column / GROUP * GROUP))
                        } else {
                            F::load_part::<L>(from[r], column, n)
                        };
                        part.store(w.add(r * LANES));
                    }
                }
                sums = meet_step(self.at::<L>(w), x.add(k * T), sums);
                k += LANES;
                w = w.add(step);
            }
        }
        sums
    }

    /// R vectors from the panel.
    ///
    /// # Safety
    /// The CPU has the instructions of `L`; 16 R floats are readable at `w`.
    #[inline(always)]
    unsafe fn at<L: Lanes>(&self, w: *const f32) -> [L; R] {
        // SAFETY: by this function's contract.
        unsafe {
            let mut tile = [L::splat(0.0); R];
            for r in 0..R {
                tile[r] = L::load(w.add(r * LANES));
            }
            tile
        }
    }
}

/// Sixteen columns of R decoded weight rows × T activation rows.
///
/// # Safety
/// The CPU has the instructions of `L`; 16 R floats are readable at `w`, and 16 T at `x`.
#[inline(always)]
unsafe fn meet_step<L: Lanes, const R: usize, const T: usize>(
    w: [L; R],
    x: *const f32,
    mut sums: [[L; T]; R],
) -> [[L; T]; R] {
    // SAFETY: by this function's contract.
    unsafe {
        for i in 0..T {
            let x = L::load(x.add(i * LANES));
            for r in 0..R {
                sums[r][i] = w[r].fma(x, sums[r][i]);
            }
        }
    }
    sums
}
