//! The drive roots of a model, listed beside it, so that they need not be given with every command.

use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::config::read_text;
use crate::error::{Error, Result};

/// File name of the list, in the model directory.
pub const ROOTS_FILE: &str = "experts.toml";

const BYTES_MAX: u64 = 1 << 20;

/// `experts.toml`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
struct RootsFile {
    roots: Vec<PathBuf>,
}

/// The roots that `experts.toml` in the model directory `model` lists, none where there is no such file. Relative paths
/// are of that directory.
///
/// # Errors
/// Kind `Model` for a file that cannot be read, or says something else.
pub fn listed_roots(model: &Path) -> Result<Vec<PathBuf>> {
    let path = model.join(ROOTS_FILE);
    if path.symlink_metadata().is_err() {
        return Ok(Vec::new());
    }
    let hint = "it lists drive roots, such as: roots = [\"/mnt/a/k3\", \"/mnt/b/k3\"]";
    let text = read_text(&path, BYTES_MAX).map_err(|error| Error::model(error.message()).hint(hint))?;
    let refuse = |what: &str| Error::model(format!("{}: {what}", path.display())).hint(hint);
    let RootsFile { roots } = toml::from_str(&text).map_err(|error| {
        let line = error.span().map_or(0, |span| text[..span.start.min(text.len())].matches('\n').count()) + 1;
        refuse(&format!("line {line}: {}", error.message()))
    })?;
    if roots.iter().any(|root| root.as_os_str().is_empty()) {
        return Err(refuse("a root without a name"));
    }
    Ok(roots.into_iter().map(|root| model.join(root)).collect())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn roots_are_of_the_models_directory_unless_they_are_absolute() {
        let model = tempfile::tempdir().unwrap();
        assert!(listed_roots(model.path()).unwrap().is_empty());
        fs::write(model.path().join(ROOTS_FILE), "# drives\nroots = [\"/mnt/a\", \"../b\"]\n").unwrap();
        assert_eq!(listed_roots(model.path()).unwrap(), [PathBuf::from("/mnt/a"), model.path().join("../b")]);
    }

    #[test]
    fn what_is_no_list_of_roots_is_refused_with_its_line() {
        let model = tempfile::tempdir().unwrap();
        let path = model.path().join(ROOTS_FILE);
        for (text, line) in [
            ("root = [\"/a\"]", "line 1"),
            ("\n\nroots = 3", "line 3"),
            ("roots = [1]", "line 1"),
            ("roots = [\"a\"", "line 1"),
            ("roots = [\"a\"]\nroots = [\"b\"]", "line 2"),
            ("roots = [\"a\"]\nrate = 3", "line 2"),
            ("roots = [\"\"]", "without a name"),
            ("", ROOTS_FILE),
        ] {
            fs::write(&path, text).unwrap();
            let error = listed_roots(model.path()).unwrap_err();
            assert!(error.message().contains(line) && error.message().contains(ROOTS_FILE), "{text:?}: {error}");
        }
        fs::write(&path, b"roots = [\"\xff\"]").unwrap();
        assert!(listed_roots(model.path()).is_err());
        fs::remove_file(&path).unwrap();
        fs::create_dir(&path).unwrap();
        assert!(listed_roots(model.path()).is_err());
    }
}
