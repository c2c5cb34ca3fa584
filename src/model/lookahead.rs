//! Which experts the next layer will probably ask for, told to the store while this layer's are being read. A guess
//! changes when bytes are read, never a token.
//!
//! The next layer's router is applied to the state at hand: the running sum after this layer's attention and shared
//! experts. What is missing (this layer's routed experts or dense half, the next layer's attention) moves the choice
//! little: of the experts that the demo model guesses for a token 77 % are then asked for, of the likelier half 92 %. A
//! token alone guesses as many as it will ask for, likeliest first, and tells the store which are the likelier half: a
//! wrong read costs as much as a right one saves, so the store reads the others only where they prove good. A prompt's
//! many rows must read nothing in vain, so there an expert needs the votes of several rows, as many as were never wrong in
//! measurements; and rows of one token err alike, so only the first of them votes.

use rustc_hash::FxHashSet;

use super::attn_res::Residual;
use super::moe;
use super::router;
use super::scratch::Carver;
use super::step::Segment;
use super::{Layer, Machine, Observer};
use crate::config::{ModelConfig, MoeConfig};

/// Votes of a row of a prompt for an expert in the likelier half of its guess; the other half has one.
const LIKELY_VOTES: u16 = 2;
/// Votes that an expert needs where rows of a prompt are certain to come. With 9, one of 4,000 was wrong.
const PROMPT_VOTES_MIN: u16 = 12;

/// The next layer, with what its guess needs.
pub(super) struct Next<'a> {
    index: usize,
    layer: &'a Layer,
    weights: &'a moe::Weights,
    residual: &'a Residual<'a>,
    /// Of a prompt, whose rows are certain to come, and many: whether each row is the first of its token.
    voters: Option<Vec<bool>>,
}

