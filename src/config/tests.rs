//! Every published form loads; every key removed, mistyped or unsupported is refused by name.

use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use super::*;
use crate::error::Kind;

fn dir(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

const TINY: &str = "tests/golden/tiny-k3";
const LINEAR: &str = "tests/golden/tiny-kimi-linear";

fn raw(name: &str) -> Value {
    serde_json::from_str(&std::fs::read_to_string(dir(name).join("config.json")).unwrap()).unwrap()
}

fn parse(value: &Value) -> Result<ModelConfig> {
    ModelConfig::parse(&value.to_string(), Path::new("somewhere/config.json"))
}

/// The object and key that `pointer` (`/a/b/c`) names.
fn set(value: &mut Value, pointer: &str, new: Option<Value>) {
    let (parent, key) = pointer.rsplit_once('/').unwrap();
    let object = value.pointer_mut(parent).unwrap().as_object_mut().unwrap();
    match new {
        Some(new) => object.insert(key.to_owned(), new),
        None => object.shift_remove(key),
    };
}

/// The message for `base` with `pointer` set to `new` (`None`: removed), which must name file and key.
fn refused(base: &str, pointer: &str, new: Option<Value>) -> String {
    let mut value = raw(base);
    set(&mut value, pointer, new.clone());
    let error = parse(&value).expect_err(&format!("{base}: {pointer} = {new:?} was accepted"));
    assert_eq!(error.kind(), Kind::Model);
    assert!(error.message().starts_with("somewhere/config.json: "), "{error}");
    let key = pointer.rsplit_once('/').unwrap().1;
    assert!(error.message().contains(key), "{pointer} = {new:?}: the message does not name the key: {error}");
    error.message().to_owned()
}

fn accepted(base: &str, changes: &[(&str, Option<Value>)]) -> ModelConfig {
    let mut value = raw(base);
    for (pointer, new) in changes {
        set(&mut value, pointer, new.clone());
    }
    parse(&value).unwrap_or_else(|e| panic!("{base} with {changes:?}: {e}"))
}

#[test]
fn the_released_k3_is_read_in_full() {
    let config = ModelConfig::load(&dir("tests/golden/k3")).unwrap();
    assert_eq!(config.family, Family::KimiK3);
    assert_eq!((config.hidden_size, config.vocab_size, config.max_position_embeddings), (7168, 163_840, 1 << 20));
    assert_eq!(config.rms_norm_eps, 1e-5);
    assert_eq!(config.activation, Activation::Situ { beta: 4.0, linear_beta: 25.0 });
    assert_eq!((config.intermediate_size, config.attn_res_block_size), (33792, Some(12)));
    assert!(!config.tie_word_embeddings);
    assert_eq!(config.layers.len(), 93);
    let mla: Vec<usize> = (0..93).filter(|&l| config.layers[l].attention == AttentionKind::Mla).collect();
    assert_eq!(mla, (3..92).step_by(4).chain([92]).collect::<Vec<_>>());
    assert!((0..93).all(|l| (config.layers[l].feed_forward == FeedForwardKind::Dense) == (l == 0)));
    assert_eq!(
        config.kda,
        KdaConfig {
            num_heads: 96,
            head_dim: 128,
            short_conv_kernel_size: 4,
            gate_lower_bound: Some(-5.0),
            use_full_rank_gate: true
        }
    );
    assert_eq!(
        config.mla,
        MlaConfig {
            num_heads: 96,
            q_lora_rank: Some(1536),
            kv_lora_rank: 512,
            qk_nope_head_dim: 128,
            qk_rope_head_dim: 64,
            v_head_dim: 128,
            use_output_gate: true
        }
    );
    assert_eq!(
        config.moe.unwrap(),
        MoeConfig {
            num_experts: 896,
            num_experts_per_token: 16,
            moe_intermediate_size: 3072,
            routed_expert_hidden_size: Some(3584),
            latent_moe_use_norm: true,
            num_shared_experts: 2,
            num_expert_group: 1,
            topk_group: 1,
            moe_renormalize: true,
            routed_scaling_factor: 1.0
        }
    );
    assert_eq!((config.bos_token_ids, config.eos_token_ids), (vec![163_584], vec![163_586]));
}

#[test]
fn the_flat_form_says_by_absence_what_it_lacks() {
    let config = ModelConfig::load(&dir(LINEAR)).unwrap();
    assert_eq!(config.family, Family::KimiLinear);
    assert_eq!(config.max_position_embeddings, 4096);
    assert_eq!(config.activation, Activation::Silu);
    assert_eq!(config.attn_res_block_size, None);
    assert_eq!((config.kda.gate_lower_bound, config.kda.use_full_rank_gate), (None, false));
    assert_eq!((config.mla.q_lora_rank, config.mla.use_output_gate), (None, false));
    let moe = config.moe.unwrap();
    assert_eq!((moe.routed_expert_hidden_size, moe.latent_moe_use_norm), (None, false));
    assert_eq!(moe.routed_scaling_factor, 2.446);
}

#[test]
fn the_other_fixtures_load() {
    for name in [TINY, "tests/golden/odd-k3", "assets/demo-model"] {
        ModelConfig::load(&dir(name)).unwrap();
    }
}

/// Keys of the text model that every published form has.
const NEEDED: [&str; 30] = [
    "model_type",
    "hidden_size",
    "vocab_size",
    "rms_norm_eps",
    "hidden_act",
    "intermediate_size",
    "num_hidden_layers",
    "first_k_dense_replace",
    "linear_attn_config",
    "num_attention_heads",
    "num_key_value_heads",
    "q_lora_rank",
    "kv_lora_rank",
    "qk_nope_head_dim",
    "qk_rope_head_dim",
    "v_head_dim",
    "mla_use_nope",
    "num_experts",
    "num_experts_per_token",
    "moe_intermediate_size",
    "num_shared_experts",
    "num_expert_group",
    "topk_group",
    "use_grouped_topk",
    "moe_renormalize",
    "routed_scaling_factor",
    "moe_router_activation_func",
    "moe_layer_freq",
    "num_nextn_predict_layers",
    "tie_word_embeddings",
];

#[test]
fn a_removed_or_mistyped_key_is_refused_by_name() {
    for (base, at) in [(TINY, "/text_config"), (LINEAR, "")] {
        for key in NEEDED {
            let pointer = format!("{at}/{key}");
            refused(base, &pointer, None);
            for wrong in [json!("abc"), json!([1]), json!({"a": 1}), json!(-1), json!(1.5), json!("1")] {
                // A scaling factor may well be 1.5.
                if key != "routed_scaling_factor" || wrong != json!(1.5) {
                    refused(base, &pointer, Some(wrong));
                }
            }
            let is_bool = raw(base).pointer(&pointer).unwrap().is_boolean();
            refused(base, &pointer, Some(if is_bool { json!(1) } else { json!(true) }));
        }
        for key in ["kda_layers", "full_attn_layers", "head_dim", "num_heads", "short_conv_kernel_size"] {
            let pointer = format!("{at}/linear_attn_config/{key}");
            for wrong in [None, Some(json!(null)), Some(json!(-4)), Some(json!("4")), Some(json!(0)), Some(json!(true))]
            {
                refused(base, &pointer, wrong);
            }
        }
    }
    for key in ["activation_situ_beta", "activation_situ_linear_beta", "max_position_embeddings", "topk_method"] {
        refused(TINY, &format!("/text_config/{key}"), None);
    }
    refused(TINY, "/text_config", None);
    refused(LINEAR, "/model_max_length", None);
}

#[test]
fn a_k3_without_the_decay_bound_is_refused_and_with_null_is_softplus() {
    let pointer = "/text_config/linear_attn_config/gate_lower_bound";
    refused(TINY, pointer, None);
    refused(TINY, pointer, Some(json!(5.0)));
    refused(TINY, pointer, Some(json!("-5")));
    assert_eq!(accepted(TINY, &[(pointer, Some(json!(null)))]).kda.gate_lower_bound, None);
    assert_eq!(accepted(TINY, &[(pointer, Some(json!(-7)))]).kda.gate_lower_bound, Some(-7.0));
    assert_eq!(
        accepted(LINEAR, &[("/linear_attn_config/gate_lower_bound", Some(json!(-5)))]).kda.gate_lower_bound,
        Some(-5.0)
    );
}

#[test]
fn keys_whose_absence_is_a_statement_may_be_absent() {
    let without = |key: &str| accepted(TINY, &[(&format!("/text_config/{key}"), None)]);
    assert_eq!(without("attn_res_block_size").attn_res_block_size, None);
    let moe = without("routed_expert_hidden_size").moe.unwrap();
    assert_eq!((moe.routed_expert_hidden_size, moe.latent_moe_use_norm), (None, false));
    assert!(!without("latent_moe_use_norm").moe.unwrap().latent_moe_use_norm);
    assert!(!without("mla_use_output_gate").mla.use_output_gate);
    assert!(!without("linear_attn_config/use_full_rank_gate").kda.use_full_rank_gate);
    assert_eq!(
        accepted(TINY, &[("/text_config/num_shared_experts", Some(json!(null)))]).moe.unwrap().num_shared_experts,
        0
    );
    assert_eq!(
        accepted(TINY, &[("/text_config/num_shared_experts", Some(json!(0)))]).moe.unwrap().num_shared_experts,
        0
    );
    assert_eq!(accepted(TINY, &[("/text_config/hidden_act", Some(json!("silu")))]).activation, Activation::Silu);
    without("quantization_config");
}

#[test]
fn what_is_not_computed_here_is_refused_with_its_value() {
    let text = [
        ("hidden_act", json!("gelu")),
        ("moe_router_activation_func", json!("softmax")),
        ("mla_use_nope", json!(false)),
        ("moe_layer_freq", json!(2)),
        ("num_nextn_predict_layers", json!(1)),
        ("num_key_value_heads", json!(2)),
        ("rope_scaling", json!({"type": "yarn"})),
        ("topk_method", json!("greedy")),
        ("num_expert_group", json!(5)),
        ("topk_group", json!(2)),
        ("num_experts_per_token", json!(33)),
        ("model_type", json!("deepseek_v3")),
        ("attention_bias", json!(true)),
        ("mlp_bias", json!(true)),
        ("logit_scale", json!(0.5)),
        ("sliding_window", json!(4096)),
        ("final_logit_softcapping", json!(30.0)),
        ("pruned_heads", json!({"1": [2]})),
        ("rope_parameters", json!({"rope_type": "yarn"})),
        ("attention_kind", json!("other")),
        ("eos_token_id", json!(512)),
        ("eos_token_id", json!([1, -2])),
        ("bos_token_id", json!("1")),
        ("first_k_dense_replace", json!(14)),
        ("model_max_length", json!(77)),
        ("hidden_size", json!(0)),
        ("hidden_size", json!(u64::MAX)),
        ("num_experts", json!(70000)),
        ("attn_res_block_size", json!(0)),
        ("q_lora_rank", json!(0)),
        ("rms_norm_eps", json!(0)),
        ("rms_norm_eps", json!(1e-60)),
        ("routed_scaling_factor", json!(0.0)),
        ("routed_scaling_factor", json!(1e39)),
    ];
    for (key, value) in text {
        let message = refused(TINY, &format!("/text_config/{key}"), Some(value.clone()));
        if value.is_string() || value.is_boolean() {
            assert!(message.contains(&value.to_string()), "{message}");
        }
    }
    refused(TINY, "/text_config/linear_attn_config/kda_use_qk_norm", Some(json!(true)));
    refused(TINY, "/text_config/linear_attn_config/anything", Some(json!(null)));
    refused(TINY, "/tie_word_embeddings", Some(json!(true)));
    refused(TINY, "/rope_scaling", Some(json!({"factor": 4})));
    let quantization = "/text_config/quantization_config";
    refused(TINY, &format!("{quantization}/quant_method"), Some(json!("gptq")));
    refused(TINY, &format!("{quantization}/format"), Some(json!("nvfp4-pack-quantized")));
    refused(TINY, &format!("{quantization}/config_groups/group_1"), Some(json!({"a": 1})));
    for (key, value) in
        [("group_size", json!(16)), ("num_bits", json!(8)), ("type", json!("int")), ("actorder", json!("weight"))]
    {
        refused(TINY, &format!("{quantization}/config_groups/group_0/weights/{key}"), Some(value));
    }
    refused(TINY, "/quantization_config", Some(json!({"quant_method": "fp8", "format": "fp8"})));
}

#[test]
fn harmless_and_switched_off_keys_are_let_through() {
    for (key, value) in [
        ("attention_bias", json!(false)),
        ("sliding_window", json!(null)),
        ("rope_scaling", json!(null)),
        ("rope_theta", json!(10000.0)),
        ("attention_dropout", json!(0.0)),
        ("_commit_hash", json!("abc")),
        ("torch_dtype", json!("bfloat16")),
    ] {
        accepted(TINY, &[(&format!("/text_config/{key}"), Some(value))]);
    }
}

#[test]
fn groups_must_divide_and_hold_enough() {
    let with = |groups: u32, kept: u32, per_token: u32| {
        let mut value = raw(TINY);
        for (key, n) in [("num_expert_group", groups), ("topk_group", kept), ("num_experts_per_token", per_token)] {
            set(&mut value, &format!("/text_config/{key}"), Some(json!(n)));
        }
        parse(&value)
    };
    assert_eq!(with(8, 3, 12).unwrap().moe.unwrap().topk_group, 3);
    assert!(with(8, 3, 13).unwrap_err().message().contains("num_experts_per_token"));
    assert!(with(32, 8, 4).unwrap_err().message().contains("num_expert_group"));
    let ungrouped =
        [("/text_config/num_expert_group", Some(json!(8))), ("/text_config/use_grouped_topk", Some(json!(false)))];
    let mut value = raw(TINY);
    ungrouped.iter().for_each(|(pointer, new)| set(&mut value, pointer, new.clone()));
    assert!(parse(&value).unwrap_err().message().contains("use_grouped_topk"));
}

#[test]
fn layer_lists_must_name_each_layer_once() {
    let kda = "/text_config/linear_attn_config/kda_layers";
    for (list, named) in [
        (json!([1, 2, 3, 5, 6, 7, 9, 10]), "layer 11"),
        (json!([0, 1, 2, 3, 5, 6, 7, 9, 10, 11]), "found 0"),
        (json!([1, 2, 3, 5, 6, 7, 9, 10, 11, 14]), "found 14"),
        (json!([1, 2, 3, 5, 6, 7, 9, 10, 11, 11]), "layer 11"),
        (json!([1, 2, 3, 4, 5, 6, 7, 9, 10, 11]), "layer 4"),
        (json!([1, 2, 3, 5, 6, 7, 9, 10, "11"]), "found \"11\""),
        (json!([1, 2, 3, 5, 6, 7, 9, 10, 11.0]), "found 11.0"),
        (json!([]), "layer 1 "),
    ] {
        let message = refused(TINY, kda, Some(list));
        assert!(message.contains(named), "{message}");
    }
}

#[test]
fn end_ids_are_the_union_of_both_levels() {
    let config = accepted(
        TINY,
        &[("/eos_token_id", Some(json!([3, 510]))), ("/text_config/eos_token_id", Some(json!([510, 7])))],
    );
    assert_eq!(config.eos_token_ids, [510, 7, 3]);
    assert!(accepted(LINEAR, &[("/eos_token_id", None)]).eos_token_ids.is_empty());
}

#[test]
fn a_model_may_be_dense_throughout() {
    assert!(accepted(TINY, &[("/text_config/first_k_dense_replace", Some(json!(13)))]).moe.is_none());
    let config = accepted(TINY, &[("/text_config/num_experts", Some(json!(null)))]);
    assert!(config.moe.is_none() && config.layers.iter().all(|l| l.feed_forward == FeedForwardKind::Dense));
}

#[test]
fn broken_files_are_refused_in_words() {
    let temp = tempfile::tempdir().unwrap();
    let path = temp.path().join("config.json");
    let message = || ModelConfig::load(temp.path()).unwrap_err().message().to_owned();
    assert!(message().contains("does not look like a model directory"));
    std::fs::write(temp.path().join("experts.list"), "").unwrap();
    assert!(message().contains("is a root of packed experts"));
    std::fs::remove_file(temp.path().join("experts.list")).unwrap();
    std::fs::write(temp.path().join("model.safetensors"), "").unwrap();
    assert!(message().contains("config.json is missing"));
    let whole = std::fs::read_to_string(dir(TINY).join("config.json")).unwrap();
    for (content, expected) in [
        (&b""[..], "is empty"),
        (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 8000\n", "Git-LFS pointer"),
        (b"{\"a\": \"\xff\"}", "not UTF-8"),
        (b"[1, 2]", "expected an object"),
        (b"{\"model_type\": NaN}", "not valid JSON"),
        (&whole.as_bytes()[..whole.len() / 2], "not valid JSON"),
        (whole.replace("\"dtype\"", "\"model_type\"").as_bytes(), "\"model_type\" occurs twice"),
        (whole.replace("\"q_lora_rank\": 96", "\"kv_lora_rank\": 96").as_bytes(), "\"kv_lora_rank\" occurs twice"),
        ("[".repeat(100_000).as_bytes(), "not valid JSON"),
    ] {
        std::fs::write(&path, content).unwrap();
        assert!(message().contains(expected), "{}", message());
        assert!(message().contains("config.json"), "{}", message());
    }
    std::fs::remove_file(&path).unwrap();
    std::fs::create_dir(&path).unwrap();
    assert!(message().contains("is a directory"));
    assert!(ModelConfig::load(&temp.path().join("nowhere")).unwrap_err().message().contains("does not exist"));
}
