//! Long sequences and extreme values against float64.

use crate::{Random, compute, each_isa};
use deltafin::kernels::Isa;

/// The delta rule in float64: state `[d_k, d_v]`; returns the outputs.
fn delta_rule(state: &mut [f64], dim: usize, q: &[f32], k: &[f32], alpha: &[f32], v: &[f32], beta: &[f32]) -> Vec<f64> {
    let mut out = Vec::new();
    for (row, beta) in beta.iter().enumerate() {
        let at = |x: &[f32], i: usize| f64::from(x[row * dim + i]);
        let mut error: Vec<f64> = (0..dim).map(|c| at(v, c)).collect();
        for key in 0..dim {
            for c in 0..dim {
                state[key * dim + c] *= at(alpha, key);
                error[c] -= state[key * dim + c] * at(k, key);
            }
        }
        let mut o = vec![0.0; dim];
        for key in 0..dim {
            for c in 0..dim {
                state[key * dim + c] += f64::from(*beta) * at(k, key) * error[c];
                o[c] += state[key * dim + c] * at(q, key);
            }
        }
        out.extend(o);
    }
    out
}

/// Largest difference, and largest wanted magnitude.
fn spread(got: &[f32], wanted: &[f64]) -> (f64, f64) {
    assert_eq!(got.len(), wanted.len());
    let difference = got.iter().zip(wanted).map(|(got, wanted)| (f64::from(*got) - wanted).abs());
    // A NaN must not be swallowed by `max`.
    let difference = difference.fold(0.0, |a: f64, b| if b <= a { a } else { b });
    (difference, wanted.iter().fold(0.0, |a, b| b.abs().max(a)))
}

/// The stated tolerance of the recurrence: 4,096 tokens stay within 2e-6 of the largest value, for the outputs and for
/// the state, with decays from 0.01 to 1 in one head (a few channels never forget).
#[test]
fn the_delta_rule_stays_within_2e_6_of_float64_over_4096_tokens() {
    let (rows, dim) = (4096, 64);
    let mut random = Random(62);
    let n = rows * dim;
    let (mut q, mut k, v) = (random.vec(n, 1.0), random.vec(n, 1.0), random.vec(n, 1.0));
    let mut alpha = random.between(n, 0.01, 1.0);
    for (i, alpha) in alpha.iter_mut().enumerate() {
        match i % dim % 4 {
            0 => {}
            1 => *alpha = 0.999 + 0.001 * *alpha,
            2 => *alpha = 1.0,
            _ => *alpha = alpha.sqrt(),
        }
    }
    let beta = random.between(rows, 0.0, 1.0);
    let scalar = compute(Isa::Scalar, 1);
    scalar.l2_norm(&mut q, dim, 1e-6, (dim as f32).powf(-0.5));
    scalar.l2_norm(&mut k, dim, 1e-6, 1.0);
    let mut wanted_state = vec![0.0; dim * dim];
    let wanted = delta_rule(&mut wanted_state, dim, &q, &k, &alpha, &v, &beta);
    each_isa(|compute| {
        let (mut state, mut out) = (vec![0.0; dim * dim], vec![f32::NAN; n]);
        compute.kda_rows(&mut state, 1, dim, &q, &k, &alpha, &v, &beta, &mut out);
        for (what, (difference, largest)) in [("out", spread(&out, &wanted)), ("state", spread(&state, &wanted_state))]
        {
            println!("{what}: {difference:e} of {largest}");
            assert!(difference <= 2e-6 * largest, "{what}: {difference:e} of {largest}");
        }
    });
}

/// Attention of the last row in float64.
fn attention(q: &[f32], cache: &[f32], width: usize, rank: usize, scale: f32) -> Vec<f64> {
    let rows = || cache.chunks_exact(width);
    let score =
        |row: &[f32]| row.iter().zip(q).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>() * f64::from(scale);
    let largest = rows().map(score).fold(f64::NEG_INFINITY, f64::max);
    let weights: Vec<f64> = rows().map(|row| (score(row) - largest).exp()).collect();
    let total: f64 = weights.iter().sum();
    let value = |c: usize| rows().zip(&weights).map(|(row, p)| p * f64::from(row[c])).sum::<f64>() / total;
    (0..rank).map(value).collect()
}

