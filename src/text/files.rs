//! Reads the small files of a model directory, refusing what is not the file it should be.

use std::fs;
use std::path::Path;

use serde_json::Value;

use crate::error::{Error, Result};

/// Far above any tokenizer file, and far below what would hurt to read.
const FILE_BYTES_MAX: u64 = 1 << 29;

/// The whole of `file`.
///
/// # Errors
/// Kind `Model`: not readable, a directory, empty, far too large, or a Git LFS pointer in place of the file.
pub fn read(file: &Path) -> Result<Vec<u8>> {
    let cannot = |error| Error::model(format!("cannot read {}: {error}", file.display()));
    let metadata = fs::metadata(file).map_err(cannot)?;
    if !metadata.is_file() {
        let found = if metadata.is_dir() { "a directory" } else { "neither a file nor a directory" };
        return Err(Error::model(format!("{}: expected a file, found {found}", file.display())));
    }
    if metadata.len() > FILE_BYTES_MAX {
        let (bytes, file) = (metadata.len(), file.display());
        return Err(Error::model(format!("{file}: expected at most {FILE_BYTES_MAX} bytes, found {bytes}")));
    }
    let bytes = fs::read(file).map_err(cannot)?;
    if bytes.is_empty() {
        return Err(Error::model(format!("{}: the file is empty", file.display())).hint("download it again"));
    }
    if bytes.starts_with(b"version https://git-lfs") {
        return Err(Error::model(format!("{}: a Git LFS pointer, not the file itself", file.display()))
            .hint("fetch the content with `git lfs pull`, or download the file again"));
    }
    Ok(bytes)
}

/// The JSON object in `file`.
///
/// # Errors
/// As [`read`], and kind `Model` for anything but one JSON object.
pub fn read_json(file: &Path) -> Result<serde_json::Map<String, Value>> {
    let bytes = read(file)?;
    match serde_json::from_slice(&bytes) {
        Ok(Value::Object(object)) => Ok(object),
        Ok(_) => Err(Error::model(format!("{}: expected a JSON object", file.display()))),
        Err(error) => Err(Error::model(format!("{}: not valid JSON: {error}", file.display()))),
    }
}

/// As [`read_json`], or `None` when there is no such file.
///
/// # Errors
/// As [`read_json`].
pub fn read_json_if_there(file: &Path) -> Result<Option<serde_json::Map<String, Value>>> {
    // A dangling link is not an absent file: `read` names it.
    if fs::symlink_metadata(file).is_err() { Ok(None) } else { read_json(file).map(Some) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    #[test]
    fn what_is_not_the_file_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("x.json");
        for (content, want) in [
            (&b""[..], "is empty"),
            (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 5\n", "Git LFS pointer"),
            (b"[1]", "expected a JSON object"),
            (b"{\"a\":", "not valid JSON"),
            (b"\xff\xfe", "not valid JSON"),
        ] {
            fs::write(&file, content).unwrap();
            let error = read_json(&file).unwrap_err();
            assert_eq!(error.kind(), Kind::Model);
            assert!(error.message().contains(want) && error.message().contains("x.json"), "{error}");
        }
        assert!(read(dir.path()).unwrap_err().message().contains("found a directory"));
        assert!(read(&dir.path().join("absent")).unwrap_err().message().contains("cannot read"));
        assert!(read_json_if_there(&dir.path().join("absent")).unwrap().is_none());
    }
}
