//! One repetition of one test: the clock and the counters around it.

use std::hint::black_box;
use std::time::{Duration, Instant};

use super::Test;
use super::process::KernelIo;
use crate::engine::{Engine, Progress};
use crate::error::Result;
use crate::generate::Session;
use crate::model::{Observer, Routes};
use crate::store::StoreStats;

/// Between two looks at whether reads are under way, and how long they are waited for.
const LOOK: Duration = Duration::from_millis(2);
const PATIENCE: Duration = Duration::from_secs(2);

/// What one repetition came to.
#[derive(Debug, Clone)]
pub(super) struct Repetition {
    /// From the first row to the first chosen token.
    pub first_token: Duration,
    /// From there to the last chosen token.
    pub rest: Duration,
    /// Counters of the store.
    pub io: Io,
    /// Experts that the steps needed: distinct ones, for each step and layer.
    pub experts_needed: u64,
    /// Counters of the kernel.
    pub kernel: Option<KernelIo>,
}

/// What the store counted during a repetition.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Io {
    /// Bytes asked of the drives, with what whole pages need beside the experts.
    pub bytes: u64,
    /// Bytes of the experts that were read.
    pub expert_bytes: u64,
    pub hits: u64,
    pub misses: u64,
    /// Seconds that the model waited.
    pub wait_s: f64,
    /// Seconds with a read in flight, on the drive that had most of them.
    pub busy_s: f64,
}

impl Io {
    fn between(before: &StoreStats, after: &StoreStats) -> Self {
        let bytes = |stats: &StoreStats| stats.drives.iter().map(|drive| drive.bytes).sum::<u64>();
        let busy = before.drives.iter().zip(&after.drives).map(|(before, after)| after.seconds - before.seconds);
        Self {
            bytes: bytes(after).saturating_sub(bytes(before)),
            expert_bytes: after.expert_bytes.saturating_sub(before.expert_bytes),
            hits: after.hits.saturating_sub(before.hits),
            misses: after.misses.saturating_sub(before.misses),
            wait_s: (after.wait_s - before.wait_s).max(0.0),
            busy_s: busy.fold(0.0, f64::max),
        }
    }
}

/// Waits until no read is under way, for a while: what is read ahead belongs to the repetition that caused it.
pub(super) fn settle(engine: &Engine) {
    let look = || engine.store_stats().drives.iter().map(|drive| (drive.bytes, drive.seconds)).collect::<Vec<_>>();
    let deadline = Instant::now() + PATIENCE;
    let mut last = look();
    while !last.is_empty() && Instant::now() < deadline && !engine.machine().interrupt.is_raised() {
        std::thread::sleep(LOOK);
        let now = look();
        if now == last {
            return;
        }
        last = now;
    }
}

/// Runs `test` once on `tokens` (its prompt, then what is fed for the tokens generated). `done` is told how far it is, from
/// 0 to 1.
///
/// # Errors
/// As [`Session::feed`].
pub(super) fn repetition(
    engine: &Engine,
    session: &mut Session<'_>,
    test: Test,
    tokens: &[u32],
    progress: &dyn Progress,
    done: &dyn Fn(f64),
) -> Result<Repetition> {
    let num_experts = engine.config().moe.as_ref().map_or(0, |moe| moe.num_experts);
    let mut needed = Needed { seen: vec![false; num_experts], experts: 0 };
    // A generated token takes a step. The first one's comes from the prompt, or, without one, from a token of its own.
    let (first, others) = tokens.split_at(test.prompt().max(1));
    let steps = test.generated().saturating_sub(1);
    let total = (first.len() + steps) as f64;
    let step_rows = engine.step_rows();
    settle(engine);
    let (stats, kernel) = (engine.store_stats(), KernelIo::now());
    let start = Instant::now();
    let inner = Within { progress, done, share: first.len() as f64 / total, step_rows };
    black_box(likeliest(session.feed_observed(first, &inner, &mut needed)?));
    let first_token = start.elapsed();
    for (at, token) in others[..steps].iter().enumerate() {
        let inner = Within { progress, done: &|_| (), share: 0.0, step_rows };
        black_box(likeliest(session.feed_observed(std::slice::from_ref(token), &inner, &mut needed)?));
        done((first.len() + at + 1) as f64 / total);
    }
    let rest = start.elapsed() - first_token;
    settle(engine);
    let kernel = kernel.zip(KernelIo::now()).map(|(before, after)| KernelIo {
        read_bytes: after.read_bytes.saturating_sub(before.read_bytes),
        rchar: after.rchar.saturating_sub(before.rchar),
    });
    let io = Io::between(&stats, &engine.store_stats());
    Ok(Repetition { first_token, rest, io, experts_needed: needed.experts, kernel })
}

/// Tokens that [`repetition`] takes.
pub(super) fn tokens_fed(test: Test) -> usize {
    test.prompt().max(1).saturating_add(test.generated().saturating_sub(1))
}

/// Greedy choice: what a run does between two steps.
fn likeliest(logits: &[f32]) -> usize {
    let best = logits.iter().enumerate().max_by(|a, b| a.1.total_cmp(b.1));
    best.map_or(0, |(id, _)| id)
}

/// Counts the distinct experts of each layer of each step, by what the router chose: whatever the store does about it.
struct Needed {
    /// `[num_experts]`, all false between calls.
    seen: Vec<bool>,
    experts: u64,
}

impl Observer for Needed {
    fn routes(&mut self, _layer: usize, routes: &Routes) {
        for &id in &routes.ids {
            let seen = &mut self.seen[usize::from(id)];
            self.experts += u64::from(!std::mem::replace(seen, true));
        }
        routes.ids.iter().for_each(|id| self.seen[usize::from(*id)] = false);
    }
}

/// A step's progress as part of a repetition's.
pub(super) struct Within<'a> {
    pub progress: &'a dyn Progress,
    pub done: &'a dyn Fn(f64),
    /// Part of the whole that these rows are.
    pub share: f64,
    /// Most rows of a step.
    pub step_rows: usize,
}

impl Progress for Within<'_> {
    fn loading(&self, _done: u64, _total: u64) {}

    fn prefill(&self, done: usize, total: usize, layer: usize, layers: usize, _bytes: u64) {
        let rows = self.step_rows.min(total.saturating_sub(done));
        let rows = done as f64 + rows as f64 * layer as f64 / layers.max(1) as f64;
        (self.done)(self.share * (rows / total.max(1) as f64).min(1.0));
    }

    fn notice(&self, text: &str) {
        self.progress.notice(text);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_expert_is_needed_once_a_layer_and_step_however_many_rows_use_it() {
        let mut needed = Needed { seen: vec![false; 8], experts: 0 };
        let routes = Routes { ids: vec![0, 3, 3, 7, 0, 3], weights: vec![0.5; 6], top_k: 2 };
        needed.routes(1, &routes);
        assert_eq!(needed.experts, 3);
        needed.routes(2, &routes);
        assert_eq!(needed.experts, 6, "another layer's experts are others");
    }

    #[test]
    fn a_generated_token_takes_a_step() {
        for (test, fed) in [
            (Test::Prompt(5), 5),
            (Test::Generate(1), 1),
            (Test::Generate(4), 4),
            (Test::Both(5, 1), 5),
            (Test::Both(5, 4), 8),
        ] {
            assert_eq!(tokens_fed(test), fed, "{test}");
        }
    }
}
