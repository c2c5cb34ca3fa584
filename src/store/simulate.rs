//! Simulated drives and the step loop over them, with a clock that jumps from event to event: the schedule, the slots, the
//! choice of what to keep and the guesses are the store's own.
//!
//! A drive is a pipe: a read ends when its bytes have passed, at the drive's rate, behind those of the reads before it, and
//! not before the latency is over. Now and then a read may hang while those behind it pass, and from some moment on all
//! reads of a drive may fail. Every drive has a copy of every expert, so that any may read any piece.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::Arc;
use std::time::Duration;

use rustc_hash::FxHashMap;

use super::cache::{Hold, Reserved, Table, View};
use super::catalog::Index;
use super::lookahead::{Ahead, Guess};
use super::request::PATIENCE;
use super::schedule::{Failed, Schedule, Taken};
use super::slots::Started;
use crate::synth::rng::Rng;

/// Reads at a time and bytes of each, as the engine's.
const DEPTH: usize = 8;
const PIECE_BYTES: u64 = 2 << 20;
/// Part of a layer's computing that comes before its router has chosen.
const BEFORE_ROUTER: f64 = 0.5;
/// Sets the dice of stalls apart from those of jitter and guesses.
const STALL_SEED: u64 = 0x57a1_1ed0;

/// A drive that exists on paper.
#[derive(Debug, Clone, Default)]
pub struct SimulatedDrive {
    /// Bytes a second of large reads.
    pub bytes_per_s: f64,
    /// Time from a read's start to its first byte.
    pub latency: Duration,
    /// Standard deviation of a read's time, as a share of it.
    pub jitter: f64,
    /// Reads that hang.
    pub stalls: Stalls,
    /// From then on every read fails, those under way too. Not for all drives: somebody has to have the experts.
    pub dies_at: Option<Duration>,
}

/// How often, and how long, a read hangs.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
pub struct Stalls {
    /// Share of reads.
    pub share: f64,
    /// Added to the time of such a read.
    pub time: Duration,
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
    /// Decides jitter, stalls and guesses.
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
    /// Reads that hung.
    pub stalls: u64,
    /// Experts whose read was given up because it hung, to be read elsewhere.
    pub given_up: u64,
    /// Pieces that were read from another drive after a failure.
    pub retries: u64,
}

/// Figures of the first drive alone, of the first two, and so on. `routing` begins anew for each: its argument is the
/// token's number, its result `[moe_layers, top_k]`, ascending within a layer.
pub fn ladder(
    drives: &[SimulatedDrive],
    run: &SimulatedRun,
    routing: &mut dyn FnMut(usize) -> Vec<u16>,
) -> Vec<SimulatedFigures> {
    ladder_from(1, drives, run, routing)
}

/// As [`ladder`], with so many drives at least.
pub(crate) fn ladder_from(
    least: usize,
    drives: &[SimulatedDrive],
    run: &SimulatedRun,
    routing: &mut dyn FnMut(usize) -> Vec<u16>,
) -> Vec<SimulatedFigures> {
    (least..=drives.len()).map(|count| simulate(&drives[..count], run, routing)).collect()
}

/// Runs the step loop.
///
/// # Panics
/// Without a drive that lives, or with sizes that are 0.
pub fn simulate(
    drives: &[SimulatedDrive],
    run: &SimulatedRun,
    routing: &mut dyn FnMut(usize) -> Vec<u16>,
) -> SimulatedFigures {
    assert!(drives.iter().any(|drive| drive.dies_at.is_none()), "somebody has to have the experts");
    assert!(run.moe_layers * run.experts * run.top_k > 0 && run.expert_bytes > 0);
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
    /// Piece `job % pieces` of fill `job / pieces`.
    job: u64,
    fails: bool,
}

/// An expert on its way.
struct Fill {
    hold: Hold,
    /// Those that have not come.
    pieces: usize,
    /// The slot's next owner does not wait for it.
    is_given_up: bool,
}

