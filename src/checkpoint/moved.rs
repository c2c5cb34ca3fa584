//! The record of `pack --move`: which experts it took out of which shards, because drive roots hold them.
//!
//! A shard whose experts have moved is replaced by one of the same name with all its other tensors. The index still lists
//! the experts, and this record, which lies beside the shards, is what makes that no damage. It says what is gone, never
//! what is there: an expert that a shard holds is read from the shard whatever the record says.

use std::collections::BTreeMap;
use std::path::Path;

use serde::{Deserialize, Serialize};

use super::contents::{Contents, ExpertAt};
use super::index::Index;
use super::names::{ExpertPart, FIRST_PLAIN_PART};
use super::{ExpertFormat, ExpertTable};
use crate::config::read_bytes;
use crate::error::{Error, Result};

/// File name of the record.
pub(crate) const MOVED_FILE: &str = "moved.json";

/// Offset of a part that is in no shard, inside this module's neighbours; far beyond any file.
pub(super) const NOWHERE: u64 = u64::MAX;

/// Every expert of K3 one by one stays far below.
const RECORD_BYTES_MAX: u64 = 16 << 20;

/// Far beyond K3's 82,432.
const EXPERTS_MAX: u64 = 1 << 22;

const VERSION: u32 = 1;

/// Experts that are in no shard any more.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct Moved {
    version: u32,
    /// `mxfp4` or `bf16`.
    format: String,
    /// By file name.
    shards: BTreeMap<String, MovedShard>,
    /// By layer: first and last expert of each run.
    experts: BTreeMap<u16, Vec<(u16, u16)>>,
}

/// A shard before and after.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct MovedShard {
    /// Digest of the shard as released.
    #[serde(with = "hexadecimal")]
    pub source: u128,
    /// Digest of the one that takes its place.
    #[serde(with = "hexadecimal")]
    pub rest: u128,
}

impl Moved {
    /// Nothing has moved yet.
    pub(crate) fn new(format: ExpertFormat) -> Self {
        let format = format.name().to_owned();
        Self { version: VERSION, format, shards: BTreeMap::new(), experts: BTreeMap::new() }
    }

    /// What is known of the shard at `path`.
    pub(crate) fn shard(&self, path: &Path) -> Option<MovedShard> {
        self.shards.get(path.file_name()?.to_str()?).copied()
    }

    /// Adds a shard and the experts that were in it, ascending.
    pub(crate) fn add(&mut self, name: &str, shard: MovedShard, experts: impl Iterator<Item = (u16, u16)>) {
        self.shards.insert(name.to_owned(), shard);
        for (layer, expert) in experts {
            let runs = self.experts.entry(layer).or_default();
            runs.push((expert, expert));
        }
        for runs in self.experts.values_mut() {
            runs.sort_unstable();
            let mut joined: Vec<(u16, u16)> = Vec::new();
            for &(first, last) in &*runs {
                match joined.last_mut() {
                    Some(run) if u32::from(first) <= u32::from(run.1) + 1 => run.1 = run.1.max(last),
                    _ => joined.push((first, last)),
                }
            }
            *runs = joined;
        }
    }

    /// As the file has it.
    pub(crate) fn to_json(&self) -> String {
        serde_json::to_string_pretty(self).expect("the record is plain data") + "\n"
    }

    /// Gives the sorted `contents` the parts that have moved, in the shard that `index` lists them in, at [`NOWHERE`].
    pub(super) fn add_to(&self, contents: &mut Contents<'_>, index: Option<&Index>, names: &[String]) {
        let (first, count) = match self.format() {
            Some(ExpertFormat::Mxfp4) => (0, ExpertFormat::Mxfp4.parts()),
            Some(ExpertFormat::Bf16) => (FIRST_PLAIN_PART, ExpertFormat::Bf16.parts()),
            None => return,
        };
        let mut gone = Vec::new();
        let runs = self.experts.iter().flat_map(|(layer, runs)| runs.iter().map(|run| (*layer, *run)));
        for (layer, (low, high)) in runs {
            for (expert, part) in (low..=high).flat_map(|expert| (0..count as u8).map(move |part| (expert, part))) {
                let part = ExpertPart::new(layer, expert, first + part);
                if contents.experts.binary_search_by_key(&part, |at| at.part).is_ok() {
                    continue;
                }
                let shard = match index {
                    Some(index) => match index.experts.binary_search_by_key(&part, |(part, _)| *part) {
                        Ok(at) => index.experts[at].1,
                        Err(_) => continue,
                    },
                    None => 0,
                };
                if names.get(usize::from(shard)).is_some_and(|name| self.shards.contains_key(name)) {
                    gone.push(ExpertAt { part, shard, offset: NOWHERE });
                }
            }
        }
        if !gone.is_empty() {
            contents.experts.extend(gone);
            contents.sort();
        }
    }

