//! `deltafin pack`: experts to one file each on drive roots, the trunk to one file.

use std::fmt::Write as _;
use std::path::PathBuf;

use clap::ValueEnum;
use serde_json::json;

use super::args::{self, Shown, TrunkArg};
use super::output;
use crate::checkpoint::Manifest;
use crate::config::ModelConfig;
use crate::engine::Progress;
use crate::error::Result;
use crate::interrupt::Interrupt;
use crate::learned::Kept;
use crate::pack::{self, PackOptions, Packed, Phase, Plan, TrunkFormat};
use crate::plan::gib;
use crate::report::progress::Reporter;

/// Flags of `pack`.
#[derive(Debug, clap::Args)]
#[command(after_long_help = "\
Each expert becomes ROOT/L001/E0000.mxfp4, its parts at whole pages; ROOT/experts.list names those \
that are whole, with checksums. Every expert goes to one root at least, in proportion to what the \
drives read; the same command goes on where it was ended, however it was ended.

--move takes the experts out of each shard as soon as they are safe on the roots: the shard is \
replaced by one of the same name with all its other tensors. The model then runs with \
--experts ROOT… only.

Examples:
  deltafin pack -m K3 --to /mnt/a/k3 /mnt/b/k3 --dry-run
  deltafin pack -m K3 --to /mnt/a/k3 /mnt/b/k3 --replicas 2 --trunk bf16
  deltafin pack -m K3 --to /mnt/a/k3 --move
  deltafin run -m K3 --experts /mnt/a/k3 /mnt/b/k3 -p Hello

Exit code 3: the model or a root is damaged, or a root holds another model. 4: no room, a root in \
use, a failed read or write.")]
pub struct PackArgs {
    /// Model directory, or `demo` for the embedded small model
    #[arg(short, long, value_name = "DIR")]
    model: PathBuf,
    /// Directories to write experts to, one on each drive; made where they are not there
    #[arg(long, value_name = "ROOT", required = true, num_args = 1..)]
    to: Vec<PathBuf>,
    /// Most copies of an expert; the most used get them first, as far as there is room
    #[arg(long, value_name = "N", default_value = "1", value_parser = args::positive)]
    replicas: usize,
    /// Write the trunk to the first root too
    #[arg(long, value_name = "FORMAT")]
    trunk: Option<TrunkArg>,
    /// Do not place experts by the record of which ones this model uses most
    #[arg(long)]
    no_learn: bool,
    /// Say what would go where, and write nothing
    #[arg(long)]
    dry_run: bool,
    /// Take experts out of the shards as soon as they are safe on the roots
    #[arg(long = "move")]
    take_experts: bool,
    /// GB/s that a root's drive reads, instead of measuring it
    #[arg(long, value_name = "ROOT=GB/s", value_parser = rate)]
    rate: Vec<(PathBuf, f64)>,
    /// Form of the report
    #[arg(long, value_name = "FORM", default_value = "text")]
    output: Form,
}

/// `--output`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Form {
    /// For people
    Text,
    /// One JSON object
    Json,
}

pub(super) fn run(args: &PackArgs, shown: &Shown, interrupt: &Interrupt) -> Result<()> {
    let model = args::model_dir(&args.model)?;
    let manifest = Manifest::open(&model, &ModelConfig::load(&model)?)?;
    let options = PackOptions {
        roots: args.to.clone(),
        rates: args.rate.clone(),
        replicas: args.replicas,
        trunk: args.trunk.map(TrunkFormat::from),
        take_experts: args.take_experts,
    };
    let reporter = Reporter::new(shown);
    // Without a record of use, or a place for one, all experts count alike.
    let learned = if args.no_learn { None } else { Kept::load(&manifest).ok() };
    let uses = learned.as_ref().map(|kept| &kept.histogram);
    let report = if args.dry_run {
        let plan = pack::plan(&manifest, &options, uses)?;
        plan.notices.iter().for_each(|notice| reporter.notice(notice));
        report(&plan, None, args)
    } else {
        let mut progress = |phase: Phase, done: u64, total: u64| {
            let what = match phase {
                Phase::Trunk => "writing the trunk",
                Phase::Experts => "packing",
            };
            reporter.working(what, done, total);
        };
        let packed = pack::pack(&manifest, &options, uses, &mut progress, interrupt)?;
        packed.plan.notices.iter().for_each(|notice| reporter.notice(notice));
        report(&packed.plan, Some(&packed), args)
    };
    reporter.finish();
    // A reader that has gone away has seen what it wanted.
    output::stdout(report.as_bytes()).map(drop)
}

