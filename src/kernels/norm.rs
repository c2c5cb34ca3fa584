//! RMSNorm, gated RMSNorm and the per-head L2 norm.

use super::Compute;
use super::disjoint::DisjointMut;
use super::lanes::{Kernel, LANES, Lanes};
use super::math::sigmoid;
use super::slices::{dot, load, store};

impl Compute {
    /// RMSNorm of every row: out = x / sqrt(mean(x²) + eps) · weight, x and out `[T, weight.len()]`.
    ///
    /// The mean of squares is a canonical dot product over the width; then (x · (1 / sqrt(mean + eps))) · weight.
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        let dim = weight.len();
        let rows = rows("x", x.len(), dim);
        assert_eq!(out.len(), x.len(), "out must be as long as x");
        let out = DisjointMut::new(out);
        self.ranges(rows, 5 * dim.div_ceil(LANES), &|rows| {
            let part = rows.start * dim..rows.end * dim;
            // SAFETY: the ranges of rows are disjoint, and each task writes its own alone.
            let out = unsafe { out.range(part.clone()) };
            self.isa.run(RmsNorm { x: &x[part], weight, eps, out });
        });
    }

    /// x = rmsnorm(x) · weight · sigmoid(gate), rows of `weight.len()`; x and gate `[n, weight.len()]`. KDA's output.
    ///
    /// Multiplied from the left: ((x · (1 / sqrt(mean + eps))) · weight) · sigmoid(gate).
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn gated_rms_norm(&self, x: &mut [f32], gate: &[f32], weight: &[f32], eps: f32) {
        let dim = weight.len();
        let rows = rows("x", x.len(), dim);
        assert_eq!(gate.len(), x.len(), "gate must be as long as x");
        let x = DisjointMut::new(x);
        self.ranges(rows, 25 * dim.div_ceil(LANES), &|rows| {
            let part = rows.start * dim..rows.end * dim;
            // SAFETY: the ranges of rows are disjoint, and each task writes its own alone.
            let x = unsafe { x.range(part.clone()) };
            self.isa.run(GatedRmsNorm { x, gate: &gate[part], weight, eps });
        });
    }

    /// Per head of width `dim`: x = x / sqrt(Σx² + eps) · scale. x is any number of heads.
    ///
    /// The sum of squares is a canonical dot product; then x · ((1 / sqrt(sum + eps)) · scale).
    ///
    /// # Panics
    /// When x is not a whole number of heads.
    pub fn l2_norm(&self, x: &mut [f32], dim: usize, eps: f32, scale: f32) {
        let heads = rows("x", x.len(), dim);
        let x = DisjointMut::new(x);
        self.ranges(heads, 5 * dim.div_ceil(LANES), &|heads| {
            // SAFETY: the ranges of heads are disjoint, and each task writes its own alone.
            let x = unsafe { x.range(heads.start * dim..heads.end * dim) };
            self.isa.run(L2Norm { x, dim, eps, scale });
        });
    }
}

/// How many rows of `dim` there are in `len` floats of `name`.
fn rows(name: &str, len: usize, dim: usize) -> usize {
    assert!(dim > 0 && len.is_multiple_of(dim), "{name} has {len} values, not whole rows of {dim}");
    len / dim
}

/// 1 / sqrt(mean(x²) + eps) of `dim` floats.
///
/// # Safety
/// The CPU has the instructions of `L`; `dim` floats are readable at `x`.
#[inline(always)]
unsafe fn inverse_rms<L: Lanes>(x: *const f32, dim: usize, eps: f32) -> f32 {
    // SAFETY: by this function's contract.
    let mean = unsafe { dot::<L>(x, x, dim) } / dim as f32;
    1.0 / (mean + eps).sqrt()
}

struct RmsNorm<'a> {
    x: &'a [f32],
    weight: &'a [f32],
    eps: f32,
    out: &'a mut [f32],
}

impl Kernel for RmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let dim = self.weight.len();
        let weight = self.weight.as_ptr();
        let mut start = 0;
        while start + dim <= self.x.len().min(self.out.len()) {
            // SAFETY: the row start..start + dim lies in x and out; n − i floats are left at i in it and in the weight;
            // the CPU has the instructions (caller).
            unsafe {
                let (x, out) = (self.x.as_ptr().add(start), self.out.as_mut_ptr().add(start));
                let inverse = L::splat(inverse_rms::<L>(x, dim, self.eps));
                let mut i = 0;
                while i < dim {
                    let n = dim - i;
                    let value = load::<L>(x.add(i), n).mul(inverse).mul(load(weight.add(i), n));
                    store(value, out.add(i), n);
                    i += LANES;
                }
            }
            start += dim;
        }
    }
}

struct GatedRmsNorm<'a> {
    x: &'a mut [f32],
    gate: &'a [f32],
    weight: &'a [f32],
    eps: f32,
}

impl Kernel for GatedRmsNorm<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let dim = self.weight.len();
        let weight = self.weight.as_ptr();
        let mut start = 0;
        while start + dim <= self.x.len().min(self.gate.len()) {
            // SAFETY: the row start..start + dim lies in x and gate; n − i floats are left at i in it and in the
            // weight; the CPU has the instructions (caller).
            unsafe {
                let (x, gate) = (self.x.as_mut_ptr().add(start), self.gate.as_ptr().add(start));
                let inverse = L::splat(inverse_rms::<L>(x, dim, self.eps));
                let mut i = 0;
                while i < dim {
                    let n = dim - i;
                    let value = load::<L>(x.add(i), n).mul(inverse).mul(load(weight.add(i), n));
                    store(value.mul(sigmoid(load(gate.add(i), n))), x.add(i), n);
                    i += LANES;
                }
            }
            start += dim;
        }
    }
}

struct L2Norm<'a> {
    x: &'a mut [f32],
    dim: usize,
    eps: f32,
    scale: f32,
}

impl Kernel for L2Norm<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let dim = self.dim;
        let mut start = 0;
        while start + dim <= self.x.len() {
            // SAFETY: the head start..start + dim lies in x, and n − i floats are left at i in it; the CPU has the
            // instructions (caller).
            unsafe {
                let x = self.x.as_mut_ptr().add(start);
                let factor = L::splat(1.0 / (dot::<L>(x, x, dim) + self.eps).sqrt() * self.scale);
                let mut i = 0;
                while i < dim {
                    store(load::<L>(x.add(i), dim - i).mul(factor), x.add(i), dim - i);
                    i += LANES;
                }
            }
            start += dim;
        }
    }
}
