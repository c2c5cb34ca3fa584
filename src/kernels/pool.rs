//! Threads that sleep between calls and share out numbered tasks. What the tasks are is the caller's business.

use std::any::Any;
use std::cell::Cell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a thread looks for more work before it sleeps. Two calls in a row are closer than this; another process
/// that wants the core waits no longer than this.
const SPIN: Duration = Duration::from_micros(20);

thread_local! {
    /// Set while this thread runs a task: a call from there runs serially.
    static IN_TASK: Cell<bool> = const { Cell::new(false) };
}

/// The calling thread and `threads − 1` others.
pub(super) struct Pool {
    shared: Arc<Shared>,
    workers: Vec<JoinHandle<()>>,
    /// Whether a call is under way; one at a time has the workers.
    busy: AtomicBool,
}

struct Shared {
    state: Mutex<State>,
    /// Workers sleep here until a job is published.
    published: Condvar,
    /// The caller sleeps here until the last worker has left its job.
    left: Condvar,
    /// The next task to hand out.
    next: AtomicUsize,
    /// `State::generation` and `State::active` again, to be watched without the lock. Only hints: decisions are made
    /// under the lock.
    generation: AtomicUsize,
    active: AtomicUsize,
    /// Zero where threads outnumber cores: a spinning thread would hold up a working one.
    spin: Duration,
}

#[derive(Default)]
struct State {
    /// Counts the jobs published, and the end.
    generation: usize,
    job: Option<Job>,
    /// Workers inside the job.
    active: usize,
    /// Workers asleep.
    asleep: usize,
    panic: Option<Box<dyn Any + Send>>,
    ended: bool,
}

/// `task(0) … task(n - 1)`.
#[derive(Clone, Copy)]
struct Job {
    /// Not really `'static`: valid until [`Pool::run`] has withdrawn the job and seen the last worker leave it.
    task: &'static (dyn Fn(usize) + Sync),
    n: usize,
}

