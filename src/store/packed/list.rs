//! The list of a root: read, checked against the model, replaced in one step.
//!
//! Little-endian, inside a sealed file: fingerprint u128; format, parts, 0, 0 (u8 each); file bytes u64; part offsets and
//! part bytes u64 each; experts a layer u32; number of layers u32; those layers u16 each; plan u64; this root's number,
//! the number of roots, and of replicas u16 each; rate of the drive in 10⁶ bytes a second u32, 0 where it is not known;
//! length u32 and bytes of the source's name; planned experts u32, then layer and expert u16 each; finished experts u32, then layer and expert u16, checksum u64 each. Both ascending.

use std::collections::BTreeMap;
use std::path::Path;

use super::super::ExpertId;
use super::super::sealed::{self, Magic};
use super::Layout;
use crate::checkpoint::{ExpertTable, Fingerprint, Manifest};
use crate::error::{Error, Result};

/// File name of the list.
pub(crate) const LIST_FILE: &str = "experts.list";
/// File name of its copy. With the list go the checksums, and experts that have left the shards would be lost with it.
pub(crate) const COPY_FILE: &str = "experts.list.copy";

const MAGIC: Magic = *b"DFPACK_\x02";
/// Bytes of the source's name that are kept.
const NAME_BYTES_MAX: usize = 4096;

/// The model that a root is packed from, as far as its list says.
#[derive(Debug, Clone)]
pub(crate) struct Source {
    pub fingerprint: Fingerprint,
    /// Directory it was in; for messages.
    pub name: String,
    pub layout: Layout,
    format: u8,
    part_bytes: Vec<u64>,
    num_experts: usize,
    moe_layers: Vec<u16>,
}

/// What one call of `pack` meant for this root.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Share {
    /// The same for all roots of one plan.
    pub plan: u64,
    /// This root's place among them.
    pub number: u16,
    /// How many there are.
    pub roots: u16,
    /// Most copies of an expert.
    pub replicas: u16,
    /// Ascending.
    pub experts: Vec<ExpertId>,
}

/// What a root's list says.
#[derive(Debug, Clone, PartialEq)]
pub(crate) struct List {
    pub share: Share,
    /// GB/s that the drive gave, or was said to give, when the root was packed.
    pub gb_per_s: Option<f64>,
    /// Checksum by expert.
    pub experts: BTreeMap<ExpertId, u64>,
}

impl Source {
    /// The model of `manifest`.
    ///
    /// # Errors
    /// Kind `Model` for a model without routed experts, or a shard that cannot be read.
    pub(crate) fn of(manifest: &Manifest) -> Result<Self> {
        let Some(table) = &manifest.experts else {
            let dir = manifest.dir.display();
            return Err(Error::model(format!("{dir} has no routed experts: there is nothing to pack or to read"))
                .hint("leave --to and --experts out: every layer of this model is dense"));
        };
        Ok(Self::new(table, manifest.fingerprint()?, manifest.dir.display().to_string()))
    }

    pub(super) fn new(table: &ExpertTable, fingerprint: Fingerprint, name: String) -> Self {
        Self {
            fingerprint,
            name,
            layout: Layout::of(table),
            format: table.format as u8,
            part_bytes: table.part_bytes.clone(),
            num_experts: table.num_experts,
            moe_layers: table.moe_layers.clone(),
        }
    }

    /// The fields that a list must repeat, byte by byte, after the fingerprint.
    fn facts(&self) -> Vec<u8> {
        let mut bytes = vec![self.format, self.part_bytes.len() as u8, 0, 0];
        bytes.extend_from_slice(&self.layout.file_bytes.to_le_bytes());
        bytes.extend(self.layout.part_offsets.iter().chain(&self.part_bytes).flat_map(|n| n.to_le_bytes()));
        bytes.extend_from_slice(&(self.num_experts as u32).to_le_bytes());
        bytes.extend_from_slice(&(self.moe_layers.len() as u32).to_le_bytes());
        bytes.extend(self.moe_layers.iter().flat_map(|layer| layer.to_le_bytes()));
        bytes
    }

    fn has(&self, id: ExpertId) -> bool {
        usize::from(id.expert) < self.num_experts && self.moe_layers.binary_search(&id.layer).is_ok()
    }

    /// Bytes of a list that names all experts twice.
    pub(crate) fn list_bytes_max(&self) -> usize {
        64 + 64 + self.facts().len() + NAME_BYTES_MAX + self.num_experts * self.moe_layers.len() * (4 + 12)
    }
}

impl List {
    /// Nothing is there yet.
    pub(crate) fn new(share: Share) -> Self {
        Self { share, gb_per_s: None, experts: BTreeMap::new() }
    }

