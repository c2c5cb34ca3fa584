//! `deltafin bench` as a whole program: its rows, how it ends, and whether its figures are those of the clock on the wall
//! and of the kernel.

use std::fs;
use std::io::{BufRead, BufReader, Read};
use std::path::Path;
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;
use std::time::{Duration, Instant};

use deltafin::engine::{Engine, EngineOptions};
use deltafin::interrupt::Interrupt;
use deltafin::synth::{self, Content, Preset, Recipe, Shape};
use serde_json::Value;
use tempfile::TempDir;

fn demo() -> String {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model").to_str().expect("a plain path").to_owned()
}

/// A model whose experts are large beside a page: 3 layers of 48, 209 kB each.
fn synthetic() -> String {
    static DIR: OnceLock<TempDir> = OnceLock::new();
    let dir = DIR.get_or_init(|| {
        let dir = tempfile::tempdir().expect("a directory");
        let shape = Shape { experts: 48, latent: 512, inner: 256, ..Preset::Tiny.shape() };
        let recipe = Recipe::new(shape, 5, false, Content::Seeded);
        synth::write(dir.path(), &recipe, 2, &mut |_, _| (), &Interrupt::new()).expect("written");
        dir
    });
    dir.path().to_str().expect("a plain path").to_owned()
}

fn bench(model: &str, args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafin"));
    command.args(["bench", "-m", model]).args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("output is UTF-8")
}

#[track_caller]
fn ends_with(output: &Output, code: i32) -> (String, String) {
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "stdout: {out}\nstderr: {err}");
    assert!(!err.contains("panicked"), "{err}");
    (out, err)
}

#[track_caller]
fn ok(model: &str, args: &[&str]) -> String {
    ends_with(&bench(model, args).output().expect("it starts"), 0).0
}

#[track_caller]
fn rows_of(out: &str) -> Vec<Value> {
    assert!(!out.contains("NaN") && !out.contains("inf"), "{out}");
    match serde_json::from_str(out).unwrap_or_else(|error| panic!("{error}: {out}")) {
        Value::Array(rows) => rows,
        other => panic!("no array: {other}"),
    }
}

/// The rows of `--output json`.
#[track_caller]
fn rows(model: &str, args: &[&str]) -> Vec<Value> {
    rows_of(&ok(model, &[args, &["--output", "json", "-q"]].concat()))
}

fn number(row: &Value, name: &str) -> f64 {
    row[name].as_f64().unwrap_or_else(|| panic!("{name} is no number: {row}"))
}

fn names(rows: &[Value]) -> Vec<&str> {
    rows.iter().map(|row| row["test"].as_str().expect("a name")).collect()
}

const FIELDS: [&str; 20] = [
    "test",
    "tokens",
    "tokens_per_s",
    "first_token_s",
    "bytes_read",
    "expert_bytes_needed",
    "amplification",
    "bytes_per_token",
    "hit_rate",
    "wait_share",
    "disk_gb_per_s",
    "disk_limit_gb_per_s",
    "peak_memory_bytes",
    "planned_memory_bytes",
    "threads",
    "isa",
    "backend",
    "io_mode",
    "trunk",
    "commit",
];

#[test]
fn a_row_has_every_field() {
    let rows = rows(&demo(), &["-p", "32", "-n", "8", "-r", "3"]);
    assert_eq!(names(&rows), ["pp32", "tg8", "pg32+8"]);
    for (row, tokens) in rows.iter().zip([32, 8, 40]) {
        let object = row.as_object().expect("an object");
        assert!(FIELDS.iter().all(|field| object.contains_key(*field)), "{row}");
        assert_eq!(row["tokens"], tokens);
        let rate = |part: &str| row["tokens_per_s"][part].as_f64().expect("a number");
        assert!(rate("min") > 0.0 && rate("min") <= rate("mean") && rate("mean") <= rate("max") && rate("sd") >= 0.0);
        assert_eq!((&row["repetitions"], &row["state"], &row["backend"]), (&3.into(), &"warm".into(), &"cpu".into()));
        assert!(row["disk_limit_gb_per_s"].is_null() && row["fma_share"].is_null() && row["memory_share"].is_null());
        let commit = row["commit"].as_str().expect("text");
        assert!(commit == "unknown" || commit.len() >= 40, "{commit}");
        assert!((0.0..=1.0).contains(&number(row, "hit_rate")) && (0.0..=1.0).contains(&number(row, "wait_share")));
        assert!(number(row, "first_token_s") > 0.0);
        let slack = 0.02 * number(row, "planned_memory_bytes");
        assert!(number(row, "peak_memory_bytes") <= number(row, "planned_memory_bytes") + slack, "{row}");
    }
}

