//! The measurement from its first drive to the ladder: a thread that measures, and the caller that watches it. A drive that
//! does not answer holds up the thread and never the caller, who has at any time what was measured so far.

use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use super::load::{self, Counted, Load, Pattern, read_failed};
use super::report::{Drive, Rate, Report, Rung, Share, Together};
use super::roots::{self, Root};
use super::target::{READERS_MAX, Target, Watch};
use super::{At, Options};
use crate::engine::{PIECE_BYTES, QUEUE_DEPTH};
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::plan;

/// Queue depths at which whole experts are read.
const DEPTHS: [usize; 6] = [1, 2, 4, 8, 16, READERS_MAX];
/// Parts of a drive's time alone: reading as the engine does, in sequence, single pages, and each queue depth.
const ENGINE_PART: f64 = 0.42;
const SEQUENTIAL_PART: f64 = 0.10;
const PAGE_PART: f64 = 0.03;
const DEPTH_PART: f64 = 0.075;
/// Parts of it for all drives together, and for each rung of the ladder.
const TOGETHER_PART: f64 = 1.0 / 6.0;
const RUNG_PART: f64 = 1.0 / 12.0;
/// Drives are fast at first, and many are slower when they are warm.
const FIRST: Duration = Duration::from_secs(10);
/// Buffers of reads take this part of the free memory at most.
const MEMORY_PART: u64 = 4;

/// How often the caller looks, and how long it waits for the end after an interrupt.
const LOOK: Duration = Duration::from_millis(20);
const GRACE: Duration = Duration::from_millis(250);
/// Nothing came from the drives for so long: they are given up.
const STALL: Duration = Duration::from_secs(30);

/// Measures the drives of `options.roots`. Returns what was measured, however it ended; `watch` is called now and then, from
/// the calling thread, with each notice once.
///
/// # Errors
/// Beside the report: kind `Usage` for a root that is no directory, `Io` for what failed on a drive, `Interrupted`.
pub fn measure(options: &Options, watch: &mut dyn FnMut(&At), interrupt: &Interrupt) -> (Report, Result<()>) {
    let shared = Arc::new(Shared::new(options));
    let thread = {
        let (shared, options, interrupt) = (Arc::clone(&shared), options.clone(), interrupt.clone());
        std::thread::Builder::new().name("measure".into()).spawn(move || {
            let result = Measurement { shared: &shared, options: &options, interrupt: &interrupt }.run();
            shared.lock().result = Some(result);
        })
    };
    let thread = match thread {
        Ok(thread) => thread,
        Err(cause) => return (Report::default(), Err(Error::other(format!("cannot start a thread: {cause}")))),
    };
    let mut interrupted_at = None;
    let result = loop {
        let ended = thread.is_finished();
        shared.show(watch);
        if let Some(result) = shared.lock().result.take() {
            break result;
        }
        if ended {
            break Err(Error::other("the thread that measured has ended early"));
        }
        if interrupt.is_raised() && interrupted_at.get_or_insert_with(Instant::now).elapsed() >= GRACE {
            break interrupt.check();
        }
        if shared.silent_for() >= STALL {
            break Err(shared.stalled());
        }
        std::thread::park_timeout(LOOK);
    };
    let mut report = shared.lock().report.clone();
    report.interrupted = interrupt.is_raised();
    (report, interrupt.check().and(result))
}

/// What the two threads share.
struct Shared {
    state: Mutex<State>,
    began: Instant,
    /// Milliseconds since `began` when something was last heard of a drive.
    heard: AtomicU64,
    /// Seconds that everything will take, as far as known.
    total_s: f64,
}

struct State {
    report: Report,
    activity: String,
    /// Notices that were passed on.
    shown: usize,
    result: Option<Result<()>>,
}

impl Shared {
    fn new(options: &Options) -> Self {
        let report = Report { seconds: options.seconds, read_bytes: options.read_bytes as u64, ..Report::default() };
        let state = State { report, activity: "looking".into(), shown: 0, result: None };
        let count = options.roots.len() as f64;
        let total_s = options.seconds * (count + TOGETHER_PART + RUNG_PART * (count - 1.0).max(0.0));
        Self { state: Mutex::new(state), began: Instant::now(), heard: AtomicU64::new(0), total_s }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn doing(&self, what: String) {
        self.alive();
        self.lock().activity = what;
    }

    fn show(&self, watch: &mut dyn FnMut(&At)) {
        let (activity, notices) = {
            let mut state = self.lock();
            let notices = state.report.notices[state.shown..].to_vec();
            state.shown = state.report.notices.len();
            (state.activity.clone(), notices)
        };
        let elapsed = self.began.elapsed();
        watch(&At { activity, elapsed, total: Duration::from_secs_f64(self.total_s), notices });
    }

    fn silent_for(&self) -> Duration {
        self.began.elapsed().saturating_sub(Duration::from_millis(self.heard.load(Ordering::Relaxed)))
    }

    fn stalled(&self) -> Error {
        let activity = self.lock().activity.clone();
        Error::io(format!("a drive does not answer: nothing for {} s while {activity}", STALL.as_secs()))
            .hint("a drive that was unplugged, or a network share that is gone, can hang for minutes")
    }
}

impl Watch for Shared {
    fn alive(&self) {
        self.heard.store(self.began.elapsed().as_millis() as u64, Ordering::Relaxed);
    }

