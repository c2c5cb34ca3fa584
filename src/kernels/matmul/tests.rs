//! Every product, instruction set and thread count against a naive reading of the documentation, bit by bit.

use std::panic::{AssertUnwindSafe, catch_unwind};

use safetensors::SafeTensors;

use super::*;
use crate::interrupt::Interrupt;
use crate::kernels::{bf12 as bf12_codec, int8 as int8_codec};

const CODES: [f64; 16] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

#[derive(Debug, Clone, Copy)]
enum Kind {
    Bf16,
    F32,
    Mxfp4,
    Bf12,
    Int8,
}

/// A random matrix: its bytes (behind a byte that makes their alignment odd), and its values.
struct Stored {
    kind: Kind,
    rows: usize,
    cols: usize,
    bytes: Vec<u8>,
    /// Of bf12: the words on the side.
    scale: Vec<u8>,
    values: Vec<f32>,
}

/// SplitMix64: the same numbers on every machine.
struct Random(u64);

impl Random {
    fn next(&mut self) -> u32 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (self.0 ^ (self.0 >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        ((z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb) >> 32) as u32
    }

    /// In −1..1, with 24 significant bits.
    fn float(&mut self) -> f32 {
        (self.next() as i32 >> 8) as f32 / (1 << 23) as f32
    }

    fn floats(&mut self, n: usize) -> Vec<f32> {
        (0..n).map(|_| self.float()).collect()
    }
}

impl Stored {
    fn random(kind: Kind, rows: usize, cols: usize, seed: u64) -> Self {
        let mut random = Random(seed);
        let (mut bytes, mut scale, mut values) = (vec![0xff], vec![0xff], Vec::new());
        match kind {
            Kind::Bf16 => {
                for _ in 0..rows * cols {
                    let bits = (random.float().to_bits() >> 16) as u16;
                    bytes.extend(bits.to_le_bytes());
                    values.push(f32::from_bits(u32::from(bits) << 16));
                }
            }
            Kind::F32 => {
                values = random.floats(rows * cols);
                bytes.extend(values.iter().flat_map(|v| v.to_le_bytes()));
            }
            Kind::Mxfp4 => {
                for _ in 0..rows * cols / 32 {
                    let exponent = 117 + (random.next() % 12) as u8;
                    scale.push(exponent);
                    for _ in 0..16 {
                        let byte = random.next() as u8;
                        bytes.push(byte);
                        for code in [byte & 15, byte >> 4] {
                            let value = CODES[usize::from(code)] * 2f64.powi(i32::from(exponent) - 127);
                            values.push(value as f32);
                        }
                    }
                }
            }
            Kind::Bf12 | Kind::Int8 => {
                scale.clear();
                for row in 0..rows {
                    // Rows without exceptions, with some, and with too many.
                    let rare = [u32::MAX, 20, 3][row % 3];
                    let values_of: Vec<u8> = (0..cols)
                        .flat_map(|_| {
                            let up = if random.next().is_multiple_of(rare) { 30 } else { 0 };
                            let value = random.float().abs().max(1e-3) * 2f32.powi(-up) * random.float().signum();
                            ((value.to_bits() >> 16) as u16).to_le_bytes()
                        })
                        .collect();
                    if matches!(kind, Kind::Bf12) {
                        let mut record = vec![0; bf12_codec::record_bytes(cols)];
                        bf12_codec::encode(&values_of, &mut record, &mut scale);
                        bytes.extend(record);
                        let bits = values_of.as_chunks::<2>().0.iter().map(|b| u16::from_le_bytes(*b));
                        values.extend(bits.map(|bits| f32::from_bits(u32::from(bits) << 16)));
                    } else {
                        let (mut record, mut back) = (vec![0; int8_codec::record_bytes(cols)], vec![0.0; cols]);
                        int8_codec::encode(&values_of, &mut record).unwrap();
                        int8_codec::decode(&record, &mut back);
                        bytes.extend(record);
                        values.extend(back);
                    }
                }
                scale.insert(0, 0xff);
            }
        }
        Self { kind, rows, cols, bytes, scale, values }
    }

    fn matrix(&self) -> Matrix<'_> {
        let (bytes, scale) = (&self.bytes[1..], &self.scale[1..]);
        let weights = match self.kind {
            Kind::Bf16 => Weights::Bf16(bytes),
            Kind::F32 => Weights::F32(bytes),
            Kind::Mxfp4 => Weights::Mxfp4 { packed: bytes, scale },
            Kind::Bf12 => Weights::Bf12 { records: bytes, side: scale },
            Kind::Int8 => Weights::Int8(bytes),
        };
        Matrix { rows: self.rows, cols: self.cols, weights }
    }

