//! `drives` as a whole program: what is measured and printed, what is refused, and that nothing is left behind.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use deltafin::store::trace::Trace;
use serde_json::Value;
use tempfile::TempDir;

/// Bytes of a read in these tests.
const SIZE: &str = "65536";

fn deltafin(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafin"));
    command.arg("drives").args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

/// Runs `args` and checks the exit code; returns stdout and stderr.
#[track_caller]
fn ends_with(args: &[&str], code: i32) -> (String, String) {
    let Output { status, stdout, stderr } = deltafin(args).output().expect("it runs");
    let (out, err) = (String::from_utf8(stdout).expect("UTF-8"), String::from_utf8(stderr).expect("UTF-8"));
    assert_eq!(status.code(), Some(code), "{args:?}\nstdout: {out}\nstderr: {err}");
    assert!(!err.contains("panicked"), "{args:?}: {err}");
    (out, err)
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn text(path: &Path) -> &str {
    path.to_str().expect("a plain path")
}

/// A directory with a model of 8 MB in it.
fn with_model() -> TempDir {
    let folder = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..8_u32 << 20).map(|at| (at.wrapping_mul(0x9e37_79b9) >> 24) as u8).collect();
    fs::write(folder.path().join("model.safetensors"), bytes).unwrap();
    folder
}

fn entries(dir: &Path) -> usize {
    fs::read_dir(dir).unwrap().count()
}

#[test]
fn a_directory_with_a_model_is_measured_in_every_way() {
    let folder = with_model();
    let root = text(folder.path());
    let (out, _) = ends_with(&[root, "--seconds", "0.5", "--size", SIZE, "--output", "json", "-q"], 0);
    let report = json(&out);
    let [drive] = report["drives"].as_array().unwrap().as_slice() else { panic!("{out}") };
    assert_eq!(drive["root"], root);
    assert!(!drive["device"].as_str().unwrap().is_empty());
    assert!(["direct", "buffered"].contains(&drive["mode"].as_str().unwrap()));
    assert_eq!((&drive["source"]["kind"], &drive["source"]["files"]), (&Value::from("model"), &Value::from(1)));
    assert!(drive["gb_per_s"].as_f64().unwrap() > 0.0);
    let rates = drive["rates"].as_array().unwrap();
    let patterns: Vec<_> = rates.iter().map(|rate| rate["pattern"].as_str().unwrap()).collect();
    assert_eq!(patterns[..4], ["first", "sustained", "sequential", "page"]);
    let depths: Vec<_> =
        rates.iter().filter(|rate| rate["pattern"] == "random").map(|rate| rate["depth"].as_u64().unwrap()).collect();
    assert_eq!(depths, [1, 2, 4, 8, 16, 32]);
    for rate in rates {
        let of = |key: &str| rate[key].as_f64().unwrap_or_else(|| panic!("{key}: {rate}"));
        assert!(of("gb_per_s") > 0.0 && of("reads") > 0.0 && of("seconds") > 0.0, "{rate}");
        assert!(of("p50_ms") <= of("p90_ms") && of("p90_ms") <= of("p99_ms") && of("p99_ms") <= of("max_ms"), "{rate}");
        let (bytes, expected) = (of("bytes"), of("gb_per_s") * 1e9 * of("seconds"));
        assert!((bytes / expected - 1.0).abs() < 0.01, "{rate}");
        if rate["pattern"] == "random" {
            assert_eq!((of("read_bytes"), bytes), (65_536.0, 65_536.0 * of("reads")));
        }
    }
    let ladder = report["ladder"].as_array().unwrap();
    assert_eq!((ladder.len(), &ladder[0]["roots"]), (1, &Value::from(1)));
    assert!(ladder[0]["gb_per_s"].as_f64().unwrap() > 0.0);
    assert_eq!(report["interrupted"], false);
    assert_eq!(entries(folder.path()), 1);
}

#[test]
fn directories_of_one_drive_are_measured_once_and_said_so() {
    let (folder, link) = (with_model(), tempfile::tempdir().unwrap());
    let other = folder.path().join("other");
    fs::create_dir(&other).unwrap();
    let linked = link.path().join("link");
    symlink(folder.path(), &linked).unwrap();
    let roots = [text(folder.path()), text(&other)];
    let args = [&roots[..], &["--seconds", "0.1", "--size", SIZE, "--output", "json"]].concat();
    let (out, err) = ends_with(&args, 0);
    let report = json(&out);
    let drives = report["drives"].as_array().unwrap();
    assert_eq!((drives.len(), report["ladder"].as_array().unwrap().len()), (2, 1));
    assert_eq!(drives[0]["same_device_as"], Value::Null);
    for drive in &drives[1..] {
        assert_eq!((&drive["same_device_as"], &drive["rates"]), (&drives[0]["root"], &drives[0]["rates"]));
    }
    assert_eq!(err.matches("is on the same drive as").count(), 1, "{err}");
    let (_, err) = ends_with(&[text(folder.path()), text(&linked)], 2);
    assert!(err.contains("link: given twice"), "{err}");
}

#[test]
fn an_empty_directory_gets_a_test_file_that_is_never_seen() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = deltafin(&[text(folder.path()), "--seconds", "0.5", "--size", SIZE]).spawn().unwrap();
    let mut seen = 0;
    while child.try_wait().unwrap().is_none() {
        // While it is opened it has a name; no byte beyond the first page is written by then.
        seen += fs::read_dir(folder.path())
            .unwrap()
            .flatten()
            .filter_map(|entry| entry.metadata().ok())
            .filter(|found| found.len() > 16_384)
            .count();
        thread::sleep(Duration::from_millis(5));
    }
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    assert!(status.success());
    let (out, err) = (String::from_utf8(stdout).unwrap(), String::from_utf8(stderr).unwrap());
    assert!(out.contains("a test file") && err.contains("test file"), "{out}{err}");
    assert_eq!((seen, entries(folder.path())), (0, 0));
    for line in out.lines().filter(|line| !line.contains('/')) {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn sparse_files_are_not_measured() {
    let folder = tempfile::tempdir().unwrap();
    let file = fs::File::create(folder.path().join("model-00001.safetensors")).unwrap();
    file.set_len(1 << 36).unwrap();
    let (out, err) = ends_with(&[text(folder.path()), "--seconds", "0.1", "--size", SIZE, "--output", "json"], 0);
    assert_eq!(json(&out)["drives"][0]["source"]["kind"], "test_file");
    assert!(err.contains("have no data on the drive"), "{err}");
}

fn running(folder: &Path) -> Child {
    let args = [text(folder), "--seconds", "600", "--size", SIZE, "--output", "json", "-q"];
    let child = deltafin(&args).spawn().expect("it runs");
    thread::sleep(Duration::from_millis(1500));
    child
}

fn signal(child: &Child, name: &str) {
    let sent = Command::new("kill").args([name, &child.id().to_string()]).status().expect("kill runs");
    assert!(sent.success());
}

#[test]
fn an_interrupt_ends_it_within_a_second_with_what_was_measured() {
    for (name, code, folder) in [("-INT", 130, with_model()), ("-TERM", 143, tempfile::tempdir().unwrap())] {
        let before = entries(folder.path());
        let child = running(folder.path());
        let start = Instant::now();
        signal(&child, name);
        let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
        assert_eq!(status.code(), Some(code), "{}", String::from_utf8_lossy(&stderr));
        assert!(stderr.is_empty(), "{}", String::from_utf8_lossy(&stderr));
        let report = json(&String::from_utf8(stdout).unwrap());
        assert_eq!((&report["interrupted"], report["drives"].as_array().unwrap().len()), (&Value::Bool(true), 1));
        if before == 1 {
            let rate = &report["drives"][0]["rates"][0];
            assert!(rate["pattern"] == "first" && rate["seconds"].as_f64().unwrap() > 0.5, "{report}");
        }
        assert_eq!(entries(folder.path()), before);
    }
}

#[test]
fn a_kill_leaves_no_test_file() {
    let folder = tempfile::tempdir().unwrap();
    let mut child = running(folder.path());
    child.kill().unwrap();
    child.wait().unwrap();
    assert_eq!(entries(folder.path()), 0);
}

#[test]
fn what_is_no_directory_is_refused_with_all_names() {
    let folder = with_model();
    let (missing, file) = (folder.path().join("missing"), folder.path().join("model.safetensors"));
    let (out, err) = ends_with(&[text(folder.path()), text(&missing), text(&file)], 2);
    assert!(out.is_empty());
    for part in ["missing: no such directory", "model.safetensors: is not a directory", "hint: "] {
        assert!(err.contains(part), "{part}: {err}");
    }
}

#[test]
fn a_directory_that_takes_no_file_is_an_error_that_names_it() {
    let (out, err) = ends_with(&["/proc/self/net", "--seconds", "0.1", "--size", SIZE, "--output", "json", "-q"], 4);
    let report = json(&out);
    assert!(report["drives"][0]["error"].is_string() && report["ladder"].as_array().unwrap().is_empty(), "{report}");
    assert!(err.contains("/proc/self/net"), "{err}");
}

#[test]
fn a_drive_that_vanishes_is_an_error_and_the_rest_is_printed() {
    let folder = with_model();
    let root = folder.path().join("root");
    fs::create_dir(&root).unwrap();
    fs::rename(folder.path().join("model.safetensors"), root.join("model.safetensors")).unwrap();
    let args = [text(&root), "--seconds", "4", "--size", SIZE, "--output", "json", "-q"];
    let child = deltafin(&args).spawn().unwrap();
    thread::sleep(Duration::from_millis(800));
    fs::OpenOptions::new().write(true).open(root.join("model.safetensors")).unwrap().set_len(4096).unwrap();
    let Output { status, stdout, stderr } = child.wait_with_output().unwrap();
    let err = String::from_utf8(stderr).unwrap();
    assert_eq!(status.code(), Some(4), "{err}");
    assert!(err.contains("model.safetensors") && err.contains("end of file"), "{err}");
    assert!(json(&String::from_utf8(stdout).unwrap())["drives"][0]["error"].is_string());
}

#[test]
fn flags_without_effect_or_sense_are_refused() {
    let folder = with_model();
    let root = text(folder.path());
    for args in [
        &[][..],
        &[root, "--seconds", "0"],
        &[root, "--seconds", "-1"],
        &[root, "--seconds", "nan"],
        &[root, "--size", "0"],
        &[root, "--size", "4GiB"],
        &[root, "--output", "xml"],
        &[root, "--tokens", "3"],
        &[root, "--memory", "128GiB"],
        &[root, "--in-turn"],
        &[root, "--simulate", "1"],
        &["--simulate", ""],
        &["--simulate", "1,,2"],
        &["--simulate", "1,0"],
        &["--simulate", "1,nan"],
        &["--simulate", "1,-2"],
        &["--simulate", "1", "--seconds", "3"],
        &["--simulate", "1", "--size", "4096"],
        &["--simulate", "1", "--shape", "k3", "-m", "x"],
        &["--simulate", "1", "--cache-share", "1.5"],
        &["--simulate", "1", "--cache-share", "0.1", "--memory", "1T"],
        &["--simulate", "1", "--jitter", "2"],
        &["--simulate", "1", "--stall", "0.1"],
        &["--simulate", "1", "--stall", "2,1"],
        &[root, "--stall", "0.1,1"],
        &["--simulate", "1", "--tokens", "0"],
        &["--simulate", "1", "--tokens", "99999999999"],
        &["--simulate", "1", "--compute-ms", "-1"],
    ] {
        let (out, err) = ends_with(args, 2);
        assert!(out.is_empty() && !err.is_empty(), "{args:?}");
    }
    let (_, err) = ends_with(&["--simulate", "13.6,x,7"], 2);
    assert!(err.contains("item 2 is `x`"), "{err}");
    let (_, err) = ends_with(&["--simulate", "-1"], 2);
    assert!(err.contains("item 1 is `-1`"), "{err}");
    let (_, err) = ends_with(&["--simulate", "1", "--shape", "no-such-shape"], 3);
    assert!(err.contains("no-such-shape") && err.contains("k3"), "{err}");
    let (_, err) = ends_with(&["--simulate", "1", "--trace", "/nonexistent"], 4);
    assert!(err.contains("/nonexistent"), "{err}");
    assert_eq!(entries(folder.path()), 1);
}

fn ladder(more: &[&str]) -> Vec<Value> {
    let args = ["--simulate", "13.6,7.1,7.1,5.7", "--tokens", "10", "--output", "json"];
    let (out, _) = ends_with(&[&args[..], more].concat(), 0);
    json(&out)["ladder"].as_array().unwrap().clone()
}

#[test]
fn on_paper_the_published_ladder_comes_out_and_the_engines_own_is_better() {
    let (in_turn, own) = (ladder(&["--in-turn", "--shape", "k3"]), ladder(&["--cache-share", "0.04"]));
    for (number, published) in [0.427, 0.625, 0.786, 0.863].into_iter().enumerate() {
        let rate = |ladder: &[Value]| ladder[number]["tokens_per_s"].as_f64().unwrap();
        assert!((rate(&in_turn) / published - 1.0).abs() < 0.05, "{}", in_turn[number]);
        assert!(rate(&own) > 1.5 * rate(&in_turn), "{}", own[number]);
        assert_eq!(own[number]["drives"].as_u64(), Some(number as u64 + 1));
        for field in ["gb_per_s", "busy_share", "hit_rate", "bytes_per_token"] {
            assert!(own[number][field].is_number(), "{field}");
        }
        assert!((in_turn[number]["bytes_per_token"].as_f64().unwrap() / 25.83e9 - 1.0).abs() < 0.001);
    }
}

#[test]
fn on_paper_a_table_fits_a_terminal_and_a_picture_is_drawn() {
    let folder = tempfile::tempdir().unwrap();
    let picture = folder.path().join("picture.svg");
    for more in [&["--in-turn"][..], &["--cache-share", "1"]] {
        let args = ["--simulate", "13.6,7.1", "--shape", "tiny", "--plot", text(&picture)];
        let (out, _) = ends_with(&[&args[..], more].concat(), 0);
        assert!(out.contains("tokens/s of tiny") && out.lines().all(|line| line.chars().count() <= 80), "{out}");
        let drawn = fs::read_to_string(&picture).unwrap();
        assert_well_formed(&drawn);
        assert!(drawn.contains("2 drives") && drawn.contains("tokens/s"), "{drawn}");
    }
}

#[test]
fn on_paper_the_same_seed_gives_the_same_figures_and_memory_helps() {
    let rate = |ladder: &[Value]| ladder[3]["tokens_per_s"].as_f64().unwrap();
    let one = ladder(&["--seed", "3"]);
    assert_eq!(one, ladder(&["--seed", "3"]));
    assert!(rate(&ladder(&["--memory", "512GiB"])) > rate(&one));
}

#[test]
fn on_paper_reads_that_hang_are_done_elsewhere() {
    let (whole, hanging) = (ladder(&[]), ladder(&["--stall", "0.00005,300"]));
    assert_eq!(whole[3]["stalls"], 0);
    assert!(hanging[3]["stalls"].as_u64() > Some(0) && hanging[3]["given_up"].as_u64() > Some(0), "{}", hanging[3]);
    let rate = |rung: &Value| rung["tokens_per_s"].as_f64().unwrap();
    assert!(rate(&hanging[0]) < 0.1 * rate(&hanging[3]), "one drive alone is waited for: {hanging:?}");
    let args = ["--simulate", "13.6,7.1", "--tokens", "3", "--stall", "0.0001,1"];
    let table = ends_with(&args, 0).0;
    assert!(table.contains("reads that hung") && table.lines().all(|line| line.chars().count() <= 80), "{table}");
}

#[test]
fn on_paper_a_recorded_trace_is_replayed_and_one_of_another_model_refused() {
    let folder = tempfile::tempdir().unwrap();
    let path = folder.path().join("trace");
    let mut trace = Trace::new(92, 896);
    for token in 0..12_u16 {
        for layer in 0..92 {
            let mut experts: Vec<u16> = (0..16).map(|expert| (expert * 56 + token * 7 + layer) % 896).collect();
            experts.sort_unstable();
            trace.push(layer, &experts).unwrap();
        }
    }
    trace.write(&path).unwrap();
    let args = ["--simulate", "7.1", "--trace", text(&path), "--output", "json"];
    let report = json(&ends_with(&args, 0).0);
    assert_eq!((&report["tokens"], &report["warm_up"]), (&Value::from(10), &Value::from(2)));
    let (_, err) = ends_with(&[&args[..], &["--tokens", "13"]].concat(), 2);
    assert!(err.contains("12 decoded tokens"), "{err}");
    let (_, err) = ends_with(&[&args[..], &["--shape", "tiny"]].concat(), 2);
    assert!(err.contains("92 layers of 896 experts") && err.contains("3 of 64"), "{err}");
}

#[test]
fn measured_drives_end_in_tokens_a_second() {
    let folder = with_model();
    let demo = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model");
    for model in [["--shape", "k3"], ["-m", text(&demo)]] {
        let args = [text(folder.path()), "--seconds", "0.1", "--size", SIZE, "--tokens", "3", "--output", "json"];
        let report = json(&ends_with(&[&args[..], &model].concat(), 0).0);
        let estimate = &report["estimate"];
        assert!(estimate["ladder"][0]["tokens_per_s"].as_f64().unwrap() > 0.0, "{report}");
        assert_eq!(estimate["drives"][0]["gb_per_s"], report["drives"][0]["gb_per_s"]);
    }
    let args = [text(folder.path()), "--seconds", "0.1", "--size", SIZE, "--no-direct", "--shape", "k3", "-q"];
    let table = ends_with(&args, 0).0;
    assert!(table.contains("tokens/s of k3") && table.contains("buffered reads"), "{table}");
    for line in table.lines().filter(|line| !line.contains('/') || line.contains("tokens/s")) {
        assert!(line.chars().count() <= 80, "{line}");
    }
}

#[test]
fn too_little_memory_for_the_model_is_refused_before_anything_is_measured() {
    let start = Instant::now();
    let folder = with_model();
    let (out, err) = ends_with(&[text(folder.path()), "--shape", "k3", "--memory", "64GiB"], 5);
    assert!(out.is_empty() && err.contains("64.00 GiB") && start.elapsed() < Duration::from_secs(10), "{err}");
}

#[test]
fn a_picture_is_well_formed_and_appears_whole() {
    let folder = with_model();
    let odd = folder.path().join("a <b> & \"c\" 'd'");
    fs::create_dir(&odd).unwrap();
    fs::rename(folder.path().join("model.safetensors"), odd.join("model.safetensors")).unwrap();
    let picture = folder.path().join("picture.svg");
    ends_with(&[text(&odd), "--seconds", "0.3", "--size", SIZE, "--plot", text(&picture), "-q"], 0);
    let drawn = fs::read_to_string(&picture).unwrap();
    assert_well_formed(&drawn);
    for part in ["Drives together", "All drives over time", "1 drive", "&lt;b&gt; &amp; &quot;c&quot;"] {
        assert!(drawn.contains(part), "{part}: {drawn}");
    }
    assert_eq!(entries(folder.path()), 2);
}

#[test]
fn a_picture_that_cannot_be_written_is_refused_at_once() {
    let folder = with_model();
    let missing = folder.path().join("missing/picture.svg");
    let start = Instant::now();
    let (out, err) = ends_with(&[text(folder.path()), "--plot", text(&missing)], 4);
    assert!(out.is_empty() && err.contains("picture.svg") && start.elapsed() < Duration::from_secs(5), "{err}");
}

/// Elements are closed in the order they were opened, attributes are quoted, and text has no bare `&` or `<`.
fn assert_well_formed(document: &str) {
    let mut open = Vec::new();
    let mut rest = document;
    while let Some(at) = rest.find('<') {
        let (before, tag) = rest.split_at(at);
        assert_references(before);
        let end = tag.find('>').expect("a tag ends");
        let inner = &tag[1..end];
        rest = &tag[end + 1..];
        if let Some(name) = inner.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name.to_owned()));
            continue;
        }
        let (inner, closed) = inner.strip_suffix('/').map_or((inner, false), |inner| (inner, true));
        let name = inner.split_whitespace().next().expect("a name");
        assert_eq!(inner.matches('"').count() % 2, 0, "{inner}");
        assert_references(inner);
        if !closed {
            open.push(name.to_owned());
        }
    }
    assert!(open.is_empty() && rest.trim().is_empty(), "{open:?}");
}

fn assert_references(text: &str) {
    for part in text.split('&').skip(1) {
        let known = ["amp;", "lt;", "gt;", "quot;"].iter().any(|name| part.starts_with(name));
        assert!(known, "{text}");
    }
}
