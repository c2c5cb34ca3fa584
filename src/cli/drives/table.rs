//! The report for people, in 80 columns.

use std::fmt::Write as _;

use crate::drives::{Drive, Estimate, Rate, Report, SimulatedFigures, SourceKind};

/// What was measured, as far as it came, and what it allows.
pub(super) fn of_report(report: &Report, estimate: Option<&Estimate>) -> String {
    let mut text = String::new();
    for drive in &report.drives {
        of_drive(&mut text, drive);
    }
    together(&mut text, report);
    if let Some(estimate) = estimate {
        text.push('\n');
        text.push_str(&of_estimate(estimate));
    }
    text
}

fn of_drive(text: &mut String, drive: &Drive) {
    if !text.is_empty() {
        text.push('\n');
    }
    let _ = writeln!(text, "{}", drive.root);
    let fs = drive.fs.as_deref().unwrap_or("unknown file system");
    let mode = drive.mode.map_or(String::new(), |mode| format!(", {mode} reads"));
    let _ = writeln!(text, "  drive       {}, {fs}{mode}", drive.device);
    if let Some(first) = &drive.same_device_as {
        let _ = writeln!(text, "  the same as {first}");
        return;
    }
    if let Some(source) = drive.source {
        let gb = source.bytes as f64 / 1e9;
        let what = match (source.kind, source.files) {
            (SourceKind::Model, 1) => format!("1 file of a model, {gb:.2} GB"),
            (SourceKind::Model, files) => format!("{files} files of a model, {gb:.2} GB"),
            (SourceKind::TestFile, _) => format!("a test file of {gb:.2} GB, gone again"),
        };
        let _ = writeln!(text, "  read from   {what}");
    }
    if !drive.rates.is_empty() {
        let _ = writeln!(
            text,
            "  {:<23}{:>7}{:>9}{:>9}{:>9}{:>9}{:>9}",
            "reads", "at once", "GB/s", "p50 ms", "p90", "p99", "max"
        );
    }
    for rate in &drive.rates {
        let _ = writeln!(
            text,
            "  {:<23}{:>7}{:>9}{:>9}{:>9}{:>9}{:>9}",
            what(rate),
            rate.depth,
            number(Some(rate.gb_per_s)),
            number(rate.p50_ms),
            number(rate.p90_ms),
            number(rate.p99_ms),
            number(rate.max_ms)
        );
    }
    if let Some(error) = &drive.error {
        let _ = writeln!(text, "  failed      {error}");
    }
}

/// What was read, in 22 columns.
fn what(rate: &Rate) -> String {
    match rate.pattern {
        "first" => format!("decoding, first {} s", seconds(rate.seconds)),
        "sustained" => format!("decoding, next {} s", seconds(rate.seconds)),
        pattern => format!("{pattern}, {}", size(rate.read_bytes)),
    }
}

fn together(text: &mut String, report: &Report) {
    if let Some(together) = &report.together {
        let share = 100.0 * together.gb_per_s / together.sum_gb_per_s;
        let _ = writeln!(
            text,
            "\ntogether, {} s: {} GB/s, {}% of what they give alone",
            seconds(together.seconds),
            number(Some(together.gb_per_s)),
            number(Some(share)),
        );
    }
    if report.ladder.is_empty() {
        return;
    }
    let _ = writeln!(text, "  drives     GB/s   alone   added");
    for rung in &report.ladder {
        let (rate, alone) = (number(Some(rung.gb_per_s)), number(Some(rung.sum_gb_per_s)));
        let _ = writeln!(text, "  {:>6}{rate:>9}{alone:>8}   {}", rung.roots, rung.added);
    }
}

/// What was simulated.
pub(super) fn of_estimate(estimate: &Estimate) -> String {
    let model = &estimate.model;
    let mut text = String::new();
    let _ = writeln!(
        text,
        "tokens/s of {}, simulated: {} layers of {} experts of {},\n{} a token; {} of computing a token",
        model.name,
        model.moe_layers,
        model.experts,
        size(model.expert_bytes as usize),
        model.top_k,
        format_args!("{} ms", number(Some(estimate.compute_ms))),
    );
    let routing = match &estimate.trace {
        Some(trace) => format!("recorded in {trace}"),
        None => format!("made up like real ones, seed {}", estimate.seed),
    };
    let memory = if estimate.in_turn {
        "nothing kept in memory, reads and compute in turn".to_owned()
    } else {
        format!("{}% of the experts in memory", number(Some(100.0 * estimate.cache_share)))
    };
    let _ = writeln!(text, "{memory};\n{} tokens {routing}", estimate.tokens);
    let _ = writeln!(
        text,
        "  {:>6}{:>9}{:>10}{:>9}{:>8}{:>8}{:>12}{:>14}",
        "drives", "of GB/s", "tokens/s", "GB/s", "busy %", "hits %", "GB a token", "ahead, wasted"
    );
    for (rung, drive) in estimate.ladder.iter().zip(&estimate.drives) {
        let _ = writeln!(
            text,
            "  {:>6}{:>9}{:>10}{:>9}{:>8}{:>8}{:>12}{:>14}",
            rung.drives,
            number(Some(drive.gb_per_s)),
            format!("{:.3}", rung.tokens_per_s),
            number(Some(rung.gb_per_s)),
            number(Some(100.0 * rung.busy_share)),
            number(Some(100.0 * rung.hit_rate)),
            number(Some(rung.bytes_per_token / 1e9)),
            format!("{}, {}", number(Some(rung.lookahead_useful / 1e9)), number(Some(rung.lookahead_wasted / 1e9))),
        );
    }
    if estimate.drives.iter().any(|drive| drive.stall_share > 0.0) {
        let told = |rung: &SimulatedFigures| format!("{} and {}", rung.stalls, rung.given_up);
        let told: Vec<String> = estimate.ladder.iter().map(told).collect();
        let _ = writeln!(text, "reads that hung, and experts read elsewhere for it: {}", told.join(", "));
    }
    text
}

/// Three digits or more; a dash for what is not known.
fn number(value: Option<f64>) -> String {
    match value.filter(|value| value.is_finite()) {
        None => "-".into(),
        Some(0.0) => "0".into(),
        Some(value) if value < 1.0 => format!("{value:.3}"),
        Some(value) if value < 100.0 => format!("{value:.2}"),
        Some(value) => format!("{value:.0}"),
    }
}

fn seconds(seconds: f64) -> String {
    if seconds < 10.0 { format!("{seconds:.2}") } else { format!("{seconds:.1}") }
}

/// Bytes in the units that drives are sold in.
fn size(bytes: usize) -> String {
    match bytes as f64 {
        bytes if bytes >= 1e6 => format!("{:.2} MB", bytes / 1e6),
        bytes => format!("{:.2} KB", bytes / 1e3),
    }
}
