//! Positional reads of one file, and the system calls beneath them. A read is whole or an error: short reads and
//! interrupted calls are continued here. Which file, and whether past the page cache, is `volume`'s business.

use std::fs::File;
use std::io;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use crate::device::Device;
use crate::error::{Error, Kind};
use crate::memory::ALIGN;

/// Bytes of one call at most: macOS refuses 2 GiB and more, Linux stops at 0x7ffff000.
const CALL_BYTES_MAX: usize = 1 << 30;

/// Opens files; the operating system, or what a test puts in its place.
pub(crate) trait Disk: Send + Sync {
    /// Opens `path` for reading, past the page cache when `direct`. Fails with a [`is_refusal`] error when that cannot
    /// be had.
    fn open(&self, path: &Path, direct: bool) -> io::Result<Arc<dyn DiskFile>>;

    /// Name of the physical device that `path` is on: what is on one device has one name.
    fn device(&self, path: &Path) -> io::Result<String> {
        Device::of(path).map(|device| device.name)
    }
}

/// An open file.
pub(crate) trait DiskFile: Send + Sync {
    /// One positional read; may return less than asked for, 0 at the end of the file.
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize>;

    /// Lets the page cache drop `offset .. offset + len`, which will not be read again soon.
    fn forget(&self, offset: u64, len: usize);
}

/// What one whole read cost.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Tally {
    /// Bytes asked of the system.
    pub bytes: u64,
    /// Calls made.
    pub calls: u64,
}

impl std::ops::AddAssign for Tally {
    fn add_assign(&mut self, other: Self) {
        self.bytes += other.bytes;
        self.calls += other.calls;
    }
}

/// Why a read did not deliver all bytes.
#[derive(Debug)]
pub(crate) enum Cause {
    /// The file ends before.
    EndOfFile,
    /// The system said no.
    System(io::Error),
}

/// A read that failed for good.
#[derive(Debug)]
pub(crate) struct ReadError {
    /// The file.
    pub path: PathBuf,
    /// Where the read began.
    pub offset: u64,
    /// Bytes that were needed from there.
    pub wanted: usize,
    /// Bytes that came.
    pub got: usize,
    /// What stopped it.
    pub cause: Cause,
}

impl ReadError {
    /// For the user: `what` could not be read.
    pub(crate) fn into_error(self, kind: Kind, what: impl std::fmt::Display) -> Error {
        let Self { path, offset, wanted, got, cause } = self;
        let place =
            format!("cannot read {what}: {}: offset {offset}, wanted {wanted} bytes, got {got}", path.display());
        match cause {
            Cause::EndOfFile => Error::new(kind, format!("{place}: end of file"))
                .hint("the file is shorter than its header says or was cut meanwhile; fetch it again"),
            Cause::System(cause) => Error::new(kind, format!("{place}: {cause}"))
                .hint("one file alone points to that file or sector, all files of a drive to the drive or its mount"),
        }
    }
}

/// Whether `error` says that this kind of access, not this data, cannot be had.
pub(crate) fn is_refusal(error: &io::Error) -> bool {
    error.raw_os_error().is_some_and(|code| {
        code == libc::EINVAL || code == libc::ENOTSUP || code == libc::EOPNOTSUPP || code == libc::ENOSYS
    })
}

/// Why [`continue_read`] stopped.
pub(crate) enum Stop {
    /// All needed bytes are there.
    Done,
    /// The system gave less than a page and no error: the rest cannot be read from an aligned offset.
    Unaligned,
    /// A read returned nothing.
    EndOfFile,
    /// A read failed.
    Failed(io::Error),
}

/// Reads on from `got` until `needed` bytes of `bytes` are filled; `bytes[0]` is at `offset` of the file.
///
/// With `step` > 1 every call starts at a multiple of it, so a short read is continued at the last whole step.
pub(crate) fn continue_read(
    file: &dyn DiskFile,
    bytes: &mut [u8],
    offset: u64,
    needed: usize,
    step: usize,
    got: &mut usize,
    tally: &mut Tally,
) -> Stop {
    while *got < needed {
        let end = bytes.len().min(*got + CALL_BYTES_MAX);
        let part = &mut bytes[*got..end];
        let asked = part.len();
        tally.calls += 1;
        tally.bytes += asked as u64;
        match file.read_at(part, offset + *got as u64) {
            Ok(0) => return Stop::EndOfFile,
            Ok(count) => {
                let reached = *got + count.min(asked);
                let whole = reached / step * step;
                if reached >= needed {
                    *got = reached;
                } else if whole > *got {
                    *got = whole;
                } else {
                    *got = reached;
                    return Stop::Unaligned;
                }
            }
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            Err(error) => return Stop::Failed(error),
        }
    }
    Stop::Done
}

/// The operating system's files.
pub(crate) struct System;

impl Disk for System {
    fn open(&self, path: &Path, direct: bool) -> io::Result<Arc<dyn DiskFile>> {
        let mut options = File::options();
        options.read(true);
        // Opening a pipe would wait for a writer; with this it does not, and files know no difference.
        let wanted = if direct { sys::DIRECT } else { 0 };
        let file = options.custom_flags(libc::O_NONBLOCK | wanted).open(path)?;
        if !file.metadata()?.is_file() {
            return Err(io::Error::new(io::ErrorKind::InvalidData, "no regular file"));
        }
        if direct {
            sys::past_page_cache(&file)?;
        } else {
            sys::no_read_ahead(&file);
        }
        Ok(Arc::new(SystemFile(file)))
    }
}

struct SystemFile(File);

impl DiskFile for SystemFile {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        self.0.read_at(bytes, offset)
    }

    fn forget(&self, offset: u64, len: usize) {
        sys::forget(&self.0, offset, len);
    }
}

