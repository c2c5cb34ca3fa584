//! Forms of the trunk, one row through a large matrix: `cargo bench --bench formats [-- isa…]`.
//!
//! The forms take turns, beside reading memory; each line gives the best turn. Speed is of the bytes as held; the last
//! column is the time of bf16 by the form's.

use std::time::Instant;

use deltafin::interrupt::Interrupt;
use deltafin::kernels::{Compute, Isa, Matrix, Weights, bf12, int8};

const ROWS: usize = 7168;
const COLS: usize = 18432;
/// Turns of each form.
const TURNS: usize = 15;

fn main() {
    let named: Vec<_> = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
    let values = weights();
    let (mut records, mut side) = (vec![0; ROWS * bf12::record_bytes(COLS)], Vec::new());
    let start = Instant::now();
    for (row, record) in values.chunks_exact(2 * COLS).zip(records.chunks_exact_mut(bf12::record_bytes(COLS))) {
        bf12::encode(row, record, &mut side);
    }
    let bf12_s = start.elapsed().as_secs_f64();
    let mut codes = vec![0; ROWS * int8::record_bytes(COLS)];
    let (mut off, mut size) = (0.0, 0.0);
    let mut back = vec![0.0; COLS];
    for (row, record) in values.chunks_exact(2 * COLS).zip(codes.chunks_exact_mut(int8::record_bytes(COLS))) {
        int8::encode(row, record).expect("finite");
        int8::decode(record, &mut back);
        for (value, back) in row.as_chunks::<2>().0.iter().zip(&back) {
            let value = f32::from_bits(u32::from(u16::from_le_bytes(*value)) << 16);
            off += f64::from(value - back).powi(2);
            size += f64::from(value).powi(2);
        }
    }
    let forms = [
        ("bf16", Weights::Bf16(&values), values.len()),
        ("bf12", Weights::Bf12 { records: &records, side: &side }, records.len() + side.len()),
        ("int8 (quantized)", Weights::Int8(&codes), codes.len()),
    ];
    println!("[{ROWS}, {COLS}], bell-shaped; bf12 encoded at {:.2} GB/s of bf16", values.len() as f64 / bf12_s / 1e9);
    println!("int8 (quantized): weights off by {:.5} of their size", (off / size).sqrt());
    for isa in Compute::available() {
        if isa == Isa::Scalar || !(named.is_empty() || named.iter().any(|name| name == isa.name())) {
            continue;
        }
        for threads in [1, 2] {
            let compute = Compute::new(Some(isa), threads, Interrupt::new()).expect("available");
            let x: Vec<f32> = (0..COLS).map(|i| (i % 101) as f32 / 50.0 - 1.0).collect();
            let mut y = vec![0.0; ROWS];
            let (mut best, mut read) = ([f64::MAX; 3], 0.0_f64);
            for _ in 0..TURNS {
                read = read.max(compute.measure_read(&values));
                for (best, (_, weights, _)) in best.iter_mut().zip(&forms) {
                    let start = Instant::now();
                    compute.matmul(Matrix { rows: ROWS, cols: COLS, weights: *weights }, &x, &mut y);
                    *best = best.min(start.elapsed().as_secs_f64());
                }
            }
            println!("{isa} × {threads}: memory read {:.1} GB/s", read / 1e9);
            for (seconds, (name, _, bytes)) in best.iter().zip(&forms) {
                println!(
                    "  {name:16}  {:.4} of bf16's bytes, {:6.1} GB/s ({:3.0} % of reading), {:6.2} ms, {:.2} × bf16",
                    *bytes as f64 / values.len() as f64,
                    *bytes as f64 / seconds / 1e9,
                    100.0 * *bytes as f64 / seconds / read,
                    1e3 * seconds,
                    best[0] / seconds,
                );
            }
        }
    }
}

/// bfloat16 of a normal distribution.
fn weights() -> Vec<u8> {
    let mut state = 1_u64;
    let mut uniform = || {
        state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (state ^ (state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        let z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((z >> 11) as f32 + 1.0) / (1_u64 << 53) as f32
    };
    let pair = |_| {
        let (radius, angle) = (0.02 * (-2.0 * uniform().ln()).sqrt(), std::f32::consts::TAU * uniform());
        [radius * angle.cos(), radius * angle.sin()]
    };
    let floats = (0..ROWS * COLS / 2).flat_map(pair);
    floats.flat_map(|value: f32| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect()
}
