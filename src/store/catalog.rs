//! Where experts live: each has replicas (in the released shards, in files on drive roots), each replica runs of adjacent
//! parts in a file. Also how a replica lies in a slot and in which pieces it is read. Some 50 bytes a copy: K3 has 82,432
//! experts.

use std::ops::Range;

use rustc_hash::FxHashMap;
use xxhash_rust::xxh3::Xxh3;

use super::ExpertId;
use super::files::Names;
use super::packed::PackedRoot;
use crate::checkpoint::{ExpertFormat, ExpertTable, MOVED, Manifest};
use crate::error::{Error, Result};
use crate::memory::ALIGN;

/// Parts of an expert at most ([`ExpertFormat::parts`]).
const PARTS_MAX: usize = 6;

/// An expert by its place in the catalog: layer by layer, expert by expert.
pub(crate) type Index = u32;

/// All experts of a model.
pub(crate) struct Catalog {
    format: ExpertFormat,
    part_bytes: Vec<u64>,
    moe_layers: Vec<u16>,
    num_experts: usize,
    /// `[experts + 1]`: where an expert's replicas begin in `replicas`.
    first_replica: Vec<u32>,
    replicas: Vec<Replica>,
    runs: Vec<Run>,
    /// Every way in which experts' parts follow each other; one, in a released checkpoint.
    layouts: Vec<Layout>,
}

/// One copy of an expert.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Replica {
    layout: u32,
    first_run: u32,
    /// XXH3-64 of the expert's file, for a copy on a drive root.
    pub checksum: Option<u64>,
}

/// Where a run of adjacent parts begins.
#[derive(Debug, Clone, Copy)]
struct Run {
    file: u32,
    offset: u64,
}

/// Which parts make up which run, in the order of the file.
#[derive(Debug, Clone, PartialEq, Eq, Hash)]
struct Layout {
    runs: Vec<Vec<u8>>,
}

/// One positional read: whole pages of a file into as many bytes of a slot.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Piece {
    /// File number.
    pub file: usize,
    /// Of the first page.
    pub offset: u64,
    /// Bytes of the slot it takes; pieces follow each other without gaps.
    pub len: usize,
    /// Bytes of them that matter, from the start.
    pub needed: usize,
}

impl Catalog {
    /// Of the shards of `manifest`, where they lie.
    #[cfg(test)]
    fn of_shards(manifest: &Manifest) -> Result<Self> {
        Self::new(manifest, &[], &Names::of_shards(manifest))
    }

