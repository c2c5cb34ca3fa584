//! Copies on several drives: which are read, and what becomes of those that fail.

use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};

use xxhash_rust::xxh3::xxh3_64;

use super::disk::{Answer, Call};
use super::*;
use crate::checkpoint::MOVED;
use crate::store::packed::PackedExpert;

pub(super) const EXPERTS: usize = 8;

/// A model whose experts lie on drive roots alone.
pub(super) struct Spread {
    pub(super) model: Model,
    pub(super) roots: Vec<PackedRoot>,
    _dirs: Vec<tempfile::TempDir>,
}

impl Spread {
    /// One root for each of `holds`: which of the experts, counted over both layers, it has.
    pub(super) fn new(format: ExpertFormat, holds: &[&dyn Fn(usize) -> bool]) -> Self {
        let mut spread = Self::with_shards(format, holds);
        spread.model.manifest.experts.as_mut().unwrap().places.fill((MOVED, 0));
        spread
    }

    /// As [`Spread::new`], with all experts in the shards too.
    pub(super) fn with_shards(format: ExpertFormat, holds: &[&dyn Fn(usize) -> bool]) -> Self {
        let mut model = Model::new(EXPERTS, format, Order::Apart);
        let table = model.manifest.experts.as_mut().unwrap();
        let mut part_offsets = Vec::new();
        let mut file_bytes = 0;
        for bytes in &table.part_bytes {
            part_offsets.push(file_bytes);
            file_bytes += bytes.next_multiple_of(ALIGN as u64);
        }
        let (mut roots, mut dirs) = (Vec::new(), Vec::new());
        for holds in holds {
            let dir = tempfile::tempdir().unwrap();
            let mut root = PackedRoot {
                dir: dir.path().to_path_buf(),
                file_bytes,
                part_offsets: part_offsets.clone(),
                gb_per_s: None,
                experts: Vec::new(),
            };
            for number in (0..2 * EXPERTS).filter(|number| holds(*number)) {
                let id = ExpertId { layer: table.moe_layers[number / EXPERTS], expert: (number % EXPERTS) as u16 };
                let mut bytes = vec![0; file_bytes as usize];
                for (part, (offset, len)) in part_offsets.iter().zip(&table.part_bytes).enumerate() {
                    let part_of_file = &mut bytes[*offset as usize..][..*len as usize];
                    part_of_file.iter_mut().enumerate().for_each(|(at, byte)| *byte = value(number, part, at));
                }
                let path = root.path(id);
                std::fs::create_dir_all(path.parent().unwrap()).unwrap();
                std::fs::write(&path, &bytes).unwrap();
                root.experts.push(PackedExpert { id, checksum: xxh3_64(&bytes) });
            }
            roots.push(root);
            dirs.push(dir);
        }
        Self { model, roots, _dirs: dirs }
    }

