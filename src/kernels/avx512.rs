//! AVX-512 (F, BW, DQ, VL): the sixteen lanes are one register.

use std::arch::x86_64::*;

use super::avx2;
use super::lanes::Lanes;
use super::scalar::MXFP4;

/// Sixteen floats.
#[derive(Clone, Copy)]
pub(super) struct Avx512(__m512);

/// The mask of the first `n` < 16 lanes.
#[inline(always)]
fn first(n: usize) -> u16 {
    (1 << n) - 1
}

/// # Safety
/// The CPU has AVX-512 F.
#[inline(always)]
unsafe fn widen(bf16: __m256i) -> Avx512 {
    // SAFETY: by this function's contract.
    Avx512(unsafe { _mm512_castsi512_ps(_mm512_slli_epi32::<16>(_mm512_cvtepu16_epi32(bf16))) })
}

/// The word of `all` that the upper half of each lane of `word` names, in that half, above zeros.
///
/// The intrinsic becomes a shuffle of two registers, one of them zero, which takes twice as long.
///
/// # Safety
/// The CPU has AVX-512 F and BW.
#[inline]
#[target_feature(enable = "avx512f,avx512bw")]
unsafe fn widen_words(word: __m512i, all: __m512i) -> __m512 {
    let out: __m512i;
    // SAFETY: by this function's contract; registers are all it touches.
    unsafe {
        std::arch::asm!(
            "vpermw {out}{{{upper}}}{{z}}, {word}, {all}",
            out = lateout(zmm_reg) out,
            upper = in(kreg) 0xaaaa_aaaa_u32,
            word = in(zmm_reg) word,
            all = in(zmm_reg) all,
            options(pure, nomem, nostack, preserves_flags),
        );
        _mm512_castsi512_ps(out)
    }
}

// SAFETY: each method is the operation that the trait names, and touches no memory but the lanes named.
unsafe impl Lanes for Avx512 {
    const REGISTERS: usize = 32;

    type Mxfp4Table = &'static [f32; 16];

