//! The store as a whole, on real files with a disk that fails on demand.

use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex};
use std::time::{Duration, Instant};

use super::faults::{Answer, Call, Faulty};
use super::*;
use crate::checkpoint::{ExpertFormat, ExpertTable};
use crate::error::Kind;

const LAYER: u16 = 3;

/// A model on disk that consists of experts alone.
struct Model {
    _dir: tempfile::TempDir,
    manifest: Manifest,
}

/// How the parts of the experts lie.
#[derive(Clone, Copy, PartialEq)]
enum Order {
    /// As released: one after the other.
    Adjacent,
    /// With some bytes between any two.
    Apart,
    /// Alternately in two files, last part first.
    Torn,
}

impl Model {
    /// `experts` experts in two layers (3 and 7) with parts of odd sizes, at odd offsets, up to the very end of the file.
    fn new(experts: usize, format: ExpertFormat, order: Order) -> Self {
        let dir = tempfile::tempdir().unwrap();
        Self::in_dir(dir, experts, format, order)
    }

    fn in_dir(dir: tempfile::TempDir, experts: usize, format: ExpertFormat, order: Order) -> Self {
        let part_bytes = match format {
            ExpertFormat::Mxfp4 => vec![24_016, 1501, 24_016, 1501, 24_016, 1501],
            ExpertFormat::Bf16 => vec![10_002, 10_002, 10_002],
        };
        let mut files = [vec![1_u8; 777], vec![2_u8; 12_345]];
        let mut places = Vec::new();
        for expert in 0..2 * experts {
            let mut of_expert = vec![(0, 0); part_bytes.len()];
            for step in 0..part_bytes.len() {
                let part = if order == Order::Torn { part_bytes.len() - 1 - step } else { step };
                let file = if order == Order::Torn { part % 2 } else { expert % 2 };
                of_expert[part] = (file as u16, files[file].len() as u64);
                files[file].extend((0..part_bytes[part]).map(|at| value(expert, part, at as usize)));
                if order == Order::Apart {
                    files[file].extend([0xee; 13]);
                }
            }
            places.extend(of_expert);
        }
        let shards: Vec<PathBuf> = ["one", "two"].iter().map(|name| dir.path().join(name)).collect();
        for (path, bytes) in shards.iter().zip(&files) {
            std::fs::write(path, bytes).unwrap();
        }
        let manifest = Manifest {
            dir: dir.path().to_path_buf(),
            shards,
            shard_bytes: files.iter().map(|bytes| bytes.len() as u64).collect(),
            trunk: Vec::new(),
            experts: Some(ExpertTable { format, part_bytes, num_experts: experts, moe_layers: vec![LAYER, 7], places }),
            ignored: Vec::new(),
        };
        Self { _dir: dir, manifest }
    }

    fn open(&self, slots: usize) -> Arc<ExpertStore> {
        ExpertStore::open(&self.manifest, &options(slots), Interrupt::new()).unwrap()
    }

    fn open_on(&self, disk: Arc<Faulty>, slots: usize) -> Arc<ExpertStore> {
        ExpertStore::open_on(disk, &self.manifest, &options(slots), Interrupt::new()).unwrap()
    }

    fn check(&self, expert: &Expert<'_>) {
        let table = self.manifest.experts.as_ref().unwrap();
        let layer = table.moe_layers.iter().position(|layer| *layer == expert.id.layer).unwrap();
        let number = layer * table.num_experts + usize::from(expert.id.expert);
        for (part, len) in table.part_bytes.iter().enumerate() {
            let bytes = expert.part(part);
            assert_eq!(bytes.len() as u64, *len, "{} part {part}", expert.id);
            let wrong = bytes.iter().enumerate().position(|(at, byte)| *byte != value(number, part, at));
            assert_eq!(wrong, None, "{} part {part}", expert.id);
        }
    }

    /// Asks for `experts` of layer 3 and looks at every byte.
    fn read(&self, store: &ExpertStore, experts: &[u16]) {
        let mut request = store.request(LAYER, experts);
        let mut got = Vec::new();
        while let Some(expert) = request.next().unwrap() {
            self.check(&expert);
            got.push(expert.id.expert);
        }
        assert_eq!(got, experts);
    }
}

/// Byte `at` of a part: never 255.
fn value(expert: usize, part: usize, at: usize) -> u8 {
    ((at * 31 + part * 7 + expert * 101 + at / 251) % 255) as u8
}

fn options(slots: usize) -> StoreOptions {
    StoreOptions { slots, direct: true, queue_depth: 4, piece_bytes: 16 << 10 }
}

