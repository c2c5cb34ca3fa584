//! `deltafin drives --simulate`: tokens a second that drives of given rates allow, by the engine's own scheduling.

use std::fmt::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::checkpoint::Manifest;
use crate::config::ModelConfig;
use crate::error::{Error, Result};
use crate::store::simulate::{self, SimulatedDrive, SimulatedFigures, SimulatedRun};
use crate::store::trace;
use crate::synth::trace::{Trace, TraceShape};

/// Bytes of an expert of the released K3.
const K3_EXPERT_BYTES: u64 = 17_547_264;
/// Tokens that fill the cache first.
const WARM_UP: usize = 50;

/// Flags of the simulation.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Simulating")]
pub(super) struct SimulateArgs {
    /// Rates of drives in GB/s, such as 13.6,7.1,7.1,5.7: nothing is read, the engine's scheduling runs on paper
    #[arg(long, value_name = "RATES", value_delimiter = ',', value_parser = rate, conflicts_with_all = ["roots", "plot"])]
    pub simulate: Vec<f64>,
    /// `k3`, or a model directory
    #[arg(long, value_name = "SHAPE", default_value = "k3")]
    pub shape: String,
    /// Part of all experts that memory holds
    #[arg(long, value_name = "SHARE", default_value_t = 0.04, value_parser = share)]
    pub cache_share: f64,
    /// Time that computing a token takes
    #[arg(long, value_name = "MS", default_value_t = 380.0, value_parser = not_negative)]
    pub compute_ms: f64,
    /// Reads and computing take turns, no guesses, no cache: as a plain engine does it
    #[arg(long)]
    pub in_turn: bool,
    /// Tokens to simulate
    #[arg(long, value_name = "N", default_value_t = 200, value_parser = crate::cli::args::positive)]
    pub tokens: usize,
    /// Spread of a read's time, as a share of it
    #[arg(long, value_name = "SHARE", default_value_t = 0.0, value_parser = share)]
    pub jitter: f64,
    /// Time to a read's first byte
    #[arg(long, value_name = "US", default_value_t = 100.0, value_parser = not_negative)]
    pub latency_us: f64,
    /// Share of guessed experts that come true
    #[arg(long, value_name = "SHARE", default_value_t = 0.936, value_parser = share)]
    pub precision: f64,
    /// Decides jitter, guesses and routing
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Routing that was recorded, instead of one made with K3's figures
    #[arg(long, value_name = "FILE")]
    pub trace: Option<PathBuf>,
}

fn number(text: &str) -> Result<f64, String> {
    match text.trim().parse::<f64>() {
        Ok(number) if number.is_finite() => Ok(number),
        _ => Err("expected a number".into()),
    }
}

fn rate(text: &str) -> Result<f64, String> {
    let rate = number(text)?;
    if (0.001..=10_000.0).contains(&rate) { Ok(rate) } else { Err("expected GB/s from 0.001 to 10000".into()) }
}

fn share(text: &str) -> Result<f64, String> {
    let share = number(text)?;
    if (0.0..=1.0).contains(&share) { Ok(share) } else { Err("expected a share from 0 to 1".into()) }
}

fn not_negative(text: &str) -> Result<f64, String> {
    let number = number(text)?;
    if (0.0..=1e9).contains(&number) { Ok(number) } else { Err("expected a number from 0 up".into()) }
}

