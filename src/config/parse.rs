//! The fields of both forms of `config.json`, in the order of [`ModelConfig`].

use super::json::Json;
use super::layers::attention_kinds;
use super::section::Section;
use super::{
    Activation, AttentionKind, Family, FeedForwardKind, KdaConfig, LayerConfig, MlaConfig, ModelConfig, MoeConfig,
};

/// Largest value taken for any width or head count: products of three stay far inside 64 bits.
const WIDTH_MAX: u64 = 1 << 20;
const VOCAB_MAX: u64 = 1 << 24;
const LAYERS_MAX: u64 = 4096;
const EXPERTS_MAX: u64 = u16::MAX as u64;
const CONTEXT_MAX: u64 = 1 << 31;

/// Keys that say nothing about what a step computes: the training framework's own, how text is generated or rendered,
/// what is left alone (vision), and rotary leftovers, which `mla_use_nope` makes void.
const HARMLESS: &[&str] = &[
    "architectures",
    "attention_dropout",
    "auto_map",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "decoder_start_token_id",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "forced_bos_token_id",
    "forced_eos_token_id",
    "head_dim",
    "id2label",
    "ignore_index",
    "image_placeholder",
    "initializer_range",
    "label2id",
    "length_penalty",
    "max_length",
    "media_placeholder_token_id",
    "min_length",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "pad_token_id",
    "prefix",
    "problem_type",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "rope_theta",
    "router_aux_loss_coef",
    "sep_token_id",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "use_bfloat16",
    "use_cache",
    "video_placeholder",
    "vision_config",
];

/// Reads `text`; errors name key, value and expectation, but not the file.
pub(super) fn model(text: &str) -> Result<ModelConfig, String> {
    let json = Json::parse(text)?;
    let root = Section::root(&json)?;
    match root.text("model_type", "\"kimi_k3\" or \"kimi_linear\"")? {
        "kimi_k3" => nested(&root),
        "kimi_linear" => {
            let config = text_model(&root, Family::KimiLinear)?;
            root.refuse_unknown(HARMLESS, true)?;
            Ok(config)
        }
        other => Err(root.wrong("model_type", "\"kimi_k3\" or \"kimi_linear\"", &Json::Text(other.to_owned()))),
    }
}

/// The K3 form: the text model under `text_config`; what the outer object repeats must agree with it.
fn nested(root: &Section<'_>) -> Result<ModelConfig, String> {
    let text_config = root.section("text_config")?;
    text_config.only("model_type", &Json::Text("kimi_linear".into()))?;
    let mut config = text_model(&text_config, Family::KimiK3)?;
    text_config.refuse_unknown(HARMLESS, true)?;
    if root.get("tie_word_embeddings").is_some() && root.bool("tie_word_embeddings")? != config.tie_word_embeddings {
        return Err(format!(
            "tie_word_embeddings is {}, but text_config.tie_word_embeddings is {}",
            !config.tie_word_embeddings, config.tie_word_embeddings
        ));
    }
    quantization(root)?;
    add_ids(&mut config.bos_token_ids, root.token_ids("bos_token_id", config.vocab_size)?);
    add_ids(&mut config.eos_token_ids, root.token_ids("eos_token_id", config.vocab_size)?);
    root.refuse_unknown(HARMLESS, true)?;
    Ok(config)
}

fn add_ids(ids: &mut Vec<u32>, more: Vec<u32>) {
    for id in more {
        if !ids.contains(&id) {
            ids.push(id);
        }
    }
}

fn text_model(s: &Section<'_>, family: Family) -> Result<ModelConfig, String> {
    let num_layers = s.int("num_hidden_layers", 1..=LAYERS_MAX)?;
    let vocab_size = s.int("vocab_size", 1..=VOCAB_MAX)?;
    let linear = s.section("linear_attn_config")?;
    let attention = attention_kinds(&linear, num_layers)?;
    let kda = kda(&linear, family)?;
    linear.refuse_unknown(&[], false)?;
    let moe = moe(s, family)?;
    let first_moe_layer = s.int("first_k_dense_replace", 0..=num_layers as u64)?;
    let feed_forward = |layer: usize| match &moe {
        Some(_) if layer >= first_moe_layer => FeedForwardKind::Moe,
        _ => FeedForwardKind::Dense,
    };
    let layers: Vec<LayerConfig> = (attention.into_iter().enumerate())
        .map(|(layer, attention): (usize, AttentionKind)| LayerConfig { attention, feed_forward: feed_forward(layer) })
        .collect();
    s.only("num_nextn_predict_layers", &Json::Number("0".into()))?;
    s.only_if_given("rope_scaling", &Json::Null)?;
    quantization(s)?;
    let mut ids = [Vec::new(), Vec::new()];
    add_ids(&mut ids[0], s.token_ids("bos_token_id", vocab_size)?);
    add_ids(&mut ids[1], s.token_ids("eos_token_id", vocab_size)?);
    let [bos_token_ids, eos_token_ids] = ids;
    Ok(ModelConfig {
        family,
        hidden_size: s.int("hidden_size", 1..=WIDTH_MAX)?,
        vocab_size,
        max_position_embeddings: context(s)?,
        rms_norm_eps: s.float("rms_norm_eps", "a number between 0 and 1", |x| x > 0.0 && x < 1.0)?,
        activation: activation(s)?,
        intermediate_size: s.int("intermediate_size", 1..=WIDTH_MAX)?,
        attn_res_block_size: s.int_or_absent("attn_res_block_size", 1..=LAYERS_MAX)?,
        tie_word_embeddings: s.bool("tie_word_embeddings")?,
        moe: moe.filter(|_| first_moe_layer < num_layers),
        layers,
        kda,
        mla: mla(s)?,
        bos_token_ids,
        eos_token_ids,
    })
}

