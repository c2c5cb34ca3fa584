//! A prompt in one step reads each expert that it needs once and nothing else: by the store's counters, by the kernel's,
//! and however many slots, drives and copies there are. `cargo test --test prefill_reads -- --nocapture` prints figures.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use deltafin::engine::{Engine, EngineOptions};
use deltafin::interrupt::Interrupt;
use deltafin::model::{Observer, Routes};
use deltafin::store::StoreStats;
use deltafin::synth::{self, Content, Preset, Recipe, Shape};
use tempfile::TempDir;

/// Prompts, each run in one step.
const PROMPTS: [usize; 11] = [2, 3, 7, 16, 63, 64, 255, 512, 1000, 2048, 4096];
/// Experts a token, and so the fewest slots that can run.
const TOP_K: usize = 8;
const EXPERTS: usize = 224;

/// A model in `m` with all of its experts on `a`, and on `b` again; `c` and `d` have half of them each.
fn place() -> &'static Path {
    static PLACE: OnceLock<TempDir> = OnceLock::new();
    let place = PLACE.get_or_init(|| {
        let place = tempfile::tempdir_in(env!("CARGO_TARGET_TMPDIR")).expect("a directory");
        let shape = Shape { experts: EXPERTS, top_k: TOP_K, context: 8192, ..Preset::Tiny.shape() };
        let recipe = Recipe::new(shape, 11, false, Content::Seeded);
        synth::write(&place.path().join("m"), &recipe, 2, &mut |_, _| (), &Interrupt::new()).expect("written");
        for to in [&["--to", "a", "--to", "b", "--replicas", "2"][..], &["--to", "c", "--to", "d"]] {
            let mut pack = std::process::Command::new(env!("CARGO_BIN_EXE_deltafin"));
            pack.args(["pack", "-m", "m", "--no-learn", "-q"]).args(to).current_dir(place.path());
            assert!(pack.status().expect("it starts").success());
        }
        place
    });
    place.path()
}

/// The kernel counts for the whole process: one at a time.
fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

fn open(roots: &[&str], slots: usize, lookahead: bool) -> Engine {
    let experts = roots.iter().map(|root| place().join(root)).collect();
    let options = EngineOptions {
        threads: Some(2),
        step: Some(PROMPTS[PROMPTS.len() - 1]),
        expert_memory: Some(1 << 20),
        experts,
        lookahead,
        ..EngineOptions::new(place().join("m"), PROMPTS[PROMPTS.len() - 1])
    };
    let plan = Engine::survey(&options).expect("a plan").plan;
    let slot = plan.experts / plan.slots;
    let options = EngineOptions { expert_memory: Some(slots as u64 * slot), ..options };
    let engine = Engine::open(&options, &(), &Interrupt::new()).expect("opens");
    assert_eq!(engine.memory_plan().slots, slots as u64);
    engine
}

/// What the router chose, and what was guessed before.
#[derive(Default)]
struct Seen {
    /// Distinct experts of all layers.
    needed: u64,
    guessed: u64,
    wrong: u64,
    open: (usize, Vec<u16>),
}

impl Observer for Seen {
    fn guess(&mut self, layer: usize, experts: &[u16], _likely: usize) {
        self.open = (layer, experts.to_vec());
    }

    fn routes(&mut self, layer: usize, routes: &Routes) {
        let distinct: BTreeSet<u16> = routes.ids.iter().copied().collect();
        self.needed += distinct.len() as u64;
        let (of, guess) = std::mem::take(&mut self.open);
        self.guessed += guess.len() as u64;
        self.wrong += guess.iter().filter(|expert| of != layer || !distinct.contains(expert)).count() as u64;
    }
}

/// Counters of the store once nothing is being read.
fn settled(engine: &Engine) -> StoreStats {
    let bytes = |stats: &StoreStats| stats.drives.iter().map(|drive| drive.bytes).sum::<u64>();
    let mut last = engine.store_stats();
    loop {
        std::thread::sleep(Duration::from_millis(4));
        let now = engine.store_stats();
        if bytes(&now) == bytes(&last) && now.expert_bytes == last.expert_bytes {
            return now;
        }
        last = now;
    }
}

