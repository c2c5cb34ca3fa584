//! What the shards' headers hold, gathered shard by shard, and whether the index says the same.

use std::path::Path;

use safetensors::Dtype;

use super::demand::ExpertShapes;
use super::header::{self, Entry};
use super::index::{INDEX_FILE, Index};
use super::names::{ExpertPart, FIRST_PLAIN_PART, Name, Prefixes, layer, shown};
use crate::config::{FeedForwardKind, ModelConfig};

/// Lines of one kind that a message shows before it only counts.
const LINES_MAX: usize = 12;

/// Lines of a message, the first few of them.
#[derive(Debug, Default)]
pub(super) struct Lines {
    shown: Vec<String>,
    more: usize,
}

impl Lines {
    pub(super) fn push(&mut self, line: impl FnOnce() -> String) {
        if self.shown.len() < LINES_MAX {
            self.shown.push(line());
        } else {
            self.more += 1;
        }
    }

    pub(super) fn into_lines(mut self) -> Vec<String> {
        if self.more > 0 {
            self.shown.push(format!("… and {} more of this kind", self.more));
        }
        self.shown
    }
}

/// Where one part of a routed expert lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct ExpertAt {
    pub(super) part: ExpertPart,
    pub(super) shard: u16,
    pub(super) offset: u64,
}

/// Any other tensor.
#[derive(Debug, Clone)]
pub(super) struct OtherAt {
    /// With its prefix.
    pub(super) full_name: String,
    pub(super) shard: u16,
    pub(super) dtype: Dtype,
    pub(super) shape: Vec<u64>,
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// All tensors of all shards.
pub(super) struct Contents<'c> {
    config: &'c ModelConfig,
    expert_shapes: Option<ExpertShapes>,
    /// Sorted by [`Contents::sort`].
    pub(super) experts: Vec<ExpertAt>,
    /// Sorted by [`Contents::sort`].
    pub(super) others: Vec<OtherAt>,
    /// Experts' tensors of another shape or dtype than they must have.
    pub(super) misshapen: Lines,
}

impl<'c> Contents<'c> {
    pub(super) fn new(config: &'c ModelConfig) -> Self {
        Self {
            config,
            expert_shapes: config.moe.as_ref().map(|moe| ExpertShapes::new(moe, config.hidden_size)),
            experts: Vec::new(),
            others: Vec::new(),
            misshapen: Lines::default(),
        }
    }

    /// Reads the header of shard `shard`, which is `path`; gives the file's length. The error does not name the file.
    pub(super) fn add_shard(&mut self, path: &Path, shard: u16, prefixes: &mut Prefixes) -> Result<u64, String> {
        header::read(path, prefixes, &mut |entry| match entry.name {
            Name::Expert(part) => {
                self.check_expert(part, entry, path);
                self.experts.push(ExpertAt { part, shard, offset: entry.offset });
            }
            Name::Ignored | Name::Other(_) => self.others.push(OtherAt {
                full_name: entry.full_name.to_owned(),
                shard,
                dtype: entry.dtype,
                shape: entry.shape.to_vec(),
                offset: entry.offset,
                len: entry.len,
            }),
        })
    }

    fn check_expert(&mut self, part: ExpertPart, entry: &Entry<'_>, path: &Path) {
        let kinds = self.config.layers.get(usize::from(part.layer()));
        let (Some(FeedForwardKind::Moe), Some(shapes)) = (kinds.map(|k| k.feed_forward), &self.expert_shapes) else {
            return;
        };
        let shape = shapes.shape(part.part());
        let dtype = if part.part() < FIRST_PLAIN_PART { Dtype::U8 } else { Dtype::BF16 };
        if entry.shape != shape || entry.dtype != dtype {
            let (found, found_dtype) = (entry.shape, entry.dtype);
            let file = path.file_name().unwrap_or_default().to_string_lossy();
            self.misshapen
                .push(|| format!("{part}: expected {shape:?} {dtype}, found {found:?} {found_dtype} in {file}"));
        }
    }

    /// Brings both lists into the order of layer, expert and part, or of names.
    pub(super) fn sort(&mut self) {
        self.experts.sort_unstable();
        self.others.sort_unstable_by(|a, b| (&a.full_name, a.shard).cmp(&(&b.full_name, b.shard)));
    }

    /// Where index and shards contradict each other: a line for each tensor, with both places.
    pub(super) fn compare(&self, index: &Index) -> Vec<String> {
        let mut lines = Lines::default();
        let experts = self.experts.iter().map(|at| (at.part, at.shard));
        compare(index.experts.iter().copied(), experts, |part, listed, held| {
            lines.push(|| contradiction(&part.to_string(), listed, held, &index.shards));
        });
        let listed = index.others.iter().map(|(name, shard)| (name.as_str(), *shard));
        let others = self.others.iter().map(|at| (at.full_name.as_str(), at.shard));
        compare(listed, others, |name, listed, held| {
            lines.push(|| contradiction(&shown(name), listed, held, &index.shards));
        });
        lines.into_lines()
    }
}

