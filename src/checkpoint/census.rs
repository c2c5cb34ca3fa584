//! The census: every tensor that the configuration demands is there, and no other.

use std::collections::BTreeMap;

use rustc_hash::FxHashMap;
use safetensors::Dtype as StoredDtype;

use super::contents::{Contents, Lines, OtherAt};
use super::demand::{self, Demand};
use super::names::{ExpertPart, FIRST_PLAIN_PART, bare, is_ignored, layer, shown};
use super::{Dtype, ExpertFormat, Span, TrunkTensor};
use crate::config::{FeedForwardKind, ModelConfig};

/// Names shown of the tensors that a layer lacks, or has too many of.
const NAMES_MAX: usize = 3;

/// Demanded and found tensors of one layer.
#[derive(Debug, Default)]
struct Tally {
    expected: u64,
    found: u64,
    missing: Few,
    extra: Few,
}

/// A count and the first few names behind it.
#[derive(Debug, Default)]
struct Few {
    count: u64,
    names: Vec<String>,
}

impl Few {
    fn add(&mut self, name: impl FnOnce() -> String) {
        if self.names.len() < NAMES_MAX {
            self.names.push(name());
        }
        self.count += 1;
    }

    fn told(&self, what: &str) -> String {
        let more = self.count - self.names.len() as u64;
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        if self.count == 0 { String::new() } else { format!("; {what} {}{more}", self.names.join(", ")) }
    }
}

/// The outcome: what was found, and all that is wrong with it.
pub(super) struct Census {
    /// In the order of the model; whole when there are no faults.
    pub(super) trunk: Vec<TrunkTensor>,
    /// The experts' format; `None` without experts.
    pub(super) format: Option<ExpertFormat>,
    /// Full names.
    pub(super) ignored: Vec<String>,
    /// One line each; empty when all is well.
    pub(super) faults: Vec<String>,
    /// Keys of the configuration that would explain missing or extra tensors.
    pub(super) suspects: Vec<&'static str>,
}

/// Compares sorted `contents` with what `config` demands. `shards` are the shards' names, for messages.
pub(super) fn take(contents: &mut Contents<'_>, config: &ModelConfig, shards: &[String]) -> Census {
    // Layers first, in order; what lies outside them last.
    let mut tallies: BTreeMap<u32, Tally> = BTreeMap::new();
    let (format, mut faults) = format(contents, config);
    let mut suspects = Vec::new();
    count_experts(contents, config, format, &mut tallies);
    if tallies.values().any(|t| t.missing.count + t.extra.count > 0) {
        suspects.push("num_experts");
    }
    let (trunk, ignored) = trunk(contents, config, shards, &mut tallies, &mut faults, &mut suspects);
    let misshapen = std::mem::take(&mut contents.misshapen);
    faults.extend(misshapen.into_lines());
    faults.extend(told(&tallies));
    suspects.sort_unstable();
    suspects.dedup();
    Census { trunk, format, ignored, faults, suspects }
}

fn tally(tallies: &mut BTreeMap<u32, Tally>, layer: Option<u16>) -> &mut Tally {
    tallies.entry(layer.map_or(u32::MAX, u32::from)).or_default()
}

fn told(tallies: &BTreeMap<u32, Tally>) -> Vec<String> {
    let wrong = tallies.iter().filter(|(_, t)| t.missing.count + t.extra.count > 0);
    let mut lines: Vec<String> = wrong
        .map(|(layer, t)| {
            let place = if *layer == u32::MAX { "outside the layers".into() } else { format!("layer {layer}") };
            let (missing, extra) = (t.missing.told("missing"), t.extra.told("not expected"));
            format!("{place}: expected {} tensors, found {}{missing}{extra}", t.expected, t.found)
        })
        .collect();
    if !lines.is_empty() {
        let missing: u64 = tallies.values().map(|t| t.missing.count).sum();
        let extra: u64 = tallies.values().map(|t| t.extra.count).sum();
        lines.insert(
            0,
            format!("{missing} tensors are missing and {extra} are not expected, in {} places", lines.len()),
        );
    }
    lines
}

/// How the experts are stored, seen from their names, and what is wrong with that.
fn format(contents: &Contents<'_>, config: &ModelConfig) -> (Option<ExpertFormat>, Vec<String>) {
    let Some(moe) = &config.moe else { return (None, Vec::new()) };
    let packed = contents.experts.iter().find(|at| at.part.part() < FIRST_PLAIN_PART);
    let plain = contents.experts.iter().find(|at| at.part.part() >= FIRST_PLAIN_PART);
    match (packed, plain) {
        (Some(packed), Some(plain)) => {
            let fault = format!("experts are stored in two ways: {} and {}", packed.part, plain.part);
            (Some(ExpertFormat::Mxfp4), vec![fault])
        }
        (None, Some(_)) => (Some(ExpertFormat::Bf16), Vec::new()),
        (Some(_), None) => {
            let fault = demand::check_mxfp4_widths(moe, config.hidden_size).err();
            (Some(ExpertFormat::Mxfp4), fault.into_iter().collect())
        }
        (None, None) => (Some(ExpertFormat::Mxfp4), Vec::new()),
    }
}

