//! The kind of file system that a path is on.

use std::fs;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

/// As the mount table calls it (`ext4`, `xfs`); `None` where there is no such table.
pub(in crate::cli) fn of(path: &Path) -> Option<String> {
    let mounts = fs::read("/proc/self/mountinfo").ok()?;
    kind(&mounts, &path.canonicalize().ok()?)
}

/// Of the mounts above `path` the deepest, of two at one place the later.
fn kind(mounts: &[u8], path: &Path) -> Option<String> {
    let lines = mounts.split(|byte| *byte == b'\n');
    let above = lines.filter_map(mount).filter(|(point, _)| path.starts_with(point));
    above.max_by_key(|(point, _)| point.components().count()).map(|(_, kind)| kind)
}

/// Mount point and kind: the fifth field, and the first behind the ` - `.
fn mount(line: &[u8]) -> Option<(PathBuf, String)> {
    let mut fields = line.split(|byte| *byte == b' ');
    let point = PathBuf::from(std::ffi::OsStr::from_bytes(&unescaped(fields.nth(4)?)));
    let kind = fields.skip_while(|field| *field != b"-").nth(1)?;
    Some((point, String::from_utf8_lossy(kind).into_owned()))
}

/// The kernel writes space, tab, line end and backslash as `\040`, `\011`, `\012` and `\134`.
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
28 27 0:5 / /mnt/my\\040disk rw - xfs /dev/sdb rw
29 27 0:6 / /tmp rw shared:2 master:1 - tmpfs tmpfs rw
30 27 0:7 / /tmp rw - overlay overlay rw
junk
";

    #[test]
    fn the_deepest_and_latest_mount_counts() {
        for (path, wanted) in [
            ("/srv/model", "ext4"),
            ("/mnt/my disk/model", "xfs"),
            ("/mnt/my", "ext4"),
            ("/tmp/model", "overlay"),
            ("/tmpfile", "ext4"),
        ] {
            assert_eq!(kind(MOUNTS, Path::new(path)).as_deref(), Some(wanted), "{path}");
        }
        assert_eq!(kind(b"", Path::new("/")), None);
    }
}
