//! The tensors that a configuration demands, with their shapes, in the order of the model.

use super::ExpertFormat;
use super::names::{FIRST_PLAIN_PART, PART_SUFFIXES};
use crate::config::{AttentionKind, FeedForwardKind, KdaConfig, MlaConfig, ModelConfig, MoeConfig};

/// Columns that share one MXFP4 scale.
const MXFP4_BLOCK: usize = 32;

/// A tensor of the trunk that must be there.
pub(super) struct Demand {
    /// Without prefix.
    pub(super) name: String,
    /// 0-based; `None` for what lies outside the layers.
    pub(super) layer: Option<u16>,
    pub(super) shape: Shape,
}

/// Which shapes are taken.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) enum Shape {
    /// As stated.
    Exact(Vec<usize>),
    /// As stated, or without its dimensions of 1: the same values in the same order.
    Squeezable(Vec<usize>),
    /// A vector, whatever dimensions of 1 it has, of at least so many values; those beyond are padding.
    AtLeast(usize),
}

impl Shape {
    /// Whether a tensor stored as `found` will do.
    pub(super) fn accepts(&self, found: &[u64]) -> bool {
        let same = |shape: &mut dyn Iterator<Item = u64>, found: &mut dyn Iterator<Item = u64>| shape.eq(found);
        match self {
            Shape::Exact(shape) => same(&mut shape.iter().map(|n| *n as u64), &mut found.iter().copied()),
            Shape::Squeezable(shape) => {
                same(&mut shape.iter().map(|n| *n as u64), &mut found.iter().copied())
                    || same(&mut shape.iter().map(|n| *n as u64).filter(|n| *n != 1), &mut found.iter().copied())
            }
            Shape::AtLeast(len) => {
                let mut wide = found.iter().filter(|n| **n != 1);
                let values = wide.next().copied().unwrap_or(1);
                !found.is_empty() && wide.next().is_none() && values >= *len as u64
            }
        }
    }
}

impl std::fmt::Display for Shape {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Shape::Exact(shape) | Shape::Squeezable(shape) => write!(f, "{shape:?}"),
            Shape::AtLeast(len) => write!(f, "[{len} or more]"),
        }
    }
}

/// Every trunk tensor of the model.
pub(super) fn trunk(config: &ModelConfig) -> Vec<Demand> {
    let (hidden, vocab) = (config.hidden_size, config.vocab_size);
    let mut list = List { demands: Vec::new(), layer: None };
    list.matrix("model.embed_tokens.weight", vocab, hidden);
    for (layer, kinds) in config.layers.iter().enumerate() {
        list.layer = Some(layer as u16);
        list.vector("input_layernorm.weight", hidden);
        if config.attn_res_block_size.is_some() {
            list.pseudo_query("self_attention_res", hidden);
        }
        match kinds.attention {
            AttentionKind::Kda => kda(&mut list, &config.kda, hidden),
            AttentionKind::Mla => mla(&mut list, &config.mla, hidden),
        }
        list.vector("post_attention_layernorm.weight", hidden);
        if config.attn_res_block_size.is_some() {
            list.pseudo_query("mlp_res", hidden);
        }
        match (kinds.feed_forward, &config.moe) {
            (FeedForwardKind::Moe, Some(moe)) => self::moe(&mut list, moe, hidden),
            _ => list.mlp("mlp", config.intermediate_size, hidden),
        }
    }
    list.layer = None;
    if config.attn_res_block_size.is_some() {
        list.pseudo_query("model.output_attn_res", hidden);
    }
    list.vector("model.norm.weight", hidden);
    if !config.tie_word_embeddings {
        list.matrix("lm_head.weight", vocab, hidden);
    }
    list.demands
}

fn kda(list: &mut List, kda: &KdaConfig, hidden: usize) {
    let (heads, head_dim) = (kda.num_heads, kda.head_dim);
    let width = heads * head_dim;
    for projection in ["q", "k", "v"] {
        list.matrix(&format!("self_attn.{projection}_proj.weight"), width, hidden);
        let taps = Shape::Squeezable(vec![width, 1, kda.short_conv_kernel_size]);
        list.add(&format!("self_attn.{projection}_conv1d.weight"), taps);
    }
    list.add("self_attn.A_log", Shape::AtLeast(heads));
    list.vector("self_attn.dt_bias", width);
    list.matrix("self_attn.f_a_proj.weight", head_dim, hidden);
    list.matrix("self_attn.f_b_proj.weight", width, head_dim);
    list.matrix("self_attn.b_proj.weight", heads, hidden);
    if kda.use_full_rank_gate {
        list.matrix("self_attn.g_proj.weight", width, hidden);
    } else {
        list.matrix("self_attn.g_a_proj.weight", head_dim, hidden);
        list.matrix("self_attn.g_b_proj.weight", width, head_dim);
    }
    list.vector("self_attn.o_norm.weight", head_dim);
    list.matrix("self_attn.o_proj.weight", hidden, width);
}

fn mla(list: &mut List, mla: &MlaConfig, hidden: usize) {
    let query_width = mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim);
    let value_width = mla.num_heads * mla.v_head_dim;
    match mla.q_lora_rank {
        Some(rank) => {
            list.matrix("self_attn.q_a_proj.weight", rank, hidden);
            list.vector("self_attn.q_a_layernorm.weight", rank);
            list.matrix("self_attn.q_b_proj.weight", query_width, rank);
        }
        None => list.matrix("self_attn.q_proj.weight", query_width, hidden),
    }
    list.matrix("self_attn.kv_a_proj_with_mqa.weight", mla.kv_lora_rank + mla.qk_rope_head_dim, hidden);
    list.vector("self_attn.kv_a_layernorm.weight", mla.kv_lora_rank);
    let kv_width = mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim);
    list.matrix("self_attn.kv_b_proj.weight", kv_width, mla.kv_lora_rank);
    if mla.use_output_gate {
        list.matrix("self_attn.g_proj.weight", value_width, hidden);
    }
    list.matrix("self_attn.o_proj.weight", hidden, value_width);
}