#[test]
fn the_fields_of_a_row_agree_with_each_other_and_with_the_flags() {
    for (flags, trunk) in [
        (&["--threads", "1", "--isa", "scalar"][..], "bf16"),
        (&["--threads", "2", "--trunk", "bf12", "--no-direct"], "bf12"),
        (&["--trunk", "int8", "--cold", "--no-lookahead"], "int8 (quantized)"),
    ] {
        let args = ["-p", "24", "-n", "6", "-r", "2", "--expert-memory", "3MiB", "--limits"];
        for row in rows(&synthetic(), &[&args, flags].concat()) {
            let near = |what: &str, own: f64, other: f64| {
                assert!((own - other).abs() <= 1e-6 * other.abs() + 1e-9, "{what}: {own}, {other}: {row}");
            };
            let of = |name: &str| number(&row, name);
            let seconds = row["seconds"]["mean"].as_f64().expect("a number");
            near("bytes a token", of("bytes_per_token") * of("tokens"), of("bytes_read"));
            near("amplification", of("amplification"), of("expert_bytes_read") / of("expert_bytes_needed"));
            near("disk rate", of("disk_gb_per_s"), of("bytes_read") / 1e9 / seconds);
            near("disk share", of("disk_share"), of("disk_gb_per_s") / of("disk_limit_gb_per_s"));
            assert!(
                of("first_token_s") <= seconds && of("wait_share") <= 1.0 && of("disk_busy_share") <= 1.001,
                "{row}"
            );
            assert!(of("bytes_read") >= of("expert_bytes_read") && of("hit_rate") < 1.0, "{row}");
            assert_eq!(row["trunk"], trunk);
            let is_direct = row["io_mode"] == "direct";
            assert!(!is_direct || !flags.contains(&"--no-direct"), "{row}");
            let flag = |name: &str| flags.iter().position(|flag| *flag == name).map(|at| flags[at + 1]);
            assert!(flag("--threads").is_none_or(|threads| row["threads"].as_u64() == threads.parse().ok()), "{row}");
            assert!(flag("--isa").is_none_or(|isa| row["isa"] == isa), "{row}");
        }
    }
}

#[test]
fn small_numbers_give_rows_without_odd_values() {
    let cases: [(&[&str], &[&str]); 6] = [
        (&["-p", "8", "-n", "0"], &["pp8"]),
        (&["-p", "1", "-n", "0"], &["pp1"]),
        (&["-p", "0", "-n", "1"], &["tg1"]),
        (&["-p", "0", "-n", "2"], &["tg2"]),
        (&["-p", "1", "-n", "1"], &["pp1", "tg1", "pg1+1"]),
        (&["-p", "8", "-n", "0", "-d", "5"], &["pp8"]),
    ];
    for (args, tests) in cases {
        for more in [&["-r", "1"][..], &["-r", "1", "--cold"], &["-r", "2"]] {
            let rows = rows(&demo(), &[args, more].concat());
            assert_eq!(names(&rows), tests, "{args:?}");
            for row in rows {
                let rate = &row["tokens_per_s"];
                let has_rate = row["test"] != "tg1";
                assert_eq!(rate["mean"].is_number(), has_rate, "{row}");
                assert_eq!(rate["sd"].is_number(), has_rate && more.contains(&"2"), "{row}");
            }
        }
    }
}

