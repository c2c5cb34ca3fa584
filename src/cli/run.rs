//! `deltafin run`: a prompt in, its continuation or answer out.

mod answer;
mod flags;
mod generate;
mod prepare;
mod reader;

use std::time::Instant;

use super::args::Shown;
use super::{output, show_plan};
use crate::engine::{Engine, Progress};
use crate::error::{Error, Kind, Result};
use crate::generate::StopReason;
use crate::interrupt::Interrupt;
use crate::plan;
use crate::report::json::{Memory, RunReport, Usage, tool_calls};
use crate::report::progress::Reporter;

pub use flags::RunArgs;

use answer::Answer;
use generate::{Clock, Job, generate};
use prepare::{Input, Prepared};

pub(super) fn run(args: &RunArgs, shown: &Shown, interrupt: &Interrupt) -> Result<()> {
    let reporter = Reporter::new(shown);
    let mut sampler = args.sampling.sampler()?;
    let input = Input::read(args, &reporter, interrupt)?;
    let mut clock = Clock::start(Instant::now());
    let Prepared { model, tokenizer, prompt, stops, limit, context } = Prepared::new(args, input)?;
    if tokenizer.is_none() && args.output.needs_text() {
        reporter.notice("the model directory has no tokenizer: `text` is null");
    }
    let mut answer = Answer::new(args, shown, tokenizer.as_ref())?;
    let options = args.engine.options(model, context, Some(prompt.len()))?;
    show_plan(&options, shown)?;
    let engine = match Engine::open(&options, &reporter, interrupt) {
        Ok(engine) => engine,
        Err(error) if matches!(error.kind(), Kind::Interrupted(_)) => {
            reporter.finish();
            let stop = Some(StopReason::Interrupted);
            return answer.close(&report(&answer, stop, None, prompt.len(), &clock, None)).and(Err(error));
        }
        Err(error) => return Err(error),
    };
    clock.loaded();

    let job = Job { engine: &engine, prompt: &prompt, limit, stops: stops.as_ref(), reporter: &reporter, interrupt };
    let ended = generate(&job, &mut sampler, &mut clock, &mut answer);
    reporter.finish();
    let (mut stop, failure) = match ended {
        Ok(stop) => (stop, None),
        Err(error) if matches!(error.kind(), Kind::Interrupted(_)) => (Some(StopReason::Interrupted), Some(error)),
        Err(error) => (None, Some(error)),
    };
    let tail = answer.finish();
    if matches!(tail, Ok(true)) && matches!(stop, Some(StopReason::Length | StopReason::Eos)) {
        stop = Some(StopReason::StopString);
    }
    let report = report(&answer, stop, failure.as_ref(), prompt.len(), &clock, Some(&engine));
    let closed = answer.close(&report);
    if !shown.quiet {
        output::stderr(format_args!("{}{}", answer.line_end(), summary(&report)));
    }
    match failure {
        Some(error) => Err(error),
        None => tail.and(closed),
    }
}

/// What the run came to; without `engine` it ended while that was being opened.
fn report(
    answer: &Answer<'_>,
    stop: Option<StopReason>,
    failure: Option<&Error>,
    prompt_tokens: usize,
    clock: &Clock,
    engine: Option<&Engine>,
) -> RunReport {
    RunReport {
        text: answer.text(),
        reasoning: answer.reasoning(),
        tool_calls: answer.chat().map(tool_calls),
        ids: answer.ids().to_vec(),
        stop: stop.map(StopReason::as_str),
        error: failure.filter(|_| stop.is_none()).map(|error| error.message().to_owned()),
        prompt_tokens,
        usage: Usage::new(prompt_tokens, answer.ids().len()),
        timings: clock.timings(prompt_tokens),
        io: engine.map(Engine::store_stats).unwrap_or_default(),
        memory: Memory { planned: engine.map(|engine| engine.memory_plan().total), peak: plan::peak_resident() },
        backend: "cpu",
        isa: engine.map(Engine::isa_name),
        threads: engine.map(Engine::threads),
        trunk: engine.map(|engine| engine.trunk_format().label()),
    }
}

/// One line of what the run came to.
fn summary(report: &RunReport) -> String {
    let tps = |tps: Option<f64>| tps.map_or(String::new(), |tps| format!(" at {tps:.2}/s"));
    let (timings, io) = (&report.timings, &report.io);
    let mut line = format!(
        "{} tokens{} after a prompt of {}{}",
        report.ids.len(),
        tps(timings.decode_tps),
        report.prompt_tokens,
        tps(timings.prefill_tps)
    );
    let requests = io.hits + io.misses;
    if requests > 0 {
        let bytes: u64 = io.drives.iter().map(|drive| drive.bytes).sum();
        let hits = 100.0 * io.hits as f64 / requests as f64;
        line += &format!(
            "; {:.1} MB read, {hits:.0} % of experts in memory, {:.2} s waiting",
            bytes as f64 / 1e6,
            io.wait_s
        );
    }
    line
}
