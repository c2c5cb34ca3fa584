//! The directory of a synthetic model: whose it is, what of it is there, and files that appear whole or not at all.
//!
//! `synth.json` holds the recipe from the start and is locked while a process writes; the index comes last, and
//! without an index a directory is no checkpoint.

use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use super::recipe::Recipe;
use super::shard::failed;
use super::space;
use crate::error::{Error, Result};
use crate::plan::{at_least, at_most};

const RECIPE_FILE: &str = "synth.json";
/// As all readers know it.
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";
/// Ends the name of what is not whole yet.
const TEMPORARY: &str = ".synth-tmp";
/// No recipe is longer.
const RECIPE_BYTES_MAX: u64 = 64 << 10;

/// Who owns a directory that may be written to.
#[derive(Debug, PartialEq, Eq)]
enum Owner {
    /// Nobody: it is not there, or empty.
    Nobody,
    /// The same recipe.
    Us,
}

/// Refuses a directory that holds anything but a model of this recipe, or the beginnings of one.
///
/// # Errors
/// Kind `Usage`: no directory, something else in it, another recipe. Kind `Io` when it cannot be read.
pub(super) fn check(dir: &Path, recipe: &Recipe) -> Result<()> {
    owner(dir, recipe).map(drop)
}

fn owner(dir: &Path, recipe: &Recipe) -> Result<Owner> {
    let entries = match fs::read_dir(dir) {
        Ok(entries) => entries,
        // A link that leads nowhere is not nothing.
        Err(e) if e.kind() == io::ErrorKind::NotFound && dir.symlink_metadata().is_err() => return Ok(Owner::Nobody),
        Err(e) if e.kind() == io::ErrorKind::NotADirectory => {
            return Err(Error::usage(format!("{} is not a directory", dir.display())));
        }
        Err(e) => return Err(Error::io(format!("cannot read {}: {e}", dir.display()))),
    };
    let mut others = 0;
    for entry in entries {
        let entry = entry.map_err(|e| Error::io(format!("cannot read {}: {e}", dir.display())))?;
        others += usize::from(entry.file_name() != RECIPE_FILE);
    }
    let path = dir.join(RECIPE_FILE);
    // Asked before it is opened: opening a pipe would wait for a writer.
    if fs::metadata(&path).is_ok_and(|found| !found.is_file()) {
        return Err(Error::usage(format!("{} is no regular file", path.display()))
            .hint("choose a directory that is empty or does not exist yet"));
    }
    let mut text = String::new();
    match File::open(&path) {
        Ok(file) => file
            .take(RECIPE_BYTES_MAX)
            .read_to_string(&mut text)
            .map(drop)
            .map_err(|e| Error::io(format!("cannot read {}: {e}", path.display())))?,
        Err(e) if e.kind() == io::ErrorKind::NotFound => {}
        Err(e) => return Err(Error::io(format!("cannot read {}: {e}", path.display()))),
    }
    match serde_json::from_str::<Recipe>(&text) {
        Ok(found) if found == *recipe => Ok(Owner::Us),
        Ok(_) => Err(Error::usage(format!("{} holds a synthetic model of other parameters", dir.display()))
            .hint(format!("{} says which; choose another directory, or remove this one", path.display()))),
        // Killed before the recipe was written.
        Err(_) if others == 0 && text.is_empty() => Ok(Owner::Nobody),
        Err(_) => Err(Error::usage(format!("{} is not empty", dir.display()))
            .hint("choose a directory that is empty or does not exist yet")),
    }
}

/// A directory that this process alone writes to, until dropped.
pub(super) struct Claimed {
    dir: PathBuf,
    _lock: File,
}

