//! One set of bits, whatever the instruction set, the thread count and the cut of the rows.

use deltafin::kernels::{Compute, Isa};

use crate::{ISAS, Random, compute};

/// Around the vector width, around the tiles, and the sizes that models use.
const SIZES: [usize; 10] = [1, 3, 15, 16, 17, 33, 40, 64, 128, 160];

#[track_caller]
fn assert_same_bits(what: &str, got: &[f32], wanted: &[f32]) {
    assert_eq!(got.len(), wanted.len(), "{what}");
    for (i, (got, wanted)) in got.iter().zip(wanted).enumerate() {
        assert!(got.to_bits() == wanted.to_bits(), "{what}[{i}]: got {got:e}, wanted {wanted:e}");
    }
}

/// Runs `work` on every instruction set and 1, 2, 3 and 8 threads; all must give what one scalar thread gives.
#[track_caller]
fn everywhere(what: &str, work: impl Fn(&Compute) -> Vec<f32>) {
    let wanted = work(&compute(Isa::Scalar, 1));
    assert!(wanted.iter().all(|x| x.is_finite()), "{what}");
    for isa in ISAS.iter() {
        for threads in [1, 2, 3, 8] {
            let got = work(&compute(*isa, threads));
            assert_same_bits(&format!("{what}, {isa:?}, {threads} threads"), &got, &wanted);
        }
    }
}

#[test]
fn elementwise_bits_are_the_same_everywhere() {
    for n in SIZES.into_iter().chain([10_007]) {
        let mut random = Random(n as u64);
        let (x, y) = (random.vec(n, 30.0), random.vec(n, 90.0));
        everywhere(&format!("elementwise {n}"), |compute| {
            let mut all = Vec::new();
            let mut record = |f: &dyn Fn(&mut [f32])| {
                let mut x = x.clone();
                f(&mut x);
                all.extend(x);
            };
            record(&|x| compute.sigmoid_gate(x, &y));
            record(&|x| compute.sigmoid(x));
            record(&|x| compute.silu_and_mul(x, &y));
            record(&|x| compute.situ_and_mul(x, &y, 4.0, 25.0));
            record(&|x| compute.add(x, &y));
            record(&|x| compute.add_scaled(x, 0.3, &y));
            all
        });
    }
}

#[test]
fn norm_bits_are_the_same_everywhere() {
    for (rows, dim) in SIZES.into_iter().map(|dim| (3, dim)).chain([(64, 1000)]) {
        let mut random = Random(dim as u64);
        let (x, gate, weight) = (random.vec(rows * dim, 2.0), random.vec(rows * dim, 3.0), random.vec(dim, 1.0));
        everywhere(&format!("norms {rows} x {dim}"), |compute| {
            let (mut a, mut b, mut c) = (vec![f32::NAN; x.len()], x.clone(), x.clone());
            compute.rms_norm(&x, &weight, 1e-5, &mut a);
            compute.gated_rms_norm(&mut b, &gate, &weight, 1e-5);
            compute.l2_norm(&mut c, dim, 1e-6, 0.1);
            [a, b, c].concat()
        });
    }
}

#[test]
fn short_conv_bits_do_not_depend_on_the_cut() {
    let taps = 4;
    for (rows, channels) in SIZES.into_iter().map(|channels| (5, channels)).chain([(20, 1500)]) {
        let mut random = Random(channels as u64);
        let window = random.vec((taps - 1 + rows) * channels, 1.0);
        let weight = random.vec(taps * channels, 1.0);
        let run = |compute: &Compute, cuts: &[usize]| {
            let mut out = vec![f32::NAN; rows * channels];
            for cut in cuts.windows(2) {
                let (from, to) = (cut[0] * channels, cut[1] * channels);
                let window = &window[from..to + (taps - 1) * channels];
                compute.short_conv(window, &weight, channels, &mut out[from..to]);
            }
            out
        };
        everywhere(&format!("short_conv {rows} x {channels}"), |compute| run(compute, &[0, rows]));
        let whole = run(&compute(Isa::Scalar, 1), &[0, rows]);
        assert_same_bits("cut", &run(&compute(ISAS[0], 2), &[0, 1, 2, rows]), &whole);
    }
}

#[test]
fn kda_decay_bits_are_the_same_everywhere() {
    for (rows, heads, dim) in [(1, 1, 1), (3, 2, 17), (2, 3, 40), (30, 4, 128)] {
        let mut random = Random(dim as u64);
        let (g, bias) = (random.vec(rows * heads * dim, 8.0), random.vec(heads * dim, 1.0));
        let a = random.between(heads, 0.1, 4.0);
        everywhere(&format!("kda_decay {rows} x {heads} x {dim}"), |compute| {
            let (mut bounded, mut free) = (g.clone(), g.clone());
            compute.kda_decay(&mut bounded, &a, &bias, Some(-5.0));
            compute.kda_decay(&mut free, &a, &bias, None);
            [bounded, free].concat()
        });
    }
}

