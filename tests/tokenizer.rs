//! The tokenizer on real vocabularies: ids equal to the reference, hostile inputs, linear time.

use std::fs;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::Instant;

use deltafin::error::{Kind, Result};
use deltafin::text::{Specials, Tokenizer, Utf8Stream, pieces};
use serde_json::Value;

fn root(path: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(path)
}

fn gunzipped(path: &str) -> Vec<u8> {
    let mut bytes = Vec::new();
    flate2::read::GzDecoder::new(fs::File::open(root(path)).unwrap()).read_to_end(&mut bytes).unwrap();
    bytes
}

fn k3_ranks() -> &'static [u8] {
    static RANKS: OnceLock<Vec<u8>> = OnceLock::new();
    RANKS.get_or_init(|| gunzipped("tests/tokenizer/tiktoken.model.gz"))
}

/// From `tiktoken.model` alone.
fn k3() -> &'static Tokenizer {
    static K3: OnceLock<Tokenizer> = OnceLock::new();
    K3.get_or_init(|| in_dir(&[("tiktoken.model", k3_ranks())], |dir| Tokenizer::from_dir(dir, Some(163_840))).unwrap())
}

fn in_dir<T>(files: &[(&str, &[u8])], test: impl FnOnce(&Path) -> T) -> T {
    let dir = tempfile::tempdir().unwrap();
    for (name, content) in files {
        fs::write(dir.path().join(name), content).unwrap();
    }
    test(dir.path())
}

fn demo(name: &str) -> Vec<u8> {
    fs::read(root("assets/demo-model").join(name)).unwrap()
}

fn demo_from_ranks() -> Tokenizer {
    Tokenizer::from_dir(&root("assets/demo-model"), Some(4096)).unwrap()
}

fn demo_from_json() -> Tokenizer {
    in_dir(&[("tokenizer.json", &demo("tokenizer.json"))], |dir| Tokenizer::from_dir(dir, Some(4096))).unwrap()
}

fn golden() -> Vec<Value> {
    let text = String::from_utf8(gunzipped("tests/tokenizer/golden.jsonl.gz")).unwrap();
    text.lines().map(|line| serde_json::from_str(line).unwrap()).collect()
}

fn ids_of(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|id| id.as_u64().unwrap() as u32).collect()
}

fn text_of(case: &Value) -> String {
    match case.get("text") {
        Some(text) => text.as_str().unwrap().to_owned(),
        None => {
            let parts = case["text_parts"].as_array().unwrap();
            let repeated =
                parts.iter().map(|part| part[0].as_str().unwrap().repeat(part[1].as_u64().unwrap() as usize));
            let text: String = repeated.collect();
            assert_eq!(text.len() as u64, case["text_bytes"].as_u64().unwrap(), "{}", case["id"]);
            text
        }
    }
}

fn fnv1a64(ids: &[u32]) -> String {
    let mut hash = 0xcbf2_9ce4_8422_2325u64;
    for byte in ids.iter().flat_map(|id| id.to_le_bytes()) {
        hash = (hash ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3);
    }
    format!("{hash:016x}")
}

fn random(state: &mut u64, below: usize) -> usize {
    *state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
    (*state >> 33) as usize % below
}

/// Texts over an alphabet of everything that the pattern tells apart.
fn random_texts(count: usize) -> Vec<String> {
    let words = [
        "a",
        "B",
        "zZ",
        "The",
        "ing",
        "'s",
        "'LL",
        "'ſ",
        "’s",
        " ",
        "  ",
        "\u{a0}",
        "\u{3000}",
        "\n",
        "\r\n",
        "\t",
        "1",
        "234",
        "²",
        "中",
        "文字",
        "々",
        "〇",
        "、",
        "한국",
        "か",
        "ー",
        "é",
        "e\u{301}",
        "\u{301}",
        "ǅ",
        "!",
        "...",
        "/",
        "\"",
        "_",
        "<|",
        "|>",
        "<|open|>",
        "[EOS]",
        "🙂",
        "👨\u{200d}👩\u{200d}👧",
        "\u{1c}",
        "\u{85}",
        "\u{feff}",
        "\0",
        "د",
        "ह",
        "ि",
        "\u{10FFFF}",
    ];
    let mut state = 11;
    let mut text = || (0..random(&mut state, 24)).map(|_| words[random(&mut state, words.len())]).collect();
    (0..count).map(|_| text()).collect()
}