/// Figures of the first drive, of the first two, and so on.
///
/// # Errors
/// Kind `Usage` for a trace that does not fit the shape or more drives than are supported; what opening a model reports.
pub(super) fn run(args: &SimulateArgs) -> Result<Vec<SimulatedFigures>> {
    if args.simulate.len() > 32 {
        return Err(Error::usage(format!("--simulate: {} drives, at most 32 are supported", args.simulate.len())));
    }
    let (shape, expert_bytes) = shape(&args.shape)?;
    let latency = Duration::from_secs_f64(args.latency_us / 1e6);
    let drive = |rate: &f64| SimulatedDrive { bytes_per_s: rate * 1e9, latency, jitter: args.jitter };
    let drives: Vec<_> = args.simulate.iter().map(drive).collect();
    let run = SimulatedRun {
        moe_layers: shape.layers,
        experts: shape.experts,
        top_k: shape.top_k,
        expert_bytes,
        cache_share: args.cache_share,
        compute: Duration::from_secs_f64(args.compute_ms / 1e3),
        in_turn: args.in_turn,
        precision: args.precision,
        tokens: args.tokens,
        warm_up: if args.in_turn { 0 } else { WARM_UP },
        seed: args.seed,
    };
    let recorded = args.trace.as_deref().map(|path| recorded(path, shape)).transpose()?;
    let fresh = || Trace::new(shape, args.seed, args.seed.wrapping_add(1), false);
    let mut made = fresh();
    let mut routing = |token: usize| match &recorded {
        Some(tokens) => tokens[token % tokens.len()].clone(),
        None => {
            if token == 0 {
                made = fresh();
            }
            made.next_token().to_vec()
        }
    };
    Ok(simulate::ladder(&drives, &run, &mut routing))
}

/// Layers, experts, experts a token, and bytes of an expert.
fn shape(name: &str) -> Result<(TraceShape, u64)> {
    if name == "k3" {
        return Ok((TraceShape::K3, K3_EXPERT_BYTES));
    }
    let dir = crate::cli::args::model_dir(Path::new(name))?;
    let config = ModelConfig::load(&dir)?;
    let manifest = Manifest::open(&dir, &config)?;
    match (&config.moe, &manifest.experts) {
        (Some(moe), Some(table)) => {
            let shape = TraceShape {
                layers: table.moe_layers.len(),
                experts: table.num_experts,
                top_k: moe.num_experts_per_token,
            };
            Ok((shape, manifest.expert_bytes()))
        }
        _ => Err(Error::usage(format!("--shape {name}: the model has no routed experts"))),
    }
}

/// The tokens of a recorded trace, `[layers, top_k]` each.
fn recorded(path: &Path, shape: TraceShape) -> Result<Vec<Vec<u16>>> {
    let trace = trace::Trace::read(path)?;
    let unfit = |why: String| Error::usage(format!("--trace {}: {why}", path.display()));
    if (trace.layers(), trace.experts()) != (shape.layers, shape.experts) {
        return Err(unfit(format!(
            "it is of {} layers of {} experts, the shape has {} of {}",
            trace.layers(),
            trace.experts(),
            shape.layers,
            shape.experts
        )));
    }
    let mut tokens: Vec<Vec<u16>> = Vec::new();
    let mut current = Vec::new();
    for (at, (layer, experts)) in trace.requests().enumerate() {
        if usize::from(layer) != at % shape.layers || experts.len() != shape.top_k {
            return Err(unfit(format!(
                "request {at} asks {} experts of layer {layer}: expected one token after the other, {} experts of each \
                 layer",
                experts.len(),
                shape.top_k
            )));
        }
        current.extend_from_slice(experts);
        if current.len() == shape.layers * shape.top_k {
            tokens.push(std::mem::take(&mut current));
        }
    }
    if tokens.is_empty() {
        return Err(unfit("it holds no whole token".into()));
    }
    Ok(tokens)
}

/// The figures as a table.
pub(super) fn table(args: &SimulateArgs, ladder: &[SimulatedFigures]) -> String {
    let mut out = String::new();
    let how = if args.in_turn { "reads and computing in turn, no cache" } else { "the engine's own scheduling" };
    let _ = writeln!(out, "simulated: {how}; every expert on every drive, {} tokens of {}", args.tokens, args.shape);
    let _ = writeln!(out, "drives  tokens/s    GB/s   of the sum   in memory   GB a token");
    for step in ladder {
        let _ = writeln!(
            out,
            "{:>6} {:>9.3} {:>7.2} {:>10.0} % {:>9.0} % {:>12.2}",
            step.drives,
            step.tokens_per_s,
            step.gb_per_s,
            100.0 * step.busy_share,
            100.0 * step.hit_rate,
            step.bytes_per_token / 1e9
        );
    }
    out
}
