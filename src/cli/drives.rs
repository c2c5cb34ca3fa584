//! `deltafin drives`: what drives give alone, together and one added to the other, and what tokens/s that allows.

mod picture;
mod screen;
mod table;
mod values;

use std::path::{Path, PathBuf};
use std::sync::mpsc;
use std::thread;
use std::time::Duration;

use clap::{ArgGroup, ValueEnum};
use serde::Serialize;

use super::args::{self, Shown};
use super::output;
use crate::drives::{
    self, DriveOnPaper, Estimate, JITTER, K3_EXPERT_BYTES, LATENCY_US, Model, Options, PRECISION, Report, Run,
};
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::report::whole_file::WholeFile;
use crate::synth::Preset;
use screen::Screen;

/// Seconds of reading a drive alone when `--seconds` does not say: long enough that the first ten are a part of them.
const SECONDS: f64 = 60.0;
/// Experts in memory when neither `--cache-share` nor `--memory` says: what a machine with some room beside K3's trunk has.
const CACHE_SHARE: f64 = 0.04;
/// Computing a token of K3, as published for an M5 Max.
const K3_COMPUTE: Duration = Duration::from_millis(380);
/// Tokens of context that the memory of an estimate has room for.
const CONTEXT: usize = 4096;

const HELP: &str = "\
Each drive is read alone for --seconds: in pieces of random experts as decoding reads them, in \
sequence, single pages, and whole experts at several queue depths. Then all are read together, then \
the fastest, the two fastest and so on. Directories on one physical drive count as one. What is read \
are the shards or packed experts in a directory; without any, a test file is written there, which \
has no name and is gone when this ends, however it ends.

With --shape or -m the report ends with the tokens/s that the measured drives allow: a simulation of \
the step loop with this program's own scheduling, cache and lookahead. --simulate does it for drives \
that are not there.

Examples:
  deltafin drives /mnt/a /mnt/b --plot drives.svg
  deltafin drives /mnt/a --seconds 10 --output json
  deltafin drives /mnt/a /mnt/b --shape k3 --memory 128GiB
  deltafin drives --simulate 13.6,7.1,7.1,5.7 --shape k3 --cache-share 0.04
  deltafin drives --simulate 13.6,7.1,7.1,5.7 --shape k3 --in-turn

Exit code 2: a root is no directory. 4: a drive failed or did not answer; what was measured is \
printed all the same, also after an interrupt.";

/// Flags of `drives`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = HELP, group(ArgGroup::new("estimated").multiple(true).args(["simulate", "shape", "model"])))]
pub struct DrivesArgs {
    /// Directories to measure, one on each drive
    #[arg(value_name = "ROOT", conflicts_with = "simulate")]
    roots: Vec<PathBuf>,
    /// Seconds of reading each drive alone [default: 60]
    #[arg(long, value_name = "S", value_parser = values::seconds, conflicts_with = "simulate")]
    seconds: Option<f64>,
    /// Bytes of a random read [default: 17547264, an expert of K3]
    #[arg(long, value_name = "SIZE", value_parser = values::read_bytes, conflicts_with = "simulate")]
    size: Option<usize>,
    /// Read through the page cache
    #[arg(long, conflicts_with = "simulate")]
    no_direct: bool,
    /// Form of the report
    #[arg(long, value_name = "FORM", default_value = "table")]
    output: Form,
    /// Draw the ladder, and the drives over time
    #[arg(long, value_name = "FILE")]
    plot: Option<PathBuf>,
    #[command(flatten)]
    estimate: EstimateArgs,
}

