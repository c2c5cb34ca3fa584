//! The binary as a shell sees it: exit codes, streams, help, pages, and the commands that compute nothing.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use tempfile::TempDir;

fn deltafin(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafin"));
    command.args(args).stdin(Stdio::null()).env_remove("NO_COLOR");
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

fn output(args: &[&str]) -> Output {
    deltafin(args).output().expect("the binary starts")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("output is UTF-8")
}

fn fixture(name: &str) -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name).to_str().expect("a plain path").to_owned()
}

/// Runs `args` and checks the code; returns stdout and stderr.
#[track_caller]
fn ends_with(args: &[&str], code: i32) -> (String, String) {
    let output = output(args);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{args:?}\nstdout: {out}\nstderr: {err}");
    assert!(!err.contains("panicked"), "{args:?}: {err}");
    (out, err)
}

const COMMANDS: [&str; 10] =
    ["run", "demo", "bench", "logits", "inspect", "pack", "drives", "tokenize", "completions", "man"];

#[test]
fn help_is_on_stdout_and_no_failure() {
    for flag in ["-h", "--help"] {
        let (out, err) = ends_with(&[flag], 0);
        assert!(COMMANDS.iter().all(|name| out.contains(name)) && err.is_empty(), "{out}{err}");
    }
    let (out, _) = ends_with(&["--version"], 0);
    let commit = out.strip_prefix(concat!("deltafin ", env!("CARGO_PKG_VERSION"), " (")).expect("name and version");
    let commit = commit.strip_suffix(")\n").expect("the commit in brackets");
    assert!(commit == "unknown" || commit.len() == 12 && commit.bytes().all(|b| b.is_ascii_hexdigit()), "{commit}");
}

#[test]
fn every_command_has_a_short_help_and_a_long_one_with_examples() {
    for name in COMMANDS {
        let (short, _) = ends_with(&[name, "-h"], 0);
        let (long, _) = ends_with(&[name, "--help"], 0);
        assert!(long.contains("Examples:") && !short.contains("Examples:"), "{name}\n{short}\n{long}");
    }
}

#[test]
fn what_is_not_known_is_a_usage_error() {
    for args in [
        &[][..],
        &["fly"],
        &["--fly"],
        &["inspect"],
        &["inspect", "--modle", "x"],
        &["inspect", "-m", "x", "--memory", "lots"],
        &["inspect", "-m", "x", "--memory", "0"],
        &["inspect", "-m", "x", "--memory", "1,5G"],
        &["inspect", "-m", "x", "--threads", "0"],
        &["inspect", "-m", "x", "--threads=-1"],
        &["inspect", "-m", "x", "--isa", "mmx"],
        &["inspect", "-m", "x", "--color", "blue"],
        &["inspect", "-m", "x", "-q", "-v"],
        &["completions", "tcsh"],
        &["demo", "-n", "-1"],
        &["run", "-m", "demo", "-p", "x", "-n", "-1"],
    ] {
        let (out, err) = ends_with(args, 2);
        assert!(out.is_empty() && !err.is_empty(), "{args:?}\n{out}\n{err}");
    }
}

#[test]
fn completions_are_made_for_each_shell() {
    for shell in ["bash", "zsh", "fish", "elvish", "powershell"] {
        let (out, err) = ends_with(&["completions", shell], 0);
        assert!(out.contains("inspect") && err.is_empty(), "{shell}");
    }
}

