//! `run`, `logits` and `tokenize` as whole programs: what reaches stdout, and how each ends.

use std::fs;
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use safetensors::SafeTensors;
use serde_json::Value;
use tempfile::TempDir;

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join(name)
}

fn tiny_k3() -> String {
    fixture("tests/golden/tiny-k3").to_str().expect("a plain path").to_owned()
}

fn demo() -> String {
    fixture("assets/demo-model").to_str().expect("a plain path").to_owned()
}

fn deltafin(args: &[&str]) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_deltafin"));
    command.args(args).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
    command.env("XDG_CACHE_HOME", env!("CARGO_TARGET_TMPDIR"));
    command
}

/// Runs `args` with `input` on stdin.
fn output(args: &[&str], input: &[u8]) -> Output {
    let mut child = deltafin(args).stdin(Stdio::piped()).spawn().expect("the binary starts");
    let mut stdin = child.stdin.take().expect("piped");
    let input = input.to_vec();
    let writer = thread::spawn(move || {
        // One that ends without reading is no failure of the test.
        let _ = stdin.write_all(&input);
    });
    let output = child.wait_with_output().expect("it ends");
    writer.join().expect("written");
    output
}

/// Runs `args` with `input` on stdin and checks the exit code; returns stdout and stderr.
#[track_caller]
fn ends_with(args: &[&str], input: &[u8], code: i32) -> (String, String) {
    let output = output(args, input);
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{args:?}\nstdout: {out}\nstderr: {err}");
    assert!(!err.contains("panicked"), "{args:?}: {err}");
    (out, err)
}

/// Runs `args` and checks that it succeeds; returns stdout.
#[track_caller]
fn ok(args: &[&str]) -> String {
    ends_with(args, b"", 0).0
}

/// Runs `args` with `input` on stdin and checks that it is refused with nothing on stdout; returns stderr.
#[track_caller]
fn refused(args: &[&str], input: &[u8], code: i32) -> String {
    let (out, err) = ends_with(args, input, code);
    assert!(out.is_empty(), "{args:?}: {out}");
    err
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("output is UTF-8")
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap_or_else(|error| panic!("{error}: {text}"))
}

fn words(ids: &[u32], separator: &str) -> String {
    ids.iter().map(u32::to_string).collect::<Vec<_>>().join(separator)
}

fn numbers(text: &str) -> Vec<u32> {
    text.split_whitespace().map(|word| word.parse().expect("an id")).collect()
}

fn golden_i32(model: &str, name: &str) -> Vec<u32> {
    let bytes = fs::read(fixture(&format!("tests/golden/{model}/golden.safetensors"))).expect("golden");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let data = tensors.tensor(name).expect("there").data().to_vec();
    data.chunks_exact(4).map(|bytes| u32::from_le_bytes(bytes.try_into().expect("four"))).collect()
}

fn f32s(bytes: &[u8]) -> Vec<f32> {
    bytes.chunks_exact(4).map(|bytes| f32::from_le_bytes(bytes.try_into().expect("four"))).collect()
}

/// A copy of the demo model that a test may change.
fn demo_copy() -> TempDir {
    let dir = tempfile::tempdir().expect("a directory");
    for entry in fs::read_dir(fixture("assets/demo-model")).expect("there") {
        let path = entry.expect("an entry").path();
        fs::copy(&path, dir.path().join(path.file_name().expect("a name"))).expect("copied");
    }
    dir
}

fn path(dir: &TempDir) -> &str {
    dir.path().to_str().expect("a plain path")
}

const STORY: [&str; 2] = ["-p", "Once upon a time"];

fn story(args: &[&str]) -> Vec<String> {
    let mut all: Vec<String> = ["run", "-m", &demo()].iter().map(|arg| (*arg).to_owned()).collect();
    all.extend(STORY.iter().chain(args).map(|arg| (*arg).to_owned()));
    all
}

#[track_caller]
fn story_out(args: &[&str]) -> String {
    let args = story(args);
    ok(&args.iter().map(String::as_str).collect::<Vec<_>>())
}

