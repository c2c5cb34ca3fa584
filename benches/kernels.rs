//! The kernels on the shapes of the released Kimi K3: `cargo bench --bench kernels [-- isa…]`.
//!
//! Every line gives the median of its repeats and their spread, and for what limits it the share of that limit, measured
//! in the same run: reading memory for one row, multiply-adds from registers for many.

use std::hint::black_box;
use std::time::{Duration, Instant};

use deltafin::interrupt::Interrupt;
use deltafin::kernels::{Compute, Isa, Matrix, Weights};

/// How long each line is measured, at least.
const BUDGET: Duration = Duration::from_millis(400);
/// Weights that one pass touches: far beyond any last-level cache.
const POOL_BYTES: usize = 384 << 20;
/// Shapes [rows, cols] of the trunk's larger bf16 matrices.
const TRUNK: [(usize, usize); 3] = [(12288, 7168), (7168, 12288), (1536, 7168)];
/// The two shapes of an expert's MXFP4 matrices.
const EXPERT: [(usize, usize); 2] = [(3072, 3584), (3584, 3072)];

fn main() {
    let named: Vec<_> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let wanted = |name: &str| named.is_empty() || named.iter().any(|n| n == name);
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let pool = random_bytes(POOL_BYTES);
    for isa in Isa::ALL {
        if !Compute::available().contains(&isa) {
            println!("{isa}: not available on this CPU, skipped\n");
        }
    }
    for isa in Compute::available().into_iter().filter(|isa| wanted(isa.name())) {
        for threads in if cores > 1 { vec![1, cores] } else { vec![1] } {
            let compute = Compute::new(Some(isa), threads, Interrupt::new()).expect("available");
            let mut bench = Bench::new(&compute, &pool);
            bench.dispatch();
            for (rows, cols) in TRUNK {
                bench.matmul("bf16", rows, cols, 1);
            }
            for (rows, cols) in EXPERT {
                bench.matmul("mxfp4", rows, cols, 1);
            }
            if isa != Isa::Scalar {
                for t in [2, 4, 8, 64, 512] {
                    bench.matmul("bf16", TRUNK[2].0, TRUNK[2].1, t);
                    bench.matmul("mxfp4", EXPERT[0].0, EXPERT[0].1, t);
                }
            }
            println!();
        }
    }
}

/// One instruction set and thread count, with its limits.
struct Bench<'a> {
    compute: &'a Compute,
    pool: &'a [u8],
    /// Bytes a second.
    read: f64,
    /// Multiply-adds a second.
    fma: f64,
}

impl<'a> Bench<'a> {
    fn new(compute: &'a Compute, pool: &'a [u8]) -> Self {
        let best = |f: &dyn Fn() -> f64| (0..5).map(|_| f()).fold(0.0, f64::max);
        let (read, fma) = (best(&|| compute.measure_read(pool)), best(&|| compute.measure_fma()));
        println!(
            "{} × {}: memory read {:.1} GB/s, multiply-adds {:.1} GFLOP/s",
            compute.isa_name(),
            compute.threads(),
            read / 1e9,
            2.0 * fma / 1e9
        );
        Self { compute, pool, read, fma }
    }

    /// What it costs to hand out work: called again at once, and after the threads went to sleep.
    fn dispatch(&self) {
        let call = || {
            let start = Instant::now();
            self.compute.parallel(self.compute.threads(), &|i| {
                black_box(i);
            });
            start.elapsed()
        };
        let at_once = median((0..2001).map(|_| call()).collect()).0;
        let asleep = median(
            (0..201)
                .map(|_| {
                    std::thread::sleep(Duration::from_micros(500));
                    call()
                })
                .collect(),
        )
        .0;
        println!(
            "  dispatch: {:.1} µs at once, {:.1} µs after sleep",
            at_once.as_secs_f64() * 1e6,
            asleep.as_secs_f64() * 1e6
        );
    }

    /// One matrix shape × t rows, over fresh weights every time.
    fn matmul(&mut self, format: &str, rows: usize, cols: usize, t: usize) {
        let bytes = if format == "bf16" { rows * cols * 2 } else { rows * cols / 32 * 17 };
        let matrices = self.pool.len() / bytes;
        let x: Vec<_> = (0..t * cols).map(|i| (i % 17) as f32 - 8.0).collect();
        let mut y = vec![0.0; t * rows];
        let mut next = 0;
        let (time, spread) = measure(|| {
            let bytes = &self.pool[next % matrices * bytes..][..bytes];
            next += 1;
            let weights = match format {
                "bf16" => Weights::Bf16(bytes),
                _ => {
                    let (packed, scale) = bytes.split_at(rows * cols / 2);
                    Weights::Mxfp4 { packed, scale }
                }
            };
            self.compute.matmul(Matrix { rows, cols, weights }, &x, &mut y);
            black_box(&y);
        });
        let name = format!("{format} [{rows}, {cols}] × {t}");
        self.line(&name, time, spread, bytes as f64, (rows * cols * t) as f64);
    }

    /// `bytes` read from memory and `fma` multiply-adds done in `time`.
    fn line(&self, name: &str, time: Duration, spread: f64, bytes: f64, fma: f64) {
        let seconds = time.as_secs_f64();
        let (bytes, fma) = (bytes / seconds, fma / seconds);
        println!(
            "  {name:<28} {:>9.1} µs ± {:>2.0} %  {:>6.1} GB/s {:>4.0} %  {:>7.1} GFLOP/s {:>4.0} %",
            seconds * 1e6,
            100.0 * spread,
            bytes / 1e9,
            100.0 * bytes / self.read,
            2.0 * fma / 1e9,
            100.0 * fma / self.fma,
        );
    }
}

/// Repeats `f` for the budget. The median, and half the distance of the quartiles as a share of it.
fn measure(mut f: impl FnMut()) -> (Duration, f64) {
    f();
    let start = Instant::now();
    let mut times = Vec::new();
    while times.len() < 5 || start.elapsed() < BUDGET {
        let start = Instant::now();
        f();
        times.push(start.elapsed());
    }
    median(times)
}

fn median(mut times: Vec<Duration>) -> (Duration, f64) {
    times.sort();
    let at = |part: usize| times[(times.len() - 1) * part / 4];
    let spread = (at(3) - at(1)).as_secs_f64() / 2.0 / at(2).as_secs_f64().max(1e-12);
    (at(2), spread)
}

/// Bytes whose bf16 and E8M0 readings are ordinary numbers: no infinities, no NaNs, no subnormals.
fn random_bytes(n: usize) -> Vec<u8> {
    let mut state = 1u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as u8
    };
    (0..n).map(|_| 0x38 | next() & 0x87).collect()
}
