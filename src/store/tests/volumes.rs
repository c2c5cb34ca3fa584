//! Drive roots on partitions and mappings of the same disks are one drive, with one queue.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Duration;

use super::disk::{Answer, Call};
use super::replicas::{EXPERTS, Spread, everything, path_of};
use super::*;
use crate::device::tests as tree;

#[test]
fn roots_on_one_disk_are_one_drive_whatever_lies_between() {
    let sys = tree::tree();
    // Two partitions of a disk and a mapping over one of them; the other disk; a mapping over both.
    let numbers = [(8, 1), (8, 2), (253, 1), (8, 16), (253, 0)];
    let spread =
        Spread::with_shards(ExpertFormat::Mxfp4, &[&everything, &everything, &everything, &everything, &everything]);
    let name = |(major, minor)| tree::name_in(sys.path(), major, minor).unwrap();
    let mut devices: Vec<_> = numbers.into_iter().enumerate().map(|(root, at)| (spread.dir(root), name(at))).collect();
    devices.push((spread.model.manifest.dir.clone(), name((8, 16)))); // the shards
    let (first, under_way, most) = (spread.dir(0), Arc::new(AtomicUsize::new(0)), Arc::new(AtomicUsize::new(0)));
    let on_sda = [spread.dir(0), spread.dir(1), spread.dir(2)];
    let (count, seen) = (Arc::clone(&under_way), Arc::clone(&most));
    let disk = Faulty::with_devices(devices, move |call| {
        if matches!(call, Call::Read { .. }) && on_sda.iter().any(|dir| path_of(call).starts_with(dir)) {
            seen.fetch_max(count.fetch_add(1, Ordering::SeqCst) + 1, Ordering::SeqCst);
            std::thread::sleep(Duration::from_millis(1));
            count.fetch_sub(1, Ordering::SeqCst);
        }
        Answer::Real
    });
    let options = options(2 * EXPERTS);
    let depth = options.queue_depth;
    let store = ExpertStore::open_on(disk, &spread.model.manifest, &spread.roots, &options, Interrupt::new()).unwrap();
    spread.model.read(&store, &all(EXPERTS));
    let paths: Vec<String> = store.stats().drives.into_iter().map(|drive| drive.path).collect();
    assert_eq!(paths.len(), 3, "sda, sdb, and both as one: {paths:?}");
    assert!(paths.contains(&first.display().to_string()), "{paths:?}");
    assert!((1..=depth).contains(&most.load(Ordering::SeqCst)), "{most:?} reads at a time, one queue has {depth}");
}
