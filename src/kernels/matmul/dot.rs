//! Weight rows × few activation rows: each weight is decoded in registers on its way from memory and met by every
//! activation row at once.

use super::super::disjoint::DisjointMut;
use super::super::lanes::{Kernel, LANES, Lanes};
use super::format::{Format, GROUP};

/// Activation rows from which a panel pays.
pub(super) const PANEL_ROWS_MIN: usize = 4;

/// y\[t, r\] = Σ_k W\[r, k\] x\[t, k\] for a block of weight rows and a block of activation rows.
#[derive(Clone, Copy)]
pub(super) struct Product<'a, F> {
    pub(super) weights: F,
    /// The weight rows: `first_row .. first_row + rows`.
    pub(super) first_row: usize,
    pub(super) rows: usize,
    pub(super) cols: usize,
    /// Row t begins at `t · x_stride` and has `cols` elements.
    pub(super) x: &'a [f32],
    pub(super) x_stride: usize,
    pub(super) t: usize,
    /// The result of (t, r) goes to `y_start + t · y_stride + r`.
    pub(super) y: DisjointMut<'a, f32>,
    pub(super) y_start: usize,
    pub(super) y_stride: usize,
}

impl<F: Format> Kernel for Product<'_, F> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let mut row = 0;
        // SAFETY: by this method's contract; the product's shapes were checked, and tiles stay below `rows` and `t`.
        unsafe {
            while row + 4 <= self.rows {
                let mut t = 0;
                while t + 2 <= self.t {
                    self.tile::<L, 4, 2>(row, t);
                    t += 2;
                }
                if t < self.t {
                    self.tile::<L, 4, 1>(row, t);
                }
                row += 4;
            }
            while row < self.rows {
                for t in 0..self.t {
                    self.tile::<L, 1, 1>(row, t);
                }
                row += 1;
            }
        }
    }
}

impl<F: Format> Product<'_, F> {
    /// R weight rows from `row` × T activation rows from `t`.
    ///
    /// # Safety
    /// As of [`Kernel::run`].
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const T: usize>(self, row: usize, t: usize) {
        let mut w = [self.weights.row(self.first_row + row); R];
        for r in 0..R {
            w[r] = self.weights.row(self.first_row + row + r);
        }
        let mut x = [self.x.as_ptr(); T];
        for i in 0..T {
            x[i] = self.x[(t + i) * self.x_stride..][..self.cols].as_ptr();
        }
        // SAFETY: rows and columns are in range; nobody else writes this block of y.
        unsafe {
            let mut sums = [[L::splat(0.0); T]; R];
            let mut k = 0;
            while k + GROUP <= self.cols {
                for r in 0..R {
                    let group = F::group::<L>(w[r], k);
                    let first = F::load::<L>(w[r], k, group);
                    for i in 0..T {
                        sums[r][i] = first.fma(L::load(x[i].add(k)), sums[r][i]);
                    }
                    let second = F::load::<L>(w[r], k + LANES, group);
                    for i in 0..T {
                        sums[r][i] = second.fma(L::load(x[i].add(k + LANES)), sums[r][i]);
                    }
                }
                k += GROUP;
            }
            while k < self.cols {
                let n = (self.cols - k).min(LANES);
                for r in 0..R {
                    let part = if n == LANES {
                        let group = F::group::<L>(w[r], k);
                        F::load::<L>(w[r], k, group)
                    } else {
                        F::load_part::<L>(w[r], k, n)
                    };
                    for i in 0..T {
                        let x = if n == LANES { L::load(x[i].add(k)) } else { L::load_part(x[i].add(k), n) };
                        sums[r][i] = part.fma(x, sums[r][i]);
                    }
                }
                k += LANES;
            }
            for i in 0..T {
                for r in 0..R {
                    self.y.write(self.y_start + (t + i) * self.y_stride + row + r, sums[r][i].sum());
                }
            }
        }
    }
}
