//! `config.json` → [`ModelConfig`], field by field, in the checkpoint's words; layer kinds counted from 0.
//!
//! A key may be absent only where absence itself says something: `routed_expert_hidden_size` (experts run at
//! `hidden_size`), `attn_res_block_size` (plain residuals), `use_full_rank_gate`, `mla_use_output_gate`,
//! `latent_moe_use_norm` (not there). The tensors contradict each of these when it was merely lost. No tensor would
//! contradict a lost `gate_lower_bound`, so the nested K3 form must give it, if only as null; in the flat form absence
//! is the softplus decay. A key this program does not know is refused unless it is switched off or known not to touch
//! the computation.

mod file;
mod json;
mod layers;
mod parse;
mod section;
#[cfg(test)]
mod tests;

use std::path::Path;

use crate::error::{Error, Result};

pub(crate) use file::{check_is_file, lfs_pointer, read_bytes, read_text};

/// The released file has 8 KB; anything far beyond is no configuration.
const CONFIG_BYTES_MAX: u64 = 4 << 20;

/// Which of the two published forms the directory holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Family {
    /// Nested `text_config` under `model_type: kimi_k3`.
    KimiK3,
    /// Flat `model_type: kimi_linear`.
    KimiLinear,
}

/// `hidden_act`: what joins the gate and up projections of every MLP and expert.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum Activation {
    /// silu(gate) · up.
    Silu,
    /// β tanh(gate/β) σ(gate) · β_l tanh(up/β_l).
    Situ {
        /// `activation_situ_beta`.
        beta: f32,
        /// `activation_situ_linear_beta`.
        linear_beta: f32,
    },
}

/// How a layer attends.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum AttentionKind {
    /// Kimi Delta Attention (`kda_layers`).
    Kda,
    /// Latent attention (`full_attn_layers`).
    Mla,
}

/// What follows a layer's attention.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum FeedForwardKind {
    /// One MLP of `intermediate_size`.
    Dense,
    /// Routed experts.
    Moe,
}

/// One layer's two halves.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct LayerConfig {
    /// KDA or MLA.
    pub attention: AttentionKind,
    /// Dense or MoE.
    pub feed_forward: FeedForwardKind,
}

/// `linear_attn_config`.
#[derive(Debug, Clone, PartialEq)]
pub struct KdaConfig {
    /// Heads.
    pub num_heads: usize,
    /// Width of a head's keys and values.
    pub head_dim: usize,
    /// Taps of the short convolution.
    pub short_conv_kernel_size: usize,
    /// Bounded gate when present, softplus decay when absent.
    pub gate_lower_bound: Option<f32>,
    /// `g_proj` when true, `g_a_proj` and `g_b_proj` when false or absent.
    pub use_full_rank_gate: bool,
}

/// The latent attention's sizes.
#[derive(Debug, Clone, PartialEq)]
pub struct MlaConfig {
    /// `num_attention_heads`.
    pub num_heads: usize,
    /// Low rank of the query, or one `q_proj` when null.
    pub q_lora_rank: Option<usize>,
    /// Width of the cached latent.
    pub kv_lora_rank: usize,
    /// Per-head key width that comes from the latent.
    pub qk_nope_head_dim: usize,
    /// Key width shared by all heads (never rotated).
    pub qk_rope_head_dim: usize,
    /// Per-head value width.
    pub v_head_dim: usize,
    /// `mla_use_output_gate`: y = W_o (o · sigmoid(W_g x)).
    pub use_output_gate: bool,
}

/// The routed experts' sizes and the router's rules.
#[derive(Debug, Clone, PartialEq)]
pub struct MoeConfig {
    /// Experts a layer.
    pub num_experts: usize,
    /// Experts a token.
    pub num_experts_per_token: usize,
    /// Inner width of one expert.
    pub moe_intermediate_size: usize,
    /// Latent width the experts run in; `None`: they run at `hidden_size` and there is no latent projection.
    pub routed_expert_hidden_size: Option<usize>,
    /// `latent_moe_use_norm`: RMSNorm on the latent sum before `routed_expert_up_proj`.
    pub latent_moe_use_norm: bool,
    /// Shared experts, fused into one MLP of `num_shared_experts · moe_intermediate_size`; 0 means none.
    pub num_shared_experts: usize,
    /// Router groups G; 1 means no grouping.
    pub num_expert_group: usize,
    /// Groups kept when G > 1.
    pub topk_group: usize,
    /// Whether the chosen scores are made to sum to 1.
    pub moe_renormalize: bool,
    /// Factor on the weights.
    pub routed_scaling_factor: f32,
}

/// Everything in `config.json` that changes the computation.
#[derive(Debug, Clone, PartialEq)]
pub struct ModelConfig {
    /// Form of the configuration.
    pub family: Family,
    /// Width of the residual stream.
    pub hidden_size: usize,
    /// Rows of the embedding and of the head.
    pub vocab_size: usize,
    /// Longest context the model is declared for.
    pub max_position_embeddings: usize,
    /// Epsilon of every RMSNorm but MLA's two inner ones ([`ModelConfig::MLA_NORM_EPS`]).
    pub rms_norm_eps: f32,
    /// Activation of all MLPs and experts.
    pub activation: Activation,
    /// Inner width of the dense MLP.
    pub intermediate_size: usize,
    /// AttnRes block length in layers; `None`: plain residuals.
    pub attn_res_block_size: Option<usize>,
    /// `tie_word_embeddings`: the head is the embedding.
    pub tie_word_embeddings: bool,
    /// One entry a layer, from 0.
    pub layers: Vec<LayerConfig>,
    /// KDA sizes.
    pub kda: KdaConfig,
    /// MLA sizes.
    pub mla: MlaConfig,
    /// MoE sizes; `None` when every layer is dense.
    pub moe: Option<MoeConfig>,
    /// `bos_token_id`, if given.
    pub bos_token_ids: Vec<u32>,
    /// `eos_token_id` of this file (other files may add more).
    pub eos_token_ids: Vec<u32>,
}

impl ModelConfig {
    /// Epsilon of `q_a_layernorm` and `kv_a_layernorm`.
    pub const MLA_NORM_EPS: f32 = 1e-6;

    /// Reads and checks `dir/config.json`.
    ///
    /// # Errors
    /// Names the file, the key, its value and what is expected; the run cannot go on.
    pub fn load(dir: &Path) -> Result<Self> {
        if !dir.is_dir() {
            let what = if dir.exists() { "is not a directory" } else { "does not exist" };
            return Err(Error::model(format!("model directory {} {what}", dir.display()))
                .hint("download the checkpoint first: -m takes the directory with its config.json and shards"));
        }
        let path = dir.join("config.json");
        if path.symlink_metadata().is_err() {
            file::check_is_model_dir(dir)?;
        }
        Self::parse(&read_text(&path, CONFIG_BYTES_MAX)?, &path)
    }

    /// Checks `text`, the content of a `config.json`; `path` is only for the messages.
    ///
    /// # Errors
    /// As [`ModelConfig::load`].
    pub fn parse(text: &str, path: &Path) -> Result<Self> {
        parse::model(text).map_err(|message| {
            Error::model(format!("{}: {message}", path.display()))
                .hint("take config.json as published with the weights; only kimi_k3 and kimi_linear models run here")
        })
    }

    /// Width of all KDA heads together.
    pub fn kda_width(&self) -> usize {
        self.kda.num_heads * self.kda.head_dim
    }
}
