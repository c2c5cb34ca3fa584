//! Writes and checks the trunk as one contiguous file.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

use xxhash_rust::xxh3::Xxh3;

use super::files;
use super::plan::TrunkPlan;
use crate::checkpoint::{Manifest, TrunkTensor};
use crate::error::{Error, Result};
use crate::interrupt::Interrupt;
use crate::store::packed::PAGE;
use crate::trunk::{Entry, MAGIC, Table, TrunkFormat, dtype_name, not_quantizable};

const PIECE_BYTES: usize = 4 << 20;

/// What writing the trunk to `root` comes to, and whether it is there.
///
/// # Errors
/// Kind `Model` for a file of that name that is of another model.
pub(super) fn plan(manifest: &Manifest, format: TrunkFormat, root: &Path) -> Result<TrunkPlan> {
    let path = root.join(format!("trunk.{}", format.name()));
    let (_, _, mut bytes) = layout(manifest, format, String::new());
    let fingerprint = manifest.fingerprint()?.to_string();
    let done = match Table::read(&path) {
        Some(table) if table.fingerprint != fingerprint => {
            return Err(Error::model(format!(
                "{}: is the trunk of another model (fingerprint {}), but {} has fingerprint {fingerprint}",
                path.display(),
                table.fingerprint,
                manifest.dir.display()
            ))
            .hint("remove that file, or give another root first"));
        }
        Some(table) => {
            let whole = std::fs::metadata(&path).is_ok_and(|meta| meta.len() == table.bytes);
            if whole {
                bytes = table.bytes;
            }
            whole
        }
        None => false,
    };
    Ok(TrunkPlan { path, format, bytes, done })
}

/// Writes the trunk of `manifest` as `format` to `path`, so that it is there whole or not at all, and reads it again to see
/// that it is. `progress` is told the bytes read and to read. Gives the file's bytes.
///
/// # Errors
/// Kind `Io` when a read or write fails, `Model` when the file does not read as it was written or a value cannot be held;
/// `Interrupted`.
pub(super) fn write(
    manifest: &Manifest,
    format: TrunkFormat,
    path: &Path,
    progress: &mut dyn FnMut(u64, u64),
    interrupt: &Interrupt,
) -> Result<u64> {
    let (mut table, data, _) = layout(manifest, format, manifest.fingerprint()?.to_string());
    let all = manifest.trunk_bytes();
    let mut read = 0;
    files::create(path, |file, temporary| {
        let unwritten = |e: std::io::Error| files::unwritten(temporary, &e);
        let mut end = data;
        for (entry, tensor) in table.tensors.iter_mut().zip(&manifest.trunk) {
            let mut to = Output { file, offset: end, len: 0, hash: Xxh3::new(), temporary };
            let mut pieces = Pieces::new(manifest, tensor, format)?;
            while let Some(piece) = pieces.next()? {
                interrupt.check()?;
                to.put(piece)?;
                progress(read + pieces.done, all);
            }
            to.put(&pieces.side)?;
            read += pieces.done;
            (entry.offset, entry.len) = (end, to.len);
            entry.checksum = format!("{:016x}", to.hash.digest());
            end = (end + to.len).next_multiple_of(PAGE);
        }
        table.bytes = end;
        let json = json(&table);
        let head = [&MAGIC[..], &(json.len() as u64).to_le_bytes(), json.as_bytes()].concat();
        file.set_len(end).and_then(|()| file.write_all_at(&head, 0)).map_err(unwritten)?;
        file.sync_all().map_err(unwritten)?;
        check(temporary, interrupt).map(drop)
    })?;
    files::sync_dir(path.parent().unwrap_or(Path::new(".")))?;
    Ok(table.bytes)
}

/// Where a tensor is written to.
struct Output<'a> {
    file: &'a File,
    temporary: &'a Path,
    offset: u64,
    len: u64,
    hash: Xxh3,
}

impl Output<'_> {
    fn put(&mut self, piece: &[u8]) -> Result<()> {
        self.hash.update(piece);
        self.file.write_all_at(piece, self.offset + self.len).map_err(|e| files::unwritten(self.temporary, &e))?;
        self.len += piece.len() as u64;
        Ok(())
    }
}

