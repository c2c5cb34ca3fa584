//! The tensors of a synthetic model, shard by shard: names, shapes and dtypes as released, and what each is filled with.
//!
//! Values are such that activations stay near 1 through any number of layers and that small differences stay small:
//! matrices have variance 1 / columns, what a layer adds to the residual stream is a fraction of it.

use super::routing::{self, Routing};
use super::shape::Shape;
use super::values::{CODE_RMS, Fill, Floats, Matrix};

/// `short_conv_kernel_size`.
pub(super) const TAPS: usize = 4;

/// `A_log` is padded to a multiple of this.
const A_LOG_PADDING: usize = 128;

/// What attention and MLPs add to the residual stream, against 1 for the first layer's attention.
const WRITER_GAIN: f32 = 0.3;
/// What the routed experts add: a token that changes an expert hardly changes its logits.
const EXPERTS_GAIN: f32 = 0.1;

/// One tensor of a shard.
#[derive(Debug, Clone)]
pub(super) struct Tensor {
    /// As in the released index.
    pub(super) name: String,
    /// As in a safetensors header.
    pub(super) dtype: &'static str,
    pub(super) shape: Vec<usize>,
    pub(super) fill: Fill,
}

impl Tensor {
    /// Bytes of data.
    pub(super) fn len(&self) -> u64 {
        let element = match self.dtype {
            "F32" => 4,
            "BF16" => 2,
            _ => 1,
        };
        self.elements() * element
    }

    /// Numbers the tensor holds, two a byte for codes; scales are not counted.
    pub(super) fn parameters(&self) -> u64 {
        match self.fill {
            Fill::Codes => 2 * self.elements(),
            Fill::Scales(_) => 0,
            _ => self.elements(),
        }
    }

    fn elements(&self) -> u64 {
        self.shape.iter().map(|n| *n as u64).product()
    }
}

/// Shards of a model: one a layer, as released, and one for what lies outside the layers.
pub(super) fn shards(shape: &Shape) -> usize {
    shape.layers + 1
}

/// The tensors of shard `shard`, in the order in which they lie there.
pub(super) fn shard(shape: &Shape, routing: &Routing, shard: usize) -> Vec<Tensor> {
    let mut list = List { prefix: String::new(), tensors: Vec::new(), shape, routing, layer: shard };
    if shard < shape.layers {
        list.layer();
    } else {
        list.outside();
    }
    list.tensors
}

struct List<'a> {
    prefix: String,
    tensors: Vec<Tensor>,
    shape: &'a Shape,
    routing: &'a Routing,
    /// 0-based; `layers` for what lies outside.
    layer: usize,
}

