//! exp, log, tanh, sigmoid and softplus: one form each, out of [`Lanes`] operations alone, so that every instruction
//! set gives the same bits. Accurate to 2 ulp (the tests state the measured figures); NaN gives NaN.
//!
//! # Safety
//! As for [`Lanes`]: all functions here need a CPU with the instructions of `L`, and nothing else.

use super::lanes::Lanes;

/// ln 2 in two parts; the first has ten bits, so that its product with an exponent is exact.
const LN_2_HIGH: f32 = 0.693_359_375;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// (e^r − 1 − r) / r² for |r| ≤ ln 2 / 2, from the constant term up.
const EXP: [f32; 5] = [0.5, 0.166_665_76, 0.041_666_556, 0.008_363_203, 0.001_392_621_3];
/// (log(1 + f) − f + f²/2) / f³ for 1 + f from √½ to √2, from the constant term up.
const LOG: [f32; 8] = [
    0.333_333_31,
    -0.250_003_07,
    0.200_010_45,
    -0.166_412_82,
    0.142_144_96,
    -0.129_981_83,
    0.126_223_19,
    -0.079_027_44,
];
/// (tanh(x)/x − 1) / x² in x² for |x| ≤ 0.625, from the constant term up.
const TANH: [f32; 5] = [-0.333_333_28, 0.133_327_69, -0.053_850_908, 0.020_997_18, -0.006_096_714_2];

#[inline(always)]
unsafe fn polynomial<L: Lanes, const N: usize>(x: L, coefficients: [f32; N]) -> L {
    // SAFETY: the CPU has the instructions (caller).
    unsafe {
        let mut sum = L::splat(coefficients[N - 1]);
        for i in (0..N - 1).rev() {
            sum = sum.fma(x, L::splat(coefficients[i]));
        }
        sum
    }
}

/// e^x over the whole range: 0 below −104, gradual through the subnormals, infinite where f32 ends, exp(0) = 1.
#[inline(always)]
pub(super) unsafe fn exp<L: Lanes>(x: L) -> L {
    // SAFETY: the CPU has the instructions (caller).
    unsafe {
        // x comes second, so that NaN passes through both.
        let x = L::splat(89.0).min(L::splat(-104.0).max(x));
        let exponent = x.mul(L::splat(std::f32::consts::LOG2_E)).round();
        let r = exponent.fma(L::splat(-LN_2_LOW), exponent.fma(L::splat(-LN_2_HIGH), x));
        let mantissa = polynomial(r, EXP).fma(r, L::splat(1.0)).fma(r, L::splat(1.0));
        // The exponent goes from −150 to 128: applied in two halves it never leaves the normal range on the way, and
        // only the last product rounds.
        let half = exponent.mul(L::splat(0.5)).round();
        mantissa.mul(half.exp2_int()).mul(exponent.sub(half).exp2_int())
    }
}

/// Natural logarithm of a positive normal number.
#[inline(always)]
pub(super) unsafe fn log<L: Lanes>(x: L) -> L {
    // SAFETY: the CPU has the instructions (caller).
    unsafe {
        let one = L::splat(1.0);
        let (mantissa, exponent) = x.split_exponent();
        let root = L::splat(std::f32::consts::SQRT_2);
        let exponent = exponent.add(one).select_lt(exponent, root, mantissa);
        let f = mantissa.mul(L::splat(0.5)).select_lt(mantissa, root, mantissa).sub(one);
        let square = f.mul(f);
        let tail = polynomial(f, LOG).mul(f).mul(square);
        let low = exponent.fma(L::splat(LN_2_LOW), square.fma(L::splat(-0.5), tail));
        exponent.fma(L::splat(LN_2_HIGH), f.add(low))
    }
}

/// Hyperbolic tangent; relative accuracy down to the smallest x, ±1 far out.
#[inline(always)]
pub(super) unsafe fn tanh<L: Lanes>(x: L) -> L {
    // SAFETY: the CPU has the instructions (caller).
    unsafe {
        let one = L::splat(1.0);
        let magnitude = x.copysign(one);
        let square = x.mul(x);
        let near = polynomial(square, TANH).mul(square).fma(x, x);
        let far = one.sub(L::splat(2.0).div(exp(magnitude.add(magnitude)).add(one))).copysign(x);
        near.select_lt(far, magnitude, L::splat(0.625))
    }
}

/// 1 / (1 + e^−x), computed from e^−|x| so that nothing overflows.
#[inline(always)]
pub(super) unsafe fn sigmoid<L: Lanes>(x: L) -> L {
    // SAFETY: the CPU has the instructions (caller).
    unsafe {
        let one = L::splat(1.0);
        let e = exp(x.copysign(L::splat(-1.0)));
        e.select_lt(one, x, L::splat(0.0)).div(one.add(e))
    }
}

/// log(1 + e^x) as max(x, 0) + log(1 + e^−|x|).
#[inline(always)]
pub(super) unsafe fn softplus<L: Lanes>(x: L) -> L {
    // SAFETY: the CPU has the instructions (caller); 1 + e lies in 1..=2, where `log` is defined.
    unsafe {
        let e = exp(x.copysign(L::splat(-1.0)));
        let sum = L::splat(1.0).add(e);
        // What rounding 1 + e lost is put back to first order; without it a small e would vanish.
        let lost = e.sub(sum.sub(L::splat(1.0)));
        let log = log(sum).add(lost.div(sum));
        L::splat(0.0).max(x).add(log)
    }
}
