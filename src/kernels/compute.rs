//! [`Compute`]: an instruction set, a thread pool and the interrupt; the methods that compute are in the sibling files.

use super::Isa;
use super::dispatch::Detected;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;

/// Kernels of one instruction set on a number of threads. Same bits for every instruction set and thread count.
pub struct Compute {
    pub(super) isa: Detected,
    threads: usize,
    interrupt: Interrupt,
}

impl Compute {
    /// # Errors
    /// Kind `Usage` when `isa` is not available on this CPU (the message lists what is).
    pub fn new(isa: Option<Isa>, threads: usize, interrupt: Interrupt) -> Result<Self> {
        let found = Detected::all().find(|d| isa.is_none_or(|isa| d.isa() == isa));
        let isa = found.ok_or_else(|| Error::usage("instruction set not available"))?;
        Ok(Self { isa, threads, interrupt })
    }

    /// Name of the instruction set in use: `scalar`, `avx2`, `avx512`, `neon`.
    pub fn isa_name(&self) -> &'static str {
        self.isa.isa().name()
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        self.threads
    }

    /// Runs `task(0) … task(n - 1)`, each once, over the threads; returns when all are done. Once the interrupt is
    /// raised the remaining tasks are skipped: callers check the interrupt before they use results.
    pub fn parallel(&self, n: usize, task: &(dyn Fn(usize) + Sync)) {
        for i in 0..n {
            if self.interrupt.is_raised() {
                return;
            }
            task(i);
        }
    }
}
