//! Expert files under a drive root, as `pack` lays them out: one file an expert, every part at a page, and a list of them
//! with checksums.
//!
//! The list is `experts.list`: what the files look like, which model they are of, which experts are meant for this root,
//! and which of them are there, whole. It is replaced in one step as experts are finished, so a root that is not finished,
//! or whose `pack` was killed, is good for what its list names.

mod list;
mod roots_file;
mod whole;

use std::path::{Path, PathBuf};

use super::ExpertId;
use crate::checkpoint::{ExpertTable, Manifest};
use crate::error::{Error, Result};

pub(crate) use self::list::{COPY_FILE, LIST_FILE, List, Share, Source};
pub use self::roots_file::{ROOTS_FILE, listed_roots};
pub(crate) use self::whole::read_whole;

/// Parts of an expert begin at multiples of this in its file, and the file ends at one.
pub(crate) const PAGE: u64 = 4096;

/// The experts that one root holds.
#[derive(Debug, Clone)]
pub struct PackedRoot {
    /// The root directory.
    pub dir: PathBuf,
    /// Bytes of one expert file; all are alike.
    pub file_bytes: u64,
    /// Offset of each part in its file, in the order of [`crate::checkpoint::ExpertFormat::parts`].
    pub part_offsets: Vec<u64>,
    /// GB/s that its drive gave, or was said to give, when it was packed.
    pub gb_per_s: Option<f64>,
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
    /// The model's fingerprint is computed for it; for several roots compute it once ([`PackedRoot::open_all`]).
    ///
    /// # Errors
    /// Kind `Model` for a root that is not one, is damaged, or of another model.
    pub fn open(dir: &Path, manifest: &Manifest) -> Result<Self> {
        Self::open_of(dir, &Source::of(manifest)?)
    }

    /// As [`PackedRoot::open`], for several roots.
    ///
    /// # Errors
    /// As [`PackedRoot::open`]; that of the first root that is refused.
    pub fn open_all(dirs: &[PathBuf], manifest: &Manifest) -> Result<Vec<Self>> {
        if dirs.is_empty() {
            return Ok(Vec::new());
        }
        let source = Source::of(manifest)?;
        dirs.iter().map(|dir| Self::open_of(dir, &source)).collect()
    }

    fn open_of(dir: &Path, source: &Source) -> Result<Self> {
        let Some(list) = List::read(dir, source)? else {
            let why = match dir.metadata() {
                Ok(found) if found.is_dir() => format!("it has no {LIST_FILE}"),
                Ok(_) => "it is no directory".into(),
                Err(error) => error.to_string(),
            };
            return Err(Error::model(format!("{}: not a root of packed experts: {why}", dir.display()))
                .hint("give the directories that `deltafin pack --to` wrote"));
        };
        let experts = list.experts.iter().map(|(id, checksum)| PackedExpert { id: *id, checksum: *checksum }).collect();
        let Layout { file_bytes, part_offsets } = source.layout.clone();
        Ok(Self { dir: dir.to_owned(), file_bytes, part_offsets, gb_per_s: list.gb_per_s, experts })
    }

    /// Where the file of `id` is.
    pub fn path(&self, id: ExpertId) -> PathBuf {
        expert_path(&self.dir, id, self.part_offsets.len())
    }
}

/// Where the file of `id`, of so many parts, is under `root`.
pub(crate) fn expert_path(root: &Path, id: ExpertId, parts: usize) -> PathBuf {
    layer_dir(root, id.layer).join(format!("E{:04}.{}", id.expert, extension(parts)))
}

/// The directory of a layer under `root`.
pub(crate) fn layer_dir(root: &Path, layer: u16) -> PathBuf {
    root.join(format!("L{layer:03}"))
}

/// Ends an expert file's name: six parts are codes and scales, three are plain.
pub(crate) fn extension(parts: usize) -> &'static str {
    if parts == 3 { "bf16" } else { "mxfp4" }
}

/// How the parts of an expert lie in its file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    /// Bytes of the file.
    pub file_bytes: u64,
    /// Where each part begins.
    pub part_offsets: Vec<u64>,
}

impl Layout {
    /// Each part of `table`'s experts at a page, zeros in between and at the end.
    pub(crate) fn of(table: &ExpertTable) -> Self {
        let mut file_bytes = 0_u64;
        let mut part_offsets = Vec::with_capacity(table.part_bytes.len());
        for bytes in &table.part_bytes {
            part_offsets.push(file_bytes);
            file_bytes = file_bytes.saturating_add(bytes.saturating_add(PAGE - 1) / PAGE * PAGE);
        }
        Self { file_bytes, part_offsets }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::ExpertFormat;

    fn layout(part_bytes: &[u64]) -> Layout {
        let format = if part_bytes.len() == 6 { ExpertFormat::Mxfp4 } else { ExpertFormat::Bf16 };
        let part_bytes = part_bytes.to_vec();
        Layout::of(&ExpertTable { format, part_bytes, num_experts: 0, moe_layers: Vec::new(), places: Vec::new() })
    }

    #[test]
    fn k3s_parts_fill_their_pages() {
        let (codes, scales) = (3072 * 3584 / 2, 3072 * 3584 / 32);
        let layout = layout(&[codes, scales, codes, scales, codes, scales]);
        assert_eq!(layout.file_bytes, 17_547_264);
        assert_eq!(layout.part_offsets[..3], [0, codes, codes + scales]);
    }

    #[test]
    fn other_parts_are_padded() {
        let layout = layout(&[1, 4096, 4097]);
        assert_eq!(layout, Layout { file_bytes: 4 * 4096, part_offsets: vec![0, 4096, 8192] });
    }

    #[test]
    fn the_path_says_layer_expert_and_format() {
        let id = ExpertId { layer: 1, expert: 20 };
        assert_eq!(expert_path(Path::new("/r"), id, 6), Path::new("/r/L001/E0020.mxfp4"));
        assert_eq!(expert_path(Path::new("/r"), id, 3), Path::new("/r/L001/E0020.bf16"));
        let id = ExpertId { layer: 1234, expert: 56789 };
        assert_eq!(expert_path(Path::new("/r"), id, 6), Path::new("/r/L1234/E56789.mxfp4"));
    }
}
