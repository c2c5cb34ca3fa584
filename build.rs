//! Tells the program which commit it is built from, so that a measurement can be traced to its source. Needs no git and no
//! network: without a repository the commit is `unknown`.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

fn main() {
    let root = PathBuf::from(std::env::var_os("CARGO_MANIFEST_DIR").unwrap_or_default());
    let git = git_dir(&root);
    for path in ["build.rs", "src", "assets/demo-model", "Cargo.toml", "Cargo.lock"] {
        println!("cargo::rerun-if-changed={path}");
    }
    // The log grows with every commit and checkout; `HEAD` alone does not change with a commit.
    for file in git.iter().flat_map(|git| [git.join("HEAD"), git.join("logs/HEAD")]).filter(|file| file.exists()) {
        println!("cargo::rerun-if-changed={}", file.display());
    }
    let commit = git.as_deref().and_then(head).unwrap_or_else(|| "unknown".to_owned());
    let modified = commit != "unknown" && is_modified(&root);
    println!("cargo::rustc-env=DELTAFIN_COMMIT={commit}");
    println!("cargo::rustc-env=DELTAFIN_COMMIT_SHORT={}", commit.get(..12).unwrap_or(&commit));
    println!("cargo::rustc-env=DELTAFIN_COMMIT_MODIFIED={}", if modified { "yes" } else { "" });
}

/// `.git`, or where the file of that name points in a further working tree.
fn git_dir(root: &Path) -> Option<PathBuf> {
    let git = root.join(".git");
    if git.is_dir() {
        return Some(git);
    }
    let text = fs::read_to_string(git).ok()?;
    Some(root.join(text.strip_prefix("gitdir:")?.trim()))
}

/// The commit that `HEAD` names.
fn head(git: &Path) -> Option<String> {
    let head = fs::read_to_string(git.join("HEAD")).ok()?;
    let Some(name) = head.trim().strip_prefix("ref:").map(str::trim) else { return commit(&head) };
    let common = fs::read_to_string(git.join("commondir")).map_or(git.to_path_buf(), |path| git.join(path.trim()));
    let loose = [git, &common].into_iter().find_map(|dir| fs::read_to_string(dir.join(name)).ok());
    loose.as_deref().and_then(commit).or_else(|| {
        let packed = fs::read_to_string(common.join("packed-refs")).ok()?;
        packed.lines().find_map(|line| commit(line.strip_suffix(name)?.strip_suffix(' ')?))
    })
}

/// `text` as a commit's name, if it is one.
fn commit(text: &str) -> Option<String> {
    let text = text.trim();
    (text.len() >= 40 && text.bytes().all(|byte| byte.is_ascii_hexdigit())).then(|| text.to_owned())
}

/// Whether files that git knows differ from the commit; no where there is no git to ask.
fn is_modified(root: &Path) -> bool {
    let status = ["--no-optional-locks", "status", "--porcelain", "--untracked-files=no", "--", "src", "build.rs"];
    let output = Command::new("git").current_dir(root).args(status).args(["Cargo.toml", "Cargo.lock"]).output();
    output.is_ok_and(|output| output.status.success() && !output.stdout.is_empty())
}
