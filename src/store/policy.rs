//! What to keep: each expert's chance of being asked for again, and from it the slot to give up.
//!
//! The chance adds two figures. One is recent: uses of the last tokens, which fade fast (a token shares a third of its
//! experts with the one before, a tenth with the one eight before). The other is lasting: the share of its layer's requests
//! that name the expert, which begins with what earlier runs learned and follows this run slowly. Both fade with the requests
//! of the expert's own layer, so nothing depends on time and no layer starves another; and a request for more experts than
//! a token has counts less for each, so a scan over a layer changes nothing.
//!
//! Figures that fade at different rates have no lasting order, so no list or heap can hold it. Instead a few slots are drawn,
//! and the one worth least makes way: O(1), and within a point of hit rate of looking at all (`benches/cache`).

use super::histogram::Histogram;

/// What the chance of an expert is made of. The default was chosen by measurement.
#[derive(Debug, Clone, Copy)]
pub struct Tuning {
    /// Weight of a use by the request before, against a lasting share of 1.
    pub recent_weight: f32,
    /// What is left of the recent figure after a request, below 1.
    pub recent_keep: f32,
    /// What is left of the lasting figure after a request, below 1.
    pub lasting_keep: f32,
    /// Requests of a layer that what was learned earlier is worth.
    pub learned_requests: f32,
    /// Slots that are looked at for a victim.
    pub candidates: usize,
}

impl Default for Tuning {
    fn default() -> Self {
        Self { recent_weight: 0.22, recent_keep: 0.5, lasting_keep: 0.995, learned_requests: 100.0, candidates: 64 }
    }
}

/// The slots that may be given up, and what their experts are worth. Experts are numbered `layer · experts + expert`.
///
/// Whoever owns the slots offers each when nobody needs it and withdraws it when somebody does: what was not offered is
/// never a victim.
#[derive(Debug)]
pub struct Policy {
    /// Experts of a layer.
    experts: u32,
    /// Experts that a token asks of a layer.
    top_k: usize,
    tuning: Tuning,
    recent_keep: Fading,
    lasting_keep: Fading,
    /// `[layers]`.
    layers: Vec<Layer>,
    /// `[layers · experts]`.
    uses: Vec<Use>,
    /// Slots on offer with their experts, in no order.
    offers: Vec<Offer>,
    /// `[slots]`: place among `offers`, or [`NONE`].
    place: Vec<u32>,
    random: u64,
    examined: u64,
}

const NONE: u32 = u32::MAX;

#[derive(Debug, Clone, Copy)]
struct Layer {
    /// Requests so far.
    requests: u32,
    /// Requests that the lasting figures stand for, after fading.
    mass: f32,
}

/// Faded sums of uses, as of request `at` of the layer.
#[derive(Debug, Clone, Copy, Default)]
struct Use {
    recent: f32,
    lasting: f32,
    at: u32,
}

#[derive(Debug, Clone, Copy)]
struct Offer {
    slot: u32,
    expert: u32,
}

impl Policy {
    /// Nothing on offer, nothing known. `slots` is how many there are, `top_k` how many experts a token asks of a layer.
    pub fn new(layers: usize, experts: usize, top_k: usize, slots: usize, tuning: Tuning) -> Self {
        Self {
            experts: experts.max(1) as u32,
            top_k,
            tuning,
            recent_keep: Fading::new(tuning.recent_keep),
            lasting_keep: Fading::new(tuning.lasting_keep),
            // A first request must not look like certainty: it is one of a few.
            layers: vec![Layer { requests: 0, mass: 4.0 }; layers],
            uses: vec![Use::default(); layers * experts],
            offers: Vec::with_capacity(slots),
            place: vec![NONE; slots],
            random: 0x9e37_79b9_7f4a_7c15,
            examined: 0,
        }
    }

    /// Begins with what earlier runs learned; a token asks `top_k` experts of a layer. A histogram of another shape is
    /// ignored, and so are layers without any use.
    pub fn learn(&mut self, top_k: usize, histogram: &Histogram) {
        self.top_k = top_k;
        if histogram.shape() != (self.layers.len(), self.experts as usize) {
            return;
        }
        let shares = histogram.shares();
        for (number, shares) in shares.chunks(self.experts as usize).enumerate() {
            if shares.iter().all(|share| *share == 0.0) {
                continue;
            }
            self.layers[number].mass += self.tuning.learned_requests;
            let uses = &mut self.uses[number * self.experts as usize..];
            for (entry, share) in uses.iter_mut().zip(shares) {
                entry.lasting += share * self.top_k as f32 * self.tuning.learned_requests;
            }
        }
    }

