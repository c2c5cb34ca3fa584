//! Expert reads against the drive's own rate: `cargo bench --bench store -- [--dir DIR] [--gb N] [--rounds N] [--keep]`.
//!
//! Writes files of K3-sized experts, then alternates between plain positional reads past the page cache (the ceiling) and
//! the store's request path, at several queue depths. Prints GB/s, the ratio and CPU seconds per GB.

use std::fs::File;
use std::io::Write;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use deltafin::checkpoint::{ExpertFormat, ExpertTable, Manifest};
use deltafin::interrupt::Interrupt;
use deltafin::store::{ExpertStore, StoreOptions};

/// w1, w3 `[3072, 3584]`, w2 `[3584, 3072]`: codes and scales.
const PART_BYTES: [u64; 6] = [5_505_024, 344_064, 5_505_024, 344_064, 5_505_024, 344_064];
const EXPERT_BYTES: u64 = 17_547_264;
/// Where a safetensors header would end: odd on purpose.
const HEADER_BYTES: u64 = 30_008;
const PAGE: u64 = 4096;
const HUGE: usize = 2 << 20;
/// Bytes of the store's reads.
const PIECE_BYTES: usize = 2 << 20;
/// Experts a layer asks for.
const TOP_K: usize = 16;
const DEPTHS: [usize; 4] = [1, 4, 8, 16];

struct Args {
    dir: PathBuf,
    gb: f64,
    rounds: usize,
    keep: bool,
}

fn main() {
    let Some(args) = parse(std::env::args().skip(1)) else {
        eprintln!("usage: cargo bench --bench store -- [--dir DIR] [--gb N] [--rounds N] [--keep]");
        std::process::exit(2);
    };
    let dir = args.dir.join("store-bench");
    let manifest = write_model(&dir, args.gb).expect("the files of the benchmark can be written");
    let experts = manifest.experts.as_ref().map_or(0, |table| table.num_experts);
    println!(
        "{experts} experts of {EXPERT_BYTES} bytes in {}, read in pieces of {PIECE_BYTES}, median of {} rounds",
        dir.display(),
        args.rounds
    );
    println!("depth   raw GB/s  CPU s/GB   store GB/s  CPU s/GB   spread      store/raw   mode");
    let stores = DEPTHS.map(|depth| {
        let options = StoreOptions {
            slots: 2 * TOP_K,
            direct: true,
            queue_depth: depth,
            piece_bytes: PIECE_BYTES,
            verify: false,
        };
        let store = ExpertStore::open(&manifest, &[], &options, Interrupt::new()).expect("the store opens");
        read_store(&store, &shuffled(experts, 0)); // commits the slots' memory, which happens once in a run
        store
    });
    // As much as the store reads into: what is read twice into the same place finds it in the processor's cache.
    let mut memory = vec![0_u8; 2 * TOP_K * EXPERT_BYTES as usize + HUGE];
    let start = memory.as_ptr().align_offset(HUGE);
    let memory = &mut memory[start..][..2 * TOP_K * EXPERT_BYTES as usize];
    ask_for_huge_pages(memory);
    memory.fill(1);
    // All depths in every round, since a drive's rate changes from minute to minute.
    let mut rounds: Vec<[(Sample, Sample); DEPTHS.len()]> = Vec::new();
    for round in 0..args.rounds {
        rounds.push(std::array::from_fn(|i| {
            let order = shuffled(experts, (DEPTHS.len() * round + i + 1) as u64);
            let mut raw = || measure(|| read_raw(&manifest, &order, memory, DEPTHS[i]));
            let store = || measure(|| read_store(&stores[i], &order));
            // By turns first.
            if (round + i).is_multiple_of(2) {
                let raw = raw();
                (raw, store())
            } else {
                let store = store();
                (raw(), store)
            }
        }));
    }
    for (i, depth) in DEPTHS.iter().enumerate() {
        let mode: String = stores[i].stats().drives.into_iter().map(|drive| drive.mode).collect();
        let raw = median(rounds.iter().map(|round| round[i].0).collect());
        let store = median(rounds.iter().map(|round| round[i].1).collect());
        println!(
            "{depth:>5}   {:>8.3}  {:>8.4}   {:>10.3}  {:>8.4}   {:>5.3}-{:<5.3} {:>9.3}   {mode}",
            raw.rate,
            raw.cpu,
            store.rate,
            store.cpu,
            store.slowest,
            store.fastest,
            store.rate / raw.rate
        );
    }
    // Each at its own best depth of a round.
    let best = |rate: &dyn Fn(&(Sample, Sample)) -> f64, round: &[(Sample, Sample)]| {
        round.iter().map(rate).fold(0.0_f64, f64::max)
    };
    let mut ratios: Vec<f64> =
        rounds.iter().map(|round| best(&|pair| pair.1.rate, round) / best(&|pair| pair.0.rate, round)).collect();
    ratios.sort_by(f64::total_cmp);
    let (least, most) = (ratios[0], ratios[ratios.len() - 1]);
    println!("best store/best raw of a round: median {:.3}, {least:.3}-{most:.3}", ratios[ratios.len() / 2]);
    if !args.keep {
        let _ = std::fs::remove_dir_all(&dir);
    }
}

