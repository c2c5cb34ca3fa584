//! The rules that are compared: which slot to give up. The one the store uses comes from the library.

use std::collections::BTreeSet;

use deltafin::store::histogram::Histogram;
use deltafin::store::policy::{Policy, Tuning};
use deltafin::store::trace::Trace;

/// A rule; slots on offer are those that may be given up.
pub trait Rule {
    /// The experts of one layer are asked for.
    fn requested(&mut self, experts: &[u32]);
    /// `slot` with `expert` may be given up.
    fn offer(&mut self, slot: u32, expert: u32);
    /// `slot` may not be given up.
    fn withdraw(&mut self, slot: u32);
    /// Gives a slot up.
    fn victim(&mut self) -> Option<u32>;
}

impl Rule for Policy {
    fn requested(&mut self, experts: &[u32]) {
        Policy::requested(self, experts);
    }

    fn offer(&mut self, slot: u32, expert: u32) {
        Policy::offer(self, slot, expert);
    }

    fn withdraw(&mut self, slot: u32) {
        Policy::withdraw(self, slot);
    }

    fn victim(&mut self) -> Option<u32> {
        Policy::victim(self)
    }
}

/// The store's own rule, for a model of the shape of `histogram`.
pub fn hybrid(histogram: &Histogram, top_k: usize, slots: usize, tuning: Tuning) -> Policy {
    let (layers, experts) = histogram.shape();
    let mut policy = Policy::new(layers, experts, top_k, slots, tuning);
    policy.learn(top_k, histogram);
    policy
}

/// A rule that always gives up the slot with the least key. An expert's key changes only when it is asked for.
pub struct Ordered<K> {
    keys: K,
    /// Key and slot of what is on offer.
    offers: BTreeSet<(u64, u32)>,
    /// `[slots]`.
    offered: Vec<Option<u64>>,
}

/// What an [`Ordered`] rule goes by.
pub trait Keys {
    /// `expert` is asked for.
    fn used(&mut self, expert: u32);
    /// All experts of a request were told.
    fn next(&mut self);
    /// What `expert` is worth.
    fn key(&self, expert: u32) -> u64;
}

impl<K: Keys> Ordered<K> {
    /// Nothing on offer.
    pub fn new(keys: K, slots: usize) -> Self {
        Self { keys, offers: BTreeSet::new(), offered: vec![None; slots] }
    }
}

impl<K: Keys> Rule for Ordered<K> {
    fn requested(&mut self, experts: &[u32]) {
        experts.iter().for_each(|expert| self.keys.used(*expert));
        self.keys.next();
    }

    fn offer(&mut self, slot: u32, expert: u32) {
        let key = self.keys.key(expert);
        self.offered[slot as usize] = Some(key);
        self.offers.insert((key, slot));
    }

    fn withdraw(&mut self, slot: u32) {
        if let Some(key) = self.offered[slot as usize].take() {
            self.offers.remove(&(key, slot));
        }
    }

    fn victim(&mut self) -> Option<u32> {
        let (_, slot) = self.offers.pop_first()?;
        self.offered[slot as usize] = None;
        Some(slot)
    }
}

/// The request that used an expert last.
pub struct Recency {
    now: u64,
    last: Vec<u64>,
}

impl Recency {
    /// Nothing used, of `experts` in all layers.
    pub fn new(experts: usize) -> Self {
        Self { now: 1, last: vec![0; experts] }
    }
}

impl Keys for Recency {
    fn used(&mut self, expert: u32) {
        self.last[expert as usize] = self.now;
    }

    fn next(&mut self) {
        self.now += 1;
    }

    fn key(&self, expert: u32) -> u64 {
        self.last[expert as usize]
    }
}

/// Uses of an expert, those of `half_life` requests ago counting half. Kept as a logarithm of the sum in which later uses
/// weigh more, so that fading changes no key.
pub struct Frequency {
    now: f64,
    step: f64,
    /// Base-2 logarithm of the sum.
    sums: Vec<f64>,
}

impl Frequency {
    /// Nothing used, of `experts` in all layers.
    pub fn new(experts: usize, half_life: f64) -> Self {
        Self { now: 0.0, step: 1.0 / half_life, sums: vec![f64::NEG_INFINITY; experts] }
    }
}

impl Keys for Frequency {
    fn used(&mut self, expert: u32) {
        let sum = &mut self.sums[expert as usize];
        *sum = self.now + (1.0 + (*sum - self.now).exp2()).log2();
    }

    fn next(&mut self) {
        self.now += self.step;
    }

    fn key(&self, expert: u32) -> u64 {
        let sum = self.sums[expert as usize];
        // Sums of what was used are not negative, and the bits of such numbers sort as they do.
        if sum < 0.0 { 0 } else { sum.to_bits() }
    }
}

/// Belady's optimum: the request that will use an expert next, turned round. Sees the whole trace beforehand.
pub struct Future {
    now: usize,
    /// For each expert, the requests that use it, ascending.
    uses: Vec<Vec<u32>>,
    at: Vec<usize>,
}

impl Future {
    /// For `trace`.
    pub fn new(trace: &Trace) -> Self {
        let mut uses = vec![Vec::new(); trace.layers() * trace.experts()];
        for (number, (layer, experts)) in trace.requests().enumerate() {
            for expert in experts {
                uses[usize::from(layer) * trace.experts() + usize::from(*expert)].push(number as u32);
            }
        }
        let at = vec![0; uses.len()];
        Self { now: 0, uses, at }
    }
}

impl Keys for Future {
    fn used(&mut self, expert: u32) {
        self.at[expert as usize] += 1;
    }

    fn next(&mut self) {
        self.now += 1;
    }

    fn key(&self, expert: u32) -> u64 {
        let next = self.uses[expert as usize].get(self.at[expert as usize]);
        u64::from(next.map_or(0, |next| u32::MAX - next))
    }
}
