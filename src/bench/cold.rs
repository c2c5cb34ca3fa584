//! A cold start: nothing of the experts in the cache, nothing of the model's files in the page cache.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use super::measure::settle;
use crate::checkpoint::Manifest;
use crate::engine::Engine;
use crate::store::{Disk, System};

/// Directories below a root of packed experts that are looked into.
const ROOT_DEPTH: usize = 3;

/// The files that experts are read from: the model's shards, and everything below the roots of packed experts.
pub(super) fn files(manifest: &Manifest, roots: &[PathBuf]) -> Vec<PathBuf> {
    let mut files = manifest.shards.clone();
    roots.iter().for_each(|root| collect(root, ROOT_DEPTH, &mut files));
    files
}

fn collect(dir: &Path, depth: usize, files: &mut Vec<PathBuf>) {
    for entry in fs::read_dir(dir).into_iter().flatten().flatten() {
        match entry.file_type() {
            Ok(kind) if kind.is_dir() && depth > 0 => collect(&entry.path(), depth - 1, files),
            Ok(kind) if kind.is_file() => files.push(entry.path()),
            _ => {}
        }
    }
}

/// Empties the expert cache and asks the system to drop `files`. What another process holds mapped stays, and so does
/// everything where the system has no such call (macOS).
pub(super) fn make_cold(engine: &Engine, files: &[PathBuf]) {
    settle(engine);
    engine.clear_experts();
    for path in files.iter().take_while(|_| !engine.machine().interrupt.is_raised()) {
        // Pages that are not on the drive yet cannot be dropped.
        if let Ok(file) = File::open(path) {
            let _ = file.sync_data();
        }
        if let Ok(file) = System.open(path, false) {
            file.forget(0, 0); // a length of 0 is the whole file
        }
    }
}