#[test]
fn greedy_ids_are_the_official_ones() {
    for model in ["tiny-k3", "odd-k3", "tiny-kimi-linear"] {
        let dir = fixture(&format!("tests/golden/{model}"));
        let prompt = words(&golden_i32(model, "input_ids"), ",");
        let expected = golden_i32(model, "greedy_ids");
        let args = ["run", "-m", dir.to_str().expect("plain"), "--ids", &prompt, "-n", "48", "--ignore-eos"];
        let out = ok(&[&args[..], &["--output", "ids"]].concat());
        assert_eq!(out, words(&expected, " ") + "\n", "{model}");
        let report = json(&ok(&[&args[..], &["--output", "json"]].concat()));
        assert_eq!(report["ids"], Value::from(expected), "{model}");
        assert_eq!(report["text"], Value::Null, "{model}");
    }
}

#[test]
fn ids_come_from_a_list_a_file_or_stdin() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("ids.txt");
    fs::write(&file, "5 6\n7,8\r\n").expect("written");
    let tail = ["-n", "4", "--ignore-eos", "--output", "ids"];
    let run =
        |ids: &[&str], input: &[u8]| ends_with(&[&["run", "-m", &tiny_k3()], ids, &tail[..]].concat(), input, 0).0;
    let expected = run(&["--ids", "5,6,7,8"], b"");
    assert_eq!(run(&["--ids-file", file.to_str().expect("plain")], b""), expected);
    assert_eq!(run(&["--ids-file", "-"], b"[5, 6, 7, 8]"), expected);
}

#[test]
fn ids_that_are_none_are_refused() {
    for (ids, what) in [("1,abc", "abc"), ("", "empty"), ("1.5", "1.5"), ("99999", "99999"), ("1,,2", "empty")] {
        let err = refused(&["run", "-m", &tiny_k3(), "--ids", ids, "--output", "ids"], b"", 2);
        assert!(err.contains(what), "{ids}: {err}");
    }
    for (args, hint) in [
        (&["--ids", "1"][..], "give --output ids (or json)"),
        (&["--ids", "1", "--output", "ids", "--stop", "x"], "--stop looks at text"),
        (&["-p", "x"], "give --ids with --output ids"),
    ] {
        let err = refused(&[&["run", "-m", &tiny_k3()], args].concat(), b"", 3);
        assert!(err.contains("no tokenizer") && err.contains(hint), "{args:?}: {err}");
    }
}

#[test]
fn the_demo_model_goes_on_with_the_story() {
    let out = story_out(&["-n", "40"]);
    assert!(out.starts_with(", there was a "), "{out}");
    let ids = numbers(&story_out(&["-n", "40", "--output", "ids"]));
    assert_eq!(ids.len(), 40);
    assert_eq!(ok(&["tokenize", "-m", &demo(), "--decode", &words(&ids, ",")]), out);
}

#[test]
fn parts_of_a_prompt_are_joined_in_the_documented_order() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = |name: &str, text: &str| {
        let path = dir.path().join(name);
        fs::write(&path, text).expect("written");
        path.to_str().expect("plain").to_owned()
    };
    let (a, b) = (file("a.txt", "Second."), file("b.txt", "\u{feff}Third.\r\n"));
    let demo = demo();
    let run = |parts: &[&str], input: &str| {
        let args = [&["run", "-m", &demo, "-n", "3", "--output", "json"], parts].concat();
        let report = json(&ends_with(&args, input.as_bytes(), 0).0);
        (report["prompt_tokens"].clone(), report["ids"].clone())
    };
    let whole = run(&["-p", "First.\n\nSecond.\n\nThird.\r\n\n\nLast."], "");
    assert_eq!(run(&["-p", "First.", &a, &b], "Last."), whole);
    let early = run(&["-p", "First.\n\nLast.\n\nSecond."], "");
    assert_eq!(run(&["-p", "First.", "-", &a], "Last."), early);
}

#[test]
fn an_empty_prompt_is_refused_before_the_model_is_looked_at_and_white_space_is_text() {
    for (args, input) in [(&[][..], ""), (&["-p", ""], ""), (&[], "\u{feff}"), (&["/dev/null"], "")] {
        let err = refused(&[&["run", "-m", "/nowhere"], args].concat(), input.as_bytes(), 2);
        assert!(err.contains("prompt is empty"), "{err}");
    }
    ok(&["run", "-m", &demo(), "-p", " ", "-n", "1"]);
}

