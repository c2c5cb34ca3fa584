//! The files that hold experts and their open descriptors: opened when needed, at most so many at once, the least recently used closed first.

use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::ExpertId;
use super::packed::{PackedRoot, expert_path};
use super::reader::{Disk, DiskFile, raise_descriptor_limit};
use crate::checkpoint::Manifest;

/// Descriptors left to the rest of the process: standard streams, output files, sockets.
const RESERVED: u64 = 24;

/// How often to try again when the system is out of descriptors, each time a millisecond later.
const OPEN_ATTEMPTS: u64 = 16;

/// Numbers and names of the files that hold experts: the shards first, then each root's, one an expert. K3 has 82,432 of
/// the latter on a root, so their names are made when they are needed.
pub(crate) struct Names {
    shards: Vec<PathBuf>,
    shard_bytes: Vec<u64>,
    roots: Vec<RootNames>,
    moe_layers: Vec<u16>,
    num_experts: usize,
}

struct RootNames {
    dir: PathBuf,
    parts: usize,
    file_bytes: u64,
}

impl Names {
    /// The shards of `manifest` alone.
    pub(crate) fn of_shards(manifest: &Manifest) -> Self {
        Self::new(manifest, &[])
    }

    /// Some files and their lengths.
    pub(crate) fn of_files(paths: Vec<PathBuf>, bytes: Vec<u64>) -> Self {
        Self { shards: paths, shard_bytes: bytes, roots: Vec::new(), moe_layers: Vec::new(), num_experts: 0 }
    }

    /// The shards of `manifest` and the files of `roots`.
    pub(crate) fn new(manifest: &Manifest, roots: &[PackedRoot]) -> Self {
        let experts = manifest.experts.as_ref();
        let roots = roots.iter().map(|root| RootNames {
            dir: root.dir.clone(),
            parts: root.part_offsets.len(),
            file_bytes: root.file_bytes,
        });
        Self {
            shards: manifest.shards.clone(),
            shard_bytes: manifest.shard_bytes.clone(),
            roots: roots.collect(),
            moe_layers: experts.map_or_else(Vec::new, |experts| experts.moe_layers.clone()),
            num_experts: experts.map_or(0, |experts| experts.num_experts),
        }
    }

    /// Number of files.
    pub(crate) fn len(&self) -> usize {
        self.shards.len() + self.roots.len() * self.a_root()
    }

    /// Files of a root, whether they are there or not.
    fn a_root(&self) -> usize {
        self.moe_layers.len() * self.num_experts
    }

    /// The file of expert `index` on root `root`.
    pub(crate) fn of_root(&self, root: usize, index: u32) -> u32 {
        (self.shards.len() + root * self.a_root()) as u32 + index
    }

    /// The root that file `file` is on; `None` for a shard.
    pub(crate) fn root_of(&self, file: usize) -> Option<(usize, &Path)> {
        let root = file.checked_sub(self.shards.len())? / self.a_root().max(1);
        Some((root, &self.roots.get(root)?.dir))
    }

    /// Path of file `file`.
    pub(crate) fn path(&self, file: usize) -> PathBuf {
        let Some((root, dir)) = self.root_of(file) else { return self.shards[file].clone() };
        let index = (file - self.shards.len()) % self.a_root();
        let id =
            ExpertId { layer: self.moe_layers[index / self.num_experts], expert: (index % self.num_experts) as u16 };
        expert_path(dir, id, self.roots[root].parts)
    }

    /// Length of file `file` when the model was opened.
    pub(crate) fn bytes(&self, file: usize) -> u64 {
        match self.root_of(file) {
            Some((root, _)) => self.roots[root].file_bytes,
            None => self.shard_bytes[file],
        }
    }
}

/// Files that are read from, by number.
pub(crate) struct Files {
    disk: Arc<dyn Disk>,
    names: Names,
    open: Mutex<Open>,
}

struct Open {
    /// By file and mode: descriptor and when it was last asked for.
    files: FxHashMap<usize, (Arc<dyn DiskFile>, u64)>,
    clock: u64,
    count_max: usize,
}

