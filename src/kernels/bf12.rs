//! bf12: bfloat16 in three quarters of the bytes, the same bits back.
//!
//! The exponents of a row of weights lie close together. A row keeps a byte of sign and mantissa for each value, and four
//! bits of exponent above the start of the row's window of sixteen; the few values outside the window are exceptions,
//! kept whole on the side. A record is one row:
//!
//! - head: `u32` where the row's words begin on the side, `u16` how many, `u8` start of the window, `u8` kind;
//! - flags: one bit for each group of 32 columns, set where it has exceptions; zeroes up to a multiple of 16 bytes;
//! - groups of 48 bytes: signs and mantissas of columns 0, 16, 1, 17, …, 15, 31; then the exponents of columns c (low
//!   nibble) and c + 16 (high nibble), c from 0 to 15. So one load brings the pair that one 32-bit lane decodes.
//!
//! Words on the side, little-endian: for each exception column · 2¹⁶ + the value's bits, columns ascending. A row with too
//! many exceptions for that is of the other kind: all flags set, the groups hold the low nibbles of the exponents
//! themselves, and the words the high ones, eight columns each. That takes no more than bfloat16 does.

use std::ops::Range;

/// Columns of a group.
pub const GROUP: usize = 32;

/// Bytes of a group.
const GROUP_BYTES: usize = 48;
/// Bytes of sign and mantissa in a group, ahead of the exponents.
const PLANE_BYTES: usize = 32;
const HEAD_BYTES: usize = 8;
/// Exponents in a window.
const WINDOW: usize = 16;

/// The exceptions name their column in 16 bits.
pub const COLS_MAX: usize = 1 << 16;

/// Kinds of rows.
const LISTED: u8 = 0;
const WHOLE: u8 = 1;

/// Exponent bits of the sixteen codes, twice, for each start of a window; in their place in a bfloat16.
pub(super) static EXPONENTS: Exponents = Exponents({
    let mut out = [[0; 32]; 256];
    let mut start = 0;
    while start < 256 {
        let mut code = 0;
        while code < 32 {
            out[start][code] = (((start + code % WINDOW) & 0xff) << 7) as u16;
            code += 1;
        }
        start += 1;
    }
    out
});

/// See [`EXPONENTS`]; each on a cache line of its own.
#[repr(align(64))]
pub(super) struct Exponents(pub(super) [[u16; 32]; 256]);

/// Bytes of a record ahead of its groups.
pub(super) fn front_bytes(cols: usize) -> usize {
    (HEAD_BYTES + cols.div_ceil(GROUP).div_ceil(8)).next_multiple_of(16)
}

/// Bytes of the record of a row of `cols` values.
pub fn record_bytes(cols: usize) -> usize {
    front_bytes(cols) + cols.div_ceil(GROUP) * GROUP_BYTES
}

/// Bytes on the side that the rows of a matrix with bell-shaped weights stay below by far, for planning: one in 250 of the
/// bytes of the records.
pub fn side_bytes_expected(record_bytes: u64) -> u64 {
    record_bytes / 250
}

