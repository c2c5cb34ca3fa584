//! The router: which `num_experts_per_token` of `num_experts` each row uses, and with what weights. Loading them is the
//! store's work.
//!
//! Source: `KimiMoEGate.forward` of the released modelling code (`noaux_tc`).

use std::cmp::Ordering;
use std::ops::Range;

use crate::config::MoeConfig;
use crate::error::{Error, Result};

/// The choices of a step's rows: expert ids ascending within a row, weights beside them.
#[derive(Debug, Clone, Default)]
pub struct Routes {
    /// `[rows, top_k]`, ascending in a row.
    pub ids: Vec<u16>,
    /// `[rows, top_k]`.
    pub weights: Vec<f32>,
    /// `num_experts_per_token`.
    pub top_k: usize,
}

/// One row's entry in [`ByExpert`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Routed {
    pub(super) row: u32,
    pub(super) weight: f32,
}

/// The same choices turned round: for each expert that any row uses, its rows, both ascending.
pub(super) struct ByExpert {
    pub(super) experts: Vec<u16>,
    /// `experts.len() + 1` offsets into `rows`.
    offsets: Vec<u32>,
    rows: Vec<Routed>,
}

impl Routes {
    /// Chooses for every row. `logits` and `scores` `[rows, num_experts]`: the gate's output and its sigmoid; `bias`
    /// `[num_experts]` steers the choice only.
    ///
    /// # Errors
    /// The row whose logits or biased scores are not all finite.
    pub fn choose(moe: &MoeConfig, logits: &[f32], scores: &[f32], bias: &[f32]) -> Result<Self, usize> {
        let (experts, top_k) = (moe.num_experts, moe.num_experts_per_token);
        let rows = logits.len() / experts;
        let mut routes = Self { ids: Vec::new(), weights: Vec::new(), top_k };
        routes.ids.reserve_exact(rows * top_k);
        routes.weights.reserve_exact(rows * top_k);
        let mut choice = vec![0.0; experts];
        let mut order: Vec<u16> = Vec::with_capacity(experts);
        for (row, (logits, scores)) in logits.chunks_exact(experts).zip(scores.chunks_exact(experts)).enumerate() {
            for ((choice, score), bias) in choice.iter_mut().zip(scores).zip(bias) {
                *choice = score + bias;
            }
            if !logits.iter().chain(&choice).all(|x| x.is_finite()) {
                return Err(row);
            }
            best(moe, &choice, &mut order);
            order.sort_unstable();
            routes.ids.extend_from_slice(&order);

            let first = routes.weights.len();
            routes.weights.extend(order.iter().map(|&id| scores[usize::from(id)]));
            let weights = &mut routes.weights[first..];
            if moe.moe_renormalize && top_k > 1 {
                let sum = weights.iter().sum::<f32>() + 1e-20;
                weights.iter_mut().for_each(|w| *w /= sum);
            }
            weights.iter_mut().for_each(|w| *w *= moe.routed_scaling_factor);
        }
        Ok(routes)
    }

    /// Turns the choices round.
    pub(super) fn by_expert(&self, num_experts: usize) -> ByExpert {
        let mut counts = vec![0u32; num_experts];
        for &id in &self.ids {
            counts[usize::from(id)] += 1;
        }
        let mut next = vec![0u32; num_experts];
        let (mut experts, mut offsets, mut total) = (Vec::new(), vec![0], 0);
        for (id, &count) in counts.iter().enumerate() {
            next[id] = total;
            if count > 0 {
                total += count;
                experts.push(id as u16);
                offsets.push(total);
            }
        }
        let mut rows = vec![Routed { row: 0, weight: 0.0 }; self.ids.len()];
        for (i, (&id, &weight)) in self.ids.iter().zip(&self.weights).enumerate() {
            let place = &mut next[usize::from(id)];
            rows[*place as usize] = Routed { row: (i / self.top_k) as u32, weight };
            *place += 1;
        }
        ByExpert { experts, offsets, rows }
    }
}

impl ByExpert {
    /// Rows of the `i`-th expert of [`ByExpert::experts`].
    pub(super) fn rows(&self, i: usize) -> &[Routed] {
        &self.rows[self.places(i)]
    }

    /// Where [`ByExpert::rows`] stand among those of all experts, one after the other.
    pub(super) fn places(&self, i: usize) -> Range<usize> {
        self.offsets[i] as usize..self.offsets[i + 1] as usize
    }
}

/// Leaves in `order` the `num_experts_per_token` experts of the highest `choice` `[num_experts]`, in no order.
pub(super) fn best(moe: &MoeConfig, choice: &[f32], order: &mut Vec<u16>) {
    order.clear();
    if moe.num_expert_group > 1 {
        order.extend(experts_of_best_groups(moe, choice));
    } else {
        order.extend(0..choice.len() as u16);
    }
    let top_k = moe.num_experts_per_token;
    if top_k < order.len() {
        order.select_nth_unstable_by(top_k - 1, best_first(choice));
        order.truncate(top_k);
    }
}

/// Orders expert ids by falling `choice` `[num_experts]`, ties by rising id.
pub(super) fn best_first(choice: &[f32]) -> impl Fn(&u16, &u16) -> Ordering {
    |a, b| choice[usize::from(*b)].total_cmp(&choice[usize::from(*a)]).then(a.cmp(b))
}

/// Experts of the `topk_group` groups whose two best choices sum highest (ties to the lower group), ascending.
fn experts_of_best_groups<'a>(moe: &'a MoeConfig, choice: &'a [f32]) -> impl Iterator<Item = u16> + 'a {
    let size = moe.num_experts / moe.num_expert_group;
    let score = |group: &[f32]| {
        let (mut best, mut second) = (f32::NEG_INFINITY, f32::NEG_INFINITY);
        for &c in group {
            if c > best {
                (best, second) = (c, best);
            } else if c > second {
                second = c;
            }
        }
        if size > 1 { best + second } else { best }
    };
    let scores: Vec<f32> = choice.chunks_exact(size).map(score).collect();
    let mut groups: Vec<usize> = (0..moe.num_expert_group).collect();
    groups.sort_by(|&a, &b| scores[b].total_cmp(&scores[a]).then(a.cmp(&b)));
    groups.truncate(moe.topk_group);
    groups.sort_unstable();
    groups.into_iter().flat_map(move |group| (group * size..(group + 1) * size).map(|id| id as u16))
}

/// The error for a row whose router scores are not finite.
pub(super) fn not_finite(layer: usize, position: usize) -> Error {
    Error::numerical(format!("router scores of layer {layer} are not finite at position {position}"))
        .hint("a damaged weight is the usual cause; `deltafin inspect` checks the files")
}
