//! `deltafin pack` as a whole program: what it writes, what it survives, what it refuses; and `inspect` on its roots.

mod common;

use std::collections::BTreeMap;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};
use std::thread;
use std::time::{Duration, Instant};

use common::{Checkpoint, fixture};
use deltafin::checkpoint::{ExpertFormat, Manifest};
use deltafin::config::ModelConfig;
use deltafin::error::Kind;
use deltafin::interrupt::Interrupt;
use deltafin::store::packed::PackedRoot;
use deltafin::trunk::{LoadProgress, Trunk, TrunkFormat};
use serde_json::Value;
use tempfile::TempDir;
use xxhash_rust::xxh3::xxh3_64;

const LIST: &str = "experts.list";

/// A folder with a model `m` in it, where commands run.
struct Place(TempDir);

impl Place {
    fn new() -> Self {
        Self(tempfile::tempdir().expect("a temporary directory"))
    }

    /// With a synthetic model of the tiny preset, and these flags.
    fn with_model(flags: &[&str]) -> Self {
        let place = Self::new();
        place.ok(&[&["synth", "m", "--preset", "tiny"], flags].concat());
        place
    }

    /// With a copy of a golden model.
    fn with_copy_of(name: &str) -> Self {
        let place = Self::new();
        copy_dir(&fixture(name), &place.path("m"));
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    fn command(&self, args: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_deltafin"));
        command.args(args).current_dir(self.0.path());
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }

    #[track_caller]
    fn ends_with(&self, args: &[&str], code: i32) -> (String, String) {
        let output = self.command(args).output().expect("the binary starts");
        checked(args, &output, code)
    }

    #[track_caller]
    fn ok(&self, args: &[&str]) -> String {
        self.ends_with(args, 0).0
    }

    /// Refused with nothing on stdout; gives stderr.
    #[track_caller]
    fn refused(&self, args: &[&str], code: i32) -> String {
        let (out, err) = self.ends_with(args, code);
        assert!(out.is_empty(), "{args:?}: {out}");
        err
    }

    fn manifest(&self) -> Manifest {
        let dir = self.path("m");
        Manifest::open(&dir, &ModelConfig::load(&dir).expect("a configuration")).expect("a model")
    }
}

#[track_caller]
fn checked(args: &[&str], output: &Output, code: i32) -> (String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).expect("output is UTF-8");
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(code), "{args:?}\nstdout: {out}\nstderr: {err}");
    assert!(!err.contains("panicked"), "{args:?}: {err}");
    (out, err)
}

fn copy_dir(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a directory");
    for entry in fs::read_dir(from).expect("a directory") {
        let entry = entry.expect("an entry");
        let (from, to) = (entry.path(), to.join(entry.file_name()));
        if from.is_dir() {
            copy_dir(&from, &to);
        } else {
            fs::copy(from, to).expect("a copy");
        }
    }
}

/// Every file below `dir` by its name, with its bytes.
fn tree(dir: &Path) -> BTreeMap<PathBuf, Vec<u8>> {
    fn add(root: &Path, dir: &Path, files: &mut BTreeMap<PathBuf, Vec<u8>>) {
        for entry in fs::read_dir(dir).expect("a directory") {
            let path = entry.expect("an entry").path();
            if path.is_dir() {
                add(root, &path, files);
            } else {
                let name = path.strip_prefix(root).expect("below").to_owned();
                files.insert(name, fs::read(path).expect("a file"));
            }
        }
    }
    let mut files = BTreeMap::new();
    add(dir, dir, &mut files);
    files
}

#[track_caller]
fn assert_same_tree(a: &Path, b: &Path) {
    let (a, b) = (tree(a), tree(b));
    assert_eq!(a.keys().collect::<Vec<_>>(), b.keys().collect::<Vec<_>>());
    for (name, bytes) in &a {
        assert!(b[name] == *bytes, "{} differs", name.display());
    }
}

/// What the file of each expert must hold, from the shards: every part at a page, zeros between.
fn expected(manifest: &Manifest) -> BTreeMap<(u16, u16), Vec<u8>> {
    let table = manifest.experts.as_ref().expect("experts");
    let shards: Vec<Vec<u8>> = manifest.shards.iter().map(|path| fs::read(path).expect("a shard")).collect();
    let mut files = BTreeMap::new();
    for (layer, expert) in table.ids() {
        let mut bytes = Vec::new();
        for (place, len) in table.places(layer, expert).expect("places").iter().zip(&table.part_bytes) {
            let (start, len) = (place.1 as usize, *len as usize);
            bytes.extend_from_slice(&shards[usize::from(place.0)][start..start + len]);
            bytes.resize(bytes.len().next_multiple_of(4096), 0);
        }
        files.insert((layer, expert), bytes);
    }
    files
}

