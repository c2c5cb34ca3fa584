//! Weight rows × few activation rows: each weight is decoded in registers on its way from memory and met by up to
//! four activation rows at once.

#![expect(clippy::needless_range_loop, reason = "indices below constants unroll into registers")]

use super::super::disjoint::Disjoint;
use super::super::lanes::{Kernel, LANES, Lanes};
use super::format::{Format, GROUP};

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
    pub(super) y: Disjoint<'a>,
    pub(super) y_start: usize,
    pub(super) y_stride: usize,
}

impl<F: Format> Kernel for Product<'_, F> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // Four rows at once, a quarter of all apart: each is read from front to back, which the processor foresees.
        let quarter = self.rows / 4;
        // SAFETY: by this method's contract; the product's shapes were checked, and tiles stay below `rows` and `t`.
        unsafe {
            for row in 0..quarter {
                let mut t = 0;
                while t < self.t {
                    t += match self.t - t {
                        4.. if L::REGISTERS >= 32 => self.tile::<L, 4, 4>(row, quarter, t),
                        3 if L::REGISTERS >= 32 => self.tile::<L, 4, 3>(row, quarter, t),
                        2.. => self.tile::<L, 4, 2>(row, quarter, t),
                        _ => self.tile::<L, 4, 1>(row, quarter, t),
                    };
                }
            }
            for row in 4 * quarter..self.rows {
                for t in 0..self.t {
                    self.tile::<L, 1, 1>(row, 0, t);
                }
            }
        }
    }
}

impl<F: Format> Product<'_, F> {
    /// R weight rows from `row`, `apart` from each other, × T activation rows from `t`. Returns T.
    ///
    /// # Safety
    /// As of [`Kernel::run`].
    #[inline(always)]
    unsafe fn tile<L: Lanes, const R: usize, const T: usize>(self, row: usize, apart: usize, t: usize) -> usize {
        let mut w = [self.weights.row(self.first_row + row); R];
        for r in 0..R {
            w[r] = self.weights.row(self.first_row + row + r * apart);
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
                    F::prefetch(w[r], k + F::AHEAD);
                    let group = F::group::<L>(w[r], k);
                    let [first, second] = F::load_pair::<L>(w[r], k, group);
                    for i in 0..T {
                        sums[r][i] = first.fma(L::load(x[i].add(k)), sums[r][i]);
                    }
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
                    self.y.write(self.y_start + (t + i) * self.y_stride + row + r * apart, sums[r][i].sum());
                }
            }
        }
        T
    }
}
