//! What is found in a directory. Facts that a damaged tokenizer or too little memory leaves are found all the same.

use std::sync::Arc;

use serde::Serialize;

use super::copies::{self, Copies};
use super::speed::Speed;
use crate::checkpoint::{ExpertFormat, Manifest};
use crate::config::{AttentionKind, Family, FeedForwardKind, ModelConfig};
use crate::device::mounts;
use crate::engine::{Engine, EngineOptions, Survey};
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::kernels::Compute;
use crate::learned::Kept;
use crate::pack::verify::{self, Verified};
use crate::plan::Plan;
use crate::store::packed::PackedRoot;
use crate::store::{ExpertStore, Files, Names, StoreOptions, System, Volumes};
use crate::text::{self, Tokenizer};

/// The report; its fields are the keys of the JSON object.
#[derive(Debug, Serialize)]
pub(super) struct Findings {
    pub directory: String,
    pub family: &'static str,
    pub hidden_size: usize,
    pub vocab_size: usize,
    pub max_position_embeddings: usize,
    pub layers: Layers,
    pub experts: Option<Experts>,
    pub parameters: u64,
    pub tensors: usize,
    pub ignored_tensors: usize,
    pub trunk_bytes: u64,
    /// How its matrices would be held.
    pub trunk: &'static str,
    pub shards: Vec<Shard>,
    pub tokenizer: Option<TokenizerFound>,
    /// Whether there is a file that should be one, usable or not.
    #[serde(skip)]
    pub has_tokenizer_file: bool,
    pub stop_ids: Vec<StopId>,
    pub drives: Vec<Drive>,
    pub copies: Option<Copies>,
    pub verified: Option<Verified>,
    /// What earlier runs learned of the experts' use; null with `--no-learn` and where nothing is kept.
    pub expert_uses: Option<ExpertUses>,
    pub isa: &'static str,
    pub threads: usize,
    pub notices: Vec<String>,
    pub context: usize,
    pub step: Option<usize>,
    pub memory: Option<Plan>,
    pub speed: Option<Speed>,
    pub problems: Vec<String>,
}

#[derive(Debug, Default, Serialize)]
pub(super) struct Layers {
    pub count: usize,
    pub kda: usize,
    pub mla: usize,
    pub dense: usize,
    pub moe: usize,
}

#[derive(Debug, Serialize)]
pub(super) struct Experts {
    pub format: &'static str,
    pub per_layer: usize,
    pub per_token: usize,
    pub shared: usize,
    pub parameters: u64,
    pub expert_bytes: u64,
    pub bytes: u64,
    /// Read for a token when none of its experts is in memory.
    pub token_bytes: u64,
}

#[derive(Debug, Serialize)]
pub(super) struct Shard {
    pub file: String,
    pub bytes: u64,
    pub holds: String,
}

#[derive(Debug, Serialize)]
pub(super) struct TokenizerFound {
    pub file: String,
    pub ids: usize,
}

#[derive(Debug, Serialize)]
pub(super) struct StopId {
    pub id: u32,
    pub sources: Vec<&'static str>,
}

#[derive(Debug, Serialize)]
pub(super) struct ExpertUses {
    /// It need not exist.
    pub file: String,
    /// Learned from, roughly.
    pub tokens: u64,
    /// Why the file is of no use.
    pub problem: Option<String>,
    #[serde(skip)]
    pub line: String,
}

#[derive(Debug, Serialize)]
pub(super) struct Drive {
    pub path: String,
    pub file_system: Option<String>,
    /// `direct` or `buffered`, as found by a read.
    pub mode: String,
}

/// What reading everything needs.
pub(super) struct Reading<'a> {
    /// Is told the bytes read and to read.
    pub progress: &'a mut dyn FnMut(u64, u64),
    pub interrupt: &'a Interrupt,
}

impl Drive {
    fn new(path: String, mode: impl Into<String>) -> Self {
        Self { file_system: mounts::of(path.as_ref()).map(|mount| mount.kind), path, mode: mode.into() }
    }
}

