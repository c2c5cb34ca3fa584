//! How many copies each expert has, in the shards and under the roots. Looks at lists and file lengths; reads no expert.

use std::collections::BTreeSet;
use std::path::PathBuf;

use rustc_hash::FxHashMap;
use serde::Serialize;

use crate::checkpoint::Manifest;
use crate::error::{Error, Result};
use crate::store::ExpertId;
use crate::store::packed::PackedRoot;

/// Copies of the experts.
#[derive(Debug, Serialize)]
pub(super) struct Copies {
    /// Experts that the shards hold.
    pub in_shards: u64,
    pub roots: Vec<RootCopies>,
    /// At n: experts with n copies, shards and roots together.
    pub experts_by_copies: Vec<u64>,
    /// At n: experts with n copies under the roots.
    pub experts_by_packed_copies: Vec<u64>,
}

/// What one root holds.
#[derive(Debug, Serialize)]
pub(super) struct RootCopies {
    pub root: String,
    /// Experts listed, with a file of the right length.
    pub experts: u64,
    /// Bytes of their files.
    pub bytes: u64,
    /// Experts listed whose file is missing or of another length.
    pub missing: u64,
}

/// The roots, each once.
///
/// # Errors
/// As [`PackedRoot::open`].
pub(super) fn open(dirs: &[PathBuf], manifest: &Manifest) -> Result<Vec<PackedRoot>> {
    let mut seen = BTreeSet::new();
    let distinct = dirs.iter().filter(|dir| seen.insert(dir.canonicalize().unwrap_or_else(|_| dir.to_path_buf())));
    PackedRoot::open_all(&distinct.cloned().collect::<Vec<_>>(), manifest)
}

impl Copies {
    /// Of a model with experts; `None` without.
    pub(super) fn of(manifest: &Manifest, roots: &[PackedRoot]) -> Option<Self> {
        let table = manifest.experts.as_ref()?;
        let mut packed: FxHashMap<ExpertId, usize> = FxHashMap::default();
        let roots: Vec<RootCopies> = (roots.iter())
            .map(|root| {
                let mut found = RootCopies { root: root.dir.display().to_string(), experts: 0, bytes: 0, missing: 0 };
                for expert in &root.experts {
                    let meta = std::fs::metadata(root.path(expert.id));
                    if meta.is_ok_and(|meta| meta.is_file() && meta.len() == root.file_bytes) {
                        found.experts += 1;
                        found.bytes += root.file_bytes;
                        *packed.entry(expert.id).or_default() += 1;
                    } else {
                        found.missing += 1;
                    }
                }
                found
            })
            .collect();
        let mut copies = Self {
            in_shards: 0,
            experts_by_copies: vec![0; roots.len() + 2],
            experts_by_packed_copies: vec![0; roots.len() + 1],
            roots,
        };
        for (layer, expert) in table.ids() {
            let in_shards = usize::from(table.is_in_shards(layer, expert));
            let of_roots = packed.get(&ExpertId { layer, expert }).copied().unwrap_or(0);
            copies.in_shards += in_shards as u64;
            copies.experts_by_copies[in_shards + of_roots] += 1;
            copies.experts_by_packed_copies[of_roots] += 1;
        }
        Some(copies)
    }

    /// Why the model cannot be run with these copies, if it cannot.
    pub(super) fn obstacle(&self) -> Option<Error> {
        let without = self.experts_by_copies[0];
        let experts = if without == 1 { "expert has" } else { "experts have" };
        (without > 0).then(|| {
            Error::model(format!("{without} {experts} no copy, neither in the shards nor under a root"))
                .hint("give the roots that the experts were moved to: --experts ROOT…")
        })
    }
}
