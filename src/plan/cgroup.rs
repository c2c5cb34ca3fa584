//! Memory limits of the control groups (v1 and v2) that this process is in, from its own up to the root.

use std::fs;
use std::path::{Path, PathBuf};

/// The tightest limits on the way up.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Cgroup {
    /// The least limit, bytes.
    pub limit: u64,
    /// The file that holds it.
    pub limit_file: PathBuf,
    /// The least that a group has left below its limit, page cache that can be given up not counted as used.
    pub left: u64,
}

/// `None` where no group has a limit.
pub(super) fn of_this_process() -> Option<Cgroup> {
    let read = |path: &str| fs::read_to_string(path).ok();
    of(&read("/proc/self/cgroup")?, &read("/proc/self/mountinfo")?)
}

/// For a process of that `/proc/self/cgroup` and `/proc/self/mountinfo`.
fn of(membership: &str, mounts: &str) -> Option<Cgroup> {
    [Version::V2, Version::V1]
        .into_iter()
        .filter_map(|version| {
            let path = version.path(membership)?;
            let mount = version.mount(mounts)?;
            tightest(version, &mount, &mount.group(path))
        })
        .min_by_key(|cgroup| cgroup.left)
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Version {
    V1,
    V2,
}

/// Where a hierarchy is mounted, and which of its groups is seen there.
#[derive(Debug, PartialEq, Eq)]
struct Mount {
    root: String,
    point: PathBuf,
}

impl Mount {
    /// The directory of the group `path`; the mount point where the group is not below what is mounted.
    fn group(&self, path: &str) -> PathBuf {
        let below = Path::new(path).strip_prefix(&self.root).ok();
        let directory = below.map(|below| self.point.join(below)).filter(|directory| directory.is_dir());
        directory.unwrap_or_else(|| self.point.clone())
    }
}

impl Version {
    /// The group's path in `/proc/self/cgroup`: `4:memory:/path` (v1), `0::/path` (v2).
    fn path(self, membership: &str) -> Option<&str> {
        membership.lines().find_map(|line| {
            let mut fields = line.splitn(3, ':');
            let (hierarchy, controllers, path) = (fields.next()?, fields.next()?, fields.next()?);
            let found = match self {
                Version::V1 => controllers.split(',').any(|controller| controller == "memory"),
                Version::V2 => hierarchy == "0" && controllers.is_empty(),
            };
            found.then_some(path)
        })
    }

    /// The hierarchy's line in `/proc/self/mountinfo`.
    fn mount(self, mounts: &str) -> Option<Mount> {
        mounts.lines().find_map(|line| {
            let (place, filesystem) = line.split_once(" - ")?;
            let mut place = place.split(' ').skip(3);
            let (root, point) = (place.next()?, place.next()?);
            let mut filesystem = filesystem.split(' ');
            let (kind, options) = (filesystem.next()?, filesystem.nth(1)?);
            let found = match self {
                Version::V1 => kind == "cgroup" && options.split(',').any(|option| option == "memory"),
                Version::V2 => kind == "cgroup2",
            };
            found.then(|| Mount { root: root.into(), point: point.into() })
        })
    }

    fn limit_files(self) -> &'static [&'static str] {
        match self {
            Version::V1 => &["memory.limit_in_bytes"],
            Version::V2 => &["memory.max", "memory.high"],
        }
    }

    fn used(self, group: &Path) -> u64 {
        let (usage_file, prefix) = match self {
            Version::V1 => ("memory.usage_in_bytes", "total_"),
            Version::V2 => ("memory.current", ""),
        };
        let usage = fs::read_to_string(group.join(usage_file)).ok().and_then(|text| bytes(&text)).unwrap_or(0);
        let stat = fs::read_to_string(group.join("memory.stat")).unwrap_or_default();
        usage.saturating_sub(reclaimable(&stat, prefix))
    }
}

fn tightest(version: Version, mount: &Mount, group: &Path) -> Option<Cgroup> {
    let mut found: Option<Cgroup> = None;
    for group in group.ancestors().take_while(|group| group.starts_with(&mount.point)) {
        for name in version.limit_files() {
            let limit_file = group.join(name);
            let Some(limit) = fs::read_to_string(&limit_file).ok().and_then(|text| bytes(&text)) else { continue };
            let left = limit.saturating_sub(version.used(group));
            let tightest = found.get_or_insert_with(|| Cgroup { limit, limit_file: limit_file.clone(), left });
            tightest.left = tightest.left.min(left);
            if limit < tightest.limit {
                (tightest.limit, tightest.limit_file) = (limit, limit_file);
            }
        }
    }
    found
}

/// A figure in bytes; `None` for `max` and for v1's way of saying it, the largest page-aligned number.
fn bytes(text: &str) -> Option<u64> {
    const UNLIMITED_V1: u64 = i64::MAX as u64 / 65536 * 65536;
    text.trim().parse().ok().filter(|bytes| *bytes < UNLIMITED_V1)
}

/// File pages and slabs that the kernel gives up before it kills, from a `memory.stat`.
fn reclaimable(stat: &str, prefix: &str) -> u64 {
    stat.lines()
        .filter_map(|line| line.split_once(' '))
        .filter(|(name, _)| {
            let name = name.strip_prefix(prefix).unwrap_or("");
            matches!(name, "inactive_file" | "active_file" | "slab_reclaimable")
        })
        .filter_map(|(_, value)| value.trim().parse::<u64>().ok())
        .fold(0, u64::saturating_add)
}

#[cfg(test)]
mod tests {
    use super::*;