fn parse(mut words: impl Iterator<Item = String>) -> Option<Args> {
    let mut args = Args { dir: PathBuf::from("target/tmp"), gb: 2.0, rounds: 3, keep: false };
    while let Some(word) = words.next() {
        match word.as_str() {
            "--dir" => args.dir = words.next()?.into(),
            "--gb" => args.gb = words.next()?.parse().ok()?,
            "--rounds" => args.rounds = words.next()?.parse().ok().filter(|rounds| *rounds > 0)?,
            "--keep" => args.keep = true,
            "--bench" => {}
            _ => return None,
        }
    }
    Some(args)
}

/// Two shards of experts, each expert's parts adjacent, as released. Files of the right size are used again.
fn write_model(dir: &Path, gb: f64) -> std::io::Result<Manifest> {
    std::fs::create_dir_all(dir)?;
    let experts = ((gb * 1e9 / EXPERT_BYTES as f64) as u64).clamp(2 * TOP_K as u64, 65_534) / 2 * 2;
    let shard_bytes = HEADER_BYTES + experts / 2 * EXPERT_BYTES;
    let shards: Vec<PathBuf> = ["a", "b"].iter().map(|name| dir.join(name)).collect();
    let block: Vec<u8> = (0..EXPERT_BYTES).map(|at| ((at * 2_654_435_761) >> 13) as u8 % 255).collect();
    for path in &shards {
        if std::fs::metadata(path).is_ok_and(|found| found.len() == shard_bytes) {
            continue;
        }
        let mut file = File::create(path)?;
        file.write_all(&block[..HEADER_BYTES as usize])?;
        (0..experts / 2).try_for_each(|_| file.write_all(&block))?;
        file.sync_all()?;
    }
    let places = (0..experts).flat_map(|expert| {
        let start = HEADER_BYTES + expert / 2 * EXPERT_BYTES;
        PART_BYTES.iter().scan(start, move |at, len| {
            let offset = *at;
            *at += len;
            Some(((expert % 2) as u16, offset))
        })
    });
    Ok(Manifest {
        dir: dir.to_path_buf(),
        shard_bytes: vec![shard_bytes; 2],
        shards,
        trunk: Vec::new(),
        experts: Some(ExpertTable {
            format: ExpertFormat::Mxfp4,
            part_bytes: PART_BYTES.to_vec(),
            num_experts: experts as usize,
            moe_layers: vec![1],
            places: places.collect(),
        }),
        ignored: Vec::new(),
    })
}

