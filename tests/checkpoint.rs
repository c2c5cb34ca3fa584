//! Model directories, whole and broken: what is refused, in which words, and at what cost.

mod common;

use std::time::{Duration, Instant};

use common::{CONFIG, Checkpoint, FIXTURES, INDEX, fixture, k3, zeros};
use deltafin::checkpoint::{Dtype, ExpertFormat, Manifest};
use deltafin::config::ModelConfig;
use serde_json::json;

const TINY: &str = FIXTURES[0];
const ODD: &str = FIXTURES[1];
const LINEAR: &str = FIXTURES[2];
const FIRST: &str = "model-00001-of-00002.safetensors";
const SECOND: &str = "model-00002-of-00002.safetensors";

fn assert_has(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "no {part:?} in: {message}");
    }
}

#[test]
fn every_fixture_opens_and_every_byte_is_where_the_safetensors_crate_finds_it() {
    for name in FIXTURES {
        let dir = fixture(name);
        let config = ModelConfig::load(&dir).unwrap();
        let manifest = Manifest::open(&dir, &config).unwrap_or_else(|e| panic!("{name}: {e}"));
        let files: Vec<Vec<u8>> = manifest.shards.iter().map(|path| std::fs::read(path).unwrap()).collect();
        let starts = files.iter().map(|file| file.as_ptr() as usize).collect::<Vec<_>>();
        let tensors: Vec<_> = files.iter().map(|file| safetensors::SafeTensors::deserialize(file).unwrap()).collect();
        let prefix = if name == LINEAR { "" } else { "language_model." };
        let place = |name: &str| {
            let mut found = tensors.iter().enumerate().filter_map(|(shard, t)| Some((shard, t.tensor(name).ok()?)));
            let (shard, view) = found.next().unwrap_or_else(|| panic!("{name} is in no shard"));
            (shard as u16, (view.data().as_ptr() as usize - starts[shard]) as u64, view.data().len() as u64)
        };
        for t in &manifest.trunk {
            assert_eq!(place(&format!("{prefix}{}", t.name)), (t.span.shard, t.span.offset, t.span.len), "{}", t.name);
        }
        let table = manifest.experts.as_ref().unwrap();
        let suffixes: &[&str] = match table.format {
            ExpertFormat::Mxfp4 => &[
                "w1.weight_packed",
                "w1.weight_scale",
                "w3.weight_packed",
                "w3.weight_scale",
                "w2.weight_packed",
                "w2.weight_scale",
            ],
            ExpertFormat::Bf16 => &["w1.weight", "w3.weight", "w2.weight"],
        };
        assert_eq!(table.format == ExpertFormat::Bf16, name == LINEAR);
        for &layer in &table.moe_layers {
            for expert in 0..table.num_experts as u16 {
                let places = table.places(layer, expert).unwrap();
                for ((suffix, bytes), at) in suffixes.iter().zip(&table.part_bytes).zip(places) {
                    let name = format!("{prefix}model.layers.{layer}.block_sparse_moe.experts.{expert}.{suffix}");
                    assert_eq!(place(&name), (at.0, at.1, *bytes), "{name}");
                }
            }
        }
        let count: usize = tensors.iter().map(|t| t.len()).sum();
        assert_eq!(manifest.tensor_count() + manifest.ignored.len(), count, "{name}");
        assert_eq!(manifest.ignored.len(), if name == TINY { 5 } else { 0 });
        let bytes: u64 = tensors.iter().flat_map(|t| t.iter()).map(|(_, view)| view.data().len() as u64).sum();
        if name != TINY {
            assert_eq!(manifest.trunk_bytes() + manifest.all_experts_bytes(), bytes);
        }
    }
}

#[test]
fn a_shard_cut_anywhere_is_refused_with_has_and_needs() {
    for name in [TINY, ODD, LINEAR] {
        let whole = Checkpoint::copy_of(name);
        for shard in whole.shards() {
            let len = whole.len(&shard);
            let header = u64::from_le_bytes(whole.read(&shard)[..8].try_into().unwrap());
            for cut in [len - 1, len - 1000, 8 + header, 8 + header - 1, 9, 8, 7, 1, 0] {
                let broken = Checkpoint::copy_of(name);
                broken.truncate(&shard, cut);
                let message = broken.refusal();
                assert_has(&message, &[&shard, &format!("has {cut} bytes, needs"), "layer"]);
                if cut >= 8 + header {
                    assert_has(&message, &[&format!("needs {len}")]);
                }
            }
        }
    }
}