#[test]
fn attention_over_5000_keys_agrees_with_float64_at_any_spread_of_scores() {
    let (keys, heads, width, rank) = (5000, 3, 48, 40);
    let mut random = Random(5);
    let cache = random.vec(keys * width, 1.0);
    let q = random.vec(heads * width, 1.0);
    // Scores of a few units, and of ± 80 and more.
    for scale in [0.3, 20.0] {
        each_isa(|compute| {
            let mut out = vec![f32::NAN; heads * rank];
            compute.latent_attention(&q, &cache, keys - 1, heads, width, rank, scale, &mut out);
            for (q, out) in q.chunks(width).zip(out.chunks(rank)) {
                let (difference, _) = spread(out, &attention(q, &cache, width, rank, scale));
                println!("scale {scale}: {difference:e}");
                // A score of 80 has an error of some 1e-5 itself, which is the relative error of its weight.
                assert!(difference <= if scale < 1.0 { 2e-6 } else { 4e-5 }, "scale {scale}: {difference:e}");
            }
        });
    }
}

#[test]
fn a_later_row_sees_one_key_more_and_the_first_sees_itself_alone() {
    let (rows, heads, width, rank) = (67, 2, 20, 16);
    let mut random = Random(6);
    let (q, cache) = (random.vec(rows * heads * width, 1.0), random.vec(rows * width, 1.0));
    each_isa(|compute| {
        let mut out = vec![f32::NAN; rows * heads * rank];
        compute.latent_attention(&q, &cache, 0, heads, width, rank, 1.0, &mut out);
        for head in 0..heads {
            assert_eq!(&out[head * rank..][..rank], &cache[..rank], "one key: its latent, exactly");
        }
        for i in 0..rows * heads {
            let seen = &cache[..(i / heads + 1) * width];
            let wanted = attention(&q[i * width..][..width], seen, width, rank, 1.0);
            let (difference, _) = spread(&out[i * rank..][..rank], &wanted);
            assert!(difference <= 2e-6, "row {} head {}: {difference:e}", i / heads, i % heads);
        }
    });
}

#[test]
fn equal_scores_average_and_one_huge_score_takes_all() {
    let (keys, width, rank) = (100, 17, 16);
    let mut cache = vec![0.5; keys * width];
    for (key, row) in cache.chunks_mut(width).enumerate() {
        row[0] = key as f32;
        row[rank] = if key == 70 { 300.0 } else { -300.0 };
    }
    let mut q = vec![0.0; width];
    each_isa(|compute| {
        let mut out = vec![f32::NAN; rank];
        compute.latent_attention(&q, &cache, keys - 1, 1, width, rank, 1.0, &mut out);
        assert_eq!((out[0], out[1]), (49.5, 0.5));
    });
    q[rank] = 1.0;
    each_isa(|compute| {
        let mut out = vec![f32::NAN; rank];
        compute.latent_attention(&q, &cache, keys - 1, 1, width, rank, 1.0, &mut out);
        assert_eq!((out[0], out[1]), (70.0, 0.5));
    });
}

#[test]
fn a_value_that_is_not_a_number_is_never_hidden() {
    let (keys, width, rank) = (70, 20, 16);
    each_isa(|compute| {
        for key in [0, 31, 32, 69] {
            let mut cache = vec![0.25; keys * width];
            cache[key * width + 18] = f32::NAN;
            let mut out = vec![0.0; rank];
            compute.latent_attention(&vec![1.0; width], &cache, keys - 1, 1, width, rank, 1.0, &mut out);
            assert!(out.iter().all(|x| x.is_nan()), "key {key}");
        }
        let bad = [1.0, f32::NAN, 1.0];
        let mut out = [0.0; 3];
        compute.attn_res_mix(&[&[1.0; 3], &bad], &[1.0; 3], 1e-5, &mut out);
        assert!(out.iter().all(|x| x.is_nan()));
        compute.rms_norm(&bad, &[1.0; 3], 1e-5, &mut out);
        assert!(out.iter().all(|x| x.is_nan()));
        let mut x = bad;
        compute.situ_and_mul(&mut x, &[1.0; 3], 4.0, 25.0);
        assert!(x[1].is_nan() && x[0].is_finite());
        x = bad;
        compute.sigmoid(&mut x);
        assert!(x[1].is_nan() && x[0].is_finite());
    });
}

