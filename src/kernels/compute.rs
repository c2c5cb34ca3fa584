//! [`Compute`]: an instruction set, a thread pool and the interrupt; the methods that compute are in the sibling files.

use std::sync::Mutex;

use super::Isa;
use super::buffer::Buffer;
use super::dispatch::Detected;
use super::pool::Pool;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;

/// More threads than any machine has cores for; a larger number is a slip.
const THREADS_MAX: usize = 1024;

/// Kernels of one instruction set on a number of threads. Same bits for every instruction set and thread count.
///
/// NaN is NaN: its sign and payload are the processor's.
pub struct Compute {
    pub(super) isa: Detected,
    pool: Pool,
    interrupt: Interrupt,
    /// Where matrix products pack their activations.
    pub(super) packed: Mutex<Buffer>,
}

impl Compute {
    /// Kernels of `isa` (`None`: the fastest here) on `threads` threads, the calling one counted.
    ///
    /// # Errors
    /// Kind `Usage` when `isa` is not available on this CPU (the message lists what is) or `threads` is not in
    /// 1..=1024; kind `Other` when the system refuses a thread.
    pub fn new(isa: Option<Isa>, threads: usize, interrupt: Interrupt) -> Result<Self> {
        let isa = Detected::all().find(|d| isa.is_none_or(|isa| d.isa() == isa)).ok_or_else(|| {
            let names: Vec<_> = Self::available().iter().map(|isa| isa.name()).collect();
            let wanted = isa.map_or("none", Isa::name);
            Error::usage(format!(
                "instruction set {wanted} is not available on this CPU, which has {}",
                names.join(", ")
            ))
            .hint("without `--isa` the fastest of them is taken")
        })?;
        if !(1..=THREADS_MAX).contains(&threads) {
            return Err(Error::usage(format!("expected 1 to {THREADS_MAX} threads, found {threads}"))
                .hint("`--threads` takes the number of cores to use"));
        }
        let pool = Pool::new(threads).map_err(|e| {
            Error::other(format!("cannot start {threads} threads: {e}")).hint("give a smaller `--threads`")
        })?;
        Ok(Self { isa, pool, interrupt, packed: Mutex::default() })
    }

    /// The instruction sets of this CPU, fastest first.
    pub fn available() -> Vec<Isa> {
        Detected::all().map(Detected::isa).collect()
    }

    /// Name of the instruction set in use: `scalar`, `avx2`, `avx512`, `neon`.
    pub fn isa_name(&self) -> &'static str {
        self.isa.isa().name()
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.pool.threads()
    }

    /// Runs `task(0) … task(n - 1)`, each once, over the threads; returns when all are done. Once the interrupt is
    /// raised the remaining tasks are skipped: callers check the interrupt before they use results.
    ///
    /// Called from within a task, it runs serially.
    pub fn parallel(&self, n: usize, task: &(dyn Fn(usize) + Sync)) {
        self.pool.run(n, &|i| {
            if !self.interrupt.is_raised() {
                task(i);
            }
        });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;
    use crate::error::Kind;

    fn new(isa: Option<Isa>, threads: usize) -> Result<Compute> {
        Compute::new(isa, threads, Interrupt::new())
    }

    #[test]
    fn the_fastest_present_is_taken_unless_one_is_named() {
        let available = Compute::available();
        assert_eq!(available.last(), Some(&Isa::Scalar));
        assert_eq!(new(None, 1).expect("the fastest").isa_name(), available[0].name());
        for isa in available {
            assert_eq!(new(Some(isa), 2).expect("available").isa_name(), isa.name());
        }
    }

    #[test]
    fn an_absent_instruction_set_is_refused_with_those_present() {
        for isa in Isa::ALL.into_iter().filter(|isa| !Compute::available().contains(isa)) {
            let error = new(Some(isa), 1).err().expect("absent");
            assert_eq!(error.kind(), Kind::Usage);
            assert!(error.message().contains(isa.name()) && error.message().contains("scalar"), "{error}");
        }
    }

    #[test]
    fn no_threads_and_absurdly_many_are_refused() {
        for threads in [0, 1025, usize::MAX] {
            let error = new(None, threads).err().expect("refused");
            assert_eq!(error.kind(), Kind::Usage);
            assert!(error.message().contains(&threads.to_string()), "{error}");
        }
    }

    #[test]
    fn an_interrupt_skips_the_tasks_that_remain() {
        for threads in [1, 3] {
            let interrupt = Interrupt::new();
            let compute = Compute::new(None, threads, interrupt.clone()).expect("threads");
            let run = AtomicUsize::new(0);
            compute.parallel(1000, &|i| {
                run.fetch_add(1, Ordering::Relaxed);
                if i == 5 {
                    interrupt.raise(2);
                }
                while i > 5 && !interrupt.is_raised() {
                    std::thread::yield_now();
                }
            });
            // The first six at most, and one in the hands of each other thread.
            let run = run.into_inner();
            assert!((1..6 + threads).contains(&run), "{run} tasks ran on {threads} threads");
        }
    }
}