    /// The list in `dir`; `None` where there is none.
    ///
    /// # Errors
    /// Kind `Model` for one that is damaged or of another model.
    pub(crate) fn read(dir: &Path, source: &Source) -> Result<Option<Self>> {
        let path = dir.join(LIST_FILE);
        let refuse = |what: &str| {
            Error::model(format!("{} {what}", path.display())).hint(format!(
                "put {COPY_FILE}, which lies beside it, in its place; or, if the shards have all experts, remove {} and pack again",
                path.display()
            ))
        };
        // A list of a larger model must be told from a damaged one.
        let read = sealed::read(&path, MAGIC, source.list_bytes_max().max(1 << 26)).map_err(|what| refuse(&what))?;
        let Some(payload) = read else { return Ok(None) };
        let mut fields = Fields(&payload);
        let fingerprint = fields.u128().map(Fingerprint);
        if fingerprint != Some(source.fingerprint) {
            let name = fields.name_of_any_source().unwrap_or_default();
            return Err(Error::model(format!(
                "{}: holds experts of another model: packed from {name} (fingerprint {}), but {} has fingerprint {}",
                dir.display(),
                fingerprint.map_or_else(|| "none".into(), |f| f.to_string()),
                source.name,
                source.fingerprint
            ))
            .hint(
                "give -m the model that was packed, or another root; a root that is no longer needed can be removed",
            ));
        }
        let list = fields.list(source).filter(|_| fields.0.is_empty());
        list.map(Some).ok_or_else(|| refuse("is damaged: its fields contradict each other"))
    }

    /// Replaces the list in `dir`, then its copy.
    ///
    /// # Errors
    /// Kind `Io` when it cannot be written; what was there is then still there.
    pub(crate) fn write(&self, dir: &Path, source: &Source) -> Result<()> {
        let payload = self.payload(source);
        sealed::write(&dir.join(LIST_FILE), MAGIC, &payload)?;
        sealed::write(&dir.join(COPY_FILE), MAGIC, &payload)
    }

    /// Whether the list in `dir` and its copy both say this.
    pub(crate) fn is_written(&self, dir: &Path, source: &Source) -> bool {
        let payload = self.payload(source);
        let says_this =
            |name| matches!(sealed::read(&dir.join(name), MAGIC, payload.len()), Ok(Some(found)) if found == payload);
        says_this(LIST_FILE) && says_this(COPY_FILE)
    }

    fn payload(&self, source: &Source) -> Vec<u8> {
        let Self { share, gb_per_s, experts } = self;
        let mut bytes = source.fingerprint.0.to_le_bytes().to_vec();
        bytes.extend(source.facts());
        bytes.extend_from_slice(&share.plan.to_le_bytes());
        bytes.extend_from_slice(&share.number.to_le_bytes());
        bytes.extend_from_slice(&share.roots.to_le_bytes());
        bytes.extend_from_slice(&share.replicas.to_le_bytes());
        let rate = gb_per_s.map_or(0.0, |rate| (rate * 1e3).round().max(1.0)) as u32;
        bytes.extend_from_slice(&rate.to_le_bytes());
        let name = &source.name.as_bytes()[..source.name.len().min(NAME_BYTES_MAX)];
        bytes.extend_from_slice(&(name.len() as u32).to_le_bytes());
        bytes.extend_from_slice(name);
        bytes.extend_from_slice(&(share.experts.len() as u32).to_le_bytes());
        bytes.extend(share.experts.iter().flat_map(|id| id_bytes(*id)));
        bytes.extend_from_slice(&(experts.len() as u32).to_le_bytes());
        for (id, checksum) in experts {
            bytes.extend(id_bytes(*id));
            bytes.extend_from_slice(&checksum.to_le_bytes());
        }
        bytes
    }
}

fn id_bytes(id: ExpertId) -> [u8; 4] {
    let ([a, b], [c, d]) = (id.layer.to_le_bytes(), id.expert.to_le_bytes());
    [a, b, c, d]
}

/// What is left of a payload.
struct Fields<'p>(&'p [u8]);

