//! Measures a model on this machine: prefill and decode speed at several context depths, what was read for it, and how
//! that compares with what the machine can do. Numbers only; how they are shown is the caller's business.
//!
//! A *test* is a prompt, an answer, or both, behind a context of a given depth. It runs once to warm up unless the state is
//! cold, then as often as asked. Each *repetition* has tokens of its own, so that none finds the experts of the one before
//! by repeating its text. What is not measured: loading, filling the context, emptying the cache.

mod cold;
mod limits;
mod measure;
mod plot;
mod process;
mod row;
mod schedule;
mod sweep;
mod timeline;
mod tokens;
mod work;

pub use limits::{Limits, drive_rate};
pub use plot::svg;
pub use process::{COMMIT, COMMIT_MODIFIED};
pub use row::{Row, Spread};
pub use schedule::{At, Stage};
pub use sweep::Bench;
pub use timeline::Drive;
use timeline::Timeline;
pub use work::{decode_bytes, prefill_flops};

use std::ops::ControlFlow;

use crate::engine::{EngineOptions, Progress};
use crate::error::Result;

/// What is computed in one repetition.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Test {
    /// `ppN`: a prompt of so many tokens.
    Prompt(usize),
    /// `tgN`: so many tokens generated.
    Generate(usize),
    /// `pgP+N`: a prompt and an answer to it.
    Both(usize, usize),
}

impl Test {
    /// Tokens of the prompt.
    pub fn prompt(self) -> usize {
        match self {
            Test::Prompt(prompt) | Test::Both(prompt, _) => prompt,
            Test::Generate(_) => 0,
        }
    }

    /// Tokens generated.
    pub fn generated(self) -> usize {
        match self {
            Test::Generate(generated) | Test::Both(_, generated) => generated,
            Test::Prompt(_) => 0,
        }
    }

    /// Both.
    pub fn tokens(self) -> usize {
        self.prompt().saturating_add(self.generated())
    }
}

impl std::fmt::Display for Test {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let name = match self {
            Test::Prompt(prompt) => format!("pp{prompt}"),
            Test::Generate(generated) => format!("tg{generated}"),
            Test::Both(prompt, generated) => format!("pg{prompt}+{generated}"),
        };
        f.pad(&name)
    }
}

/// What is in memory when a repetition begins, beside the trunk.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "lowercase")]
pub enum State {
    /// What earlier tokens left in the expert cache.
    Warm,
    /// Nothing: the expert cache is empty, and the system was asked to drop the model's files.
    Cold,
}

/// What to measure.
#[derive(Debug, Clone)]
pub struct Options {
    /// The model and what it may use; `threads`, `step` and `context` are set from the lists.
    pub engine: EngineOptions,
    /// Thread counts; empty: the default.
    pub threads: Vec<usize>,
    /// Step sizes; empty: the plan's choice.
    pub steps: Vec<usize>,
    /// Tokens of context before each test.
    pub depths: Vec<usize>,
    /// What to run at each depth.
    pub tests: Vec<Test>,
    /// Measured runs of each test.
    pub repetitions: usize,
    /// What is in memory when one begins.
    pub state: State,
    /// Measure what the machine can do, too.
    pub limits: bool,
    /// Tokens to use, over and over; `None`: random ones.
    pub text: Option<Vec<u32>>,
    /// Decides the random tokens.
    pub seed: u64,
    /// Record what each drive delivers over time.
    pub timeline: bool,
}

/// Looks on while [`Bench::run`] measures; called from the calling thread only.
pub trait Watch {
    /// Shows loading and notices.
    fn progress(&self) -> &dyn Progress;

    /// Where the measurement is; called often.
    fn at(&self, at: &At);

    /// A test is done; says whether to go on.
    ///
    /// # Errors
    /// Ends the measurement.
    fn row(&mut self, row: &Row) -> Result<ControlFlow<()>>;
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn tests_have_the_names_that_others_use() {
        assert_eq!(Test::Prompt(512).to_string(), "pp512");
        assert_eq!(Test::Generate(128).to_string(), "tg128");
        assert_eq!(Test::Both(512, 128).to_string(), "pg512+128");
        assert_eq!(Test::Both(512, 128).tokens(), 640);
        assert_eq!(Test::Both(usize::MAX, 1).tokens(), usize::MAX);
    }
}
