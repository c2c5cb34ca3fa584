//! Logits as a safetensors file, written row by row: larger than memory if need be, under its name only when complete.

use std::fs::{self, File, OpenOptions};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};
use std::process;

use serde_json::json;

use crate::error::{Error, Result};

const BUFFER_BYTES: usize = 1 << 20;

/// A file in the making.
pub(super) struct LogitsFile {
    out: BufWriter<File>,
    /// What the user named.
    target: PathBuf,
    /// Where the bytes go until they are complete; `None` for a device or a pipe, which is written in place.
    temporary: Option<Temporary>,
    /// One row's bytes.
    row: Vec<u8>,
    rows_left: usize,
}

impl LogitsFile {
    /// Begins the file for `ids` and rows of `vocab_size` logits.
    ///
    /// # Errors
    /// Kind `Usage` for a path that cannot be written, `Io` for a disk that is full.
    pub(super) fn create(target: &Path, ids: &[u32], vocab_size: usize) -> Result<Self> {
        let refuse = |error: io::Error| Error::usage(format!("{}: cannot be written: {error}", target.display()));
        // The file that a link leads to is replaced, not the link.
        let place = fs::canonicalize(target).unwrap_or_else(|_| target.to_owned());
        let (file, temporary) = match fs::metadata(&place) {
            Ok(found) if found.is_dir() => {
                return Err(Error::usage(format!("{}: is a directory", target.display()))
                    .hint("-o takes the file to write, e.g. logits.safetensors"));
            }
            Ok(found) if !found.is_file() => (OpenOptions::new().write(true).open(&place).map_err(refuse)?, None),
            _ => {
                let (file, temporary) = Temporary::create(&place).map_err(refuse)?;
                (file, Some(temporary))
            }
        };
        let out = BufWriter::with_capacity(BUFFER_BYTES, file);
        let mut this = Self { out, target: target.to_owned(), temporary, row: Vec::new(), rows_left: ids.len() };
        let mut head = header(ids.len() as u64, vocab_size as u64);
        head.extend(ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()));
        this.out.write_all(&head).map_err(|error| this.failed(&error))?;
        Ok(this)
    }

    /// Appends the `logits` `[vocab]` of the next position.
    ///
    /// # Errors
    /// Kind `Io`.
    pub(super) fn row(&mut self, logits: &[f32]) -> Result<()> {
        self.row.clear();
        self.row.extend(logits.iter().flat_map(|logit| logit.to_le_bytes()));
        self.out.write_all(&self.row).map_err(|error| self.failed(&error))?;
        self.rows_left = self.rows_left.saturating_sub(1);
        Ok(())
    }

    /// Makes what was written durable and gives it its name.
    ///
    /// # Errors
    /// Kind `Io`; then the name still means what it meant before.
    pub(super) fn finish(mut self) -> Result<()> {
        debug_assert_eq!(self.rows_left, 0, "every position has a row");
        self.out.flush().map_err(|error| self.failed(&error))?;
        if let Some(temporary) = self.temporary.take() {
            self.out.get_ref().sync_all().and_then(|()| temporary.rename()).map_err(|error| self.failed(&error))?;
        }
        Ok(())
    }

    fn failed(&self, error: &io::Error) -> Error {
        Error::io(format!("{}: cannot be written: {error}", self.target.display()))
    }
}

/// The length, then the header as JSON, filled up with spaces so that the tensors begin at a multiple of 8.
fn header(tokens: u64, vocab_size: u64) -> Vec<u8> {
    let ids_end = tokens * size_of::<i64>() as u64;
    let end = ids_end + tokens * vocab_size * size_of::<f32>() as u64;
    let mut json = json!({
        "ids": { "dtype": "I64", "shape": [tokens], "data_offsets": [0, ids_end] },
        "logits": { "dtype": "F32", "shape": [tokens, vocab_size], "data_offsets": [ids_end, end] },
    })
    .to_string();
    while !json.len().is_multiple_of(8) {
        json.push(' ');
    }
    let mut header = (json.len() as u64).to_le_bytes().to_vec();
    header.extend(json.into_bytes());
    header
}

