//! The ids that end an answer: every file of the checkpoint that names one counts, for they disagree.

use std::path::Path;

use serde_json::Value;

use super::files::read_json_if_there;
use super::tokenizer::Tokenizer;
use super::tokenizer_config::{FILE_NAME as TOKENIZER_CONFIG, TokenizerConfig};
use crate::config::ModelConfig;
use crate::error::{Error, Result};

const CONFIG: &str = "config.json";
const GENERATION_CONFIG: &str = "generation_config.json";
/// Where a terminator came from that no file names as the end.
const CHAT_FORMAT: &str = "chat format";
/// Ends of K3's chat format and of its texts.
const TERMINATORS: [&str; 2] = ["<|end_of_msg|>", "[EOS]"];

/// Ids that end generation, each with the files that name it.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct StopIds {
    entries: Vec<(u32, Vec<&'static str>)>,
}

impl StopIds {
    /// Whether `id` ends the answer.
    pub fn contains(&self, id: u32) -> bool {
        self.entries.iter().any(|(stop, _)| *stop == id)
    }

    /// The ids, each once, in the order of the sources.
    pub fn ids(&self) -> impl Iterator<Item = u32> + '_ {
        self.entries.iter().map(|(id, _)| *id)
    }

    /// The ids with the names of what gave each: files, or `chat format`.
    pub fn sources(&self) -> impl Iterator<Item = (u32, &[&'static str])> + '_ {
        self.entries.iter().map(|(id, sources)| (*id, sources.as_slice()))
    }

    /// Whether nothing but the length ends an answer.
    pub fn is_empty(&self) -> bool {
        self.entries.is_empty()
    }

    fn add(&mut self, id: u32, source: &'static str) {
        match self.entries.iter_mut().find(|(stop, _)| *stop == id) {
            Some((_, sources)) if sources.contains(&source) => {}
            Some((_, sources)) => sources.push(source),
            None => self.entries.push((id, vec![source])),
        }
    }
}

/// The union of `eos_token_id` of `config.json` and `generation_config.json`, `eos_token` of `tokenizer_config.json`, and
/// the terminators of K3's chat format that `tokenizer` has as control tokens. Without a tokenizer, `eos_token` counts
/// when `tokenizer_config.json` itself gives its id.
///
/// # Errors
/// Kind `Model`, naming the file: damaged, an id outside `vocab_size`, or an `eos_token` that the tokenizer lacks.
pub fn stop_ids(dir: &Path, config: &ModelConfig, tokenizer: Option<&Tokenizer>) -> Result<StopIds> {
    let mut stops = StopIds::default();
    let mut add = |id: u32, source: &'static str| {
        if id as usize >= config.vocab_size {
            let (file, vocab_size) = (dir.join(source), config.vocab_size);
            return Err(Error::model(format!(
                "{}: end token {id} is outside the vocabulary: expected 0 to {}",
                file.display(),
                vocab_size.saturating_sub(1)
            )));
        }
        stops.add(id, source);
        Ok(())
    };
    for &id in &config.eos_token_ids {
        add(id, CONFIG)?;
    }
    for id in generation_config_ids(dir)? {
        add(id, GENERATION_CONFIG)?;
    }
    if let Some(names) = TokenizerConfig::load(dir)?
        && let Some(spelling) = &names.eos_token
    {
        let id = names.id(spelling).or_else(|| tokenizer?.control_id(spelling));
        match id {
            Some(id) => add(id, TOKENIZER_CONFIG)?,
            None if tokenizer.is_some() => {
                let file = names.file.display();
                return Err(Error::model(format!("{file}: eos_token `{spelling}` is not a token of the tokenizer")));
            }
            None => {}
        }
    }
    for id in TERMINATORS.iter().filter_map(|spelling| tokenizer?.control_id(spelling)) {
        add(id, CHAT_FORMAT)?;
    }
    Ok(stops)
}