/// Checks the roots' files and lists against `expected`; gives the copies of each expert.
#[track_caller]
fn check_roots(place: &Place, roots: &[&str], expected: &BTreeMap<(u16, u16), Vec<u8>>) -> Vec<usize> {
    let manifest = place.manifest();
    let mut copies: BTreeMap<(u16, u16), usize> = expected.keys().map(|id| (*id, 0)).collect();
    for root in roots {
        let opened = PackedRoot::open(&place.path(root), &manifest).expect("a root");
        assert!(opened.experts.is_sorted_by_key(|expert| expert.id));
        for expert in &opened.experts {
            let bytes = fs::read(opened.path(expert.id)).expect("an expert file");
            let wanted = &expected[&(expert.id.layer, expert.id.expert)];
            assert!(bytes == *wanted, "{root}: {}", expert.id);
            assert_eq!(bytes.len() as u64, opened.file_bytes);
            assert_eq!(expert.checksum, xxh3_64(&bytes));
            *copies.get_mut(&(expert.id.layer, expert.id.expert)).expect("of the model") += 1;
        }
        let files = tree(&place.path(root));
        let expert_files = files.keys().filter(|name| name.starts_with("L") || name.components().count() > 1);
        assert_eq!(expert_files.count(), opened.experts.len(), "{root} holds what no list names");
    }
    copies.into_values().collect()
}

#[test]
fn every_expert_is_one_file_of_the_shards_bytes() {
    for model in ["tests/golden/tiny-k3", "tests/golden/odd-k3", "tests/golden/tiny-kimi-linear"] {
        let place = Place::with_copy_of(model);
        let manifest = place.manifest();
        place.ok(&["pack", "-m", "m", "--to", "a"]);
        assert_eq!(check_roots(&place, &["a"], &expected(&manifest)).iter().max(), Some(&1), "{model}");
        let ending = match manifest.experts.as_ref().expect("experts").format {
            ExpertFormat::Mxfp4 => "mxfp4",
            ExpertFormat::Bf16 => "bf16",
        };
        assert!(place.path(&format!("a/L001/E0000.{ending}")).is_file(), "{model}");
    }
}

#[test]
fn odd_widths_are_padded_to_pages() {
    for flags in [
        &["--latent", "96", "--inner", "160"][..],
        &["--latent", "32", "--inner", "32", "--experts", "9"],
        &["--latent", "544", "--inner", "288", "--experts", "8"],
        &["--experts", "1", "--top-k", "1"],
    ] {
        let place = Place::with_model(flags);
        place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b"]);
        let copies = check_roots(&place, &["a", "b"], &expected(&place.manifest()));
        assert!(copies.iter().all(|copies| *copies == 1), "{flags:?}");
    }
}

#[test]
fn replicas_are_on_different_roots() {
    let place = Place::with_model(&[]);
    place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--to", "c", "--replicas", "2"]);
    let copies = check_roots(&place, &["a", "b", "c"], &expected(&place.manifest()));
    assert!(copies.iter().all(|copies| *copies == 2));
    // More of them later: what is there stays.
    place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--to", "c", "--replicas", "3"]);
    let copies = check_roots(&place, &["a", "b", "c"], &expected(&place.manifest()));
    assert!(copies.iter().all(|copies| *copies == 3));
}

#[test]
fn a_second_run_finds_everything_there_and_writes_nothing() {
    let place = Place::with_model(&[]);
    let args = ["pack", "-m", "m", "--to", "a", "--trunk", "bf16"];
    place.ok(&args);
    let before = tree(&place.path("a"));
    assert!(place.ok(&args).contains("everything was there"));
    assert!(tree(&place.path("a")) == before);
}

#[test]
fn a_missing_or_cut_file_is_written_again() {
    let place = Place::with_model(&[]);
    place.ok(&["pack", "-m", "m", "--to", "a"]);
    fs::remove_file(place.path("a/L001/E0003.mxfp4")).unwrap();
    fs::write(place.path("a/L002/E0000.mxfp4"), "short").unwrap();
    fs::write(place.path("a/L002/.E0001.mxfp4.pack-tmp"), "left by a killed process").unwrap();
    let out = place.ok(&["pack", "-m", "m", "--to", "a", "--output", "json"]);
    let report: Value = serde_json::from_str(&out).unwrap();
    assert_eq!(report["written"]["copies"], 2, "{out}");
    check_roots(&place, &["a"], &expected(&place.manifest()));
}

#[test]
fn a_dry_run_writes_nothing_and_says_what_would_be() {
    let place = Place::with_model(&[]);
    let before = tree(&place.path("m"));
    let args = ["pack", "-m", "m", "--to", "a", "--to", "b/c", "--trunk", "bf16", "--move", "--dry-run"];
    let out = place.ok(&[&args[..], &["--output", "json"]].concat());
    let report: Value = serde_json::from_str(&out).unwrap();
    let to_write = |root: usize| report["roots"][root]["experts_to_write"].as_u64().unwrap();
    assert_eq!(to_write(0) + to_write(1), report["experts"].as_u64().unwrap());
    assert!(report["freed_bytes"].as_u64().unwrap() > 0 && report["written"].is_null());
    assert!(place.ok(&args).contains("nothing was written"));
    assert!(!place.path("a").exists() && !place.path("b").exists());
    assert!(tree(&place.path("m")) == before);
}