/// K3 writes `max_position_embeddings`, Kimi-Linear `model_max_length`; with both, they must say the same.
fn context(s: &Section<'_>) -> Result<usize, String> {
    let long = s.int_or_absent("max_position_embeddings", 1..=CONTEXT_MAX)?;
    let short = s.int_or_absent("model_max_length", 1..=CONTEXT_MAX)?;
    match (long, short) {
        (Some(a), Some(b)) if a != b => {
            Err(format!("{} is {a}, but {} is {b}", s.path("max_position_embeddings"), s.path("model_max_length")))
        }
        (Some(context), _) | (None, Some(context)) => Ok(context),
        (None, None) => Err(s.missing("max_position_embeddings", "this or model_max_length, a whole number")),
    }
}

fn activation(s: &Section<'_>) -> Result<Activation, String> {
    let expected = "\"silu\" or \"situ\"";
    let positive = |key| s.float(key, "a number above 0", |x| x > 0.0);
    match s.text("hidden_act", expected)? {
        "situ" => Ok(Activation::Situ {
            beta: positive("activation_situ_beta")?,
            linear_beta: positive("activation_situ_linear_beta")?,
        }),
        "silu" => {
            // Present in the nested form whatever the activation; without SiTU nothing reads them.
            s.get("activation_situ_beta");
            s.get("activation_situ_linear_beta");
            Ok(Activation::Silu)
        }
        other => Err(s.wrong("hidden_act", expected, &Json::Text(other.to_owned()))),
    }
}

fn kda(linear: &Section<'_>, family: Family) -> Result<KdaConfig, String> {
    const KEY: &str = "gate_lower_bound";
    const EXPECTED: &str = "a number below 0, or null for the softplus decay";
    // Without this key the decay would be another one, and no tensor would tell.
    if family == Family::KimiK3 && linear.get(KEY).is_none() {
        return Err(linear.missing(KEY, EXPECTED));
    }
    let gate_lower_bound =
        linear.get_some(KEY).map(|value| linear.as_float(KEY, value, EXPECTED, |x| x < 0.0)).transpose()?;
    Ok(KdaConfig {
        num_heads: linear.int("num_heads", 1..=WIDTH_MAX)?,
        head_dim: linear.int("head_dim", 1..=WIDTH_MAX)?,
        // One tap would leave no state between steps.
        short_conv_kernel_size: linear.int("short_conv_kernel_size", 2..=64)?,
        gate_lower_bound,
        use_full_rank_gate: linear.bool_or_absent("use_full_rank_gate")?,
    })
}

fn mla(s: &Section<'_>) -> Result<MlaConfig, String> {
    s.only("mla_use_nope", &Json::Bool(true))?;
    let num_heads = s.int("num_attention_heads", 1..=WIDTH_MAX)?;
    let kv_heads = s.int("num_key_value_heads", 1..=WIDTH_MAX)?;
    if kv_heads != num_heads {
        let expected = format!("{num_heads}, as num_attention_heads");
        return Err(s.wrong("num_key_value_heads", &expected, &Json::Number(kv_heads.to_string())));
    }
    Ok(MlaConfig {
        num_heads,
        q_lora_rank: s.int_or_null("q_lora_rank", 1..=WIDTH_MAX)?,
        kv_lora_rank: s.int("kv_lora_rank", 1..=WIDTH_MAX)?,
        qk_nope_head_dim: s.int("qk_nope_head_dim", 1..=WIDTH_MAX)?,
        qk_rope_head_dim: s.int("qk_rope_head_dim", 1..=WIDTH_MAX)?,
        v_head_dim: s.int("v_head_dim", 1..=WIDTH_MAX)?,
        use_output_gate: s.bool_or_absent("mla_use_output_gate")?,
    })
}

/// The keys that only routed experts give a meaning.
const MOE_KEYS: [&str; 12] = [
    "num_experts_per_token",
    "moe_intermediate_size",
    "routed_expert_hidden_size",
    "latent_moe_use_norm",
    "num_shared_experts",
    "num_expert_group",
    "topk_group",
    "use_grouped_topk",
    "topk_method",
    "moe_renormalize",
    "routed_scaling_factor",
    "moe_router_activation_func",
];

