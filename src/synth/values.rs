//! The bytes of a tensor, made block by block: each block has a random stream of its own, so any thread can make any
//! block, and the tensor is the same whoever made it.

use super::rng::{Rng, half_normal, named_key, subkey};

/// Bytes of a block; a multiple of every element's size.
pub(super) const BLOCK_BYTES: usize = 1 << 20;

/// What a tensor is filled with.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Fill {
    /// A bf16 matrix.
    Matrix(Matrix),
    /// f32 values.
    F32(Floats),
    /// bf16 values.
    Bf16(Floats),
    /// Pairs of MXFP4 codes.
    Codes,
    /// MXFP4 scales around this one.
    Scales(u8),
}

/// Normal values of mean 0, with another deviation in the first rows or columns.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Matrix {
    pub(super) cols: usize,
    pub(super) std: f32,
    /// So many first rows have this deviation.
    pub(super) first_rows: (usize, f32),
    /// So many first columns have this deviation; where rows and columns meet, the rows'.
    pub(super) first_cols: (usize, f32),
    /// Rows from this one on are zero.
    pub(super) zero_from: usize,
    /// Neighbours in a row are opposite: what all columns have in common cancels.
    pub(super) opposite: bool,
}

impl Matrix {
    pub(super) fn new(cols: usize, std: f32) -> Self {
        Self { cols, std, first_rows: (0, 0.0), first_cols: (0, 0.0), zero_from: usize::MAX, opposite: false }
    }

    /// Elements from `element` on that have the same deviation, and that deviation (0: zeros).
    fn segment(&self, element: usize) -> (usize, f32) {
        let (row, col) = (element / self.cols, element % self.cols);
        if row >= self.zero_from {
            return (usize::MAX, 0.0);
        }
        if row < self.first_rows.0 {
            return (self.first_rows.0 * self.cols - element, self.first_rows.1);
        }
        if self.first_cols.0 == 0 {
            return (self.zero_from.saturating_mul(self.cols) - element, self.std);
        }
        if col < self.first_cols.0 { (self.first_cols.0 - col, self.first_cols.1) } else { (self.cols - col, self.std) }
    }
}

/// A few values, made all at once.
#[derive(Debug, Clone, PartialEq)]
pub(super) enum Floats {
    /// Normal around `mean`.
    Around { mean: f32, std: f32 },
    /// Uniform from the first to the second, and after `len` values zeros.
    Uniform { from: f32, to: f32, len: usize },
    /// Convolution taps, `taps` a channel: these, each changed by a tenth or so.
    Taps([f32; 4]),
    /// These.
    Given(Vec<f32>),
}

/// Bytes of the block that begins at byte `begin` of tensor `name`; `out` is as long as the block.
pub(super) fn fill(fill: &Fill, seed: u64, name: &str, begin: u64, out: &mut [u8]) {
    debug_assert!(begin.is_multiple_of(BLOCK_BYTES as u64) && out.len() <= BLOCK_BYTES);
    let mut rng = Rng::new(subkey(named_key(seed, name), begin / BLOCK_BYTES as u64));
    match fill {
        Fill::Matrix(matrix) => fill_matrix(matrix, (begin / 2) as usize, &mut rng, out),
        Fill::F32(floats) => {
            let first = (begin / 4) as usize;
            for (i, bytes) in out.chunks_exact_mut(4).enumerate() {
                bytes.copy_from_slice(&value(floats, first + i, &mut rng).to_le_bytes());
            }
        }
        Fill::Bf16(floats) => {
            let first = (begin / 2) as usize;
            for (i, bytes) in out.chunks_exact_mut(2).enumerate() {
                bytes.copy_from_slice(&bf16(value(floats, first + i, &mut rng)).to_le_bytes());
            }
        }
        Fill::Codes => fill_bytes(&code_table(), &mut rng, out, |low, high| low | high << 4),
        Fill::Scales(centre) => fill_scales(&scale_table(*centre), &mut rng, out),
    }
}

fn value(floats: &Floats, index: usize, rng: &mut Rng) -> f32 {
    match floats {
        Floats::Around { mean, std } => mean + std * rng.normal() as f32,
        Floats::Uniform { len, .. } if index >= *len => 0.0,
        Floats::Uniform { from, to, .. } => from + (to - from) * rng.unit() as f32,
        Floats::Taps(taps) => taps[index % taps.len()] * (1.0 + 0.1 * rng.normal() as f32),
        Floats::Given(values) => values[index],
    }
}

