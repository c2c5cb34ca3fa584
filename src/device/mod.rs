//! The physical drive beneath a directory: through partitions, mappings and loop devices down to the disks, as far as the
//! system tells.

pub(crate) mod mounts;

use std::collections::BTreeSet;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use self::mounts::Mount;

/// Mappings on mappings are followed so far.
const DEPTH_MAX: usize = 8;

/// File systems that live in memory.
const IN_MEMORY: [&str; 2] = ["tmpfs", "ramfs"];

/// A drive, or several that are one to the file system (RAID, a volume group).
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Device {
    /// Its disks, for people too: `nvme0n1`, `sda and sdb`, `server:/export`.
    pub name: String,
    /// Kind of the file system on it; `None` where the system does not tell.
    pub fs: Option<String>,
    /// Whether that file system is memory, and no drive at all.
    pub in_memory: bool,
    /// Names of the disks, or of what stands for them.
    disks: BTreeSet<String>,
}

impl Device {
    /// The device of the directory `path`.
    ///
    /// # Errors
    /// When `path` cannot be looked at.
    pub(crate) fn of(path: &Path) -> io::Result<Self> {
        let number = fs::metadata(path)?.dev();
        let mount = mounts::of(path);
        let in_memory = mount.as_ref().is_some_and(|mount| IN_MEMORY.contains(&mount.kind.as_str()));
        let disks = if in_memory {
            BTreeSet::from(["memory".to_owned()])
        } else {
            let found = disks(Path::new("/sys"), number, DEPTH_MAX);
            let found = found.or_else(|| of_source(mount.as_ref()?));
            found.unwrap_or_else(|| BTreeSet::from([stand_in(number, mount.as_ref())]))
        };
        Ok(Self { name: name(&disks), fs: mount.map(|mount| mount.kind), in_memory, disks })
    }

    /// Whether both are the same hardware.
    pub(crate) fn is_same(&self, other: &Self) -> bool {
        self.disks == other.disks
    }

    /// A disk that both are on, though they are not the same.
    pub(crate) fn in_common<'a>(&'a self, other: &'a Self) -> Option<&'a str> {
        if self.is_same(other) { None } else { self.disks.intersection(&other.disks).next().map(String::as_str) }
    }
}

fn name(disks: &BTreeSet<String>) -> String {
    disks.iter().map(String::as_str).collect::<Vec<_>>().join(" and ")
}

/// The disks of the block device `number`; `None` where it is none, or the system does not tell.
fn disks(sys: &Path, number: u64, depth: usize) -> Option<BTreeSet<String>> {
    // The C library's split of a device number, for device files as the kernel has them.
    let (major, minor) = (libc::major(number as libc::dev_t), libc::minor(number as libc::dev_t));
    let node = fs::canonicalize(sys.join(format!("dev/block/{major}:{minor}"))).ok()?;
    disks_of_node(&node, depth)
}

/// As [`disks`], for a directory of the system's device tree.
fn disks_of_node(node: &Path, depth: usize) -> Option<BTreeSet<String>> {
    // A partition lies within its disk, and it alone has a file of that name.
    let node = if node.join("partition").exists() { node.parent()? } else { node };
    let itself = || node.file_name().map(|name| BTreeSet::from([name.to_string_lossy().into_owned()]));
    if depth == 0 {
        return itself();
    }
    let beneath = fs::read_dir(node.join("slaves")).into_iter().flatten().filter_map(|entry| {
        let slave = fs::canonicalize(entry.ok()?.path()).ok()?;
        disks_of_node(&slave, depth - 1)
    });
    let mut beneath: BTreeSet<String> = beneath.flatten().collect();
    if let Ok(file) = fs::read_to_string(node.join("loop/backing_file")) {
        let number = fs::metadata(file.trim_end_matches('\n')).map(|metadata| metadata.dev()).ok();
        beneath.extend(number.and_then(|number| disks(Path::new("/sys"), number, depth - 1)).into_iter().flatten());
    }
    if beneath.is_empty() { itself() } else { Some(beneath) }
}

/// The disks of a file system that has a device number of its own, from what is mounted.
fn of_source(mount: &Mount) -> Option<BTreeSet<String>> {
    if !mount.source.starts_with("/dev/") {
        return None;
    }
    let number = fs::metadata(&mount.source).ok()?.rdev();
    disks(Path::new("/sys"), number, DEPTH_MAX)
}

/// A name for what the system does not resolve.
fn stand_in(number: u64, mount: Option<&Mount>) -> String {
    match mount {
        // All data sets of a pool are on the pool's disks.
        Some(mount) if mount.kind == "zfs" => {
            format!("pool {}", mount.source.split('/').next().unwrap_or(&mount.source))
        }
        Some(mount) if mount.source.starts_with("/dev/disk") => whole_disk(&mount.source["/dev/".len()..]).to_owned(),
        // A share is named by its server.
        Some(mount) if mount.source.contains(':') || mount.source.starts_with('/') => mount.source.clone(),
        _ => {
            let (major, minor) = (libc::major(number as libc::dev_t), libc::minor(number as libc::dev_t));
            format!("device {major}:{minor}")
        }
    }
}

