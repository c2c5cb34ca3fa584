//! The store and the trunk as a process: descriptors, bytes that really come from the drive, the page cache.
//!
//! Facts about a whole process are checked in a process of their own: the test runs this binary again with one of the
//! ignored tests.

use std::path::Path;
use std::process::Command;

use deltafin::checkpoint::{Dtype, ExpertFormat, ExpertTable, Manifest, Span, TrunkTensor};
use deltafin::interrupt::Interrupt;
use deltafin::store::{ExpertStore, StoreOptions};
use deltafin::trunk::{LoadProgress, Trunk, TrunkFormat};

const EXPERTS_A_SHARD: usize = 4;
const PART_BYTES: [u64; 6] = [100_000, 6_250, 100_000, 6_250, 100_000, 6_250];
const EXPERT_BYTES: u64 = 318_750;
const TENSOR_BYTES: u64 = 2 * 5001;

struct Silent;

impl LoadProgress for Silent {
    fn loaded(&self, _: u64, _: u64) {}
}

/// `shards` shards with a trunk tensor and four experts each, flushed to the drive.
fn model(dir: &Path, shards: usize) -> Manifest {
    let (mut paths, mut trunk, mut places) = (Vec::new(), Vec::new(), Vec::new());
    let mut shard_bytes = 0;
    for shard in 0..shards {
        let mut bytes = vec![0_u8; 1003];
        trunk.push(TrunkTensor {
            name: format!("tensor.{shard}"),
            dtype: Dtype::Bf16,
            shape: vec![5001],
            span: Span { shard: shard as u16, offset: 1003, len: TENSOR_BYTES },
        });
        bytes.extend((0..TENSOR_BYTES).map(|at| value(shard, 9, at as usize)));
        for expert in 0..EXPERTS_A_SHARD {
            for (part, len) in PART_BYTES.iter().enumerate() {
                places.push((shard as u16, bytes.len() as u64));
                bytes.extend((0..*len).map(|at| value(shard * EXPERTS_A_SHARD + expert, part, at as usize)));
            }
        }
        let path = dir.join(format!("shard-{shard}"));
        std::fs::write(&path, &bytes).unwrap();
        std::fs::File::open(&path).unwrap().sync_all().unwrap();
        shard_bytes = bytes.len() as u64;
        paths.push(path);
    }
    Manifest {
        dir: dir.to_path_buf(),
        shards: paths,
        shard_bytes: vec![shard_bytes; shards],
        trunk,
        experts: Some(ExpertTable {
            format: ExpertFormat::Mxfp4,
            part_bytes: PART_BYTES.to_vec(),
            num_experts: shards * EXPERTS_A_SHARD,
            moe_layers: vec![1],
            places,
        }),
        ignored: Vec::new(),
    }
}

fn value(number: usize, part: usize, at: usize) -> u8 {
    ((at * 13 + at / 255 + number * 29 + part * 3) % 255) as u8
}

fn open(manifest: &Manifest, slots: usize, direct: bool) -> std::sync::Arc<ExpertStore> {
    let options = StoreOptions { slots, direct, queue_depth: 8, piece_bytes: 1 << 20, verify: false };
    ExpertStore::open(manifest, &[], &options, Interrupt::new()).unwrap()
}

/// Asks for every expert and looks at all bytes; returns how many experts came.
fn read_all(store: &ExpertStore, manifest: &Manifest) -> u64 {
    let experts: Vec<u16> = (0..manifest.experts.as_ref().unwrap().num_experts as u16).collect();
    let mut request = store.request(1, &experts);
    let mut count = 0;
    while let Some(expert) = request.next().unwrap() {
        let number = usize::from(expert.id.expert);
        for (part, len) in PART_BYTES.iter().enumerate() {
            let is_right = expert.part(part).iter().enumerate().all(|(at, byte)| *byte == value(number, part, at));
            assert!(is_right && expert.part(part).len() as u64 == *len, "{} part {part}", expert.id);
        }
        count += 1;
    }
    count
}

fn check_trunk(trunk: &Trunk) {
    for (shard, name) in trunk.names().enumerate() {
        let tensor = trunk.get(name).unwrap();
        assert!(tensor.bytes().iter().enumerate().all(|(at, byte)| *byte == value(shard, 9, at)), "{name}");
    }
}

/// A directory on the drive that holds the build, which is seldom held in memory.
fn on_disk() -> tempfile::TempDir {
    tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).unwrap()
}

/// Runs the ignored test `name` in a process of its own, after `setting` in its shell.
fn alone(setting: &str, name: &str) {
    let script = format!("{setting}; exec \"$0\" --exact {name} --ignored --nocapture");
    let output = Command::new("sh").arg("-c").arg(script).arg(std::env::current_exe().unwrap()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stdout) + String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success() && text.contains("1 passed"), "{text}");
}

