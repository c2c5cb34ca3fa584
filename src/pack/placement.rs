//! Which drive gets which expert: every expert once, spread in proportion to the drives' rates, then more copies of the
//! hottest where there is room. Pure and deterministic: the same figures give the same placement.
//!
//! A token takes its experts from one layer after the other, so each layer is spread by itself: the time of a step is
//! that of the drive with the most to do for its rate, and greedy assignment, the most used expert first, each to the drive
//! that will be done first, keeps those times together. What one layer leaves uneven the next one evens out.

/// A file system with its free room, which several roots may share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pool {
    /// Experts that fit.
    pub room: u64,
}

/// A root as placement sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Site {
    /// Index of its physical drive.
    pub drive: usize,
    /// Index of its [`Pool`].
    pub pool: usize,
}

/// What is to be placed where.
#[derive(Debug, Clone)]
pub struct Problem<'a> {
    /// Experts of each layer.
    pub num_experts: usize,
    /// Share of its layer's uses that each expert takes, `[layers, num_experts]`; all alike where nothing is known.
    pub shares: Option<&'a [f32]>,
    /// `[layers, num_experts]`: roots that have a copy already.
    pub held: &'a [Vec<u16>],
    /// Most copies of an expert.
    pub replicas: usize,
    /// Rate of each drive; only proportions matter.
    pub rates: &'a [f64],
    /// Room of each file system.
    pub pools: &'a [Pool],
    /// The roots.
    pub sites: &'a [Site],
}

/// How much more is needed than there is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Shortage {
    /// Experts without a copy.
    pub needed: u64,
    /// Of those, how many fit.
    pub fit: u64,
}

/// `[layers, num_experts]`: roots that get a copy, besides those that have one.
///
/// # Errors
/// When not every expert fits once.
pub fn place(problem: &Problem<'_>) -> Result<Vec<Vec<u16>>, Shortage> {
    let mut state = State::new(problem);
    state.place_first_copies()?;
    // A root takes one copy at most.
    for copies in 2..=problem.replicas.min(problem.sites.len()) {
        state.add_copies(copies);
    }
    Ok(state.new)
}

struct State<'p, 'a> {
    problem: &'p Problem<'a>,
    /// `[pools]`: experts that still fit.
    room: Vec<u64>,
    /// `[sites]`: copies there.
    count: Vec<u64>,
    /// `[experts]`: how much an expert is expected to be read.
    load: Vec<f64>,
    new: Vec<Vec<u16>>,
}

impl<'p, 'a> State<'p, 'a> {
    fn new(problem: &'p Problem<'a>) -> Self {
        let experts = problem.held.len();
        let mut count = vec![0; problem.sites.len()];
        problem.held.iter().flatten().for_each(|site| count[usize::from(*site)] += 1);
        Self {
            problem,
            room: problem.pools.iter().map(|pool| pool.room).collect(),
            count,
            load: (0..experts).map(|expert| problem.load(expert)).collect(),
            new: vec![Vec::new(); experts],
        }
    }

    fn place_first_copies(&mut self) -> Result<(), Shortage> {
        let Problem { held, num_experts, .. } = *self.problem;
        let needed = held.iter().filter(|copies| copies.is_empty()).count() as u64;
        let rooms: Vec<u64> = self.drives().map(|drive| self.room_of(drive)).collect();
        let fit = rooms.iter().fold(0, |sum: u64, room| sum.saturating_add(*room));
        if fit < needed {
            return Err(Shortage { needed, fit });
        }
        let weights = self.weights(&rooms, needed);
        // What each drive has too much of, from the layers so far.
        let mut carry = vec![0.0; weights.len()];
        let layers = held.len().checked_div(num_experts).unwrap_or(0);
        for layer in 0..layers {
            self.place_layer(layer, layers, &weights, &mut carry);
        }
        Ok(())
    }