/// Counts the experts' tensors of each layer against `num_experts` whole experts.
fn count_experts(
    contents: &Contents<'_>,
    config: &ModelConfig,
    format: Option<ExpertFormat>,
    tallies: &mut BTreeMap<u32, Tally>,
) {
    let mut held = contents.experts.iter().map(|at| at.part).peekable();
    let moe = config.moe.as_ref().zip(format);
    for (layer, kinds) in (0u16..).zip(&config.layers) {
        let (FeedForwardKind::Moe, Some((moe, format))) = (kinds.feed_forward, moe) else { continue };
        while let Some(part) = held.next_if(|part| part.layer() < layer) {
            extra(tallies, part);
        }
        let tally = tally(tallies, Some(layer));
        let first_part = if format == ExpertFormat::Mxfp4 { 0 } else { FIRST_PLAIN_PART };
        let parts = first_part..first_part + format.parts() as u8;
        let all = moe.num_experts as u64 * format.parts() as u64;
        tally.expected += all;
        for expert in 0..moe.num_experts as u16 {
            if held.peek().is_none_or(|part| part.layer() != layer) {
                // Nothing of this layer is left: the rest need not be looked for one by one.
                let left = all - u64::from(expert) * format.parts() as u64;
                let before = tally.missing.count;
                parts.clone().take(NAMES_MAX).for_each(|part| {
                    tally.missing.add(|| ExpertPart::new(layer, expert, part).to_string());
                });
                tally.missing.count = before + left;
                break;
            }
            for part in parts.clone() {
                let wanted = ExpertPart::new(layer, expert, part);
                while let Some(other) = held.next_if(|part| *part < wanted) {
                    tally.found += 1;
                    tally.extra.add(|| other.to_string());
                }
                match held.next_if_eq(&wanted) {
                    Some(_) => tally.found += 1,
                    None => tally.missing.add(|| wanted.to_string()),
                }
            }
        }
    }
    held.for_each(|part| extra(tallies, part));
}

fn extra(tallies: &mut BTreeMap<u32, Tally>, part: ExpertPart) {
    let tally = tally(tallies, Some(part.layer()));
    tally.found += 1;
    tally.extra.add(|| part.to_string());
}

/// Matches everything but the experts with the demands.
fn trunk(
    contents: &Contents<'_>,
    config: &ModelConfig,
    shards: &[String],
    tallies: &mut BTreeMap<u32, Tally>,
    faults: &mut Vec<String>,
    suspects: &mut Vec<&'static str>,
) -> (Vec<TrunkTensor>, Vec<String>) {
    let (ignored, text): (Vec<&OtherAt>, Vec<&OtherAt>) =
        contents.others.iter().partition(|at| is_ignored(&at.full_name));
    let mut unused: FxHashMap<&str, &OtherAt> = FxHashMap::default();
    for at in text {
        if let Some(first) = unused.insert(bare(&at.full_name), at) {
            let files = [first, at].map(|at| shards[usize::from(at.shard)].as_str());
            faults.push(format!("{} is there twice, in {} and in {}", shown(bare(&at.full_name)), files[0], files[1]));
        }
    }
    let mut trunk = Vec::new();
    let mut misshapen = Lines::default();
    for demand in demand::trunk(config) {
        let tally = tally(tallies, demand.layer);
        tally.expected += 1;
        match unused.remove(demand.name.as_str()) {
            Some(at) => {
                tally.found += 1;
                match tensor(&demand, at) {
                    Some(tensor) => trunk.push(tensor),
                    None => misshapen.push(|| wrong(&demand, at, shards)),
                }
            }
            None => {
                suspects.extend(suspect(&demand.name));
                tally.missing.add(|| demand.name.clone());
            }
        }
    }
    faults.extend(misshapen.into_lines());
    let mut unused: Vec<&str> = unused.into_keys().collect();
    unused.sort_unstable();
    for name in unused {
        suspects.extend(suspect(name));
        let tally = tally(tallies, layer(name));
        tally.found += 1;
        tally.extra.add(|| shown(name));
    }
    (trunk, ignored.into_iter().map(|at| at.full_name.clone()).collect())
}

/// The tensor as the model will find it; `None` when its shape or dtype will not do.
fn tensor(demand: &Demand, at: &OtherAt) -> Option<TrunkTensor> {
    // All three become f32 without loss; anything else would not, or is not a weight.
    let dtype = match at.dtype {
        StoredDtype::BF16 => Dtype::Bf16,
        StoredDtype::F16 => Dtype::F16,
        StoredDtype::F32 => Dtype::F32,
        _ => return None,
    };
    demand.shape.accepts(&at.shape).then(|| TrunkTensor {
        name: demand.name.clone(),
        dtype,
        shape: at.shape.iter().map(|n| *n as usize).collect(),
        span: Span { shard: at.shard, offset: at.offset, len: at.len },
    })
}

fn wrong(demand: &Demand, at: &OtherAt, shards: &[String]) -> String {
    format!(
        "{}: expected {} in BF16, F32 or F16, found {:?} {} in {}",
        demand.name,
        demand.shape,
        at.shape,
        at.dtype,
        shards[usize::from(at.shard)]
    )
}

/// The key of the configuration that decides whether a tensor of this name exists.
fn suspect(name: &str) -> Option<&'static str> {
    const KEYS: [(&str, &str); 12] = [
        ("_res_norm.weight", "attn_res_block_size"),
        ("_res_proj.weight", "attn_res_block_size"),
        ("routed_expert_down_proj.weight", "routed_expert_hidden_size"),
        ("routed_expert_up_proj.weight", "routed_expert_hidden_size"),
        ("routed_expert_norm.weight", "latent_moe_use_norm"),
        ("self_attn.g_a_proj.weight", "use_full_rank_gate"),
        ("self_attn.g_b_proj.weight", "use_full_rank_gate"),
        ("self_attn.g_proj.weight", "mla_use_output_gate or use_full_rank_gate"),
        ("self_attn.q_a_proj.weight", "q_lora_rank"),
        ("lm_head.weight", "tie_word_embeddings"),
        ("shared_experts.gate_proj.weight", "num_shared_experts"),
        ("mlp.gate_proj.weight", "first_k_dense_replace"),
    ];
    KEYS.iter().find(|(suffix, _)| name.ends_with(suffix)).map(|(_, key)| *key)
}
