//! The MoE half of a layer: route, fetch the experts that any row needs once each, add their outputs in ascending expert
//! number, whichever arrived first, and the shared experts. With a latent, experts run between `routed_expert_down_proj` and `…_up_proj`.

use super::lookahead::{self, Next};
use super::router::{self, Routes};
use super::scratch::Carver;
use super::step::Segment;
use super::{Machine, Observer, mlp};
use crate::checkpoint::ExpertFormat;
use crate::config::{ModelConfig, MoeConfig};
use crate::error::{Error, Result};
use crate::kernels::{Matrix, Weights as Values};
use crate::store::Expert;
use crate::trunk::Tensor;

pub(super) struct Weights {
    /// How the routed experts are stored.
    pub(super) format: ExpertFormat,
    /// Width the experts run at, and their inner width.
    pub(super) expert_width: usize,
    pub(super) expert_inner: usize,
    /// `[num_experts, hidden_size]`.
    pub(super) gate: Tensor,
    /// `[num_experts]`.
    pub(super) e_score_correction_bias: Vec<f32>,
    pub(super) latent: Option<Latent>,
    pub(super) shared_experts: Option<mlp::Weights>,
}

/// The projections around experts that run in a latent of `routed_expert_hidden_size`.
pub(super) struct Latent {
    /// `[latent, hidden_size]`.
    pub(super) down_proj: Tensor,
    /// `[latent]`, when `latent_moe_use_norm`.
    pub(super) norm: Option<Vec<f32>>,
    /// `[hidden_size, latent]`.
    pub(super) up_proj: Tensor,
}

/// Rows of a step, at most, whose experts are computed as they arrive. Beyond, computing an expert takes so long that the
/// next has come meanwhile.
const ROWS_AS_THEY_ARRIVE: usize = 8;

/// Width the experts run at.
pub(super) fn expert_width(config: &ModelConfig, moe: &MoeConfig) -> usize {
    moe.routed_expert_hidden_size.unwrap_or(config.hidden_size)
}

/// Floats of scratch for `rows` rows.
pub(super) fn work_floats(config: &ModelConfig, rows: usize) -> usize {
    let Some(moe) = &config.moe else { return 0 };
    let width = expert_width(config, moe);
    let shared = mlp::work_floats(rows, moe.num_shared_experts * moe.moe_intermediate_size);
    let outputs = rows.min(ROWS_AS_THEY_ARRIVE) * moe.num_experts_per_token * width;
    let experts = rows * (4 * width + 2 * moe.moe_intermediate_size) + outputs;
    // Scores, latent rows and the shared experts' sum stay; the shared experts, the guess for the next layer and the
    // routed experts with their sum follow each other.
    rows * (2 * moe.num_experts + width + config.hidden_size)
        + shared.max(lookahead::work_floats(config, rows)).max(experts)
}