/// The ceiling: `depth` threads, each reading whole pieces of the experts in `order`, with nothing done to them. Returns
/// the bytes of the experts.
fn read_raw(manifest: &Manifest, order: &[u16], memory: &mut [u8], depth: usize) -> u64 {
    let mut pieces = Vec::new();
    for &expert in order {
        let start = HEADER_BYTES + u64::from(expert) / 2 * EXPERT_BYTES;
        let (first, end) = (start / PAGE * PAGE, (start + EXPERT_BYTES).next_multiple_of(PAGE));
        let count = (end - first).div_ceil(PIECE_BYTES as u64);
        let len = ((end - first) / count).next_multiple_of(PAGE);
        let at = (first..end).step_by(len as usize);
        pieces.extend(at.map(|at| (usize::from(expert) % 2, at, len.min(end - at) as usize)));
    }
    let files: Vec<File> = manifest.shards.iter().map(|path| open_direct(path)).collect();
    let next = AtomicUsize::new(0);
    std::thread::scope(|scope| {
        for memory in memory.chunks_exact_mut(memory.len() / depth / HUGE * HUGE).take(depth) {
            scope.spawn(|| {
                let mut places = (0..memory.len() / PIECE_BYTES).cycle().map(|i| i * PIECE_BYTES);
                while let Some((file, at, len)) = pieces.get(next.fetch_add(1, Ordering::Relaxed)) {
                    let place = places.next().expect("room for a piece");
                    let got = files[*file].read_at(&mut memory[place..][..*len], *at).expect("the files can be read");
                    // The last page of a file is broken.
                    assert!(got + PAGE as usize > *len, "{got} of {len} bytes");
                }
            });
        }
    });
    order.len() as u64 * EXPERT_BYTES
}

/// Without them the ceiling is far too low: a read into scattered small pages becomes many small requests.
fn ask_for_huge_pages(memory: &mut [u8]) {
    #[cfg(target_os = "linux")]
    // SAFETY: advice on how to back memory that is borrowed mutably; its contents stay. Failure costs speed only.
    unsafe {
        libc::madvise(memory.as_mut_ptr().cast(), memory.len(), libc::MADV_HUGEPAGE);
    }
    let _ = memory;
}

fn open_direct(path: &Path) -> File {
    let mut options = File::options();
    options.read(true);
    #[cfg(target_os = "linux")]
    options.custom_flags(libc::O_DIRECT);
    #[cfg(not(target_os = "linux"))]
    options.custom_flags(0);
    options.open(path).expect("the files can be opened past the page cache; try another --dir")
}

/// The store: requests of a layer's experts, one after the other. Returns the bytes of the experts that were read, not
/// those that were in memory.
fn read_store(store: &ExpertStore, order: &[u16]) -> u64 {
    let before = store.stats();
    for experts in order.chunks(TOP_K) {
        let mut experts = experts.to_vec();
        experts.sort_unstable();
        let mut request = store.request(1, &experts);
        while request.next().expect("experts can be read").is_some() {}
    }
    let after = store.stats();
    assert_eq!(after.hits + after.misses - before.hits - before.misses, order.len() as u64);
    after.expert_bytes - before.expert_bytes
}

#[derive(Clone, Copy)]
struct Sample {
    rate: f64,
    cpu: f64,
    slowest: f64,
    fastest: f64,
}

/// GB/s and CPU seconds per GB of `work`, which returns the bytes that it read.
fn measure(work: impl FnOnce() -> u64) -> Sample {
    let (start, cpu) = (Instant::now(), cpu_seconds());
    let gb = work() as f64 / 1e9;
    let rate = gb / start.elapsed().as_secs_f64();
    Sample { rate, cpu: (cpu_seconds() - cpu) / gb, slowest: rate, fastest: rate }
}

fn median(mut samples: Vec<Sample>) -> Sample {
    samples.sort_by(|a, b| a.rate.total_cmp(&b.rate));
    let (slowest, fastest) = (samples[0].rate, samples[samples.len() - 1].rate);
    let middle = &samples[samples.len() / 2];
    Sample { rate: middle.rate, cpu: middle.cpu, slowest, fastest }
}

/// User and system time of this process so far; not a number where it is not known.
fn cpu_seconds() -> f64 {
    let stat = std::fs::read_to_string("/proc/self/stat").unwrap_or_default();
    let after_name = stat.rsplit(')').next().unwrap_or_default();
    let ticks: Vec<f64> = after_name.split_whitespace().skip(11).take(2).filter_map(|word| word.parse().ok()).collect();
    if ticks.len() == 2 { (ticks[0] + ticks[1]) / 100.0 } else { f64::NAN }
}

/// The numbers below `count` in an order that depends on `seed`.
fn shuffled(count: usize, seed: u64) -> Vec<u16> {
    let mut numbers: Vec<u16> = (0..count as u16).collect();
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    for at in (1..numbers.len()).rev() {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        numbers.swap(at, (state % (at as u64 + 1)) as usize);
    }
    numbers
}
