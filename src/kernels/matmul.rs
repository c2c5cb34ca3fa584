//! Matrix × rows: bf16, f32 and MXFP4 weights, f32 activations, canonical dot products.
//!
//! This file checks shapes and cuts the output into tasks. The kernels are in `dot` (few rows), `panel` (many rows) and
//! `transposed`; all are written over the formats of `format`.

mod bf12;
mod dot;
mod format;
mod int8;
mod pack;
mod panel;
#[cfg(test)]
mod tests;
mod transposed;

use std::ops::Range;
use std::sync::PoisonError;

use self::bf12::Bf12;
use self::dot::Product;
use self::format::{Bf16, F32, Format, GROUP, Mxfp4};
use self::int8::Int8;
use self::pack::{Layout, Pack};
use self::panel::{Panels, ROWS, T_MAX};
use self::transposed::Transposed;
use super::buffer::Buffer;
use super::disjoint::Disjoint;
use super::lanes::{Kernel, LANES, Lanes};
use super::{Compute, Matrix, Weights};

/// `$body` with `$weights` as the matrix's format.
macro_rules! with_format {
    ($matrix:expr, $weights:ident => $body:expr) => {{
        let Matrix { cols, weights, .. } = $matrix;
        match weights {
            Weights::Bf16(bytes) => {
                let $weights = Bf16 { bytes, cols };
                $body
            }
            Weights::F32(bytes) => {
                let $weights = F32 { bytes, cols };
                $body
            }
            Weights::Mxfp4 { packed, scale } => {
                let $weights = Mxfp4 { packed, scale, cols };
                $body
            }
            Weights::Bf12 { records, side } => {
                let $weights = Bf12::new(records, side, cols);
                $body
            }
            Weights::Int8(records) => {
                let $weights = Int8::new(records, cols);
                $body
            }
        }
    }};
}

/// Multiply-adds below which waking the threads costs more than it gains.
const SERIAL_MAX: usize = 1 << 17;
/// Bounds of one task, in multiply-adds: from some ten microseconds to some milliseconds.
const TASK_MIN: usize = 1 << 17;
const TASK_MAX: usize = 1 << 25;
/// Whole tiles of the kernels.
const ROWS_STEP: usize = 4;
/// Tasks a thread, so that a thread that is held up leaves its share to the others.
const TASKS_PER_THREAD: usize = 16;

/// Activation rows from which they are taken in tiles.
const PANEL_MIN: usize = 5;
/// Packed floats at a time, unless a block of rows has more: 8 MiB.
const PACKED_MAX: usize = 2 << 20;
/// Floats that are packed by one thread.
const PACKED_SERIAL_MAX: usize = 1 << 16;

/// One product of rows of a matrix with activation rows, before it is cut into tasks. Fields as of [`Product`].
struct Job<'a> {
    matrix: Matrix<'a>,
    first_row: usize,
    rows: usize,
    x: &'a [f32],
    x_stride: usize,
    t: usize,
    y: Disjoint<'a>,
    y_start: usize,
    y_stride: usize,
}

impl Compute {
    /// y `[T, w.rows]` = x `[T, w.cols]` · Wᵀ. T follows from the lengths.
    ///
    /// Each dot product runs in 16 partial sums by fused multiply-add (lane i takes columns i, i+16, …; columns missing
    /// from the last group count as w = 0, x = 0), then a fixed tree: lanes i and i+8 added, then i and i+4, i+2, i+1.
    ///
    /// # Panics
    /// When lengths disagree, or an MXFP4 matrix has columns that are not a multiple of 32.
    pub fn matmul(&self, w: Matrix<'_>, x: &[f32], y: &mut [f32]) {
        self.run_jobs(&[Job::whole(w, x, y)]);
    }