    fn format(&self) -> Option<ExpertFormat> {
        [ExpertFormat::Mxfp4, ExpertFormat::Bf16].into_iter().find(|format| format.name() == self.format)
    }

    /// Whether the record is one of experts stored as in `table`.
    pub(crate) fn is_of(&self, table: &ExpertTable) -> bool {
        self.format() == Some(table.format)
    }
}

/// The record in `dir`, if there is one.
///
/// # Errors
/// Kind `Model` for one that is damaged or of another version.
pub(crate) fn read(dir: &Path) -> Result<Option<Moved>> {
    let path = dir.join(MOVED_FILE);
    if path.symlink_metadata().is_err() {
        return Ok(None);
    }
    let refuse = |what: String| {
        Error::model(format!("{}: {what}", path.display()))
            .hint("without this record the experts that `deltafin pack --move` took out of the shards count as missing")
    };
    let record: Moved = serde_json::from_slice(&read_bytes(&path, RECORD_BYTES_MAX)?)
        .map_err(|e| refuse(format!("the record of moved experts is damaged: {e}")))?;
    if record.version != VERSION {
        return Err(refuse(format!("has version {}, expected {VERSION}", record.version)));
    }
    let runs = record.experts.values().flatten();
    if runs.map(|(first, last)| u64::from(last.saturating_sub(*first)) + 1).sum::<u64>() > EXPERTS_MAX {
        return Err(refuse(format!("lists more than {EXPERTS_MAX} experts")));
    }
    if record.format().is_none() {
        return Err(refuse(format!("knows no format {:?}, expected mxfp4 or bf16", record.format)));
    }
    Ok(Some(record))
}

/// 128 bits as 32 hexadecimal digits: more than JSON's numbers hold.
mod hexadecimal {
    use serde::{Deserialize, Deserializer, Serializer, de};

    pub fn serialize<S: Serializer>(value: &u128, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_str(&format!("{value:032x}"))
    }

    pub fn deserialize<'de, D: Deserializer<'de>>(deserializer: D) -> Result<u128, D::Error> {
        let text = String::deserialize(deserializer)?;
        let digits = text.len() == 32 && text.bytes().all(|byte| byte.is_ascii_hexdigit());
        let value = if digits { u128::from_str_radix(&text, 16).ok() } else { None };
        value.ok_or_else(|| de::Error::custom(format!("expected 32 hexadecimal digits, found {text:?}")))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record() -> Moved {
        let mut record = Moved::new(ExpertFormat::Mxfp4);
        record.add("a", MovedShard { source: 1, rest: 2 }, [(3, 0), (3, 1), (3, 5), (4, 2)].into_iter());
        record.add("b", MovedShard { source: u128::MAX, rest: 0 }, [(3, 2), (3, 4), (4, 2)].into_iter());
        record
    }

    #[test]
    fn experts_are_kept_as_runs_and_survive_the_file() {
        let dir = tempfile::tempdir().unwrap();
        assert_eq!(read(dir.path()).unwrap(), None);
        let record = record();
        assert_eq!(record.experts[&3], [(0, 2), (4, 5)]);
        assert_eq!(record.experts[&4], [(2, 2)]);
        std::fs::write(dir.path().join(MOVED_FILE), record.to_json()).unwrap();
        assert_eq!(read(dir.path()).unwrap(), Some(record.clone()));
        assert_eq!(record.shard(Path::new("x/b")).unwrap().source, u128::MAX);
        assert!(record.shard(Path::new("c")).is_none());
    }

    #[test]
    fn a_damaged_record_is_refused_by_name() {
        let dir = tempfile::tempdir().unwrap();
        let json = record().to_json();
        for bad in [
            "",
            "{}",
            &json[..json.len() / 2],
            &json.replace("\"version\": 1", "\"version\": 2"),
            &json.replace("mxfp4", "fp8"),
            &json.replace("\"source\": \"0", "\"source\": \"+"),
            &json.replace("shards", "shard"),
        ] {
            std::fs::write(dir.path().join(MOVED_FILE), bad).unwrap();
            let error = read(dir.path()).unwrap_err();
            assert!(error.message().contains(MOVED_FILE), "{bad}: {error}");
        }
    }
}