/// `out` from element `element` of the matrix on.
fn fill_matrix(matrix: &Matrix, mut element: usize, rng: &mut Rng, mut out: &mut [u8]) {
    let mut tables: Vec<(f32, Box<[u16; 4096]>)> = Vec::new();
    while !out.is_empty() {
        let (len, std) = matrix.segment(element);
        let len = len.min(out.len() / 2);
        let (segment, rest) = std::mem::take(&mut out).split_at_mut(2 * len);
        if std == 0.0 {
            segment.fill(0);
        } else {
            let known = tables.iter().position(|(of, _)| *of == std);
            let table = known.unwrap_or_else(|| {
                tables.push((std, Box::new(half_normal().map(|x| bf16(x * std)))));
                tables.len() - 1
            });
            normals(&tables[table].1, rng, segment, matrix.opposite);
        }
        (element, out) = (element + len, rest);
    }
}

/// Four values of 64 random bits: 12 choose the magnitude and 1 the sign.
fn normals(table: &[u16; 4096], rng: &mut Rng, out: &mut [u8], opposite: bool) {
    let one = |bits: u64| table[(bits & 4095) as usize] | (bits as u16 & 0x8000);
    let mut fours = out.chunks_exact_mut(8);
    for four in &mut fours {
        let bits = rng.bits();
        let [a, b, c, d] = if opposite {
            opposites(one(bits), one(bits >> 16))
        } else {
            [0, 16, 32, 48].map(|shift| one(bits >> shift))
        };
        let word = u64::from(a) | u64::from(b) << 16 | u64::from(c) << 32 | u64::from(d) << 48;
        four.copy_from_slice(&word.to_le_bytes());
    }
    let bits = rng.bits();
    for (i, two) in fours.into_remainder().chunks_exact_mut(2).enumerate() {
        let value = if opposite { opposites(one(bits), one(bits >> 16))[i] } else { one(bits >> (16 * i)) };
        two.copy_from_slice(&value.to_le_bytes());
    }
}

fn opposites(a: u16, b: u16) -> [u16; 4] {
    [a, a ^ 0x8000, b, b ^ 0x8000]
}

/// Each byte made of two entries of `table`.
fn fill_bytes(table: &[u8; 256], rng: &mut Rng, out: &mut [u8], join: impl Fn(u8, u8) -> u8) {
    for four in out.chunks_mut(4) {
        let bits = rng.bits().to_le_bytes();
        for (byte, pair) in four.iter_mut().zip(bits.chunks_exact(2)) {
            *byte = join(table[usize::from(pair[0])], table[usize::from(pair[1])]);
        }
    }
}

fn fill_scales(table: &[u8; 256], rng: &mut Rng, out: &mut [u8]) {
    for eight in out.chunks_mut(8) {
        let bits = rng.bits().to_le_bytes();
        for (byte, bits) in eight.iter_mut().zip(bits) {
            *byte = table[usize::from(bits)];
        }
    }
}

/// How often each code occurs among 256: what rounding normal values to a block's scale gives, with zero mostly written
/// as −0 (code 8), as in the released experts; 3.77 bits a code.
const CODE_COUNTS: [u8; 16] = [1, 22, 21, 18, 22, 19, 11, 3, 22, 23, 21, 19, 22, 18, 11, 3];

/// Root of the mean square of the codes' values.
pub(super) const CODE_RMS: f64 = 2.177;

fn code_table() -> [u8; 256] {
    let mut codes = (0..16u8).flat_map(|code| std::iter::repeat_n(code, usize::from(CODE_COUNTS[usize::from(code)])));
    std::array::from_fn(|_| codes.next().expect("the counts sum to 256"))
}

/// Seven of eight scales are the middle one, the others its neighbours: 0.65 bits a scale.
fn scale_table(centre: u8) -> [u8; 256] {
    std::array::from_fn(|i| match i {
        0..18 => centre - 1,
        18..31 => centre + 1,
        _ => centre,
    })
}

/// Round to nearest, ties to even; finite values only.
pub(super) fn bf16(x: f32) -> u16 {
    let bits = x.to_bits();
    ((bits + 0x7fff + (bits >> 16 & 1)) >> 16) as u16
}

