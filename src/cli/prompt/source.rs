//! A file or stdin, read on a thread of its own, so that a signal ends the wait for a pipe that says nothing.

use std::fs::File;
use std::io::{self, ErrorKind, IsTerminal, Read};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError, sync_channel};
use std::thread;
use std::time::{Duration, Instant};

use crate::engine::Progress;
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::text::normalize_input;

const CHUNK_BYTES: usize = 64 << 10;
/// Chunks that are read ahead of whoever takes them.
const CHUNKS_AHEAD: usize = 4;
/// How long a signal may go unseen.
const POLL: Duration = Duration::from_millis(100);
/// How long a source may be silent before the user is told what is waited for.
const SILENCE: Duration = Duration::from_secs(2);
/// How long stdin may be silent from its start where the prompt is complete without it. Services and scripts often hand
/// down a pipe that nobody ever writes to or closes.
pub(in crate::cli) const STDIN_GRACE: Duration = Duration::from_secs(5);
/// Far beyond the longest context; what never ends (`/dev/zero`) is refused there.
pub(in crate::cli) const BYTES_MAX: usize = 256 << 20;

/// Where input comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(in crate::cli) enum Source {
    /// Standard input.
    Stdin,
    /// A file, or a pipe with a name.
    File(PathBuf),
}

/// Whether stdin is a pipe or a file: then it belongs to the prompt.
pub(in crate::cli) fn stdin_is_given() -> bool {
    !io::stdin().is_terminal()
}

impl Source {
    /// `-` is stdin, anything else a path.
    pub(in crate::cli) fn named(path: &Path) -> Self {
        if path.as_os_str() == "-" { Self::Stdin } else { Self::File(path.to_owned()) }
    }

    /// As messages call it.
    pub(in crate::cli) fn name(&self) -> String {
        match self {
            Self::Stdin => "standard input".to_owned(),
            Self::File(path) => path.display().to_string(),
        }
    }

    /// All of it as text.
    ///
    /// # Errors
    /// Kind `Usage` for what cannot be opened, is too long or is not UTF-8; `Io`; `Interrupted`.
    pub(in crate::cli) fn text(&self, progress: &dyn Progress, interrupt: &Interrupt) -> Result<String> {
        let chunks = self.chunks(progress, interrupt)?;
        self.collect(Chunks { says: Says::EachSilence, ..chunks })
    }

    /// All of it as text, or nothing, with a warning, when not one byte has come within [`STDIN_GRACE`].
    ///
    /// # Errors
    /// As [`Source::text`].
    pub(in crate::cli) fn text_if_it_comes(&self, progress: &dyn Progress, interrupt: &Interrupt) -> Result<String> {
        let chunks = self.chunks(progress, interrupt)?;
        self.collect(Chunks { says: Says::GivingUp, ..chunks })
    }

    fn collect(&self, mut chunks: Chunks<'_>) -> Result<String> {
        let mut bytes = Vec::new();
        while let Some(chunk) = chunks.next()? {
            if bytes.len() + chunk.len() > BYTES_MAX {
                return Err(Error::usage(format!("{}: more than {} MiB of input", self.name(), BYTES_MAX >> 20))
                    .hint("no model takes a prompt of that length"));
            }
            bytes.extend_from_slice(&chunk);
        }
        normalize_input(bytes, &self.name())
    }

