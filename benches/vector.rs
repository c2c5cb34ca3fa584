//! Everything but matrix products on the shapes of the released Kimi K3: the delta rule, latent attention, the products
//! around it, the router, the short convolution, the residual mix, the activation:
//! `cargo bench --bench vector [-- --quick] [isa…] [name…]`. Lines as of the bench `kernels`.

mod measure;

use std::hint::black_box;

use deltafin::config::MoeConfig;
use deltafin::kernels::{Matrix, Weights};
use deltafin::model::Routes;

use self::measure::{Bench, Wanted, pool, wave};

/// Heads of KDA and of MLA.
const HEADS: usize = 96;
/// Width of a KDA head, and of a query without its rope part, a key and a value of MLA.
const DIM: usize = 128;
/// Cached values a token, and those of them that are attended to.
const WIDTH: usize = 576;
const RANK: usize = 512;
/// KDA states to go through in turn, so that each comes from memory as in a whole model.
const LAYERS: usize = 16;

fn main() {
    let wanted = Wanted::from_args();
    let pool = pool();
    let pool = &pool[pool.as_ptr().align_offset(64)..];
    for compute in wanted.machines() {
        let mut bench = Bench::new(&wanted, &compute, pool);
        let quick = wanted.quick || compute.isa_name() == "scalar";
        let rows: &[usize] = if quick { &[1, 16] } else { &[1, 4, 16, 64, 512] };
        for rows in rows {
            kda_rows(&mut bench, *rows);
            absorb(&mut bench, pool, *rows);
            expand(&mut bench, pool, *rows);
            router(&mut bench, pool, *rows);
            short_conv(&mut bench, *rows);
            attn_res_mix(&mut bench, *rows);
        }
        let sizes: &[(usize, usize)] = if quick {
            &[(1, 1024), (16, 512)]
        } else {
            &[(1, 1024), (1, 4096), (1, 32768), (8, 4096), (64, 4096), (512, 512)]
        };
        for (rows, keys) in sizes {
            latent_attention(&mut bench, *rows, *keys);
        }
        situ_and_mul(&mut bench);
        println!();
    }
}

fn kda_rows(bench: &mut Bench<'_>, rows: usize) {
    let n = rows * HEADS * DIM;
    let compute = bench.compute;
    let mut states: Vec<_> = (0..LAYERS).map(|_| vec![0.5; HEADS * DIM * DIM]).collect();
    let (q, mut k, v) = (wave(n), wave(n), wave(n));
    // Longer keys would make the rule diverge.
    compute.l2_norm(&mut k, DIM, 1e-6, 1.0);
    let (alpha, beta) = (vec![0.9; n], vec![0.3; rows * HEADS]);
    let (mut out, mut layer) = (vec![0.0; n], 0);
    // Decay, prediction, update, output; the state is read and written.
    let (bytes, fma) = (8.0 * (HEADS * DIM * DIM) as f64, 4.0 * (n * DIM) as f64);
    bench.line(&format!("kda_rows × {rows}"), bytes, fma, || {
        layer = (layer + 1) % LAYERS;
        compute.kda_rows(&mut states[layer], HEADS, DIM, &q, &k, &alpha, &v, &beta, &mut out);
    });
    assert!(out.iter().all(|x| x.is_finite()));
}

/// A layer's `kv_b`: per head the rows of its keys, then those of its values.
fn kv_b(pool: &[u8], layer: usize) -> Matrix<'_> {
    let (rows, cols) = (HEADS * 2 * DIM, RANK);
    let bytes = rows * cols * 2;
    Matrix { rows, cols, weights: Weights::Bf16(&pool[layer % (pool.len() / bytes) * bytes..][..bytes]) }
}

fn absorb(bench: &mut Bench<'_>, pool: &[u8], rows: usize) {
    let compute = bench.compute;
    let (x, mut y, mut layer) = (wave(rows * HEADS * DIM), vec![0.0; rows * HEADS * RANK], 0);
    let weights = (HEADS * DIM * RANK) as f64;
    bench.line(&format!("matmul_transposed_heads × {rows}"), 2.0 * weights, weights * rows as f64, || {
        layer += 1;
        compute.matmul_transposed_heads(kv_b(pool, layer), HEADS, 2 * DIM, 0, DIM, &x, DIM, &mut y);
        black_box(&y);
    });
}

