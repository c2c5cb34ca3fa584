//! Where files go that can be made anew: the user's cache directory.

use std::env;
use std::path::PathBuf;

/// `$XDG_CACHE_HOME/deltafin`, else `~/.cache/deltafin`, on macOS `~/Library/Caches/deltafin`; it need not exist. `None`
/// where the environment names neither. A relative path in the environment does not count, as XDG says.
pub(crate) fn directory() -> Option<PathBuf> {
    let in_home = if cfg!(target_os = "macos") { "Library/Caches" } else { ".cache" };
    let cache = absolute("XDG_CACHE_HOME").or_else(|| absolute("HOME").map(|home| home.join(in_home)));
    cache.map(|cache| cache.join("deltafin"))
}

fn absolute(name: &str) -> Option<PathBuf> {
    env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute())
}
