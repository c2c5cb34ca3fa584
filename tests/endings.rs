//! How runs end, or begin: silent pipes, signals in each phase, damaged caches, floors that are enough. Whole programs.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use serde_json::Value;

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name).to_str().expect("a plain path").to_owned()
}

fn demo() -> String {
    fixture("assets/demo-model")
}

fn deltafin(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafin"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("output is UTF-8")
}

/// Runs `command` and checks the exit code; returns stdout and stderr.
#[track_caller]
fn ends_with(command: &mut Command, code: i32) -> (String, String) {
    let output = command.output().expect("the binary starts");
    checked(command, &output, code)
}

#[track_caller]
fn checked(command: &Command, output: &Output, code: i32) -> (String, String) {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{command:?}\nstdout: {out}\nstderr: {err}");
    assert!(!err.contains("panicked") && !err.contains("a bug"), "{command:?}: {err}");
    (out, err)
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

/// Runs `args` with a stdin that is open and silent.
#[track_caller]
fn with_silent_stdin(args: &[&str], code: i32) -> (String, String, Duration) {
    let began = Instant::now();
    let mut command = deltafin(args);
    let mut child = command.stdin(Stdio::piped()).spawn().expect("starts");
    let held = child.stdin.take();
    let output = child.wait_with_output().expect("it ends");
    drop(held);
    let (out, err) = checked(&command, &output, code);
    (out, err, began.elapsed())
}

#[test]
fn a_silent_stdin_is_left_out_where_there_is_a_prompt() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("prompt.txt");
    fs::write(&file, "Once upon a time").expect("written");
    let demo = demo();
    let run = ["run", "-m", &demo, "-n", "8"];
    let (plain, _) = ends_with(deltafin(&run).args(["-p", "Once upon a time"]), 0);
    for (args, notes) in [
        (&["-p", "Once upon a time"][..], 2),
        (&["-p", "Once upon a time", "-q"], 1),
        (&[file.to_str().expect("plain"), "-q"], 1),
    ] {
        let (out, err, time) = with_silent_stdin(&[&run[..], args].concat(), 0);
        assert_eq!(out, plain, "{args:?}");
        assert_eq!(err.matches("going on without it").count(), 1, "{args:?}: {err}");
        assert_eq!(err.matches("note: ").count(), notes, "{args:?}: {err}");
        assert!(time >= Duration::from_secs(5) && time < Duration::from_secs(15), "{time:?}");
    }
}

#[test]
fn a_stdin_that_is_slow_but_not_silent_is_read_whole() {
    let demo = demo();
    let args = ["run", "-m", &demo, "-p", "Once", "-n", "2", "--output", "json", "-q"];
    let mut command = deltafin(&args);
    let mut child = command.stdin(Stdio::piped()).spawn().expect("starts");
    let mut stdin = child.stdin.take().expect("piped");
    let writer = thread::spawn(move || {
        thread::sleep(Duration::from_millis(1500));
        stdin.write_all(b"upon").expect("read");
        thread::sleep(Duration::from_millis(5500));
        stdin.write_all(b" a time").expect("read");
    });
    let (out, err) = checked(&command, &child.wait_with_output().expect("it ends"), 0);
    writer.join().expect("written");
    let (whole, _) =
        ends_with(&mut deltafin(&["run", "-m", &demo, "-p", "Once\n\nupon a time", "-n", "2", "--output", "json"]), 0);
    assert_eq!(json(&out)["prompt_tokens"], json(&whole)["prompt_tokens"]);
    assert!(err.contains("waiting for standard input"), "{err}");
}

#[test]
fn a_wait_without_end_is_told_even_to_the_quiet_and_a_signal_ends_it() {
    let demo = demo();
    let fifo = tempfile::tempdir().expect("a directory");
    let pipe = fifo.path().join("pipe");
    assert!(Command::new("mkfifo").arg(&pipe).status().expect("mkfifo is there").success());
    let pipe = pipe.to_str().expect("plain");
    for (args, named) in
        [(&["-"][..], "standard input"), (&[], "standard input"), (&["-p", ""], "standard input"), (&[pipe], pipe)]
    {
        let mut command = deltafin(&[&["run", "-m", &demo, "-q"], args].concat());
        let mut child = command.stdin(Stdio::piped()).spawn().expect("starts");
        let held = child.stdin.take();
        let mut line = String::new();
        BufReader::new(child.stderr.take().expect("piped")).read_line(&mut line).expect("a line");
        assert!(line.contains(&format!("waiting for {named}")), "{args:?}: {line}");
        kill(&child, &["TERM"]);
        assert_eq!(child.wait().expect("it ends").code(), Some(143), "{args:?}");
        drop(held);
    }
}

/// Sends `signals` as fast as a shell can.
fn kill(child: &Child, signals: &[&str]) {
    let script = signals.iter().map(|signal| format!("kill -{signal} $0;")).collect::<String>();
    Command::new("sh").args(["-c", &script, &child.id().to_string()]).status().expect("a shell is there");
}
