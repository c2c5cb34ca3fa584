//! What goes where: what the roots have, what they lack, and whether there is room for it. Writes nothing.

use std::collections::BTreeMap;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::placement::{self, Pool, Problem, Site};
use super::roots::Root;
use super::{PackOptions, room, trunk};
use crate::checkpoint::{ExpertTable, Manifest};
use crate::error::{Error, Result};
use crate::plan::{at_least, at_most, gib};
use crate::store::ExpertId;
use crate::store::packed::{COPY_FILE, LIST_FILE, List, Share, Source, expert_path};
use crate::trunk::TrunkFormat;

/// Where everything goes, and what of it is there already.
#[derive(Debug)]
pub struct Plan {
    /// One entry a root, in the order given.
    pub roots: Vec<RootPlan>,
    /// Experts of the model.
    pub experts: u64,
    /// Bytes of one expert file.
    pub file_bytes: u64,
    /// The trunk file, if one is wanted.
    pub trunk: Option<TrunkPlan>,
    /// `--move`: shards that give up their experts.
    pub freed_shards: usize,
    /// `--move`: bytes that the shards give back.
    pub freed_bytes: u64,
    /// What the user should know.
    pub notices: Vec<String>,
}

/// What one root gets.
#[derive(Debug)]
pub struct RootPlan {
    /// The directory, as given.
    pub dir: PathBuf,
    /// The physical drive it is on, as the system names it.
    pub drive: String,
    /// GB/s that placement counted on for the drive; 0 where it made no difference.
    pub rate: f64,
    /// Bytes free there.
    pub free: u64,
    /// Experts that are there.
    pub held: u64,
    /// Experts to be written.
    pub missing: u64,
    pub(super) share: Share,
}

/// The trunk file to be written.
#[derive(Debug)]
pub struct TrunkPlan {
    /// Where.
    pub path: PathBuf,
    /// In which form.
    pub format: TrunkFormat,
    /// Bytes it will have, or has.
    pub bytes: u64,
    /// Whether it is there.
    pub done: bool,
}

/// What planning starts from.
pub(super) struct Basis<'a> {
    pub manifest: &'a Manifest,
    pub table: &'a ExpertTable,
    pub source: &'a Source,
    pub options: &'a PackOptions,
    pub roots: &'a [Root],
    /// One a root; `None` where there is none yet.
    pub lists: &'a [Option<List>],
    /// GB/s of each root's drive.
    pub rates: &'a [f64],
    /// `[layers, num_experts]`, where past use is known.
    pub shares: Option<&'a [f32]>,
}

/// Takes experts off the lists whose files are not there in full length.
pub(super) fn drop_missing_files(roots: &[Root], lists: &mut [Option<List>], source: &Source) {
    for (root, list) in roots.iter().zip(lists) {
        let Some(list) = list else { continue };
        list.experts.retain(|id, _| {
            let path = expert_path(&root.dir, *id, source.layout.part_offsets.len());
            std::fs::metadata(path).is_ok_and(|m| m.is_file() && m.len() == source.layout.file_bytes)
        });
    }
}

/// Goes on with the plan that the roots were begun with, or makes one.
///
/// # Errors
/// Kind `Io` when there is no room, with the numbers; `Usage` for settings that contradict each other.
pub(super) fn make(basis: &Basis<'_>) -> Result<Plan> {
    let Basis { manifest, table, source, options, roots, lists, rates, .. } = *basis;
    let trunk = match options.trunk {
        Some(format) => Some(trunk::plan(manifest, format, &roots[0].dir)?),
        None => None,
    };
    let mut notices = Vec::new();
    let shares = match begun(lists, options.replicas) {
        Some(shares) => {
            if !options.rates.is_empty() {
                notices
                    .push("going on with the placement these roots were begun with, whatever --rate says now".into());
            }
            shares
        }
        None => place(basis, trunk.as_ref(), &mut notices)?,
    };
    let experts = table.ids().count() as u64;
    check_sources(table, lists, &shares)?;
    let plans = roots.iter().zip(lists).zip(rates).zip(shares).map(|(((root, list), rate), share)| {
        let held = |id: &&ExpertId| list.as_ref().is_some_and(|list| list.experts.contains_key(id));
        RootPlan {
            dir: root.dir.clone(),
            drive: root.drive.clone(),
            rate: *rate,
            free: root.free,
            held: list.as_ref().map_or(0, |list| list.experts.len() as u64),
            missing: share.experts.iter().filter(|id| !held(id)).count() as u64,
            share,
        }
    });
    let mut plan = Plan {
        roots: plans.collect(),
        experts,
        file_bytes: source.layout.file_bytes,
        trunk,
        freed_shards: 0,
        freed_bytes: 0,
        notices,
    };
    room::check(basis, &mut plan)?;
    Ok(plan)
}

/// Refuses to plan a copy of an expert that nobody has.
fn check_sources(table: &ExpertTable, lists: &[Option<List>], shares: &[Share]) -> Result<()> {
    let has = |id: &ExpertId| lists.iter().flatten().any(|list| list.experts.contains_key(id));
    let nobody_has = |id: &&ExpertId| !table.is_in_shards(id.layer, id.expert) && !has(id);
    match shares.iter().flat_map(|share| &share.experts).find(nobody_has) {
        Some(id) => Err(Error::model(format!("expert {id} has left the shards, and no root given has it"))
            .hint(format!(
                "give the roots that hold the model's experts too, with --to; where a root's {LIST_FILE} was lost, put its {COPY_FILE} in its place"
            ))),
        None => Ok(()),
    }
}

