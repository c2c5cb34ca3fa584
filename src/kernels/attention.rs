//! Latent attention over the cached 576 (rank + rope) values a token.
//!
//! Softmax is taken online over blocks of [`KEYS`] keys by their place in the sequence, so that the order of every sum
//! depends on that place alone, and so that a context of any length needs no room for its scores.

use std::ops::Range;

use super::Compute;
use super::disjoint::DisjointMut;
use super::lanes::{Kernel, LANES, Lanes};
use super::math::exp;
use super::slices::{load, store};

/// Keys of a block. Part of the definition: another number gives other (as good) bits.
const KEYS: usize = 32;
/// Rows of queries that share a block of keys while it is in the cache.
const ROWS: usize = 4;

impl Compute {
    /// Latent attention of T new rows of one sequence. q `[T, heads, width]` with width = rank + rope; `cache`
    /// `[past + T, width]`, row = latent then rope key; row t sees the first `past + t + 1` of it. out `[T, heads, rank]`
    /// = softmax(q · cache · scale) · latents. Softmax and sums run over keys in a fixed order.
    ///
    /// A score is the canonical dot product times scale. Block after block of 32 keys from the first: m' = max(m, the
    /// block's scores), what was summed so far is multiplied by exp(m − m'), then for each key ascending the sum of
    /// weights grows by p = exp(score − m') and each value by fma(p, latent, ·). At the end values are divided by the
    /// sum of weights.
    ///
    /// # Panics
    /// When the lengths do not fit.
    #[expect(clippy::too_many_arguments, reason = "shapes")]
    pub fn latent_attention(
        &self,
        q: &[f32],
        cache: &[f32],
        past: usize,
        heads: usize,
        width: usize,
        rank: usize,
        scale: f32,
        out: &mut [f32],
    ) {
        assert!(heads > 0 && rank > 0 && rank <= width, "expected heads > 0 and 0 < rank {rank} <= width {width}");
        assert!(q.len().is_multiple_of(heads * width), "q has {} values, not rows of [{heads}, {width}]", q.len());
        let rows = q.len() / (heads * width);
        assert_eq!(cache.len(), (past + rows) * width, "cache must be [{past} + {rows}, {width}]");
        assert_eq!(out.len(), rows * heads * rank, "out must be [{rows}, {heads}, {rank}]");
        // As many heads share a block as lanes hold them; fewer where that leaves a thread without work.
        let group = (rows * heads).div_ceil(self.threads()).next_multiple_of(4).min(LANES).min(heads);
        let groups = heads.div_ceil(group);
        let together = if rows.div_ceil(ROWS) * groups >= 2 * self.threads() { ROWS } else { 1 };
        let cost = together * group * (past + rows) * (width + rank).div_ceil(LANES);
        let out = DisjointMut::new(out);
        self.ranges(rows.div_ceil(together) * groups, cost, &|items| {
            for item in items {
                let (row, head) = (item / groups * together, item % groups * group);
                self.isa.run(Attend {
                    q,
                    cache,
                    past,
                    rows: row..rows.min(row + together),
                    heads,
                    head,
                    group: group.min(heads - head),
                    width,
                    rank,
                    scale,
                    out: out.as_ptr(),
                });
            }
        });
    }
}

/// A group of up to 16 heads of up to [`ROWS`] rows; shapes as in [`Compute::latent_attention`].
struct Attend<'a> {
    q: &'a [f32],
    cache: &'a [f32],
    past: usize,
    rows: Range<usize>,
    heads: usize,
    /// First head of the group.
    head: usize,
    /// Heads in the group.
    group: usize,
    width: usize,
    rank: usize,
    scale: f32,
    /// `[T, heads, rank]`, of which `[rows, head .. head + group]` is written, by nobody else.
    out: *mut f32,
}

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: the operands have their documented shapes; the CPU has the instructions (caller).
        unsafe {
            // Tiles of heads × keys and of heads × vectors of values that fit in the registers.
            if L::REGISTERS >= 24 { self.tiled::<L, 4>() } else { self.tiled::<L, 2>() }
        }
    }
}