impl Pool {
    /// A pool of `threads` ≥ 1, the caller counted.
    ///
    /// # Errors
    /// The system refuses a thread.
    pub(super) fn new(threads: usize) -> std::io::Result<Self> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let shared = Arc::new(Shared {
            state: Mutex::default(),
            published: Condvar::new(),
            left: Condvar::new(),
            next: AtomicUsize::new(0),
            generation: AtomicUsize::new(0),
            active: AtomicUsize::new(0),
            spin: if threads > cores { Duration::ZERO } else { SPIN },
        });
        // Built up in place, so that a refusal ends the threads already started.
        let mut pool = Self { shared, workers: Vec::new(), busy: AtomicBool::new(false) };
        for i in 1..threads {
            let shared = Arc::clone(&pool.shared);
            let builder = std::thread::Builder::new().name(format!("compute {i}"));
            pool.workers.push(builder.spawn(move || shared.serve())?);
        }
        Ok(pool)
    }

    /// Threads, the caller counted.
    pub(super) fn threads(&self) -> usize {
        self.workers.len() + 1
    }

    /// Runs `task(0) … task(n - 1)`, each once, and returns when all are done. Serially when called from a task or
    /// while another thread's call has the workers.
    ///
    /// # Panics
    /// When a task does, with its payload; tasks not yet begun are dropped then.
    pub(super) fn run(&self, n: usize, task: &(dyn Fn(usize) + Sync)) {
        let alone = n <= 1 || self.workers.is_empty() || IN_TASK.get();
        if alone || self.busy.swap(true, Ordering::Acquire) {
            (0..n).for_each(task);
            return;
        }
        // SAFETY: the job that holds this reference is withdrawn, and no worker is inside it, before this function
        // returns or unwinds: nothing between here and the end of `finish` panics outside `catch_unwind`.
        let task = unsafe { std::mem::transmute::<&(dyn Fn(usize) + Sync), &'static (dyn Fn(usize) + Sync)>(task) };
        let job = Job { task, n };
        self.shared.publish(job);
        let mine = self.shared.work(job);
        let theirs = self.shared.finish();
        self.busy.store(false, Ordering::Release);
        if let Some(payload) = mine.err().or(theirs) {
            resume_unwind(payload);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        state.ended = true;
        state.generation += 1;
        self.shared.generation.store(state.generation, Ordering::Relaxed);
        drop(state);
        self.shared.published.notify_all();
        for worker in self.workers.drain(..) {
            // A worker catches what its tasks throw, so there is nothing left to hand on.
            let _ = worker.join();
        }
    }
}

impl Shared {
    /// Nothing panics under the lock, and a poisoned state would still be a whole one.
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Offers the job to the workers, and wakes as many as it has use for.
    fn publish(&self, job: Job) {
        let mut state = self.lock();
        self.next.store(0, Ordering::Relaxed);
        state.job = Some(job);
        state.generation += 1;
        self.generation.store(state.generation, Ordering::Relaxed);
        let wake = state.asleep.min(job.n - 1);
        drop(state);
        for _ in 0..wake {
            self.published.notify_one();
        }
    }

    /// Takes tasks until none is left. A panic in one is returned, and leaves none for the others.
    fn work(&self, job: Job) -> Result<(), Box<dyn Any + Send>> {
        IN_TASK.set(true);
        let result = catch_unwind(AssertUnwindSafe(|| {
            loop {
                let i = self.next.fetch_add(1, Ordering::Relaxed);
                if i >= job.n {
                    return;
                }
                (job.task)(i);
            }
        }));
        IN_TASK.set(false);
        if result.is_err() {
            self.next.store(job.n, Ordering::Relaxed);
        }
        result
    }

    /// Withdraws the job, waits for the workers inside it, and returns what one of them threw.
    fn finish(&self) -> Option<Box<dyn Any + Send>> {
        // Workers that did not come in time need not come any more: the caller has done their share.
        self.lock().job = None;
        self.spin_until(|| self.active.load(Ordering::Relaxed) == 0);
        let mut state = self.lock();
        while state.active > 0 {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
        state.panic.take()
    }

    /// The life of a worker.
    fn serve(&self) {
        let mut seen = 0;
        while let Some(job) = self.next_job(&mut seen) {
            let result = self.work(job);
            let mut state = self.lock();
            if let Err(payload) = result {
                state.panic.get_or_insert(payload);
            }
            state.active -= 1;
            self.active.store(state.active, Ordering::Relaxed);
            if state.active == 0 {
                drop(state);
                self.left.notify_one();
            }
        }
    }

    /// The next job with tasks left, entered; `None` at the end. `seen` is the generation last looked at.
    fn next_job(&self, seen: &mut usize) -> Option<Job> {
        self.spin_until(|| self.generation.load(Ordering::Relaxed) != *seen);
        let mut state = self.lock();
        loop {
            if state.ended {
                return None;
            }
            if state.generation != *seen {
                *seen = state.generation;
                if let Some(job) = state.job {
                    state.active += 1;
                    self.active.store(state.active, Ordering::Relaxed);
                    return Some(job);
                }
            }
            state.asleep += 1;
            state = self.published.wait(state).unwrap_or_else(PoisonError::into_inner);
            state.asleep -= 1;
        }
    }

    /// Looks at `done` for a short while.
    fn spin_until(&self, done: impl Fn() -> bool) {
        if self.spin.is_zero() {
            return;
        }
        let start = Instant::now();
        while !done() && start.elapsed() < self.spin {
            for _ in 0..8 {
                std::hint::spin_loop();
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, AtomicUsize, Ordering};

    use super::*;

    fn pool(threads: usize) -> Pool {
        Pool::new(threads).expect("threads")
    }

    #[test]
    fn every_task_runs_exactly_once() {
        for threads in [1, 2, 3, 8] {
            let pool = pool(threads);
            for n in [0, 1, 2, 3, 7, 100, 1000] {
                let runs: Vec<_> = (0..n).map(|_| AtomicU32::new(0)).collect();
                pool.run(n, &|i| {
                    runs[i].fetch_add(1, Ordering::Relaxed);
                });
                assert!(runs.iter().all(|r| r.load(Ordering::Relaxed) == 1), "{threads} threads, {n} tasks");
            }
        }
    }

    #[test]
    fn many_short_calls_in_a_row_lose_nothing() {
        for threads in [2, 5] {
            let pool = pool(threads);
            let total = AtomicUsize::new(0);
            for call in 0..20_000 {
                let n = call % 5;
                pool.run(n, &|i| {
                    total.fetch_add(i + 1, Ordering::Relaxed);
                });
            }
            assert_eq!(total.into_inner(), 4000 * (1 + 3 + 6 + 10));
        }
    }

    #[test]
    fn what_tasks_write_is_seen_after_the_call() {
        let pool = pool(4);
        for round in 0..200 {
            let mut out = vec![0usize; 64];
            let cells: Vec<_> = out.chunks_mut(1).map(Mutex::new).collect();
            pool.run(64, &|i| cells[i].lock().expect("uncontended")[0] = i + round);
            drop(cells);
            assert!(out.iter().enumerate().all(|(i, v)| *v == i + round));
        }
    }

    #[test]
    fn workers_take_part() {
        let pool = pool(3);
        let names = Mutex::new(std::collections::HashSet::new());
        let together = std::sync::Barrier::new(3);
        pool.run(3, &|_| {
            together.wait(); // passes only when three threads have a task each
            names.lock().expect("names").insert(std::thread::current().id());
        });
        assert_eq!(names.into_inner().expect("names").len(), 3);
    }

    #[test]
    fn a_call_from_a_task_runs_serially() {
        let pool = pool(3);
        let total = AtomicUsize::new(0);
        pool.run(4, &|_| {
            pool.run(5, &|i| {
                total.fetch_add(i, Ordering::Relaxed);
            });
        });
        assert_eq!(total.into_inner(), 4 * 10);
    }

    #[test]
    fn calls_from_several_threads_at_once_all_finish() {
        let pool = pool(3);
        let total = AtomicUsize::new(0);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..500 {
                        pool.run(6, &|i| {
                            total.fetch_add(i, Ordering::Relaxed);
                        });
                    }
                });
            }
        });
        assert_eq!(total.into_inner(), 4 * 500 * 15);
    }

    #[test]
    fn a_panic_reaches_the_caller_and_the_pool_lives_on() {
        for threads in [1, 2, 4] {
            let pool = pool(threads);
            for bad in [0, 3, 63] {
                let thrown = catch_unwind(AssertUnwindSafe(|| {
                    pool.run(64, &|i| {
                        std::thread::sleep(Duration::from_micros(20));
                        if i == bad {
                            resume_unwind(Box::new(bad));
                        }
                    });
                }));
                let payload = thrown.expect_err("the task's panic");
                assert_eq!(payload.downcast_ref::<usize>(), Some(&bad), "{threads} threads");
            }
            let after = AtomicUsize::new(0);
            pool.run(10, &|_| {
                after.fetch_add(1, Ordering::Relaxed);
            });
            assert_eq!(after.into_inner(), 10);
        }
    }

    #[test]
    fn dropping_ends_sleeping_and_spinning_workers() {
        for wait in [Duration::ZERO, Duration::from_millis(2)] {
            let pool = pool(4);
            pool.run(8, &|_| {});
            std::thread::sleep(wait);
            drop(pool);
        }
    }
}
