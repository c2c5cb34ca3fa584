//! Copies experts from the shards to the roots with several threads: read once, written to each of its roots, synced, read
//! again past the page cache, renamed, and then, in batches, listed.

use std::collections::BTreeSet;
use std::fs;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::thread;
use std::time::{Duration, Instant};

use xxhash_rust::xxh3::xxh3_64;

use super::files;
use super::roots::Root;
use super::source::{Buffers, Shards, damaged};
use super::work::Job;
use crate::checkpoint::ExpertTable;
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::store::ExpertId;
use crate::store::packed::{List, Source, expert_path, layer_dir};

/// Finished experts are listed so often: what a killed process has not listed is written again.
const LIST_INTERVAL: Duration = Duration::from_secs(2);
/// Between two looks at the interrupt while nothing arrives.
const WAIT: Duration = Duration::from_millis(100);
/// Threads a drive, so that one reads while another waits for a sync.
const THREADS_A_DRIVE: usize = 3;
const THREADS_MAX: usize = 12;

/// Where experts come from and go to.
pub(super) struct Copier<'a> {
    pub shards: &'a Shards<'a>,
    pub table: &'a ExpertTable,
    pub source: &'a Source,
    pub roots: &'a [Root],
    /// Read the copies that are there already again, so that nothing is given up for a file that is damaged.
    pub check_held: bool,
    pub interrupt: &'a Interrupt,
}

/// What has been done so far, as the roots' lists say it.
pub(super) struct Ledger {
    pub lists: Vec<List>,
    /// `[roots]`: layers whose directories have names that are not synced yet.
    unsynced: Vec<BTreeSet<u16>>,
}

/// A copy that is whole.
struct Done {
    id: ExpertId,
    root: u16,
    checksum: u64,
    written: bool,
}

impl Ledger {
    pub fn new(lists: Vec<List>) -> Self {
        let unsynced = lists.iter().map(|_| BTreeSet::new()).collect();
        Self { lists, unsynced }
    }

    fn add(&mut self, done: &Done) {
        let root = usize::from(done.root);
        if done.written {
            self.lists[root].experts.insert(done.id, done.checksum);
            self.unsynced[root].insert(done.id.layer);
        }
    }

    /// Makes the names of what is finished last, then lists it.
    ///
    /// # Errors
    /// Kind `Io`.
    fn flush(&mut self, roots: &[Root], source: &Source) -> Result<()> {
        for ((root, list), layers) in roots.iter().zip(&self.lists).zip(&mut self.unsynced) {
            if layers.is_empty() {
                continue;
            }
            for layer in &*layers {
                files::sync_dir(&layer_dir(&root.dir, *layer))?;
            }
            files::sync_dir(&root.dir)?;
            list.write(&root.dir, source)?;
            layers.clear();
        }
        Ok(())
    }
}

