//! Resident tensors → [`Model`]: every name the configuration calls for, each used once; what is left over is an error.

use std::collections::BTreeSet;

use super::{Attention, FeedForward, Layer, Model, kda, mla, mlp, moe};
use crate::checkpoint::{ExpertFormat, Manifest};
use crate::config::{AttentionKind, FeedForwardKind, ModelConfig, MoeConfig};
use crate::error::{Error, Result};
use crate::kernels::Compute;
use crate::trunk::{Tensor, Trunk};

impl Model {
    /// Joins the tensors of `trunk` into a model.
    ///
    /// # Errors
    /// Kind `Model` for a tensor that is missing, or resident but not used.
    pub fn new(config: ModelConfig, manifest: &Manifest, trunk: &Trunk, compute: &Compute) -> Result<Self> {
        let mut tensors = Tensors {
            trunk,
            compute,
            expert_format: manifest.experts.as_ref().map(|experts| experts.format),
            used: BTreeSet::new(),
        };
        let t = &mut tensors;
        let embed_tokens = t.matrix("model.embed_tokens.weight")?;
        let layers = (0..config.layers.len()).map(|index| layer(t, &config, index)).collect::<Result<_>>()?;
        let output_attn_res = match config.attn_res_block_size {
            Some(_) => Some(t.attn_res("model.output_attn_res")?),
            None => None,
        };
        let norm = t.vector("model.norm.weight")?;
        let lm_head = if config.tie_word_embeddings { embed_tokens.clone() } else { t.matrix("lm_head.weight")? };
        if let Some(unused) = manifest.trunk.iter().find(|tensor| !tensors.used.contains(tensor.name.as_str())) {
            return Err(Error::model(format!("{}: loaded, but no part of the model uses it", unused.name)));
        }
        Ok(Self { config, embed_tokens, layers, output_attn_res, norm, lm_head })
    }

    /// Bytes of the small tensors (norms, biases, convolution taps) that are also held as f32.
    pub fn copied_bytes(manifest: &Manifest) -> u64 {
        let small = manifest.trunk.iter().filter(|tensor| tensor.shape.iter().filter(|&&n| n > 1).count() < 2);
        let conv = manifest.trunk.iter().filter(|tensor| tensor.name.ends_with("_conv1d.weight"));
        let floats: usize = small.chain(conv).map(|tensor| tensor.shape.iter().product::<usize>()).sum();
        (floats * size_of::<f32>()) as u64
    }
}

/// Looks tensors up and remembers which were used.
struct Tensors<'a> {
    trunk: &'a Trunk,
    compute: &'a Compute,
    expert_format: Option<ExpertFormat>,
    used: BTreeSet<String>,
}

impl Tensors<'_> {
    fn matrix(&mut self, name: &str) -> Result<Tensor> {
        let tensor = self.trunk.get(name).ok_or_else(|| Error::model(format!("{name}: no such tensor is resident")))?;
        self.used.insert(name.to_owned());
        Ok(tensor)
    }

    fn vector(&mut self, name: &str) -> Result<Vec<f32>> {
        Ok(self.matrix(name)?.to_f32())
    }

    /// The pseudo-query `{stem}_norm · {stem}_proj` `[hidden_size]`. Both are bfloat16 in the released files, so their
    /// products are exact in f32.
    fn attn_res(&mut self, stem: &str) -> Result<Vec<f32>> {
        let norm = self.vector(&format!("{stem}_norm.weight"))?;
        let proj = self.vector(&format!("{stem}_proj.weight"))?;
        Ok(norm.iter().zip(&proj).map(|(norm, proj)| norm * proj).collect())
    }

    fn mlp(&mut self, stem: &str) -> Result<mlp::Weights> {
        Ok(mlp::Weights {
            gate_proj: self.matrix(&format!("{stem}.gate_proj.weight"))?,
            up_proj: self.matrix(&format!("{stem}.up_proj.weight"))?,
            down_proj: self.matrix(&format!("{stem}.down_proj.weight"))?,
        })
    }
}

fn layer(t: &mut Tensors<'_>, config: &ModelConfig, index: usize) -> Result<Layer> {
    let stem = format!("model.layers.{index}");
    let kinds = config.layers[index];
    Ok(Layer {
        input_layernorm: t.vector(&format!("{stem}.input_layernorm.weight"))?,
        post_attention_layernorm: t.vector(&format!("{stem}.post_attention_layernorm.weight"))?,
        attn_res: match config.attn_res_block_size {
            Some(_) => {
                Some((t.attn_res(&format!("{stem}.self_attention_res"))?, t.attn_res(&format!("{stem}.mlp_res"))?))
            }
            None => None,
        },
        attention: match kinds.attention {
            AttentionKind::Kda => Attention::Kda(kda(t, config, &format!("{stem}.self_attn"))?),
            AttentionKind::Mla => Attention::Mla(mla(t, config, &format!("{stem}.self_attn"))?),
        },
        feed_forward: match (kinds.feed_forward, &config.moe) {
            (FeedForwardKind::Moe, Some(moe)) => {
                FeedForward::Moe(moe_half(t, config, moe, &format!("{stem}.block_sparse_moe"))?)
            }
            _ => FeedForward::Dense(t.mlp(&format!("{stem}.mlp"))?),
        },
    })
}