#[test]
fn input_that_is_no_text_is_refused_with_its_place() {
    let err = refused(&["run", "-m", &demo()], b"caf\xe9", 2);
    assert!(err.contains("standard input") && err.contains("offset 3"), "{err}");
    let err = refused(&["run", "-m", &demo(), "/nowhere/prompt.txt"], b"", 2);
    assert!(err.contains("/nowhere/prompt.txt") && err.contains("give a prompt with -p"), "{err}");
    let prompt = fixture("Cargo.toml");
    let err = refused(&["run", "-m", &demo(), "--experts", "a", prompt.to_str().expect("plain")], b"", 2);
    assert!(err.contains("Cargo.toml: a file") && err.contains("after `--`"), "{err}");
    let err = refused(&["run", "-m", &demo(), "/tmp"], b"", 2);
    assert!(err.contains("is a directory"), "{err}");
}

#[test]
fn what_does_not_fit_the_context_is_refused_with_the_three_numbers() {
    let err = refused(&["run", "-m", &demo(), "-p", "Once upon a time", "-n", "2000"], b"", 2);
    assert!(err.contains("prompt of 4") && err.contains("answer of 2000") && err.contains("context of 1024"), "{err}");
    let long = "Once upon a time ".repeat(400);
    let err = refused(&["run", "-m", &demo()], long.as_bytes(), 2);
    assert!(err.contains("answer of 1 ") && err.contains("context of 1024"), "{err}");
    let err = refused(&["run", "-m", &demo(), "-p", "Once upon a time", "--context", "6", "-n", "3"], b"", 2);
    assert!(err.contains("answer of 3 ") && err.contains("context of 6"), "{err}");
    let report = json(&story_out(&["--context", "6", "--output", "json", "--ignore-eos"]));
    assert_eq!(report["usage"]["completion_tokens"], 2);
}

#[test]
fn flags_that_contradict_each_other_or_do_nothing_are_refused() {
    for (args, named) in [
        (&["-p", "a", "--ids", "1"][..], "--ids"),
        (&["--ids", "1", "--chat"], "--chat"),
        (&["--ids", "1", "--ids-file", "x"], "--ids-file"),
        (&["-p", "a", "--system", "b"], "--chat"),
        (&["-p", "a", "--effort", "low"], "--chat"),
        (&["-p", "a", "--chat", "--effort", "medium"], "medium"),
        (&["-p", "a", "--chat", "--no-thinking", "--effort", "low"], "--effort"),
        (&["-p", "a", "--chat", "--special"], "--special"),
        (&["-p", "a", "--chat", "--thinking", "hide", "--output", "json"], "--thinking"),
        (&["-p", "a", "--top-k", "3"], "--top-k"),
        (&["-p", "a", "--seed", "3"], "--seed"),
        (&["-p", "a", "--temperature", "-1"], "--temperature"),
        (&["-p", "a", "--temperature", "nan"], "--temperature"),
        (&["-p", "a", "--temperature", "1", "--top-p", "0"], "--top-p"),
        (&["-p", "a", "--stop", ""], "--stop"),
        (&["-p", "a", "--max-token", "3"], "--max-token"),
        (&["-p", "a", "-n", "x"], "x"),
        (&["-", "-"], "twice"),
    ] {
        let demo = demo();
        let err = refused(&[&["run", "-m", &demo], args].concat(), b"", 2);
        assert!(err.contains(named), "{args:?}: {err}");
    }
}

#[test]
fn json_is_whole_at_zero_one_and_two_tokens() {
    for n in ["0", "1", "2"] {
        let report = json(&story_out(&["-n", n, "--output", "json"]));
        let count: u64 = n.parse().expect("a number");
        assert_eq!(report["ids"].as_array().expect("ids").len() as u64, count);
        assert_eq!(report["stop"], "length");
        assert_eq!(report["usage"]["completion_tokens"], count);
        assert_eq!(report["usage"]["total_tokens"], 4 + count);
        assert!(report["text"].is_string() && report["prompt_tokens"] == 4, "{report}");
        let timings = &report["timings"];
        assert!(timings["load_s"].is_number() && timings["prefill_s"].is_number(), "{report}");
        assert!(timings["prefill_tps"].as_f64().expect("a rate") > 0.0, "{report}");
        assert_eq!(timings["first_token_s"].is_null(), count == 0, "{report}");
        assert_eq!(timings["decode_tps"].is_null(), count < 2, "{report}");
        let drive = &report["io"]["drives"][0];
        for key in ["path", "mode", "bytes", "seconds", "reads"] {
            assert!(!drive[key].is_null(), "{key}: {report}");
        }
        for key in ["hits", "misses", "wait_s"] {
            assert!(report["io"][key].is_number(), "{key}: {report}");
        }
        assert!(report["memory"]["planned"].is_u64() && report["memory"]["peak"].is_u64(), "{report}");
        assert_eq!(report["backend"], "cpu");
        assert!(report["isa"].is_string() && report["threads"].is_u64(), "{report}");
        assert!(report.get("reasoning").is_none() && report.get("error").is_none(), "{report}");
    }
    assert_eq!(story_out(&["-n", "0"]), "");
    assert_eq!(story_out(&["-n", "0", "--output", "ids"]), "\n");
}