#[test]
fn killed_again_and_again_it_ends_with_the_same_bytes() {
    let place = Place::with_model(&["--layers", "6", "--experts", "128"]);
    let args = |a, b| ["pack", "-m", "m", "--to", a, "--to", b, "--replicas", "2", "--trunk", "bf16"];
    place.ok(&args("a", "b"));
    let mut killed = 0;
    for round in 0..60 {
        let mut child = place.command(&args("c", "d")).spawn().expect("the binary starts");
        thread::sleep(Duration::from_millis(5 + 13 * round));
        if child.try_wait().expect("a status").is_some() {
            break;
        }
        child.kill().expect("SIGKILL");
        child.wait().expect("it ends");
        killed += 1;
        // Whatever is listed is good.
        if place.path("c").join(LIST).exists() {
            let root = PackedRoot::open(&place.path("c"), &place.manifest()).expect("a usable root");
            for expert in &root.experts {
                assert_eq!(xxh3_64(&fs::read(root.path(expert.id)).expect("a file")), expert.checksum);
            }
        }
    }
    assert!(killed > 2, "it was too fast to be killed");
    place.ok(&args("c", "d"));
    assert_same_tree(&place.path("a"), &place.path("c"));
    assert_same_tree(&place.path("b"), &place.path("d"));
}

#[test]
fn an_interrupt_ends_it_within_a_second_and_it_goes_on() {
    let place = Place::with_model(&["--layers", "8", "--experts", "256", "--latent", "256"]);
    let args = ["pack", "-m", "m", "--to", "a"];
    let child = place.command(&args).spawn().expect("the binary starts");
    thread::sleep(Duration::from_millis(400));
    let asked = Instant::now();
    Command::new("kill").args(["-INT", &child.id().to_string()]).status().expect("kill runs");
    let output = child.wait_with_output().expect("it ends");
    if output.status.code() != Some(0) {
        checked(&args, &output, 130);
        assert!(asked.elapsed() < Duration::from_secs(1), "{:?}", asked.elapsed());
    }
    place.ok(&args);
    check_roots(&place, &["a"], &expected(&place.manifest()));
}

#[test]
fn a_move_needs_room_for_one_shard_and_not_for_all() {
    let place = Place::new();
    let shape = ["--layers", "7", "--latent", "256", "--inner", "256", "--experts", "32", "--vocab", "256"];
    let Some(_mount) = Mount::new(place.path("disk"), "size=96m") else { return };
    place.ok(&[&["synth", "disk/m", "--preset", "tiny"], &shape[..]].concat());
    std::os::unix::fs::symlink("disk/m", place.path("m")).unwrap();
    let experts = expected(&place.manifest());
    let whole: u64 = experts.values().map(|bytes| bytes.len() as u64).sum();
    // Leaves room for two shards or so.
    let free = deltafin::synth::space::available(&place.path("disk")).unwrap();
    let ballast = free.checked_sub(whole / 2).expect("96 MB are enough");
    fs::write(place.path("disk/ballast"), vec![0; ballast as usize]).unwrap();
    let error = place.refused(&["pack", "-m", "m", "--to", "disk/root"], 4);
    assert!(error.contains("no room"), "{error}");
    place.ok(&["pack", "-m", "m", "--to", "disk/root", "--move"]);
    check_roots(&place, &["disk/root"], &experts);
}

/// A small file system in memory, where this process may mount one.
struct Mount(PathBuf);

impl Mount {
    fn new(dir: PathBuf, options: &str) -> Option<Self> {
        fs::create_dir_all(&dir).expect("a directory");
        let mounted = Command::new("mount").args(["-t", "tmpfs", "-o", options, "tmpfs"]).arg(&dir).output();
        mounted.is_ok_and(|output| output.status.success()).then_some(Self(dir))
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        let _ = Command::new("umount").arg(&self.0).status();
    }
}

#[test]
fn a_disk_that_is_too_small_is_refused_with_the_numbers() {
    let place = Place::with_model(&[]);
    let Some(_mount) = Mount::new(place.path("small"), "size=3m") else { return };
    let error = place.refused(&["pack", "-m", "m", "--to", "small"], 4);
    assert!(error.contains("no room") && error.contains("192 experts of 24.0 KiB need 4.5 MiB"), "{error}");
    place.refused(&["pack", "-m", "m", "--to", "small/a/b", "--to", "small/c"], 4);
    assert_eq!(fs::read_dir(place.path("small")).unwrap().count(), 0, "nor are directories left");
    // With another root there is room.
    place.ok(&["pack", "-m", "m", "--to", "small", "large"]);
    check_roots(&place, &["small", "large"], &expected(&place.manifest()));
}

