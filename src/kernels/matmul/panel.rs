//! Weight rows × many activation rows: a panel of weights is decoded to f32 once and met by every activation row.
//!
//! Columns are taken in blocks that fit the caches; between blocks the sixteen partial sums of each dot product rest in
//! memory, so its order is that of one pass over all columns.

#![expect(clippy::needless_range_loop, reason = "indices below constants unroll into registers")]

use std::mem::MaybeUninit;

use super::super::lanes::{Kernel, LANES, Lanes};
use super::dot::Product;
use super::format::{Format, GROUP};

/// Columns of a block: 4 weight rows of it take 8 KiB, 6 activation rows 12 KiB of the first-level cache.
const COLS: usize = 512;
/// Weight rows of a panel, which then takes 32 KiB.
const ROWS: usize = 16;
/// Activation rows that share a panel; their partial sums take 16 · 96 · 64 B = 96 KiB of the second-level cache.
pub(super) const T_MAX: usize = 96;

/// Room for decoded weights: for each tile of rows, for each sixteen columns, the rows' lanes one after the other.
#[repr(align(64))]
#[expect(dead_code, reason = "reached by pointer")]
struct Panel([f32; ROWS * COLS]);

/// Room for partial sums: those of weight row r and activation row t at `(r · T_MAX + t) · 16`.
#[repr(align(64))]
#[expect(dead_code, reason = "reached by pointer")]
struct Sums([f32; ROWS * T_MAX * LANES]);

/// One panel at work.
#[derive(Clone, Copy)]
struct Block<'a, F> {
    product: Product<'a, F>,
    panel: *mut f32,
    sums: *mut f32,
    /// Weight rows `row .. row + rows` and activation rows `t .. t + t_len` of the product.
    row: usize,
    rows: usize,
    t: usize,
    t_len: usize,
    /// Columns `k .. k + width`; `width` is a multiple of 16 unless they are the last.
    k: usize,
    width: usize,
}

/// A product of many activation rows.
pub(super) struct Panels<'a, F>(pub(super) Product<'a, F>);

impl<F: Format> Kernel for Panels<'_, F> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let product = self.0;
        let mut panel = MaybeUninit::<Panel>::uninit();
        let mut sums = MaybeUninit::<Sums>::uninit();
        let (panel, sums) = (panel.as_mut_ptr().cast(), sums.as_mut_ptr().cast());
        let mut row = 0;
        while row < product.rows {
            let rows = ROWS.min(product.rows - row);
            let mut t = 0;
            while t < product.t {
                let t_len = T_MAX.min(product.t - t);
                let mut k = 0;
                while k < product.cols {
                    let width = COLS.min(product.cols - k);
                    let block = Block { product, panel, sums, row, rows, t, t_len, k, width };
                    // SAFETY: by this method's contract; the product's shapes were checked. Blocks of columns come in
                    // ascending order, so that the sums are there from the second on.
                    unsafe {
                        if L::REGISTERS >= 32 {
                            block.decode::<L, 4>();
                            block.meet_wide::<L>();
                        } else {
                            block.decode::<L, 2>();
                            block.meet_narrow::<L>();
                        }
                    }
                    k += COLS;
                }
                t += T_MAX;
            }
            row += ROWS;
        }
    }
}