    #[inline(always)]
    unsafe fn splat(value: f32) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        Self(unsafe { _mm512_set1_ps(value) })
    }

    #[inline(always)]
    unsafe fn load(p: *const f32) -> Self {
        // SAFETY: the CPU has the instructions, and sixteen floats are readable, by the trait's contract.
        Self(unsafe { _mm512_loadu_ps(p) })
    }

    #[inline(always)]
    unsafe fn load_part(p: *const f32, n: usize) -> Self {
        // SAFETY: the CPU has the instructions, and masked-out lanes are not read; n floats are readable, by the trait's contract.
        Self(unsafe { _mm512_maskz_loadu_ps(first(n), p) })
    }

    #[inline(always)]
    unsafe fn load_bf16(p: *const u8) -> Self {
        // SAFETY: the CPU has the instructions, and 32 bytes are readable, by the trait's contract.
        unsafe { widen(_mm256_loadu_si256(p.cast())) }
    }

    #[inline(always)]
    unsafe fn load_bf16_pair(p: *const u8) -> [Self; 2] {
        // SAFETY: the CPU has the instructions, and 64 bytes are readable, by the trait's contract.
        unsafe {
            // One load of the whole cache line, and one shuffle a half: the fewer instructions a line takes, the more
            // lines the processor has under way.
            let all = _mm512_loadu_si512(p.cast());
            let lane = _mm512_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15);
            let first = _mm512_slli_epi32::<16>(lane);
            let second = _mm512_add_epi32(first, _mm512_set1_epi32(16 << 16));
            [Self(widen_words(first, all)), Self(widen_words(second, all))]
        }
    }

    #[inline(always)]
    unsafe fn load_bf16_part(p: *const u8, n: usize) -> Self {
        // SAFETY: the CPU has the instructions, and masked-out lanes are not read; 2 n bytes are readable, by the trait's contract.
        unsafe { widen(_mm256_maskz_loadu_epi16(first(n), p.cast())) }
    }

    #[inline(always)]
    unsafe fn mxfp4_table(scale: u8) -> &'static [f32; 16] {
        &MXFP4.0[usize::from(scale)]
    }

    #[inline(always)]
    unsafe fn load_mxfp4(p: *const u8, table: &'static [f32; 16]) -> Self {
        // SAFETY: the CPU has the instructions, and eight bytes are readable, by the trait's contract.
        unsafe {
            // Every quarter of the register sees all eight bytes. It takes its two, each twice, one a lane, and shifts the
            // second of the twins down; the permutation looks at the lowest four bits.
            let all = _mm512_broadcastq_epi64(_mm_loadl_epi64(p.cast()));
            let spread = _mm512_setr_epi32(0, 0, 1, 1, 2, 2, 3, 3, 4, 4, 5, 5, 6, 6, 7, 7);
            let twins = _mm512_shuffle_epi8(all, spread);
            let code = _mm512_srlv_epi32(twins, _mm512_set1_epi64(4 << 32));
            Self(_mm512_permutexvar_ps(code, _mm512_load_ps(table.as_ptr())))
        }
    }

    #[inline(always)]
    unsafe fn load_bf12(p: *const u8, exponents: &'static [u16; 32]) -> [Self; 2] {
        // SAFETY: the CPU has the instructions, and 48 bytes are readable, by the trait's contract; the table has 64.
        unsafe {
            // Sign and mantissa of columns c and c + 16 in the halves of lane c; widened with the sign, it is where bfloat16
            // has it.
            let plane = _mm512_cvtepi8_epi16(_mm256_loadu_si256(p.cast()));
            // The permutation looks at the lowest five bits of each half: the low nibble (and a bit that the table, which has
            // everything twice, does not care about), and the high one.
            let codes = _mm512_cvtepu8_epi32(_mm_loadu_si128(p.add(32).cast()));
            let codes = _mm512_or_si512(codes, _mm512_slli_epi32::<12>(codes));
            let exponent = _mm512_permutexvar_epi16(codes, _mm512_loadu_si512(exponents.as_ptr().cast()));
            // plane & 0x807f | exponent.
            let both = _mm512_ternarylogic_epi32::<0xea>(plane, _mm512_set1_epi32(0x807f_807f_u32 as i32), exponent);
            let second = _mm512_and_si512(both, _mm512_set1_epi32(0xffff_0000_u32 as i32));
            [Self(_mm512_castsi512_ps(_mm512_slli_epi32::<16>(both))), Self(_mm512_castsi512_ps(second))]
        }
    }

    #[inline(always)]
    unsafe fn load_i8(p: *const i8) -> Self {
        // SAFETY: the CPU has the instructions, and sixteen bytes are readable, by the trait's contract.
        Self(unsafe { _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(p.cast()))) })
    }

    #[inline(always)]
    unsafe fn store(self, p: *mut f32) {
        // SAFETY: the CPU has the instructions, and sixteen floats are writable, by the trait's contract.
        unsafe { _mm512_storeu_ps(p, self.0) }
    }

    #[inline(always)]
    unsafe fn store_part(self, p: *mut f32, n: usize) {
        // SAFETY: the CPU has the instructions, and masked-out lanes are not written; n floats are writable, by the trait's contract.
        unsafe { _mm512_mask_storeu_ps(p, first(n), self.0) }
    }

    #[inline(always)]
    unsafe fn add(self, b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        Self(unsafe { _mm512_add_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn sub(self, b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        Self(unsafe { _mm512_sub_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn mul(self, b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        Self(unsafe { _mm512_mul_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn div(self, b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        Self(unsafe { _mm512_div_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn max(self, b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        Self(unsafe { _mm512_max_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn min(self, b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        Self(unsafe { _mm512_min_ps(self.0, b.0) })
    }

    #[inline(always)]
    unsafe fn fma(self, b: Self, c: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        Self(unsafe { _mm512_fmadd_ps(self.0, b.0, c.0) })
    }

    #[inline(always)]
    unsafe fn select_lt(self, other: Self, mask_a: Self, mask_b: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        Self(unsafe { _mm512_mask_blend_ps(_mm512_cmp_ps_mask::<_CMP_LT_OQ>(mask_a.0, mask_b.0), other.0, self.0) })
    }

    #[inline(always)]
    unsafe fn copysign(self, sign: Self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe {
            let bit = _mm512_set1_ps(-0.0);
            Self(_mm512_or_ps(_mm512_andnot_ps(bit, self.0), _mm512_and_ps(bit, sign.0)))
        }
    }

    #[inline(always)]
    unsafe fn round(self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        Self(unsafe { _mm512_roundscale_ps::<{ _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC }>(self.0) })
    }

    #[inline(always)]
    unsafe fn exp2_int(self) -> Self {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe {
            let biased = _mm512_add_epi32(_mm512_cvttps_epi32(self.0), _mm512_set1_epi32(127));
            Self(_mm512_castsi512_ps(_mm512_slli_epi32::<23>(biased)))
        }
    }

    #[inline(always)]
    unsafe fn split_exponent(self) -> (Self, Self) {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe {
            let bits = _mm512_castps_si512(self.0);
            let fraction = _mm512_and_si512(bits, _mm512_set1_epi32(0x007f_ffff));
            let mantissa = _mm512_or_si512(fraction, _mm512_set1_epi32(0x3f80_0000));
            let exponent = _mm512_sub_epi32(_mm512_srli_epi32::<23>(bits), _mm512_set1_epi32(127));
            (Self(_mm512_castsi512_ps(mantissa)), Self(_mm512_cvtepi32_ps(exponent)))
        }
    }

    #[inline(always)]
    unsafe fn sum(self) -> f32 {
        // SAFETY: the CPU has the instructions, by the trait's contract.
        unsafe {
            let eight = _mm256_add_ps(_mm512_castps512_ps256(self.0), _mm512_extractf32x8_ps::<1>(self.0));
            avx2::tree_sum(eight)
        }
    }

    #[inline(always)]
    unsafe fn sum_each([a, b, c, d]: [Self; 4]) -> [f32; 4] {
        // SAFETY: the CPU has the instructions, by the trait's contract; the array has room for four floats.
        unsafe {
            // Quarters 0 and 2, 1 and 3 of each: lanes i and i + 8.
            let ab = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b01_00_01_00>(a.0, b.0),
                _mm512_shuffle_f32x4::<0b11_10_11_10>(a.0, b.0),
            );
            let cd = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b01_00_01_00>(c.0, d.0),
                _mm512_shuffle_f32x4::<0b11_10_11_10>(c.0, d.0),
            );
            // Lanes i and i + 4, which leaves a quarter for each of the four.
            let four = _mm512_add_ps(
                _mm512_shuffle_f32x4::<0b10_00_10_00>(ab, cd),
                _mm512_shuffle_f32x4::<0b11_01_11_01>(ab, cd),
            );
            let two = _mm512_add_ps(four, _mm512_permute_ps::<0b01_00_11_10>(four));
            let one = _mm512_add_ps(two, _mm512_permute_ps::<0b10_11_00_01>(two));
            let first = _mm512_setr_epi32(0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12, 0, 4, 8, 12);
            let mut sums = [0.0; 4];
            _mm_storeu_ps(sums.as_mut_ptr(), _mm512_castps512_ps128(_mm512_permutexvar_ps(first, one)));
            sums
        }
    }
}
