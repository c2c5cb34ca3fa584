//! AVX2 with FMA: the sixteen lanes are two registers, lanes 0–7 first.

use std::arch::x86_64::*;

use super::lanes::{LANES, Lanes};
use super::scalar::{E2M1, E8M0};

/// Sixteen floats.
#[derive(Clone, Copy)]
pub(super) struct Avx2(__m256, __m256);

/// The masks of the first `n` < 16 lanes.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn first(n: usize) -> (__m256i, __m256i) {
    // SAFETY: by this function's contract.
    unsafe {
        let n = _mm256_set1_epi32(n as i32);
        let low = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
        let high = _mm256_setr_epi32(8, 9, 10, 11, 12, 13, 14, 15);
        (_mm256_cmpgt_epi32(n, low), _mm256_cmpgt_epi32(n, high))
    }
}

/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn widen(bf16: __m128i) -> __m256 {
    // SAFETY: by this function's contract.
    unsafe { _mm256_castsi256_ps(_mm256_slli_epi32::<16>(_mm256_cvtepu16_epi32(bf16))) }
}

/// Eight codes from four bytes: the permutation looks at the three bits of magnitude, the fourth becomes the sign.
///
/// # Safety
/// The CPU has AVX2; four bytes are readable at `p`.
#[inline(always)]
unsafe fn look_up(p: *const u8, magnitudes: __m256) -> __m256 {
    // SAFETY: by this function's contract.
    unsafe {
        let shift = _mm256_setr_epi32(0, 4, 8, 12, 16, 20, 24, 28);
        let code = _mm256_srlv_epi32(_mm256_broadcastd_epi32(_mm_loadu_si32(p)), shift);
        let sign = _mm256_and_ps(_mm256_castsi256_ps(_mm256_slli_epi32::<28>(code)), _mm256_set1_ps(-0.0));
        _mm256_xor_ps(_mm256_permutevar8x32_ps(magnitudes, code), sign)
    }
}

/// Eight columns c of a bf12 group and the eight c + 16, of a row whose window has the exponent bits `window` first.
///
/// # Safety
/// The CPU has AVX2; sixteen bytes of sign and mantissa are readable at `plane`, eight of exponents at `codes`.
#[inline(always)]
unsafe fn bf12_lanes(plane: *const u8, codes: *const u8, window: __m256i) -> (__m256, __m256) {
    // SAFETY: by this function's contract.
    unsafe {
        // The halves of lane c are columns c and c + 16. Widened with the sign, that is where bfloat16 has it.
        let plane = _mm256_cvtepi8_epi16(_mm_loadu_si128(plane.cast()));
        let codes = _mm256_cvtepu8_epi32(_mm_loadl_epi64(codes.cast()));
        let codes = _mm256_and_si256(_mm256_or_si256(codes, _mm256_slli_epi32::<12>(codes)), _mm256_set1_epi16(15));
        let exponent = _mm256_add_epi16(_mm256_slli_epi16::<7>(codes), window);
        let both = _mm256_or_si256(_mm256_and_si256(plane, _mm256_set1_epi16(0x807f_u16 as i16)), exponent);
        let second = _mm256_and_si256(both, _mm256_set1_epi32(0xffff_0000_u32 as i32));
        (_mm256_castsi256_ps(_mm256_slli_epi32::<16>(both)), _mm256_castsi256_ps(second))
    }
}

/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn exp2_int(a: __m256) -> __m256 {
    // SAFETY: by this function's contract.
    unsafe {
        let biased = _mm256_add_epi32(_mm256_cvttps_epi32(a), _mm256_set1_epi32(127));
        _mm256_castsi256_ps(_mm256_slli_epi32::<23>(biased))
    }
}

/// # Safety
/// The CPU has AVX2.
#[inline(always)]
unsafe fn split_exponent(a: __m256) -> (__m256, __m256) {
    // SAFETY: by this function's contract.
    unsafe {
        let bits = _mm256_castps_si256(a);
        let fraction = _mm256_and_si256(bits, _mm256_set1_epi32(0x007f_ffff));
        let mantissa = _mm256_or_si256(fraction, _mm256_set1_epi32(0x3f80_0000));
        let exponent = _mm256_sub_epi32(_mm256_srli_epi32::<23>(bits), _mm256_set1_epi32(127));
        (_mm256_castsi256_ps(mantissa), _mm256_cvtepi32_ps(exponent))
    }
}

/// The rest of the tree of [`Lanes::sum`] from eight lanes on.
///
/// # Safety
/// The CPU has AVX2.
#[inline(always)]
pub(super) unsafe fn tree_sum(eight: __m256) -> f32 {
    // SAFETY: by this function's contract.
    unsafe {
        let four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps::<1>(eight));
        let two = _mm_add_ps(four, _mm_movehl_ps(four, four));
        _mm_cvtss_f32(_mm_add_ss(two, _mm_movehdup_ps(two)))
    }
}

// SAFETY: each method is the operation that the trait names, and touches no memory but the lanes named.
unsafe impl Lanes for Avx2 {
    const REGISTERS: usize = 8;

