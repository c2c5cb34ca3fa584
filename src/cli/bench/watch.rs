//! Rows to stdout, and to stderr what is run now and how long all of it will take.

use std::cell::RefCell;
use std::io::{IsTerminal, stderr};
use std::ops::ControlFlow;
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::table::Printer;
use crate::bench::{At, Row, Watch};
use crate::cli::args::Shown;
use crate::cli::output::{self, Written};
use crate::engine::Progress;
use crate::error::Result;
use crate::report::progress::Reporter;

/// Between two drawings on a terminal, and between two lines elsewhere.
const BAR_INTERVAL: Duration = Duration::from_millis(100);
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// Before the first line where there is no terminal: a short run says nothing.
const FIRST_LINE_AFTER: Duration = Duration::from_millis(1500);

/// Shows a measurement.
pub(super) struct Screen<'a> {
    reporter: &'a Reporter,
    printer: Printer,
    rows: Vec<Row>,
    quiet: bool,
    shown: RefCell<Shower>,
}

/// What was last shown.
struct Shower {
    on_terminal: bool,
    bar: Option<ProgressBar>,
    due: Instant,
}

impl<'a> Screen<'a> {
    pub(super) fn new(shown: &Shown, reporter: &'a Reporter, printer: Printer) -> Self {
        let on_terminal = stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let first = if on_terminal { BAR_INTERVAL } else { FIRST_LINE_AFTER };
        let shower = Shower { on_terminal, bar: None, due: Instant::now() + first };
        Self { reporter, printer, rows: Vec::new(), quiet: shown.quiet, shown: RefCell::new(shower) }
    }

    /// What is left to print, and the rows.
    pub(super) fn finish(self) -> (Printer, Vec<Row>) {
        self.clear();
        (self.printer, self.rows)
    }

    fn clear(&self) {
        self.reporter.finish();
        if let Some(bar) = self.shown.borrow_mut().bar.take() {
            bar.finish_and_clear();
        }
    }
}

impl Watch for Screen<'_> {
    fn progress(&self) -> &dyn Progress {
        self.reporter
    }

    fn at(&self, at: &At) {
        let mut shown = self.shown.borrow_mut();
        if self.quiet || Instant::now() < shown.due {
            return;
        }
        self.reporter.finish();
        let line = line(at);
        shown.due = Instant::now() + if shown.on_terminal { BAR_INTERVAL } else { LINE_INTERVAL };
        match shown.on_terminal {
            true => shown.bar.get_or_insert_with(new_bar).set_message(line),
            false => output::stderr(line),
        }
    }

    fn row(&mut self, row: &Row) -> Result<ControlFlow<()>> {
        self.clear();
        self.rows.push(row.clone());
        Ok(match self.printer.row(row)? {
            Written::Yes => ControlFlow::Continue(()),
            Written::PipeClosed => ControlFlow::Break(()),
        })
    }
}

fn new_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(None, ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{spinner} {wide_msg}").expect("the template is well-formed");
    // A layer can take long; the spinner shows that it is at work.
    bar.enable_steady_tick(Duration::from_millis(200));
    bar.with_style(style)
}

fn line(at: &At) -> String {
    let left = at.left.map_or(String::new(), |left| format!(", {} left", duration(left)));
    format!("{}/{}: {}, {:.0} %{left}", at.number, at.count, at.stage, 100.0 * at.fraction.clamp(0.0, 1.0))
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
    use crate::bench::{Stage, Test};

    #[test]
    fn a_line_says_what_runs_and_how_long_is_left() {
        let stage = Stage::Repetition(Test::Prompt(512), 2, 3);
        let at = At { number: 3, count: 9, stage, fraction: 0.42, left: Some(Duration::from_secs(61)) };
        assert_eq!(line(&at), "3/9: pp512, repetition 2/3, 42 %, 1 min 01 s left");
        assert_eq!(line(&At { left: None, ..at }), "3/9: pp512, repetition 2/3, 42 %");
    }
}
