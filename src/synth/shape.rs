//! The shape of a synthetic model: presets, and the bounds within which each size can be changed.

use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};

/// Every size of a synthetic model, in the words of the command's flags; the rest is as in the released K3.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    /// `num_hidden_layers`.
    pub layers: usize,
    /// `first_k_dense_replace`: layers before this one have a dense MLP.
    pub dense_layers: usize,
    /// Layers N, 2N, … counted from 1, and the last, are MLA, the others KDA.
    pub mla_every: usize,
    /// `hidden_size`.
    pub hidden: usize,
    /// Heads of both kinds of attention.
    pub heads: usize,
    /// Width of a KDA head.
    pub head_dim: usize,
    /// `q_lora_rank`; 0: one `q_proj`.
    pub q_lora: usize,
    /// `kv_lora_rank`.
    pub kv_lora: usize,
    /// `qk_nope_head_dim`.
    pub nope: usize,
    /// `qk_rope_head_dim`.
    pub rope: usize,
    /// `v_head_dim`.
    pub v_head: usize,
    /// `intermediate_size` of the dense MLP.
    pub dense_inner: usize,
    /// `num_experts`, a layer.
    pub experts: usize,
    /// `num_experts_per_token`.
    pub top_k: usize,
    /// `routed_expert_hidden_size`.
    pub latent: usize,
    /// `moe_intermediate_size`.
    pub inner: usize,
    /// `num_shared_experts`; 0: none.
    pub shared: usize,
    /// `attn_res_block_size`; 0: plain residuals.
    pub attn_res_block: usize,
    /// `vocab_size`.
    pub vocab: usize,
    /// `max_position_embeddings`.
    pub context: usize,
}

/// A named shape.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Preset {
    /// 4 layers of a few hundred columns: 5 MB, for tests.
    Tiny,
    /// K3's widths, 3 layers (dense KDA, MoE KDA, MoE MLA) of 64 experts: 7.2 GB.
    Slice,
    /// All of K3's text model: 1.56 TB.
    K3,
    /// A model that fits into any memory: 8 layers of 128 small experts, 2.4 GB.
    Mini,
    /// `Mini`'s trunk with experts of K3's size, 4 × 448 of them: 32 GB.
    Stream,
}

impl Preset {
    /// All, in the order of the help.
    pub const ALL: [Preset; 5] = [Preset::Tiny, Preset::Slice, Preset::K3, Preset::Mini, Preset::Stream];

    /// As given to `--preset`.
    pub fn name(self) -> &'static str {
        match self {
            Preset::Tiny => "tiny",
            Preset::Slice => "slice",
            Preset::K3 => "k3",
            Preset::Mini => "mini",
            Preset::Stream => "stream",
        }
    }

    /// The sizes.
    pub fn shape(self) -> Shape {
        match self {
            Preset::K3 => Shape {
                layers: 93,
                dense_layers: 1,
                mla_every: 4,
                hidden: 7168,
                heads: 96,
                head_dim: 128,
                q_lora: 1536,
                kv_lora: 512,
                nope: 128,
                rope: 64,
                v_head: 128,
                dense_inner: 33_792,
                experts: 896,
                top_k: 16,
                latent: 3584,
                inner: 3072,
                shared: 2,
                attn_res_block: 12,
                vocab: 163_840,
                context: 1 << 20,
            },
            Preset::Slice => Shape { layers: 3, mla_every: 3, experts: 64, vocab: 16_384, ..Preset::K3.shape() },
            Preset::Mini => Shape {
                layers: 8,
                hidden: 2048,
                heads: 16,
                q_lora: 512,
                dense_inner: 8192,
                experts: 128,
                latent: 1024,
                inner: 1024,
                attn_res_block: 4,
                vocab: 32_000,
                ..Preset::K3.shape()
            },
            Preset::Stream => {
                Shape { layers: 5, mla_every: 4, experts: 448, latent: 3584, inner: 3072, ..Preset::Mini.shape() }
            }
            Preset::Tiny => Shape {
                layers: 4,
                hidden: 256,
                heads: 4,
                head_dim: 32,
                q_lora: 64,
                kv_lora: 64,
                nope: 32,
                rope: 16,
                v_head: 32,
                dense_inner: 512,
                experts: 64,
                top_k: 8,
                latent: 96,
                inner: 64,
                shared: 1,
                attn_res_block: 2,
                vocab: 2048,
                ..Preset::K3.shape()
            },
        }
    }
}

/// Columns that share one MXFP4 scale.
const MXFP4_BLOCK: usize = 32;

const WIDTH_MAX: usize = 1 << 20;

