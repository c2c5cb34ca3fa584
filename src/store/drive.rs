//! The readers: a few threads a drive, which take from the common [`Schedule`] what their drive should read next, and the
//! drives' figures.
//!
//! The queues are bounded by the slots: a job exists only with the memory of a slot in it.

use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use super::DriveStats;
use super::reader::{ReadError, Tally};
use super::schedule::{self, Failed, Schedule, Taken, Time};
use super::slots::Job;
use super::volume::Volume;
use crate::error::{Error, Kind, Result};

/// Stack of a reader thread, which calls little but the system.
const STACK_BYTES: usize = 256 << 10;

/// How long an idle reader sleeps before it looks again by itself, for a drive that is down to be tried anew.
const NAP: Duration = Duration::from_millis(500);

/// Schedule and threads of all devices.
pub(crate) struct Readers {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

struct Shared {
    volumes: Vec<Arc<Volume>>,
    state: Mutex<State>,
    /// `[drives]`: a piece came, or the end.
    wake: Vec<Condvar>,
    /// A thread ended.
    ended: Condvar,
    figures: Vec<Mutex<Figures>>,
    epoch: Instant,
    notices: Mutex<Vec<String>>,
}

/// The schedule, and whether it goes on.
struct State {
    schedule: Schedule<Job>,
    closed: bool,
    alive: usize,
    /// `[drives]`: the user was told of a failure.
    told: Vec<bool>,
}

#[derive(Default)]
struct Figures {
    tally: Tally,
    in_flight: usize,
    /// When `in_flight` left 0.
    since: Option<Instant>,
    busy: Duration,
    errors: u64,
}

/// The schedule of running readers, for whoever has something to read.
#[derive(Clone)]
pub(crate) struct Queue(Arc<Shared>);

impl Queue {
    /// Does something to the schedule at this moment; wakes the drives that `act` names.
    pub(crate) fn with<T>(&self, act: impl FnOnce(&mut Schedule<Job>, Time) -> (T, schedule::Drives)) -> T {
        let mut state = self.0.lock();
        let (value, drives) = act(&mut state.schedule, self.0.now());
        drop(state);
        self.0.wake(drives);
        value
    }

    /// What came from `drive` was not what was stored there: it is read no more for a while, and the user is told.
    pub(crate) fn blame(&self, drive: usize, what: &Error) {
        let mut state = self.0.lock();
        let drives = state.schedule.put_down(drive, self.0.now());
        let first = !std::mem::replace(&mut state.told[drive], true);
        drop(state);
        lock(&self.0.figures[drive]).errors += 1;
        if first {
            self.0.tell(drive, what.message());
        }
        self.0.wake(drives);
    }
}

impl Readers {
    /// Starts `queue_depth` readers of each of `volumes`.
    ///
    /// # Errors
    /// Kind `Other` when the system refuses a thread, or for more drives than a schedule takes.
    pub(crate) fn start(volumes: Vec<Arc<Volume>>, queue_depth: usize) -> Result<Self> {
        let depth = queue_depth.max(1);
        if volumes.len() > schedule::DRIVES_MAX {
            return Err(Error::other(format!(
                "experts lie on {} drives, at most {} are supported",
                volumes.len(),
                schedule::DRIVES_MAX
            )));
        }
        let count = volumes.len();
        let state =
            State { schedule: Schedule::new(&vec![depth; count]), closed: false, alive: 0, told: vec![false; count] };
        let shared = Arc::new(Shared {
            volumes,
            state: Mutex::new(state),
            wake: (0..count).map(|_| Condvar::new()).collect(),
            ended: Condvar::new(),
            figures: (0..count).map(|_| Mutex::default()).collect(),
            epoch: Instant::now(),
            notices: Mutex::default(),
        });
        let mut readers = Self { shared, threads: Vec::new() };
        for drive in 0..count {
            for reader in 0..depth {
                let shared = Arc::clone(&readers.shared);
                readers.shared.lock().alive += 1;
                let thread = std::thread::Builder::new()
                    .name(format!("drive-{drive}-{reader}"))
                    .stack_size(STACK_BYTES)
                    .spawn(move || Alive(&shared).0.work(drive));
                match thread {
                    Ok(thread) => readers.threads.push(thread),
                    Err(cause) => {
                        readers.shared.lock().alive -= 1;
                        return Err(Error::other(format!("cannot start reader {reader} of a drive: {cause}")));
                    }
                }
            }
        }
        Ok(readers)
    }

    /// The schedule.
    pub(crate) fn queue(&self) -> Queue {
        Queue(Arc::clone(&self.shared))
    }

    /// Number of drives.
    pub(crate) fn drives(&self) -> usize {
        self.shared.volumes.len()
    }

    /// Fills whose read hangs, though another drive could do it. The user is told of the drives, once each.
    pub(crate) fn overdue(&self) -> Vec<u64> {
        let mut state = self.shared.lock();
        let (groups, stuck, drives) = state.schedule.overdue(self.shared.now());
        for drive in stuck {
            if !std::mem::replace(&mut state.told[drive], true) {
                self.shared.tell(drive, "a read does not end");
            }
        }
        drop(state);
        self.shared.wake(drives);
        groups
    }

