//! `--move`: a shard whose experts are safe on the roots is replaced by one of the same name without them.
//!
//! Order, so that a crash at any moment loses nothing: the rest of the shard under a temporary name, synced and read again;
//! the record of what has moved; the rename. Before the rename the shard is whole, and what the record says too much does
//! no harm; after it, the record accounts for what the index lists and the shard lacks.

use std::fs::File;
use std::io::{Read, Write};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use serde_json::{Map, Value};

use super::files;
use crate::checkpoint::moved::{self, MOVED_FILE, Moved, MovedShard};
use crate::checkpoint::{ExpertTable, Manifest, is_expert_tensor, shard_digest};
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;

const PIECE_BYTES: usize = 4 << 20;

/// Refuses what cannot be moved, before any work is done.
///
/// # Errors
/// Kind `Usage` for shards that are links, `Io` for a model directory that cannot be written to.
pub(super) fn check_allowed(manifest: &Manifest, shards: &[u16]) -> Result<()> {
    for shard in shards {
        let path = &manifest.shards[usize::from(*shard)];
        if path.is_symlink() {
            return Err(Error::usage(format!("--move: {} is a link to a file that others may use", path.display()))
                .hint("give -m the directory that holds the files themselves, or leave --move out"));
        }
    }
    if shards.is_empty() {
        return Ok(());
    }
    let probe = manifest.dir.join(".move");
    files::create(&probe, |_, _| Ok(())).and_then(|()| {
        std::fs::remove_file(&probe).map_err(|e| Error::io(format!("cannot remove {}: {e}", probe.display())))
    })
}

/// Replaces shard number `shard` by its rest; gives the bytes that came free. `source` is its digest when the work began.
///
/// # Errors
/// Kind `Io`; `Model` when the shard has changed meanwhile; `Interrupted`. The shard is then still whole.
pub(super) fn take_experts(
    manifest: &Manifest,
    table: &ExpertTable,
    shard: u16,
    source: u128,
    interrupt: &Interrupt,
) -> Result<u64> {
    let path = &manifest.shards[usize::from(shard)];
    let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let before = disk_bytes(path);
    let rest = Rest::of(path)?;
    let mut record = moved::read(&manifest.dir)?.unwrap_or_else(|| Moved::new(table.format));
    if !record.is_of(table) {
        return Err(Error::model(format!(
            "{}: is of experts in another format",
            manifest.dir.join(MOVED_FILE).display()
        ))
        .hint("it belongs to another model: remove it if the shards are whole"));
    }
    files::create(path, |file, temporary| {
        rest.write(path, file, temporary, interrupt)?;
        let digest = shard_digest(temporary)?;
        rest.compare(path, temporary, interrupt)?;
        if shard_digest(path)? != source {
            return Err(Error::model(format!("{} has changed while its experts were packed", path.display()))
                .hint("pack again, with nobody writing to the model"));
        }
        let parts = table.format.parts();
        let experts = table.ids().zip(table.places.chunks_exact(parts));
        let in_it = experts.filter(|(_, places)| places.iter().any(|place| place.0 == shard)).map(|(id, _)| id);
        // A shard that was moved in parts before keeps the digest it was released with.
        let source = record.shard(path).filter(|was| was.rest == source).map_or(source, |was| was.source);
        record.add(name, MovedShard { source, rest: digest }, in_it);
        let record_path = manifest.dir.join(MOVED_FILE);
        files::create(&record_path, |file, at| files::write_all(file, at, record.to_json().as_bytes(), interrupt))?;
        files::sync_dir(&manifest.dir)
    })?;
    files::sync_dir(&manifest.dir)?;
    Ok(before.saturating_sub(disk_bytes(path)))
}

fn disk_bytes(path: &Path) -> u64 {
    std::fs::metadata(path).map_or(0, |meta| meta.blocks().saturating_mul(512))
}

/// What a shard keeps.
struct Rest {
    header: Vec<u8>,
    /// Offset in the shard and length of each tensor, in the order of the new file.
    spans: Vec<(u64, u64)>,
}

