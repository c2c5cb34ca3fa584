//! Maths on slices: one generic source over [`lanes::Lanes`], one table of safe functions an instruction set, and
//! [`Compute`], which splits outputs over threads. Kernels know shapes, not names.

mod attention;
mod compute;
mod conv;
mod disjoint;
mod dispatch;
mod elementwise;
mod kda;
mod lanes;
mod math;
mod matmul;
mod mix;
mod norm;
mod scalar;
mod slices;

pub use compute::Compute;

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