    /// Of the shards of `manifest`, where they lie, and the files of `roots`; `names` numbers the files of both. Empty for a
    /// model without routed experts.
    ///
    /// # Errors
    /// Kind `Model` when an expert lies outside its file, which a checked manifest rules out, or is nowhere.
    pub(crate) fn new(manifest: &Manifest, roots: &[PackedRoot], names: &Names) -> Result<Self> {
        let Some(table) = &manifest.experts else { return Ok(Self::empty()) };
        let parts = table.format.parts();
        let count = table.moe_layers.len() * table.num_experts;
        if table.part_bytes.len() != parts || table.places.len() != count * parts || u32::try_from(count).is_err() {
            return Err(Error::model(format!(
                "expert table: expected {count} experts of {parts} parts, found {} places and {} part sizes",
                table.places.len(),
                table.part_bytes.len()
            )));
        }
        let copies = count + roots.iter().map(|root| root.experts.len()).sum::<usize>();
        let mut catalog = Self {
            format: table.format,
            part_bytes: table.part_bytes.clone(),
            moe_layers: table.moe_layers.clone(),
            num_experts: table.num_experts,
            first_replica: Vec::with_capacity(count + 1),
            replicas: Vec::with_capacity(copies),
            runs: Vec::with_capacity(copies),
            layouts: Vec::new(),
        };
        let mut known = FxHashMap::default();
        let mut lost = Vec::new();
        let mut rest: Vec<_> = roots.iter().map(|root| root.experts.iter().peekable()).collect();
        for (index, places) in table.places.chunks_exact(parts).enumerate() {
            let id = catalog.id(index as Index);
            let first = catalog.replicas.len();
            catalog.first_replica.push(first as u32);
            // An expert that was moved has no place in a shard; the roots hold it.
            if places.iter().all(|place| place.0 != MOVED) {
                check_bounds(manifest, table, places).map_err(|error| error.context(id))?;
                let places: Vec<_> = places.iter().map(|(shard, offset)| (u32::from(*shard), *offset)).collect();
                catalog.push_replica(&places, None, &mut known);
            }
            for (number, (root, rest)) in roots.iter().zip(&mut rest).enumerate() {
                // Both run in the order of the ids.
                while rest.next_if(|expert| expert.id < id).is_some() {}
                if let Some(expert) = rest.next_if(|expert| expert.id == id) {
                    let file = names.of_root(number, index as Index);
                    let places: Vec<_> = root.part_offsets.iter().map(|offset| (file, *offset)).collect();
                    catalog.push_replica(&places, Some(expert.checksum), &mut known);
                }
            }
            if catalog.replicas.len() == first {
                lost.push(id);
            }
        }
        catalog.first_replica.push(catalog.replicas.len() as u32);
        if let Some(first) = lost.first() {
            return Err(Error::model(format!(
                "{} experts are neither in the shards of {} nor on a drive root that was given, {first} among them",
                lost.len(),
                manifest.dir.display()
            ))
            .hint("they were moved to drive roots: give those with --experts ROOT…"));
        }
        Ok(catalog)
    }

    fn empty() -> Self {
        Self {
            format: ExpertFormat::Bf16,
            part_bytes: Vec::new(),
            moe_layers: Vec::new(),
            num_experts: 0,
            first_replica: vec![0],
            replicas: Vec::new(),
            runs: Vec::new(),
            layouts: Vec::new(),
        }
    }

    fn push_replica(&mut self, places: &[(u32, u64)], checksum: Option<u64>, known: &mut FxHashMap<Layout, u32>) {
        let mut order = [0, 1, 2, 3, 4, 5];
        let order = &mut order[..places.len().min(PARTS_MAX)];
        order.sort_unstable_by_key(|part| places[usize::from(*part)]);
        let first_run = self.runs.len() as u32;
        let mut layout = Layout { runs: Vec::new() };
        let mut end = None;
        for &part in &*order {
            let (file, offset) = places[usize::from(part)];
            match layout.runs.last_mut() {
                Some(run) if end == Some((file, offset)) => run.push(part),
                _ => {
                    layout.runs.push(vec![part]);
                    self.runs.push(Run { file, offset });
                }
            }
            end = Some((file, offset + self.part_bytes[usize::from(part)]));
        }
        let next = self.layouts.len() as u32;
        let layout = *known.entry(layout).or_insert_with_key(|layout| {
            self.layouts.push(layout.clone());
            next
        });
        self.replicas.push(Replica { layout, first_run, checksum });
    }

    /// Number of experts.
    pub(crate) fn len(&self) -> usize {
        self.first_replica.len() - 1
    }

    /// Layers with experts, and experts of a layer.
    pub(crate) fn shape(&self) -> (usize, usize) {
        (self.moe_layers.len(), self.num_experts)
    }

    /// How the experts are stored.
    pub(crate) fn format(&self) -> ExpertFormat {
        self.format
    }

    /// Payload of an expert.
    pub(crate) fn expert_bytes(&self) -> u64 {
        self.part_bytes.iter().sum()
    }

    /// Place of an expert in the catalog, if the model has it.
    pub(crate) fn index(&self, layer: u16, expert: u16) -> Option<Index> {
        let layer = self.moe_layers.binary_search(&layer).ok()?;
        let expert = usize::from(expert);
        (expert < self.num_experts).then(|| (layer * self.num_experts + expert) as Index)
    }