    fn row(&self, row: usize) -> &[f32] {
        &self.values[row * self.cols..][..self.cols]
    }
}

/// The canonical dot product.
fn dot(w: &[f32], x: &[f32]) -> f32 {
    let mut sums = [0.0f32; 16];
    for k in (0..w.len()).step_by(16) {
        for (i, sum) in sums.iter_mut().enumerate() {
            let w = w.get(k + i).copied().unwrap_or(0.0);
            let x = x.get(k + i).copied().unwrap_or(0.0);
            *sum = w.mul_add(x, *sum);
        }
    }
    for width in [8, 4, 2, 1] {
        for i in 0..width {
            sums[i] += sums[i + width];
        }
    }
    sums[0]
}

fn product(w: &Stored, x: &[f32]) -> Vec<f32> {
    x.chunks_exact(w.cols).flat_map(|x| (0..w.rows).map(|r| dot(w.row(r), x))).collect()
}

/// Every instruction set of this CPU with each of these thread counts.
fn machines(threads: &[usize]) -> Vec<Compute> {
    let new = |isa, threads| Compute::new(Some(isa), threads, Interrupt::new()).expect("available");
    Compute::available().into_iter().flat_map(|isa| threads.iter().map(move |n| new(isa, *n))).collect()
}

#[track_caller]
fn assert_bits(compute: &Compute, got: &[f32], wanted: &[f32], case: &dyn std::fmt::Debug) {
    assert_eq!(got.len(), wanted.len());
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert!(
            got.to_bits() == wanted.to_bits() || (got.is_nan() && wanted.is_nan()),
            "{} on {} threads, element {i}: got {got:?}, wanted {wanted:?} in {case:?}",
            compute.isa_name(),
            compute.threads(),
        );
    }
}

/// Runs with an output of NaN, so that an element left unwritten differs.
fn run(n: usize, f: impl FnOnce(&mut [f32])) -> Vec<f32> {
    let mut y = vec![f32::NAN; n];
    f(&mut y);
    y
}

const ROWS_OF_X: [usize; 11] = [0, 1, 2, 3, 5, 7, 8, 13, 23, 27, 64];

#[test]
fn any_shape_gives_the_canonical_bits_on_every_instruction_set() {
    let machines = machines(&[1]);
    let odd = [(1, 1), (1, 15), (2, 16), (3, 17), (4, 31), (5, 33), (7, 48), (17, 100), (33, 515), (9, 1040)];
    let grouped = [(1, 32), (3, 96), (4, 64), (17, 160), (34, 544), (6, 1056)];
    let cases =
        odd.into_iter().flat_map(|shape| [Kind::Bf16, Kind::F32, Kind::Bf12, Kind::Int8].map(|kind| (kind, shape)));
    for (kind, (rows, cols)) in cases.chain(grouped.map(|shape| (Kind::Mxfp4, shape))) {
        let w = Stored::random(kind, rows, cols, 7);
        for t in ROWS_OF_X {
            let x = Random(t as u64).floats(t * cols);
            let wanted = product(&w, &x);
            for compute in &machines {
                let got = run(t * rows, |y| compute.matmul(w.matrix(), &x, y));
                assert_bits(compute, &got, &wanted, &(kind, rows, cols, t));
            }
        }
    }
}

