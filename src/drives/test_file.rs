//! A file to measure with where there is no model: written, and gone by name before the first byte of it is, so that no
//! end of the process leaves it behind.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::store::{ALIGN, Disk, Files, Names, System, Volumes};
use crate::synth::rng::Rng;
use crate::synth::space;

/// Places to read in the file, where there is room for so many.
const PLACES: u64 = 256;
/// Fewer than these say little about a drive.
const PLACES_MIN: u64 = 8;
const BYTES_MIN: u64 = 64 << 20;
const BYTES_MAX: u64 = 4 << 30;
/// Of the free space, this part is taken at most.
const SPACE_PART: u64 = 8;
/// Bytes between two looks at the interrupt, and what repeats with changes.
const BLOCK_BYTES: usize = 4 << 20;
/// Bytes that may wait in memory to be written: few, so that an end is never far.
const UNSYNCED_BYTES: u64 = 32 << 20;

/// A file that has no name any more. It is gone with its last descriptor.
pub(super) struct TestFile {
    /// The file's descriptors.
    pub files: Arc<Files>,
    /// How they are read.
    pub volumes: Volumes,
    /// Length of the file.
    pub bytes: u64,
}

/// The length that a file for reads of `read_bytes` has beneath `root`.
///
/// # Errors
/// Kind `Io` when there is too little room for one, or nothing can be said.
pub(super) fn length(root: &Path, read_bytes: u64) -> Result<u64> {
    let free = space::available(root)
        .map_err(|cause| Error::io(format!("cannot tell the free space of {}: {cause}", root.display())))?;
    let wanted = (PLACES * read_bytes).clamp(BYTES_MIN, BYTES_MAX.max(PLACES_MIN * read_bytes));
    let bytes = wanted.min(free / SPACE_PART) / read_bytes * read_bytes;
    if bytes >= PLACES_MIN * read_bytes {
        return Ok(bytes);
    }
    let needed = PLACES_MIN * read_bytes * SPACE_PART;
    Err(Error::io(format!(
        "{} holds no file to measure with, and a test file needs {needed} bytes of free space there, of which it takes an \
         eighth; found {free}",
        root.display()
    ))
    .hint("give a directory with a model or with packed experts, or read less at a time (--size)"))
}

impl TestFile {
    /// Makes the file beneath `root`, for reads of whole pages. `wrote` is told how many bytes are written.
    ///
    /// # Errors
    /// Kind `Io` when it cannot be made or written; `Interrupted`.
    pub(super) fn make(
        root: &Path,
        bytes: u64,
        direct: bool,
        interrupt: &Interrupt,
        wrote: &mut dyn FnMut(u64),
    ) -> Result<Self> {
        let name = root.join(format!(".deltafin-drives-{}.tmp", std::process::id()));
        let unwritten = |cause: io::Error| {
            Error::io(format!("cannot write a test file in {}: {cause}", root.display()))
                .hint("give a directory that may be written, or one with a model or with packed experts")
        };
        let mut file = create(&name).map_err(unwritten)?;
        let named = Named(Some(name));
        // The probe reads a page, and what is opened is kept: nothing opens the file by its name later.
        let mut content = Content::new();
        file.write_all(content.next(ALIGN)).and_then(|()| file.sync_all()).map_err(unwritten)?;
        let (files, volumes) = open(named.path(), bytes, direct)?;
        drop(named);
        let mut written = ALIGN as u64;
        let mut synced = written;
        while written < bytes {
            interrupt.check()?;
            let part = content.next((bytes - written).min(BLOCK_BYTES as u64) as usize);
            file.write_all(part).map_err(unwritten)?;
            written += part.len() as u64;
            if written - synced >= UNSYNCED_BYTES || written == bytes {
                file.sync_data().map_err(unwritten)?;
                synced = written;
            }
            wrote(written);
        }
        Ok(Self { files, volumes, bytes })
    }
}

fn create(path: &Path) -> io::Result<File> {
    // One of that name is left by a process of the same number that could not remove it.
    if fs::symlink_metadata(path).is_ok_and(|found| found.is_file()) {
        fs::remove_file(path)?;
    }
    OpenOptions::new().write(true).create_new(true).open(path)
}

