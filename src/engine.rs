//! Opens the parts and joins them: configuration, checkpoint, plan, trunk, store, kernels, model.

use std::path::PathBuf;

use crate::config::ModelConfig;
use crate::error::Result;
use crate::generate::Session;
use crate::interrupt::Interrupt;
use crate::kernels::Isa;
use crate::plan::Plan;
use crate::store::StoreStats;

/// The common flags, resolved.
#[derive(Debug, Clone)]
pub struct EngineOptions {
    /// Model directory.
    pub model: PathBuf,
    /// `--memory`, bytes.
    pub memory: Option<u64>,
    /// `--expert-memory`, bytes.
    pub expert_memory: Option<u64>,
    /// `--threads`; `None`: one a physical core this process may use.
    pub threads: Option<usize>,
    /// `--isa`.
    pub isa: Option<Isa>,
    /// `--step`: most rows of one step; `None`: chosen by the plan.
    pub step: Option<usize>,
    /// Tokens of context to make room for (prompt and answer).
    pub context: usize,
    /// Read past the page cache.
    pub direct: bool,
}

/// What opening and prefilling report to whoever shows progress. All methods may be called from the calling thread only.
pub trait Progress {
    /// `done` of `total` trunk bytes are in memory.
    fn loading(&self, done: u64, total: u64);
    /// `done` of `total` prompt tokens are through; the step in work is at `layer` of `layers`; `bytes` of experts read.
    fn prefill(&self, done: usize, total: usize, layer: usize, layers: usize, bytes: u64);
    /// Something the user should know once (a drive reads buffered).
    fn notice(&self, text: &str);
}

/// A model ready to compute.
pub struct Engine {
    _private: (),
}

#[expect(unused_variables, reason = "signatures")]
impl Engine {
    /// Reads the configuration and the headers and makes the plan; loads nothing.
    ///
    /// # Errors
    /// As [`Engine::open`].
    pub fn plan(options: &EngineOptions) -> Result<(ModelConfig, Plan)> {
        todo!()
    }

    /// Opens, checks, plans and loads.
    ///
    /// # Errors
    /// `Model` for a directory that cannot be run, `Memory` when the plan does not fit, `Io`, `Usage`, `Interrupted`.
    pub fn open(options: &EngineOptions, progress: &dyn Progress, interrupt: &Interrupt) -> Result<Self> {
        todo!()
    }

    /// The model's configuration.
    pub fn config(&self) -> &ModelConfig {
        todo!()
    }

    /// The plan in force.
    pub fn memory_plan(&self) -> &Plan {
        todo!()
    }

    /// Largest number of rows in a step.
    pub fn step_rows(&self) -> usize {
        todo!()
    }

    /// Instruction set in use.
    pub fn isa_name(&self) -> &'static str {
        todo!()
    }

    /// Threads in use.
    pub fn threads(&self) -> usize {
        todo!()
    }

    /// Expert reads so far.
    pub fn store_stats(&self) -> StoreStats {
        todo!()
    }

    /// A new, empty sequence with room for the planned context.
    ///
    /// # Errors
    /// `Memory` when its states cannot be allocated.
    pub fn session(&self) -> Result<Session<'_>> {
        todo!()
    }
}
