//! A model read from several drive roots, as a whole program: the same logits whatever the copies, and what is said and
//! done when some of them are damaged, gone or not enough.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use serde_json::Value;
use tempfile::TempDir;

const IDS: &str = "1,2,3,4,5,6,7,8,9,10,11,12";

/// A folder with a synthetic model `m` of the tiny preset, where commands run.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        let place = Self(tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a temporary directory"));
        place.ok(&["synth", "m", "--preset", "tiny"]);
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn output(&self, args: &[&str]) -> Output {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deltafin"));
        command.args(args).current_dir(self.0.path()).env("XDG_CACHE_HOME", self.0.path()).stdin(Stdio::null());
        command.output().expect("the binary starts")
    }

    #[track_caller]
    fn ends_with(&self, args: &[&str], code: i32) -> (String, String) {
        checked(args, &self.output(args), code)
    }

    #[track_caller]
    fn ok(&self, args: &[&str]) -> (String, String) {
        self.ends_with(args, 0)
    }

    /// Logits with few experts in memory, and what was said.
    #[track_caller]
    fn logits(&self, args: &[&str]) -> (Vec<u8>, String) {
        let (_, said) =
            self.ok(&[&["logits", "-m", "m", "--ids", IDS, "-o", "out", "--expert-memory", "1MiB"], args].concat());
        (fs::read(self.path("out")).expect("logits"), said)
    }

    /// Two roots with all experts each.
    fn pack_twice(&self) {
        self.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--replicas", "2"]);
    }

    /// Expert files below `root`.
    fn experts(&self, root: &str) -> Vec<PathBuf> {
        let layers = fs::read_dir(self.path(root)).expect("a root").map(|entry| entry.expect("an entry").path());
        let files = layers.filter(|path| path.is_dir()).flat_map(|layer| fs::read_dir(layer).expect("a layer"));
        files.map(|entry| entry.expect("an entry").path()).collect()
    }
}

#[track_caller]
fn checked(args: &[&str], output: &Output, code: i32) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{args:?}\nstdout: {out}\nstderr: {err}");
    assert!(!err.contains("panicked"), "{args:?}: {err}");
    (out, err)
}

fn flip(path: &Path) {
    let mut bytes = fs::read(path).expect("an expert");
    bytes[100] ^= 1;
    fs::write(path, bytes).expect("written");
}

#[test]
fn logits_are_the_same_from_shards_and_any_roots() {
    let place = Place::new();
    let (expected, _) = place.logits(&[]);
    place.pack_twice();
    place.ok(&["pack", "-m", "m", "--to", "c", "--to", "d"]);
    // On a device of its own, where there is memory to be one.
    let other = tempfile::tempdir_in("/dev/shm").ok();
    let e = other.as_ref().map_or_else(|| place.path("e"), |other| other.path().to_owned());
    let e = e.to_str().expect("a plain path");
    place.ok(&["pack", "-m", "m", "--to", e]);
    let (two, all) = (&["a", e][..], &["a", "b", "c", "d", e][..]);
    for roots in [&["a"][..], &["b"], &["c"], &["a", "b"], &["c", "d"], two, &["c", "d", e], all, &["a", "a"]] {
        for more in [&[][..], &["--verify-reads"], &["--no-lookahead"], &["--no-direct"]] {
            let (logits, said) = place.logits(&[&["--experts"], roots, more].concat());
            assert!(logits == expected, "{roots:?} {more:?}");
            assert!(!said.contains("drive "), "{said}");
        }
    }
    place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--move"]);
    assert!(place.logits(&["--experts", "a", "b"]).0 == expected, "after a move");
}

#[test]
fn damage_is_found_where_checked_and_read_elsewhere_with_one_notice() {
    let place = Place::new();
    let (expected, _) = place.logits(&[]);
    place.pack_twice();
    // Moved: else the shards would be read, which are whole.
    place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--replicas", "2", "--move"]);
    for file in place.experts("a") {
        flip(&file);
    }
    let (logits, said) = place.logits(&["--experts", "a", "b", "--verify-reads"]);
    assert!(logits == expected);
    assert_eq!(said.matches("checksum").count(), 1, "{said}");
}