    /// All of it, chunk by chunk.
    ///
    /// # Errors
    /// As [`Source::text`], but for the text.
    pub(in crate::cli) fn chunks<'a>(
        &self,
        progress: &'a dyn Progress,
        interrupt: &'a Interrupt,
    ) -> Result<Chunks<'a>> {
        let (sender, receiver) = sync_channel(CHUNKS_AHEAD);
        let source = self.clone();
        let reader = move || {
            let mut input = match source.open() {
                Ok(input) => input,
                Err(error) => return drop(sender.send(Err(error))),
            };
            let mut buffer = vec![0; CHUNK_BYTES];
            loop {
                let chunk = match input.read(&mut buffer) {
                    Ok(0) => return,
                    Ok(read) => Ok(buffer[..read].to_vec()),
                    Err(error) if error.kind() == ErrorKind::Interrupted => continue,
                    Err(error) => Err(source.failed(&error)),
                };
                let last = chunk.is_err();
                if sender.send(chunk).is_err() || last {
                    return;
                }
            }
        };
        thread::Builder::new()
            .name("input".to_owned())
            .spawn(reader)
            .map_err(|error| Error::other(format!("cannot start a thread to read {}: {error}", self.name())))?;
        let waiting = match self {
            Self::Stdin if io::stdin().is_terminal() => "reading standard input; Ctrl-D ends it".to_owned(),
            Self::Stdin => "waiting for standard input; </dev/null ends it".to_owned(),
            Self::File(path) => format!("waiting for {}", path.display()),
        };
        let says = Says::FirstSilence;
        Ok(Chunks { receiver, waiting, says, told: false, begun: false, since: Instant::now(), progress, interrupt })
    }

    fn open(&self) -> Result<Box<dyn Read>> {
        match self {
            Self::Stdin => Ok(Box::new(io::stdin())),
            Self::File(path) => match File::open(path) {
                Ok(file) => Ok(Box::new(file)),
                Err(error) => Err(Error::usage(format!("{}: cannot be opened: {error}", path.display()))),
            },
        }
    }

    fn failed(&self, error: &io::Error) -> Error {
        if error.kind() == ErrorKind::IsADirectory {
            return Error::usage(format!("{}: is a directory", self.name())).hint("a prompt is read from files");
        }
        Error::io(format!("{}: {error}", self.name()))
    }
}

/// What a [`Source`] holds, as it arrives.
pub(in crate::cli) struct Chunks<'a> {
    receiver: Receiver<Result<Vec<u8>>>,
    /// What to say in a silence; said once.
    waiting: String,
    says: Says,
    told: bool,
    /// Something has come.
    begun: bool,
    /// Begin of the silence.
    since: Instant,
    progress: &'a dyn Progress,
    interrupt: &'a Interrupt,
}

/// What a silence of the source means.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Says {
    /// Someone who asks now and then: only the wait for the first words is worth a notice.
    FirstSilence,
    /// The run cannot go on without, so that each silence could be without end.
    EachSilence,
    /// As before, once it has begun; until then the run goes on without it after [`STDIN_GRACE`].
    GivingUp,
}

