//! Progress on stderr: a bar on a terminal, a line now and then elsewhere, nothing with `-q`.
//!
//! The engine's calls only store figures; a thread of its own shows them, so that a step of many minutes is seen to live
//! although it reports nothing, and a tiny model's thousand layers a second cost nothing.

use std::env;
use std::ffi::OsStr;
use std::io::{IsTerminal, stderr};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};

use super::progress_line::{Figures, Phase};
use crate::cli::args::Shown;
use crate::cli::output;
use crate::engine::Progress;

/// A phase that ends sooner is not shown.
const SHOWN_AFTER: Duration = Duration::from_millis(500);
/// Between two drawings of the bar.
const BAR_INTERVAL: Duration = Duration::from_millis(200);
/// Before the first line where there is no terminal, and between the lines after it.
const FIRST_LINE_AFTER: Duration = Duration::from_millis(1500);
const LINE_INTERVAL: Duration = Duration::from_secs(10);

/// Shows loading, prefill and notices.
pub struct Reporter {
    quiet: bool,
    screen: Option<Arc<Screen>>,
    thread: Option<JoinHandle<()>>,
}

impl Reporter {
    /// As the flags say.
    pub fn new(shown: &Shown) -> Self {
        if shown.quiet {
            return Self { quiet: true, screen: None, thread: None };
        }
        let on_terminal = stderr().is_terminal() && env::var_os("TERM").as_deref() != Some(OsStr::new("dumb"));
        let screen = Arc::new(Screen::new(on_terminal));
        let shared = Arc::clone(&screen);
        // Without the thread nothing is shown, which is no reason to end the run.
        let thread = thread::Builder::new().name("progress".into()).spawn(move || shared.show_until_closed()).ok();
        Self { quiet: false, screen: Some(screen), thread }
    }

    /// `done` of `total` bytes of long work with files are done; `what` names it (`packing`).
    pub fn working(&self, what: &'static str, done: u64, total: u64) {
        self.update(Figures::Work { what, done, total });
    }

    /// Clears what is shown, before the answer begins.
    pub fn finish(&self) {
        if let Some(screen) = &self.screen {
            let mut state = screen.lock();
            state.phase = None;
            screen.clear(&mut state);
        }
    }

    fn update(&self, figures: Figures) {
        let Some(screen) = &self.screen else { return };
        let mut state = screen.lock();
        match &mut state.phase {
            Some(running) if running.phase.continues(&figures) => running.phase.update(figures),
            _ => {
                screen.clear(&mut state);
                state.phase = Some(Running { phase: Phase::new(figures), began: Instant::now(), shown: None });
                screen.changed.notify_one();
            }
        }
    }
}

impl Drop for Reporter {
    fn drop(&mut self) {
        self.finish();
        if let Some(screen) = &self.screen {
            screen.lock().closed = true;
            screen.changed.notify_one();
        }
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Progress for Reporter {
    fn loading(&self, done: u64, total: u64) {
        self.update(Figures::Loading { done, total });
    }

    fn prefill(&self, done: usize, total: usize, layer: usize, layers: usize, bytes: u64) {
        self.update(Figures::Prefill { done, total, layer, layers, bytes });
    }

    fn notice(&self, text: &str) {
        if self.quiet {
            return;
        }
        if let Some(screen) = &self.screen {
            let mut state = screen.lock();
            screen.clear(&mut state);
            output::stderr(format_args!("note: {text}"));
        }
    }

    fn warning(&self, text: &str) {
        if self.quiet {
            return output::stderr(format_args!("note: {text}"));
        }
        self.notice(text);
    }
}

/// What the calling thread and the showing thread share.
struct Screen {
    on_terminal: bool,
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    phase: Option<Running>,
    bar: Option<ProgressBar>,
    closed: bool,
}

struct Running {
    phase: Phase,
    began: Instant,
    shown: Option<Instant>,
}

impl Screen {
    fn new(on_terminal: bool) -> Self {
        Self { on_terminal, state: Mutex::default(), changed: Condvar::new() }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn clear(&self, state: &mut State) {
        if let Some(bar) = state.bar.take() {
            bar.finish_and_clear();
        }
    }

    fn show_until_closed(&self) {
        let mut state = self.lock();
        while !state.closed {
            let wait = self.show_if_due(&mut state);
            state = match wait {
                Some(wait) => self.changed.wait_timeout(state, wait).unwrap_or_else(PoisonError::into_inner).0,
                None => self.changed.wait(state).unwrap_or_else(PoisonError::into_inner),
            };
        }
    }

    /// Shows the phase when its time has come; returns how long to wait for the next time, `None` while no phase runs.
    fn show_if_due(&self, state: &mut State) -> Option<Duration> {
        let State { phase, bar, .. } = state;
        let running = phase.as_mut()?;
        let (first, interval) =
            if self.on_terminal { (SHOWN_AFTER, BAR_INTERVAL) } else { (FIRST_LINE_AFTER, LINE_INTERVAL) };
        let (since, due) = match running.shown {
            None => (running.began.elapsed(), first),
            Some(shown) => (shown.elapsed(), interval),
        };
        if since < due {
            return Some(due - since);
        }
        running.shown = Some(Instant::now());
        let (fraction, line) = (running.phase.fraction(), running.phase.line(running.began.elapsed()));
        if self.on_terminal {
            let bar = bar.get_or_insert_with(new_bar);
            bar.set_position((fraction * BAR_STEPS as f64) as u64);
            bar.set_message(line);
        } else {
            output::stderr(line);
        }
        Some(interval)
    }
}

const BAR_STEPS: u64 = 1000;

fn new_bar() -> ProgressBar {
    let bar = ProgressBar::with_draw_target(Some(BAR_STEPS), ProgressDrawTarget::stderr());
    let style = ProgressStyle::with_template("{bar:10} {wide_msg}").expect("the template is well-formed");
    bar.with_style(style)
}