#[test]
fn all_bad_shards_are_in_one_message() {
    let broken = Checkpoint::copy_of(ODD);
    broken.truncate("model-00001-of-00003.safetensors", 100);
    broken.write(
        "model-00002-of-00003.safetensors",
        "version https://git-lfs.github.com/spec/v1\noid sha256:4665\nsize 1234567\n",
    );
    broken.remove("model-00003-of-00003.safetensors");
    let message = broken.refusal();
    assert_has(&message, &["3 of 3", "00001-of", "has 100 bytes", "00002-of", "Git-LFS pointer", "needs 1234567"]);
    assert_has(&message, &["00003-of", "is missing", "layers 0–", "embedding, norm or head"]);
    assert!(broken.open().unwrap_err().hint_text().unwrap().contains("git lfs pull"));
}

#[test]
fn a_shard_may_not_be_longer_than_its_header_says_nor_be_a_directory() {
    let broken = Checkpoint::copy_of(TINY);
    broken.truncate(FIRST, broken.len(FIRST) + 1);
    assert_has(&broken.refusal(), &[FIRST, "but its header accounts for"]);
    broken.remove(FIRST);
    std::fs::create_dir(broken.file(FIRST)).unwrap();
    assert_has(&broken.refusal(), &[FIRST, "is a directory"]);
}

/// Opens a single-file checkpoint whose header is `header`, with a data part of `data` bytes; gives the message.
fn refusal_of_header(header: &str, data: u64) -> String {
    let broken = Checkpoint::copy_of(TINY);
    broken.remove(INDEX);
    broken.write_shard("model.safetensors", header, &vec![0; data as usize]);
    let start = Instant::now();
    let message = broken.refusal();
    assert!(start.elapsed() < Duration::from_secs(1));
    message
}