#[test]
fn every_golden_encoding_is_reproduced() {
    let tokenizer = k3();
    let cases: Vec<Value> = golden().into_iter().filter(|case| case["kind"] == "encode").collect();
    assert!(cases.len() >= 500, "{} cases", cases.len());
    for case in &cases {
        let name = &case["id"];
        let text = text_of(case);
        let specials = if case["special"] == true { Specials::Control } else { Specials::Ordinary };
        let ids = tokenizer.encode(&text, specials);
        if let Some(want) = case.get("ids") {
            assert_eq!(ids, ids_of(want), "{name}: {:?}", text.chars().take(80).collect::<String>());
        } else {
            assert_eq!(ids[..32], ids_of(&case["ids_head"]), "{name}");
            assert_eq!(ids[ids.len() - 32..], ids_of(&case["ids_tail"]), "{name}");
        }
        assert_eq!(ids.len() as u64, case["ids_len"].as_u64().unwrap(), "{name}");
        assert_eq!(fnv1a64(&ids), case["ids_fnv1a64"], "{name}");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text, "{name}");
        if let Some(want) = case.get("pieces") {
            let want: Vec<&str> = want.as_array().unwrap().iter().map(|piece| piece.as_str().unwrap()).collect();
            assert_eq!(pieces(&text).collect::<Vec<_>>(), want, "{name}");
        }
    }
}

#[test]
fn every_golden_decoding_is_reproduced_whole_and_streamed() {
    let tokenizer = k3();
    let cases: Vec<Value> = golden().into_iter().filter(|case| case["kind"] == "decode").collect();
    assert!(cases.len() >= 20, "{} cases", cases.len());
    for case in &cases {
        let (name, ids) = (&case["id"], ids_of(&case["ids"]));
        let bytes = tokenizer.decode_bytes(&ids, false).unwrap();
        let hex: String = bytes.iter().map(|byte| format!("{byte:02x}")).collect();
        assert_eq!(hex, case["bytes_hex"], "{name}");
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), case["decoded"], "{name}");
        assert_eq!(tokenizer.decode(&ids, true).unwrap(), case["decoded_skip_special"], "{name}");
        let mut stream = Utf8Stream::new();
        let mut text: String = ids.iter().map(|id| stream.push(tokenizer.bytes(*id).unwrap())).collect();
        text += &stream.finish();
        assert_eq!(text, case["decoded"], "{name} streamed");
    }
}

#[test]
fn random_ids_stream_to_the_same_text_as_decoded_whole() {
    let (tokenizer, mut state) = (k3(), 17);
    for _ in 0..2_000 {
        let ids: Vec<u32> = (0..12).map(|_| random(&mut state, 163_840) as u32).collect();
        let mut stream = Utf8Stream::new();
        let mut text: String = ids.iter().map(|id| stream.push(tokenizer.bytes(*id).unwrap())).collect();
        text += &stream.finish();
        assert_eq!(text, tokenizer.decode(&ids, false).unwrap(), "{ids:?}");
    }
}