impl Attend<'_> {
    /// # Safety
    /// The CPU has the instructions of `L`, and the operands have their documented shapes.
    #[inline(always)]
    unsafe fn tiled<L: Lanes, const TILE: usize>(&self) {
        // SAFETY: at most ROWS rows and 16 heads by construction; keys stop at what the last row sees, which is in the
        // cache.
        unsafe {
            // One lane a head, one value a row.
            let mut largest = [L::splat(f32::NEG_INFINITY); ROWS];
            let mut total = [L::splat(0.0); ROWS];
            for row in self.rows.clone() {
                std::ptr::write_bytes(self.values(row), 0, self.group * self.rank);
            }
            let seen_last = self.past + self.rows.end;
            let mut first = 0;
            while first < seen_last {
                for row in self.rows.clone() {
                    let seen = self.past + row + 1;
                    if first >= seen {
                        continue;
                    }
                    let keys = first..seen.min(first + KEYS);
                    let i = row - self.rows.start;
                    let mut weights = [[0.0; LANES]; KEYS];
                    self.scores::<L, TILE>(row, keys.clone(), &mut weights);

                    let mut new = largest[i];
                    for scores in &weights[..keys.len()] {
                        new = new.max(L::load(scores.as_ptr()));
                    }
                    let shrink = exp(largest[i].sub(new));
                    largest[i] = new;
                    total[i] = total[i].mul(shrink);
                    for scores in &mut weights[..keys.len()] {
                        let p = exp(L::load(scores.as_ptr()).sub(new));
                        total[i] = total[i].add(p);
                        p.store(scores.as_mut_ptr());
                    }
                    let mut factors = [0.0; LANES];
                    shrink.store(factors.as_mut_ptr());
                    if first > 0 {
                        self.scale_values::<L>(row, factors, false);
                    }
                    self.accumulate::<L, TILE>(row, keys, &weights);
                }
                first += KEYS;
            }
            for row in self.rows.clone() {
                let mut totals = [0.0; LANES];
                total[row - self.rows.start].store(totals.as_mut_ptr());
                self.scale_values::<L>(row, totals, true);
            }
        }
    }

    /// The group's `[group, rank]` of out at `row`.
    ///
    /// # Safety
    /// `row` is one of `rows`.
    #[inline(always)]
    unsafe fn values(&self, row: usize) -> *mut f32 {
        // SAFETY: inside out's shape.
        unsafe { self.out.add((row * self.heads + self.head) * self.rank) }
    }

    /// Scores of the group's heads with the keys of one block: `weights[key][head]`.
    ///
    /// # Safety
    /// As for [`Self::tiled`]; `keys` lie in the cache, 1 to [`KEYS`] of them.
    #[inline(always)]
    unsafe fn scores<L: Lanes, const TILE: usize>(
        &self,
        row: usize,
        keys: Range<usize>,
        weights: &mut [[f32; LANES]; KEYS],
    ) {
        let count = keys.len();
        // SAFETY: heads and keys past the last repeat the last, so all pointers are inside q and the cache.
        unsafe {
            let q = self.q.as_ptr().add((row * self.heads + self.head) * self.width);
            let k = self.cache.as_ptr().add(keys.start * self.width);
            let mut key = 0;
            while key < count {
                let mut ks = [k; TILE];
                for j in 0..TILE {
                    ks[j] = k.add((key + j).min(count - 1) * self.width);
                }
                let mut head = 0;
                while head < self.group {
                    let mut qs = [q; TILE];
                    for j in 0..TILE {
                        qs[j] = q.add((head + j).min(self.group - 1) * self.width);
                    }
                    let dots = dot_tile::<L, TILE>(qs, ks, self.width);
                    for i in 0..TILE.min(self.group - head) {
                        for j in 0..TILE.min(count - key) {
                            weights[key + j][head + i] = dots[i][j] * self.scale;
                        }
                    }
                    head += TILE;
                }
                key += TILE;
            }
        }
    }

    /// Adds the block's keys, ascending, to the values of the group's heads.
    ///
    /// # Safety
    /// As for [`Self::scores`].
    #[inline(always)]
    unsafe fn accumulate<L: Lanes, const TILE: usize>(
        &self,
        row: usize,
        keys: Range<usize>,
        weights: &[[f32; LANES]; KEYS],
    ) {
        // SAFETY: columns stay below rank ≤ width, heads in the group, keys in the cache.
        unsafe {
            let latents = self.cache.as_ptr().add(keys.start * self.width);
            let out = self.values(row);
            let mut column = 0;
            while column < self.rank {
                let wide = column + TILE * LANES <= self.rank;
                let mut head = 0;
                while head < self.group {
                    // Heads past the last repeat the last: read before and written after, they change nothing.
                    let mut lanes = [0; TILE];
                    for i in 0..TILE {
                        lanes[i] = (head + i).min(self.group - 1);
                    }
                    let (latents, out, left) = (latents.add(column), out.add(column), self.rank - column);
                    if wide {
                        self.value_tile::<L, TILE, TILE>(latents, weights, keys.len(), lanes, out, left);
                    } else {
                        self.value_tile::<L, TILE, 1>(latents, weights, keys.len(), lanes, out, left);
                    }
                    head += TILE;
                }
                column += if wide { TILE * LANES } else { LANES };
            }
        }
    }

    /// `H` heads × `N` vectors of values, held in registers over the block's keys.
    ///
    /// # Safety
    /// As for [`Self::scores`]; `left` values are there from `latents` and `out`, more than 16 (N − 1).
    #[inline(always)]
    unsafe fn value_tile<L: Lanes, const H: usize, const N: usize>(
        &self,
        latents: *const f32,
        weights: &[[f32; LANES]; KEYS],
        keys: usize,
        heads: [usize; H],
        out: *mut f32,
        left: usize,
    ) {
        // SAFETY: by this function's contract.
        unsafe {
            let mut sums = [[L::splat(0.0); N]; H];
            for h in 0..H {
                for n in 0..N {
                    sums[h][n] = load(out.add(heads[h] * self.rank + n * LANES), left - n * LANES);
                }
            }
            for key in 0..keys {
                let mut latent = [L::splat(0.0); N];
                for n in 0..N {
                    latent[n] = load(latents.add(key * self.width + n * LANES), left - n * LANES);
                }
                for h in 0..H {
                    let p = L::splat(*weights.get_unchecked(key).get_unchecked(heads[h]));
                    for n in 0..N {
                        sums[h][n] = p.fma(latent[n], sums[h][n]);
                    }
                }
            }
            for h in 0..H {
                for n in 0..N {
                    store(sums[h][n], out.add(heads[h] * self.rank + n * LANES), left - n * LANES);
                }
            }
        }
    }

    /// Multiplies each head's values by its factor, or divides them by it. A factor of 1 changes no bit and is skipped.
    ///
    /// # Safety
    /// As for [`Self::tiled`].
    #[inline(always)]
    unsafe fn scale_values<L: Lanes>(&self, row: usize, factors: [f32; LANES], divide: bool) {
        for head in 0..self.group {
            if factors[head] == 1.0 {
                continue;
            }
            // SAFETY: the head is in the group, columns stay below rank.
            unsafe {
                let out = self.values(row).add(head * self.rank);
                let factor = L::splat(factors[head]);
                let mut i = 0;
                while i < self.rank {
                    let value = load::<L>(out.add(i), self.rank - i);
                    let value = if divide { value.div(factor) } else { value.mul(factor) };
                    store(value, out.add(i), self.rank - i);
                    i += LANES;
                }
            }
        }
    }
}

/// Canonical dot products of every q with every k.
///
/// # Safety
/// The CPU has the instructions of `L`; `width` floats are readable at every pointer.
#[inline(always)]
unsafe fn dot_tile<L: Lanes, const TILE: usize>(
    q: [*const f32; TILE],
    k: [*const f32; TILE],
    width: usize,
) -> [[f32; TILE]; TILE] {
    // SAFETY: i < width, and the loads end at width at the latest.
    unsafe {
        let mut sums = [[L::splat(0.0); TILE]; TILE];
        let mut i = 0;
        while i < width {
            let left = width - i;
            let mut ks = [L::splat(0.0); TILE];
            for j in 0..TILE {
                ks[j] = load(k[j].add(i), left);
            }
            for h in 0..TILE {
                let x = load::<L>(q[h].add(i), left);
                for j in 0..TILE {
                    sums[h][j] = x.fma(ks[j], sums[h][j]);
                }
            }
            i += LANES;
        }
        let mut dots = [[0.0; TILE]; TILE];
        for h in 0..TILE {
            for j in 0..TILE {
                dots[h][j] = sums[h][j].sum();
            }
        }
        dots
    }
}