#[test]
fn a_stop_string_ends_the_answer_wherever_tokens_end() {
    let whole = story_out(&["-n", "40"]);
    for (start, end) in [(10, 14), (5, 20), (30, 31), (17, 44)] {
        let stop = &whole[start..end];
        let report = json(&story_out(&["-n", "40", "--output", "json", "--stop", "never", "--stop", stop]));
        let at = whole.find(stop).expect("it is a part");
        assert_eq!(report["text"], whole[..at], "{stop}");
        assert_eq!(report["stop"], "stop_string", "{stop}");
        assert_eq!(story_out(&["-n", "40", "--stop", stop]), whole[..at]);
    }
    let tail = &whole[whole.len() - 6..];
    assert_eq!(story_out(&["-n", "40", "--stop", &format!("{tail}?")]), whole, "what was held back comes out");
}

#[test]
fn each_file_alone_can_name_the_end_and_no_marker_is_shown() {
    let ids = numbers(&story_out(&["-n", "30", "--output", "ids"]));
    let end = ids[12];
    let kept = ids.iter().position(|id| *id == end).expect("it is there");
    for name in ["config.json", "generation_config.json"] {
        let dir = demo_copy();
        let file = dir.path().join(name);
        let mut config = json(&fs::read_to_string(&file).expect("read"));
        config["eos_token_id"] = Value::from(vec![end]);
        fs::write(&file, config.to_string()).expect("written");
        let run = |args: &[&str]| {
            ok(&[&["run", "-m", path(&dir), "-n", "30", "--output", "json"], &STORY[..], args].concat())
        };
        let report = json(&run(&[]));
        assert_eq!((&report["stop"], &report["ids"]), (&"eos".into(), &ids[..kept].to_vec().into()), "{name}");
        let report = json(&run(&["--ignore-eos"]));
        assert_eq!((&report["stop"], &report["ids"]), (&"length".into(), &ids.clone().into()), "{name}");
    }
}

#[test]
fn a_chat_answers_without_markers() {
    let args = ["run", "-m", &demo(), "--chat", "--no-thinking", "-p", "Write a story about a dinosaur."];
    let out = ok(&[&args[..], &["-n", "60"]].concat());
    assert!(out.contains("dinosaur") && !out.contains("<|"), "{out}");
    let report = json(&ok(&[&args[..], &["-n", "60", "--output", "json", "--system", "Be brief."]].concat()));
    assert!(report["reasoning"] == "" && report["tool_calls"] == Value::Array(Vec::new()), "{report}");
    // Within the reasoning nothing goes to stdout.
    let thinking = ["run", "-m", &demo(), "--chat", "-p", "Write a story.", "-n", "5"];
    let (out, err) = ends_with(&thinking, b"", 0);
    assert!(out.is_empty() || !err.is_empty(), "{out}{err}");
    ends_with(&[&thinking[..], &["--thinking", "hide"]].concat(), b"", 0);
}

#[test]
fn one_seed_gives_one_text() {
    let draw = |seed: &str| story_out(&["-n", "30", "--temperature", "1", "--top-p", "0.95", "--seed", seed]);
    assert_eq!(draw("7"), draw("7"));
    assert_ne!(draw("7"), draw("8"));
    assert_eq!(story_out(&["-n", "30", "--temperature", "1", "--top-k", "1"]), story_out(&["-n", "30"]));
}

