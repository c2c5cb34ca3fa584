//! What a run may use: `--memory`, or the least of what the machine and the cgroup have left.

use super::cgroup::{self, Cgroup};
use super::show::{at_least, at_most};
use super::system;
use crate::error::{Error, Result};

/// Kept free for everything else on the machine, at least.
const RESERVE_MIN: u64 = 512 << 20;
/// Part of the machine's memory, or of a cgroup's limit, that is kept free.
const RESERVE_SHARE: u64 = 20;

/// A limit and where it is from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Limit {
    pub bytes: u64,
    pub source: String,
    /// The most that `--memory` could say; `None` where the system does not tell.
    pub most: Option<u64>,
    /// What is free now, where the user asked for a figure that may be more.
    pub free: Option<u64>,
}

/// What the system says; `None` where it says nothing.
#[derive(Debug, Clone, Default)]
pub(super) struct Memory {
    /// Bytes of the machine.
    pub physical: Option<u64>,
    /// Bytes that can be had without swapping.
    pub available: Option<u64>,
    /// The tightest cgroups.
    pub cgroup: Option<Cgroup>,
}

impl Memory {
    pub fn now() -> Self {
        // A system that says 0 says nothing: this process runs in some memory.
        let said = |bytes: Option<u64>| bytes.filter(|bytes| *bytes > 0);
        Self {
            physical: said(system::physical()),
            available: said(system::available()),
            cgroup: cgroup::of_this_process(),
        }
    }

    /// What the machine and the cgroup have at all.
    fn most(&self) -> Option<u64> {
        self.physical.into_iter().chain(self.cgroup.as_ref().map(|cgroup| cgroup.limit)).min()
    }

    /// What they have left now.
    fn left(&self) -> Option<u64> {
        self.available.into_iter().chain(self.cgroup.as_ref().map(|cgroup| cgroup.left)).min()
    }
}

/// The limit of a run; `asked` is `--memory`.
pub(super) fn limit(asked: Option<u64>, memory: &Memory) -> Result<Limit> {
    match asked {
        Some(asked) => as_asked(asked, memory),
        None => what_is_free(memory),
    }
}

fn as_asked(asked: u64, memory: &Memory) -> Result<Limit> {
    let refuse = |owner: String, has: u64| {
        Err(Error::memory(format!("--memory {}: {owner} {}", at_least(asked), at_most(has)))
            .hint("leave --memory out to use what is free"))
    };
    if let Some(physical) = memory.physical.filter(|physical| asked > *physical) {
        return refuse("this machine has".into(), physical);
    }
    if let Some(cgroup) = memory.cgroup.as_ref().filter(|cgroup| asked > cgroup.limit) {
        return refuse(format!("the cgroup limit ({}) is", cgroup.limit_file.display()), cgroup.limit);
    }
    Ok(Limit { bytes: asked, source: "--memory".into(), most: memory.most(), free: memory.left() })
}

fn what_is_free(memory: &Memory) -> Result<Limit> {
    let limit = |bytes: u64, source: &str| Limit { bytes, source: source.into(), most: memory.most(), free: None };
    let machine = memory.available.map(|available| {
        let reserve = RESERVE_MIN.max(memory.physical.unwrap_or(available) / RESERVE_SHARE).min(available / 2);
        limit(available - reserve, "available memory less a reserve")
    });
    let cgroup = memory.cgroup.as_ref().map(|cgroup| {
        let reserve = (cgroup.limit / RESERVE_SHARE).min(cgroup.left / 2);
        limit(cgroup.left - reserve, "cgroup")
    });
    machine.into_iter().chain(cgroup).min_by_key(|limit| limit.bytes).ok_or_else(|| {
        Error::memory("cannot tell how much memory is free").hint("say how much the run may use with --memory")
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    const GIB: u64 = 1 << 30;

    fn memory(cgroup: Option<(u64, u64)>) -> Memory {
        let cgroup = cgroup.map(|(limit, left)| Cgroup { limit, left, limit_file: "memory.max".into() });
        Memory { physical: Some(100 * GIB), available: Some(80 * GIB), cgroup }
    }

    #[test]
    fn what_is_free_less_a_reserve_is_the_default() {
        let limit = limit(None, &memory(None)).expect("known");
        assert_eq!((limit.bytes, limit.source.as_str()), (75 * GIB, "available memory less a reserve"));
    }

    #[test]
    fn a_tighter_cgroup_is_the_default() {
        let limit = limit(None, &memory(Some((40 * GIB, 30 * GIB)))).expect("known");
        assert_eq!((limit.bytes, limit.source.as_str()), (28 * GIB, "cgroup"));
    }

    #[test]
    fn a_wide_cgroup_changes_nothing() {
        assert_eq!(limit(None, &memory(Some((400 * GIB, 390 * GIB)))).expect("known").bytes, 75 * GIB);
    }

    #[test]
    fn the_reserve_leaves_something_of_little() {
        let little = Memory { physical: Some(GIB), available: Some(100 << 20), cgroup: None };
        assert_eq!(limit(None, &little).expect("known").bytes, 50 << 20);
    }

    #[test]
    fn memory_is_taken_as_asked_up_to_what_there_is() {
        let more = limit(Some(99 * GIB), &memory(None)).expect("there");
        assert_eq!((more.bytes, more.free, more.most), (99 * GIB, Some(80 * GIB), Some(100 * GIB)));
        let error = limit(Some(101 * GIB), &memory(None)).expect_err("not there");
        assert_eq!(error.kind(), Kind::Memory);
        assert!(error.message().contains("this machine has 100.00 GiB"), "{error}");
    }

    #[test]
    fn memory_beyond_the_cgroup_is_refused() {
        let error = limit(Some(41 * GIB), &memory(Some((40 * GIB, 39 * GIB)))).expect_err("would be killed");
        assert!(error.message().contains("the cgroup limit (memory.max) is 40.00 GiB"), "{error}");
    }

    #[test]
    fn what_the_cgroup_has_left_counts_as_free() {
        let limit = limit(Some(35 * GIB), &memory(Some((40 * GIB, 30 * GIB)))).expect("there");
        assert_eq!((limit.free, limit.most), (Some(30 * GIB), Some(40 * GIB)));
    }

    #[test]
    fn nothing_known_is_no_limit_of_zero() {
        assert!(limit(None, &Memory::default()).expect_err("unknown").hint_text().is_some());
        assert_eq!(limit(Some(GIB), &Memory::default()).expect("as asked").bytes, GIB);
    }
}