fn all(experts: usize) -> Vec<u16> {
    (0..experts as u16).collect()
}

/// The first error of a request, which must come.
fn error_of(store: &ExpertStore, experts: &[u16]) -> Error {
    let mut request = store.request(LAYER, experts);
    loop {
        match request.next() {
            Ok(Some(_)) => {}
            Ok(None) => panic!("no error"),
            Err(error) => return error,
        }
    }
}

#[test]
fn experts_come_whole_and_in_order_with_any_number_of_slots() {
    for format in [ExpertFormat::Mxfp4, ExpertFormat::Bf16] {
        for order in [Order::Adjacent, Order::Apart, Order::Torn] {
            let model = Model::new(9, format, order);
            for slots in [1, 2, 3, 5, 9, 100] {
                let store = model.open(slots);
                model.read(&store, &all(9));
                model.read(&store, &[0, 3, 4, 8]);
                model.read(&store, &[]);
                model.read(&store, &all(9));
                let stats = store.stats();
                assert_eq!(stats.hits + stats.misses, 22, "{slots} slots");
                let expert_bytes: u64 = model.manifest.experts.as_ref().unwrap().part_bytes.iter().sum();
                assert!(stats.expert_bytes >= stats.misses * expert_bytes);
            }
        }
    }
}

#[test]
fn piece_sizes_and_modes_do_not_matter() {
    let model = Model::new(4, ExpertFormat::Mxfp4, Order::Adjacent);
    for direct in [true, false] {
        for piece_bytes in [0, 1, 4096, 5000, 1 << 40] {
            for queue_depth in [0, 1, 16] {
                let options = StoreOptions { slots: 2, direct, queue_depth, piece_bytes };
                let store = ExpertStore::open(&model.manifest, &options, Interrupt::new()).unwrap();
                model.read(&store, &all(4));
                assert_eq!(store.take_notices(), [""; 0]);
            }
        }
    }
}

#[test]
fn every_expert_is_read_once_while_there_is_room() {
    let model = Model::new(12, ExpertFormat::Mxfp4, Order::Adjacent);
    let store = model.open(24);
    for _ in 0..3 {
        model.read(&store, &all(12));
    }
    let stats = store.stats();
    let payload = 12 * model.manifest.experts.as_ref().unwrap().part_bytes.iter().sum::<u64>();
    assert_eq!((stats.hits, stats.misses, stats.evictions), (24, 12, 0));
    assert_eq!(stats.expert_bytes, payload);
    let asked: u64 = stats.drives.iter().map(|drive| drive.bytes).sum();
    assert!((payload..payload + 12 * 3 * 2 * ALIGN as u64).contains(&asked), "{asked} bytes for {payload}");
}

#[test]
fn a_read_under_way_is_shared() {
    let model = Model::new(6, ExpertFormat::Bf16, Order::Adjacent);
    let store = model.open(6);
    let mut first = store.request(LAYER, &[0, 1, 2, 3]);
    let mut second = store.request(LAYER, &[1, 2, 3, 4]);
    while let Some(expert) = second.next().unwrap() {
        model.check(&expert);
    }
    while let Some(expert) = first.next().unwrap() {
        model.check(&expert);
    }
    assert_eq!((store.stats().hits, store.stats().misses), (3, 5));
}

#[test]
fn two_requests_at_once_get_on_with_a_single_slot() {
    let model = Model::new(6, ExpertFormat::Bf16, Order::Adjacent);
    for slots in [1, 2, 3] {
        let store = model.open(slots);
        let mut requests = [store.request(LAYER, &[0, 1, 2, 3, 4, 5]), store.request(LAYER, &[1, 2, 3, 4, 5])];
        for turn in 0..11 {
            model.check(&requests[turn % 2].next().unwrap().unwrap());
        }
    }
}

#[test]
fn an_expert_in_use_stays_while_others_come_and_go() {
    let model = Model::new(20, ExpertFormat::Mxfp4, Order::Adjacent);
    let store = model.open(2);
    let held = store.request(LAYER, &[7]).next().unwrap().unwrap();
    for _ in 0..5 {
        model.read(&store, &all(7));
        model.check(&held);
    }
    drop(held);
    model.read(&store, &all(20));
}

#[test]
fn a_dropped_request_gives_its_slots_back() {
    let model = Model::new(16, ExpertFormat::Bf16, Order::Adjacent);
    for slots in [1, 2, 7] {
        let store = model.open(slots);
        for taken in 0..16 {
            let mut request = store.request(LAYER, &all(16));
            for _ in 0..taken {
                request.next().unwrap().unwrap();
            }
        }
        model.read(&store, &all(16));
    }
}

