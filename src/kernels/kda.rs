//! Kimi Delta Attention: decay and the gated delta rule.

use std::ops::Range;

use super::Compute;
use super::disjoint::DisjointMut;
use super::lanes::{Kernel, LANES, Lanes};
use super::math::{exp, sigmoid, softplus};
use super::slices::{load, store};

/// Vectors of value channels that a pass over the keys takes together.
const WIDE: usize = 4;
/// Value channels of a task: with 128 keys their state is 32 KiB, which the first-level cache holds over the rows.
const BLOCK: usize = WIDE * LANES;

impl Compute {
    /// KDA decay: g `[T, heads, dim]` → α = exp(log α) in place; `a` = exp(A_log) `[heads]`, `dt_bias` `[heads · dim]`.
    /// log α = lower_bound · sigmoid(a (g + dt_bias)), or −a · softplus(g + dt_bias) without a bound.
    ///
    /// # Panics
    /// When the lengths do not fit.
    pub fn kda_decay(&self, g: &mut [f32], a: &[f32], dt_bias: &[f32], lower_bound: Option<f32>) {
        let heads = a.len();
        assert!(
            heads > 0 && !dt_bias.is_empty() && dt_bias.len().is_multiple_of(heads),
            "dt_bias has {} values, not a whole number for each of {heads} heads",
            dt_bias.len()
        );
        let len = g.len();
        assert!(len.is_multiple_of(dt_bias.len()), "g has {len} values, not whole rows of {}", dt_bias.len());
        let dim = dt_bias.len() / heads;
        let g = DisjointMut::new(g);
        self.ranges(len / dim, 50 * dim.div_ceil(LANES), &|items| {
            for item in items {
                // SAFETY: an item is one head of one row; each is in one task.
                let g = unsafe { g.range(item * dim..(item + 1) * dim) };
                let head = item % heads;
                let dt_bias = &dt_bias[head * dim..(head + 1) * dim];
                self.isa.run(Decay { g, a: a[head], dt_bias, lower_bound });
            }
        });
    }

    /// The gated delta rule over T rows of one sequence. `state` `[heads, d_k, d_v]` is updated in place; q, k, alpha, v
    /// `[T, heads, dim]`, beta `[T, heads]`; out `[T, heads, dim]`, or empty when only the state is wanted (same bits;
    /// q may then be empty too).
    ///
    /// Per row: S ← diag(α) S; r = Sᵀk (keys ascending, fused, from +0.0); S ← S + (β k) ⊗ (v − r); o = Sᵀ q likewise.
    ///
    /// # Panics
    /// When the lengths do not fit.
    #[expect(clippy::too_many_arguments, reason = "the rule's operands")]
    pub fn kda_rows(
        &self,
        state: &mut [f32],
        heads: usize,
        dim: usize,
        q: &[f32],
        k: &[f32],
        alpha: &[f32],
        v: &[f32],
        beta: &[f32],
        out: &mut [f32],
    ) {
        assert!(heads > 0 && dim > 0, "heads and dim must not be 0");
        assert_eq!(state.len(), heads * dim * dim, "state must be [{heads}, {dim}, {dim}]");
        assert!(beta.len().is_multiple_of(heads), "beta has {} values, not whole rows of {heads}", beta.len());
        let rows = beta.len() / heads;
        let len = rows * heads * dim;
        for (name, slice) in [("k", k), ("alpha", alpha), ("v", v)] {
            assert_eq!(slice.len(), len, "{name} must be [{rows}, {heads}, {dim}]");
        }
        assert!(out.is_empty() || out.len() == len, "out has {} values: must be {len} or none", out.len());
        assert!(
            q.len() == len || q.is_empty() && out.is_empty(),
            "q has {} values: must be {len}, or none if out has none",
            q.len()
        );
        if rows == 0 {
            return;
        }
        let with_out = !out.is_empty();
        let (state, out) = (DisjointMut::new(state), DisjointMut::new(out));
        let blocks = dim.div_ceil(BLOCK);
        let cost = 5 * WIDE * dim * rows;
        self.ranges(heads * blocks, cost, &|items| {
            for item in items {
                let (head, first) = (item / blocks, item % blocks * BLOCK);
                self.isa.run(DeltaRule {
                    state: state.as_ptr(),
                    out: with_out.then(|| out.as_ptr()),
                    heads,
                    dim,
                    rows,
                    head,
                    channels: first..dim.min(first + BLOCK),
                    q,
                    k,
                    alpha,
                    v,
                    beta,
                });
            }
        });
    }
}

/// One head of one row.
struct Decay<'a> {
    g: &'a mut [f32],
    a: f32,
    dt_bias: &'a [f32],
    lower_bound: Option<f32>,
}