impl Rest {
    /// Of the shard at `path`: every tensor that is no expert's, the wide types first, so that all are aligned.
    fn of(path: &Path) -> Result<Self> {
        let unread = |e: std::io::Error| Error::io(format!("cannot read {}: {e}", path.display()));
        let odd = || Error::model(format!("{}: its header has changed", path.display())).hint("pack again");
        let mut file = File::open(path).map_err(unread)?;
        let mut len = [0; 8];
        file.read_exact(&mut len).map_err(unread)?;
        let len = u64::from_le_bytes(len);
        let mut json = Vec::new();
        file.take(len).read_to_end(&mut json).map_err(unread)?;
        let header: Map<String, Value> = serde_json::from_slice(&json).map_err(|_| odd())?;
        let mut tensors = Vec::new();
        let mut kept = Map::new();
        for (name, value) in header {
            if name == "__metadata__" {
                kept.insert(name, value);
            } else if !is_expert_tensor(&name) {
                let offset = |at: usize| value["data_offsets"].get(at).and_then(Value::as_u64).ok_or_else(odd);
                let (begin, end) = (offset(0)?, offset(1)?);
                let wide = match value["dtype"].as_str() {
                    Some("F64" | "I64" | "U64") => 0,
                    Some("F32" | "I32" | "U32") => 1,
                    Some("BF16" | "F16" | "I16" | "U16") => 2,
                    _ => 3,
                };
                tensors.push((wide, begin, end.checked_sub(begin).ok_or_else(odd)?, name, value));
            }
        }
        tensors.sort_by_key(|(wide, begin, len, ..)| (*wide, *begin, *len));
        let (mut spans, mut at) = (Vec::new(), 0);
        for (_, begin, len, name, mut value) in tensors {
            value["data_offsets"] = serde_json::json!([at, at + len]);
            kept.insert(name, value);
            spans.push((begin + 8 + json.len() as u64, len));
            at += len;
        }
        let mut header = Value::Object(kept).to_string().into_bytes();
        // Spaces are part of the format: the data begins at a multiple of eight.
        header.resize(header.len().next_multiple_of(8), b' ');
        Ok(Self { header, spans })
    }

    fn write(&self, shard: &Path, file: &mut File, temporary: &Path, interrupt: &Interrupt) -> Result<()> {
        let unwritten = |e: std::io::Error| files::unwritten(temporary, &e);
        file.write_all(&(self.header.len() as u64).to_le_bytes()).map_err(unwritten)?;
        file.write_all(&self.header).map_err(unwritten)?;
        self.each_piece(shard, interrupt, &mut |_, piece| file.write_all(piece).map_err(unwritten))?;
        file.sync_all().map_err(unwritten)
    }

    /// Reads the new file again and compares all of it with the shard.
    fn compare(&self, shard: &Path, rest: &Path, interrupt: &Interrupt) -> Result<()> {
        let unread = |e: std::io::Error| Error::io(format!("cannot read {}: {e}", rest.display()));
        let file = File::open(rest).map_err(unread)?;
        let mut again = vec![0; PIECE_BYTES.max(8 + self.header.len())];
        let differs = || {
            Error::io(format!("{}: reads other bytes than were written", rest.display()))
                .hint("the drive, its cable or this machine's memory is faulty: do not trust what is on it")
        };
        let head = &mut again[..8 + self.header.len()];
        file.read_exact_at(head, 0).map_err(unread)?;
        if head[8..] != self.header {
            return Err(differs());
        }
        self.each_piece(shard, interrupt, &mut |at, piece| {
            let again = &mut again[..piece.len()];
            file.read_exact_at(again, at).map_err(unread)?;
            if again == piece { Ok(()) } else { Err(differs()) }
        })
    }

    /// Hands every piece of the rest on, with its place in the new file.
    fn each_piece(
        &self,
        shard: &Path,
        interrupt: &Interrupt,
        each: &mut dyn FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let unread = |e: std::io::Error| Error::io(format!("cannot read {}: {e}", shard.display()));
        let file = File::open(shard).map_err(unread)?;
        let mut buffer = vec![0; PIECE_BYTES];
        let mut at = 8 + self.header.len() as u64;
        for &(offset, len) in &self.spans {
            let mut done = 0;
            while done < len {
                interrupt.check()?;
                let piece = &mut buffer[..(len - done).min(PIECE_BYTES as u64) as usize];
                file.read_exact_at(piece, offset + done).map_err(unread)?;
                each(at, piece)?;
                at += piece.len() as u64;
                done += piece.len() as u64;
            }
        }
        Ok(())
    }
}
