//! Small files that are either whole or refused: a magic number with the version, a payload, a checksum. They are replaced
//! in one step, so that a crash leaves the old file or the new one.

use std::ffi::OsString;
use std::fs::{self, File, OpenOptions};
use std::io::{ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::{Error, Result};

/// What a file starts with: its kind, and the version as the last byte.
pub(crate) type Magic = [u8; 8];

/// Magic and checksum.
const FRAME_BYTES: usize = 16;

/// The payload of the file at `path`, at most `payload_max` bytes; `None` when there is no such file.
///
/// # Errors
/// Why the file is no good, as a phrase that follows its name.
pub(crate) fn read(path: &Path, magic: Magic, payload_max: usize) -> Result<Option<Vec<u8>>, String> {
    let metadata = match fs::metadata(path) {
        Ok(metadata) => metadata,
        Err(error) if matches!(error.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => return Ok(None),
        Err(error) => return Err(format!("cannot be read: {error}")),
    };
    // Asked before it is opened: opening a pipe would wait for a writer.
    if !metadata.is_file() {
        return Err("is no regular file".to_owned());
    }
    let bytes_max = payload_max.saturating_add(FRAME_BYTES);
    let mut bytes = Vec::new();
    // One byte more than allowed tells a file that is too long, whatever its metadata say.
    let limit = (bytes_max as u64).saturating_add(1);
    let read = File::open(path).and_then(|file| file.take(limit).read_to_end(&mut bytes));
    read.map_err(|error| format!("cannot be read: {error}"))?;
    if !bytes.starts_with(&magic[..7]) {
        return Err("is of another kind".to_owned());
    }
    if bytes.get(7) != Some(&magic[7]) {
        return Err(format!("has version {}, expected {}", bytes.get(7).map_or(0, |byte| *byte), magic[7]));
    }
    if bytes.len() < FRAME_BYTES || bytes.len() > bytes_max {
        return Err(format!("is damaged: {} bytes, expected {FRAME_BYTES} to {bytes_max}", bytes.len()));
    }
    let (content, stored) = bytes.split_at(bytes.len() - 8);
    if checksum(content).to_le_bytes() != stored {
        return Err("is damaged: its checksum does not match".to_owned());
    }
    bytes.truncate(bytes.len() - 8);
    bytes.drain(..magic.len());
    Ok(Some(bytes))
}

/// Replaces the file at `path`. A file of another kind is left alone.
///
/// # Errors
/// Kind `Io` when a step fails, or when there is something else at `path`; what was there is then still there.
pub(crate) fn write(path: &Path, magic: Magic, payload: &[u8]) -> Result<()> {
    refuse_other_kind(path, magic)?;
    let mut bytes = Vec::with_capacity(payload.len() + FRAME_BYTES);
    bytes.extend_from_slice(&magic);
    bytes.extend_from_slice(payload);
    bytes.extend_from_slice(&checksum(&bytes).to_le_bytes());
    let temporary = temporary_name(path);
    let written = write_through(&temporary, &bytes).and_then(|()| fs::rename(&temporary, path));
    if let Err(error) = written {
        // It may not exist; and the first failure is the one to tell.
        let _ = fs::remove_file(&temporary);
        return Err(Error::io(format!("cannot write {}: {error}", path.display())));
    }
    sync_directory(path);
    Ok(())
}

fn refuse_other_kind(path: &Path, magic: Magic) -> Result<()> {
    let refuse = |what: &str| {
        let message = format!("cannot write {}: there is {what} of that name", path.display());
        Err(Error::io(message).hint("give another path"))
    };
    match fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => refuse("something other than a file"),
        Ok(metadata) if metadata.len() > 0 => {
            let mut start = [0; 7];
            match File::open(path).and_then(|mut file| file.read_exact(&mut start)) {
                Ok(()) if start == magic[..7] => Ok(()),
                _ => refuse("a file of another kind"),
            }
        }
        _ => Ok(()),
    }
}

/// Beside `path`, because a rename replaces only within a file system; unlike that of any other writer.
fn temporary_name(path: &Path) -> PathBuf {
    static NUMBER: AtomicU32 = AtomicU32::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let mut name = OsString::from(".");
    name.push(path.file_name().unwrap_or_default());
    name.push(format!(".{}.{number}.tmp", std::process::id()));
    path.with_file_name(name)
}

fn write_through(path: &Path, bytes: &[u8]) -> std::io::Result<()> {
    let mut file = OpenOptions::new().write(true).create_new(true).open(path)?;
    file.write_all(bytes)?;
    file.sync_all()
}

/// Makes the rename last. Where directories cannot be synced, the file is whole all the same.
fn sync_directory(path: &Path) {
    let parent = path.parent().filter(|parent| !parent.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let _ = File::open(parent).and_then(|directory| directory.sync_all());
}

/// FNV-1a, 64 bits: against damage, not against intent.
pub(crate) fn checksum(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

#[cfg(test)]
mod tests {
    use super::*;

    const MAGIC: Magic = *b"DFTEST_\x01";

    #[test]
    fn what_is_written_is_read_and_nothing_else_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        assert_eq!(read(&path, MAGIC, 10), Ok(None));
        for payload in [&b"first"[..], b"", b"second"] {
            write(&path, MAGIC, payload).unwrap();
            assert_eq!(read(&path, MAGIC, 10), Ok(Some(payload.to_vec())));
        }
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn every_cut_and_every_changed_byte_is_found() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        write(&path, MAGIC, b"payload").unwrap();
        let whole = fs::read(&path).unwrap();
        for at in 0..whole.len() {
            fs::write(&path, &whole[..at]).unwrap();
            assert!(read(&path, MAGIC, 10).is_err(), "cut to {at}");
            let mut changed = whole.clone();
            changed[at] ^= 0x10;
            fs::write(&path, &changed).unwrap();
            assert!(read(&path, MAGIC, 10).is_err(), "byte {at}");
        }
        fs::write(&path, [&whole[..], b"x"].concat()).unwrap();
        assert!(read(&path, MAGIC, 10).is_err(), "a byte more");
        fs::write(&path, &whole).unwrap();
        assert!(read(&path, MAGIC, 6).unwrap_err().contains("damaged"), "longer than allowed");
        assert!(read(&path, *b"DFTEST_\x02", 10).unwrap_err().contains("version 1, expected 2"));
    }

    #[test]
    fn a_file_of_another_kind_is_neither_read_nor_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("letter");
        fs::write(&path, "dear reader").unwrap();
        assert_eq!(read(&path, MAGIC, 100), Err("is of another kind".to_owned()));
        assert!(write(&path, MAGIC, b"payload").is_err());
        assert_eq!(fs::read(&path).unwrap(), b"dear reader");
        assert!(read(folder.path(), MAGIC, 100).unwrap_err().contains("regular"));
        assert!(write(folder.path(), MAGIC, b"payload").is_err());
    }

    #[test]
    fn a_failed_write_leaves_the_old_file_and_no_litter() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("missing").join("file");
        assert!(write(&path, MAGIC, b"payload").unwrap_err().message().contains("cannot write"));
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}
