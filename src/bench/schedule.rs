//! What is left to do, and how long that will take: from the time that a prompt's and an answer's token took so far.

use std::time::{Duration, Instant};

use super::Test;
use super::measure::tokens_fed;

/// Where a measurement is.
#[derive(Debug, Clone)]
pub struct At {
    /// Of all that is run, filling the context and warming up too: the number of what is run now, from 1.
    pub number: usize,
    /// How many there are.
    pub count: usize,
    /// What is run.
    pub stage: Stage,
    /// How far it is, from 0 to 1.
    pub fraction: f64,
    /// Time left for everything, once it can be told.
    pub left: Option<Duration>,
}

/// What is run.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// So many tokens of context are filled in.
    Fill(usize),
    /// A test is run once before it counts.
    WarmUp(Test),
    /// A test's repetition, from 1, of so many.
    Repetition(Test, usize, usize),
}

impl Stage {
    fn new_tokens(self) -> (usize, usize) {
        match self {
            Stage::Fill(tokens) => (tokens, 0),
            Stage::WarmUp(test) | Stage::Repetition(test, ..) => {
                let prompt = test.prompt();
                (prompt, tokens_fed(test) - prompt)
            }
        }
    }
}

impl std::fmt::Display for Stage {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        match self {
            Stage::Fill(tokens) => write!(f, "filling a context of {tokens}"),
            Stage::WarmUp(test) => write!(f, "{test}, warming up"),
            Stage::Repetition(test, number, count) => write!(f, "{test}, repetition {number}/{count}"),
        }
    }
}

/// All that is run, in order.
pub(super) struct Schedule {
    stages: Vec<Stage>,
    /// Number of stages that have ended.
    ended: usize,
    began: Instant,
    /// Seconds a token of a prompt, and a token generated.
    costs: (Option<f64>, Option<f64>),
}

impl Schedule {
    pub fn new(stages: Vec<Stage>) -> Self {
        Self { stages, ended: 0, began: Instant::now(), costs: (None, None) }
    }

    /// The next stage begins, the clock too.
    pub fn begin(&mut self) {
        self.began = Instant::now();
    }

    /// The stage that began has ended.
    pub fn end(&mut self) {
        let took = self.began.elapsed().as_secs_f64();
        if let Some(stage) = self.stages.get(self.ended) {
            match stage.new_tokens() {
                (0, 0) => {}
                (prompt, 0) => self.costs.0 = Some(took / prompt as f64),
                (0, generated) => self.costs.1 = Some(took / generated as f64),
                // Which of both took how long is not known here; the tests with one of them have told, or will.
                (prompt, generated) => {
                    let each = took / (prompt + generated) as f64;
                    self.costs = (self.costs.0.or(Some(each)), self.costs.1.or(Some(each)));
                }
            }
        }
        self.ended += 1;
    }

    /// Where the stage that began is, when it is done by `fraction`; `None` when nothing is left.
    pub fn at(&self, fraction: f64) -> Option<At> {
        let stage = *self.stages.get(self.ended)?;
        let rest = self.stages[self.ended + 1..].iter().map(|stage| self.cost(*stage)).sum::<Option<f64>>();
        let took = self.began.elapsed().as_secs_f64();
        let now = match self.cost(stage) {
            Some(cost) => Some(cost * (1.0 - fraction)),
            None if fraction > 0.0 => Some(took * (1.0 - fraction) / fraction),
            None => None,
        };
        let left = now.zip(rest).and_then(|(now, rest)| Duration::try_from_secs_f64(now + rest).ok());
        Some(At { number: self.ended + 1, count: self.stages.len(), stage, fraction, left })
    }

    fn cost(&self, stage: Stage) -> Option<f64> {
        let cost = |tokens: usize, each: Option<f64>| match tokens {
            0 => Some(0.0),
            tokens => each.map(|each| tokens as f64 * each),
        };
        let (prompt, generated) = stage.new_tokens();
        Some(cost(prompt, self.costs.0)? + cost(generated, self.costs.1)?)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_is_told_once_each_kind_of_token_was_seen() {
        let (prompt, generate) = (Test::Prompt(100), Test::Generate(10));
        let stages = vec![
            Stage::Repetition(prompt, 1, 2),
            Stage::Repetition(prompt, 2, 2),
            Stage::Repetition(generate, 1, 1),
            Stage::Repetition(Test::Both(100, 11), 1, 1),
        ];
        let mut schedule = Schedule::new(stages);
        assert_eq!(schedule.at(0.0).unwrap().left, None);
        schedule.end();
        schedule.costs.0 = Some(0.5);
        assert_eq!(schedule.at(0.5).unwrap().left, None, "nothing is known about generated tokens");
        schedule.end();
        schedule.costs.0 = Some(0.5);
        schedule.end();
        schedule.costs.1 = Some(2.0);
        let at = schedule.at(0.5).unwrap();
        assert_eq!((at.number, at.count, at.left), (4, 4, Some(Duration::from_secs(35))));
        schedule.end();
        assert!(schedule.at(0.0).is_none());
    }

    #[test]
    fn stages_say_what_they_are() {
        assert_eq!(Stage::Fill(4096).to_string(), "filling a context of 4096");
        assert_eq!(Stage::Repetition(Test::Both(5, 3), 2, 3).to_string(), "pg5+3, repetition 2/3");
    }
}
