//! Files that are there whole or not at all: written under a temporary name, synced, renamed.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::interrupt::Interrupt;

/// Bytes between two looks at the interrupt.
const CHUNK_BYTES: usize = 4 << 20;

/// Ends the name of what is not whole yet.
pub(super) const TEMPORARY: &str = ".pack-tmp";

/// What `path` is called while it is written: beside it, since a rename replaces only within a file system. One process
/// alone writes there.
pub(super) fn temporary(path: &Path) -> PathBuf {
    let mut name = std::ffi::OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(TEMPORARY);
    path.with_file_name(name)
}

/// Writes `path` through `write`, replacing what is there in one step. The directory is not synced.
///
/// # Errors
/// What `write` reports; kind `Io` when the file cannot be made, synced or renamed. Nothing is left of it then.
pub(super) fn create(path: &Path, write: impl FnOnce(&mut File, &Path) -> Result<()>) -> Result<()> {
    let temporary = temporary(path);
    let written = (|| {
        let mut options = OpenOptions::new();
        let open = options.read(true).write(true).create(true).truncate(true).open(&temporary);
        let mut file = open.map_err(|e| unwritten(path, &e))?;
        write(&mut file, &temporary)?;
        fs::rename(&temporary, path).map_err(|e| unwritten(path, &e))
    })();
    if written.is_err() {
        // It may not exist; and the first failure is the one to tell.
        let _ = fs::remove_file(&temporary);
    }
    written
}

/// Writes all of `bytes` piece by piece and syncs.
///
/// # Errors
/// Kind `Io`, naming `path`; `Interrupted`.
pub(super) fn write_all(file: &mut File, path: &Path, bytes: &[u8], interrupt: &Interrupt) -> Result<()> {
    write_pieces(file, bytes, interrupt)?.and_then(|()| file.sync_all()).map_err(|e| unwritten(path, &e))
}

/// As [`write_all`], for whole pages of aligned memory: past the page cache where that can be had, through `file` where
/// not. Both are open at `temporary`.
///
/// # Errors
/// As [`write_all`].
pub(super) fn write_all_direct(
    file: &mut File,
    temporary: &Path,
    path: &Path,
    bytes: &[u8],
    interrupt: &Interrupt,
) -> Result<()> {
    if let Ok(mut direct) = open_direct(temporary) {
        match write_pieces(&mut direct, bytes, interrupt)? {
            Ok(()) => return file.sync_all().map_err(|e| unwritten(path, &e)),
            // Not every file system that opens for it takes it; what was written is written over.
            Err(e) if matches!(e.raw_os_error(), Some(libc::EINVAL | libc::EOPNOTSUPP)) => {}
            Err(e) => return Err(unwritten(path, &e)),
        }
    }
    write_all(file, path, bytes, interrupt)
}

#[cfg(target_os = "linux")]
fn open_direct(path: &Path) -> io::Result<File> {
    use std::os::unix::fs::OpenOptionsExt;
    OpenOptions::new().write(true).custom_flags(libc::O_DIRECT).open(path)
}

#[cfg(not(target_os = "linux"))]
fn open_direct(_path: &Path) -> io::Result<File> {
    Err(io::ErrorKind::Unsupported.into())
}

/// The outer error is the interrupt, the inner one that of a write.
fn write_pieces(file: &mut File, bytes: &[u8], interrupt: &Interrupt) -> Result<io::Result<()>> {
    for piece in bytes.chunks(CHUNK_BYTES) {
        interrupt.check()?;
        if let Err(e) = file.write_all(piece) {
            return Ok(Err(e));
        }
    }
    Ok(Ok(()))
}

/// Makes names in `dir` last.
///
/// # Errors
/// Kind `Io`, except where directories cannot be synced at all.
pub(super) fn sync_dir(dir: &Path) -> Result<()> {
    match File::open(dir).and_then(|dir| dir.sync_all()) {
        Err(e) if e.kind() != io::ErrorKind::InvalidInput && e.kind() != io::ErrorKind::Unsupported => {
            Err(Error::io(format!("cannot sync {}: {e}", dir.display())))
        }
        _ => Ok(()),
    }
}

/// The error of a write to `path`.
pub(super) fn unwritten(path: &Path, error: &io::Error) -> Error {
    let refused = Error::io(format!("cannot write {}: {error}", path.display()));
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            refused.hint("free some space and give the same command again: what is done is kept")
        }
        io::ErrorKind::FileTooLarge => {
            refused.hint("this file system or `ulimit -f` does not allow files so large; what is done is kept")
        }
        _ => refused.hint("what is done is kept; the same command goes on from there"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_there_whole_or_not_at_all() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let interrupt = Interrupt::new();
        create(&path, |file, at| write_all(file, at, b"first", &interrupt)).unwrap();
        interrupt.raise(2);
        let error = create(&path, |file, at| write_all(file, at, b"second", &interrupt)).unwrap_err();
        assert!(matches!(error.kind(), crate::error::Kind::Interrupted(2)));
        assert_eq!(fs::read(&path).unwrap(), b"first");
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_full_disk_says_that_what_is_done_is_kept() {
        let mut full = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let error = write_all(&mut full, Path::new("x/y"), b"data", &Interrupt::new()).unwrap_err();
        assert!(error.message().contains("x/y") && error.hint_text().unwrap().contains("free some space"), "{error}");
    }
}