#[test]
fn the_manual_has_a_page_for_each_command() {
    let (out, _) = ends_with(&["man"], 0);
    assert!(out.contains(".TH deltafin 1"), "{out}");
    let dir = tempfile::tempdir().expect("a directory");
    let pages = dir.path().join("man1");
    let (out, err) = ends_with(&["man", pages.to_str().expect("plain")], 0);
    assert!(out.is_empty() && err.contains("pages written to"), "{out}{err}");
    for name in COMMANDS {
        let page = fs::read_to_string(pages.join(format!("deltafin-{name}.1"))).expect("a page");
        assert!(page.contains("Examples:"), "{name}");
        assert_eq!(ends_with(&["man", name], 0).0, page);
    }
    assert!(pages.join("deltafin.1").is_file());
    // A word alone is no directory, unless it is said to be one.
    let at = |args: &[&str]| deltafin(args).current_dir(dir.path()).output().expect("starts");
    assert_eq!(at(&["man", "runn"]).status.code(), Some(2));
    assert_eq!(fs::read_dir(dir.path()).expect("there").count(), 1);
    assert!(at(&["man", "--dir", "runn", "-q"]).stderr.is_empty() && dir.path().join("runn/deltafin.1").is_file());
    let file = dir.path().join("file");
    fs::write(&file, b"").expect("written");
    let (_, err) = ends_with(&["man", file.to_str().expect("plain")], 4);
    assert!(err.starts_with("deltafin: cannot make the directory"), "{err}");
}

#[test]
fn a_reader_that_leaves_is_no_failure() {
    for args in [&["completions", "zsh"][..], &["man"], &["--help"], &["demo", "--list"]] {
        // A pipe whose reading end is closed before the first byte.
        let (reader, writer) = std::io::pipe().expect("a pipe");
        drop(reader);
        let output = deltafin(args).stdout(writer).stderr(Stdio::piped()).output().expect("starts");
        assert_eq!(output.status.code(), Some(0), "{args:?}: {}", text(&output.stderr));
        assert!(output.stderr.is_empty(), "{args:?}: {}", text(&output.stderr));
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_io_failure() {
    for args in [&["completions", "zsh"][..], &["man"], &["--help"], &["demo", "--list"]] {
        let full = fs::File::options().write(true).open("/dev/full").expect("there");
        let output = deltafin(args).stdout(full).stderr(Stdio::piped()).output().expect("starts");
        let err = text(&output.stderr);
        assert_eq!(output.status.code(), Some(4), "{args:?}: {err}");
        assert!(err.contains("cannot write to standard output"), "{args:?}: {err}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_stderr_that_takes_nothing_changes_no_exit_code() {
    let full = fs::File::options().write(true).open("/dev/full").expect("there");
    let status = deltafin(&["inspect", "-m", "/nowhere"]).stderr(full).status().expect("starts");
    assert_eq!(status.code(), Some(3));
}

#[test]
fn messages_have_no_colour_where_there_is_no_terminal() {
    for args in [&["inspect", "-m", "/nowhere"][..], &["--fly"], &["--help"]] {
        for (name, value) in [("NO_COLOR", "1"), ("TERM", "dumb"), ("COLUMNS", "0"), ("COLUMNS", "1")] {
            let output = deltafin(args).env(name, value).output().expect("starts");
            assert!(!output.stdout.contains(&0x1b) && !output.stderr.contains(&0x1b), "{args:?} {name}");
            assert!(!text(&output.stderr).contains("panicked"), "{args:?} {name}");
        }
    }
}

#[test]
fn what_is_no_model_is_refused_with_a_hint() {
    let empty = tempfile::tempdir().expect("a directory");
    let cases = [PathBuf::from("/nowhere"), PathBuf::from("/dev/null"), empty.path().to_owned(), PathBuf::new()];
    for dir in cases {
        let (out, err) =
            ends_with(&["inspect", "-m", dir.to_str().expect("plain")], if dir == Path::new("") { 2 } else { 3 });
        assert!(out.is_empty(), "{out}");
        assert!(!err.is_empty(), "{dir:?}");
    }
}

/// A copy of a golden checkpoint.
fn copy(name: &str) -> TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    for entry in fs::read_dir(fixture(name)).expect("the fixture") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), dir.path().join(entry.file_name())).expect("copied");
    }
    dir
}

fn path(dir: &TempDir) -> &str {
    dir.path().to_str().expect("plain")
}

