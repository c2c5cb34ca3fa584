//! Every golden case of the vector operations, on every instruction set.

use deltafin::kernels::Compute;

use crate::{assert_close, each_isa, floats, ints, shape, transpose};

#[test]
fn rms_norm_matches_the_golden_rows_from_300_down_to_zero() {
    for case in ["rmsnorm.a", "rmsnorm.b"] {
        let field = |name: &str| floats(&format!("{case}.{name}"));
        let (x, weight, eps) = (field("x"), field("weight"), field("eps")[0]);
        each_isa(|compute| {
            let mut out = vec![f32::NAN; x.len()];
            compute.rms_norm(&x, &weight, eps, &mut out);
            assert_close(case, &out, &field("out"));
        });
    }
}

#[test]
fn gated_rms_norm_matches_the_golden_rows() {
    let field = |name: &str| floats(&format!("gated_rmsnorm.{name}"));
    each_isa(|compute| {
        let mut x = field("x");
        compute.gated_rms_norm(&mut x, &field("gate"), &field("weight"), field("eps")[0]);
        assert_close("gated_rmsnorm", &x, &field("out"));
    });
}

#[test]
fn activations_match_the_golden_values_up_to_1000() {
    each_isa(|compute| {
        let field = |name: &str| floats(&format!("situ_and_mul.{name}"));
        let mut gate = field("gate");
        compute.situ_and_mul(&mut gate, &field("up"), field("beta")[0], field("linear_beta")[0]);
        assert_close("situ_and_mul", &gate, &field("out"));

        let field = |name: &str| floats(&format!("swiglu.{name}"));
        let mut gate = field("gate");
        compute.silu_and_mul(&mut gate, &field("up"));
        assert_close("swiglu", &gate, &field("out"));
    });
}

#[test]
fn short_conv_matches_the_golden_steps() {
    let [channels, _, taps] = shape("short_conv.weight")[..] else { panic!("unexpected rank") };
    let weight = transpose(&floats("short_conv.weight"), 1, channels, taps);
    for (case, has_state) in [("prefill", false), ("prefill_state", true), ("two", false), ("step", true)] {
        let field = |name: &str| floats(&format!("short_conv.{case}.{name}"));
        // The stored state is one row longer than the history that the next step meets.
        let history = match has_state {
            true => transpose(&field("state_in"), 1, channels, taps)[channels..].to_vec(),
            false => vec![0.0; (taps - 1) * channels],
        };
        let window = [history, field("x")].concat();
        each_isa(|compute| {
            let mut out = vec![f32::NAN; window.len() - (taps - 1) * channels];
            compute.short_conv(&window, &weight, channels, &mut out);
            assert_close(case, &out, &field("out"));
        });
    }
}

#[test]
fn kda_decay_matches_both_golden_gates() {
    for case in ["kda_gate.lower", "kda_gate.softplus"] {
        let field = |name: &str| floats(&format!("{case}.{name}"));
        let heads = shape(&format!("{case}.f"))[1];
        let a: Vec<f32> = field("A_log")[..heads].iter().map(|a| a.exp()).collect();
        let bound = case.ends_with("lower").then(|| field("lower_bound")[0]);
        let wanted: Vec<f32> = field("out").iter().map(|log_alpha| log_alpha.exp()).collect();
        each_isa(|compute| {
            let mut g = field("f");
            compute.kda_decay(&mut g, &a, &field("dt_bias"), bound);
            assert_close(case, &g, &wanted);
        });
    }
}

#[test]
fn the_delta_rule_matches_the_golden_outputs_and_states() {
    for case in ["kda.t1", "kda.t37", "kda.t70"] {
        let field = |name: &str| floats(&format!("{case}.{name}"));
        let [_, heads, dim] = shape(&format!("{case}.q"))[..] else { panic!("unexpected rank") };
        each_isa(|compute| {
            let (mut q, mut k, mut beta) = (field("q"), field("k"), field("beta_logit"));
            compute.l2_norm(&mut q, dim, 1e-6, (dim as f32).powf(-0.5));
            compute.l2_norm(&mut k, dim, 1e-6, 1.0);
            compute.sigmoid(&mut beta);
            let alpha: Vec<f32> = field("g").iter().map(|g| g.exp()).collect();
            let mut state = transpose(&field("state_in"), heads, dim, dim);
            let mut out = vec![f32::NAN; q.len()];
            compute.kda_rows(&mut state, heads, dim, &q, &k, &alpha, &field("v"), &beta, &mut out);
            assert_close(case, &out, &field("out"));
            assert_close(case, &transpose(&state, heads, dim, dim), &field("state_out"));
        });
    }
}