impl<F: Format> Block<'_, F> {
    /// Fills the panel in tiles of R rows; rows that the last tile lacks are zero.
    ///
    /// # Safety
    /// As of [`Kernel::run`].
    #[inline(always)]
    unsafe fn decode<L: Lanes, const R: usize>(self) {
        let steps = self.width.div_ceil(LANES);
        let mut row = 0;
        while row < self.rows.next_multiple_of(R) {
            // SAFETY: the tile lies inside the panel: row + R ≤ ROWS and 16 · steps ≤ COLS; rows and columns read exist.
            unsafe {
                let to = self.panel.add((row - row % R) * steps * LANES + row % R * LANES);
                let from = self.product.weights.row(self.product.first_row + self.row + row);
                let mut step = 0;
                while step < steps {
                    let column = self.k + step * LANES;
                    let lanes = if row >= self.rows {
                        L::splat(0.0)
                    } else if step + 2 <= self.width / LANES {
                        // Two at once: in MXFP4 they share a table. The next block of columns is brought near: rows
                        // lie too far apart for the processor to see where this is going.
                        F::prefetch(from, column + COLS);
                        let group = F::group::<L>(from, column);
                        F::load::<L>(from, column, group).store(to.add(step * R * LANES));
                        step += 1;
                        F::load::<L>(from, column + LANES, group)
                    } else if step < self.width / LANES {
                        F::load::<L>(from, column, F::group::<L>(from, column / GROUP * GROUP))
                    } else {
                        F::load_part::<L>(from, column, self.width % LANES)
                    };
                    lanes.store(to.add(step * R * LANES));
                    step += 1;
                }
            }
            row += 1;
        }
    }

    /// For register files of 32 whole values: tiles of 4 × 6, so that 24 sums, 4 weights and an activation fit.
    ///
    /// # Safety
    /// As of [`Kernel::run`]; the panel is decoded.
    #[inline(always)]
    unsafe fn meet_wide<L: Lanes>(self) {
        let mut t = 0;
        while t < self.t_len {
            // SAFETY: by this method's contract; the tiles stay below `t_len`.
            unsafe {
                t += match self.t_len - t {
                    6.. => self.meet::<L, 4, 6>(t),
                    4.. => self.meet::<L, 4, 4>(t),
                    2.. => self.meet::<L, 4, 2>(t),
                    _ => self.meet::<L, 4, 1>(t),
                };
            }
        }
    }

    /// For register files of 8: tiles of 2 × 3.
    ///
    /// # Safety
    /// As of [`Kernel::run`]; the panel is decoded.
    #[inline(always)]
    unsafe fn meet_narrow<L: Lanes>(self) {
        let mut t = 0;
        while t < self.t_len {
            // SAFETY: by this method's contract; the tiles stay below `t_len`.
            unsafe {
                t += match self.t_len - t {
                    3.. => self.meet::<L, 2, 3>(t),
                    _ => self.meet::<L, 2, 1>(t),
                };
            }
        }
    }

    /// All rows of the panel, R at a time, × T activation rows from `t`, which stay in the first-level cache meanwhile.
    /// Returns T.
    ///
    /// # Safety
    /// As of [`Kernel::run`]; the panel is decoded in tiles of R.
    #[inline(always)]
    unsafe fn meet<L: Lanes, const R: usize, const T: usize>(self, t: usize) -> usize {
        let mut x = [self.product.x.as_ptr(); T];
        for i in 0..T {
            let row = &self.product.x[(self.t + t + i) * self.product.x_stride..][..self.product.cols];
            x[i] = row[self.k..][..self.width].as_ptr();
        }
        let mut row = 0;
        while row < self.rows {
            // SAFETY: the tile lies inside the panel, see `decode`, and its sums inside theirs.
            unsafe { self.tile::<L, R, T>(row, t, x) };
            row += R;
        }
        T
    }

    /// R weight rows from `row` × T activation rows from `t`, at `x`.
    ///
    /// # Safety
    /// As of [`Block::meet`].
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const T: usize>(self, row: usize, t: usize, x: [*const f32; T]) {
        let steps = self.width / LANES;
        let rest = self.width % LANES;
        // SAFETY: by this method's contract; the activations have `width` elements.
        unsafe {
            let w = self.panel.add(row * self.width.div_ceil(LANES) * LANES).cast_const();
            let mut sums = [[L::splat(0.0); T]; R];
            if self.k > 0 {
                for r in 0..R {
                    for i in 0..T {
                        sums[r][i] = L::load(self.sum(row + r, t + i));
                    }
                }
            }
            for step in 0..steps {
                let mut tile = [L::splat(0.0); R];
                for r in 0..R {
                    tile[r] = L::load(w.add((step * R + r) * LANES));
                }
                for i in 0..T {
                    let x = L::load(x[i].add(step * LANES));
                    for r in 0..R {
                        sums[r][i] = tile[r].fma(x, sums[r][i]);
                    }
                }
            }
            if rest > 0 {
                for i in 0..T {
                    let x = L::load_part(x[i].add(steps * LANES), rest);
                    for r in 0..R {
                        sums[r][i] = L::load(w.add((steps * R + r) * LANES)).fma(x, sums[r][i]);
                    }
                }
            }
            if self.k + self.width < self.product.cols {
                for r in 0..R {
                    for i in 0..T {
                        sums[r][i].store(self.sum(row + r, t + i));
                    }
                }
                return;
            }
            for i in 0..T {
                let y = self.product.y_start + (self.t + t + i) * self.product.y_stride + self.row + row;
                for r in 0..R.min(self.rows - row) {
                    self.product.y.write(y + r, sums[r][i].sum());
                }
            }
        }
    }

    /// Where the partial sums of weight row `row` and activation row `t` of this block rest.
    #[inline(always)]
    fn sum(self, row: usize, t: usize) -> *mut f32 {
        self.sums.wrapping_add((row * T_MAX + t) * LANES)
    }
}
