//! Files beneath a directory that are worth reading to measure its drive: packed experts and shards, with data in them.

use std::fs::{self, File, Metadata};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};

use rustc_hash::FxHashSet;

use crate::interrupt::Interrupt;
use crate::synth::rng::Rng;

/// Directories are entered so far: `models--ORG--NAME/snapshots/COMMIT/` is three.
const DEPTH_MAX: usize = 4;
/// Directory entries that are looked at, at most: a whole model packed on one root has 82,432 files.
const ENTRIES_MAX: usize = 200_000;
/// Files that are read, at most; of more a sample is taken.
const FILES_MAX: usize = 512;
/// A file is taken for one with holes when less of it than this part is on the drive. Compressing file systems keep
/// expert weights at nearly their size.
const STORED_MIN: f64 = 0.5;
/// Bytes looked at in each of a few places of a file.
const SAMPLE_BYTES: usize = 512;

/// What was found.
#[derive(Debug, Default)]
pub(super) struct Found {
    /// Files with their lengths, by path.
    pub files: Vec<(PathBuf, u64)>,
    /// Files that would be read without the drive: holes, or space that was never written.
    pub hollow: usize,
}

/// Files beneath `root`, on its own file system, of `bytes_min` at least.
///
/// `alive` is called for whatever is looked at.
pub(super) fn find(root: &Path, bytes_min: u64, interrupt: &Interrupt, alive: &dyn Fn()) -> Found {
    let Ok(root_metadata) = fs::metadata(root) else { return Found::default() };
    let mut search = Search {
        device: root_metadata.dev(),
        bytes_min,
        entries_left: ENTRIES_MAX,
        seen: FxHashSet::default(),
        files: Vec::new(),
        interrupt,
        alive,
    };
    search.enter(root, DEPTH_MAX);
    let mut files = search.files;
    files.sort();
    if files.len() > FILES_MAX {
        let mut order = Rng::new(files.len() as u64).permutation(files.len());
        order.truncate(FILES_MAX);
        order.sort_unstable();
        files = order.into_iter().map(|number| files[number].clone()).collect();
    }
    let mut found = Found::default();
    for (path, bytes) in files {
        if interrupt.is_raised() {
            break;
        }
        alive();
        match holds_data(&path, bytes) {
            Some(true) => found.files.push((path, bytes)),
            Some(false) => found.hollow += 1,
            None => {}
        }
    }
    found
}

struct Search<'a> {
    device: u64,
    bytes_min: u64,
    entries_left: usize,
    /// Inodes, so that a file with two names is read once.
    seen: FxHashSet<u64>,
    files: Vec<(PathBuf, u64)>,
    interrupt: &'a Interrupt,
    alive: &'a dyn Fn(),
}

impl Search<'_> {
    fn enter(&mut self, dir: &Path, depth: usize) {
        // What cannot be listed has nothing to read.
        let Ok(entries) = fs::read_dir(dir) else { return };
        for entry in entries.flatten() {
            if self.entries_left == 0 || self.interrupt.is_raised() {
                return;
            }
            self.entries_left -= 1;
            (self.alive)();
            let path = entry.path();
            // Links to files count, since model caches are made of them; links to directories could lead anywhere.
            match entry.file_type() {
                Ok(kind) if kind.is_dir() && depth > 0 => self.enter(&path, depth - 1),
                Ok(kind) if kind.is_dir() => {}
                _ if is_of_a_model(&path) => self.consider(path),
                _ => {}
            }
        }
    }

    fn consider(&mut self, path: PathBuf) {
        let Ok(metadata) = fs::metadata(&path) else { return };
        let fits = metadata.is_file() && metadata.dev() == self.device && metadata.len() >= self.bytes_min;
        if fits && self.seen.insert(metadata.ino()) {
            self.files.push((path, metadata.len()));
        }
    }
}

/// A shard, a packed expert, or a packed trunk; no side file of macOS.
fn is_of_a_model(path: &Path) -> bool {
    let (Some(name), Some(extension)) = (path.file_name(), path.extension()) else { return false };
    let name = name.as_encoded_bytes();
    !name.starts_with(b".") && matches!(extension.to_str(), Some("safetensors" | "mxfp4" | "bf16" | "bf12" | "int8"))
}

/// Whether reading the file reads the drive; `None` when it cannot be read.
fn holds_data(path: &Path, bytes: u64) -> Option<bool> {
    let file = File::open(path).ok()?;
    if stored_bytes(&file.metadata().ok()?) < bytes as f64 * STORED_MIN {
        return Some(false);
    }
    // Space that was set aside and never written reads as zeros, as holes do.
    let mut sample = [0; SAMPLE_BYTES];
    for quarter in 1..4 {
        let read = file.read_at(&mut sample, bytes / 4 * quarter).ok()?;
        if sample[..read].iter().any(|byte| *byte != 0) {
            return Some(true);
        }
    }
    Some(false)
}

fn stored_bytes(metadata: &Metadata) -> f64 {
    // Counted in units of 512 bytes everywhere.
    metadata.blocks() as f64 * 512.0
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn names(found: &Found) -> Vec<String> {
        found.files.iter().map(|(path, _)| path.file_name().unwrap().to_str().unwrap().to_owned()).collect()
    }

    #[test]
    fn shards_and_packed_experts_are_found_once_each_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let root = folder.path();
        let elsewhere = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.join("k3/L001")).unwrap();
        fs::create_dir_all(root.join("1/2/3/4/5")).unwrap();
        let data = vec![7; 20_000];
        for name in [
            "k3/a.safetensors",
            "k3/L001/E0000.mxfp4",
            "k3/._a.safetensors",
            "k3/notes.txt",
            "1/2/3/4/5/deep.safetensors",
            "letter",
        ] {
            fs::write(root.join(name), &data).unwrap();
        }
        fs::write(root.join("small.safetensors"), &data[..100]).unwrap();
        fs::write(elsewhere.path().join("x.safetensors"), &data).unwrap();
        symlink(root.join("k3/a.safetensors"), root.join("link.safetensors")).unwrap();
        symlink(root.join("letter"), root.join("blob.safetensors")).unwrap();
        symlink(elsewhere.path(), root.join("linked-dir")).unwrap();
        symlink("missing", root.join("dangling.safetensors")).unwrap();
        let found = find(root, 10_000, &Interrupt::new(), &|| ());
        let names = names(&found);
        assert_eq!((names.len(), found.hollow), (3, 0), "{names:?}");
        for name in ["E0000.mxfp4", "blob.safetensors"] {
            assert!(names.iter().any(|found| found == name), "{names:?}");
        }
    }

    #[test]
    fn files_without_data_are_counted_and_not_read() {
        let folder = tempfile::tempdir().unwrap();
        File::create(folder.path().join("holes.safetensors")).unwrap().set_len(1 << 24).unwrap();
        fs::write(folder.path().join("zeros.safetensors"), vec![0; 1 << 20]).unwrap();
        fs::write(folder.path().join("data.safetensors"), vec![1; 1 << 20]).unwrap();
        let found = find(folder.path(), 4096, &Interrupt::new(), &|| ());
        assert_eq!((names(&found), found.hollow), (vec!["data.safetensors".to_owned()], 2));
    }

    #[test]
    fn a_directory_that_is_not_there_has_no_files() {
        assert!(find(Path::new("/nonexistent/dir"), 1, &Interrupt::new(), &|| ()).files.is_empty());
    }
}