#[test]
fn attn_res_mix_matches_one_to_eight_golden_blocks() {
    for blocks in 1..=8 {
        let field = |name: &str| floats(&format!("attn_res.{blocks}.{name}"));
        let [rows, _, hidden] = shape(&format!("attn_res.{blocks}.blocks"))[..] else { panic!("unexpected rank") };
        let stored = field("blocks");
        let mut candidates = vec![Vec::new(); blocks];
        for row in 0..rows {
            for (i, candidate) in candidates.iter_mut().enumerate() {
                candidate.extend_from_slice(&stored[(row * blocks + i) * hidden..][..hidden]);
            }
        }
        candidates.push(field("prefix"));
        let candidates: Vec<&[f32]> = candidates.iter().map(Vec::as_slice).collect();
        let query: Vec<f32> = field("norm_weight").iter().zip(field("proj_weight")).map(|(n, p)| n * p).collect();
        each_isa(|compute| {
            let mut out = vec![f32::NAN; rows * hidden];
            compute.attn_res_mix(&candidates, &query, field("eps")[0], &mut out);
            assert_close(&format!("attn_res.{blocks}"), &out, &field("out"));
        });
    }
}

/// x `[T, cols]` · Wᵀ, plainly.
fn project(x: &[f32], weight: &[f32], cols: usize) -> Vec<f32> {
    let dot = |row: &[f32], w: &[f32]| row.iter().zip(w).map(|(a, b)| f64::from(*a) * f64::from(*b)).sum::<f64>();
    x.chunks_exact(cols).flat_map(|row| weight.chunks_exact(cols).map(|w| dot(row, w) as f32)).collect()
}

#[test]
fn latent_attention_matches_golden_mla_whole_and_in_cached_steps() {
    let weight = |name: &str| floats(&format!("mla.{name}.weight"));
    let [heads, nope, rope, v_dim, rank, q_rank] = ints("mla.dims")[..] else { panic!("unexpected dims") };
    let (x, width) = (floats("mla.x"), rank + rope);
    let rows = shape("mla.x")[0];
    let hidden = x.len() / rows;
    let kv_b = weight("kv_b_proj");
    let (latent, rope_keys) = (floats("mla.latent"), floats("mla.rope"));
    let cache: Vec<f32> = latent.chunks(rank).zip(rope_keys.chunks(rope)).flat_map(|(c, k)| [c, k].concat()).collect();

    let check = |compute: &Compute, steps: &[usize]| {
        let mut low = vec![0.0; rows * q_rank];
        let projected = project(&x, &weight("q_a_proj"), hidden);
        compute.rms_norm(&projected, &weight("q_a_layernorm"), 1e-6, &mut low);
        let q = project(&low, &weight("q_b_proj"), q_rank);
        // The key half of kv_b moves into the query: q_nope · (W c) = (Wᵀ q_nope) · c.
        let mut absorbed = Vec::new();
        for (i, q) in q.chunks_exact(nope + rope).enumerate() {
            let head = i % heads * (nope + v_dim);
            for column in 0..rank {
                let column = (0..nope).map(|d| f64::from(q[d]) * f64::from(kv_b[(head + d) * rank + column]));
                absorbed.push(column.sum::<f64>() as f32);
            }
            absorbed.extend_from_slice(&q[nope..]);
        }
        let scale = ((nope + rope) as f32).powf(-0.5);
        let mut attended = vec![f32::NAN; rows * heads * rank];
        let mut past = 0;
        for step in steps {
            compute.latent_attention(
                &absorbed[past * heads * width..(past + step) * heads * width],
                &cache[..(past + step) * width],
                past,
                heads,
                width,
                rank,
                scale,
                &mut attended[past * heads * rank..(past + step) * heads * rank],
            );
            past += step;
        }
        let mut values = Vec::new();
        for (i, attended) in attended.chunks_exact(rank).enumerate() {
            let first = i % heads * (nope + v_dim) + nope;
            values.extend(project(attended, &kv_b[first * rank..(first + v_dim) * rank], rank));
        }
        assert_close("mla.attn", &values, &floats("mla.attn"));
        let mut gate = project(&x, &weight("g_proj"), hidden);
        gate.truncate(values.len());
        compute.sigmoid_gate(&mut values, &gate);
        assert_close("mla.out", &project(&values, &weight("o_proj"), heads * v_dim), &floats("mla.out"));
    };
    each_isa(|compute| {
        check(compute, &[rows]);
        check(compute, &[rows - 3, 1, 1, 1]);
    });
}
