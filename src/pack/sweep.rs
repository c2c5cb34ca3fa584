//! Removes what no list names: files under a temporary name, and experts that an earlier plan or a killed process left.

use std::fs;
use std::io;
use std::path::Path;

use super::files::TEMPORARY;
use crate::error::{Error, Result};
use crate::store::ExpertId;
use crate::store::packed::{LIST_FILE, List, extension};

/// Goes through the layers of `root`, which this process alone writes to. Experts that are neither listed nor meant for
/// this root are removed where there was a list before (`ours`): without one they may be somebody else's.
///
/// # Errors
/// Kind `Io` when a directory cannot be read or a file not be removed.
pub(super) fn sweep(root: &Path, list: &List, parts: usize, ours: bool) -> Result<()> {
    for (name, path) in entries(root)? {
        if let Some(layer) = name.strip_prefix('L').and_then(number) {
            let dir = path;
            if !dir.symlink_metadata().is_ok_and(|meta| meta.is_dir()) {
                continue;
            }
            for (name, path) in entries(&dir)? {
                let expert = name
                    .strip_prefix('E')
                    .and_then(|name| number(name.strip_suffix(extension(parts))?.strip_suffix('.')?));
                let stray = expert.is_some_and(|expert| {
                    let id = ExpertId { layer, expert };
                    ours && !list.experts.contains_key(&id) && list.share.experts.binary_search(&id).is_err()
                });
                if stray || is_temporary(&name) {
                    remove(&path)?;
                }
            }
            if ours {
                // A layer that went elsewhere; a directory that is not empty stays.
                let _ = fs::remove_dir(&dir);
            }
        } else if is_temporary(&name) || (name.starts_with(&format!(".{LIST_FILE}.")) && name.ends_with(".tmp")) {
            remove(&path)?;
        }
    }
    Ok(())
}

fn is_temporary(name: &str) -> bool {
    name.starts_with('.') && name.ends_with(TEMPORARY)
}

/// A layer's or expert's number, as files have it: three digits or more.
fn number(digits: &str) -> Option<u16> {
    let plain = digits.len() >= 3 && digits.bytes().all(|byte| byte.is_ascii_digit());
    if plain { digits.parse().ok() } else { None }
}

fn entries(dir: &Path) -> Result<Vec<(String, std::path::PathBuf)>> {
    let unreadable = |e: io::Error| Error::io(format!("cannot read {}: {e}", dir.display()));
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(unreadable)? {
        let entry = entry.map_err(unreadable)?;
        if let Ok(name) = entry.file_name().into_string() {
            found.push((name, entry.path()));
        }
    }
    Ok(found)
}

fn remove(path: &Path) -> Result<()> {
    match fs::remove_file(path) {
        Err(e) if e.kind() != io::ErrorKind::NotFound => {
            Err(Error::io(format!("cannot remove {}: {e}", path.display())))
        }
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::packed::Share;

    #[test]
    fn only_what_pack_wrote_and_no_list_names_is_removed() {
        let dir = tempfile::tempdir().unwrap();
        let id = |layer, expert| ExpertId { layer, expert };
        let mut list = List::new(Share { plan: 0, number: 0, roots: 1, replicas: 1, experts: vec![id(1, 2)] });
        list.experts.insert(id(1, 3), 0);
        let kept = [
            "notes.txt",
            "L001/E0002.mxfp4",
            "L001/E0003.mxfp4",
            "L001/E0004.bf16",
            "L001/my.mxfp4",
            "L01/E0004.mxfp4",
            ".profile",
        ];
        let swept =
            ["L001/E0004.mxfp4", "L001/.E0002.mxfp4.pack-tmp", ".experts.list.12.0.tmp", ".trunk.bf16.pack-tmp"];
        for ours in [false, true] {
            for name in kept.iter().chain(&swept) {
                let path = dir.path().join(name);
                fs::create_dir_all(path.parent().unwrap()).unwrap();
                fs::write(path, "x").unwrap();
            }
            fs::create_dir_all(dir.path().join("L007")).unwrap();
            sweep(dir.path(), &list, 6, ours).unwrap();
            assert!(kept.iter().all(|name| dir.path().join(name).exists()));
            for (number, name) in swept.iter().enumerate() {
                assert_eq!(dir.path().join(name).exists(), number == 0 && !ours, "{name}");
            }
            assert_eq!(dir.path().join("L007").exists(), !ours);
        }
    }
}
