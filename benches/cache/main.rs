//! What a cache of experts answers, for several rules, on traces of routing: `cargo bench --bench cache`.
//!
//! With `-- --record MODEL TEXT TRACE` it records the routes of a model over a text instead; with `-- --trace TRAIN
//! HELD_OUT` it compares on such traces instead of synthetic ones; with `-- --tune` it also tells what becomes of the hit
//! rate when one figure of the store's rule is changed.

mod replay;
mod routing;
mod rules;

use std::path::Path;

use deltafin::store::histogram::Histogram;
use deltafin::store::policy::Tuning;
use deltafin::store::trace::Trace;
use deltafin::synth::trace::TraceShape;

use self::replay::{Cache, Outcome, replay, replay_ahead};
use self::routing::Guesses;
use self::rules::{Frequency, Future, Ordered, Recency, Rule, hybrid};

const SHARES: [f64; 5] = [0.01, 0.02, 0.04, 0.08, 0.16];
/// Requests that make an LFU count fade to half, in tokens.
const LFU_HALF_LIFE: f64 = 100.0;

fn learn(trace: &Trace) -> Histogram {
    let mut histogram = Histogram::new(0, trace.layers(), trace.experts());
    trace.requests().for_each(|(layer, experts)| histogram.record(layer, experts));
    histogram
}

/// `trace` with a request for all experts of each layer after `tokens` tokens.
fn with_scan(trace: &Trace, tokens: usize) -> Trace {
    let all: Vec<u16> = (0..trace.experts() as u16).collect();
    let mut result = Trace::new(trace.layers(), trace.experts());
    for (number, (layer, experts)) in trace.requests().enumerate() {
        if number == tokens * trace.layers() {
            (0..trace.layers()).for_each(|layer| result.push(layer as u16, &all).expect("all experts of a layer"));
        }
        result.push(layer, experts).expect("copied from a trace");
    }
    result
}

/// Hit rates of all rules at all shares.
fn compare(train: &Trace, held_out: &Trace, top_k: usize) {
    let (layers, count) = (held_out.layers(), held_out.layers() * held_out.experts());
    let (learned, nothing) = (learn(train), Histogram::new(0, layers, held_out.experts()));
    let hottest = learned.hottest();
    let shares = SHARES.map(|share| format!("{:>7.0} %", share * 100.0)).concat();
    println!("\nbytes: read at 4 % of slots, where 1 is a token without a cache; time: of an expert asked for, at 4 %");
    println!("{:<28}{shares}   bytes      time", "hit rate % at slots of");
    let row = |name: &str, last: &str, run: &dyn Fn(usize) -> Outcome| {
        let outcomes = SHARES.map(|share| run((count as f64 * share) as usize));
        let rates = outcomes.map(|outcome| match outcome.asked {
            0 => format!("{:>9}", "-"),
            _ => format!("{:>9.1}", outcome.rate() * 100.0),
        });
        let rates = rates.concat();
        let bytes = 1.0 - outcomes[2].rate();
        println!("{name:<28}{rates}   {bytes:.3}   {:>5.0} ns{last}", outcomes[2].ns());
    };
    row("LRU", "", &|slots| replay(&mut Ordered::new(Recency::new(count), slots), held_out, slots, &[]));
    row("LRU, warm start", "", &|slots| {
        replay(&mut Ordered::new(Recency::new(count), slots), held_out, slots, &hottest)
    });
    row("LFU with ageing", "", &|slots| {
        let keys = Frequency::new(count, LFU_HALF_LIFE * layers as f64);
        replay(&mut Ordered::new(keys, slots), held_out, slots, &[])
    });
    row("hottest pinned", " (no rule)", &|slots| {
        let pinned: std::collections::HashSet<u32> = hottest.iter().take(slots).copied().collect();
        let mut outcome = Outcome::default();
        for (layer, experts) in held_out.requests() {
            let id = |expert: &&u16| u32::from(layer) * held_out.experts() as u32 + u32::from(**expert);
            outcome.hits += experts.iter().filter(|expert| pinned.contains(&id(expert))).count() as u64;
            outcome.asked += experts.len() as u64;
        }
        outcome
    });
    row("hybrid, nothing learned", "", &|slots| {
        replay(&mut hybrid(&nothing, top_k, slots, Tuning::default()), held_out, slots, &[])
    });
    row("hybrid, learned", "", &|slots| {
        replay(&mut hybrid(&learned, top_k, slots, Tuning::default()), held_out, slots, &hottest)
    });
    row("hybrid, all slots looked at", "", &|slots| {
        let tuning = Tuning { candidates: usize::MAX, ..Tuning::default() };
        // Quadratic: only where it is affordable.
        let few = slots <= count / 25;
        if few {
            replay(&mut hybrid(&learned, top_k, slots, tuning), held_out, slots, &hottest)
        } else {
            Outcome::default()
        }
    });
    row("offline optimum (Belady)", "", &|slots| {
        replay(&mut Ordered::new(Future::new(held_out), slots), held_out, slots, &hottest)
    });
}

