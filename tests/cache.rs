//! What is learned from run to run: where it is kept, that it warms a start, and that nothing can go wrong with it.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use tempfile::TempDir;

const MODEL: &str = "tests/golden/tiny-k3";

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

/// A user with a cache directory of their own.
struct User {
    cache: TempDir,
}

impl User {
    fn new() -> Self {
        Self { cache: tempfile::tempdir().expect("a directory") }
    }

    fn command(&self, command: &str, model: &Path, args: &[&str]) -> Command {
        let mut child = Command::new(env!("CARGO_BIN_EXE_deltafin"));
        child.arg(command).arg("-m").arg(model).args(args).args(["--memory", "1G", "--threads", "1"]);
        child.env("XDG_CACHE_HOME", self.cache.path()).stdin(Stdio::null()).env_remove("NO_COLOR");
        child
    }

    /// A short run with ids for a prompt.
    fn run(&self, model: &Path, args: &[&str]) -> Output {
        let mut command =
            self.command("run", model, &["--ids", "1,2,3", "-n", "8", "--output", "json", "--ignore-eos"]);
        command.args(args).output().expect("the binary starts")
    }

    fn files(&self) -> Vec<PathBuf> {
        let Ok(entries) = fs::read_dir(self.cache.path().join("deltafin")) else { return Vec::new() };
        entries.map(|entry| entry.expect("an entry").path()).collect()
    }

    /// The one file that there must be.
    #[track_caller]
    fn file(&self) -> PathBuf {
        let files = self.files();
        assert_eq!(files.len(), 1, "{files:?}");
        files[0].clone()
    }
}

fn json(output: &Output) -> serde_json::Value {
    let err = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{err}");
    serde_json::from_slice(&output.stdout).unwrap_or_else(|error| panic!("{error}: {err}"))
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).expect("messages are UTF-8")
}

#[test]
fn a_run_leaves_counts_and_the_next_adds_to_them_and_says_the_same() {
    let user = User::new();
    let model = fixture(MODEL);
    let inspect = || json(&user.command("inspect", &model, &["--output", "json"]).output().expect("starts"));
    assert_eq!(inspect()["expert_uses"]["tokens"], 0);
    assert!(user.files().is_empty(), "looking writes nothing");
    let first = json(&user.run(&model, &[]));
    let uses = inspect()["expert_uses"].clone();
    // Three of the prompt and all new tokens but the last, whose successor nobody asked for.
    assert_eq!((&uses["tokens"], &uses["problem"]), (&10.into(), &serde_json::Value::Null));
    assert_eq!(uses["file"], user.file().to_str().expect("a plain path"));
    let second = json(&user.run(&model, &[]));
    assert_eq!(first["ids"], second["ids"]);
    assert_eq!(inspect()["expert_uses"]["tokens"], 20);
    let text = user.command("inspect", &model, &[]).output().expect("starts");
    assert!(String::from_utf8_lossy(&text.stdout).contains("of about 20 tokens"), "{text:?}");
}

#[test]
fn without_learning_nothing_is_read_or_written() {
    let user = User::new();
    let model = fixture(MODEL);
    json(&user.run(&model, &["--no-learn"]));
    assert!(user.files().is_empty());
    json(&user.run(&model, &[]));
    let before = fs::read(user.file()).expect("there");
    let output = user.run(&model, &["--no-learn", "-v"]);
    json(&output);
    assert!(!stderr(&output).contains("use counts"), "{}", stderr(&output));
    assert_eq!(fs::read(user.file()).expect("there"), before);
    let inspect = user.command("inspect", &model, &["--output", "json", "--no-learn"]).output().expect("starts");
    assert!(json(&inspect)["expert_uses"].is_null());
}

#[test]
fn models_do_not_share_counts_and_a_model_that_moved_keeps_them() {
    let user = User::new();
    json(&user.run(&fixture(MODEL), &[]));
    let file = user.file();
    json(&user.run(&fixture("tests/golden/odd-k3"), &[]));
    assert_eq!(user.files().len(), 2);
    let moved = tempfile::tempdir().expect("a directory");
    for entry in fs::read_dir(fixture(MODEL)).expect("there") {
        let entry = entry.expect("an entry");
        fs::copy(entry.path(), moved.path().join(entry.file_name())).expect("copied");
    }
    let before = fs::read(&file).expect("there");
    json(&user.run(moved.path(), &[]));
    assert_eq!(user.files().len(), 2);
    assert_ne!(fs::read(&file).expect("there"), before);
}