fn report(plan: &Plan, packed: Option<&Packed>, args: &PackArgs) -> String {
    match args.output {
        Form::Text => text(plan, packed),
        Form::Json => json(plan, packed),
    }
}

fn text(plan: &Plan, packed: Option<&Packed>) -> String {
    let mut text = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(text, "{name:<12}{value}");
    };
    line("experts", format!("{} of {} bytes", plan.experts, plan.file_bytes));
    for root in &plan.roots {
        let rate = if root.rate > 0.0 { format!(", {} GB/s", root.rate) } else { String::new() };
        line("root", format!("{} (drive {}{rate}, {} free)", root.dir.display(), root.drive, gib(root.free)));
        let written = if packed.is_some() { "written" } else { "to write" };
        let bytes = gib(root.missing * plan.file_bytes);
        line("", format!("{} experts there, {} {written} ({bytes})", root.held, root.missing));
    }
    if let Some(trunk) = &plan.trunk {
        let state = match (trunk.done, packed) {
            (true, _) => "there already",
            (false, Some(_)) => "written",
            (false, None) => "to write",
        };
        line("trunk", format!("{} ({}), {state}", trunk.path.display(), gib(trunk.bytes)));
    }
    if plan.freed_shards > 0 {
        let (bytes, verb) = match packed {
            Some(packed) => (packed.freed_bytes, "gave back"),
            None => (plan.freed_bytes, "would give back"),
        };
        line("shards", format!("{} {verb} {}", plan.freed_shards, gib(bytes)));
    }
    match packed {
        Some(packed) if packed.bytes > 0 => {
            let seconds = packed.elapsed.as_secs_f64();
            let rate = packed.bytes as f64 / 1e9 / seconds.max(1e-9);
            line("time", format!("{} in {seconds:.1} s, {rate:.2} GB/s", gib(packed.bytes)));
        }
        Some(_) => line("time", "everything was there".into()),
        None => line("dry run", "nothing was written".into()),
    }
    text
}

fn json(plan: &Plan, packed: Option<&Packed>) -> String {
    let roots = plan.roots.iter().map(|root| {
        json!({
            "root": root.dir.display().to_string(),
            "drive": root.drive,
            "gb_per_s": (root.rate > 0.0).then_some(root.rate),
            "free_bytes": root.free,
            "experts_there": root.held,
            "experts_to_write": root.missing,
            "bytes_to_write": root.missing * plan.file_bytes,
        })
    });
    let trunk = plan.trunk.as_ref().map(|trunk| {
        json!({
            "path": trunk.path.display().to_string(),
            "format": trunk.format.name(),
            "bytes": trunk.bytes,
            "there": trunk.done,
        })
    });
    let done = packed.map(|packed| {
        json!({
            "copies": packed.written,
            "bytes": packed.bytes,
            "freed_bytes": packed.freed_bytes,
            "seconds": packed.elapsed.as_secs_f64(),
        })
    });
    let object = json!({
        "experts": plan.experts,
        "expert_file_bytes": plan.file_bytes,
        "roots": roots.collect::<Vec<_>>(),
        "trunk": trunk,
        "freed_shards": plan.freed_shards,
        "freed_bytes": plan.freed_bytes,
        "notices": plan.notices,
        "written": done,
    });
    format!("{object:#}\n")
}

/// `ROOT=GB/s`; the last `=` counts, since a path may hold others.
fn rate(text: &str) -> Result<(PathBuf, f64), String> {
    const LEGAL: &str = "expected a root and its rate, such as /mnt/a=7.1";
    let (root, rate) = text.rsplit_once('=').ok_or(LEGAL)?;
    let plain = !rate.is_empty() && rate.bytes().all(|byte| byte.is_ascii_digit() || byte == b'.');
    let rate = if plain { rate.parse().ok() } else { None };
    match rate {
        Some(rate) if rate > 0.0 && rate < 1e6 && !root.is_empty() => Ok((PathBuf::from(root), rate)),
        _ => Err(LEGAL.into()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_rate_is_what_follows_the_last_equals_sign() {
        assert_eq!(rate("/mnt/a=7.1"), Ok((PathBuf::from("/mnt/a"), 7.1)));
        assert_eq!(rate("/mnt/a=b=13"), Ok((PathBuf::from("/mnt/a=b"), 13.0)));
        for text in
            ["", "/mnt/a", "/mnt/a=", "=3", "/mnt/a=0", "/mnt/a=-1", "/mnt/a=1e3", "/a=nan", "/a=inf", "/a=1.2.3"]
        {
            assert!(rate(text).is_err(), "{text}");
        }
    }
}