fn expand(bench: &mut Bench<'_>, pool: &[u8], rows: usize) {
    let compute = bench.compute;
    let (x, mut y, mut layer) = (wave(rows * HEADS * RANK), vec![0.0; rows * HEADS * DIM], 0);
    let weights = (HEADS * DIM * RANK) as f64;
    bench.line(&format!("matmul_heads × {rows}"), 2.0 * weights, weights * rows as f64, || {
        layer += 1;
        compute.matmul_heads(kv_b(pool, layer), HEADS, 2 * DIM, DIM, DIM, &x, &mut y);
        black_box(&y);
    });
}

/// The gate's product, the sigmoid, and the choice of 16 of 896 experts for each row, which is one thread's.
fn router(bench: &mut Bench<'_>, pool: &[u8], rows: usize) {
    let moe = MoeConfig {
        num_experts: 896,
        num_experts_per_token: 16,
        num_shared_experts: 2,
        moe_intermediate_size: 3072,
        moe_renormalize: true,
        routed_scaling_factor: 1.0,
        num_expert_group: 1,
        topk_group: 1,
        routed_expert_hidden_size: Some(3584),
        latent_moe_use_norm: true,
    };
    let (experts, hidden) = (moe.num_experts, 7168);
    let bytes = experts * hidden * 2;
    let (x, bias, mut logits) = (wave(rows * hidden), wave(experts), vec![0.0; rows * experts]);
    let (mut scores, mut layer) = (logits.clone(), 0);
    let compute = bench.compute;
    let weights = (experts * hidden) as f64;
    bench.line(&format!("router × {rows}"), 2.0 * weights, weights * rows as f64, || {
        layer += 1;
        let gate = Weights::Bf16(&pool[layer % (pool.len() / bytes) * bytes..][..bytes]);
        compute.matmul(Matrix { rows: experts, cols: hidden, weights: gate }, &x, &mut logits);
        scores.copy_from_slice(&logits);
        compute.sigmoid(&mut scores);
        black_box(Routes::choose(&moe, &logits, &scores, &bias).expect("finite scores"));
    });
}

fn short_conv(bench: &mut Bench<'_>, rows: usize) {
    let (channels, taps) = (3 * HEADS * DIM, 4);
    let (window, weight) = (wave((taps - 1 + rows) * channels), wave(taps * channels));
    let mut out = vec![0.0; rows * channels];
    let compute = bench.compute;
    let n = (rows * channels) as f64;
    bench.line(&format!("short_conv × {rows}"), 8.0 * n, taps as f64 * n, || {
        compute.short_conv(&window, &weight, channels, &mut out);
        black_box(&out);
    });
}

fn attn_res_mix(bench: &mut Bench<'_>, rows: usize) {
    let (count, hidden) = (9, 7168);
    let candidates: Vec<_> = (0..count).map(|_| wave(rows * hidden)).collect();
    let candidates: Vec<&[f32]> = candidates.iter().map(Vec::as_slice).collect();
    let (query, mut out) = (wave(hidden), vec![0.0; rows * hidden]);
    let compute = bench.compute;
    let n = (count * rows * hidden) as f64;
    bench.line(&format!("attn_res_mix × {rows}"), 4.0 * n, 3.0 * n, || {
        compute.attn_res_mix(&candidates, &query, 1e-5, &mut out);
        black_box(&out);
    });
}

fn latent_attention(bench: &mut Bench<'_>, rows: usize, keys: usize) {
    let (q, cache) = (wave(rows * HEADS * WIDTH), wave(keys * WIDTH));
    let mut out = vec![0.0; rows * HEADS * RANK];
    let compute = bench.compute;
    // The earlier rows see fewer keys.
    let pairs = rows as f64 * (keys as f64 - (rows - 1) as f64 / 2.0);
    let (bytes, fma) = (4.0 * (keys * WIDTH) as f64, pairs * (HEADS * (WIDTH + RANK)) as f64);
    bench.line(&format!("latent_attention × {rows}, {keys} keys"), bytes, fma, || {
        compute.latent_attention(&q, &cache, keys - rows, HEADS, WIDTH, RANK, 0.07, &mut out);
    });
    assert!(out.iter().all(|x| x.is_finite()));
}

fn situ_and_mul(bench: &mut Bench<'_>) {
    let n = 33792;
    let (gate, up) = (wave(n), wave(n));
    let mut x = gate.clone();
    let compute = bench.compute;
    bench.line(&format!("situ_and_mul × {n}"), 12.0 * n as f64, 0.0, || {
        x.copy_from_slice(&gate);
        compute.situ_and_mul(&mut x, &up, 4.0, 25.0);
    });
}
