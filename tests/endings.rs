//! How runs end, or begin: silent pipes, signals in each phase, damaged caches, floors that are enough. Whole programs.

use std::fs;
use std::io::{BufRead, BufReader, Write};
use std::path::{Path, PathBuf};
use std::process::{self, Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use deltafin::bug;
use serde_json::Value;
use tempfile::TempDir;

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

/// A model with a large trunk, so that loading takes a while, made by the command that users make one with.
fn large_trunk(dir: &TempDir) -> String {
    let model = dir.path().join("model").to_str().expect("plain").to_owned();
    let sizes = ["--layers", "2", "--hidden", "1024", "--vocab", "65536", "--experts", "16", "--context", "4096"];
    ends_with(deltafin(&["synth", &model, "--preset", "mini", "-q"]).args(sizes), 0);
    model
}

/// Waits for a line of stderr that begins with `start`, and goes on reading so that the process never blocks.
fn wait_for_line(child: &mut Child, start: &str) -> thread::JoinHandle<()> {
    let mut stderr = BufReader::new(child.stderr.take().expect("piped"));
    let mut line = String::new();
    while !line.trim_start().starts_with(start) {
        line.clear();
        assert!(stderr.read_line(&mut line).expect("a line") > 0, "no line begins with {start}");
    }
    thread::spawn(move || {
        // What comes after the signal is looked at by other tests.
        let _ = std::io::copy(&mut stderr, &mut std::io::sink());
    })
}

#[test]
fn a_signal_ends_loading_prefill_and_decoding_within_a_second() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = large_trunk(&dir);
    let file = dir.path().join("ids.txt");
    fs::write(&file, vec!["7"; 2000].join(",")).expect("written");
    let file = file.to_str().expect("plain");
    let slow = ["--ignore-eos", "--isa", "scalar", "--threads", "1", "-v"];
    for (ids, form, line) in [
        (["--ids", "7"], "json", "memory plan"),
        (["--ids-file", file], "json", "prompt 0/2000"),
        (["--ids", "7"], "json", "loading"),
        (["--ids", "7"], "ids", "memory plan"),
    ] {
        // Of two at once either may be seen first.
        for (signals, codes) in [(&["INT"][..], &[130][..]), (&["TERM"], &[143]), (&["INT", "TERM"], &[130, 143])] {
            let args = ["run", "-m", &model, ids[0], ids[1], "-n", "2000", "--output", form];
            let mut command = deltafin(&[&args[..], &slow].concat());
            let mut child = command.spawn().expect("starts");
            // Loading is over before its first line is due; one that waits for it has long been decoding.
            let others = match line {
                "loading" => {
                    thread::sleep(Duration::from_secs(3));
                    None
                }
                line => Some(wait_for_line(&mut child, line)),
            };
            kill(&child, signals);
            let sent = Instant::now();
            let output = child.wait_with_output().expect("it ends");
            let time = sent.elapsed();
            let code = output.status.code().filter(|code| codes.contains(code)).unwrap_or(codes[0]);
            let (out, _) = checked(&command, &output, code);
            assert!(time < Duration::from_secs(1), "{line} {signals:?}: {time:?}");
            if form == "json" {
                let report = json(&out);
                let (prefilled, threads) = (&report["timings"]["prefill_s"], &report["threads"]);
                assert_eq!(report["stop"], "interrupted", "{line} {signals:?}");
                match line {
                    "memory plan" => assert!(threads.is_null() && report["memory"]["planned"].is_null(), "{report}"),
                    "loading" => assert!(report["ids"].as_array().is_some_and(|ids| !ids.is_empty()), "{report}"),
                    _ => assert!(threads == 1 && prefilled.is_null() && report["prompt_tokens"] == 2000, "{report}"),
                }
            } else {
                assert_eq!(out, "\n", "{line} {signals:?}");
            }
            others.into_iter().for_each(|others| others.join().expect("read"));
        }
    }
}

/// Copies a directory's files to where a test may change them.
fn copy(name: &str) -> TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    for entry in fs::read_dir(fixture(name)).expect("there") {
        let path = entry.expect("an entry").path();
        fs::copy(&path, dir.path().join(path.file_name().expect("a name"))).expect("copied");
    }
    dir
}

