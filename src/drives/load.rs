//! Readers at work on one or several drives for a while, and what they counted. A read is a read of the store: of one
//! place, past the page cache where that can be had.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::{Duration, Instant};

use super::target::Target;
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::store::{ALIGN, ReadError, Region};
use crate::synth::rng::Rng;

/// Intervals that a load's time is cut into, to see the rate over time.
const INTERVALS: u32 = 100;
const INTERVAL_MIN: Duration = Duration::from_millis(10);
/// Stack of a reader thread, which calls little but the system.
const STACK_BYTES: usize = 256 << 10;

/// The order in which places are read, and how much at once.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Pattern {
    /// One place after the other, in pieces of at most so many bytes.
    Sequential(usize),
    /// Whole places, shuffled.
    Random,
    /// Shuffled places in pieces of at most so many bytes: as experts are read.
    Pieces(usize),
    /// One page somewhere in a shuffled place.
    Page,
}

/// Readers of one drive.
pub(super) struct Load<'a> {
    pub target: &'a Target,
    pub pattern: Pattern,
    /// Readers, each with one read in flight.
    pub depth: usize,
    /// Decides the order.
    pub seed: u64,
}

/// What the readers of one drive counted.
#[derive(Debug, Clone, Default)]
pub(super) struct Counted {
    /// When each read began, since the load did, and how long it took, in seconds; by begin.
    pub reads: Vec<(f32, f32)>,
    /// Bytes of one read; the last piece of a place may have less.
    pub read_bytes: usize,
    pub bytes: u64,
    /// From the begin to the end of the last read.
    pub seconds: f64,
    /// Length of one of `intervals`, in seconds.
    pub interval_s: f64,
    /// Bytes that came in each interval; a read counts evenly over its time.
    pub intervals: Vec<f64>,
}

/// Lets all `loads` work together for `time`; reads that have begun by then are waited for. An interrupt ends it early.
///
/// # Errors
/// Kind `Memory` when there is none for the reads, `Other` for a thread that the system refuses. What went wrong with one
/// drive is in its place of the list.
pub(super) fn run(
    loads: &[Load<'_>],
    time: Duration,
    interrupt: &Interrupt,
    alive: &(dyn Fn() + Sync),
) -> Result<Vec<Result<Counted, ReadError>>> {
    let works: Vec<Work<'_>> = loads.iter().map(|load| Work::new(load, time)).collect();
    let mut readers = Vec::new();
    for work in &works {
        // One stretch for all, as the store's slots have it: large pages, which a drive writes to faster than to small ones.
        let mut memory = Region::allocate(work.read_bytes * work.load.depth, "measuring drives")?;
        memory.fill(1); // so that no page is made in the measured time
        readers.extend((0..work.load.depth).map(|_| (work, memory.split_to(work.read_bytes))));
    }
    let begin = Instant::now();
    let results: Vec<Result<Counted, ReadError>> = std::thread::scope(|scope| {
        let mut threads = Vec::new();
        for (work, memory) in readers {
            let reader = std::thread::Builder::new().name("measure".into()).stack_size(STACK_BYTES);
            match reader.spawn_scoped(scope, move || work.read(memory, begin, time, interrupt, alive)) {
                Ok(thread) => threads.push(thread),
                Err(cause) => {
                    works.iter().for_each(Work::end);
                    return Err(Error::other(format!("cannot start a reader: {cause}")));
                }
            }
        }
        threads.into_iter().map(|thread| thread.join().map_err(|_| Error::other("a reader has ended early"))).collect()
    })?;
    let mut results = results.into_iter();
    let of_drives = works.iter().map(|work| {
        // All of a drive's readers are taken off the list, also where the first of them failed.
        let parts: Vec<_> = results.by_ref().take(work.load.depth).collect();
        Ok(work.sum(parts.into_iter().collect::<Result<_, ReadError>>()?))
    });
    Ok(of_drives.collect())
}

/// A load and where it is.
struct Work<'a> {
    load: &'a Load<'a>,
    /// Places, in their order.
    order: Vec<u32>,
    pieces: usize,
    read_bytes: usize,
    next: AtomicUsize,
    interval: Duration,
}