#[test]
fn inspect_shows_what_a_directory_holds() {
    let (out, err) = ends_with(&["inspect", "-m", &fixture("assets/demo-model")], 0);
    for part in ["kimi_k3", "12,446,016", "tiktoken.model", "generation_config.json", "memory plan", "expert slots"] {
        assert!(out.contains(part) || part == "{part}\n{out}");
    }
    assert!(err.is_empty(), "{err}");
    for name in ["tests/golden/tiny-k3", "tests/golden/odd-k3", "tests/golden/tiny-kimi-linear"] {
        let (out, _) = ends_with(&["inspect", "-m", &fixture(name)], 0);
        assert!(out.contains("none: give token ids (--ids) and take ids (--output ids)"), "{out}");
    }
}

#[test]
fn inspect_prints_one_json_object() {
    let (out, _) = ends_with(&["inspect", "-m", &fixture("assets/demo-model"), "--output", "json"], 0);
    let found: serde_json::Value = serde_json::from_str(&out).expect("JSON");
    assert_eq!(found["family"], "kimi_k3");
    assert_eq!(found["parameters"], 12_446_016);
    assert_eq!(found["problems"], serde_json::json!([]));
    let number = |key: &str| found["memory"][key].as_u64().expect("a number");
    let parts = ["trunk", "states", "latent_cache", "activations", "experts", "fixed"];
    assert_eq!(parts.into_iter().map(number).sum::<u64>(), number("total"));
    assert!(number("total") <= number("limit"));
    assert!(["direct", "buffered"].contains(&found["drives"][0]["mode"].as_str().expect("a mode")));
}

#[test]
fn no_direct_is_what_inspect_then_finds() {
    let args = ["inspect", "-m", &fixture("tests/golden/tiny-k3"), "--no-direct", "--output", "json"];
    let found: serde_json::Value = serde_json::from_str(&ends_with(&args, 0).0).expect("JSON");
    assert_eq!(found["drives"][0]["mode"], "buffered");
}

#[test]
fn a_damaged_directory_is_refused_before_anything_is_printed() {
    let dir = copy("tests/golden/tiny-k3");
    fs::remove_file(dir.path().join("model-00002-of-00002.safetensors")).expect("removed");
    let (out, err) = ends_with(&["inspect", "-m", path(&dir)], 3);
    assert!(out.is_empty() && err.contains("model-00002-of-00002.safetensors"), "{err}");
}

#[test]
fn what_a_partial_download_lacks_is_counted_by_inspect_and_named_whole_by_run() {
    let dir = tempfile::tempdir().expect("a directory");
    fs::copy(fixture("tests/golden/k3/config.json"), dir.path().join("config.json")).expect("copied");
    let index = fs::File::open(fixture("tests/golden/k3/model.safetensors.index.json.gz")).expect("the fixture");
    let mut unpacked = fs::File::create(dir.path().join("model.safetensors.index.json")).expect("made");
    std::io::copy(&mut flate2::read::GzDecoder::new(index), &mut unpacked).expect("written");
    let lines = |args: &[&str]| {
        let (_, err) = ends_with(&[args, &["-m", path(&dir)]].concat(), 3);
        (err.lines().filter(|line| line.contains("safetensors (")).count(), err)
    };
    let (few, err) = lines(&["inspect"]);
    let more = err.lines().find_map(|line| line.strip_prefix("  and ")?.strip_suffix(" more (-v lists all)"));
    let all = few + more.expect("a count").parse::<usize>().expect("a number");
    assert!(few < 10 && err.contains("layer"), "{err}");
    assert_eq!(lines(&["inspect", "-v"]).0, all);
    assert_eq!(lines(&["run", "--ids", "1", "--output", "ids"]).0, all);
}

#[test]
fn a_damaged_tokenizer_is_told_beside_everything_else() {
    let dir = copy("assets/demo-model");
    fs::write(dir.path().join("tiktoken.model"), b"not ranks\n").expect("written");
    let (out, err) = ends_with(&["inspect", "-m", path(&dir)], 3);
    assert!(out.contains("memory plan") && out.contains("damaged"), "{out}");
    assert!(err.contains("tiktoken.model"), "{err}");
}

