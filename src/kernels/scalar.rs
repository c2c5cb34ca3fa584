//! The definition: sixteen lanes as an array, one plain operation a lane. Every other backend must give these bits.

use super::lanes::{LANES, Lanes};

/// Sixteen floats.
#[derive(Clone, Copy)]
pub(super) struct Scalar([f32; LANES]);

/// Values of the sixteen E2M1 codes; bit 3 is the sign.
pub(super) static E2M1: [f32; 16] =
    [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0];

/// What an E8M0 byte stands for: 2^(byte − 127); 255 is NaN.
pub(super) static E8M0: [f32; 256] = {
    let mut out = [f32::NAN; 256];
    out[0] = f32::from_bits(0x0040_0000); // 2^-127 is subnormal: not in reach of the exponent field
    let mut byte = 1;
    while byte < 255 {
        out[byte] = f32::from_bits((byte as u32) << 23);
        byte += 1;
    }
    out
};

/// The sixteen codes times what each E8M0 byte stands for, each row on a cache line of its own.
#[cfg(target_arch = "x86_64")]
pub(super) static MXFP4: Mxfp4Tables = Mxfp4Tables({
    let mut out = [[0.0; 16]; 256];
    let mut byte = 0;
    while byte < 256 {
        let mut code = 0;
        while code < 16 {
            out[byte][code] = E2M1[code] * E8M0[byte];
            code += 1;
        }
        byte += 1;
    }
    out
});

/// See [`MXFP4`].
#[cfg(target_arch = "x86_64")]
#[repr(align(64))]
pub(super) struct Mxfp4Tables(pub(super) [[f32; 16]; 256]);

impl Scalar {
    #[inline(always)]
    fn each(self, f: impl Fn(f32) -> f32) -> Self {
        Self(self.0.map(f))
    }

    #[inline(always)]
    fn zip(self, b: Self, f: impl Fn(f32, f32) -> f32) -> Self {
        let mut out = self.0;
        for (a, b) in out.iter_mut().zip(b.0) {
            *a = f(*a, b);
        }
        Self(out)
    }
}

// SAFETY: no special instructions; pointers are valid for the lanes read or written by the trait's contract, and all
// accesses are unaligned ones.
unsafe impl Lanes for Scalar {
    const REGISTERS: usize = 8;

    type Mxfp4Table = [f32; 16];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        Self([value; LANES])
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: sixteen floats are readable at `p`.
        Self(unsafe { p.cast::<[f32; LANES]>().read_unaligned() })
    }

    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self {
        let mut out = [0.0; LANES];
        for (i, out) in out.iter_mut().enumerate().take(n) {
            // SAFETY: i < n, and n floats are readable at `p`.
            *out = unsafe { p.add(i).read_unaligned() };
        }
        Self(out)
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: sixteen bfloat16 are readable at `p`.
        unsafe { Self::load_bf16_part(p, LANES) }
    }

    #[inline(always)]
    unsafe fn load_bf16_part(p: *const u8, n: usize) -> Self {
        let mut out = [0.0; LANES];
        for (i, out) in out.iter_mut().enumerate().take(n) {
            // SAFETY: i < n, and n bfloat16 are readable at `p`.
            let bits = unsafe { p.cast::<u16>().add(i).read_unaligned() };
            *out = f32::from_bits(u32::from(bits) << 16);
        }
        Self(out)
    }

    #[inline(always)]
    unsafe fn mxfp4_table(scale: u8) -> [f32; 16] {
        E2M1.map(|code| code * E8M0[usize::from(scale)])
    }

    #[inline(always)]
    unsafe fn load_mxfp4(p: *const u8, table: [f32; 16]) -> Self {
        let mut out = [0.0; LANES];
        for i in 0..LANES / 2 {
            // SAFETY: i < 8, and eight bytes are readable at `p`.
            let byte = unsafe { p.add(i).read() };
            out[2 * i] = table[usize::from(byte & 15)];
            out[2 * i + 1] = table[usize::from(byte >> 4)];
        }
        Self(out)
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: sixteen floats are writable at `p`.
        unsafe { p.cast::<[f32; LANES]>().write_unaligned(self.0) }
    }

    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize) {
        for (i, value) in self.0.iter().enumerate().take(n) {
            // SAFETY: i < n, and n floats are writable at `p`.
            unsafe { p.add(i).write_unaligned(*value) };
        }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        self.zip(b, |a, b| a + b)
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        self.zip(b, |a, b| a - b)
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        self.zip(b, |a, b| a * b)
    }

    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        self.zip(b, |a, b| a / b)
    }

    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        Self(std::array::from_fn(|i| self.0[i].mul_add(b.0[i], c.0[i])))
    }

    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        self.zip(b, |a, b| if a > b { a } else { b })
    }

    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        self.zip(b, |a, b| if a < b { a } else { b })
    }

    #[inline(always)]
    unsafe fn select_lt(self, other: Self, mask_a: Self, mask_b: Self) -> Self {
        let pick = |i: usize| if mask_a.0[i] < mask_b.0[i] { self.0[i] } else { other.0[i] };
        Self(std::array::from_fn(pick))
    }

    #[inline(always)]
    unsafe fn copysign(self, sign: Self) -> Self {
        self.zip(sign, f32::copysign)
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        self.each(f32::round_ties_even)
    }

    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        self.each(|a| f32::from_bits(((a as i32 + 127) as u32) << 23))
    }

    #[inline(always)]
    unsafe fn split_exponent(self) -> (Self, Self) {
        let mantissa = self.each(|a| f32::from_bits(a.to_bits() & 0x007f_ffff | 0x3f80_0000));
        (mantissa, self.each(|a| ((a.to_bits() >> 23) as i32 - 127) as f32))
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        let mut v = self.0;
        for width in [8, 4, 2, 1] {
            for i in 0..width {
                v[i] += v[i + width];
            }
        }
        v[0]
    }
}