impl<'p> Fields<'p> {
    fn bytes(&mut self, count: usize) -> Option<&'p [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn array<const N: usize>(&mut self) -> Option<[u8; N]> {
        self.bytes(N)?.try_into().ok()
    }

    fn u128(&mut self) -> Option<u128> {
        self.array().map(u128::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.array().map(u64::from_le_bytes)
    }

    fn u32(&mut self) -> Option<u32> {
        self.array().map(u32::from_le_bytes)
    }

    fn u16(&mut self) -> Option<u16> {
        self.array().map(u16::from_le_bytes)
    }

    fn id(&mut self) -> Option<ExpertId> {
        Some(ExpertId { layer: self.u16()?, expert: self.u16()? })
    }

    fn name(&mut self) -> Option<String> {
        let len = self.u32()? as usize;
        Some(String::from_utf8_lossy(self.bytes(len)?).into_owned())
    }

    /// The source's name, after the fingerprint of a model of any shape.
    fn name_of_any_source(&mut self) -> Option<String> {
        let parts = usize::from(*self.bytes(4)?.get(1)?);
        self.bytes(8 + parts * 16 + 4)?;
        let layers = self.u32()? as usize;
        self.bytes(layers.checked_mul(2)?)?;
        self.bytes(18)?;
        self.name()
    }

    /// All after the fingerprint; `None` where it does not fit the model, or the order is wrong.
    fn list(&mut self, source: &Source) -> Option<List> {
        let facts = source.facts();
        if self.bytes(facts.len())? != facts {
            return None;
        }
        let (plan, number, roots, replicas) = (self.u64()?, self.u16()?, self.u16()?, self.u16()?);
        let rate = self.u32()?;
        self.name()?;
        let mut share = Share { plan, number, roots, replicas, experts: Vec::new() };
        for _ in 0..self.u32()? {
            let id = self.id()?;
            if !source.has(id) || share.experts.last().is_some_and(|last| *last >= id) {
                return None;
            }
            share.experts.push(id);
        }
        let mut list = List::new(share);
        list.gb_per_s = (rate > 0).then(|| f64::from(rate) / 1e3);
        for _ in 0..self.u32()? {
            let id = self.id()?;
            if !source.has(id) || list.experts.last_key_value().is_some_and(|(last, _)| *last >= id) {
                return None;
            }
            list.experts.insert(id, self.u64()?);
        }
        Some(list)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::checkpoint::ExpertFormat;

    fn source(fingerprint: u128, num_experts: usize) -> Source {
        let table = ExpertTable {
            format: ExpertFormat::Mxfp4,
            part_bytes: vec![100, 10, 100, 10, 100, 10],
            num_experts,
            moe_layers: vec![1, 2, 5],
            places: Vec::new(),
        };
        Source::new(&table, Fingerprint(fingerprint), format!("/models/{fingerprint}"))
    }

    fn id(layer: u16, expert: u16) -> ExpertId {
        ExpertId { layer, expert }
    }

    fn list() -> List {
        let experts = vec![id(1, 0), id(1, 3), id(5, 7)];
        let mut list = List::new(Share { plan: 77, number: 1, roots: 2, replicas: 1, experts });
        list.gb_per_s = Some(7.1);
        list.experts.extend([(id(1, 0), 5), (id(5, 7), u64::MAX)]);
        list
    }

    #[test]
    fn what_is_written_is_read() {
        let dir = tempfile::tempdir().unwrap();
        assert!(List::read(dir.path(), &source(1, 8)).unwrap().is_none());
        list().write(dir.path(), &source(1, 8)).unwrap();
        let read = List::read(dir.path(), &source(1, 8)).unwrap().unwrap();
        assert_eq!((read.share, read.gb_per_s, read.experts), (list().share, Some(7.1), list().experts));
    }

    #[test]
    fn a_list_of_another_model_is_refused_with_both_named() {
        let dir = tempfile::tempdir().unwrap();
        list().write(dir.path(), &source(1, 8)).unwrap();
        for other in [source(2, 8), source(2, 9)] {
            let error = List::read(dir.path(), &other).unwrap_err();
            assert!(error.message().contains("/models/1") && error.message().contains("/models/2"), "{error}");
        }
    }

    #[test]
    fn a_damaged_list_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join(LIST_FILE);
        list().write(dir.path(), &source(1, 8)).unwrap();
        let whole = std::fs::read(&path).unwrap();
        for at in 0..whole.len() {
            let mut changed = whole.clone();
            changed[at] ^= 4;
            for bytes in [&changed[..], &whole[..at]] {
                std::fs::write(&path, bytes).unwrap();
                assert!(List::read(dir.path(), &source(1, 8)).is_err(), "byte {at}");
            }
        }
    }

    #[test]
    fn a_list_that_contradicts_itself_is_refused() {
        let dir = tempfile::tempdir().unwrap();
        let mut lists = vec![list(), list(), list()];
        lists[0].share.experts = vec![id(1, 3), id(1, 0)];
        lists[1].experts.insert(id(3, 0), 0);
        lists[2].experts.insert(id(1, 8), 0);
        for list in lists {
            list.write(dir.path(), &source(1, 8)).unwrap();
            let error = List::read(dir.path(), &source(1, 8)).unwrap_err();
            assert!(error.message().contains("damaged"), "{error}");
        }
    }
}