#[test]
fn files_that_are_gone_are_read_elsewhere() {
    let place = Place::new();
    let (expected, _) = place.logits(&[]);
    place.pack_twice();
    let files = place.experts("a");
    // Some, then all: a drive that went.
    for gone in [&files[..files.len() / 2], &files] {
        for file in gone {
            let _ = fs::remove_file(file);
        }
        assert!(place.logits(&["--experts", "a", "b"]).0 == expected);
    }
}

#[test]
fn the_last_copy_damaged_or_gone_is_exit_code_4_with_its_place() {
    let place = Place::new();
    // Moved: the shards hold no experts any more.
    place.ok(&["pack", "-m", "m", "--to", "a", "--move"]);
    let args = ["logits", "-m", "m", "--ids", IDS, "-o", "out", "--experts", "a", "--verify-reads"];
    let files = place.experts("a");
    let good: Vec<_> = files.iter().map(|file| fs::read(file).expect("an expert")).collect();
    files.iter().for_each(|file| flip(file));
    let (_, said) = place.ends_with(&args, 4);
    assert!(said.contains("expert L") && said.contains(".mxfp4") && said.contains("checksum"), "{said}");
    for (file, good) in files.iter().zip(&good) {
        fs::write(file, &good[..good.len() / 2]).expect("written");
    }
    let (_, said) = place.ends_with(&args, 4);
    assert!(said.contains(".mxfp4") && said.contains("offset") && said.contains("end of file"), "{said}");
    for (file, good) in files.iter().zip(&good) {
        fs::write(file, good).expect("written");
    }
    place.ok(&args);
}

#[test]
fn the_report_has_the_figures_of_each_drive() {
    let place = Place::new();
    place.pack_twice();
    let args = ["run", "-m", "m", "--ids", "1,2,3", "-n", "3", "--output", "json", "--experts", "a", "b"];
    let report: Value = serde_json::from_str(&place.ok(&args).0).expect("JSON");
    let drives = report["io"]["drives"].as_array().expect("drives");
    assert!(!drives.is_empty(), "{report}");
    for drive in drives {
        for key in ["path", "mode", "state"] {
            assert!(drive[key].is_string(), "{key}: {report}");
        }
        for key in ["bytes", "reads", "errors", "seconds"] {
            assert!(drive[key].is_number(), "{key}: {report}");
        }
        assert_eq!(drive["state"], "ok");
    }
    assert!(report["io"]["retries"].is_number(), "{report}");
}

#[test]
fn a_root_of_many_files_needs_few_descriptors() {
    let place = Place::new();
    let (expected, _) = place.logits(&[]);
    place.pack_twice();
    for more in ["", "--no-direct"] {
        let script = format!(
            "ulimit -n 64; exec \"$0\" logits -m m --ids {IDS} -o out --expert-memory 1MiB --experts a b {more}"
        );
        let mut command = Command::new("sh");
        command.arg("-c").arg(script).arg(env!("CARGO_BIN_EXE_deltafin")).current_dir(place.0.path());
        checked(&["logits"], &command.output().expect("sh"), 0);
        assert!(fs::read(place.path("out")).expect("logits") == expected);
    }
}

#[test]
fn roots_listed_beside_the_model_are_read_unless_others_are_given() {
    let place = Place::new();
    let (expected, _) = place.logits(&[]);
    place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--move"]);
    let file = place.path("m/experts.toml");
    fs::write(&file, format!("roots = [\"../a\", {:?}]\n", place.path("b"))).expect("written");
    assert!(place.logits(&[]).0 == expected);
    place.ok(&["inspect", "-m", "m", "--verify"]);
    place.ok(&["bench", "-m", "m", "-p", "4", "-n", "0", "-r", "1"]);
    place.ok(&["run", "-m", "m", "--ids", "1,2", "-n", "2", "--output", "ids"]);
    fs::write(&file, "roots = [\"../missing\"]\n").expect("written");
    let (_, said) = place.ends_with(&["logits", "-m", "m", "--ids", "1", "-o", "out"], 3);
    assert!(said.contains("missing"), "{said}");
    assert!(place.logits(&["--experts", "a", "b"]).0 == expected);
    fs::write(&file, "rots = [\"../a\"]\n").expect("written");
    for args in [
        &["inspect"][..],
        &["run", "--ids", "1", "--output", "ids"],
        &["logits", "--ids", "1", "-o", "out"],
        &["bench"],
    ] {
        let (out, said) = place.ends_with(&[args, &["-m", "m"]].concat(), 3);
        assert!(out.is_empty() && said.contains("experts.toml") && said.contains("hint"), "{args:?}: {out}{said}");
    }
}

