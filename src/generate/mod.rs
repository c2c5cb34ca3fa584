//! Decides the rows of the next step: sessions, sampling, stop reasons.

mod sampler;
mod session;

pub use sampler::{Sampler, Sampling};
pub(crate) use session::LOGIT_ROWS;
pub use session::Session;

/// Why a run ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum StopReason {
    /// A stop id.
    Eos,
    /// `-n` reached.
    Length,
    /// A stop string.
    StopString,
    /// A signal.
    Interrupted,
}

impl StopReason {
    /// As written in JSON: `eos`, `length`, `stop_string`, `interrupted`.
    pub fn as_str(self) -> &'static str {
        match self {
            StopReason::Eos => "eos",
            StopReason::Length => "length",
            StopReason::StopString => "stop_string",
            StopReason::Interrupted => "interrupted",
        }
    }
}
