//! A disk for tests that does what it is told: reads short, fails, stalls, refuses.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::store::reader::{Disk, DiskFile, System};

/// One call to the disk.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Call<'a> {
    /// A file is opened.
    Open { path: &'a Path, direct: bool },
    /// A read: the how manyth since the start, from 0.
    Read { path: &'a Path, direct: bool, number: usize, offset: u64, len: usize },
}

/// What becomes of it.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Answer {
    /// What the file has.
    Real,
    /// No more than so many bytes.
    Short(usize),
    /// This errno.
    Errno(i32),
}

type Script = dyn Fn(Call<'_>) -> Answer + Send + Sync;

/// Real files behind a script.
pub(crate) struct Faulty {
    script: Arc<Script>,
    reads: Arc<AtomicUsize>,
    /// Directories and the devices they are on.
    devices: Vec<(PathBuf, String)>,
}

impl Faulty {
    /// As [`Faulty::new`], with what is under each of `drives` on a drive of its own.
    pub(crate) fn with_drives(
        drives: &[&Path],
        script: impl Fn(Call<'_>) -> Answer + Send + Sync + 'static,
    ) -> Arc<Self> {
        let devices = drives.iter().enumerate().map(|(number, path)| (path.to_path_buf(), format!("drive {number}")));
        Self::with_devices(devices.collect(), script)
    }

    /// As [`Faulty::new`], with the device that each directory is on.
    pub(crate) fn with_devices(
        devices: Vec<(PathBuf, String)>,
        script: impl Fn(Call<'_>) -> Answer + Send + Sync + 'static,
    ) -> Arc<Self> {
        Arc::new(Self { script: Arc::new(script), reads: Arc::default(), devices })
    }

    /// A disk that asks `script` about every call.
    pub(crate) fn new(script: impl Fn(Call<'_>) -> Answer + Send + Sync + 'static) -> Arc<Self> {
        Self::with_drives(&[], script)
    }
}

impl Disk for Faulty {
    fn device(&self, path: &Path) -> io::Result<String> {
        let found = self.devices.iter().find(|(dir, _)| path.starts_with(dir));
        Ok(found.map_or_else(String::new, |(_, device)| device.clone()))
    }

    fn open(&self, path: &Path, direct: bool) -> io::Result<Arc<dyn DiskFile>> {
        if let Answer::Errno(code) = (self.script)(Call::Open { path, direct }) {
            return Err(io::Error::from_raw_os_error(code));
        }
        let file = System.open(path, false)?;
        let (script, reads) = (Arc::clone(&self.script), Arc::clone(&self.reads));
        Ok(Arc::new(FaultyFile { file, path: path.to_path_buf(), direct, script, reads }))
    }
}

struct FaultyFile {
    file: Arc<dyn DiskFile>,
    path: PathBuf,
    direct: bool,
    script: Arc<Script>,
    reads: Arc<AtomicUsize>,
}

impl DiskFile for FaultyFile {
    fn read_at(&self, bytes: &mut [u8], offset: u64) -> io::Result<usize> {
        if self.direct {
            // What a strict file system refuses.
            let address = bytes.as_ptr() as usize;
            let aligned = [address, bytes.len(), offset as usize].iter().all(|value| value.is_multiple_of(4096));
            assert!(aligned, "a direct read of {} bytes at {offset} into {address:#x}", bytes.len());
        }
        let number = self.reads.fetch_add(1, Ordering::SeqCst);
        let len =
            match (self.script)(Call::Read { path: &self.path, direct: self.direct, number, offset, len: bytes.len() })
            {
                Answer::Real => bytes.len(),
                Answer::Short(len) => len.min(bytes.len()),
                Answer::Errno(code) => return Err(io::Error::from_raw_os_error(code)),
            };
        self.file.read_at(&mut bytes[..len], offset)
    }

    fn forget(&self, offset: u64, len: usize) {
        self.file.forget(offset, len);
    }
}
