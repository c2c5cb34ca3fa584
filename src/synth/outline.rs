//! A synthetic model as a checkpoint's manifest, without a file: for plans and simulations of what is not there.

use std::path::{Path, PathBuf};

use super::config;
use super::routing::Routing;
use super::shape::Shape;
use super::tensors;
use crate::checkpoint::{Dtype, ExpertFormat, ExpertTable, Manifest, Span, TrunkTensor};
use crate::config::ModelConfig;
use crate::error::Result;

/// Configuration and manifest of a model of `shape`: names, shapes and types are those that [`super::write`] would write,
/// places are in
/// one file of the trunk alone, which there is not.
///
/// # Errors
/// Kind `Usage` for a shape that no model has, `Model` for one that is none to the engine.
pub fn outline(shape: &Shape) -> Result<(ModelConfig, Manifest)> {
    shape.check()?;
    // A path that nothing is beneath, whatever the working directory.
    let nowhere = Path::new("/dev/null");
    let config = ModelConfig::parse(&config::config(shape).to_string(), &nowhere.join("config.json"))?;
    let routing = Routing::new(shape, 0, true);
    let mut trunk = Vec::new();
    let mut part_bytes = Vec::new();
    let mut offset = 0;
    for shard in 0..tensors::shards(shape) {
        for tensor in tensors::shard(shape, &routing, shard) {
            let name = tensor.name.strip_prefix("language_model.").unwrap_or(&tensor.name);
            if let Some((_, expert)) = name.split_once(".experts.") {
                if part_bytes.len() < ExpertFormat::Mxfp4.parts() && expert.starts_with("0.") {
                    part_bytes.push(tensor.len());
                }
                continue;
            }
            let dtype = match tensor.dtype {
                "F32" => Dtype::F32,
                "BF16" => Dtype::Bf16,
                _ => Dtype::U8,
            };
            // One behind the other, as in a file of them alone.
            let span = Span { shard: 0, offset, len: tensor.len() };
            offset += span.len;
            trunk.push(TrunkTensor { name: name.to_owned(), dtype, shape: tensor.shape, span });
        }
    }
    let experts = (shape.moe_layers() > 0).then(|| ExpertTable {
        format: ExpertFormat::Mxfp4,
        part_bytes,
        num_experts: shape.experts,
        moe_layers: (0..shape.layers).filter(|&layer| shape.is_moe(layer)).map(|layer| layer as u16).collect(),
        places: Vec::new(),
    });
    let manifest = Manifest {
        dir: nowhere.to_owned(),
        shards: vec![PathBuf::new()],
        shard_bytes: vec![offset],
        trunk,
        experts,
        ignored: Vec::new(),
    };
    Ok((config, manifest))
}

#[cfg(test)]
mod tests {
    use super::super::{Content, Preset, Recipe, write};
    use super::*;
    use crate::interrupt::Interrupt;

    #[test]
    fn an_outline_is_what_opening_the_written_model_finds() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("model");
        let shape = Preset::Tiny.shape();
        write(&path, &Recipe::new(shape.clone(), 1, false, Content::Sparse), 1, &mut |_, _| (), &Interrupt::new())
            .unwrap();
        let (config, outline) = outline(&shape).unwrap();
        let found = Manifest::open(&path, &ModelConfig::load(&path).unwrap()).unwrap();
        assert_eq!(config, ModelConfig::load(&path).unwrap());
        assert_eq!(outline.trunk_bytes(), found.trunk_bytes());
        assert_eq!(outline.trunk.len(), found.trunk.len());
        let names = |manifest: &Manifest| {
            let mut names: Vec<_> =
                manifest.trunk.iter().map(|tensor| (tensor.name.clone(), tensor.shape.clone())).collect();
            names.sort();
            names
        };
        assert_eq!(names(&outline), names(&found));
        let (outlined, found) = (outline.experts.unwrap(), found.experts.unwrap());
        assert_eq!((outlined.part_bytes, outlined.moe_layers), (found.part_bytes, found.moe_layers));
    }

    #[test]
    fn k3_has_its_trunk_and_its_experts() {
        let (_, manifest) = outline(&Preset::K3.shape()).unwrap();
        assert_eq!(manifest.expert_bytes(), 17_547_264);
        assert!((100e9..125e9).contains(&(manifest.trunk_bytes() as f64)), "{}", manifest.trunk_bytes());
    }
}
