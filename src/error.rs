//! The one error type: a kind that decides the exit code, a message that says what and where, a hint what next.

use std::fmt;

/// What kind of failure ended the run; each kind has a stable exit code.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Anything that fits no other kind.
    Other,
    /// Flags or arguments that cannot be honoured.
    Usage,
    /// The model directory is incomplete, damaged or of an unsupported kind.
    Model,
    /// Reading or writing failed while running.
    Io,
    /// The memory plan does not fit.
    Memory,
    /// A value that must be finite was not.
    Numerical,
    /// A signal asked the run to end; holds the signal's number.
    Interrupted(i32),
}

impl Kind {
    /// The process exit code: 1 other, 2 usage, 3 model refused, 4 I/O, 5 memory, 6 numerical, 128 + signal.
    pub fn exit_code(self) -> u8 {
        match self {
            Kind::Other => 1,
            Kind::Usage => 2,
            Kind::Model => 3,
            Kind::Io => 4,
            Kind::Memory => 5,
            Kind::Numerical => 6,
            Kind::Interrupted(signal) => 128u8.saturating_add(signal.clamp(0, 127) as u8),
        }
    }
}

/// A failure as the user sees it: `message` without a trailing stop, and optionally what to do about it.
#[derive(Debug, Clone)]
pub struct Error {
    kind: Kind,
    message: String,
    hint: Option<String>,
}

/// `std::result::Result` with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

impl Error {
    /// An error of `kind` with `message` (lower case, no full stop).
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Self { kind, message: message.into(), hint: None }
    }

    /// Shorthand for [`Kind::Other`].
    pub fn other(message: impl Into<String>) -> Self {
        Self::new(Kind::Other, message)
    }

    /// Shorthand for [`Kind::Usage`].
    pub fn usage(message: impl Into<String>) -> Self {
        Self::new(Kind::Usage, message)
    }

    /// Shorthand for [`Kind::Model`].
    pub fn model(message: impl Into<String>) -> Self {
        Self::new(Kind::Model, message)
    }

    /// Shorthand for [`Kind::Io`].
    pub fn io(message: impl Into<String>) -> Self {
        Self::new(Kind::Io, message)
    }

    /// Shorthand for [`Kind::Memory`].
    pub fn memory(message: impl Into<String>) -> Self {
        Self::new(Kind::Memory, message)
    }

    /// Shorthand for [`Kind::Numerical`].
    pub fn numerical(message: impl Into<String>) -> Self {
        Self::new(Kind::Numerical, message)
    }

    /// Adds what the user can do; shown on a line of its own.
    pub fn hint(mut self, hint: impl Into<String>) -> Self {
        self.hint = Some(hint.into());
        self
    }

    /// Puts `context: ` in front of the message.
    pub fn context(mut self, context: impl fmt::Display) -> Self {
        self.message = format!("{context}: {}", self.message);
        self
    }

    /// Leaves `lines_max` lines of a list below the message's first line, and counts the others.
    pub fn shortened(mut self, lines_max: usize) -> Self {
        let more = self.message.lines().count().saturating_sub(lines_max + 1);
        if more > 1 {
            let shown: Vec<&str> = self.message.lines().take(lines_max + 1).collect();
            self.message = format!("{}\n  and {more} more (-v lists all)", shown.join("\n"));
        }
        self
    }

    /// The kind, which decides the exit code.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// The message, without the hint.
    pub fn message(&self) -> &str {
        &self.message
    }

    /// What the user can do, if anything is known.
    pub fn hint_text(&self) -> Option<&str> {
        self.hint.as_deref()
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.message)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_list_is_shortened_and_counted() {
        let shortened = |lines: usize| {
            let lines: String = (1..=lines).map(|n| format!("\n  {n}")).collect();
            Error::model(format!("bad{lines}")).shortened(2).message
        };
        assert_eq!(shortened(0), "bad");
        assert_eq!(shortened(3), "bad\n  1\n  2\n  3", "a line that says what a line would");
        assert_eq!(shortened(5), "bad\n  1\n  2\n  and 3 more (-v lists all)");
    }
}
