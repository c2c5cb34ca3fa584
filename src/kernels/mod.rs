//! Maths on slices: one generic source over [`lanes::Lanes`], one table of safe functions an instruction set, and
//! [`Compute`], which splits outputs over threads. Kernels know shapes, not names.

mod lanes;

use crate::error::Result;
use crate::interrupt::Interrupt;

/// Stored weights of a matrix, row-major, little-endian, any alignment.
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// `[rows, cols]` bfloat16.
    Bf16(&'a [u8]),
    /// `[rows, cols]` f32.
    F32(&'a [u8]),
    /// Codes `[rows, cols/2]` (low nibble = even column) and E8M0 scales `[rows, cols/32]`.
    Mxfp4 {
        /// Two codes a byte.
        packed: &'a [u8],
        /// One exponent for 32 columns: value = code · 2^(scale − 127).
        scale: &'a [u8],
    },
}

/// A weight matrix `[rows, cols]`, used as `y = W x`.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The values.
    pub weights: Weights<'a>,
}

/// Instruction set to use; `None` in [`Compute::new`] means the fastest present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// The definition, in plain Rust.
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AArch64.
    Neon,
}

/// Kernels of one instruction set on a number of threads. Same bits for every instruction set and thread count.
pub struct Compute {
    _private: (),
}

#[expect(unused_variables, reason = "signatures")]
impl Compute {
    /// # Errors
    /// Kind `Usage` when `isa` is not available on this CPU (the message lists what is).
    pub fn new(isa: Option<Isa>, threads: usize, interrupt: Interrupt) -> Result<Self> {
        todo!()
    }