#[test]
fn k3_control_slots_have_their_released_ids_and_spellings() {
    let tokenizer = k3();
    assert_eq!(tokenizer.vocab_size(), 163_840);
    for (spelling, id) in [
        ("[BOS]", 163_584),
        ("[EOS]", 163_585),
        ("<|end_of_msg|>", 163_586),
        ("<|open|>", 163_587),
        ("<|close|>", 163_588),
        ("<|sep|>", 163_589),
        ("[start_header_id]", 163_590),
        ("[end_header_id]", 163_591),
        ("<|reserved_token_163592|>", 163_592),
        ("[EOT]", 163_593),
        ("<|media_begin|>", 163_602),
        ("<|media_content|>", 163_603),
        ("<|media_end|>", 163_604),
        ("<|media_pad|>", 163_605),
        ("<osagent_mode>", 163_649),
        ("<|reserved_token_163837|>", 163_837),
        ("[UNK]", 163_838),
        ("[PAD]", 163_839),
    ] {
        assert_eq!(tokenizer.control_id(spelling), Some(id), "{spelling}");
        assert_eq!(tokenizer.bytes(id).unwrap(), spelling.as_bytes());
        assert_eq!(tokenizer.encode(spelling, Specials::Control), [id]);
        assert!(tokenizer.is_control(id));
        let ordinary = tokenizer.encode(spelling, Specials::Ordinary);
        assert!(ordinary.len() > 1 && ordinary.iter().all(|id| !tokenizer.is_control(*id)), "{spelling}: {ordinary:?}");
    }
    for absent in ["<|reserved_token_163586|>", "<|im_end|>", "<|reserved_token_163840|>", "", "the"] {
        assert_eq!(tokenizer.control_id(absent), None, "{absent}");
    }
    assert!((163_584..163_840).all(|id| tokenizer.is_control(id)));
    assert!((0..163_584).all(|id| !tokenizer.is_control(id)));
}

#[test]
fn names_come_from_tokenizer_config_and_gaps_are_kept() {
    let config = br#"{"added_tokens_decoder":{"163584":{"content":"[BOS]"},"163586":{"content":"<|im_end|>"},"163839":{"content":"[PAD]"}}}"#;
    let files = [("tiktoken.model", k3_ranks()), ("tokenizer_config.json", config)];
    for vocab_size in [Some(163_840), None] {
        let open = |dir: &Path| match vocab_size {
            Some(_) => Tokenizer::from_dir(dir, vocab_size),
            None => Tokenizer::from_file(&dir.join("tiktoken.model")),
        };
        let tokenizer = in_dir(&files, open).unwrap();
        assert_eq!(tokenizer.vocab_size(), 163_840);
        assert_eq!(tokenizer.control_id("<|im_end|>"), Some(163_586));
        assert_eq!(tokenizer.control_id("<|reserved_token_163585|>"), Some(163_585));
        assert_eq!(tokenizer.control_id("[PAD]"), Some(163_839));
        assert_eq!(tokenizer.control_id("<|open|>"), None);
    }
}