/// Flags of the estimate.
#[derive(Debug, clap::Args)]
#[command(next_help_heading = "Tokens/s")]
struct EstimateArgs {
    /// Simulate drives of these rates in GB/s, added one by one
    #[arg(long, value_name = "LIST", value_parser = values::rates, allow_negative_numbers = true)]
    simulate: Option<values::Rates>,
    /// Model to estimate for: k3, another preset of `synth`, or a model directory [default with --simulate: k3]
    #[arg(long, value_name = "NAME|DIR")]
    shape: Option<PathBuf>,
    /// Model directory to estimate for
    #[arg(short, long, value_name = "DIR", conflicts_with = "shape")]
    model: Option<PathBuf>,
    /// Memory of the machine that runs it, e.g. 128GiB; what the trunk leaves holds experts
    #[arg(long, value_name = "SIZE", value_parser = args::size, requires = "estimated", conflicts_with = "cache_share")]
    memory: Option<u64>,
    /// Part of all experts that memory holds [default: 0.04]
    #[arg(long, value_name = "PART", value_parser = values::part, requires = "estimated")]
    cache_share: Option<f64>,
    /// Milliseconds of computing a token [default: 380 for k3, as published for an M5 Max; else 0]
    #[arg(long, value_name = "MS", value_parser = values::milliseconds, requires = "estimated")]
    compute_ms: Option<Duration>,
    /// Reads and compute take turns; nothing is kept in memory, nothing read ahead
    #[arg(long, requires = "estimated")]
    in_turn: bool,
    /// Part of the experts read ahead that the next layer asks for [default: 0.936, as the demo model's]
    #[arg(long, value_name = "PART", value_parser = values::part, requires = "estimated")]
    precision: Option<f64>,
    /// Tokens to simulate [default: 200, or all of the trace]
    #[arg(long, value_name = "N", value_parser = values::tokens, requires = "estimated")]
    tokens: Option<usize>,
    /// Deviation of a read's time, as a part of it [default: 0.1]
    #[arg(long, value_name = "PART", value_parser = values::part, requires = "estimated")]
    jitter: Option<f64>,
    /// Microseconds before a read's first byte [default: 100, or as measured]
    #[arg(long, value_name = "N", value_parser = values::microseconds, requires = "estimated")]
    latency_us: Option<f64>,
    /// Part of each drive's reads that hang, and for how many seconds, e.g. 0.00001,10
    #[arg(long, value_name = "PART,S", value_parser = values::stall, requires = "estimated")]
    stall: Option<values::Stall>,
    /// Decides jitter, stalls and made-up routing [default: 0]
    #[arg(long, value_name = "N", requires = "estimated")]
    seed: Option<u64>,
    /// Take the experts of each token from this trace instead of making them up
    #[arg(long, value_name = "FILE", requires = "estimated")]
    trace: Option<PathBuf>,
}

/// `--output`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// For people
    Table,
    /// One JSON object
    Json,
}

pub(super) fn run(args: &DrivesArgs, shown: &Shown, interrupt: &Interrupt) -> Result<()> {
    if args.roots.is_empty() && args.estimate.simulate.is_none() {
        return Err(Error::usage("no directory to measure")
            .hint("give one on each drive, or rates of drives that are not there with --simulate"));
    }
    let plot = args.plot.as_deref().map(WholeFile::new).transpose()?;
    let wanted = wanted(&args.estimate, shown)?;
    match (&args.estimate.simulate, wanted) {
        (Some(rates), Some(wanted)) => {
            let estimate = simulated(wanted, on_paper(rates, &args.estimate), interrupt)?;
            if let Some(plot) = &plot {
                plot.write(picture::of_estimate(&estimate).as_bytes())?;
            }
            print(args.output, &estimate, || table::of_estimate(&estimate))
        }
        (_, wanted) => measured(args, wanted, plot, shown, interrupt),
    }
}

/// What to simulate, but for the drives.
struct Wanted {
    model: Model,
    run: Run,
}

/// `None` when no estimate is asked for.
fn wanted(args: &EstimateArgs, shown: &Shown) -> Result<Option<Wanted>> {
    let k3 = PathBuf::from(Preset::K3.name());
    let shape = args.shape.as_ref().or(args.simulate.as_ref().filter(|_| args.model.is_none()).map(|_| &k3));
    let preset = shape.and_then(|name| Preset::ALL.into_iter().find(|preset| Path::new(preset.name()) == name));
    let (model, share) = match (preset, shape.or(args.model.as_ref())) {
        (Some(preset), _) => Model::of_shape(preset.name(), &preset.shape(), args.memory, CONTEXT)?,
        (None, Some(dir)) => Model::of_dir(&args::model_dir(dir)?, args.memory, CONTEXT).map_err(|error| {
            let names = Preset::ALL.map(Preset::name).join(", ");
            if dir.exists() || args.shape.is_none() {
                return error;
            }
            Error::model(format!("--shape {}: no such shape, nor a model directory", dir.display()))
                .hint(format!("give one of {names}, or a directory with config.json and the shards"))
        })?,
        (None, None) => return Ok(None),
    };
    if args.in_turn && (args.cache_share.is_some() || args.memory.is_some()) && !shown.quiet {
        output::stderr("note: with --in-turn nothing is kept in memory");
    }
    let is_k3 = model.token_bytes() == K3_EXPERT_BYTES as u64 * 92 * 16;
    let run = Run {
        cache_share: args.cache_share.or(share).unwrap_or(CACHE_SHARE),
        compute: args.compute_ms.unwrap_or(if is_k3 { K3_COMPUTE } else { Duration::ZERO }),
        in_turn: args.in_turn,
        precision: args.precision.unwrap_or(PRECISION),
        tokens: args.tokens,
        seed: args.seed.unwrap_or(0),
        trace: args.trace.clone(),
    };
    Ok(Some(Wanted { model, run }))
}

