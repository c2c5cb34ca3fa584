//! Files into a directory: whole or not at all, whoever else does the same at the same time.

use std::fs::{self, File};
use std::hash::Hasher;
use std::io::{self, ErrorKind, Read, Write};
use std::path::{Path, PathBuf};
use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use rustc_hash::FxHasher;

use super::Embedded;

/// Bytes compared at a time.
const CHUNK: usize = 256 << 10;

/// A name that is another one for other contents.
pub(super) fn directory_name(files: &[Embedded]) -> String {
    let mut hasher = FxHasher::default();
    for file in files {
        hasher.write(file.name.as_bytes());
        hasher.write(file.bytes);
    }
    format!("demo-{:016x}", hasher.finish())
}

/// Makes `directory` hold `files` and returns it. What is there and differs is replaced.
pub(super) fn into(directory: &Path, files: &[Embedded]) -> io::Result<PathBuf> {
    if is_whole(directory, files) {
        return Ok(directory.to_owned());
    }
    let parent = directory.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(parent)?;
    let _one_at_a_time = lock(&with_suffix(directory, ".lock"));
    // Whoever had the lock before may have done it.
    if !is_whole(directory, files) {
        remove_leftovers(directory, parent);
        replace(directory, files)?;
    }
    if is_whole(directory, files) {
        return Ok(directory.to_owned());
    }
    Err(io::Error::other("what is written there does not stay"))
}

/// Held until the file is closed, by the kernel should the process die. Where a file system has no locks two processes
/// may both write, each its own directory, and the renames decide.
fn lock(path: &Path) -> Option<File> {
    let file = File::options().create(true).truncate(false).write(true).open(path).ok()?;
    file.lock().ok()?;
    Some(file)
}

/// Removes what processes that died have left.
fn remove_leftovers(directory: &Path, parent: &Path) {
    let mut prefix = directory.file_name().unwrap_or_default().to_owned();
    prefix.push(".tmp-");
    let leftovers = fs::read_dir(parent).into_iter().flatten().flatten();
    leftovers
        .filter(|entry| entry.file_name().as_encoded_bytes().starts_with(prefix.as_encoded_bytes()))
        .for_each(|entry| drop(Temporary(entry.path())));
}

/// Whether every file is there with its content, and none that would change what is made of them. Links are followed by
/// nobody: a cache holds files.
fn is_whole(directory: &Path, files: &[Embedded]) -> bool {
    fs::symlink_metadata(directory).is_ok_and(|metadata| metadata.is_dir())
        && files.iter().all(|file| holds(&directory.join(file.name), file.bytes).unwrap_or(false))
        && holds_no_more(directory, files).unwrap_or(false)
}

/// Whether nothing is there beside `files` that a model is read from: an index would be believed before the single
/// shard. What a file manager leaves behind (`.DS_Store`, `._config.json`) is never read.
fn holds_no_more(directory: &Path, files: &[Embedded]) -> io::Result<bool> {
    const READ: [&str; 4] = [".json", ".safetensors", ".model", ".jinja"];
    for entry in fs::read_dir(directory)? {
        let name = entry?.file_name();
        let known = files.iter().any(|file| name == file.name);
        let name = name.to_string_lossy();
        if !known && !name.starts_with('.') && READ.iter().any(|ending| name.ends_with(ending)) {
            return Ok(false);
        }
    }
    Ok(true)
}

