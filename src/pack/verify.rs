//! Reads every byte of a model and of its packed roots: checksums of expert and trunk files, scales in the shards, and the
//! shards' experts against the checksums of the roots that have them. All places are read at once, each by its own threads.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::xxh3_64;

use super::source::{Buffers, Shards};
use super::trunk;
use crate::checkpoint::{ExpertTable, Manifest};
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::store::ExpertId;
use crate::store::packed::{PackedRoot, expert_path};
use crate::trunk::{TrunkFile, TrunkFormat};

/// Threads a place: enough to keep a drive busy with whole experts.
const THREADS_A_PLACE: usize = 3;
const PIECE_BYTES: usize = 4 << 20;
/// Damages that are told one by one.
const DAMAGES_MAX: usize = 100;
/// Between two looks at the threads.
const WAIT: Duration = Duration::from_millis(20);

/// What reading everything came to.
#[derive(Debug, serde::Serialize)]
pub struct Verified {
    /// Bytes read.
    pub bytes: u64,
    /// Copies of experts read.
    pub copies: u64,
    /// Seconds it took.
    pub seconds: f64,
    /// What is damaged: file, expert, offsets; the first of them.
    pub damages: Vec<String>,
    /// How many there are.
    pub damaged: u64,
}

/// One place with experts.
#[derive(Clone, Copy)]
enum Place<'a> {
    Shards,
    Root(&'a PackedRoot),
}

struct Verifier<'a> {
    manifest: &'a Manifest,
    shards: Option<(Shards<'a>, &'a ExpertTable)>,
    roots: &'a [PackedRoot],
    /// What an expert's bytes must come to, by the first root that has it.
    checksums: FxHashMap<ExpertId, u64>,
    bytes: AtomicU64,
    copies: AtomicU64,
    damages: Mutex<Vec<String>>,
    damaged: AtomicU64,
    interrupt: &'a Interrupt,
}

/// Reads everything; `progress` is told the bytes read and to read.
///
/// # Errors
/// What keeps it from being read at all; `Interrupted`. Damage is no error but a finding.
pub fn verify(
    manifest: &Manifest,
    roots: &[PackedRoot],
    progress: &mut dyn FnMut(u64, u64),
    interrupt: &Interrupt,
) -> Result<Verified> {
    let begun = Instant::now();
    let shards = match &manifest.experts {
        Some(table) => {
            let ids = table.ids().map(|(layer, expert)| ExpertId { layer, expert });
            Some((Shards::open(manifest, table, ids)?, table))
        }
        None => None,
    };
    let mut checksums = FxHashMap::default();
    for expert in roots.iter().flat_map(|root| &root.experts) {
        checksums.entry(expert.id).or_insert(expert.checksum);
    }
    let verifier = Verifier {
        manifest,
        shards,
        roots,
        checksums,
        bytes: AtomicU64::new(0),
        copies: AtomicU64::new(0),
        damages: Mutex::default(),
        damaged: AtomicU64::new(0),
        interrupt,
    };
    verifier.run(progress)?;
    let mut damages = verifier.damages.into_inner().unwrap_or_else(PoisonError::into_inner);
    damages.sort();
    Ok(Verified {
        bytes: verifier.bytes.into_inner(),
        copies: verifier.copies.into_inner(),
        seconds: begun.elapsed().as_secs_f64(),
        damages,
        damaged: verifier.damaged.into_inner(),
    })
}

impl Verified {
    /// The error that tells of the damage, if there is any.
    pub fn error(&self) -> Option<Error> {
        if self.damaged == 0 {
            return None;
        }
        let what = if self.damaged == 1 {
            "1 place is damaged".into()
        } else {
            format!("{} places are damaged", self.damaged)
        };
        let mut message = self.damages.iter().fold(what, |message, damage| message + "\n  " + damage);
        let more = self.damaged - self.damages.len() as u64;
        if more > 0 {
            message += &format!("\n  … and {more} more");
        }
        Some(Error::model(message).hint(
            "remove a damaged expert or trunk file and give the same `deltafin pack` again, which writes it anew; download a damaged shard again",
        ))
    }
}