/// A file beside its target; removed unless it takes the target's name.
struct Temporary {
    path: PathBuf,
    target: PathBuf,
}

impl Temporary {
    fn create(target: &Path) -> io::Result<(File, Self)> {
        let Some(name) = target.file_name() else {
            return Err(io::Error::new(io::ErrorKind::InvalidInput, "the path has no file name"));
        };
        let mut temporary_name = std::ffi::OsString::from(".");
        temporary_name.push(name);
        temporary_name.push(format!(".{}.part", process::id()));
        let path = target.with_file_name(temporary_name);
        let file = OpenOptions::new().write(true).create_new(true).open(&path)?;
        Ok((file, Self { path, target: target.to_owned() }))
    }

    fn rename(self) -> io::Result<()> {
        fs::rename(&self.path, &self.target)
    }
}

impl Drop for Temporary {
    fn drop(&mut self) {
        // After a rename there is nothing left to remove.
        let _ = fs::remove_file(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use safetensors::SafeTensors;

    use super::*;
    use crate::error::Kind;

    fn write(path: &Path) -> Result<()> {
        let mut file = LogitsFile::create(path, &[7, 8], 3)?;
        file.row(&[0.5, -1.0, 2.0])?;
        file.row(&[1.5, 0.0, f32::MIN_POSITIVE])?;
        file.finish()
    }

    fn names(dir: &Path) -> Vec<String> {
        fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect()
    }

    #[test]
    fn the_file_is_safetensors_and_replaces_an_older_one() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("l.safetensors");
        fs::write(&path, "old").unwrap();
        write(&path).unwrap();
        let bytes = fs::read(&path).unwrap();
        let tensors = SafeTensors::deserialize(&bytes).unwrap();
        let logits = tensors.tensor("logits").unwrap();
        assert_eq!(logits.shape(), [2, 3]);
        let first: Vec<u8> = [0.5f32, -1.0, 2.0].iter().flat_map(|logit| logit.to_le_bytes()).collect();
        assert_eq!(logits.data()[..12], first);
        let ids = tensors.tensor("ids").unwrap();
        assert_eq!((ids.shape(), &ids.data()[8..]), (&[2][..], &8i64.to_le_bytes()[..]));
        assert_eq!(names(dir.path()), ["l.safetensors"]);
    }

    #[test]
    fn a_file_that_is_not_finished_leaves_nothing_behind() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("l.safetensors");
        fs::write(&path, "old").unwrap();
        let mut file = LogitsFile::create(&path, &[7, 8], 3).unwrap();
        file.row(&[0.5, -1.0, 2.0]).unwrap();
        drop(file);
        assert_eq!(names(dir.path()), ["l.safetensors"]);
        assert_eq!(fs::read(&path).unwrap(), b"old");
    }

    #[test]
    fn a_path_that_cannot_be_written_is_refused_at_once() {
        let dir = tempfile::tempdir().unwrap();
        for path in [dir.path().to_owned(), dir.path().join("absent/l.safetensors"), PathBuf::new()] {
            let error = LogitsFile::create(&path, &[1], 1).err().expect("refused");
            assert_eq!(error.kind(), Kind::Usage, "{error}");
        }
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_an_io_error_and_a_device_stays_one() {
        let error = write(Path::new("/dev/full")).unwrap_err();
        assert_eq!(error.kind(), Kind::Io);
        assert!(!fs::metadata("/dev/full").unwrap().is_file());
    }

    #[test]
    fn sizes_beyond_4_gib_fit_the_header() {
        let header = String::from_utf8(header(100_000, 163_840)[8..].to_vec()).unwrap();
        assert!(header.contains("[800000,65536800000]"), "{header}");
        assert!(header.len().is_multiple_of(8));
    }
}
