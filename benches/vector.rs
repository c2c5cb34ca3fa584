//! The delta rule, the residual mix and latent attention on the shapes of the released Kimi K3:
//! `cargo bench --bench vector [-- filter…]`. Median of the repeats and their spread, a line each.

use std::time::{Duration, Instant};

use deltafin::interrupt::Interrupt;
use deltafin::kernels::{Compute, Isa};

/// How long each line is measured, at least.
const BUDGET: Duration = Duration::from_millis(400);
/// Heads of KDA and of MLA.
const HEADS: usize = 96;
/// Width of a KDA head.
const DIM: usize = 128;
/// KDA states to go through in turn, so that each comes from memory as in a whole model.
const LAYERS: usize = 16;

fn main() {
    let filters: Vec<_> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    for isa in [Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Scalar] {
        for threads in if cores > 1 { vec![1, cores] } else { vec![1] } {
            let compute = match Compute::new(Some(isa), threads, Interrupt::new()) {
                Ok(compute) => compute,
                Err(e) => {
                    println!("{e}");
                    break;
                }
            };
            let name = compute.isa_name();
            if !filters.is_empty() && !filters.iter().any(|f| name.contains(f.as_str())) {
                break;
            }
            println!("{name} × {threads}");
            for rows in [1, 64] {
                kda_rows(&compute, rows);
            }
            attn_res_mix(&compute);
            for (rows, keys) in [(1, 4096), (8, 4096), (64, 1024)] {
                latent_attention(&compute, rows, keys);
            }
            activations(&compute);
        }
    }
}

fn kda_rows(compute: &Compute, rows: usize) {
    let n = rows * HEADS * DIM;
    let mut states: Vec<_> = (0..LAYERS).map(|_| vec![0.5; HEADS * DIM * DIM]).collect();
    let (q, mut k, v) = (wave(n), wave(n), wave(n));
    // Longer keys would make the rule diverge.
    compute.l2_norm(&mut k, DIM, 1e-6, 1.0);
    let (alpha, beta) = (vec![0.9; n], vec![0.3; rows * HEADS]);
    let (mut out, mut layer) = (vec![0.0; n], 0);
    let (time, spread) = measure(|| {
        layer = (layer + 1) % LAYERS;
        compute.kda_rows(&mut states[layer], HEADS, DIM, &q, &k, &alpha, &v, &beta, &mut out);
    });
    assert!(out.iter().all(|x| x.is_finite()));
    // Decay, prediction, update, output: seven operations a state element.
    let flops = 7.0 * (rows * HEADS * DIM * DIM) as f64;
    let bytes = 8.0 * (HEADS * DIM * DIM) as f64;
    line(&format!("kda_rows {rows} × {HEADS} × {DIM}"), time, spread, flops, bytes);
}

fn attn_res_mix(compute: &Compute) {
    let (count, hidden) = (9, 7168);
    let candidates: Vec<_> = (0..count).map(|_| wave(hidden)).collect();
    let candidates: Vec<&[f32]> = candidates.iter().map(Vec::as_slice).collect();
    let (query, mut out) = (wave(hidden), vec![0.0; hidden]);
    let (time, spread) = measure(|| compute.attn_res_mix(&candidates, &query, 1e-5, &mut out));
    let n = (count * hidden) as f64;
    line(&format!("attn_res_mix {count} × {hidden}"), time, spread, 6.0 * n, 4.0 * n);
}

fn latent_attention(compute: &Compute, rows: usize, keys: usize) {
    let (width, rank) = (576, 512);
    let (q, cache) = (wave(rows * HEADS * width), wave(keys * width));
    let mut out = vec![0.0; rows * HEADS * rank];
    let (time, spread) =
        measure(|| compute.latent_attention(&q, &cache, keys - rows, HEADS, width, rank, 0.07, &mut out));
    assert!(out.iter().all(|x| x.is_finite()));
    let flops = 2.0 * (rows * HEADS * keys * (width + rank)) as f64;
    line(&format!("latent_attention {rows} rows, {keys} keys"), time, spread, flops, 4.0 * (keys * width) as f64);
}

fn activations(compute: &Compute) {
    let n = 33792;
    let (gate, up) = (wave(n), wave(n));
    let mut x = gate.clone();
    let (time, spread) = measure(|| {
        x.copy_from_slice(&gate);
        compute.situ_and_mul(&mut x, &up, 4.0, 25.0);
    });
    line(&format!("situ_and_mul {n}"), time, spread, 0.0, 12.0 * n as f64);
}

/// Values of either sign up to 1 that never repeat soon.
fn wave(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.7).sin()).collect()
}

/// Median and largest relative deviation of the middle half, over at least [`BUDGET`].
fn measure(mut f: impl FnMut()) -> (Duration, f64) {
    f();
    let begin = Instant::now();
    let mut times = Vec::new();
    while begin.elapsed() < BUDGET || times.len() < 5 {
        let start = Instant::now();
        f();
        times.push(start.elapsed());
    }
    times.sort_unstable();
    let (n, median) = (times.len(), times[times.len() / 2]);
    (median, (times[n * 3 / 4] - times[n / 4]).as_secs_f64() / median.as_secs_f64())
}

fn line(what: &str, time: Duration, spread: f64, flops: f64, bytes: f64) {
    let seconds = time.as_secs_f64();
    println!(
        "  {what:36} {:10.1} µs ± {:2.0} %  {:7.1} GFLOP/s  {:6.1} GB/s",
        seconds * 1e6,
        spread * 100.0,
        flops / seconds / 1e9,
        bytes / seconds / 1e9
    );
}