#[test]
fn too_little_memory_is_told_beside_everything_else() {
    let (out, err) = ends_with(&["inspect", "-m", &fixture("assets/demo-model"), "--memory", "1MiB"], 5);
    assert!(out.contains("12,446,016") && out.contains("does not fit"), "{out}");
    for part in ["the limit is 1.0 MiB (--memory)", "are needed: trunk", "hint: "] {
        assert!(err.contains(part), "{part}\n{err}");
    }
    let (_, err) = ends_with(&["inspect", "-m", &fixture("assets/demo-model"), "--memory", "96"], 5);
    assert!(err.contains("was 96GiB meant?"), "{err}");
}

#[test]
fn memory_that_is_not_there_is_refused() {
    for size in ["1000TiB", "18446744073709551615"] {
        let (_, err) = ends_with(&["inspect", "-m", &fixture("tests/golden/tiny-k3"), "--memory", size], 5);
        assert!(err.contains("GiB"), "{err}");
    }
    let args = ["inspect", "-m", &fixture("tests/golden/tiny-k3"), "--expert-memory", "1B"];
    let (_, err) = ends_with(&args, 5);
    assert!(err.contains("--expert-memory 1 bytes: at least"), "{err}");
}

#[test]
fn the_context_must_suit_the_model() {
    let (_, err) = ends_with(&["inspect", "-m", &fixture("tests/golden/tiny-k3"), "--context", "999999999999"], 2);
    assert!(err.contains("999999999999"), "{err}");
}

/// `inspect -m demo` with its own cache directory and somewhere without a directory of that name.
fn inspect_demo(cache: &Path) -> Command {
    let mut command = deltafin(&["inspect", "-m", "demo", "-q"]);
    command.env("XDG_CACHE_HOME", cache).current_dir(cache);
    command
}

fn unpacked(cache: &Path) -> PathBuf {
    let entries = fs::read_dir(cache.join("deltafin")).expect("made");
    let mut directories = entries.map(|entry| entry.expect("an entry").path()).filter(|path| path.is_dir());
    let directory = directories.next().expect("unpacked");
    assert_eq!(directories.next(), None, "nothing else is left");
    directory
}

#[test]
fn the_demo_model_is_unpacked_and_repaired() {
    let cache = tempfile::tempdir().expect("a directory");
    assert!(inspect_demo(cache.path()).output().expect("starts").status.success());
    let file = unpacked(cache.path()).join("model.safetensors");
    let whole = fs::read(&file).expect("there");
    for damage in [0, whole.len() / 2, whole.len() - 1] {
        let mut damaged = whole.clone();
        damaged[damage] ^= 1;
        fs::write(&file, damaged).expect("written");
        assert!(inspect_demo(cache.path()).output().expect("starts").status.success());
        assert!(fs::read(&file).expect("there") == whole, "byte {damage}");
    }
}

#[test]
fn two_that_unpack_at_once_both_succeed() {
    let cache = tempfile::tempdir().expect("a directory");
    let start = || inspect_demo(cache.path()).stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts");
    for child in [start(), start(), start()] {
        let output = child.wait_with_output().expect("ends");
        assert!(output.status.success(), "{}", text(&output.stderr));
    }
    unpacked(cache.path());
}

#[test]
fn a_cache_that_cannot_be_written_is_done_without() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("file");
    fs::write(&file, b"").expect("written");
    let mut command = inspect_demo(&file);
    let output = command.current_dir(dir.path()).env("TMPDIR", dir.path()).output().expect("starts");
    assert!(output.status.success(), "{}", text(&output.stderr));
    unpacked(dir.path());
}

#[test]
fn without_a_home_the_temporary_directory_serves() {
    let dir = tempfile::tempdir().expect("a directory");
    let mut command = inspect_demo(dir.path());
    command.env_remove("XDG_CACHE_HOME").env_remove("HOME").env("TMPDIR", dir.path());
    assert!(command.output().expect("starts").status.success());
    unpacked(dir.path());
}