    pub(super) fn open(
        &self,
        slots: usize,
        verify: bool,
        script: impl Fn(Call<'_>) -> Answer + Send + Sync + 'static,
    ) -> Arc<ExpertStore> {
        self.try_open(slots, verify, script).unwrap()
    }

    pub(super) fn try_open(
        &self,
        slots: usize,
        verify: bool,
        script: impl Fn(Call<'_>) -> Answer + Send + Sync + 'static,
    ) -> Result<Arc<ExpertStore>> {
        let drives: Vec<&Path> = self.roots.iter().map(|root| root.dir.as_path()).collect();
        let disk = Faulty::with_drives(&drives, script);
        let options = StoreOptions { verify, ..options(slots) };
        ExpertStore::open_on(disk, &self.model.manifest, &self.roots, &options, Interrupt::new())
    }

    /// File of an expert of the first layer.
    pub(super) fn file(&self, root: usize, expert: u16) -> PathBuf {
        self.roots[root].path(ExpertId { layer: LAYER, expert })
    }

    /// Sets byte `at` of such a file; returns what the file was.
    pub(super) fn damage(&self, root: usize, expert: u16, at: usize, value: u8) -> Vec<u8> {
        let path = self.file(root, expert);
        let good = std::fs::read(&path).unwrap();
        let mut bad = good.clone();
        bad[at] = value;
        std::fs::write(path, bad).unwrap();
        good
    }

    pub(super) fn dir(&self, root: usize) -> PathBuf {
        self.roots[root].dir.clone()
    }
}

pub(super) fn path_of(call: Call<'_>) -> &Path {
    match call {
        Call::Open { path, .. } | Call::Read { path, .. } => path,
    }
}

pub(super) fn everything(_: usize) -> bool {
    true
}

#[test]
fn full_partial_and_disjoint_copies_give_the_same_bytes() {
    for format in [ExpertFormat::Mxfp4, ExpertFormat::Bf16] {
        let layouts: [&[&dyn Fn(usize) -> bool]; 5] = [
            &[&everything],
            &[&everything, &everything],
            &[&|number| number % 2 == 0, &|number| number % 2 == 1],
            &[&everything, &|number| number < 3, &|number| number > 9],
            &[&|number| number % 3 != 0, &|number| number % 3 != 1, &|number| number % 3 != 2],
        ];
        for holds in layouts {
            let spread = Spread::new(format, holds);
            for slots in [1, 3, 16] {
                for verify in [false, true] {
                    let store = spread.open(slots, verify, |_| Answer::Real);
                    for _ in 0..2 {
                        spread.model.read(&store, &all(EXPERTS));
                        spread.model.read(&store, &[1, 4, 6]);
                    }
                    assert_eq!(store.stats().drives.len(), holds.len());
                    assert_eq!(store.take_notices(), [""; 0]);
                }
            }
        }
    }
}

#[test]
fn an_expert_that_nobody_holds_is_refused_by_name() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&|number| number != 5]);
    let error = ExpertStore::open(&spread.model.manifest, &spread.roots, &options(2), Interrupt::new()).err().unwrap();
    assert_eq!(error.kind(), Kind::Model);
    assert!(error.message().contains("L3/E5"), "{error}");
}

#[test]
fn both_drives_are_read_when_both_have_the_experts() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything]);
    let store = spread.open(16, false, |_| {
        std::thread::sleep(Duration::from_millis(1));
        Answer::Real
    });
    spread.model.read(&store, &all(EXPERTS));
    assert!(store.stats().drives.iter().all(|drive| drive.bytes > 0), "{:?}", store.stats());
}

#[test]
fn what_fails_on_one_drive_is_read_from_the_other_and_said_once() {
    for (code, after) in [(libc::EIO, 0), (libc::EIO, 7), (libc::ENODEV, 3), (libc::ENXIO, 0), (libc::ENOENT, 5)] {
        for slots in [1, 2, 16] {
            let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything]);
            let (bad, seen) = (spread.dir(0), AtomicUsize::new(0));
            let store = spread.open(slots, false, move |call| {
                let fails = path_of(call).starts_with(&bad) && seen.fetch_add(1, Ordering::SeqCst) >= 4 + after;
                if fails { Answer::Errno(code) } else { Answer::Real }
            });
            for _ in 0..3 {
                spread.model.read(&store, &all(EXPERTS));
            }
            let notices = store.take_notices();
            assert!(notices.len() <= 1, "{notices:?}");
            assert!(notices.iter().all(|notice| notice.contains(spread.dir(0).to_str().unwrap())), "{notices:?}");
            let stats = store.stats();
            assert_eq!(stats.retries > 0, !notices.is_empty());
            assert_eq!(stats.drives[0].errors > 0, !notices.is_empty());
            assert_eq!((stats.drives[1].errors, stats.drives[1].state.as_str()), (0, "ok"));
        }
    }
}

