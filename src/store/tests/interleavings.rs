//! Every order in which two readers and a request can act on two slots, tried one after the other: a small model of the
//! store that runs its own table and schedule.

use crate::store::cache::{Hold, Reserved, Table, View};
use crate::store::schedule::Schedule;

const EXPERTS: usize = 3;
const SLOTS: usize = 2;
const DRIVES: usize = 2;

/// Decides each time which of the possible steps comes next; goes through all decisions, depth first.
#[derive(Default)]
struct Choices {
    /// Decision and number of possibilities.
    path: Vec<(usize, usize)>,
    at: usize,
}

impl Choices {
    fn choose(&mut self, count: usize) -> usize {
        if self.at == self.path.len() {
            self.path.push((0, count));
        }
        assert_eq!(self.path[self.at].1, count, "the model depends on decisions alone");
        self.at += 1;
        self.path[self.at - 1].0
    }

    /// The next sequence of decisions; `false` after the last.
    fn advance(&mut self) -> bool {
        self.at = 0;
        while let Some((decision, count)) = self.path.pop() {
            if decision + 1 < count {
                self.path.push((decision + 1, count));
                return true;
            }
        }
        false
    }
}

/// What can happen next.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Step {
    /// The request reserves, takes what is ready, or lets go of what it has.
    Request,
    /// A reader takes a piece.
    Begin(usize),
    /// Its read ends.
    End(usize),
}

struct World {
    table: Table<u32>,
    schedule: Schedule<(usize, u32)>,
    /// `[drives]`: ticket, expert and the slot's memory.
    reading: [Option<(u64, usize, u32)>; DRIVES],
    /// `[experts]`: slot it is being read into.
    slot_of: [Option<u32>; EXPERTS],
    holds: Vec<Hold>,
    asked: usize,
    held: Option<Hold>,
    served: Vec<usize>,
    reads: [usize; EXPERTS],
    /// Pieces that no reader has taken.
    queued: usize,
}

impl World {
    fn new() -> Self {
        Self {
            table: Table::new((0..SLOTS as u32).collect(), 1, EXPERTS),
            schedule: Schedule::new(&[1; DRIVES]),
            reading: [None; DRIVES],
            slot_of: [None; EXPERTS],
            holds: Vec::new(),
            asked: 0,
            held: None,
            served: Vec::new(),
            reads: [0; EXPERTS],
            queued: 0,
        }
    }

    /// Reserves what slots allow, as a request does.
    fn run_ahead(&mut self) {
        while self.asked < EXPERTS {
            let urgent = self.holds.is_empty() && self.held.is_none();
            match self.table.reserve(self.asked as u32, urgent) {
                Reserved::Present(hold) => self.holds.push(hold),
                Reserved::Absent(hold, memory) => {
                    assert!(self.slot_of.iter().all(|slot| *slot != Some(hold.slot)), "a slot is filled twice at once");
                    self.slot_of[self.asked] = Some(hold.slot);
                    self.queued += 1;
                    let sites = [0, 1].into();
                    self.schedule.submit((self.asked, memory), 1, self.asked as u64, &sites, false, Default::default());
                    self.holds.push(hold);
                }
                Reserved::Full => return,
            }
            self.asked += 1;
        }
    }

    fn request_can_act(&self) -> bool {
        match (self.held, self.holds.first()) {
            (Some(_), _) => true,
            (None, Some(hold)) => matches!(self.table.view(*hold), View::Ready(_)),
            (None, None) => self.served.len() < EXPERTS,
        }
    }

    fn steps(&mut self) -> Vec<Step> {
        let mut steps = Vec::new();
        if self.request_can_act() {
            steps.push(Step::Request);
        }
        for drive in 0..DRIVES {
            match self.reading[drive] {
                Some(_) => steps.push(Step::End(drive)),
                None if self.queued > 0 => steps.push(Step::Begin(drive)),
                None => {}
            }
        }
        steps
    }

    /// Whether anything happened.
    fn act(&mut self, step: Step) -> bool {
        match step {
            Step::Request => {
                if let Some(hold) = self.held.take() {
                    self.table.unpin(hold);
                } else if !self.holds.is_empty() {
                    let hold = self.holds.remove(0);
                    self.table.pin(hold);
                    self.table.release(hold);
                    self.served.push(self.served.len());
                    self.held = Some(hold);
                }
                self.run_ahead();
                true
            }
            Step::Begin(drive) => {
                let Some(taken) = self.schedule.next(drive, Default::default()) else { return false };
                let (expert, memory) = taken.job;
                let slot = self.slot_of[expert].expect("a piece is read into its expert's slot");
                let pinned = self.held.is_some_and(|held| held.slot == slot);
                assert!(!pinned, "the slot of an expert in use is read into");
                self.reads[expert] += 1;
                self.queued -= 1;
                self.reading[drive] = Some((taken.ticket, expert, memory));
                true
            }
            Step::End(drive) => {
                let (ticket, expert, memory) = self.reading[drive].take().expect("it is reading");
                self.schedule.done(drive, ticket, Default::default());
                let slot = self.slot_of[expert].take().expect("it is being filled");
                self.table.complete(slot, memory, Ok(()));
                true
            }
        }
    }
}

#[test]
fn in_every_order_each_expert_is_read_once_and_served_once() {
    let mut choices = Choices::default();
    let mut orders = 0_u64;
    loop {
        let mut world = World::new();
        world.run_ahead();
        // A reader that finds nothing does not count as a step, else idle turns would make endless orders.
        while world.served.len() < EXPERTS || world.held.is_some() {
            let mut steps = world.steps();
            loop {
                assert!(!steps.is_empty(), "stuck after {:?}", world.served);
                let step = steps.remove(choices.choose(steps.len()));
                if world.act(step) {
                    break;
                }
            }
        }
        assert_eq!(world.served, [0, 1, 2]);
        assert_eq!(world.reads, [1; EXPERTS]);
        assert!(world.reading.iter().all(Option::is_none) && world.table.filling() == 0);
        orders += 1;
        if !choices.advance() {
            break;
        }
    }
    assert!(orders > 100, "{orders} orders");
}
