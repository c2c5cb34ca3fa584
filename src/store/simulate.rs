//! Simulated drives and the step loop over them, with a clock that jumps from event to event: the schedule, the slots, the
//! choice of what to keep and the guesses are the store's own.
//!
//! A drive is a pipe: a read ends when its bytes have passed, at the drive's rate, behind those of the reads before it, and
//! not before the latency is over. Every drive has a copy of every expert, so that any may read any piece.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::cache::{Hold, Reserved, Table, View};
use super::catalog::Index;
use super::lookahead::{Ahead, Guess};
use super::schedule::Schedule;
use super::slots::Started;
use crate::synth::rng::Rng;

/// Reads at a time and bytes of each, as the engine's.
const DEPTH: usize = 8;
const PIECE_BYTES: u64 = 2 << 20;
/// Part of a layer's computing that comes before its router has chosen.
const BEFORE_ROUTER: f64 = 0.5;

/// A drive that exists on paper.
#[derive(Debug, Clone)]
pub struct SimulatedDrive {
    /// Bytes a second of large reads.
    pub bytes_per_s: f64,
    /// Time from a read's start to its first byte.
    pub latency: Duration,
    /// Standard deviation of a read's time, as a share of it.
    pub jitter: f64,
}

/// What is run on the drives.
#[derive(Debug, Clone)]
pub struct SimulatedRun {
    /// Layers with routed experts.
    pub moe_layers: usize,
    /// Routed experts of a layer.
    pub experts: usize,
    /// Experts of a token in a layer.
    pub top_k: usize,
    /// Bytes of one expert.
    pub expert_bytes: u64,
    /// Slots, as a share of all experts; two layers' worth of a token at least.
    pub cache_share: f64,
    /// Computing a token takes this long in all.
    pub compute: Duration,
    /// Reads and compute take turns; nothing is guessed, nothing kept.
    pub in_turn: bool,
    /// Share of guessed experts that come true; half of a token's experts are guessed.
    pub precision: f64,
    /// Tokens to decode.
    pub tokens: usize,
    /// Tokens before them that fill the cache and are not counted.
    pub warm_up: usize,
    /// Decides jitter and guesses.
    pub seed: u64,
}

/// What came out.
#[derive(Debug, Clone, PartialEq, serde::Serialize)]
pub struct SimulatedFigures {
    /// Number of drives.
    pub drives: usize,
    /// Tokens a second.
    pub tokens_per_s: f64,
    /// Bytes read a second of run time, in 10⁹.
    pub gb_per_s: f64,
    /// Share of the drives' summed rate that was used while there was something to read.
    pub busy_share: f64,
    /// Share of run time in which there was something to read.
    pub read_time_share: f64,
    /// Share of asked experts that were in memory before anybody asked or guessed.
    pub hit_rate: f64,
    /// Bytes read for a token.
    pub bytes_per_token: f64,
    /// Of them for guesses that came true.
    pub lookahead_useful: f64,
    /// Of them for guesses that did not.
    pub lookahead_wasted: f64,
}

/// Figures of the first drive alone, of the first two, and so on. `routing` begins anew for each: its argument is the
/// token's number, its result `[moe_layers, top_k]`, ascending within a layer.
pub fn ladder(
    drives: &[SimulatedDrive],
    run: &SimulatedRun,
    routing: &mut dyn FnMut(usize) -> Vec<u16>,
) -> Vec<SimulatedFigures> {
    (1..=drives.len()).map(|count| simulate(&drives[..count], run, routing)).collect()
}

/// Runs the step loop.
///
/// # Panics
/// Without a drive, or with sizes that are 0.
pub fn simulate(
    drives: &[SimulatedDrive],
    run: &SimulatedRun,
    routing: &mut dyn FnMut(usize) -> Vec<u16>,
) -> SimulatedFigures {
    assert!(!drives.is_empty() && run.moe_layers * run.experts * run.top_k > 0 && run.expert_bytes > 0);
    let mut world = World::new(drives, run);
    for token in 0..run.warm_up {
        world.token(run, &routing(token));
    }
    world.begin_counting();
    for token in run.warm_up..run.warm_up + run.tokens {
        world.token(run, &routing(token));
    }
    world.figures(drives, run)
}

/// A read that ends.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Event {
    at: Duration,
    ticket: u64,
    drive: usize,
    group: u64,
    bytes: u64,
}

/// An expert on its way.
struct Fill {
    slot: u32,
    pieces: usize,
}

#[derive(Default, Clone)]
struct Counts {
    at: Duration,
    bytes: u64,
    useful: u64,
    wasted: u64,
    asked: u64,
    hits: u64,
    /// Time in which something was queued or being read, and the bytes that came meanwhile.
    reading: Duration,
}