impl List<'_> {
    fn outside(&mut self) {
        let Shape { hidden, vocab, .. } = *self.shape;
        self.prefix = "language_model.".into();
        let embed =
            Matrix { first_cols: (self.routing.dims, routing::OFF), ..Matrix::new(hidden, self.routing.embed_std()) };
        self.matrix("model.embed_tokens", vocab, embed);
        if self.shape.attn_res_block > 0 {
            self.pseudo_query("model.output_attn_res");
        }
        self.norm("model.norm", hidden, 1.0);
        let head = Matrix { zero_from: self.shape.special_ids(), ..Matrix::new(hidden, over_root(hidden)) };
        self.matrix("lm_head", vocab, head);
    }

    fn layer(&mut self) {
        let hidden = self.shape.hidden;
        self.prefix = format!("language_model.model.layers.{}.", self.layer);
        self.norm("input_layernorm", hidden, 1.0);
        self.norm("post_attention_layernorm", hidden, 1.0);
        if self.shape.attn_res_block > 0 {
            self.pseudo_query("self_attention_res");
            self.pseudo_query("mlp_res");
        }
        if self.shape.is_mla(self.layer) {
            self.mla()
        } else {
            self.kda()
        }
        if self.shape.is_moe(self.layer) {
            self.moe();
        } else {
            self.mlp("mlp", self.shape.dense_inner);
        }
    }

    fn kda(&mut self) {
        let Shape { hidden, heads, head_dim, .. } = *self.shape;
        let width = heads * head_dim;
        let (taps, (from, to)) = self.routing.memory(self.layer);
        for (projection, taps) in ["q", "k", "v"].into_iter().zip(taps) {
            self.plain(&format!("self_attn.{projection}_proj"), width, hidden);
            let shape = vec![width, 1, TAPS];
            self.add(format!("self_attn.{projection}_conv1d.weight"), "F32", shape, Fill::F32(Floats::Taps(taps)));
        }
        let a_log = Floats::Uniform { from: -0.3, to: 0.3, len: heads };
        self.add("self_attn.A_log".into(), "F32", vec![heads.next_multiple_of(A_LOG_PADDING)], Fill::F32(a_log));
        let dt_bias = Floats::Uniform { from, to, len: width };
        self.add("self_attn.dt_bias".into(), "F32", vec![width], Fill::F32(dt_bias));
        self.plain("self_attn.f_a_proj", head_dim, hidden);
        self.matrix("self_attn.f_b_proj", width, Matrix::new(head_dim, 0.3 * over_root(head_dim)));
        self.plain("self_attn.b_proj", heads, hidden);
        self.plain("self_attn.g_proj", width, hidden);
        let o_norm = Floats::Around { mean: 1.0, std: 0.1 };
        self.add("self_attn.o_norm.weight".into(), "F32", vec![head_dim], Fill::F32(o_norm));
        let gain = if self.layer == 0 { 1.0 } else { WRITER_GAIN };
        // Keys, queries and values are positive on the average, so all channels of the output have a part in common.
        let o_proj = Matrix { opposite: head_dim.is_multiple_of(2), ..self.writer(width, gain, self.layer == 0) };
        self.matrix("self_attn.o_proj", hidden, o_proj);
    }

    fn mla(&mut self) {
        let Shape { hidden, heads, q_lora, kv_lora, nope, rope, v_head, .. } = *self.shape;
        if q_lora > 0 {
            self.plain("self_attn.q_a_proj", q_lora, hidden);
            self.norm("self_attn.q_a_layernorm", q_lora, 1.0);
            self.plain("self_attn.q_b_proj", heads * (nope + rope), q_lora);
        } else {
            self.plain("self_attn.q_proj", heads * (nope + rope), hidden);
        }
        self.plain("self_attn.kv_a_proj_with_mqa", kv_lora + rope, hidden);
        self.norm("self_attn.kv_a_layernorm", kv_lora, 1.0);
        self.plain("self_attn.kv_b_proj", heads * (nope + v_head), kv_lora);
        self.plain("self_attn.g_proj", heads * v_head, hidden);
        let gain = if self.layer == 0 { 1.0 } else { WRITER_GAIN };
        let o_proj = self.writer(heads * v_head, gain, self.layer == 0);
        self.matrix("self_attn.o_proj", hidden, o_proj);
    }

    fn moe(&mut self) {
        let Shape { hidden, experts, latent, inner, shared, .. } = *self.shape;
        self.matrix("block_sparse_moe.gate", experts, self.routing.gate(self.shape, self.layer));
        let bias = Floats::Given(self.routing.bias(self.layer));
        let name = "block_sparse_moe.gate.e_score_correction_bias";
        self.add(name.into(), "F32", vec![experts], Fill::F32(bias));
        self.plain("block_sparse_moe.routed_expert_down_proj", latent, hidden);
        self.norm("block_sparse_moe.routed_expert_norm", latent, EXPERTS_GAIN);
        let up = self.writer(latent, 1.0, false);
        self.matrix("block_sparse_moe.routed_expert_up_proj", hidden, up);
        if shared > 0 {
            self.mlp("block_sparse_moe.shared_experts", shared * inner);
        }
        for expert in 0..experts {
            for (part, rows, cols) in [("w1", inner, latent), ("w3", inner, latent), ("w2", latent, inner)] {
                let stem = format!("block_sparse_moe.experts.{expert}.{part}");
                self.add(format!("{stem}.weight_packed"), "U8", vec![rows, cols / 2], Fill::Codes);
                self.add(format!("{stem}.weight_scale"), "U8", vec![rows, cols / 32], Fill::Scales(scale(cols)));
            }
        }
    }

    fn mlp(&mut self, stem: &str, inner: usize) {
        let hidden = self.shape.hidden;
        self.plain(&format!("{stem}.gate_proj"), inner, hidden);
        self.plain(&format!("{stem}.up_proj"), inner, hidden);
        let down = self.writer(inner, WRITER_GAIN, false);
        self.matrix(&format!("{stem}.down_proj"), hidden, down);
    }

    /// A matrix into the residual stream; the dimensions that steer the router take it in only `into_routing`.
    fn writer(&self, cols: usize, gain: f32, into_routing: bool) -> Matrix {
        let std = gain * over_root(cols);
        let first_rows = if into_routing { (0, 0.0) } else { (self.routing.dims, std * routing::OFF) };
        Matrix { first_rows, ..Matrix::new(cols, std) }
    }

    /// An AttnRes pseudo-query of scores well below 1: blocks are mixed in nearly equal parts.
    fn pseudo_query(&mut self, stem: &str) {
        let hidden = self.shape.hidden;
        self.norm(&format!("{stem}_norm"), hidden, 1.0);
        let proj = Floats::Around { mean: 0.0, std: 0.2 * over_root(hidden) };
        self.add(format!("{stem}_proj.weight"), "BF16", vec![1, hidden], Fill::Bf16(proj));
    }

    fn norm(&mut self, stem: &str, len: usize, mean: f32) {
        let values = Floats::Around { mean, std: 0.1 * mean };
        self.add(format!("{stem}.weight"), "BF16", vec![len], Fill::Bf16(values));
    }

    fn plain(&mut self, stem: &str, rows: usize, cols: usize) {
        self.matrix(stem, rows, Matrix::new(cols, over_root(cols)));
    }

    fn matrix(&mut self, stem: &str, rows: usize, matrix: Matrix) {
        let shape = vec![rows, matrix.cols];
        self.add(format!("{stem}.weight"), "BF16", shape, Fill::Matrix(matrix));
    }

    fn add(&mut self, name: String, dtype: &'static str, shape: Vec<usize>, fill: Fill) {
        self.tensors.push(Tensor { name: self.prefix.clone() + &name, dtype, shape, fill });
    }
}

