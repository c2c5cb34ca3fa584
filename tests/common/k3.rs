//! The released K3 without its weights: the real index, and sparse shards with the headers that go with it.

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::{Read, Write};
use std::path::Path;

use serde_json::Value;

use super::{CONFIG, INDEX, fixture};

/// Writes the released configuration, index and sparse shards into `dir`.
pub fn write(dir: &Path) {
    fs::copy(fixture("tests/golden/k3/config.json"), dir.join(CONFIG)).unwrap();
    let mut index = String::new();
    let packed = File::open(fixture("tests/golden/k3/model.safetensors.index.json.gz")).unwrap();
    flate2::read::GzDecoder::new(packed).read_to_string(&mut index).unwrap();
    fs::write(dir.join(INDEX), &index).unwrap();

    let index: Value = serde_json::from_str(&index).unwrap();
    let mut shards: BTreeMap<&str, Vec<&str>> = BTreeMap::new();
    for (tensor, shard) in index["weight_map"].as_object().unwrap() {
        shards.entry(shard.as_str().unwrap()).or_default().push(tensor);
    }
    for (shard, tensors) in shards {
        write_sparse(&dir.join(shard), &tensors);
    }
}

fn write_sparse(path: &Path, tensors: &[&str]) {
    let mut header = String::from("{");
    let mut end = 0;
    for name in tensors {
        let (dtype, shape) = dtype_and_shape(name);
        let size = if dtype == "U8" {
            1
        } else if dtype == "BF16" {
            2
        } else {
            4
        };
        let begin = end;
        end += shape.iter().product::<u64>() * size;
        let comma = if begin == 0 { "" } else { "," };
        let entry = format!("{{\"dtype\":\"{dtype}\",\"shape\":{shape:?},\"data_offsets\":[{begin},{end}]}}");
        header.push_str(&format!("{comma}\"{name}\":{entry}"));
    }
    header.push('}');
    let mut file = File::create(path).unwrap();
    file.write_all(&(header.len() as u64).to_le_bytes()).unwrap();
    file.write_all(header.as_bytes()).unwrap();
    file.set_len(8 + header.len() as u64 + end).unwrap();
}

/// As released; the vision half's shapes are made up.
fn dtype_and_shape(name: &str) -> (&'static str, Vec<u64>) {
    const MLA: [u64; 24] =
        [3, 7, 11, 15, 19, 23, 27, 31, 35, 39, 43, 47, 51, 55, 59, 63, 67, 71, 75, 79, 83, 87, 91, 92];
    let Some(name) = name.strip_prefix("language_model.") else { return ("BF16", vec![16]) };
    let Some(rest) = name.strip_prefix("model.layers.") else {
        return match name {
            "model.embed_tokens.weight" | "lm_head.weight" => ("BF16", vec![163_840, 7168]),
            "model.output_attn_res_proj.weight" => ("BF16", vec![1, 7168]),
            _ => ("BF16", vec![7168]),
        };
    };
    let (layer, rest) = rest.split_once('.').unwrap();
    let is_mla = MLA.contains(&layer.parse().unwrap());
    let suffix = rest.strip_prefix("block_sparse_moe.experts.").map_or(rest, |e| e.split_once('.').unwrap().1);
    let (f32, shape): (bool, &[u64]) = match suffix {
        "w1.weight_packed" | "w3.weight_packed" => return ("U8", vec![3072, 1792]),
        "w1.weight_scale" | "w3.weight_scale" => return ("U8", vec![3072, 112]),
        "w2.weight_packed" => return ("U8", vec![3584, 1536]),
        "w2.weight_scale" => return ("U8", vec![3584, 96]),
        "self_attn.A_log" => (true, &[128]),
        "self_attn.dt_bias" => (true, &[12288]),
        "self_attn.q_conv1d.weight" | "self_attn.k_conv1d.weight" | "self_attn.v_conv1d.weight" => {
            (true, &[12288, 1, 4])
        }
        "self_attn.o_norm.weight" => (true, &[128]),
        "block_sparse_moe.gate.e_score_correction_bias" => (true, &[896]),
        "self_attn.q_proj.weight"
        | "self_attn.k_proj.weight"
        | "self_attn.v_proj.weight"
        | "self_attn.g_proj.weight" => (false, &[12288, 7168]),
        "self_attn.o_proj.weight" => (false, &[7168, 12288]),
        "self_attn.f_a_proj.weight" => (false, &[128, 7168]),
        "self_attn.f_b_proj.weight" => (false, &[12288, 128]),
        "self_attn.b_proj.weight" => (false, &[96, 7168]),
        "self_attn.q_a_proj.weight" if is_mla => (false, &[1536, 7168]),
        "self_attn.q_a_layernorm.weight" => (false, &[1536]),
        "self_attn.q_b_proj.weight" => (false, &[18432, 1536]),
        "self_attn.kv_a_proj_with_mqa.weight" => (false, &[576, 7168]),
        "self_attn.kv_a_layernorm.weight" => (false, &[512]),
        "self_attn.kv_b_proj.weight" => (false, &[24576, 512]),
        "block_sparse_moe.gate.weight" => (false, &[896, 7168]),
        "block_sparse_moe.routed_expert_down_proj.weight" => (false, &[3584, 7168]),
        "block_sparse_moe.routed_expert_up_proj.weight" => (false, &[7168, 3584]),
        "block_sparse_moe.routed_expert_norm.weight" => (false, &[3584]),
        "block_sparse_moe.shared_experts.gate_proj.weight" | "block_sparse_moe.shared_experts.up_proj.weight" => {
            (false, &[6144, 7168])
        }
        "block_sparse_moe.shared_experts.down_proj.weight" => (false, &[7168, 6144]),
        "mlp.gate_proj.weight" | "mlp.up_proj.weight" => (false, &[33792, 7168]),
        "mlp.down_proj.weight" => (false, &[7168, 33792]),
        "self_attention_res_proj.weight" | "mlp_res_proj.weight" => (false, &[1, 7168]),
        "input_layernorm.weight"
        | "post_attention_layernorm.weight"
        | "self_attention_res_norm.weight"
        | "mlp_res_norm.weight" => (false, &[7168]),
        other => panic!("no shape known for {other}"),
    };
    (if f32 { "F32" } else { "BF16" }, shape.to_vec())
}
