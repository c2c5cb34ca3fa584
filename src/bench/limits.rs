//! What the machine can do at best, measured beside what the model does with it: memory, arithmetic, drives.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::checkpoint::Manifest;
use crate::error::{Kind, Result};
use crate::interrupt::Interrupt;
use crate::kernels::Compute;
use crate::store::packed::PackedRoot;
use crate::store::{ALIGN, Catalog, Files, Names, Piece, Region, Replica, System, Tally, Volumes};
use crate::synth::rng::Rng;

/// Memory that is read: far beyond any cache of a processor.
const READ_BYTES: usize = 256 << 20;
/// The best of so many measurements of memory and of arithmetic counts.
const ROUNDS: usize = 5;
/// Queue depths at which the drives are measured, and for how long each.
const QUEUE_DEPTHS: [usize; 5] = [1, 2, 4, 8, 16];
const DRIVE_TIME: Duration = Duration::from_millis(600);
/// Bytes of one read at most.
const PIECE_BYTES: usize = 4 << 20;
/// Buffers are whole pages of this size where the system has such: a read into scattered small pages becomes many small
/// requests, and the limit would be too low.
const HUGE_PAGE: usize = 2 << 20;
/// Experts that are read from a drive, at most.
const EXPERTS_MAX: usize = 1 << 14;

/// Rates of this machine.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Limits {
    /// Bytes a second that all threads read from memory.
    pub read: f64,
    /// Multiply-adds a second of all threads.
    pub multiply_adds: f64,
    /// Bytes a second that the drives with the experts give together; `None` without routed experts.
    pub disk: Option<f64>,
}

/// Memory's and the processor's, with the threads of `compute`: `read` and `multiply_adds`.
///
/// # Errors
/// `Interrupted`.
pub(super) fn of_compute(compute: &Compute, interrupt: &Interrupt) -> Result<(f64, f64)> {
    let memory = vec![1_u8; READ_BYTES];
    let best = |measure: &dyn Fn() -> f64| (0..ROUNDS).map(|_| measure()).fold(0.0, f64::max);
    let rates = (best(&|| compute.measure_read(&memory)), best(&|| compute.measure_fma()));
    // Tasks that an interrupt skipped took no time.
    interrupt.check()?;
    Ok(rates)
}

/// The rate of random reads of whole experts where the model has them, in its shards and on drive roots: of all drives
/// together, each with as many readers, at the best number of readers; past the page cache where `direct` and the file
/// system allow. `None` without routed experts.
///
/// # Errors
/// `Model` and `Io` as reading reports; `Interrupted`.
pub fn drive_rate(
    manifest: &Manifest,
    roots: &[PackedRoot],
    direct: bool,
    interrupt: &Interrupt,
) -> Result<Option<f64>> {
    let names = Names::new(manifest, roots);
    let catalog = Catalog::new(manifest, roots, &names)?;
    if catalog.len() == 0 {
        return Ok(None);
    }
    let files = Arc::new(Files::new(Arc::new(System), names, QUEUE_DEPTHS[QUEUE_DEPTHS.len() - 1]));
    let volumes = Volumes::open(&files, &catalog.files(), direct)?;
    let drives = copies(&catalog, &volumes);
    let mut best = 0.0_f64;
    for (round, queue_depth) in QUEUE_DEPTHS.into_iter().enumerate() {
        let drives: Vec<Drive> = drives.iter().map(|copies| Drive::new(&catalog, copies, round as u64)).collect();
        best = best.max(rate(&volumes, &drives, queue_depth, interrupt)?);
    }
    Ok(Some(best))
}

/// The copies of experts that are on each drive.
fn copies(catalog: &Catalog, volumes: &Volumes) -> Vec<Vec<Replica>> {
    let mut drives = vec![Vec::new(); volumes.list.len()];
    for index in 0..catalog.len() {
        for &replica in catalog.replicas(index as u32) {
            drives[usize::from(volumes.of_file[catalog.file_of(replica)])].push(replica);
        }
    }
    drives
}

/// What is read from one drive, in order.
struct Drive {
    pieces: Vec<Piece>,
    next: AtomicUsize,
}

impl Drive {
    /// Experts in an order of their own for each `round`, so that none finds what the one before has left somewhere.
    fn new(catalog: &Catalog, copies: &[Replica], round: u64) -> Self {
        let order = Rng::new(round).permutation(copies.len()).into_iter().take(EXPERTS_MAX);
        let pieces = order.flat_map(|at| catalog.pieces(copies[at], PIECE_BYTES)).collect();
        Self { pieces, next: AtomicUsize::new(0) }
    }

