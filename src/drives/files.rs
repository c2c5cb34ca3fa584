//! What is read on a drive: large files that lie there anyway, or one that is made for it and removed again.

use std::fs::{self, File, OpenOptions};
use std::io::Write;
use std::path::{Path, PathBuf};

use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::store::ALIGN;
use crate::synth::rng::Rng;
use crate::synth::space;

/// Files of a root that are read at most; more would only cost descriptors.
const FILES_MAX: usize = 192;
/// Entries that are looked at to find them.
const ENTRIES_MAX: usize = 200_000;
const DEPTH_MAX: usize = 4;
/// Less than this, in all, would be read from the drive's own memory.
const BYTES_MIN: u64 = 1 << 30;
/// Bytes of the file that is made where there is too little, and the part of the free space it may take.
const MADE_BYTES: u64 = 2 << 30;
const MADE_SHARE: u64 = 8;
const BLOCK_BYTES: usize = 4 << 20;

const MADE_PREFIX: &str = ".deltafin-drives-";

/// Files to read on a root.
pub(super) struct Found {
    /// Paths and lengths, whole pages.
    pub files: Vec<(PathBuf, u64)>,
    /// The file that was made, removed when this is dropped.
    pub made: Option<Made>,
}

/// A file that is removed when this is dropped.
pub(super) struct Made(PathBuf);

impl Drop for Made {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

/// Finds files under `root` of which reads of `size` bytes can be taken, or makes one.
///
/// # Errors
/// Kind `Usage` for a root that is no directory or cannot be read, `Io` when no file can be made; an interrupt.
pub(super) fn find(root: &Path, size: u64, interrupt: &Interrupt) -> Result<Found> {
    let refused = |cause: std::io::Error| Error::usage(format!("{}: {cause}", root.display()));
    if !fs::metadata(root).map_err(refused)?.is_dir() {
        return Err(
            Error::usage(format!("{}: not a directory", root.display())).hint("give directories, one on each drive")
        );
    }
    remove_left_behind(root);
    let mut files = Vec::new();
    let mut folders = vec![(root.to_path_buf(), 0)];
    let mut seen = 0;
    while let Some((folder, depth)) = folders.pop() {
        let entries = match fs::read_dir(&folder) {
            Ok(entries) => entries,
            Err(cause) if depth == 0 => return Err(refused(cause)),
            Err(_) => continue, // a folder of somebody else's
        };
        for entry in entries.flatten() {
            seen += 1;
            if seen > ENTRIES_MAX {
                break;
            }
            // Links may lead to another drive.
            let Ok(kind) = entry.file_type() else { continue };
            if kind.is_dir() && depth < DEPTH_MAX {
                folders.push((entry.path(), depth + 1));
            } else if kind.is_file()
                && let Ok(metadata) = entry.metadata()
                && metadata.len() >= size
                && is_filled(&metadata)
            {
                files.push((entry.path(), metadata.len()));
            }
        }
    }
    // The largest, in the order of their names: the same on each call.
    files.sort_by(|a, b| b.1.cmp(&a.1).then_with(|| a.0.cmp(&b.0)));
    files.truncate(FILES_MAX);
    files.retain(|(path, _)| File::open(path).is_ok());
    if files.iter().map(|(_, bytes)| bytes).sum::<u64>() >= BYTES_MIN.max(4 * size) {
        return Ok(Found { files, made: None });
    }
    let (made, bytes) = make(root, size, interrupt)?;
    let path = made.0.clone();
    Ok(Found { files: vec![(path, bytes)], made: Some(made) })
}

/// A hole is read at the speed of memory.
fn is_filled(metadata: &fs::Metadata) -> bool {
    use std::os::unix::fs::MetadataExt;
    metadata.blocks() * 512 >= metadata.len() / 10 * 9
}

/// Writes a file of random bytes on the drive.
fn make(root: &Path, size: u64, interrupt: &Interrupt) -> Result<(Made, u64)> {
    let free = space::available(root)
        .map_err(|cause| Error::io(format!("cannot ask for the free space of {}: {cause}", root.display())))?;
    let bytes = MADE_BYTES.min(free / MADE_SHARE) / BLOCK_BYTES as u64 * BLOCK_BYTES as u64;
    if bytes < 4 * size.max(BLOCK_BYTES as u64) {
        return Err(Error::io(format!(
            "{}: no large files to read, and {free} bytes are free, too few to make one",
            root.display()
        ))
        .hint("give a directory with the model's shards or packed experts, or lower --size"));
    }
    let path = root.join(format!("{MADE_PREFIX}{}", std::process::id()));
    let failed = |cause| Error::io(format!("{}: cannot be written: {cause}", path.display()));
    let mut file = OpenOptions::new().write(true).create(true).truncate(true).open(&path).map_err(failed)?;
    let made = Made(path.clone());
    let mut rng = Rng::new(bytes);
    let mut block = vec![0; BLOCK_BYTES];
    for word in block.as_chunks_mut::<8>().0 {
        *word = rng.bits().to_le_bytes();
    }
    for number in 0..bytes / BLOCK_BYTES as u64 {
        interrupt.check()?;
        // Each block differs, in case the drive stores equal ones once.
        for page in block.chunks_exact_mut(ALIGN) {
            page[..8].copy_from_slice(&(number ^ rng.bits()).to_le_bytes());
        }
        file.write_all(&block).map_err(failed)?;
    }
    file.sync_all().map_err(failed)?;
    Ok((made, bytes))
}

/// Removes what a killed process made.
fn remove_left_behind(root: &Path) {
    for entry in fs::read_dir(root).into_iter().flatten().flatten() {
        let name = entry.file_name();
        let Some(process) = name.to_str().and_then(|name| name.strip_prefix(MADE_PREFIX)) else { continue };
        let is_dead = cfg!(target_os = "linux") && !Path::new("/proc").join(process).exists();
        if process.parse::<u32>().is_ok() && is_dead {
            let _ = fs::remove_file(entry.path());
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_made_where_there_is_none_and_removed() {
        let dir = tempfile::tempdir().unwrap();
        let found = find(dir.path(), 4096, &Interrupt::new()).unwrap();
        assert_eq!(found.files.len(), 1);
        assert_eq!(fs::metadata(&found.files[0].0).unwrap().len(), found.files[0].1);
        drop(found);
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn an_interrupt_leaves_no_file() {
        let dir = tempfile::tempdir().unwrap();
        let interrupt = Interrupt::new();
        interrupt.raise(2);
        assert!(find(dir.path(), 4096, &interrupt).is_err());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    #[cfg(target_os = "linux")]
    fn what_a_killed_process_left_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let left = dir.path().join(format!("{MADE_PREFIX}4000000000"));
        fs::write(&left, b"x").unwrap();
        let other = dir.path().join(format!("{MADE_PREFIX}notes"));
        fs::write(&other, b"x").unwrap();
        remove_left_behind(dir.path());
        assert!(!left.exists() && other.exists());
    }

    #[test]
    fn what_is_no_directory_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("file");
        fs::write(&file, b"x").unwrap();
        for path in [file, dir.path().join("absent")] {
            let error = find(&path, 4096, &Interrupt::new()).err().unwrap();
            assert!(error.message().contains(path.to_str().unwrap()), "{error}");
        }
    }
}