#[test]
fn the_released_ranks_in_another_model_do_not_get_the_names_of_k3() {
    let files = [("tiktoken.model", k3_ranks()), ("config.json", br#"{"model_type":"kimi_linear"}"#)];
    let tokenizer = in_dir(&files, |dir| Tokenizer::from_dir(dir, Some(163_840))).unwrap();
    assert_eq!(tokenizer.control_id("<|open|>"), None);
    assert_eq!(tokenizer.control_id("<|reserved_token_163587|>"), Some(163_587));
}

#[test]
fn an_id_outside_the_vocabulary_is_a_usage_error_that_names_it() {
    for id in [163_840, u32::MAX] {
        let error = k3().bytes(id).unwrap_err();
        assert_eq!(error.kind(), Kind::Usage);
        assert_eq!(error.message(), format!("token id {id} is outside the vocabulary: expected 0 to 163839"));
    }
    assert!(k3().decode(&[0, 163_840], true).is_err());
}

#[test]
fn both_demo_files_give_the_same_ids() {
    let (ranks, json) = (demo_from_ranks(), demo_from_json());
    let mut texts = random_texts(5_000);
    texts.extend(golden().iter().filter(|case| case["kind"] == "encode").map(text_of));
    let long = 100_001;
    texts.extend(["a", " ", "中", "🙂", "\n", "1", "'", "\u{301}"].map(|c| c.repeat(long)));
    for text in &texts {
        for specials in [Specials::Ordinary, Specials::Control] {
            let ids = ranks.encode(text, specials);
            let shown: String = text.chars().take(100).collect();
            assert_eq!(json.encode(text, specials), ids, "{specials:?} {shown:?}");
            assert_eq!(ranks.decode(&ids, false).unwrap(), *text, "{shown:?}");
        }
    }
    assert_eq!((ranks.vocab_size(), json.vocab_size()), (4096, 4096));
    for id in 0..4096 {
        assert_eq!(ranks.bytes(id).unwrap(), json.bytes(id).unwrap(), "{id}");
        assert_eq!(ranks.is_control(id), json.is_control(id), "{id}");
    }
    assert_eq!(json.control_id("<|open|>"), Some(4083));
}

#[test]
fn the_scanner_splits_as_the_pattern_does_in_the_regex_engine() {
    use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer, PreTokenizerWrapper};
    let file: Value = serde_json::from_slice(&demo("tokenizer.json")).unwrap();
    let split = file["pre_tokenizer"]["pretokenizers"][0].clone();
    let split: PreTokenizerWrapper = serde_json::from_value(split).unwrap();
    for text in random_texts(20_000) {
        let mut pre = PreTokenizedString::from(text.as_str());
        split.pre_tokenize(&mut pre).unwrap();
        let want = pre.get_splits(OffsetReferential::Original, OffsetType::Byte);
        let want: Vec<&str> = want.iter().map(|(piece, _, _)| *piece).filter(|piece| !piece.is_empty()).collect();
        assert_eq!(pieces(&text).collect::<Vec<_>>(), want, "{text:?}");
    }
}

#[test]
fn a_million_equal_characters_take_linear_time() {
    let json = demo_from_json();
    for c in ["a", "A", " ", "\n", "1", "中", "🙂", "!", "\u{301}", "é", "\u{1c}", "<"] {
        let text = c.repeat(1_000_000);
        for (name, tokenizer) in [("k3", k3()), ("json", &json)] {
            for specials in [Specials::Ordinary, Specials::Control] {
                let start = Instant::now();
                let ids = tokenizer.encode(&text, specials);
                let seconds = start.elapsed().as_secs_f64();
                assert!(seconds < 2.0, "{name} {c:?} {specials:?}: {seconds:.2} s");
                assert_eq!(tokenizer.decode_bytes(&ids, false).unwrap(), text.as_bytes(), "{name} {c:?}");
            }
        }
    }
}

#[test]
fn near_spellings_of_control_tokens_take_linear_time() {
    let text = "<|reserved_token_16358".repeat(45_000);
    let start = Instant::now();
    let ids = k3().encode(&text, Specials::Control);
    assert!(ids.iter().all(|id| !k3().is_control(*id)));
    assert!(start.elapsed().as_secs_f64() < 2.0, "{:?}", start.elapsed());
}

/// A byte-level `tokenizer.json` with another split pattern.
fn other_json(edit: impl FnOnce(&mut Value)) -> Result<Tokenizer> {
    let mut file: Value = serde_json::from_slice(&demo("tokenizer.json")).unwrap();
    edit(&mut file);
    let file = serde_json::to_vec(&file).unwrap();
    in_dir(&[("tokenizer.json", &file)], |dir| Tokenizer::from_file(&dir.join("tokenizer.json")))
}

fn gpt2() -> Tokenizer {
    let pre = r#"{"type":"ByteLevel","add_prefix_space":false,"trim_offsets":true,"use_regex":true}"#;
    other_json(|file| file["pre_tokenizer"] = serde_json::from_str(pre).unwrap()).unwrap()
}

#[test]
fn a_tokenizer_json_with_another_pattern_goes_through_the_crate_in_linear_time() {
    let tokenizer = gpt2();
    for text in random_texts(2_000) {
        let ids = tokenizer.encode(&text, Specials::Ordinary);
        assert_eq!(tokenizer.decode(&ids, false).unwrap(), text);
        assert!(ids.iter().all(|id| !tokenizer.is_control(*id)));
    }
    for c in ["a", " ", "\n", "1", "中", "🙂", "!", "\u{301}"] {
        let text = c.repeat(1_000_000);
        let start = Instant::now();
        let ids = tokenizer.encode(&text, Specials::Control);
        assert_eq!(tokenizer.decode_bytes(&ids, false).unwrap(), text.as_bytes(), "{c:?}");
        assert!(start.elapsed().as_secs_f64() < 4.0, "{c:?}: {:?}", start.elapsed());
    }
}

#[test]
fn added_tokens_of_a_tokenizer_json_keep_ids_with_gaps() {
    let tokenizer = other_json(|file| {
        file["added_tokens"] = serde_json::from_str(
            r#"[{"id":4090,"content":"<|sep|>","special":false},{"id":5000,"content":"[PAD]","special":true},
                {"id":4500,"content":"wordlike","special":false}]"#,
        )
        .unwrap();
    })
    .unwrap();
    assert_eq!(tokenizer.control_id("<|sep|>"), Some(4090));
    assert_eq!(tokenizer.control_id("[PAD]"), Some(5000));
    assert_eq!(tokenizer.encode("[PAD]<|sep|>wordlike", Specials::Control), [5000, 4090, 4500]);
    assert_eq!(tokenizer.encode("wordlike", Specials::Ordinary), [4500]);
    assert!(!tokenizer.encode("[PAD]<|sep|>", Specials::Ordinary).iter().any(|id| tokenizer.is_control(*id)));
    assert_eq!(tokenizer.vocab_size(), 5001);
    assert_eq!(tokenizer.bytes(4085).unwrap(), b"");
    assert!(tokenizer.is_control(4085));
}