/// `disk3` of `disk3s5s1`, as macOS numbers slices.
fn whole_disk(name: &str) -> &str {
    let digits = name.strip_prefix("disk").map_or(0, |rest| rest.bytes().take_while(u8::is_ascii_digit).count());
    &name[..if digits > 0 { "disk".len() + digits } else { name.len() }]
}

#[cfg(test)]
pub(crate) mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    /// Name of the device `major:minor` in the tree `sys`.
    pub(crate) fn name_in(sys: &Path, major: u32, minor: u32) -> Option<String> {
        found(sys, major, minor).map(|disks| name(&disks.into_iter().collect()))
    }

    /// A device tree: two disks, two partitions of one, one of them encrypted, a mapping over both disks, a mapping over
    /// that, and one that is its own slave.
    pub(crate) fn tree() -> tempfile::TempDir {
        let sys = tempfile::tempdir().unwrap();
        let at = |path: &str| sys.path().join(path);
        for dir in [
            "dev/block",
            "d/sda/sda1",
            "d/sda/sda2",
            "d/sdb",
            "d/dm-1/slaves",
            "d/md0/slaves",
            "d/dm-0/slaves",
            "d/odd/slaves",
        ] {
            fs::create_dir_all(at(dir)).unwrap();
        }
        for partition in ["1", "2"] {
            fs::write(at(&format!("d/sda/sda{partition}/partition")), partition).unwrap();
        }
        for (link, to) in [
            ("dev/block/8:1", "d/sda/sda1"),
            ("dev/block/8:2", "d/sda/sda2"),
            ("dev/block/8:16", "d/sdb"),
            ("dev/block/9:0", "d/md0"),
            ("dev/block/253:0", "d/dm-0"),
            ("dev/block/253:1", "d/dm-1"),
            ("dev/block/253:9", "d/odd"),
            ("d/md0/slaves/sda1", "d/sda/sda1"),
            ("d/md0/slaves/sdb", "d/sdb"),
            ("d/dm-0/slaves/md0", "d/md0"),
            ("d/dm-1/slaves/sda2", "d/sda/sda2"),
            ("d/odd/slaves/odd", "d/odd"),
        ] {
            symlink(at(to), at(link)).unwrap();
        }
        sys
    }

    fn found(sys: &Path, major: u32, minor: u32) -> Option<Vec<String>> {
        #[allow(clippy::unnecessary_cast, reason = "the type depends on the target")]
        let number = libc::makedev(major as _, minor as _) as u64;
        disks(sys, number, DEPTH_MAX).map(|disks| disks.into_iter().collect())
    }

    #[test]
    fn partitions_and_mappings_lead_to_their_disks() {
        let sys = tree();
        for (major, minor, wanted) in [
            (8, 1, &["sda"][..]),
            (8, 2, &["sda"]),
            (8, 16, &["sdb"]),
            (253, 1, &["sda"]),
            (9, 0, &["sda", "sdb"]),
            (253, 0, &["sda", "sdb"]),
            (253, 9, &["odd"]),
        ] {
            assert_eq!(found(sys.path(), major, minor).unwrap(), wanted, "{major}:{minor}");
        }
        assert_eq!(found(sys.path(), 1, 1), None);
    }

    #[test]
    fn one_device_is_itself_and_overlapping_ones_are_told_apart() {
        let device = |disks: &[&str]| Device {
            name: String::new(),
            fs: None,
            in_memory: false,
            disks: disks.iter().map(|disk| (*disk).to_owned()).collect(),
        };
        let (both, one, other) = (device(&["a", "b"]), device(&["a"]), device(&["c"]));
        assert!(one.is_same(&one) && !both.is_same(&one));
        assert_eq!((both.in_common(&one), both.in_common(&other), one.in_common(&one)), (Some("a"), None, None));
    }

    #[test]
    fn what_cannot_be_resolved_has_a_name_that_tells_it_apart() {
        let mount = |kind: &str, source: &str| Mount { kind: kind.into(), source: source.into() };
        for (kind, source, wanted) in [
            ("zfs", "tank/models/k3", "pool tank"),
            ("apfs", "/dev/disk3s5s1", "disk3"),
            ("exfat", "/dev/disk12", "disk12"),
            ("nfs4", "server:/export", "server:/export"),
            ("overlay", "overlay", "device 0:7"),
        ] {
            assert_eq!(stand_in(7, Some(&mount(kind, source))), wanted);
        }
        assert_eq!(whole_disk("diskette"), "diskette");
    }

    #[test]
    fn a_directory_is_on_the_device_of_its_neighbour() {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("a")).unwrap();
        let (one, other) = (Device::of(folder.path()).unwrap(), Device::of(&folder.path().join("a")).unwrap());
        assert!(one.is_same(&other) && !one.name.is_empty());
        assert!(Device::of(&folder.path().join("missing")).is_err());
    }
}