#[test]
fn a_disk_that_fills_up_meanwhile_is_an_error_and_no_loss() {
    let place = Place::with_model(&["--layers", "6", "--experts", "128"]);
    let Some(mount) = Mount::new(place.path("disk"), "size=32m") else { return };
    let args = ["pack", "-m", "m", "--to", "disk/root"];
    let child = place.command(&args).spawn().expect("the binary starts");
    // Takes the room that the plan counted on, as soon as the plan is made.
    let begun = Instant::now();
    while !place.path("disk/root").join(LIST).exists() && begun.elapsed() < Duration::from_secs(10) {
        thread::sleep(Duration::from_millis(1));
    }
    let ballast = place.path("disk/ballast");
    let zeros = vec![0_u8; 1 << 20];
    let mut file = File::create(&ballast).unwrap();
    while std::io::Write::write_all(&mut file, &zeros).is_ok() {}
    let output = child.wait_with_output().expect("it ends");
    if output.status.code() != Some(0) {
        let (out, error) = checked(&args, &output, 4);
        assert!(out.is_empty() && error.contains("No space left"), "{error}");
        assert!(error.contains("hint: free some space"), "{error}");
    }
    drop(file);
    fs::remove_file(ballast).unwrap();
    place.ok(&args);
    let copies = check_roots(&place, &["disk/root"], &expected(&place.manifest()));
    assert!(copies.iter().all(|copies| *copies == 1));
    drop(mount);
}

#[test]
fn a_root_that_cannot_be_written_is_refused() {
    let place = Place::with_model(&[]);
    fs::write(place.path("file"), "x").unwrap();
    place.refused(&["pack", "-m", "m", "--to", "file"], 2);
    let error = place.refused(&["pack", "-m", "m", "--to", "/proc/no/root"], 4);
    assert!(error.contains("/proc/no/root"), "{error}");
    let Some(_mount) = Mount::new(place.path("readonly"), "size=64m,ro") else { return };
    let error = place.refused(&["pack", "-m", "m", "--to", "readonly"], 4);
    assert!(error.contains("readonly"), "{error}");
}

#[test]
fn another_model_in_the_root_is_refused_by_name() {
    let place = Place::with_model(&[]);
    place.ok(&["synth", "n", "--preset", "tiny", "--seed", "1"]);
    place.ok(&["pack", "-m", "m", "--to", "a"]);
    let before = tree(&place.path("a"));
    let error = place.refused(&["pack", "-m", "n", "--to", "a"], 3);
    assert!(error.contains("packed from m") && error.contains("n has fingerprint"), "{error}");
    place.refused(&["pack", "-m", "n", "--to", "b", "--to", "a", "--dry-run"], 3);
    place.refused(&["pack", "-m", "n", "--to", "b", "--to", "a"], 3);
    assert!(!place.path("b").exists());
    let error = place.ends_with(&["inspect", "-m", "n", "--experts", "a"], 3).1;
    assert!(error.contains("packed from m"), "{error}");
    // One byte of one expert is another model too.
    let shard = place.path("m/model-00002-of-000005.safetensors");
    let mut bytes = fs::read(&shard).unwrap();
    let last = bytes.len() - 1;
    bytes[last] ^= 1;
    fs::write(&shard, bytes).unwrap();
    place.refused(&["pack", "-m", "m", "--to", "a"], 3);
    assert!(tree(&place.path("a")) == before);
}

#[test]
fn a_damaged_list_is_refused_and_a_missing_one_begins_anew() {
    let place = Place::with_model(&[]);
    place.ok(&["pack", "-m", "m", "--to", "a"]);
    let list = place.path("a").join(LIST);
    let whole = fs::read(&list).unwrap();
    for (at, bytes) in [(30, &whole[..]), (whole.len() - 1, &whole[..]), (0, &[][..]), (0, &whole[..100])] {
        let mut bytes = bytes.to_vec();
        if let Some(byte) = bytes.get_mut(at).filter(|_| at > 0) {
            *byte ^= 1;
        }
        fs::write(&list, bytes).unwrap();
        let error = place.refused(&["pack", "-m", "m", "--to", "a"], 3);
        assert!(error.contains(LIST) && error.contains("hint: put experts.list.copy"), "{error}");
        assert_eq!(PackedRoot::open(&place.path("a"), &place.manifest()).unwrap_err().kind(), Kind::Model);
    }
    fs::remove_file(&list).unwrap();
    let error = PackedRoot::open(&place.path("a"), &place.manifest()).unwrap_err();
    assert!(error.message().contains("not a root of packed experts"), "{error}");
    place.ok(&["pack", "-m", "m", "--to", "a"]);
    check_roots(&place, &["a"], &expected(&place.manifest()));
}

#[test]
fn a_root_in_use_is_refused_until_its_lock_is_gone() {
    let place = Place::with_model(&[]);
    fs::create_dir(place.path("a")).unwrap();
    let held = File::open(place.path("a")).unwrap();
    held.lock().unwrap();
    let error = place.refused(&["pack", "-m", "m", "--to", "a"], 4);
    assert!(error.contains("another `deltafin pack` is at work in a"), "{error}");
    assert_eq!(fs::read_dir(place.path("a")).unwrap().count(), 0);
    drop(held);
    place.ok(&["pack", "-m", "m", "--to", "a"]);
}

