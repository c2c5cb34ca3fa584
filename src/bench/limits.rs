//! What the machine can do at best, measured beside what the model does with it: memory, arithmetic, drives.

use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use crate::checkpoint::Manifest;
use crate::error::{Kind, Result};
use crate::interrupt::Interrupt;
use crate::kernels::Compute;
use crate::store::{ALIGN, Files, Names, Region, System, Tally, Volumes};
use crate::synth::rng::Rng;

/// Memory that is read: far beyond any cache of a processor.
const READ_BYTES: usize = 256 << 20;
/// The best of so many measurements of memory and of arithmetic counts.
const ROUNDS: usize = 5;
/// Queue depths at which the drives are measured, and for how long each.
const QUEUE_DEPTHS: [usize; 5] = [1, 2, 4, 8, 16];
const DRIVE_TIME: Duration = Duration::from_millis(600);
/// Bytes of one read at most.
const PIECE_BYTES: u64 = 4 << 20;
/// Reads at random places, at most.
const READS_MAX: usize = 1 << 16;

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

/// One read.
#[derive(Debug, Clone, Copy)]
struct Read {
    file: usize,
    offset: u64,
    len: usize,
}

/// The rate of random reads of whole experts from the model's own files, of all drives together at the best queue depth;
/// past the page cache where `direct` and the file system allow.
///
/// # Errors
/// `Model` and `Io` as reading reports; `Interrupted`.
pub fn drive_rate(manifest: &Manifest, direct: bool, interrupt: &Interrupt) -> Result<Option<f64>> {
    let (paths, lengths, experts) = places(manifest);
    if experts.is_empty() {
        return Ok(None);
    }
    let mut used: Vec<usize> = experts.iter().flatten().map(|read| read.file).collect();
    used.sort_unstable();
    used.dedup();
    let readers = QUEUE_DEPTHS[QUEUE_DEPTHS.len() - 1];
    let files = Arc::new(Files::new(Arc::new(System), Names::of_files(paths, lengths), readers));
    let volumes = Volumes::open(&files, &used, direct)?;
    let mut best = 0.0_f64;
    for (round, queue_depth) in QUEUE_DEPTHS.into_iter().enumerate() {
        let order = Rng::new(round as u64).permutation(experts.len().min(READS_MAX));
        let reads: Vec<Read> = order.into_iter().flat_map(|expert| experts[expert].iter().copied()).collect();
        best = best.max(rate(&volumes, &reads, queue_depth, interrupt)?);
    }
    Ok(Some(best))
}

/// Paths and lengths of the files, and for each expert the reads that bring it, as whole pages in pieces.
fn places(manifest: &Manifest) -> (Vec<PathBuf>, Vec<u64>, Vec<Vec<Read>>) {
    let Some(table) = &manifest.experts else { return Default::default() };
    let (parts, page) = (table.format.parts(), ALIGN as u64);
    let experts = table.places.chunks_exact(parts).map(|places| {
        let mut runs: Vec<(usize, u64, u64)> = Vec::new();
        let mut sorted: Vec<_> = places.iter().zip(&table.part_bytes).collect();
        sorted.sort_unstable();
        for (&(file, offset), len) in sorted {
            let (first, end) = (offset / page * page, offset + len);
            match runs.last_mut() {
                Some(run) if run.0 == usize::from(file) && run.2.next_multiple_of(page) >= first => run.2 = end,
                _ => runs.push((usize::from(file), first, end)),
            }
        }
        let pieces = runs.into_iter().flat_map(|(file, first, end)| {
            let count = (end - first).div_ceil(PIECE_BYTES).max(1);
            let len = (end - first).div_ceil(count).next_multiple_of(page);
            (first..end).step_by(len as usize).map(move |offset| Read {
                file,
                offset,
                len: len.min(end - offset) as usize,
            })
        });
        pieces.collect()
    });
    (manifest.shards.clone(), manifest.shard_bytes.clone(), experts.collect())
}

/// Bytes a second of `reads` with `queue_depth` readers, until they are done or [`DRIVE_TIME`] is over.
fn rate(volumes: &Volumes, reads: &[Read], queue_depth: usize, interrupt: &Interrupt) -> Result<f64> {
    let (next, bytes, failure) = (AtomicUsize::new(0), AtomicU64::new(0), Mutex::new(None));
    let len_max = reads.iter().map(|read| read.len).max().unwrap_or(0).next_multiple_of(ALIGN);
    let mut buffers = Vec::new();
    for _ in 0..queue_depth {
        let mut buffer = Region::allocate(len_max, "measuring the drives")?;
        buffer.fill(1); // so that no page is made in the measured time
        buffers.push(buffer);
    }
    let start = Instant::now();
    let deadline = start + DRIVE_TIME;
    std::thread::scope(|scope| {
        for mut buffer in buffers {
            let (next, bytes, failure) = (&next, &bytes, &failure);
            scope.spawn(move || {
                while Instant::now() < deadline && !interrupt.is_raised() {
                    let Some(read) = reads.get(next.fetch_add(1, Ordering::Relaxed)) else { return };
                    let volume = &volumes.list[usize::from(volumes.of_file[read.file])];
                    let len = read.len.next_multiple_of(ALIGN);
                    let mut tally = Tally::default();
                    match volume.read(read.file, &mut buffer[..len], read.offset, read.len, &mut tally) {
                        Ok(()) => drop(bytes.fetch_add(tally.bytes, Ordering::Relaxed)),
                        Err(error) => {
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
    fn reads_cover_every_expert_in_whole_pages() {
        let manifest = demo();
        let (_, lengths, experts) = places(&manifest);
        let table = manifest.experts.as_ref().unwrap();
        assert_eq!(experts.len(), table.moe_layers.len() * table.num_experts);
        let expert_bytes = manifest.expert_bytes() as usize;
        for reads in &experts {
            let bytes: usize = reads.iter().map(|read| read.len).sum();
            assert!(bytes >= expert_bytes && bytes <= expert_bytes + 6 * ALIGN, "{bytes} for {expert_bytes}");
            for read in reads {
                assert!(read.offset.is_multiple_of(ALIGN as u64) && read.len as u64 <= PIECE_BYTES);
                assert!(read.offset + read.len as u64 <= lengths[read.file]);
            }
        }
    }

    #[test]
    fn the_drives_of_a_model_have_a_rate_and_an_interrupt_ends_it() {
        let interrupt = Interrupt::new();
        assert!(drive_rate(&demo(), true, &interrupt).unwrap().unwrap() > 0.0);
        interrupt.raise(2);
        assert_eq!(drive_rate(&demo(), false, &interrupt).unwrap_err().kind(), Kind::Interrupted(2));
    }

    #[test]
    fn a_model_without_experts_has_no_rate_drive_rate() {
        let manifest = Manifest { experts: None, ..demo() };
        assert_eq!(drive_rate(&manifest, true, &Interrupt::new()).unwrap(), None);
    }
}
