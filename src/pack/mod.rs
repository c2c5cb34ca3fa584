//! From released shards to expert files on drive roots, and the trunk to one file: planned, copied, verified, listed.
//!
//! A file appears under its name when it is whole, synced and read again; it counts when its root's list names it. So a
//! process that is killed, a full disk or an interrupt leave roots that are good for what they list, and the same command
//! goes on from there.

mod copy;
mod files;
pub mod placement;
mod plan;
mod rate;
mod room;
mod roots;
mod source;
mod sweep;
mod take;
mod trunk;
pub mod verify;
mod work;

use std::path::PathBuf;
use std::time::{Duration, Instant};

use self::copy::{Copier, Ledger};
use self::plan::Basis;
pub use self::plan::{Plan, RootPlan, TrunkPlan};
use self::roots::{Lock, Root};
use self::source::Shards;
use self::work::Group;
use crate::checkpoint::{ExpertTable, Manifest, shard_digest};
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::store::histogram::Histogram;
use crate::store::packed::{List, Source};
pub use crate::trunk::TrunkFormat;

/// What is wanted.
#[derive(Debug, Clone)]
pub struct PackOptions {
    /// Where to; at least one.
    pub roots: Vec<PathBuf>,
    /// GB/s of roots that need not be measured.
    pub rates: Vec<(PathBuf, f64)>,
    /// Most copies of an expert.
    pub replicas: usize,
    /// The trunk file to write to the first root.
    pub trunk: Option<TrunkFormat>,
    /// Take the experts out of the shards when they are safe.
    pub take_experts: bool,
}

/// What was done.
#[derive(Debug)]
pub struct Packed {
    /// What was planned.
    pub plan: Plan,
    /// Copies written.
    pub written: u64,
    /// Bytes written, the trunk included.
    pub bytes: u64,
    /// Bytes that the shards gave back.
    pub freed_bytes: u64,
    /// Time it took.
    pub elapsed: Duration,
}

/// What is being worked at, for whoever shows progress.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Phase {
    /// The trunk file.
    Trunk,
    /// Experts.
    Experts,
}

/// Plans and writes nothing. Drives of unknown rate are taken to be alike.
///
/// # Errors
/// As [`pack`].
pub fn plan(manifest: &Manifest, options: &PackOptions, uses: Option<&Histogram>) -> Result<Plan> {
    let (table, source, roots) = start(manifest, options)?;
    let mut lists = read_lists(&roots, &source)?;
    plan::drop_missing_files(&roots, &mut lists, &source);
    let given = given_rates(&roots, options)?;
    let known: Vec<f64> = given.iter().flatten().copied().collect();
    let mean = known.iter().sum::<f64>() / known.len().max(1) as f64;
    let rates: Vec<f64> = given.iter().map(|rate| rate.unwrap_or(mean)).collect();
    let shares = uses.and_then(|uses| shares(uses, table));
    let basis = Basis {
        manifest,
        table,
        source: &source,
        options,
        roots: &roots,
        lists: &lists,
        rates: &rates,
        shares: shares.as_deref(),
    };
    let mut plan = plan::make(&basis)?;
    if known.len() < roots.len() && drives(&roots) > 1 && lists.iter().any(Option::is_none) {
        plan.notices.push("drives are not measured in a dry run: those without --rate count as alike".into());
    }
    Ok(plan)
}