#[test]
fn one_directory_is_one_root_however_it_is_named() {
    let place = Place::with_model(&[]);
    fs::create_dir(place.path("a")).unwrap();
    std::os::unix::fs::symlink("a", place.path("link")).unwrap();
    for other in ["a", "a/", "./a", "link", "m/../a"] {
        let error = place.refused(&["pack", "-m", "m", "--to", "a", "--to", other], 2);
        assert!(error.contains("one directory"), "{other}: {error}");
    }
    // A link alone, and a root inside the model, are roots like any other.
    place.ok(&["pack", "-m", "m", "--to", "link", "--to", "m/packed"]);
    check_roots(&place, &["a", "m/packed"], &expected(&place.manifest()));
    place.refused(&["pack", "-m", "m", "--to", "a", "--rate", "b=3"], 2);
    place.refused(&["pack", "-m", "m", "--to", "a", "--replicas", "0"], 2);
    place.refused(&["pack", "-m", "m"], 2);
}

#[test]
fn the_model_directory_itself_can_be_the_root() {
    let place = Place::with_model(&[]);
    let manifest = expected(&place.manifest());
    place.ok(&["pack", "-m", "m", "--to", "m", "--move"]);
    let root = PackedRoot::open(&place.path("m"), &place.manifest()).unwrap();
    assert_eq!(root.experts.len(), manifest.len());
}

#[test]
fn inspect_counts_copies() {
    let place = Place::with_model(&[]);
    place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--replicas", "2"]);
    fs::remove_file(place.path("b/L003/E0010.mxfp4")).unwrap();
    let out = place.ok(&["inspect", "-m", "m", "--experts", "a", "b", "a/", "--output", "json"]);
    let copies = &serde_json::from_str::<Value>(&out).unwrap()["copies"];
    assert_eq!(copies["experts_by_copies"], serde_json::json!([0, 0, 1, 191]), "{copies}");
    assert_eq!(copies["experts_by_packed_copies"], serde_json::json!([0, 1, 191]), "{copies}");
    assert_eq!((&copies["roots"][1]["missing"], &copies["roots"][1]["experts"]), (&1.into(), &191.into()));
    let text = place.ok(&["inspect", "-m", "m", "--experts", "a", "b"]);
    assert!(text.contains("0 with 0, 1 with 1, 191 with 2"), "{text}");
}

#[test]
fn inspect_says_what_tokens_a_second_the_drives_allow_where_their_rates_are_known() {
    let place = Place::with_model(&[]);
    let speed = |args: &[&str]| {
        let args = [&["inspect", "-m", "m", "--output", "json"], args].concat();
        serde_json::from_str::<Value>(&place.ok(&args)).unwrap()["speed"].clone()
    };
    let unknown = speed(&[]);
    assert_eq!((&unknown["measure"], &unknown["estimate"]), (&"deltafin drives m -m m".into(), &Value::Null));
    assert!(place.ok(&["inspect", "-m", "m"]).contains("`deltafin drives m -m m` measures"));
    place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b c"]);
    let unmeasured = speed(&["--experts", "a", "b c"]);
    assert_eq!(
        (&unmeasured["measure"], &unmeasured["estimate"]),
        (&"deltafin drives a 'b c' m -m m".into(), &Value::Null)
    );
    // What was packed already stays; the rate is written down.
    place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b c", "--rate", "a=7.1"]);
    let known = speed(&["--experts", "a", "b c", "--expert-memory", "256KiB"]);
    // All on one drive here.
    let estimate = &known["estimate"];
    assert_eq!(estimate["drives"].as_array().map(Vec::len), Some(1), "{known}");
    assert_eq!(
        (&estimate["drives"][0]["gb_per_s"], estimate["ladder"].as_array().map(Vec::len)),
        (&7.1.into(), Some(1))
    );
    assert!(estimate["ladder"][0]["tokens_per_s"].as_f64() > Some(0.0), "{known}");
    let text = place.ok(&["inspect", "-m", "m", "--experts", "a", "b c"]);
    assert!(text.contains("at most, from drives of 7.1 GB/s") && text.contains("deltafin drives a 'b c' m"), "{text}");
    // A pack that does not measure keeps what is known.
    place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b c"]);
    assert!(speed(&["--experts", "a"])["estimate"].is_object());
}

