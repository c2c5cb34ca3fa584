//! Sixteen f32 lanes: the one vector type that every kernel is written over, so that all instruction sets give one
//! set of bits. A backend (`scalar`, `avx2`, `avx512`, `neon`) implements [`Lanes`]; algorithms are generic over it.

/// Lanes of the canonical order: partial sum i of a dot product takes columns i, i+16, i+32, …
pub const LANES: usize = 16;

/// Sixteen f32 values and the exact operations on them. Every method is one IEEE-754 operation a lane (round to
/// nearest even, subnormals kept), so two backends cannot differ.
///
/// # Safety
/// Implementations may use instructions that the running CPU lacks: methods are called only from code reached through
/// a [`super::Kernels`] table, which is handed out after detection. Pointers must be valid for the lanes named.
///
/// NaN is NaN: which one (sign, payload) is not part of the definition, since processors differ in it.
pub(super) unsafe trait Lanes: Copy {
    /// How many sixteen-lane values the register file holds; kernels size their tiles by it.
    const REGISTERS: usize;

    /// The sixteen MXFP4 codes times one scale, in the form that [`Lanes::load_mxfp4`] looks them up in.
    type Mxfp4Table: Copy;

    /// All lanes `value`.
    unsafe fn splat(value: f32) -> Self;
    /// Sixteen floats from `p`, unaligned.
    unsafe fn load(p: *const f32) -> Self;
    /// The first `n` < 16 floats from `p`; other lanes +0.0. Reads no byte beyond them.
    unsafe fn load_part(p: *const f32, n: usize) -> Self;
    /// Sixteen bfloat16 from `p` (unaligned), widened.
    unsafe fn load_bf16(p: *const u8) -> Self;
    /// 32 bfloat16 from `p` (unaligned), widened: the first sixteen, then the others.
    #[inline(always)]
    unsafe fn load_bf16_pair(p: *const u8) -> [Self; 2] {
        // SAFETY: by the trait's contract.
        unsafe { [Self::load_bf16(p), Self::load_bf16(p.add(2 * LANES))] }
    }
    /// The first `n` < 16 bfloat16 from `p`, widened; other lanes +0.0. Reads no byte beyond them.
    unsafe fn load_bf16_part(p: *const u8, n: usize) -> Self;
    /// Every code value × 2^(scale − 127), exact down to the subnormals; beyond f32 infinite; all NaN for scale 255.
    unsafe fn mxfp4_table(scale: u8) -> Self::Mxfp4Table;
    /// Sixteen MXFP4 codes (8 bytes from `p`, low nibble first), each looked up in `table`.
    unsafe fn load_mxfp4(p: *const u8, table: Self::Mxfp4Table) -> Self;
    /// The 32 columns of a bf12 group without exceptions, sixteen and sixteen: 48 bytes from `p`, exponent bits looked up in
    /// `exponents`.
    #[inline(always)]
    unsafe fn load_bf12(p: *const u8, exponents: &'static [u16; 32]) -> [Self; 2] {
        let (mut low, mut high) = ([0_u16; LANES], [0_u16; LANES]);
        for (c, (low, high)) in low.iter_mut().zip(&mut high).enumerate() {
            // SAFETY: 48 bytes are readable, by the trait's contract.
            let (first, second, codes) = unsafe { (*p.add(2 * c), *p.add(2 * c + 1), *p.add(2 * LANES + c)) };
            let value = |plane: u8, code: u8| {
                let plane = u16::from(plane);
                (plane & 0x80) << 8 | exponents[usize::from(code)] | plane & 0x7f
            };
            (*low, *high) = (value(first, codes & 15), value(second, codes >> 4));
        }
        // SAFETY: the CPU has the instructions, by the trait's contract; sixteen values each are readable.
        unsafe { [Self::load_bf16(low.as_ptr().cast()), Self::load_bf16(high.as_ptr().cast())] }
    }
    /// Sixteen signed bytes from `p` as floats.
    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        let mut values = [0.0; LANES];
        for (c, value) in values.iter_mut().enumerate() {
            // SAFETY: sixteen bytes are readable, by the trait's contract.
            *value = f32::from(unsafe { *p.add(c) });
        }
        // SAFETY: the CPU has the instructions, by the trait's contract; sixteen floats are readable.
        unsafe { Self::load(values.as_ptr()) }
    }
    /// All sixteen lanes to `p`, unaligned.
    unsafe fn store(self, p: *mut f32);
    /// The first `n` < 16 lanes to `p`.
    unsafe fn store_part(self, p: *mut f32, n: usize);
    /// self + b.
    unsafe fn add(self, b: Self) -> Self;
    /// self − b.
    unsafe fn sub(self, b: Self) -> Self;
    /// self · b.
    unsafe fn mul(self, b: Self) -> Self;
    /// self / b.
    unsafe fn div(self, b: Self) -> Self;
    /// self · b + c, rounded once.
    unsafe fn fma(self, b: Self, c: Self) -> Self;
    /// Lane-wise `if self > b { self } else { b }` (b where either is NaN).
    unsafe fn max(self, b: Self) -> Self;
    /// Lane-wise `if self < b { self } else { b }` (b where either is NaN).
    unsafe fn min(self, b: Self) -> Self;
    /// `if mask_a < mask_b { self } else { other }`, lane by lane (other where either is NaN).
    unsafe fn select_lt(self, other: Self, mask_a: Self, mask_b: Self) -> Self;
    /// Magnitude of self with the sign bit of `sign`.
    unsafe fn copysign(self, sign: Self) -> Self;
    /// Nearest integer, ties to even, as a float. |self| < 2^22 is the caller's duty.
    unsafe fn round(self) -> Self;
    /// 2^self for integral self in −126..=127.
    unsafe fn exp2_int(self) -> Self;
    /// Splits a positive normal float into mantissa in [1, 2) and exponent as a float.
    unsafe fn split_exponent(self) -> (Self, Self);
    /// The fixed tree: lanes i and i+8 added, then i and i+4, i+2, i+1.
    unsafe fn sum(self) -> f32;
    /// [`Lanes::sum`] of each.
    #[inline(always)]
    unsafe fn sum_each(v: [Self; 4]) -> [f32; 4] {
        // SAFETY: by the trait's contract.
        unsafe { [v[0].sum(), v[1].sum(), v[2].sum(), v[3].sum()] }
    }
}