#[test]
fn a_tokenizer_json_that_would_change_ids_is_refused_by_key() {
    type Edit = Box<dyn FnOnce(&mut Value)>;
    let set = |pointer: &'static str, value: &'static str| -> Edit {
        Box::new(move |file| *file.pointer_mut(pointer).unwrap() = serde_json::from_str(value).unwrap())
    };
    let cases: Vec<(Edit, &str)> = vec![
        (set("/model/type", "\"WordPiece\""), "model.type: expected BPE, found WordPiece"),
        (set("/model/type", "\"Unigram\""), "model.type: expected BPE, found Unigram"),
        (set("/model/dropout", "0.1"), "model.dropout: expected none, found 0.1"),
        (set("/model/end_of_word_suffix", "\"</w>\""), "model.end_of_word_suffix"),
        (set("/model/unk_token", "\"[nothing]\""), "model.unk_token: `[nothing]` is not in the vocabulary"),
        (set("/model/vocab", "{\"a\":0}"), "model"),
        (set("/model/vocab", "[]"), "model.vocab: expected an object"),
        (set("/model/vocab/!", "1"), "has id 1, which is another token's"),
        (set("/model/vocab/!", "-1"), "has id -1"),
        (set("/model/vocab/!", "4000000000"), "outside the vocabulary"),
        (set("/model", "null"), "model: expected an object"),
        (set("/pre_tokenizer/pretokenizers/0/pattern/Regex", "\"(\""), "pre_tokenizer:"),
        (set("/added_tokens", "{}"), "added_tokens: expected a list"),
        (set("/added_tokens/0", "{}"), "added_tokens[0]: expected `id` and `content`"),
        (set("/added_tokens/0/id", "4081"), "added_tokens: id 4081 is given twice"),
        (set("/added_tokens/0/id", "0"), "has id 0, which is another token's"),
    ];
    for (edit, want) in cases {
        let error = other_json(edit).expect_err(want);
        assert_eq!(error.kind(), Kind::Model, "{want}");
        assert!(error.message().contains(want) && error.message().contains("tokenizer.json"), "{error}, want {want}");
    }
}