#[test]
fn verify_finds_every_kind_of_damage_and_names_it() {
    let place = Place::with_model(&[]);
    place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--replicas", "2", "--trunk", "bf16"]);
    let verify = ["inspect", "-m", "m", "--experts", "a", "b", "--verify"];
    let out = place.ok(&[&verify[..], &["--output", "json"]].concat());
    let verified = &serde_json::from_str::<Value>(&out).unwrap()["verified"];
    assert_eq!((&verified["damaged"], &verified["copies"]), (&0.into(), &(3 * 192).into()), "{verified}");

    let file = place.path("a/L002/E0007.mxfp4");
    let whole = fs::read(&file).unwrap();
    for at in [0, 5000, whole.len() - 1] {
        let mut bytes = whole.clone();
        bytes[at] ^= 0x40;
        fs::write(&file, bytes).unwrap();
        let (_, error) = place.ends_with(&verify, 3);
        let wanted = format!("a/L002/E0007.mxfp4: expert L2/E7: bytes {at} to {}", at + 1);
        assert!(error.contains(&wanted), "{wanted}: {error}");
        assert!(error.contains("1 place is damaged"), "{error}");
    }
    for bytes in [&whole[..whole.len() - 1], &[&whole[..], b"x"].concat()] {
        fs::write(&file, bytes).unwrap();
        assert!(place.ends_with(&verify, 3).1.contains("a/L002/E0007.mxfp4"));
    }
    fs::remove_file(&file).unwrap();
    assert!(place.ends_with(&verify, 3).1.contains("a/L002/E0007.mxfp4"));
    fs::write(&file, &whole).unwrap();

    let trunk = place.path("a/trunk.bf16");
    let whole = fs::read(&trunk).unwrap();
    let mut bytes = whole.clone();
    let at = bytes.len() - 4096;
    bytes[at] ^= 1;
    fs::write(&trunk, bytes).unwrap();
    let (_, error) = place.ends_with(&verify, 3);
    assert!(error.contains("trunk.bf16") && error.contains("do not match"), "{error}");
    fs::write(&trunk, whole).unwrap();
    place.ok(&verify);
}

#[test]
fn verify_checks_scales_in_the_shards_without_any_root() {
    let checkpoint = Checkpoint::copy_of("tests/golden/tiny-k3");
    let place = Place::new();
    let model = checkpoint.path().to_str().unwrap();
    place.ok(&["inspect", "-m", model, "--verify"]);
    let manifest = checkpoint.open().unwrap();
    let table = manifest.experts.as_ref().unwrap();
    let (shard, offset) = table.places(2, 3).unwrap()[3];
    let path = &manifest.shards[usize::from(shard)];
    let mut bytes = fs::read(path).unwrap();
    bytes[offset as usize + 5] = 255;
    fs::write(path, bytes).unwrap();
    let (_, error) = place.ends_with(&["inspect", "-m", model, "--verify"], 3);
    assert!(error.contains("expert L2/E3") && error.contains(&(offset + 5).to_string()), "{error}");
    // Such a model is not packed either, and what was packed before the damage stays.
    let error = place.refused(&["pack", "-m", model, "--to", "a"], 3);
    assert!(error.contains("L2/E3") && error.contains("reserved"), "{error}");
}

struct Silent;

impl LoadProgress for Silent {
    fn loaded(&self, _done: u64, _total: u64) {}
}

/// Trunk tensors of a model by name, as they are in memory.
fn trunk(manifest: &Manifest) -> BTreeMap<String, Vec<u8>> {
    let shards: Vec<Vec<u8>> = manifest.shards.iter().map(|path| fs::read(path).expect("a shard")).collect();
    let tensors = manifest.trunk.iter().map(|tensor| {
        let (start, len) = (tensor.span.offset as usize, tensor.span.len as usize);
        (tensor.name.clone(), shards[usize::from(tensor.span.shard)][start..start + len].to_vec())
    });
    tensors.collect()
}

fn disk_bytes(dir: &Path) -> u64 {
    fs::read_dir(dir).unwrap().map(|entry| entry.unwrap().metadata().unwrap().len()).sum()
}

#[test]
fn moved_experts_leave_the_shards_and_nothing_else_does() {
    for model in ["tests/golden/tiny-k3", "tests/golden/odd-k3", "tests/golden/tiny-kimi-linear", "single file"] {
        let place = if model == "single file" {
            let checkpoint = Checkpoint::copy_of("tests/golden/tiny-k3");
            checkpoint.make_single_file();
            let place = Place::new();
            copy_dir(checkpoint.path(), &place.path("m"));
            place
        } else {
            Place::with_copy_of(model)
        };
        let before = place.manifest();
        let (experts, tensors, fingerprint) = (expected(&before), trunk(&before), before.fingerprint().unwrap());
        let bytes = disk_bytes(&place.path("m"));
        place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--move"]);
        check_roots(&place, &["a", "b"], &experts);
        let after = place.manifest();
        assert!(trunk(&after) == tensors, "{model}");
        assert_eq!(after.fingerprint().unwrap(), fingerprint, "{model}");
        assert_eq!(after.ignored.len(), before.ignored.len(), "{model}");
        assert_eq!(after.tensor_count(), before.tensor_count(), "{model}");
        let gone = disk_bytes(&place.path("m"));
        assert!(gone + before.all_experts_bytes() <= bytes + 4096, "{model}: {bytes} {gone}");
        let table = after.experts.as_ref().unwrap();
        assert!(table.ids().all(|(layer, expert)| !table.is_in_shards(layer, expert)), "{model}");
        assert!(Trunk::load(&after, TrunkFormat::Bf16, None, true, &Silent, &Interrupt::new()).is_ok());
        // Again: nothing to do. And another root can be filled from the first two.
        place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--move"]);
        place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--to", "c", "--replicas", "2"]);
        assert!(check_roots(&place, &["a", "b", "c"], &experts).iter().all(|copies| *copies == 2), "{model}");
        let error = place.refused(&["pack", "-m", "m", "--to", "d"], 3);
        assert!(error.contains("has left the shards") && !place.path("d/L001").exists(), "{error}");
        let copies = ["inspect", "-m", "m", "--output", "json"];
        let out = place.ends_with(&copies, 3).0;
        let copies = &serde_json::from_str::<Value>(&out).unwrap()["copies"];
        assert_eq!(copies["experts_by_copies"][0].as_u64(), Some(experts.len() as u64), "{copies}");
    }
}