#[test]
fn a_reader_that_leaves_ends_the_run_without_a_word() {
    for form in ["text", "ids", "json"] {
        let args = story(&["-n", "300", "--ignore-eos", "--output", form, "-q"]);
        let mut child = deltafin(&args.iter().map(String::as_str).collect::<Vec<_>>()).spawn().expect("starts");
        drop(child.stdout.take());
        let output = child.wait_with_output().expect("it ends");
        assert_eq!((output.status.code(), text(&output.stderr).as_str()), (Some(0), ""), "{form}");
    }
}

#[cfg(target_os = "linux")]
#[test]
fn a_full_disk_is_an_io_failure() {
    for args in [
        &["run", "-m", &demo(), "-p", "Once", "-n", "3"][..],
        &["run", "-m", &demo(), "-p", "Once", "-n", "3", "--output", "json"],
        &["run", "-m", &demo(), "-p", "Once", "-n", "3", "--output", "ids"],
        &["logits", "-m", &demo(), "-p", "Once upon", "--nll"],
        &["tokenize", "-m", &demo(), "Once"],
    ] {
        let full = fs::File::create("/dev/full").expect("there");
        let output = deltafin(args).stdout(full).output().expect("it ends");
        assert_eq!(output.status.code(), Some(4), "{args:?}: {}", text(&output.stderr));
    }
    let err = refused(&["logits", "-m", &demo(), "-p", "Once upon", "-o", "/dev/full"], b"", 4);
    assert!(err.contains("/dev/full"), "{err}");
}

/// A run that would go on for a minute, with its stdout open.
fn endless(form: &str) -> Child {
    let dir = tiny_k3();
    let args = ["run", "-m", &dir, "--ids", "1,2,3", "-n", "4000", "--ignore-eos", "--output", form];
    deltafin(&[&args[..], &["--isa", "scalar", "--threads", "1"]].concat()).spawn().expect("starts")
}

fn send(child: &Child, signal: &str) {
    let status = Command::new("kill").args([signal, &child.id().to_string()]).status().expect("kill is there");
    assert!(status.success(), "{signal}");
}

#[test]
fn a_signal_ends_decoding_and_keeps_what_is_finished() {
    for (signal, code) in [("-INT", 130), ("-TERM", 143)] {
        let mut child = endless("ids");
        let mut begin = [0; 8];
        child.stdout.as_mut().expect("piped").read_exact(&mut begin).expect("the first ids");
        send(&child, signal);
        let sent = Instant::now();
        let output = child.wait_with_output().expect("it ends");
        assert_eq!(output.status.code(), Some(code));
        assert!(sent.elapsed() < Duration::from_secs(1), "{:?}", sent.elapsed());
        assert!(output.stdout.ends_with(b"\n"), "{:?}", text(&output.stdout));
    }
    let child = endless("json");
    thread::sleep(Duration::from_millis(1500));
    send(&child, "-INT");
    let output = child.wait_with_output().expect("it ends");
    let report = json(&text(&output.stdout));
    assert_eq!((output.status.code(), &report["stop"]), (Some(130), &"interrupted".into()));
    let ids = report["ids"].as_array().expect("ids").len();
    assert!((1..4000).contains(&ids) && report["usage"]["completion_tokens"] == ids, "{report}");
}

#[test]
fn a_signal_ends_the_wait_for_a_silent_stdin() {
    let mut child = deltafin(&["run", "-m", &demo(), "-p", "Once"]).stdin(Stdio::piped()).spawn().expect("starts");
    let stdin = child.stdin.take();
    thread::sleep(Duration::from_millis(2500));
    send(&child, "-INT");
    let output = child.wait_with_output().expect("it ends");
    drop(stdin);
    assert_eq!(output.status.code(), Some(130));
    assert!(text(&output.stderr).contains("waiting for standard input"), "{}", text(&output.stderr));
}

