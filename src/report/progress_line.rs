//! A phase's figures and the line that shows them.

use std::time::Duration;

/// What the engine last said.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) enum Figures {
    /// Trunk bytes.
    Loading { done: u64, total: u64 },
    /// Prompt tokens, the layer of the step in work, and expert bytes read since the engine was opened.
    Prefill { done: usize, total: usize, layer: usize, layers: usize, bytes: u64 },
    /// Bytes of long work with files, which `what` names.
    Work { what: &'static str, done: u64, total: u64 },
}

/// Rows of a step until one has been seen to end.
const STEP_ROWS_GUESS: usize = 4096;

/// A phase from its first figures to its last.
#[derive(Debug, Clone)]
pub(super) struct Phase {
    figures: Figures,
    bytes_at_start: u64,
    step_rows: usize,
}

impl Phase {
    pub fn new(figures: Figures) -> Self {
        let bytes_at_start = match figures {
            Figures::Loading { .. } | Figures::Work { .. } => 0,
            Figures::Prefill { bytes, .. } => bytes,
        };
        Self { figures, bytes_at_start, step_rows: STEP_ROWS_GUESS }
    }

    /// Whether `next` belongs to this phase, or begins another.
    pub fn continues(&self, next: &Figures) -> bool {
        match (&self.figures, next) {
            (Figures::Loading { total: a, .. }, Figures::Loading { total: b, .. }) => a == b,
            (Figures::Prefill { done, total: a, .. }, Figures::Prefill { done: next, total: b, .. }) => {
                a == b && next >= done
            }
            (Figures::Work { what: a, total: b, .. }, Figures::Work { what: c, total: d, .. }) => a == c && b == d,
            _ => false,
        }
    }

    pub fn update(&mut self, next: Figures) {
        if let (Figures::Prefill { done, .. }, Figures::Prefill { done: next, .. }) = (self.figures, next)
            && next > done
        {
            self.step_rows = next - done;
        }
        self.figures = next;
    }

    /// How much of the phase is behind, 0 to 1.
    pub fn fraction(&self) -> f64 {
        let fraction = match self.figures {
            Figures::Loading { done, total } | Figures::Work { done, total, .. } => done as f64 / total.max(1) as f64,
            Figures::Prefill { done, total, layer, layers, .. } => {
                let rows = self.step_rows.min(total.saturating_sub(done));
                let in_work = rows as f64 * layer as f64 / layers.max(1) as f64;
                (done as f64 + in_work) / total.max(1) as f64
            }
        };
        fraction.clamp(0.0, 1.0)
    }

    /// The line for a phase that has run for `elapsed`.
    pub fn line(&self, elapsed: Duration) -> String {
        // Early in the line, which a narrow terminal cuts.
        let eta = eta(self.fraction(), elapsed).map(|left| format!(", {} left", duration(left))).unwrap_or_default();
        match self.figures {
            Figures::Loading { done, total } => {
                let (size, rate) = (amount_of(done, total), rate(done, elapsed));
                format!("loading {size}{rate}{eta}")
            }
            Figures::Work { what, done, total } => {
                let (size, rate) = (amount_of(done, total), rate(done, elapsed));
                format!("{what} {size}{rate}{eta}")
            }
            Figures::Prefill { done, total, layer, layers, bytes } => {
                let bytes = bytes.saturating_sub(self.bytes_at_start);
                let read = if bytes == 0 { String::new() } else { format!(", {}", amount(bytes)) };
                let rate = rate(bytes, elapsed);
                format!("prompt {done}/{total} tokens{eta}, layer {layer}/{layers}{read}{rate}")
            }
        }
    }
}

/// `None` before anything is known.
fn eta(fraction: f64, elapsed: Duration) -> Option<Duration> {
    if fraction <= 0.0 {
        return None;
    }
    Duration::try_from_secs_f64(elapsed.as_secs_f64() * (1.0 - fraction) / fraction).ok()
}

fn rate(bytes: u64, elapsed: Duration) -> String {
    let seconds = elapsed.as_secs_f64();
    if bytes == 0 || seconds < 0.001 {
        return String::new();
    }
    format!(" at {:.2} GB/s", bytes as f64 / 1e9 / seconds)
}

fn amount_of(done: u64, total: u64) -> String {
    let (unit, name) = unit(total);
    format!("{:.1} of {:.1} {name}", done as f64 / unit, total as f64 / unit)
}

fn amount(bytes: u64) -> String {
    let (unit, name) = unit(bytes);
    format!("{:.1} {name}", bytes as f64 / unit)
}

/// Drives are sold and measured in powers of 1000.
fn unit(bytes: u64) -> (f64, &'static str) {
    if bytes >= 1_000_000_000 { (1e9, "GB") } else { (1e6, "MB") }
}

fn duration(time: Duration) -> String {
    let seconds = time.as_secs_f64().ceil() as u64;
    match seconds {
        0..60 => format!("{seconds} s"),
        60..3600 => format!("{} min {:02} s", seconds / 60, seconds % 60),
        _ => format!("{} h {:02} min", seconds / 3600, seconds % 3600 / 60),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefill(done: usize, layer: usize, bytes: u64) -> Figures {
        Figures::Prefill { done, total: 1000, layer, layers: 10, bytes }
    }

    #[test]
    fn loading_shows_size_rate_and_time_left() {
        let phase = Phase::new(Figures::Loading { done: 30_000_000_000, total: 120_000_000_000 });
        assert_eq!(phase.line(Duration::from_secs(10)), "loading 30.0 of 120.0 GB at 3.00 GB/s, 30 s left");
    }

    #[test]
    fn work_with_files_is_named() {
        let figures = Figures::Work { what: "packing", done: 1_000_000_000, total: 4_000_000_000 };
        let phase = Phase::new(figures);
        assert_eq!(phase.line(Duration::from_secs(2)), "packing 1.0 of 4.0 GB at 0.50 GB/s, 6 s left");
        assert!(!phase.continues(&Figures::Work { what: "reading", done: 0, total: 4_000_000_000 }));
    }

    #[test]
    fn prefill_counts_the_layers_of_the_step_in_work() {
        let mut phase = Phase::new(prefill(0, 1, 5_000_000_000));
        phase.update(prefill(0, 5, 7_000_000_000));
        assert!((phase.fraction() - 0.5).abs() < 1e-9, "the prompt is taken for one step");
        phase.update(prefill(100, 5, 9_000_000_000));
        assert!((phase.fraction() - 0.15).abs() < 1e-9, "steps are seen to have 100 rows");
        assert_eq!(
            phase.line(Duration::from_secs(60)),
            "prompt 100/1000 tokens, 5 min 40 s left, layer 5/10, 4.0 GB at 0.07 GB/s"
        );
    }

    #[test]
    fn figures_of_nothing_make_no_odd_numbers() {
        for figures in [
            Figures::Loading { done: 0, total: 0 },
            Figures::Prefill { done: 0, total: 0, layer: 0, layers: 0, bytes: 0 },
            Figures::Prefill { done: 9, total: 3, layer: 7, layers: 2, bytes: u64::MAX },
        ] {
            let line = Phase::new(figures).line(Duration::ZERO);
            assert!(!line.contains("NaN") && !line.contains("inf"), "{line}");
        }
    }

    #[test]
    fn another_prompt_is_another_phase() {
        let phase = Phase::new(prefill(500, 3, 0));
        assert!(phase.continues(&prefill(600, 1, 0)));
        assert!(!phase.continues(&prefill(0, 1, 0)));
        assert!(!phase.continues(&Figures::Loading { done: 0, total: 1 }));
    }
}
