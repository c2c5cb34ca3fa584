//! Everything that decides what a synthetic model is, kept beside it: the same recipe gives the same bytes.

use serde::{Deserialize, Serialize};

use super::shape::Shape;

/// Raised whenever a recipe gives other bytes than before, so that halves of two kinds are never joined.
const FORMAT: u32 = 1;

/// What the shards hold.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Content {
    /// Random values.
    Seeded,
    /// Headers only; all values are zero and take no space where the file system has sparse files.
    Sparse,
}

/// What is to be made.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Recipe {
    format: u32,
    /// Its sizes.
    pub shape: Shape,
    /// Decides every value.
    pub seed: u64,
    /// All experts alike, instead of the skew of real routing.
    pub uniform: bool,
    /// Values or none.
    pub content: Content,
}

impl Recipe {
    /// A recipe for this program's way of making values.
    pub fn new(shape: Shape, seed: u64, uniform: bool, content: Content) -> Self {
        Self { format: FORMAT, shape, seed, uniform, content }
    }
}
