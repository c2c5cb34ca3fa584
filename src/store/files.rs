//! Open descriptors of the shards: opened when needed, at most so many at once, the least recently used closed first.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use super::reader::{Disk, DiskFile, raise_descriptor_limit};

/// Descriptors left to the rest of the process: standard streams, output files, sockets.
const RESERVED: u64 = 24;

/// Files that are read from, by number.
pub(crate) struct Files {
    disk: Arc<dyn Disk>,
    paths: Vec<PathBuf>,
    bytes: Vec<u64>,
    open: Mutex<Open>,
}

struct Open {
    /// `[files][direct]`: descriptor and when it was last asked for.
    files: Vec<Option<(Arc<dyn DiskFile>, u64)>>,
    count: usize,
    clock: u64,
    count_max: usize,
}

impl Files {
    /// `paths` with their lengths; `readers` descriptors may be in use beyond those that are kept.
    pub(crate) fn new(disk: Arc<dyn Disk>, paths: &[PathBuf], bytes: &[u64], readers: usize) -> Self {
        let wanted = 2 * paths.len() as u64 + readers as u64 + RESERVED;
        let limit = raise_descriptor_limit(wanted);
        // A reader may hold one that was closed here meanwhile.
        let count_max = limit.saturating_sub(RESERVED + readers as u64).clamp(2, 1 << 20) as usize;
        Self::with_limit(disk, paths, bytes, count_max)
    }

    /// As [`Files::new`], with the number of descriptors to keep.
    pub(crate) fn with_limit(disk: Arc<dyn Disk>, paths: &[PathBuf], bytes: &[u64], count_max: usize) -> Self {
        let files = (0..2 * paths.len()).map(|_| None).collect();
        let open = Mutex::new(Open { files, count: 0, clock: 0, count_max: count_max.max(1) });
        Self { disk, paths: paths.to_vec(), bytes: bytes.to_vec(), open }
    }

    /// Path of file `file`.
    pub(crate) fn path(&self, file: usize) -> &Path {
        &self.paths[file]
    }

    /// Length of file `file` when the model was opened.
    pub(crate) fn bytes(&self, file: usize) -> u64 {
        self.bytes[file]
    }

    /// A descriptor of file `file`. Opens outside the lock, so that one drive that hangs does not hold up the others.
    pub(crate) fn get(&self, file: usize, direct: bool) -> io::Result<Arc<dyn DiskFile>> {
        let key = 2 * file + usize::from(direct);
        if let Some(open) = self.lock().find(key) {
            return Ok(open);
        }
        let opened = match self.disk.open(&self.paths[file], direct) {
            Err(error) if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) => {
                self.lock().close_all();
                self.disk.open(&self.paths[file], direct)?
            }
            other => other?,
        };
        Ok(self.lock().keep(key, opened))
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    fn find(&mut self, key: usize) -> Option<Arc<dyn DiskFile>> {
        self.clock += 1;
        let (file, used) = self.files[key].as_mut()?;
        *used = self.clock;
        Some(Arc::clone(file))
    }

    fn keep(&mut self, key: usize, opened: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        // Another reader may have been faster; its descriptor serves as well.
        if let Some(file) = self.find(key) {
            return file;
        }
        if self.count >= self.count_max {
            let oldest = (0..self.files.len()).filter_map(|at| Some((self.files[at].as_ref()?.1, at))).min();
            if let Some((_, at)) = oldest {
                self.files[at] = None;
                self.count -= 1;
            }
        }
        self.files[key] = Some((Arc::clone(&opened), self.clock));
        self.count += 1;
        opened
    }

    /// The system is out of descriptors: gives back all, and keeps fewer from now on.
    fn close_all(&mut self) {
        self.count_max = (self.count * 3 / 4).max(1);
        self.files.iter_mut().for_each(|file| *file = None);
        self.count = 0;
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    /// Counts descriptors and refuses more than `limit`.
    struct Counting {
        live: Arc<AtomicUsize>,
        opened: AtomicUsize,
        limit: usize,
    }

    struct Counted(Arc<AtomicUsize>);

    impl Disk for Counting {
        fn open(&self, _: &Path, _: bool) -> io::Result<Arc<dyn DiskFile>> {
            if self.live.load(Ordering::SeqCst) >= self.limit {
                return Err(io::Error::from_raw_os_error(libc::EMFILE));
            }
            self.opened.fetch_add(1, Ordering::SeqCst);
            self.live.fetch_add(1, Ordering::SeqCst);
            Ok(Arc::new(Counted(Arc::clone(&self.live))))
        }
    }

    impl DiskFile for Counted {
        fn read_at(&self, _: &mut [u8], _: u64) -> io::Result<usize> {
            Ok(0)
        }

        fn forget(&self, _: u64, _: usize) {}
    }

    impl Drop for Counted {
        fn drop(&mut self) {
            self.0.fetch_sub(1, Ordering::SeqCst);
        }
    }

    fn files(limit: usize, count_max: usize) -> (Arc<Counting>, Files) {
        let disk = Arc::new(Counting { live: Arc::default(), opened: AtomicUsize::new(0), limit });
        let paths: Vec<_> = (0..100).map(|i| PathBuf::from(format!("shard-{i}"))).collect();
        let shared: Arc<dyn Disk> = Arc::<Counting>::clone(&disk);
        (disk, Files::with_limit(shared, &paths, &[0; 100], count_max))
    }

    #[test]
    fn no_more_descriptors_are_kept_than_allowed() {
        let (disk, files) = files(usize::MAX, 10);
        for file in (0..100).chain(0..100) {
            files.get(file, true).unwrap();
            assert!(disk.live.load(Ordering::SeqCst) <= 10);
        }
    }

    #[test]
    fn a_file_in_use_is_opened_once() {
        let (disk, files) = files(usize::MAX, 2);
        for file in 1..50 {
            files.get(0, true).unwrap();
            files.get(file, true).unwrap();
        }
        assert_eq!(disk.opened.load(Ordering::SeqCst), 50);
    }

    #[test]
    fn running_out_of_descriptors_closes_the_kept_ones_and_goes_on() {
        let (disk, files) = files(7, 1000);
        for round in 0..3 {
            for file in 0..100 {
                files.get(file, round % 2 == 0).unwrap();
                assert!(disk.live.load(Ordering::SeqCst) <= 7);
            }
        }
    }

    #[test]
    fn no_descriptor_at_all_is_an_error() {
        let (_, files) = files(0, 10);
        assert_eq!(files.get(3, false).err().unwrap().raw_os_error(), Some(libc::EMFILE));
    }
}
