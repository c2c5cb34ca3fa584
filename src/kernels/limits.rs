//! What the processor and the memory can do at best, measured with the same lanes and threads as the kernels.
#![expect(clippy::needless_range_loop, reason = "indices below constants unroll into registers")]

use std::hint::black_box;
use std::time::Instant;

use super::Compute;
use super::lanes::{Kernel, LANES, Lanes};

/// Steps of the multiply-add loop in one measurement: some ten milliseconds.
const STEPS: usize = 1 << 21;

impl Compute {
    /// Multiply-adds a second of all threads together, from registers.
    pub fn measure_fma(&self) -> f64 {
        let threads = self.threads();
        let start = Instant::now();
        self.parallel(threads, &|_| {
            black_box(self.isa.run(Fma { steps: black_box(STEPS) }));
        });
        let sums: usize = self.isa.run(Fma { steps: 0 }).1;
        (threads * STEPS * sums * LANES) as f64 / start.elapsed().as_secs_f64()
    }

    /// Multiply-adds a second of the instruction that takes pairs of bfloat16, from registers, where the processor has it.
    /// No kernel uses it: it rounds activations to eight bits.
    pub fn measure_bf16_pairs(&self) -> Option<f64> {
        #[cfg(target_arch = "x86_64")]
        if self.isa.isa() == super::Isa::Avx512 && is_x86_feature_detected!("avx512bf16") {
            let threads = self.threads();
            let start = Instant::now();
            self.parallel(threads, &|_| {
                // SAFETY: the features were detected.
                black_box(unsafe { bf16_pairs(black_box(STEPS)) });
            });
            return Some((threads * STEPS * BF16_CHAINS * 2 * LANES) as f64 / start.elapsed().as_secs_f64());
        }
        None
    }

    /// Bytes a second that all threads together read from `bytes`, each its own share, once from front to back.
    pub fn measure_read(&self, bytes: &[u8]) -> f64 {
        let share = bytes.len() / self.threads() / Read::STEP * Read::STEP;
        let start = Instant::now();
        self.parallel(self.threads(), &|i| {
            black_box(self.isa.run(Read { bytes: &bytes[i * share..][..share] }));
        });
        (share * self.threads()) as f64 / start.elapsed().as_secs_f64()
    }
}

/// Seconds that the processor has given to the calling thread: what a measurement on a busy machine goes by.
///
/// Zero where the system does not say.
pub fn thread_seconds() -> f64 {
    #[cfg(unix)]
    {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: `time` is valid for the call, which fills it or fails and leaves it zero.
        unsafe { libc::clock_gettime(libc::CLOCK_THREAD_CPUTIME_ID, &raw mut time) };
        time.tv_sec as f64 + time.tv_nsec as f64 / 1e9
    }
    #[cfg(not(unix))]
    0.0
}

/// Independent chains of multiply-adds, as many as fill the register file. Returns a sum, and the number of chains.
struct Fma {
    steps: usize,
}

impl Kernel for Fma {
    type Output = (f32, usize);

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> (f32, usize) {
        // SAFETY: by this method's contract.
        unsafe { if L::REGISTERS >= 32 { (self.chains::<L, 24>(), 24) } else { (self.chains::<L, 6>(), 6) } }
    }
}

impl Fma {
    /// # Safety
    /// As of [`Kernel::run`].
    #[inline(always)]
    unsafe fn chains<L: Lanes, const N: usize>(self) -> f32 {
        // SAFETY: by this method's contract.
        unsafe {
            let (a, b) = (L::splat(black_box(0.999)), L::splat(black_box(0.001)));
            let mut sums = [L::splat(1.0); N];
            for _ in 0..self.steps {
                for i in 0..N {
                    sums[i] = sums[i].fma(a, b);
                }
            }
            let mut sum = sums[0];
            for i in 1..N {
                sum = sum.add(sums[i]);
            }
            sum.sum()
        }
    }
}

/// Chains of [`bf16_pairs`].
#[cfg(target_arch = "x86_64")]
const BF16_CHAINS: usize = 24;

/// Independent chains of products of bfloat16 pairs.
///
/// # Safety
/// The CPU has the features named.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bf16")]
unsafe fn bf16_pairs(steps: usize) -> f32 {
    use std::arch::x86_64::*;
    // SAFETY: any bits are bfloat16.
    let ones: __m512bh = unsafe { std::mem::transmute(_mm512_set1_epi16(black_box(0x3f80))) };
    let mut sums = [_mm512_setzero_ps(); BF16_CHAINS];
    for _ in 0..steps {
        for i in 0..BF16_CHAINS {
            sums[i] = _mm512_dpbf16_ps(sums[i], ones, ones);
        }
    }
    let mut sum = sums[0];
    for i in 1..BF16_CHAINS {
        sum = _mm512_add_ps(sum, sums[i]);
    }
    _mm512_reduce_add_ps(sum)
}

/// A sum over memory that does nothing but read it.
struct Read<'a> {
    /// A multiple of [`Read::STEP`].
    bytes: &'a [u8],
}

impl Read<'_> {
    /// Bytes read with every turn: four streams of 64, as the one-row kernels read four weight rows.
    const STEP: usize = 4 * 64;
}

impl Kernel for Read<'_> {
    type Output = f32;

    #[inline(always)]
    unsafe fn run<L: Lanes>(self) -> f32 {
        let stream = self.bytes.len() / 4;
        // SAFETY: by this method's contract; stream · i + offset + 64 stays within the bytes.
        unsafe {
            let mut sums = [L::splat(0.0); 4];
            let mut offset = 0;
            while offset < stream {
                for i in 0..4 {
                    sums[i] = sums[i].add(L::load(self.bytes.as_ptr().add(i * stream + offset).cast()));
                }
                offset += 4 * LANES;
            }
            sums[0].add(sums[1]).add(sums[2].add(sums[3])).sum()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::interrupt::Interrupt;

    #[test]
    fn reading_is_measured_on_every_instruction_set() {
        for isa in Compute::available() {
            let compute = Compute::new(Some(isa), 2, Interrupt::new()).expect("available");
            let read = compute.measure_read(&[1; 100_001]);
            assert!(read > 0.0 && read.is_finite(), "{isa}");
        }
    }
}
