//! The findings as a table or as JSON.

use std::fmt::Write;

use super::copies::Copies;
use super::findings::{Drive, Findings, Shard};
use super::speed::Speed;
use crate::pack::verify::Verified;
use crate::plan::gib;

/// Shards that are listed unless all are asked for.
pub(super) const SHARDS_SHOWN: usize = 8;

/// One object and a line end.
pub(super) fn json(findings: &Findings) -> String {
    let mut text = serde_json::to_string_pretty(findings).expect("the findings are plain data");
    text.push('\n');
    text
}

/// The table; with `all` every shard.
pub(super) fn text(findings: &Findings, all: bool) -> String {
    let mut table = Table::default();
    model(&mut table, findings);
    files(&mut table, &findings.shards, all);
    words(&mut table, findings);
    drives(&mut table, &findings.drives);
    findings.copies.iter().for_each(|found| copies(&mut table, found));
    findings.verified.iter().for_each(|found| verified(&mut table, found));
    if let Some(uses) = &findings.expert_uses {
        table.row("expert uses", &uses.line);
    }
    table.row("computes", format!("{}, {} threads", findings.isa, findings.threads));
    findings.notices.iter().for_each(|notice| table.row("note", notice));
    table.row("context", format!("{} tokens", findings.context));
    if let Some(rows) = findings.step {
        table.row("step", format!("at most {rows} rows"));
    }
    match &findings.memory {
        Some(plan) => table.block("memory plan", &plan.to_string()),
        None => table.row("memory plan", "does not fit"),
    }
    findings.speed.iter().for_each(|found| speed(&mut table, found));
    findings.problems.iter().for_each(|problem| table.row("problem", problem));
    table.0
}

fn model(table: &mut Table, found: &Findings) {
    let layers = &found.layers;
    table.row("directory", &found.directory);
    table.row("family", found.family);
    table.row(
        "layers",
        format!("{}: {} KDA, {} MLA; {} dense, {} MoE", layers.count, layers.kda, layers.mla, layers.dense, layers.moe),
    );
    table.row("hidden size", found.hidden_size.to_string());
    table.row("vocabulary", found.vocab_size.to_string());
    table.row("longest context", format!("{} tokens", found.max_position_embeddings));
    table.row("parameters", grouped(found.parameters));
    if let Some(experts) = &found.experts {
        table.row(
            "experts",
            format!("{} a layer, {} a token, {} shared", experts.per_layer, experts.per_token, experts.shared),
        );
        table.row("", format!("{}, {} each, {} in all", experts.format, gib(experts.expert_bytes), gib(experts.bytes)));
        table.row("", format!("{} read for a token that finds none in memory", gib(experts.token_bytes)));
    }
    table.row("trunk", format!("{} in the shards, held as {}", gib(found.trunk_bytes), found.trunk));
    table.row("tensors", format!("{}, {} more left alone", grouped(found.tensors as u64), found.ignored_tensors));
}

fn files(table: &mut Table, shards: &[Shard], all: bool) {
    let bytes: u64 = shards.iter().map(|shard| shard.bytes).sum();
    table.row("shards", format!("{}, {}", shards.len(), gib(bytes)));
    let shown = if all { shards.len() } else { SHARDS_SHOWN };
    for shard in shards.iter().take(shown) {
        table.row("", format!("{} ({}): {}", shard.file, gib(shard.bytes), shard.holds));
    }
    if shards.len() > shown {
        table.row("", format!("and {} more (-v lists all)", shards.len() - shown));
    }
}

fn words(table: &mut Table, found: &Findings) {
    match &found.tokenizer {
        Some(tokenizer) => table.row("tokenizer", format!("{}, {} ids", tokenizer.file, tokenizer.ids)),
        None if found.has_tokenizer_file => table.row("tokenizer", "damaged"),
        None => table.row("tokenizer", "none: give token ids (--ids) and take ids (--output ids)"),
    }
    for (number, stop) in found.stop_ids.iter().enumerate() {
        let name = if number == 0 { "stop ids" } else { "" };
        table.row(name, format!("{} ({})", stop.id, stop.sources.join(", ")));
    }
    if found.stop_ids.is_empty() {
        table.row("stop ids", "none");
    }
}