/// Packs; `progress` is told the phase, its bytes done and its bytes in all.
///
/// # Errors
/// Kind `Usage` for roots that cannot be; `Model` for a model without experts, a damaged shard or list, a root of another
/// model; `Io` for no room, a root in use, a failed read or write; `Interrupted`. What is finished is kept.
pub fn pack(
    manifest: &Manifest,
    options: &PackOptions,
    uses: Option<&Histogram>,
    progress: &mut dyn FnMut(Phase, u64, u64),
    interrupt: &Interrupt,
) -> Result<Packed> {
    let begun = Instant::now();
    let (table, source, roots) = start(manifest, options)?;
    // Refused before a lock or a directory is made.
    read_lists(&roots, &source)?;
    let mut locks = Vec::new();
    let prepared = prepare(manifest, table, &source, &roots, options, uses, &mut locks, interrupt);
    let Prepared { lists, plan, groups, digests } = prepared.inspect_err(|_| roots.iter().for_each(Root::unmake))?;

    let mut ledger = begin(&roots, lists, &plan, &source)?;
    let mut packed = Packed { plan, written: 0, bytes: 0, freed_bytes: 0, elapsed: Duration::ZERO };
    if let Some(trunk) = packed.plan.trunk.as_ref().filter(|trunk| !trunk.done) {
        let progress = &mut |done, all| progress(Phase::Trunk, done, all);
        packed.bytes += trunk::write(manifest, trunk.format, &trunk.path, progress, interrupt)?;
    }
    let file_bytes = source.layout.file_bytes;
    let copies = |job: &work::Job| job.write.len() + if options.take_experts { job.held.len() } else { 0 };
    let all: usize = groups.iter().flat_map(|group| &group.jobs).map(copies).sum();
    let (all, mut done) = (all as u64 * file_bytes, 0);
    for Group { jobs, shard } in &groups {
        let shards = Shards::open(manifest, table, jobs.iter().map(|job| job.id))?;
        let check_held = options.take_experts;
        let copier = Copier { shards: &shards, table, source: &source, roots: &roots, check_held, interrupt };
        copier.run(jobs, &mut ledger, &mut |bytes| {
            done += bytes;
            progress(Phase::Experts, done, all);
        })?;
        // A file that is open keeps its space.
        drop(shards);
        if let Some(shard) = shard {
            let digest = digests.iter().find(|(number, _)| number == shard).map_or(0, |(_, digest)| *digest);
            packed.freed_bytes += take::take_experts(manifest, table, *shard, digest, interrupt)?;
        }
    }
    packed.written = groups.iter().flat_map(|group| &group.jobs).map(|job| job.write.len() as u64).sum();
    packed.bytes += packed.written * file_bytes;
    packed.elapsed = begun.elapsed();
    drop(locks);
    Ok(packed)
}

/// What [`pack`] needs before it writes.
struct Prepared {
    lists: Vec<Option<List>>,
    plan: Plan,
    groups: Vec<Group>,
    /// `--move`: of each shard with experts.
    digests: Vec<(u16, u128)>,
}

#[allow(clippy::too_many_arguments, reason = "one step of `pack`, which has them all")]
fn prepare(
    manifest: &Manifest,
    table: &ExpertTable,
    source: &Source,
    roots: &[Root],
    options: &PackOptions,
    uses: Option<&Histogram>,
    locks: &mut Vec<Lock>,
    interrupt: &Interrupt,
) -> Result<Prepared> {
    for root in roots {
        locks.push(root.claim()?);
    }
    if !roots.iter().any(|root| root.is_at(&manifest.dir)) {
        locks.push(roots::lock(&manifest.dir, options.take_experts)?);
    }
    let mut lists = read_lists(roots, source)?;
    plan::drop_missing_files(roots, &mut lists, source);
    let rates = rates(roots, &lists, options, manifest, interrupt)?;
    let shares = uses.and_then(|uses| shares(uses, table));
    let shares = shares.as_deref();
    let basis = Basis { manifest, table, source, options, roots, lists: &lists, rates: &rates, shares };
    let plan = plan::make(&basis)?;
    let groups = work::groups(&basis, &plan);
    let mut digests = Vec::new();
    if options.take_experts {
        let shards = work::shards_with_experts(table);
        take::check_allowed(manifest, &shards)?;
        for shard in shards {
            digests.push((shard, shard_digest(&manifest.shards[usize::from(shard)])?));
        }
    }
    Ok(Prepared { lists, plan, groups, digests })
}

