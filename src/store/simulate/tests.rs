use super::*;
use crate::synth::trace::{Trace, TraceShape};

fn drives(rates: &[f64], jitter: f64) -> Vec<SimulatedDrive> {
    let latency = Duration::from_micros(100);
    rates
        .iter()
        .map(|rate| SimulatedDrive { bytes_per_s: rate * 1e9, latency, jitter, ..SimulatedDrive::default() })
        .collect()
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
    let run = k3(200, 20);
    let figures = ladder(&drives(&RATES, 0.1), &run, &mut routing());
    figures.iter().for_each(|figures| assert!(figures.busy_share > 0.95, "{figures:?}"));
    assert!(figures[3].bytes_per_token < 0.55 * 25.83e9, "{:?}", figures[3]);
    for pair in figures.windows(2) {
        assert!(pair[1].tokens_per_s >= pair[0].tokens_per_s, "{pair:?}");
    }
    // Without jitter, whose dice would fall otherwise. What is a hundredth of the others is read now and then to learn that
    // it still is.
    let run = k3(20, 20);
    let without = simulate(&drives(&RATES, 0.0), &run, &mut routing());
    for (rate, at_least) in [(1.0, 1.0), (0.5, 1.0), (0.3, 0.995), (0.1, 0.995)] {
        let slow: Vec<f64> = RATES.into_iter().chain([rate]).collect();
        let with_slow = simulate(&drives(&slow, 0.0), &run, &mut routing());
        let ratio = with_slow.tokens_per_s / without.tokens_per_s;
        assert!(ratio >= at_least, "{rate} GB/s more: {ratio}");
    }
}

#[test]
fn a_read_that_hangs_costs_the_time_until_it_is_done_elsewhere_and_no_more() {
    let run = k3(30, 10);
    let whole = simulate(&drives(&RATES, 0.1), &run, &mut routing());
    for time in [20, 600] {
        let time = Duration::from_secs(time);
        let mut faulty = drives(&RATES, 0.1);
        faulty[1].stalls = Stalls { share: 1e-4, time };
        let figures = simulate(&faulty, &run, &mut routing());
        assert!(figures.stalls >= 3 && figures.given_up > 0, "{figures:?}");
        // A read is called hung after 5 seconds; the reads of the layer may wait for a second one.
        let seconds = |figures: &SimulatedFigures| run.tokens as f64 / figures.tokens_per_s;
        let lost = seconds(&figures) - 1.05 * seconds(&whole);
        assert!(lost < 6.0 * figures.stalls as f64, "{lost} s for {} reads that hung: {figures:?}", figures.stalls);
        assert_eq!(figures.retries, 0, "{figures:?}");
        let served = figures.bytes_per_token + figures.lookahead_useful;
        assert!(served > 0.9 * (whole.bytes_per_token + whole.lookahead_useful), "{figures:?} {whole:?}");
    }
    // Although one may hang on every drive at a time.
    let mut faulty = drives(&RATES, 0.1);
    faulty.iter_mut().for_each(|drive| drive.stalls = Stalls { share: 5e-5, time: Duration::from_secs(100) });
    let figures = simulate(&faulty, &run, &mut routing());
    assert!(figures.stalls > 5 && figures.tokens_per_s > 0.15, "{figures:?}");
    // Alone, it is waited for.
    let mut alone = drives(&RATES[..1], 0.0);
    alone[0].stalls = Stalls { share: 1e-4, time: Duration::from_secs(1) };
    let figures = simulate(&alone, &k3(5, 0), &mut routing());
    assert!(figures.stalls > 0 && figures.given_up == 0, "{figures:?}");
}

#[test]
fn a_drive_whose_every_read_hangs_is_as_good_as_none() {
    let run = k3(20, 20);
    let mut faulty = drives(&RATES, 0.1);
    faulty[3].stalls = Stalls { share: 1.0, time: Duration::from_secs(1 << 40) };
    let without = simulate(&drives(&RATES[..3], 0.1), &run, &mut routing());
    let with = simulate(&faulty, &run, &mut routing());
    assert!(with.tokens_per_s > 0.95 * without.tokens_per_s, "{with:?} {without:?}");
}

#[test]
fn a_drive_that_dies_costs_its_share_and_no_more() {
    let run = k3(20, 20);
    for dead in 0..RATES.len() {
        for in_turn in [false, true] {
            let run = SimulatedRun { in_turn, ..run.clone() };
            let mut rates = RATES.to_vec();
            rates.remove(dead);
            let without = simulate(&drives(&rates, 0.1), &run, &mut routing());
            for second in [0.0, 1.0, 7.77] {
                let mut faulty = drives(&RATES, 0.1);
                faulty[dead].dies_at = Some(Duration::from_secs_f64(second));
                let with = simulate(&faulty, &run, &mut routing());
                assert!(with.tokens_per_s > 0.97 * without.tokens_per_s, "{dead}: {with:?} {without:?}");
                assert_eq!((with.stalls, with.given_up), (0, 0));
            }
        }
    }
    let mut faulty = drives(&RATES, 0.1);
    (1..4).for_each(|number| faulty[number].dies_at = Some(Duration::from_secs(number as u64)));
    let with = simulate(&faulty, &run, &mut routing());
    let alone = simulate(&drives(&RATES[..1], 0.1), &run, &mut routing());
    assert!(with.tokens_per_s > 0.97 * alone.tokens_per_s && with.retries < 100, "{with:?} {alone:?}");
}

#[test]
fn what_is_asked_for_is_read_once_whatever_the_drives_do() {
    // Nothing is kept, so every expert is read for every token, and a byte too many is one that was read twice.
    for seed in 0..8 {
        let run = SimulatedRun { in_turn: true, seed, ..k3(5, 0) };
        let mut faulty = drives(&RATES, 0.1);
        faulty[0].dies_at = Some(Duration::from_secs(seed));
        let mut world = World::new(&faulty, &run);
        let mut routing = routing();
        (0..run.tokens).for_each(|token| world.token(&run, &routing(token)));
        assert!(world.fills.is_empty() && world.wanted == 0 && world.table.filling() == 0);
        assert_eq!(world.counts.bytes, (run.tokens * 92 * 16) as u64 * run.expert_bytes, "seed {seed}");
        assert_eq!(world.groups, (run.tokens * 92 * 16) as u64);
        // With reads that hang: what was given up is read once more, by whoever could.
        faulty[1].stalls = Stalls { share: 1e-4, time: Duration::from_secs(100) };
        let mut world = World::new(&faulty, &run);
        (0..run.tokens).for_each(|token| world.token(&run, &routing(token)));
        assert_eq!(world.groups, (run.tokens * 92 * 16) as u64 + world.counts.given_up);
        assert!(world.counts.bytes >= (run.tokens * 92 * 16) as u64 * run.expert_bytes);
        while !world.events.is_empty() {
            world.advance(None);
        }
        assert!(world.fills.is_empty() && world.table.filling() == 0);
    }
}

#[test]
fn the_same_seed_gives_the_same_figures() {
    let run = k3(2, 1);
    let mut faulty = drives(&RATES, 0.1);
    faulty[2].stalls = Stalls { share: 1e-3, time: Duration::from_secs(2) };
    faulty[3].dies_at = Some(Duration::from_secs(1));
    let once = || simulate(&faulty, &run, &mut routing());
    assert_eq!(once(), once());
}
