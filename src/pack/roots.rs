//! The roots that are written to: found, told apart, claimed by this process alone.

use std::fs::{self, File, TryLockError};
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use crate::device::Device;
use crate::error::{Error, Result};
use crate::synth::space;

/// A directory that experts are written to, which may not exist yet.
#[derive(Debug)]
pub(super) struct Root {
    /// As given.
    pub dir: PathBuf,
    /// Without links, as far as it exists.
    pub place: PathBuf,
    identity: Identity,
    /// The physical drive it is on.
    pub drive: String,
    /// The file system it is on.
    pub file_system: u64,
    /// Bytes that may still be written there.
    pub free: u64,
}

/// What one directory has in common under all its names, be they links or mounts: device and number of the part that is
/// there, and the names after it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Identity(u64, u64, PathBuf);

/// A lock that the kernel gives back when the process ends, however it ends.
#[derive(Debug)]
pub(super) struct Lock {
    /// Before the lock, so that nobody has begun in a directory that is removed.
    _made: Made,
    _directory: Option<File>,
}

/// Directories that this process made; those that are still empty in the end are removed.
#[derive(Debug, Default)]
struct Made(Vec<PathBuf>);

impl Made {
    /// Makes `dir` and those above it, as far as they are not there.
    fn make(dir: &Path) -> io::Result<Self> {
        let is_absent = |path: &&Path| !path.as_os_str().is_empty() && path.symlink_metadata().is_err();
        let made = Self(dir.ancestors().take_while(is_absent).map(Path::to_owned).collect());
        fs::create_dir_all(dir)?;
        Ok(made)
    }
}

impl Drop for Made {
    fn drop(&mut self) {
        for dir in &self.0 {
            // One that holds something stays.
            let _ = fs::remove_dir(dir);
        }
    }
}

/// Looks at the given directories; makes nothing.
///
/// # Errors
/// Kind `Usage` for something that is no directory, or for one given twice; `Io` for one that cannot be looked at.
pub(super) fn find(dirs: &[PathBuf]) -> Result<Vec<Root>> {
    let mut roots: Vec<Root> = Vec::with_capacity(dirs.len());
    for dir in dirs {
        let root = Root::find(dir)?;
        if let Some(same) = roots.iter().find(|other| other.is_same(&root)) {
            return Err(Error::usage(format!(
                "--to {} and --to {} are one directory",
                same.dir.display(),
                dir.display()
            ))
            .hint("name each root once"));
        }
        roots.push(root);
    }
    Ok(roots)
}

impl Root {
    fn find(dir: &Path) -> Result<Self> {
        let unreadable = |e: io::Error| Error::io(format!("cannot look at {}: {e}", dir.display()));
        let absolute = std::path::absolute(dir).map_err(|e| Error::usage(format!("--to {}: {e}", dir.display())))?;
        let there = absolute.ancestors().find(|path| path.symlink_metadata().is_ok()).unwrap_or(Path::new("/"));
        let real = there.canonicalize().map_err(unreadable)?;
        let metadata = fs::metadata(&real).map_err(unreadable)?;
        if !metadata.is_dir() {
            return Err(Error::usage(format!("--to {}: {} is no directory", dir.display(), there.display())));
        }
        let rest = absolute.strip_prefix(there).unwrap_or(Path::new(""));
        let place = if rest.as_os_str().is_empty() { real.clone() } else { real.join(rest) };
        Ok(Self {
            dir: dir.to_owned(),
            place,
            identity: Identity(metadata.dev(), metadata.ino(), rest.to_owned()),
            drive: Device::of(&real).map_err(unreadable)?.name,
            file_system: metadata.dev(),
            free: space::available(&real).map_err(unreadable)?,
        })
    }

    /// Whether both are one directory, whatever they are called.
    pub fn is_same(&self, other: &Root) -> bool {
        self.place == other.place || self.identity == other.identity
    }

    /// Whether it is the directory at `dir`.
    pub fn is_at(&self, dir: &Path) -> bool {
        Root::find(dir).is_ok_and(|root| self.is_same(&root))
    }