impl Findings {
    /// The findings, and what keeps the directory from being run as asked; with `reading` every byte is read too.
    ///
    /// # Errors
    /// When the checkpoint itself is refused, or a flag is.
    pub fn of(
        options: &EngineOptions,
        config: ModelConfig,
        reading: Option<Reading<'_>>,
    ) -> Result<(Self, Vec<Error>)> {
        let compute = Compute::new(options.isa, options.thread_count(), Interrupt::new())?;
        let mut obstacles = Vec::new();
        let (manifest, step, plan) = match Engine::survey(options) {
            Ok(Survey { manifest, step_rows, plan, .. }) => (manifest, Some(step_rows), Some(plan)),
            Err(error) if error.kind() == Kind::Memory => {
                obstacles.push(error);
                (Manifest::open(&options.model, &config)?, None, None)
            }
            // Roots that were refused, or experts that nobody holds, are found below; a damaged checkpoint ends here.
            Err(error) if error.kind() == Kind::Model => (Manifest::open(&options.model, &config)?, None, None),
            Err(error) => return Err(error),
        };
        let mut keep = |error: Error| obstacles.push(error);
        let tokenizer = tokenizer(options, &config).map_err(&mut keep).ok().flatten();
        let stop_ids = stop_ids(options, &config, tokenizer.as_ref()).map_err(&mut keep).unwrap_or_default();
        let (drives, notices) = drives(options, &config, &manifest).map_err(&mut keep).unwrap_or_default();
        let roots = copies::open(&options.experts, &manifest).map_err(&mut keep).unwrap_or_default();
        let copies = Copies::of(&manifest, &roots);
        copies.as_ref().and_then(Copies::obstacle).into_iter().for_each(&mut keep);
        let verified = match reading {
            Some(Reading { progress, interrupt }) => {
                let verified = verify::verify(&manifest, &roots, progress, interrupt)?;
                verified.error().into_iter().for_each(&mut keep);
                Some(verified)
            }
            None => None,
        };
        let speed = Speed::of(options, &config, &manifest, &roots, plan.as_ref());
        let findings = Self {
            directory: options.model.display().to_string(),
            family: match config.family {
                Family::KimiK3 => "kimi_k3",
                Family::KimiLinear => "kimi_linear",
            },
            hidden_size: config.hidden_size,
            vocab_size: config.vocab_size,
            max_position_embeddings: config.max_position_embeddings,
            layers: layers(&config),
            experts: experts(&config, &manifest),
            parameters: trunk_parameters(&manifest) + expert_parameters(&config, &manifest),
            tensors: manifest.tensor_count(),
            ignored_tensors: manifest.ignored.len(),
            trunk_bytes: manifest.trunk_bytes(),
            trunk: options.trunk_format().label(),
            shards: shards(&manifest),
            tokenizer: tokenizer.map(|found| TokenizerFound { file: file_name(found.file()), ids: found.vocab_size() }),
            has_tokenizer_file: has_tokenizer_file(options),
            stop_ids,
            drives,
            copies,
            verified,
            expert_uses: expert_uses(options, &config, &manifest),
            isa: compute.isa_name(),
            threads: compute.threads(),
            notices,
            context: options.context,
            step,
            memory: plan,
            speed,
            problems: obstacles.iter().map(|error| error.message().to_owned()).collect(),
        };
        Ok((findings, obstacles))
    }
}

fn layers(config: &ModelConfig) -> Layers {
    let mut layers = Layers { count: config.layers.len(), ..Layers::default() };
    for layer in &config.layers {
        *match layer.attention {
            AttentionKind::Kda => &mut layers.kda,
            AttentionKind::Mla => &mut layers.mla,
        } += 1;
        *match layer.feed_forward {
            FeedForwardKind::Dense => &mut layers.dense,
            FeedForwardKind::Moe => &mut layers.moe,
        } += 1;
    }
    layers
}

fn experts(config: &ModelConfig, manifest: &Manifest) -> Option<Experts> {
    let (moe, table) = (config.moe.as_ref()?, manifest.experts.as_ref()?);
    let a_token = moe.num_experts_per_token as u64 * table.moe_layers.len() as u64;
    Some(Experts {
        format: match table.format {
            ExpertFormat::Mxfp4 => "mxfp4",
            ExpertFormat::Bf16 => "bf16",
        },
        per_layer: moe.num_experts,
        per_token: moe.num_experts_per_token,
        shared: moe.num_shared_experts,
        parameters: expert_parameters(config, manifest),
        expert_bytes: manifest.expert_bytes(),
        bytes: manifest.all_experts_bytes(),
        token_bytes: a_token * manifest.expert_bytes(),
    })
}