fn numbers(text: &str) -> Vec<u32> {
    text.split_whitespace().map(|word| word.parse().expect("an id")).collect()
}

#[test]
fn an_end_token_that_only_the_tokenizer_s_file_names_ends_the_run() {
    let dir = copy("assets/demo-model");
    let model = dir.path().to_str().expect("plain").to_owned();
    let run = ["run", "-m", &model, "-p", "Once upon a time", "-n", "30", "--output"];
    let ids = numbers(&ends_with(deltafin(&run).arg("ids"), 0).0);
    let end = ids[12];
    let kept = ids.iter().position(|id| *id == end).expect("it is there");
    let word = ends_with(&mut deltafin(&["tokenize", "-m", &model, "--decode", &end.to_string()]), 0).0;
    let file = dir.path().join("tokenizer_config.json");
    let mut config = json(&fs::read_to_string(&file).expect("read"));
    config["added_tokens_decoder"][end.to_string()] = serde_json::json!({ "content": word, "special": true });
    config["eos_token"] = word.into();
    fs::write(&file, config.to_string()).expect("written");
    let report = json(&ends_with(deltafin(&run).arg("json"), 0).0);
    assert_eq!((&report["stop"], &report["ids"]), (&"eos".into(), &ids[..kept].to_vec().into()));
}

/// Not a test by itself: a process that meets a bug, for the next one to look at.
#[test]
#[ignore = "ends the process"]
fn a_process_with_a_bug() {
    let code = bug::guard(|| {
        let thread = thread::spawn(|| panic!("the first\n    bug"));
        assert!(thread.join().is_ok(), "what follows from it");
        0
    });
    process::exit(code.into());
}

#[test]
fn a_bug_is_one_line_and_exit_code_1() {
    let this = std::env::current_exe().expect("known");
    let run = |redirect: &str, backtrace: &str| {
        let script = format!("exec \"$0\" --exact a_process_with_a_bug --ignored --nocapture {redirect}");
        let mut command = Command::new("sh");
        command.args(["-c", &script]).arg(&this).env("RUST_BACKTRACE", backtrace);
        let output = command.output().expect("starts");
        assert_eq!(output.status.code(), Some(1), "{redirect} {output:?}");
        text(&output.stderr)
    };
    let err = run("", "0");
    assert_eq!(err.lines().count(), 1, "{err}");
    assert!(err.starts_with("deltafin: internal error at tests/endings.rs:"), "{err}");
    assert!(err.ends_with("a bug: the first bug\n"), "{err}");
    assert!(run("", "1").lines().count() > 5);
    run("2>&-", "0");
    run("2>/dev/full", "0");
}

#[test]
fn color_governs_what_the_flags_parser_says() {
    let coloured = |args: &[&str]| {
        let output = deltafin(args).output().expect("starts");
        output.stdout.contains(&0x1b) || output.stderr.contains(&0x1b)
    };
    for line in [&["--help"][..], &["run", "-h"], &["--fly"], &["run"], &["fly"]] {
        assert!(coloured(&[&["--color", "always"], line].concat()), "{line:?}");
        assert!(coloured(&[line, &["--color=always"]].concat()), "{line:?}");
        assert!(coloured(&[line, &["--color=never", "--color=always"]].concat()), "{line:?}");
        for never in [&[][..], &["--color", "never"], &["--color=never"], &["--color", "auto"]] {
            assert!(!coloured(&[line, never].concat()), "{line:?} {never:?}");
        }
    }
    assert!(!coloured(&["run", "--fly", "--", "--color=always"]));
    assert!(!coloured(&["demo", "--temperature", "x", "--color", "never"]));
}

/// `--NAME VALUE` of a hint.
fn value_of<'t>(text: &'t str, name: &str) -> &'t str {
    let (_, after) = text.split_once(name).unwrap_or_else(|| panic!("no {name} in {text}"));
    after.trim_start().split([',', ' ', '\n']).next().expect("a value")
}

