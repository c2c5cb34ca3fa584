//! Fills slots that hold nothing with experts that will probably be used, while the drives have nothing better to do.

use std::sync::atomic::{AtomicBool, Ordering};

use super::ExpertStore;
use super::cache::{Hold, View};
use super::request::PATIENCE;
use super::slots::{Fill, SlotState};

/// Experts on their way, for each drive, at which the drives are busy enough.
const FILLING_PER_DRIVE: usize = 2;

impl ExpertStore {
    /// Reads `experts` (`layer · experts + expert`, counting layers that have experts) in that order into empty slots, a few
    /// at a time and only while hardly anything else is read. Returns when no slot is empty, a read has failed, `stop` is
    /// set or the run is interrupted. Waits most of the time: it is for a thread of its own.
    pub(crate) fn warm(&self, experts: &[u32], stop: &AtomicBool) {
        let mut holds = Vec::new();
        for &expert in experts.iter().filter(|expert| (**expert as usize) < self.slots.catalog.len()) {
            let Some(mut state) = self.wait_for_quiet(&mut holds, stop) else { break };
            if state.table.is_full() {
                break;
            }
            if let Some((hold, memory)) = state.table.reserve_empty(expert) {
                holds.push(hold);
                Fill::start(&self.slots, expert, hold, memory, true);
            }
        }
        let mut state = self.slots.lock();
        holds.into_iter().for_each(|hold| state.table.release(hold));
        self.slots.notify(state);
    }

    /// Waits until few experts are on their way, and lets go of those of `holds` that have arrived. `None`: it is time to
    /// end.
    fn wait_for_quiet(&self, holds: &mut Vec<Hold>, stop: &AtomicBool) -> Option<std::sync::MutexGuard<'_, SlotState>> {
        let mut state = self.slots.lock();
        loop {
            let is_over = stop.load(Ordering::Relaxed) || self.interrupt.is_raised();
            if is_over || self.readers.has_lost_one() {
                return None;
            }
            let mut has_failed = false;
            holds.retain(|hold| match state.table.view(*hold) {
                View::Filling => true,
                view => {
                    has_failed |= matches!(view, View::Failed(_));
                    drop(view);
                    state.table.release(*hold);
                    false
                }
            });
            if has_failed {
                return None; // whoever needs the expert will be told
            }
            if state.table.filling() < FILLING_PER_DRIVE * self.readers.drives() {
                return Some(state);
            }
            state = self.slots.wait(state, PATIENCE);
        }
    }
}