/// out `[rows, hidden_size]` = the MoE half of the normed rows x of all `segments`. The experts of `next` are guessed while
/// those of this layer are read.
///
/// # Errors
/// Kind `Numerical` with layer and position for scores that are not finite; what the store reports; an interrupt.
#[expect(clippy::too_many_arguments, reason = "one call site")]
pub(super) fn forward(
    machine: Machine<'_>,
    config: &ModelConfig,
    w: &Weights,
    layer: usize,
    segments: &[Segment<'_>],
    x: &[f32],
    next: Option<Next<'_>>,
    mut work: Carver<'_>,
    out: &mut [f32],
    observer: &mut dyn Observer,
) -> Result<()> {
    let Machine { compute, interrupt, .. } = machine;
    let (Some(moe), Some(store)) = (&config.moe, machine.store) else {
        unreachable!("a model with MoE layers has experts")
    };
    let width = w.expert_width;
    let rows = x.len() / config.hidden_size;

    let logits = work.take(rows * moe.num_experts);
    let scores = work.take(rows * moe.num_experts);
    compute.matmul(w.gate.matrix(), x, logits);
    scores.copy_from_slice(logits);
    compute.sigmoid(scores);
    interrupt.check()?;
    let routes = Routes::choose(moe, logits, scores, &w.e_score_correction_bias)
        .map_err(|row| router::not_finite(layer, super::step::position(segments, row)))?;
    observer.routes(layer, &routes);
    let by_expert = routes.by_expert(moe.num_experts);
    // Reads run from here on, under the shared experts and the latent projection.
    let mut request = store.request(layer as u16, &by_expert.experts);

    let latent = match &w.latent {
        Some(latent) => {
            let z = work.take(rows * width);
            compute.matmul(latent.down_proj.matrix(), x, z);
            &*z
        }
        None => x,
    };
    let shared = w.shared_experts.as_ref().map(|shared| {
        let sum = work.take(x.len());
        mlp::forward(compute, shared, config.activation, x, work.rest(), sum);
        &*sum
    });

    if let Some(next) = &next {
        lookahead::tell(machine, config, next, shared, logits, scores, work.rest(), observer);
        interrupt.check()?;
    }

    let sum = work.take(rows * width);
    let normed = work.take(rows * width);
    sum.fill(0.0);
    // Few rows have each expert's output kept, so that experts can run as they arrive and yet be added in ascending order.
    let as_they_arrive = rows <= ROWS_AS_THEY_ARRIVE;
    let outputs = work.take(if as_they_arrive { routes.ids.len() * width } else { 0 });
    let mut add = |i: usize, y: &[f32]| {
        for (y, routed) in y.chunks_exact(width).zip(by_expert.rows(i)) {
            compute.add_scaled(&mut sum[routed.row as usize * width..][..width], routed.weight, y);
        }
    };
    let mut done = 0;
    while let Some(expert) = if as_they_arrive { request.next_there() } else { request.next() }? {
        let i = by_expert.experts.binary_search(&expert.id.expert);
        let i = i.map_err(|_| Error::other(format!("the store gave {}, which was not asked for", expert.id)))?;
        let rows = by_expert.rows(i);
        let mut work = work.rest();
        let z = work.take(rows.len() * width);
        for (z, routed) in z.chunks_exact_mut(width).zip(rows) {
            z.copy_from_slice(&latent[routed.row as usize * width..][..width]);
        }
        if as_they_arrive {
            let places = by_expert.places(i);
            run_expert(machine, config, w, &expert, z, work, &mut outputs[places.start * width..places.end * width]);
        } else {
            let y = work.take(rows.len() * width);
            run_expert(machine, config, w, &expert, z, work, y);
            add(i, y);
        }
        interrupt.check()?;
        done += 1;
    }
    if done != by_expert.experts.len() {
        return Err(Error::other(format!(
            "layer {layer}: the store gave {done} of {} experts",
            by_expert.experts.len()
        )));
    }
    if as_they_arrive {
        for i in 0..done {
            add(i, &outputs[by_expert.places(i).start * width..by_expert.places(i).end * width]);
        }
    }

    match &w.latent {
        Some(latent) => {
            let sum = match &latent.norm {
                Some(weight) => {
                    compute.rms_norm(sum, weight, config.rms_norm_eps, normed);
                    &*normed
                }
                None => &*sum,
            };
            compute.matmul(latent.up_proj.matrix(), sum, out);
        }
        None => out.copy_from_slice(sum),
    }
    if let Some(shared) = shared {
        compute.add(out, shared);
    }
    Ok(())
}

/// y `[rows, width]` = w2(act(w1 z, w3 z)) of one expert.
fn run_expert(
    machine: Machine<'_>,
    config: &ModelConfig,
    w: &Weights,
    expert: &Expert<'_>,
    z: &[f32],
    mut work: Carver<'_>,
    y: &mut [f32],
) {
    let compute = machine.compute;
    let (width, inner) = (w.expert_width, w.expert_inner);
    let rows = z.len() / width;
    let [w1, w3, w2] = matrices(expert, w.format, width, inner);
    let (gate, up) = (work.take(rows * inner), work.take(rows * inner));
    compute.matmul_each(&[w1, w3], z, &mut [&mut *gate, &mut *up]);
    mlp::activate(compute, config.activation, gate, up);
    compute.matmul(w2, gate, y);
}

/// w1, w3 `[inner, width]`, w2 `[width, inner]`, as stored.
fn matrices<'a>(expert: &'a Expert<'_>, format: ExpertFormat, width: usize, inner: usize) -> [Matrix<'a>; 3] {
    let weights = |i: usize| match format {
        ExpertFormat::Mxfp4 => Values::Mxfp4 { packed: expert.part(2 * i), scale: expert.part(2 * i + 1) },
        ExpertFormat::Bf16 => Values::Bf16(expert.part(i)),
    };
    [
        Matrix { rows: inner, cols: width, weights: weights(0) },
        Matrix { rows: inner, cols: width, weights: weights(1) },
        Matrix { rows: width, cols: inner, weights: weights(2) },
    ]
}
