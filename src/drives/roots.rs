//! The directories to measure: looked at before anything is read, and told apart by their drives.

use std::fs;
use std::io;
use std::path::{Path, PathBuf};

use crate::device::Device;
use crate::error::{Error, Kind, Result};

/// A directory and the drive beneath it.
#[derive(Debug, Clone)]
pub(super) struct Root {
    /// As given.
    pub dir: PathBuf,
    pub device: Device,
    /// Number of the first root on this drive; its own, if that is itself.
    pub first: usize,
}

/// Looks at all of `dirs`.
///
/// # Errors
/// All that cannot be measured, in one message: kind `Usage` for what is no directory, `Io` for what cannot be looked at.
pub(super) fn find(dirs: &[PathBuf]) -> Result<Vec<Root>> {
    let mut roots: Vec<Root> = Vec::with_capacity(dirs.len());
    let mut refused: Vec<(Kind, String)> = Vec::new();
    for dir in dirs {
        let place = |dir: &Path| dir.canonicalize().ok();
        let is_twice = roots.iter().any(|root| place(&root.dir).is_some_and(|found| Some(found) == place(dir)));
        match look(dir) {
            Ok(_) if is_twice => refused.push((Kind::Usage, format!("{}: given twice", shown(dir)))),
            Ok(device) => {
                let first = roots.iter().position(|root| root.device.is_same(&device)).unwrap_or(roots.len());
                roots.push(Root { dir: dir.clone(), device, first });
            }
            Err((kind, what)) => refused.push((kind, format!("{}: {what}", shown(dir)))),
        }
    }
    if refused.is_empty() {
        return Ok(roots);
    }
    let kind = if refused.iter().any(|(kind, _)| *kind == Kind::Io) { Kind::Io } else { Kind::Usage };
    let all: Vec<String> = refused.into_iter().map(|(_, what)| what).collect();
    Err(Error::new(kind, format!("cannot measure {}", all.join("; ")))
        .hint("give directories that exist, one on each drive"))
}

fn look(dir: &Path) -> Result<Device, (Kind, String)> {
    let unreadable = |cause: io::Error| match cause.kind() {
        io::ErrorKind::NotFound | io::ErrorKind::NotADirectory => (Kind::Usage, "no such directory".to_owned()),
        _ => (Kind::Io, cause.to_string()),
    };
    if !fs::metadata(dir).map_err(unreadable)?.is_dir() {
        return Err((Kind::Usage, "is not a directory".to_owned()));
    }
    fs::read_dir(dir).map_err(unreadable)?;
    Device::of(dir).map_err(unreadable)
}

fn shown(dir: &Path) -> String {
    if dir.as_os_str().is_empty() { "\"\"".to_owned() } else { dir.display().to_string() }
}

/// What the user should know about the drives of `roots`.
pub(super) fn notices(roots: &[Root]) -> Vec<String> {
    let mut notices = Vec::new();
    for (number, root) in roots.iter().enumerate() {
        let first = &roots[root.first];
        if root.first != number {
            notices.push(format!(
                "{} is on the same drive as {} ({}): measured once, counted as one",
                root.dir.display(),
                first.dir.display(),
                first.device.name
            ));
            continue;
        }
        if root.device.in_memory {
            notices.push(format!(
                "{} is in memory ({}): its rate is no drive's",
                root.dir.display(),
                root.device.fs.as_deref().unwrap_or_default()
            ));
        }
        for other in roots[..number].iter().filter(|other| roots[other.first].dir == other.dir) {
            if let Some(disk) = root.device.in_common(&other.device) {
                notices.push(format!(
                    "{} and {} are partly on the same drive ({disk}): together they give less than the sum",
                    other.dir.display(),
                    root.dir.display()
                ));
            }
        }
    }
    notices
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn all_that_cannot_be_measured_is_named_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "x").unwrap();
        let again = folder.path().join("./");
        let dirs =
            [folder.path().to_owned(), folder.path().join("missing"), file.clone(), file.join("x"), "".into(), again];
        let error = find(&dirs).unwrap_err();
        assert_eq!(error.kind(), Kind::Usage);
        for part in [
            "missing: no such directory",
            "file: is not a directory",
            "file/x: no such",
            "\"\": no such",
            "/./: given twice",
        ] {
            assert!(error.message().contains(part), "{part}: {error}");
        }
    }

    #[test]
    fn directories_of_one_drive_are_one_drive() {
        let folder = tempfile::tempdir().unwrap();
        let dirs = ["a", "b", "c"].map(|name| folder.path().join(name));
        dirs.iter().for_each(|dir| fs::create_dir(dir).unwrap());
        let roots = find(&dirs).unwrap();
        assert_eq!(roots.iter().map(|root| root.first).collect::<Vec<_>>(), [0, 0, 0]);
        let notices = notices(&roots);
        assert_eq!(notices.iter().filter(|notice| notice.contains("the same drive")).count(), 2, "{notices:?}");
    }
}
