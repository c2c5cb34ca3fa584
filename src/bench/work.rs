//! What a token takes, from the configuration: arithmetic for a prompt, bytes from memory for a generated token. Counted is
//! what grows with the model's size; norms, activations, router choices and the mixing of residuals are left out, less than
//! a hundredth of the whole, so the shares that are computed from these figures are a little too low rather than too high.

use crate::checkpoint::{Dtype, Manifest, TrunkTensor};
use crate::config::{AttentionKind, FeedForwardKind, ModelConfig};
use crate::model::Sequence;
use crate::trunk::TrunkFormat;

/// Floating-point operations for a value of a KDA head's state `[head_dim, head_dim]` and a row: it is decayed (1), adds to
/// what the state has for the key (2), takes in the correction (2) and adds to the output (2).
const KDA_STATE_FLOPS: u64 = 7;

/// Floating-point operations of a prompt of `rows` tokens behind `depth` others, a multiply-add counted as two.
///
/// Each row is multiplied once with every matrix of the trunk (`kv_b_proj` too: absorbed into query and output it takes the
/// same) but the embedding, which is looked up; with three matrices of each of its `num_experts_per_token` experts; with
/// the taps of three convolutions in each KDA layer, whose state it then changes; and in each MLA layer, for each head, with
/// the latents of all tokens up to itself, `kv_lora_rank + qk_rope_head_dim` values for a score and `kv_lora_rank` for the
/// output. The head runs on the last row alone.
pub fn prefill_flops(config: &ModelConfig, depth: usize, rows: usize) -> f64 {
    let (rows, depth) = (rows as f64, depth as f64);
    let layers = |kind| config.layers.iter().filter(|layer| layer.attention == kind).count() as f64;
    let mla = &config.mla;
    let seen = rows * depth + rows * (rows + 1.0) / 2.0;
    let attention = mla.num_heads as f64 * (2 * mla.kv_lora_rank + mla.qk_rope_head_dim) as f64 * seen;
    let state = (config.kda_width() * config.kda.head_dim) as f64;
    let convolutions = (3 * config.kda_width() * config.kda.short_conv_kernel_size) as f64;
    let head = (config.vocab_size * config.hidden_size) as f64;
    2.0 * (rows * row_weights(config) as f64 + head + layers(AttentionKind::Mla) * attention)
        + rows * layers(AttentionKind::Kda) * (state * KDA_STATE_FLOPS as f64 + 2.0 * convolutions)
}

/// Weights that a row is multiplied with in all layers.
fn row_weights(config: &ModelConfig) -> u64 {
    let hidden = config.hidden_size;
    let (kda, mla) = (&config.kda, &config.mla);
    let width = config.kda_width();
    let gate = if kda.use_full_rank_gate { width * hidden } else { kda.head_dim * (hidden + width) };
    let kda = 4 * width * hidden + kda.head_dim * (hidden + width) + kda.num_heads * hidden + gate;
    let query = mla.num_heads * (mla.qk_nope_head_dim + mla.qk_rope_head_dim);
    let value = mla.num_heads * mla.v_head_dim;
    let mla = mla.q_lora_rank.map_or(query * hidden, |rank| rank * (hidden + query))
        + (mla.kv_lora_rank + mla.qk_rope_head_dim) * hidden
        + mla.num_heads * (mla.qk_nope_head_dim + mla.v_head_dim) * mla.kv_lora_rank
        + if mla.use_output_gate { 2 } else { 1 } * value * hidden;
    let moe = config.moe.as_ref().map_or(0, |moe| {
        let latent = moe.routed_expert_hidden_size;
        moe.num_experts * hidden
            + latent.map_or(0, |latent| 2 * latent * hidden)
            + 3 * moe.num_shared_experts * moe.moe_intermediate_size * hidden
            + moe.num_experts_per_token * 3 * latent.unwrap_or(hidden) * moe.moe_intermediate_size
    });
    let layer = |attention, feed_forward| {
        let attention = if attention == AttentionKind::Kda { kda } else { mla };
        let feed_forward = match feed_forward {
            FeedForwardKind::Moe => moe,
            FeedForwardKind::Dense => 3 * config.intermediate_size * hidden,
        };
        (attention + feed_forward) as u64
    };
    config.layers.iter().map(|it| layer(it.attention, it.feed_forward)).sum()
}

/// Bytes that a generated token takes from memory behind `depth` tokens: the trunk as it is held in the form `trunk` (but
/// the embedding, of which a row is looked up, unless it is the head too), its experts, the recurrent states read and
/// written, and the latents of all tokens.
pub fn decode_bytes(config: &ModelConfig, manifest: &Manifest, trunk: TrunkFormat, depth: usize) -> f64 {
    let is_read = |tensor: &&TrunkTensor| config.tie_word_embeddings || tensor.name != "model.embed_tokens.weight";
    let trunk: u64 = manifest.trunk.iter().filter(is_read).map(|tensor| held_bytes(tensor, trunk)).sum();
    let layers = manifest.experts.as_ref().map_or(0, |experts| experts.moe_layers.len());
    let top_k = config.moe.as_ref().map_or(0, |moe| moe.num_experts_per_token);
    let experts = (layers * top_k) as u64 * manifest.expert_bytes();
    let states = 2 * Sequence::state_bytes(config) + Sequence::latent_cache_bytes(config, depth);
    (trunk + experts + states) as f64
}