#[cfg(target_os = "linux")]
mod sys {
    use std::fs::File;
    use std::io;
    use std::os::fd::AsRawFd;

    use super::ALIGN;

    /// Flags of `open` for reads past the page cache.
    pub const DIRECT: i32 = libc::O_DIRECT;

    /// Checks that the open `O_DIRECT` file really bypasses the page cache, as far as the system tells.
    pub fn past_page_cache(file: &File) -> io::Result<()> {
        let fd = file.as_raw_fd();
        // SAFETY: all-zero bytes are a valid `statfs` and a valid `statx`, structures of integers.
        let (mut fs, mut stat): (libc::statfs, libc::statx) = unsafe { (std::mem::zeroed(), std::mem::zeroed()) };
        // SAFETY: `fd` is open for as long as `file` is borrowed, and `fs` outlives the call.
        if unsafe { libc::fstatfs(fd, &mut fs) } == 0 {
            // tmpfs and ramfs. Newer kernels accept O_DIRECT there, though the files are nothing but page cache.
            let in_memory = [0x0102_1994, 0x8584_58f6];
            #[allow(clippy::unnecessary_cast, reason = "the field's type depends on the target")]
            if in_memory.contains(&(fs.f_type as i64)) {
                return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
            }
        }
        // SAFETY: `fd` is open, the path is an empty C string (which AT_EMPTY_PATH asks for), `stat` outlives the call.
        let known = unsafe {
            libc::statx(fd, c"".as_ptr(), libc::AT_EMPTY_PATH, libc::STATX_DIOALIGN, &mut stat) == 0
                && stat.stx_mask & libc::STATX_DIOALIGN != 0
        };
        if known {
            let (memory, offset) = (stat.stx_dio_mem_align as usize, stat.stx_dio_offset_align as usize);
            if memory == 0 || offset == 0 {
                return Err(io::Error::from_raw_os_error(libc::EOPNOTSUPP));
            }
            if !ALIGN.is_multiple_of(memory) || !ALIGN.is_multiple_of(offset) {
                return Err(io::Error::from_raw_os_error(libc::EINVAL));
            }
        }
        Ok(())
    }

    /// Experts are read at random: what the system would read ahead of them only fills the page cache.
    pub fn no_read_ahead(file: &File) {
        // SAFETY: advice about an open descriptor; touches no memory. Failure costs speed only.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), 0, 0, libc::POSIX_FADV_RANDOM) };
    }

    /// Lets the page cache drop a range.
    pub fn forget(file: &File, offset: u64, len: usize) {
        let (Ok(offset), Ok(len)) = (offset.try_into(), len.try_into()) else { return };
        // SAFETY: advice about an open descriptor; touches no memory. Failure costs memory the system can take back.
        unsafe { libc::posix_fadvise(file.as_raw_fd(), offset, len, libc::POSIX_FADV_DONTNEED) };
    }
}

#[cfg(target_os = "macos")]
mod sys {
    use std::fs::File;
    use std::io;
    use std::os::fd::AsRawFd;

    /// Flags of `open` for reads past the page cache: there are none, it is told of the open file.
    pub const DIRECT: i32 = 0;

    /// Turns caching and read-ahead off for this descriptor.
    pub fn past_page_cache(file: &File) -> io::Result<()> {
        // SAFETY: flags of an open descriptor; touches no memory.
        let done = unsafe { libc::fcntl(file.as_raw_fd(), libc::F_NOCACHE, 1) };
        no_read_ahead(file);
        if done == -1 { Err(io::Error::last_os_error()) } else { Ok(()) }
    }

    /// Experts are read at random: what the system would read ahead of them only fills the page cache.
    pub fn no_read_ahead(file: &File) {
        // SAFETY: flags of an open descriptor; touches no memory. Failure costs speed only.
        unsafe { libc::fcntl(file.as_raw_fd(), libc::F_RDAHEAD, 0) };
    }

    /// There is no call for this here; the system reclaims clean pages on its own.
    pub fn forget(_file: &File, _offset: u64, _len: usize) {}
}

#[cfg(not(any(target_os = "linux", target_os = "macos")))]
mod sys {
    use std::fs::File;
    use std::io;

    /// No flags.
    pub const DIRECT: i32 = 0;

    /// No way past the page cache is known for this system.
    pub fn past_page_cache(_file: &File) -> io::Result<()> {
        Err(io::Error::from_raw_os_error(libc::ENOTSUP))
    }

    /// No advice to give.
    pub fn no_read_ahead(_file: &File) {}

    /// No advice to give.
    pub fn forget(_file: &File, _offset: u64, _len: usize) {}
}

/// Descriptors this process may have, after raising the soft limit to `wanted` as far as the hard limit allows.
pub(crate) fn raise_descriptor_limit(wanted: u64) -> u64 {
    let mut limit = libc::rlimit { rlim_cur: 0, rlim_max: 0 };
    // SAFETY: `limit` is a valid structure that outlives the call.
    if unsafe { libc::getrlimit(libc::RLIMIT_NOFILE, &mut limit) } != 0 {
        return 64;
    }
    if limit.rlim_cur < wanted && limit.rlim_cur < limit.rlim_max {
        let raised = libc::rlimit { rlim_cur: wanted.min(limit.rlim_max), rlim_max: limit.rlim_max };
        // SAFETY: as above; changes nothing but this process's own limit.
        if unsafe { libc::setrlimit(libc::RLIMIT_NOFILE, &raised) } == 0 {
            return raised.rlim_cur;
        }
    }
    limit.rlim_cur
}

/// The part of `len` that ends at a whole page.
pub(crate) fn whole_pages(len: u64) -> usize {
    usize::try_from(len).unwrap_or(usize::MAX) / ALIGN * ALIGN
}
