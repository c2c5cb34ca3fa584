//! A row of the table: one test at one depth on one setting, over its repetitions. What has no value is `None`, never NaN.

use serde::Serialize;

use super::measure::Repetition;
use super::process::{self, COMMIT, COMMIT_MODIFIED};
use super::{Limits, State, Test, work};
use crate::checkpoint::{Dtype, Manifest};
use crate::config::ModelConfig;
use crate::engine::Engine;
use crate::plan;
use crate::trunk::TrunkFormat;

/// One row. Counters are the mean of the repetitions, for all of a repetition: the first token too.
#[derive(Debug, Clone, Serialize)]
pub struct Row {
    /// `pp512`, `tg128` or `pg512+128`.
    pub test: String,
    /// Tokens of a repetition: prompt and answer together.
    pub tokens: usize,
    /// `pp`: prompt tokens by the time until the logits after the last of them. `tg`: tokens after the first by the time
    /// from the first to the last; nothing below two. `pg`: all tokens by all of the time.
    pub tokens_per_s: Spread,
    /// Seconds until the first token is chosen.
    pub first_token_s: f64,
    /// Bytes asked of the drives for experts, with what whole pages need beside them.
    pub bytes_read: u64,
    /// Bytes of the experts that the steps needed, each once for a step.
    pub expert_bytes_needed: u64,
    /// Bytes of experts that were read, by `expert_bytes_needed`: 1 when each was read once, more when some were read
    /// again or in vain, less when some were in memory. Nothing without routed experts.
    pub amplification: Option<f64>,
    /// `bytes_read` by `tokens`.
    pub bytes_per_token: f64,
    /// Share of the experts asked for that were in memory, or on their way already. Nothing without routed experts.
    pub hit_rate: Option<f64>,
    /// Share of the time that the model waited for reads.
    pub wait_share: f64,
    /// `bytes_read` by the whole time, in 10⁹ bytes a second: pauses of the drives count.
    pub disk_gb_per_s: f64,
    /// What the drives give for random reads of an expert's size at the best of several queue depths, in the same run.
    pub disk_limit_gb_per_s: Option<f64>,
    /// Largest resident set since loading began.
    pub peak_memory_bytes: u64,
    /// Sum of the memory plan.
    pub planned_memory_bytes: u64,
    /// Threads that computed.
    pub threads: usize,
    /// Instruction set.
    pub isa: &'static str,
    /// What computed.
    pub backend: &'static str,
    /// How drives were read: `direct`, `buffered`, `mixed`; `none` without routed experts.
    pub io_mode: String,
    /// Form of the trunk's weights.
    pub trunk: &'static str,
    /// The commit that the program was built from, or `unknown`.
    pub commit: &'static str,
    /// Whether the source had other changes.
    pub commit_modified: bool,
    /// Tokens of context before the test.
    pub depth: usize,
    /// Most rows of a step.
    pub step: usize,
    /// Runs that were measured.
    pub repetitions: usize,
    /// What was in memory when one began.
    pub state: State,
    /// Processor.
    pub cpu: String,
    /// Seconds of a repetition.
    pub seconds: Spread,
    /// Bytes of the experts that were read.
    pub expert_bytes_read: u64,
    /// Share of the time with a read in flight, on the busiest drive.
    pub disk_busy_share: f64,
    /// `disk_gb_per_s` by `disk_limit_gb_per_s`.
    pub disk_share: Option<f64>,
    /// Memory's read rate with all threads, in 10⁹ bytes a second.
    pub memory_limit_gb_per_s: Option<f64>,
    /// Of a generated token: [`work::decode_bytes`] by its time, as share of `memory_limit_gb_per_s`.
    pub memory_share: Option<f64>,
    /// Multiply-adds from registers with all threads, in 10⁹ operations a second, two for each.
    pub fma_limit_gflops: Option<f64>,
    /// Of a prompt: [`work::prefill_flops`] by its time, as share of `fma_limit_gflops`.
    pub fma_share: Option<f64>,
    /// Bytes that the kernel fetched from drives for this process meanwhile; nothing where it does not count.
    pub kernel_read_bytes: Option<u64>,
    /// Bytes that the kernel returned from reads meanwhile, from wherever.
    pub kernel_rchar: Option<u64>,
}

/// Mean of the repetitions, sample standard deviation (of two or more), least and most.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize)]
pub struct Spread {
    /// Arithmetic mean.
    pub mean: Option<f64>,
    /// Sample standard deviation; nothing for one value.
    pub sd: Option<f64>,
    /// Least.
    pub min: Option<f64>,
    /// Most.
    pub max: Option<f64>,
}

