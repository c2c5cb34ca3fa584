//! One shard: its header, and its data made by several threads. A shard has its name only when it is whole and on disk.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{self, RecvTimeoutError, Sender};
use std::thread;
use std::time::Duration;

use super::recipe::{Content, Recipe};
use super::tensors::Tensor;
use super::values::{self, BLOCK_BYTES};
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;

/// Bytes of one write.
const WRITE_BYTES: usize = 4 * BLOCK_BYTES;
/// Bytes after which the system is told to write out what it holds: the last wait, and an interrupted one, stay short.
const SYNC_BYTES: u64 = 256 << 20;
/// How often the caller looks for an interrupt when nothing happens.
const LOOK: Duration = Duration::from_millis(100);

/// Tensors in the order in which they lie in a shard: as the `safetensors` library writes them, those with the largest
/// elements first, so that every element is aligned.
pub(super) fn arrange(mut tensors: Vec<Tensor>) -> Vec<Tensor> {
    tensors.sort_by_key(|tensor| match tensor.dtype {
        "F32" => 0,
        "BF16" => 1,
        _ => 2,
    });
    tensors
}

/// Length and JSON of the header, as they begin the file.
pub(super) fn header(tensors: &[Tensor]) -> Vec<u8> {
    let mut json = String::from(r#"{"__metadata__":{"format":"pt"}"#);
    let mut begin = 0;
    for tensor in tensors {
        let (name, dtype, shape, end) = (&tensor.name, tensor.dtype, &tensor.shape, begin + tensor.len());
        // Writing into a string cannot fail.
        let _ = write!(json, r#","{name}":{{"dtype":"{dtype}","shape":{shape:?},"data_offsets":[{begin},{end}]}}"#);
        begin = end;
    }
    json.push('}');
    // Data begin at a multiple of 8.
    json.extend(std::iter::repeat_n(' ', json.len().next_multiple_of(8) - json.len()));
    [&(json.len() as u64).to_le_bytes(), json.as_bytes()].concat()
}

/// Writes the shard to `temporary`, then calls it `path`. `wrote` is told of bytes as they are written.
///
/// # Errors
/// Kind `Io`, or `Interrupted`; no file is left.
pub(super) fn write(
    path: &Path,
    temporary: &Path,
    tensors: &[Tensor],
    recipe: &Recipe,
    threads: usize,
    wrote: &mut dyn FnMut(u64),
    interrupt: &Interrupt,
) -> Result<()> {
    let written = write_temporary(temporary, tensors, recipe, threads, wrote, interrupt)
        .and_then(|()| fs::rename(temporary, path).map_err(|e| failed(path, &e)));
    if written.is_err() {
        // The first error is the one to tell.
        let _ = fs::remove_file(temporary);
    }
    written
}

/// A failed write of `path`, in words.
pub(super) fn failed(path: &Path, e: &io::Error) -> Error {
    let error = Error::io(format!("cannot write {}: {e}", path.display()));
    match e.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            error.hint("make room and run the same command again: whole shards are kept")
        }
        io::ErrorKind::FileTooLarge => error.hint("this file system or `ulimit -f` does not allow files so large"),
        _ => error.hint("run the same command again to go on: whole shards are kept"),
    }
}

fn write_temporary(
    path: &Path,
    tensors: &[Tensor],
    recipe: &Recipe,
    threads: usize,
    wrote: &mut dyn FnMut(u64),
    interrupt: &Interrupt,
) -> Result<()> {
    let io = |e: io::Error| failed(path, &e);
    let file = File::create(path).map_err(io)?;
    let header = header(tensors);
    file.write_all_at(&header, 0).map_err(io)?;
    wrote(header.len() as u64);
    match recipe.content {
        Content::Sparse => {
            let data: u64 = tensors.iter().map(Tensor::len).sum();
            file.set_len(header.len() as u64 + data).map_err(io)?;
            interrupt.check()?;
        }
        Content::Seeded => {
            let data = Data { file: &file, start: header.len() as u64, tensors, seed: recipe.seed };
            data.write(threads, wrote, interrupt, io)?;
        }
    }
    file.sync_all().map_err(io)
}

/// A part of a tensor that is made at once.
struct Block {
    tensor: usize,
    begin: u64,
    len: usize,
}

struct Data<'a> {
    file: &'a File,
    start: u64,
    tensors: &'a [Tensor],
    seed: u64,
}