    type Mxfp4Table = __m256;

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe {
            let half = _mm256_set1_ps(value);
            Self(half, half)
        }
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the CPU has the instructions, and sixteen floats are readable, by the trait's contract.
        unsafe { Self(_mm256_loadu_ps(p), _mm256_loadu_ps(p.add(8))) }
    }

    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self {
        // SAFETY: the CPU has the instructions, and masked-out lanes are not read; n floats are readable, by the trait's contract.
        unsafe {
            let (low, high) = first(n);
            Self(_mm256_maskload_ps(p, low), _mm256_maskload_ps(p.wrapping_add(8), high))
        }
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: the CPU has the instructions, and 32 bytes are readable, by the trait's contract.
        unsafe { Self(widen(_mm_loadu_si128(p.cast())), widen(_mm_loadu_si128(p.add(16).cast()))) }
    }

    #[inline(always)]
    unsafe fn load_bf16_part(p: *const u8, n: usize) -> Self {
        // No masked load has lanes of two bytes.
        let mut whole = [0u8; 2 * LANES];
        // SAFETY: 2 n ≤ 30 bytes are readable, by the trait's contract; the copy is whole.
        unsafe {
            p.copy_to_nonoverlapping(whole.as_mut_ptr(), 2 * n);
            Self::load_bf16(whole.as_ptr())
        }
    }

    #[inline(always)]
    unsafe fn mxfp4_table(scale: u8) -> __m256 {
        // SAFETY: the CPU has the instructions, by the trait's contract; E2M1 begins with eight magnitudes.
        unsafe { _mm256_mul_ps(_mm256_loadu_ps(E2M1.as_ptr()), _mm256_set1_ps(E8M0[usize::from(scale)])) }
    }

    #[inline(always)]
    unsafe fn load_mxfp4(p: *const u8, table: __m256) -> Self {
        // SAFETY: the CPU has the instructions, and eight bytes are readable, by the trait's contract.
        unsafe { Self(look_up(p, table), look_up(p.add(4), table)) }
    }

    #[inline(always)]
    unsafe fn load_bf12(p: *const u8, exponents: &'static [u16; 32]) -> [Self; 2] {
        // SAFETY: the CPU has the instructions, and 48 bytes are readable, by the trait's contract.
        unsafe {
            let window = _mm256_set1_epi16(exponents[0] as i16);
            let (a, c) = bf12_lanes(p, p.add(32), window);
            let (b, d) = bf12_lanes(p.add(16), p.add(40), window);
            [Self(a, b), Self(c, d)]
        }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        // SAFETY: the CPU has the instructions, and sixteen bytes are readable, by the trait's contract.
        unsafe {
            let low = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.cast()));
            let high = _mm256_cvtepi8_epi32(_mm_loadl_epi64(p.add(8).cast()));
            Self(_mm256_cvtepi32_ps(low), _mm256_cvtepi32_ps(high))
        }
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the CPU has the instructions, and sixteen floats are writable, by the trait's contract.
        unsafe {
            _mm256_storeu_ps(p, self.0);
            _mm256_storeu_ps(p.add(8), self.1);
        }
    }

    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize) {
        // SAFETY: the CPU has the instructions, and masked-out lanes are not written; n floats are writable, by the trait's contract.
        unsafe {
            let (low, high) = first(n);
            _mm256_maskstore_ps(p, low, self.0);
            _mm256_maskstore_ps(p.wrapping_add(8), high, self.1);
        }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe { Self(_mm256_add_ps(self.0, b.0), _mm256_add_ps(self.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe { Self(_mm256_sub_ps(self.0, b.0), _mm256_sub_ps(self.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe { Self(_mm256_mul_ps(self.0, b.0), _mm256_mul_ps(self.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe { Self(_mm256_div_ps(self.0, b.0), _mm256_div_ps(self.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe { Self(_mm256_max_ps(self.0, b.0), _mm256_max_ps(self.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe { Self(_mm256_min_ps(self.0, b.0), _mm256_min_ps(self.1, b.1)) }
    }

    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe { Self(_mm256_fmadd_ps(self.0, b.0, c.0), _mm256_fmadd_ps(self.1, b.1, c.1)) }
    }

    #[inline(always)]
    unsafe fn select_lt(self, other: Self, mask_a: Self, mask_b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe {
            let low = _mm256_cmp_ps::<_CMP_LT_OQ>(mask_a.0, mask_b.0);
            let high = _mm256_cmp_ps::<_CMP_LT_OQ>(mask_a.1, mask_b.1);
            Self(_mm256_blendv_ps(other.0, self.0, low), _mm256_blendv_ps(other.1, self.1, high))
        }
    }

    #[inline(always)]
    unsafe fn copysign(self, sign: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe {
            let bit = _mm256_set1_ps(-0.0);
            Self(
                _mm256_or_ps(_mm256_andnot_ps(bit, self.0), _mm256_and_ps(bit, sign.0)),
                _mm256_or_ps(_mm256_andnot_ps(bit, self.1), _mm256_and_ps(bit, sign.1)),
            )
        }
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe {
            const NEAREST: i32 = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
            Self(_mm256_round_ps::<NEAREST>(self.0), _mm256_round_ps::<NEAREST>(self.1))
        }
    }

    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe { Self(exp2_int(self.0), exp2_int(self.1)) }
    }

    #[inline(always)]
    unsafe fn split_exponent(self) -> (Self, Self) {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe {
            let (low, low_exponent) = split_exponent(self.0);
            let (high, high_exponent) = split_exponent(self.1);
            (Self(low, high), Self(low_exponent, high_exponent))
        }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe { tree_sum(_mm256_add_ps(self.0, self.1)) }
    }
}