struct KdaCase {
    heads: usize,
    dim: usize,
    state: Vec<f32>,
    q: Vec<f32>,
    k: Vec<f32>,
    alpha: Vec<f32>,
    v: Vec<f32>,
    beta: Vec<f32>,
}

impl KdaCase {
    fn new(rows: usize, heads: usize, dim: usize) -> Self {
        let mut random = Random((rows * 1000 + dim) as u64);
        let n = rows * heads * dim;
        let unit = (dim as f32).powf(-0.5);
        Self {
            heads,
            dim,
            state: random.vec(heads * dim * dim, 0.5),
            q: random.vec(n, unit),
            k: random.vec(n, unit),
            alpha: random.between(n, 0.01, 1.0),
            v: random.vec(n, 1.0),
            beta: random.between(rows * heads, 0.0, 1.0),
        }
    }

    /// Outputs (unless `state_only`), then the state, for rows cut at `cuts`.
    fn run(&self, compute: &Compute, cuts: &[usize], state_only: bool) -> Vec<f32> {
        let mut state = self.state.clone();
        let mut out = vec![f32::NAN; if state_only { 0 } else { self.v.len() }];
        for cut in cuts.windows(2) {
            let part = cut[0] * self.heads * self.dim..cut[1] * self.heads * self.dim;
            let beta = &self.beta[cut[0] * self.heads..cut[1] * self.heads];
            let wanted = if state_only { 0..0 } else { part.clone() };
            let (k, alpha, v) = (&self.k[part.clone()], &self.alpha[part.clone()], &self.v[part]);
            let (q, out) = (&self.q[wanted.clone()], &mut out[wanted]);
            compute.kda_rows(&mut state, self.heads, self.dim, q, k, alpha, v, beta, out);
        }
        out.extend(state);
        out
    }
}

#[test]
fn delta_rule_bits_do_not_depend_on_the_cut_nor_on_whether_outputs_are_wanted() {
    for (rows, heads, dim) in SIZES.into_iter().map(|dim| (7, 2, dim)).chain([(70, 5, 80)]) {
        let case = KdaCase::new(rows, heads, dim);
        let what = format!("kda_rows {rows} x {heads} x {dim}");
        everywhere(&what, |compute| case.run(compute, &[0, rows], false));
        let whole = case.run(&compute(Isa::Scalar, 1), &[0, rows], false);
        let state = &whole[case.v.len()..];
        let one_by_one: Vec<usize> = (0..=rows).collect();
        for isa in ISAS.iter() {
            let compute = compute(*isa, 2);
            assert_same_bits(&format!("{what} row by row"), &case.run(&compute, &one_by_one, false), &whole);
            assert_same_bits(&format!("{what} in two"), &case.run(&compute, &[0, 3, rows], false), &whole);
            assert_same_bits(&format!("{what} state"), &case.run(&compute, &[0, rows], true), state);
        }
    }
}

#[test]
fn attn_res_mix_bits_do_not_depend_on_the_cut() {
    for (count, rows, hidden) in [(1, 1, 1), (2, 3, 17), (9, 5, 160), (16, 3, 33), (40, 2, 48), (9, 40, 300)] {
        let mut random = Random(hidden as u64);
        let candidates: Vec<Vec<f32>> = (0..count).map(|_| random.vec(rows * hidden, 1.0)).collect();
        let query = random.vec(hidden, 1.0);
        let run = |compute: &Compute, cuts: &[usize]| {
            let mut out = vec![f32::NAN; rows * hidden];
            for cut in cuts.windows(2) {
                let part = cut[0] * hidden..cut[1] * hidden;
                let candidates: Vec<&[f32]> = candidates.iter().map(|c| &c[part.clone()]).collect();
                compute.attn_res_mix(&candidates, &query, 1e-5, &mut out[part]);
            }
            out
        };
        everywhere(&format!("attn_res_mix {count} x {rows} x {hidden}"), |compute| run(compute, &[0, rows]));
        let whole = run(&compute(Isa::Scalar, 1), &[0, rows]);
        let one_by_one: Vec<usize> = (0..=rows).collect();
        assert_same_bits("row by row", &run(&compute(ISAS[0], 3), &one_by_one), &whole);
    }
}