impl Data<'_> {
    fn write(
        &self,
        threads: usize,
        wrote: &mut dyn FnMut(u64),
        interrupt: &Interrupt,
        io: impl Fn(io::Error) -> Error,
    ) -> Result<()> {
        let writes = self.writes();
        let (next, stop) = (AtomicUsize::new(0), AtomicBool::new(false));
        thread::scope(|scope| {
            let (sender, results) = mpsc::channel();
            for _ in 0..threads.clamp(1, writes.len().max(1)) {
                let sender = sender.clone();
                let (writes, next, stop) = (&writes, &next, &stop);
                scope.spawn(move || self.work(writes, next, stop, &sender));
            }
            drop(sender);
            let watched = self.watch(&results, wrote, interrupt, io);
            stop.store(true, Ordering::Relaxed);
            watched
        })
    }

    /// Follows the threads until all is written or something goes wrong.
    fn watch(
        &self,
        results: &mpsc::Receiver<io::Result<u64>>,
        wrote: &mut dyn FnMut(u64),
        interrupt: &Interrupt,
        io: impl Fn(io::Error) -> Error,
    ) -> Result<()> {
        let mut unsynced = 0;
        loop {
            interrupt.check()?;
            match results.recv_timeout(LOOK) {
                Ok(result) => {
                    let bytes = result.map_err(&io)?;
                    wrote(bytes);
                    unsynced += bytes;
                    if unsynced >= SYNC_BYTES {
                        unsynced = 0;
                        self.file.sync_data().map_err(&io)?;
                    }
                }
                Err(RecvTimeoutError::Timeout) => {}
                Err(RecvTimeoutError::Disconnected) => return Ok(()),
            }
        }
    }

    /// Makes and writes what nobody else has begun, until nothing is left.
    fn work(
        &self,
        writes: &[(u64, Vec<Block>)],
        next: &AtomicUsize,
        stop: &AtomicBool,
        results: &Sender<io::Result<u64>>,
    ) {
        let mut buffer = Vec::with_capacity(WRITE_BYTES + BLOCK_BYTES);
        while !stop.load(Ordering::Relaxed)
            && let Some((offset, blocks)) = writes.get(next.fetch_add(1, Ordering::Relaxed))
        {
            buffer.clear();
            for block in blocks {
                let from = buffer.len();
                buffer.resize(from + block.len, 0);
                let tensor = &self.tensors[block.tensor];
                values::fill(&tensor.fill, self.seed, &tensor.name, block.begin, &mut buffer[from..]);
            }
            let result = self.file.write_all_at(&buffer, *offset).map(|()| buffer.len() as u64);
            if result.is_err() {
                stop.store(true, Ordering::Relaxed);
            }
            // Nobody listens any more after an error or an interrupt.
            let _ = results.send(result);
        }
    }

    /// All blocks, gathered into writes, each with its place in the file.
    fn writes(&self) -> Vec<(u64, Vec<Block>)> {
        let mut writes: Vec<(u64, Vec<Block>)> = Vec::new();
        let (mut offset, mut gathered) = (self.start, WRITE_BYTES);
        for (tensor, of) in self.tensors.iter().enumerate() {
            for begin in (0..of.len()).step_by(BLOCK_BYTES) {
                let len = (of.len() - begin).min(BLOCK_BYTES as u64) as usize;
                if gathered >= WRITE_BYTES {
                    writes.push((offset, Vec::new()));
                    gathered = 0;
                }
                if let Some((_, blocks)) = writes.last_mut() {
                    blocks.push(Block { tensor, begin, len });
                }
                offset += len as u64;
                gathered += len;
            }
        }
        writes
    }
}

#[cfg(test)]
mod tests {
    use super::super::routing::Routing;
    use super::super::shape::Preset;
    use super::super::tensors;
    use super::*;
    use crate::error::Kind;

    #[test]
    fn a_full_disk_is_an_io_error_that_leaves_no_file() {
        if !Path::new("/dev/full").exists() {
            return;
        }
        let dir = tempfile::tempdir().unwrap();
        let (path, temporary) = (dir.path().join("shard"), dir.path().join("temporary"));
        std::os::unix::fs::symlink("/dev/full", &temporary).unwrap();
        let recipe = Recipe::new(Preset::Tiny.shape(), 1, false, Content::Seeded);
        let tensors = tensors::shard(&recipe.shape, &Routing::new(&recipe.shape, 1, false), 1);
        let error = write(&path, &temporary, &tensors, &recipe, 2, &mut |_| (), &Interrupt::new()).expect_err("full");
        assert_eq!(error.kind(), Kind::Io, "{error}");
        assert!(error.hint_text().is_some_and(|hint| hint.starts_with("make room")), "{:?}", error.hint_text());
        assert_eq!(fs::read_dir(dir.path()).unwrap().count(), 0);
    }

    #[test]
    fn writes_cover_the_data_once_and_in_order() {
        let recipe = Recipe::new(Preset::Tiny.shape(), 1, false, Content::Seeded);
        let tensors = arrange(tensors::shard(&recipe.shape, &Routing::new(&recipe.shape, 1, false), 4));
        let file = tempfile::tempfile().unwrap();
        let data = Data { file: &file, start: 8, tensors: &tensors, seed: 1 };
        let mut next = 8;
        for (offset, blocks) in data.writes() {
            assert_eq!(offset, next);
            next += blocks.iter().map(|block| block.len as u64).sum::<u64>();
        }
        assert_eq!(next, 8 + tensors.iter().map(Tensor::len).sum::<u64>());
    }
}