#[test]
fn what_cannot_be_measured_is_refused_before_anything_is_loaded() {
    let cases: [&[&str]; 11] = [
        &["-p", "0", "-n", "0"],
        &["-p", "0", "-n", "0", "-d", "64"],
        &["-p", "0", "--tests", "pp,pg"],
        &["-p", "1025"],
        &["-d", "1024", "-p", "1"],
        &["-d", "18446744073709551615"],
        &["-p", "18446744073709551615", "-n", "18446744073709551615"],
        &["--threads", "9999", "-p", "4"],
        &["--threads", "1,9999", "-p", "4"],
        &["-r", "99999999999"],
        &["--text", "/dev/zero"],
    ];
    for args in cases {
        for form in ["table", "json"] {
            let output = bench(&demo(), &[args, &["--output", form]].concat()).output().expect("it starts");
            let (out, err) = ends_with(&output, 2);
            assert!(out.is_empty() && !err.is_empty(), "{args:?}: {out}{err}");
        }
    }
    let (out, _) = ends_with(&bench("/nowhere", &["-p", "4"]).output().expect("it starts"), 3);
    assert!(out.is_empty());
    let unwritable = ["-p", "4", "--plot", "/nowhere/x.svg"];
    ends_with(&bench(&demo(), &unwritable).output().expect("it starts"), 4);
    ends_with(&bench(&demo(), &["-p", "4", "--memory", "2MiB"]).output().expect("it starts"), 5);
}

#[test]
fn a_cold_prompt_in_one_step_reads_each_needed_expert_once() {
    for tokens in ["2", "7", "64", "300"] {
        let rows = rows(&synthetic(), &["-p", tokens, "-n", "0", "-r", "2", "--cold", "--step", "512"]);
        let row = &rows[0];
        assert_eq!(row["amplification"], 1.0, "{row}");
        assert_eq!(row["expert_bytes_read"], row["expert_bytes_needed"]);
        assert_eq!((&row["state"], &row["hit_rate"]), (&"cold".into(), &0.0.into()));
        // Whole pages: an expert's own bytes, and the rest of its first and last page.
        let padding = number(row, "bytes_read") / number(row, "expert_bytes_needed");
        assert!((1.0..=1.05).contains(&padding), "{row}");
        let experts = number(row, "expert_bytes_needed") / (3.0 * 512.0 * 256.0 / 32.0 * 17.0);
        assert!((3.0 * 8.0..=3.0 * 48.0).contains(&experts), "{experts} experts");
    }
}

#[test]
fn a_warm_model_that_fits_reads_nothing_and_says_so() {
    let model = synthetic();
    let rows = rows(&model, &["-p", "512", "-n", "8", "-r", "1"]);
    for row in &rows {
        assert!(number(row, "amplification") < 0.2 && number(row, "hit_rate") > 0.8, "{row}");
        assert_eq!(row["state"], "warm");
    }
}

#[test]
fn experts_needed_do_not_depend_on_threads_or_on_what_is_in_memory() {
    let model = synthetic();
    let needed = |args: &[&str]| -> Vec<u64> {
        let rows = rows(&model, &[&["-p", "40", "-n", "4", "-r", "1"], args].concat());
        rows.iter().map(|row| row["expert_bytes_needed"].as_u64().expect("a number")).collect()
    };
    let once = needed(&[]);
    assert_eq!(needed(&["--threads", "1,2"]), [&once[..], &once].concat());
    assert_eq!(needed(&["--cold", "--expert-memory", "4MiB"]), once);
    let seeds = needed(&["--seed", "2"]);
    assert_ne!(seeds, once);
    let steps = needed(&["--step", "8", "--tests", "pp"]);
    assert!(steps[0] > once[0], "each step needs its own");
}

#[test]
fn lists_make_a_row_for_each_combination() {
    let args = ["-p", "8,16", "-n", "2", "-d", "0,24,8", "-r", "1", "--threads", "1,2", "--step", "4,32"];
    let rows = rows(&demo(), &args);
    assert_eq!(rows.len(), 2 * 2 * 3 * 5);
    let mut seen: Vec<_> =
        rows.iter().map(|row| ["threads", "step", "depth", "test"].map(|name| row[name].to_string())).collect();
    assert_eq!(seen[0], ["1", "4", "0", "\"pp8\""]);
    seen.sort();
    seen.dedup();
    assert_eq!(seen.len(), rows.len());
}