struct World {
    now: Duration,
    schedule: Schedule<u64>,
    pipes: Vec<(SimulatedDrive, Duration)>,
    events: BinaryHeap<Reverse<Event>>,
    table: Table<()>,
    ahead: Ahead,
    fills: FxHashMap<u64, Fill>,
    groups: u64,
    sites: Arc<[u16]>,
    pieces: Vec<u64>,
    rng: Rng,
    counts: Counts,
    base: Counts,
    in_flight: usize,
}

impl World {
    fn new(drives: &[SimulatedDrive], run: &SimulatedRun) -> Self {
        let all = run.moe_layers * run.experts;
        let slots = ((run.cache_share * all as f64) as usize).clamp(2 * run.top_k, all.max(2 * run.top_k));
        let mut table = Table::new(vec![(); slots], run.moe_layers, run.experts);
        table.learn(run.top_k, &super::histogram::Histogram::new(0, 0, 0));
        let count = run.expert_bytes.div_ceil(PIECE_BYTES);
        let pieces = (0..count).map(|piece| (piece + 1) * run.expert_bytes / count - piece * run.expert_bytes / count);
        Self {
            now: Duration::ZERO,
            schedule: Schedule::new(&vec![DEPTH; drives.len()]),
            pipes: drives.iter().map(|drive| (drive.clone(), Duration::ZERO)).collect(),
            events: BinaryHeap::new(),
            table,
            ahead: Ahead::default(),
            fills: FxHashMap::default(),
            groups: 0,
            sites: (0..drives.len() as u16).collect(),
            pieces: pieces.collect(),
            rng: Rng::new(run.seed),
            counts: Counts::default(),
            base: Counts::default(),
            in_flight: 0,
        }
    }

    fn begin_counting(&mut self) {
        self.counts.at = self.now;
        self.counts.useful = self.ahead.useful_bytes;
        self.counts.wasted = self.ahead.wasted_bytes;
        self.base = self.counts.clone();
    }

    fn figures(&self, drives: &[SimulatedDrive], run: &SimulatedRun) -> SimulatedFigures {
        let seconds = (self.now - self.base.at).as_secs_f64().max(1e-9);
        let bytes = (self.counts.bytes - self.base.bytes) as f64;
        let tokens = run.tokens.max(1) as f64;
        let rate: f64 = drives.iter().map(|drive| drive.bytes_per_s).sum();
        let reading = (self.counts.reading - self.base.reading).as_secs_f64();
        let asked = (self.counts.asked - self.base.asked).max(1) as f64;
        SimulatedFigures {
            drives: drives.len(),
            tokens_per_s: run.tokens as f64 / seconds,
            gb_per_s: bytes / seconds / 1e9,
            busy_share: bytes / (reading.max(1e-9) * rate),
            read_time_share: reading / seconds,
            hit_rate: (self.counts.hits - self.base.hits) as f64 / asked,
            bytes_per_token: bytes / tokens,
            lookahead_useful: (self.ahead.useful_bytes - self.base.useful) as f64 / tokens,
            lookahead_wasted: (self.ahead.wasted_bytes - self.base.wasted) as f64 / tokens,
        }
    }

    /// Gives free readers what there is to read.
    fn pump(&mut self) {
        for drive in 0..self.pipes.len() {
            while let Some(taken) = self.schedule.next(drive, self.now) {
                let bytes = self.pieces[taken.job as usize % self.pieces.len()];
                let group = taken.job / self.pieces.len() as u64;
                let (model, free) = &mut self.pipes[drive];
                let noise = 1.0 + model.jitter * self.rng.normal().clamp(-3.0, 3.0);
                let time = Duration::from_secs_f64((bytes as f64 / model.bytes_per_s * noise).max(0.0));
                let at = (*free).max(self.now + model.latency) + time;
                *free = at;
                self.in_flight += 1;
                self.events.push(Reverse(Event { at, ticket: taken.ticket, drive, group, bytes }));
            }
        }
    }

    /// Lets time pass until `until`, or until the next read ends where that is `None`.
    fn advance(&mut self, until: Option<Duration>) {
        loop {
            self.pump();
            let next = self.events.peek().map(|Reverse(event)| event.at);
            let target = match (until, next) {
                (Some(until), Some(next)) if next <= until => next,
                (Some(until), _) => {
                    self.pass(until);
                    return;
                }
                (None, Some(next)) => next,
                (None, None) => return,
            };
            self.pass(target);
            if let Some(Reverse(event)) = self.events.pop() {
                self.land(&event);
            }
            if until.is_none() {
                return;
            }
        }
    }

