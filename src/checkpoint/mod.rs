//! A model directory's safetensors shards: headers, index, and where each tensor's bytes lie. Reads no weights.

mod census;
mod contents;
mod demand;
mod fingerprint;
mod header;
mod index;
pub(crate) mod moved;
mod names;
mod open;

use std::path::{Path, PathBuf};

use crate::config::ModelConfig;
use crate::error::Result;

pub use self::fingerprint::Fingerprint;
pub(crate) use self::fingerprint::shard_digest;

/// Element type of a stored tensor, as in the safetensors header.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dtype {
    /// bfloat16.
    Bf16,
    /// IEEE half.
    F16,
    /// IEEE single.
    F32,
    /// Bytes (MXFP4 codes and scales).
    U8,
}

impl Dtype {
    /// Bytes an element.
    pub fn size(self) -> usize {
        match self {
            Dtype::U8 => 1,
            Dtype::Bf16 | Dtype::F16 => 2,
            Dtype::F32 => 4,
        }
    }
}

/// A run of bytes in one shard.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Span {
    /// Index into [`Manifest::shards`].
    pub shard: u16,
    /// From the start of the file, header included.
    pub offset: u64,
    /// Bytes.
    pub len: u64,
}

/// A trunk tensor (everything but the routed experts).
#[derive(Debug, Clone, PartialEq)]
pub struct TrunkTensor {
    /// Name without the `language_model.` prefix, e.g. `model.layers.3.self_attn.q_proj.weight`, `lm_head.weight`.
    pub name: String,
    /// As stored.
    pub dtype: Dtype,
    /// As stored and as the configuration demands.
    pub shape: Vec<usize>,
    /// Where its bytes are.
    pub span: Span,
}

/// How the routed experts are stored.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ExpertFormat {
    /// `weight_packed` and `weight_scale` for each of w1, w3, w2.
    Mxfp4,
    /// `weight` in bfloat16 for each of w1, w3, w2.
    Bf16,
}

impl ExpertFormat {
    /// Parts an expert is stored in, in the order w1 packed, w1 scale, w3 packed, w3 scale, w2 packed, w2 scale;
    /// or w1, w3, w2.
    pub fn parts(self) -> usize {
        match self {
            ExpertFormat::Mxfp4 => 6,
            ExpertFormat::Bf16 => 3,
        }
    }

    /// `mxfp4` or `bf16`.
    pub fn name(self) -> &'static str {
        match self {
            ExpertFormat::Mxfp4 => "mxfp4",
            ExpertFormat::Bf16 => "bf16",
        }
    }
}

/// Shard number, in [`ExpertTable::places`], of a part that no shard holds: `pack --move` took its expert out, and drive
/// roots alone hold it.
pub const MOVED: u16 = u16::MAX;

/// Whether `full_name`, as in a shard's header, is a tensor of a routed expert.
pub(crate) fn is_expert_tensor(full_name: &str) -> bool {
    matches!(names::Prefixes::default().classify(full_name), names::Name::Expert(_))
}

/// Where every part of every routed expert lies.
#[derive(Debug, Clone)]
pub struct ExpertTable {
    /// How the experts are stored.
    pub format: ExpertFormat,
    /// Bytes of each part, the same for all experts; [`ExpertFormat::parts`] entries.
    pub part_bytes: Vec<u64>,
    /// Experts a layer.
    pub num_experts: usize,
    /// Layers that have experts, ascending, 0-based.
    pub moe_layers: Vec<u16>,
    /// `[moe_layers][num_experts][parts]`: shard and offset; shard [`MOVED`] where no shard holds the part.
    pub places: Vec<(u16, u64)>,
}

impl ExpertTable {
    /// Shard ([`MOVED`] where there is none) and offset of each part of expert `expert` of layer `layer` (0-based); `None` for a dense layer.
    pub fn places(&self, layer: u16, expert: u16) -> Option<&[(u16, u64)]> {
        let layer = self.moe_layers.binary_search(&layer).ok()?;
        let parts = self.format.parts();
        let first = (layer * self.num_experts + usize::from(expert)) * parts;
        self.places.get(first..first + parts)
    }

    /// Whether shards hold all of an expert.
    pub fn is_in_shards(&self, layer: u16, expert: u16) -> bool {
        self.places(layer, expert).is_some_and(|places| places.iter().all(|place| place.0 != MOVED))
    }

    /// Layer and number of every expert, ascending.
    pub fn ids(&self) -> impl Iterator<Item = (u16, u16)> {
        self.moe_layers.iter().flat_map(|layer| (0..self.num_experts as u16).map(|expert| (*layer, expert)))
    }
}

/// A directory that was found whole: every tensor the configuration needs, and where it is.
#[derive(Debug, Clone)]
pub struct Manifest {
    /// The model directory.
    pub dir: PathBuf,
    /// Paths of the shards that hold tensors of the text model or the ignore list.
    pub shards: Vec<PathBuf>,
    /// File length of each shard.
    pub shard_bytes: Vec<u64>,
    /// Everything but routed experts, in the order of the model.
    pub trunk: Vec<TrunkTensor>,
    /// Routed experts; `None` when every layer is dense.
    pub experts: Option<ExpertTable>,
    /// Tensors left alone on purpose (the vision tower), by full name.
    pub ignored: Vec<String>,
}

impl Manifest {
    /// Opens `dir` and checks it against `config`: every shard whole, every tensor present once, of the right shape and
    /// dtype, and used.
    ///
    /// `model.safetensors.index.json` says which shards count, and nothing else in the directory does; without it the
    /// one shard is `model.safetensors`. A shard that holds nothing but ignored tensors may be absent.
    ///
    /// # Errors
    /// One message that lists everything wrong (all missing or short shards, with the layers they hold).
    pub fn open(dir: &Path, config: &ModelConfig) -> Result<Self> {
        open::open(dir, config)
    }

    /// Bytes of one routed expert; 0 when every layer is dense.
    pub fn expert_bytes(&self) -> u64 {
        self.experts.as_ref().map_or(0, |table| table.part_bytes.iter().sum())
    }

    /// Bytes of all routed experts.
    pub fn all_experts_bytes(&self) -> u64 {
        let count = self.experts.as_ref().map_or(0, |table| table.moe_layers.len() * table.num_experts);
        self.expert_bytes() * count as u64
    }

    /// Bytes of all trunk tensors as stored.
    pub fn trunk_bytes(&self) -> u64 {
        self.trunk.iter().map(|tensor| tensor.span.len).sum()
    }

    /// Tensors of the text model: trunk and routed experts.
    pub fn tensor_count(&self) -> usize {
        self.trunk.len() + self.experts.as_ref().map_or(0, |table| table.places.len())
    }

    /// What each shard holds, in words (`layers 3–5, 8; vision`), in the order of [`Manifest::shards`].
    pub fn shard_contents(&self) -> Vec<String> {
        let mut layers = vec![std::collections::BTreeSet::new(); self.shards.len()];
        if let Some(table) = &self.experts {
            for (at, place) in table.places.iter().enumerate() {
                let layer = table.moe_layers[at / (table.num_experts * table.format.parts())];
                if let Some(layers) = layers.get_mut(usize::from(place.0)) {
                    layers.insert(layer);
                }
            }
        }
        (0..)
            .zip(layers)
            .map(|(shard, layers)| {
                let names = self.trunk.iter().filter(|t| t.span.shard == shard).map(|t| t.name.as_str());
                contents::describe(layers.into_iter(), names)
            })
            .collect()
    }
}