impl Spread {
    /// Of `values`; nothing at all unless there are some and all are finite.
    pub fn of(values: &[f64]) -> Self {
        if values.is_empty() || !values.iter().all(|value| value.is_finite()) {
            return Self::default();
        }
        let count = values.len() as f64;
        let mean = values.iter().sum::<f64>() / count;
        let squares: f64 = values.iter().map(|value| (value - mean).powi(2)).sum();
        Self {
            mean: Some(mean),
            sd: (values.len() > 1).then(|| (squares / (count - 1.0)).sqrt()),
            min: values.iter().copied().reduce(f64::min),
            max: values.iter().copied().reduce(f64::max),
        }
    }
}

/// What the repetitions were run on.
pub(super) struct Setting<'a> {
    pub engine: &'a Engine,
    pub manifest: &'a Manifest,
    pub state: State,
    pub depth: usize,
    pub limits: Option<&'a Limits>,
    pub cpu: &'a str,
}

impl Row {
    pub(super) fn new(test: Test, repetitions: &[Repetition], setting: &Setting<'_>) -> Self {
        let Setting { engine, manifest, limits, .. } = *setting;
        let count = repetitions.len().max(1) as f64;
        let sum = |of: &dyn Fn(&Repetition) -> f64| repetitions.iter().map(of).sum::<f64>();
        let mean = |of: &dyn Fn(&Repetition) -> u64| (sum(&|it| of(it) as f64) / count).round() as u64;
        let whole = |it: &Repetition| (it.first_token + it.rest).as_secs_f64();
        let seconds = sum(&whole);
        let rate = Spread::of(&repetitions.iter().filter_map(|it| tokens_per_s(test, it)).collect::<Vec<_>>());
        let expert_bytes = manifest.expert_bytes();
        let needed = sum(&|it| (it.experts_needed * expert_bytes) as f64);
        let asked = sum(&|it| (it.io.hits + it.io.misses) as f64);
        let bytes_read = sum(&|it| it.io.bytes as f64);
        let disk_gb_per_s = share(bytes_read / 1e9, seconds).unwrap_or(0.0);
        let disk_limit = limits.and_then(|limits| limits.disk).map(|rate| rate / 1e9);
        let memory_limit = limits.map(|limits| limits.read / 1e9);
        let fma_limit = limits.map(|limits| 2.0 * limits.multiply_adds / 1e9);
        let kernel: Option<Vec<_>> = repetitions.iter().map(|it| it.kernel).collect();
        let kernel_mean = |of: &dyn Fn(&process::KernelIo) -> u64| {
            let counts = kernel.as_ref().filter(|counts| !counts.is_empty())?;
            Some((counts.iter().map(|it| of(it) as f64).sum::<f64>() / count).round() as u64)
        };
        Self {
            test: test.to_string(),
            tokens: test.tokens(),
            tokens_per_s: rate,
            first_token_s: sum(&|it| it.first_token.as_secs_f64()) / count,
            bytes_read: mean(&|it| it.io.bytes),
            expert_bytes_needed: mean(&|it| it.experts_needed * expert_bytes),
            amplification: share(sum(&|it| it.io.expert_bytes as f64), needed),
            bytes_per_token: bytes_read / count / test.tokens().max(1) as f64,
            hit_rate: share(sum(&|it| it.io.hits as f64), asked),
            wait_share: share(sum(&|it| it.io.wait_s), seconds).unwrap_or(0.0),
            disk_gb_per_s,
            disk_limit_gb_per_s: disk_limit,
            peak_memory_bytes: plan::peak_resident(),
            planned_memory_bytes: engine.memory_plan().total,
            threads: engine.threads(),
            isa: engine.isa_name(),
            backend: "cpu",
            io_mode: io_mode(engine),
            trunk: trunk_format(engine, manifest),
            commit: COMMIT,
            commit_modified: COMMIT_MODIFIED,
            depth: setting.depth,
            step: engine.step_rows(),
            repetitions: repetitions.len(),
            state: setting.state,
            cpu: setting.cpu.to_owned(),
            seconds: Spread::of(&repetitions.iter().map(whole).collect::<Vec<_>>()),
            expert_bytes_read: mean(&|it| it.io.expert_bytes),
            disk_busy_share: share(sum(&|it| it.io.busy_s), seconds).unwrap_or(0.0),
            disk_share: disk_limit.and_then(|limit| share(disk_gb_per_s, limit)),
            memory_limit_gb_per_s: memory_limit,
            memory_share: memory_limit
                .zip(memory_gb_per_s(test, setting, rate.mean))
                .and_then(|(limit, rate)| share(rate, limit)),
            fma_limit_gflops: fma_limit,
            fma_share: fma_limit
                .zip(gflops(test, setting.engine.config(), setting.depth, rate.mean))
                .and_then(|(limit, rate)| share(rate, limit)),
            kernel_read_bytes: kernel_mean(&|it| it.read_bytes),
            kernel_rchar: kernel_mean(&|it| it.rchar),
        }
    }

    /// Whether the repetitions differ so much that their mean says little.
    pub fn is_noisy(&self) -> bool {
        const SPREAD_MAX: f64 = 0.1;
        self.tokens_per_s.mean.zip(self.tokens_per_s.sd).is_some_and(|(mean, sd)| sd > SPREAD_MAX * mean)
    }
}

