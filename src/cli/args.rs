//! Flags that several commands share, and the values that need more than clap's own parsers.

use std::path::PathBuf;

use clap::{ArgAction, Args, ValueEnum};

use crate::engine::EngineOptions;
use crate::error::Result;
use crate::kernels::Isa;

/// How much is said on stderr, and how.
#[derive(Debug, Clone, Args)]
pub struct Shown {
    /// Only errors on stderr
    #[arg(short, long, global = true, conflicts_with = "verbose")]
    pub quiet: bool,
    /// More on stderr: the memory plan, the mode of each drive, statistics
    #[arg(short, long, global = true, action = ArgAction::Count)]
    pub verbose: u8,
    /// Colour on stderr
    #[arg(long, global = true, value_name = "WHEN", default_value = "auto")]
    pub color: Color,
}

/// `--color`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Color {
    /// On a terminal, unless NO_COLOR is set or TERM is dumb
    Auto,
    /// Always
    Always,
    /// Never
    Never,
}

/// Where the model is and what it may use.
#[derive(Debug, Clone, Args)]
pub struct EngineArgs {
    /// Memory this run may use, e.g. 96GiB [default: what is free, less a reserve]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub memory: Option<u64>,
    /// Memory for the expert cache, e.g. 40GiB [default: what the rest leaves]
    #[arg(long, value_name = "SIZE", value_parser = size)]
    pub expert_memory: Option<u64>,
    /// Threads that compute [default: one a processor this process may use]
    #[arg(long, value_name = "N", value_parser = positive)]
    pub threads: Option<usize>,
    /// Instruction set [default: the fastest this processor has]
    #[arg(long, value_name = "NAME")]
    pub isa: Option<Isa>,
    /// Most rows (tokens) of one step [default: up to 512, less where memory is short]
    #[arg(long, value_name = "ROWS", value_parser = positive)]
    pub step: Option<usize>,
    /// Tokens to make room for, prompt and answer together [default: what the prompt and -n need]
    #[arg(long, value_name = "TOKENS", value_parser = positive)]
    pub context: Option<usize>,
    /// Read through the page cache
    #[arg(long)]
    pub no_direct: bool,
}

impl EngineArgs {
    /// The engine's options for the model in `model`, with room for `context` tokens.
    pub fn options(&self, model: PathBuf, context: usize) -> EngineOptions {
        EngineOptions {
            model,
            memory: self.memory,
            expert_memory: self.expert_memory,
            threads: self.threads,
            isa: self.isa,
            step: self.step,
            context,
            direct: !self.no_direct,
        }
    }
}

/// A size in bytes: a whole or decimal number with an optional unit (B, K, M, G, T: powers of 1000 with a B or none;
/// KiB, MiB, GiB, TiB: powers of 1024), any case.
pub fn size(text: &str) -> Result<u64, String> {
    let _ = text;
    todo!()
}

/// A whole number from 1 up.
pub fn positive(text: &str) -> Result<usize, String> {
    let _ = text;
    todo!()
}

/// Token ids separated by commas, spaces or line ends.
///
/// # Errors
/// Names the entry's number and what it was; nothing is skipped or rounded.
pub fn ids(text: &str) -> Result<Vec<u32>, String> {
    let _ = text;
    todo!()
}

/// `-m`: the directory, or the unpacked embedded model for `demo` when no such directory is there.
///
/// # Errors
/// As unpacking reports.
pub fn model_dir(model: &std::path::Path) -> Result<PathBuf> {
    let _ = model;
    todo!()
}