fn holds(path: &Path, bytes: &[u8]) -> io::Result<bool> {
    let metadata = fs::symlink_metadata(path)?;
    if !metadata.is_file() || metadata.len() != bytes.len() as u64 {
        return Ok(false);
    }
    let mut file = File::open(path)?;
    let mut chunk = vec![0; CHUNK.min(bytes.len())];
    for wanted in bytes.chunks(CHUNK) {
        let got = &mut chunk[..wanted.len()];
        file.read_exact(got)?;
        if got != wanted {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Writes a new directory beside and renames it into place.
fn replace(directory: &Path, files: &[Embedded]) -> io::Result<()> {
    let new = Temporary::new(directory);
    fs::create_dir(&new.0)?;
    for file in files {
        let mut out = File::create_new(new.0.join(file.name))?;
        out.write_all(file.bytes)?;
        // A crash must not leave a directory whose files have their length and no content.
        out.sync_all()?;
    }
    // Only a rename can move what is there out of the way in one go.
    let old = Temporary::new(directory);
    match fs::rename(directory, &old.0) {
        Ok(()) => {}
        Err(error) if error.kind() == ErrorKind::NotFound => {}
        Err(error) => return Err(error),
    }
    fs::rename(&new.0, directory)
}

/// A path beside the target that is removed in the end, whatever it is by then.
struct Temporary(PathBuf);

impl Temporary {
    fn new(directory: &Path) -> Self {
        static COUNT: AtomicU64 = AtomicU64::new(0);
        let count = COUNT.fetch_add(1, Ordering::Relaxed);
        Self(with_suffix(directory, &format!(".tmp-{}-{count}", process::id())))
    }
}

/// A path beside `directory`, with a longer name.
fn with_suffix(directory: &Path, suffix: &str) -> PathBuf {
    let mut name = directory.file_name().unwrap_or_default().to_owned();
    name.push(suffix);
    directory.with_file_name(name)
}

impl Drop for Temporary {
    fn drop(&mut self) {
        let removed = match fs::symlink_metadata(&self.0) {
            Ok(metadata) if metadata.is_dir() => fs::remove_dir_all(&self.0),
            Ok(_) => fs::remove_file(&self.0),
            Err(_) => Ok(()),
        };
        // What is left behind is never looked at again.
        drop(removed);
    }
}

#[cfg(test)]
mod tests {
    use std::thread;

    use super::*;

    static FILES: [Embedded; 2] =
        [Embedded { name: "a", bytes: b"first" }, Embedded { name: "b", bytes: &[7; 3 * CHUNK + 1] }];

    fn names(directory: &Path) -> Vec<String> {
        let entries = fs::read_dir(directory).expect("a directory");
        let mut names: Vec<_> =
            entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("plain")).collect();
        names.sort();
        names
    }

    #[test]
    fn a_new_directory_is_made_whole() {
        let parent = tempfile::tempdir().expect("a directory");
        let directory = into(&parent.path().join("x/demo"), &FILES).expect("written");
        assert_eq!(fs::read(directory.join("a")).expect("there"), b"first");
        assert_eq!(names(&parent.path().join("x")), ["demo", "demo.lock"], "nothing else is left");
    }

    #[test]
    fn whatever_is_damaged_is_replaced() {
        let parent = tempfile::tempdir().expect("a directory");
        let directory = parent.path().join("demo");
        let damages: [fn(&Path); 8] = [
            |d| fs::write(d.join("model.safetensors.index.json"), b"{}").expect("written"),
            |d| fs::write(d.join("model-00001-of-00002.safetensors"), b"").expect("written"),
            |d| fs::write(d.join("a"), b"First").expect("written"),
            |d| fs::write(d.join("a"), b"").expect("written"),
            |d| fs::remove_file(d.join("b")).expect("removed"),
            |d| {
                let mut bytes = FILES[1].bytes.to_vec();
                *bytes.last_mut().expect("not empty") = 8;
                fs::write(d.join("b"), bytes).expect("written");
            },
            |d| {
                fs::remove_file(d.join("a")).expect("removed");
                fs::create_dir(d.join("a")).expect("made");
            },
            |d| {
                fs::remove_dir_all(d).expect("removed");
                fs::write(d, b"a file").expect("written");
            },
        ];
        for (number, damage) in damages.into_iter().enumerate() {
            into(&directory, &FILES).expect("written");
            damage(&directory);
            assert!(!is_whole(&directory, &FILES), "damage {number}");
            into(&directory, &FILES).expect("repaired");
            assert!(is_whole(&directory, &FILES), "damage {number}");
        }
        assert_eq!(names(parent.path()), ["demo", "demo.lock"]);
    }

    #[test]
    fn what_a_killed_process_left_is_removed() {
        let parent = tempfile::tempdir().expect("a directory");
        fs::create_dir_all(parent.path().join("demo.tmp-1-0")).expect("made");
        fs::write(parent.path().join("demo.tmp-1-0/a"), b"fir").expect("written");
        into(&parent.path().join("demo"), &FILES).expect("written");
        assert_eq!(names(parent.path()), ["demo", "demo.lock"]);
    }

    #[test]
    fn a_whole_directory_is_left_alone() {
        let parent = tempfile::tempdir().expect("a directory");
        let directory = into(&parent.path().join("demo"), &FILES).expect("written");
        let written = |directory: &Path| fs::metadata(directory.join("a")).expect("there").modified().expect("known");
        let before = written(&directory);
        into(&directory, &FILES).expect("there");
        assert_eq!(written(&directory), before);
    }

    #[test]
    fn what_nobody_reads_may_lie_beside() {
        let parent = tempfile::tempdir().expect("a directory");
        let directory = into(&parent.path().join("demo"), &FILES).expect("written");
        for name in [".DS_Store", "._config.json", "notes.txt"] {
            fs::write(directory.join(name), b"x").expect("written");
        }
        assert!(is_whole(&directory, &FILES));
    }

    #[test]
    fn several_at_once_all_get_a_whole_one() {
        let parent = tempfile::tempdir().expect("a directory");
        let directory = parent.path().join("demo");
        fs::create_dir(&directory).expect("made");
        thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| into(&directory, &FILES).expect("written"));
            }
        });
        assert!(is_whole(&directory, &FILES));
    }

    #[test]
    fn a_place_that_cannot_be_written_is_an_error() {
        let parent = tempfile::tempdir().expect("a directory");
        let file = parent.path().join("file");
        fs::write(&file, b"x").expect("written");
        assert!(into(&file.join("demo"), &FILES).is_err());
    }

    #[test]
    fn other_contents_have_another_name() {
        let other = [Embedded { name: "a", bytes: b"firsT" }];
        assert_ne!(directory_name(&FILES[..1]), directory_name(&other));
    }
}
