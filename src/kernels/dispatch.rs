//! Which instruction sets this build and this CPU have, and running a [`Kernel`] on one of them.

use super::Isa;
#[cfg(target_arch = "x86_64")]
use super::avx2::Avx2;
#[cfg(target_arch = "x86_64")]
use super::avx512::Avx512;
use super::lanes::Kernel;
#[cfg(target_arch = "aarch64")]
use super::neon::Neon;
use super::scalar::Scalar;

/// An instruction set that was found on the running CPU: only [`Detected::all`] makes one, which is what makes running
/// kernels on it sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Detected(Isa);

impl Detected {
    /// All instruction sets of this CPU, fastest first.
    pub(super) fn all() -> impl Iterator<Item = Detected> {
        Isa::ALL.into_iter().filter(|isa| present(*isa)).map(Detected)
    }

    /// Which one.
    pub(super) fn isa(self) -> Isa {
        self.0
    }

    /// Runs `kernel` with these instructions.
    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        match self.0 {
            // SAFETY: `self` exists, so `present` has found these instructions.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => unsafe { run_avx512(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => unsafe { run_avx2(kernel) },
            // SAFETY: as above.
            #[cfg(target_arch = "aarch64")]
            Isa::Neon => unsafe { run_neon(kernel) },
            // SAFETY: plain Rust runs everywhere. The sets of other architectures are never `present`.
            _ => unsafe { kernel.run::<Scalar>() },
        }
    }
}

/// Whether this build has code for `isa`, and the CPU and the operating system support it.
fn present(isa: Isa) -> bool {
    match isa {
        Isa::Scalar => true,
        #[cfg(target_arch = "x86_64")]
        Isa::Avx2 => is_x86_feature_detected!("avx2") && is_x86_feature_detected!("fma"),
        #[cfg(target_arch = "x86_64")]
        Isa::Avx512 => {
            present(Isa::Avx2)
                && is_x86_feature_detected!("avx512f")
                && is_x86_feature_detected!("avx512bw")
                && is_x86_feature_detected!("avx512dq")
                && is_x86_feature_detected!("avx512vl")
        }
        #[cfg(target_arch = "aarch64")]
        Isa::Neon => std::arch::is_aarch64_feature_detected!("neon"),
        _ => false,
    }
}

/// # Safety
/// The CPU has the features named.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx512f,avx512bw,avx512dq,avx512vl,avx2,fma")]
unsafe fn run_avx512<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: by this function's contract.
    unsafe { kernel.run::<Avx512>() }
}

/// # Safety
/// The CPU has the features named.
#[cfg(target_arch = "x86_64")]
#[target_feature(enable = "avx2,fma")]
unsafe fn run_avx2<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: by this function's contract.
    unsafe { kernel.run::<Avx2>() }
}

/// # Safety
/// The CPU has the features named.
#[cfg(target_arch = "aarch64")]
#[target_feature(enable = "neon")]
unsafe fn run_neon<K: Kernel>(kernel: K) -> K::Output {
    // SAFETY: by this function's contract.
    unsafe { kernel.run::<Neon>() }
}
