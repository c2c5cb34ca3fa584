//! Writing to stdout: every piece flushed, a closed pipe ends the run quietly, a full disk is an I/O error. Writing to
//! stderr: what cannot be written there is dropped, since nothing could be said about it.
//!
//! A process that is started with its stdout closed writes into `/dev/null`: Rust's runtime opens it in the place of
//! the missing descriptor, so that no file of the model can end up as descriptor 1.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Write};
use std::os::fd::{AsFd, BorrowedFd};
use std::os::unix::fs::MetadataExt;

use crate::error::{Error, Result};

/// What a write came to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum Written {
    /// It is out.
    Yes,
    /// Nobody reads any more: stop, with success.
    PipeClosed,
}

/// Writes `bytes` to stdout and flushes.
///
/// # Errors
/// Kind `Io` for anything but a closed pipe (`/dev/full`).
pub fn stdout(bytes: &[u8]) -> Result<Written> {
    write(&mut io::stdout().lock(), bytes)
}

/// Writes `text` and a line end to stderr.
pub fn stderr(text: impl std::fmt::Display) {
    let line = format!("{text}\n");
    let _ = io::stderr().lock().write_all(line.as_bytes());
}

/// Whether what goes to stdout and what goes to stderr is read as one text: on a terminal, or in one file or pipe.
pub fn is_one_text() -> bool {
    let terminals = io::stdout().is_terminal() && io::stderr().is_terminal();
    let file = |stream: BorrowedFd<'_>| {
        let metadata = File::from(stream.try_clone_to_owned()?).metadata()?;
        io::Result::Ok((metadata.dev(), metadata.ino()))
    };
    terminals || matches!((file(io::stdout().as_fd()), file(io::stderr().as_fd())), (Ok(out), Ok(err)) if out == err)
}

fn write(out: &mut impl Write, bytes: &[u8]) -> Result<Written> {
    match out.write_all(bytes).and_then(|()| out.flush()) {
        Ok(()) => Ok(Written::Yes),
        Err(error) if error.kind() == ErrorKind::BrokenPipe => Ok(Written::PipeClosed),
        Err(error) => Err(Error::io(format!("cannot write to standard output: {error}"))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    /// Fails every write with one kind of error.
    struct Failing(ErrorKind);

    impl Write for Failing {
        fn write(&mut self, _: &[u8]) -> io::Result<usize> {
            Err(self.0.into())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }

    #[test]
    fn a_closed_pipe_is_no_error() {
        assert_eq!(write(&mut Failing(ErrorKind::BrokenPipe), b"x").expect("quiet"), Written::PipeClosed);
    }

    #[test]
    fn a_full_disk_is_an_io_error() {
        let error = write(&mut Failing(ErrorKind::StorageFull), b"x").expect_err("full");
        assert_eq!(error.kind(), Kind::Io);
        assert!(error.message().starts_with("cannot write to standard output: "), "{error}");
    }
}