#[test]
fn a_move_killed_again_and_again_loses_nothing() {
    let place = Place::with_model(&["--layers", "5", "--experts", "64"]);
    let (experts, tensors) = (expected(&place.manifest()), trunk(&place.manifest()));
    copy_dir(&place.path("m"), &place.path("n"));
    let args = ["pack", "-m", "m", "--to", "a", "--move"];
    let mut killed = 0;
    for round in 0..60 {
        let mut child = place.command(&args).spawn().expect("the binary starts");
        thread::sleep(Duration::from_millis(10 + 11 * round));
        if child.try_wait().expect("a status").is_some() {
            break;
        }
        child.kill().expect("SIGKILL");
        child.wait().expect("it ends");
        killed += 1;
        let manifest = place.manifest();
        assert!(trunk(&manifest) == tensors);
        let table = manifest.experts.as_ref().unwrap();
        let packed = if place.path("a").join(LIST).exists() {
            PackedRoot::open(&place.path("a"), &manifest).expect("a usable root").experts
        } else {
            Vec::new()
        };
        for (layer, expert) in table.ids() {
            let there = packed.iter().any(|packed| (packed.id.layer, packed.id.expert) == (layer, expert));
            assert!(there || table.is_in_shards(layer, expert), "L{layer}/E{expert} is lost");
        }
    }
    assert!(killed > 2, "it was too fast to be killed");
    place.ok(&args);
    check_roots(&place, &["a"], &experts);
    assert!(trunk(&place.manifest()) == tensors);
    // The same as a move that was never killed.
    fs::rename(place.path("m"), place.path("killed")).unwrap();
    fs::rename(place.path("n"), place.path("m")).unwrap();
    place.ok(&["pack", "-m", "m", "--to", "b", "--move"]);
    assert_same_tree(&place.path("a"), &place.path("b"));
    assert_same_tree(&place.path("killed"), &place.path("m"));
}

#[test]
fn a_move_gives_up_nothing_for_a_copy_that_is_damaged() {
    let place = Place::with_model(&[]);
    place.ok(&["pack", "-m", "m", "--to", "a"]);
    let file = place.path("a/L001/E0000.mxfp4");
    let mut bytes = fs::read(&file).unwrap();
    bytes[100] ^= 1;
    fs::write(&file, bytes).unwrap();
    let before = tree(&place.path("m"));
    let error = place.refused(&["pack", "-m", "m", "--to", "a", "--move"], 3);
    assert!(error.contains("L001/E0000.mxfp4") && error.contains("damaged"), "{error}");
    assert!(tree(&place.path("m")) == before);
    fs::remove_file(file).unwrap();
    place.ok(&["pack", "-m", "m", "--to", "a", "--move"]);
    assert!(tree(&place.path("m")) != before);
}

#[test]
fn a_move_of_shards_that_are_links_is_refused() {
    let place = Place::with_model(&[]);
    let shard = place.path("m/model-00002-of-000005.safetensors");
    fs::rename(&shard, place.path("blob")).unwrap();
    std::os::unix::fs::symlink("../blob", &shard).unwrap();
    let error = place.refused(&["pack", "-m", "m", "--to", "a", "--move"], 2);
    assert!(error.contains("is a link"), "{error}");
    assert!(!place.path("a/L001").exists() && shard.is_symlink());
    place.ok(&["pack", "-m", "m", "--to", "a"]);
}

#[test]
fn a_moved_model_needs_its_record() {
    let place = Place::with_model(&[]);
    place.ok(&["pack", "-m", "m", "--to", "a", "--move"]);
    let record = place.path("m/moved.json");
    let json = fs::read(&record).unwrap();
    fs::write(&record, &json[..json.len() / 2]).unwrap();
    let error = place.refused(&["pack", "-m", "m", "--to", "a"], 3);
    assert!(error.contains("moved.json"), "{error}");
    fs::remove_file(&record).unwrap();
    place.refused(&["pack", "-m", "m", "--to", "a"], 3);
    fs::write(&record, json).unwrap();
    place.ok(&["pack", "-m", "m", "--to", "a"]);
}

#[test]
fn logits_are_the_same_before_and_after_a_move() {
    let place = Place::with_model(&[]);
    let ids = ["--ids", "1,2,3,4,5,6,7,8"];
    place.ok(&[&["logits", "-m", "m", "-o", "before"], &ids[..]].concat());
    place.ok(&["pack", "-m", "m", "--to", "a", "--to", "b", "--move"]);
    place.ok(&[&["logits", "-m", "m", "-o", "after", "--experts", "a", "b"], &ids[..]].concat());
    assert!(fs::read(place.path("before")).unwrap() == fs::read(place.path("after")).unwrap());
}

