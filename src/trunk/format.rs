//! How the trunk's matrices are held: as released, or in one of the forms that take less memory.

use crate::checkpoint::Dtype;
use crate::kernels::{bf12, int8};

/// Form of the trunk's bfloat16 matrices. Vectors and small matrices stay as they are in every form.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum TrunkFormat {
    /// As released.
    #[default]
    Bf16,
    /// Lossless, three quarters of the bytes.
    Bf12,
    /// Quantized, about half of the bytes.
    Int8,
}

/// Columns below which a matrix is left alone.
const COLS_MIN: usize = 64;

impl TrunkFormat {
    /// As `--trunk` and the file's name have it.
    pub fn name(self) -> &'static str {
        match self {
            TrunkFormat::Bf16 => "bf16",
            TrunkFormat::Bf12 => "bf12",
            TrunkFormat::Int8 => "int8",
        }
    }

    /// As results are labelled: says so where the weights are not the released ones.
    pub fn label(self) -> &'static str {
        match self {
            TrunkFormat::Bf16 => "bf16",
            TrunkFormat::Bf12 => "bf12",
            TrunkFormat::Int8 => "int8 (quantized)",
        }
    }

    /// Rows and columns of a tensor that this form changes; `None` for one that stays as it is.
    ///
    /// A router's matrix is not quantized: it decides which experts are used, and is small.
    pub(crate) fn changes(self, name: &str, dtype: Dtype, shape: &[usize]) -> Option<(usize, usize)> {
        let &[rows, cols] = shape else { return None };
        let is_router = name.ends_with(".gate.weight");
        let is_large = rows > 1 && (COLS_MIN..=bf12::COLS_MAX).contains(&cols);
        let changed = self == TrunkFormat::Bf12 || self == TrunkFormat::Int8 && !is_router;
        (changed && is_large && dtype == Dtype::Bf16).then_some((rows, cols))
    }

    /// Bytes of a row of `cols` values.
    pub(crate) fn record_bytes(self, cols: usize) -> usize {
        match self {
            TrunkFormat::Bf16 => 2 * cols,
            TrunkFormat::Bf12 => bf12::record_bytes(cols),
            TrunkFormat::Int8 => int8::record_bytes(cols),
        }
    }

    /// Bytes beside the records, for planning.
    pub(crate) fn side_bytes_expected(self, records: u64) -> u64 {
        if self == TrunkFormat::Bf12 { bf12::side_bytes_expected(records) } else { 0 }
    }

    /// A row of bfloat16 in this form. `None` for a value that it cannot hold.
    pub(crate) fn encode(self, row: &[u8], record: &mut [u8], side: &mut Vec<u8>) -> Option<()> {
        match self {
            TrunkFormat::Bf16 => record.copy_from_slice(row),
            TrunkFormat::Bf12 => bf12::encode(row, record, side),
            TrunkFormat::Int8 => return int8::encode(row, record),
        }
        Some(())
    }
}
