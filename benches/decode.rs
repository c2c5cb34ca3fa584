//! Whole decode steps of a synthetic model with K3's expert size, against the longer of what their reads and their
//! arithmetic take alone: `cargo bench --bench decode -- [--dir DIR] [--slice] [--steps N] [--rounds N] [--keep]`.
//!
//! Each round measures, one after the other: steps that read all their experts (wall), the same steps with all experts in
//! memory (compute), and the rate of the drive for random reads of experts (read: the same bytes at that rate). A step that
//! hides one behind the other takes no longer than the longer of the two.
//!
//! `--slice` takes three layers of K3's full width (7 GB of files, 6 GB of memory), else the trunk is a small one.

use std::path::{Path, PathBuf};
use std::time::Instant;

use deltafin::bench::drive_rate;
use deltafin::checkpoint::Manifest;
use deltafin::config::ModelConfig;
use deltafin::engine::{Engine, EngineOptions};
use deltafin::generate::Session;
use deltafin::interrupt::Interrupt;
use deltafin::model::{Observer, Routes};
use deltafin::synth::{self, Content, Preset, Recipe, Shape};

/// Steps before any that are measured.
const WARM_UP: usize = 2;

struct Args {
    dir: PathBuf,
    slice: bool,
    steps: usize,
    rounds: usize,
    keep: bool,
}

fn main() {
    let Some(args) = parse(std::env::args().skip(1)) else {
        eprintln!("usage: cargo bench --bench decode -- [--dir DIR] [--slice] [--steps N] [--rounds N] [--keep]");
        std::process::exit(2);
    };
    let name = if args.slice { "decode-slice" } else { "decode-small" };
    let dir = args.dir.join(name);
    make_model(&dir, args.slice);
    let config = ModelConfig::load(&dir).expect("a synthetic model has a configuration");
    let manifest = Manifest::open(&dir, &config).expect("a synthetic model is whole");
    let mut options = EngineOptions::new(&dir, WARM_UP + args.steps);
    options.step = Some(1);
    let engine = Engine::open(&options, &(), &Interrupt::new()).expect("the model opens");
    println!(
        "{}: {:.2} GB trunk, experts of {} bytes, {} × {} threads, median of {} rounds of {} steps",
        dir.display(),
        manifest.trunk_bytes() as f64 / 1e9,
        manifest.expert_bytes(),
        engine.isa_name(),
        engine.threads(),
        args.rounds,
        args.steps
    );
    let mut times: [Vec<f64>; 3] = Default::default();
    let mut read_bytes = 0;
    for round in 0..args.rounds {
        let mut session = engine.session().expect("there is memory for a sequence");
        (0..WARM_UP).for_each(|at| drop(step(&mut session, token(round, at, &config))));
        let mark = session.mark().expect("the sequence is whole");
        let wall = time(|| run(&engine, &mut session, round, &config, &args, true));
        session.rewind(&mark).expect("the sequence's own mark");
        // Once more, to bring every expert into memory, and then with all of them there.
        let places = run(&engine, &mut session, round, &config, &args, false);
        session.rewind(&mark).expect("the sequence's own mark");
        let before = engine.store_stats().misses;
        let compute = time(|| run(&engine, &mut session, round, &config, &args, false));
        assert_eq!(engine.store_stats().misses, before, "all experts fit in memory");
        let rate =
            drive_rate(&manifest, &[], true, &Interrupt::new()).expect("the drive reads").expect("there are experts");
        read_bytes = places.len() as u64 * manifest.expert_bytes();
        times[0].push(wall);
        times[1].push(compute);
        times[2].push(read_bytes as f64 / rate);
    }
    let ratios: Vec<f64> = (0..args.rounds).map(|at| times[0][at] / times[1][at].max(times[2][at])).collect();
    let [wall, compute, read] = times.map(|times| median(&times) / args.steps as f64);
    let gb = read_bytes as f64 / 1e9 / args.steps as f64;
    println!("a step     {:>9.2} ms  {:.2} tokens/s, {gb:.3} GB", 1e3 * wall, 1.0 / wall);
    println!("compute    {:>9.2} ms  with all experts in memory", 1e3 * compute);
    println!("read       {:>9.2} ms  {:.3} GB/s, the drive's best of several queue depths", 1e3 * read, gb / read);
    let (least, most) = ratios.iter().fold((f64::INFINITY, 0.0_f64), |(a, b), r| (a.min(*r), b.max(*r)));
    println!("step / max(compute, read)   {:.3}  ({least:.3}–{most:.3})", median(&ratios));
    drop(engine);
    if !args.keep {
        let _ = std::fs::remove_dir_all(&dir);
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Option<Args> {
    let mut args = Args { dir: PathBuf::from("target/tmp"), slice: false, steps: 8, rounds: 3, keep: false };
    let positive = |word: String| word.parse().ok().filter(|number| *number > 0_usize);
    while let Some(word) = words.next() {
        match word.as_str() {
            "--dir" => args.dir = words.next()?.into(),
            "--slice" => args.slice = true,
            "--steps" => args.steps = positive(words.next()?)?,
            "--rounds" => args.rounds = positive(words.next()?)?,
            "--keep" => args.keep = true,
            "--bench" => {}
            _ => return None,
        }
    }
    Some(args)
}

/// Two layers with experts of K3's size, or K3's widths throughout. A model that is there is used again.
fn make_model(dir: &Path, slice: bool) {
    let shape = match slice {
        true => Preset::Slice.shape(),
        false => {
            Shape { layers: 3, mla_every: 3, experts: 48, vocab: 4096, dense_inner: 4096, ..Preset::Stream.shape() }
        }
    };
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    let recipe = Recipe::new(shape, 1, false, Content::Seeded);
    synth::write(dir, &recipe, threads, &mut |_, _| (), &Interrupt::new()).expect("the model can be written");
}

fn token(round: usize, at: usize, config: &ModelConfig) -> u32 {
    ((round * 1009 + at * 7919 + 1) % config.vocab_size) as u32
}

/// The layers and experts that a step asks for.
#[derive(Default)]
struct Asked(Vec<(u16, u16)>);

impl Observer for Asked {
    fn routes(&mut self, layer: usize, routes: &Routes) {
        self.0.extend(routes.ids.iter().map(|id| (layer as u16, *id)));
    }
}

fn step(session: &mut Session<'_>, token: u32) -> Vec<(u16, u16)> {
    let mut asked = Asked::default();
    session.feed_observed(&[token], &(), &mut asked).expect("a step computes");
    asked.0
}

/// The measured steps; with `cold` each begins with no expert in memory. Returns the experts asked for.
fn run(
    engine: &Engine,
    session: &mut Session<'_>,
    round: usize,
    config: &ModelConfig,
    args: &Args,
    cold: bool,
) -> Vec<(u16, u16)> {
    let mut asked = Vec::new();
    for at in 0..args.steps {
        if cold {
            engine.clear_experts();
        }
        asked.extend(step(session, token(round, WARM_UP + at, config)));
    }
    asked
}

/// Seconds of `work`.
fn time<T>(work: impl FnOnce() -> T) -> f64 {
    let start = Instant::now();
    std::hint::black_box(work());
    start.elapsed().as_secs_f64()
}

fn median(values: &[f64]) -> f64 {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    sorted[sorted.len() / 2]
}