/// Bytes this process had fetched from drives; none where the system does not count them.
fn fetched_bytes() -> Option<u64> {
    let io = std::fs::read_to_string("/proc/self/io").ok()?;
    io.lines().find_map(|line| line.strip_prefix("read_bytes: ")?.parse().ok())
}

#[test]
fn a_hundred_shards_fit_in_sixty_four_descriptors() {
    alone("ulimit -n 64", "alone_a_hundred_shards");
}

#[test]
#[ignore = "run in a process of its own"]
fn alone_a_hundred_shards() {
    let dir = tempfile::tempdir().unwrap();
    let manifest = model(dir.path(), 100);
    for direct in [true, false] {
        let trunk = Trunk::load(&manifest, TrunkFormat::Bf16, None, direct, &Silent, &Interrupt::new()).unwrap();
        check_trunk(&trunk);
        let store = open(&manifest, 20, direct);
        assert_eq!(read_all(&store, &manifest), 400);
        assert_eq!(read_all(&store, &manifest), 400);
    }
}

#[test]
fn the_drive_delivers_each_expert_once() {
    alone("true", "alone_each_expert_once");
}

#[test]
#[ignore = "run in a process of its own"]
fn alone_each_expert_once() {
    let dir = on_disk();
    let manifest = model(dir.path(), 10);
    let store = open(&manifest, 40, true);
    let before = fetched_bytes();
    for _ in 0..3 {
        read_all(&store, &manifest);
    }
    let stats = store.stats();
    assert_eq!((stats.misses, stats.hits, stats.expert_bytes), (40, 80, 40 * EXPERT_BYTES));
    let padded = 40 * (EXPERT_BYTES + 2 * 4096);
    assert!((40 * EXPERT_BYTES..=padded).contains(&stats.drives[0].bytes), "{stats:?}");
    let (Some(before), Some(after)) = (before, fetched_bytes()) else { return };
    if stats.drives[0].mode == "direct" {
        // Experts share the page at their border; the file's last page may still be cached.
        let fetched = after - before;
        assert!((40 * (EXPERT_BYTES - 4096)..=padded).contains(&fetched), "{fetched} bytes fetched");
    }
}

#[test]
fn reads_through_the_page_cache_leave_little_in_it() {
    alone("true", "alone_little_in_the_page_cache");
}

#[test]
#[ignore = "run in a process of its own"]
fn alone_little_in_the_page_cache() {
    let dir = on_disk();
    let manifest = model(dir.path(), 20);
    let total = 80 * EXPERT_BYTES;
    let pass = || {
        let before = fetched_bytes().unwrap_or(0);
        Trunk::load(&manifest, TrunkFormat::Bf16, None, false, &Silent, &Interrupt::new()).unwrap();
        let store = open(&manifest, 8, false);
        read_all(&store, &manifest);
        assert_eq!((store.stats().drives[0].mode.as_str(), store.take_notices().len()), ("buffered", 0));
        fetched_bytes().unwrap_or(0) - before
    };
    // What writing the files left in the cache goes first: the advice of a zero-length copy is for the whole file.
    for path in &manifest.shards {
        let input = format!("if={}", path.display());
        let status = Command::new("dd").args([&input, "iflag=nocache", "count=0", "status=none"]).status();
        if !status.is_ok_and(|status| status.success()) {
            eprintln!("not checked: no `dd iflag=nocache` here");
            return;
        }
    }
    let first = pass();
    let fetched = pass();
    eprintln!("{first} bytes fetched, then {fetched}");
    let probe = open(&manifest, 1, true);
    if fetched_bytes().is_some() && probe.stats().drives[0].mode == "direct" {
        assert!(fetched > total * 9 / 10, "{fetched} of {total} bytes were fetched again");
    }
}

#[test]
#[cfg(target_os = "linux")]
fn files_in_memory_are_read_buffered_and_said_to_be() {
    let shm = "/dev/shm";
    let Ok(dir) = tempfile::tempdir_in(shm) else {
        eprintln!("not checked: no /dev/shm here");
        return;
    };
    let manifest = model(dir.path(), 3);
    let store = open(&manifest, 3, true);
    assert_eq!(read_all(&store, &manifest), 12);
    let notices = store.take_notices();
    assert_eq!(notices.len(), 1, "{notices:?}");
    assert!(notices[0].contains("os error"), "{notices:?}");
    assert_eq!(store.stats().drives[0].mode, "buffered");
    let trunk = Trunk::load(&manifest, TrunkFormat::Bf16, None, true, &Silent, &Interrupt::new()).unwrap();
    check_trunk(&trunk);
    assert_eq!(trunk.notices(), notices, "the same words, so that they can be said once");
    assert_eq!(trunk.modes()[0].1, "buffered");
}
