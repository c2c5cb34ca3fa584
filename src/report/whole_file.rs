//! A file for the user that appears whole or not at all: tried before the work whose result it will hold, written beside its
//! place afterwards, and renamed.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};

/// A file that will be written.
#[derive(Debug)]
pub struct WholeFile {
    /// As given.
    path: PathBuf,
    /// Where the file itself is: links are followed, so that they stay what they are.
    place: PathBuf,
    /// A device or a pipe is written to as it is.
    is_special: bool,
}

impl WholeFile {
    /// A file at `path`, which is not touched yet; that it can be written is tried.
    ///
    /// # Errors
    /// Kind `Io` when it could not be written.
    pub fn new(path: &Path) -> Result<Self> {
        let found = fs::metadata(path).ok();
        let is_special = found.as_ref().is_some_and(|found| !found.is_file() && !found.is_dir());
        // What a name like /dev/stdout links to has none of its own.
        let place = if found.is_some() && !is_special { path.canonicalize() } else { Ok(path.to_owned()) };
        let file = Self { path: path.to_owned(), place: place.map_err(|e| unwritten(path, &e))?, is_special };
        if found.as_ref().is_some_and(fs::Metadata::is_dir) {
            return Err(unwritten(path, &io::ErrorKind::IsADirectory.into()));
        }
        if path.file_name().is_none() {
            return Err(unwritten(path, &io::ErrorKind::InvalidInput.into()));
        }
        if !is_special {
            let temporary = file.temporary();
            create(&temporary).and_then(|_| fs::remove_file(&temporary)).map_err(|e| unwritten(path, &e))?;
        }
        Ok(file)
    }

    /// Puts `content` there, in place of what was there.
    ///
    /// # Errors
    /// Kind `Io`; what was there is then still there.
    pub fn write(&self, content: &[u8]) -> Result<()> {
        if self.is_special {
            let written = OpenOptions::new().write(true).open(&self.place).and_then(|mut file| file.write_all(content));
            return written.map_err(|e| unwritten(&self.path, &e));
        }
        let temporary = self.temporary();
        let written = create(&temporary).and_then(|mut file| {
            file.write_all(content)?;
            file.sync_all()
        });
        written.and_then(|()| fs::rename(&temporary, &self.place)).map_err(|e| {
            // It may not exist; and the first failure is the one to tell.
            let _ = fs::remove_file(&temporary);
            unwritten(&self.path, &e)
        })
    }

    fn temporary(&self) -> PathBuf {
        let mut name = OsString::from(".");
        name.push(self.place.file_name().unwrap_or_default());
        name.push(format!(".{}.tmp", std::process::id()));
        self.place.with_file_name(name)
    }
}

fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().write(true).create(true).truncate(true).open(path)
}

fn unwritten(path: &Path, error: &io::Error) -> Error {
    Error::io(format!("cannot write {}: {error}", path.display()))
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    #[test]
    fn nothing_is_there_before_it_is_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("picture");
        let file = WholeFile::new(&path).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
        for content in ["one", "another"] {
            file.write(content.as_bytes()).unwrap();
            assert_eq!(fs::read_to_string(&path).unwrap(), content);
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_link_stays_a_link_and_a_device_a_device() {
        let folder = tempfile::tempdir().unwrap();
        let (real, link) = (folder.path().join("real"), folder.path().join("link"));
        fs::write(&real, "old").unwrap();
        symlink(&real, &link).unwrap();
        WholeFile::new(&link).unwrap().write(b"new").unwrap();
        assert_eq!(fs::read_to_string(&real).unwrap(), "new");
        assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
        WholeFile::new(Path::new("/dev/null")).unwrap().write(b"x").unwrap();
        assert!(!fs::metadata("/dev/null").unwrap().is_file());
    }

    #[test]
    fn a_place_that_cannot_be_written_is_refused_before_the_work() {
        let folder = tempfile::tempdir().unwrap();
        for path in [folder.path().to_owned(), folder.path().join("missing/file"), PathBuf::from(""), "/".into()] {
            let error = WholeFile::new(&path).unwrap_err();
            assert!(error.message().starts_with("cannot write"), "{error}");
        }
    }
}
