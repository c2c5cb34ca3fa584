//! Which drive reads which piece, and when: queues, rates and the health of drives. Pure bookkeeping: it owns no thread, no
//! file and no clock. The store's readers drive it with the time of day, the simulator with a clock of its own.
//!
//! A piece goes to the copy that is expected to finish it first: (what the drive has in hand + the piece) / its measured
//! rate. A drive that runs dry takes a piece from the end of another's queue if it would finish it earlier, so an error of
//! the estimate costs one piece, not a queue; and a slow drive is never what all wait for. What the model asked for goes
//! before what it may ask for.

use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// Time since some fixed moment.
pub(crate) type Time = Duration;

/// A set of drives, by number: bit i is drive i.
pub(crate) type Drives = u64;

/// Drives at most.
pub(crate) const DRIVES_MAX: usize = 64;
/// Copies of a piece at most; further ones are not used.
pub(crate) const SITES_MAX: usize = 32;

/// A drive that was never measured is taken for so fast, until its first reads say otherwise.
const PRIOR_RATE: f64 = 2e9;
const PRIOR_BYTES: f64 = 4e6;
/// Measurements fade with this time constant, in seconds of reading.
const RATE_MEMORY: f64 = 2.0;
/// Weight of what was measured with few reads in flight, which shows latency rather than rate.
const UNSATURATED: f64 = 0.1;
/// Latency is no excuse for a read that was alone and took more than so many times as long as the rate says.
const LATENCY_FACTOR: f64 = 2.0;
/// An idle drive is trusted with more the longer it idles, up to twice its measured rate: else a rate once found low would
/// never be measured again. A drive that is slow indeed makes all wait for such a trial, so they are rare.
const TRUST_AFTER: f64 = 60.0;

/// Wait after a first failure; doubles with each further one.
const BACK_OFF: Duration = Duration::from_millis(250);
const BACK_OFF_MAX: Duration = Duration::from_secs(60);
/// A read is overdue after this, or after so many times what it should take.
const OVERDUE_MIN: Duration = Duration::from_secs(5);
const OVERDUE_FACTOR: f64 = 20.0;

/// Seconds by which a drive counts as further away while it waits after a failure, while it does so and a read of it hangs,
/// and while all its reads hang.
const FAR_WHEN_DOWN: f64 = 1e6;
const FAR_WHEN_HANGING: f64 = 1e7;
const FAR_WHEN_STUCK: f64 = 1e9;

/// Pieces at the end of another drive's queue that an idle drive looks at.
const STEAL_DEPTH: usize = 8;

/// Pieces of work `J` for several drives.
pub(crate) struct Schedule<J> {
    drives: Vec<DriveState<J>>,
    tickets: u64,
    /// Pieces that were read from another copy after a failure.
    retries: u64,
    overdue_min: Duration,
}

struct DriveState<J> {
    demand: VecDeque<Piece<J>>,
    ahead: VecDeque<Piece<J>>,
    demand_bytes: u64,
    ahead_bytes: u64,
    flights: Vec<Flight>,
    flight_bytes: u64,
    /// Reads at a time.
    depth: usize,
    rate: Rate,
    /// Since when it has nothing in flight.
    idle_since: Time,
    errors: u32,
    retry_at: Option<Time>,
}

struct Piece<J> {
    job: J,
    what: What,
}

/// A piece, apart from its job.
#[derive(Clone)]
struct What {
    bytes: u64,
    /// Pieces of one fill have one number.
    group: u64,
    /// Drive of each copy.
    sites: Arc<[u16]>,
    /// Drives of copies that the whole fill could be read from instead.
    elsewhere: Drives,
    /// Copies that failed.
    tried: u32,
    /// The copy it is queued for.
    site: u8,
    ahead: bool,
}

/// A read under way.
struct Flight {
    ticket: u64,
    what: What,
    began: Time,
    is_overdue: bool,
}

/// A piece for a reader.
pub(crate) struct Taken<J> {
    /// What to give back when it is done.
    pub ticket: u64,
    /// The work.
    pub job: J,
    /// Which copy to read.
    pub site: usize,
}

/// What becomes of a piece whose read failed.
pub(crate) enum Failed<J> {
    /// It is queued for another copy; these drives have something to do.
    Again(Drives),
    /// There is no other copy.
    Lost(J),
}

/// Bytes and seconds of reading, faded.
#[derive(Clone, Copy)]
struct Rate {
    bytes: f64,
    seconds: f64,
    /// Since when bytes are on their way that are not counted.
    mark: Time,
}

