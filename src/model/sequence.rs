//! What a sequence carries from token to token: KDA states and convolution tails, MLA's latent cache. Rows change it
//! only when they are committed.

use super::Machine;
use crate::config::{AttentionKind, ModelConfig};
use crate::error::{Error, Result};
use crate::memory::Floats;

/// The state of one sequence.
pub struct Sequence {
    pub(super) layers: Vec<LayerState>,
    len: usize,
    context: usize,
    /// Rows of the last step that are not committed.
    pending: usize,
    /// A step began to change the state and did not end.
    torn: bool,
}

/// One layer's part.
#[expect(clippy::large_enum_variant, reason = "one a layer, in one vector")]
pub(super) enum LayerState {
    Kda(KdaState),
    Mla(MlaState),
}

/// State of a KDA layer.
pub(super) struct KdaState {
    /// `[heads, d_k, d_v]`.
    pub(super) state: Floats,
    /// The last `taps − 1` inputs of the q, k and v convolutions, oldest first: `[3][taps − 1, channels]`.
    pub(super) conv: [Vec<f32>; 3],
    /// What the rows of an uncommitted step need to be applied.
    pub(super) pending: KdaPending,
}

/// Rows that were computed but not committed.
#[derive(Default)]
pub(super) struct KdaPending {
    /// `[rows, heads, dim]`.
    pub(super) k: Vec<f32>,
    /// `[rows, heads, dim]`.
    pub(super) alpha: Vec<f32>,
    /// `[rows, heads, dim]`.
    pub(super) v: Vec<f32>,
    /// `[rows, heads]`.
    pub(super) beta: Vec<f32>,
    /// Convolution windows of q, k, v: `[3][taps − 1 + rows, channels]`.
    pub(super) windows: [Vec<f32>; 3],
}

/// State of an MLA layer.
pub(super) struct MlaState {
    /// `[context, kv_lora_rank + qk_rope_head_dim]`; the first `len` rows are committed.
    pub(super) cache: Floats,
}

/// A place in a sequence to come back to: its length, and a copy of what later rows overwrite.
#[derive(Default)]
pub struct Mark {
    len: usize,
    /// State and convolution tails of each KDA layer.
    kda: Vec<(Vec<f32>, [Vec<f32>; 3])>,
}

impl Sequence {
    /// An empty sequence with room for `context` tokens.
    ///
    /// # Errors
    /// Kind `Memory` when its states cannot be allocated.
    pub fn new(config: &ModelConfig, context: usize) -> Result<Self> {
        let layers = config.layers.iter().map(|layer| {
            Ok(match layer.attention {
                AttentionKind::Kda => LayerState::Kda(KdaState {
                    state: Floats::zeroed(kda_state_floats(config), "the state of a sequence")?,
                    conv: std::array::from_fn(|_| vec![0.0; conv_floats(config)]),
                    pending: KdaPending::default(),
                }),
                AttentionKind::Mla => {
                    let cache = Floats::zeroed(context.saturating_mul(latent_width(config)), "the latent cache")?;
                    LayerState::Mla(MlaState { cache })
                }
            })
        });
        Ok(Self { layers: layers.collect::<Result<_>>()?, len: 0, context, pending: 0, torn: false })
    }

    /// Bytes of the states that do not grow with the context.
    pub fn state_bytes(config: &ModelConfig) -> u64 {
        let kda = config.layers.iter().filter(|layer| layer.attention == AttentionKind::Kda).count();
        (kda * (kda_state_floats(config) + 3 * conv_floats(config)) * size_of::<f32>()) as u64
    }

    /// Bytes of the latent cache of `context` tokens.
    pub fn latent_cache_bytes(config: &ModelConfig, context: usize) -> u64 {
        let mla = config.layers.iter().filter(|layer| layer.attention == AttentionKind::Mla).count() as u64;
        mla * context as u64 * (latent_width(config) * size_of::<f32>()) as u64
    }

    /// Committed tokens.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether nothing is committed yet.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Most tokens it can hold.
    pub fn context(&self) -> usize {
        self.context
    }

    /// Whether a step of `rows` more rows may begin.
    pub(super) fn check_room(&self, rows: usize) -> Result<()> {
        if self.torn {
            return Err(Error::other("this sequence was left half-updated by an error and cannot go on"));
        }
        if self.pending > 0 {
            return Err(Error::other(format!("{} rows of the last step are not committed", self.pending)));
        }
        if self.len + rows > self.context {
            return Err(Error::usage(format!(
                "the context is full: {} tokens held, {rows} more asked, room for {}",
                self.len, self.context
            ))
            .hint("a larger --context makes room for more"));
        }
        Ok(())
    }

    /// A step begins that changes the state as it goes, unless `tentative`.
    pub(super) fn begin(&mut self, tentative: bool) {
        self.torn = !tentative;
    }

    /// A step of `rows` rows is through: they count at once, or wait for [`Sequence::commit`] when `tentative`.
    pub(super) fn end(&mut self, rows: usize, tentative: bool) {
        self.torn = false;
        if tentative {
            self.pending = rows;
        } else {
            self.len += rows;
        }
    }