fn moe(list: &mut List, moe: &MoeConfig, hidden: usize) {
    list.matrix("block_sparse_moe.gate.weight", moe.num_experts, hidden);
    list.vector("block_sparse_moe.gate.e_score_correction_bias", moe.num_experts);
    if let Some(latent) = moe.routed_expert_hidden_size {
        list.matrix("block_sparse_moe.routed_expert_down_proj.weight", latent, hidden);
        if moe.latent_moe_use_norm {
            list.vector("block_sparse_moe.routed_expert_norm.weight", latent);
        }
        list.matrix("block_sparse_moe.routed_expert_up_proj.weight", hidden, latent);
    }
    if moe.num_shared_experts > 0 {
        list.mlp("block_sparse_moe.shared_experts", moe.num_shared_experts * moe.moe_intermediate_size, hidden);
    }
}

struct List {
    demands: Vec<Demand>,
    layer: Option<u16>,
}

impl List {
    fn add(&mut self, name: &str, shape: Shape) {
        let name = match self.layer {
            Some(layer) => format!("model.layers.{layer}.{name}"),
            None => name.to_owned(),
        };
        self.demands.push(Demand { name, layer: self.layer, shape });
    }

    fn matrix(&mut self, name: &str, rows: usize, cols: usize) {
        self.add(name, Shape::Exact(vec![rows, cols]));
    }

    fn vector(&mut self, name: &str, len: usize) {
        self.add(name, Shape::Exact(vec![len]));
    }

    /// An AttnRes pseudo-query: the norm's weight and the projection to one score.
    fn pseudo_query(&mut self, name: &str, hidden: usize) {
        self.vector(&format!("{name}_norm.weight"), hidden);
        self.add(&format!("{name}_proj.weight"), Shape::Squeezable(vec![1, hidden]));
    }

    fn mlp(&mut self, name: &str, inner: usize, hidden: usize) {
        self.matrix(&format!("{name}.gate_proj.weight"), inner, hidden);
        self.matrix(&format!("{name}.up_proj.weight"), inner, hidden);
        self.matrix(&format!("{name}.down_proj.weight"), hidden, inner);
    }
}

/// Shapes of a routed expert's tensors, by their number in [`PART_SUFFIXES`].
pub(super) struct ExpertShapes([[u64; 2]; PART_SUFFIXES.len()]);

impl ExpertShapes {
    pub(super) fn new(moe: &MoeConfig, hidden_size: usize) -> Self {
        let outer = moe.routed_expert_hidden_size.unwrap_or(hidden_size) as u64;
        let inner = moe.moe_intermediate_size as u64;
        let block = MXFP4_BLOCK as u64;
        let parts = |rows, cols| [[rows, cols / 2], [rows, cols / block]];
        let [w1_packed, w1_scale] = parts(inner, outer);
        let [w2_packed, w2_scale] = parts(outer, inner);
        let (w1, w2) = ([inner, outer], [outer, inner]);
        Self([w1_packed, w1_scale, w1_packed, w1_scale, w2_packed, w2_scale, w1, w1, w2])
    }

    /// `[rows, columns]` as stored.
    pub(super) fn shape(&self, part: u8) -> [u64; 2] {
        self.0[usize::from(part)]
    }

    /// Bytes of each part of `format`.
    pub(super) fn part_bytes(&self, format: ExpertFormat) -> Vec<u64> {
        let (first, element) = match format {
            ExpertFormat::Mxfp4 => (0, 1),
            ExpertFormat::Bf16 => (usize::from(FIRST_PLAIN_PART), 2),
        };
        self.0[first..first + format.parts()].iter().map(|[rows, cols]| rows * cols * element).collect()
    }
}

/// Refuses widths that MXFP4 rows cannot have.
pub(super) fn check_mxfp4_widths(moe: &MoeConfig, hidden_size: usize) -> Result<(), String> {
    let outer = match moe.routed_expert_hidden_size {
        Some(latent) => ("routed_expert_hidden_size", latent),
        None => ("hidden_size", hidden_size),
    };
    for (key, width) in [outer, ("moe_intermediate_size", moe.moe_intermediate_size)] {
        if !width.is_multiple_of(MXFP4_BLOCK) {
            return Err(format!("{key} is {width}, but MXFP4 experts need a multiple of {MXFP4_BLOCK}"));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_vector_may_be_padded_and_wrapped_but_not_short() {
        let shape = Shape::AtLeast(4);
        for good in [&[4][..], &[128], &[1, 1, 4, 1], &[1, 32]] {
            assert!(shape.accepts(good), "{good:?}");
        }
        for bad in [&[][..], &[3], &[1, 1, 3, 1], &[4, 4], &[2, 2], &[1, 1]] {
            assert!(!shape.accepts(bad), "{bad:?}");
        }
        assert!(Shape::AtLeast(1).accepts(&[1]));
    }

    #[test]
    fn ones_may_be_dropped_where_that_is_declared() {
        let conv = Shape::Squeezable(vec![12, 1, 4]);
        assert!(conv.accepts(&[12, 1, 4]) && conv.accepts(&[12, 4]));
        assert!(!conv.accepts(&[4, 12]) && !conv.accepts(&[48]) && !conv.accepts(&[12, 4, 1]));
        assert!(!Shape::Exact(vec![1, 8]).accepts(&[8]));
    }
}