impl Rate {
    /// `saturated`: many reads were in flight; `alone`: no other was, from its begin to its end.
    fn finished(&mut self, bytes: u64, now: Time, saturated: bool, alone: bool) {
        let seconds = now.saturating_sub(self.mark).as_secs_f64();
        self.mark = now;
        let (bytes, expected) = (bytes as f64, self.per_second() * seconds);
        // Of reads that overlap, single ones look fast or slow by chance: only one that was alone proves something.
        let is_proof = alone && (bytes > expected || LATENCY_FACTOR * bytes < expected);
        let weight = if saturated || is_proof { 1.0 } else { UNSATURATED };
        let keep = (-weight * seconds / RATE_MEMORY).exp();
        self.bytes = self.bytes * keep + weight * bytes;
        self.seconds = self.seconds * keep + weight * seconds;
    }

    fn per_second(&self) -> f64 {
        self.bytes / self.seconds.max(1e-9)
    }
}

impl<J> DriveState<J> {
    fn new(depth: usize) -> Self {
        Self {
            demand: VecDeque::new(),
            ahead: VecDeque::new(),
            demand_bytes: 0,
            ahead_bytes: 0,
            flights: Vec::new(),
            flight_bytes: 0,
            depth: depth.max(1),
            rate: Rate { bytes: PRIOR_BYTES, seconds: PRIOR_BYTES / PRIOR_RATE, mark: Time::ZERO },
            idle_since: Time::ZERO,
            errors: 0,
            retry_at: None,
        }
    }

    fn rate(&self, now: Time) -> f64 {
        let idle = if self.flights.is_empty() { now.saturating_sub(self.idle_since).as_secs_f64() } else { 0.0 };
        self.rate.per_second() * (1.0 + (idle / TRUST_AFTER).min(1.0))
    }

    /// Seconds until `bytes` more would be there.
    fn finish(&self, bytes: u64, ahead: bool, now: Time) -> f64 {
        let before = self.flight_bytes + self.demand_bytes + if ahead { self.ahead_bytes } else { 0 };
        (before + bytes) as f64 / self.rate(now)
    }

    fn is_down(&self, now: Time) -> bool {
        self.retry_at.is_some_and(|at| now < at) || self.is_stuck()
    }

    /// Whether every read it can have under way hangs: what is queued for it would wait for them, however long ago it failed.
    fn is_stuck(&self) -> bool {
        self.flights.len() >= self.depth && self.flights.iter().all(|flight| flight.is_overdue)
    }

    /// Whether a read hangs and nothing came since that was found: a drive that delivers meanwhile is as good as any.
    fn is_hanging(&self) -> bool {
        self.errors > 0 && self.flights.iter().any(|flight| flight.is_overdue)
    }

    /// Seconds until `bytes` more would be there; later than from any drive in order for one that is not.
    fn arrival(&self, bytes: u64, ahead: bool, now: Time) -> f64 {
        let far = match (self.is_stuck(), self.is_down(now)) {
            (true, _) => FAR_WHEN_STUCK,
            (false, true) if self.is_hanging() => FAR_WHEN_HANGING,
            (false, true) => FAR_WHEN_DOWN,
            (false, false) => 0.0,
        };
        self.finish(bytes, ahead, now) + far
    }

    fn queue(&mut self, piece: Piece<J>) {
        if piece.what.ahead {
            self.ahead_bytes += piece.what.bytes;
            self.ahead.push_back(piece);
        } else {
            self.demand_bytes += piece.what.bytes;
            self.demand.push_back(piece);
        }
    }

    /// Takes pieces of `group` out of both queues, or of the one of what may be asked for.
    fn withdraw(&mut self, group: u64, ahead_only: bool) -> Vec<Piece<J>> {
        let mut taken = Vec::new();
        let (mut demand_bytes, mut ahead_bytes) = (0, 0);
        if !ahead_only {
            for piece in extract(&mut self.demand, |what| what.group == group) {
                demand_bytes += piece.what.bytes;
                taken.push(piece);
            }
        }
        for piece in extract(&mut self.ahead, |what| what.group == group) {
            ahead_bytes += piece.what.bytes;
            taken.push(piece);
        }
        self.demand_bytes -= demand_bytes;
        self.ahead_bytes -= ahead_bytes;
        taken
    }
}

/// Takes what fits out of a queue; the order of the rest stays.
fn extract<J>(queue: &mut VecDeque<Piece<J>>, fits: impl Fn(&What) -> bool) -> Vec<Piece<J>> {
    let mut taken = Vec::new();
    for _ in 0..queue.len() {
        if let Some(piece) = queue.pop_front() {
            if fits(&piece.what) {
                taken.push(piece);
            } else {
                queue.push_back(piece);
            }
        }
    }
    taken
}