    /// The inverse of [`Catalog::index`].
    pub(crate) fn id(&self, index: Index) -> ExpertId {
        let (layer, expert) = (index as usize / self.num_experts, index as usize % self.num_experts);
        ExpertId { layer: self.moe_layers[layer], expert: expert as u16 }
    }

    /// Copies of an expert.
    pub(crate) fn replicas(&self, index: Index) -> &[Replica] {
        let index = index as usize;
        &self.replicas[self.first_replica[index] as usize..self.first_replica[index + 1] as usize]
    }

    /// Whether every expert has a copy in one of the files that `is_read` names.
    pub(crate) fn is_whole_on(&self, is_read: impl Fn(usize) -> bool) -> bool {
        let has_copy = |index| self.replicas(index).iter().any(|replica| is_read(self.file_of(*replica)));
        (0..self.len() as Index).all(has_copy)
    }

    /// Whether two copies fill a slot alike, so that it may have pieces of both.
    pub(crate) fn fill_alike(&self, a: Replica, b: Replica) -> bool {
        a.layout == b.layout
            && self.runs_of(a).zip(self.runs_of(b)).all(|(a, b)| a.before == b.before && a.slot_len == b.slot_len)
    }

    /// XXH3-64 of an expert file that was read into `memory`: its parts, each padded with zeros to whole pages.
    pub(crate) fn checksum_in_slot(&self, replica: Replica, memory: &[u8]) -> u64 {
        let mut hash = Xxh3::new();
        for part in 0..self.part_bytes.len() {
            let bytes = self.part_in_slot(replica, part).map_or(&[][..], |range| &memory[range]);
            hash.update(bytes);
            hash.update(&[0; ALIGN][..bytes.len().next_multiple_of(ALIGN) - bytes.len()]);
        }
        hash.digest()
    }

    /// File that holds the first part of `replica`.
    pub(crate) fn file_of(&self, replica: Replica) -> usize {
        self.runs[replica.first_run as usize].file as usize
    }

    /// Files that hold experts, ascending.
    pub(crate) fn files(&self) -> Vec<usize> {
        let mut files: Vec<usize> = self.runs.iter().map(|run| run.file as usize).collect();
        files.sort_unstable();
        files.dedup();
        files
    }

    /// Bytes of a slot that takes any expert: its runs, each widened to whole pages.
    pub(crate) fn slot_bytes(&self) -> usize {
        self.replicas.iter().map(|replica| self.runs_of(*replica).map(|run| run.slot_len).sum()).max().unwrap_or(0)
    }

    /// The reads that bring `replica` into a slot, about `piece_bytes` each, in the order of the slot.
    pub(crate) fn pieces(&self, replica: Replica, piece_bytes: usize) -> impl Iterator<Item = Piece> + '_ {
        let piece_max = piece_bytes.next_multiple_of(ALIGN).max(ALIGN);
        self.runs_of(replica).flat_map(move |run| {
            // Equal pieces: a sliver at the end would cost a read and deliver little.
            let count = run.slot_len.div_ceil(piece_max);
            let len = (run.slot_len / count.max(1)).next_multiple_of(ALIGN);
            (0..run.slot_len).step_by(len.max(ALIGN)).map(move |at| {
                let len = len.min(run.slot_len - at);
                let needed = (run.before + run.len - at).min(len);
                Piece { file: run.file, offset: run.page + at as u64, len, needed }
            })
        })
    }

    /// Where part `part` lies in a slot that was filled from `replica`.
    pub(crate) fn part_in_slot(&self, replica: Replica, part: usize) -> Option<Range<usize>> {
        let layout = &self.layouts[replica.layout as usize];
        let mut base = 0;
        for (run, parts) in self.runs_of(replica).zip(&layout.runs) {
            let mut start = base + run.before;
            for &at in parts {
                let len = self.part_bytes[usize::from(at)] as usize;
                if usize::from(at) == part {
                    return Some(start..start + len);
                }
                start += len;
            }
            base += run.slot_len;
        }
        None
    }

    /// File and offset of byte `at` of part `part` of `replica`.
    pub(crate) fn place(&self, replica: Replica, part: usize, at: usize) -> Option<(usize, u64)> {
        let layout = &self.layouts[replica.layout as usize];
        for (run, parts) in self.runs[replica.first_run as usize..].iter().zip(&layout.runs) {
            let mut offset = run.offset;
            for &other in parts {
                if usize::from(other) == part {
                    return Some((run.file as usize, offset + at as u64));
                }
                offset += self.part_bytes[usize::from(other)];
            }
        }
        None
    }

    fn runs_of(&self, replica: Replica) -> impl Iterator<Item = RunInSlot> + '_ {
        let layout = &self.layouts[replica.layout as usize];
        self.runs[replica.first_run as usize..].iter().zip(&layout.runs).map(|(run, parts)| {
            let len = parts.iter().map(|part| self.part_bytes[usize::from(*part)] as usize).sum::<usize>();
            let before = (run.offset % ALIGN as u64) as usize;
            let slot_len = (before + len).next_multiple_of(ALIGN);
            RunInSlot { file: run.file as usize, page: run.offset - before as u64, before, len, slot_len }
        })
    }
}

