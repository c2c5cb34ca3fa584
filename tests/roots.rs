//! Experts on drive roots, through the whole program: the same numbers wherever they lie, and ends that name what is wrong.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

struct Place(tempfile::TempDir);

impl Place {
    /// A synthetic model `m`, packed to `a` and `b` together, and to `c` alone.
    fn new() -> Self {
        let place = Self(tempfile::tempdir().unwrap());
        place.ok(&["synth", "m", "-q"]);
        place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--no-learn", "-q"]);
        place.ok(&["pack", "-m", "m", "--to", "c", "--no-learn", "-q"]);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deltafin"));
        command.args(args).current_dir(self.0.path()).env("XDG_CACHE_HOME", self.path("cache"));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    fn run(&self, args: &[&str]) -> Output {
        self.command(args).output().expect("the binary starts")
    }

    #[track_caller]
    fn ok(&self, args: &[&str]) -> String {
        let output = self.run(args);
        assert!(output.status.success(), "{args:?}: {}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    }

    #[track_caller]
    fn logits(&self, more: &[&str]) -> Vec<u8> {
        let ids: Vec<String> = (1..60).map(|id| id.to_string()).collect();
        self.ok(&[&["logits", "-m", "m", "--ids", &ids.join(","), "-o", "out", "--no-learn", "-q"], more].concat());
        fs::read(self.path("out")).unwrap()
    }

    fn experts(&self, root: &str) -> Vec<PathBuf> {
        let mut files = Vec::new();
        for layer in fs::read_dir(self.path(root)).unwrap().flatten().filter(|entry| entry.path().is_dir()) {
            files.extend(fs::read_dir(layer.path()).unwrap().flatten().map(|entry| entry.path()));
        }
        files.sort();
        files
    }
}

/// Changes bytes in the middle of the codes.
fn damage(path: &Path) {
    let mut bytes = fs::read(path).unwrap();
    bytes[100..200].iter_mut().for_each(|byte| *byte ^= 0x55);
    fs::write(path, bytes).unwrap();
}

#[test]
fn the_same_numbers_wherever_the_experts_lie() {
    let place = Place::new();
    let wanted = place.logits(&[]);
    for roots in [&["a", "b"][..], &["c"], &["a"], &["a", "b", "c"]] {
        for more in [&[][..], &["--verify-reads"], &["--no-lookahead", "--no-direct"], &["--expert-memory", "200KiB"]] {
            let args = [&["--experts"], roots, more].concat();
            assert!(place.logits(&args) == wanted, "{args:?}");
        }
    }
    place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--move", "--no-learn", "-q"]);
    assert!(place.logits(&["--experts", "a", "b"]) == wanted, "after the move");
    assert!(place.logits(&["--experts", "c"]) == wanted, "after the move, from the other root");
    let output = place.run(&["run", "-m", "m", "--ids", "1,2", "-n", "2", "--output", "ids", "--experts", "a"]);
    assert_eq!(output.status.code(), Some(3));
    let error = String::from_utf8_lossy(&output.stderr);
    assert!(error.contains("--experts"), "{error}");
}

#[test]
fn damaged_and_missing_files_are_read_elsewhere_as_long_as_there_is_a_copy() {
    let place = Place::new();
    let wanted = place.logits(&[]);
    place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--move", "--no-learn", "-q"]);
    place.experts("c").iter().for_each(|path| damage(path));
    assert!(place.logits(&["--experts", "c", "a", "b", "--verify-reads"]) == wanted, "all of c is damaged");
    for path in place.experts("c").iter().step_by(2) {
        fs::remove_file(path).unwrap();
    }
    assert!(place.logits(&["--experts", "c", "a", "b", "--verify-reads"]) == wanted, "half of c is missing too");
    // Every expert, so that whatever the router asks for is wrong.
    place.experts("a").iter().chain(&place.experts("b")).for_each(|path| damage(path));
    let args = ["run", "-m", "m", "--ids", "1,2", "-n", "9", "--output", "ids", "--no-learn", "--verify-reads"];
    let output = place.run(&[&args[..], &["--experts", "c", "a", "b"]].concat());
    let error = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(4), "{error}");
    assert!(error.contains("expert L") && error.contains("checksum"), "{error}");
    let output = place.run(&["inspect", "-m", "m", "--experts", "a", "b", "--verify"]);
    assert_eq!(output.status.code(), Some(3));
}

#[test]
fn json_has_every_drive_with_its_state() {
    let place = Place::new();
    let json = place.ok(&[
        "run",
        "-m",
        "m",
        "--ids",
        "1,2,3",
        "-n",
        "9",
        "--ignore-eos",
        "--output",
        "json",
        "--no-learn",
        "--experts",
        "a",
        "b",
        "-q",
    ]);
    let report: serde_json::Value = serde_json::from_str(&json).unwrap();
    let io = &report["io"];
    for drive in io["drives"].as_array().unwrap() {
        assert_eq!((drive["state"].as_str(), drive["errors"].as_u64()), (Some("ok"), Some(0)));
    }
    for field in ["lookahead_useful_bytes", "lookahead_wasted_bytes", "lookahead_dropped", "retries"] {
        assert!(io[field].is_u64(), "{field}");
    }
}

/// Fails reads of files under a directory, as a drive that dies does. Below the program, so that nothing in it is replaced.
#[cfg(target_os = "linux")]
mod preloaded {
    use super::*;

    const SHIM: &str = r#"
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/types.h>
#include <unistd.h>

static ssize_t (*real)(int, void *, size_t, off_t);
static int left = -1;

static int dies(int fd) {
    char link[64], path[4096];
    const char *bad = getenv("SHIM_BAD");
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    if (!bad || n < 0) return 0;
    path[n] = 0;
    if (!strstr(path, bad)) return 0;
    if (left < 0) left = atoi(getenv("SHIM_AFTER"));
    return __atomic_fetch_sub(&left, 1, __ATOMIC_SEQ_CST) <= 0 ? (left = 0, 1) : 0;
}

ssize_t pread64(int fd, void *buf, size_t n, off_t at) {
    if (!real) real = dlsym(RTLD_NEXT, "pread64");
    if (dies(fd)) { errno = EIO; return -1; }
    return real(fd, buf, n, at);
}

ssize_t pread(int fd, void *buf, size_t n, off_t at) { return pread64(fd, buf, n, at); }
"#;

    /// The shim's library, for the programs that `place` runs.
    fn shim(place: &Place) -> PathBuf {
        let (source, library) = (place.path("shim.c"), place.path("shim.so"));
        fs::write(&source, SHIM).unwrap();
        let mut gcc = Command::new("gcc");
        gcc.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).arg("-ldl");
        assert!(gcc.status().expect("gcc is there").success());
        library
    }

    #[test]
    fn a_drive_that_dies_in_mid_run_changes_no_token() {
        let place = Place::new();
        let shim = shim(&place);
        place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--move", "--no-learn", "-q"]);
        let args = ["run", "-m", "m", "--ids", "1,2,3", "-n", "40", "--ignore-eos", "--output", "ids", "--no-learn"];
        let args = [&args[..], &["--expert-memory", "200KiB", "--experts", "a", "b", "c"]].concat();
        let wanted = place.ok(&args);
        for after in ["0", "3", "50"] {
            let mut command = place.command(&args);
            let bad = format!("{}/", place.path("a").display());
            let output =
                command.env("LD_PRELOAD", &shim).env("SHIM_BAD", bad).env("SHIM_AFTER", after).output().unwrap();
            let error = String::from_utf8_lossy(&output.stderr);
            assert!(output.status.success(), "after {after}: {error}");
            assert_eq!(String::from_utf8_lossy(&output.stdout), wanted, "after {after}");
            assert_eq!(error.matches("other copies are read").count(), 1, "after {after}: {error}");
        }
        let mut command = place.command(&args);
        let output = command.env("LD_PRELOAD", &shim).env("SHIM_BAD", "/L00").env("SHIM_AFTER", "30").output().unwrap();
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{error}");
        for part in ["expert L", "offset", "os error 5", ".mxfp4"] {
            assert!(error.contains(part), "{part}: {error}");
        }
    }
}