fn moe(s: &Section<'_>, family: Family) -> Result<Option<MoeConfig>, String> {
    s.only("moe_layer_freq", &Json::Number("1".into()))?;
    let Some(num_experts) = s.int_or_null("num_experts", 1..=EXPERTS_MAX)? else {
        for key in MOE_KEYS {
            s.get(key);
        }
        return Ok(None);
    };
    s.only("moe_router_activation_func", &Json::Text("sigmoid".into()))?;
    let noaux_tc = Json::Text("noaux_tc".into());
    match family {
        Family::KimiK3 => s.only("topk_method", &noaux_tc)?,
        // Kimi-Linear has no such key: its `e_score_correction_bias` says the same.
        Family::KimiLinear => s.only_if_given("topk_method", &noaux_tc)?,
    }
    let routed_expert_hidden_size = s.int_or_absent("routed_expert_hidden_size", 1..=WIDTH_MAX)?;
    let use_norm = s.bool_or_absent("latent_moe_use_norm")?;
    let moe = MoeConfig {
        num_experts,
        num_experts_per_token: s.int("num_experts_per_token", 1..=num_experts as u64)?,
        moe_intermediate_size: s.int("moe_intermediate_size", 1..=WIDTH_MAX)?,
        routed_expert_hidden_size,
        // Without a latent there is nothing to norm; a norm tensor that is there all the same is one too many.
        latent_moe_use_norm: use_norm && routed_expert_hidden_size.is_some(),
        num_shared_experts: s.int_or_null("num_shared_experts", 0..=EXPERTS_MAX)?.unwrap_or(0),
        num_expert_group: s.int("num_expert_group", 1..=num_experts as u64)?,
        topk_group: s.int("topk_group", 1..=num_experts as u64)?,
        moe_renormalize: s.bool("moe_renormalize")?,
        routed_scaling_factor: s.float("routed_scaling_factor", "a number above 0", |x| x > 0.0)?,
    };
    groups(s, &moe)?;
    Ok(Some(moe))
}

/// Checks that the router's groups can be formed and hold enough experts.
fn groups(s: &Section<'_>, moe: &MoeConfig) -> Result<(), String> {
    let (experts, groups, kept) = (moe.num_experts, moe.num_expert_group, moe.topk_group);
    let found = |n: usize| Json::Number(n.to_string());
    if kept > groups {
        return Err(s.wrong("topk_group", &format!("at most num_expert_group, {groups}"), &found(kept)));
    }
    let grouped = s.bool("use_grouped_topk")?;
    if groups == 1 {
        return Ok(());
    }
    if !grouped {
        return Err(s.wrong("use_grouped_topk", &format!("true with num_expert_group {groups}"), &Json::Bool(false)));
    }
    if !experts.is_multiple_of(groups) || experts / groups < 2 {
        let expected = format!("a divisor of num_experts, {experts}, that leaves two or more a group");
        return Err(s.wrong("num_expert_group", &expected, &found(groups)));
    }
    let reachable = experts / groups * kept;
    if moe.num_experts_per_token > reachable {
        let expected = format!("at most the {reachable} experts of the {kept} kept groups");
        return Err(s.wrong("num_experts_per_token", &expected, &found(moe.num_experts_per_token)));
    }
    Ok(())
}

/// Which tensors are quantized is seen from their names; here only the one known way of quantizing is let through.
fn quantization(s: &Section<'_>) -> Result<(), String> {
    if s.get_some("quantization_config").is_none() {
        return Ok(());
    }
    let q = s.section("quantization_config")?;
    let text = |t: &str| Json::Text(t.to_owned());
    q.only("quant_method", &text("compressed-tensors"))?;
    q.only("format", &text("mxfp4-pack-quantized"))?;
    q.only_if_given("kv_cache_scheme", &Json::Null)?;
    q.only_if_given("quantization_status", &text("compressed"))?;
    let groups = q.section("config_groups")?;
    let group = groups.section("group_0")?;
    group.only_if_given("format", &text("mxfp4-pack-quantized"))?;
    group.only_if_given("input_activations", &Json::Null)?;
    group.only_if_given("output_activations", &Json::Null)?;
    group.list("targets", "a list of module kinds")?;
    let weights = group.section("weights")?;
    weights.only("num_bits", &Json::Number("4".into()))?;
    weights.only("group_size", &Json::Number("32".into()))?;
    weights.only("type", &text("float"))?;
    weights.only("strategy", &text("group"))?;
    weights.only("symmetric", &Json::Bool(true))?;
    weights.only_if_given("scale_dtype", &text("torch.uint8"))?;
    weights.refuse_unknown(&["observer", "observer_kwargs", "zp_dtype"], true)?;
    group.refuse_unknown(&[], true)?;
    groups.refuse_unknown(&[], true)?;
    q.refuse_unknown(&["global_compression_ratio", "ignore", "version"], true)
}