/// What a prompt came to.
struct Reads {
    seen: Seen,
    /// Experts read, whole.
    read: u64,
    misses: u64,
    hits: u64,
    wasted: u64,
    /// Bytes asked of the system.
    #[cfg_attr(not(target_os = "linux"), expect(dead_code, reason = "compared with the counters of Linux"))]
    bytes: u64,
}

const EXPERT_BYTES: u64 = 3 * 96 * 64 / 32 * 17;

/// Tokens of a prompt.
fn ids(tokens: usize) -> Vec<u32> {
    (0..tokens as u32).map(|at| at.wrapping_mul(2_654_435_761) % 1900).collect()
}

fn prompt(engine: &Engine, ids: &[u32]) -> Reads {
    engine.clear_experts();
    let before = settled(engine);
    let mut seen = Seen::default();
    engine.session().expect("room").feed_observed(ids, &(), &mut seen).expect("fed");
    let after = settled(engine);
    let bytes = |stats: &StoreStats| stats.drives.iter().map(|drive| drive.bytes).sum::<u64>();
    assert_eq!((after.expert_bytes - before.expert_bytes) % EXPERT_BYTES, 0);
    Reads {
        seen,
        read: (after.expert_bytes - before.expert_bytes) / EXPERT_BYTES,
        misses: after.misses - before.misses,
        hits: after.hits - before.hits,
        wasted: (after.lookahead_wasted_bytes - before.lookahead_wasted_bytes) / EXPERT_BYTES,
        bytes: bytes(&after) - bytes(&before),
    }
}

#[test]
fn every_needed_expert_is_read_once_whatever_the_slots_and_drives() {
    let _alone = alone();
    for roots in [&[][..], &["a", "b"], &["c", "d"], &["a", "b", "c", "d"]] {
        for slots in [TOP_K, TOP_K + 1, 61, 300, 3 * EXPERTS] {
            for lookahead in if slots == 61 { &[true, false][..] } else { &[true] } {
                let lookahead = *lookahead;
                let engine = open(roots, slots, lookahead);
                for tokens in PROMPTS {
                    let case = format!("{tokens} tokens, {slots} slots, lookahead {lookahead}, {roots:?}");
                    let Reads { seen, read, misses, hits, wasted, .. } = prompt(&engine, &ids(tokens));
                    println!("{case}: {} needed, {read} read, {} guessed, {wasted} wasted", seen.needed, seen.guessed);
                    assert!(tokens < 512 || seen.needed > EXPERTS as u64, "{case}: {}", seen.needed);
                    assert_eq!((misses, hits), (seen.needed, 0), "{case}");
                    assert_eq!(seen.wrong, 0, "{case}: of {} guesses", seen.guessed);
                    assert_eq!((read, wasted), (seen.needed, 0), "{case}");
                }
            }
        }
    }
}

/// Waits, where a layer ends and where the next one's router has chosen, for the reads that should have begun before.
struct Between<'a> {
    engine: &'a Engine,
    /// Slots that guesses may have.
    room: u64,
    before: u64,
    needed: u64,
    guessed: u64,
    layers: usize,
    ahead: u64,
}

impl Between<'_> {
    /// Waits for all reads that were asked for, and `ahead` more.
    fn wait(&self, ahead: u64) {
        let (began, expected) = (Instant::now(), self.before + (self.needed + ahead) * EXPERT_BYTES);
        while self.engine.store_stats().expert_bytes < expected {
            assert!(began.elapsed() < Duration::from_secs(10), "{ahead} reads for the next layer have not begun");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}

impl Observer for Between<'_> {
    fn guess(&mut self, _layer: usize, experts: &[u16], _likely: usize) {
        self.guessed = experts.len() as u64;
    }

    fn routes(&mut self, _layer: usize, routes: &Routes) {
        self.needed += routes.ids.iter().collect::<BTreeSet<_>>().len() as u64;
    }

    fn layer(&mut self, _layer: usize, _hidden: &[f32]) {
        let ahead = std::mem::take(&mut self.guessed).min(self.room);
        self.wait(ahead);
        self.layers += usize::from(ahead > 0);
        self.ahead += ahead;
    }
}

