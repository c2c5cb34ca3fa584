//! Whether everything fits, to the byte, before anything is written: per file system, and with `--move` at every moment.

use std::collections::BTreeMap;

use super::plan::{Basis, Plan, TrunkPlan, disk_bytes};
use super::work::{self, Group};
use crate::error::{Error, Result};
use crate::plan::{at_least, at_most};

/// Directories and what a file system needs to hold files at all.
const SLACK_BYTES: u64 = 256 << 10;

/// Bytes besides experts and trunk that a root takes: its list and the copy twice while they are replaced, and a directory a layer.
fn overhead(basis: &Basis<'_>) -> u64 {
    4 * basis.source.list_bytes_max() as u64 + 8192 * basis.table.moe_layers.len() as u64 + SLACK_BYTES
}

/// Bytes for experts on a file system, with `--move` those included that the shards will give back there.
pub(super) fn free_for_experts(basis: &Basis<'_>, file_system: u64, trunk: Option<&TrunkPlan>) -> u64 {
    let there = || basis.roots.iter().filter(|root| root.file_system == file_system);
    let free = there().map(|root| root.free).min().unwrap_or(0);
    let returned: u64 = if basis.options.take_experts {
        let shards = work::shards_with_experts(basis.table);
        let paths = shards.iter().map(|shard| disk_bytes(&basis.manifest.shards[usize::from(*shard)]));
        let all: u64 = paths.filter(|(device, _)| *device == file_system).map(|(_, bytes)| bytes).sum();
        // What does not leave with the experts stays.
        all.saturating_sub(shards.iter().map(|shard| work::rest_bytes(basis.manifest, *shard)).sum())
    } else {
        0
    };
    let on_first = basis.roots.first().is_some_and(|root| root.file_system == file_system);
    let trunk = trunk.filter(|trunk| on_first && !trunk.done).map_or(0, |trunk| trunk.bytes);
    (free.saturating_add(returned)).saturating_sub(trunk + overhead(basis) * there().count() as u64)
}

/// Goes through the work shard by shard and refuses it where a file system would overflow; notes what is given back.
///
/// # Errors
/// Kind `Io`, with the bytes needed and free.
pub(super) fn check(basis: &Basis<'_>, plan: &mut Plan) -> Result<()> {
    let groups = work::groups(basis, plan);
    let mut used: BTreeMap<u64, Use> = BTreeMap::new();
    for (root, _) in basis.roots.iter().zip(&plan.roots).filter(|(_, plan)| plan.missing > 0) {
        used.entry(root.file_system).or_default().add(overhead(basis));
    }
    if let (Some(trunk), Some(first)) = (plan.trunk.as_ref().filter(|trunk| !trunk.done), basis.roots.first()) {
        used.entry(first.file_system).or_default().add(trunk.bytes);
    }
    for Group { jobs, shard } in &groups {
        for root in jobs.iter().flat_map(|job| &job.write) {
            used.entry(basis.roots[usize::from(*root)].file_system).or_default().add(plan.file_bytes);
        }
        if let Some(shard) = shard {
            let (device, bytes) = disk_bytes(&basis.manifest.shards[usize::from(*shard)]);
            let rest = work::rest_bytes(basis.manifest, *shard);
            let entry = used.entry(device).or_default();
            entry.add(rest + SLACK_BYTES);
            entry.give_back(bytes + SLACK_BYTES);
            plan.freed_shards += 1;
            plan.freed_bytes += bytes.saturating_sub(rest);
        }
    }
    for (file_system, used) in used {
        let root = basis.roots.iter().find(|root| root.file_system == file_system);
        let (dir, free) = match root {
            Some(root) => (&root.dir, root.free),
            None => (&basis.manifest.dir, crate::synth::space::available(&basis.manifest.dir).unwrap_or(u64::MAX)),
        };
        let needed = u64::try_from(used.most).unwrap_or(0);
        if needed > free {
            return Err(Error::io(format!(
                "no room: {} needs {}, but {} are free there",
                dir.display(),
                at_least(needed),
                at_most(free)
            ))
            .hint("free some space, or add a root on another drive (--to)"));
        }
    }
    Ok(())
}

/// Bytes in use on a file system beyond what there was, and the most so far.
#[derive(Default)]
struct Use {
    now: i128,
    most: i128,
}

impl Use {
    fn add(&mut self, bytes: u64) {
        self.now += i128::from(bytes);
        self.most = self.most.max(self.now);
    }

    fn give_back(&mut self, bytes: u64) {
        self.now -= i128::from(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_most_in_use_counts_and_not_what_is_left_in_the_end() {
        let mut used = Use::default();
        used.add(10);
        used.give_back(8);
        used.add(5);
        used.give_back(7);
        assert_eq!((used.now, used.most), (0, 10));
    }
}