    /// Whether a reader ended though it should not: what it was reading will never arrive.
    pub(crate) fn has_lost_one(&self) -> bool {
        let state = self.shared.lock();
        !state.closed && state.alive < self.threads.len()
    }

    /// Figures so far, one entry a drive.
    pub(crate) fn stats(&self) -> Vec<DriveStats> {
        let of_schedule: Vec<u32> = {
            let state = self.shared.lock();
            (0..self.shared.volumes.len()).map(|drive| state.schedule.errors(drive)).collect()
        };
        let drives = self.shared.volumes.iter().zip(&self.shared.figures).zip(of_schedule);
        drives
            .map(|((volume, figures), failing)| {
                let figures = lock(figures);
                let running = figures.since.map_or(Duration::ZERO, |since| since.elapsed());
                DriveStats {
                    path: volume.path().to_owned(),
                    mode: volume.mode().to_owned(),
                    bytes: figures.tally.bytes,
                    reads: figures.tally.calls,
                    seconds: (figures.busy + running).as_secs_f64(),
                    errors: figures.errors,
                    state: if failing > 0 { "failing" } else { "ok" }.to_owned(),
                }
            })
            .collect()
    }

    /// Pieces that were read from another copy after a failure.
    pub(crate) fn retries(&self) -> u64 {
        self.shared.lock().schedule.retries()
    }

    /// What the user should know and has not been told.
    pub(crate) fn take_notices(&self) -> Vec<String> {
        let mut notices: Vec<String> = self.shared.volumes.iter().filter_map(|volume| volume.take_notice()).collect();
        notices.append(&mut lock(&self.shared.notices));
        notices
    }

    /// Drops what is queued and tells the readers to end.
    pub(crate) fn close(&self) {
        let mut state = self.shared.lock();
        state.closed = true;
        let dropped = state.schedule.close();
        drop(state);
        self.shared.wake.iter().for_each(Condvar::notify_all);
        drop(dropped);
    }

    /// Waits for the readers to end, until `deadline`. One that is stuck in a read is left behind: it owns the memory it
    /// reads into, and ends by itself once the read returns.
    pub(crate) fn join(&mut self, deadline: Instant) {
        let mut state = self.shared.lock();
        while state.alive > 0 {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return;
            }
            state = self.shared.ended.wait_timeout(state, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        drop(state);
        for thread in self.threads.drain(..) {
            let _ = thread.join(); // a reader that panicked has been reported by the panic
        }
    }
}

impl Drop for Readers {
    fn drop(&mut self) {
        self.close();
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }

    fn now(&self) -> Time {
        self.epoch.elapsed()
    }

    fn wake(&self, drives: schedule::Drives) {
        for (number, wake) in self.wake.iter().enumerate() {
            if drives & 1 << number != 0 {
                wake.notify_one();
            }
        }
    }

    fn tell(&self, drive: usize, what: &str) {
        let notice = format!("drive {}: {what}; other copies are read meanwhile", self.volumes[drive].path());
        lock(&self.notices).push(notice);
    }

    /// A reader's life.
    fn work(&self, drive: usize) {
        while let Some(Taken { ticket, mut job, site }) = self.next(drive) {
            if job.fill.is_vain() {
                self.landed(drive, ticket);
                job.fill.arrive(job.number, job.memory, Ok(()));
                continue;
            }
            self.began(drive);
            let mut tally = Tally::default();
            let piece = job.fill.piece(site, job.number);
            let volume = &self.volumes[drive];
            let result = volume.read(piece.file, &mut job.memory, piece.offset, piece.needed, &mut tally);
            self.ended(drive, tally, result.is_err());
            match result {
                Ok(()) => {
                    self.landed(drive, ticket);
                    job.fill.arrive(job.number, job.memory, Ok(()));
                }
                Err(error) => {
                    volume.files().close(piece.file);
                    self.failed(drive, ticket, job, error);
                }
            }
        }
    }

    fn next(&self, drive: usize) -> Option<Taken<Job>> {
        let mut state = self.lock();
        loop {
            if state.closed {
                return None;
            }
            if let Some(taken) = state.schedule.next(drive, self.now()) {
                return Some(taken);
            }
            state = self.wake[drive].wait_timeout(state, NAP).unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    fn landed(&self, drive: usize, ticket: u64) {
        let drives = self.lock().schedule.done(drive, ticket, self.now());
        self.wake(drives);
    }

    fn failed(&self, drive: usize, ticket: u64, job: Job, error: ReadError) {
        let mut state = self.lock();
        let now = self.now();
        match state.schedule.failed(drive, ticket, job, now) {
            Failed::Again(drives) => {
                if !std::mem::replace(&mut state.told[drive], true) {
                    self.tell(drive, error.into_error(Kind::Io, "an expert").message());
                }
                drop(state);
                self.wake(drives);
            }
            Failed::Lost(job) => {
                drop(state);
                job.fill.arrive(job.number, job.memory, Err(error));
            }
        }
    }

    fn began(&self, drive: usize) {
        let mut figures = lock(&self.figures[drive]);
        figures.in_flight += 1;
        figures.since.get_or_insert_with(Instant::now);
    }

    fn ended(&self, drive: usize, tally: Tally, failed: bool) {
        let mut figures = lock(&self.figures[drive]);
        figures.tally += tally;
        figures.errors += u64::from(failed);
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
