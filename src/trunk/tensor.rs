//! One resident tensor: a view into the slab, and what the kernels and the small vectors need of it.

use std::ops::Range;
use std::sync::Arc;

use super::TrunkFormat;
use crate::checkpoint::Dtype;
use crate::kernels::{Matrix, Weights, bf12, int8};
use crate::store::Region;

/// One resident tensor; cheap to clone.
#[derive(Debug, Clone)]
pub struct Tensor {
    /// As in the checkpoint; f16 was widened to f32 while loading.
    pub dtype: Dtype,
    /// As in the checkpoint.
    pub shape: Vec<usize>,
    form: TrunkFormat,
    slab: Arc<Region>,
    range: Range<usize>,
    /// What records of bf12 refer to, unless it follows them.
    side: Option<Arc<Vec<u8>>>,
}

impl Tensor {
    /// The bytes `range` of `slab`, which hold `shape` values of `dtype` (f32 or bf16) as `form`; `side` is what records of
    /// bf12 refer to, where it does not follow them.
    pub(super) fn new(
        dtype: Dtype,
        shape: Vec<usize>,
        form: TrunkFormat,
        slab: Arc<Region>,
        range: Range<usize>,
        side: Option<Arc<Vec<u8>>>,
    ) -> Self {
        Self { dtype, shape, form, slab, range, side }
    }

    /// The bytes as resident, from a multiple of 64: the values, little-endian, unless they are held in another form.
    pub fn bytes(&self) -> &[u8] {
        &self.slab[self.range.clone()]
    }

    /// Rows and columns; see [`Tensor::matrix`].
    fn size(&self) -> (usize, usize) {
        match self.shape.as_slice() {
            [] => (1, 1),
            [n] => (1, *n),
            [rows, others @ ..] => (*rows, others.iter().product()),
        }
    }

    /// Records and what they refer to.
    fn bf12(&self) -> (&[u8], &[u8]) {
        let (rows, cols) = self.size();
        let (records, after) = self.bytes().split_at(rows * bf12::record_bytes(cols));
        (records, self.side.as_ref().map_or(after, |side| side.as_slice()))
    }

    /// Whether everything is there that a kernel looks for.
    pub(super) fn is_whole(&self) -> bool {
        if self.form != TrunkFormat::Bf12 {
            return true;
        }
        let (_, cols) = self.size();
        let (records, side) = self.bf12();
        records.chunks_exact(bf12::record_bytes(cols)).all(|record| bf12::is_whole(record, cols, side))
    }

    /// As a `[rows, cols]` matrix for the kernels: the first dimension against all others, so `[C, 1, K]` is `[C, K]`; a
    /// vector `[n]` is `[1, n]`, a scalar `[1, 1]`.
    pub fn matrix(&self) -> Matrix<'_> {
        let (rows, cols) = self.size();
        let weights = match (self.form, self.dtype) {
            (TrunkFormat::Bf12, _) => {
                let (records, side) = self.bf12();
                Weights::Bf12 { records, side }
            }
            (TrunkFormat::Int8, _) => Weights::Int8(self.bytes()),
            (TrunkFormat::Bf16, Dtype::Bf16) => Weights::Bf16(self.bytes()),
            (TrunkFormat::Bf16, Dtype::F32) => Weights::F32(self.bytes()),
            (TrunkFormat::Bf16, Dtype::F16 | Dtype::U8) => unreachable!("loading widens f16 and refuses u8"),
        };
        Matrix { rows, cols, weights }
    }

    /// All values as f32, in stored order. For vectors and convolution taps, which are small.
    pub fn to_f32(&self) -> Vec<f32> {
        let (rows, cols) = self.size();
        let widen = |bytes: &[u8]| -> Vec<f32> {
            let values = bytes.as_chunks::<2>().0.iter();
            values.map(|value| f32::from_bits(u32::from(u16::from_le_bytes(*value)) << 16)).collect()
        };
        match (self.form, self.dtype) {
            (TrunkFormat::Bf12, _) => {
                let (records, side) = self.bf12();
                let mut values = vec![0; 2 * rows * cols];
                let records = records.chunks_exact(bf12::record_bytes(cols));
                values
                    .chunks_exact_mut(2 * cols)
                    .zip(records)
                    .for_each(|(row, record)| bf12::decode(record, side, row));
                widen(&values)
            }
            (TrunkFormat::Int8, _) => {
                let mut values = vec![0.0; rows * cols];
                let records = self.bytes().chunks_exact(int8::record_bytes(cols));
                values.chunks_exact_mut(cols).zip(records).for_each(|(row, record)| int8::decode(record, row));
                values
            }
            (TrunkFormat::Bf16, Dtype::Bf16) => widen(self.bytes()),
            (TrunkFormat::Bf16, Dtype::F32) => {
                self.bytes().as_chunks::<4>().0.iter().map(|value| f32::from_le_bytes(*value)).collect()
            }
            (TrunkFormat::Bf16, Dtype::F16 | Dtype::U8) => unreachable!("loading widens f16 and refuses u8"),
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