    /// Applies the first `n` rows of the last, tentative step and forgets the others.
    ///
    /// # Errors
    /// When the last step had fewer rows; an interrupt, after which the sequence is unusable.
    pub fn commit(&mut self, config: &ModelConfig, machine: Machine<'_>, n: usize) -> Result<()> {
        if n > self.pending {
            return Err(Error::other(format!("cannot commit {n} of {} pending rows", self.pending)));
        }
        self.torn = true;
        let (heads, dim) = (config.kda.num_heads, config.kda.head_dim);
        let channels = heads * dim;
        for layer in &mut self.layers {
            let LayerState::Kda(kda) = layer else { continue };
            let rows = &kda.pending;
            if n > 0 {
                machine.compute.kda_rows(
                    &mut kda.state,
                    heads,
                    dim,
                    &[],
                    &rows.k[..n * channels],
                    &rows.alpha[..n * channels],
                    &rows.v[..n * channels],
                    &rows.beta[..n * heads],
                    &mut [],
                );
                for (conv, window) in kda.conv.iter_mut().zip(&rows.windows) {
                    let tail = conv.len();
                    conv.copy_from_slice(&window[n * channels..][..tail]);
                }
            }
        }
        machine.interrupt.check()?;
        self.torn = false;
        self.pending = 0;
        self.len += n;
        Ok(())
    }

    /// Marks the place reached; takes as much memory again as the states that do not grow with the context.
    ///
    /// # Errors
    /// For a sequence with uncommitted rows, or left half-updated by an error.
    pub fn mark(&self) -> Result<Mark> {
        self.check_room(0)?;
        let states = self.layers.iter().filter_map(|layer| match layer {
            LayerState::Kda(kda) => Some((kda.state.to_vec(), kda.conv.clone())),
            LayerState::Mla(_) => None,
        });
        Ok(Mark { len: self.len, kda: states.collect() })
    }

    /// Goes back to `mark`, which was taken of this sequence at a length that it still has; what came after is forgotten,
    /// and so is an error that left the sequence half-updated.
    ///
    /// # Errors
    /// For a mark beyond the sequence's end or of another model's sequence.
    pub fn rewind(&mut self, mark: &Mark) -> Result<()> {
        let kda = self.layers.iter_mut().filter_map(|layer| match layer {
            LayerState::Kda(kda) => Some(kda),
            LayerState::Mla(_) => None,
        });
        let kda: Vec<_> = kda.collect();
        let fits = kda.len() == mark.kda.len()
            && kda.iter().zip(&mark.kda).all(|(kda, (state, _))| kda.state.len() == state.len());
        if mark.len > self.len || !fits {
            return Err(Error::other(format!(
                "cannot go back to {} tokens in a sequence of {}: not a place of this sequence",
                mark.len, self.len
            )));
        }
        for (kda, (state, conv)) in kda.into_iter().zip(&mark.kda) {
            kda.state.copy_from_slice(state);
            kda.conv.iter_mut().zip(conv).for_each(|(to, from)| to.copy_from_slice(from));
        }
        (self.len, self.pending, self.torn) = (mark.len, 0, false);
        Ok(())
    }

    /// Recurrent state `[heads, d_k, d_v]` of a KDA layer; `None` for an MLA layer.
    pub fn kda_state(&self, layer: usize) -> Option<&[f32]> {
        match &self.layers[layer] {
            LayerState::Kda(kda) => Some(&kda.state),
            LayerState::Mla(_) => None,
        }
    }

    /// Tails of the q, k, v convolutions `[taps − 1, channels]`, oldest first; `None` for an MLA layer.
    pub fn conv_state(&self, layer: usize) -> Option<[&[f32]; 3]> {
        match &self.layers[layer] {
            LayerState::Kda(kda) => Some([&kda.conv[0], &kda.conv[1], &kda.conv[2]]),
            LayerState::Mla(_) => None,
        }
    }

    /// Committed rows `[len, kv_lora_rank + qk_rope_head_dim]` of an MLA layer's cache; `None` for a KDA layer.
    pub fn latent_cache(&self, layer: usize) -> Option<&[f32]> {
        match &self.layers[layer] {
            LayerState::Kda(_) => None,
            LayerState::Mla(mla) => Some(&mla.cache[..mla.cache.len() / self.context.max(1) * self.len]),
        }
    }
}

/// Width of a latent cache row.
pub(super) fn latent_width(config: &ModelConfig) -> usize {
    config.mla.kv_lora_rank + config.mla.qk_rope_head_dim
}

fn kda_state_floats(config: &ModelConfig) -> usize {
    config.kda.num_heads * config.kda.head_dim * config.kda.head_dim
}

fn conv_floats(config: &ModelConfig) -> usize {
    (config.kda.short_conv_kernel_size - 1) * config.kda.num_heads * config.kda.head_dim
}