#[test]
fn a_number_that_is_none_ends_the_run_and_what_came_before_stands() {
    let ids = numbers(&story_out(&["-n", "12", "--output", "ids"]));
    let prompt = numbers(&ok(&["tokenize", "-m", &demo(), STORY[1]]));
    let kept = (3..12).find(|at| !ids[..*at].contains(&ids[*at]) && !prompt.contains(&ids[*at])).expect("a new id");
    let dir = demo_copy();
    let file = dir.path().join("model.safetensors");
    let mut bytes = fs::read(&file).expect("read");
    let (start, row) = {
        let (header, metadata) = SafeTensors::read_metadata(&bytes).expect("a header");
        let tensors = metadata.tensors();
        let (_, tensor) = tensors.iter().find(|(name, _)| name.ends_with("embed_tokens.weight")).expect("embedding");
        let row = (tensor.data_offsets.1 - tensor.data_offsets.0) / tensor.shape[0];
        (8 + header + tensor.data_offsets.0 + ids[kept] as usize * row, row)
    };
    // The embedding of the id that will have been chosen: bf16 NaN throughout.
    bytes[start..start + row].chunks_exact_mut(2).for_each(|value| value.copy_from_slice(&[0xc0, 0x7f]));
    fs::write(&file, bytes).expect("written");
    let args = [&["run", "-m", path(&dir), "-n", "12"], &STORY[..]].concat();
    let (out, err) = ends_with(&[&args[..], &["--output", "ids"]].concat(), b"", 6);
    assert_eq!(numbers(&out), ids[..=kept]);
    assert!(err.contains("layer") && err.contains("position"), "{err}");
    let (out, _) = ends_with(&[&args[..], &["--output", "json"]].concat(), b"", 6);
    let report = json(&out);
    assert!(report["stop"].is_null() && report["error"].is_string(), "{report}");
    assert_eq!(report["ids"], Value::from(ids[..=kept].to_vec()));
}

#[test]
fn logits_are_the_official_ones_and_the_file_is_the_same_each_time() {
    let dir = tempfile::tempdir().expect("a directory");
    let target = dir.path().join("logits.safetensors");
    let ids = golden_i32("tiny-k3", "input_ids");
    let args = ["logits", "-m", &tiny_k3(), "--ids", &words(&ids, ","), "-o", target.to_str().expect("plain")];
    let out = ok(&[&args[..], &["--nll"]].concat());
    let bytes = fs::read(&target).expect("written");
    let tensors = SafeTensors::deserialize(&bytes).expect("safetensors");
    let found = tensors.tensor("logits").expect("logits");
    let golden_bytes = fs::read(fixture("tests/golden/tiny-k3/golden.safetensors")).expect("golden");
    let golden = SafeTensors::deserialize(&golden_bytes).expect("safetensors");
    let expected = golden.tensor("logits").expect("logits");
    assert_eq!(found.shape(), expected.shape());
    let (found, expected) = (f32s(found.data()), f32s(expected.data()));
    let largest = expected.iter().fold(0f32, |max, logit| max.max(logit.abs()));
    let worst = found.iter().zip(&expected).fold(0f32, |max, (a, b)| max.max((a - b).abs()));
    assert!(worst <= 1e-4 * largest, "{worst} of {largest}");
    let stored: Vec<u8> = ids.iter().flat_map(|id| i64::from(*id).to_le_bytes()).collect();
    assert_eq!(tensors.tensor("ids").expect("ids").data(), stored);

    let vocab_size = expected.len() / ids.len();
    let nll = |(row, next): (&[f32], &u32)| {
        let sum: f64 = row.iter().map(|logit| f64::from(*logit).exp()).sum();
        sum.ln() - f64::from(row[*next as usize])
    };
    let mean = expected.chunks(vocab_size).zip(&ids[1..]).map(nll).sum::<f64>() / (ids.len() - 1) as f64;
    let printed: Vec<f64> = out.split_whitespace().filter_map(|word| word.parse().ok()).collect();
    assert!((printed[0] - mean).abs() < 1e-4 && (printed[1] / mean.exp() - 1.0).abs() < 1e-4, "{out} {mean}");

    ok(&args);
    assert_eq!(fs::read(&target).expect("written"), bytes);
}

#[test]
fn logits_that_fail_leave_an_older_file_as_it_was() {
    let dir = tempfile::tempdir().expect("a directory");
    let target = dir.path().join("logits.safetensors");
    fs::write(&target, "old").expect("written");
    let target_name = target.to_str().expect("plain");
    refused(&["logits", "-m", &demo(), "--ids", "1,2", "-o", target_name, "--memory", "1MiB"], b"", 5);
    assert_eq!(fs::read(&target).expect("there"), b"old");
    assert_eq!(fs::read_dir(dir.path()).expect("there").count(), 1);
    for args in [
        &["--ids", "1,2"][..],
        &["-o", target_name],
        &["--ids", "1,2", "-p", "a", "--nll"],
        &["--ids", "1", "--nll"],
        &["-p", "", "--nll"],
        &["--ids", "1,2", "-o", "/nowhere/l.safetensors"],
        &["--ids", "1,2", "-o", path(&dir)],
    ] {
        let demo = demo();
        refused(&[&["logits", "-m", &demo], args].concat(), b"", 2);
    }
}

