//! `deltafin drives ROOT…`: what the roots deliver, as a table, JSON and a picture.

use std::fmt::Write as _;
use std::fs::File;
use std::io::Write as _;
use std::path::{Path, PathBuf};
use std::time::Duration;

use crate::cli::args::Shown;
use crate::cli::inspect::file_system;
use crate::drives::{self, Now, Options, Pattern, Report};
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::report::plot::{self, Chart, Series};

/// Flags of measuring.
#[derive(Debug, Clone, clap::Args)]
#[command(next_help_heading = "Measuring")]
pub(super) struct MeasureArgs {
    /// Directories to read from, one on each drive: the model's, or ones that `deltafin pack` wrote to
    #[arg(value_name = "ROOT")]
    pub roots: Vec<PathBuf>,
    /// Time of each measurement; the sustained one takes six times as long
    #[arg(long, value_name = "S", default_value_t = 3.0, value_parser = seconds)]
    pub seconds: f64,
    /// Bytes of a random read [default: an expert of K3]
    #[arg(long, value_name = "SIZE", default_value = "17547264", value_parser = crate::cli::args::size, hide_default_value = true)]
    pub size: u64,
    /// Draw the ladder and the drives' rates over time into an SVG file
    #[arg(long, value_name = "FILE")]
    pub plot: Option<PathBuf>,
    /// Read through the page cache
    #[arg(long)]
    pub no_direct: bool,
}

fn seconds(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(seconds) if (0.05..=3600.0).contains(&seconds) => Ok(seconds),
        _ => Err("expected seconds from 0.05 to 3600".into()),
    }
}

/// Measures and draws.
///
/// # Errors
/// As [`drives::measure`]; Kind `Io` when the picture cannot be written.
pub(super) fn run(args: &MeasureArgs, shown: &Shown, interrupt: &Interrupt) -> Result<Report> {
    // Opened first: minutes of measuring should not end in a file that cannot be written.
    let unwritten = |path: &Path, cause| Error::io(format!("cannot write {}: {cause}", path.display()));
    let mut plot = match &args.plot {
        Some(path) => Some((path, File::create(path).map_err(|cause| unwritten(path, cause))?)),
        None => None,
    };
    let options = Options { size: args.size, time: Duration::from_secs_f64(args.seconds), direct: !args.no_direct };
    let file_system = |path: &Path| file_system::of(path).unwrap_or_else(|| "unknown".into());
    let progress = |now: Now<'_>| {
        if !shown.quiet {
            crate::cli::output::stderr(format_args!("{}/{}: {}", now.done + 1, now.total, now.what));
        }
    };
    let report = drives::measure(&args.roots, &options, &file_system, &progress, interrupt)?;
    if let Some((path, file)) = &mut plot {
        file.write_all(picture(&report).as_bytes()).map_err(|cause| unwritten(path, cause))?;
    }
    Ok(report)
}

/// The report as a table.
pub(super) fn table(report: &Report) -> String {
    let mut out = String::new();
    for drive in &report.drives {
        let _ = writeln!(out, "{}", drive.root);
        let shared = drive.same_device_as.as_ref().map_or(String::new(), |root| format!(", shared with {root}"));
        let source = if drive.source == "made" { ", from a file made for it" } else { "" };
        let _ = writeln!(out, "  device {}{shared}, {}, {} reads{source}", drive.device, drive.fs, drive.mode);
        let _ = writeln!(out, "  pattern     readers    GB/s    p50 ms    p90 ms    p99 ms    max ms");
        for rate in &drive.rates {
            let pattern = match rate.pattern {
                Pattern::Sequential => "sequential",
                Pattern::Random => "random",
            };
            let _ = writeln!(
                out,
                "  {pattern:<11} {:>7} {:>7.2} {:>9.1} {:>9.1} {:>9.1} {:>9.1}",
                rate.depth, rate.gb_per_s, rate.p50_ms, rate.p90_ms, rate.p99_ms, rate.max_ms
            );
        }
        if let (Some(first), Some(rest)) = (drive.first_gb_per_s, drive.sustained_gb_per_s) {
            let _ = writeln!(
                out,
                "  sustained, {} readers: {first:.2} GB/s at first, {rest:.2} GB/s then",
                drive.best_depth
            );
        }
    }
    let _ = writeln!(out, "together    GB/s   of the sum   added");
    for step in &report.ladder {
        let share = 100.0 * step.share_of_sum;
        let _ = writeln!(out, "{:>8} {:>7.2} {share:>10.0} %   {}", step.roots, step.gb_per_s, step.added);
    }
    out
}

fn picture(report: &Report) -> String {
    let ladder = report.ladder.iter().map(|step| (step.roots as f64, step.gb_per_s)).collect();
    let together = report.ladder.last().map_or(&[][..], |step| &step.timeline);
    // The last step has all roots, in the order in which they were added.
    let names = report.ladder.iter().map(|step| step.added.clone());
    let series = names.zip(together).map(|(name, points)| Series { name, points: points.clone() }).collect();
    plot::svg(&[
        Chart {
            title: "Roots together",
            x: "roots",
            y: "GB/s",
            series: vec![Series { name: "measured".into(), points: ladder }],
        },
        Chart { title: "All roots, over time", x: "seconds", y: "GB/s", series },
    ])
}
