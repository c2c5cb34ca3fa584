//! The trunk as one contiguous file: a table of names, then each tensor at a page, with checksums.
//!
//! Magic `DFTRUNK\x01`; length of the table u64, little-endian; the table as JSON; from the next page on the tensors, in
//! the order of the model, each at a page, as stored. The table has the model's fingerprint and each tensor's checksum.

use std::fs::File;
use std::io::Read;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};
use xxhash_rust::xxh3::Xxh3;

use super::files;
use super::plan::TrunkPlan;
use crate::checkpoint::{Dtype, Manifest};
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::store::packed::PAGE;

const MAGIC: [u8; 8] = *b"DFTRUNK\x01";
const TABLE_BYTES_MAX: u64 = 64 << 20;
const PIECE_BYTES: usize = 4 << 20;

/// How the trunk file stores its rows.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum TrunkFormat {
    /// As released.
    Bf16,
    /// Lossless, three quarters of the bytes.
    Bf12,
    /// Quantized, about half of the bytes.
    Int8,
}

impl TrunkFormat {
    /// As `--trunk` and the file's name have it.
    pub fn name(self) -> &'static str {
        match self {
            TrunkFormat::Bf16 => "bf16",
            TrunkFormat::Bf12 => "bf12",
            TrunkFormat::Int8 => "int8",
        }
    }
}

#[derive(Debug, Serialize, Deserialize)]
struct Table {
    fingerprint: String,
    /// Bytes of the whole file.
    bytes: u64,
    tensors: Vec<Entry>,
}

#[derive(Debug, Serialize, Deserialize)]
struct Entry {
    name: String,
    dtype: String,
    shape: Vec<usize>,
    offset: u64,
    len: u64,
    /// XXH3-64 as 16 hexadecimal digits, so that the table's length does not depend on it.
    checksum: String,
}

/// What writing the trunk to `root` comes to, and whether it is there.
///
/// # Errors
/// Kind `Usage` for a format that cannot be written; `Model` for a file of that name that is of another model.
pub(super) fn plan(manifest: &Manifest, format: TrunkFormat, root: &Path) -> Result<TrunkPlan> {
    if format != TrunkFormat::Bf16 {
        return Err(Error::usage(format!("--trunk {}: this build writes the trunk as bf16 only", format.name()))
            .hint("give --trunk bf16, or leave it out: the trunk is then read from the shards"));
    }
    let path = root.join(format!("trunk.{}", format.name()));
    let (_, data, bytes) = layout(manifest, String::new());
    let fingerprint = manifest.fingerprint()?.to_string();
    let done = match found(&path) {
        Some(table) if table.fingerprint != fingerprint => {
            return Err(Error::model(format!(
                "{}: is the trunk of another model (fingerprint {}), but {} has fingerprint {fingerprint}",
                path.display(),
                table.fingerprint,
                manifest.dir.display()
            ))
            .hint("remove that file, or give another root first"));
        }
        Some(table) => std::fs::metadata(&path).is_ok_and(|meta| meta.len() == table.bytes && data > 0),
        None => false,
    };
    Ok(TrunkPlan { path, format, bytes, done })
}