/// Encodes the bfloat16 values `row` as `record`, which has [`record_bytes`]; appends the row's words to `side`.
///
/// # Panics
/// When lengths disagree, or there are more than [`COLS_MAX`] columns.
pub fn encode(row: &[u8], record: &mut [u8], side: &mut Vec<u8>) {
    let (values, _) = row.as_chunks::<2>();
    let cols = values.len();
    assert!(cols <= COLS_MAX && record.len() == record_bytes(cols), "a bf12 record of {cols} columns");
    let (front, groups) = record.split_at_mut(front_bytes(cols));
    front.fill(0);
    let start = (side.len() / 4) as u32;
    let (window, outside) = window(values);
    let kind = if 4 * outside > cols.div_ceil(8) * 4 { WHOLE } else { LISTED };
    let base = if kind == WHOLE { 0 } else { window };
    for (number, (values, group)) in values.chunks(GROUP).zip(groups.chunks_exact_mut(GROUP_BYTES)).enumerate() {
        let mut bits = [u16::from(base) << 7; GROUP]; // what is missing in the last group is an exception nowhere
        for (bits, value) in bits.iter_mut().zip(values) {
            *bits = u16::from_le_bytes(*value);
        }
        let codes = bits.map(|bits| (bits >> 7 & 0xff).wrapping_sub(u16::from(base)));
        let planes = bits.map(|bits| (bits >> 8 & 0x80 | bits & 0x7f) as u8);
        let (plane, nibbles) = group.split_at_mut(PLANE_BYTES);
        let (low, high) = planes.split_at(WINDOW);
        for ((pair, low), high) in plane.as_chunks_mut::<2>().0.iter_mut().zip(low).zip(high) {
            *pair = [*low, *high];
        }
        let (low, high) = codes.split_at(WINDOW);
        for ((nibbles, low), high) in nibbles.iter_mut().zip(low).zip(high) {
            *nibbles = (low & 15 | high << 4) as u8;
        }
        let mut exceptions = 0_u32;
        if codes.iter().fold(0, |all, code| all | code) > 15 {
            for (c, code) in codes.iter().enumerate() {
                exceptions |= u32::from(*code > 15) << c;
            }
        }
        if kind == WHOLE {
            for eight in bits[..values.len()].chunks(8) {
                let nibbles = eight.iter().rev().fold(0, |word, bits| word << 4 | u32::from(bits >> 11 & 15));
                side.extend(nibbles.to_le_bytes());
            }
        }
        if kind == WHOLE || exceptions != 0 {
            front[HEAD_BYTES + number / 8] |= 1 << (number % 8);
        }
        while kind == LISTED && exceptions != 0 {
            let c = exceptions.trailing_zeros() as usize;
            side.extend((((number * GROUP + c) as u32) << 16 | u32::from(bits[c])).to_le_bytes());
            exceptions &= exceptions - 1;
        }
    }
    let count = (side.len() / 4 - start as usize) as u16;
    front[..4].copy_from_slice(&start.to_le_bytes());
    front[4..6].copy_from_slice(&count.to_le_bytes());
    (front[6], front[7]) = (base, kind);
}

/// The start of the window that leaves the fewest exponents out, and how many.
fn window(values: &[[u8; 2]]) -> (u8, usize) {
    // Neighbours count in different tables: one that was just written is not to be waited for.
    let mut counts = [[0_u32; 256]; 4];
    for four in values.chunks(4) {
        for (counts, value) in counts.iter_mut().zip(four) {
            counts[usize::from(u16::from_le_bytes(*value) >> 7 & 0xff)] += 1;
        }
    }
    let count = |exponent: usize| counts.iter().map(|counts| counts[exponent] as usize).sum::<usize>();
    let mut inside: usize = (0..WINDOW).map(count).sum();
    let (mut best, mut most) = (0, inside);
    for start in 1..=256 - WINDOW {
        inside = inside + count(start + WINDOW - 1) - count(start - 1);
        if inside > most {
            (best, most) = (start, inside);
        }
    }
    (best as u8, values.len() - most)
}

/// Moves the words of `record` by `words` on the side; `None` where they would be beyond what a head can say.
pub fn move_side(record: &mut [u8], words: u32) -> Option<()> {
    let (start, _) = record.split_first_chunk_mut::<4>()?;
    *start = u32::from_le_bytes(*start).checked_add(words)?.to_le_bytes();
    Some(())
}

/// The head of a record.
#[derive(Clone, Copy)]
pub(super) struct Head {
    start: u32,
    count: u16,
    base: u8,
    kind: u8,
}

impl Head {
    /// From the first eight bytes of a record.
    pub(super) fn new(bytes: [u8; HEAD_BYTES]) -> Self {
        let [s0, s1, s2, s3, c0, c1, base, kind] = bytes;
        Self { start: u32::from_le_bytes([s0, s1, s2, s3]), count: u16::from_le_bytes([c0, c1]), base, kind }
    }