fn start<'m>(manifest: &'m Manifest, options: &PackOptions) -> Result<(&'m ExpertTable, Source, Vec<Root>)> {
    if options.roots.is_empty() || options.replicas == 0 {
        return Err(Error::usage("pack: expected a root (--to) and at least one copy (--replicas)"));
    }
    let source = Source::of(manifest)?;
    let table = manifest.experts.as_ref().ok_or_else(|| Error::model("no routed experts"))?;
    Ok((table, source, roots::find(&options.roots)?))
}

fn read_lists(roots: &[Root], source: &Source) -> Result<Vec<Option<List>>> {
    roots.iter().map(|root| List::read(&root.dir, source)).collect()
}

/// Writes down what each root is to get, and removes what an earlier plan or a killed process left there.
fn begin(roots: &[Root], lists: Vec<Option<List>>, plan: &Plan, source: &Source) -> Result<Ledger> {
    let mut ledger = Vec::with_capacity(roots.len());
    for ((root, list), RootPlan { share, rate, .. }) in roots.iter().zip(lists).zip(&plan.roots) {
        let ours = list.is_some();
        let mut list = match list {
            Some(list) if list.share == *share => list,
            Some(list) => List { share: share.clone(), ..list },
            None => List::new(share.clone()),
        };
        if *rate > 0.0 {
            list.gb_per_s = Some(*rate);
        }
        if !list.is_written(&root.dir, source) {
            list.write(&root.dir, source)?;
        }
        sweep::sweep(&root.dir, &list, source.layout.part_offsets.len(), ours)?;
        ledger.push(list);
    }
    Ok(Ledger::new(ledger))
}

fn drives(roots: &[Root]) -> usize {
    let mut names: Vec<&str> = roots.iter().map(|root| root.drive.as_str()).collect();
    names.sort_unstable();
    names.dedup();
    names.len()
}

/// The rates that the user gave, one a root.
fn given_rates(roots: &[Root], options: &PackOptions) -> Result<Vec<Option<f64>>> {
    let mut rates = vec![None; roots.len()];
    for (dir, rate) in &options.rates {
        let at = roots.iter().position(|root| root.is_at(dir)).ok_or_else(|| {
            Error::usage(format!("--rate {}={rate}: no --to names this root", dir.display()))
                .hint("--rate takes the root as --to has it")
        })?;
        if rates[at].replace(*rate).is_some() {
            return Err(Error::usage(format!("--rate {}={rate}: this root has a --rate already", dir.display()))
                .hint("give each root one rate at most"));
        }
    }
    Ok(rates)
}

/// GB/s of each root's drive: given, or measured where it makes a difference.
fn rates(
    roots: &[Root],
    lists: &[Option<List>],
    options: &PackOptions,
    manifest: &Manifest,
    interrupt: &Interrupt,
) -> Result<Vec<f64>> {
    let given = given_rates(roots, options)?;
    let mut of_drive: Vec<(&str, f64)> = Vec::new();
    let mut rates = Vec::with_capacity(roots.len());
    let matters = drives(roots) > 1 && lists.iter().any(Option::is_none);
    for (root, given) in roots.iter().zip(given) {
        let known = of_drive.iter().find(|(drive, _)| *drive == root.drive).map(|(_, rate)| *rate);
        let rate = match given.or(known) {
            Some(rate) => rate,
            None if matters => {
                rate::measure(&root.dir, manifest.all_experts_bytes(), root.free, interrupt)?.unwrap_or(0.0)
            }
            None => 0.0,
        };
        of_drive.push((&root.drive, rate));
        rates.push(rate);
    }
    Ok(rates)
}

/// Past use by place in the expert table; `None` where nothing is known of a model of this shape.
fn shares(uses: &Histogram, table: &ExpertTable) -> Option<Vec<f32>> {
    let fits = uses.shape() == (table.moe_layers.len(), table.num_experts) && !uses.is_empty();
    fits.then(|| uses.shares())
}