#[test]
fn a_model_without_experts_has_nothing_to_pack() {
    let place = Place::with_model(&["--layers", "2", "--dense-layers", "2"]);
    let error = place.refused(&["pack", "-m", "m", "--to", "a"], 3);
    assert!(error.contains("no routed experts"), "{error}");
    place.ok(&["inspect", "-m", "m", "--verify"]);
}

/// Makes a pipe in place of the file at `path`.
fn make_pipe(path: &Path) {
    fs::remove_file(path).expect("a file");
    assert!(Command::new("mkfifo").arg(path).status().expect("mkfifo").success());
}

#[test]
fn a_pipe_in_place_of_a_file_is_damage_and_not_waited_for() {
    let place = Place::with_model(&[]);
    let pack = ["pack", "-m", "m", "--to", "a", "--trunk", "bf12"];
    place.ok(&pack);
    for name in ["L001/E0003.mxfp4", "trunk.bf12"] {
        let path = place.path("a").join(name);
        make_pipe(&path);
        let (_, error) = place.ends_with(&["inspect", "-m", "m", "--experts", "a", "--verify"], 3);
        assert!(error.contains(name), "{error}");
        place.ok(&pack);
        assert!(path.is_file(), "{name}");
    }
    place.ok(&["pack", "-m", "m", "--to", "a", "--move"]);
    make_pipe(&place.path("a/L001/E0000.mxfp4"));
    let (_, error) = place.ends_with(&["logits", "-m", "m", "--ids", "1", "-o", "out", "--experts", "a"], 3);
    assert!(error.contains("E0000.mxfp4") && error.contains("no regular file"), "{error}");
}

#[test]
fn two_mounts_of_one_directory_are_one_root() {
    let place = Place::with_model(&[]);
    for dir in ["a", "b"] {
        fs::create_dir(place.path(dir)).unwrap();
    }
    let mounted = Command::new("mount").arg("--bind").args([place.path("a"), place.path("b")]).output();
    if !mounted.is_ok_and(|output| output.status.success()) {
        return;
    }
    let _mount = Mount(place.path("b"));
    for (one, other) in [("a", "b"), ("a/x", "b/x")] {
        let error = place.refused(&["pack", "-m", "m", "--to", one, "--to", other, "--replicas", "2"], 2);
        assert!(error.contains("are one directory"), "{error}");
    }
}

#[test]
fn a_root_has_one_rate_and_more_copies_than_roots_cost_nothing() {
    let place = Place::with_model(&[]);
    let error = place.refused(&["pack", "-m", "m", "--to", "a", "--rate", "a=1", "--rate", "a/=2"], 2);
    assert!(error.contains("--rate a/=2"), "{error}");
    place.ok(&["pack", "-m", "m", "--to", "new/a", "--rate", "new/a=2"]);
    let begun = Instant::now();
    place.ok(&["pack", "-m", "m", "--to", "b", "--replicas", "100000000", "--dry-run"]);
    assert!(begun.elapsed() < Duration::from_secs(10), "{:?}", begun.elapsed());
}

#[test]
fn verify_finds_a_trunk_file_of_another_model() {
    let place = Place::with_model(&[]);
    place.ok(&["synth", "other", "--preset", "tiny", "--seed", "5"]);
    place.ok(&["pack", "-m", "m", "--to", "a", "--trunk", "bf16"]);
    place.ok(&["pack", "-m", "other", "--to", "b", "--trunk", "bf16"]);
    fs::copy(place.path("b/trunk.bf16"), place.path("a/trunk.bf16")).unwrap();
    let (_, error) = place.ends_with(&["inspect", "-m", "m", "--experts", "a", "--verify"], 3);
    assert!(error.contains("a/trunk.bf16") && error.contains("another model"), "{error}");
}

#[test]
fn a_lost_list_of_moved_experts_is_beside_it_as_a_copy() {
    let place = Place::with_model(&[]);
    let experts = expected(&place.manifest());
    place.ok(&["pack", "-m", "m", "--to", "a", "--move"]);
    let (list, copy) = (place.path("a").join(LIST), place.path("a/experts.list.copy"));
    for lose in [|list: &Path| fs::remove_file(list), |list: &Path| fs::write(list, "DFPACK_ damaged")] {
        lose(&list).unwrap();
        let error = place.refused(&["pack", "-m", "m", "--to", "a"], 3);
        assert!(error.contains("experts.list.copy"), "{error}");
        fs::copy(&copy, &list).unwrap();
        place.ok(&["pack", "-m", "m", "--to", "a"]);
        check_roots(&place, &["a"], &experts);
    }
    // A copy that is behind, or not there, is written again.
    for _ in 0..2 {
        fs::write(&copy, "").unwrap();
        place.ok(&["pack", "-m", "m", "--to", "a"]);
        assert!(fs::read(&copy).unwrap() == fs::read(&list).unwrap());
        fs::remove_file(&copy).unwrap();
    }
}
