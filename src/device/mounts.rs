//! What is mounted where a path is.

use std::path::Path;
#[cfg(any(not(target_os = "macos"), test))]
use std::path::PathBuf;

/// A mounted file system.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Mount {
    /// Its kind, as the system calls it: `ext4`, `xfs`, `apfs`.
    pub kind: String,
    /// What is mounted: `/dev/nvme0n1p2`, `server:/export`, `tank/models`.
    pub source: String,
}

/// The mount that `path` is on; `None` where the system does not tell.
#[cfg(not(target_os = "macos"))]
pub(crate) fn of(path: &Path) -> Option<Mount> {
    let mounts = std::fs::read("/proc/self/mountinfo").ok()?;
    above(&mounts, &path.canonicalize().ok()?)
}

/// The mount that `path` is on; `None` where the system does not tell.
#[cfg(target_os = "macos")]
pub(crate) fn of(path: &Path) -> Option<Mount> {
    use std::ffi::{CStr, CString};
    use std::os::unix::ffi::OsStrExt;

    let path = CString::new(path.as_os_str().as_bytes()).ok()?;
    let mut stat = std::mem::MaybeUninit::<libc::statfs>::zeroed();
    // SAFETY: `path` ends in a nul and outlives the call; `stat` is writable and of the type the call fills.
    let failed = unsafe { libc::statfs(path.as_ptr(), stat.as_mut_ptr()) } != 0;
    // SAFETY: a structure of integers, for which all zeros is a value, so it is one whether the call filled it or not.
    let stat = unsafe { stat.assume_init() };
    let text = |chars: &[libc::c_char]| {
        let bytes: Vec<u8> = chars.iter().map(|char| *char as u8).collect();
        CStr::from_bytes_until_nul(&bytes).ok().map(|text| text.to_string_lossy().into_owned())
    };
    let mount = Mount { kind: text(&stat.f_fstypename)?, source: text(&stat.f_mntfromname)? };
    (!failed).then_some(mount)
}

/// Of the mounts above `path` in a `mountinfo` the deepest, of two at one place the later.
#[cfg(any(not(target_os = "macos"), test))]
fn above(mounts: &[u8], path: &Path) -> Option<Mount> {
    let lines = mounts.split(|byte| *byte == b'\n');
    let above = lines.filter_map(mount).filter(|(point, _)| path.starts_with(point));
    above.max_by_key(|(point, _)| point.components().count()).map(|(_, mount)| mount)
}

/// Mount point and mount: the fifth field, and the first two behind the ` - `.
#[cfg(any(not(target_os = "macos"), test))]
fn mount(line: &[u8]) -> Option<(PathBuf, Mount)> {
    use std::os::unix::ffi::OsStrExt;

    let mut fields = line.split(|byte| *byte == b' ');
    let point = PathBuf::from(std::ffi::OsStr::from_bytes(&unescaped(fields.nth(4)?)));
    let mut fields = fields.skip_while(|field| *field != b"-").skip(1);
    let mut text = || fields.next().map(|field| String::from_utf8_lossy(&unescaped(field)).into_owned());
    Some((point, Mount { kind: text()?, source: text()? }))
}

/// The kernel writes space, tab, line end and backslash as `\040`, `\011`, `\012` and `\134`.
#[cfg(any(not(target_os = "macos"), test))]
fn unescaped(field: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(field.len());
    let mut rest = field;
    while let [first, after @ ..] = rest {
        rest = match rest {
            [b'\\', a @ b'0'..=b'3', b @ b'0'..=b'7', c @ b'0'..=b'7', after @ ..] => {
                bytes.push((a - b'0') << 6 | (b - b'0') << 3 | (c - b'0'));
                after
            }
            _ => {
                bytes.push(*first);
                after
            }
        };
    }
    bytes
}

#[cfg(test)]
mod tests {
    use super::*;

    const MOUNTS: &[u8] = b"\
27 1 8:1 / / rw,relatime shared:1 - ext4 /dev/root rw
28 27 0:5 / /mnt/my\\040disk rw - xfs /dev/sd\\040b rw
29 27 0:6 / /tmp rw shared:2 master:1 - tmpfs tmpfs rw
30 27 0:7 / /tmp rw - overlay overlay rw
junk
";

    #[test]
    fn the_deepest_and_latest_mount_counts() {
        for (path, kind, source) in [
            ("/srv/model", "ext4", "/dev/root"),
            ("/mnt/my disk/model", "xfs", "/dev/sd b"),
            ("/mnt/my", "ext4", "/dev/root"),
            ("/tmp/model", "overlay", "overlay"),
            ("/tmpfile", "ext4", "/dev/root"),
        ] {
            let wanted = Mount { kind: kind.into(), source: source.into() };
            assert_eq!(above(MOUNTS, Path::new(path)), Some(wanted), "{path}");
        }
        assert_eq!(above(b"", Path::new("/")), None);
    }
}