impl<J> Schedule<J> {
    /// One drive for each of `depths`, which is how many reads it is given at a time.
    ///
    /// # Panics
    /// With more than [`DRIVES_MAX`] drives.
    pub(crate) fn new(depths: &[usize]) -> Self {
        assert!(depths.len() <= DRIVES_MAX, "a set of drives has a bit for each");
        Self {
            drives: depths.iter().map(|depth| DriveState::new(*depth)).collect(),
            tickets: 0,
            retries: 0,
            overdue_min: OVERDUE_MIN,
        }
    }

    /// Calls reads overdue after this, however slow the drive.
    #[cfg(test)]
    pub(crate) fn overdue_after(&mut self, time: Duration) {
        self.overdue_min = time;
    }

    /// Pieces that were read from another copy after a failure.
    pub(crate) fn retries(&self) -> u64 {
        self.retries
    }

    /// An expert is read from another copy, of another kind or because the bytes were wrong.
    pub(crate) fn count_retry(&mut self) {
        self.retries += 1;
    }

    /// Whether anything is queued that a further reader of `drive` may take.
    pub(crate) fn has_more(&self, drive: usize) -> bool {
        !self.drives[drive].ahead.is_empty() || self.drives.iter().any(|state| !state.demand.is_empty())
    }

    /// Failures of `drive` since it last delivered.
    pub(crate) fn errors(&self, drive: usize) -> u32 {
        self.drives[drive].errors
    }

    /// Seconds until `bytes` would have come from the best of `sites`; drives that are down count as far away.
    pub(crate) fn expected(&self, sites: &[u16], bytes: u64, ahead: bool, now: Time) -> f64 {
        let of = |site: &u16| self.drives[usize::from(*site)].arrival(bytes, ahead, now);
        sites.iter().map(of).fold(f64::INFINITY, f64::min)
    }

    /// Queues a piece of fill `group`, `sites` being the drives of its copies; `ahead` when nobody has asked for it yet.
    /// Returns the drives to wake.
    ///
    /// # Panics
    /// Without a site.
    pub(crate) fn submit(
        &mut self,
        job: J,
        bytes: u64,
        group: u64,
        sites: &Arc<[u16]>,
        ahead: bool,
        now: Time,
    ) -> Drives {
        self.submit_one_of(job, bytes, group, sites, 0, ahead, now)
    }

    /// As [`Schedule::submit`], with the drives where the whole fill could be read `elsewhere`, should the read hang.
    #[expect(clippy::too_many_arguments, reason = "a piece has so many properties")]
    pub(crate) fn submit_one_of(
        &mut self,
        job: J,
        bytes: u64,
        group: u64,
        sites: &Arc<[u16]>,
        elsewhere: Drives,
        ahead: bool,
        now: Time,
    ) -> Drives {
        let what = What { bytes, group, sites: Arc::clone(sites), elsewhere, tried: 0, site: 0, ahead };
        match self.place(Piece { job, what }, now) {
            Failed::Again(drives) => drives,
            Failed::Lost(_) => unreachable!("a piece has a copy somewhere"),
        }
    }

    /// Queues a piece where it would be read first, among the copies that have not failed.
    fn place(&mut self, mut piece: Piece<J>, now: Time) -> Failed<J> {
        let what = &mut piece.what;
        let untried = (0..what.sites.len().min(SITES_MAX)).filter(|site| what.tried & 1 << site == 0);
        let time = |site: &usize| self.drives[usize::from(what.sites[*site])].arrival(what.bytes, what.ahead, now);
        let best = untried.min_by(|a, b| time(a).total_cmp(&time(b)));
        let Some(site) = best else { return Failed::Lost(piece.job) };
        what.site = site as u8;
        let number = usize::from(what.sites[site]);
        self.drives[number].queue(piece);
        Failed::Again(1 << number)
    }

    /// A piece for a free reader of `drive`; `None` when there is nothing for it now.
    pub(crate) fn next(&mut self, drive: usize, now: Time) -> Option<Taken<J>> {
        let state = &mut self.drives[drive];
        if state.flights.len() >= state.depth {
            return None;
        }
        let piece = if let Some(piece) = state.demand.pop_front() {
            state.demand_bytes -= piece.what.bytes;
            piece
        } else if state.is_down(now) {
            return None;
        } else if let Some(piece) = self.steal(drive, now) {
            piece
        } else {
            let state = &mut self.drives[drive];
            let piece = state.ahead.pop_front()?;
            state.ahead_bytes -= piece.what.bytes;
            piece
        };
        let state = &mut self.drives[drive];
        if state.flights.iter().all(|flight| flight.is_overdue) {
            state.rate.mark = now;
        }
        self.tickets += 1;
        let ticket = self.tickets;
        state.flight_bytes += piece.what.bytes;
        let site = usize::from(piece.what.site);
        state.flights.push(Flight { ticket, what: piece.what, began: now, is_overdue: false });
        Some(Taken { ticket, job: piece.job, site })
    }

