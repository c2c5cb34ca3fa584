//! What drives deliver: each alone, all together, and one after the other added, read the way the engine reads experts.

mod files;
mod phase;

use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;

use self::files::Found;
use self::phase::{Load, Measured, TICK, Target};
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::store::{Files, Names, System, Volumes, device_name};

/// Queue depths at which random reads are measured.
pub const DEPTHS: [usize; 6] = [1, 2, 4, 8, 16, 32];
/// Readers of a sequential read.
const SEQUENTIAL_DEPTH: usize = 2;
/// The sustained measurement takes so many times the time of the others.
const SUSTAINED: u32 = 6;
/// What counts as its beginning.
const BEGINNING: Duration = Duration::from_secs(10);

/// How to measure.
#[derive(Debug, Clone)]
pub struct Options {
    /// Bytes of a random read.
    pub size: u64,
    /// Time of each measurement; the sustained one takes six times as long.
    pub time: Duration,
    /// Read past the page cache.
    pub direct: bool,
}

/// Order of the reads.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum Pattern {
    /// One after the other.
    Sequential,
    /// Anywhere.
    Random,
}

/// What was measured.
#[derive(Debug, Serialize)]
pub struct Report {
    /// One entry a root, in the order given.
    pub drives: Vec<DriveReport>,
    /// The roots together: the fastest, then one after the other added.
    pub ladder: Vec<Step>,
    /// Bytes of a random read.
    pub read_bytes: u64,
    /// Seconds of each measurement.
    pub seconds: f64,
}

/// One root.
#[derive(Debug, Serialize)]
pub struct DriveReport {
    /// The directory.
    pub root: String,
    /// Name of the physical device, as far as the system tells.
    pub device: String,
    /// The first root on the same device, if there is one before this: the two share what the device gives.
    pub same_device_as: Option<String>,
    /// File system.
    pub fs: String,
    /// `direct` or `buffered`: the mode in force.
    pub mode: String,
    /// What was read: `files`, or `made` for a file made for it and removed again.
    pub source: &'static str,
    /// Measurements of this root alone.
    pub rates: Vec<Rate>,
    /// The best random rate, 10⁹ bytes a second.
    pub best_gb_per_s: f64,
    /// Its queue depth.
    pub best_depth: usize,
    /// Rate of the first ten seconds (or the first half) of a longer read at that depth.
    pub first_gb_per_s: Option<f64>,
    /// Rate of the rest.
    pub sustained_gb_per_s: Option<f64>,
}

/// One measurement.
#[derive(Debug, Serialize)]
pub struct Rate {
    /// Order of the reads.
    pub pattern: Pattern,
    /// Readers.
    pub depth: usize,
    /// 10⁹ bytes a second.
    pub gb_per_s: f64,
    /// Half of the reads took no longer, in milliseconds.
    pub p50_ms: f64,
    /// Nine in ten.
    pub p90_ms: f64,
    /// Ninety-nine in a hundred.
    pub p99_ms: f64,
    /// All.
    pub max_ms: f64,
    /// Reads.
    pub reads: usize,
}

/// Some roots together.
#[derive(Debug, Serialize)]
pub struct Step {
    /// How many.
    pub roots: usize,
    /// The one added last.
    pub added: String,
    /// 10⁹ bytes a second of all.
    pub gb_per_s: f64,
    /// Share of the sum of what each gave alone; roots on one device count once.
    pub share_of_sum: f64,
    /// Rate of each root over time: seconds and 10⁹ bytes a second.
    pub timeline: Vec<Vec<(f64, f64)>>,
}

/// What is being measured now, for whoever shows progress.
pub struct Now<'a> {
    /// The root, or what else.
    pub what: &'a str,
    /// Measurements done and to do.
    pub done: usize,
    /// In all.
    pub total: usize,
}

struct Root {
    target: Target,
    found: Found,
    device: String,
}

