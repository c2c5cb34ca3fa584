//! One resident tensor: a view into the slab, and what the kernels and the small vectors need of it.

use std::ops::Range;
use std::sync::Arc;

use crate::checkpoint::Dtype;
use crate::kernels::{Matrix, Weights};
use crate::store::Region;

/// One resident tensor; cheap to clone.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// As in the checkpoint; f16 was widened to f32 while loading.
    pub dtype: Dtype,
    /// As in the checkpoint.
    pub shape: Vec<usize>,
    slab: Arc<Region>,
    range: Range<usize>,
}

impl Tensor {
    /// The bytes `range` of `slab`, which hold `shape` values of `dtype` (f32 or bf16).
    pub(super) fn new(dtype: Dtype, shape: Vec<usize>, slab: Arc<Region>, range: Range<usize>) -> Self {
        Self { dtype, shape, slab, range }
    }

    /// The values' bytes, little-endian, from a multiple of 64.
    pub fn bytes(&self) -> &[u8] {
        &self.slab[self.range.clone()]
    }

    /// As a `[rows, cols]` matrix for the kernels: the first dimension against all others, so `[C, 1, K]` is `[C, K]`; a
    /// vector `[n]` is `[1, n]`, a scalar `[1, 1]`.
    pub fn matrix(&self) -> Matrix<'_> {
        let (rows, cols) = match self.shape.as_slice() {
            [] => (1, 1),
            [n] => (1, *n),
            [rows, others @ ..] => (*rows, others.iter().product()),
        };
        let weights = match self.dtype {
            Dtype::Bf16 => Weights::Bf16(self.bytes()),
            Dtype::F32 => Weights::F32(self.bytes()),
            Dtype::F16 | Dtype::U8 => unreachable!("loading widens f16 and refuses u8"),
        };
        Matrix { rows, cols, weights }
    }

    /// All values as f32, in stored order. For vectors and convolution taps, which are small.
    pub fn to_f32(&self) -> Vec<f32> {
        match self.dtype {
            Dtype::Bf16 => {
                let (values, _) = self.bytes().as_chunks::<2>();
                values.iter().map(|value| f32::from_bits(u32::from(u16::from_le_bytes(*value)) << 16)).collect()
            }
            Dtype::F32 => self.bytes().as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect(),
            Dtype::F16 | Dtype::U8 => unreachable!("loading widens f16 and refuses u8"),
        }
    }
}

/// IEEE half precision to f32, exactly; NaN keeps its payload.
pub(super) fn widen_f16(half: u16) -> f32 {
    let sign = u32::from(half & 0x8000) << 16;
    let exponent = u32::from(half >> 10 & 0x1f);
    let mantissa = u32::from(half & 0x3ff);
    match exponent {
        // Subnormal: mantissa · 2⁻²⁴, which f32 holds as a normal number.
        0 => f32::from_bits(sign | (mantissa as f32 * f32::from_bits((127 - 24) << 23)).to_bits()),
        0x1f => f32::from_bits(sign | 0x7f80_0000 | mantissa << 13),
        _ => f32::from_bits(sign | (exponent + 127 - 15) << 23 | mantissa << 13),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn halves_widen_to_the_same_value() {
        let cases = [
            (0x0000, 0.0),
            (0x3c00, 1.0),
            (0xc000, -2.0),
            (0x7bff, 65504.0),
            (0x0400, 2f32.powi(-14)),
            (0x0001, 2f32.powi(-24)),
            (0x83ff, -1023.0 * 2f32.powi(-24)),
            (0x3555, 1365.0 / 4096.0),
            (0x7c00, f32::INFINITY),
            (0xfc00, f32::NEG_INFINITY),
        ];
        for (half, expected) in cases {
            assert_eq!(widen_f16(half), expected, "{half:#06x}");
        }
        assert_eq!(widen_f16(0x8000).to_bits(), 0x8000_0000);
        assert!(widen_f16(0x7e01).is_nan());
        // Over all finite halves the order of values is that of the bits.
        assert!((0..0x7bff).all(|half| widen_f16(half) < widen_f16(half + 1)));
    }
}