    /// A demanded piece that is queued elsewhere and would be there earlier from `drive`.
    fn steal(&mut self, drive: usize, now: Time) -> Option<Piece<J>> {
        let mut best: Option<(f64, usize, usize, usize)> = None;
        for (number, other) in self.drives.iter().enumerate() {
            if number == drive || other.demand.is_empty() {
                continue;
            }
            let mut before = other.flight_bytes + other.demand_bytes;
            for (back, piece) in other.demand.iter().rev().take(STEAL_DEPTH).enumerate() {
                let there = before as f64 / other.rate(now);
                before -= piece.what.bytes;
                let what = &piece.what;
                let site = (0..what.sites.len().min(SITES_MAX))
                    .find(|site| usize::from(what.sites[*site]) == drive && what.tried & 1 << site == 0);
                let Some(site) = site else { continue };
                let gain = there - self.drives[drive].finish(what.bytes, false, now);
                if gain > 0.0 && best.is_none_or(|(most, ..)| gain > most) {
                    best = Some((gain, number, other.demand.len() - 1 - back, site));
                }
            }
        }
        let (_, number, at, site) = best?;
        let other = &mut self.drives[number];
        let mut piece = other.demand.remove(at)?;
        other.demand_bytes -= piece.what.bytes;
        piece.what.site = site as u8;
        Some(piece)
    }

    fn land(&mut self, drive: usize, ticket: u64, now: Time) -> Option<Flight> {
        let state = &mut self.drives[drive];
        let at = state.flights.iter().position(|flight| flight.ticket == ticket)?;
        let flight = state.flights.swap_remove(at);
        state.flight_bytes -= flight.what.bytes;
        if state.flights.is_empty() {
            state.idle_since = now;
        }
        Some(flight)
    }

    /// The piece of `ticket` was not read, for nobody waits for it: this says nothing of the drive.
    pub(crate) fn skipped(&mut self, drive: usize, ticket: u64, now: Time) {
        self.land(drive, ticket, now);
    }

    /// The read of `ticket` delivered. Returns idle drives that may now take over from a busy one.
    pub(crate) fn done(&mut self, drive: usize, ticket: u64, now: Time) -> Drives {
        let state = &mut self.drives[drive];
        let saturated = 2 * state.flights.len() >= state.depth;
        let Some(flight) = self.land(drive, ticket, now) else { return 0 };
        let state = &mut self.drives[drive];
        if flight.is_overdue {
            // How long it hung says nothing of the rate, which would otherwise keep the drive out of use for good.
            state.rate.mark = now;
        } else {
            let alone = state.flights.is_empty() && state.rate.mark == flight.began;
            state.rate.finished(flight.what.bytes, now, saturated, alone);
            (state.errors, state.retry_at) = (0, None);
        }
        if state.demand.len() < 2 {
            return 0;
        }
        let idle = |state: &DriveState<J>| state.flights.is_empty() && state.demand.is_empty();
        self.drives.iter().enumerate().filter(|(_, state)| idle(state)).fold(0, |set, (number, _)| set | 1 << number)
    }

    /// The read of `ticket` failed: `job` goes to another copy, and what is queued for `drive` too where it can.
    pub(crate) fn failed(&mut self, drive: usize, ticket: u64, job: J, now: Time) -> Failed<J> {
        let Some(flight) = self.land(drive, ticket, now) else { return Failed::Lost(job) };
        let mut wake = self.put_down(drive, now);
        let mut what = flight.what;
        what.tried |= 1 << what.site;
        match self.place(Piece { job, what }, now) {
            Failed::Again(drives) => {
                self.retries += 1;
                wake |= drives;
                Failed::Again(wake)
            }
            lost => lost,
        }
    }

