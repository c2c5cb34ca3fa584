//! One drive: its queue, the threads that read for it, and its figures. First asked, first read.
//!
//! The queue is bounded by the slots: a job exists only with the memory of a slot in it.

use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::DriveStats;
use super::reader::Tally;
use super::slots::Job;
use super::volume::Volume;
use crate::error::{Error, Result};

/// Stack of a reader thread, which calls little but the system.
const STACK_BYTES: usize = 256 << 10;

/// Queue and threads of one device.
pub(crate) struct Drive {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    volume: Arc<Volume>,
    queue: Mutex<Queue>,
    /// A job came, or the end.
    wake: Condvar,
    /// A thread ended.
    ended: Condvar,
    figures: Mutex<Figures>,
}

struct Queue {
    jobs: VecDeque<Job>,
    closed: bool,
    alive: usize,
}

#[derive(Default)]
struct Figures {
    tally: Tally,
    in_flight: usize,
    /// When `in_flight` left 0.
    since: Option<Instant>,
    busy: Duration,
}

impl Drive {
    /// Starts `queue_depth` readers of `volume`.
    ///
    /// # Errors
    /// Kind `Other` when the system refuses a thread.
    pub(crate) fn start(volume: Arc<Volume>, number: usize, queue_depth: usize) -> Result<Self> {
        let shared = Arc::new(Shared {
            volume,
            queue: Mutex::new(Queue { jobs: VecDeque::new(), closed: false, alive: 0 }),
            wake: Condvar::new(),
            ended: Condvar::new(),
            figures: Mutex::new(Figures::default()),
        });
        let mut drive = Self { shared, threads: Vec::new() };
        for reader in 0..queue_depth.max(1) {
            let shared = Arc::clone(&drive.shared);
            drive.shared.lock().alive += 1;
            let thread = std::thread::Builder::new()
                .name(format!("drive-{number}-{reader}"))
                .stack_size(STACK_BYTES)
                .spawn(move || Alive(&shared).0.work());
            match thread {
                Ok(thread) => drive.threads.push(thread),
                Err(cause) => {
                    drive.shared.lock().alive -= 1;
                    return Err(Error::other(format!("cannot start reader {reader} of a drive: {cause}")));
                }
            }
        }
        Ok(drive)
    }

    /// Queues reads, in order.
    pub(crate) fn push(&self, job: Job) {
        self.shared.lock().jobs.push_back(job);
        self.shared.wake.notify_one();
    }

    /// Whether a reader ended though it should not: what it was reading will never arrive.
    pub(crate) fn has_lost_a_reader(&self) -> bool {
        let queue = self.shared.lock();
        !queue.closed && queue.alive < self.threads.len()
    }

    /// The files it reads.
    pub(crate) fn volume(&self) -> &Volume {
        &self.shared.volume
    }

    /// Figures so far.
    pub(crate) fn stats(&self) -> DriveStats {
        let figures = self.shared.figures();
        let running = figures.since.map_or(Duration::ZERO, |since| since.elapsed());
        DriveStats {
            path: self.shared.volume.path().to_owned(),
            mode: self.shared.volume.mode().to_owned(),
            bytes: figures.tally.bytes,
            reads: figures.tally.calls,
            seconds: (figures.busy + running).as_secs_f64(),
        }
    }

    /// Drops what is queued and tells the readers to end.
    pub(crate) fn close(&self) {
        let mut queue = self.shared.lock();
        queue.closed = true;
        let dropped = std::mem::take(&mut queue.jobs);
        drop(queue);
        self.shared.wake.notify_all();
        drop(dropped);
    }

    /// Waits for the readers to end, until `deadline`. One that is stuck in a read is left behind: it owns the memory it
    /// reads into, and ends by itself once the read returns.
    pub(crate) fn join(&mut self, deadline: Instant) {
        let mut queue = self.shared.lock();
        while queue.alive > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            queue = self.shared.ended.wait_timeout(queue, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(queue);
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // a reader that panicked has been reported by the panic
        }
    }
}

impl Drop for Drive {
    fn drop(&mut self) {
        self.close();
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn figures(&self) -> MutexGuard<'_, Figures> {
        self.figures.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// A reader's life.
    fn work(&self) {
        while let Some(mut job) = self.next() {
            let result = if job.fill.has_failed() {
                Ok(())
            } else {
                self.began();
                let mut tally = Tally::default();
                let piece = &job.piece;
                let result = self.volume.read(piece.file, &mut job.memory, piece.offset, piece.needed, &mut tally);
                self.ended(tally);
                result
            };
            job.fill.arrive(job.number, job.memory, result);
        }
    }

    fn next(&self) -> Option<Job> {
        let mut queue = self.lock();
        loop {
            if queue.closed {
                return None;
            }
            match queue.jobs.pop_front() {
                Some(job) => return Some(job),
                None => queue = self.wake.wait(queue).unwrap_or_else(PoisonError::into_inner),
            }
        }
    }

    fn began(&self) {
        let mut figures = self.figures();
        figures.in_flight += 1;
        figures.since.get_or_insert_with(Instant::now);
    }

    fn ended(&self, tally: Tally) {
        let mut figures = self.figures();
        figures.tally += tally;
        figures.in_flight -= 1;
        if figures.in_flight == 0
            && let Some(since) = figures.since.take()
        {
            figures.busy += since.elapsed();
        }
    }
}

/// Signs a reader off when it ends, be it by a panic.
struct Alive<'a>(&'a Shared);

impl Drop for Alive<'_> {
    fn drop(&mut self) {
        self.0.lock().alive -= 1;
        self.0.ended.notify_all();
    }
}