#[test]
fn tokenize_goes_both_ways_from_text_file_and_stdin() {
    let dir = tempfile::tempdir().expect("a directory");
    let file = dir.path().join("text.txt");
    let written = "A fox 🦊 ran.\r\n";
    fs::write(&file, written).expect("written");
    let (demo, file) = (demo(), file.to_str().expect("plain").to_owned());
    let ids = ends_with(&["tokenize", "-m", &demo], written.as_bytes(), 0).0;
    assert_eq!(ok(&["tokenize", "-m", &demo, "-f", &file]), ids);
    assert_eq!(ok(&["tokenize", "-m", &demo, written]), ids);
    assert_eq!(ok(&["tokenize", "--tokenizer", &format!("{demo}/tokenizer.json"), written]), ids);
    let array = ok(&["tokenize", "-m", &demo, "--json", written]);
    assert_eq!(json(&array), Value::from(numbers(&ids)));
    for list in [&ids, &array, &words(&numbers(&ids), ",")] {
        assert_eq!(ends_with(&["tokenize", "-m", &demo, "--decode"], list.as_bytes(), 0).0, written);
    }
    assert_eq!(ok(&["tokenize", "-m", &demo, ""]), "\n");
    assert_eq!(ok(&["tokenize", "-m", &demo, "--json", ""]), "[]\n");
    // Half a character is written as it is.
    let fox = numbers(&ok(&["tokenize", "-m", &demo, "🦊"]));
    let half = output(&["tokenize", "-m", &demo, "--decode", &fox[0].to_string()], b"");
    assert!(half.status.success() && "🦊".as_bytes().starts_with(&half.stdout), "{:?}", half.stdout);
}

#[test]
fn control_spellings_are_text_unless_asked_for() {
    let ordinary = numbers(&ok(&["tokenize", "-m", &demo(), "<|end_of_msg|>"]));
    let special = numbers(&ok(&["tokenize", "-m", &demo(), "--special", "<|end_of_msg|>"]));
    assert!(ordinary.len() > 1 && special == [4082], "{ordinary:?} {special:?}");
}

#[test]
fn json_lines_are_answered_one_by_one_until_a_bad_one() {
    let lines = "\u{feff}{\"text\": \"Once\"}\r\n\n{\"ids\": [65]}\n{\"ids\": [1.5]}\n{\"text\": \"no\"}\n";
    let (out, err) = ends_with(&["tokenize", "-m", &demo(), "--jsonl"], lines.as_bytes(), 2);
    let answers: Vec<Value> = out.lines().map(json).collect();
    assert!(answers.len() == 2 && answers[0]["ids"].is_array() && answers[1]["text"].is_string(), "{out}");
    assert!(err.contains("line 4"), "{err}");
}

#[test]
fn json_lines_are_answered_while_the_next_is_awaited() {
    let mut child = deltafin(&["tokenize", "-m", &demo(), "--jsonl"]).stdin(Stdio::piped()).spawn().expect("starts");
    let mut stdin = child.stdin.take().expect("piped");
    let mut stdout = child.stdout.take().expect("piped");
    for _ in 0..3 {
        stdin.write_all(b"{\"ids\": []}\n").expect("written");
        let mut answer = [0; 12];
        stdout.read_exact(&mut answer).expect("an answer");
        assert_eq!(&answer, b"{\"text\":\"\"}\n");
    }
    drop(stdin);
    assert!(child.wait().expect("it ends").success());
}

#[test]
fn tokenize_refuses_what_it_cannot_do() {
    let demo = demo();
    for args in [
        &["Once"][..],
        &["-m", &demo, "--tokenizer", "x", "Once"],
        &["-m", &demo, "--decode", "1,x"],
        &["-m", &demo, "--decode", "99999"],
        &["-m", &demo, "--decode", "--json", "1"],
        &["-m", &demo, "--jsonl", "Once"],
        &["-m", &demo, "-f", "/nowhere/text.txt"],
    ] {
        refused(&[&["tokenize"], args].concat(), b"", 2);
    }
    refused(&["tokenize", "-m", "/nowhere", "Once"], b"", 3);
}