/// Panels and blocks of columns that are whole, cut and more than one; every size of tile; more activation rows than
/// share a panel, and more than are packed at a time.
#[test]
fn products_larger_than_a_block_give_the_canonical_bits() {
    let machines = machines(&[1, 2]);
    for (kind, rows, cols, t) in [
        (Kind::Bf16, 101, 2100, 4),
        (Kind::Mxfp4, 101, 2112, 6),
        (Kind::Bf16, 50, 2100, 6),
        (Kind::Mxfp4, 51, 1568, 9),
        (Kind::F32, 97, 1550, 11),
        (Kind::Bf16, 53, 1540, 12),
        (Kind::Mxfp4, 101, 2112, 15),
        (Kind::F32, 49, 1025, 16),
        (Kind::Mxfp4, 50, 1056, 24),
        (Kind::Bf16, 98, 1100, 97),
        (Kind::Mxfp4, 99, 1088, 193),
        (Kind::Bf16, 5, 33_800, 97),
    ] {
        let w = Stored::random(kind, rows, cols, 17);
        let x = Random(t as u64).floats(t * cols);
        let wanted = product(&w, &x);
        for compute in &machines {
            let got = run(t * rows, |y| compute.matmul(w.matrix(), &x, y));
            assert_bits(compute, &got, &wanted, &(kind, rows, cols, t));
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let machines = machines(&[1, 2, 3, 8]);
    for (kind, rows, cols, t) in [
        (Kind::Bf16, 301, 1030, 1),
        (Kind::Bf16, 131, 520, 13),
        (Kind::Mxfp4, 259, 1056, 1),
        (Kind::Mxfp4, 70, 96, 200),
        (Kind::Bf12, 301, 1030, 1),
        (Kind::Bf12, 131, 1527, 13),
        (Kind::Bf12, 50, 1050, 200),
        (Kind::Int8, 301, 1030, 1),
        (Kind::Int8, 50, 1050, 200),
    ] {
        let w = Stored::random(kind, rows, cols, 3);
        let x = Random(5).floats(t * cols);
        let wanted = product(&w, &x);
        for compute in &machines {
            let got = run(t * rows, |y| compute.matmul(w.matrix(), &x, y));
            assert_bits(compute, &got, &wanted, &(kind, rows, cols, t));
        }
    }
}

#[test]
fn infinities_nans_and_subnormals_stay_in_their_rows() {
    let mut w = Stored::random(Kind::F32, 9, 40, 1);
    for (row, value) in [(1, f32::INFINITY), (3, f32::NAN), (4, f32::from_bits(5)), (6, f32::MAX)] {
        w.values[row * 40..][..40].fill(value);
    }
    w.bytes.splice(1.., w.values.iter().flat_map(|v| v.to_le_bytes()));
    for t in [1, 3, 8] {
        let mut x = Random(2).floats(t * 40);
        x[5] = -0.0;
        let wanted = product(&w, &x);
        for compute in &machines(&[1]) {
            let got = run(t * 9, |y| compute.matmul(w.matrix(), &x, y));
            assert_bits(compute, &got, &wanted, &t);
        }
    }
}

#[test]
fn every_bfloat16_comes_out_of_bf12_as_it_went_in() {
    // Shuffled, so that rows have exponents of all sizes; and among like ones, so that it is an exception.
    let scattered = (0..=u16::MAX).map(|i| i.wrapping_mul(40_503));
    let alone = (0..=u16::MAX).flat_map(|i| (0..32).map(move |c| if c == i % 32 { i } else { 0xbc12 }));
    let (scattered, alone): (Vec<_>, Vec<_>) = (scattered.collect(), alone.collect());
    for (cols, values) in [(64, &scattered), (4096, &scattered), (32, &alone), (256, &alone)] {
        let (mut records, mut side) = (Vec::new(), Vec::new());
        for row in values.chunks(cols) {
            let bytes: Vec<u8> = row.iter().flat_map(|bits| bits.to_le_bytes()).collect();
            let mut record = vec![0; bf12_codec::record_bytes(cols)];
            bf12_codec::encode(&bytes, &mut record, &mut side);
            records.extend(record);
        }
        let rows = values.len() / cols;
        let w = Matrix { rows, cols, weights: Weights::Bf12 { records: &records, side: &side } };
        let ids: Vec<_> = (0..rows as u32).collect();
        for compute in &machines(&[1]) {
            let got = run(values.len(), |out| compute.gather(w, &ids, out));
            let wrong = got.iter().zip(values).position(|(got, bits)| got.to_bits() != u32::from(*bits) << 16);
            assert_eq!(wrong.map(|at| values[at]), None, "{}, {cols} columns", compute.isa_name());
        }
    }
}

#[test]
fn several_matrices_at_once_give_the_bits_of_each_alone() {
    let w = [
        Stored::random(Kind::Bf16, 200, 96, 1),
        Stored::random(Kind::Mxfp4, 3, 96, 2),
        Stored::random(Kind::F32, 77, 96, 3),
        Stored::random(Kind::Bf16, 1, 96, 4),
        Stored::random(Kind::Bf12, 31, 96, 5),
        Stored::random(Kind::Int8, 6, 96, 6),
    ];
    for compute in &machines(&[1, 3]) {
        for t in [1, 3, 40] {
            let x = Random(t as u64).floats(t * 96);
            let mut y = w.each_ref().map(|w| vec![f32::NAN; t * w.rows]);
            let mut out = y.each_mut().map(|y| y.as_mut_slice());
            compute.matmul_each(&w.each_ref().map(Stored::matrix), &x, &mut out);
            for (w, y) in w.iter().zip(&y) {
                assert_bits(compute, y, &product(w, &x), &(w.kind, t));
            }
        }
    }
}

#[test]
fn heads_take_their_own_rows_and_activations() {
    for (kind, heads, head_rows, first_row, depth, cols) in [
        (Kind::Bf16, 3, 11, 4, 7, 41),
        (Kind::F32, 1, 5, 0, 5, 16),
        (Kind::Mxfp4, 6, 40, 12, 28, 96),
        (Kind::Bf12, 3, 11, 4, 7, 45),
        (Kind::Int8, 2, 12, 3, 9, 70),
    ] {
        let w = Stored::random(kind, heads * head_rows, cols, 9);
        for t in ROWS_OF_X {
            let x = Random(t as u64).floats(t * heads * cols);
            let rows = |h| (0..depth).map(move |d| h * head_rows + first_row + d);
            let wanted: Vec<_> = (0..t * heads)
                .flat_map(|i| rows(i % heads).map(move |r| (i, r)))
                .map(|(i, r)| dot(w.row(r), &x[i * cols..][..cols]))
                .collect();
            for compute in &machines(&[1, 3]) {
                let got = run(t * heads * depth, |y| {
                    compute.matmul_heads(w.matrix(), heads, head_rows, first_row, depth, &x, y);
                });
                assert_bits(compute, &got, &wanted, &(kind, heads, t));
            }
        }
    }
}

#[test]
fn transposed_heads_sum_over_rows_in_ascending_order() {
    for (kind, heads, head_rows, first_row, depth, cols, x_stride) in [
        (Kind::Bf16, 3, 11, 2, 7, 41, 9),
        (Kind::F32, 2, 6, 0, 6, 16, 6),
        (Kind::Bf16, 1, 3, 1, 2, 5, 3),
        (Kind::Bf16, 4, 64, 0, 48, 208, 50),
        (Kind::Mxfp4, 5, 40, 8, 32, 96, 33),
        (Kind::Bf12, 4, 64, 0, 48, 211, 50),
        (Kind::Int8, 4, 12, 2, 7, 211, 50),
    ] {
        let w = Stored::random(kind, heads * head_rows, cols, 4);
        for t in ROWS_OF_X {
            let x = Random(t as u64).floats(t * heads * x_stride);
            let mut wanted = Vec::new();
            for i in 0..t * heads {
                for c in 0..cols {
                    let terms =
                        (0..depth).map(|d| (x[i * x_stride + d], w.row(i % heads * head_rows + first_row + d)[c]));
                    wanted.push(terms.fold(0.0f32, |sum, (x, w)| x.mul_add(w, sum)));
                }
            }
            for compute in &machines(&[1, 3]) {
                let got = run(t * heads * cols, |y| {
                    let m = w.matrix();
                    compute.matmul_transposed_heads(m, heads, head_rows, first_row, depth, &x, x_stride, y);
                });
                assert_bits(compute, &got, &wanted, &(kind, heads, t));
            }
        }
    }
}

#[test]
fn gather_widens_the_rows_asked_for() {
    for (kind, cols) in [(Kind::Bf16, 37), (Kind::F32, 5), (Kind::Mxfp4, 64), (Kind::Bf12, 117), (Kind::Int8, 77)] {
        let w = Stored::random(kind, 12, cols, 6);
        let ids = [3, 0, 11, 3];
        let wanted: Vec<_> = ids.iter().flat_map(|id| w.row(*id as usize)).copied().collect();
        for compute in &machines(&[2]) {
            assert_bits(compute, &run(4 * cols, |out| compute.gather(w.matrix(), &ids, out)), &wanted, &kind);
            compute.gather(w.matrix(), &[], &mut []);
        }
    }
}

/// The same numbers on every architecture: this constant was computed on x86-64 and holds on AArch64.
#[test]
fn a_fixed_workload_hashes_to_the_pinned_value() {
    for compute in &machines(&[1, 2]) {
        let mut hash = 0xcbf2_9ce4_8422_2325u64;
        for (kind, rows, cols) in [(Kind::Bf16, 50, 333), (Kind::F32, 21, 70), (Kind::Mxfp4, 64, 608)] {
            let w = Stored::random(kind, rows, cols, 11);
            for t in [1, 2, 5, 19] {
                let x = Random(13).floats(t * cols);
                for y in run(t * rows, |y| compute.matmul(w.matrix(), &x, y)) {
                    for byte in y.to_bits().to_le_bytes() {
                        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3); // FNV-1a
                    }
                }
            }
        }
        assert_eq!(hash, 0x2b5e_0821_98e5_112a, "{}: {hash:#018x}", compute.isa_name());
    }
}

#[test]
fn lengths_that_disagree_are_refused_with_the_shapes() {
    let compute = &machines(&[1])[0];
    let bytes = [0u8; 256];
    let weights = Weights::Bf16(&bytes[..2 * 4 * 8]);
    let good = Matrix { rows: 4, cols: 8, weights };
    let refusal = |f: &dyn Fn()| {
        let payload = catch_unwind(AssertUnwindSafe(f)).expect_err("refused");
        payload.downcast::<String>().map_or_else(|_| "no message".into(), |message| *message)
    };
    let x = [0.0; 32];
    let short = Matrix { rows: 5, cols: 8, weights };
    assert!(refusal(&|| compute.matmul(short, &x[..8], &mut [0.0; 5])).contains("bf16 matrix [5, 8]"));
    assert!(refusal(&|| compute.matmul(good, &x[..9], &mut [0.0; 4])).contains("9 elements"));
    assert!(refusal(&|| compute.matmul(good, &x[..8], &mut [0.0; 3])).contains("y of 1 rows of 4"));
    let empty = Matrix { rows: 0, cols: 8, weights: Weights::F32(&[]) };
    assert!(refusal(&|| compute.matmul(empty, &x[..8], &mut [])).contains("empty"));
    let ragged = Matrix { rows: 2, cols: 48, weights: Weights::Mxfp4 { packed: &bytes[..48], scale: &bytes[..3] } };
    assert!(refusal(&|| compute.gather(ragged, &[0], &mut [0.0; 48])).contains("groups of 32"));
    assert!(refusal(&|| compute.gather(good, &[4], &mut [0.0; 8])).contains("id Some(4) of 4 rows"));
    assert!(refusal(&|| compute.gather(good, &[1], &mut [0.0; 7])).contains("out of 1 rows of 8"));
    assert!(refusal(&|| compute.matmul_heads(good, 3, 1, 0, 1, &x[..24], &mut [0.0; 3])).contains("3 heads of 1"));
    assert!(refusal(&|| compute.matmul_heads(good, 2, 2, 1, 2, &x[..16], &mut [0.0; 4])).contains("head of 2"));
}

fn golden() -> Vec<u8> {
    std::fs::read(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/golden/ops.safetensors")).expect("golden data")
}

fn floats(tensors: &SafeTensors<'_>, name: &str) -> Vec<f32> {
    let data = tensors.tensor(name).expect("golden tensor").data();
    data.chunks_exact(4).map(|b| f32::from_le_bytes(b.try_into().expect("four bytes"))).collect()
}

#[test]
fn every_mxfp4_code_at_every_scale_decodes_to_the_golden_bits() {
    let file = golden();
    let tensors = SafeTensors::deserialize(&file).expect("golden data");
    let (packed, scale) =
        (tensors.tensor("mxfp4.packed").expect("codes"), tensors.tensor("mxfp4.scale").expect("scales"));
    let w = Matrix { rows: 256, cols: 32, weights: Weights::Mxfp4 { packed: packed.data(), scale: scale.data() } };
    let ids: Vec<_> = (0..256).collect();
    let wanted = floats(&tensors, "mxfp4.out");
    let exact = tensors.tensor("mxfp4.out_f64").expect("exact values");
    for compute in &machines(&[1]) {
        let got = run(256 * 32, |out| compute.gather(w, &ids, out));
        assert_bits(compute, &got, &wanted, &"mxfp4");
        for (got, exact) in got.iter().zip(exact.data().chunks_exact(8)) {
            let exact = f64::from_le_bytes(exact.try_into().expect("eight bytes"));
            assert!(f64::from(*got) == exact || exact.is_nan() || exact.abs() > f64::from(f32::MAX));
        }
    }
}

#[test]
fn the_mxfp4_product_is_the_golden_one() {
    let file = golden();
    let tensors = SafeTensors::deserialize(&file).expect("golden data");
    let (packed, scale) =
        (tensors.tensor("mxfp4_matmul.packed").expect("codes"), tensors.tensor("mxfp4_matmul.scale").expect("scales"));
    let w = Matrix { rows: 40, cols: 96, weights: Weights::Mxfp4 { packed: packed.data(), scale: scale.data() } };
    let (x, wanted) = (floats(&tensors, "mxfp4_matmul.x"), floats(&tensors, "mxfp4_matmul.out"));
    for compute in &machines(&[1]) {
        for (got, wanted) in run(5 * 40, |y| compute.matmul(w, &x, y)).iter().zip(&wanted) {
            assert!((got - wanted).abs() <= 1e-5 + 1e-5 * wanted.abs(), "got {got}, wanted {wanted}");
        }
    }
}