#[test]
fn hostile_headers_are_refused_by_what_is_wrong_with_them() {
    let a = |offsets: &str| format!(r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{offsets}}}}}"#);
    let two = |first: &str, second: &str| {
        format!(
            r#"{{"a":{{"dtype":"U8","shape":[4],"data_offsets":{first}}},"b":{{"dtype":"U8","shape":[4],"data_offsets":{second}}}}}"#
        )
    };
    let cases: [(String, u64, &[&str]); 28] = [
        (a("[4,0]"), 4, &["a: ", "reversed"]),
        (a("[0,8]"), 8, &["a: ", "has 4 bytes, but data_offsets span 8"]),
        (a("[2,6]"), 6, &["data bytes 0 to 2", "belong to no tensor"]),
        (a("[0,4]"), 3, &["needs"]),
        (a("[0,4]"), 5, &["accounts for"]),
        (a("[18446744073709551611,18446744073709551615]"), 4, &["beyond any file"]),
        (a("[0,18446744073709551616]"), 4, &["damaged"]),
        (a("[-4,0]"), 4, &["damaged"]),
        (a("[0,4.0]"), 4, &["damaged"]),
        (a("[0]"), 4, &["a: "]),
        (a("[0,4,4]"), 4, &["a: "]),
        (two("[0,4]", "[2,6]"), 6, &["a and b overlap"]),
        (two("[4,8]", "[4,8]"), 8, &["belong to no tensor"]),
        (two("[0,4]", "[8,12]"), 12, &["data bytes 4 to 8", "before b"]),
        (two("[0,4]", "[4,8]").replace("\"b\"", "\"a\""), 8, &["a occurs twice", "0 and 4"]),
        (two("[0,4]", "[4,8]").replace("\"b\"", "\"\\u0061\""), 8, &["a occurs twice"]),
        (a("[0,4]").replace("U8", "Q4_K"), 4, &["a: ", "unknown dtype \"Q4_K\""]),
        (a("[0,4]").replace("[4]", "[4294967296,4294967296,4294967296]"), 4, &["more than any file"]),
        (a("[0,4]").replace("[4]", "[-4]"), 4, &["a: "]),
        (a("[0,4]").replace("[4]", "4"), 4, &["a: "]),
        (a("[0,4]").replace("\"dtype\":\"U8\",", ""), 4, &["a: ", "dtype"]),
        (a("[0,4]").replace("\"shape\"", "\"dtype\":\"U8\",\"shape\""), 4, &["dtype occurs twice"]),
        (a("[0,4]").replace("\"shape\"", "\"order\":1,\"shape\""), 4, &["unknown key \"order\""]),
        (r#"{"__metadata__":{},"__metadata__":{}}"#.into(), 0, &["__metadata__ occurs twice"]),
        (r#"{"__metadata__":{"a":"","a":""}}"#.into(), 0, &["a occurs twice in __metadata__"]),
        ("{\"a\":3}".into(), 0, &["a: "]),
        ("[]".into(), 0, &["does not begin with {"]),
        ("{\"a\":".into(), 0, &["damaged"]),
    ];
    for (header, data, parts) in cases {
        assert_has(&refusal_of_header(&header, data), &[&["model.safetensors"], parts].concat());
    }
}

#[test]
fn a_claimed_header_length_is_not_believed() {
    for claimed in [u64::MAX, u64::MAX - 7, 1 << 63, 101_000_000, 100_000_001] {
        let broken = Checkpoint::copy_of(TINY);
        let mut bytes = broken.read(FIRST);
        bytes[..8].copy_from_slice(&claimed.to_le_bytes());
        broken.write(FIRST, &bytes);
        // Long enough for such a header, were the claim true.
        broken.truncate(FIRST, 200_000_000);
        assert_has(&broken.refusal(), &[FIRST, &format!("header of {claimed} bytes")]);
    }
    let broken = Checkpoint::copy_of(TINY);
    broken.write(FIRST, 99_000_000u64.to_le_bytes());
    broken.truncate(FIRST, 200_000_000);
    assert_has(&broken.refusal(), &[FIRST, "does not begin with {"]);
}

#[test]
fn the_index_must_be_whole_and_name_plain_files() {
    let broken = Checkpoint::copy_of(TINY);
    let whole = String::from_utf8(broken.read(INDEX)).unwrap();
    let norm = "\"language_model.model.norm.weight\"";
    for (text, parts) in [
        (whole[..whole.len() / 2].to_owned(), &["damaged"][..]),
        (String::new(), &["is empty"]),
        ("[]".into(), &["damaged"]),
        ("{}".into(), &["weight_map"]),
        ("{\"weight_map\": {}, \"weight_map\": {}}".into(), &["weight_map occurs twice"]),
        ("version https://git-lfs.github.com/spec/v1\nsize 3\n".into(), &["Git-LFS pointer"]),
        (whole.replace(&format!("{norm}:\"{FIRST}\""), &format!("{norm}:3")), &["model.norm.weight: "]),
        (whole.replace(&format!("{norm}:\""), &format!("{norm}:\"../")), &["model.norm.weight: ", "../model"]),
        (whole.replace(&format!("{norm}:\""), &format!("{norm}:\"/tmp/")), &["model.norm.weight: ", "/tmp/"]),
        (whole.replace(&format!("{norm}:\""), &format!("{norm}:\"sub/")), &["model.norm.weight: ", "sub/"]),
        (whole.replace(norm, &format!("{norm}:\"{SECOND}\",{norm}")), &["model.norm.weight twice", FIRST, SECOND]),
    ] {
        broken.write(INDEX, &text);
        assert_has(&broken.refusal(), &[&[INDEX], parts].concat());
    }
    broken.remove(INDEX);
    assert_has(&broken.refusal(), &["neither"]);
    assert_has(broken.open().unwrap_err().hint_text().unwrap(), &["2 other safetensors files"]);
    std::fs::create_dir(broken.file(INDEX)).unwrap();
    assert_has(&broken.refusal(), &[INDEX, "is a directory"]);
}

#[test]
fn a_tensor_listed_elsewhere_than_it_lies_is_refused_with_both_places() {
    for tensor in
        ["language_model.model.norm.weight", "language_model.model.layers.2.block_sparse_moe.experts.7.w3.weight_scale"]
    {
        let bare = tensor.trim_start_matches("language_model.");
        let broken = Checkpoint::copy_of(TINY);
        broken.edit_weight_map(|map| drop(map.insert(tensor.into(), json!(SECOND))));
        assert_has(&broken.refusal(), &[bare, FIRST, SECOND]);

        let broken = Checkpoint::copy_of(TINY);
        let copy = broken.tensors(FIRST).into_iter().find(|t| t.name == tensor).unwrap();
        let mut second = broken.tensors(SECOND);
        second.push(copy);
        broken.write_tensors(SECOND, &second);
        assert_has(&broken.refusal(), &[bare, "both", FIRST, SECOND]);

        let broken = Checkpoint::copy_of(TINY);
        broken.edit_weight_map(|map| drop(map.shift_remove(tensor)));
        assert_has(&broken.refusal(), &[bare, FIRST, "does not list it"]);

        let broken = Checkpoint::copy_of(TINY);
        let first: Vec<_> = broken.tensors(FIRST).into_iter().filter(|t| t.name != tensor).collect();
        broken.write_tensors(FIRST, &first);
        assert_has(&broken.refusal(), &[bare, FIRST, "does not hold it", "missing"]);
    }
}

#[test]
fn a_repeated_key_in_a_header_is_refused() {
    for tensor in ["model.norm.weight", "model.layers.2.block_sparse_moe.experts.7.w3.weight_scale"] {
        let broken = Checkpoint::copy_of(TINY);
        let (header, data) = broken.header(FIRST);
        let at = header.find(&format!("\"language_model.{tensor}\"")).unwrap();
        let end = at + header[at..].find('}').unwrap() + 1;
        let header = format!("{},{}", &header[..end], &header[at..]);
        broken.write_shard(FIRST, &header, &data);
        assert_has(&broken.refusal(), &[FIRST, tensor, "occurs twice"]);
    }
}

#[test]
fn files_beside_the_model_change_nothing() {
    let plain = Checkpoint::copy_of(TINY);
    let expected = plain.open().unwrap();
    plain.write("model-00003-of-00003.safetensors", "junk");
    plain.write("._model-00001-of-00002.safetensors", [0; 4096]);
    plain.write("model.safetensors", plain.read(SECOND));
    plain.write("adapter.safetensors", plain.read(FIRST));
    let found = plain.open().unwrap();
    assert_eq!((found.shards, found.trunk), (expected.shards, expected.trunk));
    assert_eq!(found.experts.unwrap().places, expected.experts.unwrap().places);

    let single = Checkpoint::copy_of(FIXTURES[3]);
    single.write("._model.safetensors", [0; 4096]);
    single.write("model-00001-of-00002.safetensors", "junk");
    assert_eq!(single.open().unwrap().shards.len(), 1);
}

#[test]
fn a_single_file_serves_without_an_index() {
    for name in [TINY, ODD, LINEAR] {
        let single = Checkpoint::copy_of(name);
        let trunk_bytes = single.open().unwrap().trunk_bytes();
        single.make_single_file();
        let manifest = single.open().unwrap();
        assert_eq!((manifest.shards.len(), manifest.trunk_bytes()), (1, trunk_bytes));
        assert_eq!(manifest.shard_bytes, [single.len("model.safetensors")]);
    }
}

#[cfg(unix)]
#[test]
fn links_as_in_a_hugging_face_cache_are_followed() {
    let real = Checkpoint::copy_of(TINY);
    let links = tempfile::tempdir().unwrap();
    for file in [CONFIG, INDEX, FIRST, SECOND] {
        std::os::unix::fs::symlink(real.file(file), links.path().join(file)).unwrap();
    }
    let config = ModelConfig::load(links.path()).unwrap();
    Manifest::open(links.path(), &config).unwrap();
    real.remove(SECOND);
    let message = Manifest::open(links.path(), &config).unwrap_err().message().to_owned();
    assert_has(&message, &[SECOND, "is a link to", "does not exist"]);
}

#[test]
fn one_tensor_too_many_or_too_few_is_told_by_layer() {
    for (name, dropped, expected) in [
        (TINY, "language_model.model.layers.5.mlp_res_norm.weight", "layer 5"),
        (TINY, "language_model.model.layers.5.block_sparse_moe.experts.31.w2.weight_scale", "layer 5"),
        (TINY, "language_model.model.embed_tokens.weight", "outside the layers"),
        (LINEAR, "model.layers.1.block_sparse_moe.experts.0.w1.weight", "layer 1"),
        (LINEAR, "model.layers.0.self_attn.A_log", "layer 0"),
    ] {
        let broken = Checkpoint::copy_of(name);
        broken.edit_tensors(|t| (t.name != dropped).then_some(t));
        let bare = dropped.trim_start_matches("language_model.");
        assert_has(&broken.refusal(), &["1 tensors are missing and 0", expected, &format!("missing {bare}")]);
    }
    for (extra, expected) in [
        ("language_model.model.layers.5.self_attn.q_proj.bias", "layer 5"),
        ("language_model.model.layers.13.input_layernorm.weight", "layer 13"),
        ("language_model.model.layers.0.block_sparse_moe.experts.0.w1.weight_packed", "layer 0"),
        ("language_model.model.layers.1.block_sparse_moe.experts.32.w1.weight_packed", "layer 1"),
        ("language_model.model.layers.1.block_sparse_moe.experts.01.w1.weight_packed", "layer 1"),
        ("language_model.model.layers.99.block_sparse_moe.experts.0.w1.weight_packed", "layer 99"),
        ("language_model.model.mtp.weight", "outside the layers"),
        ("language_model.vision_tower.x", "outside the layers"),
    ] {
        let broken = Checkpoint::copy_of(TINY);
        broken.add_tensor(zeros(extra, "U8", &[1]));
        let bare = extra.trim_start_matches("language_model.");
        assert_has(&broken.refusal(), &["0 tensors are missing and 1", expected, &format!("not expected {bare}")]);
    }
}

#[test]
fn a_lost_or_changed_key_is_found_by_the_tensors_and_named() {
    for (key, value) in [
        ("attn_res_block_size", None),
        ("routed_expert_hidden_size", None),
        ("latent_moe_use_norm", None),
        ("mla_use_output_gate", None),
        ("q_lora_rank", Some(json!(null))),
        ("num_shared_experts", Some(json!(0))),
        ("first_k_dense_replace", Some(json!(2))),
    ] {
        let broken = Checkpoint::copy_of(TINY);
        broken.edit_config(|config| match value {
            Some(value) => drop(config.insert(key.into(), value)),
            None => drop(config.shift_remove(key)),
        });
        broken.refusal();
        assert_has(broken.open().unwrap_err().hint_text().unwrap(), &[key]);
    }
    let broken = Checkpoint::copy_of(TINY);
    broken.edit_config(|config| {
        drop(config["linear_attn_config"].as_object_mut().unwrap().shift_remove("use_full_rank_gate"))
    });
    broken.refusal();
    assert_has(broken.open().unwrap_err().hint_text().unwrap(), &["use_full_rank_gate"]);
    let broken = Checkpoint::copy_of(TINY);
    broken.edit_config(|config| drop(config.insert("num_experts".into(), json!(40))));
    assert_has(&broken.refusal(), &["layer 12: expected ", "experts.32.w1.weight_packed"]);
    assert_has(broken.open().unwrap_err().hint_text().unwrap(), &["num_experts"]);
}

#[test]
fn both_prefixes_are_taken_but_no_mixture() {
    let bare = Checkpoint::copy_of(TINY);
    bare.edit_tensors(|mut t| {
        t.name = t.name.trim_start_matches("language_model.").to_owned();
        Some(t)
    });
    assert_eq!(bare.open().unwrap().trunk.len(), Checkpoint::copy_of(TINY).open().unwrap().trunk.len());
    let prefixed = Checkpoint::copy_of(LINEAR);
    prefixed.edit_tensors(|mut t| {
        t.name = format!("language_model.{}", t.name);
        Some(t)
    });
    prefixed.open().unwrap();
    for odd in ["lm_head.weight", "model.layers.1.block_sparse_moe.experts.3.w1.weight"] {
        let mixed = Checkpoint::copy_of(LINEAR);
        mixed.edit_tensors(|mut t| {
            if t.name == odd {
                t.name = format!("language_model.{odd}");
            }
            Some(t)
        });
        assert_has(&mixed.refusal(), &["mixed", odd]);
    }
}

#[test]
fn shapes_and_dtypes_are_checked_for_every_tensor() {
    let cases: [(&str, &str, &[u64], bool); 14] = [
        ("layers.3.self_attn.q_a_proj.weight", "F32", &[96, 128], true),
        ("layers.3.self_attn.q_a_proj.weight", "F16", &[96, 128], true),
        ("layers.3.self_attn.q_a_proj.weight", "BF16", &[128, 96], false),
        ("layers.3.self_attn.q_a_proj.weight", "F64", &[96, 128], false),
        ("layers.3.self_attn.q_a_proj.weight", "F8_E4M3", &[96, 128], false),
        ("layers.3.self_attn.q_a_proj.weight", "U8", &[96, 128], false),
        ("layers.0.self_attn.A_log", "F32", &[128], true),
        ("layers.0.self_attn.A_log", "F32", &[1, 1, 4, 1], true),
        ("layers.0.self_attn.A_log", "F32", &[3], false),
        ("layers.0.self_attn.q_conv1d.weight", "BF16", &[128, 4], true),
        ("layers.0.self_attn.q_conv1d.weight", "F32", &[4, 1, 128], false),
        ("layers.0.mlp_res_proj.weight", "BF16", &[128], true),
        ("layers.9.block_sparse_moe.experts.30.w2.weight_scale", "U8", &[2, 96], false),
        ("layers.9.block_sparse_moe.experts.30.w2.weight_scale", "I8", &[96, 2], false),
    ];
    for (name, dtype, shape, fine) in cases {
        let changed = Checkpoint::copy_of(TINY);
        let full = format!("language_model.model.{name}");
        changed.edit_tensors(|t| Some(if t.name == full { zeros(&full, dtype, shape) } else { t }));
        match changed.open() {
            Ok(_) => assert!(fine, "{name} {dtype} {shape:?} was accepted"),
            Err(e) => {
                assert!(!fine, "{e}");
                assert_has(e.message(), &[name, "expected", &format!("{shape:?} {dtype}"), "in model-0000"]);
            }
        }
    }
}

#[test]
fn experts_of_two_kinds_or_without_scales_are_refused() {
    let mixed = Checkpoint::copy_of(TINY);
    let prefix = "language_model.model.layers.4.block_sparse_moe.experts.9.w1";
    mixed.edit_tensors(|t| match t.name.strip_prefix(prefix) {
        Some(".weight_packed") => Some(zeros(&format!("{prefix}.weight"), "BF16", &[64, 96])),
        Some(".weight_scale") => None,
        _ => Some(t),
    });
    assert_has(&mixed.refusal(), &["stored in two ways", "experts.9.w1.weight"]);

    let half = Checkpoint::copy_of(TINY);
    half.edit_tensors(|t| (!t.name.ends_with("weight_scale")).then_some(t));
    assert_has(&half.refusal(), &["1152 tensors are missing", "weight_scale"]);

    let floats = Checkpoint::copy_of(LINEAR);
    floats.edit_tensors(|t| {
        let expert = t.name.contains(".experts.");
        Some(if expert { zeros(&t.name, "F32", &t.shape) } else { t })
    });
    assert_has(&floats.refusal(), &["expected [40, 80] BF16", "F32", "more of this kind"]);
}

#[test]
fn mxfp4_widths_must_be_whole_blocks() {
    let broken = Checkpoint::copy_of(TINY);
    broken.edit_config(|config| drop(config.insert("moe_intermediate_size".into(), json!(48))));
    assert_has(&broken.refusal(), &["moe_intermediate_size is 48", "multiple of 32"]);
}

#[test]
fn a_tied_head_is_the_embedding() {
    let tied = Checkpoint::copy_of(LINEAR);
    tied.edit_config(|config| drop(config.insert("tie_word_embeddings".into(), json!(true))));
    assert_has(&tied.refusal(), &["not expected lm_head.weight"]);
    tied.edit_tensors(|t| (t.name != "lm_head.weight").then_some(t));
    assert!(tied.open().unwrap().trunk.iter().all(|t| t.name != "lm_head.weight"));
}

#[test]
fn stored_dtypes_are_kept() {
    let manifest = Checkpoint::copy_of(LINEAR).open().unwrap();
    let dtype = |name: &str| manifest.trunk.iter().find(|t| t.name == name).unwrap().dtype;
    assert_eq!(dtype("model.layers.0.self_attn.A_log"), Dtype::F32);
    assert_eq!(dtype("model.layers.0.self_attn.q_conv1d.weight"), Dtype::Bf16);
}

#[test]
fn a_vision_shard_is_skipped_when_absent_and_checked_when_there() {
    let checkpoint = Checkpoint::copy_of(TINY);
    let mut vision = Vec::new();
    let mut kept = Vec::new();
    for tensor in checkpoint.tensors(SECOND) {
        if tensor.name.starts_with("language_model.") { kept.push(tensor) } else { vision.push(tensor) }
    }
    checkpoint.write_tensors(SECOND, &kept);
    checkpoint.write_tensors("vision.safetensors", &vision);
    checkpoint.edit_weight_map(|map| {
        vision.iter().for_each(|t| drop(map.insert(t.name.clone(), json!("vision.safetensors"))));
    });
    let whole = checkpoint.open().unwrap();
    assert_eq!((whole.shards.len(), whole.ignored.len()), (3, 5));
    checkpoint.truncate("vision.safetensors", 100);
    assert_has(&checkpoint.refusal(), &["vision.safetensors (vision)", "has 100 bytes"]);
    checkpoint.remove("vision.safetensors");
    let without = checkpoint.open().unwrap();
    assert_eq!((without.shards.len(), without.ignored.len()), (2, 5));
    assert_eq!(without.trunk, whole.trunk);
}

#[test]
fn random_damage_never_panics() {
    let damaged = Checkpoint::copy_of(LINEAR);
    let mut state = 1u64;
    let mut random = |below: usize| {
        state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    };
    for file in [CONFIG, INDEX, FIRST] {
        let whole = damaged.read(file);
        // In a shard only the header is read.
        let reach = whole.len().min(14_000);
        for _ in 0..400 {
            let mut bytes = whole.clone();
            for _ in 0..=random(3) {
                let at = random(reach);
                match random(4) {
                    0 => bytes[at] = random(256) as u8,
                    1 => bytes[at] = b"0123456789-.eE\"{}[],:"[random(21)],
                    2 => drop(bytes.remove(at)),
                    _ => bytes.insert(at, whole[random(reach)]),
                }
            }
            damaged.write(file, &bytes);
            let _ = damaged.open();
        }
        damaged.write(file, &whole);
    }
    damaged.open().unwrap();
}

#[test]
fn the_released_k3_indexes_quickly_in_little_memory() {
    let dir = tempfile::tempdir().unwrap();
    k3::write(dir.path());
    // In a process of its own, so that its peak is that of indexing alone.
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--ignored", "--exact", "measures_indexing", "--nocapture"])
        .env("DELTAFIN_TEST_DIR", dir.path())
        .output()
        .unwrap();
    let text = String::from_utf8_lossy(&output.stdout).into_owned();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    println!("{text}");
}

#[test]
#[ignore = "run by the_released_k3_indexes_quickly_in_little_memory"]
fn measures_indexing() {
    let dir = std::path::PathBuf::from(std::env::var_os("DELTAFIN_TEST_DIR").unwrap());
    let start = Instant::now();
    let manifest = Manifest::open(&dir, &ModelConfig::load(&dir).unwrap()).unwrap();
    let elapsed = start.elapsed();
    assert_eq!(manifest.tensor_count() + manifest.ignored.len(), 497_220);
    assert_eq!(manifest.ignored.len(), 168);
    assert_eq!(manifest.expert_bytes(), 17_547_264);
    assert_eq!(manifest.all_experts_bytes(), 1_446_456_066_048);
    assert_eq!(manifest.trunk_bytes() + manifest.all_experts_bytes(), 1_559_965_606_912);
    assert_eq!(manifest.shard_contents()[0], "layer 0");
    let limit = if cfg!(debug_assertions) { 8 } else { 2 };
    assert!(elapsed < Duration::from_secs(limit), "indexing took {elapsed:?}");
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    let peak =
        status.lines().find_map(|line| line.strip_prefix("VmHWM:")?.trim().strip_suffix(" kB")?.parse::<u64>().ok());
    println!("indexed in {elapsed:?}, peak {peak:?} KiB");
    assert!(peak.is_none_or(|kib| kib < 150 << 10), "indexing took {peak:?} KiB");
}
