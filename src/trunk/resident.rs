//! Loads the trunk: readers bring chunks into buffers and copy them to their places; the calling thread collects them,
//! reports, and looks at the interrupt. Nobody is waited for at a failure: readers own what they write to.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::LoadProgress;
use super::layout::{CHUNK_BYTES, Chunk, Copy, How, Layout};
use super::tensor::widen_f16;
use crate::checkpoint::Manifest;
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
use crate::kernels::bf12;
use crate::store::{ALIGN, Files, Names, Region, System, Tally, Volumes};

/// Readers at most: enough to keep a fast drive busy while others copy.
const READERS_MAX: usize = 8;

/// Bytes of all readers' buffers.
pub(super) const BUFFERS_BYTES_MAX: usize = READERS_MAX * CHUNK_BYTES;

/// How long the calling thread waits before it looks at the interrupt.
const PATIENCE: Duration = Duration::from_millis(50);

/// Time between reports at most.
const REPORT: Duration = Duration::from_millis(90);

/// What a load leaves.
pub(super) struct Loaded {
    /// All tensors, at their places.
    pub slab: Region,
    /// What the records in the slab refer to.
    pub side: Vec<u8>,
    /// Directory and mode of each device.
    pub modes: Vec<(String, &'static str)>,
    /// Fallbacks.
    pub notices: Vec<String>,
}

/// A chunk and the part of the slab that it fills.
struct Work {
    number: usize,
    chunk: Chunk,
    memory: Region,
}

/// What a reader hands back.
type Done = (usize, Region, u64, Result<(), Failure>);

/// Why a chunk is not there.
enum Failure {
    Read(Error),
    /// The tensor of that number has a value that its form cannot hold.
    Value(usize),
    /// The side is full.
    Side,
}

impl Failure {
    fn into_error(self, manifest: &Manifest) -> Error {
        match self {
            Failure::Read(error) => error,
            Failure::Value(tensor) => super::not_quantizable(&manifest.trunk[tensor].name),
            Failure::Side => {
                Error::memory("--trunk bf12: the trunk's weights are too irregular").hint("use --trunk bf16")
            }
        }
    }
}

/// What all readers share.
struct Shared {
    work: Mutex<std::vec::IntoIter<Work>>,
    volumes: Volumes,
    /// What the records in the slab refer to, in the order in which they came.
    side: Mutex<Vec<u8>>,
}

/// Reads all chunks of `layout`, which lie in `names`, into a fresh slab.
pub(super) fn load(
    manifest: &Manifest,
    names: Names,
    layout: Layout,
    direct: bool,
    progress: &dyn LoadProgress,
    interrupt: &Interrupt,
) -> Result<Loaded> {
    interrupt.check()?;
    let total = layout.stored_bytes;
    let mut used: Vec<usize> = layout.chunks.iter().map(|chunk| chunk.file).collect();
    used.dedup();
    let files = Files::new(Arc::new(System), names, READERS_MAX);
    let volumes = Volumes::open(&Arc::new(files), &used, direct)?;
    let count = layout.chunks.len();
    let largest = layout.chunks.iter().map(|chunk| chunk.needed).max().unwrap_or(0).next_multiple_of(ALIGN);
    let (mut rest, work) = split(layout)?;
    let work = Mutex::new(work.into_iter());
    let shared = Arc::new(Shared { work, volumes, side: Mutex::new(Vec::new()) });
    let (send, receive) = channel::<Done>();
    for reader in 0..count.min(READERS_MAX) {
        let buffer = Region::allocate(largest, "reading the trunk")?;
        let (shared, send) = (Arc::clone(&shared), Sender::clone(&send));
        std::thread::Builder::new()
            .name(format!("trunk-{reader}"))
            .spawn(move || read_chunks(&shared, buffer, &send))
            .map_err(|cause| Error::other(format!("cannot start reader {reader} of the trunk: {cause}")))?;
    }
    drop(send);

    let mut parts: Vec<Option<Region>> = (0..count).map(|_| None).collect();
    let (mut done, mut arrived, mut reported) = (0, 0, Instant::now());
    progress.loaded(0, total);
    while arrived < count {
        interrupt.check()?;
        match receive.recv_timeout(PATIENCE) {
            Ok((number, memory, bytes, result)) => {
                result.map_err(|failure| failure.into_error(manifest))?;
                parts[number] = Some(memory);
                done += bytes;
                arrived += 1;
            }
            Err(RecvTimeoutError::Timeout) => {}
            Err(RecvTimeoutError::Disconnected) => {
                return Err(Error::other("a reader of the trunk ended unexpectedly"));
            }
        }
        if reported.elapsed() >= REPORT {
            progress.loaded(done, total);
            reported = Instant::now();
        }
    }
    progress.loaded(total, total);
    let mut parts = parts.into_iter().flatten();
    let slab = match parts.next() {
        Some(first) => parts.fold(first, |mut slab, part| {
            slab.join(part);
            slab
        }),
        None => rest.split_to(rest.len()),
    };
    let volumes = &shared.volumes;
    let mut side = std::mem::take(&mut *shared.side.lock().unwrap_or_else(PoisonError::into_inner));
    side.shrink_to_fit();
    let modes = volumes.list.iter().map(|volume| (volume.path().to_owned(), volume.mode())).collect();
    let notices = volumes.list.iter().filter_map(|volume| volume.take_notice()).collect();
    Ok(Loaded { slab, side, modes, notices })
}

/// The slab, cut up for the chunks; all of it, unless there are none.
fn split(layout: Layout) -> Result<(Region, Vec<Work>)> {
    let mut slab = Region::allocate(layout.slab_bytes, "the trunk")?;
    let starts: Vec<usize> = layout.chunks.iter().map(|chunk| chunk.start).collect();
    let mut work = Vec::with_capacity(starts.len());
    for (number, chunk) in layout.chunks.into_iter().enumerate() {
        let len = starts.get(number + 1).map_or(slab.len(), |next| next - chunk.start);
        work.push(Work { number, chunk, memory: slab.split_to(len) });
    }
    Ok((slab, work))
}

/// A reader: until no chunk is left, or nobody listens any more.
fn read_chunks(shared: &Shared, mut buffer: Region, send: &Sender<Done>) {
    let volumes = &shared.volumes;
    loop {
        let next = shared.work.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(Work { number, chunk, mut memory }) = next else { return };
        let volume = &volumes.list[usize::from(volumes.of_file[chunk.file])];
        let len = chunk.needed.next_multiple_of(ALIGN);
        let result = volume
            .read(chunk.file, &mut buffer[..len], chunk.offset, chunk.needed, &mut Tally::default())
            .map_err(|error| Failure::Read(error.into_error(Kind::Io, "the trunk")))
            .and_then(|_| chunk.copies.iter().try_for_each(|copy| put(copy, &buffer, &mut memory, &shared.side)));
        let failed = result.is_err();
        if send.send((number, memory, chunk.stored_bytes(), result)).is_err() || failed {
            return;
        }
    }
}

/// Copies one stretch of a tensor to its place.
fn put(copy: &Copy, buffer: &[u8], memory: &mut [u8], side: &Mutex<Vec<u8>>) -> Result<(), Failure> {
    let stored = &buffer[copy.from..copy.from + copy.len];
    let (from_unit, to_unit) = copy.how.unit();
    let memory = &mut memory[copy.to..copy.to + copy.len / from_unit * to_unit];
    match copy.how {
        How::Same => memory.copy_from_slice(stored),
        How::Widen => {
            let (halves, _) = stored.as_chunks::<2>();
            let (floats, _) = memory.as_chunks_mut::<4>();
            for (float, half) in floats.iter_mut().zip(halves) {
                *float = widen_f16(u16::from_le_bytes(*half)).to_le_bytes();
            }
        }
        How::Encode(format, _) => {
            let mut words = Vec::new();
            for (row, record) in stored.chunks_exact(from_unit).zip(memory.chunks_exact_mut(to_unit)) {
                format.encode(row, record, &mut words).ok_or(Failure::Value(copy.tensor))?;
            }
            if !words.is_empty() {
                let mut side = side.lock().unwrap_or_else(PoisonError::into_inner);
                let before = u32::try_from(side.len() / 4).map_err(|_| Failure::Side)?;
                for record in memory.chunks_exact_mut(to_unit) {
                    bf12::move_side(record, before).ok_or(Failure::Side)?;
                }
                side.extend(words);
            }
        }
    }
    Ok(())
}