impl Verifier<'_> {
    fn run(&self, progress: &mut dyn FnMut(u64, u64)) -> Result<()> {
        let mut places: Vec<(Place<'_>, Vec<ExpertId>)> = Vec::new();
        if let Some((_, table)) = &self.shards {
            let there = table.ids().filter(|(layer, expert)| table.is_in_shards(*layer, *expert));
            places.push((Place::Shards, there.map(|(layer, expert)| ExpertId { layer, expert }).collect()));
        }
        for root in self.roots {
            places.push((Place::Root(root), root.experts.iter().map(|expert| expert.id).collect()));
        }
        let copies: u64 = places.iter().map(|(_, experts)| experts.len() as u64).sum();
        let files: Vec<(TrunkFormat, PathBuf)> =
            self.roots.iter().flat_map(|root| trunk::files_in(&root.dir)).collect();
        let file_bytes: u64 = files.iter().filter_map(|(_, file)| file.metadata().ok()).map(|meta| meta.len()).sum();
        let expert_bytes = self.shards.as_ref().map_or(0, |(shards, _)| shards.layout.file_bytes);
        let all = copies * expert_bytes + self.manifest.trunk_bytes() + file_bytes;
        let next: Vec<AtomicUsize> = places.iter().map(|_| AtomicUsize::new(0)).collect();
        thread::scope(|scope| {
            let mut threads = Vec::new();
            for ((place, experts), next) in places.iter().zip(&next) {
                for _ in 0..THREADS_A_PLACE.min(experts.len()) {
                    threads.push(scope.spawn(move || self.read_experts(*place, experts, next)));
                }
            }
            threads.push(scope.spawn(|| self.read_trunk(&files)));
            while !threads.iter().all(thread::ScopedJoinHandle::is_finished) && !self.interrupt.is_raised() {
                thread::sleep(WAIT);
                progress(self.bytes.load(Ordering::Relaxed), all);
            }
            let panicked = || Err(Error::other("a thread that read a drive has ended early"));
            threads.into_iter().try_for_each(|thread| thread.join().unwrap_or_else(|_| panicked()))
        })
    }

    fn read_experts(&self, place: Place<'_>, experts: &[ExpertId], next: &AtomicUsize) -> Result<()> {
        let Some((shards, _)) = &self.shards else { return Ok(()) };
        let mut buffers = Buffers::new(&shards.layout)?;
        while let Some(&id) = experts.get(next.fetch_add(1, Ordering::Relaxed)) {
            self.interrupt.check()?;
            match self.damage(place, id, &mut buffers) {
                Ok(None) => {}
                Ok(Some(damage)) => self.add(damage),
                Err(error) if matches!(error.kind(), Kind::Interrupted(_)) => return Err(error),
                Err(error) => self.add(error.message().to_owned()),
            }
            self.copies.fetch_add(1, Ordering::Relaxed);
            self.bytes.fetch_add(shards.layout.file_bytes, Ordering::Relaxed);
        }
        Ok(())
    }

    /// What is wrong with a copy that can be read.
    fn damage(&self, place: Place<'_>, id: ExpertId, buffers: &mut Buffers) -> Result<Option<String>> {
        let Some((shards, table)) = &self.shards else { return Ok(None) };
        let (wanted, file) = match place {
            Place::Shards => {
                shards.read(id, buffers, self.interrupt)?;
                let shard = table.places(id.layer, id.expert).and_then(|places| places.first()).map_or(0, |p| p.0);
                (self.checksums.get(&id).copied(), self.manifest.shards[usize::from(shard)].clone())
            }
            Place::Root(root) => {
                let path = expert_path(&root.dir, id, shards.parts());
                buffers.read_alone(&path, id)?;
                let at = root.experts.binary_search_by_key(&id, |expert| expert.id).ok();
                (at.map(|at| root.experts[at].checksum), path)
            }
        };
        let found = xxh3_64(buffers.expert());
        let Some(wanted) = wanted.filter(|wanted| *wanted != found) else { return Ok(None) };
        let (from, to) = self.differing(place, id, wanted, buffers).unwrap_or((0, shards.layout.file_bytes as usize));
        let what = match place {
            Place::Root(_) => format!("bytes {from} to {to}"),
            // The parts lie elsewhere in a shard.
            Place::Shards => self.places_in_shards(id, from, to),
        };
        Ok(Some(format!("{}: expert {id}: {what}: checksum {found:016x}, expected {wanted:016x}", file.display())))
    }

    /// First and last byte, in the expert's file, in which the copy read last differs from one that is as it should be.
    fn differing(&self, place: Place<'_>, id: ExpertId, wanted: u64, buffers: &mut Buffers) -> Option<(usize, usize)> {
        let (shards, table) = self.shards.as_ref()?;
        let damaged = buffers.expert().to_vec();
        let others = self.roots.iter().filter(|root| match place {
            Place::Root(this) => this.dir != root.dir,
            Place::Shards => true,
        });
        let holding = others.filter(|root| root.experts.binary_search_by_key(&id, |expert| expert.id).is_ok());
        let mut good = holding
            .map(|root| expert_path(&root.dir, id, shards.parts()))
            .any(|path| buffers.read_alone(&path, id).is_ok() && xxh3_64(buffers.expert()) == wanted);
        if !good && matches!(place, Place::Root(_)) && table.is_in_shards(id.layer, id.expert) {
            good = shards.read(id, buffers, self.interrupt).is_ok() && xxh3_64(buffers.expert()) == wanted;
        }
        let mut differ =
            damaged.iter().zip(buffers.expert()).enumerate().filter(|(_, (a, b))| a != b).map(|(at, _)| at);
        let first = differ.next().filter(|_| good)?;
        Some((first, differ.next_back().unwrap_or(first) + 1))
    }

    /// The shards' bytes that lie at `from..to` in the expert's file.
    fn places_in_shards(&self, id: ExpertId, from: usize, to: usize) -> String {
        let Some((shards, table)) = &self.shards else { return String::new() };
        let places = table.places(id.layer, id.expert).unwrap_or_default();
        let parts = places.iter().zip(&shards.layout.part_offsets).zip(&table.part_bytes);
        let touched = parts.filter_map(|((&(shard, offset), &start), &len)| {
            let (first, last) = (start.max(from as u64), (start + len).min(to as u64));
            let name = self.manifest.shards.get(usize::from(shard))?.file_name()?.display().to_string();
            (first < last).then(|| format!("bytes {} to {} of {name}", offset + first - start, offset + last - start))
        });
        touched.collect::<Vec<_>>().join(", ")
    }

    /// The trunk: in the shards for whether it can be read, in trunk files for its checksums.
    fn read_trunk(&self, files: &[(TrunkFormat, PathBuf)]) -> Result<()> {
        let mut buffer = vec![0; PIECE_BYTES];
        for tensor in &self.manifest.trunk {
            let path = &self.manifest.shards[usize::from(tensor.span.shard)];
            let (mut done, mut read) = (0, Ok(()));
            let file = File::open(path);
            while done < tensor.span.len && read.is_ok() {
                self.interrupt.check()?;
                let piece = &mut buffer[..(tensor.span.len - done).min(PIECE_BYTES as u64) as usize];
                read = match &file {
                    Ok(file) => file.read_exact_at(piece, tensor.span.offset + done).map_err(|e| e.to_string()),
                    Err(e) => Err(e.to_string()),
                };
                done += piece.len() as u64;
                self.bytes.fetch_add(piece.len() as u64, Ordering::Relaxed);
            }
            if let Err(why) = read {
                let (from, to) = (tensor.span.offset, tensor.span.offset + tensor.span.len);
                self.add(format!("{}: {}: bytes {from} to {to} cannot be read: {why}", path.display(), tensor.name));
            }
        }
        for (format, file) in files {
            let checked =
                TrunkFile::open(file.clone(), *format, self.manifest).and_then(|_| trunk::check(file, self.interrupt));
            match checked {
                Ok(bytes) => drop(self.bytes.fetch_add(bytes, Ordering::Relaxed)),
                Err(error) if matches!(error.kind(), Kind::Interrupted(_)) => return Err(error),
                Err(error) => self.add(error.message().to_owned()),
            }
        }
        Ok(())
    }

    fn add(&self, damage: String) {
        self.damaged.fetch_add(1, Ordering::Relaxed);
        let mut damages = self.damages.lock().unwrap_or_else(PoisonError::into_inner);
        if damages.len() < DAMAGES_MAX {
            damages.push(damage);
        }
    }
}
