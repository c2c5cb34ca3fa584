//! int8: quantized weights, about half the bytes of bfloat16. A record is one row: an f16 scale for each 64 columns, up to
//! a multiple of 16 bytes; then a signed byte for each column, zeroes up to a multiple of 64. value = byte · scale, which
//! f32 holds exactly.

/// Columns that share a scale.
pub const GROUP: usize = 64;

/// Largest magnitude of a code.
const CODE_MAX: f32 = 127.0;

/// Bytes of a record ahead of its codes.
pub(super) fn front_bytes(cols: usize) -> usize {
    (2 * cols.div_ceil(GROUP)).next_multiple_of(16)
}

/// Bytes of the record of a row of `cols` values.
pub fn record_bytes(cols: usize) -> usize {
    front_bytes(cols) + cols.next_multiple_of(GROUP)
}

/// Encodes the bfloat16 values `row` as `record`, which has [`record_bytes`]. `None` when a value is not finite, or beyond
/// what a scale can say.
///
/// # Panics
/// When lengths disagree.
pub fn encode(row: &[u8], record: &mut [u8]) -> Option<()> {
    let (values, _) = row.as_chunks::<2>();
    let cols = values.len();
    assert_eq!(record.len(), record_bytes(cols), "bytes of an int8 record of {cols} columns");
    let (front, codes) = record.split_at_mut(front_bytes(cols));
    front.fill(0);
    let groups = values.chunks(GROUP).zip(codes.chunks_exact_mut(GROUP));
    for ((values, codes), scale) in groups.zip(front.as_chunks_mut::<2>().0) {
        let mut floats = [0.0_f32; GROUP];
        for (float, value) in floats.iter_mut().zip(values) {
            *float = f32::from_bits(u32::from(u16::from_le_bytes(*value)) << 16);
        }
        let largest = floats.iter().fold(0.0_f32, |most, value| most.max(value.abs()));
        if floats.iter().any(|value| value.is_nan()) {
            return None;
        }
        let half = narrow(largest / CODE_MAX)?;
        *scale = half.to_le_bytes();
        let by = match widen(half) {
            0.0 => 0.0,
            scale => 1.0 / scale,
        };
        for (code, value) in codes.iter_mut().zip(floats) {
            *code = (value * by).round_ties_even().clamp(-CODE_MAX, CODE_MAX) as i8 as u8;
        }
    }
    Some(())
}

/// The values of `record`.
pub fn decode(record: &[u8], row: &mut [f32]) {
    let (front, codes) = record.split_at(front_bytes(row.len()));
    for ((values, codes), scale) in row.chunks_mut(GROUP).zip(codes.chunks(GROUP)).zip(front.as_chunks::<2>().0) {
        for (value, code) in values.iter_mut().zip(codes) {
            *value = f32::from(*code as i8) * widen(u16::from_le_bytes(*scale));
        }
    }
}

/// A scale as f32: exact for every f16 that is finite and not negative.
#[inline(always)]
pub(super) fn widen(half: u16) -> f32 {
    const UP: f32 = f32::from_bits((127 + 127 - 15) << 23);
    f32::from_bits(u32::from(half) << 13) * UP
}

/// The nearest f16, or the next above a subnormal one; `None` beyond the largest, and for NaN.
fn narrow(value: f32) -> Option<u16> {
    const DOWN: f32 = f32::from_bits((127 - (127 - 15)) << 23);
    if value.is_nan() || value >= 65520.0 {
        return None;
    }
    let bits = (value * DOWN).to_bits();
    let half = ((bits + 0xfff + (bits >> 13 & 1)) >> 13) as u16;
    Some(half + u16::from(half < 0x400 && widen(half) < value))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn bf16(values: &[f32]) -> Vec<u8> {
        values.iter().flat_map(|value| ((value.to_bits() >> 16) as u16).to_le_bytes()).collect()
    }

    #[test]
    fn scales_go_there_and_back() {
        for half in 0..0x7c00 {
            assert_eq!(narrow(widen(half)), Some(half), "{half:#06x}");
        }
        assert_eq!((widen(0x3c00), widen(1), widen(0x7bff)), (1.0, 2f32.powi(-24), 65504.0));
        assert_eq!((narrow(65519.0), narrow(65520.0), narrow(f32::NAN)), (Some(0x7bff), None, None));
    }

    #[test]
    fn no_value_is_off_by_more_than_half_a_step() {
        for (size, cols) in [(1.0, 64), (0.02, 130), (3e4, 7), (1e-3, 200), (1e-30, 65)] {
            let row: Vec<f32> = (0..cols).map(|c| size * ((c * 37 % 101) as f32 / 50.0 - 1.0)).collect();
            let row: Vec<f32> = row.iter().map(|v| f32::from_bits(v.to_bits() & 0xffff_0000)).collect();
            let (mut record, mut back) = (vec![0xee; record_bytes(cols)], vec![0.0; cols]);
            encode(&bf16(&row), &mut record).unwrap();
            decode(&record, &mut back);
            for (row, back) in row.chunks(GROUP).zip(back.chunks(GROUP)) {
                let largest = row.iter().fold(0.0, |most: f32, v| most.max(v.abs()));
                let step = (largest / CODE_MAX * 1.001).max(2f32.powi(-24));
                assert!(row.iter().zip(back).all(|(a, b)| (a - b).abs() <= 0.5 * step), "{row:?}\n{back:?}");
            }
        }
    }

    #[test]
    fn what_no_scale_can_say_is_refused() {
        for value in [f32::NAN, f32::INFINITY, f32::NEG_INFINITY, 1e8] {
            let mut row = [0.5; 70];
            row[66] = value;
            assert_eq!(encode(&bf16(&row), &mut vec![0; record_bytes(70)]), None, "{value}");
        }
    }
}