    fn notice(&self, text: String) {
        self.lock().report.notices.push(text);
    }

    fn wrote(&self, written: u64, bytes: u64) {
        let activity = format!("writing a test file, {:.1} of {:.1} GB", written as f64 / 1e9, bytes as f64 / 1e9);
        self.doing(activity);
    }
}

/// The measuring thread.
struct Measurement<'a> {
    shared: &'a Shared,
    options: &'a Options,
    interrupt: &'a Interrupt,
}

/// A drive that can be measured with others.
struct Ready {
    /// Number in the report.
    number: usize,
    target: Target,
    gb_per_s: f64,
}

impl Measurement<'_> {
    fn run(&self) -> Result<()> {
        let roots = roots::find(&self.options.roots)?;
        {
            let mut state = self.shared.lock();
            state.report.notices.extend(roots::notices(&roots));
            state.report.notices.extend(self.shortened());
            state.report.drives = roots.iter().map(|root| entry(root, &roots)).collect();
        }
        let mut failure: Result<()> = Ok(());
        let mut ready = Vec::new();
        for (number, root) in roots.iter().enumerate().filter(|(number, root)| root.first == *number) {
            match self.alone(number, &root.dir) {
                Ok(target) => {
                    let gb_per_s = self.shared.lock().report.drives[number].gb_per_s.unwrap_or(0.0);
                    ready.push(Ready { number, target, gb_per_s });
                }
                Err(error) => failure = failure.and(Err(self.failed(number, error)?)),
            }
            self.share_rates(&roots, number);
        }
        self.together(ready, &mut failure)?;
        failure
    }

    /// What the user should know about the time asked for.
    fn shortened(&self) -> Option<String> {
        let first = (self.options.seconds * ENGINE_PART / 2.0).min(FIRST.as_secs_f64());
        (first < FIRST.as_secs_f64()).then(|| {
            format!(
                "--seconds {} compares the first {first:.2} s with the {first:.2} s after them; a warm drive shows after {} s and more, which takes --seconds {:.0}",
                self.options.seconds,
                FIRST.as_secs(),
                (2.0 * FIRST.as_secs_f64() / ENGINE_PART).ceil()
            )
        })
    }

    /// Notes a failure of drive `number`; the measurement goes on with the others. An interrupt ends it.
    fn failed(&self, number: usize, error: Error) -> Result<Error> {
        if matches!(error.kind(), Kind::Interrupted(_)) {
            return Err(error);
        }
        let mut state = self.shared.lock();
        let drive = &mut state.report.drives[number];
        drive.error = Some(error.message().to_owned());
        Ok(error.context(&drive.root))
    }

    /// Drive `number` by itself.
    fn alone(&self, number: usize, dir: &Path) -> Result<Target> {
        let dir = dir.display();
        self.shared.doing(format!("looking for files in {dir}"));
        let Options { roots, read_bytes, direct, .. } = self.options;
        let target = Target::find(&roots[number], *read_bytes, *direct, self.interrupt, self.shared)?;
        let update = |change: &dyn Fn(&mut Drive)| change(&mut self.shared.lock().report.drives[number]);
        update(&|drive| (drive.mode, drive.source) = (Some(target.mode()), Some(target.source)));
        let seed = number as u64 * 100;

        self.shared.doing(format!("{dir}: reading experts at random, as decoding does"));
        let time = self.time(ENGINE_PART);
        let counted = self.count(&target, Pattern::Pieces(PIECE_BYTES), QUEUE_DEPTH, time, seed)?;
        let rates = first_and_rest(&counted, time);
        let rate = rates.last().map(|rate| rate.gb_per_s);
        update(&|drive| {
            drive.gb_per_s = rate;
            drive.rates.extend(rates.clone());
        });
        let whole = |name: &'static str, pattern, depth, part| -> Result<()> {
            self.interrupt.check()?;
            self.shared.doing(format!("{dir}: {name} reads, {depth} at once"));
            let counted = self.count(&target, pattern, depth, self.time(part), seed + depth as u64)?;
            if let Some(rate) = Rate::whole(name, depth, &counted) {
                update(&|drive| drive.rates.push(rate.clone()));
            }
            Ok(())
        };
        whole("sequential", Pattern::Sequential(PIECE_BYTES), QUEUE_DEPTH, SEQUENTIAL_PART)?;
        whole("page", Pattern::Page, 1, PAGE_PART)?;
        let memory = plan::free().map_or(u64::MAX, |free| free / MEMORY_PART);
        for depth in DEPTHS {
            if (depth * self.options.read_bytes) as u64 > memory {
                self.shared.notice(format!("{dir}: {depth} reads at once are left out: too little memory is free"));
                continue;
            }
            whole("random", Pattern::Random, depth, DEPTH_PART)?;
        }
        update(&|drive| drive.mode = Some(target.mode()));
        target.take_notice().into_iter().for_each(|notice| self.shared.notice(notice));
        self.interrupt.check()?;
        Ok(target)
    }

    fn time(&self, part: f64) -> Duration {
        Duration::from_secs_f64(self.options.seconds * part)
    }

    fn count(&self, target: &Target, pattern: Pattern, depth: usize, time: Duration, seed: u64) -> Result<Counted> {
        target.forget();
        let load = Load { target, pattern, depth, seed };
        load::run(&[load], time, self.interrupt, &|| self.shared.alive())?.remove(0).map_err(read_failed)
    }

    /// Roots on the drive of `number` have its rates.
    fn share_rates(&self, roots: &[Root], number: usize) {
        let mut state = self.shared.lock();
        let measured = state.report.drives[number].clone();
        for (other, _) in roots.iter().enumerate().filter(|(other, root)| root.first == number && *other != number) {
            let Drive { mode, source, gb_per_s, rates, error, .. } = measured.clone();
            let drive = &mut state.report.drives[other];
            *drive = Drive { mode, source, gb_per_s, rates, error, ..std::mem::take(drive) };
        }
    }

    /// All of `ready` at once, then the ladder.
    fn together(&self, mut ready: Vec<Ready>, failure: &mut Result<()>) -> Result<()> {
        ready.sort_by(|a, b| b.gb_per_s.total_cmp(&a.gb_per_s));
        let all = loop {
            if ready.is_empty() {
                return Ok(());
            }
            self.shared.doing(format!("all {} drives together", ready.len()));
            let (counted, failed) = self.at_once(&ready, self.time(TOGETHER_PART), failure)?;
            if failed.is_empty() {
                break counted;
            }
            // Once more without those that failed.
            failed.into_iter().rev().for_each(|at| drop(ready.remove(at)));
        };
        let seconds = all.iter().map(|counted| counted.seconds).fold(0.0, f64::max);
        let rung = |count: usize, counted: &[Counted]| {
            let seconds = counted.iter().map(|counted| counted.seconds).fold(0.0, f64::max);
            Rung {
                roots: count,
                gb_per_s: counted.iter().map(|counted| counted.bytes).sum::<u64>() as f64 / 1e9 / seconds,
                sum_gb_per_s: ready[..count].iter().map(|drive| drive.gb_per_s).sum(),
                added: self.options.roots[ready[count - 1].number].display().to_string(),
                seconds,
            }
        };
        let last = rung(ready.len(), &all);
        let shares = ready.iter().zip(&all).map(|(drive, counted)| Share {
            root: self.options.roots[drive.number].display().to_string(),
            gb_per_s: counted.bytes as f64 / 1e9 / seconds,
            timeline: timeline(counted),
        });
        self.shared.lock().report.together = Some(Together {
            seconds,
            gb_per_s: last.gb_per_s,
            sum_gb_per_s: last.sum_gb_per_s,
            drives: shares.collect(),
        });
        for count in 1..ready.len() {
            self.shared.doing(format!("the {count} fastest drives together"));
            match self.at_once(&ready[..count], self.time(RUNG_PART), failure)? {
                (counted, failed) if failed.is_empty() => self.shared.lock().report.ladder.push(rung(count, &counted)),
                // What is missing now would be missing in all that follows.
                _ => return Ok(()),
            }
        }
        self.shared.lock().report.ladder.push(last);
        Ok(())
    }

    /// What each drive of `drives` counted, and which of them failed.
    fn at_once(
        &self,
        drives: &[Ready],
        time: Duration,
        failure: &mut Result<()>,
    ) -> Result<(Vec<Counted>, Vec<usize>)> {
        let mut all = Vec::new();
        let mut failed = Vec::new();
        for (at, counted) in self.read_together(drives, time)?.into_iter().enumerate() {
            match counted {
                Ok(counted) => all.push(counted),
                Err(error) => {
                    let error = self.failed(drives[at].number, read_failed(error))?;
                    if failure.is_ok() {
                        *failure = Err(error);
                    }
                    failed.push(at);
                }
            }
        }
        self.interrupt.check()?;
        Ok((all, failed))
    }

    fn read_together(&self, drives: &[Ready], time: Duration) -> Result<Vec<Result<Counted, crate::store::ReadError>>> {
        let loads: Vec<Load<'_>> = drives
            .iter()
            .map(|drive| {
                drive.target.forget();
                let seed = (drive.number * 100 + 50 + drives.len()) as u64;
                Load { target: &drive.target, pattern: Pattern::Pieces(PIECE_BYTES), depth: QUEUE_DEPTH, seed }
            })
            .collect();
        load::run(&loads, time, self.interrupt, &|| self.shared.alive())
    }
}

