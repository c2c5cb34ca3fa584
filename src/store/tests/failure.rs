//! What happens when files, drives, callers or memory do not do their part.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Condvar, Mutex};
use std::time::{Duration, Instant};

use super::disk::{Answer, Call};
use super::*;

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
            ExpertStore::open_on(Arc::<Faulty>::clone(&disk), &model.manifest, &[], &options(slots), Interrupt::new())
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
        let store = ExpertStore::open(&model.manifest, &[], &options, Interrupt::new()).unwrap();
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
        let error = ExpertStore::open_on(disk, &model.manifest, &[], &options(2), Interrupt::new()).err().unwrap();
        assert_eq!(error.kind(), Kind::Model, "{error}");
        assert!(error.message().contains("two") && error.hint_text().is_some(), "{error}");
    }
    std::fs::remove_file(&model.manifest.shards[1]).unwrap();
    let error = ExpertStore::open(&model.manifest, &[], &options(2), Interrupt::new()).err().unwrap();
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
    let store = ExpertStore::open_on(disk, &model.manifest, &[], &options(8), interrupt.clone()).unwrap();
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
    let error = ExpertStore::open(&model.manifest, &[], &options(0), Interrupt::new()).err().unwrap();
    assert_eq!(error.kind(), Kind::Memory);
    assert!(ExpertStore::slot_bytes(&model.manifest, &[]).unwrap() >= 30_006);
    model.manifest.experts = None;
    assert_eq!(ExpertStore::slot_bytes(&model.manifest, &[]).unwrap(), 0);
    let store = ExpertStore::open(&model.manifest, &[], &options(0), Interrupt::new()).unwrap();
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
    let error = ExpertStore::open(&model.manifest, &[], &options(2), Interrupt::new()).err().unwrap();
    assert_eq!(error.kind(), Kind::Memory, "{error}");
}