    /// The next piece, over and over: a drive with few experts is kept busy beside the others.
    fn next(&self) -> Option<Piece> {
        let next = self.next.fetch_add(1, Ordering::Relaxed);
        self.pieces.get(next.checked_rem(self.pieces.len())?).copied()
    }

    fn is_read(&self) -> bool {
        self.next.load(Ordering::Relaxed) >= self.pieces.len()
    }
}

/// Bytes a second of all `drives` with `queue_depth` readers each, until all have been read or [`DRIVE_TIME`] is over.
fn rate(volumes: &Volumes, drives: &[Drive], queue_depth: usize, interrupt: &Interrupt) -> Result<f64> {
    let (bytes, failed, failure) = (AtomicU64::new(0), AtomicBool::new(false), Mutex::new(None));
    let len_max = drives.iter().flat_map(|drive| &drive.pieces).map(|piece| piece.len).max().unwrap_or(ALIGN);
    let len_max = len_max.next_multiple_of(HUGE_PAGE);
    let mut memory = Region::allocate(drives.len() * queue_depth * len_max, "measuring the drives")?;
    memory.fill(1); // so that no page is made in the measured time
    let mut readers = Vec::new();
    for drive in drives {
        readers.extend((0..queue_depth).map(|_| (drive, memory.split_to(len_max))));
    }
    let start = Instant::now();
    let deadline = start + DRIVE_TIME;
    std::thread::scope(|scope| {
        for (drive, mut buffer) in readers {
            let (bytes, failed, failure) = (&bytes, &failed, &failure);
            let goes_on = move || {
                let ended = drives.iter().all(Drive::is_read) || failed.load(Ordering::Relaxed);
                !ended && Instant::now() < deadline && !interrupt.is_raised()
            };
            scope.spawn(move || {
                while goes_on() {
                    let Some(piece) = drive.next() else { return };
                    let volume = &volumes.list[usize::from(volumes.of_file[piece.file])];
                    let mut tally = Tally::default();
                    let into = &mut buffer[..piece.len];
                    match volume.read(piece.file, into, piece.offset, piece.needed, &mut tally) {
                        Ok(()) => drop(bytes.fetch_add(tally.bytes, Ordering::Relaxed)),
                        Err(error) => {
                            failed.store(true, Ordering::Relaxed);
                            let error = error.into_error(Kind::Io, "an expert");
                            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                            return;
                        }
                    }
                }
            });
        }
    });
    interrupt.check()?;
    match failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => Ok(bytes.into_inner() as f64 / start.elapsed().as_secs_f64()),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;
    use crate::config::ModelConfig;

    fn demo() -> Manifest {
        let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model");
        Manifest::open(&dir, &ModelConfig::load(&dir).unwrap()).unwrap()
    }

    #[test]
    fn a_drive_is_asked_for_every_expert_once_in_an_order_of_its_own() {
        let manifest = demo();
        let names = Names::new(&manifest, &[]);
        let catalog = Catalog::new(&manifest, &[], &names).unwrap();
        let files = Arc::new(Files::new(Arc::new(System), names, 1));
        let volumes = Volumes::open(&files, &catalog.files(), false).unwrap();
        let copies = copies(&catalog, &volumes);
        assert_eq!(copies.iter().map(Vec::len).sum::<usize>(), catalog.len());
        let pieces = |round| Drive::new(&catalog, &copies[0], round).pieces;
        let (mut first, mut second) = (pieces(0), pieces(1));
        assert_ne!(first, second);
        [&mut first, &mut second].into_iter().for_each(|pieces| pieces.sort_by_key(|piece| (piece.file, piece.offset)));
        assert_eq!(first, second);
        let needed: usize = first.iter().map(|piece| piece.needed).sum();
        assert!(needed as u64 >= manifest.all_experts_bytes());
    }

    #[test]
    fn the_drives_of_a_model_have_a_rate_and_an_interrupt_ends_it() {
        let interrupt = Interrupt::new();
        assert!(drive_rate(&demo(), &[], true, &interrupt).unwrap().unwrap() > 0.0);
        interrupt.raise(2);
        assert_eq!(drive_rate(&demo(), &[], false, &interrupt).unwrap_err().kind(), Kind::Interrupted(2));
    }

    #[test]
    fn a_model_without_experts_has_no_rate_of_drives() {
        let manifest = Manifest { experts: None, ..demo() };
        assert_eq!(drive_rate(&manifest, &[], true, &Interrupt::new()).unwrap(), None);
    }
}