#[test]
fn every_form_has_the_same_rows() {
    let args = ["-p", "8", "-n", "2", "-r", "1", "-q", "--output"];
    let form = |form: &str| ok(&demo(), &[&args[..], &[form]].concat());
    let jsonl = form("jsonl");
    let lines: Vec<Value> = jsonl.lines().map(|line| serde_json::from_str(line).expect("an object a line")).collect();
    assert_eq!(names(&lines), ["pp8", "tg2", "pg8+2"]);

    let csv = form("csv");
    let cells = |line: &str| line.split(',').count();
    let header = csv.lines().next().expect("a header");
    assert!(header.starts_with("test,tokens,tokens_per_s_mean,tokens_per_s_sd,"), "{header}");
    assert_eq!(csv.lines().count(), 4);
    assert!(csv.lines().all(|line| cells(line) == cells(header)), "{csv}");
    assert!(csv.lines().nth(1).expect("a row").starts_with("pp8,8,"), "{csv}");

    let table = form("table");
    let bars = |line: &str| line.matches('|').count();
    let table: Vec<&str> = table.lines().filter(|line| line.starts_with('|')).collect();
    assert!(table.len() == 5 && table.iter().all(|line| bars(line) == bars(table[0])), "{table:?}");
    assert!(table[1].starts_with("| ---") && table[2].starts_with("| pp8 "), "{table:?}");
}

#[test]
fn experts_that_were_moved_to_drive_roots_are_measured_there() {
    let place = tempfile::tempdir().expect("a directory");
    let (model, roots) = (place.path().join("m"), [place.path().join("a"), place.path().join("b")]);
    let shape = Shape { experts: 16, ..Preset::Tiny.shape() };
    let recipe = Recipe::new(shape, 5, false, Content::Seeded);
    synth::write(&model, &recipe, 2, &mut |_, _| (), &Interrupt::new()).expect("written");
    let [model, a, b] = [&model, &roots[0], &roots[1]].map(|path| path.to_str().expect("a plain path"));
    let mut pack = Command::new(env!("CARGO_BIN_EXE_deltafin"));
    pack.args(["pack", "-m", model, "--to", a, "--to", b, "--move", "--no-learn", "-q"]);
    assert!(pack.status().expect("it starts").success());
    ends_with(&bench(model, &["-p", "8", "--limits"]).output().expect("it starts"), 3);
    let args = ["-p", "64", "-n", "0", "-r", "1", "--cold", "--limits", "--experts", a, b];
    let rows = rows(model, &args);
    assert_eq!(rows[0]["amplification"], 1.0, "{}", rows[0]);
    assert!(number(&rows[0], "disk_limit_gb_per_s") > 0.0 && number(&rows[0], "bytes_read") > 0.0);
}

#[test]
fn limits_are_measured_in_the_same_run() {
    let rows = rows(&synthetic(), &["-p", "64", "-n", "4", "-r", "1", "--cold", "--limits"]);
    for row in &rows {
        for name in ["disk_limit_gb_per_s", "disk_share", "memory_limit_gb_per_s", "fma_limit_gflops"] {
            assert!(number(row, name) > 0.0, "{name}: {row}");
        }
        let share = number(row, "disk_gb_per_s") / number(row, "disk_limit_gb_per_s");
        assert!((number(row, "disk_share") / share - 1.0).abs() < 1e-6);
    }
    assert!(rows[0]["memory_share"].is_null() && number(&rows[0], "fma_share") > 0.0);
    assert!(rows[1]["fma_share"].is_null() && number(&rows[1], "memory_share") > 0.0);
}

#[test]
fn a_text_is_measured_instead_of_random_tokens() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("story.txt");
    fs::write(&file, "Once upon a time there was a little robot.").expect("written");
    let args = ["-p", "64", "-n", "4", "-r", "2", "--text"];
    let rows = rows(&demo(), &[&args[..], &[file.to_str().expect("plain")]].concat());
    assert_eq!(names(&rows), ["pp64", "tg4", "pg64+4"]);
    fs::write(&file, "").expect("written");
    let output = bench(&demo(), &["--text", file.to_str().expect("plain")]).output().expect("it starts");
    ends_with(&output, 2);
}

#[test]
fn a_plot_is_a_picture_of_the_sweep_and_of_the_drives() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("x.svg");
    let args = ["-p", "32", "-n", "4", "-r", "1", "-d", "0,64", "--cold", "-q", "--plot"];
    ok(&synthetic(), &[&args[..], &[file.to_str().expect("plain")]].concat());
    let picture = fs::read_to_string(&file).expect("written");
    assert!(picture.starts_with("<svg ") && picture.ends_with("</svg>\n"));
    for part in ["Speed over context", "pp32", "tg4", "pg32+4", "Drives", "GB/s"] {
        assert!(picture.contains(part), "{part}: {picture}");
    }
}