fn generation_config_ids(dir: &Path) -> Result<Vec<u32>> {
    let file = dir.join(GENERATION_CONFIG);
    let Some(object) = read_json_if_there(&file)? else { return Ok(Vec::new()) };
    let id = |value: &Value| {
        value.as_u64().and_then(|id| u32::try_from(id).ok()).ok_or_else(|| {
            let file = file.display();
            Error::model(format!("{file}: eos_token_id: expected a token id or a list of them, found {value}"))
        })
    };
    match object.get("eos_token_id") {
        None | Some(Value::Null) => Ok(Vec::new()),
        Some(Value::Array(ids)) => ids.iter().map(id).collect(),
        Some(value) => Ok(vec![id(value)?]),
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;
    use crate::config::{Activation, Family, KdaConfig, MlaConfig};
    use crate::error::Kind;

    fn config(vocab_size: usize, eos_token_ids: &[u32]) -> ModelConfig {
        let kda = KdaConfig {
            num_heads: 1,
            head_dim: 1,
            short_conv_kernel_size: 1,
            gate_lower_bound: None,
            use_full_rank_gate: false,
        };
        let mla = MlaConfig {
            num_heads: 1,
            q_lora_rank: None,
            kv_lora_rank: 1,
            qk_nope_head_dim: 1,
            qk_rope_head_dim: 1,
            v_head_dim: 1,
            use_output_gate: false,
        };
        ModelConfig {
            family: Family::KimiK3,
            hidden_size: 1,
            vocab_size,
            max_position_embeddings: 1,
            rms_norm_eps: 1e-5,
            activation: Activation::Silu,
            intermediate_size: 1,
            attn_res_block_size: None,
            tie_word_embeddings: false,
            layers: Vec::new(),
            kda,
            mla,
            moe: None,
            bos_token_ids: Vec::new(),
            eos_token_ids: eos_token_ids.to_vec(),
        }
    }

    fn stops(files: &[(&str, &str)], config: &ModelConfig) -> Result<StopIds> {
        let dir = tempfile::tempdir().unwrap();
        for (name, content) in files {
            fs::write(dir.path().join(name), content).unwrap();
        }
        stop_ids(dir.path(), config, None)
    }

    const K3_NAMES: &str = r#"{"added_tokens_decoder":{"163585":{"content":"[EOS]"}},"eos_token":"[EOS]"}"#;

    #[test]
    fn all_files_count_and_each_id_knows_its_sources() {
        let generation = r#"{"max_length": 1048576, "eos_token_id": 163586}"#;
        let files = [("generation_config.json", generation), ("tokenizer_config.json", K3_NAMES)];
        let stops = stops(&files, &config(163_840, &[163_586])).unwrap();
        let got: Vec<_> = stops.sources().map(|(id, sources)| (id, sources.to_vec())).collect();
        assert_eq!(got, [(163_586, vec![CONFIG, GENERATION_CONFIG]), (163_585, vec![TOKENIZER_CONFIG])]);
        assert!(stops.contains(163_585) && stops.contains(163_586) && !stops.contains(163_584));
    }

    #[test]
    fn lists_nulls_and_absent_files_are_read() {
        let config = config(300, &[]);
        assert!(stops(&[], &config).unwrap().is_empty());
        for (content, want) in [
            (r#"{"eos_token_id":[7,8,7]}"#, vec![7, 8]),
            (r#"{"eos_token_id":null}"#, vec![]),
            (r#"{"eos_token_id":[]}"#, vec![]),
            (r#"{}"#, vec![]),
        ] {
            let stops = stops(&[("generation_config.json", content)], &config).unwrap();
            assert_eq!(stops.ids().collect::<Vec<_>>(), want, "{content}");
        }
    }

    #[test]
    fn damage_and_ids_outside_the_vocabulary_are_refused_with_the_file() {
        for content in ["", "[]", "{"] {
            let error = stops(&[("generation_config.json", content)], &config(300, &[])).unwrap_err();
            assert!(error.message().contains("generation_config.json"), "{error}");
        }
        for value in ["300", "[299,300]", "-1", "1.5", "\"2\"", "true", "{}", "[null]", "99999999999"] {
            let content = format!(r#"{{"eos_token_id":{value}}}"#);
            let error = stops(&[("generation_config.json", &content)], &config(300, &[])).unwrap_err();
            assert_eq!(error.kind(), Kind::Model);
            assert!(error.message().contains("generation_config.json"), "{value}: {error}");
        }
        let error = stops(&[], &config(300, &[300])).unwrap_err();
        assert!(error.message().contains("config.json: end token 300 is outside the vocabulary: expected 0 to 299"));
        let error = stops(&[("tokenizer_config.json", K3_NAMES)], &config(300, &[])).unwrap_err();
        assert!(error.message().contains("tokenizer_config.json: end token 163585"), "{error}");
    }

    #[test]
    fn the_chat_terminator_of_the_tokenizer_counts() {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model");
        let config = config(4096, &[4082]);
        let tokenizer = Tokenizer::from_dir(&dir, Some(4096)).unwrap();
        let with = stop_ids(&dir, &config, Some(&tokenizer)).unwrap();
        assert_eq!(with.ids().collect::<Vec<_>>(), [4082, 4081]);
        assert_eq!(with.sources().next().unwrap().1, [CONFIG, GENERATION_CONFIG, TOKENIZER_CONFIG, CHAT_FORMAT]);
        let without = stop_ids(&dir, &config, None).unwrap();
        assert_eq!(without.ids().collect::<Vec<_>>(), [4082, 4081]);
    }

    #[test]
    fn an_end_token_that_the_tokenizer_lacks_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        fs::write(dir.path().join("tokenizer_config.json"), r#"{"eos_token":"<|im_end|>"}"#).unwrap();
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model");
        let tokenizer = Tokenizer::from_dir(&demo, Some(4096)).unwrap();
        let error = stop_ids(dir.path(), &config(4096, &[]), Some(&tokenizer)).unwrap_err();
        assert!(error.message().contains("eos_token `<|im_end|>` is not a token of the tokenizer"), "{error}");
        assert!(stop_ids(dir.path(), &config(4096, &[]), None).unwrap().is_empty());
    }
}
