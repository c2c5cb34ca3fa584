//! The memory plan: bytes for each part before anything is loaded, or a refusal with the floor.

mod cgroup;
mod limit;
mod show;
mod system;

use crate::error::{Error, Result};
use limit::{Limit, Memory};

use show::flag_value;

pub use show::gib;
pub(crate) use show::{at_least, at_most};
pub use system::peak_resident;

/// What the parts need, in bytes; [`plan`] turns it into a [`Plan`].
#[derive(Debug, Clone, Default)]
pub struct Needs {
    /// Resident trunk.
    pub trunk: u64,
    /// KDA and convolution states of one sequence.
    pub states: u64,
    /// Latent cache of the asked context.
    pub latent_cache: u64,
    /// Scratch of the largest step.
    pub activations: u64,
    /// One expert slot; 0 when the model has no routed experts.
    pub slot: u64,
    /// Fewest slots that can run: one token's experts of one layer.
    pub slots_min: u64,
    /// Slots beyond which memory is of no use: all experts.
    pub slots_max: u64,
    /// Tokenizer, tables, thread stacks, code.
    pub fixed: u64,
    /// Forms of the trunk that would take less, for the hint of a refusal.
    pub smaller_trunks: Vec<SmallerTrunk>,
}

/// A form of the trunk that is not asked for.
#[derive(Debug, Clone)]
pub struct SmallerTrunk {
    /// As `--trunk` takes it, and what it does to the weights.
    pub form: &'static str,
    /// What it takes in memory.
    pub bytes: u64,
}

/// Bytes of each part; what is used in the end stays within `total`.
#[derive(Debug, Clone, PartialEq, Eq, serde::Serialize)]
pub struct Plan {
    /// What the run may use, and where that figure is from (`--memory`, `cgroup`, `available memory less a reserve`).
    pub limit: u64,
    /// Source of `limit`.
    pub limit_source: String,
    /// Resident trunk.
    pub trunk: u64,
    /// KDA and convolution states.
    pub states: u64,
    /// Latent cache.
    pub latent_cache: u64,
    /// Step scratch.
    pub activations: u64,
    /// Expert slots, bytes.
    pub experts: u64,
    /// Expert slots, count.
    pub slots: u64,
    /// Everything else.
    pub fixed: u64,
    /// Sum of all parts.
    pub total: u64,
    /// What the user should know about the limit, if anything.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub caution: Option<String>,
}

impl Plan {
    /// Bytes that the limit leaves for the expert slots and the buffers of a step.
    pub(crate) fn slots_and_activations_max(&self) -> u64 {
        let rest = [self.trunk, self.states, self.latent_cache, self.fixed].into_iter().fold(0, u64::saturating_add);
        self.limit.saturating_sub(rest)
    }
}

/// Fits the expert slots into what is left of the limit.
///
/// `memory` and `expert_memory` are the flags; without `memory` the limit is what is free less a reserve, and never more
/// than the cgroup (v1 or v2) allows. The reserve is the larger of 512 MiB and 5 % of the machine's memory, but at most
/// half of what is free; of a cgroup's rest it is 5 % of the cgroup's limit. More than the machine or the cgroup has is
/// refused; more than is free now is taken as asked, with a caution.
///
/// # Errors
/// Kind `Memory` below the floor (the message has the limit, the floor and its parts, the hint a `--memory` that is
/// enough), for more than the machine or the cgroup has, and for an expert cache that does not fit.
pub fn plan(needs: &Needs, memory: Option<u64>, expert_memory: Option<u64>) -> Result<Plan> {
    fit(needs, limit::limit(memory, &Memory::now())?, expert_memory)
}

/// As [`plan`], for a machine that is not this one: it has `memory` bytes for the run.
///
/// # Errors
/// Kind `Memory` below the floor.
pub fn plan_elsewhere(needs: &Needs, memory: u64) -> Result<Plan> {
    fit(needs, Limit { bytes: memory, source: "--memory".to_owned(), most: None, free: None }, None)
}

/// Bytes that can be had now; `None` where the system does not tell.
pub(crate) fn free() -> Option<u64> {
    Memory::now().left()
}