    /// A request for `experts`, all of one layer: ages the layer and credits them, in memory or not.
    pub fn requested(&mut self, experts: &[u32]) {
        let Some(layer) = experts.first().map(|expert| (expert / self.experts) as usize) else { return };
        let Some(layer) = self.layers.get_mut(layer) else { return };
        let weight = (self.top_k as f32 / experts.len() as f32).min(1.0);
        layer.requests = layer.requests.saturating_add(1);
        layer.mass = layer.mass * self.tuning.lasting_keep + 1.0;
        let now = layer.requests;
        for expert in experts {
            if let Some(entry) = self.uses.get_mut(*expert as usize) {
                let age = now.saturating_sub(entry.at);
                entry.recent = entry.recent * self.recent_keep.after(age) + weight;
                entry.lasting = entry.lasting * self.lasting_keep.after(age) + weight;
                entry.at = now;
            }
        }
    }

    /// Chance that the next token asks for `expert`, roughly: what matters is the order.
    pub fn chance(&self, expert: u32) -> f32 {
        let Some(entry) = self.uses.get(expert as usize) else { return 0.0 };
        let layer = self.layers[(expert / self.experts) as usize];
        let age = layer.requests.saturating_sub(entry.at);
        let recent = entry.recent * self.recent_keep.after(age);
        let lasting = entry.lasting * self.lasting_keep.after(age) / layer.mass;
        self.tuning.recent_weight * recent + lasting
    }

    /// `slot` holds `expert` and nobody needs it now. A slot is on offer once; offering it again renames its expert.
    pub fn offer(&mut self, slot: u32, expert: u32) {
        match self.place[slot as usize] {
            NONE => {
                self.place[slot as usize] = self.offers.len() as u32;
                self.offers.push(Offer { slot, expert });
            }
            place => self.offers[place as usize].expert = expert,
        }
    }

    /// `slot` is needed. Whether it was on offer.
    pub fn withdraw(&mut self, slot: u32) -> bool {
        let place = std::mem::replace(&mut self.place[slot as usize], NONE);
        if place == NONE {
            return false;
        }
        self.offers.swap_remove(place as usize);
        if let Some(moved) = self.offers.get(place as usize) {
            self.place[moved.slot as usize] = place;
        }
        true
    }

    /// Withdraws the slot to give up, if any is on offer.
    pub fn victim(&mut self) -> Option<u32> {
        let count = self.offers.len();
        let candidates = self.tuning.candidates.max(1);
        let mut least: Option<(f32, u32)> = None;
        for number in 0..count.min(candidates) {
            let place = if count <= candidates { number } else { self.draw(count) };
            let offer = self.offers[place];
            let chance = self.chance(offer.expert);
            if least.is_none_or(|(lowest, _)| chance < lowest) {
                least = Some((chance, offer.slot));
            }
            self.examined += 1;
        }
        let (_, slot) = least?;
        self.withdraw(slot);
        Some(slot)
    }

    /// The expert that `slot` is on offer with.
    #[cfg(test)]
    pub(super) fn offer_of(&self, slot: u32) -> Option<u32> {
        self.offers.get(self.place[slot as usize] as usize).map(|offer| offer.expert)
    }

    /// Slots on offer.
    pub fn offered(&self) -> usize {
        self.offers.len()
    }

    /// Slots looked at by [`Policy::victim`] so far.
    pub fn examined(&self) -> u64 {
        self.examined
    }

    /// A place below `count`; the same ones in every run.
    fn draw(&mut self, count: usize) -> usize {
        // Xorshift64*: the high bits of the product are good.
        self.random ^= self.random >> 12;
        self.random ^= self.random << 25;
        self.random ^= self.random >> 27;
        let high = self.random.wrapping_mul(0x2545_f491_4f6c_dd1d) >> 32;
        ((high * count as u64) >> 32) as usize
    }
}

/// Powers of a number below 1, down to where they no longer matter.
#[derive(Debug)]
struct Fading(Vec<f32>);

impl Fading {
    const POWERS_MAX: usize = 4096;

    fn new(keep: f32) -> Self {
        let keep = if keep.is_nan() { 0.0 } else { keep.clamp(0.0, 1.0) };
        let powers = std::iter::successors(Some(1.0_f32), |power| Some(power * keep));
        Self(powers.take(Self::POWERS_MAX).take_while(|power| *power > 1e-6).collect())
    }