/// The rate that a repetition counts with; `None` where it has no meaning.
fn tokens_per_s(test: Test, repetition: &Repetition) -> Option<f64> {
    let (first, rest) = (repetition.first_token.as_secs_f64(), repetition.rest.as_secs_f64());
    match test {
        Test::Prompt(prompt) => share(prompt as f64, first),
        Test::Generate(generated) => share(generated.saturating_sub(1) as f64, rest).filter(|_| generated > 1),
        Test::Both(..) => share(test.tokens() as f64, first + rest),
    }
}

/// Bytes from memory a second, in 10⁹, of a test that generates only.
fn memory_gb_per_s(test: Test, setting: &Setting<'_>, tokens_per_s: Option<f64>) -> Option<f64> {
    let Test::Generate(generated) = test else { return None };
    let middle = setting.depth + generated / 2;
    let engine = setting.engine;
    let bytes = work::decode_bytes(engine.config(), setting.manifest, engine.trunk_format(), middle);
    Some(tokens_per_s? * bytes / 1e9)
}

/// Operations a second, in 10⁹, of a test of a prompt only.
fn gflops(test: Test, config: &ModelConfig, depth: usize, tokens_per_s: Option<f64>) -> Option<f64> {
    let Test::Prompt(prompt) = test else { return None };
    Some(tokens_per_s? * work::prefill_flops(config, depth, prompt) / prompt as f64 / 1e9)
}

/// `part / whole`, where that is a number.
fn share(part: f64, whole: f64) -> Option<f64> {
    let share = part / whole;
    (whole > 0.0 && share.is_finite()).then_some(share)
}

fn io_mode(engine: &Engine) -> String {
    let mut modes: Vec<String> = engine.store_stats().drives.into_iter().map(|drive| drive.mode).collect();
    modes.dedup();
    match modes.len() {
        0 => "none".to_owned(),
        1 => modes.remove(0),
        _ => "mixed".to_owned(),
    }
}

/// The form of the trunk's matrices, or the type that most of its bytes are of.
fn trunk_format(engine: &Engine, manifest: &Manifest) -> &'static str {
    if engine.trunk_format() != TrunkFormat::Bf16 {
        return engine.trunk_format().label();
    }
    let bytes = |dtype| -> u64 {
        manifest.trunk.iter().filter(|tensor| tensor.dtype == dtype).map(|tensor| tensor.span.len).sum()
    };
    let names = [(Dtype::Bf16, "bf16"), (Dtype::F16, "f16"), (Dtype::F32, "f32")];
    names.into_iter().max_by_key(|(dtype, _)| bytes(*dtype)).map_or("bf16", |(_, name)| name)
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::bench::measure::Io;

    fn repetition(first_ms: u64, rest_ms: u64) -> Repetition {
        Repetition {
            first_token: Duration::from_millis(first_ms),
            rest: Duration::from_millis(rest_ms),
            io: Io::default(),
            experts_needed: 0,
            kernel: None,
        }
    }

    #[test]
    fn a_spread_of_one_value_has_no_deviation_and_of_none_nothing() {
        assert_eq!(Spread::of(&[2.0]), Spread { mean: Some(2.0), sd: None, min: Some(2.0), max: Some(2.0) });
        for nothing in [&[][..], &[f64::NAN], &[1.0, f64::INFINITY]] {
            assert_eq!(Spread::of(nothing), Spread::default());
        }
        let spread = Spread::of(&[1.0, 2.0, 3.0, 4.0]);
        assert_eq!((spread.mean, spread.min, spread.max), (Some(2.5), Some(1.0), Some(4.0)));
        assert!((spread.sd.unwrap() - (5.0_f64 / 3.0).sqrt()).abs() < 1e-12);
    }

    #[test]
    fn rates_are_as_defined_and_never_odd_numbers() {
        let rate = |test, first, rest| tokens_per_s(test, &repetition(first, rest));
        assert_eq!(rate(Test::Prompt(512), 2000, 0), Some(256.0));
        assert_eq!(rate(Test::Generate(5), 3000, 2000), Some(2.0), "the first token does not count");
        assert_eq!(rate(Test::Generate(1), 3000, 0), None);
        assert_eq!(rate(Test::Generate(1), 3000, 1), None);
        assert_eq!(rate(Test::Both(6, 4), 3000, 2000), Some(2.0));
        assert_eq!(rate(Test::Prompt(1), 0, 0), None);
    }

    #[test]
    fn a_share_of_nothing_is_none() {
        assert_eq!(share(1.0, 4.0), Some(0.25));
        assert_eq!(share(0.0, 4.0), Some(0.0));
        for (part, whole) in [(0.0, 0.0), (1.0, 0.0), (f64::NAN, 1.0), (1.0, f64::NAN)] {
            assert_eq!(share(part, whole), None);
        }
    }
}