#[test]
fn threads_share_few_slots_without_harm() {
    let model = Model::new(10, ExpertFormat::Mxfp4, Order::Torn);
    for slots in [1, 3, 8] {
        let store = model.open(slots);
        std::thread::scope(|scope| {
            for thread in 0..4_u16 {
                let (store, model) = (&store, &model);
                scope.spawn(move || {
                    for round in 0..10_u16 {
                        let experts: Vec<u16> = (0..10).filter(|at| (at * 7 + thread + round) % 3 > 0).collect();
                        model.read(store, &experts);
                    }
                });
            }
        });
    }
}

#[test]
fn short_and_interrupted_reads_are_continued() {
    let model = Model::new(4, ExpertFormat::Mxfp4, Order::Apart);
    for most in [1, 3, 1000, 4095, 4096, 4097, 9000, usize::MAX] {
        let disk = Faulty::new(move |call| match call {
            Call::Read { number, .. } if number % 3 == 1 => Answer::Errno(libc::EINTR),
            Call::Read { number, .. } if number % 3 == 2 => Answer::Short(most),
            Call::Read { .. } if most < 1000 => Answer::Short(most.max(700)),
            _ => Answer::Real,
        });
        let store = model.open_on(disk, 2);
        model.read(&store, &all(4));
        assert_eq!(store.take_notices(), [""; 0]);
        assert_eq!(store.stats().drives[0].mode, "direct");
    }
}

#[test]
fn a_failed_read_names_expert_file_offset_and_errno_and_spares_the_rest() {
    let model = Model::new(6, ExpertFormat::Mxfp4, Order::Adjacent);
    let broken = Arc::new(AtomicBool::new(true));
    let bad = model.manifest.experts.as_ref().unwrap().places(LAYER, 2).unwrap()[2].1;
    let seen = Arc::clone(&broken);
    let disk = Faulty::new(move |call| match call {
        Call::Read { path, offset, len, .. }
            if path.ends_with("one") && (offset..offset + len as u64).contains(&bad) && seen.load(Ordering::SeqCst) =>
        {
            Answer::Errno(libc::EIO)
        }
        _ => Answer::Real,
    });
    for slots in [1, 6] {
        broken.store(true, Ordering::SeqCst);
        let store =
            ExpertStore::open_on(Arc::<Faulty>::clone(&disk), &model.manifest, &options(slots), Interrupt::new())
                .unwrap();
        let mut request = store.request(LAYER, &all(6));
        let mut failures = Vec::new();
        let mut got = Vec::new();
        loop {
            match request.next() {
                Ok(Some(expert)) => got.push(expert.id.expert),
                Ok(None) => break,
                Err(error) => failures.push(error),
            }
        }
        drop(request);
        assert_eq!(got, [0, 1, 3, 4, 5], "{failures:?}");
        assert_eq!(failures.len(), 1);
        assert_eq!(failures[0].kind(), Kind::Io);
        for part in ["L3/E2", "one", "offset", "wanted", "got", "os error 5"] {
            assert!(failures[0].message().contains(part), "{part}: {}", failures[0]);
        }
        broken.store(false, Ordering::SeqCst);
        model.read(&store, &all(6));
    }
}

#[test]
fn a_file_cut_after_opening_is_an_error_with_wanted_and_got() {
    for direct in [true, false] {
        let model = Model::new(6, ExpertFormat::Mxfp4, Order::Adjacent);
        let options = StoreOptions { direct, ..options(3) };
        let store = ExpertStore::open(&model.manifest, &options, Interrupt::new()).unwrap();
        let at = model.manifest.experts.as_ref().unwrap().places(LAYER, 4).unwrap()[3].1;
        std::fs::File::options().write(true).open(&model.manifest.shards[0]).unwrap().set_len(at).unwrap();
        let error = error_of(&store, &[0, 4]);
        assert_eq!(error.kind(), Kind::Io);
        for part in ["L3/E4", "one", "offset", "wanted", "got", "end of file"] {
            assert!(error.message().contains(part), "{part}: {error}");
        }
        model.read(&store, &[0, 1, 2, 3]);
    }
}

