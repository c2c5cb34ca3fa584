//! Random numbers of our own: the same on every machine, and for every number of threads.
//!
//! Each tensor, block or trace has a stream of its own, keyed by what it is; nothing depends on who draws first.
//! Sources: xoshiro256++ and SplitMix64 by Blackman and Vigna; the normal quantile by Acklam's rational approximation.

use std::sync::OnceLock;

/// One stream of random bits (xoshiro256++).
#[derive(Debug, Clone)]
pub struct Rng([u64; 4]);

impl Rng {
    /// The stream of `key`.
    pub fn new(key: u64) -> Self {
        let mut state = key;
        Self(std::array::from_fn(|_| {
            state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
            mix(state)
        }))
    }

    /// The next 64 bits.
    #[inline]
    pub fn bits(&mut self) -> u64 {
        let s = &mut self.0;
        let out = s[0].wrapping_add(s[3]).rotate_left(23).wrapping_add(s[0]);
        let t = s[1] << 17;
        s[2] ^= s[0];
        s[3] ^= s[1];
        s[1] ^= s[2];
        s[0] ^= s[3];
        s[2] ^= t;
        s[3] = s[3].rotate_left(45);
        out
    }

    /// Uniform in 0 ≤ x < 1.
    #[inline]
    pub fn unit(&mut self) -> f64 {
        (self.bits() >> 11) as f64 * (1.0 / (1u64 << 53) as f64)
    }

    /// Uniform in 0..n; the bias of the multiplication is below n / 2³².
    #[inline]
    pub fn below(&mut self, n: u32) -> u32 {
        (((self.bits() >> 32) * u64::from(n)) >> 32) as u32
    }

    /// Standard normal.
    pub fn normal(&mut self) -> f64 {
        let bits = self.bits();
        let magnitude = f64::from(half_normal()[(bits & 4095) as usize]);
        if bits & 0x8000 == 0 { magnitude } else { -magnitude }
    }

    /// A random order of `0..n`.
    pub fn permutation(&mut self, n: usize) -> Vec<usize> {
        let mut order: Vec<usize> = (0..n).collect();
        for i in (1..n).rev() {
            order.swap(i, self.below(i as u32 + 1) as usize);
        }
        order
    }
}

/// The key of a part of `key`: of tensor `name`, of block 7.
pub fn subkey(key: u64, part: u64) -> u64 {
    mix(mix(key ^ 0x6a09_e667_f3bc_c909).wrapping_add(part.wrapping_mul(0x9e37_79b9_7f4a_7c15)))
}

/// The key of the part of `key` called `name`.
pub fn named_key(key: u64, name: &str) -> u64 {
    // FNV-1a, then mixed: names differ in a digit or two.
    let hash = name.bytes().fold(0xcbf2_9ce4_8422_2325, |h: u64, b| (h ^ u64::from(b)).wrapping_mul(0x100_0000_01b3));
    subkey(key, hash)
}

/// SplitMix64's finalizer.
fn mix(x: u64) -> u64 {
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// Magnitudes of a standard normal: 4096 values that are equally likely.
pub fn half_normal() -> &'static [f32; 4096] {
    static TABLE: OnceLock<[f32; 4096]> = OnceLock::new();
    TABLE.get_or_init(|| std::array::from_fn(|i| normal_quantile(0.5 + (i as f64 + 0.5) / 8192.0) as f32))
}

/// x with P(N(0,1) < x) = `p`, for 0 < p < 1; relative error below 1.2e-9.
pub fn normal_quantile(p: f64) -> f64 {
    const A: [f64; 6] = [
        -3.969683028665376e1,
        2.209460984245205e2,
        -2.759285104469687e2,
        1.38357751867269e2,
        -3.066479806614716e1,
        2.506628277459239e0,
    ];
    const B: [f64; 5] =
        [-5.447609879822406e1, 1.615858368580409e2, -1.556989798598866e2, 6.680131188771972e1, -1.328068155288572e1];
    const C: [f64; 6] = [
        -7.784894002430293e-3,
        -3.223964580411365e-1,
        -2.400758277161838e0,
        -2.549732539343734e0,
        4.374664141464968e0,
        2.938163982698783e0,
    ];
    const D: [f64; 4] = [7.784695709041462e-3, 3.224671290700398e-1, 2.445134137142996e0, 3.754408661907416e0];
    const LOW: f64 = 0.02425;
    let poly = |c: &[f64], x: f64| c.iter().fold(0.0, |sum, c| sum * x + c);
    if p < LOW {
        let q = (-2.0 * p.ln()).sqrt();
        poly(&C, q) / (poly(&D, q) * q + 1.0)
    } else if p > 1.0 - LOW {
        -normal_quantile(1.0 - p)
    } else {
        let q = p - 0.5;
        let r = q * q;
        poly(&A, r) * q / (poly(&B, r) * r + 1.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn quantiles_are_those_of_the_normal_distribution() {
        for (p, x) in
            [(0.5, 0.0), (0.975, 1.959963985), (0.999, 3.090232306), (0.01, -2.326347874), (0.84134, 0.999982)]
        {
            let got = normal_quantile(p);
            assert!((got - x).abs() < 1e-5, "{p}: got {got}, wanted {x}");
        }
    }

    #[test]
    fn normals_have_mean_zero_and_variance_one() {
        let mut rng = Rng::new(1);
        let draws: Vec<f64> = (0..100_000).map(|_| rng.normal()).collect();
        let mean = draws.iter().sum::<f64>() / draws.len() as f64;
        let variance = draws.iter().map(|x| x * x).sum::<f64>() / draws.len() as f64;
        assert!(mean.abs() < 0.01 && (variance - 1.0).abs() < 0.02, "mean {mean}, variance {variance}");
    }

    #[test]
    fn streams_of_different_keys_differ() {
        let first: Vec<u64> = (0..1000).map(|part| Rng::new(subkey(7, part)).bits()).collect();
        let mut sorted = first.clone();
        sorted.sort_unstable();
        sorted.dedup();
        assert_eq!(sorted.len(), first.len());
        assert_ne!(named_key(1, "model.layers.1"), named_key(1, "model.layers.2"));
        assert_ne!(named_key(1, "a"), named_key(2, "a"));
    }

    #[test]
    fn a_permutation_has_every_number_once() {
        let mut order = Rng::new(3).permutation(896);
        assert_ne!(order[..4], [0, 1, 2, 3]);
        order.sort_unstable();
        assert_eq!(order, (0..896).collect::<Vec<_>>());
    }
}
