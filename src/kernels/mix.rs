//! AttnRes: the softmax mix over completed blocks and the running sum.

use std::ops::Range;

use super::Compute;
use super::disjoint::DisjointMut;
use super::lanes::{Kernel, LANES, Lanes};
use super::math::exp;
use super::slices::{load, store};

impl Compute {
    /// AttnRes: for each row, out = Σ p_i v_i over the candidates, p = softmax of Σ_d rms(v_i)_d · query_d.
    /// `candidates`: each `[T, hidden]`, oldest block first, the running sum last; `query` = norm.weight · proj.weight.
    ///
    /// A score is the canonical dot product of v and query times 1 / sqrt(mean(v²) + eps). The largest is subtracted
    /// before exp; sums run in the candidates' order, the last one by fused multiply-add on the raw values.
    ///
    /// # Panics
    /// When the lengths do not fit or there is no candidate.
    pub fn attn_res_mix(&self, candidates: &[&[f32]], query: &[f32], eps: f32, out: &mut [f32]) {
        let hidden = query.len();
        let len = out.len();
        assert!(!candidates.is_empty(), "a mix needs at least one candidate");
        assert!(hidden > 0 && len.is_multiple_of(hidden), "out has {len} values, not whole rows of {hidden}");
        for (i, candidate) in candidates.iter().enumerate() {
            assert_eq!(candidate.len(), len, "candidate {i} must be as long as out");
        }
        let out = DisjointMut::new(out);
        self.ranges(len / hidden, 6 * candidates.len() * hidden.div_ceil(LANES), &|rows| {
            // SAFETY: the ranges of rows are disjoint, and each task writes its own alone.
            let out = unsafe { out.range(rows.start * hidden..rows.end * hidden) };
            let mut weights = vec![0.0; candidates.len()];
            self.isa.run(Mix { candidates, rows, query, eps, weights: &mut weights, out });
        });
    }
}

struct Mix<'a> {
    /// Each `[T, hidden]`.
    candidates: &'a [&'a [f32]],
    /// The rows of them to mix.
    rows: Range<usize>,
    query: &'a [f32],
    eps: f32,
    /// Room for one score a candidate.
    weights: &'a mut [f32],
    /// `[rows, hidden]`.
    out: &'a mut [f32],
}

impl Kernel for Mix<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let (hidden, count) = (self.query.len(), self.candidates.len());
        assert!(self.weights.len() == count && self.out.len() == self.rows.len() * hidden);
        assert!(self.candidates.iter().all(|c| c.len() >= self.rows.end * hidden));
        let (query, weights) = (self.query.as_ptr(), self.weights.as_mut_ptr());
        let mut out = self.out.as_mut_ptr();
        let mut start = self.rows.start * hidden;
        while start < self.rows.end * hidden {
            // SAFETY: every candidate has the row at `start` and `out` has room for the rows of the range, `weights`
            // for the candidates (assertions); the CPU has the instructions (caller).
            unsafe {
                let mut c = 0;
                while c + 2 <= count {
                    let pair = [self.candidates[c].as_ptr().add(start), self.candidates[c + 1].as_ptr().add(start)];
                    let [a, b] = scores::<L, 2>(pair, query, hidden, self.eps);
                    *weights.add(c) = a;
                    *weights.add(c + 1) = b;
                    c += 2;
                }
                if c < count {
                    let last = [self.candidates[c].as_ptr().add(start)];
                    [*weights.add(c)] = scores::<L, 1>(last, query, hidden, self.eps);
                }
                softmax::<L>(weights, count);
                let mut i = 0;
                while i < hidden {
                    let n = hidden - i;
                    let mut sum = load::<L>(self.candidates[0].as_ptr().add(start + i), n).mul(L::splat(*weights));
                    for c in 1..count {
                        let value = load::<L>(self.candidates[c].as_ptr().add(start + i), n);
                        sum = value.fma(L::splat(*weights.add(c)), sum);
                    }
                    store(sum, out.add(i), n);
                    i += LANES;
                }
                out = out.add(hidden);
            }
            start += hidden;
        }
    }
}

/// Scores of `N` candidates' rows; norm and product in one pass over the values.
///
/// # Safety
/// The CPU has the instructions of `L`; `hidden` floats are readable at every row and at `query`.
#[inline(always)]
unsafe fn scores<L: Lanes, const N: usize>(
    rows: [*const f32; N],
    query: *const f32,
    hidden: usize,
    eps: f32,
) -> [f32; N] {
    // SAFETY: i < hidden, and the loads end at hidden at the latest.
    unsafe {
        let mut squares = [L::splat(0.0); N];
        let mut products = [L::splat(0.0); N];
        let mut i = 0;
        while i < hidden {
            let q = load::<L>(query.add(i), hidden - i);
            for c in 0..N {
                let v = load::<L>(rows[c].add(i), hidden - i);
                squares[c] = v.fma(v, squares[c]);
                products[c] = v.fma(q, products[c]);
            }
            i += LANES;
        }
        let mut scores = [0.0; N];
        for c in 0..N {
            let mean = squares[c].sum() / hidden as f32;
            scores[c] = products[c].sum() * (1.0 / (mean + eps).sqrt());
        }
        scores
    }
}

/// Softmax of `n` > 0 values in place: the largest subtracted, the sum in order, then a division each.
///
/// # Safety
/// The CPU has the instructions of `L`; `n` floats are readable and writable at `x`.
#[inline(always)]
unsafe fn softmax<L: Lanes>(x: *mut f32, n: usize) {
    // SAFETY: i < n, and loads and stores end at n at the latest.
    unsafe {
        let mut largest = *x;
        for i in 1..n {
            if *x.add(i) > largest {
                largest = *x.add(i);
            }
        }
        let mut i = 0;
        while i < n {
            store(exp(load::<L>(x.add(i), n - i).sub(L::splat(largest))), x.add(i), n - i);
            i += LANES;
        }
        let mut sum = 0.0;
        for i in 0..n {
            sum += *x.add(i);
        }
        for i in 0..n {
            *x.add(i) /= sum;
        }
    }
}
