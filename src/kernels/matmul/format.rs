//! How stored weights become lanes: bf16, f32 and MXFP4 behind one trait, so that each product is written once.

use super::super::lanes::{LANES, Lanes, prefetch};

/// Columns that share a scale in MXFP4; in the other formats just a convenient step.
pub(super) const GROUP: usize = 32;

/// Weights `[rows, cols]` of one format. Columns passed to it are multiples of 16.
pub(super) trait Format: Copy + Sync {
    /// Where a row begins.
    type Row: Copy;
    /// What the 32 columns of a group share.
    type Group<L: Lanes>: Copy;

    /// How many columns ahead a row is prefetched: about 2 KiB.
    const AHEAD: usize;

    /// Row number `row`, which is in range.
    fn row(self, row: usize) -> Self::Row;

    /// Prefetches the group that begins at `column`, if there is one.
    fn prefetch(row: Self::Row, column: usize);

    /// What the group that begins at `column` shares.
    ///
    /// # Safety
    /// As of [`Lanes`]; `column` is a multiple of 32 and in range.
    unsafe fn group<L: Lanes>(row: Self::Row, column: usize) -> Self::Group<L>;

    /// Columns `column .. column + 16`, which lie in `group`.
    ///
    /// # Safety
    /// As of [`Lanes`]; the columns are in range.
    unsafe fn load<L: Lanes>(row: Self::Row, column: usize, group: Self::Group<L>) -> L;

    /// All 32 columns of the group that begins at `column`: [`Format::load`] twice.
    ///
    /// # Safety
    /// As of [`Format::load`].
    #[inline(always)]
    unsafe fn load_pair<L: Lanes>(row: Self::Row, column: usize, group: Self::Group<L>) -> [L; 2] {
        // SAFETY: by this method's contract.
        unsafe { [Self::load(row, column, group), Self::load(row, column + LANES, group)] }
    }

    /// Columns `column .. column + n`, n < 16; the other lanes +0.0.
    ///
    /// # Safety
    /// As of [`Lanes`]; the columns are in range.
    unsafe fn load_part<L: Lanes>(row: Self::Row, column: usize, n: usize) -> L;
}

/// Rows of bfloat16.
#[derive(Clone, Copy)]
pub(super) struct Bf16<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) cols: usize,
}

impl Format for Bf16<'_> {
    type Row = *const u8;
    type Group<L: Lanes> = ();

    const AHEAD: usize = 1024;

    #[inline(always)]
    fn row(self, row: usize) -> *const u8 {
        self.bytes.as_ptr().wrapping_add(row * self.cols * 2)
    }

    #[inline(always)]
    fn prefetch(row: *const u8, column: usize) {
        prefetch(row.wrapping_add(2 * column));
    }

    #[inline(always)]
    unsafe fn group<L: Lanes>(_: *const u8, _: usize) {}

    #[inline(always)]
    unsafe fn load<L: Lanes>(row: *const u8, column: usize, _: ()) -> L {
        // SAFETY: the columns are in range, by the trait's contract.
        unsafe { L::load_bf16(row.add(2 * column)) }
    }

    #[inline(always)]
    unsafe fn load_pair<L: Lanes>(row: *const u8, column: usize, _: ()) -> [L; 2] {
        // SAFETY: the columns are in range, by the trait's contract.
        unsafe { L::load_bf16_pair(row.add(2 * column)) }
    }

    #[inline(always)]
    unsafe fn load_part<L: Lanes>(row: *const u8, column: usize, n: usize) -> L {
        // SAFETY: the columns are in range, by the trait's contract.
        unsafe { L::load_bf16_part(row.add(2 * column), n) }
    }
}

/// Rows of f32.
#[derive(Clone, Copy)]
pub(super) struct F32<'a> {
    pub(super) bytes: &'a [u8],
    pub(super) cols: usize,
}

impl Format for F32<'_> {
    type Row = *const u8;
    type Group<L: Lanes> = ();

    const AHEAD: usize = 512;

    #[inline(always)]
    fn row(self, row: usize) -> *const u8 {
        self.bytes.as_ptr().wrapping_add(row * self.cols * 4)
    }

    #[inline(always)]
    fn prefetch(row: *const u8, column: usize) {
        prefetch(row.wrapping_add(4 * column));
        prefetch(row.wrapping_add(4 * column + 64));
    }

    #[inline(always)]
    unsafe fn group<L: Lanes>(_: *const u8, _: usize) {}

    #[inline(always)]
    unsafe fn load<L: Lanes>(row: *const u8, column: usize, _: ()) -> L {
        // SAFETY: the columns are in range, by the trait's contract.
        unsafe { L::load(row.add(4 * column).cast()) }
    }

    #[inline(always)]
    unsafe fn load_part<L: Lanes>(row: *const u8, column: usize, n: usize) -> L {
        // SAFETY: the columns are in range, by the trait's contract.
        unsafe { L::load_part(row.add(4 * column).cast(), n) }
    }
}

/// Rows of MXFP4; `cols` is a multiple of 32.
#[derive(Clone, Copy)]
pub(super) struct Mxfp4<'a> {
    pub(super) packed: &'a [u8],
    pub(super) scale: &'a [u8],
    pub(super) cols: usize,
}

impl Format for Mxfp4<'_> {
    /// Codes and scales.
    type Row = (*const u8, *const u8);
    type Group<L: Lanes> = L::Mxfp4Table;

    const AHEAD: usize = 4096;

    #[inline(always)]
    fn row(self, row: usize) -> (*const u8, *const u8) {
        let packed = self.packed.as_ptr().wrapping_add(row * (self.cols / 2));
        (packed, self.scale.as_ptr().wrapping_add(row * (self.cols / GROUP)))
    }

    #[inline(always)]
    fn prefetch(row: (*const u8, *const u8), column: usize) {
        // A cache line holds four groups.
        if column.is_multiple_of(4 * GROUP) {
            prefetch(row.0.wrapping_add(column / 2));
        }
    }

    #[inline(always)]
    unsafe fn group<L: Lanes>(row: (*const u8, *const u8), column: usize) -> L::Mxfp4Table {
        // SAFETY: the group is in range, by the trait's contract.
        unsafe { L::mxfp4_table(*row.1.add(column / GROUP)) }
    }

    #[inline(always)]
    unsafe fn load<L: Lanes>(row: (*const u8, *const u8), column: usize, table: L::Mxfp4Table) -> L {
        // SAFETY: the columns are in range, by the trait's contract.
        unsafe { L::load_mxfp4(row.0.add(column / 2), table) }
    }

    #[inline(always)]
    unsafe fn load_part<L: Lanes>(_: (*const u8, *const u8), _: usize, _: usize) -> L {
        unreachable!("an MXFP4 row is whole groups")
    }
}
