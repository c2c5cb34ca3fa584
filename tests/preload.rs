//! Drives that fail, hang or refuse beneath the program: a library put in front of the system's spoils its reads.
#![cfg(target_os = "linux")]

use std::fs;
use std::os::unix::fs::{MetadataExt, symlink};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

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

/// A model with all experts on two roots, `b` on a device of its own, and the library; none where that cannot be had.
fn two_devices() -> Option<(TempDir, TempDir, PathBuf)> {
    let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary directory");
    let device = |dir: &Path| fs::metadata(dir).map(|found| found.dev()).ok();
    let other = tempfile::tempdir_in("/dev/shm").ok().filter(|other| device(other.path()) != device(place.path()));
    let (Some(library), Some(other)) = (library(place.path()), other) else {
        eprintln!("not checked: no C compiler or no /dev/shm here");
        return None;
    };
    symlink(other.path(), place.path().join("b")).expect("a link");
    let pack = ["pack", "-m", "m", "--to", "a", "--to", "b", "--replicas", "2", "--rate", "a=2", "--rate", "b=2"];
    ends_with(&mut deltafin(place.path(), &["synth", "m", "--preset", "tiny"]), 0);
    ends_with(&mut deltafin(place.path(), &pack), 0);
    ends_with(&mut deltafin(place.path(), &[&pack[..], &["--move"]].concat()), 0);
    Some((place, other, library))
}

/// `command` with reads below `dir` spoiled after so many of them.
fn spoil<'c>(command: &'c mut Command, library: &Path, dir: &Path, kind: &str, after: usize) -> &'c mut Command {
    let dir = dir.canonicalize().expect("a path");
    command.env("LD_PRELOAD", library).env("FAULT_DIR", dir).env("FAULT_KIND", kind);
    command.env("FAULT_AFTER", after.to_string())
}

fn report(out: &str) -> Value {
    serde_json::from_str(out).expect("JSON")
}

/// How the drive whose path ends so was read.
fn drive<'r>(report: &'r Value, end: &str) -> &'r Value {
    let drives = report["io"]["drives"].as_array().expect("drives");
    let found = drives.iter().find(|drive| drive["path"].as_str().is_some_and(|path| path.ends_with(end)));
    found.unwrap_or_else(|| panic!("no drive {end} in {report}"))
}

#[test]
fn a_read_that_never_returns_is_done_elsewhere_and_the_run_ends_by_itself() {
    let Some((place, _other, library)) = two_devices() else { return };
    let expected = report(&ends_with(&mut deltafin(place.path(), &RUN), 0).0)["ids"].clone();
    for (hangs, after, more) in [("a", 3, &[][..]), ("b", 3, &["--verify-reads"]), ("a", 20, &["--no-lookahead"])] {
        let mut command = deltafin(place.path(), &[&RUN[..], more].concat());
        spoil(&mut command, &library, &place.path().join(hangs), "hang", after);
        let start = Instant::now();
        let (out, err) = ends_with(&mut command, 0);
        assert!(start.elapsed() < Duration::from_secs(20), "{hangs} after {after}: {:?}", start.elapsed());
        assert_eq!(report(&out)["ids"], expected, "{hangs} after {after}");
        assert!(err.matches("does not end").count() <= 1, "{err}");
        assert!(after > 3 || err.contains("does not end"), "the library is in effect: {err}");
    }
}

fn signal(child: &Child, name: &str) {
    let script = format!("kill -{name} $0");
    Command::new("sh").args(["-c", &script, &child.id().to_string()]).status().expect("a shell is there");
}

#[test]
fn a_signal_ends_the_program_within_a_second_whatever_its_reads_do() {
    let Some((place, _other, library)) = two_devices() else { return };
    let long =
        ["run", "-m", "m", "--ids", "1,2,3,4", "-n", "5000", "--ignore-eos", "--context", "6000", "--output", "json"];
    let long = [&long[..], &["--expert-memory", "1MiB", "--experts", "a", "b"]].concat();
    let (all, one) = (Path::new("/"), place.path().join("a"));
    for (kind, dir) in [("slow", all), ("hang", all), ("hang", one.as_path())] {
        for (moment, name, code) in [(0, "INT", 130), (120, "TERM", 143), (300, "INT", 130), (900, "TERM", 143)] {
            let mut command = deltafin(place.path(), &long);
            spoil(&mut command, &library, dir, kind, 8).stdout(Stdio::piped()).stderr(Stdio::piped());
            let child = command.spawn().expect("the binary starts");
            thread::sleep(Duration::from_millis(400 + moment));
            signal(&child, name);
            let start = Instant::now();
            let output = child.wait_with_output().expect("it ends");
            let (_, err) = text(&output);
            assert!(start.elapsed() < Duration::from_secs(1), "{kind} {moment}: {:?}\n{err}", start.elapsed());
            assert_eq!(output.status.code(), Some(code), "{kind} {moment}: {err}");
        }
    }
}

#[test]
fn one_drive_that_refuses_direct_reads_is_read_buffered_with_one_notice() {
    let Some((place, _other, library)) = two_devices() else { return };
    let (out, err) = ends_with(&mut deltafin(place.path(), &RUN), 0);
    let whole = report(&out);
    if drive(&whole, "a")["mode"] != "direct" {
        eprintln!("not checked: no direct reads here");
        return;
    }
    let before = err.matches("page cache").count();
    for after in [0, 1, 20] {
        let mut command = deltafin(place.path(), &RUN);
        let (out, err) = ends_with(spoil(&mut command, &library, &place.path().join("a"), "einval", after), 0);
        let found = report(&out);
        assert_eq!(found["ids"], whole["ids"], "after {after}");
        assert_eq!(drive(&found, "a")["mode"], "buffered", "after {after}: {found}");
        assert_eq!(drive(&found, "b")["mode"], drive(&whole, "b")["mode"]);
        assert_eq!(err.matches("page cache").count(), before + 1, "{err}");
        assert!(err.contains("os error 22"), "{err}");
    }
}

#[test]
fn reads_cut_short_and_interrupted_are_continued_on_every_root() {
    let Some((place, other, library)) = two_devices() else { return };
    let whole = report(&ends_with(&mut deltafin(place.path(), &RUN), 0).0);
    for dir in [&place.path().join("a"), other.path()] {
        for more in [&[][..], &["--no-direct"], &["--verify-reads"]] {
            let mut command = deltafin(place.path(), &[&RUN[..], more].concat());
            let (out, err) = ends_with(spoil(&mut command, &library, dir, "short", 0), 0);
            let found = report(&out);
            assert_eq!(found["ids"], whole["ids"], "{more:?}");
            assert!(
                found["io"]["drives"].as_array().expect("drives").iter().all(|drive| drive["errors"] == 0),
                "{err}"
            );
        }
    }
}
