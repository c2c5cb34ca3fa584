//! `model.safetensors.index.json`: which shard each tensor lies in. The authority where it exists.

use std::fmt;
use std::path::Path;

use rustc_hash::FxHashMap;
use serde::de::{self, DeserializeSeed, Deserializer, IgnoredAny, MapAccess, Visitor};

use super::names::{ExpertPart, Name, Prefixes, is_ignored, shown};
use crate::config::read_bytes;
use crate::error::{Error, Result};

/// File name of the index.
pub(super) const INDEX_FILE: &str = "model.safetensors.index.json";

/// The released K3's has 60 MB.
const INDEX_BYTES_MAX: u64 = 256 << 20;

/// Far beyond the released 96, and well inside the numbers that places are stored with.
const SHARDS_MAX: u16 = 16_384;

/// Which shard holds what, by the index. Shards are numbered in the order of their names.
#[derive(Debug, Default)]
pub(super) struct Index {
    /// File names.
    pub(super) shards: Vec<String>,
    /// Sorted; each once.
    pub(super) experts: Vec<(ExpertPart, u16)>,
    /// Everything else by full name; sorted, each once.
    pub(super) others: Vec<(String, u16)>,
}

impl Index {
    /// Reads `path`.
    ///
    /// # Errors
    /// Kind `Model`: unreadable or no JSON, a tensor listed twice, a shard that is no plain file name.
    pub(super) fn read(path: &Path, prefixes: &mut Prefixes) -> Result<Self> {
        let text = read_bytes(path, INDEX_BYTES_MAX)?;
        let mut index = Index::default();
        let mut deserializer = serde_json::Deserializer::from_slice(&text);
        TopLevel(WeightMap { index: &mut index, prefixes, by_name: FxHashMap::default(), last: 0 })
            .deserialize(&mut deserializer)
            .and_then(|()| deserializer.end())
            .map_err(|e| refuse(path, &format!("is damaged: {e}")))?;
        drop(text);
        index.sort_shards();
        index.experts.sort_unstable();
        index.others.sort_unstable();
        let twice = first_repeated(&index.experts).map(|(part, a, b)| (part.to_string(), a, b));
        let twice = twice.or_else(|| first_repeated(&index.others).map(|(name, a, b)| (shown(name), a, b)));
        if let Some((name, a, b)) = twice {
            let (a, b) = (&index.shards[usize::from(a)], &index.shards[usize::from(b)]);
            return Err(refuse(path, &format!("lists {name} twice, in {a} and in {b}")));
        }
        Ok(index)
    }

    /// Takes out the shards marked in `gone`, with all that they hold; gives the names of those tensors.
    pub(super) fn remove_shards(&mut self, gone: &[bool]) -> Vec<String> {
        let mut kept = 0;
        let new_number: Vec<Option<u16>> = (gone.iter())
            .map(|gone| {
                let number = (!gone).then_some(kept);
                kept += u16::from(!gone);
                number
            })
            .collect();
        let mut names = Vec::new();
        let mut shard = 0..;
        self.shards.retain(|_| shard.next().is_some_and(|s: usize| !gone[s]));
        self.experts.retain_mut(|(_, shard)| new_number[usize::from(*shard)].map(|new| *shard = new).is_some());
        self.others.retain_mut(|(name, shard)| match new_number[usize::from(*shard)] {
            Some(new) => {
                *shard = new;
                true
            }
            None => {
                names.push(std::mem::take(name));
                false
            }
        });
        names
    }

    /// For each shard whether it holds nothing but tensors that are left alone.
    pub(super) fn only_ignored(&self) -> Vec<bool> {
        let mut only = vec![true; self.shards.len()];
        self.experts.iter().for_each(|(_, shard)| only[usize::from(*shard)] = false);
        for (name, shard) in &self.others {
            only[usize::from(*shard)] &= is_ignored(name);
        }
        only
    }

    fn sort_shards(&mut self) {
        let mut order: Vec<u16> = (0..self.shards.len() as u16).collect();
        order.sort_unstable_by(|a, b| self.shards[usize::from(*a)].cmp(&self.shards[usize::from(*b)]));
        let mut new_number = vec![0; order.len()];
        for (new, old) in order.iter().enumerate() {
            new_number[usize::from(*old)] = new as u16;
        }
        self.shards.sort_unstable();
        self.experts.iter_mut().for_each(|(_, shard)| *shard = new_number[usize::from(*shard)]);
        self.others.iter_mut().for_each(|(_, shard)| *shard = new_number[usize::from(*shard)]);
    }
}

fn refuse(path: &Path, what: &str) -> Error {
    Error::model(format!("{} {what}", path.display())).hint("download the index again; it is the list of all tensors")
}