    fn pass(&mut self, to: Duration) {
        let to = to.max(self.now);
        if self.in_flight > 0 {
            self.counts.reading += to - self.now;
        }
        self.now = to;
    }

    fn land(&mut self, event: &Event) {
        self.in_flight -= 1;
        self.schedule.done(event.drive, event.ticket, self.now);
        self.counts.bytes += event.bytes;
        if let Some(fill) = self.fills.get_mut(&event.group) {
            fill.pieces -= 1;
            if fill.pieces == 0 {
                let slot = fill.slot;
                self.fills.remove(&event.group);
                self.table.complete(slot, (), Ok(()));
            }
        }
    }

    fn start(&mut self, hold: Hold, ahead: bool) -> Started {
        let group = self.groups;
        self.groups += 1;
        let count = self.pieces.len();
        self.fills.insert(group, Fill { slot: hold.slot, pieces: count });
        for number in 0..count {
            let job = group * count as u64 + number as u64;
            self.schedule.submit(job, self.pieces[number], group, &self.sites, ahead, self.now);
        }
        Started { group, pieces: count }
    }

    fn token(&mut self, run: &SimulatedRun, routes: &[u16]) {
        let layer_time = run.compute / run.moe_layers as u32;
        for layer in 0..run.moe_layers {
            let of = |layer: usize| -> Vec<Index> {
                let ids = &routes[layer * run.top_k..(layer + 1) * run.top_k];
                ids.iter().map(|id| (layer * run.experts) as Index + Index::from(*id)).collect()
            };
            let asked = of(layer);
            self.counts.asked += asked.len() as u64;
            if run.in_turn {
                self.layer_in_turn(&asked, layer_time);
                continue;
            }
            self.advance(Some(self.now + layer_time.mul_f64(BEFORE_ROUTER)));
            let guess = (layer + 1 < run.moe_layers).then(|| self.guess(run, layer + 1, &of(layer + 1)));
            self.layer(run, layer, &asked, guess, layer_time.mul_f64(1.0 - BEFORE_ROUTER));
        }
    }

    fn layer_in_turn(&mut self, asked: &[Index], time: Duration) {
        for &index in asked {
            if let Reserved::Absent(hold, ()) = self.table.reserve(index, true) {
                self.start(hold, false);
                self.table.release(hold);
            }
        }
        while !self.fills.is_empty() {
            self.advance(None);
        }
        self.table.clear();
        self.advance(Some(self.now + time));
    }

    fn layer(&mut self, run: &SimulatedRun, layer: usize, asked: &[Index], guess: Option<Vec<Index>>, time: Duration) {
        let mut kept = self.table.begin(asked);
        let guessed = self.settle(layer as u16, asked, run.expert_bytes);
        let mut holds: Vec<Hold> = Vec::with_capacity(asked.len());
        for &index in asked {
            loop {
                match self.table.reserve(index, true) {
                    Reserved::Present(hold) => {
                        self.counts.hits += u64::from(!guessed.iter().any(|guess| guess.index == index));
                        holds.push(hold);
                        break;
                    }
                    Reserved::Absent(hold, ()) => {
                        self.start(hold, false);
                        holds.push(hold);
                        break;
                    }
                    Reserved::Full => self.advance(None),
                }
            }
            self.table.come_to(Some(index), &mut kept);
        }
        guessed.iter().for_each(|guess| self.table.release(guess.hold));
        if let Some(guess) = guess {
            self.look_ahead(layer as u16 + 1, &guess);
        }
        let each = time / asked.len().max(1) as u32;
        while !holds.is_empty() {
            // The first that is there, else the first.
            let ready = holds.iter().position(|hold| matches!(self.table.view(*hold), View::Ready(_) | View::Lapsed));
            let hold = holds.remove(ready.unwrap_or(0));
            while !matches!(self.table.view(hold), View::Ready(_) | View::Lapsed) {
                self.advance(None);
            }
            self.advance(Some(self.now + each));
            self.table.release(hold);
        }
        self.table.come_to(None, &mut kept);
    }

    /// Half of a layer's experts, of which some are others than those that will be asked for.
    fn guess(&mut self, run: &SimulatedRun, layer: usize, truth: &[Index]) -> Vec<Index> {
        let half = truth.len().div_ceil(2);
        let order = self.rng.permutation(truth.len());
        let mut guess = Vec::with_capacity(half);
        for at in order.into_iter().take(half) {
            if self.rng.unit() < run.precision {
                guess.push(truth[at]);
            } else {
                guess.push((layer * run.experts) as Index + self.rng.below(run.experts as u32));
            }
        }
        guess
    }

