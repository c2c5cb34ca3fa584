//! Files of one device, and how they are read: past the page cache, or through it once that was refused. Falls back as a
//! whole, says so once, and tells the mode in force.

use std::io;
use std::path::Path;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use rustc_hash::FxHashMap;

use super::files::Files;
use super::reader::{self, Cause, ReadError, Stop, Tally, continue_read, is_refusal, whole_pages};
use crate::error::{Error, Kind, Result};
use crate::memory::{ALIGN, Region};

/// A device and the files on it.
pub(crate) struct Volume {
    files: Arc<Files>,
    /// Directory of its first file, or the first root on it: for people.
    path: String,
    direct: AtomicBool,
    notice: Mutex<Option<String>>,
}

/// Volumes of some files, and which file is on which.
pub(crate) struct Volumes {
    /// One a device.
    pub list: Vec<Arc<Volume>>,
    /// `[files]`: index into `list`; `u16::MAX` for a file that is not used.
    pub of_file: Vec<u16>,
    /// Those with drive roots alone that cannot be read now, by their place in `list`, and why: other drives may have it all.
    pub unread: Vec<(usize, Error)>,
}

impl Volumes {
    /// Groups the files of `used` by physical device, opens each shard among them once, and finds by a real read whether
    /// direct reads work. Files of drive roots are opened when they are read: there is one for each expert.
    ///
    /// # Errors
    /// Kind `Model` for a file that cannot be opened, `Io` for one that opens and cannot be read.
    pub(crate) fn open(files: &Arc<Files>, used: &[usize], direct: bool) -> Result<Self> {
        let mut volumes = Self { list: Vec::new(), of_file: Vec::new(), unread: Vec::new() };
        let mut found: Vec<(String, usize)> = Vec::new(); // device, its largest file
        let mut roots: FxHashMap<usize, String> = FxHashMap::default();
        let device = |path: &Path| files.device(path).map_err(|cause| unopened(path, &cause));
        for &file in used {
            let device = match files.names().root_of(file) {
                Some((root, dir)) => match roots.get(&root) {
                    Some(device) => device.clone(),
                    None => roots.entry(root).or_insert(device(dir)?).clone(),
                },
                None => device(&files.path(file))?,
            };
            let volume = match found.iter().position(|(known, _)| *known == device) {
                Some(at) => at,
                None => {
                    found.push((device, file));
                    let path = files.path(file);
                    let dir = files.names().root_of(file).map(|(_, dir)| dir).or(path.parent()).unwrap_or(&path);
                    volumes.list.push(Arc::new(Volume::new(files, dir, direct)));
                    found.len() - 1
                }
            };
            if files.bytes(file) > files.bytes(found[volume].1) {
                found[volume].1 = file;
            }
            if volumes.of_file.len() <= file {
                volumes.of_file.resize(file + 1, u16::MAX);
            }
            volumes.of_file[file] = volume as u16;
        }
        for (number, (_, largest)) in found.iter().enumerate() {
            let on_it = |file: &usize| usize::from(volumes.of_file[*file]) == number;
            let root_of = |file: usize| files.names().root_of(file).map(|(root, _)| root);
            let Err(error) = volumes.list[number].probe(*largest) else { continue };
            // Where a file of a root cannot be read, others can perhaps: of another root, or the shards.
            if root_of(*largest).is_none() {
                return Err(error);
            }
            let mut tried = vec![root_of(*largest)];
            let is_read = used.iter().copied().filter(on_it).any(|file| {
                let is_new = !tried.contains(&root_of(file));
                if is_new {
                    tried.push(root_of(file));
                }
                is_new && volumes.list[number].probe(file).is_ok()
            });
            if !is_read && tried.contains(&None) {
                return Err(error);
            }
            if !is_read {
                volumes.unread.push((number, error));
            }
        }
        for &file in used {
            if files.names().root_of(file).is_none() {
                let volume = &volumes.list[usize::from(volumes.of_file[file])];
                volume.open(file).map_err(|cause| unopened(&files.path(file), &cause))?;
            }
        }
        Ok(volumes)
    }
}

impl Volume {
    fn new(files: &Arc<Files>, dir: &Path, direct: bool) -> Self {
        let path = dir.display().to_string();
        Self { files: Arc::clone(files), path, direct: AtomicBool::new(direct), notice: Mutex::new(None) }
    }