#[test]
fn as_much_memory_as_a_refusal_names_is_enough() {
    let demo = demo();
    let (k3, linear) = (fixture("tests/golden/tiny-k3"), fixture("tests/golden/tiny-kimi-linear"));
    let k3 = ["run", "-m", &k3, "--ids", "1,2,3", "-n", "2", "--output", "ids"];
    let linear = ["run", "-m", &linear, "--ids", "1,2,3", "-n", "2", "--output", "ids", "--context", "64"];
    let inspect = ["inspect", "-m", &demo];
    for line in [
        &["run", "-m", &demo, "-p", "Once", "-n", "2"][..],
        &["run", "-m", &demo, "-p", "Once", "-n", "2", "--expert-memory", "5MiB"],
        &["run", "-m", &demo, "-p", "Once", "-n", "2", "--step", "1", "--threads", "7"],
        &inspect,
        &k3,
        &linear,
    ] {
        let (_, err) = ends_with(deltafin(line).args(["--memory", "5MiB"]), 5);
        let enough = value_of(&err, "--memory ");
        ends_with(deltafin(line).args(["--memory", enough]), 0);
    }
    let (_, err) = ends_with(deltafin(&k3).args(["--expert-memory", "1KiB"]), 5);
    ends_with(deltafin(&k3).args(["--expert-memory", value_of(&err, "or give --expert-memory ")]), 0);
}

#[test]
fn peaks_stay_within_their_plans() {
    let dir = tempfile::tempdir().expect("a directory");
    let model = dir.path().join("model").to_str().expect("plain").to_owned();
    // The real tokenizer's vocabulary, and experts of some size.
    let sizes = ["--layers", "3", "--hidden", "256", "--vocab", "163840", "--experts", "64", "--context", "8192"];
    ends_with(deltafin(&["synth", &model, "--preset", "mini", "-q"]).args(sizes), 0);
    let mut ranks =
        flate2::read::GzDecoder::new(fs::File::open(fixture("tests/tokenizer/tiktoken.model.gz")).expect("there"));
    let mut file = fs::File::create(Path::new(&model).join("tiktoken.model")).expect("made");
    std::io::copy(&mut ranks, &mut file).expect("unpacked");
    let long = "The quick brown fox jumps over the lazy dog. ".repeat(20);
    let (golden, demo) = (fixture("tests/golden/tiny-k3"), "demo".to_owned());
    let ids = vec!["7"; 300].join(",");
    for (model, flags) in [
        (&demo, &["-p", "Once upon a time"][..]),
        (&demo, &["--ids", &ids, "--no-direct"]),
        (&demo, &["-p", "Once upon a time", "--threads", "200"]),
        (&demo, &["-p", "Once upon a time", "--step", "1", "--expert-memory", "100KiB"]),
        (&golden, &["--ids", &ids]),
        (&golden, &["--ids", &ids, "--step", "1", "--threads", "64"]),
        (&model, &["-p", &long]),
        (&model, &["-p", &long, "--memory", "290MiB"]),
        (&model, &["-p", &long, "--step", "100", "--threads", "64"]),
        (&model, &["-p", &long, "--step", "7", "--expert-memory", "30MiB", "--no-direct"]),
        (&model, &["-p", "Hello", "--context", "8192"]),
    ] {
        let mut command = deltafin(&["run", "-m", model, "-n", "8", "--ignore-eos", "--output", "json"]);
        let report = json(&ends_with(command.args(flags), 0).0);
        let (planned, peak) = (&report["memory"]["planned"], &report["memory"]["peak"]);
        let (planned, peak) = (planned.as_u64().expect("bytes"), peak.as_u64().expect("bytes"));
        assert!(peak <= planned + planned / 50, "{command:?}: planned {planned}, peak {peak}");
    }
}

/// The demo with its own cache directory.
fn run_demo(cache: &Path) -> Command {
    let mut command = deltafin(&["demo", "-n", "8", "-q"]);
    command.env("XDG_CACHE_HOME", cache).env("TMPDIR", cache).current_dir("/");
    command
}