    fn look_ahead(&mut self, layer: u16, guess: &[Index]) {
        if !self.ahead.pays() {
            return;
        }
        for &index in guess {
            let guess = match self.table.reserve_present(index) {
                Some(hold) => Guess { index, hold, started: None },
                None => {
                    let Some((hold, ())) = self.table.prefetch(index, self.ahead.held()) else { continue };
                    Guess { index, hold, started: Some(self.start(hold, true)) }
                }
            };
            self.ahead.push(layer, guess);
        }
    }

    /// Puts guesses that came true first and drops the others where no read has begun; returns the former.
    fn settle(&mut self, layer: u16, asked: &[Index], expert_bytes: u64) -> Vec<Guess> {
        let (schedule, table, fills, now) = (&mut self.schedule, &mut self.table, &mut self.fills, self.now);
        let (useful, others) = self.ahead.settle(layer, asked, expert_bytes, |guess, started, is_asked| {
            if is_asked {
                schedule.promote(started.group, now);
            } else if schedule.drop_ahead(started.group, started.pieces).is_some() {
                fills.remove(&started.group);
                table.abandon(guess.hold, ());
                return false;
            }
            true
        });
        others.into_iter().for_each(|hold| table.release(hold));
        useful
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::synth::trace::{Trace, TraceShape};

    fn drives(rates: &[f64], jitter: f64) -> Vec<SimulatedDrive> {
        let latency = Duration::from_micros(100);
        rates.iter().map(|rate| SimulatedDrive { bytes_per_s: rate * 1e9, latency, jitter }).collect()
    }

    fn k3(tokens: usize, warm_up: usize) -> SimulatedRun {
        SimulatedRun {
            moe_layers: 92,
            experts: 896,
            top_k: 16,
            expert_bytes: 17_547_264,
            cache_share: 0.04,
            compute: Duration::from_millis(380),
            in_turn: false,
            precision: 0.936,
            tokens,
            warm_up,
            seed: 1,
        }
    }

    fn routing() -> impl FnMut(usize) -> Vec<u16> {
        let mut trace = Trace::new(TraceShape::K3, 3, 4, false);
        move |token| {
            if token == 0 {
                trace = Trace::new(TraceShape::K3, 3, 4, false);
            }
            trace.next_token().to_vec()
        }
    }

    const RATES: [f64; 4] = [13.6, 7.1, 7.1, 5.7];

    #[test]
    fn in_turn_the_published_ladder_comes_out() {
        let run = SimulatedRun { in_turn: true, ..k3(3, 1) };
        let figures = ladder(&drives(&RATES, 0.0), &run, &mut routing());
        for (figures, published) in figures.iter().zip([0.427, 0.625, 0.786, 0.863]) {
            assert!((figures.tokens_per_s / published - 1.0).abs() < 0.05, "{published}: {figures:?}");
            assert!((figures.bytes_per_token / 25.83e9 - 1.0).abs() < 0.001, "{figures:?}");
        }
    }

    #[test]
    fn the_drives_are_kept_at_their_ceiling_and_an_added_one_never_slows() {
        let run = k3(20, 20);
        let figures = ladder(&drives(&RATES, 0.1), &run, &mut routing());
        figures.iter().for_each(|figures| assert!(figures.busy_share > 0.95, "{figures:?}"));
        assert!(figures[3].bytes_per_token < 0.55 * 25.83e9, "{:?}", figures[3]);
        for pair in figures.windows(2) {
            assert!(pair[1].tokens_per_s >= pair[0].tokens_per_s, "{pair:?}");
        }
        // Without jitter, whose dice would fall otherwise. What is a hundredth of the others is read now and then to learn
        // that it still is.
        let without = simulate(&drives(&RATES, 0.0), &run, &mut routing());
        for (rate, at_least) in [(1.0, 1.0), (0.5, 1.0), (0.3, 0.995), (0.1, 0.995)] {
            let slow: Vec<f64> = RATES.into_iter().chain([rate]).collect();
            let with_slow = simulate(&drives(&slow, 0.0), &run, &mut routing());
            let ratio = with_slow.tokens_per_s / without.tokens_per_s;
            assert!(ratio >= at_least, "{rate} GB/s more: {ratio}");
        }
    }

    #[test]
    fn the_same_seed_gives_the_same_figures() {
        let run = k3(2, 1);
        let once = || simulate(&drives(&RATES, 0.1), &run, &mut routing());
        assert_eq!(once(), once());
    }
}
