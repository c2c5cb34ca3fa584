//! Small files of a model directory, read whole, with plain words for what people really find there instead.

use std::ffi::OsString;
use std::fs::{DirEntry, File};
use std::io::Read;
use std::path::Path;

use crate::error::{Error, Result};
use crate::store::packed::LIST_FILE;

/// First line of a Git-LFS pointer: the text file that a clone without LFS leaves in place of the real one.
const LFS_MAGIC: &[u8] = b"version https://git-lfs.github.com/spec/";

/// Whether `head`, the first bytes of a file, is a Git-LFS pointer; the inner value is the size it gives for the real
/// file.
pub(crate) fn lfs_pointer(head: &[u8]) -> Option<Option<u64>> {
    if !head.starts_with(LFS_MAGIC) {
        return None;
    }
    let size = head.split(|&b| b == b'\n').find_map(|line| line.strip_prefix(b"size "));
    Some(size.and_then(|s| std::str::from_utf8(s).ok()).and_then(|s| s.trim().parse().ok()))
}

/// Refuses, in words, a directory without configuration that is no model directory at all.
///
/// # Errors
/// Kind `Model`: a root of packed experts, or no shard.
pub(super) fn check_is_model_dir(dir: &Path) -> Result<()> {
    if dir.join(LIST_FILE).exists() {
        return Err(Error::model(format!("{} is a root of packed experts, not a model directory", dir.display()))
            .hint(format!("give it as --experts {}, and the model's own directory with -m", dir.display())));
    }
    let names = |entry: std::io::Result<DirEntry>| entry.ok().map(|entry| entry.file_name());
    let is_of_a_model = |name: &OsString| {
        let name = name.to_string_lossy();
        name.starts_with("model") && name.contains(".safetensors")
    };
    // One that cannot be listed may hold anything.
    if dir.read_dir().is_ok_and(|entries| !entries.filter_map(names).any(|name| is_of_a_model(&name))) {
        let what = "does not look like a model directory: it has neither config.json nor any model….safetensors";
        return Err(Error::model(format!("{} {what}", dir.display()))
            .hint("-m takes the directory that a Kimi checkpoint was downloaded to"));
    }
    Ok(())
}

/// Whether `path` can be read as a file, or in words why not. Follows links, as in a Hugging Face cache.
pub(crate) fn check_is_file(path: &Path) -> Result<u64, String> {
    match path.metadata() {
        Ok(meta) if meta.is_file() => Ok(meta.len()),
        Ok(meta) if meta.is_dir() => Err("is a directory, not a file".into()),
        Ok(_) => Err("is not a regular file".into()),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => match std::fs::read_link(path) {
            Ok(target) => Err(format!("is a link to {}, which does not exist", target.display())),
            Err(_) => Err("is missing".into()),
        },
        Err(e) => Err(format!("cannot be read: {e}")),
    }
}

/// The bytes of `path`, at most `bytes_max`.
///
/// # Errors
/// Kind `Model`: missing, no regular file, too large, empty, a Git-LFS pointer, unreadable.
pub(crate) fn read_bytes(path: &Path, bytes_max: u64) -> Result<Vec<u8>> {
    let refuse = |what: String| Error::model(format!("{} {what}", path.display()));
    let len =
        check_is_file(path).map_err(|what| refuse(what).hint("download this file again into the model directory"))?;
    if len > bytes_max {
        return Err(refuse(format!("has {len} bytes, more than the {bytes_max} such a file can have")));
    }
    let mut bytes = Vec::with_capacity(len as usize);
    File::open(path)
        .and_then(|file| file.take(bytes_max).read_to_end(&mut bytes))
        .map_err(|e| refuse(format!("cannot be read: {e}")))?;
    if bytes.is_empty() {
        return Err(refuse("is empty".into()).hint("download this file again"));
    }
    if lfs_pointer(&bytes).is_some() {
        return Err(refuse("is a Git-LFS pointer, not the file itself".into())
            .hint("run `git lfs pull` in the model directory, or download the file again"));
    }
    Ok(bytes)
}

/// As [`read_bytes`], for a file that must be UTF-8.
///
/// # Errors
/// As [`read_bytes`], or the place of the first byte that is not UTF-8.
pub(crate) fn read_text(path: &Path, bytes_max: u64) -> Result<String> {
    String::from_utf8(read_bytes(path, bytes_max)?).map_err(|e| {
        let at = e.utf8_error().valid_up_to();
        Error::model(format!("{} is not UTF-8 text: byte {at} cannot be decoded", path.display()))
            .hint("download this file again")
    })
}