#[test]
fn a_file_that_is_of_no_use_is_one_notice_and_replaced_if_it_was_ours() {
    let user = User::new();
    let model = fixture(MODEL);
    let want = json(&user.run(&model, &[]))["ids"].clone();
    let file = user.file();
    let whole = fs::read(&file).expect("there");
    let mut flipped = whole.clone();
    flipped[20] ^= 1;
    let mut huge = whole.clone();
    huge.resize(1 << 20, 7);
    let (cut, empty, other) = (whole[..whole.len() / 2].to_vec(), Vec::new(), b"dear diary".to_vec());
    for (name, bytes, is_replaced) in [
        ("flipped", &flipped, true),
        ("cut", &cut, true),
        ("too long", &huge, true),
        ("empty", &empty, true),
        ("of another kind", &other, false),
    ] {
        fs::write(&file, bytes).expect("written");
        let output = user.run(&model, &[]);
        assert_eq!(json(&output)["ids"], want, "{name}");
        let err = stderr(&output);
        assert_eq!(err.matches("expert use counts").count(), 1, "{name}: {err}");
        assert_eq!(&fs::read(&file).expect("there") != bytes, is_replaced, "{name}");
        let quiet = {
            fs::write(&file, bytes).expect("written");
            user.run(&model, &["-q"])
        };
        assert!(stderr(&quiet).is_empty(), "{name}: {}", stderr(&quiet));
    }
    let verbose = user.run(&model, &["-v"]);
    let err = stderr(&verbose);
    assert!(err.contains("is of no use") && err.matches("starting without").count() == 1, "{err}");
    let inspect = json(&user.command("inspect", &model, &["--output", "json"]).output().expect("starts"));
    assert!(inspect["expert_uses"]["problem"].as_str().is_some_and(|problem| problem.contains("another kind")));
    // That of another model, under this one's name.
    fs::remove_file(&file).expect("removed");
    json(&user.run(&fixture("tests/golden/odd-k3"), &[]));
    fs::rename(user.file(), &file).expect("renamed");
    let output = user.run(&model, &[]);
    assert_eq!(json(&output)["ids"], want);
    assert!(stderr(&output).contains("belongs to another model"), "{}", stderr(&output));
    // A directory.
    fs::remove_file(&file).expect("removed");
    fs::create_dir(&file).expect("made");
    let output = user.run(&model, &[]);
    assert_eq!(json(&output)["ids"], want);
    assert_eq!(stderr(&output).matches("expert use counts").count(), 1, "{}", stderr(&output));
}

#[test]
fn a_place_that_cannot_be_written_is_told_only_to_those_who_ask() {
    let user = User::new();
    let file = user.cache.path().join("file");
    fs::write(&file, b"").expect("written");
    let run = |environment: &dyn Fn(&mut Command), args: &[&str]| {
        let mut command = user.command("run", &fixture(MODEL), &["--ids", "1,2,3", "-n", "8", "--output", "json"]);
        environment(&mut command);
        command.args(args).output().expect("starts")
    };
    let nowhere: [&dyn Fn(&mut Command); 3] = [
        &|command| _ = command.env("XDG_CACHE_HOME", &file),
        &|command| _ = command.env_remove("XDG_CACHE_HOME").env_remove("HOME"),
        &|command| _ = command.env("XDG_CACHE_HOME", "relative").env("HOME", "also/relative"),
    ];
    for environment in nowhere {
        let output = run(environment, &[]);
        json(&output);
        assert!(!stderr(&output).contains("use counts"), "{}", stderr(&output));
        let output = run(environment, &["-v"]);
        json(&output);
        assert_eq!(stderr(&output).matches("expert use counts: not kept").count(), 1, "{}", stderr(&output));
    }
}

#[test]
fn two_runs_at_once_leave_a_whole_file() {
    let user = User::new();
    let model = fixture(MODEL);
    for _ in 0..3 {
        let start = || {
            let mut command =
                user.command("run", &model, &["--ids", "1,2,3", "-n", "8", "--ignore-eos", "--output", "ids"]);
            command.stdout(Stdio::null()).stderr(Stdio::piped()).spawn().expect("starts")
        };
        for child in [start(), start(), start()] {
            let output = child.wait_with_output().expect("ends");
            assert!(output.status.success() && !stderr(&output).contains("use counts"), "{}", stderr(&output));
        }
    }
    user.file();
    let inspect = json(&user.command("inspect", &model, &["--output", "json"]).output().expect("starts"));
    assert!(inspect["expert_uses"]["problem"].is_null());
    let tokens = inspect["expert_uses"]["tokens"].as_u64().expect("a number");
    assert!((30..=90).contains(&tokens), "{tokens}: the last of each round is there, all may be");
}

#[test]
fn an_interrupted_run_ends_at_once_and_keeps_what_it_learned() {
    let user = User::new();
    let model = fixture("assets/demo-model");
    let mut command = user.command("run", &model, &["-p", "Once upon a time", "-n", "900", "--ignore-eos"]);
    let mut child = command.stdout(Stdio::piped()).stderr(Stdio::null()).spawn().expect("starts");
    let mut first = [0];
    std::io::Read::read_exact(child.stdout.as_mut().expect("piped"), &mut first).expect("a first letter");
    let start = std::time::Instant::now();
    let sent = Command::new("kill").arg("-INT").arg(child.id().to_string()).status().expect("kill runs");
    assert!(sent.success());
    let status = child.wait().expect("ends");
    assert!(start.elapsed().as_millis() < 1000, "{:?}", start.elapsed());
    assert_eq!(status.code(), Some(130));
    user.file();
}

#[test]
fn a_warm_start_finds_the_experts_of_the_last_run_in_memory() {
    let user = User::new();
    let model = fixture("assets/demo-model");
    let run = || {
        let args = ["-p", "Once upon a time", "-n", "100", "--ignore-eos", "--output", "json", "--no-lookahead"];
        json(&user.command("run", &model, &args).output().expect("starts"))["io"].clone()
    };
    let count = |io: &serde_json::Value, name: &str| io[name].as_u64().expect("a number");
    let cold = run();
    let warm = run();
    assert!(count(&warm, "misses") <= count(&cold, "misses"), "{warm} after {cold}");
    // With room for all, no expert is read twice, whoever reads it.
    assert!(count(&warm, "misses") <= 320 && count(&warm, "expert_bytes") <= 320 * 13_056, "{warm}");
}