/// What reading ahead costs in bytes at 4 % of slots, or at `share`.
fn lookahead(name: &str, train: &Trace, held_out: &Trace, guesses: &Guesses, top_k: usize, share: f64) {
    let slots = ((held_out.layers() * held_out.experts()) as f64 * share) as usize;
    let learned = learn(train);
    let mut rule = hybrid(&learned, top_k, slots, Tuning::default());
    let outcome = replay_ahead(&mut rule, held_out, guesses, slots, &learned.hottest());
    let of_asked = |count: u64| count as f64 * 100.0 / outcome.asked.max(1) as f64;
    println!(
        "{name:<44} {:>5.1} % state hits, {:>4.1} % guessed and read, {:>4.1} % read in vain; bytes {:.3}",
        outcome.rate() * 100.0,
        of_asked(outcome.useful),
        of_asked(outcome.wasted),
        outcome.bytes()
    );
}

/// Figures with guesses as good as measured, and worse, all of them read.
fn lookahead_of_made_up_routing(train: &Trace, held_out: &Trace, top_k: usize) {
    println!(
        "\nlookahead at 4 % of slots, hybrid, learned; {} guesses a layer, each read before the request:",
        top_k / 2
    );
    for precision in [1.0, 0.936, 0.9, 0.85, 0.75] {
        let guesses = routing::guesses(held_out, top_k / 2, precision);
        let name = format!("{:.1} % of the guesses right", precision * 100.0);
        lookahead(&name, train, held_out, &guesses, top_k, 0.04);
    }
    let guesses = routing::guesses(held_out, top_k, 0.777);
    lookahead("twice the guesses, 77.7 % of them right", train, held_out, &guesses, top_k, 0.04);
}

/// The demo model on its own stories: real routing and real guesses, if few experts.
fn demo_model() {
    let (train, _) = routing::stories(0, 150);
    let (held_out, guesses) = routing::stories(1, 150);
    let top_k = held_out.requests().next().map_or(1, |(_, experts)| experts.len());
    println!("\nthe demo model: {} layers of {} experts, {top_k} a token", held_out.layers(), held_out.experts());
    routing::print_figures("learned from", &train, &train, top_k);
    routing::print_figures("held out", &held_out, &train, top_k);
    compare(&train, &held_out, top_k);
    for share in [0.08, 0.16, 0.32] {
        let name = format!("lookahead at {:.0} % of slots, as it guessed", share * 100.0);
        lookahead(&name, &train, &held_out, &guesses, top_k, share);
    }
}

/// Makes a rule anew for each replay.
type MakeRule<'a> = &'a dyn Fn() -> Box<dyn Rule>;

/// What a prefill in the middle does to the tokens after it.
fn scan(train: &Trace, held_out: &Trace, top_k: usize) {
    let count = held_out.layers() * held_out.experts();
    let slots = count / 25;
    let learned = learn(train);
    let hottest = learned.hottest();
    let scanned = with_scan(held_out, 150);
    println!("\na scan over all experts after 150 tokens, 4 % of slots:");
    let rules: [(&str, MakeRule); 2] = [
        ("LRU", &|| Box::new(Ordered::new(Recency::new(count), slots))),
        ("hybrid, learned", &|| Box::new(hybrid(&learned, top_k, slots, Tuning::default()))),
    ];
    for (name, rule) in rules {
        let mut rates = [0.0; 3];
        for (which, trace) in [held_out, &scanned].into_iter().enumerate() {
            let mut rule = rule();
            let mut cache = Cache::new(rule.as_mut(), count, slots);
            cache.warm(&hottest);
            let (mut after, mut during, mut decoded) = (Outcome::default(), Outcome::default(), 0);
            for (layer, experts) in trace.requests() {
                let ids: Vec<u32> =
                    experts.iter().map(|e| u32::from(layer) * trace.experts() as u32 + u32::from(*e)).collect();
                let hits = cache.request(&ids);
                let is_scan = experts.len() == trace.experts();
                decoded += usize::from(!is_scan);
                let first = 150 * trace.layers();
                let to = if is_scan {
                    &mut during
                } else if (first..first + 3 * trace.layers()).contains(&(decoded - 1)) {
                    &mut after
                } else {
                    continue;
                };
                to.hits += hits;
                to.asked += ids.len() as u64;
            }
            rates[which] = after.rate() * 100.0;
            rates[2] = during.rate() * 100.0;
        }
        println!(
            "{name:<28} next 3 tokens {:>5.1} % hits, without the scan {:>5.1} %; the scan itself {:.1} %",
            rates[1], rates[0], rates[2]
        );
    }
}