/// Makes `dir` where it is not there, locks it and leaves the recipe in it.
///
/// # Errors
/// As [`check`]; kind `Io` when another process writes there, or the system refuses.
pub(super) fn claim(dir: &Path, recipe: &Recipe) -> Result<Claimed> {
    let owner = owner(dir, recipe)?;
    fs::create_dir_all(dir).map_err(|e| Error::io(format!("cannot create {}: {e}", dir.display())))?;
    let path = dir.join(RECIPE_FILE);
    let mut file =
        OpenOptions::new().read(true).append(true).create(true).open(&path).map_err(|e| failed(&path, &e))?;
    match file.try_lock() {
        Ok(()) => {}
        Err(TryLockError::WouldBlock) => {
            return Err(Error::io(format!("another process is writing to {}", dir.display()))
                .hint("wait until it is done, or choose another directory"));
        }
        // Without locks, writing twice at once is on the user.
        Err(TryLockError::Error(e)) if e.kind() == io::ErrorKind::Unsupported => {}
        Err(TryLockError::Error(e)) => return Err(Error::io(format!("cannot lock {}: {e}", path.display()))),
    }
    // Whoever held the lock before may have begun something in the meantime.
    if owner != self::owner(dir, recipe)? {
        return Err(Error::io(format!("another process has written to {}", dir.display())).hint("run it again"));
    }
    if owner == Owner::Nobody {
        let text = serde_json::to_string_pretty(recipe).map_err(|e| Error::other(e.to_string()))? + "\n";
        file.write_all(text.as_bytes()).and_then(|()| file.sync_all()).map_err(|e| failed(&path, &e))?;
    }
    let claimed = Claimed { dir: dir.to_owned(), _lock: file };
    claimed.remove_temporaries()?;
    Ok(claimed)
}

impl Claimed {
    /// What `name` is called while it is written.
    pub(super) fn temporary(&self, name: &str) -> PathBuf {
        self.dir.join(format!(".{name}{TEMPORARY}"))
    }

    /// Writes `name` so that it is there whole or not at all.
    pub(super) fn write(&self, name: &str, write: impl FnOnce(&mut dyn Write) -> io::Result<()>) -> Result<()> {
        let (path, temporary) = (self.dir.join(name), self.temporary(name));
        let written = File::create(&temporary).and_then(|file| {
            let mut out = BufWriter::with_capacity(1 << 20, file);
            write(&mut out)?;
            out.flush()?;
            out.get_ref().sync_all()?;
            fs::rename(&temporary, &path)
        });
        written.map_err(|e| {
            let _ = fs::remove_file(&temporary);
            failed(&path, &e)
        })
    }

    /// Takes the index away: from here on the directory is no checkpoint.
    pub(super) fn remove_index(&self) -> Result<()> {
        let path = self.dir.join(INDEX_FILE);
        match fs::remove_file(&path) {
            Ok(()) => self.sync(),
            Err(e) if e.kind() == io::ErrorKind::NotFound => Ok(()),
            Err(e) => Err(Error::io(format!("cannot remove {}: {e}", path.display()))),
        }
    }

    /// Makes all names so far last.
    pub(super) fn sync(&self) -> Result<()> {
        File::open(&self.dir).and_then(|dir| dir.sync_all()).map_err(|e| failed(&self.dir, &e))
    }

    /// What a killed process left behind.
    fn remove_temporaries(&self) -> Result<()> {
        let unreadable = |e: io::Error| Error::io(format!("cannot read {}: {e}", self.dir.display()));
        for entry in fs::read_dir(&self.dir).map_err(unreadable)? {
            let entry = entry.map_err(unreadable)?;
            let name = entry.file_name();
            if name.to_str().is_some_and(|name| name.starts_with('.') && name.ends_with(TEMPORARY)) {
                let path = entry.path();
                fs::remove_file(&path).map_err(|e| Error::io(format!("cannot remove {}: {e}", path.display())))?;
            }
        }
        Ok(())
    }
}

/// Refuses to begin what the file system of `dir`, or of the first directory above that exists, has no room for.
///
/// # Errors
/// Kind `Io` with both sizes.
pub(super) fn check_space(dir: &Path, needed: u64) -> Result<()> {
    let absolute = std::path::absolute(dir).map_err(|e| Error::io(format!("cannot find {}: {e}", dir.display())))?;
    let there = absolute.ancestors().find(|path| path.exists()).unwrap_or(Path::new("/"));
    let available = space::available(there)
        .map_err(|e| Error::io(format!("cannot tell the free space of {}: {e}", there.display())))?;
    if available < needed {
        let (needed, available) = (at_least(needed), at_most(available));
        return Err(Error::io(format!("{} needs {needed}, but {available} are free there", dir.display()))
            .hint("fewer --experts or --layers, or another drive; --sparse writes headers only"));
    }
    Ok(())
}
