//! Slices sixteen lanes at a time: loads and stores with a short end, and the canonical dot product.

use super::lanes::{LANES, Lanes};

/// The first `n` floats from `p`, at most sixteen; other lanes +0.0.
///
/// # Safety
/// The CPU has the instructions of `L`; min(n, 16) floats are readable at `p`.
#[inline(always)]
pub(super) unsafe fn load<L: Lanes>(p: *const f32, n: usize) -> L {
    // SAFETY: by this function's contract.
    unsafe { if n >= LANES { L::load(p) } else { L::load_part(p, n) } }
}

/// The first `n` lanes to `p`, at most sixteen.
///
/// # Safety
/// The CPU has the instructions of `L`; min(n, 16) floats are writable at `p`.
#[inline(always)]
pub(super) unsafe fn store<L: Lanes>(value: L, p: *mut f32, n: usize) {
    // SAFETY: by this function's contract.
    unsafe { if n >= LANES { value.store(p) } else { value.store_part(p, n) } }
}

/// Σ aᵢ bᵢ in the canonical order: lane i takes columns i, i + 16, … by fused multiply-add, then the fixed tree.
///
/// # Safety
/// The CPU has the instructions of `L`; `n` floats are readable at `a` and `b`.
#[inline(always)]
pub(super) unsafe fn dot<L: Lanes>(a: *const f32, b: *const f32, n: usize) -> f32 {
    // SAFETY: i < n, and the loads end at n at the latest.
    unsafe {
        let mut sum = L::splat(0.0);
        let mut i = 0;
        while i < n {
            sum = load::<L>(a.add(i), n - i).fma(load(b.add(i), n - i), sum);
            i += LANES;
        }
        sum.sum()
    }
}