    fn after(&self, age: u32) -> f32 {
        self.0.get(age as usize).copied().unwrap_or(0.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn policy(slots: usize) -> Policy {
        Policy::new(2, 100, 2, slots, Tuning::default())
    }

    #[test]
    fn the_expert_used_longest_ago_makes_way_among_equals() {
        let mut policy = policy(3);
        for (slot, expert) in [(0, 5), (1, 6), (2, 7)] {
            policy.requested(&[expert]);
            policy.offer(slot, expert);
        }
        assert_eq!(
            [policy.victim(), policy.victim(), policy.victim(), policy.victim()],
            [Some(0), Some(1), Some(2), None]
        );
    }

    #[test]
    fn an_expert_used_often_outlasts_one_used_just_now() {
        let mut policy = policy(2);
        for round in 0..40 {
            policy.requested(&[3, 10 + round]);
        }
        (50..60).for_each(|expert| policy.requested(&[expert]));
        assert!(policy.chance(3) > policy.chance(59));
        policy.offer(0, 3);
        policy.offer(1, 59);
        assert_eq!(policy.victim(), Some(1));
    }

    #[test]
    fn what_was_learned_counts_until_this_run_knows_better() {
        let mut histogram = Histogram::new(0, 2, 100);
        (0..1000).for_each(|_| histogram.record(0, &[1, 2]));
        let mut policy = policy(2);
        policy.learn(2, &histogram);
        assert!(policy.chance(1) > policy.chance(3));
        assert_eq!(policy.chance(101), 0.0, "nothing is known of the other layer");
        (0..1000).for_each(|_| policy.requested(&[3, 4]));
        assert!(policy.chance(1) < policy.chance(3));
        let mut other = Policy::new(3, 100, 2, 2, Tuning::default());
        other.learn(2, &histogram);
        assert_eq!(other.chance(1), 0.0, "a histogram of another shape");
    }

    #[test]
    fn a_scan_lifts_nothing_above_what_is_used_often() {
        let mut policy = policy(0);
        (0..30).for_each(|round| policy.requested(&[round % 4, 20 + round]));
        let scan: Vec<u32> = (0..100).collect();
        (0..3).for_each(|_| policy.requested(&scan));
        for (often, never) in (0..4).flat_map(|often| (60..100).map(move |never| (often, never))) {
            assert!(policy.chance(often) > 2.0 * policy.chance(never), "{often} {never}");
        }
    }

    #[test]
    fn only_slots_on_offer_are_victims_and_none_is_lost() {
        let mut policy = policy(64);
        let mut offered = [None; 64];
        let mut random = 1_u64;
        for _ in 0..200_000 {
            random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let (slot, expert) = ((random >> 33) as u32 % 64, (random >> 40) as u32 % 200);
            match (random >> 60) % 4 {
                0 | 1 => {
                    policy.offer(slot, expert);
                    offered[slot as usize] = Some(expert);
                }
                2 => assert_eq!(policy.withdraw(slot), offered[slot as usize].take().is_some()),
                _ if random & 1 << 59 == 0 => policy.requested(&[expert]),
                _ => match policy.victim() {
                    Some(victim) => {
                        assert!(offered[victim as usize].take().is_some(), "slot {victim} was not on offer")
                    }
                    None => assert!(offered.iter().all(Option::is_none)),
                },
            }
            assert_eq!(policy.offered(), offered.iter().flatten().count());
        }
        for offer in &policy.offers {
            assert_eq!(offered[offer.slot as usize], Some(offer.expert));
            assert_eq!(policy.offers[policy.place[offer.slot as usize] as usize].slot, offer.slot);
        }
        while let Some(victim) = policy.victim() {
            assert!(offered[victim as usize].take().is_some());
        }
        assert!(offered.iter().all(Option::is_none));
    }

    #[test]
    fn a_victim_costs_as_much_among_a_hundred_thousand_slots_as_among_a_thousand() {
        for slots in [1_000, 100_000] {
            let mut policy = Policy::new(200, 1000, 16, slots, Tuning::default());
            (0..slots as u32).for_each(|slot| policy.offer(slot, slot));
            for _ in 0..50 {
                assert!(policy.victim().is_some());
            }
            assert_eq!(policy.examined(), 50 * Tuning::default().candidates as u64, "{slots} slots");
        }
    }

    #[test]
    fn the_same_accesses_give_the_same_victims() {
        let run = || {
            let mut policy = policy(90);
            (0..90).for_each(|slot| policy.offer(slot, slot));
            (0..50)
                .map(|round| {
                    policy.requested(&[round, round + 7]);
                    policy.victim()
                })
                .collect::<Vec<_>>()
        };
        assert_eq!(run(), run());
    }

    #[test]
    fn odd_input_is_survived() {
        let mut policy = policy(1);
        policy.requested(&[]);
        policy.requested(&[200, 3]);
        policy.requested(&[u32::MAX]);
        policy.requested(&[1, u32::MAX]);
        assert_eq!(policy.chance(u32::MAX), 0.0);
        assert!(!policy.withdraw(0));
        let mut empty = Policy::new(0, 0, 0, 0, Tuning::default());
        empty.requested(&[0]);
        empty.learn(0, &Histogram::new(0, 0, 0));
        assert_eq!(empty.victim(), None);
        let odd = Tuning { recent_keep: f32::NAN, lasting_keep: 2.0, candidates: 0, ..Tuning::default() };
        let mut policy = Policy::new(1, 4, 1, 2, odd);
        policy.requested(&[1]);
        policy.offer(0, 1);
        assert_eq!(policy.victim(), Some(0));
    }
}
