//! What tokens a second drives allow: a simulated run of a model's step loop, with the store's own scheduling, on drives of
//! given rates, one added to the other.

use std::path::{Path, PathBuf};
use std::time::Duration;

use serde::Serialize;

use super::routing::Routing;
use crate::checkpoint::Manifest;
use crate::config::ModelConfig;
use crate::engine::Engine;
use crate::error::{Error, Result};
use crate::store::simulate::{self, SimulatedDrive, SimulatedFigures, SimulatedRun, Stalls};
use crate::synth::{self, Shape};

/// What of a model decides how it is read.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Model {
    /// For people.
    pub name: String,
    /// Layers with routed experts.
    pub moe_layers: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Experts of a token in a layer.
    pub top_k: usize,
    /// Bytes of one expert.
    pub expert_bytes: u64,
}

impl Model {
    /// A model of `shape`, with the plan of its memory for `context` tokens on a machine of `memory` bytes if asked for:
    /// the share of its experts that has room there.
    ///
    /// # Errors
    /// Kind `Memory` below the floor.
    pub fn of_shape(name: &str, shape: &Shape, memory: Option<u64>, context: usize) -> Result<(Self, Option<f64>)> {
        let (config, manifest) = synth::outline(shape)?;
        Self::of(name.to_owned(), &config, &manifest, memory, context)
    }

    /// As [`Model::of_shape`], of the model in `dir`.
    ///
    /// # Errors
    /// Kind `Model` for a directory that holds none, or one without routed experts; `Memory` below the floor.
    pub fn of_dir(dir: &Path, memory: Option<u64>, context: usize) -> Result<(Self, Option<f64>)> {
        let config = ModelConfig::load(dir)?;
        let manifest = Manifest::open(dir, &config)?;
        Self::of(dir.display().to_string(), &config, &manifest, memory, context)
    }

    fn of(
        name: String,
        config: &ModelConfig,
        manifest: &Manifest,
        memory: Option<u64>,
        context: usize,
    ) -> Result<(Self, Option<f64>)> {
        let model = Self::of_manifest(&name, config, manifest)?;
        let context = context.min(config.max_position_embeddings);
        let plan = memory.map(|memory| Engine::plan_elsewhere(config, manifest, context, memory)).transpose()?;
        let share = plan.map(|plan| plan.slots as f64 / (model.moe_layers * model.experts) as f64);
        Ok((model, share))
    }

    /// The model `name` of `manifest`.
    ///
    /// # Errors
    /// Kind `Model` for one without routed experts.
    pub(crate) fn of_manifest(name: &str, config: &ModelConfig, manifest: &Manifest) -> Result<Self> {
        let (Some(moe), Some(table)) = (&config.moe, &manifest.experts) else {
            return Err(Error::model(format!("{name}: every layer is dense, so drives have no part in its speed")));
        };
        Ok(Self {
            name: name.to_owned(),
            moe_layers: table.moe_layers.len(),
            experts: table.num_experts,
            top_k: moe.num_experts_per_token,
            expert_bytes: manifest.expert_bytes(),
        })
    }

    /// Bytes that a token reads when nothing is in memory.
    pub fn token_bytes(&self) -> u64 {
        (self.moe_layers * self.top_k) as u64 * self.expert_bytes
    }
}

/// How the model is run.
#[derive(Debug, Clone)]
pub struct Run {
    /// Part of all experts that is in memory.
    pub cache_share: f64,
    /// Computing a token takes this long.
    pub compute: Duration,
    /// Reads and compute take turns; nothing is guessed, nothing kept.
    pub in_turn: bool,
    /// Part of the guessed experts that come true.
    pub precision: f64,
    /// Tokens to decode; `None`: all of the trace, or a number that is enough.
    pub tokens: Option<usize>,
    /// Decides jitter and made-up routing.
    pub seed: u64,
    /// Recorded routing.
    pub trace: Option<PathBuf>,
}

impl Run {
    /// Decoding `tokens` tokens, with `cache_share` of the experts in memory, as if computing took no time.
    pub(crate) fn reads_alone(cache_share: f64, tokens: usize) -> Self {
        Self {
            cache_share,
            compute: Duration::ZERO,
            in_turn: false,
            precision: PRECISION,
            tokens: Some(tokens),
            seed: 0,
            trace: None,
        }
    }
}

/// Guesses that come true when nobody says: of the demo model, half of whose next experts are guessed.
pub const PRECISION: f64 = 0.936;
/// Latency of a drive when nobody says, in microseconds: that of a common NVMe drive.
pub const LATENCY_US: f64 = 100.0;
/// Deviation of a drive's reads when nobody says.
pub const JITTER: f64 = 0.1;

/// Tokens that are made up when nothing else is said.
const TOKENS: usize = 200;
/// Tokens that fill the memory before the others, and are not counted: so many, or what a trace can spare.
const WARM_UP: usize = 50;
const WARM_UP_PART: usize = 5;

