//! A token costs no large allocation: everything of size is allocated before the first one. Alone in its binary, because
//! the allocator counts for the whole process.

use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};

use deltafin::engine::{Engine, EngineOptions};
use deltafin::generate::{Sampler, Sampling};
use deltafin::interrupt::Interrupt;

/// Hands everything on to the system's allocator, and keeps the size of the largest allocation.
struct Counting;

static LARGEST: AtomicUsize = AtomicUsize::new(0);

// SAFETY: the system's allocator does the work with the arguments as they came; a counter allocates nothing.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: the caller's promise about `layout` is the one that is asked for.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        LARGEST.fetch_max(layout.size(), Ordering::Relaxed);
        // SAFETY: as in `alloc`.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn realloc(&self, memory: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        LARGEST.fetch_max(size, Ordering::Relaxed);
        // SAFETY: as in `alloc`; `memory` came from the same allocator.
        unsafe { System.realloc(memory, layout, size) }
    }

    unsafe fn dealloc(&self, memory: *mut u8, layout: Layout) {
        // SAFETY: `memory` came from the same allocator, with this `layout`.
        unsafe { System.dealloc(memory, layout) }
    }
}

#[global_allocator]
static ALLOCATOR: Counting = Counting;

#[test]
fn decoding_allocates_nothing_large() {
    const LIMIT: usize = 1 << 20;
    // Few slots, so that experts are evicted and read again.
    let options = EngineOptions {
        expert_memory: Some(1 << 20),
        threads: Some(2),
        ..EngineOptions::new(Path::new(env!("CARGO_MANIFEST_DIR")).join("assets/demo-model"), 400)
    };
    let engine = Engine::open(&options, &(), &Interrupt::new()).expect("opens");
    let mut session = engine.session().expect("a session");
    let mut sampler =
        Sampler::new(&Sampling { temperature: 1.0, top_p: 0.9, seed: 7, ..Sampling::default() }).expect("legal");
    let mut id = sampler.sample(session.feed(&[100, 200, 300], &()).expect("computed"));
    drop(std::hint::black_box(vec![1_u8; LIMIT]));
    let before = LARGEST.swap(0, Ordering::Relaxed);
    assert!(before >= LIMIT, "the counter counts: {before}");
    let mapped = mapped_bytes();
    for _ in 0..300 {
        id = sampler.sample(session.feed(&[id], &()).expect("computed"));
    }
    let largest = LARGEST.load(Ordering::Relaxed);
    assert!(largest < LIMIT, "an allocation of {largest} bytes");
    // What is mapped without the allocator's help, as long buffers are.
    let more = mapped_bytes().saturating_sub(mapped);
    assert!(more < LIMIT, "{more} more bytes are mapped");
    let read = engine.store_stats();
    assert!(read.evictions > 0, "experts came and went: {read:?}");
}

/// Bytes of address space in use; 0 where the system does not tell.
fn mapped_bytes() -> usize {
    let pages = std::fs::read_to_string("/proc/self/statm").ok();
    pages.and_then(|text| text.split(' ').next()?.parse::<usize>().ok()).unwrap_or(0) * 4096
}
