//! Kimi Delta Attention: decay and the gated delta rule.
#![expect(clippy::needless_range_loop, reason = "indices below constants unroll into registers")]

use super::Compute;
use super::buffer::with_scratch;
use super::disjoint::Disjoint;
use super::lanes::{Kernel, LANES, Lanes};
use super::math::{exp, sigmoid, softplus};
use super::slices::{load, store};

/// Vectors of value channels that a pass over the keys takes together.
const WIDE: usize = 4;
/// Value channels of a task: with 128 keys their state is 32 KiB, which the first-level cache holds over the rows.
const BLOCK: usize = WIDE * LANES;
/// From so many rows on, a block is copied out and back: where it lies, its keys are a power of two apart, so that they
/// compete for half the cache's sets, or a quarter.
const PACK_ROWS: usize = 32;

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
        let g = Disjoint::new(g);
        self.ranges(len / dim, 50 * dim.div_ceil(LANES), &|items| {
            for item in items {
                // SAFETY: an item is one head of one row; each is in one task.
                let g = unsafe { g.part(item * dim..(item + 1) * dim) };
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
        let (state, out) = (Disjoint::new(state), Disjoint::new(out));
        let blocks = dim.div_ceil(BLOCK);
        let cost = 5 * WIDE * dim * rows;
        self.ranges(heads * blocks, cost, &|items| {
            let room = if rows < PACK_ROWS { 0 } else { dim * BLOCK.min(dim) };
            with_scratch(dim.next_multiple_of(LANES) + room, |scratch| {
                let (steps, packed) = scratch.split_at_mut(dim.next_multiple_of(LANES));
                for item in items {
                    let (head, first) = (item / blocks, item % blocks * BLOCK);
                    let count = BLOCK.min(dim - first);
                    // SAFETY: an item is one head's block of channels, which lies inside the state, and is in one task.
                    let block = unsafe { state.as_ptr().add(head * dim * dim + first) };
                    let steps = steps.as_mut_ptr();
                    let rule = |state: *mut f32, stride| {
                        let out = with_out.then(|| out.as_ptr());
                        let operands = Operands { q, k, alpha, v, beta };
                        let place = Place { heads, dim, rows, head, first, count };
                        self.isa.run(DeltaRule { state, stride, steps, out, place, operands });
                    };
                    if packed.is_empty() {
                        rule(block, dim);
                        continue;
                    }
                    // SAFETY: keys < dim of the block's `count` channels: inside the state's block, which is this task's
                    // alone, and inside `packed`, which has room for dim · min(64, dim).
                    unsafe {
                        for key in 0..dim {
                            block.add(key * dim).copy_to_nonoverlapping(packed.as_mut_ptr().add(key * count), count);
                        }
                        rule(packed.as_mut_ptr(), count);
                        for key in 0..dim {
                            block.add(key * dim).copy_from_nonoverlapping(packed.as_ptr().add(key * count), count);
                        }
                    }
                }
            });
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

/// What [`Compute::kda_rows`] reads, whole.
#[derive(Clone, Copy)]
struct Operands<'a> {
    q: &'a [f32],
    k: &'a [f32],
    alpha: &'a [f32],
    v: &'a [f32],
    beta: &'a [f32],
}

/// A head's block of value channels.
#[derive(Clone, Copy)]
struct Place {
    heads: usize,
    dim: usize,
    rows: usize,
    head: usize,
    /// First channel of the block.
    first: usize,
    /// Channels in the block.
    count: usize,
}

/// All rows of one head's block of value channels. The rule never mixes value channels, so blocks are independent.
struct DeltaRule<'a> {
    /// `count` channels of each of `dim` keys, nobody else's at this time.
    state: *mut f32,
    /// From a key's channels to the next key's.
    stride: usize,
    /// Room for β k of a row: `dim` values in whole vectors.
    steps: *mut f32,
    /// `[rows, heads, dim]`, of which the block is written, by nobody else.
    out: Option<*mut f32>,
    place: Place,
    operands: Operands<'a>,
}

impl Kernel for DeltaRule<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: the block has `count` channels, of which `channel` is one; the CPU has the instructions (caller).
        unsafe {
            if self.place.count == BLOCK {
                return match self.out {
                    Some(out) => self.channels::<L, WIDE, true>(0, out),
                    None => self.channels::<L, WIDE, false>(0, std::ptr::null_mut()),
                };
            }
            let mut channel = 0;
            while channel < self.place.count {
                match self.out {
                    Some(out) => self.channels::<L, 1, true>(channel, out),
                    None => self.channels::<L, 1, false>(channel, std::ptr::null_mut()),
                }
                channel += LANES;
            }
        }
    }
}

impl DeltaRule<'_> {
    /// The rule for `N` vectors of value channels from `channel` of the block; all but the last are whole.
    ///
    /// The state is passed over once a row: what one row adds, and the decay and prediction of the next, meet in the
    /// registers. Between rows the state that lies in memory is the decayed one.
    ///
    /// # Safety
    /// The CPU has the instructions of `L`; the operands have their documented shapes; `out` is valid if `OUT`.
    #[inline(always)]
    unsafe fn channels<L: Lanes, const N: usize, const OUT: bool>(&self, channel: usize, out: *mut f32) {
        let Place { heads, dim, rows, head, first, count } = self.place;
        let left = count - channel;
        let Operands { k, v, beta, .. } = self.operands;
        // SAFETY: every index below is inside the documented shapes: channels < first + count ≤ dim.
        unsafe {
            let zero = [L::splat(0.0); N];
            let (mut r, _) = if rows > 1 {
                self.pass::<L, N, DECAY, OUT>(channel, 0, zero)
            } else {
                self.pass::<L, N, DECAY_ONLY, OUT>(channel, 0, zero)
            };
            for row in 0..rows {
                let at = (row * heads + head) * dim;
                let v = v.as_ptr().add(at + first + channel);
                let mut error = [L::splat(0.0); N];
                for n in 0..N {
                    error[n] = load::<L>(v.add(n * LANES), left - n * LANES).sub(r[n]);
                }
                let beta = L::splat(*beta.as_ptr().add(row * heads + head));
                let mut key = 0;
                while key < dim {
                    beta.mul(load(k.as_ptr().add(at + key), dim - key)).store(self.steps.add(key));
                    key += LANES;
                }
                let o;
                (r, o) = if row + 1 < rows {
                    self.pass::<L, N, ADD_AND_DECAY, OUT>(channel, row, error)
                } else if rows > 1 {
                    self.pass::<L, N, ADD, OUT>(channel, row, error)
                } else {
                    self.pass::<L, N, DECAY_AND_ADD, OUT>(channel, row, error)
                };
                if OUT {
                    let out = out.add(at + first + channel);
                    for n in 0..N {
                        store(o[n], out.add(n * LANES), left - n * LANES);
                    }
                }
            }
        }
    }

    /// Once over the keys: the update of `row` by its error and its output, or the decay and prediction of a row, or
    /// both, as `WORK` says. Returns prediction and output.
    ///
    /// # Safety
    /// As for [`Self::channels`]; where there is an update, `steps` hold those of `row`.
    #[inline(always)]
    unsafe fn pass<L: Lanes, const N: usize, const WORK: u8, const OUT: bool>(
        &self,
        channel: usize,
        row: usize,
        error: [L; N],
    ) -> ([L; N], [L; N]) {
        let Place { heads, dim, head, count, .. } = self.place;
        let left = count - channel;
        let Operands { q, k, alpha, .. } = self.operands;
        let at = (row * heads + head) * dim;
        let next = if WORK == ADD_AND_DECAY { at + heads * dim } else { at };
        // SAFETY: every index below is inside the documented shapes: key < dim, and a next row is there where it is
        // wanted.
        unsafe {
            let (mut r, mut o) = ([L::splat(0.0); N], [L::splat(0.0); N]);
            let mut s = self.state.add(channel);
            for key in 0..dim {
                let mut values = [L::splat(0.0); N];
                for n in 0..N {
                    values[n] = load::<L>(s.add(n * LANES), left - n * LANES);
                }
                if WORK == DECAY_AND_ADD {
                    let decay = L::splat(*alpha.as_ptr().add(at + key));
                    for n in 0..N {
                        values[n] = values[n].mul(decay);
                    }
                }
                if matches!(WORK, ADD | ADD_AND_DECAY | DECAY_AND_ADD) {
                    let step = L::splat(*self.steps.add(key));
                    for n in 0..N {
                        values[n] = step.fma(error[n], values[n]);
                    }
                    if OUT {
                        let q = L::splat(*q.as_ptr().add(at + key));
                        for n in 0..N {
                            o[n] = values[n].fma(q, o[n]);
                        }
                    }
                }
                if matches!(WORK, DECAY | DECAY_ONLY | ADD_AND_DECAY) {
                    let (decay, k) = (L::splat(*alpha.as_ptr().add(next + key)), L::splat(*k.as_ptr().add(next + key)));
                    for n in 0..N {
                        values[n] = values[n].mul(decay);
                        r[n] = values[n].fma(k, r[n]);
                    }
                }
                if WORK != DECAY_ONLY {
                    for n in 0..N {
                        store(values[n], s.add(n * LANES), left - n * LANES);
                    }
                }
                s = s.add(self.stride);
            }
            (r, o)
        }
    }
}

/// What a pass over the keys does. A row alone decays twice rather than store what it will change at once.
const DECAY: u8 = 0;
const DECAY_ONLY: u8 = 1;
const ADD_AND_DECAY: u8 = 2;
const ADD: u8 = 3;
const DECAY_AND_ADD: u8 = 4;
