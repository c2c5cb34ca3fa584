//! Simulated drives and the step loop over them, with a clock that jumps from event to event: the scheduling, the slots
//! and the lookahead are the store's own.

use std::time::Duration;

/// A drive that exists on paper.
#[derive(Debug, Clone)]
pub struct SimulatedDrive {
    /// Bytes a second of large reads.
    pub bytes_per_s: f64,
    /// Time from a read's start to its first byte.
    pub latency: Duration,
    /// Standard deviation of a read's time, as a share of it.
    pub jitter: f64,
}

/// What is run on the drives.
#[derive(Debug, Clone)]
pub struct SimulatedRun {
    /// Layers with routed experts.
    pub moe_layers: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Experts of a token in a layer.
    pub top_k: usize,
    /// Bytes of one expert.
    pub expert_bytes: u64,
    /// Slots, as a share of all experts.
    pub cache_share: f64,
    /// Computing a token takes this long in all.
    pub compute: Duration,
    /// Reads and compute take turns; nothing is guessed, nothing kept.
    pub in_turn: bool,
    /// Tokens to decode.
    pub tokens: usize,
    /// Decides jitter and, without a trace, the routing.
    pub seed: u64,
}

/// What came out.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct SimulatedFigures {
    /// Number of drives.
    pub drives: usize,
    /// Tokens a second.
    pub tokens_per_s: f64,
    /// Bytes read a second of run time, in 10⁹.
    pub gb_per_s: f64,
    /// Share of the drives' summed rate that was used while there was work for them.
    pub busy_share: f64,
    /// Share of asked experts that were in memory.
    pub hit_rate: f64,
    /// Bytes read for a token.
    pub bytes_per_token: f64,
    /// Lookahead reads that were used, bytes a token.
    pub lookahead_useful: f64,
    /// Lookahead reads that were not, bytes a token.
    pub lookahead_wasted: f64,
}
