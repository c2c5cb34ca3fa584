//! A cache that reads nothing: what it would have had in memory, and what it would have read.

use std::time::Instant;

use deltafin::store::trace::Trace;

use super::routing::Guesses;
use super::rules::Rule;

/// What a replay gave.
#[derive(Clone, Copy, Default)]
pub struct Outcome {
    /// Experts that were there because they had been used before.
    pub hits: u64,
    /// Experts that were there because they had been guessed.
    pub useful: u64,
    /// Experts that were guessed and read in vain.
    pub wasted: u64,
    /// Experts asked for.
    pub asked: u64,
    pub seconds: f64,
}

impl Outcome {
    /// Share of what is asked for that was there, guesses aside.
    pub fn rate(self) -> f64 {
        self.hits as f64 / self.asked.max(1) as f64
    }

    /// Of an expert asked for.
    pub fn ns(self) -> f64 {
        self.seconds * 1e9 / self.asked.max(1) as f64
    }

    /// What was read, where 1 is a token without a cache. An expert that was guessed rightly is read once all the same.
    pub fn bytes(self) -> f64 {
        1.0 - self.rate() + self.wasted as f64 / self.asked.max(1) as f64
    }
}

/// Which experts the slots hold.
pub struct Cache<'a> {
    rule: &'a mut dyn Rule,
    slot_of: Vec<Option<u32>>,
    expert_in: Vec<Option<u32>>,
    empty: Vec<u32>,
    /// Experts that were read ahead of the next request.
    ahead: Vec<u32>,
}

impl<'a> Cache<'a> {
    /// Nothing in `slots` slots, for so many `experts` in all layers.
    pub fn new(rule: &'a mut dyn Rule, experts: usize, slots: usize) -> Self {
        let empty = (0..slots as u32).rev().collect();
        Self { rule, slot_of: vec![None; experts], expert_in: vec![None; slots], empty, ahead: Vec::new() }
    }

    /// Loads `experts` as far as there are empty slots.
    pub fn warm(&mut self, experts: &[u32]) {
        for expert in experts {
            let Some(slot) = self.empty.pop() else { return };
            self.put(*expert, slot);
            self.rule.offer(slot, *expert);
        }
    }

    fn put(&mut self, expert: u32, slot: u32) {
        if let Some(old) = self.expert_in[slot as usize].replace(expert) {
            self.slot_of[old as usize] = None;
        }
        self.slot_of[expert as usize] = Some(slot);
    }

    /// Asks for the experts of one layer; as in the store, what is there when they are asked for stays until it was used,
    /// and the rest comes as far ahead as there are slots. Returns how many were there.
    pub fn request(&mut self, experts: &[u32]) -> u64 {
        self.rule.requested(experts);
        let kept = self.expert_in.len() / 2;
        let present = experts.iter().filter_map(|expert| self.slot_of[*expert as usize]);
        present.take(kept).for_each(|slot| self.rule.withdraw(slot));
        let mut hits = 0;
        for part in experts.chunks((self.expert_in.len() / 2).clamp(1, 64)) {
            for expert in part {
                match self.slot_of[*expert as usize] {
                    Some(slot) => {
                        self.rule.withdraw(slot);
                        hits += 1;
                    }
                    None => {
                        let slot = self.empty.pop().or_else(|| self.rule.victim());
                        self.put(*expert, slot.expect("half of the slots are on offer"));
                    }
                }
            }
            for expert in part {
                self.rule.offer(self.slot_of[*expert as usize].expect("it was put there"), *expert);
            }
        }
        hits
    }
}

impl Cache<'_> {
    /// Reads `experts` before they are asked for, as far as there are slots; they stay for the next request.
    fn look_ahead(&mut self, experts: &[u32]) {
        for &expert in experts {
            match self.slot_of[expert as usize] {
                Some(slot) => self.rule.withdraw(slot),
                None => {
                    let Some(slot) = self.empty.pop().or_else(|| self.rule.victim()) else { return };
                    self.put(expert, slot);
                    self.ahead.push(expert);
                }
            }
        }
    }

    /// As [`Cache::request`], counting apart what was read ahead, by `guess`, and letting go of it.
    fn request_after(&mut self, experts: &[u32], guess: &[u32], outcome: &mut Outcome) {
        let ahead = std::mem::take(&mut self.ahead);
        let useful = ahead.iter().filter(|expert| experts.contains(expert)).count() as u64;
        outcome.hits += self.request(experts) - useful;
        outcome.useful += useful;
        outcome.wasted += ahead.len() as u64 - useful;
        outcome.asked += experts.len() as u64;
        for expert in guess {
            if let Some(slot) = self.slot_of[*expert as usize] {
                self.rule.offer(slot, *expert);
            }
        }
    }
}

/// Replays `trace`, with `guesses` of each of its requests read while the one before is served.
pub fn replay_ahead(rule: &mut dyn Rule, trace: &Trace, guesses: &Guesses, slots: usize, warm: &[u32]) -> Outcome {
    let mut cache = Cache::new(rule, trace.layers() * trace.experts(), slots);
    cache.warm(warm);
    let mut outcome = Outcome::default();
    for ((layer, experts), guess) in trace.requests().zip(guesses) {
        let ids = |experts: &[u16]| -> Vec<u32> {
            experts.iter().map(|expert| u32::from(layer) * trace.experts() as u32 + u32::from(*expert)).collect()
        };
        let guess = ids(guess);
        cache.look_ahead(&guess);
        cache.request_after(&ids(experts), &guess, &mut outcome);
    }
    outcome
}

/// Replays `trace`; a warm cache begins with `warm`.
pub fn replay(rule: &mut dyn Rule, trace: &Trace, slots: usize, warm: &[u32]) -> Outcome {
    let mut cache = Cache::new(rule, trace.layers() * trace.experts(), slots);
    cache.warm(warm);
    let mut outcome = Outcome::default();
    let mut ids = Vec::new();
    let start = Instant::now();
    for (layer, experts) in trace.requests() {
        ids.clear();
        ids.extend(experts.iter().map(|expert| u32::from(layer) * trace.experts() as u32 + u32::from(*expert)));
        outcome.hits += cache.request(&ids);
        outcome.asked += ids.len() as u64;
    }
    outcome.seconds = start.elapsed().as_secs_f64();
    outcome
}