impl Shape {
    /// Refuses what no checkpoint of this format can have, by the flag that says it.
    ///
    /// # Errors
    /// Kind `Usage`: the flag, what it must be, what it is.
    pub fn check(&self) -> Result<()> {
        let bounds = [
            ("--layers", self.layers, 1, 4096),
            ("--dense-layers", self.dense_layers, 0, self.layers),
            ("--mla-every", self.mla_every, 1, 4096),
            ("--hidden", self.hidden, 32, WIDTH_MAX),
            ("--heads", self.heads, 1, 65_536),
            ("--head-dim", self.head_dim, 2, 4096),
            ("--q-lora", self.q_lora, 0, WIDTH_MAX),
            ("--kv-lora", self.kv_lora, 1, WIDTH_MAX),
            ("--nope", self.nope, 1, 4096),
            ("--rope", self.rope, 1, 4096),
            ("--v-head", self.v_head, 1, 4096),
            ("--dense-inner", self.dense_inner, 1, WIDTH_MAX),
            ("--experts", self.experts, 1, usize::from(u16::MAX)),
            ("--latent", self.latent, MXFP4_BLOCK, WIDTH_MAX),
            ("--inner", self.inner, MXFP4_BLOCK, WIDTH_MAX),
            ("--shared", self.shared, 0, 64),
            ("--attn-res-block", self.attn_res_block, 0, 4096),
            ("--vocab", self.vocab, 16, 1 << 24),
            ("--context", self.context, 1, 1 << 31),
        ];
        for (flag, value, least, most) in bounds {
            if !(least..=most).contains(&value) {
                return Err(Error::usage(format!("{flag}: expected {least} to {most}, found {value}")));
            }
        }
        if !(1..=self.experts).contains(&self.top_k) {
            return Err(Error::usage(format!("--top-k: expected 1 to {}, found {}", self.experts, self.top_k))
                .hint("a token cannot use more experts than a layer has (--experts)"));
        }
        for (flag, value) in [("--latent", self.latent), ("--inner", self.inner)] {
            if !value.is_multiple_of(MXFP4_BLOCK) {
                let below = value / MXFP4_BLOCK * MXFP4_BLOCK;
                return Err(Error::usage(format!("{flag}: expected a multiple of {MXFP4_BLOCK}, found {value}")).hint(
                    format!("MXFP4 keeps one scale for {MXFP4_BLOCK} columns: try {below} or {}", below + MXFP4_BLOCK),
                ));
            }
        }
        let kda_width = self.heads * self.head_dim;
        let mla_width = self.heads * (self.nope + self.rope).max(self.nope + self.v_head);
        if kda_width.max(mla_width) > 1 << 24 {
            return Err(Error::usage(format!("--heads: {} heads are wider than this format allows", self.heads)));
        }
        Ok(())
    }

    /// Whether layer `layer`, counted from 0, is MLA.
    pub fn is_mla(&self, layer: usize) -> bool {
        (layer + 1).is_multiple_of(self.mla_every) || layer + 1 == self.layers
    }

    /// Whether layer `layer`, counted from 0, has routed experts.
    pub fn is_moe(&self, layer: usize) -> bool {
        layer >= self.dense_layers
    }

    /// Layers with routed experts.
    pub fn moe_layers(&self) -> usize {
        self.layers - self.dense_layers
    }

    /// Bytes of one routed expert: 17 for 32 weights.
    pub fn expert_bytes(&self) -> u64 {
        3 * (self.latent * self.inner / MXFP4_BLOCK * 17) as u64
    }

    /// The first of the ids at the end of the vocabulary that stand for no text; their rows of the head are zero, so
    /// that greedy decoding never ends by itself.
    pub fn special_ids(&self) -> usize {
        self.vocab - (self.vocab / 8).min(256)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn every_preset_is_within_bounds() {
        for preset in Preset::ALL {
            preset.shape().check().unwrap_or_else(|e| panic!("{}: {e}", preset.name()));
        }
    }

    #[test]
    fn k3_has_the_released_layers() {
        let shape = Preset::K3.shape();
        let mla: Vec<usize> = (0..93).filter(|&layer| shape.is_mla(layer)).map(|layer| layer + 1).collect();
        assert_eq!(mla.len(), 24);
        assert_eq!(mla[21..], [88, 92, 93]);
        assert_eq!((shape.expert_bytes(), shape.moe_layers()), (17_547_264, 92));
    }

    #[test]
    fn a_size_out_of_bounds_is_refused_by_its_flag() {
        type Case = (&'static str, fn(&mut Shape));
        let cases: [Case; 10] = [
            ("--layers", |s| s.layers = 0),
            ("--top-k", |s| s.top_k = s.experts + 1),
            ("--top-k", |s| s.top_k = 0),
            ("--latent", |s| s.latent = 100),
            ("--inner", |s| s.inner = 16),
            ("--dense-layers", |s| s.dense_layers = s.layers + 1),
            ("--experts", |s| s.experts = 70_000),
            ("--hidden", |s| s.hidden = usize::MAX),
            ("--vocab", |s| s.vocab = 1),
            ("--mla-every", |s| s.mla_every = 0),
        ];
        for (flag, change) in cases {
            let mut shape = Preset::Tiny.shape();
            change(&mut shape);
            let error = shape.check().expect_err(flag);
            assert_eq!(error.kind(), Kind::Usage);
            assert!(error.message().starts_with(flag), "{flag}: {error}");
        }
    }
}
