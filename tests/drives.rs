//! `deltafin drives` as a whole program.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};
use std::time::{Duration, Instant};

fn command(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafin"));
    command.arg("drives").args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn run(args: &[&str]) -> Output {
    command(args).output().expect("the binary starts")
}

/// A directory with a few files of real bytes.
fn root() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    let bytes: Vec<u8> = (0..8_000_000_u32).map(|at| (at.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    fs::write(dir.path().join("a"), &bytes).unwrap();
    fs::write(dir.path().join("b"), &bytes[..7_000_001]).unwrap();
    dir
}

fn text(path: &Path) -> &str {
    path.to_str().unwrap()
}

#[test]
fn json_has_every_root_and_a_ladder() {
    let (a, b) = (root(), root());
    let plot = a.path().join("plot.svg");
    let output = run(&[
        text(a.path()),
        text(b.path()),
        "--seconds",
        "0.05",
        "--size",
        "1MiB",
        "--plot",
        text(&plot),
        "--output",
        "json",
        "-q",
    ]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    assert!(output.stderr.is_empty(), "{}", String::from_utf8_lossy(&output.stderr));
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let drives = report["drives"].as_array().unwrap();
    assert_eq!(drives.len(), 2);
    assert_eq!(drives[1]["same_device_as"], drives[0]["root"]);
    for drive in drives {
        assert!(["direct", "buffered"].contains(&drive["mode"].as_str().unwrap()));
        assert!(!drive["device"].as_str().unwrap().is_empty() && !drive["fs"].as_str().unwrap().is_empty());
        let rates = drive["rates"].as_array().unwrap();
        assert_eq!(rates.len(), 7);
        for rate in rates {
            assert!(rate["gb_per_s"].as_f64().unwrap() > 0.0, "{rate}");
            let of = |name: &str| rate[name].as_f64().unwrap();
            assert!(of("p50_ms") <= of("p90_ms") && of("p90_ms") <= of("p99_ms") && of("p99_ms") <= of("max_ms"));
        }
    }
    let ladder = report["ladder"].as_array().unwrap();
    assert_eq!(ladder.iter().map(|step| step["roots"].as_u64().unwrap()).collect::<Vec<_>>(), [1, 2]);
    assert!(ladder.iter().all(|step| step["gb_per_s"].as_f64().unwrap() > 0.0));
    assert!(fs::read_to_string(&plot).unwrap().ends_with("</svg>\n"));
    assert_eq!(fs::read_dir(b.path()).unwrap().count(), 2, "nothing is left on the drive");
}

#[test]
fn what_cannot_be_measured_is_refused_by_name() {
    let dir = root();
    let file = dir.path().join("a");
    let twice = format!("{}/.", text(dir.path()));
    for (args, named) in [
        (vec![], "directory"),
        (vec!["/nonexistent/root"], "/nonexistent/root"),
        (vec![text(&file)], "not a directory"),
        (vec![text(dir.path()), &twice], "given twice"),
        (vec![text(dir.path()), "--seconds", "0"], "--seconds"),
        (vec![text(dir.path()), "--seconds", "NaN"], "--seconds"),
        (vec![text(dir.path()), "--size", "0"], "--size"),
    ] {
        let output = run(&args);
        let error = String::from_utf8_lossy(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{args:?}: {error}");
        assert!(error.contains(named), "{args:?}: {error}");
        assert!(output.stdout.is_empty());
    }
    let output = run(&[text(dir.path()), "--plot", "/nonexistent/plot.svg"]);
    assert_eq!(output.status.code(), Some(4));
}

#[test]
fn an_interrupt_ends_it_at_once_and_leaves_no_file() {
    let dir = tempfile::tempdir().unwrap();
    let mut child = command(&[text(dir.path()), "--seconds", "30"]).spawn().unwrap();
    let deadline = Instant::now() + Duration::from_secs(20);
    while fs::read_dir(dir.path()).unwrap().count() == 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    std::thread::sleep(Duration::from_millis(100));
    let status = Command::new("kill").args(["-INT", &child.id().to_string()]).status().unwrap();
    assert!(status.success());
    let began = Instant::now();
    assert_eq!(child.wait().unwrap().code(), Some(130));
    // Flushing what was written may take the drive a while; nothing else may.
    assert!(began.elapsed() < Duration::from_secs(10), "{:?}", began.elapsed());
    assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
}

#[test]
fn on_paper_the_published_ladder_comes_out_and_the_engines_own_is_better() {
    let ladder = |more: &[&str]| {
        let mut args = vec!["--simulate", "13.6,7.1,7.1,5.7", "--shape", "k3", "--tokens", "10", "--output", "json"];
        args.extend(more);
        let output = run(&args);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        report["ladder"].as_array().unwrap().clone()
    };
    let in_turn = ladder(&["--in-turn"]);
    let own = ladder(&[]);
    for (number, published) in [0.427, 0.625, 0.786, 0.863].into_iter().enumerate() {
        let rate = |ladder: &[serde_json::Value]| ladder[number]["tokens_per_s"].as_f64().unwrap();
        assert!((rate(&in_turn) / published - 1.0).abs() < 0.05, "{}", in_turn[number]);
        assert!(rate(&own) > 1.5 * rate(&in_turn), "{}", own[number]);
        for field in ["drives", "gb_per_s", "busy_share", "hit_rate", "bytes_per_token"] {
            assert!(own[number][field].is_number(), "{field}");
        }
    }
}

#[test]
fn rates_and_shapes_that_are_none_are_refused_by_name() {
    for (args, named) in [
        (["--simulate", "13.6,0"], "--simulate"),
        (["--simulate", "NaN"], "--simulate"),
        (["--simulate", "1,,2"], "--simulate"),
        (["--simulate", "-1"], "-1"),
        (["--simulate", "1,inf"], "--simulate"),
    ] {
        let output = run(&args);
        assert_eq!(output.status.code(), Some(2), "{args:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(named), "{args:?}");
    }
    let output = run(&["--simulate", "1", "--shape", "/nonexistent"]);
    assert_eq!(output.status.code(), Some(3));
    let output = run(&["--simulate", "1", "--trace", "/nonexistent"]);
    assert_eq!(output.status.code(), Some(4));
}