fn kda(t: &mut Tensors<'_>, config: &ModelConfig, stem: &str) -> Result<kda::Weights> {
    let taps = config.kda.short_conv_kernel_size;
    let mut conv = |name: &str| Ok(transposed(&t.vector(&format!("{stem}.{name}_conv1d.weight"))?, taps));
    let conv = [conv("q")?, conv("k")?, conv("v")?];
    // Entries past the number of heads are padding.
    let mut a = t.vector(&format!("{stem}.A_log"))?;
    a.truncate(config.kda.num_heads);
    t.compute.exp(&mut a);
    Ok(kda::Weights {
        q_proj: t.matrix(&format!("{stem}.q_proj.weight"))?,
        k_proj: t.matrix(&format!("{stem}.k_proj.weight"))?,
        v_proj: t.matrix(&format!("{stem}.v_proj.weight"))?,
        conv,
        f_a_proj: t.matrix(&format!("{stem}.f_a_proj.weight"))?,
        f_b_proj: t.matrix(&format!("{stem}.f_b_proj.weight"))?,
        a,
        dt_bias: t.vector(&format!("{stem}.dt_bias"))?,
        b_proj: t.matrix(&format!("{stem}.b_proj.weight"))?,
        gate: if config.kda.use_full_rank_gate {
            kda::Gate::Full(t.matrix(&format!("{stem}.g_proj.weight"))?)
        } else {
            kda::Gate::LowRank(
                t.matrix(&format!("{stem}.g_a_proj.weight"))?,
                t.matrix(&format!("{stem}.g_b_proj.weight"))?,
            )
        },
        o_norm: t.vector(&format!("{stem}.o_norm.weight"))?,
        o_proj: t.matrix(&format!("{stem}.o_proj.weight"))?,
    })
}

fn mla(t: &mut Tensors<'_>, config: &ModelConfig, stem: &str) -> Result<mla::Weights> {
    Ok(mla::Weights {
        query: match config.mla.q_lora_rank {
            Some(_) => mla::Query::LowRank(
                t.matrix(&format!("{stem}.q_a_proj.weight"))?,
                t.vector(&format!("{stem}.q_a_layernorm.weight"))?,
                t.matrix(&format!("{stem}.q_b_proj.weight"))?,
            ),
            None => mla::Query::Full(t.matrix(&format!("{stem}.q_proj.weight"))?),
        },
        kv_a_proj_with_mqa: t.matrix(&format!("{stem}.kv_a_proj_with_mqa.weight"))?,
        kv_a_layernorm: t.vector(&format!("{stem}.kv_a_layernorm.weight"))?,
        kv_b_proj: t.matrix(&format!("{stem}.kv_b_proj.weight"))?,
        g_proj: match config.mla.use_output_gate {
            true => Some(t.matrix(&format!("{stem}.g_proj.weight"))?),
            false => None,
        },
        o_proj: t.matrix(&format!("{stem}.o_proj.weight"))?,
    })
}

fn moe_half(t: &mut Tensors<'_>, config: &ModelConfig, moe: &MoeConfig, stem: &str) -> Result<moe::Weights> {
    let latent = match moe.routed_expert_hidden_size {
        Some(_) => Some(moe::Latent {
            down_proj: t.matrix(&format!("{stem}.routed_expert_down_proj.weight"))?,
            norm: match moe.latent_moe_use_norm {
                true => Some(t.vector(&format!("{stem}.routed_expert_norm.weight"))?),
                false => None,
            },
            up_proj: t.matrix(&format!("{stem}.routed_expert_up_proj.weight"))?,
        }),
        None => None,
    };
    Ok(moe::Weights {
        format: t.expert_format.ok_or_else(|| Error::model(format!("{stem}: the checkpoint has no routed experts")))?,
        expert_width: moe::expert_width(config, moe),
        expert_inner: moe.moe_intermediate_size,
        gate: t.matrix(&format!("{stem}.gate.weight"))?,
        e_score_correction_bias: t.vector(&format!("{stem}.gate.e_score_correction_bias"))?,
        latent,
        shared_experts: match moe.num_shared_experts {
            0 => None,
            _ => Some(t.mlp(&format!("{stem}.shared_experts"))?),
        },
    })
}

/// `[channels, taps]` → `[taps, channels]`.
fn transposed(weight: &[f32], taps: usize) -> Vec<f32> {
    let channels = weight.len() / taps;
    (0..taps).flat_map(|tap| (0..channels).map(move |channel| weight[channel * taps + tap])).collect()
}
