//! NEON: the sixteen lanes are four registers, lanes 0–3 first.

use std::arch::aarch64::*;

use super::lanes::{LANES, Lanes};
use super::scalar::{E2M1, E8M0};

/// Sixteen floats.
#[derive(Clone, Copy)]
pub(super) struct Neon([float32x4_t; 4]);

/// For each of the sixteen codes times one scale, byte 2 and byte 3 of the float; the others are zero, since a product
/// of a code and a power of two has no more than two significant bits.
#[derive(Clone, Copy)]
pub(super) struct Table {
    low: uint8x16_t,
    high: uint8x16_t,
}

/// The bytes of [`Table`] for every scale, low ones first.
static PRODUCTS: [[u8; 32]; 256] = {
    let mut out = [[0; 32]; 256];
    let mut scale = 0;
    while scale < 256 {
        let mut code = 0;
        while code < 16 {
            let bytes = (E2M1[code] * E8M0[scale]).to_le_bytes();
            assert!(bytes[0] == 0 && bytes[1] == 0);
            out[scale][code] = bytes[2];
            out[scale][code + 16] = bytes[3];
            code += 1;
        }
        scale += 1;
    }
    out
};

/// # Safety
/// The CPU has NEON; four floats are readable at `p`, of any alignment.
#[inline(always)]
unsafe fn quad(p: *const f32) -> float32x4_t {
    // SAFETY: by this function's contract.
    unsafe { vreinterpretq_f32_u8(vld1q_u8(p.cast())) }
}

/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn widen(low: uint16x8_t, high: uint16x8_t) -> Neon {
    // SAFETY: by this function's contract.
    unsafe {
        Neon([
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(low))),
            vreinterpretq_f32_u32(vshll_high_n_u16::<16>(low)),
            vreinterpretq_f32_u32(vshll_n_u16::<16>(vget_low_u16(high))),
            vreinterpretq_f32_u32(vshll_high_n_u16::<16>(high)),
        ])
    }
}

/// `if a > b { a } else { b }`; NEON's own maximum treats NaN otherwise.
///
/// # Safety
/// The CPU has NEON.
#[inline(always)]
unsafe fn max(a: float32x4_t, b: float32x4_t) -> float32x4_t {
    // SAFETY: by this function's contract.
    unsafe { vbslq_f32(vcgtq_f32(a, b), a, b) }
}

// SAFETY: each method is the operation that the trait names, and touches no memory but the lanes named.
unsafe impl Lanes for Neon {
    const REGISTERS: usize = 8;

