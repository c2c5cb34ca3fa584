//! What tokens/s the drives allow, as far as their rates are known without reading: those that `pack` left in the roots.

use std::path::Path;

use serde::Serialize;

use crate::checkpoint::Manifest;
use crate::config::ModelConfig;
use crate::device::Device;
use crate::drives::{self, DriveOnPaper, Estimate, Model, Run};
use crate::engine::EngineOptions;
use crate::plan::Plan;
use crate::store::packed::PackedRoot;

/// Tokens to simulate.
const TOKENS: usize = 40;

/// Tokens/s, or how to find out.
#[derive(Debug, Serialize)]
pub(super) struct Speed {
    /// The command that measures the drives and tells more.
    pub measure: String,
    /// With all drives together; null where the rate of one is not known, or there is no room to run. Computing takes no
    /// time in it.
    pub estimate: Option<Estimate>,
}

impl Speed {
    /// `None` for a model whose speed is not the drives' affair.
    pub(super) fn of(
        options: &EngineOptions,
        config: &ModelConfig,
        manifest: &Manifest,
        roots: &[PackedRoot],
        plan: Option<&Plan>,
    ) -> Option<Self> {
        let model = Model::of_manifest(&options.model.display().to_string(), config, manifest).ok()?;
        let table = manifest.experts.as_ref()?;
        let in_shards = table.ids().any(|(layer, expert)| table.is_in_shards(layer, expert));
        let mut dirs: Vec<&Path> = roots.iter().map(|root| root.dir.as_path()).collect();
        if in_shards {
            dirs.push(&options.model);
        }
        let dirs: Vec<String> = dirs.into_iter().map(quoted).collect();
        let measure = format!("deltafin drives {} -m {}", dirs.join(" "), quoted(&options.model));
        let drives = rates(roots, in_shards.then_some(options.model.as_path()));
        let estimate = plan.zip(drives).and_then(|(plan, drives)| {
            let all = (model.moe_layers * model.experts) as f64;
            let run = Run::reads_alone(plan.slots as f64 / all, TOKENS);
            drives::estimate_together(&model, &drives, &run).ok()
        });
        Some(Self { measure, estimate })
    }
}

/// The drives beneath `roots`, and beneath the shards in `model` where those are read too; the fastest first. `None` where
/// the rate of one is not known.
fn rates(roots: &[PackedRoot], model: Option<&Path>) -> Option<Vec<DriveOnPaper>> {
    let mut found: Vec<(Device, f64)> = Vec::new();
    for root in roots {
        let (device, rate) = (Device::of(&root.dir).ok()?, root.gb_per_s.unwrap_or(0.0));
        match found.iter_mut().find(|(known, _)| known.is_same(&device)) {
            Some((_, known)) => *known = known.max(rate),
            None => found.push((device, rate)),
        }
    }
    let of_shards = model.map(Device::of).transpose().ok()?;
    let is_known = of_shards.is_none_or(|device| found.iter().any(|(known, _)| known.is_same(&device)));
    if !is_known || found.is_empty() || found.iter().any(|(_, rate)| *rate <= 0.0) {
        return None;
    }
    found.sort_by(|(_, a), (_, b)| b.total_cmp(a));
    Some(found.into_iter().map(|(_, rate)| DriveOnPaper::common(rate)).collect())
}

/// As a shell takes it.
fn quoted(path: &Path) -> String {
    let text = path.display().to_string();
    let is_plain = |char: char| char.is_alphanumeric() || "/._-+,:@%".contains(char);
    if !text.is_empty() && text.chars().all(is_plain) { text } else { format!("'{}'", text.replace('\'', "'\\''")) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_quoted_where_a_shell_would_split_them() {
        for (name, wanted) in [("/mnt/a", "/mnt/a"), ("my disk", "'my disk'"), ("it's", "'it'\\''s'"), ("", "''")] {
            assert_eq!(quoted(Path::new(name)), wanted);
        }
    }
}