    /// Exponent bits of the row's codes.
    pub(super) fn exponents(self) -> &'static [u16; 32] {
        &EXPONENTS.0[usize::from(self.base)]
    }

    /// The row's words; `None` when `side` has no such.
    fn words(self, side: &[u8]) -> Option<&[[u8; 4]]> {
        let words: Range<usize> = self.start as usize..self.start as usize + usize::from(self.count);
        side.as_chunks::<4>().0.get(words)
    }
}

/// Whether the record has what a kernel looks for: a window that exists, words that exist, exceptions in order, each in a
/// group that is flagged.
pub fn is_whole(record: &[u8], cols: usize, side: &[u8]) -> bool {
    let Some((head, _)) = record.split_first_chunk::<HEAD_BYTES>() else { return false };
    let head = Head::new(*head);
    let Some(words) = head.words(side) else { return false };
    let groups = cols.div_ceil(GROUP);
    let flagged = |group: usize| record.get(HEAD_BYTES + group / 8).is_some_and(|byte| byte >> (group % 8) & 1 == 1);
    if record.len() != record_bytes(cols) {
        return false;
    }
    match head.kind {
        LISTED => {
            let columns = || words.iter().map(|word| usize::from(u16::from_le_bytes([word[2], word[3]])));
            usize::from(head.base) <= 256 - WINDOW
                && columns().zip(columns().skip(1)).all(|(a, b)| a < b)
                && columns().all(|column| column < cols && flagged(column / GROUP))
        }
        WHOLE => head.base == 0 && words.len() == cols.div_ceil(8) && (0..groups).all(flagged),
        _ => false,
    }
}

/// The 32 values of group number `number` as bfloat16, whatever the row's kind. Words that `side` lacks are passed over.
pub(super) fn decode_group(head: Head, group: &[u8; GROUP_BYTES], number: usize, side: &[u8]) -> [u16; GROUP] {
    let exponents = head.exponents();
    let mut out = [0; GROUP];
    for c in 0..WINDOW {
        let codes = group[PLANE_BYTES + c];
        for (column, plane, code) in [(c, group[2 * c], codes & 15), (c + 16, group[2 * c + 1], codes >> 4)] {
            let plane = u16::from(plane);
            out[column] = (plane & 0x80) << 8 | exponents[usize::from(code)] | plane & 0x7f;
        }
    }
    let words = head.words(side).unwrap_or_default();
    if head.kind == WHOLE {
        for (out, word) in out.chunks_mut(8).zip(words.iter().skip(number * GROUP / 8)) {
            let word = u32::from_le_bytes(*word);
            for (c, out) in out.iter_mut().enumerate() {
                *out |= ((word >> (4 * c) & 15) as u16) << 11;
            }
        }
        return out;
    }
    let column = |word: &[u8; 4]| usize::from(u16::from_le_bytes([word[2], word[3]]));
    let first = words.partition_point(|word| column(word) < number * GROUP);
    for word in &words[first..] {
        match out.get_mut(column(word).wrapping_sub(number * GROUP)) {
            Some(out) => *out = u16::from_le_bytes([word[0], word[1]]),
            None => break,
        }
    }
    out
}

