//! All settings, depths, tests and repetitions in order: what is opened once is used for as much as possible.

use std::ops::ControlFlow;
use std::path::PathBuf;
use std::time::Instant;

use super::cold::{files, make_cold};
use super::measure::{Repetition, Within, repetition, settle, tokens_fed};
use super::process::{cpu, reset_peak_memory};
use super::row::Setting;
use super::schedule::{Schedule, Stage};
use super::tokens::{Stream, Tokens};
use super::{Drive, Limits, Options, Row, State, Test, Timeline, Watch, limits};
use crate::checkpoint::Manifest;
use crate::config::ModelConfig;
use crate::engine::{Engine, EngineOptions, Survey};
use crate::error::{Error, Result};
use crate::generate::Session;
use crate::interrupt::Interrupt;
use crate::kernels::Compute;
use crate::model::Mark;
use crate::store::packed::PackedRoot;

/// Tokens generated to warm up, at most: enough to fill the cache with what the model uses.
const WARM_UP_TOKENS: usize = 64;

/// Repetitions of a test, at most; a larger number is a slip.
const REPETITIONS_MAX: usize = 10_000;

/// A measurement, from the options to the end of the program: it keeps the engine, whose memory and reads take a while to
/// end, so that what was measured can be shown before.
pub struct Bench {
    options: Options,
    engine: Option<Engine>,
    timeline: Timeline,
}

impl Bench {
    /// A measurement of what `options` ask for.
    ///
    /// # Errors
    /// Kind `Usage` when that is nothing.
    pub fn new(options: Options) -> Result<Self> {
        if options.tests.is_empty() || options.depths.is_empty() || options.repetitions == 0 {
            return Err(Error::usage("nothing to measure: no tokens are asked for"));
        }
        if options.repetitions > REPETITIONS_MAX {
            return Err(Error::usage(format!(
                "{} repetitions, where {REPETITIONS_MAX} are the most",
                options.repetitions
            ))
            .hint("-r takes the number of times that each test is run"));
        }
        Ok(Self { options, engine: None, timeline: Timeline::default() })
    }

    /// What the drives did; nothing unless it was to be recorded.
    pub fn drives(&self) -> Vec<Drive> {
        self.timeline.drives()
    }

    /// The engine's options, to be shown or planned with before anything is loaded.
    ///
    /// # Errors
    /// Kind `Usage` when the model is not made for so much context; `Model` for a directory that cannot be run.
    pub fn engine_options(&self) -> Result<EngineOptions> {
        engine_options(&self.options, &ModelConfig::load(&self.options.engine.model)?)
    }

    /// Measures, and hands `watch` a row after each test.
    ///
    /// # Errors
    /// As [`Bench::engine_options`], [`Engine::open`] and computing report; what `watch` returns; `Interrupted`. The rows
    /// that were handed over stand.
    pub fn run(&mut self, watch: &mut dyn Watch, interrupt: &Interrupt) -> Result<()> {
        let options = &self.options;
        let engine_options = self.engine_options()?;
        let Survey { config, manifest, roots, .. } = Engine::survey(&engine_options)?;
        let settings = settings(options);
        if let Some(threads) = options.threads.iter().copied().max() {
            // A number that cannot be had is refused now, not when its turn comes.
            Compute::new(engine_options.isa, threads, interrupt.clone())?;
        }
        // Before the model is in memory, which leaves no room for what is read then.
        let limits = limits_of(options, &engine_options, &settings, (&manifest, &roots), interrupt)?;
        reset_peak_memory();
        let start = Instant::now();
        let engine = self.engine.insert(Engine::open(&engine_options, watch.progress(), interrupt)?);
        let planned_rows = engine.step_rows();
        let mut schedule = Schedule::new(stages(options, settings.len()));
        let cpu = cpu();
        let files = files(&manifest, &engine_options.experts);
        for ((threads, step), limits) in settings.into_iter().zip(&limits) {
            if let Some(threads) = threads {
                engine.set_threads(threads)?;
            }
            engine.set_step_rows(step.unwrap_or(planned_rows).min(planned_rows))?;
            let sweep = Sweep {
                options,
                engine,
                manifest: &manifest,
                limits: limits.as_ref(),
                files: &files,
                cpu: &cpu,
                tokens: Tokens { text: options.text.as_deref(), vocab_size: config.vocab_size, seed: options.seed },
            };
            let mut work = || sweep.run(watch, &mut schedule);
            let wanted = match options.timeline {
                true => self.timeline.record(sweep.engine, start, work)?,
                false => work()?,
            };
            if wanted.is_break() {
                break;
            }
        }
        Ok(())
    }
}

