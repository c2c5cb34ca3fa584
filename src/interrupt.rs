//! One flag that a signal raises and every long loop looks at.

use std::sync::Arc;
use std::sync::atomic::{AtomicI32, Ordering};

use crate::error::{Error, Kind, Result};

/// Shared by all clones: 0, or the number of the signal that asked the run to end.
#[derive(Debug, Clone, Default)]
pub struct Interrupt(Arc<AtomicI32>);

impl Interrupt {
    /// A flag that nothing has raised.
    pub fn new() -> Self {
        Self::default()
    }

    /// Asks everybody to stop; the first signal wins.
    pub fn raise(&self, signal: i32) {
        let _ = self.0.compare_exchange(0, signal, Ordering::SeqCst, Ordering::SeqCst);
    }

    /// The signal that was raised, if any.
    pub fn signal(&self) -> Option<i32> {
        match self.0.load(Ordering::Relaxed) {
            0 => None,
            signal => Some(signal),
        }
    }

    /// Whether a signal was raised.
    pub fn is_raised(&self) -> bool {
        self.signal().is_some()
    }

    /// `Err` of kind [`Kind::Interrupted`] once a signal was raised.
    ///
    /// # Errors
    /// The raised signal; callers unwind, keeping what is finished.
    pub fn check(&self) -> Result<()> {
        match self.signal() {
            None => Ok(()),
            Some(signal) => Err(Error::new(Kind::Interrupted(signal), "interrupted")),
        }
    }
}
