//! What is read to measure one drive: files, and places in them, one read each.

use std::path::Path;
use std::sync::Arc;

use super::model_files;
use super::test_file::{self, TestFile};
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::store::{ALIGN, Files, Names, ReadError, System, Tally, Volumes};

/// A model with fewer reads in it than this is read from too few places; a test file is made instead.
const PLACES_MIN: usize = 32;
/// Places beyond these are not used: so many experts are 18 TB.
const PLACES_MAX: u64 = 1 << 20;

/// Files of one drive, and how they are read.
pub(super) struct Target {
    volumes: Volumes,
    files: Arc<Files>,
    file_count: usize,
    /// Where reads may begin: a file, and the offset of a whole page.
    pub places: Vec<(u32, u64)>,
    /// Bytes from a place on that may be read: whole pages.
    pub read_bytes: usize,
    /// What is read.
    pub source: Source,
}

/// What a drive was measured with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
pub struct Source {
    /// Whose files they are.
    pub kind: SourceKind,
    /// Files.
    pub files: usize,
    /// Bytes of them together.
    pub bytes: u64,
}

/// Whose files a drive was measured with.
#[derive(Debug, Clone, Copy, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "snake_case")]
pub enum SourceKind {
    /// Shards or packed experts that were there.
    Model,
    /// A file that was written for it and is gone again.
    TestFile,
}

/// Is told what is done while files are found or made.
pub(super) trait Watch {
    /// Something went on.
    fn alive(&self);
    /// The user should know this.
    fn notice(&self, text: String);
    /// So many bytes of a test file of so many are written.
    fn wrote(&self, written: u64, bytes: u64);
}

impl Target {
    /// Files beneath `root`, or a test file there, for reads of `read_bytes` (whole pages), past the page cache if `direct`.
    ///
    /// Tells `watch` what is done.
    ///
    /// # Errors
    /// Kind `Io` when nothing can be read there, nor a test file be made; `Interrupted`.
    pub(super) fn find(
        root: &Path,
        read_bytes: usize,
        direct: bool,
        interrupt: &Interrupt,
        watch: &dyn Watch,
    ) -> Result<Self> {
        let found = model_files::find(root, read_bytes as u64, interrupt, &|| watch.alive());
        interrupt.check()?;
        if found.hollow > 0 {
            watch.notice(format!(
                "{}: {} files of a model have no data on the drive (sparse, or never written) and say nothing about it",
                root.display(),
                found.hollow
            ));
        }
        let places = places(found.files.iter().map(|(_, bytes)| *bytes), read_bytes);
        if places.len() >= PLACES_MIN {
            let (paths, lengths): (Vec<_>, Vec<_>) = found.files.into_iter().unzip();
            let source = Source { kind: SourceKind::Model, files: paths.len(), bytes: lengths.iter().sum() };
            let used: Vec<usize> = (0..paths.len()).collect();
            let files = Arc::new(Files::new(Arc::new(System), Names::of_files(paths, lengths), READERS_MAX));
            let volumes = Volumes::open(&files, &used, direct)
                .map_err(|error| Error::new(Kind::Io, error.message().to_owned()))?;
            return Ok(Self::new(volumes, files, used.len(), places, read_bytes, source));
        }
        let bytes = test_file::length(root, read_bytes as u64)?;
        watch.notice(format!(
            "{}: no model of {PLACES_MIN} reads or more there: measured with a test file of {:.2} GB, which has no name and \
             is gone when this ends",
            root.display(),
            bytes as f64 / 1e9
        ));
        let TestFile { files, volumes, bytes } =
            TestFile::make(root, bytes, direct, interrupt, &mut |written| watch.wrote(written, bytes))?;
        let source = Source { kind: SourceKind::TestFile, files: 1, bytes };
        let places = self::places([bytes].into_iter(), read_bytes);
        Ok(Self::new(volumes, files, 1, places, read_bytes, source))
    }

