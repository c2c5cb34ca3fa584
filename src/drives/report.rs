//! What was measured, as `--output json` prints it. Rates are in 10⁹ bytes a second; what was not measured is null or absent.

use serde::Serialize;

use super::load::Counted;
use super::target::Source;

/// Everything measured, as far as it came.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Report {
    /// Seconds of reading asked for each drive alone.
    pub seconds: f64,
    /// Bytes of a whole random read: an expert.
    pub read_bytes: u64,
    /// One entry a root, as given.
    pub drives: Vec<Drive>,
    /// All drives at once; null when that was not reached.
    pub together: Option<Together>,
    /// The drives at once, the fastest alone first, then with the next.
    pub ladder: Vec<Rung>,
    /// What the user was told meanwhile.
    pub notices: Vec<String>,
    /// Whether a signal ended the measurement.
    pub interrupted: bool,
}

/// One root and its drive.
#[derive(Debug, Clone, Default, Serialize)]
pub struct Drive {
    /// Directory, as given.
    pub root: String,
    /// The physical drive.
    pub device: String,
    /// Kind of its file system; null where the system does not tell.
    pub fs: Option<String>,
    /// `direct` or `buffered`, as found by reading; null when it was not reached.
    pub mode: Option<&'static str>,
    /// The root before it that is on the same drive: both have the rates of the one measurement.
    pub same_device_as: Option<String>,
    /// What it was measured with.
    pub source: Option<Source>,
    /// What it gives in the long run, read as experts are.
    pub gb_per_s: Option<f64>,
    /// The measurements.
    pub rates: Vec<Rate>,
    /// Why it was not measured to the end.
    pub error: Option<String>,
}

/// One way of reading a drive.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rate {
    /// `first` and `sustained`: begin and rest of a long read of random experts in pieces, as decoding reads them;
    /// `sequential`; `page`: one page at a random place; `random`: whole experts at random places.
    pub pattern: &'static str,
    /// Reads in flight.
    pub depth: usize,
    /// Bytes of one read.
    pub read_bytes: usize,
    /// 10⁹ bytes a second.
    pub gb_per_s: f64,
    /// Reads that began in this time.
    pub reads: usize,
    /// Bytes.
    pub bytes: u64,
    /// Length of the measurement.
    pub seconds: f64,
    /// Half of the reads took no longer.
    pub p50_ms: Option<f64>,
    /// 9 of 10 took no longer.
    pub p90_ms: Option<f64>,
    /// 99 of 100 took no longer.
    pub p99_ms: Option<f64>,
    /// The longest.
    pub max_ms: Option<f64>,
}

/// All drives at once.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Together {
    /// Length of the measurement.
    pub seconds: f64,
    /// All of them.
    pub gb_per_s: f64,
    /// What they gave alone, summed.
    pub sum_gb_per_s: f64,
    /// Each of them.
    pub drives: Vec<Share>,
}

/// One drive among others.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Share {
    /// Its root.
    pub root: String,
    /// Its rate.
    pub gb_per_s: f64,
    /// Seconds and rate over time.
    pub timeline: Vec<(f64, f64)>,
}

/// Some drives at once.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Rung {
    /// How many drives.
    pub roots: usize,
    /// All of them.
    pub gb_per_s: f64,
    /// What they gave alone, summed.
    pub sum_gb_per_s: f64,
    /// The root that was added.
    pub added: String,
    /// Length of the measurement.
    pub seconds: f64,
}

impl Rate {
    /// All of `counted`; `None` when nothing was read.
    pub(super) fn whole(pattern: &'static str, depth: usize, counted: &Counted) -> Option<Self> {
        let rate = counted.rate();
        let latencies = counted.reads.iter().map(|(_, took)| *took).collect();
        (rate.is_finite() && counted.bytes > 0)
            .then(|| Self::of(pattern, depth, counted, counted.bytes as f64, counted.seconds, latencies))
    }

    /// The intervals `from` to `to` of `counted`; `None` when nothing was read then.
    pub(super) fn part(
        pattern: &'static str,
        depth: usize,
        counted: &Counted,
        (from, to): (usize, usize),
    ) -> Option<Self> {
        let bytes = counted.bytes_within(from, to);
        let (start, end) = (from as f64 * counted.interval_s, to as f64 * counted.interval_s);
        let within = counted.reads.iter().filter(|(begin, _)| (start..end).contains(&f64::from(*begin)));
        let latencies = within.map(|(_, took)| *took).collect();
        (to > from && bytes > 0.0).then(|| Self::of(pattern, depth, counted, bytes, end - start, latencies))
    }

    fn of(
        pattern: &'static str,
        depth: usize,
        counted: &Counted,
        bytes: f64,
        seconds: f64,
        mut latencies: Vec<f32>,
    ) -> Self {
        latencies.sort_by(f32::total_cmp);
        let at = |part: f64| quantile(&latencies, part).map(|seconds| f64::from(seconds) * 1e3);
        Self {
            pattern,
            depth,
            read_bytes: counted.read_bytes,
            gb_per_s: bytes / 1e9 / seconds,
            reads: latencies.len(),
            bytes: bytes.round() as u64,
            seconds,
            p50_ms: at(0.5),
            p90_ms: at(0.9),
            p99_ms: at(0.99),
            max_ms: at(1.0),
        }
    }
}

/// The smallest of the ascending `values` that at least `part` of them do not exceed.
fn quantile(values: &[f32], part: f64) -> Option<f32> {
    let rank = (part * values.len() as f64).ceil() as usize;
    values.get(rank.max(1) - 1).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_values_that_were_measured() {
        let values: Vec<f32> = (1..=200).map(|value| value as f32).collect();
        for (part, wanted) in [(0.5, 100.0), (0.9, 180.0), (0.99, 198.0), (1.0, 200.0)] {
            assert_eq!(quantile(&values, part), Some(wanted));
        }
        assert_eq!((quantile(&[7.0], 0.5), quantile(&[], 0.5)), (Some(7.0), None));
    }

    #[test]
    fn a_part_counts_its_own_intervals_and_reads() {
        let counted = Counted {
            reads: vec![(0.0, 0.010), (1.5, 0.020), (2.5, 0.030)],
            read_bytes: 1000,
            bytes: 3_000_000_000,
            seconds: 3.0,
            interval_s: 1.0,
            intervals: vec![1.5e9, 1e9, 0.5e9],
        };
        let first = Rate::part("first", 8, &counted, (0, 2)).unwrap();
        assert_eq!((first.gb_per_s, first.reads, first.seconds), (1.25, 2, 2.0));
        assert!((first.max_ms.unwrap() - 20.0).abs() < 1e-3);
        let rest = Rate::part("sustained", 8, &counted, (2, 3)).unwrap();
        assert_eq!((rest.gb_per_s, rest.reads), (0.5, 1));
        assert_eq!(Rate::whole("random", 8, &counted).unwrap().gb_per_s, 1.0);
    }

    #[test]
    fn nothing_read_is_no_rate() {
        let none = Counted { interval_s: 1.0, ..Counted::default() };
        assert_eq!((Rate::whole("random", 1, &none), Rate::part("first", 1, &none, (0, 1))), (None, None));
        assert_eq!(Rate::part("first", 1, &none, (1, 1)), None);
    }
}
