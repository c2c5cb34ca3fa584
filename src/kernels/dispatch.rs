//! Which instruction sets this build and this CPU have, and running a [`Kernel`] on one of them.

use super::Isa;
use super::lanes::Kernel;
use super::scalar::Scalar;

/// An instruction set that was found on the running CPU: only [`Detected::all`] makes one, which is what makes running
/// kernels on it sound.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Detected(Isa);

impl Detected {
    /// All instruction sets of this CPU, fastest first.
    pub(super) fn all() -> impl Iterator<Item = Detected> {
        [Isa::Scalar].into_iter().map(Detected)
    }

    /// Which one.
    pub(super) fn isa(self) -> Isa {
        self.0
    }

    /// Runs `kernel` with these instructions.
    #[inline]
    pub(super) fn run<K: Kernel>(self, kernel: K) -> K::Output {
        // SAFETY: `self` exists, so the CPU has the instructions.
        unsafe { kernel.run::<Scalar>() }
    }
}