/// A run widened to whole pages.
struct RunInSlot {
    file: usize,
    /// Offset of the first page.
    page: u64,
    /// Bytes of it before the run.
    before: usize,
    len: usize,
    slot_len: usize,
}

fn check_bounds(manifest: &Manifest, table: &ExpertTable, places: &[(u16, u64)]) -> Result<()> {
    for (part, (&(shard, offset), &len)) in places.iter().zip(&table.part_bytes).enumerate() {
        let shard = usize::from(shard);
        let (Some(path), Some(&bytes)) = (manifest.shards.get(shard), manifest.shard_bytes.get(shard)) else {
            return Err(Error::model(format!("part {part}: no shard number {shard}")));
        };
        if offset.checked_add(len).is_none_or(|end| end > bytes) {
            return Err(Error::model(format!(
                "part {part}: offset {offset} and {len} bytes reach beyond {}, which has {bytes}",
                path.display()
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::path::PathBuf;

    use super::*;

    fn manifest(part_bytes: &[u64], places: Vec<(u16, u64)>) -> Manifest {
        let format = if part_bytes.len() == 6 { ExpertFormat::Mxfp4 } else { ExpertFormat::Bf16 };
        let num_experts = places.len() / part_bytes.len();
        Manifest {
            dir: PathBuf::from("model"),
            shards: vec![PathBuf::from("model/a"), PathBuf::from("model/b")],
            shard_bytes: vec![1 << 40; 2],
            trunk: Vec::new(),
            experts: Some(ExpertTable {
                format,
                part_bytes: part_bytes.to_vec(),
                num_experts,
                moe_layers: vec![1],
                places,
            }),
            ignored: Vec::new(),
        }
    }

    fn adjacent(part_bytes: &[u64], file: u16, mut offset: u64) -> Vec<(u16, u64)> {
        let mut places = Vec::new();
        for len in part_bytes {
            places.push((file, offset));
            offset += len;
        }
        places
    }

    #[test]
    fn adjacent_parts_are_one_run_of_whole_pages() {
        let bytes = [10_000, 625, 10_000, 625, 10_000, 625];
        let catalog = Catalog::of_shards(&manifest(&bytes, adjacent(&bytes, 1, 5000))).unwrap();
        let replica = catalog.replicas(0)[0];
        let before = 5000 % ALIGN;
        let pieces: Vec<_> = catalog.pieces(replica, 1 << 20).collect();
        let len = (before + 31_875).next_multiple_of(ALIGN);
        let piece = Piece { file: 1, offset: 5000 - before as u64, len, needed: before + 31_875 };
        assert_eq!(pieces, [piece]);
        assert_eq!(catalog.slot_bytes(), len);
        assert_eq!(catalog.part_in_slot(replica, 1), Some(before + 10_000..before + 10_625));
        assert_eq!(catalog.place(replica, 1, 3), Some((1, 15_003)));
    }

    #[test]
    fn parts_apart_or_out_of_order_are_found_where_they_are() {
        let bytes = [100, 100, 100];
        let places = vec![(1, 9000), (0, 200), (0, 100)];
        let catalog = Catalog::of_shards(&manifest(&bytes, places)).unwrap();
        let replica = catalog.replicas(0)[0];
        assert_eq!(catalog.pieces(replica, 1).count(), 2);
        assert_eq!(catalog.part_in_slot(replica, 2), Some(100..200));
        assert_eq!(catalog.part_in_slot(replica, 1), Some(200..300));
        let before = 9000 % ALIGN;
        assert_eq!(catalog.part_in_slot(replica, 0), Some(ALIGN + before..ALIGN + before + 100));
        assert_eq!(catalog.part_in_slot(replica, 3), None);
    }

    #[test]
    fn pieces_cover_every_needed_byte_once() {
        let bytes = [70_000, 4_000, 70_000, 4_000, 70_000, 4_000];
        for start in [0, 1, 4095, 4096, 12_345] {
            for piece_bytes in [1, 4096, 10_000, 65_536, 1 << 30] {
                let catalog = Catalog::of_shards(&manifest(&bytes, adjacent(&bytes, 0, start))).unwrap();
                let pieces: Vec<_> = catalog.pieces(catalog.replicas(0)[0], piece_bytes).collect();
                let mut next = start / ALIGN as u64 * ALIGN as u64;
                for piece in &pieces {
                    assert_eq!(piece.offset, next, "start {start}, pieces of {piece_bytes}");
                    assert!(piece.len.is_multiple_of(ALIGN) && (1..=piece.len).contains(&piece.needed));
                    next += piece.len as u64;
                }
                let last = pieces.last().unwrap();
                assert_eq!(last.offset + last.needed as u64, start + 222_000);
                assert_eq!(pieces.iter().map(|piece| piece.len).sum::<usize>(), catalog.slot_bytes());
            }
        }
    }

    #[test]
    fn the_whole_of_k3_takes_little_memory() {
        let bytes = [5_505_024, 344_064, 5_505_024, 344_064, 5_505_024, 344_064];
        let mut places = Vec::new();
        for expert in 0..896 {
            places.extend(adjacent(&bytes, 0, 1000 + expert * 17_547_264));
        }
        let catalog = Catalog::of_shards(&manifest(&bytes, places)).unwrap();
        let held = catalog.first_replica.len() * 4
            + catalog.replicas.len() * size_of::<Replica>()
            + catalog.runs.capacity() * size_of::<Run>();
        assert!(held <= 64 * 896, "{held} bytes");
        assert_eq!(catalog.layouts.len(), 1);
        assert_eq!(catalog.expert_bytes(), 17_547_264);
    }

    #[test]
    fn an_expert_that_is_not_there_has_no_index() {
        let bytes = [100, 100, 100];
        let catalog = Catalog::of_shards(&manifest(&bytes, adjacent(&bytes, 0, 0))).unwrap();
        assert_eq!(catalog.index(1, 0), Some(0));
        assert_eq!(catalog.index(1, 1), None);
        assert_eq!(catalog.index(0, 0), None);
    }

    #[test]
    fn an_expert_beyond_its_file_is_refused() {
        let bytes = [100, 100, 100];
        let error = Catalog::of_shards(&manifest(&bytes, vec![(0, 0), (0, 100), (0, u64::MAX - 50)])).err().unwrap();
        assert!(error.message().starts_with("L1/E0: part 2: offset"), "{error}");
        assert!(Catalog::of_shards(&manifest(&bytes, vec![(0, 0), (0, 100), (7, 0)])).is_err());
    }
}