    /// Several matrices on the same x in one go: `y[i]` `[T, w[i].rows]`. Same bits as one by one.
    ///
    /// # Panics
    /// As [`Compute::matmul`].
    pub fn matmul_each(&self, w: &[Matrix<'_>], x: &[f32], y: &mut [&mut [f32]]) {
        assert_eq!(w.len(), y.len(), "matmul_each: matrices and outputs");
        let jobs: Vec<_> = w.iter().zip(y).map(|(w, y)| Job::whole(*w, x, y)).collect();
        self.run_jobs(&jobs);
    }

    /// For each row t and head h: y `[T, heads, depth]` = W_h x `[T, heads, w.cols]`\[h\], with W_h the rows
    /// `h · head_rows + first_row ..+ depth` of `w`. Dot products as in [`Compute::matmul`]. Expands the attended latent
    /// to values.
    ///
    /// # Panics
    /// As [`Compute::matmul`].
    #[expect(clippy::too_many_arguments, reason = "shapes")]
    pub fn matmul_heads(
        &self,
        w: Matrix<'_>,
        heads: usize,
        head_rows: usize,
        first_row: usize,
        depth: usize,
        x: &[f32],
        y: &mut [f32],
    ) {
        check_heads(w, heads, head_rows, first_row, depth);
        let t = whole_rows(x.len(), heads * w.cols);
        assert_eq!(y.len(), t * heads * depth, "matmul_heads: y of {t} rows, {heads} heads, depth {depth}");
        let y = Disjoint::new(y);
        let jobs: Vec<_> = (0..heads)
            .map(|h| Job {
                matrix: w,
                first_row: h * head_rows + first_row,
                rows: depth,
                x: x.get(h * w.cols..).unwrap_or_default(), // there is none when T is 0
                x_stride: heads * w.cols,
                t,
                y,
                y_start: h * depth,
                y_stride: heads * depth,
            })
            .collect();
        self.run_jobs(&jobs);
    }

    /// For each row t and head h: y `[T, heads, cols]` = Σ_d x `[T, heads, x_stride]`\[d\] · W_h\[d, :\], with W_h the
    /// rows `h · head_rows + first_row ..` of `w` (`[heads · head_rows, cols]`) and d < `depth`. Sum over d ascending by
    /// fused multiply-add from +0.0. Absorbs `kv_b`'s key half into the query.
    ///
    /// # Panics
    /// As [`Compute::matmul`].
    #[expect(clippy::too_many_arguments, reason = "shapes")]
    pub fn matmul_transposed_heads(
        &self,
        w: Matrix<'_>,
        heads: usize,
        head_rows: usize,
        first_row: usize,
        depth: usize,
        x: &[f32],
        x_stride: usize,
        y: &mut [f32],
    ) {
        check_heads(w, heads, head_rows, first_row, depth);
        assert!(depth <= x_stride, "matmul_transposed_heads: depth {depth} of x rows of {x_stride}");
        let t = whole_rows(x.len(), heads * x_stride);
        let cols = w.cols;
        assert_eq!(y.len(), t * heads * cols, "matmul_transposed_heads: y of {t} rows, {heads} heads, {cols} columns");
        let y = Disjoint::new(y);
        // Rows of a task: few enough that one head's work on them stays below the bound.
        let t_block = (TASK_MAX / (depth * w.cols).max(1)).clamp(1, t.max(1));
        let blocks = t.div_ceil(t_block);
        let task = |i: usize| {
            let (h, first) = (i / blocks, i % blocks * t_block);
            with_format!(w, weights => self.isa.run(Transposed {
                weights,
                first_row: h * head_rows + first_row,
                depth,
                cols: w.cols,
                x: &x[(first * heads + h) * x_stride..],
                x_stride: heads * x_stride,
                t: t_block.min(t - first),
                y,
                y_start: (first * heads + h) * w.cols,
                y_stride: heads * w.cols,
            }));
        };
        if t * heads * depth * w.cols <= SERIAL_MAX {
            (0..heads * blocks).for_each(task);
        } else {
            self.parallel(heads * blocks, &task);
        }
    }

    /// Rows of an embedding, widened: out `[ids, cols]`. Ids are below `w.rows`.
    ///
    /// # Panics
    /// When lengths disagree or an id has no row.
    pub fn gather(&self, w: Matrix<'_>, ids: &[u32], out: &mut [f32]) {
        check_weights(w);
        assert_eq!(out.len(), ids.len() * w.cols, "gather: out of {} rows of {}", ids.len(), w.cols);
        let last = ids.iter().max().copied();
        assert!(last.is_none_or(|id| (id as usize) < w.rows), "gather: id {last:?} of {} rows", w.rows);
        for (id, out) in ids.iter().zip(out.chunks_exact_mut(w.cols)) {
            with_format!(w, weights => self.isa.run(Widen { weights, row: *id as usize, out }));
        }
    }

    /// Most bytes that products of `t` activation rows keep for packing them, where the rows that are packed at once have
    /// at most `width` columns in all.
    pub(crate) fn packed_bytes(t: usize, width: usize) -> u64 {
        let width = width.next_multiple_of(LANES);
        let together = (PACKED_MAX / width.max(1)).max(T_MAX).min(t.next_multiple_of(T_MAX));
        (together * width * size_of::<f32>()) as u64
    }

    /// Computes the jobs, all of which have as many activation rows.
    fn run_jobs(&self, jobs: &[Job<'_>]) {
        let t = jobs.first().map_or(0, |job| job.t);
        // Memory from the last call, unless another call has it.
        let mut buffer = std::mem::take(&mut *self.packed.lock().unwrap_or_else(PoisonError::into_inner));
        let width: usize = jobs.iter().map(|job| job.matrix.cols.next_multiple_of(LANES)).sum();
        let together = (PACKED_MAX / width / T_MAX).max(1) * T_MAX;
        let mut first = 0;
        while first < t {
            self.run_packed(jobs, first..t.min(first + together), &mut buffer);
            first += together;
        }
        *self.packed.lock().unwrap_or_else(PoisonError::into_inner) = buffer;
    }

    /// The activation rows `t` of the jobs, packed.
    fn run_packed(&self, jobs: &[Job<'_>], t: Range<usize>, buffer: &mut Buffer) {
        // Few rows stay rows, but on whole cache lines: a load across two of them costs as much as it does for many.
        let few = t.len() < PANEL_MIN;
        let tile_rows = if few { 1 } else { panel::tile_rows(self.isa.isa(), t.len()) };
        // Jobs that share their activations share the packed ones.
        let mut layouts: Vec<(&Job<'_>, Layout, usize)> = Vec::new();
        let mut of_job = Vec::with_capacity(jobs.len());
        let mut floats = 0;
        for job in jobs {
            let same = |(other, ..): &(&Job<'_>, Layout, usize)| std::ptr::eq(other.x, job.x);
            let i = layouts.iter().position(same).unwrap_or_else(|| {
                let layout = Layout::new(t.len(), job.matrix.cols, tile_rows);
                layouts.push((job, layout, floats));
                floats += layout.floats(t.len());
                layouts.len() - 1
            });
            of_job.push(i);
        }
        let x = buffer.floats(floats);
        let packed = Disjoint::new(x);
        let tiles = layouts[0].1.tiles();
        let pack = |i: usize| {
            let ((job, layout, start), tile) = (layouts[i / tiles], i % tiles);
            let at = start + layout.floats(layout.tile(tile).start)..start + layout.floats(layout.tile(tile).end);
            // SAFETY: tiles are disjoint, and each tile of each layout is in one task.
            let to = unsafe { packed.part(at) };
            self.isa.run(Pack { layout, tile, x: &job.x[t.start * job.x_stride..], x_stride: job.x_stride, to });
        };
        if floats <= PACKED_SERIAL_MAX {
            (0..layouts.len() * tiles).for_each(pack);
        } else {
            self.parallel(layouts.len() * tiles, &pack);
        }
        let blocks = tiles.div_ceil(T_MAX / tile_rows);
        let x = &*x;
        self.run_cut(jobs, t.len(), blocks, &|job, rows, block| {
            let (_, layout, start) = layouts[of_job[job]];
            let job = &jobs[job];
            let (first_row, cols) = (job.first_row + rows.start, job.matrix.cols);
            let (y, y_start, y_stride) = (job.y, job.y_start + t.start * job.y_stride + rows.start, job.y_stride);
            let (rows, x) = (rows.len(), &x[start..]);
            with_format!(job.matrix, weights => if few {
                let (x_stride, t) = (layout.floats(1), t.len());
                self.isa.run(Product { weights, first_row, rows, cols, x, x_stride, t, y, y_start, y_stride });
            } else {
                let tiles = (block * tiles / blocks, (block + 1) * tiles / blocks);
                Panels { weights, first_row, rows, cols, x, layout, tiles, y, y_start, y_stride }.run(self.isa);
            });
        });
    }

    /// Cuts the jobs' weight rows into tasks, each for each of `blocks` blocks of activation rows, and runs them over the
    /// threads: `run(job, weight rows, block)`.
    fn run_cut(&self, jobs: &[Job<'_>], t: usize, blocks: usize, run: &(dyn Fn(usize, Range<usize>, usize) + Sync)) {
        let work: usize = jobs.iter().map(|job| job.rows * job.matrix.cols * t).sum();
        let target = (work / (TASKS_PER_THREAD * self.threads())).clamp(TASK_MIN, TASK_MAX);
        let cuts: Vec<_> = jobs
            .iter()
            .map(|job| {
                let rows = target / (job.matrix.cols * t).div_ceil(blocks).max(1);
                let rows = rows.max(1).next_multiple_of(if rows > ROWS { ROWS } else { ROWS_STEP });
                (rows, job.rows.div_ceil(rows))
            })
            .collect();
        let task = |mut i: usize| {
            for (job, (rows, n)) in cuts.iter().enumerate() {
                if i < n * blocks {
                    let row = i / blocks * rows;
                    run(job, row..jobs[job].rows.min(row + rows), i % blocks);
                    return;
                }
                i -= n * blocks;
            }
        };
        let tasks = cuts.iter().map(|(_, n)| n * blocks).sum();
        if work <= SERIAL_MAX {
            (0..tasks).for_each(task);
        } else {
            self.parallel(tasks, &task);
        }
    }
}

impl<'a> Job<'a> {
    /// y `[T, rows]` = x `[T, cols]` · Wᵀ.
    fn whole(w: Matrix<'a>, x: &'a [f32], y: &'a mut [f32]) -> Self {
        check_weights(w);
        let t = whole_rows(x.len(), w.cols);
        assert_eq!(y.len(), t * w.rows, "matmul: y of {t} rows of {}", w.rows);
        let (x_stride, y_stride) = (w.cols, w.rows);
        Self { matrix: w, first_row: 0, rows: w.rows, x, x_stride, t, y: Disjoint::new(y), y_start: 0, y_stride }
    }
}

/// One row of a matrix as f32.
struct Widen<'a, F> {
    weights: F,
    row: usize,
    /// All columns.
    out: &'a mut [f32],
}

impl<F: Format> Kernel for Widen<'_, F> {
    type Output = ();

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) {
        let row = self.weights.row(self.row);
        let mut column = 0;
        while column < self.out.len() {
            let n = (self.out.len() - column).min(LANES);
            let to = self.out[column..column + n].as_mut_ptr();
            // SAFETY: by this method's contract; the row exists and has as many columns as `out`.
            unsafe {
                if n == LANES {
                    F::load::<L>(row, column, F::group::<L>(row, column / GROUP * GROUP)).store(to);
                } else {
                    F::load_part::<L>(row, column, n).store_part(to, n);
                }
            }
            column += n;
        }
    }
}

/// How many rows of `width` make up `len`.
fn whole_rows(len: usize, width: usize) -> usize {
    assert!(width > 0 && len.is_multiple_of(width), "x of {len} elements is no whole number of rows of {width}");
    len / width
}

/// The kernels read weights without further checks, so their lengths must agree here.
fn check_weights(w: Matrix<'_>) {
    let Matrix { rows, cols, weights } = w;
    assert!(rows > 0 && cols > 0, "matrix [{rows}, {cols}] is empty");
    match weights {
        Weights::Bf16(bytes) => assert_eq!(bytes.len(), rows * cols * 2, "bytes of a bf16 matrix [{rows}, {cols}]"),
        Weights::F32(bytes) => assert_eq!(bytes.len(), rows * cols * 4, "bytes of an f32 matrix [{rows}, {cols}]"),
        Weights::Mxfp4 { packed, scale } => {
            assert!(cols.is_multiple_of(GROUP), "MXFP4 matrix [{rows}, {cols}]: columns come in groups of {GROUP}");
            assert_eq!(packed.len(), rows * cols / 2, "code bytes of an MXFP4 matrix [{rows}, {cols}]");
            assert_eq!(scale.len(), rows * cols / GROUP, "scale bytes of an MXFP4 matrix [{rows}, {cols}]");
        }
        Weights::Bf12 { records, .. } => {
            assert!(cols <= super::bf12::COLS_MAX, "bf12 matrix [{rows}, {cols}]: too many columns");
            let bytes = rows * super::bf12::record_bytes(cols);
            assert_eq!(records.len(), bytes, "bytes of a bf12 matrix [{rows}, {cols}]");
        }
        Weights::Int8(records) => {
            let bytes = rows * super::int8::record_bytes(cols);
            assert_eq!(records.len(), bytes, "bytes of an int8 matrix [{rows}, {cols}]");
        }
    }
}

/// As [`check_weights`], for rows taken head by head.
fn check_heads(w: Matrix<'_>, heads: usize, head_rows: usize, first_row: usize, depth: usize) {
    check_weights(w);
    assert_eq!(w.rows, heads * head_rows, "matrix rows for {heads} heads of {head_rows}");
    assert!(first_row + depth <= head_rows, "rows {first_row} ..+ {depth} of a head of {head_rows}");
}