    fn place_layer(&mut self, layer: usize, layers: usize, weights: &[f64], carry: &mut [f64]) {
        let n = self.problem.num_experts;
        let mut order: Vec<usize> = (layer * n..(layer + 1) * n).collect();
        order.sort_by(|a, b| self.load[*b].total_cmp(&self.load[*a]).then(a.cmp(b)));
        let mut load = carry.to_vec();
        for &expert in &order {
            let holders = self.drives_holding(expert);
            holders.iter().for_each(|drive| load[*drive] += self.load[expert] / holders.len() as f64);
        }
        // A drive that is nearly full must not be used up by the first layers.
        let mut quota: Vec<u64> =
            self.drives().map(|drive| self.room_of(drive).div_ceil((layers - layer) as u64)).collect();
        for &expert in order.iter().filter(|expert| self.problem.held[**expert].is_empty()) {
            let time = |drive: usize| (load[drive] + self.load[expert]) / weights[drive];
            let open = |drive: &usize| weights[*drive] > 0.0 && self.room_of(*drive) > 0;
            let best = |strict: bool| {
                let drives = self.drives().filter(open).filter(|drive| !strict || quota[*drive] > 0);
                drives.min_by(|a, b| time(*a).total_cmp(&time(*b)))
            };
            let chosen = best(true).or_else(|| best(false));
            let Some(drive) = chosen.or_else(|| self.drives().find(|drive| self.room_of(*drive) > 0)) else { return };
            load[drive] += self.load[expert];
            quota[drive] = quota[drive].saturating_sub(1);
            self.put(expert, drive);
        }
        let (sum, all): (f64, f64) = (load.iter().sum(), weights.iter().sum());
        for ((carry, load), weight) in carry.iter_mut().zip(load).zip(weights) {
            *carry = load - sum * weight / all;
        }
    }

    /// Gives experts that have fewer than `copies` one more, the most used first, as far as there is room.
    fn add_copies(&mut self, copies: usize) {
        let n = self.problem.num_experts.max(1);
        let mut order: Vec<usize> = (0..self.load.len()).collect();
        // Among equals an expert of every layer, rather than a whole layer.
        order.sort_by(|a, b| self.load[*b].total_cmp(&self.load[*a]).then((a % n, a / n).cmp(&(b % n, b / n))));
        let mut load = vec![0.0; self.problem.rates.len()];
        for expert in 0..self.load.len() {
            self.spread(expert, &mut load, 1.0);
        }
        for expert in order {
            let holders = self.drives_holding(expert);
            if self.problem.held[expert].len() + self.new[expert].len() >= copies {
                continue;
            }
            let rates = self.problem.rates;
            let free = self.drives().filter(|drive| !holders.contains(drive) && self.room_of(*drive) > 0);
            let best = free.min_by(|a, b| (load[*a] / rates[*a]).total_cmp(&(load[*b] / rates[*b])));
            // A second copy on a drive adds no speed, but the user has asked for it.
            let best = best.or_else(|| self.drives().find(|drive| self.open_site(expert, *drive).is_some()));
            if let Some(drive) = best {
                self.spread(expert, &mut load, -1.0);
                self.put(expert, drive);
                self.spread(expert, &mut load, 1.0);
            }
        }
    }

    /// Adds `sign` times the load of `expert` to the drives that hold it, in proportion to their rates.
    fn spread(&self, expert: usize, load: &mut [f64], sign: f64) {
        let holders = self.drives_holding(expert);
        let sum: f64 = holders.iter().map(|drive| self.problem.rates[*drive]).sum();
        for drive in holders {
            load[drive] += sign * self.load[expert] * self.problem.rates[drive] / sum;
        }
    }