fn fit(needs: &Needs, limit: Limit, expert_memory: Option<u64>) -> Result<Plan> {
    let slots_min = if needs.slot == 0 { 0 } else { needs.slots_min };
    let slots_max = if needs.slot == 0 { 0 } else { needs.slots_max.max(slots_min) };
    // Where there are no experts there is nothing to ask for.
    let asked = expert_memory.filter(|_| needs.slot > 0);
    let slots_asked = asked.map(|bytes| (bytes / needs.slot).min(slots_max));
    if let Some(asked) = asked.filter(|asked| asked / needs.slot < slots_min) {
        return Err(below_one_token(needs, asked));
    }
    let floor = with_slots(needs, &limit, slots_min);
    let least = with_slots(needs, &limit, slots_asked.unwrap_or(slots_min));
    if least.total > limit.bytes {
        let error = match slots_asked {
            Some(_) if floor.total <= limit.bytes => experts_do_not_fit(&least),
            _ => below_floor(&least),
        };
        return Err(error.hint(enough(needs, &least, &limit)));
    }
    let left = (limit.bytes - floor.total).checked_div(needs.slot).unwrap_or(0);
    let slots = slots_asked.unwrap_or_else(|| slots_min.saturating_add(left).min(slots_max));
    let plan = with_slots(needs, &limit, slots);
    // What is free may grow until it is needed, and only the user can know.
    let caution = limit.free.filter(|free| plan.total > *free).map(|free| {
        format!("{} are planned and only {} free now: the run may swap or be killed", gib(plan.total), at_most(free))
    });
    Ok(Plan { caution, ..plan })
}

fn with_slots(needs: &Needs, limit: &Limit, slots: u64) -> Plan {
    let experts = slots.saturating_mul(needs.slot);
    let parts = [needs.trunk, needs.states, needs.latent_cache, needs.activations, needs.fixed, experts];
    Plan {
        limit: limit.bytes,
        limit_source: limit.source.clone(),
        trunk: needs.trunk,
        states: needs.states,
        latent_cache: needs.latent_cache,
        activations: needs.activations,
        experts,
        slots,
        fixed: needs.fixed,
        total: parts.into_iter().fold(0, u64::saturating_add),
        caution: None,
    }
}

fn below_floor(least: &Plan) -> Error {
    Error::memory(format!(
        "does not fit in memory: the limit is {} ({}), at least {} are needed: {}",
        at_most(least.limit),
        least.limit_source,
        at_least(least.total),
        least.parts_in_words()
    ))
}

fn below_one_token(needs: &Needs, asked: u64) -> Error {
    let least = needs.slot.saturating_mul(needs.slots_min);
    Error::memory(format!(
        "--expert-memory {}: at least {} are needed: one token's {} experts of one layer, {} each",
        at_most(asked),
        at_least(least),
        needs.slots_min,
        gib(needs.slot)
    ))
    .hint(format!(
        "{}leave it out to use what the rest leaves, or give --expert-memory {}",
        unit_missing(asked),
        flag_value(least)
    ))
}

fn experts_do_not_fit(least: &Plan) -> Error {
    let rest = least.total - least.experts;
    Error::memory(format!(
        "--expert-memory {} does not fit: the limit is {} ({}), {} are needed beside the experts, which leaves {}",
        gib(least.experts),
        at_most(least.limit),
        least.limit_source,
        at_least(rest),
        at_most(least.limit - rest)
    ))
}

/// What to do about a plan that needs more than the limit.
fn enough(needs: &Needs, least: &Plan, limit: &Limit) -> String {
    let mut less = String::new();
    // Where most of it is something else, that is what there is to save.
    if least.trunk > least.total / 2 {
        for SmallerTrunk { form, bytes } in &needs.smaller_trunks {
            less += &format!("--trunk {form} needs {}; ", at_least(least.total - least.trunk + bytes));
        }
    }
    less += "a smaller --context, --step or --expert-memory needs less";
    let unit = if limit.source == "--memory" { unit_missing(limit.bytes) } else { String::new() };
    match limit.most {
        Some(most) if most < least.total => format!("{unit}{less}; at most {} are there at all", at_most(most)),
        _ => format!("{unit}allow more with --memory {}, if it is there; {less}", flag_value(least.total)),
    }
}