/// Opens the file in both ways, as far as they can be had.
fn open(path: &Path, bytes: u64, direct: bool) -> Result<(Arc<Files>, Volumes)> {
    let names = Names::of_files(vec![path.to_owned()], vec![bytes]);
    let files = Arc::new(Files::new(Arc::new(System) as Arc<dyn Disk>, names, 0));
    let volumes = Volumes::open(&files, &[0], direct).map_err(|error| {
        let message = error.message().to_owned();
        Error::new(Kind::Io, message)
    })?;
    files.get(0, false).map_err(|cause| Error::io(format!("cannot open {}: {cause}", path.display())))?;
    Ok((files, volumes))
}

/// A name that is removed when this is dropped.
struct Named(Option<PathBuf>);

impl Named {
    fn path(&self) -> &Path {
        self.0.as_deref().unwrap_or(Path::new(""))
    }
}

impl Drop for Named {
    fn drop(&mut self) {
        if let Some(path) = self.0.take() {
            // Nothing could be done about it.
            let _ = fs::remove_file(path);
        }
    }
}

/// Bytes that neither compress nor repeat.
struct Content {
    block: Vec<u64>,
    bytes: Vec<u8>,
    round: u64,
}

impl Content {
    fn new() -> Self {
        let mut rng = Rng::new(u64::from(std::process::id()));
        let block: Vec<u64> = (0..BLOCK_BYTES / 8).map(|_| rng.bits()).collect();
        Self { block, bytes: vec![0; BLOCK_BYTES], round: 0 }
    }

    /// The next `len` bytes, at most a block.
    fn next(&mut self, len: usize) -> &[u8] {
        self.round += 1;
        let change = self.round.wrapping_mul(0x9e37_79b9_7f4a_7c15);
        for (bytes, word) in self.bytes[..len].chunks_mut(8).zip(&self.block) {
            let changed = (word ^ change).to_le_bytes();
            let len = bytes.len();
            bytes.copy_from_slice(&changed[..len]);
        }
        &self.bytes[..len]
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::store::{Region, Tally};

    fn entries(dir: &Path) -> usize {
        fs::read_dir(dir).unwrap().count()
    }

    #[test]
    fn a_test_file_has_no_name_and_can_be_read_whole() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = 9 << 20;
        let mut last = 0;
        let mut names = 0;
        let file = TestFile::make(folder.path(), bytes, true, &Interrupt::new(), &mut |written| {
            names = names.max(entries(folder.path()));
            last = written;
        })
        .unwrap();
        assert_eq!((file.bytes, last, names), (bytes, bytes, 0));
        let mut memory = Region::allocate(bytes as usize, "a test").unwrap();
        file.volumes.list[0].read(0, &mut memory, 0, bytes as usize, &mut Tally::default()).unwrap();
        assert_ne!(memory[..4096], memory[4 << 20..][..4096], "blocks differ");
        assert!(memory.chunks(4096).all(|page| page.iter().any(|byte| *byte != 0)));
    }

    #[test]
    fn an_interrupt_ends_the_writing_and_nothing_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let interrupt = Interrupt::new();
        let raise = interrupt.clone();
        let made = TestFile::make(folder.path(), 1 << 40, true, &interrupt, &mut |_| raise.raise(2));
        assert_eq!(made.err().unwrap().kind(), Kind::Interrupted(2));
        assert_eq!(entries(folder.path()), 0);
    }

    #[test]
    fn a_directory_that_is_not_there_is_an_error_that_names_it() {
        let folder = tempfile::tempdir().unwrap();
        let missing = folder.path().join("missing");
        let error = TestFile::make(&missing, 1 << 20, false, &Interrupt::new(), &mut |_| ()).err().unwrap();
        assert!(error.kind() == Kind::Io && error.message().contains("missing"), "{error}");
        assert!(length(&missing, 4096).is_err());
    }

    #[test]
    fn the_length_is_a_number_of_reads_and_what_does_not_fit_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let bytes = length(folder.path(), 3 << 20).unwrap();
        assert!(bytes.is_multiple_of(3 << 20) && bytes >= 24 << 20, "{bytes}");
        let error = length(folder.path(), 1 << 45).unwrap_err();
        assert!(error.kind() == Kind::Io && error.hint_text().unwrap().contains("--size"), "{error}");
    }
}