impl<'a> Next<'a> {
    /// The layer after layer `index` of `layers`, if there is one that has experts and `segments` may have any of them
    /// guessed. `residual`: after the attention of layer `index`.
    pub(super) fn after(
        index: usize,
        layers: &'a [Layer],
        residual: &'a Residual<'a>,
        segments: &[Segment<'_>],
    ) -> Option<Self> {
        let index = index + 1;
        let layer = layers.get(index)?;
        let super::FeedForward::Moe(weights) = &layer.feed_forward else { return None };
        let is_prompt = segments.iter().any(|segment| !segment.tentative && segment.tokens.len() > 1);
        let voters = is_prompt.then(|| {
            let mut seen = FxHashSet::default();
            segments.iter().flat_map(|segment| segment.tokens).map(|token| seen.insert(*token)).collect::<Vec<_>>()
        });
        let enough = voters.as_ref().is_none_or(|voters| {
            let votes = voters.iter().filter(|votes| **votes).count() * usize::from(LIKELY_VOTES);
            votes >= usize::from(PROMPT_VOTES_MIN)
        });
        enough.then_some(Self { index, layer, weights, residual, voters })
    }
}

/// Floats of scratch for `rows` rows.
pub(super) fn work_floats(config: &ModelConfig, rows: usize) -> usize {
    2 * rows * config.hidden_size
}

/// Guesses and tells the store. `shared` `[rows, hidden_size]`: the output of this layer's shared experts, if it has any;
/// `logits` and `scores` `[rows, num_experts]` are overwritten. A state that is not finite gives no guess.
#[expect(clippy::too_many_arguments, reason = "one call site")]
pub(super) fn tell(
    machine: Machine<'_>,
    config: &ModelConfig,
    next: &Next<'_>,
    shared: Option<&[f32]>,
    logits: &mut [f32],
    scores: &mut [f32],
    mut work: Carver<'_>,
    observer: &mut dyn Observer,
) {
    let (Some(moe), Some(store)) = (&config.moe, machine.store) else { return };
    let compute = machine.compute;
    let (state, mixed) = (work.take(next.residual.sum.len()), work.take(next.residual.sum.len()));
    state.copy_from_slice(next.residual.sum);
    if let Some(shared) = shared {
        compute.add(state, shared);
    }
    let query = next.layer.attn_res.as_ref().map(|(_, mlp)| &mlp[..]);
    next.residual.mix_with(compute, state, query, config.rms_norm_eps, mixed);
    compute.rms_norm(mixed, &next.layer.post_attention_layernorm, config.rms_norm_eps, state);
    compute.matmul(next.weights.gate.matrix(), state, logits);
    scores.copy_from_slice(logits);
    compute.sigmoid(scores);
    // After an interrupt the scores are anything.
    if machine.interrupt.is_raised() {
        return;
    }
    let bias = &next.weights.e_score_correction_bias;
    let Some((experts, likely)) = guess(moe, logits, scores, bias, next.voters.as_deref()) else { return };
    if !experts.is_empty() {
        observer.guess(next.index, &experts, likely);
        store.lookahead(next.index as u16, &experts, likely);
    }
}

/// As [`tell`], of a layer that has no experts.
pub(super) fn tell_from_dense(
    machine: Machine<'_>,
    config: &ModelConfig,
    next: &Next<'_>,
    mut work: Carver<'_>,
    observer: &mut dyn Observer,
) {
    let Some(moe) = &config.moe else { return };
    let floats = next.residual.sum.len() / config.hidden_size * moe.num_experts;
    let (logits, scores) = (work.take(floats), work.take(floats));
    tell(machine, config, next, None, logits, scores, work, observer);
}

/// The experts to guess, and how many of them, from the first, are the likelier half of some row's. Of a prompt those with
/// [`PROMPT_VOTES_MIN`] votes of its `voters` `[rows]`, ascending, which is the order they will be asked for in, else all, likeliest first. `scores`
/// are left with the bias added; `None` when any is not finite.
fn guess(
    moe: &MoeConfig,
    logits: &[f32],
    scores: &mut [f32],
    bias: &[f32],
    voters: Option<&[bool]>,
) -> Option<(Vec<u16>, usize)> {
    let experts = moe.num_experts;
    let half = moe.num_experts_per_token.div_ceil(2);
    let mut votes = vec![0_u16; experts];
    // The best place and score that an expert has in any row.
    let mut best = vec![(true, f32::NEG_INFINITY); experts];
    let mut chosen = Vec::with_capacity(experts);
    for (row, (logits, choice)) in logits.chunks_exact(experts).zip(scores.chunks_exact_mut(experts)).enumerate() {
        choice.iter_mut().zip(bias).for_each(|(choice, bias)| *choice += bias);
        if !logits.iter().chain(&*choice).all(|x| x.is_finite()) {
            return None;
        }
        if voters.is_some_and(|voters| !voters[row]) {
            continue;
        }
        router::best(moe, choice, &mut chosen);
        if half < chosen.len() {
            chosen.select_nth_unstable_by(half - 1, router::best_first(choice));
        }
        for (rank, &id) in chosen.iter().enumerate() {
            let id = usize::from(id);
            votes[id] = votes[id].saturating_add(if rank < half { LIKELY_VOTES } else { 1 });
            best[id] = (best[id].0 && rank >= half, best[id].1.max(choice[id]));
        }
    }
    let votes_min = if voters.is_some() { PROMPT_VOTES_MIN } else { 1 };
    let mut guess: Vec<u16> = (0..experts as u16).filter(|id| votes[usize::from(*id)] >= votes_min).collect();
    if voters.is_some() {
        let likely = guess.len();
        return Some((guess, likely));
    }
    let of = |id: u16| best[usize::from(id)];
    guess.sort_by(|&a, &b| of(a).0.cmp(&of(b).0).then(of(b).1.total_cmp(&of(a).1)).then(a.cmp(&b)));
    let likely = guess.partition_point(|&id| !of(id).0);
    Some((guess, likely))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of 8 experts 4 are asked for; the likelier half of a guess is 2.
    fn moe() -> MoeConfig {
        MoeConfig {
            num_experts: 8,
            num_experts_per_token: 4,
            num_shared_experts: 0,
            moe_intermediate_size: 1,
            moe_renormalize: true,
            routed_scaling_factor: 1.0,
            num_expert_group: 1,
            topk_group: 1,
            routed_expert_hidden_size: None,
            latent_moe_use_norm: false,
        }
    }

    fn guessed(moe: &MoeConfig, scores: &[f32], bias: &[f32], voters: Option<&[bool]>) -> Option<(Vec<u16>, usize)> {
        let logits = vec![0.0; scores.len()];
        guess(moe, &logits, &mut scores.to_vec(), bias, voters)
    }

    #[test]
    fn a_token_guesses_what_it_will_ask_for_likeliest_first() {
        let scores = [0.1, 0.5, 0.2, 0.3, 0.0, 0.4, 0.6, 0.0];
        assert_eq!(guessed(&moe(), &scores, &[0.0; 8], None), Some((vec![6, 1, 5, 3], 2)));
        let bias = [0.0, 0.0, 0.0, 0.4, 0.0, 0.0, 0.0, 0.0];
        assert_eq!(
            guessed(&moe(), &scores, &bias, None),
            Some((vec![3, 6, 1, 5], 2)),
            "the bias counts, as in the choice"
        );
        assert_eq!(guessed(&moe(), &[0.5; 8], &[0.0; 8], None), Some((vec![0, 1, 2, 3], 2)), "ties to the lower");
        // Of two drafted rows the likelier halves go first.
        let rows = [scores, [0.6, 0.0, 0.0, 0.0, 0.9, 0.7, 0.5, 0.0]].concat();
        assert_eq!(guessed(&moe(), &rows, &[0.0; 8], None), Some((vec![4, 5, 6, 1, 0, 3], 4)));
    }

    #[test]
    fn a_prompt_needs_the_votes_of_several_rows_and_asks_in_ascending_order() {
        let of_rows = |rows: usize| {
            let row = [0.1, 0.5, 0.2, 0.3, 0.0, 0.4, 0.6, 0.0];
            guessed(&moe(), &row.repeat(rows), &[0.0; 8], Some(&vec![true; rows]))
        };
        assert_eq!(of_rows(5), Some((vec![], 0)));
        assert_eq!(of_rows(6), Some((vec![1, 6], 2)));
        assert_eq!(of_rows(11), Some((vec![1, 6], 2)));
        assert_eq!(of_rows(12), Some((vec![1, 3, 5, 6], 4)));
        assert_eq!(of_rows(70_000).map(|(guess, _)| guess.len()), Some(4), "votes do not overflow");
    }

    #[test]
    fn rows_of_a_token_seen_before_do_not_vote() {
        let row = [0.1, 0.5, 0.2, 0.3, 0.0, 0.4, 0.6, 0.0];
        let of_voters = |voters: usize| {
            let voters: Vec<bool> = (0..100).map(|row| row % 9 == 0 && row / 9 < voters).collect();
            guessed(&moe(), &row.repeat(100), &[0.0; 8], Some(&voters))
        };
        assert_eq!(of_voters(5), Some((vec![], 0)));
        assert_eq!(of_voters(6), Some((vec![1, 6], 2)));
        assert_eq!(of_voters(12), Some((vec![1, 3, 5, 6], 4)));
    }

    #[test]
    fn groups_that_the_router_leaves_out_are_left_out() {
        let moe = MoeConfig { num_expert_group: 4, topk_group: 2, ..moe() };
        // The best of all is alone in its group.
        let scores = [0.9, 0.0, 0.5, 0.5, 0.6, 0.6, 0.1, 0.1];
        assert_eq!(guessed(&moe, &scores, &[0.0; 8], None), Some((vec![4, 5, 2, 3], 2)));
    }

    #[test]
    fn scores_that_are_not_finite_give_no_guess() {
        for odd in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY] {
            for at in 0..16 {
                let mut scores = [0.5; 16];
                scores[at] = odd;
                assert_eq!(guessed(&moe(), &scores, &[0.0; 8], None), None);
                let mut logits = [0.0; 16];
                logits[at] = odd;
                assert_eq!(guess(&moe(), &logits, &mut [0.5; 16], &[0.0; 8], None), None);
            }
        }
    }
}