impl Chunks<'_> {
    /// The next chunk, or `None` at the end.
    ///
    /// # Errors
    /// Kind `Usage` for what cannot be opened, `Io`, `Interrupted`.
    pub(in crate::cli) fn next(&mut self) -> Result<Option<Vec<u8>>> {
        self.since = Instant::now();
        loop {
            self.interrupt.check()?;
            match self.receiver.recv_timeout(POLL) {
                Ok(chunk) => {
                    // What was said before the beginning may have gone unseen with -q.
                    self.told &= std::mem::replace(&mut self.begun, true);
                    return chunk.map(Some);
                }
                Err(RecvTimeoutError::Disconnected) => return Ok(None),
                Err(RecvTimeoutError::Timeout) => {}
            }
            if self.silent_for(self.since.elapsed()) {
                return Ok(None);
            }
        }
    }

    /// Says what there is to say after so long a silence; true when it was too long.
    fn silent_for(&mut self, silence: Duration) -> bool {
        let gives_up = self.says == Says::GivingUp && !self.begun;
        if gives_up && silence >= STDIN_GRACE {
            self.progress.warning(&format!(
                "standard input was silent for {} s: going on without it; name it as `-` to wait for it",
                STDIN_GRACE.as_secs()
            ));
            return true;
        }
        if silence >= SILENCE && !self.told {
            self.told = true;
            match self.says {
                Says::FirstSilence if self.begun => {}
                Says::FirstSilence => self.progress.notice(&self.waiting),
                Says::GivingUp if gives_up => self.progress.notice(&self.waiting),
                Says::EachSilence | Says::GivingUp => self.progress.warning(&self.waiting),
            }
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    fn text(path: &Path) -> Result<String> {
        Source::named(path).text(&(), &Interrupt::new())
    }

    #[test]
    fn a_file_is_read_whole_and_its_byte_order_mark_is_dropped() {
        let dir = tempfile::tempdir().unwrap();
        let file = dir.path().join("prompt.txt");
        let long = "é\r\n".repeat(100_000);
        std::fs::write(&file, format!("\u{feff}{long}")).unwrap();
        assert_eq!(text(&file).unwrap(), long);
    }

    #[test]
    fn what_cannot_be_read_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let absent = text(&dir.path().join("absent.txt")).unwrap_err();
        assert_eq!(absent.kind(), Kind::Usage);
        assert!(absent.message().contains("absent.txt"), "{absent}");
        let directory = text(dir.path()).unwrap_err();
        assert_eq!(directory.kind(), Kind::Usage);
        assert!(directory.message().contains("is a directory"), "{directory}");
        let latin1 = dir.path().join("latin1.txt");
        std::fs::write(&latin1, b"caf\xe9").unwrap();
        assert!(text(&latin1).unwrap_err().message().contains("offset 3"));
    }

    #[test]
    fn input_without_end_is_refused() {
        let error = text(Path::new("/dev/zero")).unwrap_err();
        assert_eq!(error.kind(), Kind::Usage);
        assert!(error.message().contains("MiB"), "{error}");
    }

    /// Notes what it is told, warnings with a mark.
    #[derive(Default)]
    struct Heard(std::cell::RefCell<Vec<String>>);

    impl Progress for Heard {
        fn loading(&self, _done: u64, _total: u64) {}
        fn prefill(&self, _done: usize, _total: usize, _layer: usize, _layers: usize, _bytes: u64) {}
        fn notice(&self, text: &str) {
            self.0.borrow_mut().push(text.to_owned());
        }
        fn warning(&self, text: &str) {
            self.0.borrow_mut().push(format!("! {text}"));
        }
    }

    /// What is said in silences of `seconds` before and after the first chunk, and whether the run goes on without.
    fn said(says: Says, seconds: [u64; 2]) -> (Vec<String>, bool) {
        let (heard, interrupt) = (Heard::default(), Interrupt::new());
        let (sender, receiver) = sync_channel(1);
        let (waiting, since) = ("waiting".to_owned(), Instant::now());
        let (progress, interrupt) = (&heard, &interrupt);
        let mut chunks = Chunks { receiver, waiting, says, told: false, begun: false, since, progress, interrupt };
        let mut gives_up = chunks.silent_for(Duration::from_secs(seconds[0]));
        if !gives_up {
            sender.send(Ok(vec![b'x'])).unwrap();
            chunks.next().unwrap();
            gives_up = chunks.silent_for(Duration::from_secs(seconds[1]));
        }
        (heard.0.take(), gives_up)
    }

    #[test]
    fn no_wait_without_end_is_silent() {
        let waits = |says, seconds| {
            let (heard, gives_up) = said(says, seconds);
            assert!(!gives_up, "{says:?} {seconds:?}");
            heard
        };
        assert_eq!(waits(Says::EachSilence, [1, 1]), [""; 0]);
        assert_eq!(waits(Says::EachSilence, [9, 0]), ["! waiting"]);
        assert_eq!(waits(Says::EachSilence, [0, 9]), ["! waiting"]);
        assert_eq!(waits(Says::GivingUp, [4, 9]), ["waiting", "! waiting"]);
        assert_eq!(waits(Says::FirstSilence, [9, 9]), ["waiting"]);
    }

    #[test]
    fn what_is_not_needed_is_not_waited_for() {
        let (heard, gives_up) = said(Says::GivingUp, [5, 0]);
        assert!(gives_up && heard.len() == 1 && heard[0].contains("going on without it"), "{heard:?}");
    }

    #[test]
    fn a_signal_ends_the_wait() {
        let interrupt = Interrupt::new();
        interrupt.raise(2);
        let error = Source::File("/dev/zero".into()).text(&(), &interrupt).unwrap_err();
        assert_eq!(error.kind(), Kind::Interrupted(2));
    }
}
