//! The memory plan: bytes for each part before anything is loaded, or a refusal with the floor.

use crate::error::Result;

/// What the parts need, in bytes; [`plan`] turns it into a [`Plan`].
#[derive(Debug, Clone, Default)]
pub struct Needs {
    /// Resident trunk.
    pub trunk: u64,
    /// KDA and convolution states of one sequence.
    pub states: u64,
    /// Latent cache of the asked context.
    pub latent_cache: u64,
    /// Scratch of the largest step.
    pub activations: u64,
    /// One expert slot; 0 when the model has no routed experts.
    pub slot: u64,
    /// Fewest slots that can run: one token's experts of one layer.
    pub slots_min: u64,
    /// Slots beyond which memory is of no use: all experts.
    pub slots_max: u64,
    /// Tokenizer, tables, thread stacks, code.
    pub fixed: u64,
}

/// Bytes of each part; what is used in the end stays within `total`.
#[derive(Debug, Clone, serde::Serialize)]
pub struct Plan {
    /// What the run may use, and where that figure is from (`--memory`, `cgroup`, `available memory less a reserve`).
    pub limit: u64,
    /// Source of `limit`.
    pub limit_source: String,
    /// Resident trunk.
    pub trunk: u64,
    /// KDA and convolution states.
    pub states: u64,
    /// Latent cache.
    pub latent_cache: u64,
    /// Step scratch.
    pub activations: u64,
    /// Expert slots, bytes.
    pub experts: u64,
    /// Expert slots, count.
    pub slots: u64,
    /// Everything else.
    pub fixed: u64,
    /// Sum of all parts.
    pub total: u64,
}

/// Fits the expert slots into what is left of the limit.
///
/// `memory` and `expert_memory` are the flags; without `memory` the limit is what is free less a reserve, and never more
/// than the cgroup (v1 or v2) allows.
///
/// # Errors
/// Kind `Memory` below the floor; the message has the limit, the floor and its parts.
pub fn plan(needs: &Needs, memory: Option<u64>, expert_memory: Option<u64>) -> Result<Plan> {
    let _ = (needs, memory, expert_memory);
    todo!()
}

/// Peak resident memory of this process so far, in bytes (`VmHWM`, `ru_maxrss`).
pub fn peak_resident() -> u64 {
    todo!()
}