#[test]
fn direct_reads_refused_at_open_or_at_any_read_make_the_drive_buffered_with_one_notice() {
    let model = Model::new(8, ExpertFormat::Mxfp4, Order::Apart);
    for code in [libc::EINVAL, libc::EOPNOTSUPP] {
        for after in [0, 1, 5, 11] {
            for at_open in [true, false] {
                let disk = Faulty::new(move |call| match call {
                    Call::Open { direct: true, .. } if at_open => Answer::Errno(code),
                    Call::Read { direct: true, number, .. } if number >= after => Answer::Errno(code),
                    _ => Answer::Real,
                });
                let store = model.open_on(disk, 3);
                model.read(&store, &all(8));
                let notices = store.take_notices();
                assert_eq!(notices.len(), 1, "{notices:?}");
                assert!(notices[0].contains(&format!("os error {code}")), "{notices:?}");
                assert!(store.take_notices().is_empty());
                assert_eq!(store.stats().drives.len(), 1);
                assert_eq!(store.stats().drives[0].mode, "buffered");
            }
        }
    }
}

#[test]
fn only_direct_reads_can_be_refused() {
    let model = Model::new(2, ExpertFormat::Mxfp4, Order::Adjacent);
    let disk = Faulty::new(|call| match call {
        Call::Read { number, .. } if number > 1 => Answer::Errno(libc::EINVAL),
        _ => Answer::Real,
    });
    let store = model.open_on(disk, 2);
    let error = error_of(&store, &[0]);
    assert!(error.kind() == Kind::Io && error.message().contains("os error 22"), "{error}");
}

#[test]
fn reads_past_the_end_are_not_asked_of_a_direct_descriptor() {
    let model = Model::new(3, ExpertFormat::Mxfp4, Order::Adjacent);
    let ends = model.manifest.shard_bytes.clone();
    let disk = Faulty::new(move |call| match call {
        Call::Read { direct: true, offset, len, .. } if ends.iter().all(|end| offset + len as u64 > *end) => {
            Answer::Errno(libc::EINVAL)
        }
        _ => Answer::Real,
    });
    let store = model.open_on(disk, 3);
    let mut request = store.request(7, &all(3));
    while let Some(expert) = request.next().unwrap() {
        model.check(&expert);
    }
    assert_eq!(store.stats().drives[0].mode, "direct");
}

#[test]
fn files_that_cannot_be_opened_are_refused_by_name() {
    let model = Model::new(2, ExpertFormat::Mxfp4, Order::Adjacent);
    for code in [libc::EACCES, libc::EMFILE] {
        let disk = Faulty::new(move |call| match call {
            Call::Open { path, .. } if path.ends_with("two") => Answer::Errno(code),
            _ => Answer::Real,
        });
        let error = ExpertStore::open_on(disk, &model.manifest, &options(2), Interrupt::new()).err().unwrap();
        assert_eq!(error.kind(), Kind::Model, "{error}");
        assert!(error.message().contains("two") && error.hint_text().is_some(), "{error}");
    }
    std::fs::remove_file(&model.manifest.shards[1]).unwrap();
    let error = ExpertStore::open(&model.manifest, &options(2), Interrupt::new()).err().unwrap();
    assert!(error.kind() == Kind::Model && error.message().contains("two"), "{error}");
}

#[test]
fn the_reserved_scale_is_refused_with_its_place() {
    let model = Model::new(4, ExpertFormat::Mxfp4, Order::Adjacent);
    for (part, matrix) in [(1, "w1"), (3, "w3"), (5, "w2")] {
        let (shard, offset) = model.manifest.experts.as_ref().unwrap().places(LAYER, 1).unwrap()[part];
        let path = &model.manifest.shards[usize::from(shard)];
        let good = std::fs::read(path).unwrap();
        let mut bad = good.clone();
        bad[offset as usize + 1500] = 255;
        bad[offset as usize - 1] = 255; // codes may be anything
        std::fs::write(path, &bad).unwrap();
        let store = model.open(4);
        let error = error_of(&store, &[1]);
        assert_eq!(error.kind(), Kind::Model);
        for part in ["L3/E1", matrix, "1500 of 1501", &format!("offset {}", offset + 1500)] {
            assert!(error.message().contains(part), "{part}: {error}");
        }
        std::fs::write(path, &good).unwrap();
        model.read(&store, &all(4));
    }
}

/// Holds reads up until it is opened.
#[derive(Default)]
struct Gate(Mutex<bool>, Condvar);

impl Gate {
    fn pass(&self) {
        let mut open = self.0.lock().unwrap();
        while !*open {
            open = self.1.wait(open).unwrap();
        }
    }