/// Measures `roots`; `file_system` names the file system of a directory.
///
/// # Errors
/// Kind `Usage` for what is no directory or given twice, `Io` when reading fails; an interrupt.
pub fn measure(
    roots: &[PathBuf],
    options: &Options,
    file_system: &dyn Fn(&Path) -> String,
    progress: &dyn Fn(Now<'_>),
    interrupt: &Interrupt,
) -> Result<Report> {
    let total = roots.len() * (DEPTHS.len() + 4);
    let mut done = 0;
    let mut step = |what: &str| {
        progress(Now { what, done, total });
        done += 1;
    };
    let mut opened: Vec<Root> = Vec::new();
    for (number, root) in roots.iter().enumerate() {
        let canonical = |path: &Path| path.canonicalize().unwrap_or_else(|_| path.to_owned());
        if roots[..number].iter().any(|other| canonical(other) == canonical(root)) {
            return Err(Error::usage(format!("{}: given twice", root.display())));
        }
        step(&format!("{}: what to read", root.display()));
        opened.push(open(root, options, interrupt)?);
    }
    let mut drives: Vec<DriveReport> = Vec::new();
    for (root, opened) in roots.iter().zip(&opened) {
        let same = drives.iter().find(|drive| drive.device == opened.device).map(|drive| drive.root.clone());
        let mut report = DriveReport {
            root: root.display().to_string(),
            device: opened.device.clone(),
            same_device_as: same,
            fs: file_system(root),
            mode: opened.target.volume.mode().to_owned(),
            source: if opened.found.made.is_some() { "made" } else { "files" },
            rates: Vec::new(),
            best_gb_per_s: 0.0,
            best_depth: 1,
            first_gb_per_s: None,
            sustained_gb_per_s: None,
        };
        alone(&mut report, &opened.target, options, &mut step, interrupt)?;
        drives.push(report);
    }
    let ladder = ladder(&opened, &drives, options, &mut step, interrupt)?;
    Ok(Report { drives, ladder, read_bytes: options.size, seconds: options.time.as_secs_f64() })
}

fn open(root: &Path, options: &Options, interrupt: &Interrupt) -> Result<Root> {
    let found = files::find(root, options.size, interrupt)?;
    let (paths, bytes): (Vec<_>, Vec<_>) = found.files.iter().cloned().unzip();
    let numbers: Vec<usize> = (0..paths.len()).collect();
    let files = Arc::new(Files::new(Arc::new(System), Names::of_files(paths, bytes.clone()), 32));
    let volumes = Volumes::open(&files, &numbers, options.direct)?;
    let Some(volume) = volumes.list.into_iter().next() else {
        return Err(Error::io(format!("{}: nothing to read", root.display())));
    };
    // A folder on another device is left out.
    let files = numbers.into_iter().zip(bytes).filter(|(file, _)| volumes.of_file[*file] == 0).collect();
    Ok(Root { target: Target { volume, files }, found, device: device_name(root)? })
}

/// Measures one root.
fn alone(
    report: &mut DriveReport,
    target: &Target,
    options: &Options,
    step: &mut dyn FnMut(&str),
    interrupt: &Interrupt,
) -> Result<()> {
    let mut one = |pattern, depth, time, what: &str| {
        step(&format!("{}: {what}", report.root));
        let load = Load { pattern, depth, size: options.size, time };
        phase::measure(&[target], load, depth as u64, interrupt)
    };
    let sequential = one(Pattern::Sequential, SEQUENTIAL_DEPTH, options.time, "sequential")?;
    report.rates.push(rate(Pattern::Sequential, SEQUENTIAL_DEPTH, &sequential));
    for depth in DEPTHS {
        let measured = one(Pattern::Random, depth, options.time, &format!("random, {depth} readers"))?;
        let rate = rate(Pattern::Random, depth, &measured);
        if rate.gb_per_s > report.best_gb_per_s {
            (report.best_gb_per_s, report.best_depth) = (rate.gb_per_s, depth);
        }
        report.rates.push(rate);
    }
    let long = one(Pattern::Random, report.best_depth, SUSTAINED * options.time, "sustained")?;
    let ticks = (BEGINNING.min(SUSTAINED * options.time / 2).as_secs_f64() / TICK.as_secs_f64()) as usize;
    report.first_gb_per_s = long.rate_between(0, ticks);
    report.sustained_gb_per_s = long.rate_between(ticks, usize::MAX);
    report.mode = target.volume.mode().to_owned();
    Ok(())
}

fn rate(pattern: Pattern, depth: usize, measured: &Measured) -> Rate {
    Rate {
        pattern,
        depth,
        gb_per_s: measured.gb_per_s(),
        p50_ms: measured.percentile(0.5),
        p90_ms: measured.percentile(0.9),
        p99_ms: measured.percentile(0.99),
        max_ms: measured.percentile(1.0),
        reads: measured.latencies.len(),
    }
}

/// The fastest root, then one after the other added.
fn ladder(
    opened: &[Root],
    drives: &[DriveReport],
    options: &Options,
    step: &mut dyn FnMut(&str),
    interrupt: &Interrupt,
) -> Result<Vec<Step>> {
    let mut order: Vec<usize> = (0..drives.len()).collect();
    order.sort_by(|a, b| drives[*b].best_gb_per_s.total_cmp(&drives[*a].best_gb_per_s).then(a.cmp(b)));
    let depth = order.iter().map(|root| drives[*root].best_depth).max().unwrap_or(1);
    let mut steps = Vec::new();
    for count in 1..=order.len() {
        step(&format!("{count} roots together"));
        let targets: Vec<&Target> = order[..count].iter().map(|root| &opened[*root].target).collect();
        let load = Load { pattern: Pattern::Random, depth, size: options.size, time: options.time };
        let measured = phase::measure(&targets, load, count as u64, interrupt)?;
        let mut sum = 0.0;
        for root in &order[..count] {
            let same = |other: &&usize| drives[**other].device == drives[*root].device;
            let best = order[..count].iter().filter(same).map(|other| drives[*other].best_gb_per_s).fold(0.0, f64::max);
            let sharing = order[..count].iter().filter(same).count();
            sum += best / sharing as f64;
        }
        let whole = (measured.seconds / TICK.as_secs_f64()) as usize;
        let points = |ticks: &Vec<u64>| {
            let point =
                |(at, bytes): (usize, &u64)| (at as f64 * TICK.as_secs_f64(), *bytes as f64 / TICK.as_secs_f64() / 1e9);
            ticks[..whole.min(ticks.len())].iter().enumerate().map(point).collect()
        };
        steps.push(Step {
            roots: count,
            added: drives[order[count - 1]].root.clone(),
            gb_per_s: measured.gb_per_s(),
            share_of_sum: measured.gb_per_s() / sum.max(1e-9),
            timeline: measured.ticks.iter().map(points).collect(),
        });
    }
    Ok(steps)
}