#[cfg(test)]
mod tests {
    use super::*;

    fn matrix(matrix: &Matrix, rows: usize) -> Vec<f32> {
        let mut bytes = vec![0xff; rows * matrix.cols * 2];
        for (i, block) in bytes.chunks_mut(BLOCK_BYTES).enumerate() {
            fill(&Fill::Matrix(matrix.clone()), 1, "m", (i * BLOCK_BYTES) as u64, block);
        }
        bytes.chunks_exact(2).map(|b| f32::from_bits(u32::from(u16::from_le_bytes([b[0], b[1]])) << 16)).collect()
    }

    fn rms(values: impl Iterator<Item = f32>) -> f64 {
        let (sum, count) = values.fold((0.0, 0), |(sum, count), x| (sum + f64::from(x) * f64::from(x), count + 1));
        (sum / f64::from(count)).sqrt()
    }

    #[test]
    fn a_matrix_has_the_deviation_of_each_part() {
        let cols = 1001;
        let parts = Matrix { first_rows: (100, 0.5), first_cols: (50, 3.0), zero_from: 900, ..Matrix::new(cols, 1.0) };
        let values = matrix(&parts, 1000);
        let part = |rows: std::ops::Range<usize>, from: usize, to: usize| {
            rms(rows.flat_map(|row| values[row * cols + from..row * cols + to].iter().copied()))
        };
        assert!((part(0..100, 0, cols) - 0.5).abs() < 0.01);
        assert!((part(100..900, 0, 50) - 3.0).abs() < 0.05);
        assert!((part(100..900, 50, cols) - 1.0).abs() < 0.01);
        assert_eq!(part(900..1000, 0, cols), 0.0);
    }

    #[test]
    fn opposite_neighbours_cancel() {
        let values = matrix(&Matrix { opposite: true, ..Matrix::new(64, 0.1) }, 20_000);
        assert!(values.chunks_exact(2).all(|pair| pair[0] == -pair[1]));
        assert!((rms(values.into_iter()) - 0.1).abs() < 0.001);
    }

    #[test]
    fn blocks_differ_and_do_not_depend_on_their_order() {
        let block = |begin: u64| {
            let mut out = vec![0; BLOCK_BYTES];
            fill(&Fill::Codes, 1, "w", begin, &mut out);
            out
        };
        let second = block(BLOCK_BYTES as u64);
        assert_ne!(block(0), second);
        assert_eq!(block(BLOCK_BYTES as u64), second);
    }

    #[test]
    fn codes_and_scales_are_distributed_as_in_real_experts() {
        assert_eq!(CODE_COUNTS.iter().map(|n| u32::from(*n)).sum::<u32>(), 256);
        let entropy = |counts: &[f64]| -> f64 {
            let sum: f64 = counts.iter().sum();
            counts.iter().filter(|n| **n > 0.0).map(|n| -n / sum * (n / sum).log2()).sum()
        };
        let bits = entropy(&CODE_COUNTS.map(f64::from));
        assert!((bits - 3.75).abs() < 0.05, "{bits}");
        let mut counts = [0.0; 256];
        let mut out = vec![0; 100_000];
        fill(&Fill::Scales(121), 1, "s", 0, &mut out);
        out.iter().for_each(|scale| counts[usize::from(*scale)] += 1.0);
        assert!((entropy(&counts) - 0.66).abs() < 0.05, "{}", entropy(&counts));
        assert!(counts[120] > 0.0 && counts[122] > 0.0 && counts[120..=122].iter().sum::<f64>() == 100_000.0);
        const VALUES: [f64; 8] = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0];
        let square: f64 = CODE_COUNTS.iter().zip(0..).map(|(n, c)| f64::from(*n) * VALUES[c & 7].powi(2)).sum();
        assert!(((square / 256.0).sqrt() - CODE_RMS).abs() < 0.01, "{}", (square / 256.0).sqrt());
    }

    #[test]
    fn rounding_to_bf16_goes_to_the_nearest() {
        for (x, bits) in
            [(1.0, 0x3f80), (1.0 + 1.0 / 256.0, 0x3f80), (1.0 + 3.0 / 256.0, 0x3f82), (-1.004, 0xbf81), (0.0, 0)]
        {
            assert_eq!(bf16(x), bits, "{x}");
        }
    }
}