#[test]
fn a_prompt_reads_each_expert_once_whatever_the_roots() {
    let place = Place::new();
    place.pack_twice();
    let ids = (0..512).map(|at| (at * 37 % 250 + 3).to_string()).collect::<Vec<_>>().join(",");
    let expert_files: u64 = 3 * 64;
    let file_bytes = fs::metadata(&place.experts("a")[0]).expect("an expert").len();
    for roots in [&["a"][..], &["a", "b"], &["b", "a", "a"]] {
        for memory in [&[][..], &["--expert-memory", "1MiB"]] {
            let args =
                ["run", "-m", "m", "--ids", &ids, "-n", "1", "--step", "512", "--output", "json", "--context", "600"];
            let args = [&args[..], memory, &["--no-learn", "--experts"], roots].concat();
            let report: Value = serde_json::from_str(&place.ok(&args).0).expect("JSON");
            let (misses, hits) = (&report["io"]["misses"], &report["io"]["hits"]);
            let asked = misses.as_u64().expect("a number") + hits.as_u64().expect("a number");
            assert!(asked > expert_files / 2 && asked <= expert_files, "each is asked for once: {report}");
            let read: u64 = report["io"]["drives"]
                .as_array()
                .expect("drives")
                .iter()
                .filter_map(|drive| drive["bytes"].as_u64())
                .sum();
            // The first page of each drive is read to see how.
            assert!(read <= misses.as_u64().expect("a number") * file_bytes + 4 * 4096, "{read}: {report}");
        }
    }
}

#[test]
fn memory_stays_within_its_plan_with_several_roots() {
    let place = Place::new();
    place.pack_twice();
    for more in [&[][..], &["--no-direct"], &["--expert-memory", "1MiB", "--verify-reads"]] {
        let args =
            ["run", "-m", "m", "--ids", IDS, "-n", "16", "--ignore-eos", "--output", "json", "--experts", "a", "b"];
        let report: Value = serde_json::from_str(&place.ok(&[&args[..], more].concat()).0).expect("JSON");
        let bytes = |key: &str| report["memory"][key].as_u64().expect("bytes");
        assert!(bytes("peak") <= bytes("planned") + bytes("planned") / 50, "{more:?}: {report}");
    }
}

#[test]
fn reads_through_the_page_cache_leave_little_of_a_root_in_it() {
    let place = Place::new();
    place.pack_twice();
    let files = [place.experts("a"), place.experts("b")].concat();
    let cached = || {
        let output = Command::new("fincore").args(["-n", "-b", "-o", "RES"]).args(&files).output().ok()?;
        let text = String::from_utf8(output.stdout).ok().filter(|_| output.status.success())?;
        text.lines().map(|line| line.trim().parse::<u64>().ok()).sum::<Option<u64>>()
    };
    for file in &files {
        // What writing left there goes first: the advice of a copy of nothing is for the whole file.
        let input = format!("if={}", file.display());
        let _ = Command::new("dd").args([&input, "iflag=nocache", "count=0", "status=none"]).status();
    }
    let all: u64 = files.iter().map(|file| fs::metadata(file).expect("an expert").len()).sum();
    let Some(before) = cached().filter(|before| before * 20 < all) else {
        eprintln!("not checked: no `fincore` or no `dd iflag=nocache` here");
        return;
    };
    place.logits(&["--experts", "a", "b", "--no-direct"]);
    let after = cached().expect("it worked before");
    assert!(after < before + all / 10, "{after} of {all} bytes are cached, {before} before");
}