fn over_root(columns: usize) -> f32 {
    1.0 / (columns as f32).sqrt()
}

/// The scale for which a row of `columns` codes has a gain of about 2; 120 to 122 at K3's widths, as released.
fn scale(columns: usize) -> u8 {
    (127.0 + (2.0 / (CODE_RMS * (columns as f64).sqrt())).log2().round()) as u8
}

#[cfg(test)]
mod tests {
    use super::super::shape::Preset;
    use super::*;

    #[test]
    fn k3_has_the_released_number_of_tensors_and_bytes() {
        let shape = Preset::K3.shape();
        let routing = Routing::new(&shape, 0, false);
        let (mut tensors, mut bytes, mut parameters) = (0, 0, 0);
        for index in 0..shards(&shape) {
            let shard = shard(&shape, &routing, index);
            tensors += shard.len();
            bytes += shard.iter().map(Tensor::len).sum::<u64>();
            parameters += shard.iter().map(Tensor::parameters).sum::<u64>();
        }
        assert_eq!((tensors, bytes), (497_052, 1_559_965_606_912));
        assert_eq!(parameters / 1_000_000_000, 2779);
    }

    #[test]
    fn scales_are_those_of_real_experts() {
        assert_eq!((scale(3584), scale(3072)), (121, 121));
        assert!((100..127).contains(&scale(32)) && (100..127).contains(&scale(1 << 20)));
    }
}