    const MEMBERSHIP: &str = "9:name=systemd:/\n4:cpu,memory:/batch/job\n1:cpu:/x\n0::/user.slice/a:b.scope\n";
    const MOUNTS: &str = "\
22 27 0:21 / /proc rw,relatime - proc proc rw
30 27 0:30 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu
31 27 0:31 /work /sys/fs/cgroup/memory rw,nosuid shared:9 - cgroup cgroup rw,memory
32 27 0:32 / /sys/fs/cgroup/unified rw,nosuid shared:10 - cgroup2 cgroup2 rw,nsdelegate
";

    #[test]
    fn groups_are_found_in_both_versions() {
        assert_eq!(Version::V1.path(MEMBERSHIP), Some("/batch/job"));
        assert_eq!(Version::V2.path(MEMBERSHIP), Some("/user.slice/a:b.scope"));
        assert_eq!(Version::V1.path("0::/\n"), None);
    }

    #[test]
    fn mounts_are_found_in_both_versions() {
        let memory = Mount { root: "/work".into(), point: "/sys/fs/cgroup/memory".into() };
        assert_eq!(Version::V1.mount(MOUNTS), Some(memory));
        assert_eq!(Version::V2.mount(MOUNTS).map(|mount| mount.point), Some("/sys/fs/cgroup/unified".into()));
        assert_eq!(Version::V2.mount("nonsense\n1 2 3 - \n"), None);
    }

    #[test]
    fn no_limit_is_none() {
        for text in ["max\n", "9223372036854771712\n", "", "-1", "junk"] {
            assert_eq!(bytes(text), None, "{text}");
        }
        assert_eq!(bytes("1073741824\n"), Some(1 << 30));
    }

    #[test]
    fn page_cache_does_not_count_as_used() {
        let v2 = "anon 500\nfile 300\ninactive_file 100\nactive_file 20\nslab_reclaimable 3\nslab 9\n";
        assert_eq!(reclaimable(v2, ""), 123);
        let v1 = "inactive_file 1\ntotal_inactive_file 100\ntotal_active_file 20\ntotal_rss 7\n";
        assert_eq!(reclaimable(v1, "total_"), 120);
    }

    #[test]
    fn the_tightest_group_on_the_way_up_counts() {
        let root = tempfile::tempdir().expect("a directory");
        let group = root.path().join("slice/job");
        fs::create_dir_all(&group).expect("a directory");
        let write = |path: &str, text: &str| fs::write(root.path().join(path), text).expect("written");
        write("slice/job/memory.max", "max\n");
        write("slice/job/memory.high", "900\n");
        write("slice/job/memory.current", "100\n");
        write("slice/memory.max", "1000\n");
        write("slice/memory.current", "700\n");
        write("slice/memory.stat", "inactive_file 50\n");
        let mount = Mount { root: "/".into(), point: root.path().to_owned() };
        let found = tightest(Version::V2, &mount, &mount.group("/slice/job")).expect("limited");
        let wanted = Cgroup { limit: 900, limit_file: group.join("memory.high"), left: 350 };
        assert_eq!(found, wanted);
        assert_eq!(mount.group("/elsewhere/../x"), root.path(), "an unseen group counts as the mount's");
    }

    /// A tree with these files, and the `mountinfo` of both hierarchies in it.
    fn tree(files: &[(&str, &str)]) -> (tempfile::TempDir, String) {
        let root = tempfile::tempdir().expect("a directory");
        for (name, text) in files {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().expect("a parent")).expect("made");
            fs::write(path, text).expect("written");
        }
        let at = root.path().display();
        let mounts = format!(
            "31 27 0:31 / {at}/memory rw - cgroup cgroup rw,memory\n32 27 0:32 / {at}/unified rw - cgroup2 cgroup2 rw\n"
        );
        (root, mounts)
    }

    #[test]
    fn a_tree_of_version_1_is_followed_to_its_root() {
        let (root, mounts) = tree(&[
            ("memory/memory.limit_in_bytes", "9223372036854771712\n"),
            ("memory/docker/memory.limit_in_bytes", "4000\n"),
            ("memory/docker/memory.usage_in_bytes", "3500\n"),
            ("memory/docker/memory.stat", "cache 1\ntotal_inactive_file 1000\n"),
            ("memory/docker/job/memory.limit_in_bytes", "2000\n"),
            ("memory/docker/job/memory.usage_in_bytes", "100\n"),
        ]);
        let found = of("5:memory:/docker/job\n0::/\n", &mounts).expect("limited");
        assert_eq!((found.limit, found.left), (2000, 1500));
        assert!(found.limit_file.starts_with(root.path().join("memory/docker/job")));
        assert_eq!(of("5:memory:/\n", &mounts), None);
    }

    #[test]
    fn of_both_versions_the_one_with_less_left_counts() {
        let files = [
            ("memory/job/memory.limit_in_bytes", "1000\n"),
            ("memory/job/memory.usage_in_bytes", "2000\n"),
            ("unified/job/memory.max", "500\n"),
            ("unified/job/memory.current", "junk\n"),
        ];
        let (_root, mounts) = tree(&files);
        let found = of("5:memory:/job\n0::/job\n", &mounts).expect("limited");
        assert_eq!((found.limit, found.left), (1000, 0), "more is used than allowed: nothing is left");
        assert_eq!(of("0::/job\n", &mounts).expect("limited").left, 500, "what cannot be read counts as unused");
        assert_eq!(of("", &mounts), None);
        assert_eq!(of("5:memory:/job\n0::/job\n", ""), None);
    }
}
