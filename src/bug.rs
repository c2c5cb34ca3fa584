//! What a panic comes to: one line that says what, where, and that it is a bug, and exit code 1.
//!
//! A panic unwinds as usual, so that half-written files are removed. Should that not end the process, because another
//! thread waits for the one that panicked, time does.

use std::any::Any;
use std::backtrace::{Backtrace, BacktraceStatus};
use std::panic::{self, AssertUnwindSafe, PanicHookInfo};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread;
use std::time::Duration;

use crate::cli::output;
use crate::error::Kind;

/// The process has this long to unwind.
const UNWIND_TIME: Duration = Duration::from_millis(900);
/// Characters of a panic's message that are shown; some hold whole buffers.
const CHARS_MAX: usize = 300;

/// A bug was met, on whatever thread.
static MET: AtomicBool = AtomicBool::new(false);

/// Runs `main` and returns its exit code, or that of a bug once any thread has met one. For the whole of a process: the
/// panic hook stays.
pub fn guard(main: impl FnOnce() -> u8) -> u8 {
    panic::set_hook(Box::new(told));
    let code = panic::catch_unwind(AssertUnwindSafe(main));
    match code {
        Ok(code) if !MET.load(Ordering::SeqCst) => code,
        _ => Kind::Other.exit_code(),
    }
}

/// Shows the first panic; what others then come to is its consequence.
fn told(info: &PanicHookInfo<'_>) {
    if MET.swap(true, Ordering::SeqCst) {
        return;
    }
    let place = info.location().map_or_else(String::new, |place| format!(" at {place}"));
    output::stderr(format_args!("deltafin: internal error{place}, a bug: {}", message(info.payload())));
    let backtrace = Backtrace::capture();
    if backtrace.status() == BacktraceStatus::Captured {
        output::stderr(backtrace);
    }
    let end = || {
        thread::sleep(UNWIND_TIME);
        signal_hook::low_level::exit(Kind::Other.exit_code().into())
    };
    // Without the thread the panic still unwinds.
    let _ = thread::Builder::new().name("watchdog".into()).spawn(end);
}

/// The message on one line, cut where it is long.
fn message(payload: &(dyn Any + Send)) -> String {
    let text = match (payload.downcast_ref::<&str>(), payload.downcast_ref::<String>()) {
        (Some(text), _) => text,
        (None, Some(text)) => text.as_str(),
        (None, None) => "no message",
    };
    let line = text.split_whitespace().collect::<Vec<_>>().join(" ");
    match line.char_indices().nth(CHARS_MAX) {
        Some((end, _)) => format!("{}…", &line[..end]),
        None => line,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_message_is_one_short_line() {
        assert_eq!(message(&"left\n  right"), "left right");
        assert_eq!(message(&"é".repeat(1000)).chars().count(), CHARS_MAX + 1);
        assert_eq!(message(&7), "no message");
    }
}
