//! Latent attention over the cached 576 (rank + rope) values a token.
//!
//! Softmax is taken online over blocks of [`KEYS`] keys by their place in the sequence, so that the order of every sum
//! depends on that place alone, and so that a context of any length needs no room for its scores. Several blocks are
//! taken at a time, while their keys are in the cache, for many queries.
#![expect(clippy::needless_range_loop, reason = "indices below constants unroll into registers")]

use std::ops::Range;

use super::Compute;
use super::buffer::with_scratch;
use super::disjoint::Disjoint;
use super::lanes::{Kernel, LANES, Lanes, prefetch};
use super::math::exp;
use super::slices::{load, store};

/// Keys of a block. Part of the definition: another number gives other (as good) bits.
const KEYS: usize = 32;
/// Blocks that are taken at a time: 64 columns of them fit in the first-level cache, all of them in the second.
const BLOCKS: usize = 3;
const KEYS_TOGETHER: usize = BLOCKS * KEYS;
/// Rows whose queries share the keys while those are in the cache.
const ROWS: usize = 4;
/// Queries that do: heads × rows.
const QUERIES: usize = 96;
/// Queries of a tile, between which their lanes alternate.
const TILE: usize = 4;

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
        if rows == 0 {
            return;
        }
        // Some rows of some heads where there are rows enough for all threads, else one row of as many heads as leave
        // each thread some: every item reads all keys.
        let enough = rows.div_ceil(ROWS) * heads.div_ceil(QUERIES / ROWS) >= 2 * self.threads();
        let (together, group) = if enough {
            (ROWS, QUERIES / ROWS)
        } else {
            (1, (rows * heads).div_ceil(self.threads()).next_multiple_of(TILE).min(QUERIES))
        };
        let group = group.min(heads);
        let groups = heads.div_ceil(group);
        let cost = together * group * (past + rows) * (width + rank).div_ceil(LANES);
        let out = Disjoint::new(out);
        self.ranges(rows.div_ceil(together) * groups, cost, &|range| {
            for item in range {
                let (row, head) = (item / groups * together, item % groups * group);
                let mut attend = Attend {
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
                    queries: std::ptr::null_mut(),
                    weights: std::ptr::null_mut(),
                    states: std::ptr::null_mut(),
                };
                let [queries, weights, states] = attend.scratch_floats();
                with_scratch(queries + weights + states, |scratch| {
                    let (queries, rest) = scratch.split_at_mut(queries);
                    let (weights, states) = rest.split_at_mut(weights);
                    attend.queries = queries.as_mut_ptr();
                    attend.weights = weights.as_mut_ptr();
                    attend.states = states.as_mut_ptr();
                    self.isa.run(attend);
                });
            }
        });
    }
}

/// A group of heads of up to [`ROWS`] rows, [`QUERIES`] queries in all; shapes as in [`Compute::latent_attention`].
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
    /// `[rows, group / TILE, width / 16, TILE]` × 16 lanes, rounded up, zero where there is no query or value.
    queries: *mut f32,
    /// `[rows, group / 16, KEYS_TOGETHER]` × 16 heads: scores, then weights.
    weights: *mut f32,
    /// `[rows, group / 16, 2 + BLOCKS]` × 16 heads: the largest score, the sum of weights, and of each block what sums
    /// before it are multiplied by.
    states: *mut f32,
}

/// Places in a state.
const LARGEST: usize = 0;
const TOTAL: usize = 1;
const SHRINK: usize = 2;
const STATE: usize = SHRINK + BLOCKS;

impl Kernel for Attend<'_> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        // SAFETY: the operands have their documented shapes; the CPU has the instructions (caller).
        unsafe {
            // Tiles of queries × keys and of heads × vectors of values that fit in the registers.
            if L::REGISTERS >= 24 { self.tiled::<L, 6, 4>() } else { self.tiled::<L, 1, 1>() }
        }
    }
}