impl<'a> Work<'a> {
    fn new(load: &'a Load<'a>, time: Duration) -> Self {
        let count = load.target.places.len();
        let order = match load.pattern {
            Pattern::Sequential(_) => (0..count as u32).collect(),
            _ => Rng::new(load.seed).permutation(count).into_iter().map(|place| place as u32).collect(),
        };
        let whole = load.target.read_bytes;
        let pieces = match load.pattern {
            Pattern::Sequential(bytes) | Pattern::Pieces(bytes) => whole.div_ceil(bytes.max(ALIGN)),
            Pattern::Random | Pattern::Page => 1,
        };
        let read_bytes = match load.pattern {
            Pattern::Page => ALIGN,
            _ => whole.div_ceil(pieces).next_multiple_of(ALIGN),
        };
        let interval = (time / INTERVALS).max(INTERVAL_MIN);
        Self { load, order, pieces, read_bytes, next: AtomicUsize::new(0), interval }
    }

    /// Lets the readers end after the read that they are at.
    fn end(&self) {
        self.next.store(usize::MAX / 2, Ordering::Relaxed);
    }

    /// File, offset and length of the read with this number; `None` when there shall be no more.
    fn place(&self, number: usize) -> Option<(u32, u64, usize)> {
        if number >= usize::MAX / 2 {
            return None;
        }
        let target = self.load.target;
        let (place, piece) = (number / self.pieces, number % self.pieces);
        let (file, offset) = target.places[self.order[place % self.order.len()] as usize];
        if self.load.pattern == Pattern::Page {
            let pages = (target.read_bytes / ALIGN) as u64;
            let page = (number as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 20;
            return Some((file, offset + page % pages * ALIGN as u64, ALIGN));
        }
        let first = piece * self.read_bytes;
        // Pieces are rounded up to pages, which may leave nothing for the last.
        let len = self.read_bytes.min(target.read_bytes.saturating_sub(first));
        Some((file, offset + first as u64, len))
    }

    /// One reader's work.
    fn read(
        &self,
        mut memory: Region,
        begin: Instant,
        time: Duration,
        interrupt: &Interrupt,
        alive: &(dyn Fn() + Sync),
    ) -> Result<Counted, ReadError> {
        let mut counted = Counted { interval_s: self.interval.as_secs_f64(), ..Counted::default() };
        while !interrupt.is_raised() {
            let start = begin.elapsed();
            // Each reader reads once at least, however short the time.
            if start >= time && !counted.reads.is_empty() {
                break;
            }
            let Some((file, offset, len)) = self.place(self.next.fetch_add(1, Ordering::Relaxed)) else { break };
            if len == 0 {
                continue;
            }
            if let Err(error) = self.load.target.read(file, offset, &mut memory[..len]) {
                self.end();
                return Err(error);
            }
            alive();
            counted.add(start.as_secs_f64(), begin.elapsed().as_secs_f64(), len);
        }
        Ok(counted)
    }

    fn sum(&self, parts: Vec<Counted>) -> Counted {
        let mut sum =
            Counted { interval_s: self.interval.as_secs_f64(), read_bytes: self.read_bytes, ..Counted::default() };
        for part in parts {
            sum.bytes += part.bytes;
            sum.seconds = sum.seconds.max(part.seconds);
            sum.reads.extend(part.reads);
            if sum.intervals.len() < part.intervals.len() {
                sum.intervals.resize(part.intervals.len(), 0.0);
            }
            sum.intervals.iter_mut().zip(part.intervals).for_each(|(all, part)| *all += part);
        }
        sum.reads.sort_by(|a, b| a.0.total_cmp(&b.0));
        sum
    }
}

impl Counted {
    fn add(&mut self, start: f64, end: f64, bytes: usize) {
        self.reads.push((start as f32, (end - start) as f32));
        self.bytes += bytes as u64;
        self.seconds = self.seconds.max(end);
        let time = (end - start).max(1e-9);
        let (first, last) = ((start / self.interval_s) as usize, (end / self.interval_s) as usize);
        if self.intervals.len() <= last {
            self.intervals.resize(last + 1, 0.0);
        }
        for (number, sum) in self.intervals.iter_mut().enumerate().take(last + 1).skip(first) {
            let from = start.max(number as f64 * self.interval_s);
            let to = end.min((number + 1) as f64 * self.interval_s);
            *sum += bytes as f64 * ((to - from).max(0.0) / time);
        }
    }

    /// Bytes a second from the begin to the last end.
    pub(super) fn rate(&self) -> f64 {
        self.bytes as f64 / self.seconds
    }