/// A tensor of a shard in the form that is written, piece by piece.
struct Pieces<'a> {
    tensor: &'a TrunkTensor,
    shard: &'a Path,
    source: File,
    format: TrunkFormat,
    /// Columns of a matrix that is encoded.
    cols: Option<usize>,
    stored: Vec<u8>,
    encoded: Vec<u8>,
    /// What comes after all pieces.
    side: Vec<u8>,
    /// Bytes of the tensor that were read.
    done: u64,
}

impl<'a> Pieces<'a> {
    fn new(manifest: &'a Manifest, tensor: &'a TrunkTensor, format: TrunkFormat) -> Result<Self> {
        let shard = &manifest.shards[usize::from(tensor.span.shard)];
        let source = File::open(shard).map_err(|e| Error::io(format!("cannot read {}: {e}", shard.display())))?;
        let cols = format.changes(&tensor.name, tensor.dtype, &tensor.shape).map(|(_, cols)| cols);
        let (stored, encoded, side) = (Vec::new(), Vec::new(), Vec::new());
        Ok(Self { tensor, shard, source, format, cols, stored, encoded, side, done: 0 })
    }

    fn next(&mut self) -> Result<Option<&[u8]>> {
        let unit = self.cols.map_or(1, |cols| 2 * cols);
        let len = (self.tensor.span.len - self.done).min((PIECE_BYTES / unit * unit) as u64);
        if len == 0 {
            return Ok(None);
        }
        self.stored.resize(len as usize, 0);
        self.source
            .read_exact_at(&mut self.stored, self.tensor.span.offset + self.done)
            .map_err(|e| Error::io(format!("cannot read {}: {e}", self.shard.display())))?;
        self.done += len;
        let Some(cols) = self.cols else { return Ok(Some(&self.stored)) };
        let record_bytes = self.format.record_bytes(cols);
        self.encoded.resize(len as usize / unit * record_bytes, 0);
        for (row, record) in self.stored.chunks_exact(unit).zip(self.encoded.chunks_exact_mut(record_bytes)) {
            let encoded = self.format.encode(row, record, &mut self.side);
            encoded.ok_or_else(|| not_quantizable(&self.tensor.name))?;
        }
        Ok(Some(&self.encoded))
    }
}

/// Reads all of a trunk file and compares the checksums; gives its bytes.
///
/// # Errors
/// Kind `Model` naming the tensor that is damaged and where it lies; `Io`; `Interrupted`.
pub(super) fn check(path: &Path, interrupt: &Interrupt) -> Result<u64> {
    let damaged = |what: String| {
        Error::model(format!("{}: {what}", path.display())).hint("remove that file and write it again with --trunk")
    };
    let table = Table::read(path).ok_or_else(|| damaged("is no trunk file, or its table is damaged".into()))?;
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
pub(super) fn files_in(root: &Path) -> Vec<(TrunkFormat, PathBuf)> {
    let formats = [TrunkFormat::Bf16, TrunkFormat::Bf12, TrunkFormat::Int8];
    let paths = formats.map(|format| (format, root.join(format!("trunk.{}", format.name()))));
    paths.into_iter().filter(|(_, path)| path.exists()).collect()
}

/// The table without checksums, where the data begins, and about the bytes of the file.
fn layout(manifest: &Manifest, format: TrunkFormat, fingerprint: String) -> (Table, u64, u64) {
    let tensors = manifest.trunk.iter().map(|tensor| Entry {
        name: tensor.name.clone(),
        dtype: dtype_name(tensor, format).into(),
        shape: tensor.shape.clone(),
        offset: u64::MAX,
        len: u64::MAX,
        checksum: "0".repeat(16),
    });
    let table = Table { fingerprint, bytes: u64::MAX, tensors: tensors.collect() };
    // With the longest numbers there are, so that the table fits whatever they will be.
    let data = (16 + json(&table).len() as u64).next_multiple_of(PAGE);
    let bytes = |tensor: &TrunkTensor| match format.changes(&tensor.name, tensor.dtype, &tensor.shape) {
        Some((rows, cols)) => {
            let records = (rows * format.record_bytes(cols)) as u64;
            records + format.side_bytes_expected(records)
        }
        None => tensor.span.len,
    };
    let end = manifest.trunk.iter().fold(data, |end, tensor| (end + bytes(tensor)).next_multiple_of(PAGE));
    (table, data, end)
}

fn json(table: &Table) -> String {
    serde_json::to_string(table).expect("the table is plain data")
}