    /// Makes the directory where it is not there, and locks it.
    ///
    /// # Errors
    /// Kind `Io` when it cannot be made, or another process writes there.
    pub fn claim(&self) -> Result<Lock> {
        let made = Made::make(&self.dir)
            .map_err(|e| Error::io(format!("cannot make the directory {}: {e}", self.dir.display())))?;
        Ok(Lock { _made: made, ..lock(&self.dir, true)? })
    }

    /// Removes the directory again where it was not there when it was looked at and nothing is in it.
    pub fn unmake(&self) {
        let made = self.identity.2.ancestors().filter(|rest| !rest.as_os_str().is_empty());
        // One that is not empty stays, and those above it with it.
        let _ = self.place.ancestors().zip(made).try_for_each(|(dir, _)| fs::remove_dir(dir));
    }
}

/// Locks a directory: alone, or together with others that only read it.
///
/// # Errors
/// Kind `Io` when another process holds a lock that does not go with this one.
pub(super) fn lock(dir: &Path, alone: bool) -> Result<Lock> {
    let failed = |e: io::Error| Error::io(format!("cannot lock {}: {e}", dir.display()));
    let directory = File::open(dir).map_err(failed)?;
    match if alone { directory.try_lock() } else { directory.try_lock_shared() } {
        Ok(()) => Ok(Lock { _made: Made::default(), _directory: Some(directory) }),
        Err(TryLockError::WouldBlock) => {
            Err(Error::io(format!("another `deltafin pack` is at work in {}", dir.display()))
                .hint("wait until it is done; a process that was killed holds no lock"))
        }
        // Some network file systems know no locks on directories; packing twice at once is then the user's affair.
        Err(TryLockError::Error(e))
            if e.kind() == io::ErrorKind::Unsupported || e.raw_os_error() == Some(libc::EBADF) =>
        {
            Ok(Lock { _made: Made::default(), _directory: None })
        }
        Err(TryLockError::Error(e)) => Err(failed(e)),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn a_root_given_twice_is_refused_however_it_is_spelled() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("root");
        fs::create_dir(&dir).unwrap();
        let link = folder.path().join("link");
        std::os::unix::fs::symlink(&dir, &link).unwrap();
        for other in [dir.clone(), link, dir.join("."), folder.path().join("root/")] {
            let error = find(&[dir.clone(), other.clone()]).unwrap_err();
            assert_eq!(error.kind(), Kind::Usage, "{}: {error}", other.display());
        }
        let missing = folder.path().join("a/b");
        assert!(find(&[missing.clone(), missing.clone()]).is_err());
        assert!(find(&[dir, missing]).is_ok());
        assert!(!folder.path().join("a").exists(), "looking makes nothing");
    }

    #[test]
    fn what_is_no_directory_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "x").unwrap();
        for path in [file.clone(), file.join("below")] {
            assert_eq!(find(std::slice::from_ref(&path)).unwrap_err().kind(), Kind::Usage, "{}", path.display());
        }
    }

    #[test]
    fn directories_that_were_made_and_stay_empty_are_removed() {
        let folder = tempfile::tempdir().unwrap();
        let dirs = ["a/b", "a/c"].map(|name| folder.path().join(name));
        let claim = |dir: &PathBuf| find(std::slice::from_ref(dir)).unwrap()[0].claim().unwrap();
        let locks = dirs.each_ref().map(claim);
        assert!(dirs.iter().all(|dir| dir.is_dir()));
        fs::write(dirs[1].join("x"), "x").unwrap();
        drop(locks);
        assert!(!dirs[0].exists() && dirs[1].exists());
        fs::remove_file(dirs[1].join("x")).unwrap();
        drop(claim(&dirs[1]));
        assert!(dirs[1].exists(), "it was there before");
    }

    #[test]
    fn a_lock_is_alone_until_it_is_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path();
        let held = lock(dir, true).unwrap();
        assert_eq!(lock(dir, true).unwrap_err().kind(), Kind::Io);
        assert!(lock(dir, false).is_err());
        drop(held);
        let readers = [lock(dir, false).unwrap(), lock(dir, false).unwrap()];
        assert!(lock(dir, true).is_err());
        drop(readers);
        assert!(lock(dir, true).is_ok());
    }
}