/// The report's entry of a root before anything is measured.
fn entry(root: &Root, roots: &[Root]) -> Drive {
    let first = &roots[root.first];
    let is_first = std::ptr::eq(first, root);
    Drive {
        root: root.dir.display().to_string(),
        device: root.device.name.clone(),
        fs: root.device.fs.clone(),
        same_device_as: (!is_first).then(|| first.dir.display().to_string()),
        ..Drive::default()
    }
}

/// The begin of a long read and the rest of it.
fn first_and_rest(counted: &Counted, time: Duration) -> Vec<Rate> {
    let first = FIRST.min(time / 2).as_secs_f64();
    let lasted = counted.seconds.min(time.as_secs_f64());
    let whole = (lasted / counted.interval_s + 1e-6) as usize;
    let split = ((first / counted.interval_s).round() as usize).clamp(1, whole.max(1));
    let first = Rate::part("first", QUEUE_DEPTH, counted, (0, split.min(whole)));
    let rest = Rate::part("sustained", QUEUE_DEPTH, counted, (split, whole));
    let both: Vec<Rate> = first.into_iter().chain(rest).collect();
    if both.is_empty() { Rate::whole("first", QUEUE_DEPTH, counted).into_iter().collect() } else { both }
}

/// Middle of each interval and its rate; the last one, in which reads ran out, is left out.
fn timeline(counted: &Counted) -> Vec<(f64, f64)> {
    let whole = (counted.seconds / counted.interval_s) as usize;
    let intervals = counted.intervals.iter().take(whole).enumerate();
    intervals
        .map(|(number, bytes)| ((number as f64 + 0.5) * counted.interval_s, bytes / 1e9 / counted.interval_s))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn counted(seconds: f64, intervals: usize) -> Counted {
        let intervals = vec![1e9; intervals];
        Counted {
            seconds,
            interval_s: 1.0,
            bytes: 1_000_000_000 * intervals.len() as u64,
            intervals,
            ..Counted::default()
        }
    }

    #[test]
    fn a_long_read_has_ten_seconds_at_first_and_a_short_one_half_of_it() {
        for (asked, first, rest) in [(25, 10.0, 15.0), (12, 6.0, 6.0)] {
            let rates = first_and_rest(&counted(asked as f64 + 0.3, asked + 1), Duration::from_secs(asked as u64));
            let names: Vec<_> = rates.iter().map(|rate| (rate.pattern, rate.seconds)).collect();
            assert_eq!(names, [("first", first), ("sustained", rest)]);
            assert!(rates.iter().all(|rate| (rate.gb_per_s - 1.0).abs() < 1e-9));
        }
    }

    #[test]
    fn a_read_that_was_cut_short_has_what_it_came_to() {
        let rates = first_and_rest(&counted(4.5, 5), Duration::from_secs(60));
        assert_eq!(rates.iter().map(|rate| (rate.pattern, rate.seconds)).collect::<Vec<_>>(), [("first", 4.0)]);
        let rates = first_and_rest(&counted(0.5, 1), Duration::from_secs(60));
        assert_eq!(rates[0].seconds, 0.5);
        assert!(first_and_rest(&counted(0.0, 0), Duration::from_secs(60)).is_empty());
    }

    #[test]
    fn a_timeline_has_no_interval_in_which_the_reads_ran_out() {
        assert_eq!(timeline(&counted(2.4, 3)), [(0.5, 1.0), (1.5, 1.0)]);
    }
}
