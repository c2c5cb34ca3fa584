//! The model: configuration + resident trunk + kernels + expert store → the rows of one step, layer by layer.
//! It knows tensors and sequences; never what a drive is, nor why a row is wanted.

mod attn_res;
mod kda;
mod lookahead;
mod mla;
mod mlp;
mod moe;
mod router;
mod scratch;
mod sequence;
mod step;
mod weights;

use crate::config::ModelConfig;
use crate::interrupt::Interrupt;
use crate::kernels::Compute;
use crate::store::ExpertStore;
use crate::trunk::Tensor;

pub use router::Routes;
pub use scratch::Scratch;
pub use sequence::{Mark, Sequence};
pub use step::Segment;

/// What a step runs on.
#[derive(Clone, Copy)]
pub struct Machine<'a> {
    /// Kernels and threads.
    pub compute: &'a Compute,
    /// Routed experts; `None` only for a model without any.
    pub store: Option<&'a ExpertStore>,
    /// Guess the next layer's experts and have them read ahead.
    pub lookahead: bool,
    /// Ends a step early.
    pub interrupt: &'a Interrupt,
}

/// Looks on while a step runs; every method does nothing unless implemented.
pub trait Observer {
    /// Layer `layer` is done; `hidden` `[rows, hidden_size]` is the running sum it leaves.
    fn layer(&mut self, layer: usize, hidden: &[f32]) {
        let _ = (layer, hidden);
    }

    /// `experts` of `layer` were guessed, before its router has chosen; on most steps of few rows, for layers with experts.
    /// The first `likely` of them are the likelier.
    fn guess(&mut self, layer: usize, experts: &[u16], likely: usize) {
        let _ = (layer, experts, likely);
    }

    /// The router of `layer` has chosen.
    fn routes(&mut self, layer: usize, routes: &Routes) {
        let _ = (layer, routes);
    }
}

/// An observer that looks away.
impl Observer for () {}

/// All resident weights, in the order of the computation.
pub struct Model {
    config: ModelConfig,
    embed_tokens: Tensor,
    layers: Vec<Layer>,
    /// `output_attn_res_norm · output_attn_res_proj` `[hidden_size]`; `None` with plain residuals.
    output_attn_res: Option<Vec<f32>>,
    /// `[hidden_size]`.
    norm: Vec<f32>,
    /// `[vocab_size, hidden_size]`; the embedding itself when the two are tied.
    lm_head: Tensor,
}

/// One decoder layer.
struct Layer {
    /// `[hidden_size]`.
    input_layernorm: Vec<f32>,
    /// `[hidden_size]`.
    post_attention_layernorm: Vec<f32>,
    /// AttnRes queries before attention and before the feed-forward half, `[hidden_size]` each.
    attn_res: Option<(Vec<f32>, Vec<f32>)>,
    attention: Attention,
    feed_forward: FeedForward,
}

#[expect(clippy::large_enum_variant, reason = "one a layer, in one vector")]
enum Attention {
    Kda(kda::Weights),
    Mla(mla::Weights),
}

#[expect(clippy::large_enum_variant, reason = "one a layer, in one vector")]
enum FeedForward {
    Dense(mlp::Weights),
    Moe(moe::Weights),
}

impl Model {
    /// The configuration the model was built from.
    pub fn config(&self) -> &ModelConfig {
        &self.config
    }
}
