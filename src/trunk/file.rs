//! The trunk as one contiguous file `trunk.FORMAT`: a table of names, then each tensor at a page, with checksums.
//!
//! Magic `DFTRUNK\x01`; length of the table u64, little-endian; the table as JSON; from the next page on the tensors, in
//! the order of the model, each at a page. The table has the model's fingerprint and each tensor's checksum. A tensor of
//! type BF12 or INT8 is one record a row; after those of BF12 come the words that they refer to.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use super::TrunkFormat;
use crate::checkpoint::{Dtype, Manifest, TrunkTensor};
use crate::error::{Error, Result};
use crate::store::packed::PAGE;

pub(crate) const MAGIC: [u8; 8] = *b"DFTRUNK\x01";
const TABLE_BYTES_MAX: u64 = 64 << 20;

/// What stands ahead of the tensors.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Table {
    /// Of the model.
    pub fingerprint: String,
    /// Bytes of the whole file.
    pub bytes: u64,
    /// In the order of the model.
    pub tensors: Vec<Entry>,
}

/// One tensor.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub(crate) struct Entry {
    pub name: String,
    pub dtype: String,
    pub shape: Vec<usize>,
    pub offset: u64,
    pub len: u64,
    /// XXH3-64 as 16 hexadecimal digits, so that the table's length does not depend on it.
    pub checksum: String,
}

impl Table {
    /// The table of the file at `path`, if it is a trunk file.
    pub(crate) fn read(path: &Path) -> Option<Self> {
        // Asked before it is opened: opening a pipe would wait for a writer.
        std::fs::metadata(path).ok().filter(std::fs::Metadata::is_file)?;
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
}

/// How the table names the type of `tensor` in a trunk of `format`.
pub(crate) fn dtype_name(tensor: &TrunkTensor, format: TrunkFormat) -> &'static str {
    match (format.changes(&tensor.name, tensor.dtype, &tensor.shape), format, tensor.dtype) {
        (Some(_), TrunkFormat::Bf12, _) => "BF12",
        (Some(_), TrunkFormat::Int8, _) => "INT8",
        (_, _, Dtype::Bf16) => "BF16",
        (_, _, Dtype::F16) => "F16",
        (_, _, Dtype::F32) => "F32",
        (_, _, Dtype::U8) => "U8",
    }
}

/// A trunk file that belongs to a model and has all of its tensors.
#[derive(Debug, Clone)]
pub struct TrunkFile {
    pub(super) path: PathBuf,
    pub(super) table: Table,
}

impl TrunkFile {
    /// The trunk file of `format` in the first of `roots` that has one.
    ///
    /// # Errors
    /// Kind `Model` for a file that is none, is damaged, or of another model.
    pub fn find(roots: &[PathBuf], format: TrunkFormat, manifest: &Manifest) -> Result<Option<Self>> {
        let name = format!("trunk.{}", format.name());
        let Some(path) = roots.iter().map(|root| root.join(&name)).find(|path| path.exists()) else { return Ok(None) };
        Self::open(path, format, manifest).map(Some)
    }

    /// The trunk file of `format` at `path`.
    ///
    /// # Errors
    /// As [`TrunkFile::find`].
    pub(crate) fn open(path: PathBuf, format: TrunkFormat, manifest: &Manifest) -> Result<Self> {
        let hint = "remove that file; pack --trunk writes it again";
        let refused = |what: String| Error::model(format!("{}: {what}", path.display())).hint(hint);
        let table =
            Table::read(&path).ok_or_else(|| refused("is no trunk file, or its table is damaged".to_owned()))?;
        let fingerprint = manifest.fingerprint()?.to_string();
        if table.fingerprint != fingerprint {
            return Err(refused(format!(
                "is the trunk of another model (fingerprint {}), but {} has fingerprint {fingerprint}",
                table.fingerprint,
                manifest.dir.display()
            )));
        }
        let bytes = std::fs::metadata(&path).map_err(|e| refused(format!("cannot be read: {e}")))?.len();
        if bytes != table.bytes {
            return Err(refused(format!("has {bytes} bytes, needs {}", table.bytes)));
        }
        if table.tensors.len() != manifest.trunk.len() {
            let (found, expected) = (table.tensors.len(), manifest.trunk.len());
            return Err(refused(format!("has {found} tensors, the model has {expected}")));
        }
        for (entry, tensor) in table.tensors.iter().zip(&manifest.trunk) {
            let dtype = dtype_name(tensor, format);
            if entry.name != tensor.name || entry.shape != tensor.shape || entry.dtype != dtype {
                return Err(refused(format!(
                    "has {} {} {:?} where the model has {} {dtype} {:?}",
                    entry.name, entry.dtype, entry.shape, tensor.name, tensor.shape
                )));
            }
            let right = match format.changes(&tensor.name, tensor.dtype, &tensor.shape) {
                Some((rows, cols)) => {
                    let records = rows as u64 * format.record_bytes(cols) as u64;
                    let side = entry.len.checked_sub(records);
                    side.is_some_and(|side| side == 0 || format == TrunkFormat::Bf12 && side.is_multiple_of(4))
                }
                None => entry.len == tensor.span.len,
            };
            let inside = entry.offset.checked_add(entry.len).is_some_and(|end| end <= bytes);
            if !right || !inside || !entry.offset.is_multiple_of(PAGE) {
                let (from, to) = (entry.offset, entry.offset.saturating_add(entry.len));
                return Err(refused(format!("{} cannot be bytes {from} to {to}", entry.name)));
            }
        }
        Ok(Self { path, table })
    }
}