/// The shares of the plan that all these roots belong to, if it is one whole plan for so many replicas.
fn begun(lists: &[Option<List>], replicas: usize) -> Option<Vec<Share>> {
    let shares: Option<Vec<Share>> = lists.iter().map(|list| list.as_ref().map(|list| list.share.clone())).collect();
    let shares = shares?;
    let mut numbers: Vec<u16> = shares.iter().map(|share| share.number).collect();
    numbers.sort_unstable();
    let first = shares.first()?;
    let whole = numbers.iter().enumerate().all(|(at, number)| at == usize::from(*number))
        && shares.iter().all(|share| {
            share.plan == first.plan
                && usize::from(share.roots) == lists.len()
                && usize::from(share.replicas) == replicas
        });
    whole.then_some(shares)
}

/// Places what no root has yet.
fn place(basis: &Basis<'_>, trunk: Option<&TrunkPlan>, notices: &mut Vec<String>) -> Result<Vec<Share>> {
    let Basis { table, source, options, roots, lists, rates, shares, .. } = *basis;
    let (drives, sites, pools) = sites(basis, trunk);
    if options.replicas > roots.len() {
        let count = roots.len();
        notices
            .push(format!("--replicas {}: {count} roots take {count} copies of an expert at most", options.replicas));
    } else if options.replicas > drives.len() {
        let count = drives.len();
        notices.push(format!(
            "--replicas {}: the roots are on {count} physical drive{}; a second copy on a drive adds no speed",
            options.replicas,
            if count == 1 { "" } else { "s" }
        ));
    }
    let ids: Vec<ExpertId> = table.ids().map(|(layer, expert)| ExpertId { layer, expert }).collect();
    let held: Vec<Vec<u16>> = (ids.iter())
        .map(|id| {
            let has = |list: &Option<List>| list.as_ref().is_some_and(|list| list.experts.contains_key(id));
            (0..).zip(lists).filter(|(_, list)| has(list)).map(|(root, _)| root).collect()
        })
        .collect();
    let drive_rates: Vec<f64> = (drives.iter())
        .map(|drive| {
            let of_drive = roots.iter().zip(rates).filter(|(root, _)| root.drive == **drive);
            of_drive.map(|(_, rate)| *rate).fold(0.0, f64::max)
        })
        .map(|rate| if rate > 0.0 { rate } else { 1.0 })
        .collect();
    let problem = Problem {
        num_experts: table.num_experts,
        shares,
        held: &held,
        replicas: options.replicas.max(1),
        rates: &drive_rates,
        pools: &pools,
        sites: &sites,
    };
    let new = placement::place(&problem).map_err(|shortage| no_room(basis, shortage, trunk))?;
    let mut meant = vec![Vec::new(); roots.len()];
    for ((id, held), new) in ids.iter().zip(&held).zip(&new) {
        held.iter().chain(new).for_each(|root| meant[usize::from(*root)].push(*id));
    }
    let mut hash = Xxh3::new();
    hash.update(&source.fingerprint.to_bytes());
    for experts in &meant {
        experts.iter().for_each(|id| hash.update(&[id.layer.to_le_bytes(), id.expert.to_le_bytes()].concat()));
        hash.update(&u32::MAX.to_le_bytes());
    }
    let (plan, count) = (hash.digest(), roots.len() as u16);
    let replicas = options.replicas.min(usize::from(u16::MAX)) as u16;
    Ok((0..).zip(meant).map(|(number, experts)| Share { plan, number, roots: count, replicas, experts }).collect())
}

/// The physical drives, and each root's drive and file system with its room.
fn sites<'a>(basis: &Basis<'a>, trunk: Option<&TrunkPlan>) -> (Vec<&'a str>, Vec<Site>, Vec<Pool>) {
    let (mut drives, mut file_systems, mut sites) = (Vec::new(), Vec::new(), Vec::new());
    for root in basis.roots {
        let drive = position_or_push(&mut drives, root.drive.as_str());
        let pool = position_or_push(&mut file_systems, root.file_system);
        sites.push(Site { drive, pool });
    }
    let pools = file_systems.iter().map(|file_system| {
        let free = room::free_for_experts(basis, *file_system, trunk);
        Pool { room: free / basis.source.layout.file_bytes.max(1) }
    });
    let pools = pools.collect();
    (drives, sites, pools)
}

fn position_or_push<T: PartialEq>(list: &mut Vec<T>, value: T) -> usize {
    list.iter().position(|known| *known == value).unwrap_or_else(|| {
        list.push(value);
        list.len() - 1
    })
}

fn no_room(basis: &Basis<'_>, shortage: placement::Shortage, trunk: Option<&TrunkPlan>) -> Error {
    let file_bytes = basis.source.layout.file_bytes;
    let mut free = BTreeMap::new();
    for root in basis.roots {
        let bytes = room::free_for_experts(basis, root.file_system, trunk);
        free.entry(root.file_system).or_insert_with(|| format!("{} {}", root.dir.display(), at_most(bytes)));
    }
    let free: Vec<String> = free.into_values().collect();
    Error::io(format!(
        "no room: {} experts of {} need {}, but there is room for {} of them (free: {})",
        shortage.needed,
        gib(file_bytes),
        at_least(shortage.needed.saturating_mul(file_bytes)),
        shortage.fit,
        free.join(", ")
    ))
    .hint("add a root on another drive (--to), or free space; --move gives back the shards' space as it goes")
}

/// Device and number of disk bytes of the file at `path`.
pub(super) fn disk_bytes(path: &Path) -> (u64, u64) {
    // The system counts blocks of 512 bytes, whatever the file system's are.
    std::fs::metadata(path).map_or((0, 0), |meta| (meta.dev(), meta.blocks().saturating_mul(512)))
}