/// The hit rate at 4 % of slots around the default tuning.
fn tune(train: &Trace, held_out: &Trace, top_k: usize) {
    let slots = held_out.layers() * held_out.experts() / 25;
    let learned = learn(train);
    let nothing = Histogram::new(0, held_out.layers(), held_out.experts());
    let hottest = learned.hottest();
    let base = Tuning::default();
    let mut cases = vec![("default", base)];
    cases.extend([0.05, 0.1, 0.2, 0.3, 0.45].map(|v| ("recent_weight", Tuning { recent_weight: v, ..base })));
    cases.extend([0.4, 0.5, 0.7, 0.8].map(|v| ("recent_keep", Tuning { recent_keep: v, ..base })));
    cases.extend([0.97, 0.98, 0.99, 0.998].map(|v| ("lasting_keep", Tuning { lasting_keep: v, ..base })));
    cases.extend([20.0, 50.0, 200.0, 400.0].map(|v| ("learned_requests", Tuning { learned_requests: v, ..base })));
    cases.extend([4, 8, 16, 64, 128].map(|v| ("candidates", Tuning { candidates: v, ..base })));
    println!("\nhybrid at 4 % of slots: learned, nothing learned, time an expert");
    for (name, tuning) in cases {
        let warm = replay(&mut hybrid(&learned, top_k, slots, tuning), held_out, slots, &hottest);
        let cold = replay(&mut hybrid(&nothing, top_k, slots, tuning), held_out, slots, &[]);
        println!(
            "{name:<18} {:>6.2} {:>6.2} {:>5.0} ns   {tuning:?}",
            warm.rate() * 100.0,
            cold.rate() * 100.0,
            warm.ns()
        );
    }
}

fn main() {
    let args: Vec<String> = std::env::args().skip(1).collect();
    if let Some(at) = args.iter().position(|arg| arg == "--record") {
        let [model, text, trace, ..] = &args[at + 1..] else { panic!("--record takes a model, a text and a trace") };
        routing::record(Path::new(model), Path::new(text)).write(Path::new(trace)).unwrap_or_else(|e| panic!("{e}"));
        return;
    }
    // Without `cargo bench` it is being tested: a small model will do.
    let is_measured = args.iter().any(|arg| arg == "--bench");
    let layers = if is_measured { TraceShape::K3.layers } else { 4 };
    let shape = TraceShape { layers, ..TraceShape::K3 };
    let (train, held_out) = match args.iter().position(|arg| arg == "--trace").map(|at| &args[at + 1..]) {
        Some([train, held_out, ..]) => {
            let read = |path: &String| Trace::read(Path::new(path)).unwrap_or_else(|error| panic!("{error}"));
            (read(train), read(held_out))
        }
        Some(_) => panic!("--trace takes two files, to learn from and to replay"),
        None => (routing::generate(shape, 0, 600, 150), routing::generate(shape, 1000, 300, 150)),
    };
    let top_k = held_out.requests().next().map_or(1, |(_, experts)| experts.len());
    let tokens = held_out.requests().count() / held_out.layers().max(1);
    println!("{} layers of {} experts, {top_k} a token, {tokens} tokens", held_out.layers(), held_out.experts());
    routing::print_figures("learned from", &train, &train, top_k);
    routing::print_figures("held out", &held_out, &train, top_k);
    compare(&train, &held_out, top_k);
    lookahead_of_made_up_routing(&train, &held_out, top_k);
    scan(&train, &held_out, top_k);
    demo_model();
    if args.iter().any(|arg| arg == "--tune") {
        tune(&train, &held_out, top_k);
    }
}