impl Attend<'_> {
    /// Floats of `queries`, `weights` and `states`.
    fn scratch_floats(&self) -> [usize; 3] {
        let (rows, lanes) = (self.rows.len(), self.group.div_ceil(LANES));
        [rows * self.row_floats(), rows * lanes * KEYS_TOGETHER * LANES, rows * lanes * STATE * LANES]
    }

    /// Floats of a row's `queries`.
    fn row_floats(&self) -> usize {
        self.group.next_multiple_of(TILE) * self.width.next_multiple_of(LANES)
    }

    /// Keys that `row` sees.
    fn seen(&self, row: usize) -> usize {
        self.past + row + 1
    }

    /// # Safety
    /// The CPU has the instructions of `L`, and the operands have their documented shapes.
    #[inline(always)]
    unsafe fn tiled<L: Lanes, const K: usize, const N: usize>(&self) {
        // SAFETY: keys stop at what the last row sees, which is in the cache.
        unsafe {
            self.pack::<L>();
            for row in self.rows.clone() {
                std::ptr::write_bytes(self.values(row), 0, self.group * self.rank);
            }
            let seen_last = self.seen(self.rows.end - 1);
            let mut first = 0;
            while first < seen_last {
                let keys = first..seen_last.min(first + KEYS_TOGETHER);
                self.scores::<L, K>(keys.clone());
                for row in self.rows.clone() {
                    let seen = keys.start..keys.end.min(self.seen(row));
                    if !seen.is_empty() {
                        self.softmax::<L>(row, seen);
                    }
                }
                self.accumulate::<L, N>(keys);
                first += KEYS_TOGETHER;
            }
            for row in self.rows.clone() {
                self.divide::<L>(row);
            }
        }
    }

    /// Copies the queries and starts the states.
    ///
    /// # Safety
    /// As for [`Self::tiled`].
    #[inline(always)]
    unsafe fn pack<L: Lanes>(&self) {
        // SAFETY: heads stop at the group's last, and the places written are those of `scratch_floats`.
        unsafe {
            let [_, weights, _] = self.scratch_floats();
            // Heads that the last sixteen lack are scores of zero throughout.
            std::ptr::write_bytes(self.weights, 0, weights);
            for row in self.rows.clone() {
                let mut to = self.queries.add((row - self.rows.start) * self.row_floats());
                for tile in (0..self.group).step_by(TILE) {
                    let mut i = 0;
                    while i < self.width {
                        for head in tile..tile + TILE {
                            let value = if head < self.group {
                                let from = (row * self.heads + self.head + head) * self.width + i;
                                load::<L>(self.q.as_ptr().add(from), self.width - i)
                            } else {
                                L::splat(0.0)
                            };
                            value.store(to);
                            to = to.add(LANES);
                        }
                        i += LANES;
                    }
                }
                for lanes in (0..self.group).step_by(LANES) {
                    let state = self.state(row, lanes);
                    L::splat(f32::NEG_INFINITY).store(state.add(LARGEST * LANES));
                    L::splat(0.0).store(state.add(TOTAL * LANES));
                }
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

    /// Weights of the sixteen heads that `head` belongs to, at `row`: `[KEYS_TOGETHER, 16]`.
    ///
    /// # Safety
    /// `row` is one of `rows`, `head` in the group.
    #[inline(always)]
    unsafe fn weights(&self, row: usize, head: usize) -> *mut f32 {
        let lanes = (row - self.rows.start) * self.group.div_ceil(LANES) + head / LANES;
        // SAFETY: inside the shape.
        unsafe { self.weights.add(lanes * KEYS_TOGETHER * LANES) }
    }

    /// The state of the sixteen heads that `head` belongs to, at `row`.
    ///
    /// # Safety
    /// `row` is one of `rows`, `head` in the group.
    #[inline(always)]
    unsafe fn state(&self, row: usize, head: usize) -> *mut f32 {
        let lanes = (row - self.rows.start) * self.group.div_ceil(LANES) + head / LANES;
        // SAFETY: inside the shape.
        unsafe { self.states.add(lanes * STATE * LANES) }
    }

    /// Dot products of all queries with the keys, K keys at a time: a row's with those that it sees, and perhaps with
    /// some that follow.
    ///
    /// # Safety
    /// As for [`Self::tiled`]; `keys` lie in the cache, 1 to [`KEYS_TOGETHER`] of them.
    #[inline(always)]
    unsafe fn scores<L: Lanes, const K: usize>(&self, keys: Range<usize>) {
        let mut key = keys.start;
        while key + K <= keys.end {
            // SAFETY: by this function's contract.
            unsafe { self.scores_of::<L, K>(keys.start, key) };
            key += K;
        }
        while key < keys.end {
            // SAFETY: by this function's contract.
            unsafe { self.scores_of::<L, 1>(keys.start, key) };
            key += 1;
        }
    }

    /// Dot products of all queries with K keys from `key`. `first` is the first of the keys at work.
    ///
    /// # Safety
    /// As for [`Self::scores`].
    #[inline(always)]
    unsafe fn scores_of<L: Lanes, const K: usize>(&self, first: usize, key: usize) {
        let steps = self.width.div_ceil(LANES);
        // The keys that follow are brought near meanwhile, an equal share with every tile: one row at a long context
        // would otherwise wait for memory.
        let tiles = self.rows.len() * self.group.div_ceil(TILE);
        let ahead = self.cache.as_ptr().wrapping_add((key + K) * self.width).cast::<u8>();
        let share = K * self.width * size_of::<f32>() / (tiles * steps);
        let mut line = 0;
        // SAFETY: keys lie in the cache, and tiles of queries are whole; a tile's scores lie in the sixteen heads' weights.
        unsafe {
            let k = self.cache.as_ptr().add(key * self.width);
            for row in self.rows.clone() {
                if self.seen(row) <= key {
                    continue;
                }
                let mut q = self.queries.add((row - self.rows.start) * self.row_floats()).cast_const();
                for head in (0..self.group).step_by(TILE) {
                    let mut sums = [[L::splat(0.0); TILE]; K];
                    for step in 0..self.width / LANES {
                        prefetch(ahead.wrapping_add(line));
                        line += share;
                        sums = self.meet::<L, K>(q, k, step, LANES, sums);
                        q = q.add(TILE * LANES);
                    }
                    if steps > self.width / LANES {
                        sums = self.meet::<L, K>(q, k, steps - 1, self.width % LANES, sums);
                        q = q.add(TILE * LANES);
                    }
                    let to = self.weights(row, head).add((key - first) * LANES + head % LANES);
                    for j in 0..K {
                        to.add(j * LANES).cast::<[f32; TILE]>().write_unaligned(L::sum_each(sums[j]));
                    }
                }
            }
        }
    }

    /// Sixteen columns (`n` of them, where `n` < 16) of a tile of queries × K keys.
    ///
    /// # Safety
    /// As for [`Self::scores`]; the columns exist.
    #[inline(always)]
    unsafe fn meet<L: Lanes, const K: usize>(
        &self,
        q: *const f32,
        k: *const f32,
        step: usize,
        n: usize,
        mut sums: [[L; TILE]; K],
    ) -> [[L; TILE]; K] {
        // SAFETY: by this function's contract.
        unsafe {
            let mut tile = [L::splat(0.0); TILE];
            for i in 0..TILE {
                tile[i] = L::load(q.add(i * LANES));
            }
            for j in 0..K {
                let key = load::<L>(k.add(j * self.width + step * LANES), n);
                for i in 0..TILE {
                    sums[j][i] = tile[i].fma(key, sums[j][i]);
                }
            }
        }
        sums
    }

    /// Turns the scores of `row` into weights, block by block. `keys` are those at work that it sees, at least one.
    ///
    /// # Safety
    /// As for [`Self::scores`].
    #[inline(always)]
    unsafe fn softmax<L: Lanes>(&self, row: usize, keys: Range<usize>) {
        // SAFETY: places in weights and state are inside their shapes.
        unsafe {
            for head in (0..self.group).step_by(LANES) {
                let (weights, state) = (self.weights(row, head), self.state(row, head));
                let mut largest = L::load(state.add(LARGEST * LANES));
                let mut total = L::load(state.add(TOTAL * LANES));
                for (block, first) in (0..keys.len()).step_by(KEYS).enumerate() {
                    let block_keys = first..keys.len().min(first + KEYS);
                    let mut new = largest;
                    for key in block_keys.clone() {
                        let score = weights.add(key * LANES);
                        let scaled = L::load(score).mul(L::splat(self.scale));
                        scaled.store(score);
                        new = new.max(scaled);
                    }
                    let shrink = exp(largest.sub(new));
                    shrink.store(state.add((SHRINK + block) * LANES));
                    largest = new;
                    total = total.mul(shrink);
                    for key in block_keys {
                        let weight = weights.add(key * LANES);
                        let p = exp(L::load(weight).sub(new));
                        total = total.add(p);
                        p.store(weight);
                    }
                }
                largest.store(state.add(LARGEST * LANES));
                total.store(state.add(TOTAL * LANES));
            }
        }
    }

    /// Adds the keys, ascending, to the values of all heads.
    ///
    /// # Safety
    /// As for [`Self::scores`].
    #[inline(always)]
    unsafe fn accumulate<L: Lanes, const N: usize>(&self, keys: Range<usize>) {
        let mut column = 0;
        while column < self.rank {
            let wide = column + N * LANES <= self.rank;
            for row in self.rows.clone() {
                let seen = keys.start..keys.end.min(self.seen(row));
                if seen.is_empty() {
                    continue;
                }
                let mut head = 0;
                while head < self.group {
                    let tile = head + TILE <= self.group;
                    // SAFETY: columns stay below rank ≤ width, heads in the group, keys in the cache.
                    unsafe {
                        match (tile, wide) {
                            (true, true) => self.value_tile::<L, TILE, N>(row, seen.clone(), head, column),
                            (true, false) => self.value_tile::<L, TILE, 1>(row, seen.clone(), head, column),
                            (false, true) => self.value_tile::<L, 1, N>(row, seen.clone(), head, column),
                            (false, false) => self.value_tile::<L, 1, 1>(row, seen.clone(), head, column),
                        }
                    }
                    head += if tile { TILE } else { 1 };
                }
            }
            column += if wide { N * LANES } else { LANES };
        }
    }

    /// `H` heads from `head` × `N` vectors of values from `column`, held in registers over the keys.
    ///
    /// # Safety
    /// As for [`Self::scores`]; the heads are in the group and among the same sixteen, and the values exist, but for the
    /// last vector, which may be short.
    #[inline(always)]
    unsafe fn value_tile<L: Lanes, const H: usize, const N: usize>(
        &self,
        row: usize,
        keys: Range<usize>,
        head: usize,
        column: usize,
    ) {
        let left = if N > 1 { N * LANES } else { self.rank - column };
        // SAFETY: by this function's contract.
        unsafe {
            let mut latents = self.cache.as_ptr().add(keys.start * self.width + column);
            let mut weights = self.weights(row, head).add(head % LANES).cast_const();
            let shrink = self.state(row, head).add(SHRINK * LANES + head % LANES);
            let out = self.values(row).add(head * self.rank + column);
            let mut sums = [[L::splat(0.0); N]; H];
            for h in 0..H {
                for n in 0..N {
                    sums[h][n] = load(out.add(h * self.rank + n * LANES), left - n * LANES);
                }
            }
            for (block, first) in (0..keys.len()).step_by(KEYS).enumerate() {
                // Before the first block there is nothing to multiply.
                if keys.start + first > 0 {
                    for h in 0..H {
                        let factor = L::splat(*shrink.add(block * LANES + h));
                        for n in 0..N {
                            sums[h][n] = sums[h][n].mul(factor);
                        }
                    }
                }
                for _ in first..keys.len().min(first + KEYS) {
                    let mut latent = [L::splat(0.0); N];
                    for n in 0..N {
                        latent[n] = load(latents.add(n * LANES), left - n * LANES);
                    }
                    for h in 0..H {
                        let p = L::splat(*weights.add(h));
                        for n in 0..N {
                            sums[h][n] = p.fma(latent[n], sums[h][n]);
                        }
                    }
                    latents = latents.add(self.width);
                    weights = weights.add(LANES);
                }
            }
            for h in 0..H {
                for n in 0..N {
                    store(sums[h][n], out.add(h * self.rank + n * LANES), left - n * LANES);
                }
            }
        }
    }

    /// Divides each head's values by its sum of weights.
    ///
    /// # Safety
    /// As for [`Self::tiled`].
    #[inline(always)]
    unsafe fn divide<L: Lanes>(&self, row: usize) {
        for head in 0..self.group {
            // SAFETY: the head is in the group, columns stay below rank.
            unsafe {
                let out = self.values(row).add(head * self.rank);
                let total = L::splat(*self.state(row, head).add(TOTAL * LANES + head % LANES));
                let mut i = 0;
                while i < self.rank {
                    store(load::<L>(out.add(i), self.rank - i).div(total), out.add(i), self.rank - i);
                    i += LANES;
                }
            }
        }
    }
}
