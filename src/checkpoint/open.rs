//! Opening a model directory: which files count, whether each is whole, and the census over all of them.

use std::path::{Path, PathBuf};

use super::census::{self, Census};
use super::contents::{Contents, described};
use super::demand::ExpertShapes;
use super::index::{INDEX_FILE, Index};
use super::names::Prefixes;
use super::{ExpertTable, MOVED, Manifest, moved};
use crate::config::{FeedForwardKind, ModelConfig};
use crate::error::{Error, Result};

/// The one shard of a checkpoint that has no index.
const SINGLE_FILE: &str = "model.safetensors";

pub(super) fn open(dir: &Path, config: &ModelConfig) -> Result<Manifest> {
    let mut prefixes = Prefixes::default();
    let (index, mut ignored) = match find(dir)? {
        Some(path) => {
            let mut index = Index::read(&path, &mut prefixes)?;
            let ignored = leave_out_absent_vision(&mut index, dir);
            (Some(index), ignored)
        }
        None => (None, Vec::new()),
    };
    let names = index.as_ref().map_or_else(|| vec![SINGLE_FILE.to_owned()], |index| index.shards.clone());
    let mut contents = Contents::new(config);
    let shard_bytes = read_headers(dir, &names, &mut contents, &mut prefixes, index.as_ref())?;
    contents.sort();
    if let Some(record) = moved::read(dir)? {
        record.add_to(&mut contents, index.as_ref(), &names);
    }

    let mut faults: Vec<String> = prefixes.mixture().into_iter().collect();
    faults.extend(index.iter().flat_map(|index| contents.compare(index)));
    drop(index);
    let Census { trunk, format, ignored: present, faults: more, suspects } =
        census::take(&mut contents, config, &names);
    faults.extend(more);
    if !faults.is_empty() {
        return Err(mismatch(dir, &faults, &suspects));
    }

    ignored.extend(present);
    let experts = config.moe.as_ref().zip(format).map(|(moe, format)| ExpertTable {
        format,
        part_bytes: ExpertShapes::new(moe, config.hidden_size).part_bytes(format),
        num_experts: moe.num_experts,
        moe_layers: (0..)
            .zip(&config.layers)
            .filter(|(_, l)| l.feed_forward == FeedForwardKind::Moe)
            .map(|l| l.0)
            .collect(),
        places: (contents.experts.iter())
            .map(|at| if at.offset == moved::NOWHERE { (MOVED, 0) } else { (at.shard, at.offset) })
            .collect(),
    });
    let shards = names.iter().map(|name| dir.join(name)).collect();
    Ok(Manifest { dir: dir.to_owned(), shards, shard_bytes, trunk, experts, ignored })
}

/// The index, or `None` when the single file stands for it.
fn find(dir: &Path) -> Result<Option<PathBuf>> {
    let index = dir.join(INDEX_FILE);
    // A link that leads nowhere is an index all the same, and the error will say so.
    if index.symlink_metadata().is_ok() {
        return Ok(Some(index));
    }
    if dir.join(SINGLE_FILE).symlink_metadata().is_ok() {
        return Ok(None);
    }
    let others = std::fs::read_dir(dir).map_or(0, |entries| {
        let names = entries.filter_map(|entry| Some(entry.ok()?.file_name().to_string_lossy().into_owned()));
        names.filter(|name| name.ends_with(".safetensors") && !name.starts_with('.')).count()
    });
    let error = Error::model(format!("{} holds neither {INDEX_FILE} nor {SINGLE_FILE}", dir.display()));
    Err(match others {
        0 => error.hint("-m takes the directory that a Kimi checkpoint was downloaded to"),
        n => error
            .hint(format!("there are {n} other safetensors files: download {INDEX_FILE}, which says what they hold")),
    })
}

/// Takes shards that hold only ignored tensors and are not there out of `index`; gives the names of those tensors.
fn leave_out_absent_vision(index: &mut Index, dir: &Path) -> Vec<String> {
    let only_ignored = index.only_ignored();
    let gone: Vec<bool> =
        index.shards.iter().zip(only_ignored).map(|(name, ignored)| ignored && !dir.join(name).exists()).collect();
    // With nothing but vision listed there is no text model to leave it out of.
    if gone.contains(&true) && gone.contains(&false) { index.remove_shards(&gone) } else { Vec::new() }
}

/// Reads the header of every shard, one at a time; gives their lengths, or one error with all that are not whole.
fn read_headers(
    dir: &Path,
    names: &[String],
    contents: &mut Contents<'_>,
    prefixes: &mut Prefixes,
    index: Option<&Index>,
) -> Result<Vec<u64>> {
    let mut lengths = Vec::with_capacity(names.len());
    let mut damaged = Vec::new();
    for (shard, name) in (0..).zip(names) {
        match contents.add_shard(&dir.join(name), shard, prefixes) {
            Ok(bytes) => lengths.push(bytes),
            Err(what) => {
                let holds = index.map_or_else(|| "the whole model".into(), |index| described(index, shard));
                damaged.push(format!("{name} ({holds}): {what}"));
            }
        }
    }
    if damaged.is_empty() {
        return Ok(lengths);
    }
    let (bad, all) = (damaged.len(), names.len());
    let head = format!("{}: {bad} of {all} safetensors files cannot be used", dir.display());
    let advice = if damaged.iter().any(|line| line.contains("Git-LFS pointer")) {
        "run `git lfs pull` in the model directory, or download those files again"
    } else {
        "download those files again; all others are whole as far as their headers tell"
    };
    Err(Error::model(listed(head, &damaged)).hint(advice))
}

fn mismatch(dir: &Path, faults: &[String], suspects: &[&str]) -> Error {
    let head = format!("{} does not hold the model that its config.json describes", dir.display());
    Error::model(listed(head, faults)).hint(match suspects {
        [] => "config.json, index and shards must come from one download of one model".to_owned(),
        keys => format!("if the download is complete, look at these keys of config.json: {}", keys.join(", ")),
    })
}

fn listed(head: String, lines: &[String]) -> String {
    lines.iter().fold(head, |message, line| message + "\n  " + line)
}