    fn open(&self) {
        *self.0.lock().unwrap() = true;
        self.1.notify_all();
    }
}

/// A disk whose reads get stuck after the first `free`.
fn stuck(free: usize) -> (Arc<Gate>, Arc<Faulty>) {
    let gate = Arc::new(Gate::default());
    let closed = Arc::clone(&gate);
    let disk = Faulty::new(move |call| {
        if matches!(call, Call::Read { number, .. } if number >= free) {
            closed.pass();
        }
        Answer::Real
    });
    (gate, disk)
}

#[test]
fn an_interrupt_ends_the_wait_for_a_stuck_read_and_the_store_ends_without_it() {
    let model = Model::new(8, ExpertFormat::Mxfp4, Order::Adjacent);
    let (gate, disk) = stuck(4);
    let interrupt = Interrupt::new();
    let store = ExpertStore::open_on(disk, &model.manifest, &options(8), interrupt.clone()).unwrap();
    let mut request = store.request(LAYER, &all(8));
    std::thread::scope(|scope| {
        scope.spawn(|| {
            std::thread::sleep(Duration::from_millis(100));
            interrupt.raise(2);
        });
        let start = Instant::now();
        let error = loop {
            if let Err(error) = request.next() {
                break error;
            }
        };
        assert_eq!(error.kind(), Kind::Interrupted(2));
        assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    });
    drop(request);
    let start = Instant::now();
    drop(store);
    assert!(start.elapsed() < Duration::from_secs(1), "{:?}", start.elapsed());
    gate.open(); // the late reads still have memory to go to
    std::thread::sleep(Duration::from_millis(50));
}

#[test]
fn the_end_does_not_wait_for_queued_reads() {
    let model = Model::new(8, ExpertFormat::Mxfp4, Order::Adjacent);
    let reads = Arc::new(AtomicUsize::new(0));
    let count = Arc::clone(&reads);
    let disk = Faulty::new(move |call| {
        if let Call::Read { .. } = call {
            count.fetch_add(1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(20));
        }
        Answer::Real
    });
    let store = model.open_on(disk, 8);
    drop(store.request(LAYER, &all(8)));
    let start = Instant::now();
    drop(store);
    assert!(start.elapsed() < Duration::from_millis(400), "{:?}", start.elapsed());
    assert!(reads.load(Ordering::SeqCst) < 20);
}

#[test]
fn what_the_model_does_not_have_is_an_error_and_no_panic() {
    let model = Model::new(4, ExpertFormat::Bf16, Order::Adjacent);
    let store = model.open(2);
    for (layer, expert) in [(LAYER, 4), (LAYER, u16::MAX), (0, 0), (4, 1)] {
        let mut request = store.request(layer, &[expert]);
        let error = request.next().unwrap_err();
        assert!(error.message().contains(&format!("L{layer}/E{expert}")), "{error}");
        assert!(request.next().unwrap().is_none());
    }
    let expert = store.request(LAYER, &[1]).next().unwrap().unwrap();
    assert_eq!(expert.part(3), [0_u8; 0]);
}

#[test]
fn no_slot_is_refused_and_a_dense_model_needs_none() {
    let mut model = Model::new(4, ExpertFormat::Bf16, Order::Adjacent);
    let error = ExpertStore::open(&model.manifest, &options(0), Interrupt::new()).err().unwrap();
    assert_eq!(error.kind(), Kind::Memory);
    assert!(ExpertStore::slot_bytes(&model.manifest) >= 30_006);
    model.manifest.experts = None;
    assert_eq!(ExpertStore::slot_bytes(&model.manifest), 0);
    let store = ExpertStore::open(&model.manifest, &options(0), Interrupt::new()).unwrap();
    assert!(store.request(LAYER, &[0]).next().is_err());
    assert!(store.request(LAYER, &[]).next().unwrap().is_none());
    assert!(store.stats().drives.is_empty());
}

#[test]
fn slots_that_no_memory_can_hold_are_refused() {
    let mut model = Model::new(1, ExpertFormat::Bf16, Order::Adjacent);
    let table = model.manifest.experts.as_mut().unwrap();
    table.part_bytes = vec![1 << 50; 3];
    table.places = vec![(0, 0), (0, 1 << 50), (0, 2 << 50), (0, 0), (0, 1 << 50), (0, 2 << 50)];
    model.manifest.shard_bytes[0] = 3 << 50;
    let error = ExpertStore::open(&model.manifest, &options(2), Interrupt::new()).err().unwrap();
    assert_eq!(error.kind(), Kind::Memory, "{error}");
}
