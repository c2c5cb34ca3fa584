//! What each drive delivers over time, sampled beside the measurement.

use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use crate::engine::Engine;

/// Between two samples. The drives report whole reads, some milliseconds each.
const INTERVAL: Duration = Duration::from_millis(100);
/// When a timeline has this many samples, every other one is dropped, so that it stays small however long it runs.
const SAMPLES_MAX: usize = 4096;

/// Bytes of all drives over time.
#[derive(Debug, Clone, Default)]
pub struct Timeline {
    /// Seconds since the measurement began, and bytes of each drive until then.
    samples: Vec<(f64, Vec<u64>)>,
    /// Directory each drive is known by.
    paths: Vec<String>,
    /// Of so many samples one is kept.
    stride: usize,
    seen: usize,
}

/// One drive's rate over time.
#[derive(Debug, Clone, PartialEq)]
pub struct Drive {
    /// Directory it is known by.
    pub path: String,
    /// Seconds since the measurement began, and 10⁹ bytes a second since the point before.
    pub points: Vec<(f64, f64)>,
}

impl Timeline {
    /// Samples `engine` while `work` runs.
    pub(super) fn record<T>(&mut self, engine: &Engine, start: Instant, work: impl FnOnce() -> T) -> T {
        let ended = AtomicBool::new(false);
        std::thread::scope(|scope| {
            let sampler = std::thread::Builder::new().name("timeline".into()).spawn_scoped(scope, || {
                while !ended.load(Ordering::Relaxed) {
                    self.add(engine, start);
                    std::thread::park_timeout(INTERVAL);
                }
                self.add(engine, start);
            });
            // Without the thread there is no timeline; the measurement is worth more.
            let sampler = sampler.ok();
            let _end = End { ended: &ended, sampler: sampler.as_ref().map(|sampler| sampler.thread()) };
            work()
        })
    }

    fn add(&mut self, engine: &Engine, start: Instant) {
        let drives = engine.store_stats().drives;
        let bytes = drives.iter().map(|drive| drive.bytes).collect();
        if self.paths.len() != drives.len() {
            self.paths = drives.into_iter().map(|drive| drive.path).collect();
        }
        self.push(start.elapsed().as_secs_f64(), bytes);
    }

    fn push(&mut self, at: f64, bytes: Vec<u64>) {
        self.stride = self.stride.max(1);
        if self.seen.is_multiple_of(self.stride) {
            self.samples.push((at, bytes));
        }
        self.seen += 1;
        if self.samples.len() >= SAMPLES_MAX {
            let mut number = 0;
            self.samples.retain(|_| {
                number += 1;
                number % 2 == 1
            });
            self.stride *= 2;
        }
    }

    /// Rates of each drive.
    pub fn drives(&self) -> Vec<Drive> {
        let drive = |(number, path): (usize, &String)| {
            let points = self.samples.windows(2).filter_map(|pair| {
                let [(before, had), (at, has)] = pair else { return None };
                let bytes = has.get(number)?.saturating_sub(*had.get(number)?) as f64;
                (at > before).then(|| (*at, bytes / 1e9 / (at - before)))
            });
            Drive { path: path.clone(), points: points.collect() }
        };
        self.paths.iter().enumerate().map(drive).collect()
    }
}

/// Ends the sampling, be it by an unwinding panic.
struct End<'a> {
    ended: &'a AtomicBool,
    sampler: Option<&'a std::thread::Thread>,
}

impl Drop for End<'_> {
    fn drop(&mut self) {
        self.ended.store(true, Ordering::Relaxed);
        if let Some(sampler) = self.sampler {
            sampler.unpark();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rates_are_what_came_between_two_samples() {
        let mut timeline = Timeline { paths: vec!["a".into(), "b".into()], ..Timeline::default() };
        timeline.push(1.0, vec![0, 0]);
        timeline.push(3.0, vec![4_000_000_000, 0]);
        timeline.push(3.0, vec![4_000_000_000, 0]);
        timeline.push(4.0, vec![4_000_000_000, 1_000_000_000]);
        let drives = timeline.drives();
        assert_eq!(drives[0].points, [(3.0, 2.0), (4.0, 0.0)]);
        assert_eq!(drives[1].points, [(3.0, 0.0), (4.0, 1.0)]);
    }

    #[test]
    fn a_long_timeline_stays_small_and_whole() {
        let mut timeline = Timeline { paths: vec!["a".into()], ..Timeline::default() };
        for second in 0..100_000_u64 {
            timeline.push(second as f64, vec![second * 1_000_000_000]);
        }
        let points = &timeline.drives()[0].points;
        assert!((1000..SAMPLES_MAX).contains(&points.len()), "{}", points.len());
        assert!(points.iter().all(|(_, rate)| (rate - 1.0).abs() < 1e-9));
        assert!(points[points.len() - 1].0 > 99_000.0);
    }
}