/// The one unpacked model.
fn unpacked(cache: &Path) -> PathBuf {
    let entries = fs::read_dir(cache.join("deltafin")).expect("made");
    let mut directories = entries.map(|entry| entry.expect("an entry").path()).filter(|path| path.is_dir());
    let directory = directories.next().expect("unpacked");
    assert_eq!(directories.next(), None, "nothing else is left");
    directory
}

#[test]
fn several_demos_at_once_tell_the_same_story() {
    let cache = tempfile::tempdir().expect("a directory");
    let children: Vec<Child> = (0..4).map(|_| run_demo(cache.path()).spawn().expect("starts")).collect();
    let command = run_demo(cache.path());
    let stories = children.into_iter().map(|child| checked(&command, &child.wait_with_output().expect("ends"), 0).0);
    let stories: Vec<String> = stories.collect();
    assert!(!stories[0].is_empty() && stories.iter().all(|story| *story == stories[0]), "{stories:?}");
    unpacked(cache.path());
}

#[test]
fn whatever_was_done_to_the_cache_the_demo_runs() {
    let cache = tempfile::tempdir().expect("a directory");
    let (story, _) = ends_with(&mut run_demo(cache.path()), 0);
    let damages: [fn(&Path); 7] = [
        |model| fs::write(model.join("model.safetensors.index.json"), "{}").expect("written"),
        |model| fs::write(model.join("model-00001-of-00002.safetensors"), "x").expect("written"),
        |model| {
            for entry in fs::read_dir(model).expect("there") {
                fs::write(entry.expect("an entry").path(), "").expect("cut");
            }
        },
        |model| {
            let file = fs::File::options().write(true).open(model.join("model.safetensors")).expect("there");
            file.set_len(1000).expect("cut");
        },
        |model| fs::remove_dir_all(model).expect("removed"),
        |model| {
            fs::remove_dir_all(model).expect("removed");
            std::os::unix::fs::symlink("/nowhere", model).expect("linked");
        },
        |model| {
            fs::remove_file(model.join("tokenizer.json")).expect("removed");
            fs::create_dir(model.join("tokenizer.json")).expect("made");
        },
    ];
    for (number, damage) in damages.into_iter().enumerate() {
        damage(&unpacked(cache.path()));
        assert_eq!(ends_with(&mut run_demo(cache.path()), 0).0, story, "damage {number}");
    }
    unpacked(cache.path());
}

#[cfg(target_os = "linux")]
#[test]
fn a_cache_that_cannot_be_written_is_told_and_done_without() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = deltafin(&["demo", "-n", "2"]);
    // Nobody, root included, makes a directory there.
    command.env("XDG_CACHE_HOME", "/proc/self").env("TMPDIR", dir.path());
    let (_, err) = ends_with(&mut command, 0);
    assert!(err.contains("note: the demo model is in") && err.contains("/proc/self"), "{err}");
    let (_, err) = ends_with(command.env("TMPDIR", "/proc/self"), 4);
    assert!(err.contains("cannot unpack the demo model") && err.contains("hint: "), "{err}");
}

#[cfg(target_os = "linux")]
#[test]
fn a_limit_on_file_sizes_is_an_io_failure_and_leaves_nothing() {
    let dir = tempfile::tempdir().expect("a directory");
    let target = dir.path().join("logits.safetensors");
    let mut command = Command::new("sh");
    command.args(["-c", "ulimit -f 1; exec \"$@\"", "sh", env!("CARGO_BIN_EXE_deltafin"), "logits", "-m", &demo()]);
    let (_, err) = ends_with(command.args(["-p", "Once upon", "-o"]).arg(&target).stdin(Stdio::null()), 4);
    assert!(err.contains("logits.safetensors") && err.contains("too large"), "{err}");
    assert_eq!(fs::read_dir(dir.path()).expect("there").count(), 0);
}

/// Sends `signals` as fast as a shell can.
fn kill(child: &Child, signals: &[&str]) {
    let script = signals.iter().map(|signal| format!("kill -{signal} $0;")).collect::<String>();
    Command::new("sh").args(["-c", &script, &child.id().to_string()]).status().expect("a shell is there");
}