#[test]
fn a_directory_without_a_usable_tokenizer_is_refused() {
    let refused = |files: &[(&str, &[u8])], want: &str| {
        let error = in_dir(files, |dir| Tokenizer::from_dir(dir, Some(4096))).expect_err(want);
        assert_eq!(error.kind(), Kind::Model);
        assert!(error.message().contains(want), "{error}, want {want}");
    };
    let (ranks, json) = (demo("tiktoken.model"), demo("tokenizer.json"));
    refused(&[], "neither tiktoken.model nor tokenizer.json is there");
    refused(&[("tiktoken.model", b"")], "the file is empty");
    refused(&[("tiktoken.model", b""), ("tokenizer.json", &json)], "tiktoken.model: the file is empty");
    let pointer = b"version https://git-lfs.github.com/spec/v1\noid sha256:b6c4\nsize 2795286\n";
    refused(&[("tiktoken.model", pointer)], "Git LFS pointer");
    refused(&[("tokenizer.json", pointer)], "Git LFS pointer");
    refused(&[("tokenizer.json", &json[..json.len() / 2])], "not valid JSON");
    refused(&[("tokenizer.json", b"{}")], "model: expected an object");
    refused(&[("tiktoken.model", b"<html>404</html>\n")], "line 1: expected base64");
    refused(&[("tiktoken.model", &ranks[..ranks.len() / 2])], "tiktoken.model: 2199 ranks of a vocabulary of 4096");
    let names = demo("tokenizer_config.json");
    let cut = ranks.split_inclusive(|byte| *byte == b'\n').take(4000).collect::<Vec<_>>().concat();
    refused(&[("tiktoken.model", &cut), ("tokenizer_config.json", &names)], "4000 ranks, but the first control token");
    refused(&[("tiktoken.model", k3_ranks())], "163584 ranks, but config.json has vocab_size 4096");
    refused(&[("tiktoken.model", &ranks), ("tokenizer_config.json", b"{")], "tokenizer_config.json: not valid JSON");
    let error = in_dir(&[("tiktoken.model", k3_ranks())], |dir| Tokenizer::from_dir(dir, Some(163_841))).unwrap_err();
    assert!(error.message().contains("at most 256 control slots"), "{error}");
    let dir = tempfile::tempdir().unwrap();
    fs::create_dir(dir.path().join("tiktoken.model")).unwrap();
    let error = Tokenizer::from_dir(dir.path(), Some(4096)).unwrap_err();
    assert!(error.message().contains("found a directory"), "{error}");
    assert_eq!(Tokenizer::from_file(dir.path()).unwrap_err().kind(), Kind::Model);
}

#[test]
fn a_single_flipped_line_in_the_released_file_is_refused() {
    let mut state = 23;
    for _ in 0..20 {
        let mut ranks = k3_ranks().to_vec();
        let at = random(&mut state, ranks.len());
        ranks[at] = if ranks[at] == b'*' { b'-' } else { b'*' };
        let result = in_dir(&[("tiktoken.model", &ranks)], |dir| Tokenizer::from_dir(dir, Some(163_840)));
        let error = result.expect_err("a changed byte is noticed");
        assert!(error.message().contains("tiktoken.model: line "), "{error}");
    }
}

#[test]
fn random_damage_never_panics() {
    let mut state = 29;
    for name in ["tokenizer.json", "tiktoken.model", "tokenizer_config.json"] {
        let whole = demo(name);
        for _ in 0..60 {
            let mut damaged = whole.clone();
            for _ in 0..1 + random(&mut state, 4) {
                let (at, byte) = (random(&mut state, damaged.len()), random(&mut state, 256) as u8);
                match random(&mut state, 3) {
                    0 => damaged[at] = byte,
                    1 => damaged.truncate(at.max(1)),
                    _ => drop(damaged.drain(at..(at + 1 + usize::from(byte)).min(damaged.len()))),
                }
                damaged.push(b' ');
            }
            let ranks = demo("tiktoken.model");
            let files = [("tiktoken.model", ranks.as_slice()), (name, &damaged)];
            let files = if name == "tokenizer.json" { &files[1..] } else { &files };
            match in_dir(files, |dir| Tokenizer::from_dir(dir, Some(4096))) {
                Ok(tokenizer) => drop(tokenizer.encode("Once upon a time. <|open|> 中🙂", Specials::Control)),
                Err(error) => assert_eq!(error.kind(), Kind::Model, "{error}"),
            }
        }
    }
}