fn first_repeated<K: PartialEq>(sorted: &[(K, u16)]) -> Option<(&K, u16, u16)> {
    sorted.windows(2).find(|pair| pair[0].0 == pair[1].0).map(|pair| (&pair[0].0, pair[0].1, pair[1].1))
}

/// `{"metadata": …, "weight_map": {…}}`. What else is there says nothing about where tensors are.
struct TopLevel<'i>(WeightMap<'i>);

impl<'de> DeserializeSeed<'de> for TopLevel<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for TopLevel<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object with weight_map")
    }

    fn visit_map<A: MapAccess<'de>>(self, mut map: A) -> Result<(), A::Error> {
        let mut weight_map = Some(self.0);
        while let Some(key) = map.next_key::<String>()? {
            if key == "weight_map" {
                let visitor = weight_map.take().ok_or_else(|| de::Error::custom("weight_map occurs twice"))?;
                map.next_value_seed(visitor)?;
            } else {
                map.next_value::<IgnoredAny>()?;
            }
        }
        if weight_map.is_some() { Err(de::Error::missing_field("weight_map")) } else { Ok(()) }
    }
}

/// `{tensor: shard, …}`, taken in as it streams past: no copy of an expert's name is kept.
struct WeightMap<'i> {
    index: &'i mut Index,
    prefixes: &'i mut Prefixes,
    by_name: FxHashMap<String, u16>,
    last: u16,
}

impl WeightMap<'_> {
    /// The number of the shard called `name`, new or known.
    fn shard(&mut self, name: &str) -> Result<u16, String> {
        // Neighbours mostly share their shard.
        if self.index.shards.get(usize::from(self.last)).is_some_and(|last| last == name) {
            return Ok(self.last);
        }
        self.last = match self.by_name.get(name) {
            Some(number) => *number,
            None => {
                check_shard_name(name)?;
                let number = self.index.shards.len() as u16;
                if number == SHARDS_MAX {
                    return Err(format!("more than {SHARDS_MAX} shards"));
                }
                self.index.shards.push(name.to_owned());
                self.by_name.insert(name.to_owned(), number);
                number
            }
        };
        Ok(self.last)
    }
}

/// A shard lies in the model directory itself; a path could point anywhere.
fn check_shard_name(name: &str) -> Result<(), String> {
    let plain = !name.contains(['/', '\\', '\0']) && !name.starts_with('.') && name.len() <= 255;
    if plain && name.ends_with(".safetensors") {
        Ok(())
    } else {
        Err(format!("expected the name of a .safetensors file in the model directory, found {:?}", shown(name)))
    }
}

impl<'de> DeserializeSeed<'de> for WeightMap<'_> {
    type Value = ();

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<(), D::Error> {
        deserializer.deserialize_map(self)
    }
}

impl<'de> Visitor<'de> for WeightMap<'_> {
    type Value = ();

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("an object from tensor names to file names")
    }

    fn visit_map<A: MapAccess<'de>>(mut self, mut map: A) -> Result<(), A::Error> {
        while let Some(key) = map.next_key_seed(KeySeed(self.prefixes))? {
            let shard = map.next_value_seed(ShardSeed(&mut self)).map_err(|e| {
                let name = match &key {
                    Key::Expert(part) => part.to_string(),
                    Key::Other(name) => shown(name),
                };
                de::Error::custom(format!("{name}: {e}"))
            })?;
            match key {
                Key::Expert(part) => self.index.experts.push((part, shard)),
                Key::Other(name) => self.index.others.push((name, shard)),
            }
        }
        Ok(())
    }
}

enum Key {
    Expert(ExpertPart),
    Other(String),
}

struct KeySeed<'p>(&'p mut Prefixes);

impl<'de> DeserializeSeed<'de> for KeySeed<'_> {
    type Value = Key;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<Key, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for KeySeed<'_> {
    type Value = Key;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a tensor name")
    }

    fn visit_str<E>(self, name: &str) -> Result<Key, E> {
        Ok(match self.0.classify(name) {
            Name::Expert(part) => Key::Expert(part),
            Name::Ignored | Name::Other(_) => Key::Other(name.to_owned()),
        })
    }
}

struct ShardSeed<'w, 'i>(&'w mut WeightMap<'i>);

impl<'de> DeserializeSeed<'de> for ShardSeed<'_, '_> {
    type Value = u16;

    fn deserialize<D: Deserializer<'de>>(self, deserializer: D) -> Result<u16, D::Error> {
        deserializer.deserialize_str(self)
    }
}

impl Visitor<'_> for ShardSeed<'_, '_> {
    type Value = u16;

    fn expecting(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("a file name")
    }

    fn visit_str<E: de::Error>(self, name: &str) -> Result<u16, E> {
        self.0.shard(name).map_err(E::custom)
    }
}
