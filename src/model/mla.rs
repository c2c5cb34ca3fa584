//! An MLA layer's attention over the latent cache: `kv_b_proj` is absorbed into the query and the output, so a token
//! costs `kv_lora_rank + qk_rope_head_dim` cached values a layer. Nothing is rotated (`mla_use_nope`).
//!
//! Source: DeepSeek-V2 (arXiv 2405.04434), section 2.1, appendix C; `KimiMLAAttention` of the released modelling code.

use super::scratch::Carver;
use super::sequence::{LayerState, latent_width};
use super::step::Segment;
use crate::config::ModelConfig;
use crate::kernels::Compute;
use crate::trunk::Tensor;

pub(super) struct Weights {
    pub(super) query: Query,
    /// `[kv_lora_rank + qk_rope_head_dim, hidden_size]`.
    pub(super) kv_a_proj_with_mqa: Tensor,
    /// `[kv_lora_rank]`.
    pub(super) kv_a_layernorm: Vec<f32>,
    /// `[heads · (qk_nope_head_dim + v_head_dim), kv_lora_rank]`: per head the key rows, then the value rows.
    pub(super) kv_b_proj: Tensor,
    /// Output gate `[heads · v_head_dim, hidden_size]`, when the model has one.
    pub(super) g_proj: Option<Tensor>,
    /// `[hidden_size, heads · v_head_dim]`.
    pub(super) o_proj: Tensor,
}

/// The query's projection.
pub(super) enum Query {
    /// `q_proj` `[heads · qk, hidden_size]`.
    Full(Tensor),
    /// `q_a_proj` `[q_lora_rank, hidden_size]`, `q_a_layernorm` `[q_lora_rank]`, `q_b_proj` `[heads · qk, q_lora_rank]`.
    LowRank(Tensor, Vec<f32>, Tensor),
}

/// Floats of scratch for `rows` rows.
pub(super) fn work_floats(config: &ModelConfig, rows: usize) -> usize {
    let mla = &config.mla;
    let (rank, width) = (mla.kv_lora_rank, latent_width(config));
    let a_head = mla.qk_nope_head_dim + mla.qk_rope_head_dim + 2 * rank + width + 2 * mla.v_head_dim;
    rows * (mla.num_heads * a_head + 2 * mla.q_lora_rank.unwrap_or(0) + width)
}

/// out `[rows, hidden_size]` = attention of the normed rows x of all `segments`; `layer` picks their caches.
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
    let mla = &config.mla;
    let (heads, nope, rope, rank) = (mla.num_heads, mla.qk_nope_head_dim, mla.qk_rope_head_dim, mla.kv_lora_rank);
    let (qk, width, head_rows) = (nope + rope, rank + rope, nope + mla.v_head_dim);
    let rows = x.len() / config.hidden_size;

    let q = work.take(rows * heads * qk);
    let kv = work.take(rows * width);
    let q_latent = work.take(rows * heads * rank);
    let q_full = work.take(rows * heads * width);
    let o_latent = work.take(rows * heads * rank);
    let o = work.take(rows * heads * mla.v_head_dim);
    match &w.query {
        Query::Full(q_proj) => compute.matmul(q_proj.matrix(), x, q),
        Query::LowRank(q_a_proj, q_a_layernorm, q_b_proj) => {
            let low = work.take(rows * q_a_layernorm.len());
            let normed = work.take(rows * q_a_layernorm.len());
            compute.matmul(q_a_proj.matrix(), x, low);
            compute.rms_norm(low, q_a_layernorm, ModelConfig::MLA_NORM_EPS, normed);
            compute.matmul(q_b_proj.matrix(), normed, q);
        }
    }
    compute.matmul(w.kv_a_proj_with_mqa.matrix(), x, kv);

    let kv_b = w.kv_b_proj.matrix();
    compute.matmul_transposed_heads(kv_b, heads, head_rows, 0, nope, q, qk, q_latent);
    for ((full, latent), q) in q_full.chunks_exact_mut(width).zip(q_latent.chunks_exact(rank)).zip(q.chunks_exact(qk)) {
        full[..rank].copy_from_slice(latent);
        full[rank..].copy_from_slice(&q[nope..]);
    }

    let scale = (1.0 / (qk as f64).sqrt()) as f32;
    let mut first = 0;
    for segment in segments.iter_mut() {
        let n = segment.tokens.len();
        let past = segment.sequence.len();
        let LayerState::Mla(state) = &mut segment.sequence.layers[layer] else {
            unreachable!("a sequence's layers are of the model's kinds")
        };
        let new = &mut state.cache[past * width..(past + n) * width];
        for (row, kv) in new.chunks_exact_mut(width).zip(kv[first * width..].chunks_exact(width)) {
            compute.rms_norm(&kv[..rank], &w.kv_a_layernorm, ModelConfig::MLA_NORM_EPS, &mut row[..rank]);
            row[rank..].copy_from_slice(&kv[rank..]);
        }
        compute.latent_attention(
            &q_full[first * heads * width..][..n * heads * width],
            &state.cache[..(past + n) * width],
            past,
            heads,
            width,
            rank,
            scale,
            &mut o_latent[first * heads * rank..][..n * heads * rank],
        );
        first += n;
    }

    compute.matmul_heads(kv_b, heads, head_rows, nope, mla.v_head_dim, o_latent, o);
    if let Some(g_proj) = &w.g_proj {
        let gate = work.take(o.len());
        compute.matmul(g_proj.matrix(), x, gate);
        compute.sigmoid_gate(o, gate);
    }
    compute.matmul(w.o_proj.matrix(), o, out);
}