    /// Directory the volume is known by.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// The mode in force: `direct` or `buffered`.
    pub(crate) fn mode(&self) -> &'static str {
        if self.direct.load(Ordering::Acquire) { "direct" } else { "buffered" }
    }

    /// The files it reads.
    pub(crate) fn files(&self) -> &Files {
        &self.files
    }

    /// The notice of a fallback, once.
    pub(crate) fn take_notice(&self) -> Option<String> {
        self.notice.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Fills the first `needed` bytes of `bytes` from `offset` of file `file`; those after them are unspecified.
    ///
    /// `offset`, the address and the length of `bytes` are multiples of [`ALIGN`], and so are all direct reads. The last,
    /// broken page of a file comes from a buffered descriptor: some systems refuse a direct read past the end, others
    /// return it short at an odd length.
    ///
    /// # Errors
    /// The file ends before `needed` bytes, or the system reported a failure that is no refusal of direct reads.
    pub(crate) fn read(
        &self,
        file: usize,
        bytes: &mut [u8],
        offset: u64,
        needed: usize,
        tally: &mut Tally,
    ) -> Result<(), ReadError> {
        assert!(offset.is_multiple_of(ALIGN as u64) && needed <= bytes.len(), "pieces are cut at whole pages");
        let mut got = 0;
        if self.direct.load(Ordering::Acquire) {
            match self.read_direct(file, bytes, offset, needed, &mut got, tally) {
                Stop::Done => return Ok(()),
                Stop::Failed(cause) if is_refusal(&cause) => {
                    self.fall_back(&cause, &self.files.path(file));
                    got = 0;
                }
                Stop::Failed(cause) => return Err(self.failed(file, offset, needed, got, Cause::System(cause))),
                Stop::Unaligned | Stop::EndOfFile => {}
            }
        }
        self.read_buffered(file, bytes, offset, needed, got, tally)
    }

    /// The whole pages of the file among the needed bytes. `EndOfFile` when bytes beyond them are needed too.
    fn read_direct(
        &self,
        file: usize,
        bytes: &mut [u8],
        offset: u64,
        needed: usize,
        got: &mut usize,
        tally: &mut Tally,
    ) -> Stop {
        let pages = whole_pages(self.files.bytes(file).saturating_sub(offset)).min(bytes.len());
        let handle = match self.files.get(file, true) {
            Ok(handle) => handle,
            Err(cause) => return Stop::Failed(cause),
        };
        let part = &mut bytes[..pages];
        match continue_read(&*handle, part, offset, needed.min(pages), ALIGN, got, tally) {
            Stop::Done if *got < needed => Stop::EndOfFile,
            stop => stop,
        }
    }

    /// From `got` on through the page cache, which is asked to forget the pages again.
    fn read_buffered(
        &self,
        file: usize,
        bytes: &mut [u8],
        offset: u64,
        needed: usize,
        mut got: usize,
        tally: &mut Tally,
    ) -> Result<(), ReadError> {
        let handle = match self.files.get(file, false) {
            Ok(handle) => handle,
            Err(cause) => return Err(self.failed(file, offset, needed, got, Cause::System(cause))),
        };
        let first = got / ALIGN * ALIGN;
        let stop = continue_read(&*handle, &mut bytes[..needed], offset, needed, 1, &mut got, tally);
        handle.forget(offset + first as u64, (needed - first).next_multiple_of(ALIGN));
        match stop {
            Stop::Done => Ok(()),
            Stop::EndOfFile | Stop::Unaligned => Err(self.failed(file, offset, needed, got, Cause::EndOfFile)),
            Stop::Failed(cause) => Err(self.failed(file, offset, needed, got, Cause::System(cause))),
        }
    }

    fn failed(&self, file: usize, offset: u64, wanted: usize, got: usize, cause: Cause) -> ReadError {
        ReadError { path: self.files.path(file), offset, wanted, got, cause }
    }

    /// Leaves direct reading for good; the first refusal becomes the notice.
    fn fall_back(&self, cause: &io::Error, path: &Path) {
        if self.direct.swap(false, Ordering::AcqRel) {
            let notice = format!(
                "no reads past the page cache in {} ({}: {cause}); reading it buffered",
                self.path,
                path.file_name().unwrap_or(path.as_os_str()).display()
            );
            *self.notice.lock().unwrap_or_else(PoisonError::into_inner) = Some(notice);
        }
    }

    /// Reads the first page of `file`, so that the mode is known before anything depends on it.
    fn probe(&self, file: usize) -> Result<()> {
        if !self.direct.load(Ordering::Acquire) {
            return Ok(());
        }
        let mut page = Region::allocate(ALIGN, "a read")?;
        let needed = page.len().min(whole_pages(self.files.bytes(file)));
        self.read(file, &mut page, 0, needed, &mut Tally::default()).map_err(|error| {
            let kind = if error.got == 0 && matches!(error.cause, Cause::System(_)) { Kind::Model } else { Kind::Io };
            error.into_error(kind, "the model")
        })
    }

    fn open(&self, file: usize) -> io::Result<()> {
        let direct = self.direct.load(Ordering::Acquire);
        match self.files.get(file, direct) {
            Err(cause) if direct && reader::is_refusal(&cause) => {
                self.fall_back(&cause, &self.files.path(file));
                self.files.get(file, false).map(drop)
            }
            other => other.map(drop),
        }
    }
}

fn unopened(path: &Path, cause: &io::Error) -> Error {
    let error = Error::model(format!("cannot open {}: {cause}", path.display()));
    match cause.raw_os_error() {
        Some(libc::EMFILE | libc::ENFILE) => {
            let limit = reader::raise_descriptor_limit(0);
            error.hint(format!("this process may have {limit} open files; allow more with `ulimit -n 256`"))
        }
        _ => error.hint("check that the file exists and may be read"),
    }
}