impl Copier<'_> {
    /// Does all of `jobs`; `done` is told each copy's bytes. What is finished is listed whatever the outcome.
    ///
    /// # Errors
    /// The first failure. Kind `Io` for reads and writes, `Model` for damage, `Interrupted`.
    pub fn run(&self, jobs: &[Job], ledger: &mut Ledger, done: &mut dyn FnMut(u64)) -> Result<()> {
        if jobs.is_empty() {
            return Ok(());
        }
        let drives: BTreeSet<&str> = self.roots.iter().map(|root| root.drive.as_str()).collect();
        let threads = (THREADS_A_DRIVE * drives.len()).min(THREADS_MAX).min(jobs.len());
        let checksums: Vec<Vec<Option<u64>>> = (jobs.iter())
            .map(|job| job.held.iter().map(|root| ledger.lists[usize::from(*root)].experts.get(&job.id).copied()))
            .map(Iterator::collect)
            .collect();
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        let (send, receive) = channel();
        thread::scope(|scope| {
            for number in 0..threads {
                let send = send.clone();
                let (next, stop, checksums) = (&next, &stop, &checksums);
                let work = move || self.work(jobs, checksums, next, stop, &send);
                let spawned = thread::Builder::new().name(format!("pack-{number}")).spawn_scoped(scope, work);
                if let Err(e) = spawned {
                    stop.store(true, Ordering::Relaxed);
                    return Err(Error::other(format!("cannot start a thread: {e}")));
                }
            }
            drop(send);
            let mut outcome = Ok(());
            let mut listed = Instant::now();
            loop {
                match receive.recv_timeout(WAIT) {
                    Ok(Ok(copy)) => {
                        let copy: Done = copy;
                        done(self.source.layout.file_bytes);
                        ledger.add(&copy);
                    }
                    Ok(Err(error)) if outcome.is_ok() => outcome = Err(error),
                    Ok(Err(_)) | Err(RecvTimeoutError::Timeout) => {}
                    Err(RecvTimeoutError::Disconnected) => break,
                }
                if self.interrupt.is_raised() {
                    // The others may take a while to notice, and the process may not live so long.
                    stop.store(true, Ordering::Relaxed);
                    outcome = outcome.and(self.interrupt.check());
                    break;
                }
                if outcome.is_err() {
                    stop.store(true, Ordering::Relaxed);
                } else if listed.elapsed() >= LIST_INTERVAL {
                    outcome = ledger.flush(self.roots, self.source);
                    listed = Instant::now();
                }
            }
            let flushed = ledger.flush(self.roots, self.source);
            outcome.and(flushed)
        })
    }

    fn work(
        &self,
        jobs: &[Job],
        checksums: &[Vec<Option<u64>>],
        next: &AtomicUsize,
        stop: &AtomicBool,
        send: &Sender<Result<Done>>,
    ) {
        let mut buffers = match Buffers::new(&self.source.layout) {
            Ok(buffers) => buffers,
            Err(error) => return drop(send.send(Err(error))),
        };
        loop {
            let number = next.fetch_add(1, Ordering::Relaxed);
            let Some(job) = jobs.get(number).filter(|_| !stop.load(Ordering::Relaxed)) else { return };
            if let Err(error) = self.copy(job, &checksums[number], &mut buffers, send) {
                stop.store(true, Ordering::Relaxed);
                return drop(send.send(Err(error)));
            }
        }
    }

    fn copy(
        &self,
        job: &Job,
        checksums: &[Option<u64>],
        buffers: &mut Buffers,
        send: &Sender<Result<Done>>,
    ) -> Result<()> {
        let parts = self.shards.parts();
        let known = || job.held.iter().zip(checksums).filter_map(|(root, sum)| Some((*root, (*sum)?)));
        if self.table.is_in_shards(job.id.layer, job.id.expert) {
            self.shards.read(job.id, buffers, self.interrupt)?;
        } else {
            self.read_a_copy(job.id, known(), buffers, parts)?;
        }
        let checksum = xxh3_64(buffers.expert());
        for (root, listed) in known() {
            let path = expert_path(&self.roots[usize::from(root)].dir, job.id, parts);
            if listed != checksum {
                return Err(Error::model(format!(
                    "{}: expert {} has checksum {listed:016x} in the list, but the shards' has {checksum:016x}",
                    path.display(),
                    job.id
                ))
                .hint("one of them is damaged: `deltafin inspect --verify` reads both"));
            }
            if self.check_held {
                let (expert, read) = buffers.read_file(&path, job.id)?;
                if expert != read {
                    return Err(damaged(&path, job.id));
                }
                let _ = send.send(Ok(Done { id: job.id, root, checksum, written: false }));
            }
        }
        for root in &job.write {
            self.interrupt.check()?;
            self.write(job.id, &self.roots[usize::from(*root)].dir, buffers, parts)?;
            let _ = send.send(Ok(Done { id: job.id, root: *root, checksum, written: true }));
        }
        Ok(())
    }

    /// Reads an expert that has left the shards from the first root whose copy is good.
    fn read_a_copy(
        &self,
        id: ExpertId,
        copies: impl Iterator<Item = (u16, u64)>,
        buffers: &mut Buffers,
        parts: usize,
    ) -> Result<()> {
        let mut failed = None;
        for (root, checksum) in copies {
            match buffers.read_from_root(&self.roots[usize::from(root)].dir, id, checksum, parts) {
                Ok(()) => return Ok(()),
                Err(error) => failed = Some(error),
            }
        }
        Err(failed
            .unwrap_or_else(|| Error::model(format!("expert {id} has left the shards, and no root given has it"))))
    }

    fn write(&self, id: ExpertId, root: &Path, buffers: &mut Buffers, parts: usize) -> Result<()> {
        let path = expert_path(root, id, parts);
        let layer = layer_dir(root, id.layer);
        match fs::create_dir(&layer) {
            Err(e) if e.kind() != std::io::ErrorKind::AlreadyExists => return Err(files::unwritten(&layer, &e)),
            _ => {}
        }
        files::create(&path, |file, temporary| {
            files::write_all_direct(file, temporary, &path, buffers.expert(), self.interrupt)?;
            let (written, read) = buffers.read_file(temporary, id)?;
            if written == read {
                return Ok(());
            }
            Err(Error::new(Kind::Io, format!("{}: reads other bytes than were written", path.display()))
                .hint("the drive, its cable or this machine's memory is faulty: do not trust what is on it"))
        })
    }
}
