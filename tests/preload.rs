//! Drives that fail beneath the program: a library put in front of the system's makes reads fail with EIO.
#![cfg(target_os = "linux")]

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use serde_json::Value;
use tempfile::TempDir;

fn deltafin(dir: &Path, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafin"));
    command.args(args).current_dir(dir).env("XDG_CACHE_HOME", dir).stdin(std::process::Stdio::null());
    command
}

fn text(output: &Output) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    (text(&output.stdout), text(&output.stderr))
}

#[track_caller]
fn ends_with(command: &mut Command, code: i32) -> (String, String) {
    let output = command.output().expect("the binary starts");
    let (out, err) = text(&output);
    assert_eq!(output.status.code(), Some(code), "stdout: {out}\nstderr: {err}");
    (out, err)
}

/// The library, or none where there is no C compiler.
fn library(dir: &Path) -> Option<PathBuf> {
    let library = dir.join("preload.so");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/preload.c");
    let compile = |compiler| {
        let mut command = Command::new(compiler);
        command.args(["-shared", "-fPIC", "-O1", "-o"]).arg(&library).arg(&source).arg("-ldl");
        command.status().is_ok_and(|status| status.success())
    };
    ["cc", "gcc"].into_iter().any(compile).then_some(library)
}

/// A model with all experts on two roots.
fn place() -> TempDir {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary directory");
    ends_with(&mut deltafin(place.path(), &["synth", "m", "--preset", "tiny"]), 0);
    ends_with(&mut deltafin(place.path(), &["pack", "-m", "m", "--to", "a", "--to", "b", "--replicas", "2"]), 0);
    ends_with(
        &mut deltafin(place.path(), &["pack", "-m", "m", "--to", "a", "--to", "b", "--replicas", "2", "--move"]),
        0,
    );
    place
}

const RUN: [&str; 14] = [
    "run",
    "-m",
    "m",
    "--ids",
    "1,2,3,4",
    "-n",
    "8",
    "--output",
    "json",
    "--expert-memory",
    "1MiB",
    "--experts",
    "a",
    "b",
];

#[test]
fn reads_that_fail_change_no_token_while_another_copy_is_there() {
    let place = place();
    let Some(library) = library(place.path()) else {
        eprintln!("not checked: no C compiler here");
        return;
    };
    let ids = |out: &str| serde_json::from_str::<Value>(out).expect("JSON")["ids"].clone();
    let expected = ids(&ends_with(&mut deltafin(place.path(), &RUN), 0).0);
    assert!(expected.as_array().is_some_and(|ids| ids.len() == 8), "{expected}");
    for after in ["0", "1", "10", "50"] {
        for more in [&[][..], &["--verify-reads"]] {
            let mut command = deltafin(place.path(), &[&RUN[..], more].concat());
            let dir = place.path().canonicalize().expect("a path").join("a");
            command.env("LD_PRELOAD", &library).env("FAULT_DIR", dir).env("FAULT_AFTER", after);
            let (out, err) = ends_with(&mut command, 0);
            assert_eq!(ids(&out), expected, "after {after}");
            assert!(err.matches("os error 5").count() <= 1, "{err}");
            let report: Value = serde_json::from_str(&out).expect("JSON");
            let errors =
                report["io"]["drives"].as_array().expect("drives").iter().map(|drive| drive["errors"].as_u64());
            let errors: u64 = errors.map(Option::unwrap_or_default).sum();
            assert_eq!(err.contains("os error 5"), errors > 0, "after {after}: {errors} errors\n{err}");
            assert!(after != "0" || errors > 0, "the library is in effect: {report}");
        }
    }
}

#[test]
fn the_last_copy_failing_is_exit_code_4_with_expert_file_offset_and_errno() {
    let place = place();
    let Some(library) = library(place.path()) else { return };
    let mut command = deltafin(place.path(), &RUN);
    let dir = place.path().canonicalize().expect("a path");
    command.env("LD_PRELOAD", &library).env("FAULT_DIR", dir).env("FAULT_AFTER", "20");
    let (_, err) = ends_with(&mut command, 4);
    for part in ["expert L", ".mxfp4", "offset", "os error 5"] {
        assert!(err.contains(part), "{part}: {err}");
    }
}