/// Bytes of `tensor` in memory in a trunk of the form `trunk`. What bf12 keeps beside the records is left out.
fn held_bytes(tensor: &TrunkTensor, trunk: TrunkFormat) -> u64 {
    match trunk.changes(&tensor.name, tensor.dtype, &tensor.shape) {
        Some((rows, cols)) => (rows * trunk.record_bytes(cols)) as u64,
        // Widened when it is loaded.
        None if tensor.dtype == Dtype::F16 => 2 * tensor.span.len,
        None => tensor.span.len,
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::trunk::Trunk;

    const MODELS: [&str; 4] =
        ["assets/demo-model", "tests/golden/tiny-k3", "tests/golden/odd-k3", "tests/golden/tiny-kimi-linear"];

    fn open(name: &str) -> (ModelConfig, Manifest) {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join(name);
        let config = ModelConfig::load(&dir).unwrap();
        let manifest = Manifest::open(&dir, &config).unwrap();
        (config, manifest)
    }

    #[test]
    fn a_row_meets_every_matrix_of_the_checkpoint() {
        for name in MODELS {
            let (config, manifest) = open(name);
            let outside = ["model.embed_tokens.weight", "lm_head.weight"];
            let matrices = manifest.trunk.iter().filter(|tensor| {
                let is_matrix = tensor.shape.iter().filter(|n| **n > 1).count() > 1;
                is_matrix && !tensor.name.ends_with("_conv1d.weight") && !outside.contains(&tensor.name.as_str())
            });
            let trunk: usize = matrices.map(|tensor| tensor.shape.iter().product::<usize>()).sum();
            let moe = config.moe.as_ref().unwrap();
            let width = moe.routed_expert_hidden_size.unwrap_or(config.hidden_size);
            let expert = 3 * width * moe.moe_intermediate_size;
            let layers = manifest.experts.as_ref().unwrap().moe_layers.len();
            let wanted = trunk + layers * moe.num_experts_per_token * expert;
            assert_eq!(row_weights(&config), wanted as u64, "{name}");
        }
    }

    #[test]
    fn rows_behind_a_context_cost_its_attention_more() {
        let (config, _) = open("assets/demo-model");
        let mla = config.layers.iter().filter(|layer| layer.attention == AttentionKind::Mla).count();
        let a_token = config.mla.num_heads * (2 * config.mla.kv_lora_rank + config.mla.qk_rope_head_dim);
        let more = prefill_flops(&config, 100, 8) - prefill_flops(&config, 0, 8);
        assert_eq!(more, (2 * mla * a_token * 100 * 8) as f64);
        // Two prompts in a row are one, but for the head of the first.
        let head = (2 * config.vocab_size * config.hidden_size) as f64;
        let apart = prefill_flops(&config, 0, 40) + prefill_flops(&config, 40, 24);
        assert_eq!(prefill_flops(&config, 0, 64), apart - head);
    }

    #[test]
    fn a_token_takes_the_trunk_and_its_experts_from_memory() {
        for name in MODELS {
            let (config, manifest) = open(name);
            let bytes = |depth| decode_bytes(&config, &manifest, TrunkFormat::Bf16, depth);
            let (none, some) = (bytes(0), bytes(10));
            assert_eq!(some - none, Sequence::latent_cache_bytes(&config, 10) as f64);
            let most = manifest.trunk_bytes() + manifest.all_experts_bytes() + 2 * Sequence::state_bytes(&config);
            assert!(none > 0.0 && none <= most as f64, "{name}: {none} of {most}");
        }
    }

    #[test]
    fn a_token_takes_the_trunk_in_the_form_that_it_is_held_in() {
        for name in MODELS {
            let (config, manifest) = open(name);
            let embedding = manifest.trunk.iter().find(|tensor| tensor.name == "model.embed_tokens.weight").unwrap();
            let bytes = |form| decode_bytes(&config, &manifest, form, 0);
            for form in [TrunkFormat::Bf12, TrunkFormat::Int8] {
                let planned = |form| Trunk::planned_bytes(&manifest, form, None) as f64;
                let looked_up = |form| if config.tie_word_embeddings { 0 } else { held_bytes(embedding, form) } as f64;
                let saved = planned(TrunkFormat::Bf16) - planned(form);
                let saved = saved - (looked_up(TrunkFormat::Bf16) - looked_up(form));
                let counted = bytes(TrunkFormat::Bf16) - bytes(form);
                // The plan has room for exceptions of bf12, and for tensors to begin at cache lines.
                let slack = 0.02 * planned(TrunkFormat::Bf16);
                assert!((counted - saved).abs() <= slack, "{name}, {form:?}: {counted} fewer, {saved} by the plan");
                assert!(counted > 0.0, "{name}, {form:?}");
            }
        }
    }
}
