//! Times of kernels beside what the machine can do at best, measured in turns with them, so that whoever else uses the
//! machine takes from both.

use std::cell::RefCell;
use std::collections::HashMap;
use std::time::{Duration, Instant};

use deltafin::interrupt::Interrupt;
use deltafin::kernels::{Compute, Isa, thread_seconds};

/// Bytes that the memory's rate is measured on, in parts: far beyond any last-level cache.
const POOL_BYTES: usize = 384 << 20;
const PART_BYTES: usize = 64 << 20;

/// What the command line asks for: `[--quick] [filter…]`.
pub struct Wanted {
    filters: Vec<String>,
    pub quick: bool,
    /// The best time of each line on one thread, by instruction set and name.
    alone: RefCell<HashMap<(&'static str, String), f64>>,
}

impl Wanted {
    pub fn from_args() -> Self {
        let filters = std::env::args().skip(1).filter(|a| !a.starts_with("--")).collect();
        Self { filters, quick: std::env::args().any(|a| a == "--quick"), alone: RefCell::default() }
    }

    /// Every instruction set asked for, on one thread and on all; those that this processor lacks are named.
    pub fn machines(&self) -> Vec<Compute> {
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = if cores > 1 { vec![1, cores] } else { vec![1] };
        let (here, absent): (Vec<_>, Vec<_>) = Isa::ALL.into_iter().partition(|i| Compute::available().contains(i));
        for isa in absent {
            println!("{isa}: not available on this processor, skipped\n");
        }
        let named = self.filters.iter().any(|f| Isa::ALL.iter().any(|isa| isa.name() == f));
        here.into_iter()
            .filter(|isa| !named || self.filters.iter().any(|f| f == isa.name()))
            .flat_map(|isa| threads.iter().map(move |n| (isa, *n)))
            .map(|(isa, threads)| Compute::new(Some(isa), threads, Interrupt::new()).expect("available"))
            .collect()
    }

    /// Whether a line's name has one of the filters that name no instruction set, if there are any.
    fn line(&self, name: &str) -> bool {
        let mut of_lines = self.filters.iter().filter(|f| Isa::ALL.iter().all(|isa| isa.name() != *f)).peekable();
        of_lines.peek().is_none() || of_lines.any(|f| name.contains(f.as_str()))
    }
}

/// One instruction set and thread count, with the best that was seen of its limits.
pub struct Bench<'a> {
    pub compute: &'a Compute,
    wanted: &'a Wanted,
    pool: &'a [u8],
    part: usize,
    /// Bytes a second.
    read: f64,
    /// Multiply-adds a second.
    fma: f64,
}

impl<'a> Bench<'a> {
    pub fn new(wanted: &'a Wanted, compute: &'a Compute, pool: &'a [u8]) -> Self {
        let mut bench = Self { compute, wanted, pool, part: 0, read: 0.0, fma: 0.0 };
        (0..8).for_each(|_| bench.measure_limits());
        println!(
            "{} × {}: memory read {:.1} GB/s, multiply-adds {:.1} GFLOP/s{}",
            compute.isa_name(),
            compute.threads(),
            bench.read / 1e9,
            2.0 * bench.fma / 1e9,
            if compute.threads() == 1 { ", processor time" } else { "" },
        );
        bench
    }

    /// Times `f`, which reads `bytes` from memory and does `fma` multiply-adds, in turns with the limits; prints a line
    /// with the best and the median time, the best time's share of the limits, and on several threads how many times as
    /// fast as on one.
    pub fn line(&mut self, name: &str, bytes: f64, fma: f64, mut f: impl FnMut()) {
        if !self.wanted.line(name) {
            return;
        }
        let budget = Duration::from_millis(if self.wanted.quick { 100 } else { 600 });
        f();
        let (start, mut times) = (Instant::now(), Vec::new());
        while times.len() < 3 || start.elapsed() < budget {
            self.measure_limits();
            let turn = Instant::now();
            while turn.elapsed() < Duration::from_millis(10) {
                times.push(self.seconds(&mut f));
            }
        }
        times.sort_unstable_by(f64::total_cmp);
        let at = |part: usize| times[(times.len() - 1) * part / 4];
        let (best, median) = (times[0], at(2));
        let mut alone = self.wanted.alone.borrow_mut();
        let of_one = alone.get(&(self.compute.isa_name(), name.to_owned()));
        let faster = of_one.map_or(String::new(), |one| format!("  {:.2} × one thread", one / best));
        println!(
            "  {name:<36} {:>10.1} µs, median {:>10.1} ± {:>2.0} %  {:>6.1} GB/s {:>4.0} %  {:>7.1} GFLOP/s {:>4.0} %{faster}",
            best * 1e6,
            median * 1e6,
            50.0 * (at(3) - at(1)) / median,
            bytes / best / 1e9,
            100.0 * bytes / best / self.read,
            2.0 * fma / best / 1e9,
            100.0 * fma / best / self.fma,
        );
        if self.compute.threads() == 1 {
            alone.insert((self.compute.isa_name(), name.to_owned()), best);
        }
    }

    fn measure_limits(&mut self) {
        let (mut fma, mut read) = (0.0, 0.0);
        let compute = self.compute;
        // Their rates go by the clock on the wall.
        let (wall, own) = (Instant::now(), self.seconds(&mut || fma = compute.measure_fma()));
        self.fma = self.fma.max(fma * wall.elapsed().as_secs_f64() / own);
        let part = &self.pool[self.part * PART_BYTES..][..PART_BYTES];
        self.part = (self.part + 1) % (self.pool.len() / PART_BYTES);
        let (wall, own) = (Instant::now(), self.seconds(&mut || read = compute.measure_read(part)));
        self.read = self.read.max(read * wall.elapsed().as_secs_f64() / own);
    }

    /// How long `f` takes: on one thread in its processor's time, on several on the wall.
    fn seconds(&self, f: &mut dyn FnMut()) -> f64 {
        let (wall, own) = (Instant::now(), thread_seconds());
        f();
        let own = thread_seconds() - own;
        if self.compute.threads() == 1 && own > 0.0 { own } else { wall.elapsed().as_secs_f64() }
    }
}

/// Bytes whose bf16 and E8M0 readings are ordinary numbers: no infinities, no NaNs, no subnormals.
pub fn pool() -> Vec<u8> {
    let mut state = 1u32;
    let mut next = || {
        state ^= state << 13;
        state ^= state >> 17;
        state ^= state << 5;
        (state >> 8) as u8
    };
    (0..POOL_BYTES).map(|_| 0x38 | next() & 0x87).collect()
}

/// Values of either sign up to 1 that never repeat soon.
pub fn wave(n: usize) -> Vec<f32> {
    (0..n).map(|i| (i as f32 * 0.7).sin()).collect()
}