#[test]
fn the_next_layers_reads_begin_before_a_layer_ends() {
    let _alone = alone();
    for slots in [TOP_K, TOP_K + 1, 61, 300] {
        for tokens in [255, 512, 4096] {
            let engine = open(&[], slots, true);
            engine.clear_experts();
            let before = settled(&engine).expert_bytes;
            let room = slots as u64 / 2;
            let mut between = Between { engine: &engine, room, before, needed: 0, guessed: 0, layers: 0, ahead: 0 };
            engine.session().expect("room").feed_observed(&ids(tokens), &(), &mut between).expect("fed");
            let Between { needed, layers, ahead, .. } = between;
            println!("{tokens} tokens, {slots} slots: {ahead} of {needed} experts before their layer began");
            // Three layers with experts, one behind another without.
            assert_eq!(layers, 3, "{slots} slots");
            let stats = settled(&engine);
            assert_eq!(stats.expert_bytes - before, needed * EXPERT_BYTES, "{slots} slots");
            assert_eq!(stats.lookahead_wasted_bytes, 0);
        }
    }
}

#[test]
fn rows_of_few_tokens_err_alike_and_read_nothing_in_vain() {
    let _alone = alone();
    for slots in [TOP_K, 300] {
        let engine = open(&[], slots, true);
        for kinds in [1, 2, 3, 5, 6, 8, 20, 100] {
            for tokens in [16, 64, 255, 512] {
                let ids: Vec<u32> = (0..tokens).map(|at: u32| at.wrapping_mul(40_503) / 7 % kinds * 17).collect();
                let Reads { seen, read, wasted, .. } = prompt(&engine, &ids);
                assert_eq!((read, wasted), (seen.needed, 0), "{kinds} tokens {tokens} times, {slots} slots");
                assert_eq!(seen.wrong, 0, "{kinds} tokens {tokens} times, {slots} slots");
            }
        }
    }
}

/// `name` of this process.
#[cfg(target_os = "linux")]
fn kernel(name: &str) -> Option<u64> {
    let io = std::fs::read_to_string("/proc/self/io").ok()?;
    io.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(": "))?.parse().ok()
}

#[test]
#[cfg(target_os = "linux")]
fn the_kernel_counts_the_same_reads() {
    let _alone = alone();
    for roots in [&[][..], &["a", "b"], &["c", "d"]] {
        for slots in [TOP_K, 61] {
            let engine = open(roots, slots, true);
            let direct = engine.store_stats().drives.iter().all(|drive| drive.mode == "direct");
            for tokens in PROMPTS {
                let counters = || Some([kernel("rchar")?, kernel("read_bytes")?]);
                let Some(before) = counters() else { return };
                let reads = prompt(&engine, &ids(tokens));
                let after = counters().expect("as before");
                let (read, fetched) = (after[0] - before[0], after[1] - before[1]);
                let asked = reads.bytes;
                let case = format!("{tokens} tokens, {slots} slots, {roots:?}");
                // Looking counts too, some hundred bytes a time.
                assert!((asked..asked + 2000).contains(&read), "{case}: {read} read, {asked} asked");
                // The broken page at the end of each of four shards may be in memory, and the one before it.
                assert!(!direct || fetched.abs_diff(asked) <= 4 * 8192, "{case}: {fetched} fetched, {asked} asked");
                // A page at most at either end of an expert that does not lie at pages.
                let pages = reads.seen.needed * 8192;
                let needed = reads.seen.needed * EXPERT_BYTES;
                assert!((needed..=needed + pages).contains(&asked), "{tokens} tokens: {} of {needed}", reads.bytes);
            }
        }
    }
}