#[test]
fn latent_attention_bits_do_not_depend_on_the_cut() {
    let cases = [(1, 1, 1, 1), (40, 3, 17, 5), (70, 5, 28, 20), (9, 33, 33, 33), (130, 18, 40, 36), (35, 2, 576, 512)];
    for (rows, heads, width, rank) in cases {
        let mut random = Random((rows * width) as u64);
        let (q, cache) = (random.vec(rows * heads * width, 3.0), random.vec(rows * width, 1.0));
        let run = |compute: &Compute, cuts: &[usize]| {
            let mut out = vec![f32::NAN; rows * heads * rank];
            for cut in cuts.windows(2) {
                let q = &q[cut[0] * heads * width..cut[1] * heads * width];
                let out = &mut out[cut[0] * heads * rank..cut[1] * heads * rank];
                compute.latent_attention(q, &cache[..cut[1] * width], cut[0], heads, width, rank, 0.2, out);
            }
            out
        };
        let what = format!("latent_attention {rows} x {heads} x {width}/{rank}");
        everywhere(&what, |compute| run(compute, &[0, rows]));
        let whole = run(&compute(Isa::Scalar, 1), &[0, rows]);
        let one_by_one: Vec<usize> = (0..=rows).collect();
        let sevens: Vec<usize> = (0..rows).step_by(7).chain([rows]).collect();
        for isa in ISAS.iter() {
            let compute = compute(*isa, 3);
            assert_same_bits(&format!("{what} row by row"), &run(&compute, &one_by_one), &whole);
            assert_same_bits(&format!("{what} by sevens"), &run(&compute, &sevens), &whole);
        }
    }
}

/// FNV-1a over the bits.
fn hash(values: &[f32]) -> u64 {
    let bytes = values.iter().flat_map(|x| x.to_bits().to_le_bytes());
    bytes.fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0100_0000_01b3))
}

/// Of the fixed workload. Changes with the definition of any operation and with nothing else.
const HASH: u64 = 0x8254_9f93_2236_f0f9;

/// The same constant on every architecture: what pins ARM to x86 when they cannot be compared side by side.
#[test]
fn a_fixed_workload_has_the_pinned_hash() {
    for isa in ISAS.iter() {
        let compute = compute(*isa, 2);
        let mut random = Random(2);
        let (rows, heads, dim) = (37, 3, 72);
        let n = rows * heads * dim;
        let (mut q, mut k) = (random.vec(n, 1.0), random.vec(n, 1.0));
        let (mut alpha, mut v, gate) = (random.vec(n, 6.0), random.vec(n, 2.0), random.vec(n, 5.0));
        let mut free = alpha.clone();
        let mut beta = random.vec(rows * heads, 3.0);
        let (a, bias, weight) = (random.between(heads, 0.2, 3.0), random.vec(heads * dim, 1.0), random.vec(dim, 1.0));
        compute.l2_norm(&mut q, dim, 1e-6, 0.1);
        compute.l2_norm(&mut k, dim, 1e-6, 1.0);
        compute.kda_decay(&mut alpha, &a, &bias, Some(-5.0));
        compute.kda_decay(&mut free, &a, &bias, None);
        compute.sigmoid(&mut beta);
        compute.situ_and_mul(&mut v, &gate, 4.0, 25.0);
        let (mut state, mut out) = (vec![0.0; heads * dim * dim], vec![f32::NAN; n]);
        compute.kda_rows(&mut state, heads, dim, &q, &k, &alpha, &v, &beta, &mut out);
        compute.gated_rms_norm(&mut out, &gate, &weight, 1e-5);

        let channels = heads * dim;
        let mut conv = vec![f32::NAN; (rows - 3) * channels];
        compute.short_conv(&gate, &random.vec(4 * channels, 1.0), channels, &mut conv);
        let mut mixed = vec![f32::NAN; n];
        compute.attn_res_mix(&[&q, &v, &out], &bias, 1e-5, &mut mixed);
        compute.silu_and_mul(&mut mixed, &gate);
        compute.add_scaled(&mut mixed, 0.7, &v);
        compute.add(&mut mixed, &free);
        let mut normed = vec![f32::NAN; n];
        compute.rms_norm(&mixed, &bias, 1e-6, &mut normed);
        compute.sigmoid_gate(&mut normed, &out);
        let (width, rank) = (dim, dim - 11);
        let mut attended = vec![f32::NAN; rows * heads * rank];
        compute.latent_attention(&normed, &gate[..rows * width], 0, heads, width, rank, 0.4, &mut attended);

        let all = [state, out, conv, mixed, normed, attended, free].concat();
        assert!(all.iter().all(|x| x.is_finite()));
        let got = hash(&all);
        assert!(got == HASH, "{isa:?}: got {got:#018x}, wanted {HASH:#018x}");
    }
}