#[derive(Default, Clone)]
struct Counts {
    at: Duration,
    bytes: u64,
    useful: u64,
    wasted: u64,
    asked: u64,
    hits: u64,
    stalls: u64,
    given_up: u64,
    retries: u64,
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
    stall_dice: Rng,
    counts: Counts,
    base: Counts,
    /// Fills under way that were not given up.
    wanted: usize,
    /// When the model last looked whether a read hangs.
    looked_at: Duration,
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
            stall_dice: Rng::new(run.seed ^ STALL_SEED),
            counts: Counts::default(),
            base: Counts::default(),
            wanted: 0,
            looked_at: Duration::ZERO,
        }
    }

    fn begin_counting(&mut self) {
        self.counts.at = self.now;
        self.counts.useful = self.ahead.useful_bytes;
        self.counts.wasted = self.ahead.wasted_bytes;
        self.counts.retries = self.schedule.retries();
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
            stalls: self.counts.stalls - self.base.stalls,
            given_up: self.counts.given_up - self.base.given_up,
            retries: self.schedule.retries() - self.base.retries,
        }
    }

    fn bytes_of(&self, job: u64) -> u64 {
        self.pieces[job as usize % self.pieces.len()]
    }

    fn group_of(&self, job: u64) -> u64 {
        job / self.pieces.len() as u64
    }

    /// Gives free readers what there is to read.
    fn pump(&mut self) {
        for drive in 0..self.pipes.len() {
            while let Some(Taken { ticket, job, .. }) = self.schedule.next(drive, self.now) {
                if self.fills.get(&self.group_of(job)).is_some_and(|fill| fill.is_given_up) {
                    self.schedule.skipped(drive, ticket, self.now);
                    self.arrive(job);
                    continue;
                }
                let (at, fails) = self.end_of_read(drive, self.bytes_of(job));
                self.events.push(Reverse(Event { at, ticket, drive, job, fails }));
            }
        }
    }

    /// When a read of `bytes` that begins now ends, and whether it fails.
    fn end_of_read(&mut self, drive: usize, bytes: u64) -> (Duration, bool) {
        let (model, free) = &mut self.pipes[drive];
        let first_byte = self.now + model.latency;
        if model.dies_at.is_some_and(|death| death <= self.now) {
            return (first_byte, true);
        }
        let noise = 1.0 + model.jitter * self.rng.normal().clamp(-3.0, 3.0);
        let time = Duration::from_secs_f64((bytes as f64 / model.bytes_per_s * noise).max(0.0));
        let mut at = (*free).max(first_byte) + time;
        *free = at;
        if model.stalls.share > 0.0 && self.stall_dice.unit() < model.stalls.share {
            self.counts.stalls += 1;
            at = at.saturating_add(model.stalls.time);
        }
        match model.dies_at {
            Some(death) if death < at => (death, true),
            _ => (at, false),
        }
    }

    /// Lets time pass until `until`; where that is `None` until the next read ends, or until it is time to look whether one
    /// hangs.
    fn advance(&mut self, until: Option<Duration>) {
        let patience = self.now + PATIENCE;
        loop {
            self.pump();
            let next = self.events.peek().map(|Reverse(event)| event.at);
            let target = until.unwrap_or(patience);
            let Some(next) = next.filter(|next| *next <= target) else {
                self.pass(target);
                return;
            };
            self.pass(next);
            if let Some(Reverse(event)) = self.events.pop() {
                self.land(&event);
            }
            if until.is_none() {
                return;
            }
        }
    }

    /// The model waits for a read: the next one ends, or one that hangs is given up.
    fn wait(&mut self) {
        self.advance(None);
        if self.now < self.looked_at + PATIENCE {
            return;
        }
        self.looked_at = self.now;
        let (groups, ..) = self.schedule.overdue(self.now);
        for group in groups {
            self.give_up(group);
        }
    }

    /// The expert of fill `group`, a read of which hangs, can be asked for again at once, in another slot.
    fn give_up(&mut self, group: u64) {
        let Some(fill) = self.fills.get_mut(&group) else { return };
        if !std::mem::replace(&mut fill.is_given_up, true) {
            self.counts.given_up += 1;
            self.wanted -= 1;
            if self.table.is_live(fill.hold) {
                self.table.forsake(fill.hold.slot);
            }
        }
        for job in self.schedule.cancel(group) {
            self.arrive(job);
        }
    }

    fn pass(&mut self, to: Duration) {
        let to = to.max(self.now);
        if self.wanted > 0 {
            self.counts.reading += to - self.now;
        }
        self.now = to;
    }

    fn land(&mut self, event: &Event) {
        if event.fails {
            let failed = self.schedule.failed(event.drive, event.ticket, event.job, self.now);
            assert!(matches!(failed, Failed::Again(_)), "a drive that lives never fails");
            return;
        }
        self.schedule.done(event.drive, event.ticket, self.now);
        self.counts.bytes += self.bytes_of(event.job);
        self.arrive(event.job);
    }

    /// A piece came, or need not come any more.
    fn arrive(&mut self, job: u64) {
        let group = self.group_of(job);
        let Some(fill) = self.fills.get_mut(&group) else { return };
        fill.pieces -= 1;
        if fill.pieces == 0 {
            let hold = fill.hold;
            self.wanted -= usize::from(!fill.is_given_up);
            self.fills.remove(&group);
            self.table.end(hold, (), Ok(()));
        }
    }

    /// A reservation of `index`, which is read where it is not there; and whether it was there.
    fn reserve(&mut self, index: Index) -> (Hold, bool) {
        loop {
            match self.table.reserve(index, true) {
                Reserved::Present(hold) => return (hold, true),
                Reserved::Absent(hold, ()) => {
                    self.start(hold, false);
                    return (hold, false);
                }
                Reserved::Full if self.table.replace(|| Some(())) => {}
                Reserved::Full => self.wait(),
            }
        }
    }

    /// Waits until the expert behind `hold` is there. Returns its reservation, a new one where its read was given up.
    fn until_ready(&mut self, index: Index, mut hold: Hold) -> Hold {
        loop {
            match self.table.view(hold) {
                View::Ready(_) => return hold,
                View::Lapsed => hold = self.reserve(index).0,
                View::Filling | View::Failed(_) => self.wait(),
            }
        }
    }

    fn start(&mut self, hold: Hold, ahead: bool) -> Started {
        let group = self.groups;
        self.groups += 1;
        let count = self.pieces.len();
        self.fills.insert(group, Fill { hold, pieces: count, is_given_up: false });
        self.wanted += 1;
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
        let holds: Vec<Hold> = asked.iter().map(|index| self.reserve(*index).0).collect();
        for (&index, hold) in asked.iter().zip(holds) {
            let hold = self.until_ready(index, hold);
            self.table.release(hold);
        }
        self.table.clear();
        self.advance(Some(self.now + time));
    }

    fn layer(&mut self, run: &SimulatedRun, layer: usize, asked: &[Index], guess: Option<Vec<Index>>, time: Duration) {
        let mut kept = self.table.begin(asked);
        let guessed = self.settle(layer as u16, asked, run.expert_bytes);
        let mut holds: Vec<Hold> = Vec::with_capacity(asked.len());
        for &index in asked {
            let (hold, was_there) = self.reserve(index);
            self.counts.hits += u64::from(was_there && !guessed.iter().any(|guess| guess.index == index));
            holds.push(hold);
            self.table.come_to(Some(index), &mut kept);
        }
        guessed.iter().for_each(|guess| self.table.release(guess.hold));
        if let Some(guess) = guess {
            self.look_ahead(layer as u16 + 1, &guess);
        }
        let each = time / asked.len().max(1) as u32;
        let mut left: Vec<(Index, Hold)> = asked.iter().copied().zip(holds).collect();
        while !left.is_empty() {
            // The first that is there, else the first.
            let ready = left.iter().position(|(_, hold)| matches!(self.table.view(*hold), View::Ready(_)));
            let (index, hold) = left.remove(ready.unwrap_or(0));
            let hold = self.until_ready(index, hold);
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
        let wanted = &mut self.wanted;
        let (useful, others) = self.ahead.settle(layer, asked, expert_bytes, |guess, started, is_asked| {
            if is_asked {
                schedule.promote(started.group, now);
            } else if schedule.drop_ahead(started.group, started.pieces).is_some() {
                fills.remove(&started.group);
                *wanted -= 1;
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
mod tests;