#[test]
fn measuring_leaves_the_model_directory_as_it_was() {
    let model = synthetic();
    let list = || {
        let mut names: Vec<_> = fs::read_dir(&model).expect("there").map(|entry| entry.expect("one").path()).collect();
        names.sort();
        names
    };
    let (before, home) = (list(), tempfile::tempdir().expect("a directory"));
    let mut command = bench(&model, &["-p", "16", "-n", "2", "-r", "1", "-q"]);
    command.env("HOME", home.path()).env("XDG_CACHE_HOME", home.path()).env("XDG_STATE_HOME", home.path());
    ends_with(&command.output().expect("it starts"), 0);
    assert_eq!(list(), before);
    assert_eq!(fs::read_dir(home.path()).expect("there").count(), 0);
}

#[test]
fn a_closed_pipe_ends_the_measurement_quietly() {
    let mut child = bench(&demo(), &["-p", "8,8,1000", "-n", "0", "-r", "500", "-q"]).spawn().expect("it starts");
    let mut line = String::new();
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    out.read_line(&mut line).expect("a line");
    drop(out);
    let start = Instant::now();
    assert!(child.wait().expect("it ends").success());
    assert!(start.elapsed() < Duration::from_secs(60));
}

fn interrupt(child: &Child) {
    let kill = Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill is there");
    assert!(kill.success());
}

#[test]
fn an_interrupt_leaves_the_rows_that_are_done_in_a_whole_array() {
    let args = ["-p", "8,1000", "-n", "0", "-r", "50", "--output", "json", "-q"];
    let mut child = bench(&demo(), &args).spawn().expect("it starts");
    let mut out = BufReader::new(child.stdout.take().expect("piped"));
    let mut printed = Vec::new();
    // Rows come as soon as they are done.
    out.read_until(b'}', &mut printed).expect("a row begins");
    interrupt(&child);
    let start = Instant::now();
    out.read_to_end(&mut printed).expect("the rest");
    assert_eq!(child.wait().expect("it ends").code(), Some(130));
    assert!(start.elapsed() < Duration::from_secs(2), "{:?}", start.elapsed());
    assert_eq!(names(&rows_of(&text(&printed))), ["pp8"]);
}

#[test]
fn an_interrupt_at_any_time_leaves_a_whole_array() {
    for delay_ms in [40, 80, 160, 320] {
        let args = ["-p", "900", "-n", "0", "-r", "100", "--output", "json", "-q", "--limits", "--cold"];
        let child = bench(&demo(), &args).spawn().expect("it starts");
        std::thread::sleep(Duration::from_millis(delay_ms));
        interrupt(&child);
        let output = child.wait_with_output().expect("it ends");
        let (out, _) = ends_with(&output, 130);
        assert!(rows_of(&out).is_empty(), "{delay_ms} ms: {out}");
    }
}

/// Both counts within 2 %.
#[cfg(target_os = "linux")]
#[track_caller]
fn agree(what: &str, own: f64, other: f64) {
    assert!((own - other).abs() <= 0.02 * other, "{what}: {own} here, {other} there");
}

#[test]
#[cfg(target_os = "linux")]
fn bytes_read_are_those_that_the_kernel_counts() {
    // Little memory, so that reading goes on; no drive shows what is not asked for.
    let args = ["-p", "200", "-n", "16", "-r", "3", "--expert-memory", "3MiB"];
    for more in [&[][..], &["--cold"], &["--no-direct"], &["--no-direct", "--cold"]] {
        for row in rows(&synthetic(), &[&args, more].concat()) {
            if row["kernel_rchar"].is_null() {
                return;
            }
            assert!(number(&row, "bytes_read") > 1e6, "{row}");
            agree("all reads", number(&row, "bytes_read"), number(&row, "kernel_rchar"));
            if row["io_mode"] == "direct" {
                agree("reads of the drive", number(&row, "bytes_read"), number(&row, "kernel_read_bytes"));
            }
        }
    }
}