fn drives(table: &mut Table, drives: &[Drive]) {
    for drive in drives {
        let file_system = drive.file_system.as_deref().unwrap_or("unknown file system");
        table.row("drive", format!("{}: {file_system}, {} reads", drive.path, drive.mode));
    }
}

fn copies(table: &mut Table, found: &Copies) {
    for root in &found.roots {
        let missing = if root.missing == 0 { String::new() } else { format!(", {} missing", grouped(root.missing)) };
        table.row("root", format!("{}: {} experts, {}{missing}", root.root, grouped(root.experts), gib(root.bytes)));
    }
    if found.roots.is_empty() && found.experts_by_copies[0] == 0 {
        return;
    }
    table.row("copies", format!("{} experts in the shards", grouped(found.in_shards)));
    table.row("", format!("under the roots: {}", by_copies(&found.experts_by_packed_copies)));
    table.row("", format!("in all: {}", by_copies(&found.experts_by_copies)));
}

/// `0 with 0, 3 with 1, 5 with 2`: experts and their copies.
fn by_copies(counts: &[u64]) -> String {
    let some = counts.iter().enumerate().filter(|(copies, experts)| **experts > 0 || *copies == 0);
    let told = some.map(|(copies, experts)| format!("{} with {copies}", grouped(*experts)));
    told.collect::<Vec<_>>().join(", ")
}

fn verified(table: &mut Table, found: &Verified) {
    let rate = found.bytes as f64 / 1e9 / found.seconds.max(1e-9);
    table.row("read", format!("{} in {:.1} s, {rate:.2} GB/s", gib(found.bytes), found.seconds));
    table.row("", format!("{} copies of experts; {} damaged places", grouped(found.copies), grouped(found.damaged)));
}

fn speed(table: &mut Table, found: &Speed) {
    let Some((estimate, all)) = found.estimate.as_ref().and_then(|found| Some((found, found.ladder.last()?))) else {
        table.row("tokens/s", format!("not known before the drives are: `{}` measures them", found.measure));
        return;
    };
    let rates: Vec<String> = estimate.drives.iter().map(|drive| format!("{}", drive.gb_per_s)).collect();
    table.row("tokens/s", format!("{:.2} at most, from drives of {} GB/s", all.tokens_per_s, rates.join(" and ")));
    let (share, read) = (100.0 * estimate.cache_share, all.bytes_per_token / 1e9);
    table.row("", format!("simulated, with {share:.1}% of the experts in memory: {read:.2} GB read for a token"));
    table.row("", format!("the rates are from packing; `{}` measures them", found.measure));
}

/// `1234567` as `1,234,567`.
fn grouped(number: u64) -> String {
    let digits = number.to_string();
    let mut text = String::new();
    for (at, digit) in digits.chars().enumerate() {
        if at > 0 && (digits.len() - at).is_multiple_of(3) {
            text.push(',');
        }
        text.push(digit);
    }
    text
}

/// Names on the left, what is found on the right.
#[derive(Default)]
struct Table(String);

impl Table {
    fn row(&mut self, name: &str, value: impl AsRef<str>) {
        writeln!(self.0, "{name:<16} {}", value.as_ref()).expect("memory takes all that is written");
    }

    fn block(&mut self, name: &str, lines: &str) {
        writeln!(self.0, "{name}\n{lines}").expect("memory takes all that is written");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn digits_are_grouped_from_the_right() {
        for (number, shown) in [(0, "0"), (999, "999"), (1000, "1,000"), (12_445_336, "12,445,336")] {
            assert_eq!(grouped(number), shown);
        }
    }
}