/// The row of `record` as it was, bfloat16. `side` has the matrix's words.
pub fn decode(record: &[u8], side: &[u8], row: &mut [u8]) {
    let Some((head, _)) = record.split_first_chunk::<HEAD_BYTES>() else { return };
    let head = Head::new(*head);
    let groups = record[front_bytes(row.len() / 2)..].as_chunks::<GROUP_BYTES>().0;
    for (number, (group, values)) in groups.iter().zip(row.chunks_mut(2 * GROUP)).enumerate() {
        let bits = decode_group(head, group, number, side);
        for (value, bits) in values.as_chunks_mut::<2>().0.iter_mut().zip(bits) {
            *value = bits.to_le_bytes();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn there_and_back(values: &[u16]) -> (usize, usize) {
        let row: Vec<u8> = values.iter().flat_map(|bits| bits.to_le_bytes()).collect();
        let (mut record, mut side) = (vec![0xee; record_bytes(values.len())], vec![1, 2, 3, 4]);
        encode(&row, &mut record, &mut side);
        assert!(is_whole(&record, values.len(), &side), "{values:04x?}");
        let mut back = vec![0; row.len()];
        decode(&record, &side, &mut back);
        assert!(back == row, "{values:04x?}");
        (record.len(), side.len() - 4)
    }

    /// SplitMix64.
    fn random(state: &mut u64) -> u64 {
        *state = state.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let z = (*state ^ (*state >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb)
    }

    #[test]
    fn every_pattern_comes_back_alone_and_among_others() {
        let all: Vec<u16> = (0..=u16::MAX).collect();
        there_and_back(&all);
        for pattern in &all {
            let mut row = [0x3c12; 40];
            row[usize::from(pattern % 40)] = *pattern;
            there_and_back(&row);
        }
        for some in all.chunks(61) {
            there_and_back(some);
        }
    }

    #[test]
    fn rows_of_any_length_and_disorder_come_back() {
        let mut state = 1;
        for cols in (1..100).chain([500, 7168, COLS_MAX]) {
            for spread in [1, 8, 16, 18, 40, 256] {
                let row: Vec<u16> = (0..cols)
                    .map(|_| (random(&mut state) as u16 & 0x807f) | ((random(&mut state) % spread) << 7) as u16)
                    .collect();
                there_and_back(&row);
            }
        }
    }

    #[test]
    fn no_row_takes_more_than_its_bfloat16_and_a_front() {
        let mut state = 2;
        for spread in 1..=256 {
            let row: Vec<u16> = (0..4096).map(|_| ((random(&mut state) % spread) << 7) as u16).collect();
            let (record, side) = there_and_back(&row);
            assert!(record + side <= 2 * row.len() + front_bytes(row.len()), "spread {spread}: {record} + {side}");
        }
    }

    #[test]
    fn bell_shaped_weights_take_three_quarters() {
        let mut state = 3;
        let (mut before, mut after) = (0, 0);
        for _ in 0..50 {
            let row: Vec<u16> = (0..7168)
                .map(|_| {
                    let uniform = |state: &mut u64| (random(state) >> 11) as f64 / (1_u64 << 53) as f64;
                    let (a, b) = (1.0 - uniform(&mut state), uniform(&mut state));
                    let value = 0.02 * (-2.0 * a.ln()).sqrt() * (std::f64::consts::TAU * b).cos();
                    ((value as f32).to_bits() >> 16) as u16
                })
                .collect();
            let (record, side) = there_and_back(&row);
            before += 2 * row.len();
            after += record + side;
        }
        let ratio = after as f64 / before as f64;
        assert!(ratio <= 0.755, "{ratio}");
    }

    #[test]
    fn a_head_that_lies_is_seen_and_decodes_to_something() {
        let row: Vec<u8> =
            (0..400_u16).flat_map(|c| (0x3c00 + c * 64 * u16::from(c % 50 == 0)).to_le_bytes()).collect();
        let (mut record, mut side) = (vec![0; record_bytes(400)], Vec::new());
        encode(&row, &mut record, &mut side);
        for at in 0..HEAD_BYTES {
            for value in [0x40, 0xff] {
                let mut record = record.clone();
                record[at] ^= value;
                assert!(at == 6 || !is_whole(&record, 400, &side), "byte {at} ^ {value}");
                decode(&record, &side, &mut vec![0; 800]);
            }
        }
        assert!(!is_whole(&record, 400, &side[..side.len() - 4]));
        assert!(!is_whole(&record, 432, &side));
    }
}
