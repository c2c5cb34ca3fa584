//! Loads the trunk: readers bring chunks into buffers and copy them to their places; the calling thread collects them,
//! reports, and looks at the interrupt. Nobody is waited for at a failure: readers own what they write to.

use std::sync::mpsc::{RecvTimeoutError, Sender, channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

use super::LoadProgress;
use super::layout::{CHUNK_BYTES, Chunk, Copy, Layout};
use super::tensor::widen_f16;
use crate::checkpoint::Manifest;
use crate::error::{Error, Kind, Result};
use crate::interrupt::Interrupt;
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
type Done = (usize, Region, u64, Result<()>);

/// Reads all chunks of `layout` into a fresh slab.
pub(super) fn load(
    manifest: &Manifest,
    layout: Layout,
    direct: bool,
    progress: &dyn LoadProgress,
    interrupt: &Interrupt,
) -> Result<Loaded> {
    interrupt.check()?;
    let total = layout.stored_bytes;
    let mut used: Vec<usize> = layout.chunks.iter().map(|chunk| chunk.file).collect();
    used.dedup();
    let files = Files::new(Arc::new(System), Names::of_shards(manifest), READERS_MAX);
    let volumes = Arc::new(Volumes::open(&Arc::new(files), &used, direct)?);
    let count = layout.chunks.len();
    let largest = layout.chunks.iter().map(|chunk| chunk.needed).max().unwrap_or(0).next_multiple_of(ALIGN);
    let (mut rest, work) = split(layout)?;
    let work = Arc::new(Mutex::new(work.into_iter()));
    let (send, receive) = channel::<Done>();
    for reader in 0..count.min(READERS_MAX) {
        let buffer = Region::allocate(largest, "reading the trunk")?;
        let (work, volumes, send) = (Arc::clone(&work), Arc::clone(&volumes), Sender::clone(&send));
        std::thread::Builder::new()
            .name(format!("trunk-{reader}"))
            .spawn(move || read_chunks(&work, &volumes, buffer, &send))
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
                result?;
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
    let modes = volumes.list.iter().map(|volume| (volume.path().to_owned(), volume.mode())).collect();
    let notices = volumes.list.iter().filter_map(|volume| volume.take_notice()).collect();
    Ok(Loaded { slab, modes, notices })
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
fn read_chunks(work: &Mutex<std::vec::IntoIter<Work>>, volumes: &Volumes, mut buffer: Region, send: &Sender<Done>) {
    loop {
        let next = work.lock().unwrap_or_else(PoisonError::into_inner).next();
        let Some(Work { number, chunk, mut memory }) = next else { return };
        let volume = &volumes.list[usize::from(volumes.of_file[chunk.file])];
        let len = chunk.needed.next_multiple_of(ALIGN);
        let result = volume
            .read(chunk.file, &mut buffer[..len], chunk.offset, chunk.needed, &mut Tally::default())
            .map_err(|error| error.into_error(Kind::Io, "the trunk"));
        if result.is_ok() {
            chunk.copies.iter().for_each(|copy| put(copy, &buffer, &mut memory));
        }
        let failed = result.is_err();
        if send.send((number, memory, chunk.stored_bytes(), result)).is_err() || failed {
            return;
        }
    }
}

/// Copies one stretch of a tensor to its place.
fn put(copy: &Copy, buffer: &[u8], memory: &mut [u8]) {
    let stored = &buffer[copy.from..copy.from + copy.len];
    if !copy.widen {
        memory[copy.to..copy.to + copy.len].copy_from_slice(stored);
        return;
    }
    let (halves, _) = stored.as_chunks::<2>();
    let (floats, _) = memory[copy.to..copy.to + 2 * copy.len].as_chunks_mut::<4>();
    for (float, half) in floats.iter_mut().zip(halves) {
        *float = widen_f16(u16::from_le_bytes(*half)).to_le_bytes();
    }
}
