//! Maths on slices: one generic source over `lanes::Lanes`, compiled for each instruction set, and [`Compute`],
//! which picks one and splits outputs over threads. Kernels know shapes, not names.

#[cfg(target_endian = "big")]
compile_error!("weights are read as little-endian bytes: big-endian targets are not supported");

mod attention;
#[cfg(target_arch = "x86_64")]
mod avx2;
#[cfg(target_arch = "x86_64")]
mod avx512;
pub mod bf12;
mod buffer;
mod compute;
mod conv;
mod disjoint;
mod dispatch;
mod elementwise;
pub mod int8;
mod kda;
mod lanes;
mod limits;
mod math;
mod matmul;
mod mix;
#[cfg(target_arch = "aarch64")]
mod neon;
mod norm;
mod pool;
mod scalar;
mod slices;
mod split;

use std::fmt;
use std::str::FromStr;

pub use compute::Compute;
pub use elementwise::exp;
pub use limits::thread_seconds;

use crate::error::Error;

/// Stored weights of a matrix, row-major, little-endian, any alignment.
#[derive(Debug, Clone, Copy)]
pub enum Weights<'a> {
    /// `[rows, cols]` bfloat16.
    Bf16(&'a [u8]),
    /// `[rows, cols]` f32.
    F32(&'a [u8]),
    /// Codes `[rows, cols/2]` (low nibble = even column) and E8M0 scales `[rows, cols/32]`.
    Mxfp4 {
        /// Two codes a byte.
        packed: &'a [u8],
        /// One exponent for 32 columns: value = code · 2^(scale − 127).
        scale: &'a [u8],
    },
    /// `[rows, cols]` bfloat16 as [`bf12`].
    Bf12 {
        /// One a row, of [`bf12::record_bytes`].
        records: &'a [u8],
        /// The words that the records refer to.
        side: &'a [u8],
    },
    /// `[rows, cols]` quantized as [`int8`]: one record a row, of [`int8::record_bytes`].
    Int8(&'a [u8]),
}

/// A weight matrix `[rows, cols]`, used as `y = W x`.
#[derive(Debug, Clone, Copy)]
pub struct Matrix<'a> {
    /// Outputs.
    pub rows: usize,
    /// Inputs.
    pub cols: usize,
    /// The values.
    pub weights: Weights<'a>,
}

/// Instruction set to use; `None` in [`Compute::new`] means the fastest present.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Isa {
    /// The definition, in plain Rust.
    Scalar,
    /// x86-64 with AVX2 and FMA.
    Avx2,
    /// x86-64 with AVX-512 F, BW, DQ, VL.
    Avx512,
    /// AArch64.
    Neon,
}

impl Isa {
    /// Fastest first.
    pub const ALL: [Isa; 4] = [Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Scalar];

    /// `scalar`, `avx2`, `avx512` or `neon`: as parsed and printed.
    pub fn name(self) -> &'static str {
        match self {
            Isa::Scalar => "scalar",
            Isa::Avx2 => "avx2",
            Isa::Avx512 => "avx512",
            Isa::Neon => "neon",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

impl FromStr for Isa {
    type Err = Error;

    fn from_str(name: &str) -> Result<Self, Error> {
        Isa::ALL.into_iter().find(|isa| isa.name() == name).ok_or_else(|| {
            let names = Isa::ALL.map(Isa::name).join(", ");
            Error::usage(format!("unknown instruction set {name:?}, expected one of {names}"))
        })
    }
}