    /// Bytes of the whole intervals from `from` to `to`, in intervals.
    pub(super) fn bytes_within(&self, from: usize, to: usize) -> f64 {
        self.intervals.iter().take(to).skip(from).sum()
    }
}

/// The error of a read of this kind, for the user.
pub(super) fn read_failed(error: ReadError) -> Error {
    error.into_error(Kind::Io, "a file to measure with")
}

#[cfg(test)]
mod tests {
    use std::fs::File;

    use super::super::target::Watch;
    use super::*;

    impl Watch for () {
        fn alive(&self) {}

        fn notice(&self, _: String) {}

        fn wrote(&self, _: u64, _: u64) {}
    }

    fn target(folder: &tempfile::TempDir) -> Target {
        let content: Vec<u8> = (0..64 * ALIGN).map(|at| (at % 251) as u8).collect();
        std::fs::write(folder.path().join("a.safetensors"), content).unwrap();
        Target::find(folder.path(), 2 * ALIGN, true, &Interrupt::new(), &()).unwrap()
    }

    fn counted(target: &Target, pattern: Pattern, depth: usize, time: Duration) -> Counted {
        let load = Load { target, pattern, depth, seed: 1 };
        run(&[load], time, &Interrupt::new(), &|| ()).unwrap().remove(0).unwrap()
    }

    #[test]
    fn all_reads_are_counted_whatever_the_pattern() {
        let folder = tempfile::tempdir().unwrap();
        let target = target(&folder);
        for (pattern, read_bytes) in [
            (Pattern::Sequential(ALIGN), ALIGN),
            (Pattern::Random, 2 * ALIGN),
            (Pattern::Pieces(1 << 20), 2 * ALIGN),
            (Pattern::Page, ALIGN),
        ] {
            for depth in [1, 3] {
                let counted = counted(&target, pattern, depth, Duration::from_millis(20));
                assert_eq!(counted.read_bytes, read_bytes);
                assert!(counted.reads.len() >= depth, "{pattern:?}");
                assert_eq!(counted.bytes, (counted.reads.len() * read_bytes) as u64);
                let spread: f64 = counted.intervals.iter().sum();
                assert!((spread - counted.bytes as f64).abs() < 1.0, "{spread} {}", counted.bytes);
                assert!(counted.rate() > 0.0 && counted.reads.iter().all(|(_, took)| *took >= 0.0));
            }
        }
    }

    #[test]
    fn each_reader_reads_once_however_short_the_time_and_not_at_all_when_interrupted() {
        let folder = tempfile::tempdir().unwrap();
        let target = target(&folder);
        assert!(counted(&target, Pattern::Random, 4, Duration::ZERO).reads.len() >= 4);
        let interrupt = Interrupt::new();
        interrupt.raise(2);
        let load = Load { target: &target, pattern: Pattern::Random, depth: 2, seed: 1 };
        let none = run(&[load], Duration::from_secs(60), &interrupt, &|| ()).unwrap().remove(0).unwrap();
        assert!(none.reads.is_empty());
    }

    #[test]
    fn a_file_that_shrinks_is_an_error_of_its_drive_alone() {
        let (one, other) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (bad, good) = (target(&one), target(&other));
        File::options().write(true).open(one.path().join("a.safetensors")).unwrap().set_len(10).unwrap();
        let load = |target| Load { target, pattern: Pattern::Random, depth: 3, seed: 1 };
        let loads = [load(&bad), load(&good)];
        let mut results = run(&loads, Duration::from_millis(20), &Interrupt::new(), &|| ()).unwrap();
        assert!(results.pop().unwrap().unwrap().reads.len() >= 3);
        let error = read_failed(results.pop().unwrap().unwrap_err());
        assert!(error.kind() == Kind::Io && error.message().contains("a.safetensors"), "{error}");
    }

    #[test]
    fn a_read_counts_evenly_over_its_time() {
        let mut counted = Counted { interval_s: 1.0, ..Counted::default() };
        counted.add(0.5, 2.5, 4000);
        assert_eq!(counted.intervals.iter().map(|bytes| bytes.round()).collect::<Vec<_>>(), [1000.0, 2000.0, 1000.0]);
        assert_eq!(counted.bytes_within(1, 3).round(), 3000.0);
        counted.add(3.0, 3.0, 10);
        assert_eq!(counted.bytes, 4010);
    }
}