#[test]
fn a_place_that_is_nowhere_is_an_io_failure() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("file");
    fs::write(&file, b"").expect("written");
    let mut command = inspect_demo(&file);
    let output = command.current_dir(dir.path()).env("TMPDIR", &file).output().expect("starts");
    assert_eq!(output.status.code(), Some(4), "{}", text(&output.stderr));
}

#[test]
fn prompts_for_the_demo_are_listed() {
    let (out, err) = ends_with(&["demo", "--list"], 0);
    assert!(out.contains("Once upon a time") && out.contains("Who are you?") && err.is_empty(), "{out}{err}");
}

#[test]
fn help_without_a_width_has_lines() {
    let wide = output(&["run", "--help"]).stdout;
    for columns in ["0", "1", "19"] {
        let narrow = deltafin(&["run", "--help"]).env("COLUMNS", columns).output().expect("starts").stdout;
        assert_eq!(text(&narrow), text(&wide), "{columns}");
    }
}

#[test]
fn beginning_and_story_are_one_line_where_they_are_one_text() {
    let dir = tempfile::tempdir().expect("a directory");
    let together = |args: &[&str]| {
        let log = fs::File::create(dir.path().join("log")).expect("made");
        let mut command = deltafin(args);
        let status = command.stdout(log.try_clone().expect("a copy")).stderr(log).status().expect("starts");
        assert!(status.success(), "{args:?}");
        fs::read_to_string(dir.path().join("log")).expect("written")
    };
    let log = together(&["demo", "-n", "12"]);
    assert!(log.starts_with("Once upon a time, there was") && log.contains("\n12 tokens"), "{log}");
    assert!(together(&["demo", "-n", "0"]).starts_with("Once upon a time\n0 tokens"));
    assert!(together(&["demo", "-n", "3", "--chat", "-p", "Who are you?"]).starts_with("Who are you?\n"));
    let log = together(&["run", "-m", "demo", "-p", "Once upon a time", "-n", "12"]);
    assert!(log.starts_with(", there was") && log.contains("\n12 tokens"), "{log}");
    let (out, err) = ends_with(&["demo", "-n", "12"], 0);
    assert!(out.starts_with(", there was") && !out.contains('\n'), "{out}");
    assert!(err.starts_with("Once upon a time\n12 tokens"), "{err}");
}

#[test]
fn no_tokens_are_none_for_the_demo_too() {
    let (out, err) = ends_with(&["demo", "-n", "0"], 0);
    assert!(out.is_empty() && err.contains("0 tokens after a prompt of 4"), "{out}{err}");
}

#[test]
fn a_signal_ends_a_run_that_waits_for_ever() {
    // The first of two may have ended it before the second comes.
    for (signals, codes) in [(&["INT"][..], &[130][..]), (&["TERM"], &[143]), (&["INT", "TERM"], &[130, 143])] {
        // Its stdin stays open and silent.
        let tokenizer = fixture("assets/demo-model/tokenizer.json");
        let mut command = deltafin(&["tokenize", "--tokenizer", &tokenizer]);
        let child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
        let mut child = child.expect("starts");
        let stdin = child.stdin.take(); // else waiting for its end would close it
        thread::sleep(Duration::from_millis(500));
        let sent = Instant::now();
        for signal in signals {
            let kill = Command::new("kill").args([&format!("-{signal}"), &child.id().to_string()]).status();
            assert!(kill.expect("kill is there").success() || signals.len() > 1, "{signal}: it has ended before");
            thread::sleep(Duration::from_millis(50));
        }
        let status = child.wait().expect("ends");
        drop(stdin);
        assert!(status.code().is_some_and(|code| codes.contains(&code)), "{signals:?}: {status}");
        assert!(sent.elapsed() < Duration::from_secs(1), "{signals:?}: {:?}", sent.elapsed());
    }
}
