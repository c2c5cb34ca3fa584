//! Experts that were guessed for the layer to come: read behind all that was asked for, and settled when the router has
//! chosen. A guess costs nothing while drives would idle, and a read while they would not: so it is given up where too few
//! come true, and tried again now and then.

use std::collections::VecDeque;

use super::cache::Hold;
use super::catalog::Index;
use super::slots::Started;

/// The share of guessed reads that must come true for guessing to go on.
const PRECISION_MIN: f64 = 0.35;
/// The share of the unlikelier guesses that must come true for them to be read as well: of these a wrong one costs as much
/// as of the others, and takes the slot of an expert that may be asked for.
const UNLIKELY_PRECISION_MIN: f64 = 0.9;
/// Weight of one layer's guess in the running share.
const WEIGHT: f64 = 1.0 / 64.0;
/// While guessing does not pay, one guess of so many is still made, to see whether it would.
const TRIAL_EVERY: u32 = 64;

/// Guesses in force, and how good guesses were.
pub(crate) struct Ahead {
    layer: u16,
    guesses: Vec<Guess>,
    /// Unlikelier guesses that are not in memory, whether they are read or not.
    unlikely: Vec<Index>,
    /// Guessed, with no slot yet.
    waiting: VecDeque<Index>,
    precision: f64,
    unlikely_precision: f64,
    silent: u32,
    /// Bytes that were read and asked for by the layer they were guessed for.
    pub useful_bytes: u64,
    /// Bytes that were read and not asked for.
    pub wasted_bytes: u64,
    /// Guesses that were dropped before a read began.
    pub dropped: u64,
}

/// An expert that was guessed.
pub(crate) struct Guess {
    /// Which.
    pub index: Index,
    /// Keeps its slot.
    pub hold: Hold,
    /// Its reads; `None` when it was in memory, or on its way.
    pub started: Option<Started>,
}

impl Default for Ahead {
    fn default() -> Self {
        Self {
            layer: 0,
            guesses: Vec::new(),
            unlikely: Vec::new(),
            waiting: VecDeque::new(),
            precision: 1.0,
            unlikely_precision: 0.0,
            silent: 0,
            useful_bytes: 0,
            wasted_bytes: 0,
            dropped: 0,
        }
    }
}

impl Ahead {
    /// Whether the next guess should be acted on.
    pub(crate) fn pays(&mut self) -> bool {
        if self.precision >= PRECISION_MIN {
            return true;
        }
        self.silent = (self.silent + 1) % TRIAL_EVERY;
        self.silent == 0
    }

    /// An unlikelier guess for `layer` that is not in memory. Returns whether it should be read.
    pub(crate) fn push_unlikely(&mut self, layer: u16, index: Index) -> bool {
        self.layer = layer;
        self.unlikely.push(index);
        self.unlikely_precision >= UNLIKELY_PRECISION_MIN
    }

    /// A guess for `layer` that is to have a slot when there is one, after those that wait already.
    pub(crate) fn expect(&mut self, layer: u16, index: Index) {
        self.layer = layer;
        self.waiting.push_back(index);
    }

    /// The guess that is to have the next slot.
    pub(crate) fn next(&mut self) -> Option<(u16, Index)> {
        Some((self.layer, self.waiting.pop_front()?))
    }

    /// `index` has found no slot and goes on waiting.
    pub(crate) fn put_back(&mut self, index: Index) {
        self.waiting.push_front(index);
    }

    /// Guesses that have slots.
    pub(crate) fn held(&self) -> usize {
        self.guesses.len()
    }

    /// A guess for `layer` that has a slot.
    pub(crate) fn push(&mut self, layer: u16, guess: Guess) {
        self.layer = layer;
        self.guesses.push(guess);
    }

    /// The router of `layer` has chosen `asked`, ascending. `act` is told of each guess that is being read whether it came
    /// true, to put it first or to drop it; it returns whether the read goes on. Returns the guesses that came true and are
    /// being read, and the holds of the others, to be released.
    pub(crate) fn settle(
        &mut self,
        layer: u16,
        asked: &[Index],
        expert_bytes: u64,
        mut act: impl FnMut(&Guess, Started, bool) -> bool,
    ) -> (Vec<Guess>, Vec<Hold>) {
        let (mut useful, mut others, mut read) = (Vec::new(), Vec::new(), 0);
        let of_layer = self.layer == layer;
        let is_asked = |index: Index| of_layer && asked.binary_search(&index).is_ok();
        self.dropped += self.waiting.drain(..).filter(|index| !is_asked(*index)).count() as u64;
        for guess in std::mem::take(&mut self.guesses) {
            let is_asked = is_asked(guess.index);
            let Some(started) = guess.started else {
                others.push(guess.hold);
                continue;
            };
            read += 1;
            let goes_on = act(&guess, started, is_asked);
            if is_asked {
                self.useful_bytes += expert_bytes;
                useful.push(guess);
            } else if goes_on {
                self.wasted_bytes += expert_bytes;
                others.push(guess.hold);
            } else {
                self.dropped += 1;
            }
        }
        let unlikely = std::mem::take(&mut self.unlikely);
        if !asked.is_empty() && self.layer == layer {
            if read > 0 {
                self.settled(useful.len() as f64 / f64::from(read));
            }
            if !unlikely.is_empty() {
                let came_true = unlikely.iter().filter(|index| asked.binary_search(index).is_ok()).count();
                let share = came_true as f64 / unlikely.len() as f64;
                self.unlikely_precision += WEIGHT * (share - self.unlikely_precision);
            }
        }
        (useful, others)
    }

    /// A share of a layer's guesses came true.
    fn settled(&mut self, share: f64) {
        self.precision += WEIGHT * (share - self.precision);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn poor_guesses_end_guessing_and_good_ones_bring_it_back() {
        let mut ahead = Ahead::default();
        let mut made = 0;
        for _ in 0..1000 {
            if ahead.pays() {
                made += 1;
                ahead.settled(0.125);
            }
        }
        assert!((50..150).contains(&made), "{made} of 1000 poor guesses were made");
        made = 0;
        for _ in 0..10_000 {
            if ahead.pays() {
                made += 1;
                ahead.settled(1.0);
            }
        }
        assert!(made > 5000, "{made} of 10000 good guesses were made");
    }

    #[test]
    fn unlikelier_guesses_are_read_once_they_have_mostly_come_true_and_no_longer_when_not() {
        let mut ahead = Ahead::default();
        let read_after = |ahead: &mut Ahead, rounds: usize, comes_true: bool| {
            let mut read = 0;
            for _ in 0..rounds {
                read += usize::from(ahead.push_unlikely(3, 9));
                ahead.settle(3, if comes_true { &[8, 9] } else { &[8] }, 1, |_, _, _| true);
            }
            read
        };
        assert!((500..950).contains(&read_after(&mut ahead, 1000, true)), "after a while");
        assert!(read_after(&mut ahead, 1000, false) < 50);
        assert_eq!(read_after(&mut ahead, 100, false), 0);
    }
}