/// What the machine can do, for each setting; nothing unless that is to be measured.
fn limits_of(
    options: &Options,
    engine: &EngineOptions,
    settings: &[(Option<usize>, Option<usize>)],
    (manifest, roots): (&Manifest, &[PackedRoot]),
    interrupt: &Interrupt,
) -> Result<Vec<Option<Limits>>> {
    if !options.limits {
        return Ok(vec![None; settings.len()]);
    }
    let disk = limits::drive_rate(manifest, roots, engine.direct, interrupt)?;
    let mut known: Vec<(usize, Limits)> = Vec::new();
    let limits = settings.iter().map(|(threads, _)| {
        let threads = threads.unwrap_or_else(|| std::thread::available_parallelism().map_or(1, usize::from));
        if let Some((_, limits)) = known.iter().find(|(known, _)| *known == threads) {
            return Ok(Some(*limits));
        }
        let compute = Compute::new(engine.isa, threads, interrupt.clone())?;
        let (read, multiply_adds) = limits::of_compute(&compute, interrupt)?;
        let limits = Limits { read, multiply_adds, disk };
        known.push((threads, limits));
        Ok(Some(limits))
    });
    limits.collect()
}

/// Threads and step of each setting, `None` for the default.
fn settings(options: &Options) -> Vec<(Option<usize>, Option<usize>)> {
    let each = |list: &[usize]| match list {
        [] => vec![None],
        list => list.iter().copied().map(Some).collect(),
    };
    let steps = each(&options.steps);
    each(&options.threads).into_iter().flat_map(|threads| steps.iter().map(move |step| (threads, *step))).collect()
}

/// The engine's, with room for the longest test behind the deepest context, and for the largest step.
fn engine_options(options: &Options, config: &ModelConfig) -> Result<EngineOptions> {
    let depth = options.depths.iter().copied().max().unwrap_or(0);
    let longest = options.tests.iter().copied().max_by_key(|test| tokens_fed(*test)).unwrap_or(Test::Prompt(1));
    let context = depth.saturating_add(tokens_fed(longest));
    let most = config.max_position_embeddings;
    if context > most {
        return Err(Error::usage(format!(
            "{longest} behind a context of {depth} takes {context} tokens, where the model is made for at most {most}"
        ))
        .hint("lower -d, -p or -n"));
    }
    let mut engine = options.engine.clone();
    engine.context = context;
    engine.prompt = options.tests.iter().copied().map(Test::prompt).max().map(|prompt| prompt.max(depth));
    engine.threads = options.threads.first().copied().or(engine.threads);
    engine.step = options.steps.iter().copied().max().or(engine.step);
    // A measurement must neither profit from the one before nor help the one after.
    engine.learn = false;
    Ok(engine)
}

/// All that [`Sweep::run`] runs, for all settings.
fn stages(options: &Options, settings: usize) -> Vec<Stage> {
    let mut stages = Vec::new();
    for _ in 0..settings {
        for (_, new) in fills(&options.depths) {
            stages.extend((new > 0).then_some(Stage::Fill(new)));
            for &test in &options.tests {
                stages.extend((options.state == State::Warm).then(|| Stage::WarmUp(warm_up(test))));
                let count = options.repetitions;
                stages.extend((1..=count).map(|number| Stage::Repetition(test, number, count)));
            }
        }
    }
    stages
}

/// Each depth, with the tokens that are filled in for it: a deeper context goes on from the one before.
fn fills(depths: &[usize]) -> impl Iterator<Item = (usize, usize)> {
    let before = std::iter::once(0).chain(depths.iter().copied());
    depths.iter().zip(before).map(|(&depth, before)| (depth, if depth < before { depth } else { depth - before }))
}

/// What is run before `test` counts.
fn warm_up(test: Test) -> Test {
    match test {
        Test::Prompt(prompt) => Test::Prompt(prompt),
        Test::Generate(generated) => Test::Generate(generated.min(WARM_UP_TOKENS)),
        Test::Both(prompt, generated) => Test::Both(prompt, generated.min(WARM_UP_TOKENS)),
    }
}

/// All depths and tests on one setting.
struct Sweep<'a> {
    options: &'a Options,
    engine: &'a Engine,
    manifest: &'a Manifest,
    limits: Option<&'a Limits>,
    files: &'a [PathBuf],
    cpu: &'a str,
    tokens: Tokens<'a>,
}

