//! Matrix products on the shapes of the released Kimi K3: `cargo bench --bench kernels [-- --quick] [isa…] [name…]`.
//!
//! Every line gives the best and the median time, and the best one's share of what the machine can do at best: reading
//! memory for one row, multiply-adds from registers for many. Both are measured in turns with the kernel.

mod measure;

use std::hint::black_box;
use std::time::{Duration, Instant};

use deltafin::kernels::{Matrix, Weights};

use self::measure::{Bench, Wanted, pool, wave};

/// Shapes [rows, cols] of the trunk's bf16 matrices: those that one row takes longest for, and two for many rows.
const TRUNK_LARGE: [(usize, usize); 2] = [(12288, 7168), (7168, 12288)];
const TRUNK: [(usize, usize); 2] = [(1536, 7168), (7168, 3584)];
/// The two shapes of an expert's MXFP4 matrices.
const EXPERT: [(usize, usize); 2] = [(3072, 3584), (3584, 3072)];
/// Activation rows. A prompt of 512 tokens gives an expert nine on average.
const ROWS: [usize; 7] = [1, 2, 4, 9, 16, 64, 512];
const ROWS_QUICK: [usize; 3] = [1, 9, 64];

fn main() {
    let wanted = Wanted::from_args();
    let pool = pool();
    // Cache lines, as the trunk and the experts lie.
    let pool = &pool[pool.as_ptr().align_offset(64)..];
    for compute in wanted.machines() {
        let mut bench = Bench::new(&wanted, &compute, pool);
        if let Some(rate) = compute.measure_bf16_pairs() {
            println!(
                "  products of bf16 pairs from registers {:.1} GFLOP/s (not used: not exact for f32 activations)",
                2.0 * rate / 1e9
            );
        }
        dispatch(&bench);
        let scalar = compute.isa_name() == "scalar";
        let rows: &[usize] = match (scalar, wanted.quick) {
            (true, _) => &[1],
            (_, true) => &ROWS_QUICK,
            _ => &ROWS,
        };
        if !scalar && !wanted.quick {
            for shape in TRUNK_LARGE {
                matmul(&mut bench, pool, "bf16", shape, 1);
            }
        }
        let shapes = if wanted.quick { 1 } else { 2 };
        for t in rows {
            TRUNK[..shapes].iter().for_each(|shape| matmul(&mut bench, pool, "bf16", *shape, *t));
            EXPERT[..shapes].iter().for_each(|shape| matmul(&mut bench, pool, "mxfp4", *shape, *t));
        }
        println!();
    }
}

/// What it costs to hand out work: called again at once, and after the threads went to sleep.
fn dispatch(bench: &Bench<'_>) {
    let call = || {
        let start = Instant::now();
        bench.compute.parallel(bench.compute.threads(), &|i| {
            black_box(i);
        });
        start.elapsed().as_secs_f64() * 1e6
    };
    let median = |mut times: Vec<f64>| {
        times.sort_unstable_by(f64::total_cmp);
        times[times.len() / 2]
    };
    let at_once = median((0..2001).map(|_| call()).collect());
    let after = |gap| {
        median(
            (0..201)
                .map(|_| {
                    std::thread::sleep(gap);
                    call()
                })
                .collect(),
        )
    };
    println!("  dispatch: {at_once:.1} µs at once, {:.1} µs after sleep", after(Duration::from_micros(500)));
}

/// One matrix shape × t rows, over fresh weights every time.
fn matmul(bench: &mut Bench<'_>, pool: &[u8], format: &str, (rows, cols): (usize, usize), t: usize) {
    let bytes = if format == "bf16" { rows * cols * 2 } else { rows * cols / 32 * 17 };
    let matrices = pool.len() / bytes;
    let (x, mut y, mut next) = (wave(t * cols), vec![0.0; t * rows], 0);
    let compute = bench.compute;
    let fma = (rows * cols * t) as f64;
    bench.line(&format!("{format} [{rows}, {cols}] × {t}"), bytes as f64, fma, || {
        let bytes = &pool[next % matrices * bytes..][..bytes];
        next += 1;
        let weights = match format {
            "bf16" => Weights::Bf16(bytes),
            _ => {
                let (packed, scale) = bytes.split_at(rows * cols / 2);
                Weights::Mxfp4 { packed, scale }
            }
        };
        compute.matmul(Matrix { rows, cols, weights }, &x, &mut y);
        black_box(&y);
    });
}