/// Asks for the unit of a size that is one of no use in bytes.
fn unit_missing(asked: u64) -> String {
    const BYTES_MIN: u64 = 10_000;
    if asked < BYTES_MIN {
        format!("{asked} without a unit are bytes: was {asked}GiB meant? else ")
    } else {
        String::new()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::error::Kind;

    const NEEDS: Needs = Needs {
        trunk: 1000,
        states: 50,
        latent_cache: 30,
        activations: 20,
        slot: 10,
        slots_min: 4,
        slots_max: 100,
        fixed: 100,
        smaller_trunks: Vec::new(),
    };

    fn within(bytes: u64) -> Limit {
        Limit { bytes, source: "--memory".into(), most: None, free: None }
    }

    #[test]
    fn slots_take_what_the_rest_leaves() {
        let plan = fit(&NEEDS, within(1305), None).expect("fits");
        assert_eq!((plan.slots, plan.experts, plan.total), (10, 100, 1300));
    }

    #[test]
    fn slots_end_with_the_experts() {
        let plan = fit(&NEEDS, within(1 << 40), None).expect("fits");
        assert_eq!((plan.slots, plan.total), (100, 2200));
    }

    #[test]
    fn the_floor_is_exact() {
        assert_eq!(fit(&NEEDS, within(1240), None).expect("fits").slots, 4);
        let error = fit(&NEEDS, within(1239), None).expect_err("one byte short");
        assert_eq!(error.kind(), Kind::Memory);
        for part in ["the limit is 1239 bytes (--memory)", "at least 1240 bytes", "trunk 1000 bytes", "4 expert slots"]
        {
            assert!(error.message().contains(part), "{error}: {part}");
        }
    }

    #[test]
    fn expert_memory_is_kept_or_refused() {
        let slots = |limit, asked| fit(&NEEDS, within(limit), Some(asked)).map(|plan| plan.slots);
        assert_eq!(slots(5000, 59).expect("fits"), 5);
        assert_eq!(slots(5000, u64::MAX).expect("all experts"), 100);
        assert_eq!(slots(1240, 40).expect("the floor"), 4);
        assert_eq!(slots(1300, 101).expect("whole slots count"), 10);
        let too_few = slots(5000, 39).expect_err("below one token's experts");
        assert!(too_few.message().contains("at least 40 bytes"), "{too_few}");
        let too_many = slots(1300, 200).expect_err("more than is left");
        assert!(too_many.message().contains("leaves 100 bytes"), "{too_many}");
        assert_eq!((too_few.kind(), too_many.kind()), (Kind::Memory, Kind::Memory));
    }

    #[test]
    fn what_the_hint_says_is_enough() {
        let with = |limit: u64, most: Option<u64>, asked| fit(&NEEDS, Limit { most, ..within(limit) }, asked);
        for (limit, asked) in [(7, None), (1239, None), (1249, Some(50)), (7, Some(200))] {
            let error = with(limit, Some(1 << 20), asked).expect_err("short");
            let hint = error.hint_text().expect("a hint").to_owned();
            let (_, value) = hint.split_once("--memory ").expect("a value");
            let value: u64 = value.split(',').next().expect("a number").parse().expect("bytes");
            with(value, Some(1 << 20), asked).expect("enough");
            with(value - 1, Some(1 << 20), asked).expect_err("no more than enough");
        }
        let error = with(7, Some(1000), None).expect_err("short");
        let hint = error.hint_text().expect("a hint");
        assert!(!hint.contains("--memory ") && hint.contains("at most 1000 bytes are there"), "{hint}");
    }

    #[test]
    fn the_hint_names_smaller_trunks_where_the_trunk_is_most_of_it() {
        let hint = |trunk| {
            let smaller_trunks = vec![SmallerTrunk { form: "bf12 (lossless)", bytes: 750 }];
            let error = fit(&Needs { trunk, smaller_trunks, ..NEEDS }, within(100), None).expect_err("short");
            error.hint_text().expect("a hint").to_owned()
        };
        assert!(hint(1000).contains("--trunk bf12 (lossless) needs 990 bytes; "), "{}", hint(1000));
        assert!(!hint(200).contains("--trunk"), "{}", hint(200));
    }

    #[test]
    fn a_number_that_lacks_its_unit_is_asked_about() {
        let hint = |limit, asked| {
            let error = fit(&Needs { trunk: 1 << 20, ..NEEDS }, limit, asked).expect_err("short");
            error.hint_text().expect("a hint").contains("was 39GiB meant?")
        };
        assert!(hint(within(39), None) && hint(within(1 << 30), Some(39)));
        assert!(!hint(within(39_000), None));
        assert!(!hint(Limit { source: "cgroup".into(), ..within(39) }, None), "nobody gave it");
    }

    #[test]
    fn more_than_is_free_is_planned_with_a_caution() {
        let free = |free| fit(&NEEDS, Limit { free: Some(free), ..within(1300) }, None).expect("fits").caution;
        assert_eq!(free(1300), None);
        assert!(free(1299).expect("not free").contains("only 1299 bytes free"));
    }

    #[test]
    fn a_dense_model_has_no_slots() {
        let dense = Needs { slot: 0, slots_min: 0, slots_max: 0, ..NEEDS };
        assert_eq!(fit(&dense, within(1200), None).expect("fits").slots, 0);
        assert_eq!(fit(&dense, within(1200), Some(1)).expect("no experts to hold").slots, 0);
    }

    #[test]
    fn needs_beyond_all_numbers_are_refused() {
        let huge = Needs { trunk: u64::MAX, slot: u64::MAX, slots_min: 8, ..NEEDS };
        assert_eq!(fit(&huge, within(u64::MAX - 1), None).expect_err("cannot fit").kind(), Kind::Memory);
    }

    #[test]
    fn this_process_has_a_peak() {
        assert!(peak_resident() > 100_000);
    }
}
