//! A KDA layer's attention: projections, short convolutions, decay, the gated delta rule, output gate.
//!
//! Source: Kimi Linear (arXiv 2510.26692), section 3; `KimiDeltaAttention` of the released modelling code.

use super::scratch::Carver;
use super::sequence::{KdaState, LayerState};
use super::step::Segment;
use crate::config::ModelConfig;
use crate::kernels::Compute;
use crate::trunk::Tensor;

/// Epsilon under the root of q's and k's norm.
const L2_NORM_EPS: f32 = 1e-6;

/// C = heads · head_dim channels.
pub(super) struct Weights {
    /// `[C, hidden_size]` each.
    pub(super) q_proj: Tensor,
    pub(super) k_proj: Tensor,
    pub(super) v_proj: Tensor,
    /// Convolution taps of q, k, v, each `[taps, C]` (transposed from the checkpoint's `[C, 1, taps]`).
    pub(super) conv: [Vec<f32>; 3],
    /// Decay: `[head_dim, hidden_size]`, `[C, head_dim]`.
    pub(super) f_a_proj: Tensor,
    pub(super) f_b_proj: Tensor,
    /// exp(A_log) `[heads]`.
    pub(super) a: Vec<f32>,
    /// `[C]`.
    pub(super) dt_bias: Vec<f32>,
    /// `[heads, hidden_size]`.
    pub(super) b_proj: Tensor,
    pub(super) gate: Gate,
    /// `[head_dim]`.
    pub(super) o_norm: Vec<f32>,
    /// `[hidden_size, C]`.
    pub(super) o_proj: Tensor,
}

/// The output gate's projection.
pub(super) enum Gate {
    /// `g_proj` `[C, hidden_size]`.
    Full(Tensor),
    /// `g_a_proj` `[head_dim, hidden_size]`, `g_b_proj` `[C, head_dim]`.
    LowRank(Tensor, Tensor),
}

/// Floats of scratch for `rows` rows.
pub(super) fn work_floats(config: &ModelConfig, rows: usize) -> usize {
    let kda = &config.kda;
    let channels = kda.num_heads * kda.head_dim;
    let window = (kda.short_conv_kernel_size - 1 + rows) * channels;
    let state = channels * kda.head_dim;
    6 * rows * channels + 2 * rows * kda.head_dim + rows * kda.num_heads + window + state
}

/// out `[rows, hidden_size]` = attention of the normed rows x of all `segments`; `layer` picks their states.
#[expect(clippy::too_many_arguments, reason = "one call site")]
pub(super) fn forward(
    compute: &Compute,
    config: &ModelConfig,
    w: &Weights,
    layer: usize,
    segments: &mut [Segment<'_>],
    x: &[f32],
    mut work: Carver<'_>,
    out: &mut [f32],
) {
    let (heads, dim) = (config.kda.num_heads, config.kda.head_dim);
    let channels = heads * dim;
    let rows = x.len() / config.hidden_size;
    let q = work.take(rows * channels);
    let k = work.take(rows * channels);
    let v = work.take(rows * channels);
    let decay = work.take(rows * channels);
    let gate = work.take(rows * channels);
    let o = work.take(rows * channels);
    let f_low = work.take(rows * dim);
    let g_low = work.take(rows * dim);
    let beta = work.take(rows * heads);

    let on_x = [&w.q_proj, &w.k_proj, &w.v_proj, &w.f_a_proj, &w.b_proj].map(Tensor::matrix);
    match &w.gate {
        Gate::Full(g_proj) => {
            let on_x = [on_x[0], on_x[1], on_x[2], on_x[3], on_x[4], g_proj.matrix()];
            compute.matmul_each(&on_x, x, &mut [&mut *q, &mut *k, &mut *v, &mut *f_low, &mut *beta, &mut *gate]);
        }
        Gate::LowRank(g_a_proj, g_b_proj) => {
            let on_x = [on_x[0], on_x[1], on_x[2], on_x[3], on_x[4], g_a_proj.matrix()];
            compute.matmul_each(&on_x, x, &mut [&mut *q, &mut *k, &mut *v, &mut *f_low, &mut *beta, &mut *g_low]);
            compute.matmul(g_b_proj.matrix(), g_low, gate);
        }
    }
    compute.matmul(w.f_b_proj.matrix(), f_low, decay);
    compute.kda_decay(decay, &w.a, &w.dt_bias, config.kda.gate_lower_bound);
    compute.sigmoid(beta);

    let mut first = 0;
    for segment in segments.iter_mut() {
        let n = segment.tokens.len();
        let LayerState::Kda(state) = &mut segment.sequence.layers[layer] else {
            unreachable!("a sequence's layers are of the model's kinds")
        };
        let mut work = work.rest();
        let window = work.take((config.kda.short_conv_kernel_size - 1 + n) * channels);
        let span = first * channels..(first + n) * channels;
        for (i, x) in [&mut *q, &mut *k, &mut *v].into_iter().enumerate() {
            convolve(compute, state, i, &w.conv[i], channels, segment.tentative, window, &mut x[span.clone()]);
        }
        let (q, k) = (&mut q[span.clone()], &mut k[span.clone()]);
        compute.l2_norm(q, dim, L2_NORM_EPS, (1.0 / (dim as f64).sqrt()) as f32);
        compute.l2_norm(k, dim, L2_NORM_EPS, 1.0);
        let (v, alpha, o) = (&v[span.clone()], &decay[span.clone()], &mut o[span.clone()]);
        let beta = &beta[first * heads..(first + n) * heads];
        if segment.tentative {
            keep(state, k, alpha, v, beta);
            let scratch = work.take(state.state.len());
            scratch.copy_from_slice(&state.state);
            compute.kda_rows(scratch, heads, dim, q, k, alpha, v, beta, o);
        } else {
            compute.kda_rows(&mut state.state, heads, dim, q, k, alpha, v, beta, o);
        }
        first += n;
    }
    compute.gated_rms_norm(o, gate, &w.o_norm, config.rms_norm_eps);
    compute.matmul(w.o_proj.matrix(), o, out);
}

/// x `[rows, channels]` becomes its convolution `i` (0 q, 1 k, 2 v) behind the sequence's tail, which moves on, or the
/// window is kept when the rows are tentative.
#[expect(clippy::too_many_arguments, reason = "one call site")]
fn convolve(
    compute: &Compute,
    state: &mut KdaState,
    i: usize,
    weight: &[f32],
    channels: usize,
    tentative: bool,
    window: &mut [f32],
    x: &mut [f32],
) {
    let tail = state.conv[i].len();
    window[..tail].copy_from_slice(&state.conv[i]);
    window[tail..].copy_from_slice(x);
    compute.short_conv(window, weight, channels, x);
    if tentative {
        refill(&mut state.pending.windows[i], window);
    } else {
        state.conv[i].copy_from_slice(&window[window.len() - tail..]);
    }
}

/// Keeps what [`super::Sequence::commit`] needs to apply the rows later.
fn keep(state: &mut KdaState, k: &[f32], alpha: &[f32], v: &[f32], beta: &[f32]) {
    refill(&mut state.pending.k, k);
    refill(&mut state.pending.alpha, alpha);
    refill(&mut state.pending.v, v);
    refill(&mut state.pending.beta, beta);
}

fn refill(to: &mut Vec<f32>, from: &[f32]) {
    to.clear();
    to.extend_from_slice(from);
}