#[test]
fn activations_saturate_without_nan() {
    let x = [-1e30, -1000.0, -104.0, -90.0, 0.0, -0.0, 90.0, 1000.0, 1e30, f32::MIN_POSITIVE];
    each_isa(|compute| {
        let mut y = x;
        compute.sigmoid(&mut y);
        assert_eq!((y[0], y[1], y[4], y[7], y[8]), (0.0, 0.0, 0.5, 1.0, 1.0));
        y = x;
        compute.situ_and_mul(&mut y, &x, 4.0, 25.0);
        assert_eq!((y[0].abs(), y[7], y[8]), (0.0, 100.0, 100.0));
        y = x;
        compute.silu_and_mul(&mut y, &[1.0; 10]);
        assert!(y.iter().all(|y| y.is_finite()), "{y:?}");
        for bound in [Some(-5.0), None] {
            y = x;
            compute.kda_decay(&mut y, &[1.0], &[0.0], bound);
            assert!(y.iter().all(|y| (0.0..=1.0).contains(y)), "{bound:?}: {y:?}");
        }
    });
}

#[test]
fn no_rows_are_no_work() {
    each_isa(|compute| {
        compute.rms_norm(&[], &[1.0; 4], 1e-5, &mut []);
        compute.l2_norm(&mut [], 4, 1e-6, 1.0);
        compute.sigmoid(&mut []);
        compute.short_conv(&[0.0; 6], &[1.0; 8], 2, &mut []);
        compute.kda_decay(&mut [], &[1.0], &[0.0; 4], None);
        let mut state = [2.0; 4];
        compute.kda_rows(&mut state, 1, 2, &[], &[], &[], &[], &[], &mut []);
        assert_eq!(state, [2.0; 4]);
        compute.attn_res_mix(&[&[]], &[1.0; 4], 1e-5, &mut []);
        compute.latent_attention(&[], &[0.0; 6], 2, 1, 3, 2, 1.0, &mut []);
    });
}

#[test]
fn lengths_that_do_not_fit_are_refused_with_their_names() {
    let compute = compute(Isa::Scalar, 1);
    let message = |f: &dyn Fn()| {
        let caught = std::panic::catch_unwind(std::panic::AssertUnwindSafe(f)).expect_err("must be refused");
        caught.downcast_ref::<String>().cloned().or(caught.downcast_ref::<&str>().map(|s| (*s).to_owned())).unwrap()
    };
    let has = |needle: &str, f: &dyn Fn()| {
        let message = message(f);
        assert!(message.contains(needle), "{message:?} lacks {needle:?}");
    };
    has("x has 5 values", &|| compute.rms_norm(&[0.0; 5], &[1.0; 4], 1e-5, &mut [0.0; 5]));
    has("gate must", &|| compute.gated_rms_norm(&mut [0.0; 4], &[0.0; 8], &[1.0; 4], 1e-5));
    has("up must", &|| compute.silu_and_mul(&mut [0.0; 4], &[0.0; 3]));
    has("rows of the window", &|| compute.short_conv(&[0.0; 8], &[0.0; 8], 2, &mut [0.0; 4]));
    has("state must be [1, 2, 2]", &|| {
        compute.kda_rows(&mut [0.0; 3], 1, 2, &[0.0; 2], &[0.0; 2], &[1.0; 2], &[0.0; 2], &[1.0], &mut []);
    });
    has("at least one candidate", &|| compute.attn_res_mix(&[], &[1.0; 2], 1e-5, &mut [0.0; 2]));
    has("cache must be [1 + 1, 3]", &|| {
        compute.latent_attention(&[0.0; 3], &[0.0; 3], 1, 1, 3, 2, 1.0, &mut [0.0; 2]);
    });
}
