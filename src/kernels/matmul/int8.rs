//! Rows of [`int8`](super::super::int8).

use super::super::int8;
use super::super::lanes::{Lanes, prefetch};
use super::format::Format;

/// Rows of int8.
#[derive(Clone, Copy)]
pub(super) struct Int8<'a> {
    records: &'a [u8],
    record_bytes: usize,
    front_bytes: usize,
}

impl<'a> Int8<'a> {
    /// `records` has the rows of a matrix of `cols` columns.
    pub(super) fn new(records: &'a [u8], cols: usize) -> Self {
        let (record_bytes, front_bytes) = (int8::record_bytes(cols), int8::front_bytes(cols));
        Self { records, record_bytes, front_bytes }
    }
}

impl Format for Int8<'_> {
    /// Scales and codes.
    type Row = (*const u8, *const u8);
    /// The scale.
    type Group<L: Lanes> = L;

    const AHEAD: usize = 2048;

    #[inline(always)]
    fn row(self, row: usize) -> (*const u8, *const u8) {
        let record = self.records.as_ptr().wrapping_add(row * self.record_bytes);
        (record, record.wrapping_add(self.front_bytes))
    }

    #[inline(always)]
    fn prefetch(row: (*const u8, *const u8), column: usize) {
        if column.is_multiple_of(64) {
            prefetch(row.1.wrapping_add(column));
        }
    }

    #[inline(always)]
    unsafe fn group<L: Lanes>(row: (*const u8, *const u8), column: usize) -> L {
        // SAFETY: the group is in range, by the trait's contract, and has two bytes of scale.
        unsafe { L::splat(int8::widen(row.0.add(column / int8::GROUP * 2).cast::<u16>().read_unaligned())) }
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(row: (*const u8, *const u8), column: usize, scale: L) -> L {
        // SAFETY: the columns are in range, by the trait's contract.
        unsafe { L::load_i8(row.1.add(column).cast()).mul(scale) }
    }

    #[inline(always)]
    unsafe fn load_part<L: Lanes>(row: (*const u8, *const u8), column: usize, n: usize) -> L {
        let mut part = [0.0; super::LANES];
        // SAFETY: a record has zeroes up to a multiple of 64 columns, so sixteen codes are readable; n < 16.
        unsafe {
            Self::load::<L>(row, column, Self::group::<L>(row, column)).store_part(part.as_mut_ptr(), n);
            L::load(part.as_ptr())
        }
    }
}
