//! SIGINT, SIGTERM and SIGHUP raise the interrupt; a second one ends the process at once, and so does time. One that
//! comes right behind the first is the same wish.

use std::fs;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use signal_hook::consts::{SIGHUP, SIGINT, SIGTERM, SIGXFSZ};
use signal_hook::flag;
use signal_hook::iterator::Signals;
use signal_hook::low_level;

use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;

/// The run has this long to unwind after the first signal; what it wrote is flushed piece by piece before.
const UNWIND_TIME: Duration = Duration::from_millis(900);
/// Supervisors (GNU `timeout` among them) signal the process and then its group, which is two signals and one wish. A
/// person who presses the key again in earnest takes longer.
const SAME_WISH: Duration = Duration::from_millis(300);

/// Installs the handlers for the rest of the process.
///
/// # Errors
/// When the system refuses.
pub fn install(interrupt: &Interrupt) -> Result<()> {
    let refused = |error| Error::other(format!("cannot install signal handlers: {error}"));
    let mut signals = Signals::new([SIGINT, SIGTERM]).map_err(refused)?;
    // A run under `nohup` outlives its terminal.
    if !is_ignored(SIGHUP) {
        signals.add_signal(SIGHUP).map_err(refused)?;
    }
    // A limit on file sizes then fails the write, which is told, and does not end the process without a word.
    flag::register(SIGXFSZ, Arc::default()).map_err(refused)?;
    let interrupt = interrupt.clone();
    let watch = move || {
        let mut signals = signals.forever();
        if let Some(first) = signals.next() {
            interrupt.raise(first);
            // Without the thread a second signal still ends the process.
            let _ = thread::Builder::new().name("watchdog".into()).spawn(move || {
                thread::sleep(UNWIND_TIME);
                end(first);
            });
        }
        let began = Instant::now();
        if let Some(second) = signals.find(|_| began.elapsed() >= SAME_WISH) {
            end(second);
        }
    };
    thread::Builder::new().name("signals".into()).spawn(watch).map_err(refused)?;
    Ok(())
}

/// Ends the process now: no destructor runs that could wait for a read in flight.
fn end(signal: i32) -> ! {
    low_level::exit(Kind::Interrupted(signal).exit_code().into())
}

/// Whether the process was started with `signal` ignored; not known, and taken as no, where there is no `/proc`.
fn is_ignored(signal: i32) -> bool {
    fs::read_to_string("/proc/self/status").is_ok_and(|status| ignores(&status, signal))
}

/// `SigIgn` of a `/proc/self/status`: a hexadecimal mask with signal 1 in the lowest bit.
fn ignores(status: &str, signal: i32) -> bool {
    let mask = status.lines().find_map(|line| line.strip_prefix("SigIgn:"));
    let mask = mask.and_then(|mask| u64::from_str_radix(mask.trim(), 16).ok()).unwrap_or(0);
    mask >> (signal - 1) & 1 == 1
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ignored_signals_are_read_from_the_mask() {
        let status = "Name:\tx\nSigBlk:\t0000000000000000\nSigIgn:\t0000000000001001\n";
        assert!(ignores(status, SIGHUP));
        assert!(!ignores(status, SIGINT) && !ignores(status, SIGTERM));
        assert!(!ignores("SigIgn:\tjunk\n", SIGHUP) && !ignores("", SIGHUP));
    }
}
