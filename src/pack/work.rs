//! The work of a plan, in the order of the shards: what is read from where, and what is written to which roots.

use super::plan::{Basis, Plan};
use crate::checkpoint::{ExpertTable, MOVED, Manifest};
use crate::store::ExpertId;

/// One expert to be copied.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Job {
    pub id: ExpertId,
    /// Roots that get it.
    pub write: Vec<u16>,
    /// Roots that have it; with `--move` these copies are read again before the shards give theirs up.
    pub held: Vec<u16>,
}

/// Work that is done before the next group begins.
#[derive(Debug)]
pub(super) struct Group {
    pub jobs: Vec<Job>,
    /// `--move`: the shard that gives up its experts afterwards.
    pub shard: Option<u16>,
}

/// One group for everything, or with `--move` one a shard, holding the experts whose first part is in it: after it, all
/// experts that touch the shard are done.
pub(super) fn groups(basis: &Basis<'_>, plan: &Plan) -> Vec<Group> {
    let mut jobs: Vec<(Option<(u16, u64)>, Job)> = (basis.table.ids())
        .filter_map(|(layer, expert)| {
            let id = ExpertId { layer, expert };
            let mut job = Job { id, write: Vec::new(), held: Vec::new() };
            for (root, (plan, list)) in (0..).zip(plan.roots.iter().zip(basis.lists)) {
                if list.as_ref().is_some_and(|list| list.experts.contains_key(&id)) {
                    job.held.push(root);
                } else if plan.share.experts.binary_search(&id).is_ok() {
                    job.write.push(root);
                }
            }
            let places = basis.table.places(layer, expert).unwrap_or_default();
            let first = places.iter().filter(|place| place.0 != MOVED).min().copied();
            let idle = job.write.is_empty() && !(basis.options.take_experts && first.is_some());
            (!idle).then_some((first, job))
        })
        .collect();
    jobs.sort_by_key(|(first, job)| (*first, job.id));
    if !basis.options.take_experts {
        return vec![Group { jobs: jobs.into_iter().map(|(_, job)| job).collect(), shard: None }];
    }
    let mut groups: Vec<Group> = Vec::new();
    let mut jobs = jobs.into_iter().peekable();
    let moved: Vec<Job> =
        std::iter::from_fn(|| jobs.next_if(|(first, _)| first.is_none())).map(|(_, job)| job).collect();
    if !moved.is_empty() {
        groups.push(Group { jobs: moved, shard: None });
    }
    for shard in shards_with_experts(basis.table) {
        let of_shard = std::iter::from_fn(|| jobs.next_if(|(first, _)| first.is_some_and(|first| first.0 <= shard)));
        groups.push(Group { jobs: of_shard.map(|(_, job)| job).collect(), shard: Some(shard) });
    }
    groups
}

/// Shards that hold parts of experts, ascending.
pub(super) fn shards_with_experts(table: &ExpertTable) -> Vec<u16> {
    let mut shards: Vec<u16> = table.places.iter().map(|place| place.0).filter(|shard| *shard != MOVED).collect();
    shards.sort_unstable();
    shards.dedup();
    shards
}

/// Bytes that a shard keeps when its experts leave it; at most, since its header is counted whole.
pub(super) fn rest_bytes(manifest: &Manifest, shard: u16) -> u64 {
    let bytes = manifest.shard_bytes[usize::from(shard)];
    let Some(table) = &manifest.experts else { return bytes };
    let parts = table.part_bytes.iter().cycle();
    let taken: u64 = table.places.iter().zip(parts).filter(|(place, _)| place.0 == shard).map(|(_, len)| len).sum();
    bytes.saturating_sub(taken)
}