impl Kernel for Decay<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let n = self.g.len().min(self.dt_bias.len());
        let (g, dt_bias) = (self.g.as_mut_ptr(), self.dt_bias.as_ptr());
        let mut i = 0;
        while i < n {
            // SAFETY: n − i elements are left from g + i and dt_bias + i; the CPU has the instructions (caller).
            unsafe {
                let a = L::splat(self.a);
                let x = load::<L>(g.add(i), n - i).add(load(dt_bias.add(i), n - i));
                let log_alpha = match self.lower_bound {
                    Some(bound) => L::splat(bound).mul(sigmoid(a.mul(x))),
                    None => L::splat(-self.a).mul(softplus(x)),
                };
                store(exp(log_alpha), g.add(i), n - i);
            }
            i += LANES;
        }
    }
}

/// All rows of one head's block of value channels. The rule never mixes value channels, so blocks are independent.
struct DeltaRule<'a> {
    /// `[heads, dim, dim]`; only `[head, .., channels]` is touched, and nobody else touches that.
    state: *mut f32,
    /// `[rows, heads, dim]`, of which `[.., head, channels]` is written, by nobody else.
    out: Option<*mut f32>,
    heads: usize,
    dim: usize,
    rows: usize,
    head: usize,
    channels: Range<usize>,
    q: &'a [f32],
    k: &'a [f32],
    alpha: &'a [f32],
    v: &'a [f32],
    beta: &'a [f32],
}

impl Kernel for DeltaRule<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let Range { start, end } = self.channels.clone();
        // SAFETY: channels lie inside the head; the CPU has the instructions (caller).
        unsafe {
            if start + BLOCK <= end {
                return match self.out {
                    Some(out) => self.channels::<L, WIDE, true>(start, BLOCK, out),
                    None => self.channels::<L, WIDE, false>(start, BLOCK, std::ptr::null_mut()),
                };
            }
            let mut first = start;
            while first < end {
                match self.out {
                    Some(out) => self.channels::<L, 1, true>(first, end - first, out),
                    None => self.channels::<L, 1, false>(first, end - first, std::ptr::null_mut()),
                }
                first += LANES;
            }
        }
    }
}

impl DeltaRule<'_> {
    /// The rule for `N` vectors of value channels from channel `first`, of which `left` ≥ 16 (N − 1) + 1 are there.
    ///
    /// # Safety
    /// The CPU has the instructions of `L`; the operands have their documented shapes; `out` is valid if `OUT`.
    #[inline(always)]
    unsafe fn channels<L: Lanes, const N: usize, const OUT: bool>(&self, first: usize, left: usize, out: *mut f32) {
        let dim = self.dim;
        // SAFETY: every index below is inside the documented shapes: key < dim, channel < first + left ≤ dim.
        unsafe {
            let state = self.state.add(self.head * dim * dim + first);
            for row in 0..self.rows {
                let at = (row * self.heads + self.head) * dim;
                let (k, alpha) = (self.k.as_ptr().add(at), self.alpha.as_ptr().add(at));
                let beta = L::splat(self.beta[row * self.heads + self.head]);
                let mut r = [L::splat(0.0); N];
                for key in 0..dim {
                    let (decay, k) = (L::splat(*alpha.add(key)), L::splat(*k.add(key)));
                    let s = state.add(key * dim);
                    for n in 0..N {
                        let value = load::<L>(s.add(n * LANES), left - n * LANES).mul(decay);
                        store(value, s.add(n * LANES), left - n * LANES);
                        r[n] = value.fma(k, r[n]);
                    }
                }
                let v = self.v.as_ptr().add(at + first);
                let mut error = [L::splat(0.0); N];
                for n in 0..N {
                    error[n] = load::<L>(v.add(n * LANES), left - n * LANES).sub(r[n]);
                }
                let mut o = [L::splat(0.0); N];
                for key in 0..dim {
                    let step = beta.mul(L::splat(*k.add(key)));
                    let q = if OUT { L::splat(*self.q.as_ptr().add(at + key)) } else { beta };
                    let s = state.add(key * dim);
                    for n in 0..N {
                        let value = step.fma(error[n], load(s.add(n * LANES), left - n * LANES));
                        store(value, s.add(n * LANES), left - n * LANES);
                        if OUT {
                            o[n] = value.fma(q, o[n]);
                        }
                    }
                }
                if OUT {
                    let out = out.add(at + first);
                    for n in 0..N {
                        store(o[n], out.add(n * LANES), left - n * LANES);
                    }
                }
            }
        }
    }
}