/// What the simulation was of, and what came out.
#[derive(Debug, Clone, Serialize)]
pub struct Estimate {
    /// The model.
    pub model: Model,
    /// Part of its experts in memory.
    pub cache_share: f64,
    /// Milliseconds of computing a token.
    pub compute_ms: f64,
    /// Whether reads and compute take turns.
    pub in_turn: bool,
    /// Part of the guessed experts that come true.
    pub precision: f64,
    /// Tokens decoded and counted.
    pub tokens: usize,
    /// Tokens before them.
    pub warm_up: usize,
    /// Decides jitter and made-up routing.
    pub seed: u64,
    /// The trace; null for made-up routing.
    pub trace: Option<String>,
    /// The drives.
    pub drives: Vec<DriveOnPaper>,
    /// With the first drive alone, then with the next.
    pub ladder: Vec<SimulatedFigures>,
}

/// A drive of an estimate.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct DriveOnPaper {
    /// 10⁹ bytes a second.
    pub gb_per_s: f64,
    /// Microseconds from a read's begin to its first byte.
    pub latency_us: f64,
    /// Standard deviation of a read's time, as a part of it.
    pub jitter: f64,
    /// Part of its reads that hang.
    pub stall_share: f64,
    /// Seconds that such a read hangs.
    pub stall_s: f64,
}

impl DriveOnPaper {
    /// A common drive of this rate.
    pub fn common(gb_per_s: f64) -> Self {
        Self { gb_per_s, latency_us: LATENCY_US, jitter: JITTER, stall_share: 0.0, stall_s: 0.0 }
    }
}

/// Simulates `run` of `model` on the first of `drives`, the first two, and so on.
///
/// # Errors
/// Kind `Io` and `Usage` for a trace that is no good.
pub fn estimate(model: &Model, drives: &[DriveOnPaper], run: &Run) -> Result<Estimate> {
    estimate_from(1, model, drives, run)
}

/// As [`estimate`], on all of `drives` alone: a ladder of one.
///
/// # Errors
/// As [`estimate`].
pub(crate) fn estimate_together(model: &Model, drives: &[DriveOnPaper], run: &Run) -> Result<Estimate> {
    estimate_from(drives.len(), model, drives, run)
}

/// As [`estimate`], on so many drives at least.
fn estimate_from(least: usize, model: &Model, drives: &[DriveOnPaper], run: &Run) -> Result<Estimate> {
    let mut routing = match &run.trace {
        Some(path) => Routing::recorded(path, model)?,
        None => Routing::made_up(model, run.seed),
    };
    let (tokens, warm_up) = match (routing.len(), run.tokens) {
        (Some(there), Some(asked)) if asked > there => {
            return Err(Error::usage(format!("--tokens {asked}: the trace has {there} decoded tokens")));
        }
        (Some(there), Some(asked)) => (asked, WARM_UP.min(there - asked)),
        (Some(there), None) => (there - WARM_UP.min(there / WARM_UP_PART), WARM_UP.min(there / WARM_UP_PART)),
        (None, asked) => (asked.unwrap_or(TOKENS), WARM_UP),
    };
    let cache_share = if run.in_turn { 0.0 } else { run.cache_share };
    let simulated = SimulatedRun {
        moe_layers: model.moe_layers,
        experts: model.experts,
        top_k: model.top_k,
        expert_bytes: model.expert_bytes,
        cache_share,
        compute: run.compute,
        in_turn: run.in_turn,
        precision: run.precision,
        tokens,
        warm_up: if run.in_turn { 0 } else { warm_up },
        seed: run.seed,
    };
    let on_paper: Vec<SimulatedDrive> = drives
        .iter()
        .map(|drive| SimulatedDrive {
            bytes_per_s: drive.gb_per_s * 1e9,
            latency: Duration::from_secs_f64(drive.latency_us / 1e6),
            jitter: drive.jitter,
            stalls: Stalls { share: drive.stall_share, time: Duration::from_secs_f64(drive.stall_s) },
            dies_at: None,
        })
        .collect();
    let ladder = simulate::ladder_from(least, &on_paper, &simulated, &mut |token| routing.token(token));
    Ok(Estimate {
        model: model.clone(),
        cache_share,
        compute_ms: run.compute.as_secs_f64() * 1e3,
        in_turn: run.in_turn,
        precision: run.precision,
        tokens,
        warm_up: simulated.warm_up,
        seed: run.seed,
        trace: run.trace.as_ref().map(|path| path.display().to_string()),
        drives: drives.to_vec(),
        ladder,
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;
    use crate::synth::Preset;

    #[test]
    fn k3_reads_26_gb_a_token_and_memory_beyond_its_trunk_holds_experts() {
        let shape = Preset::K3.shape();
        let (model, share) = Model::of_shape("k3", &shape, None, 4096).unwrap();
        assert_eq!((model.token_bytes(), share), (25_829_572_608, None));
        let (_, share) = Model::of_shape("k3", &shape, Some(192 << 30), 4096).unwrap();
        let share = share.unwrap();
        assert!((0.03..0.08).contains(&share), "{share}");
        let error = Model::of_shape("k3", &shape, Some(64 << 30), 4096).unwrap_err();
        assert!(error.kind() == Kind::Memory && error.message().contains("64.00 GiB"), "{error}");
    }

    #[test]
    fn a_directory_is_a_model_or_is_refused() {
        let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model");
        let (model, share) = Model::of_dir(&demo, Some(1 << 30), 512).unwrap();
        assert!(model.moe_layers > 0 && model.top_k > 0 && share == Some(1.0), "{model:?} {share:?}");
        assert_eq!(Model::of_dir(Path::new("/nonexistent"), None, 512).unwrap_err().kind(), Kind::Model);
    }
}
