//! Rows of [`bf12`](super::super::bf12), decoded in registers.

use super::super::bf12::{self, Head};
use super::super::lanes::{LANES, Lanes, prefetch};
use super::format::{Format, GROUP};

const _: () = assert!(GROUP == bf12::GROUP);

/// Bytes of a group.
const GROUP_BYTES: usize = GROUP / 2 * 3;

/// Rows of bf12.
#[derive(Clone, Copy)]
pub(super) struct Bf12<'a> {
    records: &'a [u8],
    side: &'a [u8],
    record_bytes: usize,
    front_bytes: usize,
}

/// Where a row is.
#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    flags: *const u8,
    groups: *const u8,
    exponents: &'static [u16; 32],
    head: *const u8,
    side: &'a [u8],
}

impl<'a> Bf12<'a> {
    /// `records` has the rows of a matrix of `cols` columns.
    pub(super) fn new(records: &'a [u8], side: &'a [u8], cols: usize) -> Self {
        let (record_bytes, front_bytes) = (bf12::record_bytes(cols), bf12::front_bytes(cols));
        Self { records, side, record_bytes, front_bytes }
    }
}

impl<'a> Format for Bf12<'a> {
    type Row = Row<'a>;
    /// The columns of a group, sixteen and sixteen.
    type Group<L: Lanes> = [L; 2];

    const AHEAD: usize = 42 * GROUP;

    #[inline(always)]
    fn row(self, row: usize) -> Row<'a> {
        let record = &self.records[row * self.record_bytes..][..self.record_bytes];
        let head = record.as_ptr();
        let exponents = &bf12::EXPONENTS.0[usize::from(record[6])];
        let flags = head.wrapping_add(8);
        Row { flags, groups: head.wrapping_add(self.front_bytes), exponents, head, side: self.side }
    }

    #[inline(always)]
    fn prefetch(row: Row<'a>, column: usize) {
        prefetch(row.groups.wrapping_add(column / GROUP * GROUP_BYTES));
    }

    #[inline(always)]
    unsafe fn group<L: Lanes>(row: Row<'a>, column: usize) -> [L; 2] {
        // SAFETY: `column` is a multiple of 32 and in range, by the trait's contract; the row has a flag for its group, and
        // the 48 bytes of it.
        unsafe {
            std::hint::assert_unchecked(column.is_multiple_of(GROUP));
            let number = column / GROUP;
            let group = row.groups.add(number * GROUP_BYTES);
            if *row.flags.add(number / 8) >> (number % 8) & 1 == 0 {
                L::load_bf12(group, row.exponents)
            } else {
                let values = with_exceptions(row.head, group, number, row.side);
                let p = values.as_ptr().cast::<u8>();
                [L::load_bf16(p), L::load_bf16(p.add(2 * LANES))]
            }
        }
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(_: Row<'a>, column: usize, group: [L; 2]) -> L {
        if column % GROUP < LANES { group[0] } else { group[1] }
    }

    #[inline(always)]
    unsafe fn load_pair<L: Lanes>(_: Row<'a>, _: usize, group: [L; 2]) -> [L; 2] {
        group
    }

    #[inline(always)]
    unsafe fn load_part<L: Lanes>(row: Row<'a>, column: usize, n: usize) -> L {
        let mut part = [0.0; LANES];
        // SAFETY: the columns are in range, by the trait's contract; n < 16.
        unsafe {
            let group = Self::group::<L>(row, column / GROUP * GROUP);
            Self::load::<L>(row, column, group).store_part(part.as_mut_ptr(), n);
            L::load(part.as_ptr())
        }
    }
}

/// A group that the fast way does not decode.
///
/// # Safety
/// Eight bytes at `head` and 48 at `group` are readable.
#[cold]
#[inline(never)]
unsafe fn with_exceptions(head: *const u8, group: *const u8, number: usize, side: &[u8]) -> [u16; GROUP] {
    // SAFETY: by this function's contract.
    let (head, group) = unsafe { (*head.cast(), &*group.cast()) };
    bf12::decode_group(Head::new(head), group, number, side)
}
