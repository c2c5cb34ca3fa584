//! Wᵀ x: sums over weight rows, for the product that folds a matrix into the query of latent attention.

#![expect(clippy::needless_range_loop, reason = "indices below constants unroll into registers")]

use super::super::disjoint::Disjoint;
use super::super::lanes::{Kernel, LANES, Lanes};
use super::format::{Format, GROUP};

/// y\[t, c\] = Σ_d x\[t, d\] W\[first_row + d, c\], d ascending by fused multiply-add from +0.0.
#[derive(Clone, Copy)]
pub(super) struct Transposed<'a, F> {
    pub(super) weights: F,
    pub(super) first_row: usize,
    pub(super) depth: usize,
    pub(super) cols: usize,
    /// Row t begins at `t · x_stride` and has `depth` elements.
    pub(super) x: &'a [f32],
    pub(super) x_stride: usize,
    pub(super) t: usize,
    /// Row t goes to `y_start + t · y_stride ..+ cols`.
    pub(super) y: Disjoint<'a>,
    pub(super) y_start: usize,
    pub(super) y_stride: usize,
}

impl<F: Format> Kernel for Transposed<'_, F> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: by this method's contract.
        unsafe {
            if L::REGISTERS >= 32 {
                // For few rows memory is the limit: the longer the runs of columns, the better the processor foresees them,
                // and what the next columns of a row need is asked for.
                match self.t {
                    1 => self.columns::<L, 16, 1, false>(),
                    2 => self.columns::<L, 8, 2, false>(),
                    3..=8 => self.columns::<L, 4, 4, true>(),
                    _ => self.columns::<L, 4, 4, false>(),
                }
            } else {
                self.columns::<L, 2, 2, false>();
            }
        }
    }
}

impl<F: Format> Transposed<'_, F> {
    /// All columns in tiles of C · 16 columns × T rows; with `AHEAD`, those of the next tile are prefetched.
    ///
    /// # Safety
    /// As of [`Kernel::run`].
    #[inline(always)]
    unsafe fn columns<L: Lanes, const C: usize, const T: usize, const AHEAD: bool>(self) {
        let mut column = 0;
        // SAFETY: by this method's contract; tiles stay below `cols` and `t`.
        unsafe {
            while column + C * LANES <= self.cols {
                let mut t = 0;
                while t + T <= self.t {
                    self.tile::<L, C, T, AHEAD>(column, t, 0);
                    t += T;
                }
                while t < self.t {
                    self.tile::<L, C, 1, AHEAD>(column, t, 0);
                    t += 1;
                }
                column += C * LANES;
            }
            while column < self.cols {
                let part = if self.cols - column < LANES { self.cols - column } else { 0 };
                for t in 0..self.t {
                    self.tile::<L, 1, 1, false>(column, t, part);
                }
                column += LANES;
            }
        }
    }

    /// C · 16 columns from `column` × T rows from `t`; with `part` > 0 only that many columns (and C is 1).
    ///
    /// # Safety
    /// As of [`Kernel::run`].
    #[inline(always)]
    unsafe fn tile<L: Lanes, const C: usize, const T: usize, const AHEAD: bool>(
        self,
        column: usize,
        t: usize,
        part: usize,
    ) {
        let mut x = [self.x; T];
        let mut y = [0; T];
        for i in 0..T {
            x[i] = &self.x[(t + i) * self.x_stride..][..self.depth];
            y[i] = self.y_start + (t + i) * self.y_stride + column;
        }
        // SAFETY: rows and columns are in range; nobody else writes this block of y.
        unsafe {
            let mut sums = [[L::splat(0.0); C]; T];
            for d in 0..self.depth {
                let row = self.weights.row(self.first_row + d);
                if AHEAD {
                    for c in (0..C * LANES).step_by(GROUP) {
                        F::prefetch(row, column + C * LANES + c);
                    }
                }
                let mut w = [L::splat(0.0); C];
                for c in 0..C {
                    let column = column + c * LANES;
                    w[c] = if part > 0 {
                        F::load_part::<L>(row, column, part)
                    } else {
                        F::load::<L>(row, column, F::group::<L>(row, column / GROUP * GROUP))
                    };
                }
                for i in 0..T {
                    let x = L::splat(x[i][d]);
                    for c in 0..C {
                        sums[i][c] = x.fma(w[c], sums[i][c]);
                    }
                }
            }
            for i in 0..T {
                for c in 0..C {
                    let y = y[i] + c * LANES;
                    if part > 0 {
                        sums[i][c].store_part(self.y.part(y..y + part).as_mut_ptr(), part);
                    } else {
                        sums[i][c].store(self.y.part(y..y + LANES).as_mut_ptr());
                    }
                }
            }
        }
    }
}