impl Sweep<'_> {
    fn run(&self, watch: &mut dyn Watch, schedule: &mut Schedule) -> Result<ControlFlow<()>> {
        let mut session = self.engine.session()?;
        let mut mark = session.mark()?;
        for (depth, new) in fills(&self.options.depths) {
            if new == depth {
                // The old one's memory is given back first.
                drop(session);
                session = self.engine.session()?;
            } else {
                session.rewind(&mark)?;
            }
            self.fill(&mut session, depth, new, watch, schedule)?;
            mark = session.mark()?;
            for &test in &self.options.tests {
                let repetitions = self.repeat(&mut session, &mark, depth, test, watch, schedule)?;
                let setting = Setting {
                    engine: self.engine,
                    manifest: self.manifest,
                    state: self.options.state,
                    depth,
                    limits: self.limits,
                    cpu: self.cpu,
                };
                if watch.row(&Row::new(test, &repetitions, &setting))?.is_break() {
                    return Ok(ControlFlow::Break(()));
                }
            }
        }
        Ok(ControlFlow::Continue(()))
    }

    /// Brings a session to `depth` with the last `new` tokens.
    fn fill(
        &self,
        session: &mut Session<'_>,
        depth: usize,
        new: usize,
        watch: &dyn Watch,
        schedule: &mut Schedule,
    ) -> Result<()> {
        if new == 0 {
            return Ok(());
        }
        let tokens = self.tokens.take(Stream::Fill, depth, depth);
        schedule.begin();
        let done = |fraction| schedule.at(fraction).iter().for_each(|at| watch.at(at));
        done(0.0);
        let progress =
            Within { progress: watch.progress(), done: &done, share: 1.0, step_rows: self.engine.step_rows() };
        session.feed(&tokens[depth - new..], &progress)?;
        schedule.end();
        Ok(())
    }

    /// Runs `test` from `mark` on: once to warm up, unless it is to be cold, then as often as asked.
    fn repeat(
        &self,
        session: &mut Session<'_>,
        mark: &Mark,
        depth: usize,
        test: Test,
        watch: &dyn Watch,
        schedule: &mut Schedule,
    ) -> Result<Vec<Repetition>> {
        let is_cold = self.options.state == State::Cold;
        let warm_up = (!is_cold).then(|| (Stream::WarmUp, warm_up(test)));
        let counted = (0..self.options.repetitions).map(|number| (Stream::Repetition(number), test));
        let mut repetitions = Vec::new();
        for (stream, test) in warm_up.into_iter().chain(counted) {
            session.rewind(mark)?;
            let tokens = self.tokens.take(stream, depth, tokens_fed(test));
            if is_cold {
                make_cold(self.engine, self.files);
            } else {
                settle(self.engine);
            }
            schedule.begin();
            let done = |fraction| schedule.at(fraction).iter().for_each(|at| watch.at(at));
            done(0.0);
            let measured = repetition(self.engine, session, test, &tokens, watch.progress(), &done)?;
            schedule.end();
            if stream != Stream::WarmUp {
                repetitions.push(measured);
            }
        }
        Ok(repetitions)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::path::Path;

    fn options() -> Options {
        Options {
            engine: EngineOptions::new("assets/demo-model", 1),
            threads: vec![],
            steps: vec![],
            depths: vec![0],
            tests: vec![Test::Prompt(8), Test::Generate(40), Test::Both(8, 40)],
            repetitions: 2,
            state: State::Warm,
            limits: false,
            text: None,
            seed: 1,
            timeline: false,
        }
    }

    #[test]
    fn every_combination_is_a_setting() {
        assert_eq!(settings(&options()), [(None, None)]);
        let lists = Options { threads: vec![1, 2], steps: vec![8, 64], ..options() };
        let wanted = [(1, 8), (1, 64), (2, 8), (2, 64)].map(|(threads, step)| (Some(threads), Some(step)));
        assert_eq!(settings(&lists), wanted);
    }

    #[test]
    fn the_schedule_has_all_that_is_run() {
        let options = Options { depths: vec![0, 16], tests: vec![Test::Generate(100)], ..options() };
        let (test, warm_up) = (Test::Generate(100), Stage::WarmUp(Test::Generate(64)));
        let measured = [Stage::Repetition(test, 1, 2), Stage::Repetition(test, 2, 2)];
        let warm = [&[warm_up][..], &measured, &[Stage::Fill(16), warm_up], &measured].concat();
        assert_eq!(stages(&options, 1), warm);
        assert_eq!(stages(&options, 3).len(), 3 * warm.len());
        let cold = [&measured[..], &[Stage::Fill(16)], &measured].concat();
        assert_eq!(stages(&Options { state: State::Cold, ..options }, 1), cold);
    }

    #[test]
    fn a_deeper_context_goes_on_from_the_one_before() {
        let fills: Vec<_> = fills(&[0, 16, 64, 64, 4, 0]).collect();
        assert_eq!(fills, [(0, 0), (16, 16), (64, 48), (64, 0), (4, 4), (0, 0)]);
    }

    #[test]
    fn the_engine_has_room_for_the_longest_test_and_learns_nothing() {
        let config = ModelConfig::load(Path::new("assets/demo-model")).unwrap();
        let lists = Options { depths: vec![16, 4], steps: vec![8, 64], threads: vec![2, 1], ..options() };
        let engine = engine_options(&lists, &config).unwrap();
        assert_eq!((engine.context, engine.step, engine.threads), (16 + 8 + 39, Some(64), Some(2)));
        assert!(!engine.learn);
        let deep = Options { depths: vec![usize::MAX], ..options() };
        let error = engine_options(&deep, &config).unwrap_err();
        assert!(error.message().contains("made for at most") && error.hint_text().is_some(), "{error}");
    }
}