    /// How many copies each drive should have in the end: in proportion to the rates, as far as its room goes.
    fn weights(&self, rooms: &[u64], needed: u64) -> Vec<f64> {
        let mut has = vec![0.0; rooms.len()];
        self.problem.sites.iter().zip(&self.count).for_each(|(site, count)| has[site.drive] += *count as f64);
        let total = has.iter().sum::<f64>() + needed as f64;
        let at = |level: f64| -> Vec<f64> {
            let drives = self.problem.rates.iter().zip(rooms).zip(&has);
            drives.map(|((rate, room), has)| (level * rate).clamp(*has, has + *room as f64)).collect()
        };
        // Halving ends at the level where the sum is right; 200 steps leave nothing of any range.
        let slowest = self.problem.rates.iter().copied().fold(f64::INFINITY, f64::min);
        let (mut low, mut high) = (0.0, (total + 1.0) / slowest);
        for _ in 0..200 {
            let middle = (low + high) / 2.0;
            if at(middle).iter().sum::<f64>() < total { low = middle } else { high = middle }
        }
        at(high)
    }

    /// Notes a copy of `expert` on a root of `drive`.
    fn put(&mut self, expert: usize, drive: usize) {
        if let Some(number) = self.open_site(expert, drive) {
            self.room[self.problem.sites[number].pool] -= 1;
            self.count[number] += 1;
            self.new[expert].push(number as u16);
        }
    }

    /// The emptiest root of `drive` that has room and no copy of `expert`.
    fn open_site(&self, expert: usize, drive: usize) -> Option<usize> {
        let holds = |number: usize| {
            let mut copies = self.problem.held[expert].iter().chain(&self.new[expert]);
            copies.any(|site| usize::from(*site) == number)
        };
        let sites = self.problem.sites.iter().enumerate();
        let open = sites.filter(|(_, site)| site.drive == drive && self.room[site.pool] > 0);
        let open = open.map(|(number, _)| number).filter(|number| !holds(*number));
        open.min_by_key(|number| (self.count[*number], *number))
    }

    fn drives(&self) -> std::ops::Range<usize> {
        0..self.problem.rates.len()
    }

    fn drives_holding(&self, expert: usize) -> Vec<usize> {
        let copies = self.problem.held[expert].iter().chain(&self.new[expert]);
        let mut drives: Vec<usize> = copies.map(|site| self.problem.sites[usize::from(*site)].drive).collect();
        drives.sort_unstable();
        drives.dedup();
        drives
    }

    /// Experts that still fit on a drive.
    fn room_of(&self, drive: usize) -> u64 {
        let mut pools: Vec<usize> =
            self.problem.sites.iter().filter(|site| site.drive == drive).map(|site| site.pool).collect();
        pools.sort_unstable();
        pools.dedup();
        pools.iter().fold(0, |sum: u64, pool| sum.saturating_add(self.room[*pool]))
    }
}

