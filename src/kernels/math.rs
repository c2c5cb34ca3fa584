//! exp, log, tanh, sigmoid and softplus: one form each, out of [`Lanes`] operations alone, so that every instruction
//! set gives the same bits. exp and log are within 1 ulp, tanh within 1.5, sigmoid and softplus within 2.2 (measured over
//! the whole range by the tests). NaN gives NaN.
//!
//! # Safety
//! As for [`Lanes`]: all functions here need a CPU with the instructions of `L`, and nothing else.

use super::lanes::Lanes;

/// ln 2 in two parts; the first has ten bits, so that its product with an exponent is exact.
const LN_2_HIGH: f32 = 355.0 / 512.0;
const LN_2_LOW: f32 = -2.121_944_4e-4;

/// (e^r − 1 − r) / r² for |r| ≤ ln 2 / 2, from the constant term up.
const EXP: [f32; 5] = [0.5, 0.166_665_76, 0.041_666_556, 0.008_363_203, 0.001_392_621_3];
/// (log(1 + f) − f + f²/2) / f³ for 1 + f from √½ to √2, from the constant term up.
const LOG: [f32; 8] =
    [0.333_333_3, -0.250_003_07, 0.200_010_45, -0.166_412_82, 0.142_144_96, -0.129_981_83, 0.126_223_19, -0.079_027_44];
/// (tanh(x)/x − 1) / x² in x² for |x| ≤ 0.625, from the constant term up.
const TANH: [f32; 5] = [-0.333_333_28, 0.133_327_7, -0.053_850_908, 0.020_997_18, -0.006_096_714];

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
        let far = one.sub(L::splat(2.0).div(exp(magnitude.add(magnitude)).add(one)));
        // The sign last: it also restores that of −0.0.
        near.select_lt(far, magnitude, L::splat(0.625)).copysign(x)
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

#[cfg(test)]
mod tests {
    use super::*;
    use crate::kernels::dispatch::Detected;
    use crate::kernels::lanes::{Kernel, LANES};
    use crate::kernels::slices::{load, store};

    #[derive(Debug, Clone, Copy)]
    enum Function {
        Exp,
        Log,
        Tanh,
        Sigmoid,
        Softplus,
    }