#[test]
fn the_last_copy_gone_is_an_error_with_expert_file_offset_and_errno() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything]);
    let broken = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&broken);
    let store = spread.open(4, false, move |call| {
        let is_it = path_of(call).ends_with("L003/E0002.mxfp4") && seen.load(Ordering::SeqCst);
        if is_it { Answer::Errno(libc::EIO) } else { Answer::Real }
    });
    broken.store(true, Ordering::SeqCst);
    let error = error_of(&store, &all(EXPERTS));
    assert_eq!(error.kind(), Kind::Io);
    for part in ["L3/E2", "E0002.mxfp4", "offset", "os error 5"] {
        assert!(error.message().contains(part), "{part}: {error}");
    }
    broken.store(false, Ordering::SeqCst);
    spread.model.read(&store, &all(EXPERTS));
}

#[test]
fn a_file_that_was_cut_is_read_elsewhere() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything]);
    for expert in 0..EXPERTS as u16 {
        let path = spread.roots[1].path(ExpertId { layer: LAYER, expert });
        std::fs::OpenOptions::new().write(true).open(path).unwrap().set_len(30_000).unwrap();
    }
    let store = spread.open(4, false, |_| Answer::Real);
    spread.model.read(&store, &all(EXPERTS));
}

/// Blocks until it is opened.
#[derive(Default)]
pub(super) struct Gate(Mutex<bool>, Condvar);

impl Gate {
    pub(super) fn pass(&self) {
        let mut open = self.0.lock().unwrap();
        while !*open {
            open = self.1.wait(open).unwrap();
        }
    }

    pub(super) fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }
}

#[test]
fn a_read_that_never_ends_is_done_elsewhere_and_does_no_harm_when_it_ends_after_all() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything]);
    let gate = Arc::new(Gate::default());
    let (stuck, closed) = (spread.dir(0), Arc::clone(&gate));
    let ready = Arc::new(AtomicBool::new(false));
    let opened = Arc::clone(&ready);
    let store = spread.open(12, false, move |call| {
        if matches!(call, Call::Read { .. }) && path_of(call).starts_with(&stuck) && opened.load(Ordering::SeqCst) {
            closed.pass();
        }
        Answer::Real
    });
    ready.store(true, Ordering::SeqCst);
    store.slots.queue().with(|schedule, _| (schedule.overdue_after(Duration::from_millis(30)), 0));
    let began = Instant::now();
    spread.model.read(&store, &all(EXPERTS));
    assert!(began.elapsed() < Duration::from_secs(3), "{:?}", began.elapsed());
    let notices = store.take_notices();
    assert!(notices.len() == 1 && notices[0].contains("does not end"), "{notices:?}");
    gate.open();
    for _ in 0..3 {
        spread.model.read(&store, &all(EXPERTS));
        let expert = store.request(7, &[3]).next().unwrap().unwrap();
        spread.model.check(&expert);
    }
}

#[test]
fn the_end_does_not_wait_for_a_read_that_hangs() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything]);
    let gate = Arc::new(Gate::default());
    let ready = Arc::new(AtomicBool::new(false));
    let (closed, opened) = (Arc::clone(&gate), Arc::clone(&ready));
    let store = spread.open(8, false, move |call| {
        if matches!(call, Call::Read { .. }) && opened.load(Ordering::SeqCst) {
            closed.pass();
        }
        Answer::Real
    });
    ready.store(true, Ordering::SeqCst);
    let slots = Arc::downgrade(&store.slots);
    drop(store.request(LAYER, &all(EXPERTS)));
    store.lookahead(7, &[1, 2], 8);
    let began = Instant::now();
    drop(store);
    assert!(began.elapsed() < Duration::from_secs(1), "{:?}", began.elapsed());
    gate.open();
    let deadline = Instant::now() + Duration::from_secs(5);
    while slots.strong_count() > 0 && Instant::now() < deadline {
        std::thread::sleep(Duration::from_millis(5));
    }
    assert_eq!(slots.strong_count(), 0, "the memory is given back once the reads end");
}