/// Writes the trunk of `manifest` to `path`, so that it is there whole or not at all, and reads it again to see that it
/// is. `progress` is told the bytes written and to write.
///
/// # Errors
/// Kind `Io` when a read or write fails, `Model` when the file does not read as it was written; `Interrupted`.
pub(super) fn write(
    manifest: &Manifest,
    path: &Path,
    progress: &mut dyn FnMut(u64, u64),
    interrupt: &Interrupt,
) -> Result<()> {
    let (mut table, data, total) = layout(manifest, manifest.fingerprint()?.to_string());
    let mut buffer = vec![0; PIECE_BYTES];
    files::create(path, |file, temporary| {
        let unwritten = |e: std::io::Error| files::unwritten(temporary, &e);
        file.set_len(total).map_err(unwritten)?;
        for (entry, tensor) in table.tensors.iter_mut().zip(&manifest.trunk) {
            let shard = &manifest.shards[usize::from(tensor.span.shard)];
            let unread = |e: std::io::Error| Error::io(format!("cannot read {}: {e}", shard.display()));
            let source = File::open(shard).map_err(unread)?;
            let mut hash = Xxh3::new();
            let mut done = 0;
            while done < entry.len {
                interrupt.check()?;
                let piece = &mut buffer[..(entry.len - done).min(PIECE_BYTES as u64) as usize];
                source.read_exact_at(piece, tensor.span.offset + done).map_err(unread)?;
                hash.update(piece);
                file.write_all_at(piece, entry.offset + done).map_err(unwritten)?;
                done += piece.len() as u64;
                progress(entry.offset + done - data, total - data);
            }
            entry.checksum = format!("{:016x}", hash.digest());
        }
        let json = json(&table);
        let head = [&MAGIC[..], &(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
        file.write_all_at(&head, 0).and_then(|()| file.sync_all()).map_err(unwritten)?;
        check(temporary, interrupt).map(drop)
    })?;
    files::sync_dir(path.parent().unwrap_or(Path::new(".")))
}

/// Reads all of a trunk file and compares the checksums; gives its bytes.
///
/// # Errors
/// Kind `Model` naming the tensor that is damaged and where it lies; `Io`; `Interrupted`.
pub(super) fn check(path: &Path, interrupt: &Interrupt) -> Result<u64> {
    let damaged = |what: String| {
        Error::model(format!("{}: {what}", path.display())).hint("remove that file and write it again with --trunk")
    };
    let table = found(path).ok_or_else(|| damaged("is no trunk file, or its table is damaged".into()))?;
    let unread = |e: std::io::Error| Error::io(format!("cannot read {}: {e}", path.display()));
    let file = File::open(path).map_err(unread)?;
    let bytes = file.metadata().map_err(unread)?.len();
    if bytes != table.bytes {
        return Err(damaged(format!("has {bytes} bytes, needs {}", table.bytes)));
    }
    let mut buffer = vec![0; PIECE_BYTES];
    for entry in &table.tensors {
        if entry.offset.checked_add(entry.len).is_none_or(|end| end > bytes) {
            return Err(damaged(format!("{} reaches beyond its end", entry.name)));
        }
        let mut hash = Xxh3::new();
        let mut done = 0;
        while done < entry.len {
            interrupt.check()?;
            let piece = &mut buffer[..(entry.len - done).min(PIECE_BYTES as u64) as usize];
            file.read_exact_at(piece, entry.offset + done).map_err(unread)?;
            hash.update(piece);
            done += piece.len() as u64;
        }
        if format!("{:016x}", hash.digest()) != entry.checksum {
            let (from, to) = (entry.offset, entry.offset + entry.len);
            return Err(damaged(format!("{} is damaged: bytes {from} to {to} do not match its checksum", entry.name)));
        }
    }
    Ok(bytes)
}

/// The trunk files in `root`.
pub(super) fn files_in(root: &Path) -> Vec<PathBuf> {
    let path = root.join(format!("trunk.{}", TrunkFormat::Bf16.name()));
    if path.exists() { vec![path] } else { Vec::new() }
}

/// The table without checksums, where the data begins, and the bytes of the file.
fn layout(manifest: &Manifest, fingerprint: String) -> (Table, u64, u64) {
    let tensors = manifest.trunk.iter().map(|tensor| Entry {
        name: tensor.name.clone(),
        dtype: match tensor.dtype {
            Dtype::Bf16 => "BF16",
            Dtype::F16 => "F16",
            Dtype::F32 => "F32",
            Dtype::U8 => "U8",
        }
        .into(),
        shape: tensor.shape.clone(),
        offset: u64::MAX,
        len: tensor.span.len,
        checksum: "0".repeat(16),
    });
    let mut table = Table { fingerprint, bytes: u64::MAX, tensors: tensors.collect() };
    // With the longest numbers there are, so that the table fits whatever they will be.
    let data = (16 + json(&table).len() as u64).next_multiple_of(PAGE);
    let mut end = data;
    for entry in &mut table.tensors {
        entry.offset = end;
        end = (end + entry.len).next_multiple_of(PAGE);
    }
    table.bytes = end;
    (table, data, end)
}

fn json(table: &Table) -> String {
    serde_json::to_string(table).expect("the table is plain data")
}

/// The table of the file at `path`, if it is a trunk file.
fn found(path: &Path) -> Option<Table> {
    let mut file = File::open(path).ok()?;
    let mut head = [0; 16];
    file.read_exact(&mut head).ok()?;
    let len = u64::from_le_bytes(*head.last_chunk()?);
    if head[..8] != MAGIC || len > TABLE_BYTES_MAX {
        return None;
    }
    let mut json = Vec::new();
    file.take(len).read_to_end(&mut json).ok()?;
    serde_json::from_slice(&json).ok()
}