fn trunk_parameters(manifest: &Manifest) -> u64 {
    manifest.trunk.iter().map(|tensor| tensor.shape.iter().map(|size| *size as u64).product::<u64>()).sum()
}

/// w1, w3 and w2 of every routed expert.
fn expert_parameters(config: &ModelConfig, manifest: &Manifest) -> u64 {
    let (Some(moe), Some(table)) = (&config.moe, &manifest.experts) else { return 0 };
    let width = moe.routed_expert_hidden_size.unwrap_or(config.hidden_size) as u64;
    let experts = (table.moe_layers.len() * table.num_experts) as u64;
    3 * moe.moe_intermediate_size as u64 * width * experts
}

fn shards(manifest: &Manifest) -> Vec<Shard> {
    let files = manifest.shards.iter().zip(&manifest.shard_bytes).zip(manifest.shard_contents());
    files.map(|((path, bytes), holds)| Shard { file: file_name(path), bytes: *bytes, holds }).collect()
}

fn file_name(path: &std::path::Path) -> String {
    path.file_name().unwrap_or(path.as_os_str()).display().to_string()
}

fn has_tokenizer_file(options: &EngineOptions) -> bool {
    ["tiktoken.model", "tokenizer.json"].iter().any(|name| options.model.join(name).symlink_metadata().is_ok())
}

/// `None` where there is none, which leaves ids.
fn tokenizer(options: &EngineOptions, config: &ModelConfig) -> Result<Option<Tokenizer>> {
    if !has_tokenizer_file(options) {
        return Ok(None);
    }
    Tokenizer::from_dir(&options.model, Some(config.vocab_size)).map(Some)
}

fn stop_ids(options: &EngineOptions, config: &ModelConfig, tokenizer: Option<&Tokenizer>) -> Result<Vec<StopId>> {
    let stops = text::stop_ids(&options.model, config, tokenizer)?;
    Ok(stops.sources().map(|(id, sources)| StopId { id, sources: sources.to_vec() }).collect())
}

fn expert_uses(options: &EngineOptions, config: &ModelConfig, manifest: &Manifest) -> Option<ExpertUses> {
    let top_k = config.moe.as_ref().filter(|_| options.learn)?.num_experts_per_token;
    let kept = Kept::load(manifest).ok()?;
    let (tokens, line) = (kept.tokens(top_k), kept.line(top_k));
    Some(ExpertUses { file: kept.path.display().to_string(), tokens, problem: kept.notice, line })
}

/// The drives of the experts with the mode that their store finds by reading, and what it has to say; those of all
/// shards where there are no experts.
fn drives(options: &EngineOptions, config: &ModelConfig, manifest: &Manifest) -> Result<(Vec<Drive>, Vec<String>)> {
    let Some(moe) = config.moe.as_ref().filter(|_| manifest.experts.is_some()) else {
        let files = Files::new(Arc::new(System), Names::of_shards(manifest), 1);
        let all: Vec<usize> = (0..manifest.shards.len()).collect();
        let volumes = Volumes::open(&Arc::new(files), &all, options.direct)?.list;
        let drives = volumes.iter().map(|volume| Drive::new(volume.path().to_owned(), volume.mode()));
        return Ok((drives.collect(), volumes.iter().filter_map(|volume| volume.take_notice()).collect()));
    };
    let smallest = StoreOptions {
        slots: moe.num_experts_per_token,
        direct: options.direct,
        queue_depth: 1,
        piece_bytes: 1 << 20,
        verify: false,
    };
    let roots = PackedRoot::open_all(&options.experts, manifest)?;
    let store = ExpertStore::open(manifest, &roots, &smallest, Interrupt::new())?;
    let drives = store.stats().drives.into_iter().map(|drive| Drive::new(drive.path, drive.mode));
    Ok((drives.collect(), store.take_notices()))
}