/// `name` of `/proc/PID/io` of a process that has ended and was not waited for.
#[cfg(target_os = "linux")]
fn io_of_ended(child: &Child, name: &str) -> Option<u64> {
    let proc = std::path::PathBuf::from(format!("/proc/{}", child.id()));
    for _ in 0..1000 {
        let stat = fs::read_to_string(proc.join("stat")).ok()?;
        if stat.rsplit(')').next()?.trim_start().starts_with('Z') {
            let io = fs::read_to_string(proc.join("io")).ok()?;
            let line = io.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
            return line.trim().parse().ok();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
    None
}

#[test]
#[cfg(target_os = "linux")]
fn bytes_read_are_those_that_a_bystander_sees() {
    // Two runs that differ in repetitions alone: what they read more is what the repetitions read.
    let run = |repetitions: &str| {
        let args = ["-p", "200", "-n", "0", "-r", repetitions, "--cold", "--output", "json", "-q"];
        let mut child = bench(&synthetic(), &args).spawn().expect("it starts");
        let mut out = String::new();
        child.stdout.take().expect("piped").read_to_string(&mut out).expect("text");
        let row = rows_of(&out).remove(0);
        let counter = if row["io_mode"] == "direct" { "read_bytes" } else { "rchar" };
        let seen = io_of_ended(&child, counter);
        assert!(child.wait().expect("it ends").success());
        (number(&row, "bytes_read") * number(&row, "repetitions"), seen)
    };
    let (one, five) = (run("1"), run("5"));
    if let (Some(one_seen), Some(five_seen)) = (one.1, five.1) {
        agree("bytes of four repetitions", five.0 - one.0, (five_seen - one_seen) as f64);
    }
}

#[test]
fn times_are_those_of_a_clock_outside() {
    // Rows are printed as soon as they are measured: between two lie the repetitions of one.
    let args = ["-p", "8,1000,1000", "-n", "0", "-r", "3", "--cold", "--output", "jsonl", "-q"];
    let mut child = bench(&demo(), &args).spawn().expect("it starts");
    let lines = BufReader::new(child.stdout.take().expect("piped")).lines();
    let rows: Vec<(Instant, Value)> = lines
        .map(|line| {
            let line = line.expect("text");
            (Instant::now(), serde_json::from_str(&line).expect("an object"))
        })
        .collect();
    assert!(child.wait().expect("it ends").success());
    for pair in rows.windows(2) {
        let outside = (pair[1].0 - pair[0].0).as_secs_f64();
        let row = &pair[1].1;
        let inside = 3.0 * row["seconds"]["mean"].as_f64().expect("a number");
        // Emptying the caches three times is not part of it.
        assert!(inside <= outside && inside >= 0.98 * outside - 0.1, "{inside} s here, {outside} s outside");
        let seconds = 1000.0 / row["tokens_per_s"]["max"].as_f64().expect("a number");
        assert!((seconds / row["seconds"]["min"].as_f64().expect("a number") - 1.0).abs() < 1e-3, "{row}");
    }
}

#[test]
fn a_session_goes_back_to_a_mark_with_the_same_bits() {
    let options = EngineOptions { threads: Some(2), step: Some(16), ..EngineOptions::new(demo(), 80) };
    let engine = Engine::open(&options, &(), &Interrupt::new()).expect("opens");
    let ids: Vec<u32> = (0..80).map(|i| i * 7 % 500).collect();
    let mut session = engine.session().expect("room");
    let empty = session.mark().expect("whole");
    let whole = session.feed(&ids[..60], &()).expect("fed").to_vec();
    let mark = session.mark().expect("whole");
    let on = session.feed(&ids[60..], &()).expect("fed").to_vec();
    for _ in 0..2 {
        session.rewind(&mark).expect("its own");
        assert_eq!(session.len(), 60);
        session.feed(&ids[10..30], &()).expect("other tokens");
        session.rewind(&mark).expect("its own");
        assert!(session.feed(&ids[60..], &()).expect("fed") == on);
    }
    session.rewind(&empty).expect("its own");
    assert!(session.is_empty() && session.feed(&ids[..60], &()).expect("fed") == whole);
    // A place that a sequence does not have.
    let mut other = engine.session().expect("room");
    assert!(other.rewind(&mark).is_err() && other.rewind(&empty).is_ok());
}
