//! `config.json` and `generation_config.json` of a synthetic model: the released ones with other sizes.

use serde_json::{Map, Value, json};

use super::shape::Shape;

/// The nested configuration of `model_type: kimi_k3`; no vision half.
pub(super) fn config(shape: &Shape) -> Value {
    let [bos, eos, pad] = special(shape);
    let mut text_config = Map::new();
    for part in [general(shape), attention(shape), feed_forward(shape)] {
        text_config.extend(part);
    }
    json!({
        "architectures": ["KimiK3ForConditionalGeneration"],
        "bos_token_id": bos,
        "dtype": "bfloat16",
        "eos_token_id": eos,
        "model_type": "kimi_k3",
        "pad_token_id": pad,
        "text_config": text_config,
        "tie_word_embeddings": false
    })
}

fn general(shape: &Shape) -> Map<String, Value> {
    let [bos, eos, pad] = special(shape);
    object(json!({
        "model_type": "kimi_linear",
        "architectures": ["KimiLinearForCausalLM"],
        "bos_token_id": bos,
        "eos_token_id": eos,
        "pad_token_id": pad,
        "dtype": "bfloat16",
        "hidden_size": shape.hidden,
        "num_hidden_layers": shape.layers,
        "vocab_size": shape.vocab,
        "max_position_embeddings": shape.context,
        "attn_res_block_size": or_null(shape.attn_res_block),
        "rms_norm_eps": 1e-05,
        "hidden_act": "situ",
        "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0,
        "initializer_range": 0.02,
        "num_nextn_predict_layers": 0,
        "tie_word_embeddings": false,
        "use_cache": true,
        "quantization_config": quantization()
    }))
}

fn attention(shape: &Shape) -> Map<String, Value> {
    let layers = |mla: bool| -> Vec<usize> {
        (0..shape.layers).filter(|&layer| shape.is_mla(layer) == mla).map(|layer| layer + 1).collect()
    };
    object(json!({
        "linear_attn_config": {
            "full_attn_layers": layers(true),
            "gate_lower_bound": -5.0,
            "head_dim": shape.head_dim,
            "kda_layers": layers(false),
            "num_heads": shape.heads,
            "short_conv_kernel_size": super::tensors::TAPS,
            "use_full_rank_gate": true
        },
        "num_attention_heads": shape.heads,
        "num_key_value_heads": shape.heads,
        "q_lora_rank": or_null(shape.q_lora),
        "kv_lora_rank": shape.kv_lora,
        "qk_nope_head_dim": shape.nope,
        "qk_rope_head_dim": shape.rope,
        "v_head_dim": shape.v_head,
        "mla_use_nope": true,
        "mla_use_output_gate": true
    }))
}

fn feed_forward(shape: &Shape) -> Map<String, Value> {
    object(json!({
        "intermediate_size": shape.dense_inner,
        "first_k_dense_replace": shape.dense_layers,
        "moe_layer_freq": 1,
        "num_experts": shape.experts,
        "num_experts_per_token": shape.top_k,
        "moe_intermediate_size": shape.inner,
        "routed_expert_hidden_size": shape.latent,
        "latent_moe_use_norm": true,
        "num_shared_experts": shape.shared,
        "num_expert_group": 1,
        "topk_group": 1,
        "use_grouped_topk": true,
        "topk_method": "noaux_tc",
        "moe_renormalize": true,
        "routed_scaling_factor": 1.0,
        "moe_router_activation_func": "sigmoid"
    }))
}

fn object(value: Value) -> Map<String, Value> {
    match value {
        Value::Object(object) => object,
        _ => Map::new(),
    }
}

/// The ids that begin and end a text.
pub(super) fn generation_config(shape: &Shape) -> Value {
    let [bos, eos, pad] = special(shape);
    json!({ "bos_token_id": bos, "eos_token_id": eos, "pad_token_id": pad, "max_length": shape.context })
}

/// Begin, end and padding, where the released vocabulary has them: 256 and 254 from its end, and its last id.
fn special(shape: &Shape) -> [usize; 3] {
    let first = shape.special_ids();
    [first, (first + 2).min(shape.vocab - 1), shape.vocab - 1]
}

fn or_null(size: usize) -> Value {
    if size == 0 { Value::Null } else { size.into() }
}

fn quantization() -> Value {
    json!({
        "config_groups": {
            "group_0": {
                "format": "mxfp4-pack-quantized",
                "input_activations": null,
                "output_activations": null,
                "targets": ["Linear"],
                "weights": {
                    "actorder": null,
                    "block_structure": null,
                    "dynamic": false,
                    "group_size": 32,
                    "num_bits": 4,
                    "observer": "minmax",
                    "observer_kwargs": {},
                    "scale_dtype": "torch.uint8",
                    "strategy": "group",
                    "symmetric": true,
                    "type": "float",
                    "zp_dtype": null
                }
            }
        },
        "format": "mxfp4-pack-quantized",
        "global_compression_ratio": null,
        "ignore": [
            "re:.*self_attn.*",
            "re:.*shared_experts.*",
            "re:.*mlp\\.(gate|up|gate_up|down)_proj.*",
            "re:.*lm_head.*"
        ],
        "kv_cache_scheme": null,
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed"
    })
}
