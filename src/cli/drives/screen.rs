//! What is measured now, on stderr: a line that is drawn anew on a terminal, a line now and then elsewhere.

use std::io::{IsTerminal, stderr};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use crate::cli::args::Shown;
use crate::cli::output;
use crate::drives::At;

/// Between two drawings on a terminal, and between two lines elsewhere.
const BAR_INTERVAL: Duration = Duration::from_millis(100);
const LINE_INTERVAL: Duration = Duration::from_secs(10);
/// Before the first line where there is no terminal: a short run says nothing.
const FIRST_LINE_AFTER: Duration = Duration::from_millis(1500);

/// Shows a measurement.
pub(super) struct Screen {
    quiet: bool,
    on_terminal: bool,
    bar: Option<ProgressBar>,
    due: Instant,
}

impl Screen {
    pub(super) fn new(shown: &Shown) -> Self {
        let on_terminal = stderr().is_terminal() && std::env::var_os("TERM").is_none_or(|term| term != "dumb");
        let first = if on_terminal { BAR_INTERVAL } else { FIRST_LINE_AFTER };
        Self { quiet: shown.quiet, on_terminal, bar: None, due: Instant::now() + first }
    }

    pub(super) fn show(&mut self, at: &At) {
        if self.quiet {
            return;
        }
        for notice in &at.notices {
            self.clear();
            output::stderr(format_args!("note: {notice}"));
        }
        if Instant::now() < self.due {
            return;
        }
        let line = line(at);
        if self.on_terminal {
            self.due = Instant::now() + BAR_INTERVAL;
            self.bar.get_or_insert_with(new_bar).set_message(line);
        } else {
            self.due = Instant::now() + LINE_INTERVAL;
            output::stderr(line);
        }
    }

    pub(super) fn clear(&mut self) {
        if let Some(bar) = self.bar.take() {
            bar.finish_and_clear();
        }
    }
}

/// The time first, since a narrow terminal cuts the end.
fn line(at: &At) -> String {
    format!("{} s of about {} s: {}", at.elapsed.as_secs(), at.total.as_secs_f64().ceil(), at.activity)
}

fn new_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(1), ProgressDrawTarget::stderr());
    bar.with_style(ProgressStyle::with_template("{wide_msg}").expect("the template is well-formed"))
}