fn flip(spread: &Spread, root: usize, expert: u16) {
    let path = spread.roots[root].path(ExpertId { layer: LAYER, expert });
    let mut bytes = std::fs::read(&path).unwrap();
    bytes[12_345] ^= 1;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn wrong_bytes_are_noticed_where_asked_for_and_read_elsewhere() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything, &everything]);
    for expert in 0..EXPERTS as u16 {
        flip(&spread, 0, expert);
    }
    let store = spread.open(3, true, |_| Answer::Real);
    for _ in 0..3 {
        spread.model.read(&store, &all(EXPERTS));
    }
    let notices = store.take_notices();
    assert!(notices.len() == 1 && notices[0].contains("checksum"), "{notices:?}");
    flip(&spread, 1, 6);
    let store = spread.open(3, true, |_| Answer::Real);
    let error = error_of(&store, &all(EXPERTS));
    assert_eq!(error.kind(), Kind::Io);
    assert!(error.message().contains("L3/E6") && error.message().contains("checksum"), "{error}");
}

#[test]
fn guesses_that_come_true_are_read_once_and_those_that_do_not_are_dropped() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything]);
    let gate = Arc::new(Gate::default());
    let ready = Arc::new(AtomicBool::new(false));
    let (closed, opened) = (Arc::clone(&gate), Arc::clone(&ready));
    let store = spread.open(16, false, move |call| {
        if matches!(call, Call::Read { .. }) && opened.load(Ordering::SeqCst) {
            closed.pass();
        }
        Answer::Real
    });
    ready.store(true, Ordering::SeqCst);
    // Four readers, five parts an expert and more: the first guess has begun, the others have not.
    store.lookahead(LAYER, &[1, 2, 3], 8);
    std::thread::sleep(Duration::from_millis(50));
    let request = store.request(LAYER, &[2, 5]);
    let stats = store.stats();
    let expert_bytes: u64 = spread.model.manifest.experts.as_ref().unwrap().part_bytes.iter().sum();
    assert_eq!(stats.lookahead_useful_bytes, expert_bytes);
    assert_eq!((stats.lookahead_wasted_bytes, stats.lookahead_dropped), (expert_bytes, 1));
    assert_eq!((stats.hits, stats.misses), (0, 2));
    gate.open();
    drop(request);
    spread.model.read(&store, &[2, 5]);
    spread.model.read(&store, &all(EXPERTS));
    assert_eq!(store.stats().expert_bytes, 8 * expert_bytes, "each was read once");
}

#[test]
fn a_guess_whose_read_fails_does_no_harm() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything]);
    let broken = Arc::new(AtomicBool::new(false));
    let seen = Arc::clone(&broken);
    let store = spread
        .open(8, false, move |_| if seen.load(Ordering::SeqCst) { Answer::Errno(libc::EIO) } else { Answer::Real });
    broken.store(true, Ordering::SeqCst);
    store.lookahead(LAYER, &[1, 2, 3], 8);
    std::thread::sleep(Duration::from_millis(50));
    broken.store(false, Ordering::SeqCst);
    // What failed before anybody asked is told to whoever asks, or read anew: never wrong bytes, and the next try is clean.
    let mut request = store.request(LAYER, &[1, 2, 3]);
    while let Ok(Some(expert)) = request.next() {
        spread.model.check(&expert);
    }
    drop(request);
    spread.model.read(&store, &[1, 2, 3]);
}

#[test]
fn guesses_take_no_slot_that_a_request_needs() {
    let spread = Spread::new(ExpertFormat::Mxfp4, &[&everything]);
    for slots in [1, 2, 4, 5] {
        let store = spread.open(slots, false, |_| Answer::Real);
        for round in 0..20 {
            let mut request = store.request(LAYER, &[0, 2, 4, 6]);
            store.lookahead(7, &[1, 3, 5, 7], 8);
            let mut count = 0;
            while let Some(expert) = request.next().unwrap() {
                spread.model.check(&expert);
                count += 1;
            }
            assert_eq!(count, 4, "{slots} slots, round {round}");
            drop(request);
            let expert = store.request(7, &[3]).next().unwrap().unwrap();
            spread.model.check(&expert);
        }
    }
}