    /// Name of the instruction set in use: `scalar`, `avx2`, `avx512`, `neon`.
    pub fn isa_name(&self) -> &'static str {
        todo!()
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        todo!()
    }

    /// Runs `task(0) … task(n - 1)`, each once, over the threads; returns when all are done. Once the interrupt is
    /// raised the remaining tasks are skipped: callers check the interrupt before they use results.
    pub fn parallel(&self, n: usize, task: &(dyn Fn(usize) + Sync)) {
        todo!()
    }

    /// y `[T, w.rows]` = x `[T, w.cols]` · Wᵀ. T follows from the lengths.
    ///
    /// Each dot product runs in 16 partial sums by fused multiply-add (lane i takes columns i, i+16, …; columns missing
    /// from the last group count as w = 0, x = 0), then [`lanes::Lanes::sum`]'s tree.
    pub fn matmul(&self, w: Matrix<'_>, x: &[f32], y: &mut [f32]) {
        todo!()
    }

    /// Several matrices on the same x in one go: `y[i]` `[T, w[i].rows]`. Same bits as one by one.
    pub fn matmul_each(&self, w: &[Matrix<'_>], x: &[f32], y: &mut [&mut [f32]]) {
        todo!()
    }

    /// For each row t and head h: y `[T, heads, cols]` = Σ_d x `[T, heads, x_stride]`\[d\] · W_h\[d, :\], with W_h the
    /// rows `h · head_rows + first_row ..` of `w` (`[heads · head_rows, cols]`) and d < `depth`. Sum over d ascending by
    /// fused multiply-add from +0.0. Absorbs `kv_b`'s key half into the query.
    #[expect(clippy::too_many_arguments, reason = "shapes")]
    pub fn matmul_transposed_heads(
        &self,
        w: Matrix<'_>,
        heads: usize,
        head_rows: usize,
        first_row: usize,
        depth: usize,
        x: &[f32],
        x_stride: usize,
        y: &mut [f32],
    ) {
        todo!()
    }

    /// For each row t and head h: y `[T, heads, depth]` = W_h x `[T, heads, w.cols]`\[h\], with W_h the rows
    /// `h · head_rows + first_row ..+ depth` of `w`. Dot products as in [`Compute::matmul`]. Expands the attended latent
    /// to values.
    pub fn matmul_heads(
        &self,
        w: Matrix<'_>,
        heads: usize,
        head_rows: usize,
        first_row: usize,
        depth: usize,
        x: &[f32],
        y: &mut [f32],
    ) {
        todo!()
    }

    /// Rows of an embedding: out `[ids, cols]`.
    pub fn gather(&self, w: Matrix<'_>, ids: &[u32], out: &mut [f32]) {
        todo!()
    }

    /// RMSNorm of every row: out = x / sqrt(mean(x²) + eps) · weight, x and out `[T, weight.len()]`.
    pub fn rms_norm(&self, x: &[f32], weight: &[f32], eps: f32, out: &mut [f32]) {
        todo!()
    }

    /// x = rmsnorm(x) · weight · sigmoid(gate), rows of `weight.len()`; x and gate `[n, weight.len()]`. KDA's output.
    pub fn gated_rms_norm(&self, x: &mut [f32], gate: &[f32], weight: &[f32], eps: f32) {
        todo!()
    }

    /// x = x · sigmoid(gate), element by element. MLA's output gate.
    pub fn sigmoid_gate(&self, x: &mut [f32], gate: &[f32]) {
        todo!()
    }

    /// x = sigmoid(x).
    pub fn sigmoid(&self, x: &mut [f32]) {
        todo!()
    }

    /// gate = silu(gate) · up.
    pub fn silu_and_mul(&self, gate: &mut [f32], up: &[f32]) {
        todo!()
    }

    /// gate = β tanh(gate/β) σ(gate) · β_l tanh(up/β_l).
    pub fn situ_and_mul(&self, gate: &mut [f32], up: &[f32], beta: f32, linear_beta: f32) {
        todo!()
    }

    /// y += x.
    pub fn add(&self, y: &mut [f32], x: &[f32]) {
        todo!()
    }

    /// y = fma(a, x, y).
    pub fn add_scaled(&self, y: &mut [f32], a: f32, x: &[f32]) {
        todo!()
    }

    /// AttnRes: for each row, out = Σ p_i v_i over the candidates, p = softmax of Σ_d rms(v_i)_d · query_d.
    /// `candidates`: each `[T, hidden]`, oldest block first, the running sum last; `query` = norm.weight · proj.weight.
    pub fn attn_res_mix(&self, candidates: &[&[f32]], query: &[f32], eps: f32, out: &mut [f32]) {
        todo!()
    }

    /// Causal depthwise convolution with SiLU. `window` `[taps − 1 + T, channels]`: history, then the step's rows;
    /// `weight` `[taps, channels]`, the last tap meets the current row; out `[T, channels]`.
    pub fn short_conv(&self, window: &[f32], weight: &[f32], channels: usize, out: &mut [f32]) {
        todo!()
    }

    /// Per head of width `dim`: x = x / sqrt(Σx² + eps) · scale. x is any number of heads.
    pub fn l2_norm(&self, x: &mut [f32], dim: usize, eps: f32, scale: f32) {
        todo!()
    }

    /// KDA decay: g `[T, heads, dim]` → α = exp(log α) in place; `a` = exp(A_log) `[heads]`, `dt_bias` `[heads · dim]`.
    /// log α = lower_bound · sigmoid(a (g + dt_bias)), or −a · softplus(g + dt_bias) without a bound.
    pub fn kda_decay(&self, g: &mut [f32], a: &[f32], dt_bias: &[f32], lower_bound: Option<f32>) {
        todo!()
    }

    /// The gated delta rule over T rows of one sequence. `state` `[heads, d_k, d_v]` is updated in place; q, k, alpha, v
    /// `[T, heads, dim]`, beta `[T, heads]`; out `[T, heads, dim]`, or empty when only the state is wanted (same bits).
    ///
    /// Per row: S ← diag(α) S; r = Sᵀk (keys ascending, fused, from +0.0); S ← S + (β k) ⊗ (v − r); o = Sᵀ q likewise.
    #[expect(clippy::too_many_arguments, reason = "the rule's operands")]
    pub fn kda_rows(
        &self,
        state: &mut [f32],
        heads: usize,
        dim: usize,
        q: &[f32],
        k: &[f32],
        alpha: &[f32],
        v: &[f32],
        beta: &[f32],
        out: &mut [f32],
    ) {
        todo!()
    }

    /// Latent attention of T new rows of one sequence. q `[T, heads, width]` with width = rank + rope; `cache`
    /// `[past + T, width]`, row = latent then rope key; row t sees the first `past + t + 1` of it. out `[T, heads, rank]`
    /// = softmax(q · cache · scale) · latents. Softmax and sums run over keys in a fixed order.
    #[expect(clippy::too_many_arguments, reason = "shapes")]
    pub fn latent_attention(
        &self,
        q: &[f32],
        cache: &[f32],
        past: usize,
        heads: usize,
        width: usize,
        rank: usize,
        scale: f32,
        out: &mut [f32],
    ) {
        todo!()
    }
}