/// Walks the two sorted lists together and calls `each` with key, listed place and held places where they differ.
fn compare<K: Ord + Copy>(
    listed: impl Iterator<Item = (K, u16)>,
    held: impl Iterator<Item = (K, u16)>,
    mut each: impl FnMut(K, Option<u16>, &[u16]),
) {
    let (mut listed, mut held) = (listed.peekable(), held.peekable());
    let mut places = Vec::new();
    while let Some(key) = [listed.peek(), held.peek()].into_iter().flatten().map(|(key, _)| *key).min() {
        let place = listed.next_if(|(k, _)| *k == key).map(|(_, shard)| shard);
        places.clear();
        while let Some((_, shard)) = held.next_if(|(k, _)| *k == key) {
            places.push(shard);
        }
        if place.is_none() || places.as_slice() != place.as_slice() {
            each(key, place, &places);
        }
    }
}

fn contradiction(name: &str, listed: Option<u16>, held: &[u16], shards: &[String]) -> String {
    let file = |shard: &u16| shards[usize::from(*shard)].as_str();
    let held_by = held.iter().map(file).collect::<Vec<_>>().join(" and ");
    match (listed, held.len()) {
        (Some(place), 0) => format!("{name}: {INDEX_FILE} puts it in {}, which does not hold it", file(&place)),
        (Some(place), 1) => format!("{name}: {INDEX_FILE} puts it in {}, but {held_by} holds it", file(&place)),
        (Some(place), _) => format!("{name}: both {held_by} hold it; {INDEX_FILE} puts it in {}", file(&place)),
        (None, _) => format!("{name}: {held_by} holds it, but {INDEX_FILE} does not list it"),
    }
}

/// What shard `shard` holds by the index, in words: `layers 3–5, 8, vision`.
pub(super) fn described(index: &Index, shard: u16) -> String {
    let experts = index.experts.iter().filter(|(_, s)| *s == shard).map(|(part, _)| part.layer());
    let others = || index.others.iter().filter(|(_, s)| *s == shard).map(|(name, _)| name.as_str());
    describe(experts, others())
}

/// Layers and other things that the given expert layers and tensor names belong to, in words.
pub(super) fn describe<'n>(expert_layers: impl Iterator<Item = u16>, names: impl Iterator<Item = &'n str>) -> String {
    let mut layers: std::collections::BTreeSet<u16> = expert_layers.collect();
    let (mut outside, mut vision) = (false, false);
    for name in names {
        match layer(name) {
            Some(layer) => {
                layers.insert(layer);
            }
            None if super::names::is_ignored(name) => vision = true,
            None => outside = true,
        }
    }
    let mut words = Vec::new();
    if !layers.is_empty() {
        let plural = if layers.len() == 1 { "layer" } else { "layers" };
        words.push(format!("{plural} {}", ranges(layers.into_iter())));
    }
    if outside {
        words.push("embedding, norm or head".into());
    }
    if vision {
        words.push("vision".into());
    }
    if words.is_empty() { "no tensors".into() } else { words.join("; ") }
}

/// `3–5, 8` for 3, 4, 5, 8.
fn ranges(numbers: impl Iterator<Item = u16>) -> String {
    let mut runs: Vec<(u16, u16)> = Vec::new();
    for n in numbers {
        match runs.last_mut() {
            Some((_, last)) if u32::from(*last) + 1 == u32::from(n) => *last = n,
            _ => runs.push((n, n)),
        }
    }
    let shown = runs.iter().map(|(a, b)| if a == b { a.to_string() } else { format!("{a}–{b}") });
    shown.collect::<Vec<_>>().join(", ")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layers_are_told_as_ranges() {
        assert_eq!(ranges([0, 1, 2, 5, 7, 8].into_iter()), "0–2, 5, 7–8");
        let names = ["language_model.model.layers.4.x", "lm_head.weight", "vision_tower.x"];
        assert_eq!(describe([3].into_iter(), names.into_iter()), "layers 3–4; embedding, norm or head; vision");
    }

    #[test]
    fn comparing_finds_every_way_to_differ() {
        let mut found = Vec::new();
        let listed = [(1, 0), (2, 0), (3, 1), (5, 1)];
        let held = [(1, 0), (2, 1), (3, 0), (3, 1), (4, 2)];
        compare(listed.into_iter(), held.into_iter(), |key, place, places| found.push((key, place, places.to_vec())));
        let expected = vec![(2, Some(0), vec![1]), (3, Some(1), vec![0, 1]), (4, None, vec![2]), (5, Some(1), vec![])];
        assert_eq!(found, expected);
    }
}
