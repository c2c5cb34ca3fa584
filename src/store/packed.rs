//! Expert files under a drive root, as `pack` lays them out: one file an expert, every part at a page.

use std::path::{Path, PathBuf};

use super::ExpertId;
use crate::checkpoint::Manifest;
use crate::error::{Error, Result};

/// The experts that one root holds.
#[derive(Debug, Clone)]
pub struct PackedRoot {
    /// The root directory.
    pub dir: PathBuf,
    /// Bytes of one expert file; all are alike.
    pub file_bytes: u64,
    /// Offset of each part in its file, in the order of [`crate::checkpoint::ExpertFormat::parts`].
    pub part_offsets: Vec<u64>,
    /// Which experts are there, ascending.
    pub experts: Vec<PackedExpert>,
}

/// One expert file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PackedExpert {
    /// Which.
    pub id: ExpertId,
    /// XXH3-64 of the whole file.
    pub checksum: u64,
}

impl PackedRoot {
    /// Reads the list of `dir` and checks that it was packed from the model of `manifest`. Opens no expert file.
    ///
    /// # Errors
    /// Kind `Model` for a root that is not one, is damaged, unfinished, or of another model.
    pub fn open(dir: &Path, _manifest: &Manifest) -> Result<Self> {
        Err(Error::model(format!("{}: not a root of packed experts", dir.display())))
    }

    /// Where the file of `id` is.
    pub fn path(&self, id: ExpertId) -> PathBuf {
        self.dir.join(format!("L{:03}/E{:04}.mxfp4", id.layer, id.expert))
    }
}
