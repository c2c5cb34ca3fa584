//! One measurement: some drives read for a while, each by so many readers.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::Pattern;
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::store::{ALIGN, Region, Tally, Volume};
use crate::synth::rng::Rng;

/// Bytes of one positional read, as the engine's.
const PIECE_BYTES: usize = 4 << 20;
/// A point of the timeline.
pub(super) const TICK: Duration = Duration::from_millis(250);

/// A drive with files to read.
pub(super) struct Target {
    pub volume: Arc<Volume>,
    /// Number and length of each file.
    pub files: Vec<(usize, u64)>,
}

/// How it is read.
#[derive(Debug, Clone, Copy)]
pub(super) struct Load {
    pub pattern: Pattern,
    /// Readers of each drive.
    pub depth: usize,
    /// Bytes of one read, which is done in pieces.
    pub size: u64,
    pub time: Duration,
}

/// What came of it.
pub(super) struct Measured {
    /// `[drives]`: bytes by the end of each [`TICK`].
    pub ticks: Vec<Vec<u64>>,
    pub seconds: f64,
    /// Seconds of each whole read, ascending.
    pub latencies: Vec<f64>,
}

impl Measured {
    /// Bytes a second of all drives, in 10⁹.
    pub(super) fn gb_per_s(&self) -> f64 {
        self.ticks.iter().flatten().sum::<u64>() as f64 / self.seconds / 1e9
    }

    /// Latency that `share` of the reads stayed below, in ms.
    pub(super) fn percentile(&self, share: f64) -> f64 {
        let at = (share * self.latencies.len() as f64).ceil() as usize;
        self.latencies.get(at.clamp(1, self.latencies.len().max(1)) - 1).map_or(0.0, |seconds| seconds * 1e3)
    }

    /// Rate in ticks `from..to` of all drives, in 10⁹ bytes a second; `None` when there is no such time.
    pub(super) fn rate_between(&self, from: usize, to: usize) -> Option<f64> {
        let whole = (self.seconds / TICK.as_secs_f64()) as usize;
        let to = to.min(whole);
        let bytes: u64 = self.ticks.iter().filter_map(|ticks| ticks.get(from..to)).flatten().sum();
        (from < to).then(|| bytes as f64 / ((to - from) as f64 * TICK.as_secs_f64()) / 1e9)
    }
}

/// Reads `targets` together under `load`.
///
/// # Errors
/// Kind `Io` when a read fails, `Memory` for the buffers; an interrupt.
pub(super) fn measure(targets: &[&Target], load: Load, seed: u64, interrupt: &Interrupt) -> Result<Measured> {
    let ticks_max = (load.time.as_secs_f64() / TICK.as_secs_f64()).ceil() as usize + 64;
    let counts: Vec<Vec<AtomicU64>> =
        targets.iter().map(|_| (0..ticks_max).map(|_| AtomicU64::new(0)).collect()).collect();
    let (latencies, failure) = (Mutex::new(Vec::new()), Mutex::new(None::<Error>));
    let mut buffers = Vec::new();
    for target in targets {
        for reader in 0..load.depth {
            let mut buffer = Region::allocate(PIECE_BYTES, "measuring the drives")?;
            buffer.fill(1); // so that no page is made in the measured time
            buffers.push((*target, reader, buffer));
        }
    }
    let next: Vec<AtomicU64> = targets.iter().map(|_| AtomicU64::new(0)).collect();
    let start = Instant::now();
    std::thread::scope(|scope| {
        for (number, (target, reader, mut buffer)) in buffers.into_iter().enumerate() {
            let drive = number / load.depth;
            let (counts, next, latencies, failure) = (&counts[drive], &next[drive], &latencies, &failure);
            scope.spawn(move || {
                let mut rng = Rng::new(seed ^ (number as u64) << 20 ^ reader as u64);
                let mut times = Vec::new();
                while start.elapsed() < load.time && !interrupt.is_raised() {
                    let began = Instant::now();
                    let (file, offset, len) = target.place(load, next, &mut rng);
                    for at in (0..len).step_by(PIECE_BYTES) {
                        let piece = (len - at).min(PIECE_BYTES as u64) as usize;
                        let mut tally = Tally::default();
                        let bytes = &mut buffer[..piece.next_multiple_of(ALIGN)];
                        if let Err(error) = target.volume.read(file, bytes, offset + at, piece, &mut tally) {
                            let error = error.into_error(Kind::Io, "a drive");
                            failure.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert(error);
                            return;
                        }
                        let tick = (start.elapsed().as_secs_f64() / TICK.as_secs_f64()) as usize;
                        counts[tick.min(ticks_max - 1)].fetch_add(piece as u64, Ordering::Relaxed);
                        if start.elapsed() >= load.time || interrupt.is_raised() {
                            break;
                        }
                    }
                    times.push(began.elapsed().as_secs_f64());
                }
                latencies.lock().unwrap_or_else(PoisonError::into_inner).append(&mut times);
            });
        }
    });
    let seconds = start.elapsed().as_secs_f64();
    interrupt.check()?;
    if let Some(error) = failure.into_inner().unwrap_or_else(PoisonError::into_inner) {
        return Err(error);
    }
    let mut latencies = latencies.into_inner().unwrap_or_else(PoisonError::into_inner);
    latencies.sort_by(f64::total_cmp);
    let ticks = counts.into_iter().map(|counts| counts.into_iter().map(AtomicU64::into_inner).collect()).collect();
    Ok(Measured { ticks, seconds, latencies })
}

impl Target {
    /// Bytes of all files.
    pub(super) fn bytes(&self) -> u64 {
        self.files.iter().map(|(_, bytes)| bytes).sum()
    }

    /// Where the next read goes: file, offset and length.
    fn place(&self, load: Load, next: &AtomicU64, rng: &mut Rng) -> (usize, u64, u64) {
        let page = ALIGN as u64;
        match load.pattern {
            Pattern::Random => {
                // A file by its share of the bytes, then a page in it.
                let mut at = rng.bits() % self.bytes().max(1);
                let (file, bytes) = *self
                    .files
                    .iter()
                    .find(|(_, bytes)| {
                        let is_here = at < *bytes;
                        at = at.saturating_sub(*bytes);
                        is_here
                    })
                    .unwrap_or(&self.files[0]);
                let len = load.size.min(bytes);
                let offset = rng.bits() % ((bytes - len) / page + 1) * page;
                (file, offset, len)
            }
            Pattern::Sequential => {
                let size = PIECE_BYTES as u64;
                let mut at = next.fetch_add(1, Ordering::Relaxed);
                loop {
                    for &(file, bytes) in &self.files {
                        let reads = bytes.div_ceil(size);
                        if at < reads {
                            return (file, at * size, size.min(bytes - at * size));
                        }
                        at -= reads;
                    }
                }
            }
        }
    }
}