impl Files {
    /// Files of `names`; `readers` descriptors may be in use beyond those that are kept.
    pub(crate) fn new(disk: Arc<dyn Disk>, names: Names, readers: usize) -> Self {
        let wanted = 2 * names.len() as u64 + readers as u64 + RESERVED;
        let limit = raise_descriptor_limit(wanted);
        // A reader may hold one that was closed here meanwhile.
        let count_max = limit.saturating_sub(RESERVED + readers as u64).clamp(2, 1 << 20) as usize;
        Self::with_limit(disk, names, count_max)
    }

    /// As [`Files::new`], with the number of descriptors to keep.
    pub(crate) fn with_limit(disk: Arc<dyn Disk>, names: Names, count_max: usize) -> Self {
        let open = Mutex::new(Open { files: FxHashMap::default(), clock: 0, count_max: count_max.max(1) });
        Self { disk, names, open }
    }

    /// Their names.
    pub(crate) fn names(&self) -> &Names {
        &self.names
    }

    /// Path of file `file`.
    pub(crate) fn path(&self, file: usize) -> PathBuf {
        self.names.path(file)
    }

    /// Length of file `file` when the model was opened.
    pub(crate) fn bytes(&self, file: usize) -> u64 {
        self.names.bytes(file)
    }

    /// Name of the physical device that `path` is on.
    pub(crate) fn device(&self, path: &Path) -> io::Result<String> {
        self.disk.device(path)
    }

    /// A descriptor of file `file`. Opens outside the lock, so that one drive that hangs does not hold up the others.
    pub(crate) fn get(&self, file: usize, direct: bool) -> io::Result<Arc<dyn DiskFile>> {
        let key = 2 * file + usize::from(direct);
        if let Some(open) = self.lock().find(key) {
            return Ok(open);
        }
        let path = self.path(file);
        let mut attempt = 0;
        let opened = loop {
            match self.disk.open(&path, direct) {
                Err(error)
                    if matches!(error.raw_os_error(), Some(libc::EMFILE | libc::ENFILE)) && attempt < OPEN_ATTEMPTS =>
                {
                    self.lock().close_all();
                    // At first those kept here; then those that readers are using may be closed meanwhile.
                    std::thread::sleep(Duration::from_millis(attempt));
                    attempt += 1;
                }
                other => break other?,
            }
        };
        Ok(self.lock().keep(key, opened))
    }

    /// Closes file `file`: a drive that went and came again has it anew.
    pub(crate) fn close(&self, file: usize) {
        let mut open = self.lock();
        for key in [2 * file, 2 * file + 1] {
            open.files.remove(&key);
        }
    }

    fn lock(&self) -> MutexGuard<'_, Open> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Open {
    fn find(&mut self, key: usize) -> Option<Arc<dyn DiskFile>> {
        self.clock += 1;
        let (file, used) = self.files.get_mut(&key)?;
        *used = self.clock;
        Some(Arc::clone(file))
    }

    fn keep(&mut self, key: usize, opened: Arc<dyn DiskFile>) -> Arc<dyn DiskFile> {
        // Another reader may have been faster; its descriptor serves as well.
        if let Some(file) = self.find(key) {
            return file;
        }
        if self.files.len() >= self.count_max {
            let oldest = self.files.iter().min_by_key(|(_, (_, used))| *used).map(|(key, _)| *key);
            if let Some(oldest) = oldest {
                self.files.remove(&oldest);
            }
        }
        self.files.insert(key, (Arc::clone(&opened), self.clock));
        opened
    }

    /// The system is out of descriptors: gives back all, and keeps fewer from now on.
    fn close_all(&mut self) {
        // Others may have closed all but now: no reason to keep hardly any for ever.
        let kept = self.files.len().max(self.count_max / 2);
        self.count_max = (self.count_max.min(kept) * 3 / 4).max(1);
        self.files.clear();
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
        let shards: Vec<_> = (0..100).map(|i| PathBuf::from(format!("shard-{i}"))).collect();
        let names = Names::of_files(shards, vec![0; 100]);
        let shared: Arc<dyn Disk> = Arc::<Counting>::clone(&disk);
        (disk, Files::with_limit(shared, names, count_max))
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