    struct Apply<'a> {
        function: Function,
        x: &'a mut [f32],
    }

    impl Kernel for Apply<'_> {
        type Output = ();

        #[inline(always)]
        unsafe fn run<L: Lanes>(self) {
            for part in self.x.chunks_mut(LANES) {
                // SAFETY: the part's length bounds load and store; the CPU has the instructions (caller).
                unsafe {
                    let x: L = load(part.as_ptr(), part.len());
                    let y = match self.function {
                        Function::Exp => exp(x),
                        Function::Log => log(x),
                        Function::Tanh => tanh(x),
                        Function::Sigmoid => sigmoid(x),
                        Function::Softplus => softplus(x),
                    };
                    store(y, part.as_mut_ptr(), part.len());
                }
            }
        }
    }

    fn apply(isa: Detected, function: Function, x: &[f32]) -> Vec<f32> {
        let mut x = x.to_vec();
        isa.run(Apply { function, x: &mut x });
        x
    }

    fn fastest(function: Function, x: &[f32]) -> Vec<f32> {
        apply(Detected::all().next().expect("there is always scalar"), function, x)
    }

    impl Function {
        fn exact(self, x: f64) -> f64 {
            match self {
                Function::Exp => x.exp(),
                Function::Log => x.ln(),
                Function::Tanh => x.tanh(),
                Function::Sigmoid => 1.0 / (1.0 + (-x).exp()),
                Function::Softplus => x.max(0.0) + (-x.abs()).exp().ln_1p(),
            }
        }
    }

    /// |got − wanted| in units of the last place that f32 has at `wanted`.
    fn ulps(got: f32, wanted: f64) -> f64 {
        let exponent = (wanted.abs().log2().floor() as i32).clamp(-126, 127);
        (f64::from(got) - wanted).abs() / 2f64.powi(exponent - 23)
    }

    /// Every `step`-th float of [low, high] by its bits, both signs when `low` < 0 is −`high`.
    fn sweep(low: f32, high: f32, step: usize) -> Vec<f32> {
        let up = |from: f32, to: f32| (from.to_bits()..=to.to_bits()).step_by(step).map(f32::from_bits);
        if low >= 0.0 { up(low, high).collect() } else { up(0.0, -low).map(|x| -x).chain(up(0.0, high)).collect() }
    }

    #[test]
    fn functions_stay_within_their_stated_ulps() {
        use Function::*;
        for (function, low, high, limit) in [
            (Exp, -104.0, 88.73, 1.0),
            (Log, f32::MIN_POSITIVE, f32::MAX, 1.0),
            (Tanh, -30.0, 30.0, 1.5),
            (Sigmoid, -104.0, 104.0, 2.2),
            (Softplus, -104.0, 1000.0, 2.2),
        ] {
            let x = sweep(low, high, 977);
            let got = fastest(function, &x);
            let mut worst = (0.0, 0.0);
            for (x, got) in x.iter().zip(got) {
                let wanted = function.exact(f64::from(*x));
                if wanted.abs() > f64::from(f32::MAX) {
                    continue;
                }
                let error = ulps(got, wanted);
                assert!(error <= limit, "{function:?}({x:e}): got {got:e}, wanted {wanted:e}, {error:.2} ulp");
                if error > worst.0 {
                    worst = (error, *x);
                }
            }
            println!("{function:?}: at most {:.3} ulp, at {:e}", worst.0, worst.1);
        }
    }

    #[test]
    fn ends_of_the_range_are_exact() {
        let (inf, nan) = (f32::INFINITY, f32::NAN);
        let check = |function, cases: &[(f32, f32)]| {
            let x: Vec<f32> = cases.iter().map(|case| case.0).collect();
            for ((x, wanted), got) in cases.iter().zip(fastest(function, &x)) {
                let same = got.to_bits() == wanted.to_bits() || got.is_nan() && wanted.is_nan();
                assert!(same, "{function:?}({x:e}): got {got:e}, wanted {wanted:e}");
            }
        };
        let tiny = f32::from_bits(1);
        let near_zero = [(0.0, 1.0), (-0.0, 1.0), (tiny, 1.0), (1e-30, 1.0)];
        check(Function::Exp, &near_zero);
        check(Function::Exp, &[(-inf, 0.0), (-1e30, 0.0), (-104.0, 0.0), (-103.9, tiny), (88.73, inf), (inf, inf)]);
        check(Function::Exp, &[(nan, nan), (-nan, nan)]);
        check(Function::Log, &[(1.0, 0.0), (2.0, std::f32::consts::LN_2)]);
        check(Function::Tanh, &[(0.0, 0.0), (-0.0, -0.0), (tiny, tiny), (-1e-20, -1e-20), (nan, nan)]);
        check(Function::Tanh, &[(10.0, 1.0), (1000.0, 1.0), (inf, 1.0), (-inf, -1.0), (-1e30, -1.0)]);
        check(Function::Sigmoid, &[(0.0, 0.5), (-0.0, 0.5), (1000.0, 1.0), (-1000.0, 0.0), (inf, 1.0), (-inf, 0.0)]);
        check(Function::Sigmoid, &[(nan, nan)]);
        check(Function::Softplus, &[(0.0, std::f32::consts::LN_2), (1000.0, 1000.0), (inf, inf), (-1000.0, 0.0)]);
        check(Function::Softplus, &[(-inf, 0.0), (nan, nan)]);
    }

    #[test]
    fn every_instruction_set_gives_the_same_bits() {
        use Function::*;
        for function in [Exp, Log, Tanh, Sigmoid, Softplus] {
            let low = if matches!(function, Log) { f32::MIN_POSITIVE } else { -f32::MAX };
            let x = sweep(low, f32::MAX, 100_003);
            let all: Vec<_> = Detected::all().map(|isa| (isa, apply(isa, function, &x))).collect();
            let (_, wanted) = all.last().expect("scalar is last");
            for (isa, got) in &all {
                let differs = got.iter().zip(wanted).position(|(a, b)| a.to_bits() != b.to_bits());
                assert_eq!(differs.map(|i| x[i]), None, "{function:?} on {isa:?}");
            }
        }
    }
}