fn on_paper(rates: &values::Rates, args: &EstimateArgs) -> Vec<DriveOnPaper> {
    rates.0.iter().map(|rate| drive(*rate, LATENCY_US, args)).collect()
}

/// A drive with what the flags say of all drives.
fn drive(gb_per_s: f64, latency_us: f64, args: &EstimateArgs) -> DriveOnPaper {
    let stall = args.stall.unwrap_or_default();
    DriveOnPaper {
        gb_per_s,
        latency_us: args.latency_us.unwrap_or(latency_us),
        jitter: args.jitter.unwrap_or(JITTER),
        stall_share: stall.share,
        stall_s: stall.seconds,
    }
}

/// The measured drives, the fastest first.
fn of_report(report: &Report, args: &EstimateArgs) -> Vec<DriveOnPaper> {
    let whole = report.drives.iter().filter(|drive| drive.same_device_as.is_none() && drive.error.is_none());
    let mut drives: Vec<DriveOnPaper> = whole
        .filter_map(|found| {
            let page = found.rates.iter().find(|rate| rate.pattern == "page").and_then(|rate| rate.p50_ms);
            Some(drive(found.gb_per_s?, page.map_or(LATENCY_US, |ms| ms * 1e3), args))
        })
        .collect();
    drives.sort_by(|a, b| b.gb_per_s.total_cmp(&a.gb_per_s));
    drives
}

/// Simulates in a thread, so that an interrupt ends it at any moment.
fn simulated(wanted: Wanted, drives: Vec<DriveOnPaper>, interrupt: &Interrupt) -> Result<Estimate> {
    let (done, result) = mpsc::channel();
    let simulate = move || {
        // Nobody waits for it after an interrupt.
        let _ = done.send(drives::estimate(&wanted.model, &drives, &wanted.run));
    };
    thread::Builder::new()
        .name("simulate".into())
        .spawn(simulate)
        .map_err(|cause| Error::other(format!("cannot start a thread: {cause}")))?;
    loop {
        match result.recv_timeout(Duration::from_millis(20)) {
            Ok(estimate) => return estimate,
            Err(mpsc::RecvTimeoutError::Timeout) => interrupt.check()?,
            Err(mpsc::RecvTimeoutError::Disconnected) => return Err(Error::other("the simulation has ended early")),
        }
    }
}

/// A report, and what it allows.
#[derive(Serialize)]
struct Measured<'a> {
    #[serde(flatten)]
    report: &'a Report,
    #[serde(skip_serializing_if = "Option::is_none")]
    estimate: Option<&'a Estimate>,
}

fn measured(
    args: &DrivesArgs,
    wanted: Option<Wanted>,
    plot: Option<WholeFile>,
    shown: &Shown,
    interrupt: &Interrupt,
) -> Result<()> {
    let options = Options {
        roots: args.roots.clone(),
        seconds: args.seconds.unwrap_or(SECONDS),
        read_bytes: args.size.unwrap_or(K3_EXPERT_BYTES),
        direct: !args.no_direct,
    };
    let mut screen = Screen::new(shown);
    let (report, result) = drives::measure(&options, &mut |at| screen.show(at), interrupt);
    screen.clear();
    // Roots that are none: nothing was begun.
    if report.drives.is_empty() {
        return result;
    }
    let drives = of_report(&report, &args.estimate);
    let estimate = match wanted.filter(|_| !drives.is_empty() && !interrupt.is_raised()) {
        Some(wanted) => simulated(wanted, drives, interrupt).map(Some),
        None => Ok(None),
    };
    let (estimate, result) = match estimate {
        Ok(estimate) => (estimate, result),
        Err(error) => (None, result.and(Err(error))),
    };
    let whole = Measured { report: &report, estimate: estimate.as_ref() };
    let printed = print(args.output, &whole, || table::of_report(&report, estimate.as_ref()));
    let drawn = plot.map_or(Ok(()), |plot| plot.write(picture::of_report(&report).as_bytes()));
    // An interrupt is told whatever else went wrong.
    match interrupt.check() {
        Err(error) if error.kind() != Kind::Other => Err(error),
        _ => result.and(printed).and(drawn),
    }
}

fn print(form: Form, report: &impl Serialize, table: impl FnOnce() -> String) -> Result<()> {
    let text = match form {
        Form::Table => table(),
        Form::Json => {
            let mut text = serde_json::to_string_pretty(report).expect("the report is plain data");
            text.push('\n');
            text
        }
    };
    // A reader that has gone away has seen what it wanted.
    output::stdout(text.as_bytes()).map(drop)
}