    /// `drive` failed: it gets nothing for a while, and what it has queued goes elsewhere where it can. Returns the drives
    /// to wake.
    pub(crate) fn put_down(&mut self, drive: usize, now: Time) -> Drives {
        let state = &mut self.drives[drive];
        state.errors = state.errors.saturating_add(1);
        let wait = BACK_OFF.saturating_mul(1 << (state.errors - 1).min(16)).min(BACK_OFF_MAX);
        state.retry_at = Some(now + wait);
        let queued: Vec<_> = state.demand.drain(..).chain(state.ahead.drain(..)).collect();
        (state.demand_bytes, state.ahead_bytes) = (0, 0);
        let mut wake = 0;
        for piece in queued {
            match self.place(piece, now) {
                Failed::Again(drives) => wake |= drives,
                Failed::Lost(_) => unreachable!("a queued piece has an untried copy"),
            }
        }
        wake
    }

    /// Fills that wait for a read which should have ended long ago and which another drive could do. Their drives are put
    /// down; each read is reported once. Returns the drives to wake too.
    pub(crate) fn overdue(&mut self, now: Time) -> (Vec<u64>, Vec<usize>, Drives) {
        let (mut groups, mut stuck, mut wake) = (Vec::new(), Vec::new(), 0);
        for number in 0..self.drives.len() {
            let state = &self.drives[number];
            let expected = state.flight_bytes as f64 / state.rate.per_second();
            let slow = Duration::try_from_secs_f64(OVERDUE_FACTOR * expected).unwrap_or(self.overdue_min);
            let patience = slow.max(self.overdue_min);
            let mut found = false;
            for at in 0..self.drives[number].flights.len() {
                let flight = &self.drives[number].flights[at];
                if flight.is_overdue || now.saturating_sub(flight.began) < patience {
                    continue;
                }
                let what = &flight.what;
                // One that failed a while ago may do it now; to wait for the end of its back-off would be to hang too.
                let can = |other: usize| other != number && !self.drives[other].is_hanging();
                let is_untried = |site: &usize| what.tried & 1 << site == 0;
                let mut sites = (0..what.sites.len().min(SITES_MAX)).filter(is_untried);
                let elsewhere = sites.any(|site| can(usize::from(what.sites[site])))
                    || (0..self.drives.len()).any(|other| what.elsewhere & 1 << other != 0 && can(other));
                if elsewhere {
                    groups.push(what.group);
                    self.drives[number].flights[at].is_overdue = true;
                    found = true;
                }
            }
            if found {
                stuck.push(number);
                wake |= self.put_down(number, now);
            }
            if self.drives[number].is_stuck() {
                // What had to stay in its queue waits for the reads that hang, and may have nothing under way itself.
                let can = |other: &usize| *other != number && !self.drives[*other].is_hanging();
                let able = (0..self.drives.len()).filter(can).fold(0, |set: Drives, other| set | 1 << other);
                let state = &self.drives[number];
                let queued = state.demand.iter().chain(&state.ahead);
                groups.extend(queued.filter(|piece| piece.what.elsewhere & able != 0).map(|piece| piece.what.group));
            }
        }
        groups.sort_unstable();
        groups.dedup();
        (groups, stuck, wake)
    }

    /// Fill `group` is asked for now: its queued pieces go before all that may be asked for. Returns the drives to wake.
    pub(crate) fn promote(&mut self, group: u64, now: Time) -> Drives {
        let mut wake = 0;
        for number in 0..self.drives.len() {
            for mut piece in self.drives[number].withdraw(group, true) {
                piece.what.ahead = false;
                match self.place(piece, now) {
                    Failed::Again(drives) => wake |= drives,
                    Failed::Lost(_) => unreachable!("a queued piece has an untried copy"),
                }
            }
            for flight in &mut self.drives[number].flights {
                flight.what.ahead &= flight.what.group != group;
            }
        }
        wake
    }

    /// Takes fill `group` of `pieces` pieces back if none of them has begun.
    pub(crate) fn drop_ahead(&mut self, group: u64, pieces: usize) -> Option<Vec<J>> {
        let of_group = |piece: &&Piece<J>| piece.what.group == group;
        let queued = self.drives.iter().map(|state| state.ahead.iter().filter(of_group).count()).sum::<usize>();
        (queued == pieces).then(|| self.cancel(group))
    }

    /// Takes back what is queued of `group`.
    pub(crate) fn cancel(&mut self, group: u64) -> Vec<J> {
        self.drives.iter_mut().flat_map(|state| state.withdraw(group, false)).map(|piece| piece.job).collect()
    }

    /// Takes back all that is queued.
    pub(crate) fn close(&mut self) -> Vec<J> {
        let mut jobs = Vec::new();
        for state in &mut self.drives {
            jobs.extend(state.demand.drain(..).chain(state.ahead.drain(..)).map(|piece| piece.job));
            (state.demand_bytes, state.ahead_bytes) = (0, 0);
        }
        jobs
    }
}

#[cfg(test)]
mod tests;