    type Mxfp4Table = Table;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        Self([unsafe { vdupq_n_f32(value) }; 4])
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the CPU has the instructions, and sixteen floats are readable, by the trait's contract.
        unsafe { Self([quad(p), quad(p.add(4)), quad(p.add(8)), quad(p.add(12))]) }
    }

    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self {
        let mut whole = [0.0f32; LANES];
        // SAFETY: n < 16 floats are readable, by the trait's contract; copied as bytes, for any alignment.
        unsafe {
            p.cast::<u8>().copy_to_nonoverlapping(whole.as_mut_ptr().cast(), 4 * n);
            Self::load(whole.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: the CPU has the instructions, and 32 bytes are readable, by the trait's contract.
        unsafe { widen(vreinterpretq_u16_u8(vld1q_u8(p)), vreinterpretq_u16_u8(vld1q_u8(p.add(16)))) }
    }

    #[inline(always)]
    unsafe fn load_bf16_part(p: *const u8, n: usize) -> Self {
        let mut whole = [0u8; 2 * LANES];
        // SAFETY: 2 n ≤ 30 bytes are readable, by the trait's contract; the copy is whole.
        unsafe {
            p.copy_to_nonoverlapping(whole.as_mut_ptr(), 2 * n);
            Self::load_bf16(whole.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn mxfp4_table(scale: u8) -> Table {
        // SAFETY: the CPU has the instructions, by the trait's contract; an entry has 32 bytes.
        unsafe {
            let bytes = PRODUCTS[usize::from(scale)].as_ptr();
            Table { low: vld1q_u8(bytes), high: vld1q_u8(bytes.add(16)) }
        }
    }

    #[inline(always)]
    unsafe fn load_mxfp4(p: *const u8, table: Table) -> Self {
        // SAFETY: the CPU has the instructions, and eight bytes are readable, by the trait's contract.
        unsafe {
            let packed = vld1_u8(p);
            let even = vand_u8(packed, vdup_n_u8(15));
            let codes = vcombine_u8(vzip1_u8(even, vshr_n_u8::<4>(packed)), vzip2_u8(even, vshr_n_u8::<4>(packed)));
            let low = vqtbl1q_u8(table.low, codes);
            let high = vqtbl1q_u8(table.high, codes);
            widen(vreinterpretq_u16_u8(vzip1q_u8(low, high)), vreinterpretq_u16_u8(vzip2q_u8(low, high)))
        }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        for i in 0..4 {
            // SAFETY: the CPU has the instructions, and sixteen floats are writable, by the trait's contract.
            unsafe { vst1q_u8(p.add(4 * i).cast(), vreinterpretq_u8_f32(self.0[i])) };
        }
    }

    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize) {
        let mut whole = [0.0f32; LANES];
        // SAFETY: n < 16 floats are writable, by the trait's contract; copied as bytes, for any alignment.
        unsafe {
            self.store(whole.as_mut_ptr());
            whole.as_ptr().cast::<u8>().copy_to_nonoverlapping(p.cast(), 4 * n);
        }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        let mut out = self;
        for i in 0..4 {
            // SAFETY: the CPU has the instructions, by the trait's contract.
            out.0[i] = unsafe { vaddq_f32(self.0[i], b.0[i]) };
        }
        out
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        let mut out = self;
        for i in 0..4 {
            // SAFETY: the CPU has the instructions, by the trait's contract.
            out.0[i] = unsafe { vsubq_f32(self.0[i], b.0[i]) };
        }
        out
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        let mut out = self;
        for i in 0..4 {
            // SAFETY: the CPU has the instructions, by the trait's contract.
            out.0[i] = unsafe { vmulq_f32(self.0[i], b.0[i]) };
        }
        out
    }

    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        let mut out = self;
        for i in 0..4 {
            // SAFETY: the CPU has the instructions, by the trait's contract.
            out.0[i] = unsafe { vdivq_f32(self.0[i], b.0[i]) };
        }
        out
    }

    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        let mut out = self;
        for i in 0..4 {
            // SAFETY: the CPU has the instructions, by the trait's contract.
            out.0[i] = unsafe { vfmaq_f32(c.0[i], self.0[i], b.0[i]) };
        }
        out
    }

    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        let mut out = self;
        for i in 0..4 {
            // SAFETY: the CPU has the instructions, by the trait's contract.
            out.0[i] = unsafe { max(self.0[i], b.0[i]) };
        }
        out
    }

    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        let mut out = self;
        for i in 0..4 {
            // SAFETY: the CPU has the instructions, by the trait's contract.
            out.0[i] = unsafe { vbslq_f32(vcltq_f32(self.0[i], b.0[i]), self.0[i], b.0[i]) };
        }
        out
    }

    #[inline(always)]
    unsafe fn select_lt(self, other: Self, mask_a: Self, mask_b: Self) -> Self {
        let mut out = self;
        for i in 0..4 {
            // SAFETY: the CPU has the instructions, by the trait's contract.
            out.0[i] = unsafe { vbslq_f32(vcltq_f32(mask_a.0[i], mask_b.0[i]), self.0[i], other.0[i]) };
        }
        out
    }

    #[inline(always)]
    unsafe fn copysign(self, sign: Self) -> Self {
        let mut out = self;
        for i in 0..4 {
            // SAFETY: the CPU has the instructions, by the trait's contract.
            out.0[i] = unsafe { vbslq_f32(vdupq_n_u32(1 << 31), sign.0[i], self.0[i]) };
        }
        out
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        let mut out = self;
        for i in 0..4 {
            // SAFETY: the CPU has the instructions, by the trait's contract.
            out.0[i] = unsafe { vrndnq_f32(self.0[i]) };
        }
        out
    }

    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        let mut out = self;
        for i in 0..4 {
            // SAFETY: the CPU has the instructions, by the trait's contract.
            out.0[i] = unsafe {
                vreinterpretq_f32_s32(vshlq_n_s32::<23>(vaddq_s32(vcvtq_s32_f32(self.0[i]), vdupq_n_s32(127))))
            };
        }
        out
    }

    #[inline(always)]
    unsafe fn split_exponent(self) -> (Self, Self) {
        let (mut mantissa, mut exponent) = (self, self);
        for i in 0..4 {
            // SAFETY: the CPU has the instructions, by the trait's contract.
            unsafe {
                let bits = vreinterpretq_u32_f32(self.0[i]);
                let fraction = vandq_u32(bits, vdupq_n_u32(0x007f_ffff));
                mantissa.0[i] = vreinterpretq_f32_u32(vorrq_u32(fraction, vdupq_n_u32(0x3f80_0000)));
                let biased = vreinterpretq_s32_u32(vshrq_n_u32::<23>(bits));
                exponent.0[i] = vcvtq_f32_s32(vsubq_s32(biased, vdupq_n_s32(127)));
            }
        }
        (mantissa, exponent)
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe {
            let four = vaddq_f32(vaddq_f32(self.0[0], self.0[2]), vaddq_f32(self.0[1], self.0[3]));
            let two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
            vget_lane_f32::<0>(two) + vget_lane_f32::<1>(two)
        }
    }
}