/// Asks for the cache line at `p` to be brought to the first-level cache. Any address will do: a bad one is ignored.
#[inline(always)]
pub(super) fn prefetch(p: *const u8) {
    #[cfg(target_arch = "x86_64")]
    // SAFETY: SSE is part of x86-64; a prefetch reads nothing that the program could see and never faults.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(p.cast());
    }
    #[cfg(target_arch = "aarch64")]
    // SAFETY: a prefetch reads nothing that the program could see and never faults.
    unsafe {
        std::arch::asm!("prfm pldl1keep, [{p}]", p = in(reg) p, options(nostack, preserves_flags, readonly));
    }
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    let _ = p;
}

/// An algorithm written once over [`Lanes`]; its operands are its fields. Run by `dispatch::run`.
///
/// # Safety
/// `run` must be sound for every backend the CPU supports: it may rely on nothing about the backend but [`Lanes`].
pub(super) trait Kernel {
    /// What it returns.
    type Output;
    /// Runs on the backend `L`. Implementations are `#[inline(always)]`, so that they are compiled with the backend's
    /// instructions; closures and iterator adaptors inside are best avoided for the same reason.
    ///
    /// # Safety
    /// The CPU has the backend's instructions.
    unsafe fn run<L: Lanes>(self) -> Self::Output;
}

#[cfg(test)]
mod tests;
