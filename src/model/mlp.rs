//! The dense MLP of the first layers and the fused shared experts: down(act(gate x, up x)).

use super::scratch::Carver;
use crate::config::Activation;
use crate::kernels::Compute;
use crate::trunk::Tensor;

/// `gate_proj`, `up_proj` `[inner, hidden]`, `down_proj` `[hidden, inner]`.
pub(super) struct Weights {
    pub(super) gate_proj: Tensor,
    pub(super) up_proj: Tensor,
    pub(super) down_proj: Tensor,
}

/// Floats of scratch for `rows` rows of an MLP of inner width `inner`.
pub(super) fn work_floats(rows: usize, inner: usize) -> usize {
    2 * rows * inner
}

/// gate = act(gate, up), any number of values.
pub(super) fn activate(compute: &Compute, activation: Activation, gate: &mut [f32], up: &[f32]) {
    match activation {
        Activation::Silu => compute.silu_and_mul(gate, up),
        Activation::Situ { beta, linear_beta } => compute.situ_and_mul(gate, up, beta, linear_beta),
    }
}

/// out `[rows, hidden]` = the MLP of x `[rows, hidden]`.
pub(super) fn forward(
    compute: &Compute,
    w: &Weights,
    activation: Activation,
    x: &[f32],
    mut work: Carver<'_>,
    out: &mut [f32],
) {
    let gate_proj = w.gate_proj.matrix();
    let rows = x.len() / gate_proj.cols;
    let gate = work.take(rows * gate_proj.rows);
    let up = work.take(rows * gate_proj.rows);
    compute.matmul_each(&[gate_proj, w.up_proj.matrix()], x, &mut [&mut *gate, &mut *up]);
    activate(compute, activation, gate, up);
    compute.matmul(w.down_proj.matrix(), gate, out);
}