    fn new(
        volumes: Volumes,
        files: Arc<Files>,
        file_count: usize,
        places: Vec<(u32, u64)>,
        read_bytes: usize,
        source: Source,
    ) -> Self {
        let target = Self { volumes, files, file_count, places, read_bytes, source };
        target.forget();
        target
    }

    /// `direct` or `buffered`: how it is read, as found by reading.
    pub(super) fn mode(&self) -> &'static str {
        self.volumes.list[0].mode()
    }

    /// What the drive's readers have to say, once.
    pub(super) fn take_notice(&self) -> Option<String> {
        self.volumes.list[0].take_notice()
    }

    /// Asks the system to drop what it holds of the files in memory, which reads through the page cache would find there.
    pub(super) fn forget(&self) {
        if self.mode() == "direct" {
            return;
        }
        for file in 0..self.file_count {
            if let Ok(handle) = self.files.get(file, false) {
                handle.forget(0, usize::try_from(self.files.bytes(file)).unwrap_or(usize::MAX));
            }
        }
    }

    /// Fills `memory`, whole pages, from `offset` of `file`.
    ///
    /// # Errors
    /// As the store's reads.
    pub(super) fn read(&self, file: u32, offset: u64, memory: &mut [u8]) -> Result<(), ReadError> {
        let needed = memory.len();
        self.volumes.list[0].read(file as usize, memory, offset, needed, &mut Tally::default())
    }
}

/// Reads in flight at most.
pub(super) const READERS_MAX: usize = 32;

/// One after the other without gaps, from the begin of each file; of many, each file has a share.
fn places(lengths: impl ExactSizeIterator<Item = u64>, read_bytes: usize) -> Vec<(u32, u64)> {
    let page = ALIGN as u64;
    let share = PLACES_MAX / (lengths.len() as u64).max(1);
    let mut places = Vec::new();
    for (file, bytes) in (0..).zip(lengths) {
        let fit = (bytes / page * page / read_bytes as u64).min(share);
        places.extend((0..fit).map(|number| (file, number * read_bytes as u64)));
    }
    places
}

#[cfg(test)]
mod tests {
    use std::cell::RefCell;

    use super::*;

    /// Keeps the notices.
    #[derive(Default)]
    struct Notices(RefCell<Vec<String>>);

    impl Watch for Notices {
        fn alive(&self) {}

        fn notice(&self, text: String) {
            self.0.borrow_mut().push(text);
        }

        fn wrote(&self, _: u64, _: u64) {}
    }

    fn find(root: &Path, read_bytes: usize) -> (Result<Target>, Vec<String>) {
        let notices = Notices::default();
        let target = Target::find(root, read_bytes, true, &Interrupt::new(), &notices);
        (target, notices.0.into_inner())
    }

    #[test]
    fn places_are_whole_reads_at_whole_pages() {
        let read = 4 * ALIGN;
        let places = places([read as u64 * 3 + 5, read as u64 - 1, read as u64].into_iter(), read);
        assert_eq!(places, [(0, 0), (0, read as u64), (0, 2 * read as u64), (2, 0)]);
        let many = self::places([1 << 40].into_iter(), ALIGN);
        assert_eq!(many.len() as u64, PLACES_MAX);
    }

    #[test]
    fn a_model_is_read_where_it_lies() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.safetensors"), vec![1; 40 * ALIGN + 7]).unwrap();
        let (target, notices) = find(folder.path(), ALIGN);
        let target = target.unwrap();
        assert_eq!((target.source.kind, target.places.len(), notices.len()), (SourceKind::Model, 40, 0));
        assert!(["direct", "buffered"].contains(&target.mode()));
    }

    #[test]
    fn without_a_model_a_test_file_is_made_and_said_so() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("a.safetensors"), vec![1; 31 * ALIGN]).unwrap();
        let (target, notices) = find(folder.path(), ALIGN);
        assert_eq!(target.unwrap().source.kind, SourceKind::TestFile);
        assert!(notices[0].contains("test file"), "{notices:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}