impl Problem<'_> {
    /// Half evenly, half by past use: memory will answer for the most used, and the past is a guess at the future.
    fn load(&self, expert: usize) -> f64 {
        let even = 1.0 / self.num_experts.max(1) as f64;
        let share = self.shares.and_then(|shares| shares.get(expert)).map_or(even, |share| f64::from(*share));
        (even + share) / 2.0
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const RATES: [f64; 4] = [13.6, 7.1, 7.1, 5.7];

    struct Case {
        layers: usize,
        num_experts: usize,
        rates: Vec<f64>,
        rooms: Vec<u64>,
        shares: Option<Vec<f32>>,
        held: Option<Vec<Vec<u16>>>,
        replicas: usize,
    }

    impl Case {
        /// One root a drive, with plenty of room.
        fn new(layers: usize, num_experts: usize, rates: &[f64]) -> Self {
            let rooms = vec![u64::MAX; rates.len()];
            Self { layers, num_experts, rates: rates.to_vec(), rooms, shares: None, held: None, replicas: 1 }
        }

        /// The root of each drive is its number.
        fn place(&self) -> Result<Vec<Vec<u16>>, Shortage> {
            let held = self.held.clone().unwrap_or_else(|| vec![Vec::new(); self.layers * self.num_experts]);
            place(&Problem {
                num_experts: self.num_experts,
                shares: self.shares.as_deref(),
                held: &held,
                replicas: self.replicas,
                rates: &self.rates,
                pools: &self.rooms.iter().map(|room| Pool { room: *room }).collect::<Vec<_>>(),
                sites: &(0..self.rates.len()).map(|at| Site { drive: at, pool: at }).collect::<Vec<_>>(),
            })
        }

        fn zipf(mut self) -> Self {
            let n = self.num_experts;
            let weight = |layer: usize, expert: usize| 1.0 / (1 + (expert * 7 + layer * 3) % n) as f32;
            let shares = (0..self.layers * n).map(|at| {
                let sum: f32 = (0..n).map(|expert| weight(at / n, expert)).sum();
                weight(at / n, at % n) / sum
            });
            self.shares = Some(shares.collect());
            self
        }
    }

    fn counts(placed: &[Vec<u16>], drives: usize) -> Vec<usize> {
        (0..drives).map(|drive| placed.iter().flatten().filter(|d| usize::from(**d) == drive).count()).collect()
    }

    #[test]
    fn every_layer_is_spread_in_proportion_to_the_rates() {
        let case = Case::new(92, 896, &RATES);
        let placed = case.place().unwrap();
        assert!(placed.iter().all(|copies| copies.len() == 1));
        for (part, slack) in placed.chunks(896).map(|layer| (layer, 2.0)).chain([(&placed[..], 4.0)]) {
            for (count, rate) in counts(part, 4).iter().zip(RATES) {
                let wanted = part.len() as f64 * rate / 33.5;
                assert!((*count as f64 - wanted).abs() <= slack, "{count} {wanted}");
            }
        }
    }

    #[test]
    fn rounding_does_not_add_up_over_the_layers() {
        let placed = Case::new(1000, 3, &[1.0, 1.0]).place().unwrap();
        let counts = counts(&placed, 2);
        assert!(counts[0].abs_diff(counts[1]) <= 2, "{counts:?}");
    }

    #[test]
    fn use_is_spread_too_and_not_only_number() {
        let case = Case::new(10, 64, &RATES).zipf();
        let placed = case.place().unwrap();
        let shares = case.shares.as_ref().unwrap();
        for layer in 0..10 {
            let mut time = [0.0; 4];
            for at in layer * 64..(layer + 1) * 64 {
                time[usize::from(placed[at][0])] += f64::from(shares[at]) / RATES[usize::from(placed[at][0])] * 33.5;
            }
            // The hottest expert alone is a fifth of the layer: no better balance exists for the slower drives.
            assert!(time.iter().all(|time| (0.5..1.6).contains(time)), "layer {layer}: {time:?}");
        }
    }

    #[test]
    fn a_full_drive_leaves_the_rest_to_the_others_in_every_layer() {
        let mut case = Case::new(10, 100, &[10.0, 1.0]);
        case.rooms = vec![300, 5000];
        let placed = case.place().unwrap();
        assert_eq!(counts(&placed, 2), [300, 700]);
        for layer in placed.chunks(100) {
            let count = counts(layer, 2)[0];
            assert!((28..=32).contains(&count), "{count}");
        }
    }

    #[test]
    fn what_does_not_fit_is_refused_with_both_numbers() {
        let mut case = Case::new(2, 100, &[1.0, 2.0]);
        case.rooms = vec![120, 79];
        assert_eq!(case.place().unwrap_err(), Shortage { needed: 200, fit: 199 });
        case.rooms = vec![120, 80];
        assert_eq!(counts(&case.place().unwrap(), 2), [120, 80]);
        case.rooms = vec![0, 200];
        assert_eq!(counts(&case.place().unwrap(), 2), [0, 200]);
    }

    #[test]
    fn copies_go_to_other_drives_and_the_hottest_first() {
        let mut case = Case::new(4, 50, &[3.0, 2.0, 1.0]).zipf();
        case.replicas = 3;
        let placed = case.place().unwrap();
        assert!(placed.iter().all(|copies| copies.len() == 3));
        for copies in &placed {
            let mut distinct = copies.clone();
            distinct.sort_unstable();
            distinct.dedup();
            assert_eq!(distinct.len(), 3);
        }
        case.rooms = vec![100, 80, 70];
        let placed = case.place().unwrap();
        assert_eq!(placed.iter().map(Vec::len).sum::<usize>(), 250);
        let shares = case.shares.as_ref().unwrap();
        let coldest_with_two = (0..200).filter(|at| placed[*at].len() > 1).map(|at| shares[at]).fold(1.0, f32::min);
        let hottest_with_one = (0..200).filter(|at| placed[*at].len() == 1).map(|at| shares[at]).fold(0.0, f32::max);
        assert!(coldest_with_two >= hottest_with_one * 0.5, "{coldest_with_two} {hottest_with_one}");
        assert!(placed.iter().all(|copies| !copies.is_empty()));
    }

    #[test]
    fn what_a_root_has_stays_and_counts() {
        let mut case = Case::new(1, 100, &[1.0, 1.0]);
        case.held = Some((0..100).map(|at| if at < 40 { vec![0] } else { Vec::new() }).collect());
        let placed = case.place().unwrap();
        assert!(placed[..40].iter().all(Vec::is_empty));
        assert_eq!(counts(&placed, 2), [10, 50]);
    }

    #[test]
    fn two_roots_of_one_drive_count_once_and_share_their_room() {
        let held = vec![Vec::new(); 90];
        let placed = place(&Problem {
            num_experts: 90,
            shares: None,
            held: &held,
            replicas: 2,
            rates: &[1.0, 2.0],
            pools: &[Pool { room: 50 }, Pool { room: 500 }],
            sites: &[Site { drive: 0, pool: 0 }, Site { drive: 0, pool: 0 }, Site { drive: 1, pool: 1 }],
        })
        .unwrap();
        let counts = counts(&placed, 3);
        assert_eq!(counts[0] + counts[1], 50, "{counts:?}");
        assert_eq!(counts[2], 90, "every expert that drive 0 holds has its copy on drive 1, and none twice on one");
        assert!(counts[0].abs_diff(counts[1]) <= 1);
    }

    #[test]
    fn roots_of_one_drive_get_the_copies_that_no_other_drive_can_take() {
        let held = vec![Vec::new(); 10];
        let mut problem = Problem {
            num_experts: 10,
            shares: None,
            held: &held,
            replicas: 2,
            rates: &[1.0],
            pools: &[Pool { room: 100 }],
            sites: &[Site { drive: 0, pool: 0 }, Site { drive: 0, pool: 0 }],
        };
        for replicas in [2, 3] {
            problem.replicas = replicas;
            let placed = place(&problem).unwrap();
            assert!(placed.iter().all(|copies| *copies == [0, 1] || *copies == [1, 0]), "{placed:?}");
        }
    }

    #[test]
    fn one_drive_takes_everything_once_whatever_the_replicas() {
        let mut case = Case::new(3, 5, &[0.001]);
        case.replicas = 4;
        assert!(case.place().unwrap().iter().all(|copies| *copies == [0]));
    }

    #[test]
    fn the_same_figures_give_the_same_placement() {
        let case = || {
            let mut case = Case::new(5, 77, &RATES).zipf();
            case.replicas = 2;
            case.rooms = vec![300, 100, 90, 80];
            case.place().unwrap()
        };
        assert_eq!(case(), case());
    }

    #[test]
    fn nothing_to_place_is_no_error() {
        assert!(Case::new(0, 0, &[1.0]).place().unwrap().is_empty());
        let mut case = Case::new(1, 4, &[1.0]);
        case.rooms = vec![0];
        case.held = Some(vec![vec![0]; 4]);
        assert!(case.place().unwrap().iter().all(Vec::is_empty));
    }
}
